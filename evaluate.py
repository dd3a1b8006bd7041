"""What a trained model is worth: sentence vectors, retrieval across languages, their geometry.

    python evaluate.py out/x                       # all that applies, on the run's own test rows
    python evaluate.py out/x --data pairs.tsv --langs en,de --tasks retrieval
    python evaluate.py out/x --json                # every number, not only those of the table

Metrics are functions of vectors; the numbers of tasks are named task/metric or task/metric/detail;
error rates and accuracies are percentages. Axes: N and M rows, D width, V vocabulary.
"""

import contextlib
import functools
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, NamedTuple

import torch
import torch.nn.functional as F
from tqdm import tqdm

import corpora
from corpora.program import BadInput, Parser, comma_list, did_you_mean, exit_status
from corpora.text import write_atomic
from data import Tokenizer, rows_of
from model import KeyValueCache, Packed, load

# ---- embed and generate


@contextlib.contextmanager
def in_eval_mode(model):
    """Without dropout and gradients; afterwards each module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:  # not model.train(): a part may be frozen
            module.training = training


def token_batches(lengths, tokens):
    """Rows of these lengths in batches of at most `tokens` tokens -> lists of row numbers."""
    batches = []
    room = 0
    # The longest first: memory runs out at once or never
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] > room:
            batches.append([])
            room = max(tokens, lengths[i])  # a row longer than a batch is one alone
        batches[-1].append(i)
        room -= lengths[i]
    return batches


def read_rows(model, rows, read, tokens_per_batch=4096, progress=False):
    """What `read(packed)` finds, one thing a row of a batch -> one for each of the rows of ids."""
    found = [None] * len(rows)
    device = next(model.parameters()).device
    batches = token_batches([len(row) for row in rows], tokens_per_batch)
    with in_eval_mode(model):
        # disable=None: a bar on a terminal, nothing in a file
        for batch in tqdm(batches, "embed", leave=False, disable=None if progress else True):
            packed = Packed.of([rows[i] for i in batch], causal=model.config.causal).to(device)
            for i, value in zip(batch, read(packed)):
                found[i] = value
    return found


def embed_rows(model, rows, tokens_per_batch=4096, progress=False, pool=None):
    """N rows of ids -> vectors (N, D), float32 on the CPU."""

    def read(packed):
        return model.pool(model(packed), packed, pool).float().cpu()  # (rows of the batch, D)

    vectors = read_rows(model, rows, read, tokens_per_batch, progress)  # N of (D,)
    return torch.stack(vectors) if rows else torch.empty(0, model.config.width)


def embed(model, tokenizer, texts, prefix=(), suffix=None, max_length=None, progress=False,
          pool=None):
    """N texts -> vectors (N, D), float32 on the CPU, of rows [CLS] prefix text suffix, the suffix
    None being [SEP], cut to max_length tokens or what the model takes."""
    longest = min(max_length or math.inf, model.config.max_positions)  # in tokens
    rows = rows_of(tokenizer, texts, prefix, suffix, max_length=longest)
    return embed_rows(model, rows, progress=progress, pool=pool)


def generate(model, prompts, stop, max_new, tokens_per_batch=16384, progress=False):
    """Greedy continuations of prompts -> (lists of ids without the stop token, ended with it?).

    An answer ends after max_new tokens, stop included, or with the model's positions. ValueError
    for an empty or too long prompt, BadInput for a model that gives NaN.
    """
    longest = model.config.max_positions
    device = next(model.parameters()).device
    for prompt in prompts:
        if not 0 < len(prompt) <= longest:
            raise ValueError(f"a prompt has {len(prompt)} tokens: it must have 1 to {longest}")
    rows = [list(prompt) for prompt in prompts]
    limits = [min(len(row) + max_new, longest) for row in rows]
    stopped = [False] * len(rows)
    batches = token_batches(limits, tokens_per_batch)
    with in_eval_mode(model):
        for batch in tqdm(batches, "generate", leave=False, disable=None if progress else True):
            active = [i for i in batch if len(rows[i]) < limits[i]]  # the others have no room
            caches = KeyValueCache.of(model, len(active), limits[batch[0]])
            start = 0
            end = min(len(rows[i]) for i in batch)
            # All are at one position, some still inside of their prompts: nothing is padded
            while active:
                tokens = torch.tensor([rows[i][start:end] for i in active], device=device)
                logits = model.extend(tokens, caches)  # (active, n) -> (active, V)
                if logits.isnan().any():
                    raise BadInput("the model gives NaN for a token: its training has diverged")
                for i, token in zip(active, logits.argmax(1).tolist()):
                    if len(rows[i]) == end:  # else its prompt says what comes here
                        stopped[i] = token == stop
                        rows[i] += [] if stopped[i] else [token]
                start = end
                end += 1  # from now on a token at a time
                kept = [place for place, i in enumerate(active)
                        if not stopped[i] and len(rows[i]) < limits[i]]
                if len(kept) < len(active):  # finished rows make room
                    active = [active[place] for place in kept]
                    for cache in caches:
                        cache.keep(kept)
    return [row[len(prompt):] for row, prompt in zip(rows, prompts)], stopped


class Answers(NamedTuple):
    prompts: list
    golds: list
    written: list
    stopped: list  # did it end with the stop token?
    cut: int       # how many prompts were


def answer(model, tokenizer, prompts, golds, max_new=None, progress=False, system=None,
           max_system=None):
    """What a causal model writes after [CLS] (system [SEP]) prompt [SEP], up to [SEP] -> Answers.

    A prompt that fills the model is cut, to leave room for max_new tokens: by default twice the
    longest gold text + 8.
    """
    special = tokenizer.special
    longest = model.config.max_positions
    max_new = max_new or 2 * max(len(ids) for ids in tokenizer.encode(golds)) + 8
    suffix = [*special.chat.end, *special.chat.assistant]  # [SEP], or a chat model's own marks
    rows = rows_of(tokenizer, prompts, special.chat.user, suffix, system, max_system)
    kept = max(longest // 2, longest - max_new) - len(suffix)
    full = [i for i, row in enumerate(rows) if len(row) >= longest]
    for i in full:
        rows[i] = [*rows[i][:kept], *suffix]
    written, stopped = generate(model, rows, special.sep, max_new, progress=progress)
    return Answers(prompts, golds, [tokenizer.decode(ids) for ids in written], stopped, len(full))


def exact(written, gold):
    """The same text, apart from space around it. Nothing written is wrong, whatever the gold."""
    return bool(written.strip()) and written.strip() == gold.strip()


def starts_with(written, gold):
    """All one can ask of a model that never learned to stop [LLM-JEPA, sec. A.7]."""
    return bool(gold.strip()) and written.strip().startswith(gold.strip())


def mean(values):
    return sum(values) / len(values)


def percent(flags):
    """True, False, and None for what is left out -> percent of True, None if nothing is left."""
    flags = [flag for flag in flags if flag is not None]
    return 100 * mean(flags) if flags else None


def answer_scores(answers, judged, train_texts=None):
    """{metric: True, False or None (left out) of each answer} -> {metric: percent}, and counts.
    `train_texts`, a set: the first metric once more, where prompt or gold text is not in it."""
    scores = {metric: percent(flags) for metric, flags in judged.items()}
    scores["stop"] = percent(answers.stopped)
    scores["truncated"] = 100 - scores["stop"]
    scores["prompts_cut"] = 100 * answers.cut / len(answers.golds)
    scores["rows"] = len(answers.golds)
    if train_texts is not None:
        metric = next(iter(judged))
        for name, texts in (("new_prompt", answers.prompts), ("unseen", answers.golds)):
            new = [flag for flag, text in zip(judged[metric], texts)
                   if text.strip() not in train_texts]
            scores[f"{metric}_{name}"] = percent(new)
            scores[f"rows_{name}"] = len(new) - new.count(None)
    return {name: value for name, value in scores.items() if value is not None}


# ---- retrieval: is a sentence's translation found among all sentences of the other language?

MARGINS = ("ratio", "distance", "absolute")


def unit(z):
    """Rows scaled to length 1: (N, D) -> (N, D) float64. ValueError for another shape, and for NaN
    and infinity, whose ranking would look like a result."""
    # An array is copied: a memory map may be read-only
    z = z.detach().double() if torch.is_tensor(z) else torch.tensor(z, dtype=torch.float64)
    if z.ndim != 2 or not z.isfinite().all():
        raise ValueError(f"vectors must be (N, D), without NaN and infinity; here {tuple(z.shape)}")
    return z / z.norm(dim=1, keepdim=True).clamp(min=1e-300)  # a zero row stays zero


def check_pairs(x, y):
    """ValueError unless row i of x can belong to row i of y: (N, D) both, one row at least."""
    if len(x.shape) != 2 or x.shape != y.shape or not len(x):
        raise ValueError(f"x {tuple(x.shape)} and y {tuple(y.shape)} must both be (N, D), N > 0")


class Nearest(NamedTuple):
    cosines: torch.Tensor  # (N, k) float64, best first
    indices: torch.Tensor  # (N, k)

    def update(self, rows, cosines, start):
        """Take in the cosines (n, m) of a slice of the rows to rows start, start + 1, ..."""
        k = self.cosines.shape[1]
        top = cosines.topk(min(k, cosines.shape[1]), dim=1)                   # (n, k)
        best = torch.cat([self.cosines[rows], top.values], 1).topk(k, dim=1)  # of 2 k
        indices = torch.cat([self.indices[rows], top.indices + start], 1)
        self.cosines[rows] = best.values
        self.indices[rows] = indices.gather(1, best.indices)


def search(x, y, k, back=0, block=2048):
    """The k rows of y nearest to each row of x, and the `back` rows of x nearest to each row of y,
    by cosine, exact: (N, D), (M, D) -> Nearest (N, k), Nearest (M, back). ValueError unless the
    widths agree, k <= M and back <= N."""
    if x.shape[1:] != y.shape[1:] or not 1 <= k <= len(y) or back > len(x):
        raise ValueError(f"{k} neighbours of x {tuple(x.shape)} in y {tuple(y.shape)}: k must be "
                         f"1..{len(y)}, and the widths equal")
    sides = []
    for shape in ((len(x), k), (len(y), back)):
        device = x.device if torch.is_tensor(x) else "cpu"
        nothing = torch.full(shape, -math.inf, dtype=torch.float64, device=device)
        sides.append(Nearest(nothing, torch.zeros_like(nothing, dtype=torch.int64)))
    # Memory maps may be large: only a block at a time becomes unit rows in float64
    for i in range(0, len(x), block):
        queries = unit(x[i:i + block])                  # (n, D)
        for j in range(0, len(y), block):
            cosines = queries @ unit(y[j:j + block]).T  # (n, m)
            sides[0].update(slice(i, i + block), cosines, j)
            if back:
                sides[1].update(slice(j, j + block), cosines.T, i)
    return sides


def by_margin(sides, margin):
    """What margin-based mining takes, of what `search` found both ways -> (scores (N,), rows of y
    (N,)), (scores (M,), rows of x (M,)). [Artetxe & Schwenk 2019]

    Of the k nearest j of i the one with the highest cos / m (ratio), cos - m (distance) or cos
    (absolute), m = (mean cos of i to its k nearest + mean cos of j to its k nearest) / 2.
    """
    if margin not in MARGINS:
        raise ValueError(f"margin {margin!r} is not one of {', '.join(MARGINS)}")
    taken = []
    for side, other in (sides, sides[::-1]):
        scores = side.cosines                                                         # (N, k)
        # A hub is near to everything: its large m keeps it from being everybody's translation
        m = (scores.mean(1, keepdim=True) + other.cosines.mean(1)[side.indices]) / 2  # (N, k)
        if margin == "ratio":
            scores = scores / m
        elif margin == "distance":
            scores = scores - m
        best = scores.max(1, keepdim=True)                                            # (N, 1)
        taken.append((best.values[:, 0], side.indices.gather(1, best.indices)[:, 0]))
    return taken


def mine_both(x, y, margin="ratio", k=4):
    """`by_margin` of all rows; with fewer than k rows, k is what there is."""
    return by_margin(search(x, y, min(k, len(y)), min(k, len(x))), margin)


def mine(x, y, margin="ratio", k=4):
    """The row of y that margin-based mining takes for each row of x: (N, D), (M, D) -> (N,)."""
    return mine_both(x, y, margin, k)[0][1]


def mistakes(found, texts=None):
    """Found rows (N,) -> wrong (N,) bool. Right is one's own row or, given texts, an equal text."""
    wrong = found.cpu() != torch.arange(len(found))  # (N,)
    for i in wrong.nonzero()[:, 0].tolist() if texts is not None else ():
        wrong[i] = texts[found[i]] != texts[i]
    return wrong


