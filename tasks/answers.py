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

from sklearn.feature_extraction.text import CountVectorizer
from sklearn.preprocessing import normalize

from base.common import BadInput, shown, warn
from base.metrics import exact, percent, starts_with
from evaluate import NotApplicable, map_batches, need_answers
from harness.generation import prompt_rows

# ---- GSM8K, NQ-Open, labels

NUMBER = re.compile(r" *(-?\d*\.?\d+)(?!\.?\d| *[-+*/^] *\d)")  # not the 7 of 7/2


def gsm8k_answer(text):
    """Return the number after the first ####, 1080.5 of "#### $1,080.50.". None if there is none,
    or arithmetic that follows at once, such as 7/2. [Cobbe et al. 2021]"""
    found = NUMBER.match(re.sub("[$,]", "", text.partition("####")[2]))
    return float(found[1]) if found else None


def gsm8k_correct(generated, gold, released=False):
    """Is the number after #### that of the gold solution? released: compare the rest of the last
    line instead, after "\\n#### "; two texts without such a line agree. [LLM-JEPA's code]"""
    if released:
        found, wanted = (re.search(r"\n#### (.+)$", text) for text in (generated.strip(), gold))
        return (found and found[1]) == (wanted and wanted[1])
    answer = gsm8k_answer(gold)
    if answer is None:
        raise BadInput(f"the gold text {shown(gold[-60:])!r} does not end in #### and a number")
    return gsm8k_answer(generated) == answer


def nq_correct(generated, gold, released=False):
    """Is one of the gold answers "a; b" a substring of the generated text [LLM-JEPA, sec. 5.1]?
    released: is one of the "; "-separated pieces of the generated text a substring of gold?"""
    if released:
        return any(part in gold for part in generated.strip().split("; "))
    return any(answer.strip() in generated for answer in gold.split("; ") if answer.strip())


def label_correct(generated, gold):
    """Does the generated text begin with the label, in whole words? [LLM-JEPA, sec. 4.1; whole
    words are our choice]"""
    return bool(re.match(re.escape(gold.strip()) + r"(?!\w)", generated.strip()))


# ---- Spider: SQL is judged by what it returns

READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION,
         sqlite3.SQLITE_RECURSIVE}
STEPS = 20_000_000   # of SQLite's virtual machine, for one query
HEAP = 500_000_000   # bytes that SQLite may use
LENGTH = 1_000_000   # of a text
PATTERN = 1000       # of LIKE: a longer one can take half a minute in a single step


def query_result(query, database, in_order):
    """Run one SELECT on a SQLite file and return hashes of its rows, in order or sorted; None if it
    fails, needs too much, or would do anything but read, or if there is no file."""
    if not database.is_file():
        return None
    # immutable: SQLite neither locks the file nor puts another one beside it.
    address = f"{database.resolve().as_uri()}?mode=ro&immutable=1"
    calls = itertools.count(1)
    with contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
        connection.text_factory = partial(bytes.decode, errors="surrogateescape")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute(f"PRAGMA hard_heap_limit = {HEAP}")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LENGTH)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, PATTERN)
        # fts3_tokenizer takes an address in memory.
        connection.set_authorizer(lambda action, _, name, *rest: (
            sqlite3.SQLITE_OK if action in READS and name != "fts3_tokenizer"
            else sqlite3.SQLITE_DENY))
        connection.set_progress_handler(lambda: next(calls) > STEPS // 10_000, 10_000)
        try:
            cursor = connection.execute(query)
            rows = [hashlib.sha256(repr([*map(rounded, row)]).encode()).digest() for row in cursor]
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError):
            return None
    if cursor.description is None:
        return None
    return rows if in_order else sorted(rows)


def rounded(value):
    if not isinstance(value, float):
        return value
    value = float(f"{value:.12g}")  # sums differ in their last digits
    return int(value) if value.is_integer() else value  # 10.0 is 10


def same_result(query, gold, database):
    """Do two queries return the same rows, in any order unless gold has an ORDER BY, as in Spider's
    own evaluation? None if gold fails. [LLM-JEPA, sec. 4.1]"""
    in_order = "order by" in gold.lower()
    wanted = query_result(gold, database, in_order)
    return None if wanted is None else query_result(query, database, in_order) == wanted


# ---- judges: (evaluate.Answers, flags) -> {metric: N times True, False, or None for a row that is
# left out}


def judge_pairs(rules, answers, flags):
    """Judge by {metric: function of the written and the gold text}."""
    return {metric: [*map(rule, answers.written, answers.golds)] for metric, rule in rules.items()}


def databases(flags):
    """Return the folder of Spider's databases, NAME/NAME.sqlite."""
    return Path(flags.files).expanduser() / "database"


