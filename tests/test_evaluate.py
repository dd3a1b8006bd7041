"""Embeddings, tasks, generation, the table, a run's folder, rows that were trained on, and the
command."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from test_house import ROOT
from test_model import CONFIGS

import corpora
import evaluate
import train
from base import metrics
from base.common import BadInput, file_hash
from base.tokenizer import tokenize_rows
from corpora.overlap import without_frequent
from data import Packed
from harness import generation, runs, screen
from harness.weights import save
from model import POOLS, Model, ModelConfig
from objectives import Mlm

TEXTS = ["the cat", "", "seven dogs see the cat", "too long for the model " * 50, "the cat"]
PAIRS = [f"the cat sees {row} dogs\tdie Katze sieht {row} Hunde" for row in range(300)]


def tiny(pool="cls", causal=False, **changes):
    torch.manual_seed(1)
    shape = dict(vocab=300, width=32, layers=2, heads=2, ffn_dim=64, max_positions=48, pool=pool,
                 causal=causal, dropout=.1)
    return Model(ModelConfig(**(shape | changes))).eval()


def write_run(folder, model, tokenizer, data="toy", after=None, **config):
    """Write the folder of a run, as train.py does. after: the ids after a text, or [SEP]."""
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    save(model, folder / "model.pt")
    tokenizer.save(folder / "tokenizer.json")
    around = [[tokenizer.special.cls], after or [tokenizer.special.sep]]
    first = {"format": runs.FORMAT, "config": {"data": str(data), "langs": "", **config},
             "views": 2, "tokenizer_hash": tokenizer.hash, "around": around,
             "affixes": [around, around], "columns": []}
    trained = [np.zeros(0, np.uint64)]
    if data and str(data) not in corpora.EMBEDDED:
        split = "all" if config.get("eval_data") else "train"
        trained += [without_frequent(corpora.open_text(data).find_hashes(split))]
    if config.get("init"):
        trained += [np.load(Path(config["init"], "trained.npy"))]
    np.save(folder / "trained.npy", np.unique(np.concatenate(trained)))
    (folder / "log.jsonl").write_text(json.dumps(first) + "\n", encoding="utf-8")
    return folder


def rows(spec="toy", langs=("en", "de", "ru"), limit=30):
    return corpora.evaluation_rows(spec, langs, limit=limit)


def evaluation(tokenizer, model=None, texts=None, affixes=None, max_length=None, **more):
    model = model or tiny()
    encoded = evaluate.EncodedRows(texts or rows(), tokenizer, model.config, affixes, max_length)
    return evaluate.Evaluation(model, encoded, **more)


def write_rows(path, lines, header="en\tde"):
    Path(path).write_text("\n".join([header, *lines, ""]), encoding="utf-8")
    return path


# ---- embeddings


@pytest.mark.parametrize("pool, causal", [*((pool, False) for pool in POOLS), ("last", True)])
def test_a_text_has_one_embedding_whatever_the_batch(tokenizer, pool, causal):
    model = tiny(pool, causal).train()
    together = evaluate.encode(model, tokenizer, TEXTS)
    alone = [evaluate.encode(model, tokenizer, [text])[0] for text in TEXTS]
    small = evaluate.map_batches(model, tokenize_rows(tokenizer, TEXTS, max_row=48),
                                 lambda packed: model.pool(model(packed), packed), 20)
    for other in (alone, small):  # also without dropout
        assert torch.allclose(together, torch.stack(other), rtol=0, atol=2e-6)
    assert torch.equal(together[0], together[4]) and not together.requires_grad
    assert all(module.training for module in model.modules())


def test_one_string_and_a_diverged_model_are_refused(tokenizer):
    model = tiny()
    model.embed.weight.data.fill_(math.nan)
    for texts, message in (("the cat", "'the cat' is no list"), ([], "is no list"),
                           (["the cat"], "has diverged")):
        with pytest.raises(BadInput, match=message):
            evaluate.encode(model, tokenizer, texts)


def test_rows_have_affixes_and_system_texts_and_are_truncated_as_in_training(tokenizer, capsys):
    cells = {"a": ["the cat", "seven dogs see the cat"], "b": ["die Katze", "Hunde"]}
    texts = corpora.EvaluationRows("x", cells, system=["seven", "the cat sees"])
    cls, sep = tokenizer.special.cls, tokenizer.special.sep
    affixes = ([cls, 20], [3]), ([cls, 21, 22], [3])
    one = evaluation(tokenizer, texts=texts, affixes=affixes, max_length=2)
    systems = tokenizer.encode(texts.system)
    for (before, after), (column, lines) in zip(affixes, cells.items()):
        assert one.rows.ids[column] == [[cls, *system[:2], sep, *before[1:], *text[:2], *after]
                                   for system, text in zip(systems, tokenizer.encode(lines))]
    assert "2 of 2 system texts of x are longer than 2 tokens" in capsys.readouterr().err
    # A chat without a system text has no such turn.
    bare = evaluation(tokenizer, texts=texts._replace(system=["seven", ""]), affixes=affixes)
    assert bare.rows.ids["a"][1] == [cls, 20, *tokenizer.encode(cells["a"])[1], 3]


# ---- the screen


def test_readme_shows_what_a_training_prints(monkeypatch):
    """The heading, the columns and the decimals of its two screens."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    names = screen.columns(dict.fromkeys(screen.METRICS.keys() - {"generate/exact"}))
    assert page.count(screen.heading(names)) == 2
    lines = re.findall(r"^ +\d+(?: +\d+\.\d+){5}  \w+$", page, re.M)
    records = []
    for line in lines:
        step, *cells, word = line.split()
        monkeypatch.setattr(screen, "verdict", Mock(return_value=word))
        records.append({"step": int(step), "eval": dict(zip(names, map(float, cells)))})
        assert screen.headline(records[-1]["eval"], int(step)) == line
    assert [record["step"] for record in records] == [0, 120, 20]
    run = SimpleNamespace(records=records[:1], settings=SimpleNamespace(init=""), example=[])
    said = []
    screen.show_evaluation(run, records[0], said.append)
    assert "\n".join(said) in page


