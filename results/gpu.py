"""Show on a GPU what a CPU cannot: that kernels, training and resuming are right, and how fast.

It runs in parts, each in a process of its own, because after an illegal access every later call of
CUDA fails. A part is a function below that yields rows (name, {column: value}); its docstring is
what it shows. What must be right is a test in tests/, and what is measured is here. Without a GPU
every part runs once, at its smallest size.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import kernels
import train
from base.common import BadInput, Parser, atomic_file, make_folder, usable_precision
from data import Packed, to_device
from kernels import bench
from kernels.bench import DEVICE, GPU
from model import set_attention

from . import peers
from .compare import ROOT, table_lines
from .flops import batch_flops

FINE = "passed" if GPU else "ran"  # without a GPU a part shows only that it runs
PAIRS = (32, peers.SENTENCES) if GPU else (2, [(7, 0.2, 4, 9)] * 2)  # see peers.make_batch


def machine():
    """The card and the versions."""
    card = "name,driver_version,clocks.sm,clocks.mem,power.limit,memory.total"
    with contextlib.suppress(OSError):
        yield card, {"": subprocess.run(
            ["nvidia-smi", f"--query-gpu={card}", "--format=csv,noheader"], capture_output=True,
            text=True).stdout.strip()}
    yield "CUDA, cuDNN", {"": f"{torch.version.cuda}, {torch.backends.cudnn.version()}"}
    for name in ("torch", "triton", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            yield name, {"": version(name)}


# ---- what must be right


def tests_of(path, chosen=""):
    """Run tests with pytest, and yield its last line. Exits if a test fails."""
    words = ["-um", "pytest", path, "-k", chosen, "-vv", "--tb=short", "--maxfail=3"]
    with subprocess.Popen([sys.executable, *words], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT) as process:
        for line in process.stdout:  # if stopped, the last one names a test
            print(line, end="", flush=True)
    if process.returncode:
        sys.exit(f"pytest ended with status {process.returncode}")
    yield path + " without those that need a GPU" * (not GPU), {"": line.strip("= \n")}


def kernel_tests():
    """Our kernels compute attention and its gradients as PyTorch does in float64, and twice the
    same bits."""
    return tests_of("tests/test_kernels.py", "not that_is_not_here" if GPU else
                    "gradients_equal_the_definition")


def training_tests():
    """Training, a killed run that goes on, scores and generated tokens are those of a CPU; no step
    waits for the GPU; two processes train as one."""
    return tests_of("tests/test_gpu.py")


# ---- speed


def compiled_steps():
    """The time of a step after the first ones, and the number of compilations."""
    back_end, first, last = ("triton", 20, 40) if GPU else ("sdpa", 1, 2)
    for is_compiled in (False, True)[:1 + GPU]:  # a CPU compiles for a minute
        torch._dynamo.utils.counters.clear()
        run = train.start("mlm", device=str(DEVICE), steps=last, eval_limit=2, attention=back_end,
                          compile=is_compiled)
        seconds = {record["step"]: record["seconds"] for record in run.steps(every=first)
                   if "loss" in record}
        yield f"mlm, {back_end}{', --compile' * is_compiled}", {
            "ms": round(1000 * (seconds[last] - seconds[first]) / (last - first), 2),
            "compilations": torch._dynamo.utils.counters["stats"]["unique_graphs"]}


def attention():
    """The time of attention, forward and backward."""
    encoder, decoder = ((16, 16, 64), (32, 8, 64)) if GPU else ((2, 2, 16), (2, 1, 16))
    rows = {"MEXMA": (peers.make_batch("mexma", *PAIRS)["packed"], *encoder),
            "LLM-JEPA": (peers.make_batch("llm-jepa", *PAIRS)["packed"], *decoder)}
    for count, length, *heads in ((4, 2048, *decoder), (1, 16384, 16, 16, 128)) * GPU:
        packed = Packed.of([range(length)] * count, causal=True)
        rows[f"{count} x {length} causal tokens"] = (packed, *heads)
    for title, (packed, *heads) in rows.items():
        for side, cells in bench.attention_table(bench.Shape(packed.to(DEVICE), *heads)).items():
            yield f"{title}: {side}", cells


def training_steps():
    """The time of a step. MFU is its share of the speed of a large matmul on this GPU."""
    dtype = getattr(torch, usable_precision("auto", DEVICE))
    peak = bench.matmul_speed(dtype)
    yield f"a large matmul in {dtype}", {"TFLOP/s": round(peak, 1)}
    large = [("mexma at the paper's size", "base", 0), ("llm-jepa", "Llama 3.2 1B", 16)]
    for name, size, rank in large if GPU else [("llm-jepa", "toy", 16)]:
        objective, batch = peers.build(name, size, rank), peers.make_batch(name, *PAIRS)
        autocast = torch.autocast(DEVICE.type, dtype, dtype != torch.float32)
        with autocast:
            flops = batch_flops(objective, batch)
        for back_end in ("sdpa", "triton")[:1 + GPU]:
            set_attention(objective, back_end, DEVICE, dtype.itemsize)
            step = peers.training_step(objective, to_device(batch, DEVICE), autocast)
            cells = bench.interleaved({"": step})[""]
            yield f"{name}, {size}, {back_end}", {
                "LoRA rank": rank, "ms": cells["ms"], "GB": cells.get("GB", "-"),
                "tokens/s": round(1000 * len(batch["packed"].tokens) / cells["ms"]),
                "MFU %": round(flops / cells["ms"] / peak / 1e7, 1),
                "idle %": bench.idle_share(step) if GPU else "-"}


def padded_steps():
    """The time of MEXMA's step with --attention auto, and of a padded transformer."""
    yield from peers.training_table(*(peers.GPU_JOB if GPU else ("mexma", "toy", *PAIRS))).items()


