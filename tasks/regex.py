"""Do two regular expressions denote the same language? [Locascio et al. 2016, sec. 4]

LLM-JEPA, paper and code, asks for equal strings; here `a|b` and `[ab]` are the same answer.
"""

import re
import string
from collections import deque


class BadPattern(ValueError):
    """This text is no regular expression of the dialect."""


class TooLarge(ValueError):
    """The comparison would need more than its limit: the answer is not known."""


WORD = string.ascii_letters + string.digits + "_"        # what \b calls the characters of a word
ESCAPES = {"d": string.digits, "w": WORD, "s": string.whitespace}
TOKEN = re.compile(r"\{[0-9]{1,6}(?:,[0-9]{0,6})?\}|\[\^?(?:\\.|[^\]\\])+\]|\\.|.", re.S)
MEMBER = re.compile(r"(\\.|.)(?:-(\\.|.))?", re.S)
REPEATS = {"*": "0,", "+": "1,", "?": "0,1"}
FOREVER = (0, None)                                      # x*: none or more turns


class Derivatives:
    """Expressions as numbers, and what is left of one after a character [Brzozowski 1964].

    Expressions equal up to the order, repetition and nesting of | and & have equal numbers, so each
    has finitely many derivatives. An expression is a tuple:

        "set", bits           one character: bit i stands for alphabet[i]
        "edge"                \\b, the empty stretch with a word character on exactly one side
        "not", x              the stretches of the line that x does not match
        "or" | "and" | "then", x, y, ...
        "many", x, low, high  high None: without end

    What is left depends on the character before too, because of the edge, and on no more. The
    alphabet has one character for all that are alike: ASCII, and where a range can begin or end.
    """

    def __init__(self, texts, limit):
        mentioned = {127, 128}
        for text in texts:
            mentioned.update(map(ord, text))
            mentioned.update(ord(sign) + 1 for sign in text)
        beyond = mentioned - {*range(127), 0x110000}
        self.alphabet = [*range(32, 127), *range(32), *sorted(beyond)]
        self.number = {}                                 # expression -> its number
        self.made = []                                   # number -> expression
        self.known = {}
        self.size = 0
        self.limit = limit
        self.words = self.bits(map(ord, WORD))
        self.none = self.make("set", 0)
        self.empty = self.make("then")
        self.any = self.make("set", (1 << len(self.alphabet)) - 1)
        self.all = self.make("not", self.none)

    def bits(self, codes):
        codes = codes if isinstance(codes, range) else set(codes)
        return sum(1 << index for index, code in enumerate(self.alphabet) if code in codes)

    def make(self, *expression):
        """The number of an expression. Raises TooLarge."""
        if expression not in self.number:
            self.size += len(expression)
            if self.size > self.limit:
                raise TooLarge(f"the comparison needs more than {self.limit} parts of expressions: "
                               "raise the limit")
            self.number[expression] = len(self.made)
            self.made.append(expression)
        return self.number[expression]

    def letters(self):
        """Indices of characters that some set tells apart, one for all that none does; later sets
        are made of these sets."""
        sets = [self.words] + [parts[0] for kind, *parts in self.made if kind == "set"]
        found = {}
        for index in range(len(self.alphabet)):
            found.setdefault(tuple(bits >> index & 1 for bits in sets), index)
        return list(found.values())

    def flat(self, kind, numbers):
        """The numbers, with those of an expression of the same kind in place of it."""
        for x in numbers:
            yield from self.made[x][1:] if self.made[x][0] == kind else (x,)

    def is_forever(self, x):
        return x == self.all or self.made[x][0] == "many" and self.made[x][2:] == FOREVER

    def refuse(self, x):
        return self.made[x][1] if self.made[x][0] == "not" else self.make("not", x)

    def join(self, kind, numbers):
        """Union or intersection: flat, sorted, without repetition, the sets made one."""
        neutral = self.none if kind == "or" else self.all
        decides = self.all if kind == "or" else self.none                # alone, whatever else is
        parts = set()
        one_set = None
        for x in self.flat(kind, numbers):
            if self.made[x][0] != "set":
                parts.add(x)
                continue
            bits = self.made[x][1]
            if one_set is None:
                one_set = bits
            elif kind == "or":
                one_set |= bits
            else:
                one_set &= bits
        if one_set is not None:
            parts.add(self.make("set", one_set))
        parts.discard(neutral)
        denied = {self.made[x][1] for x in parts if self.made[x][0] == "not"}
        if decides in parts or denied & parts:
            return decides
        if not parts:
            return neutral
        return parts.pop() if len(parts) == 1 else self.make(kind, *sorted(parts))

    def then(self, numbers):
        parts = []
        for x in self.flat("then", numbers):
            if x == self.none:
                return self.none
            if not parts or parts[-1] != x or not self.is_forever(x):    # x* x* is x*
                parts.append(x)
        return parts[0] if len(parts) == 1 else self.make("then", *parts)

    def many(self, x, low, high):
        if high == 0 or x == self.empty or x == self.none and low == 0:
            return self.empty
        if x == self.none or (low, high) == (1, 1) or self.is_forever(x):
            return x
        if x == self.any and (low, high) == FOREVER:
            return self.all
        return self.make("many", x, low, high)

    def stands(self, x, before, after):
        """Does x match nothing between two characters, given whether each is of a word?"""
        kind, *parts = self.made[x]
        if kind == "set":
            return False
        if kind == "edge":
            return before != after
        if kind == "many":
            return parts[1] == 0 or self.stands(parts[0], before, after)
        found = (self.stands(y, before, after) for y in parts)
        if kind == "not":
            return not next(found)
        return any(found) if kind == "or" else all(found)

    def after(self, x, index, before):
        """What must follow the character alphabet[index] for x to match; `before`: one of a word
        preceded it."""
        key = x, index, before
        if key not in self.known:
            self.known[key] = self.derive(x, index, before)
        return self.known[key]

    def derive(self, x, index, before):
        kind, *parts = self.made[x]
        word = bool(self.words >> index & 1)
        if kind == "set":
            return self.empty if parts[0] >> index & 1 else self.none
        if kind == "edge":
            return self.none
        if kind == "not":
            return self.refuse(self.after(parts[0], index, before))
        if kind == "many":
            y, low, high = parts
            # Turns that match nothing here may be as many as one likes.
            low = 0 if self.stands(y, before, word) else max(low - 1, 0)
            return self.then([self.after(y, index, before), self.many(y, low, high and high - 1)])
        if kind != "then":
            return self.join(kind, [self.after(y, index, before) for y in parts])
        ways = []
        for first, y in enumerate(parts):
            ways.append(self.then([self.after(y, index, before), *parts[first + 1:]]))
            if not self.stands(y, before, word):
                break
        return self.join("or", ways)


