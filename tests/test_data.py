"""data.py: files in all their spellings, what is said about bad ones, the token store, the order of rows, the masks."""
import gzip
import itertools
import json
import lzma
import threading
import time
import tracemalloc

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import data
import train
from data import BadInput, Batches, open_corpus
from model import Packed, View
from objectives import OBJECTIVES

PAIRS = [(f"the cat number {i} sleeps", f"die Katze Nummer {i} schläft") for i in range(40)]


def write(path, text, encoding="utf-8"):
    """A text file, compressed as its name says."""
    raw = text if isinstance(text, bytes) else text.encode(encoding)
    path.write_bytes({".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)(raw))
    return str(path)


def tsv(path, rows, header="en\tde\n"):
    return write(path, header + "".join("\t".join(row) + "\n" for row in rows))


def lines(*objects):
    return "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in objects)


def small(path, **options):
    return open_corpus(str(path), cache=path.parent / "cache", vocab=300, **options)


@pytest.fixture(scope="module")
def toy():
    return open_corpus("toy", count=600, vocab=500)


# ------------------------------------------------------------------------------------------------------------------- files

FORMATS = {
    "a.tsv": ("en\tde\n" + "".join(f"{a}\t{b}\n" for a, b in PAIRS), ("en", "de")),
    "b.tsv": ("".join(f"{a}\t{b}\r\n" for a, b in PAIRS), ("src", "tgt")),
    "c.csv": ("src,trg\n" + "".join(f'"{a}",{b}\n' for a, b in PAIRS), ("src", "trg")),
    "d.jsonl": (lines(*({"translation": {"en": a, "de": b}} for a, b in PAIRS)), ("en", "de")),
    "e.jsonl": (lines(*({"src": a, "tgt": b} for a, b in PAIRS)), ("src", "tgt")),
    "f.jsonl": (lines(*({"src": a, "trg": b, "id": 1} for a, b in PAIRS)), ("src", "trg")),
    "g.jsonl": (lines(*({"anchor": a, "positive": b, "negative": "x"} for a, b in PAIRS)), ("anchor", "positive")),
    "h": ("\ufeff" + "".join(f"{a}\t{b}\n" for a, b in PAIRS).removesuffix("\n"), ("src", "tgt")),
}


@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_plain_or_compressed_gives_the_same_rows(tmp_path, name, ending):
    text, columns = FORMATS[name]
    found = data.texts(write(tmp_path / (name + ending), text), holdout=False)
    assert tuple(found) == columns and list(zip(*found.values(), strict=True)) == PAIRS


@pytest.mark.parametrize("record", [{"system": "s", "user": "u", "assistant": "a"},
                                    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"},
                                                  {"role": "assistant", "content": "a"}]}])
def test_a_chat_has_two_views_and_its_system_text_is_none_of_them(tmp_path, record):
    corpus = small(tmp_path / "chat.jsonl") if write(tmp_path / "chat.jsonl", lines(record)) else None
    assert corpus.columns == ("user", "assistant", "system")
    seen = [corpus.example(0, 2, choice) for choice in range(5)] + [corpus.example(0, 1, choice) for choice in range(5)]
    system = corpus.ids(0, "system")
    assert corpus.tokenizer.decode(system) == "s" and not any(np.array_equal(ids, system) for views in seen for ids in views)


def test_moses_files_are_put_side_by_side_and_others_one_after_the_other(tmp_path):
    moses = [write(tmp_path / f"corpus.de-en.{lang}.gz", "".join(f"{pair[place]}\n" for pair in PAIRS))
             for place, lang in ((1, "de"), (0, "en"))]
    assert data.texts(",".join(moses), holdout=False) == {"de": [b for _, b in PAIRS], "en": [a for a, _ in PAIRS]}
    flores = [write(tmp_path / f"{code}.dev", f"{code}\n") for code in ("eng_Latn", "deu_Latn")]
    assert data.texts(flores, holdout=False) == {"eng_Latn": ["eng_Latn"], "deu_Latn": ["deu_Latn"]}
    two = [tsv(tmp_path / "x.tsv", [("a", "b")]), tsv(tmp_path / "y.tsv", [("c", "d")], "en\tfr\n")]
    source = data.Source(two)
    assert source.columns == ("en", "de", "fr") and [row for _, row in source.rows()] == [("a", "b", ""), ("c", "", "d")]


def test_prepare_takes_a_moses_pair_with_a_comma_as_training_does(tmp_path, capsys):
    pair = [write(tmp_path / f"corpus.de-en.{lang}", "".join(f"{one[place]}\n" for one in PAIRS)) for place, lang in ((1, "de"), (0, "en"))]
    for files in ([",".join(pair)], pair):
        assert data.main(["prepare", *files, "--cache", str(tmp_path / "cache"), "--vocab", "300"]) == 0
        assert f"{len(PAIRS)} rows, 2 columns" in capsys.readouterr().out


