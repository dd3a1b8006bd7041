"""Text in, batches of examples out: tokenizer, rows of ids, the order of the rows, masks.

    corpora.open_text -> open_corpus -> Corpus -> Batches.examples(step) -> an objective's collate

A row has the same content in several columns, and a *view* is one cell of it. Every random choice
is a pure function of (seed, step, rank), so that a resumed run continues with the same batches.
V vocabulary, T tokens of a corpus, n of one text.
"""

import collections
import functools
import hashlib
import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

from common import BadInput, atomic_file, digest, shown, warn
from corpora import EMBEDDED_VOCAB, open_text
from corpora.chats import FAMILIES
from corpora.overlap import EVAL, TRAIN
from corpora.store import encoded

# ---- special tokens

# Our own special tokens, with the ids 0 to 14.
ROLES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]",
         *(f"[PRED_{number}]" for number in range(1, 11)))
# How vocabularies spell each special token: ours first, then those of encoders and of decoders. The
# first spelling that a vocabulary has is used.
SPELLINGS = {
    "pad": ("[PAD]", "<pad>", "<|pad|>"),
    "cls": ("[CLS]", "<s>", "<bos>", "<|begin_of_text|>", "<|endoftext|>"),
    "sep": ("[SEP]", "</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>"),
    "mask": ("[MASK]", "<mask>", "<|mask|>"),
}


class Chat(NamedTuple):
    """Ids around the turns of a chat: start (system S end) user U end assistant A [SEP]."""
    start: tuple
    system: tuple | None  # None: chats of this family have no system turn
    user: tuple
    end: tuple
    assistant: tuple


class Special(NamedTuple):
    """The ids of a tokenizer's special tokens."""
    pad: int | None
    cls: int
    sep: int
    mask: int | None
    preds: tuple  # [PRED_1] and so on, may be ()
    vocab: int  # V, one more than the highest id
    ids: np.ndarray  # all special ids, sorted
    before: tuple  # ids before a text, usually [CLS]
    after: tuple  # ids after a text, usually [SEP]
    chat: Chat


def find_special(inner, around=None, chats=True):
    """Find the special tokens of a tokenizer by name. It must encode the name of a special token as
    this token. The arguments are those of Tokenizer. Raises BadInput without [CLS] or [SEP]."""
    pieces = inner.get_vocab(with_added_tokens=True)
    added = inner.get_added_tokens_decoder()
    ids = {role: next((pieces[name] for name in names if name in pieces), None)
           for role, names in SPELLINGS.items()}
    family = next((texts for name, texts in FAMILIES.items() if chats and name in pieces), None)
    if around and not chats:
        # A name can mislead: in Gemma's vocabulary "<s>" is a tag of HTML, not the first token.
        ids["cls"] = next(iter(around[0]), ids["cls"])
        ids["sep"] = next(reversed(around[1]), ids["sep"])
    if family:
        ids["cls"], ids["sep"] = map(pieces.get, family[:2])
    for role in ("cls", "sep"):
        if ids[role] is None:
            raise BadInput(f"the tokenizer has no {role} token ({' or '.join(SPELLINGS[role])})")
    before, after = map(tuple, around or ([ids["cls"]], [ids["sep"]]))
    chat = Chat(before, (), (), (ids["sep"],), ())  # without a family, [SEP] ends each turn
    if family:
        marks = [None if text is None else
                 tuple(inner.encode(text, add_special_tokens=False).ids) for text in family[2:]]
        chat = Chat((ids["cls"],), *marks)
    preds = tuple(pieces[name] for name in ROLES[5:] if name in pieces)
    special = {*ids.values(), *preds, *(index for index, one in added.items() if one.special)}
    special = np.array(sorted(special - {None}), np.int64)
    return Special(**ids, preds=preds, vocab=max(pieces.values()) + 1, ids=special,
                   before=before, after=after, chat=chat)


# ---- tokenizer and rows of ids

TRAIN_BYTES = 20_000_000  # a vocabulary hardly changes with more text
LONG_WORD = re.compile(r"\w{1000}")
# Byte-level BPE never merges across this boundary, so that each word needs to be encoded once. For
# the toy data this takes 0.5 s instead of 3 s.
BETWEEN_WORDS = re.compile(r"(?<=\S)(?= \S)")


