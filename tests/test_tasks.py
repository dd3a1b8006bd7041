"""The command python -m tasks, its data sets, and what the tests of the tasks share."""

import gzip
import json
import lzma

import pytest
from test_evaluate import tiny, write_run

import evaluate
from common import BadInput
from corpora import EvaluationRows
from tasks import __main__ as command
from tasks import probes, sets

WORDS = []
for verb in ("sees", "hears"):
    for count in ("one", "two", "seven"):
        WORDS += [f"the cat {verb} {count} dogs", f"the cat {verb} {count} cats"]
NO_ROWS = EvaluationRows("none", {"": ["", ""]})


def flags_with(**changes):
    """Return the flags of the command, with some of them changed."""
    flags = command.parse_flags(["RUN", "--tasks", "retrieval"])
    vars(flags).update(changes)
    return flags


def results_of(model, tokenizer, rows, names, **changes):
    """Return {"task/metric": number} of some tasks, as the command gives them."""
    evaluation = evaluate.Evaluation(model, tokenizer, rows or NO_ROWS)
    flags = flags_with(**changes)
    flags.tables = {name: probes.read_sets(name, flags) for name in names if name in probes.SETS}
    return evaluate.run(evaluation, names, command.make_tasks(flags))


def write_table(folder, name, rows, header="text\ttext2\tlabel"):
    lines = "".join("\t".join(map(str, row)) + "\n" for row in rows)
    (folder / f"{name}.tsv").write_text(f"{header}\n{lines}", encoding="utf-8")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, tokenizer):
    return write_run(tmp_path_factory.mktemp("run"), tiny(), tokenizer)


@pytest.fixture
def ask(capsys):
    """Run the command and return what it prints, as numbers if the flags have --json."""
    def run(folder, *flags):
        command.main([str(folder), "--device", "cpu", *map(str, flags)])
        printed = capsys.readouterr().out
        return json.loads(printed) if "--json" in flags else printed
    return run


def test_the_command_prints_a_table_and_adds_to_a_file(run_folder, tmp_path, ask):
    out = tmp_path / "numbers.json"
    flags = ["--limit", "20", "--langs", "en,de", "--out", out, "--tasks"]
    printed = ask(run_folder, *flags, "matrix,poolings")
    assert "matrix/xsim " in printed and "poolings/mean/rank_90 " in printed
    written = json.loads(out.read_text(encoding="utf-8"))
    assert written["matrix/rows"] == 20 and "poolings/max/rank_90" in written
    assert written["rows"].startswith("20 rows of toy (en, de), ")
    found = ask(run_folder, *flags, "bucc", "--json")
    assert {name.split("/")[0] for name in found} == {"bucc"}
    assert json.loads(out.read_text(encoding="utf-8")) == written | found
    assert not [*run_folder.glob("eval*")]


def test_a_folder_of_flores_files_has_its_altered_sentences(tokenizer, tmp_path, ask):
    folder = tmp_path / "devtest"
    folder.mkdir()
    for code, change in (("eng_Latn", str), ("deu_Latn", str.upper), ("fra_Latn", str.title)):
        text = "".join(f"{change(line)}\n" for line in WORDS)
        (folder / f"{code}.devtest").write_text(text, encoding="utf-8")
    altered = {text.replace("cat ", "dog "): {"src": text, "errtype": "entity"} for text in WORDS}
    lines = tmp_path / "hard.txt"
    lines.write_text("\n".join(altered), encoding="utf-8")
    types = tmp_path / "types.json"
    types.write_text(json.dumps(altered), encoding="utf-8")
    run = write_run(tmp_path / "run", tiny(), tokenizer)
    found = ask(run, "--data", folder, "--hard", lines, "--hard-types", types, "--tasks",
                "retrieval,uniform", "--json")
    parts = found["retrieval/xsim++/entity"] + found["retrieval/xsim++/misaligned"]
    assert found["uniform/xsim++/cls"] == found["retrieval/xsim++"] == pytest.approx(parts)
    assert found["retrieval/rows"] == 12


def test_a_run_without_data_does_tasks_on_sets(tokenizer, tmp_path, ask):
    run = write_run(tmp_path / "run", tiny(), tokenizer, data="")
    write_table(tmp_path, "stsb_test", [(f"one {i}", "two", i % 5) for i in range(20)])
    flags = ["--tasks", "sts", "--files", tmp_path, "--sets", "stsb"]
    assert "sts/stsb/spearman/untrained " in ask(run, *flags)
    out = tmp_path / "sets.json"
    ask(run, *flags, "--out", out)
    kept = json.loads(out.read_text(encoding="utf-8"))
    assert {"sts/stsb/spearman", "sts/stsb/spearman/bag", "sts/stsb/rows"} <= set(kept)
    assert kept["rows"].startswith("data sets of ") and not [*run.glob("eval*")]
    with pytest.raises(BadInput, match="--data"):
        ask(run, "--tasks", "matrix")


