"""The embedded corpora: reproducible, split by meaning, and grammatical as far as an independent
check can see."""

import hashlib
import json
import re

import pytest

from corpora import toy, words
from corpora.program import BadInput
from corpora.toy import LANGUAGES, Meaning

ALPHABETS = {
    "en": r"a-zA-Z,.\-", "de": "a-zA-ZäöüÄÖÜß,.", "fr": r"a-zA-ZàâæçéèêëîïôœùûüÀÈÉ,.'\-",
    "es": "a-zA-ZáéíóúñüÁÉ,.", "ru": "а-яА-ЯёЁ,.",
}
REGEX_TOKEN = re.compile(
    r"\[AEIOUaeiou\]|\[0-9\]|\[A-Za-z\]|\[A-Z\]|\[a-z\]|dog|truck|ring|lake"
    r"|\\b|\{[2-7]\}|\{[2-7],\}|\{1,[2-7]\}|[.*+|&~()]")
WORD_OR_MARK = re.compile(r"\w+|[^\w\s]")


def cells(section, concept, language):
    """The synonyms of a concept as lists of forms, read from the file itself."""
    columns = words.table()[section][concept][1]
    return [cell.split(", ") for cell in columns[LANGUAGES.index(language)]]


def every_style(meaning, language):
    return [toy.render(meaning, language, style) for style in range(5)]


def has(text, *words) -> bool:
    patterns = [rf"(?<!\w){re.escape(word)}(?!\w)" for word in words]
    return any(re.search(pattern, text, re.IGNORECASE) for pattern in patterns)


@pytest.fixture(scope="module")
def sample():
    return toy.meanings("test", 400, seed=5)


# ---- reproducible, and split by meaning


@pytest.mark.parametrize("make, digest", [
    (lambda: toy.toy("train", 1000), "94541694873ef6ac"),
    (lambda: toy.regex("train", 500), "df480044245b17cb"),
    (lambda: toy.documents("train", 60), "5b7120fdbbeaa5e9"),
    (lambda: toy.graded(20), "be7bc3017b7e5f5b"),
    (lambda: [toy.negatives(meaning) for meaning in toy.meanings("test", 30)], "67e27a11a00403cf")],
    ids=["toy", "regex", "documents", "graded", "negatives"])
