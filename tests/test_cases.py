"""Files, folders and commands as people have them. Each kind of fault (k1, k2, ...) was once silent
or gave wrong advice; tests/cases has inputs of every kind, and here is what each must give."""

import io
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from test_train import assert_same_run

import corpora
import evaluate
import train
from common import BadInput, run_program
from model import save

CASES = Path(__file__).parent / "cases"
SMALL = dict(width=16, layers=1, heads=2, ffn_dim=32, batch=8, vocab=300, steps=2, device="cpu")


def opened(name):
    """Return the columns, rows and notes of a case; in a name, ",data.de" adds a second file."""
    first, *more = name.split(",")
    path = CASES / first
    source = corpora.open_text([path, *(path.with_name(other) for other in more)]
                               if path.is_file() else path)
    rows = list(source.rows("all"))
    return source.columns, rows, "\n".join(source.notes)


# ---- files: k1 columns that are no texts, k2 labels and scores, k7 packed or with other line ends,
# k8 delimiters, k9 what cat leaves, k10 cells without a visible character, k16 what macOS adds

PAIRED = " (choose with --langs), and all rows are used as matching pairs"
SKIPPED = " rows are skipped: too little text, or a repeated header"
EMPTY = r" cells have only invisible characters, \N or nan, and count as empty"
READ = [  # files, columns, number of rows, notes
    ("k1_id_column/data.tsv", "en de", 60, "columns not read: sentence_id (choose with --langs)"),
    ("k1_gold_label/data.csv", "sentence1 sentence2", 60, "columns not read: gold_label" + PAIRED),
    *[(f"k1_three_formats/data.{ending}", "eng_Latn deu_Latn", 30, "columns not read: line, genre")
      for ending in ("tsv", "csv", "jsonl")],
    ("k1_question_pairs/data.csv", "question1 question2", 30,
     "columns not read: id, qid1, qid2, is_duplicate" + PAIRED),
    ("k1_domain_first/data.jsonl", "src trg", 30, "columns not read: domain, id"),
    ("k2_label_column/data.csv", "question answer", 60, "columns not read: label" + PAIRED),
    ("k2_similarity_score/data.tsv", "sentence1 sentence2", 30, "year, id, score" + PAIRED),
    ("k2_entailment_json/data.jsonl", "premise hypothesis", 30, "not read: gold_label" + PAIRED),
    ("k2_is_duplicate/data.csv", "text1 text2", 30, "columns not read: is_duplicate" + PAIRED),
    ("k7_gzip_by_content/data.tsv", "en de", 60), ("k7_packed_by_content/bzip2.csv", "en de", 30),
    ("k7_packed_by_content/xz.jsonl", "en de", 30), ("k7_mac_csv/data.csv", "en de", 60),
    ("k7_old_mac_lines/data.tsv", "en de", 60), ("k7_old_mac_lines/data.txt", "text", 60),
    ("k8_excel_sep/data.csv", "en de", 60), ("k8_excel_sep/pipe.csv", "en de", 60),
    ("k8_tab_in_csv/pairs.csv", "en de", 60), ("k8_commas_in_tsv/data.tsv", "en de", 30),
    ("k8_semicolons/data.csv", "en de", 30, "columns not read: id"),
    ("k8_header_in_txt/data.txt", "src tgt", 30),
    ("k9_header_twice/data.tsv", "en de", 80, "1" + SKIPPED),
    ("k9_windows_cat/data.csv", "en de", 30, "2" + SKIPPED),
    ("k9_bom_inside/data.en,data.de", "en de", 80),
    ("k9_bom_json/data.jsonl", "src tgt", 30), ("k9_bom_text/data.txt", "text", 30),
    ("k10_invisible_cell/data.tsv", "en de", 45, "15" + EMPTY, "15" + SKIPPED),
    ("k10_database_null/data.tsv", "en de", 24, "6" + EMPTY, "6" + SKIPPED),
    ("k10_pandas_nan/data.csv", "en de", 24, "6" + EMPTY, "6" + SKIPPED),
    ("k10_word_joiner/data.jsonl", "en de", 25, "5" + EMPTY, "5" + SKIPPED),
    ("k16_apple_double/devtest", "eng_Latn deu_Latn", 60),
    ("k16_dev/flores", "eng_Latn deu_Latn", 30), ("k16_packed/flores", "eng_Latn deu_Latn", 30),
    ("k16_dot_files/flores", "eng_Latn deu_Latn", 30)]


@pytest.mark.parametrize("case", READ, ids=lambda case: case[0])
def test_files_are_read_and_notes_tell_what_is_not(case):
    name, columns, count, *notes = case
    found, rows, lines = opened(name)
    assert found == tuple(columns.split()) and len(rows) == count
    assert all(note in lines for note in notes) and bool(notes) == bool(lines)
    texts = {text for row in rows for text in row}
    assert not texts & {"en", "de"} and not any(re.search("[\r\n\ufeff]", text) for text in texts)


