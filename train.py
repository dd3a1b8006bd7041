# /// script
# requires-python = ">=3.11.4"
# dependencies = ["torch==2.13.0", "tokenizers==0.23.3", "numpy==2.4.6", "tqdm==4.70.1"]
# ///
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
from corpora.device import (
    Pace,
    join_processes,
    mean_over_ranks,
    on_any_rank,
    random_state,
    set_random_state,
    usable_device,
    usable_precision,
)
from corpora.folder import (
    TrainingFolder,
    check_moments,
    demand_finite,
    hash_of,
    refuse_other_run,
    write_atomic,
    write_results,
)
from corpora.optimizer import MuonAndAdamW
from corpora.program import (
    BadInput,
    Parser,
    Progress,
    add_flags,
    check_range,
    did_you_mean,
    exit_status,
    flag_of,
    names,
    pick,
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
    compile_blocks,
    read_torch,
    save,
    set_attention,
    to_device,
    write_torch,
)
from objectives import OBJECTIVES, find_objective

# ---- settings: one flag for each field; the comment beside a field is its help


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
    lora_rank: int = 0  # freeze the weights of --init, train differences of this rank; 0: train all
    steps: int = 1000  # optimiser steps
    batch: int = 64  # examples per step and process
    accumulate: int = 1  # split a batch into so many forward passes
    lr: float = 1e-4  # peak learning rate
    warmup: float = 0.1  # share of the steps in which the rate rises linearly
    # wsd: at the peak, and down to 0 in the last fifth [MiniCPM, arXiv 2404.06395].
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"  # after the warm-up
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: on matrices, AdamW on the rest
    weight_decay: float = 0.01  # on matrices and embeddings; never on biases and norms
    seed: int = 0  # decides weights, batches and masks
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    # auto: bfloat16 where the GPU, or the CPU (avx512_bf16, amx_bf16), has instructions for it.
    # Vectors and evaluations are in float32 in all of them.
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto is the fastest
    out: str = ""  # folder of the run; default: out/OBJECTIVE
    eval_every: int = 150  # steps between evaluations, beside those at step 0 and at the end
    save_every: int = 100  # steps between checkpoints
    # Rare flags: --help lists only their names; --help-all explains them.
    chat: Literal["plain", "system"] = "plain"  # system: a chat's system text opens every view
    block: int = 0  # of text: run lines together, cut rows of so many tokens; 0: a line is a row
    pairs: Literal["pivot", "neighbours"] = "pivot"  # two views: column 1 and any, or i and i + 1
    skip_bad: bool = False  # drop and count bad lines instead of stopping at the first
    header: Literal["yes", "no"] = "yes"  # does a table's first line name the columns?
    cache: str = "cache"  # where token stores of files are kept
    lora_alpha: float = 0.0  # LoRA's differences are scaled by alpha / rank; 0: twice the rank
    lora_dropout: float = 0.1  # dropout on the input of LoRA's differences
    lr_start: float = 0.0  # learning rate at step 0, as a share of the peak
    clip: float = 1.0  # longest gradient; 0: no limit
    compile: bool = False  # torch.compile the blocks: slow first steps, losses agree to rounding
    gradient_checkpointing: bool = False  # compute blocks again backward: less memory, more time
    attention: Literal["auto", "sdpa", "triton"] = "auto"  # sdpa: PyTorch's; triton: our kernels
    log_every: int = 10  # steps between lines of log.jsonl
    eval_limit: int = 500  # rows in the evaluations during training


# May change when a run is resumed; with other steps the rest follows the new schedule. Of the data
# the content must stay the same, not the path; of a preset what it sets.
FREE = {"steps", "device", "attention", "compile", "gradient_checkpointing", "log_every",
        "eval_every", "eval_limit", "save_every", "cache", "out", "data", "preset"}
# Fields of ModelConfig that are flags; others describe other people's models.
SHAPE = ("width", "layers", "heads", "ffn_dim", "max_positions", "dropout", "pool", "positions",
         "norm_position")
# A run of --init brings its tokenizer and its shape, all but these two.
OF_INIT = {"size", "vocab", *SHAPE} - {"dropout", "pool"}


class Settings(NamedTuple):
    """What a run is asked to do, checked."""
    kind: type  # the objective's class
    options: object  # its Config
    train: TrainConfig
    model: ModelConfig
    source: object  # the run folder of --init, opened, or None
    notes: list  # lines to print: what is not as published or as asked for


