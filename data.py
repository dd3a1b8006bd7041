"""Text in, batches of examples out: corpora, the tokenizer, the token store, the order of the rows, the masks.

    text -> open_corpus -> Corpus (rows x columns of token ids) -> Batches.examples(step) -> an objective's collate

A row holds the same content in several columns (languages, captions, question and answer); a *view* is one cell of it. Everything
random is a pure function of (seed, step, rank), so that nothing has to be replayed on resume.

    python data.py prepare corpus.de-en.de corpus.de-en.en --vocab 16000      # tokenizer and token store of files
    python data.py inspect --objective mexma --step 3                         # what one batch of an objective looks like
    python data.py list                                                       # public data sets, their sizes and licences
    python data.py download multi30k                                          # one of them into data/multi30k
"""

import argparse
import collections
import csv
import difflib
import gzip
import hashlib
import itertools
import json
import lzma
import os
import re
import secrets
import shutil
import sys
import textwrap
import threading
import unicodedata
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

import grammar


class BadInput(ValueError):
    """A mistake of the user's: one line that names the value, the rule and the way out. Programs print it and exit with 2."""


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer

ROLES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") + tuple(f"[PRED_{place}]" for place in range(1, 11))
SPELLINGS = {"pad": ("[PAD]", "<pad>", "<|pad|>"), "cls": ("[CLS]", "<s>", "<bos>", "<|begin_of_text|>", "<|endoftext|>"),
             "sep": ("[SEP]", "</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>"), "mask": ("[MASK]", "<mask>")}
CHATML = ("<|im_start|>", "<|im_end|>", "system\n", "user\n", "<|im_end|>\n<|im_start|>", "assistant\n")
CHATS = {  # how decoders write a chat, by a token that only such a family has: its [CLS] and [SEP], then the texts of Chat
    "<｜User｜>": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "", "<｜User｜>", "", "<｜Assistant｜>"),             # DeepSeek-R1-Distill
    "<|start_header_id|>": ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>system<|end_header_id|>\n\n",
                            "<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\n"),   # Llama-3
    "<start_of_turn>": ("<bos>", "<end_of_turn>", None, "<start_of_turn>user\n", "<end_of_turn>\n", "<start_of_turn>model\n"),            # Gemma
    "<|endofprompt|>": ("<|endoftext|>", "<|endoftext|>", "<|system|>\n", "<|user|>\n", "\n", "<|assistant|>\n"),                       # OLMo-2
    "<think>": (*CHATML[:5], "assistant\n<think>\n\n</think>\n\n"),                                                                    # Qwen3
    "<|im_start|>": CHATML,                                                                                                             # Qwen2, SmolLM2
}
LONGEST_WORD = 10_000  # characters; byte pair encoding takes the square of a word's length
TRAIN_CHARACTERS = 20_000_000  # a vocabulary of some ten thousand pieces does not change with more text than this


class Chat(NamedTuple):
    """Ids around the turns of a row: [CLS] (system S end) user U end assistant A [SEP]. system None: the family's chats have no such turn."""
    system: tuple[int, ...] | None
    user: tuple[int, ...]
    end: tuple[int, ...]
    assistant: tuple[int, ...]


class Special(NamedTuple):
    """Ids that have a role. `ids`: all special ids, sorted; `starts` (V,): the token begins a word; `preds` may be (); pad and mask may be
    None. `family`: the Chat of a decoder's family, None for other tokenizers."""
    pad: int | None
    cls: int
    sep: int
    mask: int | None
    preds: tuple[int, ...]
    vocab: int
    ids: np.ndarray
    starts: np.ndarray
    family: Chat | None = None

    @property
    def chat(self):
        """What stands around the turns of a row: a family's own ids, or one [SEP] behind each turn."""
        return self.family or Chat((), (), (self.sep,), ())


def train_tokenizer(texts, vocab):
    """A byte-level BPE of at most `vocab` pieces, specials included (ids 0..14). Of the trainers in the library this is the one
    that gives the same file for the same text every time. It adds no [CLS] or [SEP]: collators do."""
    if vocab < len(ROLES) + 257:
        raise BadInput(f"--vocab {vocab} is too small: {len(ROLES)} special tokens, 256 bytes and some merges need at least 300")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # a word is one token wherever it stands
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])  # and the added space goes again
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab, special_tokens=list(ROLES), min_frequency=2,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return tokenizer


def read_tokenizer(path):
    """A tokenizer.json, with padding and truncation off, whatever it was saved with: both would change the data unseen."""
    try:
        tokenizer = Tokenizer.from_str(Path(path).read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain Exception for whatever it cannot parse
        raise BadInput(f"cannot read the tokenizer {path}: {str(error).splitlines()[0]}; give the path of a tokenizer.json") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def write_tokenizer(tokenizer, path):
    write_atomic(path, tokenizer.to_str(pretty=True).encode())


def tokenizer_hash(tokenizer):
    """Hex digest of everything that decides which ids a text gets."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def special(tokenizer):
    """The roles of our own, an encoder's or a decoder's special tokens, found by name. BadInput if there is none to open or to end a row."""
    pieces = tokenizer.get_vocab(with_added_tokens=True)
    spelled, family = dict(SPELLINGS), CHATS.get(next((name for name in CHATS if name in pieces), None))
    if family:
        spelled |= {"cls": family[:1], "sep": family[1:2]}
        before, tokenizer.encode_special_tokens = tokenizer.encode_special_tokens, False
        family = Chat(*(None if text is None else tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in family[2:]))
        tokenizer.encode_special_tokens = before
    roles = {role: next((pieces[name] for name in names if name in pieces), None) for role, names in spelled.items()}
    for role in ("cls", "sep"):
        if roles[role] is None:
            raise BadInput(f"the tokenizer has no {role} token ({' or '.join(spelled[role])}); add it, or use another tokenizer")
    preds = tuple(itertools.takewhile(lambda place: place is not None, (pieces.get(name) for name in ROLES[5:])))
    added = tokenizer.get_added_tokens_decoder()
    vocab = max(pieces.values()) + 1
    byte_level, word_piece = "ByteLevel" in f"{tokenizer.pre_tokenizer}", isinstance(tokenizer.model, models.WordPiece)
    starts = np.ones(vocab, bool)
    for piece, place in pieces.items():
        if place not in added:
            starts[place] = not piece.startswith("##") if word_piece else _begins_word(piece, byte_level)
    marked = {place for place, token in added.items() if token.special}
    ids = (marked | {*roles.values(), *preds}) - {None}
    return Special(**roles, preds=preds, vocab=vocab, ids=np.array(sorted(ids), np.int64), starts=starts, family=family)


def _begins_word(piece, byte_level):
    if byte_level:  # back to the characters that its bytes spell; what is only a part of a character comes out as U+FFFD
        piece = decoders.ByteLevel().decode([piece]).lstrip("\ufffd")
    # A space mark or punctuation does; and in Chinese and Japanese, which write no spaces, each character
    return bool(piece) and (unicodedata.category(piece[0])[0] not in "LNM" or "\u2e80" <= piece[0] <= "\u9fff")


def encode(tokenizer, texts):
    """Texts -> one uint32 array of ids each, without [CLS] and the like. A special token spelled out in a text stays plain text:
    a web page that contains "</s>" must not end a row. An empty text gives no ids, any other at least one."""
    before, tokenizer.encode_special_tokens = tokenizer.encode_special_tokens, True
    try:
        made = [np.array(found.ids, np.uint32) for found in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    finally:
        tokenizer.encode_special_tokens = before
    for place, text in enumerate(texts):
        if text and not len(made[place]):  # BERT's normaliser can delete a whole text, say a zero-width space
            names = (tokenizer.token_to_id(name) for name in ("[UNK]", "<unk>", "[MASK]", "<mask>"))
            made[place] = np.array([next(name for name in names if name is not None)], np.uint32)
    return made


# ---------------------------------------------------------------------------------------------------------------------
# Files

KINDS = {".tsv": "tsv", ".tab": "tsv", ".csv": "csv", ".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".txt": "text", ".text": "text"}
IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9]{0,9}([_-][A-Za-z0-9]{1,10})*")
CODE = re.compile(r"[a-z]{2,3}[0-9]*([_-][A-Za-z0-9]{1,8})*")  # en, deu, en1, zh-CN, eng_Latn
NAMES = set("src tgt trg source target text anchor positive negative s1 s2 sentence1 sentence2 id ref label score".split())
NOT_TEXT = {"id", "ref", "label", "score"}  # columns that are read only when --langs names them


def write_atomic(path, content):
    """Write bytes into a file, whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # otherwise a power cut can leave the new name on old or no content
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _plain(path):
    return Path(path.name.removesuffix(".gz").removesuffix(".xz"))


def read_lines(path):
    """(line number, line without its end) of a plain, .gz or .xz file."""
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, 1):
                yield number, line.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").rstrip(b"\r\n")
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise BadInput(f"cannot read {path}: {error}" + "; it is damaged or cut short" * (opener is not open)) from None


