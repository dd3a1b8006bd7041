"""Where a training step's time goes, for each objective, and how time and memory grow.

    python -m results steps          # ten minutes; writes results/steps.json, .md and .png

Of one CPU thread, in its own time, so that other programs count little. Memory is the peak of a
process of its own, beyond what it had before the model was made.
"""

import json
import statistics
import subprocess
import sys
import time
from functools import partial
from multiprocessing import get_context

import numpy as np
import torch
from tqdm import tqdm

import train
from corpora.folder import write_atomic
from corpora.program import Parser, peak_memory, pick
from model import Model, ModelConfig, set_attention
from objectives import OBJECTIVES

from . import bench, plots
from .compare import ROOT, markdown
from .flops import batch_flops

PLACE = ROOT / "results"
# What grows, and what the others are meanwhile.
GROWTH = {"batch": [8, 16, 32, 64, 128], "length": [10, 20, 40, 80, 160],
          "vocabulary": [1_000, 4_000, 16_000, 64_000, 256_000]}
FIXED = {"batch": 16, "length": 20, "vocabulary": 4_000}
GROWN = ("contrastive", "mexma", "llm-jepa")
# What an operation of PyTorch is, by how its name begins; the others are elementwise.
KINDS = {"matrix products": ("mm", "bmm", "addmm"), "attention": ("scaled_dot_product",),
         "optimiser": ("fused_adamw", "foreach", "linalg_vector_norm"),
         "gathers": ("index", "embedding", "gather", "cat"), "elementwise": ("",)}
# What a new interpreter runs, from its start to its end. AdamW imports PyTorch's compiler.
STARTS = {
    "PyTorch and its AdamW": "import torch\ntorch.optim.AdamW([torch.zeros(1)])",
    "import train": "import train",
    "first step": """
import train
run = train.start("mexma", out=None, steps=100, eval_limit=50)
next(record for record in run.steps(every=1) if "loss" in record)"""}


def step_times(arguments):
    """Flags of train.py -> {what: number} of a step on a CPU: its ms, the percent of each kind of
    operation, ms of making the batch, which a thread does ahead, and the step's FLOPs a second in
    percent of those of a product of 1,024."""
    torch.set_num_threads(1)
    run = train.Run(train.parse([*arguments, "--device", "cpu"]), writes=False)
    parts = run.make_batch(0)
    square = torch.randn(1024, 1024)
    works = {"step": partial(run.train_step, parts, run.objective),
             "batch": partial(run.make_batch, 1),
             "product": partial(torch.mm, square, square)}
    times = {name: [] for name in works}
    for number in range(6):
        for name, work in works.items():
            taken = bench.core(work)
            if number:  # the first round warms up
                times[name].append(taken)
    ms = {name: statistics.median(taken) for name, taken in times.items()}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        start = time.perf_counter()
        works["step"]()
        whole = 1000 * (time.perf_counter() - start)
    spent = dict.fromkeys(KINDS, 0.0)  # ms
    for event in profile.key_averages():
        name = event.key.removeprefix("aten::").strip("_")
        if event.key.startswith("aten::"):
            kind = next(kind for kind, starts in KINDS.items() if name.startswith(starts))
            spent[kind] += event.self_cpu_time_total / 1000
    spent["Python and autograd"] = whole - sum(spent.values())
    speed = sum(batch_flops(run.objective, part) for part in parts) / ms["step"]
    return {"ms": round(ms["step"], 1),
            **{f"{kind}, %": round(100 * one / whole) for kind, one in spent.items()},
            "batch, ms": round(ms["batch"], 1),
            "of a product's speed, %": round(100 * speed * ms["product"] / (2 * 1024**3))}


