"""Other libraries compute what ours does before they are timed; every part for a GPU runs at toy
size."""

import numpy as np
import pytest
import torch

from common import BadInput
from model import Packed
from results import bench


def small(name):
    return bench.PEERS[name]("tiny", 4, [bench.LENGTHS["8-40"]] * 2, 1, torch.device("cpu"))


@pytest.mark.parametrize("name", bench.PEERS)
def test_both_sides_compute_the_same(name, monkeypatch):
    monkeypatch.setattr(bench, "usable_precision", lambda *_: "bfloat16")
    tables = small(name)
    assert list(tables) == ["float32", "bfloat16"][:1 if name == "encoding" else 2]
    for table in tables.values():
        assert len(table) == 2 and table["ours"]["times ours"] == 1
        assert not any("failed" in row for row in table.values())


def test_nothing_is_timed_if_the_losses_differ(monkeypatch):
    peer_of = bench.peer_of

    def wrong(objective, theirs, grids):
        return peer_of(objective, theirs, [(grid, real) for grid, real in reversed(grids)])

    monkeypatch.setattr(bench, "peer_of", wrong)
    with pytest.raises(BadInput, match="transformers computes something else"):
        small("mexma")


@pytest.mark.parametrize("part", bench.PARTS)
def test_every_part_for_a_gpu_runs_at_toy_size(part, monkeypatch, capsys):
    shape = bench.Shape(Packed.of([np.zeros(9, np.int64)]), 2, 2, 16)
    monkeypatch.setattr(bench, "shapes", lambda: {"nine tokens": shape})
    assert bench.gpu_command(["--only", part]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n## ") + printed.startswith("## ") >= 1 and "| ours |" in printed or (
        "| as in the table |" in printed)
    if part == "attention" and not bench.GPU:  # a side that cannot run says why
        assert "failed" in printed