def _question(found):
    """What is asked and answered, of a record as NQ-Open ("answer": [...]) or HellaSwag ("ctx", "endings", "label") publishes it; {} of others."""
    answers, context, endings, label = map(found.get, ("answer", "ctx", "endings", "label"))
    if isinstance(answers, list) and all(isinstance(each, str) for each in answers):
        return {"answer": "; ".join(answers)}
    if isinstance(context, str) and isinstance(endings, list) and str(label) in [*"0123"[:len(endings)]]:
        return {"user": "\n".join([context, *map("{}) {}".format, "ABCD", endings)]), "assistant": "ABCD"[int(label)]}
    return {}


def _record(line, langs):
    """One line of JSON -> its rows {column: text}: one, or one per paragraph of a "text". Raises ValueError with the reason."""
    try:
        found = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"a JSON {type(found).__name__} where an object belongs: one object on each line")
    if isinstance(found.get("messages"), list):
        turns = [(turn.get("role"), turn.get("content")) for turn in found["messages"] if isinstance(turn, dict)]
        if sorted(str(role) for role, _ in turns if role != "system") != ["assistant", "user"] or len(dict(turns)) != len(turns):
            raise ValueError('"messages" must be one user turn, one assistant turn and at most one system turn')
        found = dict(turns)
    found |= _question(found)
    if "user" in found and "assistant" in found:
        found.setdefault("system", "")
    known = (langs, ("src", "tgt"), ("src", "trg"), ("anchor", "positive"), ("user", "assistant", "system"), ("text",), ("question", "answer"))
    if isinstance(found.get("translation"), dict) and not (langs and found.keys() >= set(langs)):
        row = found["translation"]
        if not row:
            raise ValueError("the translation is empty")
    elif names := next((names for names in known if names and found.keys() >= set(names)), ()):
        row = {name: found[name] for name in names}
    else:
        raise ValueError(f"no known keys among {', '.join(map(repr, found)) or 'none'}: translation, src + tgt, anchor + positive, "
                         "user + assistant, messages, text or question + answer (or name two of its keys with --langs)")
    row = {name: "" if text is None else text for name, text in row.items()}
    for name, text in row.items():
        if not isinstance(text, str):
            raise ValueError(f"{name!r} is {type(text).__name__}, not a string")
        text.encode()  # a ValueError if it holds half a surrogate pair, which is no character
    return [{"text": part} for part in row["text"].splitlines() if part.strip()] if list(row) == ["text"] else [row]


