"""Text files as rows of texts: TSV, CSV, JSON Lines, plain text and Moses (a file per language).

A row holds the same content in several columns: two languages, or question and answer. To add a
format, write a function like read_jsonl, which yields (line number, {column: text}), and add it to
READERS. Its second argument, the columns of --langs, helps a table to find its header.
"""

import bz2
import csv
import functools
import itertools
import json
import lzma
import os
import re
import unicodedata
import zlib
from collections import Counter
from hashlib import blake2b
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common import BadInput, did_you_mean, shown
from corpora.store import load_kinds

csv.field_size_limit(10 ** 6)


def at_line(path, number, text):
    """Return a BadInput that names a line of a file."""
    return BadInput(f"{shown(path)}:{number}: {text}")


# ---- lines

UNPACKERS = {b"\x1f\x8b": lambda: zlib.decompressobj(31), b"BZh": bz2.BZ2Decompressor,
             b"\xfd7zXZ\0": lzma.LZMADecompressor}
PACKED = re.compile(r"\.(gz|bz2|xz)$", re.IGNORECASE)
FOREIGN = {  # how a file begins that has no rows of text: what it is, and what to do
    rb"version https://git-lfs": "a git-lfs pointer, not the file itself: run git lfs pull",
    rb"\xff\xfe|\xfe\xff|(\0[^\0]){4}|([^\0]\0){4}": 
        "UTF-16: convert it (iconv -f utf-16 -t utf-8)",
    rb"(?s).{,100}\0|PK\x03\x04|%PDF|\x28\xb5\x2f\xfd|7z\xbc\xaf":
        "a binary file: save the texts as TSV, CSV or JSON Lines in UTF-8 (also as .gz, .bz2, .xz)",
    rb"(?s)WEBVTT|.{,200}\d:\d\d[.,]\d+( --> |,\d+:|\])|\[Script Info\]|\{\d+\}\{\d+\}":
        "a file of subtitles: save the sentences alone, one on each line of a .txt",
    rb'(?s)(.*\n)?msgid "': "a gettext catalog: convert it to CSV (po2csv)",
    rb"(?i)\s*(<([?!]|(html|head|body|title|div|p|h\d|table|ul|doc|seg)\b|[a-z][\w:.-]*(\s+[\w:.-]+"
    rb"\s*=|[^<>]*>\s*?[\r\n<]))|\{\\rtf|\\documentclass)":
        "markup: extract its text, one row on each line"}


def read_chunks(path):
    """Yield the bytes of a file in chunks, unpacked if its content is gzip, bzip2 or xz."""
    with open(path, "rb") as file:
        chunk = file.read(1 << 18)
        unpack = next((UNPACKERS[magic] for magic in UNPACKERS if chunk.startswith(magic)), None)
        stream = unpack and unpack()
        while chunk and not stream:
            yield chunk
            chunk = file.read(1 << 18)
        while chunk:
            if stream.eof:  # here a second file begins, joined by cat, or what follows is an error
                stream = unpack()
            yield stream.decompress(chunk)
            chunk = stream.unused_data or file.read(1 << 18)
        if stream and not stream.eof:
            raise EOFError("it ends too early")


def read_lines(path):
    """Yield (line number, line) of a text file, compressed or not.

    Lines end with LF or CRLF, or with CR if the file has no LF. A byte order mark is removed from
    the start of any line, since `cat` leaves some. Raises BadInput for a file that is not text."""
    if not os.path.isfile(path):
        raise BadInput(f"there is no file {shown(path)}: it is missing, a folder, or a pipe")
    number, rest, end = 0, b"", b""
    try:
        for chunk in filter(None, read_chunks(path)):
            if not end:
                for pattern, advice in FOREIGN.items():
                    if re.match(pattern, chunk.removeprefix(b"\xef\xbb\xbf")):
                        raise at_line(path, 1, f"this is {advice}")
                end = b"\r" if b"\r" in chunk and b"\n" not in chunk.rstrip(b"\r\n") else b"\n"
            *lines, rest = (rest + chunk).split(end)
            for line in lines:
                number += 1
                yield number, _decoded(line, path, number)
        if rest:
            yield number + 1, _decoded(rest, path, number + 1)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise at_line(path, number + 1, f"cannot read on ({error}): the file is damaged, cut short "
                      "or followed by other bytes, so copy it again") from None


def _decoded(line, path, number):
    try:
        text = line.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise at_line(path, number, "not UTF-8 text: convert it (iconv -f latin1 -t utf-8)")
    return text.removeprefix("\ufeff").rstrip("\r")


