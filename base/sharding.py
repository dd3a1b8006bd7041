"""--shard: each process keeps a part of every tensor, by PyTorch's FSDP2."""

import copy

import torch.distributed as dist

from base.common import BadInput


def check_shard(train, precision, world):
    """Raise BadInput if a run with --shard cannot be sharded."""
    if world == 1 or train.optimizer != "adamw" or precision == "float16":
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
