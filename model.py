"""The transformer, and the one flat line of tokens it runs on.

Axes, here and in every other file:
    T tokens of the packed line     R rows (sentences, pairs, documents)     D width
    H heads     K size of a head    V vocabulary                             N selected positions or items
"""

import io
import os
import warnings
from dataclasses import asdict, dataclass, field, fields, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from data import BadInput, write_atomic
from kernels import schedule, why_not

# ---------------------------------------------------------------------------------------------------------------------
# Packed: a batch is one line of tokens, and every token says what it may see


class View(NamedTuple):
    """One stretch of a row. `causal`: a token sees the view up to itself; otherwise the whole view.
    `shares` = (index of an earlier view of the row, how many of its first tokens): those are visible too, and
    positions continue after them. `positions` overrides the running count (a masked row whose hidden tokens are gone)."""
    tokens: np.ndarray
    causal: bool = False
    shares: tuple[int, int] | None = None
    positions: np.ndarray | None = None


@dataclass
class Packed:
    """A batch of R rows as one line of T tokens: no padding, and one visibility rule.

    tokens (T,) int64, positions (T,) int64, rows (R+1,) int32: where each row starts; live: the tokens of all rows, T unless `filled`.
    sees (T, 4) int32: token i may attend to key j  iff  sees[i,0] <= j < sees[i,1]  or  sees[i,2] <= j < sees[i,3].
    plans: what a back end of `attention` needs beside that, made once per batch and used by every layer; see `plan`.
    """
    tokens: torch.Tensor
    positions: torch.Tensor
    sees: torch.Tensor
    rows: torch.Tensor
    live: int
    plans: dict = field(default_factory=dict, repr=False)

    @staticmethod
    def of(rows, causal=False):
        """Pack plain rows: each an array of ids that sees itself (all of it, or causally) and nothing else."""
        return Packed.views([[View(np.asarray(row), causal)] for row in rows])

    @staticmethod
    def views(rows):
        """Pack rows of views (list of lists of View). Rows never see each other."""
        views = [view for row in rows for view in row]
        lengths = np.array([len(view.tokens) for view in views])
        if not len(views) or lengths.min() == 0:
            raise BadInput("a batch holds an empty row or view: every view needs at least one token")
        ends = np.cumsum(lengths)
        starts = ends - lengths
        shared = np.zeros((len(views), 2), np.int64)                     # the block each view shares: start, length
        index = 0
        for row in rows:
            for place, view in enumerate(row):
                if view.shares:
                    shared[index] = starts[index - place + view.shares[0]], view.shares[1]
                index += 1
        of = np.repeat(np.arange(len(views)), lengths)                   # (T,): the view of each token
        place = np.arange(len(of))
        causal = np.array([view.causal for view in views])[of]
        start, length = shared[of].T
        sees = np.stack([starts[of], np.where(causal, place + 1, ends[of]), start, start + length], 1)
        positions = place - starts[of] + length
        for view, s in zip(views, starts):
            if view.positions is not None:
                positions[s:s + len(view.tokens)] = view.positions
        bounds = np.cumsum([0] + [sum(len(view.tokens) for view in row) for row in rows])
        tokens = np.concatenate([view.tokens for view in views]).astype(np.int64)
        return Packed(torch.from_numpy(tokens), torch.from_numpy(positions), torch.from_numpy(sees.astype(np.int32)),
                      torch.from_numpy(bounds.astype(np.int32)), len(tokens))

    def to(self, device):
        return each_tensor(self, lambda x: x.to(device))

    def plan(self, need, device=None):
        """The plan of a back end: Padded for `need` "sdpa", kernels.schedule.Plan for (query heads a key head, head size, bytes of a number).
        train.py asks for it beside the loop, while the batch is on the host, naming the device that will compute; who did not ask gets it
        from the first layer. BadInput if the kernels cannot express the mask."""
        if need not in self.plans:
            sees, device = self.sees.cpu().numpy(), device or self.sees.device
            if need == "sdpa":
                plan = pad_plan(sees, self.rows.cpu().numpy())
            else:
                share, *kind = need
                try:
                    plan = schedule.plan(sees, share, *schedule.choose(torch.cuda.get_device_capability(device) if device.type == "cuda" else None, *kind))
                except ValueError as error:
                    raise BadInput(f"attention triton cannot run this batch: {error}; --attention sdpa can") from None
            self.plans[need] = each_tensor(plan, lambda x: x.to(self.sees.device))
        return self.plans[need]

    def filled(self, multiple):
        """The same line with dead tokens behind it, up to a multiple of so many: they see nothing and nothing sees them. Few shapes of the line
        are few kernels for torch.compile to make. Only the tokens of rows count as `live`."""
        more = -len(self.tokens) % multiple
        pad = lambda x: torch.cat([x, x.new_zeros(more, *x.shape[1:])])
        return Packed(pad(self.tokens), pad(self.positions), pad(self.sees), self.rows, self.live)

    def __len__(self):
        return len(self.rows) - 1

    def pairs(self):
        """How many (token, key) pairs are visible: what attention must compute, per head."""
        low, high, low2, high2 = self.sees.long().T
        return int((high - low + high2 - low2).sum())


