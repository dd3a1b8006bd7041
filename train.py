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
import json
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
from corpora.program import (
    BadInput,
    Parser,
    Progress,
    add_flags,
    comma_list,
    did_you_mean,
    exit_status,
    lock,
    peak_memory,
    validate,
)
from corpora.text import write_atomic
from kernels import why_not
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
    load_weights,
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
    data: str = "toy"  # toy, documents, regex, pydoc, or files: TSV, CSV, JSONL, text, Moses
    langs: str = ""  # columns to use, as en,de; the first is the pivot; default: all
    chat: Literal["plain", "system"] = "plain"  # system: a chat's system text opens every view
    block: int = 0  # of text: run lines together, cut rows of so many tokens; 0: a line is a row
    pairs: Literal["pivot", "neighbours"] = "pivot"  # two views: column 1 and any, or i and i + 1
    eval_data: str = ""  # file to evaluate on; default: rows held out from the data
    skip_bad: bool = False  # drop and count bad lines instead of stopping at the first
    vocab: int | None = None  # pieces of the tokenizer; default: 4096 embedded, 8000 files
    max_length: int = 128  # longest view in tokens; the rest is cut off
    cache: str = "cache"  # where token stores of files are kept
    size: str = "toy"  # shape of the model: toy, small, base, large
    init: str = ""  # run folder whose weights and tokenizer are the start
    lora_rank: int = 0  # train differences of this rank to the frozen weights of --init; 0: all
    lora_alpha: float = 0.0  # their scale is alpha / rank; 0: twice the rank
    steps: int = 1000  # optimiser steps
    batch: int = 64  # examples per step and process
    accumulate: int = 1  # split a batch into so many forward passes
    lr: float = 1e-4  # peak learning rate
    warmup: float = 0.1  # share of the steps in which the rate rises linearly
    lr_start: float = 0.0  # where that begins, as a share of the peak
    schedule: Literal["cosine", "linear", "constant"] = "cosine"  # after the warm-up
    schedule_steps: int = 0  # step at which the schedule would reach 0; 0: the last
    weight_decay: float = 0.01  # on matrices and embeddings; never on biases and norms
    clip: float = 1.0  # longest gradient; 0: no limit
    seed: int = 0  # of weights, batches, masks
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of the products
    compile: bool = False  # torch.compile the blocks: slow first steps, losses agree to rounding
    attention: Literal["auto", "sdpa", "triton"] = "auto"  # sdpa: PyTorch's; triton: our kernels
    out: str = ""  # folder of the run; default: out/OBJECTIVE
    log_every: int = 10  # steps between lines of log.jsonl
    eval_every: int = 150  # steps between evaluations, beside those at step 0 and at the end
    eval_limit: int = 500  # rows in the evaluations during training
    save_every: int = 100  # steps between checkpoints


# May change when a run is resumed; with other steps the rest follows the new schedule. Of the data
# the content must stay the same, not the path.
FREE = {"steps", "device", "attention", "compile", "log_every", "eval_every", "eval_limit",
        "save_every", "cache", "out", "data"}
# The fields of ModelConfig that are flags; the others describe other people's models.
SHAPE = ("width", "layers", "heads", "ffn_dim", "max_positions", "dropout", "pool", "positions",
         "norm_position")


class Settings(NamedTuple):
    """What a run is asked to do, checked."""
    kind: type  # the objective's class
    options: object  # its Config
    train: TrainConfig
    model: ModelConfig
    source: object  # the run folder of --init, opened, or None
    notes: list  # lines to print: what the toy scale changes


def names(config):
    return [field.name for field in fields(config)]


def find_objective(name):
    if name not in OBJECTIVES:
        raise BadInput(f"objective {name!r} is unknown: choose one of {', '.join(OBJECTIVES)}"
                       f"{did_you_mean(name, OBJECTIVES)}")
    return OBJECTIVES[name]