def test_only_line_ends_are_stripped_and_a_text_file_has_one_row_on_a_line(tmp_path):
    path = write(tmp_path / "a.txt", "  two  spaces \u2028 inside \r\n\n   \nlast")
    assert data.texts(path, holdout=False) == {"text": ["  two  spaces \u2028 inside ", "last"]}
    path = write(tmp_path / "b.jsonl", lines({"text": "one\n\ntwo", "title": "t"}))
    assert data.texts(path, holdout=False) == {"text": ["one", "two"]}
    assert data.texts(path, langs="title,text", holdout=False) == {"title": ["t"], "text": ["one\n\ntwo"]}


def test_langs_choose_and_order_columns_and_a_wide_table_may_have_gaps(tmp_path, capsys):
    rows = [("1", "a", "b", "c"), ("2", "d", "", "f"), ("3", "g", "", ""), ("4", "", "h", "i")]
    path = tsv(tmp_path / "w.tsv", rows, "id\ten\tde\tfr\n")
    corpus = small(tmp_path / "w.tsv", holdout=False)
    assert corpus.columns == ("en", "de", "fr") and len(corpus) == 3
    assert "left out 0 bad lines and 1 rows with too little text" in capsys.readouterr().err
    text = lambda views: tuple(corpus.tokenizer.decode(ids) for ids in views)
    assert {text(corpus.example(0, 2, choice)) for choice in range(9)} == {("a", "b"), ("a", "c")}
    assert {text(corpus.example(1, 2, choice)) for choice in range(9)} == {("d", "f")}
    assert {text(corpus.example(2, 2, choice)) for choice in range(9)} == {("h", "i"), ("i", "h")}
    assert {text(corpus.example(1, 1, choice)) for choice in range(9)} == {("d",), ("f",)} and len(corpus.ids(1, "de")) == 0
    assert data.texts(path, langs="fr,en", holdout=False) == {"fr": ["c", "f"], "en": ["a", "d"]}


BAD = [
    ("a.tsv", "en\tde\na\tb\na\tb\tc\n", "a.tsv:3: 3 cells, but 2 columns (en, de)"),
    ("a.tsv", "en\tde\na\tb\na\n", "a.tsv:3: 1 cells"),
    ("a.tsv", "en\tde\na\tb\n \tb\n", "a.tsv:3: empty 'en'"),
    ("a.tsv", b"en\tde\na\tb\na\tb\xff\n", "a.tsv:3: not UTF-8 at byte 3; convert the file"),
    ("a.csv", "src,trg\na,b\na,b,c\n", "a.csv:3: 3 cells"),
    ("a.csv", b"src,trg\na,b\n\xff,b\n", "a.csv:3: not UTF-8"),
    ("a.csv", 'src,trg\na,b\n"a"x,b\n', "a.csv:3: "),
    ("a.csv", 'src,trg\na,b\n"a cell must end,b\n', "a.csv:3: unexpected end of data"),
    ("a.jsonl", '{"text": "x"}\n\n{"text"}\n', "a.jsonl:3: not JSON"),
    ("a.jsonl", lines({"src": "a", "tgt": "b"}, {"src": "a"}), "a.jsonl:2: no known keys among 'src'"),
    ("a.jsonl", lines({"text": "a"}, [1]), "a.jsonl:2: a JSON list"),
    ("a.jsonl", lines({"text": "a"}, {"text": 5}), "a.jsonl:2: 'text' is int"),
    ("a.jsonl", '{"text": "a"}\n{"text": "\\ud800"}\n', "a.jsonl:2: 'utf-8' codec can't encode character '\\ud800' in position 0: surrogates"),
    ("a.jsonl", lines({"src": "a", "tgt": "b"}, {"src": "a", "tgt": ""}), "a.jsonl:2: empty 'tgt'"),
    ("a.jsonl", lines({"user": "a", "assistant": "b"}, {"messages": [{"role": "user", "content": "x"}]}),
     'a.jsonl:2: "messages" must be one user turn'),
    ("a.txt", b"fine\n\xe4\n", "a.txt:2: not UTF-8 at byte 0")]


@pytest.mark.parametrize("name, text, said", BAD)
def test_a_bad_line_is_named_with_its_file_and_number_and_can_be_skipped(tmp_path, capsys, name, text, said):
    write(tmp_path / name, text)
    with pytest.raises(BadInput) as error:
        small(tmp_path / name)
    assert said in str(error.value) and "--skip-bad" in str(error.value) and "\n" not in str(error.value)
    assert not list((tmp_path / "cache").rglob("meta.json"))
    corpus = small(tmp_path / name, skip_bad=True)
    assert len(corpus) == 1 and "left out 1 bad lines" in capsys.readouterr().err


@pytest.mark.parametrize("name, text, said", [
    ("a.txt", "", "is empty"), ("a.txt.gz", "", "is empty"), ("a.jsonl", "hello", "a.jsonl:1: not JSON"),
    ("a.tsv", "one column\n", "a.tsv:1: 1 column, but the first line does not name them"), ("a.csv", "A b.,C d.\n", "does not name them"),
    ("a.tsv", "A b.\tC d.\tE f.\n", "a.tsv:1: 3 columns, but the first line does not name them"),
    ("a.jsonl", '{"premise": "q", "conclusion": "a"}', "a.jsonl:1: no known keys among 'premise', 'conclusion'")])
