"""Retrieval, geometry and the probe: against definitions written out once more, in float64."""

import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import evaluate

ROOT = Path(__file__).parent.parent


def noisy_pairs(count, width, noise, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, width)) + .5
    return x, x + noise * rng.normal(size=x.shape), rng


def sphere(count, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator, dtype=torch.float64)


# ---- oracle: the definitions once more, one pair at a time


def cosine(a, b):
    return sum(a * b) / math.sqrt(sum(a * a) * sum(b * b))


def plain_mine(x, y, margin, k):
    cosines = [[cosine(a, b) for b in y] for a in x]
    if margin == "absolute":
        return [max(range(len(y)), key=lambda j: row[j]) for row in cosines]
    forward = [sum(sorted(row)[-k:]) / k for row in cosines]
    backward = [sum(sorted(column)[-k:]) / k for column in zip(*cosines)]
    found = []
    for i, row in enumerate(cosines):
        scores = {}
        for j in sorted(range(len(y)), key=lambda j: -row[j])[:k]:
            middle = .5 * (forward[i] + backward[j])
            scores[j] = row[j] / middle if margin == "ratio" else row[j] - middle
        found.append(max(scores, key=scores.get))
    return found


# ---- xsim


FIVE = [[.48, 0, .6, .64, 0],  # its translation, y_0, is not among its two nearest: always wrong
        [.8, .6, 0, 0, 0],     # y_0: .8 / .67 = 1.194, .8 - .67 = .13; y_1: .6 / .5 = 1.2, .1
        [0, 0, .8, .6, 0],     # y_2: .8 / .7 and .8 - .7; y_3: .6 / .8 and .6 - .8
        [0, 0, 0, 1, 0],       # y_3: 1 / .7
        [0, 0, 0, .8, .6]]     # y_3, a hub: .8 / .8 = 1, .8 - .8 = 0; y_4: .6 / .5 = 1.2, .1


@pytest.mark.parametrize("margin, wrong", [("ratio", 1), ("distance", 2), ("absolute", 3)])
def test_xsim_of_five_points_is_what_it_is_by_hand(margin, wrong):
    assert evaluate.xsim(torch.tensor(FIVE), torch.eye(5), margin, k=2) == pytest.approx(20 * wrong)


@pytest.mark.parametrize("margin", evaluate.MARGINS)
@pytest.mark.parametrize("noise", [.5, 1, 2])
def test_xsim_is_the_plain_definition(margin, noise):
    x, y, _ = noisy_pairs(40, 6, noise)
    found = plain_mine(x, y, margin, 4)
    assert evaluate.mine(torch.tensor(x), torch.tensor(y), margin).tolist() == found
    wrong = [i != j for i, j in enumerate(found)]
    assert evaluate.xsim(x, y, margin) == pytest.approx(100 * np.mean(wrong))


@pytest.mark.parametrize("margin", evaluate.MARGINS)
def test_xsim_does_not_depend_on_the_scale_of_any_vector(margin):
    x, y, rng = noisy_pairs(60, 8, 1)
    scaled = [z * rng.uniform(.01, 100, (60, 1)) for z in (x, y)]
    assert evaluate.xsim(*scaled, margin) == evaluate.xsim(x, y, margin) > 0


@pytest.mark.parametrize("margin", evaluate.MARGINS)
def test_identical_sets_have_no_error_and_unrelated_ones_almost_all(margin):
    x = sphere(500, 32)
    assert evaluate.xsim(x, x, margin) == 0 and evaluate.top1(x, x) == 100
    chance = 100 * (1 - 1 / 500)
    assert evaluate.xsim(x, sphere(500, 32, 1), margin) == pytest.approx(chance, abs=.8)


def test_a_collapsed_encoder_cannot_pass_for_a_perfect_one():
    assert evaluate.xsim(torch.ones(100, 8), torch.ones(100, 8)) >= 99


def test_another_row_with_the_same_text_is_right_by_text_and_wrong_by_index():
    x, y, _ = noisy_pairs(50, 6, 1)
    texts = [f"sentence {row % 20}" for row in range(50)]
    assert evaluate.xsim(x, y, texts=texts) < evaluate.xsim(x, y)
    assert evaluate.xsim(x, y, texts=[str(row) for row in range(50)]) == evaluate.xsim(x, y)


