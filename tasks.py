"""The published tasks: where their rows lie, how they are spelled, and what stands for a split that is not there.

    rows = read("sst2", "data", "train")            # Rows(first, second, labels)
    rows = read("xnli", "data", "test", "de")

Each task is a row of TASKS. Its rows are read from plain TSV files (header, no quoting; .tsv, .tsv.xz or .tsv.gz) in the folder or in its
folder tasks, or from the data set as `python data.py download` unpacks it. "test" is what is reported: GLUE does not publish the
labels of its test rows, so there it is the rows of "dev". Below, the files of BUCC 2018 and Tatoeba.
"""
import csv
import functools
import math
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

import data
import download
from data import BadInput


class Rows(NamedTuple):
    first: list
    second: list | None  # None for tasks of single sentences
    labels: list         # the class, 0.., or the score


class Source(NamedTuple):
    """One spelling of a task's rows. train, valid, test: files, one after the other. first, second, label: columns, by name or, where
    there is no header, by place; label None: one file for each class. `labels`: the classes as these files spell them. `dataset`:
    the name in download.DATASETS whose folder holds the files; "" for plain TSV files. `only`: (folder, split, lang) -> which rows.
    "{lang}" in a name is the language."""
    dataset: str
    train: str
    valid: str
    test: str
    first: str | int
    second: str | int | None
    label: str | int | None
    labels: str = ""
    style: str = "tsv"  # or csv (quoted), titled (the same: label, title, text), lines (a text each), words ("LABEL:detail text")
    unlabelled: tuple = ()  # labels of rows that are left out
    encoding: str = "utf-8"
    only: object = None


class Task(NamedTuple):
    """kind: "single", "pair", or "similarity", whose labels are scores. Of two classes the second is what is looked for."""
    kind: str
    classes: tuple
    sources: tuple


def _of_language(folder, split, lang):
    return lambda row: row["language"] == lang


def _of_glue(folder, split, lang):
    """MRPC's own files have no dev rows; GLUE names those of train that are."""
    if split == "test":
        return lambda row: True
    dev = {line.decode() for _, line in data.read_lines(folder / "mrpc_dev_ids.tsv")}
    return lambda row: (f"{row['#1 ID']}\t{row['#2 ID']}" in dev) == (split == "valid")


def _glue(name, first, second, label, labels, folder="", test="dev.tsv", **more):
    place = f"{folder or name}/{name}/"
    return Source("glue", place + "train.tsv", "", place + test, first, second, label, labels, **more)


def _mnli(kind):
    columns = "sentence1", "sentence2", "gold_label", " ".join(INFERENCE)
    plain = Source("", "mnli_matched_dev_trainpart", "", "mnli_matched_dev_devpart", "premise", "hypothesis", "label", " ".join(INFERENCE))
    return Task("pair", INFERENCE, (plain,) * (kind == "matched") + (
        Source("mnli", "MNLI/MNLI/train.tsv", "", f"MNLI/MNLI/dev_{kind}.tsv", *columns, unlabelled=("-",)),))


def _sick(kind, classes, label, labels, original, spelled):
    names = ("sick_train", "sick_trial", "sick_test")
    return Task(kind, classes, (
        Source("", *names, "sentence1", "sentence2", label, labels),
        Source("sick", "sick_train/SICK_train.txt", "sick_trial/SICK_trial.txt", "sick_test_annotated/SICK_test_annotated.txt",
               "sentence_A", "sentence_B", original, spelled)))


def _whole(classes, plain, files):
    """A data set of SentEval without splits, a file for each class."""
    return Task("single", classes, (
        Source("", plain, "", "", "sentence", None, "label", "0 1"),
        Source("senteval", " ".join(f"datasmall_NB_ACL12/data/{file}" for file in files.split()), "", "", 0, None, None, style="lines",
               encoding="latin-1")))


