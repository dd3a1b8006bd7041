"""Fine-tune a run's encoder and test it, in other languages too.

    python -m tasks finetune out/x --task glue                 # or mrpc,stsb
    python -m tasks finetune out/x --task mlqa --seeds 82,23   # SQuAD, then 7 x 7 languages

All weights are trained, with one linear layer on the sentence vector, or on every token for the two
ends of an answer. It is tested after the last epoch. Defaults are BERT-JEPA's [sec. 4, code].
"""

import json
import math
import re
import statistics
import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import replace
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
from corpora.device import usable_device
from corpora.folder import write_results
from corpora.program import BadInput, Parser, comma_list, did_you_mean, flag_of
from corpora.text import read_lines
from evaluate import Task, finite, mean, open_run, read_rows, results_file, table
from model import Model, Packed, load
from tasks import metrics, sets
from tasks.answers import qa_scores
from tasks.probes import METRICS, headline_means, majority, measure
from train import TrainConfig, learning_rate, make_optimizer

# ---- the loop, which knows of no task


class Part(NamedTuple):
    """Rows to test on, and how."""
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
    sep: int               # the id of [SEP]


def pair_positions(packed, sep, shift):
    """Positions (T,), where those behind the first [SEP] of a row are moved on by `shift`: they are
    BERT's segment 1."""
    is_sep = (packed.tokens == sep).long()
    before = is_sep.cumsum(0) - is_sep              # (T,) how many are in front of each token
    starts = packed.cu_seqlens[:-1].long()          # (R,)
    lengths = packed.cu_seqlens.diff().long()       # (R,)
    of_row = before[starts].repeat_interleave(lengths)
    return packed.positions + shift * (before > of_row)


class Finetuned(nn.Module):
    """An encoder and one linear layer, on the vector of each row -> (R, outputs), or on each state
    -> (T, outputs)."""

    def __init__(self, encoder, outputs, on_tokens, sep, pool=None):
        super().__init__()
        self.encoder = encoder
        self.config = encoder.config
        self.on_tokens = on_tokens
        self.sep = sep
        self.pool = pool
        self.dropout = nn.Dropout(encoder.config.dropout)
        self.head = nn.Linear(encoder.config.width, outputs)
        nn.init.normal_(self.head.weight, std=0.02)  # as in BERT's code
        nn.init.zeros_(self.head.bias)

    def states(self, packed):
        """The states of all tokens, (T, D)."""
        if self.config.pair == "segments":
            positions = pair_positions(packed, self.sep, self.config.max_positions)
            packed = replace(packed, positions=positions)
        return self.encoder(packed)

    def forward(self, packed):
        states = self.states(packed)
        if not self.on_tokens:
            states = self.dropout(self.encoder.pool(states, packed, self.pool))
        return self.head(states)


def predict(model, rows):
    """Outputs of the rows, on the CPU, one tensor each: (outputs,), or (tokens, outputs)."""
    def read(packed):
        outputs = model(packed).cpu()
        return outputs.split(packed.cu_seqlens.diff().tolist()) if model.on_tokens else outputs

    return finite(read_rows(model, rows, read, 8192))


def fit(model, prepared, task, seed):
    """Train all weights, in place."""
    rng = np.random.default_rng(seed)
    device = model.head.weight.device
    lengths = np.array([len(row) for row in prepared.rows])
    starts = range(0, len(lengths), task.batch)
    config = TrainConfig(lr=task.lr, schedule="linear", weight_decay=0.01, warmup=0.1,
                         steps=task.epochs * len(starts))
    optimizer = make_optimizer(model, config)
    model.train()
    step = 0
    for epoch in range(task.epochs):
        order = rng.permutation(len(lengths))
        total = 0.0
        for start in tqdm(starts, leave=False, disable=None):
            batch = order[start:start + task.batch]
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config)
            packed = Packed.of([prepared.rows[i] for i in batch], causal=model.config.causal)
            outputs = model(packed.to(device))
            targets = prepared.targets[batch].to(device)
            loss = prepared.loss(outputs, targets, lengths[batch].tolist())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            step += 1
        print(f"seed {seed}, epoch {epoch + 1}: loss {total / len(starts):.4f}", file=sys.stderr)


