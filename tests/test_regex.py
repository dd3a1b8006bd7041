"""Two regular expressions denote the same language: by hand, and by brute force."""

import itertools
import random
import re

import pytest

from tasks import regex

# ---- by hand


RIGHT = [
    ("[ab]", "(a)|(b)"), ("a+", "aa*"), ("a{2,}", "aaa*"), ("a{1,3}", "a(a(a)?)?"), ("a{2}", "aa"),
    ("(.*)(dog).*", ".*dog.*"), ("~(.*dog.*)&~(.*truck.*)", "~((.*dog.*)|(.*truck.*))"),
    ("[^a]", ".&~(a)"), ("[a\\-z]", "a|z|\\-"), (r"\d", "[0-9]"),
    (r"\W", "[^A-Za-z0-9_]"), (r"\.", "[.]"), ("[а-я]", "[а-яб]"), ("()|a", "a?"),
    (" dog\n", "dog"), ("(dog", "(dog"),  # the second cannot be read, but is the same text
]
WRONG = [
    ("[а-я]", "а|я"), (".*", ".+"), ("~(a)*", "~(a*)"), ("ab|c", "a(b|c)"),
    ("a|b&c", "(a|b)&c"), ("ab*&a", "a(b*&a)"), ("~ab", "~(ab)"),
    # what is not an answer
    ("", ""), ("  ", "dog"), ("dog dog", "dog"), ("dog\nlines with a cat", "dog"),
    # what cannot be read
    ("(dog", "dog"), ("dog)", "dog"), ("*", "a"), ("a||b", "a|b"), ("a&", "a"), ("[]", "a"),
    ("[z-a]", "a"), ("a{3,2}", "a"), ("a{,2}", "a{0,2}"), ("^dog$", "dog"), ("(?:a)", "a"),
    (r"\q", "q"), ("a\\", "a"), ("[a", "a"), ("~", "a"), (r"(a)\1", "aa"), ("[\\d-z]", "a"),
]
EDGES = [  # (a, b, equal): \b has no width
    (r"\b(dog)\b", "dog", True),  # the ends of the line are edges of words
    (r"\b(dog)\b", "b(dog)b", False),
    (r"a\bb", "(a)&(b)", True),  # no edge inside of a word
    (r".*\ba\b.*", r"(.*[^A-Za-z0-9_])?a([^A-Za-z0-9_].*)?", True),
    (r"(\b|(a-)){2}&(a-)", "a-", True),  # one of two turns is the edge at the start
    (r"(\ba\b|-)*", r"(\ba\b|(-)|(\ba\b)(-))*", True),
]


@pytest.mark.parametrize("generated, gold, equal", [
    *[(*pair, True) for pair in RIGHT], *[(*pair, False) for pair in WRONG], *EDGES])
def test_regular_expressions_are_equal_if_they_match_the_same_lines(generated, gold, equal):
    assert regex.regex_equal(generated, gold) is equal


def test_a_comparison_beyond_its_limit_says_so_and_guesses_nothing():
    pair = (".*a.{12}", ".*(a|aa).{12}")
    with pytest.raises(regex.TooLarge, match="more than 1000 parts"):
        regex.regex_equal(*pair, limit=1000)
    assert regex.regex_equal(*pair)
    assert regex.regex_equal("(" * 60 + "a" + ")" * 60, "a")


# ---- the definition once more, by the stretches of one line that each part matches


def repeated(inner, low, high, size):
    """{(start, end)} of `low` to `high` turns of `inner` on a line of `size` characters."""
    found = [{(i, i) for i in range(size + 1)}]
    for _ in range(low + size + 1 if high is None else high):
        found.append({(i, k) for i, j in found[-1] for j2, k in inner if j == j2})
    return set().union(*found[low:])


def stretches(tree, line):
    """{(start, end)}: what the tree matches of the line."""
    kind, *parts = tree
    if kind == "edge":
        inside = [False, *(sign.isalnum() for sign in line), False]
        return {(i, i) for i in range(len(line) + 1) if inside[i] != inside[i + 1]}
    if kind == "set":
        return {(i, i + 1) for i, sign in enumerate(line) if re.fullmatch(parts[0], sign, re.S)}
    if kind == "many":
        return repeated(stretches(parts[0], line), *parts[1:], len(line))
    inner = [stretches(part, line) for part in parts]
    if kind == "not":
        size = len(line) + 1
        return {(i, j) for i in range(size) for j in range(i, size)} - inner[0]
    if kind == "then":
        return {(i, k) for i, j in inner[0] for j2, k in inner[1] if j == j2}
    return inner[0] | inner[1] if kind == "or" else inner[0] & inner[1]


def matches(tree, line):
    return (0, len(line)) in stretches(tree, line)


def written(tree):
    kind, *parts = tree
    if kind in ("edge", "set"):
        return parts[0] if parts else r"\b"
    inner = [f"({written(part)})" for part in parts if isinstance(part, tuple)]
    if kind == "many":
        _, low, high = parts
        short = {(0, None): "*", (1, None): "+", (0, 1): "?"}
        counts = "{%s,%s}" % (low, "" if high is None else high)
        return inner[0] + short.get((low, high), counts)
    if kind == "not":
        return "~" + inner[0]
    return {"then": "", "or": "|", "and": "&"}[kind].join(inner)


def random_tree(rng, depth, kinds):
    kind = rng.choice(kinds) if depth else "set"
    if kind == "edge":
        return ("edge",)
    if kind == "set":
        return ("set", rng.choice(["a", "b", "-", ".", "[ab]", "[^a]"]))
    inner = [random_tree(rng, depth - 1, kinds) for _ in range(1 if kind in ("many", "not") else 2)]
    if kind == "many":
        inner += rng.choice([(0, None), (1, None), (0, 1), (2, None), (1, 2), (2, 3)])
    return (kind, *inner)


LINES = ["".join(line) for size in range(5) for line in itertools.product("ab-", repeat=size)]
ALL = ("set", "edge", "then", "or", "and", "not", "many")


def test_equivalence_of_random_expressions_is_that_of_brute_force():
    rng = random.Random(0)
    equal = 0
    for turn in range(800):
        a = random_tree(rng, 3, ALL)
        b = random_tree(rng, 2, ALL)
        if turn % 4 == 0:
            b = ("or", a, ("and", a, b))
        line = regex.regex_difference(written(a), written(b))
        if line is None:
            equal += 1
            for line in rng.sample(LINES, 40):
                assert matches(a, line) == matches(b, line), (written(a), written(b))
        else:                                            # the witness is one by this definition too
            assert matches(a, line) != matches(b, line), (written(a), written(b), line)
    assert 200 < equal < 600
