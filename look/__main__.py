"""Look at a batch, a run, or several runs.

    python -m look RUN [RUN ...]                write one page of pictures, beside the first RUN
    python -m look compare RUN RUN ...          print a table; seeds are one row, mean ± std
    python -m look batch --objective llm-jepa   print one batch as text, and its attention mask

Each command has its own --help.
"""

import importlib

from base.common import run_program

# {command: its file}, which is imported when it is needed: only the page needs matplotlib.
COMMANDS = {"compare": "compare", "batch": "batch"}


def main(words):
    if not words:
        return print(__doc__.strip())
    name, rest = ("page", words) if words[0] not in COMMANDS else (words[0], words[1:])
    file = COMMANDS.get(name, "report")
    return getattr(importlib.import_module(f"look.{file}"), f"{name}_command")(rest)


if __name__ == "__main__":
    run_program(main)
