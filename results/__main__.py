"""Experiments, their records, and tools that look at runs.

    python -m results show [NAME]             list the experiments, or print one
    python -m results board                   the claims of the papers beside our measurements
    python -m results NAME --files FOLDER     run what an experiment has not recorded yet
    python -m results SPEC.json               the same for your own (results/README.md)
    python -m results plot NAME               draw an experiment along training, or a picture
    python -m results flops --objective X     compute of a step; --match RUN: equal compute
    python -m results peers                   our training steps against other libraries'
    python -m results gpu                     check and time our kernels on a GPU
    python -m results make-data PUBLIC OUT    make the data files of the experiments
    python -m results readme                  write recorded numbers into both README.md

Each command has its own --help.
"""

import importlib

from common import BadInput, did_you_mean, run_program

# {command: its file}, which is imported when it is needed: some need requirements-dev.txt.
COMMANDS = {"show": "compare", "board": "compare", "readme": "compare", "plot": "plots",
            "flops": "flops", "peers": "peers", "gpu": "gpu", "make-data": "make_data"}


def main(words):
    name, *rest = words or ["--help"]
    if name in ("--help", "-h"):
        return print(__doc__.strip())
    if any(word.endswith(".json") for word in words[:2]):
        from .compare import open_spec
        words = [open_spec(word) if word.endswith(".json") else word for word in words[:2]]
        name, rest = words[0], [*words[1:], *rest[1:]]
    if name in COMMANDS:
        module = importlib.import_module(f"results.{COMMANDS[name]}")
        return getattr(module, f"{name.replace('-', '_')}_command")(rest)
    from .compare import EXPERIMENTS
    if name in EXPERIMENTS:
        return importlib.import_module("results.run").run_command(name, rest)
    raise BadInput(f"{name!r} is not a command or an experiment"
                   f"{did_you_mean(name, [*COMMANDS, *EXPERIMENTS])} (see python -m results show)")


if __name__ == "__main__":
    run_program(main)
