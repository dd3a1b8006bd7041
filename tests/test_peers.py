"""Other libraries compute what ours does before they are timed, and the command for a GPU runs at
toy size in Triton's interpreter."""

import functools
import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from common import BadInput
from kernels import attention, bench
from model import Packed
from results import gpu, peers
from results.__main__ import main


@pytest.fixture(autouse=True)
def one_round(monkeypatch):
    monkeypatch.setattr(bench, "ROUNDS", 1)
    monkeypatch.setitem(peers.SIZES, "toy", dict(width=32, layers=1, heads=2, ffn_dim=64))


def small(name):
    return {"": (name, "toy", 4, peers.SHORT)}


@pytest.mark.parametrize("name", peers.OBJECTIVES)
def test_both_sides_compute_the_same(name, monkeypatch, capsys):
    monkeypatch.setattr(peers, "usable_precision", lambda *_: "bfloat16")
    monkeypatch.setattr(peers, "TOY", small(name))
    main(["peers"])
    text = capsys.readouterr().out
    assert text.startswith("## \n") and "failed" not in text
    sides = ["ours", "transformers, padded"]
    sides += ["sentence-transformers"] * (name == "contrastive")
    rows = re.findall(r"^(\w.*?)  +(float32|bfloat16)  +[\d.]+ ", text, re.M)
    assert [side for side, _ in rows] == sides


def test_each_side_is_timed_in_its_faster_way():
    clock = iter([3.0, 1.0, 4.0, 6.0, 2.0, 1.0, 4.0, 6.0])
    sides = {"ours": {"a": int, "b": int}, "theirs": {"a": int, "b": int}, "odd": {"a": None}}
    table = bench.interleaved(sides, lambda run: next(clock), rounds=2)
    assert table["ours"] == {"with": "b", "ms": 1, "times ours": 1, "range": "1.00 to 1.00"}
    assert table["theirs"]["with"] == "a" and table["theirs"]["times ours"] == 4
    assert "not callable" in table["odd"]["failed"]


def test_nothing_is_timed_if_the_losses_differ(monkeypatch):
    peer_of = peers.peer_of
    monkeypatch.setattr(peers, "peer_of", lambda objective, grids: peer_of(objective, grids[::-1]))
    with pytest.raises(BadInput, match="those of the other sides"):
        peers.training_table(*small("mexma")[""])


# ---- the command for a GPU


def report_of(folder, *words):
    """Run the command. Return its exit status, and its file: one, and below 100 KB."""
    status = main(["gpu", "--into", folder, *words])
    path, = Path(folder).iterdir()
    assert path.name.startswith("gpu-") and path.stat().st_size < 100_000
    return status, json.loads(path.read_text())


def test_the_whole_command_runs_on_a_cpu_in_the_interpreter(capsys):
    status, report = report_of("a/b", "--minutes", "1" if bench.GPU else "30")
    text = capsys.readouterr().out
    assert status == 0 and text.startswith("device: ") and "0 failed" in text
    assert {"device", "torch", "triton", "transformers", "cuda", "started"} <= report.keys()
    tables = {part["label"]: part["table"] for part in report["parts"] if "table" in part}
    assert all(f"## {title}\n" in text for title in tables)
    if bench.GPU:  # a minute is enough for the checks alone
        return
    assert report["not run"] == [] and len(tables) == len(report["parts"]) == len(gpu.all_parts())
    for dtype in ("float32", "float16"):
        for size in (64, 128):
            table = tables[f"check of queries and keys, heads of size {size}, {dtype}"]
            assert table.keys() == {"dq", "dk", "dv"}
    table = tables["attention, both passes, kernels: LLM-JEPA"]
    assert "ms" in table["our SDPA back end"]
    assert "one range" in table["torch varlen"]["failed"]  # a peer says why it cannot run
    assert "ms" in tables["attention, forward, kernels: MEXMA, FlexAttention"]["FlexAttention"]
    assert all("ms" in row for row in tables["training step: MEXMA"].values())


def test_the_shapes_of_the_papers_have_heads_of_the_kernels():
    for shape in gpu.shapes(peers.PAPERS).values():
        assert shape.head_dim == 64 and shape.heads % shape.kv_heads == 0
        assert len(shape.packed.tokens) > 1000


class Idle:
    """A kernel that does nothing."""

    def __getitem__(self, grid):
        return lambda *_, **__: None


@pytest.mark.parametrize("kernel, harm, error", [
    ("queries_kernel", None, "'NoneType' object is not subscriptable"),
    ("keys_kernel", Idle(), "are larger than 0.001")])
def test_a_kernel_that_fails_or_is_wrong_does_not_end_the_command(
        kernel, harm, error, monkeypatch, capsys):
    parts = {title: part for title, part in bench.check_parts(gpu.masks()).items()
             if "size 64, float16" in title}
    monkeypatch.setattr(gpu, "all_parts", lambda: parts)
    monkeypatch.setattr(attention, kernel, harm)
    torch.use_deterministic_algorithms(True)  # then what no kernel writes is NaN
    try:
        status, report = report_of("odd")
    finally:
        torch.use_deterministic_algorithms(False)
    assert status == 1 and "4 parts, 1 failed" in capsys.readouterr().out
    for part in report["parts"]:
        is_odd = "queries and keys" in part["label"]
        assert ("table" in part) != is_odd and (error in part.get("failed", "")) == is_odd


def test_it_stops_in_the_middle_of_a_part_when_its_minutes_are_over(monkeypatch):
    def slow():
        try:
            time.sleep(60)
        except Exception:  # as in `interleaved`: this does not catch the end
            pass

    table = {"ours": {"ms": 1}}
    monkeypatch.setattr(gpu, "all_parts", lambda: {
        "quick": lambda: table, "slow": slow, "late": lambda: table})
    status, report = report_of("short", "--minutes", "0.02")
    quick, stopped = report["parts"]
    assert quick["table"] == table and "minutes" in stopped["stopped"] and stopped["seconds"] < 30
    assert status == 0 and report["not run"] == ["late"]


def test_two_reports_do_not_overwrite_each_other(monkeypatch):
    monkeypatch.setattr(gpu, "all_parts", lambda: {"one": dict})
    for card in ("NVIDIA H100", "NVIDIA H200"):
        monkeypatch.setattr(peers, "device_name", lambda card=card: card)
        main(["gpu", "--into", "both"])
    assert [path.name[:15] for path in sorted(Path("both").iterdir())] == [
        "gpu-nvidia-h100", "gpu-nvidia-h200"]


def test_flex_attention_is_compiled_for_every_shape(monkeypatch):
    """PyTorch compiles a function eight times, here twice, and then runs it uncompiled."""
    monkeypatch.setattr(bench, "GPU", True)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    with torch._dynamo.config.patch(recompile_limit=2):
        for length in (16, 17, 18, 19):
            shape = bench.Shape(Packed.of([np.zeros(length)]), 1, 1, 16)
            attend = bench.flex(shape)
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            attend(shape.random_line(torch.float32)[0].detach())
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 1


def test_without_a_gpu_or_the_interpreter_it_says_how_to_try_it(monkeypatch, refused):
    if not bench.GPU:
        monkeypatch.delenv("TRITON_INTERPRET")
        assert "set TRITON_INTERPRET=1" in refused(main, "gpu")
    Path("file").touch()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "--minutes nan: it must be above 0" in refused(main, "gpu --minutes nan")
    assert "--into file: this folder cannot be created" in refused(main, "gpu --into file")
