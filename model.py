"""The transformer, and the one flat line of tokens it runs on.

Axes, here and in every other file:
    T tokens of the packed line     R rows (sentences, pairs, documents)     D width
    H heads     K size of a head    V vocabulary                             N selected positions
"""

import io
import itertools
import os
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import kernels
from corpora.folder import write_atomic
from corpora.program import BadInput, check_range, validate
from kernels.cross_entropy import upcast
from kernels.padded import sdpa

# ---- a batch is one line of tokens, and every token says which keys it may see


class Segment(NamedTuple):
    """One stretch of a row. A token sees the whole segment or, if it is `causal`, up to itself."""
    tokens: np.ndarray
    causal: bool = False
    # (an earlier segment of the row, n): that segment's first n tokens are visible too, and the
    # positions continue after them. The prefix of that segment itself is not visible.
    prefix: tuple[int, int] | None = None
    positions: np.ndarray | None = None  # in place of the running count


@dataclass
class Packed:
    """A batch of R rows as one line of T tokens: no padding, and one rule of visibility.

    Token i may attend to key j  iff  key_ranges[i,0] <= j < key_ranges[i,1]  (its own segment)
                                  or  key_ranges[i,2] <= j < key_ranges[i,3]  (its prefix).
    key_ranges[i,1] is the end of the segment or, of a causal one, i + 1.
    """
    tokens: torch.Tensor  # (T,) int64
    positions: torch.Tensor  # (T,) int64, of each token in its own segment
    key_ranges: torch.Tensor  # (T, 4) int32; without a prefix 0, 0
    cu_seqlens: torch.Tensor  # (R+1,) int32, where each row starts
    plans: dict = field(default_factory=dict, repr=False)  # what `plan` made

    @staticmethod
    def of(rows, causal=False):
        """Pack plain rows: each an array of ids that sees itself, all of it or causally."""
        return Packed.of_segments([[Segment(np.asarray(row), causal)] for row in rows])

    @staticmethod
    def of_segments(rows):
        """Pack rows of segments: lists of lists of Segment. Rows never see each other."""
        segments = list(itertools.chain(*rows))
        lengths = np.array([len(segment.tokens) for segment in segments])  # (S,)
        if not segments or lengths.min() == 0:
            raise BadInput("a batch holds an empty row or segment: each needs at least one token")
        ends = np.cumsum(lengths)
        starts = ends - lengths
        counts = [len(row) for row in rows]
        first_of_row = np.repeat(np.cumsum(counts) - counts, counts)  # (S,)
        prefixes = np.zeros((len(segments), 2), np.int64)  # start, length
        for i, segment in enumerate(segments):
            if segment.prefix:
                earlier, length = segment.prefix
                prefixes[i] = starts[first_of_row[i] + earlier], length
        # From here on one number a token, (T,).
        owner = np.repeat(np.arange(len(segments)), lengths)
        index = np.arange(len(owner))
        causal = np.array([segment.causal for segment in segments])[owner]
        last = np.where(causal, index + 1, ends[owner])
        first, length = prefixes[owner].T
        key_ranges = np.stack([starts[owner], last, first, first + length], 1)
        positions = index - starts[owner] + length
        for segment, start, end in zip(segments, starts, ends, strict=True):
            if segment.positions is not None:
                positions[start:end] = segment.positions
        tokens = np.concatenate([segment.tokens for segment in segments]).astype(np.int64)
        cu_seqlens = np.append(0, ends)[np.append(0, np.cumsum(counts))]
        line = (tokens, positions, key_ranges.astype(np.int32), cu_seqlens.astype(np.int32))
        return Packed(*map(torch.from_numpy, line))

    def mask(self, row):
        """The mask of a row, (L, L) bool: may its token i attend to its token j?"""
        start, end = self.cu_seqlens[row:row + 2].tolist()
        key = torch.arange(start, end, device=self.key_ranges.device)
        first, last, first2, last2 = self.key_ranges[start:end].T[..., None]  # (L, 1) each
        return (first <= key) & (key < last) | (first2 <= key) & (key < last2)

    def row_of_token(self):
        """(T,) the number of each token's row."""
        return torch.repeat_interleave(self.cu_seqlens.diff().long(), output_size=len(self.tokens))

    def plan(self, need, device=None):
        """What a back end of attention must know of this batch, made once: by the first layer or
        beside the loop, for a `device` where the batch is not yet. BadInput if it cannot run it."""
        if need not in self.plans:
            self.plans[need] = self._make_plan(need, device)
        return self.plans[need]

    def _make_plan(self, need, device):
        home = self.key_ranges.device
        mask = (self.key_ranges.cpu().numpy(), self.cu_seqlens.cpu().numpy())
        try:
            plan = kernels.make_plan(need, *mask, device or home)
        except ValueError as error:
            raise BadInput(str(error)) from None
        return each_tensor(plan, lambda x: x.to(home))

    def to(self, device):
        return each_tensor(self, lambda x: x.to(device))

    def __len__(self):
        return len(self.cu_seqlens) - 1

    def visible_pairs(self):
        """How many (token, key) pairs are visible: what attention must compute, per head."""
        first, last, first2, last2 = self.key_ranges.long().T
        return int((last - first + last2 - first2).sum())


