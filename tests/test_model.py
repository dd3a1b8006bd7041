"""The packed line, the attention back end against a dense float64 oracle, the blocks against torch's own layers, files."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data import BadInput
from model import (
    DECODER,
    Model,
    ModelConfig,
    Packed,
    View,
    add_lora,
    attention,
    attention_weights,
    length_classes,
    load,
    rotary,
    rotate,
    save,
    set_attention,
    size_config,
)

TINY = ModelConfig(vocab=50, width=16, layers=2, heads=4, hidden=32, max_length=64, dropout=0.0)


def ids(rng, length):
    return rng.integers(5, 50, length)


def layouts():
    """Every kind of visibility that an objective uses, by name -> rows of views."""
    rng = np.random.default_rng(0)
    ragged = [1, 7, 3, 12, 1, 30, 5, 5, 2, 9]
    prefix = [[View(ids(rng, n), True), View(ids(rng, m), True, (0, n)), View(ids(rng, m), True)] for n, m in [(4, 3), (9, 1), (1, 6)]]
    shared = [[View(ids(rng, n), True), View(ids(rng, m), True, (0, n - 1))] for n, m in [(4, 3), (9, 1), (2, 6)]]
    return {"bidirectional": [[View(ids(rng, n))] for n in ragged],
            "causal": [[View(ids(rng, n), True)] for n in ragged],
            "one length": [[View(ids(rng, 6))] for _ in range(5)],
            "all of length one": [[View(ids(rng, 1))] for _ in range(4)],
            "one row": [[View(ids(rng, 11))]],
            "many lengths": [[View(ids(rng, n))] for n in range(1, 90)],
            "views that do not see each other": [[View(ids(rng, 3)), View(ids(rng, 5))], [View(ids(rng, 2), True), View(ids(rng, 2))]],
            "prefix, answer and isolated view": prefix,
            "a part of the prefix": shared}


def oracle(qkv, heads, kv_heads, packed, cap=0):
    """Dense masked attention, one head at a time, from the definition of `sees`."""
    size = qkv.shape[1] // (heads + 2 * kv_heads)
    q, k, v = qkv.view(len(qkv), -1, size).split([heads, kv_heads, kv_heads], 1)
    key = torch.arange(len(qkv))
    a, b, c, d = packed.sees.long().T[..., None]
    allowed = (a <= key) & (key < b) | (c <= key) & (key < d)
    out = []
    for head in range(heads):
        scores = q[:, head] @ k[:, head * kv_heads // heads].T / math.sqrt(size)
        scores = cap * torch.tanh(scores / cap) if cap else scores
        out.append(scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v[:, head * kv_heads // heads])
    return torch.stack(out, 1).flatten(1)


@pytest.mark.parametrize("name", ["prefix, answer and isolated view", "a part of the prefix", "causal", "bidirectional"])
@pytest.mark.parametrize("change", [{}, dict(norm_place="pre", kv_heads=2), dict(positions="rotary", kv_heads=1, qk_norm="whole", score_cap=3.0)])
def test_the_weights_of_attention_are_those_that_it_mixes_the_values_by(name, change):
    """Up to 16 keys have independent values of 16 numbers: no other weights give the same mixture."""
    torch.manual_seed(0)
    model = Model(replace(TINY, width=64, **change)).double().eval()
    packed, block, mixtures, values = Packed.views(layouts()[name]), model.blocks[-1], [], []
    block.out.register_forward_pre_hook(lambda module, given: mixtures.append(given[0]))
    block.qkv.register_forward_hook(lambda module, given, out: values.append(out))
    block.qkv.weight.data *= 5                                           # far from uniform
    every = torch.arange(len(packed.tokens))
    weights = attention_weights(model, packed, every)
    v = values[0].unflatten(1, (-1, 16))[:, -block.kv_heads:].repeat_interleave(4 // block.kv_heads, 1)
    for place, (a, b, c, d) in zip(every, packed.sees.tolist()):
        seen = torch.cat([v[c:d], v[a:b]])                               # (L, H, K)
        assert torch.allclose(torch.einsum("hl,lhk->hk", weights[place], seen).flatten(), mixtures[0][place], atol=1e-12)
    assert torch.allclose(torch.stack([each.sum(1) for each in weights]), torch.ones(len(every), 4).double())
    assert max(each.max().item() for each in weights if each.shape[1] > 3) > .5
    before = len(mixtures)
    model(packed)
    assert len(mixtures) == before + 1 and not model.blocks[-1]._forward_pre_hooks                             # nothing of it stays
    first = attention_weights(model, packed, every[:1], layer=0)
    assert first[0].shape == weights[0].shape and (first[0].shape[1] == 1 or not torch.allclose(first[0], weights[0]))


@pytest.mark.parametrize("name", layouts())
@pytest.mark.parametrize("heads, kv_heads, cap", [(4, 4, 0), (4, 2, 0), (4, 1, 0), (4, 2, 1.5)])
def test_attention_and_its_gradient_equal_the_dense_float64_oracle(name, heads, kv_heads, cap):
    packed = Packed.views(layouts()[name])
    torch.manual_seed(0)
    qkv = torch.randn(len(packed.tokens), (heads + 2 * kv_heads) * 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(len(packed.tokens), heads * 8, dtype=torch.float64)
    results = []
    for compute in (attention, oracle):
        out = compute(qkv, heads, kv_heads, packed, cap=cap)
        results.append((out, torch.autograd.grad((out * weight).sum(), qkv)[0]))
    for ours, expected in zip(*results):
        assert (ours - expected).abs().max() < 1e-12
    single = attention(qkv.detach().float(), heads, kv_heads, packed, cap=cap)
    assert (single - results[1][0]).abs().max() < 1e-5


def test_the_kernels_are_not_chosen_for_capped_scores_and_refused_in_one_line(monkeypatch):
    monkeypatch.setattr("model.why_not", lambda *_: "")                  # as if they could run here
    model, device = Model(replace(LLAMA, score_cap=5.0)), torch.device("cpu")
    assert set_attention(model, "auto", device, 4) == {"sdpa"}
    with pytest.raises(BadInput, match="attention triton cannot be used here: capped scores are not in the kernels"):
        set_attention(model, "triton", device, 4)


def test_length_classes_cover_every_row_once_and_are_the_cheapest():
    rng = np.random.default_rng(1)
    area = lambda lengths, bounds: sum((b - a) * lengths[b - 1] ** 2 for a, b in bounds)
    for _ in range(20):
        lengths = np.sort(rng.integers(1, 12, rng.integers(1, 9)))
        bounds = length_classes(lengths, 3)
        assert bounds[0][0] == 0 and bounds[-1][1] == len(lengths)
        assert all(left[1] == right[0] for left, right in zip(bounds, bounds[1:])) and len(bounds) <= 3
        cuts = range(1, len(lengths))
        other = [[0, *c, len(lengths)] for c in [()] + [(i,) for i in cuts] + [(i, j) for i in cuts for j in cuts if i < j]]
        assert area(lengths, bounds) == min(area(lengths, list(zip(c, c[1:]))) for c in other)


def test_positions_restart_in_an_isolated_view_and_continue_after_a_shared_one():
    row = [View(np.arange(5, 9), True), View(np.arange(5, 8), True, (0, 4)), View(np.arange(5, 7)), View(np.arange(5, 7), False, None, np.array([3, 9]))]
    packed = Packed.views([row, [View(np.arange(5, 7))]])
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 3, 9, 0, 1]
    assert packed.rows.tolist() == [0, 11, 13]
    assert packed.sees[5].tolist() == [4, 6, 0, 4] and packed.sees[8].tolist() == [7, 9, 0, 0]


def test_an_empty_row_is_refused():
    with pytest.raises(BadInput, match="empty row"):
        Packed.of([[5, 6], []])


LLAMA = replace(TINY, **DECODER, kv_heads=2)
CONFIGS = {"bert": TINY, "llama": LLAMA,
           "sinusoidal": replace(TINY, positions="sinusoidal", norm_place="pre", head="transform"),
           "qwen2": replace(LLAMA, qkv_bias=True), "qwen3": replace(LLAMA, head_size=6, qk_norm="head"),
           "olmo2": replace(LLAMA, norm_place="branch", qk_norm="whole", stretch=(8.0, 1.0, 4.0, 20)),
           "gemma2": replace(LLAMA, norm_place="both", activation="geglu", embed_scale=4.0, score_cap=5.0, logit_cap=3.0),
           "openelm": replace(LLAMA, head_size=4, shapes=((2, 1, 24), (6, 3, 40)), qk_norm="head"),
           "offset, untied": replace(TINY, position_offset=2, tied=False, head="bias")}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_row_gets_the_same_states_in_any_company(name, causal):
    torch.manual_seed(0)
    model = Model(CONFIGS[name]).double().eval()
    rng = np.random.default_rng(2)
    rows = [ids(rng, n) for n in [3, 17, 1, 8, 40, 8]]
    together = model(Packed.of(rows, causal)).split([len(row) for row in rows])
    for row, states in zip(rows, together):
        assert (model(Packed.of([row], causal)) - states).abs().max() < 1e-12


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_leaks_between_rows_or_from_the_future(name):
    torch.manual_seed(0)
    model, rng = Model(CONFIGS[name]).eval(), np.random.default_rng(3)
    rows = [ids(rng, n) for n in [6, 9, 4]]
    before = model(Packed.of(rows, causal=True))
    rows[1] = rows[1].copy()
    rows[1][5] = 49 if rows[1][5] != 49 else 48
    after = model(Packed.of(rows, causal=True))
    same = (before == after).all(1)
    assert same[:11].all() and same[15:].all() and not same[11:15].any()


@pytest.mark.parametrize("place", ["post", "pre"])
def test_a_block_equals_torchs_encoder_layer_on_padded_rows(place):
    torch.manual_seed(0)
    config = replace(TINY, norm_place=place, layers=1)
    block = Model(config).double().blocks[0]
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, 0.0, "gelu", batch_first=True, norm_first=place == "pre", dtype=torch.float64)
    names = {"self_attn.in_proj_": "qkv.", "self_attn.out_proj.": "out.", "linear1.": "up.", "linear2.": "down."}
    own = {new + kind: layer.state_dict()[old + kind] for old, new in names.items() for kind in ("weight", "bias")}
    block.load_state_dict(own | {f"norm{i}.{kind}": layer.state_dict()[f"norm{i}.{kind}"] for i in (1, 2) for kind in ("weight", "bias")})
    lengths = [3, 9, 1, 6]
    packed = Packed.of([np.zeros(n, np.int64) for n in lengths])
    padded = torch.randn(4, 9, 16, dtype=torch.float64)
    real = torch.arange(9) < torch.tensor(lengths)[:, None]
    expected = layer(padded, src_key_padding_mask=~real)[real]
    assert (block(padded[real], packed) - expected).abs().max() < 1e-12


def test_the_whole_encoder_equals_a_padded_one_in_outputs_loss_and_gradients():
    torch.manual_seed(0)
    model, rng = Model(replace(TINY, head="bias")).double(), np.random.default_rng(4)
    rows = [ids(rng, n) for n in [5, 20, 2, 11]]
    packed, targets = Packed.of(rows), torch.from_numpy(ids(rng, 38))
    real = torch.arange(20) < torch.tensor([len(row) for row in rows])[:, None]
    grid = torch.zeros(4, 20, dtype=torch.int64)
    grid[real] = packed.tokens

    def padded_states():
        x = model.norm(model.embed(grid) + model.place(torch.arange(20)))
        for block in model.blocks:
            q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in block.qkv(x).chunk(3, -1))
            attended = F.scaled_dot_product_attention(q, k, v, real[:, None, None]).transpose(1, 2).flatten(2)
            x = block.norm1(x + block.out(attended))
            x = block.norm2(x + block.down(F.gelu(block.up(x))))
        return x[real]

    results = []
    for compute in (lambda: model(packed), padded_states):
        states = compute()
        loss = F.cross_entropy(model.logits(states), targets)
        results.append([states, loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for ours, expected in zip(*results):
        assert (ours - expected).abs().max() < 1e-10


def test_rotary_positions_depend_on_distance_only():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64)
    score = lambda i, j: (rotate(q, rotary(torch.tensor([i]), 8, 1e4)) * rotate(k, rotary(torch.tensor([j]), 8, 1e4))).sum()
    assert abs(score(3, 1) - score(12, 10)) < 1e-10 and abs(score(3, 1) - score(3, 2)) > 1e-3


def test_positions_outside_the_table_of_a_learned_model_are_its_offset():
    model = Model(replace(TINY, position_offset=2))
    assert model.place.weight.shape == (66, 16)


def test_pooling_takes_what_it_says():
    model = Model(TINY)
    packed, states = Packed.of([[5, 6, 7], [8], [9, 10]]), torch.arange(12.0).view(6, 2)
    assert model.pool(states, packed, "cls").tolist() == [[0, 1], [6, 7], [8, 9]]
    assert model.pool(states, packed, "last").tolist() == [[4, 5], [6, 7], [10, 11]]
    assert model.pool(states, packed, "mean").tolist() == [[2, 3], [6, 7], [9, 10]]
    assert model.pool(-states, packed, "max").tolist() == [[0, -1], [-6, -7], [-8, -9]]
    assert torch.equal(model.pool(states, packed, "weighted"), model.pool(states, packed, "mean"))


def test_attention_pooling_is_a_softmax_over_each_row_the_same_for_every_model():
    torch.manual_seed(0)
    packed, states = Packed.of([[5, 6, 7], [8], [9, 10]]), torch.randn(6, 16, dtype=torch.float64)
    one, two = (Model(TINY).pool(states, packed, "attention") for _ in range(2))
    assert torch.equal(one, two)
    chance = torch.Generator().manual_seed(0)
    keys = (2 * torch.rand(16, 16, generator=chance) - 1) / 4
    query = torch.randn(16, generator=chance)
    for vector, part in zip(one, states.split([3, 1, 2])):
        weights = torch.softmax(torch.stack([(query.double() @ (keys.double() @ state)) / 4 for state in part]), 0)
        assert (vector - weights @ part).abs().max() < 1e-6
    assert not torch.allclose(one[0], states[:3].mean(0), atol=1e-3)


def test_tied_logits_are_the_embedding_and_the_transform_is_berts():
    torch.manual_seed(0)
    x = torch.randn(3, 16)
    tied = Model(TINY)
    assert torch.equal(tied.logits(x), x @ tied.embed.weight.T)
    bert = Model(replace(TINY, head="transform"))
    hidden = F.layer_norm(F.gelu(F.linear(x, bert.transform.weight, bert.transform.bias)), (16,))
    assert torch.allclose(bert.logits(x), hidden @ bert.embed.weight.T, atol=1e-6)
    assert "vocabulary.weight" in dict(Model(replace(TINY, tied=False)).named_parameters())


def test_dropout_acts_in_training_only():
    torch.manual_seed(0)
    model, packed = Model(replace(TINY, dropout=0.5)), Packed.of([[5, 6, 7, 8]])
    assert not torch.equal(model(packed), model(packed))
    model.eval()
    assert torch.equal(model(packed), model(packed))


def test_a_saved_model_rebuilds_alone_and_exactly(tmp_path):
    torch.manual_seed(0)
    model, packed = Model(replace(TINY, pool="mean")).eval(), Packed.of([[5, 6, 7], [8, 9]])
    save(model, tmp_path / "model.pt")
    again = load(tmp_path / "model.pt")
    assert again.config == model.config and again.config.pool == "mean" and torch.equal(again(packed), model(packed))
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt"]


def test_a_file_from_before_a_field_was_added_has_its_default(tmp_path):
    torch.manual_seed(0)
    model, packed = Model(TINY).eval(), Packed.of([[5, 6, 7], [8, 9]])
    old = {name: value for name, value in vars(TINY).items() if name not in ("head_size", "shapes", "qk_norm", "logit_cap")}
    torch.save({"config": old, "weights": model.state_dict()}, tmp_path / "model.pt")
    again = load(tmp_path / "model.pt")
    assert again.config == TINY and torch.equal(again(packed), model(packed))


def test_a_bad_model_file_is_one_clear_line(tmp_path):
    path = tmp_path / "model.pt"
    with pytest.raises(BadInput, match="does not exist"):
        load(path)
    save(Model(TINY), path)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(BadInput, match="cannot be read"):
        load(path)
    torch.save([1, 2], path)
    with pytest.raises(BadInput, match="lacks 'config'"):
        load(path)
    wrong = {"config": {**vars(TINY), "width": 32}, "weights": Model(TINY).state_dict()}
    torch.save(wrong, path)
    with pytest.raises(BadInput, match=r"embed.weight has shape \(50, 16\), not \(50, 32\)"):
        load(path)
    torch.save({"config": {**vars(TINY), "flavour": 1}, "weights": Model(TINY).state_dict()}, path)
    with pytest.raises(BadInput, match="does not know its config fields flavour"):
        load(path)
    torch.save({"model": __import__("os").system}, path)
    with pytest.raises(BadInput, match="cannot be read"):
        load(path)


@pytest.mark.parametrize("change, message", [(dict(heads=3), "multiple of heads"), (dict(norm="batch"), "norm is 'batch'"), (dict(kv_heads=3), "kv_heads"),
                                             (dict(pool="first"), "pool is 'first'"), (dict(dropout=1.0), "dropout"), (dict(width=0), "width is 0"),
                                             (dict(shapes=((4, 2, 8),)), "shapes of 1 block"), (dict(qk_norm="all"), "qk_norm is 'all'")])
def test_a_config_that_cannot_work_is_refused_when_it_is_made(change, message):
    with pytest.raises(BadInput, match=message):
        replace(TINY, **change)


def test_base_and_large_have_the_shapes_of_xlm_r():
    """277,454,592 and 558,890,000-odd are XLM-R's encoders without pooler and head; V 250,002, 514 positions, 1 token type row less."""
    with torch.device("meta"):
        count = {size: sum(p.numel() for p in Model(size_config(size, vocab=250002)).parameters()) for size in ("base", "large")}
    block = lambda d: 12 * d * d + 13 * d
    for size, layers, d in (("base", 12, 768), ("large", 24, 1024)):
        assert count[size] == (250002 + 514 + 2) * d + layers * block(d)


def test_lora_starts_as_the_model_trains_only_differences_and_saves_plain_weights(tmp_path):
    torch.manual_seed(0)
    model, packed = Model(TINY).eval(), Packed.of([[5, 6, 7, 49], [8, 9]])
    before = model(packed)
    frozen = {name: p.clone() for name, p in model.named_parameters()}
    add_lora(model, 2, 4.0, ("qkv", "down"), [48, 49])
    assert torch.equal(model(packed), before)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"embed.rows"} | {f"blocks.{i}.{name}.{part}" for i in (0, 1) for name in ("qkv", "down") for part in "ab"}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p))
    assert model.logits(model(packed)).shape == (6, 50) and not torch.allclose(model(packed), before)
    save(model, tmp_path / "model.pt")
    again = load(tmp_path / "model.pt")
    assert torch.allclose(again(packed), model(packed), atol=1e-5)
    same = {name for name, p in again.named_parameters() if torch.equal(p, frozen[name])}
    assert set(frozen) - same == {"embed.weight"} | {f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("qkv", "down")}
    assert torch.equal(again.embed.weight[:48], frozen["embed.weight"][:48])
    with pytest.raises(BadInput, match="target 'head'"):
        add_lora(Model(TINY), 2, 4.0, ("head",))
