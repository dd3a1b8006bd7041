"""Look at a batch, a run, or several runs.

    python -m look RUN [RUN ...]                write one page of pictures, beside the first RUN
    python -m look compare RUN RUN ...          print a table; seeds are one row, mean ± std
    python -m look batch --objective llm-jepa   print one batch as text, and its attention mask

Each command has its own --help. That of the first is python -m look page --help.
"""

import importlib
import os

from common import BadInput, did_you_mean, run_program, shown

# {command: its file}, which is imported when it is needed: only the page needs matplotlib.
COMMANDS = {"page": "report", "compare": "compare", "batch": "batch"}


def main(words):
    name, *rest = words or ["--help"]
    if name in ("--help", "-h"):
        return print(__doc__.strip())
    if name not in COMMANDS and os.path.isdir(os.path.expanduser(name)):
        name, rest = "page", words
    if name not in COMMANDS:
        raise BadInput(f"{shown(name)!r} is not a command or the folder of a run"
                       f"{did_you_mean(name, COMMANDS)} (see python -m look --help)")
    return getattr(importlib.import_module(f"look.{COMMANDS[name]}"), f"{name}_command")(rest)


if __name__ == "__main__":
    run_program(main)
