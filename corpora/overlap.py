"""Which rows share a text: hashes of texts, and the rows that are held out for evaluation.

Two texts are equal here if they differ only in case, spaces and Unicode form. 0 is the hash of no
text. N rows have C columns.
"""

import re
import unicodedata
from hashlib import blake2b

import numpy as np

TRAIN, EVAL, EXCLUDED = range(3)  # what a row is for


def normalized(text):
    """Return a text as it is compared: in one Unicode form and case, with single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def bag_of_words(text):
    """Return the lower-cased words and punctuation marks of a text, sorted."""
    return sorted(re.findall(r"\w+|[^\w\s]", text.lower()))


def text_hash(text):
    """Return the 64-bit hash of a normalized text; 0 for no text."""
    digest = blake2b(normalized(text).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") if text else 0


def hold_out(texts, least=2):
    """Return (N,) uint8, TRAIN, EVAL or EXCLUDED, given the hashes (N, C) of all texts, 0 for none;
    and how many of the EVAL rows share a text with one of TRAIN, which can only be a frequent one.

    Of the rows with at least `least` texts, those with the smallest hashes are held out: a tenth of
    them up to 200 rows, 1 % of more than 20,000, at most 1,000. Their copies, and rows that share a
    text with them, are excluded from training:

        A cat.       Eine Katze.    EVAL
        a  CAT.      Ein Kater.     EXCLUDED   its first text is compared as "a cat."
        Eine Katze.  A cat.         EXCLUDED   a copy with the columns exchanged
        A dog.       Ein Hund.      TRAIN
    """
    rows = texts.sum(1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    whole = np.flatnonzero(np.count_nonzero(texts, axis=1) >= least)
    _, first = np.unique(rows[whole], return_index=True)  # one of all copies, the smallest first
    kinds = np.full(len(rows), TRAIN, np.uint8)
    held = whole[first[:min(1000, max(len(first) // 100, min(200, len(first) // 10)))]]
    shared = np.setdiff1d(texts[held], frequent(texts))
    kinds[np.isin(rows, rows[held])] = EXCLUDED
    for column in texts.T:
        kinds[np.isin(column, shared)] = EXCLUDED
    kinds[held] = EVAL
    often = np.zeros(texts[held].shape, bool)
    for column in texts.T:
        often |= np.isin(texts[held], column[kinds == TRAIN])
    return kinds, int((often & (texts[held] > 0)).any(1).sum())


def frequent(texts):
    """Return the hashes among (N, C) of texts of many rows, such as "Yes.", and of no text. They
    tell nothing about a row. Many are more than a tenth of a small file's rows, 20 rows of a larger
    file, or 0.2 % of a very large one's."""
    values, counts = np.unique(texts, return_counts=True)
    many = max(len(texts) // 500, min(20, len(texts) // 10), 3)
    return values[(counts > many) | (values == 0)]


def without_frequent(texts):
    """Return the different hashes of (N, C), sorted (n,), except frequent ones."""
    return np.setdiff1d(texts, frequent(texts))


def share_a_text(texts, known):
    """Return (N,) bool: whether a row of hashes (N, C) has a text among the known ones, sorted."""
    places = np.minimum(np.searchsorted(known, texts), max(0, len(known) - 1))
    return (known[places] == texts).any(1) if len(known) else np.zeros(len(texts), bool)
