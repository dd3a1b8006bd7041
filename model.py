"""The transformer.

Axes, here and in every other file:
    T tokens of the packed line     R rows (sentences, pairs, documents)     D width
    H heads     K size of a head    V vocabulary                             N selected positions

The model reads a batch as one packed line of tokens, without padding (data.Packed). Only attention
knows where a row ends, so the mask, bidirectional or causal, comes with the batch.
"""

import contextlib
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import kernels
from base.common import AtLeast0, AtLeast1, BadInput, Checked, Fraction
from kernels.cross_entropy import upcast
from kernels.linear import Linear

# ---- the configuration

# How hidden states make the sentence embedding: Model.pool computes each, from the tokens of its
# own row alone.
POOLS = ("cls", "mean", "max", "last")


@dataclass(frozen=True)
class ModelConfig(Checked):
    vocab: AtLeast1 = 1200  # V, size of the vocabulary
    width: AtLeast1 = 128  # D, width of the hidden states
    layers: AtLeast0 = 3  # number of transformer blocks
    heads: AtLeast1 = 4  # H, number of attention heads
    kv_heads: int = 0  # number of key and value heads; 0: as many as heads
    head_dim: int = 0  # K, size of an attention head; 0: width / heads
    ffn_dim: AtLeast1 = 512  # width of the feed-forward layer
    max_positions: AtLeast1 = 512  # number of positions: no text can have more tokens
    max_tokens: int = 0  # longest row that the model was made for; 0: max_positions
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"  # normalization layer
    # where the norms are: post, after the residual sum (BERT); pre, before each sublayer (Llama);
    # branch, after each sublayer (OLMo-2); both, before and after each sublayer (Gemma-2); embed,
    # as pre, but after the embedding instead of before the first attention (ModernBERT)
    norm_position: Literal["post", "pre", "branch", "both", "embed"] = "post"
    # the output projections of all sublayers start at zero, so the blocks add nothing at first
    zero_init: bool = False
    norm_epsilon: float = 1e-5  # epsilon of the norms, added to the variance (BERT: 1e-12)
    positions: Literal["learned", "sinusoidal", "rotary"] = "learned"  # position encoding
    position_offset: int = 0  # unused rows before position 0 of the learned table (XLM-R: 2)
    rope_theta: float = 10000.0  # base wavelength of rotary positions
    # the same of each layer, 0: no positions (SmolLM3); (): rope_theta in all
    rope_thetas: tuple[float, ...] = ()
    # sliding window of each layer, in positions to either side, 0: none; (): none in all
    windows: tuple[int, ...] = ()
    # Llama-3.1's rotary scaling: factor, low and high frequency factor, original length
    rope_scaling: tuple[float, ...] = ()
    # activation of the feed-forward layer; geglu is gated by tanh-GELU (Gemma), geglu-erf by GELU
    activation: Literal["gelu", "swiglu", "geglu", "geglu-erf"] = "gelu"
    bias: bool = True  # biases in every linear layer and layer norm
    qkv_bias: bool = False  # a bias in the QKV projection even without --bias (Qwen2)
    # RMS norm of queries and keys: of each head (Qwen3), or of all heads together (OLMo-2)
    qk_norm: Literal["none", "head", "whole"] = "none"
    embed_scale: float = 1.0  # factor of the embeddings (Gemma: square root of the width)
    attn_softcap: float = 0.0  # c: attention scores s become c tanh(s / c); 0: off (Gemma-2)
    logit_softcap: float = 0.0  # the same cap c for the vocabulary's logits; 0: off (Gemma-2)
    tied: bool = True  # use the embedding matrix as vocabulary projection
    # vocabulary head before the projection: nothing, or dense, GELU, norm and bias (BERT)
    head: Literal["none", "transform"] = "none"
    dropout: Fraction = 0.1  # dropout on embeddings and sublayer outputs; never inside attention
    causal: bool = False  # the model was trained left to right
    encodes: bool = False  # a causal model that was trained as an encoder, which writes no answers
    pool: Literal[POOLS] = "cls"  # which hidden states make the sentence embedding
    normalize: bool = False  # L2-normalize sentence embeddings at inference (not during training)
    truncate_dim: AtLeast0 = 0  # dimensions of a sentence embedding at inference; 0: all
    # how two texts share a row: [CLS] a [SEP] b [SEP], or with two [SEP] between them (RoBERTa)
    pair: Literal["sep", "sep-sep"] = "sep"

    def __post_init__(self):
        super().__post_init__()
        if not self.head_dim and self.width % self.heads:
            raise BadInput(f"width is {self.width}: it must be a multiple of heads {self.heads}")
        if self.positions == "rotary" and self.key_dim % 2:
            raise BadInput(f"width / heads is {self.key_dim}, and it must be even for rotary "
                           "positions")
        if self.causal and any(self.windows):
            raise BadInput("windows need a bidirectional model: generation would ignore them")

    @property
    def longest_row(self):
        """Number of tokens of the longest row that the model can read."""
        return self.max_tokens or self.max_positions

    @property
    def key_dim(self):
        """K"""
        return self.head_dim or self.width // self.heads

    @property
    def is_decoder(self):
        """Whether the model writes answers."""
        return self.causal and not self.encodes


