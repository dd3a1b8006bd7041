"""Data: rows of ids, the order of the rows, masks, and the packed line that a model reads.

    corpora.open_text -> open_corpus -> Corpus -> Batches.examples(step) -> an objective's collate

This file begins with what collate makes, the packed line; then come corpora, batches and masks.
A row has the same content in several columns, and a *view* is one cell of it. Every random choice
is a pure function of (seed, step, rank), so that a resumed run continues with the same batches.

Axes: T tokens of the packed line     R rows (sentences, pairs, documents)     n of one text

A batch is one line of T tokens: its rows one after the other, without padding. So every layer of
a model computes real tokens only, and nothing but attention has to know where a row ends. What a
token may attend to is four integers, its `key_ranges`; print(batch["packed"]) draws them. A row of
three segments, of which the answer also sees the first two tokens of the text:

    [Segment(text, causal=True), Segment(answer, causal=True, prefix=(0, 2)), Segment(code)]

                 sees 0  1  2    3  4    5  6      key_ranges
    0  text           x  .  .    .  .    .  .      0 1   0 0
    1  text           x  x  .    .  .    .  .      0 2   0 0
    2  text           x  x  x    .  .    .  .      0 3   0 0
    3  answer         x  x  .    x  .    .  .      3 4   0 2
    4  answer         x  x  .    x  x    .  .      3 5   0 2
    5  code           .  .  .    .  .    x  x      5 7   0 0
    6  code           .  .  .    .  .    x  x      5 7   0 0

kernels/ computes attention under this rule, by PyTorch's own kernel or by ours. Each needs a *plan*
of the batch, which `Packed.plan` makes once for all layers. A layer with a sliding window reads
what `Packed.within` returns: the same batch, with the four integers of near tokens only.
"""

import collections
import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

import kernels
from base.common import BadInput, digest, shown
from base.tokenizer import SPELLINGS, Tokenizer
from corpora import open_text, train_tokenizer
from corpora.overlap import EVAL, TRAIN

# ---- a batch is one line of tokens, and every token knows which keys it may attend to


class Segment(NamedTuple):
    """A part of a row. A token attends to the whole segment or, if `causal`, up to itself."""
    tokens: np.ndarray
    causal: bool = False
    # (index of an earlier segment of the row, n): attend to its first n tokens too, and continue
    # their positions. A prefix that the earlier segment has is not included.
    prefix: tuple[int, int] | None = None
    positions: np.ndarray | None = None  # instead of 0, 1, ... or what continues the prefix