class Tokenizer:
    """A tokenizer of the tokenizers library, `inner`, and its special ids. It never changes.

    `around`: the ids before and after a text, ([CLS],) and ([SEP],) by default. `chats`: rows can
    be chats, which an encoder never reads, although it may have the vocabulary of a decoder."""

    def __init__(self, inner, around=None, chats=True):
        inner.no_padding()  # it and truncation would change the data without a warning
        inner.no_truncation()
        self.inner = inner
        # Around the turns of a chat, the name of a special token means this token. In a text it
        # stays text: a page with "</s>" must not end a row.
        inner.encode_special_tokens = False
        self.chats = chats
        self.special = find_special(inner, around, chats)
        inner.encode_special_tokens = True
        self.vocab = self.special.vocab
        # The id of what the tokenizer does not know; None if it knows everything.
        self.unknown = next((index for index in map(inner.token_to_id, ("[UNK]", "<unk>"))
                             if index is not None), None)
        # The names of all special tokens, of which a text can contain one.
        self.names = re.compile("|".join(re.escape(name) for name in map(
            inner.id_to_token, self.special.ids.tolist()) if name))
        # The hash covers everything that decides which ids a text gets.
        self.hash = hashlib.sha256(inner.to_str().encode()).hexdigest()
        # Under these conditions a word has the same ids in every text.
        self.by_words = (isinstance(inner.pre_tokenizer, pre_tokenizers.ByteLevel)
                         and inner.normalizer is None
                         and all(x.special for x in inner.get_added_tokens_decoder().values()))

    @classmethod
    def train(cls, texts, vocab):
        """Train a byte-level BPE of at most `vocab` pieces, special tokens included."""
        if not 300 <= vocab <= 1_000_000:
            raise BadInput(f"vocab is {vocab}: it must be from 300 to 1,000,000")
        inner = tokenizers.Tokenizer(models.BPE())
        # With a space before every text, a word at its start is the same token as elsewhere.
        # Decoding removes this space.
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        inner.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
        trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=list(ROLES), min_frequency=2,
                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                      show_progress=False)
        # The trainer would need minutes for a word of 500,000 letters, such as a file in base64.
        texts = (LONG_WORD.sub(r"\g<0> ", text) if len(text) > 1000 else text for text in texts)
        inner.train_from_iterator(texts, trainer)
        return cls(inner)

    @classmethod
    def read(cls, path, around=None, chats=True):
        """Read a tokenizer.json. Raises BadInput if there is none."""
        try:
            inner = tokenizers.Tokenizer.from_str(Path(path).read_text(encoding="utf-8"))
        except Exception as error:  # the library raises nothing more precise
            raise BadInput(f"{path} is not a tokenizer.json that can be read: {shown(error)}"
                           ) from None
        return cls(inner, around, chats)

    def save(self, path):
        with atomic_file(path) as file:
            file.write(self.inner.to_str(pretty=True).encode())

    def with_tokens(self, names):
        """Return a tokenizer that has these special tokens: this one, if it has them already."""
        new = [name for name in names if self.inner.token_to_id(name) is None]
        if not new:
            return self
        inner = tokenizers.Tokenizer.from_str(self.inner.to_str())
        inner.add_special_tokens(new)
        return Tokenizer(inner, (self.special.before, self.special.after), self.chats)

    def encode(self, texts, may_be_empty=False):
        """Return the ids of each text, (n,) uint32, without special tokens. n is 0 for "" only, or
        with `may_be_empty` also for a text of which the tokenizer's normalizer keeps nothing."""
        split_texts = [BETWEEN_WORDS.split(text) if self.by_words else [text] for text in texts]
        words = list(dict.fromkeys(itertools.chain.from_iterable(split_texts)))
        encodings = self.inner.encode_batch_fast(words, add_special_tokens=False)
        # BERT's normalizer deletes a text of spaces. A training row must not lack it.
        unknown = self.special.mask or 0 if self.unknown is None else self.unknown
        ids = {word: encoding.ids or [unknown] * bool(word and not may_be_empty)
               for word, encoding in zip(words, encodings)}
        return [np.array([*itertools.chain.from_iterable(map(ids.get, parts))], np.uint32)
                for parts in split_texts]

    def decode(self, ids):
        """Return the text of some ids, without special tokens."""
        return self.inner.decode(list(ids))


def concat_ids(*parts):
    """Concatenate ids, from arrays, lists or tuples: (n,) int64."""
    return np.concatenate([np.asarray(part, np.int64) for part in parts])


def add_special(ids, special):
    """Return the row of a text: [CLS] ids [SEP], or what this tokenizer has around a text."""
    return concat_ids(special.before, ids, special.after)


