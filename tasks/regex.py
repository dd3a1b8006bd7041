"""Do two regular expressions denote the same language? [Locascio et al. 2016, sec. 4]

LLM-JEPA, paper and code, asks for equal strings; here `a|b` and `[ab]` are the same answer.
"""

import functools
import re
import string
from collections import deque


class BadPattern(ValueError):
    """This text is no regular expression of the dialect."""


class TooLarge(ValueError):
    """The comparison would need more than its limit: the answer is not known."""


WORD = frozenset(string.ascii_letters + string.digits + "_")  # \b is the edge of a word of these
TOKEN = re.compile(r"\{[0-9]{1,6}(?:,[0-9]{0,6})?\}|\[\^?(?:\\.|[^\]\\])+\]|\\.|.", re.S)
REPEATS = {"*": "0,", "+": "1,", "?": "0,1"}


class Expressions:
    """Expressions as numbers, and what is left of one after a character [Brzozowski 1964].

    Expressions equal up to the order, repetition and nesting of | and & have equal numbers, so each
    has finitely many derivatives. An expression is a tuple:

        "set", characters   one of a frozenset
        "edge"              \\b, the empty stretch with a word character on exactly one side
        "not", x            the stretches of the line that x does not match
        "or" | "and", x, y, ...
        "then", x, y        x is no "then"
        "star", x           none or more turns

    The alphabet has one character for all that are alike: ASCII, and where a range begins or ends.
    """

    def __init__(self, texts, limit):
        beyond = {chr(min(ord(sign) + 1, 0x10ffff)) for sign in texts}
        self.alphabet = frozenset({*map(chr, range(129)), *texts, *beyond})
        self.number = {}  # expression -> its number
        self.made = []    # number -> expression
        self.size = 0
        self.limit = limit
        self.none = self.make("set", frozenset())
        self.empty = self.make("star", self.none)
        self.any = self.make("set", self.alphabet)
        self.all = self.make("star", self.any)
        self.stands = functools.cache(self.stands)
        self.after = functools.cache(self.after)

    def make(self, *expression):
        """The number of an expression. Raises TooLarge."""
        if expression not in self.number:
            self.size += len(expression)
            if self.size > self.limit:
                raise TooLarge(f"more than {self.limit} parts of expressions")
            self.number[expression] = len(self.made)
            self.made.append(expression)
        return self.number[expression]

    def letters(self):
        """Characters that some set tells apart, one for all that none does; later sets are none."""
        sets = [WORD] + [parts[0] for kind, *parts in self.made if kind == "set"]
        found = {}
        for sign in sorted(self.alphabet):
            found.setdefault(tuple(sign in one for one in sets), sign)
        return list(found.values())

    def refuse(self, x):
        if x in (self.none, self.all):
            return self.all if x == self.none else self.none
        kind, *parts = self.made[x]
        return parts[0] if kind == "not" else self.make("not", x)

    def join(self, kind, numbers):
        """Union or intersection: flat, sorted, without repetition."""
        neutral = self.none if kind == "or" else self.all
        decides = self.all if kind == "or" else self.none  # alone, whatever else is
        parts = set()
        for x in numbers:
            parts.update(self.made[x][1:] if self.made[x][0] == kind else (x,))
        parts.discard(neutral)
        if decides in parts:
            return decides
        if not parts:
            return neutral
        return parts.pop() if len(parts) == 1 else self.make(kind, *sorted(parts))

    def then(self, x, y):
        kind, *parts = self.made[x]
        if self.none in (x, y):
            return self.none
        twice = kind == "star" and (x == y or self.made[y][:2] == ("then", x))
        if twice or x == self.empty:  # x* x* is x*
            return y
        if y == self.empty:
            return x
        if kind == "then":
            return self.then(parts[0], self.then(parts[1], y))
        return self.make("then", x, y)

    def repeat(self, x, low, high):
        """`low` to `high` turns; high None: without end."""
        is_star = self.made[x][0] == "star"
        found = self.empty
        if high is None:
            found = x if is_star else self.make("star", x)
        for _ in range((high or low) - low):
            found = self.join("or", [self.empty, self.then(x, found)])
        for _ in range(low):
            found = self.then(x, found)
        return found

    def stands(self, x, before, after):
        """Does x match nothing between two characters, given whether each is of a word?"""
        kind, *parts = self.made[x]
        if kind == "set":
            return False
        if kind == "edge":
            return before != after
        if kind == "star":
            return True
        found = (self.stands(y, before, after) for y in parts)
        if kind == "not":
            return not next(found)
        return any(found) if kind == "or" else all(found)

    def after(self, x, sign, before):
        """What must follow the character `sign` for x to match; `before`: one of a word preceded
        it."""
        kind, *parts = self.made[x]
        if kind == "set":
            return self.empty if sign in parts[0] else self.none
        if kind == "edge":
            return self.none
        left = self.after(parts[0], sign, before)
        if kind == "not":
            return self.refuse(left)
        if kind == "star":
            return self.then(left, x)
        if kind != "then":
            return self.join(kind, [self.after(y, sign, before) for y in parts])
        left = self.then(left, parts[1])
        if self.stands(parts[0], before, sign in WORD):
            left = self.join("or", [left, self.after(parts[1], sign, before)])
        return left


