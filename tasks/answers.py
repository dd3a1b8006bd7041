"""Judge the answers of a causal model by the rules of the papers.

Where the released code has a different rule than the paper, `released=True` follows the code, and
only there an empty answer can be right.
"""

import contextlib
import hashlib
import itertools
import re
import sqlite3
from collections import Counter
from functools import partial
from pathlib import Path

from common import BadInput, shown
from data import tokenize_rows
from evaluate import NotApplicable, exact, map_batches, percent, starts_with

# ---- GSM8K, NQ-Open, labels

CURRENCY = "[ \t]*(?:US)?[$\u20ac\u00a3\u00a5\u20b9]?[ \t]*"
SIGN = "([-+\u2212]?)"
NUMBER = re.compile(rf"####[ \t]*{SIGN}{CURRENCY}{SIGN}([0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
GOES_ON = re.compile(r"[ \t]*[-+*/^:][ \t$]*[0-9]|[eE][-+]?[0-9]|[.,]?[0-9]")


def gsm8k_answer(text):
    """Return the number after ####: "#### $-1,080.50." -> "-1080.5". None if there is no number, or
    an expression such as 7/2. [Cobbe et al. 2021]"""
    found = NUMBER.search(text)
    if not found or "####" in text[:found.start()] or GOES_ON.match(text, found.end()):
        return None
    whole, _, rest = found[3].replace(",", "").partition(".")
    digits = (whole.lstrip("0") or "0") + ("." + rest.rstrip("0")).rstrip(".")
    negative = (found[1] + found[2]).strip("+") and digits != "0"
    return f"-{digits}" if negative else digits


def gsm8k_correct(generated, gold, released=False):
    """Is the number after #### that of the gold solution? released: compare the rest of the last
    line instead, after "\\n#### "; two texts without such a line agree. [LLM-JEPA's code]"""
    if released:
        found, wanted = (re.search(r"\n#### (.+)$", text) for text in (generated.strip(), gold))
        return (found and found[1]) == (wanted and wanted[1])
    answer = gsm8k_answer(gold)
    if answer is None:
        raise BadInput(f"gold {shown(gold[-60:])!r} does not end in #### and a number, as the "
                       "solutions of GSM8K do")
    return gsm8k_answer(generated) == answer


def nq_correct(generated, gold, released=False):
    """Is one of the gold answers "a; b" a substring of the generated text [LLM-JEPA, sec. 5.1]?
    released: is one of the "; "-separated pieces of the generated text a substring of gold?"""
    answers = [answer.strip() for answer in gold.split("; ") if answer.strip()]
    if not answers:
        raise BadInput(f"gold {shown(gold)!r} has no answer: remove such rows")
    if released:
        return any(part in gold for part in generated.strip().split("; "))
    return any(answer in generated for answer in answers)


def label_prefix(generated, label, labels):
    """Is this the longest of the labels (Good, Good enough, ...) that the text begins with, in
    whole words? [LLM-JEPA, sec. A.7: startswith]"""
    longest = sorted(map(re.escape, labels), key=len, reverse=True)
    found = re.match(rf"({'|'.join(longest)})(?!\w)", generated.strip())
    return bool(found) and found[1] == label


# ---- Spider: SQL is judged by what it returns

READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION,
         sqlite3.SQLITE_RECURSIVE}
STEPS = 20_000_000   # of SQLite's virtual machine, for one query
ROWS = 100_000       # that a query may return
HEAP = 500_000_000   # bytes that SQLite may use


def allow_reading(action, *_):
    return sqlite3.SQLITE_OK if action in READS else sqlite3.SQLITE_DENY


def query_result(query, database, in_order):
    """Run one SELECT on a SQLite file and return a hash of its rows, in order or in any order; None
    if it fails, needs too much, or would do anything but read. Numbers count to 12 digits."""
    address = f"{Path(database).resolve().as_uri()}?mode=ro"
    calls = itertools.count(1)
    with contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
        connection.text_factory = partial(bytes.decode, errors="surrogateescape")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute(f"PRAGMA hard_heap_limit = {HEAP}")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1_000_000)
        connection.set_authorizer(allow_reading)
        connection.set_progress_handler(lambda: next(calls) > STEPS // 10_000, 10_000)
        try:
            cursor = connection.execute(query)
            rows = [hashlib.sha256(repr(tuple(map(rounded, row))).encode()).digest()
                    for row in itertools.islice(cursor, ROWS + 1)]
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError):
            return None
    if cursor.description is None or len(rows) > ROWS:
        return None
    return hashlib.sha256(b"".join(rows if in_order else sorted(rows))).hexdigest()


def rounded(value):
    if not isinstance(value, float):
        return value
    value = float(f"{value:.12g}")
    return int(value) if value.is_integer() else value  # 10.0 is 10


def same_result(query, gold, database):
    """Do two queries return the same rows, in any order unless gold has an ORDER BY, as in Spider's
    own evaluation? None if gold fails or if there is no file. [LLM-JEPA, sec. 4.1]"""
    if not Path(database).is_file():
        return None
    in_order = "order by" in gold.lower()
    wanted = query_result(gold, database, in_order)
    return wanted and query_result(query, database, in_order) == wanted


