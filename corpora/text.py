"""Text files -> rows of texts: TSV, CSV, JSONL, plain text, parallel files; or .gz, .bz2, .xz.

A row holds the same content in several columns (languages, captions, question and answer). Files
are read line by line, never whole. Every mistake in them is a BadInput with FILE:LINE.

A new format is a function above READERS and a line in it. The function takes the path, the columns
that --langs names (or none) and --header ("yes" or "no"), and yields (line number, {column: text})
for each row. For a line that cannot be read it yields (line number, ValueError with the reason),
and (line number, a text) for what a user should know of how the file is read.
"""

import bz2
import csv
import functools
import gzip
import itertools
import json
import lzma
import os
import re
import zlib
from pathlib import Path

import numpy as np
from tqdm import tqdm

from corpora import split
from corpora.program import BadInput, did_you_mean, shortened

OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
PACKED = re.compile(r"\.(gz|bz2|xz)$", re.IGNORECASE)  # their endings
# Endings of files that are not read -> what they are.
OTHERS = {".tmx": "XML", ".xml": "XML", ".xlsx": "a workbook", ".ods": "a workbook"}
OTHERS |= dict.fromkeys((".zip", ".zst", ".7z", ".lz4", ".tar", ".tgz", ".parquet"), "packed")
# What can be the name of a column, and what surely is: the code of a language or a known word.
NAME = re.compile(r"\w[\w-]{0,39}")
CODE = re.compile(r"[a-z]{2,3}[0-9]*([_-][A-Za-z0-9]{1,8})*")
NOT_TEXT = {"id", "ref", "label", "score", "index", "unnamed: 0"}  # read only if --langs names them
KNOWN_NAMES = NOT_TEXT | set("src tgt trg source target text sentence anchor positive negative s1 "
                             "s2 sentence1 sentence2 user assistant system question answer".split())
KNOWN_KEYS = (("src", "tgt"), ("src", "trg"), ("anchor", "positive"),
              ("user", "assistant", "system"), ("text",), ("question", "answer"))
# A line of a TSV whose cells are quoted by the rules of CSV.
QUOTED = re.compile(r'((^|\t)("([^"]|"")*"|[^"\t]*))*')
LONGEST_WORD = 10_000  # characters; byte pair encoding takes the square of a word's length
HEADER_ROWS = 10_000  # that are read first: a JSONL file may name a language late


# ---- files


def read_lines(path):
    """Yields (line number, line as bytes without its end) of a file, plain or of OPENERS."""
    path = Path(path)
    if not os.path.isfile(path):
        raise BadInput(f"there is no file {path}: it is missing, a folder, or a pipe, which can be "
                       "read once")
    opener = OPENERS.get(path.suffix.lower(), open)
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1:
                    # The first bytes are the mark of UTF-16, or half of a Latin letter.
                    if line.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in line[:2]:
                        raise BadInput(f"{path} is UTF-16: convert it (iconv -f utf-16 -t utf-8)")
                    # Windows marks UTF-8 files so.
                    line = line.removeprefix(b"\xef\xbb\xbf")
                yield number, line.rstrip(b"\r\n")
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        damaged = "" if opener is open else "; it is damaged or cut short"
        raise BadInput(f"cannot read {path}: {error}{damaged}") from None


def decoded_lines(path):
    """Yields (line number, the line as text or a ValueError that says why it is no text)."""
    for number, raw in read_lines(path):
        if b"\0" in raw:
            text = ValueError("a NUL character: this is no text, or UTF-16 (iconv -f utf-16 -t "
                              "utf-8)")
        else:
            try:
                text = raw.decode()
            except UnicodeDecodeError as error:
                text = ValueError(f"not UTF-8 at byte {error.start}; convert the file, say with "
                                  "iconv -f latin1 -t utf-8")
        yield number, text


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


def listed(names):
    """The first of some names, which may be many and long."""
    return shortened(", ".join(itertools.islice(names, 12)))


def check_columns(langs, known, name):
    """BadInput if a language is none of the known columns."""
    for lang in langs:
        if known and lang not in known:
            raise BadInput(f"--langs {shortened(lang)}: {name} has the columns {listed(known)}"
                           + did_you_mean(lang, known))


