"""Check the kernels on a GPU and time them, in one command that needs nobody beside it.

It runs in parts. A part that fails does not end it, and each part is in the file as soon as it
ends. kernels/bench.py has the checks and the tables, and results/peers.py the training step.
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
from base.common import BadInput, Parser, atomic_file, make_folder
from data import Packed, Segment
from kernels import bench

from . import peers
from .compare import times_lines

TINY = [(7, 0.2, 4, 9)] * 2  # see peers.SENTENCES

class TimeIsUp(BaseException):
    """--minutes are over. No `except Exception` catches it."""


def stop(*_):
    raise TimeIsUp


def machine():
    """Return the versions and the card."""
    versions = {name: [one.version for one in importlib.metadata.distributions(name=name)]
                for name in ("torch", "triton", "transformers")}
    return {"device": peers.device_name(), "python": platform.python_version(),
            **{name: version[0] if version else None for name, version in versions.items()},
            "cuda": torch.version.cuda, "started": time.strftime("%Y-%m-%d %H:%M:%S"),
            "card": str(torch.cuda.get_device_properties(0)) if bench.GPU else
            "none: Triton's interpreter runs the kernels, so their times say nothing"}


def masks():
    """Return {kernels: rows that need them}: short ones, and a long one whose tokens see two
    intervals."""
    text, answer, other, row = map(np.zeros, (90, 60, 9, 20))
    long = [Segment(text, True), Segment(answer, True, (0, 70)), Segment(other, False, (0, 1))]
    rows = {"local_forward and local_backward": [[Segment(row)], [Segment(other, True)]],
            "forward, queries and keys": [long]}
    return {names: Packed.of_segments(segments).to(bench.DEVICE)
            for names, segments in rows.items()}


def shapes():
    """Return {title: bench.Shape} of batches of two papers, and on a GPU of long causal rows."""
    encoder, decoder = (16, 16, 64), (32, 8, 64)  # XLM-R large, Llama 1B
    size = (64, peers.SENTENCES)
    if not bench.GPU:  # Triton's interpreter runs the kernels as Python
        encoder, decoder, size = (2, 2, 16), (2, 1, 16), (2, TINY)
    rows = {"MEXMA": (peers.make_batch("mexma", *size)["packed"], *encoder),
            "LLM-JEPA": (peers.make_batch("llm-jepa", *size)["packed"], *decoder)}
    for count, length, *heads in ((4, 2048, *decoder), (1, 16384, 16, 16, 128)) * bench.GPU:
        packed = Packed.of([np.zeros(length)] * count, causal=True)
        rows[f"{count} x {length} causal tokens"] = (packed, *heads)
    return {title: bench.Shape(packed.to(bench.DEVICE), *heads)
            for title, (packed, *heads) in rows.items()}


def all_parts():
    """Return {title: function that returns a table}."""
    job = peers.GPU_JOB if bench.GPU else ("mexma", "toy", 2, TINY)
    return {**bench.check_parts(masks()), **bench.attention_parts(shapes()),
            "training step of MEXMA": functools.partial(peers.training_table, *job)}


def run_part(title, make_table, seconds):
    """Return the record of a part: its table, or why it has none."""
    part = {"label": title}
    start = time.monotonic()
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        part["table"] = make_table()
    except TimeIsUp:
        part["stopped"] = "--minutes were over"
    except Exception as error:  # its last characters say what went wrong
        part["failed"] = "".join(traceback.format_exception(error))[-1000:]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    part["seconds"] = round(time.monotonic() - start, 1)
    gc.collect()  # a table's tensors
    if bench.GPU:
        torch.cuda.empty_cache()
    return part


def gpu_command(words):
    """Return 1 if a part failed."""
    parser = Parser("python -m results gpu", "Compare our kernels with PyTorch's attention in "
                    "float64, and time both, and a training step against transformers. Writes one "
                    "JSON file, which is complete after each part. Exit status 1 if a part failed; "
                    "a part that --minutes leaves no time for did not fail.")
    parser.add_argument("--minutes", type=float, default=8.0, help="stop after this time [8]")
    parser.add_argument("--into", metavar="FOLDER", default=".", help="folder of the file, whose "
                        "name has the card and the time [.]")
    options = parser.parse_args(words)
    if not 0 < options.minutes <= 60:
        raise BadInput(f"--minutes {options.minutes:g}: it must be above 0, and at most 60")
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
    report["not run"] = list(parts := all_parts())
    while report["not run"] and (left := end - time.monotonic()) > 0:
        title = report["not run"].pop(0)
        part = run_part(title, parts[title], left)
        report["parts"].append(part)
        with atomic_file(path) as file:
            file.write(json.dumps(report, indent=1).encode())
        lines = [f"## {title}", "", part.get("failed") or part.get("stopped")]
        if "table" in part:
            lines = times_lines(report | part)[:-2]  # without versions and device
        print(*lines, f"\n{part['seconds']} s\n", sep="\n", flush=True)
    failed = [part["label"] for part in report["parts"] if "failed" in part]
    print(f"{len(report['parts'])} parts, {len(failed)} failed, {len(report['not run'])} not run "
          f"for lack of time; all in {path}", *failed, sep="\n")
    return int(bool(failed))
