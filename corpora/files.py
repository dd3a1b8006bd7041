"""Text files as rows of texts: TSV, CSV, JSON Lines, plain text and Moses (one file per language).

To add a format, write a generator such as read_jsonl and give its file ending to READERS. If
read_lines refuses its files, remove them from FOREIGN. When you change a reader, delete the folder
cache/, which keeps the tokens of old rows.
"""

import bz2
import contextlib
import csv
import itertools
import json
import lzma
import os
import re
import unicodedata
import zlib
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common import BadInput, shown

csv.field_size_limit(10 ** 6)  # characters of a cell

# ---- lines

UNPACKERS = {b"\x1f\x8b": lambda: zlib.decompressobj(31), b"BZh": bz2.BZ2Decompressor,
             b"\xfd7zXZ\0": lzma.LZMADecompressor}
PACKED = re.compile(r"\.(gz|bz2|xz)$", re.IGNORECASE)
FOREIGN = {  # how a file begins that has no rows of text: what it is, and what to do
    rb"version https://git-lfs": "a git-lfs pointer: run git lfs pull",
    rb"%PDF|(?s:.*?)\0": "a binary file or UTF-16: save UTF-8 (iconv -f utf-16) or CSV",
    rb"WEBVTT|(?s:.{,200}?):\d\d[,.]\d+ --> \d":
        "a file of subtitles: save its sentences line by line",
    rb'(.*\n)?msgid "': "a gettext catalog: convert it to CSV (po2csv)",
    rb"(?i)\s*<([?!]|html|doc|refset|srcset|tstset)": "markup: extract its text, line by line"}


def at_line(path, number, text):
    """Return a BadInput that names a line of a file."""
    return BadInput(f"{shown(path)}:{number}: {text}")


def read_chunks(path):
    """Yield the bytes of a file in chunks, unpacked if its content is gzip, bzip2 or xz."""
    with open(path, "rb") as file:
        chunk = file.read(1 << 18)
        unpack = next((UNPACKERS[magic] for magic in UNPACKERS if chunk.startswith(magic)), None)
        stream = unpack and unpack()
        while chunk:
            if stream and stream.eof:  # what follows is a second file, joined by cat, or an error
                stream = unpack()
            yield stream.decompress(chunk) if stream else chunk
            chunk = stream and stream.unused_data or file.read(1 << 18)
        if stream and not stream.eof:
            raise EOFError("it ends too early")


def split_lines(path):
    """Yield the lines of a file as bytes. They end with LF, or with CR if the file has no LF."""
    rest, end = b"", b""
    for chunk in filter(None, read_chunks(path)):
        if not end:
            start = chunk.removeprefix(b"\xef\xbb\xbf")
            for pattern, advice in FOREIGN.items():
                if re.match(pattern, start):
                    raise at_line(path, 1, f"this is {advice}")
            end = b"\r" if b"\r" in chunk and b"\n" not in chunk.rstrip(b"\r\n") else b"\n"
        *lines, rest = (rest + chunk).split(end)
        yield from lines
    if rest:
        yield rest


def read_lines(path):
    """Yield (line number, line) of a text file, packed or not. Raises BadInput."""
    if not os.path.isfile(path):
        raise BadInput(f"{shown(path)} is not a file: it does not exist, or is a folder or a pipe")
    number = 0
    try:
        for number, line in enumerate(split_lines(path), 1):
            # `cat` can leave byte order marks, \ufeff, at the start of any line.
            yield number, line.decode().removeprefix("\ufeff").rstrip("\r")
    except UnicodeDecodeError:
        raise at_line(path, number, "this is not UTF-8: convert it (iconv -f latin1)") from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise at_line(path, number + 1, f"the file cannot be read further ({error}): it is "
                      "damaged, cut short or followed by other bytes") from None


# ---- columns

# ISO 639-1 and FLORES-200. "id" is missing, because such a column holds identifiers.
LANGUAGES = set(Path(__file__).with_name("languages.txt").read_text().split())
GROUPS = ("src tgt", "src trg", "sentence1 sentence2", "question1 question2", "s1 s2",
          "text1 text2", "anchor positive", "premise hypothesis", "english regex",
          "user assistant system", "user assistant", "question answer", "text")
LABEL = re.compile("label|score|simil|rating|class|duplicate|quality|entail|match|correct|relevan",
                   re.IGNORECASE)
