"""What our attention kernels visit, derived from key_ranges in NumPy: once per batch, not per
layer, and away from the device.

Three facts make short rows cheap:
  1. A line falls into groups that nothing sees across. Groups of at most 64 tokens are laid into
     *local* tiles: such a tile holds all of its tokens' keys, so its attention is two matrix
     products without a loop, and its backward is one launch of five.
  2. The rest is cut into blocks of queries; each visits at most two disjoint ranges of keys that
     begin at exact tokens, not at multiples of a tile. Backward, blocks of keys visit ranges of
     queries in the same way.
  3. The mask has a transpose of the same form: the queries that see a key are two intervals too
     (`query_ranges`). A block of keys holds them in registers, so its loop over the queries loads
     no mask.
Tiles and blocks begin and end wherever groups do: no token is moved, and no padding fills a gap.
"""

from typing import NamedTuple

import numpy as np
import torch


class Tiles(NamedTuple):
    """Sizes of one row of TILES. `queries` has the rows of `forward`: both follow one schedule."""

    local: tuple[int, int, int]  # tokens of a local tile, warps of its forward, of its backward
    forward: tuple[int, int, int, int]  # query rows of a block, keys a step, warps, stages
    queries: tuple[int, int, int, int]  # the same for the gradient of the queries
    keys: tuple[int, int, int, int]  # keys of a block, query rows a step, warps, stages

    def flat(self):
        return [*self.local, *self.forward, *self.queries, *self.keys]

    @staticmethod
    def unflat(numbers):
        parts = ((0, 3), (3, 7), (7, 11), (11, 15))
        return Tiles(*(tuple(numbers[start:end]) for start, end in parts))


# In place of tuning while training, which would make results depend on the machine's mood: found
# by building every row for its GPUs (build.py: no register spills, tensor cores in use).
# (GPU, bytes of a number, largest head size): medium rows, long rows. "other" is what an unknown
# GPU gets: it fits the 99 KB of shared memory of compute capability 8.6 and 8.9.
HEAD_SIZES = (16, 32, 64, 128)
TILES = {
    ("9.0", 2, 64): (
        Tiles((64, 4, 4), (64, 32, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2)),
        Tiles((64, 4, 4), (128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 2)),
    ),
    ("9.0", 2, 128): (
        Tiles((64, 4, 8), (64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 8, 2)),
        Tiles((64, 4, 8), (128, 64, 8, 3), (128, 64, 8, 2), (64, 32, 8, 2)),
    ),
    ("other", 2, 64): (
        Tiles((64, 4, 8), (64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 4, 2)),
        Tiles((64, 4, 8), (128, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2)),
    ),
    ("other", 2, 128): (
        Tiles((64, 8, 8), (64, 32, 8, 2), (64, 32, 4, 2), (64, 32, 8, 2)),
        Tiles((64, 8, 8), (128, 32, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2)),
    ),
    ("other", 4, 64): (Tiles((32, 8, 8), (32, 16, 8, 3), (32, 32, 8, 2), (32, 32, 8, 2)),) * 2,
    ("other", 4, 128): (Tiles((32, 8, 8), (32, 16, 8, 2), (32, 16, 8, 2), (32, 16, 8, 2)),) * 2,
}


def choose(capability, head_dim, element_size):
    """The Tiles of medium and of long rows, for a compute capability (major, minor) or None."""
    if head_dim not in HEAD_SIZES or element_size not in (2, 4):
        known = ", ".join(map(str, HEAD_SIZES))
        raise ValueError(
            f"heads of {head_dim} numbers of {element_size} bytes: "
            f"the kernel takes {known} numbers of 2 or 4 bytes"
        )
    gpu = f"{capability[0]}.{capability[1]}" if capability else "other"
    largest = 64 if head_dim <= 64 else 128
    return TILES.get((gpu, element_size, largest), TILES["other", element_size, largest])


class Plan(NamedTuple):
    """What the kernels need beside key_ranges; all tensors int32."""

    query_ranges: torch.Tensor  # (T, 4) the queries that see each key
    local: torch.Tensor  # (L, 2) first and last+1 of each local tile
    queries: torch.Tensor  # (B, 6) of each block of queries: first, last+1, two ranges of keys
    keys: torch.Tensor  # (C, 6) of each block of keys: first, last+1, two ranges of queries
    two: bool  # does some token have a second interval?
    tiles: Tiles