# ---- plain text and tables


def read_text(path, langs, header):
    """One row a line."""
    for number, line in decoded_lines(path):
        if isinstance(line, ValueError):
            yield number, line
        elif line.strip():
            yield number, {"text": line}


def is_quoted(path):
    """Whether a TSV is quoted by the rules of CSV, as spreadsheets and pandas write it: of the
    quotes in its first lines, and there are some, each is doubled or stands around a cell."""
    count = 0  # of columns
    found = False
    for _, line in itertools.islice(decoded_lines(path), HEADER_ROWS):
        if isinstance(line, str) and line.strip():
            count = count or line.count("\t") + 1
            if '"' in line:
                found = True
                if not QUOTED.fullmatch(line) or len(_split_quoted(line)) != count:
                    return False
    return found


def _split_quoted(line):
    """The cells of a line of a TSV; a quote that does not close is text."""
    try:
        return next(csv.reader([line], delimiter="\t", strict=True))
    except csv.Error:
        return line.split("\t")


def tsv_cells(path):
    """Yields (line number, cells). Quotes are text as in most corpora, also those around a cell,
    unless `is_quoted`."""
    quoted = is_quoted(path)
    if quoted:
        yield 1, "cells in quotes are read by the rules of CSV"
    for number, line in decoded_lines(path):
        if isinstance(line, ValueError):
            yield number, line
        else:
            yield number, _split_quoted(line) if quoted and '"' in line else line.split("\t")


def csv_cells(path):
    """Yields (line number, cells). A cell in quotes may go over several lines."""
    bad = []  # lines that are no text; a cell may hold several

    def lines():
        for _, line in decoded_lines(path):
            if isinstance(line, ValueError):
                bad.append(line)
                line = ""
            yield line + "\n"

    reader = csv.reader(lines(), strict=True)
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            cells = ValueError(error)
            # How many rows are lost nobody knows, so they are not skipped.
            if reader.line_num > number:
                raise BadInput(f"{path}:{number}: {error}: a cell that begins with a quote does "
                               "not end with one") from None
        yield number, bad[0] if bad else cells
        bad.clear()


def read_table(cells_of, path, langs, header):
    """The rows of a table, whose lines cells_of(path) gives as cells, texts or ValueErrors."""
    names = []
    for number, cells in cells_of(path):
        if isinstance(cells, ValueError) and not names:
            raise BadInput(f"{path}:{number}: {cells}")
        if isinstance(cells, (ValueError, str)):
            yield number, cells
        # Lines of empty cells stand below the table of a spreadsheet.
        elif any(map(str.strip, cells)):
            if not names:
                names, notes = _column_names(f"{path}:{number}", cells, langs, header)
                for note in notes:
                    yield number, note
                if header == "yes":
                    continue
            if len(cells) == len(names):
                yield number, {name: cell for name, cell in zip(names, cells) if name}
            else:
                more = ""
                if any('"' in cell for cell in cells):
                    more = "; does a cell in quotes go over several lines? Save the table as CSV"
                yield number, ValueError(f"{len(cells):,} cells, but {len(names)} columns "
                                         f"({listed(names)}){more}")


def _column_names(where, cells, langs, header):
    """The names of a table's columns, given its first line, "" for one without a name; and what to
    say of them, a list."""
    names = [cell.strip() for cell in cells]
    if header == "no":
        numbered = [f"column{place}" for place in range(1, len(names) + 1)]
        plain = ["src", "tgt"] if len(names) == 2 else numbered
        # --langs can choose among these columns, or give names to all of them.
        is_choice = set(langs) <= set(plain) or len(langs) != len(names)
        return plain if is_choice else list(langs), []
    filled = [name for name in names if name]
    if len(names) == 1 and ";" in names[0]:
        raise BadInput(f"{where}: the cells are separated by semicolons: save the table with "
                       "commas or tabs")
    if len(set(filled)) < len(filled):
        raise BadInput(f"{where}: the header names a column twice: {listed(filled)}; give every "
                       "column a name of its own")
    # One of the cells surely is the name of a column.
    known = KNOWN_NAMES | set(langs)
    is_sure = any(CODE.fullmatch(name) or name in known or name.lower() in known for name in filled)
    if not is_sure and not all(map(NAME.fullmatch, filled)):
        raise BadInput(f"{where}: the first line must name the columns, such as en,de, and looks "
                       f"like a row ({listed(filled)}): add a header, say --header no, or name "
                       "columns of this line with --langs")
    notes = [] if names[0] else ["the first column has no name and is not read"]
    if not is_sure:
        notes.append(f"the first line, {listed(filled)}, names the columns (--header no, if it is "
                     "a row)")
    return names, notes


