"""The metrics of evaluate.py: golden values, and definitions written out a second time."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import evaluate


def normal(rows, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator, dtype=torch.float64)


# ---- golden values: the same numbers as in earlier editions


def test_golden_values():
    i = torch.arange(40, dtype=torch.float64)[:, None]
    j = torch.arange(6, dtype=torch.float64)
    en = torch.sin(1 + i * j + i / 10) + .3
    de = torch.sin(1 + i * j + i / 10 + .4 * torch.cos(5 * i + j)) + .3
    assert evaluate.geometry({"en": en, "de": de}) == pytest.approx({
        "rankme": 5.743845505656257, "rankme_share": 95.73075842760427,
        "uniformity": -2.303116693658147, "std": 0.9024511198001693, "norm": 1.8105284321180952,
        "cosine/same": 0.14992366497392112, "cosine/translations": 0.9537474580882004,
        "cosine/translations/de-en": 0.9537474580882004, "cosine/different": 0.1507652688947388,
        "cosine/different/de-en": 0.1507652688947388}, rel=1e-12)
    texts = list(map(str, range(40)))
    hard = [(f"altered {row}", 2 * row, "ab"[row % 2]) for row in range(20)]
    assert evaluate.xsim(de, en) == 22.5 and evaluate.xsim(de, en, k=1) == 35
    assert evaluate.retrieval({"en": en, "de": de}, {"en": texts}, en[::2] + .1, hard) == {
        "xsim": 22.5, "xsim/de-en": 22.5, "xsim++": 40.0, "xsim++/de-en": 40.0,
        "xsim++/a": 12.5, "xsim++/b": 5.0, "xsim++/misaligned": 22.5}


# ---- retrieval


def slow_margin_search(x, y, k=4):
    similarity = (F.normalize(x) @ F.normalize(y).T).tolist()
    forward = [sum(sorted(row)[-k:]) / k for row in similarity]
    backward = [sum(sorted(column)[-k:]) / k for column in zip(*similarity)]
    best = []
    for i, row in enumerate(similarity):
        near = sorted(range(len(y)), key=lambda j: -row[j])[:k]
        best.append(max(near, key=lambda j: row[j] / (.5 * (forward[i] + backward[j]))))
    return best


def test_margin_search_is_its_definition_in_both_directions():
    x = normal(40, 6) + .5
    y = x + normal(40, 6, 1)
    y = torch.cat([y[:33], 2 * y[33:] + y[:7]])
    best = slow_margin_search(x, y)
    assert evaluate.margin_search(x, y).tolist() == best
    assert evaluate.margin_search(y, x).tolist() == slow_margin_search(y, x)
    assert evaluate.xsim(x, y) == 100 * np.mean([i != j for i, j in enumerate(best)])


@pytest.mark.parametrize("spread", [1, 1e-3, 1e-6, 1e-9])
def test_knn_is_the_search_in_float64_also_where_float32_is_too_coarse(spread):
    y = normal(1, 40) + spread * normal(700, 40, 1)
    x = normal(1, 40) + spread * normal(90, 40, 2)
    cosines = F.normalize(x) @ F.normalize(y).T
    # A stable sort keeps the first of equal ones first.
    wanted = cosines.round(decimals=9).sort(dim=1, descending=True, stable=True)
    neighbors = evaluate.knn(x, y, 5)
    assert torch.equal(neighbors.indices, wanted.indices[:, :5])
    assert torch.equal(neighbors.cosines, wanted.values[:, :5])


@pytest.mark.parametrize("width", [3, 7, 32, 129])
def test_equal_embeddings_have_equal_cosines_and_the_first_is_taken(width):
    """The last bits of a cosine depend on its position in the matrix product."""
    y = normal(53, width)
    both = torch.cat([y] * 5)  # five of each, more than k = 4
    neighbors = evaluate.knn(y + .3 * normal(53, width, 1), both, 6)
    assert torch.equal(neighbors.cosines[:, 0], neighbors.cosines[:, 4])
    first = neighbors.indices[:, :1]
    assert torch.equal(neighbors.indices[:, :5], first + 53 * torch.arange(5)) and first.max() < 53
    assert evaluate.margin_search(y, both).tolist() == list(range(53))
    one = torch.ones(60, width) / 7
    assert evaluate.margin_search(one, 3 * one).eq(0).all()  # collapsed


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_embeddings_that_are_not_finite_are_not_ranked(bad):
    x = normal(6, 4)
    with pytest.raises(ValueError, match="finite"):
        evaluate.xsim(x, x.index_fill(0, torch.tensor([2]), bad))


@pytest.mark.parametrize("text, source, texts, error", [
    ("not a", 0, "abcdefgh", "number"), ("not h", 7, "abcdefgh", "misaligned"),
    ("not h", 7, "abcdefga", "number"), ("a", 7, "abcdefgh", None)])
def test_xsim_plus_blames_the_altered_sentence_that_is_retrieved(text, source, texts, error):
    """Row 0 retrieves an altered copy of its text, of another, of an equal one; or its own text."""
    y = torch.eye(8)
    y[0, 7] = 2
    scores = evaluate.xsim_plus(torch.eye(8), y, torch.eye(8)[:1], [(text, source, "number")],
                                texts)
    assert scores.pop("xsim++") == sum(scores.values()) == (12.5 if error else 0)
    assert not error or scores[f"xsim++/{error}"] == 12.5


# ---- geometry


def test_rankme_is_exp_of_the_entropy_of_the_singular_values():
    z = (normal(90, 20) * torch.linspace(.1, 2, 20) + 1).numpy()
    s = np.linalg.svd(z, compute_uv=False)
    p = s / s.sum() + 1e-7
    assert evaluate.rankme(z) == pytest.approx(np.exp(-(p * np.log(p)).sum()))
    assert evaluate.rankme(torch.linalg.qr(normal(32, 32)).Q) == pytest.approx(32, rel=1e-4)
    assert (evaluate.spectrum(torch.eye(32), center=True) > 0).sum() == 31
    point = torch.full((50, 8), .1) * (1 + 1e-8 * torch.randn(50, 8))
    assert evaluate.rankme(point) == pytest.approx(1, abs=1e-3)
    assert evaluate.spectrum(point, center=True).max() == 0


@pytest.mark.parametrize("z, wanted", [
    (torch.ones(10, 3), 0), (torch.tensor([[2., 0], [-.5, 0]]), -8),
    # Rows of zeros are one point, at a right angle to all others.
    (torch.zeros(9, 4), 0),
    (torch.cat([torch.zeros(3, 4), torch.eye(4)[:1]]), math.log((1 + math.exp(-4)) / 2)),
    (normal(1500, 4), None)])  # more than one block
def test_uniformity(z, wanted):
    if wanted is None:
        distances = torch.pdist(F.normalize(z))
        wanted = distances.square().mul(-2).exp().mean().log().item()  # [Wang & Isola 2020]
    assert evaluate.uniformity(z) == pytest.approx(wanted, abs=1e-9)


NOISE = normal(400, 64)
ONES = torch.ones(64)


@pytest.mark.parametrize("x, y, verdict", [
    (NOISE, NOISE + .2 * normal(400, 64, 1), "ok"),
    (ONES + 1e-3 * NOISE, None, "COLLAPSING"),
    (torch.zeros(400, 64), torch.zeros(400, 64), "COLLAPSING"),
    (3 * ONES + NOISE, None, "half-collapsed (all embeddings share one direction)"),
    (NOISE[:, :1] * ONES, None, "half-collapsed (low effective rank)"),
    (NOISE, NOISE.roll(1, 0) - .5 * NOISE, "translations are less similar than unrelated sentences")
])
def test_the_health_line_names_what_is_wrong(x, y, verdict):
    scores = evaluate.geometry({"x": x} if y is None else {"x": x, "y": y})
    for results in (scores, {f"geometry/{name}": value for name, value in scores.items()}):
        line = evaluate.diagnose(results)
        assert line.startswith("health: RankMe ") and line.endswith(f"-> {verdict}")
        assert "\n" not in line and ("cos(pos)" in line) == (y is not None)
    # An objective of one view never saw translations.
    one_view = evaluate.diagnose(scores, views=1)
    assert one_view.endswith("-> ok" if "translations" in verdict else f"-> {verdict}")
    assert "cos(pos)" not in one_view


# ---- the probe


@pytest.mark.parametrize("scale, shift", [(1, 0), (1e-3, 7), (1e6, 0)])
def test_the_linear_probe_is_ridge_regression_at_any_scale(scale, shift):
    x = normal(60, 5).numpy()
    labels = [int(row) for row in (x[:, 0] + .8 * x[:, 1] > .3)]
    z = x[:40] - x[:40].mean(0)
    targets = np.eye(2)[labels[:40]]
    ridge = .01 * np.mean((z ** 2).sum(0)) * np.eye(5)
    scores = (x[40:] - x[:40].mean(0)) @ np.linalg.solve(z.T @ z + ridge, z.T @ targets)
    wanted = 100 * np.mean((scores + targets.mean(0)).argmax(1) == labels[40:])
    x = scale * torch.tensor(x) + shift
    accuracy = evaluate.linear_probe(x[:40], labels[:40], x[40:], labels[40:])
    assert accuracy == pytest.approx(wanted) and wanted > 70


@pytest.mark.parametrize("a, b, wanted", [
    ([1, 2, 3, 4], [10, 20, 30, 400], 1), ([1, 2, 3, 4], [4, 3, 2, 1], -1), ([1, 2], [5, 5], 0),
    ([1, 2, 2, 3], [1, 3, 2, 4], .9486832980505139),  # scipy.stats.spearmanr
    ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8], .19885368120992467)])
def test_rank_correlation(a, b, wanted):
    assert evaluate.rank_correlation(a, b) == pytest.approx(wanted)
