"""The attention weights of one layer, which the back ends never store."""

import torch


def attention_weights(model, packed, index, layer=-1):
    """Return the attention of the tokens at some indices (N,) in a layer: (H, L) for each, over the
    L keys that it attends to."""
    # Compute the weights again from the layer's input.
    attention = model.blocks[layer].attention
    given = []
    with attention.register_forward_pre_hook(lambda module, inputs: given.append(inputs)):
        model(packed)
    x, _, angles, *_ = given[0]
    parts = [attention.heads, attention.kv_heads, attention.kv_heads]
    qkv = attention.project(x, angles).unflatten(-1, (-1, attention.head_dim))
    q, k, _ = qkv.split(parts, 1)  # (T, H or Hkv, K)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)  # (T, H, K)
    weights = []
    for i in index.tolist():
        low, high, low2, high2 = packed.key_ranges[i].tolist()
        keys = torch.cat([k[low2:high2], k[low:high]])  # (L, H, K), the shared prefix first
        scores = (keys * q[i]).sum(-1) / q.shape[-1] ** 0.5  # (L, H)
        if attention.softcap:
            scores = attention.softcap * (scores / attention.softcap).tanh()
        weights.append(scores.float().softmax(0).T)
    return weights
