"""The training objectives: first the losses as pure functions, then one class per paper.

Of a class read `collate`, which has all that is random, and `forward` together.

Axes: T tokens of the packed line, R rows, D width, N selected positions or compared items.
"""

import copy
import importlib.util
import itertools
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from corpora.folder import hash_of_file
from corpora.program import BadInput, check_range, did_you_mean, validate
from data import MASKS, ROLES, corrupt, exact_mask, token_mask
from kernels.cross_entropy import linear_cross_entropy, upcast
from model import Block, ModelConfig, Packed, Regressor, Segment, initialise, sinusoids

# ---- losses, the simplest first: (N, D), (N, D) -> (), in float32 whatever the run's precision


def mse(x, y):
    """Mean of (x - y)^2 over items and dimensions, of raw vectors [MEXMA, sec. 3; released]."""
    return F.mse_loss(upcast(x), upcast(y))


def mse_unit(x, y):
    """`mse` of unit vectors [BERT-JEPA's code]."""
    return mse(F.normalize(upcast(x), dim=-1), F.normalize(upcast(y), dim=-1))


def smooth_l1(x, y):
    """Half the square below 1, the absolute difference beyond [I-JEPA's code]."""
    return F.smooth_l1_loss(upcast(x), upcast(y))


def cosine_distance(x, y):
    """Mean of 1 - cos(x_i, y_i) [LLM-JEPA, sec. 3; Predict-and-Reconstruct, eq. 7]."""
    return (1 - F.cosine_similarity(upcast(x), upcast(y), dim=-1)).mean()


def l2_distance(x, y):
    """Mean of |x_i - y_i|, of raw vectors [LLM-JEPA's code, --jepa_l2]."""
    return torch.linalg.vector_norm(upcast(x) - upcast(y), dim=-1).mean()


def no_autocast(x):
    """`with no_autocast(x):` matrix products stay in float32."""
    return torch.autocast(x.device.type, enabled=False)


def koleo(x, unit=True, epsilon=1e-8):
    """Push every vector away from its nearest: -mean_i log min_j |x_i - x_j|, (N, D) -> ()
    [Sablayrolles et al. 2019, eq. 3]; `unit`: of unit vectors, as in MEXMA's code; otherwise of the
    vectors as they are, as in its formula [MEXMA, sec. 3.3]."""
    x = upcast(x)
    if unit:
        x = F.normalize(x, dim=-1, eps=epsilon)
    with torch.no_grad(), no_autocast(x):
        squares = x.square().sum(-1)
        distances = squares[:, None] + squares - 2 * x @ x.T  # (N, N)
        nearest = distances.fill_diagonal_(torch.inf).argmin(1)  # (N,)
    # With both epsilons, as released, exact duplicates give a large finite value.
    distance = F.pairwise_distance(x, x[nearest], eps=epsilon)  # (N,)
    return -(distance + epsilon).log().mean()


def info_nce(x, y, temperature, within=True, keep_self=False, both=True):
    """Each vector must find its partner among all others: the mean of 2N cross-entropies of
    cosine / temperature [van den Oord et al. 2018, eq. 4, in both directions].

    within: vectors of the same side are negatives too, 2N - 2 in all
    keep_self: the cosine with itself is in the denominator, and the loss stays above ln 2
    both: False: only x searches, and among y alone
    """
    x = F.normalize(upcast(x), dim=-1)
    y = F.normalize(upcast(y), dim=-1)
    n = len(x)
    if within and both:
        z = torch.cat([x, y])  # (2N, D)
        with no_autocast(z):
            logits = z @ z.T / temperature  # (2N, 2N)
        if not keep_self:
            itself = torch.eye(2 * n, dtype=torch.bool, device=x.device)
            logits = logits.masked_fill(itself, -torch.inf)
        return F.cross_entropy(logits, torch.arange(2 * n, device=x.device).roll(n))
    with no_autocast(x):
        logits = x @ y.T / temperature  # (N, N)
    partner = torch.arange(n, device=x.device)
    loss = F.cross_entropy(logits, partner)
    return (loss + F.cross_entropy(logits.T, partner)) / 2 if both else loss


def vicreg(x, y, invariance=25.0, variance=25.0, covariance=1.0):
    """Pull partners together, keep every dimension's deviation above 1, decorrelate dimensions; raw
    vectors, N >= 2 [Bardes et al. 2022, eq. 1-6; sides averaged and summed as in BERT-JEPA's code].
    """
    x = upcast(x)
    y = upcast(y)
    hinge = 0.0
    off_diagonal = 0.0
    for z in (x - x.mean(0), y - y.mean(0)):
        with no_autocast(z):
            squares = (z.T @ z / (len(z) - 1)).square()  # (D, D), of the covariances
        hinge = hinge + F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean()
        off_diagonal = off_diagonal + (squares.sum() - squares.diagonal().sum()) / z.shape[1]
    return invariance * F.mse_loss(x, y) + variance * hinge / 2 + covariance * off_diagonal


def standardised(x):
    """Every dimension with mean 0 and deviation 1: (N, D) -> (N, D)."""
    return (x - x.mean(0)) / (x.std(0, correction=0) + 1e-6)


def barlow_twins(x, y, off_diagonal=0.005):
    """Make the cross-correlation C of the two sides the identity: sum_i (1 - C_ii)^2 +
    off_diagonal * sum_{i != j} C_ij^2 [Zbontar et al. 2021, eq. 1]."""
    with no_autocast(x):
        matrix = standardised(upcast(x)).T @ standardised(upcast(y)) / len(x)  # (D, D)
    diagonal = matrix.diagonal()
    others = matrix.square().sum() - diagonal.square().sum()
    return (1 - diagonal).square().sum() + off_diagonal * others


def epps_pulley(z, seed, slices=256, reach=3.0, points=17):
    """How far vectors are from a standard normal, (N, D) -> (): the mean over random directions,
    drawn by `seed`, of N * integral |phi(t) - exp(-t^2/2)|^2 exp(-t^2/2) dt over |t| <= reach, phi
    being the characteristic function of the projections [Epps & Pulley 1983; LeJEPA]."""
    z = upcast(z)
    # Drawn where z is: numbers from another device would have to be waited for.
    chance = torch.Generator(z.device).manual_seed(seed)
    directions = torch.randn(z.shape[1], slices, generator=chance, device=z.device,
                             dtype=torch.float64)
    directions = F.normalize(directions, dim=0).to(z.dtype)  # (D, slices)
    t = torch.linspace(0, reach, points, device=z.device, dtype=z.dtype)
    normal = (-t.square() / 2).exp()
    with no_autocast(z):
        angle = (z @ directions)[..., None] * t  # (N, slices, points)
        error = (angle.cos().mean(0) - normal).square() + angle.sin().mean(0).square()
        # Twice the half [0, reach]: the integrand is even.
        return 2 * len(z) * torch.trapezoid(error * normal, t).mean()


