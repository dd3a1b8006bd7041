"""Train an objective: settings, the training loop, checkpoints, resume.

    python train.py --objective mexma                 # built-in data, CPU, a few minutes
    python train.py --objective mexma --help          # all flags with their defaults
    torchrun --nproc_per_node 8 train.py ...          # the same on 8 GPUs

In a notebook, pass the flags as keywords. With out=None no run folder is written:

    run = train.start("mexma", steps=300, out=None)
    for record in run.steps(every=10): print(record)
    run.scores(); run.encode(["A dog.", "Ein Hund."])

Run the same command again to resume. A run is a folder with model.pt (the trained model), train.pt
(the checkpoint for resuming), tokenizer.json, log.jsonl and eval.json.
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import platform
import shlex
import shutil
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import corpora
import data
import evaluate
from common import (
    AtLeast0,
    AtLeast1,
    BadInput,
    Checked,
    Fraction,
    NotNegative,
    Parser,
    Positive,
    add_flags,
    atomic_file,
    did_you_mean,
    file_hash,
    join_processes,
    lock_folder,
    mean_over_ranks,
    read_torch,
    run_program,
    shown,
    usable_device,
    usable_precision,
    warn,
)
from corpora.optimizer import MuonAndAdamW, load_moments
from model import (
    DECODER,
    SIZES,
    Model,
    ModelConfig,
    Packed,
    add_lora,
    add_tokens,
    compile_blocks,
    save,
    set_attention,
    to_device,
)
from objectives import OBJECTIVES, find_objective

# ---- settings: every field is a flag, and the comment after a field is its help text


@dataclass(frozen=True)
class TrainConfig(Checked):
    # toy, documents or regex (built in), or files: TSV, CSV, JSONL, text, or one file for each
    # language, such as corpus.de,corpus.en
    data: str = "toy"
    langs: str = ""  # columns to use, e.g. en,de [all known columns]
    eval_data: str = ""  # file to evaluate on [rows held out from --data]
    vocab: int | None = None  # vocabulary size of the tokenizer [4096 built in, 8000 for files]
    max_length: AtLeast1 = 128  # truncate texts to N tokens
    # join all lines and split them into rows of N tokens, for which files need --eval-data; 0: one
    # row per line
    block: AtLeast0 = 0
    # which two columns are a pair; pivot: the first with a random other one; neighbours: two
    # adjacent ones
    pairs: Literal["pivot", "neighbours"] = "pivot"
    # decoders only; plain: ignore a chat's system message; system: put it before every text
    chat: Literal["plain", "system"] = "plain"
    # size of the model: toy, small, base, large or hybrid; with all but toy, the other defaults are
    # the paper's
    size: str = "toy"
    # named set of defaults, listed beside "options of ..."; flags that you give override it
    preset: str = ""
    init: str = ""  # run folder to start from (its weights and its tokenizer)
    lora_rank: AtLeast0 = 0  # LoRA rank, with --init only; 0: full fine-tuning
    steps: AtLeast1 = 1000  # number of optimizer steps
    batch: AtLeast1 = 64  # examples per step and process
    accumulate: AtLeast1 = 1  # gradient accumulation: split each batch into N micro-batches
    lr: Positive = 1e-4  # peak learning rate
    lr_start: Fraction = 0.0  # learning rate where warmup begins, as a fraction of the peak
    warmup: Fraction = 0.1  # linear warmup, as a fraction of the steps
    # decay of the learning rate after warmup; wsd: constant, then linear in the last fifth
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    # adamw: AdamW for all weights; muon: Muon for weight matrices, AdamW for the rest
    optimizer: Literal["adamw", "muon"] = "adamw"
    weight_decay: NotNegative = 0.01  # weight decay (not applied to biases and norms)
    clip: NotNegative = 1.0  # gradient clipping (max norm); 0 turns it off
    seed: AtLeast0 = 0  # random seed for weights, batches and masks
    device: str = "auto"  # cpu, cuda, cuda:1 or mps; auto: a GPU if there is one
    # precision of matmuls in training; auto: bfloat16 if the device supports it; float16: CUDA only
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # attention backend: PyTorch's (sdpa) or our kernels (triton); auto: triton on a GPU
    attention: Literal["auto", "sdpa", "triton"] = "auto"
    compile: bool = False  # torch.compile the transformer blocks; the first steps are slow
    gradient_checkpointing: bool = False  # recompute activations in backward to save memory
    out: str = ""  # output folder [out/OBJECTIVE]
    log_every: AtLeast1 = 10  # write a line to log.jsonl every N steps
    eval_every: AtLeast1 = 150  # evaluate every N steps, and at the start and the end
    eval_limit: AtLeast0 = 500  # number of held-out rows to evaluate on during training; 0: all
    save_every: AtLeast1 = 100  # save a checkpoint every N steps


# Settings that may differ when a run is resumed. The data file may move, but its content must be
# the same. With a different --steps, the rest of the run follows the new schedule.
RESUME_MAY_CHANGE = {"steps", "device", "attention", "compile", "gradient_checkpointing",
                     "log_every", "eval_every", "eval_limit", "save_every", "out", "data",
                     "eval_data", "preset"}
# The fields of ModelConfig that are flags. The others describe imported models.
SHAPE = ("width", "layers", "heads", "ffn_dim", "max_positions", "dropout", "pool", "positions",
         "norm_position")
# Settings that the model of --init brings.
FIXED_BY_INIT = {"size", "vocab", *SHAPE} - {"dropout", "pool"}

# Flags of other trainers, and what to use here.
ELSEWHERE = {
    "resume": "run the same command again to resume",
    "fp16": "use --precision float16",
    "bf16": "use --precision bfloat16",
    "epochs": "use --steps (epochs * rows / batch)",
    "gradient-accumulation-steps": "use --accumulate",
    "learning-rate": "use --lr",
    "eval-steps": "use --eval-every",
    "save-steps": "use --save-every",
    "wandb": "log.jsonl in the run's folder has all metrics",
    "config": "give the settings as flags; log.jsonl records them",
}


def pick(config, values):
    """Build a dataclass from those of the values that it has fields for."""
    return config(**{field.name: values[field.name] for field in fields(config)})


def defaults(objective_class, size, preset=""):
    """Return all defaults with the paper's values, and what the toy scale changes."""
    if preset and preset not in objective_class.presets:
        raise BadInput(f"preset {preset!r} is unknown: {objective_class.name} has "
                       f"{', '.join(objective_class.presets) or 'none'}")
    # Later lines override earlier ones.
    values = asdict(ModelConfig()) | SIZES.get(size, {}) | dict(pool=objective_class.pool)
    values |= DECODER if objective_class.causal else {}
    for config in (TrainConfig, objective_class.Config):
        values |= {field.name: field.default for field in fields(config)}
    paper, toy = objective_class.presets.get(preset, ({}, {}))
    paper = objective_class.paper | paper
    toy = objective_class.toy | toy if size == "toy" else {}
    for name in (*paper, *toy):
        if name not in values:  # a typo would silently set nothing
            raise BadInput(f"{objective_class.__name__} has a value for {name!r}, but there is no "
                           f"such setting{did_you_mean(name, values)}")
    return values | paper, toy


