"""Is this answer right? What a model writes or prefers, judged against gold, one question at a time: the papers' protocols in full.

Regular expressions by the language they denote, GSM8K by the number, SQL by what it returns, NQ-Open by substring, labels by prefix,
multiple choice by log-likelihood, extractive answers by words. Every function is pure and returns booleans, floats or texts; averages
and percentages are the caller's. Where released code judges otherwise than its paper, `released=True` does as the code does. Nothing
generated is wrong everywhere, except there. What cannot be judged raises ValueError, one line: it is to be counted, not guessed.
"""
import contextlib
import re
import sqlite3
import string
import time
import unicodedata
from collections import Counter, deque
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

import data
from data import BadInput
from model import Packed, View

# ---------------------------------------------------------------------------------------------------------------------
# Regular expressions: do two denote the same language?


class BadPattern(ValueError):
    """This text is no regular expression of the dialect."""


class TooLarge(ValueError):
    """The comparison would need more than its limit: the answer is not known."""


WORD = string.ascii_letters + string.digits + "_"                        # what \b calls the characters of a word
ESCAPES = {"d": string.digits, "w": WORD, "s": string.whitespace}
TOKEN = re.compile(r"\{[0-9]{1,6}(?:,[0-9]{0,6})?\}|\[\^?(?:\\.|[^\]\\])+\]|\\.|.", re.S)
MEMBER = re.compile(r"(\\.|.)(?:-(\\.|.))?", re.S)


class Derivatives:
    """Expressions as numbers, and what is left of one after a character [Brzozowski 1964]. Expressions equal up to the order,
    repetition and nesting of | and & have equal numbers, so each has finitely many derivatives. "edge" (\\b) matches the empty stretch with
    a word character on exactly one side, and ~a matches the stretches of the line that a does not: what is left depends on the
    character before too, and on no more. A set is the bits of its members in `alphabet`, which has one character for all that are
    alike: ASCII, and where any range of the two texts can begin or end."""

    def __init__(self, texts, limit):
        mentioned = {ord(sign) + step for text in texts for sign in text for step in (0, 1)}
        self.alphabet = [*range(32, 127), *range(32), *sorted((mentioned | {127, 128}) - {*range(127), 0x110000})]
        self.number, self.made, self.known, self.size, self.limit = {}, [], {}, 0, limit
        self.words = self.bits(map(ord, WORD))
        self.none, self.empty, self.any = self.make("set", 0), self.make("then"), self.make("set", (1 << len(self.alphabet)) - 1)
        self.all = self.make("not", self.none)

    def bits(self, codes):
        codes = codes if isinstance(codes, range) else set(codes)
        return sum(1 << place for place, code in enumerate(self.alphabet) if code in codes)

    def make(self, *expression):
        if expression not in self.number:
            self.size += len(expression)
            if self.size > self.limit:
                raise TooLarge(f"the comparison needs more than {self.limit} parts of expressions: raise the limit")
            self.number[expression] = len(self.made)
            self.made.append(expression)
        return self.number[expression]

    def letters(self):
        """Places of characters that some set tells apart, one for all that none does; later sets are made of these sets."""
        sets = [parts[0] for kind, *parts in self.made if kind == "set"]
        found = {}
        for place in range(len(self.alphabet)):
            found.setdefault((self.words >> place & 1, *(bits >> place & 1 for bits in sets)), place)
        return list(found.values())

    def refuse(self, x):
        return self.made[x][1] if self.made[x][0] == "not" else self.make("not", x)

    def join(self, kind, parts):
        """Union or intersection: flat, sorted, without repetition, the sets made one; what decides alone is all there is."""
        neutral, decides = (self.none, self.all) if kind == "or" else (self.all, self.none)
        flat, sets = set(), []
        for x in parts:
            for y in self.made[x][1:] if self.made[x][0] == kind else (x,):
                sets.append(self.made[y][1]) if self.made[y][0] == "set" else flat.add(y)
        for bits in sets[1:]:
            sets[0] = sets[0] | bits if kind == "or" else sets[0] & bits
        flat = (flat | {self.make("set", sets[0])} if sets else flat) - {neutral}
        if decides in flat or any(self.made[x][0] == "not" and self.made[x][1] in flat for x in flat):
            return decides
        return self.make(kind, *sorted(flat)) if len(flat) > 1 else flat.pop() if flat else neutral

    def then(self, parts):
        flat = []
        for x in parts:
            for y in self.made[x][1:] if self.made[x][0] == "then" else (x,):
                if y == self.none:
                    return self.none
                if not (flat and flat[-1] == y and (y == self.all or self.made[y][0] == "many" and self.made[y][2:] == (0, None))):
                    flat.append(y)                                       # x* x* is x*
        return flat[0] if len(flat) == 1 else self.make("then", *flat)

    def many(self, x, low, high):
        if high == 0 or x == self.empty or x == self.none and low == 0:
            return self.empty
        if x in (self.none, self.all) or (low, high) == (1, 1) or self.made[x][0] == "many" and self.made[x][2:] == (0, None):
            return x
        return self.all if x == self.any and (low, high) == (0, None) else self.make("many", x, low, high)

    def stands(self, x, before, after):
        """Does x match the empty stretch between a character and the next, given whether each is of a word?"""
        kind, *parts = self.made[x]
        if kind == "many":
            return parts[1] == 0 or self.stands(parts[0], before, after)
        if kind in ("set", "edge"):
            return kind == "edge" and before != after
        found = (self.stands(y, before, after) for y in parts)
        return not next(found) if kind == "not" else any(found) if kind == "or" else all(found)

    def after(self, x, place, before):
        """What must follow the character at `place` of the alphabet for x to match; `before`: one of a word preceded it."""
        key = x, place, before
        if key not in self.known:
            kind, *parts = self.made[x]
            word = bool(self.words >> place & 1)
            if kind in ("set", "edge"):
                found = self.empty if kind == "set" and parts[0] >> place & 1 else self.none
            elif kind == "not":
                found = self.refuse(self.after(parts[0], place, before))
            elif kind == "many":                                         # turns that match nothing here may be as many as one likes
                y, low, high = parts
                low = 0 if self.stands(y, before, word) else max(low - 1, 0)
                found = self.then([self.after(y, place, before), self.many(y, low, high and high - 1)])
            elif kind == "then":
                ways = []
                for first, y in enumerate(parts):
                    ways.append(self.then([self.after(y, place, before), *parts[first + 1:]]))
                    if not self.stands(y, before, word):
                        break
                found = self.join("or", ways)
            else:
                found = self.join(kind, [self.after(y, place, before) for y in parts])
            self.known[key] = found
        return self.known[key]


