"""data.py: tokenizers and rows of ids, the token store, the order of the rows, the masks."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from test_text import PAIRS, tsv
from tokenizers import Tokenizer as Inner
from tokenizers import models, pre_tokenizers

import corpora
import data
from corpora.program import BadInput
from data import Batches, Tokenizer, open_corpus

REPEATS = [(f"hello {i // 4}", f"hallo {i}") for i in range(80)]  # 20 different first texts


def small(path, tokenizer=None, **options):
    cache = Path(path).parent / "cache"
    return open_corpus(path, tokenizer, cache=cache, vocab=300, **options)


def texts(examples):
    return [tuple(ids.tobytes() for ids in example) for example in examples]


@pytest.fixture(scope="module")
def toy():
    return open_corpus("toy", count=600, vocab=500)


# ---- tokenizers and rows of ids


def test_a_trained_tokenizer_is_the_same_each_time_and_decodes_to_the_text(tmp_path):
    lines = [text for pair in PAIRS for text in pair] + ["日本語 and русский, too"]
    one = Tokenizer.train(lines, 400)
    assert one.hash == Tokenizer.train(lines, 400).hash
    for text in (*lines, "never seen: 🙂\t¼ ½", "[MASK] spelled out is text"):
        ids, = one.encode([text])
        assert one.decode(ids) == text and not np.isin(ids, one.special.ids).any()
    assert [one.inner.id_to_token(index) for index in range(15)] == list(data.ROLES)
    assert one.special.preds == tuple(range(5, 15)) and one.vocab == len(one.special.starts)
    one.inner.enable_truncation(3)
    one.save(tmp_path / "t.json")
    read = Tokenizer.read(tmp_path / "t.json")  # truncation is off again
    more = read.with_tokens(["[VIEW]"])
    assert read.with_tokens(["[MASK]"]) is read and more.vocab == read.vocab + 1
    assert read.hash == one.hash != more.hash
    assert more.encode(["[VIEW]"])[0].tolist() == read.encode(["[VIEW]"])[0].tolist()


def test_a_text_gets_the_ids_that_the_library_gives_it_whole(toy):
    rng = np.random.default_rng(0)
    parts = [*" \t\n\r\x0b\x1c\x1f\x85\xa0\u2000\u200b\u2028\u3000\ufeff'abs1²_.!-ßЖ日本\u0301🙂",
             "'s", " the", " ", "  ", "[SEP]", "</s>"]
    lines = ["".join(rng.choice(parts, rng.integers(12))) for _ in range(3000)]
    whole = toy.tokenizer.inner.encode_batch_fast(lines, add_special_tokens=False)
    for ids, found in zip(toy.tokenizer.encode(lines), whole, strict=True):
        assert ids.tolist() == found.ids


def test_roles_are_found_in_tokenizers_of_bert_and_of_xlm_r():
    pieces = (*data.ROLES[:5], "play", "##ing", "!")
    bert = Inner(models.WordPiece({piece: index for index, piece in enumerate(pieces)}))
    bert.add_special_tokens(list(pieces[:5]))
    found = Tokenizer(bert).special
    assert found[:6] == (0, 2, 3, 4, (), 8) and found.ids.tolist() == [0, 1, 2, 3, 4]
    assert found.starts[5:].tolist() == [True, False, True]
    pieces = ("<s>", "<pad>", "</s>", "<unk>", "▁play", "ing", ",", "é", "語", "<mask>")
    xlm = Inner(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=3))
    xlm.pre_tokenizer = pre_tokenizers.Metaspace()
    xlm.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    found = Tokenizer(xlm).special
    assert found[:6] == (1, 0, 2, 9, (), 10) and found.ids.tolist() == [0, 1, 2, 3, 9]
    assert found.starts[4:9].tolist() == [True, False, True, False, True]
    maskless = Tokenizer(Inner(models.WordLevel({"[CLS]": 0, "[SEP]": 1}))).special
    with pytest.raises(BadInput, match=r"no mask token \(\[MASK\] or <mask>\)"):
        data.corrupt(np.array([0]), np.array([True]), np.random.default_rng(0), maskless)


def test_words_begin_at_spaces_and_at_punctuation_but_not_inside_of_letters():
    tokenizer = Tokenizer.train([], 300)  # no merges: every byte is a token
    ids, = tokenizer.encode(["für 12, 日本"])
    text = " für 12, 日本".encode()
    starts = np.flatnonzero(tokenizer.special.starts[ids])
    assert [text[index:index + 1] for index in starts] == [b" ", b" ", b",", b" "]


# ---- corpora and their store


def test_the_store_holds_what_encoding_in_memory_gives_and_is_used_again(tmp_path, capsys):
    path = tsv(tmp_path / "a.tsv", PAIRS)
    first = small(path, holdout=False)
    made = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*.*")}
    opened = first, small(path, holdout=False), small(path, first.tokenizer, holdout=False)
    assert made == {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*.*")}
    assert {corpus.hash for corpus in opened} == {first.hash} != {small(path).hash}
    expected = first.tokenizer.encode([text for pair in PAIRS for text in pair])
    for corpus in opened:
        found = [corpus.ids(row, name) for row in range(40) for name in ("en", "de")]
        assert all(map(np.array_equal, found, expected))
    assert not capsys.readouterr().err
    changes = [("the dog number 0 sleeps", PAIRS[0][1]), *PAIRS[1:]]  # as long as before
    tsv(tmp_path / "a.tsv", changes)
    changed = small(path, holdout=False).hash
    other = small(path, Tokenizer.train(["something else"] * 3, 290), holdout=False).hash
    assert len({first.hash, changed, other}) == 3
    assert first.tokenizer.decode(first.ids(0, "en")).startswith("the cat")


def test_rows_held_out_are_not_trained_on_and_an_evaluation_reads_the_same(tmp_path):
    path = tsv(tmp_path / "a.tsv", PAIRS)
    train, test = ([corpus.tokenizer.decode(corpus.ids(row, "en")) for row in range(len(corpus))]
                   for corpus in (small(path), small(path, split="test")))
    assert sorted(train + test) == sorted(en for en, _ in PAIRS)
    assert test == corpora.evaluation_rows(path).texts["en"] and len(test) == 4


def test_a_file_of_many_chunks_is_read_as_one_of_a_single_chunk(tmp_path, monkeypatch):
    path = tsv(tmp_path / "a.tsv", PAIRS)
    whole = small(path)
    monkeypatch.setattr("corpora.split.CHUNK", 7)
    monkeypatch.setattr("corpora.store.CHUNK", 7)
    (tmp_path / "cache").rename(tmp_path / "first")
    chunks = small(path)
    assert chunks.hash == whole.hash and chunks.tokenizer.hash == whole.tokenizer.hash
    assert chunks.held.tolist() == whole.held.tolist()


def test_a_file_that_is_moved_has_the_same_rows_and_one_that_changes_is_read_anew(tmp_path):
    first = small(tsv(tmp_path / "a.tsv", PAIRS))
    (tmp_path / "a.tsv").rename(tmp_path / "b.tsv")
    moved = small(tmp_path / "b.tsv", first.tokenizer)
    assert moved.hash == first.hash and moved.held.tolist() == first.held.tolist()
    times = (tmp_path / "b.tsv").stat()
    os.utime(tmp_path / "b.tsv", ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    made = set((tmp_path / "cache").iterdir())
    assert small(tmp_path / "b.tsv", first.tokenizer).hash == first.hash
    assert len(set((tmp_path / "cache").iterdir()) - made) == 1


def test_copies_of_a_held_out_row_are_left_out_of_training_and_that_is_said(tmp_path, capsys):
    path = tsv(tmp_path / "a.tsv", PAIRS * 5)
    train, test = small(path), small(path, split="test")
    said = "a: 16 rows share a text with a held-out row and are left out of training\n"
    assert (len(train), len(test)) == (180, 4) and capsys.readouterr().err == said
    texts = [{corpus.ids(row, "en").tobytes() for row in range(len(corpus))}
             for corpus in (train, test)]
    assert not texts[0] & texts[1]
    assert len(small(path, holdout=False)) == 200 and not capsys.readouterr().err


def test_files_without_a_row_are_refused(tmp_path):
    with pytest.raises(BadInput, match="h.tsv has no row that can be used .left out 0 bad lines"):
        small(tsv(tmp_path / "h.tsv", [("a", "", "")], "en\tde\tfr\n"))


def test_an_interrupted_store_is_not_taken_for_whole(tmp_path, monkeypatch, capsys):
    path = tsv(tmp_path / "a.tsv", [*PAIRS, ("only one", " ")])
    def stopped(*_):
        raise KeyboardInterrupt
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(np, "cumsum", stopped)
        small(path, skip_bad=True)
    assert not list((tmp_path / "cache").rglob("tokens.bin"))
    (next((tmp_path / "cache").iterdir()) / ".killed.part").mkdir()
    tsv(tmp_path / "a.tsv", PAIRS, "Hello\tHallo\nonly one\t\n")
    for _ in range(2):  # the second time from the cache
        assert len(small(path, skip_bad=True, holdout=False)) == 40
        small(path, skip_bad=True, holdout=False, split="valid")
        corpora.evaluation_rows(path, split="valid", skip_bad=True)
        first, second = capsys.readouterr().err.splitlines()
        assert "the first line, Hello, Hallo, names the columns" in first
        assert "a: kept 40 rows, left out 1 bad lines" in second


def test_programs_that_make_a_store_at_once_all_get_it_whole(tmp_path):
    path = tsv(tmp_path / "a.tsv", PAIRS * 20)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: small(path, holdout=False), range(4)))
    assert [len(corpus) for corpus in found] == [800] * 4
    assert all(np.array_equal(corpus.tokens, found[0].tokens) for corpus in found)


def test_one_text_can_be_run_together_in_blocks(toy):
    text = corpora.open_text("toy", "de", count=50)
    whole, block = (open_corpus(text, toy.tokenizer, block=size) for size in (0, 16))
    found = [block.example(row, 1, 0)[0] for row in range(len(block))]
    assert np.array_equal(np.concatenate(found), whole.tokens[:len(whole.tokens) // 16 * 16])


@pytest.mark.parametrize("options, said", [
    ({"split": "dev"}, "split 'dev': choose train, valid or test"),
    ({"block": 16}, "--block 16 runs one text together, and a has the columns en, de"),
    ({"block": 16, "langs": "en"}, "--block 16 would run across the rows held out of a"),
    ({"block": 9999, "langs": "en", "holdout": False}, "a has no rows for 'all': 0 in all"),
    ({"vocab": 200}, "vocab is 200")])
def test_what_cannot_be_opened_is_refused_in_one_line(tmp_path, options, said):
    path = tsv(tmp_path / "a.tsv", PAIRS)
    with pytest.raises(BadInput, match="^[^\n]*$") as error:
        open_corpus(path, **({"vocab": 300, "cache": tmp_path} | options))
    assert said in str(error.value)
    with pytest.raises(BadInput, match="a.tsv is no tokenizer.json that can be read: [^\n]*$"):
        Tokenizer.read(path)


# ---- batches


def test_every_row_comes_once_an_epoch_in_another_order(toy):
    def epoch(number, seed=5):
        ranks = [Batches(toy, 2, 25, seed, rank, 2) for rank in range(2)]
        return [example[0].tobytes() for step in range(12 * number, 12 * number + 12)
                for one in ranks for example in one.examples(step)]
    everything = [toy.ids(row, "en").tobytes() for row in range(600)]
    orders = [epoch(0), epoch(1), epoch(0, seed=6), everything]
    assert all(sorted(order) == sorted(everything) for order in orders)
    assert all(sum(map(bytes.__eq__, orders[0], other)) < 12 for other in orders[1:])


@pytest.mark.parametrize("in_batch", [False, True])
def test_a_batch_depends_on_seed_step_and_rank_alone(toy, in_batch):
    def make(seed, rank=0, world=1):
        return Batches(toy, 2, 8, seed, rank, world, in_batch)
    one, two, other = make(7), make(7), make(7, 1, 2)
    forwards = [texts(one.examples(step)) for step in (0, 70, 74, 75, 150)]
    assert [texts(two.examples(step)) for step in (150, 75, 74, 70, 0)] == forwards[::-1]
    assert texts(make(8).examples(0)) != forwards[0] != texts(other.examples(0))
    draws = [one.rng(3).random(), two.rng(3).random(), one.rng(4).random(), other.rng(3).random()]
    assert draws[0] == draws[1] and len(set(draws)) == 3


def test_no_text_is_twice_in_a_step_that_compares_over_all_ranks(tmp_path):
    corpus = small(tsv(tmp_path / "a.tsv", REPEATS), holdout=False)
    for batch, views in ((6, 2), (10, 1)):
        ranks = [Batches(corpus, views, batch, 1, rank, 2, True) for rank in range(2)]
        alone = Batches(corpus, views, 2 * batch, 1, in_batch=True)
        for step in range(10):
            both = texts(ranks[0].examples(step)) + texts(ranks[1].examples(step))
            assert both == texts(alone.examples(step)) and len(both) == 2 * batch
            assert len({ids for example in both for ids in example}) == 2 * batch * views
    with pytest.raises(BadInput, match="--batch 11 on 2 rank.*has only 20 rows"):
        Batches(corpus, 2, 11, 1, world=2, in_batch=True)


def test_an_example_knows_its_columns_and_what_of_it_is_cut(tmp_path):
    table = [("", "h", "i b c d e"), ("j k l m", "", "n"), ("o", "p", "q r s t u v")]
    corpus = small(tsv(tmp_path / "w.tsv", table, "en\tde\tfr\n"), holdout=False)
    assert corpus.count_cut(3) == (3, 7) and corpus.count_cut(99) == (0, 7)
    assert open_corpus("toy", corpus.tokenizer, langs="de", count=9, block=16).count_cut(9)[0] > 9
    found = set()
    for step in range(9):
        for example in Batches(corpus, 2, 3, 0, max_length=3).examples(step):
            found.add((example.columns, example.cut))
            assert max(map(len, example)) <= 3
    assert found == {((1, 2), (False, True)), ((2, 1), (True, False)), ((0, 2), (True, False)),
                     ((0, 1), (False, False)), ((0, 2), (False, True))}
    plain = data.Example(["a", "b"])
    assert plain.columns == (0, 1) and plain.cut == (False, False) and plain == ("a", "b")


def test_chats_may_open_alike_and_end_with_their_system_text(tmp_path):
    rows = [("Answer.", f"question {i // 2}", f"answer {i}") for i in range(60)]
    corpus = small(tsv(tmp_path / "a.tsv", rows, "system\tuser\tassistant\n"))
    system = corpus.tokenizer.encode(["Answer."])[0]
    for step in range(5):
        examples = Batches(corpus, 2, 20, 0, in_batch=True, system=True).examples(step)
        assert all(np.array_equal(example[2], system) for example in examples)
        assert len({text for example in texts(examples) for text in example[:2]}) == 40
    with pytest.raises(BadInput, match="--chat system: toy has no system texts"):
        Batches(open_corpus("toy", corpus.tokenizer, count=20), 2, 4, 0, system=True)
    with pytest.raises(BadInput, match="documents has the single column 'text'"):
        Batches(open_corpus("documents", corpus.tokenizer, count=1), 2, 4, 1)


def test_views_are_the_pivot_and_another_or_any_two_or_neighbours(tmp_path):
    table = [("a", "b", "c"), ("d", "", "f"), ("", "h", "i")]
    corpus = small(tsv(tmp_path / "w.tsv", table, "en\tde\tfr\n"), holdout=False)
    def found(row, views, pairs="pivot"):
        examples = [corpus.example(row, views, choice, pairs) for choice in range(9)]
        return {tuple(map(corpus.tokenizer.decode, example)) for example in examples}
    assert [found(row, 2) for row in range(3)] == [
        {("a", "b"), ("a", "c")}, {("d", "f")}, {("h", "i"), ("i", "h")}]
    assert found(0, 2, "neighbours") == {("a", "b"), ("b", "c")}
    assert found(1, 1) == {("d",), ("f",)} and len(corpus.ids(1, "de")) == 0


def test_prefetch_keeps_the_order_hands_on_errors_and_ends_when_closed():
    assert list(data.prefetch(lambda step: step * step, 3, 40)) == [n * n for n in range(3, 40)]
    supply = data.prefetch(lambda step: 1 / (1 - step), 0, 9)
    assert next(supply) == 1
    with pytest.raises(ZeroDivisionError):
        next(supply)
    supply = data.prefetch(lambda step: step, 0, 10 ** 9, depth=2)
    assert next(supply) == 0
    supply.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("prefetch")]


# ---- masks


@pytest.fixture(scope="module")
def line(toy):
    """100,000 tokens in sentences that begin with [CLS] and end with [SEP]."""
    special = toy.special
    cells = [[special.cls, *toy.ids(row, name), special.sep] for row in range(600)
             for name in toy.columns]
    return np.resize(np.concatenate(cells), 100_000).astype(np.uint32)


def near(count, total, ratio, deviations=3):
    return abs(count - total * ratio) < deviations * np.sqrt(total * ratio * (1 - ratio))


def test_a_sample_keeps_its_ratio_and_spares_special_tokens(toy, line):
    barred = np.isin(line, toy.special.ids)
    def sample(ratio, seed, **options):
        return data.token_mask(line, ratio, np.random.default_rng(seed), toy.special, **options)
    chosen = sample(.4, 1)
    assert near(chosen.sum(), (~barred).sum(), .4) and not (chosen & barred).any()
    assert near((chosen & sample(.4, 2)).sum(), (~barred).sum(), .16)  # independent of each other
    assert near((sample(.15, 1, exempt=False) & barred).sum(), barred.sum(), .15)


def test_at_least_and_exactly_are_kept_also_where_little_is_eligible(toy):
    special, rng = toy.special, np.random.default_rng(0)
    for words in range(5):
        ids = np.array([special.cls, *range(20, 20 + words), special.sep])
        for ratio, wanted in ((0, 0), (1e-9, 1)):
            chosen = data.token_mask(ids, ratio, rng, special)
            assert chosen.sum() == min(wanted, words) and not chosen[[0, -1]].any()
        assert data.exact_mask(ids, .15, rng, special).sum() == min(words, 1)
    assert data.exact_mask(np.arange(15, 115), .299, rng, special).sum() == 29


def test_whole_words_are_chosen_whole(toy, line):
    chosen = data.whole_word_mask(line, .3, np.random.default_rng(3), toy.special)
    barred = np.isin(line, toy.special.ids)
    inside = ~toy.special.starts[line] & ~barred
    inside[1:] &= ~barred[:-1]  # a token that continues the word before it
    assert inside.sum() > 5000 and (chosen[1:] == chosen[:-1])[inside[1:]].all()
    words = ~inside & ~barred  # tokens in words vary more
    assert near(chosen[words].sum(), words.sum(), .3) and not (chosen & barred).any()


@pytest.mark.parametrize("ratio, mean", [(.15, 3), (.5, 3), (.3, 6)])
def test_spans_have_the_ratio_and_the_mean_length_asked_for(toy, ratio, mean):
    def spans(ids, seed):
        return data.span_mask(ids, ratio, np.random.default_rng(seed), toy.special, mean)
    ids = np.full(100_000, 20)
    chosen = spans(ids, 4)
    edges = np.diff(np.concatenate([[0], chosen.astype(int), [0]]))
    lengths = np.flatnonzero(edges == -1) - np.flatnonzero(edges == 1)
    assert near(chosen.sum() / (2 * mean), len(ids) / (2 * mean), ratio)  # a span is few draws
    assert abs(lengths.mean() - mean) < 3 * np.sqrt(mean * (mean - 1) / len(lengths))
    at_each_index = sum(spans(ids[:7], seed) for seed in range(4000))
    assert all(near(count, 4000, ratio, 4) for count in at_each_index)
    assert not spans(np.array([2, 3, 0]), 5).any() and len(spans(ids[:0], 5)) == 0
    with pytest.raises(BadInput, match="at most 0.75"):
        data.span_mask(ids, .9, np.random.default_rng(0), toy.special)


def test_corruption_is_80_10_10_and_leaves_the_rest_alone(toy, line):
    special = toy.special
    ids = np.where(np.isin(line, special.ids), 20, line).astype(np.uint32)
    before = ids.copy()
    chosen = data.token_mask(ids, .5, np.random.default_rng(5), special)
    new = data.corrupt(ids, chosen, np.random.default_rng(6), special)
    total, share = int(chosen.sum()), 1 / special.vocab
    assert np.array_equal(new[~chosen], before[~chosen]) and np.array_equal(ids, before)
    assert near((new[chosen] == special.mask).sum(), total, .8 + .1 * share)
    assert near((new[chosen] == ids[chosen]).sum(), total, .1 + .1 * share)
    drawn = np.isin(new, special.ids) & chosen & (new != special.mask)
    assert near(drawn.sum(), total, .1 * 14 * share)  # random ids are of the whole vocabulary