def defaults(kind, size, preset=""):
    """-> {setting: value} at the paper's scale, and what the toy scale changes of it."""
    if preset and preset not in kind.presets:
        known = f"has {', '.join(kind.presets)}" if kind.presets else "has none"
        raise BadInput(f"preset {preset!r} is unknown: {kind.name} {known}")
    for key in names(kind.Config):
        if key in (*names(TrainConfig), *SHAPE):
            raise BadInput(f"{kind.__name__}.Config has an option {key!r}, as training has: call "
                           "it otherwise")
    # Each line overrides the ones before: the shape, the dataclasses, the paper.
    values = asdict(ModelConfig()) | SIZES.get(size, {}) | dict(pool=kind.pool)
    if kind.causal:
        values |= DECODER
    for config in (TrainConfig, kind.Config):
        values |= {field.name: field.default for field in fields(config)}
    paper_changes, toy_changes = kind.presets.get(preset, ({}, {}))
    paper = kind.paper | paper_changes
    toy = kind.toy | toy_changes
    # A misspelt key would be a setting that is silently not made.
    for key in [*paper, *toy]:
        if key not in values:
            raise BadInput(f"{kind.__name__} has a value for {key!r}, which is no setting"
                           f"{did_you_mean(key, values)}")
    scale = toy if size == "toy" else {}
    return values | paper, scale


def settle(name, given):
    """An objective's name and {setting: value} -> Settings. BadInput for anything odd."""
    kind = find_objective(name)
    given = {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}
    known = [*names(TrainConfig), *names(kind.Config), *SHAPE]
    for key in given:
        if key not in known:
            hint = hint_about(key, kind) or "see train.py --help" + did_you_mean(key, known)
            raise BadInput(f"there is no setting {key}: {hint}")
    source = evaluate.open_run(given["init"]) if given.get("init") else None
    size = source.config.get("size") if source else given.get("size", "toy")
    paper, toy = defaults(kind, size, given.get("preset", ""))
    values = paper | toy | given | dict(out=given.get("out") or f"out/{kind.name}")
    if source and source.config.get("max_length") and "max_length" not in given:
        # A pretrained model goes on with the length of its own.
        values["max_length"] = source.config["max_length"]
    train = pick(TrainConfig, values | dict(size=size))
    options = pick(kind.Config, values)
    check(train, kind, options, given)
    # Of the training values only those that a class has from its paper are the paper's.
    published = {*kind.paper, *kind.presets.get(train.preset, ({},))[0]}
    if published:
        published |= {*names(kind.Config)}
    notes = [f"  toy scale: {key} {value} ({'paper' if key in published else 'default'}: "
             f"{paper[key]})" for key, value in toy.items() if values[key] == value != paper[key]]
    if train.accumulate > 1 and kind.in_batch(options):
        notes.append(f"  accumulate {train.accumulate}: the loss compares the examples of a batch, "
                     f"and sees each part of {train.batch // train.accumulate} apart")
    # The vocabulary is the tokenizer's, and comes when that is known.
    facts = dict(vocab=1, causal=kind.causal, head=kind.model_head(options))
    model = pick(ModelConfig, values | facts)
    if source:
        source = fit_source(source, kind, options)
        # Pooling and dropout come from the model of --init.
        own = source.model.config
        pool = given.get("pool", own.pool)
        if pool != kind.pool:
            notes.append(f"  pool {pool}, not {kind.name}'s own, which is {kind.pool}")
            if kind.reads:
                notes.append(f"  the loss of {kind.name} reads {kind.reads} all the same: "
                             f"--pool {kind.pool} tests what it trains")
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


def hint_about(word, kind):
    """What to say of a flag, or of a word, that this objective does not know; "" if nothing."""
    if word in OBJECTIVES:
        return f"did you mean --objective {word}?"
    name = word.lstrip("-").replace("-", "_").removeprefix("no_")
    owners = [other for other in OBJECTIVES if name in names(OBJECTIVES[other].Config)]
    return f"it belongs to {', '.join(owners)}, not to {kind.name}" if owners else ""