def test_a_file_that_cannot_be_used_is_refused_in_one_line(tmp_path, name, text, said):
    write(tmp_path / name, text)
    with pytest.raises(BadInput, match="^[^\n]*$") as error:
        small(tmp_path / name)
    assert said in str(error.value)


def test_wrong_names_are_answered_with_the_right_ones(tmp_path):
    path = tsv(tmp_path / "a.tsv", PAIRS)
    for make, said in ((lambda: data.texts(path, langs="en,dee"), "--langs dee: .*a.tsv has the columns en, de; did you mean de"),
                       (lambda: data.texts("toy", langs="dd"), "--langs dd: toy has the columns en, de"),
                       (lambda: open_corpus("toyy"), "neither a file nor one of toy, regex, pydoc; did you mean toy"),
                       (lambda: open_corpus(str(tmp_path / "none.tsv")), "there is no file .*none.tsv"),
                       (lambda: open_corpus(str(tmp_path)), "is a folder"),
                       (lambda: open_corpus("toy", split="dev"), "choose train, valid or test"),
                       (lambda: small(tmp_path / "a.tsv").ids(99, "en"), "row 99 of 36"),
                       (lambda: data.train_tokenizer([], 200), "--vocab 200 is too small"),
                       (lambda: data.read_tokenizer(path), "cannot read the tokenizer .*a.tsv: "),
                       (lambda: data.read_tokenizer(tmp_path / "x.json"), "cannot read the tokenizer")):
        with pytest.raises((BadInput, IndexError), match=said):
            make()


def test_moses_files_of_unequal_length_are_refused_even_when_bad_lines_are_skipped(tmp_path):
    paths = [write(tmp_path / "c.de", "a\nb\n"), write(tmp_path / "c.en", "a\nb\nextra line\nmore\n")]
    with pytest.raises(BadInput, match=r"c.de has 2 lines, .*c.en has more.*c.en:3: 'extra line'"):
        data.texts(paths, skip_bad=True)
    write(tmp_path / "c.de", b"a\n\xff\nc\nd\n")
    assert data.texts(paths, holdout=False, skip_bad=True) == {"de": ["a", "c", "d"], "en": ["a", "extra line", "more"]}


def test_a_cut_off_archive_is_an_error_and_not_a_short_file(tmp_path):
    for name in ("a.txt.gz", "a.txt.xz"):
        write(tmp_path / name, "line\n" * 99_999)
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-20])
        with pytest.raises(BadInput, match="damaged or cut short"):
            data.texts(str(tmp_path / name))


def test_reading_is_lazy(tmp_path):
    path = write(tmp_path / "big.txt.gz", "a line of text that is repeated\n" * 60_000)
    tracemalloc.start()
    assert sum(1 for _ in data.Source([path]).rows()) == 60_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 400_000  # of 2 million characters


# ----------------------------------------------------------------------------------------------------------- splits, store

def test_held_out_rows_are_the_same_for_any_columns_and_never_trained_on(tmp_path):
    rows = [(f"a{i}", f"b{i}" if i % 3 else "", f"c{i}") for i in range(3000)]
    path = tsv(tmp_path / "w.tsv", rows, "en\tde\tfr\n")
    train, valid = small(tmp_path / "w.tsv"), small(tmp_path / "w.tsv", split="valid")
    text = lambda corpus, column="en": [corpus.tokenizer.decode(corpus.ids(row, column)) for row in range(len(corpus))]
    assert len(valid) == 200 and len(train) == 2800 and sorted(text(train) + text(valid)) == sorted(row[0] for row in rows)
    assert data.texts(path, "valid", langs="en,fr")["en"] == text(valid)
    assert set(text(small(tmp_path / "w.tsv", langs="en,de", split="test"))) < set(text(valid))
    assert set(data.texts(path, "train", langs="en,de")["en"]).isdisjoint(text(valid))
    assert len(small(tmp_path / "w.tsv", split="test", holdout=False)) == 3000
    assert [len(data._held_out(n)) for n in (9, 100, 1999, 2000, 50_000, 10 ** 8)] == [0, 10, 199, 200, 500, 1000]


def test_the_store_holds_what_encoding_in_memory_gives_and_is_used_again(tmp_path, capsys):
    tsv(tmp_path / "a.tsv", PAIRS)
    first = small(tmp_path / "a.tsv", holdout=False)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.*")}
    again = small(tmp_path / "a.tsv", holdout=False)
    given = open_corpus(str(tmp_path / "a.tsv"), first.tokenizer, cache=tmp_path / "cache", holdout=False)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.*")} == made and not capsys.readouterr().err
    assert first.hash == again.hash == given.hash != small(tmp_path / "a.tsv").hash
    expected = data.encode(first.tokenizer, [text for pair in PAIRS for text in pair])
    for corpus in (first, again, given):
        assert corpus.tokens.dtype == np.uint32 and np.array_equal(corpus.tokens[:], np.concatenate(expected))
        assert all(np.array_equal(corpus.ids(row, name), expected[2 * row + place])
                   for row in range(40) for place, name in enumerate(("en", "de")))


