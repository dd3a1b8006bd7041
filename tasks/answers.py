"""Is this answer right? What a model writes or prefers, judged against gold, by the papers' rules.

Where released code judges otherwise than its paper, `released=True` does as the code does, and
only there an empty answer can be right. What cannot be judged is left out and counted.
"""

import functools
import re
import string
import unicodedata
from collections import Counter
from contextlib import closing
from pathlib import Path

from tqdm import tqdm

from corpora import download
from corpora.program import BadInput
from data import rows_of
from evaluate import finite, no_generate, percent, read_rows
from tasks.metrics import answer_scores
from tasks.sandbox import Sandbox, same_result

# ---- GSM8K, NQ-Open, labels

CURRENCY = "[ \t]*(?:US)?[$\u20ac\u00a3\u00a5\u20b9]?[ \t]*"
SIGN = "([-+\u2212]?)"
NUMBER = re.compile(rf"####[ \t]*{SIGN}{CURRENCY}{SIGN}([0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
GOES_ON = re.compile(r"[ \t]*[-+*/^:][ \t$]*[0-9]|[eE][-+]?[0-9]|[.,]?[0-9]")


def gsm8k_answer(text):
    """"#### $-1,080.50." -> "-1080.5". None if there is no number, or more than one (#### 7/2).
    [Cobbe et al. 2021]"""
    found = NUMBER.search(text)
    if not found or "####" in text[:found.start()] or GOES_ON.match(text, found.end()):
        return None
    whole, _, rest = found[3].replace(",", "").partition(".")
    digits = (whole.lstrip("0") or "0") + ("." + rest.rstrip("0")).rstrip(".")
    negative = (found[1] + found[2]).strip("+") and digits != "0"
    return f"-{digits}" if negative else digits


def gsm8k_correct(generated, gold, released=False):
    """Is the final number that of the gold solution? `released` [LLM-JEPA's code]: is the rest of
    the last line, after "\\n#### ", the same? Two texts without an answer agree."""
    if released:
        found, wanted = (re.search(r"\n#### (.+)$", text) for text in (generated.strip(), gold))
        return (found and found[1]) == (wanted and wanted[1])
    answer = gsm8k_answer(gold)
    if answer is None:
        raise BadInput(f"gold {gold[-60:]!r} does not end in #### and a number: is this GSM8K?")
    return gsm8k_answer(generated) == answer


def nq_correct(generated, gold, released=False):
    """Is one of the gold answers "a; b" a substring of what was generated [LLM-JEPA, sec. 5.1]?
    `released` [its code]: is a "; "-piece of what was generated, even "", a substring of gold?"""
    answers = [answer.strip() for answer in gold.split("; ") if answer.strip()]
    if not answers:
        raise BadInput(f"gold {gold!r} holds no answer: leave such rows out")
    if released:
        return any(part in gold for part in generated.strip().split("; "))
    return any(answer in generated for answer in answers)


def label_prefix(generated, label, labels):
    """Is this the longest of the labels (Good, Good enough, ...) that the text begins with, as a
    word of its own? [LLM-JEPA, sec. A.7: startswith, here by words]"""
    longest = sorted(map(re.escape, labels), key=len, reverse=True)
    found = re.match(rf"({'|'.join(longest)})(?!\w)", generated.strip())
    return bool(found) and found[1] == label


# ---- extractive question answering

ARTICLES = {
    "en": r"\b(a|an|the)\b", "es": r"\b(un|una|unos|unas|el|la|los|las)\b",
    "vi": r"\b(của|là|cái|chiếc|những)\b", "ar": r"\sال^|ال",
    "de": r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b"}
SEGMENTED = {"zh": "\u4e00-\u9fa5", "ja": "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff",
             "th": "\u0e00-\u0e7f"}


def normalise_answer(text, language="en", rules="mlqa"):
    """Lower case, without punctuation and articles: "squad", ASCII and English [Rajpurkar et al.
    2016]; "mlqa", of the context's language, characters of Chinese (and here Japanese and Thai)
    are words [Lewis et al. 2020]."""
    signs = [sign for sign in text.lower() if sign not in string.punctuation]
    articles = ARTICLES["en"]
    if rules == "mlqa":
        signs = [sign for sign in signs if unicodedata.category(sign)[0] != "P"]
        articles = ARTICLES.get(language, "")
    text = re.sub(articles, " ", "".join(signs)) if articles else "".join(signs)
    if rules == "mlqa" and language in SEGMENTED:
        text = re.sub(f"([{SEGMENTED[language]}])", r" \1 ", text)
    return " ".join(text.split())


def qa_scores(prediction, golds, language="en", rules="mlqa"):
    """A prediction against the best of its golds -> {"f1": of normalised words, "exact": are they
    equal?}, 0..1; a blank prediction is wrong."""
    best = {"f1": 0.0, "exact": 0.0}
    found = normalise_answer(prediction, language, rules)
    for gold in golds if prediction.strip() else ():
        gold = normalise_answer(gold, language, rules)
        same = sum((Counter(found.split()) & Counter(gold.split())).values())
        f1 = 2 * same / max(1, len(found.split()) + len(gold.split()))  # = 2 P R / (P + R)
        best = {"f1": max(best["f1"], f1), "exact": max(best["exact"], float(found == gold))}
    return best


# ---- tasks
#
# Answers are written once. A judge takes them and the options -> {metric: True, False or None of
# each answer}, {count: number}.


def answer_task(judge, evaluation, options):
    flags, counts = judge(evaluation.answers, options)
    return answer_scores(evaluation.answers, flags, evaluation.train_texts) | counts


def judge_pairs(is_correct, metric, answers, options):
    """Judge by a rule that the paper and the released code see differently: `metric`, "released".
    """
    pairs = list(zip(answers.written, answers.golds))
    return {metric: [is_correct(*pair) for pair in pairs],
            "released": [is_correct(*pair, released=True) for pair in pairs]}, {}


def judge_label(answers, options):
    """The labels are those that occur among the gold texts."""
    golds = [gold.strip() for gold in answers.golds]
    majority, _ = Counter(golds).most_common(1)[0]
    right = [label_prefix(written, gold, set(golds))
             for written, gold in zip(answers.written, golds)]
    return {"accuracy": right, "majority": [gold == majority for gold in golds]}, {}


def judge_regex(answers, options):
    """Judge by the lines that two expressions match. The second metric leaves out gold that matches
    no line, or every line, as one NL-RX target in five does. What takes too long is undecided, and
    not equal."""
    equal = []
    vacuous = {}
    with closing(Sandbox(seconds=10)) as sandbox:
        for written, gold in with_bar("expressions", answers.written, answers.golds):
            equal.append(sandbox.ask("regex_equal", written, gold))
            if gold not in vacuous:
                vacuous[gold] = sandbox.ask("regex_vacuous", gold)
    right = [flag is True for flag in equal]
    firm = [None if vacuous[gold] else flag for flag, gold in zip(right, answers.golds)]
    counts = {"rows_vacuous": sum(vacuous[gold] is True for gold in answers.golds),
              "rows_undecided": equal.count(None)}
    return {"equal": right, "equal_not_vacuous": firm}, counts


def with_bar(name, *columns):
    # disable=None: there is no bar where stderr is a file.
    return tqdm(list(zip(*columns)), name, disable=None)


def database_of(prompt):
    found = re.match(r"\s*For db_id:\[([\w-]+)\]", prompt)
    return found[1] if found else None


def judge_spider(answers, options):
    """Rows without a database, or whose gold query fails, are left out and counted."""
    folder = Path(options.files) / "spider" / "database"
    names = list(map(database_of, answers.prompts))
    flags = []
    with closing(Sandbox(seconds=30)) as sandbox:
        for name, *pair in with_bar("queries", names, answers.written, answers.golds):
            flags.append(same_result(sandbox, *pair, folder / name / f"{name}.sqlite"))
    left_out = Counter(f"rows_left_out/{name}" for name, flag in zip(names, flags) if flag is None)
    return {"result": flags}, {"rows_left_out": left_out.total()} | dict(sorted(left_out.items()))


def no_spider(evaluation, options):
    if reason := no_generate(evaluation):
        return reason
    for prompt in next(iter(evaluation.texts.values())):
        if not database_of(prompt):
            return (f"reads the database from prompts that begin with For db_id:[NAME], and "
                    f"{evaluation.rows.name} has {prompt[:40]!r}: choose other rows")
    reason = download.missing("spider", options.files, "database")
    return f"runs queries: {reason}" if reason else ""


LETTERS = "ABCD"
OPTION = re.compile(rf"\n([{LETTERS}])\) ")  # how the line of an ending begins


def no_choice(evaluation, options=None):
    if reason := no_generate(evaluation):
        return reason
    for row, (prompt, gold) in enumerate(zip(*evaluation.texts.values()), 1):
        if "".join(OPTION.findall(prompt)) != LETTERS or gold.strip() not in [*LETTERS]:
            return (f"chooses between the lines A) to D) of a prompt, and row {row} of "
                    f"{evaluation.rows.name} is not such a question with its letter; those of "
                    "HellaSwag's own fields are --langs question,letter")
    return ""


def hellaswag_letter(evaluation, options=None):
    """Percent of the prompts after which the right one of the four letters is the likeliest.
    [LLM-JEPA, sec. 5.1. Its code cuts prompts at 128 tokens, and so loses the choices of many.]"""
    model = evaluation.model
    tokenizer = evaluation.tokenizer
    chat = tokenizer.special.chat
    prompts, golds = evaluation.texts.values()
    longest = model.config.max_tokens or model.config.max_positions
    rows = rows_of(tokenizer, prompts, chat.user, [*chat.end, *chat.assistant], evaluation.system,
                   max_length=longest)
    letters = [ids[-1] for ids in tokenizer.encode(LETTERS)]

    def read(packed):
        last = model(packed)[packed.cu_seqlens[1:].long() - 1]  # (R, D)
        return model.logits(last)[:, letters].cpu()             # (R, 4)

    chosen = [LETTERS[int(each.argmax())] for each in finite(read_rows(model, rows, read))]
    right = [one == gold.strip() for one, gold in zip(chosen, golds)]
    return {"rows": len(golds), "accuracy": percent(right)}


JUDGES = {"regex": judge_regex, "gsm8k": functools.partial(judge_pairs, gsm8k_correct, "number"),
          "spider": judge_spider, "label": judge_label,
          "nq": functools.partial(judge_pairs, nq_correct, "substring")}