def sigreg(x, y, seed, share=0.05):
    """`mse`, and the distance of either side from an isotropic Gaussian; raw vectors
    [LeJEPA, Balestriero & LeCun 2025, eq. 7]."""
    return (1 - share) * mse(x, y) + share * (epps_pulley(x, seed) + epps_pulley(y, seed)) / 2


Align = Literal["mse", "mse_unit", "cosine", "l2", "smooth_l1", "info_nce", "vicreg", "barlow",
                "sigreg", "none"]
IN_BATCH = ("info_nce", "vicreg", "barlow", "sigreg")  # they compare the items of a batch
WITHOUT_OPTIONS = {"mse": mse, "mse_unit": mse_unit, "cosine": cosine_distance, "l2": l2_distance,
                   "smooth_l1": smooth_l1, "vicreg": vicreg, "barlow": barlow_twins}


def align(kind, x, y, temperature=0.07, seed=0, within=True, keep_self=False, both=True):
    """The loss named `kind`; the seed is for sigreg, the other options are info_nce's."""
    if kind == "info_nce":
        return info_nce(x, y, temperature, within, keep_self, both)
    if kind == "sigreg":
        return sigreg(x, y, seed)
    if kind == "none":
        return 0 * upcast(x).sum()  # not a plain 0: DDP waits for every parameter's gradient
    return WITHOUT_OPTIONS[kind](x, y)


# ---- the vectors of all processes, with gradients: losses over a whole batch need them


class AllGather(torch.autograd.Function):
    """(N, D) -> (world x N, D); the gradient is the sum of what all ranks want of these rows."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def all_gather_with_grad(x):
    """The items of all ranks, (world x N, D): each computes the loss of the whole batch, and DDP's
    mean of the summed gradients is the gradient of one big batch."""
    return AllGather.apply(x) if dist.is_available() and dist.is_initialized() else x


# ---- what objectives are made of


class Teacher(nn.Module):
    """A copy of a model that follows it and is never trained: Packed -> states (T, D), without
    gradients or dropout [BYOL, Grill et al. 2020, sec. 3.1].

        teacher <- m teacher + (1 - m) student,  m from `momentum` to 1 over the run

    `start_share` is the share that the weights at step 0 still have in the teacher.
    """

    def __init__(self, model, momentum):
        super().__init__()
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.momentum = momentum
        self.register_buffer("start_share", torch.ones(()))
        self.train(False)

    def train(self, mode=True):
        return super().train(False)  # whatever the objective around it does

    @torch.no_grad()
    def forward(self, packed):
        return self.model(packed)

    @torch.no_grad()
    def update(self, student, progress):
        m = self.momentum + (1 - self.momentum) * progress
        self.start_share.mul_(m)
        # All parameters in a few kernels, not one after the other.
        torch._foreach_lerp_(list(self.model.parameters()), list(student.parameters()), 1 - m)


class Objective(nn.Module):
    """A model and all that exists only to train it. A class adds `forward(batch)` -> loss (),
    {term: ()}, the same terms for every batch, and a static
    `collate(examples, rng, config, special)` -> batch: a dict with `packed`, the line that the
    model reads, `num_targets` (k,), by which its k token losses divide, and what forward needs."""
    name = ""
    views = 1  # texts of an example
    texts_per_row = 1  # how many of them a row can hold
    causal = False  # the model reads left to right
    head = "none"  # of the model, before its vocabulary
    pool = "cls"  # what the sentence vector is
    paper = {}  # training values and options as published; what is missing has a default
    toy = {}  # those that differ at size toy
    presets = {}  # {a name: (values laid over `paper`, over `toy`)}
    held_out = {}  # options that `collate` reads otherwise for the rows held out
    reads = ""  # the states that its loss reads, where that is not what --pool gives
    file_hash = ""  # of the file that --objective named

    @dataclass(frozen=True)
    class Config:
        """The objective's own options; the comment beside a field is its help."""

    def __init__(self, model, config):
        super().__init__()
        self.model = model
        self.config = config
        self.regressor = None  # in place of the model's head
        self.register_buffer("progress", torch.zeros(()))  # how much of the run is done

    @classmethod
    def in_batch(cls, config):
        """Does the loss compare the examples of a batch? Then no text may occur in it twice."""
        return getattr(config, "align", "") in IN_BATCH

    @classmethod
    def model_head(cls, config):
        """`head`, unless the objective brings its own."""
        return cls.head

    @staticmethod
    def special_tokens(config):
        """Names of tokens in its rows that a pretrained model's tokenizer lacks."""
        return ()

    @staticmethod
    def affixes(config, special):
        """(prefix, suffix) of a text that is embedded, [CLS] prefix text suffix: of the first view,
        and of the others."""
        plain = ((), (special.sep,))
        return plain, plain

    def vocabulary_loss(self, states, batch):
        """Mean cross-entropy at the target positions, which alone get logits: (T, D) -> ()."""
        head = self.regressor or self.model.head
        states, weight, bias = head(states[batch["target_positions"]])  # (N, D)
        softcap = self.model.config.logit_softcap
        total = linear_cross_entropy(states, weight, bias, batch["targets"], softcap)
        return total / batch["num_targets"][0]

    def after_step(self, progress):
        """Called after every optimiser step, progress in (0, 1]."""
        self.progress.fill_(progress)

    def warning(self):
        """A line for the log about what goes wrong unseen."""
        return ""


def check_heads(name, heads, width):
    if width % heads:
        raise BadInput(f"{name} is {heads}: the width {width} must be a multiple of {name}")


def joined(*parts):
    """Ids end to end, from arrays, lists or tuples -> (n,) int64."""
    return np.concatenate([np.asarray(part, np.int64) for part in parts])


def row(ids, special):
    """[CLS] ids [SEP]"""
    return joined([special.cls], ids, [special.sep])


def corrupt_rows(rows, chosen, rng, special):
    """Corrupt the chosen tokens (T,) bool -> rows, target positions (N,), targets (N,)."""
    line = np.concatenate(rows)
    corrupted = corrupt(line, chosen, rng, special)
    ends = np.cumsum([len(one) for one in rows])
    return np.split(corrupted, ends[:-1]), np.flatnonzero(chosen), line[chosen]


