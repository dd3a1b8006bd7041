import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import metrics


def noisy_pairs(count, width, noise, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, width)) + .5
    return x, x + noise * rng.normal(size=x.shape), rng


# ---- oracle: the definitions once more, one pair at a time, in float64


def plain_mine(x, y, margin, k):
    def cosine(a, b):
        return sum(a * b) / math.sqrt(sum(a * a) * sum(b * b))

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


FIVE = [[.48, 0, .6, .64, 0],   # its translation, y_0, is not among its two nearest: wrong by every margin
        [.8, .6, 0, 0, 0],      # y_0: .8 / .67 = 1.194 and .8 - .67 = .13;  y_1: .6 / .5 = 1.2 and .6 - .5 = .1
        [0, 0, .8, .6, 0],      # y_2: .8 / .7 and .8 - .7;  y_3: .6 / .8 and .6 - .8
        [0, 0, 0, 1, 0],        # y_3: 1 / .7
        [0, 0, 0, .8, .6]]      # y_3, a hub: .8 / .8 = 1 and .8 - .8 = 0;  y_4: .6 / .5 = 1.2 and .6 - .5 = .1


@pytest.mark.parametrize("margin, wrong", [("ratio", 1), ("distance", 2), ("absolute", 3)])
def test_xsim_of_five_points_is_what_it_is_by_hand(margin, wrong):
    assert metrics.xsim(torch.tensor(FIVE), torch.eye(5), margin, k=2) == pytest.approx(20 * wrong)


@pytest.mark.parametrize("margin", metrics.MARGINS)
@pytest.mark.parametrize("noise", [.5, 1, 2])
def test_xsim_is_the_plain_definition(margin, noise):
    x, y, _ = noisy_pairs(40, 6, noise)
    found = plain_mine(x, y, margin, 4)
    assert metrics.mine(torch.tensor(x), torch.tensor(y), margin).tolist() == found
    assert metrics.xsim(x, y, margin) == pytest.approx(100 * np.mean([i != j for i, j in enumerate(found)]))


@pytest.mark.parametrize("margin", metrics.MARGINS)
def test_xsim_does_not_depend_on_the_scale_of_any_vector(margin):
    x, y, rng = noisy_pairs(60, 8, 1)
    scaled = metrics.xsim(x * rng.uniform(.01, 100, (60, 1)), y * rng.uniform(.01, 100, (60, 1)), margin)
    assert scaled == metrics.xsim(x, y, margin) > 0


@pytest.mark.parametrize("margin", metrics.MARGINS)
def test_identical_sets_have_no_error_and_unrelated_ones_almost_all(margin):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(500, 32, generator=generator), torch.randn(500, 32, generator=generator)
    assert metrics.xsim(x, x, margin) == 0
    assert metrics.xsim(x, y, margin) == pytest.approx(100 * (1 - 1 / 500), abs=.8)
    assert metrics.top1(x, x) == 100


def test_a_collapsed_encoder_cannot_pass_for_a_perfect_one():
    assert metrics.xsim(torch.ones(100, 8), torch.ones(100, 8)) >= 99


def test_finding_another_row_with_the_same_text_is_right_by_text_and_wrong_by_index():
    x, y, _ = noisy_pairs(50, 6, 1)
    texts = [f"sentence {row % 20}" for row in range(50)]
    assert metrics.xsim(x, y, texts=texts) < metrics.xsim(x, y)
    assert metrics.xsim(x, y, texts=[str(row) for row in range(50)]) == metrics.xsim(x, y)


def test_neighbours_in_blocks_are_the_neighbours():
    x, y, _ = noisy_pairs(37, 5, 1)
    cosines, indices = metrics.neighbours(x, y, 6)
    for block in (1, 4, 5, 36, 37):
        again = metrics.neighbours(x, y, 6, block=block)
        assert torch.equal(again[1], indices) and torch.allclose(again[0], cosines)
    assert (cosines.diff(dim=1) <= 0).all()