class Source:
    """Rows of text out of one or more files, streaming. `columns` are the chosen ones, and the first `sides` of them can be views
    (all but a chat's system text). `dropped` counts the bad lines left out (`skip_bad`), `sparse` the rows of a many-column table
    with too little text in the chosen columns. Every error is a BadInput, with FILE:LINE if it is about a line."""

    def __init__(self, paths, langs=(), skip_bad=False):
        self.paths, self.langs, self.skip_bad = [Path(path) for path in paths], langs, skip_bad
        self.dropped, self.sparse, self.counts = 0, 0, []
        for path in self.paths:
            if not path.is_file():
                raise BadInput(f"{path} is a folder; name the files in it" if path.is_dir() else f"there is no file {path}")
        plain = [_plain(path) for path in self.paths]
        if len(paths) > 1 and all(name.suffix and name.suffix.lower() not in KINDS for name in plain):
            same = len({name.stem for name in plain}) == 1  # corpus.de-en.de + corpus.de-en.en; else eng_Latn.dev + deu_Latn.dev
            self.layouts = [("moses", [name.suffix[1:] if same else name.stem for name in plain])]
        else:
            self.layouts = [self._layout(path, name.suffix.lower()) for path, name in zip(self.paths, plain)]
        known = list(dict.fromkeys(name for _, names in self.layouts for name in names))
        _languages(langs, known, self.paths[0])
        self.columns = tuple(langs or (name for name in known if name not in NOT_TEXT) or known)
        self.sides = len(self.columns)
        if {"user", "assistant", "system"} <= set(self.columns):         # the system text comes last, and is no view
            self.columns, self.sides = (*(name for name in self.columns if name != "system"), "system"), self.sides - 1

    def _layout(self, path, ending):
        """How to read a file, by its extension and its first line, and the names of all its columns."""
        first = next((raw.decode("utf-8", errors="replace") for _, raw in read_lines(path) if raw.strip()), None)
        if first is None:
            raise BadInput(f"{path} is empty")
        kind = KINDS.get(ending) or ("jsonl" if first.startswith("{") else "tsv" if "\t" in first else "text")
        if kind == "text":
            return kind, ["text"]
        if kind == "jsonl":
            names = {}
            for number, raw in itertools.islice(read_lines(path), 10_000):  # a file may name a language late
                try:
                    names |= {name: None for row in _record(raw.decode(), self.langs) for name in row} if raw.strip() else {}
                except ValueError as error:
                    if not names and not self.skip_bad:
                        raise BadInput(f"{path}:{number}: {error}") from None
            return kind, list(names)
        cells = next(csv.reader([first])) if kind == "csv" else first.split("\t")
        shape = CODE if len(cells) == 2 and kind == "tsv" else IDENTIFIER  # "Hello<TAB>Hallo" is a row, not two names
        named = all(shape.fullmatch(cell) or cell in NAMES for cell in cells) or self.langs and set(self.langs) <= set(cells)
        if named and len(set(cells)) == len(cells) > 1:
            return kind, cells
        if named and len(cells) > 1:
            raise BadInput(f"{path}:1: the header names a column twice: {', '.join(cells[:8])}; give every column a name of its own")
        if kind == "tsv" and len(cells) == 2:
            return "pairs", ["src", "tgt"]
        raise BadInput(f"{path}:1: {len(cells)} column{'s' * (len(cells) > 1)}, but the first line does not name them; add a header such as "
                       f"{'en,de' if kind == 'csv' else 'en<TAB>de'} (plain text, one row on a line, belongs in a .txt)")

    def _bad(self, path, number, reason):
        if not self.skip_bad:
            raise BadInput(f"{path}:{number}: {reason}; mend the line, or leave out such lines with --skip-bad")
        self.dropped += 1

    def held(self):
        """Numbers of the records kept for evaluation: the same whichever columns are chosen. Reads the files once, to count."""
        self.dropped, self.counts = 0, [sum(1 for _ in self._read(place)) for place in range(len(self.layouts))]
        return set(_held_out(sum(self.counts)).tolist())

    def rows(self, characters=None):
        """(number of the record, one text a column, "" for none). `characters`: stop after so many, as many from each file."""
        self.dropped = self.sparse = 0
        for place, (_, names) in enumerate(self.layouts):
            left = (characters or 0) / len(self.layouts)
            for record, (number, row) in enumerate(self._read(place), sum(self.counts[:place])):
                found = tuple("" if (text := row.get(name, "")).isspace() else text for name in self.columns)
                empty = [name for name, text in zip(self.columns[:self.sides], found) if not text]
                long = max((len(word) for text in found if len(text) > LONGEST_WORD for word in text.split()), default=0)
                if long > LONGEST_WORD:
                    self._bad(self.paths[place], number, f"a word of {long:,} characters, over {LONGEST_WORD:,}: the tokenizer would take hours")
                elif len(names) - ("system" in names) <= 2 and not set(empty).isdisjoint(names):  # a pair must be whole;
                    self._bad(self.paths[place], number, f"empty {empty[0]!r}")                 # in a wide table "" is no text
                elif self.sides - len(empty) < min(2, self.sides):
                    self.sparse += 1
                else:
                    yield record, found
                left -= sum(map(len, found))
                if characters and left <= 0:
                    break

    def _read(self, place):
        """The records of one file (of all, if they are parallel): (line number, {column: text})."""
        (kind, names), path = self.layouts[place], self.paths[place]
        if kind == "moses":
            yield from self._moses(names)
            return
        for number, raw in read_lines(path):
            try:
                line = raw.decode()
                if kind == "jsonl":
                    for row in _record(line, self.langs) if line.strip() else ():
                        if not self.langs and (late := row.keys() - names):
                            raise ValueError(f"{min(late)!r} is no column of the lines before; choose columns with --langs")
                        yield number, row
                elif kind == "text":
                    if line and not line.isspace():
                        yield number, {"text": line}
                elif number > 1 or kind == "pairs":
                    cells = next(csv.reader([line], strict=True)) if kind == "csv" else line.split("\t")
                    if cells and len(cells) != len(names):
                        raise ValueError(f"{len(cells)} cells, but {len(names)} columns ({', '.join(names[:6])})")
                    if cells:
                        yield number, dict(zip(names, cells))
            except UnicodeDecodeError as error:
                self._bad(path, number, f"not UTF-8 at byte {error.start}; convert the file, say with iconv -f latin1 -t utf-8")
            except (ValueError, csv.Error) as error:
                self._bad(path, number, error)

    def _moses(self, names):
        for lines in itertools.zip_longest(*map(read_lines, self.paths)):
            if None in lines:  # never skipped: where one line is missing, all after it may be misaligned
                place, (number, raw) = next((place, line) for place, line in enumerate(lines) if line)
                raise BadInput(f"{self.paths[lines.index(None)]} has {number - 1:,} lines, {self.paths[place]} has more; line N of all must be "
                               f"one sentence. First extra line: {self.paths[place]}:{number}: {raw[:60].decode(errors='replace')!r}")
            row = {}
            try:
                for path, name, (number, raw) in zip(self.paths, names, lines):  # noqa: B007
                    row[name] = raw.decode()
            except ValueError as error:
                self._bad(path, number, error)
            else:
                yield number, row


# ---------------------------------------------------------------------------------------------------------------------
# Corpora

EMBEDDED = ("toy", "regex", "pydoc")
EMBEDDED_VOCAB = 4096  # nearly a piece for every word form of the five languages: short rows, and words can be matched