# ---- JSON lines


def read_jsonl(path, langs, header):
    """An object on each line; a "text" alone has one row for each paragraph."""
    for number, line in decoded_lines(path):
        try:
            if isinstance(line, ValueError):
                raise line
            rows = _json_rows(line, langs) if line.strip() else []
        except ValueError as error:
            yield number, error
        else:
            for row in rows:
                yield number, row


def _json_rows(line, langs):
    """One line of JSON -> its rows {column: text}: one, or one for each paragraph of a "text".
    Raises ValueError with the reason why there are none."""
    try:
        found = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        # A list may go over several lines.
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
            raise ValueError(f"{shortened(repr(name))} is {type(text).__name__}, not a string")
        row[name] = text or ""
        # This is a ValueError for half of a surrogate pair, which is no character.
        row[name].encode()
    if list(row) == ["text"]:
        # Not splitlines: a character such as U+2028 ends no line.
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
    """The question and the answer in a record as NQ-Open ("answer": [...]) or HellaSwag ("ctx",
    "endings", "label") publishes it; {} for other records."""
    answers = found.get("answer")
    if isinstance(answers, list) and all(isinstance(answer, str) for answer in answers):
        return {"answer": "; ".join(answers)}
    endings = found.get("endings")
    if isinstance(found.get("ctx"), str) and isinstance(endings, list):
        label = str(found.get("label"))
        if label in [*"0123"[:len(endings)]]:
            options = [f"{letter}) {ending}" for letter, ending in zip("ABCD", endings)]
            # User and assistant are the two views [LLM-JEPA, sec. 5.1]. The task hellaswag-letter
            # reads --langs question,letter.
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
            negatives = [name for name in found if name.startswith("negative")]
            return {name: found[name] for name in (*names, *negatives)}
    raise ValueError(f"no known keys among {listed(map(repr, found)) or 'none'}: translation, "
                     "src + tgt, anchor + positive, user + assistant, messages, text or question + "
                     "answer (or name two of its keys with --langs)")


read_tsv = functools.partial(read_table, tsv_cells)
read_csv = functools.partial(read_table, csv_cells)
READERS = {".txt": read_text, ".text": read_text, ".tsv": read_tsv, ".tab": read_tsv,
           ".csv": read_csv, ".jsonl": read_jsonl, ".json": read_jsonl, ".ndjson": read_jsonl}


# ---- which reader


def find_reader(path, ending):
    """The reader of a file, by its ending or else by its first line. BadInput for what is no text.
    """
    if ending in OTHERS and ending not in READERS:
        raise BadInput(f"{path}: {ending} is not read, it is {OTHERS[ending]}; save it as TSV, CSV "
                       f"or JSONL (plain, or as {', '.join(OPENERS)})")
    first = next((line for _, line in read_lines(path) if line.strip()), b"").lstrip()
    if not first:
        raise BadInput(f"{path} is empty")
    if first.startswith((b"<?xml", b"<!DOCTYPE", b"<tmx")):
        raise BadInput(f"{path} is XML, which is not read: save it as TSV, CSV or JSONL")
    if ending in READERS:
        return READERS[ending]
    if first.startswith(b"{"):
        return read_jsonl
    return read_tsv if b"\t" in first else read_text


