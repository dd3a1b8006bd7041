"""Train any objective: settings, the one loop, schedule, checkpoints, resume.

    python train.py --objective mexma                 # embedded data, CPU, a few minutes
    python train.py --objective mexma --help          # its flags and their defaults
    torchrun --nproc_per_node 8 train.py ...          # the same on 8 GPUs

In a notebook keywords are the flags, and with out=None nothing is written:

    run = train.start("mexma", steps=600, out=None)
    for record in run.steps(every=10): print(record)
    run.scores(); run.encode(["A dog.", "Ein Hund."])

The same command again resumes. A run is its folder: model.pt, train.pt, tokenizer.json, log.jsonl,
eval.json.
"""

import argparse
import contextlib
import functools
import math
import os
import platform
import shlex
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from tqdm import tqdm

import corpora
import data
import evaluate
import kernels
from corpora.device import (
    check_memory,
    most_memory,
    random_state,
    set_random_state,
    usable_device,
    usable_precision,
)
from corpora.folder import TrainingFolder, differences, outline, write_atomic, write_results
from corpora.program import (
    BadInput,
    Parser,
    Progress,
    add_flags,
    comma_list,
    did_you_mean,
    exit_status,
    flag_of,
    names,
    pick,
    printable,
    unmet,
    validate,
)
from model import (
    DECODER,
    SIZES,
    Block,
    Model,
    ModelConfig,
    Packed,
    add_lora,
    add_tokens,
    each_tensor,
    read_torch,
    save,
    set_attention,
    write_torch,
)
from objectives import OBJECTIVES

# --------------------------------------------------------------------------------------------------
# Settings: one flag for each field; the comment beside a field is its help


@dataclass(frozen=True)
class TrainConfig:
    data: str = "toy"  # toy, documents, regex, or files: TSV, CSV, JSONL, text, Moses
    langs: str = ""  # columns to use, as en,de; the first is the pivot; default: all
    eval_data: str = ""  # file to evaluate on; default: rows held out from the data
    vocab: int | None = None  # pieces of the tokenizer; default: 4096 embedded, 8000 files
    max_length: int = 128  # longest view in tokens; the rest is cut off
    size: str = "toy"  # shape of the model: toy, small, base, large, hybrid
    preset: str = ""  # a named set of values, under the flags that are given
    init: str = ""  # run folder whose weights and tokenizer are the start
    lora_rank: int = 0  # train differences of this rank to the frozen weights of --init; 0: all
    steps: int = 1000  # optimiser steps
    batch: int = 64  # examples per step and process
    accumulate: int = 1  # split a batch into so many forward passes
    lr: float = 1e-4  # peak learning rate
    warmup: float = 0.1  # share of the steps in which the rate rises linearly
    schedule: Literal["cosine", "linear", "constant"] = "cosine"  # after the warm-up
    weight_decay: float = 0.01  # on matrices and embeddings; never on biases and norms
    seed: int = 0  # of weights, batches, masks
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of the products
    out: str = ""  # folder of the run; default: out/OBJECTIVE
    eval_every: int = 150  # steps between evaluations, beside those at step 0 and at the end
    save_every: int = 100  # steps between checkpoints
    # From here on, and of the model's, --help gives the names alone.
    chat: Literal["plain", "system"] = "plain"  # system: a chat's system text opens every view
    block: int = 0  # of text: run lines together, cut rows of so many tokens; 0: a line is a row
    pairs: Literal["pivot", "neighbours"] = "pivot"  # two views: column 1 and any, or i and i + 1
    skip_bad: bool = False  # drop and count bad lines instead of stopping at the first
    header: Literal["yes", "no"] = "yes"  # does a table's first line name the columns?
    cache: str = "cache"  # where token stores of files are kept
    lora_alpha: float = 0.0  # their scale is alpha / rank; 0: twice the rank
    lora_dropout: float = 0.1  # on what they read
    lr_start: float = 0.0  # where that begins, as a share of the peak
    schedule_steps: int = 0  # step at which the schedule would reach 0; 0: the last
    clip: float = 1.0  # longest gradient; 0: no limit
    compile: bool = False  # torch.compile the blocks: slow first steps, losses agree to rounding
    attention: Literal["auto", "sdpa", "triton"] = "auto"  # sdpa: PyTorch's; triton: our kernels
    log_every: int = 10  # steps between lines of log.jsonl
    eval_limit: int = 500  # rows in the evaluations during training


# May change when a run is resumed; with other steps the rest follows the new schedule. Of the data
# the content must stay the same, not the path; of a preset what it sets.
FREE = {"steps", "device", "attention", "compile", "log_every", "eval_every", "eval_limit",
        "save_every", "cache", "out", "data", "preset"}
# The fields of ModelConfig that are flags; the others describe other people's models.
SHAPE = ("width", "layers", "heads", "ffn_dim", "max_positions", "dropout", "pool", "positions",
         "norm_position")
# {a setting: the condition without which it has no effect}, as Objective.needs. A run of --init
# brings its shape and tokenizer.
NEEDS = {"lora_rank": "init", "lora_alpha": "lora_rank", "lora_dropout": "lora_rank",
         "lr_start": "warmup", "schedule_steps": "schedule!=constant"}
NEEDS |= dict.fromkeys({"size", "vocab", *SHAPE} - {"dropout", "pool"}, "init=")


class Settings(NamedTuple):
    """What a run is asked to do, checked."""
    kind: type  # the objective's class
    options: object  # its Config
    train: TrainConfig
    model: ModelConfig
    source: object  # the run folder of --init, opened, or None
    notes: list  # lines to print: what is not as published or as asked for


