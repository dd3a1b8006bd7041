"""The embedded corpora: reproducible, split by meaning, and grammatical as far as an independent check can see."""
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import grammar  # noqa: E402
from grammar import LANGUAGES, Meaning  # noqa: E402

ALPHABETS = {
    "en": r"a-zA-Z,.\-", "de": "a-zA-ZäöüÄÖÜß,.", "fr": r"a-zA-ZàâæçéèêëîïôœùûüÀÈÉ,.'\-", "es": "a-zA-ZáéíóúñüÁÉ,.",
    "ru": "а-яА-ЯёЁ,.",
}
REGEX_TOKEN = re.compile(
    r"\[AEIOUaeiou\]|\[0-9\]|\[A-Za-z\]|\[A-Z\]|\[a-z\]|dog|truck|ring|lake|\\b|\{[2-7]\}|\{[2-7],\}|\{1,[2-7]\}|[.*+|&~()]")


def sha256(rows) -> str:
    return hashlib.sha256(json.dumps(rows, ensure_ascii=False, sort_keys=True).encode()).hexdigest()


def cells(section, concept, language):
    """The synonyms of a concept as lists of forms, read from the file itself."""
    return [cell.split(", ") for cell in grammar._table()[section][concept][1][LANGUAGES.index(language)]]


def every_style(meaning, language):
    return [grammar.render(meaning, language, style) for style in range(5)]


def has(text, *words) -> bool:
    return any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) for word in words)


@pytest.fixture(scope="module")
def sample():
    return grammar.meanings("test", 400, seed=5)


def test_the_corpora_are_what_they_have_always_been():
    assert sha256(grammar.toy("train", 1000)) == "94541694873ef6ac3262f79b874ecfd569a6a0aabd78e06f9493c46f0c0ee58d"
    assert sha256(grammar.regex("train", 500)) == "df480044245b17cb1a84fd17e8ddc016f193d23f480cb87455e59dc7f3b79d22"


def test_a_fresh_process_with_another_hash_seed_gives_the_same_bytes():
    code = ("import grammar, hashlib; print(hashlib.sha256(repr((grammar.toy('test', 50), grammar.documents('valid', 2), "
            "grammar.graded(20), grammar.negatives(grammar.meanings('test', 1)[0]), grammar.regex('test', 50))).encode())"
            ".hexdigest())")
    runs = [subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={"PYTHONHASHSEED": seed, "PYTHONUTF8": "1"}, text=True,
                           capture_output=True, check=True).stdout for seed in ("1", "2")]
    assert runs[0] == runs[1] != ""


def test_a_longer_corpus_begins_with_the_shorter_one():
    assert grammar.toy("valid", 40)[:10] == grammar.toy("valid", 10)
    assert grammar.toy("valid", 10, seed=1) != grammar.toy("valid", 10, seed=2)
    assert grammar.regex("test", 40)[:10] == grammar.regex("test", 10)


def test_splits_share_no_meaning_and_no_sentence_in_any_language():
    splits = {"train": 4000, "valid": 800, "test": 800}
    found = [meaning for split, count in splits.items() for seed in (0, 1) for meaning in grammar.meanings(split, count, seed)]
    by_split = [set(grammar.meanings(split, count)) for split, count in splits.items()]
    assert [len(meanings) for meanings in by_split] == list(splits.values())
    assert not by_split[0] & by_split[1] | by_split[0] & by_split[2] | by_split[1] & by_split[2]
    found = list(dict.fromkeys(found))
    for language in LANGUAGES:
        owner = {}
        for index, meaning in enumerate(found):
            assert owner.setdefault(grammar.render(meaning, language, index % 5), meaning) == meaning


def test_an_unknown_split_is_refused():
    for call in (grammar.meanings, grammar.toy, grammar.regex, grammar.documents):
        with pytest.raises(ValueError, match="none of train, valid, test"):
            call("dev", 1)


def test_every_alphabet_is_the_languages_own(sample):
    for language in LANGUAGES:
        shape = re.compile(rf"[{ALPHABETS[language]} ]+\.")
        for meaning in sample:
            for text in every_style(meaning, language):
                assert shape.fullmatch(text) and text[0].isupper() and "  " not in text and " ," not in text, text


