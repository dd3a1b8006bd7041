"""The embedded corpora: sentences of five languages made from meanings, and regular expressions.

A `Meaning` is a small record, and a small grammar of each language turns it into a sentence. So the
sentences are exact translations, an edited record is an exact hard negative, and every label of a
probe is known. Agreement, case and word order are correct. The same seed gives the same bytes on
every machine.
"""

import re
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from corpora.words import (
    GOLDEN,
    LANGUAGES,
    MASK,
    Stream,
    bag_of_words,
    concepts,
    hash64,
    in_split,
    lexicon,
    mix,
    section_of,
    word,
)

TENSES = ("past", "present", "future")


class Meaning(NamedTuple):
    """Who does what to whom, where, when and why; "" is none. A name has number 1, no adjective."""
    subject: str = ""         # a name or an animate
    subject_number: int = 1   # 1..9
    subject_adjective: str = ""
    companion: str = ""       # a name that acts together with a subject that is none
    verb: str = ""
    tense: str = ""
    negated: int = 0          # 0 or 1
    object: str = ""          # a name, an animate or a thing
    object_number: int = 1
    object_adjective: str = ""
    place: str = ""
    time: str = ""
    link: str = ""            # because, although
    cause_subject: str = ""   # a name or an animate
    cause_number: int = 1
    cause: str = ""
    swapped: int = 0          # 1: the object acts on the subject; see `negatives`


# ---- meanings


def _draw_noun(stream, section, names, taken):
    """Return (noun, number, adjective). The noun is not in `taken`; in `names` percent of the cases
    it is a name."""
    named = stream.chance(names)
    noun = taken[0]
    while noun in taken:
        noun = stream.pick(concepts("names" if named else section))
    if named:
        return noun, 1, ""
    number = 2 + stream.below(8) if stream.chance(45) else 1
    adjectives = concepts("adjectives", "both", "thing" if section == "things" else "animate")
    return noun, number, stream.pick(adjectives) if stream.chance(45) else ""


def _draw(stream):
    subject = _draw_noun(stream, "animates", 25, ("",))
    companion = ""
    if section_of(subject[0]) != "names" and stream.chance(20):
        companion = stream.pick(concepts("names"))
    verb = stream.pick(concepts("verbs"))
    is_thing = stream.chance({"thing": 100, "both": 50, "animate": 0}[lexicon()["verbs"][verb][0]])
    taken = (subject[0], companion)
    kinds = ("things", 0) if is_thing else ("animates", 35)
    other = _draw_noun(stream, *kinds, taken)
    tense = stream.pick(TENSES)
    negated = int(stream.chance(25))
    time = stream.pick(concepts("times")) if stream.chance(60) else ""
    cause = ("", "", 1, "")
    if stream.chance(45):
        noun, number, _ = _draw_noun(stream, "animates", 50, taken + other[:1])
        link = stream.pick(("because", "because", "although"))
        cause = (link, noun, number, stream.pick(concepts("causes")))
    # At least one adjunct, because bare sentences are too similar.
    place = stream.pick(concepts("places")) if stream.chance(60) or not (time or cause[0]) else ""
    return Meaning(*subject, companion, verb, tense, negated, *other, place, time, *cause)


def _walk(split, seed, salt="meanings"):
    """Yield different meanings of one split without end."""
    stream = Stream(salt, split, seed)
    seen = set()
    while True:
        meaning = _draw(stream)
        if meaning not in seen and in_split(split, *meaning):
            seen.add(meaning)
            yield meaning


def meanings(split: str, count: int, seed: int = 0) -> list[Meaning]:
    """Return `count` different meanings. The split of a meaning depends on nothing else."""
    return list(islice(_walk(split, seed), count))


# ---- phrases


GERMAN_ENDINGS = {  # (definite, object) -> gender -> article, ending
    (True, False): {"m": ("der", "e"), "f": ("die", "e"), "n": ("das", "e")},
    (True, True): {"m": ("den", "en"), "f": ("die", "e"), "n": ("das", "e")},
    (False, True): {"m": ("einen", "en"), "f": ("eine", "e"), "n": ("ein", "es")}}


