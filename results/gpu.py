"""Show on a GPU what a CPU cannot: that kernels, training and resuming are right, and how fast.

It runs in parts, each in a process of its own, because after an illegal access every later call of
CUDA fails. A part is a function below that yields rows (name, {column: value}); its docstring is
what it shows. Without a GPU every part runs once, at its smallest size.
"""

import contextlib
import functools
import itertools
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

import numpy as np
import torch
import torch.distributed as dist

import evaluate
import kernels
import train
from base.common import BadInput, Parser, atomic_file, make_folder, usable_precision
from corpora import toy
from data import Packed, Segment, to_device
from harness import runs
from harness.generation import generate
from harness.weights import add_lora
from kernels import bench
from kernels.bench import DEVICE, GPU
from model import SIZES, Block, Model, ModelConfig, set_attention
from objectives import OBJECTIVES

from . import peers
from .compare import ROOT, aligned
from .flops import batch_flops

TOO_LARGE = "TOO LARGE"
FINE = "passed" if GPU else "ran"  # without a GPU a part shows only that it runs
PAIRS = (32, peers.SENTENCES) if GPU else (2, [(7, 0.2, 4, 9)] * 2)  # see peers.make_batch


def compared(difference, limit):
    """Return the cells of a comparison. A part with one that is too large fails."""
    return {"difference": f"{difference:.2g}", "limit": f"{limit:g}",
            "": "ok" if difference <= limit else TOO_LARGE}