def test_no_form_belongs_to_two_concepts_of_a_section():
    for section, concepts in grammar._table().items():
        if section in ("links", "words"):                         # where a row is repeated for another position
            continue
        for column in range(len(next(iter(concepts.values()))[1])):
            owner = {}
            for concept, (_, columns) in concepts.items():
                for cell in columns[column]:
                    assert owner.setdefault(cell, concept) == concept, (section, cell)


def test_every_row_has_a_cell_for_each_language_and_the_right_number_of_forms():
    sizes = {"names": (1, 1, 1, 1, 2), "animates": (2, 4, 3, 3, 5), "things": (2, 4, 3, 3, 5), "adjectives": (1, 1, (5, 6), 4, 7),
             "verbs": (3, 4, 6, 6, 7), "causes": (5, 5, 6, 6, 7), "numbers": (1, 1, 1, 1, 3), "openers": (1,) * 5}
    for section, expected in sizes.items():
        for concept in grammar._table()[section]:
            for language, size in zip(LANGUAGES, expected):
                for forms in cells(section, concept, language):
                    assert len(forms) in (size if isinstance(size, tuple) else (size,)), (section, concept, language)


def finite_forms(section, concept, language, tense):
    """(singular, plural) finite forms by tense, worked out from the table in another way than the realiser does."""
    singular, plural = [], []
    for forms in cells(section, concept, language):
        if language in ("fr", "es"):
            pair = {"present": forms[0:2], "past": forms[2:4], "future": forms[4:6]}[tense]
        elif language == "ru":
            pair = {"present": forms[0:2], "past": [forms[2], forms[4]], "future": forms[5:7]}[tense]
            singular += forms[3:4] if tense == "past" else []
        elif language == "de":
            pair = {"present": forms[0:2], "past": forms[2:4], "future": ["wird", "werden"]}[tense]
        else:
            pair = {"present": [forms[1], forms[0]], "past": [forms[2]] * 2, "future": ["will"] * 2}[tense]
        singular.append(pair[0])
        plural.append(pair[1])
    return singular, plural


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_plural_subject_takes_a_plural_verb_and_a_singular_one_a_singular_verb(sample, language):
    checked = 0
    for meaning in sample:
        if meaning.link or meaning.negated:                       # one verb only, in its plain form
            continue
        singular, plural = finite_forms("verbs", meaning.verb, language, meaning.tense)
        right, wrong = (plural, singular) if meaning.subject_number > 1 or meaning.companion else (singular, plural)
        for text in every_style(meaning, language):
            assert has(text, *right), (text, right)
            assert not has(text, *(form for form in wrong if form not in right)), (text, wrong)
            checked += 1
    assert checked > 500


@pytest.mark.parametrize("language, masculine, feminine", [
    ("de", "der|den|einen|keinen", "die|eine|keine"), ("fr", "le|un", "la|une"), ("es", "el|al|un", "la|una")])
def test_articles_agree_with_the_gender_of_their_noun(language, masculine, feminine):
    for section in ("animates", "things"):
        for concept in grammar._concepts(section):
            for rare, (gender, *_) in zip((False, True), cells(section, concept, language)):
                phrase, told = grammar._phrase(language, concept, 1, "", "object", rare)
                words = grammar._elide(phrase).split() if language == "fr" else phrase.split()
                expected = {"m": masculine, "f": feminine, "n": "das|ein"}[gender]
                assert told == gender and ("l'" in phrase or len(words) == 1 or re.fullmatch(expected, words[-2])), phrase


