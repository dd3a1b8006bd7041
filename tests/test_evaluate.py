"""Embedding, evaluations, the table, the folder of a run and the command line."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import corpora
import evaluate
import train
from corpora.folder import write_results
from corpora.program import BadInput
from data import Tokenizer, rows_of
from model import Model, ModelConfig, Packed, save

TEXTS = ["the cat", "", "seven dogs see the cat and the cat sees seven dogs", "dogs", "the cat",
         "die Katze sieht sieben Hunde"]
LONG = "the cat sees seven dogs " * 50


def tiny(pool="cls", causal=False, **changes):
    torch.manual_seed(1)
    shape = dict(vocab=300, width=32, layers=2, heads=2, ffn_dim=64, max_positions=48, pool=pool,
                 causal=causal, dropout=.1)
    return Model(ModelConfig(**(shape | changes))).eval()


def write_run(folder, model, tokenizer, data="toy", records=(), **config):
    """A run's folder, as train.py leaves it."""
    folder.mkdir(exist_ok=True)
    save(model, folder / "model.pt")
    tokenizer.save(folder / "tokenizer.json")
    first = {"config": {"data": str(data), "langs": "", **config}, "views": 2,
             "tokenizer_hash": tokenizer.hash, "affixes": [[[], [3]], [[], [3]]]}
    lines = [json.dumps(record) + "\n" for record in (first, *records)]
    (folder / "log.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def rows(spec="toy", langs=("en", "de", "ru"), limit=30, split="test"):
    return corpora.evaluation_rows(str(spec), list(langs), split, limit)


def evaluation(tokenizer, model=None, texts=None, **more):
    return evaluate.Evaluation(model or tiny(), tokenizer, texts or rows(), **more)


# ---- embed


@pytest.mark.parametrize("pool, causal", [("cls", False), ("mean", False), ("last", True)])
def test_a_text_has_one_vector_whatever_it_is_embedded_with(tokenizer, pool, causal):
    model = tiny(pool, causal)
    together = evaluate.encode(model, tokenizer, TEXTS)
    alone = torch.cat([evaluate.encode(model, tokenizer, [text]) for text in TEXTS])
    assert together.shape == (6, 32) and together.dtype == torch.float32
    assert torch.allclose(together, alone, atol=1e-5)
    assert not torch.allclose(together[0], together[3], atol=1e-3)
    few = evaluate.read_rows(model, rows_of(tokenizer, TEXTS),
                             lambda packed: model.pool(model(packed), packed), 20)
    assert torch.allclose(together, torch.stack(few), atol=1e-5)
    assert evaluate.encode(model, tokenizer, []).shape == (0, 32)


@pytest.mark.parametrize("pool", [None, "max"])
def test_a_vector_is_the_pooled_states_of_its_row(tokenizer, pool):
    one = evaluation(tokenizer, tiny("mean").eval(), affixes=[((20,), (21, 22))] * 2, pool=pool)
    for name, texts in one.texts.items():
        ids = tokenizer.encode(texts)[7].tolist()[:44]
        packed = Packed.of([[tokenizer.special.cls, 20, *ids, 21, 22]])
        wanted = one.model.pool(one.model(packed), packed, pool or "mean")[0]
        assert torch.allclose(one.vectors[name][7], wanted, atol=1e-6)


def test_an_equal_text_has_an_equal_vector_in_whatever_batch(tokenizer):
    """Alone the copies would be in batches of other shapes, which round otherwise."""
    texts = [f"the cat {'sees dogs ' * (row % 7)}{row}" for row in range(80)]
    rows = corpora.EvaluationRows("x", {"en": texts * 2, "de": [*texts, LONG * 2, *texts[1:]]})
    one = evaluation(tokenizer, texts=rows)
    z = one.vectors["en"]
    assert torch.equal(z[:80], z[80:]) and torch.equal(z[:80], one.vectors["de"][:80])
    assert evaluate.search(one.vectors["de"][:80], z, 2).cosines.eq(1).all()


@pytest.mark.parametrize("training", [True, False])
def test_embedding_leaves_no_trace(tokenizer, training):
    model = tiny().train(training)
    state = torch.get_rng_state()
    first = evaluate.encode(model, tokenizer, TEXTS)
    assert torch.equal(first, evaluate.encode(model, tokenizer, TEXTS))  # no dropout
    assert {module.training for module in model.modules()} == {training}
    assert torch.equal(state, torch.get_rng_state()) and not first.requires_grad


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
    rows = one.ids_of(["the cat", LONG])
    plain = evaluate.encode(one.model, tokenizer, ["the cat", LONG], ([20], [3]), longest)
    assert torch.equal(evaluate.embed(one.model, rows), plain)


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
    opened = evaluate.open_run(write_run(tmp_path / "run", tiny(), tokenizer, max_length=6))
    assert evaluate.evaluation_of(opened, limit=5).max_length == 6
    one = evaluation(tokenizer)  # an imported model has no such length
    assert list(map(len, one.ids_of([LONG, "dogs"]))) == [48, 6]
    assert "1 of 2 texts are longer than 48 tokens" in capsys.readouterr().err
    evaluate.encode(one.model, tokenizer, [LONG, "dogs", LONG], max_length=9)
    assert "2 of 3 texts are longer than 9 tokens" in capsys.readouterr().err
    with pytest.raises(BadInput, match="'the cat' is one text"):
        run.encode("the cat")


def test_run_names_every_metric_and_averages_over_the_languages(tokenizer):
    found = evaluate.run(evaluation(tokenizer))
    assert found["retrieval/rows"] == found["geometry/rows"] == found["probe/rows"] == 30
    for metric in ("retrieval/xsim", "retrieval/xsim++", "geometry/cosine/translations"):
        pairs = (found[f"{metric}/de-en"] + found[f"{metric}/ru-en"]) / 2
        assert found[metric] == pytest.approx(pairs)
    types = [name for name in found if name.startswith("retrieval/xsim++/") and "-" not in name]
    assert {"retrieval/xsim++/negation", "retrieval/xsim++/misaligned"} <= set(types)
    assert sum(found[name] for name in types) == pytest.approx(found["retrieval/xsim++"])
    assert {"geometry/rankme", "geometry/std", "geometry/uniformity"} <= set(found)
    assert all(math.isfinite(value) for value in found.values())


def test_the_probe_is_of_labels_and_of_graded_similarity(tokenizer):
    one = evaluation(tokenizer, texts=rows(limit=60))
    found = evaluate.run(one, ["probe"])
    texts, properties = one.rows.labelled
    assert {"tense", "number", "negation", "verb"} <= set(properties)
    z = evaluate.embed(one.model, one.ids_of(texts))
    wanted = {}
    most = []
    for name, labels in properties.items():
        wanted[f"probe/{name}"] = evaluate.linear_probe(z[::2], labels[::2], z[1::2], labels[1::2])
        most.append(max(labels[1::2].count(label) for label in labels) / .3)
    mean = sum(wanted.values()) / len(wanted)
    first, second, similarity = zip(*one.rows.graded)
    x, y = (evaluate.encode(one.model, tokenizer, side).double() for side in (first, second))
    cosines = torch.cosine_similarity(x, y)
    wanted |= {"probe/rows": 60, "probe/mean": mean, "probe/majority": sum(most) / len(most),
               "probe/similarity": 100 * evaluate.rank_correlation(cosines, similarity)}
    assert found == pytest.approx(wanted)


@pytest.fixture()
def plain(tmp_path):
    path = tmp_path / "plain.txt"
    path.write_text("".join(f"the cat sees {i} dogs\n" for i in range(30)), encoding="utf-8")
    return rows(path, (), split="all")


@pytest.fixture()
def cats(tmp_path):
    """300 rows that are all the same."""
    path = tmp_path / "pairs.tsv"
    path.write_text("en\tde\n" + "the cat\tdie Katze\n" * 300, encoding="utf-8")
    return path


def test_what_applies_is_done_and_nothing_else(tokenizer, plain):
    def done(**more):
        return sorted({name.split("/")[0] for name in evaluate.run(evaluation(tokenizer, **more))})

    assert done() == ["geometry", "probe", "retrieval"]
    assert done(views=1) == ["geometry", "probe"]  # nobody taught it translations
    assert done(texts=plain) == ["geometry"]
    regex = rows("regex", ("english", "regex"), 8)
    causal = {"model": tiny("last", True), "max_new": 2}
    assert done(texts=regex) == ["geometry", "retrieval"]
    assert done(texts=regex, **causal) == ["generate", "geometry", "retrieval"]
    few = evaluation(tokenizer, texts=regex, answer_limit=7, **causal)
    assert evaluate.run(few, ["generate"])["generate/rows"] == 7
    assert done(**causal) == ["geometry", "probe", "retrieval"]
    with pytest.raises(BadInput, match="toy has 3: choose two with --langs"):
        evaluate.run(evaluation(tokenizer, **causal), ["generate"])
    one = evaluation(tokenizer, views=1)
    assert set(evaluate.run(one, ["retrieval"])) > {"retrieval/xsim"}  # but it can be asked for
    for task, message in (("retrieval", "one text a row"), ("probe", "plain has none"),
                          ("generate", "needs a causal model")):
        with pytest.raises(BadInput, match=message):
            evaluate.run(evaluation(tokenizer, texts=plain), [task])


def test_a_model_that_has_diverged_is_bad_input(tokenizer):
    model = tiny()
    model.embed.weight.data.fill_(math.nan)
    with pytest.raises(BadInput, match="has diverged"):
        evaluate.run(evaluation(tokenizer, model, rows(limit=3)))


def test_translations_show_what_was_found(tokenizer):
    one = evaluation(tokenizer)
    shown = evaluate.examples(one)
    for number, example in enumerate(shown):
        name = ("de", "ru")[number % 2]  # the languages in turn
        found = evaluate.mine(one.vectors[name], one.vectors["en"])[6 * number]
        texts = one.texts[name][6 * number], one.texts["en"][found], one.texts["en"][6 * number]
        assert example == (*texts, texts[1] == texts[2])
    assert len(shown) == 5 and evaluate.examples(evaluation(tokenizer, views=1)) == []


# ---- the table


@pytest.fixture(scope="module")
def results(tokenizer):
    found = evaluate.run(evaluation(tokenizer))
    regex = rows("regex", ("english", "regex"), 6)
    causal = evaluation(tokenizer, tiny("last", True), regex, max_new=2)
    validation = {"validation/loss": 2.5, "validation/mlm": 2.25}
    return validation | found | evaluate.run(causal, ["generate"])


def test_every_metric_has_a_unit_a_direction_and_a_meaning(results):
    """Of those that are listed test_tasks.py holds the same."""
    for name in results:
        task, _, metric = name.partition("/")
        unit, better, what = evaluate.about(name)
        if task == "validation":
            assert (unit, better) == ("", "lower")
        else:
            assert bool(what) == (metric in evaluate.TASKS[task].about)
    assert evaluate.about("retrieval/xsim/de-en") == ("%", "lower", "")
    assert evaluate.about("validation/lambda")[1] == ""  # a weight, no loss
    mine = {"mine": evaluate.Task(None, None, {"count": ("", "higher", "rows there are")})}
    line = evaluate.table({"mine/count": 30}, tasks=mine)
    assert line.split() == ["mine/count", "30", "higher", "rows", "there", "are"]


def test_a_table_has_twenty_rows_at_most_and_the_untrained_column(results):
    lines = evaluate.table(results).splitlines()
    assert len(lines) == 21 and lines[-1] == f"and {len(results) - 20} more numbers: --json"
    assert not any("de-en" in line for line in lines)
    few = {name: value for name, value in results.items() if name.startswith("retrieval/xsim")}
    assert len(evaluate.table(few).splitlines()) == len(few)  # details too
    before = {"retrieval/xsim": 99.5, "retrieval/rows": 7}
    after = {"retrieval/rows": 30, "retrieval/xsim": 12.25, "geometry/std": .5}
    shown = evaluate.table(after, before)
    assert [line.split()[:4] for line in shown.splitlines()] == [
        ["untrained", "trained"], ["retrieval/rows", "7", "30", "rows"],
        ["retrieval/xsim", "99.50", "12.25", "%"], ["geometry/std", "-", "0.5000", "higher"]]


def test_the_headline_gives_no_verdict_on_random_weights(results):
    line = evaluate.headline(results, 0)
    assert line.startswith("validation/loss 2.500  retrieval/xsim ") and "\n" not in line
    assert "retrieval/xsim++ " in line and line.endswith("-> untrained")
    assert evaluate.headline(results, 10).endswith(evaluate.diagnose(results))


# ---- the folder of a run, and the command


RECORDS = [{"step": 0, "eval": {"retrieval/xsim": 99.0, "geometry/std": .25}},
           {"step": 1, "loss": 2.0}, {"step": 1, "eval": {"retrieval/xsim": 50.0}}]


@pytest.fixture()
def folder(tokenizer, tmp_path):
    made = write_run(tmp_path / "run", tiny(), tokenizer, langs="en,de,ru", records=RECORDS)
    with open(made / "log.jsonl", "a", encoding="utf-8") as log:
        log.write('{"step": 2, "lo')  # a kill
    return made


def command(capsys, *words):
    """-> (status, stdout, stderr)"""
    status = evaluate.exit_status(evaluate.main, [str(word) for word in words])
    return (status, *capsys.readouterr())


def test_a_run_is_opened_whole(folder):
    run = evaluate.open_run(folder)
    assert run.untrained == {"retrieval/xsim": 99.0, "geometry/std": .25}
    assert all(map(torch.equal, run.model.parameters(), tiny().parameters()))
    assert len(evaluate.read_log(folder)) == 4  # the last line was cut short
    assert evaluate.read_log(folder.parent) == []


def results_in(folder):
    """{file: what is in it}"""
    return {path.name: json.loads(path.read_text(encoding="utf-8"))
            for path in folder.glob("eval*.json")}


def test_the_command_prints_a_table_and_writes_the_file(folder, capsys, tokenizer):
    # As train.py leaves it, of the rows for validation
    trained = evaluation(tokenizer)
    validation = {"validation/loss": 3.0, "retrieval/xsim": 51.0, "retrieval/rows": 30}
    write_results(folder, "eval.json", validation, trained.label)
    write_results(folder, "eval.json", {"probe/mean": 40.0}, trained.label)
    first = {"rows": trained.label} | validation | {"probe/mean": 40.0}
    assert results_in(folder) == {"eval.json": first}
    assert trained.label.startswith("30 rows of toy (en, de, ru), ")
    status, shown, said = command(capsys, folder, "--tasks", "geometry", "--device", "cpu")
    lines = shown.splitlines()
    assert status == 0 and len(lines) <= 24 and lines[-1].startswith("health: ")
    assert lines[0].split() == ["untrained", "trained"] and "at step 0" in lines[-2]
    assert "0.2500" in shown and "lower" in shown
    assert f"held the numbers of {trained.label}: replaced" in said
    written = results_in(folder)["eval.json"]
    assert written["geometry/rows"] == 1000 and {name.split("/")[0] for name in written} == {
        "rows", "geometry"}
    write_results(folder, "eval.json", {"probe/mean": 41.0}, written["rows"])
    assert results_in(folder) == {"eval.json": written | {"probe/mean": 41.0}}
    os.utime(folder / "eval.json", (1, 1))  # older than the model
    write_results(folder, "eval.json", {"probe/mean": 42.0}, written["rows"])
    assert results_in(folder)["eval.json"] == {"rows": written["rows"], "probe/mean": 42.0}


def test_what_is_asked_otherwise_goes_to_a_file_of_its_own(folder, tmp_path, capsys):
    """Two files of one name, other rows, another pooling."""
    flags = []
    for number in (0, 1):
        data = tmp_path / f"{number}" / "pairs.tsv"
        lines = [f"the cat sees {row + number} dogs\tsieben Hunde {row}\n" for row in range(12)]
        data.parent.mkdir()
        data.write_text("en\tde\n" + "".join(lines), encoding="utf-8")
        flags += [["--data", data], ["--data", data, "--langs", "de,en"]]
    flags += [["--limit", 9], ["--limit", 9, "--pool", "mean"], ["--limit", 9, "--split", "valid"]]
    seen = {}
    for words in flags:
        status, shown, said = command(capsys, folder, *words, "--tasks", "geometry", "--json")
        name = said.strip().rpartition("/")[2]
        assert status == 0 and name not in seen and name != "eval.json"
        seen[name] = json.loads(shown)
    written = results_in(folder)
    assert all(found.pop("rows") for found in written.values()) and written == seen
    assert "untrained" not in command(capsys, folder, *flags[0], "--tasks", "geometry")[1]
    again = json.loads(command(capsys, folder, *flags[0], "--tasks", "retrieval", "--json")[1])
    assert set(again) < set(results_in(folder)[next(iter(seen))])  # added to its file


@pytest.mark.parametrize("block", [Path.mkdir, os.mkfifo])  # as a full disk, or others' things
def test_numbers_that_cannot_be_written_are_printed_and_out_names_another_place(
        block, folder, tmp_path, capsys):
    block(folder / "eval.json")
    words = [folder, "--tasks", "geometry", "--limit", 9]
    status, shown, said = command(capsys, *words[:3], "--json")
    assert status == 2 and "geometry/rankme" in json.loads(shown)
    assert said.splitlines()[-1].startswith(f"error: {folder}/eval.json was not written")
    out = tmp_path / "numbers.json"
    assert command(capsys, *words, "--out", out)[0] == 0
    assert json.loads(out.read_text(encoding="utf-8"))["geometry/rows"] == 9
    assert command(capsys, *words, "--out", out)[0] == 0  # its own file, once more
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for other in (folder / "model.pt", folder / "tokenizer.json", folder / "eval.json", tmp_path,
                  loop):
        status, shown, said = command(capsys, *words, "--out", other)
        assert status == 2 and shown == "" and "holds no results" in said
    for place in (tmp_path / "nowhere", out, loop):
        status, shown, said = command(capsys, *words, "--out", place / "x.json")
        assert status == 2 and shown == "" and "lies in no folder" in said


def test_without_stderr_the_numbers_are_printed_all_the_same(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)  # as Python has it where fd 2 is closed
    status, shown, _ = command(capsys, folder, "--tasks", "geometry", "--limit", 9, "--json")
    assert status == 0 and json.loads(shown)["geometry/rows"] == 9


@pytest.mark.parametrize("held, said", [
    ('{"rows": "\\u001b[2Jevil\\nerror: \\ud800"}', "the numbers of  [2Jevil error:  : replaced\n"),
    ('{"rows": "x", "a": NaN}', "held what is no JSON object of finite numbers: replaced\n")])
def test_results_that_cannot_be_kept_are_named_in_one_line(folder, capsys, held, said):
    (folder / "eval.json").write_text(held, encoding="utf-8")
    for name in (".eval.json.1.part", ".train.pt.1.part"):  # killed; perhaps of another that lives
        (folder / name).touch()
    write_results(folder, "eval.json", {"b": 1}, "x")
    shown = capsys.readouterr().err
    assert shown.endswith(said) and shown.count("\n") == 1
    assert results_in(folder) == {"eval.json": {"rows": "x", "b": 1}}
    assert [path.name for path in folder.glob(".*.part")] == [".train.pt.1.part"]


def test_evaluations_at_the_same_time_lose_no_number(folder):
    program = """
import sys
from corpora.folder import write_results
for number in range(40):
    write_results(sys.argv[1], "eval.json", {f"{sys.argv[2]}/{number}": number}, "same")
"""
    root = os.path.dirname(evaluate.__file__)
    running = [subprocess.Popen([sys.executable, "-c", program, str(folder), name], cwd=root)
               for name in ("a", "b")]
    assert [one.wait() for one in running] == [0, 0]
    assert len(results_in(folder)["eval.json"]) == 81
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


WHOLE = {"config": {"data": "toy"}}


@pytest.mark.parametrize("name, change", [
    ("model.pt", .3), ("model.pt", .9), ("model.pt", b""), ("model.pt", "half"), ("model.pt", None),
    ("tokenizer.json", "half"), ("tokenizer.json", b"{}"), ("tokenizer.json", b"\xff"),
    ("tokenizer.json", None), ("tokenizer.json", "another"),
    ("log.jsonl", b""), ("log.jsonl", "half"), ("log.jsonl", None), ("log.jsonl", b"[" * 100_000),
    ("log.jsonl", b"[1]\n{}"), ("log.jsonl", {"config": []}), ("log.jsonl", {"config": {}}),
    ("log.jsonl", {"config": {"data": 7}}), ("log.jsonl", {"config": {"data": "", "skip_bad": 3}}),
    ("log.jsonl", {"config": {"data": "toy", "max_length": "x"}}),
    ("log.jsonl", {"config": {"data": "toy", "langs": None}}),
    ("log.jsonl", WHOLE | {"views": "2"}), ("log.jsonl", WHOLE | {"affixes": 7}),
    ("log.jsonl", WHOLE | {"affixes": [[[1], ["a"]]] * 2}),
    ("log.jsonl", WHOLE | {"affixes": [[[1], None]]}),
    ("log.jsonl", WHOLE | {"affixes": [[[10 ** 9], None]] * 2})])
def test_a_damaged_folder_is_one_line(folder, refused, name, change):
    path = folder / name
    content = bytearray(path.read_bytes())
    if isinstance(change, float):
        content[int(change * len(content))] ^= 64  # one flipped bit
    elif change == "half":
        del content[40 if name == "log.jsonl" else len(content) // 2:]
    elif change == "another":
        content = Tokenizer.train(["something else"], 300).inner.to_str().encode()
    elif change is not None:
        content = json.dumps(change).encode() if isinstance(change, dict) else change
    path.unlink()
    if change is not None:
        path.write_bytes(content)
    assert name in refused(evaluate.main, f"{folder} --limit 9 --tasks geometry")
    assert not [*folder.glob("eval*")]


@pytest.mark.parametrize("content", [b"", b"[1]", b"{\"rows\": 3", b"\xff\xfe", b"[" * 100_000])
def test_damaged_numbers_and_records_are_no_harm(tokenizer, cats, tmp_path, capsys, content):
    folder = write_run(tmp_path / "run", tiny(), tokenizer, cats, langs="en,de", records=RECORDS)
    (folder / "eval.json").write_bytes(content)
    with open(folder / "log.jsonl", "ab") as log:
        log.write(b"\n" + content + b'\n{"step": 0, "eval": 7}\n{"eval": {}}\n[]')
    assert command(capsys, folder, "--tasks", "geometry", "--device", "cpu")[0] == 0
    assert results_in(folder)["eval.json"]["geometry/rows"] == 30


def test_the_runs_own_file_is_read_as_the_run_left_it_and_others_whole(tokenizer, cats, tmp_path):
    own = evaluate.open_run(write_run(tmp_path / "run", tiny(), tokenizer, cats, langs="en,de"))
    other = evaluate.open_run(write_run(tmp_path / "other", tiny(), tokenizer, ""))
    for name in (None, cats, tmp_path / "run" / ".." / "pairs.tsv"):
        assert evaluate.evaluation_of(own, name and str(name), ["de", "en"]).count == 30
    assert evaluate.evaluation_of(other, str(cats)).count == 300
    with pytest.raises(BadInput, match="name some with --data"):  # as an imported model
        evaluate.evaluation_of(other)


def test_a_run_with_system_texts_takes_them_where_there_are_any(tokenizer, tmp_path):
    chats = tmp_path / "chats.jsonl"
    opened = evaluate.open_run(write_run(tmp_path / "run", tiny(), tokenizer, "elsewhere",
                                         chat="system", max_length=5, eval_data=str(chats)))
    turns = [{"role": role, "content": f"the {role} sees seven cats"}
             for role in ("system", "user", "assistant")]
    chats.write_text((json.dumps({"messages": turns}) + "\n") * 9, encoding="utf-8")
    one = evaluate.evaluation_of(opened)
    assert one.system == ["the system sees seven cats"] * 9
    assert max(map(len, one.ids["user"])) == 13  # [CLS] system [SEP] text [SEP]
    assert evaluate.evaluation_of(opened, "toy", limit=3).system is None
    with pytest.raises(BadInput, match="toy has no system texts"):
        corpora.evaluation_rows("toy", system=True)


@pytest.mark.parametrize("words, message", [
    ("RUN --tasks retreival --limit 9", "did you mean retrieval?"),
    ("RUN --tasks ", "--tasks names nothing"),
    ("RUN --tasks sts --limit 9", "python -m tasks RUN --tasks sts"),
    ("RUN --langs en,xx", "xx"), ("RUN --split exam", "'exam'"),
    ("RUN --limit 1", "toy gives 1 rows: at least 2 are needed"),
    ("RUN --limit -1", "--limit -1 is"), ("RUN --pool sum", "'sum'"),
    ("RUN --device abacus", "'abacus'"), ("RUN --max-new 0", "--max-new 0 is"),
    ("RUN --max-new 9", "--max-new 9: only the task generate"), ("RUN --header yes", "--header"),
    ("RUN --data nowhere.tsv", "nowhere.tsv"), ("RUN --sets sst2", "unknown flag --sets"),
    ("RUN --limti 3", "did you mean --limit?"), ("nowhere", "nowhere is no run")])
def test_each_mistake_is_named(folder, refused, words, message):
    assert message in refused(evaluate.main, words.replace("RUN", str(folder)))
    assert not [*folder.glob("eval*")]
