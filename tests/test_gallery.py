"""The promises of an objective, kept by every file of gallery/, one added later too."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_house import write_pairs
from test_objectives import (
    batch_of,
    build,
    encode,
    examples,
    gradients,
    padded,
    rows_of,
    run_blocks,
    slow_mlm,
    slow_sigreg,
)
from test_train import assert_same_run, flags, run_main, settings

import train
from model import each_tensor
from objectives import Teacher, find_objective

FILES = sorted((Path(__file__).parent.parent / "gallery").glob("*.py"))
SMALL = dict(hidden=12, projected=6, top_layers=2)  # of the files' own sizes
every = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def small(kind):
    names = {field.name for field in fields(kind.Config)}
    return {name: value for name, value in SMALL.items() if name in names}


def made(file, dtype=torch.float64):
    """The objective of a file, tiny, whose teachers are no longer their students."""
    kind = find_objective(str(file))
    objective = build(kind, dtype, **small(kind))
    for teacher in teachers(objective):
        for parameter in teacher.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return objective


def teachers(objective):
    return [module for module in objective.modules() if isinstance(module, Teacher)]


@every
def test_collate_depends_on_its_examples_and_generator_alone(file):
    objective = made(file)
    before = (np.random.get_state()[1].copy(), torch.get_rng_state())
    one, two = (each_tensor(batch_of(objective, 0), torch.Tensor.tolist) for _ in range(2))
    assert one == two
    assert (np.random.get_state()[1] == before[0]).all()
    assert torch.equal(torch.get_rng_state(), before[1])


@every
def test_the_loss_is_finite_and_gradients_are_where_they_belong(file):
    objective = made(file, torch.float32)
    loss, terms = objective(batch_of(objective))
    loss.backward()
    assert loss.shape == () and loss.isfinite() and terms
    assert all(term.shape == () and term.isfinite() for term in terms.values())
    assert not any(term.requires_grad for term in terms.values())
    taught = {id(p) for teacher in teachers(objective) for p in teacher.parameters()}
    for name, parameter in objective.named_parameters():
        has_gradient = parameter.grad is not None and bool(parameter.grad.abs().sum())
        assert has_gradient == (id(parameter) not in taught), name
    # Its optimiser leaves a teacher alone, and a step moves it.
    before = [p.clone() for teacher in teachers(objective) for p in teacher.parameters()]
    objective.after_step(0.5)
    after = [p for teacher in teachers(objective) for p in teacher.parameters()]
    assert all(not p.requires_grad for p in after)
    assert all(not torch.equal(one, other) for one, other in zip(before, after))


@every
def test_a_run_that_was_stopped_equals_the_whole_one(file, tmp_path):
    write_pairs(tmp_path / "pairs.tsv", 400)
    more = dict(settings(tmp_path, "", steps=6, save_every=100), **small(find_objective(str(file))))
    whole = train.start(str(file), out=tmp_path / "whole", **more)
    list(whole.steps())
    stopped = train.start(str(file), out=tmp_path / "parts", **more)
    list(stopped.steps(on_step=lambda run: run.step == 3))
    assert stopped.step == 3
    list(train.start(str(file), out=tmp_path / "parts", **more).steps())
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    # From the command line it is the same run, which is finished.
    command = ["--objective", str(file), "--out", str(tmp_path / "whole"), *flags(more)]
    assert run_main(command) == 0


# ---- the losses by hand, on three rows in float64


def states_of(model, packed):
    """Of the whole line, (T, D)."""
    x, real = encode(model, rows_of(packed))
    return x[real]


def means(model, packed):
    """The mean state of each row, (R, D)."""
    states = states_of(model, packed).split(packed.cu_seqlens.diff().tolist())
    return torch.stack([one.mean(0) for one in states])


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
            wanted = x[i, t + 1].detach()
            guess = x[i, t] + objective.f(torch.cat([x[i, t], table[row[t + 1]]]))
            error = (guess - wanted).abs()
            errors.append(torch.where(error < 1, error ** 2 / 2, error - 0.5).mean())
            p = (table @ wanted).detach().softmax(0)
            q = (table.detach() @ guess).softmax(0)
            divergences.append((p * (p / q).log()).sum())
    ntp = slow_ntp(objective, states_of(objective.model, batch["packed"]), batch)
    return ntp + sum(errors) / len(errors) + sum(divergences) / len(divergences)


def slow_data2vec(objective, batch):
    where = batch["target_positions"]
    teacher = objective.teacher.model
    grid, real = padded(rows_of(batch["clean"]))
    x = teacher.embed_norm(teacher.embed(grid)
                           + teacher.position_embedding(torch.arange(grid.shape[1])))
    layers = []
    for block in teacher.blocks:
        x = run_blocks([block], x, real, 2)
        y = x[real][where]
        layers.append((y - y.mean(1, keepdim=True))
                      / (y.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt())
    target = torch.stack(layers[-2:]).mean(0)
    error = (objective.predictor(states_of(objective.model, batch["packed"])[where])
             - target).abs()
    return torch.where(error < 4, error ** 2 / 8, error - 2).mean()


def slow_lejepa(objective, batch):
    z = means(objective.model, batch["packed"])
    for layer in objective.projector:
        if isinstance(layer, torch.nn.BatchNorm1d):
            z = (z - z.mean(0)) / (z.var(0, unbiased=False) + 1e-5).sqrt()
            z = z * layer.weight + layer.bias
        else:
            z = layer(z)
    x, y = z[:3], z[3:]
    # Both views are as far from their centre: half of their difference.
    agree = ((x - y) / 2).square().mean()
    no_distance = slow_sigreg(x, x, batch["seed"]), slow_sigreg(y, y, batch["seed"])
    return 0.95 * agree + sum(no_distance) / 2


def slow_two_rates(objective, batch):
    model = objective.model
    light = objective.predictor(means(model, batch["packed"]))
    heavy = means(objective.teacher.model, batch["heavy"])
    return slow_mlm(objective, batch, None) + sum(map(far, light, heavy)) / 3


def slow_simcse(objective, batch):
    x, _ = encode(objective.model, rows_of(batch["packed"]))
    z = objective.projector(x[:, 0])
    total = 0
    for i in range(3):
        cosines = torch.stack([1 - far(z[i], z[3 + j]) for j in range(3)])
        total -= (cosines / 0.05).log_softmax(0)[i]
    return total / 3


def slow_byol(objective, batch):
    z = objective.predictor(objective.projector(means(objective.model, batch["packed"])))
    slow = means(objective.teacher.model, batch["packed"])
    slow = objective.teacher_projector.model(slow)
    z = z / z.norm(dim=1, keepdim=True)
    slow = slow / slow.norm(dim=1, keepdim=True)
    return sum((z[i] - slow[(i + 3) % 6]).square().sum() for i in range(6)) / 3


BY_HAND = {"stp": slow_stp, "nextlat": slow_nextlat, "data2vec": slow_data2vec,
           "lejepa": slow_lejepa, "two_rates": slow_two_rates, "simcse": slow_simcse,
           "byol": slow_byol}


@every
def test_the_loss_and_its_gradients_are_what_its_formula_gives_on_three_rows(file):
    if file.stem not in BY_HAND:
        pytest.fail(f"gallery/{file.name} has no entry in BY_HAND of tests/test_gallery.py: add "
                    f"{file.stem!r} with a function (objective, batch) -> its loss on three rows, "
                    "computed plainly in float64")
    objective = made(file)
    batch = batch_of(objective, 0, examples(type(objective), 3))
    loss, _ = objective(batch)
    by_hand = BY_HAND[file.stem](objective, batch)
    assert abs(loss - by_hand) < 1e-9
    for one, other in zip(gradients(loss, objective), gradients(by_hand, objective)):
        assert (one - other).abs().max() < 1e-8
