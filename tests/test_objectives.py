"""The promises of every objective, no leakage, golden numbers, statistics of random draws, and each
loss with its gradients against a plain padded recomputation in float64."""

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import data
import objectives
from common import BadInput
from model import Model, ModelConfig, Packed, Segment, each_tensor
from objectives import (
    IN_BATCH,
    OBJECTIVES,
    Align,
    Bepa,
    Contrastive,
    Hybrid,
    LlmJepa,
    Mexma,
    Mlm,
    Ntp,
    Teacher,
    align,
    draw_blocks,
    find_objective,
    info_nce,
    koleo,
)


def make_special(vocab, pad=0, cls=2, sep=3, mask=4, preds=(), ids=range(5)):
    return data.Special(pad, cls, sep, mask, preds, vocab, np.array(ids), np.arange(vocab) % 3 != 0,
                        (cls,), (sep,), data.Chat((cls,), (), (), (sep,), ()))


SPECIAL = make_special(60, preds=(57, 58, 59), ids=[0, 1, 2, 3, 4, 57, 58, 59])
SHAPE = ModelConfig(vocab=60, width=16, layers=2, heads=2, ffn_dim=32, max_positions=64, dropout=0)
SMALL = dict(head_layers=2, head_heads=4, head_hidden=24, koleo_weight=0.5, predictor_width=12,
             predictor_layers=2, predictor_heads=3, predictor_std=0.0, min_keep=2, hidden=12,
             projected=6, top_layers=2)


LLAMA = dict(norm="rmsnorm", norm_position="pre", activation="swiglu", bias=False)


def small(objective_class):
    """Return small values of those options that an objective has."""
    names = {field.name for field in fields(objective_class.Config)}
    return {name: value for name, value in SMALL.items() if name in names}


def build(objective_class, dtype=torch.float64, shape=SHAPE, **options):
    torch.manual_seed(0)
    config = objective_class.Config(**small(objective_class) | options)
    shape = replace(shape, causal=objective_class.causal, pool=objective_class.pool,
                    head=objective_class.model_head(config))
    return objective_class(Model(shape), config).to(dtype)


def examples(objective_class, count=5, seed=0, system=False):
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        texts = [rng.integers(5, 57, rng.integers(2, 12))
                 for _ in range(objective_class.views + system)]
        rows.append(data.Example(texts, cut=[len(ids) % 3 == 0 for ids in texts]))
    return rows


def batch_of(objective, seed=0, items=None):
    items = items or examples(type(objective))
    return objective.collate(items, np.random.default_rng(seed), objective.config, SPECIAL)


def gradients(loss, objective):
    """The gradient of every trainable parameter, zeros where the loss does not depend on it."""
    trained = [p for p in objective.parameters() if p.requires_grad]
    return torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)


def seeded(loss, *args, **options):
    """A loss with the random numbers of seed 0: sigreg draws directions."""
    torch.manual_seed(0)
    return loss(*args, **options)


def assert_near(results, expected, bound):
    for one, other in zip(results, expected, strict=True):
        assert (one - other).abs().max() <= bound


GALLERY = {path.stem: find_objective(str(path))
           for path in sorted((Path(__file__).parent.parent / "gallery").glob("*.py"))}
BOTH = OBJECTIVES | GALLERY
every = pytest.mark.parametrize("objective_class", BOTH.values(), ids=list(BOTH))


# ---- promises


@every
def test_collate_depends_on_its_examples_and_generator_alone(objective_class):
    objective = build(objective_class)
    before = (np.random.get_state()[1].copy(), torch.get_rng_state())
    one, two, other = (each_tensor(batch_of(objective, seed), torch.Tensor.tolist)
                       for seed in (0, 0, 1))
    assert one == two
    assert (np.random.get_state()[1] == before[0]).all()
    assert torch.equal(torch.get_rng_state(), before[1])
    if any("mask" in field.name for field in fields(objective_class.Config)):
        assert one["packed"].tokens != other["packed"].tokens


def teacher_weights(objective):
    return [parameter for module in objective.modules() if isinstance(module, Teacher)
            for parameter in module.parameters()]