def defaults(kind, size):
    """-> {setting: value} at the paper's scale, and what the toy scale changes of it."""
    # Each line overrides the ones before: the shape, the dataclasses, the paper.
    values = asdict(ModelConfig()) | SIZES.get(size, {})
    values |= dict(head=kind.head, pool=kind.pool)
    if kind.causal:
        values |= DECODER
    for config in (TrainConfig, kind.Config):
        values |= {field.name: field.default for field in fields(config)}
    # A misspelt key would be a setting that is silently not made.
    for key in [*kind.paper, *kind.toy]:
        if key not in values:
            raise BadInput(f"{kind.__name__} has a value for {key!r}, which is no setting"
                           f"{did_you_mean(key, values)}")
    return values | kind.paper, kind.toy if size == "toy" else {}


def pick(config, values):
    return config(**{name: values[name] for name in names(config)})


def settle(name, given):
    """An objective's name and {setting: value} -> Settings. BadInput for anything odd."""
    kind = find_objective(name)
    given = {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}
    source = open_source(kind, given) if given.get("init") else None
    size = source.config["size"] if source else given.get("size", "toy")
    paper, toy = defaults(kind, size)
    known = [*names(TrainConfig), *names(kind.Config), *SHAPE]
    for key in given:
        if key not in known:
            raise BadInput(unknown_flag(key, kind))
    values = paper | toy | given | dict(size=size, out=given.get("out") or f"out/{kind.name}")
    train = pick(TrainConfig, values)
    options = pick(kind.Config, values)
    check(train, kind, options)
    # The vocabulary is the tokenizer's, and comes when that is known.
    model = pick(ModelConfig, values | dict(vocab=1, causal=kind.causal))
    if source:
        # The shape is the other model's; what is no matter of its weights is this run's.
        source = with_tokens(source, kind.special_tokens(options))
        model = replace(source.model.config, head=model.head, pool=model.pool,
                        dropout=model.dropout)
    # [CLS] and [SEP] around every text of a row, and a chat's system text before them.
    longest = (kind.texts_per_row + (train.chat == "system")) * (train.max_length + 2)
    if longest > model.max_positions:
        raise BadInput(f"max_length {train.max_length}: a row can have {longest} tokens, over "
                       f"max_positions {model.max_positions}: lower --max-length")
    notes = [f"  toy scale: {key} {value} (paper: {paper[key]})" for key, value in toy.items()
             if key not in given and value != paper[key]]
    return Settings(kind, options, train, model, source, notes)


def open_source(kind, given):
    """The run of --init, whose model and tokenizer are kept: what would change them is refused."""
    for key in {"size", "vocab", *SHAPE} - {"dropout", "pool"}:
        if key in given:
            raise BadInput(f"{key} {given[key]} has no effect with --init, whose model and "
                           "tokenizer are kept: drop one of the two")
    # A model that learnt to read one way has no use for the other way's mask.
    source = evaluate.open_run(given["init"])
    if source.model.config.causal != kind.causal:
        reads = "left to right" if kind.causal else "both ways"
        raise BadInput(f"--init {given['init']}: {kind.name} needs a model that reads {reads}; "
                       "choose another run")
    return source


def with_tokens(source, tokens):
    """The run with special tokens that its tokenizer lacks, and rows of the embedding for them."""
    new = [token for token in tokens if source.tokenizer.inner.token_to_id(token) is None]
    if not new:
        return source
    return source._replace(tokenizer=source.tokenizer.with_tokens(new),
                           model=add_tokens(source.model, len(new), source.tokenizer.vocab))


def unknown_flag(name, kind):
    """One line about a flag that this objective does not have."""
    name = name.lstrip("-").replace("-", "_")
    flag = "--" + name.replace("_", "-")
    owners = [other for other in OBJECTIVES if name.removeprefix("no_")
              in names(OBJECTIVES[other].Config)]
    if owners:
        return f"{flag} belongs to {', '.join(owners)}, not to {kind.name}: drop it"
    known = [*names(TrainConfig), *names(kind.Config), "objective", *SHAPE]
    near = did_you_mean(flag, ["--" + one.replace("_", "-") for one in known])
    return f"there is no setting {flag}{near}"