def test_a_metric_is_added_in_one_place(monkeypatch):
    """A task of which METRICS has no number is shown, too."""
    metric = screen.Metric("rank of the translation", "best: 1", 3, (1,), "mean rank")
    monkeypatch.setitem(screen.METRICS, "retrieval/rank", metric)
    results = {"retrieval/xsim": 2.0, "retrieval/xsim/de-en": 7.0, "retrieval/rank": 1.5,
               "mine/recall": 0.25}
    assert screen.heading(results).split("  ")[-2] == "mean rank"
    assert "    1.500  " in screen.headline(results | {"geometry/cosine/same": 0.0,
                                                      "geometry/rankme": 9.0,
                                                      "geometry/rankme_share": 50.0}, 0)
    assert "retrieval/rank    1.5000 rank of the translation; best: 1" in screen.table(results)
    for text in (screen.table(results), screen.summary(results, results)):
        assert "rank of the translation" in text and "mine/recall" in text and "de-en" not in text


# ---- tasks


def test_by_default_the_tasks_that_apply_run(tokenizer):
    def tasks(names=None, **more):
        return {name.split("/")[0] for name in evaluate.run(evaluation(tokenizer, **more), names)}

    text = corpora.EvaluationRows("plain", {"text": ["one", "two"]})
    regex = rows("regex", (), 8)
    causal = tiny("last", True)
    assert tasks() == tasks(model=causal) == {"geometry", "probe", "retrieval"}
    assert tasks(views=1) == {"geometry", "probe"}  # trained without translations
    assert tasks(["retrieval"], views=1) == {"retrieval"}
    assert tasks(texts=text) == {"geometry"}
    # What a decoder learns is to answer.
    assert tasks(texts=regex, model=causal) == {"generate", "geometry"}
    for task in ("retrieval", "probe", "generate"):
        with pytest.raises(evaluate.NotApplicable):
            tasks([task], texts=text)


@pytest.mark.parametrize("data", ["toy", "documents"])
def test_the_probe_trains_on_training_sentences_and_is_tested_on_others(tokenizer, data):
    one = evaluation(tokenizer, texts=rows(data, ()))
    (texts, properties), (queries, golds) = one.rows.labelled
    if data == "toy":
        assert queries == one.rows.texts["en"]
    assert len(texts) == 1000 and len(queries) == 30
    z, z_queries = (evaluate.embed(one.model, one.rows.encode(some)) for some in (texts, queries))
    accuracy = metrics.linear_probe(z, properties["verb"], z_queries, golds["verb"])
    found = evaluate.run(one, ["probe"])
    assert (found["probe/verb"], found["probe/rows"]) == (pytest.approx(accuracy), 30)
    same = evaluation(tokenizer, texts=corpora.evaluation_rows(data, (), "train", 30))
    assert "probe/mean" not in evaluate.run(same)
    with pytest.raises(evaluate.NotApplicable, match="trained on --split train"):
        evaluate.run(same, ["probe"])


