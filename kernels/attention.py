"""Attention over one packed line, on a GPU: forward, backward, and the operation.

    token i may attend to key j   iff   key_ranges[i,0] <= j < key_ranges[i,1]
                                  or    key_ranges[i,2] <= j < key_ranges[i,3]

The mask is four integers a token, and schedule.py lists the tiles to visit. The kernels read q, k
and v from one fused projection (T, (H + 2 Hkv) K) and write their gradients into one tensor of the
same shape, so nothing is transposed or concatenated. There are no atomics: the same input gives the
same bits. The softmax is online, base 2, in float32 [Milakov & Gimelshein 2018; Dao 2023].

G = H / Hkv query heads, a group, read one head of keys. In the general kernels they are rows of one
tile: row r is token r // G, head r % G.
"""

import math

import torch
import triton
import triton.language as tl

from .schedule import Tiles

# ---- what all kernels share


@triton.jit
def intervals(table, token, live, TWO: tl.constexpr):
    """Load the two intervals of tokens (n,) from a table (T, 4); a token that is not live has
    none."""
    at = table + token * 4
    low = tl.load(at, mask=live, other=0)
    high = tl.load(at + 1, mask=live, other=0)
    low2 = low
    high2 = low  # empty
    if TWO:
        low2 = tl.load(at + 2, mask=live, other=0)
        high2 = tl.load(at + 3, mask=live, other=0)
    return low, high, low2, high2


@triton.jit
def inside(low, high, low2, high2, index, TWO: tl.constexpr):
    """Return the mask of intervals (n,) and token indices (m,): (n, m)."""
    mask = (low[:, None] <= index[None, :]) & (index[None, :] < high[:, None])
    if TWO:
        mask |= (low2[:, None] <= index[None, :]) & (index[None, :] < high2[:, None])
    return mask


@triton.jit
def dot(a, b):
    """Multiply matrices without rounding float32 to tf32, which a GPU does by default."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def scaled(gradient, SCALE: tl.constexpr):
    """Scale ds k or ds' q to the gradient of q or k: the scores are q k' SCALE, in base 2."""
    return gradient * (SCALE * 0.6931471805599453)


@triton.jit
def block_of(table, number):
    """Load a block of the schedule: first token, last + 1, its two ranges, and its core's end."""
    at = table + number * 7
    return (tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4),
            tl.load(at + 5), tl.load(at + 6))


@triton.jit
def count_trips(lo, hi, lo2, hi2, core, STEP: tl.constexpr):
    """Return the number of full tiles, which come first, and of all tiles. In a full tile every
    pair is visible, so it needs no mask."""
    return (core - lo) // STEP, tl.cdiv(hi - lo, STEP) + tl.cdiv(hi2 - lo2, STEP)


@triton.jit
def step(t, lo, hi, lo2, hi2, STEP: tl.constexpr):
    """Return the first token of trip t over two ranges, and the end of its range."""
    first = tl.cdiv(hi - lo, STEP)
    start = tl.where(t < first, lo + t * STEP, lo2 + (t - first) * STEP)
    return start, tl.where(t < first, hi, hi2)


@triton.jit
def load_rows(at, real, MASKED: tl.constexpr):
    """Load rows (n, K). If MASKED, rows that are not real are 0; otherwise all are real."""
    if MASKED:
        return tl.load(at, mask=real[:, None], other=0.0)
    return tl.load(at)


@triton.jit
def offset(first, stride):
    """Return the offset of a block in memory, which needs 64 bits; within a block 32 suffice."""
    return first.to(tl.int64) * stride


# ---- forward: a block of queries against its ranges of keys


