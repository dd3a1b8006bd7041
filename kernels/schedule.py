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


# {(GPU, bytes of a number, largest head size): (medium rows, long rows)}. The numbers are fixed:
# tuning while training would make results depend on what else the machine does. They were found by
# building every row for its GPUs (tests/build.py: no register spills, tensor cores in use). "other"
# is for an unknown GPU: its rows fit the 99 KB of shared memory of compute capability 8.6 and 8.9.
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


def choose_tiles(capability, head_dim, element_size):
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
    two: bool  # whether some token has a second interval
    tiles: Tiles


class Segments(NamedTuple):
    """A mask as the S segments that it was made of; they tile the line of T tokens, and a padding
    token is one of its own."""

    bounds: np.ndarray  # (S + 1,) their first tokens, and T
    empty: np.ndarray  # (S,) whether it is padding, which sees nothing and is not seen
    causal: np.ndarray  # (S,)
    low: np.ndarray  # (S,) first and last+1 token of the prefix that all of it sees, or 0, 0
    high: np.ndarray  # (S,)

    def widths(self):
        return np.diff(self.bounds)

    def per_token(self, values):
        return np.repeat(values, self.widths())


def segments(key_ranges):
    """The mask (T, 4) -> Segments; ValueError unless it has the form that model.Packed defines."""
    tokens = len(key_ranges)
    if key_ranges.min(initial=0) < 0 or key_ranges.max(initial=0) > tokens:
        raise ValueError(f"an interval of key_ranges leaves the line of {tokens} tokens")
    low, high, _, _ = key_ranges.T
    # A segment's tokens see from its first one on; padding sees nothing.
    empty = low >= high
    begins = np.ones(tokens, bool)
    begins[1:] = (low[1:] != low[:-1]) | empty[1:] | empty[:-1]
    first = np.flatnonzero(begins)
    bounds = np.append(first, tokens)
    empty = empty[first]
    low, high, low2, high2 = key_ranges[first].T
    shared = low2 < high2
    causal = ~empty & (high == first + 1)
    mask = Segments(bounds, empty, causal, low2 * shared, high2 * shared)
    # What a segment's first token says holds for all of them, and is of this form.
    said = np.repeat(key_ranges[first], mask.widths(), 0)
    if causal.any():
        np.copyto(said[:, 1], np.arange(1, tokens + 1), where=mask.per_token(causal))
    own = (low == first) & (causal | (high == bounds[1:]))
    if not ((own | empty & ~shared).all() and np.array_equal(said, key_ranges)):
        raise ValueError("the mask is not one of segments and prefixes")
    return mask


class Pieces(NamedTuple):
    """An interval for each token of the line, which changes only where a piece begins."""

    starts: np.ndarray  # (P,) first token of each piece
    low: np.ndarray  # (P,)
    high: np.ndarray  # (P,)


