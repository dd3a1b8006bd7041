"""The page minimal/climb.py."""

import itertools

import numpy as np
import pytest
from scipy.cluster import hierarchy

from minimal import climb


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


def test_groups_are_those_of_scipy_and_a_point_of_weight_3_counts_as_three_points():
    points = np.random.default_rng(0).standard_normal((40, 3))
    weights = np.r_[np.full(10, 3), np.ones(30, int)]
    copies = hierarchy.ward(points.repeat(weights, 0))
    ours = climb.cluster(points, weights, 6)
    theirs = hierarchy.fcluster(copies, 6, "maxclust")[np.cumsum(weights) - 1]
    assert len(set(zip(ours, theirs))) == len(set(ours)) == len(set(theirs)) == 6


def test_depth_costs_nothing_with_latents_and_a_lot_with_tokens(monkeypatch):
    monkeypatch.setattr(climb, "SIZES", [2 ** power for power in range(11, 17)])
    tree = climb.Grammar(0).sample(climb.SIZES[-1])
    needed = {(contexts, depth): climb.texts_needed(
        [climb.climb(tree[:depth + 1], texts, contexts) for texts in climb.SIZES])
        for contexts in ("latents", "tokens") for depth in (3, 5)}
    assert needed["latents", 5] <= 1.5 * needed["latents", 3]
    assert needed["tokens", 5] >= 4 * needed["tokens", 3]
    assert needed["latents", 3] < needed["tokens", 3]


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
