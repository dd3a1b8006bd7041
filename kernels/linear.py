"""A linear layer whose speed on a CPU in bfloat16 does not depend on the number of tokens."""

import torch
from torch import nn


def whole_tiles(x):
    """Append rows of zeros to x (N, D), up to a multiple of 64, if it is bfloat16 on a CPU. There
    oneDNN compiles its matmuls for each new N, which would take a third of a training step."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu":
        return x
    return torch.cat([x, x.new_zeros(-len(x) % 64, x.shape[1])])


def in_whole_tiles(layer, x):
    """Apply a layer, (T, D) -> (T, D'), under autocast on a CPU to a whole number of tiles."""
    if not torch.is_autocast_enabled("cpu"):
        return layer(x)
    return layer(whole_tiles(x.bfloat16()))[:len(x)]


class Linear(nn.Linear):
    """nn.Linear in whole tiles: (T, D) -> (T, D'), and without autocast (..., D) -> (..., D')."""

    def forward(self, x):
        return in_whole_tiles(super().forward, x)
