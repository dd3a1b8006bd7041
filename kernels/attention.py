"""Attention over one packed line, on a GPU: the definition, the Triton forward, the backward, and the operation that autograd sees.

    token i may attend to key j   iff   sees[i,0] <= j < sees[i,1]   or   sees[i,2] <= j < sees[i,3]

One mask rule, four integers a token; schedule.py says which tiles to visit. q, k and v are read in place from one fused projection
(T, (H + 2 Hkv) K) and their gradients are written in place into one of the same shape: nothing is transposed, nothing concatenated.
No atomics, so the same input gives the same bits. Softmax is online, base 2, in float32 [Milakov & Gimelshein 2018; Dao 2023].

G = H / Hkv query heads read one head of keys. In the general kernels they are rows of one tile: row r is token r // G, head r % G.
"""

import math

import torch
import triton
import triton.language as tl

from .schedule import Tiles

# ---------------------------------------------------------------------------------------------------------------------
# The definition


def reference(qkv, heads, kv_heads, sees):
    """(T, (H + 2 Hkv) K) and sees (T, 4) -> (T, H K), through the dense mask: in float64, the oracle of the kernels. A dead token gives 0."""
    size, place = qkv.shape[1] // (heads + 2 * kv_heads), torch.arange(len(qkv), device=qkv.device)
    q, k, v = qkv.unflatten(1, (-1, size)).transpose(0, 1).split([heads, kv_heads, kv_heads])        # (heads, T, K)
    k, v = (x.repeat_interleave(heads // kv_heads, 0) for x in (k, v))
    low, high, low2, high2 = sees.long().T[..., None]                    # (T, 1) each
    allowed = (low <= place) & (place < high) | (low2 <= place) & (place < high2)        # (T, T)
    weights = (q @ k.mT / math.sqrt(size)).masked_fill(~allowed, -1e30).softmax(-1) * allowed
    return (weights @ v).transpose(0, 1).flatten(1)


# ---------------------------------------------------------------------------------------------------------------------
# What all kernels share


@triton.jit
def intervals(table, token, live, TWO: tl.constexpr):
    """The two intervals of tokens (n,) from a table (T, 4); a token that is not live has none."""
    at = table + token * 4
    low, high = tl.load(at, mask=live, other=0), tl.load(at + 1, mask=live, other=0)
    low2, high2 = low, low                                               # empty
    if TWO:
        low2, high2 = tl.load(at + 2, mask=live, other=0), tl.load(at + 3, mask=live, other=0)
    return low, high, low2, high2


@triton.jit
def inside(low, high, low2, high2, place, TWO: tl.constexpr):
    """(n, 1) intervals, (1, m) places -> (n, m): the mask."""
    found = (low[:, None] <= place[None, :]) & (place[None, :] < high[:, None])
    if TWO:
        found |= (low2[:, None] <= place[None, :]) & (place[None, :] < high2[:, None])
    return found


@triton.jit
def dot(a, b):
    """Exact products in float32 (a GPU would round them to tf32); 16-bit inputs do not care."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def step(t, low, high, low2, high2, STEP: tl.constexpr):
    """Trip t over two ranges -> its first token, and the end of its range."""
    first = tl.cdiv(high - low, STEP)
    return tl.where(t < first, low + t * STEP, low2 + (t - first) * STEP), tl.where(t < first, high, high2)


@triton.jit
def block_of(table, number):
    at = table + number * 6
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)


# ---------------------------------------------------------------------------------------------------------------------
# Forward: a block of queries against its ranges of keys


@triton.jit(do_not_specialize=["tokens"])
def forward_kernel(qkv, out, lse, sees, blocks, tokens, stride, H: tl.constexpr, HKV: tl.constexpr, K: tl.constexpr,
                   ROWS: tl.constexpr, STEP: tl.constexpr, TWO: tl.constexpr, SCALE: tl.constexpr):
    G: tl.constexpr = H // HKV
    kv, r, d = tl.program_id(1), tl.arange(0, ROWS), tl.arange(0, K)
    first, last, lo, hi, lo2, hi2 = block_of(blocks, tl.program_id(0))
    token, head = first + r // G, kv * G + r % G
    live = token < last
    low, high, low2, high2 = intervals(sees, token, live, TWO)
    # Offsets from the block's first token fit in 32 bits; the block's own place in memory may not.
    q = tl.load(qkv + first.to(tl.int64) * stride + ((r // G) * stride + head * K)[:, None] + d[None, :], mask=live[:, None], other=0.0)    # (ROWS, K)
    keys = qkv + (H + kv) * K + tl.arange(0, STEP)[:, None] * stride + d[None, :]
    top = tl.full([ROWS], -1e30, tl.float32)                             # finite: a tile without a visible key needs no special case
    total, mean = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, K], tl.float32)
    for t in range(tl.cdiv(hi - lo, STEP) + tl.cdiv(hi2 - lo2, STEP)):
        start, end = step(t, lo, hi, lo2, hi2, STEP)
        place = start + tl.arange(0, STEP)
        real = (place < end)[:, None]
        k = tl.load(keys + start.to(tl.int64) * stride, mask=real, other=0.0)            # (STEP, K)
        v = tl.load(keys + start.to(tl.int64) * stride + HKV * K, mask=real, other=0.0)
        seen = inside(low, high, low2, high2, place, TWO) & (place < end)[None, :]
        scores = tl.where(seen, dot(q, tl.trans(k)) * SCALE, float("-inf"))              # (ROWS, STEP), in units of log 2
        higher = tl.maximum(top, tl.max(scores, 1))
        p, fade = tl.exp2(scores - higher[:, None]), tl.exp2(top - higher)
        total = total * fade + tl.sum(p, 1)
        mean = mean * fade[:, None] + dot(p.to(v.dtype), v)
        top = higher
    dead = total == 0.0
    total = tl.where(dead, 1.0, total)
    mean = mean / total[:, None]
    at = out + first.to(tl.int64) * H * K + ((r // G) * H * K + head * K)[:, None] + d[None, :]
    tl.store(at, mean.to(out.dtype.element_ty), mask=live[:, None])
    # (Hkv, T G): the rows of a tile are neighbours. +inf makes every weight of a dead token 0 in the backward.
    tl.store(lse + (kv.to(tl.int64) * tokens + first) * G + r, tl.where(dead, float("inf"), top + tl.log2(total)), mask=live)


# ---------------------------------------------------------------------------------------------------------------------
# Backward: dp = do v', ds = p (dp - delta) with delta = rowsum(do o), dq = scale ds k, dk = scale ds' q, dv = p' do


@triton.jit(do_not_specialize=["tokens"])
def queries_kernel(qkv, out, grad, lse, delta, dqkv, sees, blocks, tokens, stride, H: tl.constexpr, HKV: tl.constexpr, K: tl.constexpr,
                   ROWS: tl.constexpr, STEP: tl.constexpr, TWO: tl.constexpr, SCALE: tl.constexpr):
    """dq of a block of queries, and delta, which keys_kernel reads after."""
    G: tl.constexpr = H // HKV
    kv, r, d = tl.program_id(1), tl.arange(0, ROWS), tl.arange(0, K)
    first, last, lo, hi, lo2, hi2 = block_of(blocks, tl.program_id(0))
    token, head = first + r // G, kv * G + r % G
    live = token < last
    low, high, low2, high2 = intervals(sees, token, live, TWO)
    q = tl.load(qkv + first.to(tl.int64) * stride + ((r // G) * stride + head * K)[:, None] + d[None, :], mask=live[:, None], other=0.0)
    at = first.to(tl.int64) * H * K + ((r // G) * H * K + head * K)[:, None] + d[None, :]
    do = tl.load(grad + at, mask=live[:, None], other=0.0)               # (ROWS, K)
    o = tl.load(out + at, mask=live[:, None], other=0.0)
    flat = (kv.to(tl.int64) * tokens + first) * G + r
    top = tl.load(lse + flat, mask=live, other=float("inf"))
    through = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta + flat, through, mask=live)
    keys = qkv + (H + kv) * K + tl.arange(0, STEP)[:, None] * stride + d[None, :]
    dq = tl.zeros([ROWS, K], tl.float32)
    for t in range(tl.cdiv(hi - lo, STEP) + tl.cdiv(hi2 - lo2, STEP)):
        start, end = step(t, lo, hi, lo2, hi2, STEP)
        place = start + tl.arange(0, STEP)
        real = (place < end)[:, None]
        k = tl.load(keys + start.to(tl.int64) * stride, mask=real, other=0.0)
        v = tl.load(keys + start.to(tl.int64) * stride + HKV * K, mask=real, other=0.0)
        seen = inside(low, high, low2, high2, place, TWO) & (place < end)[None, :]
        p = tl.exp2(tl.where(seen, dot(q, tl.trans(k)) * SCALE, float("-inf")) - top[:, None])
        ds = p * (dot(do, tl.trans(v)) - through[:, None])
        dq += dot(ds.to(k.dtype), k)
    at = dqkv + first.to(tl.int64) * (H + 2 * HKV) * K + ((r // G) * (H + 2 * HKV) * K + head * K)[:, None] + d[None, :]
    tl.store(at, (dq * (SCALE * 0.6931471805599453)).to(q.dtype), mask=live[:, None])


@triton.jit(do_not_specialize=["tokens"])
def keys_kernel(qkv, grad, lse, delta, dqkv, columns, blocks, tokens, stride, H: tl.constexpr, HKV: tl.constexpr, K: tl.constexpr,
                KEYS: tl.constexpr, ROWS: tl.constexpr, TWO: tl.constexpr, SCALE: tl.constexpr):
    """dk and dv of a block of keys, summed over the G query heads in registers. Scores are transposed, k q', so that p' and ds' are
    there as the products need them; the keys' intervals of queries stay in registers for the whole loop."""
    G: tl.constexpr = H // HKV
    STEP: tl.constexpr = ROWS // G                                       # tokens a trip
    kv, d, r = tl.program_id(1), tl.arange(0, K), tl.arange(0, ROWS)
    first, last, lo, hi, lo2, hi2 = block_of(blocks, tl.program_id(0))
    token = first + tl.arange(0, KEYS)
    live = token < last
    low, high, low2, high2 = intervals(columns, token, live, TWO)
    at = tl.arange(0, KEYS)[:, None] * stride + d[None, :]
    at = qkv + first.to(tl.int64) * stride + (H + kv) * K + at
    k = tl.load(at, mask=live[:, None], other=0.0)                       # (KEYS, K)
    v = tl.load(at + HKV * K, mask=live[:, None], other=0.0)
    rows = qkv + ((r // G) * stride + (kv * G + r % G) * K)[:, None] + d[None, :]
    outs = grad + ((r // G) * H * K + (kv * G + r % G) * K)[:, None] + d[None, :]
    dk, dv = tl.zeros([KEYS, K], tl.float32), tl.zeros([KEYS, K], tl.float32)
    for t in range(tl.cdiv(hi - lo, STEP) + tl.cdiv(hi2 - lo2, STEP)):
        start, end = step(t, lo, hi, lo2, hi2, STEP)
        place = start + r // G
        real = (place < end) & (r < STEP * G)                            # G that does not divide ROWS leaves rows over
        q = tl.load(rows + start.to(tl.int64) * stride, mask=real[:, None], other=0.0)   # (ROWS, K)
        do = tl.load(outs + start.to(tl.int64) * H * K, mask=real[:, None], other=0.0)
        flat = (kv.to(tl.int64) * tokens + start) * G + r
        top = tl.load(lse + flat, mask=real, other=float("inf"))
        through = tl.load(delta + flat, mask=real, other=0.0)
        seen = inside(low, high, low2, high2, place, TWO) & real[None, :]
        p = tl.exp2(tl.where(seen, dot(k, tl.trans(q)) * SCALE, float("-inf")) - top[None, :])       # (KEYS, ROWS)
        dv += dot(p.to(do.dtype), do)
        ds = p * (dot(v, tl.trans(do)) - through[None, :])
        dk += dot(ds.to(q.dtype), q)
    at = tl.arange(0, KEYS)[:, None] * (H + 2 * HKV) * K + d[None, :]
    at = dqkv + first.to(tl.int64) * (H + 2 * HKV) * K + (H + kv) * K + at
    tl.store(at, (dk * (SCALE * 0.6931471805599453)).to(k.dtype), mask=live[:, None])
    tl.store(at + HKV * K, dv.to(v.dtype), mask=live[:, None])


# ---------------------------------------------------------------------------------------------------------------------
# Local tiles: every key of a tile's tokens is in the tile


@triton.jit(do_not_specialize=["tokens"])
def local_forward_kernel(qkv, out, lse, sees, tiles, tokens, stride, H: tl.constexpr, HKV: tl.constexpr, K: tl.constexpr,
                         SIZE: tl.constexpr, TWO: tl.constexpr, SCALE: tl.constexpr):
    """One head of one tile: two products, a plain softmax, no loop."""
    G: tl.constexpr = H // HKV
    head, n, d = tl.program_id(1), tl.arange(0, SIZE), tl.arange(0, K)
    first, last = tl.load(tiles + tl.program_id(0) * 2), tl.load(tiles + tl.program_id(0) * 2 + 1)
    token = first + n
    live = token < last
    at = qkv + first.to(tl.int64) * stride + n[:, None] * stride + d[None, :]
    q = tl.load(at + head * K, mask=live[:, None], other=0.0)            # (SIZE, K)
    k = tl.load(at + (H + head // G) * K, mask=live[:, None], other=0.0)
    v = tl.load(at + (H + HKV + head // G) * K, mask=live[:, None], other=0.0)
    low, high, low2, high2 = intervals(sees, token, live, TWO)
    scores = tl.where(inside(low, high, low2, high2, token, TWO), dot(q, tl.trans(k)) * SCALE, float("-inf"))        # (SIZE, SIZE)
    top = tl.maximum(tl.max(scores, 1), -1e30)
    p = tl.exp2(scores - top[:, None])
    total = tl.sum(p, 1)
    dead = total == 0.0
    total = tl.where(dead, 1.0, total)
    mean = dot(p.to(v.dtype), v) / total[:, None]
    at = out + first.to(tl.int64) * H * K + n[:, None] * H * K + head * K + d[None, :]
    tl.store(at, mean.to(out.dtype.element_ty), mask=live[:, None])
    at = lse + ((head // G).to(tl.int64) * tokens + first) * G + n * G + head % G
    tl.store(at, tl.where(dead, float("inf"), top + tl.log2(total)), mask=live)


@triton.jit(do_not_specialize=["tokens"])
def local_backward_kernel(qkv, grad, lse, dqkv, sees, tiles, tokens, stride, H: tl.constexpr, HKV: tl.constexpr, K: tl.constexpr,
                          SIZE: tl.constexpr, TWO: tl.constexpr, SCALE: tl.constexpr):
    """All three gradients of one tile and one head of keys: five products for each of its G query heads. delta = rowsum(p dp)."""
    G: tl.constexpr = H // HKV
    kv, n, d = tl.program_id(1), tl.arange(0, SIZE), tl.arange(0, K)
    first, last = tl.load(tiles + tl.program_id(0) * 2), tl.load(tiles + tl.program_id(0) * 2 + 1)
    token = first + n
    live = token < last
    at = qkv + first.to(tl.int64) * stride + n[:, None] * stride + d[None, :]
    k = tl.load(at + (H + kv) * K, mask=live[:, None], other=0.0)        # (SIZE, K)
    v = tl.load(at + (H + HKV + kv) * K, mask=live[:, None], other=0.0)
    low, high, low2, high2 = intervals(sees, token, live, TWO)
    seen = inside(low, high, low2, high2, token, TWO)
    into = dqkv + first.to(tl.int64) * (H + 2 * HKV) * K + n[:, None] * (H + 2 * HKV) * K + d[None, :]
    dk, dv = tl.zeros([SIZE, K], tl.float32), tl.zeros([SIZE, K], tl.float32)
    for g in tl.range(G, num_stages=1):                                   # fetching the next head early would not fit in registers
        head = kv * G + g
        q = tl.load(at + head * K, mask=live[:, None], other=0.0)
        do = tl.load(grad + first.to(tl.int64) * H * K + n[:, None] * H * K + head * K + d[None, :], mask=live[:, None], other=0.0)
        top = tl.load(lse + (kv.to(tl.int64) * tokens + first) * G + n * G + g, mask=live, other=float("inf"))
        p = tl.exp2(tl.where(seen, dot(q, tl.trans(k)) * SCALE, float("-inf")) - top[:, None])       # (SIZE, SIZE)
        dp = dot(do, tl.trans(v))
        ds = (p * (dp - tl.sum(p * dp, 1)[:, None])).to(q.dtype)
        dv += dot(tl.trans(p.to(do.dtype)), do)
        dk += dot(tl.trans(ds), q)
        tl.store(into + head * K, (dot(ds, k) * (SCALE * 0.6931471805599453)).to(q.dtype), mask=live[:, None])
    tl.store(into + (H + kv) * K, (dk * (SCALE * 0.6931471805599453)).to(k.dtype), mask=live[:, None])
    tl.store(into + (H + HKV + kv) * K, dv.to(v.dtype), mask=live[:, None])


# ---------------------------------------------------------------------------------------------------------------------
# The operation: one opaque node for torch.compile, whose backward is another


def sizes(heads, kv_heads, qkv, two):
    """What every kernel is compiled for."""
    size = qkv.shape[1] // (heads + 2 * kv_heads)
    return dict(H=heads, HKV=kv_heads, K=size, TWO=two, SCALE=math.log2(math.e) / math.sqrt(size))


@torch.library.custom_op("nanojepa::attention", mutates_args=())
def forward(qkv: torch.Tensor, heads: int, kv_heads: int, sees: torch.Tensor, columns: torch.Tensor, local: torch.Tensor, queries: torch.Tensor,
            keys: torch.Tensor, two: bool, tiles: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """-> states (T, H K) and the base-2 logarithm of each softmax's denominator (Hkv, T G), float32. Every element is written by one program."""
    shape, t = sizes(heads, kv_heads, qkv, two), Tiles.unflat(tiles)
    out, lse = qkv.new_empty(len(qkv), heads * shape["K"]), qkv.new_empty(kv_heads, len(qkv) * heads // kv_heads, dtype=torch.float32)
    with torch.cuda.device_of(qkv):                                      # Triton launches on the current device, which need not be qkv's
        if len(local):
            local_forward_kernel[len(local), heads](qkv, out, lse, sees, local, len(qkv), qkv.stride(0), SIZE=t.local[0], num_warps=t.local[1], **shape)
        if len(queries):
            rows, step, warps, stages = t.forward
            forward_kernel[len(queries), kv_heads](qkv, out, lse, sees, queries, len(qkv), qkv.stride(0), ROWS=rows, STEP=step, num_warps=warps,
                                                   num_stages=stages, **shape)
    return out, lse


@torch.library.custom_op("nanojepa::attention_backward", mutates_args=())
def backward(grad: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, heads: int, kv_heads: int, sees: torch.Tensor,
             columns: torch.Tensor, local: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, two: bool, tiles: list[int]) -> torch.Tensor:
    """-> the gradient of qkv (T, (H + 2 Hkv) K): three kernels write its three parts."""
    shape, t = sizes(heads, kv_heads, qkv, two), Tiles.unflat(tiles)
    grad, dqkv, delta = grad.contiguous(), qkv.new_empty(qkv.shape), torch.empty_like(lse)
    with torch.cuda.device_of(qkv):
        if len(local):
            local_backward_kernel[len(local), kv_heads](qkv, grad, lse, dqkv, sees, local, len(qkv), qkv.stride(0), SIZE=t.local[0],
                                                        num_warps=t.local[2], **shape)
        if len(queries):
            rows, step, warps, stages = t.queries
            queries_kernel[len(queries), kv_heads](qkv, out, grad, lse, delta, dqkv, sees, queries, len(qkv), qkv.stride(0), ROWS=rows, STEP=step,
                                                   num_warps=warps, num_stages=stages, **shape)
            block, rows, warps, stages = t.keys
            keys_kernel[len(keys), kv_heads](qkv, grad, lse, delta, dqkv, columns, keys, len(qkv), qkv.stride(0), KEYS=block, ROWS=rows,
                                             num_warps=warps, num_stages=stages, **shape)
    return dqkv


@forward.register_fake
def _(qkv, heads, kv_heads, *schedule):
    size = qkv.shape[1] // (heads + 2 * kv_heads)
    return qkv.new_empty(len(qkv), heads * size), qkv.new_empty(kv_heads, len(qkv) * heads // kv_heads, dtype=torch.float32)


@backward.register_fake
def _(grad, qkv, *rest):
    return qkv.new_empty(qkv.shape)


def remember(ctx, inputs, output):
    qkv, ctx.heads, ctx.kv_heads, *schedule, ctx.two, ctx.tiles = inputs
    ctx.save_for_backward(qkv, *output, *schedule)


def differentiate(ctx, grad, _):
    qkv, out, lse, *schedule = ctx.saved_tensors
    return backward(grad, qkv, out, lse, ctx.heads, ctx.kv_heads, *schedule, ctx.two, ctx.tiles), *[None] * 9


forward.register_autograd(differentiate, setup_context=remember)


def attention(qkv, heads, kv_heads, sees, plan):
    """qkv (T, (H + 2 Hkv) K), heads of q, then k, then v; sees (T, 4) int32 and its Plan on the same device -> (T, H K). Softmax scale 1 / sqrt(K)."""
    if qkv.stride(1) != 1:
        raise ValueError(f"qkv has stride {qkv.stride(1)} along its heads: the kernel reads neighbours, so make it contiguous")
    return forward(qkv, heads, kv_heads, sees, *plan[:5], plan.tiles.flat())[0]