# ---- columns

# ISO 639-1 and FLORES-200. "id" is missing, because such a column holds identifiers.
LANGUAGES = set(Path(__file__).with_name("languages.txt").read_text().split())
GROUPS = ("src tgt", "src trg", "sentence1 sentence2", "question1 question2", "s1 s2",
          "text1 text2", "anchor positive", "premise hypothesis", "english regex",
          "user assistant", "question answer", "text")
LABEL = re.compile(r"label|score|simil|rating|grade|class|duplic|paraphras|quality|related|entail|"
                   r"judg|match|correct|gold|relevan", re.IGNORECASE)


def is_language(name):
    """Return whether a column is named by a language, such as en, zh-CN, en1 or deu_Latn."""
    found = re.fullmatch(r"([a-z]+)\d*([_-]\w+)*", name.lower())
    is_fact = LABEL.search(name) or re.search("_(id|len)", name)
    return bool(found) and found[1] in LANGUAGES and not is_fact


def choose_columns(names, langs=()):
    """Return the columns to read: `langs`, or the first known group in `names`; () if none is."""
    if langs:
        return tuple(langs) if set(langs) <= set(names) else ()
    languages = tuple(filter(is_language, names))
    if len(languages) >= 2:
        return languages
    spelled = {name.lower(): name for name in names}
    known = (group.split() for group in GROUPS if set(group.split()) <= spelled.keys())
    return tuple(map(spelled.get, next(known, ())))


def listed(names):
    """Return the first of some names for a message."""
    return shown(", ".join(name or "(no name)" for name in itertools.islice(names, 12)))


def check_langs(langs, known, name):
    """Raise BadInput if one of --langs is not a column."""
    for lang in langs:
        if lang not in known:
            raise BadInput(f"--langs {shown(lang)}: {shown(name)} has the columns {listed(known)}"
                           + did_you_mean(shown(lang), map(shown, known)))


# ---- formats

DELIMITERS = {"\t": "tabs", ",": "commas", ";": "semicolons", "|": "bars"}


def split_header(line, langs, delimiters=tuple(DELIMITERS)):
    """Return the delimiter that splits a line into known names, or the most frequent; the names."""
    for delimiter in (*delimiters, max(delimiters, key=line.count)):
        try:
            names = next(csv.reader([line], delimiter=delimiter))
        except csv.Error:  # such as a CR in the middle
            names = line.split(delimiter)
        names = [name.strip() for name in names]
        if choose_columns(names, langs):
            break
    return delimiter, names


def read_table(path, langs=()):
    """Yield the rows of a table whose first line names the columns; None for a repeated header.

    Its delimiter is the one that splits the first line into known names. Quotes follow the rules of
    CSV, but between tabs they are text, unless the header has them too."""
    lines = read_lines(path)
    start, header = next(pair for pair in lines if pair[1].strip())
    delimiters = ",;\t|" if ".csv" in path.name.lower() else tuple(DELIMITERS)
    excel = re.fullmatch(r'"?sep=([,;|\t])"?[,;|\t]*', header)
    if excel:
        delimiters = excel[1]
        start, header = next(lines, (start, ""))
    delimiter, names = split_header(header or " ", langs, delimiters)
    if not langs and not choose_columns(names):
        example = "text" if len(names) < 2 else f"en{delimiter}de".replace("\t", "<TAB>")
        raise at_line(path, start, "the first line must name the columns, and has no known names "
                      f"({listed(names)}, separated by {DELIMITERS[delimiter]}): add a header line "
                      f"such as {example}, or, if it is one, choose columns with --langs")
    for name in filter(None, names):
        if names.count(name) > 1:
            raise at_line(path, start, f"two columns have the name {shown(name)}: rename one")
    rows = ((number, line.split("\t")) for number, line in lines)
    if delimiter != "\t" or header.startswith('"'):
        rows = read_quoted(path, lines, start, delimiter)
    for number, cells in rows:
        if not any(map(str.strip, cells)):  # below the table of a spreadsheet
            continue
        if cells[0].strip() in names and sorted(map(str.strip, cells)) == sorted(names):
            if [cell.strip() for cell in cells] != names:
                raise at_line(path, number, "a header with another order of columns: make this the "
                              "first line of a second file")
            yield number, None
        elif len(cells) == len(names):
            yield number, dict(zip(names, cells))
        else:
            raise at_line(path, number, f"{len(cells):,} cells, but the header has {len(names):,} "
                          f"columns ({listed(names)})")


