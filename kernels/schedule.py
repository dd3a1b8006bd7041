"""Which tiles our attention kernels visit, computed from key_ranges in NumPy: once per batch, not
once per layer, and not on the device.

Three facts make short rows cheap:
  1. The line consists of groups of tokens, and no token sees a token of another group. Groups of at
     most 64 tokens (32 in float32) are put together into *local* tiles: such a tile has all keys of
     its tokens, so its attention is two matmuls without a loop, and its backward is one kernel with
     five.
  2. The other groups are cut into blocks of queries. Each block visits at most two disjoint ranges
     of keys, which begin at exact tokens, not at multiples of a tile. The first range begins with
     the keys that all queries of the block see, its *core*, where tiles need no mask. In the
     backward, blocks of keys visit ranges of queries in the same way.
  3. The transpose of the mask has the same form: the queries that see a key are two intervals too
     (`transposed`). A block of keys has them in registers, so its loop over the queries loads no
     mask.
Tiles and blocks begin and end where groups do: no token is moved, and no gap is padded.
"""

from typing import NamedTuple

import numpy as np
import torch


class Tiles(NamedTuple):
    """Sizes of one row of TILES. `queries` has as many rows as `forward`: they share a schedule."""

    local: tuple[int, int, int]  # tokens of a local tile, warps of its forward, of its backward
    forward: tuple[int, int, int, int]  # query rows of a block, keys a step, warps, stages
    queries: tuple[int, int, int, int]  # the same for the gradient of the queries
    keys: tuple[int, int, int, int]  # keys of a block, query rows a step, warps, stages

    def flat(self):
        return [*self.local, *self.forward, *self.queries, *self.keys]

    @staticmethod
    def unflat(numbers):
        return Tiles(numbers[:3], numbers[3:7], numbers[7:11], numbers[11:])


# {(GPU, bytes of a number, largest head size): (medium rows, long rows)}. The numbers are fixed:
# with tuning during training, results would depend on what else the machine does. We found them by
# building every row for its GPUs (tests/build.py: no register spills, tensor cores in use). "other"
# is any other GPU: its rows fit the 99 KB of shared memory of compute capability 8.6 and 8.9.
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
    """Return the Tiles of medium and long rows, for a compute capability (major, minor) or None.
    Raises ValueError for numbers that the kernels do not support."""
    if element_size not in (2, 4):
        raise ValueError(f"its numbers have {element_size} bytes, not 2 or 4")
    gpu = f"{capability[0]}.{capability[1]}" if capability else "other"
    largest = 64 if head_dim <= 64 else 128
    return TILES.get((gpu, element_size, largest), TILES["other", element_size, largest])


class Plan(NamedTuple):
    """What the kernels need besides key_ranges; all tensors are int32."""

    query_ranges: torch.Tensor  # (T, 4) the queries that see each key
    local: torch.Tensor  # (L, 2) first and last+1 of each local tile
    queries: torch.Tensor  # (B, 7) first and last+1 of each block, its ranges of keys, core's end
    keys: torch.Tensor  # (C, 7) the same for blocks of keys, with ranges of queries
    two: bool  # whether some token has a second interval
    tiles: Tiles


class Segments(NamedTuple):
    """The S segments that a mask was made of. They tile the line of T tokens."""

    bounds: np.ndarray  # (S + 1,) first token of each segment, and T
    causal: np.ndarray  # (S,)
    low: np.ndarray  # (S,) first and last+1 token of the segment's prefix, or 0, 0
    high: np.ndarray  # (S,)

    def per_token(self, values):
        return np.repeat(values, np.diff(self.bounds), 0)


