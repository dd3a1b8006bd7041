"""corpora/: files of every format, which rows are held out, the cache, evaluation rows."""

import bz2
import gzip
import json
import lzma
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from base.common import BadInput
from corpora import evaluation_rows, files, open_text, overlap, store
from data import open_corpus

PAIRS = [(f"the cat number {i} sleeps", f"die Katze Nummer {i} schläft") for i in range(40)]
PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def write(name, content, pack=bytes):
    Path(name).write_bytes(pack(content if isinstance(content, bytes) else content.encode()))
    return name


def tsv(name, rows, header="en\tde\n"):
    return write(name, header + "".join("\t".join(row) + "\n" for row in rows))


def lines(*objects):
    return "".join(json.dumps(one) + "\n" for one in objects)


def rows(spec, split="all", langs=()):
    return list(open_text(spec, langs).rows(split))


def test_other_rows_of_the_same_size_and_time_are_read_again():
    tsv("a.tsv", PAIRS)
    time = Path("a.tsv").stat().st_mtime_ns
    before = open_corpus("a.tsv", vocab=300)
    tsv("a.tsv", PAIRS[::-1])
    os.utime("a.tsv", ns=(time, time))
    assert open_corpus("a.tsv", before.tokenizer).hash != before.hash


# ---- formats: tests/test_cases.py has more of them, packed and with other delimiters


def chat(**turns):
    return {"messages": [{"role": role, "content": text} for role, text in turns.items()]}


@pytest.mark.parametrize("record, row", [
    (dict(system="s", user="u", assistant="a"), ("u", "a", "s")),
    (chat(system="s", user="u", assistant="a"), ("u", "a", "s")),
    (chat(user="u", assistant="a"), ("u", "a")),
    ({"Question": "q", "Answer": 7, "id": 1}, ("q", "7")),
    ({"translation": {"en": "a", "de": "b"}}, ("a", "b")),
    ({"length": {"en": 1, "de": 2}, "translation": {"en": "a", "de": "b"}}, ("a", "b")),
    ({"en": "a", "de": "b", "scores": {"en": 0.9, "de": 0.1}}, ("a", "b"))])
def test_pairs_and_chats_have_two_views_and_a_system_text_is_none(record, row):
    source = open_text(write("a.jsonl", lines(record)))
    assert source.columns[2:] == ("system",)[:len(row) - 2] and source.num_text_columns == 2
    assert list(source.rows("all")) == [row]


def test_moses_files_are_put_side_by_side_and_others_one_after_the_other():
    paths = [write(f"c.de-en.{lang}.gz", f"{lang} 1\n{lang} 2\r\n", gzip.compress)
             for lang in ("de", "en")]
    assert rows(",".join(paths)) == [("de 1", "en 1"), ("de 2", "en 2")]
    assert rows(paths, langs="en") == [("en 1",), ("en 2",)]
    assert rows([write(f"{name}_00", f"{name}\n") for name in "ab"]) == [("a",), ("b",)]
    two = [tsv("x.tsv", [("a", "b")]), tsv("y.tsv", [("c", "d")], "en\tfr\n")]
    assert open_text(two).name == "x+y" and rows(two) == [("a", "b", ""), ("c", "", "d")]
    with pytest.raises(BadInput, match="c.de:3: the file ends before this line, but line N of all"):
        rows([write("c.de", "a\nb\n"), write("c.en", "a\nb\nextra\nmore\n")])


@pytest.mark.parametrize("name, content, wanted", [
    ("a.txt", "  two  spaces \u2028 inside \r\n\n   \nlast", [("  two  spaces \u2028 inside ",),
                                                              ("last",)]),
    ("a.txt", "one\rtwo\nthree\n", [("one\rtwo",), ("three",)]),
    ("a.tsv", "\ufeff\nen\t de \r\na\tb\r\n\nc\td\n\n \n\t\n\xa0\n\f\n", [("a", "b"), ("c", "d")]),
    ("a.tsv", 'en\tde\nA.\t"B.\nC.\tD."\n"E."\tF\n', [("A.", '"B.'), ("C.", 'D."'), ('"E."', "F")]),
    ("a.csv", 'en,de,\n"one\n\ntwo, ""three""",b,\n,,\n5" long,d,\n',
     [('one\n\ntwo, "three"', "b"), ('5" long', "d")]),
    ("a.csv", '"en", "de","a, note"\nb,c,d\n', [("b", "c")]),
    ("a.tsv", 'id\t"en"\tde\n1\t"a\tb"\tc\n', [("a\tb", "c")])])  # a name inside is in quotes
