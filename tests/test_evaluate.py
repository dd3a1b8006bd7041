"""Embedding, evaluations, the table, the folder of a run and the command line."""

import hashlib
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import corpora
import evaluate
import train
from corpora.folder import write_results
from corpora.program import BadInput
from data import Tokenizer, rows_of
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
    run.model.embed.weight.data.fill_(math.nan)
    with pytest.raises(BadInput, match="NaN or infinity for 2 of 2 texts"):
        run.encode(["dogs", "the cat"])


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
    path = tmp_path / "pairs.tsv"
    lines = [f"the cat sees {row} dogs\tdie Katze sieht {row} Hunde\n" for row in range(300)]
    path.write_text("en\tde\n" + "".join(lines), encoding="utf-8")
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


def test_few_different_targets_are_counted(tokenizer):
    texts = {"en": ["Yes."] * 9 + ["No."], "de": [f"die Katze {row}" for row in range(10)]}
    found = evaluate.run(evaluation(tokenizer, texts=corpora.EvaluationRows("x", texts)))
    assert found["retrieval/distinct"] == 2 and found["retrieval/rows"] == 10


def test_translations_show_what_was_found(tokenizer):
    one = evaluation(tokenizer)
    shown = evaluate.examples(one)
    for number, example in enumerate(shown):
        name = ("de", "ru")[number % 2]  # the languages in turn
        found = evaluate.mine(one.vectors[name], one.vectors["en"])[6 * number]
        texts = one.texts[name][6 * number], one.texts["en"][found], one.texts["en"][6 * number]
        assert example == (*texts, texts[1] == texts[2])
    assert len(shown) == 5 and evaluate.examples(evaluation(tokenizer, views=1)) == []


# ---- all metrics, and their table


@pytest.fixture(scope="module")
def results(tokenizer):
    found = evaluate.run(evaluation(tokenizer))
    regex = rows("regex", ("english", "regex"), 6)
    causal = evaluation(tokenizer, tiny("last", True), regex, max_new=2)
    validation = {"validation/loss": 2.5, "validation/mlm": 2.25}
    return validation | found | evaluate.run(causal, ["generate"])


def test_run_names_every_metric_and_averages_over_the_languages(results):
    assert {results[f"{task}/rows"] for task in ("retrieval", "geometry", "probe")} == {30}
    for metric in ("retrieval/xsim", "retrieval/xsim++", "geometry/cosine/translations"):
        pairs = (results[f"{metric}/de-en"] + results[f"{metric}/ru-en"]) / 2
        assert results[metric] == pytest.approx(pairs)
    types = [name for name in results if name.startswith("retrieval/xsim++/") and "-" not in name]
    assert {"retrieval/xsim++/negation", "retrieval/xsim++/misaligned"} <= set(types)
    assert sum(results[name] for name in types) == pytest.approx(results["retrieval/xsim++"])
    assert all(math.isfinite(value) for value in results.values())


def test_a_table_has_twenty_rows_at_most_and_the_untrained_column(results):
    lines = evaluate.table(results).splitlines()
    assert len(lines) == 21 and lines[-1] == f"and {len(results) - 20} more numbers: --json"
    before = {"retrieval/xsim": 99.5, "retrieval/rows": 7}
    after = {"retrieval/rows": 30, "retrieval/xsim": 12.25, "geometry/std": .5}
    shown = evaluate.table(after, before)
    assert [line.split()[:4] for line in shown.splitlines()] == [
        ["untrained", "trained"], ["retrieval/rows", "7", "30", "rows"],
        ["retrieval/xsim", "99.50", "12.25", "%"], ["geometry/std", "-", "0.5000", "higher"]]


# ---- the folder of a run, and the command


RECORDS = [{"step": 0, "eval": {"retrieval/xsim": 99.0, "geometry/std": .25}},
           {"step": 1, "loss": 2.0}, {"step": 1, "eval": {"retrieval/xsim": 50.0}}]


