"""LoRA: train a low-rank difference to frozen weights [Hu et al. 2022, eq. 3]."""

import torch
import torch.nn.functional as F
from torch import nn

# The linear maps of a block, and the part of it that has each.
TARGETS = {"qkv": "attention", "out": "attention", "up": "mlp", "down": "mlp"}


class LowRank(nn.Module):
    """A frozen linear map and a trained difference: W x + (alpha / rank) B A x, B = 0 at first."""

    def __init__(self, linear, rank, alpha):
        super().__init__()
        like = linear.weight
        self.linear = linear.requires_grad_(False)
        self.scale = alpha / rank
        self.a = nn.Parameter(torch.randn(rank, like.shape[1], device=like.device) / rank)
        self.b = nn.Parameter(torch.zeros(like.shape[0], rank, device=like.device))

    @property
    def weight(self):
        """The sum of both, for files."""
        return self.linear.weight + self.b @ self.a * self.scale

    def forward(self, x):
        return self.linear(x) + F.linear(F.linear(x, self.a), self.b) * self.scale


class NewRows(nn.Module):
    """A frozen embedding of which only the rows `ids` are trained: those of new tokens."""

    def __init__(self, embedding, ids):
        super().__init__()
        ids = torch.as_tensor(ids, device=embedding.weight.device)
        self.embedding = embedding.requires_grad_(False)
        self.register_buffer("ids", ids, persistent=False)
        self.rows = nn.Parameter(embedding.weight[ids].clone())

    @property
    def weight(self):
        """The whole table (V, D), for tied logits too."""
        return self.embedding.weight.index_copy(0, self.ids, self.rows)

    def forward(self, tokens):
        return F.embedding(tokens, self.weight)


def add_lora(model, rank, alpha, targets=tuple(TARGETS), new_ids=()):
    """Freeze a Model and train low-rank differences of the `targets` of every block, and the
    embeddings of `new_ids`. ValueError for an unknown target."""
    for name in targets:
        if name not in TARGETS:
            raise ValueError(f"LoRA target {name!r} is unknown: choose from {', '.join(TARGETS)}")
    model.requires_grad_(False)
    for block in model.blocks:
        for name in targets:
            part = getattr(block, TARGETS[name])
            setattr(part, name, LowRank(getattr(part, name), rank, alpha))
    if len(new_ids):
        model.embed = NewRows(model.embed, new_ids)
    return model


def plain_weights(model):
    """The state of a Model under the names it has without LoRA, the differences merged."""
    state = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, (LowRank, NewRows)):
            bias = state.get(f"{name}.linear.bias")
            for key in module.state_dict():
                del state[f"{name}.{key}"]
            state[f"{name}.weight"] = module.weight.detach()
            if bias is not None:
                state[f"{name}.bias"] = bias
    return state