def find_objective(name):
    if name not in OBJECTIVES:
        raise BadInput(f"objective {name!r} is unknown: choose one of {', '.join(OBJECTIVES)}"
                       f"{did_you_mean(name, OBJECTIVES)}")
    return OBJECTIVES[name]


def defaults(kind, size, preset=""):
    """-> {setting: value} at the paper's scale, and what the toy scale changes of it."""
    if preset and preset not in kind.presets:
        known = f"has {', '.join(kind.presets)}" if kind.presets else "has none"
        raise BadInput(f"preset {preset!r} is unknown: {kind.name} {known}")
    # Each line overrides the ones before: the shape, the dataclasses, the paper.
    values = asdict(ModelConfig()) | SIZES.get(size, {}) | dict(pool=kind.pool)
    if kind.causal:
        values |= DECODER
    for config in (TrainConfig, kind.Config):
        values |= {field.name: field.default for field in fields(config)}
    named = kind.presets.get(preset, ({}, {}))
    paper = kind.paper | named[0]
    toy = kind.toy | named[1]
    # A misspelt key would be a setting that is silently not made.
    for key in [*paper, *toy, *kind.needs]:
        if key not in values:
            raise BadInput(f"{kind.__name__} has a value for {key!r}, which is no setting"
                           f"{did_you_mean(key, values)}")
    return values | paper, toy if size == "toy" else {}


def settle(name, given):
    """An objective's name and {setting: value} -> Settings. BadInput for anything odd."""
    kind = find_objective(name)
    given = {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}
    for key in given:
        if key not in {*names(TrainConfig), *names(kind.Config), *SHAPE}:
            raise BadInput(unknown_flag(key, kind))
    source = evaluate.open_run(given["init"]) if given.get("init") else None
    size = source.config.get("size") if source else given.get("size", "toy")
    paper, toy = defaults(kind, size, given.get("preset", ""))
    values = paper | toy | given | dict(out=given.get("out") or f"out/{kind.name}")
    vain = unmet(NEEDS | kind.needs, given, values)
    if vain:
        raise BadInput(vain)
    train = pick(TrainConfig, values | dict(size=size))
    options = pick(kind.Config, values)
    check(train, kind, options)
    notes = [f"  toy scale: {key} {value} (paper: {paper[key]})" for key, value in toy.items()
             if key not in given and value != paper[key]]
    # The vocabulary is the tokenizer's, and comes when that is known.
    facts = dict(vocab=1, causal=kind.causal, head=kind.model_head(options))
    model = pick(ModelConfig, values | facts)
    if source:
        source = fit_source(source, kind, options)
        # What a sentence vector is goes with the model, and so does its dropout: a Llama has none.
        own = source.model.config
        if train.lora_rank > own.width:
            raise BadInput(f"lora_rank {train.lora_rank} is over the model's width: at most "
                           f"{own.width} has an effect")
        pool = given.get("pool", own.pool)
        if pool != kind.pool:
            notes.append(f"  pool {pool}, not {kind.name}'s own, which is {kind.pool}")
            if kind.reads:
                notes.append(f"  the loss of {kind.name} reads {kind.reads} all the same")
        dropout = (kind.paper | toy | given).get("dropout", own.dropout)
        model = replace(own, head=model.head, pool=pool, dropout=dropout)
    # The length goes with the model too.
    asked = train.max_length
    train, model = fit_lengths(kind, train, model, given)
    if train.max_length != asked:
        notes.append(f"  max_length {train.max_length}, not {asked}: the model reads no more")
    return Settings(kind, options, train, model, source, notes)


def fit_source(source, kind, options):
    """The run of --init -> the same, with the objective's own tokens. BadInput if its model does
    not read as the objective does."""
    # A model that learnt to read one way has no use for the other way's mask.
    if source.model.config.causal != kind.causal:
        reads = "left to right" if kind.causal else "both ways"
        raise BadInput(f"--init {source.folder}: {kind.name} needs a model that reads {reads}; "
                       "choose another run")
    tokenizer = source.tokenizer.with_tokens(kind.special_tokens(options))
    new = tokenizer.vocab - source.tokenizer.vocab
    if not new:
        return source
    grown = add_tokens(source.model, new, source.tokenizer.vocab)
    return source._replace(tokenizer=tokenizer, model=grown)


def fit_lengths(kind, train, model, given):
    """-> train and model with lengths that fit each other: a default gives way. BadInput for a
    length that was asked for."""
    # [CLS] and [SEP] around every text of a row, and a chat's system text before them.
    texts = kind.texts_per_row + (train.chat == "system")
    longest = texts * (train.max_length + 2)
    if not train.init and "max_positions" not in given:
        return train, replace(model, max_positions=max(model.max_positions, longest))
    most = model.max_tokens or model.max_positions
    fitting = most // texts - 2
    if longest > most and (train.block or "max_length" in given or fitting < 1):
        raise BadInput(f"max_length {train.max_length}: a row can have {longest} tokens, over the "
                       f"model's {most}: --max-length {fitting} fits")
    return replace(train, max_length=min(train.max_length, fitting)), model


