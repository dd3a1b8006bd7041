"""Fine-tune a run's encoder on a task and test it: sentence classification, and answers out of a text, zero-shot in other languages.

    python finetune.py out/x --task mrpc --files data
    python finetune.py out/x --task xnli --untrained        # trained on English MNLI, tested in every language; once more from fresh weights
    python finetune.py out/x --task mlqa --seeds 82,23,37   # trained on English SQuAD, tested on contexts x questions of 7 languages

All weights are trained, with one linear layer on the sentence vector, or on every token for the two ends of an answer. The numbers are those of
the last epoch; the best epoch, chosen by the very rows it is reported for, stands beside them under that name. What test rows are, tasks.py says.
"""
import argparse
import json
import math
import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import data
import download
import metrics
import scores
import tasks
from data import BadInput
from evaluate import batches, in_eval_mode, names, read_run, reported, usable_device
from model import Model, Packed, load

# ---------------------------------------------------------------------------------------------------------------------
# The loop, which knows of no task


class Part(NamedTuple):
    """Rows to test on; judge(outputs, one tensor a row) -> {metric: number}."""
    rows: list
    judge: object


class Prepared(NamedTuple):
    """What a task gives to the loop. targets (N, ...) of the training rows; `tokens`: the layer is on every token; loss(outputs, targets, lengths of
    the rows) -> (); `same`: the Part of the data set trained on; others {language or languages: Part}; facts {name: number} go into the results."""
    rows: list
    targets: torch.Tensor
    outputs: int
    tokens: bool
    loss: object
    same: Part
    others: dict
    facts: dict


class Finetuned(nn.Module):
    """An encoder and one linear layer: on the vector of each row -> (R, outputs), or, with `tokens`, on each state -> (T, outputs); float32."""

    def __init__(self, encoder, outputs, tokens):
        super().__init__()
        self.encoder, self.tokens = encoder, tokens
        self.dropout, self.head = nn.Dropout(encoder.config.dropout), nn.Linear(encoder.config.width, outputs)
        nn.init.normal_(self.head.weight, std=0.02)                      # as BERT's code
        nn.init.zeros_(self.head.bias)

    def forward(self, packed):
        states = self.encoder(packed)                                    # (T, D)
        return self.head(states if self.tokens else self.dropout(self.encoder.pool(states, packed))).float()


