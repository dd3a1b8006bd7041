"""The embedded corpora: always the same bytes, of which the grammar was checked; split by orbit;
with labels and twins that are true."""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from base.tokenizer import Tokenizer
from corpora import toy
from corpora.toy import LANGUAGES, Meaning
from corpora.toy_regex import regex
from corpora.toy_stories import documents, labelled_story

MEANING = Meaning("nurse", "old", "red", "see", "present", 0, "guest", "young", "blue", "park",
                  "today")


def render(language="en", **changes):
    return toy.render(MEANING._replace(**changes), language)


# ---- reproducible, and split by orbit


@pytest.mark.parametrize("make, digest", [
    (lambda: regex("train", 500), "df480044245b17cb"),
    (lambda: documents("train", 60), "366f7f0d0c7372fc"),
    (lambda: toy.toy("train", 1000), "bcf7948622d5476f"),
    (lambda: [toy.negatives(meaning) for meaning in toy.meanings("test", 30)], "ad949bc53be3281b"),
    (lambda: labelled_story("test", 60), "b6655ce15a425215")],
    ids=["regex", "documents", "toy", "negatives", "sentences of documents"])
def test_the_corpora_are_the_same_bytes_in_every_process(make, digest):
    text = json.dumps(make(), ensure_ascii=False, sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


def test_no_twin_of_a_test_row_is_in_the_training_set():
    trained = {row["en"] for row in toy.toy("train", 20_000)}
    rows = toy.meanings("test", 1000)
    for language in LANGUAGES:
        assert toy.twins(rows, language)
    assert not trained & {text for text, _, _ in toy.twins(rows, "en")}
    assert not {*toy.meanings("train", 20_000)} & {one for row in rows for one in toy.orbit(row)}


def test_an_orbit_is_closed_under_every_exchange():
    eight = {*toy.orbit(MEANING)}
    assert len(eight) == 8
    for _, parts in toy.TWINS:
        assert {toy.exchange(one, *parts) for one in eight} == eight


# ---- the grammar


def expected(language):
    """Yield (changes of MEANING, sentence) of the cases of a language."""
    text = (Path(__file__).parent / "cases/scenes.txt").read_text(encoding="utf-8")
    for line in text.split(f"[{language}]")[1].split("\n\n")[0].splitlines()[1:]:
        words, sentence = line.split("| ")
        changes = dict(word.split("=") for word in words.split())
        yield changes | {"negated": int(changes.get("negated", 0))}, sentence


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_construction_of_a_language(language):
    for changes, sentence in expected(language):
        assert render(language, **changes) == sentence


# ---- twins


def bags(tokens):
    """Return how often each token and each pair of neighboring tokens occurs."""
    tokens = [*tokens]
    return Counter(tokens), Counter(zip(tokens, tokens[1:]))


def test_twins_of_a_sentence():
    short = MEANING._replace(place="", object="singer")
    assert toy.twins([short], "en") == [
        ("Today, the young nurse with the red hat sees the old singer with the blue hat.", 0,
         "near"),
        ("Today, the old nurse with the blue hat sees the young singer with the red hat.", 0,
         "far"),
        ("Today, the young singer with the blue hat sees the old nurse with the red hat.", 0,
         "far")]
    # Case and articles follow the role, so German often keeps only the exchange of the colors.
    kinds = {noun: [kind for _, _, kind in toy.twins([short._replace(object=noun)], "de")]
             for noun in ("singer", "guest", "horse")}
    assert kinds == {"singer": ["near", "far", "far"], "guest": ["far"],
                     "horse": ["near", "far"]}
    # With one color twice only the participants can be exchanged.
    same = [MEANING._replace(object_color="red")]
    assert [kind for _, _, kind in toy.twins(same, "en")] == ["near", "far"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_near_twins_keep_the_words_and_far_twins_also_the_neighbors(language):
    rows = toy.meanings("test", 300)
    golds = [toy.render(meaning, language) for meaning in rows]
    found = toy.twins(rows, language)
    tokenizers = [Tokenizer.train([row[language] for row in toy.toy("train", 2000)], vocab)
                  for vocab in (400, 1600)]
    encoders = [tokenizer.encode for tokenizer in tokenizers]
    encoders.append(lambda texts: [re.findall(r"\w+|[^\w\s]", text) for text in texts])
    for encode in encoders:
        texts = encode([text for text, _, _ in found])
        for tokens, (text, row, kind) in zip(texts, found):
            [gold] = encode([golds[row]])
            words, pairs = bags(tokens)
            assert text != golds[row]
            if kind == "near":
                assert words == bags(gold)[0]
                assert pairs != bags(gold)[1] or encode is not encoders[-1]
            else:
                assert (words, pairs) == bags(gold)


def test_every_english_sentence_has_a_near_and_a_far_twin():
    rows = toy.meanings("test", 1000)
    found = toy.twins(rows, "en")
    for kind in ("near", "far"):
        assert {row for _, row, one in found if one == kind} == {*range(1000)}


# ---- labels


def test_labels_agree_with_the_strings():
    texts, classes = toy.labelled("test", 400)
    assert [*classes] == ["negation", "subject", "object", "verb", "tense", "place", "time"]
    for text, *label in zip(texts, *classes.values()):
        negated, subject, other, *_, time = label
        assert re.match(rf"{time}, the \w+ {subject} .* the \w+ {other} ", text, re.IGNORECASE)
        assert (" not " in text) == negated


def test_regex_splits_share_no_target_and_no_two_targets_share_their_english():
    rows = regex("train", 2000) + regex("valid", 500) + regex("test", 500)
    assert len({target for _, target in rows}) == 3000
    assert len({english for english, _ in rows}) == 3000