class Parser:
    """Text -> expression. From loose to tight: a|b, a&b, ab, then a* a+ a? a{n} a{n,} a{n,m}, then ~a, as dk.brics.automaton has it."""

    def __init__(self, text, made, boundary):
        self.text, self.made, self.boundary, self.tokens = text, made, boundary, deque(TOKEN.findall(text))

    def fail(self):
        place = len(self.text) - len("".join(self.tokens))
        raise BadPattern(f"{self.text!r} is no regular expression of NL-RX's dialect: look before character {place + 1}")

    def take(self, wanted):
        return bool(self.tokens) and self.tokens[0] == wanted and bool(self.tokens.popleft())

    def whole(self):
        found = self.series(0) if self.tokens.count("(") == self.tokens.count(")") else self.fail()
        return self.fail() if self.tokens else found

    def series(self, level):
        """Level 0 is a|b, of level 1, a&b, of level 2, ab, of pieces."""
        if level < 2:
            parts = [self.series(level + 1)]
            while self.take("|&"[level]):
                parts.append(self.series(level + 1))
            return self.made.join(("or", "and")[level], parts)
        parts = [self.piece()]
        while self.tokens and self.tokens[0] not in "|&)":
            parts.append(self.piece())
        return self.made.then(parts)

    def piece(self):
        complements = 0
        while self.take("~"):
            complements += 1
        token = self.tokens.popleft() if self.tokens else self.fail()
        if token == "(":
            found = self.made.empty if self.tokens and self.tokens[0] == ")" else self.series(0)
            found = found if self.take(")") else self.fail()
        elif token in "|&*+?{}[]^$)" or token[0] == "{":
            self.fail()
        else:
            edge = token == "\\b" and self.boundary == "word"
            found = self.made.any if token == "." else self.made.make("edge") if edge else self.made.make("set", self.bits(token))
        found = self.made.refuse(found) if complements % 2 else found
        while self.tokens and (self.tokens[0] in "*+?" or self.tokens[0][0] == "{" and len(self.tokens[0]) > 1):
            token = self.tokens.popleft()
            low, comma, high = {"*": "0,", "+": "1,", "?": "0,1"}.get(token, token[1:-1]).partition(",")
            high = int(high) if high else None if comma else int(low)
            found = self.made.many(found, int(low), high) if high is None or int(low) <= high else self.fail()
        return found

    def bits(self, token):
        """Of x, of \\x and of [...]. \\ before a sign is that sign, before d w s D W S a class; as "letter" before any the character."""
        if len(token) > 2:
            negated, found = token[1] == "^", 0
            for low, high in MEMBER.findall(token[1 + negated:-1]):
                ends = self.bits(low), self.bits(high or low)
                if high and (low[-1] > high[-1] or max(each.bit_count() for each in ends) > 1):
                    self.fail()                                          # it runs backwards, or has no end
                found |= self.made.bits(range(ord(low[-1]), ord(high[-1]) + 1)) if high else ends[0]
        elif len(token) == 1 or self.boundary == "letter" or not (token[1].isascii() and token[1].isalnum()):
            return self.made.bits([ord(token[-1])]) if token != "\\" else self.fail()
        else:
            negated, members = token[1].isupper(), ESCAPES.get(token[1].lower()) or self.fail()
            found = self.made.bits(map(ord, members))
        return self.made.made[self.made.any][1] ^ found if negated else found


