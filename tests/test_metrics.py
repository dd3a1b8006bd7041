"""The metrics of evaluate.py: golden values, and definitions written out a second time."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from base import metrics
from harness import screen


def normal(rows, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator, dtype=torch.float64)


def test_golden_values():
    """The same numbers as in earlier editions."""
    i = torch.arange(40, dtype=torch.float64)[:, None]
    j = torch.arange(6, dtype=torch.float64)
    en = torch.sin(1 + i * j + i / 10) + .3
    de = torch.sin(1 + i * j + i / 10 + .4 * torch.cos(5 * i + j)) + .3
    assert metrics.geometry({"en": en, "de": de}) == pytest.approx({
        "rankme": 5.743845505656257, "rankme_share": 95.73075842760427,
        "uniformity": -2.303116693658147, "std": 0.9024511198001693, "norm": 1.8105284321180952,
        "cosine/same": 0.14992366497392112, "cosine/translations": 0.9537474580882004,
        "cosine/translations/de-en": 0.9537474580882004, "cosine/different": 0.1507652688947388,
        "cosine/different/de-en": 0.1507652688947388}, rel=1e-12)
    texts = list(map(str, range(40)))
    hard = [(f"altered {row}", 2 * row, "ab"[row % 2]) for row in range(20)]
    found = metrics.retrieval({"en": en, "de": de}, {"en": texts, "de": texts}, en[::2] + .1, hard)
    assert {name: value for name, value in found.items() if "xsim" in name} == {
        "xsim": 22.5, "xsim/de-en": 22.5, "xsim++": 40.0, "xsim++/de-en": 40.0,
        "xsim++/a": 12.5, "xsim++/b": 5.0, "xsim++/misaligned": 22.5}


# ---- retrieval


@pytest.mark.parametrize("spread", [1, 1e-3])  # with 1e-3, float32 is too coarse
def test_knn_is_the_search_in_float64_and_of_equal_rows_finds_the_first(spread):
    y = torch.cat([normal(1, 40) + spread * normal(200, 40, 1)] * 5)
    x = normal(1, 40) + spread * normal(3000, 40, 2)  # more than a block of rows
    wanted = (F.normalize(x) @ F.normalize(y).T).round(decimals=9).sort(
        dim=1, descending=True, stable=True)
    neighbors = metrics.knn(x, y, 7)
    assert torch.equal(neighbors.indices, wanted.indices[:, :7])
    assert torch.equal(neighbors.cosines, wanted.values[:, :7])


def test_a_search_that_finds_a_copy_of_the_right_text_is_right():
    y = torch.eye(3)
    assert metrics.search(y[[1, 2, 0]], y, ["a", "b", "a"]) == {
        "recall@1": pytest.approx(100 / 3), "recall@10": 100,
        "mrr@10": pytest.approx(100 * (1 / 2 + 1 / 3 + 1) / 3)}


def test_a_query_of_several_rows_may_find_the_text_of_each_of_them():
    """Of passages with five queries each, in both directions."""
    queries = torch.eye(20)
    passages = queries.reshape(4, 5, 20).sum(1).repeat_interleave(5, 0)
    texts = {"passage": [f"p{row // 5}" for row in range(20)], "query": [*map(str, range(20))]}
    scores = metrics.retrieval({"passage": passages, "query": queries}, texts)
    assert (scores["xsim"], scores["recall@1"], scores["mrr@10"]) == (0, 100, 100)
    texts["passage"] = [*map(str, range(20))]  # if the passages differ, one of five is right
    assert metrics.xsim(passages, queries, texts["query"], texts["passage"]) == 80


@pytest.mark.parametrize("text, source, texts, error", [
    ("not a", 0, "abcdefgh", "number"), ("not h", 7, "abcdefgh", "misaligned"),
    ("not h", 7, "abcdefga", "number"), ("a", 7, "abcdefgh", None)])
def test_xsim_plus_blames_the_altered_sentence_that_is_retrieved(text, source, texts, error):
    """Row 0 retrieves an altered copy of its text, of another, of an equal one; or its own text."""
    y = torch.eye(8)
    y[0, 7] = 2
    scores = metrics.xsim_plus(torch.eye(8), y, torch.eye(8)[:1], [(text, source, "number")],
                                texts)
    assert scores.pop("xsim++") == sum(scores.values()) == (12.5 if error else 0)
    assert not error or scores[f"xsim++/{error}"] == 12.5


def test_the_order_error_counts_copies_that_are_nearer_and_half_of_the_ties():
    x = torch.tensor([[1.0, 0]] * 3)
    y = torch.tensor([[5.0, 1]] * 3)
    copies = torch.tensor([[9.0, 1], [2, 1], [5, 1], [9, 1]])
    reordered = [("nearer", 0, "a"), ("farther", 1, "a"), ("equal", 2, "a"), ("nearer", 1, "b")]
    assert metrics.order_error(x, y, copies, reordered) == {
        "order": 62.5, "order/a": 50.0, "order/b": 100.0}
    assert metrics.order_error(x, y, copies, reordered, "b")["order"] == 100
    assert "order" not in metrics.order_error(x, y, copies, reordered, "c")


# ---- geometry

NOISE = normal(1100, 64)  # more than one block of uniformity
ONES = torch.ones(64)


@pytest.mark.parametrize("z, wanted", [
    # Rows of zeros are one point, at a right angle to all others.
    (torch.cat([torch.zeros(3, 4), torch.eye(4)[:1]]), math.log((1 + math.exp(-4)) / 2)),
    (NOISE, torch.pdist(F.normalize(NOISE)).square().mul(-2).exp().mean().log())])
def test_uniformity(z, wanted):
    assert metrics.uniformity(z) == pytest.approx(float(wanted), abs=1e-9)


@pytest.mark.parametrize("x, y, verdict", [
    (NOISE, NOISE + .2 * normal(1100, 64, 1), "ok"),
    (ONES + 1e-3 * NOISE, None, "COLLAPSING"),
    (torch.zeros(9, 64), torch.zeros(9, 64), "COLLAPSING"),
    (3 * ONES + NOISE, None, "half-collapsed (all embeddings share one direction)"),
    (NOISE[:, :1] * ONES, None, "half-collapsed (low effective rank)"),
    (NOISE, NOISE.roll(1, 0) - .5 * NOISE,
     "not aligned (translations are less similar than unrelated sentences)")])
def test_the_verdict_names_what_is_wrong(x, y, verdict):
    scores = metrics.geometry({"x": x} if y is None else {"x": x, "y": y})
    results = {f"geometry/{name}": value for name, value in scores.items()}
    alone = metrics.verdict(results)  # an objective that never sees translations
    assert alone == ("ok" if "translations" in verdict else verdict)
    if y is not None:
        assert metrics.verdict({"retrieval/xsim": 50.0, **results}) == verdict
    columns = dict.fromkeys(screen.columns(screen.METRICS).keys() - {"generate/exact"}, 50.0)
    line = screen.headline(columns | results, 1)
    assert line.endswith(f"  {verdict.partition(' (')[0]}") and len(line) <= 100


# ---- the probe


@pytest.mark.parametrize("scale, shift", [(1, 0), (1e-3, 7), (1e6, 0)])
def test_the_linear_probe_is_ridge_regression_at_any_scale(scale, shift):
    x = normal(60, 5)
    labels = (x[:, 0] + .8 * x[:, 1] > .3).long().tolist()
    z = (x - x[:40].mean(0)).numpy()
    targets = np.eye(2)[labels[:40]]
    gram = z[:40].T @ z[:40]
    weight = np.linalg.solve(gram + .01 * np.trace(gram) / 5 * np.eye(5), z[:40].T @ targets)
    right = (z[40:] @ weight + targets.mean(0)).argmax(1) == labels[40:]
    x = scale * x + shift
    accuracy = metrics.linear_probe(x[:40], labels[:40], x[40:], labels[40:])
    assert accuracy == pytest.approx(100 * right.mean()) and accuracy > 70