# The last word of a column that is no text of a language, as in en_id, en_scores, is_relevant.
NO_TEXT = re.compile(f"(id|{LABEL.pattern})(s|t|ce|ity|ment)?")


def is_language(name):
    """Return whether a column is named by a language, such as en, zh-CN, en1, deu_Latn or en_text,
    but not en_id or en_score."""
    match = re.fullmatch(r"([a-z]+)\d*(?:[_-](\w+))*", name.lower())
    return bool(match) and match[1] in LANGUAGES and not NO_TEXT.fullmatch(match[2] or "")


def choose_columns(names, langs=()):
    """Return the columns to read: `langs`, or the first known group in `names`; () if none is."""
    if langs:
        return tuple(langs) if set(langs) <= set(names) else ()
    languages = tuple(dict.fromkeys(filter(is_language, names)))
    if len(languages) >= 2:
        return languages
    spelled = {name.lower(): name for name in names}
    known = (group.split() for group in GROUPS if set(group.split()) <= spelled.keys())
    return tuple(map(spelled.get, next(known, ())))


def no_columns(path, number, names, langs=(), delimiter="<TAB>"):
    """Return the error for a file without the columns of --langs or known ones."""
    return at_line(path, number, f"no {shown(', '.join(langs) or 'known names')} among the columns "
                   f"{shown(', '.join(names))}: choose with --langs, or if this is no header, add "
                   f"one, such as src{delimiter}tgt")


# ---- formats: generators of (line number, {column: text})
#
# Their argument `langs`, the columns of --langs, helps a table to find its header.


def read_text(path, langs=()):
    """Yield a row for each line that is not blank. A first line with tabs is a table's header."""
    for number, line in read_lines(path):
        if number == 1 and "\t" in line.strip():
            yield from read_table(path, langs)
            return
        if line.strip():
            yield number, {"text": line}


def read_table(path, langs=()):
    """Yield the rows of a table whose first line names the columns; {} for a repeated header.

    The delimiter is the one that splits this line into known names. Between tabs, quotes are text.
    Otherwise the rules of CSV hold, and a cell in quotes can have several lines."""
    lines = read_lines(path)
    start, header = next((pair for pair in lines  # Excel begins some files with "sep=;"
                          if pair[1].strip() and not pair[1].startswith("sep=")), (1, ""))
    if not header:
        return  # an empty file

    def reader_of(lines, delimiter, **options):
        quoting = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
        return csv.reader(lines, strict=True, delimiter=delimiter, quoting=quoting, **options)

    delimiters = ",\t;|" if ".csv" in path.name.lower() else "\t,;|"
    headers = {}
    for one in delimiters:
        with contextlib.suppress(csv.Error):
            cells = next(reader_of([header], one, skipinitialspace=True))
            headers[one] = [name.strip() for name in cells]
    delimiter = next((one for one in headers if choose_columns(headers[one], langs)),
                     max(headers, key=header.count))
    names = headers[delimiter]
    if not langs and not choose_columns(names):
        raise no_columns(path, start, names, delimiter=delimiter.replace("\t", "<TAB>"))
    for name in choose_columns(names, langs):
        if names.count(name) > 1:
            raise at_line(path, start, f"two columns are named {shown(name)}: rename one")
    reader = reader_of((line.replace("\r", " ") + "\n" for _, line in lines), delimiter)
    number = start + 1
    try:
        for cells in reader:
            texts = [cell.strip() for cell in cells]
            if texts == names:
                yield number, {}
            elif any(texts):  # spreadsheets have blank rows below the table
                if len(cells) != len(names):
                    raise at_line(path, number, f"{len(cells)} cells, but the header has "
                                  f"{len(names)} columns ({shown(', '.join(names))})")
                yield number, dict(zip(names, cells))
            number = start + 1 + reader.line_num
    except csv.Error as error:
        raise at_line(path, number, f"not CSV ({shown(error)}): quotes enclose whole cells, and "
                      "those inside are doubled") from None


