"""Time attention by our kernels beside PyTorch's.

The sides of a table run in turn, on a GPU if there is one, otherwise on one CPU thread. Times are
medians, and "times ours" is the time of a side divided by ours in the same round. Nothing is timed
unless the sides return the same, gradients too. A side that cannot run says why.

On a GPU, "GB" is the peak memory that a side adds, and the time of attention is that of a CUDA
graph: a short pass takes less time than Python needs to launch it.
"""

import functools
import itertools
import statistics
import time
from typing import Any, NamedTuple

import torch

from . import packed_attention

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float32  # Triton's interpreter gets bfloat16 wrong
ROUNDS = 2 if GPU else 3  # on a GPU, each is a median already

# ---- the clock


def milliseconds(run, of_kernels=False):
    """Time a function: on a GPU with an emptied cache, or (of_kernels) without its launch; on a CPU
    the time of this thread, whatever else the machine does."""
    if GPU:
        from triton.testing import do_bench, do_bench_cudagraph
        bench = do_bench_cudagraph if of_kernels else do_bench
        return bench(run, rep=60, return_mode="median")
    start = time.thread_time()
    run()
    return 1000 * (time.thread_time() - start)


def interleaved(sides, clock=milliseconds):
    """Time {side: function} in turn, after one call to warm up. Return {side: {"ms", "times ours",
    "range"}}, on a GPU with "GB". The first side is ours and may not fail."""
    table, times = {}, {side: [] for side in sides}
    for number, (side, run) in itertools.product(range(ROUNDS + 1), sides.items()):
        try:
            if number and side in times:
                times[side].append(clock(run))
            elif not number:
                before = torch.cuda.memory_allocated()
                if GPU:
                    torch.cuda.reset_peak_memory_stats()
                run()
                added = torch.cuda.max_memory_allocated() - before
                table[side] = {"GB": round(added / 1e9, 2)} if GPU else {}
        except Exception as error:  # it may not support this layout or GPU, or lack memory
            if not table:
                raise
            table[side] = {"failed": repr(error)[:70].replace("\n", " ")}
            del times[side]
    ours = next(iter(times.values()))
    for side, values in times.items():
        ratios = sorted(theirs / own for theirs, own in zip(values, ours))
        table[side] |= {"ms": round(statistics.median(values), 4),
                        "times ours": round(statistics.median(ratios), 2),
                        "range": f"{ratios[0]:.2f} to {ratios[-1]:.2f}"}
    return table


def matmul_speed(dtype):
    """Return how fast a large matmul is, in TFLOP/s."""
    size = 8192 if GPU else 128
    x = torch.randn(size, size, device=DEVICE, dtype=dtype)
    return 2 * size ** 3 / interleaved({"": lambda: x @ x})[""]["ms"] / 1e9


def idle_share(step):
    """Return in how many % of the time of five steps no kernel runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        start = time.perf_counter()
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        wall = 1e6 * (time.perf_counter() - start)
    busy = sum(event.self_device_time_total for event in profile.key_averages()
               if not event.is_user_annotation)
    return round(100 * max(0, 1 - busy / wall))


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


def flex_attention(shape):
    """Return FlexAttention under the mask of a batch; the time to build its mask does not count."""
    from torch.nn.attention import flex_attention as flex
    ranges = shape.packed.key_ranges

    def is_visible(_, head, query, key):
        first, last, first2, last2 = (ranges[query, i] for i in range(4))
        return (first <= key) & (key < last) | (first2 <= key) & (key < last2)

    mask = flex.create_block_mask(is_visible, None, None, len(ranges), len(ranges), DEVICE,
                                  _compile=GPU)
    attend = torch.compile(flex.flex_attention, dynamic=False) if GPU else flex.flex_attention

    def side(line):
        q, k, v = (x.transpose(0, 1)[None] for x in shape.split_heads(line))
        return attend(q, k, v, block_mask=mask, enable_gqa=True)[0].transpose(0, 1).flatten(1)

    return side


def passes(attend, line, grad):
    """Return the output of a side, and the gradient of its projection."""
    output = attend(line)
    return output.detach(), torch.autograd.grad(output, line, grad)[0]


def difference(found, expected):
    """Return the largest difference, relative to the largest value, or absolute if that is below
    1."""
    largest = (found - expected).abs().nan_to_num(torch.inf).max()
    return float(largest / max(1, expected.abs().max()))


def attention_table(shape):
    """Return the table of a shape, of both passes. Raises ValueError if our back ends differ, or if
    PyTorch's attention keeps all scores on a GPU."""
    line, grad = shape.random_line(DTYPE)
    sides = {"our kernels": back_end("triton", shape), "our SDPA back end": back_end("sdpa", shape)}
    operation = operations_of(sides["our SDPA back end"], line)
    if GPU and "math" in operation:
        raise ValueError(f"PyTorch's attention keeps all scores: its operation is {operation}")
    both = [passes(attend, line, grad) for attend in sides.values()]
    if (worst := max(map(difference, *both))) > 0.03:
        raise ValueError(f"our kernels differ from our SDPA back end by {worst:.3g}")
    sides["FlexAttention"] = flex_attention(shape)
    table = interleaved({side: functools.partial(passes, attend, line, grad)
                         for side, attend in sides.items()},
                        functools.partial(milliseconds, of_kernels=True))
    table["our SDPA back end"]["operation"] = operation
    return table


def operations_of(attend, line):
    """Return the names of PyTorch's operations that compute a side."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attend(line)
    names = {event.key.removeprefix("aten::_scaled_dot_product_")
             for event in profile.key_averages() if "::_scaled_dot_product_" in event.key}
    return ", ".join(sorted(names))
