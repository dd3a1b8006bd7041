"""The training objectives: the losses as pure functions, then one class per paper.

A class owns the model and everything that exists only for training. Its `collate` turns lists of ids into one batch (all
chance is there), its `forward` turns the batch into a loss (no chance but dropout): read the two together.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed
import torch.nn.functional as F
from torch import nn

from data import BadInput, choose, corrupt
from model import Block, Packed

# ---------------------------------------------------------------------------------------------------------------------
# Losses: float32 (or wider) whatever the precision of the run


class AllRanks(torch.autograd.Function):
    """(N, D) of this rank -> (world x N, D) of all; backward: the sum over ranks of what each wants of these rows."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        torch.distributed.all_reduce(grad)
        return grad.chunk(torch.distributed.get_world_size())[torch.distributed.get_rank()]


def gather(x):
    """Rows of all ranks, with gradients: (N, D) -> (world x N, D). One process: x itself. Every rank then computes the same
    loss over all rows, and DDP's mean over ranks of the summed gradients is the gradient of one big batch."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return AllRanks.apply(x) if several else x


def wide(x):
    return x.float() if x.element_size() < 4 else x


def token_loss(logits, targets, scored):
    """Sum of cross-entropies (N, V), (N,) divided by `scored`, the number of targets that the whole step scores, so that
    micro-batches add up to exactly the gradient of one big batch."""
    return F.cross_entropy(wide(logits), targets, reduction="sum") / scored


def mse(x, y):
    """Mean over items and dimensions of (x - y)^2 on raw vectors (N, D), (N, D) [MEXMA, sec. 3; released loss]."""
    return F.mse_loss(wide(x), wide(y))


def koleo(x, normalise=True, epsilon=1e-8):
    """-mean_i log min_j |x_i - x_j|: pushes every vector (N, D) away from its nearest neighbour [Sablayrolles et al. 2019, eq. 3].
    `normalise`: on the unit sphere, as MEXMA's code; raw vectors, as its formula. Exact duplicates give a large finite value."""
    x = F.normalize(wide(x), dim=-1, eps=epsilon) if normalise else wide(x)
    with torch.no_grad():
        squares = x.square().sum(-1)
        distances = squares[:, None] + squares - 2 * x @ x.T             # (N, N)
        nearest = distances.fill_diagonal_(torch.inf).argmin(1)          # (N,)
    return -(F.pairwise_distance(x, x[nearest], eps=epsilon) + epsilon).log().mean()


def info_nce(x, y, temperature, within=True, keep_self=False):
    """Each vector must find its partner among all others: x (N, D), y (N, D) -> mean of 2N cross-entropies of cosine / temperature
    [van den Oord et al. 2018, eq. 4; both directions]. `within`: vectors of the same side are negatives too (2N - 2 of them).
    `keep_self`: leave the vector's similarity with itself in the denominator, as BERT-JEPA's code (its floor is then ln 2)."""
    x, y = F.normalize(wide(x), dim=-1), F.normalize(wide(y), dim=-1)
    n = len(x)
    if not within:
        logits, target = x @ y.T / temperature, torch.arange(n, device=x.device)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2
    z = torch.cat([x, y])                                                # (2N, D)
    logits = z @ z.T / temperature
    if not keep_self:
        logits = logits.masked_fill(torch.eye(2 * n, dtype=torch.bool, device=x.device), -torch.inf)
    return F.cross_entropy(logits, torch.arange(2 * n, device=x.device).roll(n))


# ---------------------------------------------------------------------------------------------------------------------
# What every objective shares


class Objective(nn.Module):
    """Facts of a class: `views` texts per example; `causal` direction of the model; `head` and `pool`, its vocabulary head and
    sentence vector; `distinct`: no text twice in a batch, because other rows are negatives. `recipe`: the paper's training values.
    `toy`: what differs at size toy, each with its reason."""
    views, causal, head, pool, distinct = 1, False, "none", "cls", False
    recipe, toy = {}, {}

    def __init__(self, model, config):
        super().__init__()
        self.model, self.config = model, config

    def after_step(self, progress):
        """Called after every optimiser step with progress in (0, 1]: where a teacher follows its student."""


def row(ids, special):
    """[CLS] ids [SEP]"""
    return np.concatenate([[special.cls], ids, [special.sep]]).astype(np.int64)


def mask_rows(rows, ratio, rng, special):
    """Choose and corrupt over all rows of one side at once -> corrupted rows, indices of the targets in their line, targets.
    At least one token of the side is a target (MEXMA's code redraws until so) unless the ratio is 0."""
    line = np.concatenate(rows)
    chosen = choose(line, ratio, rng, special, at_least=1 if ratio else 0)
    corrupted = corrupt(line, chosen, rng, special)
    return np.split(corrupted, np.cumsum([len(r) for r in rows])[:-1]), np.flatnonzero(chosen), line[chosen]