def each_tensor(value, change):
    """A batch with every tensor changed: in dictionaries, lists, tuples, Packed and its plans."""
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


def to_device(batch, device):
    """A batch on the device; to a GPU from pinned memory, so that the loop need not wait."""
    if device.type == "cuda":
        return each_tensor(batch, lambda x: x.pin_memory().to(device, non_blocking=True))
    return each_tensor(batch, lambda x: x.to(device))


# ---- the configuration


@dataclass(frozen=True)
class ModelConfig:
    vocab: int = 1200  # V, size of the vocabulary
    width: int = 128  # D, the width of the states
    layers: int = 3  # blocks
    heads: int = 4  # H, attention heads
    kv_heads: int = 0  # heads of keys and values; 0: as many as heads
    head_dim: int = 0  # K, numbers of a head; 0: width / heads
    ffn_dim: int = 512  # width inside the feed-forward
    max_positions: int = 512  # longest segment in tokens, [CLS] and [SEP] included
    max_tokens: int = 0  # longest row that the model was made for; 0: max_positions
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    # post: behind each sum (BERT); pre: before each branch (Llama); branch: behind each branch
    # (OLMo-2); both: before and behind each branch (Gemma-2)
    norm_position: Literal["post", "pre", "branch", "both"] = "post"
    norm_epsilon: float = 1e-5  # added to the variance (BERT: 1e-12)
    positions: Literal["learned", "sinusoidal", "rotary"] = "learned"
    position_offset: int = 0  # unused rows before position 0 of the learned table (XLM-R: 2)
    rope_theta: float = 10000.0  # base wavelength of rotary positions
    # factor, low and high frequency factor, length before it (Llama-3.1)
    rope_scaling: tuple[float, ...] = ()
    activation: Literal["gelu", "swiglu", "geglu"] = "gelu"  # geglu: gated by tanh-GELU (Gemma)
    bias: bool = True  # biases in every linear map
    qkv_bias: bool = False  # in that of queries, keys and values, if not in the others (Qwen2)
    # RMS norm of queries and keys: of each head (Qwen3), or of all heads at once (OLMo-2)
    qk_norm: Literal["none", "head", "whole"] = "none"
    embed_scale: float = 1.0  # embeddings are multiplied by it (Gemma: the root of the width)
    attn_softcap: float = 0.0  # c: attention's score s becomes c tanh(s / c), unless 0 (Gemma-2)
    logit_softcap: float = 0.0  # the same of the vocabulary's logits
    tied: bool = True  # the vocabulary projection is the embedding matrix
    # before that: nothing, a bias, or dense, GELU, norm and a bias (BERT)
    head: Literal["none", "bias", "transform"] = "none"
    dropout: float = 0.1  # on embeddings and on both branches of a block; none inside attention
    causal: bool = False  # the model was trained left to right
    pool: Literal["cls", "mean", "max", "last"] = "cls"  # which states are the sentence vector
    normalize: bool = False  # it has length 1 when it leaves; training reads it as it is
    # How two texts are a row: [CLS] a [SEP] b [SEP]; with two [SEP] between (RoBERTa); token i of
    # the second at position max_positions + i, in a second half of the learned table (BERT)
    pair: Literal["sep", "sep-sep", "segments"] = "sep"

    def __post_init__(self):
        validate(self)
        check_range(self, "vocab width heads ffn_dim max_positions", 1)
        check_range(self, "layers", 0, 1000)
        check_range(self, "kv_heads head_dim max_tokens position_offset", 0)
        check_range(self, "norm_epsilon rope_theta embed_scale attn_softcap logit_softcap", 0)
        check_range(self, "dropout", 0, 0.99)
        if not self.head_dim and self.width % self.heads:
            raise BadInput(f"width is {self.width}: without a head_dim it must be a multiple of "
                           f"heads {self.heads}")
        if self.heads % (self.kv_heads or self.heads):
            raise BadInput(f"heads is {self.heads}: it must be a multiple of kv_heads "
                           f"{self.kv_heads}")
        if self.positions == "rotary" and self.key_dim % 2:
            raise BadInput(f"positions is 'rotary', which needs an even head_dim, not "
                           f"{self.key_dim}")
        if self.pair == "segments" and self.positions != "learned":
            raise BadInput("pair is 'segments', which needs learned positions")

    @property
    def key_dim(self):
        """K"""
        return self.head_dim or self.width // self.heads