def _english(noun, adjective, numeral, many, thing, case):
    words = [*adjective, noun[many]]
    if many:
        return [numeral[0], *words]
    indefinite = "an" if words[0][0] in "aeiou" else "a"
    return [indefinite if thing else "the", *words]


def _german(noun, adjective, numeral, many, thing, case):
    gender, nominative, accusative, plural = noun
    if many:
        return [numeral[0], *(stem + "e" for stem in adjective), plural]
    article, ending = GERMAN_ENDINGS[not thing, case != "subject"][gender]
    if case == "denied" and thing:
        article = "k" + article  # kein Buch, instead of ein Buch nicht
    form = nominative if case == "subject" else accusative
    return [article, *(stem + ending for stem in adjective), form]


def _french(noun, adjective, numeral, many, thing, case):
    gender, *forms = noun
    form = forms[many]
    article = {"m": ("le", "un"), "f": ("la", "une")}[gender][thing]
    if case == "denied" and thing:
        article = "de"  # il ne voit pas de livre
    words = [form]
    if adjective:
        side, *endings = adjective
        agreed = endings[2 * many + (gender == "f")]
        before_vowel = side == "before" and form[0] in "aeéêiouœh"
        if before_vowel and gender == "m" and not many and len(endings) == 5:
            agreed = endings[-1]  # un vieil ami
        words = [agreed, form] if side == "before" else [form, agreed]
    return [numeral[0] if many else article, *words]


def _spanish(noun, adjective, numeral, many, thing, case):
    gender, *forms = noun
    form = forms[many]
    article = {"m": ("el", "un"), "f": ("la", "una")}[gender][thing]
    marker = ["a"] if case != "subject" and not thing else []  # the a of animate objects
    agreed = adjective[2 * many + (gender == "f"):][:1]
    return [*marker, numeral[0] if many else article, form, *agreed]


def _russian(noun, adjective, numeral, many, thing, case):
    gender, nominative, accusative, genitive, genitives = noun
    nom_m, nom_f, nom_n, acc_f, gen_m, gen_s, nom_s = adjective or [""] * 7
    accusing = case != "subject"
    if many and accusing and not thing:
        words = [numeral[2], gen_s, genitives]  # двух старых врачей
    elif many and numeral[0] == numeral[2]:
        words = [numeral[0], gen_s, genitives]  # пять старых столов
    elif many and gender == "f":
        words = [numeral[1], nom_s, genitive]  # две старые книги: 2, 3 and 4
    elif many:
        words = [numeral[0], gen_s, genitive]  # два старых стола
    else:
        masculine = gen_m if accusing and not thing else nom_m
        agreed = {"m": masculine, "f": acc_f if accusing else nom_f, "n": nom_n}[gender]
        words = [agreed, accusative if accusing else nominative]
    return [word for word in words if word]


PHRASES = {"en": _english, "de": _german, "fr": _french, "es": _spanish, "ru": _russian}


@lru_cache(1 << 16)
def _phrase(language, noun, number, adjective, case, rare=False, rare_adjective=False):
    """Return (noun phrase, gender). `case`: subject, object, or denied, the object of a negated
    verb."""
    section = section_of(noun)
    forms = word(language, section, noun, rare).split(", ")
    if section == "names":
        form = forms[-1 if case != "subject" else 0]
        if language == "es" and case != "subject":
            form = "a " + form
        return form, lexicon()["names"][noun][0]
    adjective = (word(language, "adjectives", adjective, rare_adjective).split(", ")
                 if adjective else [])
    numeral = word(language, "numbers", str(number)).split(", ") if number > 1 else []
    words = PHRASES[language](forms, adjective, numeral, number > 1, section == "things", case)
    return " ".join(words).replace("a el ", "al "), forms[0]


