"""The model card of an exported folder, README.md: what the run recorded, and nothing else."""

from base.common import BadInput
from harness import runs, screen

HEAD = """\
---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
---
"""
USE = """\
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
    """Return the model card of a RunFolder. Facts that it lacks are left out."""
    header, config, model = run.header, run.config, run.model.config
    facts = {"objective": config.get("objective"), "trained by": header.get("command"),
             "starts from": origin(run)}
    if "rows" in header:
        train, held_out = header["rows"]
        columns = [*header["columns"], *["..."] * (header["views"] > 2)]  # the log has two of them
        where = f"in {config['eval_data']}" if config.get("eval_data") else "held out"
        facts["data"] = (f"{config['data']}: {train:,} rows of {', '.join(columns)}, and "
                         f"{held_out:,} {where}")
    steps = [record["step"] for record in runs.log_records(run.folder) if "step" in record]
    facts["steps"] = f"{steps[-1]:,}" if steps else None
    facts["model"] = (f"{model.layers} layers of width {model.width}, pooling {model.pool}, at "
                      f"most {model.max_tokens:,} tokens")
    parts = [HEAD, "# A model of nanoJEPA\n",
             block(f"{name + ':':13}{text}" for name, text in facts.items() if text)]
    results = runs.read_results(run.folder / "eval.json")
    if results.pop("model", "") == run.model_hash[:8]:  # and not of an earlier step
        rows = results.pop("rows")
        names = [name for name in results if name in screen.METRICS] + screen.others(results)
        table = screen.table({name: results[name] for name in names})
        parts += ["What evaluate.py found:\n", block([f"on {rows}", *table.splitlines()])]
    return "\n".join([*parts, USE])


def origin(run):
    """Return the model that a run started from."""
    init = run.config.get("init")
    if not init:
        return run.header.get("imported") or "random weights"
    try:
        header = runs.read_header(init)
    except BadInput:  # it is on another machine
        return init
    return f"{init}, imported from {header['imported']}" if "imported" in header else init


def block(lines):
    """Return lines as Markdown that shows them as they are: a foreign run can name anything."""
    return "".join(f"    {''.join(filter(str.isprintable, str(line)))}\n" for line in lines)