def mask_rows(rows, masking, ratio, rng, special):
    """`corrupt_rows` of a random share of all tokens, drawn by a masking of data.MASKS."""
    chosen = MASKS[masking](np.concatenate(rows), ratio, rng, special)
    return corrupt_rows(rows, chosen, rng, special)


def token_targets(positions, targets, counts):
    """What every token loss needs of its batch."""
    # train.py makes num_targets the mean over the parts of a step, which then add up to exactly the
    # gradient of one big batch. At least 1: a loss of no targets is 0.
    return dict(target_positions=torch.from_numpy(positions), targets=torch.from_numpy(targets),
                num_targets=torch.tensor(counts).float().clamp(min=1))


def shuffled_pairs(examples, rng):
    """Each pair in an order of its own."""
    swapped = rng.random(len(examples)) < 0.5
    return [pair[::-1] if swap else pair for pair, swap in zip(examples, swapped)]


Masking = Literal[tuple(MASKS)]  # the choices of --masking


# ---- baselines; toy values are for small models from scratch, minutes on a CPU, here and below


# The recipes of MEXMA [A.3, A.5] and of Predict and Reconstruct [table 1], and of their baselines.
MEXMA = dict(lr=1e-4, steps=300_000, warmup=0.3, lr_start=0.1, schedule="cosine", weight_decay=0.0,
             clip=1.2, max_length=200)
HYBRID = dict(lr=5e-5, batch=64, steps=300_000, warmup=10 / 300_000, schedule="cosine",
              weight_decay=0.05, clip=0.0, max_length=512, data="documents")
HYBRID_TOY = dict(lr=1e-3, batch=32, steps=600, warmup=0.1, max_length=128)


class Mlm(Objective):
    """Masked-language modelling: restore 15 % of the tokens from the rest
    [Devlin et al. 2019, sec. 3.1]."""
    name = "mlm"
    head = "transform"
    pool = "mean"
    paper = dict(lr=1e-4, batch=256, steps=1_000_000, warmup=0.01, schedule="linear",
                 weight_decay=0.01, clip=1.0, max_length=510)
    toy = dict(HYBRID_TOY, batch=128)  # as many sentences as 64 pairs
    # What hybrid is compared with.
    presets = {"hybrid": (dict(HYBRID, regressor=True), HYBRID_TOY)}

    @dataclass(frozen=True)
    class Config:
        masking: Masking = "token"  # what is hidden
        mask_ratio: float = 0.15  # share of the tokens that become targets
        regressor: bool = False  # take hybrid's head, which is not tied, in place of BERT's

        def __post_init__(self):
            validate(self)
            check_range(self, "mask_ratio", 0, 1)

    def __init__(self, model, config):
        super().__init__(model, config)
        if config.regressor:
            self.regressor = Regressor(model.config.width, model.config.vocab)

    @classmethod
    def model_head(cls, config):
        return "none" if config.regressor else cls.head

    # packed: a corrupted row an example
    # target_positions (N,), targets (N,): the hidden tokens;  num_targets (1,)
    @staticmethod
    def collate(examples, rng, config, special):
        clean = [row(ids, special) for ids, in examples]
        rows, positions, targets = mask_rows(clean, config.masking, config.mask_ratio, rng, special)
        return dict(packed=Packed.of(rows), **token_targets(positions, targets, [len(targets)]))

    def forward(self, batch):
        states = self.model(batch["packed"])  # (T, D)
        loss = self.vocabulary_loss(states, batch)
        return loss, {"mlm": loss.detach()}


class Contrastive(Objective):
    """A bi-encoder trained with symmetric InfoNCE over translation pairs (the baseline of MEXMA's
    table 6, and LaBSE's family)."""
    name = "contrastive"
    views = 2
    paper = dict(MEXMA, batch=1200)
    toy = dict(lr=5e-4, batch=64, steps=1000, warmup=0.1, lr_start=0.0, max_length=128)

    @dataclass(frozen=True)
    class Config:
        temperature: float = 0.07  # divides the cosines
        within: bool = False  # sentences of the same side are negatives too

        def __post_init__(self):
            validate(self)
            check_range(self, "temperature", above=0)

    @classmethod
    def in_batch(cls, config):
        return True

    # packed: the N first sentences, then the N second ones;  num_targets (0,)
    @staticmethod
    def collate(examples, rng, config, special):
        rows = [row(first, special) for first, _ in examples]
        rows += [row(second, special) for _, second in examples]
        return dict(packed=Packed.of(rows), num_targets=torch.zeros(0))

    def forward(self, batch):
        states = self.model(batch["packed"])  # (T, D)
        vectors = self.model.pool(states, batch["packed"])  # (2N, D)
        x, y = map(all_gather_with_grad, vectors.chunk(2))  # (N, D) each
        loss = info_nce(x, y, self.config.temperature, self.config.within)
        return loss, {"align": loss.detach()}


class Ntp(Objective):
    """Next-token prediction of the second text after the first: a row [CLS] text [SEP] code, whose
    targets are code [SEP], the last of which stops a generation and is missing behind a cut code.
    A third text is a chat's system turn."""
    name = "ntp"
    views = 2
    texts_per_row = 2
    causal = True
    pool = "last"
    paper = dict(lr=2e-5, batch=128, steps=248, warmup=0.0, schedule="linear", weight_decay=0.0,
                 clip=1.0, max_length=512)
    toy = dict(lr=2e-3, batch=64, steps=600, warmup=0.1, max_length=128)
    presets = {"scratch": (dict(lr=8e-5), {})}

    @dataclass(frozen=True)
    class Config:
        labels: Literal["answer", "all", "all-stop"] = "answer"  # all: no stop token (released)

        def __post_init__(self):
            validate(self)

    @staticmethod
    def affixes(config, special):
        return (special.chat.user, (special.sep,)), (special.chat.assistant, (special.sep,))

    # packed: a row an example, of two segments: Text, answer
    # target_positions (N,), targets (N,): tokens that predict, and the next ones;  num_targets (1,)
    @staticmethod
    def collate(examples, rng, config, special):
        rows = next_token_rows(examples, special)
        return next_token_batch(rows, examples, config.labels, special)

    def forward(self, batch):
        loss = self.vocabulary_loss(self.model(batch["packed"]), batch)
        return loss, {"ntp": loss.detach()}


def row_start(example, special):
    """What every view of an example begins with: [CLS], and the system turn if there is one."""
    system = [joined(special.chat.system, text, special.chat.end) for text in example[2:]]
    return joined([special.cls], *system)


def next_token_rows(examples, special):
    """Rows of two segments, [CLS] (system [SEP]) text and the answer that continues it, [SEP] code;
    other ids stand around the turns of a decoder's own chats: data.Chat."""
    rows = []
    for example in examples:
        text = joined(row_start(example, special), special.chat.user, example[0])
        answer = joined(special.chat.end, special.chat.assistant, example[1])
        rows.append([Segment(text, True), Segment(answer, True, prefix=(0, len(text)))])
    return rows


