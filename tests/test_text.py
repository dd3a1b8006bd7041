"""corpora/: files in all their spellings, embedded corpora, evaluations; flags and exit status."""

import bz2
import gzip
import json
import lzma

import pytest

from corpora import count_trained_on, evaluation_rows, open_text, text, toy, train_texts
from corpora.program import BadInput, Parser, comma_list
from corpora.split import held_size
from data import open_corpus

PAIRS = [(f"the cat number {i} sleeps", f"die Katze Nummer {i} schläft") for i in range(40)]
TURNS = {"system": "s", "user": "u", "assistant": "a"}


def write(path, content):
    raw = content if isinstance(content, bytes) else content.encode()
    packers = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    path.write_bytes(packers.get(path.suffix.lower(), bytes)(raw))
    return str(path)


def tsv(path, rows, header="en\tde\n"):
    return write(path, header + "".join("\t".join(row) + "\n" for row in rows))


def lines(*objects):
    return "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in objects)


def rows(spec, split="all", **options):
    return list(open_text(spec, **options).rows(split))


# ---- formats


FORMATS = {
    "a.tsv": ("en\tde\n" + "".join(f"{a}\t{b}\n" for a, b in PAIRS), ("en", "de")),
    "b.tsv": ('"en"\t de \r\n' + "".join(f'"{a}"\t{b}\r\n' for a, b in PAIRS), ("en", "de")),
    "c.csv": ("src,trg\n" + "".join(f'"{a}",{b}\n' for a, b in PAIRS), ("src", "trg")),
    "d.jsonl": (lines(*({"translation": {"en": a, "de": b}} for a, b in PAIRS)), ("en", "de")),
    "e.jsonl": (lines(*({"src": a, "tgt": b, "id": 1} for a, b in PAIRS)), ("src", "tgt")),
    "h": ("\ufeffen\tde\n" + "".join(f"{a}\t{b}\n" for a, b in PAIRS).strip(), ("en", "de")),
}