@pytest.fixture()
def folder(tokenizer, tmp_path, cats):
    """A run that trained on all but 30 rows of a table."""
    made = write_run(tmp_path / "run", tiny(), tokenizer, cats, langs="en,de", records=RECORDS)
    with open(made / "log.jsonl", "a", encoding="utf-8") as log:
        log.write('{"step": 2, "lo')  # a kill
    return made


def command(capsys, *words):
    """-> (status, stdout, stderr)"""
    status = evaluate.exit_status(evaluate.main, [str(word) for word in words])
    return (status, *capsys.readouterr())


def numbers_in(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_command_prints_a_table_and_adds_to_the_file_of_the_same_rows_and_model(
        folder, capsys, tokenizer):
    trained = evaluation(tokenizer)
    path = folder / "eval.json"
    model = hashlib.sha256((folder / "model.pt").read_bytes()).hexdigest()[:8]
    # As train.py leaves it, of the rows for validation.
    write_results(folder, "eval.json", {"retrieval/xsim": 51.0}, trained.label)
    write_results(folder, "eval.json", {"probe/mean": 40.0}, trained.label)
    assert numbers_in(path) == {"model": model, "rows": trained.label, "retrieval/xsim": 51.0,
                                "probe/mean": 40.0}
    assert trained.label.startswith("30 rows of toy (en, de, ru), ")
    status, shown, said = command(capsys, folder, "--tasks", "geometry", "--device", "cpu")
    lines = shown.splitlines()
    assert status == 0 and len(lines) <= 24 and lines[-1].startswith("health: ")
    assert lines[0].split() == ["untrained", "trained"] and "at step 0" in lines[-2]
    assert "0.2500" in shown and "lower" in shown
    assert f"held the numbers of {trained.label}, of model {model}: replaced" in said
    written = numbers_in(path)
    assert written["geometry/rows"] == 30
    assert {name.split("/")[0] for name in written} == {"model", "rows", "geometry"}
    # A model in place of this one, perhaps with an older date: nothing of the old one stays.
    save(tiny("mean"), folder / "model.pt")
    os.utime(folder / "model.pt", (1, 1))
    write_results(folder, "eval.json", {"probe/mean": 42.0}, written["rows"])
    assert f"of model {model}: replaced" in capsys.readouterr().err
    found = numbers_in(path)
    assert found.pop("model") != model
    assert found == {"rows": written["rows"], "probe/mean": 42.0}


def test_what_is_asked_otherwise_is_printed_or_goes_to_a_file_that_is_named(
        folder, plain, tmp_path, capsys):
    words = [folder, "--tasks", "geometry", "--json"]
    other = ["--data", tmp_path / "plain.txt", "--langs", "text"]
    for more in (other, ["--limit", 9], ["--pool", "mean"], ["--langs", "de,en"]):
        status, shown, _ = command(capsys, *words, *more)
        assert status == 0 and "geometry/rankme" in json.loads(shown)
        assert not [*folder.glob("eval*")]
    assert "untrained" not in command(capsys, *words[:3], "--limit", 9)[1]
    out = tmp_path / "numbers.json"
    for task in ("geometry", "retrieval"):  # the second is added
        assert command(capsys, folder, "--limit", 9, "--tasks", task, "--out", out)[0] == 0
        assert f"{task}/rows" in numbers_in(out) and "geometry/rows" in numbers_in(out)
    before = (folder / "model.pt").read_bytes()
    for other in (folder / "model.pt", tmp_path, tmp_path / "nowhere" / "x.json"):
        status, shown, said = command(capsys, *words, "--out", other)
        assert status == 2 and shown == "" and said.startswith(f"error: --out {other}: name a new")
    assert (folder / "model.pt").read_bytes() == before


def test_evaluations_at_the_same_time_lose_no_number(folder):
    def write(number):
        write_results(folder, "eval.json", {f"x/{number}": number}, "same")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(80)))
    assert len(numbers_in(folder / "eval.json")) == 82
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_rows_that_were_trained_on_are_counted(tokenizer, tmp_path, capsys):
    """A copy under another name, in another order, with other columns; the training file itself."""
    lines = [f"the cat sees {row} dogs\tdie Katze sieht {row} Hunde\n" for row in range(60)]

    def table(name, lines, header="en\tde\n"):
        (tmp_path / name).write_text(header + "".join(lines), encoding="utf-8")
        return tmp_path / name

    data = table("data.tsv", lines)
    swapped = ["\t".join(line.strip().split("\t")[::-1]) + "\n" for line in lines[::-1]]
    copy = table("copy.tsv", swapped, "de\ten\n")
    other = table("other.tsv", [f"{row}\t{row}\n" for row in range(30)])
    own = write_run(tmp_path / "own", tiny(), tokenizer, data)
    apart = write_run(tmp_path / "apart", tiny(), tokenizer, data, eval_data=str(other))

    def said(run, *more):
        return command(capsys, run, "--tasks", "geometry", "--device", "cpu", *more)[2]

    assert "trained on" not in said(own) + said(apart)
    for run, asked, count in ((apart, copy, "60 of 60"), (apart, data, "6 of 6"),
                              (own, copy, "54 of 60")):
        wanted = f"warning: {count} rows of {asked.stem} were trained on"
        assert wanted in said(run, "--data", asked)
    data.unlink()
    assert "it cannot be told which" in said(apart)


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
                                         chat="system", eval_data=str(chats)))
    turns = {"system": "the cat", "user": "sees", "assistant": "seven dogs"}
    chats.write_text((json.dumps(turns) + "\n") * 9, encoding="utf-8")
    assert evaluate.evaluation_of(opened).system == ["the cat"] * 9
    assert evaluate.evaluation_of(opened, "toy", limit=3).system is None