def test_the_store_is_made_anew_when_the_source_changed_and_says_so(tmp_path, capsys):
    path = tsv(tmp_path / "a.tsv", PAIRS)
    first = small(tmp_path / "a.tsv")
    tsv(tmp_path / "a.tsv", [("the dog number 0 sleeps", PAIRS[0][1]), *PAIRS[1:]])  # another text of the same length
    second = small(tmp_path / "a.tsv")
    assert second.hash != first.hash
    assert capsys.readouterr().err == "a.tsv: preparing anew, the data is not what it was\n"
    stores = lambda: len(list((tmp_path / "cache").rglob("tokens.bin")))
    assert stores() == 1 and first.tokenizer.decode(first.ids(0, "en")).startswith("the cat")  # what was open stays readable
    other = data.train_tokenizer(["something else"] * 3, 290)
    third = open_corpus(path, other, cache=tmp_path / "cache")
    assert data.tokenizer_hash(third.tokenizer) == data.tokenizer_hash(other) and stores() == 2
    assert small(tmp_path / "a.tsv").hash == second.hash != third.hash and stores() == 2  # both tokenizers keep their stores
    tsv(tmp_path / "a.tsv", PAIRS[:-1])
    assert not capsys.readouterr().err and len(small(tmp_path / "a.tsv", holdout=False)) == 39 and stores() == 1
    assert "preparing anew" in capsys.readouterr().err