def call(model, rows, precision):
    device = next(model.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        return model(Packed.of(rows, causal=model.encoder.config.causal).to(device))


def predict(model, rows, precision="float32", tokens_per_batch=8192):
    """Outputs of the rows, on the CPU, one tensor each: (outputs,), or (tokens, outputs)."""
    made = [None] * len(rows)
    with in_eval_mode(model):
        for batch in tqdm(batches([len(row) for row in rows], tokens_per_batch), desc="test", leave=False, disable=not sys.stderr.isatty()):
            outputs = call(model, [rows[i] for i in batch], precision).cpu()
            if not outputs.isfinite().all():
                raise BadInput("the model gives NaN or infinity: its training has diverged; choose a lower --lr")
            for i, each in zip(batch, outputs.split([len(rows[i]) for i in batch]) if model.tokens else outputs):
                made[i] = each
    return made


def order(lengths, batch, rng, window=32):
    """Each row once, in batches of `batch` (one is smaller) of like lengths, which balance and need little padding inside of attention: a random
    order, sorted within every `window` batches, and the batches in a random order again. -> list of (batch,) row numbers"""
    places, size = rng.permutation(len(lengths)), batch * window
    parts = [places[start:start + size] for start in range(0, len(places), size)]
    parts = [part[np.argsort(lengths[part], kind="stable")] for part in parts]
    made = [part[start:start + batch] for part in parts for start in range(0, len(part), batch)]
    return [made[i] for i in rng.permutation(len(made))]


def fit(model, prepared, options, seed, after_epoch):
    """Train; after_epoch(epoch) is called at the end of each. No decay on biases and norms."""
    rng, lengths, weights = np.random.default_rng(seed), np.array([len(row) for row in prepared.rows]), list(model.parameters())
    optimizer = torch.optim.AdamW([dict(params=[w for w in weights if w.ndim > 1], weight_decay=options.weight_decay),
                                   dict(params=[w for w in weights if w.ndim < 2], weight_decay=0.0)], lr=options.lr, fused=True)
    total, step = options.epochs * -(-len(lengths) // options.batch), 0
    warm = max(1, round(options.warmup * total))
    with tqdm(total=total, desc=f"seed {seed}", leave=False, disable=not sys.stderr.isatty()) as bar:
        for epoch in range(options.epochs):
            model.train()
            for batch in order(lengths, options.batch, rng):
                for group in optimizer.param_groups:
                    group["lr"] = options.lr * min((step + 1) / warm, (total - step) / max(1, total - warm))
                outputs = call(model, [prepared.rows[i] for i in batch], options.precision)
                prepared.loss(outputs, prepared.targets[batch].to(outputs.device), lengths[batch].tolist()).backward()
                if not nn.utils.clip_grad_norm_(weights, options.clip or math.inf).isfinite():
                    raise BadInput(f"the gradient is NaN or infinite at step {step}: choose a lower --lr than {options.lr:g}")
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                bar.update()
            after_epoch(epoch)


def reported_task(task, options):
    """The sentence task whose own (English) test rows are reported: what is trained on if the test is another, as of xnli."""
    return task.train[0] if task.test else options.task


def one_run(encoder, prepared, task, options, seed):
    """Fine-tune and test once -> {"task/metric" or "task/metric/detail": number}."""
    torch.manual_seed(seed)
    model = Finetuned(encoder(), prepared.outputs, prepared.tokens).to(options.device)
    history, trained, by_metric = [], reported_task(task, options), {}

    def after_epoch(epoch):
        history.append(prepared.same.judge(predict(model, prepared.same.rows, options.precision)))
        said = ", ".join(f"{name} {value:.2f}" for name, value in history[-1].items())
        print(f"seed {seed}, epoch {epoch + 1} of {options.epochs}: {trained} {said}", file=sys.stderr)

    fit(model, prepared, options, seed, after_epoch)
    found = {f"{trained}/{name}": value for name, value in history[-1].items()}
    found |= {f"{trained}/{name}/best_epoch": max(each[name] for each in history) for name in task.metrics}
    for detail, part in prepared.others.items():
        for name, value in part.judge(predict(model, part.rows, options.precision)).items():
            by_metric.setdefault(name, {})[detail] = value
    for name, values in by_metric.items():
        found |= {f"{task.test}/{name}{kind}": value for kind, value in means(values, task.test).items()}
        found |= {f"{task.test}/{name}/{detail}": value for detail, value in values.items() if name != "majority"}
    return found


XNLI = "ar bg de el en es fr hi ru sw th tr ur vi zh".split()             # its 15 languages
LANGUAGES = {"xnli": [*XNLI, "ko", "my"], "pawsx": "en de es fr ja ko zh".split()}     # Korean and Burmese come from other sources, if they are there


def means(values, name):
    """{"de" or, of a context and a question, "de-ar": number} -> the mean that is published as "", and others: XNLI's is over its 15 languages;
    MLQA's matrix also has those of its diagonal (/xlt) and of the rest (/gxlt) [Lewis et al. 2020, sec. 5]."""
    mean = lambda keys: sum(values[key] for key in keys) / len(keys)
    same, other = ([key for key in values if (len(set(key.split("-"))) == 1) == alike] for alike in (True, False))
    published = [key for key in values if key in XNLI] if name == "xnli" else []
    return ({"": mean(published or values)} | ({"/all": mean(values)} if 0 < len(published) < len(values) else {})
            | ({"/xlt": mean(same), "/gxlt": mean(other)} if same and other else {}))


def over_seeds(runs):
    """{seed: results} -> the results of one seed; of several the mean, name/sd (of n - 1), and name/seed_82 and so on, for paired tests."""
    if len(runs) == 1:
        return next(iter(runs.values()))
    found = {}
    for name in next(iter(runs.values())):
        values = [run[name] for run in runs.values()]
        found |= {name: float(np.mean(values)), f"{name}/sd": float(np.std(values, ddof=1))} | {f"{name}/seed_{seed}": run[name] for seed, run in runs.items()}
    return found


def some(items, limit):
    """`limit` items: a random choice that is always the same, in order; all, if there is no limit or not so many."""
    return [items[i] for i in sorted(np.random.default_rng(0).permutation(len(items))[:limit])]


# ---------------------------------------------------------------------------------------------------------------------
# Classification: one linear layer on the sentence vector


def pair_row(first, second, mark, longest):
    """Ids of one text or two -> ([CLS] a [SEP] or [CLS] a [SEP] b [SEP], was it cut?). The longer of two is cut first, down to the other's length,
    then both alike."""
    if second is None:
        return np.array([mark.cls, *first[:longest - 2], mark.sep]), len(first) > longest - 2
    room = longest - 3
    left = first[:max(room - len(second), (room + 1) // 2)]
    right = second[:room - len(left)]
    return np.array([mark.cls, *left, mark.sep, *right, mark.sep]), len(left) + len(right) < len(first) + len(second)


METRICS = {"pearson": metrics.pearson, "spearman": metrics.spearman, "mcc": metrics.mcc, "f1": metrics.f1, "accuracy": metrics.accuracy}  # GLUE's

CORRELATIONS = ("pearson", "spearman", "mcc")                             # from -1 to 1 there; times 100 here, as papers print them


def classification(task, options, tokenizer):
    """-> Prepared. The whole published training split is trained on. The data sets must have the same classes."""
    own = reported_task(task, options)
    mark, counts, kinds = data.special(tokenizer), Counter(), {name: tasks.find(name).classes for name in (own, *task.train, task.test) if name}
    classes = kinds[own]
    if other := [name for name in kinds if kinds[name] != classes]:
        raise BadInput(f"{other[0]} has the labels {', '.join(kinds[other[0]]) or '(scores)'} and {own} {', '.join(classes) or '(scores)'}: "
                       "choose data sets with the same labels")

    def read(name, split, limit, lang="en"):
        found = tasks.read(name, options.files, split, lang)
        texts = [found.first] if found.second is None else [found.first, found.second]
        *texts, labels = zip(*some(list(zip(*texts, found.labels)), limit))
        encoded = [data.encode(tokenizer, list(column)) for column in texts]
        rows, cut = zip(*(pair_row(*row, *[None] * (2 - len(row)), mark, options.max_length) for row in zip(*encoded)))
        counts.update({"test_rows" if split == "test" else "train_rows": len(rows), "rows_cut": sum(cut)})
        return list(rows), list(labels)

    def part(name, lang="en"):
        rows, golds = read(name, "test", options.eval_limit, lang)
        golds = torch.tensor(golds)

        def judge(outputs):
            outputs = torch.stack(outputs)                               # (N, classes), or (N, 1)
            found = outputs.argmax(1) if classes else outputs[:, 0]
            majority = {"majority": 100 * golds.bincount().max().item() / len(golds)} if classes else {}
            return {name: METRICS[name](found, golds) * (100 if name in CORRELATIONS else 1) for name in task.metrics} | majority
        return Part(rows, judge)

    rows, labels = [], []
    for name in task.train:                                              # valid rows that were made of train rows are trained on
        split = "train+valid" if tasks.made(name, options.files, "valid") else "train"
        for whole, more in zip((rows, labels), read(name, split, options.limit)):
            whole += more
    others = {}
    for lang in LANGUAGES[task.test] if task.test else ():
        try:
            others[lang] = part(task.test, lang)
        except BadInput:
            if task.test != "xnli" or lang in XNLI:
                raise
    loss = (lambda outputs, golds, _: F.cross_entropy(outputs, golds)) if classes else (lambda outputs, golds, _: F.mse_loss(outputs[:, 0], golds.float()))
    return Prepared(rows, torch.tensor(labels), len(classes) or 1, False, loss, part(own), others, counts)


# ---------------------------------------------------------------------------------------------------------------------
# Answers out of a text: the start and the end, over the tokens


class Question(NamedTuple):
    """start: the character of the context where the first answer begins; languages: of the context, of the question."""
    context: str
    question: str
    answers: list[str]
    start: int
    languages: tuple[str, str]


FILES = {  # patterns of a data set's files: as data.py downloads them, or one JSONL. MLQA's dev rows stand for its test rows if those are not there
    "squad-train": ("squad/train-v1.1.json", "qa/squad_v1.1_train*.jsonl*"),
    "squad": ("squad/dev-v1.1.json", "qa/squad_v1.1_dev*.jsonl*"),
    "xquad": ("xquad/xquad.*.json", "qa/xquad.jsonl*"),
    "mlqa": ("mlqa/**/test-context-*-question-*.json", "qa/mlqa_test*.jsonl*", "mlqa/**/dev-context-*-question-*.json", "qa/mlqa_dev*.jsonl*"),
}


def read_questions(name, folder):
    """-> {"": questions of SQuAD}, {"de": of XQuAD}, {"de-ar": German contexts, Arabic questions, of MLQA}. Raises BadInput if there are none."""
    paths = next((found for pattern in FILES[name] if (found := sorted(Path(folder).glob(pattern)))), [])
    if not paths:
        name, _, split = name.partition("-")
        raise BadInput(download.missing(name, folder) or f"{folder}/{name} has no {split or 'test'} questions: delete it, and fetch it again")
    if name == "mlqa" and "dev" in paths[0].name:
        print("note: mlqa: the published dev rows stand for test, which is not there", file=sys.stderr)
    cells = {}
    for question in (question for path in paths for question in read_file(path)):
        cell = {"mlqa": "-".join(question.languages), "xquad": question.languages[0]}.get(name, "")
        cells.setdefault(cell, []).append(question)
    return dict(sorted(cells.items()))


def read_file(path):
    """The questions of SQuAD's JSON, whose languages its name has (xquad.de.json, test-context-de-question-ar.json; else English), or of JSONL."""
    try:
        if path.suffix == ".json":
            codes = re.findall(r"(?:xquad\.|context-|question-)([a-z]{2})\b", path.name) or ["en"]
            documents = json.loads(path.read_text(encoding="utf-8"))["data"]
            rows = [dict(question, context=paragraph["context"], lang_context=codes[0], lang_question=codes[-1])
                    for document in documents for paragraph in document["paragraphs"] for question in paragraph["qas"]]
        else:
            rows = [json.loads(line) for _, line in data.read_lines(path) if line.strip()]
        made = [Question(row["context"], row["question"], [answer["text"] for answer in row["answers"]],
                         row["answers"][0]["start" if "start" in row["answers"][0] else "answer_start"],
                         tuple(row.get(key, row.get("lang", "en")) for key in ("lang_context", "lang_question"))) for row in rows]
        if strange := {lang for question in made for lang in question.languages} - {*scores.LANGUAGES}:
            raise ValueError(f"languages {', '.join(strange)}, whose answers cannot be compared; {', '.join(scores.LANGUAGES)} can")
        return made
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise BadInput(f"{path} is not questions with answers, in SQuAD's JSON or as JSONL with context, question and answers "
                       f"({type(error).__name__}: {error}): fetch it again") from None


def encode_places(tokenizer, texts):
    """Texts -> of each (ids (n,), places (n, 2): which characters a token stands for, half open). A token of a part of a character has the whole
    character, one that begins a word may have the space before it. As in data.encode, no text becomes a special token."""
    before, tokenizer.encode_special_tokens = tokenizer.encode_special_tokens, True
    try:
        return [(np.array(found.ids, np.int64), np.array(found.offsets, np.int64).reshape(-1, 2))
                for found in tokenizer.encode_batch(list(texts), add_special_tokens=False)]
    finally:
        tokenizer.encode_special_tokens = before


def token_span(places, first, last):
    """Characters [first, last) of a text -> its first and its last token; the last before the first if no token has any of them."""
    return np.searchsorted(places[:, 1], first, "right").item(), np.searchsorted(places[:, 0], last, "left").item() - 1


def gold_span(question, places):
    """The first and the last token of the first answer; the last before the first if the context does not have it where the file says."""
    end = question.start + len(question.answers[0])
    return token_span(places, question.start, end) if question.context[question.start:end] == question.answers[0] else (0, -1)


def windows(count, room, stride):
    """Parts [first, last) of `count` tokens, at most `room` long, each with `stride` tokens of the one before; and (count,) the part in which a token
    has most context: the most on its shorter side, then the longest part [BERT's code]."""
    parts, token = [(first, min(first + room, count)) for first in range(0, max(1, count - stride), room - stride)], np.arange(count)
    context = [np.where((first <= token) & (token < last), np.minimum(token - first, last - 1 - token) + 0.01 * (last - first), -1.0)
               for first, last in parts]
    return parts, np.argmax(context, 0)


class Window(NamedTuple):
    """A row [CLS] question [SEP] part of the context [SEP]. question: its number; at: the place of the first context token in the row; first: that
    token's place in the context; own (n,): the context tokens that have most context here."""
    row: np.ndarray
    question: int
    at: int
    first: int
    own: np.ndarray


def cut_windows(questions, tokenizer, longest, stride, most_question=64):
    """-> (Windows, places of the tokens of each question's context, questions cut). A question has at most 64 tokens [BERT's code] and a third of the row."""
    mark, made, long, most = data.special(tokenizer), [], 0, min(most_question, (longest - 3) // 3)
    contexts = list(dict.fromkeys(question.context for question in questions))
    encoded = dict(zip(contexts, encode_places(tokenizer, contexts)))
    for number, (ids, question) in enumerate(zip(data.encode(tokenizer, [question.question for question in questions]), questions)):
        long, ids = long + (len(ids) > most), ids[:most]
        context, room = encoded[question.context][0], longest - 3 - len(ids)
        parts, best = windows(len(context), room, min(stride, room // 2))
        made += [Window(np.array([mark.cls, *ids, mark.sep, *context[first:last], mark.sep]), number, len(ids) + 2, first, best[first:last] == place)
                 for place, (first, last) in enumerate(parts)]
    return made, [encoded[question.context][1] for question in questions], long


def best_span(outputs, window, n_best, most):
    """Outputs (tokens of the row, 2) -> (score, first, last token in the context) of the best answer of at most `most` tokens, among the n_best starts
    and ends; it is inside of the context, and begins where that token has most context. Score -inf if there is none."""
    start, end = outputs[window.at:window.at + len(window.own)].numpy().T
    if not window.own.any():
        return -math.inf, 0, 0
    start = np.where(window.own, start, -math.inf)
    starts, ends = (np.argsort(-each, kind="stable")[:n_best] for each in (start, end))
    length = ends[None] - starts[:, None]                                # (n_best, n_best): one less
    score = np.where((length >= 0) & (length < most), start[starts][:, None] + end[ends][None], -math.inf)
    i, j = np.unravel_index(score.argmax(), score.shape)
    return score[i, j], window.first + starts[i], window.first + ends[j]


def judge_answers(made, questions, places, options):
    """-> judge of F1 and exact match of the best answer of all windows of a question. The language is the context's; with the rules "released" the
    question's."""
    def judge(outputs):
        best, totals = [(-math.inf, 0, 0)] * len(questions), Counter()
        for each, window in zip(outputs, made):
            best[window.question] = max(best[window.question], best_span(each, window, options.n_best, options.max_answer), key=lambda found: found[0])
        for (score, first, last), question, place in zip(best, questions, places):
            text = question.context[place[first, 0]:place[last, 1]].strip() if score > -math.inf else ""
            lang = question.languages[options.rules == "released"]
            totals.update(f1=scores.qa_f1(text, question.answers, lang, options.rules), exact=scores.qa_exact(text, question.answers, lang, options.rules))
        return {name: 100 * totals[name] / len(questions) for name in ("f1", "exact")}
    return judge


def span_loss(outputs, targets, lengths):
    """Mean cross-entropy of the first and of the last token, each over the places of its row: (T, 2), (R, 2), R lengths -> ()."""
    padded = nn.utils.rnn.pad_sequence(outputs.split(lengths), batch_first=True, padding_value=-math.inf)    # (R, places, 2)
    return F.cross_entropy(padded, targets)


def answering(task, options, tokenizer):
    """-> Prepared. A training window without the whole answer points to [CLS], as in BERT's code; in tests no answer does."""
    counts = Counter()

    def cut(questions, limit, kind):
        questions = some(questions, limit)
        made, places, long = cut_windows(questions, tokenizer, options.max_length, options.stride)
        counts.update({kind: len(questions), "questions_cut": long})
        return questions, made, places

    def part(questions):
        questions, made, places = cut(questions, options.eval_limit, "test_rows")
        spans = map(gold_span, questions, places)
        counts.update(answers_too_long=sum(last - first >= options.max_answer for first, last in spans))           # which no model can give
        return Part([window.row for window in made], judge_answers(made, questions, places, options))

    others = {cell: part(each) for cell, each in read_questions(task.test, options.files).items()} if task.test else {}
    same = part(read_questions("squad", options.files)[""])
    questions, made, places = cut(read_questions("squad-train", options.files)[""], options.limit, "train_rows")
    spans, rows, targets = list(map(gold_span, questions, places)), [], []
    for window in made:
        first, last = spans[window.question]
        if first <= last:
            inside = window.first <= first and last < window.first + len(window.own)
            rows.append(window.row)
            targets.append((window.at + first - window.first, window.at + last - window.first) if inside else (0, 0))
    lost = sum(first > last for first, last in spans)
    if not rows:
        raise BadInput("no training question has its answer where the file says: fetch the data again")
    counts.update(train_windows=len(rows), answers_lost=lost)
    return Prepared(rows, torch.tensor(targets), 2, True, span_loss, same, others, counts)


# ---------------------------------------------------------------------------------------------------------------------
# Command line


class Task(NamedTuple):
    """train: data sets whose English rows are trained on; the test rows of the first are tested on after each epoch. test: the data set whose
    languages are tested at the end."""
    train: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy",)
    epochs: int = 3
    test: str = ""
    lr: float = 2e-5
    batch: int = 16
    prepare: object = classification


ANSWERS = dict(metrics=("f1", "exact"), epochs=2, lr=3e-5, batch=12, prepare=answering)
GLUE = dict.fromkeys(("mrpc", "qqp"), ("accuracy", "f1")) | {"cola": ("mcc",)}
TASKS = {name: Task((name,), GLUE.get(name, ("accuracy",) if row.classes else ("pearson", "spearman"))) for name, row in tasks.TASKS.items()} | {
    "xnli": Task(("mnli",), epochs=2, test="xnli"), "pawsx": Task(("pawsx",), test="pawsx"),
    "squad": Task(("squad",), **ANSWERS), "xquad": Task(("squad",), test="xquad", **ANSWERS), "mlqa": Task(("squad",), test="mlqa", **ANSWERS)}
NARROW, NARROW_RATE = 384, 5e-4                                          # at a paper's rate a narrow model hardly moves in so few steps


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise BadInput(f"{message} (see python finetune.py --help)")


def make_parser():
    parser = Parser(prog="finetune.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="folder of a run, such as out/mexma")
    group = parser.add_argument_group("task and data").add_argument
    group("--task", required=True, metavar="NAME", help=f"one of {', '.join(TASKS)}")
    group("--files", default="data", metavar="FOLDER", help="where data.py downloads to [data]")
    group("--train-on", type=names, metavar="NAMES", help="sentence tasks to train on, such as mnli,snli [the task's own; mnli for xnli]")
    group("--limit", type=int, metavar="N", help="train on so many rows of each, chosen at random, the same ones for all seeds [all]")
    group("--eval-limit", type=int, metavar="N", help="test on so many rows of each split and language [all]")
    group("--untrained", action="store_true", help="a control: the same once more from fresh weights, as name/untrained")
    group = parser.add_argument_group("optimisation: AdamW, linear warm-up and decay; defaults of BERT-JEPA, its code and sec. 4").add_argument
    group("--epochs", type=int, metavar="N", help="[3; xnli, squad, xquad, mlqa 2]")
    group("--lr", type=float, metavar="X", help=f"peak learning rate [2e-5; answers 3e-5; models narrower than {NARROW}: {NARROW_RATE:g}, which is ours]")
    group("--batch", type=int, metavar="N", help="rows of a step [16; answers 12]")
    group("--warmup", type=float, default=0.1, metavar="X", help="share of the steps in which the rate rises [0.1]")
    group("--weight-decay", type=float, default=0.01, metavar="X", help="of matrices and embeddings [0.01]")
    group("--clip", type=float, default=1.0, metavar="X", help="most length of the gradient; 0: any [1]")
    group("--seeds", "--seed", type=names, default=["82"], metavar="N,N", help="of the new layer, order and dropout; of several the mean, name/sd and "
          "name/seed_N are kept [82]")
    group = parser.add_argument_group("rows and answers; defaults of BERT-JEPA's code").add_argument
    group("--max-length", type=int, metavar="N", help="tokens of a row [128; answers 384; at most the model's]")
    group("--stride", type=int, metavar="N", help="tokens that two windows of a context share, at most half of one [128]")
    group("--n-best", type=int, metavar="N", help="starts and ends that are combined [20]")
    group("--max-answer", type=int, metavar="N", help="tokens of an answer [30]")
    group("--rules", choices=scores.RULES, help="by which answers are compared [mlqa; of squad and xquad squad]")
    group = parser.add_argument_group("device and output").add_argument
    group("--device", metavar="NAME", help="cpu, cuda, cuda:1 [cuda if there is one]")
    group("--precision", choices=("float32", "bfloat16"), default="float32", help="of matrix products; losses are float32 [float32]")
    group("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def settle(options, config):
    """Check the options; fill in those not given from the task and the model's config. -> Task"""
    if options.task not in TASKS:
        raise BadInput(f"task {options.task!r} is unknown: choose from {', '.join(TASKS)}{data.meant(options.task, TASKS)}")
    task, longest = TASKS[options.task], config.max_length
    if options.train_on and task.prepare is answering:
        raise BadInput(f"--train-on is for sentence tasks, {options.task} is trained on SQuAD: leave it out")
    if len({*(options.train_on or ())}) < len(options.train_on or ()):
        raise BadInput(f"--train-on {','.join(options.train_on)} names a task twice: its rows would count twice")
    answers = dict(stride=128, n_best=20, max_answer=30, rules="mlqa" if task.test == "mlqa" else "squad")
    if task.prepare is not answering and (given := [name for name in answers if getattr(options, name) is not None]):
        raise BadInput(f"--{given[0].replace('_', '-')} is for squad, xquad and mlqa, {options.task} has no answers in a text: leave it out")
    task = task._replace(train=tuple(options.train_on or task.train), lr=task.lr if config.width >= NARROW else NARROW_RATE)
    usual = 384 if task.prepare is answering else 128
    for name, value in dict(epochs=task.epochs, lr=task.lr, batch=task.batch, **answers, max_length=min(usual, longest)).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    amount = (1, math.inf)
    for name, (low, high) in dict(epochs=amount, batch=amount, limit=amount, eval_limit=amount, stride=amount, n_best=amount, max_answer=amount,
                                  lr=(0, math.inf), warmup=(0, 1), weight_decay=(0, math.inf), clip=(0, math.inf), max_length=(16, longest)).items():
        if (value := getattr(options, name)) is not None and not low <= value <= high:
            raise BadInput(f"{name} {value}: it must be {low} to {high}{', the longest row of the model' if name == 'max_length' else ''}")
    numbers = [int(seed) if seed.isdecimal() else -1 for seed in options.seeds]
    if not numbers or len(set(numbers)) < len(numbers) or not all(0 <= number < 2 ** 32 for number in numbers):
        raise BadInput(f"seeds {','.join(options.seeds)}: give whole numbers, at least one, each once")
    if config.causal and config.pool == "cls" and task.prepare is classification:
        raise BadInput("the sentence vector of this causal model is its first state, which has read nothing: take a run with --pool last or mean")
    options.device = usable_device(options.device)
    note = f", the model's longest, not {usual}" if options.max_length == longest < usual else ""
    print(f"{options.task}: {', '.join(task.train)}, {options.epochs} epochs, lr {options.lr:g} (paper: {TASKS[options.task].lr:g}), batch {options.batch}, "
          f"rows of at most {options.max_length} tokens{note}", file=sys.stderr)
    return task


def table(results):
    """Lines of name and value, seeds left out; of a matrix of languages a grid for each metric."""
    shown = {name: value for name, value in results.items() if not re.search(r"/(sd|seed_\d+)$", name)}
    grids, lines, width = {}, [], max(map(len, shown))
    for name, value in shown.items():
        if cell := re.search(r"/([a-z]{2})-([a-z]{2})\b", name):
            grids.setdefault(name.replace(cell[0], ""), {})[cell.groups()] = value
        else:
            more = f" ± {results[f'{name}/sd']:.2f}" if f"{name}/sd" in results else ""
            lines.append(f"{name:<{width}} {f'{value:.4g}' if abs(value) < 1 else value if isinstance(value, int) else f'{value:.2f}':>10}{more}")
    for name, cells in grids.items():
        rows, columns = (sorted({cell[side] for cell in cells}) for side in (0, 1))
        lines += ["", f"{name}: a row is a language of contexts, a column one of questions", " " * 4 + "".join(f"{column:>7}" for column in columns)]
        lines += [f"{row:<4}" + "".join(f"{cells[row, column]:7.2f}" if (row, column) in cells else f"{'-':>7}" for column in columns) for row in rows]
    return "\n".join(lines)


def finetune_run(options):
    """`finetune.py RUN`: numbers to stdout and RUN/finetune-TASK.json."""
    folder = Path(options.run)
    _, tokenizer = read_run(folder)
    config = load(folder / "model.pt").config
    task = settle(options, config)
    prepared = task.prepare(task, options, tokenizer)
    settings = dict(seeds=len(options.seeds), epochs=options.epochs, lr=options.lr, batch=options.batch, max_length=options.max_length)
    results = {f"{options.task}/{name}": value for name, value in (settings | prepared.facts).items()}
    starts = {"": lambda: load(folder / "model.pt")} | ({"/untrained": lambda: Model(config)} if options.untrained else {})
    for kind, start in starts.items():
        runs = {seed: one_run(start, prepared, task, options, int(seed)) for seed in options.seeds}
        results |= over_seeds({seed: {name + kind: value for name, value in run.items()} for seed, run in runs.items()})
    data.write_atomic(folder / f"finetune-{options.task}.json", (json.dumps(results, indent=1, allow_nan=False) + "\n").encode())
    print(json.dumps(results) if options.json else table(results))


def main(argv=None):
    """Returns the exit status: 0; 2 for bad input, which is one line on stderr; 130 if stopped, with nothing written."""
    return reported(lambda words: finetune_run(make_parser().parse_args(words)), argv)


if __name__ == "__main__":
    sys.exit(main())