def error_rate(found, texts=None):
    return 100 * mistakes(found, texts).double().mean().item()


def xsim(x, y, margin="ratio", k=4, texts=None):
    """Percent of the rows of x whose translation is not found in y: (N, D), (N, D) -> 0..100. With
    the texts of y an equal text is as good, as in LASER's command. [Heffernan et al. 2022]"""
    check_pairs(x, y)
    return error_rate(mine(x, y, margin, k), texts)


def xsim_all(x, y, k=4, texts=None):
    """From one search: xsim by each margin, "top1" from x to y, and "top1_back"."""
    check_pairs(x, y)
    sides = search(x, y, min(k, len(y)), min(k, len(x)))
    scores = {margin: error_rate(by_margin(sides, margin)[0][1], texts) for margin in MARGINS}
    there, back = by_margin(sides, "absolute")  # the nearest, each way
    return scores | {"top1": 100 - error_rate(there[1]), "top1_back": 100 - error_rate(back[1])}


def xsim_plus(x, y, negatives, sources, types, margin="ratio", k=4, texts=None):
    """xsim when y is joined by M altered copies of its rows, and which did harm. [Chen et al. 2023]

    (N, D), (N, D), (M, D), of each negative the row it was made from and its error, the texts of y
    and the negatives -> {"xsim++": percent wrong, each error: percent that took it of their own
    translation, "misaligned": percent that took anything else}.
    """
    check_pairs(x, y)
    # More targets change the margin of every row: nothing of xsim can be used again
    found = mine(x, torch.cat([torch.as_tensor(y), torch.as_tensor(negatives)]), margin, k)
    wrong = mistakes(found, texts)  # (N,)
    counts = dict.fromkeys([*sorted(set(types)), "misaligned"], 0)
    for i in wrong.nonzero()[:, 0].tolist():
        j = int(found[i]) - len(y)  # below 0: an unaltered row of y
        own = j >= 0 and (sources[j] == i or texts is not None and texts[sources[j]] == texts[i])
        counts[types[j] if own else "misaligned"] += 1
    shares = {name: 100 * count / len(x) for name, count in counts.items()}
    return {"xsim++": 100 * wrong.double().mean().item()} | shares


