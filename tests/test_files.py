"""corpora/: files of every format, which rows are held out, the cache, evaluation rows."""

import bz2
import gzip
import json
import lzma
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from common import BadInput
from corpora import count_trained_on, evaluation_rows, files, open_text, store, toy, train_texts
from data import open_corpus

PAIRS = [(f"the cat number {i} sleeps", f"die Katze Nummer {i} schläft") for i in range(40)]
TURNS = {"system": "s", "user": "u", "assistant": "a"}
PACKERS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def write(path, content, pack=bytes):
    path.write_bytes(pack(content if isinstance(content, bytes) else content.encode()))
    return str(path)


def tsv(path, rows, header="en\tde\n"):
    return write(path, header + "".join("\t".join(row) + "\n" for row in rows))


def lines(*objects):
    return "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in objects)


def rows(spec, split="all", langs=()):
    return list(open_text(spec, langs).rows(split))


# ---- formats


FORMATS = {
    "a.tsv": ("en\tde\n" + "".join(f"{a}\t{b}\n" for a, b in PAIRS), ("en", "de")),
    "b.tsv": ("\ufeffen\t de \r\n" + "".join(f"{a}\t{b}\r\n" for a, b in PAIRS), ("en", "de")),
    "c.csv": ("src, trg\n" + "".join(f'"{a}",{b}\n' for a, b in PAIRS), ("src", "trg")),
    "d.jsonl": (lines(*({"translation": {"en": a, "de": b}} for a, b in PAIRS)), ("en", "de")),
    "e.json": (lines(*({"src": a, "tgt": b, "id": 1} for a, b in PAIRS)), ("src", "tgt")),
    "f": ("Question|Answer\n" + "".join(f"{a}|{b}\n" for a, b in PAIRS).strip(),
          ("Question", "Answer")),
}


@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows_whether_packed_or_not(tmp_path, name, pack):
    content, columns = FORMATS[name]
    # The ending may say the packing, or not.
    for ending in (pack, ""):
        source = open_text(write(tmp_path / (name + ending), content, PACKERS[pack]))
        assert source.columns == columns and list(source.rows("all")) == PAIRS


def test_a_new_format_is_one_function_and_one_line(tmp_path, monkeypatch):
    def read_kv(path, langs=()):
        row = {}
        for number, line in files.read_lines(path):
            key, _, value = line.partition("=")
            row[key] = value
            if key == "de":
                yield number, row
                row = {}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(files.READERS, ".kv", read_kv)
    path = write(tmp_path / "a.kv.gz", "".join(f"en={a}\nde={b}\n" for a, b in PAIRS))
    assert rows(path) == PAIRS
    assert len(open_corpus(path, vocab=300)) == 36


@pytest.mark.parametrize("record, row", [
    (TURNS, ("u", "a", "s")),
    ({"messages": [{"role": role, "content": TURNS[role]} for role in TURNS]}, ("u", "a", "s")),
    ({"messages": [{"role": role, "content": TURNS[role]} for role in ("assistant", "user")]},
     ("u", "a", "")),
    ({"user": "u", "assistant": "a"}, ("u", "a", "")),
    ({"question": "q", "answer": 7}, ("q", "7"))])
def test_chats_and_questions_have_two_views_and_a_system_text_is_none(tmp_path, record, row):
    source = open_text(write(tmp_path / "a.jsonl", lines(record)))
    assert source.columns[2:] == ("system",)[:len(row) - 2] and source.num_text_columns == 2
    assert list(source.rows("all")) == [row]


def test_moses_files_are_put_side_by_side_and_others_one_after_the_other(tmp_path):
    paths = [write(tmp_path / f"c.de-en.{lang}.gz", f"{lang} 1\n{lang} 2\r\n", gzip.compress)
             for lang in ("de", "en")]
    assert open_text(",".join(paths)).columns == ("de", "en")
    assert rows(paths) == [("de 1", "en 1"), ("de 2", "en 2")]
    assert rows(paths, langs="en") == [("en 1",), ("en 2",)]
    paths = [write(tmp_path / f"x.{lang}.txt", f"{lang} 1\n") for lang in ("en", "de")]
    assert open_text(",".join(paths)).columns == ("en", "de") and rows(paths) == [("en 1", "de 1")]
    paths = [write(tmp_path / f"{name}.2020.txt", f"{name}\n") for name in "ab"]
    assert rows(paths) == [("a",), ("b",)]
    two = [tsv(tmp_path / "x.tsv", [("a", "b")]), tsv(tmp_path / "y.tsv", [("c", "d")], "en\tfr\n")]
    assert open_text(two).name == "x+y" and rows(two) == [("a", "b", ""), ("c", "", "d")]
    paths = [write(tmp_path / "c.de", "a\nb\n"), write(tmp_path / "c.en", "a\nb\nextra\nmore\n")]
    with pytest.raises(BadInput, match="c.en:3: .*c.de has only 2 lines, and line N of all files"):
        rows(paths)


