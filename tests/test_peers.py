"""transformers computes what we do before it is timed, and the command for a GPU runs at
toy size in Triton's interpreter."""

import json
import re
from pathlib import Path

import pytest
import torch

from base.common import BadInput
from kernels import bench
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


def rows_of(part, capsys):
    """Return the rows of a part, run in this process."""
    capsys.readouterr()
    assert not main(["gpu", "--part", part])
    return dict(map(json.loads, re.findall(r"^ROW (.*)$", capsys.readouterr().out, re.M)))


def test_a_part_that_fails_or_is_stopped_does_not_end_the_command(monkeypatch, capsys):
    run_part = gpu.run_part
    seconds = {"kernel tests": 0.1}
    monkeypatch.setattr(gpu, "run_part", lambda part, left: run_part(part, seconds.get(part, left)))
    monkeypatch.setattr(gpu, "PARTS", {name: gpu.machine for name in (
        "no such part", "kernel tests", "machine")})
    assert main(["gpu", "--into", "a/b"]) == 1
    path, = Path("a/b").iterdir()
    report = json.loads(path.read_text())
    wrong, slow, right = report["parts"]
    assert wrong["state"] == "failed" and "invalid choice: 'no such part'" in wrong["output"]
    assert slow["state"] == "stopped" and not slow["rows"]
    assert right["state"] == gpu.FINE and right["rows"]["torch"] == {"": torch.__version__}
    text = capsys.readouterr().out
    assert "3 parts, 2 failed, 0 not run" in text and "still to come: machine\n" in text
    states = re.findall(r"^(\w+) +[\w ]+: The card", text, re.M)
    assert states == ["failed", "stopped", gpu.FINE]


def test_a_part_is_as_good_as_its_tests(monkeypatch, capfd):
    Path("test_it.py").write_text(
        "def test_right(): pass\n\ndef test_wrong(): assert not 'a fault'")
    monkeypatch.setattr(gpu, "ROOT", Path.cwd())
    (name, cells), = gpu.tests_of("test_it.py", "right")
    assert name.startswith("test_it.py") and "1 passed" in cells[""]
    with pytest.raises(SystemExit, match="status 1"):
        list(gpu.tests_of("test_it.py"))
    assert "assert not 'a fault'" in capfd.readouterr().out


def test_on_a_gpu_attention_that_keeps_all_scores_is_an_error(monkeypatch):
    shape = bench.Shape(peers.make_batch("llm-jepa", 2, peers.SHORT)["packed"], 2, 1, 16)
    line, _ = shape.random_line(torch.float32)
    assert bench.operations_of(bench.back_end("sdpa", shape), line) not in ("", "math")
    monkeypatch.setattr(bench, "GPU", True)
    monkeypatch.setattr(bench, "operations_of", lambda *_: "math")
    with pytest.raises(ValueError, match="keeps all scores"):
        bench.attention_table(shape)


@pytest.mark.parametrize("part", ["attention", "training steps"])
def test_a_part_runs_on_a_cpu(part, capsys):
    """.ci/run runs all."""
    rows = rows_of(part, capsys)
    assert len(rows) > 1 and all(rows.values())


def test_without_a_gpu_or_the_interpreter_it_says_how_to_try_it(monkeypatch, refused):
    if not bench.GPU:
        monkeypatch.delenv("TRITON_INTERPRET")
        assert "set TRITON_INTERPRET=1" in refused(main, "gpu")
