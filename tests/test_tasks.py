"""The command python -m tasks, its data sets, retrieval in many languages, and what the tests of
the tasks share."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from test_evaluate import PAIRS, tiny, write_rows, write_run
from test_evaluate import evaluation as evaluation_of

import evaluate
from base.common import BadInput
from corpora import EvaluationRows
from harness import runs
from tasks import mining, probes, sets
from tasks import protocols as command
from tasks.__main__ import main

WORDS = []
for verb in ("sees", "hears"):
    for count in ("one", "two", "seven"):
        WORDS += [f"the cat {verb} {count} dogs", f"the cat {verb} {count} cats"]
NO_ROWS = EvaluationRows("none", {"": ["", ""]})


def flags_with(**changes):
    """Return the flags of the command, with some of them changed."""
    flags = command.parse_flags("run --tasks retrieval --files .".split())
    vars(flags).update(changes)
    return flags


def results_of(model, tokenizer, rows, names, **changes):
    """Return {"task/metric": number} of some tasks, as the command gives them."""
    evaluation = evaluation_of(tokenizer, model, rows or NO_ROWS)
    flags = flags_with(**changes)
    flags.tables = {name: probes.read_sets(name, flags) for name in names if name in probes.SETS}
    return evaluate.run(evaluation, names, command.make_tasks(flags))


def write_table(name, rows):
    """Write a table of (text, label), or of (text, text2, label)."""
    header = "text\ttext2\tlabel" if len(rows[0]) == 3 else "text\tlabel"
    write_rows(f"{name}.tsv", ["\t".join(map(str, row)) for row in rows], header)


@pytest.fixture
def run_folder(tokenizer):
    return write_run("run", tiny(), tokenizer)


@pytest.fixture
def ask(capsys):
    """Run the command on the folder run. Return what it prints, as numbers if it is JSON."""
    def numbers(flags):
        command.main(["run", "--device=cpu", *flags.split()])
        printed = capsys.readouterr().out
        return json.loads(printed) if "--json" in flags else printed
    return numbers


def test_the_command_prints_a_table_and_adds_to_eval_json(tokenizer, ask):
    run_folder = write_run("run", tiny(), tokenizer, write_rows("data.tsv", PAIRS))
    flags = "--limit 20 --langs en,de --tasks"
    printed = ask(f"{flags} bucc,poolings")
    assert "bucc/f1 " in printed and "poolings/mean/rank_90 " in printed
    assert not [*run_folder.glob("eval*")]
    found = [ask(f"--tasks {task} --json") for task in ("poolings", "bucc")]
    assert {name.split("/")[0] for name in found[1]} == {"bucc"}
    written = runs.read_results(run_folder / "eval.json")
    assert "rows of data (en, de)" in written.pop("rows") and written.pop("model")
    assert written == found[0] | found[1]


def test_every_task_has_a_line_in_the_list(capsys):
    main(["--tasks", "list"])
    text = capsys.readouterr().out
    assert all(re.search(rf"\b{name}\b", text) for name in command.make_tasks())
    assert "\non translations\n  bucc   " in text


def test_a_folder_of_flores_files_has_its_altered_sentences(run_folder, ask):
    """Those that keep the words give the order error. An embedding of [CLS] that is trained on
    nothing cannot have an error of 0 or 50 here."""
    altered = {text.replace("cat ", "dog "): {"src": text, "errtype": "entity"} for text in WORDS}
    altered |= {" ".join(text.split()[::-1]): {"src": text, "errtype": "reversed"}
                for text in WORDS}
    for name, lines in (("eng_Latn.devtest", WORDS), ("deu_Latn.devtest", map(str.upper, WORDS)),
                        ("hard.txt", altered), ("types.json", [json.dumps(altered)])):
        Path(name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    found = ask("--data . --hard hard.txt --hard-types types.json --tasks retrieval,uniform --json")
    parts = [found[f"retrieval/xsim++/{kind}"] for kind in ("entity", "reversed", "misaligned")]
    assert found["uniform/xsim++/cls"] == found["retrieval/xsim++"] == pytest.approx(sum(parts))
    assert found["retrieval/order"] == found["retrieval/order/reversed"] > 0
    assert found["retrieval/rows"] == 12 and "retrieval/order/entity" not in found


def test_a_run_without_data_does_tasks_on_sets(tokenizer, ask):
    run = write_run("run", tiny(), tokenizer, data="")
    write_table("stsb_test", [(f"one {i}", "two", i % 5) for i in range(20)])
    assert "sts/stsb/spearman/untrained " in ask("--tasks sts --files . --sets stsb")
    found = ask("--tasks sts --files . --sets stsb --json")
    assert {"sts/stsb/spearman", "sts/stsb/spearman/bag", "sts/stsb/rows"} <= set(found)
    assert not [*run.glob("eval*")]
    with pytest.raises(BadInput, match="--data"):
        ask("--tasks bucc")


def test_answers_that_were_not_in_the_training_data_are_counted_apart(tokenizer, ask):
    for name, count in (("train.tsv", 28), ("test.tsv", 36)):
        write_rows(name, [f"say {row}\tanswer {row}" for row in range(count)])
    write_run("run", tiny("last", causal=True), tokenizer, "train.tsv", eval_data="test.tsv")
    found = ask("--tasks label --json")
    assert (found["label/rows"], found["label/rows_unseen"]) == (36, 8)
    assert found["label/accuracy_unseen"] == found["label/accuracy"] == 0
    Path("train.tsv").unlink()  # the data may be on another machine
    assert "label/rows_unseen" not in ask("--tasks label --json")


@pytest.mark.parametrize("words, message", [
    ("--tasks buc", "did you mean bucc?"), ("--limit 9", "--tasks is missing"),
    ("--tasks bucc --langs en", "one text per row"),
    ("--tasks gsm8k", "needs a causal model"),
    ("--tasks retrieval --hard a.txt", "--hard and --hard-types belong together"),
    ("--tasks retrieval --hard a.txt --hard-types b", "--hard-types b is not a file"),
    ("--tasks sts --data a.tsv", "--data has no effect on sts"),
    ("--tasks sts --limit 2", "--limit has no effect on sts"),
    ("--tasks spider", "there is no data/database"),
    ("--tasks bucc,sts --files nowhere", "there is no nowhere/stsb_test.tsv"),
    ("--tasks senteval --sets stsb", "has no set stsb"),
    ("--tasks gap --sets stsc", "did you mean stsb?"),
    ("finetune --task xmli", "did you mean xnli?"), ("finetune --task=", "--task is empty"),
    ("finetune --task mlqa --max-length 3", "at least 8"),
    ("finetune --task glue", "there is no data/mnli_train.tsv"),
    ("finetune --task mlqa --files sets", "squad_test.jsonl:1: this is not a question"),
    ("finetune --task mlqa --files nowhere", "there is no nowhere/squad_test.jsonl")])
def test_each_mistake_is_one_line(run_folder, refused, words, message):
    Path("sets").mkdir()
    Path("sets/squad_test.jsonl").write_text('{"context": "", "answers": [{"text": 1}]}\n')
    before = sorted(run_folder.iterdir())
    if words.startswith("finetune"):
        words = words.replace("finetune", "finetune run --device cpu")
    else:
        words = f"run --device cpu {words}"
    assert message in refused(main, words)
    assert sorted(run_folder.iterdir()) == before


# ---- tables of sets


def test_missing_splits_are_always_the_same_training_rows(capsys):
    write_table("cr_train", [(i, i % 2) for i in range(50)])

    def texts(splits):
        return [text for text, _, _ in sets.read_set("cr", ".", splits)]

    test = ["3", "12", "18", "30", "48"]  # so that results stay comparable
    valid = ["1", "40", "46", "47", "49"]
    assert texts("test") == test and texts("valid") == valid
    assert "cr has no test table" in capsys.readouterr().err
    whole = texts("train+valid+test")
    assert whole[40:] == [*valid, *test] and whole[:40] == texts("train")
    assert sorted(whole, key=int) == [str(i) for i in range(50)]
    write_table("cr_test", [("x", 1), ("y", 0)])
    assert texts("test") == ["x", "y"] and texts("valid") == test


@pytest.mark.parametrize("text, message", [
    ("text\tlabel\nfine\t1\nbad\t2\n", r"test.tsv:3: .* a class from 0 to 1"),
    ("text\tlabel\nx\tnan\n", "a class"), ("text\tlabel\nx\t1\ny\t1\n", "every label"),
    ("sentence\tlabel\nfine\t1\n", "a row needs a text"), ("text\tlabel\n", "has no rows")])
def test_bad_tables_are_refused(text, message):
    Path("sst2_test.tsv").write_text(text, encoding="utf-8")
    with pytest.raises(BadInput, match=message):
        sets.read_set("sst2", ".")


# ---- retrieval of translations in many languages, and the files of xsim++


def test_buccs_f1_weights_every_row_as_a_class(tokenizer):
    texts = {"en": WORDS, "de": [text.upper() for text in WORDS]}
    evaluation = evaluation_of(tokenizer, texts=EvaluationRows("x", texts))
    evaluation.embeddings = {"en": torch.eye(6), "de": torch.eye(6)[[0, 0, 2, 2, 2, 5]] + .1}
    f1 = 100 * (2 / 3 + 2 / 4 + 1) / 6
    assert mining.bucc(evaluation) == {"rows": 12, "f1": pytest.approx(f1),
                                       "f1/de-en": pytest.approx(f1)}


def test_complete_rows_have_all_texts_and_nothing_of_other_rows():
    texts = {"en": ["1", "", "3", "4"], "de": ["5", "6", "7", "8"]}
    rows = EvaluationRows("x", texts, ["s", "t", "u", "v"], reordered=(("4", 3, "far"),))
    assert rows.complete() == EvaluationRows(
        "x", {"en": ["1", "3", "4"], "de": ["5", "7", "8"]}, ["s", "u", "v"])
    assert rows.complete(2).texts == {"en": ["1", "3"], "de": ["5", "7"]}
    whole = rows._replace(texts={"en": texts["de"]})
    assert whole.complete() is whole.complete(4) is whole


# ---- get_data.sh

CURL = r"""#!/bin/sh
for last; do :; done
case "$*" in *test.jsonl*) [ -n "$BROKEN" ] && exit 22;; esac
echo '{"question": "1 + 1?", "answer": "so #### 2"}' > "$last"
"""


def test_get_data_lists_its_sets_and_keeps_only_complete_ones(tmp_path):
    def get(*names, **more):
        path = f"{tmp_path}:{os.environ['PATH']}"  # with a curl that needs no network
        return subprocess.run(["bash", script, *names], env=os.environ | {"PATH": path} | more,
                              capture_output=True, text=True)

    script = Path(command.__file__).with_name("get_data.sh")
    Path("curl").write_text(CURL)
    Path("curl").chmod(0o755)
    listed = re.findall(r"^  ([\w-]+)", get().stdout, re.M)
    functions = re.findall(r"^get_([\w-]+)\(\)", script.read_text(), re.M)
    assert sorted(listed) == sorted(functions) and "gsm8k" in listed
    assert get("gsm8k", "other").returncode == 2 and not Path("data").exists()
    assert get("gsm8k", BROKEN="yes").returncode == 22 and not any(Path("data").iterdir())
    assert get("gsm8k").returncode == 0
    assert sorted(path.name for path in Path("data").iterdir()) == [
        "gsm8k_test.jsonl", "gsm8k_train.jsonl"]
    assert json.loads(Path("data/gsm8k_test.jsonl").read_text()) == {
        "user": "1 + 1?", "assistant": "so #### 2"}
