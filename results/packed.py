"""Packed against padded, in one process: the training step of the same encoder on the same sentences, interleaved, medians.

    python results/packed.py [--repeats 9]                     # writes results/packed.md

The padded step is the usual one: a (R, L) grid, padded to the longest row from the embedding to the last block, with a key mask.
Both give the same states (checked).
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))
from model import Model, ModelConfig, Packed  # noqa: E402


def padded_states(model, grid, real):
    """The same encoder (post-norm, learned positions) on a padded grid: (R, L) -> (R, L, D)."""
    x = model.norm(model.embed(grid) + model.place.weight[:grid.shape[1]])
    for block in model.blocks:
        q, k, v = (part.unflatten(-1, (block.config.heads, -1)).transpose(1, 2) for part in block.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, real[:, None, None]).transpose(1, 2).flatten(2)
        x = block.norm1(x + block.out(out))
        x = block.norm2(x + block.feed(x))
    return x


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rows", type=int, default=256)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    tail = np.clip(rng.lognormal(np.log(24), 0.9, options.rows), 2, 200).astype(int)
    cases = {"lengths 8-40": rng.integers(8, 41, options.rows), f"long tail (mean {tail.mean():.0f}, max {tail.max()})": tail}
    lines = ["# packed", "", f"`python results/packed.py --repeats {options.repeats}`: forward and backward of {options.rows} rows, tokens a second, medians "
             f"of interleaved steps, and the range of the ratio over pairs of steps. {torch.get_num_threads()} threads, torch {torch.__version__}.", "",
             "| model | lengths | packed, tokens/s | padded, tokens/s | ratio | its range |", "|---|---|---:|---:|---:|---:|"]
    for width, layers in ((128, 3), (256, 4)):
        torch.manual_seed(0)
        model = Model(ModelConfig(vocab=4096, width=width, layers=layers, heads=4, hidden=4 * width, dropout=0.0))
        for name, lengths in cases.items():
            rows = [rng.integers(5, 4096, n) for n in lengths]
            packed = Packed.of(rows)
            real = torch.arange(int(lengths.max())) < torch.from_numpy(lengths)[:, None]
            grid = torch.zeros(real.shape, dtype=torch.int64)
            grid[real] = packed.tokens
            weight = torch.randn(len(packed.tokens), width)
            steps = {"packed": lambda: model(packed), "padded": lambda: padded_states(model, grid, real)[real]}
            assert (steps["packed"]() - steps["padded"]()).abs().max() < 1e-4
            seconds = {kind: [] for kind in steps}
            for _ in range(options.repeats + 1):
                for kind, states in steps.items():
                    start = time.perf_counter()
                    (states() * weight).sum().backward()
                    seconds[kind].append(time.perf_counter() - start)
            packed_s, padded_s = (seconds[kind][1:] for kind in ("packed", "padded"))         # the first run warms up
            ratios = sorted(b / a for a, b in zip(packed_s, padded_s))
            speed = [len(packed.tokens) / statistics.median(s) for s in (packed_s, padded_s)]
            lines.append(f"| {width} x {layers} | {name} | {speed[0]:,.0f} | {speed[1]:,.0f} | "
                         f"{statistics.median(padded_s) / statistics.median(packed_s):.2f} | {ratios[0]:.2f} to {ratios[-1]:.2f} |")
            print(lines[-1], flush=True)
    (Path(__file__).parent / "packed.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
