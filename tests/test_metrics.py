"""Retrieval, geometry and the probe: against definitions written out once more, in float64."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import evaluate


def noisy_pairs(count, width, noise, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator, dtype=torch.float64) + .5
    return x, x + noise * torch.randn(x.shape, generator=generator, dtype=torch.float64)


def sphere(count, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator, dtype=torch.float64)


# ---- oracle: the definitions once more, one pair at a time


def cosine(a, b):
    return sum(a * b) / math.sqrt(sum(a * a) * sum(b * b))


def plain_mine(x, y, k=4):
    cosines = [[cosine(a, b) for b in y] for a in x]
    forward = [sum(sorted(row)[-k:]) / k for row in cosines]
    backward = [sum(sorted(column)[-k:]) / k for column in zip(*cosines)]
    found = []
    for i, row in enumerate(cosines):
        near = sorted(range(len(y)), key=lambda j: -row[j])[:k]
        found.append(max(near, key=lambda j: row[j] / (.5 * (forward[i] + backward[j]))))
    return found


# ---- xsim


@pytest.mark.parametrize("noise", [.5, 1, 2])
def test_mining_is_the_plain_definition_both_ways(noise):
    x, y = noisy_pairs(40, 6, noise)
    y = torch.cat([y[:33], 2 * y[33:] + y[:7]])
    found = plain_mine(x, y)
    assert evaluate.mine(x, y).tolist() == found
    assert evaluate.mine(y, x).tolist() == plain_mine(y, x)
    wrong = [i != j for i, j in enumerate(found)]
    assert evaluate.xsim(x, y) == pytest.approx(100 * np.mean(wrong))


def test_equal_vectors_are_equally_near_and_the_first_is_taken():
    """The last bits of a cosine depend on where in a product it is computed."""
    for width in (3, 7, 32, 129):
        y = sphere(53, width)
        both = torch.cat([y] * 5)  # five of each, more than k = 4
        found = evaluate.search(y + .3 * sphere(53, width, 1), both, 6)
        assert torch.equal(found.cosines[:, 0], found.cosines[:, 4])
        assert found.indices[:, :5].sub(found.indices[:, :1]).eq(53 * torch.arange(5)).all()
        assert found.indices[:, 0].max() < 53
        assert evaluate.mine(y, both).tolist() == list(range(53))
    one = torch.ones(300, 7) / 7
    assert evaluate.mine(one, 3 * one).eq(0).all()  # collapsed: nobody has its own


@pytest.mark.parametrize("spread", [1, 1e-3, 1e-6, 1e-9])
def test_a_search_finds_what_float64_finds_where_float32_cannot_tell(spread):
    y = sphere(1, 40) + spread * sphere(700, 40, 1)
    x = sphere(1, 40) + spread * sphere(90, 40, 2)
    cosines = F.normalize(x.double()) @ F.normalize(y.double()).T
    # A stable sort: of equal ones the first.
    wanted = cosines.round(decimals=9).sort(dim=1, descending=True, stable=True)
    found = evaluate.search(x, y, 5)
    assert torch.equal(found.indices, wanted.indices[:, :5])
    assert torch.equal(found.cosines, wanted.values[:, :5])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_vectors_that_are_not_finite_are_refused_and_not_ranked(bad):
    x = torch.randn(6, 4)
    with pytest.raises(ValueError, match="finite"):
        evaluate.xsim(x, x.index_fill(0, torch.tensor([2]), bad))


# ---- xsim++


def test_xsim_plus_is_the_plain_definition():
    x, y = noisy_pairs(30, 8, 1.2)
    sources = torch.randint(30, (45,)).tolist()
    negatives = y[sources] + .9 * sphere(45, 8, 5)
    hard = [(f"altered {row}", source, ("number", "tense")[row % 2])
            for row, source in enumerate(sources)]
    wanted = {"number": 0, "tense": 0, "misaligned": 0}
    for i, j in enumerate(plain_mine(x, torch.cat([y, negatives]))):
        if j >= 30 and sources[j - 30] == i:
            wanted[hard[j - 30][2]] += 1
        elif j != i:
            wanted["misaligned"] += 1
    assert min(wanted.values()) > 0  # the example covers every case
    found = evaluate.xsim_plus(x, y, negatives, hard, list(map(str, range(30))))
    assert found.pop("xsim++") == pytest.approx(100 * sum(wanted.values()) / 30)
    counts = {f"xsim++/{name}": 100 * count / 30 for name, count in wanted.items()}
    assert found == pytest.approx(counts)


@pytest.mark.parametrize("text, source, texts, error", [
    ("not a", 0, "abcdefgh", "number"), ("not h", 7, "abcdefgh", "misaligned"),
    ("not h", 7, "abcdefga", "number"), ("a", 7, "abcdefgh", None)])
def test_a_negative_nearer_than_the_translation_is_blamed(text, source, texts, error):
    """Row 0 finds an altered copy of its own, of a stranger, of an equal text; or its own text."""
    y = torch.eye(8)
    y[0, 7] = 2
    found = evaluate.xsim_plus(torch.eye(8), y, torch.eye(8)[:1], [(text, source, "number")], texts)
    assert found.pop("xsim++") == sum(found.values()) == (12.5 if error else 0)
    assert not error or found[f"xsim++/{error}"] == 12.5


# ---- geometry


def test_an_orthonormal_frame_uses_every_direction_and_centring_takes_one_away():
    frame = torch.linalg.qr(sphere(32, 32)).Q
    assert evaluate.rankme(frame) == pytest.approx(32, rel=1e-4)
    assert (evaluate.spectrum(torch.eye(32), center=True) > 0).sum() == 31
    point = torch.full((50, 8), .1) * (1 + 1e-8 * torch.randn(50, 8))
    assert evaluate.rankme(point) == pytest.approx(1, abs=1e-3)
    assert evaluate.spectrum(point, center=True).max() == 0


def test_rankme_is_that_of_numpy():
    z = (sphere(90, 20) * torch.linspace(.1, 2, 20) + 1).numpy()
    s = np.linalg.svd(z, compute_uv=False)
    p = s / s.sum() + 1e-7
    assert evaluate.rankme(z) == pytest.approx(np.exp(-(p * np.log(p)).sum()))


def test_uniformity_has_its_known_values():
    assert evaluate.uniformity(torch.ones(10, 3)) == pytest.approx(0, abs=1e-9)
    assert evaluate.uniformity(torch.tensor([[2., 0], [-.5, 0]])) == pytest.approx(-8)
    assert evaluate.uniformity(sphere(1000, 512)) == pytest.approx(-4, abs=.02)
    z = sphere(1500, 4)  # more than a block
    distances = torch.pdist(evaluate.unit(z))
    wanted = distances.square().mul(-2).exp().mean().log()  # [Wang & Isola 2020], their code
    assert evaluate.uniformity(z) == pytest.approx(wanted.item())
    # Rows without a direction are one point, a right angle away from all others.
    some = torch.cat([torch.zeros(3, 4), torch.eye(4)[:1]])
    assert evaluate.uniformity(torch.zeros(9, 4)) == pytest.approx(0, abs=1e-9)
    assert evaluate.uniformity(some) == pytest.approx(math.log((1 + math.exp(-4)) / 2))


def test_std_and_random_cosine_see_a_single_direction():
    point = torch.ones(40, 6)
    assert evaluate.std(point) == pytest.approx(0, abs=1e-6)
    assert evaluate.random_cosine(point, point) == pytest.approx(1)
    z = sphere(30, 5).numpy()
    for other in (z, z[::-1].copy()):
        cosines = [cosine(z[i], other[j]) for i in range(30) for j in range(30) if i != j]
        assert evaluate.random_cosine(z, other) == pytest.approx(np.mean(cosines))


def test_the_cosines_of_known_vectors():
    en = torch.eye(3)
    vectors = {"en": en, "de": en.roll(1, 0), "fr": torch.ones(3, 3)}  # de: 2 0 1
    found = evaluate.geometry(vectors)
    assert found["cosine/translations/de-en"] == 0
    assert found["cosine/different/de-en"] == pytest.approx(1 / 2)
    assert found["cosine/translations/fr-en"] == pytest.approx(3 ** -.5)
    assert found["cosine/same"] == pytest.approx(1 / 3)
    assert found["cosine/different"] == pytest.approx((.5 + 3 ** -.5) / 2)
    assert "cosine/different" not in evaluate.geometry({"en": en})


NOISE = sphere(400, 64)
COMMON = torch.ones(64)


@pytest.mark.parametrize("x, y, verdict", [
    (NOISE, NOISE + .2 * sphere(400, 64, 1), "ok"),
    (COMMON + 1e-3 * NOISE, None, "COLLAPSING"),
    (torch.ones(400, 64), torch.ones(400, 64), "COLLAPSING"),
    (torch.zeros(400, 64), torch.zeros(400, 64),
     "COLLAPSING, 100 % of the vectors are zero"),
    (NOISE * (torch.arange(400) > 39)[:, None], None, "ok, 10 % of the vectors are zero"),
    (3 * COMMON + NOISE, None, "half-collapsed (all vectors share one direction)"),
    (NOISE[:, :1] * COMMON, None, "half-collapsed (few directions in use)"),
    (NOISE, NOISE.roll(1, 0) - .5 * NOISE, "translations less alike than strangers"),
])
def test_health_names_what_is_wrong(x, y, verdict):
    vectors = {"x": x} if y is None else {"x": x, "y": y}
    scores = evaluate.geometry(vectors)
    for results in (scores, {f"geometry/{name}": value for name, value in scores.items()}):
        line = evaluate.diagnose(results)
        assert line.startswith("health: RankMe ") and line.endswith(f"-> {verdict}")
        assert "\n" not in line and ("cos(pos)" in line) == (y is not None)
    one_view = evaluate.diagnose(scores, views=1)  # nobody asked for translations
    assert "cos(pos)" not in one_view
    assert one_view.endswith("-> ok" if "strangers" in verdict else f"-> {verdict}")


# ---- the probe


@pytest.mark.parametrize("scale, shift", [(1, 0), (1e-3, 7), (1e6, 0)])
def test_a_linear_probe_is_ridge_regression_whatever_the_scale(scale, shift):
    x = sphere(60, 5).numpy()
    labels = [int(row) for row in (x[:, 0] + .8 * x[:, 1] > .3)]
    z = x[:40] - x[:40].mean(0)
    targets = np.eye(2)[labels[:40]]
    ridge = .01 * np.mean((z ** 2).sum(0)) * np.eye(5)
    scores = (x[40:] - x[:40].mean(0)) @ np.linalg.solve(z.T @ z + ridge, z.T @ targets)
    wanted = 100 * np.mean((scores + targets.mean(0)).argmax(1) == labels[40:])
    x = scale * torch.tensor(x) + shift
    found = evaluate.linear_probe(x[:40], labels[:40], x[40:], labels[40:])
    assert found == pytest.approx(wanted) and wanted > 70


@pytest.mark.parametrize("a, b, wanted", [
    ([1, 2, 3, 4], [10, 20, 30, 400], 1), ([1, 2, 3, 4], [4, 3, 2, 1], -1), ([1, 2], [5, 5], 0),
    ([1, 2, 2, 3], [1, 3, 2, 4], .9486832980505139),  # scipy.stats.spearmanr
    ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8], .19885368120992467),
])
def test_rank_correlation_has_its_known_values(a, b, wanted):
    assert evaluate.rank_correlation(a, b) == pytest.approx(wanted)