def top1(x, y):
    """Percent of the rows of x whose nearest row of y by cosine is their own."""
    return 100 - xsim(x, y, "absolute")


# ---- geometry: is the space in use, or has the encoder collapsed?


def spectrum(z, center):
    """Singular values in float64, largest first: (N, D) -> (min(N, D),)."""
    z = torch.as_tensor(z).detach().double()
    floor = 1e-7 * z.norm()  # below is the rounding of float32 vectors: one point has no directions
    if center:
        z = z - z.mean(0)
    gram = z.T @ z if len(z) > z.shape[1] else z @ z.T  # the smaller of the two
    s = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().flip(0)
    return torch.where(s > floor, s, 0)


def entropy(p):
    """-sum p log p in nats, with 0 log 0 = 0: (n,) -> float."""
    return -torch.special.xlogy(p, p).sum().item()


def rankme(z, center=False, normalize=False, epsilon=1e-7):
    """exp(entropy of s / sum s + epsilon), s the singular values: (N, D) -> 1..min(N, D), the
    directions in use. [Garrido et al. 2023; BERT-JEPA's code: normalize=True, epsilon=1e-10]"""
    # It grows with N: compare what was measured on equally many rows
    s = spectrum(unit(z) if normalize else z, center)
    return math.exp(entropy(s / s.sum().clamp(min=1e-300) + epsilon))


