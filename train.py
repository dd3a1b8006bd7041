"""Train any objective: flags, the one loop, schedule, checkpoints, resume.

    python train.py --objective mexma                 # embedded data, CPU, a few minutes, ends in a table
    python train.py --objective mexma --help          # every flag, its default, and whose it is
    python train.py --seeds 82,23,37                  # once per seed, for python evaluate.py compare
    torchrun --nproc_per_node 8 train.py ...          # the same on 8 GPUs

The same command again resumes. Everything of a run is in its folder: model.pt, train.pt, tokenizer.json, log.jsonl; evaluate.py adds eval.json.
"""

import argparse
import contextlib
import ctypes
import difflib
import inspect
import itertools
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

import checkpoints
import data
import evaluate
import metrics
from data import BadInput
from kernels import why_not
from model import (
    BACK_ENDS,
    DECODER,
    SIZES,
    Block,
    Model,
    ModelConfig,
    add_lora,
    each_tensor,
    load_weights,
    read_torch,
    save,
    set_attention,
    size_config,
    write_torch,
)
from objectives import OBJECTIVES

try:
    import fcntl
except ImportError:                                                      # Windows has no such locks
    fcntl = None


@dataclass(frozen=True)
class TrainConfig:
    data: str = "toy"  # toy, regex, pydoc, or files: TSV, CSV, JSONL, text, a Moses pair a.de,a.en; .gz and .xz too
    langs: str = ""  # columns of the data to use, as en,de; the first is the pivot; default: all
    chat: str = "plain"  # of chats: plain (system texts are left out), or shared-header (they open every view, of a causal objective)
    block: int = 0  # of text: run the lines together and cut them into rows of so many tokens; 0: a line is a row
    pairs: str = "pivot"  # two views of a row: pivot (the first column and another) or neighbours (column i and i + 1: paraphrases)
    eval_data: str = ""  # file to evaluate on; default: rows held out from the data
    skip_bad: bool = False  # drop and count bad lines instead of stopping at the first
    vocab: int | None = None  # size of the tokenizer trained on the data; default: 4096 embedded, 8000 files
    cut: int = 128  # longest view in tokens; the rest is cut off
    cache: str = "cache"  # where token stores of files are kept
    size: str = "toy"  # shape of the model: toy, small, base, large; with --init of a pretrained model: its own
    init: str = ""  # start from the weights and tokenizer of a run, of a folder in Hugging Face's layout, or of a name on its hub
    lora_rank: int = 0  # train differences of this rank to frozen weights (with --init); 0: train the weights
    lora_alpha: float = 0.0  # their scale is alpha / rank; 0: twice the rank
    lora_targets: str = "qkv,out,up,down"  # linear maps of a block that get one
    steps: int | None = None  # optimiser steps
    match_flops: str = ""  # run whose total compute this one gets: sets --steps
    batch: int | None = None  # examples per step and process
    look_ahead: int = 1  # steps that share out their examples so that all have about as many tokens (not where examples are compared)
    accumulate: int = 1  # split a batch into so many forward passes; negatives come only from one's own part
    lr: float | None = None  # peak learning rate
    warmup: float | None = None  # share of the steps in which the rate rises linearly
    lr_start: float = 0.0  # where that begins, as a share of the peak
    schedule: str | None = None  # after that: cosine, linear (both to 0), or constant
    horizon: float = 1.0  # when the rate would be 0, in multiples of --steps (released BERT-JEPA: 4, so it ends at 75 % of the peak)
    weight_decay: float | None = None  # on matrices and embeddings; never on biases and norms
    clip: float | None = None  # longest gradient; 0: no limit
    seed: int = 0  # of weights, batches, masks
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    precision: str = "auto"  # auto, float32, bfloat16, float16
    compile: bool = False  # torch.compile the blocks: the first steps take longer, losses agree to rounding
    fill: int = 1  # dead tokens fill the model's line up to a multiple of so many, for few shapes; with --look-ahead usually a single one
    attention: str = "auto"  # auto (triton on CUDA, else sdpa), sdpa (PyTorch's own, padded), triton (our kernels)
    out: str = ""  # folder of the run; default: out/OBJECTIVE
    log_every: int = 10  # steps between lines of log.jsonl
    eval_every: int = 150  # steps between evaluations; there is one at step 0 and one at the end anyway
    eval_limit: int = 500  # rows in the evaluations during training
    save_every: int = 100  # steps between checkpoints


PRETRAINED = "of --init"  # the size of a run whose shape is a pretrained model's, unless --size names it too
# May change when a run is resumed; of the data it is the content that must stay the same, not the path.
FREE = {"steps", "device", "attention", "compile", "fill", "log_every", "eval_every", "eval_limit", "save_every", "cache", "out", "data"}
GROUPS = {"data": "data langs chat block pairs eval_data skip_bad vocab cut cache",
          "optimisation": "steps match_flops batch look_ahead accumulate lr warmup lr_start schedule horizon weight_decay clip seed",
          "device": "device precision attention compile fill", "saving and evaluation": "out log_every eval_every eval_limit save_every"}

# ---------------------------------------------------------------------------------------------------------------------
# Flags: generated from the dataclasses; the comment beside a field is its help


def comments(config):
    """{field: the comment beside it}"""
    return dict(re.findall(r"^ +(\w+): [^#\n]+#\s*(.+)$", inspect.getsource(config), re.M))


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise BadInput(f"{message} (see python train.py --help)")


def find_objective(name):
    by_name = {objective.name: objective for objective in OBJECTIVES}
    if name not in by_name:
        raise BadInput(f"objective {name!r} is unknown: choose one of {', '.join(by_name)}{data.meant(name, by_name)}")
    return by_name[name]


def defaults(objective, size):
    """-> ({flag: default}, {flag: (toy value, paper's value, reason)}) for an objective at a size: the recipe, then the toy scale."""
    values = {f.name: f.default for f in fields(TrainConfig)} | {"schedule": "cosine", "weight_decay": 0.01, "clip": 1.0}
    values |= {f.name: f.default for f in fields(objective.Config)} | objective.recipe
    toy = {}
    if size == "toy":
        toy = {name: (value, values[name], reason) for name, (value, reason) in objective.toy.items()}
        values |= {name: value for name, (value, _, _) in toy.items()}
    return values, toy


