"""Several processes (torchrun): how they meet, average and gather; --shard by PyTorch's FSDP2."""

import copy
import datetime
import os
import warnings

import torch
import torch.distributed as dist

from base.common import BadInput


def join_processes(device):
    """Return this process's rank, the number of processes and the device; 0 and 1 without
    torchrun."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        if device.type == "cuda":
            if "LOCAL_RANK" not in os.environ:
                raise BadInput(f"WORLD_SIZE is {world}, and LOCAL_RANK, this process's GPU, is not "
                               "set: start the processes with torchrun")
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        # All others wait while rank 0 evaluates, saves or reads data, which can take hours. By
        # default NCCL gives up after ten minutes.
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo",
                                timeout=datetime.timedelta(days=1))
    return int(os.environ.get("RANK", 0)), world, device


def num_processes():
    """Return how many processes train together (torchrun)."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def mean_over_ranks(values, world):
    """Replace a tensor by its mean over all processes, in place, and return it."""
    if world > 1 and len(values):
        dist.all_reduce(values)
        values /= world
    return values


def all_gather_with_grad(x):
    """Gather the items of all processes, with gradients: (N, D) -> (processes * N, D). Each process
    then computes the loss of the whole batch, and DDP averages their gradients."""
    if num_processes() == 1:
        return x
    from torch.distributed.nn.functional import all_gather  # missing in builds without distributed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # its successor has no public name yet
        return torch.cat(all_gather(x, dist.group.WORLD))


# ---- --shard: each process keeps a part of every tensor


def check_shard(train, precision, world):
    """Raise BadInput if a run with --shard cannot be sharded."""
    if train.shard and (world == 1 or train.optimizer != "adamw" or precision == "float16"):
        raise BadInput("shard needs several processes (torchrun --nproc_per_node 8 train.py ...), "
                       "--optimizer adamw, and --precision float32 or bfloat16: this run has "
                       f"{world}, {train.optimizer} and {precision}")


def shard(objective, blocks, device, rank, world):
    """Divide the weights of an objective among the processes, in place. Return, on rank 0, a whole
    copy of its model, for evaluations and files.

    A block is whole while it computes, in the forward and again in the backward. All other weights
    are whole from the start of the objective's forward to the end of the backward, so a loss can
    read the embeddings."""
    from torch.distributed.fsdp import fully_shard  # half a second
    model = copy.deepcopy(objective.model) if rank == 0 else objective.model
    mesh = dist.init_device_mesh(device.type, (world,))
    for group in (*blocks, objective):
        fully_shard(group, mesh=mesh)

    def broadcast_buffers(objective, _):  # as DDP does: BatchNorm's statistics are those of rank 0
        for buffer in objective.buffers() if objective.training else ():
            dist.broadcast(buffer, 0)

    objective.register_forward_pre_hook(broadcast_buffers)
    return model


def whole(tensor):
    """Gather a tensor that is divided: all processes call it together. Return others unchanged."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gather(tensors, keep):
    """Return {name: tensor}, nested or not. Those that are divided become whole tensors on the CPU,
    or None unless `keep`. All processes call it together."""
    if isinstance(tensors, dict):
        return {name: gather(item, keep) for name, item in tensors.items()}
    found = whole(tensors)
    return tensors if found is tensors else found.cpu() if keep else None


def part_of(tensor, like):
    """Copy a tensor to the device of `like`; if `like` is divided, only this process's part."""
    tensor = tensor.to(like.device, like.dtype, copy=True).contiguous()
    if not hasattr(like, "full_tensor"):
        return tensor
    from torch.distributed.tensor import distribute_tensor
    # src_data_rank=None: each process has the whole tensor, so none is sent.
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