def check(train, kind, options):
    """Refuse values that would fail or mislead later; what one field allows is `validate`'s."""
    validate(train, at_least={
        1: "steps batch accumulate log_every eval_every eval_limit save_every max_length",
        0: "block lora_rank lora_alpha schedule_steps weight_decay clip seed"},
        above={0: "lr"}, shares="warmup lr_start")
    falls = train.schedule_steps >= train.steps and train.schedule != "constant"
    sizes = ", ".join(SIZES)
    rules = [  # a setting, what must hold if it is not 0 or "", what is wrong otherwise
        ("size", train.size in SIZES or train.init, f"is unknown: choose one of {sizes}"),
        ("vocab", 300 <= (train.vocab or 300) <= 1_000_000, "must be from 300 to 1,000,000"),
        ("batch", train.batch % train.accumulate == 0, "must be a multiple of --accumulate"),
        ("batch", not kind.in_batch(options) or train.batch >= 2 * train.accumulate,
         f"is too small: {kind.name} compares the examples of each of --accumulate parts"),
        ("lr_start", train.warmup > 0, "has no effect without --warmup: drop it"),
        ("schedule_steps", falls, "needs a schedule that falls, and at least --steps"),
        ("chat", train.chat == "plain" or kind.causal, f"has no meaning for {kind.name}: drop it"),
        ("block", kind.views == 1, f"needs single texts, and {kind.name} takes pairs: drop it"),
        ("block", 8 <= train.block <= train.max_length, "must be from 8 to --max-length"),
        ("lora_alpha", train.lora_rank, "has no effect without --lora-rank: drop it"),
        ("seed", train.seed < 2 ** 63, "must be under 2 ** 63"),
        ("lora_rank", train.init, "needs the frozen weights of a run: add --init"),
    ]
    # 0 and "" mean that a setting is off, and then it needs nothing.
    for name, holds, otherwise in rules:
        if getattr(train, name) and not holds:
            raise BadInput(f"{name} {getattr(train, name)} {otherwise}")


def parse(arguments):
    """Command line -> Settings. BadInput for anything odd."""
    # Which flags there are depends on the objective, and their defaults on the size.
    first = Parser(prog="train.py", add_help=False)
    first.add_argument("--objective", default="mexma")
    first.add_argument("--size", default="toy")
    known, _ = first.parse_known_args(arguments)
    kind = find_objective(known.objective)
    paper, toy = defaults(kind, known.size)
    values = paper | toy
    wide = functools.partial(argparse.HelpFormatter, max_help_position=28, width=120)
    parser = Parser(prog="train.py", usage="python train.py [--objective NAME] [--flag VALUE ...]",
                    formatter_class=wide, explain=lambda flag: unknown_flag(flag, kind),
                    description="Train an objective. The same command again resumes.")
    parser.add_argument("--objective", default="mexma", metavar="NAME",
                        help=f"{', '.join(OBJECTIVES)}; with --help shows its flags [mexma]")
    own = parser.add_argument_group(f"only {kind.name} has these")
    add_flags(own, kind.Config, names(kind.Config), values)
    add_flags(parser.add_argument_group("training"), TrainConfig, names(TrainConfig), values)
    add_flags(parser.add_argument_group("model"), ModelConfig, SHAPE, values)
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
    kind = settings.kind
    train = settings.train
    if settings.source:
        tokenizer = settings.source.tokenizer
    corpus = data.open_corpus(
        train.data, tokenizer, langs=comma_list(train.langs) or None, vocab=train.vocab,
        skip_bad=train.skip_bad, cache=train.cache, holdout=not train.eval_data, block=train.block)
    batches = data.Batches(corpus, kind.views, train.batch, train.seed, rank, world,
                           kind.in_batch(settings.options), train.max_length, train.pairs,
                           train.chat == "system")
    return corpus, batches


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


def choose_device(train):
    """-> device, dtype of autocast or None. BadInput if this machine cannot do what is asked."""
    device = torch.device(evaluate.usable_device(None if train.device == "auto" else train.device))
    # `auto` takes our kernels where they can run; who names them wants to know why they cannot.
    reason = why_not(device) if train.attention == "triton" else ""
    if reason:
        raise BadInput(f"attention triton cannot be used here: {reason}; --attention auto chooses")
    name = train.precision
    if name == "auto":
        name = "float32"
        if device.type == "cuda":
            # A GPU without bfloat16 computes in half precision, with a loss scaler.
            has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
            name = "bfloat16" if has_bfloat16 else "float16"
    if name == "float16" and device.type != "cuda":
        raise BadInput("precision float16 needs a CUDA GPU for its loss scaling: use bfloat16")
    return device, None if name == "float32" else getattr(torch, name)