# Llama's choices.
DECODER = dict(norm="rmsnorm", norm_position="pre", positions="rotary", position_offset=0,
               activation="swiglu", bias=False)
# Encoder shapes; base and large are XLM-R's.
SIZES = {
    "toy": dict(width=128, layers=3, heads=4, ffn_dim=512, dropout=0.0),
    "small": dict(width=384, layers=6, heads=6, ffn_dim=1536),
    "base": dict(width=768, layers=12, heads=12, ffn_dim=3072, position_offset=2),
    "large": dict(width=1024, layers=24, heads=16, ffn_dim=4096, position_offset=2),
    # Predict and Reconstruct's, sec. 4.1 and released code
    "hybrid": dict(width=512, layers=6, heads=8, ffn_dim=2048, norm_position="pre",
                   norm_epsilon=1e-6, positions="sinusoidal", dropout=0.0),
}


# ---- where a token stands: sinusoids that are added to its state, or angles that turn q and k


def rope_angles(positions, head_dim, theta, scaling=()):
    """position * theta^(-2i/K), i in 0..K/2: (..., T) -> (..., T, K/2), float64 where there is."""
    exact = torch.float32 if positions.device.type == "mps" else torch.float64
    even = torch.arange(0, head_dim, 2, device=positions.device, dtype=exact)
    rates = theta ** (-even / head_dim)
    if scaling:
        # Pairs that turn less than `low` times in `length` positions are slowed down by `factor`,
        # those that turn more than `high` times stay; between, a blend [Llama 3.1's code].
        factor, low, high, length = scaling
        kept = ((length * rates / (2 * torch.pi) - low) / (high - low)).clamp(0, 1)
        rates = rates * (kept + (1 - kept) / factor)
    return positions[..., None].to(exact) * rates


def sinusoids(positions, width):
    """(..., T) -> (..., T, D): sine on even, cosine on odd dimensions [Vaswani et al. 2017]."""
    angles = rope_angles(positions, width, 10000.0)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[..., :width]


