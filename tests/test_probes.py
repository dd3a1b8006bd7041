"""Heads on frozen vectors, and the tasks on published sets beside their controls."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_tasks import NO_ROWS, results_of, tiny

import evaluate
from corpora.program import BadInput
from data import Tokenizer
from model import Model
from tasks import probes
from tasks.probes import measure


def test_metrics_of_predictions_are_in_percent_and_forgive_constants():
    assert measure("f1", [1, 0, 0, 1], [1, 1, 0, 1]) == pytest.approx(80)
    assert measure("mcc", [1, 0, 0, 1], [1, 1, 0, 1]) == pytest.approx(100 / 3 ** .5)
    assert measure("spearman", [1, 2, 3], [1, 10, 1000]) == pytest.approx(100)
    assert measure("pearson", [1, 1], [0, 3]) == measure("spearman", [1, 3], [2, 2]) == 0


# ---- heads


def rows(count, width, classes=2, apart=1.0, seed=0):
    chance = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=chance)
    x = torch.randn(count, width, generator=chance)
    x[torch.arange(count), labels] += apart
    return x, labels


@pytest.mark.parametrize("kind", ["logistic", "linear", "mlp"])
def test_sentevals_protocols_learn_what_can_be_learned(kind):
    x, labels = (each.numpy() for each in rows(160, 4, apart=8))
    test, gold = (each.numpy() for each in rows(60, 4, apart=8, seed=1))
    valid = (x[:30], labels[:30])

    def quick():
        model, grid = probes.adam((8,) if kind == "mlp" else ())
        return model.set_params(batch_size=4), {"alpha": grid["alpha"][:1]}

    kind = probes.logistic if kind == "logistic" else quick
    found = probes.senteval(x, labels, valid, test, kind)
    assert measure("accuracy", found, gold) > 90
    assert (found == probes.senteval(x, labels, valid, test, kind)).all()
    found = probes.senteval(x, labels, None, test, kind, k=2)
    assert measure("accuracy", found, gold) > 90
    found = probes.senteval(x, labels, kind=kind, k=2)
    assert len(found) == 160 and measure("accuracy", found, labels) > 75


def test_a_few_samples_are_enough_and_mixed_labels_are_chance():
    x, labels = (each.numpy() for each in rows(200, 6, 3, apart=6))
    test, gold = (each.numpy() for each in rows(90, 6, 3, apart=6, seed=1))
    assert probes.few_shot(x, labels, test, gold) > 95
    assert probes.few_shot(x, np.random.default_rng(0).permutation(labels), test, gold) < 60


def test_the_hybrids_heads_have_its_numbers_of_parameters():
    sizes = {(2, "single"): 2050, (2, "pair"): 5122, (3, "pair"): 7171, (1, "similarity"): 1026}
    for kind, size in sizes.items():
        assert sum(one.numel() for one in probes.Probe(512, *kind).parameters()) == size


@pytest.mark.parametrize("kind", ["single", "pair", "similarity"])
def test_the_hybrids_probes_learn_and_keep_the_best_epoch_of_the_valid_rows(kind):
    u, labels = rows(300, 8, apart=3)
    v, same = rows(300, 8, apart=3, seed=1)
    gold = {"single": labels, "pair": (labels == same).long(),
            "similarity": 5 * F.cosine_similarity(u, v)}[kind]
    v = None if kind == "single" else v
    metric = "spearman" if kind == "similarity" else "accuracy"

    def part(start, end):
        return u[start:end], None if v is None else v[start:end], gold[start:end]

    def learn(valid):
        return probes.hybrid_probe(kind, part(0, 200), valid, part(200, 300)[:2], metric, 25, 32,
                                   lr=1e-2)

    state = torch.get_rng_state()
    found = learn(part(200, 300))
    assert measure(metric, found, gold[200:]) > 85
    assert torch.equal(found, learn(part(200, 300)))
    assert torch.equal(state, torch.get_rng_state())
    if kind != "similarity":  # valid rows with wrong labels: the worst epoch is the best
        worst = learn((*part(200, 300)[:2], 1 - gold[200:]))
        assert measure(metric, worst, gold[200:]) < measure(metric, found, gold[200:])


def test_a_probe_needs_two_classes():
    with pytest.raises(BadInput, match="1 classes"):
        probes.hybrid_probe("single", (torch.ones(4, 2), None, [1] * 4), None, None, "", 1, 2)


# ---- tasks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Published sets, tiny: the class is whether "good" is there, two texts mean the same if they
    are equal."""
    folder = tmp_path_factory.mktemp("sets")
    texts = [("good" if i % 3 else "bad") + f" film {i}" for i in range(60)]
    lines = [f"{int(text.startswith('good'))}\t{text}\n" for text in texts]
    couples = [(text, text if i % 2 else texts[i - 7], i % 2) for i, text in enumerate(texts)]
    same = "".join(f"{a}\t{b}\t{label}\n" for a, b, label in couples)
    scores = "".join(f"{5 * label}\t{a}\t{b}\t{a}\t{b}\n" for a, b, label in couples)
    files = {"sst2_train": "label\tsentence\n" + "".join(lines[:45]),
             "sst2_dev": "label\tsentence\n" + "".join(lines[45:]),
             "senteval_custrev": "label\tsentence\n" + "".join(lines)}
    for name in ("mrpc_train", "mrpc_test"):
        files[name] = "sentence1\tsentence2\tlabel\n" + same
    for name in ("stsb_multi_train", "stsb_multi_dev", "stsb_multi_test"):
        files[name] = "score\ts1_en\ts2_en\ts1_de\ts2_de\n" + scores
    for name, text in files.items():
        (folder / f"{name}.tsv").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["good film 0123456789", "bad film"], 300)