class PatternParser:
    """Text -> expression. From loose to tight: a|b, a&b, ab, then a* a+ a? a{n} a{n,} a{n,m}, then
    ~a, as dk.brics.automaton has it."""

    def __init__(self, text, made):
        self.made = made
        self.tokens = deque(TOKEN.findall(text))

    def next_is(self, signs):
        return bool(self.tokens) and self.tokens[0] in signs

    def whole(self):
        found = self.series(0)
        if self.tokens:
            raise BadPattern
        return found

    def series(self, level):
        """Level 0 is a|b, of level 1, a&b, of level 2, pieces side by side."""
        if level == 2:
            return self.pieces()
        parts = [self.series(level + 1)]
        while self.next_is("|&"[level]):
            self.tokens.popleft()
            parts.append(self.series(level + 1))
        return self.made.join(("or", "and")[level], parts)

    def pieces(self):
        parts = [self.piece()]
        while self.tokens and not self.next_is("|&)"):
            parts.append(self.piece())
        found = self.made.empty
        for x in reversed(parts):
            found = self.made.then(x, found)
        return found

    def piece(self):
        found = self.atom()
        while self.next_is(REPEATS) or self.tokens and re.match(r"\{.", self.tokens[0]):
            token = self.tokens.popleft()
            low, comma, high = REPEATS.get(token, token[1:-1]).partition(",")
            if not comma:
                high = low
            if high and int(low) > int(high):
                raise BadPattern
            found = self.made.repeat(found, int(low), int(high) if high else None)
        return found

    def atom(self):
        token = self.tokens.popleft() if self.tokens else ""
        if token == "~":
            return self.made.refuse(self.atom())
        if token == "(":
            found = self.made.empty if self.next_is(")") else self.series(0)
            if not self.next_is(")"):
                raise BadPattern
            self.tokens.popleft()
            return found
        if token in "|&*+?{}[]^$)\\" or token[0] == "{":
            raise BadPattern
        if token == ".":
            return self.made.any
        if token == "\\b":
            return self.made.make("edge")
        return self.made.make("set", self.characters(token))

    def characters(self, token):
        """The characters of x, \\x and [...], as Python's re reads them."""
        if len(token) == 1:
            return frozenset(token)
        try:
            pattern = re.compile(token if token[0] == "[" else f"[{token}]", re.ASCII)
        except re.error:
            raise BadPattern from None
        return frozenset(filter(pattern.fullmatch, self.made.alphabet))


def regex_difference(a, b, limit=300_000):
    """A line that exactly one of two regular expressions matches whole, or None: the same language.

    A line is of any characters, so . is any and ~ is relative to all lines. Raises BadPattern,
    TooLarge where all expressions met have more than `limit` parts, and RecursionError.
    """
    # All pairs of what is left of the two after some text are visited.
    made = Expressions(a + b, limit)
    start = (PatternParser(a, made).whole(), PatternParser(b, made).whole(), False)
    letters = made.letters()
    has_edges = ("edge",) in made.number
    known = {start}
    queue = deque([(*start, "")])
    while queue:
        x, y, before, line = queue.popleft()
        if made.stands(x, before, False) != made.stands(y, before, False):
            return line
        for sign in letters:
            word = has_edges and sign in WORD
            pair = (made.after(x, sign, before), made.after(y, sign, before), word)
            if pair[0] != pair[1] and pair not in known:
                known.add(pair)
                queue.append((*pair, line + sign))
    return None


def regex_equal(generated, gold, limit=300_000):
    """Do two regular expressions denote the same language? What cannot be read is wrong, but equal
    texts are equal. Raises TooLarge and RecursionError."""
    generated = generated.strip()
    gold = gold.strip()
    if not generated or generated == gold:
        return bool(generated)
    try:
        return regex_difference(generated, gold, limit) is None
    except BadPattern:
        return False


def regex_vacuous(gold):
    """Does an expression match no line at all (a digit & the word dog), or every line?"""
    return any(regex_equal(gold, other) for other in ("~(.*)", ".*"))
