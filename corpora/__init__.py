"""Where texts come from: an embedded corpus, which needs no file, or files. Only here is it asked.

    open_text(spec)        -> columns of texts, row by row, for training
    evaluation_rows(spec)  -> what an evaluation reads, once
"""

import itertools
import os
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from corpora import toy
from corpora.program import BadInput, comma_list, did_you_mean, shortened
from corpora.text import TextFiles, check_columns, flores_files

EMBEDDED = ("toy", "documents", "regex")
EMBEDDED_VOCAB = 4096  # nearly a piece for every word form of the five languages: short rows
DOCUMENTS = {"train": 2000, "valid": 200, "test": 200}  # at most: one takes a hundredth of a second
HELD_ROWS = 1000  # of the other corpora, at most, in "valid" and in "test"


class EmbeddedText:
    """A corpus that needs no file. `count` and `seed`: rows of "train", and which."""

    embedded = True

    def __init__(self, name, langs=(), count=20_000, seed=0):
        self.name = name
        self.count = count
        self.seed = seed
        known = {"toy": toy.LANGUAGES, "regex": ("english", "regex")}.get(name, ("text",))
        check_columns(langs, known, name)
        self.columns = tuple(langs or known)
        self.sides = len(self.columns)

    def rows(self, split):
        """Tuples of texts, one a column; the splits share no row."""
        count = self.count if split == "train" else min(self.count, HELD_ROWS)
        if self.name == "toy":
            rows = toy.toy(split, count, self.seed)
            return [tuple(map(row.get, self.columns)) for row in rows]
        if self.name == "regex":
            places = [("english", "regex").index(column) for column in self.columns]
            rows = toy.regex(split, count, self.seed)
            return [tuple(map(row.__getitem__, places)) for row in rows]
        texts = toy.documents(split, min(count, DOCUMENTS[split]), self.seed)
        return [(text,) for text in texts]


def open_text(spec, langs=None, skip_bad=False, count=20_000, seed=0, header="yes"):
    """The texts that `spec` names: one of EMBEDDED, a file, "a.de,a.en", a list of files, or a
    folder of files CODE.devtest -> EmbeddedText or TextFiles. `header`: whether the first line of a
    table names its columns, "yes" or "no". Raises BadInput."""
    if header not in ("yes", "no"):
        raise BadInput(f"header {header!r}: choose yes or no")
    langs = comma_list(langs) if isinstance(langs, str) else list(langs or ())
    if spec in EMBEDDED:
        return EmbeddedText(spec, langs, count, seed)
    paths = [spec] if isinstance(spec, Path) else spec
    if isinstance(spec, str):
        paths = [spec] if os.path.lexists(spec) else comma_list(spec)
    if not paths:
        raise BadInput(f"--data {spec!r} names no file: give the path of one")
    if len(paths) == 1:
        only = Path(paths[0])
        if os.path.isdir(only):
            files = flores_files(only, langs)
            return TextFiles(files.values(), (), skip_bad, files, header)
        if not os.path.lexists(only) and not only.suffix and only.name == str(only):
            near = did_you_mean(str(only), EMBEDDED, "; give the path of a file")
            raise BadInput(f"--data {shortened(str(only))}: neither a file nor one of "
                           f"{', '.join(EMBEDDED)}{near}")
    return TextFiles(paths, langs, skip_bad, (), header)


class EvaluationRows(NamedTuple):
    name: str
    texts: dict  # {column: N texts}, aligned by row
    system: list | None = None  # what opens a chat, N texts
    hard: tuple = ()  # (altered text, row of the first column it was made from, type of error)
    labelled: tuple | None = None  # (M texts, {property: the class of each})
    graded: tuple = ()  # (text, text, similarity 0..5)


