"""The back end `sdpa`: PyTorch's own attention, on rows that are padded to a common length.

Only attention works on padded rows; all other layers compute the packed line. Rows are sorted by
length into at most four buckets, and padded to the longest row of their bucket.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F


class Padded(NamedTuple):
    """The padding layout of a batch: P slots in all buckets."""

    gather: torch.Tensor  # (P,) token of each slot
    scatter: torch.Tensor  # (T,) slot of each token
    # of each bucket: rows n, length L, mask (n, 1, 1 or L, L) bool or None
    buckets: list[tuple[int, int, torch.Tensor | None]]


def length_buckets(lengths, most=4):
    """Cut rows, of lengths (R,) in ascending order, into at most `most` buckets with the least
    padded area, the sum of rows x longest^2. Return [(first row, last row + 1)]. Two buckets of
    the lengths 1, 2, 3, 9, 10 are (0, 3) and (3, 5): 3 x 3^2 + 2 x 10^2 = 227 instead of 5 x 10^2.

    This is a dynamic program over at most 64 different lengths; if there are more, neighboring
    lengths count as equal.
    """
    step = max(1, lengths[-1] // 64)
    _, first = np.unique(-(-lengths // step), return_index=True)
    edges = np.append(first, len(lengths))  # groups of (nearly) equal length
    groups = len(first)
    longest = lengths[edges[1:] - 1].astype(float)
    # price[a, b]: the area of one bucket with the groups a to b.
    price = (edges[None, 1:] - edges[:-1, None]) * longest[None] ** 2
    price[np.tril_indices(groups, -1)] = np.inf
    # best[b]: the least area of the groups up to b, with one more bucket in each round.
    best = price[0]
    cuts = []
    for _ in range(min(most, groups) - 1):
        # Earlier buckets end with group a, and the last bucket has the groups a + 1 to b.
        split = best[:-1, None] + price[1:]
        cuts.append(split.argmin(0))
        best = np.minimum(best, split.min(0))
    # Walk back through the best cuts.
    buckets = []
    last = groups - 1
    for cut in reversed(cuts):
        buckets.append((edges[cut[last] + 1], edges[last + 1]))
        last = cut[last]
    return [(0, edges[last + 1])] + buckets[::-1]


def bucket_mask(ranges, real, starts, ends):
    """Return the mask of one bucket, (n, 1, 1 or L, L) bool, or None if every key is visible.
    `ranges`: key_ranges of its slots (n, L, 4); `real`: which slots have a token (n, L); `starts`,
    `ends`: where its rows start and end in the line (n, 1)."""
    first, last, first2, last2 = np.moveaxis(ranges, -1, 0)  # (n, L) each
    whole = (first == starts) & (last == ends)
    # Every token sees its whole row.
    if whole[real].all():
        return None if real.all() else torch.from_numpy(real[:, None, None])
    key = (starts + np.arange(real.shape[1]))[:, None]  # (n, 1, L)
    own = (first[..., None] <= key) & (key < last[..., None])
    shared = (first2[..., None] <= key) & (key < last2[..., None])
    # Padding sees itself, because the softmax of nothing is NaN.
    itself = np.eye(real.shape[1], dtype=bool) & ~real[..., None]
    mask = ((own | shared) & real[:, None]) | itself  # (n, L, L)
    return torch.from_numpy(mask[:, None])


def pad_plan(key_ranges, cu_seqlens):
    """Return the padding layout of a batch: key_ranges (T, 4), cu_seqlens (R+1,) -> Padded."""
    lengths = np.diff(cu_seqlens)
    order = np.argsort(lengths, kind="stable")
    gather = []
    scatter = np.empty(cu_seqlens[-1], np.int64)
    buckets = []
    slots = 0
    for first, last in length_buckets(lengths[order]):
        rows = order[first:last]
        longest = int(lengths[rows[-1]])
        offset = np.arange(longest)
        real = offset < lengths[rows, None]  # (n, L)
        starts = cu_seqlens[rows, None]  # (n, 1)
        # Padding repeats a row's first token.
        token = np.where(real, starts + offset, starts)
        scatter[token[real]] = slots + np.flatnonzero(real.ravel())
        gather.append(token.ravel())
        mask = bucket_mask(key_ranges[token], real, starts, cu_seqlens[rows + 1, None])
        buckets.append((len(rows), longest, mask))
        slots += token.size
    gather = np.concatenate(gather).astype(np.int64)
    return Padded(torch.from_numpy(gather), torch.from_numpy(scatter), buckets)


class Pad(torch.autograd.Function):
    """Pad the line: (T, ...) -> (P, ...). The backward is a gather too, not a sum: padding repeats
    a token, but has no gradient."""

    @staticmethod
    def forward(ctx, x, gather, scatter):
        ctx.save_for_backward(scatter)
        return x.index_select(0, gather)

    @staticmethod
    def backward(ctx, grad):
        (scatter,) = ctx.saved_tensors
        return grad.index_select(0, scatter), None, None


class Unpad(torch.autograd.Function):
    """Remove the padding: (P, ...) -> (T, ...)."""

    @staticmethod
    def forward(ctx, x, scatter):
        ctx.save_for_backward(scatter)
        ctx.slots = len(x)
        return x.index_select(0, scatter)

    @staticmethod
    def backward(ctx, grad):
        (scatter,) = ctx.saved_tensors
        return grad.new_zeros(ctx.slots, *grad.shape[1:]).index_copy_(0, scatter, grad), None


def padded_attention(qkv, heads, kv_heads, plan, softcap=0.0):
    """Compute attention of a packed line with its Padded plan: (T, (H + 2 Hkv) K) -> (T, H K)."""
    is_narrow = torch.is_autocast_enabled("cpu") or qkv.dtype == torch.bfloat16
    if qkv.device.type == "cpu" and is_narrow:
        # On a CPU all matmuls gain from bfloat16, but not attention: PyTorch's backward of it takes
        # half of a training step in bfloat16, and a fourteenth in float32.
        with torch.autocast("cpu", enabled=False):
            return padded_attention(qkv.float(), heads, kv_heads, plan, softcap).to(qkv.dtype)
    padded = Pad.apply(qkv, plan.gather, plan.scatter)  # (P, (H + 2 Hkv) K)
    # split computes one gradient for all buckets. Slices would compute one of P rows each, and
    # autograd would add them.
    parts = padded.split([rows * length for rows, length, _ in plan.buckets])
    outputs = []
    for part, (rows, length, mask) in zip(parts, plan.buckets):
        part = part.view(rows, length, heads + 2 * kv_heads, -1).transpose(1, 2)
        q, k, v = part.split([heads, kv_heads, kv_heads], 1)  # (n, heads, L, K)
        out = sdpa(q, k, v, mask, softcap)
        outputs.append(out.transpose(1, 2).reshape(rows * length, -1))
    return Unpad.apply(torch.cat(outputs), plan.scatter)  # (T, H K)


def sdpa(q, k, v, mask=None, softcap=0.0):
    """Compute softmax(q k' / sqrt(K)) v: q (n, H, L, K), k and v (n, Hkv, M, K) -> (n, H, L, K).

    The mask broadcasts to (n, H, L, M); None: every key is visible. `softcap` c: a score s becomes
    c tanh(s / c), unless c is 0 [Gemma 2, sec. 2].
    """
    group_size = q.shape[1] // k.shape[1]
    # On a GPU, the kernel that takes a mask or float32 takes no groups before torch 2.14. With
    # groups, PyTorch would keep all L x M scores of every head.
    if softcap or group_size > 1 and q.is_cuda:
        k, v = (x.repeat_interleave(group_size, 1) for x in (k, v))
    if not softcap:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=grouped)
    scores = softcap * (q @ k.transpose(2, 3) / (softcap * q.shape[3] ** 0.5)).tanh()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    precise = torch.promote_types(v.dtype, torch.float32)
    return scores.softmax(-1, precise).to(v.dtype) @ v