# Llama's choices.
DECODER = dict(norm="rmsnorm", norm_position="pre", positions="rotary", position_offset=0,
               activation="swiglu", bias=False, qkv_bias=False, qk_norm="none", embed_scale=1.0)
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


# ---- positions: sinusoids that are added to the hidden states, or angles that rotate q and k


def rope_angles(positions, head_dim, theta, scaling=()):
    """Return position * theta^(-2i/K) for i in 0..K/2: (..., T) -> (..., T, K/2), in float64 if the
    device has it."""
    exact = torch.float32 if positions.device.type == "mps" else torch.float64
    even = torch.arange(0, head_dim, 2, device=positions.device, dtype=exact)
    rates = theta ** (-even / head_dim)
    if scaling:
        # Planes that turn fewer than `low` times in `length` positions turn slower by `factor`,
        # those that turn more than `high` times do not change, and others get a blend of both
        # [Llama 3.1's code].
        factor, low, high, length = scaling
        blend = ((length * rates / (2 * torch.pi) - low) / (high - low)).clamp(0, 1)
        rates = rates * (blend + (1 - blend) / factor)
    return positions[..., None].to(exact) * rates


def sinusoids(positions, width):
    """Return sines on even and cosines on odd dimensions: (..., T) -> (..., T, D)
    [Vaswani et al. 2017]."""
    angles = rope_angles(positions, width, 10000.0)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[..., :width]


def rope(positions, head_dim, theta, scaling=()):
    """Return the cosines and sines that `rotate` takes: (..., T) -> (..., T, 1, K) each
    [Su et al. 2021]."""
    angles = rope_angles(positions, head_dim, theta, scaling).unsqueeze(-2)
    # Halves have the same angles and opposite signs of the sine.
    return torch.cat([angles, angles], -1).cos(), torch.cat([-angles, angles], -1).sin()


def rotate(x, angles):
    """Rotate x (..., T, heads, K) by its positions; i and i + K/2 are coordinates of a plane."""
    cosine, sine = angles
    halves_exchanged = x.roll(x.shape[-1] // 2, -1)
    return x * cosine.to(x.dtype) + halves_exchanged * sine.to(x.dtype)


# ---- the transformer


class RMSNorm(nn.Module):
    """x / sqrt(mean x^2 + epsilon) * weight, in float32 or wider [Zhang & Sennrich 2019, eq. 4]."""

    def __init__(self, width, epsilon):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x):
        normalized = F.rms_norm(upcast(x), x.shape[-1:], eps=self.epsilon)
        return normalized.to(x.dtype) * self.weight