def test_line_ends_quotes_and_blank_lines(name, content, wanted):
    assert rows(write(name, content)) == wanted


# ---- columns


@pytest.mark.parametrize("names, columns", [
    ("eng_Latn id zho_Hans", "eng_Latn zho_Hans"),
    ("zh-CN pt_BR ref en1 EN", "zh-CN pt_BR en1 EN"), ("text en src tgt", "src tgt"),
    ("en_id en_score is_duplicate de en", "de en"), ("en deu1951 fra", "en fra"),
    ("en_title en_body de_body de_title", "en_title de_title"), ("id S1 S2", "S1 S2"),
    ("qid1 qid2 question1 question2", "question1 question2"),
    ("genre sentence1 sentence2", "sentence1 sentence2"),
    ("english non_english", "english non_english"), ("query positive negative", "query positive"),
    ("instruction input output", "instruction output"), ("x" * 9000 + "_en en de", "en de"),
    ("system user assistant", "user assistant system")])
def test_columns_are_those_of_the_first_known_group(names, columns):
    names, columns = names.split(), tuple(columns.split())
    # Numbers, and texts of languages that are not written in Latin letters, too.
    texts = [f"{index}" if re.search("id$|score|is_", name) else f"日本{'人' * (index + 2)}"
             for index, name in enumerate(names)]
    for path in (tsv("a.tsv", [texts], "\t".join(names) + "\n"),
                 write("a.csv", f"{','.join(names)}\n{','.join(texts)}\n"),
                 write("a.jsonl", lines(dict(zip(names, texts))))):
        source = open_text(path)
        assert source.columns == columns
        assert list(source.rows("all")) == [tuple(texts[names.index(name)] for name in columns)]


EN, DE, FR = ([f"{start} the {word} in {place}." for word in "baker cat dog farmer teacher".split()
               for place in "a garden,an old house,the small town".split(",")]
              for start in ("Here we see", "Da sehen wir", "Nous y voyons"))


TIMES = [f"{day}, {month} Mar 2020 10:{month}:11 CET" for day in ("Mon", "Tue")
         for month in range(10, 19)]


