"""Other libraries compute what ours does before they are timed, and attention in all its ways runs
at toy size in Triton's interpreter."""

import re
from importlib.util import find_spec

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
    assert text.startswith("## , bfloat16\n") and "failed" not in text
    sides = ["ours", "ours, every state", "transformers, padded"]
    sides += ["sentence-transformers"] * (name == "contrastive")
    assert set(sides) == set(re.findall(r"^\| (\w.*?) \|", text, re.M)) - {"ms"}


@pytest.mark.parametrize("part, sizes, other, package", [
    ("encoding", (8,), "sentence-transformers", "sentence_transformers"),
    ("search", (300,), "faiss IndexFlatIP", "faiss"),
    ("generation", (3,), "transformers", "transformers"),
    ("reading", (200,), "datasets + tokenizers", "datasets")])
def test_a_table_has_both_sides_or_says_that_a_package_is_missing(part, sizes, other, package):
    for _, table in getattr(bench, part)(*sizes):
        assert list(table) == ["ours", other] and table["ours"]["times ours"] == 1
        if find_spec(package):
            assert table[other]["ms"] > 0
        else:
            assert f"No module named '{package}'" in table[other]["failed"]


def test_what_the_sides_of_a_table_return_is_compared(monkeypatch):
    monkeypatch.setattr(bench.evaluate, "generate", lambda model, rows, *rest: (rows, []))
    with pytest.raises(BadInput, match="generation: the sides disagree"):
        list(bench.generation(3))


def test_nothing_is_timed_if_the_losses_differ(monkeypatch):
    peer_of = bench.peer_of
    monkeypatch.setattr(bench, "peer_of", lambda objective, grids: peer_of(objective, grids[::-1]))
    with pytest.raises(BadInput, match="those of the other sides"):
        list(small("mexma"))


def test_attention_runs_in_all_ways_at_toy_size(monkeypatch):
    shape = bench.Shape(Packed.of([np.zeros(9, np.int64)]), 2, 2, 16)
    monkeypatch.setattr(bench, "shapes", lambda: {"nine tokens": shape})
    (_, forward), (_, backward) = bench.attention()
    assert "ms" in backward["our SDPA back end"] and "ms" in forward["FlexAttention"]
    if not bench.GPU:  # a side that cannot run says why
        assert "CPU" in backward["FlexAttention"]["failed"]


def test_the_shapes_are_those_of_the_papers():
    for shape in bench.shapes().values():
        assert shape.head_dim in (64, 128) and shape.heads % shape.kv_heads == 0
        assert len(shape.packed.tokens) > 1000