def uniformity(z, t=2):
    """log mean exp(-t |u_i - u_j|^2) over all i != j of unit rows: (N, D), N > 1 -> 0 (one point)
    ..-2t (the whole sphere). [Wang & Isola 2020, sec. 4]"""
    u = unit(z)  # (N, D)
    # |u_i - u_j|^2 = 2 - 2 cos; i = j is no pair, and would bias the mean upwards
    total = -(2 * t * (u.square().sum(1) - 1)).exp().sum().item()
    for rows in u.split(1024):
        total += (2 * t * (rows @ u.T - 1)).exp().sum().item()  # (1024, N)
    return math.log(total / (len(u) * (len(u) - 1)))


def alignment(x, y, power=2):
    """mean |u_i - v_i|^power of matched unit rows: (N, D), (N, D) -> 0 (best)..2^power.
    [Wang & Isola 2020, sec. 4]"""
    check_pairs(x, y)
    return (unit(x) - unit(y)).norm(dim=1).pow(power).mean().item()


def std(z):
    """Standard deviation of each dimension of the unit rows, mean, times sqrt(D): (N, D) -> 0 (one
    point)..1 (healthy). [Chen & He 2021, SimSiam, fig. 2]"""
    u = unit(z)  # (N, D)
    return u.std(0, correction=0).mean().item() * math.sqrt(u.shape[1])


def random_cosine(x, y=None):
    """Mean cosine of row i of x and row j != i of y (None: of x): (N, D), (N, D), N > 1 -> -1..1.
    [BERT-JEPA, tables 4-7, unrelated]"""
    y = x if y is None else y
    check_pairs(x, y)
    u = unit(x)  # (N, D)
    v = unit(y)  # (N, D)
    # All pairs together are the product of two sums
    return ((u.sum(0) @ v.sum(0) - (u * v).sum()) / (len(u) * (len(u) - 1))).item()


def cosine_table(vectors):
    """Mean cosines of {language: (N, D), aligned}: "same" (unrelated sentences of one language),
    "translations", "different" (unrelated, of two), and of each pair. [BERT-JEPA, tables 4-7]"""
    first, *others = vectors
    same = {name: random_cosine(z) for name, z in vectors.items()}
    means = {"same": mean(same.values())}
    pairs = {}  # "same/de-en": of de alone, en alone, and so on
    for other in others:
        pairs[f"same/{other}-{first}"] = (same[other] + same[first]) / 2
        products = unit(vectors[other]) * unit(vectors[first])  # (N, D)
        pairs[f"translations/{other}-{first}"] = products.sum(1).mean().item()
        pairs[f"different/{other}-{first}"] = random_cosine(vectors[other], vectors[first])
    for kind in ("translations", "different") if others else ():
        means[kind] = mean([pairs[f"{kind}/{other}-{first}"] for other in others])
    return means | pairs


def geometry(vectors):
    """Every geometry metric of {language: (N, D), aligned}, N > 1: means over the languages, or
    over each language and the first."""
    first, *others = vectors.values()
    scores = {"rankme": mean([rankme(z) for z in vectors.values()])}
    scores["rankme_share"] = 100 * scores["rankme"] / min(first.shape)
    scores["uniformity"] = mean([uniformity(z) for z in vectors.values()])
    scores["std"] = mean([std(z) for z in vectors.values()])
    if others:
        scores["alignment"] = mean([alignment(x, first) for x in others])
    return scores | {f"cosine/{name}": value for name, value in cosine_table(vectors).items()}


def diagnose(results, views=2):
    """Is the encoder collapsing? Results of `geometry` or `run` -> (they, "verdict"), a line."""
    found = {name.removeprefix("geometry/"): value for name, value in results.items()}
    # Either alone is half of it: a pretrained BERT has a random cosine of .99 and can be trained
    # [BERT-JEPA, table 4]; vectors on a line through 0 have one of 0
    together = found["cosine/same"]
    few = found["rankme_share"] < 5 or found["rankme"] < 2
    # With one view nobody taught the model what a translation is
    pairs = views > 1 and "cosine/translations" in found
    if few and together > .9:
        verdict = "COLLAPSING"
    elif together > .5:
        verdict = "half-collapsed (all vectors share one direction)"
    elif few:
        verdict = "half-collapsed (few directions in use)"
    elif pairs and found["cosine/translations"] <= found["cosine/different"]:
        verdict = "translations less alike than strangers"
    else:
        verdict = "ok"
    positive = f" | cos(pos) {found['cosine/translations']:.2f}" if pairs else ""
    return found | {"verdict": verdict}, (
        f"health: RankMe {found['rankme']:.1f} ({found['rankme_share']:.0f} %) | cos(rand) "
        f"{together:.2f}{positive} | unif {found['uniformity']:.2f} | std {found['std']:.2f} -> "
        + verdict)


# ---- the probe: what do vectors know of a sentence?


