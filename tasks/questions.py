"""Extractive question answering, SQuAD and MLQA: predict the first and the last token of the
answer in a context. Contexts that are too long are split into overlapping windows."""

import math
import re
import string
import unicodedata
from collections import Counter
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from base.common import warn
from corpora.files import at_line, read_jsonl
from tasks import sets


class Prepared(NamedTuple):
    """What a task gives to the loop."""
    rows: list             # N rows of ids to train on
    targets: torch.Tensor  # (N,) classes or scores, or (N, 2) first and last tokens of answers
    outputs: int           # of the linear layer
    tests: dict            # {(set, language or ""): (rows, judge)}, judge(outputs) -> {metric: x}


def sample(items, limit):
    """Return a random sample of `limit` items (0: all) in order, always the same one."""
    order = np.random.default_rng(0).permutation(len(items))
    return [items[i] for i in sorted(order[:limit or None])]


def between(opened):
    """Return the ids between two texts: [SEP], twice in RoBERTa and XLM-R."""
    sep = opened.tokenizer.special.sep
    return [sep, sep] if opened.model.config.pair == "sep-sep" else [sep]


# ---- comparing answers

ARTICLES = {
    "en": r"\b(a|an|the)\b", "es": r"\b(un|una|unos|unas|el|la|los|las)\b",
    "vi": r"\b(của|là|cái|chiếc|những)\b", "ar": r"\sال^|ال",
    "de": r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b"}


def normalize_answer(text, language="en"):
    """Return an answer in lower case, without punctuation and articles; characters of Chinese are
    words. [Lewis et al. 2020]"""
    text = "".join(sign for sign in text.lower() if sign not in string.punctuation
                   and unicodedata.category(sign)[0] != "P")
    if language in ARTICLES:
        text = re.sub(ARTICLES[language], " ", text)
    if language == "zh":
        text = re.sub("([\u4e00-\u9fa5])", r" \1 ", text)
    return " ".join(text.split())


def qa_scores(prediction, golds, language="en"):
    """Compare a prediction with the best of its golds. Return {"f1": of normalized words, "exact":
    are they equal?}, from 0 to 1. An empty prediction is wrong."""
    f1 = exact = 0.0
    found = normalize_answer(prediction, language)
    for gold in golds if prediction.strip() else ():
        gold = normalize_answer(gold, language)
        same = sum((Counter(found.split()) & Counter(gold.split())).values())
        # 2 P R / (P + R)
        f1 = max(f1, 2 * same / max(1, len(found.split()) + len(gold.split())))
        exact = max(exact, float(found == gold))
    return {"f1": f1, "exact": exact}


# ---- questions, and rows of a question and a part of its context

STRIDE = 128       # tokens that two windows of a context share, at most half of one
N_BEST = 20        # starts and ends that are combined
MAX_ANSWER = 30    # tokens
MAX_QUESTION = 64  # tokens, and at most a third of the row


class Question(NamedTuple):
    context: str
    question: str
    answers: list[str]
    start: int      # the character of the context where the first answer begins
    languages: str  # of the context and of the question, "de-ar"


def read_questions(name, folder, split):
    """Return the Questions of a JSONL file whose lines are {"context", "question", "answers":
    [{"text", "answer_start"}]}, of MLQA also "lang_context" and "lang_question". Raises BadInput.
    """
    path = sets.find_file(name, folder, split)
    if not path:
        raise sets.Missing(f"{folder}/{name}_{split}.jsonl")
    questions = []
    for number, row in read_jsonl(path):
        try:
            first = row["answers"][0]
            questions.append(Question(
                str(row["context"]), str(row["question"]),
                [str(answer["text"]) for answer in row["answers"]],
                int(first.get("answer_start", first.get("start"))),
                f"{row.get('lang_context', 'en')}-{row.get('lang_question', 'en')}"))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise at_line(path, number, "this is not a question with context and answers "
                          f"({type(error).__name__}: {error})") from None
    return questions


class Window(NamedTuple):
    row: np.ndarray  # the ids of the question and of a part of its context
    question: int    # number of the question
    at: int          # index of the first context token in the row
    offsets: list    # (first character, last + 1) in the context, of each context token


def make_windows(questions, tokenizer, middle, longest):
    """Split the contexts of questions into Windows that fit into a row."""
    special = tokenizer.special
    most = longest - 2 - len(middle)
    question_ids = tokenizer.encode([question.question for question in questions])
    room = min(MAX_QUESTION, most // 3)
    if cut := sum(len(ids) > room for ids in question_ids):
        warn(f"{cut:,} of {len(questions):,} questions are longer than {room} tokens and were "
             "truncated")
    windows = []
    for number, (ids, question) in enumerate(zip(question_ids, questions)):
        start = [special.cls, *ids[:room], *middle]
        rest = longest - 1 - len(start)
        context = tokenizer.inner.encode(question.context, add_special_tokens=False)
        context.truncate(rest, stride=min(STRIDE, rest // 2))
        for part in (context, *context.overflowing):
            row = np.array([*start, *part.ids, special.sep])
            windows.append(Window(row, number, len(start), part.offsets))
    return windows


def gold_span(question, window):
    """Return the indices in a row of the first and the last token of the first answer; (0, 0),
    [CLS], if the window does not have the whole answer. [BERT-JEPA's code]"""
    start = question.start
    end = start + len(question.answers[0])
    inside = [window.at + i for i, (first, last) in enumerate(window.offsets)
              if first < end and last > start]
    if not inside or window.offsets[0][0] > start or window.offsets[-1][1] < end:
        return 0, 0
    return inside[0], inside[-1]


def best_span(outputs, window):
    """Return (score, first character, last + 1) of the best answer in a window, given outputs
    (tokens of the row, 2); score -inf without one. [BERT-JEPA's code]"""
    start, end = outputs[window.at:window.at + len(window.offsets)].numpy().T
    starts = np.argsort(-start, kind="stable")[:N_BEST]
    ends = np.argsort(-end, kind="stable")[:N_BEST]
    length = ends[None] - starts[:, None]  # (starts, ends) tokens, minus one
    score = start[starts][:, None] + end[ends][None]
    score = np.where((length >= 0) & (length < MAX_ANSWER), score, -math.inf)
    if not score.size:
        return -math.inf, 0, 0
    i, j = np.unravel_index(score.argmax(), score.shape)
    return score[i, j], window.offsets[starts[i]][0], window.offsets[ends[j]][1]


def judge_answers(outputs, windows, questions):
    """Return F1 and exact match in percent of the best answer among each question's windows."""
    best = [(-math.inf, 0, 0)] * len(questions)
    for each, window in zip(outputs, windows):
        span = best_span(each, window)
        if span[0] > best[window.question][0]:
            best[window.question] = span
    totals = Counter()
    for (_, first, last), question in zip(best, questions):
        text = question.context[first:last].strip()
        language, _ = question.languages.split("-")
        totals.update(qa_scores(text, question.answers, language))
    return {name: 100 * totals[name] / len(questions) for name in ("f1", "exact")}


def answering(name, settings, flags, opened):
    """Prepare questions about contexts: train on SQuAD, test on SQuAD and MLQA."""
    split = partial(make_windows, tokenizer=opened.tokenizer, middle=between(opened),
                    longest=settings.max_length)

    def test(questions):
        questions = sample(questions, settings.eval_limit)
        windows = split(questions)
        return [window.row for window in windows], partial(
            judge_answers, windows=windows, questions=questions)

    tests = {("squad", ""): test(read_questions("squad", flags.files, "test"))}
    asked = read_questions("mlqa", flags.files, "test")
    for languages in sorted({question.languages for question in asked}):
        tests["mlqa", languages] = test([one for one in asked if one.languages == languages])
    questions = sample(read_questions("squad", flags.files, "train"), settings.limit)
    # Some files have answers that are not where they say.
    right = [question for question in questions
             if question.context.startswith(question.answers[0], question.start)]
    if len(right) < len(questions):
        warn(f"squad: {len(questions) - len(right):,} of {len(questions):,} questions are not "
             "trained on: their answer is not at answer_start of the context")
    questions = right
    windows = split(questions)
    spans = [gold_span(questions[window.question], window) for window in windows]
    return Prepared([window.row for window in windows], torch.tensor(spans), 2, tests)
