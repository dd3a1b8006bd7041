"""The pages of minimal/ against the classes of objectives.py: with the same weights, rows and
masks, the loss and every gradient are equal in float64."""

import json
import random
import re
import sys
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from test_objectives import check_equal, differs, make_special
from torch.nn.utils.rnn import pad_sequence

from base import metrics
from corpora import toy, toy_regex
from data import Example
from model import Model, ModelConfig
from objectives import Bepa, Hybrid, LlmJepa, Mexma

with pytest.MonkeyPatch.context() as few:  # A page makes its rows, 20,000, when it is imported.
    for module, name in ((toy, "toy"), (toy_regex, "regex")):
        few.setattr(module, name, partial(lambda make, split, count: make(split, count // 5),
                                          getattr(module, name)))
    from minimal import bag, bert_jepa, llm_jepa, mexma, predict_and_reconstruct
predict_and_reconstruct.sentences *= 5  # It draws from 20,000.

# Names of weights on the pages and in the classes, first at the beginning, then in a block.
COMMON = {"embed": "model.embed", "position": "model.position_embedding.weight",
          "blocks": "model.blocks"}
BLOCK = {".self_attn.in_proj_": ".attention.qkv.", ".self_attn.out_proj": ".attention.out",
         ".linear1": ".mlp.up", ".linear2": ".mlp.down"}


def name_in_class(name, names):
    """Translate the name of a weight on a page."""
    beginning = max(filter(name.startswith, names), key=len)
    name = names[beginning] + name.removeprefix(beginning)
    for ours, theirs in BLOCK.items():
        name = name.replace(ours, theirs)
    return name


def words(rows):
    """Return the ids of the words of padded rows (N, L), without special tokens."""
    return [row[row > 3].numpy() for row in rows]


def collate(objective, page, *views):
    """Return the batch of the class for the rows of a page: a list of rows of ids for each view.
    [PAD], [CLS], [SEP] and [MASK] or [PRED] of a page are 0, 1, 2 and 3."""
    special = make_special(page.V, pad=0, cls=1, sep=2, mask=3, preds=(3,), ids=range(4))
    return objective.collate([Example(texts) for texts in zip(*views)], np.random.default_rng(0),
                             objective.config, special)


def split_rows(packed, line):
    """Split a line of tokens (T,) into its rows."""
    return line.split(packed.cu_seqlens.diff().tolist())


def masked_rows(batch, count):
    """Return the first rows of a batch and where they have targets: (count, L) each."""
    packed = batch["packed"]
    chosen = torch.zeros(len(packed.tokens), dtype=torch.bool)
    chosen[batch["target_positions"]] = True
    return [pad_sequence(split_rows(packed, line)[:count], batch_first=True)
            for line in (packed.tokens, chosen)]


def assert_equal(page, page_loss, objective, batch, names):
    """Assert that the page's function and the class have the same weights, and with the same values
    the same loss and gradients. names: {of weights on the page: of weights in the class}."""
    weights = dict(objective.named_parameters())
    ours = {name_in_class(name, names): weight for name, weight in page.named_parameters()}
    file = f"{type(page).__module__.replace('.', '/')}.py"
    if names := ours.keys() ^ weights.keys():
        differs(objective, file, f"weights are not those of {file}: {', '.join(sorted(names))}")
    with torch.no_grad():
        for name, weight in weights.items():
            torch.nn.init.normal_(ours[name], std=0.1)
            weight.copy_(ours[name])
    one, other = objective(batch)[0], page_loss()
    one.backward()
    other.backward()
    trained = [name for name, weight in weights.items() if weight.requires_grad]
    check_equal(objective, file, (one, *(weights[name].grad for name in trained)),
                (other, *(ours[name].grad for name in trained)))


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_mexma(double, monkeypatch):
    page = mexma.Mexma()
    model = Model(ModelConfig(vocab=mexma.V, max_positions=64, norm_epsilon=1e-12, dropout=0.0,
                              layers=mexma.LAYERS))
    objective = Mexma(model, Mexma.Config(align="cosine", align_weight=2.0, koleo_weight=1.0,
                                          head_layers=mexma.HEAD_LAYERS, head_heads=4,
                                          head_hidden=512))
    a, b = map(mexma.tokenize, zip(*mexma.pairs[:12]))
    batch = collate(objective, mexma, words(a), words(b))
    sides = zip(*[rows.chunk(2) for rows in masked_rows(batch, 24)])
    monkeypatch.setattr(mexma, "mask_words",
                        lambda x: [rows[:, :x.shape[1]] for rows in next(sides)])
    names = COMMON | {"norm": "model.embed_norm", "bias": "vocabulary_bias", "head": "unmask"}
    assert_equal(page, lambda: page.loss(a, b), objective, batch, names)


def test_bert_jepa(double, monkeypatch):
    page = bert_jepa.Bert()
    model = Model(ModelConfig(vocab=bert_jepa.V, max_positions=128, dropout=0.0, head="transform",
                              layers=bert_jepa.LAYERS))
    objective = Bepa(model, Bepa.Config(cls_view="clean", order="given"))
    a, b = zip(*bert_jepa.pairs[:12])
    views = [[np.array(bert_jepa.tokenize(text)[1:-1]) for text in texts] for texts in (a, b)]
    batch = collate(objective, bert_jepa, *views)
    monkeypatch.setattr(bert_jepa, "mask_words", lambda x: masked_rows(batch, 12))
    names = COMMON | {"norm": "model.embed_norm", "bias": "model.vocabulary_bias",
                      "head.0": "model.transform", "head.2": "model.transform_norm"}
    assert_equal(page, lambda: page.loss(a, b), objective, batch, names)


def test_llm_jepa(double):
    page = llm_jepa.Decoder()
    model = Model(ModelConfig(vocab=llm_jepa.V, max_positions=256, norm_position="pre",
                              causal=True, pool="last", dropout=0.0, layers=llm_jepa.LAYERS))
    objective = LlmJepa(model, LlmJepa.Config())
    texts, codes = zip(*llm_jepa.tokenize(llm_jepa.pairs[:12]))
    batch = collate(objective, llm_jepa, map(np.array, texts), map(np.array, codes))
    names = COMMON | {"norm": "model.final_norm"}
    assert_equal(page, lambda: page.loss(texts, codes), objective, batch, names)


def test_predict_and_reconstruct(double, monkeypatch):
    page = predict_and_reconstruct.Hybrid()
    model = Model(ModelConfig(vocab=predict_and_reconstruct.V, max_positions=64, dropout=0.0,
                              norm_position="pre", positions="sinusoidal"))
    objective = Hybrid(model, Hybrid.Config(min_keep=0, predictor_width=64, predictor_layers=2,
                                            predictor_heads=4, predictor_std=0.0))
    x = predict_and_reconstruct.tokenize(predict_and_reconstruct.sentences[:12])
    batch = collate(objective, predict_and_reconstruct, words(x))
    # The tokens of two blocks for each row, and of the contexts.
    drawn = [torch.zeros(12, count, x.shape[1], dtype=torch.bool) for count in (2, 1)]
    packed, predict = batch["packed"], batch["predictor_packed"]
    block = batch["block_to"]
    drawn[0].flatten(0, 1)[predict.row_of_token()[block], predict.positions[block]] = True
    for row, positions in zip(drawn[1], split_rows(packed, packed.positions)[12:]):
        row[0, positions] = True
    monkeypatch.setattr(predict_and_reconstruct, "draw_blocks", lambda *_: drawn.pop(0))
    monkeypatch.setattr(predict_and_reconstruct, "mask_words", lambda x: masked_rows(batch, 12))
    names = {"to_predictor": "predictor_embed", "to_states": "predictor_proj",
             "predictor.norm": "predictor_norm", "predictor.blocks": "predictor",
             "mask_token": "mask_token", "w": "balance", "regressor.0": "mlm_head.transform",
             "regressor.2": "mlm_head.norm", "regressor.3": "mlm_head.vocabulary"}
    for ours, theirs in (("encoder", "model"), ("teacher", "teacher.model")):
        names |= {f"{ours}.inputs": f"{theirs}.embed", f"{ours}.norm": f"{theirs}.final_norm",
                  f"{ours}.blocks": f"{theirs}.blocks"}
    assert_equal(page, lambda: page.losses(x)[0], objective, batch, names)


@pytest.mark.parametrize("page", [bert_jepa, llm_jepa, mexma, predict_and_reconstruct],
                         ids=lambda page: page.__name__)
def test_a_page_prints_its_size_at_once_the_first_loss_and_its_numbers(page, monkeypatch, capsys):
    monkeypatch.setattr(page, "STEPS", 2)
    monkeypatch.setattr(page, "BATCH", 8)
    # 60 test sentences. The page's toy and regex make a fifth of what it asks for.
    for name in {"toy", "meanings", "regex"} & vars(page).keys():
        make, count = getattr(page, name), 60 if name == "meanings" else 300
        monkeypatch.setattr(page, name, lambda split, _, make=make, count=count: make(split, count))
    page.main()
    size, first, *lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"parameters: \d\.\d\d million", size)
    assert re.match(r"step 1: loss \d+\.\d\d", first)
    numbers = [float(re.search(r": (-?\d+\.\d+)", line)[1]) for line in lines]
    assert len(numbers) >= 2


