"""Embedding, evaluations, the table, the folder of a run and the command line."""

import json
import math
import os

import pytest
import torch

import corpora
import evaluate
import train
from corpora.program import BadInput
from data import Tokenizer, rows_of
from model import Model, ModelConfig, Packed, save

TEXTS = ["the cat", "", "seven dogs see the cat and the cat sees seven dogs", "dogs", "the cat",
         "die Katze sieht sieben Hunde"]
LONG = "the cat sees seven dogs " * 50


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["the cat sees seven dogs", "die Katze sieht sieben Hunde"], 300)


def tiny(pool="cls", causal=False, longest=48):
    torch.manual_seed(1)
    return Model(ModelConfig(vocab=300, width=32, layers=2, heads=2, ffn_dim=64, pool=pool,
                             max_positions=longest, causal=causal, dropout=.1))


def rows(spec="toy", langs=("en", "de", "ru"), limit=30, split="test"):
    return corpora.evaluation_rows(str(spec), list(langs), split, limit)


def evaluation(tokenizer, model=None, texts=None, **more):
    return evaluate.Evaluation(model or tiny(), tokenizer, texts or rows(), **more)


# ---- embed


@pytest.mark.parametrize("pool, causal", [("cls", False), ("mean", False), ("last", True)])
def test_a_text_has_one_vector_whatever_it_is_embedded_with(tokenizer, pool, causal):
    model = tiny(pool, causal)
    together = evaluate.embed(model, tokenizer, TEXTS)
    alone = torch.cat([evaluate.embed(model, tokenizer, [text]) for text in TEXTS])
    assert together.shape == (6, 32) and together.dtype == torch.float32
    assert torch.allclose(together, alone, atol=1e-5)
    assert not torch.allclose(together[0], together[3], atol=1e-3)
    few = evaluate.read_rows(model, rows_of(tokenizer, TEXTS),
                             lambda packed: model.pool(model(packed), packed), 20)
    assert torch.allclose(together, torch.stack(few), atol=1e-5)
    assert evaluate.embed(model, tokenizer, []).shape == (0, 32)