def each_tensor(value, change):
    """A batch with every tensor changed, whatever it stands in: dictionaries, lists, tuples, Packed and their plans."""
    if torch.is_tensor(value):
        return change(value)
    if isinstance(value, dict):
        return {name: each_tensor(item, change) for name, item in value.items()}
    if isinstance(value, Packed):
        return Packed(**each_tensor(vars(value), change))
    if isinstance(value, (list, tuple)):
        items = [each_tensor(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def length_classes(lengths, most=4):
    """Split sorted row lengths into at most `most` classes so that the padded square area, sum of rows x longest^2,
    is least; (R,) ints, ascending -> list of (first, last+1). Dynamic programme over at most 64 distinct lengths."""
    values, first = np.unique(-(-lengths // max(1, lengths[-1] // 64)), return_index=True)
    edges = np.append(first, len(lengths))                               # groups of (nearly) equal length
    groups, longest = len(values), lengths[edges[1:] - 1].astype(float)
    price = (edges[None, 1:] - edges[:-1, None]) * longest[None] ** 2    # price[a, b]: one class of groups a..b
    price[np.tril_indices(groups, -1)] = np.inf
    best, cuts = price[0], []
    for _ in range(min(most, groups) - 1):
        split = best[:-1, None] + price[1:]                              # earlier classes end at a, the last is a+1..b
        cuts.append(split.argmin(0))
        best = np.minimum(best, split.min(0))
    bounds, last = [], groups - 1
    for cut in reversed(cuts):                                           # walk back through the cheapest cuts
        bounds.append((edges[cut[last] + 1], edges[last + 1]))
        last = cut[last]
    return [(0, edges[last + 1])] + bounds[::-1]


class Padded(NamedTuple):
    """The plan of `sdpa`: gather (P,) padded slot -> token; scatter (T,) token -> its slot; (rows, length, mask) of each length class."""
    gather: torch.Tensor
    scatter: torch.Tensor
    classes: list[tuple[int, int, torch.Tensor | None]]


def pad_plan(sees, bounds):
    """The padded layout of the `sdpa` back end: rows sorted by length into a few classes, each padded to its longest. A dead token is a row
    that sees itself: PyTorch's kernel has no answer for one that sees nothing."""
    dead = np.arange(bounds[-1], len(sees))
    bounds, sees = np.concatenate([bounds, dead + 1]), np.concatenate([sees[:bounds[-1]], np.stack([dead, dead + 1, dead * 0, dead * 0], 1)])
    lengths = np.diff(bounds)
    order = np.argsort(lengths, kind="stable")
    gather, classes, scatter, base = [], [], np.empty(bounds[-1], np.int64), 0
    for first, last in length_classes(lengths[order]):
        rows = order[first:last]
        longest = int(lengths[rows[-1]])
        offset = np.arange(longest)
        real = offset < lengths[rows, None]                              # (n, L)
        token = np.where(real, bounds[rows, None] + offset, bounds[rows, None])
        scatter[token[real]] = base + np.flatnonzero(real.ravel())
        low, high, low2, high2 = np.moveaxis(sees[token], -1, 0)         # (n, L) each
        start, end = bounds[rows, None], bounds[rows + 1, None]
        if ((low == start) & (high == end))[real].all():                 # every token sees its whole row
            mask = None if real.all() else real[:, None, None]           # (n, 1, 1, L)
        else:
            key = (start + offset)[:, None]                              # (n, 1, L)
            mask = (low[..., None] <= key) & (key < high[..., None]) | (low2[..., None] <= key) & (key < high2[..., None])
            mask = (mask & real[:, None] | np.eye(longest, dtype=bool) & ~real[..., None])[:, None]   # padding sees itself
        gather.append(token.ravel())
        classes.append((len(rows), longest, None if mask is None else torch.from_numpy(mask)))
        base += token.size
    return Padded(torch.from_numpy(np.concatenate(gather).astype(np.int64)), torch.from_numpy(scatter), classes)


class Rearrange(torch.autograd.Function):
    """y = x[index] where `inverse` undoes it: the backward is a gather too, never a scatter-add."""

    @staticmethod
    def forward(ctx, x, index, inverse, padded):
        ctx.save_for_backward(index, inverse)
        ctx.padded, ctx.rows = padded, len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        index, inverse = ctx.saved_tensors
        if ctx.padded:                                                   # line -> padded; padding slots carry no gradient
            return grad.index_select(0, inverse), None, None, None
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, index, grad), None, None, None


BACK_ENDS = ("auto", "sdpa", "triton")


def attention(qkv, heads, kv_heads, packed, back_end="auto", cap=0.0):
    """Attention over the packed line under `packed.sees`: qkv (T, (H + 2 Hkv) K), the heads of q, then k, then v -> (T, H K). Softmax scale
    1 / sqrt(K). By the kernels of kernels/attention.py (`triton`), or by PyTorch's own on rows padded per length class (`sdpa`), which
    alone can `cap` the scores."""
    size = qkv.shape[1] // (heads + 2 * kv_heads)
    if back_end == "auto":
        back_end = "triton" if qkv.is_cuda and not cap and not why_not(qkv.device, size) else "sdpa"
    if back_end == "triton":
        from kernels.attention import attention as fused  # here, because it needs Triton
        return fused(qkv, heads, kv_heads, packed.sees, packed.plan((heads // kv_heads, size, qkv.element_size())))
    return padded_attention(qkv, heads, kv_heads, packed.plan("sdpa"), cap)


@torch.compiler.disable                                                  # every batch has other length classes: it would be compiled again and again
def padded_attention(qkv, heads, kv_heads, plan, cap):
    """`attention` by PyTorch's own kernel, on rows padded per length class."""
    padded = Rearrange.apply(qkv, plan.gather, plan.scatter, True)       # (P, ...): padding repeats a row's first token
    outputs, base = [], 0
    for rows, length, mask in plan.classes:
        part = padded[base:base + rows * length].view(rows, length, heads + 2 * kv_heads, -1).transpose(1, 2)
        q, k, v = part.split([heads, kv_heads, kv_heads], 1)             # (n, heads, L, K)
        out = mixed(q, k, v, mask, cap)
        outputs.append(out.transpose(1, 2).reshape(rows * length, -1))
        base += rows * length
    return Rearrange.apply(torch.cat(outputs), plan.scatter, plan.gather, False)          # (T, H K)


def mixed(q, k, v, mask, cap=0.0):
    """softmax(q k' / sqrt(K)) v of q (R, H, n, K), k, v (R, Hkv, m, K) -> (R, H, n, K), under a mask that broadcasts to (R, H, n, m), or None.
    `cap`: a score s becomes cap tanh(s / cap) [Gemma 2, sec. 2]."""
    if not cap:
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1])
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = cap * (q @ k.transpose(2, 3) / (cap * q.shape[3] ** 0.5)).tanh()
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1, torch.promote_types(v.dtype, torch.float32)).to(v.dtype) @ v


def set_attention(module, asked, device, bytes):
    """Settle the back end of every Block of a module that will run on `device` with numbers of so many bytes -> the set of plans that
    its batches need. BadInput if `triton` is asked for and cannot run; `auto` takes it wherever it can, on CUDA."""
    needs = set()
    for block in (block for block in module.modules() if isinstance(block, Block)):
        reason = why_not(device, block.size) or "capped scores are not in the kernels" * (block.config.score_cap > 0)
        if asked == "triton" and reason:
            raise BadInput(f"attention triton cannot be used here: {reason}; --attention auto chooses")
        block.back_end = "triton" if asked == "triton" or asked == "auto" and device.type == "cuda" and not reason else "sdpa"
        needs.add((block.config.heads // block.kv_heads, block.size, bytes) if block.back_end == "triton" else "sdpa")
    return needs


# ---------------------------------------------------------------------------------------------------------------------
# The transformer


@dataclass(frozen=True)
class ModelConfig:
    vocab: int = 1200  # V, size of the vocabulary
    width: int = 128  # D, the width of the states
    layers: int = 3  # blocks
    heads: int = 4  # H, attention heads
    kv_heads: int = 0  # heads of keys and values; 0: as many as heads
    head_size: int = 0  # K, numbers of a head; 0: width / heads
    hidden: int = 512  # width inside the feed-forward
    shapes: tuple[tuple[int, int, int], ...] = ()  # heads, kv_heads and hidden of each block where they differ (OpenELM)
    max_length: int = 512  # longest view in tokens, [CLS] and [SEP] included
    norm: str = "layernorm"  # layernorm or rmsnorm
    norm_place: str = "post"  # post (BERT, XLM-R) or pre (Llama); branch: at the end of each branch (OLMo-2); both: pre and branch (Gemma-2)
    norm_epsilon: float = 1e-5  # added to the variance (BERT: 1e-12)
    positions: str = "learned"  # learned, sinusoidal or rotary
    position_offset: int = 0  # unused rows before position 0 of the learned table (XLM-R: 2)
    theta: float = 10000.0  # base wavelength of rotary positions
    stretch: tuple[float, ...] = ()  # of rotary positions (Llama-3.1): factor, low and high frequency factor, length before it
    activation: str = "gelu"  # gelu, swiglu or geglu (Gemma: gated by tanh-GELU)
    bias: bool = True  # biases in every linear map
    qkv_bias: bool = False  # in those of queries, keys and values, even without the others (Qwen2)
    qk_norm: str = "none"  # RMS norm of queries and keys: none, of each head (Qwen3), or whole (OLMo-2: all heads at once)
    embed_scale: float = 1.0  # embeddings are multiplied by it (Gemma: by the root of the width)
    score_cap: float = 0.0  # attention's scores s become cap tanh(s / cap) (Gemma-2: 50); 0: they stay
    logit_cap: float = 0.0  # the same of the vocabulary's logits (Gemma-2: 30)
    tied: bool = True  # the vocabulary projection is the embedding matrix
    head: str = "none"  # before the vocabulary: none, bias, or transform (BERT: dense, GELU, norm, bias)
    dropout: float = 0.1  # on embeddings and on both branches of a block; none inside attention
    causal: bool = False  # the model was trained left to right
    pool: str = "cls"  # sentence vector: cls, mean, max, last, weighted or attention

    def __post_init__(self):
        choices = dict(norm=("layernorm", "rmsnorm"), norm_place=("post", "pre", "branch", "both"), activation=("gelu", "swiglu", "geglu"),
                       qk_norm=("none", "head", "whole"), positions=("learned", "sinusoidal", "rotary"), head=("none", "bias", "transform"), pool=POOLS)
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise BadInput(f"{name} is {getattr(self, name)!r}: choose one of {', '.join(allowed)}")
        for least, names in enumerate(("layers kv_heads head_size position_offset score_cap logit_cap", "vocab width heads hidden max_length")):
            for name in names.split():
                if getattr(self, name) < least:
                    raise BadInput(f"{name} is {getattr(self, name)}: it must be at least {least}")
        for name in ("norm_epsilon", "theta", "embed_scale"):
            if not 0 < getattr(self, name) < float("inf"):
                raise BadInput(f"{name} is {getattr(self, name)}: it must be positive and finite")
        if not self.head_size and self.width % self.heads:
            raise BadInput(f"width {self.width} is not a multiple of heads {self.heads}: change one of them, or give head_size")
        if self.heads % (self.kv_heads or self.heads):
            raise BadInput(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}: change one of them")
        if self.positions == "rotary" and self.size % 2:
            raise BadInput(f"rotary positions need an even head size, not {self.size}")
        if self.shapes and (len(self.shapes) != self.layers or not self.head_size):
            raise BadInput(f"shapes of {len(self.shapes)} blocks need as many layers, not {self.layers}, and a head_size of their own")
        if self.stretch and not (len(self.stretch) == 4 and min(self.stretch) > 0 and self.stretch[1] < self.stretch[2]):
            raise BadInput(f"stretch is {self.stretch}: it must be four positive numbers, the second below the third")
        if not 0 <= self.dropout < 1:
            raise BadInput(f"dropout is {self.dropout}: it must be in [0, 1)")

    @property
    def size(self):
        """K"""
        return self.head_size or self.width // self.heads

    def blocks(self):
        """The config of each block."""
        return [replace(self, shapes=(), heads=heads, kv_heads=kv_heads, hidden=hidden) for heads, kv_heads, hidden in self.shapes] or [self] * self.layers


POOLS = ("cls", "mean", "max", "last", "weighted", "attention")
_XLMR = dict(position_offset=2)
DECODER = dict(norm="rmsnorm", norm_place="pre", positions="rotary", position_offset=0, activation="swiglu", bias=False)   # Llama's choices
SIZES = {   # encoder shapes; base and large are XLM-R's
    "toy": dict(width=128, layers=3, heads=4, hidden=512, dropout=0.0),
    "small": dict(width=384, layers=6, heads=6, hidden=1536),
    "base": dict(width=768, layers=12, heads=12, hidden=3072, **_XLMR),
    "large": dict(width=1024, layers=24, heads=16, hidden=4096, **_XLMR),
}


class RMSNorm(nn.Module):
    """x / sqrt(mean x^2 + epsilon) * weight, computed in float32 (or wider) [Zhang & Sennrich 2019, eq. 4]."""

    def __init__(self, width, epsilon):
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(width)), epsilon

    def forward(self, x):
        wide = x.float() if x.element_size() < 4 else x
        return (wide * (wide.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()).to(x.dtype) * self.weight


def make_norm(config):
    return (nn.LayerNorm if config.norm == "layernorm" else RMSNorm)(config.width, config.norm_epsilon)


def sinusoids(positions, width):
    """(T,) -> (T, D): sine on even, cosine on odd dimensions, wavelengths 2 pi 10000^(2i/D) [Vaswani et al. 2017, 3.5]."""
    angles = turns(positions, width, 10000.0)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width]


def rotary(positions, size, theta, stretch=()):
    """(T,) -> cosines and sines (T, 1, K): the angle of dimension pair (i, i + K/2) is position * theta^(-2i/K) [Su et al. 2021]."""
    angles = turns(positions, size, theta, stretch).repeat(1, 2)[:, None]
    return angles.cos(), angles.sin()


def turns(positions, size, theta, stretch=()):
    """position * theta^(-2i/size) for i in 0..size/2: (T,) -> (T, size/2), float64 where the device has it. `stretch` (factor, low, high,
    length) makes those that turn less than `low` times in `length` positions slower by `factor`, leaves those that turn more than
    `high` times, and blends between [Llama 3.1's released code]."""
    exact = torch.float32 if positions.device.type == "mps" else torch.float64
    rates = theta ** (-torch.arange(0, size, 2, device=positions.device, dtype=exact) / size)
    if stretch:
        factor, low, high, length = stretch
        kept = ((length * rates / (2 * torch.pi) - low) / (high - low)).clamp(0, 1)
        rates = rates * (kept + (1 - kept) / factor)
    return positions[:, None].to(exact) * rates


def rotate(x, angles):
    """Turn x (T, heads, K) by its positions' angles; the two halves of K are the two coordinates of each plane."""
    cosine, sine = (a.to(x.dtype) for a in angles)
    left, right = x.chunk(2, -1)
    return x * cosine + torch.cat([-right, left], -1) * sine


class Block(nn.Module):
    """Attention and feed-forward, each with a residual branch: (T, D) -> (T, D)."""
    back_end = "auto"                                                    # of attention; `set_attention` settles it for a run

    def __init__(self, config):
        super().__init__()
        self.config, c = config, config
        self.kv_heads, self.size = c.kv_heads or c.heads, c.size
        self.qkv = nn.Linear(c.width, (c.heads + 2 * self.kv_heads) * self.size, c.bias or c.qkv_bias)
        self.out = nn.Linear(c.heads * self.size, c.width, c.bias)
        self.up = nn.Linear(c.width, c.hidden * (1 if c.activation == "gelu" else 2), c.bias)
        self.down = nn.Linear(c.hidden, c.width, c.bias)
        self.norm1, self.norm2 = (nn.Identity() if c.norm_place == "branch" else make_norm(c) for _ in range(2))
        self.end1, self.end2 = (make_norm(c) if c.norm_place in ("branch", "both") else nn.Identity() for _ in range(2))
        if c.qk_norm != "none":
            self.q_norm, self.k_norm = (RMSNorm(self.size * (heads if c.qk_norm == "whole" else 1), c.norm_epsilon) for heads in (c.heads, self.kv_heads))
        self.dropout = nn.Dropout(c.dropout)

    def project(self, x, angles):
        """States (..., D) -> (..., (H + 2 Hkv) K): the heads of q, then k, then v, with q and k normalised and turned to their positions."""
        c, qkv = self.config, self.qkv(x)
        if angles is None and c.qk_norm == "none":
            return qkv
        turned, v = qkv.unflatten(-1, (-1, self.size)).split([c.heads + self.kv_heads, self.kv_heads], -2)
        if c.qk_norm != "none":
            parts = zip((self.q_norm, self.k_norm), turned.split([c.heads, self.kv_heads], -2))
            whole = lambda norm, x: norm(x.flatten(-2)).view_as(x)
            turned = torch.cat([whole(norm, x) if c.qk_norm == "whole" else norm(x) for norm, x in parts], -2).to(v.dtype)
        turned = turned if angles is None else rotate(turned, angles)
        return torch.cat([turned, v], -2).flatten(-2)

    def feed(self, x):
        x = self.up(x)
        if self.config.activation == "gelu":
            return self.down(F.gelu(x))
        gate, x = x.chunk(2, -1)
        return self.down((F.silu(gate) if self.config.activation == "swiglu" else F.gelu(gate, approximate="tanh")) * x)

    def branches(self, x, angles, mix):
        """The two branches, around a function `mix` of (..., (H + 2 Hkv) K) -> (..., H K) that is the attention: (..., D) -> (..., D)."""
        place = self.config.norm_place
        attend = lambda x: self.out(mix(self.project(x, angles)))
        for branch, norm, end in ((attend, self.norm1, self.end1), (self.feed, self.norm2, self.end2)):
            x = norm(x + self.dropout(branch(x))) if place == "post" else x + self.dropout(end(branch(norm(x))))
        return x

    def forward(self, x, packed, angles=None):
        c = self.config
        return self.branches(x, angles, lambda qkv: attention(qkv, c.heads, self.kv_heads, packed, self.back_end, c.score_cap))


def initialise(module, width):
    """Normal weights, zero biases, norms the identity. BERT's deviation is .02 at width 768; it goes with 1 / sqrt(width), so that
    the branches of a narrow model start as strong beside the residual as BERT's do [BERT, sec. A.2]."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02 * (768 / width) ** 0.5)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class Model(nn.Module):
    """One transformer for both directions: what a token sees is the batch's business, not the model's."""

    def __init__(self, config):
        super().__init__()
        self.config, c = config, config
        self.embed = nn.Embedding(c.vocab, c.width)
        if c.positions == "learned":
            self.place = nn.Embedding(c.max_length + c.position_offset, c.width)
        self.norm = make_norm(c)                                         # post: after the embeddings; otherwise: after the last block
        self.dropout = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(Block(one) for one in c.blocks())
        if c.head == "transform":
            self.transform, self.transform_norm = nn.Linear(c.width, c.width), make_norm(c)
        if c.head != "none":
            self.vocabulary_bias = nn.Parameter(torch.zeros(c.vocab))
        if not c.tied:
            self.vocabulary = nn.Linear(c.width, c.vocab, bias=False)
        self.apply(lambda module: initialise(module, c.width))

    def forward(self, packed):
        """Packed -> states (T, D) of the last layer, after the final norm."""
        x, angles = self.begin(packed.tokens, packed.positions)
        for block in self.blocks:
            x = block(x, packed, angles)
        return self.end(x)

    def begin(self, tokens, positions):
        """Tokens (..., T) at positions (T,) -> what the first block reads: states (..., D), and the angles of rotary positions or None."""
        c, angles, x = self.config, None, self.embed(tokens)
        x = x if c.embed_scale == 1 else x * c.embed_scale
        if c.positions == "learned":
            x = x + self.place(positions + c.position_offset)
        elif c.positions == "sinusoidal":
            x = x + sinusoids(positions, c.width).to(x.dtype)
        else:
            angles = rotary(positions, c.size, c.theta, c.stretch)
        return self.dropout(self.norm(x) if c.norm_place == "post" else x), angles

    def end(self, x):
        return x if self.config.norm_place == "post" else self.norm(x)

    def head(self, states):
        """(N, D) -> what the logits (N, V) are the F.linear of: states (N, D), weight (V, D), bias (V,) or None."""
        if self.config.head == "transform":
            states = self.transform_norm(F.gelu(self.transform(states)))
        return states, self.embed.weight if self.config.tied else self.vocabulary.weight, self.vocabulary_bias if self.config.head != "none" else None

    def logits(self, states):
        """(N, D) -> (N, V): call it on the positions that are asked for only."""
        logits, cap = F.linear(*self.head(states)), self.config.logit_cap
        return cap * (logits / cap).tanh() if cap else logits

    def pool(self, states, packed, how=None):
        """States (T, D) -> one vector a row (R, D): its first state (cls), its last, their mean or their maximum. Of Predict-and-Reconstruct's
        code: `weighted`, whose weights are all equal, so that it is the mean; `attention`, the softmax of one random query and
        random keys, both untrained (theirs differ from model to model, these are the same for all)."""
        how = how or self.config.pool
        if how in ("cls", "last"):
            return states[(packed.rows[:-1] if how == "cls" else packed.rows[1:] - 1).long()]
        states, lengths, width = states[:packed.live], packed.rows.diff().long(), states.shape[1]      # (R,)
        of = torch.repeat_interleave(lengths, output_size=len(states))   # (T,): the row of each token
        if how == "max":
            empty = states.new_full((len(lengths), width), -torch.inf)
            return empty.scatter_reduce(0, of[:, None].expand_as(states), states, "amax")
        weights = states.new_ones(len(states))
        if how == "attention":
            chance = torch.Generator().manual_seed(0)
            keys = (2 * torch.rand(width, width, generator=chance) - 1) / width ** 0.5       # as nn.Linear begins
            scores = states @ (torch.randn(width, generator=chance) @ keys).to(states) / width ** 0.5
            highest = scores.new_full((len(lengths),), -torch.inf).scatter_reduce(0, of, scores, "amax")
            weights = (scores - highest[of]).exp()
        total = weights.new_zeros(len(lengths)).index_add_(0, of, weights)
        return states.new_zeros(len(lengths), width).index_add_(0, of, states * weights[:, None]) / total[:, None]


def attention_weights(model, packed, places, layer=-1):
    """What the tokens at some `places` of the line (N,) attend to in one layer -> for each a tensor (H, L) of probabilities over the L keys
    that it sees, in the order of the line. `attention` never forms them, so they are computed once more from the layer's input."""
    block, x, angles = model.blocks[layer], [], []
    hooks = [block.register_forward_pre_hook(lambda module, given: angles.append(given[2])),
             block.qkv.register_forward_pre_hook(lambda module, given: x.append(given[0]))]                # past the norm, wherever that stands
    try:
        model(packed)
    finally:
        for hook in hooks:
            hook.remove()
    heads, kv_heads = block.config.heads, block.kv_heads
    q, k, _ = block.project(x[0], angles[0]).unflatten(-1, (-1, block.size)).split([heads, kv_heads, kv_heads], 1)
    k, weights = k.repeat_interleave(heads // kv_heads, 1), []           # (T, H, K)
    for place, (low, high, low2, high2) in zip(places.tolist(), packed.sees[places].tolist()):
        seen = torch.cat([k[low2:high2], k[low:high]])                   # (L, H, K): what is shared stands earlier in the line
        scores = (seen * q[place]).sum(-1) / block.size ** 0.5           # (L, H)
        scores = cap * (scores / cap).tanh() if (cap := block.config.score_cap) else scores
        weights.append(scores.softmax(0, torch.promote_types(scores.dtype, torch.float32)).T)
    return weights


# ---------------------------------------------------------------------------------------------------------------------
# LoRA: train a low-rank difference to frozen weights [Hu et al. 2022, eq. 3]


class LowRank(nn.Module):
    """A frozen linear map and a trained difference: W x + (alpha / rank) B A x, with B = 0 at the start."""

    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.linear, self.scale = linear.requires_grad_(False), alpha / rank
        self.a = nn.Parameter(torch.randn(rank, linear.in_features, device=linear.weight.device) / rank)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank, device=linear.weight.device))

    def forward(self, x):
        return self.linear(x) + F.linear(F.linear(x, self.a), self.b) * self.scale

    def merged(self):
        return self.linear.weight + self.b @ self.a * self.scale


class NewRows(nn.Module):
    """A frozen embedding of which only the rows `ids` are trained; `weight` (V, D) is the whole table, for tied logits too."""

    def __init__(self, embedding, ids):
        super().__init__()
        self.embedding = embedding.requires_grad_(False)
        self.register_buffer("ids", torch.as_tensor(ids, device=embedding.weight.device), persistent=False)
        self.rows = nn.Parameter(embedding.weight[self.ids].clone())

    @property
    def weight(self):
        return self.embedding.weight.index_copy(0, self.ids, self.rows)

    def forward(self, tokens):
        return F.embedding(tokens, self.weight)


LINEARS = ("qkv", "out", "up", "down")


def add_lora(model, rank, alpha, targets=LINEARS, new_ids=()):
    """Freeze a Model and train low-rank differences of the `targets` of every block, and the embeddings of `new_ids`."""
    for name in targets:
        if name not in LINEARS:
            raise BadInput(f"LoRA target {name!r} is unknown: choose from {', '.join(LINEARS)}")
    model.requires_grad_(False)
    for block in model.blocks:
        for name in targets:
            setattr(block, name, LowRank(getattr(block, name), rank, alpha))
    if len(new_ids):
        model.embed = NewRows(model.embed, new_ids)
    return model


def plain_weights(model):
    """The state of a Model under the names it has without LoRA, differences merged: what `load` reads."""
    state = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, (LowRank, NewRows)):
            for key in [key for key in state if key.startswith(name + ".")]:
                inner = key[len(name) + 1:]
                value = state.pop(key)
                if inner == "linear.bias":
                    state[f"{name}.bias"] = value
            state[f"{name}.weight"] = (module.merged() if isinstance(module, LowRank) else module.weight).detach()
    return state


# ---------------------------------------------------------------------------------------------------------------------
# Files


def save(model, path):
    """Write config and weights as one file that `load` rebuilds alone; the file is whole or absent."""
    write_torch({"config": asdict(model.config), "weights": plain_weights(model)}, path)


def load(path, device="cpu"):
    """Rebuild a saved Model, in eval mode; a field that is younger than the file has its default. BadInput if the file is missing, damaged,
    or its weights contradict its config."""
    saved = read_torch(path, device)
    if not isinstance(saved, dict) or not all(isinstance(saved.get(key), dict) for key in ("config", "weights")):
        raise BadInput(f"{path} is not a model file: it lacks 'config' or 'weights'; point to the model.pt of a run")
    if unknown := sorted(set(saved["config"]) - {field.name for field in fields(ModelConfig)}):
        raise BadInput(f"{path}: this version does not know its config fields {', '.join(unknown)}: use the version that wrote it")
    try:
        model = Model(ModelConfig(**saved["config"])).to(device)
    except TypeError as error:                                           # a value of another type than its field
        raise BadInput(f"{path}: its config cannot be right ({error})") from None
    load_weights(model, saved["weights"], path)
    return model.eval()


def load_weights(module, weights, path):
    """Strict load; BadInput lists every missing, extra or misshapen name."""
    own = module.state_dict()
    wrong = [f"missing {name}" for name in own if name not in weights]
    wrong += [f"unknown {name}" for name in weights if name not in own]
    wrong += [f"{name} has shape {tuple(weights[name].shape)}, not {tuple(own[name].shape)}"
              for name in own if name in weights and weights[name].shape != own[name].shape]
    if wrong:
        raise BadInput(f"{path} does not fit this architecture: {'; '.join(wrong)}")
    module.load_state_dict(weights)


def write_torch(value, path):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    write_atomic(path, buffer.getbuffer())


def read_torch(path, device="cpu"):
    if not os.path.isfile(path):
        raise BadInput(f"{path} does not exist: give the folder of a run, such as out/mexma")
    try:
        with warnings.catch_warnings():                                  # torch warns of an old pickle before it refuses it
            warnings.simplefilter("ignore")
            return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:                                           # torch raises a dozen types for a bad file
        raise BadInput(f"{path} cannot be read as a checkpoint ({type(error).__name__}): it is damaged or of another kind")


def size_config(size, **changes):
    """The ModelConfig of a named size with `changes` applied; BadInput for an unknown size."""
    if size not in SIZES:
        raise BadInput(f"size {size!r} is unknown: choose one of {', '.join(SIZES)}")
    return replace(ModelConfig(**SIZES[size]), **changes)