@pytest.mark.parametrize("noun, number, adjective, case, expected", [
    ("doctor", 1, "old", "subject", "the old doctor/der alte Arzt/le vieux médecin/el médico viejo/старый врач"),
    ("doctor", 1, "old", "object", "the old doctor/den alten Arzt/le vieux médecin/al médico viejo/старого врача"),
    ("artist", 1, "beautiful", "object", "the beautiful artist/den schönen Künstler/le bel artiste/"
                                       "al artista bonito/красивого художника"),
    ("singer", 2, "happy", "object", "two happy singers/zwei glückliche Sängerinnen/deux chanteuses heureuses/"
                                     "a dos cantantes felices/двух счастливых певиц"),
    ("book", 3, "red", "object", "three red books/drei rote Bücher/trois livres rouges/tres libros rojos/три красные книги"),
    ("table", 4, "heavy", "object", "four heavy tables/vier schwere Tische/quatre tables lourdes/"
                                   "cuatro mesas pesadas/четыре тяжёлых стола"),
    ("apple", 1, "expensive", "denied", "an expensive apple/keinen teuren Apfel/de pomme chère/una manzana cara/дорогое яблоко"),
    ("apple", 5, "", "denied", "five apples/fünf Äpfel/cinq pommes/cinco manzanas/пять яблок"),
    ("girl", 1, "small", "object", "the small girl/das kleine Mädchen/la petite fille/a la niña pequeña/маленькую девочку"),
    ("mary", 1, "", "object", "Mary/Maria/Marie/a María/Марию")])
def test_noun_phrases_are_inflected_as_a_grammar_book_has_them(noun, number, adjective, case, expected):
    assert "/".join(grammar._phrase(language, noun, number, adjective, case)[0] for language in LANGUAGES) == expected


def test_french_elides_spanish_contracts_and_german_puts_the_verb_where_it_belongs():
    meaning = Meaning("artist", 1, "", "", "call", "past", 1, "artist", 1, "", "park", "", "because", "anna", 1, "sleep")
    assert {"fr": any("qu'Anne" in text for text in every_style(meaning, "fr")),
            "article": all(has(text, "l'artiste n'a pas appelé l'artiste") for text in every_style(meaning, "fr")),
            "es": all("al artista" in text for text in every_style(meaning, "es")),
            "de": all(re.search(r"(weil|da) Anna schlief(, rief der Künstler|\.)", text, re.IGNORECASE)
                      for text in every_style(meaning, "de"))} == dict.fromkeys(("fr", "article", "es", "de"), True)
    assert grammar._elide("même si elle, même si il, parce que huit chats, la amie de Anne") == \
        "même si elle, même s'il, parce que huit chats, l'amie d'Anne"


def test_every_negative_differs_in_one_field_and_in_every_language(sample):
    kinds = set()
    for meaning in sample:
        edits = grammar.negatives(meaning)
        assert edits == grammar.negatives(meaning) and len(edits) >= 3
        for kind, edited in edits:
            kinds.add(kind)
            assert sum(one != other for one, other in zip(meaning, edited)) == 1
            for language in LANGUAGES:
                assert all(one != other for one, other in zip(every_style(meaning, language), every_style(edited, language)))
    assert kinds == {"number", "entity", "role", "negation", "cause", "tense"}


def test_a_negative_keeps_the_wording_that_its_edit_does_not_concern(sample):
    """Otherwise a search could find the edit by its style. Only the words of the edited name may change."""
    for meaning in sample:
        for kind, edited in grammar.negatives(meaning):
            if kind == "entity":
                pairs = zip(grammar.render(meaning, "en", 1).split(), grammar.render(edited, "en", 1).split(), strict=True)
                assert sum(one != other for one, other in pairs) == 1


def test_graded_pairs_cover_the_range_and_equal_meanings_score_five():
    pairs = grammar.graded(300)
    scores = [score for _, _, score in pairs]
    assert all(0 <= score <= 5 for score in scores) and all((one == other) == (score == 5) for one, other, score in pairs)
    assert all(sum(low <= score <= low + 1 for score in scores) > 20 for low in range(5))
    assert all(grammar.render(meaning, language) for pair in pairs for meaning in pair[:2] for language in LANGUAGES)


def test_the_score_falls_with_every_further_changed_field():
    for one, other, _ in grammar.graded(100, seed=1):
        if other == one:
            continue
        previous, current = 5.0, one
        for field in Meaning._fields:
            if getattr(current, field) != getattr(other, field):
                current = current._replace(**{field: getattr(other, field)})
                assert grammar.similarity(one, current) < previous or previous == 0
                previous = grammar.similarity(one, current)
        assert previous == grammar.similarity(one, other) == grammar.similarity(other, one)


