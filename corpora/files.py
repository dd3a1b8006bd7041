"""Text files as rows of texts: TSV, CSV, JSON Lines, plain text and Moses (one file per language).

To add a format, write a generator such as read_jsonl and give its file ending to READERS. If
read_lines refuses its files, remove them from FOREIGN. When you change a reader, delete the folder
cache/, which keeps the tokens of old rows.
"""

import bz2
import contextlib
import csv
import gzip
import io
import itertools
import json
import lzma
import os
import re
import zlib
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from base.common import BadInput, file_state, shown, warn
from corpora.columns import (
    HARD,
    NESTED,
    SCORES,
    choose,
    known_names,
    languages,
    names_a_text,
    parallel_names,
)
from corpora.overlap import EVAL, TRAIN, hold_out, text_hash
from corpora.store import encoded

csv.field_size_limit(10 ** 8)  # characters of a cell, such as a book

# ---- lines

DECOMPRESSORS = {b"BZh": bz2.BZ2Decompressor, b"\xfd7zXZ\0": lzma.LZMADecompressor}
PACKED = re.compile(r"\.(gz|bz2|xz)$", re.IGNORECASE)
UNPACK = "unpack it, or write it as TSV or JSON Lines"
FOREIGN = {  # how a file begins that has no rows of text: what it is, and what to do
    rb"version https://git-lfs": "a git-lfs pointer: run git lfs pull",
    rb".{,3}\0.?\0|\xff\xfe|\xfe\xff":
        "a binary file or UTF-16: save UTF-8 (iconv -f utf-16) or CSV",
    # TMX, XLIFF, HTML, the files of IWSLT and of WMT: the first line begins and ends with a tag.
    rb"(?i)(\xef\xbb\xbf)?\s*<([?!]|html|[a-z][^\n]*>\s*(\n|$))":
        "markup: extract its text, line by line",
    rb"PK[\1-\10]": f"a zip archive or a spreadsheet: {UNPACK}",
    rb"7z\xbc|\(\xb5/\xfd|Rar!\x1a|(?s:.{257})ustar": f"an archive: {UNPACK}",
    rb"(?s)PAR1.*\0|ARROW1\0|\xff{4}": f"a Parquet or Arrow table: {UNPACK}",
    rb"(?s)%PDF|.*\0": f"a binary file: {UNPACK}"}


def at_line(path, number, text):
    """Return a BadInput that names a line of a file."""
    return BadInput(f"{shown(path)}:{number}: {text}")


class Unpacked(io.RawIOBase):
    """The content of an open bzip2 or xz file, which can have several parts, joined by cat. The
    readers of bz2 and lzma end silently at a damaged second part, and at zeros between two."""

    def __init__(self, file, decompressor):
        self.file = file
        self.decompressor = decompressor
        self.part = None  # None: between two parts
        self.packed = b""  # what follows the end of a part
        self.content = b""

    def readable(self):
        return True

    def readinto(self, buffer):
        while not self.content:
            packed, self.packed = self.packed or self.file.read(1 << 16), b""
            if not packed:
                if self.part:
                    raise EOFError("it ends too early")
                return 0
            if not self.part:
                packed = packed.lstrip(b"\0")
                self.part = self.decompressor() if packed else None
            if packed:
                self.content = self.part.decompress(packed)
                if self.part.eof:
                    self.packed, self.part = self.part.unused_data, None
        size = min(len(buffer), len(self.content))
        buffer[:size], self.content = self.content[:size], self.content[size:]
        return size


def open_packed(path):
    """Open a file, unpacked if its content is gzip, bzip2 or xz."""
    file = open(path, "rb")
    start = file.peek(6)
    if start.startswith(b"\x1f\x8b"):
        return gzip.open(file)
    for magic, decompressor in DECOMPRESSORS.items():
        if start.startswith(magic):
            return io.BufferedReader(Unpacked(file, decompressor))
    return file


