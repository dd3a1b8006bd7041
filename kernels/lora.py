"""LoRA: train a low-rank difference to frozen weights [Hu et al. 2022, eq. 3]."""

import torch
import torch.nn.functional as F
from torch import nn


class LowRank(nn.Module):
    """A frozen linear map, of several projections side by side, and the trained difference of each:
    W x + (alpha / rank) B A dropout(x), B = 0 at first. `sizes`: outputs of the projections."""

    def __init__(self, linear, sizes, rank, alpha, dropout=0.0):
        super().__init__()
        like = linear.weight
        bound = like.shape[1] ** -0.5
        self.linear = linear.requires_grad_(False)
        self.scale = alpha / rank
        self.dropout = nn.Dropout(dropout)
        self.a = nn.ParameterList()
        self.b = nn.ParameterList()
        for size in sizes:
            a = like.new_empty(rank, like.shape[1])
            self.a.append(a.uniform_(-bound, bound))  # PEFT's initial values
            self.b.append(like.new_zeros(size, rank))

    @property
    def weight(self):
        """The sum of both, for files."""
        differences = [b @ a for a, b in zip(self.a, self.b, strict=True)]
        return self.linear.weight + torch.cat(differences) * self.scale

    def forward(self, x):
        parts = []
        for a, b in zip(self.a, self.b, strict=True):
            parts.append(F.linear(F.linear(self.dropout(x), a), b))
        return self.linear(x) + torch.cat(parts, -1) * self.scale


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


def add_lora(model, rank, alpha, dropout=0.0, new_ids=()):
    """Freeze a Model and train low-rank differences of the seven projections of every block (six
    without a gate), and the embeddings of `new_ids`."""
    model.requires_grad_(False)
    for block in model.blocks:
        attention = block.attention
        mlp = block.mlp
        keys = attention.kv_heads * attention.head_dim
        gated = 1 if mlp.activation == "gelu" else 2
        maps = [(attention, "qkv", [attention.heads * attention.head_dim, keys, keys]),
                (attention, "out", [attention.out.out_features]),
                (mlp, "up", [mlp.up.out_features // gated] * gated),  # gate, up
                (mlp, "down", [mlp.down.out_features])]
        for part, name, sizes in maps:
            setattr(part, name, LowRank(getattr(part, name), sizes, rank, alpha, dropout))
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