def test_bad_vectors_are_refused_and_not_ranked():
    x = torch.randn(6, 4)
    for wrong in (x[:5], x[:, :3], x[0]):
        with pytest.raises(ValueError, match=r"\(6, 4\)|\(4,\)"):
            metrics.xsim(x, wrong)
    with pytest.raises(ValueError, match="1 of 6 vectors hold NaN"):
        metrics.xsim(x, x.clone().index_fill(0, torch.tensor([2]), math.nan))
    with pytest.raises(ValueError, match="margin 'cosine'"):
        metrics.xsim(x, x, "cosine")
    with pytest.raises(ValueError, match="k must be 1..6"):
        metrics.neighbours(x, x, 7)


@pytest.mark.parametrize("margin", metrics.MARGINS)
def test_one_search_serves_both_directions(margin):
    x, y, _ = noisy_pairs(33, 6, 1)
    y = y[:21]
    forward, backward = metrics.search(x, y, 3, 5, block=8)
    for found, wanted in ((forward, metrics.neighbours(x, y, 3)), (backward, metrics.neighbours(y, x, 5))):
        assert torch.equal(found[1], wanted[1]) and torch.allclose(found[0], wanted[0])
    (_, there), (_, back) = metrics.mine_both(x, y, margin, 4)
    assert there.tolist() == plain_mine(x, y, margin, 4) and back.tolist() == plain_mine(y, x, margin, 4)


def test_all_errors_of_one_search_are_those_of_each_margin_alone():
    x, y, _ = noisy_pairs(50, 6, 1)
    texts = [f"sentence {row % 40}" for row in range(50)]
    assert metrics.xsim_all(x, y, texts=texts) == {margin: metrics.xsim(x, y, margin, texts=texts) for margin in metrics.MARGINS} | {
        "top1": metrics.top1(x, y), "top1_back": metrics.top1(y, x)}


def test_vectors_of_any_float_type_and_on_disk_are_read_a_block_at_a_time(tmp_path):
    x, y, _ = noisy_pairs(50, 6, 1)
    small = y.astype(np.float16)
    np.save(tmp_path / "y.npy", small)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = metrics.neighbours(x.astype(np.float32), np.load(tmp_path / "y.npy", mmap_mode="r"), 3, block=7)
    wanted = metrics.neighbours(x.astype(np.float32), torch.tensor(small), 3)
    assert torch.equal(found[1], wanted[1]) and torch.allclose(found[0], wanted[0], atol=1e-14) and found[0].dtype == torch.float64
    y[40, 2] = math.inf
    with pytest.raises(ValueError, match="1 of 7 vectors hold NaN or infinity, from row 35 on"):
        metrics.neighbours(x, y, 3, block=7)


def test_a_million_targets_take_no_more_memory_than_some_blocks():
    """A float64 copy of these targets has 128 MB; of one process, the most that was ever in memory can only grow."""
    pytest.importorskip("resource")                                      # not on Windows
    code = """
import resource, sys, numpy, torch, metrics
torch.set_num_threads(1)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2 ** 20 if sys.platform == "darwin" else 2 ** 10)      # MB
generator = numpy.random.default_rng(0)
y = generator.standard_normal((1_000_000, 16), dtype=numpy.float32)
x = y[::10_000] * 2
metrics.neighbours(x, y[:5000], 4)
before = peak()
found = metrics.neighbours(x, y, 4)[1][:, 0]
print(peak() - before, found.tolist() == list(range(0, 1_000_000, 10_000)))
"""
    root = Path(metrics.__file__).parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, env=os.environ | {"OMP_NUM_THREADS": "1"})
    grown, right = done.stdout.split()
    assert right == "True" and float(grown) < 60, done.stderr


def test_the_matrix_is_xsim_in_every_direction():
    x, y, rng = noisy_pairs(40, 6, 1)
    vectors, texts = {"a": x, "b": y, "c": x + rng.normal(size=x.shape)}, {name: [f"{name} {row % 30}" for row in range(40)] for name in "abc"}
    found = metrics.xsim_matrix(vectors, texts=texts)
    assert found == {(a, b): metrics.xsim(vectors[a], vectors[b], texts=texts[b]) for a in "abc" for b in "abc" if a != b}
    assert found != metrics.xsim_matrix(vectors) and min(found.values()) > 0
    with pytest.raises(ValueError, match="must have the same shape"):
        metrics.xsim_matrix({"a": x, "b": y[:5]})


