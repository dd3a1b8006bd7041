"""Fine-tune a run's encoder on a data set and test it, also in other languages.

    python -m tasks finetune out/x --task glue      # or mrpc,stsb
    python -m tasks finetune out/x --task mlqa      # trains on SQuAD, tests 7 x 7 languages

All weights are trained, with one linear layer on the sentence embedding or, for answers, on every
token. The model is tested after the last epoch. Defaults are BERT-JEPA's [sec. 4, code].
"""

import json
import math
import sys
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import evaluate
from common import BadInput, Parser, comma_list, did_you_mean, shown, usable_device, warn
from evaluate import map_batches, mean
from model import Model, Packed, load
from tasks import sets
from tasks.probes import METRICS, headline_means, majority, measure
from tasks.questions import Prepared, answering, between, sample
from train import TrainConfig, learning_rate, make_optimizer

# ---- the loop, the same for all tasks


class Finetuned(nn.Module):
    """An encoder and one linear layer, on the embedding of each row -> (R, outputs), or on each
    hidden state -> (T, outputs)."""

    def __init__(self, encoder, outputs, on_tokens, pool=None):
        super().__init__()
        self.encoder = encoder
        self.config = encoder.config
        self.on_tokens = on_tokens
        self.pool = pool
        self.dropout = nn.Dropout(encoder.config.dropout)
        self.head = nn.Linear(encoder.config.width, outputs)
        nn.init.normal_(self.head.weight, std=0.02)  # as in BERT's code
        nn.init.zeros_(self.head.bias)

    def forward(self, packed):
        states = self.encoder(packed)
        if not self.on_tokens:
            states = self.dropout(self.encoder.pool(states, packed, self.pool))
        return self.head(states)


def predict(model, rows):
    """Return the outputs of each row on the CPU: (outputs,), or (tokens, outputs)."""
    def read(packed):
        outputs = model(packed).cpu()
        return outputs.split(packed.cu_seqlens.diff().tolist()) if model.on_tokens else outputs

    return map_batches(model, rows, read, 8192)


def fit(model, prepared, settings, seed):
    """Train all weights, in place."""
    rng = np.random.default_rng(seed)
    device = model.head.weight.device
    lengths = np.array([len(row) for row in prepared.rows])
    starts = range(0, len(lengths), settings.batch)
    config = TrainConfig(lr=settings.lr, schedule="linear", weight_decay=0.01, warmup=0.1,
                         steps=settings.epochs * len(starts))
    optimizer = make_optimizer(model, config)
    model.train()
    step = 0
    for epoch in range(settings.epochs):
        order = rng.permutation(len(lengths))
        total = 0.0
        for start in tqdm(starts, leave=False, disable=None):
            batch = order[start:start + settings.batch]
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


def run_once(encoder, prepared, settings, flags):
    """Fine-tune and test an encoder. Return {"set/metric" or "set/metric/language": number}."""
    torch.manual_seed(flags.seed)
    model = Finetuned(encoder(), prepared.outputs, prepared.on_tokens, flags.pool)
    model.to(flags.device)
    fit(model, prepared, settings, flags.seed)
    found = {}  # {"set/metric": {language: number}}
    for (name, language), (rows, judge) in prepared.tests.items():
        for metric, value in judge(predict(model, rows)).items():
            found.setdefault(f"{name}/{metric}", {})[language] = value
    results = {}
    for metric, values in found.items():
        results |= {metric + kind: value for kind, value in means(values).items()}
        results |= {f"{metric}/{language}": value for language, value in values.items() if language}
    return results


def means(values):
    """Return the mean "" of {language or "context-question" languages: number}; of MLQA's matrix
    also "/xlt", the diagonal, and "/gxlt", the rest [Lewis et al. 2020, sec. 5]."""
    same = [value for key, value in values.items() if len(set(key.split("-"))) == 1]
    others = [value for key, value in values.items() if len(set(key.split("-"))) > 1]
    found = {"": mean(values.values())}
    return found | ({"/xlt": mean(same), "/gxlt": mean(others)} if same and others else {})


