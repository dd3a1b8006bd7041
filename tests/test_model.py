"""model.py: the packed line, attention against a dense float64 oracle, the transformer, generation,
LoRA, files."""

import math
import os
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import kernels
from common import BadInput
from kernels.cross_entropy import linear_cross_entropy
from model import (
    DECODER,
    SIZES,
    KeyValueCache,
    Model,
    ModelConfig,
    Packed,
    Segment,
    add_lora,
    add_tokens,
    load,
    plain_weights,
    save,
)
from objectives import Contrastive, Hybrid, LlmJepa, Mexma

TINY = ModelConfig(vocab=50, width=16, layers=2, heads=4, ffn_dim=32, max_positions=64, dropout=0.0)
LLAMA = replace(TINY, **DECODER, kv_heads=2)
CONFIGS = {
    "bert": TINY,
    "llama": LLAMA,
    "sinusoidal": replace(TINY, positions="sinusoidal", norm_position="pre", head="transform"),
    "qwen2": replace(LLAMA, qkv_bias=True),
    "qwen3": replace(LLAMA, head_dim=6, qk_norm="head"),
    "olmo2": replace(LLAMA, norm_position="branch", qk_norm="whole",
                     rope_scaling=(8.0, 1.0, 4.0, 20)),
    "gemma2": replace(LLAMA, norm_position="both", activation="geglu", embed_scale=4.0,
                      attn_softcap=5.0, logit_softcap=3.0),
    "offset, untied": replace(TINY, position_offset=2, tied=False, head="bias"),
}


def ids(rng, length):
    return rng.integers(5, 50, length)


def plain(lengths, causal=False):
    rng = np.random.default_rng(0)
    return [[Segment(ids(rng, length), causal)] for length in lengths]


def answers(lengths):
    """Rows of a text, an answer that sees all but its last token, and one that does not."""
    rows = plain([before for before, _ in lengths], True)
    for row, (before, length) in zip(rows, lengths, strict=True):
        row.append(Segment(np.arange(length), True, (0, before - 1)))
        row.append(Segment(np.arange(length), True))
    return rows


# Every kind of mask that an objective uses.
LAYOUTS = {
    "bidirectional": plain([1, 7, 3, 12, 1, 40, 5, 33, 2, 9]),
    "causal": plain([1, 9, 70, 2, 31], True),
    "one length": plain([6] * 5),
    "all of length one": plain([1] * 40),
    "one token": plain([1]),
    "one row": plain([150]),
    "many lengths": plain([1, 2, 3, 64, 65, 130]),
    "segments apart": [[*plain([3])[0], *plain([50])[0]], [*plain([2], True)[0], *plain([2])[0]]],
    "prefix, answer, isolated segment": answers([(20, 30), (4, 3), (2, 1)]),
    "far prefix": [
        [*plain([20], True)[0], *plain([60])[0], Segment(np.arange(25), True, (0, 18))],
        [*plain([3])[0], *plain([50])[0], Segment(np.arange(1), True, (0, 3))]],
}


def assert_close(ours, expected, limit=1e-12):
    for one, other in zip(ours, expected, strict=True):
        assert (one - other).abs().max() < limit


def oracle(qkv, heads, kv_heads, packed, softcap=0.0):
    """Compute dense masked attention, one head at a time, by the definition of key_ranges."""
    head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
    q, k, v = qkv.view(len(qkv), -1, head_dim).split([heads, kv_heads, kv_heads], 1)
    key = torch.arange(len(qkv), device=qkv.device)
    a, b, c, d = packed.key_ranges.long().T[..., None]
    visible = (a <= key) & (key < b) | (c <= key) & (key < d)
    out = []
    for head in range(heads):
        scores = q[:, head] @ k[:, head * kv_heads // heads].T / math.sqrt(head_dim)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        out.append(weights @ v[:, head * kv_heads // heads])
    return torch.stack(out, 1).flatten(1)


# ---- the line


def test_the_mask_of_a_row_is_what_its_segments_say():
    row = [Segment(np.arange(3), True), Segment(np.arange(2), True, (0, 2)), Segment(np.arange(2))]
    packed = Packed.of_segments([[Segment(np.arange(3))], row])
    assert packed.mask(0).tolist() == [[True] * 3] * 3
    assert packed.mask(1).int().tolist() == [  # as drawn at the head of model.py
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1],
        [0, 0, 0, 0, 0, 1, 1]]
    assert packed.key_ranges[7].tolist() == [6, 8, 3, 5]
    assert packed.positions.tolist() == [0, 1, 2, 0, 1, 2, 2, 3, 0, 1]
    assert packed.visible_pairs() == sum(int(packed.mask(row).sum()) for row in (0, 1))