# ---- BUCC


PREDICTIONS = {"some wrong": [0, 0, 2, 2, 2, 5], "all right": [0, 1, 2, 3, 4, 5], "one for all": [3] * 6, "all wrong": [1, 2, 3, 4, 5, 0]}


@pytest.mark.parametrize("name, wanted", [*zip(PREDICTIONS, [100 * (2 / 3 + 2 / 4 + 1) / 6, 100, 100 * 2 / 7 / 6, 0])])
def test_buccs_f1_weights_every_row_of_y_as_a_class(name, wanted):
    assert metrics.bucc_f1(torch.eye(6)[PREDICTIONS[name]] + .1, torch.eye(6)) == pytest.approx(wanted)


def test_buccs_f1_of_given_rows_is_scikit_learns():
    score = pytest.importorskip("sklearn.metrics").f1_score
    rng = np.random.default_rng(0)
    for _ in range(20):
        found, wanted = rng.integers(8, size=30), rng.integers(8, size=30)
        assert metrics.bucc_f1(np.eye(8)[found], np.eye(8), wanted) == pytest.approx(100 * score(wanted, found, average="weighted", zero_division=0))


def test_buccs_f1_has_the_values_that_scikit_learn_gave():
    """sklearn.metrics.f1_score(wanted, found, average="weighted", zero_division=0) of version 1.9.1."""
    found, wanted = np.arange(30) ** 2 % 11 % 8, np.arange(30) * 3 % 8
    assert metrics.bucc_f1(np.eye(8)[found], np.eye(8), wanted) == pytest.approx(17.6931216931)
    with pytest.raises(ValueError, match="30 rows of x and 3 wanted"):
        metrics.bucc_f1(np.eye(8)[found], np.eye(8), [1, 2, 3])


def plain_margins(x, y, k):
    """Ratio margins of all pairs, from the definition."""
    cosines = np.array([[sum(a * b) / math.sqrt(sum(a * a) * sum(b * b)) for b in y] for a in x])
    forward, backward = np.sort(cosines, 1)[:, -k:].mean(1), np.sort(cosines, 0)[-k:].mean(0)
    return cosines, cosines / (.5 * (forward[:, None] + backward))


def plain_bitext(x, y, k):
    cosines, margins = plain_margins(x, y, k)
    candidates = []
    for i in range(len(x)):
        candidates.append(max((margins[i, j], i, j) for j in np.argsort(-cosines[i])[:k]))
    for j in range(len(y)):
        candidates.append(max((margins[i, j], i, j) for i in np.argsort(-cosines[:, j])[:k]))
    taken = []
    for score, i, j in sorted(candidates, reverse=True):
        if all(i != a and j != b for _, a, b in taken):
            taken.append((score, i, j))
    return taken


def test_bitext_takes_the_best_pairs_of_both_directions_and_each_row_once():
    x, y, rng = noisy_pairs(30, 5, 1)
    y = np.concatenate([y[10:], rng.normal(size=(8, 5))])
    wanted = plain_bitext(x, y, 4)
    sources, targets, scores = metrics.bitext(x, y)
    assert list(zip(sources.tolist(), targets.tolist())) == [(i, j) for _, i, j in wanted]
    assert scores.tolist() == pytest.approx([score for score, _, _ in wanted])
    assert len(set(sources.tolist())) == len(sources) and any(i != j + 10 for _, i, j in wanted)


def test_the_threshold_is_the_best_cut_of_all():
    rng = np.random.default_rng(1)
    for _ in range(50):
        scores = torch.tensor(sorted(rng.integers(8, size=12) / 4, reverse=True))
        right, count = torch.tensor(rng.random(12) < .4), 9
        f1 = lambda cut: 2 * int(right[scores >= cut].sum()) / (int((scores >= cut).sum()) + count)
        cut = metrics.threshold(scores, right, count)
        assert f1(cut) == max(map(f1, scores.tolist()))
    assert metrics.threshold(torch.tensor([3., 2, 1]), torch.tensor([True, True, False]), 2) == 1.5
    assert metrics.threshold(torch.tensor([3., 2]), torch.tensor([True, True]), 2) == 2        # nothing comes after the last
    assert metrics.threshold(torch.tensor([3., 2]), torch.tensor([False, False]), 2) == 0 == metrics.threshold(torch.zeros(0), torch.zeros(0) > 0, 2)