@pytest.mark.parametrize("header, columns, wanted, why", [
    # beside two sentences a word is none, and neither are references, dates and addresses
    ("tr en de", (["Anna", "Bert", "Carl", "Dora"], EN[:4], DE[:4]), "en de", "tr (no texts)"),
    ("is en de", ([f"GEN 1:{i}" for i in range(12)], EN, DE), "en de", "is (no texts)"),
    ("to en de", (TIMES, EN, DE), "en de", "to (no texts)"),
    ("en de note", ([f"The dog sees {i} birds." for i in range(12)], [
        f"Der Hund sieht {i} Vögel." for i in range(12)], [f"{text} {text}" for text in EN]),
     "en de", "note (others are read)"),  # but these are sentences
    ("en de", (["cat", "dog", "ice cream"], ["Katze", "Hund", "Eis"]), "en de", ""),  # words
    # captions of one picture are no label, but a label of two words is one
    ("en de", ([EN[i // 20] for i in range(60)], [f"{DE[i // 20]} {i}" for i in range(60)]),
     "en de", "20 of the first 60 texts of en are 'Here"),
    # id is Indonesian if it has sentences, and mt Maltese if it has its letters
    ("id en", (DE, EN), "id en", ""),
    ("id en de", (["abc", "def", "ghi"], ["cat", "dog", "ox"], ["Katze", "Hund", "Ochse"]),
     "en de", "id (no texts)"),
    ("en de mt", (EN, DE, [f"Il-kelb jiġri {text}" for text in FR]), "en de mt", ""),
    # Hebrew is not written in Latin letters
    ("he en de", (["Peter Miller", "Anna Smith"] * 3, EN, DE), "en de", "he (no texts)"),
    # another translation into the same language
    ("en_src de_human de_google", (EN, DE, FR), "en_src de_human", "de_google (others are read)"),
    # languages as their speakers write them
    ("Русский 中文", (EN, DE), "Русский 中文", ""),
    # a name of a thing in two languages is no label of a pair
    ("label_en label_de", (EN, DE), "label_en label_de", ""),
    ("en zh_cn zh_tw", (EN, ["我们看见猫"] * 3, ["我們看見貓"] * 3), "en zh_cn zh_tw", ""),
    # "src" is also where a text comes from
    ("src ref text", (["news", "web"] * 7, [f"http://x.org/{i}" for i in range(14)], EN), "text",
     "src (few values); ref (no texts)"),
    ("cat is sentence", (["a", "b", "c"] * 5, ["x", "y"] * 7, EN), "", "cat (few values), is (")])
def test_columns_are_texts_by_their_content(header, columns, wanted, why):
    path = tsv("a.tsv", [map(str, row) for row in zip(*columns)], "\t".join(header.split()) + "\n")
    if not wanted:
        with pytest.raises(BadInput, match=re.escape(why)):
            open_text(path)
        return
    source = open_text(path)
    assert source.columns == tuple(wanted.split())
    assert why in "".join(source.notes) and bool(why) == bool(source.notes)


@pytest.mark.parametrize("names, columns", [
    ("x.aa x.ab x.ac", "text"), ("a.en a.de b.en", "text"), ("a.raw b.tok", "text"),
    ("notes.txt de.txt", "text"), ("eng-engwebp.txt deu-deu1951.txt", "eng deu"),
    ("en.txt de.txt", "en de")])
def test_files_are_parallel_if_their_names_tell_it(names, columns):
    """Then line N of all is one row. Others are read one after the other, and a note tells it."""
    names, columns = names.split(), columns.split()
    source = open_text([write(name, f"{name} 1\n{name} 2\n") for name in names])
    assert source.columns == tuple(columns) and bool(source.notes) == (columns == ["text"])
    wanted = [tuple(f"{name} {line}" for name in names) for line in (1, 2)]
    if columns == ["text"]:
        wanted = [(f"{name} {line}",) for name in names for line in (1, 2)]
    assert list(source.rows("all")) == wanted


@pytest.mark.parametrize("line, note", [
    ("de-000000{}\tEin Hund.", "40 of the first 40 lines of de have a tab: if an id or a label is"),
    ("A dog {}. ||| Ein Hund.", "lines of de have two texts: write a table (sed 's/ ||| /\\t/')"),
    ("dog{} NN B-NP O", "lines of de have one token each (CoNLL): write one sentence a line")])
def test_lines_with_more_than_a_text_are_said(line, note):
    for name in ("a.de", "a.en"):
        write(name, "".join(f"{line.format(10 + row)}\n" for row in range(40)))
    assert any(note in text for text in open_text("a.de,a.en").notes)


def test_a_file_with_an_unknown_ending_is_read_as_text_and_a_note_says_so():
    known = [open_text(write(name, "a b c\nd e f\n")).notes for name in ("a.txt", "a", "a.de")]
    note, = open_text(write("a.yaml", "a b c\nd e f\n")).notes
    assert known == [[], [], []] and note.startswith("a: .yaml is no ending that is known here")


def test_fields_of_a_turn_that_are_not_read_are_counted():
    turns = [{"role": "user", "content": "u"},
             {"role": "assistant", "content": "a", "thinking": "t", "name": "", "weight": 0}]
    calls = [turns[0], {"role": "assistant", "tool_calls": [{"id": 1}]}]
    source = open_text(write("a.jsonl", lines(*[{"messages": turns}] * 2, {"messages": calls})))
    assert list(source.rows("all")) == [("u", "a")] * 2
    assert source.notes[-3:] == ["a: 2 turns have thinking, which is not read",
                                 "a: 2 turns have weight, which is not read",
                                 "a: 1 turns have tool_calls, which is not read, and no content"]


def test_a_file_that_is_named_twice_keeps_its_first_place():
    """The first column is the pivot, and what a decoder starts from."""
    for name in ("de", "en"):
        write(f"c.{name}", f"{name} 1\n{name} 2\n")
    source = open_text("c.en,c.de,./c.en")
    assert list(source.rows("all")) == [("en 1", "de 1"), ("en 2", "de 2")]
    assert not source.notes


def test_langs_choose_and_order_columns_and_a_wide_table_may_have_gaps():
    path = write("n.csv", "source (en),target (de)\nA dog runs.,Ein Hund rennt.\n")
    assert open_text(path).columns == ("source (en)", "target (de)")
    table = [("1", "a", "b", "c"), ("2", "d", "", "f"), ("3", "g", "", ""), ("4", "", "h", "i")]
    path = tsv("w.tsv", table, "id\ten\tde\tfr\n")
    source = open_text(path)
    assert list(source.rows("all")) == [("a", "b", "c"), ("d", "", "f"), ("", "h", "i")]
    assert source.notes == ["w: columns not read: id (no texts): choose with --langs",
                            "w: 1 rows are skipped: too little text, or a repeated header"]
    assert rows(path, langs="fr,en") == [("c", "a"), ("f", "d")]
    assert rows(path, langs=["id"]) == [("1",), ("2",), ("3",), ("4",)]
    with pytest.raises(BadInput, match="w.tsv:1: no en, fre among the columns id, en, de, fr: ch"):
        open_text(path, "en,fre")
    path = write("b.csv.gz", "English text;German text\na;b\n", gzip.compress)
    assert rows(path, langs=["German text", "English text"]) == [("b", "a")]


# ---- refusals

@pytest.mark.parametrize("name, content, message", [
    ("a.tsv", "en\tde\na\tb\na\tb\tc", "a.tsv:3: 3 cells, but the header has 2 columns (en, de)"),
    ("a.tsv", 'en\tde\n"a\tb"\tc', "a.tsv:2: 3 cells, but the header has 2 columns (en, de)"),
    ("a.csv", 'src,trg\na,b\n"a\nb,c\nd,e\n', "a.csv:3: not CSV (unexpected end of data)"),
    ("a.csv", b'src,trg\na,b\n"a\n\xe4\n",b\n', "a.csv:4: this is not UTF-8: convert it"),
    ("a.tsv", "en\tde\ten\na\tb\tc\n", "a.tsv:1: two columns are named en: rename one"),
    ("a.tsv", "en\tde\n", "a.tsv has no rows"), ("a.txt", "", "a.txt has no rows"),
    ("a.tsv", "en\tde\na\t\n \tb\n", "a.tsv: no row has enough text in en, de"),
    ("a.tsv", "x" * 9000 + "\ty z\n", "a.tsv:1: no known names among the columns xxx"),
    ("a.tsv", "en\tde\n1\tEin Hund.\n", "a.tsv:1: fewer than two languages have texts among the "
     "columns en (no texts), de: choose with --langs"),
    ("a.csv", "A b.,\x1b[31m\n", "columns A b., \\x1b[31m: choose with --langs, or if this is no "
     "header, add one, such as src,tgt"),
    ("a.tsv", "en\tde\rA dog.\tEin Hund.\r", "a.tsv:1: a carriage return inside a line: convert"),
    ("a.jsonl", '{"text": "x"}\n\n{"text"}', "a.jsonl:3: not JSON Lines ("),
    ("a.jsonl", '{"text": "a"}\n{"text": "\\ud800"}\n', "a.jsonl:2: not JSON Lines ('utf-8' codec"),
    ("a.jsonl", lines({"text": "a"}, {"messages": [{"role": "user"}, {}, 7]}),
     "a.jsonl:2: not JSON Lines ('content'): write one object of texts, or one chat,"),
    ("a.jsonl", lines(chat(assistant="Hello", user="u")), "then one of the user, then one of"),
    ("a.jsonl", lines(chat(user="u", assistant="a") | {"user": "7"}), "beside messages, no column"),
    ("a.jsonl", lines({"id": 7, "translation": {"en": "a", "id": "b"}}),
     "a.jsonl:1: not JSON Lines (id occurs twice, also inside translation)"),
    ("a.en", "<url>http://x.org</url>\nA cat.\n", "a.en:1: this is markup: extract its text"),
    ("a.txt", "A cat.\n" * 40_000 + "A \0dog.\n", "a.txt:40001: a NUL, as in a binary file: u"),
    ("a.zip", b"PK\3\4\x14\0\0\0", "a.zip:1: this is a zip archive or a spreadsheet: unpack it"),
    ("a.txt.gz", gzip.compress(b"a/b.de".ljust(257, b"\0") + b"ustar"), "is an archive: unpack"),
    ("a.parquet", b"PAR1\x15\4\x15\n\0", "is a Parquet or Arrow table: unpack it"),
    ("a.tsv", "It is\tEs ist\nAs is\tSo sei es\n", "a.tsv:1: no known names among the columns It"),
    ("a.tsv", "de-000000093\ten-000000027\n", "a.tsv:1: no known names among the columns de-0"),
    ("a.txt", "A cat.\n".encode("utf-16-le"), "a.txt:1: this is a binary file or UTF-16: save"),
    ("a.json", '[{"text": "a"}]', "a.json:1: not JSON Lines ('list' object is not a mapping)"),
    ("toyy", None, "'toyy' is neither a file nor one of toy, documents, regex; did you mean toy"),
    ("a.de,a.en", None, "a.de is not a file"),
    (".", None, ". is a folder without files CODE.devtest")])
def test_a_mistake_in_a_file_is_one_line_that_names_it(name, content, message):
    if content is not None:
        write(name, content)
    with pytest.raises(BadInput, match="^[^\n\x1b]*$") as error:
        rows(name)
    assert message in str(error.value) and len(str(error.value)) < 600


# ---- cells that stand for no text


@pytest.mark.parametrize("cell", [
    "__NULL__", "_ _ NULL _ _", "NULL", r"\N", "NaN", "#N/A", "<range>",
    '<SPEAKER ID=7 NAME="President">', "<title>Anna: Why cats sleep</title>"])
def test_a_mark_or_a_tag_alone_in_a_cell_is_an_empty_cell(cell):
    table = [(f"We see {a}.", b, cell if i % 3 else f"le chat {b}") for i, (a, b)
             in enumerate(PAIRS)]
    source = open_text(tsv("a.tsv", table, "en\tde\tfr\n"))
    assert source.columns == ("en", "de", "fr")
    assert sum(bool(row[2]) for row in source.rows("all")) == 14
    assert source.notes == [f"a: 26 {files.EMPTY}"]


@pytest.mark.parametrize("cell", ["<3", "a < b > c", "<b>bold</b> text", "<he said, no>", "(null)"])
def test_other_cells_are_texts_and_one_that_is_frequent_is_named(cell):
    table = [(f"We see {a}.", cell if i % 8 == 0 else b) for i, (a, b) in enumerate(PAIRS)]
    source = open_text(tsv("a.tsv", table))
    assert len(list(source.rows("all"))) == 40
    assert source.notes == [f"a: 5 of the first 40 texts of de are {cell!r}: if this stands for no "
                            "text, empty these cells"]
    # Four of 40 are not named, and neither is the system text of chats, which is always the same.
    assert not open_text(tsv("a.tsv", table[1:] + [("We are new.", "neu hier")])).notes
    table = [{"system": "Be kind.", "user": a, "assistant": b} for a, b in PAIRS]
    assert not open_text(write("a.jsonl", lines(*table))).notes


def test_files_of_several_languages_with_one_name_of_a_column_are_said():
    spec = ",".join(write(f"{name}.jsonl", lines(*({"id": str(row), "utt": pair[column]}
                                                   for row, pair in enumerate(PAIRS))))
                    for column, name in enumerate(("en-US", "de-DE")))
    source = open_text(spec, "utt")
    assert source.columns == ("utt",) and len(list(source.rows("all"))) == 80
    assert any("2 files are read one after the other, as one column" in note
               for note in source.notes)


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize("change", ["none", "zeros", "first", "middle", "cut", "rest"])
def test_a_packed_file_of_two_parts_is_read_to_its_end_or_refused(ending, change):
    pack = PACKERS[ending]
    first, second = (pack("".join(f"sentence {part}-{row}\n" for row in range(500)).encode())
                     for part in range(2))
    place = 0 if change == "first" else len(second) // 2
    flipped = second[:place] + bytes([second[place] ^ 255]) + second[place + 1:]
    content = {"none": first + second, "zeros": first + b"\0" * 8 + second,
               "cut": (first + second)[:-9],
               "rest": first + second + b"more"}.get(change, first + flipped)
    name = write(f"a.txt{ending}", content)
    if change in ("none", "zeros"):
        texts = [line for _, line in files.read_lines(name)]
        assert texts == [f"sentence {part}-{row}" for part in range(2) for row in range(500)]
    else:
        with pytest.raises(BadInput, match=r"^a.txt\.\w+:\d+: the file cannot .*: it is dama"):
            list(files.read_lines(name))


@pytest.mark.parametrize("order", ["src trg id", "id src trg"])
@pytest.mark.parametrize("ending, label", [
    ("id", "deu\teng"), ("ids", "en/1.xml\tde/1.xml\t7\t7"), ("domain", "news"),
    ("it", "OpenSubtitles eng deu"), ("no", "1"), ("score", "0.5"), ("et", "et al.")])
def test_labels_beside_parallel_files_are_no_view(order, ending, label):
    names = order.replace("id", ending).split()
    for more in ("", ".txt"):
        for name, texts in (("src", [f"We see {a}." for a, _ in PAIRS]),
                            ("trg", [b for _, b in PAIRS]), (ending, [label, label + "x"] * 20)):
            write(f"dev.{name}{more}", "\n".join(texts) + "\n")
        source = open_text([f"dev.{name}{more}" for name in names])
        assert source.columns == tuple(name for name in names if name != ending)
        [note] = source.notes
        assert f"columns not read: {ending} ({source.schema.unread[ending]}): choose" in note
    if ending in ("domain", "score"):  # the others are also codes of languages
        assert open_text(f"dev.src,dev.{ending}").columns == ("src",)


# ---- rows that are held out


def test_held_out_rows_are_the_same_for_any_columns_and_order_of_the_file():
    table = [(f"a{i}", f"b{i}" if i % 3 else "", f"c{i}") for i in range(3000)]
    path = tsv("w.tsv", table, "en\tde\tfr\n")
    train, valid = rows(path, "train"), rows(path, "valid")
    assert valid == rows(path, "test") and len(valid) == 200
    assert sorted(train + valid) == sorted(table)
    assert rows(path, "valid", langs="en,de") == [(a, b) for a, b, _ in valid if b]
    assert rows(tsv("other.tsv", table[::-1], "en\tde\tfr\n"), "valid") == valid[::-1]


@pytest.mark.parametrize("table, held_out, excluded, often", [
    (PAIRS * 50, 4, 4 * 49, 0),                                            # copies
    ([(f"en {i}", f"de {i % 1000}") for i in range(5000)], 200, 730, 0),   # captions
    # 40 captions with 25 references each
    ([(f"en {i // 25}", f"de {i}") for i in range(1000)], 100, 0, 100),
    ([(f"en {i}", "Ja." if i % 3 == 0 else f"de {i}") for i in range(5000)], 200, 0, 71),
    ([(f"en {i}", f"label {i % 2}") for i in range(5000)], 200, 0, 200),
    ([pair for i in range(1000) for pair in ((f"en {i}", f"de {i}"),    # in both directions
                                             (f"de {i}", f"en {i}"))], 100, 100, 0),
    ([(f"Ähre  {i}", f"ﬁ {i}") for i in range(100)]                     # case, spaces and
     + [(f"A\u0308hre {i}", f"FI {i}") for i in range(100)], 10, 10, 0),   # Unicode forms
    (PAIRS + [tuple(text.replace("a", f"{hidden}a") for text in pair)   # nobody sees these
              for pair, hidden in zip(PAIRS, "\u200b\xad\ufeff\u200e\ufe0f\U000e0101\u2060" * 9)],
     4, 4, 0),
    ([(f"en {i}", f"de {j}") for i in range(40) for j in range(40)], 160, 0, 160),  # all pairs
    (PAIRS[:20], 2, 0, 0)])
def test_no_text_of_a_held_out_row_is_trained_on(table, held_out, excluded, often):
    source = open_text(tsv("a.tsv", table, "src\ttgt\n"))
    train = list(source.rows("train"))
    kinds = np.bincount(source.kinds, minlength=3)
    assert kinds.tolist() == [len(train), held_out, excluded] and kinds.sum() == len(table)
    *notes, last = source.notes
    sharing = (f"; {excluded:,} other rows share a text with them in any column, and are left out "
               "of training") if excluded else ", and no other shares a text"
    assert last == f"a: {held_out:,} rows are held out for evaluation{sharing}"
    if often:  # and only a frequent text
        assert notes[-1] == f"a: {often} {files.OFTEN}"
    else:
        assert not notes
        texts = [{overlap.normalized(text) for row in part for text in row}
                 for part in (train, source.rows("test"))]
        assert not texts[0] & texts[1]


def test_all_characters_of_the_categories_cf_and_cc_are_invisible_or_spaces():
    hidden = {*overlap.INVISIBLE.findall("".join(map(chr, range(sys.maxunicode))))}
    assert {unicodedata.category(c) for c in hidden} == {"Cc", "Cf", "Mn", "Lo", "Cn"}
    assert not any(map(str.isspace, hidden))
    assert all(c in hidden or c.isspace() for c in map(chr, range(sys.maxunicode))
               if unicodedata.category(c) in ("Cc", "Cf"))
    assert overlap.normalized("a\x08 c\x7fat\x92s") == overlap.normalized("A cats") == "a cats"


def test_a_text_that_was_trained_on_is_found_wherever_it_is():
    table = [(a, b, f"{i} cats are sleeping here") for i, (a, b) in enumerate(PAIRS)]
    path = tsv("a.tsv", [*table, ("", "nur", "")] + [(f"ok {i}", "Ja.", "") for i in range(20)],
               "en\tde\tsummary\n")
    known = overlap.without_frequent(open_text(path).find_hashes("train"))
    train, test = rows(path, "train"), rows(path, "test")

    def count(texts, known=known):
        hashes = np.array([list(map(overlap.text_hash, row)) for row in texts], np.uint64)
        return int(overlap.share_a_text(hashes, known).sum())

    near = [(b.replace(" ", "  ").replace("ä", "a\xad\u0308"), f" {a.upper()}") for a, b in train]
    for same in (train, near[::-1], [(a, "") for a, _ in train], [("new", a) for a, _ in train]):
        assert count(same) == len(train) > 40
    assert count(test) == 0 < len(test)
    summaries = [(row[2],) for row in table if row[:2] in train]  # a column that is not read
    assert count(summaries) == len(summaries) > 30
    assert count([("nur",), ("Ja.",), ("new",), ("",)]) == 0  # skipped, frequent, unknown, none
    assert count(train, known[:0]) == 0
    # A file that has each of its rows many times has no frequent texts.
    hashes = np.arange(1, 101, dtype=np.uint64).reshape(50, 2)
    assert len(overlap.without_frequent(np.repeat(hashes, 25, 0))) == 100
    assert len(overlap.without_frequent(np.zeros((30, 2), np.uint64))) == 0
    assert count(open_text("toy", count=3).rows("train"), np.unique(
        open_text("toy", "en", count=3).find_hashes())) == 3


# ---- the cache


def test_a_corpus_is_built_once_and_read_from_the_cache_unless_it_is_damaged(monkeypatch):
    monkeypatch.setattr(store, "CHUNK", 7)
    monkeypatch.setattr("base.tokenizer.KNOWN_WORDS", 9)
    path = write("a b.csv", "id,en,de\n" + "".join(f"1,{a},{b}\n" for a, b in PAIRS)
                 + "id,en,de\n1,x,\n")
    tokenizer = open_corpus(path, vocab=300).tokenizer
    source = open_text(path)
    expected = tokenizer.encode([text for pair in PAIRS for text in pair])

    def check(opened):
        tokens, offsets, kinds, hashes, _, counts, content, _ = store.encoded(opened, tokenizer)
        assert counts[files.SKIPPED] == 2
        assert hashes.shape == (40, 2)
        assert np.array_equal(tokens, np.concatenate(expected)) and offsets[-1] == len(tokens)
        assert np.array_equal(np.diff(offsets), [len(ids) for ids in expected])
        assert np.bincount(kinds).tolist() == [36, 4] and kinds.dtype == np.uint8
        return content

    content = check(source)
    [folder] = Path("cache").iterdir()
    other = store.encoded(open_text(path), tokenizer, holdout=False)
    assert other.kinds is None and other.hash != content
    for name in ("tokens.bin", "hashes.npy", "index.npz"):
        whole = (folder / name).read_bytes()
        flipped = whole[:-8] + bytes([whole[-8] ^ 1]) + whole[-7:]
        for damaged in (b"", whole[:-4], flipped, bytes(len(whole))):
            (folder / name).write_bytes(damaged)
            store.check.cache_clear()  # as in another process
            assert check(open_text(path)) == content
    monkeypatch.setattr(store, "_write", None)
    monkeypatch.setattr(files, "hold_out", None)
    again = open_text(path)
    assert check(again) == content and again.kinds is None  # nothing is written into it
    open_corpus(again, tokenizer)
    assert again.notes[1].startswith("a b: 2 rows are skipped")
    Path(path).unlink()  # the cache has the texts of the held-out rows
    assert list(again.rows("test")) == [PAIRS[i] for i in np.flatnonzero(again.kinds)]


def test_a_file_that_changes_between_two_readings_is_one_line():
    """Otherwise the kinds of rows would be those of other rows."""
    tokenizer = open_corpus(tsv("a.tsv", PAIRS), vocab=300).tokenizer
    source = open_text(tsv("a.tsv", PAIRS * 2))
    source.find_kinds()
    tsv("a.tsv", [("A new row.", "Eine neue Zeile."), *PAIRS * 2])
    with pytest.raises(BadInput, match="^a changed while it was read: start again when it is comp"):
        open_corpus(source, tokenizer)
    assert len(open_corpus("a.tsv", tokenizer, split="valid")) == 4


def test_two_processes_can_build_the_same_cache():
    tsv("a.tsv", PAIRS * 20)
    program = ("import os, data; child = os.fork()\n"
               # One write: where Python does not buffer, print writes the end of a line apart.
               "os.write(1, f\"{data.open_corpus('a.tsv', vocab=300).hash}\\n\".encode())\n"
               "if child: assert os.waitpid(child, 0)[1] == 0")
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    first, second = done.stdout.split()
    assert done.returncode == 0 and first == second and not list(Path("cache").rglob("*.part"))


def test_of_several_processes_the_first_checks_the_cache_and_then_the_others_open_it(monkeypatch):
    tokenizer = open_corpus(tsv("a.tsv", PAIRS * 2), vocab=300).tokenizer
    order, read = [], store._read
    monkeypatch.setattr(store, "is_alone", lambda: False)
    monkeypatch.setattr(store, "meet", lambda: order.append("meet"))
    monkeypatch.setattr(store, "check", lambda *_: order.append("check"))
    monkeypatch.setattr(store, "_read", lambda folder: order.append("open") or read(folder))
    for rank, wanted in enumerate((["open", "check", "meet"], ["meet", "open"])):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        open_corpus("a.tsv", tokenizer)
        assert order == wanted
        order.clear()


# ---- evaluation rows


def test_an_evaluation_prints_which_rows_it_leaves_out(capsys):
    table = [("1", "a", "b", "c"), ("2", "d", "", "f"), ("4", "", "h", "i"), ("5", "j", "k", "l")]
    path = tsv("w.tsv", table, "id\ten\tde\tfr\n")
    for langs, limit, kept, printed in (
            ("", 1000, 4, "not every row of w has all texts (3 of en, 3 of de, 4 of fr): each la"),
            ("en,fr", 2, 2, "only the first 2 rows of w are evaluated; --limit 0 (of train.py: "),
            ("en,fr", 0, 3, "w: columns not read: id (no texts); de (not in --langs): choose")):
        found = evaluation_rows(path, langs, "all", limit).texts
        assert [len(texts) for texts in found.values()] == [kept] * len(found)
        assert f"warning: {printed}" in capsys.readouterr().err
    assert len(evaluation_rows(tsv("v.tsv", PAIRS), "", "valid", 2).texts["en"]) == 2
    assert not capsys.readouterr().err  # a training has printed the notes
