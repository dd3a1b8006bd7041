"""Text in, batches of examples out: tokenizer, token store, order of the rows, masks.

    corpora.open_text -> open_corpus -> Corpus -> Batches.examples(step) -> an objective's collate

A row holds the same content in several columns (languages, captions, question and answer); a *view*
is one cell of it. Everything random is a pure function of (seed, step, rank), so a resume
repeats nothing. V vocabulary, T tokens of a corpus, n of one text.
"""

import collections
import functools
import hashlib
import itertools
import re
import sys
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from corpora import EMBEDDED_VOCAB, open_text
from corpora.chats import FAMILIES
from corpora.folder import write_atomic
from corpora.program import BadInput
from corpora.split import HELD, TRAIN
from corpora.store import Store, digest, whole

# ---- special tokens

# Our own special tokens, with the ids 0 to 14.
ROLES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]",
         *(f"[PRED_{number}]" for number in range(1, 11)))
# How our own tokenizers, encoders and decoders spell a role. The first that a tokenizer has counts.
SPELLINGS = {
    "pad": ("[PAD]", "<pad>", "<|pad|>"),
    "cls": ("[CLS]", "<s>", "<bos>", "<|begin_of_text|>", "<|endoftext|>"),
    "sep": ("[SEP]", "</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>"),
    "mask": ("[MASK]", "<mask>"),
}


class Chat(NamedTuple):
    """Ids around the turns of a row: [CLS] (system S end) user U end assistant A [SEP]."""
    system: tuple[int, ...] | None  # None: no such turn
    user: tuple[int, ...]
    end: tuple[int, ...]
    assistant: tuple[int, ...]


class Special(NamedTuple):
    """The ids of a tokenizer that have a role."""
    pad: int | None
    cls: int
    sep: int
    mask: int | None
    preds: tuple[int, ...]  # [PRED_1] and so on, may be ()
    vocab: int  # V, one more than the highest id
    ids: np.ndarray  # all special ids, sorted
    starts: np.ndarray  # (V,) bool: the token begins a word
    family: Chat | None = None  # of a decoder whose family is known

    @property
    def chat(self):
        """What stands around turns: a family's own ids, or one [SEP] behind each turn."""
        return self.family or Chat((), (), (self.sep,), ())


def _find_special(inner):
    """Special tokens found by name -> Special. BadInput if none is [CLS] or [SEP]."""
    pieces = inner.get_vocab(with_added_tokens=True)
    added = inner.get_added_tokens_decoder()
    spellings = dict(SPELLINGS)
    family = next((texts for name, texts in FAMILIES.items() if name in pieces), None)
    # A chat begins and ends as its family says.
    if family:
        spellings["cls"] = family[:1]
        spellings["sep"] = family[1:2]
    roles = {}
    for role, names in spellings.items():
        roles[role] = next((pieces[name] for name in names if name in pieces), None)
        # A row can do without [PAD] and [MASK].
        if roles[role] is None and role in ("cls", "sep"):
            raise BadInput(f"the tokenizer has no {role} token ({' or '.join(names)}); add it, or "
                           "use another tokenizer")
    preds = [pieces[name] for name in ROLES[5:] if name in pieces]
    # Special is what the file marks as special, and what has a role.
    ids = {index for index, token in added.items() if token.special}
    ids.update(index for index in (*roles.values(), *preds) if index is not None)
    starts = _word_starts(inner, pieces, added)
    return Special(**roles, preds=tuple(preds), vocab=len(starts), starts=starts,
                   ids=np.array(sorted(ids), np.int64),
                   family=Chat(*_chat_ids(inner, family[2:])) if family else None)


def _chat_ids(inner, texts):
    # In these texts the name of a special token does mean this token.
    inner.encode_special_tokens = False
    for text in texts:
        if text is None:
            yield None
        else:
            yield tuple(inner.encode(text, add_special_tokens=False).ids)


