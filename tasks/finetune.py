"""Fine-tune a run's encoder on a data set and test it, also in other languages.

All weights are trained, with one linear layer on the sentence embedding or, for answers, on every
token, and tested after the last epoch. Defaults are BERT-JEPA's [sec. 5, code].
"""

import json
import math
import sys
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from base.common import (
    AtLeast0,
    AtLeast1,
    BadInput,
    Checked,
    Parser,
    Positive,
    add_flags,
    comma_list,
    did_you_mean,
    shown,
    usable_device,
    usable_precision,
    warn,
)
from base.metrics import majority, mean
from base.optimizer import learning_rate, make_optimizer, set_learning_rate
from data import Packed, pinned, to_device
from evaluate import map_batches
from harness import runs, screen
from harness.settings import TrainConfig
from harness.weights import load
from model import POOLS, Model, set_attention
from tasks import sets
from tasks.probes import METRICS, headline_mean, measure
from tasks.questions import Prepared, answering, between, sample


@dataclass(frozen=True)
class Settings(Checked):
    epochs: AtLeast1 = 3  # number of epochs; xnli and mlqa: 2
    lr: Positive = 2e-5  # peak learning rate; mlqa: 3e-5; models narrower than 384: 5e-4
    batch: AtLeast1 = 16  # rows per step; mlqa: 12
    max_length: int = 128  # tokens of a row; mlqa: 384
    limit: AtLeast0 = 0  # maximum number of training rows, the same for all seeds; 0: all
    eval_limit: AtLeast0 = 0  # maximum number of test rows of each language; 0: all
    seed: AtLeast0 = 82  # random seed of the new layer and of the batches


# ---- the loop, the same for all tasks


class Finetuned(nn.Module):
    """An encoder and a linear layer on the embedding of each row, -> (R, outputs), or on each
    hidden state, -> (T, outputs)."""

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


def loss_of(outputs, targets, packed):
    """Return the mean cross-entropy of classes, or of the first and the last token of an answer
    among those of its row, (T, 2), (R, 2) -> (); of scores the squared error."""
    if targets.ndim == 2:  # (T, 2) -> (R, longest row, 2)
        rows = outputs.split(packed.cu_seqlens.diff().tolist())
        outputs = nn.utils.rnn.pad_sequence(rows, True, -math.inf)
    if targets.is_floating_point():
        return F.mse_loss(outputs[:, 0], targets)
    return F.cross_entropy(outputs, targets)


def fit(model, prepared, settings):
    """Train all weights, in place."""
    rng = np.random.default_rng(settings.seed)
    device = model.head.weight.device
    # In float32 the matmuls of a GPU are slowest. The numbers of a CPU stay those of float32.
    precision = usable_precision("auto", device) if device.type == "cuda" else "float32"
    dtype = getattr(torch, precision)
    layouts = set_attention(model, "auto", device, dtype.itemsize)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    starts = range(0, len(prepared.rows), settings.batch)
    config = TrainConfig(lr=settings.lr, schedule="linear", weight_decay=0.01, warmup=0.1,
                         steps=settings.epochs * len(starts))
    optimizer = make_optimizer(model, config)
    model.train()
    step = 0
    for epoch in range(settings.epochs):
        order = rng.permutation(len(prepared.rows))
        total = 0.0
        for start in tqdm(starts, leave=False, disable=None):
            batch = order[start:start + settings.batch]
            set_learning_rate(optimizer, learning_rate(step, config))
            packed = Packed.of([prepared.rows[i] for i in batch], causal=model.config.causal)
            packed.make_plans(layouts, device)
            inputs, targets = to_device(pinned((packed, prepared.targets[batch]), device), device)
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                loss = loss_of(model(inputs), targets, packed)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            total += loss.detach()
            step += 1
        print(f"epoch {epoch + 1}: loss {total / len(starts):.4f}", file=sys.stderr)


def run_once(encoder, prepared, settings, flags):
    """Fine-tune and test an encoder. Return {"set/metric" or "set/metric/language": number}."""
    torch.manual_seed(settings.seed)
    on_tokens = prepared.targets.ndim == 2
    model = Finetuned(encoder(), prepared.outputs, on_tokens, flags.pool).to(flags.device)
    fit(model, prepared, settings)

    def read(packed):
        """Return the outputs of each row: (outputs,), or (tokens, outputs)."""
        outputs = model(packed).cpu()
        return outputs.split(packed.cu_seqlens.diff().tolist()) if on_tokens else outputs

    found = {}  # {"set/metric": {language: number}}
    for (name, language), (rows, judge) in prepared.tests.items():
        for metric, value in judge(map_batches(model, rows, read, 8192)).items():
            found.setdefault(f"{name}/{metric}", {})[language] = value
    results = {}
    for metric, values in found.items():
        results[metric] = mean(values.values())
        results |= {f"{metric}/{language}": value for language, value in values.items() if language}
        # Of MLQA's matrix also the means of its diagonal, and of the rest [Lewis et al. 2020].
        for kind, count in (("xlt", 1), ("gxlt", 2)):
            cells = [value for pair, value in values.items()
                     if "-" in pair and len(set(pair.split("-"))) == count]
            results |= {f"{metric}/{kind}": mean(cells)} if cells else {}
    return results


# ---- classification and scores

XNLI = "ar bg de el en es fr hi ru sw th tr ur vi zh".split()


