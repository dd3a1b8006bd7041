"""Compare our kernels with PyTorch's attention in float64, and time attention and the loss over a
large vocabulary against what else computes the same.

The sides of a table run in turn, on a GPU if there is one, otherwise on one CPU thread. Times are
medians, and "times ours" is the time of a side divided by ours in the same round. Nothing is timed
unless all sides return the same, gradients too. A side that cannot run says why.

On a GPU, "GB" is the peak memory that a side adds, and the time of attention is that of a CUDA
graph: a short pass takes less time than Python needs to launch it.
"""

import functools
import statistics
import time
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from . import packed_attention
from .cross_entropy import linear_cross_entropy

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float32  # Triton's interpreter gets bfloat16 wrong
ROUNDS = 2 if GPU else 5  # on a GPU, each is a median already

# ---- the clock


def milliseconds(run):
    """Time a function with its launch: on a GPU with an emptied cache; on a CPU the time of this
    thread, whatever else the machine does."""
    if GPU:
        import triton.testing
        return triton.testing.do_bench(run, warmup=20, rep=60, return_mode="median")
    start = time.thread_time()
    run()
    return 1000 * (time.thread_time() - start)


def milliseconds_of_kernels(run):
    """Time what a function runs on the GPU, without its launch."""
    if not GPU:
        return milliseconds(run)
    import triton.testing
    return triton.testing.do_bench_cudagraph(run, return_mode="median")


def interleaved(sides, clock=milliseconds):
    """Time {side: function} in turn, after one call to warm up. Return {side: {"ms", "times ours",
    "range"}}, on a GPU with "GB". The first side is ours and may not fail."""
    table, times = {}, {}
    for side, run in sides.items():
        try:
            before = torch.cuda.memory_allocated()
            if GPU:
                torch.cuda.reset_peak_memory_stats()
            run()
            added = torch.cuda.max_memory_allocated() - before
            table[side] = {"GB": round(added / 1e9, 2)} if GPU else {}
            times[side] = []
        except Exception as error:  # it may not support this layout or GPU, or lack memory
            if not times:
                raise
            table[side] = {"failed": repr(error)[:100].replace("\n", " ")}
    for _ in range(ROUNDS):
        for side, values in times.items():
            values.append(clock(sides[side]))
    ours = next(iter(times.values()))
    for side, values in times.items():
        ratios = sorted(theirs / own for theirs, own in zip(values, ours))
        table[side] |= {"ms": round(statistics.median(values), 4),
                        "times ours": round(statistics.median(ratios), 2),
                        "range": f"{ratios[0]:.2f} to {ratios[-1]:.2f}"}
    return table


# ---- attention: every side maps one projection (T, (H + 2 Hkv) K) to (T, H K)


class Shape(NamedTuple):
    """A batch and the heads of a model."""
    packed: Any  # a model.Packed on DEVICE
    heads: int  # H
    kv_heads: int  # Hkv
    head_dim: int  # K

    def random_line(self, dtype):
        """Return a projection (T, (H + 2 Hkv) K) and a gradient of the output (T, H K)."""
        torch.manual_seed(0)
        line, grad = (torch.randn(len(self.packed.tokens), count * self.head_dim, device=DEVICE,
                                  dtype=dtype)
                      for count in (self.heads + 2 * self.kv_heads, self.heads))
        return line.requires_grad_(), grad

    def split_heads(self, line):
        """Return q (T, H, K), k and v (T, Hkv, K) of a projection."""
        heads = [self.heads, self.kv_heads, self.kv_heads]
        return line.unflatten(1, (-1, self.head_dim)).split(heads, 1)


def back_end(name, shape):
    return lambda line: packed_attention(line, shape.heads, shape.kv_heads, shape.packed, name)


def flex(shape):
    """FlexAttention with a block mask of our rule; on a CPU it is not compiled."""
    # After eight compilations PyTorch would run the next shape uncompiled, which takes many times
    # the time and memory. With fullgraph it raises an error instead.
    torch._dynamo.reset()
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    low, high, low2, high2 = shape.packed.key_ranges.T.contiguous()

    def visible(batch, head, query, key):
        own = (low[query] <= key) & (key < high[query])
        return own | (low2[query] <= key) & (key < high2[query])

    compiled = functools.partial(torch.compile, dynamic=False, disable=not GPU)
    count = len(shape.packed.tokens)
    mask = compiled(create_block_mask)(visible, None, None, count, count, device=DEVICE)
    attention = compiled(flex_attention, fullgraph=True)

    def attend(line):
        q, k, v = (x.transpose(0, 1)[None] for x in shape.split_heads(line))
        return attention(q, k, v, block_mask=mask, enable_gqa=True)[0].transpose(0, 1).flatten(1)

    return attend