def regex_difference(a, b, boundary="word", limit=300_000):
    """A line that exactly one of two regular expressions matches whole, or None: they denote the same language. All pairs of what is
    left of the two after some text are walked, those known to be equal joined [Hopcroft & Karp 1971].

    The alphabet is every character (a line holds no line break, so . is any), and ~ is relative to all lines. `boundary` is what \\b
    is. "word": the edge of a word of [0-9A-Za-z_], of no width, as the English of NL-RX and Python's re have it. "letter": a plain b, as
    dk.brics.automaton reads it, for which a backslash makes any character literal. Raises BadPattern; TooLarge beyond `limit`, a bound
    on the size of all expressions met, and so on time and memory."""
    if boundary not in ("word", "letter"):
        raise ValueError(f'boundary {boundary!r} is not "word" or "letter"')
    try:
        made = Derivatives((a, b), limit)
        x, y = (Parser(text, made, boundary).whole() for text in (a, b))
        letters, edges, leader, queue = made.letters(), ("edge",) in made.number, {}, deque([(x, y, False, "")])
        while queue:
            x, y, before, line = queue.popleft()
            if made.stands(x, before, False) != made.stands(y, before, False):
                return line
            ends = [(x, before), (y, before)]
            for i in (0, 1):
                while ends[i] in leader:
                    ends[i] = leader[ends[i]]
            if ends[0] != ends[1]:
                leader[ends[0]] = ends[1]
                for place in letters:
                    word = edges and bool(made.words >> place & 1)
                    queue.append((made.after(x, place, before), made.after(y, place, before), word, line + chr(made.alphabet[place])))
    except RecursionError:
        raise TooLarge(f"{a[:40]!r} and {b[:40]!r} are nested too deep") from None
    return None


def regex_equal(generated, gold, boundary="word", limit=300_000):
    """Do two regular expressions denote the same language? [Locascio et al. 2016, sec. 4]; LLM-JEPA, paper and code, asks for equal
    strings. Equal strings are equal even if they cannot be read; otherwise what cannot be read is wrong. Every two that match no line are
    equal, whatever their authors meant: see regex_vacuous. Raises TooLarge; the rest as in regex_difference."""
    generated, gold = generated.strip(), gold.strip()
    if not generated or generated == gold:
        return bool(generated)
    try:
        return regex_difference(generated, gold, boundary, limit) is None
    except BadPattern:
        return False


