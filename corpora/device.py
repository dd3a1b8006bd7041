"""What a device can do, how much it holds, and where its chance stands."""

import contextlib
import math

import torch
from torch.overrides import TorchFunctionMode

from corpora.program import BadInput, machine_memory, peak_memory


def usable_device(name):
    """The name of a device, by default the GPU if there is one. BadInput if it cannot be used."""
    if not name or name == "auto":
        on_mac = "mps" if torch.backends.mps.is_available() else "cpu"
        name = "cuda" if torch.cuda.is_available() else on_mac
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError):  # the latter where torch has no CUDA at all
        raise BadInput(f"device {name!r} cannot be used here: give cpu, or leave it out") from None
    return name


def usable_precision(precision, device):
    """The name of the precision of products, by default the best that the device has instructions
    for. BadInput if it cannot."""
    if precision == "auto":
        precision = "float32"
        if device.type == "cuda":
            # A GPU without bfloat16 computes in half precision, with a loss scaler.
            has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
            precision = "bfloat16" if has_bfloat16 else "float16"
        # Older PyTorch cannot tell; without the instructions bfloat16 is slower than float32.
        can = getattr(torch.cpu, "get_capabilities", dict)()
        if device.type == "cpu" and (can.get("avx512_bf16") or can.get("amx_bf16")):
            precision = "bfloat16"
    if precision == "float16" and device.type != "cuda":
        raise BadInput("precision float16 needs a CUDA GPU for its loss scaling: use bfloat16")
    return precision


def random_state(device):
    """Where the generators of the CPU and of this device stand."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state, device):
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


# ---- memory


class Undrawn(TorchFunctionMode):
    """Without normal numbers: to draw them on "meta" imports the compiler (2 s)."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.init.normal_:
            return kwargs["tensor"]
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def shapes_only():
    """The modules that are made here have shapes, and neither numbers nor memory."""
    with torch.device("meta"), Undrawn():
        yield


def most_memory(device):
    """The most bytes that were held at once: on a GPU, or by this process."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_memory()


def bytes_needed(make):
    """Weights, gradients and AdamW's moments, in float32, of the module that make() gives -> bytes,
    found without taking memory; 0 for a class that asks for its numbers."""
    try:
        with shapes_only():
            parameters = make().parameters()
    except (RuntimeError, TypeError) as error:
        # Of a tensor that no computer could hold.
        return math.inf if "overflow" in str(error).lower() else 0
    return sum(p.numel() * (16 if p.requires_grad else 4) for p in parameters)


def check_memory(make, sizes, states, device):
    """BadInput if a device cannot hold what make() gives, as in `bytes_needed`, and so many
    `states`. `sizes`: {name: value}, of which the whole numbers may be lowered."""
    need = bytes_needed(make) + 4 * states
    memory = machine_memory()
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    if need > memory:
        sizes = {name: value for name, value in sizes.items() if type(value) is int}
        largest = sorted(sizes, key=sizes.get, reverse=True)[:3]
        said = ", ".join(f"{name} {sizes[name]}" for name in largest)
        raise BadInput(f"{said}: training needs at least {need / 1e9:,.1f} GB, and {device} has "
                       f"{memory / 1e9:,.1f} GB: lower one of them")