def varlen(shape):
    """PyTorch's kernel for rows end to end, bidirectional or causal."""
    from torch.nn.attention.varlen import varlen_attn
    ranges, bounds = shape.packed.key_ranges, shape.packed.cu_seqlens
    if ranges[:, 3].any():
        raise ValueError("its tokens see one range")
    is_causal = bool((ranges[:, 1] == torch.arange(1, len(ranges) + 1, device=DEVICE)).all())
    rows = (bounds, bounds, *[int(bounds.diff().max())] * 2)
    options = dict(window_size=(-1, 0 if is_causal else -1))
    if shape.heads != shape.kv_heads:
        options["enable_gqa"] = True  # PyTorch 2.11 does not have it
    return lambda line: varlen_attn(*shape.split_heads(line), *rows, **options).flatten(1)


SIDES = {"ours": functools.partial(back_end, "triton"),
         "our SDPA back end": functools.partial(back_end, "sdpa"),
         "torch varlen": varlen, "FlexAttention": flex}


def passes(attend, line, grad):
    """Return the output of a side, and the gradient of its projection."""
    output = attend(line)
    return output.detach(), torch.autograd.grad(output, line, grad)[0]


def difference(found, expected):
    """Return the largest difference, relative to the largest value, or absolute if that is below
    1."""
    return float((found - expected).abs().max() / max(1, expected.abs().max()))


def attention_table(shape, peers):
    """Return the table of a shape, of both passes, for ours and these peers."""
    line, grad = shape.random_line(DTYPE)
    expected = passes(back_end("sdpa", shape), line, grad)

    @functools.cache
    def built(side):
        attend = SIDES[side](shape)
        for found, other in zip(passes(attend, line, grad), expected):
            if not (worst := difference(found, other)) <= 0.03:  # NaN is too large
                raise ValueError(f"differs from our SDPA back end by {worst:.3g}")
        return attend

    sides = {side: lambda side=side: passes(built(side), line, grad) for side in ("ours", *peers)}
    return interleaved(sides, milliseconds_of_kernels)


def attention_parts(shapes, *peers):
    """Return {title of a table: function that makes it} of {title: Shape}."""
    return {f"attention: {title}, against {' and '.join(peers)}":
            functools.partial(attention_table, shape, peers) for title, shape in shapes.items()}


# ---- each kernel against PyTorch's attention in float64

LIMIT = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def check(shape, dtype):
    """Return the table of the largest errors of our output and its gradients, against float64.
    Raises ValueError if one is too large."""
    line, grad = shape.random_line(dtype)
    exact = line.detach().double().requires_grad_()
    both = []
    for attend, *given in ((back_end("triton", shape), line, grad),
                           (back_end("sdpa", shape), exact, grad.double())):
        output, gradient = passes(attend, *given)
        both.append((output, *shape.split_heads(gradient)))
    errors = {name: difference(found.double(), expected)
              for name, found, expected in zip(("output", "dq", "dk", "dv"), *both)}
    if not all(error <= LIMIT[dtype] for error in errors.values()):  # NaN is too large
        raise ValueError(f"errors {errors} are larger than {LIMIT[dtype]:g}")
    return {name: {"largest error": f"{error:.2g}", "limit": f"{LIMIT[dtype]:g}"}
            for name, error in errors.items()}


def check_parts(masks):
    """Return {title of a check: function that makes its table} of masks {kernels: a Packed that
    needs them}."""
    # Triton's interpreter gets bfloat16 wrong.
    dtypes = [dtype for dtype in LIMIT if GPU or dtype != torch.bfloat16]
    return {f"check of {names}, heads of size {size}, {str(dtype)[6:]}":
            functools.partial(check, Shape(packed, 4, 2, size), dtype)
            for dtype in dtypes for size in (64, 128) for names, packed in masks.items()}


# ---- the loss over a large vocabulary


def cross_entropy_table(count=4096 if GPU else 9, width=1024, vocab=250_002 if GPU else 99):
    """Return the table of the loss of `count` states and its gradients, of XLM-R large."""
    torch.manual_seed(0)
    states = torch.randn(count, width, device=DEVICE, dtype=DTYPE, requires_grad=True)
    weight = torch.randn(vocab, width, device=DEVICE, dtype=DTYPE).mul_(0.05).requires_grad_()
    targets = torch.randint(vocab, (count,), device=DEVICE)

    def run(loss_of):
        loss = loss_of()
        torch.autograd.grad(loss, (states, weight))
        return loss.item()

    sides = {"ours": functools.partial(run, lambda: linear_cross_entropy(
                 states, weight, None, targets)),
             "PyTorch, all logits at once": functools.partial(run, lambda: F.cross_entropy(
                 F.linear(states, weight).float(), targets, reduction="sum"))}
    own, other = (side() for side in sides.values())
    if not abs(own - other) <= 1e-3 * other:
        raise ValueError(f"our loss is {own}, and PyTorch's is {other}")
    return interleaved(sides)
