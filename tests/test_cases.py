"""Files, folders and commands as people have them. Each kind of fault (k1, k2, ...) was once silent
or gave wrong advice; tests/cases has inputs of every kind, or make_files.py there writes them, and
here is what each must give."""

import contextlib
import functools
import io
import os
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import tokenizers
from cases import make_files
from test_evaluate import tiny, write_run
from test_house import SHAPE
from test_train import assert_same_run, flags
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace

import corpora
import evaluate
import train
from base.common import BadInput, run_program
from base.tokenizer import ROLES, Tokenizer
from corpora.files import EMPTY, SKIPPED, UNQUOTED
from harness import runs
from harness.weights import save

FOLDER = tempfile.TemporaryDirectory()  # it is removed at the end of the process
CASES = Path(FOLDER.name)
make_files.write(CASES)
shutil.copytree(Path(__file__).parent / "cases", CASES, dirs_exist_ok=True)
SMALL = SHAPE | dict(batch=8, steps=2)


def opened(name):
    """Return the columns, rows and notes of a case; in a name, ",data.de" adds a second file."""
    first, *more = name.split(",")
    path = CASES / first
    source = corpora.open_text([path, *(path.with_name(other) for other in more)]
                               if path.is_file() else path)
    rows = list(source.rows("all"))
    return source.columns, rows, "\n".join(source.notes)


# ---- files: k7 packed, k8 delimiters, k9 what cat leaves, k10 cells without a visible character,
# k16 what macOS adds. test_files.py has ids, labels and scores beside texts

READ = [  # files, columns, number of rows, notes
    ("k7_gzip_by_content/data.tsv", "en de", 60), ("k8_pipes/data.csv", "en de", 60),
    ("k8_tab_in_csv/pairs.csv", "en de", 60), ("k8_commas_in_tsv/data.tsv", "en de", 30),
    ("k8_header_in_txt/data.txt", "src tgt", 30),
    ("k9_windows_cat/data.csv", "en de", 30, f"2 {SKIPPED}"),
    ("k9_bom_inside/data.en,data.de", "en de", 80),
    ("k10_invisible_cell/data.tsv", "en de", 45, f"15 {EMPTY}", f"15 {SKIPPED}"),
    ("k16_apple_double/devtest", "eng_Latn deu_Latn", 60),
    ("k16_packed/flores", "eng_Latn deu_Latn", 30),
    ("w1_crawl/data.tsv", "en_text de_text", 24, "sl_no, en_url, de_url, en_lid (no texts); "
     "is_train (few values): choose"),
    ("w1_flores_dump/data.csv", "sentence_eng_Latn sentence_deu_Latn sentence_fra_Latn", 24,
     "id (no texts); URL, domain, topic, has_image (few values): choose"),
    ("w1_machine_translation/data.jsonl", "en de", 24,
     "min, mt (no texts); cat, as (few values): choose"),
    ("w1_kaggle_words/data.csv", "English words/sentences,French words/sentences", 24,
     'not read: "" (no texts); source (few values): choose'),
    ("w2_language_before_txt/news-src.eng.txt,news-ref.deu.txt", "eng deu", 48),
    ("w2_direction/news.en-de.en.txt,news.en-de.de.txt", "en de", 24),
    ("w3_unknown_code_in_folder/devtest", "eng_Latn chv_Cyrl deu_Latn", 48),
    ("w3_only_unknown/dev", "aaq_Latn zgh_Tfng", 24),
    ("w3_written_out/data.csv", "english German toba_batak", 24, "not read: index (no texts)"),
    ("w4_pandas_tsv/data.tsv", "en de", 48, f"48 {UNQUOTED}"),
    ("w4_true_quotations/data.tsv", "en de", 24),
    ("w4_mixed/data.tsv", "en de", 24, f"24 {UNQUOTED}", "not read: note (few")]


@pytest.mark.parametrize("case", READ, ids=lambda case: case[0])
def test_files_are_read_and_notes_tell_what_is_not(case):
    name, columns, count, *notes = case
    found, rows, lines = opened(name)
    assert found == tuple(columns.split("," if "," in columns else None)) and len(rows) == count
    assert all(note in lines for note in notes) and bool(notes) == bool(lines)
    texts = {text for row in rows for text in row}
    assert not texts & {"en", "de"} and not any(re.search("[\r\n\ufeff]", text) for text in texts)


