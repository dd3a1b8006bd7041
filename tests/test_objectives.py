"""Promises of every objective, no leakage, golden numbers, statistics of what is drawn, and each
loss with its gradients against a plain padded re-computation in float64."""

import math
from dataclasses import asdict, fields, replace
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import data
import objectives
import train
from model import SIZES, Model, ModelConfig, each_tensor
from objectives import (
    IN_BATCH,
    MEXMA,
    OBJECTIVES,
    Align,
    Bepa,
    Contrastive,
    Hybrid,
    LlmJepa,
    Mexma,
    Mlm,
    Ntp,
    align,
    draw_blocks,
    info_nce,
    koleo,
)

IDS = np.array([0, 1, 2, 3, 4, 57, 58, 59])
SPECIAL = data.Special(0, 2, 3, 4, (57, 58, 59), 60, IDS, np.arange(60) % 3 != 0)
SHAPE = ModelConfig(vocab=60, width=16, layers=2, heads=2, ffn_dim=32, max_positions=64, dropout=0)
LLAMA = dict(norm="rmsnorm", norm_position="pre", activation="swiglu", bias=False)
SMALL = {Mexma: dict(head_layers=2, head_heads=4, head_hidden=24, koleo_weight=0.5),
         Hybrid: dict(predictor_width=12, predictor_layers=2, predictor_heads=3, predictor_std=0.0,
                      min_keep=2)}


def build(kind, dtype=torch.float64, shape=SHAPE, **changes):
    torch.manual_seed(0)
    config = kind.Config(**{**SMALL.get(kind, {}), **changes})
    shape = replace(shape, causal=kind.causal, head=kind.model_head(config), pool=kind.pool)
    return kind(Model(shape), config).to(dtype)


def examples(kind, count=5, seed=0, system=False):
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        texts = [rng.integers(5, 57, rng.integers(2, 12)) for _ in range(kind.views + system)]
        made.append(data.Example(texts, cut=[len(ids) % 3 == 0 for ids in texts]))
    return made


def batch_of(objective, seed=0, items=None):
    items = items or examples(type(objective))
    return objective.collate(items, np.random.default_rng(seed), objective.config, SPECIAL)


def gradients(loss, objective):
    """Of every trainable parameter, zeros where the loss does not reach it."""
    trained = [p for p in objective.parameters() if p.requires_grad]
    return torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)


every = pytest.mark.parametrize("kind", OBJECTIVES.values(), ids=list(OBJECTIVES))


# ---- promises


@every
def test_collate_depends_on_its_examples_and_generator_alone(kind):
    objective = build(kind)
    before = (np.random.get_state()[1].copy(), torch.get_rng_state())
    one, two, other = (each_tensor(batch_of(objective, seed), torch.Tensor.tolist)
                       for seed in (0, 0, 1))
    assert one == two
    assert (np.random.get_state()[1] == before[0]).all()
    assert torch.equal(torch.get_rng_state(), before[1])
    if any("mask" in field.name for field in fields(kind.Config)):
        assert one["packed"].tokens != other["packed"].tokens


@every
def test_one_step_gives_a_finite_loss_and_a_gradient_to_every_trainable_parameter(kind):
    objective = build(kind, torch.float32)
    loss, terms = objective(batch_of(objective))
    loss.backward()
    assert loss.shape == () and loss.isfinite() and terms
    assert all(term.shape == () and term.isfinite() for term in terms.values())
    assert not any(term.requires_grad for term in terms.values())
    missing = [name for name, p in objective.named_parameters()
               if p.requires_grad and (p.grad is None or not p.grad.abs().sum())]
    assert missing == []


@every
def test_half_precision_gives_the_same_loss_to_its_precision(kind):
    objective = build(kind, torch.float32)
    batch = batch_of(objective)
    with torch.autocast("cpu", torch.bfloat16):
        half, _ = objective(batch)
    assert half.dtype == torch.float32 and abs(half - objective(batch)[0]) < 0.15


FIXED = dict(balance="fixed")


@pytest.mark.parametrize("kind, changes, which", [
    (Mlm, {}, 0), (Ntp, {}, 0), (Hybrid, FIXED | dict(balance_start=0.0), 0),
    (Hybrid, FIXED | dict(balance_start=1.0), 1)])
def test_accumulated_token_losses_give_the_gradient_of_one_big_batch(kind, changes, which):
    objective, items = build(kind, **changes), examples(kind, 8)
    parts = [batch_of(objective, i, items[i * 2:i * 2 + 2]) for i in range(4)]
    counts = [float(part["num_targets"][which]) for part in parts]
    assert len(set(counts)) > 1
    whole = sum(objective(part)[0] * count for part, count in zip(parts, counts)) / sum(counts)
    shared = sum(objective(part)[0] for part in train.share_counts(parts, 1)) / 4
    for one, other in zip(gradients(shared, objective), gradients(whole, objective)):
        assert (one - other).abs().max() < 1e-8


def defaults(kind, preset=None):
    named = kind.presets[preset][0] if preset else {}
    return {field.name: field.default for field in fields(kind.Config)} | kind.paper | named