def evaluation_rows(spec, langs=None, split="test", limit=1000, skip_bad=False, system=False,
                    header="yes"):
    """What is evaluated, at most `limit` rows of a split: "train", "valid", "test", or "all" rows
    of a file. `system`: a chat's system texts too. Rows with an empty column are left out, and
    what of a file is not evaluated is said."""
    if split not in ("train", "valid", "test", "all"):
        raise BadInput(f"split {split!r} is unknown: choose from train, valid, test, all")
    source = open_text(spec, langs, skip_bad, limit or 20_000, header=header)
    if system and "system" not in source.columns[source.sides:]:
        raise BadInput(f"{spec} has no system texts, and --chat system opens every row with one: "
                       "add them, or choose other rows")
    columns = source.columns[:source.sides]
    if source.embedded:
        split = "test" if split == "all" else split
        limit = limit or HELD_ROWS
        rows = source.rows(split)[:limit] if source.name != "toy" else []
    else:
        rows = _rows_of_files(source, split, limit)
    texts = {name: [row[place] for row in rows] for place, name in enumerate(columns)}
    if source.name not in ("toy", "documents") or not source.embedded:
        return EvaluationRows(source.name, texts, [row[-1] for row in rows] if system else None)
    language = columns[0] if source.name == "toy" else "en"
    known = {"labelled": toy.labelled(split, limit, language),
             "graded": toy.graded_pairs(limit, language)}
    if source.name == "documents":
        return EvaluationRows(source.name, texts, **known)
    # All sentences are in one style, so that a hard negative differs by its error alone.
    meanings = toy.meanings(split, limit)
    for name in columns:
        texts[name] = [toy.render(meaning, name) for meaning in meanings]
    return EvaluationRows(source.name, texts, hard=toy.hard_negatives(meanings, language), **known)


def _rows_of_files(source, split, limit):
    """At most `limit` rows of files, without those that have an empty column; what is left out is
    said."""
    rows = []
    partial = 0
    notes = []
    for row in source.rows(split):
        if not all(row[:source.sides]):
            partial += 1
        elif limit and len(rows) == limit:
            # A training is watched on a few rows; a result is of all that are asked for.
            if split != "valid":
                notes.append(f"only the first {limit:,} rows of {source.name} are evaluated; a "
                             "limit of 0 takes all")
            break
        else:
            rows.append(row)
    columns = ", ".join(source.columns[:source.sides][:6])
    if partial:
        notes.append(f"{partial:,} rows of {source.name} lack a text in one of {columns}, and are "
                     "left out of every score; fewer --langs keep more")
    # The rows for validation are those of a training, which has said how it reads them.
    if split != "valid":
        notes = [*source.notes, *notes, source.left_out()]
    for note in filter(None, notes):
        print(note, file=sys.stderr)
    return rows


def train_texts(spec, langs=None, skip_bad=False, holdout=True, header="yes"):
    """The set of all texts of the training split: answers among them may be remembered."""
    source = open_text(spec, langs, skip_bad, header=header)
    texts = set()
    for row in source.rows("train" if holdout or source.embedded else "all"):
        texts.update(text.strip() for text in row[:source.sides] if text)
    return texts


def count_trained_on(spec, rows, langs=None, skip_bad=False, holdout=True, header="yes"):
    """Count how many of some rows (tuples of texts) a training on `spec` has read. A row counts if
    all of its texts stand in one row of the training split, whatever their columns; "" is no text.
    `holdout`: the training held rows out, as without --eval-data."""
    wanted = [set(map(str.strip, row)) - {""} for row in rows]
    commonness = Counter(itertools.chain.from_iterable(wanted))
    # A row stands under the rarest of its texts, so that few rows have to be compared.
    by_text = {}
    for texts in filter(None, wanted):
        by_text.setdefault(min(texts, key=commonness.get), []).append(texts)
    source = open_text(spec, langs, skip_bad, header=header)
    found = 0
    for row in source.rows("train" if holdout or source.embedded else "all"):
        texts = set(map(str.strip, row))
        for text in texts & by_text.keys():
            others = [one for one in by_text[text] if not one <= texts]
            found += len(by_text[text]) - len(others)
            by_text[text] = others
    return found
