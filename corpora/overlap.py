"""Which rows share a text: hashes of texts, and the rows that are held out for evaluation.

Two texts are equal here if they differ only in case, spaces, Unicode form and characters that
nobody sees. 0 is the hash of no text. N rows have C columns.
"""

import re
import unicodedata
from hashlib import blake2b

import numpy as np

TRAIN, EVAL, EXCLUDED = range(3)  # what a row is for
# Unicode's category Cf, such as soft hyphens and zero-width spaces, control characters that are no
# space, and what else has no shape of its own, such as variation selectors.
INVISIBLE = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f"
    "\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5"
    "\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0"
    "\ufff0-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]")


def normalized(text):
    """Return a text as it is compared: in one Unicode form and case, with single spaces, without
    invisible characters."""
    if not (text.isascii() and text.isprintable()):
        text = unicodedata.normalize("NFKC", INVISIBLE.sub("", text))
    return " ".join(text.casefold().split())


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
    own = np.unique(texts[held])
    kinds[is_among(rows, np.sort(rows[held]))] = EXCLUDED
    kinds[share_a_text(texts, own[~is_among(own, frequent(texts))])] = EXCLUDED
    kinds[held] = EVAL
    trained = texts[kinds == TRAIN]
    often = is_among(texts[held], np.sort(trained[is_among(trained, own[own > 0])]))
    return kinds, int(often.any(1).sum())


def frequent(texts, others=False):
    """Return the hashes among (N, C) of texts of many rows, such as "Yes.", and of no text, sorted
    (n,), or all others. They tell nothing about a row. Many are more than a tenth of a small file's
    rows, 20 rows of a larger file, or 0.2 % of a very large one's, times the median number of
    copies of a row."""
    # Without counts, np.unique takes 20 times as long [NumPy 2.3].
    values, counts = np.unique(texts, return_counts=True)
    # A file can have every row several times.
    copies = np.unique(texts.sum(1, dtype=np.uint64), return_counts=True)[1]
    usual = int(np.median(copies)) if len(copies) else 1
    many = usual * max(len(texts) // 500, min(20, len(texts) // 10), 3)
    return values[((counts > many) | (values == 0)) != others]


def without_frequent(texts):
    """Return the different hashes of (N, C), sorted (n,), except frequent ones."""
    return frequent(texts, others=True)


def is_among(values, known):
    """Return whether each value is among the known ones, which are sorted."""
    if not len(known):
        return np.zeros(values.shape, bool)
    return known[np.minimum(np.searchsorted(known, values), len(known) - 1)] == values


def share_a_text(texts, known):
    """Return (N,) bool: whether a row of hashes (N, C) has a text among the known ones, sorted."""
    return is_among(texts, known).any(1)