@pytest.mark.parametrize("ending", ["", ".gz", ".bz2", ".xz", ".GZ"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_plain_or_compressed_gives_the_same_rows(tmp_path, name, ending):
    content, columns = FORMATS[name]
    source = open_text(write(tmp_path / (name + ending), content))
    assert source.columns == columns and list(source.rows("all")) == PAIRS


def test_a_new_format_is_one_function_and_one_line(tmp_path, monkeypatch):
    def read_kv(path, langs, header):
        row = {}
        for number, line in text.decoded_lines(path):
            key, _, value = line.partition("=")
            row[key] = value
            if key == "de":
                yield number, row if row["en"] else ValueError("en= is empty")
                row = {}

    monkeypatch.setitem(text.READERS, ".kv", read_kv)
    lines = "".join(f"en={a}\nde={b}\n" for a, b in PAIRS)
    path = write(tmp_path / "a.kv.gz", lines + "en=\nde=x\n")
    with pytest.raises(BadInput, match="a.kv.gz:82: en= is empty; mend the line"):
        rows(path)
    assert rows(path, skip_bad=True) == PAIRS
    assert len(open_corpus(path, skip_bad=True, vocab=300, cache=tmp_path)) == 36


@pytest.mark.parametrize("record, row", [
    (TURNS, ("u", "a", "s")),
    ({"messages": [{"role": role, "content": TURNS[role]} for role in TURNS]}, ("u", "a", "s")),
    ({"user": "u", "assistant": "a"}, ("u", "a", "")),
    ({"question": "q", "answer": ["x", "y"]}, ("q", "x; y")),
    ({"ctx": "c", "endings": ["p", "q"], "label": "1"}, ("c", "q", ""))])
def test_chats_and_questions_have_two_sides_and_a_system_text_is_none(tmp_path, record, row):
    source = open_text(write(tmp_path / "a.jsonl", lines(record)))
    assert source.columns[2:] == ("system",)[:len(row) - 2] and source.sides == 2
    assert list(source.rows("all")) == [row]


def test_parallel_files_are_put_side_by_side_and_others_one_after_the_other(tmp_path):
    paths = [write(tmp_path / f"c.de-en.{lang}.gz", f"{lang} 1\n{lang} 2\n")
             for lang in ("de", "en")]
    assert open_text(",".join(paths)).columns == ("de", "en")
    assert rows(paths) == [("de 1", "en 1"), ("de 2", "en 2")]
    paths = [write(tmp_path / f"x.{lang}.txt", f"{lang} 1\n") for lang in ("en", "de")]
    assert open_text(",".join(paths)).columns == ("en", "de") and rows(paths) == [("en 1", "de 1")]
    paths = [write(tmp_path / f"{name}.en.txt", f"{name}\n") for name in "ab"]
    assert rows(paths) == [("a",), ("b",)]
    two = [tsv(tmp_path / "x.tsv", [("a", "b")]), tsv(tmp_path / "y.tsv", [("c", "d")], "en\tfr\n")]
    assert open_text(two).name == "x+y" and rows(two) == [("a", "b", ""), ("c", "", "d")]


def test_a_folder_of_languages_is_one_table_with_english_first(tmp_path):
    for code in ("deu_Latn", "eng_Latn", "fra_Latn"):
        write(tmp_path / f"{code}.devtest", f"{code} 0\n{code} 1\n")
    assert open_text(tmp_path).columns == ("eng_Latn", "deu_Latn", "fra_Latn")
    found = evaluation_rows(str(tmp_path), ["fra_Latn", "deu_Latn"], "all").texts
    assert found == {name: [f"{name} 0", f"{name} 1"] for name in ("fra_Latn", "deu_Latn")}
    assert evaluation_rows(str(tmp_path), ["fra_Latn"], "all").texts.keys() == {"fra_Latn"}
    with pytest.raises(BadInput, match="--langs fra: there is no .*/fra.devtest"):
        open_text(tmp_path, ["fra"])


def test_only_line_ends_are_stripped_and_a_text_has_one_row_on_a_line(tmp_path):
    path = write(tmp_path / "a.txt", "  two  spaces \u2028 inside \r\n\n   \nlast")
    assert rows(path) == [("  two  spaces \u2028 inside ",), ("last",)]
    path = write(tmp_path / "b.jsonl", lines({"text": "o\u2028n\x85e\n\r\ntwo", "title": "t"}))
    assert rows(path) == [("o\u2028n\x85e",), ("two",)]
    assert rows(path, langs="title,text") == [("t", "o\u2028n\x85e\n\r\ntwo")]
    path = write(tmp_path / "c.tsv", "\nen\tde\na\tb\n\nc\td\n\n \n\t\n\xa0\n\f\n")
    assert rows(path) == [("a", "b"), ("c", "d")]
    assert rows(write(tmp_path / "c.csv", "en,de,fr\na,b,c\n,\n,,\n")) == [("a", "b", "c")]


# As pandas and spreadsheets write tables, and as corpora without quoting have them.
@pytest.mark.parametrize("name, content, wanted", [
    ("a.tsv", '"say ""a"""\tb\n"c\td"\te\n', [('say "a"', "b"), ("c\td", "e")]),
    ("a.tsv", '"I am.\tIch"\n5" long\t"Hier"?\n', [('"I am.', 'Ich"'), ('5" long', '"Hier"?')]),
    ("a.tsv", 'A.\t"B.\nC.\tD."\n"E."\tF\n', [("A.", '"B.'), ("C.", 'D."'), ('"E."', "F")]),
    ("a.csv", '"one\ntwo, ""three""",b\nc,d\n', [('one\ntwo, "three"', "b"), ("c", "d")]),
    ("a.csv", '5" long,b\n,\n,,\n', [('5" long', "b")])])
def test_quotes_are_those_of_a_table_or_text(tmp_path, name, content, wanted):
    header = "en\tde\n" if name == "a.tsv" else "en, de\n"
    assert rows(write(tmp_path / name, header + content)) == wanted


def test_columns_without_a_name_and_numbers_of_rows_are_not_texts(tmp_path, capsys):
    path = write(tmp_path / "a.csv", ",en,de,\n0,a,b,\n")
    assert open_text(path).columns == ("en", "de") and rows(path) == [("a", "b")]
    for name in ("n.csv", "n.jsonl"):
        record = {"anchor": "a", "positive": "b", "negative": "c"}
        content = lines(record) if name == "n.jsonl" else "anchor,positive,negative\na,b,c\n"
        assert evaluation_rows(write(tmp_path / name, content), split="all").texts == {
            "anchor": ["a"], "positive": ["b"]}
        assert "n: negative is not used: no objective" in capsys.readouterr().err


def test_langs_choose_and_order_columns_and_a_wide_table_may_have_gaps(tmp_path):
    table = [("1", "a", "b", "c"), ("2", "d", "", "f"), ("3", "g", "", ""), ("4", "", "h", "i")]
    source = open_text(tsv(tmp_path / "w.tsv", table, "id\ten\tde\tfr\n"))
    assert list(source.rows("all")) == [("a", "b", "c"), ("d", "", "f"), ("", "h", "i")]
    assert "0 bad lines and 1 rows with too little text in en, de, fr" in source.left_out()
    assert rows(source.paths, langs="fr,en") == [("c", "a"), ("f", "d")]
    with pytest.raises(BadInput, match="--langs dee: .*w.tsv has the columns id, en, de, fr; did"):
        rows(source.paths, langs="en,dee")


def test_an_evaluation_says_which_rows_it_leaves_out(tmp_path, capsys):
    table = [("1", "a", "b", "c"), ("2", "d", "", "f"), ("4", "", "h", "i"), ("5", "j", "k", "l")]
    path = tsv(tmp_path / "w.tsv", table, "id\ten\tde\tfr\n")
    for options, kept, said in (
            ({}, 2, "2 rows of w lack a text in one of en, de, fr, and are left out of every"),
            ({"langs": "en,fr"}, 3, "left out 0 bad lines and 1 rows with too little text in en"),
            ({"langs": "en,fr", "limit": 2}, 2, "only the first 2 rows of w are evaluated; a"),
            ({"langs": "fr"}, 4, "")):
        found = evaluation_rows(path, split="all", **options).texts
        assert [len(texts) for texts in found.values()] == [kept] * len(found)
        shown = capsys.readouterr().err
        assert said in shown and bool(said) == bool(shown)


@pytest.mark.parametrize("first, header, columns, said", [
    ("en\tde", "yes", ("en", "de"), ""), ("English\tlabel", "yes", ("English",), ""),
    ("Hello\tHallo", "yes", ("Hello", "Hallo"), "the first line, Hello, Hallo, names the columns"),
    ("A cat.\tEine.", "no", ("src", "tgt"), ""), ("a b\tc\td", "no", ("column1", "column2",
                                                                       "column3"), "")])
def test_a_table_has_a_header_unless_it_is_said_that_it_has_none(
        tmp_path, capsys, first, header, columns, said):
    path = write(tmp_path / "a.tsv", f"{first}\n" * 2)
    assert open_text(path, header=header).columns == columns
    found = evaluation_rows(path, split="all", header=header).texts
    assert list(map(len, found.values())) == [2 if header == "no" else 1] * len(columns)
    shown = capsys.readouterr().err
    assert said in shown and bool(said) == bool(shown)
    if header == "no":
        names = [f"{name}_x" for name in columns]
        assert open_text(path, names, header="no").columns == tuple(names)
        assert open_text(path, columns[1:], header="no").columns == columns[1:]
    path = write(tmp_path / "b.tsv", "English text\tGerman text\na\tb\n")
    assert rows(path, langs=["German text", "English text"]) == [("b", "a")]


# ---- refusals


BAD_LINES = [  # --skip-bad leaves these lines out
    ("a.tsv", "en\tde\na\tb\na\tb\tc", "a.tsv:3: 3 cells, but 2 columns (en, de)"),
    ("a.tsv", "en\tde\na\tb\n \tb\n", "a.tsv:3: empty 'en'"),
    ("a.csv", 'src,trg\na,b\n"a"x,b\n', "a.csv:3: ',' expected after"),
    ("a.csv", b'src,trg\na,b\n"a\n\xe4\n",b\n', "a.csv:3: not UTF-8 at byte 0"),
    ("a.tsv", 'en\tde\na\tb\n"c\n', "a.tsv:3: 1 cells, but 2 columns (en, de); does a cell in"),
    ("a.jsonl", '{"text": "x"}\n\n{"text"}', "a.jsonl:3: not JSON"),
    ("a.jsonl", '{"text": "x"}\n' + '{"a":' * 99_999, ":2: not JSON lines (maximum recursion"),
    ("a.jsonl", '{"text": "x"}\n{"text": 7}', "a.jsonl:2: 'text' is int, not a string"),
    ("a.jsonl", lines({"translation": {"a": "x"}}, {"translation": {}}), "translation is empty"),
    ("a.jsonl", '{"text": "a"}\n{"text": "\\ud800"}\n', "a.jsonl:2: 'utf-8' codec can't"),
    ("a.jsonl", lines({"user": "a", "assistant": "b"}, {"messages": [{"role": "user"}]}),
     'a.jsonl:2: "messages" must be one user turn'),
    ("a.txt", "fine\nno\0t\n", "a.txt:2: a NUL character: this is no text, or UTF-16"),
    ("a.txt", "fine\n" + "x" * 20_000, "a.txt:2: a word of 20,000 characters")]
UNUSABLE = [
    ("a.jsonl", "hello", ":1: not JSON"),
    ("a.json", '[\n{"text": "a"}]', "a.json:1: not JSON lines but a list: one object on each"),
    ("a.txt", "a\n".encode("utf-16"), "a.txt is UTF-16: convert it (iconv -f utf-16"),
    ("a.tsv.zip", "PK", "a.tsv.zip: .zip is not read, it is packed; save it as TSV"),
    ("a.tsv", "<?xml?>\n", "a.tsv is XML, which is not read"),
    ("q.csv", 'en,de\n"a\nb,c\nd,e\n', "q.csv:2: unexpected end of data: a cell that begins"),
    ("q.csv", 'en;de\na;b\n', "q.csv:1: the cells are separated by semicolons: save the table"),
    ("a.jsonl", lines(dict.fromkeys(map(str, range(10 ** 5)), "")), "keys among '0', '1'"),
    ("a.tsv", "x" * 9000 + "\ty z\n", "the first line must name the columns"),
    ("a.csv", "A b.,C d.\n", "such as en,de, and looks like a row (A b., C d.): add a "
     "header, say --header no, or name columns of this line with --langs"),
    ("a.csv", '"a"b,c\n', "a.csv:1: ',' expected after"),
    ("a.tsv", "en\ten\na\tb\n", "a.tsv:1: the header names a column twice: en, en"),
    ("h.tsv", "en\tde\n", "h.tsv has no row that can be used: there is nothing below its"),
    ("a.txt.gz", "", "is empty"), ("cut.txt.bz2", "line\n" * 9_999, "damaged or cut short"),
    ("toyy", None, "neither a file nor one of toy, documents, regex; did you mean toy"),
    ("no.tsv", None, "there is no file no.tsv"), (".", None, "must hold files CODE")]


@pytest.mark.parametrize("name, content, said", [*BAD_LINES, *UNUSABLE])
def test_a_mistake_in_a_file_is_one_line_that_names_it(
        tmp_path, monkeypatch, name, content, said):
    monkeypatch.chdir(tmp_path)
    can_skip = (name, content, said) in BAD_LINES
    if content is not None:
        write(tmp_path / name, content)
    if name.startswith("cut"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-20])
    with pytest.raises(BadInput, match="^[^\n]*$") as error:
        rows(name, skip_bad=name.startswith("q"))
    assert said in str(error.value) and len(str(error.value)) < 600
    if can_skip:
        source = open_text(name, skip_bad=True)
        assert str(error.value).endswith("--skip-bad")
        assert len(list(source.rows("all"))) == 1 and source.dropped == 1


def test_parallel_files_of_unequal_length_are_refused_even_when_bad_lines_are_skipped(tmp_path):
    paths = [write(tmp_path / "c.de", "a\nb\n"), write(tmp_path / "c.en", "a\nb\nextra\nmore\n")]
    with pytest.raises(BadInput, match="c.de has 2 lines, .*c.en has more .*c.en:3"):
        rows(paths, skip_bad=True)
    write(tmp_path / "c.de", b"a\n\xff\nc\nd\n")
    assert rows(paths, skip_bad=True) == [("a", "a"), ("c", "extra"), ("d", "more")]


# ---- reading


def test_held_out_rows_are_the_same_for_any_columns_and_never_trained_on(tmp_path):
    table = [(f"a{i}", f"b{i}" if i % 3 else "", f"c{i}") for i in range(3000)]
    path = tsv(tmp_path / "w.tsv", table, "en\tde\tfr\n")
    train, valid = rows(path, "train"), rows(path, "valid")
    assert valid == rows(path, "test") and len(valid) == 200
    assert sorted(train + valid) == sorted(table)
    assert rows(path, "valid", langs="en,de") == [(a, b) for a, b, _ in valid if b]
    assert train_texts(path) == {text for row in train for text in row if text}
    assert len(train_texts(path, ["en"], holdout=False)) == 3000
    sizes = [held_size(count) for count in (9, 100, 2000, 50_000, 10 ** 6)]
    assert sizes == [0, 10, 200, 500, 1000]
    moved = tsv(tmp_path / "other.tsv", table[::-1], "en\tde\tfr\n")
    assert rows(moved, "valid") == valid[::-1]  # drawn by what they say


@pytest.mark.parametrize("table, held, left, shared", [
    (PAIRS * 50, 4, 4 * 49, ()),                                            # copies
    ([(f"en {i}", f"de {i % 1000}") for i in range(5000)], 200, 730, ()),   # captions
    ([(f"en {i}", "Ja." if i % 3 == 0 else f"de {i}") for i in range(5000)], 200, 0, ()),
    ([(f"en {i}", f"label {i % 2}") for i in range(5000)], 200, 0, (1,)),
    ([(f"en {i // 16}", f"de {i}") for i in range(2000)], 28, 372, ()),     # a fifth at most
    # Every pair stands there once more the other way round.
    ([(f"{'en de'.split()[j]} {i}", f"{'de en'.split()[j]} {i}")
      for j in (0, 1) for i in range(1000)], 100, 100, ()),
    ([("en", "de")] * 50, 0, 0, ())],
    ids=["copies", "captions", "yes", "labels", "few", "turned", "one"])
def test_no_text_of_a_held_out_row_is_trained_on(tmp_path, table, held, left, shared):
    source = open_text(tsv(tmp_path / "a.tsv", table))
    train, test = list(source.rows("train")), list(source.rows("test"))
    assert len(test) == held and len(table) - len(train) - held == left
    for column in range(2):
        texts = [{row[column] for row in part} for part in (train, test)]
        assert column in shared or not texts[0] & texts[1]
    assert bool(shared) == ("the texts of de repeat" in "".join(source.split_notes))


def test_rows_that_were_trained_on_are_counted_wherever_they_stand(tmp_path):
    path = tsv(tmp_path / "a.tsv", [*PAIRS, ("", "nur"), ("both", "beide")], "en\tde\n")
    source = open_text(path, skip_bad=True)
    train, test = list(source.rows("train")), list(source.rows("test"))
    def count(rows, **options):
        return count_trained_on(path, rows, skip_bad=True, **options)
    swapped = [(b, f" {a}") for a, b in reversed(train)]
    assert count(train) == count(swapped) == count([(a, "") for a, _ in train]) == len(train)
    assert count(test) == 0 and count(test, holdout=False) == len(test)
    assert count([(train[0][0], train[1][1]), ("new", ""), ("", "")]) == 0
    assert count_trained_on("toy", open_text("toy", count=3).rows("train")) == 3


# ---- embedded corpora and evaluations


@pytest.mark.parametrize("name, columns", [("toy", toy.LANGUAGES), ("regex", ("english", "regex")),
                                           ("documents", ("text",))])
def test_an_embedded_corpus_is_the_same_every_time_and_its_splits_share_no_row(name, columns):
    splits = ("train", "valid", "test")
    found = {split: rows(name, split, count=9) for split in splits}
    assert open_text(name).columns == columns and all(found.values())
    assert len({row for split in splits for row in found[split]}) == sum(map(len, found.values()))
    assert rows(name, "valid", count=9, langs=columns[-1:]) == [row[-1:] for row in found["valid"]]


def test_the_rows_of_an_evaluation():
    found = evaluation_rows("toy", ["de", "en"], "valid", 30)
    meanings = toy.meanings("valid", 30)
    assert found.name == "toy" and list(found.texts) == ["de", "en"]
    assert found.texts["en"] == [toy.render(meaning, "en") for meaning in meanings]
    assert found.hard == toy.hard_negatives(meanings, "de")
    assert found.labelled[0] == found.texts["de"] and len(found.graded) == 30
    documents = evaluation_rows("documents", limit=9)
    assert len(documents.texts["text"]) == len(documents.graded) == 9 and documents.labelled
    regex = evaluation_rows("regex", split="all", limit=5)
    assert len(regex.texts["regex"]) == 5 and regex[2:] == (None, (), None, ())


# ---- programs


@pytest.mark.parametrize("words, said", [
    ("go --lang en", "unknown flag --lang; did you mean --langs?"),
    ("--place=x go", "unknown flag --place: it is no flag of ours"),
    ("--size " + "x" * 9000, "value: 'xxxx"),
    ("--" + "x" * 9000, "xxx...xxx"), ("y" * 9000, "yyy...yyy")])
def test_flags_are_refused_in_one_line_and_may_be_written_with_either_mark(refused, words, said):
    parser = Parser("prog.py", explain={"--place": "it is no flag of ours"}.get)
    parser.add_argument("--size", type=int)
    command = parser.add_subparsers(dest="command").add_parser("go")
    command.add_argument("--langs", type=comma_list)
    command.add_argument("--skip-bad", action="store_true")
    found = vars(parser.parse_args(["--size=3", "go", "--langs", "en, de,en,", "--skip_bad"]))
    assert found == {"size": 3, "command": "go", "langs": ["en", "de"], "skip_bad": True}
    error = refused(parser.parse_args, words)
    assert said in error and len(error) < 400
