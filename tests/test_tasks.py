"""The command python -m tasks, and what the tests of the tasks share."""

import json

import pytest
from test_evaluate import tiny, write_run

import evaluate
from corpora import EvaluationRows
from corpora.program import exit_status
from tasks import __main__ as command
from tasks import probes

WORDS = []
for verb in ("sees", "hears"):
    for count in ("one", "two", "seven"):
        WORDS += [f"the cat {verb} {count} dogs", f"the cat {verb} {count} cats"]
NO_ROWS = EvaluationRows("", {"": ["", ""]})


def results_of(model, tokenizer, rows, names, max_new=None, train_texts=None, **options):
    """{"task/metric": number} of some tasks, as the command gives them."""
    evaluation = evaluate.Evaluation(model, tokenizer, rows or NO_ROWS, max_new=max_new)
    evaluation.train_texts = train_texts
    tasks = command.make_tasks(probes.TaskOptions(**options))
    return evaluate.run(evaluation, names, tasks)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, tokenizer):
    return write_run(tmp_path_factory.mktemp("run"), tiny(), tokenizer)


def asked(folder, *flags):
    return exit_status(command.main, [str(folder), "--device", "cpu", *flags])


def test_the_command_prints_a_table_and_adds_to_a_file(run_folder, tmp_path, capsys):
    out = tmp_path / "numbers.json"
    rows = ["--limit", "20", "--langs", "en,de", "--out", str(out), "--tasks"]
    assert asked(run_folder, *rows, "matrix,poolings") == 0
    shown = capsys.readouterr().out
    assert "matrix/xsim " in shown and "every language searched in every other" in shown
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["matrix/rows"] == 20 and "poolings/max/rank_90" in written
    assert written["rows"].startswith("20 rows of toy (en, de), ")
    assert asked(run_folder, *rows, "bucc", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert {name.split("/")[0] for name in printed} == {"bucc"}
    assert json.loads(out.read_text(encoding="utf-8")) == written | printed
    assert asked(run_folder, *rows, "retrieval", "--pool", "mean", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert asked(run_folder, *rows, "uniform", "--json") == 0
    assert found["retrieval/xsim"] == json.loads(capsys.readouterr().out)["uniform/xsim/mean"]
    tasks = command.make_tasks(probes.TaskOptions())
    results = {name: written[name] for name in written if "/" in name}
    command.describe(results, tasks)
    assert evaluate.about("poolings/max/rank_90", tasks)[1] == "higher"
    assert not [*run_folder.glob("eval*")]


def test_places_of_a_run_are_in_the_table(tmp_path, tokenizer, capsys):
    folder = write_run(tmp_path / "run", tiny("last", causal=True), tokenizer)
    rows = ["--data", "regex", "--limit", "40", "--tasks", "places"]
    assert asked(folder, *rows) == 0
    shown = capsys.readouterr().out
    assert "places/own/r2 " in shown and "of the Codes' variance" in shown
    assert asked(folder, *rows, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["places/rows"] == 40 and found["places/own/r2"] < 1
    assert found["places/own/r2"] != found["places/last/r2"]
    assert asked(folder, "--data", "toy", "--limit", "40", "--tasks", "places") == 2
    assert "needs a causal model and two columns" in capsys.readouterr().err


def test_every_task_has_metrics_with_a_direction_or_a_meaning():
    for name, task in command.make_tasks(probes.TaskOptions()).items():
        assert len(task.about) > 1, name
        for unit, better, what in task.about.values():
            assert unit in ("", "%") and better in ("", "higher", "lower") and what


def test_a_folder_of_flores_files_has_its_altered_sentences(
        tokenizer, tmp_path, capsys):
    folder = tmp_path / "devtest"
    folder.mkdir()
    for code, change in (("eng_Latn", str), ("deu_Latn", str.upper), ("abc_Latn", str.title)):
        text = "".join(f"{change(line)}\n" for line in WORDS)
        (folder / f"{code}.devtest").write_text(text, encoding="utf-8")
    altered = {text.replace("cat ", "dog "): {"src": text, "errtype": "entity"} for text in WORDS}
    hard = tmp_path / "hard.txt"
    hard.write_text("".join(f"{text}\n" for text in altered), encoding="utf-8")
    (tmp_path / "types.json").write_text(json.dumps(altered), encoding="utf-8")
    run = write_run(tmp_path / "run", tiny(), tokenizer)
    flags = ["--data", str(folder), "--hard", str(hard), "--hard-types",
             str(tmp_path / "types.json"), "--tasks", "retrieval,uniform", "--json"]
    assert asked(run, *flags) == 0
    found = json.loads(capsys.readouterr().out)
    parts = found["retrieval/xsim++/entity"] + found["retrieval/xsim++/misaligned"]
    assert found["retrieval/xsim++"] == pytest.approx(parts) and found["retrieval/rows"] == 12
    assert found["uniform/xsim++/cls"] == found["retrieval/xsim++"]


def test_a_run_without_rows_of_its_own_does_tasks_on_published_sets(
        tokenizer, tmp_path, capsys):
    run = write_run(tmp_path / "run", tiny(), tokenizer, data="")
    text = "score\ts1_en\ts2_en\n" + "".join(f"{i % 5}\tone {i}\ttwo\n" for i in range(20))
    (tmp_path / "stsb_multi_test.tsv").write_text(text, encoding="utf-8")
    flags = ["--tasks", "sts", "--files", str(tmp_path), "--sets", "stsb"]
    assert asked(run, *flags) == 0 and "sts/stsb/spearman" in capsys.readouterr().out
    out = tmp_path / "sets.json"
    assert asked(run, *flags, "--out", str(out)) == 0
    kept = json.loads(out.read_text(encoding="utf-8"))
    assert {"sts/stsb/spearman", "sts/stsb/spearman/bag", "sts/stsb/rows"} <= set(kept)
    assert kept["rows"].startswith("published sets")
    assert asked(run, "--tasks", "matrix") == 2 and "--data" in capsys.readouterr().err


def test_the_command_knows_which_answers_were_in_the_training_data(
        tokenizer, tmp_path, capsys):
    train = tmp_path / "train.tsv"
    test = tmp_path / "test.tsv"
    for path, count, answers in ((train, 30, 7), (test, 36, 9)):
        rows = [f"say {row}\tanswer {row % answers}\n" for row in range(count)]
        path.write_text("src\ttgt\n" + "".join(rows), encoding="utf-8")
    run = write_run(tmp_path / "run", tiny("last", causal=True), tokenizer, train,
                    eval_data=str(test))
    flags = ["--tasks", "regex,label,generate", "--max-new", "3", "--json"]
    assert asked(run, *flags) == 0
    found = json.loads(capsys.readouterr().out)
    for task in ("label", "generate"):
        counts = [found[f"{task}/rows{name}"] for name in ("", "_new_prompt", "_unseen")]
        assert counts == [36, 6, 8]
    assert {"regex/equal", "label/accuracy_unseen"} <= set(found)
    train.unlink()  # the data may be on another machine
    assert asked(run, "--tasks", "generate", "--max-new", "3", "--json") == 0
    shown = capsys.readouterr()
    assert "generate/rows_unseen" not in json.loads(shown.out) and "left out: " in shown.err


@pytest.mark.parametrize("words, message", [
    ("--tasks matrics", "did you mean matrix?"), ("--tasks ", "--tasks"), ("--limit 9", "--tasks"),
    ("--tasks xyzzy", "'xyzzy' is none of"), ("--tasks matrix --out .", "--out"),
    ("--tasks matrix --langs en,xx", "xx"), ("--tasks matrix --langs en", "one text a row"),
    ("--tasks regex", "needs a causal model"), ("--tasks matrix --device abacus", "'abacus'"),
    ("--tasks matrix --limit -1", "--limit -1 is too low"),
    ("--tasks retrieval --hard a.txt", "go together"),
    ("--tasks tatoeba --files nowhere", "nowhere"),
    ("--tasks sts --files nowhere", "python -m corpora.download stsb"),
    ("--tasks fewshot --sets stsb", "has no set stsb"),
    ("--tasks gap --sets stsc", "did you mean stsb?")])
def test_each_mistake_is_one_line_and_status_2(run_folder, refused, words, message):
    before = sorted(run_folder.iterdir())
    error = refused(command.main, f"{run_folder} --device cpu {words}")
    assert message in error and sorted(run_folder.iterdir()) == before
    assert "python -m tasks RUN --tasks" not in error  # that is where we are