def database_of(prompt):
    found = re.match(r"\s*For db_id:\[([\w-]+)\]", prompt)
    return found[1] if found else None


# ---- judges: evaluate.Answers -> {metric: N times True, False, or None for a row that is left out}


def judge_pairs(is_correct, metric, answers, options):
    """Judge by a rule of the paper, `metric`, and by that of the released code."""
    pairs = list(zip(answers.written, answers.golds))
    return {metric: [is_correct(*pair) for pair in pairs],
            "released": [is_correct(*pair, released=True) for pair in pairs]}


def judge_texts(answers, options):
    """Judge like evaluate.task_generate."""
    pairs = list(zip(answers.written, answers.golds))
    return {"exact": [exact(*pair) for pair in pairs],
            "startswith": [starts_with(*pair) for pair in pairs]}


def judge_label(answers, options):
    """Judge by `label_prefix`; the labels are those among the gold texts."""
    golds = [gold.strip() for gold in answers.golds]
    majority, _ = Counter(golds).most_common(1)[0]
    right = [label_prefix(written, gold, set(golds))
             for written, gold in zip(answers.written, golds)]
    return {"accuracy": right, "majority": [gold == majority for gold in golds]}


def judge_spider(answers, options):
    """Judge by `same_result`. Rows without a database, or whose gold query fails, are left out."""
    folder = Path(options.files).expanduser() / "database"
    if not folder.is_dir():
        raise BadInput(f"spider needs the folder {folder} of databases (tasks/README.md says how "
                       "to get it)")
    flags = []
    for prompt, *pair in zip(answers.prompts, answers.written, answers.golds):
        name = database_of(prompt)
        if not name:
            raise BadInput("spider reads the database from prompts that begin with For db_id:"
                           f"[NAME], and here is {shown(prompt[:40])!r}: choose other rows")
        flags.append(same_result(*pair, folder / name / f"{name}.sqlite"))
    return {"result": flags}


JUDGES = {"generate": judge_texts, "label": judge_label, "spider": judge_spider,
          "gsm8k": partial(judge_pairs, gsm8k_correct, "number"),
          "nq": partial(judge_pairs, nq_correct, "substring")}


def answer_scores(answers, judged, train_texts=None):
    """Return the percentage of True for each metric, and counts. With the texts that the model was
    trained on, also the first metric on prompts (_new_prompt) and on gold texts (_unseen) that are
    not among them."""
    kept = {metric: [flag for flag in flags if flag is not None]
            for metric, flags in judged.items()}
    scores = {metric: percent(flags) for metric, flags in kept.items() if flags}
    first = next(iter(judged))
    scores |= {"stop": percent(answers.stopped), "rows": len(answers.golds)}
    if left_out := len(answers.golds) - len(kept[first]):
        scores["rows_left_out"] = left_out
    for name, texts in (("new_prompt", answers.prompts), ("unseen", answers.golds)):
        if train_texts is None:
            continue
        new = [flag for flag, text in zip(judged[first], texts)
               if flag is not None and text.strip() not in train_texts]
        if new:
            scores[f"{first}_{name}"] = percent(new)
        scores[f"rows_{name}"] = len(new)
    return scores


def answer_task(name, evaluation, options):
    """Let a causal model answer the prompts, and judge the answers."""
    answers = evaluation.answers
    return answer_scores(answers, JUDGES[name](answers, options), options.train_texts)


# ---- HellaSwag

LETTERS = "ABCD"
OPTION = re.compile(rf"\n([{LETTERS}])\) ")  # how the line of an ending begins


def hellaswag_letter(evaluation):
    """Return the percentage of prompts after which the right letter is the most likely of four.
    [LLM-JEPA, sec. 5.1. Its code truncates prompts to 128 tokens, and so loses many endings.]"""
    if not evaluation.can_answer:
        raise NotApplicable("hellaswag-letter needs a causal model and two columns, prompt and "
                            "letter: choose them with --langs a,b")
    prompts, golds = evaluation.texts.values()
    for row, (prompt, gold) in enumerate(zip(prompts, golds), 1):
        if "".join(OPTION.findall(prompt)) != LETTERS or gold.strip() not in [*LETTERS]:
            raise NotApplicable(f"hellaswag-letter needs prompts with the lines A) to D) and a "
                                f"letter as answer, and row {row} of {evaluation.rows.name} is "
                                "different")
    model = evaluation.model
    chat = evaluation.tokenizer.special.chat
    affixes = (*chat.start, *chat.user), (*chat.end, *chat.assistant)
    longest = model.config.max_tokens or model.config.max_positions
    rows = tokenize_rows(evaluation.tokenizer, prompts, affixes, max_length=longest,
                         openings=evaluation.openings())
    letters = [ids[-1] for ids in evaluation.tokenizer.encode(LETTERS)]

    def read(packed):
        last = model(packed)[packed.cu_seqlens[1:].long() - 1]  # (R, D)
        return model.logits(last)[:, letters].cpu()             # (R, 4)

    chosen = [LETTERS[int(each.argmax())] for each in map_batches(model, rows, read)]
    right = [one == gold.strip() for one, gold in zip(chosen, golds)]
    return {"rows": len(golds), "accuracy": percent(right)}