def unknown_flag(name, kind):
    """One line about a setting, or its flag, that this objective does not have."""
    name = name.lstrip("-").replace("-", "_")
    owners = [other for other in OBJECTIVES if name.removeprefix("no_")
              in names(OBJECTIVES[other].Config)]
    if owners:
        return f"{flag_of(name)} belongs to {', '.join(owners)}, not to {kind.name}: drop it"
    known = ["objective", *names(TrainConfig), *names(kind.Config), *SHAPE]
    near = did_you_mean(flag_of(name), [*map(flag_of, known)])
    return f"there is no setting {flag_of(name)}{near}"


def check(train, kind, options):
    """Refuse values that would fail or mislead later; what one field allows is `validate`'s."""
    validate(train, at_least={
        1: "steps batch accumulate log_every eval_every eval_limit save_every max_length",
        0: "block lora_rank lora_alpha schedule_steps weight_decay clip seed"},
        above={0: "lr"}, shares="warmup lr_start lora_dropout")
    sizes = ", ".join(SIZES)
    rules = [  # a setting, what must hold if it is not 0 or "", what is wrong otherwise
        ("size", train.size in SIZES or train.init, f"is unknown: choose one of {sizes}"),
        ("vocab", 300 <= (train.vocab or 300) <= 1_000_000, "must be from 300 to 1,000,000"),
        ("batch", train.batch % train.accumulate == 0, "must be a multiple of --accumulate"),
        ("batch", not kind.in_batch(options) or train.batch >= 2 * train.accumulate,
         f"is too small: {kind.name} compares the examples of each of --accumulate parts"),
        ("schedule_steps", train.schedule_steps >= train.steps, "must be at least --steps"),
        ("chat", train.chat == "plain" or kind.causal, f"has no meaning for {kind.name}: drop it"),
        ("pairs", train.pairs == "pivot" or kind.views == 2,
         f"has no effect, as {kind.name} takes single texts: drop it"),
        ("block", kind.views == 1, f"needs single texts, and {kind.name} takes pairs: drop it"),
        ("block", 8 <= train.block <= train.max_length, "must be from 8 to --max-length"),
    ]
    for name, holds, otherwise in rules:
        if getattr(train, name) and not holds:
            raise BadInput(f"{name} {getattr(train, name)} {otherwise}")


def parse(arguments):
    """Command line -> Settings. BadInput for anything odd."""
    # Which flags there are depends on the objective, and their defaults on size and preset.
    first = Parser(prog="train.py", add_help=False)
    first.add_argument("--objective", default="mexma")
    first.add_argument("--size", default="toy")
    first.add_argument("--preset", default="")
    known, _ = first.parse_known_args(arguments)
    kind = find_objective(known.objective)
    paper, toy = defaults(kind, known.size, known.preset)
    flags = names(TrainConfig)
    # Those of which --help gives the name alone.
    rare = [*flags[flags.index("chat"):], *SHAPE]
    hidden = () if "--help-all" in arguments else rare
    wide = functools.partial(argparse.HelpFormatter, max_help_position=28, width=120)
    parser = Parser(prog="train.py", usage="python train.py [--objective NAME] [--flag VALUE ...]",
                    formatter_class=wide, explain=lambda flag: unknown_flag(flag, kind),
                    description="Train an objective. The same command again resumes.",
                    epilog=f"--help-all explains also {', '.join(map(flag_of, rare))}.")
    parser.add_argument("--help-all", action="help", help=argparse.SUPPRESS)
    parser.add_argument("--objective", default="mexma", metavar="NAME",
                        help=f"{', '.join(OBJECTIVES)}; with --help shows its flags [mexma]")
    presets = f", and --preset {', '.join(kind.presets)}" if kind.presets else ""
    own = parser.add_argument_group(f"only {kind.name} has these{presets}")
    training = parser.add_argument_group("training")
    add_flags(own, kind.Config, names(kind.Config), paper | toy)
    add_flags(training, TrainConfig, flags, paper | toy, hidden)
    add_flags(training, ModelConfig, SHAPE, paper | toy, hidden)
    # A flag that was not given is None: its default may be the objective's, or another run's.
    given = vars(parser.parse_args(arguments))
    name = given.pop("objective")
    return settle(name, {key: value for key, value in given.items() if value is not None})


# --------------------------------------------------------------------------------------------------
# Training as a function


def start(objective, out=None, **settings):
    """A run for a notebook or a script: keywords are the flags of the command line.

    out=None writes nothing and locks nothing; a folder resumes the run that was begun there.
    """
    writes = out is not None
    return Run(settle(objective, settings | {"out": str(out or "")}), writes)


def batch(objective, rows=4, step=0, **settings):
    """What an objective's collate makes of `rows` examples of a step: the batch, a dict."""
    asked = settle(objective, settings | {"batch": rows})
    corpus, batches = open_training(asked)
    examples = batches.examples(step)
    return asked.kind.collate(examples, batches.rng(step), asked.options, corpus.special)


def open_training(settings, rank=0, world=1, tokenizer=None):
    """-> the corpus and the batches that the settings ask for."""
    train = settings.train
    if settings.source:
        tokenizer = settings.source.tokenizer
    corpus = open_rows(train, train.data, "train", tokenizer)
    return corpus, make_batches(settings, corpus, train.batch, train.seed, rank, world)


def open_rows(train, spec, split, tokenizer):
    """One split of what `spec` names, as a corpus."""
    return data.open_corpus(
        spec, tokenizer, split=split, langs=comma_list(train.langs) or None, vocab=train.vocab,
        skip_bad=train.skip_bad, cache=train.cache, holdout=not train.eval_data, block=train.block,
        header=train.header)


