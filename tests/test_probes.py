"""Probes on frozen embeddings, and the tasks on sets beside their controls."""

import numpy as np
import pytest
import torch
from test_evaluate import evaluation as evaluation_of
from test_evaluate import tiny
from test_tasks import NO_ROWS, flags_with, results_of, write_table

import evaluate
from base.common import BadInput
from base.tokenizer import Tokenizer
from model import Model
from tasks import analysis, probes
from tasks.probes import measure


def test_metrics_are_in_percent_and_correlations_with_constants_are_zero():
    assert measure("f1", [1, 0, 0, 1], [1, 1, 0, 1]) == pytest.approx(80)
    assert measure("spearman", [1, 2, 3], [1, 10, 1000]) == pytest.approx(100)
    assert measure("pearson", [1, 1], [0, 3]) == measure("spearman", [1, 3], [2, 2]) == 0


def rows(count, width, apart=1.0, seed=0):
    chance = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=chance)
    x = torch.randn(count, width, generator=chance)
    x[torch.arange(count), labels] += apart
    return x, labels


def test_the_hybrids_probes_have_its_numbers_of_parameters():
    sizes = {(2, False): 2050, (2, True): 5122, (3, True): 7171, (0, True): 1026}
    for shape, size in sizes.items():
        assert sum(one.numel() for one in probes.Probe(512, *shape).parameters()) == size


@pytest.mark.parametrize("task, name, splits", [
    ("senteval", "trec", 2), ("senteval", "sst2", 3), ("hybrid-probes", "mrpc", 3),
    ("hybrid-probes", "stsb", 3)])
def test_no_probe_knows_the_labels_of_the_test_rows(task, name, splits, monkeypatch):
    """The same test rows with the opposite labels give the opposite score."""
    model, _ = probes.classifier()
    # The second model of the grid is not trained, so with wrong labels it looks best.
    grid = {"learning_rate_init": [0.02, 1e-9]}
    quick = model.set_params(batch_size=16, n_iter_no_change=5, random_state=0), grid
    monkeypatch.setattr(probes, "classifier", lambda: quick)
    monkeypatch.setitem(probes.EPOCHS, name, (40, 16))
    u, labels = rows(180, 6, apart=6)
    v, others = rows(180, 6, apart=6, seed=1)
    if name in ("mrpc", "stsb"):
        labels = (labels == others).long()
    if name == "stsb":
        labels = 5.0 * labels

    def found(test_labels):
        gold = torch.cat([labels[:120], test_labels])
        parts = [[u[part], v[part] if name in ("mrpc", "stsb") else None, gold[part]]
                 for part in (slice(80), slice(80, 120), slice(120, 180))]
        if splits == 2:
            parts = [[None if a is None else torch.cat([a, b]) for a, b in zip(*parts[:2])],
                     parts[2]]
        return probes.score(task, name, parts)[probes.METRICS.get(name, ["accuracy"])[0]]

    right = found(labels[120:])
    opposite = -right if name == "stsb" else 100 - right
    assert right > 70 and found(labels.max() - labels[120:]) == pytest.approx(opposite)


def test_probes_on_folds_do_not_know_the_labels_of_their_test_rows(monkeypatch):
    """With more dimensions than rows and random labels, rows that a probe is fitted to are all
    right, and others are at chance."""
    model, grid = probes.classifier()
    model.set_params(alpha=1e-4, batch_size=16, early_stopping=False, max_iter=40,
                     learning_rate_init=0.02)
    monkeypatch.setattr(probes, "classifier", lambda: (model, {"alpha": [1e-4]}))
    x, labels = rows(120, 300, apart=0)
    assert model.fit(x.numpy(), labels.numpy()).score(x.numpy(), labels.numpy()) == 1
    found = probes.senteval([(x.numpy(), labels.numpy())], k=3)
    assert measure("accuracy", found, labels.numpy()) < 65
    assert analysis.probe(x, labels, 5) < 65
    codes = torch.randn(120, 300, generator=torch.Generator().manual_seed(2))
    assert analysis.predict_codes(x, codes, list(map(str, range(120))))["r2"] < 0.1
    # Without the noise they learn.
    x, labels = (each.numpy() for each in rows(120, 4, apart=8))
    assert measure("accuracy", probes.senteval([(x, labels)], k=3), labels) > 90


# ---- tasks