def read_jsonl(path, langs=()):
    """Yield the rows of JSON Lines: {"en": ..., "de": ...}, {"translation": {...}}, or a chat,
    {"messages": [{"role": ..., "content": ...}, ...]}."""
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            row = {**json.loads(line)}
            if "\\ud" in line.lower():  # half of a surrogate pair is no text and cannot be encoded
                json.dumps(row, ensure_ascii=False).encode()
            if isinstance(row.get("translation"), dict):
                row |= row.pop("translation")
            if isinstance(row.get("messages"), list):
                turns = [(turn["role"], turn["content"]) for turn in row.pop("messages")]
                roles = sorted(role for role, _ in turns)
                if roles not in (["assistant", "user"], ["assistant", "system", "user"]):
                    raise ValueError("a chat has one turn of the user, one of the assistant, "
                                     "perhaps one of the system")
                row |= dict(turns)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise at_line(path, number, f"not JSON Lines ({shown(error)}): write one object of "
                          "texts, or one chat, on each line") from None
        yield number, row


def read_moses(paths, names):
    """Yield rows from several files: line N of each is row N in another language."""
    for lines in itertools.zip_longest(*map(read_lines, paths)):
        if None in lines:
            raise at_line(paths[lines.index(None)], max(filter(None, lines))[0], "the file ends "
                          "before this line, but line N of all files must be one row")
        yield lines[0][0], {name: line for name, (_, line) in zip(names, lines)}


READERS = {".tsv": read_table, ".tab": read_table, ".csv": read_table, ".jsonl": read_jsonl,
           ".json": read_jsonl, ".ndjson": read_jsonl, ".txt": read_text}


# ---- rows

TRAIN, EVAL, EXCLUDED = range(3)  # what a row is for
EMPTY = r"cells have only invisible characters, \N or nan, and count as empty"
SKIPPED = "rows are skipped: too little text, or a repeated header"


class TextFiles:
    """Rows of text from one or more files. Raises BadInput.

    The first `num_text_columns` columns can be views; a chat's system text comes after them."""

    embedded = False

    def __init__(self, paths, langs=()):
        self.paths = paths
        plain = [Path(PACKED.sub("", path.name)) for path in paths]
        self.name = shown("+".join(dict.fromkeys(path.stem for path in plain)))[:80]
        readers = [READERS.get(path.suffix.lower()) for path in plain]
        # Moses: corpus.de and corpus.en are de and en; deu_Latn.dev and eng_Latn.dev are languages.
        codes = [path.suffix[1:] for path in plain]
        if len(set(codes)) == 1 and all(is_language(path.stem) for path in plain):
            codes = [path.stem for path in plain]
        is_moses = len(set(codes)) == len(plain) > 1 and not any(readers)
        self.readers = [partial(read_moses, paths, codes)] if is_moses else [
            partial(read or read_text, path, langs) for path, read in zip(paths, readers)]
        # JSON can name a column late, hence 10,000 rows of each file.
        self.known = dict.fromkeys(name for read in self.readers
                                   for _, row in itertools.islice(read(), 10_000) for name in row)
        if not self.known:
            raise BadInput(f"{shown(paths[0])} has no rows")
        default = codes if is_moses else choose_columns(self.known)
        columns = choose_columns(self.known, langs) if langs else default
        if not columns:
            raise no_columns(paths[0], 1, self.known, langs)
        self.columns = tuple(sorted(columns, key=lambda name: name == "system"))
        self.num_text_columns = len(columns) - ("system" in self.columns[1:])
        # All of these are read, so that the same rows are held out whatever --langs chooses.
        self.names = tuple(dict.fromkeys((*self.columns, *default)))
        self.kinds = None  # what each row is for, once find_kinds has found it
        self.counts = {EMPTY: 0, SKIPPED: 0}  # of the last reading

    @property
    def notes(self):
        """Lines for the user: what is not read, skipped and held out."""
        notes = []
        unread = [name for name in self.known if name not in self.columns]
        if unread:
            pairs = self.num_text_columns > 1 and any(map(LABEL.search, unread))
            notes.append(f"columns not read: {shown(', '.join(unread))} (choose with --langs)"
                         + ", and all rows are used as matching pairs" * pairs)
        notes += [f"{count:,} {what}" for what, count in self.counts.items() if count]
        if self.kinds is not None:
            _, held, excluded = np.bincount(self.kinds, minlength=3)
            notes.append(f"{held:,} rows are held out for evaluation; {excluded:,} rows that share "
                         "a text with them are not trained on")
        return [f"{self.name}: {note}" for note in notes]

    def _read(self):
        """Yield for each row the texts of self.names, "" for none, and whether they are enough:
        two, or one if there is a single column."""
        self.counts = {EMPTY: 0, SKIPPED: 0}
        size = self.num_text_columns
        found = False
        for path, read in zip(self.paths, self.readers):
            for number, row in read():
                self.known.update(dict.fromkeys(row))
                texts = [row.get(name) for name in self.names]
                for index, text in enumerate(texts):
                    # Only texts that begin in an unusual way are examined, which saves time.
                    if not (isinstance(text, str) and len(text) > 3 and text[0].isalnum()):
                        texts[index] = self._clean(text, path, number)
                is_enough = sum(map(bool, texts[:size])) >= min(2, size)
                found = found or is_enough
                self.counts[SKIPPED] += not is_enough
                yield texts, is_enough
        if not found:
            raise BadInput(f"{shown(self.paths[0])}: no row has enough text in "
                           f"{shown(', '.join(self.columns))}")

    def _clean(self, text, path, number):
        """Return the text of a cell, "" if nothing in it is visible. Raises BadInput."""
        if isinstance(text, (list, dict, bool)):
            raise at_line(path, number, f"{shown(text)} is not a text: choose other columns with "
                          "--langs")
        text = "" if text is None else str(text)
        visible = "".join(filter(str.isprintable, text)).strip().lower()
        if visible not in ("", r"\n", "nan"):
            return text
        self.counts[EMPTY] += bool(text.strip())
        return ""

    def find_kinds(self):
        """Return (N,) uint8, what each row is for: TRAIN, EVAL or EXCLUDED. Raises BadInput."""
        if self.kinds is None:
            reading = tqdm(self._read(), f"read {self.name}", unit=" rows", disable=None)
            rows = ((*map(text_hash, texts), is_enough) for texts, is_enough in reading)
            table = np.fromiter(rows, np.dtype((np.uint64, len(self.names) + 1)))
            compared = [name != "system" for name in self.names]
            self.kinds = hold_out(table[:, :-1][:, compared])[table[:, -1] > 0]
        if np.count_nonzero(self.kinds == EVAL) < 2:  # retrieval needs two
            raise BadInput(f"{self.name} has too few rows to hold some out: 20 different rows are "
                           "needed, or give --eval-data (evaluate.py: --split all)")
        return self.kinds

    def rows(self, split):
        """Return an iterator of tuples of texts: of "all" rows, of those to "train" on, or of those
        held out, for which "valid" and "test" are two names."""
        size = len(self.columns)
        rows = (tuple(texts[:size]) for texts, is_enough in self._read() if is_enough)
        if split == "all":
            return rows
        kind = TRAIN if split == "train" else EVAL
        return itertools.compress(rows, self.find_kinds() == kind)


