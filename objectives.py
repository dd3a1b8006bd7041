"""The training objectives: first the losses as pure functions, then one class per paper. Read a
class from top to bottom: its equation, `collate`, which has all the randomness but dropout (and
SIGReg's directions), and `forward`.

Axes: T tokens of the packed line, R rows, D width, N selected positions or compared items.
"""

import copy
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from base.common import (
    AtLeast0,
    AtLeast1,
    BadInput,
    Checked,
    Fraction,
    NotNegative,
    Positive,
    PositiveFraction,
)
from base.processes import all_gather_with_grad, rank_and_world, whole
from base.tokenizer import add_special, concat_ids
from data import Packed, Segment, apply_bert_masking, fixed_count_mask, token_mask
from kernels.cross_entropy import linear_cross_entropy, upcast
from model import Block, ModelConfig, Regressor, initialize, run_blocks, sinusoids

# ---- losses, the simplest first: (N, D), (N, D) -> (), computed in float32 at every precision


def mse(x, y):
    """Return the mean of (x - y)^2, not normalized [MEXMA, sec. 3, and its code]."""
    return F.mse_loss(upcast(x), upcast(y))


def mse_unit(x, y):
    """Return the MSE of the L2-normalized embeddings [BERT-JEPA's code]."""
    return mse(F.normalize(upcast(x), dim=-1), F.normalize(upcast(y), dim=-1))


def cosine_distance(x, y):
    """Return the mean of 1 - cos(x_i, y_i) [LLM-JEPA, sec. 3; Predict-and-Reconstruct, eq. 5]."""
    return (1 - F.cosine_similarity(upcast(x), upcast(y), dim=-1)).mean()


def l2_distance(x, y):
    """Return the mean of |x_i - y_i|, not normalized [LLM-JEPA's code, --jepa_l2]."""
    return (upcast(x) - upcast(y)).norm(dim=-1).mean()


def no_autocast(x):
    """Return a context in which matmuls on x's device stay in float32."""
    return torch.autocast(x.device.type, enabled=False)


def koleo(x, unit=True, epsilon=1e-8):
    """Push each embedding away from its nearest neighbor: -mean_i log min_j |x_i - x_j|,
    (N, D) -> () [Sablayrolles et al. 2019, eq. 3]. `unit`: L2-normalize first, as MEXMA's code
    does; its formula does not [MEXMA, sec. 3]."""
    x = upcast(x)
    if unit:
        x = F.normalize(x, dim=-1, eps=epsilon)
    with torch.no_grad(), no_autocast(x):
        squares = x.square().sum(-1)
        distances = squares[:, None] + squares - 2 * x @ x.T  # (N, N)
        nearest = distances.fill_diagonal_(torch.inf).argmin(1)  # (N,)
    # With both epsilons, as in the code, exact duplicates give a large but finite value.
    distance = F.pairwise_distance(x, x[nearest], eps=epsilon)  # (N,)
    return -(distance + epsilon).log().mean()


def info_nce(x, y, temperature, intra_side_negatives=False, include_self=False, symmetric=True):
    """Classify each embedding's partner among all others: the mean cross-entropy of
    cosine / temperature [van den Oord et al. 2018, eq. 4].

    symmetric: classify in both directions; otherwise only x's partners, among y
    intra_side_negatives: classify among all 2N - 1 others [BERT-JEPA]; needs symmetric
    include_self, with these: keep the embedding itself, too; the loss stays above ln 2
    """
    if intra_side_negatives and not symmetric:
        raise BadInput("info_nce: intra_side_negatives needs symmetric=True")
    if include_self and not intra_side_negatives:
        raise BadInput("info_nce: include_self needs intra_side_negatives=True")
    x = F.normalize(upcast(x), dim=-1)
    y = F.normalize(upcast(y), dim=-1)
    n = len(x)
    if intra_side_negatives:
        z = torch.cat([x, y])  # (2N, D)
        with no_autocast(z):
            logits = z @ z.T / temperature  # (2N, 2N)
        if not include_self:
            logits.fill_diagonal_(-torch.inf)
        return F.cross_entropy(logits, torch.arange(2 * n, device=x.device).roll(n))
    with no_autocast(x):
        logits = x @ y.T / temperature  # (N, N)
    partner = torch.arange(n, device=x.device)
    loss = F.cross_entropy(logits, partner)
    return (loss + F.cross_entropy(logits.T, partner)) / 2 if symmetric else loss


def vicreg(x, y):
    """Pull partners together, keep the standard deviation of each dimension above 1, decorrelate
    dimensions; N >= 2 [Bardes et al. 2022, eq. 1-6; means and sums as in BERT-JEPA's code]."""
    x = upcast(x)
    y = upcast(y)
    hinge = 0.0
    off_diagonal = 0.0
    for z in (x - x.mean(0), y - y.mean(0)):
        with no_autocast(z):
            squares = (z.T @ z / (len(z) - 1)).square()  # squared covariances, (D, D)
        hinge = hinge + F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean()
        off_diagonal = off_diagonal + (squares.sum() - squares.diagonal().sum()) / z.shape[1]
    return 25 * F.mse_loss(x, y) + 25 * hinge / 2 + off_diagonal


def standardized(x):
    """Return x with mean 0 and standard deviation 1 in each dimension: (N, D) -> (N, D)."""
    return (x - x.mean(0)) / (x.std(0, correction=0) + 1e-6)


def barlow_twins(x, y, off_diagonal=0.005):
    """Make the cross-correlation matrix C of the two sides the identity: sum_i (1 - C_ii)^2 +
    off_diagonal * sum_{i != j} C_ij^2 [Zbontar et al. 2021, eq. 1]."""
    with no_autocast(x):
        matrix = standardized(upcast(x)).T @ standardized(upcast(y)) / len(x)  # (D, D)
    diagonal = matrix.diagonal()
    others = matrix.square().sum() - diagonal.square().sum()
    return (1 - diagonal).square().sum() + off_diagonal * others


def epps_pulley(z, slices=256, reach=3.0, points=17):
    """Return how far embeddings are from a standard normal distribution, (N, D) -> (): the mean
    over random directions of N * integral |phi(t) - exp(-t^2/2)|^2 exp(-t^2/2) dt, |t| <= reach,
    where phi is the characteristic function of the projections [Epps & Pulley 1983; LeJEPA]."""
    z = upcast(z)
    directions = torch.randn(z.shape[1], slices, device=z.device, dtype=z.dtype)
    directions = F.normalize(directions, dim=0)
    t = torch.linspace(0, reach, points, device=z.device, dtype=z.dtype)
    normal = (-t.square() / 2).exp()
    with no_autocast(z):
        angle = (z @ directions)[..., None] * t  # (N, slices, points)
        error = (angle.cos().mean(0) - normal).square() + angle.sin().mean(0).square()
        # The integrand is even, so the integral is twice that over [0, reach].
        return 2 * len(z) * torch.trapezoid(error * normal, t).mean()


