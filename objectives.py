"""The training objectives: the losses as pure functions, then one class per paper.

A class owns the model and everything that exists only for training. Its `collate` turns lists of ids into one batch (all
chance is there), its `forward` turns the batch into a loss (no chance but dropout): read the two together.
"""

import copy
import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed
import torch.nn.functional as F
from torch import nn

from data import ROLES, BadInput, choose, choose_exact, choose_spans, choose_words, corrupt
from model import Block, ModelConfig, Packed, View, sinusoids

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


def in_float32(loss):
    """Run a loss outside of autocast, which would take its matrix products back to half precision whatever its inputs are."""
    @functools.wraps(loss)
    def run(x, *rest, **options):
        with torch.autocast(x.device.type, enabled=False):
            return loss(x, *rest, **options)
    return run


CHUNK = 3 * 2 ** 27  # bytes of logits at a time: 402 rows in float32 of XLM-R's vocabulary, 250,002
SLICE = 2 ** 15  # words whose gradient is added at a time


class VocabularyLoss(torch.autograd.Function):
    """Sum of the cross-entropies of the logits states W' + b without ever holding them all: states (N, D), W (V, D), b (V,) or None,
    targets (N,) -> scalar. `cap`: a logit s becomes cap tanh(s / cap), unless 0. The forward makes the gradients too, a chunk of rows at
    a time, because the logits of a chunk are gone when it ends; the backward scales them. Products in the precision of autocast, softmax in float32."""

    @staticmethod
    def forward(ctx, states, weight, bias, targets, cap):
        kind, device = states.dtype, states.device.type
        if torch.is_autocast_enabled(device):
            kind = torch.get_autocast_dtype(device)
        wanted = [x if need else None for x, need in zip((states, weight, bias), ctx.needs_input_grad)]
        ctx.grads = [x if x is None else torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in wanted]
        with torch.autocast(device, enabled=False):
            return add_up(states.to(kind), weight.to(kind), None if bias is None else bias.to(kind), targets, cap, ctx.grads)

    @staticmethod
    def backward(ctx, grad):
        if ctx.grads is None:
            raise RuntimeError("the gradients of a vocabulary loss can be taken once: they are not kept")
        grads, ctx.grads = ctx.grads, None
        return *(x if x is None else x.mul_(grad) for x in grads), None, None