@pytest.mark.parametrize("pool", [None, "max"])
def test_a_vector_is_the_pooled_states_of_its_row(tokenizer, pool):
    one = evaluation(tokenizer, tiny("mean").eval(), affixes=[((20,), (21, 22))] * 2, pool=pool)
    for name, texts in one.texts.items():
        ids = tokenizer.encode(texts)[7].tolist()[:44]
        packed = Packed.of([[tokenizer.special.cls, 20, *ids, 21, 22]])
        wanted = one.model.pool(one.model(packed), packed, pool or "mean")[0]
        assert torch.allclose(one.vectors[name][7], wanted, atol=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_embedding_leaves_no_trace(tokenizer, training):
    model = tiny().train(training)
    state = torch.get_rng_state()
    first = evaluate.embed(model, tokenizer, TEXTS)
    assert torch.equal(first, evaluate.embed(model, tokenizer, TEXTS))   # no dropout
    assert {module.training for module in model.modules()} == {training}
    assert torch.equal(state, torch.get_rng_state()) and not first.requires_grad


def test_batches_hold_each_row_once_and_so_many_tokens_at_most():
    lengths = torch.randint(1, 60, (100,)).tolist() + [500]
    batches = evaluate.token_batches(lengths, 128)
    assert sorted(sum(batches, [])) == [*range(101)] and batches[0] == [100]
    assert all(sum(lengths[i] for i in batch) <= 128 for batch in batches[1:])


# ---- an evaluation


@pytest.mark.parametrize("longest", [None, 2, 9])
def test_rows_have_the_affixes_of_their_column_and_their_chats_system_text(tokenizer, longest):
    texts = {"a": ["the cat", LONG[:60]], "b": ["die Katze", "Hunde"]}
    texts = corpora.EvaluationRows("x", texts, system=["seven", "the cat sees"])
    one = evaluation(tokenizer, texts=texts, affixes=[[[20], [3]], [[21, 22], [3]]],
                     max_length=longest)
    special = tokenizer.special

    def ids(text):
        return tokenizer.encode([text])[0].tolist()[:longest]

    for column, prefix in (("a", [20]), ("b", [21, 22])):
        for row, text in enumerate(texts.texts[column]):
            system = ids(texts.system[row])
            wanted = [special.cls, *system, special.sep, *prefix, *ids(text), 3]
            assert one.ids[column][row] == wanted
    plain = evaluate.embed(one.model, tokenizer, ["the cat", LONG], [20], [3], longest)
    assert torch.equal(one.encode(["the cat", LONG]), plain)


def test_a_text_is_read_no_further_than_in_training(tokenizer, tmp_path, capsys):
    lines = [f"{row} cats {LONG}\t{row} Katzen {LONG}\n" for row in range(300)]
    (tmp_path / "pairs.tsv").write_text("en\tde\n" + "".join(lines), encoding="utf-8")
    run = train.start("contrastive", out=None, data=str(tmp_path / "pairs.tsv"), vocab=300, batch=4,
                      cache=str(tmp_path), width=32, layers=1, heads=2, ffn_dim=32, max_length=6,
                      max_positions=64, eval_limit=4)
    trained = run.make_batch(0)[0]["packed"].cu_seqlens.diff().max()
    asked = run.evaluation()
    assert trained == 8 == max(map(len, asked.ids["en"] + asked.ids["de"]))  # [CLS] text [SEP]
    same = run.encode(["dogs " + LONG, "dogs " + LONG + "and more"])
    assert torch.equal(same[0], same[1])
    opened = evaluate.open_run(write_run(tmp_path / "run", tokenizer, config={"max_length": 6}))
    assert evaluate.evaluation_of(opened, limit=5).max_length == 6
    one = evaluation(tokenizer)                              # an imported model has no such length
    assert list(map(len, one.row_ids([LONG, "dogs"], ((), None)))) == [48, 6]
    assert "1 of 2 texts are longer than 48 tokens" in capsys.readouterr().err


def test_run_names_every_metric_and_averages_over_the_languages(tokenizer):
    found = evaluate.run(evaluation(tokenizer))
    assert found["retrieval/rows"] == found["geometry/rows"] == found["probe/rows"] == 30
    for metric in ("retrieval/xsim", "retrieval/xsim++", "geometry/cosine/translations"):
        pairs = (found[f"{metric}/de-en"] + found[f"{metric}/ru-en"]) / 2
        assert found[metric] == pytest.approx(pairs)
    types = [name for name in found if name.startswith("retrieval/xsim++/") and "-" not in name]
    assert {"retrieval/xsim++/negation", "retrieval/xsim++/misaligned"} <= set(types)
    assert sum(found[name] for name in types) == pytest.approx(found["retrieval/xsim++"])
    directions = [found[f"retrieval/top1/{pair}"] for pair in ("de-en", "en-de", "ru-en", "en-ru")]
    assert found["retrieval/top1"] == pytest.approx(sum(directions) / 4)
    assert {"geometry/rankme", "geometry/std", "geometry/uniformity"} <= set(found)
    assert all(math.isfinite(value) for value in found.values())


def test_the_probe_is_of_labels_and_of_graded_similarity(tokenizer):
    one = evaluation(tokenizer, texts=rows(limit=60))
    found = evaluate.run(one, ["probe"])
    texts, properties = one.rows.labelled
    assert {"tense", "number", "negation", "verb"} <= set(properties)
    z = one.encode(texts)
    for name, labels in properties.items():
        accuracy = evaluate.linear_probe(z[::2], labels[::2], z[1::2], labels[1::2])
        most = max(labels[1::2].count(label) for label in labels)
        assert found[f"probe/{name}"] == accuracy
        assert found[f"probe/majority/{name}"] == pytest.approx(100 * most / 30)
    accuracies = [found[f"probe/{name}"] for name in properties]
    assert found["probe/mean"] == pytest.approx(sum(accuracies) / len(accuracies))
    first, second, similarity = zip(*one.rows.graded)
    cosines = torch.cosine_similarity(one.encode(first).double(), one.encode(second).double())
    wanted = 100 * evaluate.rank_correlation(cosines, similarity)
    assert found["probe/similarity"] == pytest.approx(wanted)


@pytest.fixture()
def plain(tmp_path):
    (tmp_path / "plain.txt").write_text(
        "".join(f"the cat sees {count} dogs\n" for count in range(30)), encoding="utf-8")
    return rows(tmp_path / "plain.txt", (), split="all")


def test_what_applies_is_done_and_nothing_else(tokenizer, plain):
    def done(**more):
        return sorted({name.split("/")[0] for name in evaluate.run(evaluation(tokenizer, **more))})

    assert done() == ["geometry", "probe", "retrieval"]
    assert done(views=1) == ["geometry", "probe"]            # nobody taught it translations
    assert done(texts=plain) == ["geometry"]
    regex = rows("regex", ("english", "regex"), 8)
    causal = {"model": tiny("last", True), "max_new": 2}
    assert done(texts=regex) == ["geometry", "retrieval"]
    assert done(texts=regex, **causal) == ["generate", "geometry", "retrieval"]
    assert done(**causal) == ["geometry", "probe", "retrieval"]          # three columns
    one = evaluation(tokenizer, views=1)
    assert set(evaluate.run(one, ["retrieval"])) > {"retrieval/xsim"}    # but it can be asked for


@pytest.mark.parametrize("task, message", [
    ("retreival", "'retreival' is none of .*did you mean retrieval?"),
    ("sts", "python -m tasks RUN --tasks sts"), ("retrieval", "one text a row"),
    ("probe", "plain has none"), ("generate", "needs a causal model"),
])
def test_a_task_that_cannot_be_done_is_refused(tokenizer, plain, task, message):
    with pytest.raises(BadInput, match=message):
        evaluate.run(evaluation(tokenizer, texts=plain), [task])


def test_rows_or_vectors_that_cannot_be_evaluated_are_bad_input(tokenizer):
    with pytest.raises(BadInput, match="toy gives 1 rows: an evaluation needs at least 2"):
        evaluation(tokenizer, texts=rows(limit=1))
    model = tiny()
    model.embed.weight.data.fill_(math.nan)
    with pytest.raises(BadInput, match="has diverged"):
        evaluate.run(evaluation(tokenizer, model, rows(limit=3)))


def test_translations_show_what_was_found(tokenizer):
    one = evaluation(tokenizer)
    shown = evaluate.examples(one)
    for number, example in enumerate(shown):
        name = ("de", "ru")[number % 2]                      # the languages in turn
        found = evaluate.mine(one.vectors[name], one.vectors["en"])[6 * number]
        assert example.query == one.texts[name][6 * number]
        assert example.gold == one.texts["en"][6 * number]
        assert example.found == one.texts["en"][found]
        assert example.right == (example.found == example.gold)
    assert len(shown) == 5 and evaluate.examples(evaluation(tokenizer, views=1)) == []


# ---- the table


@pytest.fixture(scope="module")
def results(tokenizer):
    found = evaluate.run(evaluation(tokenizer))
    regex = rows("regex", ("english", "regex"), 6)
    causal = evaluation(tokenizer, tiny("last", True), regex, max_new=2, config={"data": "toy"})
    return found | evaluate.run(causal, ["generate"])


def test_every_metric_has_a_unit_a_direction_and_a_meaning(results):
    for name in results:
        task, _, metric = name.partition("/")
        unit, better, what = evaluate.about(name)
        assert unit in ("", "%") and better in ("", "lower", "higher")
        assert bool(what) == (metric in evaluate.TASKS[task].about)
        assert what or "/" in metric or task == "probe"      # a detail, a property
    assert evaluate.about("retrieval/xsim/de-en") == ("%", "lower", "")
    mine = {"mine": evaluate.Task(None, None, {"count": ("", "higher", "rows there are")})}
    line = evaluate.table({"mine/count": 30}, tasks=mine)
    assert line.split() == ["mine/count", "30", "higher", "rows", "there", "are"]


def test_a_table_has_twenty_rows_at_most_and_the_untrained_column(results):
    lines = evaluate.table(results).splitlines()
    assert len(lines) == 21 and lines[-1] == f"and {len(results) - 20} more numbers: --json"
    assert not any("de-en" in line for line in lines)
    few = {name: value for name, value in results.items() if name.startswith("retrieval/xsim")}
    assert len(evaluate.table(few).splitlines()) == len(few)             # details too
    before = {"retrieval/xsim": 99.5, "retrieval/rows": 7}
    after = {"retrieval/rows": 30, "retrieval/xsim": 12.25, "geometry/std": .5}
    shown = evaluate.table(after, before)
    assert [line.split()[:4] for line in shown.splitlines()] == [
        ["untrained", "trained"], ["retrieval/rows", "7", "30", "rows"],
        ["retrieval/xsim", "99.50", "12.25", "%"], ["geometry/std", "-", "0.5000", "higher"]]


def test_the_headline_gives_no_verdict_on_random_weights(results):
    line = evaluate.headline(results, 0)
    assert "\n" not in line and "retrieval/xsim++ " in line and line.endswith("-> untrained")
    assert evaluate.headline(results, 10).endswith(evaluate.diagnose(results))
    one_view = {name: value for name, value in results.items() if "retrieval" not in name}
    assert "cos(pos)" not in evaluate.headline(one_view, 10) and "cos(pos)" in line


# ---- the folder of a run, and the command


def write_run(folder, tokenizer, model=None, config=None, **first):
    folder.mkdir(exist_ok=True)
    save(model or tiny(), folder / "model.pt")
    tokenizer.save(folder / "tokenizer.json")
    first = {"config": {"data": "toy", "langs": "en,de,ru"} | (config or {}), "views": 2,
             "tokenizer_hash": tokenizer.hash, "affixes": [[[], [3]], [[], [3]]]} | first
    records = [first, {"step": 0, "eval": {"retrieval/xsim": 99.0, "geometry/std": .25}},
               {"step": 1, "loss": 2.0}, {"step": 1, "eval": {"retrieval/xsim": 50.0}}]
    lines = [json.dumps(record) for record in records]
    (folder / "log.jsonl").write_text("\n".join([*lines, '{"step": 2, "lo']), encoding="utf-8")
    return folder


@pytest.fixture()
def folder(tokenizer, tmp_path):
    return write_run(tmp_path / "run", tokenizer)


def command(capsys, *words):
    """-> (status, stdout, stderr)"""
    status = evaluate.exit_status(evaluate.main, [str(word) for word in words])
    return (status, *capsys.readouterr())


def test_a_run_is_opened_whole(folder, tokenizer):
    run = evaluate.open_run(folder)
    assert run.untrained == {"retrieval/xsim": 99.0, "geometry/std": .25}
    wanted = evaluate.embed(tiny(), tokenizer, TEXTS)
    assert torch.equal(evaluate.embed(run.model, run.tokenizer, TEXTS), wanted)
    assert len(evaluate.read_log(folder)) == 4               # the last line was cut short
    assert evaluate.read_log(folder.parent) == []


def test_the_command_prints_a_table_and_writes_the_file(folder, capsys):
    status, shown, _ = command(capsys, folder, "--limit", 20, "--device", "cpu")
    lines = shown.splitlines()
    assert status == 0 and len(lines) <= 24 and lines[-1].startswith("health: ")
    assert lines[0].split() == ["untrained", "trained"] and "at step 0" in lines[-2]
    assert " 99.00 " in shown and "lower" in shown
    path = folder / "eval.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["retrieval/rows"] == 20
    assert "retrieval/xsim/ru-en" in written and "retrieval/xsim/fr-en" not in written
    words = (folder, "--limit", 10, "--tasks", "geometry", "--json")
    printed = json.loads(command(capsys, *words)[1])
    assert {name.split("/")[0] for name in printed} == {"geometry"}
    assert json.loads(path.read_text(encoding="utf-8")) == written | printed
    os.utime(path, (1, 1))                                   # older than the model
    command(capsys, *words)
    assert json.loads(path.read_text(encoding="utf-8")) == printed


def test_other_rows_go_to_a_file_of_their_own(folder, tmp_path, capsys):
    data = tmp_path / "pairs.tsv"
    lines = [f"the cat sees {row} dogs\tdie Katze sieht {row} Hunde\n" for row in range(12)]
    data.write_text("en\tde\n" + "".join(lines), encoding="utf-8")
    status, shown, _ = command(capsys, folder, "--data", data, "--langs", "de,en", "--json")
    written = json.loads((folder / "eval-pairs-de-en.json").read_text(encoding="utf-8"))
    assert status == 0 and written == json.loads(shown) and "retrieval/xsim/en-de" in written
    assert not (folder / "eval.json").exists()
    shown = command(capsys, folder, "--data", data, "--pool", "mean")[1]
    assert "untrained" not in shown and (folder / "eval-pairs-mean.json").exists()


def test_the_runs_own_file_is_read_as_the_run_left_it_and_others_whole(tokenizer, tmp_path):
    data = tmp_path / "pairs.tsv"
    data.write_text("en\tde\n" + "the cat\tdie Katze\n" * 300, encoding="utf-8")
    own = evaluate.open_run(write_run(tmp_path / "run", tokenizer, config={"data": str(data)}))
    other = evaluate.open_run(write_run(tmp_path / "other", tokenizer, config={"data": ""}))
    for name in (None, data, tmp_path / "run" / ".." / "pairs.tsv"):
        assert evaluate.evaluation_of(own, name and str(name), ["de", "en"]).count == 30
    assert evaluate.evaluation_of(other, str(data)).count == 300
    with pytest.raises(BadInput, match="name some with --data"):     # as an imported model
        evaluate.evaluation_of(other)


def test_a_run_with_system_texts_takes_them_where_there_are_any(tokenizer, tmp_path):
    chats = tmp_path / "chats.jsonl"
    config = {"chat": "system", "max_length": 5, "data": "elsewhere", "langs": "",
              "eval_data": str(chats)}
    opened = evaluate.open_run(write_run(tmp_path / "run", tokenizer, config=config))
    turns = [{"role": role, "content": f"the {role} sees seven cats"}
             for role in ("system", "user", "assistant")]
    chats.write_text((json.dumps({"messages": turns}) + "\n") * 9, encoding="utf-8")
    one = evaluate.evaluation_of(opened)
    assert one.system == ["the system sees seven cats"] * 9
    assert max(map(len, one.ids["user"])) == 13              # [CLS] system [SEP] text [SEP]
    assert evaluate.evaluation_of(opened, "toy", limit=3).system is None


@pytest.mark.parametrize("words, message", [
    (["--tasks", "retreival", "--limit", "9"], "did you mean retrieval?"),
    (["--tasks", "sts", "--limit", "9"], "python -m tasks RUN --tasks sts"),
    (["--langs", "en,xx"], "xx"), (["--split", "exam"], "'exam'"),
    (["--limit", "1"], "--limit 1 is"), (["--device", "abacus"], "'abacus'"),
    (["--max-new", "0"], "--max-new 0 is"), (["--pool", "sum"], "'sum'"),
    (["--tasks", "generate", "--limit", "9"], "needs a causal model"),
    (["--data", "nowhere.tsv"], "nowhere.tsv"), (["--sets", "sst2"], "unknown flag --sets"),
    (["--limti", "3"], "did you mean --limit?"),
    ("log.jsonl", "is no run"), ("model.pt", "model.pt"), ("tokenizer.json", "tokenizer.json"),
    ("another tokenizer.json", "is not that of the training"),
    (["export", "out/x"], "python -m interop export"),
    (["compare", "out/x"], "python -m results compare"),
])
def test_each_mistake_is_named(folder, capsys, words, message):
    if isinstance(words, str):                               # what the folder lacks
        (folder / words.split()[-1]).unlink()
        if "another" in words:
            Tokenizer.train(["something else"], 300).save(folder / "tokenizer.json")
        words = []
    is_flag = not words or words[0].startswith("--")
    status, shown, error = command(capsys, *([folder, *words] if is_flag else words))
    assert status == 2 and shown == "" and error.count("\n") == 1
    assert error.startswith("error: ") and message in error
    assert not [*folder.glob("eval*")]