def resolve_config(objective_class, given, init=None):
    """Return all settings of a run: a TrainConfig, the objective's Config, a ModelConfig, and notes
    for the user. given: {flag: value}; init: the RunFolder of --init, or None. Raises BadInput.

    Each layer overrides the one before: paper, toy scale, the run of --init, the user."""
    known = [field.name for config in (TrainConfig, objective_class.Config)
             for field in fields(config)] + [*SHAPE]
    if objective_class.name in (*known, "model", "objective"):
        raise BadInput(f"the class {objective_class.__name__} has the name "
                       f"{objective_class.name!r}: give it one that no setting has")
    for name in given:
        if name not in known:
            raise BadInput(f"there is no setting {name}{did_you_mean(name, known)}")
    size = init.config["size"] if init else given.get("size", "toy")
    paper, toy = defaults(objective_class, size, given.get("preset", ""))
    values = paper | toy | dict(size=size)
    if init:
        values["max_length"] = init.config["max_length"] or values["max_length"]
    values |= given | dict(out=given.get("out") or f"out/{objective_class.name}")
    for name in ("out", "init"):
        values[name] = os.path.expanduser(values[name])
    train = pick(TrainConfig, values)
    options = pick(objective_class.Config, values)
    check_combinations(objective_class, train, options, given)
    # The vocabulary size follows from the tokenizer, which does not exist yet.
    model = pick(ModelConfig, values | dict(
        vocab=1, causal=objective_class.causal, head=objective_class.model_head(options)))
    # A row contains every text of an example, each with [CLS] and [SEP].
    texts = objective_class.texts_per_row + (train.chat == "system")
    longest = texts * (train.max_length + 2)
    if init:
        own = init.model.config
        model = replace(own, head=model.head, pool=given.get("pool", own.pool), dropout=(
            objective_class.paper | toy | given).get("dropout", own.dropout))
    elif "max_positions" not in given:
        model = replace(model, max_positions=max(model.max_positions, longest))
    source = "paper" if objective_class.paper else "default"
    notes = [f"  toy scale: {name} {value} ({source}: {paper[name]})"
             for name, value in toy.items() if values[name] == value != paper[name]]
    limit = model.longest_row
    if longest > limit:
        fits = limit // texts - 2
        if "max_length" in given or train.block or fits < 1:
            way_out = f"use --max-length {fits}" if fits > 0 else "choose a model for longer rows"
            raise BadInput(f"max_length {train.max_length}: a row can have {longest} tokens, but "
                           f"the model reads {limit}: {way_out}")
        notes.append(f"  max_length {fits} (not {train.max_length}): the model reads {limit} "
                     "tokens")
        train = replace(train, max_length=fits)
    return train, options, model, notes