def test_an_interrupted_prepare_leaves_nothing_that_is_taken_for_whole(tmp_path, monkeypatch):
    tsv(tmp_path / "a.tsv", PAIRS)
    def stopped(*_):
        raise KeyboardInterrupt
    for name in ("encode", "write_atomic"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(data, name, stopped)
            small(tmp_path / "a.tsv")
        assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert len(small(tmp_path / "a.tsv", holdout=False)) == 40


def test_two_programs_that_prepare_at_once_both_get_the_whole_corpus(tmp_path):
    tsv(tmp_path / "a.tsv", PAIRS * 20)
    found = []
    threads = [threading.Thread(target=lambda: found.append(small(tmp_path / "a.tsv", holdout=False))) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(found) == 4 and all(np.array_equal(corpus.tokens[:], found[0].tokens[:]) and len(corpus) == 800 for corpus in found)


def test_write_atomic_keeps_the_old_file_when_writing_fails(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "file"
    data.write_atomic(path, b"old")
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(data.os, "fsync", lambda file: (_ for _ in ()).throw(OSError("the disk is full")))
        data.write_atomic(path, b"half")
    assert path.read_bytes() == b"old" and list(path.parent.iterdir()) == [path]
    data.write_atomic(path, b"new")
    assert path.read_bytes() == b"new"


def test_the_command_prepares_and_reports_and_bad_input_ends_with_status_2(tmp_path, capsys):
    path, cache = tsv(tmp_path / "a.tsv", PAIRS), ["--cache", str(tmp_path / "cache")]
    assert data.main(["prepare", path, "--vocab", "300", *cache]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("a: 40 rows, 2 columns") and out[2].split()[:2] == ["en", "40"] and len(out) == 4
    assert data.main(["prepare", path, "--langs", "xx", *cache]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: --langs xx") and said.err.count("\n") == 1 and not said.out


# ------------------------------------------------------------------------------------------------------------- tokenizers

def test_training_a_tokenizer_twice_gives_the_same_file_and_it_decodes_to_the_text(tmp_path):
    texts = [text for pair in PAIRS for text in pair] + ["日本語 and русский, too — naïve!"]
    one, two = data.train_tokenizer(texts, 400), data.train_tokenizer(texts, 400)
    assert data.tokenizer_hash(one) == data.tokenizer_hash(two) != data.tokenizer_hash(data.train_tokenizer(texts, 300))
    for text in (*texts, "never seen: 🙂\t¼ ½", "[MASK] spelled out is text"):
        ids, = data.encode(one, [text])
        assert one.decode(ids) == text and not data._is_special(ids, data.special(one)).any()
    one.enable_truncation(3)
    one.enable_padding(length=9)
    data.write_tokenizer(one, tmp_path / "t.json")
    assert data.tokenizer_hash(data.read_tokenizer(tmp_path / "t.json")) == data.tokenizer_hash(two)
    assert [one.id_to_token(place) for place in range(15)] == list(data.ROLES) and data.special(one).preds == tuple(range(5, 15))


def test_roles_are_found_in_tokenizers_of_bert_and_of_xlm_r_and_a_missing_one_is_named():
    bert = Tokenizer(models.WordPiece({name: place for place, name in enumerate(
        ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "!"))}, unk_token="[UNK]"))
    bert.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    found = data.special(bert)
    assert found[:6] == (0, 2, 3, 4, (), 8) and found.ids.tolist() == [0, 1, 2, 3, 4]
    assert found.starts[5:].tolist() == [True, False, True]
    pieces = ("<s>", "<pad>", "</s>", "<unk>", "▁play", "ing", ",", "é", "語", "<mask>")
    xlm = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=3))
    xlm.pre_tokenizer = pre_tokenizers.Metaspace()
    xlm.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    found = data.special(xlm)
    assert found[:6] == (1, 0, 2, 9, (), 10) and found.ids.tolist() == [0, 1, 2, 3, 9]
    assert found.starts[4:9].tolist() == [True, False, True, False, True]
    with pytest.raises(BadInput, match=r"no sep token \(\[SEP\] or </s> or"):
        data.special(Tokenizer(models.WordLevel({"[PAD]": 0, "[CLS]": 1})))
    maskless = data.special(Tokenizer(models.WordLevel({"[CLS]": 0, "[SEP]": 1})))        # enough for a decoder
    assert maskless[:4] == (None, 0, 1, None) and maskless.ids.tolist() == [0, 1]
    with pytest.raises(BadInput, match=r"no mask token \(\[MASK\] or <mask>\)"):
        data.corrupt(np.array([0, 1]), np.array([False, True]), np.random.default_rng(0), maskless)


@pytest.mark.parametrize("name, columns", [("toy", data.grammar.LANGUAGES), ("regex", ("english", "regex")),
                                           ("pydoc", ("text",))])
def test_an_embedded_corpus_is_the_same_every_time_and_its_splits_share_no_row(name, columns):
    one, two = (open_corpus(name, count=300, vocab=400) for _ in range(2))
    assert one.columns == columns and one.hash == two.hash and np.array_equal(one.tokens, two.tokens)
    assert open_corpus(name, one.tokenizer, split="test", count=300).hash != one.hash
    rows = {split: set(data._embedded(name, split, 300, 0)[1]) for split in ("train", "valid", "test")}
    assert all(rows.values()) and all(rows[a].isdisjoint(rows[b]) for a in rows for b in rows if a != b)


# ---------------------------------------------------------------------------------------------------------------- batches

@pytest.mark.parametrize("count", [1, 2, 3, 17, 64, 1000])
def test_the_shuffle_visits_every_row_once_and_differs_by_epoch_and_seed(count):
    orders = [data.permutation(np.arange(count), count, seed, np.full(count, epoch)) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert all(np.array_equal(np.sort(order), np.arange(count)) for order in orders)
    if count == 1000:
        assert all((orders[0] == other).sum() < 12 for other in (orders[1], orders[2], np.arange(count)))
        assert abs(np.corrcoef(orders[0], np.arange(count))[0, 1]) < 0.1


def test_a_shuffle_of_a_hundred_million_rows_costs_no_memory():
    tracemalloc.start()
    rows = data.permutation(np.arange(64), 10 ** 8, 3, np.zeros(64))
    assert tracemalloc.get_traced_memory()[1] < 100_000 and len(set(rows.tolist())) == 64 and rows.max() > 5 * 10 ** 7
    tracemalloc.stop()


def test_every_row_comes_once_an_epoch_over_steps_and_ranks(toy):
    ranks = [Batches(toy, 2, 25, seed=5, rank=rank, world=2) for rank in range(2)]
    first = lambda epoch: [example[0].tobytes() for step in range(12 * epoch, 12 * epoch + 12)
                           for one in ranks for example in one.examples(step)]
    everything = sorted(toy.ids(row, "en").tobytes() for row in range(600))
    assert sorted(first(0)) == sorted(first(1)) == everything and first(0) != first(1)


def test_a_batch_depends_on_seed_step_and_rank_alone(toy):
    key = lambda batches, step: [tuple(ids.tobytes() for ids in example) for example in batches.examples(step)]
    one, two = Batches(toy, 2, 8, 7, distinct=True), Batches(toy, 2, 8, 7, distinct=True)
    forwards = [key(one, step) for step in range(6)]
    assert [key(two, step) for step in reversed(range(6))] == forwards[::-1]
    assert key(Batches(toy, 2, 8, 8), 0) != forwards[0] != key(Batches(toy, 2, 8, 7, rank=1, world=2), 0)
    draw = lambda batches, step: batches.rng(step).random()
    assert draw(one, 3) == draw(two, 3) != draw(one, 4) and draw(one, 3) != draw(Batches(toy, 2, 8, 7, rank=1, world=2), 3)
    assert {len(ids) for example in Batches(toy, 1, 8, 7, max_length=4).examples(0) for ids in example} == {4}


def test_steps_that_look_ahead_share_out_the_same_examples_into_equal_numbers_of_tokens(toy):
    plain, even = (Batches(toy, 1, 16, 3, look_ahead=steps) for steps in (1, 8))
    ranks = [Batches(toy, 1, 8, 3, rank, 2, look_ahead=8) for rank in (0, 1)]
    key = lambda batches: sorted(ids.tobytes() for batch in batches for ids, in batch)
    for begin in (0, 8, 32):
        steps = range(begin, begin + 8)
        before, after = [plain.examples(step) for step in steps], [even.examples(step) for step in steps]
        assert key(before) == key(after)
        totals = lambda batches: [sum(len(ids) for ids, in batch) for batch in batches]
        assert max(totals(after)) - min(totals(after)) < 10 < 30 < max(totals(before)) - min(totals(before))
        both = [batches.examples(step) for step in steps for batches in ranks]
        assert max(totals(both)) - min(totals(both)) < 10
    again = Batches(toy, 1, 16, 3, look_ahead=8)                          # a pure function of the step: no order of calls matters
    assert all(key([again.examples(step)]) == key([even.examples(step)]) for step in (21, 5, 20))
    rows = {ids.tobytes() for step in range(8) for batches in ranks for ids, in batches.examples(step)}
    assert len(rows) > 8 * 16 * 0.9                                       # of one epoch: hardly a text comes twice


def test_no_text_occurs_twice_in_a_distinct_batch(tmp_path):
    tsv(tmp_path / "a.tsv", [(f"hello {i // 4}", f"hallo {i} {i % 7}") for i in range(80)])  # 20 different first sides
    corpus = small(tmp_path / "a.tsv", holdout=False)
    for batch in (12, 20):
        for step in range(10):
            examples = Batches(corpus, 2, batch, 1, distinct=True).examples(step)
            assert len({ids.tobytes() for example in examples for ids in example}) == 2 * batch
    with pytest.raises(BadInput, match="--batch 21: a has only 20 rows"):
        Batches(corpus, 2, 21, 1, distinct=True)
    assert len(Batches(corpus, 2, 200, 1).examples(0)) == 200
    with pytest.raises(BadInput, match="pydoc has the single column 'text'"):
        Batches(open_corpus("pydoc", vocab=300), 2, 4, 1)


def test_no_text_occurs_twice_in_the_distinct_batches_of_two_ranks_together(tmp_path):
    tsv(tmp_path / "a.tsv", [(f"hello {i // 4}", f"hallo {i} {i % 7}") for i in range(80)])
    corpus = small(tmp_path / "a.tsv", holdout=False)
    text = lambda examples: [tuple(ids.tobytes() for ids in example) for example in examples]
    for batch, views in ((6, 2), (10, 2), (10, 1)):
        ranks = [Batches(corpus, views, batch, 1, rank, 2, distinct=True) for rank in range(2)]
        for step in range(10):
            both = [text(one.examples(step)) for one in ranks]
            assert [len(one) for one in both] == [batch, batch] and len({ids for pair in both[0] + both[1] for ids in pair}) == 2 * batch * views
            assert both[0] + both[1] == text(Batches(corpus, views, 2 * batch, 1, distinct=True).examples(step))  # as one rank with all
    with pytest.raises(BadInput, match="--batch 11 on each of 2 ranks: a has only 20 rows.*use --batch 10 or less"):
        Batches(corpus, 2, 11, 1, world=2, distinct=True)


def test_prefetch_keeps_the_order_hands_on_errors_and_ends_when_closed():
    assert list(data.prefetch(lambda step: step * step, 3, 40)) == [step * step for step in range(3, 40)]
    made = []
    supply = data.prefetch(lambda step: made.append(step) or 1 / (3 - step), 0, 9)
    assert [next(supply) for _ in range(3)] and made[0] == 0
    with pytest.raises(ZeroDivisionError):
        next(supply)
    supply = data.prefetch(lambda step: step, 0, 10 ** 9, depth=2)
    assert next(supply) == 0
    start = time.perf_counter()
    supply.close()
    assert time.perf_counter() - start < 1 and not [one for one in threading.enumerate() if one.name == "prefetch"]


# ---------------------------------------------------------------------------------------------------------------- inspect

@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.name)
def test_inspect_shows_a_batch_of_every_objective(toy, capsys, monkeypatch, objective):
    monkeypatch.setattr(data, "open_corpus", lambda *_, **__: toy)
    assert data.main(["inspect", "--objective", objective.name, "--batch", "8", "--step", "2", "--rows", "3", "--width", "90"]) == 0
    said = capsys.readouterr()
    out = said.out.splitlines()
    config = train.parse(["--objective", objective.name])[3]
    batches = Batches(toy, objective.views, 8, 0, distinct=objective.distinct, max_length=128)
    batch = objective.collate(batches.examples(2), batches.rng(2), config, toy.special)
    assert out[0] == f"{objective.name}: step 2, seed 0, 8 examples of toy" and not said.err
    packed = batch["packed"]
    assert any(line.startswith(f"packed: {len(packed):,} rows, {len(packed.tokens):,} tokens; a row has ") for line in out)
    assert all(any(line.startswith(f"{name}: ") for line in out) for name in batch) and max(map(len, out[2:])) <= 120
    shown = sum(min(3, len(value)) for value in batch.values() if hasattr(value, "sees"))
    assert len([line for line in out if line.startswith("  row ")]) == shown
    if "labels" in batch:
        assert any(line.startswith(f"  {len(batch['labels']):,} targets, ") for line in out)
        shown = [row * len(packed) // 3 for row in range(3)]
        own = sum(int(((batch["labels"] >= packed.rows[row]) & (batch["labels"] < packed.rows[row + 1])).sum()) for row in shown)
        start = next(place for place, line in enumerate(out) if line.startswith("packed: "))
        text = "".join(itertools.takewhile(lambda line: line.startswith("  "), out[start + 1:]))
        assert text.count("→") + text.replace("[PRED_", "").count("_") / 2 == own


def test_inspect_reads_files_marks_words_and_refuses_bad_input_in_one_line(tmp_path, capsys):
    tsv(tmp_path / "a.tsv", PAIRS)
    flags = ["inspect", "--data", str(tmp_path / "a.tsv"), "--cache", str(tmp_path / "cache"), "--vocab", "300"]
    assert data.main([*flags, "--objective", "mexma", "--batch", "4", "--langs", "de,en", "--mask-first", "1", "--rows", "1"]) == 0
    assert "4 examples of a" in (out := capsys.readouterr().out) and "[MASK→" in out and "see 0-" in out
    for wrong in (["--objective", "mexmo"], ["--bogus"], ["--step", "x"], ["--step", "-1"], ["--width", "3"], ["--langs", "xx"], ["--batch", "99"]):
        assert data.main([*flags, *wrong]) == 2
        said = capsys.readouterr()
        assert said.err.startswith("error: ") and said.err.count("\n") == 1 and not said.out
    assert data.main(["prepare", "x.tsv", "--bogus"]) == 2


def test_what_tokens_see_is_told_in_runs():
    view = lambda n, **options: View(np.arange(n), **options)
    packed = Packed.views([[view(6), view(4, causal=True), view(3, causal=True, shares=(0, 4)), view(1), view(2, positions=np.array([3, 7]))]])
    assert data._seen(packed.sees) == "0-5 see 0-5; 6-9 see 6..itself; 10-12 see 10..itself and 0-3; 13 sees 13; 14-15 see 14-15"
    assert data._counted(packed.positions.tolist()) == "0-5, 0-6, 0, 3, 7"


# ------------------------------------------------------------------------------------------------------------------ masks

@pytest.fixture(scope="module")
def line(toy):
    """100,000 tokens in sentences that begin with [CLS] and end with [SEP]."""
    mark = toy.special
    row = [part for row in range(600) for name in toy.columns for part in ([mark.cls], toy.ids(row, name), [mark.sep])]
    return np.resize(np.concatenate(row), 100_000).astype(np.uint32)


def near(count, total, ratio):
    return abs(count - total * ratio) < 3 * np.sqrt(total * ratio * (1 - ratio))


def test_choose_keeps_its_ratio_and_spares_special_tokens(toy, line):
    barred = np.isin(line, toy.special.ids)
    chosen = data.choose(line, .4, np.random.default_rng(1), toy.special)
    assert near(chosen.sum(), (~barred).sum(), .4) and not (chosen & barred).any()
    everything = data.choose(line, .15, np.random.default_rng(1), toy.special, exempt=False)
    assert near(everything.sum(), len(line), .15) and near((everything & barred).sum(), barred.sum(), .15)
    other = data.choose(line, .4, np.random.default_rng(2), toy.special)
    assert near((chosen & other).sum(), (~barred).sum(), .16)  # two sides draw independent masks
    twice = np.random.default_rng(1)
    assert np.array_equal(chosen, data.choose(line, .4, twice, toy.special)) and \
        not np.array_equal(chosen, data.choose(line, .4, twice, toy.special))


def test_at_least_and_exactly_are_kept_also_where_little_is_eligible(toy):
    mark, rng = toy.special, np.random.default_rng(0)
    for words in range(5):
        ids = np.array([mark.cls, *range(20, 20 + words), mark.sep])
        for wanted in range(4):
            chosen = data.choose(ids, 0, rng, mark, at_least=wanted)
            assert chosen.sum() == min(wanted, words) and not chosen[[0, -1]].any()
        assert data.choose_exact(ids, .15, rng, mark).sum() == min(words, 1)
    assert data.choose_exact(np.arange(15, 115), .299, rng, mark).sum() == 29
    counts = sum(data.choose(np.array([mark.cls, 20, 21, 22, 23]), 0, rng, mark, at_least=1) for _ in range(4000))
    assert counts[0] == 0 and all(near(count, 4000, .25) for count in counts[1:])


def test_whole_words_are_chosen_whole(toy, line):
    chosen = data.choose_words(line, .3, np.random.default_rng(3), toy.special)
    barred = np.isin(line, toy.special.ids)
    inside = ~toy.special.starts[line] & ~barred
    inside[1:] &= ~barred[:-1]  # a token that continues the word before it
    assert inside.sum() > 5000 and (chosen[1:] == chosen[:-1])[inside[1:]].all() and not (chosen & barred).any()
    assert near(chosen[~inside & ~barred].sum(), (~inside & ~barred).sum(), .3)  # words; tokens in words vary more


def test_words_begin_at_spaces_and_at_punctuation_but_not_inside_of_letters():
    tokenizer = data.train_tokenizer([], 300)  # no merges: every byte is a token
    ids, = data.encode(tokenizer, ["für 12, 日本"])
    starts = data.special(tokenizer).starts[ids]
    text = " für 12, 日本".encode()
    assert [text[place:place + 1] for place in np.flatnonzero(starts)] == [b" ", b" ", b",", b" "]
    merged = data.train_tokenizer(["füü üü für"] * 3, 300)
    starts, pieces = data.special(merged).starts, merged.get_vocab()
    assert sum("Ã¼" in piece for piece in pieces) > 2
    assert all(starts[place] == piece.startswith("Ġ") for piece, place in pieces.items() if "Ã¼" in piece)


@pytest.mark.parametrize("ratio, mean", [(.15, 3), (.5, 3), (.3, 6)])
def test_spans_have_the_ratio_and_the_mean_length_asked_for(toy, ratio, mean):
    ids = np.full(100_000, 20)
    chosen = data.choose_spans(ids, ratio, np.random.default_rng(4), toy.special, mean)
    edges = np.diff(np.concatenate([[0], chosen.astype(int), [0]]))
    lengths = np.flatnonzero(edges == -1) - np.flatnonzero(edges == 1)
    assert abs(chosen.mean() - ratio) < 3 * np.sqrt(ratio * (1 - ratio) * 2 * mean / len(ids))  # a span counts as few draws
    assert abs(lengths.mean() - mean) < 3 * np.sqrt(mean * (mean - 1) / len(lengths))
    assert near((lengths == 1).sum(), len(lengths), 1 / mean)
    short = sum(data.choose_spans(ids[:7], ratio, np.random.default_rng(seed), toy.special, mean) for seed in range(4000))
    assert all(abs(count - 4000 * ratio) < 4 * np.sqrt(4000 * ratio * (1 - ratio)) for count in short)  # at every place
    assert not data.choose_spans(np.array([2, 3, 0]), ratio, np.random.default_rng(5), toy.special, mean).any()


def test_spans_at_the_edges_of_what_can_be_asked(toy):
    ids, rng = np.arange(15, 40), np.random.default_rng(0)
    assert not data.choose_spans(ids, 0, rng, toy.special).any() and len(data.choose_spans(ids[:0], .2, rng, toy.special)) == 0
    with pytest.raises(BadInput, match="at most 0.75"):
        data.choose_spans(ids, .9, rng, toy.special)


def test_corruption_is_80_10_10_and_leaves_the_rest_alone(toy, line):
    mark = toy.special
    ids = np.where(np.isin(line, mark.ids), 20, line).astype(np.uint32)
    before, chosen = ids.copy(), data.choose(ids, .5, np.random.default_rng(5), mark)
    new = data.corrupt(ids, chosen, np.random.default_rng(6), mark)
    total = int(chosen.sum())
    assert np.array_equal(ids, before) and np.array_equal(new[~chosen], ids[~chosen]) and new.dtype == ids.dtype
    share = 1 / mark.vocab
    assert near((new[chosen] == mark.mask).sum(), total, .8 + .1 * share)
    assert near((new[chosen] == ids[chosen]).sum(), total, .1 + .1 * share)
    drawn = np.isin(new, mark.ids) & chosen & (new != mark.mask)
    assert near(drawn.sum(), total, .1 * 14 * share)  # random ids come from the whole vocabulary
    plain = data.corrupt(ids, np.ones(len(ids), bool), np.random.default_rng(7), mark, mask=0, random=1, random_specials=False)
    assert not np.isin(plain, mark.ids).any() and set(plain.tolist()) == set(range(mark.vocab)) - set(mark.ids.tolist())


def test_neighbours_are_columns_that_follow_each_other(tmp_path):
    path = tmp_path / "captions.tsv"
    rows = [[f"word{column} row{row}" for column in range(5)] for row in range(40)]
    path.write_text("en1\ten2\ten3\ten4\ten5\n" + "\n".join("\t".join(row) for row in rows) + "\n", encoding="utf-8")
    corpus = data.open_corpus(str(path), vocab=300, cache=tmp_path / "cache", holdout=False)
    batches = data.Batches(corpus, 2, 40, 0, pairs="neighbours")
    pairs = [[corpus.tokenizer.decode(ids).split()[0] for ids in example] for step in range(5) for example in batches.examples(step)]
    assert {tuple(pair) for pair in pairs} == {(f"word{i}", f"word{i + 1}") for i in range(4)}


@pytest.mark.parametrize("name, content, message", [("a.tsv", "en\ten\na\tb\n", "names a column twice"),
                                                    ("a.jsonl", '{"translation": {}}\n', "translation is empty"),
                                                    ("a.txt", "fine\n" + "x" * 20_000 + "\n", "a.txt:2: a word of 20,000 characters")])
def test_more_bad_files_are_named(name, content, message, tmp_path):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(data.BadInput, match=message):
        data.open_corpus(str(tmp_path / name), vocab=300, cache=tmp_path / "cache", holdout=False)