PUBLISHED = [
    (Mexma, "A.3", dict(steps=300_000, batch=300, accumulate=2)),  # of 8 GPUs, 150 at a time
    (Mexma, "A.5", dict(max_length=200, mask_first=0.4, mask_second=0.4, lr_start=0.1)),
    (Mexma, "A.2, A.4", dict(head_layers=6, align_weight=1, mlm_weight=1, koleo_weight=0.01)),
    (Mexma, "code", dict(koleo_input="unit", head_heads=8, clip=1.2, weight_decay=0)),
    (Mexma, "sec. 5.2", dict(within=False)),
    (Contrastive, "MEXMA, sec. 5.2", dict(MEXMA, within=False, batch=1200)),
    (Bepa, "A.3", dict(batch=16, lr=2e-5, weight_decay=0.01, max_length=(256 - 4) / 2,
                       align_weight=1, mask_ratio=0.15, steps=87_500, warmup=500 / 87_500)),
    (Hybrid, "table 1", dict(lr=5e-5, batch=64, weight_decay=0.05, momentum=0.996, min_keep=32,
                             target_low=0.1, target_high=0.25, target_blocks=2)),
    (Hybrid, "sec. 4.1", dict(max_length=512, predictor_layers=6, predictor_width=512)),
    (Hybrid, "code", dict(predictor_std=0.02, predictor_heads=8, clip=0)),
    (Mlm, "BERT, A.2", dict(batch=256, lr=1e-4, max_length=512 - 2, mask_ratio=0.15)),
    (LlmJepa, "code", dict(max_length=512, batch=128, steps=248, warmup=0, clip=1)),
    (LlmJepa, "table 12", dict(lr=2e-5, jepa_weight=1, predictors=1, gamma=1)),
    ((LlmJepa, "scratch"), "table 2", dict(lr=8e-5, jepa_weight=2, predictors=3)),
    ((Ntp, "scratch"), "table 2", dict(lr=8e-5)),
    ((Mlm, "hybrid"), "Predict and Reconstruct, 4.1", dict(Hybrid.paper, regressor=True)),
    ("hybrid", "the size: sec. 4.1", dict(width=512, layers=6, heads=8, norm_position="pre",
                                          positions="sinusoidal", dropout=0.0))]


@pytest.mark.parametrize("kind, section, values", PUBLISHED, ids=str)
def test_a_default_is_what_the_paper_says(kind, section, values):
    if isinstance(kind, str):
        found = asdict(ModelConfig()) | SIZES[kind]
    else:
        found = defaults(*kind) if isinstance(kind, tuple) else defaults(kind)
    assert {name: found[name] for name in values} == values


def test_in_batch_says_whether_examples_are_compared():
    found = {kind.name for kind in OBJECTIVES.values() if kind.in_batch(kind.Config())}
    assert found == {"contrastive", "mexma", "bepa"}  # of mexma, by KoLeo
    for kind, changes in ((Mexma, dict(koleo_weight=0.0)), (Bepa, {}), (LlmJepa, {})):
        configs = {name: kind.Config(align=name, **changes) for name in get_args(Align)}
        assert {name for name in configs if kind.in_batch(configs[name])} == set(IN_BATCH)


# ---- golden numbers


def test_info_nce_has_the_golden_values_of_the_fact_sheet():
    x, one = torch.eye(16, 64, dtype=torch.float64), torch.ones(16, 8)
    assert abs(info_nce(x, x, 0.07) - 30 * math.exp(-1 / 0.07)) < 1e-6
    assert abs(info_nce(x, x, 0.07, keep_self=True) - 0.6932) < 1e-4
    assert abs(info_nce(one, one, 0.07) - math.log(31)) < 1e-5
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


@pytest.mark.parametrize("kind", get_args(Align))
def test_neither_autocast_nor_half_inputs_take_a_loss_to_half_precision(kind):
    x, y = torch.randn(2, 6, 5)
    with torch.autocast("cpu", torch.bfloat16):
        inside, spread = align(kind, x, y), koleo(x)
    assert torch.equal(inside, align(kind, x, y)) and torch.equal(spread, koleo(x))
    assert align(kind, x.bfloat16(), y.bfloat16()).dtype == torch.float32
    assert koleo(x.bfloat16()).dtype == torch.float32


# ---- independent re-computations: padded, float64, from the textbook


def padded(rows):
    """Rows of ids -> (R, L) grid filled with 0, and (R, L) bool."""
    grid = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for i, one in enumerate(rows):
        grid[i, :len(one)] = torch.as_tensor(one)
    return grid, torch.arange(grid.shape[1]) < torch.tensor([len(one) for one in rows])[:, None]


def run_blocks(blocks, x, real, heads, causal=False, pre=False):
    """BERT blocks, post-norm or pre-norm, on a padded grid (R, L, D)."""
    for b in blocks:
        qkv = b.attention.qkv(b.norm1(x) if pre else x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~real[:, None, None], -1e30)
        if causal:
            ahead = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
            scores = scores.masked_fill(ahead, -1e30)
        attended = b.attention.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        if pre:
            x = x + attended
            x = x + b.mlp.down(F.gelu(b.mlp.up(b.norm2(x))))
        else:
            x = b.norm1(x + attended)
            x = b.norm2(x + b.mlp.down(F.gelu(b.mlp.up(x))))
    return x


