"""Other libraries compute what ours does before they are timed, and attention in all its ways runs
at toy size in Triton's interpreter."""

import re

import numpy as np
import pytest

from common import BadInput
from kernels import bench
from results import peers


@pytest.fixture(autouse=True)
def one_round(monkeypatch):
    monkeypatch.setattr(bench, "ROUNDS", 1)
    monkeypatch.setitem(peers.SIZES, "toy", dict(width=32, layers=1, heads=2, ffn_dim=64))


def small(name):
    return {"": (name, "toy", 4, peers.SHORT)}


@pytest.mark.parametrize("name", peers.OBJECTIVES)
def test_both_sides_compute_the_same(name, monkeypatch, capsys):
    monkeypatch.setattr(peers, "usable_precision", lambda *_: "bfloat16")
    peers.measure("peers", [], [peers.training_tables(small(name))])
    text = capsys.readouterr().out
    assert text.startswith("## \n") and "failed" not in text
    sides = ["ours", "transformers, padded"]
    sides += ["sentence-transformers"] * (name == "contrastive")
    rows = re.findall(r"^\| (\w.*?) \| (float32|bfloat16) \| [\d.]+ \|", text, re.M)
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
        list(peers.training_tables(small("mexma")))


def test_attention_runs_in_all_ways_at_toy_size(monkeypatch):
    monkeypatch.setattr(bench, "SHAPES", {"nine tokens": (bench.causal(1, 9), (2, 2, 16))})
    (_, forward), (_, backward) = bench.attention_tables()
    assert "ms" in backward["our SDPA back end"] and "ms" in forward["FlexAttention"]
    if not bench.GPU:  # a side that cannot run says why
        assert "CPU" in backward["FlexAttention"]["failed"]


def test_the_loss_over_a_vocabulary_equals_pytorch_before_it_is_timed():
    table = bench.cross_entropy_table(9, 8, 50)
    assert all("ms" in row for row in table.values())


@pytest.mark.parametrize("title, rows", [
    ("MEXMA", bench.mexma(64)), ("BERT-JEPA", bench.bert_jepa(64)),
    ("LLM-JEPA on GSM8K", bench.llm_jepa(16, bench.GSM8K))])
def test_a_mask_that_is_timed_is_that_of_an_objectives_batch(title, rows):
    name, _, pairs, lengths = peers.PAPERS[title]
    shape = bench.shape_of(rows, 1, 1, 64)
    packed = peers.make_batch(name, pairs, lengths)["packed"]
    assert np.array_equal(shape.key_ranges, packed.key_ranges)


def test_the_shapes_have_the_heads_of_the_kernels():
    for rows, heads in bench.SHAPES.values():
        shape = bench.shape_of(rows, *heads)
        assert shape.head_dim in (64, 128) and shape.heads % shape.kv_heads == 0
        assert len(shape.key_ranges) > 1000