INFERENCE, SENTIMENT = ("entailment", "neutral", "contradiction"), ("negative", "positive")
TASKS = {
    "sst2": Task("single", SENTIMENT, (
        Source("", "sst2_train", "", "sst2_dev", "sentence", None, "label", "0 1"), _glue("SST-2", "sentence", None, "label", "0 1"))),
    "sst": Task("single", SENTIMENT, (  # the same rows with SentEval's splits, whose test rows have labels
        Source("senteval", "sentiment-train", "sentiment-dev", "sentiment-test", 0, None, 1, "0 1"),)),
    "cola": Task("single", ("unacceptable", "acceptable"), (
        Source("", "cola_in_domain_train", "", "cola_in_domain_dev cola_out_of_domain_dev", "sentence", None, "label", "0 1"),
        _glue("CoLA", 3, None, 1, "0 1"))),
    "mrpc": Task("pair", ("different", "paraphrase"), (
        Source("", "mrpc_train", "mrpc_val", "mrpc_test", "sentence1", "sentence2", "label", "0 1"),
        Source("glue", "msr_paraphrase_train.txt", "msr_paraphrase_train.txt", "msr_paraphrase_test.txt", "#1 String", "#2 String", "Quality",
               "0 1", only=_of_glue))),
    "qqp": Task("pair", ("different", "duplicate"), (
        Source("", "qqp_train", "", "qqp_dev", "question1", "question2", "is_duplicate", "0 1"),
        Source("qqp", "QQP-clean/QQP/train.tsv", "", "QQP-clean/QQP/dev.tsv", "question1", "question2", "is_duplicate", "0 1"))),
    "stsb": Task("similarity", (), (
        Source("", "stsb_multi_train", "stsb_multi_dev", "stsb_multi_test", "s1_{lang}", "s2_{lang}", "score"),
        Source("stsb", "stsb-{lang}-train.csv", "stsb-{lang}-dev.csv", "stsb-{lang}-test.csv", 0, 1, 2, style="csv"),
        _glue("STS-B", "sentence1", "sentence2", "score", ""))),
    "sick": _sick("similarity", (), "relatedness", "", "relatedness_score", ""),
    "sick-e": _sick("pair", INFERENCE, "entailment", " ".join(INFERENCE), "entailment_judgment", "ENTAILMENT NEUTRAL CONTRADICTION"),
    "rte": Task("pair", ("not_entailment", "entailment"), (
        Source("", "rte_train", "", "rte_dev", "sentence1", "sentence2", "label", "not_entailment entailment"),
        _glue("RTE", "sentence1", "sentence2", "label", "not_entailment entailment"))),
    "wnli": Task("pair", ("not_entailment", "entailment"), (
        Source("", "wnli_train", "", "wnli_dev", "sentence1", "sentence2", "label", "0 1"), _glue("WNLI", "sentence1", "sentence2", "label", "0 1"))),
    "qnli": Task("pair", ("not_entailment", "entailment"), (
        Source("", "qnli_train", "", "qnli_dev", "question", "sentence", "label", "not_entailment entailment"),
        _glue("QNLI", "question", "sentence", "label", "not_entailment entailment", "QNLIv2"))),
    "mnli": _mnli("matched"),
    "mnli-mm": _mnli("mismatched"),
    "snli": Task("pair", INFERENCE, (
        Source("", "snli_train", "snli_dev", "snli_test", "premise", "hypothesis", "label", " ".join(INFERENCE), unlabelled=("-",)),
        Source("snli", *(f"snli_1.0/snli_1.0/snli_1.0_{split}.txt" for split in ("train", "dev", "test")), "sentence1", "sentence2", "gold_label",
               " ".join(INFERENCE), unlabelled=("-",)))),
    "xnli": Task("pair", INFERENCE, (
        Source("", "", "xnli_dev_17way", "xnli_test_17way", "premise_{lang}", "hypothesis_{lang}", "label", " ".join(INFERENCE)),
        Source("xnli", "", "XNLI-1.0/XNLI-1.0/xnli.dev.tsv", "XNLI-1.0/XNLI-1.0/xnli.test.tsv", "sentence1", "sentence2", "gold_label",
               " ".join(INFERENCE), only=_of_language))),
    "pawsx": Task("pair", ("different", "paraphrase"), (
        Source("", "pawsx_train", "pawsx_dev", "pawsx_test", "s1_{lang}", "s2_{lang}", "label", "0 1", unlabelled=("",)),
        *(Source("pawsx", f"x-final/x-final/{{lang}}/{train}.tsv", *(f"x-final/x-final/{{lang}}/{part}_2k.tsv" for part in ("dev", "test")),
                 "sentence1", "sentence2", "label", "0 1") for train in ("train", "translated_train")))),
    "mr": _whole(SENTIMENT, "senteval_mr", "rt10662/rt-polarity.neg rt10662/rt-polarity.pos"),
    "cr": _whole(SENTIMENT, "senteval_custrev", "customerr/custrev.neg customerr/custrev.pos"),
    "subj": _whole(("subjective", "objective"), "senteval_subj", "subj/subj.subjective subj/subj.objective"),
    "mpqa": _whole(SENTIMENT, "senteval_mpqa", "mpqa/mpqa.neg mpqa/mpqa.pos"),
    "trec": Task("single", tuple("ABBR DESC ENTY HUM LOC NUM".split()), (
        Source("senteval", "train_5500.label", "", "TREC_10.label", 1, None, 0, "ABBR DESC ENTY HUM LOC NUM", "words", encoding="latin-1"),)),
    "ag-news": Task("single", ("world", "sports", "business", "science"), (
        Source("ag-news", "train.csv", "", "test.csv", 1, None, 0, "1 2 3 4", "titled"),)),
}


