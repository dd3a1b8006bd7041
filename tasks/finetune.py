"""Fine-tune a run's encoder on a task and test it: sentence classification, and answers out of a
text, zero-shot in other languages.

    python -m tasks finetune out/x --task mrpc --files data
    python -m tasks finetune out/x --task xnli --untrained     # English MNLI, then all languages
    python -m tasks finetune out/x --task mlqa --seeds 82,23   # English SQuAD, 7 x 7 languages

All weights are trained, with one linear layer on the sentence vector, or on every token for the two
ends of an answer. The numbers are those of the last epoch; the best epoch, chosen by the very rows
it is reported for, stands beside them under that name. Defaults are BERT-JEPA's [sec. 4, its code].
"""
import json
import math
import re
import statistics
import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from corpora import download
from corpora.program import BadInput, comma_list, did_you_mean
from corpora.text import read_lines, write_atomic
from evaluate import Task, mean, open_run, read_rows, usable_device, with_mean
from model import Model, Packed, load
from tasks import command, sets
from tasks.answers import qa_scores
from tasks.probes import METRICS, majority, measure
from train import TrainConfig, learning_rate, make_optimizer

# --------------------------------------------------------------------------------------------------
# The loop, which knows of no task


class Part(NamedTuple):
    """Rows to test on."""
    rows: list
    judge: Callable  # (outputs, one tensor a row) -> {metric: number}


class Prepared(NamedTuple):
    """What a task gives to the loop."""
    rows: list             # N rows of ids to train on
    targets: torch.Tensor  # (N, ...)
    outputs: int           # of the linear layer
    on_tokens: bool        # the layer is on every token, not on the sentence vector
    loss: Callable         # (outputs, targets, lengths of the rows) -> ()
    same: Part             # of the set that is trained on
    others: dict           # {language, or languages: Part}


class Finetuned(nn.Module):
    """An encoder and one linear layer: on the vector of each row -> (R, outputs), or on each state
    -> (T, outputs)."""

    def __init__(self, encoder, outputs, on_tokens):
        super().__init__()
        self.encoder = encoder
        self.config = encoder.config
        self.on_tokens = on_tokens
        self.dropout = nn.Dropout(encoder.config.dropout)
        self.head = nn.Linear(encoder.config.width, outputs)
        nn.init.normal_(self.head.weight, std=0.02)  # as BERT's code
        nn.init.zeros_(self.head.bias)

    def forward(self, packed):
        states = self.encoder(packed)  # (T, D)
        if not self.on_tokens:
            states = self.dropout(self.encoder.pool(states, packed))
        return self.head(states)


def predict(model, rows):
    """Outputs of the rows, on the CPU, one tensor each: (outputs,), or (tokens, outputs)."""
    def read(packed):
        outputs = model(packed).cpu()
        if not outputs.isfinite().all():
            raise BadInput("the model gives NaN or infinity: its training has diverged; choose a "
                           "lower --lr")
        return outputs.split(packed.cu_seqlens.diff().tolist()) if model.on_tokens else outputs
    return read_rows(model, rows, read, 8192)


def fit(model, prepared, options, seed, after_epoch):
    """Train; after_epoch(epoch) is called at the end of each."""
    rng = np.random.default_rng(seed)
    lengths = np.array([len(row) for row in prepared.rows])
    config = TrainConfig(lr=options.lr, schedule="linear", weight_decay=0.01, warmup=0.1,
                         steps=options.epochs * math.ceil(len(lengths) / options.batch))
    optimizer = make_optimizer(model, config)
    step = 0
    for epoch in range(options.epochs):
        model.train()
        order = rng.permutation(len(lengths))
        starts = range(0, len(order), options.batch)
        for start in tqdm(starts, leave=False, disable=not sys.stderr.isatty()):
            batch = order[start:start + options.batch]
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config)
            packed = Packed.of([prepared.rows[i] for i in batch], causal=model.config.causal)
            outputs = model(packed.to(options.device))
            targets = prepared.targets[batch].to(outputs.device)
            prepared.loss(outputs, targets, lengths[batch].tolist()).backward()
            if not nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
                raise BadInput(f"the gradient is NaN or infinite at step {step}: choose a lower "
                               f"--lr than {options.lr:g}")
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        after_epoch(epoch)