def test_a_folder_of_languages_is_one_table_with_english_first(tmp_path):
    for code in ("deu_Latn", "eng_Latn", "fra_Latn"):
        write(tmp_path / f"{code}.devtest", f"{code} 0\n{code} 1\n")
    assert open_text(tmp_path).columns == ("eng_Latn", "deu_Latn", "fra_Latn")
    found = evaluation_rows(str(tmp_path), ["fra_Latn", "deu_Latn"], "all").texts
    assert found == {name: [f"{name} 0", f"{name} 1"] for name in ("fra_Latn", "deu_Latn")}
    assert evaluation_rows(str(tmp_path), ["fra_Latn"], "all").texts.keys() == {"fra_Latn"}
    with pytest.raises(BadInput, match="--langs fra: .*did you mean fra_Latn"):
        open_text(tmp_path, ["fra"])


def test_a_path_can_begin_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "a.txt", "one\ntwo\n")
    assert rows("~/a.txt") == rows(["~/a.txt"]) == [("one",), ("two",)]


@pytest.mark.parametrize("name, content, wanted", [
    ("a.txt", "  two  spaces \u2028 inside \r\n\n   \nlast", ["  two  spaces \u2028 inside ",
                                                              "last"]),
    ("a.txt", "one\rtwo\r\rthree\r", ["one", "two", "three"]),  # CR ends lines where no LF is
    ("a.txt", "one\rtwo\nthree\n", ["one\rtwo", "three"]),
    ("a.tsv", "text\nHello\n\xa0\nNow.\n", ["Hello", "Now."]),
    ("a.jsonl", lines({"text": "o\u2028n\x85e\n\r\ntwo", "title": "t"}), ["o\u2028n\x85e", "two"]),
    ("a.csv", 'text,title\n"one\n\ntwo",t\n', ["one", "two"])])  # paragraphs are rows
def test_a_text_has_one_row_on_a_line(tmp_path, name, content, wanted):
    assert rows(write(tmp_path / name, content)) == [(text,) for text in wanted]


@pytest.mark.parametrize("name, content, wanted", [
    ("a.tsv", "\nen\tde\na\tb\n\nc\td\n\n \n\t\n\xa0\n\f\n", [("a", "b"), ("c", "d")]),
    ("a.tsv", 'en\tde\nA.\t"B.\nC.\tD."\n"E."\tF\n', [("A.", '"B.'), ("C.", 'D."'), ('"E."', "F")]),
    ("a.tsv", '"en"\t"de"\n"say ""a"""\tb\n"c\td"\te\n', [('say "a"', "b"), ("c\td", "e")]),
    ("a.tsv", "en\tde\none\rtwo\tb\n", [("one\rtwo", "b")]),
    ("a.csv", 'en,de\n"one\n\ntwo, ""three""",b\n\nc,d\n', [('one\n\ntwo, "three"', "b"),
                                                           ("c", "d")]),
    ("a.csv", 'en,de,\n5" long,b,\n,,\n', [('5" long', "b")])])
def test_quotes_and_blank_lines_of_a_table(tmp_path, name, content, wanted):
    assert rows(write(tmp_path / name, content)) == wanted


# ---- columns


@pytest.mark.parametrize("names, columns", [
    ("en de", "en de"), ("id en de", "en de"), ("eng_Latn id zho_Hans", "eng_Latn zho_Hans"),
    ("EN DE", "EN DE"), ("zh-CN pt_BR ref", "zh-CN pt_BR"), ("en1 en2 de1", "en1 en2 de1"),
    ("en_id en_score is_duplicate en_\x1b de en", "de en"), ("id1 id2 s1 s2", "s1 s2"),
    ("text en src tgt", "src tgt"), ("src trg sentence1 sentence2", "src trg"),
    ("Sentence1 Sentence2", "Sentence1 Sentence2"), ("question answer text", "question answer"),
    ("user assistant", "user assistant system"), ("system user assistant", "user assistant system"),
    ("anchor positive negative", "anchor positive"), ("label text", "text"),
    ("english regex", "english regex"), ("premise hypothesis label", "premise hypothesis")])