def find(name):
    """The row of a name. Raises BadInput with the name that was probably meant."""
    if name not in TASKS:
        raise BadInput(f"there is no sentence task {name!r}: choose from {', '.join(TASKS)}{data.meant(name, TASKS)}")
    return TASKS[name]


def _paths(source, split, folder, lang):
    """The files of a split, or [] unless all are there. Of a plain file the folder may hold NAME.tsv, .tsv.xz or .tsv.gz, of an archive
    what its own top folder holds."""
    found, wanted = [], getattr(source, split).format(lang=lang).split()
    for name in wanted:
        places = ([folder / part / f"{name}.tsv{end}" for part in ("", "tasks") for end in ("", ".xz", ".gz")] if not source.dataset else
                  [folder / source.dataset / name, folder / source.dataset / name.partition("/")[2]])
        found += [place for place in places if place.is_file()][:1]
    return found if len(found) == len(wanted) else []


def _at_hand(name, folder, lang):
    """(source, {split: paths}) of the spelling with most splits there, of equals the first; or (None, {})."""
    there = [(source, {split: paths for split in ("train", "valid", "test") if (paths := _paths(source, split, Path(folder), lang))})
             for source in find(name).sources]
    best = max(there, key=lambda one: len(one[1]))
    return best if best[1] else (None, {})


def _origin(here, split):
    """Where the rows of a split come from -> (published split, its part). Where no test rows are at hand, the valid rows stand for them;
    what is then missing of test and valid is a tenth each of the shuffled train rows. Part: (first tenth, end), or None for all."""
    made = ["test", "valid"][len(here.keys() & {"test", "valid"}):]
    if split in made:
        return "train", (made.index(split), made.index(split) + 1)
    if split == "train":
        return split, (len(made), None) if made else None
    return "test" if split == "test" in here else "valid", None


def missing(name, folder="data", split="test", lang="en"):
    """One line for rows that are not there: which file, whose, from where, under which licence, how to get it; "" if they are."""
    source, here = _at_hand(name, folder, lang)
    if source and (part := _origin(here, split)[0]) in here:
        path, column = here[part][0], source.first if isinstance(source.first, str) else ""
        row = next(_cells(path, source), (0, {}))[1] if "{lang}" in column else {}
        absent = row and column.format(lang=lang) not in row
        return f"{name}: {path} has no column {column.format(lang=lang)!r}; there are {', '.join(row)}" if absent else ""
    wanted = "train" if split == "train" or not find(name).sources[-1].test else "test"
    original = next(one for one in find(name).sources if one.dataset)
    path = getattr(original, wanted if getattr(original, wanted) else "test").format(lang=lang).split()[0]
    plain = next((getattr(one, wanted).split()[0] for one in find(name).sources if not one.dataset and getattr(one, wanted)), "")
    return f"{name}: {download.missing(original.dataset, folder, path)}" + f", or put {plain}.tsv into {folder}" * bool(plain)