def rope(positions, head_dim, theta, scaling=()):
    """(..., T) -> cosines and sines (..., T, 1, K) that `rotate` takes [Su et al. 2021]."""
    angles = rope_angles(positions, head_dim, theta, scaling)
    angles = torch.cat([angles, angles], -1).unsqueeze(-2)
    return angles.cos(), angles.sin()


def rotate(x, angles):
    """Turn x (..., T, heads, K) by its positions: i and i + K/2 are the coordinates of a plane."""
    cosine, sine = angles
    left, right = x.chunk(2, -1)
    return x * cosine.to(x.dtype) + torch.cat([-right, left], -1) * sine.to(x.dtype)


# ---- the transformer


class RMSNorm(nn.Module):
    """x / sqrt(mean x^2 + epsilon) * weight, in float32 or wider [Zhang & Sennrich 2019, eq. 4]."""

    def __init__(self, width, epsilon):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x):
        precise = upcast(x)
        size = precise.square().mean(-1, keepdim=True) + self.epsilon
        return (precise * size.rsqrt()).to(x.dtype) * self.weight


def make_norm(config, present=True):
    if not present:
        return nn.Identity()
    kind = nn.LayerNorm if config.norm == "layernorm" else RMSNorm
    return kind(config.width, config.norm_epsilon)


class Attention(nn.Module):
    """Each token mixes what it sees: (T, D) under the mask of a Packed, or (R, D) of a Step."""
    back_end = "auto"  # `set_attention` settles it for a run

    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.kv_heads = config.kv_heads or config.heads
        self.head_dim = config.key_dim
        self.softcap = config.attn_softcap
        q_size = self.heads * self.head_dim
        k_size = self.kv_heads * self.head_dim
        bias = config.bias or config.qkv_bias
        self.qkv = nn.Linear(config.width, q_size + 2 * k_size, bias)
        self.out = nn.Linear(q_size, config.width, config.bias)
        self.q_norm = None
        if config.qk_norm != "none":
            whole = config.qk_norm == "whole"
            self.q_norm = RMSNorm(q_size if whole else self.head_dim, config.norm_epsilon)
            self.k_norm = RMSNorm(k_size if whole else self.head_dim, config.norm_epsilon)

    def forward(self, x, packed, angles=None, cache=None):
        qkv = self.project(x, angles)
        if isinstance(packed, Step):
            return self.out(cache.attend(qkv, packed, self.softcap))
        if cache is not None:
            cache.add(qkv, packed.row_of_token(), packed.positions)
        heads = (self.heads, self.kv_heads)
        return self.out(kernels.packed_attention(qkv, *heads, packed, self.back_end, self.softcap))

    def project(self, x, angles):
        """States (..., D) -> (..., (H + 2 Hkv) K): heads of q, then k, then v, with q and k
        normalised and turned to their positions."""
        qkv = self.qkv(x)
        if angles is None and self.q_norm is None:
            return qkv
        parts = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).split(parts, -2)  # (..., heads, K)
        if self.q_norm is not None:
            q = by_parts(self.q_norm, q).to(v.dtype)
            k = by_parts(self.k_norm, k).to(v.dtype)
        turned = torch.cat([q, k], -2)
        if angles is not None:
            turned = rotate(turned, angles)
        return torch.cat([turned, v], -2).flatten(-2)


def by_parts(norm, x):
    """Normalise heads (..., heads, K) one by one or, if the norm is as wide, all at once."""
    return norm(x.flatten(-2).unflatten(-1, (-1, len(norm.weight)))).view_as(x)