def sigreg(x, y, fraction=0.05):
    """Return LeJEPA's loss: the MSE, and SIGReg, how far each side is from an isotropic Gaussian.
    The MSE is four times the paper's distance to the center [Balestriero & LeCun 2025, eq. 7].

    Callers gather the embeddings of all GPUs first, with gradients. So the loss is that of the
    whole batch on any number of GPUs, and only the directions differ. From the examples of one GPU
    its strength would depend on how many there are."""
    return (1 - fraction) * mse(x, y) + fraction * (epps_pulley(x) + epps_pulley(y)) / 2


IN_BATCH = ("info_nce", "vicreg", "barlow", "sigreg")  # these compare the items of a batch
LOSSES = {"mse": mse, "mse_unit": mse_unit, "cosine": cosine_distance, "l2": l2_distance,
          "vicreg": vicreg, "barlow": barlow_twins, "sigreg": sigreg}
Align = Literal[(*LOSSES, "info_nce", "none")]  # the choices of --align


def alignment_loss(kind, x, y, *, temperature=0.07, intra_side_negatives=False, include_self=False,
                   symmetric=True):
    """Return the loss that --align calls `kind`; the options are those of info_nce."""
    if kind == "info_nce":
        return info_nce(x, y, temperature, intra_side_negatives, include_self, symmetric)
    if kind == "none":
        return 0 * upcast(x).sum()  # not a plain 0: DDP waits for the gradient of every parameter
    return LOSSES[kind](x, y)


# ---- what objectives are made of


class Teacher(nn.Module):
    """An EMA copy of a module, without gradients or dropout; of a model: Packed -> hidden states
    (T, D), or (N, D) of the tokens `at` [BYOL, Grill et al. 2020, sec. 3.1].

        teacher <- m teacher + (1 - m) student,  m rises from `momentum` to 1 over the run

    `init_weight` is the weight that the parameters of step 0 still have in the teacher.
    """

    def __init__(self, model, momentum):
        super().__init__()
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.momentum = momentum
        self.register_buffer("init_weight", torch.ones(()))
        self.train(False)

    def train(self, mode=True):
        return super().train(False)  # also when the objective around it is set to train

    @torch.no_grad()
    def forward(self, x, at=None):
        return self.model(x) if at is None else self.model(x, at=at)

    @torch.no_grad()
    def update(self, student, progress):
        m = self.momentum + (1 - self.momentum) * progress
        self.init_weight.mul_(m)
        # All parameters in a few kernels, instead of one after the other.
        torch._foreach_lerp_(list(self.model.parameters()), list(student.parameters()), 1 - m)


class Objective(nn.Module):
    """A model, and everything that exists only to train it. A subclass writes two functions.

    `collate(examples, rng, config, special)` turns N examples into a batch. `example.views` is a
    tuple of its texts, each an array of token ids. A batch is a dict: `packed`, the line of tokens
    that the model reads; what `forward` needs; and, if it has k token losses, `loss_denominators`
    (k,), their numbers of targets. All randomness must come from `rng`: a resumed run repeats its
    batches.

    `forward(batch)` returns the loss () and {term: ()}, detached, with the same terms every time.

    A checkpoint has all parameters and buffers, and no other attributes. `self.model` is what is
    evaluated and saved; it can be a frozen EMA copy of what is trained. Evaluations do not call
    `collate`: they read each text alone, under the full or the causal mask and --window. `python -m
    pytest tests/test_any_objective.py --objective FILE` says if training has another mask.
    """
    name = ""  # also the folder of its runs
    views = 1  # texts in an example: 1, 2, or n, those of n columns in their order
    hard_negatives = False  # views after the second are negatives, in columns that are named so
    texts_per_row = 1  # how many of them a row can hold
    causal = False  # tokens see only themselves and earlier tokens
    masks = True  # collate masks tokens, so --causal is refused
    needs_cls = False  # the loss needs a special token, such as [CLS], before each text
    head = "none"  # the model's vocabulary head: none, or BERT's transform
    pool = "cls"  # the state that is the sentence embedding, one of model.POOLS
    paper = {}  # settings and options of the paper; those that are missing have defaults
    toy = {}  # settings that differ at size toy
    eval_overrides = {}  # options that differ for the validation loss
    collapse_advice = "FAQ.md says what helps"  # printed when the embeddings collapse
    file_hash = ""  # of the file that --objective named

    @dataclass(frozen=True)
    class Config(Checked):
        """The objective's options. The comment after a field is the help text of its flag."""

    def __init__(self, model, config):
        super().__init__()
        self.model = model
        self.config = config
        self.mlm_head = None  # a module to use instead of the model's vocabulary head
        self.tokenizer = None  # the run sets it before a checkpoint is loaded; ids -> text: decode
        self.register_buffer("progress", torch.zeros(()))  # fraction of the run that is done

    @classmethod
    def num_views(cls, config):
        """Return the number of texts in an example, which may follow from an option."""
        return cls.views

    @classmethod
    def uses_in_batch_negatives(cls, config):
        """Return whether the loss compares the examples of a batch. Then no text occurs twice among
        the first two views of a batch."""
        return getattr(config, "align", "") in IN_BATCH

    @classmethod
    def head_type(cls, config):
        """Return the `head` of the ModelConfig: "none" if the objective has its own module."""
        return cls.head

    @staticmethod
    def special_tokens(config):
        """Return the special tokens that a pretrained model's tokenizer may lack."""
        return ()

    @staticmethod
    def affixes(config, special):
        """Return all ids around a text when it is embedded: (before, after) of the first view, and
        (before, after) of the others."""
        return ((special.before, special.after),) * 2

    def target_loss(self, states, batch):
        """Return the mean cross-entropy of the states at the target positions, (N, D) -> ()."""
        project = self.mlm_head or self.model.vocabulary_projection
        states, weight, bias = project(states)  # (N, D), (V, D), (V,) or None
        softcap = self.model.config.logit_softcap
        total = linear_cross_entropy(states, weight, bias, batch["targets"], softcap)
        return total / batch["loss_denominators"][0]

    def predicting(self, position):
        """Return the position of the state that predicts the masked token at a position."""
        return position

    def most_likely(self, states):
        """Return the token with the highest logit for each state, (N, D) -> (N,)."""
        project = self.mlm_head or self.model.vocabulary_projection
        return F.linear(*project(states)).argmax(-1)

    def after_step(self, progress):
        """Update teachers and schedules after an optimizer step; progress is in (0, 1]."""
        self.progress.fill_(progress)

    def warning(self):
        """Return a warning for the log, or ""."""
        return ""


@dataclass(frozen=True)
class MaskConfig(Objective.Config):
    """Options of masked-language modeling."""
    mask_ratio: PositiveFraction = 0.15  # fraction of tokens to mask