@dataclass
class Packed:
    """A batch of R rows as one line of T tokens, without padding.

    Token i may attend to key j  iff  key_ranges[i,0] <= j < key_ranges[i,1]  (its own segment)
                                  or  key_ranges[i,2] <= j < key_ranges[i,3]  (its prefix).

    A model reads of it `tokens`, `positions` and `attend`; harness/generation.py has two others.
    """
    tokens: torch.Tensor  # (T,) int64
    positions: torch.Tensor  # (T,) int64, of each token in its own segment
    key_ranges: torch.Tensor  # (T, 4) int32; 0, 0 without a prefix
    cu_seqlens: torch.Tensor  # (R+1,) int32, where each row starts, and T
    plans: dict = field(default_factory=dict)  # {layout: what `plan` returned}
    windows: dict = field(default_factory=dict)  # {window: what `narrowed` returned}

    @staticmethod
    def of(rows, causal=False):
        """Pack plain rows, each an array of ids: bidirectional or causal."""
        return Packed.of_segments([[Segment(np.asarray(row), causal)] for row in rows])

    @staticmethod
    def of_segments(rows):
        """Pack rows that are lists of Segment. Rows never attend to each other."""
        tokens = np.concatenate([segment.tokens for row in rows for segment in row])
        positions = np.empty(len(tokens), np.int64)
        key_ranges = np.empty((len(tokens), 4), np.int32)
        cu_seqlens = np.zeros(len(rows) + 1, np.int32)
        index = np.arange(len(tokens) + 1)
        end = 0
        for number, row in enumerate(rows):
            starts = []  # of the row's segments
            for segment in row:
                start = end
                end += len(segment.tokens)
                if start == end:
                    raise BadInput("a batch has an empty row or segment: each needs a token")
                starts.append(start)
                first, length = 0, 0  # of the prefix
                if segment.prefix:
                    earlier, length = segment.prefix
                    first = starts[earlier]
                key_ranges[start:end] = start, end, first, first + length
                if segment.causal:
                    key_ranges[start:end, 1] = index[start + 1:end + 1]
                if segment.positions is None:
                    positions[start:end] = index[length:length + end - start]
                else:
                    positions[start:end] = segment.positions
            cu_seqlens[number + 1] = end
        arrays = (tokens.astype(np.int64), positions, key_ranges, cu_seqlens)
        return Packed(*map(torch.from_numpy, arrays))

    def __repr__(self):
        return f"Packed(rows={len(self)}, tokens={len(self.tokens)})"

    def __str__(self):
        """Return the table at the head of this file, of at most the first 48 tokens."""
        length = min(48, len(self.tokens))
        columns = self.row_of_token(), self.tokens, self.positions, *self.key_ranges.T
        table = torch.stack([column[:length].long() for column in columns], 1)  # (length, 7)
        sees = "".join(str(key % 10) for key in range(length))
        lines = [repr(self), f"index row  token position  sees {sees}  key_ranges"]
        for index, (numbers, mask) in enumerate(zip(table.tolist(), self.visible(0, length))):
            row, token, position, *ranges = numbers
            crosses = "".join("x" if seen else "." for seen in mask)
            lines.append(f"{index:5} {row:3} {token:6} {position:8}       {crosses}  "
                         "{:3} {:3}  {:3} {:3}".format(*ranges))
        if length < len(self.tokens):
            lines.append(f"the first {length} of {len(self.tokens)} tokens")
        return "\n".join(lines)

    def mask(self, row):
        """Return the mask of a row, (L, L) bool: may its token i attend to its token j?"""
        return self.visible(*self.cu_seqlens[row:row + 2].tolist())

    def visible(self, start, end):
        """Return the mask of the tokens start to end - 1 of the line, (L, L) bool."""
        key = torch.arange(start, end, device=self.key_ranges.device)
        first, last, first2, last2 = self.key_ranges[start:end].T[..., None]  # (L, 1) each
        return (first <= key) & (key < last) | (first2 <= key) & (key < last2)

    def within(self, window):
        """Return the batch as a layer with a sliding window reads it: of its keys, a token attends
        to those at most `window` positions before or after it; 0: to all. If the rows are short
        enough, it is this batch, with its plans."""
        if window and window not in self.windows:
            self.windows[window] = kernels.uncompiled(narrowed)(self, window)
        return self.windows.get(window) or self

    def as_causal(self):
        """Return the batch as a decoder reads it: a token attends to no later token."""
        key_ranges = self.key_ranges.clone()
        ends = torch.arange(1, len(self.tokens) + 1, dtype=torch.int32)  # of the keys up to itself
        key_ranges[:, 1] = key_ranges[:, 1].minimum(ends)
        return replace(self, key_ranges=key_ranges, plans={}, windows={})

    def attend(self, layer, qkv):
        """Attend in a model.Attention under this mask: (T, (H + 2 Hkv) K) -> (T, H K)."""
        return kernels.packed_attention(qkv, layer.heads, layer.kv_heads, self.within(layer.window),
                                        layer.back_end, layer.softcap)

    def row_of_token(self):
        """Return the number of each token's row, (T,)."""
        return torch.repeat_interleave(self.cu_seqlens.diff().long(), output_size=len(self.tokens))

    def plan(self, layout, device=None):
        """Return the attention plan of this batch, made by the first call. `layout` is one of those
        that set_attention returns; `device` is where the batch will be, if it is not there yet.
        Raises BadInput if the back end does not support the mask."""
        if layout not in self.plans:
            home = self.key_ranges.device
            make_plan = kernels.uncompiled(kernels.make_plan)
            plan = make_plan(layout, self.key_ranges.cpu().numpy(), self.cu_seqlens.cpu().numpy(),
                             device or home)
            self.plans[layout] = change_each(plan, lambda x: x.to(home))
        return self.plans[layout]

    def make_plans(self, layouts, device):
        """Make the plans of all layouts that set_attention returned. Return the batch."""
        for layout, window in layouts:
            self.within(window).plan(layout, device)
        return self

    def to(self, device):
        return change_each(self, lambda x: x.to(device))

    def __len__(self):
        return len(self.cu_seqlens) - 1

    def visible_pairs(self):
        """Count the visible (token, key) pairs: what attention must compute for each head."""
        first, last, first2, last2 = self.key_ranges.long().T
        return int((last - first + last2 - first2).sum())