# ---- minimal/bag.py


ROWS, MEANINGS = toy.toy("test", 150), toy.meanings("test", 150)


@pytest.mark.parametrize("mode", bag.MODES)
def test_a_bag_has_the_errors_of_metrics_and_cannot_see_far_twins(mode, monkeypatch):
    monkeypatch.setattr(bag, "BUCKETS", 2 ** 12)
    torch.manual_seed(0)
    random.seed(0)
    encode = bag.train(ROWS, mode, distance=99, steps=20, batch=32)
    copies = toy.twins(MEANINGS, "en")
    found = bag.evaluate(encode, ROWS, copies)
    texts = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    wanted = metrics.retrieval({name: encode(cells) for name, cells in texts.items()}, texts,
                               copies=encode([text for text, _, _ in copies]), reordered=copies,
                               order_of="far")
    for name, value in found.items():
        assert value == pytest.approx(wanted[name.removeprefix("retrieval/")], abs=1e-4), name
    assert {*found} == {"retrieval/xsim", "retrieval/order", "retrieval/order/far",
                        "retrieval/order/near"}
    if mode in ("words", "pairs"):
        assert found["retrieval/order"] == found["retrieval/order/far"] == 50
    assert (found["retrieval/order/near"] == 50) == (mode == "words")
    diverged = bag.evaluate(lambda texts: encode(texts) * torch.nan, ROWS, copies)
    assert diverged["retrieval/order"] == 100