class RegexParser:
    """Text -> expression. From loose to tight: a|b, a&b, ab, then a* a+ a? a{n} a{n,} a{n,m}, then
    ~a, as dk.brics.automaton has it."""

    def __init__(self, text, made):
        self.text = text
        self.made = made
        self.tokens = deque(TOKEN.findall(text))

    def fail(self):
        index = len(self.text) - len("".join(self.tokens))
        raise BadPattern(f"{self.text!r} is no regular expression of NL-RX's dialect: look before "
                         f"character {index + 1}")

    def next_is(self, signs):
        """Is the next token one of these signs?"""
        return bool(self.tokens) and self.tokens[0] in signs

    def take(self, wanted):
        found = self.next_is((wanted,))
        if found:
            self.tokens.popleft()
        return found

    def whole(self):
        if self.tokens.count("(") != self.tokens.count(")"):
            self.fail()
        found = self.series(0)
        if self.tokens:
            self.fail()
        return found

    def series(self, level):
        """Level 0 is a|b, of level 1, a&b, of level 2, ab, of pieces."""
        if level < 2:
            parts = [self.series(level + 1)]
            while self.take("|&"[level]):
                parts.append(self.series(level + 1))
            return self.made.join(("or", "and")[level], parts)
        parts = [self.piece()]
        while self.tokens and not self.next_is("|&)"):
            parts.append(self.piece())
        return self.made.then(parts)

    def piece(self):
        complements = 0
        while self.take("~"):
            complements += 1
        found = self.atom()
        if complements % 2:
            found = self.made.refuse(found)
        while self.next_is(REPEATS) or self.tokens and re.match(r"\{.", self.tokens[0]):
            token = self.tokens.popleft()
            low, comma, high = REPEATS.get(token, token[1:-1]).partition(",")
            if not comma:
                high = low
            low = int(low)
            high = int(high) if high else None
            if high is not None and low > high:
                self.fail()
            found = self.made.many(found, low, high)
        return found

    def atom(self):
        if not self.tokens:
            self.fail()
        token = self.tokens.popleft()
        if token == "(":
            found = self.made.empty if self.next_is(")") else self.series(0)
            if not self.take(")"):
                self.fail()
            return found
        if token in "|&*+?{}[]^$)" or token[0] == "{":
            self.fail()
        if token == ".":
            return self.made.any
        if token == "\\b":
            return self.made.make("edge")
        return self.made.make("set", self.bits(token))

    def bits(self, token):
        """Of x, \\x and [...]. Before a sign, \\ is that sign; before d w s D W S, a class."""
        everything = self.made.made[self.made.any][1]
        if token.startswith("[^") and len(token) > 2:
            return everything ^ self.members(token[2:-1])
        if len(token) > 2:
            return self.members(token[1:-1])
        if token == "\\":
            self.fail()
        if len(token) == 1 or not (token[1].isascii() and token[1].isalnum()):
            return self.made.bits([ord(token[-1])])
        if token[1].lower() not in ESCAPES:
            self.fail()
        found = self.made.bits(map(ord, ESCAPES[token[1].lower()]))
        return everything ^ found if token[1].isupper() else found

    def members(self, text):
        """Of what stands between [ and ]."""
        found = 0
        for low, high in MEMBER.findall(text):
            if not high:
                found |= self.bits(low)
                continue
            # A range that runs backwards, or whose end is a class and no character.
            several = max(self.bits(low).bit_count(), self.bits(high).bit_count()) > 1
            if several or low[-1] > high[-1]:
                self.fail()
            found |= self.made.bits(range(ord(low[-1]), ord(high[-1]) + 1))
        return found