def made(name, folder="data", split="test", lang="en"):
    """What stands for the published split, in words; "" if the rows are the published ones."""
    published, part = _origin(_at_hand(name, folder, lang)[1], split)
    if part is None:
        return "" if published == split else f"the published {published} rows stand for {split}, which is not there"
    return "" if split == "train" else f"a tenth of the train rows, by a fixed shuffle, stands for {split}, which is not there"


@functools.cache
def _note(text):
    """Say it once."""
    print(f"note: {text}", file=sys.stderr)


def read(name, folder="data", split="test", lang="en"):
    """The rows of a task's split: train, valid, test, or several such as "train+valid". Raises BadInput for rows that are not there or
    not as they should be. A split that nobody published is made of others, always the same (`_origin`), with a note on stderr."""
    task, rows = find(name), []
    for part in split.split("+"):
        if part not in ("train", "valid", "test"):
            raise BadInput(f"split {part!r} is unknown: choose from train, valid, test, or join some with +")
        if reason := missing(name, folder, part, lang):
            raise BadInput(reason)
        if part == split and (words := made(name, folder, part, lang)):
            _note(f"{name}: {words}")
        source, here = _at_hand(name, folder, lang)
        published, tenths = _origin(here, part)
        found = _read(task, source, here[published], Path(folder), published, lang)
        if tenths:
            size, places = len(found) // 10, data.permutation(np.arange(len(found)), len(found), 0, np.zeros(len(found), int))
            low, high = (len(found) if tenth is None else tenth * size for tenth in tenths)
            found = [row for row, place in zip(found, places) if low <= place < high]
        rows += found
    if not rows:
        raise BadInput(f"{name}: there are no {split} rows in the language {lang}")
    first, second, labels = map(list, zip(*rows))
    return Rows(first, None if task.kind == "single" else second, labels)


def _read(task, source, paths, folder, split, lang):
    """Files -> [(first, second, label)]."""
    keep = source.only(folder / source.dataset, split, lang) if source.only else lambda row: True
    if lang != "en" and source.only is not _of_language and "{lang}" not in f"{source}":
        raise BadInput(f"{paths[0]} is English only: --task-langs {lang} has no rows there")
    classes = {spelled: place for place, spelled in enumerate(source.labels.split())}
    wanted = [column.format(lang=lang) if isinstance(column, str) else column for column in (source.first, source.second, source.label)]
    rows, left_out = [], 0
    for place, path in enumerate(paths):
        for number, row in _cells(path, source):
            if absent := [column for column in wanted if column is not None and column not in row]:
                raise BadInput(f"{path}, line {number}: there is no column {absent[0]!r}; there are {', '.join(map(str, row))}")
            if not keep(row):
                continue
            first, second, label = (None if column is None else row[column] for column in wanted)
            if label in source.unlabelled:
                left_out += 1
                continue
            try:
                label = place if label is None else classes[label.strip()] if task.classes else float(label)
                if not math.isfinite(label):
                    raise ValueError
            except (KeyError, ValueError):
                known = f"one of {', '.join(classes)}" if task.classes else "a number"
                raise BadInput(f"{path}, line {number}: the label {label!r} is not {known}") from None
            rows.append((first, second, label))
    if left_out:
        _note(f"{paths[0]}: {left_out} rows without a label are left out")
    return rows


def _cells(path, source):
    """(line number, {column: cell}) of a file; columns have the names of the header or, without one, their places."""
    def lines():
        for number, line in data.read_lines(path):
            try:
                yield line.decode(source.encoding)
            except UnicodeDecodeError:
                raise BadInput(f"{path}, line {number}: this is not {source.encoding}") from None

    header = None
    quoted = csv.reader(lines()) if source.style in ("csv", "titled") else None
    for number, line in enumerate(_rows(quoted, path) if quoted else lines(), 1):
        if source.style == "words":
            label, _, text = line.partition(" ")
            cells = [label.partition(":")[0], text]
        elif source.style == "titled":
            if len(line) < 2:
                raise BadInput(f"{path}, line {number}: {len(line)} cells, where label, title and text belong")
            cells = [line[0], " ".join(line[1:])]
        else:
            cells = line if quoted else [line] if source.style == "lines" else line.split("\t")
        if source.style == "tsv" and isinstance(source.first, str) and header is None:
            header = cells
            continue
        if header and len(cells) != len(header):
            raise BadInput(f"{path}, line {number}: {len(cells)} cells, the header has {len(header)}")
        yield number, dict(zip(header, cells)) if header else dict(enumerate(cells))