@every
def test_a_step_gives_a_finite_loss_trains_everything_but_teachers_and_moves_them(objective_class):
    objective = build(objective_class, torch.float32)
    teachers = teacher_weights(objective)
    for parameter in teachers:
        parameter.add_(0.1 * torch.randn_like(parameter))
    batch = batch_of(objective)
    loss, terms = seeded(objective, batch)
    loss.backward()
    assert loss.shape == () and loss.isfinite() and terms
    for term in terms.values():
        assert term.shape == () and term.isfinite() and not term.requires_grad
    for name, parameter in objective.named_parameters():
        has_gradient = parameter.grad is not None and bool(parameter.grad.abs().sum())
        is_teacher = any(parameter is one for one in teachers)
        assert has_gradient == parameter.requires_grad != is_teacher, name
    with torch.autocast("cpu", torch.bfloat16):
        half, _ = seeded(objective, batch)
    assert half.dtype == torch.float32 and abs(half - loss) < 0.15
    before = [parameter.clone() for parameter in teachers]
    objective.after_step(0.5)
    assert not any(torch.equal(one, other) for one, other in zip(before, teachers))


@pytest.mark.parametrize("objective_class, options, which", [
    (Mlm, {}, 0), (Ntp, {}, 0), (Hybrid, dict(balance="fixed", balance_start=0.0), 0),
    (Hybrid, dict(balance="fixed", balance_start=1.0), 1)])
def test_accumulated_token_losses_give_the_gradient_of_one_big_batch(objective_class, options,
                                                                     which):
    objective, items = build(objective_class, **options), examples(objective_class, 8)
    parts = [batch_of(objective, i, items[i * 2:i * 2 + 2]) for i in range(4)]
    counts = [float(part["loss_denominators"][which]) for part in parts]
    assert len(set(counts)) > 1
    whole = sum(objective(part)[0] * count for part, count in zip(parts, counts)) / sum(counts)
    mean = torch.stack([part["loss_denominators"] for part in parts]).mean(0)  # as train.py does
    shared = sum(objective(part | dict(loss_denominators=mean))[0] for part in parts) / 4
    assert_near(gradients(shared, objective), gradients(whole, objective), 1e-8)


def test_uses_in_batch_negatives_tells_whether_examples_are_compared():
    found = {one for one in OBJECTIVES.values() if one.uses_in_batch_negatives(one.Config())}
    assert found == {Contrastive, Mexma, Bepa}  # Mexma: because of KoLeo
    for one, options in ((Mexma, dict(koleo_weight=0.0)), (Bepa, {}), (LlmJepa, {})):
        assert {kind for kind in get_args(Align)
                if one.uses_in_batch_negatives(one.Config(align=kind, **options))} == set(IN_BATCH)


CLASS = "from objectives import Mlm, Objective\nclass {}({}):\n    name = {!r}\n"


@pytest.mark.parametrize("text, name, message", [
    ("", "mexmaa", "'mexmaa' is unknown: choose one of mexma, .*; did you mean mexma?"),
    ("", "no.py", "no.py: this file does not exist"),
    ("from objectives import Mlm", "idea.py", "idea.py defines no objective"),
    (CLASS.format("A", "Objective", ""), "idea.py", "class A needs a name of its own"),
    (CLASS.format("A", "Mlm", "mlm"), "idea.py", "class A needs a name of its own")])
def test_an_objective_that_cannot_be_used_is_one_line(text, name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "idea.py").write_text(text)
    with pytest.raises(BadInput, match=f"^[^\n]*{message}[^\n]*$"):
        find_objective(name)


def test_an_objective_is_found_by_name_by_file_and_by_class(tmp_path):
    (tmp_path / "idea.py").write_text(CLASS.format("A", "Mlm", "a") + CLASS.format("B", "A", "b"))
    found = find_objective(f"{tmp_path}/idea.py")
    assert found.name == "b" and len(found.file_hash) == 64
    assert find_objective(found) is found and find_objective("mlm") is Mlm


# ---- golden numbers


def test_info_nce_has_the_golden_values_of_the_fact_sheet():
    x, one = torch.eye(16, 64, dtype=torch.float64), torch.ones(16, 8)
    assert abs(info_nce(x, x, 0.07) - 30 * math.exp(-1 / 0.07)) < 1e-6
    assert abs(info_nce(x, x, 0.07, include_self=True) - 0.6932) < 1e-4
    assert abs(info_nce(one, one, 0.07) - math.log(31)) < 1e-5
    assert abs(info_nce(one[:4], one[:4], 0.07, intra_side_negatives=False) - math.log(4)) < 1e-5


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
        inside, spread = seeded(align, kind, x, y), koleo(x)
    assert torch.equal(inside, seeded(align, kind, x, y)) and torch.equal(spread, koleo(x))
    assert align(kind, x.bfloat16(), y.bfloat16()).dtype == torch.float32
    assert koleo(x.bfloat16()).dtype == torch.float32