def small():
    return tiny(width=16, layers=1, ffn_dim=32, max_positions=24)


def asked(tokenizer, folder, names, **options):
    return results_of(small(), tokenizer, None, names, files=str(folder), **options)


def test_every_task_gives_its_metrics_beside_their_controls(tokenizer, folder, capsys):
    names = [name for name in probes.SETS if name != "senteval-adam"]
    results = asked(tokenizer, folder, names, langs=("en", "de"), sets=["sst2", "mrpc", "stsb"])
    results |= asked(tokenizer, folder, ["knn"])
    assert {name.split("/")[0] for name in results} == set(names)
    for name in ("sts/stsb/spearman", "sts/stsb-de/pearson", "pairs/mrpc/ap_cosine",
                 "pairs/mrpc/ap_max", "senteval/sst2/accuracy", "senteval/mrpc/f1",
                 "fewshot/sst2/accuracy", "knn/cr/accuracy", "mlp/sst2/accuracy",
                 "hybrid-probes/sst2/accuracy", "hybrid-probes/mrpc/f1",
                 "hybrid-probes/stsb/spearman"):
        assert {name, f"{name}/untrained", f"{name}/bag"} <= set(results)
        assert ("accuracy" in name) == (f"{name}/majority" in results)
    assert results["sts/stsb/spearman"] > 80
    assert results["pairs/mrpc/ap_cosine/chance"] == 50
    assert results["senteval/sst2/accuracy/majority"] == pytest.approx(100 * 2 / 3)
    assert results["knn/cr/rows_substitute"] == 6
    said = capsys.readouterr().err
    assert "note: knn goes without mr: " in said and "corpora.download senteval" in said
    again = asked(tokenizer, folder, ["mlp", "sts"], langs=("de",), sets=["sst2", "stsb"])
    assert again == {name: results[name] for name in again}  # controls too, set by set


def test_the_controls_are_an_untrained_model_and_a_bag_of_embeddings(tokenizer, folder):
    model = small()
    evaluation = evaluate.Evaluation(model, tokenizer, NO_ROWS)
    texts = ["good film", "", "film good", "good film"]
    state = torch.get_rng_state()
    kinds = probes.encoders(evaluation, probes.TaskOptions())
    vectors = {kind: encode(texts) for kind, encode in kinds.items()}
    assert torch.equal(state, torch.get_rng_state())
    ids = tokenizer.encode(texts[:1])[0].astype(np.int64)
    assert torch.allclose(vectors["bag"][0], model.embed.weight[ids].mean(0))
    assert not vectors["bag"][1].any()
    torch.manual_seed(0)
    fresh = evaluate.embed(Model(model.config), tokenizer, texts)
    assert torch.allclose(vectors["untrained"], fresh, atol=1e-6)
    assert not torch.allclose(vectors["untrained"], vectors["model"], atol=1e-3)


@pytest.mark.parametrize("names, options, message", [
    (["senteval"], {"sets": ["trec", "sst2"]},
     r"task 'senteval' has no rows: trec: .*\.label is missing.*licence.*download senteval"),
    (["pairs"], {"sets": ["rte"]}, "rte_dev.tsv"), (["sts"], {"sets": ["mrpc"]}, "has no set mrpc"),
    (["pairs"], {"sets": ["mrcp"]}, "no sentence set 'mrcp'"),
    (["sts"], {"sets": ["stsb"], "langs": ["fr"]}, "no column 's1_fr'")])
def test_a_set_that_was_named_must_be_there(tokenizer, folder, names, options, message):
    with pytest.raises(BadInput, match=message):
        asked(tokenizer, folder, names, **options)


def test_rows_of_one_label_and_scores_that_are_no_numbers_are_refused(tokenizer, tmp_path):
    for label, said in (("nan", "is not a number"), ("3", "rows of one label")):
        text = "score\ts1_en\ts2_en\n" + 3 * f"{label}\ta\tb\n"
        (tmp_path / "stsb_multi_test.tsv").write_text(text, encoding="utf-8")
        with pytest.raises(BadInput, match=said):
            asked(tokenizer, tmp_path, ["sts"], sets=["stsb"])