# ---- attention


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("heads, kv_heads, softcap", [(4, 4, 0), (4, 2, 0), (4, 1, 0), (4, 2, 1.5)])
def test_attention_and_its_gradient_equal_the_dense_float64_oracle(name, heads, kv_heads, softcap):
    packed = Packed.of_segments(LAYOUTS[name])
    shape = (len(packed.tokens), (heads + 2 * kv_heads) * 8)
    qkv = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(len(packed.tokens), heads * 8, dtype=torch.float64)
    results = []
    for compute in (kernels.packed_attention, oracle):
        out = compute(qkv, heads, kv_heads, packed, softcap=softcap)
        results.append((out, *torch.autograd.grad((out * weight).sum(), qkv)))
    assert_close(*results)
    single = kernels.packed_attention(qkv.float(), heads, kv_heads, packed, softcap=softcap)
    assert (single - results[1][0]).abs().max() < 1e-5


@pytest.mark.parametrize("softcap", [0, 1.5])
@pytest.mark.parametrize("is_autocast", [True, False])
def test_a_cpu_that_computes_in_bfloat16_keeps_attention_in_float32(is_autocast, softcap):
    packed = Packed.of_segments(LAYOUTS["prefix, answer, isolated segment"])
    # The inputs are bfloat16 numbers; the comparison is of what attention makes of them.
    qkv = torch.randn(len(packed.tokens), 8 * 8).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        out = kernels.packed_attention(qkv, 4, 2, packed, softcap=softcap)
    weight = torch.randn_like(out)
    ours = (out, *torch.autograd.grad((out * weight).sum(), qkv))
    exact = qkv.detach().double().requires_grad_()
    states = oracle(exact, 4, 2, packed, softcap)
    for one, other in zip(ours, (states, *torch.autograd.grad((states * weight).sum(), exact))):
        assert one.dtype == torch.bfloat16
        # Only the results are rounded, by half of the last of bfloat16's eight binary digits.
        assert ((one - other).abs() <= other.abs() * 2 ** -8 + 1e-6).all()


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_the_chunked_cross_entropy_equals_the_plain_one(softcap, monkeypatch):
    monkeypatch.setattr("kernels.cross_entropy.CHUNK", 17 * 50 * 8)  # a few positions at a time
    monkeypatch.setattr("kernels.cross_entropy.SLICE", 16)
    shapes = ((39, 8), (50, 8), 50)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    targets = torch.randint(0, 50, (39,))
    logits = F.linear(*inputs)
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    whole = F.cross_entropy(logits, targets, reduction="sum")
    ours = linear_cross_entropy(*inputs, targets, softcap)
    results = [(loss, *torch.autograd.grad(3 * loss, inputs)) for loss in (ours, whole)]
    assert_close(*results)


# ---- the transformer


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_row_gets_the_same_states_in_any_company(name, causal):
    model = Model(CONFIGS[name]).double().eval()
    rng = np.random.default_rng(2)
    rows = [ids(rng, n) for n in [3, 17, 1, 8, 40, 8]]
    together = model(Packed.of(rows, causal)).split([len(row) for row in rows])
    assert_close(together, [model(Packed.of([row], causal)) for row in rows])


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_leaks_between_rows_or_from_the_future(name):
    model = Model(CONFIGS[name]).eval()
    rng = np.random.default_rng(3)
    rows = [ids(rng, n) for n in [6, 9, 4]]
    before = model(Packed.of(rows, causal=True))
    rows[1] = rows[1].copy()
    rows[1][5] = 49 if rows[1][5] != 49 else 48
    same = (before == model(Packed.of(rows, causal=True))).all(1)
    assert same[:11].all() and same[15:].all() and not same[11:15].any()


