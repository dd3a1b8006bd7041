"""Heads on frozen vectors, and the tasks on published sets beside their controls."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_evaluate import tiny
from test_tasks import NO_ROWS, results_of

import evaluate
from corpora.program import BadInput
from data import Tokenizer
from model import Model
from tasks import probes
from tasks.probes import measure


def test_metrics_of_predictions_are_in_percent_and_forgive_constants():
    assert measure("f1", [1, 0, 0, 1], [1, 1, 0, 1]) == pytest.approx(80)
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

    def quick():
        model, grid = probes.adam((8,) if kind == "mlp" else ())
        return model.set_params(batch_size=4), {"alpha": grid["alpha"][:1]}

    kind = probes.logistic if kind == "logistic" else quick
    for valid in ((x[:30], labels[:30]), None):
        found = probes.senteval(x, labels, valid, test, kind, k=2)
        assert measure("accuracy", found, gold) > 90
        assert (found == probes.senteval(x, labels, valid, test, kind, k=2)).all()


def test_a_few_samples_are_enough_and_mixed_labels_are_chance():
    x, labels = (each.numpy() for each in rows(200, 6, 3, apart=6))
    assert probes.few_shot(x, labels, x, labels) > 95
    mixed = np.random.default_rng(0).permutation(labels)
    assert probes.few_shot(x, mixed, x, labels) < 60


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
    metric = "spearman" if kind == "similarity" else "accuracy"

    def learn(valid_gold):
        parts = [(u[part], None if kind == "single" else v[part], gold[part])
                 for part in (slice(200), slice(200, 300))]
        found = probes.hybrid_probe(kind, parts[0], (*parts[1][:2], valid_gold), parts[1][:2],
                                    metric, 25, 32, lr=1e-2)
        return measure(metric, found, gold[200:])

    state = torch.get_rng_state()
    found = learn(gold[200:])
    assert found > 85 and found == learn(gold[200:])
    assert torch.equal(state, torch.get_rng_state())
    if kind != "similarity":  # valid rows with wrong labels: the worst epoch is the best
        assert learn(1 - gold[200:]) < found


# ---- tasks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Published sets, tiny: the class is whether "good" is there, two texts mean the same if they
    are equal."""
    folder = tmp_path_factory.mktemp("sets")
    texts = [("good" if i % 3 else "bad") + f" film {i}" for i in range(60)]
    lines = [f"{int(text.startswith('good'))}\t{text}\n" for text in texts]
    couples = [(i % 2, text, text if i % 2 else texts[i - 7]) for i, text in enumerate(texts)]
    same = "label\tsentence1\tsentence2\n" + "".join("%d\t%s\t%s\n" % row for row in couples)
    files = {"sst2_train": "label\tsentence\n" + "".join(lines[:45]),
             "sst2_dev": "label\tsentence\n" + "".join(lines[45:]),
             "senteval_custrev": "label\tsentence\n" + "".join(lines),
             "mrpc_train": same, "mrpc_test": same,
             "sick_test": same.replace("label", "relatedness")}
    for name in ("train", "dev", "test"):
        scores = "".join(f"{5 * label}\t{a}\t{b}\t{a}\t{b}\n" for label, a, b in couples)
        files[f"stsb_multi_{name}"] = "score\ts1_en\ts2_en\ts1_de\ts2_de\n" + scores
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


