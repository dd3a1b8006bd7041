"""The cache of files: in CACHE/NAME-CONTENT a tokenizer, and below it all ids of the files on disk.

    tokenizer-VOCAB/tokenizer.json
    TOKENIZER/tokens.bin   (T,) uint32, all ids one behind the other
              offsets.bin  (rows * columns + 1,) int64: cell i is tokens[offsets[i]:offsets[i + 1]]
              held.bin     int64, the rows held out
              said.txt     what of the files was left out

Each folder has a checksum of what is in it. That is compared whenever the folder is opened, which
takes about a second for each GB, and what is damaged is made anew: it can be made again from files.
"""

import hashlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
from tqdm import tqdm

from corpora.folder import alone, remove_leftovers, write_atomic
from corpora.program import BadInput, printable

LAYOUT = 5  # version of all this
CHUNK = 1024  # rows that are encoded at once
CHECKSUM = "checksum"  # the file with that of its folder
LARGE = 10_000_000  # bytes; the digest of a larger file is remembered


def digest(value):
    """sha256 of what JSON can hold."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _pieces(path):
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            yield piece


# --------------------------------------------------------------------------------------------------
# What is in a file

def fingerprint(path, cache):
    """Size and digest of all that is in a file. A digest takes about 3 seconds for each GB; of a
    large file it is kept in the cache, under all that the system says of the file."""
    found = os.stat(path)
    key = digest([str(path.resolve()), found.st_size, found.st_mtime_ns, found.st_ctime_ns])
    memo = cache / "digests" / key[:32]
    if memo.exists():
        known, _, check = memo.read_bytes().partition(b" ")
        if check == b"%d" % zlib.crc32(known):
            return found.st_size, known.decode()
    hasher = hashlib.blake2b(digest_size=32)
    for piece in _pieces(path):
        hasher.update(piece)
    made = hasher.hexdigest()
    if found.st_size > LARGE:
        write_atomic(memo, b"%s %d" % (made.encode(), zlib.crc32(made.encode())))
    return found.st_size, made


# --------------------------------------------------------------------------------------------------
# Folders that are whole, or made anew

def _checksum(folder, owner):
    """Of the names and contents of a folder's files, and of what they belong to."""
    sums = []
    # Nobody can read a folder, and a pipe never ends
    for path in sorted(filter(Path.is_file, folder.glob("[!.]*.*"))):
        check = 0
        for piece in _pieces(path):
            check = zlib.crc32(piece, check)
        sums.append([path.name, path.stat().st_size, check])
    return digest([owner, sums]).encode()


def _is_whole(folder, owner):
    path = folder / CHECKSUM
    try:
        return path.is_file() and path.read_bytes() == _checksum(folder, owner)
    except OSError:
        return False


def whole(folder, owner, make):
    """A folder with the files that make(folder) writes -> the same. `owner`, of JSON: what they
    were made from. Made first where it is not there or not as it was written."""
    if _is_whole(folder, owner):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone(folder.parent):
        # Another process may have made it meanwhile
        if not _is_whole(folder, owner):
            _make(folder, owner, make)
    return folder


def _make(folder, owner, make):
    if folder.exists():
        print(printable(f"{folder} is damaged: it is made anew"), file=sys.stderr)
    remove_leftovers(folder.parent)
    part = Path(tempfile.mkdtemp(".part", ".", folder.parent))
    try:
        make(part)
        write_atomic(part / CHECKSUM, _checksum(part, owner))
        # The folder gets its name when all of it is on the disk
        for path in part.glob("[!.]*.*"):
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        if folder.exists():
            shutil.rmtree(folder)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


# --------------------------------------------------------------------------------------------------
# The cache of some files

class Store:
    """The cache of TextFiles; `identity` says what they hold. BadInput if one is given twice."""

    def __init__(self, source, cache):
        self.source = source
        self.cache = Path(cache)
        self.identity = self._identity()
        content = digest([LAYOUT, self.identity, source.columns])
        self.folder = self.cache / f"{source.name}-{content[:10]}"

    def _identity(self):
        source = self.source
        files = [fingerprint(path, self.cache) for path in source.paths]
        for number, file in enumerate(files):
            first = files.index(file)
            # Of a row that is there twice one may be held out, and the other trained on
            if first != number and not source.is_parallel:
                raise BadInput(f"{source.paths[number]} holds the same as {source.paths[first]}: "
                               "give it once, or the rows held out would be trained on")
        return [files, source.layouts, source.skip_bad]

    def tokenizer(self, vocab, save):
        """The path of the tokenizer of `vocab` pieces, which save(path) makes."""
        folder = self.folder / f"tokenizer-{vocab}"
        name = "tokenizer.json"
        return whole(folder, self.identity, lambda part: save(part / name)) / name

    def arrays(self, tokenizer, say=True):
        """-> tokens, offsets, rows held out. `say` how the files were read."""
        owner = [self.identity, tokenizer.hash]
        folder = whole(self.folder / tokenizer.hash[:10], owner,
                       lambda part: self._write(tokenizer, part))
        if say:
            said = (folder / "said.txt").read_text(encoding="utf-8")
            for note in filter(None, [*self.source.notes, said]):
                print(printable(note), file=sys.stderr)
        # A memory map reads from disk what is asked for, and no more
        tokens = np.memmap(folder / "tokens.bin", np.uint32, "r").view(np.ndarray)
        offsets = np.memmap(folder / "offsets.bin", np.int64, "r").view(np.ndarray)
        return tokens, offsets, np.fromfile(folder / "held.bin", np.int64)

    def _write(self, tokenizer, folder):
        source = self.source
        count = self._write_arrays(tokenizer, folder)
        left_out = source.left_out()
        if not count:
            reason = left_out or "nothing below its header"
            raise BadInput(f"{source.paths[0]} has no row that can be used ({reason}): check the "
                           "file and --langs")
        if self._identity() != self.identity:
            raise BadInput(f"{source.name} was changed while it was read: start again")
        said = f"{source.name}: kept {count:,} rows, {left_out}" if left_out else ""
        (folder / "said.txt").write_text(printable(said), encoding="utf-8")

    def _write_arrays(self, tokenizer, folder):
        """The three arrays -> the number of rows."""
        source = self.source
        records_held = source.held()
        held = []  # the rows of these records
        lengths = [np.zeros(1, np.int64)]
        count = 0
        records = source.records()
        bar = tqdm(desc=f"prepare {source.name}", unit=" rows", disable=None)
        with open(folder / "tokens.bin", "wb") as tokens, bar:
            while chunk := list(itertools.islice(records, CHUNK)):
                ids = tokenizer.encode(itertools.chain(*(texts for _, texts in chunk)))
                # Not tofile: on a full disk it loses the end without an error
                tokens.write(np.concatenate(ids))
                lengths.append(np.array([len(cell) for cell in ids]))  # (rows * columns,)
                held += [row for row, (record, _) in enumerate(chunk, count)
                         if record in records_held]
                count += len(chunk)
                bar.update(len(chunk))
        (folder / "offsets.bin").write_bytes(np.cumsum(np.concatenate(lengths)))
        (folder / "held.bin").write_bytes(np.array(held, np.int64))
        return count