def next_token_batch(rows, examples, labels, special):
    """Rows of segments -> batch; the first rows are the examples', of the segments Text (and maybe
    [PRED]s behind it) and answer."""
    packed = Packed.of_segments(rows)
    positions = []
    targets = []
    for example, segments, start in zip(examples, rows, packed.cu_seqlens.tolist()):
        text, answer = segments[:2]
        length = answer.prefix[1]
        answer_start = start + len(text.tokens)
        answer_end = answer_start + len(answer.tokens)
        # The tokens without [PRED]s, and what follows each.
        index = joined(np.arange(start, start + length), np.arange(answer_start, answer_end))
        following = joined(text.tokens[1:length], answer.tokens, [special.sep])
        # The token before the code predicts its first one; a cut code is not the end.
        first = len(index) - len(example[1]) - 1 if labels == "answer" else 0
        last = len(index) - (labels == "all" or example.cut[1])
        positions.append(index[first:last])
        targets.append(following[first:last])
    targets = joined(*targets)
    return dict(packed=packed, **token_targets(joined(*positions), targets, [len(targets)]))


# ---- MEXMA


class Mexma(Objective):
    """The sentence vector of one language unmasks the tokens of the other, the two vectors are
    aligned, and KoLeo spreads them [MEXMA, arXiv 2409.12737, sec. 3].

        loss = align_weight |S_A - S_B|^2
             + mlm_weight (CE_A + CE_B) / 2
             + koleo_weight (koleo(S_A) + koleo(S_B)) / 2

    which is the paper's alpha = 1, beta = 1/2, gamma = .005 on sums.
    """
    name = "mexma"
    views = 2
    paper = dict(MEXMA, batch=300, accumulate=2)  # on each of eight GPUs
    # From scratch the paper's MSE falls by ever shorter vectors and its KoLeo is too weak against
    # collapse: the cosine knows no length, and KoLeo weighs 1 (results/mexma-choice.md).
    toy = dict(lr=1e-3, batch=64, accumulate=1, steps=600, warmup=0.1, lr_start=0.0, max_length=128,
               align="cosine", align_weight=2.0, koleo_weight=1.0,
               head_layers=2, head_heads=4, head_hidden=512)

    @dataclass(frozen=True)
    class Config:
        align: Align = "mse"  # how the two vectors are aligned
        align_weight: float = 1.0  # weight of the alignment loss
        align_views: Literal["clean", "dirty"] = "clean"  # dirty: A's vector from its masked text
        mlm_weight: float = 1.0  # weight of unmasking, the mean of the two languages
        koleo_weight: float = 0.01  # weight of KoLeo, the mean of the two languages
        # The unit vectors are those of the released code, the raw ones of the paper's formula.
        koleo_input: Literal["unit", "raw"] = "unit"  # the vectors that KoLeo spreads
        symmetrical: bool = True  # unmask both languages (otherwise one, drawn per example)
        token_gradients: bool = True  # teach the encoder also through the tokens it gives the head
        masking: Masking = "token"  # what is hidden
        mask_first: float = 0.4  # share of the first text's tokens that are hidden
        mask_second: float = 0.4  # share of the second text's tokens that are hidden
        head_layers: int = 6  # blocks of the unmasking head, which has no positions
        head_heads: int = 8  # attention heads of the unmasking head
        head_hidden: int = 3072  # width inside the unmasking head's feed-forward
        temperature: float = 0.07  # divides the cosines of info_nce; the paper does not say
        within: bool = False  # with info_nce sentences of the same language are negatives too

        def __post_init__(self):
            validate(self)
            check_range(self, "align_weight mlm_weight koleo_weight", 0)
            check_range(self, "head_layers", 0, 1000)
            check_range(self, "head_heads head_hidden", 1)
            check_range(self, "mask_first mask_second", 0, 1)
            check_range(self, "temperature", above=0)
            if not self.symmetrical and self.align != "none" and self.align_views == "clean":
                raise BadInput("no-symmetrical encodes one masked and one clean sentence: "
                               "add --align-views dirty or --align none")

    def __init__(self, model, config):
        super().__init__(model, config)
        width = model.config.width
        check_heads("head_heads", config.head_heads, width)
        shape = ModelConfig(width=width, layers=config.head_layers, heads=config.head_heads,
                            ffn_dim=config.head_hidden, norm_epsilon=1e-12,
                            dropout=model.config.dropout)
        # Heads begin with PyTorch's own initial weights, as released.
        self.unmask = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        # The head's vocabulary projection is the embedding itself.
        self.vocabulary_bias = nn.Parameter(torch.zeros(model.config.vocab))

    @classmethod
    def in_batch(cls, config):
        return config.koleo_weight > 0 or super().in_batch(config)

    # packed: the rows of masked A, masked B, clean A, clean B; or of masked A, clean B
    # head_packed: the masked rows alone, the line that the unmasking head reads
    # target_positions (N,), targets (N,): the hidden tokens of that line, A's then B's
    # targets_per_side: [of A, of B], or [of A];  num_targets (2,) or (1,): the same, at least 1
    # seed: of a loss that draws
    @staticmethod
    def collate(examples, rng, config, special):
        if not config.symmetrical:
            examples = shuffled_pairs(examples, rng)  # A is either language
        clean_a = [row(first, special) for first, _ in examples]
        clean_b = [row(second, special) for _, second in examples]
        how = config.masking
        masked, positions, targets = mask_rows(clean_a, how, config.mask_first, rng, special)
        clean = clean_b
        per_side = [len(targets)]
        if config.symmetrical:
            masked_b, where, what = mask_rows(clean_b, how, config.mask_second, rng, special)
            positions = joined(positions, where + sum(len(one) for one in masked))
            targets = joined(targets, what)
            masked = masked + masked_b
            clean = clean_a + clean_b
            per_side.append(len(what))
        return dict(packed=Packed.of(masked + clean), head_packed=Packed.of(masked),
                    **token_targets(positions, targets, per_side), targets_per_side=per_side,
                    seed=int(rng.integers(1 << 31)))

    def forward(self, batch):
        c = self.config
        states = self.model(batch["packed"])  # (T, D)
        vectors = self.model.pool(states, batch["packed"])  # (R, D)
        n = len(vectors) // (4 if c.symmetrical else 2)
        a, b = vectors[-2 * n:].chunk(2)  # (N, D) each; the clean rows are the last
        # Masked A reads B's vector, masked B reads A's.
        others = torch.cat([b, a]) if c.symmetrical else b

        sides = batch["targets_per_side"]
        hidden = self.unmasked(states, others, batch).split(sides)
        embedding = self.model.embed.weight
        mlm = 0.0
        for x, targets, count in zip(hidden, batch["targets"].split(sides), batch["num_targets"]):
            mlm = mlm + linear_cross_entropy(x, embedding, self.vocabulary_bias, targets) / count
        mlm = mlm / len(sides)  # the mean of both languages

        first = all_gather_with_grad(a if c.align_views == "clean" else vectors[:len(a)])
        second = all_gather_with_grad(b)
        aligned = align(c.align, first, second, c.temperature, batch["seed"], c.within)

        # Of the vectors of one process, as released.
        spread = torch.zeros_like(mlm)
        if c.koleo_weight:
            unit = c.koleo_input == "unit"
            spread = (koleo(a, unit) + koleo(b, unit)) / 2

        loss = c.align_weight * aligned + c.mlm_weight * mlm + c.koleo_weight * spread
        return loss, {"mlm": mlm.detach(), "align": aligned.detach(), "koleo": spread.detach()}

    def unmasked(self, states, others, batch):
        """The head reads the masked rows, each with the other language's vector at position 0
        -> its states at the target positions, A's then B's: (T, D), (R', D) -> (N, D)."""
        packed = batch["head_packed"]
        states = states[:len(packed.tokens)]
        if not self.config.token_gradients:
            states = states.detach()  # the vectors still carry the gradient
        states = states.index_copy(0, packed.cu_seqlens[:-1].long(), others)
        for block in self.unmask:
            states = block(states, packed)
        return states[batch["target_positions"]]