def check(config, positive=(), shares=(), **choices):
    """Refuse a Config whose values break their rules: `positive` numbers >= 0, `shares` in [0, 1], `choices` from a list."""
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            raise BadInput(f"{name} is {getattr(config, name)!r}: choose one of {', '.join(allowed)}")
    for name in positive:
        if getattr(config, name) < 0:
            raise BadInput(f"{name} is {getattr(config, name)}: it must not be negative")
    for name in shares:
        if not 0 <= getattr(config, name) <= 1:
            raise BadInput(f"{name} is {getattr(config, name)}: it must lie in [0, 1]")


# ---------------------------------------------------------------------------------------------------------------------
# Baselines


class Mlm(Objective):
    """Masked-language modelling: restore 15 % of the tokens from the rest [Devlin et al. 2019, sec. 3.1]."""
    name, head, pool = "mlm", "transform", "mean"
    recipe = dict(lr=1e-4, batch=256, steps=1_000_000, warmup=0.01, schedule="linear", weight_decay=0.01, clip=1.0)
    toy = dict(lr=(1e-3, "a small model from scratch"), batch=(128, "as many sentences as 64 pairs"), steps=(600, "minutes on a CPU"),
               warmup=(0.1, "600 steps in all"))

    @dataclass(frozen=True)
    class Config:
        mask_ratio: float = 0.15  # share of the tokens that become targets

        def __post_init__(self):
            check(self, shares=["mask_ratio"])

    @staticmethod
    def collate(examples, rng, config, special):
        rows, labels, targets = mask_rows([row(ids, special) for ids, in examples], config.mask_ratio, rng, special)
        return dict(packed=Packed.of(rows), labels=torch.from_numpy(labels), targets=torch.from_numpy(targets),
                    scored=torch.tensor([float(len(targets))]))

    def forward(self, batch):
        states = self.model(batch["packed"])                             # (T, D)
        logits = self.model.logits(states[batch["labels"]])              # (N, V): scored positions only
        loss = token_loss(logits, batch["targets"], batch["scored"][0])
        return loss, {"mlm": loss.detach()}


class Contrastive(Objective):
    """A bi-encoder trained with symmetric InfoNCE over translation pairs (the baseline of MEXMA's table 6, and LaBSE's family)."""
    name, views, distinct = "contrastive", 2, True
    recipe = dict(lr=1e-4, batch=1200, steps=300_000, warmup=0.3, schedule="cosine", weight_decay=0.0, clip=1.2)
    toy = dict(lr=(5e-4, "a small model from scratch"), batch=(64, "minutes on a CPU"), steps=(1000, "minutes on a CPU"),
               warmup=(0.1, "1000 steps in all"))

    @dataclass(frozen=True)
    class Config:
        temperature: float = 0.07  # divides the cosines
        within: bool = True  # sentences of the same language are negatives too
        keep_self: bool = False  # leave a vector's similarity with itself in the denominator (released BERT-JEPA code)

        def __post_init__(self):
            if self.temperature <= 0:
                raise BadInput(f"temperature is {self.temperature}: it must be positive")

    @staticmethod
    def collate(examples, rng, config, special):
        rows = [row(pair[side], special) for side in (0, 1) for pair in examples]
        return dict(packed=Packed.of(rows), scored=torch.zeros(0))

    def forward(self, batch):
        packed, c = batch["packed"], self.config
        x, y = map(gather, self.model.pool(self.model(packed), packed).chunk(2))          # (N, D) each
        loss = info_nce(x, y, c.temperature, c.within, c.keep_self)
        return loss, {"align": loss.detach()}


# ---------------------------------------------------------------------------------------------------------------------
# MEXMA