def parallel_names(plain):
    """The columns of parallel files, given their plain names; [] of others. corpus.de-en.de and
    corpus.de-en.en are de and en, as are corpus.de.txt and corpus.en.txt; eng_Latn.dev and
    deu_Latn.dev are eng_Latn and deu_Latn."""
    if len(plain) < 2:
        return []
    if all(name.suffix.lower() == ".txt" for name in plain):
        plain = [name.with_suffix("") for name in plain]
        is_parallel = all(CODE.fullmatch(name.suffix[1:]) for name in plain)
        is_parallel = is_parallel and len({name.stem for name in plain}) == 1
        return [name.suffix[1:] for name in plain] if is_parallel else []
    if not all(name.suffix and name.suffix.lower() not in READERS for name in plain):
        return []
    if len({name.stem for name in plain}) == 1:
        return [name.suffix[1:] for name in plain]
    return [name.stem for name in plain]


def read_parallel(paths, names):
    """Line N of every file is one row."""
    for lines in itertools.zip_longest(*map(decoded_lines, paths)):
        if None in lines:
            # Never skipped: where one line is missing, all after it may be misaligned.
            short = paths[lines.index(None)]
            path, (number, _) = next(pair for pair in zip(paths, lines) if pair[1])
            raise BadInput(f"{short} has {number - 1:,} lines, {path} has more ({path}:{number}); "
                           "line N of all must be one row")
        number = lines[0][0]
        row = {}
        for path, name, (_, line) in zip(paths, names, lines):
            if isinstance(line, ValueError):
                row = ValueError(f"in {path.name}: {line}")
                break
            row[name] = line
        yield number, row


# ---- rows


