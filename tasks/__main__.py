"""Evaluate a run by the protocols of the papers, or train it on a task first.

    python -m tasks RUN --tasks TASKS     tasks/README.md says what each task measures
    python -m tasks finetune RUN ...      train all weights on a task

Each command has its own --help.
"""

import importlib

from common import run_program


def main(words):
    if not words:
        return print(__doc__.strip())
    # Imported here, so that run_program can say which package is missing.
    name, rest = ("finetune", words[1:]) if words[:1] == ["finetune"] else ("protocols", words)
    return importlib.import_module(f"tasks.{name}").main(rest)


if __name__ == "__main__":
    run_program(main)
