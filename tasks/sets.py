"""Data sets with labels: one plain table for each split.

    data/stsb_test.tsv                                      data/sst2_train.tsv
    text               text2                   label        text                  label
    A man is dancing.  A man is talking.       1.4          a charming journey    1
    A plane lands.     A plane is landing.     5.0          only labored gags     0

A label is the number of a class, from 0, or a score. Another language is another table,
data/stsb-de_test.tsv. Tables are TSV, CSV or JSON Lines, plain or in .gz, .bz2 or .xz.
"""

import itertools
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common import BadInput, did_you_mean, shown, warn
from corpora.files import READERS, at_line

# {set: number of classes; 0: labels are scores}. Of two classes, class 1 is the one that F1 and
# average precision look for. Of three, they are entailment, neutral, contradiction.
CLASSES = {"sst2": 2, "sst": 2, "cola": 2, "mrpc": 2, "qqp": 2, "rte": 2, "qnli": 2, "mnli": 3,
           "mnli-mm": 3, "xnli": 3, "pawsx": 2, "mr": 2, "cr": 2, "subj": 2, "mpqa": 2, "trec": 6,
           "ag-news": 4, "stsb": 0, "sick": 0}
ENDINGS = [f".{format}{packed}" for format in ("tsv", "csv", "jsonl")
           for packed in ("", ".xz", ".gz", ".bz2")]


class Rows(NamedTuple):
    first: list
    second: list | None  # None for sets of single texts
    labels: list         # N classes or scores


def label_of(name, lang="en"):
    """Return the name of a set in a language: "stsb", "stsb-de"."""
    return name if lang == "en" else f"{name}-{lang}"


def find_file(name, folder, split):
    """Return the path of a split of a set, or None."""
    paths = (Path(folder).expanduser() / f"{name}_{split}{ending}" for ending in ENDINGS)
    return next(filter(Path.is_file, paths), None)


def missing(name, folder, split="test", lang="en"):
    """Return one line that says which table is missing, or "". Raises BadInput for an unknown
    set."""
    if name not in CLASSES:
        raise BadInput(f"there is no set {shown(name)!r} among {', '.join(CLASSES)}"
                       f"{did_you_mean(name, CLASSES)}")
    name = label_of(name, lang)
    if any(find_file(name, folder, one) for one in (split, "train")):
        return ""
    wanted = Path(folder) / f"{name}_{'train' if split == 'valid' else split}.tsv"
    return f"there is no table {shown(wanted)} (tasks/README.md says how to get it)"


def read_set(name, folder, split="test", lang="en"):
    """Return the Rows of a set: "test", "valid", "train", or several, as in "train+valid". Splits
    without a table are taken from the training rows: a tenth for test, then a tenth for valid, by
    a fixed shuffle. Raises BadInput."""
    if reason := missing(name, folder, split.split("+")[0], lang):
        raise BadInput(reason)
    if split == "test" and not find_file(label_of(name, lang), folder, split):
        warn(f"{label_of(name, lang)} has no test table, so a tenth of its training rows is tested")
    rows = itertools.chain.from_iterable(
        split_rows(label_of(name, lang), folder, part, CLASSES[name]) for part in split.split("+"))
    first, second, labels = map(list, zip(*rows))
    return Rows(first, None if None in second else second, labels)


def split_rows(name, folder, split, classes):
    """Return the rows (text, text2 or None, label) of one split."""
    made = [part for part in ("test", "valid") if not find_file(name, folder, part)]
    if split not in (*made, "train"):
        return read_rows(find_file(name, folder, split), classes)
    rows = read_rows(find_file(name, folder, "train"), classes)
    tenth = len(rows) // 10
    start = tenth * (made.index(split) if split in made else len(made))
    end = start + tenth if split in made else len(rows)
    order = np.random.Generator(np.random.Philox([0, 2, 0, 0])).permutation(len(rows))
    return [row for row, index in zip(rows, order) if start <= index < end]


def read_rows(path, classes):
    """Return the rows (text, text2 or None, label) of a table."""
    reader = READERS[next(suffix for suffix in path.suffixes[::-1] if suffix in READERS)]
    rows = []
    for number, row in reader(path, ("text", "label")):
        if not row:  # a repeated header
            continue
        try:
            label = float(row["label"])
            if classes:
                label = range(classes)[int(label)] if label == int(label) >= 0 else None
            texts = row["text"], row.get("text2")
        except (KeyError, TypeError, ValueError, IndexError, OverflowError):
            label = None
        if label is None or label != label:
            wanted = f"a class from 0 to {classes - 1}" if classes else "a score"
            raise at_line(path, number, f"a row needs a text and a label, {wanted}, unlike "
                          f"{shown(row)}")
        rows.append((*texts, label))
    if not rows:
        raise BadInput(f"{shown(path)} has no rows")
    return rows
