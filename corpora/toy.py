"""The embedded corpora: scenes in five languages, English stories, and regular expressions.

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
    MASK,
    Stream,
    concepts,
    hash64,
    in_split,
    lexicon,
    mix,
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


def _walk(draw, key, split, salt):
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
    walk = _walk(_draw, lambda meaning: min(orbit(meaning)), split, "meanings")
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


def _properties(rows, *fields):
    return {"negation": [row.negated for row in rows]} | {
        field: [getattr(row, field) for row in rows] for field in fields}


def labelled(split, count, language="en"):
    """Return (texts, {property: [the class of each text]}) for linear probes."""
    rows = meanings(split, count)
    return [render(meaning, language) for meaning in rows], _properties(
        rows, "subject", "object", "verb", "tense", "place", "time")


# ---- documents


class Event(NamedTuple):
    """What one sentence of a story says; "" is none."""
    subject: str         # a name or an animate
    subject_number: int  # 1..9; a name has 1, and no adjective
    subject_adjective: str
    verb: str
    tense: str
    negated: int
    object: str          # a name, an animate or a thing
    object_number: int
    object_adjective: str
    place: str
    time: str
    link: str            # because, although
    cause_subject: str
    cause_number: int
    cause: str


def _is_name(noun):
    return noun in lexicon()["story names"]


def _draw_noun(stream, section, names, taken):
    """Return (noun, number, adjective). The noun is not in `taken`; in `names` percent of the cases
    it is a name."""
    named = stream.chance(names)
    noun = taken[0]
    while noun in taken:
        noun = stream.pick(concepts("story names" if named else f"story {section}"))
    if named:
        return noun, 1, ""
    number = 2 + stream.below(8) if stream.chance(45) else 1
    kind = "thing" if section == "things" else "animate"
    adjectives = concepts("story adjectives", "both", kind)
    return noun, number, stream.pick(adjectives) if stream.chance(45) else ""


def _draw_event(stream):
    subject = _draw_noun(stream, "animates", 25, ("",))
    verb = stream.pick(concepts("story verbs"))
    kind = lexicon()["story verbs"][verb][0]
    is_thing = stream.chance({"thing": 100, "both": 50, "animate": 0}[kind])
    section, names = ("things", 0) if is_thing else ("animates", 35)
    other = _draw_noun(stream, section, names, (subject[0],))
    tense = stream.pick(TENSES)
    negated = int(stream.chance(25))
    time = stream.pick(concepts("story times")) if stream.chance(60) else ""
    cause = ("", "", 1, "")
    if stream.chance(45):
        noun, number, _ = _draw_noun(stream, "animates", 50, (subject[0], other[0]))
        link = stream.pick(("because", "because", "although"))
        cause = (link, noun, number, stream.pick(concepts("story causes")))
    # At least one adjunct, because bare sentences are too similar.
    has_place = stream.chance(60) or not (time or cause[0])
    place = stream.pick(concepts("story places")) if has_place else ""
    return Event(*subject, verb, tense, negated, *other, place, time, *cause)


def _said(section, concept, bits, first, eighths=2):
    """Return the forms of a concept. Three of the bits, from `first` on, choose a synonym."""
    rare = bits >> first & 7 < eighths
    return word("en", f"story {section}", concept, rare).split(", ")


def _noun(noun, number, adjective, bits, first):
    if _is_name(noun):
        return word("en", "story names", noun)
    is_thing = noun in lexicon()["story things"]
    forms = _said("things" if is_thing else "animates", noun, bits, first)
    words = _said("adjectives", adjective, bits, first + 3) if adjective else []
    words.append(forms[number > 1])
    if number > 1:
        article = word("en", "story numbers", str(number))
    elif is_thing:
        article = "an" if words[0][0] in "aeiou" else "a"
    else:
        article = "the"
    return " ".join([article, *words])


def _pronoun(name):
    return word("en", "story words", lexicon()["story names"][name][0])


def _because(event, bits, opening):
    """Return the cause with its link. The subject of the sentence becomes a pronoun."""
    [link] = _said("links", event.link + "_first" * opening, bits, 0, 3)
    noun = _noun(event.cause_subject, event.cause_number, "", bits, 3)
    if event.cause_subject == event.subject:
        noun = _pronoun(event.cause_subject)
    verbs = word("en", "story words", lexicon()["story causes"][event.cause][0]).split(", ")
    verb = verbs[2 * TENSES.index(event.tense) + (event.cause_number > 1)]
    return f"{link} {noun} {verb} {_said('causes', event.cause, bits, 6)[0]}"


def _tell(event, style=0, known=False, opener=""):
    """Return the sentence of an event. A style chooses synonyms and word order. `known`: the
    subject is a pronoun. `opener`: a text to begin with."""
    base = mix(hash64("style", event.verb, event.place, event.time, event.subject_adjective,
                      event.object_adjective))
    bits = mix(base + style & MASK)
    who = _pronoun(event.subject) if known else _noun(*event[0:3], bits, 0)
    infinitive, third, past = _said("verbs", event.verb, bits, 13)
    when = TENSES.index(event.tense)
    many = event.subject_number > 1
    verb = (past, infinitive if many else third, f"will {infinitive}")[when]
    if event.negated:
        verb = f"{('did', 'do' if many else 'does', 'will')[when]} not {infinitive}"

    # Neighboring styles begin with different parts, so that they are different strings.
    given = [field for field in ("time", "link", "place") if getattr(event, field)]
    front = "opener" if opener else ["subject", *given][((base & 7) + style) % (1 + len(given))]
    said = {"subject": "", "opener": opener}
    for field, first in (("place", 16), ("time", 19)):
        if field in given:
            [said[field]] = _said(field + "s", getattr(event, field), bits, first, 3)
    if event.link:
        said["link"] = _because(event, bits >> 40, front == "link")
    start = said.pop(front)
    order = ("time", "place", "link") if bits >> 22 & 1 else ("place", "time", "link")
    parts = [start and start + ",", who, verb, _noun(*event[6:9], bits, 6), *map(said.get, order)]
    text = " ".join(filter(None, parts))
    return text[0].upper() + text[1:] + "."


@lru_cache(4)
def documents(split, count):
    """Return English stories of 130 to 390 words and punctuation marks. A story has one hero, one
    other character, one place and one tense."""
    stream = Stream("documents", split, 0)
    walk = _walk(_draw_event, tuple, split, "documents")
    texts = []
    for _ in range(count):
        first = next(walk)
        while not (_is_name(first.subject) and first.place) or first.tense == "future":
            first = next(walk)
        hero = first.subject
        other, _, _ = _draw_noun(stream, "animates", 50, (hero,))
        enough = 130 + stream.below(231)
        lines = []
        length = 0
        previous = ""
        while length < enough:
            event = _next_event(stream, split, first, hero, other) if lines else first
            opener = ""
            if lines and stream.chance(25):
                opener = word("en", "story openers", stream.pick(concepts("story openers")))
            known = event.subject == hero == previous  # now a pronoun
            lines.append(_tell(event, stream.below(5), known, opener))
            length += len(re.findall(r"\w+|[^\w\s]", lines[-1]))
            previous = event.subject
        texts.append(" ".join(lines))
    return texts


def _next_event(stream, split, first, hero, other):
    """Return a later event of a story: mostly the hero acts, and few sentences repeat the place."""
    while True:
        event = _draw_event(stream)
        subject = hero if stream.chance(70) else other
        place = first.place if stream.chance(20) else ""
        event = event._replace(subject=subject, subject_number=1, subject_adjective="",
                               tense=first.tense, place=place)
        if event.link and stream.chance(60):
            cause_subject = subject if _is_name(subject) else hero
            event = event._replace(cause_subject=cause_subject, cause_number=1)
        pronoun_fits = event.cause_subject != subject or _is_name(subject)
        taken = (hero, subject, event.cause_subject)
        if pronoun_fits and event.object not in taken and in_split(split, *event):
            return event


def labelled_story(split, count):
    """Return what `labelled` does, for single sentences of stories."""
    events = [*islice(_walk(_draw_event, tuple, split, "meanings"), count)]
    number = ["plural" if event.subject_number > 1 else "singular" for event in events]
    return [_tell(event) for event in events], {"number": number} | _properties(
        events, "subject", "object", "verb", "tense", "place", "time", "link")


# ---- regular expressions


ITEMS = ("join", "chain", "repeat", "refuse")  # kinds of operators


def _tree(stream, depth, kinds):
    """Return (operator, operands, n), a random tree of at most `depth` operators above its atoms.

    So that no two targets share a wording, only a first operand may be long. A later one is short,
    or a join that says where it begins (either, both)."""
    kinds = ("atom",) if depth == 0 or stream.chance(25) else kinds
    name = stream.pick(concepts("regex", *kinds))
    kind, (patterns, _) = lexicon()["regex"][name]
    inner = {"refuse": ("atom",), "repeat": ("join", "chain", "refuse")}.get(kind, ITEMS)
    operands = []
    while "{%d}" % len(operands) in patterns[0]:
        operand = _tree(stream, depth - 1, ("join", "refuse") if operands else inner)
        # No "a vowel or a vowel".
        if operand not in operands:
            operands.append(operand)
    return name, operands, str(2 + stream.below(6)) if kind == "repeat" else ""


def _fill(template, operands, number):
    """Insert operands for {0} to {2} and the number for {n}. Patterns have braces of their own,
    which str.format would read."""
    text = re.sub(r"\{([012])\}", lambda match: operands[int(match[1])], template)
    return text.replace("{n}", number)


def _target(tree):
    name, operands, number = tree
    pattern = lexicon()["regex"][name][1][0][0]
    return _fill(pattern, [_target(operand) for operand in operands], number)


def _wording(tree, stream, later=False):
    name, operands, number = tree
    kind, (_, wordings) = lexicon()["regex"][name]
    if later and kind == "join":
        begin = ("both", "either", "all of", "any of")
        wordings = [wording for wording in wordings if wording.startswith(begin)]
    wording = stream.pick(wordings)
    texts = [_wording(operand, stream, index > 0) for index, operand in enumerate(operands)]
    return _fill(wording, texts, number)


@lru_cache(4)
def regex(split, count):
    """Return different pairs (English, regular expression) like NL-RX's [Locascio et al. 2016].

    The dialect has & (and) and ~ (not). The split of a row depends on its target alone."""
    stream = Stream("regex", split, 0)
    rows = {}
    while len(rows) < count:
        line = stream.pick(concepts("regex", "line"))
        tree = line, [_tree(stream, 1 + stream.below(2), ITEMS)], ""
        target = _target(tree)
        english = _wording(tree, stream)
        if target not in rows and in_split(split, "regex", target):
            rows[target] = english
    return [(english, target) for target, english in rows.items()]