def to_device(batch, device):
    """A batch on the device; to a GPU from pinned memory, so that the loop need not wait."""
    if device.type == "cuda":
        return each_tensor(batch, lambda x: x.pin_memory().to(device, non_blocking=True))
    return each_tensor(batch, lambda x: x.to(device))


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


def differences(old, new, prefix=""):
    """The settings of a saved run that this command would change, a text each."""
    found = []
    for name in sorted(set(old) | set(new)):
        before = old.get(name, "absent")
        now = new.get(name, "absent")
        if isinstance(before, dict) and isinstance(now, dict):
            found += differences(before, now, f"{prefix}{name}.")
        elif before != now and name not in FREE:
            found.append(f"{prefix}{name} was {before}, is {now}")
    return found


def read_checkpoint(folder):
    """train.pt of a folder; None where nothing was saved yet. BadInput for any other folder."""
    path = folder / "train.pt"
    if path.exists():
        saved = read_torch(path)
        if not isinstance(saved, dict) or saved.get("format") != FORMAT:
            raise BadInput(f"{path} is no checkpoint of this version: use another --out")
        return saved
    # What a run leaves that ended before its first checkpoint; it may be begun anew.
    begun = {"tokenizer.json", "log.jsonl", ".lock"}
    others = [one.name for one in folder.iterdir() if not one.name.endswith(".part")]
    others = sorted(set(others) - begun)
    if others:
        raise BadInput(f"{folder} holds {others[0]} and no train.pt to go on from: put that back, "
                       "or use another --out")
    return None


# --------------------------------------------------------------------------------------------------
# The run

FORMAT = 2  # of train.pt