def point(name, batch, length, vocabulary, rounds=5):
    """A step of an objective at the toy size on texts of one length -> its ms and megabytes."""
    torch.set_num_threads(1)
    before = peak_memory()
    kind = OBJECTIVES[name]
    paper, toy = train.defaults(kind, "toy")
    values = paper | toy | dict(vocab=vocabulary, head=kind.head)
    model = Model(pick(ModelConfig, values))
    objective = kind(model, pick(kind.Config, values))
    set_attention(objective, "sdpa", torch.device("cpu"), 4)
    pairs = bench.drawn_pairs((length, 0, length, length), (length, 0, length, length), batch,
                              vocabulary)
    special = bench.special(vocabulary)
    step = bench.stepping(objective)
    times = []
    for seed in range(rounds + 1):  # the first warms up
        made = kind.collate(pairs, np.random.default_rng(seed), objective.config, special)
        times.append(bench.core(partial(step, partial(bench.loss_of, objective, made))))
    return [round(statistics.median(times[1:]), 1), round((peak_memory() - before) / 1e6, 1)]


def apart(work, *arguments):
    """What work(*arguments) gives in a process of its own."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def starting(rounds):
    """Seconds, median of a few processes, of each of STARTS."""
    found = {what: [] for what in STARTS}
    for _ in range(rounds):
        for what, code in STARTS.items():
            begun = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
            found[what].append(time.perf_counter() - begun)
    return {what: round(float(np.median(times)), 2) for what, times in found.items()}


def measure():
    """-> {"parts": {objective: step_times}, "growth": {axis: {objective: [[ms, MB], ...]}},
    "start": {what: seconds}}"""
    grown = {}
    for axis, values in GROWTH.items():
        grown[axis] = {"values": values}
        for name in tqdm(GROWN, axis, disable=None):
            sizes = [FIXED | {axis: value} for value in values]
            grown[axis][name] = [apart(point, name, *one.values()) for one in sizes]
    parts = {name: step_times(["--objective", name]) for name in OBJECTIVES}
    return {"parts": parts, "growth": grown, "start": starting(5), "torch": torch.__version__}


def page(record):
    """The Markdown of what was measured."""
    heads = list(next(iter(record["parts"].values())))
    rows = [[name, *map(str, found.values())] for name, found in record["parts"].items()]
    lines = ["# Where a step's time goes, and how it grows", "",
             f"`python -m results steps`, torch {record['torch']}: one CPU thread, toy size.", "",
             *markdown(["", *heads], rows), "",
             "Batches are made by a thread beside the loop. Percentages are of the step as "
             "PyTorch's profiler sees it, which makes Python slower than it is.", "",
             "![step time and memory](steps.png)", ""]
    for axis, found in record["growth"].items():
        others = [f"{name} {value:,}" for name, value in FIXED.items() if name != axis]
        rows = []
        for name in GROWN:
            cells = [f"{ms:.0f} ms, {megabytes:.0f} MB" for ms, megabytes in found[name]]
            rows.append([name, *cells])
        heads = [f"{axis} {value:,}" for value in found["values"]]
        lines += [f"At {', '.join(others)}:", "", *markdown(["", *heads], rows), ""]
    seconds = [f"{what} {value} s" for what, value in record["start"].items()]
    lines.append(f"A new interpreter, start to end: {', '.join(seconds)} (the embedded data is "
                 "made meanwhile, and the tokenizer trained).")
    return "\n".join(lines) + "\n"


def picture(record):
    """Time above, memory below; a column for each of what grows."""
    figure, axes = plots.panels(2, 3, height=1.7)
    for column, (what, found) in enumerate(record["growth"].items()):
        for row, unit in enumerate(("step, ms", "peak, MB")):
            axis = axes[3 * row + column]
            series = {}
            for name in GROWN:
                series[name] = (found["values"], [one[row] for one in found[name]])
            plots.lines(series, what, unit, scale="log", axis=axis)
            axis.set_xscale("log")
            for ticks in (axis.xaxis, axis.yaxis):
                ticks.set_minor_formatter("")
            if axis is not axes[0]:
                axis.get_legend().remove()
    return figure


def main(arguments):
    Parser("python -m results steps", __doc__).parse_args(arguments)
    record = measure()
    write_atomic(PLACE / "steps.json", (json.dumps(record, indent=1) + "\n").encode())
    write_atomic(PLACE / "steps.png", plots.png(picture(record)))
    write_atomic(PLACE / "steps.md", page(record).encode())
    print("results/steps.md")