def test_mining_is_the_plain_definition_and_leaves_repeated_sentences_out():
    parts, plain = [], []
    for seed in (0, 1):
        x, y, rng = noisy_pairs(40, 6, .7, seed)
        y = np.concatenate([y[:25], rng.normal(size=(15, 6)) + .5])
        x[30], y[31] = x[3], y[4]                                        # x_3 and y_4 occur twice
        texts = [[f"{side} {twin.get(row, row)} " for row in range(40)] for side, twin in (("x", {30: 3}), ("y", {31: 4}))]
        parts.append((x, y, *texts, {(row, row) for row in range(25)}))
        rows = [[row for row in range(40) if row != extra] for extra in (30, 31)]
        found = [(score, rows[0][i], rows[1][j]) for score, i, j in plain_bitext(x[rows[0]], y[rows[1]], 4)]
        plain.append([(score, i == j < 25) for score, i, j in found if i != 3 and j != 4])

    def counts(part, cut):
        taken = [right for score, right in part if score >= cut]
        return sum(taken) / len(taken), sum(taken) / 25

    f1 = lambda part, cut: 2 * math.prod(counts(part, cut)) / sum(counts(part, cut))
    wanted = max((score for score, right in plain[0] if right), key=lambda cut: f1(plain[0], cut))
    found = metrics.bucc_mine(*parts)
    below = max(score for score, _ in plain[0] if score < wanted)
    assert found["threshold"] == pytest.approx((wanted + below) / 2)
    precision, recall = counts(plain[1], found["threshold"])
    assert (found["precision"], found["recall"]) == pytest.approx((100 * precision, 100 * recall)) and 0 < recall < precision < 1
    assert (found["f1"], found["f1_tune"]) == pytest.approx((100 * f1(plain[1], found["threshold"]), 100 * f1(plain[0], wanted)))


# ---- xsim++


@pytest.mark.parametrize("margin", metrics.MARGINS)
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
    assert min(wanted.values()) > 0                                      # the example covers every case
    found = metrics.xsim_plus(x, y, negatives, sources, types, margin)
    assert found.pop("xsim++") == pytest.approx(100 * sum(wanted.values()) / 30)
    assert found == pytest.approx({name: 100 * count / 30 for name, count in wanted.items()})


def test_xsim_plus_without_negatives_is_xsim():
    x, y, _ = noisy_pairs(50, 6, 1)
    assert metrics.xsim_plus(x, y, [], [], []) == {"xsim++": metrics.xsim(x, y), "misaligned": metrics.xsim(x, y)}


def test_a_negative_nearer_than_the_translation_is_blamed():
    x = np.eye(4) + .1
    found = metrics.xsim_plus(x, np.eye(4), x[:1], [0], ["number"], margin="absolute")
    assert found == {"xsim++": 25, "number": 25, "misaligned": 0}
    found = metrics.xsim_plus(x, np.eye(4), x[:1], [3], ["number"], margin="absolute")
    assert found == {"xsim++": 25, "number": 0, "misaligned": 25}
    texts = ["a", "b", "c", "a", "not a"]                                # rows 0 and 3 have one text, so it is theirs
    assert metrics.xsim_plus(x, np.eye(4), x[:1], [3], ["number"], margin="absolute", texts=texts)["number"] == 25
    with pytest.raises(ValueError, match="1 negatives, 2 sources"):
        metrics.xsim_plus(x, x, x[:1], [0, 1], ["number"])


# ---- geometry


