"""The cache of files: in CACHE/NAME-KEY a tokenizer, and below it all ids of the files on disk.

    tokenizer-VOCAB/tokenizer.json
    TOKENIZER/tokens.bin   (T,) uint32, all ids one behind the other
              offsets.bin  (rows * columns + 1,) int64: cell i is tokens[offsets[i]:offsets[i + 1]]
              kinds.bin    (rows,) uint8: trained on, held out or left out, as corpora.split has it
              about.json   what was left out of the files, and the digest of all ids

KEY stands for the paths, sizes and times of the files, and for how they are read. A folder gets its
name when it is complete, so one that is there is whole.
"""

import hashlib
import itertools
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from tqdm import tqdm

from corpora import split
from corpora.folder import alone, remove_leftovers
from corpora.program import BadInput

LAYOUT = 6  # version of all this
CHUNK = 4096  # rows that are encoded at once


def digest(value):
    """sha256 of what JSON can hold."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def whole(folder, make):
    """A folder, whole: if it is not there, make(folder) first writes its files -> the folder."""
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone(folder.parent):
        # Another process may have made it meanwhile.
        if not folder.exists():
            remove_leftovers(folder.parent)
            part = Path(tempfile.mkdtemp(".part", ".", folder.parent))
            try:
                make(part)
                # After a power cut too, the folder has its name only if its files are there.
                for path in part.iterdir():
                    with open(path, "rb+") as file:
                        os.fsync(file.fileno())
                part.rename(folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return folder


class Store:
    """The cache of TextFiles."""

    def __init__(self, source, cache):
        self.source = source
        files = []
        for path in source.paths:
            found = os.stat(path)
            files.append([str(path.resolve()), found.st_size, found.st_mtime_ns])
        how = [source.columns, source.langs, source.names, source.header, source.skip_bad]
        self.folder = Path(cache) / f"{source.name}-{digest([LAYOUT, files, how])[:10]}"

    def arrays(self, tokenizer, say=True, holdout=True):
        """-> tokens, offsets, kinds of the rows, and the digest of all three. With `say` it is said
        how the files were read and, with `holdout`, how they were split."""
        folder = whole(self.folder / tokenizer.hash[:10], lambda part: self._write(tokenizer, part))
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        notes = about["notes"] + about["split_notes"] if holdout else about["notes"]
        for note in notes if say else ():
            print(note, file=sys.stderr)
        # A memory map reads from disk what is asked for, and no more.
        tokens = np.memmap(folder / "tokens.bin", np.uint32, "r").view(np.ndarray)
        offsets = np.memmap(folder / "offsets.bin", np.int64, "r").view(np.ndarray)
        return tokens, offsets, np.fromfile(folder / "kinds.bin", np.uint8), about["digest"]

    def _write(self, tokenizer, folder):
        """The files of a store into a folder."""
        source = self.source
        kinds = source.find_kinds()
        kept = []  # the numbers of the rows that are stored
        lengths = [np.zeros(1, np.int64)]
        records = iter(tqdm(source.records(), f"encode {source.name}", len(kinds), disable=None))
        hasher = hashlib.sha256()
        with open(folder / "tokens.bin", "wb") as tokens:
            while chunk := list(itertools.islice(records, CHUNK)):
                ids = tokenizer.encode(itertools.chain.from_iterable(texts for _, texts in chunk))
                # Not tofile: on a full disk it loses the end without an error.
                tokens.write(np.concatenate(ids))
                hasher.update(np.concatenate(ids))
                lengths.append(np.array([len(cell) for cell in ids]))  # (rows * columns,)
                kept += [record for record, _ in chunk]
        left_out = source.left_out()
        if not kept:
            raise BadInput(f"{source.paths[0]} has no row that can be used ({left_out}): check the "
                           "file and --langs")
        kinds = kinds[kept]
        for name, array in (("offsets", np.cumsum(np.concatenate(lengths))), ("kinds", kinds)):
            (folder / f"{name}.bin").write_bytes(array)
            hasher.update(array)
        notes = [*source.notes]
        if left_out:
            notes.append(f"{source.name}: kept {len(kinds):,} rows, {left_out}")
        split_notes = [*source.split_notes]
        if shared := int((kinds == split.LEFT_OUT).sum()):
            split_notes.append(f"{source.name}: {shared:,} rows share a text with a held-out row "
                               "and are left out of training")
        about = {"notes": notes, "split_notes": split_notes, "digest": hasher.hexdigest()}
        (folder / "about.json").write_text(json.dumps(about), encoding="utf-8")