def regex_difference(a, b, limit=300_000):
    """A line that exactly one of two regular expressions matches whole, or None: the same language.

    Walks all pairs of what is left of the two after some text; those known to be equal are joined
    [Hopcroft & Karp 1971]. The alphabet is every character (a line holds no line break, so . is
    any), ~ is relative to all lines, and \\b is the edge of a word of [0-9A-Za-z_], as the English
    of NL-RX and Python's re have it. Raises BadPattern, and TooLarge beyond `limit`, a bound on the
    size of all expressions met, and so on time and memory.
    """
    try:
        return _walk(a, b, limit)
    except RecursionError:
        raise TooLarge(f"{a[:40]!r} and {b[:40]!r} are nested too deep") from None


def _walk(a, b, limit):
    made = Derivatives((a, b), limit)
    x = RegexParser(a, made).whole()
    y = RegexParser(b, made).whole()
    letters = made.letters()
    has_edges = ("edge",) in made.number
    leader = {}                                          # state -> one that is known to be equal
    queue = deque([(x, y, False, "")])
    while queue:
        x, y, before, line = queue.popleft()
        if made.stands(x, before, False) != made.stands(y, before, False):
            return line
        ends = []
        for state in ((x, before), (y, before)):
            while state in leader:
                state = leader[state]
            ends.append(state)
        if ends[0] == ends[1]:
            continue
        leader[ends[0]] = ends[1]
        for index in letters:
            word = has_edges and bool(made.words >> index & 1)
            longer = line + chr(made.alphabet[index])
            queue.append((made.after(x, index, before), made.after(y, index, before), word, longer))
    return None


def regex_equal(generated, gold, limit=300_000):
    """Do two regular expressions denote the same language?

    Equal strings are equal even if they cannot be read; otherwise what cannot be read is wrong.
    Every two that match no line are equal, whatever their authors meant: see regex_vacuous. Raises
    TooLarge.
    """
    generated = generated.strip()
    gold = gold.strip()
    if not generated or generated == gold:
        return bool(generated)
    try:
        return regex_difference(generated, gold, limit) is None
    except BadPattern:
        return False


def regex_vacuous(gold):
    """Does it match no line at all, or every line?

    One NL-RX target in five does, say a digit & the word dog: an equal language proves little.
    """
    return any(regex_difference(gold, other) is None for other in ("~(.*)", ".*"))
