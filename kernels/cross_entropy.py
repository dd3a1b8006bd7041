"""The loss over a large vocabulary: cross-entropy and its gradients without storing all logits.

10,000 positions times XLM-R's 250,002 tokens are 10 GB of logits, and PyTorch keeps about three
copies. Here the logits of a chunk of positions are computed at a time, and their gradients at once.
"""

import torch
import torch.nn.functional as F

from .linear import whole_tiles

CHUNK = 3 * 2**27  # bytes of logits at a time: 402 positions of XLM-R's vocabulary in float32
SLICE = 2**15  # tokens whose gradient is added at a time


def upcast(x):
    """Return x in float32 or wider: losses are computed so at every precision of a run."""
    return x.float() if x.element_size() < 4 else x


def linear_cross_entropy(states, weight, bias, targets, softcap=0.0):
    """Return the sum of the cross-entropies of the logits states W' + b: states (N, D), W (V, D),
    b (V,) or None, targets (N,) -> ().

    `softcap` c: a logit s becomes c tanh(s / c), unless c is 0. Matmuls run in the precision of
    autocast, the softmax in float32. backward() can be called once.
    """
    return LinearCrossEntropy.apply(states, weight, bias, targets, softcap)


class LinearCrossEntropy(torch.autograd.Function):
    """The forward computes the gradients too, while it has a chunk's logits. The backward only
    multiplies them."""

    @staticmethod
    def forward(ctx, states, weight, bias, targets, softcap):
        device = states.device.type
        dtype = states.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        ctx.grads = []
        for x, needed in zip((states, weight, bias), ctx.needs_input_grad[:3], strict=True):
            # At least float32: the gradients of all chunks are added up.
            wide = torch.promote_types(x.dtype, torch.float32) if needed else None
            ctx.grads.append(torch.zeros_like(x, dtype=wide) if needed else None)
        with torch.autocast(device, enabled=False):
            bias = None if bias is None else bias.to(dtype)
            states = states.to(dtype)
            return add_chunks(states, weight.to(dtype), bias, targets, softcap, ctx.grads)

    @staticmethod
    def backward(ctx, grad):
        if ctx.grads is None:
            raise RuntimeError("backward of a vocabulary loss can be called once")
        grads = [x if x is None else x.mul_(grad) for x in ctx.grads]
        ctx.grads = None
        return *grads, None, None


def add_chunks(states, weight, bias, targets, softcap, grads):
    """Return the loss, and add its gradients to `grads`: those of states, weight and bias, each a
    tensor or None."""
    to_states, to_weight, to_bias = grads
    total = torch.zeros((), device=states.device)
    rows = max(1, CHUNK // (len(weight) * states.element_size()))
    for start in range(0, len(states), rows):
        part = whole_tiles(states[start:start + rows])
        gold = targets[start:start + rows]
        logits = F.linear(part, weight, bias)  # (n, V)
        logits[len(gold):] = 0  # appended rows have no gradient
        # Copies in float32 are made of an eighth of the chunk at a time.
        few = max(1, rows // 8)
        for some, values in zip(gold.split(few), logits.split(few)):
            total = total + to_gradient(values[:len(some)], some, softcap)
        # From here on `logits` contains the gradients of the logits.
        if to_states is not None:
            to_states[start:start + rows] = (logits @ weight)[:len(gold)]
        if to_weight is not None:
            for word in range(0, len(weight), SLICE):
                to_weight[word:word + SLICE] += logits[:, word:word + SLICE].T @ part
        if to_bias is not None:
            to_bias += logits.sum(0, dtype=to_bias.dtype)
    return total


def to_gradient(logits, targets, softcap):
    """Return the sum of the cross-entropies of logits (n, V), and overwrite the logits by their
    gradients."""
    # This is a copy in half precision, and the logits themselves otherwise.
    values = upcast(logits)
    if softcap:
        values = softcap * (values / softcap).tanh()
        slope = 1 - (values / softcap).square()
    log_total = values.logsumexp(1, keepdim=True)  # (n, 1)
    loss = (log_total - values.gather(1, targets[:, None])).sum()
    # d loss / d logits is the softmax, minus 1 at the target.
    values.sub_(log_total).exp_()
    values.scatter_add_(1, targets[:, None], -torch.ones_like(log_total))
    logits.copy_(values * slope if softcap else values)
    return loss