def test_k1_a_table_has_the_same_rows_in_every_format():
    tsv, csv, jsonl = (opened(f"k1_three_formats/data.{ending}")[1]
                       for ending in ("tsv", "csv", "jsonl"))
    assert tsv == csv == jsonl


REFUSED = [
    *[(f"k7_lfs_pointer/data.{ending}", "this is a git-lfs pointer: run git lfs pull")
      for ending in ("txt", "tsv", "csv", "jsonl")],
    ("k7_subtitles/data.srt", "this is a file of subtitles: save its sentences"),
    ("k7_web_subtitles/talk.txt", "this is a file of subtitles: save its sentences"),
    ("k7_web_page/page.html", "this is markup: extract its text"),
    ("k7_wikiextractor/wiki_00", "this is markup: extract its text"),
    ("k7_news_sgm/news.sgm", "this is markup: extract its text"),
    ("k7_catalog/messages.po", "this is a gettext catalog: convert it to CSV"),
    ("k7_utf16/data.tsv", "this is a binary file or UTF-16: save UTF-8 (iconv -f utf-16)"),
    ("k7_binary/data.txt", "this is a binary file or UTF-16: save UTF-8"),
    *[(name, "if this is no header, add one, such as src<TAB>tgt") for name in (
        "k8_tab_in_csv/sentences.csv", "k8_tabs_in_txt/deu.txt", "k8_tab_pairs_txt/data.txt")]]


@pytest.mark.parametrize("name, advice", REFUSED)
def test_k7_k8_other_files_are_refused_by_name_with_the_way_out(name, advice):
    with pytest.raises(BadInput, match=f"^[^\n]*{name}:1: [^\n]*{re.escape(advice)}[^\n]*$"):
        opened(name)


# ---- commands, on the files of a case


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    """Run every test in its own folder: the cache of data files is in the working folder."""
    monkeypatch.chdir(tmp_path)


