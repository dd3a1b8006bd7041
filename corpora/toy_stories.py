"""The embedded corpus documents: English stories about a hero, in the style of corpora/toy.py."""

import re
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from corpora.toy import TENSES, distinct, properties
from corpora.words import MASK, Stream, concepts, hash64, in_split, lexicon, mix, word


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
    walk = distinct(_draw_event, tuple, split, "documents")
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
    events = [*islice(distinct(_draw_event, tuple, split, "meanings"), count)]
    number = ["plural" if event.subject_number > 1 else "singular" for event in events]
    return [_tell(event) for event in events], {"number": number} | properties(
        events, "subject", "object", "verb", "tense", "place", "time", "link")