def transposed(low, high):
    """Query i sees the keys low[i] <= j < high[i]: (T,), (T,) -> first and last+1 of the queries
    that see each key. ValueError if those are not consecutive (exact up to 2 million tokens).

    The number n of the queries, the sum of their indices and the sum of squares are running sums,
    because an interval enters at its start and leaves at its end. n distinct integers of a given
    sum have the least sum of squares iff they are consecutive: so n and the sum give the stretch,
    and the squares prove that it is one.
    """
    if not high.any():  # nobody has this interval
        return low, high
    index = np.arange(len(low))
    steps = np.zeros((3, len(low) + 1), np.int64)
    for power, step in enumerate(steps):
        np.add.at(step, low, index**power)
        np.subtract.at(step, high, index**power)
    n, total, squares = steps.cumsum(1)[:, :-1]  # (T,) each
    sum_below = n * (n - 1) // 2  # 0 + 1 + ... + n - 1
    first = np.where(n > 0, (total - sum_below) // np.maximum(n, 1), 0)
    squares_below = n * (n - 1) * (2 * n - 1) // 6
    least = n * first**2 + 2 * first * sum_below + squares_below
    if (n * first + sum_below != total).any() or (least != squares).any():
        raise ValueError(
            "some token is seen from several separate stretches: "
            "segments that share a prefix must stand side by side in the row"
        )
    return first, first + n


def tidy(key_ranges):
    """(T, 4) int64, every empty interval (0, 0); ValueError if one leaves the line."""
    key_ranges = np.asarray(key_ranges).astype(np.int64)
    if key_ranges.min(initial=0) < 0 or key_ranges.max(initial=0) > len(key_ranges):
        raise ValueError(f"an interval of key_ranges leaves the line of {len(key_ranges)} tokens")
    for interval in (slice(0, 2), slice(2, 4)):
        low, high = key_ranges[:, interval].T
        key_ranges[low >= high, interval] = 0
    return key_ranges


def query_ranges(key_ranges):
    """The transposed mask (T, 4): token j is seen by the queries of two intervals, those in whose
    own segment it is and those whose prefix it is in."""
    own = transposed(key_ranges[:, 0], key_ranges[:, 1])
    shared = transposed(key_ranges[:, 2], key_ranges[:, 3])
    return np.stack([*own, *shared], 1)


def groups(key_ranges):
    """Bounds (N + 1,) of the smallest stretches of the line that nothing sees across; a padding
    token is one of its own."""
    index = np.arange(len(key_ranges))
    low = index.copy()
    high = index + 1
    for interval in (key_ranges[:, :2], key_ranges[:, 2:]):
        some = interval[:, 0] < interval[:, 1]
        low = np.where(some, np.minimum(low, interval[:, 0]), low)
        high = np.maximum(high, interval[:, 1])
    highest = np.maximum.accumulate(high)  # nothing before sees further than this
    lowest = np.minimum.accumulate(low[::-1])[::-1]  # nothing behind sees further back
    cut = (highest[:-1] <= index[1:]) & (lowest[1:] >= index[1:])
    return np.concatenate([[0], np.flatnonzero(cut) + 1, [len(key_ranges)]])


def split(bounds, most):
    """Groups -> local tiles (L, 2) of whole neighbouring groups, at most `most` tokens each, and
    the longer groups (N, 2)."""
    # Group g and its neighbours up to reach[g] fit into one tile.
    reach = (np.searchsorted(bounds, bounds + most, side="right") - 1).tolist()
    bounds = bounds.tolist()
    local = []
    rest = []
    group = 0
    while group < len(bounds) - 1:
        if reach[group] > group:
            local.append((bounds[group], bounds[reach[group]]))
            group = reach[group]
        else:
            rest.append((bounds[group], bounds[group + 1]))
            group += 1
    return np.array(local, np.int64).reshape(-1, 2), np.array(rest, np.int64).reshape(-1, 2)


def blocks(groups, size):
    """Cut groups (N, 2) into blocks (B, 2) of at most `size` tokens.

    A block that ran on into the next group would see the keys of both, for all of its tokens:
    with groups longer than a block that costs more than the empty rows at a group's end.
    """
    first, last = groups.T
    counts = -(-(last - first) // size)  # blocks of each group
    number = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    first = np.repeat(first, counts) + number * size
    return np.stack([first, np.minimum(first + size, np.repeat(last, counts))], 1)


def hull(intervals, blocks):
    """The smallest interval that holds those of all tokens of a block: (T, 2), (B, 2) -> (B,),
    (B,); 0, 0 where no token of the block has one."""
    low, high = intervals.T
    some = low < high
    # One more token, that sees nothing: reduceat's last end.
    low = np.append(np.where(some, low, len(low)), len(low))
    high = np.append(np.where(some, high, 0), 0)
    low = np.minimum.reduceat(low, blocks.ravel())[::2]
    high = np.maximum.reduceat(high, blocks.ravel())[::2]
    return np.where(low < high, low, 0), np.where(low < high, high, 0)


def ranges(intervals, blocks, step):
    """Blocks (B, 2) -> (B, 6): the block, and two disjoint ranges that hold all of its tokens'
    intervals (T, 4). They are one range when they overlap, or when that takes no more steps of
    `step` tokens. Longest first: a GPU then ends with short ones."""
    if not len(blocks):
        return np.zeros((0, 6), np.int64)
    low, high = hull(intervals[:, :2], blocks)
    low2, high2 = hull(intervals[:, 2:], blocks)
    start = np.minimum(low, low2)
    end = np.maximum(high, high2)
    apart = count_steps(low, high, step) + count_steps(low2, high2, step)
    overlap = np.maximum(low, low2) <= np.minimum(high, high2)
    both = (high > low) & (high2 > low2)
    one = both & (overlap | (count_steps(start, end, step) <= apart))
    low = np.where(one, start, low)
    high = np.where(one, end, high)
    low2 = np.where(one, 0, low2)
    high2 = np.where(one, 0, high2)
    work = count_steps(low, high, step) + count_steps(low2, high2, step)
    found = np.stack([*blocks.T, low, high, low2, high2], 1)
    return found[np.argsort(-work, kind="stable")]


def count_steps(low, high, step):
    return -(-(high - low) // step)


def plan(key_ranges, share, medium, long):
    """key_ranges (T, 4) -> Plan for `share` query heads to a head of keys, with the Tiles
    `medium` or, if the tokens outside of local tiles see 256 keys or more on average, `long`.
    ValueError for a mask that is not of this form."""
    most = min(medium.keys[1], long.keys[1])
    if share > most:
        raise ValueError(f"{share} query heads read one head of keys: the kernel takes {most}")
    key_ranges = tidy(key_ranges)
    seen_by = query_ranges(key_ranges)
    local, rest = split(groups(key_ranges), medium.local[0])
    # Tokens outside of local tiles, each with the number of keys that it sees.
    inside = np.zeros(len(key_ranges) + 1, np.int64)
    inside[rest[:, 0]] += 1
    inside[rest[:, 1]] -= 1
    low, high, low2, high2 = key_ranges[inside.cumsum()[:-1] > 0].T
    seen = high - low + high2 - low2
    tiles = long if len(seen) and seen.mean() >= 256 else medium
    queries = ranges(key_ranges, blocks(rest, tiles.forward[0] // share), tiles.forward[1])
    keys = ranges(seen_by, blocks(rest, tiles.keys[0]), tiles.keys[1] // share)
    tables = [np.ascontiguousarray(table, np.int32) for table in (seen_by, local, queries, keys)]
    two = bool((key_ranges[:, 2] < key_ranges[:, 3]).any())
    return Plan(*map(torch.from_numpy, tables), two, tiles)


def computed(plan, share):
    """(token, key) pairs that each pass computes, masked ones too, for a query head: what to
    divide by Packed.visible_pairs()."""
    rows, step = plan.tiles.forward[:2]
    keys, inner = plan.tiles.keys[:2]
    local = len(plan.local) * plan.tiles.local[0] ** 2
    forward = count_trips(plan.queries, step) * step * rows // share
    backward = count_trips(plan.keys, inner // share) * keys * inner // share
    return {"forward": local + forward, "keys": local + backward}


def count_trips(table, step):
    """The steps that all blocks (B, 6) take through their two ranges."""
    _, _, low, high, low2, high2 = table.long().T
    return int((count_steps(low, high, step) + count_steps(low2, high2, step)).sum())