def segments(key_ranges):
    """Find the Segments of a mask key_ranges (T, 4). Raises ValueError if it has other rules than
    those of data.Segment."""
    tokens = len(key_ranges)
    if key_ranges.min() < 0 or key_ranges.max() > tokens:
        raise ValueError(f"an interval of key_ranges leaves the line of {tokens} tokens")
    # All tokens of a segment see from its first token on.
    first = np.flatnonzero(np.diff(key_ranges[:, 0], prepend=-1))
    low, high, low2, high2 = key_ranges[first].T
    shared = low2 < high2
    causal = high == first + 1
    mask = Segments(np.append(first, tokens), causal, low2 * shared, high2 * shared)
    # The ranges of a segment's first token must be of this form, and hold for all its tokens.
    expected = mask.per_token(key_ranges[first])
    np.copyto(expected[:, 1], np.arange(1, tokens + 1), where=mask.per_token(causal))
    own = (low == first) & (causal | (high == mask.bounds[1:])) & (mask.high <= first)
    if not (own.all() and np.array_equal(expected, key_ranges)):
        raise ValueError("it has a window, or other parts than segments and prefixes")
    return mask


def transposed(mask):
    """Return the transposed mask (T, 4): the two intervals of queries that see each key, from its
    own segment and from segments whose prefix it is in. Raises ValueError if the second is not an
    interval."""
    bounds = mask.bounds
    seen_by = np.zeros((bounds[-1], 4), np.int32)
    seen_by[:, :2] = mask.per_token(np.stack([bounds[:-1], bounds[1:]], 1))
    np.copyto(seen_by[:, 0], np.arange(len(seen_by)), where=mask.per_token(mask.causal))
    # For each key in a prefix: where the queries that see it begin and end, and how many they are.
    first, last = seen_by[:, 2:].T
    count = np.zeros_like(first)
    table = np.stack([bounds[:-1], bounds[1:], mask.low, mask.high], 1)
    with_prefix = table[mask.high > 0].tolist()
    for start, end, low, high in with_prefix:
        last[low:high] = end
        count[low:high] += end - start
    for start, _, low, high in reversed(with_prefix):
        first[low:high] = start
    if (last - first != count).any():
        raise ValueError("segments that share a prefix are not next to each other in the row")
    return seen_by


def groups(mask):
    """Return the bounds (N + 1,) of the smallest groups of tokens that see no token of another
    group."""
    bounds = mask.bounds
    low = np.where(mask.low < mask.high, mask.low, bounds[:-1])
    # The first token that a segment and all later ones see.
    lowest = np.minimum.accumulate(low[::-1])[::-1]
    cut = lowest[1:] >= bounds[1:-1]
    return np.concatenate([bounds[:1], bounds[1:-1][cut], bounds[-1:]])