def check(train, kind, options, given):
    """Refuse what would fail or mislead later; what one field allows is `validate`'s."""
    validate(train)
    check_range(train, "steps batch accumulate log_every eval_every eval_limit save_every", 1)
    check_range(train, "max_length", 1)
    check_range(train, "block lora_rank lora_alpha weight_decay clip seed", 0)
    check_range(train, "warmup lr_start lora_dropout", 0, 1)
    check_range(train, "lr", above=0)
    if train.size not in SIZES and not train.init:
        raise BadInput(f"size {train.size!r} is unknown: choose one of {', '.join(SIZES)}"
                       f"{did_you_mean(train.size, SIZES)}")
    if train.batch % train.accumulate:
        raise BadInput(f"batch {train.batch} must be a multiple of --accumulate {train.accumulate}")
    if kind.in_batch(options) and train.batch < 2 * train.accumulate:
        raise BadInput(f"batch {train.batch} is too small: {kind.name} compares the examples of "
                       f"each of --accumulate {train.accumulate} parts")
    if train.chat == "system" and not kind.causal:
        raise BadInput(f"chat system is for decoders, and {kind.name} is none: drop it")
    if train.pairs == "neighbours" and kind.views != 2:
        raise BadInput(f"pairs neighbours is for two texts, and {kind.name} takes one: drop it")
    if train.lora_rank and not train.init:
        raise BadInput(f"lora_rank {train.lora_rank} freezes the weights of --init, and there is "
                       "none: add it")
    vain = [name for name in given if train.init and name in OF_INIT]
    if vain:
        raise BadInput(f"{vain[0]} {given[vain[0]]} has no effect with --init, whose model brings "
                       "its own: drop it")


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
                    formatter_class=wide, explain=lambda word: hint_about(word, kind),
                    description="Train an objective. The same command again resumes.",
                    epilog=f"--help-all explains also {', '.join(map(flag_of, rare))}.")
    parser.add_argument("--help-all", action="help", help=argparse.SUPPRESS)
    parser.add_argument("--objective", default="mexma", metavar="NAME",
                        help=f"{', '.join(OBJECTIVES)}, or a file such as gallery/stp.py; with "
                             "--help shows its flags [mexma]")
    presets = f", and --preset {', '.join(kind.presets)}" if kind.presets else ""
    own = parser.add_argument_group(f"only {kind.name} has these{presets}")
    training = parser.add_argument_group("training")
    add_flags(own, kind.Config, names(kind.Config), paper | toy)
    add_flags(training, TrainConfig, flags, paper | toy, hidden)
    add_flags(training, ModelConfig, SHAPE, paper | toy, hidden)
    # A flag that was not given is None: its default may be the objective's, or another run's.
    given = vars(parser.parse_args(arguments))
    del given["objective"]
    return settle(kind, {key: value for key, value in given.items() if value is not None})


# ---- training as a function


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
        spec, tokenizer, split=split, langs=train.langs, vocab=train.vocab,
        skip_bad=train.skip_bad, cache=train.cache, holdout=not train.eval_data, block=train.block,
        header=train.header)


def make_batches(settings, corpus, batch, seed, rank, world):
    kind = settings.kind
    train = settings.train
    return data.Batches(corpus, kind.views, batch, seed, rank, world,
                        kind.in_batch(settings.options), train.max_length, train.pairs,
                        train.chat == "system")


# ---- parts of the loop


def share_counts(parts, world):
    """Token losses divide by the number of targets of the whole step: each part's own counts give
    way to their mean over parts and ranks, so that averaging the parts gives exactly the gradient
    of one big batch."""
    mean = mean_over_ranks(torch.stack([part["num_targets"] for part in parts]).mean(0), world)
    for part in parts:
        part["num_targets"] = mean
    return parts


def learning_rate(step, train):
    """Rate of step 0..steps-1: linear warm-up to the peak, then down to 0."""
    warm = max(1, round(train.warmup * train.steps))
    if step < warm:
        return train.lr * (train.lr_start + (1 - train.lr_start) * (step + 1) / warm)
    # 0 after the warm-up, 1 at the end.
    done = (step - warm) / max(1, train.steps - warm)
    shapes = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0,
              "wsd": min(1.0, 5 * (1 - done))}
    return train.lr * shapes[train.schedule]


