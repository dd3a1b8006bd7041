"""The file model.pt: the weights of a model, and its configuration."""

from dataclasses import asdict

import torch
from torch.overrides import TorchFunctionMode

from base.common import BadInput, atomic_file, read_torch, uninterrupted
from model import Model, ModelConfig


class Uninitialized(TorchFunctionMode):
    """Skip torch.nn.init. On the device "meta", normal_ imports torch.compile, which takes 2 s."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", "") == "torch.nn.init":
            return None
        return function(*args, **kwargs or {})


def save(model, path):
    """Write config and weights as one file, from which `load` rebuilds the model."""
    # torch.save turns a KeyboardInterrupt into a RuntimeError.
    with uninterrupted(), atomic_file(path) as file:
        torch.save({"config": asdict(model.config), "weights": plain_weights(model)}, file)


def load(path, device="cpu"):
    """Rebuild a saved Model, in eval mode. Config fields that an older file lacks get their
    defaults. Raises BadInput if the file is missing, damaged or of another version."""
    saved = read_torch(path, device)
    try:
        config = ModelConfig(**saved["config"])
        with torch.device("meta"), Uninitialized():  # its weights are those of the file
            model = Model(config)
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path} is not a model of this version ({error}): use the version that "
                       "wrote it") from None
    # Fused AdamW would write outside of a tensor of a forged file that repeats its numbers.
    weights = {name: weight.float().contiguous() for name, weight in saved["weights"].items()}
    model.load_state_dict(weights, assign=True)
    return model.eval()


def plain_weights(model):
    """Return the state of a Model under the names that it has without LoRA, updates merged."""
    state = model.state_dict()
    for name, module in model.named_modules():
        if hasattr(module, "merged"):
            for key in module.state_dict():
                del state[f"{name}.{key}"]
            state |= {f"{name}.{key}": weight for key, weight in module.merged().items()}
    return state
