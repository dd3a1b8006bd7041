"""Attention over the packed line, and the loss over a large vocabulary. The axes are model.py's.

    padded.py          attention by PyTorch's own kernel on padded rows (`sdpa`): runs everywhere
    attention.py       attention by our kernels (`triton`); imported only when they run
    schedule.py        which tiles our kernels visit: NumPy, once a batch
    cross_entropy.py   the loss over a large vocabulary, without its logits
    linear.py          linear layers, fast on a CPU in bfloat16
    bench.py           times them: `python -m results gpu`

This file chooses the back end of attention and the plan that it needs of a batch, and compiles a
model's blocks (--compile).
"""

import importlib.util
import os

import torch

from base.common import BadInput, warn_once

from .padded import Padded, pad_plan, padded_attention

HEAD_SIZES = (16, 32, 64, 128)  # for which schedule.py has tiles

# "auto" takes only what has run somewhere and is recorded, and no GPU has run our kernels yet. Set
# this to True when `python -m results gpu` has passed on one and its file is committed.
KERNELS_HAVE_RUN = False


def why_not(device, head_dim, softcap):
    """Return why our kernels cannot run on a torch.device with such heads, or "" if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (on Linux: pip install triton)"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    # Triton's own switch, for tests on a CPU: its kernels run as Python.
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton needs a CUDA GPU, and the device is {device}"
    if head_dim not in HEAD_SIZES:
        return f"the kernels support heads of size {HEAD_SIZES}, not {head_dim}"
    return "the kernels do not cap attention scores" if softcap else ""


def choose_back_end(requested, device, head_dim, softcap=0.0):
    """Return what computes attention: "sdpa", "triton", or "auto": our kernels, and SDPA in float32
    and for masks that they do not support. Raises BadInput if "triton" is requested and cannot run.
    """
    if device.type == "cuda":
        # cuDNN's attention builds a plan for every new shape, which takes 20 ms to 1 s, and nearly
        # every bucket of a batch has a new shape.
        torch.backends.cuda.enable_cudnn_sdp(False)
    by_ours = device.type == "cuda" and KERNELS_HAVE_RUN
    if requested == "sdpa" or requested == "auto" and not by_ours:
        return "sdpa"
    reason = why_not(device, head_dim, softcap)
    if reason and requested == "triton":
        raise BadInput(f"--attention triton cannot run: {reason}; use --attention auto")
    return "sdpa" if reason else requested


def layout_of(back_end, heads, kv_heads, head_dim, element_size):
    """Return the layout of a layer, on which the plan of a batch depends: "sdpa", or (back end,
    heads per key head, head size, bytes per number), which decide the tiles of our kernels."""
    # In float32 our kernels do not use tensor cores, and those of PyTorch do.
    if back_end == "sdpa" or back_end == "auto" and element_size == 4:
        return "sdpa"
    return back_end, heads // kv_heads, head_dim, element_size


def make_plan(layout, key_ranges, cu_seqlens, device):
    """Return the plan of a batch, from what `layout_of` returned, its mask key_ranges (T, 4) and
    cu_seqlens (R+1,): a Padded, or a schedule.Plan with the tiles of `device`. For a mask that our
    kernels do not support, "triton" raises BadInput, and "auto" warns once and gives a Padded."""
    if layout == "sdpa":
        return pad_plan(key_ranges, cu_seqlens)
    from . import schedule  # here, because only our kernels need tiles
    back_end, group_size, head_dim, element_size = layout
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    try:
        medium, long = schedule.choose_tiles(capability, head_dim, element_size)
        return schedule.plan(key_ranges, group_size, medium, long)
    except ValueError as error:
        if back_end == "triton":
            raise BadInput(f"--attention triton cannot run this batch: {error}; use --attention "
                           "auto or sdpa") from None
        warn_once(f"the Triton kernels do not support this mask ({error}): its attention "
                  "uses SDPA")
        return pad_plan(key_ranges, cu_seqlens)


def uncompiled(function):
    """Return a function that torch.compile runs as it is: it differs in every batch."""
    # Not a decorator: torch.compiler.disable imports the compiler, which takes 1.5 s.
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function


# All blocks share one code, which is compiled again for each combination of what a call can have: a
# gradient, a selection of tokens, a plan with tables of 0, 1 or more rows. PyTorch's limit is 8. At
# the limit it prints a warning, and goes on uncompiled.
MOST_COMPILATIONS = 64


def compile_blocks(blocks):
    """Compile every model.Block with torch.compile, but not what differs in every batch:
    `uncompiled`."""
    from torch import _dynamo  # half a second
    _dynamo.config.recompile_limit = MOST_COMPILATIONS
    for block in blocks:
        block.compile(dynamic=True)


def packed_attention(qkv, heads, kv_heads, packed, back_end=None, softcap=0.0):
    """Compute attention under the mask of a Packed, from heads of q, k, v:
    (T, (H + 2 Hkv) K) -> (T, H K). The scale is 1 / sqrt(K); `softcap` is that of padded.sdpa."""
    head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
    back_end = back_end or choose_back_end("auto", qkv.device, head_dim, softcap)
    plan = packed.plan(layout_of(back_end, heads, kv_heads, head_dim, qkv.element_size()))
    if isinstance(plan, Padded):
        return uncompiled(padded_attention)(qkv, heads, kv_heads, plan, softcap)
    # Imported here, because it needs Triton.
    from .attention import attention as fused
    return fused(qkv, heads, kv_heads, packed.key_ranges, plan)
