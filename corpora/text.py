"""Text files -> rows of texts: TSV, CSV, JSONL, plain text, parallel files; plain, .gz or .xz.

A row holds the same content in several columns (languages, captions, question and answer). Files
are read line by line, never whole. Every mistake in them is a BadInput with FILE:LINE.
"""

import csv
import gzip
import hashlib
import itertools
import json
import lzma
import os
import re
import secrets
import zlib
from pathlib import Path

import numpy as np

from corpora.program import BadInput, did_you_mean

KINDS = {".tsv": "tsv", ".tab": "tsv", ".csv": "csv", ".jsonl": "jsonl", ".json": "jsonl",
         ".ndjson": "jsonl", ".txt": "text", ".text": "text"}
# How the name of a column looks. In a table of two columns only the code of a language is one
# (en, deu, en1, zh-CN, eng_Latn): "Hello<TAB>Hallo" is a row, not a header.
NAME = re.compile(r"[A-Za-z][A-Za-z0-9]{0,9}([_-][A-Za-z0-9]{1,10})*")
CODE = re.compile(r"[a-z]{2,3}[0-9]*([_-][A-Za-z0-9]{1,8})*")
KNOWN_NAMES = set("src tgt trg source target text anchor positive negative s1 s2 "
                  "sentence1 sentence2 id ref label score".split())
NOT_TEXT = {"id", "ref", "label", "score"}  # read only when --langs names them
KNOWN_KEYS = (("src", "tgt"), ("src", "trg"), ("anchor", "positive"),
              ("user", "assistant", "system"), ("text",), ("question", "answer"))
LONGEST_WORD = 10_000  # characters; byte pair encoding takes the square of a word's length
HEADER_LINES = 10_000  # of a JSONL file: it may name a language late


# --------------------------------------------------------------------------------------------------
# Files

def write_atomic(path, content):
    """Write bytes into a file, whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            # Otherwise a power cut can leave the new name on old or no content
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def plain_name(path):
    """The path of a file's name without .gz and .xz."""
    return Path(Path(path).name.removesuffix(".gz").removesuffix(".xz"))


def read_lines(path):
    """(line number, line as bytes without its end) of a plain, .gz or .xz file."""
    path = Path(path)
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")  # the mark of UTF-8 files of Windows
                yield number, line.rstrip(b"\r\n")
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        damaged = "" if opener is open else "; it is damaged or cut short"
        raise BadInput(f"cannot read {path}: {error}{damaged}") from None


def fingerprint(path):
    """What a file is, without reading all of it: size, digest of both ends, time."""
    with open(path, "rb") as file:
        start = file.read(1_000_000)
        found = os.fstat(file.fileno())
        file.seek(max(0, found.st_size - 1_000_000))
        digest = hashlib.sha256(start + file.read()).hexdigest()
    return found.st_size, digest, found.st_mtime_ns


def flores_files(folder, langs=None):
    """A folder with a file CODE.devtest or CODE.dev for each language -> {code: path}, eng_Latn
    first if there is no `langs`. BadInput for another folder or language."""
    found = {}
    for ending in ("devtest", "dev"):
        for path in sorted(Path(folder).glob(f"*.{ending}")):
            if "_augmented" not in path.stem:
                found[path.stem] = path
    if len({path.suffix for path in found.values()}) != 1:
        raise BadInput(f"{folder} must hold files CODE.devtest or CODE.dev, of one kind: give such "
                       "a folder, as flores200_dataset/devtest, or name files")
    for code in langs or ():
        if code not in found:
            ending = next(iter(found.values())).suffix
            raise BadInput(f"--langs {code}: there is no {folder}/{code}{ending}")
    codes = langs or sorted(found, key=lambda code: (code != "eng_Latn", code))
    return {code: found[code] for code in codes}


def check_columns(langs, known, name):
    """BadInput if a language is none of the known columns."""
    for lang in langs:
        if known and lang not in known:
            raise BadInput(f"--langs {lang}: {name} has the columns {', '.join(known)}"
                           + did_you_mean(lang, known))