def encode(model, rows, positions=None):
    """Rows of ids -> states (R, L, D) and which of them are real; causal if the model is."""
    grid, real = padded(rows)
    places = torch.arange(grid.shape[1]) if positions is None else padded(positions)[0]
    x = model.embed_norm(model.embed(grid) + model.position_embedding(places))
    return run_blocks(model.blocks, x, real, model.config.heads, model.config.causal), real


def rows_of(packed):
    return [one.tolist() for one in packed.tokens.split(packed.cu_seqlens.diff().tolist())]


def slow_koleo(x, kind):
    x = x / x.norm(dim=1, keepdim=True) if kind == "unit" else x
    far = 1e9 * torch.eye(len(x), dtype=x.dtype)
    near = ((x[:, None] - x).norm(dim=2) + far).argmin(1)
    return -((x - x[near] + 1e-8).norm(dim=1) + 1e-8).log().mean()


def words(objective, states):
    """BERT's vocabulary head, or W2 LN(GELU(W1 z))."""
    model, own = objective.model, getattr(objective, "regressor", None)
    if own is not None:
        x = F.gelu(states @ own.transform.weight.T + own.transform.bias)
        x = F.layer_norm(x, x.shape[-1:], own.norm.weight, own.norm.bias)
        return x @ own.vocabulary.weight.T + own.vocabulary.bias
    hidden = model.transform_norm(F.gelu(model.transform(states)))
    return hidden @ model.embed.weight.T + model.vocabulary_bias


def slow_mlm(objective, batch, items):
    x, real = encode(objective.model, rows_of(batch["packed"]))
    logits = words(objective, x[real][batch["target_positions"]])
    return F.cross_entropy(logits, batch["targets"])


def slow_contrastive(objective, batch, items):
    x, _ = encode(objective.model, rows_of(batch["packed"]))
    return slow_info_nce(*x[:, 0].chunk(2), within=objective.config.within)


