"""Attention for generation: the keys and values that a layer has seen are kept."""

import torch

from .padded import sdpa


class KeyValueCache:
    """The keys and values of one layer: R rows that are all equally long, so nothing is padded.

    The first call may bring many tokens, which see each other causally; later ones bring one.
    """

    def __init__(self, attention, rows, longest, like):
        self.heads = attention.heads
        shape = (rows, attention.kv_heads, longest, attention.head_dim)
        self.keys = like.new_empty(shape)
        self.values = like.new_empty(shape)
        self.length = 0

    @staticmethod
    def of(model, rows, longest):
        """One for each block of a model, for that many rows of at most `longest` tokens."""
        like = model.embed.weight
        return [KeyValueCache(block.attention, rows, longest, like) for block in model.blocks]

    def attend(self, qkv, softcap=0.0):
        """The next n tokens of each row, (R, n, (H + 2 Hkv) K), heads of q, k, v -> (R, n, H K)."""
        kv_heads, _, head_dim = self.keys.shape[1:]
        heads = qkv.unflatten(-1, (-1, head_dim)).transpose(1, 2)
        q, k, v = heads.split([self.heads, kv_heads, kv_heads], 1)  # (R, heads, n, K)
        start = self.length
        end = start + q.shape[2]
        self.keys[:, :, start:end] = k
        self.values[:, :, start:end] = v
        self.length = end
        mask = None
        if start == 0:
            mask = torch.ones(end, end, dtype=torch.bool, device=q.device).tril()
        out = sdpa(q, self.keys[:, :, :end], self.values[:, :, :end], mask, softcap)
        return out.transpose(1, 2).flatten(2)

    def keep(self, rows):
        """Only these rows go on."""
        self.keys = self.keys[rows]
        self.values = self.values[rows]