@pytest.mark.parametrize("case, row, wanted", [
    ("w4_pandas_tsv", 1, ('He said "The dog hears 10 birds."',
                          'Er sagte "Der Hund hört 10 Vogel."')),
    # True quotation marks stay, at both ends of a cell, too.
    ("w4_true_quotations", 1, ('"The baker waters the roses." she said, "at last"',
                               "Der Bäcker gießt die Rosen.")),
    ("w4_mixed", 1, ('The word "baker" is short.', "Der Bäcker gießt die Rosen."))])
def test_w4_only_the_quotes_of_csv_are_removed_from_a_tsv(case, row, wanted):
    assert opened(f"{case}/data.tsv")[1][row] == wanted


@pytest.mark.parametrize("names, advice", [
    ("k7_lfs_pointer/data.jsonl", "git lfs pull"),
    ("k7_web_page/page.html", "markup: extract its"),
    ("k7_utf16/data.tsv k7_binary/data.txt", "a binary file or UTF-16: save UTF-8"),
    ("k8_tab_in_csv/sentences.csv k8_tabs_in_txt/deu.txt", "add one, such as src<TAB>tgt")])
def test_k7_k8_other_files_are_refused_by_name_with_the_way_out(names, advice):
    for name in names.split():
        with pytest.raises(BadInput, match=f"^[^\n]*{name}:1: [^\n]*{advice}[^\n]*$"):
            opened(name)


# ---- one schema for a run: w5 later files in another order, w9 held-out rows and --langs


def test_w5_later_files_have_the_columns_of_the_run_in_its_order():
    own, later = (CASES / "w5_later_files" / name for name in ("train.tsv", "more.tsv"))
    run = train.start("ntp", data=own, eval_data=later, out="run", **SMALL)
    assert run.data.corpus.columns == ("en", "de")
    assert run.data.held_out.columns == ("en", "de", "fr")
    list(run.steps())
    found = evaluate.evaluation_of(runs.open_run("run"), data=str(later)).rows.texts
    assert list(found) == list(run.rows.texts) == ["en", "de", "fr"]
    english, german = found["en"][0], found["de"][0]
    assert english.startswith("The ") and german.startswith("Der ")


def test_w5_a_later_file_that_lacks_a_column_is_refused_by_name():
    own, later = (CASES / "w5_later_files" / name for name in ("train.tsv", "fewer.tsv"))
    message = "fewer.tsv:1: the run reads en, de, and there is no de among the columns fr, en: re"
    with pytest.raises(BadInput, match=message):
        train.start("ntp", data=own, eval_data=later, **SMALL)
    list(train.start("ntp", data=own, out="run", **SMALL).steps())
    with pytest.raises(BadInput, match=message):
        evaluate.main(["run", "--data", str(later)])
    assert evaluate.main(["run", "--data", str(later), "--langs", "en,fr"]) is None


def test_w9_the_rows_that_are_held_out_are_the_same_whatever_langs(capsys):
    data = CASES / "w9_summary/data.tsv"
    run = train.start("contrastive", data=data, langs="en,summary", out="run", **SMALL)
    assert any("rows are held out for evaluation" in note for note in run.data.source.notes)
    list(run.steps())
    capsys.readouterr()
    found = evaluate.evaluation_of(runs.open_run("run"), langs=["en", "de"]).rows.texts
    trained = {text for row in run.data.source.rows("train") for text in row}
    assert min(map(len, found.values())) > 10
    assert not trained & {text for texts in found.values() for text in texts}
    assert "the model was trained" not in capsys.readouterr().err
    # The texts of columns that were not read are remembered, too.
    evaluate.evaluation_of(runs.open_run("run"), langs=["de"], split="train")
    assert re.search(r"trained on a text of (\d+) of the \1 rows", capsys.readouterr().err)


# ---- corpora of pairs: no row has all languages


