"""The cache of text files: all token ids on disk, so that a corpus can be larger than memory.

    cache/NAME-KEY/tokens.bin  (T,) uint32: the ids of all texts, one after another
                   index.npz   written last: where texts begin, what rows are for, counts, a hash

KEY is a hash of the tokenizer, of the files' paths, sizes and times, and of the columns. Two
processes can build the same folder: they write equal files, and each replaces a file as a whole.
"""

import hashlib
import itertools
import os
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common import atomic_file, digest, make_folder

LAYOUT = 10  # version of the files and of how rows are read and held out
CHUNK = 4096  # rows that are encoded at once


def encoded(source, tokenizer, holdout=True):
    """Return the token ids of TextFiles: tokens (T,), offsets (N * C + 1,), the rows' kinds (N,)
    and a hash of all three. The kinds are empty without `holdout`."""
    files = [(os.path.realpath(path), path.stat().st_size, path.stat().st_mtime_ns)
             for path in source.paths]
    key = digest([LAYOUT, files, source.columns, source.names, tokenizer.hash, holdout])[:10]
    folder = Path("cache", f"{source.name[:40]}-{key}")
    try:
        return _read(source, folder)
    except Exception:  # of whatever type: the cache is missing or damaged
        _write(source, tokenizer, holdout, folder)
        return _read(source, folder)


def _read(source, folder):
    index = np.load(folder / "index.npz")
    # A memory map reads from disk what is asked for, and no more.
    tokens = np.memmap(folder / "tokens.bin", np.uint32, "r").view(np.ndarray)
    offsets, kinds = index["offsets"], index["kinds"]
    if offsets[-1] != len(tokens):
        raise ValueError("tokens.bin is cut short")
    source.counts = dict(zip(source.counts, index["counts"].tolist()))
    source.kinds = kinds if len(kinds) else None
    return tokens, offsets, kinds, str(index["hash"])


def _write(source, tokenizer, holdout, folder):
    """Encode all rows into the files of a folder."""
    make_folder(folder, "the cache")
    kinds = source.find_kinds() if holdout else np.zeros(0, np.uint8)
    rows = iter(tqdm(source.rows("all"), f"encode {source.name}", unit=" rows", disable=None))
    lengths = [np.zeros(1, np.int64)]
    content = hashlib.sha256()
    with atomic_file(folder / "tokens.bin") as file:
        while chunk := list(itertools.islice(rows, CHUNK)):
            ids = tokenizer.encode(itertools.chain.from_iterable(chunk))
            lengths.append(np.array([len(cell) for cell in ids]))
            file.write(np.concatenate(ids))
            content.update(np.concatenate(ids))
    offsets = np.cumsum(np.concatenate(lengths))
    content.update(offsets)
    identity = digest([content.hexdigest(), hashlib.sha256(kinds).hexdigest()])
    with atomic_file(folder / "index.npz") as file:
        np.savez(file, offsets=offsets, kinds=kinds, hash=identity,
                 counts=list(source.counts.values()))