# ---- BERT-JEPA


class Bepa(Objective):
    """Masked-language modelling on translation pairs, and InfoNCE between the two sentences' [CLS]
    vectors [BERT-JEPA, arXiv 2601.00366, sec. 3].

        loss = mlm + align_weight * align(predictor(CLS_1), CLS_2)
    """
    name = "bepa"
    views = 2
    texts_per_row = 2
    head = "transform"
    # Ten epochs of 140,000 pairs; a pair has 256 tokens, of which four are special.
    paper = dict(lr=2e-5, batch=16, steps=87_500, warmup=500 / 87_500, schedule="linear",
                 weight_decay=0.01, clip=1.0, max_length=126)
    # Hidden, the second sentence stands at positions behind the first; a model from scratch would
    # have to learn it there too.
    toy = dict(lr=5e-4, batch=64, steps=1000, warmup=0.1, max_length=128, cls_view="clean")
    reads = "[CLS]"

    @dataclass(frozen=True)
    class Config:
        align: Align = "info_nce"  # the loss between the two vectors
        align_weight: float = 1.0  # lambda of the paper
        temperature: float = 0.07  # divides the cosines of info_nce
        keep_self: bool = False  # with info_nce a vector is its own negative (released code)
        order: Literal["random", "given"] = "random"  # which sentence of a pair stands first
        packing: Literal["bilingual", "monolingual", "separate"] = "bilingual"  # rows of the MLM
        # The other sentence is left out, with positions as if it were there (rotary positions do
        # not tell); it is masked; it is left out.
        cls_view: Literal["hidden", "masked", "clean"] = "hidden"  # what each [CLS] sees
        predictor: Literal["identity", "linear", "mlp"] = "identity"  # of CLS_2 from CLS_1
        masking: Masking = "token"  # what is hidden
        mask_ratio: float = 0.15  # share of the tokens that become targets

        def __post_init__(self):
            validate(self)
            check_range(self, "align_weight", 0)
            check_range(self, "mask_ratio", 0, 1)
            check_range(self, "temperature", above=0)

    def __init__(self, model, config):
        super().__init__(model, config)
        d = model.config.width
        self.predictor = nn.Identity()
        if config.predictor == "linear":
            self.predictor = nn.Linear(d, d)
        if config.predictor == "mlp":
            self.predictor = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    # packed: the masked rows, then a row for each first and for each second sentence's vector
    # target_positions (M,), targets (M,): the hidden tokens;  num_targets (1,): M, at least 1
    # cls_index (2N,): the [CLS] of the first, then of the second ones;  seed: of a loss that draws
    @staticmethod
    def collate(examples, rng, config, special):
        pairs = shuffled_pairs(examples, rng) if config.order == "random" else examples
        first = [row(pair[0], special) for pair in pairs]
        second = [row(pair[1], special) for pair in pairs]
        clean = [joined(*pair) for pair in zip(first, second)]
        if config.packing == "monolingual":
            clean = monolingual_rows(examples, special)
        if config.packing == "separate":
            clean = first + second
        if config.packing == "separate" and config.masking == "token":
            # As released, exactly max(1, floor(ratio n)) of the n tokens of every sentence.
            chosen = [exact_mask(one, config.mask_ratio, rng, special) for one in clean]
            rows, positions, targets = corrupt_rows(clean, np.concatenate(chosen), rng, special)
        else:
            rows, positions, targets = mask_rows(clean, config.masking, config.mask_ratio, rng,
                                                 special)
        passes, offsets = cls_passes(first, second, config.cls_view, special.mask)
        packed = Packed.of_segments([[Segment(one)] for one in rows] + passes)
        return dict(packed=packed, **token_targets(positions, targets, [len(targets)]),
                    cls_index=packed.cu_seqlens[len(rows):-1].long() + torch.tensor(offsets),
                    seed=int(rng.integers(1 << 31)))

    def forward(self, batch):
        c = self.config
        states = self.model(batch["packed"])  # (T, D)
        mlm = self.vocabulary_loss(states, batch)

        x, y = states[batch["cls_index"]].chunk(2)  # (N, D) each
        x = all_gather_with_grad(self.predictor(x))
        y = all_gather_with_grad(y)
        aligned = align(c.align, x, y, c.temperature, batch["seed"], keep_self=c.keep_self)

        loss = mlm + c.align_weight * aligned
        return loss, {"mlm": mlm.detach(), "align": aligned.detach()}


def monolingual_rows(examples, special):
    """Two neighbours of one language in a row; the odd one stays alone."""
    rows = []
    waiting = {}  # a column's row without a neighbour
    for example in examples:
        for column, ids in zip(example.columns, example):
            before = waiting.pop(column, None)
            if before is None:
                waiting[column] = row(ids, special)
            else:
                rows.append(joined(before, row(ids, special)))
    return rows + list(waiting.values())


