"""Evaluate a run by the protocols of the papers, or train it on a task first.

    python -m tasks RUN --tasks TASKS     such as retrieval,sts; some need data sets
    python -m tasks --tasks list          what each task measures
    python -m tasks finetune RUN ...      train all weights on a task

Each command has its own --help.
"""

import importlib
import re
from pathlib import Path

from base.common import run_program


def list_tasks():
    """Print the tables of tasks in README.md, a task per line."""
    page = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    print("Beside retrieval, geometry, probe and generate of evaluate.py:")
    for names, text in re.findall(r"^\| (`.*?` )?\| (.+) \|$", page, re.M):
        line = f"  {names:22}{text}" if names else text
        print(re.sub("[`*]", "", line))


def main(words):
    if not words:
        return print(__doc__.strip())
    if words == ["--tasks", "list"]:
        return list_tasks()
    # Imported here, so that run_program can say which package is missing.
    name, rest = ("finetune", words[1:]) if words[:1] == ["finetune"] else ("protocols", words)
    return importlib.import_module(f"tasks.{name}").main(rest)


if __name__ == "__main__":
    run_program(main)