def transposed(mask):
    """The prefixes turned round: for each key the stretch of queries whose prefix it is in, as
    Pieces. ValueError if those are not consecutive.

    Between two neighbouring ends of prefixes every key is seen by the same segments. How many they
    are, the sum of their numbers, and of the squares are running sums, because a prefix enters at
    its start and leaves at its end. n distinct integers of a given sum have the least sum of
    squares iff they are consecutive: n and the sum give the stretch, and the squares prove it.
    """
    bounds = mask.bounds
    # Nobody has a prefix.
    if not mask.high.any():
        return Pieces(bounds[:1], bounds[:1], bounds[:1])
    starts = np.unique(np.concatenate([bounds[:1], mask.low, mask.high]))
    number = np.arange(len(mask.low))
    steps = np.zeros((3, len(starts)), np.int64)
    for power, step in enumerate(steps):
        np.add.at(step, np.searchsorted(starts, mask.low), number**power)
        np.subtract.at(step, np.searchsorted(starts, mask.high), number**power)
    n, total, squares = steps.cumsum(1)  # (P,) each
    sum_below = n * (n - 1) // 2  # 0 + 1 + ... + (n - 1)
    first = np.where(n > 0, (total - sum_below) // np.maximum(n, 1), 0)
    squares_below = n * (n - 1) * (2 * n - 1) // 6
    least = n * first**2 + 2 * first * sum_below + squares_below
    if (n * first + sum_below != total).any() or (least != squares).any():
        raise ValueError(
            "some token is seen from several separate stretches: "
            "segments that share a prefix must stand side by side in the row"
        )
    return Pieces(starts, np.where(n > 0, bounds[first], 0), np.where(n > 0, bounds[first + n], 0))


def query_ranges(mask):
    """The transposed mask (T, 4): token j is seen by the queries of two intervals, those in whose
    own segment it is and those whose prefix it is in. And the second interval as Pieces."""
    bounds = mask.bounds
    shared = transposed(mask)
    own = np.stack([bounds[:-1], bounds[1:]], 1).astype(np.int32)
    own[mask.empty] = 0
    found = np.repeat(np.pad(own, ((0, 0), (0, 2))), mask.widths(), 0)
    if mask.causal.any():
        np.copyto(found[:, 0], np.arange(len(found)), where=mask.per_token(mask.causal))
    if mask.high.any():
        widths = np.diff(shared.starts, append=bounds[-1])
        found[:, 2] = np.repeat(shared.low, widths)
        found[:, 3] = np.repeat(shared.high, widths)
    return found, shared


def groups(mask):
    """Bounds (N + 1,) of the smallest stretches of the line that nothing sees across; a padding
    token is one of its own."""
    bounds = mask.bounds
    shares = mask.low < mask.high
    low = np.where(shares, np.minimum(bounds[:-1], mask.low), bounds[:-1])
    high = np.maximum(bounds[1:], mask.high)
    # No segment before sees further than this.
    highest = np.maximum.accumulate(high)
    # No segment behind sees further back than this.
    lowest = np.minimum.accumulate(low[::-1])[::-1]
    cut = (highest[:-1] <= bounds[1:-1]) & (lowest[1:] >= bounds[1:-1])
    if (mask.empty[:-1] & ~cut).any():
        raise ValueError("padding stands inside of a row")
    return np.concatenate([bounds[:1], bounds[1:-1][cut], bounds[-1:]])


def split(bounds, most):
    """Groups -> local tiles (L, 2) of whole neighbouring groups, at most `most` tokens each, and
    the longer groups (N, 2)."""
    # Group g and its neighbours before reach[g] fit into one tile.
    reach = np.searchsorted(bounds, bounds + most, side="right") - 1
    following = np.maximum(reach, np.arange(len(bounds)) + 1).tolist()
    group = 0
    taken = [group]
    last = len(bounds) - 1
    while group < last:
        group = following[group]
        taken.append(group)
    taken = np.array(taken)
    fits = reach[taken[:-1]] > taken[:-1]
    cut = np.stack([bounds[taken[:-1]], bounds[taken[1:]]], 1)
    return cut[fits], cut[~fits]


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


BEYOND = 2**31 - 1  # any line's end


def hull(pieces, blocks):
    """The smallest interval that holds those of all tokens of a block: Pieces, (B, 2) -> (B,),
    (B,); 0, 0 where no token of the block has one."""
    some = pieces.low < pieces.high
    # One more piece, in which nobody sees anything: reduceat's last end.
    low = np.append(np.where(some, pieces.low, BEYOND), BEYOND)
    high = np.append(np.where(some, pieces.high, 0), 0)
    # The pieces that a block begins in, and that begin behind it.
    first = np.searchsorted(pieces.starts, blocks[:, 0], side="right") - 1
    last = np.searchsorted(pieces.starts, blocks[:, 1])
    inside = np.stack([first, last], 1).ravel()
    low = np.minimum.reduceat(low, inside)[::2]
    high = np.maximum.reduceat(high, inside)[::2]
    return np.where(low < high, low, 0), np.where(low < high, high, 0)


def ranges(own, shared, blocks, step):
    """Blocks (B, 2) -> (B, 6): the block, and two disjoint ranges that hold all of its tokens'
    intervals, `own` (T, 2) and `shared`, Pieces. They are one range when they overlap, or when that
    takes no more steps of `step` tokens. Longest first: a GPU then ends with short ones."""
    if not len(blocks):
        return np.zeros((0, 6), np.int64)
    # Own intervals never step back: the first token has the lowest start, the last the highest end.
    low = own[blocks[:, 0], 0]
    high = own[blocks[:, 1] - 1, 1]
    low2, high2 = hull(shared, blocks)
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
    mask = segments(key_ranges)
    seen_by, sharers = query_ranges(mask)
    local, rest = split(groups(mask), medium.local[0])
    tiles = long if keys_seen(mask, rest) >= 256 else medium
    prefixes = Pieces(mask.bounds[:-1], mask.low, mask.high)
    queries = blocks(rest, tiles.forward[0] // share)
    queries = ranges(key_ranges[:, :2], prefixes, queries, tiles.forward[1])
    keys = ranges(seen_by[:, :2], sharers, blocks(rest, tiles.keys[0]), tiles.keys[1] // share)
    tables = [np.ascontiguousarray(table, np.int32) for table in (seen_by, local, queries, keys)]
    return Plan(*map(torch.from_numpy, tables), bool(mask.high.any()), tiles)


def keys_seen(mask, groups):
    """How many keys the tokens of some groups (N, 2) see on average; 0 if there are none."""
    if not len(groups):
        return 0.0
    n = mask.widths().astype(np.int64)
    seen = np.where(mask.causal, n * (n + 1) // 2, n * n) + n * (mask.high - mask.low)
    seen = np.append(0, np.where(mask.empty, 0, seen).cumsum())
    first, last = np.searchsorted(mask.bounds, groups).T
    return (seen[last] - seen[first]).sum() / np.diff(groups).sum()


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
