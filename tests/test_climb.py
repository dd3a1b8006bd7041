"""The page minimal/climb.py, and the networks of results/climb.py."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from scipy.cluster import hierarchy

from minimal import climb
from results import climb as experiment


def all_trees(grammar):
    """Return every tree of a grammar as the symbols of each level; all are equally likely."""
    trees = [[(root,)] for root in range(grammar.v)]
    for pairs in grammar.pairs:
        trees = [[*tree, sum(map(tuple, chosen), ())] for tree in trees
                 for chosen in itertools.product(*(pairs[symbol] for symbol in tree[-1]))]
    return trees


@pytest.mark.parametrize("redrawn", [0.0, 0.5])
def test_the_posterior_is_that_of_listing_every_tree(redrawn):
    grammar = climb.Grammar(1, v=3, m=2, depth=2, redrawn=redrawn)
    trees = all_trees(grammar)
    assert len(trees) == 3 * 2 * 2 * 2
    rng = np.random.default_rng(0)
    tokens, visible = grammar.sample(50)[-1], rng.random((50, 4)) < 0.5
    posterior = grammar.posterior(tokens, visible)
    for text in range(50):
        left = [tree for tree in trees
                if (np.array(tree[-1]) == tokens[text])[visible[text]].all()]
        for level, node in [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (2, 3)]:
            counts = np.bincount([tree[level][node] for tree in left], minlength=3)
            assert abs(posterior[level][text, node] - counts / len(left)).max() < 1e-12


def test_if_every_pair_is_allowed_the_context_says_nothing_about_a_token():
    """At m = v the entropy of a masked token is ln v, given all other tokens."""
    grammar = climb.Grammar(0, v=8, m=8, depth=3)
    tokens, visible = grammar.sample(100)[-1], np.ones((100, 8), bool)
    visible[:, 3] = False
    p = grammar.posterior(tokens, visible)[-1][:, 3]
    assert abs(-(p * np.log(p)).sum(-1) - math.log(8)).max() < 1e-12


@pytest.mark.parametrize("m", [2, 3, 4])
def test_the_context_explains_v_minus_1_directions_of_a_masked_pair(m):
    r2 = climb.explained(climb.Grammar(0, m=m, depth=4), 300)
    assert len(r2) == 8 * m - 1
    assert (r2[:7] > 0.01).all() and abs(r2[7:]).max() < 1e-12


def test_groups_are_those_of_scipy_and_a_point_of_weight_3_counts_as_three_points():
    points = np.random.default_rng(0).standard_normal((40, 3))
    weights = np.r_[np.full(10, 3), np.ones(30, int)]
    copies = hierarchy.ward(points.repeat(weights, 0))
    ours = climb.cluster(points, weights, 6)
    theirs = hierarchy.fcluster(copies, 6, "maxclust")[np.cumsum(weights) - 1]
    assert len(set(zip(ours, theirs))) == len(set(ours)) == len(set(theirs)) == 6


@pytest.mark.parametrize("found, texts", [
    ([0.5, 0.94, 0.96, 1.0], 512 * 2 ** 0.5), ([0.96, 0.9, 1.0, 1.0], 2 ** 9.5),
    ([1.0] * 4, 256), ([0.2, 0.5, 0.7, 0.94], 2048)])
def test_texts_are_interpolated_at_the_last_crossing_and_at_most_the_largest_size(
        found, texts, monkeypatch):
    monkeypatch.setattr(climb, "SIZES", [256, 512, 1024, 2048])
    assert climb.texts_needed(found) == pytest.approx(texts)


def test_depth_costs_nothing_with_latents_and_a_lot_with_tokens(monkeypatch):
    monkeypatch.setattr(climb, "SIZES", [2 ** power for power in range(11, 17)])
    tree = climb.Grammar(0).sample(climb.SIZES[-1])
    needed = {(contexts, depth): climb.texts_needed(
        [climb.climb(tree[:depth + 1], texts, contexts) for texts in climb.SIZES])
        for contexts in ("latents", "tokens") for depth in (3, 5)}
    assert needed["latents", 5] <= 1.5 * needed["latents", 3]
    assert needed["tokens", 5] >= 4 * needed["tokens", 3]
    assert needed["latents", 3] < needed["tokens", 3]


def test_at_height_1_latents_are_tokens():
    tree = climb.Grammar(3, depth=2).sample(500)
    assert climb.climb(tree, 500, "latents") == climb.climb(tree, 500, "tokens") < 1


def test_the_page_prints_the_same_table_each_time(monkeypatch, capsys):
    monkeypatch.setattr(climb, "SIZES", climb.SIZES[:3])
    monkeypatch.setattr(climb, "GRAMMARS", 1)
    climb.main()
    first = capsys.readouterr().out
    climb.main()
    assert capsys.readouterr().out == first
    lines = first.splitlines()
    assert "explains 7 of its 31 directions" in lines[0]
    assert [len(line.split()) for line in lines[2:]] == [4, 4]


# ---- the networks of the experiment


@pytest.mark.parametrize("loss", ["cross-entropy", "squared-error"])
@pytest.mark.parametrize("contexts", ["latents", "tokens"])
def test_a_network_has_the_loss_that_loops_compute(contexts, loss):
    torch.manual_seed(0)
    model = experiment.Climber(contexts, loss)
    model.teacher = [torch.randn_like(weight) for weight in model.group[:2]]
    for weight in model.predict:
        torch.nn.init.normal_(weight)
    tokens = torch.randint(8, (2, 16))

    def code(text, height, node, weights):  # of one node
        if height == 0:
            return torch.eye(8)[text[node]]
        left, right = (code(text, height - 1, 2 * node + side, weights) for side in (0, 1))
        return (torch.outer(left, right).flatten() @ weights[height - 1]).softmax(-1)

    total = 0
    for height in (1, 2, 3):
        nodes, below = 2 ** (4 - height), 0 if contexts == "tokens" else height - 1
        width = 2 ** (height - below)  # nodes of the level `below` inside one of this level
        each = []
        for text in tokens:
            for node in range(nodes):
                predicted = code(text, height, node, model.group) @ model.predict[height - 1]
                for i, part in enumerate(predicted.split(len(predicted) // width)):
                    target = code(text, below, (node ^ 1) * width + i, model.teacher)
                    each.append(-(target * part.log_softmax(-1)).sum() if loss == "cross-entropy"
                                else (target - part).square().sum())
        total += torch.stack(each).mean()
    assert model(tokens).item() == pytest.approx(total.item(), rel=1e-5)


def test_a_level_of_a_network_is_trained_by_its_own_loss_alone():
    torch.manual_seed(0)
    model = experiment.Climber("latents", "cross-entropy")
    torch.nn.init.normal_(model.predict[2])  # The predictions of the levels below are still 0.
    model(torch.randint(8, (4, 16))).backward()
    assert not model.group[0].grad.any() and not model.group[1].grad.any()
    assert model.group[2].grad.any()


def test_a_network_trains_and_prints_one_json_object(monkeypatch, capsys):
    monkeypatch.setattr(experiment, "SIZES", [8192])
    monkeypatch.setattr(experiment, "TESTED", 500)
    experiment.main("network --seed 3 --contexts latents --loss cross-entropy --lr 0.1 --steps 50 "
                    "--probed 1".split())
    scores = json.loads(capsys.readouterr().out)
    assert scores["found, 8192 texts, step 1"] + 5 < scores["found, 8192 texts"] <= 100


def test_all_variants_of_the_learner_print_one_json_object(monkeypatch, capsys):
    monkeypatch.setattr(experiment, "SIZES", [256, 8192])
    monkeypatch.setattr(climb, "SIZES", [256, 8192])
    experiment.main(["learner", "--seed", "3"])
    scores = json.loads(capsys.readouterr().out)
    assert scores["texts, depth 5/tokens"] == 8192  # where counting ends
    assert scores["found, 8192 texts/8 codes"] == scores["found, depth 4, 8192 texts/latents"]
    assert len([name for name in scores if name.startswith("R2/")]) == 31
