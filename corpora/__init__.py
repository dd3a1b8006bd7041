"""Where texts come from: a corpus that is made here and needs no file, or text files.

    open_text(spec)          rows of texts for training
    evaluation_rows(spec)    the rows that an evaluation reads
"""

import itertools
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from base.common import BadInput, comma_list, did_you_mean, digest, shown
from base.tokenizer import Tokenizer
from corpora import toy
from corpora.overlap import text_hash

EMBEDDED = ("toy", "documents", "regex")
TRAIN_BYTES = 20_000_000  # of text for a tokenizer: a vocabulary hardly changes with more
EMBEDDED_VOCAB = 4096  # nearly one token for every word form of the five languages
DOCUMENTS = {"train": 2000, "valid": 200, "test": 200}  # at most: each takes 10 ms to make
PROBED = ("train", 1000)  # the sentences on which a probe is trained
HELD_OUT_ROWS = 1000  # of the other corpora, at most, in "valid" and in "test"


class EmbeddedText:
    """The first `count` rows of a corpus that needs no file."""

    embedded = True
    notes = []
    paths = []

    def __init__(self, name, langs=(), count=20_000, like=(), views=1):
        self.name = name
        self.count = count
        self.known = {"toy": toy.LANGUAGES, "regex": ("english", "regex")}.get(name, ("text",))
        if not set(langs) <= set(self.known):
            raise BadInput(f"--langs {shown(','.join(langs))}: {name} has the columns "
                           f"{', '.join(self.known)}")
        first = [column for column in like if column in self.known]
        self.columns = tuple(langs or dict.fromkeys((*first, *self.known)))
        if views > 2 and not langs:
            self.columns = self.columns[:views]
        self.num_text_columns = len(self.columns)

    def rows(self, split):
        """Return tuples of texts, one for each column. The splits share no row."""
        count = self.count if split == "train" else min(self.count, HELD_OUT_ROWS)
        if self.name == "toy":
            rows = [row.values() for row in toy.toy(split, count)]
        elif self.name == "regex":
            from corpora.toy_regex import regex  # here, as below: most runs read the toy language
            rows = regex(split, count)
        else:
            from corpora.toy_stories import documents
            count = min(count, DOCUMENTS[split])
            rows = [(text,) for text in documents(split, count)]
        return [tuple(map(dict(zip(self.known, row)).get, self.columns)) for row in rows]

    def ids(self, tokenizer, split, holdout):
        """Return the ids of the texts of a split (T,), where each text begins (cells + 1,), a hash,
        and None: no rows of other splits are among them."""
        texts = self.rows(split)
        ids = tokenizer.encode(itertools.chain(*texts))
        return np.concatenate(ids), np.cumsum([0, *map(len, ids)]), digest(texts), None

    def find_hashes(self, split="train"):
        """Return (N, C) uint64, the hashes of all texts of a split, whatever columns are read."""
        rows = EmbeddedText(self.name, count=self.count).rows(split)
        return np.array([list(map(text_hash, row)) for row in rows], np.uint64)


def open_text(spec, langs=(), count=20_000, like=(), views=1):
    """Open one of EMBEDDED, a file, "a.de,a.en", a list of files, or a folder of files
    CODE.devtest, as EmbeddedText or TextFiles. langs: the columns to read. like: the columns of the
    run, which come first unless `langs` are given. views: texts of an example. Raises BadInput,
    also for a file that lacks these columns."""
    if hasattr(spec, "rows"):  # it is open
        return spec
    langs = comma_list(langs) if isinstance(langs, str) else list(langs or ())
    if spec in EMBEDDED:
        return EmbeddedText(spec, langs, count, like, views)
    if isinstance(spec, (str, Path)):
        exists = os.path.lexists(os.path.expanduser(spec))
        spec = [spec] if exists else [*filter(None, map(str.strip, str(spec).split(",")))]
    paths = [Path(os.path.expanduser(path)) for path in spec]
    if len(paths) == 1 and os.path.isdir(paths[0]):
        folder = paths[0]
        # Names that begin with a dot, such as ._CODE.devtest, are macOS's own files.
        paths = sorted(folder.glob("[!.]*.devtest*")) or sorted(folder.glob("[!.]*.dev*"))
        paths.sort(key=lambda path: not path.name.startswith("eng"))
        if not paths:
            raise BadInput(f"{shown(folder)} is a folder without files CODE.devtest or CODE.dev: "
                           "name its files, as in --data corpus.de,corpus.en")
    if len(paths) < 2 and not any(map(os.path.lexists, paths)):
        name = "".join(map(str, spec))
        raise BadInput(f"{shown(name)!r} is neither a file nor one of {', '.join(EMBEDDED)}"
                       + did_you_mean(name, EMBEDDED))
    from corpora.files import TextFiles  # here, because built-in data needs no reader of files
    return TextFiles(paths, langs, tuple(like), views)