def read_quoted(path, lines, start, delimiter):
    """Yield (line number, cells) by the rules of CSV: a cell in quotes can have several lines."""
    reader = csv.reader((line + "\n" for _, line in lines), delimiter=delimiter, strict=True)
    while True:
        number = start + reader.line_num + 1
        try:
            yield number, next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise at_line(path, number, f"not CSV ({shown(error)}): a quote must open and close a "
                          "whole cell, and quotes inside it are doubled") from None


def read_jsonl(path, langs=()):
    """Yield the rows of JSON Lines: {"en": ..., "de": ...}, {"translation": {...}}, or a chat,
    {"messages": [{"role": ..., "content": ...}, ...]}."""
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if "\\ud" in line.lower():
                json.dumps(row, ensure_ascii=False).encode()  # fails for half of a surrogate pair
        except (ValueError, RecursionError) as error:
            row = error
        if not isinstance(row, dict):
            raise at_line(path, number, f"not JSON Lines ({shown(row)}): write one object on each "
                          "line (jq -c '.[]' FILE makes them from a list)")
        if isinstance(row.get("messages"), list):
            turns = [(turn.get("role"), turn.get("content")) for turn in row.pop("messages")
                     if isinstance(turn, dict)]
            roles = sorted(str(role) for role, _ in turns)
            if roles not in (["assistant", "user"], ["assistant", "system", "user"]):
                raise at_line(path, number, "a chat must have one user turn, one assistant turn, "
                              "and at most one system turn")
            row |= dict(turns)
        if isinstance(row.get("translation"), dict):
            row |= row.pop("translation")
        yield number, row


def read_text(path, langs=()):
    """Yield a row for each line that is not blank."""
    for number, line in read_lines(path):
        if line.strip():
            yield number, {"text": line}


def read_moses(paths, names):
    """Yield rows from several files: line N of each is row N in another language."""
    for lines in itertools.zip_longest(*map(read_lines, paths)):
        if None in lines:
            short = paths[lines.index(None)]
            path, (number, _) = next(pair for pair in zip(paths, lines) if pair[1])
            raise at_line(path, number, f"{shown(short)} has only {number - 1:,} lines, and line N "
                          "of all files must be one row")
        yield lines[0][0], {name: line for name, (_, line) in zip(names, lines)}


READERS = {".tsv": read_table, ".tab": read_table, ".csv": read_table,
           ".jsonl": read_jsonl, ".json": read_jsonl, ".ndjson": read_jsonl}


def find_reader(path, langs):
    """Return the reader of a file, by its ending or its first lines. Raises BadInput."""
    lines = (line for _, line in read_lines(path) if line.strip())
    start = list(itertools.islice(lines, 100))
    ending = Path(PACKED.sub("", path.name)).suffix.lower()
    if not start:
        raise BadInput(f"{shown(path)} is empty")
    if ending in READERS:
        return READERS[ending]
    if re.match(r'\s*\{\s*"', start[0]):
        return read_jsonl
    # A header can be in a file of any name, but "No, it" is prose.
    names = [] if " " in start[0] else split_header(start[0], langs)[1]
    if len(names) > 1 and choose_columns(names, langs):
        return read_table
    if sum("\t" in line.strip() for line in start) > len(start) / 2:
        raise at_line(path, 1, "the lines have tabs: name the file .tsv and add a header line, "
                      "such as en<TAB>de")
    return read_text


def moses_names(plain):
    """Return the languages of Moses files, given their names without .gz; [] for other files.

    corpus.de and corpus.en are de and en, corpus.de.txt and corpus.en.txt too, and deu_Latn.dev and
    eng_Latn.dev are deu_Latn and eng_Latn."""
    if len(plain) < 2 or any(name.suffix.lower() in READERS for name in plain):
        return []
    is_txt = any(name.suffix.lower() == ".txt" for name in plain)
    stems = [name.with_suffix("") if is_txt else name for name in plain]
    suffixes = [name.suffix[1:] for name in stems]
    for codes in (suffixes, [name.stem for name in stems]):
        are_languages = codes == suffixes and not is_txt or all(map(is_language, codes))
        if len(set(codes)) == len(codes) and are_languages:
            return [shown(code) for code in codes]
    return []


def folder_files(folder):
    """Return the files CODE.devtest, or else CODE.dev, of a folder, eng_Latn first."""
    for ending in (".devtest", ".dev"):
        # macOS adds files ._CODE.devtest.
        found = [path for path in Path(folder).iterdir() if not path.name.startswith(".")
                 and PACKED.sub("", path.name).endswith(ending)]
        if found:
            return sorted(found, key=lambda path: (not path.name.startswith("eng_Latn"), path))
    raise BadInput(f"{shown(folder)} is a folder without files CODE.devtest or CODE.dev: name its "
                   "files, as in --data corpus.de,corpus.en")