def run_on(case, command):
    """Run train.py on the files of a case, which a command names. Return the exit status."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    flags.append("--objective=contrastive")  # unless the command names another
    files = {path.name: str(path) for path in (CASES / case).iterdir()}
    with pytest.raises(SystemExit) as end, pytest.MonkeyPatch.context() as patch:
        words = [*flags, *(files.get(word, word) for word in command.split())]
        patch.setattr(sys, "argv", ["train.py", *words])
        run_program(train.main)
    return end.value.code


# ---- k6: a console that lacks most characters


@pytest.mark.parametrize("case", ["k6_cp1252", "k6_cp437", "k6_koi8_r", "k6_shift_jis"])
def test_k6_characters_that_the_console_lacks_are_replaced(case, monkeypatch):
    """A Windows console that is redirected has the code page of its country."""
    code_page = case.removeprefix("k6_")
    written = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(written, code_page))
        assert run_on(case, "--data data.tsv") == 0
        sys.stdout.detach()
    printed = written.getvalue().decode(code_page)  # every byte is of the code page
    rows = corpora.open_text(CASES / case / "data.tsv").rows("all")
    shown = [text.encode(code_page, "replace").decode(code_page) for row in rows for text in row]
    assert any("?" in text and text in printed for text in shown)  # in the examples at the end
    assert "next: python evaluate.py" in printed


def test_k6_characters_that_control_the_terminal_are_not_printed_raw(capsys):
    rows = [f"The \x1b[31mbaker{i}\ta \x9b31mloaf{i}\n" for i in range(40)]
    Path("own.tsv").write_text("x\x1b[2J\tde\n" + "".join(rows), encoding="utf-8")
    assert run_on("k6_cp1252", "--data own.tsv --langs x\x1b[2J,de") == 0
    printed = capsys.readouterr().out
    assert r"rows of x\x1b[2J, de" in printed and r"\x1b[31mbaker" in printed


# ---- k11: Jupyter's Stop. tests/test_train.py has an interrupt in a step, an error in the loop's
# body, and a loop that is left


STRIKES = {  # where the interrupt comes, and at which step; twice: once more while it is saving
    "while the metrics are logged": (train.Run, "flush_metrics", 6, False),
    "while the model is evaluated": (train.Run, "evaluate", 6, False),
    "before the first step": (train.Run, "evaluate", 0, False),
    "between train.pt and model.pt": (train, "check_finite", 8, False),
    "twice": (train.Run, "flush_metrics", 4, True)}


@pytest.fixture
def interrupted():
    """Return the settings of a run of ten steps."""
    return SMALL | dict(data=str(CASES / "k11_interrupt/data.tsv"), steps=10, save_every=8,
                        eval_every=6, log_every=2)


@pytest.mark.parametrize("case", STRIKES)
def test_k11_after_an_interrupt_the_loop_continues_from_memory(case, interrupted, monkeypatch):
    place, name, step, is_twice = STRIKES[case]
    run = train.start("contrastive", out="run", **interrupted)
    left = [(place, name), (train, "save")] if is_twice else [(place, name)]

    def striking(here):
        function = getattr(*here)

        def call(*words):
            if run.step == step and here in left:
                left.remove(here)
                signal.raise_signal(signal.SIGINT)
            return function(*words)

        return call

    for here in list(left):
        monkeypatch.setattr(*here, striking(here))
    with pytest.raises(KeyboardInterrupt):
        list(run.steps())
    assert run.step == run.saved_step == step and not left
    list(run.steps())
    list(train.start("contrastive", out="whole", **interrupted).steps())
    assert_same_run(Path("run"), Path("whole"))
    steps = [record["step"] for record in evaluate.read_log("run")[1:] if "loss" in record]
    assert steps == sorted(set(steps)) and steps[-1] == 10


def test_k11_a_kill_before_the_last_model_is_noticed_although_the_old_one_was_evaluated(
        interrupted, monkeypatch):
    run = train.start("contrastive", out="run", **interrupted)

    def save_once(model, path):
        if run.step == 10:  # like kill -9: after train.pt, before model.pt
            raise MemoryError
        save(model, path)

    with monkeypatch.context() as patch:
        patch.setattr(train, "save", save_once)
        with pytest.raises(MemoryError):
            list(run.steps())
    assert evaluate.main(["run"]) is None
    old = evaluate.open_run("run").model_hash
    list(train.start("contrastive", out="run", **interrupted).steps())
    assert evaluate.open_run("run").model_hash != old
    assert train.start("contrastive", out="run", **interrupted).finished


# ---- k12: advice that helps. tests/test_data.py has more on rows and blocks that are too few


@pytest.mark.parametrize("limit, count", [(30, "30"), (0, "48")])
def test_k12_an_eval_limit_of_0_takes_all_as_the_warning_says(limit, count, capsys):
    command = f"--data data.tsv --eval-data more.tsv --out run --eval-limit {limit}"
    assert run_on("k12_eval_limit_0", command) == 0
    assert (limit == 30) == ("train.py: --eval-limit 0) evaluates all" in capsys.readouterr().err)
    assert evaluate.read_results("run/eval.json")["rows"].startswith(f"{count} rows of more")


NEEDED = "20 different rows are needed, or give --eval-data"
ADVICE = [
    ("k12_too_few_rows", "--data nine.tsv", 2, NEEDED),
    ("k12_too_few_rows", "--data ten.tsv", 2, NEEDED),
    ("k12_too_few_rows", "--data ten.tsv --eval-data nine.tsv", 0, "and 9 in --eval-data"),
    ("k12_repeated_rows", "--data data.tsv", 2, NEEDED),
    ("k12_block_too_long", "--objective mlm --data train.txt --eval-data eval.txt --block 4096", 2,
     "--block 4096 is longer than the text, which has 1,4"),
    ("k12_short_document", "--objective mlm --data essay.txt --eval-data other.txt --block 64", 2,
     "--block 64 is longer than the text, which has"),
    ("k12_many_valid", "--objective mlm --data train.txt --block 16", 2,
     "other rows with --eval-data"),
    ("k12_many_valid", "--objective mlm --data train.txt --eval-data valid.txt --block 16", 0, ""),
    ("k12_eval_limit_0", "--learning_rate=1e-3", 2, "use --lr"),
    ("k12_eval_limit_0", "--gradient_accumulation_steps 4", 2, "use --accumulate"),
    ("k12_eval_limit_0", "--bf16 true", 2, "use --precision bfloat16"),
    ("k12_eval_limit_0", "--output-dir x", 2, "unknown flag --output-dir: see train.py --help"),
    ("k12_eval_limit_0", "--data data.tsv more.tsv", 2, "separate several values with commas")]


@pytest.mark.parametrize("case, command, status, text", ADVICE)
def test_k12_advice_is_correct(case, command, status, text, capsys):
    assert run_on(case, "--out run " + command) == status
    printed = capsys.readouterr()
    assert text in printed.out + printed.err
    if status:
        assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
        assert not os.path.exists("run")


# ---- k13: ~ is the home folder; no shell expands it in a notebook or in --out=~/x


@pytest.mark.parametrize("case, command", [
    ("k13_tilde_out", "--data=~/case/data.tsv --out=~/deep/run"),
    ("k13_tilde_moses", "--data ~/case/corpus.de,~/case/corpus.en --out ~/run")])
def test_k13_a_tilde_is_the_home_folder(case, command, tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    (home / "case").symlink_to(CASES / case)
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(home))
    assert run_on(case, command) == 0
    data, run = re.split("[ =]", command)[1::2]
    assert Path(run).expanduser().is_dir()
    train.start("contrastive", init=run, out="~/second", data=data, batch=8)
    assert evaluate.main([run, "--out=~/numbers.json"]) is None
    assert json.loads((home / "numbers.json").read_text(encoding="utf-8"))
    assert not Path("~").exists()