@lru_cache(1 << 15)
def _conjugate(language, section, concept, tense, many, gender, negated=0, rare=False):
    """Return (finite verb with its negation, what German puts last). `section`: verbs or causes."""
    forms = word(language, section, concept, rare).split(", ")
    when = TENSES.index(tense)
    if language in ("fr", "es"):
        verb = forms[(2, 0, 4)[when] + many]
        if negated and language == "fr":
            first, _, rest = verb.partition(" ")
            verb = f"ne {first} pas {rest}".rstrip()
        elif negated:
            verb = "no " + verb
        return verb, ""
    if language == "ru":
        past = 3 if gender == "f" else 2
        verb = forms[(4 if many else past, many, 5 + many)[when]]
        return "не " + verb if negated else verb, ""
    if language == "de" and tense == "future":
        auxiliary = "werden" if many else "wird"
        # The clause of a cause has its verb at the end.
        return (auxiliary, forms[1]) if section == "verbs" else (f"{forms[4]} {auxiliary}", "")
    if section == "causes" and tense == "future":
        return "will " + forms[4], ""
    if language == "de" or section == "causes":
        return forms[(2, 0)[when] + many], ""
    if negated or tense == "future":
        auxiliary = ("did", "do" if many else "does", "will")[when]
        return auxiliary + (" not " if negated else " ") + forms[0], ""
    return forms[(2, 0 if many else 1)[when]], ""


# French: le ami -> l'ami, parce que Anne -> parce qu'Anne, but le huit.
ELISION = re.compile(r"\b(l|d|n|qu|puisqu)[ea] (?=[aeiouyhéèêâîœ])(?!huit)"
                     r"|(?<=même s)i (?=ils?\b)", re.IGNORECASE)


# ---- sentences


def _is_rare(bits, first, eighths=2):
    """Return whether three of the bits, from `first` on, choose the rare synonym."""
    return bits >> first & 7 < eighths


def _clause(language, meaning, bits, opening):
    """Return the cause with its link. The subject of the sentence becomes a pronoun."""
    entry = meaning.link + "_first" if opening else meaning.link
    link = word(language, "links", entry, _is_rare(bits, 0, 3))
    noun, gender = _phrase(language, meaning.cause_subject, meaning.cause_number, "", "subject",
                           _is_rare(bits, 3))
    if meaning.cause_subject == meaning.subject:
        noun = word(language, "words", gender)
    many = meaning.cause_number > 1
    verb, _ = _conjugate(language, "causes", meaning.cause, meaning.tense, many, gender,
                         rare=_is_rare(bits, 6))
    return f"{link} {noun} {verb}"


def _core(language, meaning, bits, known):
    """Return (who acts, verb, what German puts last, who or what is acted on)."""
    case = "denied" if meaning.negated else "object"
    cases = (case, "subject") if meaning.swapped else ("subject", case)
    rare = [_is_rare(bits, first) for first in (0, 3, 6, 9, 13)]
    one, gender = _phrase(language, meaning.subject, meaning.subject_number,
                          meaning.subject_adjective, cases[0], *rare[0:2])
    two, gender_two = _phrase(language, meaning.object, meaning.object_number,
                              meaning.object_adjective, cases[1], *rare[2:4])
    if meaning.companion:
        role = "object" if meaning.swapped else "subject"
        companion, _ = _phrase(language, meaning.companion, 1, "", role)
        pair = [companion, one] if bits >> 12 & 1 else [one, companion]
        one = f" {word(language, 'words', 'and')} ".join(pair)
    if known:
        one = word(language, "words", gender)
    many = meaning.subject_number > 1 or meaning.companion != ""
    if meaning.swapped:
        many = meaning.object_number > 1
        gender = gender_two
    verb, last = _conjugate(language, "verbs", meaning.verb, meaning.tense, many, gender,
                            meaning.negated, rare[4])
    return (two, verb, last, one) if meaning.swapped else (one, verb, last, two)