class TextFiles:
    """Rows of text out of one or more files, streaming. Raises BadInput.

    `langs`: columns to read, all by default. `skip_bad`: leave out bad lines, and count them.
    `names`: the column of each file, if line N of all files is one row. `header`: whether the first
    line of a table names its columns ("yes", "no").
    """

    embedded = False

    def __init__(self, paths, langs=(), skip_bad=False, names=(), header="yes"):
        self.paths = [Path(path) for path in paths]
        self.langs = tuple(langs)
        self.skip_bad = skip_bad
        self.header = header
        self.dropped = 0  # bad lines
        self.sparse = 0  # rows of many columns with too little text in the chosen ones
        self.kinds = None  # what each row is for, once that is asked
        self.counts = {}  # the rows of each file that was read to its end
        self.notes = []  # what a user should know of how the files are read
        self.split_notes = []  # and of how their rows are held out
        plain = [Path(PACKED.sub("", path.name)) for path in self.paths]
        self.name = "+".join(dict.fromkeys(name.stem for name in plain))[:80]
        names = list(names) or parallel_names(plain)
        if names:
            self.readers = [functools.partial(read_parallel, self.paths, names)]
        else:
            self.readers = []
            for path, name in zip(self.paths, plain):
                reader = find_reader(path, name.suffix.lower())
                self.readers.append(functools.partial(reader, path, self.langs, header))
        self.names = [names or self._names(index) for index in range(len(self.readers))]
        known = list(dict.fromkeys(itertools.chain.from_iterable(self.names)))
        check_columns(self.langs, known, self.paths[0])
        negatives = [name for name in known if name.startswith("negative")]
        # The columns that can be texts, whichever of them are chosen.
        self.texts = [name for name in known
                      if name.lower() not in NOT_TEXT and name not in negatives]
        self.columns = self.langs or tuple(self.texts or known)
        self.sides = len(self.columns)  # the first so many columns can be views
        # What opens a chat is no view, and stands last.
        if {"user", "assistant", "system"} <= set(known):
            self.texts.remove("system")
        if {"user", "assistant", "system"} <= set(self.columns):
            turns = [name for name in self.columns if name != "system"]
            self.columns = (*turns, "system")
            self.sides = len(turns)
        if negatives and not set(negatives) & set(self.columns):
            self.notes.append(f"{self.name}: {listed(negatives)} is not used: no objective reads "
                              "negatives of the data")

    def _names(self, index):
        """The columns of one file."""
        path = self.paths[index]
        names = {}
        for number, row in itertools.islice(self.readers[index](), HEADER_ROWS):
            if isinstance(row, dict):
                names.update(dict.fromkeys(row))
            elif isinstance(row, str):
                self.notes.append(f"{path}: {row}")
            elif not names and not self.skip_bad:
                raise BadInput(f"{path}:{number}: {row}")
        if not names:
            raise BadInput(f"{path} has no row that can be used: there is nothing below its header")
        return list(names)

    def _read(self, index):
        """(line number, {column: text}) of every row of a file that can be read. Bad lines are
        counted, or BadInput names the first."""
        known = set(self.names[index])
        count = 0
        for number, row in self.readers[index]():
            if isinstance(row, dict) and not self.langs and not known.issuperset(row):
                late = shortened(repr(min(set(row) - known)))
                row = ValueError(f"{late} is no column of the lines before; choose columns with "
                                 "--langs")
            if isinstance(row, dict):
                yield number, row
                count += 1
            elif not isinstance(row, str):
                self._bad(index, number, row)
        self.counts[index] = count

    def _bad(self, index, number, reason):
        if not self.skip_bad:
            raise BadInput(f"{self.paths[index]}:{number}: {reason}; mend the line, or leave out "
                           "such lines with --skip-bad")
        self.dropped += 1

    def find_kinds(self):
        """(N,) uint8: what each of all rows is for, as corpora.split says: the same whichever
        columns are chosen. Reads the files once."""
        if self.kinds is None:
            self.dropped = 0
            names = self.texts or self.columns
            everything = itertools.chain.from_iterable(map(self._read, range(len(self.readers))))
            rows = ([row.get(name, "") for name in names] for _, row in everything)
            # One iterator, because the split takes its rows in chunks.
            rows = iter(tqdm(rows, f"read {self.name}", unit=" rows", disable=None))
            self.kinds, repeated = split.split(rows, len(names))
            if repeated:
                self.split_notes.append(
                    f"{self.name}: the texts of {listed(names[i] for i in repeated)} repeat; rows "
                    "held out share them with rows trained on")
        return self.kinds

    def left_out(self):
        """What was not read, in words; "" if everything was."""
        if not self.dropped and not self.sparse:
            return ""
        return (f"left out {self.dropped:,} bad lines and {self.sparse:,} rows with too little "
                f"text in {', '.join(self.columns[:6])}")

    def rows(self, wanted):
        """Tuples of texts, "" for none: "all" rows, those that training reads ("train"), or those
        that it never sees ("valid" and "test", which are the same)."""
        # For all rows nothing has to be compared.
        if wanted == "all":
            for _, texts in self.records():
                yield texts
            return
        kinds = self.find_kinds()
        wanted = split.TRAIN if wanted == "train" else split.HELD
        last = np.flatnonzero(kinds == wanted).max(initial=-1)
        for record, texts in self.records():
            if record > last:
                return
            if kinds[record] == wanted:
                yield texts

    def records(self, characters=None):
        """(number of the row, one text a column, "" for none) of the rows with text enough. Numbers
        are the places in `find_kinds`, once that was called. `characters`: stop after so many, as
        many from each file."""
        self.dropped = 0
        self.sparse = 0
        for index in range(len(self.readers)):
            left = (characters or 0) / len(self.readers)
            first = sum(self.counts.get(before, 0) for before in range(index))
            for record, (number, row) in enumerate(self._read(index), first):
                texts = [row.get(name, "") for name in self.columns]
                texts = tuple("" if text.isspace() else text for text in texts)
                if not any(map(str.strip, row.values())):
                    self.sparse += 1
                elif self._is_usable(index, number, texts):
                    yield record, texts
                left -= sum(map(len, texts))
                if characters and left <= 0:
                    break

    def _is_usable(self, index, number, texts):
        """Whether a row has text enough. A pair must be whole; in a wider table "" is no text."""
        names = self.names[index]
        longest = 0
        for text in texts:
            if len(text) > LONGEST_WORD:
                longest = max(longest, *(len(word) for word in text.split()), 0)
        if longest > LONGEST_WORD:
            self._bad(index, number, f"a word of {longest:,} characters, over {LONGEST_WORD:,}: "
                                     "the tokenizer would take hours")
            return False
        empty = [name for name, text in zip(self.columns[:self.sides], texts) if not text]
        is_pair = len(names) - ("system" in names) <= 2
        if is_pair and not set(empty).isdisjoint(names):
            self._bad(index, number, f"empty {empty[0]!r}")
            return False
        if self.sides - len(empty) < min(2, self.sides):
            self.sparse += 1
            return False
        return True