def read_lines(path):
    """Yield (line number, line) of a text file, packed or not. Raises BadInput."""
    if not os.path.isfile(path):
        raise BadInput(f"{shown(path)} is not a file: it does not exist, or is a folder or a pipe")
    number = 0
    try:
        with open_packed(path) as file:
            for pattern, advice in FOREIGN.items():
                if re.match(pattern, file.peek(8192)):
                    raise at_line(path, 1, f"this is {advice}")
            for number, line in enumerate(file, 1):
                if b"\0" in line:
                    raise at_line(path, number, f"a NUL, as in a binary file: {UNPACK}")
                # `cat` can leave byte order marks, \ufeff, at the start of any line.
                yield number, line.decode().removeprefix("\ufeff").rstrip("\r\n")
    except UnicodeDecodeError:
        raise at_line(path, number, "this is not UTF-8: convert it (iconv -f ENCODING, "
                      "such as latin1 or gbk)") from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise at_line(path, number + 1, f"the file cannot be read further ({error}): it is "
                      "damaged, cut short or followed by other bytes") from None


# ---- formats: generators of (line number, {column: text})
#
# Their argument `langs`, the columns of --langs or of the run, helps a table to find its header.
# `counts` is a Counter of what the user should know; a reader adds to it.

UNQUOTED = 'cells of a TSV file are read without the quotes of CSV, as in "He said ""yes"""'
CSV_QUOTES = re.compile(r'"([^"]|"")*""([^"]|"")*"|""')


def no_columns(path, number, names, langs=(), delimiter="<TAB>"):
    """Return the error for a file without the columns of --langs or known ones."""
    return at_line(path, number, f"no {shown(', '.join(langs) or 'known names')} among the columns "
                   f"{shown(', '.join(names))}: choose with --langs, or if this is no header, add "
                   f"one, such as src{delimiter}tgt")


def read_text(path, langs=(), counts=None):
    """Yield a row for each line that is not blank. A first line with tabs is a table's header."""
    if has_tab(path):
        yield from read_table(path, langs, counts)
        return
    for number, line in read_lines(path):
        if line.strip():
            yield number, {"text": line}


def has_tab(path):
    """Return whether the first line of a file has a tab between words, as that of a table has."""
    return "\t" in next(read_lines(path), (1, ""))[1].strip()


def read_header(path, number, header, langs):
    """Return the delimiter of a table, its columns, and whether the rules of CSV hold. They do not
    between tabs, unless a name in the header is in quotes. Raises BadInput."""
    headers = {}
    is_quoted = any(re.fullmatch(r'\s*".*"\s*', name) for name in header.split("\t"))
    for delimiter in ",\t;|" if ".csv" in path.name.lower() else "\t,;|":
        is_csv = delimiter != "\t" or is_quoted
        with contextlib.suppress(csv.Error):
            [cells] = csv_reader([header], delimiter, is_csv, skipinitialspace=True)
            headers[delimiter, is_csv] = [name.strip() for name in cells]

    def columns(names):
        return langs if langs and {*langs} <= {*names} else known_names(names)

    if not headers:
        raise at_line(path, number, "a carriage return inside a line: convert the line ends "
                      "(tr '\\r' '\\n')")
    # The delimiter is the one that splits this line into known names.
    best = next((one for one in headers if columns(headers[one])),
                max(headers, key=lambda one: header.count(one[0])))
    names = headers[best]
    if not langs and not columns(names):
        raise no_columns(path, number, names, delimiter=best[0].replace("\t", "<TAB>"))
    for name in columns(names):
        if names.count(name) > 1:
            raise at_line(path, number, f"two columns are named {shown(name)}: rename one")
    return *best, names


def csv_reader(lines, delimiter, is_csv, **options):
    quoting = csv.QUOTE_MINIMAL if is_csv else csv.QUOTE_NONE
    return csv.reader(lines, strict=True, delimiter=delimiter, quoting=quoting, **options)


