"""Retrieval of translations: BUCC, and the altered sentences of xsim++. N rows, embeddings
(N, D)."""

import json
from pathlib import Path

from sklearn.metrics import f1_score

from base.common import BadInput, shown, warn
from base.metrics import knn, over_pairs
from corpora import open_text
from corpora.overlap import bag_of_words
from evaluate import need_translations


def bucc(evaluation):
    """Retrieve for each sentence its nearest one, by cosine, in the first language, and return the
    weighted F1 in percent, with each of its sentences as a class. [MTEB, Muennighoff et
    al. 2023; MEXMA, table 16]"""
    need_translations(evaluation, "bucc")

    def f1(x, y, *_):
        nearest = knn(x, y, 1).indices[:, 0]
        return {"f1": 100 * f1_score(range(len(x)), nearest, average="weighted", zero_division=0)}

    return {"rows": evaluation.rows.count} | over_pairs(evaluation.embeddings, f1)


def hard_rows(lines, types, gold):
    """Read xsim++'s altered sentences: [(altered sentence, row of gold, error type), ...].

    lines: a file with one altered sentence per line. types: a JSON file {altered sentence: {"src":
    sentence of `gold`, "errtype": type}}. As in LASER, a sentence without a type is "misaligned".
    """
    try:
        known = {text.strip(): (one["src"].strip(), str(one["errtype"])) for text, one in
                 json.loads(Path(types).expanduser().read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(f"--hard-types {shown(types)} is not a file with a JSON object {{altered "
                       'sentence: {"src": sentence, "errtype": type}}') from None
    rows = {text.strip(): row for row, text in reversed([*enumerate(gold)])}
    found = []
    for text, *_ in open_text([lines]).rows("all"):
        source, kind = known.get(text.strip(), ("", ""))
        found.append((text, rows[source], kind) if source in rows else (text, -1, "misaligned"))
    if unknown := sum(row < 0 for _, row, _ in found):
        warn(f"{unknown:,} of {len(found):,} altered sentences have no type or no source among the "
             "rows, which must be in the first language, and count as misaligned")
    return found


def reordered(hard, gold):
    """Return those of xsim++'s altered sentences that have the words of their sentence of `gold` in
    another order. The order error of `retrieval` is measured on them."""
    return [(text, row, kind) for text, row, kind in hard
            if row >= 0 and bag_of_words(text) == bag_of_words(gold[row])]