def _word_starts(inner, pieces, added):
    """(V,) bool: the token begins a word; added tokens do."""
    is_word_piece = isinstance(inner.model, models.WordPiece)
    is_byte_level = "ByteLevel" in str(inner.pre_tokenizer)
    spelled = decoders.ByteLevel()
    starts = np.ones(max(pieces.values()) + 1, bool)
    for piece, index in pieces.items():
        if index in added:
            continue
        if is_word_piece:
            starts[index] = not piece.startswith("##")
            continue
        # A byte-level piece spells bytes; a part of a character comes out as U+FFFD.
        text = spelled.decode([piece]).lstrip("\ufffd") if is_byte_level else piece
        # A space mark or punctuation begins a word, and in Chinese and Japanese, which write no
        # spaces, each character.
        is_inside = not text or unicodedata.category(text[0])[0] in "LNM"
        starts[index] = not is_inside or "\u2e80" <= text[:1] <= "\u9fff"
    return starts


# ---- tokenizer and rows of ids

# A vocabulary of some ten thousand pieces hardly changes with more text than this.
TRAIN_CHARACTERS = 20_000_000
# Byte-level BPE never merges across this boundary, so each word is encoded once.
BETWEEN_WORDS = re.compile(r"(?<=\S)(?= \S)")


class Tokenizer:
    """A tokenizer of the tokenizers library, `inner`, and its special ids. It never changes."""

    def __init__(self, inner):
        # Padding and truncation would change the data unseen. [CLS] and [SEP] are not added here:
        # collate adds them.
        inner.no_padding()
        inner.no_truncation()
        self.inner = inner
        self.special = _find_special(inner)
        self.vocab = self.special.vocab
        # The hash covers everything that decides which ids a text gets.
        self.hash = hashlib.sha256(inner.to_str().encode()).hexdigest()
        # A special token spelled out in a text stays text: a page with "</s>" must not end a row.
        inner.encode_special_tokens = True
        # If all this holds, the ids of a word are the same wherever it stands.
        self.by_words = (isinstance(inner.pre_tokenizer, pre_tokenizers.ByteLevel)
                         and inner.normalizer is None
                         and all(x.special for x in inner.get_added_tokens_decoder().values()))

    @classmethod
    def train(cls, texts, vocab):
        """A byte-level BPE of at most `vocab` pieces, special ones included."""
        if not len(ROLES) + 257 <= vocab <= 1_000_000:
            raise BadInput(f"vocab is {vocab}: special tokens, 256 bytes and some merges need at "
                           "least 300; the most is a million")
        inner = tokenizers.Tokenizer(models.BPE())
        # The space that is added makes a word one token wherever it stands; decoding drops it.
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        inner.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
        # Of the library's trainers this one gives the same file for the same text every time.
        trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=list(ROLES), min_frequency=2,
                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                      show_progress=False)
        inner.train_from_iterator(texts, trainer)
        return cls(inner)

    @classmethod
    def read(cls, path):
        """The tokenizer in a tokenizer.json; BadInput if there is none."""
        try:
            inner = tokenizers.Tokenizer.from_str(Path(path).read_text(encoding="utf-8"))
        # The library raises plain Exception for whatever it cannot parse.
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise BadInput(f"{path} is no tokenizer.json that can be read: {reason}") from None
        return cls(inner)

    def save(self, path):
        write_atomic(path, self.inner.to_str(pretty=True).encode())

    def with_tokens(self, names):
        """This tokenizer, or if it lacks one of these special tokens a new one that has them."""
        new = [name for name in names if self.inner.token_to_id(name) is None]
        if not new:
            return self
        inner = tokenizers.Tokenizer.from_str(self.inner.to_str())
        inner.add_special_tokens(new)
        return Tokenizer(inner)

    def encode(self, texts):
        """Texts -> the ids of each, (n,) uint32; n is 0 for an empty text only."""
        parts = [BETWEEN_WORDS.split(text) if self.by_words else [text] for text in texts]
        different = list(dict.fromkeys(itertools.chain.from_iterable(parts)))
        encoded = self.inner.encode_batch_fast(different, add_special_tokens=False)
        known = {}
        for part, found in zip(different, encoded):
            known[part] = found.ids
            # BERT's normaliser deletes some texts whole, say a zero-width space.
            if part and not found.ids:
                spelled = map(self.inner.token_to_id, ("[UNK]", "<unk>", "[MASK]", "<mask>"))
                known[part] = [next(index for index in spelled if index is not None)]
        return [np.array([*itertools.chain.from_iterable(map(known.get, row))], np.uint32)
                for row in parts]

    def decode(self, ids):
        """Ids -> text, without special tokens."""
        return self.inner.decode(list(ids))