# ---- rows

TRAIN, EVAL, EXCLUDED = range(3)
BLANK = " \u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\ufe0e\ufe0f\uffa0"  # printable, not visible
TOO_LONG = re.compile(r"(?s).{1000000}|\w{10000}|[^\w\s]{10000}")


class TextFiles:
    """Rows of text from one or more files. Raises BadInput.

    The first `num_text_columns` columns can be views; a chat's system text comes after them."""

    embedded = False

    def __init__(self, paths, langs=()):
        self.paths = [Path(os.path.expanduser(path)) for path in paths]
        plain = [Path(PACKED.sub("", path.name)) for path in self.paths]
        self.name = shown("+".join(dict.fromkeys(name.stem for name in plain)))[:80]
        names = moses_names(plain)
        if names:
            check_langs(langs, names, self.name)
            paths = dict(zip(names, self.paths))
            names = list(langs) or names
            self.paths = [paths[name] for name in names]
            self.readers = [functools.partial(read_moses, self.paths, names)]
        else:
            self.readers = [functools.partial(find_reader(path, langs), path, langs)
                            for path in self.paths]
        self.known = {}  # the names of all columns; JSON can name one late, hence 10,000 rows
        for path, read in zip(self.paths, self.readers):
            rows = [row for _, row in itertools.islice(read(), 10_000) if row]
            if not rows:
                raise BadInput(f"{shown(path)} has no rows: there is nothing after its header")
            self.known |= dict.fromkeys(itertools.chain.from_iterable(rows))
        check_langs(langs, self.known, self.name)
        default = names or choose_columns(self.known)
        columns = [name for name in langs or default if name != "system"] or [*langs]
        if not columns:
            raise at_line(self.paths[0], 1, f"no known columns among {listed(self.known)}: rename "
                          "two of them src and tgt, or choose with --langs")
        self.num_text_columns = len(columns)
        if {"user", "assistant"} <= set(columns) and (not langs or "system" in langs):
            columns.append("system")
        self.columns = tuple(columns)
        # All of these are read, so that the same rows are held out whatever --langs chooses.
        self.names = tuple(dict.fromkeys((*columns, *default)))
        self.kinds = None  # what each row is for: see find_kinds
        self.counts = Counter()  # what the last reading left out

    @property
    def notes(self):
        """Lines for the user: what is not read, skipped and held out."""
        notes = []
        unread = [name for name in self.known if name not in self.columns]
        if unread:
            pairs = self.num_text_columns > 1 and any(map(LABEL.search, unread))
            notes.append(f"columns not read: {listed(unread)} (choose with --langs)"
                         + ", and all rows are used as matching pairs" * pairs)
        notes += [f"{count:,} {what}" for what, count in self.counts.items()]
        if self.kinds is not None:
            _, held, excluded = np.bincount(self.kinds, minlength=3)
            notes.append(f"{held:,} rows are held out for evaluation; {excluded:,} rows that share "
                         "a text with them are not trained on")
        return [f"{self.name}: {note}" for note in notes]

    def _read(self):
        """Yield the texts of every row, "" for none: a list in the order of self.names."""
        self.counts.clear()
        for path, read in zip(self.paths, self.readers):
            for number, row in read():
                if row is None:
                    self.counts["repeated header lines are skipped"] += 1
                    continue
                if not row.keys() <= self.known.keys():
                    self.known |= dict.fromkeys(row)
                texts = [row.get(name) for name in self.names]
                for index, text in enumerate(texts):
                    is_plain = isinstance(text, str) and 3 < len(text) < 10_000
                    if not (is_plain and text[0].isalnum()):
                        texts[index] = self._clean(text, path, number, self.names[index])
                if self.columns == ("text",):  # the paragraphs of a document are rows
                    yield from ([part] for part in re.split(r"\r?\n", texts[0]))
                else:
                    yield texts

    def _clean(self, text, path, number, name):
        """Return the text of a cell, "" if nothing in it is visible. Raises BadInput."""
        if text is None or text != text:  # JSON's null and NaN
            return ""
        if type(text) in (int, float):
            return str(text)
        if not isinstance(text, str):
            raise at_line(path, number, f"{shown(name)!r} is of type {type(text).__name__}, not a "
                          "text: choose other columns with --langs")
        if len(text) >= 10_000 and TOO_LONG.search(text):
            raise at_line(path, number, "a text of 1,000,000 characters or a word of 10,000: break "
                          "it into rows, or the tokenizer would take hours")
        visible = "".join(filter(str.isprintable, text)).strip(BLANK).lower()
        if visible and visible not in ("\\n", "nan"):
            return text
        if text.strip():
            self.counts[r"cells have only invisible characters, \N or nan, and count as empty"] += 1
        return ""

    def _has_enough(self, texts):
        """Return whether a row has two texts, or one if there is a single column."""
        filled = sum(map(bool, texts[:self.num_text_columns]))
        if filled >= min(2, self.num_text_columns):
            return True
        self.counts["rows with too little text are skipped"] += 1
        return False

    def find_kinds(self):
        """Return (N,) uint8, what each row is for: TRAIN, EVAL or EXCLUDED."""
        if self.kinds is None:
            self.kinds = load_kinds(self)
        if self.kinds is None:
            hashes, enough = bytearray(), bytearray()
            compared = [name != "system" for name in self.names]
            for texts in tqdm(self._read(), f"read {self.name}", unit=" rows", disable=None):
                enough.append(self._has_enough(texts))
                for text in itertools.compress(texts, compared):
                    hashes += text_hash(text)
            hashes = np.frombuffer(hashes, np.uint64).reshape(-1, sum(compared))
            self.kinds = hold_out(hashes)[np.frombuffer(enough, bool)]
        return self.kinds

    def rows(self, split):
        """Yield tuples of texts: of "all" rows, of those to "train" on, or of those held out, for
        which "valid" and "test" are two names."""
        size = len(self.columns)
        rows = (tuple(texts[:size]) for texts in self._read() if self._has_enough(texts))
        if split == "all":
            first = next(rows, None)
            if first is None:
                raise BadInput(f"{shown(self.paths[0])}: no row has enough text in "
                               f"{listed(self.columns[:self.num_text_columns])}: check the file "
                               "and --langs")
            yield first
            yield from rows
            return
        chosen = self.find_kinds() == (TRAIN if split == "train" else EVAL)
        if not chosen.any():
            raise BadInput(f"{self.name} has {len(chosen):,} rows: to hold some out, it needs at "
                           "least 20 different ones. Give other rows with --eval-data, or evaluate "
                           "all rows with --split all")
        last = int(np.flatnonzero(chosen)[-1])
        yield from itertools.compress(rows, chosen[:last + 1].tolist())


