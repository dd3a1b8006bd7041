"""Text files -> rows of texts: TSV, CSV, JSONL, plain text, parallel files; or .gz, .bz2, .xz.

A row holds the same content in several columns (languages, captions, question and answer). Files
are read line by line, never whole. Every mistake in them is a BadInput with FILE:LINE.
"""

import bz2
import csv
import gzip
import itertools
import json
import lzma
import os
import re
import stat
import zlib
from pathlib import Path

import numpy as np

from corpora.program import BadInput, did_you_mean

KINDS = {".tsv": "tsv", ".tab": "tsv", ".csv": "csv", ".jsonl": "jsonl", ".json": "jsonl",
         ".ndjson": "jsonl", ".txt": "text", ".text": "text"}
OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
PACKED = (".zip", ".zst", ".7z", ".lz4", ".tar", ".tgz", ".parquet")
# How the name of a column looks. In a table of two columns only the code of a language is one
# (en, deu, en1, zh-CN, eng_Latn): "Hello<TAB>Hallo" is a row, not a header. Words may look like
# either, so what is taken is said, but of codes that hardly are words (en, zh-CN, eng_Latn).
NAME = re.compile(r"[A-Za-z][A-Za-z0-9]{0,9}([_-][A-Za-z0-9]{1,10})*")
CODE = re.compile(r"[a-z]{2,3}[0-9]*([_-][A-Za-z0-9]{1,8})*")
SURE = re.compile(r"[a-z]{2}[0-9]*([_-][A-Za-z0-9]+)?|[a-z]{3}[_-][A-Z][a-z]{3}")
KNOWN_NAMES = set("src tgt trg source target text anchor positive negative s1 s2 "
                  "sentence1 sentence2 id ref label score".split())
NOT_TEXT = {"id", "ref", "label", "score"}  # read only when --langs names them
KNOWN_KEYS = (("src", "tgt"), ("src", "trg"), ("anchor", "positive"),
              ("user", "assistant", "system"), ("text",), ("question", "answer"))
LONGEST_WORD = 10_000  # characters; byte pair encoding takes the square of a word's length
HEADER_LINES = 10_000  # of a JSONL file: it may name a language late


# --------------------------------------------------------------------------------------------------
# Files

def plain_name(path):
    """The path of a file's name without .gz, .bz2 and .xz."""
    path = Path(Path(path).name)
    return path.with_suffix("") if path.suffix.lower() in OPENERS else path