# ---- independent recomputations: padded, float64, from the textbook


def padded(rows):
    """Rows of ids -> grid filled with 0 (R, L), and which entries are real (R, L)."""
    grid = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for i, row in enumerate(rows):
        grid[i, :len(row)] = torch.as_tensor(row)
    return grid, torch.arange(grid.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]


def run_blocks(blocks, x, real, heads, causal=False, pre=False):
    """Run BERT blocks, post-norm or pre-norm, on a padded grid (R, L, D)."""
    for b in blocks:
        qkv = b.attention.qkv(b.norm1(x) if pre else x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~real[:, None, None], -1e30)
        if causal:
            ahead = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
            scores = scores.masked_fill(ahead, -1e30)
        attended = b.attention.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        x = x + attended if pre else b.norm1(x + attended)
        inner = b.mlp.down(F.gelu(b.mlp.up(b.norm2(x) if pre else x)))
        x = x + inner if pre else b.norm2(x + inner)
    return x


def encode(model, rows, positions=None):
    """Rows of ids -> states (R, L, D), and which of them are real; causal if the model is."""
    grid, real = padded(rows)
    where = torch.arange(grid.shape[1]) if positions is None else padded(positions)[0]
    x = model.embed_norm(model.embed(grid) + model.position_embedding(where))
    return run_blocks(model.blocks, x, real, model.config.heads, model.config.causal), real


def rows_of(packed):
    return [row.tolist() for row in packed.tokens.split(packed.cu_seqlens.diff().tolist())]


def slow_koleo(x, kind):
    x = x / x.norm(dim=1, keepdim=True) if kind == "unit" else x
    far = 1e9 * torch.eye(len(x), dtype=x.dtype)
    near = ((x[:, None] - x).norm(dim=2) + far).argmin(1)
    return -((x - x[near] + 1e-8).norm(dim=1) + 1e-8).log().mean()


def slow_mlm(objective, batch, items, count=None):
    """MLM on the first `count` rows, by BERT's vocabulary head or by W2 LN(GELU(W1 z))."""
    model, head = objective.model, objective.mlm_head
    x, real = encode(model, rows_of(batch["packed"])[:count])
    x = x[real][batch["target_positions"]]
    if head is None:
        hidden = model.transform_norm(F.gelu(model.transform(x)))
        logits = hidden @ model.embed.weight.T + model.vocabulary_bias
    else:
        x = F.gelu(x @ head.transform.weight.T + head.transform.bias)
        x = F.layer_norm(x, x.shape[-1:], head.norm.weight, head.norm.bias)
        logits = x @ head.vocabulary.weight.T + head.vocabulary.bias
    return F.cross_entropy(logits, batch["targets"])


def slow_contrastive(objective, batch, items):
    x, _ = encode(objective.model, rows_of(batch["packed"]))
    return slow_info_nce(*x[:, 0].chunk(2), within=False)


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
    return (c.align_weight * slow_align(c.align, first, b, within=False)
            + c.mlm_weight * sum(losses) / len(losses)
            + c.koleo_weight * (slow_koleo(a, c.koleo_input) + slow_koleo(b, c.koleo_input)) / 2)


def slow_info_nce(x, y, temperature=0.07, within=True, include_self=False, symmetric=True):
    n = len(x)
    if not symmetric:
        scores = F.normalize(x) @ F.normalize(y).T / temperature
        return sum(scores[i].logsumexp(0) - scores[i, i] for i in range(n)) / n
    if not within:  # the mean of both directions
        return (slow_info_nce(x, y, symmetric=False) + slow_info_nce(y, x, symmetric=False)) / 2
    z, total = F.normalize(torch.cat([x, y])), 0
    for i in range(2 * n):
        others = [z[i] @ z[j] / temperature for j in range(2 * n) if j != i or include_self]
        total = total + torch.stack(others).logsumexp(0) - z[i] @ z[(i + n) % (2 * n)] / temperature
    return total / (2 * n)


def slow_vicreg(x, y):
    d, covariance, hinge = x.shape[1], 0, 0
    for z in (x, y):
        squares = torch.cov(z.T) ** 2
        covariance = covariance + (squares.sum() - squares.diagonal().sum()) / d
        hinge = hinge + torch.clamp(1 - (z.var(0) + 1e-4) ** 0.5, min=0).mean() / 2
    return 25 * ((x - y) ** 2).mean() + 25 * hinge + covariance