def test_columns_are_those_of_the_first_known_group(tmp_path, names, columns):
    names = names.split()
    cells = [f"cell {name}" for name in names]
    wanted = [tuple(dict(zip(names, cells)).get(name, "") for name in columns.split())]
    paths = [tsv(tmp_path / "a.tsv", [cells], "\t".join(names) + "\n"),
             write(tmp_path / "a.csv", ",".join(names) + "\n" + ",".join(cells) + "\n"),
             write(tmp_path / "a.jsonl", lines(dict(zip(names, cells))))]
    for path in paths:
        source = open_text(path)
        assert source.columns == tuple(columns.split()) and list(source.rows("all")) == wanted


def test_langs_choose_and_order_columns_and_a_wide_table_may_have_gaps(tmp_path):
    table = [("1", "a", "b", "c"), ("2", "d", "", "f"), ("3", "g", "", ""), ("4", "", "h", "i")]
    path = tsv(tmp_path / "w.tsv", table, "id\ten\tde\tfr\n")
    source = open_text(path)
    assert list(source.rows("all")) == [("a", "b", "c"), ("d", "", "f"), ("", "h", "i")]
    assert source.notes[1] == "w: 1 rows with too little text are skipped"
    assert rows(path, langs="fr,en") == [("c", "a"), ("f", "d")]
    assert rows(path, langs=["id"]) == [("1",), ("2",), ("3",), ("4",)]
    with pytest.raises(BadInput, match="--langs fre: .*w.*has the columns id, en, de, fr; did you"):
        open_text(path, "en,fre")
    path = write(tmp_path / "b.csv", "English text;German text\na;b\n")
    assert rows(path, langs=["German text", "English text"]) == [("b", "a")]


def test_a_json_column_that_comes_late_is_in_the_note(tmp_path, monkeypatch):
    late = [{"en": a, "de": b} for a, b in PAIRS * 300] + [{"en": "x", "de": "y", "fr": "z"}]
    source = open_text(write(tmp_path / "a.jsonl", lines(*late)))
    assert source.notes == [] and list(source.rows("all"))[-1] == ("x", "y")
    assert source.notes == ["a: columns not read: fr (choose with --langs)"]


# ---- refusals


BAD = [
    ("a.tsv", "en\tde\na\tb\na\tb\tc", "a.tsv:3: 3 cells, but the header has 2 columns (en, de)"),
    ("a.csv", 'src,trg\na,b\n"a"x,b\n', "a.csv:3: not CSV (',' expected after '\"')"),
    ("a.csv", 'src,trg\na,b\n"a\nb,c\nd,e\n', "a.csv:3: not CSV (unexpected end of data): a quote"),
    ("a.csv", b'src,trg\na,b\n"a\n\xe4\n",b\n', "a.csv:4: not UTF-8 text: convert it (iconv"),
    ("a.tsv", "en\tde\na\tb\nde\ten\nc\td\n", "a.tsv:3: a header with another order of columns"),
    ("a.tsv", "en\ten\na\tb\n", "a.tsv:1: two columns have the name en: rename one"),
    ("a.tsv", "en\tde\n", "a.tsv has no rows: there is nothing after its header"),
    ("a.tsv", "en\tde\na\t\n \tb\n", "a.tsv: no row has enough text in en, de"),
    ("a.tsv", "x" * 9000 + "\ty z\n", "a.tsv:1: the first line must name the columns, and has"),
    ("a.csv", "A b.,C d.\n", "no known names (A b., C d., separated by commas): add a header"),
    ("a.csv", "one\n", "no known names (one, separated by commas): add a header line su"),
    ("a.jsonl", '{"text": "x"}\n\n{"text"}', "a.jsonl:3: not JSON Lines ("),
    ("a.jsonl", '{"text": "x"}\n' + '{"a":' * 99_999, ":2: not JSON Lines (maximum recursion"),
    ("a.jsonl", '{"text": "x"}\n{"text": []}', "a.jsonl:2: 'text' is of type list, not a t"),
    ("a.jsonl", '{"text": "a"}\n{"text": "\\ud800"}\n', "a.jsonl:2: not JSON Lines ('utf-8' codec"),
    ("a.jsonl", lines({"user": "a", "assistant": "b"}, {"messages": [{"role": "user"}, {}, 7]}),
     "a.jsonl:2: a chat must have one user turn, one assistant turn, and at most one system turn"),
    ("a.jsonl", lines({"instruction": "a", "output": "b"}), "no known columns among instruction"),
    ("a.jsonl", lines(dict.fromkeys(map(str, range(10 ** 5)), "")), "no known columns among 0, 1"),
    ("a.json", '[{"text": "a"}]', "a.json:1: not JSON Lines ([{'text': 'a'}]): write one"),
    ("a.json", '[\n{"text": "a"}]', "a.json:1: not JSON Lines (Expecting value"),
    ("a.txt", "fine" * 30 + "\nno\0t\n", "a.txt:2: not UTF-8 text"),
    ("a.txt", "fine\nno\0t\n", "a.txt:1: this is a binary file"), ("a.txt", "", "a.txt is empty"),
    ("a.txt", "x\n" * 200_000 + "no\0t\n", "a.txt:200001: not UTF-8 text"),
    ("a.txt", "fine\n" + "x" * 20_000, "a.txt:2: a text of 1,000,000 characters or a word of 10,0"),
    ("a.tsv.zip", "PK\3\4", "a.tsv.zip:1: this is a binary file: save the texts as TSV, CSV or"),
    ("\x1b[31m.tsv", "en\ten\n", "\\x1b[31m.tsv:1: two columns have the name en"),
    ("a.tsv", "\x1b[31m\tb c\n", "no known names (\\x1b[31m, b c, separated by tabs): add"),
    ("toyy", None, "--data toyy is neither a file nor one of toy, documents, regex; did you mean"),
    ("no.tsv", None, "no.tsv is neither a file nor one of"), ("a/b.tsv", None, "there is no file"),
    (".", None, ". is a folder without files CODE.devtest or CODE.dev: name its files, as in")]