def one_run(encoder, prepared, task, options, seed):
    """Fine-tune and test once -> {"task/metric" or "task/metric/detail": number}."""
    torch.manual_seed(seed)
    model = Finetuned(encoder(), prepared.outputs, prepared.on_tokens).to(options.device)
    history = []

    def after_epoch(epoch):
        history.append(prepared.same.judge(predict(model, prepared.same.rows)))
        said = ", ".join(f"{name} {value:.2f}" for name, value in history[-1].items())
        print(f"seed {seed}, epoch {epoch + 1}: {task.train} {said}", file=sys.stderr)

    fit(model, prepared, options, seed, after_epoch)
    found = {f"{task.train}/{name}": value for name, value in history[-1].items()}
    for name in task.metrics:
        found[f"{task.train}/{name}/best_epoch"] = max(each[name] for each in history)
    others = {detail: part.judge(predict(model, part.rows))
              for detail, part in prepared.others.items()}
    for name in history[-1] if others else ():
        metric = f"{task.test}/{name}"
        values = {detail: scores[name] for detail, scores in others.items()}
        found |= with_mean(metric, values)
        found |= {metric + kind: value for kind, value in means(values, task.test).items()}
    return found


XNLI = "ar bg de el en es fr hi ru sw th tr ur vi zh".split()  # its 15 languages
TESTED = {"xnli": [*XNLI, "ko", "my"],  # Korean and Burmese, if they are there
          "pawsx": "en de es fr ja ko zh".split()}


def means(values, name):
    """{"de" or, of a context and a question, "de-ar": number} -> means: "" of all, of XNLI's 15
    languages; MLQA's matrix also on the diagonal (/xlt) and beside it (/gxlt) [Lewis et al. 2020,
    sec. 5]."""
    published = {key: values[key] for key in values if name != "xnli" or key in XNLI}
    same = {key: values[key] for key in values if len(set(key.split("-"))) == 1}
    other = {key: values[key] for key in values if key not in same}
    groups = {"": published}
    if len(published) < len(values):
        groups["/all"] = values
    if same and other:
        groups |= {"/xlt": same, "/gxlt": other}
    return {kind: mean(group.values()) for kind, group in groups.items()}


def over_seeds(runs):
    """{seed: results} -> the results of one seed; of several the mean, name/sd, name/seed_82."""
    first = next(iter(runs.values()))
    if len(runs) == 1:
        return first
    found = {}
    for name in first:
        values = [run[name] for run in runs.values()]
        found[name] = statistics.fmean(values)
        found[f"{name}/sd"] = statistics.stdev(values)
        found |= {f"{name}/seed_{seed}": run[name] for seed, run in runs.items()}
    return found


def some(items, limit):
    """`limit` items, a random choice that is always the same, in order; or all."""
    return [items[i] for i in sorted(np.random.default_rng(0).permutation(len(items))[:limit])]


# --------------------------------------------------------------------------------------------------
# Classification: one linear layer on the sentence vector