def make_batches(settings, corpus, batch, seed, rank, world):
    kind = settings.kind
    train = settings.train
    return data.Batches(corpus, kind.views, batch, seed, rank, world,
                        kind.in_batch(settings.options), train.max_length, train.pairs,
                        train.chat == "system")


# --------------------------------------------------------------------------------------------------
# The processes that train together, one a GPU or several on a CPU, as torchrun started them


class Ranks:
    """`rank`, this process of `world`; on its own without torchrun. `device`: of this process."""

    def __init__(self, device):
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.device = device
        if self.world > 1:
            if device.type == "cuda":
                self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
                torch.cuda.set_device(self.device)
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    def wait(self):
        """Until all are here."""
        if self.world > 1:
            dist.barrier()

    def leave(self):
        if self.world > 1:
            dist.destroy_process_group()

    def wrap(self, module):
        """Each rank computes its own part of the batch; gradients become their mean."""
        if self.world == 1:
            return module
        ids = [self.device] if self.device.type == "cuda" else None
        return torch.nn.parallel.DistributedDataParallel(module, device_ids=ids)

    def mean(self, values):
        """A tensor -> its mean over ranks."""
        return mean_over_ranks(values, self.world)

    def any(self, asked):
        """Whether one of them was asked."""
        share = torch.tensor([float(bool(asked))], device=self.device)
        return bool(self.mean(share))

    def gather(self, value):
        """A value of any kind -> those of all ranks, a list."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values


def mean_over_ranks(values, world):
    if world > 1 and len(values):
        dist.all_reduce(values)
        values /= world
    return values


def share_counts(parts, world):
    """Token losses divide by the number of targets of the whole step: each part's own counts give
    way to their mean over parts and ranks, so that averaging the parts gives exactly the gradient
    of one big batch."""
    mean = mean_over_ranks(torch.stack([part["num_targets"] for part in parts]).mean(0), world)
    for part in parts:
        part["num_targets"] = mean
    return parts


# --------------------------------------------------------------------------------------------------
# Parts of the loop


def learning_rate(step, train):
    """Rate of step 0..steps-1: linear warm-up to the peak, then down to 0 at schedule_steps."""
    warm = max(1, round(train.warmup * train.steps))
    if step < warm:
        return train.lr * (train.lr_start + (1 - train.lr_start) * (step + 1) / warm)
    # 0 after the warm-up, 1 where the schedule reaches 0.
    done = (step - warm) / max(1, (train.schedule_steps or train.steps) - warm)
    shapes = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}
    return train.lr * shapes[train.schedule]


def make_optimizer(objective, train):
    """AdamW; decay on matrices only: a bias, a norm or a lone scalar has no direction to shrink."""
    trained = [p for p in objective.parameters() if p.requires_grad]
    groups = [dict(params=[p for p in trained if p.ndim >= 2], weight_decay=train.weight_decay),
              dict(params=[p for p in trained if p.ndim < 2], weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=train.lr, fused=True)


def demand_memory(settings, device):
    """Refuse sizes that the device cannot hold, before memory is taken."""
    train = settings.train
    vocab = train.vocab or max(settings.model.vocab, corpora.EMBEDDED_VOCAB)
    shape = replace(settings.model, vocab=vocab)

    def make():
        model = Model(shape).requires_grad_(not train.lora_rank)
        return settings.kind(model, settings.options)

    # The states of a batch, if each text had one token between [CLS] and [SEP].
    texts = train.batch // train.accumulate * settings.kind.views
    sizes = {**vars(settings.options), **vars(shape), "batch": train.batch}
    check_memory(make, sizes, 3 * texts * shape.width * shape.layers, device)


def to_device(batch, device):
    """A batch on the device; to a GPU from pinned memory, so that the loop need not wait."""
    if device.type == "cuda":
        return each_tensor(batch, lambda x: x.pin_memory().to(device, non_blocking=True))
    return each_tensor(batch, lambda x: x.to(device))


# --------------------------------------------------------------------------------------------------
# The run

FORMAT = 4  # of train.pt


class Run:
    """One training run: what a step needs, and how it is saved, resumed and evaluated."""
    step = 0
    tokens = 0
    seconds = 0.0  # of training
    clock = 0.0  # up to when they are counted
    untrained = None  # the results at step 0

    def __init__(self, settings, writes, say=lambda text: None, command=""):
        """`writes`: keep everything in train.out; `say(text)` is told what happens."""
        self.settings = settings
        self.train = settings.train
        self.kind = settings.kind
        self.command = command
        self.ranks = Ranks(torch.device(usable_device(self.train.device)))
        self.rank = self.ranks.rank
        self.world = self.ranks.world
        self.device = self.ranks.device
        self.say = say if self.rank == 0 else lambda text: None
        self.folder = Path(self.train.out)
        demand_memory(settings, self.device)
        # Rank 0 alone holds the folder and writes.
        self.own = TrainingFolder(self.folder) if writes and self.rank == 0 else None
        if self.own:
            self.own.check()
        path = self.folder / "train.pt"
        saved = read_torch(path) if writes and path.exists() else None
        if saved is not None:
            found = saved.get("format") if isinstance(saved, dict) else None
            if type(found) is not int or found != FORMAT:
                raise BadInput(f"{path} is no checkpoint of this version: use another --out")
        # A resumed run keeps the precision that was chosen for it, also on another machine.
        self.precision = usable_precision(self.train.precision, self.device)
        if saved and self.train.precision == "auto":
            self.precision = usable_precision(saved["precision"], self.device)
        self.dtype = None if self.precision == "float32" else getattr(torch, self.precision)
        self.say(f"nanoJEPA: {self.kind.name}, size {self.train.size}, {self.train.steps} steps of "
                 f"{self.train.batch} examples, in {self.precision} on {self.device}")
        for note in settings.notes:
            self.say(note)
        self.open_data(saved)
        self.make_model()
        # Rows that cannot be evaluated are refused now, and not after an hour.
        self.judged = evaluate.Evaluation(self.model, self.tokenizer, self.rows, self.affixes,
                                          self.train.max_length, views=self.kind.views)
        self.optimizer = make_optimizer(self.objective, self.train)
        # Half precision alone needs its loss scaled; otherwise this does nothing.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.window = []  # what train_step gave since the last line of the log
        self.config = {"objective": self.kind.name, **asdict(self.train),
                       "model": asdict(self.model.config),
                       self.kind.name: asdict(settings.options)}
        # Dropout differs between ranks, weights do not.
        torch.manual_seed(self.train.seed + 1 + self.rank)
        if saved:
            self.resume(saved)

    def take_folder(self):
        """Hold the folder while the loop runs, and make it what is known of the run."""
        if self.own:
            self.own.take()
            if self.own.version:
                self.rewind()
            else:
                self.begin()
        self.ranks.wait()

    def open_data(self, saved):
        """The batches, and the rows of every evaluation, read once. A resumed run has the tokenizer
        of its folder (or of --init): one trained anew could give other ids."""
        train = self.train
        tokenizer = data.Tokenizer.read(self.folder / "tokenizer.json") if saved else None
        self.corpus, self.batches = open_training(self.settings, self.rank, self.world, tokenizer)
        self.tokenizer = self.corpus.tokenizer
        self.affixes = self.kind.affixes(self.settings.options, self.corpus.special)
        self.rows = corpora.evaluation_rows(
            train.eval_data or train.data, comma_list(train.langs) or None,
            "all" if train.eval_data else "valid", train.eval_limit, train.skip_bad,
            train.chat == "system", header=train.header)
        if train.eval_data and self.rank == 0:
            evaluate.say_trained_on(asdict(train), self.rows)
        self.open_validation()
        self.say(f"data {self.corpus.name}: {len(self.corpus):,} rows of "
                 f"{', '.join(self.corpus.columns)}; a vocabulary of {self.tokenizer.vocab:,}")
        cut, count = self.corpus.count_cut(train.max_length)
        if cut:
            self.say(f"{cut:,} of {count:,} texts are longer than --max-length {train.max_length} "
                     "and are cut; a cut answer has no stop token")

    def open_validation(self):
        """Batches of the rows held out, made as those of training; smaller ones if not so many rows
        differ, none if not two do."""
        train = self.train
        held_out = open_rows(train, train.eval_data or train.data, "valid", self.tokenizer)
        if held_out.hash == self.corpus.hash:
            raise BadInput(f"--eval-data {train.eval_data} holds the rows that --data trains on: "
                           "leave it out, and some rows are held out")
        rows = min(train.eval_limit, len(held_out))
        self.validation_steps = 0
        size = min(train.batch // train.accumulate, max(1, len(held_out) // self.world))
        while size > self.kind.in_batch(self.settings.options) and not self.validation_steps:
            try:
                self.validation = make_batches(self.settings, held_out, size, 0, self.rank,
                                               self.world)
                self.validation_steps = max(1, rows // (size * self.world))
            except BadInput:
                size //= 2
        if not self.validation_steps:
            self.say("too few rows or columns are held out for a loss of their own")

    def make_model(self):
        """The model, and the objective around it."""
        train = self.train
        # Every rank draws the same weights.
        torch.manual_seed(train.seed)
        # Another model may have rows that its tokenizer does not use.
        vocab = max(self.corpus.special.vocab, self.settings.model.vocab)
        self.model = Model(replace(self.settings.model, vocab=vocab))
        if self.settings.source:
            # The shapes are the same; only a vocabulary head may be new or left behind.
            self.model.load_state_dict(self.settings.source.model.state_dict(), strict=False)
        if train.lora_rank:
            # New [PRED] tokens have no meaning yet, so their embeddings are trained too.
            alpha = train.lora_alpha or 2 * train.lora_rank
            add_lora(self.model, train.lora_rank, alpha, train.lora_dropout,
                     self.corpus.special.preds)
        self.objective = self.kind(self.model, self.settings.options).to(self.device)
        size = 2 if self.dtype else 4  # bytes of a number
        # The plans that attention will ask of every batch.
        self.needs = set_attention(self.objective, train.attention, self.device, size)

    def begin(self):
        """The first line of the log says everything about the run."""
        write_atomic(self.folder / "log.jsonl", b"")
        self.tokenizer.save(self.folder / "tokenizer.json")
        self.log({"config": self.config, "command": self.command,
                  "parameters": sum(p.numel() for p in self.objective.parameters()),
                  "processes": self.world, "tokenizer_hash": self.tokenizer.hash,
                  "affixes": self.affixes, "views": self.kind.views, "device": str(self.device),
                  "precision": self.precision,
                  "torch": torch.__version__, "python": platform.python_version()})

    def identity(self):
        """What a resumed run must have in common with this one: other ids, rows or ranks would make
        other batches."""
        return {"config": self.config, "processes": self.world, "tokenizer": self.tokenizer.hash,
                "rows": self.corpus.hash}

    def save(self):
        """train.pt, from which the same command goes on, and model.pt, which is the result."""
        # With every rank's random state and the open window, a resumed run repeats this one.
        states = self.ranks.gather(random_state(self.device))
        if not self.own:
            return
        if not all(parameter.isfinite().all() for parameter in self.objective.parameters()):
            raise BadInput(f"step {self.step}: the weights are not finite and were not saved; "
                           "begin anew in another --out with a lower --lr")
        self.count_time()
        write_torch({"format": FORMAT, **self.identity(), "random": states, "step": self.step,
                     "tokens": self.tokens, "seconds": self.seconds, "untrained": self.untrained,
                     "precision": self.precision, "scaler": self.scaler.state_dict(),
                     "weights": self.objective.state_dict(),
                     "moments": self.optimizer.state_dict()["state"],
                     "window": each_tensor(self.window, lambda x: x.cpu())},
                    self.folder / "train.pt")
        save(self.model, self.folder / "model.pt")

    def resume(self, saved):
        """Go on from a checkpoint of the same settings, data and number of processes."""
        try:
            self.compare(saved)
            self.load(saved)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise BadInput(f"{self.folder / 'train.pt'} is damaged, or of another kind ({error!r}):"
                           " use another --out") from None
        self.say(f"resuming at step {self.step} of {self.train.steps}")

    def compare(self, saved):
        """BadInput if a checkpoint is of another run."""
        now = self.identity()
        changed = differences({name: saved[name] for name in now}, now, FREE)
        if not 0 <= saved["step"] <= self.train.steps:
            changed.append(f"it is at step {saved['step']}, beyond --steps {self.train.steps}")
        if changed:
            raise BadInput(f"{self.folder} holds a run with other settings: {'; '.join(changed)}. "
                           f"Use another --out, such as {self.folder}-2")

    def load(self, saved):
        """Take over a checkpoint; an error of many types if it does not fit."""
        # Half a step, or half precision, would go on and be another run.
        kinds = [type(saved[name]) for name in ("step", "tokens", "seconds", "window")]
        if kinds != [int, int, float, list]:
            raise TypeError(f"step, tokens, seconds, window are {kinds}")
        if saved["untrained"] is not None:
            kinds = set(map(type, saved["untrained"].values()))
            if not kinds <= {int, float}:
                raise TypeError(f"the results at step 0 are {kinds}")
        # A line of the log is the mean over these.
        for row in saved["window"]:
            if row.keys() != saved["window"][0].keys() or not {"loss", "tokens"} <= row.keys():
                raise TypeError("the steps since the last line of the log lack a term")
        own = each_tensor(self.objective.state_dict(), outline)
        if each_tensor(saved["weights"], outline) != own:
            raise TypeError("the weights have other names, shapes or types")
        # In place: the optimiser holds these very parameters.
        self.objective.load_state_dict(saved["weights"])
        trained = sum((group["params"] for group in self.optimizer.param_groups), [])
        if saved["step"] and not saved["moments"]:
            raise TypeError("the optimiser's moments are lost")
        for index, moments in saved["moments"].items():
            found = [outline(moments[name]) for name in ("step", "exp_avg", "exp_avg_sq")]
            like = outline(trained[index])
            if found != [outline(torch.zeros(())), like, like]:
                raise TypeError(f"moments {index} are {found}, of a parameter {like}")
        # Its own settings, not those of a file.
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": saved["moments"]})
        if saved["scaler"]:  # empty unless in half precision
            self.scaler.load_state_dict(saved["scaler"])
        for name in ("step", "tokens", "seconds", "untrained"):
            setattr(self, name, saved[name])
        self.window = each_tensor(saved["window"], lambda x: x.to(self.device))
        self.read_window()
        set_random_state(saved["random"][self.rank], self.device)

    def rewind(self):
        """Back to the checkpoint. A kill may have come between it and model.pt, then older."""
        self.own.rewind(self.step, self.step == self.train.steps)
        model = self.folder / "model.pt"
        if not model.exists() or model.stat().st_mtime < (self.folder / "train.pt").stat().st_mtime:
            save(self.model, model)

    def log(self, record):
        if self.own:
            self.own.log(record)

    # ---- the loop

    def steps(self, every=None, on_step=None):
        """Train to the last step, giving a record every so many steps and of every evaluation.

        every: by default log_every. on_step(run) is called after each step; if it returns true, the
        run is saved and ends here. Leaving the loop leaves a usable model.
        """
        train = self.train
        batches = None
        try:
            self.take_folder()
            self.clock = time.perf_counter()
            # A resumed run has the numbers of step 0 from its checkpoint.
            if self.untrained is None:
                yield self.evaluate()
            forward = self.wrap()
            # A thread makes the next batches while this one is computed.
            batches = data.prefetch(self.make_batch, self.step, train.steps)
            self.objective.train()
            for parts in batches:
                self.window.append(self.train_step(parts, forward))
                self.step += 1
                last = self.step == train.steps
                self.objective.after_step(self.step / train.steps)
                due = []  # records to give, once all that belongs to this step is done
                if self.step % (every or train.log_every) == 0 or last:
                    due.append(self.close_window())
                if self.step % train.eval_every == 0 and not last:
                    # A step that was not finite is told before what came of it.
                    self.read_window()
                    due.append(self.evaluate())
                stopped = self.ranks.any(on_step is not None and on_step(self))
                if self.step % train.save_every == 0 or stopped or last:
                    # A state that is not finite is never saved.
                    self.read_window()
                    self.save()
                yield from due
                if stopped and not last:
                    return
            if not self.is_finished():
                yield self.evaluate()
            self.ranks.wait()
        except GeneratorExit:
            # The caller left the loop: what is not saved yet would be lost.
            self.save()
            raise
        finally:
            if batches:
                batches.close()
            self.objective.eval()
            if self.own:
                self.own.release()

    def wrap(self):
        """The objective as the loop calls it: compiled if asked for, and under DDP."""
        if self.train.compile:
            self.compile_blocks()
        return self.ranks.wrap(self.objective)

    def compile_blocks(self):
        """torch.compile the blocks, or say why not."""
        # What is other for every batch stays out, said here: a decorator would import the compiler,
        # which takes 1.5 s, in every program.
        kernels.make_plan = torch.compiler.disable(kernels.make_plan)
        kernels.padded_attention = torch.compiler.disable(kernels.padded_attention)
        blocks = [one for one in self.objective.modules() if isinstance(one, Block)]
        for block in blocks:
            block.compile(dynamic=True)
        try:
            self.objective.eval()
            for part in to_device(self.make_batch(0), self.device):
                self.add_losses(self.objective, part, {}, 1, self.dtype).backward()
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = " ".join(str(error).split())[:200]
            self.say(f"--compile does not work here: going on without it ({reason})")
            for block in blocks:
                block._compiled_call_impl = None  # as it was
        self.optimizer.zero_grad()

    def make_batch(self, step, batches=None):
        """Step -> its parts (one unless --accumulate), a pure function of (seed, step, rank)."""
        batches = batches or self.batches
        examples = batches.examples(step)
        # All chance of a batch comes from here: dropout apart, the model draws nothing.
        rng = batches.rng(step)
        options = self.settings.options
        if batches is not self.batches:
            options = replace(options, **self.kind.held_out)
        size = self.train.batch // self.train.accumulate
        parts = []
        for first in range(0, len(examples), size):
            part = self.kind.collate(examples[first:first + size], rng, options,
                                     self.corpus.special)
            parts.append(part)
            for packed in part.values():
                if isinstance(packed, Packed):
                    # Here, beside the loop, and not in the first layer that asks for it.
                    for need in self.needs:
                        packed.plan(need, self.device)
        return parts

    def train_step(self, parts, forward):
        """One step -> {name: ()}: loss, terms, tokens and gradient norm, means over parts and
        ranks. Nothing here waits for the device. A step that is not finite changes no weight."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.train)
        parts = share_counts(to_device(parts, self.device), self.world)
        total = {}  # {name: ()}, still on the device
        for part in parts:
            # Ranks exchange gradients once a step, with the last part.
            is_exchanged = self.world == 1 or part is parts[-1]
            with contextlib.nullcontext() if is_exchanged else forward.no_sync():
                loss = self.add_losses(forward, part, total, len(parts), self.dtype)
                self.scaler.scale(loss / len(parts)).backward()
        tokens = sum(len(part["packed"].tokens) for part in parts)
        total["tokens"] = torch.full((), float(tokens), device=self.device)
        values = torch.stack([value.float() for value in total.values()])
        values = self.ranks.mean(values)
        # The norm is that of the true gradients, so they are unscaled before they are clipped.
        self.scaler.unscale_(self.optimizer)
        longest = self.train.clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.objective.parameters(), longest)
        values = torch.cat([values, norm.float().view(1)])
        if not self.scaler.is_enabled():
            # Fused AdamW skips the step if this is not 0; the scaler of half precision sets it too.
            self.optimizer.found_inf = (~values.isfinite().all()).float()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return dict(zip([*total, "grad_norm"], values))

    def add_losses(self, forward, part, total, count, dtype):
        """The loss of one of `count` parts; it and its terms are added to the means `total`.
        Products are in `dtype`, in float32 if that is None."""
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            loss, terms = forward(part)
        for name, value in {"loss": loss.detach(), **terms}.items():
            total[name] = total.get(name, 0) + value / count
        return loss

    def read_window(self):
        """The steps since the last record as numbers: with one rank the device has to catch up only
        here. BadInput for a step that was not finite; in half precision infinite gradients are
        skipped."""
        rows = [dict(zip(one, torch.stack(list(one.values())).tolist())) for one in self.window]
        for number, row in enumerate(rows):
            checked = dict(row)
            if self.scaler.is_enabled():
                del checked["grad_norm"]
            if not all(map(math.isfinite, checked.values())):
                terms = ", ".join(f"{name} {value:g}" for name, value in checked.items())
                step = self.step - len(rows) + number
                raise BadInput(f"step {step}: the loss or gradient is not finite ({terms}), and "
                               "the weights were left alone. Begin anew with a lower --lr, "
                               "--precision float32, or a smaller --clip")
        return rows

    def close_window(self):
        """The record of the steps since the last one: their means, and the totals."""
        rows = self.read_window()
        self.count_time()
        self.window = []
        mean = {}
        for name in rows[0]:
            mean[name] = sum(row[name] for row in rows) / len(rows)
        # A mean over steps and ranks -> their sum.
        self.tokens += round(mean.pop("tokens") * len(rows) * self.world)
        norm = mean.pop("grad_norm")
        record = {"step": self.step, **mean, "lr": learning_rate(self.step - 1, self.train),
                  "grad_norm": norm, "tokens": self.tokens, "seconds": round(self.seconds, 3)}
        self.log(record)
        return record

    def count_time(self):
        """What passed since the clock was set was time of training."""
        now = time.perf_counter()
        self.seconds += now - self.clock
        self.clock = now

    # ---- what the model is worth

    def evaluation(self):
        """The model and its held-out rows, with vectors to be made."""
        return self.judged.again()

    def validate(self):
        """{"validation/TERM": number}: the loss on the rows held out, as all ranks compute it."""
        parts = []
        for step in range(self.validation_steps):
            parts += self.make_batch(step, self.validation)
        if not parts:
            return {}
        parts = share_counts(to_device(parts, self.device), self.world)
        total = {}
        with evaluate.in_eval_mode(self.objective):
            for part in parts:
                self.add_losses(self.objective, part, total, len(parts), None)
        values = self.ranks.mean(torch.stack(list(total.values())).float()).tolist()
        return {f"validation/{name}": value for name, value in zip(total, values)}

    def scores(self):
        """{"task/metric": number} on the rows held out; rank 0 works for all but on the loss."""
        losses = self.validate()
        return losses | evaluate.run(self.evaluation()) if self.rank == 0 else {}

    def encode(self, texts):
        """Texts -> their sentence vectors of length 1 (N, D), framed as the first view is."""
        vectors = evaluate.encode(self.model, self.tokenizer, texts, self.affixes[0],
                                  self.train.max_length)
        return torch.nn.functional.normalize(vectors, dim=-1)

    def evaluate(self):
        """Evaluate and log -> the record, of the numbers that are finite."""
        self.count_time()
        found = self.scores()
        self.clock = time.perf_counter()  # evaluating is not training
        results = {name: value for name, value in found.items() if math.isfinite(value)}
        if self.untrained is None:
            self.untrained = results
        record = {"step": self.step, "eval": results}
        # The log last: it is what says that the run is finished.
        if self.own and self.step == self.train.steps:
            write_results(self.folder, "eval.json", results, self.evaluation().label)
        self.log(record)
        # What the loss does not show, such as a lambda that has run away.
        lost = [name for name in found if name not in results]
        warnings = [self.objective.warning(), lost and f"{', '.join(lost)}: not a finite number"]
        length = results.get("geometry/length", math.inf)
        first = self.untrained.get("geometry/length", 0)
        if length < first / 2:
            warnings.append(f"the vectors' mean length fell from {first:.1f} to {length:.1f}: a "
                            "distance of raw vectors falls so without their coming closer")
        for warning in filter(None, warnings):
            self.log({"step": self.step, "warning": warning})
            self.say(f"warning at step {self.step}: {warning}")
        return record

    def is_finished(self):
        """Did the last step come, on any rank's account, and its evaluation?"""
        done = self.own and self.step == self.train.steps and self.own.is_finished(self.step)
        return self.ranks.any(done)


