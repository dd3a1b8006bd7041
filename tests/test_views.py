"""Examples of more than two texts, columns that are no second text, and the texts of a batch."""

from pathlib import Path

import pytest
from test_evaluate import write_rows
from test_house import WORDS
from test_objectives import GALLERY
from test_train import started

import evaluate
from base.common import BadInput
from corpora.columns import no_view
from harness import runs
from objectives import Contrastive

TRIPLETS = GALLERY["triplets"]


class Texts(TRIPLETS):
    """The same of any columns."""
    name = "texts"
    hard_negatives = False


def write(header, rows):
    write_rows("t.tsv", ["\t".join(row) for row in rows], "\t".join(header.split()))


def rows(texts=3, count=60):
    """Rows of a pair and of negatives, which all rows share."""
    return [(f"the {WORDS[n % 10]} sees {n} dogs", f"{n} dogs, and the {WORDS[n % 10]}, are seen",
             *(f"a cat eats fish number {k}" for k in range(texts - 2))) for n in range(count)]


def start(kind, out=None, **given):
    return started(kind, out, **dict(data="t.tsv", steps=1) | given)


def note(run, words):
    [found] = [note for note in run.data.notes if words in note]
    return found


def test_an_example_has_the_texts_of_n_columns_in_order_and_a_shared_negative_refuses_no_batch():
    table = rows(3)
    table[3] = (*table[3][:2], "")
    write("anchor positive negative", table)
    run = start(TRIPLETS, batch=16)
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


@pytest.mark.parametrize("header, negatives, columns", [
    ("query_id query positive_id positive negative_id negative", 1, "query positive negative"),
    ("id anchor 2 positive negative_score negative", 2, "anchor positive negative"),
    ("0 anchor 2 positive 4 de_negative", 1, "anchor positive de_negative")])
def test_ids_and_scores_of_negatives_are_none(header, negatives, columns):
    write(header, [(str(1000 + n), a, str(2000 + n), b, f"0.{n + 100}", f"{c} {n}")
                   for n, (a, b, c) in enumerate(rows())])
    if negatives == 1:
        assert start(TRIPLETS).data.columns == tuple(columns.split())
        return
    with pytest.raises(BadInput, match="anchor, positive, negative"):
        start(TRIPLETS, negatives=negatives)


def test_a_column_of_negatives_with_one_word_is_one_of_them():
    write("query positive negative_1 negative_2",
          [(a, b, "e" * n if n % 5 else c, f"a {b}") for n, (a, b, c) in enumerate(rows())])
    assert start(TRIPLETS, negatives=2).data.columns[2:] == ("negative_1", "negative_2")


def test_a_negative_of_the_second_language_is_no_translation():
    write("en_anchor de_negative de_positive", [(a, c, b) for a, b, c in rows()])
    run = start(Contrastive, langs="")
    assert run.data.columns == ("en_anchor", "de_positive")
    assert "de_negative" in note(run, "not read")


def test_the_first_two_columns_are_evaluated_in_training_and_later(capsys):
    write("id en de hard_neg_1 Rejected", [(row[0][-6:], *row) for row in rows(4)])
    run = start(TRIPLETS, "run", negatives=2)
    assert run.data.columns == ("en", "de", "hard_neg_1", "Rejected")
    assert list(run.rows.texts) == ["en", "de"] and list(run.steps())
    header = runs.read_header("run")
    assert header["views"] == 4 and header["columns"] == ["en", "de"]
    evaluation = evaluate.evaluation_of(runs.open_run("run"))
    assert evaluation.texts == run.rows.texts  # the same rows are held out
    # The cache keeps the tokens of other columns apart.
    three = start(TRIPLETS)
    assert three.data.columns == ("en", "de", "hard_neg_1")
    assert "Rejected (few values): choose with --langs" in note(three, "not read")
    assert len(list(Path("cache").glob("t-*"))) == 2
    write("en de", rows(2))  # needs no negatives
    assert not evaluate.main(["run", "--data", "t.tsv"])
    capsys.readouterr()
    write("en de fr", rows())
    assert not evaluate.main(["run", "--data", "t.tsv", "--langs", "en,de,fr"])
    assert "warning: not evaluated: fr; " in capsys.readouterr().err


def test_evaluation_data_can_lack_the_negatives():
    write("anchor positive negative", rows())
    write_rows("pairs.tsv", [f"{a} now\t{b} now" for a, b, _ in rows(count=20)], "anchor\tpositive")
    run = start(TRIPLETS, eval_data="pairs.tsv")
    assert note(run, "no validation loss") and list(run.rows.texts) == ["anchor", "positive"]


def test_columns_are_read_in_order_without_names_of_negatives(few_rows):
    assert start(Texts, data="toy").data.columns == ("en", "de", "fr")
    write("fr en de", [(f"un chat {a}", a, b) for a, b in rows(2)])
    run = start(Texts, langs="de,fr,en")
    first = run.data.batches.examples(0)[0].views
    assert "un chat" in run.data.tokenizer.decode(first[1].tolist())


@pytest.mark.parametrize("kind, header, given, line", [
    (Texts, "fr en de", dict(negatives=3), "t has 3 columns that can be read (fr, en, de), and an "
     "example of the objective has 5 texts"),
    (Texts, "en de fr", dict(data="toy", langs="en,de,fr,es"), "texts reads 3 columns, not 4"),
    (Texts, "en de fr", dict(pairs="neighbours"), "needs two texts, and texts reads 3"),
    (TRIPLETS, "en de negative_empty", {}, "no row has all 3 texts"),
    (TRIPLETS, "en de fr", {}, "t has no hard negatives among the columns en, de, fr"),
    (Contrastive, "en negative_de", {}, "columns en, negative_de (hard negatives"),
    *((Contrastive, f"anchor positive {name}", dict(langs=f"anchor,positive,{name}"),
       f"{name} has {no_view(name)}. contrastive would")
      for name in ("negative", "Hard_Neg_3", "rejected", "score", "label", "similarity_score"))])
def test_a_text_that_is_missing_or_is_none_is_one_line(kind, header, given, line, refused):
    cells = [[f"{name} {number}" * ("empty" not in name) for name in header.split()]
             for number in range(60)]
    write(header, cells)
    assert line in refused(lambda _: start(kind, "new", **given), "")
    assert not Path("new").exists()


@pytest.mark.parametrize("name", ["negative", "score"])
def test_a_negative_or_a_score_is_not_read_beside_a_pair_and_can_be_read_alone(name):
    write(f"{name} anchor positive", [(c, a, b) for a, b, c in rows(3)])
    run = start("contrastive")
    assert run.data.columns == ("anchor", "positive")
    assert note(run, "not read") == f"t: columns not read: {name} ({no_view(name)})"
    assert start("mlm", langs=name).data.columns == (name,)
    langs = f"anchor,{name}"
    if name == "score":  # a decoder can answer with a label
        start("ntp", langs=langs)
    else:
        with pytest.raises(BadInput, match="gallery/triplets.py"):
            start("ntp", langs=langs)


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
    write("en de", rows(2))
    run = start(Weighted, "run")
    _, terms = run.objective(run.make_batch(0)[0])
    assert terms["weight"] == 8  # of 16 texts
    list(run.steps())
    resumed = start(Weighted, "run", steps=2)
    assert resumed.objective.loaded and resumed.step == 1