def test_the_corpora_are_what_they_have_always_been_in_every_process(make, digest):
    text = json.dumps(make(), ensure_ascii=False, sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


def test_a_longer_corpus_begins_with_the_shorter_one():
    assert toy.toy("valid", 40)[:10] == toy.toy("valid", 10)
    assert toy.toy("valid", 10, seed=1) != toy.toy("valid", 10, seed=2)
    assert toy.regex("test", 40)[:10] == toy.regex("test", 10)


def test_splits_share_no_meaning_and_no_sentence_in_any_language():
    sizes = {"train": 4000, "valid": 800, "test": 800}
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


@pytest.mark.parametrize("call", [toy.meanings, toy.toy, toy.regex, toy.documents, toy.labelled])
def test_an_unknown_split_is_refused(call):
    with pytest.raises(BadInput, match="split 'dev' is unknown: choose from train, valid, test"):
        call("dev", 1)


# ---- the words


def test_no_form_belongs_to_two_concepts_of_a_section():
    for section, concepts in words.table().items():
        if section in ("links", "words"):        # where a row is repeated for another position
            continue
        owner = {}
        for concept, (_, columns) in concepts.items():
            for number, column in enumerate(columns):
                for cell in column:
                    assert owner.setdefault((number, cell), concept) == concept, (section, cell)


# ---- grammar


def test_every_alphabet_is_the_languages_own(sample):
    for language in LANGUAGES:
        shape = re.compile(rf"[{ALPHABETS[language]} ]+\.")
        for meaning in sample:
            for text in every_style(meaning, language):
                assert shape.fullmatch(text) and text[0].isupper(), text
                assert "  " not in text and " ," not in text, text


def finite_forms(section, concept, language, tense):
    """(singular, plural) finite forms by tense, worked out in another way than `render` does."""
    singular, plural = [], []
    for forms in cells(section, concept, language):
        table = {
            "en": {"present": [forms[1], forms[0]], "past": [forms[2]] * 2, "future": ["will"] * 2},
            "de": {"present": forms[0:2], "past": forms[2:4], "future": ["wird", "werden"]},
            "ru": {"present": forms[0:2], "past": forms[2:5:2], "future": forms[5:7]},
        }.get(language, {"present": forms[0:2], "past": forms[2:4], "future": forms[4:6]})
        one, many = table[tense]
        if language == "ru" and tense == "past":
            singular.append(forms[3])            # feminine
        singular.append(one)
        plural.append(many)
    return singular, plural


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_subject_and_its_verb_are_of_one_number(sample, language):
    checked = 0
    for meaning in sample:
        if meaning.link or meaning.negated:      # one verb only, in its plain form
            continue
        right, wrong = finite_forms("verbs", meaning.verb, language, meaning.tense)
        if meaning.subject_number > 1 or meaning.companion:
            right, wrong = wrong, right
        for text in every_style(meaning, language):
            assert has(text, *right), (text, right)
            assert not has(text, *(form for form in wrong if form not in right)), (text, wrong)
            checked += 1
    assert checked > 500


@pytest.mark.parametrize("noun, number, adjective, case, expected", [
    ("doctor", 1, "old", "subject",
     "the old doctor/der alte Arzt/le vieux médecin/el médico viejo/старый врач"),
    ("doctor", 1, "old", "object",
     "the old doctor/den alten Arzt/le vieux médecin/al médico viejo/старого врача"),
    ("artist", 1, "beautiful", "object", "the beautiful artist/den schönen Künstler/"
     "le bel artiste/al artista bonito/красивого художника"),
    ("singer", 2, "happy", "object", "two happy singers/zwei glückliche Sängerinnen/"
     "deux chanteuses heureuses/a dos cantantes felices/двух счастливых певиц"),
    ("book", 3, "red", "object",
     "three red books/drei rote Bücher/trois livres rouges/tres libros rojos/три красные книги"),
    ("table", 4, "heavy", "object", "four heavy tables/vier schwere Tische/"
     "quatre tables lourdes/cuatro mesas pesadas/четыре тяжёлых стола"),
    ("apple", 1, "expensive", "denied", "an expensive apple/keinen teuren Apfel/"
     "de pomme chère/una manzana cara/дорогое яблоко"),
    ("apple", 5, "", "denied", "five apples/fünf Äpfel/cinq pommes/cinco manzanas/пять яблок"),
    ("girl", 1, "small", "object", "the small girl/das kleine Mädchen/"
     "la petite fille/a la niña pequeña/маленькую девочку"),
    ("mary", 1, "", "object", "Mary/Maria/Marie/a María/Марию")])
def test_noun_phrases_are_inflected_as_a_grammar_book_has_them(
        noun, number, adjective, case, expected):
    phrases = [toy._phrase(name, noun, number, adjective, case)[0] for name in LANGUAGES]
    assert "/".join(phrases) == expected


def test_french_elides_spanish_contracts_and_german_puts_the_verb_where_it_belongs():
    meaning = Meaning("artist", 1, "", "", "call", "past", 1, "artist", 1, "", "park", "",
                      "because", "anna", 1, "sleep")
    assert any("qu'Anne" in text for text in every_style(meaning, "fr"))
    assert all(has(text, "l'artiste n'a pas appelé l'artiste")
               for text in every_style(meaning, "fr"))
    assert all("al artista" in text for text in every_style(meaning, "es"))
    for text in every_style(meaning, "de"):
        assert re.search(r"(weil|da) Anna schlief(, rief der Künstler|\.)", text, re.IGNORECASE)
    plain = "même si elle, même si il, parce que huit chats, la amie de Anne"
    assert toy.ELISION.sub(lambda match: (match[1] or "") + "'", plain) == (
        "même si elle, même s'il, parce que huit chats, l'amie d'Anne")


def test_styles_mostly_differ_and_sentences_are_of_many_lengths(sample):
    styles = [len(set(every_style(meaning, "en"))) for meaning in sample]
    assert sum(styles) / len(sample) > 3.5
    lengths = [len(row["en"].split()) for row in toy.toy("train", 2000)]
    assert min(lengths) <= 6 and max(lengths) >= 20 and 10 < sum(lengths) / len(lengths) < 14


# ---- hard negatives, grades, labels


def test_every_negative_differs_in_one_field_and_in_every_language(sample):
    kinds = set()
    for meaning in sample:
        edits = toy.negatives(meaning)
        assert edits == toy.negatives(meaning) and len(edits) >= 3
        for kind, edited in edits:
            kinds.add(kind)
            assert sum(one != other for one, other in zip(meaning, edited)) == 1
            for language in LANGUAGES:
                pairs = zip(every_style(meaning, language), every_style(edited, language))
                assert all(one != other for one, other in pairs)
    assert kinds == {"number", "entity", "role", "negation", "cause", "tense"}


def test_a_negative_keeps_the_wording_that_its_edit_does_not_concern(sample):
    """Otherwise a search could find the edit by its style. Only the edited name may change."""
    for meaning in sample:
        for kind, edited in toy.negatives(meaning):
            if kind == "entity":
                texts = [toy.render(one, "en", 1).split() for one in (meaning, edited)]
                assert sum(one != other for one, other in zip(*texts, strict=True)) == 1


@pytest.mark.parametrize("language", LANGUAGES)
def test_hard_negatives_know_their_row_and_differ_from_its_sentence(sample, language):
    texts = [toy.render(meaning, language) for meaning in sample]
    found = toy.hard_negatives(sample, language)
    assert {row for _, row, _ in found} == set(range(len(sample)))
    assert all(text != texts[row] for text, row, _ in found)


def test_graded_pairs_cover_the_range_and_equal_meanings_score_five():
    pairs = toy.graded(300)
    scores = [score for _, _, score in pairs]
    assert all((one == other) == (score == 5) for one, other, score in pairs)
    for low in range(5):
        assert sum(low <= score <= low + 1 for score in scores) > 20
    for language in LANGUAGES:
        texts = toy.graded_pairs(300, language)
        assert [score for _, _, score in texts] == scores
        assert texts[0][:2] == tuple(toy.render(meaning, language) for meaning in pairs[0][:2])


def test_the_score_falls_with_every_further_changed_field():
    for one, other, score in toy.graded(100, seed=1):
        previous = 5.0
        current = one
        for field in Meaning._fields:
            if getattr(current, field) != getattr(other, field):
                current = current._replace(**{field: getattr(other, field)})
                similarity = toy.similarity(one, current)
                assert similarity < previous or previous == 0
                previous = similarity
        assert previous == score == toy.similarity(other, one)


def test_held_out_meanings_are_far_from_each_other():
    meanings = toy.meanings("test", 200)
    differences = []
    for index, left in enumerate(meanings):
        for right in meanings[:index]:
            differences.append(sum(one != other for one, other in zip(left, right)))
    assert min(differences) >= 2
    assert sum(difference < 5 for difference in differences) < len(differences) / 100


def test_labels_agree_with_the_strings():
    texts, classes = toy.labelled("test", 400)
    assert {"tense", "number", "negation", "verb", "subject"} < set(classes)
    for row, meaning in enumerate(toy.meanings("test", 400)):
        text = texts[row]
        label = {name: column[row] for name, column in classes.items()}
        assert text == toy.render(meaning, "en") and (label["negation"] == 1) == has(text, "not")
        section = words.section_of(label["subject"])
        forms = [form for cell in cells(section, label["subject"], "en") for form in cell]
        assert has(text, *forms)
        if not meaning.link:
            assert (label["tense"] == "future") == has(text, "will")
            if label["tense"] == "future":       # who acts comes before the verb
                assert has(text[:text.lower().find("will ")], *forms)
            singular, plural = finite_forms("verbs", meaning.verb, "ru", label["tense"])
            right = plural if label["number"] == "plural" else singular
            assert has(toy.render(meaning, "ru"), *right)


# ---- documents


def test_documents_are_long_enough_and_keep_their_hero():
    for text in toy.documents("train", 30):
        assert 128 <= len(WORD_OR_MARK.findall(text)) <= 420 and 10 <= text.count(".") <= 40
        assert len(re.findall(r"\b(he|she)\b", text, re.IGNORECASE)) >= 3


# ---- regular expressions


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_target_is_balanced_and_of_the_documented_dialect(split):
    for english, target in toy.regex(split, 500):
        assert REGEX_TOKEN.sub("", target) == ""
        assert english.startswith("lines ") and "{" not in english
        re.compile(target.replace("&", "").replace("~", ""))  # raises, if it is not balanced
        for left, right in re.findall(r"\(([^()]+)\)[&|]\(([^()]+)\)", target):
            assert left != right                 # never: a vowel or a vowel


def test_regex_splits_share_no_target_and_no_two_targets_share_their_english():
    rows = toy.regex("train", 4000) + toy.regex("valid", 500) + toy.regex("test", 500)
    assert len({target for _, target in rows}) == 5000
    assert len({english for english, _ in rows}) == 5000
