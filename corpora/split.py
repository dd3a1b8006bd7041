"""Which rows of a file are held out for evaluation: drawn by what the rows say, not by their place.

    TRAIN, HELD, LEFT_OUT      what each row is for

The held-out rows are those with the smallest hashes, as many as `held_size` says of the different
rows. Every other row that shares a text with a held-out row, in whatever column, is left out of
training, and so are the copies of a held-out row. Three cases need a rule of their own:

- A text such as the answer "Yes." would take all rows with it that have the same answer. A row is
  not held out if it has a text that more than one row in 500 has, and COMMON times as many rows as
  is usual.
- A column in which more than half of the texts are like that holds labels or one system text. It
  is not compared, and its texts stay on both sides.
- Together no more than a fifth of the rows are held or left out. If texts are shared by so many
  rows that this is not enough, fewer rows are held out, but at least one.

Hashes have 64 bits and lie in a temporary file, 8 bytes a text, so that the text is read once.
"""

import itertools
import tempfile
from hashlib import blake2b

import numpy as np

TRAIN, HELD, LEFT_OUT = range(3)
COMMON = 20
CANDIDATES = 4000  # rows that may be held out: some have a common text
CHUNK = 8192  # rows that are in memory at once
ODD = 0x9E3779B97F4A7C15  # a product with it, modulo 2^64, has other bits


def held_size(count):
    """How many of `count` different rows are held out: 1 %, at least 200 of 2,000 or a tenth of
    fewer, at most 1,000."""
    return min(1000, max(count // 100, min(200, count // 10)))


def split(rows, columns):
    """N tuples of texts, one a column -> (N,) uint8, what each row is for, and the numbers of the
    columns that are not compared."""
    with tempfile.TemporaryFile() as file:
        count, candidates, copies = _hash_rows(rows, columns, file)
        if not held_size(count):
            return np.full(file.tell() // (8 * columns + 8), TRAIN, np.uint8), []
        known, index = np.unique(candidates, return_inverse=True)
        index = index.reshape(candidates.shape)
        shared = np.zeros(len(known), np.int64)  # how many rows have each text
        for _, place, is_known in _chunks(file, known, columns):
            shared += np.bincount(place[is_known], minlength=len(known))
        is_text = candidates != 0
        is_common = (shared[index] > max(COMMON * np.median(copies), count // 500)) & is_text
        labels = is_common.sum(0) > is_text.sum(0) / 2  # (columns + 1,)
        is_usable = ~(is_common & ~labels).any(1)
        if not is_usable.any():
            is_usable[:] = True
        candidates = candidates[is_usable]
        candidates[:, labels] = 0
        different = count / copies[is_usable].mean()
        kinds = _choose(file, candidates, columns, held_size(round(different)), count // 5)
        return kinds, np.flatnonzero(labels).tolist()


def _hash_rows(rows, columns, file):
    """The hashes of all rows into a file -> the number of rows with a text; those of the rows with
    the smallest hashes (K, columns + 1), where the last is that of the row; how many rows (K,) are
    the same."""
    count = 0
    kept = np.zeros((0, columns + 1), np.uint64)
    copies = np.zeros(0, np.int64)
    while chunk := list(itertools.islice(rows, CHUNK)):
        cells = map(str.strip, itertools.chain.from_iterable(chunk))
        # 8 bytes a cell; zeros for no text.
        found = b"".join(blake2b(text.encode(), digest_size=8).digest() if text else bytes(8)
                         for text in cells)
        texts = np.frombuffer(found, "<u8").reshape(-1, columns)
        texts = np.column_stack([texts, texts.sum(1, dtype=np.uint64) * np.uint64(ODD)])
        file.write(texts.tobytes())
        texts = texts[texts[:, -1] != 0]
        count += len(texts)
        kept = np.concatenate([kept, texts])
        copies = np.concatenate([copies, np.ones(len(texts), np.int64)])
        _, first, place = np.unique(kept[:, -1], return_index=True, return_inverse=True)
        copies = np.bincount(place.ravel(), copies)[:CANDIDATES].astype(np.int64)
        kept = kept[first[:CANDIDATES]]
    return count, kept, copies


def _chunks(file, known, columns):
    """The hashes in a file, by chunks: the number of the first row; where among the sorted `known`
    each hash (n, columns + 1) would stand; whether it stands there."""
    file.seek(0)
    start = 0
    while found := file.read(CHUNK * 8 * (columns + 1)):
        texts = np.frombuffer(found, np.uint64).reshape(-1, columns + 1)
        place = np.minimum(np.searchsorted(known, texts), len(known) - 1)
        yield start, place, (known[place] == texts) & (texts != 0)
        start += len(texts)


def _choose(file, candidates, columns, size, most):
    """Hold out the first `size` candidates (K, columns + 1), or as many as leave out no more than
    `most` rows -> (N,) uint8."""
    number = len(candidates)
    known, index = np.unique(candidates, return_inverse=True)
    rank = np.full(len(known), number)  # of the first candidate that has a text
    np.minimum.at(rank, index.reshape(candidates.shape), np.arange(number)[:, None])
    ranks = []  # of the first candidate that shares a text with a row
    counts = np.zeros(number + 1, np.int64)
    first = {}  # candidate -> the first row that is it
    for start, place, is_known in _chunks(file, known, columns):
        ranks.append(np.where(is_known, rank[place], number).min(1).astype(np.uint16))
        counts += np.bincount(ranks[-1], minlength=number + 1)
        for row in np.flatnonzero(is_known[:, -1]):
            first.setdefault(int(rank[place[row, -1]]), start + row)
    # If the first n candidates are held out, so many rows are held or left out.
    taken = np.cumsum(counts[:number][:size])
    size = min(size, max(1, int(np.searchsorted(taken, most, "right"))))
    kinds = np.where(np.concatenate(ranks) < size, np.uint8(LEFT_OUT), np.uint8(TRAIN))
    kinds[[first[candidate] for candidate in range(size)]] = HELD
    return kinds