def make_optimizer(objective, train):
    """AdamW; decay on matrices only: a bias, a norm or a lone scalar has no direction to shrink."""
    if train.optimizer == "muon":
        return MuonAndAdamW(objective, train.lr, train.weight_decay)
    trained = [p for p in objective.parameters() if p.requires_grad]
    groups = [dict(params=[p for p in trained if p.ndim >= 2], weight_decay=train.weight_decay),
              dict(params=[p for p in trained if p.ndim < 2], weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=train.lr, fused=True)


# ---- the run

FORMAT = 4  # of train.pt
# What a line of the log has beside the loss and its terms.
NO_TERMS = {"step", "lr", "grad_norm", "tokens", "seconds", "tokens_per_second", "product_share"}


def validation_batches(settings, held_out, rank, world):
    """Batches of the rows held out, made as those of training, and how many: smaller ones if not so
    many rows differ, none if not two do."""
    train = settings.train
    size = min(train.batch // train.accumulate, max(1, len(held_out) // world))
    smallest = 2 if settings.kind.in_batch(settings.options) else 1
    while size >= smallest:
        try:
            batches = make_batches(settings, held_out, size, 0, rank, world)
        except BadInput:
            size //= 2
        else:
            return batches, max(1, min(train.eval_limit, len(held_out)) // (size * world))
    return None, 0


def make_model(settings, special):
    """A new model, or that of --init, with LoRA if it is asked for."""
    train = settings.train
    # Another model may have rows that its tokenizer does not use.
    vocab = max(special.vocab, settings.model.vocab)
    model = Model(replace(settings.model, vocab=vocab))
    if settings.source:
        # The shapes are the same; only a vocabulary head may be new or left behind.
        model.load_state_dict(settings.source.model.state_dict(), strict=False)
    if train.lora_rank:
        # New [PRED] tokens have no meaning yet, so their embeddings are trained too.
        alpha = train.lora_alpha or 2 * train.lora_rank
        add_lora(model, train.lora_rank, alpha, train.lora_dropout, special.preds)
    return model


def read_checkpoint(path):
    saved = read_torch(path)
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise BadInput(f"{path} is no checkpoint of this version: use another --out")
    return saved


def finite_numbers(window, step, is_scaled):
    """What train_step gave for the steps before `step`, still on the device -> {name: number} of
    each. BadInput for one that was not finite; where the loss is scaled, infinite gradients are
    skipped."""
    rows = [dict(zip(one, torch.stack(list(one.values())).tolist())) for one in window]
    for number, row in enumerate(rows, step - len(rows)):
        checked = [name for name in row if name != "grad_norm" or not is_scaled]
        if not all(math.isfinite(row[name]) for name in checked):
            terms = ", ".join(f"{name} {row[name]:g}" for name in checked)
            raise BadInput(f"step {number}: the loss or gradient is not finite ({terms}), and the "
                           "weights were left alone. Begin anew with a lower --lr, --precision "
                           "float32, or a smaller --clip")
    return rows


class Run:
    """One training run: what a step needs, and how it is saved, resumed and evaluated."""
    step = 0
    tokens = 0
    seconds = 0.0  # of training
    clock = 0.0  # up to when they are counted
    untrained = None  # the results at step 0

    def __init__(self, settings, writes, say=lambda text: None, command=""):
        """`writes`: keep everything in train.out; `say(text)` is told what happens; `command`: of
        the shell, for the log."""
        self.settings = settings
        self.train = settings.train
        self.kind = settings.kind
        self.command = command
        device = torch.device(usable_device(self.train.device))
        self.rank, self.world, self.device = join_processes(device)
        self.say = say if self.rank == 0 else lambda text: None
        self.folder = Path(self.train.out)
        # Rank 0 alone holds the folder and writes.
        self.own = TrainingFolder(self.folder) if writes and self.rank == 0 else None
        if self.own:
            self.own.refuse_others()
        self.checkpoint = self.folder / "train.pt"
        saved = read_checkpoint(self.checkpoint) if writes and self.checkpoint.exists() else None
        # A resumed run keeps the precision that was chosen for it, also on another machine.
        precision = self.train.precision
        if saved and precision == "auto":
            precision = saved["precision"]
        self.precision = usable_precision(precision, self.device)
        self.dtype = None if self.precision == "float32" else getattr(torch, self.precision)
        self.open_data(saved)
        # Every rank draws the same weights.
        torch.manual_seed(self.train.seed)
        self.model = make_model(settings, self.corpus.special)
        # What LoRA leaves alone: --init has it, and a checkpoint has not.
        self.frozen = {f"model.{name}": weight for name, weight in self.model.named_parameters()
                       if not weight.requires_grad}
        self.frozen_hash = hash_of(self.frozen) if self.frozen else ""
        self.objective = self.kind(self.model, settings.options).to(self.device)
        for block in self.objective.modules():
            if isinstance(block, Block):
                block.is_checkpointed = self.train.gradient_checkpointing
        # The plans that attention will ask of every batch.
        self.plans = set_attention(self.objective, self.train.attention, self.device,
                                   2 if self.dtype else 4)
        # Rows that cannot be evaluated are refused now, and not after an hour.
        self.judged = evaluate.Evaluation(self.model, self.tokenizer, self.rows, self.affixes,
                                          self.train.max_length, views=self.kind.views)
        self.optimizer = make_optimizer(self.objective, self.train)
        # Half precision alone needs its loss scaled.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.window = []  # what train_step gave since the last line of the log
        self.pace = Pace(self.device, self.dtype, not self.train.compile)
        self.config = {"objective": self.kind.name, **asdict(self.train),
                       "model": asdict(self.model.config),
                       self.kind.name: asdict(settings.options)}
        # Dropout differs between ranks, weights do not.
        torch.manual_seed(self.train.seed + 1 + self.rank)
        if saved:
            refuse_other_run(self.folder, saved, self.identity(), FREE, self.train.steps)
            self.load(saved)

    def take_folder(self):
        """Own the folder while the loop runs, and make it what is known of the run."""
        if self.own:
            self.own.take()
            exists = self.checkpoint.exists()
            step = read_checkpoint(self.checkpoint)["step"] if exists else 0
            if step != self.step:
                raise BadInput(f"{self.folder} was trained in meanwhile: start the run again")
            if exists:
                self.rewind()
            else:
                self.begin()
        if self.world > 1:
            dist.barrier()

    def open_data(self, saved):
        """The batches, and the rows of every evaluation, read once. A resumed run has the tokenizer
        of its folder (or of --init): one trained anew could give other ids."""
        train = self.train
        tokenizer = data.Tokenizer.read(self.folder / "tokenizer.json") if saved else None
        self.corpus, self.batches = open_training(self.settings, self.rank, self.world, tokenizer)
        self.tokenizer = self.corpus.tokenizer
        self.affixes = self.kind.affixes(self.settings.options, self.corpus.special)
        self.rows = corpora.evaluation_rows(
            train.eval_data or train.data, train.langs, "all" if train.eval_data else "valid",
            train.eval_limit, train.skip_bad, train.chat == "system", train.header)
        if self.rank == 0 and (train.eval_data or train.init):
            evaluate.say_trained_on(asdict(train), self.rows)
        held_out = open_rows(train, train.eval_data or train.data, "valid", self.tokenizer)
        if held_out.hash == self.corpus.hash:
            raise BadInput(f"--eval-data {train.eval_data} holds the rows that --data trains on: "
                           "leave it out, and some rows are held out")
        self.validation, self.validation_steps = validation_batches(
            self.settings, held_out, self.rank, self.world)

    def begin(self):
        """The first line of the log says everything about the run."""
        write_atomic(self.folder / "log.jsonl", b"")
        self.tokenizer.save(self.folder / "tokenizer.json")
        self.log({"config": self.config, "command": self.command,
                  "parameters": sum(p.numel() for p in self.objective.parameters()),
                  "processes": self.world, "tokenizer_hash": self.tokenizer.hash,
                  "affixes": self.affixes, "views": self.kind.views, "device": str(self.device),
                  "precision": self.precision, "torch": torch.__version__,
                  "python": platform.python_version()})

    # ---- checkpoints

    def identity(self):
        """What a resumed run must have in common with this one: other ids, rows or ranks would make
        other batches."""
        return {"config": self.config, "processes": self.world, "tokenizer": self.tokenizer.hash,
                "rows": self.corpus.hash, "frozen": self.frozen_hash,
                "the file of the objective": self.kind.file_hash}

    def save(self):
        """train.pt, from which the same command goes on, and model.pt, which is the result."""
        # With every rank's random state and the open window, a resumed run repeats this one.
        states = [random_state(self.device)] * self.world
        if self.world > 1:
            dist.all_gather_object(states, states[0])
        if not self.own:
            return
        demand_finite(self.objective, self.step)
        self.count_time()
        weights = {name: weight for name, weight in self.objective.state_dict().items()
                   if name not in self.frozen}
        write_torch({"format": FORMAT, **self.identity(), "random": states, "step": self.step,
                     "tokens": self.tokens, "seconds": self.seconds, "untrained": self.untrained,
                     "precision": self.precision, "scaler": self.scaler.state_dict(),
                     "weights": weights, "moments": self.optimizer.state_dict()["state"],
                     "window": to_device(self.window, torch.device("cpu"))},
                    self.checkpoint)
        save(self.model, self.folder / "model.pt")

    def load(self, saved):
        """Take over a checkpoint."""
        # In place: the optimiser holds these very parameters.
        self.objective.load_state_dict(saved["weights"] | self.frozen)
        check_moments(saved["moments"], self.optimizer, self.checkpoint)
        # The optimiser's settings are those of this run, and not those of a file.
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": saved["moments"]})
        if saved["scaler"]:  # It is empty unless in half precision.
            self.scaler.load_state_dict(saved["scaler"])
        for name in ("step", "tokens", "seconds", "untrained"):
            setattr(self, name, saved[name])
        self.window = to_device(saved["window"], self.device)
        set_random_state(saved["random"][self.rank], self.device)

    def rewind(self):
        """Back to the checkpoint. A kill may have come between it and model.pt, then older."""
        self.own.rewind(self.step, self.step == self.train.steps)
        model = self.folder / "model.pt"
        if not model.exists() or model.stat().st_mtime < self.checkpoint.stat().st_mtime:
            demand_finite(self.objective, self.step)
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
            if train.compile:
                compile_blocks(self.objective)
            forward = self.objective
            if self.world > 1:
                # Each rank computes its own part of the batch; gradients become their mean.
                ids = [self.device] if self.device.type == "cuda" else None
                forward = torch.nn.parallel.DistributedDataParallel(forward, device_ids=ids)
            # A thread makes the next batches while this one is computed.
            batches = data.prefetch(self.make_batch, self.step, train.steps)
            self.objective.train()
            for parts in batches:
                with self.pace.step(parts):
                    self.window.append(self.train_step(parts, forward))
                self.step += 1
                last = self.step == train.steps
                self.objective.after_step(self.step / train.steps)
                due = []  # records to give, once all that belongs to this step is done
                if self.step % (every or train.log_every) == 0 or last:
                    due.append(self.close_window())
                if self.step % train.eval_every == 0 and not last:
                    # A step that was not finite is told before what came of it.
                    self.numbers()
                    due.append(self.evaluate())
                asked = on_step is not None and on_step(self)
                stopped = on_any_rank(asked, self.world, self.device)
                if self.step % train.save_every == 0 or stopped or last:
                    # A state that is not finite is never saved.
                    self.numbers()
                    self.save()
                yield from due
                if stopped and not last:
                    return
            if not self.is_finished():
                yield self.evaluate()
            if self.world > 1:
                dist.barrier()
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

    def make_batch(self, step, training=True):
        """Step -> its parts (one unless --accumulate), a pure function of (seed, step, rank);
        without `training` of the rows held out."""
        batches = self.batches if training else self.validation
        examples = batches.examples(step)
        # All chance of a batch comes from here: dropout apart, the model draws nothing.
        rng = batches.rng(step)
        options = self.settings.options
        if not training:
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
                    for plan in self.plans:
                        packed.plan(plan, self.device)
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
        values = mean_over_ranks(values, self.world)
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

    def numbers(self):
        """The steps since the last record. The device has to catch up here alone."""
        return finite_numbers(self.window, self.step, self.scaler.is_enabled())

    def close_window(self):
        """The record of the steps since the last one: their means, and the totals."""
        rows = self.numbers()
        self.count_time()
        self.window = []
        mean = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
        # A mean over steps and ranks -> their sum.
        self.tokens += round(mean.pop("tokens") * len(rows) * self.world)
        record = {"step": self.step, **mean, "lr": learning_rate(self.step - 1, self.train),
                  "tokens": self.tokens, "seconds": round(self.seconds, 3),
                  **self.pace.close(self.world)}
        self.log(record)
        return record

    def count_time(self):
        """What passed since the clock was set was time of training."""
        now = time.perf_counter()
        self.seconds += now - self.clock
        self.pace.seconds += now - self.clock
        self.clock = now

    # ---- what the model is worth

    def evaluation(self):
        """The model and its held-out rows, with vectors to be made."""
        return self.judged.again()

    def validate(self):
        """{"validation/TERM": number}: the loss on the rows held out, as all ranks compute it."""
        parts = []
        for step in range(self.validation_steps):
            parts += self.make_batch(step, training=False)
        if not parts:
            return {}
        parts = share_counts(to_device(parts, self.device), self.world)
        total = {}
        with evaluate.in_eval_mode(self.objective):
            for part in parts:
                self.add_losses(self.objective, part, total, len(parts), None)
        values = mean_over_ranks(torch.stack(list(total.values())).float(), self.world)
        return {f"validation/{name}": value for name, value in zip(total, values.tolist())}

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
        if self.objective.warning():
            self.warn(self.objective.warning())
        lost = [name for name in found if name not in results]
        if lost:
            self.warn(f"{', '.join(lost)}: not a finite number")
        length = results.get("geometry/length", math.inf)
        first = self.untrained.get("geometry/length", 0)
        if length < first / 2:
            self.warn(f"the vectors' mean length fell from {first:.1f} to {length:.1f}: a distance "
                      "of raw vectors falls so without their coming closer")
        return record

    def warn(self, text):
        self.log({"step": self.step, "warning": text})
        self.say(f"warning at step {self.step}: {text}")

    def is_finished(self):
        """Did the last step come, on any rank's account, and its evaluation?"""
        done = self.own and self.step == self.train.steps and self.own.is_finished(self.step)
        return on_any_rank(done, self.world, self.device)


# ---- command line


def introduce(run):
    """What is trained, on what, and what is not as published or as asked for."""
    train = run.train
    run.say(f"nanoJEPA: {run.kind.name}, size {train.size}, {train.steps} steps of {train.batch} "
            f"examples, in {run.precision} on {run.device}")
    for note in run.settings.notes:
        run.say(note)
    run.say(f"data {run.corpus.name}: {len(run.corpus):,} rows of "
            f"{', '.join(run.corpus.columns)}; a vocabulary of {run.tokenizer.vocab:,}")
    cut, count = run.corpus.count_cut(train.max_length)
    if cut:
        run.say(f"{cut:,} of {count:,} texts are longer than --max-length {train.max_length} and "
                "are cut; a cut answer has no stop token")
    if not run.validation_steps:
        run.say("too few rows or columns are held out for a loss of their own")
    if run.step:
        run.say(f"resuming at step {run.step} of {train.steps}")


def show(run, progress, record):
    """A record on the screen: the loss and its terms on the bar, an evaluation as a line."""
    if "eval" in record:
        if record["eval"]:  # rank 0 alone has numbers
            headline = evaluate.headline(record["eval"], record["step"])
            run.say(f"step {record['step']:>5}  {headline}")
        return
    terms = {name: f"{value:.3f}" for name, value in record.items() if name not in NO_TERMS}
    progress.show_pace(record["tokens_per_second"], record.get("product_share"), terms)


def finish(run, results):
    """The table of before and after, five examples to read, and what to do next."""
    run.say("\n" + evaluate.table(results, run.untrained,
                                   rest=run.folder / "eval.json"))
    for example in evaluate.examples(run.evaluation()):
        run.say(f"  {example.query}\n    {'=' if example.right else '!'} {example.found}")
        if not example.right:
            run.say(f"    instead of {example.gold}")
    run.say(f"\n{run.tokens:,} tokens in {run.seconds:.0f} s. The run is in {run.folder}\n"
            f"next: python evaluate.py {run.folder}")


def main(arguments):
    """Train as the command line says -> exit status."""
    def say(text):
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()

    world = os.environ.get("WORLD_SIZE", "1")
    program = ["python"] if world == "1" else ["torchrun", "--nproc_per_node", world]
    # A notebook or a test has another program.
    path = sys.argv[0] if sys.argv[0].endswith("train.py") else "train.py"
    run = Run(parse(arguments), True, say, shlex.join([*program, path, *arguments]))
    try:
        introduce(run)
        return train_to_the_end(run)
    finally:
        if run.world > 1:
            dist.destroy_process_group()


def train_to_the_end(run):
    """The loop on the screen -> exit status."""
    if run.is_finished():
        run.say(f"this run is finished: {run.step} steps. Evaluate it: "
                f"python evaluate.py {run.folder}")
        return 0
    # From here on Ctrl-C asks the loop to stop after a step, so that nothing is half done.
    progress = Progress(run.train.steps, run.step, run.rank == 0)
    try:
        # However it ends, what is done is saved.
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