# ---- which rows are held out


def normalized(text):
    """Return a text as it is compared: in one Unicode form and case, with single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def text_hash(text):
    """Return 8 bytes that stand for a text as it is compared; zeros for no text."""
    return blake2b(normalized(text).encode(), digest_size=8).digest() if text else bytes(8)


def hold_out(texts):
    """Return (N,) uint8, TRAIN, EVAL or EXCLUDED, given the hashes (N, C) of all texts.

    The rows with the smallest hashes are held out: a tenth of them up to 200 rows, 1 % of more than
    20,000, at most 1,000. Their copies, and rows that share a text with them, are excluded from
    training:

        A cat.       Eine Katze.    EVAL
        a  CAT.      Ein Kater.     EXCLUDED   its first text is compared as "a cat."
        Eine Katze.  A cat.         EXCLUDED   a copy with the columns exchanged
        A dog.       Ein Hund.      TRAIN
        A bird.      Ein Vogel.     TRAIN

    Texts of very many rows, such as "Yes.", are not compared. If more than a fifth of the rows
    would be held out or excluded, fewer rows are held out; of fewer than 20 rows, none."""
    rows = texts.sum(1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    whole = np.flatnonzero(np.count_nonzero(texts, axis=1) >= min(2, texts.shape[1]))
    _, first, copies = np.unique(rows[whole], return_index=True, return_counts=True)
    found, counts = np.unique(texts, return_counts=True)
    many = max(len(rows) // 500, min(20, len(rows) // 10), 3)
    common = found[(counts > many) | (found == 0)]
    held = whole[first[np.argsort(copies > many, kind="stable")]]  # rows with many copies are last
    size = min(1000, max(len(first) // 100, min(200, len(first) // 10)))
    while True:
        held = held[:size]
        kinds = np.full(len(rows), TRAIN, np.uint8)
        if len(first) >= 20:
            kinds[np.isin(rows, rows[held])] = EXCLUDED
            for column in texts.T:
                kinds[np.isin(column, np.setdiff1d(texts[held], common))] = EXCLUDED
            kinds[held] = EVAL
        if size <= 2 or np.count_nonzero(kinds) <= len(rows) // 5:
            return kinds
        size //= 2
