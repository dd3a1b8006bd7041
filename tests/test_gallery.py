"""The loss of every file of gallery/, by hand, on a few rows in float64. That these objectives keep
the promises of all objectives is in test_any_objective.py."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_objectives import (
    GALLERY,
    batch_of,
    build,
    check_equal,
    embeddings,
    encode,
    examples,
    gaussian,
    gradients,
    rows_of,
    seeded,
    slow_info_nce,
    teacher_weights,
)

from data import Example


def states_of(model, packed):
    """The hidden states of the whole line, (T, D)."""
    x, real = encode(model, rows_of(packed))
    return x[real]


def far(x, y):
    """1 - cos of two vectors."""
    return 1 - x @ y / (x.norm() * y.norm())


def slow_ntp(objective, states, batch):
    logits = states[batch["target_positions"]] @ objective.model.embed.weight.T
    return F.cross_entropy(logits, batch["targets"])


def slow_stp(objective, batch):
    states = states_of(objective.model, batch["packed"])
    ends = batch["packed"].cu_seqlens.tolist()
    total = 0
    for start, end, (zero, s, e, last) in zip(ends, ends[1:], batch["span_index"].T.tolist()):
        assert start == zero <= s < e <= last == end - 1 and e - s < last - zero
        inside = states[e] - states[s]
        outside = states[last] - states[e] + states[s] - states[zero]
        total += far(inside, outside)
    return slow_ntp(objective, states, batch) + 0.02 * total / 3


def slow_nextlat(objective, batch):
    rows = rows_of(batch["packed"])
    x, _ = encode(objective.model, rows)
    table = objective.model.embed.weight
    errors = []
    divergences = []
    for i, row in enumerate(rows):
        for t in range(len(row) - 1):
            target = x[i, t + 1].detach()
            guess = x[i, t] + objective.f(torch.cat([x[i, t], table[row[t + 1]]]))
            error = (guess - target).abs()
            errors.append(torch.where(error < 1, error ** 2 / 2, error - 0.5).mean())
            p = (table @ target).detach().softmax(0)
            q = (table.detach() @ guess).softmax(0)
            divergences.append((p * (p / q).log()).sum())
    ntp = slow_ntp(objective, states_of(objective.model, batch["packed"]), batch)
    return ntp + sum(errors) / len(errors) + sum(divergences) / len(divergences)


def slow_data2vec(objective, batch):
    where = batch["target_positions"]
    layers = []
    for count in (1, 2):  # blocks
        model = copy.deepcopy(objective.teacher.model)
        model.blocks = model.blocks[:count]
        y = states_of(model, batch["clean"])[where]
        layers.append((y - y.mean(1, keepdim=True))
                      / (y.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt())
    target = torch.stack(layers).mean(0)
    error = (objective.predictor(states_of(objective.model, batch["packed"])[where])
             - target).abs()
    return torch.where(error < 4, error ** 2 / 8, error - 2).mean()


def slow_lejepa(objective, batch):
    z = embeddings(objective, rows_of(batch["packed"]))
    for layer in objective.projector:
        if isinstance(layer, torch.nn.BatchNorm1d):
            z = (z - z.mean(0)) / (z.var(0, unbiased=False) + 1e-5).sqrt()
            z = z * layer.weight + layer.bias
        else:
            z = layer(z)
    x, y = z[:3], z[3:]
    center = (x + y) / 2
    return 0.95 * (x - center).square().mean() + 0.05 * (gaussian(x) + gaussian(y)) / 2


def slow_simcse(objective, batch):
    x, _ = encode(objective.model, rows_of(batch["packed"]))
    return slow_info_nce(*objective.projector(x[:, 0]).chunk(2), 0.05, symmetric=False)


A, B, C, P, Q, R, N, M = ([number, *range(40, 40 + number)] for number in range(5, 13))
# Row 0's negative is row 1's positive; row 1's first one is its own anchor; and N is there twice.
TRIPLETS = [(A, P, Q, N), (B, Q, B, N), (C, R, M, P), (M, N, R, A)]
# What each row compares its anchor with: the positive, and every other text once.
CANDIDATES = [(P, Q, N, B, M, R), (Q, P, R, N, M, A), (R, P, Q, N, B, M, A), (N, P, Q, R, B, A)]


def slow_triplets(objective, batch):
    texts = rows_of(batch["packed"])
    x, _ = encode(objective.model, texts)
    z = {tuple(text[1:-1]): states[0] for text, states in zip(texts, x)}
    loss = 0
    for (anchor, *_), candidates in zip(TRIPLETS, CANDIDATES):
        cosines = torch.stack([1 - far(z[tuple(anchor)], z[tuple(one)]) for one in candidates])
        loss -= (cosines / 0.07).log_softmax(0)[0] / 4
    return loss


BY_HAND = {"stp": slow_stp, "nextlat": slow_nextlat, "data2vec": slow_data2vec,
           "lejepa": slow_lejepa, "simcse": slow_simcse, "triplets": slow_triplets}


@pytest.mark.parametrize("name", GALLERY)
def test_the_loss_and_its_gradients_are_what_its_formula_gives_on_a_few_rows(name):
    assert name in BY_HAND, (f"add {name!r} to BY_HAND, with a function (objective, batch) that "
                             "computes its loss on three rows, plainly and in float64")
    items, options = examples(GALLERY[name], 3), {}
    if name == "triplets":
        items, options = [Example(tuple(map(np.array, row))) for row in TRIPLETS], {"negatives": 2}
    objective = build(GALLERY[name], **options)
    for parameter in teacher_weights(objective):
        parameter.add_(0.1 * torch.randn_like(parameter))
    batch = batch_of(objective, 0, items)
    losses = [seeded(objective, batch)[0], seeded(BY_HAND[name], objective, batch)]
    check_equal(objective, f"{BY_HAND[name].__name__} in tests/test_gallery.py",
                *((loss, *gradients(loss, objective)) for loss in losses), bound=1e-8)