@dataclass(frozen=True)
class AlignConfig(Objective.Config):
    """Options of the loss that compares the embeddings of the two texts of a pair."""
    # loss that pulls the embeddings of a pair together (mse_unit: MSE after L2 normalization);
    # info_nce, vicreg, barlow, sigreg: also spread out those of a batch
    align: Align = "mse"
    temperature: Positive = 0.07  # softmax temperature of --align info_nce


def states_at(model, packed, *indices):
    """Return the hidden states of the tokens at each of several indices (N,), (N, D) each, from one
    call of the model."""
    return model(packed, at=torch.cat(indices)).split([*map(len, indices)])


def mask_rows(rows, ratio, rng, special, choose=token_mask, each_row=False):
    """Mask a random fraction of all tokens as BERT does. `choose`, token_mask or a function like
    it, gets the line of all rows, or with `each_row` one row at a time. Return the masked rows, the
    target positions (N,) in their line, and the targets (N,)."""
    line = np.concatenate(rows)
    parts = rows if each_row else [line]
    chosen = np.concatenate([choose(part, ratio, rng, special) for part in parts])  # (T,) bool
    if chosen.shape != line.shape or chosen.dtype != bool:
        raise BadInput(f"a mask has {len(chosen)} values of type {chosen.dtype}: it must have one "
                       f"bool for each of the {len(line)} ids")
    masked = apply_bert_masking(line, chosen, rng, special)
    ends = np.cumsum([len(row) for row in rows])
    return np.split(masked, ends[:-1]), np.flatnonzero(chosen), line[chosen]


def token_targets(positions, targets, counts=None):
    """Return the part of a batch that token losses need: target_positions (N,), the masked tokens
    (in a decoder the tokens that predict); targets (N,), what to predict there; loss_denominators,
    the `counts`, or [N] for a single loss."""
    counts = counts or [len(targets)]
    # train.py averages the denominators over micro-batches and processes: their gradients then add
    # up to exactly that of one big batch. At least 1: without targets the loss is 0.
    return dict(target_positions=torch.from_numpy(positions), targets=torch.from_numpy(targets),
                loss_denominators=torch.tensor(counts).float().clamp(min=1))


def shuffled_pairs(pairs, rng):
    """Swap the two texts of each pair with probability 1/2."""
    swapped = rng.random(len(pairs)) < 0.5
    return [pair[::-1] if swap else pair for pair, swap in zip(pairs, swapped)]


def check_heads(name, heads, width):
    if width % heads:
        raise BadInput(f"{name} is {heads}: the width {width} must be a multiple of it")


# ---- settings that several classes share: what a class writes itself overrides them. The toy scale
# is for small models from scratch that train in minutes on a CPU.

# Those of MEXMA, of Predict and Reconstruct [table 1], and of their baselines. In MEXMA's paper the
# learning rate rises linearly from 1e-5 over all 300,000 steps [A.3, A.5], and it does not say to
# what. The peak of 1e-4 and the clip are those of its code's README, where the learning rate
# rises for 30 % of three epochs and then has a cosine decay.
MEXMA = dict(lr=1e-4, steps=300_000, warmup=1.0, lr_start=0.1, schedule="constant",
             weight_decay=0.0, clip=1.2, max_length=200)
# of mexma, contrastive and bepa
PAIRS_TOY = dict(batch=64, warmup=0.1, lr_start=0.0, schedule="cosine", max_length=128)
# Losses and head of mexma from random weights. The paper's MSE would only shrink all embeddings,
# and its KoLeo does not prevent collapse. The cosine ignores norms, and a KoLeo weight of 1 is
# enough.
MEXMA_SCRATCH = dict(align="cosine", align_weight=2.0, koleo_weight=1.0, head_layers=1,
                     head_heads=4, head_hidden=512)
HYBRID = dict(lr=5e-5, batch=64, steps=300_000, warmup=10 / 300_000, schedule="cosine",
              weight_decay=0.05, clip=0.0, max_length=512, data="documents")
HYBRID_TOY = dict(lr=1e-3, batch=32, steps=600, warmup=0.1, max_length=128)


# ---- baselines


class Mlm(Objective):
    """Masked-language modeling: mask 15 % of the tokens and predict them
    [Devlin et al. 2019, sec. 3.1]."""
    name = "mlm"
    head = "transform"
    pool = "mean"
    paper = dict(lr=1e-4, batch=256, steps=1_000_000, warmup=0.01, schedule="linear",
                 weight_decay=0.01, clip=1.0, max_length=510)
    toy = dict(HYBRID_TOY, batch=128)  # as many sentences as 64 pairs

    @dataclass(frozen=True)
    class Config(MaskConfig):
        regressor: bool = False  # use hybrid's untied MLM head instead of BERT's
        # the state that predicts a masked token: its own (BERT), or, as in a decoder, that of the
        # token before it (previous: LLM2Vec's masked next-token prediction); then the first token
        # of a row is never masked
        predict_from: Literal["own", "previous"] = "own"

    def __init__(self, model, config):
        super().__init__(model, config)
        if config.regressor:
            self.mlm_head = Regressor(model.config.width, model.config.vocab)

    @classmethod
    def head_type(cls, config):
        return "none" if config.regressor else cls.head

    # packed: one masked row per example, and what token_targets returns
    @staticmethod
    def collate(examples, rng, config, special):
        clean = [add_special(example.views[0], special) for example in examples]
        mask = mask_rows if config.predict_from == "own" else mask_after_first
        rows, positions, targets = mask(clean, config.mask_ratio, rng, special)
        return dict(packed=Packed.of(rows), **token_targets(positions, targets))

    def predicting(self, position):
        return position if self.config.predict_from == "own" else max(0, position - 1)

    def forward(self, batch):
        states = self.model(batch["packed"], at=batch["target_positions"])  # (N, D)
        loss = self.target_loss(states, batch)
        return loss, {"mlm": loss.detach()}


def mask_after_first(rows, ratio, rng, special):
    """Mask tokens as mask_rows does, but never the first one of a row. Return the masked rows, the
    positions (N,) in their line of the tokens *before* the masked ones, and the targets (N,)
    [LLM2Vec, arXiv 2404.05961, sec. 2.1]."""
    rests, positions, targets = mask_rows([row[1:] for row in rows], ratio, rng, special)
    ends = np.cumsum([len(rest) for rest in rests])
    # In the line of whole rows, a token of row r comes r + 1 positions later than in that of the
    # rests, and the token before it r positions later.
    row = np.searchsorted(ends, positions, side="right")
    return [concat_ids(row[:1], rest) for row, rest in zip(rows, rests)], positions + row, targets


