"""The model card of an exported folder, README.md: what the run recorded, and nothing else."""

import contextlib

from base.common import BadInput
from harness import runs, screen
from harness.facts import facts_of

PAGE = """\
---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
---

# A model of nanoJEPA

{facts}
Use it, in this folder:

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(".")
embeddings = model.encode(["A dog.", "Ein Hund."])
print(embeddings.shape)
print(model.similarity(embeddings, embeddings))
```
"""


def model_card(run):
    """Return the model card of a RunFolder: its facts, and what evaluate.py found."""
    model = run.model.config
    last = [record for record in runs.log_records(run.folder) if "loss" in record][-1:] or [{}]
    facts = facts_of(run.header, last[0])
    facts["model"] = (f"{model.layers} layers of width {model.width}, pooling {model.pool}, at "
                      f"most {model.longest_row:,} tokens")
    if init := run.config.get("init"):
        with contextlib.suppress(BadInput, KeyError):  # it is on another machine, or no import
            facts["starts from"] += f", imported from {runs.read_header(init)['imported']}"
    lines = [f"{name + ':':15}{text}" for name, text in facts.items()]
    results = runs.read_results(run.folder / "eval.json")
    if results.pop("model", "") == run.model_hash[:8]:  # and not of an earlier step
        lines += ["", f"on {results.pop('rows')}", *screen.table(results).splitlines()]
    # A foreign run can name anything: as code, it is shown as it is.
    return PAGE.format(facts="".join(f"    {''.join(filter(str.isprintable, line))}\n"
                                     for line in lines))