def read_table(path, langs=(), counts=None):
    """Yield the rows of a table whose first line names the columns; {} for a repeated header. By
    the rules of CSV a cell in quotes can have several lines."""
    lines = read_lines(path)
    start, header = next((pair for pair in lines if pair[1].strip()), (1, ""))
    if not header:
        return  # an empty file
    delimiter, is_csv, names = read_header(path, start, header, langs)
    reader = csv_reader((line.replace("\r", " ") + "\n" for _, line in lines), delimiter, is_csv)
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
                if not is_csv:
                    cells = [cell if cell[:1] != '"' else unquoted(cell, counts) for cell in cells]
                yield number, dict(zip(names, cells))
            number = start + 1 + reader.line_num
    except csv.Error as error:
        raise at_line(path, number, f"not CSV ({shown(error)}): quotes enclose whole cells, and "
                      "those inside are doubled") from None


def unquoted(cell, counts):
    """Return a cell of a TSV file without the quotes of CSV. Programs that write CSV quote a cell
    with marks inside, and double these; a quotation has single ones."""
    if not CSV_QUOTES.fullmatch(cell):
        return cell
    if counts is not None:
        counts[UNQUOTED] += 1
    return cell[1:-1].replace('""', '"')


def read_jsonl(path, langs=(), counts=None):
    """Yield the rows of JSON Lines: {"en": ..., "de": ...}, the same in another object such as
    {"translation": {...}}, or a chat, {"messages": [{"role": ..., "content": ...}, ...]}."""
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            row = {**json.loads(line)}
            if "\\ud" in line.lower():  # half of a surrogate pair is no text and cannot be encoded
                json.dumps(row, ensure_ascii=False).encode()
            objects = [key for key, value in row.items() if isinstance(value, dict)]
            nested = ["translation"] if "translation" in objects else [
                key for key in objects if languages(row[key]) and not languages(row)]
            if len(nested) == 1:
                inner = row.pop(nested[0])
                if twice := [key for key in inner if row.get(key, inner[key]) != inner[key]]:
                    raise ValueError(f"{twice[0]} occurs twice, also inside {nested[0]}")
                row |= inner
            if isinstance(row.get("messages"), list):
                turns = []
                for turn in row.pop("messages"):
                    more = [key for key in turn if key not in ("role", "content")
                            and turn[key] not in (None, "", [], {})]
                    content = turn.get("content") if more else turn["content"]
                    turns.append((turn["role"], content))
                    for key in more if counts is not None else ():
                        counts[f"turns have {shown(key)}, which is not read"
                               f"{', and no content' * (not content)}"] += 1
                roles = [role for role, _ in turns]
                if roles not in (["user", "assistant"], ["system", "user", "assistant"]):
                    raise ValueError("a chat has perhaps a turn of the system, then one of the "
                                     "user, then one of the assistant")
                if row.keys() & roles:
                    raise ValueError("beside messages, no column is user, assistant or system")
                row |= dict(turns)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise at_line(path, number, f"not JSON Lines ({shown(error)}): write one object of "
                          "texts, or one chat, on each line") from None
        yield number, row


def read_moses(paths, names, counts=None):
    """Yield rows from several files: line N of each is row N in another language."""
    for lines in itertools.zip_longest(*map(read_lines, paths)):
        if None in lines:
            raise at_line(paths[lines.index(None)], max(filter(None, lines))[0], "the file ends "
                          "before this line, but line N of all files must be one row: if they are "
                           "not parallel, give one file that has all texts")
        yield lines[0][0], {name: line for name, (_, line) in zip(names, lines)}


READERS = {".tsv": read_table, ".tab": read_table, ".csv": read_table, ".jsonl": read_jsonl,
           ".json": read_jsonl, ".ndjson": read_jsonl, ".txt": read_text}


# ---- rows

EMPTY = r"cells are invisible, a tag such as <url>, \N, nan, NA or NULL, and count as empty"
# What stands for no text, also __NULL__ of the TED talks, <SPEAKER ID=1> of Europarl and the lines
# about a talk of IWSLT.
EMPTY_CELL = re.compile(r"""(\\[Nn]|nan|NaN|\#?N/?A|[_ ]*NULL[_ ]*
    |</?[A-Za-z][\w:-]*(\s+[\w:-]+\s*=\s*("[^"]*"|'[^']*'|[^\s"'<>]+))*\s*/?>
    |<(url|keywords|speaker|talkid|title|description|translator|reviewer)>.*</\4>)?""", re.VERBOSE)
