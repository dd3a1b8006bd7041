"""Experiments, their records, and what compares and measures runs.

    python -m results compare RUN RUN ...     mean and deviation over seeds, paired tests
    python -m results inspect --objective X   one batch as text and as a mask
    python -m results flops --objective X     compute of a step; --match RUN: steps that equal a run
    python -m results steps                   where a step's time goes, how it grows
    python -m results memory                  which batch fits which GPU, computed
    python -m results plots RUN ...           spectrum, vectors, cosines, curves
    python -m results peers                   steps, encoding, data, writing against other people's
    python -m results gpu                     all that a GPU must show; at toy size without one
    python -m results picture                 draws the README's picture
    python -m results readme                  puts recorded numbers into both README.md
    python -m results claims                  the papers' claims beside what was measured
    python -m results mixtures FOLDER OUT     the files of the experiments on real text
    python -m results EXPERIMENT              does an experiment, and writes its page

Each has a --help of its own. Experiments: {names}.
"""

import importlib
import sys

from corpora.program import BadInput, did_you_mean, exit_status, wing_imports

with wing_imports():
    from . import run

TOOLS = ("compare", "inspect", "flops", "memory", "plots", "peers", "gpu", "picture", "readme",
         "mixtures", "claims", "steps")


def work(arguments):
    name = arguments[0] if arguments else "--help"
    if name in ("--help", "-h"):
        print(__doc__.strip().replace("{names}", ", ".join(run.ALL)))
        return None
    if name in run.ALL:
        return run.main(name, arguments[1:])
    if name not in TOOLS:
        near = did_you_mean(name, [*TOOLS, *run.ALL], ": see python -m results --help")
        raise BadInput(f"{name!r} is no command and no experiment{near}")
    # Only now: plots, steps and peers need more packages than the others.
    return importlib.import_module(f"results.{name}").main(arguments[1:])


if __name__ == "__main__":
    sys.exit(exit_status(work, sys.argv[1:]))