def sphere(count, width, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_an_orthonormal_frame_uses_every_direction_and_centring_takes_one_away():
    frame = torch.linalg.qr(sphere(32, 32)).Q
    assert metrics.rankme(frame) == pytest.approx(32, rel=1e-4)
    assert metrics.rankme(torch.eye(32), center=True, epsilon=0) == pytest.approx(31)
    assert metrics.effective_rank(torch.eye(32)) == pytest.approx(31)
    assert metrics.stable_rank(torch.eye(32)) == pytest.approx(31)
    assert metrics.spectral_entropy(torch.eye(32)) == pytest.approx(math.log(31) / math.log(32))


def test_vectors_on_a_line_have_rank_one_and_one_point_has_none():
    line = torch.linspace(-1, 3, 50)[:, None] * torch.arange(1., 9)
    for rank in (metrics.rankme, metrics.effective_rank, metrics.stable_rank):
        assert rank(line) == pytest.approx(1, abs=1e-3)
    assert metrics.spectral_entropy(line) == pytest.approx(0, abs=1e-6)
    point = torch.full((50, 8), .1) * (1 + 1e-8 * torch.randn(50, 8))
    assert metrics.rankme(point) == pytest.approx(1, abs=1e-3)
    assert metrics.effective_rank(point) == metrics.stable_rank(point) == metrics.spectral_entropy(point) == 0


def test_ranks_are_those_of_numpy():
    z = (sphere(90, 20) * torch.linspace(.1, 2, 20) + 1).numpy()
    s = np.linalg.svd(z, compute_uv=False)
    p = s / s.sum() + 1e-7
    assert metrics.rankme(z) == pytest.approx(np.exp(-(p * np.log(p)).sum()))
    s = np.linalg.svd(z / np.linalg.norm(z, axis=1, keepdims=True), compute_uv=False)
    p = s / s.sum() + 1e-10
    assert metrics.rankme(z, normalize=True, epsilon=1e-10) == pytest.approx(np.exp(-(p * np.log(p)).sum()))
    s = np.linalg.svd(z - z.mean(0), compute_uv=False)
    p, q = s / s.sum(), s ** 2 / (s ** 2).sum()
    assert metrics.effective_rank(z) == pytest.approx(np.exp(-(p * np.log(p)).sum()))
    assert metrics.stable_rank(z) == pytest.approx((s ** 2).sum() / s[0] ** 2)
    assert metrics.spectral_entropy(z) == pytest.approx(-(p * np.log(p)).sum() / np.log(20))
    assert metrics.spectral_entropy(z, squared=True, base="min") == pytest.approx(-(q * np.log(q)).sum() / np.log(20))
    assert metrics.rank_90(z) == int((np.cumsum(q) < .9).sum()) + 1 and metrics.rank_90(np.ones((5, 3))) == 0
    by_width, by_rows = metrics.spectral_entropy(z[:10]), metrics.spectral_entropy(z[:10], base="min")
    assert by_rows == pytest.approx(by_width * np.log(20) / np.log(10))


def test_an_isotropic_cloud_is_near_full_rank():
    assert metrics.effective_rank(sphere(4000, 16)) > 15.9 and metrics.rankme(sphere(4000, 16)) > 15.9
    assert metrics.isotropy(sphere(4000, 16)) > .95 and metrics.spread(sphere(4000, 16)) == pytest.approx(1, abs=.01)


def test_uniformity_has_its_known_values():
    assert metrics.uniformity(torch.ones(10, 3)) == pytest.approx(0, abs=1e-9)
    assert metrics.uniformity(torch.tensor([[2., 0], [-.5, 0]])) == pytest.approx(-8)
    assert metrics.uniformity(sphere(1000, 512)) == pytest.approx(-4, abs=.02)
    u = metrics.unit(sphere(21, 4)).numpy()
    pairs = [math.exp(-3 * ((a - b) ** 2).sum()) for i, a in enumerate(u) for j, b in enumerate(u) if i != j]
    assert metrics.uniformity(u, t=3, block=6) == pytest.approx(math.log(np.mean(pairs)))


def test_alignment_is_a_power_of_the_distance_of_unit_vectors():
    x, y = torch.tensor([[3., 0], [0, 2]]), torch.tensor([[0, 5.], [0, 1]])
    assert metrics.alignment(x, y) == pytest.approx((2 + 0) / 2)
    assert metrics.alignment(x, y, power=4) == pytest.approx((4 + 0) / 2)
    assert metrics.alignment(x, -7 * x) == pytest.approx(4)


def test_isotropy_spread_and_random_cosine_see_a_single_direction():
    point = torch.ones(40, 6)
    assert metrics.isotropy(point) == pytest.approx(math.exp(-2))
    assert metrics.spread(point) == pytest.approx(0, abs=1e-6) and metrics.random_cosine(point) == pytest.approx(1)
    z = sphere(30, 5).numpy()
    u = z / np.linalg.norm(z, axis=1, keepdims=True)
    assert metrics.random_cosine(z) == pytest.approx(np.mean([u[i] @ u[j] for i in range(30) for j in range(30) if i != j]))
    assert metrics.random_cosine(z, z[::-1].copy()) == pytest.approx(
        np.mean([u[i] @ u[29 - j] for i in range(30) for j in range(30) if i != j]))


def test_the_cosine_table_of_known_vectors():
    en, de = torch.eye(3), torch.eye(3).roll(1, 0)                       # de: 2 0 1; row 1 of en is row 2 of de, ...
    table = metrics.cosine_table({"en": en, "de": de, "fr": torch.ones(3, 3)})
    assert table["same/de-en"] == 0 and table["translations/de-en"] == 0 and table["different/de-en"] == pytest.approx(1 / 2)
    assert table["same/fr-en"] == pytest.approx(.5) and table["translations/fr-en"] == pytest.approx(3 ** -.5)
    assert table["same"] == pytest.approx(1 / 3) and table["different"] == pytest.approx((.5 + 3 ** -.5) / 2)
    assert set(metrics.cosine_table({"en": en})) == {"same"}


def test_health_names_what_is_wrong():
    noise, common = sphere(400, 64), torch.ones(64)
    verdict = lambda x, y=None: metrics.health(x, y)[0]["verdict"]
    assert verdict(noise, noise + .2 * sphere(400, 64, 1)) == "ok"
    assert verdict(common + 1e-3 * noise) == verdict(torch.ones(400, 64)) == "COLLAPSING"
    assert verdict(3 * common + noise) == "half-collapsed (all vectors share one direction)"
    assert verdict(noise[:, :1] * common) == "half-collapsed (few directions in use)"
    measures, line = metrics.health(noise, noise)
    assert line.startswith("health: RankMe ") and line.endswith("-> ok") and "\n" not in line
    assert measures["cosine/translations"] == pytest.approx(1) and measures["spread"] == pytest.approx(1, abs=.05)


def test_class_alignment_is_the_mean_over_classes_of_the_mean_over_their_pairs():
    z, labels = sphere(23, 4), torch.tensor([0] * 12 + [3] * 8 + [5] * 2 + [7])           # one row has a class of its own
    u = (z / z.norm(dim=1, keepdim=True)).numpy()
    distance = lambda i, j: math.dist(u[i], u[j])
    for power in (2, 4):
        classes = [[distance(i, j) ** power for i in rows for j in rows if i < j] for rows in (range(12), range(12, 20), range(20, 22))]
        assert metrics.class_alignment(z, labels, power) == pytest.approx(np.mean([np.mean(pairs) for pairs in classes]))
    assert metrics.class_alignment(3 * torch.eye(2)[[0, 0, 1, 1]], [0, 0, 1, 1]) == 0
    pairs = [(distance(i, j), labels[i] == labels[j]) for i in range(23) for j in range(i)]
    same, other = ([value for value, one in pairs if one == kind] for kind in (True, False))
    assert metrics.class_separation(z, labels) == pytest.approx(np.mean(same) / np.mean(other))
    with pytest.raises(ValueError, match="two rows"):
        metrics.class_alignment(z, range(23))
    with pytest.raises(ValueError, match="one class"):
        metrics.class_separation(z, [1] * 23)


def test_explained_variance_is_that_of_numpy_and_of_a_principal_component_analysis():
    z = np.random.default_rng(0).normal(size=(50, 6)) * [5, 3, 2, 1, .5, .1] + 4
    s = np.linalg.svd(z - z.mean(0), compute_uv=False) ** 2
    assert metrics.explained(z).tolist() == pytest.approx(100 * np.cumsum(s) / s.sum())
    golden = [67.99960340, 87.76717467, 96.72321238, 99.49117207, 99.98371749, 100]        # scikit-learn 1.9, PCA().explained_variance_ratio_
    assert metrics.explained(z).tolist() == pytest.approx(golden)
    assert metrics.explained(torch.ones(5, 3)).tolist() == [0, 0, 0]


def test_a_linear_map_leaves_no_residual_and_noise_leaves_itself():
    x, turn = sphere(60, 8), sphere(8, 8, 1)
    found = metrics.linear_map(x, x @ turn)
    assert max(found["residual"], found["residual_held_out"]) < 1e-9
    y = x @ turn + sphere(60, 8, 2)
    found, s = metrics.linear_map(x, y), np.linalg.svd((x - y).numpy(), compute_uv=False)
    fit = lambda rows: np.linalg.lstsq(x[rows].numpy(), y[rows].numpy(), rcond=None)[0]
    assert found["residual"] == pytest.approx(np.linalg.norm(x.numpy() @ fit(slice(None)) - y.numpy()))
    assert found["residual_relative"] == pytest.approx(found["residual"] / np.linalg.norm(y))
    half = np.linalg.norm(x[1::2].numpy() @ fit(slice(0, None, 2)) - y[1::2].numpy()) / np.linalg.norm(y[1::2])
    assert found["residual_held_out"] == pytest.approx(half) and half > found["residual_relative"]
    assert found["singular_mean"] == pytest.approx(s.mean()) == found["singular_100"]
    few = metrics.linear_map(x[:8], y[:8])                               # as many rows as dimensions: anything is linear
    assert few["residual"] < 1e-9 and few["residual_held_out"] > .5
    line = sphere(60, 1) @ sphere(1, 8, 3)                               # float32 vectors that use one direction: the others are not fitted
    assert metrics.linear_map(line.float(), (2 * line).float())["residual_held_out"] < 1e-5
    wide = metrics.linear_map(sphere(150, 120), sphere(150, 120, 1))
    assert wide["singular_100"] > wide["singular_mean"]
    with pytest.raises(ValueError, match=r"\(60, 8\)"):
        metrics.linear_map(x, y[:, :5])


def test_cosines_are_counted_as_numpy_counts_them():
    x, y = sphere(40, 3), sphere(40, 3, 1)
    u, v = (metrics.unit(z).numpy() for z in (x, y))
    found, off = metrics.cosine_counts(x, y), ~np.eye(40, dtype=bool)
    assert found["related"] == np.histogram(np.diag(u @ v.T), 40, (-1, 1))[0].tolist()
    assert found["unrelated"] == np.histogram((u @ v.T)[off], 40, (-1, 1))[0].tolist() and sum(found["unrelated"]) == 40 * 39
    assert metrics.cosine_counts(x, x)["related"] == [0] * 39 + [40] and len(found["edges"]) == 41


def test_a_sample_is_the_same_rows_every_time_and_none_twice():
    z = torch.arange(50.)[:, None]
    assert torch.equal(metrics.sample(z, 20), metrics.sample(z, 20)) and len(metrics.sample(z, 20).unique()) == 20
    assert len(metrics.sample(z).unique()) == 50 and not torch.equal(metrics.sample(z, 20), metrics.sample(z, 20, seed=1))


# ---- tokens and attention


def test_the_kinds_of_matches_are_those_of_the_paper():
    query = torch.tensor([[0, 4, 17]])
    kind = lambda *key: [name for name, share in metrics.token_matches(query, torch.tensor([[key]])).items() if share == 100]
    assert kind(0, 4, 9) == kind(0, 4, 17) == ["same_sentence"] and kind(2, 4, 9) == kind(2, 4, 17) == ["translation"]
    assert kind(0, 5, 17) == ["same_language"] and kind(0, 5, 9) == kind(2, 5, 17) == kind(2, 5, 9) == ["other"]
    shares = metrics.token_matches(query, torch.tensor([[[0, 4, 9], [2, 4, 9], [2, 4, 3], [1, 1, 1], [0, 5, 17]]]))
    assert shares == pytest.approx({"translation": 40, "same_sentence": 20, "same_language": 20, "other": 20})


def test_the_nearest_tokens_are_searched_in_all_columns_and_exclude_the_token_itself():
    chance = np.random.default_rng(0)
    columns = [[[1, *chance.integers(5, 12, size=chance.integers(1, 5)).tolist(), 2] for _ in range(6)] for _ in range(3)]
    states = [[torch.randn(len(ids), 4, generator=torch.Generator().manual_seed(10 * column + row)) for row, ids in enumerate(rows)]
              for column, rows in enumerate(columns)]
    queries, found = metrics.nearest_tokens(columns, states, (1, 2), [0, 2, 5], queries=2, k=3)
    everything = [(column, row, token, place, states[column][row][place]) for column, rows in enumerate(columns) for row, ids in enumerate(rows)
                  for place, token in enumerate(ids) if token not in (1, 2)]
    assert queries[:, 1].tolist() == [row for row in (0, 2, 5) for _ in range(min(2, len(columns[0][row]) - 2))] and not queries[:, 0].any()
    cosine = lambda a, b: torch.cosine_similarity(a.double(), b.double(), dim=0).item()
    for query, nearest in zip(queries.tolist(), found.tolist()):
        options = [sorted((other for other in everything if other is not own), key=lambda other: -cosine(own[4], other[4]))[:3]
                   for own in everything if list(own[:3]) == query]      # a token may stand twice in its row
        assert nearest in [[list(other[:3]) for other in option] for option in options]
    assert torch.equal(found, metrics.nearest_tokens(columns, states, (1, 2), [0, 2, 5], queries=2, k=3)[1])
    assert metrics.nearest_tokens(columns, states, (1, 2), [0], k=500)[1].shape[1] == len(everything) - 1


def test_the_entropy_of_attention_has_its_known_values():
    even, one = torch.full((2, 8), 1 / 8), torch.eye(8)[[3, 4]]
    found = metrics.attention_entropy([even])
    assert found["entropy"] == found["entropy_of_mean"] == pytest.approx(math.log(8)) == found["entropy_uniform"]
    assert found["entropy_no_end"] == pytest.approx(math.log(7)) and found["entropy_inside"] == pytest.approx(math.log(6))
    found = metrics.attention_entropy([one])
    assert found["entropy"] == found["entropy_inside"] == 0 and found["entropy_of_mean"] == pytest.approx(math.log(2))
    sink = torch.tensor([[.1, .2, .3, .4], [.25, .25, .25, .25]])
    found = metrics.attention_entropy([sink, torch.ones(2, 2) / 2])      # a row of [CLS] and [SEP] does not count
    golden = {"entropy": (1.2798542258 + math.log(4)) / 2, "entropy_no_end": (1.0114042648 + math.log(3)) / 2,          # scipy.stats.entropy
              "entropy_inside": (.6730116670 + math.log(2)) / 2, "entropy_of_mean": 1.3609399069, "entropy_of_mean_inside": .6881388137}
    assert {name: found[name] for name in golden} == pytest.approx(golden)
    assert found["on_first"] == pytest.approx(17.5) and found["on_end"] == pytest.approx(32.5)
    with pytest.raises(ValueError, match="no row"):
        metrics.attention_entropy([torch.ones(2, 2) / 2])


# ---- statistics


def test_the_paired_t_test_is_students():
    assert metrics.paired_t([1, 2, 3, 4, 5.5], [0, 1.5, 3, 3, 4])[1] == pytest.approx(.8 / (math.sqrt(.325) / math.sqrt(5)))
    for t, p in ((2.131847, .05), (3.746947, .01), (0, .5), (-2.131847, .95)):                   # tables of 4 degrees of freedom
        x = np.array([-1, -.5, 0, .5, 1])
        x = x + t * x.std(ddof=1) / math.sqrt(5)
        mean, found, tail = metrics.paired_t(x, np.zeros(5))
        assert found == pytest.approx(t, abs=1e-9) and tail == pytest.approx(p, abs=1e-6) and mean == pytest.approx(x.mean())
    assert metrics.paired_t([1, 3], [0, 0])[2] == pytest.approx(.5 - math.atan(2) / math.pi)     # one degree of freedom: Cauchy
    assert metrics.paired_t([2, 2], [1, 1])[1:] == (math.inf, 0) and math.isnan(metrics.paired_t([1, 1], [1, 1])[1])
    with pytest.raises(ValueError):
        metrics.paired_t([1, 2], [1])