@pytest.mark.parametrize("name, content, message", BAD)
def test_a_mistake_in_a_file_is_one_line_that_names_it(
        tmp_path, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        write(tmp_path / name, content)
    with pytest.raises(BadInput, match="^[^\n]*$") as error:
        rows(name)
    assert message in str(error.value) and len(str(error.value)) < 600
    assert "\x1b" not in str(error.value)


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz"])
@pytest.mark.parametrize("damage", ["cut", "bytes", "second stream"])
def test_a_damaged_compressed_file_is_an_error(tmp_path, ending, damage):
    packed = PACKERS[ending]("".join(f"line {i}\n" for i in range(9_999)).encode())
    joined = write(tmp_path / f"both.txt{ending}", packed + packed)
    assert len(rows(joined)) == 2 * 9_999
    damaged = {"cut": packed[:-20], "bytes": packed + b"more\n",
               "second stream": packed + bytes([packed[0] ^ 1]) + packed[1:]}[damage]
    path = write(tmp_path / f"a.txt{ending}", damaged)
    with pytest.raises(BadInput, match=r"a.txt\.\w+:\d+: cannot read on \(.*\): the file is damag"):
        rows(path)


# ---- rows that are held out


def test_rows_that_share_a_text_with_a_held_out_row_are_excluded(tmp_path):
    """The example of hold_out."""
    path = tsv(tmp_path / "a.tsv", PAIRS)
    cat, katze = rows(path, "test")[0]
    near = [(cat.replace(" ", "  ").upper(), "Ein Kater."), (katze, cat)]
    path = tsv(tmp_path / "b.tsv", [*PAIRS, *near])
    assert (cat, katze) in rows(path, "test") and not set(near) & set(rows(path, "test"))
    assert not {(cat, katze), *near} & set(rows(path, "train"))


def test_held_out_rows_are_the_same_for_any_columns_and_order_of_the_file(tmp_path):
    table = [(f"a{i}", f"b{i}" if i % 3 else "", f"c{i}") for i in range(3000)]
    path = tsv(tmp_path / "w.tsv", table, "en\tde\tfr\n")
    train, valid = rows(path, "train"), rows(path, "valid")
    assert valid == rows(path, "test") and len(valid) == 200
    assert sorted(train + valid) == sorted(table)
    assert rows(path, "valid", langs="en,de") == [(a, b) for a, b, _ in valid if b]
    assert train_texts(path) == {text for row in train for text in row if text}
    assert len(train_texts(path, ["en"], holdout=False)) == 3000
    moved = tsv(tmp_path / "other.tsv", table[::-1], "en\tde\tfr\n")
    assert rows(moved, "valid") == valid[::-1]


@pytest.mark.parametrize("table, held_out, excluded", [
    (PAIRS * 50, 4, 4 * 49),                                            # copies
    ([(f"en {i}", f"de {i % 1000}") for i in range(5000)], 200, 730),   # captions
    ([(f"en {i}", "Ja." if i % 3 == 0 else f"de {i}") for i in range(5000)], 200, 0),
    ([(f"en {i}", f"label {i % 2}") for i in range(5000)], 200, 0),
    ([(f"en {i // 16}", f"de {i}") for i in range(2000)], 25, 343),     # at most a fifth
    ([(f"{'en de'.split()[j]} {i}", f"{'de en'.split()[j]} {i}")        # in both directions
      for j in (0, 1) for i in range(1000)], 100, 100),
    ([(f"En  {i}", f"de {i}") for i in range(100)] + [(f"en {i}", f"DE {i}") for i in range(100)],
     10, 10),                                                           # case and spaces
    ([(f"Ähre {i}", f"ﬁ {i}") for i in range(100)]
     + [(f"A\u0308hre {i}", f"fi {i}") for i in range(100)], 10, 10),   # Unicode forms
    ([("x", "y")] * 50, 0, 0), (PAIRS[:19], 0, 0), (PAIRS[:20], 2, 0)])
def test_no_text_of_a_held_out_row_is_trained_on(tmp_path, table, held_out, excluded):
    source = open_text(tsv(tmp_path / "a.tsv", table))
    train = list(source.rows("train"))
    kinds = np.bincount(source.find_kinds(), minlength=3)
    assert kinds[files.EVAL] == held_out and kinds[files.EXCLUDED] == excluded
    assert len(train) == len(table) - held_out - excluded
    if held_out and not {row[1] for row in table} & {"Ja.", "label 0"}:
        texts = [{files.normalized(text) for row in part for text in row}
                 for part in (train, source.rows("test"))]
        assert not texts[0] & texts[1]
    assert source.notes[-1] == (f"a: {held_out:,} rows are held out for evaluation; {excluded:,} "
                                "rows that share a text with them are not trained on")


def test_rows_with_too_little_text_are_not_held_out(tmp_path):
    path = tsv(tmp_path / "a.tsv", [(f"en {i}", f"de {i}" if i % 4 else "") for i in range(400)])
    assert len(rows(path, "test")) == 30 and len(rows(path, "train")) == 270


@pytest.mark.parametrize("count", [1, 9, 10, 19])
def test_too_few_rows_to_hold_some_out_are_refused_with_the_number_needed(tmp_path, count):
    path = tsv(tmp_path / "a.tsv", PAIRS[:count])
    with pytest.raises(BadInput, match=f"a has {count} rows: .* 20 different .*--eval-data.*--spl"):
        evaluation_rows(path, split="valid")
    assert rows(path, "train") == PAIRS[:count]


def test_rows_that_were_trained_on_are_counted_wherever_they_are(tmp_path):
    path = tsv(tmp_path / "a.tsv", [*PAIRS, ("", "nur"), ("both", "beide")], "en\tde\n")
    train, test = rows(path, "train"), rows(path, "test")
    swapped = [(b, f" {a}") for a, b in reversed(train)]
    near = [(a.upper(), b.replace(" ", "  ").replace("ä", "a\u0308")) for a, b in train]
    for same in (train, swapped, near, [(a, "") for a, _ in train]):
        assert count_trained_on(path, same) == len(train)
    assert count_trained_on(path, test) == 0
    assert count_trained_on(path, test, holdout=False) == len(test)
    assert count_trained_on(path, [(train[0][0], train[1][1]), ("new", ""), ("", "")]) == 0
    assert count_trained_on("toy", open_text("toy", count=3).rows("train")) == 3


# ---- the cache


def test_a_corpus_is_built_once_and_read_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(store, "CHUNK", 7)
    path = write(tmp_path / "a b.csv", "id,en,de\n" + "".join(f"1,{a},{b}\n" for a, b in PAIRS)
                 + "id,en,de\n1,x,\n")
    first = open_corpus(path, vocab=300)
    source = open_text(path)
    tokens, offsets, kinds, content = store.encoded(source, first.tokenizer)
    expected = first.tokenizer.encode([text for pair in PAIRS for text in pair])
    assert np.array_equal(tokens, np.concatenate(expected)) and offsets[-1] == len(tokens)
    assert np.array_equal(np.diff(offsets), [len(ids) for ids in expected])
    assert np.bincount(kinds).tolist() == [36, 4] and kinds.dtype == np.uint8
    [folder] = Path("cache").iterdir()
    assert folder.name.startswith("a_b-") and not list(folder.rglob("*.part"))
    monkeypatch.setattr(store, "_write", None)
    monkeypatch.setattr(files, "hold_out", None)
    again = open_text(path)
    assert store.encoded(again, first.tokenizer)[3] == content
    assert again.notes == source.notes == [
        "a b: columns not read: id (choose with --langs)",
        "a b: 1 repeated header lines are skipped", "a b: 1 rows with too little text are skipped",
        "a b: 4 rows are held out for evaluation; 0 rows that share a text with them are not "
        "trained on"]
    whole = open_text(path)
    _, _, kinds, other = store.encoded(whole, first.tokenizer, holdout=False)
    assert not len(kinds) and other != content and whole.notes == source.notes[:-1]
    assert list(again.rows("test")) == [PAIRS[i] for i in np.flatnonzero(source.kinds)]


def test_two_processes_can_build_the_same_cache(tmp_path):
    tsv(tmp_path / "a.tsv", PAIRS * 20)
    program = ("import data, numpy as np\ncorpus = data.open_corpus('a.tsv', vocab=300)\n"
               "print(corpus.hash, len(corpus), corpus.tokens.sum())")
    folder = str(Path(files.__file__).parent.parent)
    started = [subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, text=True,
                                stdout=subprocess.PIPE, env={"PYTHONPATH": folder})
               for _ in range(2)]
    printed = {process.communicate()[0] for process in started}
    assert len(printed) == 1 and printed.pop() and {one.returncode for one in started} == {0}