@pytest.mark.parametrize("language", LANGUAGES)
def test_paraphrases_are_five_different_sentences(language):
    groups = grammar.paraphrases("test", 50, language=language)
    assert len(groups) == 50 and all(len(set(group)) == len(group) == 5 for group in groups)


def test_styles_mostly_differ(sample):
    assert sum(len(set(every_style(meaning, "en"))) for meaning in sample) / len(sample) > 3.5


def test_sentences_are_of_many_lengths():
    lengths = [len(row["en"].split()) for row in grammar.toy("train", 2000)]
    assert min(lengths) <= 6 and max(lengths) >= 20 and 10 < sum(lengths) / len(lengths) < 14


def test_held_out_meanings_are_far_from_each_other():
    meanings = grammar.meanings("test", 200)
    pairs = [(left, right) for index, left in enumerate(meanings) for right in meanings[:index]]
    alike = [sum(one != other for one, other in zip(left, right)) for left, right in pairs]
    assert min(alike) >= 2 and sum(difference < 5 for difference in alike) < len(alike) / 100


@pytest.mark.parametrize("language", LANGUAGES)
def test_documents_are_long_enough_and_keep_their_hero(language):
    pronouns = {"en": "he|she", "de": "er|sie", "fr": "il|elle", "es": "él|ella", "ru": "он|она"}[language]
    for text in grammar.documents("train", 10, language=language):
        assert 128 <= len(re.findall(r"\w+|[^\w\s]", text)) <= 420 and 10 <= text.count(".") <= 40
        assert len(re.findall(rf"\b({pronouns})\b", text, re.IGNORECASE)) >= 3


def test_labels_agree_with_the_strings(sample):
    swapped = [edited for meaning in sample for kind, edited in grammar.negatives(meaning) if kind == "role"]
    assert swapped
    for meaning in sample + swapped:
        label, text = grammar.labels(meaning), grammar.render(meaning, "en")
        assert (label["negation"] == 1) == has(text, "not")
        section = grammar._section(label["subject"])
        forms = [form for cell in cells(section, label["subject"], "en") for form in cell]
        assert has(text, *forms)
        if not meaning.link:
            assert (label["tense"] == "future") == has(text, "will")
            first = text.lower().find("will " if label["tense"] == "future" else "\0")
            assert first < 0 or any(form.lower() in text[:first].lower() for form in forms)       # who acts comes before the verb
            russian = grammar.render(meaning, "ru")
            singular, plural = finite_forms("verbs", meaning.verb, "ru", label["tense"])
            assert has(russian, *(plural if label["number"] == "plural" else singular))


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_target_is_balanced_and_of_the_documented_dialect(split):
    for english, target in grammar.regex(split, 500):
        assert REGEX_TOKEN.sub("", target) == "" and english.startswith("lines ")
        assert "{" not in english
        depth = 0
        for mark in target:
            depth += {"(": 1, ")": -1}.get(mark, 0)
            assert depth >= 0
        assert depth == 0
        re.compile(target.replace("&", "").replace("~", ""))
        for left, right in re.findall(r"\(([^()]+)\)[&|]\(([^()]+)\)", target):
            assert left != right                                  # never: a vowel or a vowel


def test_regex_splits_share_no_target_and_no_two_targets_share_their_english():
    rows = {split: grammar.regex(split, count) for split, count in (("train", 4000), ("valid", 500), ("test", 500))}
    targets = [target for pairs in rows.values() for _, target in pairs]
    assert len(targets) == len(set(targets)) == 5000
    assert len({english for pairs in rows.values() for english, _ in pairs}) == 5000


def test_a_fixed_style_words_every_operator_alike():
    plain, other = grammar.regex("train", 200, style=0), grammar.regex("train", 200, style=1)
    assert not any("digit" in english for english, _ in plain) and any("digit" in english for english, _ in other)
