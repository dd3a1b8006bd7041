"""The papers' values, each with the place that states it, and the options that decide what is
drawn."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from test_objectives import (
    SHAPE,
    assert_near,
    batch_of,
    build,
    examples,
    rows_of,
)

import data
from harness.settings import presets_of
from objectives import OBJECTIVES, Bepa, Hybrid, Mexma, Mlm

# {objective: {source: values}}. Sections and tables are the paper's. "code": the paper does not say
# it, and its released code does; "ours": neither does, or both leave it open.
TRAINER = {  # what LLM-JEPA's code leaves to transformers.Trainer, and its command line
    "code": dict(warmup=0.0, schedule="linear", weight_decay=0.0, clip=1.0, max_length=512,
                 batch=4 * 4 * 8),
    "sec. 4.1: four epochs, of the 8,000 rows of NL-RX-SYNTH": dict(steps=8000 // 128 * 4),
    "ours: built-in expressions instead of NL-RX-SYNTH": dict(data="regex"),
    "ours: eq. 2 has all tokens, and the code all but the stop token": dict(labels="answer")}
MEXMA = {
    "A.3": dict(steps=300_000),
    "A.5: linearly increased from 1e-5 for the 300k steps": dict(
        lr_start=1e-5 / 1e-4, warmup=1.0, schedule="constant"),
    "A.5": dict(max_length=200),
    "code": dict(lr=1e-4, clip=1.2, weight_decay=0.0)}
TABLE_1 = {
    "table 1": dict(lr=5e-5, batch=64, schedule="cosine", weight_decay=0.05, mask_ratio=0.15),
    "table 1: 3 epochs, of 6.4 million articles; 10 steps of warmup": dict(
        steps=3 * 6_400_000 // 64, warmup=10 / 300_000),
    "sec. 4.1": dict(max_length=512),
    "code: no clipping": dict(clip=0.0),
    "ours: built-in texts instead of Wikipedia": dict(data="documents")}
PAPERS = {
    "mexma": MEXMA | {
        "sec. 3": dict(align="mse", symmetrical=True, token_gradients=True),
        "table 11, row 4": dict(align_views="clean"),
        "A.2": dict(head_layers=6),
        "A.3: 8 GPUs of 150 pairs, two gradients": dict(batch=2 * 150, accumulate=2),
        "A.4, halved: we average over two languages": dict(
            align_weight=1.0, mlm_weight=2 * 1 / 2, koleo_weight=2 * 0.01 / 2),
        "A.5: 40 %": dict(mask_first=0.4, mask_second=0.4),
        "code, heads": dict(head_heads=8, head_hidden=3072, koleo_input="unit"),
        "ours": dict(temperature=0.07)},
    "contrastive": MEXMA | {
        "MEXMA, sec. 5.2: batch of 1.2k, symmetric cross-entropy": dict(batch=1200),
        "ours": dict(temperature=0.07)},
    "bepa": {
        "A.3": dict(lr=2e-5, batch=16, weight_decay=0.01, mask_ratio=0.15, align_weight=1.0),
        "A.3: 10 epochs, of 14 * 10,000 pairs; 500 warmup steps": dict(
            steps=10 * 140_000 // 16, warmup=500 / 87_500),
        "A.3: 256 tokens of two texts and four special tokens": dict(max_length=(256 - 4) // 2),
        "sec. 3.1": dict(packing="bilingual"),
        "sec. 3.2": dict(align="info_nce", include_self=False),
        "figure 5": dict(cls_view="hidden"),
        "code": dict(schedule="linear", clip=1.0, temperature=0.07),
        "ours": dict(order="random")},
    "llm-jepa": TRAINER | {
        "table 12, Llama on NL-RX-SYNTH": dict(lr=2e-5, jepa_weight=1.0, predictors=1),
        "sec. 3.1": dict(align="cosine", pred_position="append", view_end=False),
        "sec. 3.1, from Text to Code": dict(reverse=False),
        "eq. 2": dict(gamma=1.0),
        "sec. 5.2": dict(jepa_dropout=0.0),
        "code, InfoNCE": dict(temperature=0.07)},
    "ntp": TRAINER | {"table 12, Llama on NL-RX-SYNTH": dict(lr=2e-5)},
    "hybrid": TABLE_1 | {
        "table 1, masks": dict(context_low=0.65, context_high=0.85, target_low=0.10,
                               target_high=0.25, target_blocks=2, min_keep=32),
        "table 1, EMA": dict(momentum=0.996),
        "eq. 3, without a norm": dict(teacher_norm=False),
        "eq. 5": dict(align="cosine"),
        "eq. 7": dict(balance="learned"),
        "sec. 3.2, following I-JEPA": dict(allow_overlap=False),
        "sec. 4.1": dict(predictor_width=512, predictor_layers=6, max_length=512),
        "code": dict(balance_start=0.5, predictor_heads=8, predictor_std=0.02),
        "ours": dict(balance_end=0.5)},
    "mlm": {
        "BERT, A.2": dict(lr=1e-4, batch=256, steps=1_000_000, warmup=0.01, schedule="linear",
                          weight_decay=0.01, max_length=512 - 2),
        "BERT, sec. 3.1": dict(mask_ratio=0.15),
        "BERT, code": dict(clip=1.0),
        "ours: eq. 9 of hybrid's paper is for the preset alone": dict(regressor=False),
        "ours: LLM2Vec's masked next-token prediction is for decoders": dict(predict_from="own")},
}
PRESETS = {
    ("mlm", "hybrid"): TABLE_1 | {"eq. 9": dict(regressor=True)},
    **{(name, "paper"): {} for name in OBJECTIVES},
    **{(name, "finetune"): {"ours: a small search": dict(
        lr=2e-4, warmup=0.1, lr_start=0.0, schedule="cosine", steps=1000, batch=64, accumulate=1,
        optimizer="adamw")} for name in ("mexma", "contrastive")},
    # of the toy scale alone
    **{(name, "cls"): {} for name in ("mexma", "contrastive", "bepa")},
    **{(name, "from-bag"): {} for name in ("mexma", "contrastive")},
    ("contrastive", "bag"): {"ours: the simplest encoder": dict(layers=0, pool="mean",
                                                                    positions="rotary")},
    ("ntp", "scratch"): {"table 2": dict(lr=8e-5)},
    ("llm-jepa", "scratch"): {"table 2": dict(lr=8e-5, jepa_weight=2.0, predictors=3)}}


def flat(sources):
    return {name: value for values in sources.values() for name, value in values.items()}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_value_at_paper_scale_is_the_one_that_its_source_states(name):
    objective_class = OBJECTIVES[name]
    options = {field.name: field.default for field in fields(objective_class.Config)}
    assert options | objective_class.paper == pytest.approx(flat(PAPERS[name]))
    presets = presets_of(objective_class)
    assert presets.keys() == {preset for one, preset in PRESETS if one == name}
    assert presets_of(type("Extended", (objective_class,), dict(name="mine"))) == presets
    for preset, (paper, _) in presets.items():
        expected = flat(PRESETS[name, preset])
        assert paper == pytest.approx({key: expected[key] for key in paper})
        assert expected.keys() - paper.keys() <= options.keys()  # a default of the class


# ---- the recomputation of test_objectives.py takes its draws from the batch: these are the draws


@pytest.mark.parametrize("objective_class, options, fractions", [
    (Mlm, dict(mask_ratio=0.6), [0.6]), (Hybrid, dict(mask_ratio=0.6), [0.6]),
    (Bepa, dict(mask_ratio=0.6), [0.6]), (Bepa, dict(mask_ratio=0.6, packing="separate"), [0.6]),
    (Mexma, dict(mask_first=0.9, mask_second=0.3), [0.9, 0.3]),
    (Mexma, dict(mask_first=0.7, symmetrical=False, align_views="dirty"), [0.7])])
def test_as_many_tokens_are_masked_as_the_option_says(objective_class, options, fractions):
    texts = [[np.arange(5, 55)] * objective_class.views for _ in range(100)]  # 5,000 tokens a side
    batch = batch_of(build(objective_class, **options), items=[data.Example(one) for one in texts])
    counts = batch.get("targets_per_side", [len(batch["targets"])])
    sides = 2 if objective_class is Bepa else 1  # in one line
    assert np.array(counts) / (5000 * sides) == pytest.approx(fractions, abs=0.03)


@pytest.mark.parametrize("objective_class, options", [
    (Bepa, {}), (Mexma, dict(symmetrical=False, align_views="dirty"))])
def test_half_of_the_pairs_are_swapped_and_each_as_a_whole(objective_class, options):
    items = examples(objective_class, 200)
    rows = rows_of(batch_of(build(objective_class, **options), items=items)["packed"])
    swapped = [row[1:-1] == item.views[0].tolist() for row, item in zip(rows[-200:], items)]
    assert 80 <= sum(swapped) <= 120
    for item, swap, first, second in zip(items, swapped, rows[-400:-200], rows[-200:]):
        assert second[1:-1] == item.views[1 - swap].tolist()
        assert len(first) == len(item.views[int(swap)]) + 2  # Mexma's is masked


@pytest.mark.parametrize("target, blocks, context, min_keep, longest", [
    (0.10, 2, 0.50, 2, 53), (0.30, 1, 0.80, 2, 83), (0.10, 1, 0.10, 32, 100)])
def test_predicted_blocks_and_contexts_are_as_long_as_the_options_say(target, blocks, context,
                                                                      min_keep, longest):
    objective = build(Hybrid, target_low=target, target_high=target + 0.04, target_blocks=blocks,
                      context_low=context, context_high=context + 0.04, min_keep=min_keep)
    items = [data.Example([np.arange(5, 55).repeat(2)[:98]])] * 40  # 100 tokens with [CLS], [SEP]
    sizes, spans = set(), []
    for seed in range(30):
        batch = batch_of(objective, seed, items)
        assert len(batch["predictor_packed"]) == 40 * blocks
        sizes.add(len(batch["block_from"]) / len(batch["predictor_packed"]))
        contexts = rows_of(batch["packed"], "positions")[len(items):]
        spans += [row[-1] - row[0] + 1 for row in contexts]
        assert min_keep <= min(map(len, contexts))
    assert sizes == {*range(round(100 * target), round(100 * target) + 4)}
    assert max(spans) == longest  # a block at an end of the context shortens it


@pytest.mark.parametrize("momentum", [0.996, 0.5])
def test_the_teacher_has_no_dropout_and_follows_with_the_momentum_that_is_given(momentum):
    objective = build(Hybrid, shape=replace(SHAPE, dropout=0.5), momentum=momentum).train()
    clean, teacher = batch_of(objective)["clean"], objective.teacher
    assert torch.equal(teacher(clean), teacher(clean))
    for parameter in teacher.parameters():
        torch.nn.init.normal_(parameter)
    for progress in (0.5, 1.0):
        m = momentum + (1 - momentum) * progress
        expected = [m * slow + (1 - m) * fast for slow, fast in zip(
            teacher.parameters(), objective.model.parameters())]
        objective.after_step(progress)
        assert_near(teacher.parameters(), expected, 1e-12)


def test_head_and_predictor_have_the_shape_that_is_given():
    head = build(Mexma, head_layers=3, head_hidden=40).unmask
    predictor = build(Hybrid, predictor_layers=1, predictor_width=24).predictor
    assert (len(head), *head[0].mlp.up.weight.shape) == (3, 40, SHAPE.width)
    assert (len(predictor), *predictor[0].mlp.up.weight.shape) == (1, 4 * 24, 24)


def test_the_predictor_starts_with_the_deviation_that_is_given():
    for std in (0.02, 0.3):
        weight = build(Hybrid, predictor_std=std, predictor_width=48).predictor[0].mlp.up.weight
        assert weight.std().item() == pytest.approx(std, rel=0.05)