@triton.jit(do_not_specialize=["tokens"])
def forward_kernel(qkv, out, lse, key_ranges, blocks, tokens, stride,
                   H: tl.constexpr, HKV: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
                   STEP: tl.constexpr, TWO: tl.constexpr, SCALE: tl.constexpr):
    G: tl.constexpr = H // HKV
    kv = tl.program_id(1)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, K)
    first, last, lo, hi, lo2, hi2, core = block_of(blocks, tl.program_id(0))
    token = first + r // G
    head = kv * G + r % G
    live = token < last
    at = qkv + offset(first, stride) + ((r // G) * stride + head * K)[:, None] + d[None, :]
    q = tl.load(at, mask=live[:, None], other=0.0)  # (ROWS, K)
    keys = qkv + (H + kv) * K + tl.arange(0, STEP)[:, None] * stride + d[None, :]
    # A finite start value, so that a tile of masked keys needs no special case.
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, K], tl.float32)
    full, count = count_trips(lo, hi, lo2, hi2, core, STEP)
    for MASKED in tl.static_range(2):  # 0: the full tiles, 1: the others
        if MASKED:
            low, high, low2, high2 = intervals(key_ranges, token, live, TWO)
        for t in range(full if MASKED else 0, count if MASKED else full):
            start, end = step(t, lo, hi, lo2, hi2, STEP)
            index = start + tl.arange(0, STEP)
            real = index < end
            k = load_rows(keys + offset(start, stride), real, MASKED)  # (STEP, K)
            v = load_rows(keys + offset(start, stride) + HKV * K, real, MASKED)
            scores = dot(q, tl.trans(k)) * SCALE  # (ROWS, STEP)
            if MASKED:
                visible = inside(low, high, low2, high2, index, TWO) & real[None, :]
                scores = tl.where(visible, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            p = tl.exp2(scores - higher[:, None])
            fade = tl.exp2(top - higher)
            total = total * fade + tl.sum(p, 1)
            mean = mean * fade[:, None] + dot(p.to(v.dtype), v)
            top = higher
    dead = total == 0.0
    total = tl.where(dead, 1.0, total)
    mean = mean / total[:, None]
    at = out + offset(first, H * K) + ((r // G) * H * K + head * K)[:, None] + d[None, :]
    tl.store(at, mean.to(out.dtype.element_ty), mask=live[:, None])
    # lse is (Hkv, T G), so that a tile writes neighbors. With +inf all weights of a token that sees
    # nothing are 0 in the backward.
    at = lse + (kv.to(tl.int64) * tokens + first) * G + r
    tl.store(at, tl.where(dead, float("inf"), top + tl.log2(total)), mask=live)


# ---- backward

# dp = do v' and ds = p (dp - delta), with delta = rowsum(do o).
# Then dq = scale ds k, dk = scale ds' q and dv = p' do.


@triton.jit(do_not_specialize=["tokens"])
def queries_kernel(qkv, out, grad, lse, delta, dqkv, key_ranges, blocks, tokens, stride,
                   H: tl.constexpr, HKV: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
                   STEP: tl.constexpr, TWO: tl.constexpr, SCALE: tl.constexpr):
    """Compute dq of a block of queries, and delta, which keys_kernel reads later."""
    G: tl.constexpr = H // HKV
    kv = tl.program_id(1)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, K)
    first, last, lo, hi, lo2, hi2, core = block_of(blocks, tl.program_id(0))
    token = first + r // G
    head = kv * G + r % G
    live = token < last
    at = qkv + offset(first, stride) + ((r // G) * stride + head * K)[:, None] + d[None, :]
    q = tl.load(at, mask=live[:, None], other=0.0)
    at = offset(first, H * K) + ((r // G) * H * K + head * K)[:, None] + d[None, :]
    do = tl.load(grad + at, mask=live[:, None], other=0.0)  # (ROWS, K)
    o = tl.load(out + at, mask=live[:, None], other=0.0)
    flat = (kv.to(tl.int64) * tokens + first) * G + r
    top = tl.load(lse + flat, mask=live, other=float("inf"))
    through = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta + flat, through, mask=live)
    keys = qkv + (H + kv) * K + tl.arange(0, STEP)[:, None] * stride + d[None, :]
    dq = tl.zeros([ROWS, K], tl.float32)
    full, count = count_trips(lo, hi, lo2, hi2, core, STEP)
    for MASKED in tl.static_range(2):  # 0: the full tiles, 1: the others
        if MASKED:
            low, high, low2, high2 = intervals(key_ranges, token, live, TWO)
        for t in range(full if MASKED else 0, count if MASKED else full):
            start, end = step(t, lo, hi, lo2, hi2, STEP)
            index = start + tl.arange(0, STEP)
            real = index < end
            k = load_rows(keys + offset(start, stride), real, MASKED)
            v = load_rows(keys + offset(start, stride) + HKV * K, real, MASKED)
            scores = dot(q, tl.trans(k)) * SCALE
            if MASKED:
                visible = inside(low, high, low2, high2, index, TWO) & real[None, :]
                scores = tl.where(visible, scores, float("-inf"))
            p = tl.exp2(scores - top[:, None])
            ds = p * (dot(do, tl.trans(v)) - through[:, None])
            dq += dot(ds.to(k.dtype), k)
    wide = (H + 2 * HKV) * K
    at = dqkv + offset(first, wide) + ((r // G) * wide + head * K)[:, None] + d[None, :]
    tl.store(at, scaled(dq, SCALE).to(q.dtype), mask=live[:, None])


@triton.jit(do_not_specialize=["tokens"])
def keys_kernel(qkv, grad, lse, delta, dqkv, query_ranges, blocks, tokens, stride,
                H: tl.constexpr, HKV: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr,
                ROWS: tl.constexpr, TWO: tl.constexpr, SCALE: tl.constexpr):
    """Compute dk and dv of a block of keys, summed over the G query heads in registers. The scores
    are transposed, k q', because the matmuls need p' and ds'. The keys' intervals of queries stay
    in registers for the whole loop."""
    G: tl.constexpr = H // HKV
    STEP: tl.constexpr = ROWS // G  # tokens a trip
    kv = tl.program_id(1)
    d = tl.arange(0, K)
    r = tl.arange(0, ROWS)
    n = tl.arange(0, KEYS)
    first, last, lo, hi, lo2, hi2, core = block_of(blocks, tl.program_id(0))
    live = first + n < last
    at = qkv + offset(first, stride) + (H + kv) * K + (n[:, None] * stride + d[None, :])
    k = tl.load(at, mask=live[:, None], other=0.0)  # (KEYS, K)
    v = tl.load(at + HKV * K, mask=live[:, None], other=0.0)
    head = kv * G + r % G
    rows = qkv + ((r // G) * stride + head * K)[:, None] + d[None, :]
    outs = grad + ((r // G) * H * K + head * K)[:, None] + d[None, :]
    dk = tl.zeros([KEYS, K], tl.float32)
    dv = tl.zeros([KEYS, K], tl.float32)
    full, count = count_trips(lo, hi, lo2, hi2, core, STEP)
    for MASKED in tl.static_range(2):  # 0: the full tiles, 1: the others
        if MASKED:
            low, high, low2, high2 = intervals(query_ranges, first + n, live, TWO)
        for t in range(full if MASKED else 0, count if MASKED else full):
            start, end = step(t, lo, hi, lo2, hi2, STEP)
            index = start + r // G
            # Where G does not divide ROWS, rows are left over, also in full tiles: their top is
            # inf, which makes their weights 0.
            real = (index < end) & (r < STEP * G)
            q = tl.load(rows + offset(start, stride), mask=real[:, None], other=0.0)  # (ROWS, K)
            do = tl.load(outs + offset(start, H * K), mask=real[:, None], other=0.0)
            flat = (kv.to(tl.int64) * tokens + start) * G + r
            top = tl.load(lse + flat, mask=real, other=float("inf"))
            through = tl.load(delta + flat, mask=real, other=0.0)
            scores = dot(k, tl.trans(q)) * SCALE
            if MASKED:
                visible = inside(low, high, low2, high2, index, TWO) & real[None, :]
                scores = tl.where(visible, scores, float("-inf"))
            p = tl.exp2(scores - top[None, :])  # (KEYS, ROWS)
            dv += dot(p.to(do.dtype), do)
            ds = p * (dot(v, tl.trans(do)) - through[None, :])
            dk += dot(ds.to(q.dtype), q)
    wide = (H + 2 * HKV) * K
    at = dqkv + offset(first, wide) + (H + kv) * K + (n[:, None] * wide + d[None, :])
    tl.store(at, scaled(dk, SCALE).to(k.dtype), mask=live[:, None])
    tl.store(at + HKV * K, dv.to(v.dtype), mask=live[:, None])


# ---- local tiles: every key of a tile's tokens is in the tile


@triton.jit(do_not_specialize=["tokens"])
def local_forward_kernel(qkv, out, lse, key_ranges, tiles, tokens, stride,
                         H: tl.constexpr, HKV: tl.constexpr, K: tl.constexpr,
                         SIZE: tl.constexpr, TWO: tl.constexpr, SCALE: tl.constexpr):
    """Compute one head of one tile: two matmuls and a plain softmax, no loop.

    A tile has tokens of several rows. An infinity in the values of one row makes the other rows of
    its tile NaN, because they give it the weight 0, and 0 * infinity is NaN. (SDPA has one row at a
    time, so there only this row is NaN.) To remove it here takes twice the registers at every step,
    and a model that gives infinities has diverged.
    """
    G: tl.constexpr = H // HKV
    head = tl.program_id(1)
    n = tl.arange(0, SIZE)
    d = tl.arange(0, K)
    first = tl.load(tiles + tl.program_id(0) * 2)
    last = tl.load(tiles + tl.program_id(0) * 2 + 1)
    token = first + n
    live = token < last
    at = qkv + offset(first, stride) + n[:, None] * stride + d[None, :]
    q = tl.load(at + head * K, mask=live[:, None], other=0.0)  # (SIZE, K)
    k = tl.load(at + (H + head // G) * K, mask=live[:, None], other=0.0)
    v = tl.load(at + (H + HKV + head // G) * K, mask=live[:, None], other=0.0)
    low, high, low2, high2 = intervals(key_ranges, token, live, TWO)
    visible = inside(low, high, low2, high2, token, TWO)
    scores = tl.where(visible, dot(q, tl.trans(k)) * SCALE, float("-inf"))  # (SIZE, SIZE)
    top = tl.maximum(tl.max(scores, 1), -1e30)
    p = tl.exp2(scores - top[:, None])
    total = tl.sum(p, 1)
    dead = total == 0.0
    total = tl.where(dead, 1.0, total)
    mean = dot(p.to(v.dtype), v) / total[:, None]
    at = out + offset(first, H * K) + n[:, None] * H * K + head * K + d[None, :]
    tl.store(at, mean.to(out.dtype.element_ty), mask=live[:, None])
    at = lse + ((head // G).to(tl.int64) * tokens + first) * G + n * G + head % G
    tl.store(at, tl.where(dead, float("inf"), top + tl.log2(total)), mask=live)


@triton.jit(do_not_specialize=["tokens"])
def local_backward_kernel(qkv, grad, lse, dqkv, key_ranges, tiles, tokens, stride,
                          H: tl.constexpr, HKV: tl.constexpr, K: tl.constexpr,
                          SIZE: tl.constexpr, TWO: tl.constexpr, SCALE: tl.constexpr):
    """Compute all three gradients of one tile and one head of keys: five matmuls for each of its G
    query heads. delta = rowsum(p dp)."""
    G: tl.constexpr = H // HKV
    kv = tl.program_id(1)
    n = tl.arange(0, SIZE)
    d = tl.arange(0, K)
    first = tl.load(tiles + tl.program_id(0) * 2)
    last = tl.load(tiles + tl.program_id(0) * 2 + 1)
    token = first + n
    live = token < last
    at = qkv + offset(first, stride) + n[:, None] * stride + d[None, :]
    k = tl.load(at + (H + kv) * K, mask=live[:, None], other=0.0)  # (SIZE, K)
    v = tl.load(at + (H + HKV + kv) * K, mask=live[:, None], other=0.0)
    low, high, low2, high2 = intervals(key_ranges, token, live, TWO)
    visible = inside(low, high, low2, high2, token, TWO)
    wide = (H + 2 * HKV) * K
    into = dqkv + offset(first, wide) + n[:, None] * wide + d[None, :]
    outs = grad + offset(first, H * K) + n[:, None] * H * K + d[None, :]
    dk = tl.zeros([SIZE, K], tl.float32)
    dv = tl.zeros([SIZE, K], tl.float32)
    # One stage: the registers have no room to prefetch the next head.
    for g in tl.range(G, num_stages=1):
        head = kv * G + g
        q = tl.load(at + head * K, mask=live[:, None], other=0.0)
        do = tl.load(outs + head * K, mask=live[:, None], other=0.0)
        flat = (kv.to(tl.int64) * tokens + first) * G + n * G + g
        top = tl.load(lse + flat, mask=live, other=float("inf"))
        scores = tl.where(visible, dot(q, tl.trans(k)) * SCALE, float("-inf"))
        p = tl.exp2(scores - top[:, None])  # (SIZE, SIZE)
        dp = dot(do, tl.trans(v))
        ds = (p * (dp - tl.sum(p * dp, 1)[:, None])).to(q.dtype)
        dv += dot(tl.trans(p.to(do.dtype)), do)
        dk += dot(tl.trans(ds), q)
        tl.store(into + head * K, scaled(dot(ds, k), SCALE).to(q.dtype), mask=live[:, None])
    tl.store(into + (H + kv) * K, scaled(dk, SCALE).to(k.dtype), mask=live[:, None])
    tl.store(into + (H + HKV + kv) * K, dv.to(v.dtype), mask=live[:, None])


# ---- the operation: one opaque node for torch.compile, whose backward is another


def constants(heads, kv_heads, qkv, two):
    """Return the constants that every kernel is compiled with."""
    head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
    scale = math.log2(math.e) / math.sqrt(head_dim)
    return dict(H=heads, HKV=kv_heads, K=head_dim, TWO=two, SCALE=scale)


def new_outputs(qkv, heads, kv_heads):
    """Allocate the output (T, H K), and the base-2 logarithms of the softmax denominators
    (Hkv, T G) in float32. One program writes each element."""
    head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
    tokens = qkv.shape[0]  # len() is a plain number, for which torch.compile would compile again
    out = qkv.new_empty(tokens, heads * head_dim)
    return out, qkv.new_empty(kv_heads, tokens * heads // kv_heads, dtype=torch.float32)


@torch.library.custom_op("nanojepa::attention", mutates_args=())
def forward(qkv: torch.Tensor, heads: int, kv_heads: int, key_ranges: torch.Tensor,
            query_ranges: torch.Tensor, local: torch.Tensor, queries: torch.Tensor,
            keys: torch.Tensor, two: bool, tiles: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the logarithms that `new_outputs` describes."""
    shape = constants(heads, kv_heads, qkv, two)
    t = Tiles.unflat(tiles)
    out, lse = new_outputs(qkv, heads, kv_heads)
    size = (len(qkv), qkv.stride(0))
    # Triton launches on the current device, which can be another than qkv's.
    with torch.cuda.device_of(qkv):
        if len(local):
            local_forward_kernel[len(local), heads](
                qkv, out, lse, key_ranges, local, *size, SIZE=t.local[0], num_warps=t.local[1],
                **shape)
        if len(queries):
            rows, step, warps, stages = t.forward
            forward_kernel[len(queries), kv_heads](
                qkv, out, lse, key_ranges, queries, *size, ROWS=rows, STEP=step, num_warps=warps,
                num_stages=stages, **shape)
    return out, lse


@torch.library.custom_op("nanojepa::attention_backward", mutates_args=())
def backward(grad: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
             heads: int, kv_heads: int, key_ranges: torch.Tensor, query_ranges: torch.Tensor,
             local: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, two: bool,
             tiles: list[int]) -> torch.Tensor:
    """Return the gradient of qkv (T, (H + 2 Hkv) K): three kernels write its three parts."""
    shape = constants(heads, kv_heads, qkv, two)
    t = Tiles.unflat(tiles)
    grad = grad.contiguous()
    dqkv = qkv.new_empty(qkv.shape)
    delta = torch.empty_like(lse)
    size = (len(qkv), qkv.stride(0))
    with torch.cuda.device_of(qkv):
        if len(local):
            local_backward_kernel[len(local), kv_heads](
                qkv, grad, lse, dqkv, key_ranges, local, *size, SIZE=t.local[0],
                num_warps=t.local[2], **shape)
        if len(queries):
            rows, step, warps, stages = t.queries
            queries_kernel[len(queries), kv_heads](
                qkv, out, grad, lse, delta, dqkv, key_ranges, queries, *size, ROWS=rows,
                STEP=step, num_warps=warps, num_stages=stages, **shape)
            block, rows, warps, stages = t.keys
            keys_kernel[len(keys), kv_heads](
                qkv, grad, lse, delta, dqkv, query_ranges, keys, *size, KEYS=block, ROWS=rows,
                num_warps=warps, num_stages=stages, **shape)
    return dqkv


@forward.register_fake
def _(qkv, heads, kv_heads, *schedule):
    return new_outputs(qkv, heads, kv_heads)


@backward.register_fake
def _(grad, qkv, *rest):
    return qkv.new_empty(qkv.shape)


def remember(ctx, inputs, output):
    qkv, ctx.heads, ctx.kv_heads, *schedule, ctx.two, ctx.tiles = inputs
    ctx.save_for_backward(qkv, *output, *schedule)


def differentiate(ctx, grad, _):
    qkv, out, lse, *schedule = ctx.saved_tensors
    heads = (ctx.heads, ctx.kv_heads)
    dqkv = backward(grad, qkv, out, lse, *heads, *schedule, ctx.two, ctx.tiles)
    return dqkv, *[None] * 9


forward.register_autograd(differentiate, setup_context=remember)


def attention(qkv, heads, kv_heads, key_ranges, plan):
    """Compute attention by the kernels: (T, (H + 2 Hkv) K) -> (T, H K), from heads of q, then k,
    then v. key_ranges (T, 4) int32 and its Plan are on the same device. The softmax's scale is
    1 / sqrt(K)."""
    if qkv.stride(1) != 1:
        raise ValueError(f"qkv has stride {qkv.stride(1)} along its heads: make it contiguous")
    return forward(qkv, heads, kv_heads, key_ranges, *plan[:5], plan.tiles.flat())[0]