class MLP(nn.Module):
    """The feed-forward: (..., D) -> (..., D), plain GELU or gated [Shazeer 2020]."""

    def __init__(self, config):
        super().__init__()
        self.activation = config.activation
        parts = 1 if config.activation == "gelu" else 2
        self.up = nn.Linear(config.width, config.ffn_dim * parts, config.bias)
        self.down = nn.Linear(config.ffn_dim, config.width, config.bias)

    def forward(self, x):
        x = self.up(x)  # (..., ffn_dim), twice that if gated
        if self.activation == "gelu":
            return self.down(F.gelu(x))
        gate, x = x.chunk(2, -1)
        gate = F.silu(gate) if self.activation == "swiglu" else F.gelu(gate, approximate="tanh")
        return self.down(gate * x)


class Block(nn.Module):
    """Attention and feed-forward, each added to the states: (T, D) -> (T, D)."""
    is_checkpointed = False  # True: keep the input alone, and compute the rest again backward

    def __init__(self, config):
        super().__init__()
        self.config = config
        before = config.norm_position != "branch"
        behind = config.norm_position in ("branch", "both")
        self.attention = Attention(config)
        self.mlp = MLP(config)
        self.norm1 = make_norm(config, before)
        self.norm2 = make_norm(config, before)
        self.post_norm1 = make_norm(config, behind)
        self.post_norm2 = make_norm(config, behind)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, packed, angles=None, cache=None):
        if self.is_checkpointed and torch.is_grad_enabled():
            return checkpoint(self.compute, x, packed, angles, use_reentrant=False)
        return self.compute(x, packed, angles, cache)

    def compute(self, x, packed, angles=None, cache=None):
        if self.config.norm_position == "post":  # behind each sum
            x = self.norm1(x + self.dropout(self.attention(x, packed, angles, cache)))
            return self.norm2(x + self.dropout(self.mlp(x)))
        attended = self.attention(self.norm1(x), packed, angles, cache)
        x = x + self.dropout(self.post_norm1(attended))
        return x + self.dropout(self.post_norm2(self.mlp(self.norm2(x))))