def regex_vacuous(gold, boundary="word"):
    """Does it match no line at all, or every line? One NL-RX target in five does, say a digit & the word dog: an equal language proves little there."""
    return any(regex_difference(gold, other, boundary) is None for other in ("~(.*)", ".*"))


# ---------------------------------------------------------------------------------------------------------------------
# GSM8K, NQ-Open, labels

NUMBER = re.compile(r"####[ \t]*([-+\u2212]?)[ \t]*(?:US)?[$\u20ac\u00a3\u00a5\u20b9]?[ \t]*([-+\u2212]?)([0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
GOES_ON = re.compile(r"[ \t]*[-+*/^:][ \t$]*[0-9]|[eE][-+]?[0-9]|[.,]?[0-9]")


def gsm8k_answer(text):
    """The number after the first ####, as digits: "#### $-1,080.50." -> "-1080.5"; None if there is none. Commas, currency and what
    follows it (a dot, a unit, the next question of a model that did not stop) do not count; an expression (#### 7/2) is no number.
    [Cobbe et al. 2021: the first "#### " and the number behind it, without commas]"""
    found = NUMBER.search(text)
    if not found or text[:found.start()].count("####") or GOES_ON.match(text, found.end()):
        return None
    whole, _, rest = found[3].replace(",", "").partition(".")
    digits = (whole.lstrip("0") or "0") + ("." + rest.rstrip("0")).rstrip(".")
    return "-" + digits if digits != "0" and (found[1] + found[2]).strip("+") else digits


def gsm8k_correct(generated, gold, released=False):
    """Is the final number that of the gold solution? `released` [LLM-JEPA's code]: the rest of the last line, after a line break and
    "#### ", is the same text: "1,080" is not "1080", a final dot counts, and two texts without an answer agree."""
    if released:
        found, wanted = (re.search(r"\n#### (.+)$", text) for text in (generated.strip(), gold))
        return (found and found[1]) == (wanted and wanted[1])
    answer = gsm8k_answer(gold)
    if answer is None:
        raise BadInput(f"gold {gold[-60:]!r} does not end in #### and a number: is this GSM8K?")
    return gsm8k_answer(generated) == answer


def nq_correct(generated, answers, released=False):
    """Is any gold answer a substring of what was generated [LLM-JEPA, sec. 5.1; Lee et al. 2019]? Case and signs count. `answers`: texts,
    or one text as in the data, "a; b". `released` [LLM-JEPA's code]: any "; "-piece of what was generated is a substring of the
    gold text: nothing at all, or a single letter of it, is right."""
    joined = answers if isinstance(answers, str) else "; ".join(answers)
    answers = [answer.strip() for answer in (answers.split("; ") if isinstance(answers, str) else answers) if answer.strip()]
    if not answers:
        raise BadInput(f"gold {joined!r} holds no answer: leave such rows out")
    return any(part in joined for part in generated.strip().split("; ")) if released else any(answer in generated for answer in answers)


def label_prefix(generated, label, labels=()):
    """Does the text begin with this label (Good, Very Bad, ...), as a word of its own? Of all `labels` the longest that it begins with
    counts, where one is the beginning of another (Good, Good enough). Case counts. [LLM-JEPA, sec. A.7: startswith, here by words]"""
    text = generated.strip()
    begins = lambda name: text.startswith(name) and not re.match(r"\w", text[len(name):])
    if not label.strip() or labels and label not in labels:
        raise BadInput(f"label {label!r} is empty or none of {', '.join(labels)}: give the labels of the data")
    return begins(label.strip()) and not any(len(name) > len(label) and begins(name) for name in labels)


# ---------------------------------------------------------------------------------------------------------------------
# Spider: SQL is judged by what it returns

SQL_PARTS = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?(?:\*/|$)|\w+|\S""", re.S)
READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
SQL_ERRORS = sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError


class BadQuery(ValueError):
    """This SQL returns nothing that could be compared: it fails, is refused, or takes too long."""


def run_query(query, database, timeout=30.0, most=100_000):
    """The rows of one SELECT on a SQLite file: a list of tuples. The file is opened read-only, nothing but reading is authorised (no
    ATTACH, PRAGMA, extension or second statement), and a query is refused after `timeout` seconds, `most` rows, or a value of 10 MB (where
    Python is 3.11 or newer). Text that is not UTF-8 keeps its bytes. Raises BadQuery; BadInput if there is no such file."""
    path, deadline = Path(database), time.monotonic() + timeout
    if not path.is_file():
        raise BadInput(f"there is no database {path}: unpack the databases of the data set, one DB/DB.sqlite each")
    with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None)) as connection:
        connection.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
        connection.execute("PRAGMA query_only = 1")
        if hasattr(connection, "setlimit"):
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 10_000_000)
        connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in READS else sqlite3.SQLITE_DENY)
        connection.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        try:
            cursor = connection.execute(query)
            rows = cursor.fetchmany(most + 1)
        except SQL_ERRORS as error:
            raise BadQuery(f"{query[:80]!r} fails: {error}") from None
    if cursor.description is None or len(rows) > most:
        raise BadQuery(f"{query[:80]!r} returns {'no table' if len(rows) <= most else f'more than {most} rows'}")
    return rows


def ordered(query):
    """Has the outermost SELECT an ORDER BY? One inside of brackets, a string or a comment is not it."""
    depth, before = 0, ""
    for part in (part for part in SQL_PARTS.findall(query) if not part.startswith(("--", "/*"))):
        depth += (part == "(") - (part == ")")
        if (before, part.lower()) == ("order", "by"):
            return True
        before = part.lower() if depth == 0 else ""
    return False


def printed(query, database, timeout):
    """What sqlite3's command line would print: all statements up to the first that fails, NULL as nothing, 15 digits."""
    def cell(value):
        if isinstance(value, float):
            mantissa, *power = f"{value:.15g}".replace("inf", "Inf").split("e")
            return "e".join([mantissa + ".0" * ("." not in mantissa and "I" not in mantissa), *power])
        return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else "" if value is None else str(value)

    text, statements = "", [""]
    for piece in query.split(";")[:-1]:                                  # a ; inside of a string does not complete a statement
        statements[-1] += piece + ";"
        statements += [""] * sqlite3.complete_statement(statements[-1])
    statements[-1] += query.split(";")[-1]
    with contextlib.suppress(BadQuery):
        for statement in filter(str.strip, statements):
            text += "".join("|".join(map(cell, row)) + "\n" for row in run_query(statement, database, timeout))
    return text


def same_result(query, gold, database, timeout=30.0, released=False):
    """Do two queries return the same on this SQLite file [LLM-JEPA, sec. 4.1: exact match of the execution result]? The same rows as often, in
    any order unless the outermost gold SELECT has an ORDER BY; columns in order, their names do not count. Numbers agree to 12 digits
    (1 is 1.0), text is compared as it is ('1' is not 1), NULL is NULL. A query that fails is wrong, even where gold returns no
    rows. Raises BadInput if the gold query fails, BadQuery never. `released` [LLM-JEPA's code]: what the command line prints is the same text, in order;
    what fails prints nothing, and text that is not UTF-8 is wrong. Still no write is carried out, and time is limited."""
    if released:
        found, wanted = printed(query, database, timeout), printed(gold, database, timeout)
        return found == wanted and not any("\udc80" <= sign <= "\udcff" for sign in found)
    try:
        wanted = run_query(gold, database, timeout)
    except BadQuery as error:
        raise BadInput(f"the gold query cannot be used on {database}: {error}") from None
    try:
        found = run_query(query, database, timeout)
    except BadQuery:
        return False
    plain = lambda value: float(f"{value:.12g}") if isinstance(value, float) else value
    found, wanted = ([tuple(map(plain, row)) for row in rows] for rows in (found, wanted))
    return found == wanted if ordered(gold) else Counter(found) == Counter(wanted)


# ---------------------------------------------------------------------------------------------------------------------
# Multiple choice: which answer does the model find likely?


class Likelihood(NamedTuple):
    sums: list[float]   # log p of each option, nats
    means: list[float]  # the same per token
    cut: int            # tokens of the prompt that had no room


def option_likelihoods(model, tokenizer, prompts, options, headers=None, stop=True, tokens_per_batch=8192, keep=None):
    """log p(option | prompt) of a causal model: N prompts, N lists of options -> N Likelihoods. The row is that of evaluate.answer,
    [CLS] (header [SEP]) prompt [SEP] option [SEP]: the prompt once and every option a branch that shares it, as many questions in one packed
    forward as `tokens_per_batch` allows. With `stop` the final [SEP] is part of the answer, so that an option does not win for being the
    beginning of another; without, as lm-evaluation-harness has it. A prompt without room loses its first tokens, never its end nor
    the header; with `keep` the row is its first so many tokens. Raises BadInput if nothing fits, ValueError in training mode."""
    if any(module.training for module in model.modules()):
        raise ValueError("the model is in training mode, where dropout makes the scores random: call model.eval() first")
    if not model.config.causal:
        raise BadInput("likelihoods of answers need a causal model (objectives ntp, llm-jepa), this one reads both ways")
    if not len(prompts) == len(options) == len(prompts if headers is None else headers) or not all(options):
        raise ValueError(f"{len(prompts)} prompts, {len(options)} lists of options: as many of each, and of headers; no empty list")
    mark, longest, made, batch, tokens = data.special(tokenizer), model.config.max_length, [], [], 0
    user, behind = list(mark.chat.user), [*mark.chat.end, *mark.chat.assistant]
    heads = [user] * len(prompts)
    if headers is not None:
        heads = [[*mark.chat.system, *ids.tolist(), *mark.chat.end, *user] for ids in data.encode(tokenizer, list(headers))]
    for head, ids, texts in zip(heads, data.encode(tokenizer, list(prompts)), options):
        branches = [ids.tolist() + [mark.sep] * stop for ids in data.encode(tokenizer, list(texts))]
        if not all(branches):
            raise ValueError(f"an option of {texts} is empty: without the stop token it has no likelihood")
        row, room = [mark.cls, *head, *ids.tolist(), *behind], longest + 1 - max(map(len, branches))
        if room < len(head) + 1 + len(behind):
            raise BadInput(f"{texts} and the header leave no room for a prompt in the model's {longest} tokens: leave such rows out")
        cut = max(0, len(row) - min(room, keep or room))
        row = row[:len(row) - cut] if keep else row[:1 + len(head)] + row[1 + len(head) + cut:]
        size = len(row) + sum(len(branch) - 1 for branch in branches)
        if batch and tokens + size > tokens_per_batch:
            made, batch, tokens = made + score_branches(model, batch), [], 0
        batch, tokens = [*batch, (row, branches, cut)], tokens + size
    return made + (score_branches(model, batch) if batch else [])


@torch.no_grad()
def score_branches(model, questions):
    """One forward for [(row, branches, cut)]. A token is predicted where the one before it is: the first of a branch at the end of the row."""
    rows, where, targets, start = [], [], [], 0
    for row, branches, _ in questions:
        rows.append([View(row, True)] + [View(branch[:-1], True, (0, len(row))) for branch in branches if len(branch) > 1])
        end = start + len(row)
        for branch in branches:
            where += [start + len(row) - 1, *range(end, end + len(branch) - 1)]
            targets += branch
            end += len(branch) - 1
        start = end
    device = next(model.parameters()).device
    states = model(Packed.views(rows).to(device))[torch.tensor(where, device=device)]          # (N, D): of the scored positions
    losses = []
    for part, wanted in zip(states.split(512), torch.tensor(targets, device=device).split(512)):
        logits = model.logits(part)                                      # (512, V)
        losses.append(F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), wanted, reduction="none"))
    losses, made = torch.cat(losses), []
    if losses.isnan().any():
        raise BadInput("the model gives NaN for the likelihood of an answer: its training has diverged")
    losses = iter(losses.tolist())
    for _, branches, cut in questions:
        sums = [-sum(next(losses) for _ in branch) for branch in branches]
        made.append(Likelihood(sums, [total / len(branch) for total, branch in zip(sums, branches)], cut))
    return made