def rows_of(tokenizer, texts, prefix=(), suffix=None, system=None, max_system=None,
            max_length=None, max_text=None):
    """Texts -> rows of ids, lists: [CLS] prefix text suffix; suffix None is [SEP]."""
    special = tokenizer.special
    suffix = [special.sep] if suffix is None else list(suffix)
    openings = [[special.cls]] * len(texts)
    # A chat opens with its system text, cut at `max_system` tokens.
    if system is not None:
        start = [special.cls, *special.chat.system]
        openings = [[*start, *ids[:max_system].tolist(), *special.chat.end]
                    for ids in tokenizer.encode(system)]
    rows = []
    longer = collections.Counter()  # {limit: texts that were cut there}
    for opening, ids in zip(openings, tokenizer.encode(texts)):
        row = [*opening, *prefix, *ids[:max_text].tolist(), *suffix]
        # Too long a row loses the end of its text, not the suffix.
        if max_length and len(row) > max_length:
            row = [*row[:max_length - len(suffix)], *suffix]
            longer[max_length] += 1
        elif max_text and len(ids) > max_text:
            longer[max_text] += 1
        rows.append(row)
    for limit, count in longer.items():
        print(f"warning: {count} of {len(rows)} texts are longer than {limit} tokens and were "
              "cut", file=sys.stderr)
    return rows


# ---- corpora

class Example(tuple):
    """A row as training reads it, a tuple because collate unpacks its views: the ids (n,) uint32 of
    each view and, if it is asked for, those of a chat's system text. `columns` holds the number of
    each one's column in the corpus, `cut` whether each one lost its end to max_length."""

    # A tuple cannot be filled in __init__.
    def __new__(cls, views, columns=None, cut=None):
        made = super().__new__(cls, views)
        made.columns = tuple(range(len(made)) if columns is None else columns)
        made.cut = tuple([False] * len(made) if cut is None else cut)
        return made


class Corpus:
    """Rows of token ids, one cell for each column. `hash` says what the data is."""

    def __init__(self, name, columns, tokenizer, tokens, offsets, identity, sides=None, split="all",
                 kinds=(), max_length=None, block=0):
        self.name = name
        self.columns = tuple(columns)
        self.sides = sides or len(self.columns)  # so many columns, from the first on, can be views
        self.tokenizer = tokenizer
        self.special = tokenizer.special
        self.max_length = max_length
        # The ids of cell i = row * len(columns) + column are tokens[offsets[i]:offsets[i + 1]].
        self.tokens = tokens  # (T,) uint32
        self.offsets = offsets  # (cells + 1,) int64
        # With `block`, all ids are run together instead, and each row is the next `block` of them.
        self.block = block
        count = len(tokens) // block if block else (len(offsets) - 1) // len(self.columns)
        kinds = np.asarray(kinds, np.uint8)  # of each row, TRAIN, HELD or LEFT_OUT; () if "all"
        self.held = np.flatnonzero(kinds == HELD)
        if block and len(self.columns) > 1:
            raise BadInput(f"--block {block} runs one text together, and {name} has the columns "
                           f"{', '.join(columns[:6])}; choose with --langs")
        if block and len(self.held):
            raise BadInput(f"--block {block} would run across the rows held out of {name}: name "
                           "other rows with --eval-data")
        if split == "all":
            self.rows = np.arange(count)
        elif split == "train":
            self.rows = np.flatnonzero(kinds == TRAIN)
        else:
            self.rows = self.held
        if not len(self.rows):
            raise BadInput(f"{name} has no rows for {split!r}: {count} in all are too few")
        self.hash = digest([identity, self.columns, tokenizer.hash, split, block])

    def __len__(self):
        return len(self.rows)

    def _cells(self, row):
        """The ids of every column of a row."""
        row = int(self.rows[row])
        if self.block:
            return [self.tokens[row * self.block:(row + 1) * self.block]]
        first = row * len(self.columns)
        ends = self.offsets[first:first + len(self.columns) + 1]  # (columns + 1,)
        return np.split(self.tokens[ends[0]:ends[-1]], ends[1:-1] - ends[0])

    def ids(self, row, column):
        """(n,) uint32 of a column by name or number; n is 0 where the row has no text in it."""
        if isinstance(column, str):
            column = self.columns.index(column)
        return self._cells(row)[column]

    def has_text(self, column):
        """Whether any row has text in a column."""
        lengths = np.diff(self.offsets).reshape(-1, len(self.columns))
        return column in self.columns and lengths[:, self.columns.index(column)].any()

    def count_cut(self, max_length):
        """How many texts that can be views have more than max_length tokens, and how many there
        are."""
        # All rows of a block have the same length.
        if self.block:
            return len(self) * (self.block > max_length), len(self)
        lengths = np.diff(self.offsets).reshape(-1, len(self.columns))[self.rows, :self.sides]
        return int((lengths > max_length).sum()), int((lengths > 0).sum())

    def example(self, row, views, choice, pairs="pivot", max_length=None, system=False):
        """A row -> an Example of one or two views, cut at max_length; the system text that opens a
        chat is no view, but the model reads it."""
        # `choice` is a number that the caller draws, to select among the columns that have text.
        cells = self._cells(row)
        filled = [column for column in range(self.sides) if len(cells[column])]
        columns = _choose(filled, views, int(choice), pairs)
        if system:
            columns = (*columns, self.columns.index("system"))
        whole = [cells[column] for column in columns]
        cut = [max_length is not None and len(ids) > max_length for ids in whole]
        return Example([ids[:max_length] for ids in whole], columns, cut)