class Contrastive(Objective):
    """A bi-encoder, trained with symmetric InfoNCE on translation pairs (like LaBSE, without its
    additive margin; the baseline of MEXMA's table 6)."""
    name = "contrastive"
    views = 2
    masks = False
    paper = dict(MEXMA, batch=1200)
    toy = dict(PAIRS_TOY, optimizer="muon", lr=4e-3, steps=500, layers=2)

    @dataclass(frozen=True)
    class Config(Objective.Config):
        temperature: Positive = 0.07  # softmax temperature

    @classmethod
    def uses_in_batch_negatives(cls, config):
        return True

    # packed: the N first sentences, then the N second ones
    @staticmethod
    def collate(examples, rng, config, special):
        rows = [add_special(pair.views[side], special) for side in (0, 1) for pair in examples]
        return dict(packed=Packed.of(rows))

    def forward(self, batch):
        embeddings = self.model.embeddings(batch["packed"])  # (2N, D)
        x, y = map(all_gather_with_grad, embeddings.chunk(2))  # (N, D) each
        loss = info_nce(x, y, self.config.temperature)
        return loss, {"align": loss.detach()}


class Ntp(Objective):
    """Next-token prediction of an answer after a Text: a row is [CLS] Text [SEP] answer, and the
    targets are the answer and [SEP], the stop token (not after a truncated answer). In a chat, a
    row can begin with a system turn."""
    name = "ntp"
    views = 2
    texts_per_row = 2
    causal = True
    masks = False
    pool = "last"
    paper = dict(lr=2e-5, batch=128, steps=248, warmup=0.0, schedule="linear", weight_decay=0.0,
                 clip=1.0, max_length=512, data="regex")
    toy = dict(optimizer="muon", lr=8e-3, batch=64, steps=300, warmup=0.1, max_length=128)

    @dataclass(frozen=True)
    class Config(Objective.Config):
        # tokens to predict. answer (ours): the answer and [SEP], the stop token; all (released
        # code): Text and answer; all+eos (the paper's equation 2): all three
        labels: Literal["answer", "all", "all+eos"] = "answer"

    @staticmethod
    def affixes(config, special):
        chat = special.chat
        return ((chat.start + chat.user, (special.sep,)),
                (chat.start + chat.assistant, (special.sep,)))

    # packed: one row per example, of two segments: Text, answer;  and what token_targets returns
    @staticmethod
    def collate(examples, rng, config, special):
        rows = [prompt_and_answer(example, special) for example in examples]
        packed = Packed.of_segments(rows)
        return dict(packed=packed, **next_tokens(packed, rows, examples, config.labels, special))

    def forward(self, batch):
        states = self.model(batch["packed"], at=batch["target_positions"])  # (N, D)
        loss = self.target_loss(states, batch)
        return loss, {"ntp": loss.detach()}


def row_start(example, special):
    """Return the start of a row: [CLS], and the system turn if there is one."""
    chat = special.chat
    if example.system is None:
        return concat_ids(chat.start)
    return concat_ids(chat.start, chat.system, example.system, chat.end)


def prompt_and_answer(example, special):
    """Return two segments: [CLS] (system [SEP]) Text, and [SEP] answer, which continues it. Around
    the turns, a pretrained decoder has the tokens of its own chats."""
    chat = special.chat
    text, answer = example.views
    prompt = concat_ids(row_start(example, special), chat.user, text)
    answer = concat_ids(chat.end, chat.assistant, answer)
    return [Segment(prompt, True), Segment(answer, True, prefix=(0, len(prompt)))]


def next_tokens(packed, rows, examples, labels, special):
    """Return the targets of rows whose first two segments are the Text, maybe with [PRED]s after
    it, and the answer."""
    positions = []  # of each row: the tokens that predict
    targets = []  # and what they predict
    for example, (text, answer, *_), start in zip(examples, rows, packed.cu_seqlens.tolist()):
        prompt_length = answer.prefix[1]  # the answer does not see the [PRED]s
        answer_start = start + len(text.tokens)
        tokens = concat_ids(text.tokens[:prompt_length], answer.tokens, [special.sep])
        index = concat_ids(range(start, start + prompt_length),
                           range(answer_start, answer_start + len(answer.tokens)))
        # The token before the answer predicts its first one.
        first = len(index) - len(example.views[1]) - 1 if labels == "answer" else 0
        # The last token predicts the stop token, but not after a truncated answer.
        end = len(index) - (labels == "all" or example.cut[1])
        positions.append(index[first:end])
        targets.append(tokens[first + 1:end + 1])
    return token_targets(np.concatenate(positions), np.concatenate(targets))


# ---- MEXMA