def train_tokenizer(source, vocab, holdout):
    """Train a Tokenizer on the texts that are not held out; of a large file, on every n-th row."""
    step = 1 + sum(path.stat().st_size for path in source.paths) // TRAIN_BYTES
    rows = itertools.islice(source.rows("train" if holdout else "all"), None, None, step)
    rows = tqdm(rows, "train a tokenizer", unit=" rows", leave=False, disable=None)
    vocab = vocab or (EMBEDDED_VOCAB if source.embedded else 8000)
    return Tokenizer.train(filter(None, itertools.chain.from_iterable(rows)), vocab)


class EvaluationRows(NamedTuple):
    """What an evaluation reads."""
    name: str
    texts: dict  # {column: N texts}, aligned by row; "" is a text that a row lacks
    system: list | None = None  # N texts that open a chat
    hard: tuple = ()  # (altered text, row of the first column it was made from, type of error)
    # of the training split and of this one: (M texts, {property: the class of each})
    labelled: tuple | None = None
    reordered: tuple = ()  # (text with the same words in another order, row, kind)
    order_of: str = ""  # the kind of reordered texts whose mean is the order error; "": all

    def hashes(self):
        """Return (N, C) uint64, the hashes of the texts, 0 for none."""
        return np.array([list(map(text_hash, cells)) for cells in self.texts.values()], np.uint64).T

    def complete(self, most=None):
        """Return the rows that have all texts, or the first `most` of them, without what belongs to
        rows that are left out."""
        keep = [row for row, cells in enumerate(zip(*self.texts.values())) if all(cells)][:most]
        texts = {name: [cells[row] for row in keep] for name, cells in self.texts.items()}
        system = self.system and [self.system[row] for row in keep]
        return self if texts == self.texts else EvaluationRows(self.name, texts, system)


def evaluation_rows(spec, langs=(), split="test", limit=1000, system=False, views=1):
    """Return at most `limit` rows (0: all) of a split: "train", "valid", "test", or "all" rows of a
    file. `system` adds the system texts of chats. Of examples with more than two `views`, the first
    two columns are evaluated: the others can be negatives."""
    if split not in ("train", "valid", "test", "all"):
        raise BadInput(f"split {split!r} is unknown: choose from train, valid, test, all")
    source = open_text(spec, langs, limit or 20_000, views=views)
    if system and "system" not in source.columns:
        raise BadInput(f"{source.name} has no system texts, which --chat system needs")
    columns = source.columns[:2 if views > 2 else source.num_text_columns]
    hard, labelled, reordered, order_of = (), None, (), ""
    if source.embedded:
        split = "test" if split == "all" else split
        limit = limit or HELD_OUT_ROWS
    if source.name == "toy" and source.embedded:
        meanings = toy.meanings(split, limit)
        rows = [[toy.render(meaning, name) for name in columns] for meaning in meanings]
        hard = toy.hard_negatives(meanings, columns[0])
        labelled = [toy.labelled(*which, columns[0]) for which in (PROBED, (split, limit))]
        reordered, order_of = toy.twins(meanings, columns[0]), "far"
    elif source.embedded:
        rows = source.rows(split)[:limit]
        if source.name == "documents":
            from corpora.toy_stories import labelled_story
            labelled = [labelled_story(*which) for which in (PROBED, (split, limit))]
    else:
        rows = source.to_evaluate(split, limit, len(columns))
    texts = {name: [row[index] for row in rows] for index, name in enumerate(columns)}
    return EvaluationRows(source.name, texts, [row[-1] for row in rows] if system else None, hard,
                          labelled, reordered, order_of)