def test_examples_are_retrieved_translations(tokenizer):
    one = evaluation(tokenizer)
    wanted = []
    for row, best in enumerate(metrics.margin_search(*map(one.embeddings.get, ("de", "en")))[:5]):
        found, gold = one.rows.texts["en"][best], one.rows.texts["en"][row]
        wanted += [f"  {one.rows.texts['de'][row]}", f"    {'=' if best == row else '!'} {found}"]
        wanted += [f"    instead of {gold}"] * (best != row)
    head, *lines = screen.examples(one)
    assert head.endswith("(= right, ! wrong):") and lines == wanted
    assert screen.examples(one, count=1) == wanted[:len(wanted) // 5]


def test_one_twin_is_followed(tokenizer):
    one = evaluation(tokenizer)
    number = screen.confused_twin(one)
    text, row, kind = one.rows.reordered[number]
    embedded = one.embeddings["de"][row], one.embeddings["en"][row], one.reordered[number]
    x, right, wrong = (torch.nn.functional.normalize(each, dim=0) for each in embedded)
    assert kind == "far" and x @ wrong > x @ right  # the untrained model prefers the twin
    sentence, first, second = screen.twin_lines(one, number)
    assert sentence.strip() == one.rows.texts["de"][row]
    assert first.split()[:2] == [f"{x @ right:.4f}", "translation"]
    assert second.split()[:3] == ["!", f"{x @ wrong:.4f}", "twin"] and second.endswith(text)
    one.reordered[number] = one.embeddings["en"][row]  # as in a collapsed run
    assert all(line.split()[0][0].isdigit() for line in screen.twin_lines(one, number)[1:])


def test_one_gap_is_filled(tokenizer, monkeypatch):
    objective = Mlm(tiny(head="transform"), Mlm.Config())
    texts = corpora.EvaluationRows("x", {"text": ["", "seven dogs see the cat", "the cat"]})
    rows = evaluation(tokenizer, texts=texts).rows
    ids = [*rows.ids["text"][1]]
    middle = len(ids) // 2
    for mark, found in (("=", ids[middle]), ("!", ids[middle - 1])):
        monkeypatch.setattr(objective, "most_likely", lambda states, x=found: torch.tensor([x]))
        first, *rest = screen.gap_lines(objective, rows)
        gold, guess = (tokenizer.decode([one]).strip() for one in (ids[middle], found))
        assert first.startswith(f"      {mark} ") and f" [{guess}] " in first
        assert rest == ([] if mark == "=" else [f"        instead of [{gold}]"])


# ---- what a causal model writes, and how it is judged


def slow_generate(model, prompt, max_new):
    row = list(prompt)
    while len(row) < min(len(prompt) + max_new, model.config.max_positions):
        row.append(int(model.logits(model(Packed.of([row], causal=True))[-1:]).argmax()))
    return row[len(prompt):]


# The others differ in what a cache does not see.
@pytest.mark.parametrize("name", ["bert", "llama", "sinusoidal", "gemma2", "no positions",
                                  "offset, untied"])
def test_generation_with_a_cache_is_greedy_decoding_by_whole_forwards(name):
    torch.manual_seed(1)
    model = Model(replace(CONFIGS[name], causal=True, vocab=40, max_positions=24, dropout=.5,
                          tied=False)).double().eval()
    for weight in model.parameters():  # so that the next token depends on the whole prompt
        weight.data *= 3 if weight.ndim > 1 else 1
    rng = np.random.default_rng(0)
    # The last but one leaves room for four tokens, and the last fills the context.
    prompts = [rng.integers(40, size=length).tolist() for length in (1, 5, 2, 9, 9, 13, 20, 24)]
    free = [slow_generate(model, prompt, 9) for prompt in prompts]
    assert len(free[-2]) == 4 and free[-1] == []
    assert generation.generate(model, prompts, -1, 9)[0] == free
    often = [token for answer in free for token in answer[2:6]]
    stop = max(range(40), key=often.count)
    prompts[1][-1] = stop  # a stop token in the prompt stops nothing
    free[1] = slow_generate(model, prompts[1], 9)
    wanted = [(answer[:answer.index(stop)], True) if stop in answer else (answer, False)
              for answer in free]
    assert 1 < sum(stopped for _, stopped in wanted) < 7
    model.train()  # generation turns dropout off, and on again
    for tokens_per_batch in (1, 40, 10_000):
        assert list(zip(*generation.generate(model, prompts, stop, 9, tokens_per_batch))) == wanted
    assert all(module.training for module in model.modules())


def test_the_scores_of_known_answers(tokenizer, monkeypatch):
    calls = []

    def generate(model, prompts, stop, max_new):
        calls.append((prompts, stop, max_new))
        texts = ["  Katze\n", "Hunde sieben", "Katze sieht", ""]
        return [ids.tolist() for ids in tokenizer.encode(texts)], [True, False, False, True]

    monkeypatch.setattr(generation, "generate", generate)
    golds = ["Katze", "Hunde", "Katze sieht", "sieben"]
    texts = {"user": ["the cat", "seven dogs", "the cat sees", "dogs " * 100], "assistant": golds}
    one = evaluation(tokenizer, tiny("last", causal=True), corpora.EvaluationRows("x", texts))
    scores = {"exact": 50, "startswith": 75, "stop": 50, "rows": 4}
    assert evaluate.task_generate(one) == evaluate.task_generate(one) == scores
    [(prompts, stop, max_new)] = calls  # the answers are generated once
    assert max_new == 2 * max(map(len, tokenizer.encode(golds))) + 8
    assert prompts[0] == [tokenizer.special.cls, *tokenizer.encode(["the cat"])[0], stop]
    # A long prompt is truncated, so that there is room for the answer.
    assert stop == tokenizer.special.sep == prompts[3][-1]
    assert len(prompts[3]) == max(24, 48 - max_new)


def test_a_run_answers_texts_of_your_own():
    run = train.start("ntp", steps=1, batch=4, eval_limit=4, vocab=300, data=write_rows(
        "chat.tsv", [f"say {i} dogs\tdogs {i}" for i in range(40)], "user\tassistant"), width=32,
        layers=1, heads=2, ffn_dim=32, precision="float32")
    asked, golds = run.rows.texts.values()
    longest = 2 * max(map(len, run.data.tokenizer.encode(golds))) + 8
    assert run.answer(asked, longest) == run.evaluation().answers.written
    assert len(run.data.tokenizer.encode(run.answer(["Who sees a dog?"], 3))[0]) <= 3
    with pytest.raises(BadInput, match="no list of texts"):
        run.answer("Who sees a dog?")
    with pytest.raises(BadInput, match="an encoder, which cannot answer: use ntp or llm-jepa"):
        train.start("mlm", data="chat.tsv", langs="user", out=None).answer(["Who?"])


# ---- the command and its files


@pytest.fixture
def command(capsys):
    """Run the command on geometry alone. Return (stdout, stderr)."""
    def output(*words):
        capsys.readouterr()
        evaluate.main([*map(str, words), "--tasks", "geometry", "--device", "cpu"])
        return capsys.readouterr()
    return output


@pytest.fixture
def own(tokenizer):
    """The folder of a run that was trained on data.tsv."""
    return write_run("own", tiny(), tokenizer, write_rows("data.tsv", PAIRS))


def test_eval_json_has_the_numbers_of_the_model_that_was_loaded(own, command, monkeypatch):
    path, model = own / "eval.json", file_hash(own / "model.pt")
    label, *_, health = command(own).out.splitlines()
    assert "rows of data (en, de)" in label and health.startswith("health: ")
    numbers = runs.read_results(path)
    assert (numbers["model"], numbers["rows"]) == (model[:8], label)
    runs.write_results(path, {"retrieval/xsim": 51.0}, label, model)
    run = evaluate.run

    def replace_model(*arguments):  # a training goes on during the evaluation
        save(tiny("mean"), own / "model.pt")
        return run(*arguments)

    monkeypatch.setattr(evaluate, "run", replace_model)
    assert "own was trained further" in command(own).err
    assert runs.read_results(path) == numbers | {"retrieval/xsim": 51.0}
    command(own)  # of the other model
    other = runs.read_results(path)
    assert other["model"] != model[:8] and other.keys() == numbers.keys()


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_numbers_are_printed_before_they_are_written_and_a_file_that_cannot_be_is_a_warning(
        words, own, capsys):
    (own / "eval.json").mkdir()
    assert not evaluate.main([str(own), *words])
    out, err = capsys.readouterr()
    assert "xsim" in out and ("numbers: evaluate.py RUN --json\n" in out) == (not words)
    assert "warning: the numbers are not kept in eval.json" in err


def test_numbers_of_other_rows_are_only_printed(own, command):
    for flags in ("--data regex --limit 9", "--limit 9", "--pool mean", "--langs de,en",
                  "--split valid"):
        assert "geometry/rankme" in json.loads(command(own, *flags.split(), "--json").out)
    assert not [*own.glob("eval*")]


# ---- rows that were trained on


def test_rows_that_were_trained_on_are_counted(own, tokenizer, command):
    other = write_rows("other.tsv", [f"dog {row}\tHund {row}" for row in range(30)])
    # test_files.py counts also rows whose columns are exchanged.
    copy = write_rows("copy.tsv", PAIRS[::-1])
    apart = write_run("apart", tiny(), tokenizer, "data.tsv", eval_data=other)
    child = write_run("child", tiny(), tokenizer, other, init="own")
    trained_on = 300 - len(corpora.evaluation_rows("data.tsv").texts["en"])
    for run, count in ((apart, 300), (own, trained_on), (child, trained_on)):
        assert "the model was" not in command(run).err
        wanted = f"the model was trained on a text of {count} of the 300 rows of copy"
        assert wanted in command(run, "--data", copy).err
    write_rows("data.tsv", PAIRS[:200])  # other rows are held out now
    held_out = corpora.evaluation_rows("data.tsv").texts["en"]
    before = corpora.evaluation_rows(copy).texts["en"]
    now_trained_on = len({*held_out} - {*before})
    assert now_trained_on and f"a text of {now_trained_on} of the {len(held_out)} rows of data" in (
        command(own).err)
    Path("data.tsv").unlink()
    assert f"a text of {trained_on} of the 300 rows of copy" in command(child, "--data", copy).err


def test_without_a_record_of_its_texts_a_run_says_that_the_overlap_is_unknown(
        own, tokenizer, command):
    child = write_run("child", tiny(), tokenizer, write_rows("other.tsv", PAIRS), init="own")
    assert "unknown" not in command(own).err
    (own / "trained.npy").unlink()
    assert f"overlap unknown: {own}/trained.npy" in command(own).err
    assert "unknown" not in command(child).err  # it has its own copy


@pytest.mark.parametrize("version", [runs.FORMAT - 1, runs.FORMAT + 1])
def test_a_run_of_another_version_is_refused(version, tokenizer, refused):
    folder = write_run("old", tiny(), tokenizer)
    log = (folder / "log.jsonl").read_text()
    assert f'"format": {runs.FORMAT}' in log
    (folder / "log.jsonl").write_text(log.replace(f": {runs.FORMAT}", f": {version}", 1))
    assert (f"by another version of nanoJEPA (its log has format {version}, this version reads "
            f"{runs.FORMAT}): train again with this version") in refused(evaluate.main, "old")


@pytest.mark.parametrize("words, message, damage", [
    ("RUN --limit 9 --tasks retreival", "did you mean retrieval?", None),
    ("RUN --tasks ,", "argument --tasks: ',' names nothing", None),
    ("RUN --split train --tasks probe", "choose another --split", None),
    ("RUN --limit 1", "choose a larger limit", None),
    ("RUN --limit -1", "argument --limit: -1: it must be at least 0", None),
    ("hub/name", "hub/name is no folder", None),
    ("RUN", "tokenizer.json", "tokenizer.json"), ("RUN", "log.jsonl", "log.jsonl")])
def test_a_mistake_is_one_line_that_names_it(tokenizer, refused, words, message, damage):
    folder = write_run("RUN", tiny(), tokenizer)
    if damage:
        (folder / damage).write_text('{"config": {}}\n', encoding="utf-8")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert message in refused(evaluate.main, words)
    assert before == {path: path.read_bytes() for path in folder.iterdir()}


def test_another_module_evaluate_that_was_imported_first_is_named(tmp_path):
    (tmp_path / "evaluate.py").write_text("", encoding="utf-8")  # Hugging Face has one
    program = f"import sys, evaluate; sys.path.insert(0, {evaluate.__file__[:-12]!r}); import train"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True,
                          text=True)
    assert "another module `evaluate` is imported already" in done.stderr.splitlines()[-1]
