"""Experiments, their records, and what compares and measures runs.

    python -m results compare RUN RUN ...     mean and deviation over seeds, paired tests
    python -m results inspect --objective X   one batch as text and as a mask
    python -m results flops --objective X     compute of a step; --match RUN: steps that equal a run
    python -m results plots RUN ...           curves, spectrum, t-SNE, attention, nearest tokens
    python -m results answers RUN RUN ...     prompts, gold texts, and what each run writes
    python -m results peers                   steps and encoding against other libraries
    python -m results gpu                     kernels, steps, memory and tiles; toy size without one
    python -m results diagrams                MEXMA's rows and the passes of hybrid, drawn
    python -m results readme                  recorded numbers, written into both README.md
    python -m results claims                  the papers' claims beside what was measured
    python -m results mixtures FOLDER OUT     the files of the experiments on real text
    python -m results EXPERIMENT              an experiment, done and written to its page

Each has a --help of its own. Experiments: {names}.
"""

import importlib
import sys

from corpora.program import BadInput, did_you_mean, exit_status

from .tables import DATA

EXPERIMENTS = DATA["experiments"]
# The file and the function of each command.
TOOLS = {name: (name, "main") for name in
         ("compare", "inspect", "flops", "diagrams", "readme", "claims", "mixtures")}
TOOLS |= {"plots": ("pictures", "main"), "answers": ("compare", "answers"),
          "peers": ("bench", "peers"), "gpu": ("bench", "gpu")}


def work(arguments):
    name = arguments[0] if arguments else "--help"
    if name in ("--help", "-h"):
        print(__doc__.strip().replace("{names}", ", ".join(EXPERIMENTS)))
        return None
    # A file is imported only when its command runs: some files need more packages than the core.
    if name in EXPERIMENTS:
        return importlib.import_module("results.run").main(name, arguments[1:])
    if name not in TOOLS:
        near = did_you_mean(name, [*TOOLS, *EXPERIMENTS], ": see python -m results --help")
        raise BadInput(f"{name!r} is no command and no experiment{near}")
    file, function = TOOLS[name]
    return getattr(importlib.import_module(f"results.{file}"), function)(arguments[1:])


if __name__ == "__main__":
    sys.exit(exit_status(work, sys.argv[1:]))
