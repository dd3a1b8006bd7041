import json

import pytest
import torch
import torch.nn.functional as F

import data
import evaluate
import metrics
import probes
from data import BadInput
from model import Model, ModelConfig, save

# ---- metrics of predictions: what scikit-learn and SciPy say

GOLD = [2, 1, 1, 0, 0, 0, 0, 0, 0, 2, 1, 2, 1, 1, 2, 2, 1, 1, 1, 2, 0, 2, 2, 0, 1, 2, 1, 0, 2, 2, 2, 0, 0, 2, 0, 1, 0, 0, 1, 1]
FOUND = [2, 1, 2, 0, 2, 0, 1, 1, 2, 0, 2, 2, 1, 0, 2, 2, 1, 1, 1, 2, 0, 2, 2, 0, 1, 1, 1, 2, 2, 1, 0, 0, 2, 2, 0, 1, 0, 2, 1, 1]
SCORES = [.8, .9, .9, .8, .4, .7, .7, .9, .1, .7, 1.3, 1, .4, 1.3, 1, 1, .5, 1.4, 1.3, .8,
          .5, .2, .8, .9, .7, .5, .8, .9, 0, .7, .6, 0, .7, 0, .8, .9, .9, .1, 1.2, .5]
ONES = [int(one == 1) for one in GOLD]


def measured():
    return [metrics.accuracy(FOUND, GOLD), metrics.f1_macro(FOUND, GOLD), metrics.f1(FOUND, GOLD), metrics.mcc(FOUND, GOLD),
            metrics.average_precision(SCORES, ONES), metrics.pearson(SCORES, GOLD), metrics.spearman(SCORES, GOLD)]


def test_metrics_of_predictions_are_those_that_libraries_computed():
    assert measured() == pytest.approx([65, 64.82545764154959, 74.07407407407408, .4825151261865683, 65.62534415475592,
                                        .0350031261718029, .04904738954364663], abs=1e-9)
    assert metrics.mcc([1, 1, 1], [0, 1, 1]) == metrics.pearson([1, 1], [0, 3]) == metrics.f1([0, 0], [0, 2]) == 0
    assert metrics.average_precision([1, 1, 1, 1], [1, 0, 0, 0]) == 25 and metrics.average_precision([1, 2], [0, 0]) == 0
    assert metrics.spearman([1, 2, 3], [1, 10, 1000]) == pytest.approx(1)


def test_metrics_of_predictions_are_those_of_libraries():
    learn, stats = pytest.importorskip("sklearn.metrics"), pytest.importorskip("scipy.stats")
    assert measured() == pytest.approx([
        100 * learn.accuracy_score(GOLD, FOUND), 100 * learn.f1_score(GOLD, FOUND, average="macro"),
        100 * learn.f1_score(ONES, [int(one == 1) for one in FOUND]), learn.matthews_corrcoef(GOLD, FOUND),
        100 * learn.average_precision_score(ONES, SCORES), stats.pearsonr(SCORES, GOLD)[0], stats.spearmanr(SCORES, GOLD)[0]], abs=1e-9)


# ---- heads


def regression_rows():
    x = (2 * torch.arange(72, dtype=torch.float64).view(24, 3).pow(1.5).sin()).mul(1000).round() / 1000
    return x, torch.tensor([i % 3 if i % 5 else 2 for i in range(24)])


def test_logistic_regression_has_the_coefficients_of_scikit_learn():
    x, labels = regression_rows()
    three, two = probes.logistic(x, labels, .7, 1000), probes.logistic(x, labels == 2, .7, 1000)       # the values: version 1.9, C = .7
    gold = [[.35624, -.25183, -.07861, -.33435], [-.48559, .52966, .05348, -.13548], [.12935, -.27784, .02513, .46983]]
    assert torch.allclose(three.T, torch.tensor(gold, dtype=torch.float64), atol=1e-4)
    assert torch.allclose(two[:, 0], torch.tensor([.21015, -.39051, .09381, -.27815], dtype=torch.float64), atol=1e-4)
    assert probes.classify(two, x).tolist() == (x @ two[:3, 0] + two[3, 0] > 0).long().tolist()


@pytest.mark.parametrize("classes", [2, 4])
def test_logistic_regression_is_scikit_learns(classes):
    linear = pytest.importorskip("sklearn.linear_model")
    x, labels = rows(200, 12, classes, apart=.3)
    theirs = linear.LogisticRegression(C=2, tol=1e-9, max_iter=2000).fit(x.double().numpy(), labels.numpy())
    w = probes.logistic(x, labels, 2, 1000)
    assert torch.allclose(w[:-1].T, torch.tensor(theirs.coef_), atol=1e-4) and torch.allclose(w[-1], torch.tensor(theirs.intercept_), atol=1e-4)