def held_out(count):
    """Which of `count` records are kept for evaluation, a set: 1 %, at least 200 of 2,000 or a
    tenth of fewer, at most 1,000."""
    size = min(1000, max(count // 100, min(200, count // 10)))
    order = np.random.Generator(np.random.Philox([0, 3, 0, 0])).permutation(count)
    return set(order[:size].tolist())


# --------------------------------------------------------------------------------------------------
# A line of JSON. What is wrong with it is a ValueError with the reason

def _json_rows(line, langs):
    """One line of JSON -> its rows {column: text}: one, or one for each paragraph of a "text"."""
    try:
        found = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise ValueError(f"a JSON {kind} where an object belongs: one object on each line")
    if isinstance(found.get("messages"), list):
        found = _turns(found["messages"])
    found.update(_question(found))
    if "user" in found and "assistant" in found:
        found.setdefault("system", "")
    row = {}
    for name, text in _known(found, langs).items():
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{name!r} is {type(text).__name__}, not a string")
        row[name] = text or ""
        row[name].encode()  # a ValueError if it holds half a surrogate pair, which is no character
    if list(row) == ["text"]:
        return [{"text": part} for part in row["text"].splitlines() if part.strip()]
    return [row]


def _turns(messages):
    """[{"role", "content"}, ...] of a chat -> {role: content}."""
    turns = [(turn.get("role"), turn.get("content")) for turn in messages if isinstance(turn, dict)]
    roles = sorted(str(role) for role, _ in turns)
    if roles not in (["assistant", "user"], ["assistant", "system", "user"]):
        raise ValueError('"messages" must be one user turn, one assistant turn and at most one '
                         "system turn")
    return dict(turns)


def _question(found):
    """What is asked and answered, of a record as NQ-Open ("answer": [...]) or HellaSwag ("ctx",
    "endings", "label") publishes it; {} of others."""
    answers = found.get("answer")
    if isinstance(answers, list) and all(isinstance(answer, str) for answer in answers):
        return {"answer": "; ".join(answers)}
    endings = found.get("endings")
    if isinstance(found.get("ctx"), str) and isinstance(endings, list):
        label = str(found.get("label"))
        if label in [*"0123"[:len(endings)]]:
            options = [f"{letter}) {ending}" for letter, ending in zip("ABCD", endings)]
            return {"user": "\n".join([found["ctx"], *options]), "assistant": "ABCD"[int(label)]}
    return {}


def _known(found, langs):
    """The part of a record that is read: what `langs` names, or the first keys that we know."""
    named = bool(langs) and found.keys() >= set(langs)
    if isinstance(found.get("translation"), dict) and not named:
        if not found["translation"]:
            raise ValueError("the translation is empty")
        return found["translation"]
    for names in (langs, *KNOWN_KEYS):
        if names and found.keys() >= set(names):
            return {name: found[name] for name in names}
    raise ValueError(f"no known keys among {', '.join(map(repr, found)) or 'none'}: translation, "
                     "src + tgt, anchor + positive, user + assistant, messages, text or question + "
                     "answer (or name two of its keys with --langs)")


# --------------------------------------------------------------------------------------------------
# Rows

class TextFiles:
    """Rows of text out of one or more files, streaming. Raises BadInput.

    `langs`: columns to read, all by default. `skip_bad`: leave out bad lines, and count them.
    `names`: the column of each file, if line N of all files is one row.
    """

    embedded = False

    def __init__(self, paths, langs=(), skip_bad=False, names=()):
        self.paths = [Path(path) for path in paths]
        self.langs = tuple(langs)
        self.skip_bad = skip_bad
        self.dropped = 0  # bad lines
        self.sparse = 0  # rows of many columns with too little text in the chosen ones
        self.counts = []  # records of each file, once they were counted
        for path in self.paths:
            if path.is_dir():
                raise BadInput(f"{path} is a folder; name the files in it")
            if not path.is_file():
                raise BadInput(f"there is no file {path}")
        plain = [plain_name(path) for path in self.paths]
        self.name = "+".join(dict.fromkeys(name.stem for name in plain))[:80]
        names = list(names) or _parallel_names(plain)
        if names:
            self.layouts = [("parallel", names)]
        else:
            self.layouts = [self._layout(path) for path in self.paths]
        known = {}
        for _, names in self.layouts:
            known.update(dict.fromkeys(names))
        check_columns(self.langs, known, self.paths[0])
        columns = self.langs or [name for name in known if name not in NOT_TEXT] or known
        self.columns = tuple(columns)
        self.sides = len(self.columns)  # the first so many columns can be views
        # What opens a chat is none, and stands last
        if {"user", "assistant", "system"} <= set(self.columns):
            turns = [name for name in self.columns if name != "system"]
            self.columns = (*turns, "system")
            self.sides = len(turns)

    def _layout(self, path):
        """The kind of a file, by its ending and its first line, and the names of its columns."""
        lines = (raw.decode("utf-8", errors="replace") for _, raw in read_lines(path))
        first = next((line for line in lines if line.strip()), None)
        if first is None:
            raise BadInput(f"{path} is empty")
        kind = KINDS.get(plain_name(path).suffix.lower()) or _guess(first)
        if kind == "text":
            return kind, ["text"]
        if kind == "jsonl":
            return kind, self._keys(path)
        cells = next(csv.reader([first])) if kind == "csv" else first.split("\t")
        shape = CODE if kind == "tsv" and len(cells) == 2 else NAME
        named = all(shape.fullmatch(cell) or cell in KNOWN_NAMES for cell in cells)
        named = named or bool(self.langs) and set(self.langs) <= set(cells)
        if named and len(cells) > 1:
            if len(set(cells)) < len(cells):
                raise BadInput(f"{path}:1: the header names a column twice: "
                               f"{', '.join(cells[:8])}; give every column a name of its own")
            return kind, cells
        if kind == "tsv" and len(cells) == 2:
            return "pairs", ["src", "tgt"]
        columns = "1 column" if len(cells) == 1 else f"{len(cells)} columns"
        header = "en,de" if kind == "csv" else "en<TAB>de"
        raise BadInput(f"{path}:1: {columns}, but the first line does not name them; add a header "
                       f"such as {header} (plain text, one row on a line, belongs in a .txt)")

    def _keys(self, path):
        """The columns of a JSONL file."""
        names = {}
        for number, raw in itertools.islice(read_lines(path), HEADER_LINES):
            try:
                rows = _json_rows(raw.decode(), self.langs) if raw.strip() else []
            except ValueError as error:
                if not names and not self.skip_bad:
                    raise BadInput(f"{path}:{number}: {error}") from None
            else:
                for row in rows:
                    names.update(dict.fromkeys(row))
        return list(names)

    def _bad(self, path, number, reason):
        if not self.skip_bad:
            raise BadInput(f"{path}:{number}: {reason}; mend the line, or leave out such lines "
                           "with --skip-bad")
        self.dropped += 1

    def held(self):
        """Numbers of the records kept for evaluation, a set: the same whichever columns are
        chosen. Reads the files once, to count."""
        for index in range(len(self.counts), len(self.layouts)):
            self.counts.append(sum(1 for _ in self._read(index)))
        return held_out(sum(self.counts))

    def left_out(self):
        """What was not read, "" if nothing."""
        if not self.dropped and not self.sparse:
            return ""
        return (f"left out {self.dropped:,} bad lines and {self.sparse:,} rows with too little "
                f"text in {', '.join(self.columns[:6])}")

    def rows(self, split):
        """Tuples of texts, "" for none: "all" rows, those that training reads ("train"), or those
        that it never sees ("valid" and "test", which are the same)."""
        # Nothing has to be counted then
        if split == "all":
            for _, texts in self.records():
                yield texts
            return
        held = self.held()
        last = max(held, default=-1)
        for record, texts in self.records():
            if split != "train" and record > last:
                return
            if (record in held) == (split != "train"):
                yield texts

    def records(self, characters=None):
        """(number of the record, one text a column, "" for none). `characters`: stop after so
        many, as many from each file. Numbers are those of `held` once that has counted."""
        self.dropped = 0
        self.sparse = 0
        for index in range(len(self.layouts)):
            left = (characters or 0) / len(self.layouts)
            for record, (number, row) in enumerate(self._read(index), sum(self.counts[:index])):
                texts = [row.get(name, "") for name in self.columns]
                texts = tuple("" if text.isspace() else text for text in texts)
                if self._is_usable(index, number, texts):
                    yield record, texts
                left -= sum(map(len, texts))
                if characters and left <= 0:
                    break

    def _is_usable(self, index, number, texts):
        """Whether a row has text enough. A pair must be whole; in a wider table "" is no text."""
        path = self.paths[index]
        names = self.layouts[index][1]
        longest = 0
        for text in texts:
            if len(text) > LONGEST_WORD:
                longest = max(longest, *(len(word) for word in text.split()), 0)
        if longest > LONGEST_WORD:
            self._bad(path, number, f"a word of {longest:,} characters, over {LONGEST_WORD:,}: the "
                                    "tokenizer would take hours")
            return False
        empty = [name for name, text in zip(self.columns[:self.sides], texts) if not text]
        is_pair = len(names) - ("system" in names) <= 2
        if is_pair and not set(empty).isdisjoint(names):
            self._bad(path, number, f"empty {empty[0]!r}")
            return False
        if self.sides - len(empty) < min(2, self.sides):
            self.sparse += 1
            return False
        return True

    def _read(self, index):
        """The records of one file, or of parallel ones: (line number, {column: text})."""
        kind, names = self.layouts[index]
        if kind == "parallel":
            yield from self._read_parallel(names)
            return
        path = self.paths[index]
        for number, raw in read_lines(path):
            try:
                rows = self._parse(kind, names, number, raw.decode())
            except UnicodeDecodeError as error:
                self._bad(path, number, f"not UTF-8 at byte {error.start}; convert the file, say "
                                        "with iconv -f latin1 -t utf-8")
            except (ValueError, csv.Error) as error:
                self._bad(path, number, error)
            else:
                for row in rows:
                    yield number, row

    def _parse(self, kind, names, number, line):
        """One line -> its rows {column: text}. Raises ValueError or csv.Error with the reason."""
        if kind == "text":
            return [{"text": line}] if line.strip() else []
        if kind == "jsonl":
            rows = _json_rows(line, self.langs) if line.strip() else []
            late = set().union(*rows) - set(names)
            if late and not self.langs:
                raise ValueError(f"{min(late)!r} is no column of the lines before; choose columns "
                                 "with --langs")
            return rows
        if number == 1 and kind != "pairs":
            return []  # the header
        cells = next(csv.reader([line], strict=True)) if kind == "csv" else line.split("\t")
        if cells and len(cells) != len(names):
            raise ValueError(f"{len(cells)} cells, but {len(names)} columns "
                             f"({', '.join(names[:6])})")
        return [dict(zip(names, cells))] if cells else []

    def _read_parallel(self, names):
        """Line N of every file is one row."""
        for lines in itertools.zip_longest(*map(read_lines, self.paths)):
            if None in lines:
                self._refuse_lengths(lines)
            row = {}
            try:
                for path, name, (number, raw) in zip(self.paths, names, lines):
                    row[name] = raw.decode()
            except ValueError as error:
                self._bad(path, number, error)
            else:
                yield number, row

    def _refuse_lengths(self, lines):
        # Never skipped: where one line is missing, all after it may be misaligned
        short = self.paths[lines.index(None)]
        path, (number, raw) = next(pair for pair in zip(self.paths, lines) if pair[1])
        raise BadInput(f"{short} has {number - 1:,} lines, {path} has more; line N of all must be "
                       f"one row. First extra line: {path}:{number}: "
                       f"{raw[:60].decode(errors='replace')!r}")


def _guess(line):
    """The kind of a file without a known ending, by its first line."""
    if line.startswith("{"):
        return "jsonl"
    return "tsv" if "\t" in line else "text"


def _parallel_names(plain):
    """The columns of parallel files, [] of others: corpus.de-en.de + corpus.de-en.en are de and en,
    eng_Latn.dev + deu_Latn.dev are eng_Latn and deu_Latn."""
    unknown = [name.suffix and name.suffix.lower() not in KINDS for name in plain]
    if len(plain) < 2 or not all(unknown):
        return []
    if len({name.stem for name in plain}) == 1:
        return [name.suffix[1:] for name in plain]
    return [name.stem for name in plain]