def pair_row(special, middle, longest, first, second=None):
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
    trained = "mnli" if name == "xnli" else name
    classes = sets.CLASSES[trained]
    make_row = partial(pair_row, opened.tokenizer.special, between(opened))

    def read(name, split, limit, lang="en"):
        first, second, labels = zip(*sample(sets.read_set(name, flags.files, split, lang), limit))
        texts = [first] if None in second else [first, second]
        ids = list(zip(*map(opened.tokenizer.encode, texts)))
        rows = [make_row(settings.max_length, *one) for one in ids]
        whole = [make_row(sys.maxsize, *one) for one in ids]
        if truncated := sum(len(a) < len(b) for a, b in zip(rows, whole)):
            warn(f"{name}: {truncated:,} of {len(rows):,} rows are longer than --max-length "
                 f"{settings.max_length} and were truncated")
        return rows, labels

    def test(name, lang="en"):
        rows, golds = read(name, "test", settings.eval_limit, lang)

        def judge(outputs):
            outputs = torch.stack(outputs)  # (N, classes), or (N, 1)
            found = outputs.argmax(1) if classes else outputs[:, 0]
            metrics = METRICS.get(trained, ("accuracy",))
            scores = {metric: measure(metric, found, golds) for metric in metrics}
            return scores | ({"majority": majority(golds)} if classes else {})
        return rows, judge

    # Validation rows that were taken from the training table are trained on here.
    has_valid = sets.find_file(trained, flags.files, "valid")
    rows, labels = read(trained, "train" if has_valid else "train+valid", settings.limit)
    tests = {(trained, ""): test(trained)}
    if name == "xnli":
        tests |= {(name, lang): test(name, lang) for lang in XNLI}
    if name == "mnli" and sets.find_file("mnli-mm", flags.files, "test"):
        tests["mnli-mm", "en"] = test("mnli-mm")
    return Prepared(rows, torch.tensor(labels), classes or 1, tests)


# ---- command line

TASKS = {name: classification for name in sets.CLASSES} | {"mlqa": answering}
GLUE = ["mnli", "qnli", "qqp", "sst2", "mrpc", "stsb"]
PAPER = {"xnli": dict(epochs=2), "mlqa": dict(epochs=2, lr=3e-5, batch=12, max_length=384)}
MEAN_OF = ["mnli-mm/accuracy", *(f"{name}/accuracy" for name in GLUE[:-1]), "stsb/pearson"]


def resolve_settings(name, flags, config):
    """Return the Settings of a task: the paper's, or those of the flags. Raises BadInput."""
    if name not in TASKS:
        raise BadInput(f"there is no task {shown(name)!r} among glue, {', '.join(TASKS)}"
                       f"{did_you_mean(name, TASKS)}")
    # A narrow model would hardly change with the paper's learning rate.
    small = dict(lr=5e-4) if config.width < 384 else {}
    settings = Settings(**PAPER.get(name, {}) | small | flags.given)
    if settings.max_length < 8:
        raise BadInput(f"max_length is {settings.max_length}: a row needs at least 8 tokens")
    return replace(settings, max_length=min(settings.max_length, config.longest_row))


def parse_flags(words):
    parser = Parser("python -m tasks finetune", __doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run, such as out/mexma")
    add("--task", type=comma_list, required=True, help=f"some of glue, {', '.join(TASKS)}")
    add("--files", default="data", help="folder of the data sets [data]")
    add("--pool", choices=POOLS, help="pooling [the model's]")
    add("--untrained", action="store_true",
        help="also fine-tune from random weights; these numbers are NAME/untrained")
    add_flags(parser.add_argument_group("settings"), Settings, vars(Settings()), vars(Settings()))
    add("--device", help="cpu, cuda, cuda:1 or mps [a CUDA GPU if there is one]")
    add("--json", action="store_true", help="print every number, as one JSON object per task")
    flags = parser.parse_args(words)
    if not flags.task:
        raise BadInput("--task is empty: python -m tasks finetune --help names the tasks")
    if "glue" in flags.task:
        flags.task = list(dict.fromkeys([*flags.task, *GLUE]))
        flags.task.remove("glue")
    flags.device = usable_device(flags.device)
    flags.given = {name: getattr(flags, name) for name in vars(Settings())
                   if getattr(flags, name) is not None}
    return flags


def main(words):
    flags = parse_flags(words)
    opened = runs.open_run(flags.run)
    settings = {name: resolve_settings(name, flags, opened.model.config) for name in flags.task}
    # Prepare all tasks before training the first, so that a missing file is reported at once.
    prepared = {name: TASKS[name](name, settings[name], flags, opened) for name in flags.task}
    encoders = {"": partial(load, opened.folder / "model.pt")}
    if flags.untrained:
        encoders["/untrained"] = partial(Model, opened.model.config)
    every = {}
    for name in flags.task:
        print(f"{name}: {settings[name]}", file=sys.stderr)
        results = {f"{name}/train_rows": len(prepared[name].rows)}
        for kind, encoder in encoders.items():
            found = run_once(encoder, prepared[name], settings[name], flags)
            results |= {metric + kind: value for metric, value in found.items()}
        every |= results
        if name == flags.task[-1]:
            results |= headline_mean("glue/mean", every, MEAN_OF)
        print(json.dumps(results) if flags.json else screen.table(results))
