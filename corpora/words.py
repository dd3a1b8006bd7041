"""What the embedded corpora are made of: the words of words.txt, and random numbers that are the
same on every machine."""

import re
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from base.common import BadInput

LANGUAGES = ("en", "de", "fr", "es", "ru")
SPLITS = {"train": range(8), "valid": (8,), "test": (9,)}  # tenths of all possible rows
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(value):
    """Return the output function of splitmix64 [Steele, Lea & Flood 2014]."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


@lru_cache(1 << 12, typed=True)
def hash64(*parts):
    """Return 64 bits that depend on the parts alone, unlike Python's salted hash()."""
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class Stream:
    """splitmix64: equal numbers for equal seeds in every version of Python, unlike `random`."""

    def __init__(self, *seed):
        self.state = hash64(*seed)

    def below(self, bound):
        self.state = (self.state + GOLDEN) & MASK
        return mix(self.state) % bound

    def chance(self, percent):
        return self.below(100) < percent

    def pick(self, items):
        return items[self.below(len(items))]


def in_split(split, *parts):
    """Return whether something is in a split. This depends on its parts alone, so that splits never
    overlap."""
    if split not in SPLITS:
        raise BadInput(f"split {split!r} is unknown: choose from {', '.join(SPLITS)}")
    return hash64("split", *parts) % 10 in SPLITS[split]


@lru_cache(None)
def lexicon():
    """Read words.txt: {section: {concept: (CLASS or "", [synonyms of a column, common first])}}."""
    lines = []
    for line in Path(__file__).with_name("words.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            lines[-1] += line  # it continues the row above
        elif line and not line.startswith("#"):
            lines.append(line)
    sections = {}
    for line in lines:
        if line.startswith("["):
            section = sections[line.strip("[]")] = {}
        else:
            head, *cells = re.split(r"\s+\|\s+", line.strip())
            concept, _, kind = head.partition(" ")
            section[concept] = kind, [re.split(r"\s+/\s+", cell) for cell in cells]
    return sections


@lru_cache(None)
def concepts(section, *kinds):
    rows = lexicon()[section].items()
    return tuple(concept for concept, (kind, _) in rows if not kinds or kind in kinds)


@lru_cache(None)
def word(language, section, concept, rare=False):
    """Return a cell, "bike, bikes": the common synonym or, if there is one, the rare one."""
    return lexicon()[section][concept][1][LANGUAGES.index(language)][-1 if rare else 0]
