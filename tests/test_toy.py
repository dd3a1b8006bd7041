"""The embedded corpora: always the same bytes, of which the grammar was checked; split by meaning;
with labels, grades and hard negatives that are true."""

import hashlib
import itertools
import json
import re

import pytest

from corpora import toy, words
from corpora.toy import LANGUAGES


def has(text, *words) -> bool:
    patterns = [rf"(?<!\w){re.escape(word)}(?!\w)" for word in words]
    return any(re.search(pattern, text, re.IGNORECASE) for pattern in patterns)


@pytest.fixture(scope="module")
def sample():
    return toy.meanings("test", 150, seed=5)


# ---- reproducible, and split by meaning


@pytest.mark.parametrize("make, digest", [
    (lambda: toy.toy("train", 1000), "94541694873ef6ac"),
    (lambda: toy.regex("train", 500), "df480044245b17cb"),
    (lambda: toy.documents("train", 60), "5b7120fdbbeaa5e9"),
    (lambda: [toy.negatives(meaning) for meaning in toy.meanings("test", 30)], "67e27a11a00403cf")],
    ids=["toy", "regex", "documents", "negatives"])
def test_the_corpora_are_what_they_have_always_been_in_every_process(make, digest):
    text = json.dumps(make(), ensure_ascii=False, sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


def test_splits_share_no_meaning_and_no_sentence_in_any_language():
    sizes = {"train": 2000, "valid": 400, "test": 400}
    by_split = {split: toy.meanings(split, count) for split, count in sizes.items()}
    everything = [meaning for rows in by_split.values() for meaning in rows]
    assert len(set(everything)) == sum(sizes.values())
    for split, count in sizes.items():
        everything += toy.meanings(split, count, seed=1)
    for language in LANGUAGES:
        owner = {}
        for index, meaning in enumerate(dict.fromkeys(everything)):
            text = toy.render(meaning, language, index % 5)
            assert owner.setdefault(text, meaning) == meaning


# ---- hard negatives, grades, labels


def test_every_negative_differs_in_one_field_and_in_every_language(sample):
    kinds = set()
    for meaning in sample:
        edits = toy.negatives(meaning)
        assert edits == toy.negatives(meaning) and len(edits) >= 3
        for kind, edited in edits:
            kinds.add(kind)
            assert sum(one != other for one, other in zip(meaning, edited)) == 1
            for how in itertools.product(LANGUAGES, range(5)):  # and style
                assert toy.render(meaning, *how) != toy.render(edited, *how)
    for language in LANGUAGES:
        texts = [toy.render(meaning, language) for meaning in sample]
        found = toy.hard_negatives(sample, language)
        assert {row for _, row, _ in found} == set(range(len(sample)))
        assert all(text != texts[row] for text, row, _ in found)
    assert kinds == {"number", "entity", "role", "negation", "cause", "tense"}


def test_a_reordered_sentence_has_the_same_words_in_another_order():
    meanings = toy.meanings("test", 400)
    for language in LANGUAGES:
        for text, row, _ in toy.reordered(meanings, language):
            gold = toy.render(meanings[row], language)
            assert text != gold and words.bag_of_words(text) == words.bag_of_words(gold)
    found = toy.reordered(meanings, "en")
    counts = {kind: sum(one == kind for _, _, one in found) for kind in ("roles", "adjectives")}
    assert counts["roles"] > 100 and counts["adjectives"] > 10
    assert sum(counts.values()) == len(found)


def test_roles_and_adjectives_are_exchanged():
    dog = toy.Meaning("dog", subject_adjective="old", verb="see", tense="past", object="cat",
                      object_adjective="small")
    gold = toy.render(dog, "en")
    assert gold == "The old dog saw the small cat."
    assert toy.reordered([dog], "en") == [("The small cat saw the old dog.", 0, "roles"),
                                          ("The small dog saw the old cat.", 0, "adjectives")]
    # A clever book is none, and "sees" would become "see".
    book = dog._replace(object="book", subject_adjective="clever")
    many = dog._replace(tense="present", object_number=3, object_adjective="")
    assert not toy.reordered([book, many], "en")


def test_labels_agree_with_the_strings():
    texts, classes = toy.labelled("test", 400)
    assert {"tense", "number", "negation", "verb", "subject"} < set(classes)
    for row, meaning in enumerate(toy.meanings("test", 400)):
        text = texts[row]
        label = {name: column[row] for name, column in classes.items()}
        assert text == toy.render(meaning, "en") and (label["negation"] == 1) == has(text, "not")
        _, (english, *_) = words.lexicon()[words.section_of(label["subject"])][label["subject"]]
        assert has(text, *", ".join(english).split(", "))  # the forms of all synonyms


def test_regex_splits_share_no_target_and_no_two_targets_share_their_english():
    rows = toy.regex("train", 2000) + toy.regex("valid", 500) + toy.regex("test", 500)
    assert len({target for _, target in rows}) == 3000
    assert len({english for english, _ in rows}) == 3000
