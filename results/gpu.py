"""Check the kernels on a GPU and time them, in one command that needs nobody beside it.

It runs in parts. A part that fails does not end it, and each part is in the file as soon as it
ends. kernels/bench.py has the checks and the tables, and results/peers.py the training steps.
"""

import functools
import gc
import importlib.metadata
import json
import platform
import re
import signal
import time
import traceback
from pathlib import Path

import numpy as np
import torch

import kernels
from common import BadInput, Parser, atomic_file, make_folder
from kernels import bench
from model import Packed, Segment

from . import peers
from .compare import times_lines

DAY = 24 * 60  # minutes
LONGEST_ERROR = 1000  # characters of an error in the file: the last ones say what went wrong


class TimeIsUp(BaseException):
    """--minutes are over. No `except Exception` catches it."""


def within(seconds, run):
    """Return what run() returns, or raise TimeIsUp after some seconds."""
    def stop(*_):
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return run()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def machine():
    """Return the versions and the card."""
    installed = {one.name: one.version for one in importlib.metadata.distributions()}
    return {"device": peers.device_name(), "python": platform.python_version(),
            **{name: installed.get(name) for name in ("torch", "triton", "transformers")},
            "cuda": torch.version.cuda, "started": time.strftime("%Y-%m-%d %H:%M:%S"),
            "card": str(torch.cuda.get_device_properties(0)) if bench.GPU else
            "none: Triton's interpreter runs the kernels, so their times say nothing"}


def masks():
    """Return {(kernel of the forward pass, of the backward): rows that need them}: short ones, and
    a long one whose tokens see two intervals. The kernel `keys` reads what `queries` writes."""
    text, answer, other, row = map(np.zeros, (90, 60, 9, 20))
    long = [Segment(text, True), Segment(answer, True, (0, 70)), Segment(other, False, (0, 1))]
    rows = {("local_forward", "local_backward"): [[Segment(row)], [Segment(other, True)]],
            ("forward", "queries and keys"): [long]}
    return {names: Packed.of_segments(segments).to(bench.DEVICE)
            for names, segments in rows.items()}


def shapes(jobs):
    """Return {title: bench.Shape} of the batches of jobs, and on a GPU of long causal rows."""
    found = {}
    for title, (name, size, *batch) in jobs.items():
        of = peers.SIZES[size]
        heads = (of["heads"], of.get("kv_heads", of["heads"]), of["width"] // of["heads"])
        packed = peers.make_batch(name, *batch)["packed"]
        found[title] = bench.Shape(packed.to(bench.DEVICE), *heads)
    for count, length, *heads in ((4, 2048, 32, 8, 64), (1, 16384, 16, 16, 128)) * bench.GPU:
        packed = Packed.of([np.zeros(length)] * count, causal=True)
        found[f"{count} x {length} causal tokens"] = bench.Shape(packed.to(bench.DEVICE), *heads)
    return found


# What replaces peers.PAPERS on a CPU, where Triton's interpreter runs the kernels as Python.
TINY = {"MEXMA": ("mexma", "toy", 2, [(7, 0.2, 4, 9)] * 2),
        "LLM-JEPA": ("llm-jepa", "toy", 2, [(7, 0.2, 4, 9)] * 2)}


def all_parts():
    """Return {title: function that returns a table}. What is short and what others need comes
    first."""
    jobs = peers.PAPERS if bench.GPU else TINY
    tables = functools.partial(bench.attention_parts, shapes(jobs))
    first, *others = [(f"training step: {title}", functools.partial(peers.training_table, *job))
                      for title, job in jobs.items()]
    return {**bench.check_parts(masks()), **tables(compiled=False),
            "loss over a large vocabulary, with its gradients": bench.cross_entropy_table,
            **dict([first]), **tables(compiled=True), **dict(others)}


def run_part(title, make_table, seconds):
    """Return the record of a part: its table, or why it has none."""
    part = {"label": title}
    start = time.monotonic()
    try:
        part["table"] = within(seconds, make_table)
    except TimeIsUp:
        part["stopped"] = "--minutes were over"
    except Exception as error:
        part["failed"] = "".join(traceback.format_exception(error))[-LONGEST_ERROR:]
    part["seconds"] = round(time.monotonic() - start, 1)
    gc.collect()  # a table's tensors
    if bench.GPU:
        torch.cuda.empty_cache()
    return part


def gpu_command(words):
    """Return 1 if a part failed."""
    parser = Parser("python -m results gpu", "Compare our kernels with their definition on a GPU, "
                    "and time attention, the loss over a large vocabulary and training steps "
                    "against other libraries. Writes one JSON file, which is complete after each "
                    "part. Exit status 1 if a part failed; a part that --minutes leaves no time "
                    "for did not fail.")
    parser.add_argument("--minutes", type=float, default=8.0, help="stop after this time [8]")
    parser.add_argument("--into", metavar="FOLDER", default=".", help="folder of the file, whose "
                        "name has the card and the time [.]")
    options = parser.parse_args(words)
    if not 0 < options.minutes <= DAY:
        raise BadInput(f"--minutes {options.minutes:g}: it must be above 0, and at most {DAY}")
    end = time.monotonic() + 60 * options.minutes
    if reason := kernels.why_not(bench.DEVICE, 64, 0.0):
        raise BadInput(f"python -m results gpu cannot run: {reason}. To try it on a CPU, at tiny "
                       "sizes, set TRITON_INTERPRET=1")
    if not bench.GPU:
        torch.set_num_threads(1)
    make_folder(options.into, "--into")
    report = machine()
    print(*(f"{name}: {value}" for name, value in report.items()), "", sep="\n", flush=True)
    name = re.sub(r"\W+", "-", f"{report['device']} {report['started']}").lower()
    path = Path(options.into, f"gpu-{name}.json")
    report["parts"] = []
    waiting = all_parts()
    for title, make_table in list(waiting.items()):
        left = end - time.monotonic()
        if left <= 0:
            break
        del waiting[title]
        part = run_part(title, make_table, left)
        report["parts"].append(part)
        report["not run"] = list(waiting)
        with atomic_file(path) as file:
            file.write(json.dumps(report, indent=1).encode())
        if "table" in part:
            print(*times_lines(report | part)[:-2], sep="\n")
        else:
            print(f"## {title}\n\n{part.get('failed') or part['stopped']}")
        print(f"\n{part['seconds']} s\n", flush=True)
    failed = [part["label"] for part in report["parts"] if "failed" in part]
    print(f"{len(report['parts'])} parts, {len(failed)} failed, {len(waiting)} not run for lack of "
          f"time; all in {path}", *failed, sep="\n")
    return int(bool(failed))