def pair_row(first, second, special, longest):
    """Ids of one text (second None) or two -> [CLS] a [SEP] (b [SEP]), the longer cut first."""
    if second is None:
        return np.array([special.cls, *first[:longest - 2], special.sep])
    room = longest - 3
    left = first[:max(room - len(second), (room + 1) // 2)]
    right = second[:room - len(left)]
    return np.array([special.cls, *left, special.sep, *right, special.sep])


def classification(task, options, tokenizer):
    """-> Prepared"""
    classes = sets.find(task.train).classes

    def read(name, split, limit, lang="en"):
        found = sets.read(name, options.files, split, lang)
        rows = list(zip(found.first, found.second or found.first, found.labels))
        firsts, seconds, labels = zip(*some(rows, limit))
        seconds = tokenizer.encode(seconds) if found.second else [None] * len(firsts)
        pairs = zip(tokenizer.encode(firsts), seconds)
        special = tokenizer.special
        return [pair_row(*pair, special, options.max_length) for pair in pairs], labels

    def part(name, lang="en"):
        rows, golds = read(name, "test", options.eval_limit, lang)

        def judge(outputs):
            outputs = torch.stack(outputs)  # (N, classes), or (N, 1)
            found = outputs.argmax(1) if classes else outputs[:, 0]
            scores = {metric: measure(metric, found, golds) for metric in task.metrics}
            if classes:
                scores["majority"] = majority(golds)
            return scores
        return Part(rows, judge)

    def loss(outputs, golds, lengths):
        if classes:
            return F.cross_entropy(outputs, golds)
        return F.mse_loss(outputs[:, 0], golds.float())

    # Valid rows that were made of train rows are trained on: the whole published split is
    made = sets.made(task.train, options.files, "valid")
    rows, labels = read(task.train, "train+valid" if made else "train", options.limit)
    others = {}
    for lang in TESTED.get(task.test, ()):
        is_extra = task.test == "xnli" and lang not in XNLI
        if not is_extra or not sets.missing("xnli", options.files, "test", lang):
            others[lang] = part(task.test, lang)
    return Prepared(rows, torch.tensor(labels), len(classes) or 1, False, loss, part(task.train),
                    others)


# --------------------------------------------------------------------------------------------------
# Answers out of a text: the start and the end, over the tokens

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


FILES = {  # patterns of files: as corpora.download has them, or one JSONL
    "squad-train": ("squad/train-v1.1.json", "qa/squad_v1.1_train*.jsonl*"),
    "squad": ("squad/dev-v1.1.json", "qa/squad_v1.1_dev*.jsonl*"),
    "xquad": ("xquad/xquad.*.json", "qa/xquad.jsonl*"),
    "mlqa": ("mlqa/**/test-context-*-question-*.json", "qa/mlqa_test*.jsonl*",
             "mlqa/**/dev-context-*-question-*.json", "qa/mlqa_dev*.jsonl*"),
}


def read_questions(name, folder):
    """-> {"": questions of SQuAD}, {"de": of XQuAD}, {"de-ar": German contexts, Arabic questions,
    of MLQA}; BadInput without files."""
    paths = []
    for pattern in FILES[name]:
        paths = paths or sorted(Path(folder).glob(pattern))
    if not paths:
        name = name.partition("-")[0]
        raise BadInput(download.missing(name, folder) or f"{folder}/{name} is not whole: delete "
                       "it, and fetch it again")
    if "dev" in paths[0].name and name == "mlqa":
        print("note: mlqa: the published dev rows stand for test", file=sys.stderr)
    cells = {}
    for path in paths:
        for question in read_file(path):
            cell = {"mlqa": "-".join(question.languages), "xquad": question.languages[0]}
            cells.setdefault(cell.get(name, ""), []).append(question)
    return dict(sorted(cells.items()))


def read_file(path):
    """The questions of JSONL, or of SQuAD's JSON, whose name may have the languages: xquad.de.json,
    test-context-de-question-ar.json."""
    rows = []
    try:
        if path.suffix == ".json":
            codes = re.findall(r"(?:xquad\.|context-|question-)([a-z]{2})\b", path.name) or ["en"]
            for document in json.loads(path.read_text(encoding="utf-8"))["data"]:
                for paragraph in document["paragraphs"]:
                    more = {"context": paragraph["context"], "lang_context": codes[0],
                            "lang_question": codes[-1]}
                    rows += [question | more for question in paragraph["qas"]]
        else:
            rows = [json.loads(line) for _, line in read_lines(path) if line.strip()]
        return [question_of(row) for row in rows]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise BadInput(f"{path} is not questions with answers, as SQuAD's JSON or JSONL "
                       f"({type(error).__name__}: {error}): fetch it again") from None


def question_of(row):
    first = row["answers"][0]
    languages = [row.get(key, row.get("lang", "en")) for key in ("lang_context", "lang_question")]
    return Question(row["context"], row["question"], [answer["text"] for answer in row["answers"]],
                    first.get("start", first.get("answer_start")), tuple(languages))


def gold_span(question, places):
    """The first and the last token of the first answer, of tokens at places (first character, last
    + 1); (0, -1) if the answer is not where the file says."""
    end = question.start + len(question.answers[0])
    if question.context[question.start:end] != question.answers[0]:
        return 0, -1
    return (bisect_right(places, question.start, key=itemgetter(1)),
            bisect_left(places, end, key=itemgetter(0)) - 1)


def windows(count, room, stride):
    """Parts [first, last) of `count` tokens, at most `room` long, each with `stride` tokens of the
    one before; and (count,) the part in which a token has most context on its shorter side, of
    equals the longest part. [BERT's code]"""
    parts = [(first, min(first + room, count))
             for first in range(0, max(1, count - stride), room - stride)]
    token = np.arange(count)
    context = []
    for first, last in parts:
        inside = (first <= token) & (token < last)
        shorter = np.minimum(token - first, last - 1 - token)
        context.append(np.where(inside, shorter + 0.01 * (last - first), -1.0))
    return parts, np.argmax(context, 0)


class Window(NamedTuple):
    """A row [CLS] question [SEP] part of the context [SEP]."""
    row: np.ndarray  # its ids
    question: int    # its number
    at: int          # the place of the first context token in the row
    first: int       # that token's place in the context
    own: np.ndarray  # (n,) the context tokens that have most context here


def cut_windows(questions, tokenizer, longest):
    """-> (Windows, places of the tokens of each question's context)."""
    special = tokenizer.special
    contexts = list(dict.fromkeys(question.context for question in questions))
    encoded = tokenizer.inner.encode_batch(contexts, add_special_tokens=False)
    encoded = dict(zip(contexts, encoded))
    asked = tokenizer.encode([question.question for question in questions])
    made = []
    for number, (ids, question) in enumerate(zip(asked, questions)):
        ids = ids[:min(MAX_QUESTION, (longest - 3) // 3)]
        context = encoded[question.context].ids
        room = longest - 3 - len(ids)
        parts, best = windows(len(context), room, min(STRIDE, room // 2))
        for place, (first, last) in enumerate(parts):
            row = [special.cls, *ids, special.sep, *context[first:last], special.sep]
            own = best[first:last] == place
            made.append(Window(np.array(row), number, len(ids) + 2, first, own))
    return made, [encoded[question.context].offsets for question in questions]


def best_span(outputs, window):
    """Outputs (tokens of the row, 2) -> (score, first, last token in the context) of the best
    answer inside of the context that begins where the token has most context; -inf without one."""
    start, end = outputs[window.at:window.at + len(window.own)].numpy().T
    if not window.own.any():
        return -math.inf, 0, 0
    start = np.where(window.own, start, -math.inf)
    starts = np.argsort(-start, kind="stable")[:N_BEST]
    ends = np.argsort(-end, kind="stable")[:N_BEST]
    length = ends[None] - starts[:, None]                 # (starts, ends): one less
    score = start[starts][:, None] + end[ends][None]
    score = np.where((length >= 0) & (length < MAX_ANSWER), score, -math.inf)
    i, j = np.unravel_index(score.argmax(), score.shape)
    return score[i, j], window.first + starts[i], window.first + ends[j]


def judge_answers(made, questions, places, rules):
    """-> judge of F1 and exact match of the best answer of all windows of a question."""
    def judge(outputs):
        best = [(-math.inf, 0, 0)] * len(questions)
        for each, window in zip(outputs, made):
            span = best_span(each, window)
            if span[0] > best[window.question][0]:
                best[window.question] = span
        totals = Counter()
        for (score, first, last), question, place in zip(best, questions, places):
            text = ""
            if score > -math.inf:
                text = question.context[place[first][0]:place[last][1]].strip()
            totals.update(qa_scores(text, question.answers, question.languages[0], rules))
        return {name: 100 * totals[name] / len(questions) for name in ("f1", "exact")}
    return judge


def span_loss(outputs, targets, lengths):
    """Mean cross-entropy of the first and of the last token, each over the places of its row:
    (T, 2), (R, 2), R lengths -> ()."""
    padded = nn.utils.rnn.pad_sequence(outputs.split(lengths), True, -math.inf)  # (R, places, 2)
    return F.cross_entropy(padded, targets)


def answering(task, options, tokenizer):
    """-> Prepared; a training window without the whole answer points to [CLS]. [BERT's code]"""
    def part(questions):
        questions = some(questions, options.eval_limit)
        made, places = cut_windows(questions, tokenizer, options.max_length)
        judge = judge_answers(made, questions, places, task.rules)
        return Part([window.row for window in made], judge)

    tested = read_questions(task.test, options.files) if task.test else {}
    others = {cell: part(questions) for cell, questions in tested.items()}
    same = part(read_questions("squad", options.files)[""])
    questions = some(read_questions("squad-train", options.files)[""], options.limit)
    made, places = cut_windows(questions, tokenizer, options.max_length)
    spans = [gold_span(*pair) for pair in zip(questions, places)]
    rows = []
    targets = []
    for window in made:
        first, last = spans[window.question]
        if first > last:
            continue
        inside = window.first <= first and last < window.first + len(window.own)
        rows.append(window.row)
        shift = window.at - window.first
        targets.append((first + shift, last + shift) if inside else (0, 0))
    if not rows:
        raise BadInput("no training question has its answer where the file says: fetch the data "
                       "again")
    return Prepared(rows, torch.tensor(targets), 2, True, span_loss, same, others)


# --------------------------------------------------------------------------------------------------
# Command line


class FinetuneTask(NamedTuple):
    train: str              # the set whose English rows are trained on, and tested on too
    metrics: tuple[str, ...] = ("accuracy",)
    epochs: int = 3
    test: str = ""          # the set whose languages are tested at the end
    lr: float = 2e-5
    batch: int = 16
    max_length: int = 128
    prepare: Callable = classification
    rules: str = ""         # by which answers are compared


SQUAD = FinetuneTask("squad", ("f1", "exact"), 2, "", 3e-5, 12, 384, answering, "squad")
TASKS = {name: FinetuneTask(name, METRICS.get(name, ("accuracy",))) for name in sets.SETS} | {
    "xnli": FinetuneTask("mnli", epochs=2, test="xnli"),
    "pawsx": FinetuneTask("pawsx", test="pawsx"),
    "squad": SQUAD, "xquad": SQUAD._replace(test="xquad"),
    "mlqa": SQUAD._replace(test="mlqa", rules="mlqa")}
NARROW = 384  # at a paper's rate a narrower model hardly moves in so few steps
NARROW_RATE = 5e-4
ABOUT = command.about("finetune")
GIVEN = ("epochs", "lr", "batch", "max_length")  # of the task unless asked for


def parse(argv):
    parser = command.parser("python -m tasks finetune", __doc__)
    add = parser.add_argument
    count = command.positive(int)
    add("--task", required=True, help=f"one of {', '.join(TASKS)}")
    add("--limit", type=count, help="train on so many rows, the same ones for all seeds")
    add("--eval-limit", type=count, help="test on so many rows of each split and language")
    add("--untrained", action="store_true", help="also from fresh weights, as name/untrained")
    add("--epochs", type=count, help="[3; xnli, squad, xquad, mlqa 2]")
    add("--lr", type=command.positive(float),
        help=f"peak rate [2e-5; answers 3e-5; narrow models {NARROW_RATE:g}]")
    add("--batch", type=count, help="rows of a step [16; answers 12]")
    add("--max-length", type=count, help="tokens of a row [128; answers 384; at most the model's]")
    add("--seeds", type=comma_list, default=["82"],
        help="of several the mean, name/sd and name/seed_N are kept [82]")
    return parser.parse_args(argv)


def settle(options, config):
    """Check the options; fill in those not given from the task and the model's config -> the
    FinetuneTask."""
    if options.task not in TASKS:
        raise BadInput(f"task {options.task!r} is unknown: choose from {', '.join(TASKS)}"
                       f"{did_you_mean(options.task, TASKS)}")
    task = TASKS[options.task]
    if config.causal and config.pool == "cls" and task.prepare is classification:
        raise BadInput("the sentence vector of this causal model is its first state, which has "
                       "read nothing: take a run with --pool last or mean")
    most = config.max_positions
    task = task._replace(max_length=min(task.max_length, most),
                         lr=task.lr if config.width >= NARROW else NARROW_RATE)
    for name in GIVEN:
        if getattr(options, name) is None:
            setattr(options, name, getattr(task, name))
    if options.max_length > most:
        raise BadInput(f"--max-length {options.max_length}: rows have at most {most} tokens in "
                       "this model")
    if not all(seed.isdecimal() for seed in options.seeds or [""]):
        raise BadInput(f"--seeds {','.join(options.seeds)}: give whole numbers")
    options.device = usable_device(options.device)
    return task


def main(argv):
    """`finetune RUN`: numbers to stdout and RUN/finetune-TASK.json."""
    options = parse(argv)
    run = open_run(options.run)
    task = settle(options, run.model.config)
    prepared = task.prepare(task, options, run.tokenizer)
    results = {f"{options.task}/{name}": getattr(options, name) for name in GIVEN}
    results[f"{options.task}/train_rows"] = len(prepared.rows)
    starts = {"": partial(load, run.folder / "model.pt"),
              "/untrained": partial(Model, run.model.config)}
    for kind in starts if options.untrained else [""]:
        runs = {}
        for seed in options.seeds:
            found = one_run(starts[kind], prepared, task, options, int(seed))
            runs[seed] = {name + kind: value for name, value in found.items()}
        results |= over_seeds(runs)
    text = json.dumps(results, indent=1, allow_nan=False)
    write_atomic(run.folder / f"finetune-{options.task}.json", (text + "\n").encode())
    command.show(results, options.json, {name: Task(None, None, ABOUT) for name in TASKS})