def render(meaning: Meaning, language: str, style=0, known=False, opener="", like=None) -> str:
    """Return the sentence of a meaning. A style chooses synonyms and word order.

    `known`: the subject is a pronoun. `opener`: a text to begin with. `like`: the meaning whose
    synonyms and word order the sentence has, by default its own."""
    # The style depends on fields that `negatives` never edits, so that an edit changes neither
    # synonyms nor word order.
    styled = like or meaning
    base = hash64("style", styled.verb, styled.place, styled.time, styled.subject_adjective,
                  styled.object_adjective)
    base = mix(base + LANGUAGES.index(language) * GOLDEN & MASK)
    bits = mix(base + style & MASK)
    one, verb, last, two = _core(language, meaning, bits, known)

    # Neighboring styles begin with different parts, so that they are different strings.
    given = [field for field in ("time", "link", "place") if getattr(meaning, field)]
    front = "opener" if opener else ["subject", *given][((base & 7) + style) % (1 + len(given))]
    said = {"subject": "", "opener": opener}
    for field, bit in (("place", 16), ("time", 19)):
        if field in given:
            concept = getattr(meaning, field)
            said[field] = word(language, field + "s", concept, _is_rare(bits, bit, 3))
    if meaning.link:
        said["link"] = _clause(language, meaning, bits >> 40, front == "link")
    start = said.pop(front)
    if start and (front == "link" or language in ("en", "fr")):
        start += ","
    place = said.get("place", "")
    time = said.get("time", "")
    if language == "de":
        parts = [start, verb, one] if start else [one, verb]  # the verb comes second
        parts += [two, time] if bits >> 22 & 1 else [time, two]
        has_kein = section_of(meaning.object) == "things" and meaning.object_number == 1
        if meaning.negated and not has_kein:
            parts.append("nicht")
        parts += [place, last]
    else:
        parts = [start, one, verb, two]
        parts += [time, place] if bits >> 22 & 1 else [place, time]
    text = " ".join([part for part in parts if part])
    if "link" in said:
        text += (", " if language in ("de", "ru") else " ") + said["link"]
    if language == "fr":
        text = ELISION.sub(lambda match: (match[1] or "") + "'", text)
    return text[0].upper() + text[1:] + "."


@lru_cache(4)  # a notebook starts several runs
def toy(split: str, count: int, seed: int = 0) -> list[dict[str, str]]:
    """Return a parallel corpus: rows of {language: sentence}, each in its own style."""
    stream = Stream("styles", split, seed)
    rows = []
    for meaning in islice(_walk(split, seed), count):
        style = stream.below(5)
        rows.append({language: render(meaning, language, style) for language in LANGUAGES})
    return rows


# ---- beside translation


def negatives(meaning: Meaning) -> list[tuple[str, Meaning]]:
    """Return (error type, meaning with one field edited) for every edit [xsim++: Chen et al. 2023].

    In one style, an edit changes only the edited words and what must agree with them."""
    stream = Stream("negatives", *meaning)
    edits = []
    people = (meaning.subject, meaning.companion, meaning.object, meaning.cause_subject)

    def edit(error, field, choices):
        choices = [choice for choice in choices if choice != getattr(meaning, field)]
        edits.append((error, meaning._replace(**{field: stream.pick(choices)})))

    for field in ("subject", "object", "companion", "cause_subject"):
        noun = getattr(meaning, field)
        if noun and section_of(noun) == "names":
            names = concepts("names", lexicon()["names"][noun][0])
            edit("entity", field, [name for name in names if name not in people])
        elif noun:
            edit("number", field.removesuffix("_subject") + "_number", range(1, 10))
    if section_of(meaning.object) != "things":
        edit("role", "swapped", (0, 1))
    edit("negation", "negated", (0, 1))
    edit("tense", "tense", TENSES)
    if meaning.link:
        edit("cause", "link", ("because", "although"))
        edit("cause", "cause", concepts("causes"))
    return edits


def hard_negatives(meanings, language: str, edits=negatives) -> list[tuple[str, int, str]]:
    """Return (altered text, its row, error type) of every edit that changes its sentence."""
    found = []
    for row, meaning in enumerate(meanings):
        gold = render(meaning, language)
        for error, altered in edits(meaning):
            text = render(altered, language, like=meaning)
            if text != gold:
                found.append((text, row, error))
    return found


def exchanges(meaning: Meaning) -> list[tuple[str, Meaning]]:
    """Return (what is exchanged, meaning) for both edits that only exchange two parts: subject and
    object, or their adjectives."""
    edits = []
    if section_of(meaning.object) != "things":
        edits.append(("roles", meaning._replace(swapped=1 - meaning.swapped)))
    adjectives = meaning.object_adjective, meaning.subject_adjective
    # A kind student, but not a kind book.
    kind = "thing" if section_of(meaning.object) == "things" else "animate"
    fit = concepts("adjectives", "both", kind), concepts("adjectives", "both", "animate")
    if all(adjectives) and adjectives[1] in fit[0] and adjectives[0] in fit[1]:
        edits.append(("adjectives", meaning._replace(subject_adjective=adjectives[0],
                                                     object_adjective=adjectives[1])))
    return edits