def make_norm(config, present=True):
    if not present:
        return nn.Identity()
    if config.norm == "rmsnorm":
        return RMSNorm(config.width, config.norm_epsilon)
    return nn.LayerNorm(config.width, config.norm_epsilon, bias=config.bias)


def rows_at(x, at):
    """Return the rows of x at the indices `at`, (T, D) -> (N, D); all if `at` is None."""
    return x if at is None else x[at]


class Attention(nn.Module):
    """Multi-head attention: (T, D) -> (T, D), or (N, D) of the tokens `at` alone."""
    back_end = None  # set_attention chooses it for a run; None: choose at every call
    window = 0  # of this layer; Model sets it

    def __init__(self, config):
        super().__init__()
        self.rope_theta = config.rope_theta
        self.heads = config.heads
        self.kv_heads = config.kv_heads or config.heads
        self.head_dim = config.key_dim
        self.softcap = config.attn_softcap
        q_size = self.heads * self.head_dim
        k_size = self.kv_heads * self.head_dim
        self.sizes = [q_size, k_size, k_size]  # of the projections to q, k and v
        self.qkv = Linear(config.width, sum(self.sizes), config.bias or config.qkv_bias)
        self.out = Linear(q_size, config.width, config.bias)
        self.q_norm = None
        if config.qk_norm != "none":
            whole = config.qk_norm == "whole"
            # The numbers that are normalized together come last.
            self.norm_shape = (1, -1) if whole else (-1, self.head_dim)
            self.q_norm = RMSNorm(q_size if whole else self.head_dim, config.norm_epsilon)
            self.k_norm = RMSNorm(k_size if whole else self.head_dim, config.norm_epsilon)

    def forward(self, x, packed, angles=None, at=None):
        # softmax(q k' / sqrt(K)) v: the batch has the mask, and in generation the earlier k and v.
        attended = packed.attend(self, self.project(x, angles))  # (T, H K)
        return self.out(rows_at(attended, at))

    def project(self, x, angles):
        """Project (..., D) to the heads of q, then k, then v, with q and k normalized and rotated:
        (..., (H + 2 Hkv) K)."""
        qkv = self.qkv(x)
        angles = (angles or {}).get(self.rope_theta)
        if angles is None and self.q_norm is None:
            return qkv
        q, k, v = qkv.split(self.sizes, -1)
        if self.q_norm is not None:
            q = self.q_norm(q.unflatten(-1, self.norm_shape)).flatten(-2).to(v.dtype)
            k = self.k_norm(k.unflatten(-1, self.norm_shape)).flatten(-2).to(v.dtype)
        qk = torch.cat([q, k], -1)
        if angles is not None:
            qk = rotate(qk.unflatten(-1, (-1, self.head_dim)), angles).flatten(-2)
        return torch.cat([qk, v], -1)


