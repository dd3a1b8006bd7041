"""Where texts come from: a corpus that is made here and needs no file, or text files.

    open_text(spec)          rows of texts for training
    evaluation_rows(spec)    the rows that an evaluation reads
"""

import itertools
import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from common import BadInput, comma_list, did_you_mean, shown, warn
from corpora import toy
from corpora.files import TextFiles, check_langs, folder_files, normalized

EMBEDDED = ("toy", "documents", "regex")
EMBEDDED_VOCAB = 4096  # nearly one token for every word form of the five languages
DOCUMENTS = {"train": 2000, "valid": 200, "test": 200}  # at most: each takes 10 ms to make
HELD_OUT_ROWS = 1000  # of the other corpora, at most, in "valid" and in "test"


class EmbeddedText:
    """Rows of a corpus that needs no file. `count` and `seed` choose the rows of "train"."""

    embedded = True
    notes = []

    def __init__(self, name, langs=(), count=20_000, seed=0):
        self.name = name
        self.count = count
        self.seed = seed
        known = {"toy": toy.LANGUAGES, "regex": ("english", "regex")}.get(name, ("text",))
        check_langs(langs, known, name)
        self.columns = tuple(langs or known)
        self.num_text_columns = len(self.columns)

    def rows(self, split):
        """Return tuples of texts, one for each column. The splits share no row."""
        count = self.count if split == "train" else min(self.count, HELD_OUT_ROWS)
        if self.name == "toy":
            rows = toy.toy(split, count, self.seed)
            return [tuple(map(row.get, self.columns)) for row in rows]
        if self.name == "regex":
            order = [("english", "regex").index(column) for column in self.columns]
            rows = toy.regex(split, count, self.seed)
            return [tuple(map(row.__getitem__, order)) for row in rows]
        texts = toy.documents(split, min(count, DOCUMENTS[split]), self.seed)
        return [(text,) for text in texts]


def open_text(spec, langs=(), count=20_000, seed=0):
    """Open one of EMBEDDED, a file, "a.de,a.en", a list of files, or a folder of files CODE.devtest
    -> EmbeddedText or TextFiles. Raises BadInput."""
    langs = comma_list(langs) if isinstance(langs, str) else list(langs or ())
    if spec in EMBEDDED:
        return EmbeddedText(spec, langs, count, seed)
    if isinstance(spec, (str, Path)):
        whole = os.path.expanduser(spec)
        if os.path.isdir(whole):
            return TextFiles(folder_files(whole), langs)
        spec = [whole] if os.path.lexists(whole) else comma_list(str(spec))
    if not spec:
        raise BadInput("--data names no file: give the path of one")
    if len(spec) == 1 and not os.path.lexists(spec[0]) and Path(spec[0]).name == str(spec[0]):
        near = did_you_mean(spec[0], EMBEDDED, "; give the path of a file")
        raise BadInput(f"--data {shown(spec[0])} is neither a file nor one of "
                       f"{', '.join(EMBEDDED)}{near}")
    return TextFiles(spec, langs)


class EvaluationRows(NamedTuple):
    """What an evaluation reads."""
    name: str
    texts: dict  # {column: N texts}, aligned by row
    system: list | None = None  # N texts that open a chat
    hard: tuple = ()  # (altered text, row of the first column it was made from, type of error)
    labelled: tuple | None = None  # (M texts, {property: the class of each})


def evaluation_rows(spec, langs=(), split="test", limit=1000, system=False):
    """Return at most `limit` rows (0: all) of a split: "train", "valid", "test", or "all" rows of a
    file. `system` adds the system texts of chats. Rows with an empty column are left out, with a
    warning."""
    if split not in ("train", "valid", "test", "all"):
        raise BadInput(f"split {split!r} is unknown: choose from train, valid, test, all")
    source = open_text(spec, langs, limit or 20_000)
    if system and "system" not in source.columns:
        raise BadInput(f"{shown(spec)} has no system texts, and --chat system opens every row with "
                       "one: add them, or choose other rows")
    columns = source.columns[:source.num_text_columns]
    if source.embedded:
        split = "test" if split == "all" else split
        limit = limit or HELD_OUT_ROWS
        rows = source.rows(split)[:limit] if source.name != "toy" else []
    else:
        rows = _complete_rows(source, split, limit)
    texts = {name: [row[index] for row in rows] for index, name in enumerate(columns)}
    if not source.embedded or source.name == "regex":
        return EvaluationRows(source.name, texts, [row[-1] for row in rows] if system else None)
    language = columns[0] if source.name == "toy" else "en"
    labelled = toy.labelled(split, limit, language)
    if source.name == "documents":
        return EvaluationRows(source.name, texts, labelled=labelled)
    # All sentences are in one style, so that a hard negative differs by its error alone.
    meanings = toy.meanings(split, limit)
    for name in columns:
        texts[name] = [toy.render(meaning, name) for meaning in meanings]
    hard = toy.hard_negatives(meanings, language)
    return EvaluationRows(source.name, texts, None, hard, labelled)


def _complete_rows(source, split, limit):
    """Return at most `limit` rows of files that have a text in every column."""
    rows, partial, more = [], 0, False
    for row in source.rows(split):
        if not all(row[:source.num_text_columns]):
            partial += 1
        elif limit and len(rows) == limit:
            more = True
            break
        else:
            rows.append(row)
    if partial:
        columns = ", ".join(source.columns[:source.num_text_columns])
        warn(f"{partial:,} rows of {source.name} have an empty text among {shown(columns)} and are "
             "left out of all scores; fewer --langs keep more")
    # The rows of "valid" are for a training, which prints the notes itself.
    if split != "valid":
        for note in source.notes:
            warn(note)
        if more:
            warn(f"only the first {limit:,} rows of {source.name} are evaluated; --limit 0 (of "
                 "train.py: --eval-limit 0) evaluates all")
    return rows


def _rows_trained_on(spec, langs, holdout):
    source = open_text(spec, langs)
    for row in source.rows("train" if holdout or source.embedded else "all"):
        yield row[:source.num_text_columns]


def train_texts(spec, langs=(), holdout=True):
    """Return the set of all texts that a training on `spec` reads."""
    rows = _rows_trained_on(spec, langs, holdout)
    return {text.strip() for row in rows for text in row if text}


def count_trained_on(spec, rows, langs=(), holdout=True):
    """Count how many of some rows (tuples of texts) a training on `spec` reads.

    A row counts if all of its texts are in one training row, in any column and compared by
    `normalized`. `holdout`: the training held rows out, because it had no --eval-data."""
    wanted = [set(map(normalized, row)) - {""} for row in rows]
    commonness = Counter(itertools.chain.from_iterable(wanted))
    # Rows are looked up by the rarest of their texts, so that few rows have to be compared.
    by_text = {}
    for texts in filter(None, wanted):
        by_text.setdefault(min(texts, key=commonness.get), []).append(texts)
    found = 0
    for row in _rows_trained_on(spec, langs, holdout):
        texts = set(map(normalized, row))
        for text in texts & by_text.keys():
            others = [one for one in by_text[text] if not one <= texts]
            found += len(by_text[text]) - len(others)
            by_text[text] = others
    return found
