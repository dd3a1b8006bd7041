"""What the attention kernels visit, derived from `sees` in NumPy: once per batch, not per layer, and away from the device.

Three facts make short rows cheap:
  1. A line falls into groups that nothing sees across. Groups of at most 64 tokens are laid into *local* tiles: such a tile holds
     all of its tokens' keys, so its attention is two matrix products without a loop, and its backward is one launch of five.
  2. The rest is cut into blocks of queries; each visits at most two disjoint ranges of keys that begin at exact tokens, not at multiples
     of a tile. Backward, blocks of keys visit ranges of queries in the same way.
  3. The mask has a transpose of the same form: the queries that see a key are two intervals too (`columns`). A block of keys holds
     them in registers, so its loop over the queries loads no mask.
Tiles and blocks begin and end wherever groups do: no token is moved, and no dead token fills a gap.
"""

from typing import NamedTuple

import numpy as np
import torch


class Tiles(NamedTuple):
    """Sizes of one row of TILES. `queries` has the rows of `forward`, because both follow the same schedule."""
    local: tuple[int, int, int]  # tokens of a local tile, warps of its forward and of its backward
    forward: tuple[int, int, int, int]  # query rows of a block, keys a step, warps, stages
    queries: tuple[int, int, int, int]  # the same for the gradient of the queries
    keys: tuple[int, int, int, int]  # keys of a block, query rows a step, warps, stages: gradients of keys and values

    def flat(self):
        return [number for part in self for number in part]

    @staticmethod
    def unflat(numbers):
        return Tiles(*(tuple(numbers[start:end]) for start, end in ((0, 3), (3, 7), (7, 11), (11, 15))))


# In place of tuning while training, which would make results depend on the machine's mood: found by building every row for its GPUs (build.py: no
# register spills, tensor cores in use), not yet timed. (GPU, bytes of a number, largest head size): medium rows, long rows.
# "other" is what an unknown GPU gets: it fits the 99 KB of shared memory of compute capability 8.6 and 8.9.
HEAD_SIZES = (16, 32, 64, 128)
TILES = {
    ("9.0", 2, 64): (Tiles((64, 4, 4), (64, 32, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2)), Tiles((64, 4, 4), (128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 2))),
    ("9.0", 2, 128): (Tiles((64, 4, 8), (64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 8, 2)), Tiles((64, 4, 8), (128, 64, 8, 3), (128, 64, 8, 2), (64, 32, 8, 2))),
    ("other", 2, 64): (Tiles((64, 4, 8), (64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 4, 2)), Tiles((64, 4, 8), (128, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2))),
    ("other", 2, 128): (Tiles((64, 8, 8), (64, 32, 8, 2), (64, 32, 4, 2), (64, 32, 8, 2)), Tiles((64, 8, 8), (128, 32, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2))),
    ("other", 4, 64): (Tiles((32, 8, 8), (32, 16, 8, 3), (32, 32, 8, 2), (32, 32, 8, 2)),) * 2,
    ("other", 4, 128): (Tiles((32, 8, 8), (32, 16, 8, 2), (32, 16, 8, 2), (32, 16, 8, 2)),) * 2,
}


def choose(capability, size, bytes):
    """Compute capability (major, minor) or None, head size, bytes of a number -> the Tiles of medium and of long rows."""
    if size not in HEAD_SIZES or bytes not in (2, 4):
        raise ValueError(f"heads of {size} numbers of {bytes} bytes: the kernel takes {', '.join(map(str, HEAD_SIZES))} numbers of 2 or 4 bytes")
    known = f"{capability[0]}.{capability[1]}" if capability else "other"
    largest = next(most for most in (64, 128) if size <= most)
    return TILES.get((known, bytes, largest), TILES["other", bytes, largest])


class Plan(NamedTuple):
    """What the kernels need beside `sees`, all int32: columns (T, 4); first and last+1 of each local tile (L, 2); of each block of
    queries (B, 6), or keys (C, 6): first, last+1, and its two ranges. `two`: some token has a second interval."""
    columns: torch.Tensor
    local: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    two: bool
    tiles: Tiles


