"""What the vocabulary loss holds in memory and how long it takes, beside the plain cross-entropy, at XLM-R's vocabulary; writes results/vocabulary.md.

    python results/vocabulary.py [--rows 10500 1050]

Each case is a fresh process on one thread: peak resident memory while loss and gradients are made, less what was there before (weights and
inputs). `over the gradients` is also less the gradients of states, weights and bias, which any way of computing them must hold.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from objectives import vocabulary_loss  # noqa: E402

VOCAB, WIDTH = 250_002, 64


def peak():
    """Peak resident memory of this process in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def measure(way, rows):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    states, weight, bias = torch.randn(rows, WIDTH), torch.randn(VOCAB, WIDTH) * 0.05, torch.zeros(VOCAB)
    inputs, targets = [x.requires_grad_() for x in (states, weight, bias)], torch.randint(0, VOCAB, (rows,))
    before, start = peak(), time.perf_counter()
    if way == "chunked":
        loss = vocabulary_loss(*inputs, targets, rows)
    else:
        loss = F.cross_entropy(F.linear(*inputs), targets)
    loss.backward()
    grown = peak() - before
    return dict(loss=loss.item(), grown=grown, over=grown - sum(x.grad.nbytes for x in inputs) / 1e9, seconds=time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs=2, default=(10_500, 1_050), help="rows for the chunked loss; and for both beside each other")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure[0], int(options.measure[1]))))
        return
    lines = ["# vocabulary", "", f"`python results/vocabulary.py`: loss and gradients over {VOCAB:,} words, width {WIDTH}, float32, one thread, "
             f"torch {torch.__version__}. The logits of {options.rows[0]:,} rows alone would be {options.rows[0] * VOCAB * 4 / 1e9:.1f} GB, and the "
             "plain way holds them about three times.", "",
             "| rows | way | loss | GB grown | GB over the gradients | seconds |", "|---:|---|---:|---:|---:|---:|"]
    for rows, way in ((options.rows[0], "chunked"), (options.rows[1], "chunked"), (options.rows[1], "plain")):
        done = subprocess.run([sys.executable, __file__, "--measure", way, str(rows)], capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        lines.append(f"| {rows:,} | {way} | {found['loss']:.4f} | {found['grown']:.2f} | {found['over']:.2f} | {found['seconds']:.1f} |")
        print(lines[-1], flush=True)
    (ROOT / "results" / "vocabulary.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