DAMAGED = [  # a file of the folder, and what it then holds: nothing, bytes, another tokenizer
    ("model.pt", None), ("tokenizer.json", None), ("tokenizer.json", b"{}"),
    ("tokenizer.json", "another"), ("log.jsonl", None), ("log.jsonl", b"{}\n")]
REFUSED = [
    ("RUN --tasks retreival", "did you mean retrieval?"),
    ("RUN --tasks ", "--tasks names nothing"),
    ("RUN --tasks sts", "python -m tasks RUN --tasks sts"),
    ("RUN --langs en,xx", "xx"), ("RUN --split exam", "'exam'"),
    ("RUN --data toy --limit 1", "gives 1 of at least 2 rows that are needed: a larger"),
    ("RUN --limit -1", "--limit -1 is"), ("RUN --pool sum", "'sum'"),
    ("RUN --device abacus", "'abacus'"), ("RUN --max-new 0", "--max-new 0 is"),
    ("RUN --data nowhere.tsv", "nowhere.tsv"), ("RUN --sets sst2", "unknown flag --sets"),
    ("RUN --limti 3", "did you mean --limit?"), ("RUN/nowhere", "there is no folder "),
    ("hub/name", "there is no folder hub/name; a model of the Hugging Face hub: python -m interop "
                 "import hub/name out/name")]


@pytest.mark.parametrize("words, said, damage", [
    *((words, said, None) for words, said in REFUSED),
    *(("RUN --tasks geometry", damage[0], damage) for damage in DAMAGED)])
def test_a_mistake_is_one_line_that_names_it(folder, refused, words, said, damage):
    if damage:
        name, change = damage
        (folder / name).unlink()
        if change == "another":
            Tokenizer.train(["something else"], 300).save(folder / name)
        elif change is not None:
            (folder / name).write_bytes(change)
    assert said in refused(evaluate.main, words.replace("RUN", str(folder)))
    assert not [*folder.glob("eval*")]