def tokenize_rows(tokenizer, texts, affixes=None, max_row=None, max_text=None, openings=None):
    """Turn N texts into N rows of ids, as lists, and warn if some are truncated.

    Each text is truncated to max_text tokens, then its row to max_row. `affixes`: all ids before
    and all ids after a text, [CLS] and [SEP] by default. `openings`: N lists of ids that come
    before a text instead of chat.start, such as a system turn."""
    special = tokenizer.special
    before, after = affixes or (special.before, special.after)
    openings = openings or itertools.repeat(before[:len(special.chat.start)])
    rest = before[len(special.chat.start):]
    rows = []
    truncated = collections.Counter()  # {limit: number of texts that are longer}
    unknown = total = 0  # tokens
    named = [name for name in map(tokenizer.names.search, texts) if name]
    for opening, ids in zip(openings, tokenizer.encode(texts, may_be_empty=True)):
        unknown += np.count_nonzero(ids == tokenizer.unknown)
        total += len(ids)
        row = [*opening, *rest, *ids[:max_text].tolist(), *after]
        # Keep what follows the text: the model reads the embedding there.
        if max_row and len(row) > max_row:
            row = [*row[:max_row - len(after)], *after]
            truncated[max_row] += 1
        elif max_text and len(ids) > max_text:
            truncated[max_text] += 1
        rows.append(row)
    if unknown and unknown >= 0.01 * total:
        warn(f"{unknown / total:.1%} of the tokens of {len(rows):,} texts are [UNK]: the tokenizer "
             "does not know their script or their words")
    if named:
        warn(f"{len(named):,} of {len(rows):,} texts contain the name of a special token, such as "
             f"{shown(named[0][0])}, which is read as text")
    for limit, count in truncated.items():
        warn(f"{count} of {len(rows)} texts are longer than {limit} tokens and were truncated")
    return rows


# ---- corpora

class Example(NamedTuple):
    """A row as training reads it."""
    views: tuple  # the ids (n,) uint32 of each text
    columns: tuple = (0, 1)  # the number of each view's column in the corpus
    cut: tuple = (False, False)  # whether each view was truncated
    system: np.ndarray | None = None  # the ids (n,) of a chat's system text


@dataclass(eq=False)
class Corpus:
    """Rows of token ids. Those of cell i = row * len(columns) + column are
    tokens[offsets[i]:offsets[i + 1]]."""
    name: str
    columns: tuple
    num_text_columns: int  # the rest ("system") is never a view
    tokenizer: Tokenizer
    tokens: np.ndarray  # (T,) uint32
    offsets: np.ndarray  # (cells + 1,) int64
    rows: np.ndarray  # the numbers of this split's rows
    hash: str  # of everything that determines the ids

    def __len__(self):
        return len(self.rows)

    @property
    def special(self):
        return self.tokenizer.special

    def _cells(self, row):
        """Return the ids of every column of a row."""
        first = int(self.rows[row]) * len(self.columns)
        ends = self.offsets[first:first + len(self.columns) + 1]  # (columns + 1,)
        return np.split(self.tokens[ends[0]:ends[-1]], ends[1:-1] - ends[0])

    def ids(self, row, column):
        """Return (n,) uint32 of a column by name or number; n is 0 if the row has no text in it."""
        return self._cells(row)[self.columns.index(column) if isinstance(column, str) else column]

    def count_truncated(self, max_length, system=False):
        """Return how many texts have more than max_length tokens, and how many texts there are.
        `system`: count system turns too."""
        lengths = np.diff(self.offsets).reshape(-1, len(self.columns))  # of all cells
        lengths = lengths[self.rows, :self.num_text_columns + system]
        return int((lengths > max_length).sum()), int((lengths > 0).sum())

    def example(self, row, views, choice, pairs="pivot", max_length=None, system=False):
        """Return the Example of a row: one or two views, selected by the random number `choice`,
        and with `system` the system text. Each is truncated to max_length."""
        cells = self._cells(row)
        filled = [column for column in range(self.num_text_columns) if len(cells[column])]
        choice = int(choice)
        if views == 1:
            columns = (filled[choice % len(filled)],)
        elif pairs == "neighbours":  # of a list of paraphrases each predicts the next
            first = choice % (len(filled) - 1)
            columns = filled[first], filled[first + 1]
        elif filled[0] == 0:  # the first column is the pivot, the second view any other column
            columns = 0, filled[1 + choice % (len(filled) - 1)]
        else:  # a row without the pivot: any two columns
            ordered_pairs = list(itertools.permutations(filled, 2))
            columns = ordered_pairs[choice % len(ordered_pairs)]
        cut = tuple(max_length is not None and len(cells[column]) > max_length
                    for column in columns)
        return Example(tuple(cells[column][:max_length] for column in columns), columns, cut,
                       cells[self.columns.index("system")][:max_length] if system else None)


