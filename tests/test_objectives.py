"""Each loss with its gradients against a plain padded recomputation in float64, teachers, no
leakage, and statistics of random draws. test_any_objective.py has the promises of every objective.
"""

from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

import data
import objectives
from base.common import BadInput
from base.tokenizer import Chat, Special
from harness.settings import find_objective
from model import Model, ModelConfig
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
    alignment_loss,
    draw_blocks,
    koleo,
)


def make_special(vocab, pad=0, cls=2, sep=3, mask=4, preds=(), ids=range(5)):
    return Special(pad, cls, sep, mask, preds, vocab, np.array(ids), (cls,), (sep,),
                        Chat((cls,), (), (), (sep,), ()))


SPECIAL = make_special(60, preds=(57, 58, 59), ids=[0, 1, 2, 3, 4, 57, 58, 59])
SHAPE = ModelConfig(vocab=60, width=16, layers=2, heads=2, ffn_dim=32, max_positions=64, dropout=0)
# Small values of the options of all objectives.
SMALL = dict(head_layers=2, head_heads=4, head_hidden=24, koleo_weight=0.5, predictor_width=12,
             predictor_layers=2, predictor_heads=3, predictor_std=0.0, min_keep=2, hidden=12,
             projected=6, top_layers=2)


def build(objective_class, dtype=torch.float64, shape=SHAPE, pool=None, layers=None, **options):
    torch.manual_seed(0)
    names = {field.name for field in fields(objective_class.Config)}
    small = {name: value for name, value in SMALL.items() if name in names}
    config = objective_class.Config(**small | options)
    shape = replace(shape, causal=objective_class.causal, pool=pool or objective_class.pool,
                    layers=shape.layers if layers is None else layers,
                    head=objective_class.head_type(config))
    return objective_class(Model(shape), config).to(dtype)


def examples(objective_class, count=5, seed=0, system=False):
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        texts = [rng.integers(5, 57, rng.integers(2, 12))
                 for _ in range(objective_class.views + system)]
        views = tuple(texts[:objective_class.views])
        cut = tuple(len(ids) % 3 == 0 for ids in views)
        rows.append(data.Example(views, cut=cut, system=texts[-1] if system else None))
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


def differs(objective, page, what):
    """Fail with a sentence for whoever changed a class and knows nothing of its page: a file, or a
    function of the tests."""
    pytest.fail(f"{type(objective).__name__}'s {what}. If you meant it, change {page} and the "
                "class's docstring, too, or keep your version in a file of its own: train.py "
                "--objective my_idea.py", pytrace=False)


def check_equal(objective, page, ours, theirs, bound=1e-9):
    """Compare a class's loss and gradients, in this order, with those of a page."""
    loss, *rest = [(one - other).abs().max().item()
                   for one, other in zip(ours, theirs, strict=True)]
    if not all(difference <= bound for difference in (loss, *rest)):  # NaN is not
        differs(objective, page, f"loss differs from {page} by {loss:.2g}, and its gradients by up "
                f"to {max(rest):.2g}")


def assert_near(results, expected, bound):
    for one, other in zip(results, expected, strict=True):
        assert (one - other).abs().max() <= bound


GALLERY = {path.stem: find_objective(str(path))
           for path in sorted((Path(__file__).parent.parent / "gallery").glob("*.py"))}
BOTH = OBJECTIVES | GALLERY
every = pytest.mark.parametrize("objective_class", BOTH.values(), ids=list(BOTH))


# ---- promises


def teacher_weights(objective):
    return [parameter for module in objective.modules() if isinstance(module, Teacher)
            for parameter in module.parameters()]


@every
def test_a_step_trains_everything_but_teachers_moves_them_and_needs_no_float32(objective_class):
    objective = build(objective_class, torch.float32)
    teachers = teacher_weights(objective)
    for parameter in teachers:
        parameter.add_(0.1 * torch.randn_like(parameter))
    for name, parameter in objective.named_parameters():
        assert parameter.requires_grad != any(parameter is one for one in teachers), name
    batch = batch_of(objective)
    loss, _ = seeded(objective, batch)
    with torch.autocast("cpu", torch.bfloat16):
        half, _ = seeded(objective, batch)
    assert half.dtype == torch.float32 and abs(half - loss) < 0.15
    before = [parameter.clone() for parameter in teachers]
    objective.after_step(0.5)
    assert not any(torch.equal(one, other) for one, other in zip(before, teachers))


