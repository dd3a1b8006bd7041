"""Examples of more than two texts, and columns that are no second text."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_house import WORDS
from test_objectives import GALLERY, assert_near, batch_of, build, gradients

import evaluate
import train
from base.common import AtLeast1
from corpora.columns import no_view
from data import Example, Packed
from harness import runs
from objectives import Contrastive, add_special, info_nce

SMALL = dict(steps=1, batch=8, vocab=300, layers=1, width=32, heads=2, ffn_dim=32, eval_limit=20,
             device="cpu", precision="float32", out=None)


class Texts(Contrastive):
    """A reader's class: its number of texts follows from an option."""
    name = "texts"

    @dataclass(frozen=True)
    class Config(Contrastive.Config):
        texts: AtLeast1 = 3  # number of texts

    @classmethod
    def num_views(cls, config):
        return config.texts

    @staticmethod
    def collate(examples, rng, config, special):
        texts = [example.views[view] for view in range(config.texts) for example in examples]
        return dict(packed=Packed.of([add_special(ids, special) for ids in texts]))

    def forward(self, batch):
        views = self.model.embeddings(batch["packed"]).chunk(self.config.texts)
        loss = info_nce(views[0], sum(views[1:]), 0.1)
        return loss, {"align": loss.detach()}


def write(name, header, rows):
    lines = ["\t".join(row) for row in (header.split(), *rows)]
    Path(name).write_text("\n".join([*lines, ""]), encoding="utf-8")


def rows(texts=3, count=60):
    """Rows of a pair and of negatives, which all rows share."""
    return [(f"the {WORDS[n % 10]} sees {n} dogs", f"{n} dogs, and the {WORDS[n % 10]}, are seen",
             *(f"a cat eats fish number {k}" for k in range(texts - 2))) for n in range(count)]


def note(run, words):
    [found] = [note for note in run.data.notes if words in note]
    return found


def test_an_example_has_the_texts_of_n_columns_in_order_and_a_shared_negative_refuses_no_batch():
    table = rows(3)
    table[3] = (*table[3][:2], "")
    write("t.tsv", "anchor positive negative", table)
    run = train.start(Texts, data="t.tsv", **SMALL | dict(batch=16))
    assert run.data.columns == ("anchor", "positive", "negative")
    assert note(run, "lack") == ("t: 1 rows are not trained on: they lack one of anchor, positive, "
                                 "negative")
    gold = {row[0]: row for row in table}
    seen = set()
    for step in range(4):
        examples = run.data.batches.examples(step)
        seen.update(texts := [tuple(run.data.tokenizer.decode(ids.tolist()) for ids in one.views)
                              for one in examples])
        assert all(row == gold[row[0]] and row[2] for row in texts)
        assert len({text for row in texts for text in row[:2]}) == 32  # in-batch negatives
    assert len(seen) > 40
    assert list(run.steps()) and run.data.validation


def test_the_first_two_columns_are_evaluated_in_training_and_later():
    write("t.tsv", "id en de hard_neg_1 Rejected", [(row[0][-6:], *row) for row in rows(4)])
    run = train.start(Texts, data="t.tsv", texts=4, **SMALL | dict(out="run"))
    assert run.data.columns == ("en", "de", "hard_neg_1", "Rejected")
    assert list(run.rows.texts) == ["en", "de"] and list(run.steps())
    header = runs.read_header("run")
    assert header["views"] == 4 and header["columns"] == ["en", "de"]
    evaluation = evaluate.evaluation_of(runs.open_run("run"))
    assert evaluation.texts == run.rows.texts  # the same rows are held out
    write("pairs.tsv", "en de", rows(2))  # needs no negatives
    assert not evaluate.main(["run", "--data", "pairs.tsv"])
    # The cache keeps the tokens of other columns apart.
    three = train.start(Texts, data="t.tsv", **SMALL)
    assert three.data.columns == ("en", "de", "hard_neg_1")
    assert "Rejected (few values): choose with --langs" in note(three, "not read")
    assert len(list(Path("cache").glob("t-*"))) == 2


def test_columns_are_read_in_order_without_names_of_negatives_and_too_few_are_refused(refused):
    assert train.start(Texts, data="toy", **SMALL).data.columns == ("en", "de", "fr")
    write("t.tsv", "fr en de", [(f"un chat {a}", a, b) for a, b in rows(2)])
    run = train.start(Texts, data="t.tsv", langs="de,fr,en", **SMALL)
    first = run.data.batches.examples(0)[0].views
    assert "un chat" in run.data.tokenizer.decode(first[1].tolist())
    for more, line in ((dict(texts=5), "t has 3 columns that can be read (fr, en, de), and an "
                        "example of the objective has 5 texts"),
                       (dict(data="toy", langs="en,de,fr,es"), "texts reads 3 columns, not 4"),
                       (dict(pairs="neighbours"), "needs two texts, and texts reads 3")):
        assert line in refused(lambda _, more=more: train.start(
            Texts, **SMALL | dict(data="t.tsv") | more), "")
    write("t.tsv", "en de negative", [(a, b, "") for a, b in rows(2)])
    assert "no row has all 3 texts" in refused(
        lambda _: train.start(Texts, data="t.tsv", **SMALL), "")


@pytest.mark.parametrize("name", ["negative", "Hard_Neg_3", "rejected", "score", "label",
                                  "similarity_score"])
