import math

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
