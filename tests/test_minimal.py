"""The pages of minimal/ against the classes of objectives.py: with the same weights, rows and
masks, the loss and every gradient are equal in float64."""

import numpy as np
import pytest
import torch
from test_objectives import make_special, rows_of

from data import Example
from minimal import bert_jepa, llm_jepa, mexma, predict_and_reconstruct
from model import Model, ModelConfig
from objectives import Bepa, Hybrid, LlmJepa, Mexma

PAGES = (bert_jepa, llm_jepa, mexma, predict_and_reconstruct)


def special_tokens(page):
    """[PAD], [CLS], [SEP] and [MASK] or [PRED] of a page: 0, 1, 2 and 3."""
    return make_special(page.V, pad=0, cls=1, sep=2, mask=3, preds=(3,), ids=range(4))


def words(rows):
    """Padded rows (N, L) -> the ids of their words, without special tokens."""
    return [row[row > 3].numpy() for row in rows]


def collate(objective, page, *views):
    """The batch of the class for the rows of a page: a list of rows of ids for each view."""
    return objective.collate([Example(texts) for texts in zip(*views)], np.random.default_rng(0),
                             objective.config, special_tokens(page))


def pad(rows, length):
    """Rows of numbers -> (N, length), filled with 0."""
    grid = torch.zeros(len(rows), length, dtype=torch.int64)
    for line, row in zip(grid, rows):
        line[:len(row)] = torch.as_tensor(row)
    return grid


def masked_rows(batch, count, length):
    """The first rows of a batch and where they have targets: (count, length) each."""
    packed = batch["packed"]
    chosen = torch.zeros(len(packed.tokens), dtype=torch.int64)
    chosen[batch["target_positions"]] = 1
    rows = chosen.split(packed.cu_seqlens.diff().tolist())[:count]
    return pad(rows_of(packed)[:count], length), pad(rows, length).bool()


def linears(*pairs):
    """The weights and biases of (layer of the page, layer of the class)."""
    for ours, theirs in pairs:
        yield ours.weight, theirs.weight
        yield ours.bias, theirs.bias


def blocks(ours, theirs):
    """The weights of two stacks of blocks."""
    for page, block in zip(ours, theirs, strict=True):
        if hasattr(page, "self_attn"):  # a layer of PyTorch
            attention = page.self_attn
            yield attention.in_proj_weight, block.attention.qkv.weight
            yield attention.in_proj_bias, block.attention.qkv.bias
            yield from linears((attention.out_proj, block.attention.out),
                               (page.linear1, block.mlp.up), (page.linear2, block.mlp.down))
        else:
            yield from linears((page.qkv, block.attention.qkv), (page.out, block.attention.out),
                               (page.mlp[0], block.mlp.up), (page.mlp[2], block.mlp.down))
        yield from linears((page.norm1, block.norm1), (page.norm2, block.norm2))


def assert_equal(page_loss, objective, batch, pairs):
    """The page's function and the class give the same loss and the same gradient of every weight of
    the class; `pairs`: (weight of the page, weight of the class)."""
    with torch.no_grad():
        for ours, theirs in pairs:
            torch.nn.init.normal_(ours, std=0.1)
            assert ours.shape == theirs.shape
            theirs.copy_(ours)
    page, theirs = zip(*[pair for pair in pairs if pair[1].requires_grad])
    trained = {id(weight) for weight in objective.parameters() if weight.requires_grad}
    assert {id(weight) for weight in theirs} == trained
    one, other = page_loss(), objective(batch)[0]
    assert abs(one - other) < 1e-9
    for ours, expected in zip(torch.autograd.grad(one, page), torch.autograd.grad(other, theirs)):
        assert (ours - expected).abs().max() < 1e-9


def test_mexma(monkeypatch):
    page = mexma.Mexma().double()
    model = Model(ModelConfig(vocab=mexma.V, max_positions=64, norm_epsilon=1e-12, dropout=0.0))
    objective = Mexma(model, Mexma.Config(align="cosine", align_weight=2.0, koleo_weight=1.0,
                                          head_layers=2, head_heads=4, head_hidden=512)).double()
    a, b = map(mexma.tokenize, zip(*mexma.pairs[:12]))
    batch = collate(objective, mexma, words(a), words(b))
    rows, chosen = masked_rows(batch, 24, max(a.shape[1], b.shape[1]))
    masks = iter([(rows[:12, :a.shape[1]], chosen[:12, :a.shape[1]]),
                  (rows[12:, :b.shape[1]], chosen[12:, :b.shape[1]])])
    monkeypatch.setattr(mexma, "mask_words", lambda x: next(masks))
    pairs = [(page.embed.weight, model.embed.weight),
             (page.position, model.position_embedding.weight),
             (page.bias, objective.vocabulary_bias), *linears((page.norm, model.embed_norm)),
             *blocks(page.blocks, model.blocks), *blocks(page.head, objective.unmask)]
    assert_equal(lambda: page.loss(a, b), objective, batch, pairs)


