"""The published sentence sets: where their rows lie, and what stands for a split that is missing.

    rows = read_set("sst2", "data", "train")            # Rows(first, second, labels)
    rows = read_set("xnli", "data", "test", "de")

The table of all sets is sets.tsv. Rows are read from plain tables with a header (.tsv, .tsv.xz or
.tsv.gz without quoting, or .csv) in the folder or in its folder tasks, or from what python -m
corpora.download put there. "test" is what is reported: of GLUE, which keeps the labels of its test
rows, "dev".
"""

import csv
import math
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from corpora import download
from corpora.program import BadInput, did_you_mean
from corpora.text import read_lines
from tasks.metrics import read_table


class Rows(NamedTuple):
    first: list
    second: list | None  # None for sets of single sentences
    labels: list         # the class, 0.., or the score


class Source(NamedTuple):
    """One spelling of a set's rows, a row of sets.tsv. "{lang}" in a name is the language."""
    dataset: str             # its name in corpora.download; "": plain tables
    train: str               # files of a split, one after the other
    valid: str
    test: str
    first: str | int         # columns, by name or, where there is no header, by index
    second: str | int | None
    label: str | int | None  # None: one file for each class
    labels: str              # the classes as these files spell them
    style: str               # "" (table), csv, titled (label, title, text), lines, words ("X:x y")
    encoding: str            # "": UTF-8
    unlabelled: str          # the label of rows that are left out; "(empty)": none
    only: str                # which rows: "language" (of that column), "glue" (MRPC's dev ids)


class SentenceSet(NamedTuple):
    kind: str                # single, pair or similarity
    classes: tuple           # of two, the second is what is looked for; () where labels are scores
    sources: list


def read_sets():
    """sets.tsv, where kind and classes stand in the first row of a set -> {name: SentenceSet}."""
    found = {}
    for name, kind, classes, *cells in read_table("sets.tsv"):
        for place in (4, 5, 6):
            cell = cells[place]
            cells[place] = int(cell) if cell.isdigit() else cell or None
        one = found.setdefault(name, SentenceSet(kind, tuple(classes.split()), []))
        one.sources.append(Source(*cells))
    return found


SETS = read_sets()


def find_set(name):
    """The SentenceSet of a name, or BadInput."""
    if name not in SETS:
        raise BadInput(f"there is no sentence set {name!r}: choose from {', '.join(SETS)}"
                       f"{did_you_mean(name, SETS)}")
    return SETS[name]


# ---- which files there are, and what they stand for


def paths_of(source, split, folder, lang):
    """The files of a split, or [] unless all are there."""
    wanted = getattr(source, split).format(lang=lang).split()
    found = []
    for name in wanted:
        # A data set may have been unpacked without its own top folder.
        if source.dataset:
            places = [folder / source.dataset / part for part in (name, name.partition("/")[2])]
        else:
            names = [name + ending for ending in (".tsv", ".tsv.xz", ".tsv.gz", ".csv")]
            places = [folder / one for one in names] + [folder / "tasks" / one for one in names]
        found += [place for place in places if place.is_file()][:1]
    return found if len(found) == len(wanted) else []


def at_hand(name, folder, lang):
    """(source, {split: paths}) of the spelling with most splits there; of several the first."""
    found = []
    for source in find_set(name).sources:
        paths = {split: paths_of(source, split, Path(folder), lang)
                 for split in ("train", "valid", "test")}
        found.append((source, {split: files for split, files in paths.items() if files}))
    return max(found, key=lambda each: len(each[1]))


def origin(here, split):
    """Where the rows of a split come from -> (published split, (first tenth, end) of it or None).

    Where there are no test rows, the valid rows stand for them; what is then missing of test and
    valid is a tenth each of the shuffled train rows."""
    made = ["test", "valid"][len(here.keys() & {"test", "valid"}):]
    if split in made:
        return "train", (made.index(split), made.index(split) + 1)
    if split == "train":
        return "train", (len(made), None) if made else None
    return "test" if split == "test" in here else "valid", None


def missing_rows(name, folder="data", split="test", lang="en"):
    """One line about rows that are not there: which file, from where, the licence, the command; ""
    if they are there."""
    _, here = at_hand(name, folder, lang)
    if origin(here, split)[0] in here:
        return ""
    sources = find_set(name).sources
    wanted = "train" if split == "train" or not sources[-1].test else "test"
    original = next(one for one in sources if one.dataset)
    path = (getattr(original, wanted) or original.test).format(lang=lang).split()[0]
    plain = " ".join(getattr(one, wanted) for one in sources if not one.dataset).split()
    other = f", or put {plain[0]}.tsv into {folder}" if plain else ""
    return f"{name}: {download.missing(original.dataset, folder, path)}{other}"