def one_run(encoder, prepared, task, options, seed):
    """Fine-tune and test once -> {"task/metric" or "task/metric/detail": number}."""
    torch.manual_seed(seed)
    model = Finetuned(encoder(), prepared.outputs, prepared.on_tokens, prepared.sep, options.pool)
    model.to(options.device)
    fit(model, prepared, task, seed)
    same = prepared.same.judge(predict(model, prepared.same.rows))
    found = {f"{task.train}/{name}": value for name, value in same.items()}
    others = {detail: part.judge(predict(model, part.rows))
              for detail, part in prepared.others.items()}
    for name in same if others else ():
        metric = f"{task.test}/{name}"
        values = {detail: scores[name] for detail, scores in others.items()}
        found |= {f"{metric}/{detail}": value for detail, value in values.items()}
        found |= {metric + kind: value for kind, value in means(values).items()}
    return found


TESTED = {"xnli": "ar bg de el en es fr hi ru sw th tr ur vi zh".split(), "mnli-mm": ["en"]}


def means(values):
    """{"de" or, of a context and a question, "de-ar": number} -> means. "" is of all; of MLQA's
    matrix there are also /xlt, of the diagonal, and /gxlt, of the rest [Lewis et al. 2020, sec. 5].
    """
    groups = {"": values}
    same = {key: values[key] for key in values if len(set(key.split("-"))) == 1}
    if len(same) < len(values):
        groups["/xlt"] = same
        groups["/gxlt"] = {key: values[key] for key in values if key not in same}
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
    """`limit` items in order, a random choice that is always the same; or all."""
    return [items[i] for i in sorted(np.random.default_rng(0).permutation(len(items))[:limit])]


# ---- classification: one linear layer on the sentence vector


def between(run):
    """The ids between two texts: [SEP], twice in RoBERTa and XLM-R."""
    sep = run.tokenizer.special.sep
    return [sep, sep] if run.model.config.pair == "sep-sep" else [sep]