# ---- classification and scores

XNLI = "ar bg de el en es fr hi ru sw th tr ur vi zh".split()


def pair_row(first, second, special, middle, longest):
    """Return the row of one text, [CLS] a [SEP], or of two, [CLS] a middle b [SEP]. The longer text
    is truncated first."""
    if second is None:
        return np.array([special.cls, *first[:longest - 2], special.sep])
    room = longest - 2 - len(middle)
    left = first[:max(room - len(second), (room + 1) // 2)]
    right = second[:room - len(left)]
    return np.array([special.cls, *left, *middle, *right, special.sep])


def classification(name, settings, flags, opened):
    """Prepare texts, or pairs of them, with classes or scores."""
    trained = {"xnli": "mnli"}.get(name, name)
    classes = sets.CLASSES[trained]
    encode = opened.tokenizer.encode
    middle = between(opened)

    def read(name, split, limit, lang="en"):
        found = sets.read_set(name, flags.files, split, lang)
        rows = list(zip(found.first, found.second or found.first, found.labels))
        firsts, seconds, labels = zip(*sample(rows, limit))
        seconds = encode(seconds) if found.second else [None] * len(firsts)
        pairs = list(zip(encode(firsts), seconds))
        rows = [pair_row(*pair, opened.tokenizer.special, middle, settings.max_length)
                for pair in pairs]
        kept = sum(map(len, rows)) - sum(len(middle) + 2 if b is not None else 2 for _, b in pairs)
        total = sum(len(text) for pair in pairs for text in pair if text is not None)
        if kept < total:
            warn(f"{name}: {total - kept:,} of {total:,} tokens are cut off by --max-length "
                 f"{settings.max_length}")
        return rows, labels

    def test(name, lang="en"):
        rows, golds = read(name, "test", flags.eval_limit, lang)

        def judge(outputs):
            outputs = torch.stack(outputs)  # (N, classes), or (N, 1)
            found = outputs.argmax(1) if classes else outputs[:, 0]
            scores = {metric: measure(metric, found, golds)
                      for metric in METRICS.get(trained, ("accuracy",))}
            return scores | ({"majority": majority(golds)} if classes else {})
        return rows, judge

    def loss(outputs, golds, lengths):
        if classes:
            return F.cross_entropy(outputs, golds)
        return F.mse_loss(outputs[:, 0], golds.float())

    # Validation rows that were taken from the training table are trained on here.
    has_valid = sets.find_file(trained, flags.files, "valid")
    rows, labels = read(trained, "train" if has_valid else "train+valid", flags.limit)
    tests = {(trained, ""): test(trained)}
    if name == "xnli":
        tests |= {(name, lang): test(name, lang) for lang in XNLI}
    if name == "mnli" and sets.find_file("mnli-mm", flags.files, "test"):
        tests["mnli-mm", "en"] = test("mnli-mm")
    return Prepared(rows, torch.tensor(labels), classes or 1, False, loss, tests)


# ---- command line

TASKS = {name: classification for name in sets.CLASSES} | {"squad": answering, "mlqa": answering}
GLUE = ["mnli", "qnli", "qqp", "sst2", "mrpc", "stsb"]
MEAN_OF = ["mnli-mm/accuracy", *(f"{name}/accuracy" for name in GLUE[:-1]), "stsb/pearson"]
# With the paper's learning rate a narrower model than this hardly changes in so few steps.
NARROW = 384
NARROW_LR = 5e-4


class Settings(NamedTuple):
    epochs: int = 3
    lr: float = 2e-5
    batch: int = 16
    max_length: int = 128


def resolve_settings(name, flags, config):
    """Return the Settings of a task: the paper's, or those of the flags. Raises BadInput."""
    if name not in TASKS:
        raise BadInput(f"there is no task {shown(name)!r} among glue, {', '.join(TASKS)}"
                       f"{did_you_mean(name, TASKS)}")
    is_pooled = TASKS[name] is classification
    if is_pooled and config.causal and (flags.pool or config.pool) == "cls":
        raise BadInput("this causal model would be read at its first token, which attends to no "
                       "other: choose --pool last or mean")
    settings = Settings(2 if name == "xnli" else 3) if is_pooled else Settings(2, 3e-5, 12, 384)
    if config.width < NARROW:
        settings = settings._replace(lr=NARROW_LR)
    given = {name: getattr(flags, name) for name in Settings._fields}
    settings = settings._replace(**{name: x for name, x in given.items() if x is not None})
    longest = min(settings.max_length, config.max_tokens or config.max_positions)
    return settings._replace(max_length=longest)


def parse_flags(words):
    parser = Parser("python -m tasks finetune", __doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run, such as out/mexma")
    add("--task", type=comma_list, required=True, help=f"some of glue, {', '.join(TASKS)}")
    add("--files", default="data", help="folder of the data sets [data]")
    add("--pool", choices=("cls", "mean", "max", "last"), help="pooling [the model's]")
    add("--limit", type=int, help="number of training rows, the same for all seeds")
    add("--eval-limit", type=int, help="number of test rows of each language")
    add("--untrained", action="store_true", help="also start from random weights: name/untrained")
    add("--epochs", type=int, help="number of epochs [3; xnli, squad, mlqa 2]")
    add("--lr", type=float, help="peak learning rate [2e-5; squad, mlqa 3e-5; models narrower than "
        f"{NARROW} {NARROW_LR:g}]")
    add("--batch", type=int, help="rows per step [16; squad, mlqa 12]")
    add("--max-length", type=int, help="tokens of a row [128; squad, mlqa 384]")
    add("--seed", type=int, default=82, help="random seed for the new layer and batches [82]")
    add("--device", help="cpu, cuda or cuda:1 [cuda if there is a GPU]")
    add("--json", action="store_true", help="print every number, as one JSON object per task")
    add("--out", help="JSON file for the numbers [they are only printed]")
    flags = parser.parse_args(words)
    # A row of 8 tokens has room for two texts and what is around them.
    lowest = dict(epochs=1, batch=1, max_length=8, limit=1, eval_limit=1, lr=1e-9)
    for name, least in lowest.items():
        value = getattr(flags, name)
        if value is not None and not least <= value < math.inf:
            raise BadInput(f"--{name.replace('_', '-')} {value}: it must be at least {least}")
    if "glue" in flags.task:
        flags.task = list(dict.fromkeys([*flags.task, *GLUE]))
        flags.task.remove("glue")
    flags.device = usable_device(flags.device)
    return flags


def main(words):
    flags = parse_flags(words)
    opened = evaluate.open_run(flags.run)
    settings = {name: resolve_settings(name, flags, opened.model.config) for name in flags.task}
    given = {name: getattr(flags, name) for name in (*Settings._fields, "pool", "limit",
                                                     "eval_limit", "seed")}
    label = "fine-tuned, " + ", ".join(f"{name} {value}" for name, value in given.items() if value)
    path = evaluate.results_file(flags, label) if flags.out else None
    # Prepare all tasks before training the first, so that a missing file is reported at once.
    prepared = {name: TASKS[name](name, settings[name], flags, opened) for name in flags.task}
    encoders = {"": partial(load, opened.folder / "model.pt")}
    if flags.untrained:
        encoders["/untrained"] = partial(Model, opened.model.config)

    def report(results):
        print(json.dumps(results) if flags.json else evaluate.table(results))
        if path:
            evaluate.write_results(path, results, label, opened.model_hash)

    every = {}
    for name in flags.task:
        results = {f"{name}/{key}": value for key, value in settings[name]._asdict().items()}
        results[f"{name}/train_rows"] = len(prepared[name].rows)
        for kind, encoder in encoders.items():
            found = run_once(encoder, prepared[name], settings[name], flags)
            results |= {metric + kind: value for metric, value in found.items()}
        report(results)
        every |= results
    total = headline_means(every, MEAN_OF)
    if total and len(flags.task) > 1:
        report({f"glue/{name}": value for name, value in total.items()})