def open_corpus(spec_or_source, tokenizer=None, *, split="train", langs=(), vocab=None,
                holdout=True, block=0, count=20_000):
    """Return the Corpus of one split of what corpora.open_text gives, or can open.

    Without a tokenizer one of `vocab` pieces is trained. "valid" and "test" of a file are the same
    held-out rows; without `holdout` every split is the whole file. Raises BadInput."""
    source = open_text(spec_or_source, langs, count)
    if source.embedded:
        holdout = True  # its splits share no row
        texts = source.rows(split)
    elif block and holdout:
        raise BadInput(f"--block {block} would run across the held-out rows of {source.name}: "
                       "give other rows with --eval-data")
    if block and len(source.columns) > 1:
        raise BadInput(f"--block {block} concatenates the texts of one column, and {source.name} "
                       f"has {shown(', '.join(source.columns))}: choose one with --langs")
    if tokenizer is None:
        # Of a large file, every n-th row is read.
        step = 1 + sum(path.stat().st_size for path in source.paths) // TRAIN_BYTES
        rows = itertools.islice(source.rows("train" if holdout else "all"), None, None, step)
        rows = tqdm(rows, "train a tokenizer", unit=" rows", leave=False, disable=None)
        vocab = vocab or (EMBEDDED_VOCAB if source.embedded else 8000)
        tokenizer = Tokenizer.train(filter(None, itertools.chain.from_iterable(rows)), vocab)
    if source.embedded:
        ids = tokenizer.encode(itertools.chain(*texts))
        tokens, offsets = np.concatenate(ids), np.cumsum([0, *map(len, ids)])
        identity = digest(texts)
    else:
        stored = encoded(source, tokenizer, holdout)
        tokens, offsets, kinds, identity = stored.tokens, stored.offsets, stored.kinds, stored.hash
        source.hashes, source.kinds, source.counts = stored.hashes, kinds, stored.counts
    if block > len(tokens):
        raise BadInput(f"--block {block} is longer than the text, which has {len(tokens):,} tokens")
    if block:  # a row is the next `block` tokens
        offsets = np.arange(0, len(tokens) + 1, block)
    rows = np.arange((len(offsets) - 1) // len(source.columns))
    if holdout and not source.embedded:
        rows = np.flatnonzero(kinds == (TRAIN if split == "train" else EVAL))
        identity += split
    return Corpus(source.name, source.columns, source.num_text_columns, tokenizer, tokens, offsets,
                  rows, digest([identity, source.columns, tokenizer.hash, block]))


# ---- batches

@dataclass(eq=False)
class Batches:
    """The examples of every step. Each row comes once an epoch. If the loss uses in-batch
    negatives, a row with a text that the step already has is replaced. Raises BadInput."""
    corpus: Corpus
    views: int  # texts of an example
    batch: int  # examples of a step on this rank
    seed: int
    rank: int = 0
    world: int = 1
    uses_in_batch_negatives: bool = False
    max_length: int = 128  # longest text, in tokens; longer ones are truncated
    pairs: str = "pivot"
    system: bool = False  # add the system texts of chats
    # the epoch of the last call, and its rows
    shuffled: tuple = field(default=(None, None), init=False)

    def __post_init__(self):
        corpus = self.corpus
        self.example = functools.partial(  # (row, choice) -> Example
            corpus.example, views=self.views, pairs=self.pairs, max_length=self.max_length,
            system=self.system)
        if self.views > corpus.num_text_columns:
            raise BadInput(f"{corpus.name} has the single column {shown(corpus.columns[0])!r}, and "
                           "the objective needs two: use parallel data, or an objective of single "
                           "texts, such as mlm")
        if self.system and ("system" not in corpus.columns or corpus.special.chat.system is None):
            raise BadInput(f"--chat system: {corpus.name} has no system texts, or this tokenizer's "
                           "chats have none: use --chat plain")
        if self.uses_in_batch_negatives:
            self.examples(0)

    def rng(self, step, purpose=0, rank=None):
        """Return the random generator of collate (purpose 0), of the examples (1), or of an epoch's
        order (2)."""
        rank = self.rank if rank is None else rank
        return np.random.Generator(np.random.Philox([self.seed % 2 ** 64, purpose, step, rank]))

    def examples(self, step):
        """Return `batch` Examples of `views` texts, none longer than max_length."""
        if not self.uses_in_batch_negatives:
            return self._draw(step * self.world + self.rank, self.batch, self.rng(step, 1))
        # A text in two examples of a step would be a false negative, also on two ranks. So every
        # rank draws the examples of all ranks, replaces repeats, and returns its own examples.
        rng = self.rng(step, 1, rank=0)
        examples = self._draw(step, self.batch * self.world, rng)
        seen = set()
        repeats = [index for index, example in enumerate(examples)
                   if not self._is_new(example, seen)]
        for index in repeats:
            examples[index] = self._replacement(rng, seen)
        return examples[self.rank * self.batch:(self.rank + 1) * self.batch]

    def _draw(self, turn, number, rng):
        """Return the examples turn * number ... (turn + 1) * number - 1 of the endless sequence of
        shuffled epochs."""
        choices = rng.integers(2 ** 31, size=number)
        last, order = self.shuffled
        examples = []
        for i in range(number):
            epoch, index = divmod(turn * number + i, len(self.corpus))
            if epoch != last:
                last = epoch
                order = self.rng(epoch, purpose=2, rank=0).permutation(len(self.corpus))
                self.shuffled = (epoch, order)
            examples.append(self.example(order[index], choice=choices[i]))
        return examples

    def _replacement(self, rng, seen):
        """Return an example with new texts: a random one, or the first from a random row on."""
        count = len(self.corpus)
        start = int(rng.integers(count))
        random_rows = rng.integers(count, size=64)
        choice = rng.integers(2 ** 31)
        walk = ((start + offset) % count for offset in range(min(count, 10_000)))
        for row in itertools.chain(random_rows, walk):
            example = self.example(row, choice=choice)
            if self._is_new(example, seen):
                return example
        raise BadInput(f"--batch {self.batch} x {self.world}: {self.corpus.name} has only "
                       f"{len(seen) // self.views} rows that share no text at --max-length "
                       f"{self.max_length}, and the rows of a batch are each other's negatives: "
                       "use a smaller --batch or a larger --max-length")

    def _is_new(self, example, seen):
        """Return whether no view is among the texts seen, and then add them."""
        # System texts do not count, because all chats may have the same one.
        texts = {ids.tobytes() for ids in example.views}
        if not seen.isdisjoint(texts):
            return False
        seen |= texts
        return True


def prefetch(make, start, stop, depth=4):
    """Yield make(start), ..., make(stop - 1), computed ahead by one thread. Its exceptions are
    raised here, and closing the iterator ends the thread."""
    ahead = collections.deque()
    pool = ThreadPoolExecutor(1, "prefetch")
    try:
        for step in range(start, stop):
            ahead.append(pool.submit(make, step))
            if len(ahead) > depth:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


# ---- masks: which tokens the model predicts, ids (n,) -> (n,) bool. Special tokens are never
# masked. To mask in another way, write a function like token_mask, and give it to mask_rows in an
# objective's collate. Its ids are those of all rows of a batch; each text begins at special.cls.


def token_mask(ids, ratio, rng, special):
    """Mask each token with probability `ratio`, but at least one unless the ratio is 0."""
    eligible = ~np.isin(ids, special.ids)
    chosen = (rng.random(len(ids)) < ratio) & eligible
    if ratio > 0 and eligible.any() and not chosen.any():
        chosen[rng.choice(np.flatnonzero(eligible), 1)] = True
    return chosen


def fixed_count_mask(ids, ratio, rng, special):
    """Mask max(1, floor(ratio * e)) of the e tokens that are not special; none if e is 0."""
    eligible = np.flatnonzero(~np.isin(ids, special.ids))
    number = min(len(eligible), max(1, int(ratio * len(eligible))))
    chosen = np.zeros(len(ids), bool)
    chosen[rng.choice(eligible, number, replace=False)] = True
    return chosen


def apply_bert_masking(ids, chosen, rng, special, mask=0.8, random=0.1):
    """Return new ids (n,). Of the chosen tokens a fraction `mask` becomes the mask token, a
    fraction `random` becomes any token, and the others stay. [Devlin et al. 2019, sec. 3.1]"""
    if special.mask is None:
        raise BadInput(f"the tokenizer has no mask token ({' or '.join(SPELLINGS['mask'])}): use "
                       "another one, or an objective that does not mask")
    fate = np.where(chosen, rng.random(len(ids)), 2.0)
    # Random tokens come from the whole vocabulary, special ones too, as in the papers' codes.
    random_ids = rng.integers(special.vocab, size=len(ids))
    new = np.where(fate < mask + random, random_ids, ids)
    return np.where(fate < mask, special.mask, new).astype(ids.dtype)