def rows(count, width, classes=2, apart=1.0, seed=0):
    chance = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=chance)
    x = torch.randn(count, width, generator=chance)
    x[torch.arange(count), labels] += apart
    return x, labels


@pytest.mark.parametrize("hidden", [0, 5])
def test_one_step_of_many_classifiers_is_a_step_of_adam_for_each(hidden):
    x, labels = rows(30, 6, 3)
    l2, own = torch.tensor([0, .1]), (torch.rand(30, 2, generator=torch.Generator().manual_seed(1)) < .8).float()
    shapes = [(6, hidden), (1, hidden), (hidden, 3), (1, 3)] if hidden else [(6, 3), (1, 3)]
    state = [torch.randn(a, 2, b, generator=torch.Generator().manual_seed(a + b)) for a, b in shapes]
    for model in (0, 1):
        mine = [one[:, model:model + 1].clone() for one in state]
        plain = [torch.nn.Parameter(one[:, 0].clone()) for one in mine]
        moments = [[torch.zeros_like(one) for one in mine] for _ in "mv"]
        adam = torch.optim.Adam(plain, 1e-3, weight_decay=l2[model].item())
        for step in (1, 2, 3):
            z = x @ plain[0] + plain[1]
            z = z.sigmoid() @ plain[2] + plain[3] if hidden else z
            adam.zero_grad()
            F.cross_entropy(z[own[:, model] > 0], labels[own[:, model] > 0]).backward()
            adam.step()
            probes._descend(mine, moments, step, x, labels, own[:, model:model + 1], l2[model:model + 1])
        assert all(torch.allclose(one[:, 0], other, atol=1e-5) for one, other in zip(mine, plain))
        assert not torch.allclose(mine[0], state[0][:, model:model + 1], atol=1e-4)


def test_folds_hold_each_class_evenly():
    labels = torch.tensor([0] * 40 + [1] * 20)
    fold = probes.folds(labels, 5, 0)
    assert [[int(((fold == k) & (labels == one)).sum()) for k in range(5)] for one in (0, 1)] == [[8] * 5, [4] * 5]
    assert not torch.equal(fold, probes.folds(labels, 5, 1))


@pytest.mark.parametrize("hidden", [0, 8])
def test_sentevals_protocols_learn_what_can_be_learned(hidden):
    x, labels = rows(240, 4, apart=8)
    test, gold = rows(60, 4, apart=8, seed=1)
    quick = dict(hidden=hidden, k=3, max_epoch=24, batch=4)
    assert metrics.accuracy(probes.senteval(x, labels, None, test, **quick), gold) > 95
    assert metrics.accuracy(probes.senteval(x, labels, (x[:30], labels[:30]), test, **quick), gold) > 95
    found = probes.senteval(x, labels, **quick)
    assert len(found) == 240 and metrics.accuracy(found, labels) > 95
    assert torch.equal(found, probes.senteval(x, labels, **quick))


def test_cross_validation_never_tests_what_it_was_trained_on():
    """Each row has a dimension of its own: whoever trains on a row knows its label, and nothing can be known of the others."""
    labels = torch.randint(2, (60,), generator=torch.Generator().manual_seed(0))
    x = 20 * torch.eye(60)
    scores, predict = probes.fit(x, labels, torch.ones(1, 60) > 0, torch.ones(1, 60) > 0, torch.tensor([1e-5]), max_epoch=200, batch=8)
    assert scores.item() == 1 and torch.equal(predict(x)[:, 0], labels)
    assert metrics.accuracy(probes.senteval(x, labels, k=4, max_epoch=40, batch=8), labels) < 70


def test_few_samples_and_neighbours():
    x, labels = rows(200, 6, 3, apart=6)
    test, gold = rows(90, 6, 3, apart=6, seed=1)
    mixed = labels[torch.randperm(200, generator=torch.Generator().manual_seed(0))]
    assert probes.few_shot(x, labels, test, gold) > 95 and probes.few_shot(x, mixed, test, gold, experiments=3) < 60
    assert metrics.accuracy(probes.knn(x, labels, test), gold) > 95
    x, one = torch.tensor([[1, 0], [1, .1], [0, 1], [.1, 1.]]), torch.tensor([[1, .2]])
    assert probes.knn(x, [0, 0, 1, 1], one, 3).item() == 0 and probes.knn(x, [1, 0, 1, 1], one, 3).item() == 1
    assert probes.knn(x, [1, 0, 2, 2], one, 2).item() == 0               # one vote each: the nearer