class Mexma(Objective):
    """The sentence embedding of one language helps to predict the masked tokens of the other, the
    two embeddings are aligned, and KoLeo spreads them out [MEXMA, arXiv 2409.12737, sec. 3].

        loss = align_weight * mse(S_A, S_B)
             + mlm_weight * (CE([S_B, A^], A) + CE([S_A, B^], B)) / 2
             + koleo_weight * (koleo(S_A) + koleo(S_B)) / 2

    A^ are the states of masked A, and [S_B, A^] has S_B at position 0. The paper sums over the two
    languages, so its weights 1, 1/2 and 0.01/2 are our 1, 1 and 0.01.
    """
    name = "mexma"
    views = 2
    needs_cls = True  # the unmasking head reads the other sentence's embedding in its place
    collapse_advice = "add --koleo-weight 1 or --align info_nce; FAQ.md"
    paper = dict(MEXMA, batch=300, accumulate=2)  # on each of eight GPUs
    toy = dict(PAIRS_TOY | MEXMA_SCRATCH, optimizer="muon", lr=8e-3, steps=120, accumulate=1,
               layers=2, eval_every=60)

    @dataclass(frozen=True)
    class Config(AlignConfig):
        align_weight: NotNegative = 1.0  # weight of the alignment loss
        # copy of the first sentence in the alignment loss: original (clean) or masked (dirty); the
        # second sentence is always the original
        align_views: Literal["clean", "dirty"] = "clean"
        # weight of the loss on masked tokens (mean over both languages)
        mlm_weight: NotNegative = 1.0
        # weight of KoLeo, a loss that pushes each sentence embedding away from the nearest one of
        # its batch and language (mean over both languages)
        koleo_weight: NotNegative = 0.01
        # sentence embeddings in KoLeo: L2-normalized (unit, released code) or not (raw, paper)
        koleo_input: Literal["unit", "raw"] = "unit"
        # mask both sentences of a pair, and predict the masked tokens of each with the embedding of
        # the other; --no-symmetrical: only those of one, chosen at random
        symmetrical: bool = True
        # backpropagate the loss on masked tokens into the hidden states of the masked sentence;
        # --no-token-gradients: only into the embedding of the other sentence
        token_gradients: bool = True
        mask_first: Fraction = 0.4  # fraction of tokens to mask in the first text of a pair
        # fraction of tokens to mask in the second text of a pair; unused with --no-symmetrical
        mask_second: Fraction = 0.4
        # number of layers of the unmasking head, which predicts masked tokens
        head_layers: AtLeast0 = 6
        head_heads: AtLeast1 = 8  # number of attention heads of the unmasking head
        head_hidden: AtLeast1 = 3072  # feed-forward width of the unmasking head

        def __post_init__(self):
            super().__post_init__()
            if not self.symmetrical and self.align != "none" and self.align_views == "clean":
                raise BadInput("no-symmetrical encodes the first sentence only masked: add "
                               "--align-views dirty or --align none")
            if self.mlm_weight and not self.mask_first + self.symmetrical * self.mask_second:
                raise BadInput("mask_first is 0, and mask_second is 0 or unused, so no token would "
                               "be predicted: choose mask_first 0.4, or --mlm-weight 0")

    def __init__(self, model, config):
        super().__init__(model, config)
        width = model.config.width
        check_heads("head_heads", config.head_heads, width)
        shape = ModelConfig(width=width, layers=config.head_layers, heads=config.head_heads,
                            ffn_dim=config.head_hidden, norm_epsilon=1e-12,
                            dropout=model.config.dropout)
        # As released: no positions, PyTorch's default initialization, tied to the embeddings.
        self.unmask = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.vocabulary_bias = nn.Parameter(torch.zeros(model.config.vocab))

    @classmethod
    def uses_in_batch_negatives(cls, config):
        return config.koleo_weight > 0 or super().uses_in_batch_negatives(config)

    # packed: the rows of masked A, masked B, clean A, clean B (or of masked A, clean B)
    # head_packed: the masked rows alone, the line that the unmasking head reads
    # target_positions (N,), targets (N,): the masked tokens of this line, A's, then B's
    # targets_per_side: [number of A's, number of B's], or [number of A's]
    # loss_denominators: the same numbers
    @staticmethod
    def collate(examples, rng, config, special):
        pairs = [example.views for example in examples]
        if not config.symmetrical:
            pairs = shuffled_pairs(pairs, rng)  # A can be either language
        a = [add_special(first, special) for first, _ in pairs]
        b = [add_special(second, special) for _, second in pairs]
        sides = [(a, config.mask_first)]
        if config.symmetrical:
            sides.append((b, config.mask_second))
        masked = []  # the rows of A, then of B
        positions = []  # one array for each side
        targets = []
        for rows, ratio in sides:
            length = sum(map(len, masked))  # of the line so far
            rows, chosen, ids = mask_rows(rows, ratio, rng, special)
            masked += rows
            positions.append(length + chosen)
            targets.append(ids)
        per_side = [len(ids) for ids in targets]
        clean = a + b if config.symmetrical else b
        return dict(packed=Packed.of(masked + clean), head_packed=Packed.of(masked),
                    **token_targets(np.concatenate(positions), np.concatenate(targets), per_side),
                    targets_per_side=per_side)

    def forward(self, batch):
        c = self.config
        states, s_clean = self.encode(batch)  # (T', D) of masked rows, (R', D) of clean rows
        s_masked = self.model.pool(states, batch["head_packed"])  # (R', D) of masked rows
        if c.symmetrical:
            a, b = s_clean.chunk(2)  # the paper's S_A and S_B: (N, D) each
            aligned_a = a if c.align_views == "clean" else s_masked.chunk(2)[0]
            unmask_with = torch.cat([b, a])  # CE([S_B, A^], A) and CE([S_A, B^], B)
        else:  # A is only encoded masked
            a = aligned_a = s_masked
            b = unmask_with = s_clean

        sides = batch["targets_per_side"]
        hidden = self.unmasked(states, unmask_with, batch).split(sides)
        table = self.model.embed.weight  # (V, D)
        ce = [linear_cross_entropy(x, table, self.vocabulary_bias, y) / n
              for x, y, n in zip(hidden, batch["targets"].split(sides), batch["loss_denominators"])]
        mlm = sum(ce) / len(ce)

        align = alignment_loss(c.align, all_gather_with_grad(aligned_a), all_gather_with_grad(b),
                               temperature=c.temperature)

        loss = c.align_weight * align + c.mlm_weight * mlm
        terms = {"mlm": mlm.detach(), "align": align.detach()}
        if c.koleo_weight:
            # As released, KoLeo compares the embeddings of one process.
            unit = c.koleo_input == "unit"
            koleo_ab = (koleo(a, unit) + koleo(b, unit)) / 2
            loss = loss + c.koleo_weight * koleo_ab
            terms["koleo"] = koleo_ab.detach()
        return loss, terms

    def encode(self, batch):
        """Return the states of the masked rows (T', D), and the embeddings of the clean rows."""
        packed, masked = batch["packed"], batch["head_packed"]
        length = len(masked.tokens)
        index = self.model.pool_index(packed)  # (R,)
        if index is None:
            states = self.model(packed)  # (T, D)
            return states[:length], self.model.pool(states, packed)[len(masked):]
        clean = index[len(masked):]
        return states_at(self.model, packed, torch.arange(length, device=clean.device), clean)

    def unmasked(self, states, unmask_with, batch):
        """Return the head's states at the target positions; it reads the masked rows with the other
        language's embedding at position 0: (T', D), (R', D) -> (N, D)."""
        packed = batch["head_packed"]
        if not self.config.token_gradients:
            states = states.detach()  # the gradient still flows through the embeddings
        states = states.index_copy(0, packed.cu_seqlens[:-1].long(), unmask_with)
        return run_blocks(self.unmask, states, packed, at=batch["target_positions"])


# ---- BERT-JEPA


