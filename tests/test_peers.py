"""transformers computes what we do before it is timed, and the command for a GPU runs at
toy size in Triton's interpreter."""

import json
import re
import time
from pathlib import Path

import pytest
import torch

from base.common import BadInput
from kernels import attention, bench
from results import gpu, peers
from results.__main__ import main


@pytest.fixture(autouse=True)
def one_round(monkeypatch):
    monkeypatch.setattr(bench, "ROUNDS", 1)
    monkeypatch.setitem(peers.SIZES, "toy", dict(width=32, layers=1, heads=2, ffn_dim=64))


@pytest.mark.parametrize("name", ["contrastive", "mlm", "mexma", "bepa", "llm-jepa"])
def test_all_sides_compute_the_same_in_both_precisions(name, monkeypatch, capsys):
    monkeypatch.setattr(peers, "usable_precision", lambda *_: "bfloat16")
    monkeypatch.setattr(peers, "JOBS", {"small": (name, "toy", 4, peers.SHORT)})
    main(["peers"])
    text = capsys.readouterr().out
    assert text.startswith("## small\n") and "failed" not in text
    rows = [f"{side}, {precision}" for precision in ("bfloat16", "float32")
            for side in ("ours", "transformers, padded")]
    assert re.findall(r"^(\w.*?)  +[\d.]+ ", text, re.M) == rows


def test_times_are_divided_by_ours_of_the_same_round(monkeypatch):
    monkeypatch.setattr(bench, "ROUNDS", 2)
    clock = iter([1.0, 4.0, 2.0, 6.0])
    table = bench.interleaved({"ours": int, "theirs": int, "odd": None}, lambda run: next(clock))
    assert table["ours"] == {"ms": 1.5, "times ours": 1, "range": "1.00 to 1.00"}
    assert table["theirs"] == {"ms": 5, "times ours": 3.5, "range": "3.00 to 4.00"}
    assert "not callable" in table["odd"]["failed"]


def test_nothing_is_timed_if_the_losses_differ(monkeypatch):
    peer_of = peers.peer_of
    monkeypatch.setattr(peers, "peer_of", lambda objective, grids: peer_of(objective, grids[::-1]))
    with pytest.raises(BadInput, match="that of transformers is"):
        peers.training_table("mexma", "toy", 4, peers.SHORT)


# ---- the command for a GPU


def report_of(folder, *words):
    """Run the command. Return its exit status, and its file: one, and below 100 KB."""
    status = main(["gpu", "--into", folder, *words])
    path, = Path(folder).iterdir()
    assert path.name.startswith("gpu-") and path.stat().st_size < 100_000
    return status, json.loads(path.read_text())


def test_the_whole_command_runs_on_a_cpu_in_the_interpreter(capsys):
    status, report = report_of("a/b", "--minutes", "1" if bench.GPU else "60")
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
            for names in gpu.masks():
                table = tables[f"check of {names}, heads of size {size}, {dtype}"]
                assert table.keys() == {"output", "dq", "dk", "dv"}
    assert "ms" in tables["attention: LLM-JEPA, against our SDPA back end"]["our SDPA back end"]
    assert all("ms" in row for row in tables["training step of MEXMA"].values())


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
    assert status == 1 and "2 parts, 1 failed" in capsys.readouterr().out
    for part in report["parts"]:
        is_odd = "queries and keys" in part["label"]
        assert ("table" in part) != is_odd and (error in part.get("failed", "")) == is_odd


def test_it_stops_in_the_middle_of_a_part_when_its_minutes_are_over(monkeypatch):
    def slow():
        try:
            time.sleep(60)
        except Exception:  # as in `interleaved`: this does not catch the end
            pass

    monkeypatch.setattr(gpu, "all_parts", lambda: {"slow": slow, "late": dict})
    status, report = report_of("short", "--minutes", "0.05")
    part, = report["parts"]
    assert "minutes" in part["stopped"] and "table" not in part and part["seconds"] < 30
    assert status == 0 and report["not run"] == ["late"]


def test_without_a_gpu_or_the_interpreter_it_says_how_to_try_it(monkeypatch, refused):
    if not bench.GPU:
        monkeypatch.delenv("TRITON_INTERPRET")
        assert "set TRITON_INTERPRET=1" in refused(main, "gpu")
    Path("file").touch()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "--minutes nan: it must be above 0" in refused(main, "gpu --minutes nan")
    assert "--into file: this folder cannot be created" in refused(main, "gpu --into file")