@pytest.mark.parametrize("name", CONFIGS)
def test_generation_with_a_cache_gives_what_the_whole_row_does(name):
    model = Model(CONFIGS[name]).double().eval()
    lengths = [12, 9, 11]
    rows = [ids(np.random.default_rng(seed), length) for seed, length in enumerate(lengths)]
    expected = [model.logits(model(Packed.of([row], causal=True))) for row in rows]
    caches = KeyValueCache.of(model, 3, 12)
    packed = Packed.of([row[:length - 4] for row, length in zip(rows, lengths)], causal=True)
    states = model(packed, caches=caches)
    assert torch.equal(states, model(packed))
    active = [0, 1, 2]
    for remaining in (4, 3, 2, 1):
        positions = torch.tensor([lengths[row] - remaining for row in active])
        tokens = torch.tensor([int(rows[row][i]) for row, i in zip(active, positions)])
        logits = model.decode(tokens, positions, caches)
        for row, i, of_row in zip(active, positions, logits):
            assert (of_row - expected[row][i]).abs().max() < 1e-12
        if remaining == 3:  # a row is finished
            active = [0, 2]
            for cache in caches:
                cache.keep(active)


def test_each_pooling_takes_its_states():
    model = Model(replace(TINY, normalize=True))  # at inference only, not here
    packed = Packed.of([[5, 6, 7], [8], [9, 10]])
    states = torch.arange(12.0).view(6, 2)
    assert model.pool(states, packed, "cls").tolist() == [[0, 1], [6, 7], [8, 9]]
    assert model.pool(states, packed, "last").tolist() == [[4, 5], [6, 7], [10, 11]]
    assert model.pool(states, packed, "mean").tolist() == [[2, 3], [6, 7], [9, 10]]
    assert model.pool(-states, packed, "max").tolist() == [[0, -1], [-6, -7], [-8, -9]]


def parameters(model, trained=False):
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trained)


def test_the_sizes_of_papers_have_their_numbers_of_parameters():
    """XLM-R's encoders without pooler and head: V 250,002, 514 positions, no token types. Predict
    and Reconstruct's as in its logs, without its fixed positions, 512 x 512."""
    with torch.device("meta"):
        for size, layers, width in (("base", 12, 768), ("large", 24, 1024)):
            blocks = layers * (12 * width**2 + 13 * width)
            count = parameters(Model(ModelConfig(**SIZES[size], vocab=250002)))
            assert count == (250002 + 514 + 2) * width + blocks
        hybrid = parameters(Model(ModelConfig(**SIZES["hybrid"], vocab=30522)))
        assert hybrid == 34_804_736 - 512 * 512


# ---- configs


@pytest.mark.parametrize("make, message", [
    (lambda: Packed.of([[5, 6], []]), "an empty row"),
    (lambda: replace(LLAMA, head_dim=5), "width / heads is 5, and it must be even"),
    (lambda: Contrastive.Config(temperature=0), "temperature is 0: it must be above 0"),
    (lambda: Mexma.Config(koleo_weight=-1.0), "koleo_weight is -1.0: it must be at least 0"),
    (lambda: Mexma.Config(mask_first=1.5), "mask_first is 1.5: it must be a fraction"),
    (lambda: Mexma(Model(TINY), Mexma.Config(head_heads=7)), "head_heads is 7: the width 16"),
    (lambda: LlmJepa.Config(predictors=11), "predictors is 11"),
    (lambda: Hybrid.Config(target_blocks=4), "target_blocks 4 .* no context"),
    (lambda: Hybrid.Config(balance_start=1.0), "balance_start is 1.0")])
def test_a_value_that_cannot_work_is_refused_in_one_line(make, message):
    with pytest.raises(BadInput, match=f"^[^\n]*{message}[^\n]*$"):
        make()


# ---- LoRA, new tokens, files


