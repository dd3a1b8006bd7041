"""Tokenizers: text to ids and back, and what every model has around a text.

Our own is a byte-level BPE, trained on the data. A pretrained model brings its own one, with other
special tokens, and a decoder its own way to write a chat. V vocabulary, n tokens of one text.
"""

import collections
import hashlib
import itertools
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from base.common import BadInput, atomic_file, shown, warn

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

CHATML = ("<|im_start|>", "<|im_end|>", "system\n", "user\n", "<|im_end|>\n<|im_start|>")

# How families of pretrained decoders write a chat. The key is a token that only tokenizers of this
# family have. Its value: the tokens that begin and end a row, then the texts before the system turn
# (None if the family has no such turn), before the user's turn, after each of these two turns, and
# before the assistant's turn.
FAMILIES = {
    # DeepSeek-R1-Distill.
    "<｜User｜>": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
                 "", "<｜User｜>", "", "<｜Assistant｜>"),
    # Llama-3.
    "<|start_header_id|>": ("<|begin_of_text|>", "<|eot_id|>",
                            "<|start_header_id|>system<|end_header_id|>\n\n",
                            "<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>",
                            "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    # Gemma.
    "<start_of_turn>": ("<bos>", "<end_of_turn>", None,
                        "<start_of_turn>user\n", "<end_of_turn>\n", "<start_of_turn>model\n"),
    # OLMo-2.
    "<|endofprompt|>": ("<|endoftext|>", "<|endoftext|>",
                        "<|system|>\n", "<|user|>\n", "\n", "<|assistant|>\n"),
    # Qwen3, with thinking turned off. It comes before Qwen2, because it also has <|im_start|>.
    "<think>": (*CHATML, "assistant\n<think>\n\n</think>\n\n"),
    # Qwen2, SmolLM2.
    "<|im_start|>": (*CHATML, "assistant\n"),
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


def ids_of_names(pieces):
    """Return {role: id or None} by the first spelling that a vocabulary has."""
    return {role: next((pieces[name] for name in names if name in pieces), None)
            for role, names in SPELLINGS.items()}


def ids_of_text(before, after):
    """Return {role: id} of [CLS] and [SEP] by the ids around a text. A name can mislead: in Gemma's
    vocabulary "<s>" is a tag of HTML, not the first token."""
    return dict(zip(["cls"], before[:1])) | dict(zip(["sep"], after[-1:]))


def find_special(inner, around=None, chats=True):
    """Find the special tokens of a tokenizer. It must encode the name of a special token as this
    token. The arguments are those of Tokenizer. Raises BadInput without [CLS] or [SEP]."""
    pieces = inner.get_vocab(with_added_tokens=True)
    added = inner.get_added_tokens_decoder()
    family = next((texts for name, texts in FAMILIES.items() if chats and name in pieces), None)
    ids = ids_of_names(pieces)
    if family:
        ids["cls"], ids["sep"] = map(pieces.get, family[:2])
    elif around and not chats:
        ids |= ids_of_text(*around)
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

LONG_WORD = re.compile(r"\w{1000}")
# Byte-level BPE never merges across this boundary, so that each word needs to be encoded once. For
# the toy data this takes 0.5 s instead of 3 s.
BETWEEN_WORDS = re.compile(r"(?<=\S)(?= \S)")
KNOWN_WORDS = 2 ** 18  # that one reading of files keeps, in about 100 MB


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

    def with_tokens(self, names, chats=None):
        """Return a tokenizer that has these special tokens, and `chats` (None: as before). It is
        this one if nothing changes."""
        chats = self.chats if chats is None else chats
        new = [name for name in names if self.inner.token_to_id(name) is None]
        if not new and chats == self.chats:
            return self
        inner = tokenizers.Tokenizer.from_str(self.inner.to_str())
        inner.add_special_tokens(new)
        return Tokenizer(inner, (self.special.before, self.special.after), chats)

    def encode(self, texts, may_be_empty=False, known=None):
        """Return the ids of each text, (n,) uint32, without special tokens. n is 0 for "" only, or
        with `may_be_empty` also for a text of which the tokenizer's normalizer keeps nothing.
        `known`: {word: ids}, which this call extends, so that the next one need not encode them."""
        if known is None or not self.by_words:
            known = {}
        elif len(known) > KNOWN_WORDS:
            known.clear()
        split_texts = [BETWEEN_WORDS.split(text) if self.by_words else [text] for text in texts]
        words = dict.fromkeys(itertools.chain.from_iterable(split_texts))
        words = [word for word in words if word not in known]
        encodings = self.inner.encode_batch_fast(words, add_special_tokens=False)
        # BERT's normalizer deletes a text of spaces. A training row must not lack it.
        unknown = self.special.mask or 0 if self.unknown is None else self.unknown
        for word, encoding in zip(words, encodings):
            known[word] = encoding.ids or [unknown] * bool(word and not may_be_empty)
        return [np.array([*itertools.chain.from_iterable(map(known.get, parts))], np.uint32)
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
