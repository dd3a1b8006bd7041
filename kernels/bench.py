"""Time attention and the loss over a large vocabulary against what else computes the same.

The sides of a table run in turn, on a GPU if there is one, otherwise on one CPU thread. Times are
medians, and "times ours" is the time of a side divided by ours in the same round. Nothing is timed
unless all sides return the same. A side that cannot run says why.
"""

import functools
import statistics
import time
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from . import layout_of, make_plan
from .cross_entropy import linear_cross_entropy
from .padded import padded_attention

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float32  # Triton's interpreter gets bfloat16 wrong
ROUNDS = 5

# ---- the clock


def milliseconds(run):
    """Time a function: on a GPU with an emptied cache; on a CPU the time of this thread, whatever
    else the machine does."""
    if GPU:
        import triton.testing
        return triton.testing.do_bench(run, warmup=20, rep=60, return_mode="median")
    start = time.thread_time()
    run()
    return 1000 * (time.thread_time() - start)


def interleaved(sides, clock=milliseconds, rounds=None):
    """Time {side: {way: function}} in turn, after one call to warm up: clock(function) runs it and
    returns its milliseconds. Of a side's ways the fastest counts. Return {side: {"ms", "times
    ours", ...}}; a side that cannot run says why. The first side is ours and may not fail."""
    times, failed = {}, {}
    ours = next(iter(sides))
    for side, ways in sides.items():
        for way, run in ways.items():
            try:
                run()
                times[side, way] = []
            except Exception as error:  # it may not support this layout or GPU, or lack memory
                if side == ours:
                    raise
                failed[side] = {"failed": repr(error)[:100].replace("\n", " ")}
    for _ in range(rounds or ROUNDS):
        for (side, way), values in times.items():
            values.append(clock(sides[side][way]))
    best = {}
    for side, way in sorted(times, key=lambda key: statistics.median(times[key])):
        best.setdefault(side, way)
    table = {}
    for side, ways in sides.items():
        if side not in best:
            table[side] = failed[side]
            continue
        values = times[side, best[side]]
        ratios = sorted(np.divide(values, times[ours, best[ours]]).tolist())
        table[side] = {"with": best[side]} if len(ways) > 1 else {}
        table[side] |= {"ms": round(statistics.median(values), 4),
                        "times ours": round(statistics.median(ratios), 2),
                        "range": f"{ratios[0]:.2f} to {ratios[-1]:.2f}"}
    return table


# ---- attention: every side maps one projection (T, (H + 2 Hkv) K) to (T, H K)


class Shape(NamedTuple):
    """The mask of a batch, as kernels/attention.py describes it, and its heads."""
    key_ranges: np.ndarray  # (T, 4) int32
    cu_seqlens: np.ndarray  # (R + 1,) int32
    heads: int  # H
    kv_heads: int  # Hkv
    head_dim: int  # K

    def plan(self, back_end):
        """Return the attention plan of this batch, on DEVICE."""
        layout = layout_of(back_end, *self[2:], DTYPE.itemsize)
        return to_device(make_plan(layout, *self[:2], DEVICE))

    def split_heads(self, line):
        """Return q (T, H, K), k and v (T, Hkv, K) of a projection."""
        heads = [self.heads, self.kv_heads, self.kv_heads]
        return line.unflatten(1, (-1, self.head_dim)).split(heads, 1)


def to_device(value):
    """Move every tensor of a plan to DEVICE."""
    if torch.is_tensor(value):
        return value.to(DEVICE)
    if isinstance(value, (list, tuple)):
        items = map(to_device, value)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def shape_of(rows, heads, kv_heads, head_dim):
    """Return the Shape of rows, which are lists of segments (length, causal, prefix). A prefix is
    (index of an earlier segment of the row, number of its first tokens), or None."""
    key_ranges, cu_seqlens, end = [], [0], 0
    for row in rows:
        starts = []
        for length, causal, prefix in row:
            start, end = end, end + length
            starts.append(start)
            ranges = np.zeros((length, 4), np.int32)
            ranges[:, 0] = start
            ranges[:, 1] = np.arange(start + 1, end + 1) if causal else end
            if prefix:
                ranges[:, 2:] = starts[prefix[0]], starts[prefix[0]] + prefix[1]
            key_ranges.append(ranges)
        cu_seqlens.append(end)
    return Shape(np.concatenate(key_ranges), np.array(cu_seqlens, np.int32), heads, kv_heads,
                 head_dim)


def lengths(count, mean, spread, low, high, seed=0):
    """Return random lengths of texts in tokens, log-normal: (count,)."""
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(np.log(mean) - spread**2 / 2, spread, count)
    return drawn.clip(low, high).astype(int)


# Lengths of both texts of a pair in tokens: mean, spread, smallest and largest.
SENTENCES = [(33, 0.7, 2, 198)] * 2
NL_RX = [(17, 0.2, 8, 40), (12, 0.3, 4, 40)]
GSM8K = [(60, 0.4, 15, 200), (74, 0.45, 15, 300)]


def pair_lengths(pairs, both):
    return [lengths(pairs, *of, seed) for seed, of in enumerate(both)]


def encoder(lengths):
    return [[(length, False, None)] for length in lengths]


def mexma(pairs):
    """Both sentences of each pair, masked and clean, between [CLS] and [SEP]."""
    return encoder(np.tile(np.concatenate(pair_lengths(pairs, SENTENCES)) + 2, 2))


def bert_jepa(pairs):
    """Each pair as one row, and twice more with one of its sentences masked."""
    return encoder(np.tile(sum(pair_lengths(pairs, SENTENCES)) + 4, 3))