# ---- which rows are held out


def normalized(text):
    """Return a text as it is compared: in one Unicode form and case, with single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def text_hash(text):
    """Return the 64-bit hash of a normalized text; 0 for no text."""
    digest = blake2b(normalized(text).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") if text else 0


def hold_out(texts):
    """Return (N,) uint8, TRAIN, EVAL or EXCLUDED, given the hashes (N, C) of all texts, 0 for none.

    The rows with the smallest hashes are held out: a tenth of them up to 200 rows, 1 % of more than
    20,000, at most 1,000. Their copies, and rows that share a text with them, are excluded from
    training:

        A cat.       Eine Katze.    EVAL
        a  CAT.      Ein Kater.     EXCLUDED   its first text is compared as "a cat."
        Eine Katze.  A cat.         EXCLUDED   a copy with the columns exchanged
        A dog.       Ein Hund.      TRAIN

    Texts of many rows, such as "Yes.", are not compared: of more than a tenth of a small file's
    rows, 20 rows of a larger file, or 0.2 % of a very large one's."""
    rows = texts.sum(1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    whole = np.flatnonzero(np.count_nonzero(texts, axis=1) >= min(2, texts.shape[1]))
    _, first = np.unique(rows[whole], return_index=True)  # one of all copies, the smallest first
    kinds = np.full(len(rows), TRAIN, np.uint8)
    held = whole[first[:min(1000, max(len(first) // 100, min(200, len(first) // 10)))]]
    values, counts = np.unique(texts, return_counts=True)
    many = max(len(rows) // 500, min(20, len(rows) // 10), 3)
    common = values[(counts > many) | (values == 0)]
    kinds[np.isin(rows, rows[held])] = EXCLUDED
    for column in texts.T:
        kinds[np.isin(column, np.setdiff1d(texts[held], common))] = EXCLUDED
    kinds[held] = EVAL
    return kinds