def _choose(filled, views, choice, pairs):
    """The columns that have text -> those of the one or two views, by the number `choice`."""
    if views == 1:
        return (filled[choice % len(filled)],)
    # Two columns that follow each other: of paraphrases each predicts the next.
    if pairs == "neighbours":
        first = choice % (len(filled) - 1)
        return filled[first], filled[first + 1]
    # The first column is the pivot, and the other view is any of the rest.
    if filled[0] == 0:
        return 0, filled[1 + choice % (len(filled) - 1)]
    # A row without the pivot gives any two.
    both = list(itertools.permutations(filled, 2))
    return both[choice % len(both)]


def open_corpus(text, tokenizer=None, *, split="train", langs=None, vocab=None, skip_bad=False,
                cache="cache", count=20_000, seed=0, max_length=128, holdout=True, block=0,
                header="yes"):
    """What corpora.open_text gives, or what it can open -> Corpus. Raises BadInput.

    `vocab`: pieces of the tokenizer, if it is trained. `holdout`: keep back rows of a file as
    "valid" and "test", which are the same; otherwise every split is the whole file. `header`: as
    open_text.
    """
    if split not in ("train", "valid", "test"):
        raise BadInput(f"split {split!r}: choose train, valid or test")
    if not hasattr(text, "rows"):
        text = open_text(text, langs, skip_bad, count, seed, header)
    # Files may be large, so their ids lie on disk.
    if not text.embedded:
        store = Store(text, cache)
        if tokenizer is None:
            vocab = vocab or 8000
            folder = whole(store.folder / f"tokenizer-{vocab}",
                           functools.partial(_train_on, text, vocab))
            tokenizer = Tokenizer.read(folder / "tokenizer.json")
        # Training says how the files are read; its validation rows come from the same files.
        tokens, offsets, kinds, content = store.arrays(tokenizer, split == "train", holdout)
        if not holdout:
            split = "all"
            kinds = ()
        return Corpus(text.name, text.columns, tokenizer, tokens, offsets, content, text.sides,
                      split, kinds, max_length, block)
    rows = text.rows(split)
    # Whatever the split is, the tokenizer is made of the training text.
    if tokenizer is None:
        training = rows if split == "train" else text.rows("train")
        tokenizer = Tokenizer.train(itertools.chain(*training), vocab or EMBEDDED_VOCAB)
    ids = tokenizer.encode(itertools.chain(*rows))
    offsets = np.cumsum([0, *map(len, ids)])
    return Corpus(text.name, text.columns, tokenizer, np.concatenate(ids), offsets, digest(rows),
                  max_length=max_length, block=block)