def add_up(states, weight, bias, targets, cap, grads):
    """The loss of VocabularyLoss; adds its gradients to `grads`, of states, weight and bias, where they are not None."""
    total, (to_states, to_weight, to_bias) = 0, grads
    rows = max(1, CHUNK // (len(weight) * states.element_size()))
    for start in range(0, len(states), rows):
        part = states[start:start + rows]
        logits = F.linear(part, weight, bias)                            # (n, V)
        for few, wanted in zip(logits.split(max(1, rows // 8)), targets[start:start + rows].split(max(1, rows // 8))):
            values = wide(few)                                           # a copy in half precision, `few` itself otherwise
            if cap:
                values = cap * (values / cap).tanh()
                slope = 1 - (values / cap).square()
            rest = values.logsumexp(1, keepdim=True)
            total = total + (rest - values.gather(1, wanted[:, None])).sum()
            values.sub_(rest).exp_()                                     # the softmax, less 1 at the target: d loss / d logits
            values.scatter_add_(1, wanted[:, None], -torch.ones_like(rest))
            few.copy_(values * slope if cap else values)
        if to_states is not None:
            to_states[start:start + rows] = logits @ weight
        for words in range(0, len(weight), SLICE) if to_weight is not None else ():
            to_weight[words:words + SLICE] += logits[:, words:words + SLICE].T @ part
        if to_bias is not None:
            to_bias += logits.sum(0, dtype=to_bias.dtype)
    return total


def vocabulary_loss(states, weight, bias, targets, scored, cap=0.0):
    """Sum of the cross-entropies of states (N, D) against targets (N,) divided by `scored`, the number of targets that the whole step
    scores, so that micro-batches add up to exactly the gradient of one big batch."""
    return VocabularyLoss.apply(states, weight, bias, targets, cap) / scored


def mse(x, y):
    """Mean over items and dimensions of (x - y)^2 on raw vectors (N, D), (N, D) [MEXMA, sec. 3; released loss]."""
    return F.mse_loss(wide(x), wide(y))


@in_float32
def koleo(x, normalise=True, epsilon=1e-8):
    """-mean_i log min_j |x_i - x_j|: pushes every vector (N, D) away from its nearest neighbour [Sablayrolles et al. 2019, eq. 3].
    `normalise`: on the unit sphere, as MEXMA's code; raw vectors, as its formula. Exact duplicates give a large finite value."""
    x = F.normalize(wide(x), dim=-1, eps=epsilon) if normalise else wide(x)
    with torch.no_grad():
        squares = x.square().sum(-1)
        distances = squares[:, None] + squares - 2 * x @ x.T             # (N, N)
        nearest = distances.fill_diagonal_(torch.inf).argmin(1)          # (N,)
    return -(F.pairwise_distance(x, x[nearest], eps=epsilon) + epsilon).log().mean()


@in_float32
def info_nce(x, y, temperature, within=True, keep_self=False, both=True):
    """Each vector must find its partner among all others: x (N, D), y (N, D) -> mean of 2N cross-entropies of cosine / temperature
    [van den Oord et al. 2018, eq. 4; both directions]. `within`: vectors of the same side are negatives too (2N - 2 of them).
    `keep_self`: leave the vector's similarity with itself in the denominator, as BERT-JEPA's code (its floor is then ln 2).
    `both=False`: x finds y only, among N, as LLM-JEPA's code."""
    x, y = F.normalize(wide(x), dim=-1), F.normalize(wide(y), dim=-1)
    n = len(x)
    if not within or not both:
        logits, target = x @ y.T / temperature, torch.arange(n, device=x.device)
        one = F.cross_entropy(logits, target)
        return (one + F.cross_entropy(logits.T, target)) / 2 if both else one
    z = torch.cat([x, y])                                                # (2N, D)
    logits = z @ z.T / temperature
    if not keep_self:
        logits = logits.masked_fill(torch.eye(2 * n, dtype=torch.bool, device=x.device), -torch.inf)
    return F.cross_entropy(logits, torch.arange(2 * n, device=x.device).roll(n))


def cosine_distance(x, y):
    """mean_i 1 - cos(x_i, y_i): (N, D), (N, D) -> 0..2 [LLM-JEPA, sec. 3; Predict-and-Reconstruct, eq. 7]."""
    return (1 - F.cosine_similarity(wide(x), wide(y), dim=-1)).mean()


def l2_distance(x, y):
    """mean_i |x_i - y_i| on raw vectors [LLM-JEPA's code, --jepa_l2]."""
    return torch.linalg.vector_norm(wide(x) - wide(y), dim=-1).mean()


@in_float32
def vicreg(x, y, invariance=25.0, variance=25.0, covariance=1.0):
    """Pull partners together, keep every dimension's deviation above 1, decorrelate dimensions; raw vectors (N, D), N >= 2
    [Bardes et al. 2022, eq. 1-6; the released BERT-JEPA sums the two sides' covariance terms and averages their variance terms]."""
    x, y = wide(x), wide(y)

    def side(z):
        z = z - z.mean(0)
        square = (z.T @ z / (len(z) - 1)).square()
        return F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean(), (square.sum() - square.diagonal().sum()) / z.shape[1]

    (spread_x, tie_x), (spread_y, tie_y) = side(x), side(y)
    return invariance * F.mse_loss(x, y) + variance * (spread_x + spread_y) / 2 + covariance * (tie_x + tie_y)


@in_float32
def barlow_twins(x, y, off_diagonal=0.005):
    """Make the cross-correlation of the two sides the identity: sum (1 - C_ii)^2 + .005 sum_{i != j} C_ij^2 [Zbontar et al. 2021, eq. 1]."""
    unit = lambda z: (z - z.mean(0)) / (z.std(0, correction=0) + 1e-6)
    matrix = unit(wide(x)).T @ unit(wide(y)) / len(x)                    # (D, D)
    diagonal = matrix.diagonal()
    return (1 - diagonal).square().sum() + off_diagonal * (matrix.square().sum() - diagonal.square().sum())


@in_float32
def epps_pulley(z, seed, slices=256, points=17, reach=3.0):
    """How far the projections of z (N, D) on random unit directions are from a standard normal: the mean over slices of
    N * integral |empirical characteristic function - exp(-t^2/2)|^2 exp(-t^2/2) dt over |t| <= 3, by the trapezoid rule
    [Epps & Pulley 1983; LeJEPA, Balestriero & LeCun 2025]. The directions are drawn from `seed`, the same on every rank."""
    z = wide(z)
    chance = torch.Generator(z.device).manual_seed(seed)                 # where z is: numbers from elsewhere would have to be waited for
    directions = F.normalize(torch.randn(z.shape[1], slices, generator=chance, device=z.device, dtype=torch.float64), dim=0).to(z.dtype)
    t = torch.linspace(0, reach, points, device=z.device, dtype=z.dtype)
    weight = torch.full_like(t, 2 * reach / (points - 1))                # both signs of t: the integrand is even
    weight[[0, -1]] /= 2
    normal = (-t.square() / 2).exp()
    angle = (z @ directions)[..., None] * t                              # (N, slices, points)
    error = (angle.cos().mean(0) - normal).square() + angle.sin().mean(0).square()
    return len(z) * (error @ (weight * normal)).mean()


def sigreg(x, y, seed, share=0.05):
    """(1 - share) invariance + share * distance of either side from an isotropic Gaussian [LeJEPA, eq. 7; raw vectors]."""
    return (1 - share) * mse(x, y) + share * (epps_pulley(x, seed) + epps_pulley(y, seed)) / 2


IN_BATCH = ("info_nce", "vicreg", "barlow", "sigreg")                     # losses that compare the items of a batch with each other
ALIGN = ("mse", "mse_unit", "cosine", "l2", "smooth_l1", "info_nce", "vicreg", "barlow", "sigreg", "none")


def align(kind, x, y, temperature, seed=0, **info_nce_options):
    """The alignment loss named `kind` of partners x (N, D), y (N, D). mse_unit is MSE of unit vectors (BERT-JEPA's variant)."""
    if kind == "info_nce":
        return info_nce(x, y, temperature, **info_nce_options)
    if kind == "mse_unit":
        return mse(F.normalize(wide(x), dim=-1), F.normalize(wide(y), dim=-1))
    if kind == "smooth_l1":
        return F.smooth_l1_loss(wide(x), wide(y))
    if kind == "sigreg":
        return sigreg(x, y, seed)
    simple = dict(mse=mse, cosine=cosine_distance, l2=l2_distance, vicreg=vicreg, barlow=barlow_twins, none=lambda x, y: 0 * wide(x).sum())
    return simple[kind](x, y)


# ---------------------------------------------------------------------------------------------------------------------
# What every objective shares


class Objective(nn.Module):
    """Facts of a class: `views` texts per example; `causal` direction of the model; `head` and `pool`, its vocabulary head and
    sentence vector; `distinct`: no text twice in a batch, because other rows are negatives; `in_row`: how many views a row can hold.
    `recipe`: the paper's training values. `toy`: what differs at size toy, each with its reason."""
    views, causal, head, pool, distinct, in_row = 1, False, "none", "cls", False, 1
    recipe, toy = {}, {}

    def __init__(self, model, config):
        super().__init__()
        self.model, self.config = model, config

    @classmethod
    def compares(cls, config):
        """Does the loss compare the examples of a batch with each other? Then parts of a batch are not a batch."""
        return cls.distinct

    @staticmethod
    def tokens(config):
        """Special tokens of its rows that a pretrained model's tokenizer does not have: they are added to it."""
        return ()

    @staticmethod
    def frames(config, special):
        """How a text is embedded: the tokens before and behind it in its row [CLS] ... , of the first view and of the others."""
        return (((), (special.sep,)),) * 2

    def vocabulary_loss(self, states, batch):
        """Mean cross-entropy of the model's own logits, made of the scored positions of states (T, D) only."""
        cap = self.model.config.logit_cap
        return vocabulary_loss(*self.model.head(states[batch["labels"]]), batch["targets"], batch["scored"][0], cap)

    def after_step(self, progress):
        """Called after every optimiser step with progress in (0, 1]: where a teacher follows its student."""

    def warning(self):
        """A line for the log when something goes wrong in a way that the loss does not show."""
        return ""


def joined(*parts):
    """Ids end to end: arrays, lists or tuples, some of them empty."""
    return np.concatenate([np.asarray(part, np.int64) for part in parts])


def row(ids, special):
    """[CLS] ids [SEP]"""
    return joined([special.cls], ids, [special.sep])


def corrupt_rows(rows, chosen, rng, special):
    """Rows and the chosen positions of their line (T,) bool -> corrupted rows, indices of the targets in the line, targets."""
    line = np.concatenate(rows)
    corrupted = corrupt(line, chosen, rng, special)
    return np.split(corrupted, np.cumsum([len(one) for one in rows])[:-1]), np.flatnonzero(chosen), line[chosen]


def mask_rows(rows, ratio, rng, special):
    """Choose over all rows of one side at once, and corrupt. At least one token of the side is a target (MEXMA's code redraws until
    so) unless the ratio is 0."""
    return corrupt_rows(rows, choose(np.concatenate(rows), ratio, rng, special, at_least=1 if ratio else 0), rng, special)


def shuffled_pairs(examples, rng):
    """Each pair in an order of its own."""
    return [pair[::-1] if swap else pair for pair, swap in zip(examples, rng.random(len(examples)) < 0.5)]


def check(config, positive=(), shares=(), above=(), **choices):
    """Refuse a Config whose values break their rules: `positive` numbers >= 0, `above` > 0, `shares` in [0, 1], `choices` from a list."""
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            raise BadInput(f"{name} is {getattr(config, name)!r}: choose one of {', '.join(allowed)}")
    for name in positive:
        if getattr(config, name) < 0:
            raise BadInput(f"{name} is {getattr(config, name)}: it must not be negative")
    for name in above:
        if getattr(config, name) <= 0:
            raise BadInput(f"{name} is {getattr(config, name)}: it must be positive")
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
               warmup=(0.1, "a short run"))

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
        loss = self.vocabulary_loss(states, batch)
        return loss, {"mlm": loss.detach()}


class Contrastive(Objective):
    """A bi-encoder trained with symmetric InfoNCE over translation pairs (the baseline of MEXMA's table 6, and LaBSE's family)."""
    name, views, distinct = "contrastive", 2, True
    recipe = dict(lr=1e-4, batch=1200, steps=300_000, warmup=0.3, schedule="cosine", weight_decay=0.0, clip=1.2)
    toy = dict(lr=(5e-4, "a small model from scratch"), batch=(64, "minutes on a CPU"), steps=(1000, "minutes on a CPU"),
               warmup=(0.1, "a short run"))

    @dataclass(frozen=True)
    class Config:
        temperature: float = 0.07  # divides the cosines
        within: bool = True  # sentences of the same language are negatives too
        keep_self: bool = False  # leave a vector's similarity with itself in the denominator (released BERT-JEPA code)

        def __post_init__(self):
            check(self, above=["temperature"])

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
    recipe = dict(lr=1e-4, batch=150, steps=300_000, warmup=0.3, lr_start=0.1, schedule="cosine", weight_decay=0.0, clip=1.2)
    toy = dict(lr=(1e-3, "a small model from scratch"), batch=(64, "minutes on a CPU"), steps=(600, "minutes on a CPU"),
               warmup=(0.1, "a short run"), lr_start=(0.0, "a short run"),
               koleo_weight=(1.0, "the paper starts from XLM-R; from scratch .01 leaves the space half-collapsed"),
               head_layers=(2, "the encoder has 3"), head_heads=(4, "as the encoder"), head_hidden=(512, "as the encoder"))

    @dataclass(frozen=True)
    class Config:
        align: str = "mse"  # how the two vectors are aligned: mse, mse_unit, cosine, l2, smooth_l1, info_nce, vicreg, barlow, sigreg, none
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
            check(self, positive=["align_weight", "mlm_weight", "koleo_weight", "head_layers"], above=["temperature"], shares=["mask_first", "mask_second"],
                  align=ALIGN, align_views=("clean", "dirty"), koleo_input=("normalised", "raw"))
            if not self.symmetrical and self.align != "none" and self.align_views == "clean":
                raise BadInput("no-symmetrical encodes one masked and one clean sentence: add --align-views dirty or --align none")
            if self.mlm_weight and not self.mask_first:
                raise BadInput("mask_first is 0, so nothing is unmasked: raise it, or set --mlm-weight 0")

    def __init__(self, model, config):
        super().__init__(model, config)
        shape = ModelConfig(width=model.config.width, heads=config.head_heads, hidden=config.head_hidden, norm_epsilon=1e-12, dropout=model.config.dropout)
        self.unmask = nn.ModuleList(Block(shape) for _ in range(config.head_layers))
        self.vocabulary_bias = nn.Parameter(torch.zeros(model.config.vocab))      # the projection itself is the embedding

    @staticmethod
    def collate(examples, rng, config, special):
        if not config.symmetrical:                                       # one direction per example, languages in random order
            examples = shuffled_pairs(examples, rng)
        clean = [[row(pair[side], special) for pair in examples] for side in (0, 1)]
        masked, labels, targets, base = [], [], [], 0
        for side, ratio in enumerate((config.mask_first, config.mask_second)[:1 + config.symmetrical]):
            rows, where, what = mask_rows(clean[side], ratio, rng, special)
            masked += rows
            labels.append(where + base)
            targets.append(what)
            base += sum(map(len, rows))
        visible = clean[0] + clean[1] if config.symmetrical else clean[1]
        return dict(packed=Packed.of(masked + visible), head=Packed.of(masked), seed=int(rng.integers(1 << 31)), sides=[len(t) for t in targets],
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
        unmasked = self.unmasked(states[:len(head.tokens)], others, batch).split(batch["sides"])
        sides = zip(unmasked, batch["targets"].split(batch["sides"]), batch["scored"])
        mlm = sum(vocabulary_loss(read, self.model.embed.weight, self.vocabulary_bias, *side) for read, *side in sides) / len(unmasked)
        aligned = align(c.align, *map(gather, pair), c.temperature, batch["seed"])
        apart = sum(koleo(gather(side), c.koleo_input == "normalised") for side in spread) / 2 if c.koleo_weight else 0 * mlm
        loss = c.align_weight * aligned + c.mlm_weight * mlm + c.koleo_weight * apart
        return loss, {"mlm": mlm.detach(), "align": aligned.detach(), "koleo": apart.detach()}

    def unmasked(self, states, others, batch):
        """Masked states (T', D) of A and B, sentence vectors (2N, D) of B and A -> the head's states of the masked positions, A's then B's."""
        head = batch["head"]
        if not self.config.token_gradients:
            states = states.detach()                                     # the vectors still carry the gradient
        states = states.index_copy(0, head.rows[:-1].long(), others)     # position 0 of each row: the other language's vector
        for block in self.unmask:
            states = block(states, head)
        return states[batch["labels"]]


# ---------------------------------------------------------------------------------------------------------------------
# BERT-JEPA


class Bepa(Objective):
    """Masked-language modelling on translation pairs, and InfoNCE between the two sentences' [CLS] vectors
    [BERT-JEPA, arXiv 2601.00366, sec. 3].

        loss = mlm + align_weight * align(predictor(CLS_1), CLS_2)

    One packed forward holds the masked rows and, for each sentence, the pass that hides the other one from it.
    """
    name, views, head, distinct, in_row = "bepa", 2, "transform", True, 2
    recipe = dict(lr=2e-5, batch=64, steps=21_875, warmup=500 / 21_875, schedule="linear", weight_decay=0.01, clip=1.0)
    toy = dict(lr=(5e-4, "a small model from scratch"), steps=(1000, "minutes on a CPU"), warmup=(0.1, "a short run"),
               cls_view=("clean", "from scratch, a second place in the pair is a second set of positions to learn"))

    @dataclass(frozen=True)
    class Config:
        align: str = "info_nce"  # alignment loss: info_nce, mse, mse_unit, cosine, l2, smooth_l1, vicreg, barlow, sigreg, none
        align_weight: float = 1.0  # lambda of the paper
        align_ramp: float = 0.0  # share of the run in which lambda rises linearly from 0
        temperature: float = 0.07  # of info_nce
        keep_self: bool = False  # leave a vector's similarity with itself in the denominator (released code)
        order: str = "random"  # which sentence of a pair stands first: random, or given (the first column; the other never starts at position 0)
        packing: str = "bilingual"  # rows of the MLM: bilingual pairs, monolingual pairs of one language, separate sentences (released)
        cls_view: str = "hidden"  # the other sentence is hidden by visibility, masked (replaced by mask tokens), or clean (own rows; released)
        predictor: str = "identity"  # between the first vector and its target: identity, linear, mlp
        mask_ratio: float = 0.15  # share of the tokens that become targets

        def __post_init__(self):
            check(self, positive=["align_weight"], above=["temperature"], shares=["align_ramp", "mask_ratio"], align=ALIGN,
                  predictor=("identity", "linear", "mlp"), order=("random", "given"), packing=("bilingual", "monolingual", "separate"),
                  cls_view=("hidden", "masked", "clean"))
            if self.keep_self and self.align != "info_nce":
                raise BadInput(f"keep_self is about the denominator of InfoNCE, and align is {self.align!r}: leave one of them out")

    def __init__(self, model, config):
        super().__init__(model, config)
        if model.config.pool != "cls" and config.cls_view == "masked":
            raise BadInput(f"cls_view masked reads [CLS] inside the pair, so pool {model.config.pool!r} has no meaning: use --pool cls")
        d = model.config.width
        self.predictor = {"identity": nn.Identity, "linear": lambda: nn.Linear(d, d),
                          "mlp": lambda: nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))}[config.predictor]()
        self.register_buffer("progress", torch.zeros(()))

    @staticmethod
    def collate(examples, rng, config, special):
        examples = shuffled_pairs(examples, rng) if config.order == "random" else examples
        first, second = ([row(pair[side], special) for pair in examples] for side in (0, 1))
        if config.packing == "bilingual":
            clean = [np.concatenate(pair) for pair in zip(first, second)]
        elif config.packing == "monolingual":                            # neighbours of one language; an odd one stays alone
            clean = [np.concatenate(side[i:i + 2]) for side in (first, second) for i in range(0, len(side), 2)]
        else:
            clean = first + second
        if config.packing == "separate":                                 # released: exactly max(1, floor(ratio n)) of each sentence
            chosen = np.concatenate([choose_exact(one, config.mask_ratio, rng, special) for one in clean])
            rows, labels, targets = corrupt_rows(clean, chosen, rng, special)
        else:
            rows, labels, targets = mask_rows(clean, config.mask_ratio, rng, special)
        views = [[View(one)] for one in rows]
        for a in first:
            if config.cls_view == "masked":                              # CLS_2, T_2, SEP become [MASK]
                b = second[len(views) - len(rows)]
                views.append([View(np.concatenate([a, np.full_like(b, special.mask)]))])
            else:
                views.append([View(a)])
        for a, b in zip(first, second):
            if config.cls_view == "masked":                              # as released: T_1 and SEP become [MASK], CLS_1 stays
                views.append([View(np.concatenate([a[:1], np.full_like(a[1:], special.mask), b]))])
            else:                                                        # hidden: the sentence keeps its place behind the hidden one
                place = len(a) if config.cls_view == "hidden" else 0
                views.append([View(b, positions=place + np.arange(len(b)))])
        packed, n = Packed.views(views), len(examples)
        firsts = packed.rows[len(rows):-1].long()
        if config.cls_view == "masked":
            firsts = firsts + torch.tensor([0] * n + [len(a) for a in first])
        return dict(packed=packed, labels=torch.from_numpy(labels), targets=torch.from_numpy(targets), firsts=firsts,
                    seed=int(rng.integers(1 << 31)), scored=torch.tensor([float(max(1, len(targets)))]))

    def forward(self, batch):
        c, packed, firsts = self.config, batch["packed"], batch["firsts"]
        states = self.model(packed)                                      # (T, D): masked rows, then one pass per sentence
        mlm = self.vocabulary_loss(states, batch)
        if self.model.config.pool == "cls":
            vectors = states[firsts]                                     # (2N, D)
        else:
            vectors = self.model.pool(states, packed)[-len(firsts):]
        x, y = vectors.chunk(2)
        aligned = align(c.align, gather(self.predictor(x)), gather(y), c.temperature, batch["seed"], keep_self=c.keep_self)
        weight = c.align_weight * (self.progress / c.align_ramp).clamp(max=1) if c.align_ramp else c.align_weight
        return mlm + weight * aligned, {"mlm": mlm.detach(), "align": aligned.detach()}

    def after_step(self, progress):
        self.progress.fill_(progress)


# ---------------------------------------------------------------------------------------------------------------------
# LLM-JEPA and its baseline


class Ntp(Objective):
    """Next-token prediction of the second view after the first: [CLS] text [SEP] code [SEP], left to right. The last [SEP] is the
    token that stops a generation, and it is a target. With --chat shared-header, [CLS] system [SEP] text [SEP] code [SEP]."""
    name, views, causal, pool, in_row = "ntp", 2, True, "last", 2
    recipe = dict(lr=2e-5, batch=128, steps=248, warmup=0.0, schedule="linear", weight_decay=0.0, clip=1.0)
    toy = dict(lr=(2e-3, "a small model from scratch"), batch=(64, "minutes on a CPU"), steps=(600, "minutes on a CPU"),
               warmup=(0.1, "a short run"))

    @dataclass(frozen=True)
    class Config:
        labels: str = "answer"  # scored tokens: the answer with its stop token, or all but the stop token (as the released code trains)

        def __post_init__(self):
            check(self, labels=("answer", "all"))

    @staticmethod
    def frames(config, special):
        return tuple((front, (special.sep,)) for front in (special.chat.user, special.chat.assistant))

    @staticmethod
    def collate(examples, rng, config, special):
        return next_token_batch(next_token_rows(examples, special), examples, config.labels, special)

    def forward(self, batch):
        loss = self.vocabulary_loss(self.model(batch["packed"]), batch)
        return loss, {"ntp": loss.detach()}


def opening(example, special):
    """What every view of an example begins with: [CLS], or [CLS] and a system turn if the example has a third text."""
    return joined([special.cls], special.chat.system, example[2], special.chat.end) if len(example) > 2 else joined([special.cls])


def next_token_rows(examples, special):
    """[CLS] (header [SEP]) text, and the answer that continues it: [SEP] code, which is what the model reads while it writes code [SEP].
    In the chats of a decoder's family other ids stand there: data.Chat."""
    rows, chat = [], special.chat
    for example in examples:
        text = joined(opening(example, special), chat.user, example[0])
        rows.append([View(text, True), View(joined(chat.end, chat.assistant, example[1]), True, (0, len(text)))])
    return rows


def next_token_batch(rows, examples, labels, special):
    """Pack rows of views. The first N rows belong to the N examples, and their first two views are Text and answer; the scored
    positions predict the answer and its stop token or, with labels "all", every token but the stop."""
    packed, where, what = Packed.views(rows), [], []
    for example, (text, answer, *_), at in zip(examples, rows, packed.rows.tolist()):
        answer_at, length, code = at + len(text.tokens), answer.shares[1], example[1]
        if labels == "answer":
            where.append(answer_at + len(answer.tokens) - 1 - np.arange(len(code) + 1)[::-1])
            what += [code, [special.sep]]
        else:
            where += [at + np.arange(length), answer_at + np.arange(len(answer.tokens) - 1)]
            what += [text.tokens[1:length], answer.tokens]
    where, what = (torch.from_numpy(joined(*x)) for x in (where, what))
    return dict(packed=packed, labels=where, targets=what, scored=torch.tensor([float(len(what))]))


class LlmJepa(Ntp):
    """Next-token prediction, and the Text's vector predicts the Code's vector [LLM-JEPA, arXiv 2509.14252, eq. 2].

        loss = gamma * ntp + jepa_weight * distance(Enc(Text [PRED]_k .. [PRED]_1), Enc(Code))

    Mode one-forward: Text and its [PRED]s, the answer that shares the Text, and the isolated Code are three views of one row. The Code
    shares what every view opens with: [CLS], or a chat's whole header.
    """
    name = "llm-jepa"
    toy = Ntp.toy

    @dataclass(frozen=True)
    class Config:
        gamma: float = 1.0  # weight of the next-token loss
        jepa_weight: float = 1.0  # lambda of the paper, whose grid is .5, 1, 2, 4
        predictors: int = 1  # k: [PRED] tokens behind the predicting view; 0: its last token predicts
        place: str = "append"  # where the [PRED]s stand: append, or prepend (the last token of the view then predicts)
        reverse: bool = False  # the Code predicts the Text
        distance: str = "cosine"  # cosine, l2, mse, info_nce (one direction), smooth_l1, vicreg, barlow, sigreg, mse_unit
        temperature: float = 0.07  # of info_nce
        jepa_dropout: float = 0.0  # share of the steps that skip the views and their compute
        rescale: bool = False  # divide lambda by 1 - jepa_dropout
        view_end: bool = False  # views end in [SEP], and it is the vector that is read (where the released offset lands for gemma and OLMo-2)
        mode: str = "one-forward"  # one-forward, two-row (the official additive mask), three-row (separate rows): equal in value
        labels: str = "answer"  # scored tokens: the answer with its stop token, or all but the stop token (as the released code trains)

        def __post_init__(self):
            check(self, positive=["gamma", "jepa_weight", "predictors"], above=["temperature"], shares=["jepa_dropout"],
                  place=("append", "prepend"), labels=("answer", "all"), distance=ALIGN[:-1], mode=("one-forward", "two-row", "three-row"))
            if self.predictors > 10:
                raise BadInput(f"predictors is {self.predictors}: the tokenizers that are trained here have 10 [PRED] tokens")
            if self.jepa_dropout == 1:
                raise BadInput("jepa_dropout is 1: no step would have a JEPA loss; use --objective ntp for that")

    @classmethod
    def compares(cls, config):
        return config.distance in IN_BATCH

    @staticmethod
    def tokens(config):
        return ROLES[5:5 + config.predictors]

    @staticmethod
    def frames(config, special):
        marks, end = special.preds[:config.predictors], (special.sep,) * config.view_end
        predicting = ((), marks[::-1] + end) if config.place == "append" else (marks, end)       # [PRED]_1 is the last of those that are appended
        ends = [((), end), predicting] if config.reverse else [predicting, ((), end)]
        return tuple((front + before, behind) for front, (before, behind) in zip((special.chat.user, special.chat.assistant), ends))

    @staticmethod
    def collate(examples, rng, config, special):
        if rng.random() < config.jepa_dropout:
            return Ntp.collate(examples, rng, config, special)
        if config.predictors > len(special.preds):
            raise BadInput(f"predictors is {config.predictors}, but the tokenizer has {len(special.preds)} [PRED] tokens: lower it")
        n = len(examples)
        heads = [opening(example, special) for example in examples]
        (before, behind), (before_code, behind_code) = LlmJepa.frames(config, special)
        texts = [View(joined(head, before, example[0], behind), True) for head, example in zip(heads, examples)]
        codes = [View(joined(before_code, example[1], behind_code), True, (0, len(head))) for head, example in zip(heads, examples)]
        rows = next_token_rows(examples, special)
        if config.mode == "one-forward" and (config.place == "append" or config.reverse or not config.predictors):
            rows = [[text, one[1], code] for one, text, code in zip(rows, texts, codes)]       # the Text view begins with the row's own Text
            read = [(i, view) for view in (0, 2) for i in range(n)]
        elif config.mode == "three-row":
            rows += [[text] for text in texts] + [[View(joined(head, code.tokens), True)] for head, code in zip(heads, codes)]
            read = [(n + i, 0) for i in range(2 * n)]
        else:
            rows += [[text, code] for text, code in zip(texts, codes)]
            read = [(n + i, view) for view in (0, 1) for i in range(n)]
        batch = next_token_batch(rows, examples, config.labels, special)
        starts = batch["packed"].rows.tolist()
        lasts = [starts[i] + sum(len(view.tokens) for view in rows[i][:place + 1]) - 1 for i, place in read]
        return batch | dict(lasts=torch.tensor(lasts).view(2, n), seed=int(rng.integers(1 << 31)))

    def forward(self, batch):
        c = self.config
        states = self.model(batch["packed"])                             # (T, D)
        ntp = self.vocabulary_loss(states, batch)
        if "lasts" not in batch:                                         # jepa_dropout: this step has no views
            return c.gamma * ntp, {"ntp": ntp.detach(), "jepa": 0 * ntp.detach()}
        text, code = states[batch["lasts"][0]], states[batch["lasts"][1]]         # (N, D) each
        source, target = (code, text) if c.reverse else (text, code)
        jepa = align(c.distance, source, target, c.temperature, batch["seed"], both=False)
        weight = c.jepa_weight / (1 - c.jepa_dropout if c.rescale else 1)
        return c.gamma * ntp + weight * jepa, {"ntp": ntp.detach(), "jepa": jepa.detach()}


# ---------------------------------------------------------------------------------------------------------------------
# Predict and Reconstruct


class Hybrid(Objective):
    """Latent prediction of hidden blocks against an EMA teacher, and masked-language modelling, over one encoder
    [Predict and Reconstruct, arXiv 2606.05173, sec. 3].

        loss = lambda * latent(predictor(context states), teacher states of the blocks) + (1 - lambda) * mlm,  lambda = sigmoid(w)

    The student's one packed forward holds the corrupted rows (MLM) and their context blocks, whose hidden tokens are not in the
    line at all. Its context rows give the predictor's input; each target block is predicted alone, from positions and a mask token.
    """
    name, pool = "hybrid", "mean"
    recipe = dict(lr=5e-5, batch=64, steps=300_000, warmup=10 / 300_000, schedule="cosine", weight_decay=0.05, clip=0.0)
    toy = dict(lr=(1e-3, "a small model from scratch"), batch=(128, "as many sentences as 64 pairs"), steps=(600, "minutes on a CPU"),
               warmup=(0.1, "a short run"), min_keep=(4, "a sentence has about 14 tokens, not 512"), predictor_width=(64, "half the encoder's"),
               predictor_layers=(2, "the encoder has 3"), predictor_heads=(4, "as the encoder"))

    @dataclass(frozen=True)
    class Config:
        latent: str = "cosine"  # distance to the teacher: cosine, smooth_l1, mse, vicreg, barlow
        balance: str = "learned"  # lambda: learned, fixed, scheduled, or uncertainty (two learned variances instead)
        balance_start: float = 0.5  # lambda at step 0, or its fixed value
        balance_end: float = 0.5  # lambda at the last step, if scheduled
        targets: int = 2  # blocks to predict in each row
        target_low: float = 0.10  # smallest block, share of the row
        target_high: float = 0.25  # largest block
        context_low: float = 0.65  # smallest context block
        context_high: float = 0.85  # largest context block
        min_keep: int = 32  # a context with fewer tokens takes all that are not targets (not with --leak)
        leak: bool = False  # the released sampler: blocks start anywhere and are cut at the row's end, targets may be visible in the context
        block_base: int = 0  # length that the shares refer to; 0: the row's own (released, with --leak: 512 on rows of 128)
        momentum: float = 0.996  # of the teacher at the start; it rises to 1 over the run
        teacher_norm: bool = False  # layer-normalise the teacher's states, without weights (released code)
        predictor_width: int = 512  # width of the predictor (512 in the paper, 192 in the released config)
        predictor_layers: int = 6  # its blocks
        predictor_heads: int = 8  # its attention heads
        mask_ratio: float = 0.15  # share of the tokens that MLM restores
        masking: str = "token"  # what MLM hides: token, word (whole), span
        mask_special: bool = False  # [CLS] and [SEP] may be hidden too (released code; token masking only)

        def __post_init__(self):
            check(self, positive=["targets", "predictor_layers", "min_keep", "block_base"], latent=("cosine", "smooth_l1", "mse", "vicreg", "barlow"),
                  balance=("learned", "fixed", "scheduled", "uncertainty"), masking=("token", "word", "span"),
                  shares=["target_low", "target_high", "context_low", "context_high", "momentum", "mask_ratio", "balance_start", "balance_end"])
            for low, high in (("target_low", "target_high"), ("context_low", "context_high")):
                if getattr(self, low) > getattr(self, high):
                    raise BadInput(f"{low} {getattr(self, low)} is above {high} {getattr(self, high)}: swap them")
            if self.targets < 1 or self.targets * self.target_high >= 1:
                raise BadInput(f"targets {self.targets} of up to {self.target_high} of the row leave no context: lower one of them")
            if self.block_base and not self.leak:
                raise BadInput(f"block_base {self.block_base} could leave a row without context: add --leak, whose contexts may overlap the targets")
            if self.balance == "learned" and not 0 < self.balance_start < 1:
                raise BadInput(f"balance_start is {self.balance_start}: a learned lambda starts strictly between 0 and 1")
            if self.mask_special and self.masking != "token":
                raise BadInput(f"mask_special needs token masking, not {self.masking!r}: drop one of the two")

    def __init__(self, model, config):
        super().__init__(model, config)
        c, d, v = config, model.config.width, model.config.vocab
        shape = ModelConfig(width=c.predictor_width, heads=c.predictor_heads, hidden=4 * c.predictor_width, norm_place="pre",
                            norm_epsilon=model.config.norm_epsilon, dropout=model.config.dropout)
        self.narrow, self.widen = nn.Linear(d, c.predictor_width), nn.Linear(c.predictor_width, d)
        self.mask_token = nn.Parameter(torch.randn(c.predictor_width) * 0.02)
        self.predictor = nn.ModuleList(Block(shape) for _ in range(c.predictor_layers))
        self.predictor_norm = nn.LayerNorm(c.predictor_width)
        self.regressor = nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.LayerNorm(d), nn.Linear(d, v))     # W2 LN(GELU(W1 z)), eq. 9
        if c.balance == "learned":
            self.balance = nn.Parameter(torch.tensor(math.log(c.balance_start / (1 - c.balance_start))))
        if c.balance == "uncertainty":
            self.log_variance = nn.Parameter(torch.zeros(2))             # [Kendall et al. 2018, eq. 10]
        self.teacher = copy.deepcopy(model).requires_grad_(False).eval()
        self.register_buffer("progress", torch.zeros(()))

    @classmethod
    def compares(cls, config):
        return config.latent in IN_BATCH

    def train(self, mode=True):
        """The teacher stays in eval mode: its targets have no dropout."""
        super().train(mode)
        self.teacher.eval()
        return self

    @staticmethod
    def collate(examples, rng, config, special):
        clean = [row(ids, special) for ids, in examples]
        line = np.concatenate(clean)
        hide = dict(token=choose, word=choose_words, span=choose_spans)[config.masking]
        chosen = hide(line, config.mask_ratio, rng, special, **(dict(exempt=not config.mask_special) if config.masking == "token" else {}))
        if not chosen.any():
            chosen = choose(line, 0.0, rng, special, at_least=1)
        corrupted, labels, targets = corrupt_rows(clean, chosen, rng, special)
        target_share = rng.uniform(config.target_low, config.target_high)                # one size a batch, as I-JEPA
        context_share = rng.uniform(config.context_low, config.context_high)
        contexts, predictions, slots, goals, base = [], [], [], [], 0
        for one in corrupted:
            context, blocks = draw_blocks(len(one), target_share, context_share, config, rng)
            contexts.append([View(one[context], positions=context)])
            for block in blocks:                                         # the predictor's rows: context, then the block's mask tokens
                predictions.append([View(np.zeros(len(context) + len(block), np.int64), positions=np.concatenate([context, block]))])
                slots.append(np.arange(len(context) + len(block)) >= len(context))
                goals.append(base + block)
            base += len(one)
        # Context states are read from the line: rows of the MLM first, then the contexts, each as often as there are blocks.
        starts = base + np.cumsum([0] + [len(view.tokens) for view, in contexts])
        sources = [start + np.arange(len(view.tokens)) for start, (view,) in zip(starts, contexts) for _ in range(config.targets)]
        slot = np.concatenate(slots)
        return dict(packed=Packed.views([[View(one)] for one in corrupted] + contexts), clean=Packed.of(clean), predict=Packed.views(predictions),
                    sources=torch.from_numpy(np.concatenate(sources)), fill=torch.from_numpy(np.flatnonzero(~slot)),
                    slots=torch.from_numpy(np.flatnonzero(slot)), goals=torch.from_numpy(np.concatenate(goals)),
                    labels=torch.from_numpy(labels), targets=torch.from_numpy(targets),
                    scored=torch.tensor([float(len(targets)), float(slot.sum())]))

    def forward(self, batch):
        c = self.config
        states = self.model(batch["packed"])                             # (T, D): corrupted rows, then their contexts
        *regress, last = self.regressor
        guessed = nn.Sequential(*regress)(states[batch["labels"]])
        mlm = vocabulary_loss(guessed, last.weight, last.bias, batch["targets"], batch["scored"][0])
        with torch.no_grad():
            goals = self.teacher(batch["clean"])[batch["goals"]]         # (N, D): the teacher's states of the hidden blocks
            goals = F.layer_norm(wide(goals), goals.shape[-1:]) if c.teacher_norm else goals
        guesses = self.predict(states, batch)                            # (N, D)
        latent = align(c.latent, guesses, goals, 1.0)
        if c.latent in ("cosine", "smooth_l1", "mse"):                   # means over tokens: weigh micro-batches by their tokens
            latent = latent * (len(guesses) / batch["scored"][1])
        if c.balance == "uncertainty":
            weights = (-self.log_variance).exp()
            share = weights[0] / weights.sum()
            loss = weights[0] * latent + weights[1] * mlm + self.log_variance.sum()
        else:
            share = self.share()
            loss = share * latent + (1 - share) * mlm
        return loss, {"mlm": mlm.detach(), "latent": latent.detach(), "lambda": share.detach()}

    def share(self):
        """lambda, the weight of the latent loss."""
        c = self.config
        if c.balance == "learned":
            return self.balance.sigmoid()
        return c.balance_start + (c.balance_end - c.balance_start) * (self.progress if c.balance == "scheduled" else 0 * self.progress)

    def predict(self, states, batch):
        """States (T, D) -> the predicted states of all target blocks (N, D)."""
        packed = batch["predict"]
        x = self.mask_token.to(states.dtype).expand(len(packed.tokens), -1)
        x = x.index_copy(0, batch["fill"], self.narrow(states[batch["sources"]]).to(x.dtype))     # (T', P)
        x = x + sinusoids(packed.positions, x.shape[1]).to(x.dtype)
        for block in self.predictor:
            x = block(x, packed)
        return self.widen(self.predictor_norm(x[batch["slots"]]))

    def after_step(self, progress):
        """teacher <- m teacher + (1 - m) student, m from `momentum` to 1 [eq. 3]."""
        self.progress.fill_(progress)
        m = self.config.momentum + (1 - self.config.momentum) * progress
        with torch.no_grad():
            torch._foreach_lerp_(list(self.teacher.parameters()), list(self.model.parameters()), 1 - m)

    def warning(self):
        if self.config.balance != "learned" or 0.05 <= (share := float(self.share().detach())) <= 0.95:
            return ""
        starved = "mlm" if share > 0.5 else "latent"
        return f"the learned lambda is {share:.3f}: it falls to the smaller loss and starves {starved}; --balance fixed holds it"


def draw_blocks(length, target_share, context_share, config, rng):
    """Context positions (sorted) and `config.targets` blocks of one row [I-JEPA, Assran et al. 2023, sec. 3; the paper's sec. 3.2]."""
    if config.leak:
        base = config.block_base or length
        block = lambda start, share: np.arange(start, min(length, start + max(1, int(base * share))))
        blocks = [block(start, target_share) for start in rng.integers(0, length, config.targets)]
        outside = np.concatenate([np.setdiff1d(np.arange(length), one) for one in blocks])   # the context starts outside of some target
        return block(rng.choice(outside) if len(outside) else 0, context_share), blocks
    size, wide_size = (max(1, int(length * share)) for share in (target_share, context_share))
    blocks = [start + np.arange(size) for start in rng.integers(0, length - size + 1, config.targets)]
    begin, hidden = rng.integers(0, length - wide_size + 1), np.zeros(length, bool)
    hidden[np.concatenate(blocks)] = True
    context = np.flatnonzero(~hidden & (np.arange(length) >= begin) & (np.arange(length) < begin + wide_size))
    return (context if len(context) >= max(1, config.min_keep) else np.flatnonzero(~hidden)), blocks


OBJECTIVES = (Mexma, Bepa, Hybrid, LlmJepa, Mlm, Ntp, Contrastive)