class Bepa(Objective):
    """Masked-language modeling on translation pairs, and InfoNCE between the [CLS] embeddings of
    the two sentences [BERT-JEPA, arXiv 2601.00366, sec. 3].

        loss = mlm + align_weight * align(CLS_1, CLS_2)
    """
    name = "bepa"
    views = 2
    texts_per_row = 2
    needs_cls = True  # it separates the two sentences of a row
    head = "transform"
    collapse_advice = "add --align info_nce; FAQ.md"
    # Ten epochs of 140,000 pairs. A pair has 256 tokens, and four of them are special.
    paper = dict(lr=2e-5, batch=16, steps=87_500, warmup=500 / 87_500, schedule="linear",
                 weight_decay=0.01, clip=1.0, max_length=126)
    # With `hidden`, a model from scratch would have to learn the positions of both sentences.
    toy = dict(PAIRS_TOY, optimizer="muon", lr=2e-3, steps=360, schedule="linear", layers=2,
               cls_view="clean")

    @dataclass(frozen=True)
    class Config(AlignConfig, MaskConfig):
        align: Align = "info_nce"
        align_weight: NotNegative = 1.0  # weight of the alignment loss (lambda in the paper)
        # --align info_nce uses each embedding as a negative of itself too (released code)
        include_self: bool = False
        # which sentence of a pair comes first: a random one, or that of the first column (given)
        order: Literal["random", "given"] = "random"
        # sentences in an MLM row: a translation pair, two of one language, or one
        packing: Literal["bilingual", "monolingual", "separate"] = "bilingual"
        # what a [CLS] sees of the other sentence. clean (released code): nothing; hidden (paper):
        # nothing, but the second sentence's positions continue after the first's; masked (early
        # code): a [MASK] for each of its tokens, so training never reads a text alone, as
        # evaluations do
        cls_view: Literal["hidden", "masked", "clean"] = "hidden"

    def __init__(self, model, config):
        super().__init__(model, config)
        if model.config.pool != "cls" and config.cls_view == "masked":
            raise BadInput(f"cls_view masked has the masks of the other sentence in its rows: use "
                           f"--pool cls instead of {model.config.pool}, or another --cls-view")

    # packed: the masked rows, then a row for each first and for each second [CLS] embedding
    # cls_index (2N,): the [CLS] tokens of the first, then of the second sentences
    # and what token_targets returns
    @staticmethod
    def collate(examples, rng, config, special):
        pairs = [example.views for example in examples]
        if config.order == "random":
            pairs = shuffled_pairs(pairs, rng)
        first = [add_special(pair[0], special) for pair in pairs]
        second = [add_special(pair[1], special) for pair in pairs]
        clean = [concat_ids(*pair) for pair in zip(first, second)]
        if config.packing == "monolingual":
            clean = monolingual_rows(examples, special)
        if config.packing == "separate":
            clean = first + second
        # As released, max(1, floor(ratio n)) of the n tokens of a separate row are masked.
        separate = config.packing == "separate"
        choose = fixed_count_mask if separate else token_mask
        rows, positions, targets = mask_rows(clean, config.mask_ratio, rng, special, choose,
                                             each_row=separate)
        views, offsets = cls_rows(first, second, config.cls_view, special.mask)
        packed = Packed.of_segments([[Segment(row)] for row in rows] + views)
        return dict(packed=packed, **token_targets(positions, targets),
                    cls_index=packed.cu_seqlens[len(rows):-1].long() + torch.tensor(offsets))

    def forward(self, batch):
        c = self.config
        states, embeddings = self.encode(batch)  # (M, D), (2N, D)
        mlm = self.target_loss(states, batch)

        x, y = map(all_gather_with_grad, embeddings.chunk(2))  # (N, D) each
        align = alignment_loss(c.align, x, y, temperature=c.temperature, intra_side_negatives=True,
                               include_self=c.include_self)

        loss = mlm + c.align_weight * align
        return loss, {"mlm": mlm.detach(), "align": align.detach()}

    def encode(self, batch):
        """Return the states at the target positions, and the embeddings of the sentences: their
        [CLS], as in the paper, or what --pool makes of their rows."""
        packed, targets, cls = batch["packed"], batch["target_positions"], batch["cls_index"]
        if self.model.config.pool == "cls":
            return states_at(self.model, packed, targets, cls)
        states = self.model(packed)  # (T, D)
        return states[targets], self.model.pool(states, packed)[-len(cls):]  # the last 2N rows


def monolingual_rows(examples, special):
    """Return rows of two sentences of one language, and one sentence where a number is odd."""
    rows = []
    waiting = {}  # {column: a sentence that waits for its partner}
    for example in examples:
        for column, ids in zip(example.columns, example.views):
            row = add_special(ids, special)
            if column in waiting:
                rows.append(concat_ids(waiting.pop(column), row))
            else:
                waiting[column] = row
    return rows + list(waiting.values())


def cls_rows(first, second, cls_view, mask):
    """Return a row for each first, then for each second sentence's embedding, and the index of the
    [CLS] in each row."""
    pairs = list(zip(first, second))
    if cls_view == "masked":
        # As in the early code, the other sentence is all [MASK], except for the first [CLS].
        rows = [concat_ids(a, np.full_like(b, mask)) for a, b in pairs]
        rows += [concat_ids(a[:1], np.full_like(a[1:], mask), b) for a, b in pairs]
        return [[Segment(row)] for row in rows], [0] * len(pairs) + [len(a) for a in first]
    rows = [[Segment(a)] for a in first]
    for a, b in pairs:
        start = len(a) if cls_view == "hidden" else 0
        rows.append([Segment(b, positions=start + np.arange(len(b)))])
    return rows, [0] * len(rows)


# ---- LLM-JEPA


class LlmJepa(Ntp):
    """Next-token prediction, and the Text's embedding predicts the Code's embedding
    [LLM-JEPA, arXiv 2509.14252, eq. 2].

        loss = gamma * ntp + jepa_weight * align(Enc(Text [PRED]_k .. [PRED]_1), Enc(Code))

    One row has three segments: the Text with its [PRED]s; the answer, which continues the Text and
    does not see the [PRED]s; the Code again, which sees only the start, [CLS] and a system turn.
    """
    name = "llm-jepa"  # views, pool and training values are inherited from Ntp
    eval_overrides = dict(jepa_dropout=0.0)
    collapse_advice = "a finding, not a bug; the cosine does this also where the answers are good"

    @dataclass(frozen=True)
    class Config(AlignConfig, Ntp.Config):
        align: Align = "cosine"
        gamma: NotNegative = 1.0  # weight of the next-token loss
        jepa_weight: NotNegative = 1.0  # weight of the JEPA loss (lambda in the paper: 0.5 to 4)
        # number of [PRED] tokens (k in the paper); 0: the last token predicts
        predictors: AtLeast0 = 1
        pred_position: Literal["append", "prepend"] = "append"  # [PRED]s after or before the Text
        reverse: bool = False  # predict the Text from the Code instead
        jepa_dropout: Fraction = 0.0  # fraction of batches that skip the JEPA loss
        view_end: bool = False  # end both views in [SEP] (released code: Gemma and OLMo-2)

        def __post_init__(self):
            super().__post_init__()
            if self.predictors > 10:
                raise BadInput(f"predictors is {self.predictors}: there are ten [PRED] tokens")

    def __init__(self, model, config):
        super().__init__(model, config)
        if config.align in IN_BATCH and config.jepa_dropout and rank_and_world()[1] > 1:
            # Each process would skip other steps, and the loss gathers embeddings.
            raise BadInput(f"--jepa-dropout with --align {config.align} needs a single process")

    @staticmethod
    def special_tokens(config):
        return tuple(f"[PRED_{number + 1}]" for number in range(config.predictors))

    @staticmethod
    def affixes(config, special):
        end = (special.sep,) if config.view_end else ()
        preds = special.preds[:config.predictors]
        before = [ids for ids, _ in Ntp.affixes(config, special)]
        after = [end, end]
        predicting = int(config.reverse)  # the view that predicts the other
        if config.pred_position == "prepend":
            before[predicting] += preds
        else:
            after[predicting] = preds[::-1] + end  # [PRED]_1 is the last one for every k
        return tuple(zip(before, after))

    # the keys of Ntp, and last_index (2, N): the last tokens of the Texts, then of the Codes
    @staticmethod
    def collate(examples, rng, config, special):
        if rng.random() < config.jepa_dropout:
            return Ntp.collate(examples, rng, config, special)
        affixes = LlmJepa.affixes(config, special)
        # With [PRED]s before it, the Text needs a segment of its own.
        is_apart = config.pred_position == "prepend" and not config.reverse
        make_row = text_apart if is_apart else text_first
        rows = [make_row(example, affixes, special) for example in examples]
        packed = Packed.of_segments(rows)
        ends = np.cumsum([len(segment.tokens) for row in rows for segment in row])
        ends = ends.reshape(len(rows), -1)  # the end of each segment: (N, 3 or 4)
        lasts = np.stack([ends[:, 2 if is_apart else 0], ends[:, -1]]) - 1  # of Text and Code
        return dict(packed=packed, **next_tokens(packed, rows, examples, config.labels, special),
                    last_index=torch.from_numpy(lasts))

    def forward(self, batch):
        c = self.config
        targets = batch["target_positions"]
        if "last_index" not in batch:  # jepa_dropout
            ntp = self.target_loss(self.model(batch["packed"], at=targets), batch)
            return c.gamma * ntp, {"ntp": ntp.detach(), "jepa": 0 * ntp.detach()}

        lasts = batch["last_index"].flatten()  # (2N,)
        states, embeddings = states_at(self.model, batch["packed"], targets, lasts)
        ntp = self.target_loss(states, batch)
        text, code = embeddings.chunk(2)  # (N, D) each
        if c.align in IN_BATCH:
            text, code = all_gather_with_grad(text), all_gather_with_grad(code)
        if c.reverse:
            text, code = code, text
        jepa = alignment_loss(c.align, text, code, temperature=c.temperature, symmetric=False)

        loss = c.gamma * ntp + c.jepa_weight * jepa
        return loss, {"ntp": ntp.detach(), "jepa": jepa.detach()}


