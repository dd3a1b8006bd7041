"""The probe gap: what scikit-learn 1.9 and SciPy 1.17 say of the same rows, and planted vectors."""

import numpy as np
import pytest
import torch

import metrics
import probes


def sphere(count, width, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def probed():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(120, 10)) * rng.uniform(.1, 5, 10)
    labels = 3 * (z[:, 0] / 3 + z[:, 1] + rng.normal(size=120)).round().clip(-2, 2).astype(int)
    return z, torch.tensor(labels) // 3 + 2, torch.tensor((labels + rng.normal(size=120)).round(1))


def test_folds_are_scikit_learns():
    labels = [3, 1, 1, 3, 7, 7, 7, 1, 3, 3, 1, 7, 7, 1, 3, 3]
    assert probes.stratified(labels, 3).tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2]
    assert probes.stratified(torch.arange(7.), 3).tolist() == [0, 0, 0, 1, 1, 2, 2]           # KFold


def test_probes_across_folds_and_their_scores_are_scikit_learns():
    z, labels, scores = probed()
    found, wanted = probes.across_folds(z, labels, 5), probes.across_folds(z, scores, 5)
    assert (found == labels).double().mean().item() == pytest.approx(.575)       # LogisticRegression(C=1) after StandardScaler
    assert metrics.f1_macro(found, labels) == pytest.approx(34.38556505) and metrics.mcc(found, labels) == pytest.approx(.4169349675)
    two = (labels > 2).long()
    assert (probes.across_folds(z, two, 5) == two).double().mean().item() == pytest.approx(104 / 120)
    golden = {labels: [-.55390649, -1.60076551, .09336258], two: [.58742247, 1.59368067, -.10016058]}  # LogisticRegression(C=.5)
    for classes, first in golden.items():
        assert probes.logistic(z, classes, c=.5)[:3, 0].tolist() == pytest.approx(first, rel=1e-4)
    assert wanted[:3].tolist() == pytest.approx([0.589524667, -0.163059213, 5.349358432])            # Ridge(1)
    assert metrics.spearman(scores, wanted.round()) == pytest.approx(.8037926480)          # many ranks are shared
    assert metrics.mcc(labels, torch.zeros(120, dtype=int)) == metrics.spearman(scores, torch.ones(120)) == 0
    assert [metrics.f1_macro(labels, labels) / 100, metrics.mcc(labels, labels), metrics.spearman(scores, scores.exp())] == pytest.approx([1] * 3)
    with pytest.raises(ValueError, match="too few for 5 folds"):
        probes.across_folds(z[:8], torch.arange(8), 5)


def test_the_target_of_a_token_probe_is_the_most_frequent_plain_token():
    rows = [[1, 9, 9, 5, 2]] * 5 + [[1, 7, 5, 5, 7, 2]] * 4 + [[1, 5, 2], [1, 1, 1, 2], [1, 30, 2]]
    assert probes.token_targets(rows, (1, 2)).tolist() == [9] * 5 + [5] * 5 + [-1, -1]
    assert probes.token_targets(rows, (1, 2), least=1).tolist()[-2:] == [-1, 30]


def test_the_gap_is_large_where_vectors_tell_labels_and_negative_where_they_tell_words():
    labels, targets = torch.arange(90) % 2, torch.tensor([*range(5)] * 18)
    one = lambda of: torch.nn.functional.one_hot(of).double() + .1 * sphere(90, int(of.max()) + 1)
    about_labels, about_words = probes.probe_gap(one(labels), targets, labels), probes.probe_gap(one(targets), targets, labels)
    assert about_labels["semantic"] == 100 and about_labels["gap"] > 50 and about_words["token"] == 100 and about_words["gap"] < -30
    assert about_labels["gap"] == about_labels["semantic"] - about_labels["token"]
    assert about_labels["semantic_f1"] == 100 * about_labels["semantic_mcc"] == pytest.approx(100)
    assert set(probes.probe_gap(one(targets), targets)) == {"token"}
    assert set(probes.probe_gap(one(labels), targets, labels * 1.)) == {"token", "semantic", "gap"}
    assert "gap" not in probes.probe_gap(one(labels), -torch.ones(90), labels)