# ---- evaluation rows and embedded corpora


def test_an_evaluation_prints_which_rows_it_leaves_out(tmp_path, capsys):
    table = [("1", "a", "b", "c"), ("2", "d", "", "f"), ("4", "", "h", "i"), ("5", "j", "k", "l")]
    path = tsv(tmp_path / "w.tsv", table, "id\ten\tde\tfr\n")
    for langs, limit, kept, printed in (
            ("", 1000, 2, "2 rows of w have an empty text among en, de, fr and are left out of al"),
            ("en,fr", 1000, 3, "w: 1 rows with too little text are skipped"),
            ("en,fr", 2, 2, "only the first 2 rows of w are evaluated; --limit 0 (of train.py: "),
            ("en,fr", 0, 3, "w: columns not read: id, de (choose with --langs)")):
        found = evaluation_rows(path, langs, "all", limit).texts
        assert [len(texts) for texts in found.values()] == [kept] * len(found)
        assert f"warning: {printed}" in capsys.readouterr().err
    tsv(tmp_path / "v.tsv", PAIRS)
    assert len(evaluation_rows(tmp_path / "v.tsv", "", "valid", 2).texts["en"]) == 2
    assert not capsys.readouterr().err  # a training has printed the notes


@pytest.mark.parametrize("name, columns", [("toy", toy.LANGUAGES), ("regex", ("english", "regex")),
                                           ("documents", ("text",))])