def text_first(example, affixes, special):
    """Return three segments: the start and the Text with its [PRED]s, the answer, the Code."""
    start, text, code = start_and_views(example, affixes, special)
    _, answer = prompt_and_answer(example, special)
    return [Segment(concat_ids(start, text), True), answer,
            Segment(code, True, prefix=(0, len(start)))]


def text_apart(example, affixes, special):
    """Return four segments: the start and the Text, the answer, the Text with its [PRED]s, the
    Code."""
    start, *views = start_and_views(example, affixes, special)
    return [*prompt_and_answer(example, special),
            *(Segment(view, True, prefix=(0, len(start))) for view in views)]


def start_and_views(example, affixes, special):
    """Return the ids of the start of a row, and the Text and the Code as they are embedded."""
    # The affixes begin with the start of a chat, which a row has once.
    skip = len(special.chat.start)
    views = [concat_ids(before[skip:], ids, after)
             for (before, after), ids in zip(affixes, example.views)]
    return row_start(example, special), *views


# ---- Predict and Reconstruct


class Hybrid(Objective):
    """Predict an EMA teacher's hidden states of target blocks, and masked-language modeling, with
    one encoder [Predict and Reconstruct, arXiv 2606.05173, sec. 3].

        loss = lambda * align(predictor(context states), teacher's states of the blocks)
             + (1 - lambda) * mlm,  lambda = sigmoid(w)

    The predictor sees the context and the positions of one block at a time.
    """
    name = "hybrid"
    pool = "mean"
    paper = HYBRID
    # With the paper's momentum of 0.996, a third of the teacher would still be its initialization
    # after 600 steps. The paper's sinusoidal positions are large beside new token embeddings: from
    # scratch, a model learns faster with --positions rotary.
    toy = dict(HYBRID_TOY, momentum=0.97, predictor_width=64, predictor_layers=2, predictor_heads=4,
               predictor_std=0.0)

    @dataclass(frozen=True)
    class Config(MaskConfig):
        # latent loss, between the predicted hidden states and those of the teacher
        align: Literal["cosine", "mse", "vicreg", "barlow"] = "cosine"
        # lambda, the weight of the latent loss: a learned parameter, fixed at --balance-start, or
        # scheduled from there to --balance-end
        balance: Literal["learned", "fixed", "scheduled"] = "learned"
        balance_start: Fraction = 0.5  # lambda at step 0
        balance_end: Fraction = 0.5  # lambda after the last step, if it is scheduled
        target_blocks: AtLeast1 = 2  # number of blocks per row whose hidden states are predicted
        target_low: Fraction = 0.10  # smallest predicted block, as a fraction of the row
        target_high: Fraction = 0.25  # largest predicted block, as a fraction of the row
        context_low: Fraction = 0.65  # smallest context to predict from, as a fraction of the row
        context_high: Fraction = 0.85  # largest context to predict from, as a fraction of the row
        # a context with fewer tokens becomes all tokens outside the predicted blocks (our reading
        # of the paper's "min. keep tokens"; without --allow-overlap)
        min_keep: AtLeast0 = 32
        allow_overlap: bool = False  # let the context contain predicted blocks (released code)
        momentum: Fraction = 0.996  # EMA decay of the teacher at step 0; it rises to 1 over the run
        teacher_norm: bool = False  # apply layer norm to the teacher's states (released code)
        predictor_width: AtLeast1 = 512  # width of the predictor (released config: 192)
        predictor_layers: AtLeast0 = 6  # number of predictor layers
        predictor_heads: AtLeast1 = 8  # number of predictor attention heads
        # std of the predictor's initial weights (released code); 0: PyTorch's default
        predictor_std: NotNegative = 0.02

        def __post_init__(self):
            super().__post_init__()
            for low, high in (("target_low", "target_high"), ("context_low", "context_high")):
                if getattr(self, low) > getattr(self, high):
                    raise BadInput(f"{low} is {getattr(self, low)}: it must be at most {high} "
                                   f"{getattr(self, high)}")
            if self.target_blocks * self.target_high >= 1:
                raise BadInput(f"target_blocks {self.target_blocks} of up to {self.target_high} of "
                               "the row leave no context: lower one of them")
            check_heads("predictor_heads", self.predictor_heads, self.predictor_width)
            if self.balance == "learned" and self.balance_start in (0, 1):
                raise BadInput(f"balance_start is {self.balance_start}: a learned lambda must "
                               "start between 0 and 1; use --balance fixed for 0 or 1")
            if self.balance == "scheduled" and self.balance_start == self.balance_end:
                raise BadInput(f"balance is scheduled from {self.balance_start} to "
                               f"{self.balance_end}, which is constant: add --balance-end, such as "
                               "0.8, or use --balance fixed")

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
        self.mlm_head = Regressor(d, model.config.vocab)
        if c.predictor_std:
            for part in (self.predictor_embed, self.predictor_proj, self.predictor):
                part.apply(lambda module: initialize(module, c.predictor_std))
        if c.balance == "learned":
            w = math.log(c.balance_start / (1 - c.balance_start))
            self.balance = nn.Parameter(torch.tensor([w]))  # w, of shape (1,) for FSDP
        self.teacher = Teacher(model, c.momentum)

    # packed: N masked rows, then the context of each row;  clean: the unmasked rows
    # target_positions (M,), targets (M,): the masked tokens of the masked rows
    # predictor_packed: a row for each block: the context, and a mask token for each of its tokens
    # context_from (C,), context_to (C,): the contexts' tokens in `packed`, in `predictor_packed`
    # block_from (K,), block_to (K,): the blocks' tokens in `clean`, in `predictor_packed`
    # loss_denominators (2,): M and K
    @staticmethod
    def collate(examples, rng, config, special):
        clean = [add_special(example.views[0], special) for example in examples]
        masked, positions, targets = mask_rows(clean, config.mask_ratio, rng, special)
        # As in I-JEPA, all blocks of a batch have the same size, as a fraction of the row.
        block_fraction = rng.uniform(config.target_low, config.target_high)
        context_fraction = rng.uniform(config.context_low, config.context_high)
        drawn = [draw_blocks(len(row), block_fraction, context_fraction, config, rng)
                 for row in masked]

        contexts = [[Segment(row[context], positions=context)]
                    for row, (context, _) in zip(masked, drawn)]
        packed = Packed.of_segments([[Segment(row)] for row in masked] + contexts)
        row_starts, context_starts = packed.cu_seqlens[:-1].view(2, -1).tolist()

        predictor_rows = []
        is_mask = []  # of each token of these rows
        context_from = []
        block_from = []
        for (context, blocks), row_start, context_start in zip(drawn, row_starts, context_starts):
            for block in blocks:
                where = concat_ids(context, block)
                predictor_rows.append([Segment(np.zeros_like(where), positions=where)])
                is_mask.append(np.arange(len(where)) >= len(context))
                context_from.append(context_start + np.arange(len(context)))
                block_from.append(row_start + block)
        is_mask = torch.from_numpy(np.concatenate(is_mask))
        block_from = torch.from_numpy(concat_ids(*block_from))
        return dict(packed=packed, clean=Packed.of(clean),
                    predictor_packed=Packed.of_segments(predictor_rows),
                    context_from=torch.from_numpy(concat_ids(*context_from)),
                    context_to=(~is_mask).nonzero().flatten(),
                    block_from=block_from, block_to=is_mask.nonzero().flatten(),
                    **token_targets(positions, targets, [len(targets), len(block_from)]))

    def forward(self, batch):
        c = self.config
        packed, targets = batch["packed"], batch["target_positions"]
        # The masked rows are as long as the clean ones, and the contexts come after them.
        start = len(batch["clean"].tokens)
        contexts = torch.arange(start, len(packed.tokens), device=targets.device)
        states, context = states_at(self.model, packed, targets, contexts)
        mlm = self.target_loss(states, batch)

        target = self.teacher(batch["clean"], at=batch["block_from"])  # (K, D)
        if c.teacher_norm:
            target = F.layer_norm(upcast(target), target.shape[-1:])
        predicted = self.predict(context[batch["context_from"] - start], batch)  # (K, D)
        latent = alignment_loss(c.align, predicted, target)
        if c.align not in IN_BATCH:
            # From the mean over K tokens to their sum / (mean K of all micro-batches), as in mlm.
            latent = latent * (len(predicted) / batch["loss_denominators"][1])

        lam = self.lam()
        loss = lam * latent + (1 - lam) * mlm
        return loss, {"mlm": mlm.detach(), "latent": latent.detach(), "lambda": lam.detach(),
                      "teacher_init_weight": self.teacher.init_weight.clone()}

    def lam(self):
        """Return lambda, the weight of the latent loss: ()."""
        c = self.config
        if c.balance == "learned":
            return self.balance.sigmoid().sum()  # (1,) -> ()
        end = c.balance_end if c.balance == "scheduled" else c.balance_start
        return c.balance_start + (end - c.balance_start) * self.progress

    def predict(self, context, batch):
        """Predict the hidden states of all blocks from those at context_from: (C, D) -> (K, D)."""
        packed = batch["predictor_packed"]
        dtype = context.dtype
        context = self.predictor_embed(context)  # (C, P)
        x = self.mask_token.to(dtype).expand(len(packed.tokens), -1)
        x = x.index_copy(0, batch["context_to"], context.to(x.dtype))  # (T', P)
        x = x + sinusoids(packed.positions, x.shape[1]).to(x.dtype)
        x = run_blocks(self.predictor, x, packed, at=batch["block_to"])  # (K, P)
        return self.predictor_proj(self.predictor_norm(x))

    def after_step(self, progress):
        super().after_step(progress)
        self.teacher.update(self.model, progress)

    def warning(self):
        init_weight = self.teacher.init_weight.item()
        if self.progress == 1 and init_weight > 0.01:
            return (f"{init_weight:.0%} of the teacher is still its initialization: lower "
                    "--momentum, or train longer")
        lam = whole(self.lam()).item()
        if self.config.balance == "learned" and not 0.05 <= lam <= 0.95:
            return (f"the learned lambda is {lam:.3f}, so the {'mlm' if lam > 0.5 else 'latent'} "
                    "loss has almost no weight: --balance fixed keeps lambda constant")
        return ""