def check_file(path):
    """BadInput if a path is not that of a file that can be read, and more than once."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise BadInput(f"there is no file {path}") from None
    except OSError as error:  # links go in a circle, a folder may not be entered
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    if stat.S_ISDIR(mode):
        raise BadInput(f"{path} is a folder; name the files in it")
    if not stat.S_ISREG(mode):
        raise BadInput(f"{path} is a pipe or a device, which can be read once: use a file")
    if path.suffix.lower() in PACKED:
        raise BadInput(f"{path}: {path.suffix} is not read; unpack it, or use {', '.join(OPENERS)}")


def read_lines(path):
    """(line number, line as bytes without its end) of a file, plain or of OPENERS."""
    path = Path(path)
    opener = OPENERS.get(path.suffix.lower(), open)
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1:
                    # Its mark, or half of a Latin letter
                    if line.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in line[:2]:
                        raise BadInput(f"{path} is UTF-16: convert it (iconv -f utf-16 -t utf-8)")
                    line = line.removeprefix(b"\xef\xbb\xbf")  # the mark of UTF-8 files of Windows
                yield number, line.rstrip(b"\r\n")
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        damaged = "" if opener is open else "; it is damaged or cut short"
        raise BadInput(f"cannot read {path}: {error}{damaged}") from None


def _decode(raw):
    """A line's text. A ValueError with the reason if it is none."""
    if b"\0" in raw:
        raise ValueError("a NUL character: this is no text, or UTF-16 (iconv -f utf-16 -t utf-8)")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}; convert the file, say with iconv -f "
                         "latin1 -t utf-8") from None


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
        # A list may go over several lines
        if not line.lstrip().startswith("["):
            raise ValueError(f"not JSON lines ({error}): one object on each line") from None
        found = []
    if not isinstance(found, dict):
        raise ValueError(f"not JSON lines but a {type(found).__name__}: one object on each line; "
                         "jq -c '.[]' makes them of a list")
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
        # Not splitlines: a character such as U+2028 ends no line
        return [{"text": part} for part in re.split(r"\r?\n", row["text"]) if part.strip()]
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
            # The two views [LLM-JEPA, sec. 5.1]; --langs question,letter are what is asked of it
            return {"user": found["ctx"], "assistant": endings[int(label)],
                    "question": "\n".join([found["ctx"], *options]), "letter": "ABCD"[int(label)]}
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
    `names`: the column of each file, if line N of all files is one row. `header`: whether the first
    line of a table names its columns ("yes", "no"; "auto": as it looks).
    """

    embedded = False

    def __init__(self, paths, langs=(), skip_bad=False, names=(), header="auto"):
        self.paths = [Path(path) for path in paths]
        self.langs = tuple(langs)
        self.skip_bad = skip_bad
        self.dropped = 0  # bad lines
        self.sparse = 0  # rows of many columns with too little text in the chosen ones
        self.counts = []  # records of each file, once they were counted
        self.notes = []  # what a user should know of how the files are read
        for path in self.paths:
            check_file(path)
        plain = [plain_name(path) for path in self.paths]
        self.name = "+".join(dict.fromkeys(name.stem for name in plain))[:80]
        names = list(names) or _parallel_names(plain)
        self.is_parallel = bool(names)
        # Of each file its kind, the names of its columns, and how many lines stand above its rows
        self.layouts = [("parallel", names, 0)]
        if not names:
            self.layouts = [self._layout(path, header) for path in self.paths]
        known = {}
        for kind, names, _ in self.layouts:
            if header != "auto" and kind not in ("tsv", "csv"):
                raise BadInput(f"--header {header} has no effect on {self.paths[0]}: drop it")
            known.update(dict.fromkeys(names))
            for name in names:
                if not name.isprintable():
                    raise BadInput(f"{self.paths[0]}: {name!r} cannot be the name of a column")
        check_columns(self.langs, known, self.paths[0])
        columns = self.langs or [name for name in known if name not in NOT_TEXT] or known
        self.columns = tuple(columns)
        self.sides = len(self.columns)  # the first so many columns can be views
        # What opens a chat is none, and stands last
        if {"user", "assistant", "system"} <= set(self.columns):
            turns = [name for name in self.columns if name != "system"]
            self.columns = (*turns, "system")
            self.sides = len(turns)

    def _layout(self, path, header):
        """The kind of a file, by its ending and its first line, the names of its columns, and how
        many lines stand above its rows."""
        number, first = next((line for line in read_lines(path) if line[1].strip()), (0, b""))
        if not first:
            raise BadInput(f"{path} is empty")
        first = first.decode(errors="replace")
        kind = KINDS.get(plain_name(path).suffix.lower()) or _guess(first)
        if kind == "text":
            return kind, ["text"], 0
        if kind == "jsonl":
            return kind, self._keys(path), 0
        try:
            cells = _cells(kind, first)
        except ValueError as error:
            raise BadInput(f"{path}:{number}: {error}") from None
        if header == "yes" or header == "auto" and self._is_header(path, kind, cells):
            if len(set(cells)) < len(cells):
                raise BadInput(f"{path}:{number}: the header names a column twice: "
                               f"{', '.join(cells[:8])}; give every column a name of its own")
            return kind, cells, number
        names = [f"column{place}" for place in range(1, len(cells) + 1)]
        if len(cells) == 2:
            names = ["src", "tgt"]
        # --langs can give names to all columns of a table that has none
        if header == "no" and len(self.langs) == len(cells) and set(self.langs) - set(names):
            names = list(self.langs)
        return kind, names, 0

    def _is_header(self, path, kind, cells):
        """Whether the first line of a table looks like one; notes what was no more than a guess."""
        is_pair = kind == "tsv" and len(cells) == 2
        is_named = bool(self.langs) and set(self.langs) <= set(cells)
        if len(cells) > 1 and (is_named or _look_like(SURE, cells)):
            return True
        if len(cells) == 1 or not _look_like(NAME, cells):
            if is_pair:
                return False
            example = "en,de" if kind == "csv" else "en<TAB>de"
            raise BadInput(f"{path}:1: the first line does not name the columns, {len(cells)} of "
                           f"them; add a header such as {example}, or say --header no (plain text, "
                           "one row on a line, belongs in a .txt)")
        is_header = not is_pair or _look_like(CODE, cells)
        taken = "a header (--header no, if it is a row)"
        if not is_header:
            taken = "a row (--header yes, if it names the columns)"
        self.notes.append(f"{path}: the first line, {' | '.join(cells[:6])}, is taken for {taken}")
        return is_header

    def _keys(self, path):
        """The columns of a JSONL file."""
        names = {}
        for number, raw in itertools.islice(read_lines(path), HEADER_LINES):
            try:
                rows = _json_rows(_decode(raw), self.langs) if raw.strip() else []
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
                # Still a record, so that the same rows are held out
                if not any(map(str.strip, row.values())):
                    self.sparse += 1
                elif self._is_usable(index, number, texts):
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
        kind, names, above = self.layouts[index]
        if kind == "parallel":
            yield from self._read_parallel(names)
            return
        path = self.paths[index]
        before = b""
        for number, raw in itertools.islice(read_lines(path), above, None):
            try:
                if kind == "tsv" and _closes_quote(before, raw):
                    raise ValueError("a quote ends that began in the line before")
                rows = self._parse(kind, names, _decode(raw))
            except ValueError as error:
                # Never skipped: what is left of the row would be paired with something else
                if kind in ("tsv", "csv") and (_opens_quote(before) or _opens_quote(raw)):
                    raise BadInput(f"{path}:{number}: {error}: does a quoted cell go over several "
                                   "lines? Write one row on a line") from None
                self._bad(path, number, error)
            else:
                for row in rows:
                    yield number, row
            before = raw

    def _parse(self, kind, names, line):
        """One line -> its rows {column: text}. Raises ValueError with the reason."""
        if kind == "text":
            return [{"text": line}] if line.strip() else []
        if kind == "jsonl":
            rows = _json_rows(line, self.langs) if line.strip() else []
            late = set().union(*rows) - set(names)
            if late and not self.langs:
                raise ValueError(f"{min(late)!r} is no column of the lines before; choose columns "
                                 "with --langs")
            return rows
        if not line.strip(" "):
            return []
        cells = _cells(kind, line)
        if len(cells) != len(names):
            # As below the table of a spreadsheet
            if not "".join(cells).strip():
                return []
            raise ValueError(f"{len(cells)} cells, but {len(names)} columns "
                             f"({', '.join(names[:6])})")
        return [dict(zip(names, cells))]

    def _read_parallel(self, names):
        """Line N of every file is one row."""
        for lines in itertools.zip_longest(*map(read_lines, self.paths)):
            if None in lines:
                self._refuse_lengths(lines)
            row = {}
            for path, name, (number, raw) in zip(self.paths, names, lines):
                try:
                    row[name] = _decode(raw)
                except ValueError as error:
                    self._bad(path, number, error)
                    break
            else:
                yield number, row

    def _refuse_lengths(self, lines):
        # Never skipped: where one line is missing, all after it may be misaligned
        short = self.paths[lines.index(None)]
        path, (number, _) = next(pair for pair in zip(self.paths, lines) if pair[1])
        raise BadInput(f"{short} has {number - 1:,} lines, {path} has more ({path}:{number}); line "
                       "N of all must be one row")


def _cells(kind, line):
    """The cells of a line of a table. Raises ValueError with the reason."""
    if kind == "tsv":
        return line.split("\t")
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as error:
        raise ValueError(error) from None


def _look_like(shape, cells):
    return all(shape.fullmatch(cell) or cell in KNOWN_NAMES for cell in cells)


def _opens_quote(raw):
    """Whether a line of a table may end inside of a quoted cell."""
    return raw.count(b'"') % 2 == 1 and re.search(rb'(^|[\t,])"', raw) is not None


def _closes_quote(before, raw):
    """Whether the first cell of a TSV's line ends the quoted last one of the line before."""
    # Speech over two rows has quotes in every language, so no other cell may have one
    return re.match(rb'[^\t"]+"\t', raw) and re.fullmatch(rb'[^"]*\t"[^\t"]*', before)


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