def narrowed(packed, window):
    """Return a Packed whose keys are at most `window` positions away; None if all of them are."""
    if packed.positions.max() <= window:
        return None
    first, last, first2, last2 = packed.key_ranges.long().T
    # Positions ascend within a segment, and these numbers within the whole line. So the near tokens
    # of a segment are an interval, and those of a prefix are its end.
    line = (first << 32) + packed.positions
    low = torch.searchsorted(line, line - window)
    high = torch.searchsorted(line, line + window, right=True)
    low2 = torch.searchsorted(line, (first2 << 32) + packed.positions - window)
    near = [first.maximum(low), last.minimum(high), first2.maximum(low2).minimum(last2), last2]
    return replace(packed, key_ranges=torch.stack(near, 1).int(), plans={}, windows={})


def change_each(value, change, kind=torch.Tensor):
    """Change every tensor of a batch, or everything else of one `kind`: in dictionaries, lists,
    tuples, Packed and plans."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {name: change_each(item, change, kind) for name, item in value.items()}
    if isinstance(value, Packed):
        return Packed(**change_each(vars(value), change, kind))
    if isinstance(value, (list, tuple)):
        items = [change_each(item, change, kind) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def pinned(batch, device):
    """Return a batch that `to_device` moves without a wait: for a GPU, in pinned memory."""
    if device.type != "cuda":
        return batch
    return change_each(batch, lambda x: x.pin_memory())


def to_device(batch, device):
    """Move a batch to a device. The loop does not wait for what is `pinned`."""
    return change_each(batch, lambda x: x.to(device, non_blocking=device.type == "cuda"))


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

    def _lengths(self):
        """Return the number of tokens of each cell, (rows, columns)."""
        return np.diff(self.offsets).reshape(-1, len(self.columns))[self.rows]

    def ids(self, row, column):
        """Return (n,) uint32 of a column by name or number; n is 0 if the row has no text in it."""
        return self._cells(row)[self.columns.index(column) if isinstance(column, str) else column]

    def count_truncated(self, max_length, system=False):
        """Return how many texts have more than max_length tokens, how many texts there are, and
        the fraction of all tokens that truncation leaves out. `system`: count system turns too."""
        lengths = self._lengths()[:, :self.num_text_columns + system]
        lost = (lengths - max_length).clip(0).sum() / max(1, lengths.sum())
        return int((lengths > max_length).sum()), int((lengths > 0).sum()), float(lost)

    def complete(self, views):
        """Return the Corpus of the rows that have a text in each of the first `views` columns.
        Raises BadInput if none has."""
        has_all = (self._lengths()[:, :views] > 0).all(1)
        if not has_all.any():
            raise BadInput(f"{self.name}: no row has all {views} texts of an example, "
                           f"{shown(', '.join(self.columns[:views]))}")
        return replace(self, rows=self.rows[has_all])

    def example(self, row, views, choice, pairs="pivot", max_length=None, system=False):
        """Return the Example of a row: one or two views, selected by the random number `choice`, or
        those of the first columns; with `system` the system text. Each is truncated to
        max_length."""
        cells = self._cells(row)
        filled = [column for column in range(self.num_text_columns) if len(cells[column])]
        choice = int(choice)
        if views == 1:
            columns = (filled[choice % len(filled)],)
        elif views > 2:  # such as anchor, positive, negative
            columns = tuple(range(views))
        elif pairs == "neighbours":  # of a list of paraphrases each predicts the next
            first = choice % (len(filled) - 1)
            columns = filled[first], filled[first + 1]
        elif filled[0] == 0:  # the first column is the pivot, the second view any other column
            columns = 0, filled[1 + choice % (len(filled) - 1)]
        else:  # a row without the pivot: any two columns
            ordered_pairs = list(itertools.permutations(filled, 2))
            columns = ordered_pairs[choice % len(ordered_pairs)]
        turn = cells[self.columns.index("system")] if system else ()
        cut = tuple(max_length is not None and len(cells[column]) > max_length
                    for column in columns)
        return Example(tuple(cells[column][:max_length] for column in columns), columns, cut,
                       turn[:max_length] if len(turn) else None)


def open_corpus(spec_or_source, tokenizer=None, *, split="train", langs=(), vocab=None,
                holdout=True, block=0, count=20_000):
    """Return the Corpus of one split of what corpora.open_text gives, or can open.

    Without a tokenizer, train one of `vocab` pieces. "valid" and "test" of a file are the same
    held-out rows; without `holdout` every split is the whole file. Raises BadInput."""
    source = open_text(spec_or_source, langs, count)
    if source.embedded:
        holdout = True  # its splits share no row
    elif block and holdout:
        raise BadInput(f"--block {block} would run across the held-out rows of {source.name}: "
                       "give other rows with --eval-data")
    if block and len(source.columns) > 1:
        raise BadInput(f"--block {block} concatenates the texts of one column, and {source.name} "
                       f"has {shown(', '.join(source.columns))}: choose one with --langs")
    tokenizer = tokenizer or train_tokenizer(source, vocab, holdout)
    tokens, offsets, identity, kinds = source.ids(tokenizer, split, holdout)
    if block > len(tokens):
        raise BadInput(f"--block {block} is longer than the text, which has {len(tokens):,} tokens")
    if block:  # a row is the next `block` tokens
        offsets = np.arange(0, len(tokens) + 1, block)
    rows = np.arange((len(offsets) - 1) // len(source.columns))
    if kinds is not None:
        rows = np.flatnonzero(kinds == (TRAIN if split == "train" else EVAL))
    return Corpus(source.name, source.columns, source.num_text_columns, tokenizer, tokens, offsets,
                  rows, digest([identity, source.columns, tokenizer.hash, block]))


# ---- the examples of a step


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
            if self.views == 2:
                raise BadInput(f"{corpus.name} has the single column {shown(corpus.columns[0])!r}, "
                               "and the objective needs two: use parallel data, or an objective of "
                               "single texts, such as mlm")
            columns = shown(", ".join(corpus.columns[:corpus.num_text_columns]))
            raise BadInput(f"{corpus.name} has {corpus.num_text_columns} columns that can be read "
                           f"({columns}), and an example of the objective has {self.views} texts: "
                           "add columns, or choose with --langs")
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
            first = (step * self.world + self.rank) * self.batch
            return self._draw(first, self.batch, self.rng(step, 1))
        # A text in two examples of a step would be a false negative, also on two ranks. So every
        # rank draws the examples of all ranks, replaces repeats, and returns its own examples.
        rng = self.rng(step, 1, rank=0)
        number = self.batch * self.world
        examples = self._draw(step * number, number, rng)
        seen = set()
        repeats = [index for index, example in enumerate(examples)
                   if not self._is_new(example, seen)]
        for index in repeats:
            examples[index] = self._replacement(rng, seen)
        return examples[self.rank * self.batch:(self.rank + 1) * self.batch]

    def _draw(self, first, number, rng):
        """Return `number` examples of the endless sequence of shuffled epochs, from `first` on."""
        last, order = self.shuffled
        examples = []
        for position, choice in enumerate(rng.integers(2 ** 31, size=number), first):
            epoch, index = divmod(position, len(self.corpus))
            if epoch != last:
                last = epoch
                order = self.rng(epoch, purpose=2, rank=0).permutation(len(self.corpus))
                self.shuffled = (epoch, order)
            examples.append(self.example(order[index], choice=choice))
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
                       f"{len(seen) // min(2, self.views)} rows that share no text at --max-length "
                       f"{self.max_length}, and the rows of a batch are each other's negatives: "
                       "use a smaller --batch or a larger --max-length")

    def _is_new(self, example, seen):
        """Return whether none of the first two views is among the texts seen, and then add them."""
        # All chats may have the same system text, and many rows the same hard negative.
        texts = {ids.tobytes() for ids in example.views[:2]}
        if not seen.isdisjoint(texts):
            return False
        seen |= texts
        return True


def token_batches(lengths, tokens):
    """Group rows into batches of at most `tokens` tokens. Return lists of row numbers."""
    batches = []
    room = 0
    # The longest rows come first: if memory runs out, it does so at once.
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] > room:
            batches.append([])
            room = max(tokens, lengths[i])  # a longer row is a batch of its own
        batches[-1].append(i)
        room -= lengths[i]
    return batches


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
# objective's collate. Its ids are those of all rows of a batch, where each text begins at
# special.cls, or with each_row=True those of one row.


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