def architecture(objective):
    """What an objective asks of its model, whatever the size: a causal one is a Llama, the others are XLM-R's kind."""
    return dict(causal=objective.causal, head=objective.head, pool=objective.pool) | (DECODER if objective.causal else {})


def add_flags(group, config, values, skip=()):
    notes = comments(config)
    for field in fields(config):
        if field.name in skip:
            continue
        kind = {"int": int, "float": float, "bool": bool}.get(getattr(field.type, "__name__", str(field.type)).split(" ")[0], None)
        kind = kind or next((t for t in (int, float) if t.__name__ in str(field.type)), str)
        options = dict(action=argparse.BooleanOptionalAction) if kind is bool else dict(type=kind, metavar=kind.__name__.upper())
        shown = values.get(field.name)
        note = notes.get(field.name, "").replace("%", "%%")
        group.add_argument("--" + field.name.replace("_", "-"), default=None,
                           help=note + ("" if shown in (None, "") else f" [{shown}]"), **options)


def make_parser(objective, size):
    values, _ = defaults(objective, size)
    parser = Parser(prog="train.py", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("--objective", default="mexma", metavar="NAME",
                        help=f"what to train: {', '.join(o.name for o in OBJECTIVES)}; with --help shows its flags [mexma]")
    parser.add_argument("--seeds", metavar="SEED,SEED", help="train once per seed, one after the other, in OUT-SEED; resumes as a single run does")
    for title, names in GROUPS.items():
        skip = {f.name for f in fields(TrainConfig)} - set(names.split())
        add_flags(parser.add_argument_group(title), TrainConfig, values, skip)
    group = parser.add_argument_group("model")
    add_flags(group, TrainConfig, values, {f.name for f in fields(TrainConfig)} - {"size", "init", "lora_rank", "lora_alpha", "lora_targets"})
    shape = asdict(ModelConfig()) | SIZES[size] | architecture(objective)
    add_flags(group, ModelConfig, shape, {"vocab", "causal", "head", "shapes", "stretch"})
    owned = parser.add_argument_group(f"objective {objective.name} (only this objective has these; defaults are the paper's but for the toy scale)")
    add_flags(owned, objective.Config, values)
    return parser


def parse(arguments):
    """Command line -> (objective class, TrainConfig, ModelConfig fields asked for, its Config, notes to print). BadInput for anything odd."""
    first = Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--objective", default="mexma")
    first.add_argument("--size")
    first.add_argument("--init")
    known, _ = first.parse_known_args(arguments)
    objective = find_objective(known.objective)
    pretrained = known.init and not (Path(known.init) / "model.pt").is_file()
    size = known.size or ("base" if pretrained else "toy")               # a pretrained model is not trained at toy scale
    if size not in SIZES:
        raise BadInput(f"size {size!r} is unknown: choose one of {', '.join(SIZES)}")
    parser = make_parser(objective, size)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise BadInput(explain_unknown(unknown[0], parser, objective))
    if options.seeds is not None:                                        # train.py has taken them out before
        raise BadInput(f"seeds {options.seeds}: only train.py takes several; give one --seed")
    given = {name: value for name, value in vars(options).items() if value is not None and name != "objective"}
    values, toy = defaults(objective, size)
    values |= ({"size": PRETRAINED} if pretrained else {}) | given
    plain = lambda value: f"{value:.3g}" if isinstance(value, float) else value
    notes = [f"{name} {plain(value)} (paper: {plain(paper)}): {reason}" for name, (value, paper, reason) in toy.items() if name not in given]
    pick = lambda config: {f.name: values[f.name] for f in fields(config) if f.name in values}
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value) or isinstance(value, int) and abs(value) > 2 ** 31:
            raise BadInput(f"{name} is {value}: it must be a finite number of a sensible size")
    train = TrainConfig(**pick(TrainConfig))
    asked = {f.name: given[f.name] for f in fields(ModelConfig) if f.name in given and f.name != "vocab"}
    config = objective.Config(**pick(objective.Config))
    train = check(train, objective)
    if objective.compares(config) and train.look_ahead > 1:
        raise BadInput(f"look_ahead {train.look_ahead}: {objective.name} compares the examples of a batch, and needs the same number in each; drop it")
    if objective.compares(config) and train.batch // train.accumulate < 2:
        raise BadInput(f"batch {train.batch} / accumulate {train.accumulate}: {objective.name} compares examples and needs at least 2 at a time")
    return objective, train, asked, config, notes


def explain_unknown(word, parser, objective):
    flag = word.split("=")[0]
    if not flag.startswith("-"):
        return f"{word!r} is not expected here: every value follows a --flag"
    for other in OBJECTIVES:
        if other is not objective and flag[2:].replace("no-", "").replace("-", "_") in {f.name for f in fields(other.Config)}:
            return f"flag {flag} belongs to objective {other.name}, not to {objective.name}: drop it or add --objective {other.name}"
    known = [option for action in parser._actions for option in action.option_strings]
    close = difflib.get_close_matches(flag, known, 1)
    return f"unknown flag {flag}" + (f": did you mean {close[0]}?" if close else ": see python train.py --help")


