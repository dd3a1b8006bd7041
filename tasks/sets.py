"""Data sets with labels: one plain table for each split.

    data/stsb_test.tsv                                      data/sst2_train.tsv
    text               text2                   label        text                  label
    A man is dancing.  A man is talking.       1.4          a charming journey    1
    A plane lands.     A plane is landing.     5.0          only labored gags     0

A label is the number of a class, from 0, or a score. Another language is another table,
data/stsb-de_test.tsv. Tables are TSV, CSV or JSON Lines, also in .gz, .bz2 or .xz."""

import math
from pathlib import Path

import numpy as np

from base.common import BadInput, shown, warn
from corpora.files import READERS, at_line

# {set: number of classes; 0: labels are scores}. Of two classes, class 1 is the one that F1 and
# average precision look for. Of three, they are entailment, neutral, contradiction.
CLASSES = {"sst2": 2, "cola": 2, "mrpc": 2, "qqp": 2, "rte": 2, "qnli": 2, "mnli": 3, "mnli-mm": 3,
           "xnli": 3, "pawsx": 2, "mr": 2, "cr": 2, "subj": 2, "mpqa": 2, "trec": 6, "ag-news": 4,
           "stsb": 0, "sick": 0}


class Missing(BadInput):
    """A file that a task needs is not there."""

    def __init__(self, path):
        super().__init__(f"there is no {shown(path)} (tasks/README.md says how to get it)")


def in_language(name, lang):
    """Return the name of a set in a language: "stsb", "stsb-de"."""
    return name if lang == "en" else f"{name}-{lang}"


def find_file(name, folder, split):
    """Return the path of a split, or None."""
    files = sorted(Path(folder).expanduser().glob(f"{name}_{split}.*"))
    return next((path for path in files if READERS.keys() & {*path.suffixes}), None)


def read_set(name, folder, splits="test", lang="en"):
    """Return the rows (text, text2 or None, label) of "test", "valid", "train", or "train+valid".
    Splits without a table are taken from the training rows: a tenth for test, then a tenth for
    valid, by a fixed shuffle. Raises Missing, and BadInput for a bad row."""
    label = in_language(name, lang)
    files = {split: find_file(label, folder, split) for split in ("test", "valid", "train")}
    rows = []
    for split in splits.split("+"):
        if split != "train" and files[split]:
            rows += read_rows(files[split], CLASSES[name])
            continue
        if not files["train"]:
            raise Missing(Path(folder, f"{label}_{split}.tsv"))
        if splits == "test":
            warn(f"{label} has no test table, so a tenth of its training rows is tested")
        trained = read_rows(files["train"], CLASSES[name])
        parts = [one for one in ("test", "valid") if not files[one]] + ["train"]
        tenth = len(trained) // 10
        start = tenth * parts.index(split)
        end = len(trained) if split == "train" else start + tenth
        order = np.random.Generator(np.random.Philox([0, 2, 0, 0])).permutation(len(trained))
        rows += [row for row, index in zip(trained, order) if start <= index < end]
    if not rows:
        raise BadInput(f"{shown(files['train'])} has too few rows: a tenth of them is tested")
    if len({label for *_, label in rows}) < 2:
        raise BadInput(f"{label}: every label of its {splits} rows is {rows[0][2]:g}, and a score "
                       "needs two different ones: give more rows")
    return rows


def read_rows(path, classes):
    """Return the rows (text, text2 or None, label) of a table."""
    rows = []
    reader = READERS[next(suffix for suffix in path.suffixes[::-1] if suffix in READERS)]
    for number, row in reader(path, ("text", "label")):
        if not row:  # a repeated header
            continue
        try:
            label = float(row["label"])
            if classes:
                label = range(classes).index(label)
            if not math.isfinite(label):
                raise ValueError
            if not isinstance(row["text"], str) or not isinstance(row.get("text2", ""), str):
                raise TypeError
            rows.append((row["text"], row.get("text2"), label))
        except (KeyError, TypeError, ValueError):
            wanted = f"a class from 0 to {classes - 1}" if classes else "a score"
            raise at_line(path, number, f"a row needs a text and a label, {wanted}, unlike "
                          f"{shown(row)}") from None
    if not rows:
        raise BadInput(f"{shown(path)} has no rows")
    return rows
