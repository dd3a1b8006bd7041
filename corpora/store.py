"""The cache of text files: all token ids on disk, so that a corpus can be larger than memory.

    cache/NAME-KEY/tokens.bin  (T,) uint32: the ids of all texts, one after another
                   hashes.npy  (N, C) uint64: the hashes of the texts of each row
                   index.npz   written last: where texts begin, what rows are for, the texts of the
                               held-out rows, counts, a hash

KEY is a hash of the tokenizer, of the files' paths, sizes and times, and of the columns. Two
processes can build the same folder: they write equal files, and each replaces a file as a whole.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from base.common import atomic_file, digest, make_folder
from base.processes import is_alone, meet
from corpora.overlap import EVAL

LAYOUT = 17  # version of the files and of how rows are read and held out
CHUNK = 4096  # rows that are encoded at once


class Encoded(NamedTuple):
    """The token ids of text files, and what else was found when they were read."""
    tokens: np.ndarray   # (T,) uint32
    offsets: np.ndarray  # (N * columns + 1,) int64
    kinds: np.ndarray | None  # (N,) uint8: what each row is for; None if no rows are held out
    hashes: np.ndarray   # (N, C) uint64: see TextFiles.find_hashes
    held: list           # the texts of the held-out rows
    counts: Counter      # {what the user should know: how often}
    hash: str            # of tokens, offsets and kinds
    check: str           # of the files tokens.bin and hashes.npy


def remove_dead_parts(folder, pattern):
    """Remove the unfinished files and folders that killed processes left in a folder: those that
    nobody has written to for a day."""
    for part in Path(folder).glob(pattern):
        with contextlib.suppress(OSError):  # another process can be faster
            if time.time() - part.stat().st_mtime > 24 * 3600:
                shutil.rmtree(part) if part.is_dir() else part.unlink()


@contextlib.contextmanager
def first_of_machine():
    """Run the block in the first process of each machine, and then in the others. Yield whether
    this is the first one."""
    is_first = is_alone() or os.environ.get("LOCAL_RANK", "0") == "0"
    if not is_first:
        meet()
    yield is_first
    if is_first:  # after an error, `together` meets the others with it
        meet()


def encoded(source, tokenizer, holdout=True):
    """Return TextFiles as Encoded, from the cache if they are there. `holdout`: some rows are held
    out."""
    key = digest([LAYOUT, source.state, source.columns, source.compared, source.names,
                  source.schema.least, tokenizer.hash, holdout])[:10]
    folder = Path("cache", f"{source.name[:40]}-{key}")
    with first_of_machine() as is_first:
        try:
            found = _read(folder)
            if is_first:
                check(str(folder), found.check)
            return found
        except Exception:  # of whatever type: the cache is missing or damaged
            _write(source, tokenizer, holdout, folder)
            return _read(folder)


@functools.cache  # once a process
def check(folder, expected):
    """Raise ValueError if the files of a folder have other content than when they were written."""
    if content_hash(Path(folder)) != expected:
        raise ValueError("the files have changed")


def content_hash(folder):
    """Return the sha256 of the tokens and hashes in a folder."""
    content = hashlib.sha256()
    paths = folder / "tokens.bin", folder / "hashes.npy"
    with tqdm(desc=f"check {folder}", total=sum(path.stat().st_size for path in paths), unit="B",
              unit_scale=True, delay=5, disable=None) as bar:
        for path in paths:
            with open(path, "rb") as file:
                while chunk := file.read(1 << 20):
                    content.update(chunk)
                    bar.update(len(chunk))
    return content.hexdigest()


def _read(folder):
    index = np.load(folder / "index.npz")
    # A memory map reads from disk what is asked for, and no more.
    tokens = np.memmap(folder / "tokens.bin", np.uint32, "r").view(np.ndarray)
    hashes = np.load(folder / "hashes.npy", mmap_mode="r")
    offsets, kinds = index["offsets"], index["kinds"]
    if offsets[-1] != len(tokens) or len(hashes) != index["rows"]:
        raise ValueError("a file is cut short")
    counts = Counter(dict(zip(index["whats"].tolist(), index["counts"].tolist())))
    held = list(map(tuple, json.loads(str(index["held"]))))
    return Encoded(tokens, offsets, kinds if len(kinds) else None, hashes, held, counts,
                   str(index["hash"]), str(index["check"]))


def _write(source, tokenizer, holdout, folder):
    """Encode all rows into the files of a folder."""
    make_folder(folder, "the cache")
    remove_dead_parts(folder.parent, "*/.*.????????.part")
    kinds = source.find_kinds() if holdout else np.zeros(0, np.uint8)
    with atomic_file(folder / "hashes.npy") as file:
        np.save(file, source.find_hashes())
    rows = iter(tqdm(source.rows("all"), f"encode {source.name}", unit=" rows", disable=None))
    lengths = [np.zeros(1, np.int64)]
    content = hashlib.sha256()
    is_held = iter(kinds == EVAL)
    held, words = [], {}
    with atomic_file(folder / "tokens.bin") as file:
        while chunk := list(itertools.islice(rows, CHUNK)):
            held += itertools.compress(chunk, is_held)
            ids = tokenizer.encode(itertools.chain.from_iterable(chunk), known=words)
            lengths.append(np.array([len(cell) for cell in ids]))
            file.write(np.concatenate(ids))
            content.update(np.concatenate(ids))
    offsets = np.cumsum(np.concatenate(lengths))
    content.update(offsets)
    identity = digest([content.hexdigest(), hashlib.sha256(kinds).hexdigest()])
    with atomic_file(folder / "index.npz") as file:
        np.savez(file, offsets=offsets, kinds=kinds, hash=identity, rows=len(source.hashes),
                 held=json.dumps(held), check=content_hash(folder), whats=list(source.counts),
                 counts=list(source.counts.values()))