def draw_blocks(length, block_fraction, context_fraction, config, rng):
    """Return the sorted positions of the context of a row, and those of each target block
    [I-JEPA, Assran et al. 2023, sec. 3; Predict and Reconstruct, sec. 3.2]."""
    everything = np.arange(length)
    size = max(1, int(length * block_fraction))
    context_size = max(1, int(length * context_fraction))
    # As released, a block with overlap can begin anywhere, and the end of the row truncates it.
    last = length if config.allow_overlap else length - size + 1
    starts = rng.integers(0, last, config.target_blocks)
    blocks = [everything[start:start + size] for start in starts]
    if config.allow_overlap:
        # Only the first token of the context must be outside some block.
        outside = concat_ids(*(np.setdiff1d(everything, block) for block in blocks))
        start = rng.choice(outside) if len(outside) else 0
        return everything[start:start + context_size], blocks
    start = rng.integers(0, length - context_size + 1)
    outside = np.setdiff1d(everything, concat_ids(*blocks))
    if not len(outside):
        outside = everything[:1]  # blocks can cover a row of very few tokens
    context = outside[(outside >= start) & (outside < start + context_size)]
    return (context if len(context) >= max(1, config.min_keep) else outside), blocks


OBJECTIVES = {"mexma": Mexma, "bepa": Bepa, "hybrid": Hybrid, "llm-jepa": LlmJepa, "mlm": Mlm,
              "ntp": Ntp, "contrastive": Contrastive}
