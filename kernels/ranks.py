"""The processes that train together, one a GPU or several on a CPU, as torchrun started them."""

import os

import torch
import torch.distributed as dist


class Ranks:
    """`rank`, this process of `world`; on its own without torchrun. `device`: of this process."""

    def __init__(self, device):
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        self.device = device
        if self.world > 1:
            if device.type == "cuda":
                self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
                torch.cuda.set_device(self.device)
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    def wait(self):
        """Until all are here."""
        if self.world > 1:
            dist.barrier()

    def leave(self):
        if self.world > 1:
            dist.destroy_process_group()

    def wrap(self, module):
        """Each rank computes its own part of the batch; gradients become their mean."""
        if self.world == 1:
            return module
        ids = [self.device] if self.device.type == "cuda" else None
        return torch.nn.parallel.DistributedDataParallel(module, device_ids=ids)

    def mean(self, values):
        """A tensor -> its mean over ranks."""
        return mean_over_ranks(values, self.world)

    def any(self, asked):
        """Whether one of them was asked."""
        share = torch.tensor([float(bool(asked))], device=self.device)
        return bool(self.mean(share))

    def gather(self, value):
        """A value of any kind -> those of all ranks, a list."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values


def mean_over_ranks(values, world):
    if world > 1 and len(values):
        dist.all_reduce(values)
        values /= world
    return values


def share_counts(parts, world):
    """Token losses divide by the number of targets of the whole step: each part's own counts give
    way to their mean over parts and ranks, so that averaging the parts gives exactly the gradient
    of one big batch."""
    mean = mean_over_ranks(torch.stack([part["num_targets"] for part in parts]).mean(0), world)
    for part in parts:
        part["num_targets"] = mean
    return parts
