"""Compare our kernels with PyTorch's attention in float64, and time both.

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

from . import packed_attention

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
    packed: Any  # a data.Packed on DEVICE
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


def passes(attend, line, grad):
    """Return the output of a side, and the gradient of its projection."""
    output = attend(line)
    return output.detach(), torch.autograd.grad(output, line, grad)[0]


def difference(found, expected):
    """Return the largest difference, relative to the largest value, or absolute if that is below
    1."""
    return float((found - expected).abs().max() / max(1, expected.abs().max()))


def attention_table(shape):
    """Return the table of a shape, of both passes. Raises ValueError if our back ends differ."""
    line, grad = shape.random_line(DTYPE)
    sides = {"ours": back_end("triton", shape), "our SDPA back end": back_end("sdpa", shape)}
    both = [passes(attend, line, grad) for attend in sides.values()]
    if not (worst := max(map(difference, *both))) <= 0.03:  # NaN is too large
        raise ValueError(f"ours differs from our SDPA back end by {worst:.3g}")
    return interleaved({side: functools.partial(passes, attend, line, grad)
                        for side, attend in sides.items()}, milliseconds_of_kernels)


def attention_parts(shapes):
    """Return {title of a table: function that makes it} of {title: Shape}."""
    return {f"attention: {title}, against our SDPA back end":
            functools.partial(attention_table, shape) for title, shape in shapes.items()}


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