def slow_barlow(x, y):
    a, b = ((z - z.mean(0)) / (z.std(0, unbiased=False) + 1e-6) for z in (x, y))
    total = 0
    for i in range(x.shape[1]):
        for j in range(x.shape[1]):
            c = (a[:, i] * b[:, j]).mean()
            total = total + ((1 - c) ** 2 if i == j else 0.005 * c ** 2)
    return total


def slow_sigreg(x, y):
    t, total = torch.linspace(0, 3, 17, dtype=torch.float64), 0
    for z in (x, y):
        directions = torch.randn(x.shape[1], 256, dtype=torch.float64)
        waves = torch.exp(1j * (z @ F.normalize(directions, dim=0))[..., None] * t).mean(0)
        error = (waves - torch.exp(-t ** 2 / 2)).abs() ** 2
        total = total + len(z) * torch.trapezoid(error * torch.exp(-t ** 2 / 2), t).mean()
    return 0.95 * ((x - y) ** 2).mean() + 0.05 * total


def slow_align(kind, x, y, **options):
    if kind == "info_nce":
        return slow_info_nce(x, y, **options)
    if kind == "sigreg":
        return slow_sigreg(x, y)
    far = (x - y).abs()
    return {"cosine": (1 - (x * y).sum(1) / x.norm(dim=1) / y.norm(dim=1)).mean(),
            "mse": (far ** 2).mean(), "l2": (far ** 2).sum(1).sqrt().mean(),
            "mse_unit": ((F.normalize(x) - F.normalize(y)) ** 2).mean(),
            "vicreg": slow_vicreg(x, y), "barlow": slow_barlow(x, y), "none": 0 * x.sum()}[kind]


def slow_bepa(objective, batch, items):
    c, rows, model = objective.config, rows_of(batch["packed"]), objective.model
    n = len(batch["cls_index"]) // 2
    mlm = slow_mlm(objective, batch, items, -2 * n)
    firsts, seconds = rows[-2 * n:-n], rows[-n:]
    x = encode(model, firsts)[0][:, 0]
    if c.cls_view == "masked":  # the second [CLS] comes after [CLS] T1 [SEP]
        second, _ = encode(model, seconds)
        where = [row.index(SPECIAL.cls, 1) for row in seconds]
        y = torch.stack([second[i, index] for i, index in enumerate(where)])
    else:
        shift = [len(row) if c.cls_view == "hidden" else 0 for row in firsts]
        positions = [list(range(s, s + len(row))) for s, row in zip(shift, seconds)]
        y = encode(model, seconds, positions)[0][:, 0]
    return mlm + c.align_weight * slow_align(c.align, x, y, include_self=c.include_self)


def prompts_of(items):
    """[CLS] (system [SEP]) text [SEP] of every example."""
    cls, sep = SPECIAL.cls, SPECIAL.sep
    return [[cls, *(token for text in (*system, text) for token in (*text, sep))]
            for text, _, *system in items]


def slow_ntp(objective, batch, items):
    prompts = prompts_of(items)
    rows = [[*prompt, *item[1], SPECIAL.sep] for prompt, item in zip(prompts, items)]
    states, _ = encode(objective.model, [row[:-1] for row in rows])
    logits, losses = states @ objective.model.embed.weight.T, []
    for i, (prompt, row) in enumerate(zip(prompts, rows)):
        first = len(prompt) - 1 if objective.config.labels == "answer" else 0
        # The last token of a complete answer predicts the stop token.
        stops = objective.config.labels != "all" and not items[i].cut[1]
        wanted = range(first, len(row) - 2 + stops)
        losses += [F.cross_entropy(logits[i, j], torch.tensor(row[j + 1])) for j in wanted]
    return sum(losses) / len(losses)


def slow_llm_jepa(objective, batch, items):
    c, embeddings = objective.config, []
    preds = list(SPECIAL.preds[:c.predictors])
    for side in (0, 1):
        rows = []
        for item in items:
            text = [int(token) for token in item[side]]
            if side == c.reverse:
                text = text + preds[::-1] if c.pred_position == "append" else preds + text
            start = [SPECIAL.cls, *item[2], SPECIAL.sep] if len(item) > 2 else [SPECIAL.cls]
            rows.append(start + text + [SPECIAL.sep] * c.view_end)
        states, _ = encode(objective.model, rows)
        embeddings.append(torch.stack([states[i, len(row) - 1] for i, row in enumerate(rows)]))
    source, target = embeddings[::-1] if c.reverse else embeddings
    jepa = slow_align(c.align, source, target, symmetric=False)
    return c.gamma * slow_ntp(objective, batch, items) + c.jepa_weight * jepa


