"""The embedded corpus toy: scenes in five languages.

A `Meaning` is a small record of a scene, and a small grammar of each language turns it into a
sentence. So the sentences are exact translations, an edited record is an exact hard negative, and
every label of a probe is known. Agreement, case and word order are correct. Every English sentence
has twins, which have the same words in another order and another meaning:

    Today, the old nurse with the red hat sees the happy dog with the blue hat.
    near  Today, the happy nurse with the red hat sees the old dog with the blue hat.
    far   Today, the old nurse with the blue hat sees the happy dog with the red hat.
    far   Today, the happy dog with the blue hat sees the old nurse with the red hat.

Neighboring words ("old nurse") tell a near twin apart. A far twin has the same neighboring words,
so only a model that relates distant words can. Every machine makes the same bytes.
"""

import re
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from corpora.words import (
    LANGUAGES,
    Stream,
    concepts,
    in_split,
    word,
)

TENSES = ("past", "present", "future")


class Meaning(NamedTuple):
    """A scene: who does what to whom, when and where. Subject and object have different nouns and
    adjectives; the colors can be equal."""
    subject: str
    subject_adjective: str
    subject_color: str  # of the hat
    verb: str
    tense: str
    negated: int  # 0 or 1
    object: str
    object_adjective: str
    object_color: str
    place: str  # "" is none
    time: str


# ---- meanings


PARTS = ("", "_adjective", "_color")  # the ends of the fields of a subject and of an object
# An exchange of these parts between subject and object makes a twin.
TWINS = (("near", ("_adjective",)), ("far", ("_color",)), ("far", PARTS))


def _draw(stream):
    def two(section):
        one = stream.pick(concepts(section))
        return one, stream.pick([other for other in concepts(section) if other != one])

    colors = stream.pick(concepts("colors")), stream.pick(concepts("colors"))
    subject, other = zip(two("nouns"), two("adjectives"), colors)
    verb, tense = stream.pick(concepts("verbs")), stream.pick(TENSES)
    negated = int(stream.chance(25))
    place = stream.pick(concepts("places")) if stream.chance(50) else ""
    return Meaning(*subject, verb, tense, negated, *other, place, stream.pick(concepts("times")))


def exchange(meaning, *parts):
    """Return the meaning whose subject and object have exchanged some of PARTS."""
    for part in parts:
        one, other = f"subject{part}", f"object{part}"
        meaning = meaning._replace(**{one: getattr(meaning, other), other: getattr(meaning, one)})
    return meaning


def orbit(meaning):
    """Return all eight meanings that exchanges make of one."""
    found = [meaning]
    for part in PARTS:
        found += [exchange(one, part) for one in found]
    return found


def distinct(draw, key, split, salt):
    """Yield different draws of one split without end. Draws with one key are in one split."""
    stream = Stream(salt, split, 0)
    seen = set()
    while True:
        one = draw(stream)
        if one not in seen and in_split(split, *key(one)):
            seen.add(one)
            yield one


def meanings(split, count):
    """Return `count` different meanings. All meanings of an orbit are in one split, so that no twin
    of a test sentence is in the training set."""
    walk = distinct(_draw, lambda meaning: min(orbit(meaning)), split, "meanings")
    return list(islice(walk, count))


# ---- phrases


def _english(noun, adjective, is_object):
    return f"the {adjective[0]} {noun[0]}"


def _german(noun, adjective, is_object):
    gender, *forms = noun
    article = {"m": ("der", "den"), "f": ("die", "die"), "n": ("das", "das")}[gender][is_object]
    ending = "en" if article == "den" else "e"
    return f"{article} {adjective[0]}{ending} {forms[is_object]}"


def _french(noun, adjective, is_object):
    gender, form = noun
    side, masculine, feminine, *before_vowel = adjective
    agreed = feminine if gender == "f" else masculine
    if gender == "m" and before_vowel and form[0] in "aeiou":
        agreed = before_vowel[0]  # le vieil invité
    article = "la" if gender == "f" else "le"
    return f"{article} {agreed} {form}" if side == "before" else f"{article} {form} {agreed}"


def _spanish(noun, adjective, is_object):
    gender, form = noun
    article = "la" if gender == "f" else "el"
    if is_object:  # the a of animate objects
        article = "a la" if gender == "f" else "al"
    return f"{article} {form} {adjective[gender == 'f']}"


def _russian(noun, adjective, is_object):
    gender, *forms = noun
    return f"{adjective[2 * is_object + (gender == 'f')]} {forms[is_object]}"


PHRASES = {"en": _english, "de": _german, "fr": _french, "es": _spanish, "ru": _russian}


@lru_cache(None)
def _participant(language, noun, adjective, color, is_object):
    """Return (noun phrase, gender)."""
    forms = word(language, "nouns", noun).split(", ")
    agreeing = word(language, "adjectives", adjective).split(", ")
    hat = word(language, "hats", "hat").format(word(language, "colors", color))
    return f"{PHRASES[language](forms, agreeing, is_object)} {hat}", forms[0]