def initialise(module, std):
    """Normal weights, zero biases, norms the identity."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=std)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class Regressor(nn.Module):
    """W2 LN(GELU(W1 z)): (N, D) -> what Model.head gives; not tied, with PyTorch's own initial
    values [Predict and Reconstruct, eq. 9]."""

    def __init__(self, width, vocab):
        super().__init__()
        self.transform = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.vocabulary = nn.Linear(width, vocab)

    def forward(self, states):
        hidden = self.norm(F.gelu(self.transform(states)))
        return hidden, self.vocabulary.weight, self.vocabulary.bias


class Model(nn.Module):
    """One transformer for both directions: what a token sees is the batch's business."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        post = config.norm_position == "post"
        width = config.width
        self.embed = nn.Embedding(config.vocab, width)
        if config.positions == "learned":
            halves = 2 if config.pair == "segments" else 1
            positions = halves * config.max_positions + config.position_offset
            self.position_embedding = nn.Embedding(positions, width)
        # The one norm outside of the blocks stands before the first or behind the last.
        self.embed_norm = make_norm(config, post)
        self.final_norm = make_norm(config, not post)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        if config.head == "transform":
            self.transform = nn.Linear(width, width)
            self.transform_norm = make_norm(config)
        self.vocabulary_bias = None
        if config.head != "none":
            self.vocabulary_bias = nn.Parameter(torch.zeros(config.vocab))
        if not config.tied:
            self.vocabulary = nn.Linear(width, config.vocab, bias=False)
        # BERT's deviation is .02 at width 768 [BERT, sec. A.2]. It goes with 1 / sqrt(width), so
        # that the branches of a narrow model start as strong beside the residual as BERT's do.
        std = 0.02 * (768 / width) ** 0.5
        self.apply(lambda module: initialise(module, std))

    def forward(self, packed, layers=None, caches=None):
        """Packed -> states (T, D) of the last layer, after the final norm. A list `layers` gets the
        states behind every block, each (T, D); `caches` of KeyValueCache.of keep plain rows."""
        x, angles = self.embed_tokens(packed.tokens, packed.positions)  # (T, D)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = block(x, packed, angles, cache)
            if layers is not None:
                layers.append(x)
        return self.final_norm(x)

    def embed_tokens(self, tokens, positions):
        """Tokens and positions (..., T) -> states (..., T, D), and rotary angles or None."""
        config = self.config
        angles = None
        x = self.embed(tokens) * config.embed_scale
        if config.positions == "learned":
            x = x + self.position_embedding(positions + config.position_offset)
        elif config.positions == "sinusoidal":
            x = x + sinusoids(positions, config.width).to(x.dtype)
        else:
            angles = rope(positions, config.key_dim, config.rope_theta, config.rope_scaling)
        return self.dropout(self.embed_norm(x)), angles

    def extend(self, tokens, positions, caches):
        """The next token of each row (R,), at its place (R,), behind those that the caches keep ->
        logits (R, V) of what comes then."""
        rows = torch.arange(len(tokens), device=tokens.device)
        places = torch.arange(int(positions.max()) + 1, device=tokens.device)  # (M,)
        mask = places <= positions[:, None]  # (R, M)
        step = Step(rows, positions, mask[:, None, None])
        x, angles = self.embed_tokens(tokens, positions)  # (R, D)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, step, angles, cache)
        return self.logits(self.final_norm(x))

    def head(self, states):
        """(N, D) -> logits are F.linear of: (N, D), weight (V, D) and bias (V,) or None."""
        if self.config.head == "transform":
            states = self.transform_norm(F.gelu(self.transform(states)))
        weight = self.embed.weight if self.config.tied else self.vocabulary.weight
        return states, weight, self.vocabulary_bias

    def logits(self, states):
        """(N, D) -> (N, V): call it on the positions that are asked for only."""
        logits = F.linear(*self.head(states))
        softcap = self.config.logit_softcap
        return softcap * (logits / softcap).tanh() if softcap else logits

    def pool(self, states, packed, how=None):
        """States (T, D) -> a vector a row (R, D): its first state (cls), last, mean or maximum."""
        how = how or self.config.pool
        if how == "cls":
            return states[packed.cu_seqlens[:-1].long()]
        if how == "last":
            return states[packed.cu_seqlens[1:].long() - 1]
        lengths = packed.cu_seqlens.diff().long()  # (R,)
        row = packed.row_of_token()
        shape = (len(lengths), states.shape[1])  # (R, D)
        if how == "mean":
            return states.new_zeros(shape).index_add_(0, row, states) / lengths[:, None]
        lowest = states.new_full(shape, -torch.inf)
        return lowest.scatter_reduce(0, row[:, None].expand_as(states), states, "amax")


def set_attention(module, back_end, device, element_size):
    """Settle what computes a module's attention, on a device with numbers of so many bytes -> the
    plans that its batches need. BadInput if `triton` cannot run."""
    needs = set()
    for layer in module.modules():
        if isinstance(layer, Attention):
            shape = (layer.heads, layer.kv_heads, layer.head_dim)
            try:
                layer.back_end = kernels.choose_back_end(back_end, device, shape[2], layer.softcap)
            except ValueError as error:
                raise BadInput(str(error)) from None
            needs.add(kernels.plan_needed(layer.back_end, *shape, element_size))
    return needs


def compile_blocks(module):
    """torch.compile every block of a module. What is other for every batch stays out."""
    # Said here, because a decorator would import the compiler, 1.5 s, in every program.
    kernels.make_plan = torch.compiler.disable(kernels.make_plan)
    kernels.padded_attention = torch.compiler.disable(kernels.padded_attention)
    for block in module.modules():
        if isinstance(block, Block):
            block.compile(dynamic=True)


# ---- generation: the keys and values that a layer has seen are kept


class Step(NamedTuple):
    """In place of a Packed: one token more of each of R rows whose keys and values are kept."""
    rows: torch.Tensor  # (R,) 0, 1, ...
    positions: torch.Tensor  # (R,) the token's place in its row
    mask: torch.Tensor  # (R, 1, 1, M) bool: it sees the places up to its own


