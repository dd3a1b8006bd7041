"""Experiments, and what they found (results/README.md).

look      python -m results show                 the experiments by paper, a line each
          python -m results show NAME            a sentence, a table, and tests
          python -m results board [CLAIM]        every claim of the papers, or all about one
          python -m results plot NAME            a picture of README.md: translations or health
repeat    python -m results NAME --files FOLDER  run what an experiment has not recorded yet
          python -m results make-data PUBLIC OUT  make its data files
          python -m results readme               write recorded numbers into both README.md
compute   python -m results flops --match RUN    the steps that have the compute of another run
machine   python -m results peers                our training steps against transformers'
          python -m results gpu                  show that everything works on a GPU, and how fast

Each command has its own --help.
"""

import importlib

from base.common import BadInput, did_you_mean, run_program

# {command: its file}, which is imported when it is needed: some need requirements-dev.txt.
COMMANDS = {"show": "show", "board": "show", "readme": "show", "plot": "plots",
            "flops": "flops", "peers": "peers", "gpu": "gpu", "make-data": "make_data"}


def main(words):
    name, *rest = words or ["--help"]
    if name in ("--help", "-h"):
        return print(__doc__.strip())
    if name in COMMANDS:
        module = importlib.import_module(f"results.{COMMANDS[name]}")
        return getattr(module, f"{name.replace('-', '_')}_command")(rest)
    from .compare import EXPERIMENTS
    if name in EXPERIMENTS:
        return importlib.import_module("results.run").run_command(name, rest)
    raise BadInput(f"{name!r} is not a command or an experiment"
                   f"{did_you_mean(name, [*COMMANDS, *EXPERIMENTS])} (see python -m results "
                   "show --all)")


if __name__ == "__main__":
    run_program(main)