def test_what_a_bag_counts():
    def hashed(*grams):
        return [zlib.crc32(gram.encode()) % bag.BUCKETS for gram in grams]

    words = hashed("a", "b", ".")
    assert bag.count("a b.", "words", 9).tolist() == words
    assert bag.count("a b.", "pairs", 9).tolist() == words + hashed("a b", "b .")
    assert bag.count("a b.", "triples", 9).tolist() == words + hashed("a b", "b .", "a b .")
    assert bag.count("a b.", "ordered", 9).tolist() == words + hashed("a ... b", "a ... .",
                                                                      "b ... .")
    assert bag.count("a b.", "ordered", 1).tolist() == words + hashed("a ... b", "b ... .")


@pytest.fixture
def small(monkeypatch):
    """Make the bag's data small, and write good files."""
    monkeypatch.setattr(bag, "BATCH", 8)
    monkeypatch.setattr(bag, "toy", lambda split, count: toy.toy(split, 60))
    monkeypatch.setattr(bag, "meanings", lambda split, count: toy.meanings(split, 60))
    lines = ["en\tde", *(f"a dog sees cat {row}\tein Hund sieht Katze {row}" for row in range(9))]
    Path("table.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    edits = {"A cat sees dog 3": "exchange", "a dog sees cat of 3": "word"}
    Path("edits.json").write_text(json.dumps({
        copy: {"src": "a dog sees cat 3", "errtype": kind} for copy, kind in edits.items()}))


OWN = ["--train", "table.tsv", "--test", "table.tsv", "--edits", "edits.json"]


def test_the_bag_prints_numbers_of_tables_and_of_scenes(small, monkeypatch, capsys):
    def run(*flags):
        monkeypatch.setattr(sys, "argv", ["bag", "--only", "words", "--steps", "2", *flags])
        bag.main()
        return capsys.readouterr().out

    numbers = json.loads(run("--split", "test", "--json"))
    assert numbers["retrieval/order"] == 50 and numbers["thread_seconds"] > 0
    assert len({json.loads(run("--json", "--only", "pairs", "--steps", "9", *words))[
        "retrieval/order/near"] for words in ([], ["--seed", "1"], ["--batch", "4"],
                                              ["--temperature", "1"])}) == 4
    assert {*json.loads(run(*OWN, "--json"))} == {"thread_seconds", "retrieval/xsim",
                                                  "retrieval/order", "retrieval/order/exchange"}
    [line] = run().splitlines()
    assert line.startswith("words    twins: far 50.0 %  near 50.0 %   wrong translation: ")
    assert len(line) <= 100
    assert run(*OWN).startswith("words    twins: exchange ")
    Path("short.tsv").write_text("en\tde\na dog\n", encoding="utf-8")
    for words, said in (("--train short.tsv", "shorter"), ("--train no.tsv", "no.tsv"),
                        ("--test table.tsv", "needs --edits"),
                        ("--rate nan", "are above 0"), ("--epochs 1", "--epochs"),
                        ("--train edits.json", "--train needs 8 rows")):
        with pytest.raises(SystemExit, match="^2$"):
            run(*words.split())
        line = capsys.readouterr().err
        assert line.startswith("error: ") and said in line and line.count("\n") == 1