def test_the_hybrids_heads_have_its_numbers_of_parameters():
    count = lambda *arguments: sum(one.numel() for one in probes.Probe(*arguments).parameters())
    kinds = [(2, "single"), (2, "pair"), (3, "pair"), (4, "single"), (1, "similarity")]
    assert [count(512, *kind) for kind in kinds] == [2050, 5122, 7171, 3076, 1026]


@pytest.mark.parametrize("kind", ["single", "pair", "similarity"])
def test_the_hybrids_probes_learn_and_keep_the_best_epoch_of_the_valid_rows(kind):
    u, labels = rows(300, 8, apart=3)
    v, same = rows(300, 8, apart=3, seed=1)
    v = None if kind == "single" else v
    gold = labels if kind == "single" else (labels == same).long()
    gold = 5 * F.cosine_similarity(u, v) if kind == "similarity" else gold
    cut = lambda rows: (u[rows], None if v is None else v[rows], gold[rows])
    measure = metrics.spearman if kind == "similarity" else metrics.accuracy
    state = torch.get_rng_state()
    learn = lambda valid, epochs: probes.probe(kind, cut(slice(200)), valid, cut(slice(200, 300))[:2], measure, epochs, 32, lr=1e-2)
    found = learn(cut(slice(200, 300)), 25)
    assert measure(found, gold[200:]) > (.9 if kind == "similarity" else 85)
    assert torch.equal(found, learn(cut(slice(200, 300)), 25)) and torch.equal(state, torch.get_rng_state())
    if kind != "similarity":                                             # valid rows with wrong labels: the worst epoch is the best
        wrong = (*cut(slice(200, 300))[:2], 1 - gold[200:])
        assert measure(learn(wrong, 25), gold[200:]) < measure(found, gold[200:])


def test_a_probe_needs_two_classes():
    with pytest.raises(BadInput, match="1 classes"):
        probes.probe("single", (torch.ones(4, 2), None, [1, 1, 1, 1]), None, None, None, 1, 2)