def linear_probe(x, labels, queries, gold, penalty=1e-2):
    """Percent of the queries (M, D) whose class a linear map finds, trained on x (N, D), N labels:
    ridge regression on one-hot classes, in closed form."""
    classes = sorted(set(labels), key=str)
    targets = torch.tensor([classes.index(label) for label in labels])
    targets = F.one_hot(targets).double()                            # (N, classes)
    center = x.double().mean(0)                                      # (D,)
    z = x.double() - center                                          # (N, D)
    gram = z.T @ z                                                   # (D, D)
    # The penalty is relative to the mean variance of a dimension: scale does not count
    gram.diagonal().add_(penalty * gram.diagonal().mean() + 1e-300)
    weight = torch.linalg.solve(gram, z.T @ targets)                 # (D, classes)
    scores = (queries.double() - center) @ weight + targets.mean(0)  # (M, classes)
    found = scores.argmax(1).tolist()                                # (M,)
    return percent([classes[number] == label for number, label in zip(found, gold)])


def rank_correlation(a, b):
    """Spearman's: correlation of the ranks, (N,), (N,) -> -1..1; 0 if either is constant."""
    centred = []
    for values in (a, b):
        values = torch.as_tensor(values, dtype=torch.float64)  # (N,)
        _, place, count = values.unique(return_inverse=True, return_counts=True)
        ranks = (count.cumsum(0) - (count.double() - 1) / 2)[place]  # equal values share theirs
        centred.append(ranks - ranks.mean())
    x, y = centred
    return (x @ y / (x.norm() * y.norm()).clamp(min=1e-300)).item()  # 0 / 0 is no correlation


# ---- a model and the rows it is asked about


@dataclass
class Evaluation:
    """A model and the rows it is evaluated on; vectors and answers are made once for all tasks.
    BadInput if there are fewer than two rows, or a vector is not finite."""
    model: torch.nn.Module
    tokenizer: Tokenizer
    rows: corpora.EvaluationRows
    affixes: Any = None             # (prefix, suffix) of the first column, and of the others
    max_system: int = 0             # tokens of a chat's system text that open its row
    progress: bool = False
    train_texts: set | None = None  # of `answer_scores`
    answer_limit: int | None = 200  # rows that are answered
    max_new: int | None = None      # tokens of an answer
    views: int = 2                  # texts of a training example
    pool: str | None = None         # another pooling than the model's

    def __post_init__(self):
        self.texts = self.rows.texts    # {column: N texts}, aligned
        self.hard = self.rows.hard      # [(text, row of the first column, type of error)]
        self.system = self.rows.system  # N texts or None
        self.affixes = self.affixes or (((), None), ((), None))
        self.count = len(next(iter(self.texts.values())))
        if self.count < 2:
            raise BadInput(f"{self.rows.name} gives {self.count} rows: an evaluation needs at "
                           "least 2")

    def checked(self, found):
        """What was found of each text, if all of it is finite."""
        bad = sum(not value.isfinite().all() for value in found)
        if bad:
            raise BadInput(f"the model gives NaN or infinity for {bad} of {len(found)} texts: its "
                           "training has diverged")
        return found

    def row_ids(self, texts, affixes, system=None):
        longest = self.model.config.max_positions
        return rows_of(self.tokenizer, texts, *affixes, system, self.max_system, longest)

    def embed(self, rows, pool=None):
        """N rows of ids -> (N, D)."""
        pool = pool or self.pool
        return self.checked(embed_rows(self.model, rows, progress=self.progress, pool=pool))

    def encode(self, texts, pool=None):
        """N texts -> (N, D), as those of the first column are."""
        return self.embed(self.row_ids(texts, self.affixes[0]), pool)

    def states(self, rows):
        """Rows of ids -> the last layer's states of their tokens, a list of (L, D), float32."""

        def read(packed):
            return self.model(packed).float().cpu().split(packed.cu_seqlens.diff().tolist())

        return self.checked(read_rows(self.model, rows, read, progress=self.progress))

    @functools.cached_property
    def ids(self):
        """{column: N rows of ids}"""
        rows = {}
        for name, texts in self.texts.items():
            rows[name] = self.row_ids(texts, self.affixes[1 if rows else 0], self.system)
        return rows

    def pooled(self, pool=None):
        """{column: (N, D)}, with another pooling than the model's."""
        rows = sum(self.ids.values(), [])
        return dict(zip(self.ids, self.embed(rows, pool).split(self.count)))

    @functools.cached_property
    def vectors(self):
        return self.pooled()

    @functools.cached_property
    def negatives(self):
        return self.encode([text for text, _, _ in self.hard])  # (M, D)

    def answers_of(self, rows):
        """Answers to some rows."""

        def few(texts):
            return [texts[row] for row in rows]

        prompts, golds = map(few, self.texts.values())
        system = self.system and few(self.system)
        return answer(self.model, self.tokenizer, prompts, golds, self.max_new, self.progress,
                      system, self.max_system)

    @functools.cached_property
    def answers(self):
        return self.answers_of(range(self.count)[:self.answer_limit])

    @property
    def pairs(self):
        """("de-en", vectors of de, vectors of en) of every other column and the first."""
        first, *others = self.vectors
        return [(f"{other}-{first}", self.vectors[other], self.vectors[first]) for other in others]


# ---- tasks


class Task(NamedTuple):
    scores: Callable       # evaluation -> {"metric" or "metric/detail": number}
    unavailable: Callable  # evaluation -> why it cannot be done, or ""
    about: dict            # {metric: (unit, which way is better, what it is)}
    default: bool = True   # is it done unasked,
    views: int = 1         # of objectives with so many views or more?


def with_mean(metric, values):
    """{detail: value} -> {metric: their mean, "metric/detail": value, ...}."""
    details = {f"{metric}/{detail}": value for detail, value in values.items()}
    return {metric: mean(values.values())} | details