def _conjugate(language, meaning, gender):
    """Return (finite verb with its negation, what German puts last). gender: the subject's."""
    forms = word(language, "verbs", meaning.verb).split(", ")
    when = TENSES.index(meaning.tense)
    if language == "en" and (meaning.negated or when == 2):
        auxiliary = ("did", "does", "will")[when]
        return f"{auxiliary} not {forms[2]}" if meaning.negated else f"{auxiliary} {forms[2]}", ""
    if language == "de" and when == 2:
        return "wird", forms[2]
    if language == "ru" and (when or gender == "f"):  # the past has two forms
        when += 1
    verb = forms[when]
    if meaning.negated and language == "fr":
        first, _, rest = verb.partition(" ")
        verb = f"ne {first} pas {rest}".rstrip()
    elif meaning.negated and language in ("es", "ru"):
        verb = ("no " if language == "es" else "не ") + verb
    return verb, ""


ELISION = re.compile(r"\b([ln])[ea] (?=[aeiouéê])")  # le invité -> l'invité, ne a -> n'a


# ---- sentences


def render(meaning, language):
    """Return the sentence of a meaning."""
    subject, gender = _participant(language, *meaning[0:3], False)
    other, _ = _participant(language, *meaning[6:9], True)
    verb, last = _conjugate(language, meaning, gender)
    time = word(language, "times", meaning.time)
    place = word(language, "places", meaning.place) if meaning.place else ""
    # The German verb comes second. "nicht" before a place negates the place, where the other
    # languages negate the verb.
    if language == "de":
        parts = [time, verb, subject, other, "nicht" if meaning.negated else "", place, last]
    else:
        comma = "," if language in ("en", "fr") else ""
        parts = [time + comma, subject, verb, other, place]
    text = " ".join(filter(None, parts))
    if language == "fr":
        text = ELISION.sub(r"\1'", text)
    return text[0].upper() + text[1:] + "."


@lru_cache(4)  # a notebook starts several runs
def toy(split, count):
    """Return a parallel corpus: rows of {language: sentence}."""
    return [{language: render(meaning, language) for language in LANGUAGES}
            for meaning in meanings(split, count)]


# ---- beside translation


def negatives(meaning):
    """Return (error type, meaning with one part replaced) for every type [xsim++: Chen et al.
    2023]. An edit changes only the replaced word and what must agree with it."""
    stream = Stream("negatives", *meaning)
    edits = []

    def replace(error, field, choices, *taken):
        choices = [choice for choice in choices if choice not in (getattr(meaning, field), *taken)]
        edits.append((error, meaning._replace(**{field: stream.pick(choices)})))

    for error, section, part in (("participant", "nouns", ""),
                                 ("adjective", "adjectives", "_adjective"),
                                 ("color", "colors", "_color")):
        one, other = ("subject", "object") if stream.chance(50) else ("object", "subject")
        replace(error, one + part, concepts(section), getattr(meaning, other + part))
    replace("negation", "negated", (0, 1))
    replace("tense", "tense", TENSES)
    if meaning.place:
        replace("place", "place", concepts("places"))
    return edits


def hard_negatives(meanings, language):
    """Return (altered text, its row, error type) of every edit."""
    return [(render(altered, language), row, error) for row, meaning in enumerate(meanings)
            for error, altered in negatives(meaning)]


def _ngrams(text, size):
    """Return the sequences of `size` words and punctuation marks, sorted. Tokenizers see the space
    before a word: in l'invité it has none."""
    tokens = re.findall(r" ?(?:\w+|[^\w\s])", text)
    return sorted(zip(*(tokens[first:] for first in range(size))))


def twins(meanings, language):
    """Return (text, its row, "near" or "far") of every twin. A near twin has the words of its
    sentence, and a far twin also its pairs of neighboring words. Other languages than English have
    fewer of them, because case and articles follow the role."""
    found = []
    for row, meaning in enumerate(meanings):
        gold = render(meaning, language)
        for kind, parts in TWINS:
            text = render(exchange(meaning, *parts), language)
            size = 1 if kind == "near" else 2  # texts with equal pairs have equal words
            if text != gold and _ngrams(text, size) == _ngrams(gold, size):
                found.append((text, row, kind))
    return found


def properties(rows, *fields):
    return {"negation": [row.negated for row in rows]} | {
        field: [getattr(row, field) for row in rows] for field in fields}


def labelled(split, count, language="en"):
    """Return (texts, {property: [the class of each text]}) for linear probes."""
    rows = meanings(split, count)
    return [render(meaning, language) for meaning in rows], properties(
        rows, "subject", "object", "verb", "tense", "place", "time")