def _train_on(source, vocab, folder):
    """A tokenizer of the start of each file, without the rows held out, into a folder."""
    kinds = source.find_kinds()
    rows = (texts for record, texts in source.records(TRAIN_CHARACTERS) if kinds[record] == TRAIN)
    tokenizer = Tokenizer.train(filter(None, itertools.chain.from_iterable(rows)), vocab)
    tokenizer.save(folder / "tokenizer.json")


# ---- batches

class Batches:
    """The examples of every step; a row comes once an epoch, unless its text is in the step
    already. BadInput at once if there are not enough columns, texts or rows."""

    def __init__(self, corpus, views, batch, seed, rank=0, world=1, in_batch=False, max_length=None,
                 pairs="pivot", system=False):
        self.corpus = corpus
        self.views = views
        self.batch = batch
        self.seed = seed
        self.rank = rank
        self.world = world
        self.in_batch = in_batch  # the loss compares the examples of a step
        # (row, choice) -> Example
        self.example = functools.partial(
            corpus.example, views=views, pairs=pairs, system=system,
            max_length=max_length or corpus.max_length)
        self.shuffled = (None, None)  # the last epoch that was asked for, and its rows
        if views > corpus.sides:
            raise BadInput(f"{corpus.name} has the single column {corpus.columns[0]!r}, and the "
                           "objective needs two: use parallel data (--data toy), or an "
                           "objective of single texts, such as mlm")
        if system and not corpus.has_text("system"):
            raise BadInput(f"--chat system: {corpus.name} has no system texts; use --chat plain")
        if system and corpus.special.chat.system is None:
            raise BadInput("--chat system: this tokenizer's chats have none; use --chat plain")
        if in_batch:
            self.examples(0)

    def rng(self, step, purpose=0, rank=None):
        """The random numbers of collate (purpose 0), the examples (1), an epoch's order (2)."""
        rank = self.rank if rank is None else rank
        return np.random.Generator(np.random.Philox([self.seed % 2 ** 64, purpose, step, rank]))

    def examples(self, step):
        """`batch` Examples of `views` texts, none longer than max_length."""
        if not self.in_batch:
            return self._draw(step * self.world + self.rank, self.batch, self.rng(step, 1))
        # A text in two examples of a step, whichever ranks they are on, would be a false negative.
        # So every rank makes the examples of all ranks, puts other rows in the place of repeats,
        # and takes its own examples.
        rng = self.rng(step, 1, rank=0)
        made = self._draw(step, self.batch * self.world, rng)
        seen = set()
        repeats = [index for index, example in enumerate(made) if not self._is_new(example, seen)]
        for index in repeats:
            made[index] = self._another(rng, seen)
        return made[self.rank * self.batch:(self.rank + 1) * self.batch]

    def _draw(self, turn, number, rng):
        """The examples turn * number and so on of the endless line of shuffled epochs."""
        choices = rng.integers(2 ** 31, size=number)
        last, order = self.shuffled
        made = []
        for i in range(number):
            epoch, index = divmod(turn * number + i, len(self.corpus))
            if epoch != last:
                last = epoch
                order = self.rng(epoch, purpose=2, rank=0).permutation(len(self.corpus))
                self.shuffled = (epoch, order)
            made.append(self.example(order[index], choice=choices[i]))
        return made

    def _another(self, rng, seen):
        """An example with new texts."""
        # Random rows come first, then a walk through the corpus, which may have few different rows.
        count = len(self.corpus)
        start = int(rng.integers(count))
        lucky = rng.integers(count, size=64)
        choice = rng.integers(2 ** 31)
        walk = ((start + more) % count for more in range(min(count, 10_000)))
        for row in itertools.chain(lucky, walk):
            example = self.example(row, choice=choice)
            if self._is_new(example, seen):
                return example
        raise BadInput(f"--batch {self.batch} on {self.world} rank(s): {self.corpus.name} has only "
                       f"{len(seen) // self.views} rows that share no text, and the rest of a "
                       "batch are negatives; use a smaller batch or more varied data")

    def _is_new(self, example, seen):
        """Whether no view is among the texts seen; then they are added."""
        # System texts do not count, as all chats may open alike.
        texts = {ids.tobytes() for ids in example[:self.views]}
        if not seen.isdisjoint(texts):
            return False
        seen |= texts
        return True


