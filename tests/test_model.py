"""model.py: the packed line, attention against a dense float64 oracle, the transformer, generation,
LoRA, files."""

import math
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import data
import kernels
from base.common import BadInput
from base.sharding import check_shard
from data import Packed, Segment
from harness.pretrained import add_lora, add_tokens
from harness.settings import TrainConfig
from harness.weights import load, save
from kernels.cross_entropy import linear_cross_entropy
from kernels.padded import sdpa
from model import DECODER, SIZES, Model, ModelConfig, set_attention
from objectives import Bepa, Hybrid, LlmJepa, Mexma, info_nce

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
    "modernbert": replace(TINY, norm_position="embed", positions="rotary", activation="geglu-erf",
                          bias=False, rope_thetas=(1000.0, 0.0), windows=(3, 0), head="transform"),
    "no positions": replace(TINY, positions="rotary", rope_thetas=(0.0, 0.0)),
    "offset, untied": replace(TINY, position_offset=2, tied=False, head="transform"),
}


def ids(rng, length):
    return rng.integers(5, 50, length)


def segment(length, causal=False, prefix=None):
    return Segment(np.zeros(length, np.int64), causal, prefix)


def plain(lengths, causal=False):
    return [[segment(length, causal)] for length in lengths]


# Every kind of mask that an objective uses.
LAYOUTS = {
    "bidirectional": plain([1, 7, 3, 12, 1, 40, 5, 33, 2, 9]),
    "causal": plain([1, 9, 70, 2, 31], True),
    "all of length one": plain([1] * 40),
    "one token": plain([1]),
    "one row": plain([150]),
    "segments apart": [[segment(3), segment(50)], [segment(2, True), segment(2)]],
    "prefix, answer, isolated segment": [  # the answer sees all but the last token of the prefix
        [segment(before, True), segment(length, True, (0, before - 1)), segment(length, True)]
        for before, length in ((20, 30), (4, 3), (2, 1))],
    "far prefix": [[segment(20, True), segment(60), segment(25, True, (0, 18))],
                   [segment(3), segment(50), segment(1, True, (0, 3))]],
}


def assert_close(ours, expected, limit=1e-12):
    for one, other in zip(ours, expected, strict=True):
        assert (one - other).abs().max() < limit


def visible(key_ranges):
    """Return the mask of a line by the definition of key_ranges: (T, 4) -> (T, T)."""
    key = torch.arange(len(key_ranges), device=key_ranges.device)
    first, last, first2, last2 = key_ranges.long().T[..., None]
    return (first <= key) & (key < last) | (first2 <= key) & (key < last2)


