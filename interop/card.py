"""The README.md of an exported folder: a model card, in the form that model hubs read."""

import time
from pathlib import Path

import evaluate
from corpora.folder import hash_of_file, read_results

CARD = """---
library_name: {library}
pipeline_tag: {task}
tags:
{tags}
---

# {name}

{what} of {layers} layers and width {width}, {parameters:,} parameters, written by nanoJEPA. Its
sentence vectors come from the pooling `{pool}`. No licence is named: that is for the publisher.

```python
from sentence_transformers import SentenceTransformer

vectors = SentenceTransformer("{name}").encode(["A dog runs.", "Ein Hund läuft."])
```

{more}
## Training

{training}

## Measured by nanoJEPA itself

{measured}

## Limits

{limits}
"""
STATES = """The states of the tokens, without the pooling:

```python
from transformers import AutoModel, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
rows = tokenizer(["A dog runs."], truncation=True, return_tensors="pt")
states = AutoModel.from_pretrained("{name}")(**rows).last_hidden_state
```
"""
ANSWER = """And its answers:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
chat = tokenizer.apply_chat_template([{{"role": "user", "content": "lines that have a digit"}}],
                                     add_generation_prompt=True, return_dict=True,
                                     return_tensors="pt")
found = AutoModelForCausalLM.from_pretrained("{name}").generate(**chat, max_new_tokens=100)
print(tokenizer.decode(found[0, chat["input_ids"].shape[1]:], skip_special_tokens=True))
```
"""


def card(run, name, limits):
    """A RunFolder, the folder's name, and what its vectors cannot do, a sentence each -> text."""
    config = run.model.config
    tags = ["sentence-transformers", "sentence-similarity", "feature-extraction", "nanojepa"]
    if config.causal:
        tags.append("text-generation")
    if run.config.get("objective"):
        tags.append(run.config["objective"])
    return CARD.format(
        library="transformers" if config.causal else "sentence-transformers",
        task="text-generation" if config.causal else "sentence-similarity",
        tags="\n".join(f"- {tag}" for tag in tags), name=name,
        what="A decoder" if config.causal else "An encoder", layers=config.layers,
        width=config.width, parameters=sum(weight.numel() for weight in run.model.parameters()),
        pool=config.pool, more=(ANSWER if config.causal else STATES).format(name=name),
        training=training(run), measured=measured(run),
        limits="\n".join(f"- {limit}" for limit in limits))


def training(run):
    """The objective, the data, the steps and the command, as text."""
    if "imported" in run.first:
        return f"Imported from `{run.first['imported']['name']}`, and not trained here."
    config = run.config
    source = f", from the weights of `{Path(config['init']).name}`" if config.get("init") else ""
    return (f"Objective `{config['objective']}` on the data `{Path(config['data']).name}`{source}: "
            f"{config.get('steps')} steps of {config.get('batch')} rows.\n\n"
            f"```sh\n{run.first.get('command', '')}\n```")


def measured(run):
    """The run's eval.json as a table, with its rows and its date, as text."""
    path = run.folder / "eval.json"
    results = read_results(path)
    if not results:
        return "Nothing: the run has no eval.json, which `python evaluate.py` writes."
    model = hash_of_file(run.folder / "model.pt")
    if not model.startswith(results.pop("model", "none")):
        return "Nothing: eval.json is of another model. `python evaluate.py` measures this one."
    rows = results.pop("rows")
    date = time.strftime("%Y-%m-%d", time.gmtime(path.stat().st_mtime))
    table = evaluate.table(results, rest="in the run's eval.json")
    return f"On {rows}, {date}:\n\n```\n{table}\n```"
