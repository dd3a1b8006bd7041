"""Several processes (torchrun): how they meet, average and gather."""

import contextlib
import datetime
import functools
import json
import os
import time
import warnings

import torch
import torch.distributed as dist

from base.common import BadInput, differences

# All others wait while rank 0 evaluates or saves, which can take hours. By default NCCL gives up
# after ten minutes.
PATIENCE = datetime.timedelta(days=1)


def rank_and_world():
    """Return this process's rank and the number of processes; 0 and 1 without torchrun."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


@functools.cache
def meeting_place():
    """Return the store of torchrun, in which processes leave notes for each other."""
    return next(dist.rendezvous("env://", timeout=PATIENCE))[0]


def is_alone():
    """Return whether no other process takes part in what this one does."""
    return not meeting_place.cache_info().currsize


def join_processes(device):
    """Wait for all processes, and let them exchange tensors. Return the device of this one."""
    rank, world = rank_and_world()
    if world > 1:
        if device.type == "cuda":
            if "LOCAL_RANK" not in os.environ:
                raise BadInput(f"WORLD_SIZE is {world}, and LOCAL_RANK, this process's GPU, is not "
                               "set: start the processes with torchrun")
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE,
                                store=meeting_place(), rank=rank, world_size=world)
    return device


def leave_processes():
    """Undo `join_processes`."""
    if num_processes() > 1:
        dist.destroy_process_group()
    meeting_place.cache_clear()


# ---- before the first step: a mistake on one node ends all


@contextlib.contextmanager
def together():
    """Run a block in all processes. An error in one of them ends all."""
    if rank_and_world()[1] > 1:
        meeting_place()
    try:
        yield
    except Exception as error:
        meet(error=error)  # unless all know it already, and each is alone
        raise
    meet()


def meet(facts=None, error=None):
    """Wait for all processes. If one comes with an error, or their facts, {name: value}, differ,
    raise BadInput in one process of each machine, end the others, and let each be alone."""
    if is_alone():
        return
    rank, world = rank_and_world()
    store = meeting_place()
    number = store.add(f"meetings of {rank}", 1)
    said = error and (str(error) if isinstance(error, BadInput) else repr(error))
    store.set(f"{number} {rank}", json.dumps([said, facts or {}]))
    keys = [f"{number} {other}" for other in range(world)]
    while not store.check(keys):
        time.sleep(0.02)  # Ctrl-C ends this, but not a waiting store.get
    notes = [json.loads(store.get(key)) for key in keys]
    if mistake := first_mistake(notes):
        store.add(f"{number} read", 1)
        while rank == 0 and store.add(f"{number} read", 0) < world:
            time.sleep(0.02)  # the store can end with this process
        meeting_place.cache_clear()
        if error and not isinstance(error, BadInput):
            raise error
        if os.environ.get("LOCAL_RANK", "0") != "0":
            raise SystemExit(2)
        raise BadInput(mistake)


def first_mistake(notes):
    """Return what is wrong with the notes of all processes, [(error, facts)], or ""."""
    for rank, (error, facts) in enumerate(notes):
        if error:
            return f"process {rank}: {error}"
        for _, text in differences(notes[0][1], facts, "{} ({} and {})"):
            return (f"process 0 and process {rank} differ in {text}: start the same command on all "
                    "nodes, with the same files, and with --out on a disk that they share")
    return ""


# ---- tensors of all processes


def num_processes():
    """Return how many processes train together (torchrun)."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def mean_over_ranks(values):
    """Replace a tensor by its mean over all processes, in place, and return it."""
    if num_processes() > 1 and len(values):
        dist.all_reduce(values)
        values /= num_processes()
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


# ---- tensors that --shard divides


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