def retrieval(vectors, texts, negatives=None, hard=()):
    """Every language searched in the first: {language: (N, D)}, {language: N texts}, and of hard
    negatives (M, D) and (text, row, type) -> {metric: mean over languages, "xsim/de-en": ...}."""
    first, *others = vectors
    found = {}  # {metric: {pair of languages: value}}
    for other in others:
        errors = xsim_all(vectors[other], vectors[first], texts=texts[first])
        scores = {"xsim": errors["ratio"], "xsim_distance": errors["distance"],
                  "xsim_absolute": errors["absolute"], "top1": errors["top1"]}
        if hard:
            lines, sources, types = zip(*hard)
            parts = xsim_plus(vectors[other], vectors[first], negatives, sources, types,
                              texts=[*texts[first], *lines])
            scores["xsim++"] = parts.pop("xsim++")
            scores |= {f"xsim++/{kind}": value for kind, value in parts.items()}
        for metric, value in scores.items():
            found.setdefault(metric, {})[f"{other}-{first}"] = value
        found["top1"][f"{first}-{other}"] = errors["top1_back"]
    results = {}
    for metric, values in found.items():
        results[metric] = mean(values.values())
        if metric in ("xsim", "top1", "xsim++"):  # of the other margins and errors the mean alone
            results |= with_mean(metric, values)
    return results


def task_retrieval(evaluation):
    scores = retrieval(evaluation.vectors, evaluation.texts, evaluation.negatives, evaluation.hard)
    return {"rows": evaluation.count} | scores


def no_retrieval(evaluation):
    if len(evaluation.texts) > 1:
        return ""
    return f"looks for translations, and {evaluation.rows.name} has one text a row: leave it out"


def task_geometry(evaluation):
    return {"rows": evaluation.count} | geometry(evaluation.vectors)


def task_probe(evaluation):
    """A linear probe for each property of the labelled texts, and how well cosines rank pairs of
    texts by their graded similarity."""
    texts, properties = evaluation.rows.labelled
    z = evaluation.encode(texts)  # (N, D)
    found = {}                    # {property: accuracy}
    majority = {}                 # {property: share of its most frequent class}
    for name, labels in properties.items():
        gold = labels[1::2]  # odd rows are for testing, even ones for training
        found[name] = linear_probe(z[::2], labels[::2], z[1::2], gold)
        majority[name] = 100 * max(gold.count(label) for label in set(gold)) / len(gold)
    first, second, similarity = zip(*evaluation.rows.graded)
    cosines = (unit(evaluation.encode(first)) * unit(evaluation.encode(second))).sum(1)
    return {"rows": len(texts), "mean": mean(found.values())} | found | with_mean(
        "majority", majority) | {"similarity": 100 * rank_correlation(cosines, similarity)}


def no_probe(evaluation):
    name = evaluation.rows.name
    return "" if evaluation.rows.labelled else f"needs labels, and {name} has none: give --data toy"


def task_generate(evaluation):
    answers = evaluation.answers
    judged = {}
    for metric, is_correct in (("exact", exact), ("startswith", starts_with)):
        judged[metric] = [is_correct(*pair) for pair in zip(answers.written, answers.golds)]
    return answer_scores(answers, judged, evaluation.train_texts)


def no_generate(evaluation):
    if not evaluation.model.config.causal:
        return "needs a causal model (objectives ntp, llm-jepa), and this one reads both ways"
    if len(evaluation.texts) != 2:
        return (f"answers one column with another, and {evaluation.rows.name} has "
                f"{len(evaluation.texts)}: choose two with --langs a,b")
    return ""


ROWS = {"rows": ("", "", "rows of the data")}
ANSWERS = ROWS | {
    "stop": ("%", "higher", "it ended with the stop token"),
    "truncated": ("%", "lower", "it did not, and was cut"),
    "prompts_cut": ("%", "lower", "prompts that fill the whole model"),
    "rows_new_prompt": ("", "", "rows whose prompt is not in the training data"),
    "rows_unseen": ("", "", "rows whose gold text is not in the training data"),
}
TASKS = {
    "retrieval": Task(task_retrieval, no_retrieval, views=2, about=ROWS | {
        "xsim": ("%", "lower", "wrong translation found: ratio margin, k = 4"),
        "xsim_distance": ("%", "lower", "the same by distance margin"),
        "xsim_absolute": ("%", "lower", "the same by cosine alone"),
        "top1": ("%", "higher", "nearest by cosine is the translation, both directions"),
        "xsim++": ("%", "lower", "wrong translation found among hard negatives"),
    }),
    "geometry": Task(task_geometry, lambda evaluation: "", about=ROWS | {
        "rankme": ("", "higher", "directions in use"),
        "rankme_share": ("%", "higher", "rankme as a share of the most possible"),
        "uniformity": ("", "lower", "0 is one point, -4 the whole sphere"),
        "std": ("", "higher", "deviation of unit rows, 0 is one point, 1 healthy"),
        "alignment": ("", "lower", "squared distance of translations"),
        "cosine/same": ("", "lower", "unrelated sentences, one language"),
        "cosine/translations": ("", "higher", "translations"),
        "cosine/different": ("", "lower", "unrelated sentences, two languages"),
    }),
    "probe": Task(task_probe, no_probe, about=ROWS | {
        "mean": ("%", "higher", "a linear probe finds tense, number and so on: mean"),
        "majority": ("%", "", "the most frequent class: what needs no model"),
        "similarity": ("", "higher", "rank correlation of cosine and graded similarity, x 100"),
    }),
    "generate": Task(task_generate, no_generate, views=2, about=ANSWERS | {
        "exact": ("%", "higher", "greedy answer is the gold text"),
        "startswith": ("%", "higher", "it begins with the gold text"),
        "exact_new_prompt": ("%", "higher", "exact where the prompt is not in the training data"),
        "exact_unseen": ("%", "higher", "exact where the gold text is not in the training data"),
    }),
}


