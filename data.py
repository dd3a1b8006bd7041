"""Text in, batches of examples out: corpora, the tokenizer, the token store, the order of the rows, the masks.

    text -> open_corpus -> Corpus (rows x columns of token ids) -> Batches.examples(step) -> an objective's collate

A row holds the same content in several columns (languages, captions, question and answer); a *view* is one cell of it. Everything
random is a pure function of (seed, step, rank), so that nothing has to be replayed on resume.

    python data.py prepare corpus.de-en.de corpus.de-en.en --vocab 16000
"""
import argparse
import contextlib
import csv
import difflib
import gzip
import hashlib
import itertools
import json
import lzma
import os
import queue
import re
import secrets
import sys
import threading
import unicodedata
import zlib
from pathlib import Path
from typing import Callable, Iterable, Iterator, NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

import grammar


class BadInput(ValueError):
    """A mistake of the user's: one line that names the value, the rule and the way out. Programs print it and exit with 2."""


# ------------------------------------------------------------------------------------------------------------ tokenizer

ROLES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") + tuple(f"[PRED_{place}]" for place in range(1, 11))
SPELLINGS = {"pad": ("[PAD]", "<pad>"), "cls": ("[CLS]", "<s>"), "sep": ("[SEP]", "</s>"), "mask": ("[MASK]", "<mask>")}
TRAIN_CHARACTERS = 20_000_000  # a vocabulary of some ten thousand pieces does not change with more text than this