@pytest.mark.parametrize("block", [1, 4, 5, 36, 37])
def test_a_search_in_blocks_is_the_search_and_serves_both_directions(block):
    x, y, _ = noisy_pairs(37, 5, 1)
    y = y[:21]
    cosines = torch.tensor([[cosine(a, b) for b in y] for a in x])
    for found, whole in zip(evaluate.search(x, y, 6, 5, block=block), (cosines, cosines.T)):
        wanted = whole.topk(found.cosines.shape[1])
        assert torch.equal(found.indices, wanted.indices)
        assert torch.allclose(found.cosines, wanted.values)


@pytest.mark.parametrize("margin", evaluate.MARGINS)
def test_mining_both_ways_is_mining_each_way(margin):
    x, y, _ = noisy_pairs(33, 6, 1)
    (_, there), (_, back) = evaluate.mine_both(x, y[:21], margin)
    assert there.tolist() == plain_mine(x, y[:21], margin, 4)
    assert back.tolist() == plain_mine(y[:21], x, margin, 4)


def test_all_errors_of_one_search_are_those_of_each_margin_alone():
    x, y, _ = noisy_pairs(50, 6, 1)
    texts = [f"sentence {row % 40}" for row in range(50)]
    wanted = {margin: evaluate.xsim(x, y, margin, texts=texts) for margin in evaluate.MARGINS}
    wanted |= {"top1": evaluate.top1(x, y), "top1_back": evaluate.top1(y, x)}
    assert evaluate.xsim_all(x, y, texts=texts) == wanted


def test_vectors_of_any_float_type_and_on_disk_are_read_a_block_at_a_time(tmp_path):
    x, y, _ = noisy_pairs(50, 6, 1)
    small = y.astype(np.float16)
    np.save(tmp_path / "y.npy", small)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_disk = np.load(tmp_path / "y.npy", mmap_mode="r")
        found, _ = evaluate.search(x.astype(np.float32), on_disk, 3, block=7)
    wanted, _ = evaluate.search(x.astype(np.float32), torch.tensor(small), 3)
    assert torch.equal(found.indices, wanted.indices) and found.cosines.dtype == torch.float64
    assert torch.allclose(found.cosines, wanted.cosines, atol=1e-14)


MEMORY = """
import resource, sys, numpy, torch, evaluate
torch.set_num_threads(1)
unit = 2 ** 20 if sys.platform == "darwin" else 2 ** 10
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit  # MB
generator = numpy.random.default_rng(0)
y = generator.standard_normal((1_000_000, 16), dtype=numpy.float32)
x = y[::10_000] * 2
evaluate.search(x, y[:5000], 4)
before = peak()
found = evaluate.search(x, y, 4)[0].indices[:, 0]
print(peak() - before, found.tolist() == list(range(0, 1_000_000, 10_000)))
"""