def test_every_task_gives_its_metrics_beside_their_controls(tokenizer, folder, capsys,
                                                            monkeypatch):
    monkeypatch.setattr(probes, "EPOCHS", dict.fromkeys(probes.EPOCHS, (2, 32)))
    names = [name for name in probes.SETS if name != "senteval-adam"]
    results = asked(tokenizer, folder, names, langs=("en", "de"), sets=["sst2", "mrpc", "stsb"])
    results |= asked(tokenizer, folder, ["fewshot"])
    for name in ("sts/stsb/spearman", "sts/stsb-de/pearson", "pairs/mrpc/ap_max",
                 "senteval/mrpc/f1", "fewshot/cr/accuracy", "mlp/sst2/accuracy",
                 "hybrid-probes/sst2/accuracy", "hybrid-probes/stsb/spearman"):
        assert {name, f"{name}/untrained", f"{name}/bag"} <= set(results)
        assert ("accuracy" in name) == (f"{name}/majority" in results)
    assert results["sts/stsb/spearman"] > 80 and "sts/mean" not in results
    assert results["pairs/mrpc/ap_cosine/chance"] == 50
    assert results["senteval/sst2/accuracy/majority"] == pytest.approx(100 * 2 / 3)
    said = capsys.readouterr().err
    assert "note: fewshot goes without mr: " in said and "corpora.download senteval" in said
    found = asked(tokenizer, folder, ["sts"], langs=("de", "en"))
    same = found.keys() & results.keys()
    assert same and all(found[name] == results[name] for name in same)  # controls too
    for kind in ("", "/untrained", "/bag"):
        each = [found[f"sts/{name}/spearman{kind}"] for name in ("stsb", "sick")]
        assert found[f"sts/mean{kind}"] == pytest.approx(sum(each) / 2)


@pytest.mark.parametrize("pool, wanted", [(None, "mean"), ("cls", None)])
def test_the_hybrids_probes_read_the_mean_unless_a_pooling_is_asked_for(tokenizer, folder, pool,
                                                                       wanted, monkeypatch):
    monkeypatch.setattr(probes, "EPOCHS", {"sst2": (1, 32)})
    options = probes.TaskOptions(str(folder), ["sst2"], controls=False, pool=pool)
    evaluation = evaluate.Evaluation(small(), tokenizer, NO_ROWS, pool=pool)
    assert probes.sentences("hybrid-probes", evaluation, options)["sst2/rows"] == 15
    assert list(options.encoders) == [wanted]  # None: that of the evaluation


def test_the_controls_are_an_untrained_model_and_a_bag_of_embeddings(tokenizer, folder):
    model = small()
    evaluation = evaluate.Evaluation(model, tokenizer, NO_ROWS, pool="max")
    texts = ["good film", "", "film good", "good film"]
    state = torch.get_rng_state()
    kinds = probes.encoders(evaluation, probes.TaskOptions())
    vectors = {kind: encode(texts) for kind, encode in kinds.items()}
    assert torch.equal(state, torch.get_rng_state())
    ids = tokenizer.encode(texts[:1])[0].astype(np.int64)
    assert torch.allclose(vectors["bag"][0], model.embed.weight[ids].mean(0))
    assert not vectors["bag"][1].any()
    torch.manual_seed(0)
    rows = evaluation.ids_of(texts)
    for kind, one in (("model", model), ("untrained", Model(model.config))):
        assert torch.allclose(vectors[kind], evaluate.embed(one, rows, "max"), atol=1e-6)


@pytest.mark.parametrize("names, options, message", [
    (["senteval"], {"sets": ["trec", "sst2"]},
     r"task 'senteval' has no rows: trec: .*\.label is missing.*licence.*download senteval"),
    (["pairs"], {"sets": ["rte"]}, "rte_dev.tsv"), (["sts"], {"sets": ["mrpc"]}, "has no set mrpc"),
    (["pairs"], {"sets": ["mrcp"]}, "no sentence set 'mrcp'"),
    (["sts"], {"sets": ["stsb"], "langs": ["fr"]}, "no column 's1_fr'"),
    (["pairs"], {"sets": ["qqp"]}, "rows of one label")])
def test_a_set_that_was_named_must_be_there_and_tell_something_apart(tokenizer, folder, names,
                                                                     options, message):
    text = "question1\tquestion2\tis_duplicate\n" + 3 * "1\ta\t1\n"
    (folder / "qqp_dev.tsv").write_text(text, encoding="utf-8")
    with pytest.raises(BadInput, match=message):
        asked(tokenizer, folder, names, **options)
