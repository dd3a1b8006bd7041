"""Other libraries compute what ours does before they are timed, and attention in all its ways runs
at toy size in Triton's interpreter."""

import numpy as np
import pytest

from common import BadInput
from model import Packed
from results import bench


@pytest.fixture(autouse=True)
def one_round(monkeypatch):
    monkeypatch.setattr(bench, "ROUNDS", 1)
    monkeypatch.setitem(bench.SIZES, "toy", dict(width=32, layers=1, heads=2, ffn_dim=64))


def small(name):
    return bench.training({"": (name, "toy", 4, bench.SHORT)})


@pytest.mark.parametrize("name", bench.OBJECTIVES)
def test_both_sides_compute_the_same(name, monkeypatch, capsys):
    monkeypatch.setattr(bench, "usable_precision", lambda *_: "bfloat16")
    bench.measure("peers", [], {"training": lambda: small(name)})
    text = capsys.readouterr().out
    assert text.startswith("## , bfloat16\n") and "| ours | " in text and "failed" not in text


def test_nothing_is_timed_if_the_losses_differ(monkeypatch):
    peer_of = bench.peer_of
    monkeypatch.setattr(bench, "peer_of", lambda objective, grids: peer_of(objective, grids[::-1]))
    with pytest.raises(BadInput, match="with transformers"):
        list(small("mexma"))


def test_attention_runs_in_all_ways_at_toy_size(monkeypatch):
    shape = bench.Shape(Packed.of([np.zeros(9, np.int64)]), 2, 2, 16)
    monkeypatch.setattr(bench, "shapes", lambda: {"nine tokens": shape})
    monkeypatch.setattr(bench, "CHANGES", [("local", 2, 4)])
    (_, forward), (_, backward) = bench.attention()
    assert list(backward)[:2] == ["ours", "our SDPA back end"]
    assert "ms" in forward["FlexAttention"]
    assert any(side.startswith("ours, local") and "ms" in backward[side] for side in backward)
    if not bench.GPU:  # a side that cannot run says why
        assert "CPU" in backward["FlexAttention"]["failed"]


def test_the_shapes_are_those_of_the_papers():
    for shape in bench.shapes().values():
        assert shape.head_dim in (64, 128) and shape.heads % shape.kv_heads == 0
        assert len(shape.packed.tokens) > 1000
