"""Retrieval of translations: xsim of every language in every other, BUCC, Tatoeba, and the altered
sentences of xsim++. N rows, embeddings (N, D).
"""

import itertools
import json
from pathlib import Path

from sklearn.metrics import f1_score

from common import BadInput, shown, warn
from corpora import open_text
from evaluate import (
    NotApplicable,
    embed,
    errors,
    knn,
    margin_rank,
    mean,
    percent,
    with_mean,
)


def top1(x, y):
    """Return the percentage of rows of x (N, D) whose nearest row of y (N, D) by cosine is their
    own."""
    nearest = knn(x, y, 1).indices[:, 0].tolist()
    return percent([i == j for i, j in enumerate(nearest)])


def bucc_f1(x, y):
    """Retrieve for each row of x (N, D) its nearest row of y (N, D), and return the weighted F1 in
    percent, with each row of y as a class. [MTEB, Muennighoff et al. 2023]"""
    nearest = knn(x, y, 1).indices[:, 0]
    return 100 * f1_score(range(len(x)), nearest, average="weighted", zero_division=0)


def hard_rows(lines, types, gold):
    """Read xsim++'s altered sentences: [(altered sentence, row of gold, error type), ...].

    lines: a file with one altered sentence per line. types: a JSON file {altered sentence: {"src":
    sentence of `gold`, "errtype": type}}. As in LASER, a sentence without a type is "misaligned".
    Raises BadInput if all are."""
    try:
        known = {}
        for text, one in json.loads(Path(types).read_text(encoding="utf-8")).items():
            known[text.strip()] = (one["src"].strip(), str(one["errtype"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(f"--hard-types {shown(types)} is not a file with a JSON object {{altered "
                       'sentence: {"src": sentence, "errtype": type}}') from None
    rows = {}
    for row, text in enumerate(gold):
        rows.setdefault(text.strip(), row)
    found = []
    for text, *_ in open_text([lines]).rows("all"):
        source, kind = known.get(text.strip(), ("", ""))
        found.append((text, rows[source], kind) if source in rows else (text, -1, "misaligned"))
    unknown = sum(row < 0 for _, row, _ in found)
    if unknown == len(found):
        raise BadInput(f"no line of {shown(lines)} is in {shown(types)} with a source among the "
                       f"{len(gold)} rows: the altered sentences must be in the first language")
    if unknown:
        warn(f"{unknown:,} of {len(found):,} altered sentences have no type or no source among the "
             "rows, and count as misaligned")
    return found


# ---- tasks


def need_translations(evaluation, task):
    if len(evaluation.texts) < 2:
        raise NotApplicable(f"{task} needs translations, and {evaluation.rows.name} has one text "
                            "per row")


def matrix(evaluation):
    """Return the xsim error of every ordered pair of languages, the mean, and the mean into each
    language. [LASER, --nway]"""
    need_translations(evaluation, "matrix")
    embeddings = evaluation.embeddings
    k = min(4, evaluation.count)
    wrong = {}
    into = {name: [] for name in embeddings}
    for a, b in itertools.combinations(embeddings, 2):
        both = knn(embeddings[a], embeddings[b], k), knn(embeddings[b], embeddings[a], k)
        for source, target, (there, back) in ((a, b, both), (b, a, both[::-1])):
            error = percent(errors(margin_rank(there, back), evaluation.texts[target]))
            wrong[f"{source}-{target}"] = error
            into[target].append(error)
    means = {f"xsim/into/{name}": mean(values) for name, values in into.items()}
    return {"rows": evaluation.count} | with_mean("xsim", wrong) | means


def bucc(evaluation):
    """Return `bucc_f1` of every language searched in the first, "f1/de-en", their mean "f1", and
    the other direction, "f1/en-de". [MEXMA, table 16]"""
    need_translations(evaluation, "bucc")
    (first, y), *others = evaluation.embeddings.items()
    scores = with_mean("f1", {f"{other}-{first}": bucc_f1(x, y) for other, x in others})
    scores |= {f"f1/{first}-{other}": bucc_f1(y, x) for other, x in others}
    return {"rows": evaluation.count} | scores


def tatoeba(evaluation, options):
    """Return the accuracy of the nearest sentence by cosine, in both directions, for every table
    XXX-eng.tsv (columns XXX, eng) below --files. [XTREME; MTEB searches in English]"""
    paths = {path.name[:3]: path for path in Path(options.files).rglob("???-eng.tsv*")}
    if not paths:
        raise BadInput(f"there are no tables such as {Path(options.files, 'deu-eng.tsv')} "
                       "(tasks/README.md says how to get them)")
    into = {}
    out = {}
    rows = 0
    for name, path in sorted(paths.items()):
        queries, texts = zip(*open_text([path], [name, "eng"]).rows("all"))
        # English is embedded as a first column, and the other language as a second one.
        ids = evaluation.encode_ids(texts) + evaluation.encode_ids(queries, column=1)
        y, x = embed(evaluation.model, ids, evaluation.pool).split(len(texts))
        into[f"{name}-eng"] = top1(x, y)
        out[f"eng-{name}"] = top1(y, x)
        rows += len(x)
    scores = with_mean("accuracy", into | out)
    return {"rows": rows, "error": 100 - scores["accuracy"],
            "accuracy_into_eng": mean(into.values()),
            "accuracy_from_eng": mean(out.values())} | scores


# ---- MEXMA's means over lists of languages [tables 13, 14]

# For o-xsim and d-xsim the paper gives only the number of languages, without English: here they are
# those of the 81 that LaBSE knows (72), and those of XTREME's Tatoeba, as for DAP (34).
LISTS = ("81", "90", "o", "d")


def read_languages():
    """Return {FLORES-200 code: the lists that contain it}."""
    text = Path(__file__).with_name("languages.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines()[1:]]
    return {language: lists.split() for language, lists in rows}


def list_means(results):
    """Return {"retrieval/xsim/o": mean of "retrieval/xsim/deu_Latn-eng_Latn" and so on} for each of
    LISTS of which all languages are in the results."""
    values = {}
    for name, value in results.items():
        metric, _, language = name.removesuffix("-eng_Latn").rpartition("/")
        values.setdefault(metric, {})[language] = value
    means = {}
    for name in LISTS:
        languages = {language for language, lists in read_languages().items() if name in lists}
        for metric, found in values.items():
            if found.keys() >= languages:
                means[f"{metric}/{name}"] = mean([found[one] for one in sorted(languages)])
    return means
