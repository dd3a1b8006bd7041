"""Promises that every objective keeps, no leakage, golden numbers, and each loss against a plain padded re-computation in float64."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import data
import train
from data import BadInput
from model import Model, ModelConfig
from objectives import OBJECTIVES, Contrastive, Mexma, Mlm, info_nce, koleo, mse

SPECIAL = data.Special(0, 2, 3, 4, (), 60, np.arange(5), np.ones(60, bool))
SHAPE = ModelConfig(vocab=60, width=16, layers=2, heads=2, hidden=32, max_length=64, dropout=0.0)
SMALL = {Mexma: dict(head_layers=2, head_heads=4, head_hidden=24, koleo_weight=0.5)}


def build(kind, dtype=torch.float64, shape=SHAPE, **changes):
    torch.manual_seed(0)
    shape = replace(shape, causal=kind.causal, head=kind.head, pool=kind.pool)
    return kind(Model(shape), kind.Config(**{**SMALL.get(kind, {}), **changes})).to(dtype)


def examples(kind, count=5, seed=0):
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(5, 60, rng.integers(2, 12)) for _ in range(kind.views)) for _ in range(count)]


def batch_of(objective, seed=0, items=None):
    return objective.collate(items or examples(type(objective)), np.random.default_rng(seed), objective.config, SPECIAL)


def flat(batch):
    for name, value in batch.items():
        yield from ((f"{name}.{key}", item) for key, item in vars(value).items() if key != "classes") if hasattr(value, "sees") else [(name, value)]


every = pytest.mark.parametrize("kind", OBJECTIVES, ids=lambda kind: kind.name)


# --------------------------------------------------------------------------------------------------------------------- promises

@every
def test_collate_depends_on_its_examples_and_generator_alone(kind):
    objective = build(kind)
    one, two, other = (dict(flat(batch_of(objective, seed))) for seed in (0, 0, 1))
    same = lambda a, b: all(torch.equal(a[name], b[name]) if torch.is_tensor(a[name]) else a[name] == b[name] for name in a if name in b)
    assert same(one, two)
    state = np.random.get_state()[1].copy(), torch.get_rng_state()
    assert (np.random.get_state()[1] == state[0]).all() and torch.equal(torch.get_rng_state(), state[1])
    if "mask" in " ".join(f.name for f in fields(kind.Config)):
        assert not (one["packed.tokens"].shape == other["packed.tokens"].shape and same(one, other))


@every
def test_one_step_gives_a_finite_loss_and_a_gradient_to_every_trainable_parameter(kind):
    objective = build(kind, torch.float32)
    loss, terms = objective(batch_of(objective))
    loss.backward()
    assert loss.shape == () and torch.isfinite(loss) and terms and all(term.shape == () and torch.isfinite(term) for term in terms.values())
    assert not any(term.requires_grad for term in terms.values())
    missing = [name for name, p in objective.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.abs().sum())]
    assert missing == []


@every
def test_forward_has_no_chance_but_dropout(kind):
    objective = build(kind)
    batch = batch_of(objective)
    assert torch.equal(objective(batch)[0], objective(batch)[0])


@every
def test_the_loss_of_a_row_does_not_depend_on_the_order_of_the_rows(kind):
    objective = build(kind)
    items = examples(kind)
    if any("mask" in f.name for f in fields(kind.Config)):
        return                                                           # the masks follow the order: the re-computations below cover these
    assert abs(objective(batch_of(objective, items=items))[0] - objective(batch_of(objective, items=items[::-1]))[0]) < 1e-12


@every
def test_every_field_of_a_config_has_its_help_beside_it(kind):
    for config in (kind.Config, ModelConfig, train.TrainConfig):
        told = train.comments(config)
        assert [f.name for f in fields(config) if len(told.get(f.name, "")) < 6] == []


@every
def test_half_precision_gives_the_same_loss_to_its_precision_and_computes_losses_in_float32(kind):
    objective = build(kind, torch.float32)
    batch = batch_of(objective)
    with torch.autocast("cpu", torch.bfloat16):
        half, _ = objective(batch)
    assert half.dtype == torch.float32 and abs(half - objective(batch)[0]) < 0.15


@every
def test_accumulated_token_losses_give_the_gradient_of_one_big_batch(kind):
    if kind.distinct:
        return                                                           # in-batch losses compare examples: parts are not a whole
    objective, items = build(kind), examples(kind, 8)
    parts = [batch_of(objective, i, items[i * 2:i * 2 + 2]) for i in range(4)]
    counts = [float(part["scored"][0]) for part in parts]
    assert len(set(counts)) > 1
    single = [torch.autograd.grad(objective(part)[0] * count / sum(counts), list(objective.parameters())) for part, count in zip(parts, counts)]
    for part in train.share_counts(parts, 1):
        (objective(part)[0] / 4).backward()
    for parameter, *grads in zip(objective.parameters(), *single):
        assert (parameter.grad - sum(grads)).abs().max() < 1e-12


# ----------------------------------------------------------------------------------------------------------------- golden numbers

def test_info_nce_has_the_golden_values_of_the_fact_sheet():
    x = torch.eye(16, 64, dtype=torch.float64)
    assert abs(info_nce(x, x, 0.07) - 30 * math.exp(-1 / 0.07)) < 1e-6 and info_nce(x, x, 0.07) < 1e-4
    assert abs(info_nce(x, x, 0.07, keep_self=True) - 0.6932) < 1e-4
    # All negatives at .45 and positives at .97: from that Gram matrix itself.
    gram = torch.full((32, 32), 0.45, dtype=torch.float64).fill_diagonal_(1)
    gram[range(16), range(16, 32)] = gram[range(16, 32), range(16)] = 0.97
    z = torch.linalg.cholesky(gram)
    assert abs(info_nce(z[:16], z[16:], 0.07) - 0.0177) < 1e-4
    assert abs(info_nce(z[:16], z[16:], 0.07, keep_self=True) - 0.9372) < 1e-4
    one = torch.ones(16, 8)
    assert abs(info_nce(one, one, 0.07) - math.log(31)) < 1e-5
    assert abs(info_nce(one, one, 0.07, keep_self=True) - math.log(32)) < 1e-5
    assert abs(info_nce(one[:4], one[:4], 0.07, within=False) - math.log(4)) < 1e-5


def test_koleo_has_its_closed_forms_and_duplicates_stay_finite():
    assert abs(koleo(torch.eye(2, 8)) + math.log(math.sqrt(2))) < 1e-5
    assert abs(koleo(torch.tensor([[1.0, 0], [-1, 0]])) + math.log(2)) < 1e-5
    for width, expected in ((1024, 14.9), (768, 15.1)):
        twins = torch.randn(1, width).repeat(2, 1).requires_grad_()
        value = koleo(twins)
        assert abs(value - expected) < 0.1
        value.backward()
        assert twins.grad.isfinite().all() and twins.grad.sum(0).abs().max() < 1e-2
    x = torch.randn(6, 5, dtype=torch.float64)
    assert abs(koleo(x) - koleo(10 * x)) < 1e-6
    assert abs(koleo(10 * x, normalise=False) - koleo(x, normalise=False) + math.log(10)) < 1e-6
    slow = [min(float((a - b).norm()) for j, b in enumerate(x) if j != i) for i, a in enumerate(x)]
    assert abs(koleo(x, normalise=False) + sum(map(math.log, slow)) / 6) < 1e-6


def test_mse_is_a_mean_over_items_and_dimensions():
    assert mse(torch.zeros(3, 4), torch.full((3, 4), 2.0)) == 4


def test_losses_are_computed_in_float32_from_half_precision():
    x = torch.randn(4, 8).bfloat16()
    assert koleo(x).dtype == info_nce(x, x, 0.1).dtype == mse(x, x).dtype == torch.float32


def test_an_untrained_mlm_costs_the_logarithm_of_the_vocabulary():
    objective = build(Mlm, torch.float32)
    assert abs(objective(batch_of(objective, items=examples(Mlm, 50)))[0] - math.log(60)) < 0.3


# -------------------------------------------------------------------------------- independent re-computations, padded, float64

def padded(rows):
    """Rows of ids -> (R, L) grid filled with 0, and (R, L) bool."""
    grid = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for i, one in enumerate(rows):
        grid[i, :len(one)] = torch.as_tensor(one)
    return grid, torch.arange(grid.shape[1]) < torch.tensor([len(one) for one in rows])[:, None]


def run_blocks(blocks, x, real, heads):
    """Post-norm BERT blocks on a padded grid (R, L, D), written from the textbook."""
    for b in blocks:
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in b.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~real[:, None, None], -1e30)
        x = b.norm1(x + b.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))
        x = b.norm2(x + b.down(F.gelu(b.up(x))))
    return x


def encode(model, rows):
    grid, real = padded(rows)
    x = model.norm(model.embed(grid) + model.place(torch.arange(grid.shape[1])))
    return run_blocks(model.blocks, x, real, model.config.heads), real


def rows_of(packed):
    return [one.tolist() for one in packed.tokens.split(packed.rows.diff().tolist())]


def slow_koleo(x):
    x = x / x.norm(dim=1, keepdim=True)
    near = (x @ x.T - 3 * torch.eye(len(x), dtype=x.dtype)).argmax(1)
    return -((x - x[near] + 1e-8).norm(dim=1) + 1e-8).log().mean()


def slow_mlm(objective, batch):
    x, real = encode(objective.model, rows_of(batch["packed"]))
    x = x[real][batch["labels"]]
    m = objective.model
    hidden = m.transform_norm(F.gelu(m.transform(x)))
    return F.cross_entropy(hidden @ m.embed.weight.T + m.vocabulary_bias, batch["targets"])


def slow_contrastive(objective, batch):
    x, _ = encode(objective.model, rows_of(batch["packed"]))
    z = F.normalize(x[:, 0])
    n, total = len(z) // 2, 0
    for i in range(2 * n):
        partner = (i + n) % (2 * n)
        others = [j for j in range(2 * n) if j != i]
        total += torch.logsumexp(torch.stack([z[i] @ z[j] / 0.07 for j in others]), 0) - z[i] @ z[partner] / 0.07
    return total / (2 * n)


def slow_mexma(objective, batch):
    """FACTS 4b, 4c: four padded encodes, the swap of position 0, the head without positions, averages of the two sides."""
    c, rows = objective.config, rows_of(batch["packed"])
    n = len(rows) // (4 if c.symmetrical else 2)
    groups = [encode(objective.model, rows[i * n:(i + 1) * n]) for i in range(len(rows) // n)]
    cls = [states[:, 0] for states, _ in groups]
    losses, offset = [], 0
    for side in range(2 if c.symmetrical else 1):
        states, real = groups[side]
        states = (states if c.token_gradients else states.detach()).clone()
        states[:, 0] = (cls[3] if side == 0 else cls[2]) if c.symmetrical else cls[1]
        out = run_blocks(objective.unmask, states, real, c.head_heads)[real]
        mine = slice(sum(batch["sides"][:side]), sum(batch["sides"][:side + 1]))
        logits = out[batch["labels"][mine] - offset] @ objective.model.embed.weight.T + objective.vocabulary_bias
        losses.append(F.cross_entropy(logits, batch["targets"][mine]))
        offset += int(real.sum())
    clean = cls[2:] if c.symmetrical else cls
    pair = (cls[0], clean[1]) if c.align_views == "dirty" else clean
    align = {"mse": ((pair[0] - pair[1]) ** 2).mean(), "none": 0 * clean[0].sum()}.get(c.align)
    align = info_nce(*pair, c.temperature) if align is None else align
    spread = (slow_koleo(clean[0]) + slow_koleo(clean[1])) / 2
    return c.align_weight * align + c.mlm_weight * sum(losses) / len(losses) + c.koleo_weight * spread


VARIANTS = [(Mlm, slow_mlm, {}), (Contrastive, slow_contrastive, {})] + [(Mexma, slow_mexma, changes) for changes in (
    {}, dict(align_weight=3.0, mlm_weight=0.7), dict(token_gradients=False), dict(koleo_weight=0.0), dict(align_views="dirty"), dict(align="info_nce"),
    dict(symmetrical=False, align_views="dirty"), dict(symmetrical=False, align="none"), dict(mask_first=0.8, mask_second=0.1))]


@pytest.mark.parametrize("kind, slow, changes", VARIANTS, ids=[f"{k.name} {c}" for k, _, c in VARIANTS])
def test_the_loss_and_its_gradients_equal_a_plain_padded_recomputation(kind, slow, changes):
    for seed in range(2):
        objective = build(kind, **changes)
        for parameter in objective.parameters():
            torch.nn.init.normal_(parameter, std=0.3)                    # not the tame initial weights
        batch = batch_of(objective, seed, examples(kind, 5, seed))
        results = []
        for loss in (objective(batch)[0], slow(objective, batch)):
            grads = torch.autograd.grad(loss, list(objective.parameters()), allow_unused=True)
            results.append([loss] + [torch.zeros(1) if grad is None else grad for grad in grads])
        for ours, expected in zip(*results):
            assert (ours - expected).abs().max() <= 1e-10 * max(1, float(expected.detach().abs().max()))


# --------------------------------------------------------------------------------------------------------------------- mexma

def unmasking(objective, packed, batch):
    states = objective.model(packed)
    vectors = objective.model.pool(states, packed)
    clean_a, clean_b = vectors.chunk(4)[2:]
    return objective.unmask_logits(states[:len(batch["head"].tokens)], torch.cat([clean_b, clean_a]), batch).split(batch["sides"])


def test_unmasking_a_language_uses_the_clean_text_of_the_other_and_never_its_own():
    objective = build(Mexma, torch.float32)
    batch = batch_of(objective)
    packed, n = batch["packed"], len(batch["packed"]) // 4
    before = unmasking(objective, packed, batch)
    for group, changed in ((2, 1), (3, 0)):                              # clean A moves B's logits alone; clean B moves A's
        tokens = packed.tokens.clone()
        for row in range(group * n, (group + 1) * n):
            tokens[packed.rows[row] + 1] = 5 + (tokens[packed.rows[row] + 1] - 4) % 55
        after = unmasking(objective, replace(packed, tokens=tokens), batch)
        assert torch.equal(before[1 - changed], after[1 - changed])
        assert not (before[changed] == after[changed]).all(1).any()


def test_the_target_tokens_of_mexma_are_not_in_its_corrupted_rows():
    objective = build(Mexma, mask_first=0.5)
    batch = batch_of(objective, items=examples(Mexma, 400))
    seen = batch["packed"].tokens[batch["labels"]]
    kept = (seen == batch["targets"]).float().mean()
    assert abs((seen == SPECIAL.mask).float().mean() - 0.8) < 0.03 and abs(kept - 0.1) < 0.03
    assert not np.isin(batch["targets"].numpy(), SPECIAL.ids).any()


def test_the_two_sides_of_mexma_draw_their_own_masks():
    objective = build(Mexma)
    same = [(np.arange(5, 25), np.arange(5, 25)) for _ in range(20)]
    batch = batch_of(objective, items=same)
    first, second = batch["labels"].split(batch["sides"])
    assert first.tolist() != (second - len(batch["head"].tokens) // 2).tolist()


def test_without_token_gradients_only_the_sentence_vector_teaches_the_encoder():
    objective = build(Mexma, token_gradients=False, align="none", koleo_weight=0.0)
    batch = batch_of(objective)
    states = objective.model(batch["packed"])
    states.retain_grad()
    objective.model.forward = lambda packed: states
    objective(batch)[0].backward()
    n, packed = len(batch["packed"]) // 4, batch["packed"]
    moved = states.grad.abs().sum(1) > 0
    firsts = packed.rows[2 * n:-1].long()
    assert moved[firsts].all() and moved.sum() == len(firsts)            # the clean [CLS] positions and nothing else


def test_every_token_teaches_the_encoder_by_default():
    objective = build(Mexma, align="none", koleo_weight=0.0)
    batch = batch_of(objective)
    states = objective.model(batch["packed"])
    states.retain_grad()
    objective.model.forward = lambda packed: states
    objective(batch)[0].backward()
    masked = batch["packed"].rows[len(batch["packed"]) // 2]
    inner = torch.ones(int(masked), dtype=torch.bool)
    inner[batch["head"].rows[:-1].long()] = False                        # position 0 was replaced
    assert (states.grad[:masked][inner].abs().sum(1) > 0).all()


def test_one_side_without_a_mask_still_trains_and_none_is_refused():
    objective = build(Mexma, mask_second=0.0)
    loss, _ = objective(batch_of(objective))
    assert torch.isfinite(loss)
    with pytest.raises(BadInput, match="mask_first is 0"):
        Mexma.Config(mask_first=0.0)


@pytest.mark.parametrize("kind, changes, message", [
    (Mexma, dict(align="l1"), "align is 'l1'"), (Mexma, dict(koleo_weight=-1), "koleo_weight is -1"), (Mexma, dict(mask_first=1.5), "mask_first"),
    (Mexma, dict(symmetrical=False), "align-views dirty"), (Contrastive, dict(temperature=0), "temperature"), (Mlm, dict(mask_ratio=-0.1), "mask_ratio")])
def test_a_config_that_cannot_work_is_refused(kind, changes, message):
    with pytest.raises(BadInput, match=message):
        kind.Config(**changes)


def test_raw_koleo_and_mean_pooling_are_really_used():
    default = build(Mexma)
    batch = batch_of(default)
    assert abs(default(batch)[0] - build(Mexma, koleo_input="raw")(batch)[0]) > 1e-6
    assert abs(default(batch)[0] - build_mean()(batch)[0]) > 1e-6


def build_mean():
    objective = build(Mexma)
    objective.model.config = replace(objective.model.config, pool="mean")
    return objective