class Mexma(Objective):
    """The sentence vector of one language unmasks the tokens of the other; the two vectors are aligned; KoLeo spreads them
    [MEXMA, arXiv 2409.12737, sec. 3].

        loss = align_weight |S_A - S_B|^2 + mlm_weight (CE_A + CE_B) / 2 + koleo_weight (koleo(S_A) + koleo(S_B)) / 2

    which is the paper's alpha = 1, beta = 1/2, gamma = .005 on sums. Four encodes (masked A, masked B, clean A, clean B) are
    one packed forward. The head reads the masked states of A with position 0 replaced by the clean vector of B, and vice versa.
    """
    name, views, distinct = "mexma", 2, True
    recipe = dict(lr=1e-4, batch=150, steps=300_000, warmup=0.3, schedule="cosine", weight_decay=0.0, clip=1.2)
    toy = dict(lr=(1e-3, "a small model from scratch"), batch=(64, "minutes on a CPU"), steps=(600, "minutes on a CPU"),
               warmup=(0.1, "600 steps in all"),
               koleo_weight=(1.0, "the paper starts from XLM-R; from scratch .01 leaves the space half-collapsed"),
               head_layers=(2, "the encoder has 3"), head_heads=(4, "as the encoder"), head_hidden=(512, "as the encoder"))

    @dataclass(frozen=True)
    class Config:
        align: str = "mse"  # how the two sentence vectors are aligned: mse, info_nce, or none
        align_weight: float = 1.0  # alpha of the paper
        align_views: str = "clean"  # clean: both vectors from clean sentences; dirty: A's from its masked sentence
        mlm_weight: float = 1.0  # on the mean of the two sides (the paper's beta = 1/2 on their sum)
        koleo_weight: float = 0.01  # on the mean of the two sides (the paper's gamma = .005 on their sum); 0: off
        koleo_input: str = "normalised"  # normalised (released code), or raw (the formula as printed, which would not train)
        symmetrical: bool = True  # both languages are unmasked; otherwise one of the two, drawn per example
        token_gradients: bool = True  # the unmasking loss also reaches the encoder through the tokens, not only the vector
        mask_first: float = 0.4  # share of the first view's tokens that are unmasked
        mask_second: float = 0.4  # share of the second view's
        head_layers: int = 6  # blocks of the unmasking head; it has no positions
        head_heads: int = 8  # its attention heads
        head_hidden: int = 3072  # width inside its feed-forward
        temperature: float = 0.07  # of info_nce; the paper does not say

        def __post_init__(self):
            check(self, positive=["align_weight", "mlm_weight", "koleo_weight", "head_layers"], shares=["mask_first", "mask_second"],
                  align=("mse", "info_nce", "none"), align_views=("clean", "dirty"), koleo_input=("normalised", "raw"))
            if not self.symmetrical and self.align != "none" and self.align_views == "clean":
                raise BadInput("no-symmetrical encodes one masked and one clean sentence: add --align-views dirty or --align none")
            if self.mlm_weight and not self.mask_first:
                raise BadInput("mask_first is 0, so nothing is unmasked: raise it, or set --mlm-weight 0")
            if self.temperature <= 0:
                raise BadInput(f"temperature is {self.temperature}: it must be positive")

    def __init__(self, model, config):
        super().__init__(model, config)
        shape = replace(model.config, heads=config.head_heads, kv_heads=0, hidden=config.head_hidden, norm="layernorm",
                        norm_place="post", norm_epsilon=1e-12, activation="gelu", bias=True)
        self.unmask = nn.ModuleList(Block(shape) for _ in range(config.head_layers))
        self.vocabulary_bias = nn.Parameter(torch.zeros(model.config.vocab))      # the projection itself is the embedding

    @staticmethod
    def collate(examples, rng, config, special):
        if not config.symmetrical:                                       # one direction per example, languages in random order
            swap = rng.random(len(examples)) < 0.5
            examples = [(pair[1], pair[0]) if s else pair for pair, s in zip(examples, swap)]
        clean = [[row(pair[side], special) for pair in examples] for side in (0, 1)]
        masked, labels, targets, base = [], [], [], 0
        for side, ratio in enumerate((config.mask_first, config.mask_second)[:1 + config.symmetrical]):
            rows, where, what = mask_rows(clean[side], ratio, rng, special)
            masked += rows
            labels.append(where + base)
            targets.append(what)
            base += sum(map(len, rows))
        visible = clean[0] + clean[1] if config.symmetrical else clean[1]
        return dict(packed=Packed.of(masked + visible), head=Packed.of(masked), sides=[len(t) for t in targets],
                    labels=torch.from_numpy(np.concatenate(labels)), targets=torch.from_numpy(np.concatenate(targets)),
                    scored=torch.tensor([float(max(1, len(t))) for t in targets]))

    def forward(self, batch):
        c, packed, head = self.config, batch["packed"], batch["head"]
        states = self.model(packed)                                      # (T, D): masked rows, then clean rows
        vectors = self.model.pool(states, packed)                        # (4N, D): masked A, masked B, clean A, clean B
        if c.symmetrical:
            masked_a, _, clean_a, clean_b = vectors.chunk(4)
            spread, others = (clean_a, clean_b), torch.cat([clean_b, clean_a])
            pair = (clean_a if c.align_views == "clean" else masked_a, clean_b)
        else:
            spread = pair = vectors.chunk(2)                             # masked A, clean B
            others = pair[1]
        logits = self.unmask_logits(states[:len(head.tokens)], others, batch).split(batch["sides"])
        sides = zip(logits, batch["targets"].split(batch["sides"]), batch["scored"])
        mlm = sum(token_loss(*side) for side in sides) / len(logits)     # mean of the two languages
        x, y = map(gather, pair)
        align = {"mse": lambda: mse(x, y), "info_nce": lambda: info_nce(x, y, c.temperature), "none": lambda: x.new_zeros(())}[c.align]()
        apart = sum(koleo(gather(side), c.koleo_input == "normalised") for side in spread) / 2 if c.koleo_weight else x.new_zeros(())
        loss = c.align_weight * align + c.mlm_weight * mlm + c.koleo_weight * apart
        return loss, {"mlm": mlm.detach(), "align": align.detach(), "koleo": apart.detach()}

    def unmask_logits(self, states, others, batch):
        """Masked states (T', D) of A and B, sentence vectors (2N, D) of B and A -> logits of the masked positions, A's then B's."""
        head = batch["head"]
        if not self.config.token_gradients:
            states = states.detach()                                     # the vectors still carry the gradient
        states = states.index_copy(0, head.rows[:-1].long(), others)     # position 0 of each row: the other language's vector
        for block in self.unmask:
            states = block(states, head)
        return F.linear(states[batch["labels"]], self.model.embed.weight, self.vocabulary_bias)


OBJECTIVES = (Mexma, Mlm, Contrastive)