def pair_row(first, second, special, middle, longest):
    """Ids of one text (second is None) or two -> [CLS] a [SEP] or [CLS] a middle b [SEP], where the
    longer text is cut first."""
    if second is None:
        return np.array([special.cls, *first[:longest - 2], special.sep])
    room = longest - 2 - len(middle)
    left = first[:max(room - len(second), (room + 1) // 2)]
    right = second[:room - len(left)]
    return np.array([special.cls, *left, *middle, *right, special.sep])


def classification(task, options, run):
    """Rows of one text or two, with their classes or scores -> Prepared."""
    classes = sets.find_set(task.train).classes
    tokenizer = run.tokenizer
    special = tokenizer.special

    def read(name, split, limit, lang="en"):
        found = sets.read_set(name, options.files, split, lang)
        rows = list(zip(found.first, found.second or found.first, found.labels))
        firsts, seconds, labels = zip(*some(rows, limit))
        seconds = tokenizer.encode(seconds) if found.second else [None] * len(firsts)
        pairs = zip(tokenizer.encode(firsts), seconds)
        middle = between(run)
        return [pair_row(*pair, special, middle, task.max_length) for pair in pairs], labels

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

    # Where no valid rows were published, the whole published train split is trained on.
    made = sets.made(task.train, options.files, "valid")
    rows, labels = read(task.train, "train+valid" if made else "train", options.limit)
    others = {}
    for lang in TESTED.get(task.test, ()):
        # One can do without MNLI's other domains, which only the whole download has.
        if task.test != "mnli-mm" or not sets.missing_rows(task.test, options.files):
            others[lang] = part(task.test, lang)
    return Prepared(rows, torch.tensor(labels), len(classes) or 1, False, loss, part(task.train),
                    others, special.sep)


# ---- answers out of a text: a layer finds their first and last token

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


# {name: patterns of its files}, as corpora.download leaves them, or one JSONL.
FILES = {
    "squad-train": ("squad/train-v1.1.json", "qa/squad_v1.1_train*.jsonl*"),
    "squad": ("squad/dev-v1.1.json", "qa/squad_v1.1_dev*.jsonl*"),
    "mlqa": ("mlqa/**/test-context-*-question-*.json", "qa/mlqa_test*.jsonl*",
             "mlqa/**/dev-context-*-question-*.json", "qa/mlqa_dev*.jsonl*"),
}


def read_questions(name, folder):
    """The questions of a set -> {"de-ar": questions in Arabic about German contexts}; BadInput
    without files."""
    paths = []
    for pattern in FILES[name]:
        paths = paths or sorted(Path(folder).glob(pattern))
    cells = {}
    for path in paths:
        for question in read_file(path):
            cells.setdefault("-".join(question.languages), []).append(question)
    if not cells:
        dataset = name.partition("-")[0]
        raise BadInput(download.missing(dataset, folder) or f"{folder} has no question of {name}: "
                       "fetch it again")
    if "dev" in paths[0].name and name == "mlqa":
        print("note: mlqa: the published dev rows stand for test", file=sys.stderr)
    return dict(sorted(cells.items()))


def read_file(path):
    """The questions of a JSONL file, or of SQuAD's JSON, whose name may have the languages, as
    test-context-de-question-ar.json."""
    rows = []
    try:
        if path.suffix == ".json":
            codes = re.findall(r"(?:context-|question-)([a-z]{2})\b", path.name) or ["en"]
            for document in json.loads(path.read_text(encoding="utf-8"))["data"]:
                for paragraph in document["paragraphs"]:
                    more = {"context": paragraph["context"], "lang_context": codes[0],
                            "lang_question": codes[-1]}
                    rows += [question | more for question in paragraph["qas"]]
        else:
            rows = [json.loads(line) for _, line in read_lines(path) if line.strip()]
        return [question_of(row) for row in rows]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(f"{path} is not questions with answers, as SQuAD's JSON or JSONL "
                       f"({type(error).__name__}: {error}): fetch it again") from None


def question_of(row):
    first = row["answers"][0]
    languages = [row.get(key, row.get("lang", "en")) for key in ("lang_context", "lang_question")]
    answers = [answer["text"] for answer in row["answers"]]
    start = int(first.get("start", first.get("answer_start")))
    return Question(row["context"], row["question"], answers, start, tuple(languages))


def gold_span(question, places):
    """The first and the last token of the first answer, among tokens at places (first character,
    last + 1); (0, -1) if the answer is not where the file says."""
    end = question.start + len(question.answers[0])
    if question.context[question.start:end] != question.answers[0]:
        return 0, -1
    return (bisect_right(places, question.start, key=itemgetter(1)),
            bisect_left(places, end, key=itemgetter(0)) - 1)


class Window(NamedTuple):
    """A row of two texts: the question and a part of the context."""
    row: np.ndarray  # its ids
    question: int    # its number
    at: int          # the place of the first context token in the row
    first: int       # that token's place in the context
    count: int       # context tokens in the row


def cut_windows(questions, tokenizer, middle, longest):
    """Cut the contexts of questions into Windows that fit into a row -> the Windows, and the places
    of the tokens of each question's context."""
    special = tokenizer.special
    most = longest - 2 - len(middle)
    contexts = list(dict.fromkeys(question.context for question in questions))
    encoded = tokenizer.inner.encode_batch(contexts, add_special_tokens=False)
    encoded = dict(zip(contexts, encoded))
    asked = tokenizer.encode([question.question for question in questions])
    made = []
    for number, (ids, question) in enumerate(zip(asked, questions)):
        start = [special.cls, *ids[:min(MAX_QUESTION, most // 3)], *middle]
        context = encoded[question.context].ids
        room = longest - 1 - len(start)
        stride = min(STRIDE, room // 2)
        for first in range(0, max(1, len(context) - stride), room - stride):
            last = min(first + room, len(context))
            row = np.array([*start, *context[first:last], special.sep])
            made.append(Window(row, number, len(start), first, last - first))
    return made, [encoded[question.context].offsets for question in questions]


def best_span(outputs, window):
    """Outputs (tokens of the row, 2) -> (score, first, last token in the context) of the best
    answer inside of the context; -inf without one. [BERT-JEPA's code]"""
    start, end = outputs[window.at:window.at + window.count].numpy().T
    starts = np.argsort(-start, kind="stable")[:N_BEST]
    ends = np.argsort(-end, kind="stable")[:N_BEST]
    length = ends[None] - starts[:, None]  # (starts, ends) tokens, less one
    score = start[starts][:, None] + end[ends][None]
    score = np.where((length >= 0) & (length < MAX_ANSWER), score, -math.inf)
    if not score.size:
        return -math.inf, 0, 0
    i, j = np.unravel_index(score.argmax(), score.shape)
    return score[i, j], window.first + starts[i], window.first + ends[j]


def judge_answers(made, questions, places, rules):
    """-> a judge of outputs: F1 and exact match of the best answer among a question's windows."""
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
    """Mean cross-entropy of the first and of the last token, each among the places of its row:
    (T, 2), (R, 2), R lengths -> ()."""
    padded = nn.utils.rnn.pad_sequence(outputs.split(lengths), True, -math.inf)  # (R, places, 2)
    return F.cross_entropy(padded, targets)


def answering(task, options, run):
    """Questions about contexts -> Prepared. A training window without the whole answer points to
    [CLS]. [BERT-JEPA's code]"""
    cut = partial(cut_windows, tokenizer=run.tokenizer, middle=between(run),
                  longest=task.max_length)

    def part(questions):
        questions = some(questions, options.eval_limit)
        made, places = cut(questions)
        judge = judge_answers(made, questions, places, task.rules)
        return Part([window.row for window in made], judge)

    tested = read_questions(task.test, options.files) if task.test else {}
    others = {cell: part(questions) for cell, questions in tested.items()}
    same = part(sum(read_questions("squad", options.files).values(), []))
    questions = sum(read_questions("squad-train", options.files).values(), [])
    questions = some(questions, options.limit)
    made, places = cut(questions)
    spans = [gold_span(*pair) for pair in zip(questions, places)]
    rows = []
    targets = []
    for window in made:
        first, last = spans[window.question]
        if first > last:
            continue
        inside = window.first <= first and last < window.first + window.count
        rows.append(window.row)
        shift = window.at - window.first
        targets.append((first + shift, last + shift) if inside else (0, 0))
    if not rows:
        raise BadInput("no training question has its answer where the file says: fetch the data "
                       "again")
    return Prepared(rows, torch.tensor(targets), 2, True, span_loss, same, others,
                    run.tokenizer.special.sep)


# ---- command line


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
    "mnli": FinetuneTask("mnli", test="mnli-mm"),
    "xnli": FinetuneTask("mnli", epochs=2, test="xnli"),
    "squad": SQUAD,
    "mlqa": SQUAD._replace(test="mlqa", rules="mlqa")}
GLUE = ["mnli", "qnli", "qqp", "sst2", "mrpc", "stsb"]
MEAN_OF = ["mnli-mm/accuracy", *(f"{name}/accuracy" for name in GLUE[:-1]), "stsb/pearson"]
# At a paper's rate a narrower model than this hardly moves in so few steps.
NARROW = 384
NARROW_RATE = 5e-4
LEAST = 8  # tokens of a row: two texts, and what stands around them
ABOUT = metrics.known_metrics("finetune")
# Flags whose defaults are the task's.
GIVEN = ("epochs", "lr", "batch", "max_length")


def parse_flags(argv):
    parser = Parser("python -m tasks finetune", __doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run, such as out/mexma")
    add("--files", default="data", help="folder of the published sets [data]")
    add("--device", help="cpu, cuda, cuda:1 [cuda if there is one]")
    add("--json", action="store_true", help="print every number, as one JSON object")
    add("--task", type=comma_list, required=True, help=f"some of glue, {', '.join(TASKS)}")
    add("--pool", choices=("cls", "mean", "max", "last"), help="sentence vector [the model's]")
    add("--limit", type=int, help="train on so many rows, the same of all seeds")
    add("--eval-limit", type=int, help="test on so many rows of each language")
    add("--untrained", action="store_true", help="also from fresh weights: name/untrained")
    add("--epochs", type=int, help="[3; xnli, squad, mlqa 2]")
    add("--lr", type=float,
        help=f"peak rate [2e-5; answers 3e-5; narrow models {NARROW_RATE:g}]")
    add("--batch", type=int, help="rows of a step [16; answers 12]")
    add("--max-length", type=int, help="tokens of a row [128; answers 384]")
    add("--seeds", type=comma_list, default=["82"], help="of several: mean, /sd and /seed_N [82]")
    add("--out", help="JSON file for the numbers [they are only printed]")
    options = parser.parse_args(argv)
    if not options.task or not all(seed.isdecimal() for seed in options.seeds or [""]):
        raise BadInput(f"--task {','.join(options.task)} --seeds {','.join(options.seeds)}: give "
                       "names of tasks, and whole numbers")
    for name in (*GIVEN, "limit", "eval_limit"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise BadInput(f"{flag_of(name)} {value}: it must be a number above 0")
    if "glue" in options.task:
        options.task = list(dict.fromkeys([*options.task, *GLUE]))
        options.task.remove("glue")
    options.device = usable_device(options.device)
    return options


def chosen_task(name, options, config):
    """The FinetuneTask of a name, with what was asked for. BadInput if the model cannot do it."""
    if name not in TASKS:
        raise BadInput(f"task {name!r} is unknown: choose from glue, {', '.join(TASKS)}"
                       f"{did_you_mean(name, TASKS)}")
    task = TASKS[name]
    pooled = task.prepare is classification
    if pooled and config.causal and (options.pool or config.pool) == "cls":
        raise BadInput("the sentence vector of this causal model is its first state, which has "
                       "read nothing: choose --pool last or mean")
    most = config.max_positions
    task = task._replace(max_length=min(task.max_length, config.max_tokens or most),
                         lr=task.lr if config.width >= NARROW else NARROW_RATE)
    asked = {name: getattr(options, name) for name in GIVEN}
    task = task._replace(**{name: value for name, value in asked.items() if value is not None})
    if not LEAST <= task.max_length <= most:
        raise BadInput(f"--max-length {task.max_length}: in this model rows have {LEAST} to {most} "
                       "tokens")
    return task


def fine_tune(name, task, prepared, options, run):
    """All seeds of a task -> {"task/metric" or "task/metric/detail": number}."""
    results = {f"{name}/{given}": getattr(task, given) for given in GIVEN}
    results[f"{name}/train_rows"] = len(prepared.rows)
    starts = {"": partial(load, run.folder / "model.pt"),
              "/untrained": partial(Model, run.model.config)}
    for kind in starts if options.untrained else [""]:
        runs = {}
        for seed in options.seeds:
            found = one_run(starts[kind], prepared, task, options, int(seed))
            runs[seed] = {name + kind: value for name, value in found.items()}
        results |= over_seeds(runs)
    return results


def main(argv):
    """Fine-tune on every task, and print its numbers as it ends; with --out they are kept too."""
    options = parse_flags(argv)
    path = results_file(options, is_other=True)
    run = open_run(options.run)
    tasks = {name: chosen_task(name, options, run.model.config) for name in options.task}
    # All tasks are prepared before the first is trained, so that what is missing is said at once.
    prepared = {name: task.prepare(task, options, run) for name, task in tasks.items()}
    asked = (*GIVEN, "pool", "limit", "eval_limit", "seeds")
    values = {name: getattr(options, name) for name in asked}
    label = ", ".join(f"{name} {value}" for name, value in values.items() if value)
    about = dict.fromkeys(["glue", *TASKS], Task(None, None, ABOUT))

    def tell(found):
        print(json.dumps(found) if options.json else table(found, None, about))
        if path:
            write_results(run.folder, path, found, label)

    results = {}
    for name, task in tasks.items():
        found = fine_tune(name, task, prepared[name], options, run)
        tell(found)
        results |= found
    means = headline_means(results, MEAN_OF)
    if means and len(tasks) > 1:
        tell({f"glue/{name}": value for name, value in means.items()})
