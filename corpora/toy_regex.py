"""The embedded corpus regex: regular expressions, and what they match in English words."""

import re
from functools import lru_cache

from corpora.words import Stream, concepts, in_split, lexicon

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