class KeyValueCache:
    """The keys and values of one layer, of R rows: token i of a row stands at place i, so there is
    no padding before or between."""

    def __init__(self, attention, rows, longest, like):
        self.heads = attention.heads
        self.kv_heads = attention.kv_heads
        self.head_dim = attention.head_dim
        # Zeros: a number that is hidden must still be one.
        self.kept = like.new_zeros(rows, longest, 2 * self.kv_heads, self.head_dim)

    @staticmethod
    def of(model, rows, longest):
        """One for each block of a model, for so many rows of at most `longest` tokens."""
        like = model.embed.weight
        return [KeyValueCache(block.attention, rows, longest, like) for block in model.blocks]

    def add(self, qkv, rows, positions):
        """Keep the keys and values of T tokens, (T, (H + 2 Hkv) K) -> their queries (T, H, K)."""
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        q, kv = heads.split([self.heads, 2 * self.kv_heads], 1)  # (T, heads, K)
        self.kept[rows, positions] = kv
        return q

    def attend(self, qkv, step, softcap=0.0):
        """The tokens of a Step, (R, (H + 2 Hkv) K) -> (R, H K)."""
        q = self.add(qkv, step.rows, step.positions)
        seen = self.kept[:, :step.mask.shape[-1]].transpose(1, 2)  # (R, 2 Hkv, M, K)
        k, v = seen.chunk(2, 1)
        return sdpa(q[:, :, None], k, v, step.mask, softcap).flatten(1)

    def keep(self, rows):
        """Only these rows go on."""
        self.kept = self.kept[rows]


# ---- LoRA: train a low-rank difference to frozen weights [Hu et al. 2022, eq. 3]


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


# ---- files


def save(model, path):
    """Write config and weights as one file that `load` rebuilds alone; it is whole or absent."""
    write_torch({"config": asdict(model.config), "weights": plain_weights(model)}, path)


def load(path, device="cpu"):
    """Rebuild a saved Model, in eval mode; fields younger than the file have their defaults.
    BadInput for a file that is missing or of another kind."""
    saved = read_torch(path, device)
    try:
        config = ModelConfig(**saved["config"])
        weights = saved["weights"]
    except (KeyError, TypeError) as error:
        raise BadInput(f"{path} is no model of this version ({error}): give the model.pt of a run, "
                       "or use the version that wrote it") from None
    model = Model(config).to(device)
    model.load_state_dict(weights)
    return model.eval()


def write_torch(value, path):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    write_atomic(path, buffer.getbuffer())


def read_torch(path, device="cpu"):
    """What `write_torch` wrote. Tensors and plain values are read and nothing else: a file cannot
    have a program executed. BadInput if there is no such file, or it holds anything else."""
    if not os.path.isfile(path):
        raise BadInput(f"{path} does not exist: give the folder of a run, such as out/mexma")
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # PyTorch raises a dozen types for a bad file.
        raise BadInput(f"{path} is no checkpoint of tensors and plain values "
                       f"({type(error).__name__}): it is damaged, or of another kind") from None


def add_tokens(model, count, known=None):
    """A Model with rows for `count` more tokens, each the mean of the `known` ones (all of them,
    or those of its tokenizer)."""
    known = known or model.config.vocab
    weights = model.state_dict()
    for name in weights.keys() & {"embed.weight", "vocabulary.weight", "vocabulary_bias"}:
        old = weights[name]
        mean = old[:known].mean(0, keepdim=True).expand(count, *old.shape[1:])
        # Unused rows behind the tokenizer's are taken first.
        weights[name] = torch.cat([old[:known], mean, old[known + count:]])
    grown = Model(replace(model.config, vocab=max(known + count, model.config.vocab)))
    grown.load_state_dict(weights)
    return grown.train(model.training)