def machine():
    """The card and the versions."""
    card = "name,driver_version,clocks.sm,clocks.mem,power.limit,memory.total"
    with contextlib.suppress(OSError):
        yield card, {"": subprocess.run(
            ["nvidia-smi", f"--query-gpu={card}", "--format=csv,noheader"], capture_output=True,
            text=True).stdout.strip()}
    yield "device", {"": peers.device_name()}
    yield "CUDA, cuDNN", {"": f"{torch.version.cuda}, {torch.backends.cudnn.version()}"}
    for name in ("torch", "triton", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            yield name, {"": version(name)}


# ---- the kernels


def masks():
    """Yield (kernels, rows that need them): short rows; one whose tokens see two intervals; and on
    a GPU long ones, which have other tiles, also without a mask."""
    text, answer, other, row, long = map(np.zeros, (40, 30, 9, 20, 700))
    yield "local_forward, local_backward", [[Segment(row)], [Segment(other, True)]]
    yield "forward, queries, keys", [[Segment(text, True), Segment(answer, True, (0, 35)),
                                      Segment(other, False, (0, 1))]]
    if GPU:
        yield "the same with tiles of long rows", [[Segment(long)], [Segment(long, True)]]


def kernel_errors():
    """Our kernels compute attention and its gradients as PyTorch does in float64, and twice the
    same bits."""
    for dtype, limit in bench.LIMIT.items():
        for size, (names, rows) in itertools.product((64, 128) if GPU else (16,), masks()):
            if not GPU and dtype == torch.bfloat16:
                continue  # Triton's interpreter gets it wrong
            shape = bench.Shape(Packed.of_segments(rows).to(DEVICE), 4, 2, size)
            errors, is_same = bench.errors(shape, dtype)
            if not is_same:
                raise ValueError(f"{names}: two calls gave different bits")
            yield (f"{names}, heads of {size}, {str(dtype)[6:]}",
                   compared(max(errors.values()), limit))


# ---- training

SMALL = dict(data="pairs.tsv", vocab=300, width=32, layers=2, heads=2, ffn_dim=64, batch=8, steps=5,
             eval_limit=20, dropout=0.0, optimizer="adamw", lr=1e-3, precision="float32")
OWN = {"mexma": dict(head_layers=1, head_heads=2, head_hidden=64),
       "hybrid": dict(predictor_layers=1, predictor_width=32, predictor_heads=2)}
# {precision: (options, largest difference of a loss from a CPU's in float32)}
WAYS = {"float32": ({}, 1e-4), "bfloat16": ({}, 0.03), "float16": ({}, 0.03),
        "float16, Muon": (dict(optimizer="muon"), 0.03),
        "bfloat16, our kernels": (dict(attention="triton"), 0.03)}


def small_run(name, device="cpu", **given):
    """Return a train.Run of a small model on 300 pairs of sentences."""
    if not Path("pairs.tsv").exists():
        lines = [f"{row['en']}\t{row['de']}\n" for row in toy.toy("train", 300)]
        Path("pairs.tsv").write_text("".join(["en\tde\n", *lines]), encoding="utf-8")
    return train.start(name, device=str(device), **SMALL | OWN.get(name, {}) | given)


def losses(name, device="cpu", **given):
    """Return the loss of each step of a small run."""
    steps = small_run(name, device, eval_limit=2, **given).steps(every=1)
    return [record["loss"] for record in steps if "loss" in record]


def largest(found, expected):
    """Return the largest difference of two lists of losses, relative to losses above 1."""
    pairs = zip(found, expected, strict=True)
    return max(abs(one - other) / max(1, abs(other)) for one, other in pairs)


def losses_as_on_a_cpu():
    """The losses of five steps are those of a CPU in float32."""
    for name, (way, (given, limit)) in itertools.product(OBJECTIVES, WAYS.items()):
        precision = way.partition(",")[0]
        if GPU or not given and precision != "float16":  # whose loss scaling needs CUDA
            expected = losses(name, **given | dict(attention="sdpa"))
            found = losses(name, DEVICE, precision=precision, **given)
            yield f"{name}, {way}", compared(largest(found, expected), limit)


def steps_without_a_wait():
    """A step never waits for the GPU."""
    ways = {}, dict(accumulate=2, gradient_checkpointing=True), dict(precision="float16")
    for name, given in itertools.product(OBJECTIVES, ways[:3 if GPU else 2]):
        run = small_run(name, DEVICE, **dict(precision="auto") | given)
        for step, batch in enumerate([run.make_batch(step) for step in range(4 if GPU else 1)]):
            if step == 2:  # the first steps build kernels and allocate memory
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            run.train_step(batch, run.objective)
        if GPU:
            torch.cuda.set_sync_debug_mode("default")
        yield f"{name} {given or ''}", {"": "ok" if GPU else "only CUDA can report a wait"}


def in_processes(*calls, **environment):
    """Run calls of functions of this file at the same time, each in a process of its own."""
    words = [[sys.executable, "-c", f"from results import gpu; gpu.{call}"] for call in calls]
    for process in [subprocess.Popen(one, env=os.environ | environment) for one in words]:
        process.wait()


def train_until(folder, device, last=None):
    """Train, and end this process by kill -9 after a step."""
    run = small_run("hybrid", device, out=folder, steps=9, save_every=2)
    for record in run.steps(every=1):
        if record["step"] == last and "loss" in record:
            os.kill(os.getpid(), signal.SIGKILL)


def logged(folder):
    return [record["loss"] for record in runs.read_log(folder)[1:] if "loss" in record]


def resumed():
    """A run that is killed goes on, from CPU to GPU and back, as one that never stopped."""
    train_until("stayed", "cpu")
    in_processes("train_until('moved', 'cpu', 3)")
    in_processes(f"train_until('moved', '{DEVICE}', 6)")
    train_until("moved", "cpu")
    yield ("hybrid, kill -9 on the CPU at step 3 and on the GPU at step 6",
           compared(largest(logged("moved"), logged("stayed")), 1e-4))


def evaluations():
    """Scores, embeddings and generated tokens are those of a CPU."""
    for name in ("mexma", "llm-jepa"):
        list(small_run(name, out=name).steps())
        scores, embeddings, answers = [], [], []
        for device in ("cpu", DEVICE):
            opened = runs.open_run(name, device)
            evaluation = evaluate.evaluation_of(opened)
            scores.append(evaluate.run(evaluation))
            embeddings += [torch.cat([*evaluation.embeddings.values()])]
            rows = next(iter(evaluation.rows.ids.values()))[:8]
            if opened.model.config.causal:
                answers.append(generate(opened.model, rows, -1, 12)[0])
        yield f"{name}, embeddings", compared(bench.difference(*embeddings), 1e-4)
        one, other = scores
        yield (f"{name}, {len(one)} scores (one text is 5 %)",
               compared(max(abs(one[key] - other[key]) for key in one), 5))
        if answers:
            yield f"{name}, generated tokens", compared(answers[0] != answers[1], 0)


def two_processes():
    """Two processes on one GPU train as one with twice the batch."""
    in_processes("one_of_two(0)", "one_of_two(1)", WORLD_SIZE="2", LOCAL_RANK="0")
    list(small_run("ntp", out="one").steps(every=1))
    yield "ntp, by gloo", compared(largest(logged("two"), logged("one")), 1e-4)


def one_of_two(rank):
    os.environ["RANK"] = str(rank)
    store = dist.FileStore(f"{os.getcwd()}/meet", 2)
    dist.rendezvous = lambda *_, **__: iter([(store, rank, 2)])
    # NCCL refuses two processes on one GPU.
    join = dist.init_process_group
    dist.init_process_group = lambda _, **more: join("gloo", **more)
    list(small_run("ntp", DEVICE, out="two", batch=4).steps(every=1))


# ---- speed


def compiled_steps():
    """The time of a step after the first ones, and the number of compilations."""
    if not GPU:  # without code, which takes a minute
        Block.compile = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
    back_end, first, last = ("triton", 20, 40) if GPU else ("sdpa", 1, 2)
    for is_compiled in (False, True):
        torch._dynamo.utils.counters.clear()
        run = small_run("mlm", DEVICE, steps=last, attention=back_end, compile=is_compiled,
                        precision="auto")
        seconds = {record["step"]: record["seconds"] for record in run.steps(every=first)
                   if "loss" in record}
        yield f"mlm, {back_end}{', --compile' * is_compiled}", {
            "ms": round(1000 * (seconds[last] - seconds[first]) / (last - first), 2),
            "compilations": torch._dynamo.utils.counters["stats"]["unique_graphs"]}


def operations():
    """PyTorch's attention never keeps all scores."""
    for dtype, kv_heads, masked in itertools.product(
            (torch.bfloat16, torch.float32), (8, 2), (False, True)):
        q, k = (torch.randn(4, n, 96, 64, device=DEVICE, dtype=dtype) for n in (8, kv_heads))
        mask = torch.ones(4, 1, 96, 96, dtype=torch.bool, device=DEVICE).tril() if masked else None
        name = bench.operation_of(q, k, mask)
        yield (f"{str(dtype)[6:]}, {kv_heads} of 8 key heads{', a mask' * masked}",
               {"operation": name, "": TOO_LARGE if GPU and "math" in name else "ok"})


def attention():
    """The time of attention, forward and backward."""
    encoder, decoder = ((16, 16, 64), (32, 8, 64)) if GPU else ((2, 2, 16), (2, 1, 16))
    rows = {"MEXMA": (peers.make_batch("mexma", *PAIRS)["packed"], *encoder),
            "LLM-JEPA": (peers.make_batch("llm-jepa", *PAIRS)["packed"], *decoder)}
    for count, length, *heads in ((4, 2048, *decoder), (1, 16384, 16, 16, 128)) * GPU:
        packed = Packed.of([np.zeros(length)] * count, causal=True)
        rows[f"{count} x {length} causal tokens"] = (packed, *heads)
    for title, (packed, *heads) in rows.items():
        for side, cells in bench.attention_table(bench.Shape(packed.to(DEVICE), *heads)).items():
            yield f"{title}: {side}", cells


LLAMA = dict(vocab=128_256, width=2048, layers=16, heads=32, kv_heads=8, ffn_dim=8192,
             rope_theta=500_000.0)  # Llama 3.2 1B


def training_steps():
    """The time of a step. MFU is its share of the speed of a large matmul on this GPU."""
    dtype = getattr(torch, usable_precision("auto", DEVICE))
    x = torch.randn(*[8192 if GPU else 128] * 2, device=DEVICE, dtype=dtype)
    peak = 2 * len(x) ** 3 / bench.milliseconds(lambda: x @ x) / 1e9  # TFLOP/s
    yield f"matmul of {len(x)}, {str(dtype)[6:]}", {"TFLOP/s": round(peak, 1)}
    tiny = peers.SIZES["toy"] | dict(vocab=peers.toy_special().vocab)
    for name, tiny_name, shape, rank in (
            ("mexma at the paper's size", "mexma", SIZES["base"] | dict(vocab=250_002), 0),
            ("llm-jepa", "llm-jepa", LLAMA, 16)):
        name, shape = (name, shape) if GPU else (tiny_name, tiny)
        kind, config, _, fields = peers.OBJECTIVES[name]
        with DEVICE:
            model = Model(ModelConfig(**shape | fields, head=kind.head_type(config)))
            objective = kind(add_lora(model, rank) if rank else model, config)
        batch = peers.make_batch(name, *PAIRS)
        autocast = torch.autocast(DEVICE.type, dtype, dtype != torch.float32)
        with autocast:
            flops = batch_flops(objective, batch)
        for back_end in ("sdpa", "triton")[:1 + GPU]:
            set_attention(objective, back_end, DEVICE, dtype.itemsize)
            step = peers.training_step(objective, to_device(batch, DEVICE), autocast)
            cells = bench.interleaved({"": step})[""]
            speed = flops / cells["ms"] / 1e9
            yield f"{name}{', LoRA' * bool(rank)}, {back_end}", cells | {
                "tokens/s": round(1000 * len(batch["packed"].tokens) / cells["ms"]),
                "TFLOP/s": round(speed, 1), "MFU %": round(100 * speed / peak, 1),
                "idle %": idle_share(step) if GPU else "-"}


def idle_share(step):
    """Return in how many % of the time of five steps no kernel runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        start = time.perf_counter()
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        wall = 1e6 * (time.perf_counter() - start)
    busy = sum(event.self_device_time_total for event in profile.key_averages()
               if not event.is_user_annotation)
    return round(100 * max(0, 1 - busy / wall))


def padded_steps():
    """The time of MEXMA's step with --attention auto, and of a padded transformer."""
    yield from peers.training_table(*(peers.GPU_JOB if GPU else ("mexma", "toy", *PAIRS))).items()


# ---- the command

PARTS = {part.__name__.replace("_", " "): part for part in (
    machine, kernel_errors, losses_as_on_a_cpu, steps_without_a_wait, resumed, evaluations,
    compiled_steps, operations, attention, training_steps, padded_steps, two_processes)}
LONGEST = 120  # seconds of a part, so that one that hangs leaves time for the others


def run_part(title, seconds):
    """Run a part in a process of its own. Return its record."""
    part = {"label": title, "rows": {}, "state": FINE}
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/rows", "w+") as rows:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        process = subprocess.Popen(
            [sys.executable, "-m", "results", "gpu", "--part", title], cwd=folder, stdout=rows,
            stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": path}, start_new_session=True)
        try:
            if process.wait(seconds):
                part["state"] = "failed"
        except subprocess.TimeoutExpired:
            part["state"] = "stopped"
        finally:  # also what the part started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        rows.seek(0)
        text = rows.read()
    part["rows"] = dict(map(json.loads, re.findall(r"^ROW (.*)$", text, re.M)))
    if part["state"] != FINE:
        part["output"] = text[-1500:]
    return part | {"seconds": round(time.monotonic() - start, 1)}


def show_part(title):
    """Print the rows of a part as lines of JSON. Return 1 if a value is too large."""
    torch.set_num_threads(os.cpu_count() if GPU else 1)
    is_wrong = False
    for row in PARTS[title]():
        print("\nROW", json.dumps(row), flush=True)
        is_wrong |= TOO_LARGE in row[1].values()
    return int(is_wrong)


def gpu_command(words):
    """Return 1 if a part failed or was stopped, or without a GPU did not run."""
    parser = Parser("python -m results gpu", "Show on this GPU that kernels, training and resuming "
                    "are right, and how fast they are. Writes one JSON file, which is complete "
                    "after each part. Exit status 1 if a part failed.")
    parser.add_argument("--minutes", type=float, default=8.0, help="start no part after this time; "
                        "without a GPU every part runs [8]")
    parser.add_argument("--into", metavar="FOLDER", default=".", help="folder of the file, whose "
                        "name has the card and the time [.]")
    parser.add_argument("--part", choices=PARTS, help="print the rows of one part")
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
        heads = list(dict.fromkeys(key for cells in part["rows"].values() for key in cells))
        rows = [[row, *(cells.get(key, "-") for key in heads)]
                for row, cells in part["rows"].items()]
        print(f"## {title}", "", *aligned(["", *heads], rows), part.get("output", ""),
              f"{part['seconds']} s; still to come: {', '.join(report['not run'])}", "", sep="\n",
              flush=True)
    for part in report["parts"]:
        print(f"{part['state']:8}{' '.join(PARTS[part['label']].__doc__.split())}")
    failed = [part["label"] for part in report["parts"] if part["state"] != FINE]
    print(f"\n{len(report['parts'])} parts, {len(failed)} failed, {len(report['not run'])} not run "
          f"for lack of time; all in {path}", *failed, sep="\n")
    return int(bool(failed))