def test_a_corpus_of_pairs_trains_on_every_pair_and_each_one_is_evaluated(capsys):
    english = [f"{number} {a} {b}" for number in range(6)
               for a in "red blue green black white".split()
               for b in "sun moon tree river stone bird fish cloud road house".split()]
    german, french = [f"{text} hier" for text in english], [f"{text} ici" for text in english]
    pairs = {"en-de": list(zip(english, german))[:100], "en-fr": list(zip(english, french))[100:],
             "de-es": [(text, f"{text} dos") for text in german[100:]]}
    for name, rows in pairs.items():
        lines = [name.replace("-", "\t"), *map("\t".join, rows), ""]
        Path(f"{name}.tsv").write_text("\n".join(lines), encoding="utf-8")
    run = train.start("contrastive", data="en-de.tsv,en-fr.tsv,de-es.tsv", out="run", **SMALL)
    drawn = {run.data.corpus.example(row, 2, 0).columns for row in range(len(run.data.corpus))}
    assert run.data.corpus.columns == ("en", "de", "fr", "es")
    assert drawn == {(0, 1), (0, 2), (1, 3)}
    *_, last = run.steps()
    found = {name.removeprefix("retrieval/xsim/") for name in last["eval"] if "xsim/" in name}
    assert found == {"de-en", "fr-en", "es-de"}
    assert "each language is compared with the first one on the rows that have both" in (
        capsys.readouterr().err)
    columns = evaluate.evaluation_of(runs.open_run("run"), split="all", limit=10).rows.texts
    assert [sum(map(bool, texts)) for texts in columns.values()] == [20, 20, 10, 10]


# ---- a tokenizer that does not know the script


@pytest.mark.parametrize("text, share", [("the cat ", ""), ("the ድመት ", "50.0%"),
                                         ("ድመት ", "100.0%")])
def test_a_warning_tells_which_fraction_of_the_tokens_is_unknown(text, share, capsys):
    pieces = [*ROLES, "the", "cat"]
    inner = tokenizers.Tokenizer(WordPiece(dict(zip(pieces, range(99))), unk_token="[UNK]"))
    inner.pre_tokenizer = Whitespace()
    write_run("init", tiny(vocab=len(pieces)), Tokenizer(inner), data="",
              size="toy", max_length=32)
    Path("data.txt").write_text("".join(f"{text * (row + 1)}\n" for row in range(30)), "utf-8")
    words = ["--objective=mlm", "--init=init", "--data=data.txt", "--out=run", "--steps=1"]
    assert train.main([*words, "--batch=4"]) == 0
    printed = capsys.readouterr()
    assert (f"{share} of the tokens of 3 texts are [UNK]" in printed.err) == bool(share)


# ---- commands, on the files of a case


def run_on(case, command):
    """Run train.py on the files of a case, which a command names. Return the exit status."""
    files = {path.name: str(path) for path in (CASES / case).iterdir()}
    words = ["--objective=contrastive", *flags(SMALL)]  # unless the command names another
    words += [files.get(word, word) for word in command.split()]
    with pytest.raises(SystemExit) as end, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *words])
        run_program(train.main)
    return end.value.code


# ---- k6: a console that lacks most characters


@pytest.mark.parametrize("case", ["k6_cp1252", "k6_shift_jis"])
def test_k6_characters_that_the_console_lacks_are_replaced(case, monkeypatch):
    """A Windows console that is redirected has the code page of its country."""
    code_page = case.removeprefix("k6_")
    written = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(written, code_page))
        assert run_on(case, "--data data.tsv") == 0
        sys.stdout.detach()
    printed = written.getvalue().decode(code_page)  # every byte is of the code page
    shown = [text.encode(code_page, "replace").decode(code_page)
             for row in opened(f"{case}/data.tsv")[1] for text in row]
    assert any("?" in text and text in printed for text in shown)  # in the examples at the end


def test_k6_characters_that_control_the_terminal_are_not_printed_raw(capsys):
    rows = [f"The \x1b[31mbaker{i}\ta \x9b31mloaf{i}\n" for i in range(40)]
    Path("own.tsv").write_text("x\x1b[2J\tde\n" + "".join(rows), encoding="utf-8")
    assert run_on("k6_cp1252", "--data own.tsv --langs x\x1b[2J,de") == 0
    printed = capsys.readouterr().out
    assert r"rows of x\x1b[2J, de" in printed and r"\x1b[31mbaker" in printed