# --------------------------------------------------------------------------------------------------
# Command line


def show(run, progress, record):
    """A record on the screen: the loss and its terms on the bar, an evaluation as a line."""
    if "eval" in record:
        if record["eval"]:  # rank 0 alone has numbers
            headline = evaluate.headline(record["eval"], record["step"])
            run.say(f"step {record['step']:>5}  {headline}")
        return
    # The loss and its terms stand between the step and the rate.
    stop = list(record).index("lr")
    terms = {name: f"{record[name]:.3f}" for name in list(record)[1:stop]}
    progress.bar.set_postfix(terms, refresh=False)


def finish(run, results):
    """The table of before and after, five examples to read, and what to do next."""
    # The same rows before and after, so the two columns can be compared.
    run.say("\n" + evaluate.table(results, run.untrained,
                                   rest=run.folder / "eval.json"))
    for example in evaluate.examples(run.evaluation()):
        run.say(f"  {example.query}\n    {'=' if example.right else '!'} {example.found}")
        if not example.right:
            run.say(f"    instead of {example.gold}")
    memory = most_memory(run.device) / 1e9
    run.say(f"\n{run.tokens:,} tokens in {run.seconds:.0f} s, peak memory {memory:.2f} GB. "
            f"The run is in {run.folder}\nnext: python evaluate.py {run.folder}")


