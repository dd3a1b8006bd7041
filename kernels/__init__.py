"""Attention over the packed line on a GPU. schedule.py: what to visit (NumPy); attention.py: the kernels, the one file that imports Triton
when they run; build.py compiles them for GPUs that are not here; bench.py measures them on one that is."""

import importlib.util
import os

import torch

from .schedule import HEAD_SIZES


def why_not(device, size=None):
    """Why the kernels cannot run on a torch.device, with heads of this size; empty if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed here (on Linux: pip install triton)"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":      # Triton's own switch, for tests on a CPU
        return f"Triton needs a CUDA GPU, and the device is {device}"
    return "" if size in (None, *HEAD_SIZES) else f"heads of size {size} are none of its sizes {', '.join(map(str, HEAD_SIZES))}"