def slow_mexma(objective, batch, items):
    c, rows, sides = objective.config, rows_of(batch["packed"]), batch["targets_per_side"]
    n = len(rows) // (4 if c.symmetrical else 2)
    groups = [encode(objective.model, rows[i * n:(i + 1) * n]) for i in range(len(rows) // n)]
    cls = [states[:, 0] for states, _ in groups]
    others = [cls[3], cls[2]] if c.symmetrical else [cls[1]]
    losses, offset = [], 0
    positions, targets = (batch[key].split(sides) for key in ("target_positions", "targets"))
    for (states, real), other, where, wanted in zip(groups, others, positions, targets):
        states = (states if c.token_gradients else states.detach()).clone()
        states[:, 0] = other
        out = run_blocks(objective.unmask, states, real, c.head_heads)[real]
        logits = out[where - offset] @ objective.model.embed.weight.T + objective.vocabulary_bias
        losses.append(F.cross_entropy(logits, wanted))
        offset += int(real.sum())
    a, b = cls[-2:]
    first = cls[0] if c.align_views == "dirty" else a
    options = dict(within=c.within) if c.align == "info_nce" else {}
    return (c.align_weight * slow_align(c.align, first, b, batch["seed"], **options)
            + c.mlm_weight * sum(losses) / len(losses)
            + c.koleo_weight * (slow_koleo(a, c.koleo_input) + slow_koleo(b, c.koleo_input)) / 2)


def slow_info_nce(x, y, temperature=0.07, within=True, keep_self=False, both=True):
    n = len(x)
    if not both:
        scores = F.normalize(x) @ F.normalize(y).T / temperature
        return sum(scores[i].logsumexp(0) - scores[i, i] for i in range(n)) / n
    if not within:  # the symmetric cross-entropy: of x among all y, and of y among all x
        return (slow_info_nce(x, y, both=False) + slow_info_nce(y, x, both=False)) / 2
    z, total = F.normalize(torch.cat([x, y])), 0
    for i in range(2 * n):
        others = [z[i] @ z[j] / temperature for j in range(2 * n) if j != i or keep_self]
        total = total + torch.stack(others).logsumexp(0) - z[i] @ z[(i + n) % (2 * n)] / temperature
    return total / (2 * n)


def slow_vicreg(x, y):
    d, covariance, hinge = x.shape[1], 0, 0
    for z in (x, y):
        squares = torch.cov(z.T) ** 2
        covariance = covariance + (squares.sum() - squares.trace()) / d
        for i in range(d):
            hinge = hinge + torch.relu(1 - torch.sqrt(z[:, i].var() + 1e-4)) / d / 2
    return 25 * ((x - y) ** 2).mean() + 25 * hinge + covariance


def slow_barlow(x, y):
    a, b = ((z - z.mean(0)) / (z.std(0, unbiased=False) + 1e-6) for z in (x, y))
    total = 0
    for i in range(x.shape[1]):
        for j in range(x.shape[1]):
            c = (a[:, i] * b[:, j]).mean()
            total = total + ((1 - c) ** 2 if i == j else 0.005 * c ** 2)
    return total


def slow_sigreg(x, y, seed):
    chance = torch.Generator().manual_seed(seed)
    directions = torch.randn(x.shape[1], 256, generator=chance, dtype=torch.float64)
    t, total = torch.linspace(0, 3, 17, dtype=torch.float64), 0
    for z in (x, y):
        waves = torch.exp(1j * (z @ F.normalize(directions, dim=0))[..., None] * t).mean(0)
        error = (waves - torch.exp(-t ** 2 / 2)).abs() ** 2
        total = total + len(z) * torch.trapezoid(error * torch.exp(-t ** 2 / 2), t).mean()
    return 0.95 * ((x - y) ** 2).mean() + 0.05 * total


def slow_align(kind, x, y, seed, **options):
    if kind == "info_nce":
        return slow_info_nce(x, y, **options)
    if kind == "sigreg":
        return slow_sigreg(x, y, seed)
    far = (x - y).abs()
    return {"cosine": (1 - (x * y).sum(1) / x.norm(dim=1) / y.norm(dim=1)).mean(),
            "mse": (far ** 2).mean(), "l2": (far ** 2).sum(1).sqrt().mean(),
            "mse_unit": ((F.normalize(x) - F.normalize(y)) ** 2).mean(),
            "smooth_l1": torch.where(far < 1, far ** 2 / 2, far - 0.5).mean(),
            "vicreg": slow_vicreg(x, y), "barlow": slow_barlow(x, y), "none": 0 * x.sum()}[kind]


def slow_bepa(objective, batch, items):
    c, rows, model = objective.config, rows_of(batch["packed"]), objective.model
    n = len(batch["cls_index"]) // 2
    states, real = encode(model, rows[:-2 * n])
    logits = words(objective, states[real][batch["target_positions"]])
    mlm = F.cross_entropy(logits, batch["targets"])
    firsts, seconds = rows[-2 * n:-n], rows[-n:]
    x = encode(model, firsts)[0][:, 0]
    if c.cls_view == "masked":  # CLS_2 stands behind [CLS] T1 [SEP]
        second, _ = encode(model, seconds)
        places = [one.index(SPECIAL.cls, 1) for one in seconds]
        y = torch.stack([second[i, place] for i, place in enumerate(places)])
    else:
        shift = [len(one) if c.cls_view == "hidden" else 0 for one in firsts]
        positions = [list(range(s, s + len(one))) for s, one in zip(shift, seconds)]
        y = encode(model, seconds, positions)[0][:, 0]
    options = dict(keep_self=c.keep_self) if c.align == "info_nce" else {}
    aligned = slow_align(c.align, objective.predictor(x), y, batch["seed"], **options)
    return mlm + c.align_weight * aligned


def prompts_of(items):
    """[CLS] (system [SEP]) text [SEP] of every example."""
    cls, sep = SPECIAL.cls, SPECIAL.sep
    return [[cls, *(one for text in (*start, text) for one in (*text, sep))]
            for text, _, *start in items]


def slow_ntp(objective, batch, items):
    prompts = prompts_of(items)
    rows = [[*prompt, *item[1], SPECIAL.sep] for prompt, item in zip(prompts, items)]
    states, _ = encode(objective.model, [one[:-1] for one in rows])
    logits, losses = states @ objective.model.embed.weight.T, []
    for i, (prompt, one) in enumerate(zip(prompts, rows)):
        first = len(prompt) - 1 if objective.config.labels == "answer" else 0
        # The last of a whole answer predicts the stop token.
        stops = objective.config.labels != "all" and not items[i].cut[1]
        wanted = range(first, len(one) - 2 + stops)
        losses += [F.cross_entropy(logits[i, j], torch.tensor(one[j + 1])) for j in wanted]
    return sum(losses) / len(losses)


def slow_llm_jepa(objective, batch, items):
    c, vectors = objective.config, []
    marks = list(SPECIAL.preds[:c.predictors])
    for side in (0, 1):
        rows = []
        for item in items:
            one = [int(token) for token in item[side]]
            if side == c.reverse:
                one = one + marks[::-1] if c.pred_position == "append" else marks + one
            start = [SPECIAL.cls, *item[2], SPECIAL.sep] if len(item) > 2 else [SPECIAL.cls]
            rows.append(start + one + [SPECIAL.sep] * c.view_end)
        states, _ = encode(objective.model, rows)
        vectors.append(torch.stack([states[i, len(one) - 1] for i, one in enumerate(rows)]))
    source, target = vectors[::-1] if c.reverse else vectors
    options = dict(both=False) if c.align == "info_nce" else {}
    jepa = slow_align(c.align, source, target, batch["seed"], **options)
    return c.gamma * slow_ntp(objective, batch, items) + c.jepa_weight * jepa


def slow_predictor(objective, context, context_at, block_at):
    """One block of one row: context states (n, D) and positions -> predicted states (k, D)."""
    masks = objective.mask_token.expand(len(block_at), -1)
    x = torch.cat([objective.predictor_embed(context), masks])
    place, d = torch.tensor([*context_at, *block_at])[:, None], x.shape[1]
    angle = place / 10000 ** (torch.arange(d).double() // 2 * 2 / d)
    x = x + torch.where(torch.arange(d) % 2 == 0, angle.sin(), angle.cos())
    real, heads = torch.ones(1, len(x), dtype=torch.bool), objective.config.predictor_heads
    x = run_blocks(objective.predictor, x[None], real, heads, pre=True)[0]
    return objective.predictor_proj(objective.predictor_norm(x[-len(block_at):]))


def slow_hybrid(objective, batch, items):
    c, model = objective.config, objective.model
    clean, rows = rows_of(batch["clean"]), rows_of(batch["packed"])
    n = len(clean)
    states, real = encode(model, rows[:n])
    logits = words(objective, states[real][batch["target_positions"]])
    mlm = F.cross_entropy(logits, batch["targets"])
    packed, predict = batch["packed"], batch["predict"]
    places = [one.tolist() for one in packed.positions.split(packed.cu_seqlens.diff().tolist())[n:]]
    contexts, _ = encode(model, rows[n:], places)
    teacher, _ = encode(objective.teacher.model, clean)
    starts, guesses, goals, index = batch["clean"].cu_seqlens.tolist(), [], [], []
    for number, where in enumerate(predict.positions.split(predict.cu_seqlens.diff().tolist())):
        i = number // c.target_blocks
        block = where[len(places[i]):].tolist()
        context = contexts[i, :len(places[i])]
        guesses.append(slow_predictor(objective, context, places[i], block))
        goals.append(teacher[i, block].detach())
        index += [starts[i] + place for place in block]
    assert batch["target_index"].tolist() == index
    guesses, goals = torch.cat(guesses), torch.cat(goals)
    if c.teacher_norm:
        spread = goals.var(-1, unbiased=False, keepdim=True)
        goals = (goals - goals.mean(-1, keepdim=True)) / torch.sqrt(spread + 1e-5)
    latent = slow_align(c.align, guesses, goals, 0)
    if c.balance == "uncertainty":
        s = objective.log_variance
        return torch.exp(-s[0]) * latent + torch.exp(-s[1]) * mlm + s[0] + s[1]
    share = c.balance_start
    if c.balance == "learned":
        share = torch.sigmoid(objective.balance)
    if c.balance == "scheduled":
        share += float(objective.progress) * (c.balance_end - c.balance_start)
    return share * latent + (1 - share) * mlm


VARIANTS = {
    (Mlm, slow_mlm): [{}, dict(regressor=True)],
    (Contrastive, slow_contrastive): [{}, dict(within=True)],
    (Mexma, slow_mexma): [
        {}, dict(align_weight=3.0, mlm_weight=0.7), dict(token_gradients=False),
        dict(koleo_weight=0.0), dict(align_views="dirty"), dict(align="info_nce"),
        dict(align="info_nce", within=True), dict(koleo_input="raw"), dict(masking="word"),
        dict(symmetrical=False, align_views="dirty"), dict(symmetrical=False, align="none"),
        dict(mask_first=0.8, mask_second=0.1)],
    (Bepa, slow_bepa): [
        {}, dict(keep_self=True), dict(packing="monolingual"), dict(packing="separate"),
        dict(cls_view="masked"), dict(cls_view="clean", align="vicreg"),
        dict(predictor="linear", align="cosine"), dict(align="mse_unit"),
        dict(predictor="mlp", align="sigreg", align_weight=0.3), dict(masking="span")],
    (Ntp, slow_ntp): [{}, dict(labels="all"), dict(labels="all-stop")],
    (LlmJepa, slow_llm_jepa): [
        {}, dict(predictors=0), dict(predictors=3, reverse=True),
        dict(pred_position="prepend", predictors=2), dict(mode="two-row", labels="all"),
        dict(mode="three-row", align="info_nce"), dict(align="l2", gamma=0.5, jepa_weight=2.0),
        dict(view_end=True, labels="all-stop")],
    (Hybrid, slow_hybrid): [
        {}, dict(teacher_norm=True, align="smooth_l1"), dict(align="vicreg", balance="fixed"),
        dict(align="barlow", balance="uncertainty"),
        dict(align="mse", balance="scheduled", balance_end=1.0),
        dict(allow_overlap=True, masking="word"), dict(target_blocks=3, masking="span"),
        dict(mask_special=True)],
}
CASES = [(*pair, changes) for pair, several in VARIANTS.items() for changes in several]


@pytest.mark.parametrize("kind, slow, changes", CASES, ids=[f"{k.name} {c}" for k, _, c in CASES])
def test_the_loss_and_its_gradients_equal_a_plain_padded_recomputation(kind, slow, changes):
    for seed in range(2):
        objective = build(kind, **changes)
        items = examples(kind, 5, seed, system=kind.causal and seed == 1)
        for parameter in objective.parameters():
            torch.nn.init.normal_(parameter, std=0.3)  # not tame, and a teacher of its own
        progress = 0.25 + 0.5 * seed
        objective.after_step(progress)
        assert getattr(objective, "progress", progress) == progress
        batch, results = batch_of(objective, seed, items), []
        for loss in (objective(batch)[0], slow(objective, batch, items)):
            results.append([loss, *gradients(loss, objective)])
        for ours, expected in zip(*results):
            assert (ours - expected).abs().max() <= 1e-10 * max(1, expected.detach().abs().max())


# ---- mexma


def unmasking(objective, packed, batch):
    states = objective.model(packed)
    a, b = objective.model.pool(states, packed).chunk(4)[2:]
    hidden = objective.unmasked(states, torch.cat([b, a]), batch)
    return hidden.split(batch["targets_per_side"])


def test_unmasking_a_language_uses_the_clean_text_of_the_other_and_never_its_own():
    objective = build(Mexma, torch.float32)
    batch = batch_of(objective)
    packed, n = batch["packed"], len(batch["packed"]) // 4
    before = unmasking(objective, packed, batch)
    for group, moves in ((2, 1), (3, 0)):  # clean A moves B's states alone; clean B moves A's
        tokens = packed.tokens.clone()
        second = packed.cu_seqlens[group * n:(group + 1) * n].long() + 1
        tokens[second] = 5 + (tokens[second] - 4) % 55
        after = unmasking(objective, replace(packed, tokens=tokens), batch)
        assert torch.equal(before[1 - moves], after[1 - moves])
        assert not (before[moves] == after[moves]).all(1).any()


@pytest.mark.parametrize("unmasked", ["mask_first", "mask_second"])
def test_one_side_without_a_mask_still_trains(unmasked):
    objective = build(Mexma, **{unmasked: 0.0})
    assert objective(batch_of(objective))[0].isfinite()


def test_koleo_is_of_the_vectors_of_a_process(monkeypatch):
    objective = build(Mexma)
    batch = batch_of(objective)
    alone = objective(batch)[1]["koleo"]
    # Another process has nearly the same vectors.
    monkeypatch.setattr(objectives, "all_gather_with_grad", lambda x: torch.cat([x, 1.001 * x]))
    assert objective(batch)[1]["koleo"] == alone


# ---- bepa


def moved(objective, batch, changed):
    """(T,) bool: which states of the line change when the token at index `changed` does."""
    packed = batch["packed"]
    tokens = packed.tokens.clone()
    tokens[changed] = 5 + (tokens[changed] - 4) % 50
    return (objective.model(packed) != objective.model(replace(packed, tokens=tokens))).any(1)


@pytest.mark.parametrize("view", ["hidden", "clean"])
def test_bepas_sentence_vector_never_sees_the_other_sentence(view):
    objective = build(Bepa, torch.float32, cls_view=view)
    batch = batch_of(objective)
    starts, rows = batch["packed"].cu_seqlens.tolist(), len(batch["packed"])
    for own in range(rows - len(batch["cls_index"]), rows):
        expected = torch.zeros(starts[-1], dtype=torch.bool)
        expected[starts[own]:starts[own + 1]] = True
        assert torch.equal(moved(objective, batch, starts[own] + 1), expected)
    touched = moved(objective, batch, starts[1] - 2)  # the masked row sees both sentences
    assert touched[:starts[1]].all() and not touched[starts[1]:].any()


def test_bepas_masked_view_hides_all_of_the_other_sentence():
    row = rows_of(batch_of(build(Bepa, cls_view="masked", order="given"))["packed"])[5]
    a, b = examples(Bepa)[0]
    assert row == [SPECIAL.cls, *a, SPECIAL.sep] + [SPECIAL.mask] * (len(b) + 2)


@pytest.mark.parametrize("order, low, high", [("given", 1, 1), ("random", 0.42, 0.6)])
def test_bepas_order_puts_either_sentence_first_and_given_keeps_the_columns(order, low, high):
    items = examples(Bepa, 400)
    rows = rows_of(batch_of(build(Bepa, order=order, mask_ratio=0.0), items=items)["packed"])
    assert low <= np.mean([one[1] == pair[0][0] for one, pair in zip(rows, items)]) <= high


def test_monolingual_rows_are_of_one_language_and_the_columns_matter_to_them_alone():
    rng = np.random.default_rng(0)
    items = []
    for _ in range(64):  # a language has ids of its own: 5 to 14, 15 to 24, ...
        columns = rng.choice(5, 2, replace=False)
        views = [rng.integers(5 + 10 * one, 15 + 10 * one, 4) for one in columns]
        items.append(data.Example(views, columns))
    lengths = []
    for row in rows_of(batch_of(build(Bepa, packing="monolingual", mask_ratio=0.0), 0, items)
                       ["packed"])[:-128]:
        words = [(token - 5) // 10 for token in row if token > 4]
        assert len(set(words)) == 1
        lengths.append(len(words))
    assert sum(lengths) == 128 * 4 and lengths.count(4) <= 5 and set(lengths) <= {4, 8}
    for packing in ("bilingual", "separate"):
        objective = build(Bepa, packing=packing)
        swapped = [data.Example(one, one.columns[::-1]) for one in items]
        found = [batch_of(objective, 0, some)["packed"].tokens for some in (items, swapped)]
        assert torch.equal(*found)


# ---- next-token prediction and llm-jepa


@pytest.mark.parametrize("changes, positions, system", [
    (dict(predictors=0), "learned", True), (dict(predictors=1, reverse=True), "rotary", False),
    (dict(predictors=3), "rotary", True), (dict(predictors=3, view_end=True), "learned", False),
    (dict(predictors=3, pred_position="prepend"), "rotary", True),
    (dict(predictors=1, pred_position="prepend", reverse=True, view_end=True), "learned", True)])
def test_one_forward_two_rows_and_three_rows_are_equal_in_loss_and_gradient(
        changes, positions, system):
    results, tokens = [], []
    shape = replace(SHAPE, positions=positions, **LLAMA)
    items = examples(LlmJepa, 7, system=system)
    for mode in ("one-forward", "two-row", "three-row"):
        objective = build(LlmJepa, shape=shape, mode=mode, **changes)
        batch = batch_of(objective, items=items)
        loss = objective(batch)[0]
        results.append([loss, *gradients(loss, objective)])
        tokens.append(len(batch["packed"].tokens))
    for other in results[1:]:
        for ours, expected in zip(results[0], other):
            assert (ours - expected).abs().max() < 1e-12
    # With [PRED]s before it, the Text's view needs a row of its own.
    once = "pred_position" not in changes or "reverse" in changes
    assert (tokens[0] < tokens[1]) == once and tokens[0] <= tokens[1] < tokens[2]


@pytest.mark.parametrize("system", [False, True])
def test_no_view_of_llm_jepa_sees_what_it_must_not(system):
    """The answer sees no [PRED], the Code's view no Text, the Text's no answer, nothing ahead."""
    objective = build(LlmJepa, torch.float32, predictors=2)
    items = examples(LlmJepa, 3, system=system)
    batch, at = batch_of(objective, items=items), 0
    for text, code, *more in items:
        opening = 1 + sum(len(one) + 1 for one in more)
        ends = np.cumsum([at, opening, len(text), 2, len(code) + 1, len(code)])
        _, text_at, pred_at, answer_at, code_at, end = ends.tolist()
        sees = {text_at - 1: end, text_at: code_at, pred_at: answer_at, answer_at + 1: code_at,
                code_at: end}
        for index, last in sees.items():
            touched = moved(objective, batch, index).nonzero()[:, 0].tolist()
            assert touched == list(range(index, last))
        at = end


def test_the_affixes_of_a_text_are_what_stands_around_it_in_its_view():
    config = LlmJepa.Config(predictors=3)
    assert LlmJepa.affixes(config, SPECIAL) == (((), (59, 58, 57)), ((), ()))
    assert LlmJepa.special_tokens(config) == data.ROLES[5:8]
    config = LlmJepa.Config(predictors=2, pred_position="prepend", reverse=True, view_end=True)
    assert LlmJepa.affixes(config, SPECIAL) == (((), (3,)), ((57, 58), (3,)))
    assert Mlm.affixes(Mlm.Config(), SPECIAL) == (((), (3,)), ((), (3,)))
    special = SPECIAL._replace(family=data.Chat((7,), (8, 9), (10,), (11,)))
    assert Ntp.affixes(Ntp.Config(), special) == (((8, 9), (3,)), ((11,), (3,)))


def test_jepa_dropout_skips_the_views_and_their_tokens_at_its_rate():
    objective = build(LlmJepa, jepa_dropout=0.75)
    batches = [batch_of(objective, seed) for seed in range(400)]
    skipped = [batch for batch in batches if "vector_index" not in batch]
    assert abs(len(skipped) / 400 - 0.75) < 0.07
    plain = batch_of(build(Ntp), items=examples(LlmJepa))["packed"].tokens
    assert all(torch.equal(batch["packed"].tokens, plain) for batch in skipped)
    loss, terms = objective(skipped[0])
    assert float(terms["jepa"]) == 0 and loss == objective.config.gamma * terms["ntp"]


# ---- hybrid


def drawn(config, lengths, seed=0):
    """Contexts and blocks of rows, with shares as a batch has them: (length, share, both)."""
    rng = np.random.default_rng(seed)
    for length in lengths:
        share, context_share = rng.uniform(0.10, 0.25), rng.uniform(0.65, 0.85)
        context, blocks = draw_blocks(length, share, context_share, config, rng)
        yield length, share, context, blocks


def test_the_context_never_holds_a_target_and_keeps_enough():
    lengths = np.random.default_rng(0).integers(70, 512, 1000).tolist()
    for length, _, context, blocks in drawn(Hybrid.Config(), lengths):
        assert not np.isin(context, np.concatenate(blocks)).any()
        assert len(context) >= 32 and (np.diff(context) > 0).all()
        for block in blocks:
            assert (np.diff(block) == 1).all() and 0 <= block[0] and block[-1] < length
    for _, _, context, blocks in drawn(Hybrid.Config(), list(range(3, 12)) * 50):
        assert len(context) and all(len(block) for block in blocks)


def test_blocks_have_the_sizes_of_their_shares_and_every_place_is_drawn():
    seen, sizes = np.zeros(128), []
    for _, share, context, blocks in drawn(Hybrid.Config(), [128] * 1500, seed=1):
        assert [len(block) for block in blocks] == [int(128 * share)] * 2
        assert 32 <= len(context) <= max(int(128 * 0.85), 128 - len(blocks[0]))
        sizes.append(len(blocks[0]) / 128)
        for block in blocks:
            seen[block] += 1
    assert abs(np.mean(sizes) - 0.175) < 0.01 and seen.min() > 0
    assert seen[32:96].max() / seen[32:96].min() < 1.3


@pytest.mark.parametrize("length, inside, whole, share, short", [
    (128, 0.52, 0.25, 0.48, 0.24), (512, 0.52, 0.26, 0.47, 0.07)])
def test_with_overlap_the_sampler_has_the_statistics_of_the_released_one(
        length, inside, whole, share, short):
    """Measured there: targets inside of the context, rows with both targets visible, mean share of
    the context, contexts of fewer than 32 tokens."""
    config, found = Hybrid.Config(allow_overlap=True), []
    for _, _, context, blocks in drawn(config, [length] * 1000, seed=2):
        visible = [np.isin(block, context) for block in blocks]
        found.append((np.concatenate(visible).mean(), all(one.all() for one in visible),
                      len(context) / length, len(context) < 32))
    assert np.abs(np.mean(found, 0) - (inside, whole, share, short)).max() < 0.025


def test_no_prediction_depends_on_a_hidden_block_and_every_target_does():
    objective = build(Hybrid, torch.float32, mask_ratio=0.0)
    batch = batch_of(objective, items=examples(Hybrid, 1))
    predicted = objective.predict(objective.model(batch["packed"]), batch)
    target = objective.teacher(batch["clean"])[batch["target_index"]]
    context = batch["packed"].positions[int(batch["clean"].cu_seqlens[1]):].tolist()
    for hidden in set(batch["target_index"].tolist()):
        assert hidden not in context
        changed = {}
        for name in ("packed", "clean"):  # the corrupted row and the clean one
            tokens = batch[name].tokens.clone()
            tokens[hidden] = 5 + (tokens[hidden] - 4) % 50
            changed[name] = replace(batch[name], tokens=tokens)
        again = objective.predict(objective.model(changed["packed"]), batch)
        assert torch.equal(again, predicted)
        assert not torch.equal(objective.teacher(changed["clean"])[batch["target_index"]], target)


def test_the_control_of_hybrid_is_hybrid_without_its_latent_loss():
    """mlm with hybrid's head, and hybrid with a lambda of 0: the same weights, rows and draws."""
    hybrid = build(Hybrid, balance="fixed", balance_start=0.0)
    control = build(Mlm, regressor=True)
    control.load_state_dict(hybrid.state_dict(), strict=False)
    items, results = examples(Hybrid, 9), []
    for objective in (control, hybrid):
        batch = batch_of(objective, 3, items)
        loss = objective(batch)[0]
        results.append((rows_of(batch["packed"])[:9], batch["targets"].tolist(), loss.item()))
    assert results[0][:2] == results[1][:2] and abs(results[0][2] - results[1][2]) < 1e-12
    assert {name.split(".")[0] for name, _ in control.named_parameters()} == {"model", "regressor"}


def test_the_first_weights_of_hybrid_are_those_of_the_released_code():
    objective = build(Hybrid, torch.float32, predictor_std=0.02, predictor_width=48)
    for name, p in objective.named_parameters():
        if name.startswith("predictor") and p.ndim == 2:
            assert abs(p.std() - 0.02) < 0.002, name
        if name.startswith("regressor") and p.ndim == 2:  # PyTorch's own
            assert abs(p.std() - (3 * p.shape[1]) ** -0.5) < 0.02, name


def test_a_starving_lambda_is_told():
    objective = build(Hybrid)
    assert objective.warning() == ""
    for value, starved in ((4.0, "mlm"), (-4.0, "latent")):
        torch.nn.init.constant_(objective.balance, value)
        assert f"starves {starved}" in objective.warning()
    assert build(Hybrid, balance="fixed", balance_start=1.0).warning() == ""


def test_the_teacher_has_no_gradient_no_dropout_and_follows_the_schedule():
    objective = build(Hybrid, torch.float32, replace(SHAPE, dropout=0.5))
    objective.train()
    batch, teacher = batch_of(objective), objective.teacher
    assert not any(p.requires_grad for p in teacher.parameters())
    states = teacher(batch["clean"])
    assert torch.equal(states, teacher(batch["clean"])) and not states.requires_grad
    with torch.no_grad():
        for p in objective.model.parameters():
            p.add_(1.0)
    for progress, step in ((0.5, 0.002), (1.0, 0.0)):  # m = .996 + .004 * progress
        before = [p.clone() for p in teacher.parameters()]
        objective.after_step(progress)
        for p, old, student in zip(teacher.parameters(), before, objective.model.parameters()):
            assert torch.allclose(p, old + step * (student - old), atol=1e-6)