def cls_passes(first, second, cls_view, mask):
    """Rows for the vectors of the first, then of the second sentences, which do not see each other
    -> 2N rows of a segment, and the place of the [CLS] in each."""
    if cls_view == "masked":
        # As released: the other sentence is mask tokens, but for the first one's [CLS].
        rows = [joined(a, np.full_like(b, mask)) for a, b in zip(first, second)]
        rows += [joined(a[:1], np.full_like(a[1:], mask), b) for a, b in zip(first, second)]
        return [[Segment(one)] for one in rows], [0] * len(first) + [len(a) for a in first]
    rows = [[Segment(a)] for a in first]
    for a, b in zip(first, second):
        # Hidden, a sentence keeps its place behind the other; clean, it is a row like any other.
        start = len(a) if cls_view == "hidden" else 0
        rows.append([Segment(b, positions=start + np.arange(len(b)))])
    return rows, [0] * len(rows)


# ---- LLM-JEPA


class LlmJepa(Ntp):
    """Next-token prediction, and the Text's vector predicts the Code's vector
    [LLM-JEPA, arXiv 2509.14252, eq. 2].

        loss = gamma * ntp + jepa_weight * align(Enc(Text [PRED]_k .. [PRED]_1), Enc(Code))

    One row has three segments: the Text with its [PRED]s; the answer, which continues the Text and
    does not see the [PRED]s; the Code once more, which sees [CLS] (and a system turn) alone.
    """
    name = "llm-jepa"  # other facts are Ntp's
    presets = {"scratch": (dict(lr=8e-5, jepa_weight=2.0, predictors=3), {})}  # [table 2]
    held_out = dict(jepa_dropout=0.0)

    @dataclass(frozen=True)
    class Config:
        gamma: float = 1.0  # weight of the next-token loss
        jepa_weight: float = 1.0  # lambda of the paper: .5, 1, 2 or 4
        predictors: int = 1  # k, [PRED] tokens of the predicting view; 0: its last token predicts
        pred_position: Literal["append", "prepend"] = "append"  # prepend: its last token predicts
        reverse: bool = False  # the Code predicts the Text
        align: Align = "cosine"  # the loss between the two vectors; info_nce in one direction
        temperature: float = 0.07  # divides the cosines of info_nce
        jepa_dropout: float = 0.0  # share of the batches that skip the views
        view_end: bool = False  # views end in [SEP], and it is read (released: gemma and OLMo-2)
        mode: Literal["one-forward", "two-row", "three-row"] = "one-forward"  # equal in value
        labels: Literal["answer", "all", "all-stop"] = "answer"  # all: no stop token (released)

        def __post_init__(self):
            validate(self)
            check_range(self, "gamma jepa_weight", 0)
            check_range(self, "predictors", 0, 10)  # There are ten [PRED] tokens.
            check_range(self, "jepa_dropout", 0, 1)
            check_range(self, "temperature", above=0)

    @staticmethod
    def special_tokens(config):
        return ROLES[5:5 + config.predictors]

    @staticmethod
    def affixes(config, special):
        end = (special.sep,) if config.view_end else ()
        preds = special.preds[:config.predictors]
        prefixes = [special.chat.user, special.chat.assistant]
        suffixes = [end, end]
        predicting = int(config.reverse)  # which of the views
        if config.pred_position == "prepend":
            prefixes[predicting] += preds
        else:
            suffixes[predicting] = preds[::-1] + end  # [PRED]_1 stands last, whatever k
        return tuple(zip(prefixes, suffixes))

    # the keys of Ntp, with segments and rows for the views, and
    # vector_index (2, N): where the Texts', then the Codes' vectors are read
    # seed: of a loss that draws
    @staticmethod
    def collate(examples, rng, config, special):
        if rng.random() < config.jepa_dropout:
            return Ntp.collate(examples, rng, config, special)
        rows, views = rows_with_views(examples, config, special)
        ends = np.cumsum([len(segment.tokens) for segment in itertools.chain(*rows)])
        return dict(next_token_batch(rows, examples, config.labels, special),
                    vector_index=torch.from_numpy(ends[views] - 1),
                    seed=int(rng.integers(1 << 31)))

    def forward(self, batch):
        c = self.config
        states = self.model(batch["packed"])  # (T, D)
        ntp = self.vocabulary_loss(states, batch)
        if "vector_index" not in batch:  # jepa_dropout: this step has no views
            return c.gamma * ntp, {"ntp": ntp.detach(), "jepa": 0 * ntp.detach()}

        text, code = states[batch["vector_index"]]  # (N, D) each
        partners = (code, text) if c.reverse else (text, code)
        jepa = align(c.align, *partners, c.temperature, batch["seed"], both=False)

        loss = c.gamma * ntp + c.jepa_weight * jepa
        return loss, {"ntp": ntp.detach(), "jepa": jepa.detach()}


def rows_with_views(examples, config, special):
    """Rows of next-token prediction and of the views -> rows of segments, and the numbers of those
    segments that are the Texts' and the Codes' views, (2, N)."""
    (before, behind), (code_before, code_behind) = LlmJepa.affixes(config, special)
    rows = next_token_rows(examples, special)
    n = len(rows)
    texts = []
    codes = []
    for example in examples:
        start = row_start(example, special)
        code = joined(code_before, example[1], code_behind)
        texts.append(Segment(joined(start, before, example[0], behind), True))
        if config.mode == "three-row":
            codes.append(Segment(joined(start, code), True))
        else:
            # Of the Text's segment the Code sees the start alone.
            codes.append(Segment(code, True, prefix=(0, len(start))))
    example = np.arange(n)
    if config.mode == "three-row":
        # The 2n segments of the n rows, then every Text, then every Code.
        rows += [[view] for view in texts + codes]
        return rows, np.stack([2 * n + example, 3 * n + example])
    # Where no [PRED] stands before it, the Text of the view is the row's own.
    if config.mode == "one-forward" and before == special.chat.user:
        rows = [[text, answer, code] for text, (_, answer), code in zip(texts, rows, codes)]
        return rows, np.stack([3 * example, 3 * example + 2])
    # The 2n segments of the n rows, then a Text and its Code in turn.
    rows += [[text, code] for text, code in zip(texts, codes)]
    return rows, np.stack([2 * n + 2 * example, 2 * n + 2 * example + 1])


# ---- Predict and Reconstruct


