"""Training on a GPU is training on a CPU: what `python -m results gpu` runs of the tests.

Without a GPU, the pretended one of test_fake_cuda.py takes its place, for fewer objectives.
"""

import json
import os
import signal
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import test_train
import torch
import torch.distributed as dist
from test_fake_cuda import WAYS as STEPS
from test_fake_cuda import a_gpu
from test_train import TWO, command, losses, pairs, small_settings, start_processes  # noqa: F401

import evaluate
import train
from harness import runs
from harness.generation import generate
from kernels.bench import GPU
from objectives import OBJECTIVES

pytestmark = [pytest.mark.gpu] if GPU else []
DEVICE = "cuda:0"
# {way: (settings, largest difference of a loss from the CPU's in float32, relative above 1)}
WAYS = {"float32": ({}, 1e-4), "bfloat16": (dict(precision="bfloat16"), 0.03),
        "float16": (dict(precision="float16"), 0.03),
        "muon": (dict(precision="float16", optimizer="muon"), 0.03),
        "kernels": (dict(precision="bfloat16", attention="triton"), 0.03)}
# Heads have a size that our kernels support.
SETTINGS = dict(width=32, layers=2, dropout=0.0, optimizer="adamw", lr=1e-3, steps=5,
                precision="float32")


def on(device):
    """Return a context in which there is this device: `as` the pretended GPU, if it is that."""
    return nullcontext(SimpleNamespace()) if GPU or device == "cpu" else a_gpu()


def start(name, device, out=None, **given):
    """Return a small run."""
    given = SETTINGS | (dict(predictor_width=32) if name == "hybrid" else {}) | given
    return train.start(name, out, **small_settings(name, device=device, **given))


@pytest.mark.parametrize("name", OBJECTIVES if GPU else ["hybrid"])
@pytest.mark.parametrize("way", WAYS if GPU else ["float32"])
def test_losses_are_those_of_the_cpu_in_float32(name, way):
    given, limit = WAYS[way]
    expected = losses(start(name, "cpu", **given | dict(precision="float32", attention="sdpa")))
    with on(DEVICE):
        found = losses(start(name, DEVICE, **given))
    assert found == pytest.approx(expected, rel=limit, abs=limit)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("way", ["bfloat16", "kernels"])
def test_a_step_never_waits_for_the_gpu(name, way):
    run = start(name, DEVICE, **STEPS[way])
    batches = [run.make_batch(step) for step in range(4)]
    try:
        for batch in batches:
            run.train_step(batch, run.objective)
            run.objective.after_step(0.5)
            if batch is batches[1]:  # the first two steps build kernels and allocate buffers
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train_hybrid(rank, folder, device, killed_at=None):
    """Train nine steps, or end this process by kill -9 after step `killed_at`."""
    os.chdir(folder)
    with on(device):
        for record in start("hybrid", device, "moved", steps=9, save_every=2).steps(every=1):
            if record["step"] == killed_at and "loss" in record:
                os.kill(os.getpid(), signal.SIGKILL)


def logged(folder):
    return [record["loss"] for record in runs.read_log(folder)[1:] if "loss" in record]


def test_a_run_that_is_killed_goes_on_from_cpu_to_gpu_and_back(tmp_path):
    for device, step in (("cpu", 3), (DEVICE, 6)):
        with pytest.raises(torch.multiprocessing.ProcessExitedException, match="SIGKILL"):
            start_processes(train_hybrid, tmp_path, device, step, count=1)
    train_hybrid(0, tmp_path, "cpu")
    list(start("hybrid", "cpu", "stayed", steps=9).steps(every=1))
    assert logged("moved") == pytest.approx(logged("stayed"), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", ["mexma", "llm-jepa"])
def test_scores_and_generated_tokens_are_those_of_the_cpu(name, capsys):
    """Of the programs, which save a run, take it up again, and evaluate it."""
    for steps in (4, 5):
        with on(DEVICE) as gpu:
            gpu.strict = True  # no wait in the loop
            assert not train.main(command(name, **SETTINGS | dict(steps=steps), device=DEVICE))
    scores, answers = [], []
    for device in ("cpu", DEVICE):
        capsys.readouterr()
        with on(device):
            assert not evaluate.main(["run", "--json", f"--device={device}"])
            opened = runs.open_run("run", device)
            rows = next(iter(evaluate.evaluation_of(opened).rows.ids.values()))[:8]
            answers.append(name == "llm-jepa" and generate(opened.model, rows, -1, 12)[0])
        scores.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]
    # On a GPU a text of 20, which are 5 %, can have another neighbor.
    assert scores[0] == pytest.approx(scores[1], rel=2e-4, abs=5 if GPU else 2e-4)


def one_of_two(rank, folder):
    join = dist.init_process_group
    # NCCL refuses two processes on one GPU.
    dist.init_process_group = lambda _, **more: join("gloo", **more)
    os.environ["LOCAL_RANK"] = "0"
    test_train.one_of_two(rank, folder, [command("ntp", "two", **TWO, batch=4, device=DEVICE)])


@pytest.mark.gpu  # test_train.py has it on the CPU
def test_two_processes_on_one_gpu_train_as_one_with_twice_the_batch(tmp_path):
    start_processes(one_of_two, tmp_path)
    train.main(command("ntp", "one", **TWO))
    assert logged("two") == pytest.approx(logged("one"), rel=1e-4, abs=1e-4)