@pytest.mark.parametrize("name", [*OBJECTIVES][:-1])  # contrastive has none
def test_token_losses_are_sums_divided_by_numbers_of_the_batch(name):
    """train.py averages these numbers over micro-batches. Then the gradients of all micro-batches
    are those of one big batch."""
    objective = build(OBJECTIVES[name])
    batch = batch_of(objective)
    half = batch | dict(loss_denominators=batch["loss_denominators"] / 2)
    terms, doubled = (objective(one)[1] for one in (batch, half))
    for term, value in terms.items():
        factor = 2 if term in ("mlm", "ntp", "latent") else 1
        assert abs(doubled[term] - factor * value) < 1e-12, term


@pytest.mark.parametrize("text, name", [
    ("from objectives import Mlm", "idea.py"),
    ("import objectives\nclass A(objectives.Mlm):\n    pass", "class A"),
    ("import objectives\nclass A(objectives.Objective):\n    pass", "class A")])
def test_a_file_without_an_objective_of_its_own_name_is_refused_in_one_line(text, name, tmp_path):
    (tmp_path / "idea.py").write_text(text)
    with pytest.raises(BadInput, match=f"^[^\n]*{name}[^\n]*$"):
        find_objective(f"{tmp_path}/idea.py")


# ---- losses


def test_koleo_of_duplicates_is_large_but_finite():
    twins = torch.randn(1, 1024).repeat(2, 1).requires_grad_()
    value = koleo(twins)
    value.backward()
    assert abs(value - 14.9) < 0.1 and twins.grad.isfinite().all()


@pytest.mark.parametrize("kind", get_args(Align))
def test_a_loss_is_float32_and_in_batch_unless_it_is_a_mean_over_pairs(kind):
    x, y = torch.randn(2, 6, 5)
    for loss in (lambda x, y: seeded(alignment_loss, kind, x, y), lambda x, y: koleo(x)):
        with torch.autocast("cpu", torch.bfloat16):
            inside = loss(x, y)
        assert torch.equal(inside, loss(x, y))
        assert loss(x.bfloat16(), y.bfloat16()).dtype == torch.float32
    whole, first, second = (seeded(alignment_loss, kind, x[rows], y[rows])
                            for rows in (slice(6), slice(3), slice(3, 6)))
    assert torch.isclose(whole, (first + second) / 2) == (kind not in IN_BATCH)
    for weight in (0.0, 0.1):  # KoLeo compares texts too
        config = Mexma.Config(align=kind, koleo_weight=weight)
        assert Mexma.uses_in_batch_negatives(config) == (kind in IN_BATCH or weight > 0)


# ---- independent recomputations: padded, float64, from the textbook


def padded(rows):
    """Rows of ids -> grid filled with 0 (R, L), and which entries are real (R, L)."""
    lengths = torch.tensor([len(row) for row in rows])
    grid = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    return grid, torch.arange(grid.shape[1]) < lengths[:, None]


def run_blocks(blocks, x, real, heads, causal=False, pre=False):
    """Run BERT blocks, post-norm or pre-norm, on a padded grid (R, L, D)."""
    visible = real[:, None, None]  # every token sees all real ones
    if causal:
        visible = visible & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    for b in blocks:
        qkv = b.attention.qkv(b.norm1(x) if pre else x).unflatten(-1, (3, heads, -1))
        mixed = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), visible)
        attended = b.attention.out(mixed.transpose(1, 2).flatten(2))
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


def first_or_mean(objective, states, real):
    """The embedding of each padded row: its [CLS], or the mean of its tokens."""
    if objective.model.config.pool == "cls":
        return states[:, 0]
    return torch.stack([row[which].mean(0) for row, which in zip(states, real)])


def embeddings(objective, rows, positions=None):
    return first_or_mean(objective, *encode(objective.model, rows, positions))


def rows_of(packed, name="tokens"):
    """The tokens or the positions of every row, a list each."""
    lengths = packed.cu_seqlens.diff().tolist()
    return [row.tolist() for row in getattr(packed, name).split(lengths)]


def slow_koleo(x, kind):
    x = x / x.norm(dim=1, keepdim=True) if kind == "unit" else x
    far = 1e9 * torch.eye(len(x), dtype=x.dtype)
    near = ((x[:, None] - x).norm(dim=2) + far).argmin(1)
    return -((x - x[near] + 1e-8).norm(dim=1) + 1e-8).log().mean()