def prefetch(make, start, stop, depth=4):
    """make(start), ..., make(stop - 1), in order, made ahead by one thread. Its exceptions are
    raised here; closing the iterator ends it."""
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


# ---- maskings: which tokens of a batch are hidden, never special ones; ids (n,) -> (n,) bool. The
# ids are those of all rows end to end, each row between [CLS] and [SEP].


def _is_special(ids, special):
    index = np.searchsorted(special.ids, ids)
    return special.ids[np.minimum(index, len(special.ids) - 1)] == ids


def token_mask(ids, ratio, rng, special, exempt=True):
    """Each token with probability `ratio`, but at least one unless the ratio is 0. Without `exempt`
    special tokens are hidden too."""
    eligible = ~_is_special(ids, special) if exempt else np.ones(len(ids), bool)
    chosen = (rng.random(len(ids)) < ratio) & eligible
    if ratio > 0 and eligible.any() and not chosen.any():
        chosen[rng.choice(np.flatnonzero(eligible), 1)] = True
    return chosen


def exact_mask(ids, ratio, rng, special):
    """Exactly max(1, floor(ratio * e)) of the e tokens that are not special; none if e is 0."""
    eligible = np.flatnonzero(~_is_special(ids, special))
    number = min(len(eligible), max(1, int(ratio * len(eligible))))
    chosen = np.zeros(len(ids), bool)
    chosen[rng.choice(eligible, number, replace=False)] = True
    return chosen


def whole_word_mask(ids, ratio, rng, special):
    """Each whole word with probability `ratio`, so the expected share of tokens is `ratio` too."""
    barred = _is_special(ids, special)
    starts = special.starts[ids] | barred
    starts[1:] |= barred[:-1]
    words = np.cumsum(starts)  # (n,) number of the word; 0 if the text begins inside of one
    return (rng.random(len(ids) + 1) < ratio)[words] & ~barred


def span_mask(ids, ratio, rng, special, mean_length=3):
    """Spans of geometric length; any token is in one with probability `ratio`."""
    most = mean_length / (mean_length + 1)
    if ratio > most:
        raise BadInput(f"spans of mean length {mean_length} cannot cover {ratio} of a text, as a "
                       f"token must lie between two of them: at most {most:.2f}")
    if ratio == 0:
        return np.zeros(len(ids), bool)
    # Spans and gaps alternate, and the lengths of both are geometric: these are the chances that a
    # span ends and that a gap ends. A row may begin and end inside of either.
    leave = 1 / mean_length
    enter = ratio / ((1 - ratio) * mean_length)
    # Every second stretch is a span, and the first with probability `ratio`.
    is_span = (np.arange(len(ids) + 1) + (rng.random() >= ratio)) % 2 == 0
    lengths = np.minimum(rng.geometric(np.where(is_span, leave, enter)), len(ids))
    last = int(np.searchsorted(np.cumsum(lengths), len(ids))) + 1
    return np.repeat(is_span[:last], lengths[:last])[:len(ids)] & ~_is_special(ids, special)


# {a value of --masking: its function}; a new masking is a function and a line.
MASKS = {"token": token_mask, "word": whole_word_mask, "span": span_mask}


def corrupt(ids, chosen, rng, special, mask=.8, random=.1):
    """New ids (n,): of the chosen, the share `mask` becomes the mask token, `random` any token, and
    the rest stays. [Devlin et al. 2019, sec. 3.1]"""
    if special.mask is None:
        raise BadInput(f"the tokenizer has no mask token ({' or '.join(SPELLINGS['mask'])}), and "
                       "this objective hides tokens: use another tokenizer")
    fate = np.where(chosen, rng.random(len(ids)), 2.0)
    # Random tokens come from the whole vocabulary, special ones too, as in all released codes.
    drawn = rng.integers(special.vocab, size=len(ids))
    kept = np.where(fate < mask + random, drawn, ids)
    return np.where(fate < mask, special.mask, kept).astype(ids.dtype)