def check_combinations(objective_class, train, options, given):
    """Raise BadInput for settings that would fail or mislead together."""
    name = objective_class.name
    ignored = [flag for flag in given if train.init and flag in FIXED_BY_INIT]
    if ignored:
        raise BadInput(f"{ignored[0]} {given[ignored[0]]} cannot be changed with --init, which "
                       "brings its own: remove it")
    if train.size not in SIZES and not train.init:
        raise BadInput(f"size {train.size!r} is unknown: choose one of {', '.join(SIZES)}"
                       f"{did_you_mean(train.size, SIZES)}")
    if train.batch % train.accumulate:
        raise BadInput(f"batch {train.batch} must be a multiple of --accumulate {train.accumulate}")
    if objective_class.uses_in_batch_negatives(options) and train.batch < 2 * train.accumulate:
        raise BadInput(f"batch {train.batch} with --accumulate {train.accumulate}: {name} needs at "
                       "least 2 examples in each micro-batch, for in-batch negatives")
    if train.chat == "system" and not objective_class.causal:
        raise BadInput(f"chat system is for decoders, and {name} trains an encoder: remove it")
    if train.pairs == "neighbours" and objective_class.views != 2:
        raise BadInput(f"pairs neighbours needs two texts, and {name} reads one: remove it")
    if train.lora_rank and not train.init:
        raise BadInput(f"lora_rank {train.lora_rank} needs a pretrained model: add --init")


def parse(arguments):
    """Parse the command line. Return the objective's class and {flag: value} of the given flags."""
    first = Parser("train.py", "", add_help=False)
    for flag, default in (("--objective", "mexma"), ("--size", "toy"), ("--preset", "")):
        first.add_argument(flag, default=default)
    known, _ = first.parse_known_args(arguments)
    objective_class = find_objective(known.objective)
    # Which other flags exist depends on the objective, and their defaults on size and preset.
    paper, toy = defaults(objective_class, known.size, known.preset)
    parser = Parser("train.py", "Train an objective. Run the same command again to resume.",
                    ELSEWHERE, formatter_class=functools.partial(argparse.HelpFormatter, width=100))
    parser.add_argument("--objective", metavar="NAME", help=f"{', '.join(OBJECTIVES)}, or a file "
                        "such as gallery/stp.py; with --help shows its options [mexma]")
    presets = f" (--preset {', '.join(objective_class.presets)})" if objective_class.presets else ""
    add_flags(parser, f"options of {objective_class.name}{presets}", objective_class.Config,
              paper | toy)
    add_flags(parser, "training", TrainConfig, paper | toy)
    add_flags(parser, "model (--size sets these)", ModelConfig, paper | toy, SHAPE)
    given = vars(parser.parse_args(arguments))
    del given["objective"]
    # A flag that was not given is None: its default can come from another run.
    return objective_class, {name: value for name, value in given.items() if value is not None}


# ---- training from Python


def start(objective, out=None, **given):
    """Return a Run for a notebook or a script. The keywords are the flags of the command line.

    objective: a name, a file or a class. out=None writes no run folder; a folder that already holds
    this run resumes it."""
    given = {name: str(value) if isinstance(value, Path) else value
             for name, value in given.items()}
    if isinstance(objective, Path):
        objective = str(objective)
    return Run(find_objective(objective), given | {"out": str(out or "")}, writes=out is not None)


def batch(objective, rows=4, step=0, **given):
    """Return the batch that an objective's collate makes of `rows` examples: a dictionary."""
    run = start(objective, **{"eval_limit": 2, "batch": rows, "accumulate": 1} | given)
    return run.make_batch(step)[0]


# ---- parts of the loop


def learning_rate(step, train):
    """Return the learning rate of a step: linear warmup to the peak, then decay."""
    warm = max(1, round(train.warmup * train.steps))
    if step < warm:
        return train.lr * (train.lr_start + (1 - train.lr_start) * (step + 1) / warm)
    done = (step - warm) / max(1, train.steps - warm)  # 0 after warmup, 1 after the last step
    shapes = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0,
              "wsd": min(1.0, 5 * (1 - done))}  # [MiniCPM, arXiv 2404.06395]
    return train.lr * shapes[train.schedule]


