"""data.py: tokenizers and rows of ids, corpora, the order of the rows, the masks."""

import threading

import numpy as np
import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import models

import corpora
import data
from base.common import BadInput
from base.tokenizer import ROLES, Tokenizer, add_special, tokenize_rows
from data import Batches, open_corpus
from objectives import mask_rows

PAIRS = [(f"the cat number {i} sleeps", f"die Katze Nummer {i} schläft") for i in range(40)]
# 20 different first texts
REPEATS = [(f"hello {i // 4}, how are you today?", f"hallo {i}") for i in range(80)]


@pytest.fixture
def table(tmp_path, monkeypatch):
    """table(rows, header, **options): the Corpus of a TSV file, with all rows."""
    monkeypatch.chdir(tmp_path)  # the cache is in the working folder

    def open_table(rows, header="en\tde", tokenizer=None, **options):
        lines = [header, *("\t".join(row) for row in rows)]
        (tmp_path / "a.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return open_corpus("a.tsv", tokenizer, vocab=300, holdout=False, **options)
    return open_table


@pytest.fixture(scope="module")
def toy():
    return open_corpus("toy", count=600, vocab=500)


def as_bytes(examples):
    return [tuple(ids.tobytes() for ids in example.views) for example in examples]


# ---- tokenizers and rows of ids


def test_a_trained_tokenizer_is_the_same_each_time_and_decodes_to_the_text(tmp_path):
    lines = [text for pair in PAIRS for text in pair] + ["日本語 and русский, too"]
    one = Tokenizer.train(lines, 400)
    assert one.hash == Tokenizer.train(lines, 400).hash
    for text in (*lines, "never seen: 🙂\t¼ ½", "[MASK] spelled out is text"):
        ids, = one.encode([text])
        assert one.decode(ids) == text and not np.isin(ids, one.special.ids).any()
    assert [one.inner.id_to_token(index) for index in range(15)] == list(ROLES)
    assert one.special.preds == tuple(range(5, 15)) and one.vocab == one.inner.get_vocab_size()
    one.inner.enable_truncation(3)
    one.save(tmp_path / "t.json")
    read = Tokenizer.read(tmp_path / "t.json", ([2, 7], []))  # truncation is off again
    more = read.with_tokens(["[VIEW]"])
    assert read.with_tokens(["[MASK]"]) is read and more.vocab == read.vocab + 1
    assert read.hash == one.hash != more.hash
    assert more.encode(["[VIEW]"])[0].tolist() == read.encode(["[VIEW]"])[0].tolist()
    assert add_special([9], one.special).tolist() == [2, 9, 3]
    assert add_special([9], more.special).tolist() == [2, 7, 9]


def test_the_trainer_of_a_tokenizer_gets_a_long_word_in_parts():
    """The library's trainer is quadratic in a word: 300,000 letters took 23 s."""
    letters = "abcdefg" * 1000
    parts = " ".join(letters[start:start + 1000] for start in range(0, 7000, 1000))
    whole = Tokenizer.train(["a dog runs", letters], 400)
    assert whole.hash == Tokenizer.train(["a dog runs", parts], 400).hash
    assert whole.decode(whole.encode([letters])[0]) == letters


def test_a_text_gets_the_ids_that_the_library_gives_it_whole(toy):
    rng = np.random.default_rng(0)
    parts = [*" \t\n\r\x0b\x1c\x1f\x85\xa0\u2000\u200b\u2028\u3000\ufeff'abs1²_.!-ßЖ日本\u0301🙂",
             "'s", " the", " ", "  ", "[SEP]", "</s>"]
    lines = ["".join(rng.choice(parts, rng.integers(12))) for _ in range(3000)]
    encodings = toy.tokenizer.inner.encode_batch_fast(lines, add_special_tokens=False)
    for ids, encoding in zip(toy.tokenizer.encode(lines), encodings, strict=True):
        assert ids.tolist() == encoding.ids


WORD_PIECES = (*ROLES[:5], "play", "##ing", "!")
UNIGRAMS = ("<s>", "<pad>", "</s>", "<unk>", "▁play", "ing", ",", "é", "語", "<mask>")


@pytest.mark.parametrize("model, names, roles", [
    (models.WordPiece({piece: index for index, piece in enumerate(WORD_PIECES)}), WORD_PIECES[:5],
     (0, 2, 3, 4)),
    (models.Unigram([(piece, -1.0) for piece in UNIGRAMS], unk_id=3), (*UNIGRAMS[:4], "<mask>"),
     (1, 0, 2, 9))])
def test_roles_are_found_in_tokenizers_of_bert_and_of_xlm_r(model, names, roles):
    inner = Inner(model)
    inner.add_special_tokens(list(names))
    special = Tokenizer(inner).special
    assert (special.pad, special.cls, special.sep, special.mask) == roles
    assert special.ids.tolist() == list(map(inner.token_to_id, names))


def test_rows_keep_what_follows_a_truncated_text_and_their_openings(toy, capsys):
    tokenizer = toy.tokenizer
    ids = [ids.tolist() for ids in tokenizer.encode(["Hello, hello.", "", "a"])]
    texts = ["Hello, hello.", "", "a"]
    assert tokenize_rows(tokenizer, texts) == [[2, *one, 3] for one in ids]
    assert not capsys.readouterr().err
    rows = tokenize_rows(tokenizer, texts, ((2, 9), (7, 3)), max_row=8, max_text=5,
                              openings=[[2, 20, 21], [], [2]])
    assert rows == [[2, 20, 21, 9, *ids[0][:2], 7, 3], [9, 7, 3], [2, 9, *ids[2], 7, 3]]
    warning = "warning: 1 of 3 texts are longer than 8 tokens and were truncated\n"
    assert capsys.readouterr().err == warning


# ---- corpora


def test_one_text_can_be_run_together_in_blocks(toy):
    text = corpora.open_text("toy", ["de"], count=50)
    rows, blocks = (open_corpus(text, toy.tokenizer, block=size) for size in (0, 16))
    ids = [blocks.example(row, 1, 0).views[0] for row in range(len(blocks))]
    assert np.array_equal(np.concatenate(ids), rows.tokens[:len(rows.tokens) // 16 * 16])
    assert blocks.count_truncated(9)[:2] == (len(blocks), len(blocks))


# ---- batches


def test_every_row_comes_once_an_epoch_in_a_new_order(toy):
    def epoch(number, seed=5):
        ranks = [Batches(toy, 2, 25, seed, rank, 2) for rank in range(2)]
        return [example.views[0].tobytes() for step in range(12 * number, 12 * number + 12)
                for one in ranks for example in one.examples(step)]
    everything = [toy._cells(row)[0].tobytes() for row in range(600)]
    orders = [epoch(0), epoch(1), epoch(0, seed=6), everything]
    assert all(sorted(order) == sorted(everything) for order in orders)
    assert all(sum(map(bytes.__eq__, orders[0], other)) < 12 for other in orders[1:])


@pytest.mark.parametrize("in_batch", [False, True])
def test_a_batch_depends_on_seed_step_and_rank_alone(toy, in_batch):
    one, two, other, rank_1 = (Batches(toy, 2, 8, *place, in_batch)
                               for place in ((7, 0, 1), (7, 0, 1), (8, 0, 1), (7, 1, 2)))
    forwards = [as_bytes(one.examples(step)) for step in (0, 70, 74, 75, 150)]
    assert [as_bytes(two.examples(step)) for step in (150, 75, 74, 70, 0)] == forwards[::-1]
    assert as_bytes(other.examples(0)) != forwards[0] != as_bytes(rank_1.examples(0))
    draws = [one.rng(3).random(), two.rng(3).random(), one.rng(4).random(), rank_1.rng(3).random()]
    assert draws[0] == draws[1] and len(set(draws)) == 3


@pytest.mark.parametrize("batch, views", [(6, 2), (10, 1)])
def test_in_batch_negatives_repeat_no_text_on_any_rank(table, batch, views):
    corpus = table(REPEATS)
    ranks = [Batches(corpus, views, batch, 1, rank, 2, True) for rank in range(2)]
    alone = Batches(corpus, views, 2 * batch, 1, uses_in_batch_negatives=True)
    for step in range(10):
        both = as_bytes(ranks[0].examples(step)) + as_bytes(ranks[1].examples(step))
        assert both == as_bytes(alone.examples(step)) and len(both) == 2 * batch
        assert len({ids for example in both for ids in example}) == 2 * batch * views


def test_chats_may_have_the_same_system_text_which_is_no_view(table):
    rows = [("Answer.", f"question {i // 2}", f"answer {i}") for i in range(60)]
    corpus = table(rows, "system\tuser\tassistant")
    system = corpus.tokenizer.encode(["Answer."])[0]
    assert [corpus.count_truncated(0, one)[0] for one in (False, True)] == [120, 180]
    for step in range(5):
        examples = Batches(corpus, 2, 20, 0, uses_in_batch_negatives=True,
                           system=True).examples(step)
        assert all(np.array_equal(example.system, system) for example in examples)
        assert len({text for example in as_bytes(examples) for text in example}) == 40
    some = table([("", "a", "b"), *rows], "system\tuser\tassistant")
    first, second = [some.example(row, 2, 0, system=True).system for row in range(2)]
    assert first is None and np.array_equal(second, some.tokenizer.encode(["Answer."])[0])


def test_views_are_the_pivot_and_another_or_any_two_or_neighbors(table):
    corpus = table([("a", "b", "c"), ("d", "", "e f g h"), ("", "i", "j k l m")], "en\tde\tfr")
    assert corpus.count_truncated(3)[:2] == (2, 7) and corpus.count_truncated(99) == (0, 7, 0)

    def views_of(row, views, pairs="pivot"):
        found = {}  # {columns: which texts are truncated}
        for choice in range(9):
            example = corpus.example(row, views, choice, pairs, max_length=3)
            texts = tuple(corpus._cells(row)[column][:3] for column in example.columns)
            assert as_bytes([example]) == as_bytes([data.Example(texts)])
            found[example.columns] = example.cut
        return found

    assert [views_of(row, 2) for row in range(3)] == [
        {(0, 1): (False, False), (0, 2): (False, False)}, {(0, 2): (False, True)},
        {(1, 2): (False, True), (2, 1): (True, False)}]
    assert views_of(0, 2, "neighbours").keys() == {(0, 1), (1, 2)}
    assert views_of(1, 1).keys() == {(0,), (2,)} and len(corpus._cells(1)[1]) == 0
    shortest = Batches(corpus, 2, 3, 0, max_length=1).examples(0)
    assert {len(ids) for example in shortest for ids in example.views} == {1}


def test_prefetch_keeps_the_order_hands_on_errors_and_ends_when_closed():
    assert list(data.prefetch(lambda step: step * step, 3, 40)) == [n * n for n in range(3, 40)]
    supply = data.prefetch(lambda step: 1 / (1 - step), 0, 9)
    assert next(supply) == 1
    with pytest.raises(ZeroDivisionError):
        next(supply)
    supply = data.prefetch(lambda step: step, 0, 10 ** 9, depth=2)
    next(supply)
    supply.close()
    assert not any("prefetch" in one.name for one in threading.enumerate())


# ---- refusals

NO_MASK = Inner(models.WordLevel({"[CLS]": 0, "[SEP]": 1}))


@pytest.mark.parametrize("make, message", [
    (lambda table: Tokenizer(Inner(models.WordLevel({"[CLS]": 0}))), r"no sep token \(\[SEP\] or"),
    (lambda table: data.apply_bert_masking(None, None, None, Tokenizer(NO_MASK).special),
     r"no mask token \(\[MASK\] or <mask> or"),
    (lambda table: Tokenizer.read(__file__), "test_data.py is not a tokenizer.json"),
    (lambda table: table(PAIRS, block=16), "--block 16 concatenates .* column, and a has en, de"),
    (lambda table: Batches(table(REPEATS), 2, 11, 1, world=2, uses_in_batch_negatives=True),
     "--batch 11 x 2.*has only 20 rows"),
    (lambda table: Batches(table([["a"]], "text"), 2, 4, 1), "a has the single column 'text'"),
    (lambda table: Batches(table(PAIRS), 2, 4, 0, system=True), "a has no system texts"),
    (lambda table: mask_rows([np.arange(3)], 0.5, None, None, lambda *given: np.arange(2)),
     "a mask has 2 values of type int64: .* one bool for each of the 3 ids")])
def test_what_cannot_be_used_is_refused_in_one_line(table, make, message):
    with pytest.raises(BadInput, match=f"^[^\n]*{message}[^\n]*$"):
        make(table)


# ---- masks


@pytest.fixture(scope="module")
def line(toy):
    """100,000 tokens in sentences that begin with [CLS] and end with [SEP]."""
    rows = [add_special(ids, toy.special) for row in range(600)
            for ids in toy._cells(row)]
    return np.resize(np.concatenate(rows), 100_000).astype(np.uint32)


def near(count, total, ratio):
    return abs(count - total * ratio) < 3 * np.sqrt(total * ratio * (1 - ratio))


def test_a_masking_has_its_ratio_and_spares_special_tokens(toy, line):
    barred = np.isin(line, toy.special.ids)
    one, two = (data.token_mask(line, .3, np.random.default_rng(seed), toy.special)
                for seed in (1, 2))
    for chosen, ratio in ((one, .3), (one & two, .09)):  # independent of each other
        assert near(chosen.sum(), (~barred).sum(), ratio) and not (chosen & barred).any()


@pytest.mark.parametrize("words", range(5))
def test_at_least_and_fixed_counts_are_kept_also_where_little_is_eligible(toy, words):
    special, rng = toy.special, np.random.default_rng(0)
    ids = add_special(range(20, 20 + words), special)
    for ratio, least in ((0, 0), (1e-9, 1)):
        chosen = data.token_mask(ids, ratio, rng, special)
        assert chosen.sum() == min(least, words) and not chosen[[0, -1]].any()
    assert data.fixed_count_mask(ids, .15, rng, special).sum() == min(words, 1)
    assert data.fixed_count_mask(np.arange(15, 115), .299, rng, special).sum() == 29


def test_corruption_is_80_10_10_and_leaves_the_rest_alone(toy, line):
    special = toy.special
    ids = np.where(np.isin(line, special.ids), 20, line).astype(np.uint32)
    before = ids.copy()
    chosen = data.token_mask(ids, .5, np.random.default_rng(5), special)
    new = data.apply_bert_masking(ids, chosen, np.random.default_rng(6), special)
    total, one_word = int(chosen.sum()), 1 / special.vocab
    assert np.array_equal(new[~chosen], before[~chosen]) and np.array_equal(ids, before)
    assert near((new[chosen] == special.mask).sum(), total, .8 + .1 * one_word)
    assert near((new[chosen] == ids[chosen]).sum(), total, .1 + .1 * one_word)
    random_special = np.isin(new, special.ids) & chosen & (new != special.mask)
    assert near(random_special.sum(), total, .1 * 14 * one_word)  # from the whole vocabulary