def slow_predictor(objective, context, context_at, block_at):
    """Predict one block of a row: context states (n, D) and positions -> states (k, D)."""
    masks = objective.mask_token.expand(len(block_at), -1)
    x = torch.cat([objective.predictor_embed(context), masks])
    position, d = torch.tensor([*context_at, *block_at])[:, None], x.shape[1]
    angle = position / 10000 ** (torch.arange(d).double() // 2 * 2 / d)
    x = x + torch.where(torch.arange(d) % 2 == 0, angle.sin(), angle.cos())
    real, heads = torch.ones(1, len(x), dtype=torch.bool), objective.config.predictor_heads
    x = run_blocks(objective.predictor, x[None], real, heads, pre=True)[0]
    return objective.predictor_proj(objective.predictor_norm(x[-len(block_at):]))


def slow_hybrid(objective, batch, items):
    c, model = objective.config, objective.model
    clean, rows = rows_of(batch["clean"]), rows_of(batch["packed"])
    n = len(clean)
    mlm = slow_mlm(objective, batch, items, n)
    packed, predict = batch["packed"], batch["predict"]
    where = [one.tolist() for one in packed.positions.split(packed.cu_seqlens.diff().tolist())[n:]]
    contexts, _ = encode(model, rows[n:], where)
    teacher, _ = encode(objective.teacher.model, clean)
    starts, guesses, goals, index = batch["clean"].cu_seqlens.tolist(), [], [], []
    for number, row in enumerate(predict.positions.split(predict.cu_seqlens.diff().tolist())):
        i = number // c.target_blocks
        block = row[len(where[i]):].tolist()
        guesses.append(slow_predictor(objective, contexts[i, :len(where[i])], where[i], block))
        goals.append(teacher[i, block].detach())
        index += [starts[i] + position for position in block]
    assert batch["target_index"].tolist() == index
    guesses, goals = torch.cat(guesses), torch.cat(goals)
    if c.teacher_norm:
        spread = goals.var(-1, unbiased=False, keepdim=True)
        goals = (goals - goals.mean(-1, keepdim=True)) / torch.sqrt(spread + 1e-5)
    lam = c.balance_start
    if c.balance == "learned":
        lam = torch.sigmoid(objective.balance)
    if c.balance == "scheduled":
        lam += float(objective.progress) * (c.balance_end - c.balance_start)
    return lam * slow_align(c.align, guesses, goals) + (1 - lam) * mlm


VARIANTS = {
    (Mlm, slow_mlm): [{}, dict(regressor=True)],
    (Contrastive, slow_contrastive): [{}],
    (Mexma, slow_mexma): [
        {}, dict(align_weight=3.0, mlm_weight=0.7), dict(token_gradients=False),
        dict(koleo_weight=0.0), dict(align_views="dirty"), dict(align="info_nce"),
        dict(koleo_input="raw"), dict(symmetrical=False, align_views="dirty"),
        dict(symmetrical=False, align="none"), dict(mask_first=0.8, mask_second=0.1)],
    (Bepa, slow_bepa): [
        {}, dict(include_self=True), dict(packing="monolingual"), dict(packing="separate"),
        dict(cls_view="masked"), dict(cls_view="clean", align="vicreg"),
        dict(align="cosine"), dict(align="mse_unit"), dict(align="sigreg", align_weight=0.3)],
    (Ntp, slow_ntp): [{}, dict(labels="all"), dict(labels="all+eos")],
    (LlmJepa, slow_llm_jepa): [
        {}, dict(predictors=0), dict(predictors=3, reverse=True),
        dict(pred_position="prepend", predictors=2), dict(labels="all", align="info_nce"),
        dict(align="l2", gamma=0.5, jepa_weight=2.0), dict(view_end=True, labels="all+eos")],
    (Hybrid, slow_hybrid): [
        {}, dict(teacher_norm=True), dict(align="vicreg", balance="fixed"),
        dict(align="barlow"), dict(align="mse", balance="scheduled", balance_end=1.0),
        dict(allow_overlap=True), dict(target_blocks=3)],
}
CASES = [(*pair, options) for pair, several in VARIANTS.items() for options in several]


@pytest.mark.parametrize("objective_class, slow, options", CASES,
                         ids=[f"{one.name} {options}" for one, _, options in CASES])
def test_the_loss_and_its_gradients_equal_a_plain_padded_recomputation(objective_class, slow,
                                                                       options):
    for seed in range(2):
        objective = build(objective_class, **options)
        items = examples(objective_class, 5, seed, system=objective_class.causal and seed == 1)
        for parameter in objective.parameters():
            torch.nn.init.normal_(parameter, std=0.3)  # large, and a teacher unlike its student
        progress = 0.25 + 0.5 * seed
        objective.after_step(progress)
        assert objective.progress == progress
        batch, results = batch_of(objective, seed, items), []
        for loss in (seeded(objective, batch)[0], seeded(slow, objective, batch, items)):
            results.append([loss, *gradients(loss, objective)])
        for ours, expected in zip(*results):
            assert (ours - expected).abs().max() <= 1e-10 * max(1, expected.detach().abs().max())


# ---- several processes


# The losses on tokens are off.
GATHERING = [(Contrastive, {}), (Bepa, dict(order="given", mask_ratio=0.0)),
             (LlmJepa, dict(align="info_nce", gamma=0.0)),
             (Mexma, dict(align="info_nce", mlm_weight=0.0, koleo_weight=0.0))]


def alignments(items):
    """Return the loss of each objective, and its gradient for the token embeddings."""
    results = []
    for (objective_class, options), rows in zip(GATHERING, items):
        objective = build(objective_class, **options)
        loss, _ = objective(batch_of(objective, items=rows))
        gradient, = torch.autograd.grad(loss, objective.model.embed.weight)
        results.append((loss.detach(), gradient))
    return results


def one_of_two(rank, folder):
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    items = [examples(one, 8)[rank * 4:rank * 4 + 4] for one, _ in GATHERING]
    results = alignments(items)
    for _, gradient in results:
        dist.all_reduce(gradient)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_two_processes_compare_the_embeddings_of_both_as_one_process_does(tmp_path):
    torch.multiprocessing.spawn(one_of_two, (tmp_path,), nprocs=2)
    expected = alignments([examples(one, 8) for one, _ in GATHERING])
    for rank in (0, 1):
        for (term, gradient), (whole, whole_gradient) in zip(
                torch.load(tmp_path / f"{rank}.pt"), expected, strict=True):
            assert abs(term - whole) < 1e-10
            assert (gradient / 2 - whole_gradient).abs().max() < 1e-10  # DDP's mean


def test_jepa_dropout_of_an_in_batch_loss_is_refused_on_several_processes(monkeypatch):
    monkeypatch.setattr(objectives, "num_processes", lambda: 2)
    build(LlmJepa, jepa_dropout=0.5)
    with pytest.raises(BadInput, match="needs a single process"):
        build(LlmJepa, jepa_dropout=0.5, align="info_nce")


def test_koleo_compares_the_embeddings_of_one_process(monkeypatch):
    objective = build(Mexma)
    batch = batch_of(objective)
    alone = objective(batch)[1]["koleo"]
    # Another process has nearly the same embeddings.
    monkeypatch.setattr(objectives, "all_gather_with_grad", lambda x: torch.cat([x, 1.001 * x]))
    assert objective(batch)[1]["koleo"] == alone


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
    for group, changes in ((2, 1), (3, 0)):  # clean A changes only B's states; clean B only A's
        tokens = packed.tokens.clone()
        second = packed.cu_seqlens[group * n:(group + 1) * n].long() + 1
        tokens[second] = 5 + (tokens[second] - 4) % 55
        after = unmasking(objective, replace(packed, tokens=tokens), batch)
        assert torch.equal(before[1 - changes], after[1 - changes])
        assert not (before[changes] == after[changes]).all(1).any()


# ---- bepa


def changed_states(objective, batch, index):
    """(T,) bool: which states of the line change when the token at an index does."""
    packed = batch["packed"]
    tokens = packed.tokens.clone()
    tokens[index] = 5 + (tokens[index] - 4) % 50
    return (objective.model(packed) != objective.model(replace(packed, tokens=tokens))).any(1)


@pytest.mark.parametrize("view", ["hidden", "clean"])
def test_bepas_embedding_never_sees_the_other_sentence(view):
    objective = build(Bepa, torch.float32, cls_view=view)
    batch = batch_of(objective)
    starts, rows = batch["packed"].cu_seqlens.tolist(), len(batch["packed"])
    for row in range(rows - len(batch["cls_index"]), rows):
        expected = torch.zeros(starts[-1], dtype=torch.bool)
        expected[starts[row]:starts[row + 1]] = True
        assert torch.equal(changed_states(objective, batch, starts[row] + 1), expected)
    changed = changed_states(objective, batch, starts[1] - 2)  # a masked row sees both sentences
    assert changed[:starts[1]].all() and not changed[starts[1]:].any()


def test_bepas_masked_view_masks_all_of_the_other_sentence_and_given_keeps_the_order():
    row = rows_of(batch_of(build(Bepa, cls_view="masked", order="given"))["packed"])[5]
    a, b = examples(Bepa)[0]
    assert row == [SPECIAL.cls, *a, SPECIAL.sep] + [SPECIAL.mask] * (len(b) + 2)


def test_monolingual_rows_have_two_sentences_of_one_language():
    rng = np.random.default_rng(0)
    items = []
    for _ in range(64):  # each language has its own ids: 5 to 14, 15 to 24, ...
        columns = rng.choice(5, 2, replace=False)
        views = [rng.integers(5 + 10 * column, 15 + 10 * column, 4) for column in columns]
        items.append(data.Example(views, columns))
    rows = objectives.monolingual_rows(items, SPECIAL)
    languages = [[(token - 5) // 10 for token in row if token > 4] for row in rows]
    assert all(len(set(one)) == 1 for one in languages)
    lengths = [len(one) for one in languages]
    assert sum(lengths) == 128 * 4 and lengths.count(4) <= 5 and set(lengths) <= {4, 8}


# ---- next-token prediction and llm-jepa


def separate_rows(batch, items, config, rows):
    """LLM-JEPA's batch with the views in rows of their own: one for both, or one for each."""
    (text_before, text_after), (code_before, code_after) = LlmJepa.affixes(config, SPECIAL)
    answers = [objectives.prompt_and_answer(item, SPECIAL) for item in items]
    starts = [objectives.row_start(item, SPECIAL) for item in items]
    texts = [np.array([*start, *text_before[1:], *item[0], *text_after])
             for start, item in zip(starts, items)]
    codes = [np.array([*code_before[1:], *item[1], *code_after]) for item in items]
    if rows == 2:
        views = [[Segment(text, True), Segment(code, True, prefix=(0, len(start)))]
                 for text, code, start in zip(texts, codes, starts)]
    else:
        views = [[Segment(text, True)] for text in texts]
        views += [[Segment(np.append(start, code), True)] for start, code in zip(starts, codes)]
    packed = Packed.of_segments(answers + views)
    ends = packed.cu_seqlens[1:].long()[len(items):]
    lengths = torch.tensor([len(code) for code in codes])
    index = torch.stack([ends - lengths, ends]) if rows == 2 else ends.view(2, -1)
    return batch | dict(packed=packed, vector_index=index - 1) | objectives.next_tokens(
        packed, answers, items, config.labels, SPECIAL)


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("options, positions, system", [
    (dict(predictors=0), "learned", True), (dict(predictors=1, reverse=True), "rotary", False),
    (dict(predictors=3, view_end=True), "rotary", True),
    (dict(predictors=1, pred_position="prepend", reverse=True, view_end=True), "learned", True)])
def test_one_row_of_segments_equals_separate_rows_in_loss_and_gradient(options, positions, system,
                                                                      rows):
    objective = build(LlmJepa, shape=replace(SHAPE, positions=positions, **LLAMA), **options)
    items = examples(LlmJepa, 7, system=system)
    batch = batch_of(objective, items=items)
    other = separate_rows(batch, items, objective.config, rows)
    assert len(batch["packed"].tokens) < len(other["packed"].tokens)
    losses = [objective(one)[0] for one in (batch, other)]
    assert_near(losses[:1], losses[1:], 1e-12)
    assert_near(*(gradients(loss, objective) for loss in losses), 1e-12)


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
            changed = changed_states(objective, batch, index).nonzero()[:, 0].tolist()
            assert changed == list(range(index, last))
        at = end


CHAT = SPECIAL._replace(chat=data.Chat((1,), (7,), (8, 9), (10,), (11,)))


@pytest.mark.parametrize("objective_class, options, special, expected", [
    (Mlm, {}, SPECIAL, (((2,), (3,)), ((2,), (3,)))),
    (Mlm, {}, SPECIAL._replace(before=(), after=(1, 3)), (((), (1, 3)), ((), (1, 3)))),
    (Ntp, {}, CHAT, (((1, 8, 9), (3,)), ((1, 11), (3,)))),
    (LlmJepa, dict(predictors=3), SPECIAL, (((2,), (59, 58, 57)), ((2,), ()))),
    (LlmJepa, dict(predictors=2, pred_position="prepend", reverse=True, view_end=True), SPECIAL,
     (((2,), (3,)), ((2, 57, 58), (3,))))], ids=str)
def test_the_affixes_of_a_text_are_all_ids_around_it(objective_class, options, special, expected):
    assert objective_class.affixes(objective_class.Config(**options), special) == expected


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
    """Draw contexts and blocks with the fractions of a batch: (length, fraction, both)."""
    rng = np.random.default_rng(seed)
    for length in lengths:
        fraction, context_fraction = rng.uniform(0.10, 0.25), rng.uniform(0.65, 0.85)
        context, blocks = draw_blocks(length, fraction, context_fraction, config, rng)
        yield length, fraction, context, blocks


def test_contexts_have_no_targets_and_blocks_have_their_size_and_are_everywhere():
    lengths = np.random.default_rng(0).integers(70, 512, 1000).tolist()
    seen = np.zeros(128)
    for length, fraction, context, blocks in drawn(Hybrid.Config(), lengths + [128] * 1500):
        assert not np.isin(context, np.concatenate(blocks)).any()
        assert len(context) >= 32 and (np.diff(context) > 0).all()
        for block in blocks:
            assert block.tolist() == list(range(block[0], block[0] + int(length * fraction)))
            assert block[-1] < length
            seen[block if length == 128 else []] += 1
    assert seen.min() > 0 and seen[32:96].max() / seen[32:96].min() < 1.3
    for _, _, context, blocks in drawn(Hybrid.Config(), list(range(3, 12)) * 50):
        assert len(context) and all(len(block) for block in blocks)


@pytest.mark.parametrize("length, inside, whole, fraction, short", [
    (128, 0.52, 0.25, 0.48, 0.24), (512, 0.52, 0.26, 0.47, 0.07)])
def test_with_overlap_the_sampler_has_the_statistics_of_the_released_one(
        length, inside, whole, fraction, short):
    """Measured with the released code: targets inside the context, rows with both blocks visible,
    mean size of the context as a fraction of the row, contexts of fewer than 32 tokens."""
    config, found = Hybrid.Config(allow_overlap=True), []
    for _, _, context, blocks in drawn(config, [length] * 1000, seed=2):
        visible = [np.isin(block, context) for block in blocks]
        found.append((np.concatenate(visible).mean(), all(one.all() for one in visible),
                      len(context) / length, len(context) < 32))
    assert np.abs(np.mean(found, 0) - (inside, whole, fraction, short)).max() < 0.025


def test_no_prediction_depends_on_a_target_block_and_every_target_does():
    objective = build(Hybrid, torch.float32, mask_ratio=0.0)
    batch = batch_of(objective, items=examples(Hybrid, 1))
    predicted = objective.predict(objective.model(batch["packed"]), batch)
    target = objective.teacher(batch["clean"])[batch["target_index"]]
    context = batch["packed"].positions[int(batch["clean"].cu_seqlens[1]):].tolist()
    for index in set(batch["target_index"].tolist()):
        assert index not in context
        changed = {}
        for name in ("packed", "clean"):  # the masked row and the clean one
            tokens = batch[name].tokens.clone()
            tokens[index] = 5 + (tokens[index] - 4) % 50
            changed[name] = replace(batch[name], tokens=tokens)
        again = objective.predict(objective.model(changed["packed"]), batch)
        assert torch.equal(again, predicted)
        assert not torch.equal(objective.teacher(changed["clean"])[batch["target_index"]], target)


def test_hybrid_warns_about_an_extreme_lambda_and_a_teacher_that_is_still_random():
    objective = build(Hybrid)
    assert objective.warning() == ""
    for value, starved in ((4.0, "mlm"), (-4.0, "latent")):
        torch.nn.init.constant_(objective.balance, value)
        assert f"the {starved} loss has almost no weight" in objective.warning()
    objective.after_step(1.0)
    assert "100% of the teacher is still its initialization" in objective.warning()


def test_the_teacher_has_no_gradient_no_dropout_and_follows_the_schedule():
    objective = build(Hybrid, torch.float32, replace(SHAPE, dropout=0.5)).train()
    batch, teacher = batch_of(objective), objective.teacher
    states = teacher(batch["clean"])
    assert torch.equal(states, teacher(batch["clean"])) and not states.requires_grad
    with torch.no_grad():
        for p in objective.model.parameters():
            p.add_(1.0)
    for progress, step in ((0.5, 0.002), (1.0, 0.0)):  # m = 0.996 + 0.004 * progress
        before = [p.clone() for p in teacher.parameters()]
        objective.after_step(progress)
        for p, old, student in zip(teacher.parameters(), before, objective.model.parameters()):
            assert torch.allclose(p, old + step * (student - old), atol=1e-6)