def oracle(qkv, heads, kv_heads, packed, softcap=0.0):
    """Compute dense masked attention in the precision of qkv."""
    head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
    split = qkv.view(len(qkv), -1, head_dim).transpose(0, 1).split([heads, kv_heads, kv_heads])
    q, k, v = (x.repeat_interleave(heads // len(x), 0) for x in split)  # (H, T, K)
    scores = q @ k.transpose(1, 2) / math.sqrt(head_dim)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~visible(packed.key_ranges), -torch.inf).softmax(-1)
    return (weights @ v).transpose(0, 1).flatten(1)


# ---- the line


def test_the_mask_of_a_row_is_the_table_at_the_head_of_data_and_is_printed_so():
    row = [segment(3, True), segment(2, True, (0, 2)), segment(2)]
    shifted = Packed.of_segments([[segment(3)], row])
    packed = Packed.of_segments([row, [segment(50)]])
    assert torch.equal(shifted.mask(1), packed.mask(0)) and shifted.mask(0).all()
    assert shifted.key_ranges[7].tolist() == [6, 8, 3, 5]
    assert shifted.positions.tolist() == [0, 1, 2, 0, 1, 2, 2, 3, 0, 1]
    assert packed.visible_pairs() == packed.mask(0).sum() + 50 ** 2
    drawn = [line.split()[2:] for line in re.findall("\n    [0-6]  .*", data.__doc__)]
    first, _, *printed, last = str(packed).splitlines()
    assert len(drawn) == 7 and len(printed) == 48 and last == "the first 48 of 57 tokens"
    for index, (line, (*sees, a, b, c, d)) in enumerate(zip(printed, drawn)):
        mask = "".join(sees).ljust(48, ".")
        position = str(packed.positions[index].item())
        assert line.split() == [str(index), "0", "0", position, mask, a, b, c, d]
    assert max(map(len, printed)) <= 100 and first == repr(packed)
    assert repr({"packed": packed}) == "{'packed': Packed(rows=2, tokens=57)}"


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_window_hides_keys_that_are_further_away_in_positions(name):
    gaps = [Segment(np.arange(6), positions=np.array([1, 2, 5, 9, 10, 30]))]  # a context of hybrid
    packed = Packed.of_segments([*LAYOUTS[name], gaps])
    far = (packed.positions[:, None] - packed.positions).abs()
    for window in (1, 4, 29):
        seen = visible(packed.within(window).key_ranges)
        assert torch.equal(seen, visible(packed.key_ranges) & (far <= window))
    # Rows within the window keep the plans of the other layers.
    assert packed.within(0) is packed.within(200) is packed


# ---- attention


def both(qkv, heads, kv_heads, packed, softcap, is_autocast=False):
    """Return our states and gradient, and those of the oracle in float64."""
    weight, results = torch.randn(len(qkv), heads * 8, dtype=qkv.dtype), []
    for compute, inputs in ((kernels.packed_attention, qkv), (oracle, qkv.double())):
        inputs = inputs.detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            states = compute(inputs, heads, kv_heads, packed, softcap=softcap)
        loss = (states * weight.to(states.dtype)).sum()
        results.append((states, *torch.autograd.grad(loss, inputs)))
    return results


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("heads, kv_heads, softcap", [(4, 4, 0), (4, 2, 0), (4, 1, 0), (4, 2, 1.5)])
def test_attention_and_its_gradient_equal_the_dense_float64_oracle(name, heads, kv_heads, softcap):
    packed = Packed.of_segments(LAYOUTS[name])
    qkv = torch.randn(len(packed.tokens), (heads + 2 * kv_heads) * 8, dtype=torch.float64)
    assert_close(*both(qkv, heads, kv_heads, packed, softcap))
    assert_close(*both(qkv.float(), heads, kv_heads, packed, softcap), 1e-5)


def test_attention_of_groups_on_a_gpu_repeats_keys_and_values(monkeypatch):
    class OnGpu(torch.Tensor):
        is_cuda = True

    attend, used = F.scaled_dot_product_attention, []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, *rest, enable_gqa: (
        used.append(k.shape[1]), attend(q, k, *rest, enable_gqa=enable_gqa))[1])
    q, k, v = (torch.randn(2, heads, 5, 8) for heads in (4, 2, 2))
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    for given in (mask, None):
        states = [sdpa(q.as_subclass(kind), k, v, given) for kind in (torch.Tensor, OnGpu)]
        assert torch.allclose(*states, atol=1e-6)
    assert used == [2, 4] * 2


@pytest.mark.parametrize("softcap", [0, 1.5])
@pytest.mark.parametrize("is_autocast", [True, False])
def test_a_cpu_that_computes_in_bfloat16_keeps_attention_in_float32(is_autocast, softcap):
    packed = Packed.of_segments(LAYOUTS["prefix, answer, isolated segment"])
    qkv = torch.randn(len(packed.tokens), 8 * 8).bfloat16()
    for one, other in zip(*both(qkv, 4, 2, packed, softcap, is_autocast)):
        assert one.dtype == torch.bfloat16
        # Only the results are rounded, by half of the last of bfloat16's eight binary digits.
        assert ((one - other).abs() <= other.abs() * 2 ** -8 + 1e-6).all()


@pytest.mark.parametrize("softcap, narrow", [(0.0, False), (2.0, False), (0.0, True)])
def test_the_chunked_cross_entropy_equals_the_plain_one(softcap, narrow, monkeypatch):
    monkeypatch.setattr("kernels.cross_entropy.CHUNK", 17 * 50 * 8)  # a few positions at a time
    monkeypatch.setattr("kernels.cross_entropy.SLICE", 16)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True)
              for shape in ((39, 8), (50, 8), 50)]
    targets = torch.randint(0, 50, (39,))
    logits = F.linear(*inputs)
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    whole = F.cross_entropy(logits, targets, reduction="sum")
    with torch.autocast("cpu", enabled=narrow):  # a chunk gets whole tiles in bfloat16
        ours = linear_cross_entropy(*inputs, targets, softcap)
    assert_close(*((loss.double(), *torch.autograd.grad(3 * loss, inputs))
                   for loss in (ours, whole)), 0.3 if narrow else 1e-12)