class MLP(nn.Module):
    """The feed-forward layer: (..., D) -> (..., D), plain GELU or gated [Shazeer 2020]."""

    def __init__(self, config):
        super().__init__()
        self.activation = config.activation
        # of the projections: up alone, or gate and up
        self.sizes = [config.ffn_dim] * (1 if config.activation == "gelu" else 2)
        self.up = Linear(config.width, sum(self.sizes), config.bias)
        self.down = Linear(config.ffn_dim, config.width, config.bias)

    def forward(self, x):
        x = self.up(x)  # (..., ffn_dim), twice that if gated
        if self.activation == "gelu":
            return self.down(F.gelu(x))
        gate, x = x.chunk(2, -1)
        if self.activation == "swiglu":
            return self.down(F.silu(gate) * x)
        kind = "tanh" if self.activation == "geglu" else "none"
        return self.down(F.gelu(gate, approximate=kind) * x)


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream: (T, D) -> (T, D), or (N, D)
    with `at`, the indices (N,) of the tokens whose states are needed."""
    is_checkpointed = False  # True: keep the input alone, and recompute the rest in the backward

    def __init__(self, config):
        super().__init__()
        self.config = config
        before = config.norm_position != "branch"
        after = config.norm_position in ("branch", "both")
        self.attention = Attention(config)
        self.mlp = MLP(config)
        self.norm1 = make_norm(config, before)
        self.norm2 = make_norm(config, before)
        self.post_norm1 = make_norm(config, after)
        self.post_norm2 = make_norm(config, after)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, packed, angles=None, at=None):
        if self.is_checkpointed and torch.is_grad_enabled():
            return checkpoint(self.compute, x, packed, angles, at, use_reentrant=False)
        return self.compute(x, packed, angles, at)

    def compute(self, x, packed, angles, at):
        if self.config.norm_position == "post":
            attended = self.attention(x, packed, angles, at)
            x = self.norm1(rows_at(x, at) + self.dropout(attended))
            return self.norm2(x + self.dropout(self.mlp(x)))
        attended = self.attention(self.norm1(x), packed, angles, at)
        x = rows_at(x, at) + self.dropout(self.post_norm1(attended))
        return x + self.dropout(self.post_norm2(self.mlp(self.norm2(x))))


def run_blocks(blocks, x, packed, angles=None, layers=None, at=None):
    """Run blocks one after the other, (T, D) -> (T, D). With `at` (N,) the last one computes the
    states of these tokens alone, (N, D): nothing reads the others, only their keys and values."""
    for number, block in enumerate(blocks):
        is_last = number == len(blocks) - 1
        x = block(x, packed, angles, at if is_last else None)
        if layers is not None:
            layers.append(x)
    return x if len(blocks) else rows_at(x, at)


def initialize(module, std):
    """Initialize a module: normal weights, zero biases. Norms start as the identity."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=std)
    if getattr(module, "bias", None) is not None:
        nn.init.zeros_(module.bias)


class Regressor(nn.Module):
    """W2 LN(GELU(W1 z)): (N, D) -> what Model.vocabulary_projection returns; untied, with PyTorch's
    own initial values [Predict and Reconstruct, eq. 9]."""

    def __init__(self, width, vocab):
        super().__init__()
        self.transform = Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.vocabulary = nn.Linear(width, vocab)

    def forward(self, states):
        hidden = self.norm(F.gelu(self.transform(states)))
        return hidden, self.vocabulary.weight, self.vocabulary.bias


