"""The cache of text files: all token ids on disk, so that a corpus can be larger than memory.

    cache/NAME-KEY/kinds.bin              (N,) uint8: what each row is for (corpora.files)
                   TOKENIZER/tokens.bin   (T,) uint32: the ids of all texts, one after another
                             offsets.bin  (N * C + 1,) int64: where each text begins
                             about.json   written last: if it exists, the others are complete

KEY is a hash of the files' paths, sizes and times and of the columns; TOKENIZER is its hash. Two
processes can build the same folder: they write equal files, and each replaces a file as a whole.
"""

import hashlib
import itertools
import json
import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common import atomic_file, digest, make_folder

LAYOUT = 9  # version of the files and of how rows are read and held out
CHUNK = 4096  # rows that are encoded at once


def cache_folder(source):
    """Return the cache folder of TextFiles; it may not exist yet."""
    files = [(os.path.realpath(path), path.stat().st_size, path.stat().st_mtime_ns)
             for path in source.paths]
    key = digest([LAYOUT, files, source.columns, source.names])[:10]
    name = re.sub(r"[^\w.+-]", "_", source.name)[:40]
    return Path("cache", f"{name}-{key}")


def encoded(source, tokenizer, holdout=True):
    """Return the token ids of TextFiles, built at the first call and memory-mapped.

    Returns tokens (T,), offsets (N * C + 1,), the rows' kinds (N,), and a hash of all three. The
    kinds are empty without `holdout`."""
    folder = cache_folder(source) / tokenizer.hash[:10]
    make_folder(folder, "the cache")
    kinds = source.find_kinds() if holdout else np.zeros(0, np.uint8)
    if holdout and not (folder.parent / "kinds.bin").exists():
        with atomic_file(folder.parent / "kinds.bin") as file:
            file.write(kinds)
    if not (folder / "about.json").exists():
        _write(source, tokenizer, folder)
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    source.counts, source.known = Counter(about["counts"]), dict.fromkeys(about["known"])
    # A memory map reads from disk what is asked for, and no more.
    tokens = np.memmap(folder / "tokens.bin", np.uint32, "r").view(np.ndarray)
    offsets = np.memmap(folder / "offsets.bin", np.int64, "r").view(np.ndarray)
    return tokens, offsets, kinds, digest([about["hash"], hashlib.sha256(kinds).hexdigest()])


def _write(source, tokenizer, folder):
    """Encode all rows into the files of a folder."""
    rows = iter(tqdm(source.rows("all"), f"encode {source.name}", unit=" rows", disable=None,
                     total=len(source.kinds) if source.kinds is not None else None))
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
    with atomic_file(folder / "offsets.bin") as file:
        file.write(offsets)
    with atomic_file(folder / "about.json") as file:
        about = {"hash": content.hexdigest(), "counts": source.counts, "known": list(source.known)}
        file.write(json.dumps(about).encode())