SKIPPED = "rows are skipped: too little text, or a repeated header"
OFTEN = 'held-out rows share a frequent text, such as "Yes.", with rows that are trained on'


class TextFiles:
    """Rows of text from one or more files. Raises BadInput.

    The first `num_text_columns` columns can be views; a chat's system text comes after them. The
    arguments are those of `open_text`."""

    embedded = False

    def __init__(self, paths, langs=(), like=(), views=1):
        # A file that is named twice is read once, in its first place.
        self.paths = paths = [*{os.path.realpath(path): path for path in paths}.values()]
        plain = [Path(PACKED.sub("", path.name)) for path in paths]
        self.name = shown("+".join(dict.fromkeys(path.stem for path in plain)))[:80]
        readers = [READERS.get(path.suffix.lower(), read_text) for path in plain]
        codes = parallel_names(plain) if {*readers} == {read_text} else ()
        if all(path.suffix.lower() == ".txt" and has_tab(file) for path, file in zip(plain, paths)):
            codes = ()  # tables, such as en-de.txt and en-fr.txt
        self.readers = [partial(read_moses, paths, codes)] if codes else [
            partial(read, path, langs or like) for path, read in zip(paths, readers)]
        rows = self._sample()
        if not rows:
            raise BadInput(f"{shown(paths[0])} has no rows")
        self.state = [*map(file_state, self.paths)]
        self.known = dict.fromkeys(itertools.chain.from_iterable(rows))  # the names of all columns
        self.schema = read_schema(paths[0], [*self.known], rows, langs, like, codes,
                                  views)
        self.columns = self.schema.columns
        self.num_text_columns = len(self.columns) - ("system" in self.columns[1:])
        self.odd = [note for name in self.columns[:self.num_text_columns]
                    for note in odd_texts(rows, name, {*readers} == {read_text})]
        endings = {path.suffix for path in plain if path.suffix and not codes
                   and path.suffix.lower() not in READERS and not names_a_text(path.suffix[1:])}
        self.odd += [f"{shown(ending)} is no ending that is known here, so each line of the file "
                     "is one text" for ending in sorted(endings)]
        # All of these are read, so that the same rows are held out whatever --langs chooses.
        self.names = tuple(dict.fromkeys((*self.columns, *self.schema.texts)))
        self.compared = [name for name in self.schema.texts if name != "system"]
        self.hashes = self.kinds = None  # of each row, once they are known
        self.held = None  # the held-out rows, if the cache has them
        self.often = 0
        self.counts = Counter()  # {what: how many} of the last reading

    def _sample(self):
        """Return the first 10,000 rows of each file, because JSON can name a column late: {column:
        the start of the text}, without empty cells."""
        def start(cell):
            return NESTED if isinstance(cell, (list, dict)) else as_text(cell)[:1000]

        return [{name: start(cell) for name, cell in row.items()} for read in self.readers
                for _, row in itertools.islice(read(counts=Counter()), 10_000)]

    @property
    def notes(self):
        """Lines for the user: what is not read, skipped and held out."""
        notes = []
        unread = {}  # {why: columns}
        for name in self.known:
            if name not in self.columns:
                why = self.schema.unread.get(name, "not in the first 10,000 rows")
                unread.setdefault(why, []).append(name or '""')
        if unread:
            columns = "; ".join(f"{shown(', '.join(names))} ({why})"
                                for why, names in unread.items())
            advice = ": choose with --langs" if unread.keys() - {HARD, SCORES} else ""
            notes.append(f"columns not read: {columns}{advice}")
        if len(self.columns) == 1 and len(self.readers) > 1:
            notes.append(f"{len(self.readers)} files are read one after the other, as one column; "
                         "parallel files are named corpus.de,corpus.en (of several corpora, make "
                         "one: cat a.de b.de > ab.de; cat a.en b.en > ab.en)")
        notes += self.odd
        notes += [f"{count:,} {what}" for what, count in self.counts.items() if count]
        if self.kinds is not None:
            _, held, excluded = np.bincount(self.kinds, minlength=3)
            sharing = (f"; {excluded:,} other rows share a text with them in any column, and are "
                       "left out of training") if excluded else ", and no other shares a text"
            notes.append(f"{held:,} rows are held out for evaluation{sharing}")
        return [f"{self.name}: {note}" for note in notes]

    def _read(self):
        """Yield for each row the texts of self.names, "" for none, and whether they are enough:
        two, or one if there is a single column."""
        self.counts = counts = Counter({EMPTY: 0, SKIPPED: 0, OFTEN: self.often})
        size, chosen = self.num_text_columns, len(self.columns)
        found = False
        for path, read in zip(self.paths, self.readers):
            for number, row in read(counts=counts):
                self.known.update(dict.fromkeys(row))
                texts = [row.get(name) for name in self.names]
                for index, cell in enumerate(texts):
                    texts[index] = as_text(cell)
                    if index < chosen:  # the others do not matter to the user
                        if isinstance(cell, (list, dict, bool)):
                            raise at_line(path, number, f"{shown(cell)} is not a text: choose "
                                          "other columns with --langs")
                        counts[EMPTY] += not (texts[index] or cell is None or not str(cell).strip())
                is_enough = sum(map(bool, texts[:size])) >= min(2, size)
                found = found or is_enough
                counts[SKIPPED] += not is_enough
                yield texts, is_enough
        if [*map(file_state, self.paths)] != self.state:
            raise BadInput(f"{self.name} changed while it was read: start again when it is "
                           "complete")
        if not found:
            raise BadInput(f"{shown(self.paths[0])}: no row has enough text in "
                           f"{shown(', '.join(self.columns))}")

    def _hash(self, holdout):
        """Read the hashes (N, C) of all rows with enough text, and with `holdout` their kinds."""
        columns = [self.names.index(name) for name in self.compared]
        reading = tqdm(self._read(), f"read {self.name}", unit=" rows", disable=None)
        rows = ((*(text_hash(texts[column]) for column in columns), is_enough)
                for texts, is_enough in reading)
        table = np.fromiter(rows, np.dtype((np.uint64, len(columns) + 1)))
        hashes, is_enough = table[:, :-1], table[:, -1] > 0
        self.hashes = hashes[is_enough]
        if holdout:
            kinds, self.often = hold_out(hashes, self.schema.least)
            self.kinds = kinds[is_enough]

    def find_kinds(self):
        """Return (N,) uint8, what each row is for: TRAIN, EVAL or EXCLUDED. Raises BadInput."""
        if self.kinds is None:
            self._hash(holdout=True)
        if np.count_nonzero(self.kinds == EVAL) < 2:  # retrieval needs two
            raise BadInput(f"{self.name} has too few rows to hold some out: 20 different rows are "
                           "needed, or give --eval-data (evaluate.py: --split all)")
        return self.kinds

    def find_hashes(self, split="all", columns=None):
        """Return (n, C) uint64, the hashes of all texts of the rows of a split, 0 for none, or of
        those in some columns."""
        if self.hashes is None:
            self._hash(holdout=False)
        chosen = [index for index, name in enumerate(self.compared)
                  if columns is None or name in columns]
        return self.hashes[self._is_in(split)][:, chosen]

    def _is_in(self, split):
        if split == "all":
            return slice(None)
        return self.find_kinds() == (TRAIN if split == "train" else EVAL)

    def ids(self, tokenizer, split, holdout):
        """Return the ids of all texts (T,), where each text begins (cells + 1,), a hash, and what
        each row is for, (N,) or None without `holdout`."""
        stored = encoded(self, tokenizer, holdout)
        self.hashes, self.kinds, self.counts = stored.hashes, stored.kinds, stored.counts
        self.held = stored.held
        identity = stored.hash + split if holdout else stored.hash
        return stored.tokens, stored.offsets, identity, stored.kinds

    def rows(self, split):
        """Return an iterator of tuples of texts: of "all" rows, of those to "train" on, or of those
        held out, for which "valid" and "test" are two names."""
        if self.held and split in ("valid", "test"):
            return iter(self.held)
        size = len(self.columns)
        rows = (tuple(texts[:size]) for texts, is_enough in self._read() if is_enough)
        return rows if split == "all" else itertools.compress(rows, self._is_in(split))

    def to_evaluate(self, split, limit, size):
        """Return the first rows of a split, until each of the first `size` columns has `limit`
        texts (0: all). Warn of what is not evaluated."""
        counts = [0] * size  # texts of each column
        rows, is_limited = [], False
        for row in self.rows(split):
            filled = [column for column in range(size) if row[column]]
            if not filled:
                continue
            if limit and min(counts[column] for column in filled) >= limit:
                is_limited = True
                if min(counts) >= limit:
                    break
            else:
                rows.append(row)
                for column in filled:
                    counts[column] += 1
        if min(counts) < len(rows):
            texts = ", ".join(f"{count:,} of {name}" for name, count in zip(self.columns, counts))
            warn(f"not every row of {self.name} has all texts ({shown(texts)}): each language is "
                 "compared with the first one on the rows that have both")
        # train.py reads "valid" and prints these notes itself.
        if split != "valid":
            for note in self.notes:
                warn(note)
            if is_limited:
                warn(f"only the first {limit:,} rows of {self.name} are evaluated; --limit 0 (of "
                     "train.py: --eval-limit 0) evaluates all")
        return rows


