"""Translations among many sentences: xsim of every language in every other, BUCC, Tatoeba, and the
altered sentences of xsim++.

First the metrics, of vectors (N, D) and (M, D); then the files of the data sets; then the tasks.
"""

import itertools
import json
import sys
from pathlib import Path

from sklearn.metrics import f1_score

from corpora import download, open_text
from corpora.program import BadInput
from corpora.text import read_lines
from evaluate import by_margin, embed, mean, mistakes, percent, search, with_mean
from tasks.metrics import read_table, top1


def bucc_f1(x, y):
    """BUCC as MTEB scores it: each row of x takes its nearest row of y by cosine, and each row of y
    is a class: (N, D), (N, D) -> weighted F1, 0..100. [Muennighoff et al. 2023]"""
    found = search(x, y, 1).indices[:, 0]
    return 100 * f1_score(range(len(x)), found, average="weighted", zero_division=0)


# ---- files


def hard_rows(lines, types, gold):
    """xsim++'s two files: one altered sentence a line, and JSON {altered sentence: {"src": sentence
    of `gold`, "errtype": type}} -> [(altered sentence, row, type), ...]. A sentence without a type
    is "misaligned", as in LASER; BadInput if all are."""
    try:
        known = {}
        for text, one in json.loads(Path(types).read_text(encoding="utf-8")).items():
            known[text.strip()] = (one["src"].strip(), str(one["errtype"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(f"--hard-types {types} is not a JSON object {{altered sentence: "
                       '{"src": sentence, "errtype": type}}') from None
    rows = {}
    for row, text in enumerate(gold):
        rows.setdefault(text.strip(), row)
    found = []
    for text, *_ in open_text([lines]).rows("all"):
        source, kind = known.get(text.strip(), ("", ""))
        found.append((text, rows[source], kind) if source in rows else (text, -1, "misaligned"))
    lost = sum(row < 0 for _, row, _ in found)
    if lost == len(found):
        raise BadInput(f"no line of {lines} is in {types} with a source among the {len(gold)} "
                       "rows: the first language must be the altered one")
    if lost:
        print(f"note: {lost:,} of {len(found):,} altered sentences have no type or no source among "
              "the rows: if found, misaligned", file=sys.stderr)
    return found


def own_files(folder, name, *patterns):
    """{name: path} of a data set's files: anywhere under the folders in `folder` whose names begin
    with its name (tatoeba, Tatoeba-v1, bucc2018-de-en), else in `folder` itself."""
    places = [place for place in sorted(Path(folder).glob("*"))
              if place.name.lower().startswith(name) and place.is_dir()]
    found = {}
    for pattern in patterns:
        for place in places:
            found |= {path.name: path for path in sorted(place.rglob(pattern))}
        if not places:
            found |= {path.name: path for path in sorted(Path(folder).glob(pattern))}
    return found


def tatoeba_files(folder):
    """The files of each language -> {language: paths}: XXX-eng.tsv with a header (also .gz, .xz),
    or LASER's tatoeba.XXX-eng.XXX and .eng."""
    tables = own_files(folder, "tatoeba", "???-eng.tsv", "???-eng.tsv.gz", "???-eng.tsv.xz")
    found = {name[:3]: [path] for name, path in tables.items()}
    for name, path in own_files(folder, "tatoeba", "tatoeba.???-eng.???").items():
        if path.suffix != ".eng":
            found.setdefault(name[-3:], [path, path.with_suffix(".eng")])
    if not found:
        raise BadInput(download.missing("tatoeba", folder))
    return found


def bucc_files(folder):
    """The training part of BUCC 2018 -> {"de-en": paths of the German, the English, the gold}. MTEB
    takes its gold too, as that of the test part was never published."""
    files = own_files(folder, "bucc", "*-*.training.*")
    found = {}
    for pair in sorted({name.split(".")[0] for name in files}) or ["de-en"]:
        names = [f"{pair}.training.{end}" for end in (*pair.split("-"), "gold")]
        for name in names:
            if name not in files:
                raise BadInput(download.missing("bucc2018", folder, name))
        found[pair] = [files[name] for name in names]
    return found


def read_bucc(sources, targets, gold):
    """Three files -> the N sentences and N translations of the gold pairs. Lines are
    id<TAB>sentence, those of the gold id<TAB>id. Bytes that are not UTF-8 become U+FFFD."""
    read = []
    for path in (sources, targets, gold):
        pairs = []
        for number, raw in read_lines(path):
            first, tab, second = raw.decode("utf-8", errors="replace").partition("\t")
            known = path != gold or first in read[0] and second in read[1]
            if not tab or not known:
                wanted = "two ids of the two texts" if path == gold else "id<TAB>sentence"
                raise BadInput(f"{path}:{number}: {raw[:60]!r} is not {wanted}")
            pairs.append((first, second))
        if not pairs:
            raise BadInput(f"{path} is empty: fetch it again, or leave this pair of languages out")
        read.append(pairs if path == gold else dict(pairs))
    x, y, pairs = read
    return [x[one] for one, _ in pairs], [y[other] for _, other in pairs]


# ---- tasks


def matrix(evaluation, options=None):
    """xsim of every ordered pair of languages, the mean, and the mean into each. [LASER, --nway]"""
    vectors = evaluation.vectors
    errors = {}
    into = {name: [] for name in vectors}
    for a, b in itertools.combinations(vectors, 2):
        k = min(4, evaluation.count)
        both = search(vectors[a], vectors[b], k), search(vectors[b], vectors[a], k)
        for source, target, (there, back) in ((a, b, both), (b, a, both[::-1])):
            wrong = percent(mistakes(by_margin(there, back), evaluation.texts[target]))
            errors[f"{source}-{target}"] = wrong
            into[target].append(wrong)
    means = {f"xsim/into/{name}": mean(values) for name, values in into.items()}
    return {"rows": evaluation.count} | with_mean("xsim", errors) | means


def bucc(evaluation, options=None):
    """"f1" is every language searched in the first, as in MTEB's de-en; "f1/en-de" is the other
    way."""
    (first, y), *others = evaluation.vectors.items()
    found = with_mean("f1", {f"{other}-{first}": bucc_f1(x, y) for other, x in others})
    found |= {f"f1/{first}-{other}": bucc_f1(y, x) for other, x in others}
    return {"rows": evaluation.count} | found


def embed_pair(evaluation, queries, texts):
    """Vectors of two lists of texts: of the first as of other columns, of the second as of the
    first column, which is searched in."""
    rows = evaluation.ids_of(texts) + evaluation.ids_of(queries, column=1)
    vectors = embed(evaluation.model, rows, evaluation.pool)
    y, x = vectors.split([len(texts), len(queries)])
    return x, y


def bucc2018(evaluation, options):
    """MEXMA's BUCC, of every language pair in --files, whole: as `bucc`, "f1/de-en" is every German
    sentence searched in the English ones. [MEXMA, table 16; as MTEB]"""
    each = {}
    rows = 0
    for pair, files in bucc_files(options.files).items():
        texts = read_bucc(*files)
        each[pair] = bucc_f1(*embed_pair(evaluation, *texts))
        rows += len(texts[0])
    return {"rows": rows} | with_mean("f1", each)


def tatoeba(evaluation, options):
    """Nearest by cosine, both ways, of every language in --files, whole; "into" English is XTREME's
    and MTEB's direction."""
    into = {}
    out = {}
    rows = 0
    for name, files in tatoeba_files(options.files).items():
        text = open_text(files, [name, "eng"])
        x, y = embed_pair(evaluation, *zip(*text.rows("all")))
        into[f"{name}-eng"] = top1(x, y)
        out[f"eng-{name}"] = top1(y, x)
        rows += len(x)
    scores = with_mean("accuracy", into | out)
    return {"rows": rows, "error": 100 - scores["accuracy"],
            "accuracy_into_eng": mean(into.values()),
            "accuracy_from_eng": mean(out.values())} | scores


# MEXMA's tables 13 and 14. For o- and d-xsim the paper prints only how many languages there are:
# here they are those of the 81 that LaBSE knows, and those of XTREME's Tatoeba, as in DAP. English
# itself is in no list.
LISTS = {"81": "MEXMA's 81 languages", "90": "MEXMA's 90 languages",
         "o": "the 72 that LaBSE knows too", "d": "the 34 that DAP knows too"}


def list_means(results):
    """{"retrieval/xsim/deu_Latn-eng_Latn": number, ...} -> {"retrieval/xsim/o": mean over the
    languages of a list, if all are there}. [MEXMA, tables 1, 7, 8]"""
    values = {}
    for name, value in results.items():
        metric, _, language = name.removesuffix("-eng_Latn").rpartition("/")
        values.setdefault(metric, {})[language] = value
    means = {}
    table = read_table("languages.tsv")
    for name in LISTS:
        languages = {language for language, lists in table if name in lists.split()}
        for metric, found in values.items():
            if found.keys() >= languages:
                means[f"{metric}/{name}"] = mean([found[one] for one in sorted(languages)])
    return means


def files_missing(find, evaluation, options):
    """Why a task of files of its own cannot be done, before anything is computed; or ""."""
    try:
        find(options.files)
    except BadInput as error:
        return f"needs files: {error}"
    return ""