def check(train, objective):
    """Refuse values that would fail or mislead later."""
    for name in ("steps", "batch", "look_ahead", "fill", "accumulate", "log_every", "eval_every", "eval_limit", "save_every", "cut"):
        if getattr(train, name) < 1:
            raise BadInput(f"{name} is {getattr(train, name)}: it must be at least 1")
    if train.vocab is not None and not 0 < train.vocab <= 1_000_000:
        raise BadInput(f"vocab is {train.vocab}: it must be between 300 and 1,000,000")
    if train.vocab and train.init:
        raise BadInput(f"vocab {train.vocab} has no effect with --init, whose tokenizer is kept: drop one of the two")
    if train.seed < 0:
        raise BadInput(f"seed is {train.seed}: it must not be negative")
    choices = dict(schedule=("cosine", "linear", "constant"), chat=("plain", "shared-header"), pairs=("pivot", "neighbours"),
                   precision=("auto", "float32", "bfloat16", "float16"), attention=BACK_ENDS)
    for name, allowed in choices.items():
        if getattr(train, name) not in allowed:
            raise BadInput(f"{name} is {getattr(train, name)!r}: choose one of {', '.join(allowed)}")
    if train.batch % train.accumulate:
        raise BadInput(f"batch {train.batch} cannot be split into {train.accumulate} equal parts: make it a multiple of --accumulate")
    if train.look_ahead > 1 and train.accumulate > 1:
        raise BadInput(f"look_ahead {train.look_ahead} gives each step another number of examples, so --accumulate {train.accumulate} cannot split them "
                       "into equal parts: drop one of the two")
    if train.lr_start and not train.warmup or train.horizon > 1 and train.schedule == "constant":
        raise BadInput(f"lr_start {train.lr_start} needs a --warmup, and horizon {train.horizon} a schedule that falls: drop the flag that has no effect")
    if not 0 <= train.warmup <= 1 or not 0 <= train.lr_start <= 1:
        raise BadInput(f"warmup is {train.warmup} and lr_start {train.lr_start}: they are shares of the steps and of the rate, between 0 and 1")
    if train.horizon < 1:
        raise BadInput(f"horizon is {train.horizon}: it must be at least 1, or the last steps would have no rate")
    if train.chat != "plain" and not objective.causal:
        causal = " and ".join(other.name for other in OBJECTIVES if other.causal)
        raise BadInput(f"chat {train.chat} has no meaning for {objective.name}: only {causal} read what opens a chat")
    if train.block and objective.views > 1:
        single = ", ".join(other.name for other in OBJECTIVES if other.views == 1)
        raise BadInput(f"block {train.block} needs an objective with one view ({single}), not {objective.name}")
    if 0 < train.block < 8 or train.block < 0:
        raise BadInput(f"block is {train.block}: it must be 0 or at least 8")
    if train.block > train.cut:
        raise BadInput(f"block {train.block} is longer than cut {train.cut}, so the end of each would be lost: raise --cut")
    if train.block and train.data not in data.EMBEDDED and not train.eval_data:
        raise BadInput(f"block {train.block} runs across the rows that would be held out: name other rows with --eval-data")
    if train.lora_rank < 0 or train.lora_alpha < 0 or train.lora_rank and not train.init:
        raise BadInput(f"lora_rank is {train.lora_rank}: it must not be negative, and frozen weights need a run to come from (--init)")
    if train.lr <= 0 or train.weight_decay < 0 or train.clip < 0:
        raise BadInput(f"lr {train.lr} must be positive, weight_decay {train.weight_decay} and clip {train.clip} not negative")
    if train.match_flops and not (Path(train.match_flops) / "log.jsonl").is_file():
        raise BadInput(f"match_flops {train.match_flops!r} is no run: give a folder that train.py wrote")
    return replace(train, out=train.out or f"out/{objective.name}")


# ---------------------------------------------------------------------------------------------------------------------
# Parts of the loop


def learning_rate(step, train):
    """Rate of step 0..steps-1: linear warm-up to the peak over warmup x steps, then cosine or linear to 0 at horizon x steps, or constant."""
    warm = max(1, round(train.warmup * train.steps))
    if step < warm:
        return train.lr * (train.lr_start + (1 - train.lr_start) * (step + 1) / warm)
    rest = (step - warm) / max(1, train.horizon * train.steps - warm)
    return train.lr * {"cosine": (1 + math.cos(math.pi * rest)) / 2, "linear": 1 - rest, "constant": 1.0}[train.schedule]


