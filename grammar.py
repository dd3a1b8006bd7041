"""The embedded corpora: sentences of five languages generated from meanings, and regular expressions from the same idea.

A `Meaning` is a small record. Small grammars of English, German, French, Spanish and Russian turn it into a sentence each, so
the sentences are exact translations, an edited record is an exact hard negative, and every probe label is known. The grammars
get agreement, case and word order right; they do not claim that people say such things. The words are in grammar.txt.

Everything is a function of the seed, byte for byte, on every machine: the only source of chance is `Stream`.
"""
import re
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

LANGUAGES = ("en", "de", "fr", "es", "ru")
VERSION = 1                                           # part of the hash of a corpus: raise it when any output changes
SPLITS = {"train": range(8), "valid": (8,), "test": (9,)}                    # tenths of the space of meanings
TENSES = ("past", "present", "future")
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


class Meaning(NamedTuple):
    """Who does what to whom, where, when and why. "" is none. A name has the number 1 and no adjective."""
    subject: str = ""                                 # a name or an animate
    subject_number: int = 1                           # 1..9
    subject_adjective: str = ""
    companion: str = ""                               # a name that acts together with a subject which is not a name itself
    verb: str = ""
    tense: str = ""
    negated: int = 0                                  # 0 or 1
    object: str = ""                                  # a name, an animate or a thing
    object_number: int = 1
    object_adjective: str = ""
    place: str = ""
    time: str = ""
    link: str = ""                                    # because, although
    cause_subject: str = ""                           # a name or an animate
    cause_number: int = 1
    cause: str = ""
    swapped: int = 0                                  # 1: the object acts on the subject; only `negatives` sets it


# What each field counts in the similarity of two meanings: the core of a sentence more than its circumstances.
WEIGHTS = (4, 1, 1, 1, 4, 1, 2, 4, 1, 1, 2, 2, 1, 1, 1, 2, 4)


def _mix(value: int) -> int:
    """The output function of splitmix64 [Steele, Lea & Flood 2014]."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


@lru_cache(1 << 12, typed=True)
def _digest(*parts) -> int:
    """64 bits that depend on the parts alone, unlike Python's salted hash()."""
    return int.from_bytes(blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest(), "little")


class Stream:
    """splitmix64: the same numbers for the same seed everywhere, which `random` does not promise over Python versions."""

    def __init__(self, *seed):
        self.state = _digest(*seed)

    def below(self, bound: int) -> int:
        self.state = (self.state + GOLDEN) & MASK
        return _mix(self.state) % bound

    def chance(self, percent: int) -> bool:
        return self.below(100) < percent

    def pick(self, items):
        return items[self.below(len(items))]