def split(bounds, most):
    """Return local tiles (L, 2) of whole neighboring groups, at most `most` tokens each, and the
    longer groups (N, 2)."""
    # Group g and the next ones before reach[g] fit into one tile.
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

    A block never continues in the next group, because all its tokens would then visit the keys of
    both. With groups longer than a block, this costs more than empty rows at the end of a group.
    """
    first, last = groups.T
    counts = -(-(last - first) // size)  # blocks of each group
    number = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    first = np.repeat(first, counts) + number * size
    return np.stack([first, np.minimum(first + size, np.repeat(last, counts))], 1)


def reduce(function, values, blocks):
    """Reduce values (T,) over the tokens of each block (B, 2), by np.minimum or np.maximum."""
    # One more value: the last end of reduceat.
    return function.reduceat(np.append(values, 0), blocks.ravel())[::2]


def hull(intervals, blocks):
    """Return the smallest interval that contains those of all tokens (T, 2) of each block (B, 2),
    as two arrays (B,); 0, 0 if no token of the block has one."""
    low, high = intervals.T
    some = low < high
    low = reduce(np.minimum, np.where(some, low, len(low)), blocks)
    high = reduce(np.maximum, np.where(some, high, 0), blocks)
    return np.where(low < high, low, 0), np.where(low < high, high, 0)


def cores(intervals, blocks):
    """Return an interval that all tokens (T, 4) of each block (B, 2) see, as two arrays (B,): what
    their first intervals have in common, or their second ones if that is longer. Without one, the
    end is not after the start."""
    low, high, low2, high2 = intervals.T
    touch = (low2 < high2) & ((low == high2) | (high == low2))  # these are one interval
    low, high = np.where(touch, (np.minimum(low, low2), np.maximum(high, high2)), (low, high))
    low2, high2 = np.where(touch, 0, (low2, high2))
    low, low2 = (reduce(np.maximum, x, blocks) for x in (low, low2))
    high, high2 = (reduce(np.minimum, x, blocks) for x in (high, high2))
    return np.where(high2 - low2 > high - low, (low2, high2), (low, high))


def ranges(intervals, blocks, step):
    """Add two disjoint ranges and the core's end to blocks, (B, 2) -> (B, 7). The ranges contain
    the two intervals of all their tokens (T, 4). They are merged if they overlap, or if that takes
    no more steps of `step` tokens. All tokens of a block see its first range up to the core's end.
    The longest blocks come first, so that a GPU ends with short ones. Blocks of two tokens, step 4:

        one sees 0-3, 4-6;    the other 0-3, 4-6    ->  0-6          core's end 3    (merged)
        one sees 10-12, 0-8;  the other 11-13, 0-8  ->  0-8, 10-13   core's end 8    (swapped)
        one sees 0-13;        the other 5-16        ->  8-16, 0-8    core's end 13   (cut)
    """
    low, high = hull(intervals[:, :2], blocks)
    low2, high2 = hull(intervals[:, 2:], blocks)
    start = np.minimum(low, low2)
    end = np.maximum(high, high2)
    apart = count_steps(low, high, step) + count_steps(low2, high2, step)
    overlap = np.maximum(low, low2) <= np.minimum(high, high2)
    one = (high2 > low2) & (overlap | (count_steps(start, end, step) <= apart))
    low, high = np.where(one, (start, end), (low, high))
    low2, high2 = np.where(one, 0, (low2, high2))
    start, end = cores(intervals, blocks)
    # The range with the core becomes the first.
    swap = (low2 <= start) & (start + step <= end) & (end <= high2)
    low, high, low2, high2 = np.where(swap, (low2, high2, low, high), (low, high, low2, high2))
    # Whole steps before the core become the second range, if there is none.
    cut = low + count_steps(low, start, step) * step
    late = (low < cut) & (cut + step <= end) & (low2 == high2)
    low, low2, high2 = np.where(late, (cut, low, cut), (low, low2, high2))
    core = np.where(start <= low, np.maximum(low, end), low)
    work = count_steps(low, high, step) + count_steps(low2, high2, step)
    table = np.stack([*blocks.T, low, high, low2, high2, core], 1)
    return table[np.argsort(-work, kind="stable")]


def count_steps(low, high, step):
    return -(-(high - low) // step)


def plan(key_ranges, group_size, medium, long):
    """Return the Plan of a mask key_ranges (T, 4), for `group_size` query heads per KV head, with
    the Tiles `medium` or, if the tokens outside local tiles see 256 keys or more on average,
    `long`. Raises ValueError for a mask that the kernels do not support."""
    most = min(medium.keys[1], long.keys[1])
    if group_size > most:
        raise ValueError(f"{group_size} query heads per KV head are more than {most}")
    mask = segments(key_ranges)
    seen_by = transposed(mask)
    local, rest = split(groups(mask), medium.local[0])
    tiles = long if keys_seen(mask, rest) >= 256 else medium
    queries = blocks(rest, tiles.forward[0] // group_size)
    queries = ranges(key_ranges, queries, tiles.forward[1])
    keys = ranges(seen_by, blocks(rest, tiles.keys[0]), tiles.keys[1] // group_size)
    tables = [np.ascontiguousarray(table, np.int32) for table in (seen_by, local, queries, keys)]
    return Plan(*map(torch.from_numpy, tables), bool(mask.high.any()), tiles)


def keys_seen(mask, groups):
    """Return how many keys the tokens of some groups (N, 2) see on average; 0 without groups."""
    if not len(groups):
        return 0.0
    n = np.diff(mask.bounds)
    seen = np.where(mask.causal, n * (n + 1) // 2, n * n) + n * (mask.high - mask.low)
    seen = np.append(0, seen.cumsum())
    first, last = np.searchsorted(mask.bounds, groups).T
    return (seen[last] - seen[first]).sum() / np.diff(groups).sum()
