"""How large a batch fits a GPU: computed from the parameters and from what autograd keeps.

    python -m results memory --objective mexma          # and other flags of train.py

The bytes of one step are counted on this machine, in bfloat16, and scaled to larger batches by
their tokens. It is no measurement of a GPU: kernels keep a little more or less.
"""

import torch

import train
from corpora.program import Parser
from model import SIZES

from .compare import markdown

GPUS = {"8 GB": 8e9, "24 GB": 24e9, "80 GB": 80e9}
USABLE = 0.9  # of the memory; the rest is the allocator's and the driver's


def kept_bytes(run, parts):
    """Bytes that the forward of one step keeps for its backward, parameters apart."""
    own = {parameter.data_ptr() for parameter in run.objective.parameters()}
    kept = {}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        with torch.autocast("cpu", torch.bfloat16):
            for part in parts:
                run.objective(part)
    return sum(kept.values())


def need(words, size, rows):
    """Flags of train.py -> (parameters, bytes beside the batch, bytes of one example)."""
    words = [*words, "--size", size, "--batch", str(rows), "--device", "cpu"]
    run = train.Run(train.parse(words), writes=False)
    trained = sum(p.numel() for p in run.objective.parameters() if p.requires_grad)
    count = sum(p.numel() for p in run.objective.parameters())
    # Weights, and of what is trained also gradients and Adam's two moments, all in float32.
    fixed = 4 * count + 12 * trained
    return count, fixed, kept_bytes(run, run.make_batch(0)) / rows


def main(arguments):
    parser = Parser("python -m results memory", __doc__, "and flags of train.py")
    parser.add_argument("--rows", type=int, default=8, help="examples of the step that is counted")
    options, rest = parser.parse_known_args(arguments)
    titles = ["size", "parameters, M", "beside the batch, GB", "an example, MB", *GPUS]
    rows = []
    for size in SIZES:
        count, fixed, example = need(rest, size, options.rows)
        cells = [size, f"{count / 1e6:.0f}", f"{fixed / 1e9:.2f}", f"{example / 1e6:.1f}"]
        for memory in GPUS.values():
            batch = int((USABLE * memory - fixed) / example)
            cells.append(str(batch) if batch > 0 else "no")
        rows.append(cells)
    print(*markdown(titles, rows), sep="\n")
