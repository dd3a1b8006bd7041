"""Extractive question answering, SQuAD and MLQA: predict the first and the last token of the
answer in a context. Contexts that are too long are split into overlapping windows.
"""

import math
import re
import string
import unicodedata
from collections import Counter
from functools import partial
from typing import Callable, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import BadInput
from corpora.files import at_line, read_jsonl
from tasks import sets


class Prepared(NamedTuple):
    """What a task gives to the loop."""
    rows: list             # N rows of ids to train on
    targets: torch.Tensor  # (N, ...)
    outputs: int           # of the linear layer
    on_tokens: bool        # the layer is on every token, not on the sentence embedding
    loss: Callable         # (outputs, targets, lengths of the rows) -> ()
    tests: dict            # {(set, language or ""): (rows, judge)}, judge(outputs) -> {metric: x}


def sample(items, limit):
    """Return a random sample of `limit` items in order, always the same one; or all items."""
    return [items[i] for i in sorted(np.random.default_rng(0).permutation(len(items))[:limit])]


def between(opened):
    """Return the ids between two texts: [SEP], twice in RoBERTa and XLM-R."""
    sep = opened.tokenizer.special.sep
    return [sep, sep] if opened.model.config.pair == "sep-sep" else [sep]


# ---- comparing answers

ARTICLES = {
    "en": r"\b(a|an|the)\b", "es": r"\b(un|una|unos|unas|el|la|los|las)\b",
    "vi": r"\b(của|là|cái|chiếc|những)\b", "ar": r"\sال^|ال",
    "de": r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b"}
SEGMENTED = {"zh": "\u4e00-\u9fa5", "ja": "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff",
             "th": "\u0e00-\u0e7f"}


def normalize_answer(text, language="en", rules="mlqa"):
    """Return an answer in lower case, without punctuation and articles. rules: "squad", English and
    ASCII [Rajpurkar et al. 2016], or "mlqa", of the context's language, where characters of Chinese
    (and here Japanese and Thai) are words [Lewis et al. 2020]."""
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
    """Compare a prediction with the best of its golds. Return {"f1": of normalized words, "exact":
    are they equal?}, from 0 to 1. An empty prediction is wrong."""
    best = {"f1": 0.0, "exact": 0.0}
    found = normalize_answer(prediction, language, rules)
    for gold in golds if prediction.strip() else ():
        gold = normalize_answer(gold, language, rules)
        same = sum((Counter(found.split()) & Counter(gold.split())).values())
        f1 = 2 * same / max(1, len(found.split()) + len(gold.split()))  # = 2 P R / (P + R)
        best = {"f1": max(best["f1"], f1), "exact": max(best["exact"], float(found == gold))}
    return best


# ---- questions, and rows of a question and a part of its context

STRIDE = 128       # tokens that two windows of a context share, at most half of one
N_BEST = 20        # starts and ends that are combined
MAX_ANSWER = 30    # tokens
MAX_QUESTION = 64  # tokens, and at most a third of the row


class Question(NamedTuple):
    context: str
    question: str
    answers: list[str]
    start: int                  # the character of the context where the first answer begins
    languages: tuple[str, str]  # of the context, of the question


def read_questions(name, folder, split):
    """Return {"de-ar": Questions in Arabic about German contexts, ...} of a JSONL file whose lines
    are {"context", "question", "answers": [{"text", "answer_start"}]}, of MLQA also "lang_context"
    and "lang_question". Raises BadInput."""
    path = sets.find_file(name, folder, split)
    if not path:
        raise BadInput(f"there is no file {folder}/{name}_{split}.jsonl (tasks/README.md says how "
                       "to get it)")
    cells = {}
    for number, row in read_jsonl(path):
        try:
            first = row["answers"][0]
            start = int(first.get("answer_start", first.get("start")))
            languages = row.get("lang_context", "en"), row.get("lang_question", "en")
            answers = [str(answer["text"]) for answer in row["answers"]]
            question = Question(str(row["context"]), str(row["question"]), answers, start,
                                languages)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise at_line(path, number, "this is not a question with context and answers "
                          f"({type(error).__name__}: {error})") from None
        cells.setdefault("-".join(languages), []).append(question)
    return dict(sorted(cells.items()))


def has_answer(question):
    """Is the first answer where the file says?"""
    return question.context.startswith(question.answers[0], question.start)


class Window(NamedTuple):
    """A row of two texts: the question and a part of the context."""
    row: np.ndarray  # its ids
    question: int    # number of the question
    at: int          # index of the first context token in the row
    offsets: list    # (first character, last + 1) in the context, of each context token


def make_windows(questions, tokenizer, middle, longest):
    """Split the contexts of questions into Windows that fit into a row."""
    special = tokenizer.special
    most = longest - 2 - len(middle)
    question_ids = tokenizer.encode([question.question for question in questions])
    windows = []
    for number, (ids, question) in enumerate(zip(question_ids, questions)):
        start = [special.cls, *ids[:min(MAX_QUESTION, most // 3)], *middle]
        room = longest - 1 - len(start)
        context = tokenizer.inner.encode(question.context, add_special_tokens=False)
        context.truncate(room, stride=min(STRIDE, room // 2))
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


def judge_answers(outputs, windows, questions, rules):
    """Return F1 and exact match in percent of the best answer among the windows of each question.
    """
    best = [(-math.inf, 0, 0)] * len(questions)
    for each, window in zip(outputs, windows):
        span = best_span(each, window)
        if span[0] > best[window.question][0]:
            best[window.question] = span
    totals = Counter()
    for (_, first, last), question in zip(best, questions):
        text = question.context[first:last].strip()
        totals.update(qa_scores(text, question.answers, question.languages[0], rules))
    return {name: 100 * totals[name] / len(questions) for name in ("f1", "exact")}


def span_loss(outputs, targets, lengths):
    """Return the mean cross-entropy of the first and of the last token among the tokens of their
    row: (T, 2), (R, 2), R lengths -> ()."""
    padded = nn.utils.rnn.pad_sequence(outputs.split(lengths), True, -math.inf)  # (R, longest, 2)
    return F.cross_entropy(padded, targets)


def answering(name, settings, flags, opened):
    """Prepare questions about contexts."""
    split = partial(make_windows, tokenizer=opened.tokenizer, middle=between(opened),
                    longest=settings.max_length)

    def test(questions):
        questions = sample(questions, flags.eval_limit)
        windows = split(questions)
        return [window.row for window in windows], partial(
            judge_answers, windows=windows, questions=questions, rules=name)

    cells = read_questions(name, flags.files, "test") if name == "mlqa" else {}
    tests = {("squad", ""): test(read_questions("squad", flags.files, "test")["en-en"])}
    tests |= {(name, languages): test(questions) for languages, questions in cells.items()}
    questions = sample(read_questions("squad", flags.files, "train")["en-en"], flags.limit)
    windows = [window for window in split(questions) if has_answer(questions[window.question])]
    if not windows:
        raise BadInput("no training question of squad has its answer at answer_start")
    targets = [gold_span(questions[window.question], window) for window in windows]
    return Prepared([window.row for window in windows], torch.tensor(targets), 2, True, span_loss,
                    tests)