class Hybrid(Objective):
    """Latent prediction of hidden blocks against an EMA teacher, and masked-language modelling,
    over one encoder [Predict and Reconstruct, arXiv 2606.05173, sec. 3].

        loss = lambda * align(predictor(context states), teacher's states of the blocks)
             + (1 - lambda) * mlm,  lambda = sigmoid(w)

    Each block is predicted alone, from the context and its own positions.
    """
    name = "hybrid"
    pool = "mean"
    paper = HYBRID
    # The paper's momentum of .996 is for 300,000 steps: after 600 a third of the teacher would be
    # its random start still. With .97 a hundredth of that is left after 310 steps.
    # The paper's fixed sines drown new token embeddings: after 1,500 steps on real text a small
    # model knows only how frequent words are; with --positions rotary, more after 300 (LOG.md).
    toy = dict(HYBRID_TOY, momentum=0.97, predictor_width=64, predictor_layers=2, predictor_heads=4,
               predictor_std=0.0)

    @dataclass(frozen=True)
    class Config:
        align: Literal["cosine", "smooth_l1", "mse", "vicreg", "barlow"] = "cosine"  # latent loss
        balance: Literal["learned", "fixed", "scheduled", "uncertainty"] = "learned"  # of lambda
        balance_start: float = 0.5  # lambda at step 0, or its fixed value
        balance_end: float = 0.5  # lambda at the last step, if scheduled
        target_blocks: int = 2  # blocks to predict in each row
        target_low: float = 0.10  # smallest block, share of the row
        target_high: float = 0.25  # largest block
        context_low: float = 0.65  # smallest context, before the blocks are taken out
        context_high: float = 0.85  # largest context
        min_keep: int = 32  # a context with fewer tokens takes all that are in no block
        allow_overlap: bool = False  # released sampler: targets may be visible in the context
        momentum: float = 0.996  # of the teacher at the start; it rises to 1 over the run
        teacher_norm: bool = False  # layer-normalise the teacher's states (released code)
        predictor_width: int = 512  # width of the predictor (released config: 192)
        predictor_layers: int = 6  # its blocks
        predictor_heads: int = 8  # its attention heads
        predictor_std: float = 0.02  # of its initial weights (released code); 0: PyTorch's own
        mask_ratio: float = 0.15  # share of the tokens that MLM restores
        masking: Masking = "token"  # what MLM hides
        mask_special: bool = False  # MLM hides [CLS] and [SEP] too (released code)

        def __post_init__(self):
            validate(self)
            check_range(self, "predictor_std min_keep", 0)
            check_range(self, "predictor_layers", 0, 1000)
            check_range(self, "target_blocks predictor_width predictor_heads", 1)
            check_range(self, "target_low target_high context_low context_high", 0, 1)
            check_range(self, "momentum mask_ratio balance_start balance_end", 0, 1)
            if self.mask_special and self.masking != "token":
                raise BadInput("mask_special needs --masking token: all others leave [CLS] and "
                               "[SEP] out")
            if self.target_low > self.target_high or self.context_low > self.context_high:
                raise BadInput(f"target_low {self.target_low} or context_low {self.context_low} is "
                               "above its high: swap them")
            if self.target_blocks * self.target_high >= 1:
                raise BadInput(f"target_blocks {self.target_blocks} of up to {self.target_high} of "
                               "the row leave no context: lower one of them")
            check_heads("predictor_heads", self.predictor_heads, self.predictor_width)
            if self.balance == "learned" and self.balance_start in (0, 1):
                raise BadInput(f"balance_start is {self.balance_start}: a learned lambda starts "
                               "between 0 and 1, a fixed one can be either")

    def __init__(self, model, config):
        super().__init__(model, config)
        c = config
        d = model.config.width
        shape = ModelConfig(width=c.predictor_width, layers=c.predictor_layers,
                            heads=c.predictor_heads, ffn_dim=4 * c.predictor_width,
                            norm_position="pre", norm_epsilon=model.config.norm_epsilon,
                            dropout=model.config.dropout)
        self.predictor_embed = nn.Linear(d, c.predictor_width)
        self.predictor_proj = nn.Linear(c.predictor_width, d)
        self.mask_token = nn.Parameter(torch.randn(c.predictor_width) * 0.02)
        self.predictor = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.predictor_norm = nn.LayerNorm(c.predictor_width)
        self.regressor = Regressor(d, model.config.vocab)
        if c.predictor_std:
            for part in (self.predictor_embed, self.predictor_proj, self.predictor):
                part.apply(lambda module: initialise(module, c.predictor_std))
        if c.balance == "learned":
            w = math.log(c.balance_start / (1 - c.balance_start))
            self.balance = nn.Parameter(torch.tensor(w))
        if c.balance == "uncertainty":
            self.log_variance = nn.Parameter(torch.zeros(2))  # [Kendall et al. 2018, eq. 10]
        self.teacher = Teacher(model, c.momentum)

    # packed: N corrupted rows, then the context of each, cut from it;  clean: the clean rows
    # predict: for each block a row, its row's context and mask tokens for the block
    # target_positions (M,), targets (M,): the hidden tokens of the corrupted rows
    # context_index (C,), context_slots (C,): the context's tokens in packed, in predict
    # target_index (K,), mask_index (K,): the blocks' tokens in clean, in predict
    # num_targets (2,): M and K
    @staticmethod
    def collate(examples, rng, config, special):
        clean = [row(ids, special) for ids, in examples]
        line = np.concatenate(clean)
        if config.mask_special:
            chosen = token_mask(line, config.mask_ratio, rng, special, exempt=False)
        else:
            chosen = MASKS[config.masking](line, config.mask_ratio, rng, special)
        corrupted, positions, targets = corrupt_rows(clean, chosen, rng, special)

        # One size of block for the whole batch, as I-JEPA.
        target_share = rng.uniform(config.target_low, config.target_high)
        context_share = rng.uniform(config.context_low, config.context_high)
        drawn = [draw_blocks(len(one), target_share, context_share, config, rng)
                 for one in corrupted]

        segments = [[Segment(one)] for one in corrupted]
        for one, (context, _) in zip(corrupted, drawn):
            segments.append([Segment(one[context], positions=context)])
        packed = Packed.of_segments(segments)
        blocks = predictor_batch(drawn, packed.cu_seqlens.tolist())
        counts = [len(targets), len(blocks["target_index"])]
        return dict(packed=packed, clean=Packed.of(clean), **blocks,
                    **token_targets(positions, targets, counts))

    def forward(self, batch):
        c = self.config
        states = self.model(batch["packed"])  # (T, D)
        mlm = self.vocabulary_loss(states, batch)

        target = self.teacher(batch["clean"])[batch["target_index"]]  # (K, D)
        if c.teacher_norm:
            target = F.layer_norm(upcast(target), target.shape[-1:])
        predicted = self.predict(states, batch)  # (K, D)
        latent = align(c.align, predicted, target)
        if c.align not in IN_BATCH:
            # A mean over tokens: micro-batches weigh by how many they have.
            latent = latent * (len(predicted) / batch["num_targets"][1])

        if c.balance == "uncertainty":
            weights = (-self.log_variance).exp()
            share = weights[0] / weights.sum()
            loss = weights[0] * latent + weights[1] * mlm + self.log_variance.sum()
        else:
            share = self.share()
            loss = share * latent + (1 - share) * mlm
        return loss, {"mlm": mlm.detach(), "latent": latent.detach(), "lambda": share.detach(),
                      "teacher_start": self.teacher.start_share.clone()}

    def share(self):
        """lambda, the weight of the latent loss: ()"""
        c = self.config
        if c.balance == "learned":
            return self.balance.sigmoid()
        end = c.balance_end if c.balance == "scheduled" else c.balance_start
        return c.balance_start + (end - c.balance_start) * self.progress

    def predict(self, states, batch):
        """States (T, D) -> the predicted states of all blocks (K, D)."""
        packed = batch["predict"]
        context = self.predictor_embed(states[batch["context_index"]])  # (C, P)
        x = self.mask_token.to(states.dtype).expand(len(packed.tokens), -1)
        x = x.index_copy(0, batch["context_slots"], context.to(x.dtype))  # (T', P)
        x = x + sinusoids(packed.positions, x.shape[1]).to(x.dtype)
        for block in self.predictor:
            x = block(x, packed)
        return self.predictor_proj(self.predictor_norm(x[batch["mask_index"]]))

    def after_step(self, progress):
        super().after_step(progress)
        self.teacher.update(self.model, progress)

    def warning(self):
        start = self.teacher.start_share.item()
        if self.progress == 1 and start > 0.01:
            return (f"{start:.0%} of the teacher are still the weights of step 0: "
                    "lower --momentum, or train longer")
        share = self.share().item()
        if self.config.balance != "learned" or 0.05 <= share <= 0.95:
            return ""
        starved = "mlm" if share > 0.5 else "latent"
        return f"the learned lambda is {share:.3f} and starves {starved}; --balance fixed holds it"