class Special(NamedTuple):
    """Ids that have a role. `ids`: all special ids, sorted; `starts` (vocab,): the token begins a word; `preds` may be ()."""
    pad: int
    cls: int
    sep: int
    mask: int
    preds: tuple[int, ...]
    vocab: int
    ids: np.ndarray
    starts: np.ndarray


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab` pieces, specials included (ids 0..14). Of the trainers in the library this is the one
    that gives the same file for the same text every time. It adds no [CLS] or [SEP]: collators do. Raises BadInput if `vocab`
    has no room for the specials and the 256 bytes."""
    if vocab < len(ROLES) + 257:
        raise BadInput(f"--vocab {vocab} is too small: {len(ROLES)} special tokens, 256 bytes and some merges need at least 300")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # a word is one token wherever it stands
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])  # and the added space goes again
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab, special_tokens=list(ROLES), min_frequency=2,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return tokenizer


def read_tokenizer(path: str | Path) -> Tokenizer:
    """A tokenizer.json, with padding and truncation off, whatever it was saved with: both would change the data unseen."""
    try:
        tokenizer = Tokenizer.from_str(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read the tokenizer {path}: {error.strerror}; give the path of a tokenizer.json") from None
    except Exception as error:  # the library raises plain Exception for whatever it cannot parse
        raise BadInput(f"{path} is not a tokenizer.json of the tokenizers library: {str(error).splitlines()[0]}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, path: str | Path) -> None:
    """Write tokenizer.json whole or not at all."""
    write_atomic(path, tokenizer.to_str(pretty=True).encode())


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Hex digest of everything that decides which ids a text gets."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def special(tokenizer: Tokenizer) -> Special:
    """The roles of our own, BERT's or XLM-R's special tokens, found by name. Raises BadInput naming a role that is missing."""
    pieces = tokenizer.get_vocab(with_added_tokens=True)
    roles = {}
    for role, names in SPELLINGS.items():
        roles[role] = next((pieces[name] for name in names if name in pieces), None)
        if roles[role] is None:
            raise BadInput(f"the tokenizer has no {role} token ({' or '.join(names)}); add it, or use another tokenizer")
    preds = tuple(itertools.takewhile(lambda place: place is not None, (pieces.get(name) for name in ROLES[5:])))
    added = tokenizer.get_added_tokens_decoder()
    marked = {place for place, token in added.items() if token.special}
    vocab = max(pieces.values()) + 1
    byte_level, word_piece = "ByteLevel" in f"{tokenizer.pre_tokenizer}", isinstance(tokenizer.model, models.WordPiece)
    starts = np.ones(vocab, bool)
    for piece, place in pieces.items():
        if place not in added:
            starts[place] = not piece.startswith("##") if word_piece else _begins_word(piece, byte_level)
    ids = np.array(sorted(marked | set(roles.values()) | set(preds)), np.int64)
    return Special(**roles, preds=preds, vocab=vocab, ids=ids, starts=starts)


def _begins_word(piece: str, byte_level: bool) -> bool:
    if byte_level:  # back to the characters that its bytes spell; what is only a part of a character comes out as U+FFFD
        piece = decoders.ByteLevel().decode([piece]).lstrip("\ufffd")
    # A space mark or punctuation does; and in Chinese and Japanese, which write no spaces, each character
    return bool(piece) and (unicodedata.category(piece[0])[0] not in "LNM" or "\u2e80" <= piece[0] <= "\u9fff")


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
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


# ---------------------------------------------------------------------------------------------------------------- files

IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9]{0,9}([_-][A-Za-z0-9]{1,10})*")
CODE = re.compile(r"[a-z]{2,3}[0-9]*([_-][A-Za-z0-9]{1,8})*")  # en, deu, en1, zh-CN, eng_Latn
NAMES = set("src tgt trg source target text anchor positive negative s1 s2 sentence1 sentence2 id ref label score".split())
NOT_TEXT = {"id", "ref", "label", "score"}  # columns that are read only when --langs names them
TABLES, OBJECTS, PLAIN = {".tsv", ".tab"}, {".jsonl", ".json", ".ndjson"}, {".txt", ".text", ""}


def write_atomic(path: str | Path, content: bytes | Callable) -> None:
    """Write a file whole or not at all. `content`: bytes, or a function that writes into the binary file that it is given."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    try:
        with open(part, "wb") as file:
            content(file) if callable(content) else file.write(content)
            file.flush()
            os.fsync(file.fileno())  # otherwise a power cut can leave the new name on old or no content
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number, line without its end) of a plain, .gz or .xz file."""
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, 1):
                yield number, line.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").rstrip(b"\r\n")
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise BadInput(f"{path} is damaged or cut short ({error}); download or compress it again") from None
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None


def _text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start + 1} of the line is 0x{raw[error.start]:02x})") from None


def _record(line: str, langs: tuple[str, ...]) -> list[dict[str, str]]:
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
    other = next((key for key in ("tgt", "trg") if key in found), "tgt")
    if langs and set(langs) <= found.keys():
        row = {name: found[name] for name in langs}
    elif isinstance(found.get("translation"), dict):
        row = found["translation"]
    elif "src" in found and other in found:
        row = {found.get("src_lang", "src"): found["src"], found.get(f"{other}_lang", other): found[other]}
    elif "anchor" in found and "positive" in found:
        row = {"anchor": found["anchor"], "positive": found["positive"]}
    elif "user" in found and "assistant" in found:
        row = {name: found.get(name) or "" for name in ("user", "assistant", "system")}
    elif "text" in found:
        row = {"text": found["text"]}
    else:
        keys = ", ".join(map(repr, found)) or "none"
        raise ValueError(f"no known keys among {keys}: translation, src + tgt, anchor + positive, "
                         "user + assistant, messages or text (or name two of its keys with --langs)")
    row = {name: "" if text is None else text for name, text in row.items()}
    for name, text in row.items():
        if not isinstance(text, str):
            raise ValueError(f"{name!r} is {type(text).__name__}, not a string")
        if "\\u" in line and re.search("[\ud800-\udfff]", text):
            raise ValueError(f"{name!r} holds half a surrogate pair, which is no character")
    return [{"text": part} for part in row["text"].splitlines() if part.strip()] if list(row) == ["text"] else [row]


class Source:
    """Rows of text out of one or more files, streaming. `columns` are the chosen ones, and the first `sides` of them can be views
    (all but a chat's system text). `dropped` counts the bad lines left out (`skip_bad`), `sparse` the rows of a many-column table
    with too little text in the chosen columns. Every error is a BadInput, with FILE:LINE if it is about a line."""

    def __init__(self, paths: list[str], langs: tuple[str, ...] = (), skip_bad: bool = False):
        self.paths, self.langs, self.skip_bad = [Path(path) for path in paths], langs, skip_bad
        self.dropped, self.sparse, self.counts = 0, 0, []
        for path in self.paths:
            if not path.is_file():
                raise BadInput(f"{path} is a folder; name the files in it" if path.is_dir() else f"there is no file {path}")
        endings = [Path(path.name.removesuffix(".gz").removesuffix(".xz")) for path in self.paths]
        self.parallel = len(paths) > 1 and not any(name.suffix.lower() in TABLES | OBJECTS | PLAIN | {".csv"} for name in endings)
        if self.parallel:  # corpus.de-en.de + corpus.de-en.en, or eng_Latn.dev + deu_Latn.dev
            names = [name.suffix[1:] if len({name.stem for name in endings}) == 1 else name.stem for name in endings]
            self.layouts = [("moses", names)]
        else:
            self.layouts = [self._layout(path, name.suffix.lower()) for path, name in zip(self.paths, endings, strict=True)]
        known = list(dict.fromkeys(name for _, names in self.layouts for name in names))
        _languages(langs, known, self.paths[0])
        self.columns = tuple(langs or (name for name in known if name not in NOT_TEXT) or known)
        self.sides = 2 if self.columns == ("user", "assistant", "system") else len(self.columns)

    def _layout(self, path: Path, ending: str) -> tuple[str, list[str]]:
        """How to read a file, by its extension and its first line, and the names of all its columns."""
        first = next((raw.decode("utf-8", errors="replace") for _, raw in _lines(path) if raw.strip()), None)
        if first is None:
            raise BadInput(f"{path} is empty")
        known = ending in TABLES | OBJECTS | PLAIN - {""} | {".csv"}
        if ending in OBJECTS or not known and first.startswith("{"):
            names = {}
            for number, raw in itertools.islice(_lines(path), 10_000):  # a file may name a language late
                try:
                    names |= {name: None for row in _record(_text(raw), self.langs) for name in row} if raw.strip() else {}
                except ValueError as error:
                    if not names and not self.skip_bad:
                        raise BadInput(f"{path}:{number}: {error}") from None
            return "jsonl", list(names)
        if ending not in TABLES | {".csv"} and (known or "\t" not in first):
            return "text", ["text"]
        kind = "csv" if ending == ".csv" else "tsv"
        cells = next(csv.reader([first])) if kind == "csv" else first.split("\t")
        shape = CODE if len(cells) == 2 and kind == "tsv" else IDENTIFIER  # "Hello<TAB>Hallo" is a row, not two names
        named = all(shape.fullmatch(cell) or cell in NAMES for cell in cells) or set(self.langs) <= set(cells) and self.langs
        if named and len(set(cells)) == len(cells) > 1:
            return kind, cells
        if kind == "tsv" and len(cells) == 2:
            return "pairs", ["src", "tgt"]
        if kind == "tsv" and len(cells) == 1:
            raise BadInput(f"{path}:1: no tab; a .tsv has two columns or more (plain text, one row on a line, belongs in a .txt)")
        raise BadInput(f"{path}:1: {len(cells)} columns, but the first line does not name them; add a header such as "
                       f"{'en<TAB>de<TAB>fr' if kind == 'tsv' else 'src,tgt'}")

    def _bad(self, path: Path, number: int, reason: object) -> None:
        if not self.skip_bad:
            raise BadInput(f"{path}:{number}: {reason}; mend the line, or leave out such lines with --skip-bad")
        self.dropped += 1

    def held(self) -> set[int]:
        """Numbers of the records kept for evaluation: the same whichever columns are chosen. Reads the files once, to count."""
        self.dropped, self.counts = 0, [sum(1 for _ in self._read(place)) for place in range(len(self.layouts))]
        return set(_held_out(sum(self.counts)).tolist())

    def rows(self, characters: int | None = None) -> Iterator[tuple[int, tuple[str, ...]]]:
        """(number of the record, one text a column, "" for none). `characters`: stop after so many, as many from each file."""
        self.dropped = self.sparse = 0
        for place, (_, names) in enumerate(self.layouts):
            left = (characters or 0) / len(self.layouts)
            for record, (number, row) in enumerate(self._read(place), sum(self.counts[:place])):
                found = tuple("" if (text := row.get(name, "")).isspace() else text for name in self.columns)
                empty = [name for name, text in zip(self.columns[:self.sides], found[:self.sides], strict=True) if not text]
                if len(names) - ("system" in names) <= 2 and not set(empty).isdisjoint(names):  # a pair must be whole;
                    self._bad(self.paths[place], number, f"empty {empty[0]!r}")                 # in a wide table "" is no text
                elif self.sides - len(empty) < min(2, self.sides):
                    self.sparse += 1
                else:
                    yield record, found
                left -= sum(map(len, found))
                if characters and left <= 0:
                    break

    def _read(self, place: int) -> Iterator[tuple[int, dict[str, str]]]:
        """The records of one file (of all, if parallel): (line number, {column: text})."""
        kind, names = self.layouts[place]
        if kind == "moses":
            return self._moses(names)
        return self._csv(self.paths[place], names) if kind == "csv" else self._file(self.paths[place], kind, names)

    def _file(self, path: Path, kind: str, names: list[str]) -> Iterator[tuple[int, dict[str, str]]]:
        for number, raw in _lines(path):
            try:
                line = _text(raw)
                if kind == "text":
                    if line and not line.isspace():
                        yield number, {"text": line}
                elif kind == "jsonl":
                    for row in _record(line, self.langs) if line.strip() else ():
                        if not self.langs and (late := row.keys() - names):
                            raise ValueError(f"{min(late)!r} is no column of the lines before; choose columns with --langs")
                        yield number, row
                elif number > 1 or kind == "pairs":
                    cells = line.split("\t")
                    if len(cells) != len(names):
                        raise ValueError(f"too {'many' if len(cells) > len(names) else 'few'} tabs: {len(cells)} cells, "
                                         f"{len(names)} columns ({', '.join(names[:6])}{', ...' if len(names) > 6 else ''})")
                    yield number, dict(zip(names, cells, strict=True))
            except ValueError as error:
                self._bad(path, number, error)

    def _csv(self, path: Path, names: list[str]) -> Iterator[tuple[int, dict[str, str]]]:
        def decoded():
            for number, raw in _lines(path):
                try:
                    yield _text(raw) + "\n"
                except ValueError as error:
                    self._bad(path, number, error)
                    yield "\n"  # keeps the count of lines right; an empty line is no row
        reader, first = csv.reader(decoded(), strict=True), True
        while True:
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                self._bad(path, reader.line_num, error)
                continue
            if cells and not first:
                if len(cells) == len(names):
                    yield reader.line_num, dict(zip(names, cells, strict=True))
                else:
                    self._bad(path, reader.line_num, f"{len(cells)} cells, but {len(names)} columns ({', '.join(names)})")
            first = False

    def _moses(self, names: list[str]) -> Iterator[tuple[int, dict[str, str]]]:
        for lines in itertools.zip_longest(*(_lines(path) for path in self.paths)):
            if None in lines:  # never skipped: where one line is missing, all after it may be misaligned
                counts = [sum(1 for _ in _lines(path)) for path in self.paths]
                longest = counts.index(max(counts))
                number, raw = lines[longest]
                said = ", ".join(f"{path} has {count:,} lines" for path, count in zip(self.paths, counts, strict=True))
                raise BadInput(f"{said}; line N of all must be one sentence. First extra line: {self.paths[longest]}:{number}: "
                               f"{raw[:60].decode('utf-8', errors='replace')!r}")
            row = {}
            for path, name, (number, raw) in zip(self.paths, names, lines, strict=True):
                try:
                    row[name] = _text(raw)
                except ValueError as error:
                    self._bad(path, number, error)
                    break
            else:
                yield number, row


# ---------------------------------------------------------------------------------------------------------------- corpora

EMBEDDED = ("toy", "regex", "pydoc")
EMBEDDED_VOCAB = 4096  # nearly a piece for every word form of the five languages: short rows, and words can be matched
STORE = 1  # version of the token store's layout


def _embedded(name: str, split: str, count: int, seed: int) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows of a corpus that needs no file. `count` is for "train"; the two others have at most 1000 rows."""
    count = count if split == "train" else min(count, 1000)
    if name == "toy":
        return grammar.LANGUAGES, [tuple(row[name] for name in grammar.LANGUAGES) for row in grammar.toy(split, count, seed)]
    if name == "regex":
        return ("english", "regex"), grammar.regex(split, count, seed)
    return ("text",), [(text,) for text in _paragraphs() if split == ("train", "valid", "test")[
        np.searchsorted([90, 95], hashlib.sha256(text.encode()).digest()[0] * 100 // 256, side="right")]]


def _paragraphs() -> list[str]:
    """The prose of the language reference that comes with Python: no titles, grammar rules, code or headings of lists."""
    try:
        from pydoc_data import topics
    except ImportError:
        raise BadInput("pydoc: this Python has no pydoc_data; install the full standard library, or use --data toy") from None
    blocks = itertools.chain.from_iterable(re.split(r"\n\s*\n", text) for text in topics.topics.values())
    prose = (" ".join(block.removeprefix("* ").split()) for block in blocks
             if not re.search(r"^[*=~-]{3}|::=|>>>|\n *\* ", block, re.M))
    return [text for text in dict.fromkeys(prose) if re.fullmatch(r"\(?[A-Z].+[.:)]", text) and text.count(" ") >= 7]


def _paths(spec: str | Path | Iterable[str]) -> list[str]:
    if isinstance(spec, (str, Path)):
        spec = [str(spec)] if Path(spec).exists() else [part.strip() for part in str(spec).split(",")]
    paths = [str(path) for path in spec]
    if len(paths) == 1 and not Path(paths[0]).exists() and not Path(paths[0]).suffix:
        near = difflib.get_close_matches(paths[0], EMBEDDED, 1)
        raise BadInput(f"--data {paths[0]}: neither a file nor one of {', '.join(EMBEDDED)}"
                       + (f"; did you mean {near[0]}?" if near else "; give the path of a file"))
    return paths


def _languages(langs: str | Iterable[str] | None, known: Iterable[str] = (), name: object = "") -> tuple[str, ...]:
    chosen = tuple(dict.fromkeys(part.strip() for part in (langs.split(",") if isinstance(langs, str) else langs or ())))
    if wrong := [lang for lang in chosen if known and lang not in known]:
        near = difflib.get_close_matches(wrong[0], known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise BadInput(f"--langs {wrong[0]}: {name} has the columns {', '.join(known)}{hint}")
    return chosen


def _without(index: np.ndarray, removed: np.ndarray) -> np.ndarray:
    """The index-th of the whole numbers that are not in `removed` (sorted): [0, 1, 2] without [1] -> [0, 2, 3]."""
    return index + np.searchsorted(removed - np.arange(len(removed)), index, side="right")


def _held_out(count: int) -> np.ndarray:
    """Which of `count` records are kept for evaluation: 1 %, at least 200 of 2,000 or a tenth of fewer, at most 1,000."""
    size = min(1000, max(count // 100, min(200, count // 10)))
    return permutation(np.arange(size), count, 0, np.zeros(size, int)) if size else np.zeros(0, int)


def texts(spec, split: str = "valid", langs=None, limit: int | None = None, *, holdout: bool = True, skip_bad: bool = False,
          seed: int = 0) -> dict[str, list[str]]:
    """Raw texts {column: [text]} of a split, aligned by row; a row with an empty column is left out. Of a file, "valid" and
    "test" are the rows that training never sees, or all rows with holdout=False."""
    if spec in EMBEDDED:
        known, rows = _embedded(spec, split, 20_000, seed)
        columns = _languages(langs, known, spec) or known
        rows = [tuple(row[known.index(name)] for name in columns) for row in rows]
    else:
        source = Source(_paths(spec), _languages(langs), skip_bad)
        held = source.held() if holdout else None
        columns = source.columns[:source.sides]                          # of a chat the question and the answer, not the system text
        rows = (row[:source.sides] for record, row in source.rows() if held is None or (record in held) == (split != "train"))
    rows = list(itertools.islice((row for row in rows if all(row)), limit))
    return {name: [row[place] for row in rows] for place, name in enumerate(columns)}


class Corpus:
    """Rows of token ids, cut at `max_length` only by Batches. The ids of cell (row, column) are
    tokens[offsets[i]:offsets[i + 1]], i = row * len(columns) + column; both arrays may lie on disk. `hash` says what
    the data is: source, tokenizer, columns, split."""

    def __init__(self, name: str, columns: tuple[str, ...], tokenizer: Tokenizer, tokens: np.ndarray, offsets: np.ndarray,
                 identity: object, sides: int | None = None, split: str = "all", held: Iterable[int] = (),
                 max_length: int | None = None):
        self.name, self.columns, self.sides, self.max_length = name, tuple(columns), sides or len(columns), max_length
        self.tokenizer, self.special, self.tokens, self.offsets = tokenizer, special(tokenizer), tokens, offsets
        self.held, self.split = np.array(held, np.int64), split
        whole = (len(offsets) - 1) // len(columns)
        self.rows = {"all": whole, "train": whole - len(self.held)}.get(split, len(self.held))
        if not self.rows:
            reason = f": {whole} rows are too few to hold some out" if whole else ""
            raise BadInput(f"{name} has no rows for {split!r}{reason}")
        said = [identity, self.columns, tokenizer_hash(tokenizer), split]
        self.hash = hashlib.sha256(json.dumps(said).encode()).hexdigest()

    def __len__(self) -> int:
        return self.rows

    def _cells(self, row: int) -> list[np.ndarray]:
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of {self.rows}")
        if self.split != "all":
            row = _without(row, self.held) if self.split == "train" else self.held[row]
        row = int(row) * len(self.columns)
        ends = self.offsets[row:row + len(self.columns) + 1].tolist()
        return [self.tokens[start:end] for start, end in itertools.pairwise(ends)]

    def ids(self, row: int, column: str | int) -> np.ndarray:
        """(n,) uint32, read-only; empty: the row has no text in this column."""
        return self._cells(row)[self.columns.index(column) if isinstance(column, str) else column]

    def example(self, row: int, views: int, choice: int) -> tuple[np.ndarray, ...]:
        """The row as one or two views. Two: the first column, which is the pivot, and one of the others; without a pivot any two.
        `choice`: a whole number that the caller draws; it selects among the columns that have text."""
        cells = self._cells(row)[:self.sides]
        filled = [ids for ids in cells if len(ids)]
        if views == 1:
            return (filled[choice % len(filled)],)
        if len(cells[0]):
            return filled[0], filled[1 + choice % (len(filled) - 1)]
        choice, first = divmod(choice, len(filled))
        others = filled[:first] + filled[first + 1:]
        return filled[first], others[choice % len(others)]


def open_corpus(spec, tokenizer: Tokenizer | None = None, *, split: str = "train", langs=None, vocab: int | None = None,
                skip_bad: bool = False, cache: str | Path = "cache", count: int = 20_000, seed: int = 0,
                max_length: int | None = 128, holdout: bool = True) -> Corpus:
    """"toy", "regex", "pydoc" or files -> Corpus. Of several files, Moses files are put side by side, others one after the other.
    Without a tokenizer, one of `vocab` pieces (4096; 8000 for files) is trained on the start of the training text. Files go
    through a store in the folder `cache`, made once. `count`, `seed`: rows of toy and regex. `holdout`: keep back rows of a file
    as its "valid" and "test" (the same rows); otherwise every split is the whole file. Raises BadInput."""
    if split not in ("train", "valid", "test"):
        raise BadInput(f"split {split!r}: choose train, valid or test")
    if spec not in EMBEDDED:
        source = Source(_paths(spec), _languages(langs), skip_bad)
        tokenizer, tokens, offsets, meta = _store(source, tokenizer, vocab or 8000, Path(cache))
        contents = [(one["size"], one["sha256"]) for one in meta["sources"]]
        split, held = (split, meta["held"]) if holdout else ("all", ())
        return Corpus(_stem(source), source.columns, tokenizer, tokens, offsets, [contents, skip_bad], source.sides, split, held,
                      max_length)
    known, rows = _embedded(spec, split, count, seed)
    columns = _languages(langs, known, spec) or known
    places = [known.index(name) for name in columns]
    if tokenizer is None:
        train = rows if split == "train" else _embedded(spec, "train", count, seed)[1]
        tokenizer = train_tokenizer((row[place] for row in train for place in places), vocab or EMBEDDED_VOCAB)
    ids = encode(tokenizer, [row[place] for row in rows for place in places])
    offsets = np.concatenate([[0], np.cumsum([len(cell) for cell in ids])])
    identity = [spec, grammar.VERSION, split, len(rows), seed, hashlib.sha256(repr(rows).encode()).hexdigest()]
    return Corpus(spec, columns, tokenizer, np.concatenate(ids), offsets, identity, max_length=max_length)


# ------------------------------------------------------------------------------------------------------------ token store

def _stem(source: Source) -> str:
    names = (path.name.removesuffix(".gz").removesuffix(".xz") for path in source.paths)
    return "+".join(dict.fromkeys(name.rpartition(".")[0] or name for name in names))[:80]


def _fingerprint(path: Path) -> dict:
    """What a file is, without reading all of it: size, time, and the digest of its first and last million bytes."""
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read(1_000_000))
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1_000_000))
        digest.update(file.read())
    return {"name": path.name, "size": size, "mtime_ns": path.stat().st_mtime_ns, "sha256": digest.hexdigest()}


Stored = tuple[Tokenizer, np.ndarray, np.ndarray, dict]  # tokenizer, tokens (uint32), offsets (int64), meta


def _store(source: Source, tokenizer: Tokenizer | None, vocab: int, cache: Path) -> Stored:
    """The store in the folder `cache` if it still is what the source and the tokenizer would give, else one made anew, with a
    line that says why. meta.json is written last and names the other files of its generation, so a store is either whole or
    not there, also when two processes make it at once (the last one wins)."""
    what = [[str(path.resolve()) for path in source.paths], source.columns, source.skip_bad]
    folder = cache / f"{_stem(source)}-{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:10]}"
    wanted = {"version": STORE, "sources": [_fingerprint(path) for path in source.paths],
              "asked": tokenizer_hash(tokenizer) if tokenizer else f"its own, of {vocab}"}
    for _ in range(3):  # another process may replace the store between our reading of meta.json and of what it names
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            if reason := _difference(meta, wanted):
                print(f"{source.paths[0].name}: preparing anew, {reason}", file=sys.stderr)
                break
            source.dropped, source.sparse = meta["dropped"], meta["sparse"]
            return tokenizer or read_tokenizer(folder / meta["tokenizer_file"]), *_mapped(folder, meta), meta
        except (FileNotFoundError, BadInput):
            continue
    try:
        return _prepare(source, tokenizer, vocab, folder, wanted)
    except OSError as error:
        raise BadInput(f"cannot write the token store {folder}: {error.strerror}; choose another folder with --cache") from None


def _mapped(folder: Path, meta: dict) -> list[np.ndarray]:
    kinds = {"tokens": np.uint32, "offsets": np.int64}
    return [np.memmap(folder / meta[name], kind, "r").view(np.ndarray) for name, kind in kinds.items()]


def _difference(meta: dict, wanted: dict) -> str:
    if meta["version"] != wanted["version"]:
        return "the store is of another version of data.py"
    for old, new in zip(meta["sources"], wanted["sources"], strict=True):
        for key, said in (("size", "size"), ("sha256", "content"), ("mtime_ns", "time of change")):
            if old[key] != new[key]:
                return f"the {said} of {new['name']} is not what it was"
    return "" if wanted["asked"] in (meta["tokenizer"], meta["asked"]) else "the tokenizer is another one"


def _prepare(source: Source, tokenizer: Tokenizer | None, vocab: int, folder: Path, wanted: dict) -> Stored:
    """Text -> token store, in constant memory."""
    folder.mkdir(parents=True, exist_ok=True)
    mine, rows, end, held, held_rows = secrets.token_hex(4), 0, 0, source.held(), []
    start = (row for record, row in source.rows(TRAIN_CHARACTERS) if record not in held)
    tokenizer = tokenizer or train_tokenizer((text for row in start for text in row if text), vocab)
    names = {"tokens": f"tokens-{mine}.bin", "offsets": f"offsets-{mine}.bin", "tokenizer_file": f"tokenizer-{mine}.json"}
    stale = names  # files to remove at the end: our own, until meta.json names them
    try:
        with open(folder / names["tokens"], "wb") as tokens, open(folder / names["offsets"], "wb") as offsets, \
                tqdm(desc=f"prepare {_stem(source)}", unit=" rows", unit_scale=True, disable=None, mininterval=0.5) as bar:
            offsets.write(np.zeros(1, np.int64).tobytes())
            for chunk in _chunks(source.rows()):
                ids = encode(tokenizer, [text for _, row in chunk for text in row])
                held_rows += [place for place, (record, _) in enumerate(chunk, rows) if record in held]
                ends = end + np.cumsum([len(cell) for cell in ids])
                tokens.write(np.concatenate(ids).tobytes())
                offsets.write(ends.astype(np.int64).tobytes())
                rows, end = rows + len(chunk), int(ends[-1])
                bar.update(len(chunk))
        columns = ", ".join(source.columns[:6])
        left_out = f"{source.dropped:,} bad lines and {source.sparse:,} rows with too little text in {columns}"
        if not rows:
            raise BadInput(f"{source.paths[0]}: no usable row, only {left_out}; check the file and --langs")
        write_tokenizer(tokenizer, folder / names["tokenizer_file"])
        meta = wanted | names | {"tokenizer": tokenizer_hash(tokenizer), "columns": source.columns, "rows": rows,
                                 "held": held_rows, "dropped": source.dropped, "sparse": source.sparse}
        made = (tokenizer, *_mapped(folder, meta), meta)  # mapped before others can see, and replace, them
        old = json.loads((folder / "meta.json").read_text(encoding="utf-8")) if (folder / "meta.json").exists() else {}
        write_atomic(folder / "meta.json", json.dumps(meta, indent=1).encode())
        stale = {key: old[key] for key in names if key in old}
    finally:
        for name in stale.values():
            with contextlib.suppress(OSError):  # Windows keeps what somebody has mapped
                (folder / name).unlink()
    if source.dropped or source.sparse:
        print(f"{source.paths[0].name}: kept {rows:,} rows, left out {left_out}", file=sys.stderr)
    return made


def _chunks(rows: Iterator[tuple[int, tuple[str, ...]]]) -> Iterator[list[tuple[int, tuple[str, ...]]]]:
    chunk, size = [], 0
    for record, row in rows:
        chunk.append((record, row))
        size += sum(map(len, row))
        if len(chunk) == 4096 or size > 2_000_000:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


# ----------------------------------------------------------------------------------------------------------------- batches

def _mix(value: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: whole numbers (N,) uint64 -> (N,) that look independent; overflow is meant."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def permutation(places: np.ndarray, count: int, seed: int, epochs: np.ndarray) -> np.ndarray:
    """Where a shuffle of range(count) puts `places` (N,), another shuffle for each seed and epoch (N,), in O(N) memory: a Feistel
    network permutes the next even power of two, and what falls outside of the range is sent through again."""
    half = np.uint64(max(1, (int(count - 1).bit_length() + 1) // 2))
    low = (np.uint64(1) << half) - np.uint64(1)
    keys = _mix(np.asarray(epochs, np.uint64) + _mix(np.array([seed % 2 ** 64], np.uint64)))

    def network(value: np.ndarray, keys: np.ndarray) -> np.ndarray:
        left, right = value >> half, value & low
        for turn in range(6):
            left, right = right, left ^ (_mix(_mix(keys + np.uint64(turn)) + right) & low)
        return (left << half) | right

    value = network(np.asarray(places, np.uint64), keys)
    while (outside := value >= count).any():
        value[outside] = network(value[outside], keys[outside])
    return value.astype(np.int64)


class Batches:
    """The examples of every step, as a pure function of (seed, step, rank): resuming replays nothing, and the order of calls does
    not matter. Every row comes once an epoch. `distinct`: no text occurs in two examples of a batch, where it would be a false
    negative; a repeat gives way to another row. Raises BadInput at once if the data has not enough views or distinct rows."""

    def __init__(self, corpus: Corpus, views: int, batch: int, seed: int, rank: int = 0, world: int = 1, distinct: bool = False,
                 max_length: int | None = None):
        self.corpus, self.views, self.batch, self.seed, self.rank, self.world = corpus, views, batch, seed, rank, world
        self.distinct, self.max_length = distinct, max_length or corpus.max_length
        if views > corpus.sides:
            raise BadInput(f"{corpus.name} has the single column {corpus.columns[0]!r}, but the objective needs two views of a "
                           "row; use parallel data (--data toy), or an objective with one view")
        if distinct:
            seen, found = set(), 0
            for row in range(len(corpus)):
                found += self._is_new(self._example(row, 0), seen)
                if found == batch:
                    break
            else:
                raise BadInput(f"--batch {batch}: {corpus.name} has only {found} rows ({len(corpus)} with repeats) that share no "
                               f"text, and the objective takes the rest of a batch for negatives; use --batch {found} or less")

    def rng(self, step: int) -> np.random.Generator:
        """The chance that the objective's collate gets."""
        return self._generator(0, step)

    def _generator(self, purpose: int, step: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox([self.seed % 2 ** 64, purpose, step, self.rank]))

    def _example(self, row: int, choice: int) -> tuple[np.ndarray, ...]:
        return tuple(ids[:self.max_length] for ids in self.corpus.example(int(row), self.views, int(choice)))

    def _is_new(self, example: tuple[np.ndarray, ...], seen: set[bytes]) -> bool:
        texts = {ids.tobytes() for ids in example}
        if new := seen.isdisjoint(texts):
            seen |= texts
        return new

    def examples(self, step: int) -> list[tuple[np.ndarray, ...]]:
        """`batch` tuples of `views` arrays of ids, none longer than max_length."""
        count = len(self.corpus)
        places = (step * self.world + self.rank) * self.batch + np.arange(self.batch)
        rows = permutation(places % count, count, self.seed, places // count)
        rng = self._generator(1, step)
        made = [self._example(row, choice) for row, choice in zip(rows, rng.integers(2 ** 31, size=self.batch), strict=True)]
        if not self.distinct:
            return made
        seen = set()
        repeats = [place for place, example in enumerate(made) if not self._is_new(example, seen)]
        for place in repeats:
            start = int(rng.integers(count))  # luck first, and for a corpus of few distinct rows a walk through it
            tries = itertools.chain(rng.integers(count, size=64), ((start + more) % count for more in range(min(count, 10_000))))
            choices = rng.integers(2 ** 31)
            made[place] = next((example for row in tries if self._is_new(example := self._example(row, choices), seen)), None)
            if made[place] is None:
                raise BadInput(f"--batch {self.batch}: {self.corpus.name} gave no {self.batch} rows without a text in common; "
                               "use a smaller batch or more varied data")
        return made


def prefetch(make: Callable, start: int, stop: int, depth: int = 4) -> Iterator:
    """make(start), ..., make(stop - 1), in order, computed ahead by one thread. An exception there is raised here. Closing
    the iterator ends the thread, at the latest after the make() that it is in."""
    made, closed = queue.Queue(depth), threading.Event()

    def offer(item: tuple) -> None:
        while not closed.is_set():
            try:
                return made.put(item, timeout=0.1)
            except queue.Full:
                pass

    def work() -> None:
        try:
            for step in range(start, stop):
                offer((make(step), None))
                if closed.is_set():
                    return
        except BaseException as error:  # whatever it is, it belongs to the consumer
            offer((None, error))

    thread = threading.Thread(target=work, name="prefetch", daemon=True)  # daemon: never keeps the program from ending
    thread.start()
    try:
        for _ in range(start, stop):
            item, error = made.get()
            if error is not None:
                raise error
            yield item
    finally:
        closed.set()
        thread.join(timeout=1)


# ------------------------------------------------------------------------------------------------------------------- masks

def _is_special(ids: np.ndarray, special: Special) -> np.ndarray:
    place = np.searchsorted(special.ids, ids)
    return special.ids[np.minimum(place, len(special.ids) - 1)] == ids


def choose(ids: np.ndarray, ratio: float, rng: np.random.Generator, special: Special, at_least: int = 0,
           exempt: bool = True) -> np.ndarray:
    """(n,) bool: each token with probability `ratio`, special ones never if `exempt`. Were fewer than `at_least` drawn, others
    are added at random as long as there are some."""
    eligible = ~_is_special(ids, special) if exempt else np.ones(len(ids), bool)
    chosen = (rng.random(len(ids)) < ratio) & eligible
    if (missing := at_least - int(chosen.sum())) > 0:
        rest = np.flatnonzero(eligible & ~chosen)
        chosen[rng.choice(rest, min(missing, len(rest)), replace=False)] = True
    return chosen


def choose_exact(ids: np.ndarray, ratio: float, rng: np.random.Generator, special: Special) -> np.ndarray:
    """(n,) bool: exactly max(1, floor(ratio * e)) of the e tokens that are not special; none if e is 0."""
    eligible = np.flatnonzero(~_is_special(ids, special))
    chosen = np.zeros(len(ids), bool)
    chosen[rng.choice(eligible, min(len(eligible), max(1, int(ratio * len(eligible)))), replace=False)] = True
    return chosen


def choose_words(ids: np.ndarray, ratio: float, rng: np.random.Generator, special: Special) -> np.ndarray:
    """(n,) bool: each whole word with probability `ratio`, so the expected share of tokens is `ratio` too."""
    barred = _is_special(ids, special)
    starts = special.starts[ids] | barred
    starts[1:] |= barred[:-1]
    words = np.cumsum(starts)  # (n,): number of the word; 0 if the text begins inside of one
    return (rng.random(len(ids) + 1) < ratio)[words] & ~barred


def choose_spans(ids: np.ndarray, ratio: float, rng: np.random.Generator, special: Special,
                 mean_length: float = 3) -> np.ndarray:
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


def corrupt(ids: np.ndarray, chosen: np.ndarray, rng: np.random.Generator, special: Special, mask: float = .8, random: float = .1,
            random_specials: bool = True) -> np.ndarray:
    """New ids (n,): of the chosen, the share `mask` becomes the mask token, `random` any token of the vocabulary (special ones
    too, as in all released codes, unless told otherwise), the rest stays. [Devlin et al. 2019, sec. 3.1]"""
    fate = np.where(chosen, rng.random(len(ids)), 2.0)
    drawn = rng.integers(special.vocab if random_specials else special.vocab - len(special.ids), size=len(ids))
    drawn = drawn if random_specials else _without(drawn, special.ids)
    return np.where(fate < mask, special.mask, np.where(fate < mask + random, drawn, ids)).astype(ids.dtype)


# ------------------------------------------------------------------------------------------------------------ command line

def prepare(options: argparse.Namespace) -> None:
    """Build tokenizer and store of files, and say what is in them."""
    source = Source(_paths(options.files), _languages(options.langs), options.skip_bad)
    tokenizer = read_tokenizer(options.tokenizer) if options.tokenizer else None
    tokenizer, tokens, offsets, meta = _store(source, tokenizer, options.vocab, Path(options.cache))
    width, block, longest = len(source.columns), 1 << 20, 1 << 16
    print(f"{_stem(source)}: {meta['rows']:,} rows, {width} columns, {len(tokens):,} tokens, vocabulary of "
          f"{tokenizer.get_vocab_size():,}; left out {source.dropped:,} bad lines, {source.sparse:,} rows with too little text")
    print(f"{'column':>12} {'texts':>12} {'tokens':>14} {'mean':>8} {'95 %':>8} {'longest':>8}")
    for place, name in enumerate(source.columns):
        counts = np.zeros(longest + 1, np.int64)  # how many texts of each length, block by block: offsets may not fit in memory
        for start in range(0, len(offsets) - 1, block * width):
            lengths = np.diff(offsets[start:start + block * width + 1])[place::width]
            counts += np.bincount(np.minimum(lengths, longest), minlength=longest + 1)
        counts[0] = 0  # no text in this column
        number, total = max(1, counts.sum()), (counts * np.arange(longest + 1)).sum()
        high, top = np.searchsorted(np.cumsum(counts), .95 * number), counts.nonzero()[0].max(initial=0)
        print(f"{name:>12} {counts.sum():12,} {total:14,} {total / number:8.1f} {high:8,} {top:8,}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="data.py", description="Prepare text for training.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prepare", help="build the tokenizer and the token store of files; say what is in them")
    one.add_argument("files", nargs="+", metavar="FILE", help="TSV, CSV, JSONL, plain text or a Moses pair; also .gz and .xz")
    one.add_argument("--langs", help="columns to take, for example en,de (default: all)")
    one.add_argument("--vocab", type=int, default=8000, help="size of the tokenizer that is trained (default: 8000)")
    one.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json to use in place of training one")
    one.add_argument("--cache", default="cache", metavar="FOLDER", help="where token stores lie (default: cache)")
    one.add_argument("--skip-bad", action="store_true", help="leave out bad lines and count them")
    one.set_defaults(run=prepare)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; nothing unfinished is kept", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