def _rows(quoted, path):
    try:
        yield from quoted
    except csv.Error as error:
        raise BadInput(f"{path}, line {quoted.line_num}: this is not CSV ({error})") from None


# ---------------------------------------------------------------------------------------------------------------------
# Sentences and their translations

def own_files(folder, name, *patterns):
    """Files of a data set by their names: anywhere under folder/name or, where there is no such folder, in `folder` itself."""
    place = Path(folder) / name
    return {path.name: path for pattern in patterns for path in sorted((place.rglob if place.is_dir() else Path(folder).glob)(pattern))}


def tatoeba_files(folder):
    """-> {language: files, as for data.texts}: XXX-eng.tsv with a header (also .gz, .xz), or LASER's tatoeba.XXX-eng.XXX and .eng."""
    tables = own_files(folder, "tatoeba", "???-eng.tsv", "???-eng.tsv.gz", "???-eng.tsv.xz")
    sides, found = own_files(folder, "tatoeba", "tatoeba.???-eng.???"), {name[:3]: [path] for name, path in tables.items()}
    for name in [name for name in sides if not name.endswith(".eng")]:
        if f"{name[:-3]}eng" not in sides:
            raise BadInput(f"{sides[name].with_suffix('.eng')} is missing: {sides[name]} needs its other half")
        found.setdefault(name[-3:], [sides[name], sides[f"{name[:-3]}eng"]])
    if not found:
        raise BadInput(download.missing("tatoeba", folder))
    return found


def bucc_files(folder):
    """-> {"de-en": ((German, English, gold) to set the threshold on, the same to test on)}, paths. If the gold of the test part is there,
    they are training and test [LASER]; it was never published, and without it they are sample and training [XTREME]."""
    files = own_files(folder, "bucc2018", "*-*.*.*")
    pairs = sorted({name.split(".")[0] for name in files if name.endswith((".training.gold", ".test.gold"))})
    if not pairs:
        raise BadInput(download.missing("bucc2018", folder, "bucc2018-de-en.training-gold/de-en/de-en.training.gold"))
    wanted = {pair: [[f"{pair}.{part}.{end}" for end in (*pair.split("-"), "gold")]
                     for part in (("training", "test") if f"{pair}.test.gold" in files else ("sample", "training"))] for pair in pairs}
    for name in [name for parts in wanted.values() for part in parts for name in part if name not in files]:
        raise BadInput(download.missing("bucc2018", folder, name))
    return {pair: [[files[name] for name in part] for part in parts] for pair, parts in wanted.items()}


def read_bucc(sources, targets, gold):
    """Three files -> (sentences, sentences, {(row, row), ...}). Lines are id<TAB>sentence, and id<TAB>id; bytes that are not UTF-8 become
    U+FFFD (LASER keeps them as halves of surrogate pairs, which no tokenizer takes)."""
    rows, texts = [], []
    for path in (sources, targets, gold):
        pairs = []
        for number, raw in data.read_lines(path):
            first, tab, second = raw.decode("utf-8", errors="replace").partition("\t")
            if not tab or path == gold and not (first in rows[0] and second in rows[1]):
                wanted = "two ids of the two texts" if path == gold else "id<TAB>sentence"
                raise BadInput(f"{path}:{number}: {raw[:60].decode(errors='replace')!r} is not {wanted}")
            pairs.append((first, second))
        if not pairs:
            raise BadInput(f"{path} is empty: there is nothing to mine; fetch it again, or leave this pair of languages out")
        rows.append({name: row for row, (name, _) in enumerate(pairs)})
        texts.append([text for _, text in pairs])
    return *texts[:2], {(rows[0][a], rows[1][b]) for a, b in pairs}