def test_a_second_text_is_never_a_negative_or_a_score(name, refused):
    write("t.tsv", f"anchor positive {name}", rows(3))
    words = f"--objective contrastive --data t.tsv --out new --langs anchor,positive,{name}"
    line = refused(train.main, words)
    assert f"{name} has {no_view(name)}" in line and "gallery/triplets.py" in line
    assert not Path("new").exists() and not Path("cache").exists()
    run = train.start("contrastive", data="t.tsv", **SMALL)
    assert run.data.columns == ("anchor", "positive")
    assert note(run, "not read") == f"t: columns not read: {name} ({no_view(name)})"

    # A single text can be any column, and a decoder can answer with a label.
    assert train.start("mlm", data="t.tsv", langs=name, **SMALL).data.columns == (name,)
    words = f"--objective ntp --data t.tsv --steps 1 --out new --langs anchor,{name}"
    if "gallery/triplets.py reads" in line:
        assert "gallery/triplets.py" in refused(train.main, words)
    else:
        train.start("ntp", data="t.tsv", langs=f"anchor,{name}", **SMALL)


def test_a_translated_negative_is_no_translation():
    write("t.tsv", "en negative_de", rows(2))
    with pytest.raises(train.corpora.BadInput, match="negative_de .hard negatives"):
        train.start("contrastive", data="t.tsv", **SMALL)
    write("t.tsv", "negative_de en de", [(c, a, b) for a, b, c in rows(3)])
    assert train.start("contrastive", data="t.tsv", **SMALL).data.columns == ("en", "de")


# ---- texts of the batch, for an objective that needs more than ids


class Weighted(Contrastive):
    """A reader's class, whose loss has a weight that depends on the texts."""
    name = "weighted"

    def forward(self, batch):
        rows = batch["packed"].tokens.split(batch["packed"].cu_seqlens.diff().tolist())
        texts = [self.tokenizer.decode(row[1:-1].tolist()) for row in rows]
        weight = sum(text.endswith("seen") for text in texts)
        loss, terms = super().forward(batch)
        return loss * weight, terms | {"weight": loss.new_tensor(weight)}

    def _load_from_state_dict(self, *arguments):
        assert self.tokenizer.vocab == self.model.config.vocab
        self.loaded = True
        super()._load_from_state_dict(*arguments)


def test_an_objective_has_the_tokenizer_before_a_checkpoint_is_loaded():
    write("t.tsv", "en de", rows(2))
    settings = SMALL | dict(data="t.tsv", out="run")
    run = train.start(Weighted, **settings)
    _, terms = run.objective(run.make_batch(0)[0])
    assert terms["weight"] == 8  # of 16 texts
    list(run.steps())
    resumed = train.start(Weighted, **settings | dict(steps=2))
    assert resumed.objective.loaded and resumed.step == 1


# ---- the loss of gallery/triplets.py


A, B, C, P, Q, R, N, M = ([number, *range(40, 40 + number)] for number in range(5, 13))
# Row 0's negative is row 1's positive; row 1's first one is its own anchor; and N is there twice.
ROWS = [(A, P, Q, N), (B, Q, B, N), (C, R, M, P), (M, N, R, A)]
CANDIDATES = [(P, Q, N, B, M, R), (Q, P, R, N, M, A), (R, P, Q, N, B, M, A), (N, P, Q, R, B, A)]


def triplets(rows):
    return batch_of(objective(), items=[Example(tuple(map(np.array, row))) for row in rows])


def objective():
    return build(GALLERY["triplets"], negatives=2, temperature=0.5)


def by_hand(objective, rows, candidates):
    """The mean of -log softmax over the candidates that are left, the positive first."""
    texts = {tuple(text): None for row in rows for text in row}
    z = objective.model.embeddings(triplets([[text] * 4 for text in texts])["packed"])
    z = dict(zip(texts, F.normalize(z, dim=1)))
    losses = []
    for (anchor, *_), others in zip(rows, candidates):
        cosines = torch.stack([z[tuple(anchor)] @ z[tuple(text)] for text in others])
        losses.append(-(cosines / 0.5).log_softmax(0)[0])
    return sum(losses) / len(losses)


def test_an_equal_text_is_no_negative_and_a_text_that_is_there_twice_counts_once():
    ours = objective()
    found, gold = ours(triplets(ROWS))[0], by_hand(ours, ROWS, CANDIDATES)
    assert_near([found], [gold], 1e-12)
    assert_near(gradients(found, ours), gradients(gold, ours), 1e-10)


def test_texts_of_another_process_are_compared_too(monkeypatch):
    ours = objective()
    both = ours(triplets(ROWS))[0]
    parts = [triplets(ROWS[:2]), triplets(ROWS[2:])]
    # Of two processes, both have both halves of every view, in one order.
    kept = []
    module = GALLERY["triplets"].forward.__globals__
    monkeypatch.setitem(module, "all_gather_with_grad", lambda x: kept.append(x) or x)
    for part in parts:
        ours(part)
    whole = iter([torch.cat(pair) for pair in zip(kept[:8], kept[8:], strict=True)])
    monkeypatch.setitem(module, "all_gather_with_grad", lambda x: next(whole))
    assert_near([ours(parts[1])[0]], [both], 1e-12)


def test_triplets_name_what_they_lack(refused):
    path = str(Path(__file__).parent.parent / "gallery" / "triplets.py")
    assert "toy has no hard negatives among the columns en, de, fr" in refused(
        train.main, f"--objective {path} --out new")
    write("t.tsv", "anchor positive negative_1 negative_2", rows(4))
    assert "an example of the objective has 5 texts" in refused(
        train.main, f"--objective {path} --out new --negatives 3 --data t.tsv")
    run = train.start(path, data="t.tsv", negatives=2, **SMALL)
    assert list(run.steps()) and run.scores()["retrieval/rows"] == 6