# ---- the command

PARTS = {part.__name__.replace("_", " "): part for part in (
    machine, kernel_tests, training_tests, compiled_steps, attention, training_steps, padded_steps)}
LONGEST = 150  # seconds of a part, so that one that hangs leaves time for the others


def run_part(title, seconds):
    """Run a part in a process of its own. Return its record."""
    part = {"label": title, "rows": {}, "state": FINE}
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "results", "gpu", "--part", title], cwd=ROOT, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True)
        try:
            if process.wait(seconds):
                part["state"] = "failed"
        except subprocess.TimeoutExpired:
            part["state"] = "stopped"
        finally:  # also what the part started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        text = output.read()
    part["rows"] = dict(map(json.loads, re.findall(r"^ROW (.*)$", text, re.M)))
    if part["state"] != FINE:
        part["output"] = text[-4000:]
    return part | {"seconds": round(time.monotonic() - start, 1)}


def show_part(title):
    """Print a part's rows as lines of JSON."""
    torch.set_num_threads(os.cpu_count() if GPU else 1)
    for row in PARTS[title]():
        print("\nROW", json.dumps(row), flush=True)


def gpu_command(words):
    """Return 1 if a part failed or was stopped."""
    parser = Parser("python -m results gpu", "Show on this GPU that kernels, training and resuming "
                    "are right, and how fast they are. Writes one JSON file, which is complete "
                    "after each part. Exit status 1 if a part failed.")
    parser.add_argument("--minutes", type=float, default=8.0, help="start no part after this time; "
                        "without a GPU every part runs [8]")
    parser.add_argument("--into", metavar="FOLDER", default=".", help="folder of the file, whose "
                        "name has the card and the time [.]")
    parser.add_argument("--part", choices=PARTS, help="run one part, and print its rows")
    options = parser.parse_args(words)
    if not 0 < options.minutes <= 60:
        raise BadInput(f"--minutes {options.minutes:g}: it must be above 0, and at most 60")
    if reason := kernels.why_not(DEVICE, 64, 0.0):
        raise BadInput(f"python -m results gpu cannot run: {reason}. To try it on a CPU, at tiny "
                       "sizes, set TRITON_INTERPRET=1")
    if options.part:
        return show_part(options.part)
    make_folder(options.into, "--into")
    end = time.monotonic() + 60 * options.minutes
    name = f"gpu {peers.device_name()} {time.strftime('%Y-%m-%d %H:%M:%S')}"
    path = Path(options.into, re.sub(r"\W+", "-", name).lower() + ".json")
    report = {"parts": [], "not run": list(PARTS)}
    while report["not run"] and (not GPU or time.monotonic() < end):
        title = report["not run"].pop(0)
        left = min(LONGEST, end - time.monotonic()) if GPU else 10 * LONGEST
        report["parts"].append(part := run_part(title, left))
        with atomic_file(path) as file:
            file.write(json.dumps(report, indent=1).encode())
        print(*table_lines(title, part["rows"]), part.get("output", ""),
              f"{part['seconds']} s; still to come: {', '.join(report['not run'])}", "", sep="\n",
              flush=True)
    states = {part["label"]: part["state"] for part in report["parts"]}
    for title, part in PARTS.items():
        print(f"{states.get(title, 'not run'):8} {title}: {' '.join(part.__doc__.split())}")
    failed = sum(state != FINE for state in states.values())
    print(f"\n{len(states)} parts, {failed} failed, {len(report['not run'])} not run for lack of "
          f"time; all in {path}")
    return int(failed > 0)
