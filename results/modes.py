"""LLM-JEPA's three forms, in one process: tokens and time of a training step on real pairs, interleaved, medians.

    python results/modes.py --files FOLDER [--repeats 9]       # FOLDER holds synth_train and spider_train (.jsonl.xz); writes results/modes.md

The three have the same loss and gradients (tests/test_objectives.py). `ntp` is plain fine-tuning, the price that a JEPA loss is measured by.
One thread; forward and backward of 64 pairs, a tokenizer of 512 (NL-RX) and 4,096 (Spider) trained on the data.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import data  # noqa: E402
from model import DECODER, Model, ModelConfig  # noqa: E402
from objectives import LlmJepa, Ntp  # noqa: E402

FORMS = ("one-forward", "two-row", "three-row", "ntp")


def measure(files, name, vocab, chat, shape, repeats):
    """-> {form: (tokens a pair, [seconds of each step])}"""
    with tempfile.TemporaryDirectory() as cache:
        corpus = data.open_corpus(str(Path(files) / f"{name}_train.jsonl.xz"), vocab=vocab, cache=cache)
        batches = data.Batches(corpus, 2, 64, 0, max_length=256, header=chat == "shared-header")
        found = {form: [0, []] for form in FORMS}
        torch.manual_seed(0)
        model = Model(ModelConfig(vocab=corpus.special.vocab, **shape, **DECODER, max_length=1024, causal=True, pool="last"))
        objectives = {form: Ntp(model, Ntp.Config()) if form == "ntp" else LlmJepa(model, LlmJepa.Config(mode=form)) for form in FORMS}
        for step in range(repeats + 1):
            examples = batches.examples(step)
            for form in np.roll(FORMS, step):                            # no form is always the first after another
                objective = objectives[form]
                batch = objective.collate(examples, batches.rng(step), objective.config, corpus.special)
                start = time.perf_counter()
                objective(batch)[0].backward()
                seconds = time.perf_counter() - start
                objective.zero_grad(set_to_none=True)
                if step:                                                 # the first step warms up
                    found[form][0] += len(batch["packed"].tokens) / 64 / repeats
                    found[form][1].append(seconds)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", required=True)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = ["# modes", "", f"`python results/modes.py --files FOLDER --repeats {options.repeats}`: tokens of a pair, and seconds of forward and "
             "backward of 64 pairs, medians, with their ratio to one-forward and its range over the interleaved steps. One thread on a machine "
             f"that others used, torch {torch.__version__}.", "",
             "| data | model | views | form | tokens a pair | tokens, ratio | seconds a step | seconds, ratio | its range |",
             "|---|---|---|---|---:|---:|---:|---:|---:|"]
    for title, name, vocab in (("NL-RX-SYNTH", "synth", 512), ("Spider", "spider", 4096)):
        for shape in (dict(width=128, layers=3, heads=4, hidden=512), dict(width=256, layers=4, heads=4, hidden=1024)):
            for chat in ("plain", "shared-header"):
                found = measure(options.files, name, vocab, chat, shape, options.repeats)
                tokens, seconds = found["one-forward"]
                for form in FORMS:
                    ratios = sorted(b / a for a, b in zip(seconds, found[form][1]))
                    lines.append(f"| {title} | {shape['width']} x {shape['layers']} | {chat} | {form} | {found[form][0]:.1f} | {found[form][0] / tokens:.2f} | "
                                 f"{statistics.median(found[form][1]):.3f} | {statistics.median(found[form][1]) / statistics.median(seconds):.2f} | "
                                 f"{ratios[0]:.2f} to {ratios[-1]:.2f} |")
                    print(lines[-1], flush=True)
    (ROOT / "results" / "modes.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