def slow_mlm(objective, batch, items, count=None):
    """MLM on the first `count` rows, by BERT's vocabulary head or by W2 LN(GELU(W1 z))."""
    model, head = objective.model, objective.mlm_head
    has_regressor = getattr(objective.config, "regressor", isinstance(objective, Hybrid))
    x, real = encode(model, rows_of(batch["packed"])[:count])
    x = x[real][batch["target_positions"]]
    if has_regressor:
        logits = head.vocabulary(head.norm(F.gelu(head.transform(x))))
    else:
        hidden = model.transform_norm(F.gelu(model.transform(x)))
        logits = F.linear(hidden, model.embed.weight, model.vocabulary_bias)
    return F.cross_entropy(logits, batch["targets"])


def slow_contrastive(objective, batch, items):
    c, z = objective.config, embeddings(objective, rows_of(batch["packed"]))
    return slow_info_nce(*z.chunk(2), c.temperature, within=False)


def slow_mexma(objective, batch, items):
    c, rows, n = objective.config, rows_of(batch["packed"]), len(items)
    states, real = encode(objective.model, rows[:len(rows) // 2])  # the masked rows
    dirty = first_or_mean(objective, states, real)[:n]
    a, b = [dirty, *embeddings(objective, rows[len(rows) // 2:]).split(n)][-2:]
    if not c.token_gradients:
        states = states.detach()
    others = torch.cat([b, a]) if c.symmetrical else b
    states = torch.cat([others[:, None], states[:, 1:]], 1)
    hidden = run_blocks(objective.unmask, states, real, c.head_heads)[real]
    logits = F.linear(hidden, objective.model.embed.weight, objective.vocabulary_bias)
    logits, sides = logits[batch["target_positions"]], batch["targets_per_side"]
    mlm = sum(map(F.cross_entropy, logits.split(sides), batch["targets"].split(sides)))
    first = dirty if c.align_views == "dirty" else a
    aligned = slow_align(c.align, first, b, temperature=c.temperature, within=False)
    return (c.align_weight * aligned + c.mlm_weight * mlm / len(sides)
            + c.koleo_weight * (slow_koleo(a, c.koleo_input) + slow_koleo(b, c.koleo_input)) / 2)


def slow_info_nce(x, y, temperature=0.07, within=True, include_self=False, symmetric=True):
    x, y, losses = F.normalize(x), F.normalize(y), []
    for a, b in [(x, y), (y, x)] if symmetric else [(x, y)]:
        for i in range(len(a)):
            choices = [*b]
            if within and symmetric:
                choices += [a[j] for j in range(len(a)) if j != i or include_self]
            scores = torch.stack(choices) @ a[i] / temperature
            losses.append(scores.logsumexp(0) - scores[i])
    return sum(losses) / len(losses)


def slow_vicreg(x, y):
    loss = 25 * ((x - y) ** 2).mean()
    for z in (x, y):
        squares = torch.cov(z.T) ** 2
        loss = loss + (squares.sum() - squares.diagonal().sum()) / x.shape[1]
        loss = loss + 12.5 * torch.clamp(1 - (z.var(0) + 1e-4) ** 0.5, min=0).mean()
    return loss


def slow_barlow(x, y):
    a, b = ((z - z.mean(0)) / (z.std(0, unbiased=False) + 1e-6) for z in (x, y))
    c = torch.einsum("ni,nj->ij", a, b) / len(x)
    weight = torch.full_like(c, 0.005).fill_diagonal_(1)
    return (weight * (c - torch.eye(len(c))) ** 2).sum()


def gaussian(z):
    """SIGReg of one view, by integrating over both signs of t."""
    directions = F.normalize(torch.randn(z.shape[1], 256, dtype=torch.float64), dim=0)
    t = torch.linspace(-3, 3, 33, dtype=torch.float64)
    normal = (-t ** 2 / 2).exp()
    waves = torch.exp(1j * (z @ directions)[..., None] * t).mean(0)
    return len(z) * torch.trapezoid((waves - normal).abs() ** 2 * normal, t).mean()


def slow_sigreg(x, y):
    return 0.95 * ((x - y) ** 2).mean() + 0.05 * (gaussian(x) + gaussian(y)) / 2


def slow_align(kind, x, y, **options):
    if kind == "info_nce":
        return slow_info_nce(x, y, **options)
    if kind == "sigreg":
        return slow_sigreg(x, y)
    return {"cosine": 1 - (F.normalize(x) * F.normalize(y)).sum(1).mean(),
            "mse": ((x - y) ** 2).mean(), "l2": ((x - y) ** 2).sum(1).sqrt().mean(),
            "mse_unit": ((F.normalize(x) - F.normalize(y)) ** 2).mean(),
            "vicreg": slow_vicreg(x, y), "barlow": slow_barlow(x, y), "none": 0 * x.sum()}[kind]


def slow_bepa(objective, batch, items):
    c, n, rows = objective.config, len(items), rows_of(batch["packed"])
    cls, sep, mask = SPECIAL.cls, SPECIAL.sep, SPECIAL.mask
    masked, firsts, seconds, starts = c.cls_view == "masked", [], [], []
    for item, row in zip(items, rows[-2 * n:]):
        a, b = ([cls, *ids.tolist(), sep] for ids in item.views)
        if c.order == "random" and row[:len(a)] != a:
            a, b = b, a
        firsts.append(a + [mask] * len(b) if masked else a)
        seconds.append([cls] + [mask] * (len(a) - 1) + b if masked else b)
        starts.append(0 if c.cls_view == "clean" else len(a))  # of the second sentence
    x = embeddings(objective, firsts)
    if masked:
        y = encode(objective.model, seconds)[0][range(n), starts]
    else:
        positions = [range(start, start + len(b)) for start, b in zip(starts, seconds)]
        y = embeddings(objective, seconds, positions)
    aligned = slow_align(c.align, x, y, temperature=c.temperature, include_self=c.include_self)
    return slow_mlm(objective, batch, items, -2 * n) + c.align_weight * aligned


def system_of(item):
    return [] if item.system is None else [item.system]


def slow_ntp(objective, batch, items):
    cls, sep, labels = SPECIAL.cls, SPECIAL.sep, objective.config.labels
    rows = [[cls, *(token for part in (*system_of(item), *item.views) for token in (*part, sep))]
            for item in items]
    states, _ = encode(objective.model, [row[:-1] for row in rows])
    losses = []
    for item, row, x in zip(items, rows, states):
        first = len(row) - len(item.views[1]) - 2 if labels == "answer" else 0
        # The last token of a complete answer predicts the stop token.
        last = len(row) - 2 + (labels != "all" and not item.cut[1])
        logits = x[first:last] @ objective.model.embed.weight.T
        targets = torch.tensor(row[first + 1:last + 1])
        losses.append(F.cross_entropy(logits, targets, reduction="none"))
    return torch.cat(losses).mean()


def slow_llm_jepa(objective, batch, items):
    """The answers, the Texts and the Codes in rows of their own."""
    c, embeddings = objective.config, []
    if c.jepa_dropout == 1:
        return c.gamma * slow_ntp(objective, batch, items)
    for side, (before, after) in enumerate(LlmJepa.affixes(c, SPECIAL)):
        rows = []
        for item in items:
            system = [token for text in system_of(item) for token in (*text, SPECIAL.sep)]
            rows.append([*before[:1], *system, *before[1:], *item.views[side], *after])
        states, _ = encode(objective.model, rows)
        embeddings.append(states[range(len(rows)), [len(row) - 1 for row in rows]])
    source, target = embeddings[::-1] if c.reverse else embeddings
    jepa = slow_align(c.align, source, target, temperature=c.temperature, symmetric=False)
    return c.gamma * slow_ntp(objective, batch, items) + c.jepa_weight * jepa


def slow_predictor(objective, context, positions):
    """Predict the rest of a row: context states (n, D), n + k positions -> states (k, D)."""
    k = len(positions) - len(context)
    x = torch.cat([objective.predictor_embed(context), objective.mask_token.expand(k, -1)])
    column, d = torch.arange(x.shape[1]), x.shape[1]
    angle = torch.tensor(positions)[:, None] / 10000 ** (column.double() // 2 * 2 / d)
    x = x + torch.where(column % 2 == 0, angle.sin(), angle.cos())
    real, heads = torch.ones(1, len(x), dtype=torch.bool), objective.config.predictor_heads
    x = run_blocks(objective.predictor, x[None], real, heads, pre=True)[0]
    return objective.predictor_proj(objective.predictor_norm(x[-k:]))


def slow_hybrid(objective, batch, items):
    c, n, guesses, goals = objective.config, len(items), [], []
    where = rows_of(batch["packed"], "positions")[n:]
    contexts, real = encode(objective.model, rows_of(batch["packed"])[n:], where)
    teacher, _ = encode(objective.teacher.model, rows_of(batch["clean"]))
    for number, positions in enumerate(rows_of(batch["predictor_packed"], "positions")):
        i = number // c.target_blocks
        guesses.append(slow_predictor(objective, contexts[i][real[i]], positions))
        goals.append(teacher[i, positions[len(where[i]):]].detach())
    guesses, goals = torch.cat(guesses), torch.cat(goals)
    if c.teacher_norm:
        goals = F.layer_norm(goals, goals.shape[-1:])
    lam = c.balance_start
    if c.balance == "learned":
        lam = torch.sigmoid(objective.balance)
    if c.balance == "scheduled":
        lam += float(objective.progress) * (c.balance_end - c.balance_start)
    mlm = slow_mlm(objective, batch, items, n)
    return lam * slow_align(c.align, guesses, goals) + (1 - lam) * mlm


# Combinations of options. test_minimal.py has those of the pages.
VARIANTS = {
    slow_mlm: [Mlm, {}, dict(regressor=True), dict(predict_from="previous")],
    slow_contrastive: [
        Contrastive, {}, dict(pool="mean", layers=0, temperature=0.5)],
    slow_mexma: [
        Mexma, dict(align_weight=3.0, mlm_weight=0.7, mask_first=0.8, mask_second=0.1),
        dict(align="info_nce", temperature=0.5, token_gradients=False),
        dict(align_views="dirty", koleo_weight=0.0),
        dict(align="info_nce", koleo_input="raw"),
        dict(symmetrical=False, align_views="dirty"), dict(symmetrical=False, align="none"),
        dict(pool="mean"), dict(pool="mean", align_views="dirty"),
        dict(pool="mean", align_views="dirty", symmetrical=False)],
    slow_bepa: [
        Bepa, {}, dict(packing="separate"), dict(cls_view="masked", order="given"),
        dict(packing="monolingual", include_self=True, temperature=0.5),
        dict(align="mse_unit"), dict(align="sigreg", align_weight=0.3), dict(pool="mean"),
        dict(pool="mean", cls_view="clean", packing="separate")],
    slow_ntp: [Ntp, {}, dict(labels="all"), dict(labels="all+eos")],
    slow_llm_jepa: [
        LlmJepa, dict(predictors=0), dict(jepa_dropout=1.0, gamma=0.5),
        dict(predictors=3, reverse=True, align="info_nce", temperature=0.5),
        dict(pred_position="prepend", predictors=2), dict(labels="all", align="info_nce"),
        dict(pred_position="prepend", reverse=True, view_end=True),
        dict(align="l2", gamma=0.5, jepa_weight=2.0), dict(view_end=True, labels="all+eos")],
    slow_hybrid: [
        Hybrid, dict(teacher_norm=True), dict(align="vicreg", balance="fixed", balance_start=0.7),
        dict(align="barlow", allow_overlap=True),
        dict(align="mse", balance="scheduled", balance_end=1.0)],
}
# These decide what is drawn, and the recomputation reads the batch: test_papers.py has the draws.
DRAWN = {"mask_ratio", "target_blocks", "target_low", "target_high", "context_low", "context_high",
         "momentum"}


def test_every_option_has_a_second_value_in_some_variant():
    for objective_class, *variants in VARIANTS.values():
        for field in fields(objective_class.Config):
            values = [(SMALL | options).get(field.name, field.default) for options in variants]
            assert field.name in DRAWN or set(values) != {field.default}, field.name


@pytest.mark.parametrize("slow, objective_class, options", [
    (slow, one, options) for slow, (one, *several) in VARIANTS.items() for options in several],
    ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_loss_and_its_gradients_equal_a_plain_padded_recomputation(slow, objective_class,
                                                                       options):
    for seed in range(2):
        items = examples(objective_class, 5, seed, system=objective_class.causal and seed == 1)
        objective = build(objective_class, **options)
        for parameter in objective.parameters():
            torch.nn.init.normal_(parameter, std=0.5)  # large, and a teacher unlike its student
        objective.after_step(0.25 + 0.5 * seed)
        batch = batch_of(objective, seed, items)
        losses = seeded(objective, batch)[0], seeded(slow, objective, batch, items)
        ours, plain = ((loss, *gradients(loss, objective)) for loss in losses)
        check_equal(objective, f"{slow.__name__} in tests/test_objectives.py", ours, plain)


# ---- several processes; test_any_objective.py starts them for what is in-batch by default


@pytest.mark.parametrize("objective_class, term", [(Mexma, "align"), (LlmJepa, "jepa")])
def test_info_nce_compares_the_texts_of_all_processes(objective_class, term, monkeypatch):
    objective, items = build(objective_class, align="info_nce"), examples(objective_class)
    whole = objective(batch_of(objective, items=items * 2))[1][term]
    # Another process has the same texts.
    monkeypatch.setattr(objectives, "all_gather_with_grad", lambda x: torch.cat([x, x]))
    assert abs(objective(batch_of(objective, items=items))[1][term] - whole) < 1e-12


# ---- no leakage. test_model.py has plain rows


def altered(packed, index):
    """The line with another token at an index, or at several."""
    tokens = packed.tokens.clone()
    tokens[index] = 5 + (tokens[index] - 4) % 50
    return replace(packed, tokens=tokens)


def influence(objective, packed):
    """(T, T) bool: does state i change with token j?"""
    with torch.no_grad():
        before = objective.model(packed)
        return torch.stack([(objective.model(altered(packed, j)) != before).any(1)
                            for j in range(len(packed.tokens))], 1)


@pytest.mark.parametrize("side", [0, 1])
def test_unmasking_a_language_uses_the_clean_text_of_the_other_and_never_its_own(side):
    objective = build(Mexma, torch.float32, mask_first=0.4 * (1 - side), mask_second=0.4 * side)
    batch = batch_of(objective)
    packed, n = batch["packed"], len(batch["packed"]) // 4
    before = objective(batch)[1]["mlm"]
    for group in (2, 3):  # clean A, clean B
        second = packed.cu_seqlens[group * n:(group + 1) * n].long() + 1
        after = objective(batch | dict(packed=altered(packed, second)))[1]["mlm"]
        assert (before == after) == (group == 2 + side)


def test_bepas_embedding_never_sees_the_other_sentence():
    objective, items = build(Bepa, order="given"), examples(Bepa, 3)
    first, second = ([len(item.views[side]) + 2 for item in items] for side in (0, 1))
    rows = [*map(sum, zip(first, second)), *first, *second]  # the masked rows have both sentences
    expected = torch.block_diag(*[torch.ones(length, length) for length in rows])
    packed = batch_of(objective, items=items)["packed"]
    assert torch.equal(influence(objective, packed), expected.bool())


def test_no_view_of_llm_jepa_sees_what_it_must_not():
    objective, items = build(LlmJepa, predictors=2), examples(LlmJepa, 3, system=True)
    rows = []
    for item in items:
        text, code = item.views
        lengths = [len(item.system) + 2, len(text), 2, len(code) + 1, len(code)]
        opening, text_end, preds_end, answer_end, end = np.cumsum(lengths).tolist()
        sees = torch.ones(end, end).tril()  # nothing ahead
        sees[preds_end:answer_end, text_end:preds_end] = 0  # the answer does not see [PRED]
        sees[answer_end:, opening:answer_end] = 0  # nor does the Code's view see Text or answer
        rows.append(sees)
    packed = batch_of(objective, items=items)["packed"]
    assert torch.equal(influence(objective, packed), torch.block_diag(*rows).bool())


def test_no_prediction_depends_on_a_target_block_and_every_target_does():
    objective = build(Hybrid, torch.float32, balance="fixed", balance_start=1.0)
    batch = batch_of(objective, items=examples(Hybrid, 1))
    before, _ = objective(batch)
    for index in set(batch["block_from"].tolist()):
        assert index not in rows_of(batch["packed"], "positions")[1]  # the context
        for name, changes in (("packed", False), ("clean", True)):  # of the model, of the teacher
            after, _ = objective(batch | {name: altered(batch[name], index)})
            assert (after != before) == changes


# ---- bepa and llm-jepa


def test_the_rows_of_each_packing():
    items = [data.Example(tuple([10 + column] for column in columns), columns)
             for columns in [(0, 1), (1, 2), (0, 1), (1, 0)]]
    rows = [row.tolist() for row in objectives.monolingual_rows(items, SPECIAL)]
    assert rows == [[2, 11, 3, 2, 11, 3], [2, 10, 3, 2, 10, 3], [2, 11, 3, 2, 11, 3],
                    [2, 12, 3], [2, 10, 3]]
    for packing, count in (("bilingual", 4), ("monolingual", 5), ("separate", 8)):
        batch = batch_of(build(Bepa, packing=packing), items=items)
        assert len(batch["packed"]) == count + 2 * len(items)
    assert len(batch["targets"]) == count  # one in each separate row, as released


CHAT = SPECIAL._replace(chat=Chat((1,), (7,), (8, 9), (10,), (11,)))


@pytest.mark.parametrize("objective_class, options, special, expected", [
    (Mlm, {}, SPECIAL._replace(before=(), after=(1, 3)), (((), (1, 3)), ((), (1, 3)))),
    (Ntp, {}, CHAT, (((1, 8, 9), (3,)), ((1, 11), (3,)))),
    (LlmJepa, dict(predictors=2), CHAT._replace(preds=(57, 58)),
     (((1, 8, 9), (58, 57)), ((1, 11), ()))),
    (LlmJepa, dict(predictors=3), SPECIAL, (((2,), (59, 58, 57)), ((2,), ()))),
    (LlmJepa, dict(predictors=2, pred_position="prepend", reverse=True, view_end=True), SPECIAL,
     (((2,), (3,)), ((2, 57, 58), (3,))))])
def test_the_affixes_of_a_text_are_all_ids_around_it(objective_class, options, special, expected):
    assert objective_class.affixes(objective_class.Config(**options), special) == expected


def test_jepa_dropout_skips_the_views_and_their_tokens_at_its_rate():
    objective = build(LlmJepa, jepa_dropout=0.75)
    batches = [batch_of(objective, seed) for seed in range(400)]
    skipped = [batch for batch in batches if "last_index" not in batch]
    assert abs(len(skipped) / 400 - 0.75) < 0.07
    plain = batch_of(build(Ntp))["packed"].tokens
    assert torch.equal(skipped[0]["packed"].tokens, plain)
    loss, terms = objective(skipped[0])
    assert terms["jepa"] == 0 and loss == terms["ntp"]


# ---- hybrid


def drawn(config, lengths, seed=0):
    """Draw contexts and blocks with the fractions of a batch."""
    rng = np.random.default_rng(seed)
    for length in lengths:
        fraction, context_fraction = rng.uniform(0.10, 0.25), rng.uniform(0.65, 0.85)
        yield draw_blocks(length, fraction, context_fraction, config, rng)


def test_blocks_are_everywhere_and_short_rows_have_them_too():
    """test_papers.py has the lengths of contexts and blocks."""
    seen = np.zeros(128)
    for context, blocks in drawn(Hybrid.Config(), [128] * 1500):
        assert (np.diff(context) > 0).all() and not np.isin(context, np.concatenate(blocks)).any()
        for block in blocks:
            seen[block] += 1
    assert seen.min() > 0 and seen[32:96].max() / seen[32:96].min() < 1.3
    for context, blocks in drawn(Hybrid.Config(), list(range(3, 12)) * 50):
        assert len(context) and all(len(block) for block in blocks)


def test_with_overlap_the_sampler_has_the_statistics_of_the_released_one():
    """Measured with the released code on rows of 128 tokens: targets inside the context, rows with
    both blocks visible, mean size of the context as a fraction of the row, contexts of fewer than
    32 tokens."""
    found = []
    for context, blocks in drawn(Hybrid.Config(allow_overlap=True), [128] * 1000, seed=2):
        visible = [np.isin(block, context) for block in blocks]
        found.append((np.concatenate(visible).mean(), all(one.all() for one in visible),
                      len(context) / 128, len(context) < 32))
    assert np.abs(np.mean(found, 0) - (0.52, 0.25, 0.48, 0.24)).max() < 0.025


def test_hybrid_warns_about_an_extreme_lambda():
    objective = build(Hybrid)
    assert objective.warning() == ""
    for value, starved in ((4.0, "mlm"), (-4.0, "latent")):
        torch.nn.init.constant_(objective.balance, value)
        assert f"the {starved} loss has almost no weight" in objective.warning()