# ---- k11: Jupyter's Stop. tests/test_train.py has an interrupt in a step, and a loop that is left

# A run of ten steps.
start_ten = functools.partial(
    train.start, "contrastive", **SMALL | dict(data=CASES / "k11_interrupt/data.tsv", steps=10),
    save_every=8, eval_every=6, log_every=2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder of a run that nothing interrupted."""
    with contextlib.chdir(tmp_path_factory.mktemp("whole")):
        list(start_ten(out="run").steps())
        return Path("run").absolute()


@pytest.mark.parametrize("step, strikes", [  # where the interrupts come, at this step
    (6, [(train.Run, "flush_metrics")]), (6, [(runs, "append_log")]),
    (6, [(train.Run, "evaluate")]), (0, [(train.Run, "evaluate")]),
    (8, [(runs, "check_finite")]),  # between train.pt and model.pt
    (4, [(train.Run, "flush_metrics"), (runs, "save")])])
def test_k11_after_an_interrupt_the_loop_continues_from_memory(step, strikes, whole, monkeypatch):
    run = start_ten(out="run")
    left = list(strikes)

    def striking(here):
        function = getattr(*here)

        def call(*words):
            if run.step == step and here in left:
                left.remove(here)
                signal.raise_signal(signal.SIGINT)
            return function(*words)

        return call

    for here in strikes:
        monkeypatch.setattr(*here, striking(here))
    with pytest.raises(KeyboardInterrupt):
        list(run.steps())
    assert run.step == run.saved_step == step and not left
    list(run.steps())
    assert_same_run("run", whole)
    steps = [record["step"] for record in runs.read_log("run")[1:] if "loss" in record]
    assert steps == [2, 4, 6, 8, 10]


def test_k11_a_kill_before_the_last_model_is_noticed_although_the_old_one_was_evaluated(
        monkeypatch):
    run = start_ten(out="run")

    def save_once(model, path):
        if run.step == 10:  # like kill -9: after train.pt, before model.pt
            raise MemoryError
        save(model, path)

    with monkeypatch.context() as patch:
        patch.setattr(runs, "save", save_once)
        with pytest.raises(MemoryError):
            list(run.steps())
    assert evaluate.main(["run"]) is None
    old = runs.open_run("run").model_hash
    list(start_ten(out="run").steps())
    new = runs.open_run("run").model_hash
    assert new != old and runs.read_results("run/eval.json")["model"] == new[:8]


# ---- k12: advice that helps. tests/test_data.py has more on rows and blocks that are too few


NEEDED = "20 different rows are needed, or give --eval-data"


@pytest.mark.parametrize("case, command, status, text", [
    ("k12_too_few_rows", "--data nine.tsv", 2, NEEDED),
    ("k12_too_few_rows", "--data ten.tsv --eval-data nine.tsv", 0, "and 9 in --eval-data"),
    ("k12_block_too_long", "--objective mlm --data train.txt --eval-data eval.txt --block 4096", 2,
     "longer than the text, which has 907 tokens"),
    ("k12_many_valid", "--objective mlm --data train.txt --block 16", 2,
     "other rows with --eval-data"),
    ("k12_many_valid", "--objective mlm --data train.txt --eval-data valid.txt --block 16", 0, ""),
    ("k12_eval_limit_0", "--data data.tsv --eval-data more.tsv --eval-limit 0", 0, "48 rows of")])
def test_k12_advice_is_correct(case, command, status, text, capsys):
    assert run_on(case, "--out run " + command) == status
    printed = capsys.readouterr()
    if status:
        assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
        assert text in printed.err and not os.path.exists("run")
    else:
        assert text in printed.out + printed.err + Path("run/eval.json").read_text("utf-8")


# ---- k13: ~ is the home folder; no shell expands it in a notebook or in --out=~/x


def test_k13_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    Path("case").symlink_to(CASES / "k13_tilde_moses")
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    data, run = "~/case/corpus.de,~/case/corpus.en", "~/deep/run"
    assert run_on("k13_tilde_moses", f"--data {data} --out={run}") == 0
    train.start("contrastive", init=run, out="~/second", data=data, batch=8)
    assert evaluate.main([run]) is None and Path(run, "eval.json").expanduser().exists()
    assert not Path("~").exists()