def make_optimizer(objective, train):
    """AdamW; decay on matrices and embeddings only: a bias, a norm or a lone scalar has no direction to shrink."""
    trained = [p for p in objective.parameters() if p.requires_grad]
    groups = [dict(params=[p for p in trained if p.ndim >= 2], weight_decay=train.weight_decay),
              dict(params=[p for p in trained if p.ndim < 2], weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=train.lr, fused=True)


def choose_device(train):
    """-> (device, dtype of autocast or None, one line that says why)"""
    name = train.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda", "mps"):
            raise ValueError
        torch.empty(1, device=device)
    except Exception:                                                    # torch raises several types, one for each back end
        have = ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        raise BadInput(f"device {name!r} cannot be used here: there is {', '.join(have)}; --device auto chooses") from None
    if train.attention == "triton" and (reason := why_not(device)):
        raise BadInput(f"attention triton cannot be used here: {reason}; --attention auto chooses")
    why = "chosen by --device" if train.device != "auto" else "the first of cuda, mps, cpu that is here"
    if train.precision != "auto":
        kind, reason = train.precision, "chosen by --precision"
    elif device.type == "cuda":
        good = torch.cuda.is_bf16_supported(including_emulation=False)
        kind, reason = ("bfloat16", "this GPU has it") if good else ("float16", "this GPU lacks bfloat16")
    else:
        kind, reason = "float32", f"the safe choice on {device.type}"
    if kind == "float16" and device.type != "cuda":
        raise BadInput("precision float16 needs a CUDA GPU for its loss scaling: use bfloat16 or float32")
    dtype = None if kind == "float32" else getattr(torch, kind)
    return device, dtype, f"device {device} ({why}), precision {kind} ({reason}), {torch.get_num_threads()} threads"


def count_flops(objective, batches):
    """Mean FLOPs of a training step over batches (lists of parts): matrix products as PyTorch counts them, and 4 H K per visible pair and
    block in the forward of attention, twice that in its backward. Gradients and random state are left as they were."""
    from torch.utils.flop_counter import FlopCounterMode, flop_registry
    total, device = 0, next(objective.parameters()).device
    counted_here = {op: lambda *shapes, **more: 0 for op in flop_registry if "attention" in str(op)}

    def count(block, arguments):
        nonlocal total
        total += (12 if torch.is_grad_enabled() else 4) * block.config.heads * block.size * arguments[1].pairs()

    hooks = [module.register_forward_pre_hook(count) for module in objective.modules() if isinstance(module, Block)]
    with torch.random.fork_rng([device] if device.type == "cuda" else []), FlopCounterMode(display=False, custom_mapping=counted_here) as counter:
        for parts in batches:
            for part in parts:
                objective(part)[0].backward()
    objective.zero_grad(set_to_none=True)
    for hook in hooks:
        hook.remove()
    return (total + counter.get_total_flops()) / len(batches)


def lay_out(batch, pinned):
    """The tensors of a batch -> (one buffer of bytes that holds them all, the batch to find them by): a single copy moves it."""
    found = []
    each_tensor(batch, found.append)
    starts = [0, *itertools.accumulate(-(-x.nbytes // 16) * 16 for x in found)]
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=pinned)
    for x, place in zip(found, starts):
        buffer[place:place + x.nbytes].view(x.dtype).view(x.shape).copy_(x)
    return buffer, batch


def pick_up(buffer, batch):
    """The batch whose tensors lie in `buffer` as `lay_out` put them, wherever the buffer is now."""
    place = 0

    def take(x):
        nonlocal place
        start, place = place, place + -(-x.nbytes // 16) * 16
        return buffer[start:start + x.nbytes].view(x.dtype).view(x.shape)

    return each_tensor(batch, take)


def to_device(batch, device):
    """A batch on the device: on a GPU by one copy out of pinned memory, which the computation need not wait for."""
    if device.type != "cuda":
        return each_tensor(batch, lambda x: x.to(device))
    buffer, batch = batch if isinstance(batch, tuple) else lay_out(batch, True)
    return pick_up(buffer.to(device, non_blocking=True), batch)


def share_counts(parts, world):
    """Token losses divide by the number of scored tokens of the whole step: replace each part's own counts by the mean over
    parts and ranks, so that averaging the parts gives exactly the gradient of one big batch."""
    mean = torch.stack([part["scored"] for part in parts]).mean(0)
    if world > 1 and len(mean):
        dist.all_reduce(mean)
        mean /= world
    for part in parts:
        part["scored"] = mean
    return parts


def mean_over_ranks(values, world):
    if world > 1:
        dist.all_reduce(values)
        values /= world
    return values


def trim_memory():
    """Give freed memory back. Every step has tensors of other sizes, and glibc keeps the holes between them: without this a run
    on a CPU grew from 1.3 to 2.5 GB in 2,500 steps. Systems with another allocator do not need it."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL("libc.so.6").malloc_trim(0)


class Stop:
    """SIGINT and SIGTERM ask the loop to stop after the step at hand; a second signal stops at once."""

    def __init__(self):
        self.signal = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.ask)

    def ask(self, number, frame):
        if self.signal:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal = number
        print("stopping after this step; once more to stop at once", file=sys.stderr)


# ---------------------------------------------------------------------------------------------------------------------
# The run folder


def git_commit():
    try:
        run = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent, timeout=5)
        return run.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def log_line(folder, record):
    """Append one JSON object to log.jsonl; numbers that JSON cannot write (nan, inf) become strings."""
    clean = lambda x: str(x) if isinstance(x, float) and not math.isfinite(x) else x
    with open(folder / "log.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({name: clean(value) for name, value in record.items()}) + "\n")


def read_log(folder):
    """The objects of log.jsonl, if it is there; a last line cut short by a kill is left out."""
    path, records = folder / "log.jsonl", []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def start_from(model, source, name):
    """Copy the weights of another model; only the vocabulary head may be new or left behind. -> one line that says so."""
    weights, own = source.state_dict(), model.state_dict()
    head = ("transform", "vocabulary")
    fresh = [key for key in own if key not in weights and key.startswith(head)]
    left = [key for key in weights if key not in own and key.startswith(head)]
    load_weights(model, {key: weight for key, weight in weights.items() if key not in left} | {key: own[key] for key in fresh}, name)
    return f"starting from {name}" + (f"; new: {', '.join(fresh)}" if fresh else "") + (f"; left behind: {', '.join(left)}" if left else "")


def rewind_log(folder, step):
    """Drop what was logged after the checkpoint: those steps come again, with the same numbers."""
    kept = [record for record in read_log(folder) if record.get("step", 0) <= step]
    if not kept or "config" not in kept[0]:
        raise BadInput(f"{folder / 'log.jsonl'} has lost its first line, the run's settings: put the file back, or use another --out")
    data.write_atomic(folder / "log.jsonl", "".join(json.dumps(record) + "\n" for record in kept).encode())


def differences(old, new, defaults, prefix=""):
    """The settings of a saved run that this command would change, one text each. A flag that is newer than the run may have its default."""
    found = []
    for name in sorted(set(old) | set(new)):
        was, now = old.get(name, "absent"), new.get(name, "absent")
        if isinstance(was, dict) and isinstance(now, dict):
            found += differences(was, now, defaults, f"{prefix}{name}.")
        elif was != now and name not in FREE and not (was == "absent" and now == defaults.get(name, "absent")):
            found.append(f"{prefix}{name} was {was}, is {now}")
    return found


def check_same(saved, config, defaults, folder, corpus):
    changed = differences(saved["config"], config, defaults)
    for name, value in dict(tokenizer=data.tokenizer_hash(corpus.tokenizer), data=corpus.hash).items():
        if saved[f"{name}_hash"] != value:
            changed.append(f"the {name} differs (hash {saved[f'{name}_hash'][:8]}, now {value[:8]})")
    if changed:
        raise BadInput(f"{folder} holds a run with other settings: {'; '.join(changed)}. Use another --out, such as {folder}-2")


def random_state(device):
    return {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(state, device):
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


# ---------------------------------------------------------------------------------------------------------------------
# The loop


class Run:
    """One training run: everything that a step needs, and how it is saved, resumed, evaluated and reported."""

    def __init__(self, arguments):
        self.kind, self.train, self.asked, self.config, notes = parse(arguments)
        self.command = "python train.py " + " ".join(arguments)
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device, self.dtype, device_note = choose_device(self.train)
        if self.world > 1:
            if self.device.type == "cuda":
                self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
                torch.cuda.set_device(self.device)
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        train, self.folder = self.train, Path(self.train.out)
        self.say(f"nanoJEPA: {self.kind.name}, size {train.size}, {train.steps} steps of {train.batch} examples -> {self.folder}")
        self.say(device_note)
        for note in notes:
            self.say(f"  toy scale: {note}")
        if train.accumulate > 1 and self.kind.compares(self.config):
            self.say(f"note: {self.kind.name} compares the examples of a batch, and with --accumulate {train.accumulate} only those of the same "
                     f"{train.batch // train.accumulate}: this is not the loss of a batch of {train.batch}")
        self.langs, self.tokenizer = [name for name in train.langs.split(",") if name] or None, None
        saved = read_torch(self.folder / "train.pt") if (self.folder / "train.pt").exists() else None
        if saved is not None and not (isinstance(saved, dict) and {"config", "objective", "tokenizer_hash", "data_hash"} <= set(saved)):
            raise BadInput(f"{self.folder / 'train.pt'} is not a checkpoint of train.py: put the right file back, or use another --out")
        config, source = self.shape_of(architecture(self.kind) | self.asked, saved)   # a shape that cannot work is refused before the data is read
        chat = self.tokenizer and data.special(self.tokenizer).family
        longest = self.kind.in_row * (train.cut + 2) + self.header() + (self.header() > 0) + sum(len(ids or ()) for ids in chat or ())
        if longest > config.max_length:
            raise BadInput(f"cut {train.cut}: a row can have {longest} tokens, [CLS] and [SEP] included, over max_length {config.max_length}: lower --cut")
        self.open_data(saved)
        torch.manual_seed(train.seed)
        try:
            model = Model(config if train.init else replace(config, vocab=self.corpus.special.vocab))
        except RuntimeError as error:                                    # torch: not enough memory
            raise BadInput(f"a model of this shape cannot be made here: {str(error).splitlines()[0]}") from None
        if source:
            self.say(start_from(model, source, train.init))
        try:
            checkpoints.expressible(model.config, self.corpus.special)
        except BadInput as error:                                        # said now, because it can be trained all the same
            self.say(f"note: evaluate.py export will refuse this model: {error}")
        if train.lora_rank:
            add_lora(model, train.lora_rank, train.lora_alpha or 2 * train.lora_rank, train.lora_targets.split(","), self.corpus.special.preds)
        self.objective = self.kind(model, self.config).to(self.device)
        self.needs = set_attention(self.objective, train.attention, self.device, 2 if self.dtype else 4)
        if self.needs != {"sdpa"}:
            self.say("attention: " + ", ".join(sorted("sdpa" if need == "sdpa" else f"triton for heads of size {need[1]}" for need in self.needs)))
        self.optimizer = make_optimizer(self.objective, train)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.step, self.tokens, self.seconds, self.first = 0, 0, 0.0, None
        self.window = []                                                 # what train_step gave since the last log line
        self.settings = {"objective": self.kind.name, **asdict(train), "model": asdict(model.config), self.kind.name: asdict(self.config)}
        torch.manual_seed(train.seed + 1 + self.rank)                    # dropout differs between ranks, weights do not
        if saved:
            self.resume(saved)
        else:
            self.begin()

    def shape_of(self, shape, saved):
        """-> (ModelConfig, the model to start from or None). With --init the shape is that model's, and flags must agree."""
        train = self.train
        if not train.init:
            return size_config(train.size, **shape), None
        if saved:                                                        # the weights are in the checkpoint; the other run may be gone
            return ModelConfig(**saved["config"]["model"]), None
        loaded = checkpoints.open_model(train.init)
        source, self.tokenizer, free = loaded.model, loaded.tokenizer, {"causal", "head", "pool", "dropout"}
        for note in loaded.notes:
            self.say(f"note: {note}")
        if new := [name for name in self.kind.tokens(self.config) if self.tokenizer.token_to_id(name) is None]:
            source = checkpoints.add_tokens(source, self.tokenizer, new)
            self.say(f"note: {', '.join(new)} added to the tokenizer of {train.init}")
        asked = {name: value for name, value in self.asked.items() if name not in free}
        if not (Path(train.init) / "model.pt").is_file() and train.size != PRETRAINED:
            asked |= {name: SIZES[train.size][name] for name in ("width", "layers", "heads", "hidden")}
        wrong = [f"{name} {value} (it has {getattr(source.config, name)})" for name, value in asked.items() if value != getattr(source.config, name)]
        if source.config.causal != self.kind.causal:
            wrong.append(f"objective {self.kind.name} ({'causal' if self.kind.causal else 'bidirectional'})")
        if wrong:
            raise BadInput(f"the model of {train.init} does not fit {', '.join(wrong)}: drop the flags, --size too, or choose another --init")
        return replace(source.config, **{name: value for name, value in shape.items() if name in free}), source

    def say(self, text):
        if self.rank == 0:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def open_data(self, saved):
        """The corpus and its batches. A resumed run reads the tokenizer of its folder: training one anew could change the ids."""
        train = self.train
        tokenizer = data.read_tokenizer(self.folder / "tokenizer.json") if saved else self.tokenizer
        if not saved and self.folder.exists() and any(self.folder.iterdir()):
            # What a run has that ended before its first checkpoint: such a folder may be begun anew.
            begun = {"tokenizer.json", "log.jsonl", "model.pt", "bad_batch.pt", ".lock"}
            if not {path.name for path in self.folder.iterdir() if path.suffix != ".part"} <= begun:
                raise BadInput(f"{self.folder} is not empty and holds no run: use another --out")
            records = read_log(self.folder)
            last, was = max((record.get("step", 0) for record in records), default=0), (records[0].get("config", {}) if records else {})
            if last > was.get("save_every", 0) or last == was.get("steps"):
                raise BadInput(f"{self.folder} holds a run of {last} steps without its train.pt: put the file back, or use another --out")
            self.say(f"{self.folder} was stopped before its first checkpoint: starting anew")
        self.corpus, self.batches = data.open_training(train, self.kind.views, self.kind.distinct, tokenizer, self.rank, self.world)
        self.say(f"data {self.corpus.name}: {len(self.corpus):,} rows, {', '.join(self.corpus.columns[:self.corpus.sides])}; "
                 f"tokenizer of {self.corpus.special.vocab:,}" + (f"; {len(self.corpus.held):,} rows held out for evaluation" if len(self.corpus.held) else ""))
        texts = evaluate.test_rows(train.eval_data or train.data, self.langs, "all" if train.eval_data else "valid", 2, train.skip_bad,
                                   bool(self.header()))[0]
        if min(map(len, texts.values())) < 2:                            # found now, not at the first evaluation
            raise BadInput(f"{train.eval_data or train.data} gives fewer than 2 rows for evaluation: name other rows with --eval-data")

    def matched_steps(self, own):
        """Steps of `own` FLOPs that make up the compute of the run --match-flops."""
        records = read_log(Path(self.train.match_flops))
        first = records[0] if records else {}
        if not isinstance(first.get("flops_per_step"), float) or not isinstance(first.get("config"), dict):
            raise BadInput(f"{self.train.match_flops} has no FLOPs in the first line of its log: train it again with this version")
        if max(record.get("step", 0) for record in records) < first["config"]["steps"]:
            raise BadInput(f"{self.train.match_flops} is not finished: its compute is not known before it is")
        return max(1, round(first["flops_per_step"] * first["config"]["steps"] * first["processes"] / own / self.world))

    def lock(self):
        """One process a folder: two would write into each other's log. The lock ends with the process, however that ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.locked = open(self.folder / ".lock", "w", encoding="utf-8")
        if fcntl:
            try:
                fcntl.flock(self.locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BadInput(f"another process trains in {self.folder}: wait for it, or use another --out") from None

    def begin(self):
        probes = [to_device(self.make_batch(step), self.device) for step in range(16 if self.train.match_flops else 2)]
        flops = count_flops(self.objective, probes)
        if self.train.match_flops:
            self.train = replace(self.train, steps=self.matched_steps(flops))
            self.settings["steps"] = self.train.steps
            self.say(f"{self.train.steps} steps of {flops / 1e9:.2f} GFLOP: the compute of {self.train.match_flops}")
        if self.rank == 0:
            self.lock()
            (self.folder / "log.jsonl").write_text("", encoding="utf-8")
            data.write_atomic(self.folder / "tokenizer.json", self.corpus.tokenizer.to_str().encode())
            count = sum(p.numel() for p in self.objective.parameters())
            log_line(self.folder, {"config": self.settings, "command": self.command, "parameters": count, "flops_per_step": flops, "processes": self.world,
                                   "tokenizer_hash": data.tokenizer_hash(self.corpus.tokenizer), "frames": self.frames(), "device": str(self.device),
                                   "torch": torch.__version__, "python": platform.python_version(), "commit": git_commit()})
        self.say(f"{sum(p.numel() for p in self.objective.model.parameters()):,} parameters in the model, "
                 f"{sum(p.numel() for p in self.objective.parameters()):,} with the parts that only training needs")

    def resume(self, saved):
        if self.rank == 0:
            self.lock()
        if self.train.match_flops:                                       # the number was found when the run began
            self.train = replace(self.train, steps=saved["config"]["steps"])
            self.settings["steps"] = self.train.steps
        check_same(saved, self.settings, {f.name: f.default for kind in (TrainConfig, self.kind.Config) for f in fields(kind)}, self.folder, self.corpus)
        if (world := saved.get("processes", self.world)) != self.world:
            raise BadInput(f"{self.folder} was trained by {world} processes, this is {self.world}: batches would differ. Start {world}, or use another --out")
        if saved["step"] > self.train.steps:
            raise BadInput(f"{self.folder} is already at step {saved['step']}, beyond the {self.train.steps} asked for: use another --out")
        if saved["config"]["steps"] != self.train.steps:
            self.say(f"steps was {saved['config']['steps']}, is {self.train.steps}: the schedule is that of the new number from here on")
        load_weights(self.objective, saved["objective"], self.folder / "train.pt")
        try:
            self.optimizer.load_state_dict(saved["optimizer"])
            self.scaler.load_state_dict(saved["scaler"])
            for name in ("step", "tokens", "seconds", "first", "window"):
                setattr(self, name, saved[name])
            self.window = [row.to(self.device) for row in self.window]
            set_random_state(saved["random"], self.device)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise BadInput(f"{self.folder / 'train.pt'} is not a checkpoint of this version ({type(error).__name__}: {error})") from None
        if self.rank == 0 and not (self.folder / "model.pt").exists():
            save(self.objective.model, self.folder / "model.pt")
        if self.rank == 0:
            rewind_log(self.folder, self.step)
            for left in self.folder.glob(".*.part"):                      # of a write that a kill cut short
                left.unlink()
        self.say(f"resuming at step {self.step} of {self.train.steps}")

    def save(self):
        """model.pt first: a kill between the two leaves an old train.pt, whose resumed steps write the same model.pt again."""
        if self.rank:
            return
        if not all(parameter.isfinite().all() for parameter in self.objective.parameters()):
            raise BadInput(f"step {self.step}: the weights are not finite. They were not saved; begin anew in another --out with a lower --lr")
        save(self.objective.model, self.folder / "model.pt")
        write_torch({"config": self.settings, "processes": self.world, "objective": self.objective.state_dict(), "optimizer": self.optimizer.state_dict(),
                     "scaler": self.scaler.state_dict(), "random": random_state(self.device), "step": self.step, "tokens": self.tokens,
                     "seconds": self.seconds, "first": self.first, "window": [row.cpu() for row in self.window],
                     "tokenizer_hash": data.tokenizer_hash(self.corpus.tokenizer), "data_hash": self.corpus.hash}, self.folder / "train.pt")

    def make_batch(self, step):
        """Step -> its parts (one unless --accumulate), a pure function of (seed, step, rank)."""
        examples, rng, number = self.batches.examples(step), self.batches.rng(step), self.train.accumulate
        bounds = [len(examples) * i // number for i in range(number + 1)]
        parts = [self.kind.collate(examples[a:b], rng, self.config, self.corpus.special) for a, b in zip(bounds, bounds[1:])]
        for part in parts if self.train.fill > 1 else ():
            part["packed"] = part["packed"].filled(self.train.fill)
        for packed in (value for part in parts for value in part.values() if hasattr(value, "sees")):
            for need in self.needs:                                      # here, beside the loop, and not in the first layer that asks
                packed.plan(need, self.device)
        return parts

    def train_step(self, parts, forward):
        """One optimiser step -> its loss, terms, tokens and gradient norm, means over parts and ranks, as one tensor on the device (their names
        are in self.names): nothing here waits for the device. A step that is not finite leaves the weights alone."""
        train, total = self.train, {}
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, train)
        parts = share_counts(to_device(parts, self.device), self.world)
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            with contextlib.nullcontext() if last or self.world == 1 else forward.no_sync():
                with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
                    loss, terms = forward(part)
                self.scaler.scale(loss / len(parts)).backward()
            for name, value in {"loss": loss.detach(), **terms}.items():
                total[name] = total.get(name, 0) + value / len(parts)
        total["tokens"] = torch.full((), float(sum(part["packed"].live for part in parts)), device=self.device)
        values = mean_over_ranks(torch.stack([value.float() for value in total.values()]), self.world)
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.objective.parameters(), train.clip or math.inf)
        values, self.names = torch.cat([values, norm.float().view(1)]), [*total, "grad_norm"]
        if not self.scaler.is_enabled():                                 # AdamW then skips the step, as the scaler would make it
            self.optimizer.found_inf = (~values.isfinite().all()).float()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return values

    def fail(self, values, step):
        """A loss or gradient that is not finite: nothing after it can be trusted, so keep the evidence and stop."""
        path = self.folder / "bad_batch.pt"
        if self.rank == 0:
            bare = lambda packed: {name: value for name, value in vars(packed).items() if name != "plans"}
            plain = [{name: bare(value) if hasattr(value, "sees") else value for name, value in part.items()} for part in self.make_batch(step)]
            write_torch({"step": step, "values": values, "parts": plain}, path)
        terms = ", ".join(f"{name} {value:g}" for name, value in values.items() if name not in ("tokens", "grad_norm"))
        if all(map(math.isfinite, [value for name, value in values.items() if name != "grad_norm"])):
            terms += f", but its gradient's norm {values['grad_norm']:g}"
        good = "the last good state in train.pt" if (self.folder / "train.pt").exists() else "and there is no checkpoint yet"
        raise BadInput(f"step {step}: the loss is not finite ({terms}). The weights were left alone. The batch is in {path}, {good}; "
                       "begin anew in another --out with a lower --lr, --precision float32, or a smaller --clip")

    def frames(self):
        return self.kind.frames(self.config, self.corpus.special)

    def header(self):
        """How many tokens of a chat's system text open its row; 0: it is not read."""
        return self.train.cut if self.train.chat == "shared-header" else 0

    def evaluate(self):
        """Evaluate, log and print one line; -> results. Only rank 0 works, the others wait at the next collective."""
        if self.rank:
            return {}
        train = self.train
        results = evaluate.run(evaluate.Subject(
            self.objective.model, self.corpus.tokenizer, train.eval_data or train.data, self.langs, "all" if train.eval_data else "valid",
            train.eval_limit, train.skip_bad, header=self.header(), frames=self.frames()))
        log_line(self.folder, {"step": self.step, "eval": results})
        found = [f"{name} {results[name]:.1f} %" for name in ("retrieval/xsim", "retrieval/xsim++", "generate/exact") if name in results]
        health = metrics.diagnose(results)[1]
        if warning := self.objective.warning():
            log_line(self.folder, {"step": self.step, "warning": warning})
            self.say(f"warning at step {self.step}: {warning}")
        if self.step == 0:
            health = health.split(" -> ")[0] + " -> untrained"           # random weights look collapsed: that is no verdict on training
        self.say(f"step {self.step:>5}  " + "  ".join(found + [health]))
        return results

    def loop(self):
        train, self.stop = self.train, Stop()
        if self.step >= train.steps:
            if self.rank == 0 and not any("eval" in record and record["step"] == self.step for record in read_log(self.folder)):
                self.finish()                                            # it was killed between its last checkpoint and its last evaluation
            self.say(f"this run is finished: {self.step} steps. Evaluate it: python evaluate.py {self.folder}")
            return 0
        forward = self.objective
        if self.world > 1:
            forward = torch.nn.parallel.DistributedDataParallel(self.objective, device_ids=[self.device] if self.device.type == "cuda" else None)
        if self.step == 0:
            self.first = self.evaluate()
        if train.compile:
            for block in (block for block in self.objective.modules() if isinstance(block, Block)):
                block.compile(dynamic=True)                              # in place: no wrapper, no other names in the checkpoint
        begun = self.step
        bar = tqdm(total=train.steps, initial=self.step, file=sys.stderr, disable=self.rank > 0 or not sys.stderr.isatty(), dynamic_ncols=True,
                   leave=False)
        start = time.perf_counter()
        self.objective.train()
        supply = self.make_batch if self.device.type != "cuda" else lambda step: lay_out(self.make_batch(step), True)
        with contextlib.closing(data.prefetch(supply, self.step, train.steps)) as supply:
            for parts in supply:
                self.window.append(self.train_step(parts, forward))
                self.step += 1
                self.objective.after_step(self.step / train.steps)
                bar.update()
                if self.step % train.log_every == 0 or self.step == train.steps:
                    loss, start = self.log(start)
                    bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                if self.step == begun + 10:
                    pace = (time.perf_counter() - start + self.seconds) / self.step if train.log_every > 10 else self.seconds / self.step
                    self.say(f"{pace:.2f} s a step: about {(train.steps - self.step) * pace / 60:.1f} minutes left, evaluations apart. "
                             "Ctrl-C saves; the same command resumes")
                if self.step % train.eval_every == 0 and self.step < train.steps:
                    pause = time.perf_counter()
                    self.read_window()                                   # a step that was not finite is told before what came of it
                    self.evaluate()
                    start += time.perf_counter() - pause
                stopped = self.agree(self.stop.signal)
                if self.step % train.save_every == 0 or stopped or self.step == train.steps:
                    self.read_window()                                   # a state that is not finite is never saved
                    self.save()
                if stopped and self.step < train.steps:
                    bar.close()
                    self.say(f"stopped and saved at step {self.step}. To resume: {self.command}")
                    return 128 + stopped
        bar.close()
        self.finish()
        if self.world > 1:
            dist.barrier()                                               # the others wait for rank 0's last evaluation
        return 0

    def agree(self, number):
        """All ranks stop together if one was asked to."""
        if self.world > 1:
            asked = torch.tensor(number, device=self.device)
            dist.all_reduce(asked, dist.ReduceOp.MAX)
            number = int(asked)
        return number

    def read_window(self):
        """The steps since the last log line as [{name: number}]: only here, and in a save, does the device have to catch up. Fails for a step
        that was not finite; the scaler of half precision may meet infinite gradients, and skips them."""
        rows = [dict(zip(self.names, row)) for row in torch.stack(self.window).tolist()] if self.window else []
        for place, row in enumerate(rows):
            checked = {name: value for name, value in row.items() if name != "grad_norm" or not self.scaler.is_enabled()}
            if not all(map(math.isfinite, checked.values())):
                self.fail(row, self.step - len(rows) + place)
        return rows

    def log(self, start):
        """One line with the means of the steps since the last -> the last step's loss, the time now."""
        rows = self.read_window()
        self.window = []
        if self.device.type == "cpu":
            trim_memory()
        mean = {name: sum(row[name] for row in rows) / len(rows) for name in self.names}
        now, count = time.perf_counter(), round(mean.pop("tokens") * len(rows) * self.world)
        self.tokens, self.seconds = self.tokens + count, self.seconds + now - start
        if self.rank == 0:
            norm = mean.pop("grad_norm")
            log_line(self.folder, {"step": self.step} | mean | {
                "lr": learning_rate(self.step - 1, self.train), "grad_norm": norm, "tokens": self.tokens, "seconds": round(self.seconds, 3),
                "tokens_per_second": round(count / (now - start), 1)})
        return rows[-1]["loss"], now

    def finish(self):
        """The last evaluation, a table of before and after, five translations, and what to do next."""
        results = self.evaluate()
        if self.rank:
            return
        train = self.train
        self.say("\n" + table(self.first or {}, results))
        texts = evaluate.test_rows(train.eval_data or train.data, self.langs, "all" if train.eval_data else "valid", train.eval_limit, train.skip_bad,
                                   bool(self.header()))[0]
        for example in evaluate.examples(self.objective.model, self.corpus.tokenizer, texts, header=self.header(), frames=self.frames()):
            self.say(f"  {example.query}\n    {'=' if example.right else '!'} {example.found}" +
                     ("" if example.right else f"\n    instead of {example.gold}"))
        self.say(f"\n{self.tokens:,} tokens in {self.seconds:.0f} s, {self.tokens / self.seconds:,.0f} a second. The run is in {self.folder}\n"
                 f"next: python evaluate.py {self.folder}")


def table(before, after):
    """The headline numbers at step 0 and now, aligned."""
    names = [name for name in after if name.count("/") == 1 or name.startswith(("retrieval/xsim++/", "geometry/cosine"))]
    names = [name for name in names if name.split("/")[-1].count("-") == 0]
    width = max(map(len, names))
    lines = [f"{'':{width}} {'step 0':>9} {'now':>9}"]
    for name in names:
        unit, better, about = evaluate.ABOUT.get(name.partition("/")[2], ("", "", ""))
        lines.append(f"{name:{width}} {before.get(name, math.nan):9.2f} {after[name]:9.2f} {unit:1} {better:6} {about}".rstrip())
    return "\n".join(lines)


def train_once(arguments):
    """One run -> (exit status, the signal that it was sent or 0: one in the last evaluation comes too late to stop the run itself)."""
    def terminate(number, frame):
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):                       # until the loop takes over: leave with nothing half-made
        signal.signal(number, terminate)
    try:
        run = Run(arguments)
        return run.loop(), run.stop.signal
    except (BadInput, OSError) as error:                                 # OSError: a full disk, a folder that cannot be written
        print(f"error: {error}", file=sys.stderr)
        return 2, 0
    except RuntimeError as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        reason = next((line for line in reversed(str(error).splitlines()) if "Error" in line), str(error).splitlines()[0])
        print(f"error: --compile does not work here ({reason.strip()}): leave it out, or install the compiler that torch.compile asks for", file=sys.stderr)
        return 2, 0
    except KeyboardInterrupt:
        print("stopped before the first step; nothing to resume", file=sys.stderr)
        return 130, signal.SIGINT
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def train_seeds(arguments, known, rest):
    """--seeds: one run after the other, each as if started alone. A run that fails does not keep the others from being trained, unless it was
    refused before it began: so would they be."""
    _, config, *_ = parse([*rest, *(["--out", known.out] if known.out else [])])
    seeds = [word.strip() for word in known.seeds.split(",")]
    if not all(word.isdecimal() for word in seeds) or len({int(word) for word in seeds}) < len(seeds):
        raise BadInput(f"seeds is {known.seeds!r}: give different whole numbers with commas between them, such as 82,23,37,84,4")
    if known.seed is not None:
        raise BadInput(f"seed {known.seed} and seeds {known.seeds} exclude each other: drop one of the two")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise BadInput(f"seeds {known.seeds}: torchrun trains one run; start it once per seed, with --seed {seeds[0]} --out {config.out}-{seeds[0]} and so on")
    folders, failed = [f"{Path(config.out)}-{int(word)}" for word in seeds], []
    for word, folder in zip(seeds, folders):
        status, stopped = train_once([*rest, "--seed", word, "--out", folder])
        if stopped and (status or folder != folders[-1]):
            print(f"stopped at seed {word} of {known.seeds}. To resume: python train.py {' '.join(arguments)}")
            return status or 128 + stopped
        if status and not Path(folder).exists():
            return status
        failed += [word] * (status > 0)
    if failed:
        print(f"error: of the seeds {', '.join(seeds)}, {', '.join(failed)} failed: see above", file=sys.stderr)
        return 1
    print(f"next: python evaluate.py {folders[0]}, the same for each of the others, and then\npython evaluate.py compare {' '.join(folders)}")
    return 0


def main(arguments):
    first = Parser(add_help=False, allow_abbrev=False)
    for name in ("--seeds", "--seed", "--out"):
        first.add_argument(name)
    try:
        known, rest = first.parse_known_args(arguments)
        return train_once(arguments)[0] if known.seeds is None else train_seeds(arguments, known, rest)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