def read_schema(path, names, rows, langs, like, codes, views):
    """Return the Schema of columns with these names. Raises BadInput if none can be read."""
    # "text" is also our name for lines without a name.
    like = () if like == ("text",) and "text" not in names else like
    if not langs and not {*like} <= {*names}:
        missing = shown(", ".join(name for name in like if name not in names))
        raise at_line(path, 1, f"the run reads {shown(', '.join(like))}, and there is no {missing} "
                      f"among the columns {shown(', '.join(names))}: rename them, or choose with "
                      "--langs")
    schema = choose(names, rows, langs, like, codes, views)
    if not schema.columns:
        why = {} if langs else schema.unread
        named = [f"{name} ({why[name]})" if why.get(name) else name for name in names]
        if not langs and known_names(names):
            raise at_line(path, 1, "fewer than two languages have texts among the columns "
                          f"{shown(', '.join(named))}: choose with --langs")
        raise no_columns(path, 1, named, langs)
    return schema


# What lines can have beside a text, and how to get the text alone.
LAYOUTS = {r"[^\t]*\t.*": "a tab: if an id or a label is beside the text, cut it off (cut -f 2)",
           r".*\S \|\|\| \S.*": "two texts: write a table (sed 's/ ||| /\\t/')",
           r"\S+ .*(\bO|[BIES]-\S+)": "one token each (CoNLL): write one sentence a line"}


def odd_texts(rows, name, are_lines):
    """Yield a note of a text that fills at least 5 cells and 5 % of a column, and one if most
    lines have more than a text."""
    cells = [row[name] for row in rows if row.get(name)]
    [(text, count)] = Counter(cells).most_common(1) or [("", 0)]
    if count >= 5 and count >= 0.05 * len(cells):
        yield (f"{count:,} of the first {len(cells):,} texts of {shown(name)} are "
               f"{shown(text[:50])!r}: if this stands for no text, empty these cells")
    for pattern, about in LAYOUTS.items() if are_lines else ():
        count = sum(re.fullmatch(pattern, cell) is not None for cell in cells)
        if count > len(cells) / 2:
            yield f"{count:,} of the first {len(cells):,} lines of {shown(name)} have {about}"


def as_text(cell):
    """Return a cell of a file as text, "" if nothing in it is visible."""
    # Only a text that begins in an unusual way is examined, which saves time.
    if isinstance(cell, str) and len(cell) > 4 and cell[0].isalnum():
        return cell
    text = "" if cell is None else str(cell)
    visible = "".join(filter(str.isprintable, text)).strip()
    return "" if EMPTY_CELL.fullmatch(visible) else text
