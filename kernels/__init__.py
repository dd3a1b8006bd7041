"""Attention over the packed line, and the loss over a large vocabulary. The axes are model.py's.

    padded.py          attention by PyTorch's own kernel on padded rows (`sdpa`): runs everywhere
    attention.py       attention by our kernels (`triton`); imported only when they run
    schedule.py        which tiles our kernels visit: NumPy, once a batch
    cross_entropy.py   the loss over a large vocabulary, without its logits

Here: which back end computes attention over the packed line, and what it must know of a batch.
"""

import importlib.util
import os

import torch

from . import schedule
from .padded import pad_plan, padded_attention


def why_not(device, head_dim=None, softcap=0.0):
    """Why our kernels cannot run on a torch.device, for such heads; empty if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed here (on Linux: pip install triton)"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    # Triton's own switch, for tests on a CPU: its kernels run as Python.
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton needs a CUDA GPU, and the device is {device}"
    if head_dim is not None and head_dim not in schedule.HEAD_SIZES:
        known = ", ".join(map(str, schedule.HEAD_SIZES))
        return f"heads of size {head_dim} are none of its sizes {known}"
    return "capped scores are not in the kernels" if softcap else ""


def choose_back_end(asked, device, head_dim, softcap=0.0):
    """The back end that computes attention: what is asked for, `sdpa` or `triton`, or for `auto`
    our kernels where they can run on CUDA. ValueError if `triton` is asked for and cannot run."""
    if asked == "sdpa" or (asked == "auto" and device.type != "cuda"):
        return "sdpa"
    reason = why_not(device, head_dim, softcap)
    if reason and asked == "triton":
        raise ValueError(f"attention triton cannot be used here: {reason}; "
                         "--attention auto chooses")
    return "sdpa" if reason else "triton"


def plan_needed(back_end, heads, kv_heads, head_dim, element_size):
    """What `make_plan` must be asked for: "sdpa", or what decides the tiles of our kernels."""
    if back_end == "sdpa":
        return "sdpa"
    return heads // kv_heads, head_dim, element_size


def make_plan(need, key_ranges, cu_seqlens, device):
    """What a back end must know of a batch, from its mask: key_ranges (T, 4), cu_seqlens (R+1,).

    `need` "sdpa" -> Padded; (query heads to a head of keys, head size, bytes of a number) ->
    schedule.Plan with the tiles of `device`. ValueError if our kernels cannot express the mask.
    """
    if need == "sdpa":
        return pad_plan(key_ranges, cu_seqlens)
    share, head_dim, element_size = need
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    try:
        medium, long = schedule.choose_tiles(capability, head_dim, element_size)
        return schedule.plan(key_ranges, share, medium, long)
    except ValueError as error:
        raise ValueError(f"attention triton cannot run this batch: {error}; "
                         "--attention sdpa can") from None


def packed_attention(qkv, heads, kv_heads, packed, back_end="auto", softcap=0.0):
    """Attention under the mask of a Packed: (T, (H + 2 Hkv) K), heads of q, k, v -> (T, H K).

    The softmax's scale is 1 / sqrt(K); `softcap` is that of padded.sdpa.
    """
    head_dim = qkv.shape[1] // (heads + 2 * kv_heads)
    if back_end == "auto":
        back_end = choose_back_end("auto", qkv.device, head_dim, softcap)
    plan = packed.plan(plan_needed(back_end, heads, kv_heads, head_dim, qkv.element_size()))
    if back_end == "sdpa":
        return padded_attention(qkv, heads, kv_heads, plan, softcap)
    # Imported here, because it needs Triton.
    from .attention import attention as fused
    return fused(qkv, heads, kv_heads, packed.key_ranges, plan)