def draw_blocks(length, target_share, context_share, config, rng):
    """Positions in a row of `length` tokens -> of its context, sorted, and [of each hidden block]
    [I-JEPA, Assran et al. 2023, sec. 3; Predict and Reconstruct, sec. 3.2]."""
    everything = np.arange(length)
    size = max(1, int(length * target_share))
    context_size = max(1, int(length * context_share))
    # As released, blocks are cut at the end of the row.
    last = length if config.allow_overlap else length - size + 1
    starts = rng.integers(0, last, config.target_blocks)
    blocks = [everything[start:start + size] for start in starts]
    if config.allow_overlap:
        # Only the start of the context has to lie outside of some block.
        outside = joined(*(np.setdiff1d(everything, block) for block in blocks))
        start = rng.choice(outside) if len(outside) else 0
        return everything[start:start + context_size], blocks
    start = rng.integers(0, length - context_size + 1)
    outside = np.setdiff1d(everything, joined(*blocks))
    if not len(outside):
        outside = everything[:1]  # blocks can fill a row of three tokens: its first is left
    context = outside[(outside >= start) & (outside < start + context_size)]
    return (context if len(context) >= max(1, config.min_keep) else outside), blocks


def predictor_batch(drawn, starts):
    """Contexts and blocks of N rows, and where in the packed line the rows and then the contexts
    start -> the predictor's part of the batch."""
    rows = []
    is_mask = []
    context_index = []  # in packed
    target_index = []  # in clean
    for i, (context, blocks) in enumerate(drawn):
        context_start = starts[len(drawn) + i]
        for block in blocks:
            positions = joined(context, block)
            rows.append([Segment(np.zeros_like(positions), positions=positions)])
            is_mask.append(np.arange(len(positions)) >= len(context))
            context_index.append(context_start + np.arange(len(context)))
            target_index.append(starts[i] + block)
    is_mask = torch.from_numpy(np.concatenate(is_mask))  # (T',)
    return dict(predict=Packed.of_segments(rows),
                context_index=torch.from_numpy(joined(*context_index)),
                context_slots=(~is_mask).nonzero().flatten(),
                target_index=torch.from_numpy(joined(*target_index)),
                mask_index=is_mask.nonzero().flatten())


OBJECTIVES = {"mexma": Mexma, "bepa": Bepa, "hybrid": Hybrid, "llm-jepa": LlmJepa, "mlm": Mlm,
              "ntp": Ntp, "contrastive": Contrastive}


def find_objective(name):
    """The class of an objective: one of OBJECTIVES, or of a file, my_idea.py or my_idea.py:Name.
    A class is returned as it is."""
    if isinstance(name, type):
        return checked(name)
    path, _, wanted = name.partition(":")
    if path.endswith(".py"):
        return read_objective(Path(path), wanted)
    if name not in OBJECTIVES:
        near = did_you_mean(name, OBJECTIVES, ", or a file such as gallery/stp.py")
        if Path(f"{name}.py").is_file():
            near = f"; did you mean {name}.py?"
        known = ", ".join(OBJECTIVES)
        raise BadInput(f"objective {name!r} is unknown: choose one of {known}{near}")
    return OBJECTIVES[name]


def checked(kind):
    """An Objective that somebody wrote. BadInput if it has no name: its folder is called so."""
    if not kind.name:
        raise BadInput(f"the class {kind.__name__} has no name: write name = 'my_idea' in it")
    return kind


def read_objective(path, wanted=""):
    """The Objective that a file defines, the one called `wanted` if there are several."""
    if not path.is_file():
        raise BadInput(f"there is no file {path}: --objective takes one of "
                       f"{', '.join(OBJECTIVES)}, or a file of Python")
    # A name of its own: the file may be called as one of ours.
    spec = importlib.util.spec_from_file_location(f"objective_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look there for the types of their fields.
    spec.loader.exec_module(module)
    found = {}
    for name, value in vars(module).items():
        is_class = isinstance(value, type) and issubclass(value, Objective)
        # Not what the file imports.
        if is_class and value.__module__ == module.__name__:
            value.file_hash = hash_of_file(path)
            found[name] = value
    if not found:
        raise BadInput(f"{path} defines no objective: write a class in it that inherits from "
                       "objectives.Objective")
    first = next(iter(found))
    if wanted not in found and (wanted or len(found) > 1):
        raise BadInput(f"{path} defines {', '.join(found)}: name one of them, as {path}:{first}")
    kind = checked(found[wanted or first])
    if kind.name in OBJECTIVES:
        raise BadInput(f"{path}: the name {kind.name!r} is that of an objective of ours, whose "
                       "folder would be the same: choose another")
    return kind