class Run:
    """One training run: what a step needs, and how it is saved, resumed and evaluated."""

    def __init__(self, settings, writes, say=lambda text: None, command=""):
        """`writes`: keep everything in train.out; `say(text)` is told what happens."""
        self.settings = settings
        self.train = settings.train
        self.kind = settings.kind
        self.command = command
        self.device, self.dtype = choose_device(self.train)
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.join_ranks()
        self.say = say if self.rank == 0 else lambda text: None
        self.folder = Path(self.train.out) if writes else None
        self.say(f"nanoJEPA: {self.kind.name}, size {self.train.size}, {self.train.steps} steps of "
                 f"{self.train.batch} examples, in {self.dtype or torch.float32} on {self.device}")
        for note in settings.notes:
            self.say(note)
        self.lock = None
        if not writes:
            self.prepare(None)
            return
        before = sorted(self.folder.iterdir()) if self.folder.exists() else None
        # Locked first, read then: nobody else can write between the two.
        self.hold()
        try:
            self.prepare(read_checkpoint(self.folder))
        except BaseException:
            # Nothing was begun: the folder is left as it was.
            self.release()
            if self.rank == 0 and self.folder / ".lock" not in (before or []):
                (self.folder / ".lock").unlink(missing_ok=True)
            if self.rank == 0 and before is None and not any(self.folder.iterdir()):
                os.removedirs(self.folder)
            raise
        # Until the loop begins another run may be made of this folder, as in a cell that is run
        # again; `steps` holds it again.
        self.release()
        self.version = self.find_version()

    def prepare(self, saved):
        """Data, model, optimiser and counters; all that was saved, if there is a checkpoint."""
        self.open_data(saved)
        self.make_model()
        self.evaluation()  # refuses rows that cannot be evaluated now, not after an hour
        self.optimizer = make_optimizer(self.objective, self.train)
        # Half precision alone needs its loss scaled; otherwise this does nothing.
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0  # of training, up to the last record
        self.open_seconds = 0.0  # since then, of the run that is resumed
        self.begun = 0.0  # when the clock of the open record started
        self.untrained = None  # the results at step 0
        self.window = []  # what train_step gave since the last line of the log
        # What a resumed run must have in common with this one, and what the log begins with.
        self.config = {"objective": self.kind.name, **asdict(self.train),
                       "model": asdict(self.model.config),
                       self.kind.name: asdict(self.settings.options)}
        # Dropout differs between ranks, weights do not.
        torch.manual_seed(self.train.seed + 1 + self.rank)
        if saved:
            self.resume(saved)
        elif self.folder and self.rank == 0:
            self.begin()

    def hold(self):
        """One process trains in a folder: BadInput if another one does."""
        if self.rank == 0:
            self.lock = lock(self.folder)
        self.wait()

    def release(self):
        if self.lock:
            self.lock.close()

    def find_version(self):
        """What train.pt is now, to tell later whether somebody else trained here meanwhile."""
        path = self.folder / "train.pt"
        return path.stat().st_mtime_ns if path.exists() else None

    def join_ranks(self):
        """Under torchrun: one process a GPU, or several on a CPU."""
        if self.world == 1:
            return
        if self.device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    def wait(self):
        """Until all ranks are here."""
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
            train.eval_data or train.data, comma_list(train.langs) or None,
            "all" if train.eval_data else "valid", train.eval_limit, train.skip_bad,
            train.chat == "system")
        self.say(f"data {self.corpus.name}: {len(self.corpus):,} rows of "
                 f"{', '.join(self.corpus.columns)}; a vocabulary of {self.tokenizer.vocab:,}")

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
            add_lora(self.model, train.lora_rank, alpha, new_ids=self.corpus.special.preds)
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
                  "torch": torch.__version__, "python": platform.python_version()})

    def save(self):
        """train.pt, from which the same command goes on, and model.pt, which is the result."""
        if not self.folder:
            return
        # With every rank's random state and the open window, a resumed run repeats this one.
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        states = [random] * self.world
        if self.world > 1:
            dist.all_gather_object(states, random)
        if self.rank:
            return
        if not all(parameter.isfinite().all() for parameter in self.objective.parameters()):
            raise BadInput(f"step {self.step}: the weights are not finite and were not saved; "
                           "begin anew in another --out with a lower --lr")
        write_torch({
            "format": FORMAT, "config": self.config, "processes": self.world,
            "tokenizer": self.tokenizer.hash, "data": self.corpus.hash, "step": self.step,
            "tokens": self.tokens, "seconds": self.seconds, "untrained": self.untrained,
            "window": each_tensor(self.window, lambda x: x.cpu()),
            "open_seconds": time.perf_counter() - self.begun,
            "objective": self.objective.state_dict(), "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(), "random": states}, self.folder / "train.pt")
        save(self.model, self.folder / "model.pt")

    def resume(self, saved):
        """Go on from a checkpoint of the same settings, data and number of processes."""
        changed = differences(saved["config"], self.config)
        # Other ids, rows or ranks would make other batches.
        now = {"tokenizer": self.tokenizer.hash, "data": self.corpus.hash, "processes": self.world}
        for name, value in now.items():
            if saved[name] != value:
                changed.append(f"{name} was {saved[name]}, is {value}")
        if saved["step"] > self.train.steps:
            changed.append(f"it is at step {saved['step']}, beyond --steps {self.train.steps}")
        if changed:
            raise BadInput(f"{self.folder} holds a run with other settings: {'; '.join(changed)}. "
                           f"Use another --out, such as {self.folder}-2")
        # In place: the optimiser holds these very parameters.
        load_weights(self.objective, saved["objective"], self.folder / "train.pt")
        self.optimizer.load_state_dict(saved["optimizer"])
        if saved["scaler"]:  # empty unless in half precision
            self.scaler.load_state_dict(saved["scaler"])
        for name in ("step", "tokens", "seconds", "untrained", "open_seconds"):
            setattr(self, name, saved[name])
        self.window = each_tensor(saved["window"], lambda x: x.to(self.device))
        random = saved["random"][self.rank]
        torch.set_rng_state(random["cpu"])
        if self.device.type == "cuda" and "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"], self.device)
        if self.rank == 0:
            self.rewind()
        self.say(f"resuming at step {self.step} of {self.train.steps}")

    def rewind(self):
        """Drop what was logged after the checkpoint: those steps come again, with the same numbers.
        A kill may have come between train.pt and model.pt, which is then older."""
        kept = [one for one in evaluate.read_log(self.folder) if one.get("step", 0) <= self.step]
        if not kept or "config" not in kept[0]:
            raise BadInput(f"{self.folder / 'log.jsonl'} has lost its first line, the run's "
                           "settings: put the file back, or use another --out")
        lines = [json.dumps(record) + "\n" for record in kept]
        write_atomic(self.folder / "log.jsonl", "".join(lines).encode())
        for left in self.folder.glob(".*.part"):
            left.unlink()
        model = self.folder / "model.pt"
        if not model.exists() or model.stat().st_mtime < (self.folder / "train.pt").stat().st_mtime:
            save(self.model, model)

    def log(self, record):
        """Append an object to log.jsonl; what JSON cannot write (nan, inf) becomes a string."""
        if not self.folder or self.rank:
            return
        # A file that no JSON reader opens would be worse than a number as text.
        record = dict(record)
        for name, value in record.items():
            if isinstance(value, float) and not math.isfinite(value):
                record[name] = str(value)
        with open(self.folder / "log.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    # ---- the loop

    def steps(self, every=None, on_step=None):
        """Train to the last step, giving a record every so many steps and of every evaluation.

        every: by default log_every. on_step(run) is called after each step; if it returns true, the
        run is saved and ends here. Leaving the loop leaves a usable model.
        """
        train = self.train
        if self.folder:
            self.hold()
            if self.find_version() != self.version:
                self.release()
                raise BadInput(f"{self.folder} was trained in meanwhile: start the run again")
        batches = None
        try:
            # A resumed run has the numbers of step 0 from its checkpoint.
            if self.untrained is None:
                self.untrained = self.scores()
                yield self.evaluated(self.untrained)
            forward = self.wrap()
            self.begun = time.perf_counter() - self.open_seconds
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
                    # Evaluations are not counted in the time of training.
                    pause = time.perf_counter()
                    # A step that was not finite is told before what came of it.
                    self.read_window()
                    due.append(self.evaluated(self.scores()))
                    self.begun += time.perf_counter() - pause
                stopped = self.any_rank(on_step is not None and on_step(self))
                if self.step % train.save_every == 0 or stopped or last:
                    # A state that is not finite is never saved.
                    self.read_window()
                    self.save()
                yield from due
                if stopped and not last:
                    return
            if not self.is_finished():
                yield self.evaluated(self.scores())
            self.wait()
        except GeneratorExit:
            # The caller left the loop: what is not saved yet would be lost.
            self.save()
            raise
        finally:
            if batches:
                batches.close()
            self.objective.eval()
            self.release()  # another run may go on in this folder, in this process too
            self.version = self.find_version() if self.folder else None

    def wrap(self):
        """The objective as the loop calls it: compiled if asked for, and under DDP."""
        if self.train.compile and self.step < self.train.steps:
            self.compile_blocks()
        if self.world == 1:
            return self.objective
        # Each rank computes its own part of the batch; gradients become their mean.
        ids = [self.device] if self.device.type == "cuda" else None
        return torch.nn.parallel.DistributedDataParallel(self.objective, device_ids=ids)

    def compile_blocks(self):
        """torch.compile every block in place; where that fails the run goes on without."""
        blocks = [module for module in self.objective.modules() if isinstance(module, Block)]
        for block in blocks:
            block.compile(dynamic=True)
        # A trial step, which must not change what dropout draws later.
        devices = [self.device] if self.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices):
                part = to_device(self.make_batch(self.step), self.device)[0]
                with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
                    loss, _ = self.objective(part)
                loss.backward()
        except Exception as error:  # torch raises a dozen types here
            for block in blocks:
                block._compiled_call_impl = None
            reason = str(error).strip().splitlines()[0]
            self.say(f"--compile does not work here ({reason}): going on without it")
        self.objective.zero_grad(set_to_none=True)

    def make_batch(self, step):
        """Step -> its parts (one unless --accumulate), a pure function of (seed, step, rank)."""
        examples = self.batches.examples(step)
        # All chance of a batch comes from here: dropout apart, the model draws nothing.
        rng = self.batches.rng(step)
        size = len(examples) // self.train.accumulate
        parts = []
        for first in range(0, len(examples), size):
            part = self.kind.collate(examples[first:first + size], rng, self.settings.options,
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
                with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
                    loss, terms = forward(part)
                self.scaler.scale(loss / len(parts)).backward()
            for name, value in {"loss": loss.detach(), **terms}.items():
                total[name] = total.get(name, 0) + value / len(parts)
        tokens = sum(part["packed"].num_tokens for part in parts)
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
        now = time.perf_counter()
        seconds = now - self.begun
        self.begun = now
        self.window = []
        mean = {}
        for name in rows[0]:
            mean[name] = sum(row[name] for row in rows) / len(rows)
        # A mean over steps and ranks -> their sum.
        count = round(mean.pop("tokens") * len(rows) * self.world)
        norm = mean.pop("grad_norm")
        self.tokens += count
        self.seconds += seconds
        record = {"step": self.step, **mean, "lr": learning_rate(self.step - 1, self.train),
                  "grad_norm": norm, "tokens": self.tokens, "seconds": round(self.seconds, 3),
                  "tokens_per_second": round(count / seconds, 1)}
        self.log(record)
        return record

    def any_rank(self, asked):
        """All ranks stop together if one was asked to."""
        share = torch.tensor([float(bool(asked))], device=self.device)
        return bool(mean_over_ranks(share, self.world)) if self.world > 1 else bool(asked)

    # ---- what the model is worth

    def evaluation(self):
        """The model and its held-out rows, with vectors to be made."""
        return evaluate.Evaluation(self.model, self.tokenizer, self.rows, self.affixes,
                                   self.train.max_length, views=self.kind.views)

    def scores(self):
        """{"task/metric": number} on the rows held out for evaluation; rank 0 works for all."""
        return evaluate.run(self.evaluation()) if self.rank == 0 else {}

    def encode(self, texts):
        """Texts -> their sentence vectors of length 1 (N, D), framed as the first view is."""
        prefix, suffix = self.affixes[0]
        vectors = evaluate.embed(self.model, self.tokenizer, texts, prefix, suffix,
                                 self.train.max_length)
        return torch.nn.functional.normalize(vectors, dim=-1)

    def evaluated(self, results):
        """Log an evaluation -> its record."""
        record = {"step": self.step, "eval": results}
        # The log last: it is what says that the run is finished.
        if self.folder and self.rank == 0 and self.step == self.train.steps:
            evaluate.write_results(self.folder, "eval.json", results)
        self.log(record)
        # What the loss does not show, such as a lambda that has run away.
        warning = self.objective.warning()
        if warning:
            self.log({"step": self.step, "warning": warning})
            self.say(f"warning at step {self.step}: {warning}")
        return record

    def is_finished(self):
        """Was the last step evaluated? A kill may have come between it and its evaluation."""
        if self.step < self.train.steps:
            return False
        records = evaluate.read_log(self.folder) if self.folder and self.rank == 0 else []
        return any("eval" in one and one["step"] == self.step for one in records)


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
    run.say("\n" + evaluate.table(results, run.untrained))
    for example in evaluate.examples(run.evaluation()):
        run.say(f"  {example.query}\n    {'=' if example.right else '!'} {example.found}")
        if not example.right:
            run.say(f"    instead of {example.gold}")
    on_gpu = run.device.type == "cuda"
    memory = torch.cuda.max_memory_allocated(run.device) if on_gpu else peak_memory()
    run.say(f"\n{run.tokens:,} tokens in {run.seconds:.0f} s, peak memory {memory / 1e9:.2f} GB. "
            f"The run is in {run.folder}\nnext: python evaluate.py {run.folder}")


def main(arguments):
    """Train as the command line says -> exit status."""
    def say(text):
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()

    # The command that is printed and logged is the one that resumes.
    world = int(os.environ.get("WORLD_SIZE", 1))
    program = ["torchrun", "--nproc_per_node", str(world)] if world > 1 else ["python"]
    command = shlex.join([*program, "train.py", *arguments])
    run = Run(parse(arguments), True, say, command)
    try:
        return train_to_the_end(run)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def train_to_the_end(run):
    """The loop on the screen -> exit status."""
    if run.any_rank(run.is_finished()):
        run.say(f"this run is finished: {run.step} steps. Evaluate it: "
                f"python evaluate.py {run.folder}")
        return 0
    # From here on Ctrl-C asks the loop to stop after a step, so that nothing is half done.
    progress = Progress(run.train.steps, run.step, run.rank == 0)
    try:
        for record in run.steps(on_step=lambda run: progress.step(run.step)):
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