# ---- tasks of evaluate.py


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Published sets, tiny: the class is whether "good" is there, two texts mean the same if they are equal."""
    folder = tmp_path_factory.mktemp("sets")
    texts = [("good" if i % 3 else "bad") + f" film {i}" for i in range(60)]
    single = lambda rows: "label\tsentence\n" + "".join(f"{int(text.startswith('good'))}\t{text}\n" for text in rows)
    couples = [(text, text if i % 2 else texts[i - 7], i % 2) for i, text in enumerate(texts)]
    files = {"sst2_train": single(texts[:45]), "sst2_dev": single(texts[45:]), "senteval_custrev": single(texts)}
    for name in ("mrpc_train", "mrpc_test"):
        files[name] = "sentence1\tsentence2\tlabel\n" + "".join(f"{a}\t{b}\t{label}\n" for a, b, label in couples)
    for name in ("stsb_multi_train", "stsb_multi_dev", "stsb_multi_test"):
        files[name] = "score\ts1_en\ts2_en\ts1_de\ts2_de\n" + "".join(f"{5 * label}\t{a}\t{b}\t{a}\t{b}\n" for a, b, label in couples)
    for name, text in files.items():
        (folder / f"{name}.tsv").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(1)
    tokenizer = data.train_tokenizer(["good film 0123456789", "bad film"], 300)
    return Model(ModelConfig(vocab=300, width=16, layers=1, heads=2, hidden=32, max_length=24)).eval(), tokenizer


def asked(trained, folder, tasks, **options):
    return evaluate.run(evaluate.Subject(*trained, "toy", files=folder, sentences=evaluate.Sentences(**options)), tasks)


def test_every_task_gives_its_metrics_beside_their_controls(trained, folder, capsys):
    results = asked(trained, folder, list(probes.SETS), epochs=2, langs=("en", "de"))
    assert {name.split("/")[0] for name in results} == set(probes.SETS)
    for name in ("sts/stsb/spearman", "sts/stsb-de/pearson", "pairs/mrpc/ap_cosine", "pairs/mrpc/ap_max", "senteval/sst2/accuracy", "senteval/cr/accuracy",
                 "senteval/mrpc/f1", "fewshot/sst2/accuracy", "knn/cr/accuracy", "mlp/sst2/accuracy", "hybrid-probes/sst2-2-epochs/accuracy",
                 "hybrid-probes/mrpc-2-epochs/f1", "hybrid-probes/stsb-2-epochs/spearman"):
        assert {name, f"{name}/untrained", f"{name}/bag"} <= set(results)
        assert ("accuracy" in name) == (f"{name}/majority" in results) and ("ap_" in name) == (f"{name}/chance" in results)
    assert results["sts/stsb/spearman"] > 80 and results["pairs/mrpc/ap_cosine/chance"] == 50 == results["senteval/mrpc/accuracy/majority"]
    assert results["senteval/sst2/accuracy/majority"] == pytest.approx(100 * 2 / 3)
    assert results["senteval/cr/rows"] == 60 and results["fewshot/cr/rows_substitute"] == 6 and "senteval/cr/rows_substitute" not in results
    said = capsys.readouterr().err
    assert said.count("note: senteval goes without mr: ") == 1 and "python data.py download senteval" in said and "note: pairs goes without pawsx" in said
    shown = evaluate.table(results)
    assert "(untrained " in shown and ", majority 66.67)" in shown and "/untrained" not in shown
    assert (again := asked(trained, folder, ["fewshot", "mlp", "hybrid-probes"], epochs=2)) == {name: results[name] for name in again}


def test_the_controls_are_an_untrained_model_and_a_bag_of_embeddings(trained, folder):
    model, tokenizer = trained
    subject = evaluate.Subject(model, tokenizer, "toy", files=folder)
    kinds = evaluate.encoders(subject)
    texts = ["good film", "", "film good", "good film"]
    state = torch.get_rng_state()
    vectors = {kind: encode(texts) for kind, encode in kinds.items()}
    assert torch.equal(vectors["model"], evaluate.embed(model, tokenizer, texts)) and torch.equal(state, torch.get_rng_state())
    ids = data.encode(tokenizer, texts[:1])[0]
    assert torch.allclose(vectors["bag"][0], model.embed.weight[[int(one) for one in ids]].mean(0)) and not vectors["bag"][1].any()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        fresh = Model(model.config)
    assert torch.equal(vectors["untrained"], evaluate.embed(fresh, tokenizer, texts)) and not torch.equal(vectors["untrained"], vectors["model"])
    assert "/untrained" not in str(asked(trained, folder, ["sts"], controls=False))


def test_a_set_that_is_not_there_is_an_error_if_it_was_named_or_nothing_else_is_there(trained, folder, tmp_path):
    with pytest.raises(BadInput, match=r"task 'senteval' has no rows: trec: .*\.label is missing.*licence.*https://.*download senteval"):
        asked(trained, folder, ["senteval"], sets=("trec", "sst2"))
    with pytest.raises(BadInput, match="task 'sts' has no rows: stsb: .*data.py download stsb"):
        asked(trained, tmp_path, ["sts"])
    with pytest.raises(BadInput, match="task 'sts' has no set mrpc: its sets are stsb, sick"):
        asked(trained, folder, ["sts"], sets=("mrpc",))
    with pytest.raises(BadInput, match="no sentence task 'mrcp'"):
        asked(trained, folder, ["pairs"], sets=("mrcp",))
    with pytest.raises(BadInput, match="no column 's1_fr'"):
        asked(trained, folder, ["sts"], sets=("stsb",), langs=("fr",))
    assert {name.split("/")[1] for name in asked(trained, folder, ["pairs"], sets=("mrpc",), controls=False)} == {"mrpc"}


def test_the_command_keeps_the_sets_that_were_evaluated_before(trained, folder, tmp_path, capsys):
    model, tokenizer = trained
    save(model, tmp_path / "model.pt")
    data.write_tokenizer(tokenizer, tmp_path / "tokenizer.json")
    (tmp_path / "log.jsonl").write_text(json.dumps({"config": {"data": "toy"}}), encoding="utf-8")
    command = [str(tmp_path), "--device", "cpu", "--files", str(folder), "--no-controls"]
    assert evaluate.main([*command, "--tasks", "fewshot", "--sets", "sst2"]) == 0
    assert evaluate.main([*command, "--tasks", "fewshot,sts", "--sets", "cr,stsb"]) == 0
    kept = json.loads((tmp_path / "eval.json").read_text(encoding="utf-8"))
    assert {"fewshot/sst2/accuracy", "fewshot/cr/accuracy", "sts/stsb/spearman"} <= set(kept)
    capsys.readouterr()
    assert evaluate.main([*command, "--tasks", "geometry"]) == 2 and "--no-controls" in capsys.readouterr().err


def test_rows_of_one_label_and_scores_that_are_no_numbers_are_refused(trained, tmp_path):
    for label, said in (("nan", "the label nan is not a number"), ("3", "rows of one label")):
        (tmp_path / "stsb_multi_test.tsv").write_text("score\ts1_en\ts2_en\n" + f"{label}\ta\tb\n" * 3, encoding="utf-8")
        with pytest.raises(BadInput, match=said):
            asked(trained, tmp_path, ["sts"], sets=("stsb",))
