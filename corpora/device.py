"""What a device can do, its random numbers, and the processes that train together: one a GPU, or
several on a CPU, as torchrun started them."""

import contextlib
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from corpora.program import BadInput


def usable_device(name):
    """The name of a device, by default the GPU if there is one. BadInput if it cannot be used."""
    if not name or name == "auto":
        on_mac = "mps" if torch.backends.mps.is_available() else "cpu"
        name = "cuda" if torch.cuda.is_available() else on_mac
    try:
        # Numbers are read back: "meta" has none.
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, ModuleNotFoundError):
        raise BadInput(f"device {name!r} cannot be used here: give cpu, or leave it out") from None
    return name


def fastest_precision(device):
    """The name of the fastest precision that a torch.device has instructions for."""
    if device.type == "cuda":
        # A GPU without bfloat16 computes in half precision, with a loss scaler.
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return "bfloat16" if has_bfloat16 else "float16"
    # Older PyTorch cannot tell; without the instructions bfloat16 is slower than float32.
    can = getattr(torch.cpu, "get_capabilities", dict)()
    is_cpu = device.type == "cpu"
    return "bfloat16" if is_cpu and (can.get("avx512_bf16") or can.get("amx_bf16")) else "float32"


def usable_precision(precision, device):
    """The name of the precision of products; "auto" is the fastest that the device has instructions
    for. BadInput if the device cannot."""
    if precision == "auto":
        precision = fastest_precision(device)
    if precision == "float16" and device.type != "cuda":
        raise BadInput("precision float16 needs a CUDA GPU for its loss scaling: use bfloat16")
    return precision


class Products(TorchFunctionMode):
    """Counts the FLOPs of the products of matrices while it is on, forward and backward, and
    changes none. Those of attention are not counted."""
    flops = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (F.linear, torch.matmul, torch.Tensor.matmul):
            # Backward is one product more for each factor that gets a gradient.
            trained = sum(x.requires_grad for x in args[:2]) if out.requires_grad else 0
            self.flops += 2 * out.numel() * args[0].shape[-1] * (1 + trained)
        return out


class Pace:
    """How fast this process trains: tokens a second, and the FLOPs of its products of matrices (as
    the first step has them) as a share of its peak, the fastest product of two large matrices that
    was seen. Not `counts`: no share, because compiled blocks would be compiled once for the count
    and once without."""

    def __init__(self, device, dtype, counts=True):
        width = 4096 if device.type == "cuda" else 512
        drawn = torch.Generator(device).manual_seed(0)  # no draw of the training's own
        matrix = torch.randn(width, width, device=device, generator=drawn)
        self.matrix = matrix.to(dtype or torch.float32)
        self.peak = max(self.product_speed() for _ in range(6))  # FLOP/s
        self.flops = None if counts else 0  # of a token
        self.tokens = 0  # since the last `close`
        self.seconds = 0.0

    def product_speed(self):
        """FLOP/s of one large product."""
        begun = time.perf_counter()
        (self.matrix @ self.matrix)[0, 0].item()  # which waits for the device
        return 2 * len(self.matrix) ** 3 / (time.perf_counter() - begun)

    @contextlib.contextmanager
    def step(self, parts):
        """Around each step, of the parts of a batch."""
        tokens = sum(len(part["packed"].tokens) for part in parts)
        if self.flops is None:
            with Products() as products:
                yield
            self.flops = products.flops / tokens
        else:
            yield
        self.tokens += tokens

    def close(self, world):
        """What the steps since the last call come to, of all processes -> {name: number}."""
        # Others may have had the machine when the peak was measured.
        self.peak = max(self.peak, self.product_speed())
        rate = self.tokens / max(self.seconds, 1e-9)
        self.tokens, self.seconds = 0, 0.0
        found = {"tokens_per_second": round(rate * world)}
        if self.flops:
            found["product_share"] = round(rate * self.flops / self.peak, 4)
        return found


def random_state(device):
    """The states of the random generators of the CPU and of this device, by name."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state, device):
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def join_processes(device):
    """Meet the processes that torchrun started -> the rank of this one, their number, its device;
    0 and 1 without torchrun."""
    given = {name: os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    if any(given.values()) and not all(value.isdecimal() for value in given.values()):
        raise BadInput(f"the environment has {given}: start several processes with torchrun, "
                       "which sets all three, or unset them")
    world = int(given["WORLD_SIZE"] or 1)
    if world > 1:
        if device.type == "cuda":
            device = torch.device("cuda", int(given["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return int(given["RANK"] or 0), world, device


def mean_over_ranks(values, world):
    """A tensor -> its mean over the `world` processes, in place."""
    if world > 1 and len(values):
        dist.all_reduce(values)
        values /= world
    return values


def on_any_rank(asked, world, device):
    """Whether one of the processes was asked."""
    share = torch.tensor([float(bool(asked))], device=device)
    return bool(mean_over_ranks(share, world))