def run(evaluation, names=None, tasks=TASKS):
    """Do tasks, None: all that apply -> {"task/metric": number}. BadInput for a task that is
    unknown, or that the model or the data cannot serve."""
    for name in names or ():
        if name not in tasks:
            more = f"; tasks/ has more: python -m tasks RUN --tasks {name}"
            raise BadInput(f"task {name!r} is none of {', '.join(tasks)}"
                           + did_you_mean(name, tasks, more))
        reason = tasks[name].unavailable(evaluation)
        if reason:
            raise BadInput(f"task {name!r} {reason}")
    if names is None:
        names = [name for name, task in tasks.items() if task.default
                 and task.views <= evaluation.views and not task.unavailable(evaluation)]
    results = {}
    for name in names:
        for metric, value in tasks[name].scores(evaluation).items():
            results[f"{name}/{metric}"] = value
    return results


class Example(NamedTuple):
    query: str
    found: str  # what the model writes, or takes for the query's translation
    gold: str
    right: bool


def examples(evaluation, n=5):
    """n rows to read, spread evenly -> list of Example: answers of a causal model, or retrieval,
    the languages in turn; [] where nobody taught either."""
    first, *others = evaluation.texts
    if not others or evaluation.views < 2:
        return []
    n = min(n, evaluation.count)
    rows = [turn * evaluation.count // n for turn in range(n)]
    if not no_generate(evaluation):
        made = evaluation.answers_of(rows)
        answers = zip(made.prompts, made.written, made.golds)
        return [Example(*answer, exact(*answer[1:])) for answer in answers]
    shown = []
    golds = evaluation.texts[first]
    for turn, row in enumerate(rows):
        other = others[turn % len(others)]
        found = golds[mine(evaluation.vectors[other], evaluation.vectors[first])[row]]
        query = evaluation.texts[other][row]
        shown.append(Example(query, found, golds[row], found == golds[row]))
    return shown


# ---- the table, and the folder of a run


def about(name, tasks=TASKS):
    """A result's name -> (unit, which way is better, what it is); the last is "" of a detail."""
    task, *parts = name.split("/")
    known = tasks[task].about if task in tasks else {}
    # xsim++/negation/de: is there an xsim++/negation/de, an xsim++/negation, an xsim++?
    for end in range(len(parts), 0, -1):
        metric = "/".join(parts[:end])
        if metric in known:
            unit, better, what = known[metric]
            return unit, better, what if end == len(parts) else ""
    return "", "", ""


def table(results, before=None, tasks=TASKS, rows=20):
    """Results -> aligned lines: name, value, unit, which way is better, what it is; details if all
    fits in `rows`. `before`: results of the untrained model, a column beside them."""
    names = list(results)
    if len(names) > rows:  # metrics alone, without languages and other details
        names = [name for name in names if about(name, tasks)[2]][:rows]
    width = max(len(name) for name in names)
    lines = [f"{'':{width}} untrained   trained"] if before else []
    for name in names:
        unit, better, what = about(name, tasks)
        line = f"{name:{width}}"
        for column in filter(None, (before, results)):
            value = column.get(name, "-")  # a count is an int
            digits = 2 if unit else 4
            line += f" {value:>9.{digits}f}" if isinstance(value, float) else f" {value:>9}"
        lines.append(f"{line} {unit:1} {better:6} {what}".rstrip())
    if len(names) < len(results):
        lines.append(f"and {len(results) - len(names)} more numbers: --json")
    return "\n".join(lines)


def headline(results, step):
    """An evaluation in training, on one line."""
    shown = ("retrieval/xsim", "retrieval/xsim++", "generate/exact", "probe/mean")
    parts = [f"{name} {results[name]:.1f} %" for name in shown if name in results]
    health = diagnose(results, views=2 if "retrieval/xsim" in results else 1)[1]
    # Random weights look collapsed: that is no verdict on training
    parts.append(health if step else health.split(" -> ")[0] + " -> untrained")
    return "  ".join(parts)


class RunFolder(NamedTuple):
    folder: Path
    model: torch.nn.Module
    tokenizer: Tokenizer
    first: dict      # the first line of the log
    config: dict     # its "config"
    untrained: dict  # the results of step 0; {} if there are none


def read_log(folder):
    """The objects of log.jsonl, [] if there is none."""
    path = Path(folder) / "log.jsonl"
    records = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):  # a kill may cut the last line short
            records.append(json.loads(line))
    return records


def read_first(folder):
    """The first line of a run's log, with its "config"; BadInput if there is none."""
    first = next(iter(read_log(folder)), {})
    if "config" not in first:
        raise BadInput(f"{folder} is no run, its log.jsonl does not begin with a config: give the "
                       "whole folder that train.py, or python -m interop import, wrote")
    return first