@lru_cache(None)
def _table() -> dict[str, dict[str, tuple]]:
    """grammar.txt as section -> concept -> (its CLASS or "", [the synonyms of a column, the common one first])."""
    sections, lines = {}, []
    for line in Path(__file__).with_name("grammar.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            lines[-1] += line                         # the row above goes on
        elif line and not line.startswith("#"):
            lines.append(line)
    for line in lines:
        if line.startswith("["):
            section = sections[line.strip("[]")] = {}
        else:
            head, *cells = re.split(r"\s+\|\s+", line.strip())
            concept, _, kind = head.partition(" ")
            section[concept] = kind, [re.split(r"\s+/\s+", cell) for cell in cells]
    return sections


@lru_cache(None)
def _concepts(section: str, *kinds: str) -> tuple[str, ...]:
    return tuple(concept for concept, (kind, _) in _table()[section].items() if not kinds or kind in kinds)


@lru_cache(None)
def _section(noun: str) -> str:
    return next(section for section in ("names", "animates", "things") if noun in _table()[section])


@lru_cache(None)
def _text(language: str, section: str, concept: str, rare: bool = False) -> str:
    """A cell: the common synonym or, where there is one, the rare one."""
    return _table()[section][concept][1][LANGUAGES.index(language)][-1 if rare else 0]


def _forms(language, section, concept, rare=False) -> list[str]:
    return _text(language, section, concept, rare).split(", ")


# ---- meanings


def _draw_noun(stream, section, names, taken) -> tuple[str, int, str]:
    """(noun, number, adjective), the noun being a name in `names` percent of the cases and none of `taken`."""
    named = stream.chance(names)
    noun = taken[0]
    while noun in taken:
        noun = stream.pick(_concepts("names" if named else section))
    if named:
        return noun, 1, ""
    number = 2 + stream.below(8) if stream.chance(45) else 1
    adjectives = _concepts("adjectives", "both", "thing" if section == "things" else "animate")
    return noun, number, stream.pick(adjectives) if stream.chance(45) else ""


def _draw(stream) -> Meaning:
    subject = _draw_noun(stream, "animates", 25, ("",))
    companion = stream.pick(_concepts("names")) if _section(subject[0]) != "names" and stream.chance(20) else ""
    verb = stream.pick(_concepts("verbs"))
    is_thing = stream.chance({"thing": 100, "both": 50, "animate": 0}[_table()["verbs"][verb][0]])
    taken = (subject[0], companion)
    object = _draw_noun(stream, "things" if is_thing else "animates", 0 if is_thing else 35, taken)
    tense, negated = stream.pick(TENSES), int(stream.chance(25))
    time = stream.pick(_concepts("times")) if stream.chance(60) else ""
    cause = ("", "", 1, "")
    if stream.chance(45):
        noun, number, _ = _draw_noun(stream, "animates", 50, taken + object[:1])
        cause = (stream.pick(("because", "because", "although")), noun, number, stream.pick(_concepts("causes")))
    # A sentence has at least one adjunct: bare ones are too alike, and leave nothing to paraphrase.
    place = stream.pick(_concepts("places")) if stream.chance(60) or not (time or cause[0]) else ""
    return Meaning(*subject, companion, verb, tense, negated, *object, place, time, *cause)


def _in_split(split, *parts) -> bool:
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is none of {', '.join(SPLITS)}")
    return _digest("split", *parts) % 10 in SPLITS[split]


def _walk(split, seed, salt="meanings"):
    """Endless different meanings of one split. Meanings differ in their sentences too: no two concepts share a form."""
    stream, seen = Stream(salt, split, seed), set()
    while True:
        meaning = _draw(stream)
        if meaning not in seen and _in_split(split, *meaning):
            seen.add(meaning)
            yield meaning


def meanings(split: str, count: int, seed: int = 0) -> list[Meaning]:
    """`count` different meanings. Which split a meaning is in depends on the meaning alone, so splits never overlap."""
    walk = _walk(split, seed)
    return [next(walk) for _ in range(count)]


# ---- words and phrases


GERMAN_ENDINGS = {                                    # (definite, object): article and adjective ending by gender
    (True, False): {"m": ("der", "e"), "f": ("die", "e"), "n": ("das", "e")},
    (True, True): {"m": ("den", "en"), "f": ("die", "e"), "n": ("das", "e")},
    (False, True): {"m": ("einen", "en"), "f": ("eine", "e"), "n": ("ein", "es")}}


def _english(noun, adjective, numeral, many, thing, case):
    words = [*adjective, noun[many]]
    article = "the" if not thing else "an" if words[0][0] in "aeiou" else "a"
    return [numeral[0] if many else article, *words]


def _german(noun, adjective, numeral, many, thing, case):
    gender, nominative, accusative, plural = noun
    article, ending = (numeral[0], "e") if many else GERMAN_ENDINGS[not thing, case != "subject"][gender]
    if case == "denied" and thing and not many:
        article = "k" + article                       # kein Buch, instead of ein Buch nicht
    form = plural if many else nominative if case == "subject" else accusative
    return [article, *(stem + ending for stem in adjective), form]


def _french(noun, adjective, numeral, many, thing, case):
    gender, form = noun[0], noun[1 + many]
    article = {"m": ("le", "un"), "f": ("la", "une")}[gender][thing]
    if case == "denied" and thing:
        article = "de"                                # il ne voit pas de livre
    words = [form]
    if adjective:
        side, *forms = adjective
        masculine_before_vowel = gender == "m" and not many and side == "before" and form[0] in "aeéêiouœh"
        agreed = forms[-1] if masculine_before_vowel and len(forms) == 5 else forms[2 * many + (gender == "f")]
        words = [agreed, form] if side == "before" else [form, agreed]
    return [numeral[0] if many else article, *words]


def _spanish(noun, adjective, numeral, many, thing, case):
    gender, form = noun[0], noun[1 + many]
    article = {"m": ("el", "un"), "f": ("la", "una")}[gender][thing]
    marker = ["a"] if case != "subject" and not thing else []                # the a of animate objects
    return [*marker, numeral[0] if many else article, form, *adjective[2 * many + (gender == "f"):][:1]]


def _russian(noun, adjective, numeral, many, thing, case):
    gender, nominative, accusative, genitive, genitives = noun
    accusing, nom_m, nom_f, nom_n, acc_f, gen_m, gen_s, nom_s = case != "subject", *(adjective or [""] * 7)
    if not many:
        agreed = {"m": gen_m if accusing and not thing else nom_m, "f": acc_f if accusing else nom_f, "n": nom_n}[gender]
        words = [agreed, accusative if accusing else nominative]
    elif accusing and not thing:
        words = [numeral[2], gen_s, genitives]        # двух старых врачей
    elif numeral[0] != numeral[2]:                    # 2, 3, 4: два старых стола, две старые книги
        words = [numeral[gender == "f"], nom_s if gender == "f" else gen_s, genitive]
    else:
        words = [numeral[0], gen_s, genitives]
    return [word for word in words if word]


PHRASES = {"en": _english, "de": _german, "fr": _french, "es": _spanish, "ru": _russian}


@lru_cache(1 << 16)
def _phrase(language, noun, number, adjective, case, rare=False, rare_adjective=False) -> tuple[str, str]:
    """(noun phrase, gender). `case`: subject, object, or denied (the object of a negated verb)."""
    section = _section(noun)
    forms = _forms(language, section, noun, rare)
    if section == "names":
        form = forms[-1 if case != "subject" else 0]
        return "a " + form if language == "es" and case != "subject" else form, _table()["names"][noun][0]
    adjective = _forms(language, "adjectives", adjective, rare_adjective) if adjective else []
    numeral = _forms(language, "numbers", str(number)) if number > 1 else []
    words = PHRASES[language](forms, adjective, numeral, number > 1, section == "things", case)
    return " ".join(words).replace("a el ", "al "), forms[0]


@lru_cache(1 << 15)
def _conjugate(language, section, concept, tense, many, gender, negated=0, rare=False) -> tuple[str, str]:
    """(finite verb with its negation, what German puts at the end). Section: verbs, or causes (German: verb last)."""
    forms, when = _forms(language, section, concept, rare), TENSES.index(tense)
    if language in ("fr", "es"):
        verb = forms[(2, 0, 4)[when] + many]
        if negated:
            first, _, rest = verb.partition(" ")
            verb = f"ne {first} pas {rest}".rstrip() if language == "fr" else "no " + verb
        return verb, ""
    if language == "ru":
        verb = forms[(4 if many else 3 if gender == "f" else 2, many, 5 + many)[when]]
        return "не " + verb if negated else verb, ""
    if language == "de" and tense == "future":
        auxiliary = "werden" if many else "wird"
        return (auxiliary, forms[1]) if section == "verbs" else (f"{forms[4]} {auxiliary}", "")
    if section == "causes" and tense == "future":
        return "will " + forms[4], ""
    if language == "de" or section == "causes":
        return forms[(2, 0)[when] + many], ""
    if negated or tense == "future":
        auxiliary = ("did", "do" if many else "does", "will")[when]
        return f"{auxiliary}{' not' if negated else ''} {forms[0]}", ""
    return forms[(2, 0 if many else 1)[when]], ""


ELISION = re.compile(r"\b(l|d|n|qu|puisqu)[ea] (?=[aeiouyhéèêâîœ])(?!huit)|(?<=même s)i (?=ils?\b)", re.IGNORECASE)


def _elide(text: str) -> str:
    """French: le ami -> l'ami, ne a -> n'a, parce que Anne -> parce qu'Anne, même si il -> même s'il; huit is an exception."""
    return ELISION.sub(lambda match: (match[1] or "") + "'", text)


# ---- sentences


def _clause(language, meaning, bits, opening) -> str:
    """The cause clause with its link. A cause whose subject is the sentence's is told with a pronoun."""
    link = _text(language, "links", meaning.link + "_first" * opening, bits & 7 < 3)
    noun, gender = _phrase(language, meaning.cause_subject, meaning.cause_number, "", "subject", bits >> 3 & 7 < 2)
    if meaning.cause_subject == meaning.subject:
        noun = _text(language, "words", gender)
    verb, _ = _conjugate(language, "causes", meaning.cause, meaning.tense, meaning.cause_number > 1, gender, 0, bits >> 6 & 7 < 2)
    return f"{link} {noun} {verb}"


def _sentence(meaning, language, style=0, known=False, opener="") -> str:
    """One sentence. `known`: the subject is a pronoun. `opener`: a text that takes the first place."""
    # Style draws from fields that `negatives` never edits, so that an edit changes no synonym and no order.
    base = _digest("style", meaning.verb, meaning.place, meaning.time, meaning.subject_adjective, meaning.object_adjective)
    base = _mix(base + LANGUAGES.index(language) * GOLDEN & MASK)
    bits = _mix(base + style & MASK)

    # The two participants: the phrase of the subject with its companion, and the phrase of the object.
    first = (meaning.subject, meaning.subject_number, meaning.subject_adjective)
    second = (meaning.object, meaning.object_number, meaning.object_adjective)
    case = "denied" if meaning.negated else "object"
    one, gender = _phrase(language, *first, case if meaning.swapped else "subject", bits & 7 < 2, bits >> 3 & 7 < 2)
    two, gender_two = _phrase(language, *second, "subject" if meaning.swapped else case, bits >> 6 & 7 < 2, bits >> 9 & 7 < 2)
    if meaning.companion:
        other, _ = _phrase(language, meaning.companion, 1, "", "object" if meaning.swapped else "subject")
        conjunction = _text(language, "words", "and")
        one = f"{other} {conjunction} {one}" if bits >> 12 & 1 else f"{one} {conjunction} {other}"
    if known:
        one = _text(language, "words", gender)
    many = meaning.subject_number > 1 or meaning.companion != ""
    if meaning.swapped:
        one, two, gender, many = two, one, gender_two, meaning.object_number > 1
    verb, last = _conjugate(language, "verbs", meaning.verb, meaning.tense, many, gender, meaning.negated, bits >> 13 & 7 < 2)

    # What comes first turns with the style, so that neighbouring styles are different strings.
    place = _text(language, "places", meaning.place, bits >> 16 & 7 < 3) if meaning.place else ""
    time = _text(language, "times", meaning.time, bits >> 19 & 7 < 3) if meaning.time else ""
    fronts = ["subject", *(field for field in ("time", "link", "place") if getattr(meaning, field))]
    front = "opener" if opener else fronts[((base & 7) + style) % len(fronts)]
    cause = _clause(language, meaning, bits >> 40, front == "link") if meaning.link else ""
    start = {"subject": "", "opener": opener, "time": time, "link": cause, "place": place}[front]
    place, time = "" if front == "place" else place, "" if front == "time" else time
    if start and (front == "link" or language in ("en", "fr")):
        start += ","
    if language == "de":
        parts = [start, verb, one] if start else [one, verb]                         # the verb is the second constituent
        parts += [two, time] if bits >> 22 & 1 else [time, two]
        if meaning.negated and not (_section(meaning.object) == "things" and meaning.object_number == 1):
            parts.append("nicht")
        parts += [place, last]
    else:
        parts = [start, one, verb, two]
        parts += [time, place] if bits >> 22 & 1 else [place, time]
    text = " ".join([part for part in parts if part])
    if cause and front != "link":
        text += (", " if language in ("de", "ru") else " ") + cause
    if language == "fr":
        text = _elide(text)
    return text[0].upper() + text[1:] + "."


def render(meaning: Meaning, language: str, style: int = 0) -> str:
    """The sentence of a meaning. Styles are paraphrases of it: other synonyms, another order; mostly different strings."""
    return _sentence(meaning, language, style)


def toy(split: str, count: int, seed: int = 0) -> list[dict[str, str]]:
    """A parallel corpus: one row a meaning, {language: sentence}, each row in a style of its own."""
    stream = Stream("styles", split, seed)
    rows = []
    for meaning in meanings(split, count, seed):
        style = stream.below(5)
        rows.append({language: _sentence(meaning, language, style) for language in LANGUAGES})
    return rows


def paraphrases(split: str, count: int, seed: int = 0, language: str = "en") -> list[list[str]]:
    """Groups of five different sentences of one meaning. Meanings with too few wordings are passed over."""
    groups, walk = [], _walk(split, seed)
    while len(groups) < count:
        meaning = next(walk)
        sentences = list(dict.fromkeys(_sentence(meaning, language, style) for style in range(12)))
        if len(sentences) >= 5:
            groups.append(sentences[:5])
    return groups


# ---- what the meanings are good for beside translation


def negatives(meaning: Meaning) -> list[tuple[str, Meaning]]:
    """(error type, meaning with exactly one field edited), every applicable edit [xsim++: Chen et al. 2023].

    Rendered in the same style, an edit changes the edited words, and what must agree with them, alone.
    """
    stream, edits = Stream("negatives", *meaning), []
    people = (meaning.subject, meaning.companion, meaning.object, meaning.cause_subject)

    def edit(error, field, choices):
        choices = [choice for choice in choices if choice != getattr(meaning, field)]
        edits.append((error, meaning._replace(**{field: stream.pick(choices)})))

    for field in ("subject", "object", "companion", "cause_subject"):
        noun = getattr(meaning, field)
        if noun and _section(noun) == "names":
            gender = _table()["names"][noun][0]
            edit("entity", field, [name for name in _concepts("names", gender) if name not in people])
        elif noun:
            edit("number", field.removesuffix("_subject") + "_number", range(1, 10))
    if _section(meaning.object) != "things":
        edit("role", "swapped", (0, 1))
    edit("negation", "negated", (0, 1))
    edit("tense", "tense", TENSES)
    if meaning.link:
        edit("cause", "link", ("because", "although"))
        edit("cause", "cause", _concepts("causes"))
    return edits


def similarity(left: Meaning, right: Meaning) -> float:
    """5 x the weighted share of equal fields among the fields that either meaning fills: 5.0 only for equal meanings."""
    same = total = 0
    for one, other, weight, unsaid in zip(left, right, WEIGHTS, Meaning()):
        if not one == other == unsaid:
            total += weight
            same += weight * (one == other)
    return 5.0 * same / total


def graded(count: int, seed: int = 0) -> list[tuple[Meaning, Meaning, float]]:
    """Meanings of the test split, each with one that shares some of its fields, and their `similarity`, spread over 0..5."""
    stream, walk, pairs = Stream("graded", seed), _walk("test", seed, "graded"), []

    def shape(meaning):                               # meanings of one shape can trade any field and stay well formed
        return [noun and _section(noun) for noun in (meaning.subject, meaning.object, meaning.cause_subject)]

    for base in (next(walk) for _ in range(count)):
        goal = stream.below(len(base))                # how many of the fields come from a donor
        while True:
            donor = _draw(stream)
            if shape(donor) != shape(base):
                continue
            order = sorted(Meaning._fields, key=lambda field: stream.below(MASK))
            edited = base._replace(**{field: getattr(donor, field) for field in order[:goal]})
            people = [noun for noun in (edited.subject, edited.companion, edited.object, edited.cause_subject) if noun]
            if len(people) == len(dict.fromkeys(people)):
                break
        pairs.append((base, edited, similarity(base, edited)))
    return pairs


def labels(meaning: Meaning) -> dict[str, str | int]:
    """What a probe can be asked about a sentence, true in every language. "subject": who acts."""
    if meaning.swapped:
        actor, many, object = meaning.object, meaning.object_number > 1, meaning.subject
    else:
        actor, many, object = meaning.subject, meaning.subject_number > 1 or meaning.companion != "", meaning.object
    return {"subject": actor, "number": "plural" if many else "singular", "verb": meaning.verb, "tense": meaning.tense,
            "negation": meaning.negated, "object": object, "place": meaning.place, "time": meaning.time, "link": meaning.link}


def documents(split: str, count: int, seed: int = 0, language: str = "en", sentences=(10, 30)) -> list[str]:
    """Little stories of 130 to 390 words and marks: one hero, one other, one place, one tense; the hero becomes a pronoun."""
    stream, texts = Stream("documents", split, seed), []
    walk = _walk(split, seed, "documents")
    for _ in range(count):
        first = next(walk)
        while _section(first.subject) != "names" or not first.place or first.tense == "future":
            first = next(walk)
        hero, (other, _, _) = first.subject, _draw_noun(stream, "animates", 50, (first.subject,))
        goal, length, lines, previous = sentences[0] + stream.below(sentences[1] - sentences[0] + 1), 0, [], ""
        while length < 360 and (len(lines) < goal or length < 130):
            meaning = _scene(stream, split, first, hero, other) if lines else first
            known = meaning.subject == hero == previous
            opener = _text(language, "openers", stream.pick(_concepts("openers"))) if lines and stream.chance(25) else ""
            lines.append(_sentence(meaning, language, stream.below(5), known, opener))
            length += len(re.findall(r"\w+|[^\w\s]", lines[-1]))
            previous = meaning.subject
        texts.append(" ".join(lines))
    return texts


def _scene(stream, split, first, hero, other) -> Meaning:
    """A later sentence of a document: mostly the hero acts; the place is seldom said again; causes are the hero's own."""
    while True:
        meaning = _draw(stream)
        subject = hero if stream.chance(70) else other
        meaning = meaning._replace(subject=subject, subject_number=1, subject_adjective="", companion="", tense=first.tense,
                                   place=first.place if stream.chance(20) else "")
        if meaning.link and stream.chance(60):
            meaning = meaning._replace(cause_subject=subject if _section(subject) == "names" else hero, cause_number=1)
        pronoun_fits = meaning.cause_subject != subject or _section(subject) == "names"
        if pronoun_fits and meaning.object not in (hero, subject, meaning.cause_subject) and _in_split(split, *meaning):
            return meaning


# ---- regular expressions


ITEMS = ("join", "chain", "repeat", "refuse")          # what can be said of a line; KIND in grammar.txt


def _tree(stream, depth, kinds):
    """(operator, operands, n): a random tree of at most `depth` operators above its atoms.

    The English is unambiguous: only a first operand may be said at length; a later one is short, or a join that says where it
    begins (either, both). So no two targets share a wording (tested).
    """
    name = stream.pick(_concepts("regex", *(("atom",) if depth == 0 or stream.chance(25) else kinds)))
    kind, (patterns, _) = _table()["regex"][name]
    inner = {"refuse": ("atom",), "repeat": ("join", "chain", "refuse")}.get(kind, ITEMS)
    operands = []
    while "{%d}" % len(operands) in patterns[0]:
        operand = _tree(stream, depth - 1, ("join", "refuse") if operands else inner)
        if operand not in operands:                   # never: a vowel or a vowel
            operands.append(operand)
    return name, operands, str(2 + stream.below(6)) if kind == "repeat" else ""


def _fill(template, operands, number) -> str:
    """Operands for {0}.., the number for {n}. Not str.format: the braces of a regular expression are its own."""
    return re.sub(r"\{([012])\}", lambda match: operands[int(match[1])], template).replace("{n}", number)


def _target(tree) -> str:
    name, operands, number = tree
    return _fill(_table()["regex"][name][1][0][0], [_target(operand) for operand in operands], number)


def _wording(tree, style, stream, later=False) -> str:
    name, operands, number = tree
    kind, (_, wordings) = _table()["regex"][name]
    if later and kind == "join":
        wordings = [wording for wording in wordings if wording.startswith(("both", "either", "all of", "any of"))]
    wording = wordings[(stream.below(len(wordings)) if style is None else style) % len(wordings)]
    return _fill(wording, [_wording(operand, style, stream, index > 0) for index, operand in enumerate(operands)], number)


def regex(split: str, count: int, seed: int = 0, style: int | None = None) -> list[tuple[str, str]]:
    """(English, regular expression) from a synchronous grammar in the manner of NL-RX [Locascio et al. 2016, sec. 3].

    The dialect has & (and) and ~ (not); trees have up to three levels of operators. The targets are all different, and the
    split of a row depends on its target alone. `style` fixes the paraphrase of every operator; None draws each.
    """
    stream, seen, pairs = Stream("regex", split, seed), set(), []
    while len(pairs) < count:
        tree = stream.pick(_concepts("regex", "line")), [_tree(stream, 1 + stream.below(2), ITEMS)], ""
        target, english = _target(tree), _wording(tree, style, stream)
        if target not in seen and _in_split(split, "regex", target):
            seen.add(target)
            pairs.append((english, target))
    return pairs