def test_triton_is_refused_where_it_cannot_run_and_auto_is_sdpa(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model, cpu = Model(ModelConfig()), torch.device("cpu")
    for message in ("needs a CUDA GPU, and the device is cpu|not installed", "not installed"):
        assert set_attention(model, "auto", cpu, 4) == {("sdpa", 0)}
        with pytest.raises(BadInput, match=message):
            set_attention(model, "triton", cpu, 4)
        monkeypatch.setitem(sys.modules, "triton", None)


def test_on_a_gpu_auto_is_what_has_run_and_cudnn_is_off(monkeypatch):
    monkeypatch.setattr(kernels, "why_not", lambda *_: "")
    cuda = torch.device("cuda")
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert kernels.choose_back_end("auto", cuda, 64) == "sdpa"
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(kernels, "KERNELS_HAVE_RUN", True)
    assert kernels.choose_back_end("auto", cuda, 64) == "auto"
    assert kernels.choose_back_end("auto", torch.device("cpu"), 64) == "sdpa"


# ---- the transformer


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("causal", [False, True])
def test_rows_and_segments_have_the_same_states_in_any_company(name, causal):
    """The three segments of LLM-JEPA's row equal rows of their own. Nothing leaks between rows or
    from the future."""
    model, rng = Model(CONFIGS[name]).double().eval(), np.random.default_rng(2)
    rows = [ids(rng, n) for n in (3, 17, 1, 8)]
    expected = [model(Packed.of([row], causal)) for row in rows]
    text, answer, code = (ids(rng, n) for n in (6, 4, 5))
    segments = [Segment(text, True), Segment(answer, True, (0, 4)), Segment(code, True, (0, 1))]
    for before, segment in (((), text), (text[:4], answer), (text[:1], code)):
        row = Packed.of([[*before, *segment]], causal=True)
        expected.append(model(row)[len(before):])
    packed = Packed.of_segments([*([Segment(row, causal)] for row in rows), segments])
    states = model(packed)
    assert_close([states], [torch.cat(expected)])
    packed.tokens[11] = 5 + packed.tokens[11] % 40  # of the second row, tokens 3 to 19
    changed = (model(packed) != states).any(1).nonzero().flatten().tolist()
    assert changed == list(range(11 if causal else 3, 20))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("how", ["plain", "LoRA", "checkpointing", "no layers"])
def test_the_states_of_some_tokens_and_their_gradients_are_those_of_all_tokens(name, how):
    config = replace(CONFIGS[name], layers=0) if how == "no layers" else CONFIGS[name]
    model = Model(config).double()
    if how == "LoRA":
        add_lora(model, 2)
        for weight in model.parameters():
            torch.nn.init.normal_(weight)
    model.eval()  # LoRA has dropout
    for module in model.modules():
        module.is_checkpointed = how == "checkpointing"
    packed = Packed.of_segments(LAYOUTS["prefix, answer, isolated segment"])
    packed.tokens = torch.randint(5, 50, packed.tokens.shape)
    at = torch.tensor([30, 2, 77, 2, 65, 76])  # in any order, also twice
    weight = torch.randn(len(at), config.width, dtype=torch.float64)
    results = []
    for states in (model(packed, at=at), model(packed)[at]):
        trained = [p for p in model.parameters() if p.requires_grad]
        results.append((states, *torch.autograd.grad((states * weight).sum(), trained,
                                                     allow_unused=True, materialize_grads=True)))
    assert_close(*results, 1e-10)


@pytest.mark.parametrize("pool, expected", [
    ("cls", [[0, 1], [-6, -7], [-8, -9]]), ("last", [[4, 4], [-6, -7], [-10, 1]]),
    ("mean", [[3, 1], [-6, -7], [-9, -4]]), ("max", [[5, 4], [-6, -7], [-8, 1]])])
def test_each_pooling_takes_its_states(pool, expected):
    model = Model(replace(TINY, normalize=True))  # at inference only, not here
    packed = Packed.of([[5, 6, 7], [8], [9, 10]])
    states = torch.tensor([[0., 1], [5, -2], [4, 4], [-6, -7], [-8, -9], [-10, 1]])
    assert model.pool(states, packed, pool).tolist() == expected
    # Without a pooling, it is that of the model.
    model.config = replace(model.config, pool=pool)
    whole = model.pool(model(packed), packed)
    assert_close(map(model.embeddings, [packed] * 2, [None, pool]), [whole] * 2, 1e-6)


def test_the_models_of_papers_have_their_numbers_of_parameters():
    """XLM-R's encoders without pooler and head: V 250,002, 514 positions, no token types. Predict
    and Reconstruct's as in its logs, without its fixed positions, 512 x 512."""
    for size, vocab, count in (
            ("base", 250002, (250002 + 514 + 2) * 768 + 12 * (12 * 768**2 + 13 * 768)),
            ("large", 250002, (250002 + 514 + 2) * 1024 + 24 * (12 * 1024**2 + 13 * 1024)),
            ("hybrid", 30522, 34_804_736 - 512 * 512)):
        with torch.device("meta"):
            model = Model(ModelConfig(**SIZES[size], vocab=vocab))
        assert sum(p.numel() for p in model.parameters()) == count


# ---- configs


@pytest.mark.parametrize("make, name", [
    (lambda: Packed.of([[5, 6], []]), "empty"), (lambda: replace(LLAMA, head_dim=5), "rotary"),
    (lambda: replace(LLAMA, causal=True, windows=(3, 0)), "windows need a bidirectional model"),
    (lambda: Mexma(Model(TINY), Mexma.Config(head_heads=7)), "head_heads is 7"),
    (lambda: Model(TINY).pool(torch.ones(2, 16), Packed.of([[5, 6]]), "median"), "is 'median'"),
    # The mean of a row that has masks of the other sentence.
    (lambda: Bepa(Model(replace(TINY, pool="mean", head="transform")),
                  Bepa.Config(cls_view="masked")), "use --pool cls instead of mean"),
    (lambda: LlmJepa(None, LlmJepa.Config(align="info_nce", jepa_dropout=.5)), "a single process"),
    (lambda: check_shard(TrainConfig(shard=True, optimizer="muon"), "bfloat16", 2), "muon"),
    (lambda: check_shard(TrainConfig(shard=True), "float16", 8), "float16"),
    (lambda: info_nce(None, None, 0.1, True, symmetric=False),
     "intra_side_negatives needs symmetric"),
    (lambda: info_nce(None, None, 0.1, include_self=True),
     "include_self needs intra_side_negatives"),
    (lambda: Hybrid.Config(balance_start=1.0), "balance_start is 1.0"),
    (lambda: Hybrid.Config(balance="scheduled"), "from 0.5 to 0.5, which is constant: add")])
def test_a_value_that_cannot_work_is_refused_in_one_line(make, name, monkeypatch):
    monkeypatch.setattr("objectives.rank_and_world", lambda: (0, 2))
    with pytest.raises(BadInput, match=f"^[^\n]*{name}[^\n]*$"):
        make()


# ---- LoRA, new tokens, files


@pytest.mark.parametrize("shape, projections", [(TINY, 6), (LLAMA, 7)], ids=["bert", "llama"])
def test_lora_trains_an_adapter_of_each_projection_and_saves_merged_weights(shape, projections,
                                                                            tmp_path):
    model, packed = Model(shape).eval(), Packed.of([[5, 6, 7, 49], [8, 9]])
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
    assert_close([out.weight], [out.linear.weight + 2 * out.b[0] @ out.a[0]], 1e-5)  # alpha 2 rank
    # In training, a tenth of the adapter's inputs are dropped [LLM-JEPA's code].
    x = torch.ones(5000, out.linear.in_features)
    assert not torch.equal(out.train()(x), out(x))
    assert abs((out.dropout(x) == 0).float().mean() - 0.1) < 0.01
    out.eval()
    save(model, tmp_path / "model.pt")
    plain = load(tmp_path / "model.pt")
    assert plain.config == shape
    assert_close([model(packed)], [plain(packed)], 1e-5)
    assert (plain.embed.weight != embedding).any(1).nonzero().flatten().tolist() == [48, 49]


@pytest.mark.parametrize("known, vocab", [(50, 53), (45, 50), (49, 52)])
def test_new_tokens_are_the_mean_of_the_known_ones_and_take_unused_rows_first(known, vocab):
    model = Model(replace(TINY, tied=False, head="transform"))
    larger = add_tokens(model, 3, known)
    assert larger.config == replace(model.config, vocab=vocab)
    for name, old in model.state_dict().items():
        new = larger.state_dict()[name]
        if name in ("embed.weight", "vocabulary.weight", "vocabulary_bias"):
            old = old[:known]
            added = new[known:known + 3]
            assert torch.allclose(added, old.mean(0).expand_as(added))
        assert torch.equal(new[:len(old)], old)


class Program:
    """What ends Python when it is read."""
    def __reduce__(self):
        return sys.exit, ()


@pytest.mark.parametrize("saved", [
    {"config": {"flavor": 1}, "weights": {}}, {"weights": {}}, {"config": Program()}, None])
def test_a_file_that_is_not_a_model_is_one_line_and_nothing_in_it_is_executed(saved, tmp_path):
    path = tmp_path / "model.pt"
    if saved:
        torch.save(saved, path)
    with pytest.raises(BadInput, match=f"^[^\n]*{path}[^\n]*$"):
        load(path)