def llm_jepa(pairs, both):
    """Rows of a Text that ends with [PRED], the Code, which sees the Text without [PRED], and the
    Code once more, which sees [CLS] alone."""
    return [[(text + 2, True, None), (code + 1, True, (0, text + 1)), (code, True, (0, 1))]
            for text, code in zip(*pair_lengths(pairs, both))]


def causal(count, length):
    return [[(length, True, None)]] * count


XLM_R, LLAMA = (16, 16, 64), (32, 8, 64)  # heads of XLM-R large and Llama 1B: H, Hkv, K
# {title: (rows, heads)} of the papers' batches, and of long causal rows.
SHAPES = {"MEXMA": (mexma(150), XLM_R),
          "BERT-JEPA": (bert_jepa(64), XLM_R),
          "LLM-JEPA on NL-RX": (llm_jepa(64, NL_RX), LLAMA),
          "LLM-JEPA on GSM8K": (llm_jepa(16, GSM8K), LLAMA),
          "16 causal documents of 2048": (causal(16, 2048), LLAMA),
          "a causal document of 16384": (causal(1, 16384), (16, 16, 128))}


def ours(shape):
    from .attention import attention
    plan, key_ranges = shape.plan("triton"), torch.from_numpy(shape.key_ranges).to(DEVICE)
    return lambda line: attention(line, shape.heads, shape.kv_heads, key_ranges, plan)


def sdpa(shape):
    plan = shape.plan("sdpa")
    return lambda line: padded_attention(line, shape.heads, shape.kv_heads, plan)


def flex(shape):
    """FlexAttention with a block mask of our rule; on a CPU it is not compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    low, high, low2, high2 = torch.from_numpy(shape.key_ranges).to(DEVICE).T.contiguous()

    def visible(batch, head, query, key):
        own = (low[query] <= key) & (key < high[query])
        return own | (low2[query] <= key) & (key < high2[query])

    compiled = functools.partial(torch.compile, dynamic=False, disable=not GPU)
    count = len(shape.key_ranges)
    mask = compiled(create_block_mask)(visible, None, None, count, count, device=DEVICE)
    attention = compiled(flex_attention)

    def attend(line):
        q, k, v = (x.transpose(0, 1)[None] for x in shape.split_heads(line))
        return attention(q, k, v, block_mask=mask, enable_gqa=True)[0].transpose(0, 1).flatten(1)

    return attend


def varlen(shape):
    """PyTorch's kernel for rows end to end, bidirectional or causal."""
    from torch.nn.attention.varlen import varlen_attn
    if shape.key_ranges[:, 3].any():
        raise ValueError("its tokens see one range")
    is_causal = (shape.key_ranges[:, 1] == np.arange(1, len(shape.key_ranges) + 1)).all()
    bounds = torch.from_numpy(shape.cu_seqlens).to(DEVICE)
    rows = (bounds, bounds, *[int(np.diff(shape.cu_seqlens).max())] * 2)
    options = dict(window_size=(-1, 0 if is_causal else -1), enable_gqa=True)
    return lambda line: varlen_attn(*shape.split_heads(line), *rows, **options).flatten(1)


SIDES = {"ours": ours, "our SDPA back end": sdpa, "FlexAttention": flex, "torch varlen": varlen}


def time_attention(shape, backward):
    """Time one or both passes of all sides. A side that disagrees with ours is not timed."""
    torch.manual_seed(0)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    line = torch.randn(len(shape.key_ranges), width, device=DEVICE, dtype=DTYPE,
                       requires_grad=True)
    expected = ours(shape)(line.detach())

    @functools.cache
    def built(side):
        attend = SIDES[side](shape)
        if (attend(line.detach()) - expected).abs().max() > 0.03:
            raise ValueError("disagrees with ours")
        return attend

    def run(side):
        if backward:
            torch.autograd.grad(built(side)(line).sum(), line)
        else:
            built(side)(line.detach())

    return interleaved({side: {"": functools.partial(run, side)} for side in SIDES})


def attention_tables():
    """Yield (title, table) of each shape: the forward pass, and both passes."""
    for title, (rows, heads) in SHAPES.items():
        shape = shape_of(rows, *heads)
        yield f"attention forward: {title}", time_attention(shape, backward=False)
        yield f"attention, both passes: {title}", time_attention(shape, backward=True)


# ---- the loss over a large vocabulary


def cross_entropy_table(count=4096, width=1024, vocab=250_002):
    """Return the table of the loss of `count` states and its gradients, of XLM-R large."""
    torch.manual_seed(0)
    states = torch.randn(count, width, device=DEVICE, dtype=DTYPE, requires_grad=True)
    weight = torch.randn(vocab, width, device=DEVICE, dtype=DTYPE).mul_(0.05).requires_grad_()
    targets = torch.randint(vocab, (count,), device=DEVICE)

    def plain():
        logits = F.linear(states, weight).float()
        return F.cross_entropy(logits, targets, reduction="sum")

    sides = {"ours": lambda: linear_cross_entropy(states, weight, None, targets),
             "PyTorch, all logits at once": plain}

    def run(side):
        loss = sides[side]()
        return loss.detach(), torch.autograd.grad(loss, (states, weight))

    with torch.no_grad():
        own, other = (sides[side]() for side in sides)
    if abs(own - other) > 1e-3 * other:
        raise ValueError(f"our loss is {own}, and PyTorch's is {other}")
    return interleaved({side: {"": functools.partial(run, side)} for side in sides})
