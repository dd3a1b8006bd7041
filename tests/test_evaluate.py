"""Embeddings, tasks, the table, a run's folder, rows that were trained on, and the command."""

import json
import math

import pytest
import torch

import corpora
import evaluate
from common import BadInput, file_hash
from data import Tokenizer, tokenize_rows
from model import Model, ModelConfig, save

TEXTS = ["the cat", "", "seven dogs see the cat and the cat sees seven dogs", "dogs", "the cat",
         "die Katze sieht sieben Hunde"]
LONG = "the cat sees seven dogs " * 50


def tiny(pool="cls", causal=False, **changes):
    torch.manual_seed(1)
    shape = dict(vocab=300, width=32, layers=2, heads=2, ffn_dim=64, max_positions=48, pool=pool,
                 causal=causal, dropout=.1)
    return Model(ModelConfig(**(shape | changes))).eval()


def write_run(folder, model, tokenizer, data="toy", records=(), **config):
    """Write the folder of a run, as train.py does."""
    folder.mkdir(exist_ok=True)
    save(model, folder / "model.pt")
    tokenizer.save(folder / "tokenizer.json")
    around = [[tokenizer.special.cls], [tokenizer.special.sep]]
    files = {str(data): file_hash(data)} if data and str(data) not in corpora.EMBEDDED else {}
    first = {"format": 5, "config": {"data": str(data), "langs": "", **config}, "views": 2,
             "tokenizer_hash": tokenizer.hash, "around": around, "affixes": [around, around],
             "data_files": files}
    lines = [json.dumps(record) + "\n" for record in (first, *records)]
    (folder / "log.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def rows(spec="toy", langs=("en", "de", "ru"), limit=30, split="test"):
    return corpora.evaluation_rows(str(spec), list(langs), split, limit)


def evaluation(tokenizer, model=None, texts=None, **more):
    return evaluate.Evaluation(model or tiny(), tokenizer, texts or rows(), **more)


def table_file(path, lines, header="en\tde"):
    path.write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    return path


PAIRS = [f"the cat sees {row} dogs\tdie Katze sieht {row} Hunde" for row in range(300)]

# ---- embeddings


@pytest.mark.parametrize("pool, causal", [("cls", False), ("mean", False), ("last", True)])
def test_a_text_has_one_embedding_whatever_the_batch(tokenizer, pool, causal):
    model = tiny(pool, causal)
    together = evaluate.encode(model, tokenizer, TEXTS)
    assert together.shape == (6, 32) and together.dtype == torch.float32
    alone = torch.cat([evaluate.encode(model, tokenizer, [text]) for text in TEXTS])
    small = evaluate.map_batches(model, tokenize_rows(tokenizer, TEXTS),
                                 lambda packed: model.pool(model(packed), packed), 20)
    for other in (alone, torch.stack(small)):
        assert torch.allclose(together, other, rtol=0, atol=2e-6)
    assert not torch.allclose(together[0], together[3], atol=1e-3)
    assert evaluate.encode(model, tokenizer, []).shape == (0, 32)


def test_equal_texts_have_equal_embeddings(tokenizer):
    """Separately, the copies would be in batches of different shapes, which round differently."""
    texts = [f"the cat {'sees dogs ' * (row % 7)}{row}" for row in range(80)]
    copies = {"en": texts * 2, "de": [*texts, LONG[:90], *texts[1:]]}
    z = evaluation(tokenizer, texts=corpora.EvaluationRows("x", copies)).embeddings
    assert torch.equal(z["en"][:80], z["en"][80:]) and torch.equal(z["en"][:80], z["de"][:80])


@pytest.mark.parametrize("training", [True, False])
def test_embedding_changes_nothing(tokenizer, training):
    model = tiny().train(training)
    state = torch.get_rng_state()
    z = evaluate.encode(model, tokenizer, TEXTS)
    assert torch.equal(z, evaluate.encode(model, tokenizer, TEXTS))  # no dropout
    assert {module.training for module in model.modules()} == {training}
    assert torch.equal(state, torch.get_rng_state()) and not z.requires_grad


@pytest.mark.parametrize("texts, message", [
    ("the cat", "is one string"), (["a", None], r"texts\[1\] is None"), ([math.nan], r"is nan"),
    (["a", "b", 7], r"texts\[2\] is 7"), (["\ud800"], r"texts\[0\] is '\\ud800'"),
    ([b"a"], r"texts\[0\] is b'a'")])
def test_encode_refuses_what_is_not_a_text(tokenizer, texts, message):
    with pytest.raises(BadInput, match=message):
        evaluate.encode(tiny(), tokenizer, texts)


def test_a_diverged_model_is_refused(tokenizer):
    model = tiny()
    model.embed.weight.data.fill_(math.nan)
    with pytest.raises(BadInput, match="NaN or infinity for 2 of 2 texts"):
        evaluate.encode(model, tokenizer, ["dogs", "the cat"])


@pytest.mark.parametrize("longest", [None, 2, 9])
def test_rows_have_affixes_and_system_texts_and_are_truncated_as_in_training(
        tokenizer, longest, capsys):
    texts = corpora.EvaluationRows("x", {"a": ["the cat", LONG[:24]], "b": ["die Katze", "Hunde"]},
                                   system=["seven", "the cat sees"])
    cls, sep = tokenizer.special.cls, tokenizer.special.sep
    affixes = {"a": ([cls, 20], [3]), "b": ([cls, 21, 22], [3])}
    one = evaluation(tokenizer, texts=texts, affixes=list(affixes.values()), max_length=longest)

    def ids(text):
        return tokenizer.encode([text])[0].tolist()[:longest]

    for column, (before, after) in affixes.items():
        for row, text in enumerate(texts.texts[column]):
            assert one.ids[column][row] == [cls, *ids(texts.system[row]), sep, *before[1:],
                                            *ids(text), *after]
    plain = evaluate.encode(one.model, tokenizer, ["the cat", LONG], affixes["a"], longest)
    assert torch.equal(evaluate.embed(one.model, one.encode_ids(["the cat", LONG])), plain)
    assert f"of 2 texts are longer than {longest or 48} tokens" in capsys.readouterr().err


# ---- tasks


def test_by_default_the_tasks_that_apply_run(tokenizer):
    def tasks(**more):
        return sorted({name.split("/")[0] for name in evaluate.run(evaluation(tokenizer, **more))})

    text = corpora.EvaluationRows("plain", {"text": [f"{row} dogs" for row in range(9)]})
    regex = rows("regex", ("english", "regex"), 8)
    causal = {"model": tiny("last", True), "max_new": 2}
    assert tasks() == tasks(**causal) == ["geometry", "probe", "retrieval"]
    assert tasks(views=1) == ["geometry", "probe"]  # trained without translations
    assert tasks(texts=text) == ["geometry"]
    assert tasks(texts=regex) == ["geometry", "retrieval"]
    assert tasks(texts=regex, **causal) == ["generate", "geometry", "retrieval"]
    few = evaluation(tokenizer, texts=regex, answer_limit=7, **causal)
    assert evaluate.run(few, ["generate"])["generate/rows"] == 7
    assert "retrieval/xsim" in evaluate.run(evaluation(tokenizer, views=1), ["retrieval"])
    for task, message in (("retrieval", "one text per row"), ("probe", "plain has none"),
                          ("generate", "needs a causal model")):
        with pytest.raises(evaluate.NotApplicable, match=message):
            evaluate.run(evaluation(tokenizer, texts=text), [task])


def test_the_probe_trains_on_even_rows_and_is_tested_on_odd_ones(tokenizer):
    one = evaluation(tokenizer, texts=rows(limit=60))
    scores = evaluate.run(one, ["probe"])
    texts, properties = one.rows.labelled
    z = evaluate.embed(one.model, one.encode_ids(texts))
    accuracy = {name: evaluate.linear_probe(z[::2], labels[::2], z[1::2], labels[1::2])
                for name, labels in properties.items()}
    first, second, similarity = zip(*one.rows.graded)
    x, y = (evaluate.encode(one.model, tokenizer, side) for side in (first, second))
    correlation = evaluate.rank_correlation(evaluate.cosines(x, y), similarity)
    assert {name: scores[f"probe/{name}"] for name in accuracy} == pytest.approx(accuracy)
    assert scores["probe/mean"] == pytest.approx(sum(accuracy.values()) / len(accuracy))
    assert scores["probe/similarity"] == pytest.approx(100 * correlation)
    assert scores["probe/rows"] == 60 and 20 < scores["probe/majority"] < 60


def test_examples_are_retrieved_translations(tokenizer):
    one = evaluation(tokenizer)
    examples = evaluate.examples(one)
    for number, example in enumerate(examples):
        name = ("de", "ru")[number % 2]  # the languages in turn
        best = evaluate.margin_search(one.embeddings[name], one.embeddings["en"])[6 * number]
        texts = one.texts[name][6 * number], one.texts["en"][best], one.texts["en"][6 * number]
        assert example == (*texts, texts[1] == texts[2])
    assert len(examples) == 5 and evaluate.examples(evaluation(tokenizer, views=1)) == []


def test_the_table_explains_its_numbers(tokenizer):
    results = {"validation/loss": 2.5, **evaluate.run(evaluation(tokenizer))}
    assert all(math.isfinite(value) for value in results.values())
    for metric in ("retrieval/xsim", "retrieval/xsim++", "geometry/cosine/translations"):
        pairs = (results[f"{metric}/de-en"] + results[f"{metric}/ru-en"]) / 2
        assert results[metric] == pytest.approx(pairs)
    *lines, last = evaluate.table(results).splitlines()
    assert len(lines) < 20 and all(len(line.split()) > 3 for line in lines)
    assert last == f"and {len(results) - len(lines)} more numbers: --json"
    after = {"retrieval/xsim": 12.25, "geometry/std": .5}
    lines = evaluate.table(after, {"retrieval/xsim": 99.5}, start="start").splitlines()
    assert [line.split()[:4] for line in lines] == [
        ["start", "trained"], ["retrieval/xsim", "99.50", "12.25", "%"],
        ["geometry/std", "-", "0.5000", "0"]]
    for step, end in ((0, "-> start"), (9, "COLLAPSING")):
        scores = evaluate.geometry({"x": torch.ones(9, 4)}) | {"retrieval/xsim": 12.25}
        line = evaluate.headline(scores, step, start="start")
        assert line.startswith("retrieval/xsim 12.2 %  health: ") and line.endswith(end)


# ---- the command and its files


RECORDS = [{"step": 0, "eval": {"retrieval/xsim": 99.0, "geometry/std": .25}},
           {"step": 1, "loss": 2.0}, {"step": 1, "eval": {"retrieval/xsim": 50.0}}]


@pytest.fixture()
def folder(tokenizer, tmp_path):
    """A run that was trained on a file of pairs, of which it held some rows out."""
    pairs = table_file(tmp_path / "pairs.tsv", PAIRS)
    run = write_run(tmp_path / "run", tiny(), tokenizer, pairs, langs="en,de", records=RECORDS)
    with open(run / "log.jsonl", "a", encoding="utf-8") as log:
        log.write('{"step": 2, "lo')  # a kill
    return run


@pytest.fixture()
def command(capsys):
    """Run the command: (stdout, stderr)."""
    def output(*words):
        capsys.readouterr()
        evaluate.main([*map(str, words), "--device", "cpu"])
        return capsys.readouterr()
    return output


def numbers_in(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_eval_json_has_the_numbers_of_one_model_and_the_same_rows(folder, command):
    path = folder / "eval.json"
    model = file_hash(folder / "model.pt")
    evaluate.write_results(path, {"retrieval/xsim": 51.0}, "rows for validation", model)
    output = command(folder, "--tasks", "geometry")
    lines = output.out.splitlines()
    assert lines[1].split() == ["untrained", "trained"] and "at step 0" in lines[-2]
    assert lines[-1].startswith("health: ") and "0.2500" in output.out
    assert "rows of pairs (en, de), " in numbers_in(path)["rows"] and "replaced" not in output.err
    command(folder, "--tasks", "retrieval")  # adds its numbers
    numbers = numbers_in(path)
    assert {name.split("/")[0] for name in numbers} == {"model", "rows", "geometry", "retrieval"}
    assert numbers["model"] == model[:8] and "retrieval/xsim" in numbers
    save(tiny("mean"), folder / "model.pt")
    command(folder, "--tasks", "geometry")
    assert numbers_in(path)["model"] != model[:8] and "retrieval/xsim" not in numbers_in(path)


def test_a_model_that_is_replaced_during_an_evaluation_keeps_its_hash(
        folder, command, monkeypatch, refused):
    loaded = file_hash(folder / "model.pt")
    run, load = evaluate.run, evaluate.load

    def replace_model(function, *arguments):
        result = function(*arguments)
        save(tiny("mean"), folder / "model.pt")
        return result

    monkeypatch.setattr(evaluate, "run", lambda *arguments: replace_model(run, *arguments))
    command(folder, "--tasks", "geometry")
    assert numbers_in(folder / "eval.json")["model"] == loaded[:8] != file_hash(
        folder / "model.pt")[:8]
    save(tiny("max"), folder / "model.pt")
    monkeypatch.setattr(evaluate, "load", lambda *arguments: replace_model(load, *arguments))
    assert "was replaced while" in refused(evaluate.main, [folder])


@pytest.mark.parametrize("flags", ["--data TMP/plain.txt --langs text", "--limit 9", "--pool mean",
                                   "--langs de,en", "--split valid"])
def test_numbers_of_other_rows_go_only_to_a_file_that_is_named(folder, tmp_path, command, flags):
    (tmp_path / "plain.txt").write_text("".join(f"{row} dogs\n" for row in range(30)))
    words = [folder, "--tasks", "geometry", *flags.replace("TMP", str(tmp_path)).split()]
    assert "geometry/rankme" in json.loads(command(*words, "--json").out)
    assert not [*folder.glob("eval*")]
    out = tmp_path / "new" / "numbers.json"
    for _ in range(2):
        assert "replaced" not in command(*words, "--out", out).err
    assert "geometry/rows" in numbers_in(out)
    assert "will be replaced" in command(*words, "--limit", 5, "--out", out).err


# ---- rows that were trained on


def test_rows_that_were_trained_on_are_counted(tokenizer, tmp_path, command):
    data = table_file(tmp_path / "data.tsv", PAIRS)
    other = table_file(tmp_path / "other.tsv", [f"{row}\tHund {row}" for row in range(60)])
    swapped = ["\t".join(reversed(line.split("\t"))) for line in PAIRS[::-1]]
    copy = table_file(tmp_path / "copy.tsv", swapped, "de\ten")
    loud = table_file(tmp_path / "loud.tsv", [line.upper().replace(" ", "  ") for line in PAIRS])
    own = write_run(tmp_path / "own", tiny(), tokenizer, data)
    apart = write_run(tmp_path / "apart", tiny(), tokenizer, data, eval_data=str(other))
    child = write_run(tmp_path / "child", tiny(), tokenizer, other, init=str(own))
    trained_on = 300 - len(rows(data, ())[1]["en"])

    def warnings(run, *words):
        return command(run, "--tasks", "geometry", *words).err

    for run in (own, apart, child):
        assert "the model was" not in warnings(run)
    for run, spec, count in ((apart, copy, 300), (own, copy, trained_on), (own, loud, trained_on),
                             (child, copy, trained_on), (child, loud, trained_on)):
        wanted = f"the model was trained on {count} of the 300 rows of {spec.stem}"
        assert wanted in warnings(run, "--data", spec)
    table_file(data, PAIRS[:200])
    assert "data.tsv has changed since training" in warnings(own)
    assert "data.tsv has changed since training" in warnings(child)
    data.unlink()
    assert "we cannot tell which" in warnings(apart)


def test_folders_that_were_renamed_into_a_cycle_do_not_hang(tokenizer, tmp_path, command):
    data = table_file(tmp_path / "data.tsv", PAIRS)
    for name, init in (("a", "b"), ("b", "a"), ("self", "self")):
        write_run(tmp_path / name, tiny(), tokenizer, data, records=RECORDS,
                  init=str(tmp_path / name / ".." / init))
    for name in ("a", "self"):
        output = command(tmp_path / name, "--tasks", "geometry")
        assert output.out.splitlines()[1].split() == ["start", "trained"]


def test_the_runs_own_file_is_split_and_other_files_are_not(folder, tokenizer, tmp_path):
    own = evaluate.open_run(folder)
    other = evaluate.open_run(write_run(tmp_path / "other", tiny(), tokenizer, ""))
    pairs = str(tmp_path / "pairs.tsv")
    assert evaluate.evaluation_of(own).label == evaluate.evaluation_of(own, pairs).label
    assert evaluate.evaluation_of(own).count < 100
    assert evaluate.evaluation_of(other, pairs).count == 300
    with pytest.raises(BadInput, match="some with --data"):  # an imported model
        evaluate.evaluation_of(other)


def test_system_texts_are_used_if_there_are_any(tokenizer, tmp_path):
    turns = {"system": "the cat", "user": "sees", "assistant": "seven dogs"}
    chats = tmp_path / "chats.jsonl"
    chats.write_text((json.dumps(turns) + "\n") * 9, encoding="utf-8")
    run = evaluate.open_run(write_run(tmp_path / "run", tiny(), tokenizer, "", chat="system",
                                      eval_data=str(chats)))
    assert evaluate.evaluation_of(run).rows.system == ["the cat"] * 9
    assert evaluate.evaluation_of(run, "toy", limit=3).rows.system is None


REFUSED = [
    ("RUN --limit 9 --tasks retreival", "did you mean retrieval?"),
    ("RUN --limit 9 --tasks sts", "python -m tasks"),
    ("RUN --limit 9 --tasks generate", "needs a causal model"),
    ("RUN --langs en,xx", "xx"), ("RUN --split exam", "'exam'"),
    ("RUN --data toy --limit 1", "at least 2 are needed: choose a larger limit"),
    ("RUN --limit -1", "--limit must be"), ("RUN --max-new 0", "--max-new at least 1"),
    ("RUN --pool sum", "'sum'"), ("RUN --device abacus", "'abacus'"),
    ("RUN --data nowhere.tsv", "nowhere.tsv"), ("RUN --limti 3", "did you mean --limit?"),
    ("RUN --limit 9 --tasks geometry --out RUN/model.pt", "model.pt is a file without results"),
    ("RUN --limit 9 --tasks geometry --out RUN/model.pt/x.json", "cannot be created"),
    ("RUN/nowhere", "there is no folder "), ("out/none", "there is no folder out/none\n"),
    ("hub/name", "python -m interop import hub/name out/name"), ("~/none", "no folder /")]
DAMAGED = [("model.pt", None), ("model.pt", b"x"), ("tokenizer.json", None),
           ("tokenizer.json", b"{}"), ("tokenizer.json", "another"), ("log.jsonl", None),
           ("log.jsonl", b"{}\n"), ("log.jsonl", b'{"config": {}}\n')]  # an earlier edition


@pytest.mark.parametrize("words, message, damage", [
    *((words, message, None) for words, message in REFUSED),
    *(("RUN --tasks geometry", damage[0], damage) for damage in DAMAGED)])
def test_a_mistake_is_one_line_that_names_it(tokenizer, tmp_path, refused, words, message, damage):
    folder = write_run(tmp_path / "run", tiny(), tokenizer)
    if damage:
        name, change = damage
        (folder / name).unlink()
        if change == "another":
            Tokenizer.train(["something else"], 300).save(folder / name)
        elif change is not None:
            (folder / name).write_bytes(change)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert message in refused(evaluate.main, words.replace("RUN", str(folder)))
    assert before == {path: path.read_bytes() for path in folder.iterdir()}