def transposed(low, high):
    """Query i sees the keys low[i] <= j < high[i]: (T,), (T,) -> first and last+1 of the queries that see each key.

    The number n of those queries, the sum of their places and the sum of squares are running sums, because an interval enters at its
    start and leaves at its end. n distinct integers of a given sum have the least sum of squares iff they are consecutive: so n and the
    sum give the stretch, and the squares prove that it is one. ValueError if it is not (exact up to 2 million tokens)."""
    place, steps = np.arange(len(low)), np.zeros((3, len(low) + 1), np.int64)
    if not high.any():                                                   # nobody has this interval
        return low, high
    for power, step in enumerate(steps):
        np.add.at(step, low, place ** power)
        np.subtract.at(step, high, place ** power)
    n, total, squares = steps.cumsum(1)[:, :-1]
    first = np.where(n > 0, (total - n * (n - 1) // 2) // np.maximum(n, 1), 0)
    if (n * first + n * (n - 1) // 2 != total).any() or (n * first ** 2 + first * n * (n - 1) + n * (n - 1) * (2 * n - 1) // 6 != squares).any():
        raise ValueError("some token is seen from several separate stretches: views that share a block must stand side by side in the row")
    return first, first + n


def tidy(sees):
    """(T, 4) int64 with every empty interval (0, 0); ValueError if one leaves the line."""
    sees = np.asarray(sees).astype(np.int64)
    if sees.min(initial=0) < 0 or sees.max(initial=0) > len(sees):
        raise ValueError(f"an interval of sees leaves the line of {len(sees)} tokens")
    for own in (slice(0, 2), slice(2, 4)):
        sees[sees[:, own][:, 0] >= sees[:, own][:, 1], own] = 0
    return sees


def columns(sees):
    """The transposed mask: token j is seen by the queries of two intervals (T, 4), those whose own block and those whose shared block it is in."""
    return np.stack([*transposed(sees[:, 0], sees[:, 1]), *transposed(sees[:, 2], sees[:, 3])], 1)


def groups(sees):
    """Bounds (N + 1,) of the smallest stretches of the line that nothing sees across; a dead token is one of its own."""
    place = np.arange(len(sees))
    low, high = place.copy(), place + 1
    for own in (sees[:, :2], sees[:, 2:]):
        some = own[:, 0] < own[:, 1]
        low, high = np.where(some, np.minimum(low, own[:, 0]), low), np.maximum(high, own[:, 1])
    highest, lowest = np.maximum.accumulate(high), np.minimum.accumulate(low[::-1])[::-1]
    return np.concatenate([[0], np.flatnonzero((highest[:-1] <= place[1:]) & (lowest[1:] >= place[1:])) + 1, [len(sees)]])


def split(bounds, most):
    """Groups -> local tiles (L, 2) of whole neighbouring groups, at most `most` tokens each, and the longer groups (N, 2)."""
    reach = (np.searchsorted(bounds, bounds + most, side="right") - 1).tolist()
    bounds, local, rest, group = bounds.tolist(), [], [], 0
    while group < len(bounds) - 1:
        if reach[group] > group:
            local.append((bounds[group], bounds[reach[group]]))
            group = reach[group]
        else:
            rest.append((bounds[group], bounds[group + 1]))
            group += 1
    return np.array(local, np.int64).reshape(-1, 2), np.array(rest, np.int64).reshape(-1, 2)


def blocks(groups, size):
    """Cut groups (N, 2) into blocks (B, 2) of at most `size` tokens. A block that ran on into the next group would see the keys of both, for
    all of its tokens: with groups longer than a block that costs more than the empty rows at a group's end."""
    counts = -(-(groups[:, 1] - groups[:, 0]) // size)
    number = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    first = np.repeat(groups[:, 0], counts) + number * size
    return np.stack([first, np.minimum(first + size, np.repeat(groups[:, 1], counts))], 1)


def ranges(intervals, blocks, step):
    """Blocks (B, 2) -> (B, 6): the block, and two disjoint ranges that hold all of its tokens' intervals. They are one range when they
    overlap, or when that takes no more steps of `step` tokens. Longest first: a GPU then ends with short ones."""
    if not len(blocks):
        return np.zeros((0, 6), np.int64)
    hulls = []
    for own in (intervals[:, :2], intervals[:, 2:]):
        some = own[:, 0] < own[:, 1]
        low = np.append(np.where(some, own[:, 0], len(own)), len(own))   # one more token, seeing nothing: reduceat's last end
        high = np.append(np.where(some, own[:, 1], 0), 0)
        low, high = np.minimum.reduceat(low, blocks.ravel())[::2], np.maximum.reduceat(high, blocks.ravel())[::2]
        hulls.append(np.where(low < high, (low, high), 0))
    (low, high), (low2, high2) = hulls
    steps = lambda low, high: -(-(high - low) // step)
    start, end = np.minimum(low, low2), np.maximum(high, high2)
    one = (high > low) & (high2 > low2) & ((np.maximum(low, low2) <= np.minimum(high, high2)) | (steps(start, end) <= steps(low, high) + steps(low2, high2)))
    found = np.stack([*blocks.T, np.where(one, start, low), np.where(one, end, high), np.where(one, 0, low2), np.where(one, 0, high2)], 1)
    return found[np.argsort(-(steps(found[:, 2], found[:, 3]) + steps(found[:, 4], found[:, 5])), kind="stable")]


def plan(sees, share, medium, long):
    """sees (T, 4) -> Plan for `share` query heads to a head of keys, with Tiles `medium` or, if the tokens outside of local tiles see 256 keys
    or more on average, `long`. ValueError for a mask that is not of this form."""
    if share > min(medium.keys[1], long.keys[1]):
        raise ValueError(f"{share} query heads read one head of keys: the kernel takes {min(medium.keys[1], long.keys[1])} at most")
    sees = tidy(sees)
    seen = columns(sees)
    local, rest = split(groups(sees), medium.local[0])
    longer = np.concatenate([np.arange(*group) for group in rest.tolist()] or [[]]).astype(np.int64)
    keys = sees[longer, 1] - sees[longer, 0] + sees[longer, 3] - sees[longer, 2]
    tiles = long if len(keys) and keys.mean() >= 256 else medium
    queries = ranges(sees, blocks(rest, tiles.forward[0] // share), tiles.forward[1])
    keys = ranges(seen, blocks(rest, tiles.keys[0]), tiles.keys[1] // share)
    tensor = lambda x: torch.from_numpy(np.ascontiguousarray(x, dtype=np.int32))
    return Plan(*map(tensor, (seen, local, queries, keys)), bool((sees[:, 2] < sees[:, 3]).any()), tiles)


def computed(plan, share):
    """(token, key) pairs that each pass computes, per query head, masked ones too: what to divide by Packed.pairs()."""
    steps = lambda table, step: int(sum((-(-(table[:, i + 1].long() - table[:, i]) // step)).sum() for i in (2, 4)))
    local = len(plan.local) * plan.tiles.local[0] ** 2
    rows, step, keys, inner = *plan.tiles.forward[:2], *plan.tiles.keys[:2]
    return {"forward": local + steps(plan.queries, step) * step * rows // share,
            "keys": local + steps(plan.keys, inner // share) * keys * inner // share}