@pytest.fixture
def tables():
    """Write tiny sets: the class is whether "good" is there, and two texts mean the same if they
    are equal."""
    texts = [("good" if i % 3 else "bad") + f" film {i}" for i in range(60)]
    single = [(text, int(text.startswith("good"))) for text in texts]
    pairs = [(text, text if i % 2 else texts[i - 7], i % 2) for i, text in enumerate(texts)]
    scores = [(a, b, 5 * label) for a, b, label in pairs]
    for names, rows in (("sst2_train", single[:45]), ("sst2_test", single[45:]),
                        ("subj_train", single[:12]),
                        ("mrpc_train mrpc_test", pairs), ("qqp_test", 3 * [("1", "a", 1)]),
                        ("stsb_train stsb_test stsb-de_test", scores)):
        for name in names.split():
            write_table(name, rows)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["good film 0123456789", "bad film"], 300)


def small(pool="cls"):
    return tiny(pool, width=16, layers=1, ffn_dim=32, max_positions=24)


def test_every_task_gives_its_metrics_beside_their_controls(tokenizer, tables, monkeypatch):
    monkeypatch.setattr(probes, "EPOCHS", dict.fromkeys(probes.EPOCHS, (2, 32)))

    def found_by(names, model=None, **options):
        return results_of(model or small(), tokenizer, None, names, **options)

    results = found_by(["sts", "pairs", "hybrid-probes"], task_langs=("en", "de"),
                       sets=["sst2", "mrpc", "stsb"])
    monkeypatch.setitem(probes.SETS, "senteval", {"mrpc": probes.TWO})
    results |= found_by(["senteval"])
    for name in ("sts/stsb/spearman", "sts/stsb-de/pearson", "pairs/mrpc/ap_cosine",
                 "senteval/mrpc/f1", "hybrid-probes/sst2/accuracy", "hybrid-probes/stsb/spearman"):
        assert {name, f"{name}/untrained", f"{name}/bag"} <= set(results)
        assert ("accuracy" in name) == (f"{name}/majority" in results)
    assert results["sts/stsb/spearman"] > 80 and results["senteval/mean"] == (
        results["senteval/mrpc/accuracy"])
    assert results["pairs/mrpc/ap_cosine/chance"] == 50
    assert results["hybrid-probes/sst2/accuracy/majority"] == pytest.approx(100 * 2 / 3)
    # The probes read the mean, unless a pooling is chosen.
    options = dict(sets=["stsb"], no_controls=True)
    name = "hybrid-probes/stsb/spearman"
    assert found_by(["hybrid-probes"], small(pool="mean"), **options)[name] == results[name]
    assert found_by(["hybrid-probes"], pool="cls", **options)[name] != results[name]


def test_the_controls_are_an_untrained_model_and_a_bag_of_embeddings(tokenizer):
    model = small()
    evaluation = evaluation_of(tokenizer, model, NO_ROWS)
    texts = ["good film", "", "film good", "good film"]
    state = torch.get_rng_state()
    encoders = probes.make_encoders(evaluation, flags_with(), "max")
    z = {kind: encode(texts) for kind, encode in encoders.items()}
    assert torch.equal(state, torch.get_rng_state())
    ids = tokenizer.encode(texts[:1])[0].astype(np.int64)
    assert torch.allclose(z["/bag"][0], model.embed.weight[ids].mean(0)) and not z["/bag"][1].any()
    torch.manual_seed(0)
    rows = evaluation.rows.encode(texts)
    for kind, one in (("", model), ("/untrained", Model(model.config))):
        assert torch.allclose(z[kind], evaluate.embed(one, rows, "max"), atol=1e-6)


def test_a_set_that_was_named_must_be_there(tokenizer, tables):
    with pytest.raises(BadInput, match="senteval: there is no .*trec_train.tsv"):
        results_of(small(), tokenizer, None, ["senteval"], sets=["sst2", "trec"])


def test_pairs_have_the_auc_of_the_cosine_also_across_languages(tokenizer):
    """In German, the pairs of class 1 are equal; in French, the rows have another order."""
    german = [("good film", "good film", 1), ("bad film", "film", 0), ("bad", "bad", 1)]
    write_table("pawsx_test", [("film", "bad", 1), ("good", "good", 0), ("film", "film", 0)])
    write_table("pawsx-de_test", [german[0], german[1], german[1]])
    write_table("pawsx-fr_test", german)
    found = results_of(small(), tokenizer, None, ["pairs"], sets=["pawsx"], no_controls=True,
                       task_langs=("en", "de", "fr"))
    assert found["pairs/pawsx/auc_cosine"] == 0 and found["pairs/pawsx-fr/auc_cosine"] == 100
    assert found["pairs/pawsx-en-de/rows"] == 6 and "pairs/pawsx-en-fr/rows" not in found