def open_run(folder, device="cpu"):
    """The folder of a run -> RunFolder. BadInput if it is not whole."""
    folder = Path(folder)
    first = read_first(folder)
    model = load(folder / "model.pt", device)
    tokenizer = Tokenizer.read(folder / "tokenizer.json")
    if first.get("tokenizer_hash", tokenizer.hash) != tokenizer.hash:
        raise BadInput(f"{folder}/tokenizer.json is not that of the training: put that file back")
    # The model of step 0 is gone, but it was evaluated, on the rows for validation
    evaluations = [record for record in read_log(folder) if "eval" in record]
    untrained = next((one["eval"] for one in evaluations if one["step"] == 0), {})
    return RunFolder(folder, model, tokenizer, first, first["config"], untrained)


def write_results(folder, name, results):
    """Write results to folder/name, whole or not at all."""
    path = Path(folder) / name
    # Other numbers stay if they are newer than the model
    if path.is_file() and path.stat().st_mtime >= path.with_name("model.pt").stat().st_mtime:
        results = json.loads(path.read_text(encoding="utf-8")) | results
    write_atomic(path, json.dumps(results, indent=1, allow_nan=False).encode())


def usable_device(name):
    """The name of a device, by default the GPU if there is one. BadInput if it cannot be used."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError):  # the latter where torch has no CUDA at all
        raise BadInput(f"device {name!r} cannot be used here: give cpu, or leave it out") from None
    return name


# ---- command line

MOVED = {"export": "interop", "encode": "interop", "nearest": "interop", "compare": "results"}


def evaluation_of(opened, data=None, langs=None, split=None, limit=None, max_new=None, pool=None):
    """A RunFolder and what was asked for -> Evaluation."""
    config = opened.config
    own = config.get("eval_data") or config["data"]
    spec = data or own
    if not spec:
        raise BadInput(f"{opened.folder} has no data of its own: name some with --data")
    if own and Path(spec).resolve() == Path(own).resolve():
        spec = own  # the same file under another name
    if spec == own:
        langs = langs or comma_list(config.get("langs", ""))
    if not split:  # rows that the run was not trained on: of other files all are
        split = "test" if spec in corpora.EMBEDDED or spec == config["data"] else "all"
    if not limit and not Path(spec).is_dir():
        limit = 1000
    skip_bad = config.get("skip_bad", False)
    columns = corpora.open_text(spec, langs, skip_bad).columns
    # A run that was trained with system texts can be asked without
    system = config.get("chat") == "system" and "system" in columns
    rows = corpora.evaluation_rows(spec, langs, split, limit, skip_bad, system)
    return Evaluation(opened.model, opened.tokenizer, rows, opened.first.get("affixes"),
                      config["max_length"] if system else 0, progress=True, answer_limit=limit,
                      max_new=max_new, views=opened.first.get("views", 2), pool=pool)


def training_texts(config):
    """For `answer_scores`; None and a note if the data is not here, but on another machine."""
    try:
        return corpora.train_texts(config["data"], comma_list(config.get("langs", "")),
                                   config.get("skip_bad", False), not config.get("eval_data"))
    except BadInput as error:
        print(f"note: the scores of unseen rows are left out: {error}", file=sys.stderr)


def file_name(arguments):
    """eval.json of the run's own rows; others have a name of their own: all eval.json are alike."""
    parts = [Path(arguments.data.split(",")[0]).name.split(".")[0]] if arguments.data else []
    parts += [arguments.split, *arguments.langs, getattr(arguments, "pool", None)]
    return "-".join(["eval", *filter(None, parts)])[:200] + ".json"


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in MOVED:
        raise BadInput(f"{argv[0]} is a command of python -m {MOVED[argv[0]]} {argv[0]}")
    parser = Parser("evaluate.py", "Evaluate a run. More tasks: python -m tasks RUN --help")
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run, such as out/mexma")
    add("--data", help="other rows than the run's own: toy, files, or a folder of CODE.devtest")
    add("--langs", type=comma_list, default=[], help="columns, as en,de; the first is searched in")
    add("--split", choices=("train", "valid", "test", "all"), help="default: not trained on")
    add("--tasks", type=comma_list, help=f"some of {', '.join(TASKS)} [all that apply]")
    add("--limit", type=int, help="at most so many rows [1000; of a folder, all]")
    add("--max-new", type=int, help="cut answers after so many tokens")
    add("--pool", choices=("cls", "mean", "max", "last"), help="another pooling than the model's")
    add("--device", help="cpu, cuda, cuda:1 [cuda if there is one]")
    add("--json", action="store_true", help="print every number, as one JSON object")
    options = parser.parse_args(argv)
    for flag, value, least in (("limit", options.limit, 2), ("max-new", options.max_new, 1)):
        if value is not None and value < least:
            raise BadInput(f"--{flag} {value} is too low: give at least {least}")
    opened = open_run(options.run, usable_device(options.device))
    evaluation = evaluation_of(opened, options.data, options.langs, options.split, options.limit,
                               options.max_new, options.pool)
    writes = "generate" in (options.tasks or TASKS) and not no_generate(evaluation)
    if writes and opened.config["data"]:  # what it recalls, and what it can do beyond
        evaluation.train_texts = training_texts(opened.config)
    results = run(evaluation, options.tasks)
    name = file_name(options)
    write_results(opened.folder, name, results)
    if options.json:
        print(json.dumps(results))
        return
    before = opened.untrained if name == "eval.json" else None
    print(table(results, before))
    if before:
        print("untrained: at step 0, on the run's rows for validation")
    if "geometry/rankme" in results:
        print(diagnose(results, evaluation.views)[1])


if __name__ == "__main__":
    sys.exit(exit_status(main))