def make_optimizer(objective, train):
    """Return the optimizer. Weight decay applies to matrices only: shrinking a bias, a norm or a
    scalar does not regularize."""
    if train.optimizer == "muon":
        return MuonAndAdamW(objective, train.lr, train.weight_decay)
    trained = [p for p in objective.parameters() if p.requires_grad]
    groups = [dict(params=[p for p in trained if p.ndim >= 2], weight_decay=train.weight_decay),
              dict(params=[p for p in trained if p.ndim < 2], weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=train.lr, fused=True)


def make_model(train, shape, init, special):
    """Return a new model, or the one of --init with the objective's vocabulary head and LoRA."""
    model = Model(replace(shape, vocab=max(special.vocab, shape.vocab)))
    if init:  # strict=False: only the vocabulary head may be new or unused
        model.load_state_dict(init.model.state_dict(), strict=False)
    if train.lora_rank:
        # The embeddings of new [PRED] tokens have no meaning yet, so they are trained too.
        add_lora(model, train.lora_rank, special.preds)
    return model


def adapt_init(init, objective_class, options):
    """Return the run of --init with embeddings for the objective's special tokens. Raises BadInput
    if a causal model meets a bidirectional objective, or the reverse."""
    if init.model.config.causal != objective_class.causal:
        needed = "causal" if objective_class.causal else "bidirectional"
        raise BadInput(f"--init {init.folder}: {objective_class.name} needs a {needed} model: "
                       "choose another run")
    if not all(weight.isfinite().all() for weight in init.model.parameters()):
        raise BadInput(f"--init {init.folder}: its weights contain NaN or infinity: choose "
                       "another run")
    tokenizer = init.tokenizer.with_tokens(objective_class.special_tokens(options))
    new = tokenizer.vocab - init.tokenizer.vocab
    model = add_tokens(init.model, new, init.tokenizer.vocab) if new else init.model
    return init._replace(tokenizer=tokenizer, model=model)


def average_denominators(micro_batches, world):
    """Give every micro-batch the mean number of target tokens over all micro-batches and processes.
    Averaging the losses then gives exactly the gradient of one large batch."""
    counts = torch.stack([one["loss_denominators"] for one in micro_batches]).mean(0)
    mean = mean_over_ranks(counts, world)
    return [one | {"loss_denominators": mean} for one in micro_batches]


def add_terms(total, loss, terms, count):
    """Add a loss and its terms, divided by the number of micro-batches, to the totals."""
    for name, value in {"loss": loss.detach(), **terms}.items():
        total[name] = total.get(name, 0) + value / count


@contextlib.contextmanager
def uninterrupted():
    """Delay Ctrl-C, Jupyter's Stop and SIGTERM to the end of the block or function, so that an
    optimizer step, a log record or a save is done completely or not at all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *call: caught.append(call))
              for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if caught:
        signal.raise_signal(caught[0][0])


def open_data(run, resumed):
    """Open the rows that a run trains on and is evaluated on."""
    train = run.train
    tokenizer = run.init.tokenizer if run.init else None
    if resumed and not run.init:  # a tokenizer that is trained again could give other ids
        tokenizer = evaluate.read_tokenizer(run.folder)
    run.source = corpora.open_text(train.data, train.langs)
    open_rows = functools.partial(data.open_corpus, langs=train.langs, vocab=train.vocab,
                                  holdout=not train.eval_data, block=train.block)
    run.corpus = open_rows(run.source, tokenizer, split="train")
    run.tokenizer = run.corpus.tokenizer
    run.affixes = run.objective_class.affixes(run.options, run.tokenizer.special)
    make_batches = functools.partial(
        data.Batches, views=run.objective_class.views, rank=run.rank, world=run.world,
        uses_in_batch_negatives=run.objective_class.uses_in_batch_negatives(run.options),
        max_length=train.max_length, pairs=train.pairs, system=train.chat == "system")
    run.batches = make_batches(run.corpus, batch=train.batch, seed=train.seed)
    run.eval_source = run.source
    if train.eval_data:
        run.eval_source = corpora.open_text(train.eval_data, train.langs)
    run.held_out = open_rows(run.eval_source, run.tokenizer, split="valid")
    run.data_files = {str(path): file_hash(path) for path in
                      (*run.source.paths, *run.eval_source.paths) if run.writes}
    if run.held_out.hash == run.corpus.hash:
        raise BadInput(f"--eval-data {train.eval_data} has the same rows as --data: leave it "
                       "out, and rows will be held out")
    size = min(train.batch // train.accumulate, max(1, len(run.held_out) // run.world))
    try:
        run.validation = make_batches(run.held_out, batch=size, seed=0)
    except BadInput as error:  # for example, too few distinct rows for in-batch negatives
        run.validation = None
        run.notes.append(f"no validation loss can be computed: {error}")


# ---- the run


class Run:
    """One training run: its data, model and optimizer, and how it trains and is evaluated."""

    def __init__(self, objective_class, given, writes=True, command=""):
        """given: {flag: value}; writes: keep the run in the folder --out; command: for the log."""
        # open_run and resolve_config look these up, so their types are checked first.
        TrainConfig(**{name: given[name] for name in ("size", "preset", "init") if name in given})
        self.init = evaluate.open_run(given["init"]) if given.get("init") else None
        self.objective_class = objective_class
        self.train, self.options, shape, self.notes = resolve_config(objective_class, given,
                                                                     self.init)
        train = self.train
        self.command = command
        self.rank, self.world, self.device = join_processes(usable_device(train.device))
        self.folder = Path(train.out)
        self.writes = writes and self.rank == 0
        saved = read_checkpoint(self.folder) if writes else None
        # A resumed run keeps its precision, also on a machine that would choose another one.
        precision = saved["precision"] if saved and train.precision == "auto" else train.precision
        self.precision = usable_precision(precision, self.device)
        if self.init:
            self.init = adapt_init(self.init, objective_class, self.options)
        open_data(self, resumed=saved is not None)

        torch.manual_seed(train.seed)  # all processes start from the same weights
        self.model = make_model(train, shape, self.init, self.tokenizer.special)
        self.objective = objective_class(self.model, self.options).to(self.device)
        for module in self.objective.modules():
            module.is_checkpointed = train.gradient_checkpointing  # transformer blocks read this
        dtype = getattr(torch, self.precision)
        # Attention needs a plan for each batch. These are the kinds of plan.
        self.plans = set_attention(self.objective, train.attention, self.device, dtype.itemsize)
        self.autocast = functools.partial(torch.autocast, self.device.type, dtype,
                                          enabled=dtype != torch.float32)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == torch.float16)
        self.optimizer = make_optimizer(self.objective, train)
        self.config = {"objective": objective_class.name, **asdict(train),
                       "model": asdict(self.model.config),
                       objective_class.name: asdict(self.options)}
        self.step, self.tokens, self.seconds, self.untrained = 0, 0, 0.0, None
        self.saved_step = 0  # the step of the checkpoint on disk
        self.evaluated = None  # the step of the last evaluation
        self.pending = []  # metrics of the steps since the last record, still on the device
        torch.manual_seed(train.seed + 1 + self.rank)  # each process has its own dropout
        if saved:
            load_checkpoint(self, saved)

    # ---- the loop

    def steps(self, every=None):
        """Train to the last step. Yield a record every `every` steps (default: --log-every), and
        one for each evaluation.

        If you leave the loop (break, Ctrl-C, an exception in your code), a single process saves its
        last complete step, and the next loop continues from there. Several processes keep their
        last checkpoint."""
        train = self.train
        self.evaluation()  # opened now, so that a fault in its rows leaves no folder
        lock = lock_folder(self.folder) if self.writes else None
        batches = None
        try:
            if self.writes:
                open_folder(self)
            if self.evaluation_is_due():
                yield self.evaluate()
            forward = self.objective.train()  # the module itself; DDP wraps it below
            if train.compile:
                compile_blocks(self.objective)
            if self.world > 1:
                forward = DistributedDataParallel(forward)
            self.clock = time.perf_counter()
            # A background thread prepares the next batches while this one is being computed.
            batches = data.prefetch(self.make_batch, self.step, train.steps)
            for micro_batches in batches:
                with uninterrupted():
                    self.pending.append(self.train_step(micro_batches, forward))
                    self.step += 1
                    self.objective.after_step(self.step / train.steps)
                last = self.step == train.steps
                is_due = self.step % (every or train.log_every) == 0 or last
                evaluates = self.evaluation_is_due() and not last
                saves = self.step % train.save_every == 0 or last
                records = []
                if is_due or evaluates or saves:
                    record = self.flush_metrics()
                    records += [record] * is_due
                if evaluates:
                    records.append(self.evaluate())
                if saves:
                    save_checkpoint(self)
                yield from records  # after the save, so that whoever leaves here has a checkpoint
                if not self.pending:  # evaluation, saving and your code are not training time
                    self.clock = time.perf_counter()
            if self.evaluation_is_due():
                yield self.evaluate()
        except (GeneratorExit, KeyboardInterrupt):
            # Several processes can stop at different steps, so they keep the last checkpoint.
            if self.world == 1 and self.step > self.saved_step:
                with uninterrupted():  # a second Ctrl-C would leave a new train.pt, an old model.pt
                    if self.pending:
                        self.flush_metrics()
                    save_checkpoint(self)
            raise
        finally:
            if batches:
                batches.close()
            self.objective.eval()
            if lock is not None:
                os.close(lock)

    def make_batch(self, step, training=True):
        """Return the micro-batches of a step, which depend on nothing but (seed, step, rank)."""
        batches, options = self.batches, self.options
        if not training:
            batches = self.validation
            options = replace(options, **self.objective_class.eval_overrides)
        examples = batches.examples(step)
        rng = batches.rng(step)  # all randomness of a batch
        size = self.train.batch // self.train.accumulate
        micro_batches = [self.objective_class.collate(examples[first:first + size], rng, options,
                                                      self.tokenizer.special)
                         for first in range(0, len(examples), size)]
        # Prepare attention here, in the background thread, and not in the first layer.
        for packed in itertools.chain(*(one.values() for one in micro_batches)):
            if isinstance(packed, Packed):
                for kind in self.plans:
                    packed.plan(kind, self.device)
        return micro_batches

    def train_step(self, micro_batches, forward):
        """Run one optimizer step. Return {name: scalar}: loss, loss terms, tokens and gradient
        norm, averaged over micro-batches and processes. Nothing here waits for the GPU."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.train)
        micro_batches = average_denominators(to_device(micro_batches, self.device), self.world)
        total = {}
        for one in micro_batches:
            # The processes exchange gradients once a step, with the last micro-batch.
            exchanges = self.world == 1 or one is micro_batches[-1]
            with contextlib.nullcontext() if exchanges else forward.no_sync():
                with self.autocast():
                    loss, terms = forward(one)
                self.scaler.scale(loss / len(micro_batches)).backward()
            add_terms(total, loss, terms, len(micro_batches))
        tokens = sum(len(one["packed"].tokens) for one in micro_batches)
        total["tokens"] = torch.full((), float(tokens), device=self.device)
        values = mean_over_ranks(torch.stack([x.float() for x in total.values()]), self.world)
        self.scaler.unscale_(self.optimizer)  # clip the true gradients, not the scaled ones
        norm = torch.nn.utils.clip_grad_norm_(self.objective.parameters(),
                                              self.train.clip or math.inf)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return dict(zip([*total, "grad_norm"], torch.cat([values, norm.float().view(1)])))

    @uninterrupted()
    def flush_metrics(self):
        """Average the metrics of the pending steps, log them and return the record."""
        pending = self.pending
        steps = torch.stack([torch.stack(list(one.values())) for one in pending])  # (steps, names)
        # This is the only line that waits for the GPU. In float64 the number of tokens is exact.
        mean = dict(zip(pending[0], steps.cpu().double().mean(0).tolist()))
        if not math.isfinite(mean["loss"]):
            raise BadInput(f"step {self.step}: the loss is not finite ({mean}). Restart with a "
                           "lower --lr, --precision float32 or a smaller --clip"
                           f"{'; the last checkpoint is intact' * (self.saved_step > 0)}")
        seconds = time.perf_counter() - self.clock
        tokens = round(mean.pop("tokens") * len(pending) * self.world)
        self.pending = []
        self.tokens += tokens
        self.seconds += seconds
        record = {"step": self.step, **mean, "lr": learning_rate(self.step - 1, self.train),
                  "tokens": self.tokens, "seconds": round(self.seconds, 3),
                  "tokens_per_second": round(tokens / max(seconds, 1e-9))}
        append_log(self, record)
        return record

    # ---- evaluation

    def evaluation_is_due(self):
        """Return whether this step has an evaluation that this process has not done yet."""
        is_scheduled = self.step % self.train.eval_every == 0 or self.step == self.train.steps
        return is_scheduled and self.evaluated != self.step

    def validate(self):
        """Return {"validation/TERM": number}, the loss terms on held-out rows."""
        if not self.validation:
            return {}
        rows = min(self.train.eval_limit or len(self.held_out), len(self.held_out))
        micro_batches = []
        for step in range(max(1, rows // (self.validation.batch * self.world))):
            micro_batches += self.make_batch(step, training=False)
        micro_batches = average_denominators(to_device(micro_batches, self.device), self.world)
        total = {}
        devices = [self.device] if self.device.type == "cuda" else []
        with evaluate.in_eval_mode(self.objective), torch.random.fork_rng(devices):
            for one in micro_batches:
                add_terms(total, *self.objective(one), len(micro_batches))
        values = mean_over_ranks(torch.stack(list(total.values())).float(), self.world)
        return {f"validation/{name}": value for name, value in zip(total, values.tolist())}

    @functools.cached_property
    def rows(self):
        """The held-out rows that evaluations read, as texts."""
        train = self.train
        return corpora.evaluation_rows(
            self.eval_source, train.langs, "all" if train.eval_data else "valid",
            train.eval_limit, system=train.chat == "system")

    @functools.cached_property
    def evaluator(self):
        """An evaluate.Evaluation of these rows."""
        return evaluate.Evaluation(self.model, self.tokenizer, self.rows, self.affixes,
                                   self.train.max_length, views=self.objective_class.views)

    def evaluation(self):
        """Return an evaluate.Evaluation of the model as it is now, on the held-out rows."""
        return self.evaluator.with_fresh_cache()

    def scores(self):
        """Evaluate on the held-out rows. Return {"task/metric": number}; {} on ranks above 0."""
        losses = self.validate()
        return (losses | evaluate.run(self.evaluation())) if self.rank == 0 else {}

    def encode(self, texts):
        """Return the L2-normalized embeddings (N, D) of N texts, encoded as the first view is."""
        embeddings = evaluate.encode(self.model, self.tokenizer, texts, self.affixes[0],
                                     self.train.max_length)
        return torch.nn.functional.normalize(embeddings, dim=-1)

    def evaluate(self):
        """Evaluate, log the results and return the record."""
        scores = self.scores()
        results = {name: value for name, value in scores.items() if math.isfinite(value)}
        if self.untrained is None:
            self.untrained = results
        warnings = [f"{name} is not a finite number" for name in scores if name not in results]
        for text in filter(None, [*warnings, self.objective.warning()]):
            append_log(self, {"step": self.step, "warning": text})
            if self.rank == 0:
                warn(f"step {self.step}: {text}")
        if self.writes and self.step == self.train.steps:
            write_eval_json(self, results)
        record = {"step": self.step, "eval": results}
        append_log(self, record)
        self.evaluated = self.step
        return record


# ---- the folder of a run: log, checkpoints, resume


PART = ".*.*.????????.part"  # what atomic_file leaves after a kill, such as .model.pt.0a1b2c3d.part


def read_checkpoint(folder):
    """Return the content of train.pt, or None for a new run. Raises BadInput for a folder that
    contains anything else, so that we never overwrite files that we did not create."""
    path = folder / "train.pt"
    if os.path.exists(path):
        saved = read_torch(path)
        if not (isinstance(saved, dict) and "precision" in saved):
            raise BadInput(f"{path} is not a checkpoint of this version: choose another --out")
        return saved
    if os.path.isdir(folder):
        # A run that is killed before its first checkpoint leaves these.
        ours = {"log.jsonl", "tokenizer.json", "hf"}
        others = [path.name for path in folder.iterdir()
                  if path.name not in ours and not path.match(PART)]
        if others:
            raise BadInput(f"--out {folder} contains {others[0]}, but no train.pt to resume from: "
                           "choose another --out")
    return None


def open_folder(run):
    """Prepare the locked folder of a run. A new run starts its log; a resumed one drops the log
    lines after its checkpoint and writes model.pt again, in case a kill prevented that."""
    saved = read_checkpoint(run.folder)
    if (saved["step"] if saved else 0) != run.saved_step:
        raise BadInput(f"{run.folder} was trained further by another process: start the run again "
                       "to continue from there")
    for part in run.folder.glob(PART):  # left by a kill
        part.unlink()
    if run.step == 0 and run.untrained is None:
        run.tokenizer.save(run.folder / "tokenizer.json")
        if run.init and (run.init.folder / "hf").is_dir():  # what an export needs
            shutil.copytree(run.init.folder / "hf", run.folder / "hf", symlinks=True,
                            dirs_exist_ok=True)
        write_log(run, [describe(run)])
    elif 0 < run.step == run.saved_step:
        check_finite(run)
        # The first line is written again, because the data files may have moved, and so is this
        # step's evaluation if it is due.
        again = run.evaluation_is_due()
        kept = [record for record in evaluate.read_log(run.folder)[1:] if record["step"] < run.step
                or record["step"] == run.step and ("loss" in record or not again)]
        write_log(run, [describe(run), *kept])
        save(run.model, run.folder / "model.pt")


def append_log(run, record):
    """Append a line to log.jsonl. NaN and infinity, which JSON lacks, become strings."""
    if run.writes:
        record = json.loads(json.dumps(record), parse_constant=str)
        with open(run.folder / "log.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def write_log(run, records):
    with atomic_file(run.folder / "log.jsonl") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records).encode())


def write_eval_json(run, results):
    """Write the last evaluation. A finished run that is started again keeps what is there, because
    evaluate.py can have added to it."""
    path = run.folder / "eval.json"
    model = file_hash(run.folder / "model.pt")
    if evaluate.read_results(path).get("model") != model[:8]:
        evaluate.write_results(path, results, run.evaluator.label, model)


def describe(run):
    """Return the first line of the log."""
    special = run.tokenizer.special
    return {"format": evaluate.FORMAT, "config": run.config, "command": run.command,
            "parameters": sum(p.numel() for p in run.objective.parameters()),
            "processes": run.world, "tokenizer_hash": run.tokenizer.hash,
            "around": [special.before, special.after], "affixes": run.affixes,
            "views": run.objective_class.views, "device": str(run.device),
            "precision": run.precision, "torch": torch.__version__,
            "python": platform.python_version(),
            "data_files": run.data_files}


def identity(run):
    """Return what a run and the checkpoint that it resumes must have in common."""
    return {"config": run.config, "processes": run.world,
            "content of --data": run.corpus.hash, "held-out rows": run.held_out.hash,
            "tokenizer": run.tokenizer.hash,
            "model of --init": run.init.model_hash if run.init else "",
            "content of the objective's file": run.objective_class.file_hash}


def frozen_names(run):
    """Return the names of the weights that LoRA freezes. A checkpoint omits them, because the run
    of --init has them."""
    return {f"model.{name}" for name, weight in run.model.named_parameters()
            if not weight.requires_grad}


def save_checkpoint(run):
    """Write train.pt, from which the same command resumes, and model.pt, the trained model."""
    random = [random_state(run.device)] * run.world
    if run.world > 1:
        dist.all_gather_object(random, random[0])
    if run.writes:
        check_finite(run)
        frozen = frozen_names(run)
        saved = {**identity(run), "step": run.step, "tokens": run.tokens, "seconds": run.seconds,
                 "untrained": run.untrained, "precision": run.precision, "random": random,
                 "weights": {name: weight for name, weight in run.objective.state_dict().items()
                             if name not in frozen},
                 "optimizer": run.optimizer.state_dict()["state"],
                 "scaler": run.scaler.state_dict()}
        with atomic_file(run.folder / "train.pt") as file:
            torch.save(saved, file)
        save(run.model, run.folder / "model.pt")
    run.saved_step = run.step


def load_checkpoint(run, saved):
    """Continue from a checkpoint. Raises BadInput if it belongs to a different run."""
    now = identity(run)
    changes = [text for name, text in differences({name: saved.get(name) for name in now}, now)
               if name not in RESUME_MAY_CHANGE]
    if saved["step"] > run.train.steps:
        changes.append(f"it is at step {saved['step']}, after --steps {run.train.steps}")
    if changes:
        raise BadInput(f"{run.folder} contains a different run: {'; '.join(changes)}. Choose "
                       "another --out, or undo the change")
    weights = run.objective.state_dict()
    run.objective.load_state_dict({name: weights[name] for name in frozen_names(run)}
                                  | saved["weights"])
    load_moments(run.optimizer, saved["optimizer"], run.folder / "train.pt")
    if saved["scaler"]:  # empty unless in float16
        run.scaler.load_state_dict(saved["scaler"])
    for name in ("step", "tokens", "seconds", "untrained"):
        setattr(run, name, saved[name])
    run.saved_step = run.step
    torch.set_rng_state(saved["random"][run.rank]["cpu"])
    if run.device.type == "cuda":
        torch.cuda.set_rng_state(saved["random"][run.rank]["cuda"], run.device)


def random_state(device):
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def check_finite(run):
    """Raise BadInput rather than write weights that nobody can use."""
    if not all(weight.isfinite().all() for weight in run.objective.parameters()):
        raise BadInput(f"step {run.step}: the weights are not finite and were not saved. Restart "
                       "with a lower --lr or --precision float32; the last checkpoint is intact")


def differences(old, new, prefix=""):
    """Yield (name, text) for every value that differs between two nested dictionaries."""
    for name in sorted(old.keys() | new.keys()):
        before, now = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            yield from differences(before, now, f"{prefix}{name}.")
        elif before != now:  # the first digits identify a hash
            yield name, f"{prefix}{name} was {str(before)[:40]}, is {str(now)[:40]}"


# ---- command line


def introduce(run, say):
    """Print what is trained on what, and which values are not the paper's."""
    train = run.train
    say(f"nanoJEPA: {run.objective_class.name}, size {train.size}, {train.steps} steps of "
        f"{train.batch} examples, {run.precision} on {run.device}")
    for note in run.notes + run.source.notes:
        say(note)
    columns = shown(", ".join(run.corpus.columns))
    say(f"data {run.corpus.name}: {len(run.corpus):,} rows of {columns}, and "
        f"{len(run.held_out):,} {'in --eval-data' if train.eval_data else 'held out'}; vocabulary "
        f"{run.tokenizer.vocab:,}")
    truncated, count = run.corpus.count_truncated(train.max_length, train.chat == "system")
    if truncated:
        say(f"{truncated:,} of {count:,} texts are longer than --max-length {train.max_length} and "
            "will be truncated")
    if train.eval_data or train.init:
        evaluate.warn_train_test_overlap({"config": run.config}, run.rows)
    if run.step == train.steps:
        say("this run is finished, and is evaluated again")
    elif run.step:
        say(f"resuming at step {run.step} of {train.steps}")


def finish(run, results, say):
    """Print the results before and after training, five examples, and the next command."""
    say("\n" + evaluate.table(results, run.untrained,
                              start="start" if run.train.init else "untrained"))
    for line in evaluate.examples(run.evaluation()):
        say(line)
    say(f"\n{run.tokens:,} tokens in {run.seconds:.0f} s. The run is in {run.folder}\n"
        f"next: python evaluate.py {shlex.quote(str(run.folder))}")


def interrupt(number, frame):
    raise KeyboardInterrupt(number)


def main(arguments):
    """Train as the command line says. Return the exit status."""
    objective_class, given = parse(arguments)
    world = os.environ.get("WORLD_SIZE", "1")
    program = ["python"] if world == "1" else ["torchrun", "--nproc_per_node", world]
    command = shlex.join([*program, "train.py", *arguments])
    run = Run(objective_class, given, command=command)

    def say(text):
        if run.rank == 0:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    introduce(run, say)
    signal.signal(signal.SIGTERM, interrupt)
    bar = tqdm(total=run.train.steps, initial=run.step, dynamic_ncols=True,
               disable=None if run.rank == 0 else True)  # None: no bar in a file
    try:
        with bar, contextlib.closing(run.steps()) as records:
            for record in records:
                bar.update(run.step - bar.n)
                if "loss" in record:
                    bar.set_postfix_str(f"loss {record['loss']:.3f}, "
                                        f"{record['tokens_per_second']:,} tokens/s")
                elif record["eval"]:  # only rank 0 has numbers
                    headline = evaluate.headline(
                        record["eval"], record["step"],
                        start="start" if run.train.init else "untrained")
                    say(f"step {record['step']:>5}  {headline}")
    except KeyboardInterrupt as stop:
        say(f"stopped; saved at step {run.saved_step}. To resume: {command}")
        return 128 + (stop.args[0] if stop.args else signal.SIGINT)
    finally:
        if run.world > 1:
            dist.destroy_process_group()
    if run.rank == 0:
        finish(run, record["eval"], say)
    return 0


if __name__ == "__main__":
    run_program(main)