def main(arguments):
    """Train as the command line says -> exit status."""
    def say(text):
        tqdm.write(printable(text), file=sys.stdout)
        sys.stdout.flush()

    # The command that is printed and logged is the one that resumes.
    world = int(os.environ.get("WORLD_SIZE", 1))
    program = ["torchrun", "--nproc_per_node", str(world)] if world > 1 else ["python"]
    command = shlex.join([*program, "train.py", *arguments])
    run = Run(parse(arguments), True, say, command)
    try:
        return train_to_the_end(run)
    finally:
        run.ranks.leave()


def train_to_the_end(run):
    """The loop on the screen -> exit status."""
    if run.is_finished():
        run.say(f"this run is finished: {run.step} steps. Evaluate it: "
                f"python evaluate.py {run.folder}")
        return 0
    # From here on Ctrl-C asks the loop to stop after a step, so that nothing is half done.
    progress = Progress(run.train.steps, run.step, run.rank == 0)
    try:
        # Whatever happens in between, the loop ends with what is done being saved.
        with contextlib.closing(run.steps(on_step=lambda run: progress.step(run.step))) as records:
            for record in records:
                show(run, progress, record)
    finally:
        progress.close()
    if run.step < run.train.steps:
        run.say(f"stopped and saved at step {run.step}. To resume: {run.command}")
        return 128 + progress.signal
    if run.rank == 0:
        finish(run, record["eval"])
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main, sys.argv[1:]))