def test_a_million_targets_take_no_more_memory_than_some_blocks():
    """A float64 copy of these targets has 128 MB."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, cwd=ROOT,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    grown, right = done.stdout.split()
    assert right == "True" and float(grown) < 60


@pytest.mark.parametrize("call, message", [
    (lambda x: evaluate.xsim(x, x[:5]), r"\(6, 4\) and y \(5, 4\)"),
    (lambda x: evaluate.xsim(x, x[:, :3]), r"\(6, 3\)"),
    (lambda x: evaluate.xsim(x, x[0]), r"\(4,\)"),
    (lambda x: evaluate.xsim(x[:0], x[:0]), "N > 0"),
    (lambda x: evaluate.xsim(x, x.index_fill(0, torch.tensor([2]), math.nan)), "NaN"),
    (lambda x: evaluate.xsim(x, x, "cosine"), "margin 'cosine'"),
    (lambda x: evaluate.search(x, x, 7), r"k must be 1\.\.6"),
    (lambda x: evaluate.search(x, x[:, :3], 1), "widths"),
    (lambda x: evaluate.unit(x[0]), r"\(4,\)"),
])
def test_bad_vectors_are_refused_and_not_ranked(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(6, 4))


# ---- xsim++


@pytest.mark.parametrize("margin", evaluate.MARGINS)
def test_xsim_plus_is_the_plain_definition(margin):
    x, y, rng = noisy_pairs(30, 8, 1.2)
    sources = rng.integers(0, 30, 45)
    negatives = y[sources] + .9 * rng.normal(size=(45, 8))
    types = [("number", "tense", "role")[row % 3] for row in range(45)]
    wanted = {"number": 0, "tense": 0, "role": 0, "misaligned": 0}
    for i, j in enumerate(plain_mine(x, np.concatenate([y, negatives]), margin, 4)):
        if j >= 30 and sources[j - 30] == i:
            wanted[types[j - 30]] += 1
        elif j != i:
            wanted["misaligned"] += 1
    assert min(wanted.values()) > 0                          # the example covers every case
    found = evaluate.xsim_plus(x, y, negatives, sources, types, margin)
    assert found.pop("xsim++") == pytest.approx(100 * sum(wanted.values()) / 30)
    assert found == pytest.approx({name: 100 * count / 30 for name, count in wanted.items()})


def test_xsim_plus_without_negatives_is_xsim():
    x, y, _ = noisy_pairs(50, 6, 1)
    found = evaluate.xsim_plus(x, y, y[:0], [], [])
    assert found == {"xsim++": evaluate.xsim(x, y), "misaligned": evaluate.xsim(x, y)}


def test_a_negative_nearer_than_the_translation_is_blamed():
    x = np.eye(4) + .1
    for source, number, misaligned in ((0, 25, 0), (3, 0, 25)):
        found = evaluate.xsim_plus(x, np.eye(4), x[:1], [source], ["number"], "absolute")
        assert found == {"xsim++": 25, "number": number, "misaligned": misaligned}
    texts = ["a", "b", "c", "a", "not a"]                    # rows 0 and 3 have one text
    found = evaluate.xsim_plus(x, np.eye(4), x[:1], [3], ["number"], "absolute", texts=texts)
    assert found["number"] == 25


# ---- geometry


def test_an_orthonormal_frame_uses_every_direction_and_centring_takes_one_away():
    frame = torch.linalg.qr(sphere(32, 32)).Q
    assert evaluate.rankme(frame) == pytest.approx(32, rel=1e-4)
    assert evaluate.rankme(torch.eye(32), center=True, epsilon=0) == pytest.approx(31)


def test_vectors_on_a_line_and_one_point_have_rank_one():
    line = torch.linspace(-1, 3, 50)[:, None] * torch.arange(1., 9)
    point = torch.full((50, 8), .1) * (1 + 1e-8 * torch.randn(50, 8))
    for z in (line, point):
        assert evaluate.rankme(z) == pytest.approx(1, abs=1e-3)
    assert evaluate.spectrum(point, center=True).max() == 0


@pytest.mark.parametrize("normalize, epsilon", [(False, 1e-7), (True, 1e-10)])
def test_rankme_is_that_of_numpy(normalize, epsilon):
    z = (sphere(90, 20) * torch.linspace(.1, 2, 20) + 1).numpy()
    scaled = z / np.linalg.norm(z, axis=1, keepdims=True) if normalize else z
    s = np.linalg.svd(scaled, compute_uv=False)
    p = s / s.sum() + epsilon
    wanted = np.exp(-(p * np.log(p)).sum())
    assert evaluate.rankme(z, normalize=normalize, epsilon=epsilon) == pytest.approx(wanted)


def test_an_isotropic_cloud_is_healthy():
    z = sphere(4000, 16)
    assert evaluate.rankme(z) > 15.9 and evaluate.std(z) == pytest.approx(1, abs=.01)
    assert abs(evaluate.random_cosine(z)) < .01


def test_uniformity_has_its_known_values():
    assert evaluate.uniformity(torch.ones(10, 3)) == pytest.approx(0, abs=1e-9)
    assert evaluate.uniformity(torch.tensor([[2., 0], [-.5, 0]])) == pytest.approx(-8)
    assert evaluate.uniformity(sphere(1000, 512)) == pytest.approx(-4, abs=.02)
    z = sphere(1500, 4)                                      # more than a block
    distances = torch.pdist(evaluate.unit(z))
    wanted = distances.square().mul(-3).exp().mean().log()   # [Wang & Isola 2020], their code
    assert evaluate.uniformity(z, t=3) == pytest.approx(wanted.item())


def test_alignment_is_a_power_of_the_distance_of_unit_vectors():
    x = torch.tensor([[3., 0], [0, 2]])
    y = torch.tensor([[0, 5.], [0, 1]])
    assert evaluate.alignment(x, y) == pytest.approx((2 + 0) / 2)
    assert evaluate.alignment(x, y, power=4) == pytest.approx((4 + 0) / 2)
    assert evaluate.alignment(x, -7 * x) == pytest.approx(4)


def test_std_and_random_cosine_see_a_single_direction():
    point = torch.ones(40, 6)
    assert evaluate.std(point) == pytest.approx(0, abs=1e-6)
    assert evaluate.random_cosine(point) == pytest.approx(1)
    z = sphere(30, 5).numpy()
    for other in (z, z[::-1].copy()):
        cosines = [cosine(z[i], other[j]) for i in range(30) for j in range(30) if i != j]
        assert evaluate.random_cosine(z, other) == pytest.approx(np.mean(cosines))


def test_the_cosine_table_of_known_vectors():
    en = torch.eye(3)
    vectors = {"en": en, "de": en.roll(1, 0), "fr": torch.ones(3, 3)}  # de: 2 0 1
    table = evaluate.cosine_table(vectors)
    assert table["same/de-en"] == table["translations/de-en"] == 0
    assert table["different/de-en"] == pytest.approx(1 / 2)
    assert table["same/fr-en"] == pytest.approx(.5)
    assert table["translations/fr-en"] == pytest.approx(3 ** -.5)
    assert table["same"] == pytest.approx(1 / 3)
    assert table["different"] == pytest.approx((.5 + 3 ** -.5) / 2)
    assert set(evaluate.cosine_table({"en": en})) == {"same"}


NOISE = sphere(400, 64)
COMMON = torch.ones(64)


@pytest.mark.parametrize("x, y, verdict", [
    (NOISE, NOISE + .2 * sphere(400, 64, 1), "ok"),
    (COMMON + 1e-3 * NOISE, None, "COLLAPSING"),
    (torch.ones(400, 64), torch.ones(400, 64), "COLLAPSING"),
    (3 * COMMON + NOISE, None, "half-collapsed (all vectors share one direction)"),
    (NOISE[:, :1] * COMMON, None, "half-collapsed (few directions in use)"),
    (NOISE, NOISE.roll(1, 0) - .5 * NOISE, "translations less alike than strangers"),
])
def test_health_names_what_is_wrong(x, y, verdict):
    vectors = {"x": x} if y is None else {"x": x, "y": y}
    scores = evaluate.geometry(vectors)
    for results in (scores, {f"geometry/{name}": value for name, value in scores.items()}):
        measures, line = evaluate.diagnose(results)
        assert measures["verdict"] == verdict and line.endswith(f"-> {verdict}")
        assert line.startswith("health: RankMe ") and "\n" not in line
        assert ("cos(pos)" in line) == (y is not None)
    if "strangers" in verdict:                               # nobody asked for translations
        assert evaluate.diagnose(scores, views=1)[0]["verdict"] == "ok"
        assert "cos(pos)" not in evaluate.diagnose(scores, views=1)[1]


# ---- the probe


def test_a_linear_probe_finds_what_is_linear_and_nothing_else():
    z = sphere(400, 6)
    halves = (z[::2], z[1::2])
    names = np.array(["past", "future", "present"])
    for rule, least, most in ((z[:, :3].argmax(1), 90, 100), (torch.randint(3, (400,)), 20, 47)):
        labels = names[rule.numpy()].tolist()
        found = [evaluate.linear_probe(scale * halves[0] + shift, labels[::2],
                                       scale * halves[1] + shift, labels[1::2])
                 for scale, shift in ((1, 0), (1e-3, 7), (1e6, 0))]
        assert least <= found[0] <= most and found == pytest.approx([found[0]] * 3)


def test_a_linear_probe_is_ridge_regression():
    x = sphere(60, 5).numpy()
    labels = [int(row) for row in (x[:, 0] + .8 * x[:, 1] > .3)]
    z = x[:40] - x[:40].mean(0)
    targets = np.eye(2)[labels[:40]]
    ridge = .01 * np.mean((z ** 2).sum(0)) * np.eye(5)
    scores = (x[40:] - x[:40].mean(0)) @ np.linalg.solve(z.T @ z + ridge, z.T @ targets)
    wanted = 100 * np.mean((scores + targets.mean(0)).argmax(1) == labels[40:])
    x = torch.tensor(x)
    found = evaluate.linear_probe(x[:40], labels[:40], x[40:], labels[40:])
    assert found == pytest.approx(wanted)


def test_one_point_gives_the_most_frequent_class_and_an_unknown_class_is_wrong():
    labels = ["a", "b", "b", True]
    assert evaluate.linear_probe(torch.ones(4, 3), labels, torch.ones(2, 3), ["b", "c"]) == 50


@pytest.mark.parametrize("a, b, wanted", [
    ([1, 2, 3, 4], [10, 20, 30, 400], 1), ([1, 2, 3, 4], [4, 3, 2, 1], -1), ([1, 2], [5, 5], 0),
    ([1, 2, 2, 3], [1, 3, 2, 4], .9486832980505139),         # scipy.stats.spearmanr
    ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8], .19885368120992467),
])
def test_rank_correlation_has_its_known_values(a, b, wanted):
    assert evaluate.rank_correlation(a, b) == pytest.approx(wanted)