def letter_choices(model, tokenizer, prompts, letters="ABCD", headers=None, released=False):
    """The likeliest of the option letters after each prompt -> [(letter, tokens of the prompt cut)]. [LLM-JEPA, sec. 5.1] A letter is one
    token, or as many for each. `released` [LLM-JEPA's code]: the row ends after 128 tokens, and the options with it."""
    if len({len(ids) for ids in data.encode(tokenizer, list(letters))}) != 1:
        raise BadInput(f"letters {', '.join(letters)} are not equally many tokens: choose others, or compare whole options")
    found = option_likelihoods(model, tokenizer, prompts, [list(letters)] * len(prompts), headers, stop=False, keep=128 if released else None)
    return [(letters[each.sums.index(max(each.sums))], each.cut) for each in found]


# ---------------------------------------------------------------------------------------------------------------------
# Extractive question answering

ARTICLES = {"en": r"\b(a|an|the)\b", "es": r"\b(un|una|unos|unas|el|la|los|las)\b", "vi": r"\b(của|là|cái|chiếc|những)\b",
            "de": r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b", "ar": r"\sال^|ال"}
SEGMENTED = {"zh": "\u4e00-\u9fa5", "ja": "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff", "th": "\u0e00-\u0e7f"}
LANGUAGES = (*ARTICLES, *SEGMENTED, "hi", "el", "ro", "ru", "tr", "bn", "fi", "id", "ko", "sw", "te")        # of MLQA, XQuAD, TyDi QA
RULES = ("mlqa", "squad", "released")


def normalise_answer(text, language="en", rules="mlqa"):
    """Lower case, no punctuation, no articles, single spaces. Three sets of rules:
    "mlqa" [Lewis et al. 2020, mlqa_evaluation_v1]: punctuation of all of Unicode; the articles of the language of the ANSWER, that is of the
    context (in Arabic every "ال", inside of words too, as in the official program); Chinese characters are words. Japanese and
    Thai, which MLQA does not have, are cut likewise here, and the others of XQuAD and TyDi QA lose no articles.
    "squad" [Rajpurkar et al. 2016]: ASCII punctuation, English articles, whatever the language.
    "released" [BERT-JEPA's code]: ASCII punctuation, English articles if the language, there of the QUESTION, is English; no characters.
    Raises ValueError for a language or rules that are unknown: Chinese under another name would pass for words."""
    if language not in LANGUAGES or rules not in RULES:
        raise ValueError(f"language {language!r} with rules {rules!r}: choose from {', '.join(LANGUAGES)} and {', '.join(RULES)}")
    signs = set(string.punctuation)
    text = "".join(sign for sign in text.lower() if sign not in signs and not (rules == "mlqa" and unicodedata.category(sign)[0] == "P"))
    articles = ARTICLES.get(language) if rules == "mlqa" else ARTICLES["en"] if rules == "squad" or language == "en" else None
    text = re.sub(articles, " ", text) if articles else text
    if rules == "mlqa" and language in SEGMENTED:
        text = re.sub(f"([{SEGMENTED[language]}])", r" \1 ", text)
    return " ".join(text.split())


def best(score, prediction, golds, language, rules):
    """The best score against any gold answer; 0 for a blank prediction."""
    if isinstance(golds, str) or not golds:
        raise ValueError(f"golds {golds!r} must be a list of at least one answer")
    texts = [normalise_answer(gold, language, rules) for gold in golds]
    return max(score(normalise_answer(prediction, language, rules), gold) for gold in texts) if prediction.strip() else score("", " ")


def qa_exact(prediction, golds, language="en", rules="mlqa"):
    """Is the normalised answer that of any gold [Rajpurkar et al. 2016]? See normalise_answer."""
    return best(lambda found, gold: found == gold, prediction, golds, language, rules)


def qa_f1(prediction, golds, language="en", rules="mlqa"):
    """The harmonic mean of precision and recall over normalised words, as often as they occur, best of the golds: 0..1."""
    def score(found, gold):
        found, gold = found.split(), gold.split()
        same = sum((Counter(found) & Counter(gold)).values())
        return 2 * same / (len(found) + len(gold)) if same else 0.0      # = 2 P R / (P + R)
    return best(score, prediction, golds, language, rules)