def test_answers_that_were_not_in_the_training_data_are_counted_apart(tokenizer, tmp_path, ask):
    train = tmp_path / "train.tsv"
    test = tmp_path / "test.tsv"
    for path, count, answers in ((train, 30, 7), (test, 36, 9)):
        rows = [f"say {row}\tanswer {row % answers}\n" for row in range(count)]
        path.write_text("src\ttgt\n" + "".join(rows), encoding="utf-8")
    run = write_run(tmp_path / "run", tiny("last", causal=True), tokenizer, train,
                    eval_data=str(test))
    flags = ["--tasks", "label", "--json"]
    found = ask(run, *flags)
    assert (found["label/rows"], found["label/rows_unseen"]) == (36, 8)
    assert found["label/accuracy_unseen"] == found["label/accuracy"] == 0
    train.unlink()  # the data may be on another machine
    assert "label/rows_unseen" not in ask(run, *flags)


@pytest.mark.parametrize("words, message", [
    ("--tasks matrics", "did you mean matrix?"), ("--tasks ", "--tasks is missing"),
    ("--limit 9", "--tasks is missing"), ("--tasks xyzzy", "there is no task 'xyzzy'"),
    ("--tasks matrix --langs en,xx", "xx"), ("--tasks matrix --langs en", "one text per row"),
    ("--tasks gsm8k", "needs a causal model"), ("--tasks matrix --device abacus", "'abacus'"),
    ("--tasks linear", "needs a causal model"),
    ("--tasks retrieval --hard a.txt", "--hard-types None is not a file"),
    ("--tasks sts --files nowhere", "there is no nowhere/stsb_test.tsv"),
    ("--tasks matrix,sts --files nowhere", "there is no nowhere/stsb_test.tsv"),
    ("--tasks senteval --sets stsb", "has no set stsb"),
    ("--tasks gap --sets stsc", "did you mean stsb?")])
def test_each_mistake_is_one_line(run_folder, refused, words, message):
    before = sorted(run_folder.iterdir())
    error = refused(command.main, f"{run_folder} --device cpu {words}")
    assert message in error and sorted(run_folder.iterdir()) == before


# ---- tables of sets


def test_tables_of_sets_can_be_tsv_csv_or_jsonl_and_compressed(tmp_path):
    lines = '{"text": "a", "text2": "b", "label": 2}\n{"text": "c", "text2": "", "label": 0}\n'
    (tmp_path / "mnli_test.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    (tmp_path / "sst2_test.csv").write_text('label,text\n1,"A, ""b""."\n0,C\n', encoding="utf-8")
    text = "text\tid\tlabel\ntwo\t7\t1.5\n"
    (tmp_path / "stsb-de_test.tsv.gz").write_bytes(gzip.compress(text.encode()))
    assert sets.read_set("mnli", tmp_path) == [("a", "b", 2), ("c", "", 0)]
    assert sets.read_set("sst2", tmp_path) == [('A, "b".', None, 1), ("C", None, 0)]
    assert sets.read_set("stsb", tmp_path, "test", "de") == [("two", None, 1.5)]


def test_missing_splits_are_always_the_same_training_rows(tmp_path, capsys):
    write_table(tmp_path, "cr_train", [(i, i % 2) for i in range(50)], "text\tlabel")

    def texts(splits):
        return [text for text, _, _ in sets.read_set("cr", tmp_path, splits)]

    test = ["3", "12", "18", "30", "48"]  # so that results stay comparable
    valid = ["1", "40", "46", "47", "49"]
    assert texts("test") == test and texts("valid") == valid
    assert "cr has no test table" in capsys.readouterr().err
    whole = texts("train+valid+test")
    assert whole[40:] == [*valid, *test] and whole[:40] == texts("train")
    assert sorted(whole, key=int) == [str(i) for i in range(50)]
    write_table(tmp_path, "cr_test", [("x", 1)], "text\tlabel")
    assert texts("test") == ["x"] and texts("valid") == test


@pytest.mark.parametrize("text, message", [
    ("text\tlabel\nfine\t1\nbad\t2\n", r"test.tsv:3: .* a class from 0 to 1"),
    ("text\tlabel\nfine\tpositive\n", "a class"), ("text\tlabel\nx\tnan\n", "a class"),
    ("sentence\tlabel\nfine\t1\n", "a row needs a text"), ("text\tlabel\n", "has no rows"),
    (None, "there is no .*sst2_test.tsv")])
def test_bad_tables_are_refused(text, message, tmp_path):
    if text is not None:
        (tmp_path / "sst2_test.tsv").write_text(text, encoding="utf-8")
    with pytest.raises(BadInput, match=message):
        sets.read_set("sst2", tmp_path)