def _embedded(name, split, count, seed):
    """Columns and rows of a corpus that needs no file. `count` is for "train"; the two others have at most 1000 rows."""
    count = count if split == "train" else min(count, 1000)
    if name == "toy":
        return grammar.LANGUAGES, [tuple(row[name] for name in grammar.LANGUAGES) for row in grammar.toy(split, count, seed)]
    if name == "regex":
        return ("english", "regex"), grammar.regex(split, count, seed)
    return ("text",), [(text,) for text in _paragraphs() if split == ("train", "valid", "test")[
        np.searchsorted([90, 95], hashlib.sha256(text.encode()).digest()[0] * 100 // 256, side="right")]]


def _paragraphs():
    """The prose of the language reference that comes with Python: no titles, grammar rules, code or headings of lists."""
    from pydoc_data import topics
    blocks = itertools.chain.from_iterable(re.split(r"\n\s*\n", text) for text in topics.topics.values())
    prose = (" ".join(block.removeprefix("* ").split()) for block in blocks if not re.search(r"^[*=~-]{3}|::=|>>>|\n *\* ", block, re.M))
    return [text for text in dict.fromkeys(prose) if re.fullmatch(r"\(?[A-Z].+[.:)]", text) and text.count(" ") >= 7]


def meant(word, known, otherwise=""):
    """"; did you mean X?", the end of a line about a name that is unknown; `otherwise` if none is near."""
    near = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {near[0]}?" if near else otherwise


def _paths(spec):
    if isinstance(spec, (str, Path)):
        spec = [str(spec)] if Path(spec).exists() else [part.strip() for part in str(spec).split(",")]
    paths = [str(path) for path in spec]
    if len(paths) == 1 and not Path(paths[0]).exists() and not Path(paths[0]).suffix:
        raise BadInput(f"--data {paths[0]}: neither a file nor one of {', '.join(EMBEDDED)}"
                       + meant(paths[0], EMBEDDED, "; give the path of a file"))
    return paths


def _languages(langs, known=(), name=""):
    parts = langs.split(",") if isinstance(langs, str) else langs or ()
    chosen = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
    if wrong := [lang for lang in chosen if known and lang not in known]:
        raise BadInput(f"--langs {wrong[0]}: {name} has the columns {', '.join(known)}{meant(wrong[0], known)}")
    return chosen


def _without(index, removed):
    """The index-th of the whole numbers that are not in `removed` (sorted): [0, 1, 2] without [1] -> [0, 2, 3]."""
    return index + np.searchsorted(removed - np.arange(len(removed)), index, side="right")


def _held_out(count):
    """Which of `count` records are kept for evaluation: 1 %, at least 200 of 2,000 or a tenth of fewer, at most 1,000."""
    size = min(1000, max(count // 100, min(200, count // 10)))
    return permutation(np.arange(size), count, 0, np.zeros(size, int)) if size else np.zeros(0, int)


def has_header(spec, langs=None, skip_bad=False):
    """Do the rows of this data set open with system texts?"""
    return spec not in EMBEDDED and "system" in (source := Source(_paths(spec), _languages(langs), skip_bad)).columns[source.sides:]


def texts(spec, split="valid", langs=None, limit=None, *, holdout=True, skip_bad=False, header=False, seed=0):
    """Raw texts {column: [text]} of a split, aligned by row; a row with an empty column is left out. Of a file, "valid" and
    "test" are the rows that training never sees, or all rows with holdout=False. `header`: a chat's "system" texts too."""
    if spec in EMBEDDED:
        known, rows = _embedded(spec, split, 20_000, seed)
        columns = _languages(langs, known, spec) or known
        rows = [tuple(row[known.index(name)] for name in columns) for row in rows]
    else:
        source = Source(_paths(spec), _languages(langs), skip_bad)
        held = source.held() if holdout else None
        columns = source.columns if header else source.columns[:source.sides]  # of a chat the question and the answer
        rows = (row[:len(columns)] for record, row in source.rows()
                if all(row[:source.sides]) and (held is None or (record in held) == (split != "train")))
    rows = list(itertools.islice(rows, limit))
    return {name: [row[place] for row in rows] for place, name in enumerate(columns)}


class Corpus:
    """Rows of token ids, cut at `max_length` only by Batches. The ids of cell (row, column) are tokens[offsets[i]:offsets[i + 1]],
    i = row * len(columns) + column; both may lie on disk (Stored). With `block`, all ids are run together instead, and a row is the
    next so many. `hash` says what the data is: source, tokenizer, columns, split."""

    def __init__(self, name, columns, tokenizer, tokens, offsets, identity, sides=None, split="all", held=(), max_length=None, block=0):
        self.name, self.columns, self.sides, self.max_length = name, tuple(columns), sides or len(columns), max_length
        self.tokenizer, self.special, self.tokens, self.offsets = tokenizer, special(tokenizer), tokens, offsets
        self.held, self.split = np.array(held, np.int64), split
        if block and len(columns) > 1:
            raise BadInput(f"--block {block}: {name} has the columns {', '.join(columns[:6])}, and only one text can be run together; choose with --langs")
        self.block, whole = block, len(tokens) // block if block else (len(offsets) - 1) // len(columns)
        self.empty = frozenset()  # columns without any text
        if block and not whole:
            raise BadInput(f"--block {block}: {name} has only {len(tokens)} tokens; choose a smaller block")
        self.rows = {"all": whole, "train": whole - len(self.held)}.get(split, len(self.held))
        if not self.rows:
            raise BadInput(f"{name} has no rows for {split!r}" + (f": {whole} rows are too few to hold some out" if whole else ""))
        said = [identity, self.columns, tokenizer_hash(tokenizer), split] + [block] * bool(block)
        self.hash = hashlib.sha256(json.dumps(said).encode()).hexdigest()

    def __len__(self):
        return self.rows

    def _cells(self, row):
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of {self.rows}")
        if self.block:
            return [self.tokens[row * self.block:(row + 1) * self.block]]
        if self.split != "all":
            row = _without(row, self.held) if self.split == "train" else self.held[row]
        row = int(row) * len(self.columns)
        ends = self.offsets[row:row + len(self.columns) + 1]
        return np.split(self.tokens[int(ends[0]):int(ends[-1])], ends[1:-1] - ends[0])

    def ids(self, row, column):
        """(n,) uint32, read-only, of a column by name or number; empty: the row has no text in it."""
        return self._cells(row)[self.columns.index(column) if isinstance(column, str) else column]

    def example(self, row, views, choice, pairs="pivot"):
        """The row as one or two views. Two: the first column, which is the pivot, and one of the others; without a pivot any two.
        Or, of the columns with text, two `neighbours`, as for paraphrases of which each predicts the next.
        `choice`: a whole number that the caller draws; it selects among the columns that have text."""
        cells = self._cells(row)[:self.sides]
        filled = [ids for ids in cells if len(ids)]
        if views == 1:
            return (filled[choice % len(filled)],)
        if pairs == "neighbours":
            return tuple(filled[choice % (len(filled) - 1):][:2])
        if len(cells[0]):
            return filled[0], filled[1 + choice % (len(filled) - 1)]
        choice, first = divmod(choice, len(filled))
        others = filled[:first] + filled[first + 1:]
        return filled[first], others[choice % len(others)]


def open_corpus(spec, tokenizer=None, *, split="train", langs=None, vocab=None, skip_bad=False, cache="cache", count=20_000, seed=0,
                max_length=128, holdout=True, block=0):
    """"toy", "regex", "pydoc" or files -> Corpus. Of several files, Moses files are put side by side, others one after the other.
    Without a tokenizer, one of `vocab` pieces (4096; 8000 for files) is trained on the start of the training text. Files go
    through a store in the folder `cache`, made once. `count`, `seed`: rows of toy and regex. `holdout`: keep back rows of a file
    as its "valid" and "test" (the same rows); otherwise every split is the whole file. `block`: as Corpus. Raises BadInput."""
    if split not in ("train", "valid", "test"):
        raise BadInput(f"split {split!r}: choose train, valid or test")
    if spec not in EMBEDDED:
        source = Source(_paths(spec), _languages(langs), skip_bad)
        tokenizer, tokens, offsets, meta = _store(source, tokenizer, vocab or 8000, Path(cache))
        contents = [(one["size"], one["sha256"]) for one in meta["sources"]]
        split, held = (split, meta["held"]) if holdout else ("all", ())
        corpus = Corpus(_stem(source), source.columns, tokenizer, tokens, offsets, [contents, skip_bad], source.sides, split, held, max_length, block)
        corpus.empty = frozenset(name for name, texts in zip(source.columns, meta["texts"]) if not texts)
        return corpus
    known, rows = _embedded(spec, split, count, seed)
    columns = _languages(langs, known, spec) or known
    places = [known.index(name) for name in columns]
    if tokenizer is None:
        train = rows if split == "train" else _embedded(spec, "train", count, seed)[1]
        tokenizer = train_tokenizer((row[place] for row in train for place in places), vocab or EMBEDDED_VOCAB)
    ids = encode(tokenizer, [row[place] for row in rows for place in places])
    offsets = np.concatenate([[0], np.cumsum([len(cell) for cell in ids])])
    identity = [spec, grammar.VERSION, split, len(rows), seed, hashlib.sha256(repr(rows).encode()).hexdigest()]
    return Corpus(spec, columns, tokenizer, np.concatenate(ids), offsets, identity, max_length=max_length, block=block)


# ---------------------------------------------------------------------------------------------------------------------
# Token store

STORE = 2  # version of its layout
ARRAYS = {"tokens.bin": np.uint32, "offsets.bin": np.int64}


def _stem(source):
    return "+".join(dict.fromkeys(_plain(path).stem for path in source.paths))[:80]


def _fingerprint(path):
    """What a file is, without reading all of it: size, time, and the digest of its first and last million bytes."""
    with open(path, "rb") as file:
        start, found = file.read(1_000_000), os.fstat(file.fileno())
        file.seek(max(0, found.st_size - 1_000_000))
        return {"size": found.st_size, "mtime_ns": found.st_mtime_ns, "sha256": hashlib.sha256(start + file.read()).hexdigest()}


class Stored:
    """The array in a file, read slice by slice: of a memory map, every page ever touched would count as this process's memory."""

    def __init__(self, path, kind):
        self.file, self.dtype, self.lock = open(path, "rb"), np.dtype(kind), threading.Lock()
        self.length = os.fstat(self.file.fileno()).st_size // self.dtype.itemsize

    def __len__(self):
        return self.length

    def __getitem__(self, part):
        start, stop, _ = part.indices(self.length)
        with self.lock:
            self.file.seek(start * self.dtype.itemsize)
            return np.frombuffer(self.file.read((stop - start) * self.dtype.itemsize), self.dtype)


def _store(source, tokenizer, vocab, cache):
    """-> tokenizer, tokens (uint32), offsets (int64), meta: all in the folder cache/FILES/CONTENT-TOKENIZER, which is made
    first if there is none for what the files hold now. Several tokenizers may lie side by side."""
    digest = lambda value: hashlib.sha256(json.dumps(value).encode()).hexdigest()[:10]
    sources = [_fingerprint(path) for path in source.paths]
    base = cache / f"{_stem(source)}-{digest([[str(path.resolve()) for path in source.paths], source.columns, source.skip_bad])}"
    content = digest([STORE, sources])
    own = base / f"{content}-{vocab}.json"  # the tokenizer trained on these files
    folder = lambda: base / f"{content}-{tokenizer_hash(tokenizer)[:10]}"
    try:
        asked, tokenizer = tokenizer, tokenizer or (read_tokenizer(own) if own.exists() else None)
        if tokenizer is None or not folder().exists():
            old = [path for path in base.glob("[!.]*") if not path.name.startswith(content)]  # of what the files were before
            if old:
                print(f"{source.paths[0].name}: preparing anew, the data is not what it was", file=sys.stderr)
            held = source.held()
            start = (row for record, row in source.rows(TRAIN_CHARACTERS) if record not in held)
            tokenizer = tokenizer or train_tokenizer((text for row in start for text in row if text), vocab)
            _prepare(source, tokenizer, folder(), {"sources": sources, "columns": source.columns}, held)
            for path in old:  # Windows keeps what somebody has open
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        if asked is None and not own.exists():
            write_tokenizer(tokenizer, own)
        meta = json.loads((folder() / "meta.json").read_text(encoding="utf-8"))
        tokens, offsets = (Stored(folder() / name, kind) for name, kind in ARRAYS.items())
        return tokenizer, tokens, offsets, meta
    except OSError as error:
        raise BadInput(f"cannot write the token store {base}: {error.strerror}; choose another folder with --cache") from None


def _prepare(source, tokenizer, folder, meta, held):
    """Text -> token store, in constant memory. It is made under another name and then renamed, so it is whole or not there, also
    when two processes make it at once (the first one wins)."""
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(6)}.part")
    part.mkdir(parents=True)
    rows, end, held_rows, width = 0, 0, [], len(source.columns)
    texts, totals, longest = np.zeros((3, width), np.int64)  # of each column, in tokens
    try:
        with open(part / "tokens.bin", "wb") as tokens, open(part / "offsets.bin", "wb") as offsets, \
                tqdm(desc=f"prepare {_stem(source)}", unit=" rows", unit_scale=True, disable=None, mininterval=0.5) as bar:
            offsets.write(np.zeros(1, np.int64).tobytes())
            lines = source.rows()
            for chunk in iter(lambda: list(itertools.islice(lines, 1024)), []):
                ids = encode(tokenizer, [text for _, row in chunk for text in row])
                lengths = np.array([len(cell) for cell in ids], np.int64)
                held_rows += [place for place, (record, _) in enumerate(chunk, rows) if record in held]
                tokens.write(np.concatenate(ids).tobytes())
                offsets.write((end + np.cumsum(lengths)).tobytes())
                rows, end, lengths = rows + len(chunk), end + int(lengths.sum()), lengths.reshape(-1, width)
                texts, totals, longest = texts + (lengths > 0).sum(0), totals + lengths.sum(0), np.maximum(longest, lengths.max(0))
                bar.update(len(chunk))
        left_out = f"{source.dropped:,} bad lines and {source.sparse:,} rows with too little text in {', '.join(source.columns[:6])}"
        if not rows:
            raise BadInput(f"{source.paths[0]}: no usable row, only {left_out}; check the file and --langs")
        meta |= {"rows": rows, "held": held_rows, "dropped": source.dropped, "sparse": source.sparse, "texts": texts.tolist(),
                 "tokens": totals.tolist(), "longest": longest.tolist()}
        write_atomic(part / "meta.json", json.dumps(meta, indent=1).encode())
        try:
            part.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process was first, with the same content
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    if source.dropped or source.sparse:
        print(f"{source.paths[0].name}: kept {rows:,} rows, left out {left_out}", file=sys.stderr)


# ---------------------------------------------------------------------------------------------------------------------
# Batches

def _mix(value):
    """splitmix64's finaliser: whole numbers (N,) uint64 -> (N,) that look independent; overflow is meant."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def permutation(places, count, seed, epochs):
    """Where a shuffle of range(count) puts `places` (N,), another shuffle for each seed and epoch (N,), in O(N) memory: a Feistel
    network permutes the next even power of two, and what falls outside of the range is sent through again."""
    half = np.uint64(max(1, (int(count - 1).bit_length() + 1) // 2))
    low = (np.uint64(1) << half) - np.uint64(1)
    keys = _mix(np.asarray(epochs, np.uint64) + _mix(np.array([seed % 2 ** 64], np.uint64)))

    def network(value, keys):
        left, right = value >> half, value & low
        for turn in range(6):
            left, right = right, left ^ (_mix(_mix(keys + np.uint64(turn)) + right) & low)
        return (left << half) | right

    value = network(np.asarray(places, np.uint64), keys)
    while (outside := value >= count).any():
        value[outside] = network(value[outside], keys[outside])
    return value.astype(np.int64)


def open_training(config, views, distinct, tokenizer=None, rank=0, world=1):
    """The corpus and the batches that a TrainConfig asks for, for an objective with so many views."""
    corpus = open_corpus(config.data, tokenizer, langs=config.langs, vocab=config.vocab, skip_bad=config.skip_bad, cache=config.cache,
                         holdout=not config.eval_data, block=config.block)
    return corpus, Batches(corpus, views, config.batch, config.seed, rank, world, distinct, config.cut, config.pairs, config.chat == "shared-header",
                           config.look_ahead)


def share_out(examples, parts):
    """Split examples into parts of about equally many tokens: the longest first, each to the part that has the fewest so far."""
    made, totals = [[] for _ in range(parts)], np.zeros(parts, int)
    for example in sorted(examples, key=lambda example: -sum(map(len, example))):
        part = int(totals.argmin())
        made[part].append(example)
        totals[part] += sum(map(len, example))
    return made


class Batches:
    """The examples of every step, as a pure function of (seed, step, rank): resuming replays nothing, and the order of calls does
    not matter. Every row comes once an epoch. `distinct`: no text occurs in two examples of a step, whichever ranks they are on,
    where it would be a false negative; a repeat gives way to another row. `header`: an example ends with the chat's system text.
    `look_ahead`: so many steps at a time share out their examples anew, so that each has about as many tokens, and `batch` on average.
    Raises BadInput at once if the data has not enough views or distinct rows."""

    def __init__(self, corpus, views, batch, seed, rank=0, world=1, distinct=False, max_length=None, pairs="pivot", header=False, look_ahead=1):
        self.pairs, self.corpus, self.views, self.batch, self.seed, self.rank, self.world = pairs, corpus, views, batch, seed, rank, world
        self.distinct, self.max_length = distinct, max_length or corpus.max_length
        if views > corpus.sides:
            raise BadInput(f"{corpus.name} has the single column {corpus.columns[0]!r}, but the objective needs two views of a "
                           "row; use parallel data (--data toy), or an objective with one view")
        if header and ("system" not in corpus.columns or "system" in corpus.empty):
            raise BadInput(f"--chat shared-header: {corpus.name} has no system texts; use chat data (system, user, assistant), or --chat plain")
        if header and corpus.special.chat.system is None:
            raise BadInput("--chat shared-header: chats of this tokenizer's family have no system turn; use --chat plain")
        self.header = corpus.columns.index("system") if header else None
        self.look_ahead, self.shared = look_ahead, (None, None)          # the last steps that were shared out, and their examples
        if distinct:
            seen, found = set(), 0
            for row in range(len(corpus)):
                found += self._is_new(self._example(row, 0), seen)
                if found == batch * world:
                    break
            else:
                on = f" on each of {world} ranks" if world > 1 else ""
                raise BadInput(f"--batch {batch}{on}: {corpus.name} has only {found} rows ({len(corpus)} with repeats) that share no "
                               f"text, and the objective takes the rest of a batch for negatives; " +
                               (f"use --batch {found // world} or less" if found // world > 1 else "use more varied data"))

    def rng(self, step, purpose=0, rank=None):
        """The chance that the objective's collate gets (purpose 0), or that of the examples (1)."""
        return np.random.Generator(np.random.Philox([self.seed % 2 ** 64, purpose, step, self.rank if rank is None else rank]))

    def _example(self, row, choice):
        example = self.corpus.example(int(row), self.views, int(choice), self.pairs)
        if self.header is not None:
            example += (self.corpus.ids(int(row), self.header),)
        return tuple(ids[:self.max_length] for ids in example)

    def _is_new(self, example, seen):
        texts = {ids.tobytes() for ids in example}
        if new := seen.isdisjoint(texts):
            seen |= texts
        return new

    def examples(self, step):
        """`batch` tuples of `views` arrays of ids, none longer than max_length."""
        if not self.distinct:
            draw = lambda step, rank: self._draw(step * self.world + rank, self.batch, self.rng(step, 1, rank))
            if self.look_ahead == 1:
                return draw(step, self.rank)
            first, parts = self.shared
            if first != (now := step - step % self.look_ahead):
                turns = itertools.product(range(now, now + self.look_ahead), range(self.world))
                parts = share_out([example for turn in turns for example in draw(*turn)], self.look_ahead * self.world)
                self.shared = now, parts
            return parts[(step - now) * self.world + self.rank]
        rng = self.rng(step, 1, rank=0)  # every rank makes the examples of all and takes its own
        made, seen, count = self._draw(step, self.batch * self.world, rng), set(), len(self.corpus)
        for place in [place for place, example in enumerate(made) if not self._is_new(example, seen)]:
            start = int(rng.integers(count))  # luck first, and for a corpus of few distinct rows a walk through it
            tries = itertools.chain(rng.integers(count, size=64), ((start + more) % count for more in range(min(count, 10_000))))
            choice = rng.integers(2 ** 31)
            made[place] = next((example for row in tries if self._is_new(example := self._example(row, choice), seen)), None)
            if made[place] is None:
                raise BadInput(f"--batch {self.batch}: {self.corpus.name} gave no {len(made)} rows without a text in common; "
                               "use a smaller batch or more varied data")
        return made[self.rank * self.batch:(self.rank + 1) * self.batch]

    def _draw(self, turn, number, rng):
        """The examples turn * number and so on of the endless shuffled row of epochs."""
        count, places = len(self.corpus), turn * number + np.arange(number)
        rows = permutation(places % count, count, self.seed, places // count)
        return [self._example(row, choice) for row, choice in zip(rows, rng.integers(2 ** 31, size=number))]


def prefetch(make, start, stop, depth=4):
    """make(start), ..., make(stop - 1), in order, computed ahead by one thread. An exception there is raised here. Closing
    the iterator ends the thread after the make() that it is in."""
    steps, ahead, pool = iter(range(start, stop)), collections.deque(), ThreadPoolExecutor(1, "prefetch")
    submit = lambda number: ahead.extend(pool.submit(make, step) for step in itertools.islice(steps, number))
    try:
        submit(depth)
        while ahead:
            made = ahead.popleft().result()
            submit(1)
            yield made
    finally:
        pool.shutdown(cancel_futures=True)


# ---------------------------------------------------------------------------------------------------------------------
# Masks

def _is_special(ids, special):
    place = np.searchsorted(special.ids, ids)
    return special.ids[np.minimum(place, len(special.ids) - 1)] == ids


def choose(ids, ratio, rng, special, at_least=0, exempt=True):
    """(n,) bool: each token with probability `ratio`, special ones never if `exempt`. Were fewer than `at_least` drawn, others
    are added at random as long as there are some."""
    eligible = ~_is_special(ids, special) if exempt else np.ones(len(ids), bool)
    chosen = (rng.random(len(ids)) < ratio) & eligible
    if (missing := at_least - int(chosen.sum())) > 0:
        rest = np.flatnonzero(eligible & ~chosen)
        chosen[rng.choice(rest, min(missing, len(rest)), replace=False)] = True
    return chosen


def choose_exact(ids, ratio, rng, special):
    """(n,) bool: exactly max(1, floor(ratio * e)) of the e tokens that are not special; none if e is 0."""
    eligible = np.flatnonzero(~_is_special(ids, special))
    chosen = np.zeros(len(ids), bool)
    chosen[rng.choice(eligible, min(len(eligible), max(1, int(ratio * len(eligible)))), replace=False)] = True
    return chosen


def choose_words(ids, ratio, rng, special):
    """(n,) bool: each whole word with probability `ratio`, so the expected share of tokens is `ratio` too."""
    barred = _is_special(ids, special)
    starts = special.starts[ids] | barred
    starts[1:] |= barred[:-1]
    words = np.cumsum(starts)  # (n,): number of the word; 0 if the text begins inside of one
    return (rng.random(len(ids) + 1) < ratio)[words] & ~barred


def choose_spans(ids, ratio, rng, special, mean_length=3):
    """(n,) bool: spans of geometric length, apart from each other; any token is in one with probability `ratio`.
    Spans and gaps alternate, both memoryless, so a row may begin and end inside of either. Special tokens are cut out."""
    leave, enter = 1 / mean_length, ratio / ((1 - ratio) * mean_length) if ratio < 1 else 2
    if mean_length < 1 or not 0 <= enter <= 1:
        raise BadInput(f"spans of mean length {mean_length} cannot cover {ratio} of a text: they are one token or more, and "
                       f"can cover at most {mean_length / (mean_length + 1):.2f}")
    if enter == 0:
        return np.zeros(len(ids), bool)
    inside = (np.arange(len(ids) + 1) + (rng.random() >= ratio)) % 2 == 0
    lengths = np.minimum(rng.geometric(np.where(inside, leave, enter)), len(ids))
    last = int(np.searchsorted(np.cumsum(lengths), len(ids))) + 1
    return np.repeat(inside[:last], lengths[:last])[:len(ids)] & ~_is_special(ids, special)


def corrupt(ids, chosen, rng, special, mask=.8, random=.1, random_specials=True):
    """New ids (n,): of the chosen, the share `mask` becomes the mask token, `random` any token of the vocabulary (special ones
    too, as in all released codes, unless told otherwise), the rest stays. [Devlin et al. 2019, sec. 3.1]"""
    if special.mask is None:
        raise BadInput(f"the tokenizer has no mask token ({' or '.join(SPELLINGS['mask'])}), and this objective hides tokens: use another tokenizer")
    fate = np.where(chosen, rng.random(len(ids)), 2.0)
    drawn = rng.integers(special.vocab if random_specials else special.vocab - len(special.ids), size=len(ids))
    drawn = drawn if random_specials else _without(drawn, special.ids)
    return np.where(fate < mask, special.mask, np.where(fate < mask + random, drawn, ids)).astype(ids.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Command line


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise BadInput(f"{message} (see python data.py --help)")


def prepare(options, rest):
    """Build tokenizer and store of files, and say what is in them."""
    if rest:
        raise BadInput(f"prepare has no flag {rest[0]} (see python data.py prepare --help)")
    files = [part for file in options.files for part in ([file] if Path(file).exists() else file.split(","))]   # a,b as for train.py
    source = Source(_paths(files), _languages(options.langs), options.skip_bad)
    tokenizer = read_tokenizer(options.tokenizer) if options.tokenizer else None
    tokenizer, tokens, _, meta = _store(source, tokenizer, options.vocab, Path(options.cache))
    print(f"{_stem(source)}: {meta['rows']:,} rows, {len(source.columns)} columns, {len(tokens):,} tokens, vocabulary of "
          f"{tokenizer.get_vocab_size():,}; left out {meta['dropped']:,} bad lines, {meta['sparse']:,} rows with too little text")
    print(f"{'column':>12} {'texts':>12} {'tokens':>14} {'mean':>8} {'longest':>8}")
    for name, texts, total, longest in zip(source.columns, meta["texts"], meta["tokens"], meta["longest"]):
        print(f"{name:>12} {texts:12,} {total:14,} {total / max(1, texts):8.1f} {longest:8,}")


def fetch(options, rest):
    """List the public data sets, or download one of them."""
    import download  # imports this file, so only when called
    if rest:
        raise BadInput(f"{options.command} has no flag {rest[0]} (see python data.py {options.command} --help)")
    print(download.table() if options.command == "list" else f"{download.download(options.name, options.folder)}: complete and checked")


def inspect(options, rest):
    """Print one batch of any objective, readable. All it knows is what every objective keeps to: a batch is a dict; a value with
    `sees` is a Packed; `labels` are places in the line of `packed`, and `targets` the ids wanted there."""
    import train  # the one place that looks up the chain of imports, and only when called: it shows where the data ends up
    from checkpoints import tokenizer_of
    objective, config, _, settings, _ = train.parse(rest)
    if options.step < 0 or options.rows < 0 or options.width < 20:
        raise BadInput(f"--step {options.step} and --rows {options.rows} must be at least 0, --width {options.width} at least 20")
    tokenizer = tokenizer_of(config.init) if config.init else None
    if tokenizer:
        tokenizer.add_special_tokens([name for name in objective.tokens(settings) if tokenizer.token_to_id(name) is None])
    corpus, batches = open_training(config, objective.views, objective.distinct, tokenizer)
    examples = batches.examples(options.step)
    examples = examples[:len(examples) // config.accumulate]
    batch = objective.collate(examples, batches.rng(options.step), settings, corpus.special)
    batch["packed"] = batch["packed"].filled(config.fill)
    print(f"{objective.name}: step {options.step}, seed {config.seed}, {len(examples)} examples of {corpus.name}\n"
          "a target: _word_ if it stands there, [word→target] if another word or the mask does (or, left to right, what comes next)")
    wanted = dict(zip(np.ravel(batch.get("labels", [])).tolist(), np.ravel(batch.get("targets", [])).tolist()))
    for name, value in batch.items():
        if hasattr(value, "sees"):
            _show(name, value, corpus, options, wanted if name == "packed" else {})
        else:
            said = f"{tuple(value.shape)} {value.dtype}" if hasattr(value, "shape") else type(value).__name__
            print(textwrap.shorten(f"{name}: {said} {value.tolist() if hasattr(value, 'tolist') else value}", options.width, placeholder=" ..."))


def _show(name, packed, corpus, options, wanted):
    """Totals of a Packed, then some rows, evenly spread, because rows of one kind stand together: the tokens, their positions,
    what each sees (numbers count from the row's start)."""
    tokens, bounds = packed.tokens.tolist(), packed.rows.tolist()
    lengths, scored = np.diff(bounds), np.unique(np.searchsorted(bounds, list(wanted), side="right")) - 1  # rows that have targets
    print(f"\n{name}: {len(lengths):,} rows, {len(tokens):,} tokens; a row has {lengths.min()} / {lengths.mean():.1f} / {lengths.max()} "
          f"(least / mean / most); {tokens.count(corpus.special.mask) / len(tokens):.1%} masks")
    if wanted:
        print(f"  {len(wanted):,} targets, {len(wanted) / lengths[scored].sum():.1%} of the tokens of the {len(scored):,} rows that have any")
    for row in sorted({place * len(lengths) // options.rows for place in range(options.rows)}):
        start, end = bounds[row:row + 2]
        line = "".join(_marked(corpus, tokens[place], wanted.get(place)) for place in range(start, end)).strip()
        positions, seen = _counted(packed.positions[start:end].tolist()), _seen(packed.sees[start:end] - start)
        for said in (f"row {row}: {line}", f"  positions {positions}", f"  {seen}"):
            print(textwrap.fill(said, options.width, initial_indent="  ", subsequent_indent="      "))


def _marked(corpus, token, target):
    """A token as text, with the space before it, and marked if it is a target."""
    def piece(token):
        name = corpus.tokenizer.id_to_token(token)
        if token in corpus.special.ids:
            return f" {name}"
        return decoders.ByteLevel().decode([name]) if "ByteLevel" in f"{corpus.tokenizer.pre_tokenizer}" else name
    text, wanted = piece(token), piece(token if target is None else target)
    space, word, bare = " " * wanted.startswith(" "), wanted.strip(), text[2:-1] if token in corpus.special.ids else text.strip()
    return text if target is None else f"{space}_{word}_" if token == target else f"{space}[{bare}→{word}]"


def _span(first, last):
    return f"{first}-{last}" if last > first else f"{first}"


def _counted(numbers):
    """[0, 1, 2, 0, 1] -> "0-2, 0-1" """
    runs = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(_span(*run) for run in runs)


def _seen(sees):
    """(n, 4) of one row, from its start -> "0-5 see 0-5; 6-9 see 6..itself and 0-5": tokens that see alike are one run."""
    runs = []  # [first token, last token, (start, shared start, shared end), ends of their interval that fit all: a number, "itself"]
    for place, (low, high, low2, high2) in enumerate(sees.tolist()):
        block, ends = (low, low2, high2), {high, "itself"} if high == place + 1 else {high}
        if runs and runs[-1][2] == block and runs[-1][3] & ends:
            runs[-1][1:] = place, block, runs[-1][3] & ends
        else:
            runs.append([place, place, block, ends])
    said = []
    for first, last, (low, low2, high2), ends in runs:
        own = f"{low}..itself" if ends == {"itself"} else _span(low, min(ends - {"itself"}) - 1)
        said.append(f"{_span(first, last)} {'see' if last > first else 'sees'} {own}" + f" and {_span(low2, high2 - 1)}" * (high2 > low2))
    return "; ".join(said)


def main(arguments=None):
    parser = Parser(prog="data.py", description="Fetch and prepare text for training; look at what is trained on.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prepare", allow_abbrev=False, help="build the tokenizer and the token store of files; say what is in them")
    one.add_argument("files", nargs="+", metavar="FILE", help="TSV, CSV, JSONL, plain text or a Moses pair; also .gz and .xz")
    one.add_argument("--langs", help="columns to take, for example en,de (default: all)")
    one.add_argument("--vocab", type=int, default=8000, help="size of the tokenizer that is trained (default: 8000)")
    one.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json to use in place of training one")
    one.add_argument("--cache", default="cache", metavar="FOLDER", help="where token stores lie (default: cache)")
    one.add_argument("--skip-bad", action="store_true", help="leave out bad lines and count them")
    one.set_defaults(run=prepare)
    two = commands.add_parser("inspect", allow_abbrev=False, help="print one batch of an objective; takes every flag of train.py too",
                              epilog="and every flag of train.py, such as --objective mexma --data pairs.tsv --langs en,de --seed 1")
    for name, value, said in (("--step", 0, "which batch"), ("--rows", 4, "rows of it to print, evenly spread"), ("--width", 100, "columns of the screen")):
        two.add_argument(name, type=int, default=value, metavar="N", help=f"{said} (default: {value})")
    two.set_defaults(run=inspect)
    commands.add_parser("list", allow_abbrev=False, help="public data sets: size, licence, what for, from where").set_defaults(run=fetch)
    three = commands.add_parser("download", allow_abbrev=False, help="fetch one of them; the same command resumes, and checks what is there")
    three.add_argument("name", metavar="NAME", help="its name, as in python data.py list")
    three.add_argument("--folder", default="data", help="it goes into the folder NAME of this one (default: data)")
    three.set_defaults(run=fetch)
    try:
        options, rest = parser.parse_known_args(arguments)
        options.run(options, rest)
    except BrokenPipeError:  # whoever reads, such as head, has seen enough
        os.dup2(open(os.devnull, "wb").fileno(), sys.stdout.fileno())
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(*(stop.args or ["stopped; nothing unfinished is kept"]), file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.modules["data"] = sys.modules[__name__]  # train.py then imports this very module, not a second one with its own BadInput
    sys.exit(main())