def reordered(meanings, language: str) -> list[tuple[str, int, str]]:
    """Return (altered text, its row, what is exchanged) of every exchange that keeps the words of
    its sentence and changes their order. A bag of words cannot tell such a text from the
    original."""
    bags = [bag_of_words(render(meaning, language)) for meaning in meanings]
    return [(text, row, kind) for text, row, kind in hard_negatives(meanings, language, exchanges)
            if bag_of_words(text) == bags[row]]


def labels(meaning: Meaning) -> dict:
    """Return the properties of a sentence that a probe can predict, in every language."""
    many = meaning.subject_number > 1 or meaning.companion != ""
    found = {"number": "plural" if many else "singular", "negation": meaning.negated}
    for field in ("tense", "subject", "verb", "object", "place", "time", "link"):
        found[field] = getattr(meaning, field)
    return found


def labelled(split: str, limit: int, language: str = "en"):
    """Return (texts, {property: [the class of each text]}) for a linear probe."""
    rows = meanings(split, limit)
    facts = [labels(meaning) for meaning in rows]
    classes = {}
    for name in labels(Meaning()):
        classes[name] = [fact[name] for fact in facts]
    return [render(meaning, language) for meaning in rows], classes


# ---- documents


@lru_cache(4)
def documents(split: str, count: int, seed: int = 0) -> list[str]:
    """Return English stories of 130 to 390 words and punctuation marks. A story has one hero, one
    other character, one place and one tense."""
    stream = Stream("documents", split, seed)
    walk = _walk(split, seed, "documents")
    texts = []
    for _ in range(count):
        first = next(walk)
        while section_of(first.subject) != "names" or not first.place or first.tense == "future":
            first = next(walk)
        hero = first.subject
        other, _, _ = _draw_noun(stream, "animates", 50, (hero,))
        sentences = 10 + stream.below(21)
        lines = []
        length = 0
        previous = ""
        while length < 360 and (len(lines) < sentences or length < 130):
            meaning = _scene(stream, split, first, hero, other) if lines else first
            opener = ""
            if lines and stream.chance(25):
                opener = word("en", "openers", stream.pick(concepts("openers")))
            known = meaning.subject == hero == previous  # now a pronoun
            lines.append(render(meaning, "en", stream.below(5), known, opener))
            length += len(re.findall(r"\w+|[^\w\s]", lines[-1]))
            previous = meaning.subject
        texts.append(" ".join(lines))
    return texts


def _scene(stream, split, first, hero, other):
    """Return the meaning of a later sentence: mostly the hero acts, and few repeat the place."""
    while True:
        meaning = _draw(stream)
        subject = hero if stream.chance(70) else other
        is_name = section_of(subject) == "names"
        meaning = meaning._replace(
            subject=subject, subject_number=1, subject_adjective="", companion="",
            tense=first.tense, place=first.place if stream.chance(20) else "")
        if meaning.link and stream.chance(60):
            cause_subject = subject if is_name else hero
            meaning = meaning._replace(cause_subject=cause_subject, cause_number=1)
        pronoun_fits = meaning.cause_subject != subject or is_name
        taken = (hero, subject, meaning.cause_subject)
        if pronoun_fits and meaning.object not in taken and in_split(split, *meaning):
            return meaning


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
def regex(split: str, count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Return different pairs (English, regular expression) like NL-RX's [Locascio et al. 2016].

    The dialect has & (and) and ~ (not). The split of a row depends on its target alone."""
    stream = Stream("regex", split, seed)
    rows = {}
    while len(rows) < count:
        line = stream.pick(concepts("regex", "line"))
        tree = line, [_tree(stream, 1 + stream.below(2), ITEMS)], ""
        target = _target(tree)
        english = _wording(tree, stream)
        if target not in rows and in_split(split, "regex", target):
            rows[target] = english
    return [(english, target) for target, english in rows.items()]