def made(name, folder="data", split="test", lang="en"):
    """What stands for the published split, in words; "" if the rows are the published ones."""
    published, part = origin(at_hand(name, folder, lang)[1], split)
    if published == split:
        return ""
    rows = "a tenth of the train rows, by a fixed shuffle," if part else "the published valid rows"
    return f"{rows} for {split}, which is not there"


# ---- reading


def read_set(name, folder="data", split="test", lang="en"):
    """The Rows of a set's split: train, valid, test, or several such as "train+valid".

    A split that nobody published is made of others, always in the same way, with a note on stderr.
    BadInput for rows that are not there or not as they should be."""
    rows = []
    for part in split.split("+"):
        if reason := missing_rows(name, folder, part, lang):
            raise BadInput(reason)
        words = made(name, folder, part, lang)
        if words and part == split:
            print(f"note: {name}: {words}", file=sys.stderr)
        source, here = at_hand(name, folder, lang)
        published, tenths = origin(here, part)
        found = read_split(source, here[published], Path(folder), published, lang)
        if empty := sum("" in row[:2] for row in found):
            print(f"note: {name}, {lang}: {empty} of {len(found)} rows have an empty text, and are "
                  "kept, as published", file=sys.stderr)
        rows += cut(found, *tenths) if tenths else found
    if not rows:
        raise BadInput(f"{name}: there are no {split} rows in the language {lang}")
    first, second, labels = map(list, zip(*rows))
    return Rows(first, None if find_set(name).kind == "single" else second, labels)


def cut(rows, first, last):
    """The rows from one tenth to another (None: the end) of a fixed shuffle, in their own order."""
    size = len(rows) // 10
    end = len(rows) if last is None else last * size
    order = np.random.Generator(np.random.Philox([0, 2, 0, 0])).permutation(len(rows))
    return [row for row, place in zip(rows, order) if first * size <= place < end]


def read_split(source, paths, folder, split, lang):
    """Files -> [(first, second, label)]."""
    if lang != "en" and source.only != "language" and "{lang}" not in f"{source}":
        raise BadInput(f"{paths[0]} is English only: --task-langs {lang} has no rows there")
    dev = set()
    # GLUE's dev rows of MRPC are known by their ids.
    if source.only == "glue":
        lines = read_lines(folder / source.dataset / "mrpc_dev_ids.tsv")
        dev = {line.decode(errors="replace") for _, line in lines}
    classes = {spelled: place for place, spelled in enumerate(source.labels.split())}
    columns = [column.format(lang=lang) if isinstance(column, str) else column
               for column in (source.first, source.second, source.label)]
    rows = []
    for place, path in enumerate(paths):
        for where, row in cells(path, source):
            try:
                first, second, label = (None if one is None else row[one] for one in columns)
                if source.only == "language" and row["language"] != lang:
                    continue
                if source.only == "glue" and split != "test":
                    if (f"{row['#1 ID']}\t{row['#2 ID']}" in dev) != (split == "valid"):
                        continue
            except KeyError as error:
                raise BadInput(f"{where}: there is no column {error}; there are "
                               f"{', '.join(map(str, row))}") from None
            if not source.unlabelled or (label or "(empty)") != source.unlabelled:
                gold = place if label is None else class_or_score(label, classes, where)
                rows.append((first, second, gold))
    return rows


def class_or_score(label, classes, where):
    """The number of a class or, without classes, a score."""
    try:
        found = classes[label.strip()] if classes else float(label)
    except (KeyError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        known = f"one of {', '.join(classes)}" if classes else "a number"
        raise BadInput(f"{where}: the label {label!r} is not {known}")
    return found


def cells(path, source):
    """("file, line number", {column: cell}); without a header a column is named by its index."""
    header = None
    for number, row in enumerate(split_lines(path, source), 1):
        if not row:
            continue
        if not source.style and isinstance(source.first, str) and header is None:
            header = row
        elif header and len(row) != len(header):
            raise BadInput(f"{path}, line {number}: {len(row)} cells, the header has {len(header)}")
        else:
            yield f"{path}, line {number}", dict(zip(header or range(len(row)), row))


def split_lines(path, source):
    """The lines of a file as lists of cells, as `source.style` says."""
    lines = (line.decode(source.encoding or "utf-8") for _, line in read_lines(path))
    try:
        is_plain_csv = not source.style and path.suffix == ".csv"
        is_csv = is_plain_csv or source.style in ("csv", "titled")
        for row in csv.reader(lines) if is_csv else lines:
            # A blank line is a row only where every line is a text.
            if not row:
                yield [row] if source.style == "lines" else []
            elif source.style == "titled":
                yield [row[0], " ".join(row[1:])]
            elif source.style == "words":
                label, _, text = row.partition(" ")
                yield [label.partition(":")[0], text]
            elif source.style == "lines":
                yield [row]
            else:
                yield row if is_csv else row.split("\t")
    except (csv.Error, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not as it was published ({error}): fetch it again") from None
