"""What the two commands of this folder share: flags, what their numbers mean, the output."""
import argparse
import json
from pathlib import Path

import evaluate
from corpora.program import Parser


def positive(kind):
    """The type of flags whose int or float is above 0."""
    def read(text):
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is too low: it must be above 0")
        return value
    read.__name__ = kind.__name__
    return read


def parser(prog, description):
    """A Parser with the flags of both commands."""
    made = Parser(prog, description)
    add = made.add_argument
    add("run", metavar="RUN", help="folder of a run, such as out/mexma")
    add("--files", default="data", help="folder of the published sets [data]")
    add("--device", help="cpu, cuda, cuda:1 [cuda if there is one]")
    add("--json", action="store_true", help="print every number, as one JSON object")
    return made


def read_table(name):
    """The rows of a table in this folder, without its header."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return [line.split("\t") for line in text.splitlines()[1:]]


def about(task):
    """metrics.tsv -> {metric: (unit, which way is better, what it is)} of a task."""
    rows = read_table("metrics.tsv")
    return {metric: tuple(more) for tasks, metric, *more in rows if task in tasks.split()}


def show(results, as_json, tasks, before=None):
    print(json.dumps(results) if as_json else evaluate.table(results, before, tasks))