def judge_spider(answers, flags):
    """Judge by `same_result`."""
    folder = databases(flags)
    right = []
    for prompt, *pair in zip(answers.prompts, answers.written, answers.golds):
        found = re.match(r"\s*For db_id:\[([\w-]+)\]", prompt)
        name = found[1] if found else ""
        right.append(same_result(*pair, folder / name / f"{name}.sqlite"))
    if count := right.count(None):
        warn(f"spider leaves out {count} rows: the prompt does not begin with For db_id:[NAME], or "
             f"there is no {folder}/NAME/NAME.sqlite, or the gold query fails")
    return {"result": right}


JUDGES = {
    "generate": partial(judge_pairs, {"exact": exact, "startswith": starts_with}),
    "gsm8k": partial(judge_pairs, {"number": gsm8k_correct,
                                   "released": partial(gsm8k_correct, released=True)}),
    "nq": partial(judge_pairs, {"substring": nq_correct,
                                "released": partial(nq_correct, released=True)}),
    "label": partial(judge_pairs, {"accuracy": label_correct}), "spider": judge_spider}


def answer_task(name, evaluation, flags):
    """Let a causal model answer the prompts, and return the percentage of True for each metric; for
    the first one also on the rows whose gold text is not among the texts that the model was trained
    on (_unseen)."""
    answers = evaluation.answers
    judged = JUDGES[name](answers, flags)
    counts = {"stop": percent(answers.stopped), "rows": len(answers.golds)}
    if flags.train_rows is not None:
        first = next(iter(judged))
        seen = {text.strip() for row in flags.train_rows for text in row if text}
        judged[f"{first}_unseen"] = [one for one, gold in zip(judged[first], answers.golds)
                                     if gold.strip() not in seen]
        counts["rows_unseen"] = len(judged[f"{first}_unseen"])
    kept = {metric: [one for one in decisions if one is not None]
            for metric, decisions in judged.items()}
    if not kept[next(iter(judged))]:
        raise BadInput(f"{name} left out all rows, so there is no result")
    return {metric: percent(decisions) for metric, decisions in kept.items() if decisions} | counts


# ---- what needs no model


def nearest_texts(queries, texts):
    """Return for each query (M,) the number of the text (N,) that shares most words with it: by the
    cosine of their word counts, the first of equal ones."""
    counter = CountVectorizer(token_pattern=r"\w+|[^\w\s]")
    known = normalize(counter.fit_transform(texts))  # (N, words), sparse
    similar = normalize(counter.transform(queries)) @ known.T  # (M, N)
    return [int(row.toarray().round(9).argmax()) for row in similar]


def baselines(evaluation, flags):
    """Answer without a model: always by the most frequent answer of the training rows, and by the
    answer of the training row whose Text is nearest by words. Return the exact match of both."""
    need_answers(evaluation, "baselines")
    rows = [row for row in flags.train_rows or () if all(row)]
    if not rows:
        raise NotApplicable("baselines needs the training data of the run, which is not there")
    prompts, golds = evaluation.texts.values()
    texts, known = zip(*(row[:2] for row in rows))
    frequent = Counter(known).most_common(1)[0][0]
    written = {"frequent": [frequent] * len(golds),
               "nearest": [known[number] for number in nearest_texts(prompts, texts)]}
    return {"rows": len(golds)} | {f"{name}/exact": percent(list(map(exact, answers, golds)))
                                   for name, answers in written.items()}


# ---- HellaSwag

LETTERS = "ABCD"
OPTION = re.compile(rf"\n([{LETTERS}])\) ")  # how the line of an ending begins


def hellaswag_letter(evaluation):
    """Return the percentage of prompts after which the right letter is the most likely of four.
    [LLM-JEPA, sec. 5.1. Its code truncates prompts to 128 tokens, and so loses many endings.]"""
    need_answers(evaluation, "hellaswag-letter")
    prompts, golds = evaluation.texts.values()
    for prompt, gold in zip(prompts, golds):
        if "".join(OPTION.findall(prompt)) != LETTERS or gold.strip() not in [*LETTERS]:
            raise NotApplicable("hellaswag-letter needs prompts with the lines A) to D), and a "
                                f"letter as answer, unlike {shown(prompt)!r} and {shown(gold)!r}")
    model = evaluation.model
    tokenizer = evaluation.rows.tokenizer
    rows = prompt_rows(tokenizer, prompts, model.config.longest_row, evaluation.rows.openings())
    letters = [ids[-1] for ids in tokenizer.encode(LETTERS)]

    logits = map_batches(model, rows, lambda packed: (
        model.logits(model.embeddings(packed, "last"))[:, letters].cpu()))  # (4,) each
    return {"rows": len(golds), "accuracy": percent([
        LETTERS[int(each.argmax())] == gold.strip() for each, gold in zip(logits, golds)])}