def test_bert_jepa(monkeypatch):
    page = bert_jepa.Bert().double()
    model = Model(ModelConfig(vocab=bert_jepa.V, max_positions=128, dropout=0.0, head="transform"))
    objective = Bepa(model, Bepa.Config(cls_view="clean", order="given")).double()
    a, b = zip(*bert_jepa.pairs[:12])
    views = [[np.array(bert_jepa.tokenize(text)[1:-1]) for text in texts] for texts in (a, b)]
    batch = collate(objective, bert_jepa, *views)
    monkeypatch.setattr(bert_jepa, "mask_words", lambda x: masked_rows(batch, 12, x.shape[1]))
    pairs = [(page.embed.weight, model.embed.weight),
             (page.position, model.position_embedding.weight),
             (page.bias, model.vocabulary_bias),
             *linears((page.norm, model.embed_norm), (page.head[0], model.transform),
                      (page.head[2], model.transform_norm)), *blocks(page.blocks, model.blocks)]
    assert_equal(lambda: page.loss(a, b), objective, batch, pairs)


def test_llm_jepa():
    page = llm_jepa.Decoder().double()
    model = Model(ModelConfig(vocab=llm_jepa.V, max_positions=256, norm_position="pre",
                              causal=True, pool="last", dropout=0.0))
    objective = LlmJepa(model, LlmJepa.Config()).double()
    texts, codes = zip(*llm_jepa.tokenize(llm_jepa.pairs[:12]))
    batch = collate(objective, llm_jepa, map(np.array, texts), map(np.array, codes))
    pairs = [(page.embed.weight, model.embed.weight),
             (page.position, model.position_embedding.weight),
             *linears((page.norm, model.final_norm)), *blocks(page.blocks, model.blocks)]
    assert_equal(lambda: page.loss(texts, codes), objective, batch, pairs)


def transformers(ours, theirs):
    """The weights of a Transformer of the page and of a Model."""
    yield ours.inputs.weight, theirs.embed.weight
    yield from linears((ours.norm, theirs.final_norm))
    yield from blocks(ours.blocks, theirs.blocks)


def test_predict_and_reconstruct(monkeypatch):
    page = predict_and_reconstruct.Hybrid()
    for part in (page.encoder, page.teacher, page.predictor):  # sinusoids in float64
        d = part.position.shape[1]
        angle = torch.arange(64)[:, None] / 10_000 ** (torch.arange(0, d, 2).double() / d)
        part.position = torch.stack([angle.sin(), angle.cos()], 2).flatten(1)
    page = page.double()
    model = Model(ModelConfig(vocab=predict_and_reconstruct.V, max_positions=64, dropout=0.0,
                              norm_position="pre", positions="sinusoidal"))
    objective = Hybrid(model, Hybrid.Config(min_keep=0, predictor_width=64, predictor_layers=2,
                                            predictor_heads=4, predictor_std=0.0)).double()
    x = predict_and_reconstruct.tokenize(predict_and_reconstruct.sentences[:12])
    batch = collate(objective, predict_and_reconstruct, words(x))
    # The tokens of the contexts, and of two blocks for each row.
    context = torch.zeros(12, 1, x.shape[1], dtype=torch.bool)
    block = torch.zeros(24, x.shape[1], dtype=torch.bool)
    packed, predict = batch["packed"], batch["predict"]
    for row, where in zip(context, packed.positions.split(packed.cu_seqlens.diff().tolist())[12:]):
        row[0, where] = True
    block[predict.row_of_token()[batch["mask_index"]],
          predict.positions[batch["mask_index"]]] = True
    drawn = iter([block.unflatten(0, (12, 2)), context])
    monkeypatch.setattr(predict_and_reconstruct, "draw_blocks", lambda *_: next(drawn))
    monkeypatch.setattr(predict_and_reconstruct, "mask_words",
                        lambda x: masked_rows(batch, 12, x.shape[1]))
    head = objective.mlm_head
    pairs = [*transformers(page.encoder, model),
             *transformers(page.teacher, objective.teacher.model),
             *blocks(page.predictor.blocks, objective.predictor), (page.w, objective.balance),
             (page.mask_token, objective.mask_token),
             *linears((page.predictor.norm, objective.predictor_norm),
                      (page.to_predictor, objective.predictor_embed),
                      (page.to_states, objective.predictor_proj),
                      (page.regressor[0], head.transform), (page.regressor[2], head.norm),
                      (page.regressor[3], head.vocabulary))]
    assert_equal(lambda: page.losses(x)[0], objective, batch, pairs)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.__name__.split(".")[1])
def test_a_page_trains_and_prints_its_numbers(page, monkeypatch, capsys):
    monkeypatch.setattr(page, "STEPS", 2)
    for name in {"toy", "meanings", "regex"} & vars(page).keys():  # fewer test sentences
        original = getattr(page, name)
        monkeypatch.setattr(page, name, lambda split, count, call=original: call(split, 60))
    page.main()
    numbers = [float(line.split(": ")[1].split()[0].strip("%"))
               for line in capsys.readouterr().out.splitlines()]
    assert numbers and np.isfinite(numbers).all()