def test_an_embedded_corpus_is_the_same_every_time_and_its_splits_share_no_row(name, columns):
    splits = ("train", "valid", "test")
    found = {split: list(open_text(name, count=9).rows(split)) for split in splits}
    assert open_text(name).columns == columns and all(found.values())
    assert len({row for split in splits for row in found[split]}) == sum(map(len, found.values()))
    chosen = open_text(name, columns[-1:], count=9).rows("valid")
    assert chosen == [row[-1:] for row in found["valid"]]
    with pytest.raises(BadInput, match=f"--langs xx: {name} has the columns {columns[0]}"):
        open_text(name, "xx")


def test_the_rows_of_an_evaluation():
    found = evaluation_rows("toy", ["de", "en"], "valid", 30)
    meanings = toy.meanings("valid", 30)
    assert found.name == "toy" and list(found.texts) == ["de", "en"]
    assert found.texts["en"] == [toy.render(meaning, "en") for meaning in meanings]
    assert found.hard == toy.hard_negatives(meanings, "de")
    assert found.labelled[0] == found.texts["de"]
    documents = evaluation_rows("documents", limit=9)
    assert len(documents.texts["text"]) == 9 and documents.labelled
    regex = evaluation_rows("regex", split="all", limit=5)
    assert len(regex.texts["regex"]) == 5 and regex[2:] == (None, (), None)
    with pytest.raises(BadInput, match="split 'dev' is unknown: choose from train, valid, test"):
        evaluation_rows("toy", split="dev")