class Model(nn.Module):
    """One transformer, bidirectional or causal: the mask comes with the batch."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        post = config.norm_position == "post"
        embed = config.norm_position == "embed"
        width = config.width
        self.embed = nn.Embedding(config.vocab, width)
        if config.positions == "learned":
            positions = config.max_positions + config.position_offset
            self.position_embedding = nn.Embedding(positions, width)
        # Norms outside the blocks: after the embedding, or after the last block, or both (embed).
        self.embed_norm = make_norm(config, post or embed)
        self.final_norm = make_norm(config, not post)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        if embed and config.layers:
            self.blocks[0].norm1 = nn.Identity()
        for number, block in enumerate(self.blocks):
            if config.rope_thetas:
                block.attention.rope_theta = config.rope_thetas[number]
            if config.windows:
                block.attention.window = config.windows[number]
        self.vocabulary_bias = None
        if config.head == "transform":
            self.transform = Linear(width, width, config.bias)
            self.transform_norm = make_norm(config)
            self.vocabulary_bias = nn.Parameter(torch.zeros(config.vocab))
        if not config.tied:
            self.vocabulary = nn.Linear(width, config.vocab, bias=False)
        # BERT's standard deviation is 0.02 at width 768 [BERT's code]. Scale it with
        # 1 / sqrt(width), so that the sublayers of a narrow model start as strong as BERT's.
        std = 0.02 * (768 / width) ** 0.5
        self.apply(lambda module: initialize(module, std))
        for block in self.blocks if config.zero_init else ():
            nn.init.zeros_(block.attention.out.weight)
            nn.init.zeros_(block.mlp.down.weight)

    def forward(self, packed, layers=None, at=None):
        """Return the hidden states (T, D) of the last layer, after the final norm. With `at`, the
        indices (N,) of some tokens, return their states alone (N, D), which is faster. A list
        `layers` receives the states after every block, (T, D) each."""
        x, angles = self.embed_tokens(packed.tokens, packed.positions)  # (T, D)
        return self.final_norm(run_blocks(self.blocks, x, packed, angles, layers, at))

    def embed_tokens(self, tokens, positions):
        """Embed tokens and positions (..., T): return states (..., T, D), and rotary angles,
        {rope_theta of some layers: their cosines and sines}, or None."""
        config = self.config
        angles = None
        x = self.embed(tokens) * config.embed_scale
        if config.positions == "learned":
            x = x + self.position_embedding(positions + config.position_offset)
        elif config.positions == "sinusoidal":
            x = x + sinusoids(positions, config.width).to(x.dtype)
        else:
            thetas = set(config.rope_thetas) or {config.rope_theta}
            angles = {theta: rope(positions, config.key_dim, theta, config.rope_scaling)
                      for theta in thetas if theta}  # 0: a layer without positions
        return self.dropout(self.embed_norm(x)), angles

    def vocabulary_projection(self, states):
        """Return the arguments of F.linear that give the logits of states (N, D): states (N, D),
        weight (V, D), and bias (V,) or None."""
        if self.config.head == "transform":
            states = self.transform_norm(F.gelu(self.transform(states)))
        weight = self.embed.weight if self.config.tied else self.vocabulary.weight
        return states, weight, self.vocabulary_bias

    def logits(self, states):
        """Return logits, (N, D) -> (N, V). Call it with the states of the needed positions only."""
        logits = F.linear(*self.vocabulary_projection(states))
        softcap = self.config.logit_softcap
        return softcap * (logits / softcap).tanh() if softcap else logits

    def embeddings(self, packed, how=None):
        """Return one embedding per row, (R, D), computing no more states than `pool` reads."""
        index = self.pool_index(packed, how)
        if index is None:
            return self.pool(self(packed), packed, how)
        return self(packed, at=index)

    def pool_index(self, packed, how=None):
        """Return the index of the one token in each row that pooling reads, (R,); None if it reads
        all tokens."""
        how = how or self.config.pool
        ends = packed.cu_seqlens.long()
        return {"cls": ends[:-1], "last": ends[1:] - 1}.get(how)

    def pool(self, states, packed, how=None):
        """Return one embedding per row, (T, D) -> (R, D): the row's first state (cls), its last,
        their mean or their maximum."""
        how = how or self.config.pool
        index = self.pool_index(packed, how)
        if index is not None:
            return states[index]
        lengths = packed.cu_seqlens.diff().long()  # (R,)
        row = packed.row_of_token()
        shape = (len(lengths), states.shape[1])  # (R, D)
        if how == "mean":
            return states.new_zeros(shape).index_add_(0, row, states) / lengths[:, None]
        if how == "max":
            lowest = states.new_full(shape, -torch.inf)
            return lowest.scatter_reduce(0, row[:, None].expand_as(states), states, "amax")
        raise BadInput(f"pool is {how!r}: Model.pool does not compute it, so write it there")


def set_attention(module, back_end, device, element_size):
    """Choose the attention back end of every layer: "auto", "sdpa" or "triton". Return the set of
    their (layout, window): each batch needs a plan for each of them. element_size: bytes per
    activation. Raises BadInput if "triton" cannot run."""
    layouts = set()
    for layer in module.modules():
        if isinstance(layer, Attention):
            shape = (layer.heads, layer.kv_heads, layer.head_dim)
            layer.back_end = kernels.choose_back_end(back_end, device, shape[2], layer.softcap)
            layout = kernels.layout_of(layer.back_end, *shape, element_size)
            layouts.add((layout, layer.window))
    return layouts


@contextlib.contextmanager
def in_eval_mode(model):
    """Turn off dropout and gradients until the block ends."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