@pytest.mark.parametrize("shape, projections", [(TINY, 6), (LLAMA, 7)], ids=["bert", "llama"])
def test_lora_trains_an_adapter_of_each_projection_and_saves_merged_weights(shape, projections,
                                                                            tmp_path):
    model = Model(shape).double().eval()
    packed = Packed.of([[5, 6, 7, 49], [8, 9]])
    before, embedding = model(packed), model.embed.weight.clone()
    add_lora(model, 2, new_ids=[48, 49]).eval()
    assert torch.equal(model(packed), before)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 1 + 2 * 2 * projections
    for name, p in trained.items():
        if ".a." in name:  # uniform within +-1 / sqrt(in)
            assert 0.7 < p.abs().max() * p.shape[1] ** 0.5 <= 1 and p.min() < 0 < p.max()
        torch.nn.init.normal_(p)
    out = model.blocks[0].attention.out
    assert_close([out.weight], [out.linear.weight + 2 * out.b[0] @ out.a[0]])  # alpha = 2 rank
    plain = Model(shape).double().eval()
    plain.load_state_dict(plain_weights(model))
    assert_close([model(packed)], [plain(packed)])
    assert (plain.embed.weight != embedding).any(1).nonzero().flatten().tolist() == [48, 49]
    save(model, tmp_path / "model.pt")
    for name, weight in load(tmp_path / "model.pt").state_dict().items():
        assert torch.equal(weight, plain.state_dict()[name].float()), name


def test_lora_of_llama_at_rank_512_trains_the_fraction_that_the_paper_counts():
    """LLM-JEPA, table 8."""
    with torch.device("meta"):
        shape = ModelConfig(vocab=128256, width=2048, layers=16, heads=32, ffn_dim=8192,
                            **DECODER, kv_heads=8)
        model = add_lora(Model(shape), 512)
    assert parameters(model, trained=True) == 360_710_144
    assert round(100 * 360_710_144 / parameters(model), 2) == 22.59


@pytest.mark.parametrize("known, vocab", [(None, 53), (45, 50), (49, 52)])
def test_new_tokens_are_the_mean_of_the_known_ones_and_take_unused_rows_first(known, vocab):
    model = Model(replace(TINY, tied=False, head="bias")).eval()
    larger = add_tokens(model, 3, known)
    rows = slice(known or 50, (known or 50) + 3)
    assert larger.config == replace(model.config, vocab=vocab)
    for name, old in model.state_dict().items():
        new = larger.state_dict()[name]
        if name in ("embed.weight", "vocabulary.weight", "vocabulary_bias"):
            assert torch.allclose(new[rows], old[:known].mean(0).expand_as(new[rows]))
            old = old[:known]
        assert torch.equal(new[:len(old)], old)
    packed = Packed.of([[5, 6, 7]])
    assert torch.equal(larger(packed), model(packed)) and not larger.training


def test_a_saved_model_rebuilds_alone_and_exactly(tmp_path):
    model = Model(replace(TINY, pool="mean")).eval()
    packed = Packed.of([[5, 6, 7], [8, 9]])
    save(model, tmp_path / "model.pt")
    again = load(tmp_path / "model.pt")
    assert again.config == model.config and torch.equal(again(packed), model(packed))
    config = asdict(model.config)
    del config["qk_norm"], config["tied"]  # the file is older than these fields
    torch.save({"config": config, "weights": model.state_dict()}, tmp_path / "model.pt")
    assert load(tmp_path / "model.pt").config == model.config


@pytest.mark.parametrize("saved, message", [
    ({"config": asdict(TINY) | {"flavor": 1}, "weights": {}}, "of this version .*flavor"),
    ({"config": None, "weights": {}}, "is not a model of this version"),
    ({"config": os.system}, "is not a checkpoint of tensors and plain values"),
    (b"PK cut", "it is damaged or of another kind"), (None, "does not exist")], ids=str)
def test_a_file_that_is_not_a_model_is_one_line_and_nothing_in_it_is_executed(
        saved, message, tmp_path):
    path = tmp_path / "model.pt"
    if isinstance(saved, bytes):
        path.write_bytes(saved)
    elif saved:
        torch.save(saved, path)
    with pytest.raises(BadInput, match=f"^[^\n]*{path}[^\n]*{message}[^\n]*$"):
        load(path)
