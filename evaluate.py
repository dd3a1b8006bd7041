"""What a trained model is worth: sentence vectors, retrieval across languages, their geometry.

    python evaluate.py out/x                       # all that applies, on the run's own test rows
    python evaluate.py out/x --data pairs.tsv --langs en,de --tasks retrieval
    python evaluate.py out/x --json                # every number, not only those of the table

Numbers are named task/metric or task/metric/detail; error rates and accuracies are percentages.
Axes: N and M rows, D width, V vocabulary.
"""

import contextlib
import functools
import itertools
import json
import math
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, NamedTuple

import torch
import torch.nn.functional as F
from tqdm import tqdm

import corpora
from corpora.device import usable_device
from corpora.folder import read_first, read_log, read_results, write_results
from corpora.program import BadInput, Parser, comma_list, did_you_mean, exit_status
from corpora.store import digest
from data import Tokenizer, rows_of
from model import KeyValueCache, Packed, load

# ---- embed


@contextlib.contextmanager
def in_eval_mode(model):
    """Work without dropout and gradients, and leave the model in the mode that it was in."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def token_batches(lengths, tokens):
    """Rows of these lengths in batches of at most `tokens` tokens -> lists of row numbers."""
    batches = []
    room = 0
    # The longest come first: then memory runs out at once or never.
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] > room:
            batches.append([])
            # A row that is longer than a batch is a batch of its own.
            room = max(tokens, lengths[i])
        batches[-1].append(i)
        room -= lengths[i]
    return batches


def read_rows(model, rows, read, tokens_per_batch=4096):
    """Apply read(packed) to rows of ids, batch by batch -> what it finds for each row."""
    # Equal rows are read once. In another batch their vectors would be rounded otherwise, and the
    # two could then rank differently.
    keys = [tuple(row) for row in rows]
    rows = list(dict.fromkeys(keys))
    found = {}
    device = next(model.parameters()).device
    batches = token_batches([len(row) for row in rows], tokens_per_batch)
    # disable=None: there is no bar where stderr is a file.
    bar = tqdm(total=len(rows), desc="embed", unit=" texts", leave=False, disable=None)
    with in_eval_mode(model), bar:
        for batch in batches:
            packed = Packed.of([rows[i] for i in batch], causal=model.config.causal).to(device)
            for i, value in zip(batch, read(packed)):
                found[rows[i]] = value
            bar.update(len(batch))
    return [found[key] for key in keys]


def finite(found):
    """The tensors that were found for texts, one a text, if all are finite; otherwise BadInput."""
    bad = sum(not value.isfinite().all() for value in found)
    if bad:
        raise BadInput(f"the model gives NaN or infinity for {bad} of {len(found)} texts: its "
                       "training has diverged")
    return found


def embed(model, rows, pool=None, tokens_per_batch=4096):
    """N rows of ids -> vectors (N, D), float32 on the CPU, of length 1 if the model says so.
    BadInput if one is not finite."""

    def read(packed):
        return model.pool(model(packed), packed, pool).float().cpu()  # (rows of the batch, D)

    if not rows:
        return torch.empty(0, model.config.width)
    found = read_rows(model, rows, read, tokens_per_batch)
    vectors = finite(torch.stack(found))  # (N, D)
    return F.normalize(vectors, dim=1) if model.config.normalize else vectors


def encode(model, tokenizer, texts, affixes=((), None), max_length=None, pool=None,
           tokens_per_batch=4096):
    """N texts -> vectors (N, D), as `embed`. A text is cut at max_length tokens, its row where the
    model ends; how many were cut is said on stderr. `affixes`: as `ids_of`. BadInput for one text
    in place of a list."""
    if isinstance(texts, str):
        raise BadInput(f"{texts[:60]!r} is one text, and would be read letter by letter: give a "
                       "list of texts")
    rows = ids_of(model, tokenizer, texts, affixes, max_length)
    return embed(model, rows, pool, tokens_per_batch)


def ids_of(model, tokenizer, texts, affixes=((), None), max_length=None):
    """N texts -> rows of ids [CLS] prefix text suffix, of affixes (prefix, suffix); without a
    suffix [SEP]."""
    # As in training, max_length counts the tokens of the text, whatever stands around it.
    longest = model.config.max_tokens or model.config.max_positions
    return rows_of(tokenizer, list(texts), *affixes, max_length=longest, max_text=max_length)


# ---- generate


def generate(model, prompts, stop, max_new, tokens_per_batch=16384):
    """Greedy continuations of rows of ids, of at most max_new tokens with the stop token -> (lists
    of ids without the stop token, did each end with it?). BadInput for NaN."""
    device = next(model.parameters()).device
    rows = [list(prompt) for prompt in prompts]
    limits = [min(len(row) + max_new, model.config.max_positions) for row in rows]
    stopped = [False] * len(rows)
    batches = token_batches(limits, tokens_per_batch)
    with in_eval_mode(model):
        for batch in tqdm(batches, "generate", leave=False, disable=None):
            active = [i for i in batch if len(rows[i]) < limits[i]]
            if not active:
                continue
            packed = Packed.of([rows[i] for i in active], causal=True).to(device)
            caches = KeyValueCache.of(model, len(active), max(limits[i] for i in active))
            states = model(packed, caches=caches)
            logits = model.logits(model.pool(states, packed, "last"))  # (active, V)
            while True:
                best, chosen = logits.max(1)
                if best.isnan().any():
                    raise BadInput("the model gives NaN for a token: its training has diverged")
                kept = []  # places in `active` of the rows that go on
                for place, (i, token) in enumerate(zip(active, chosen.tolist())):
                    if stopped[i] or len(rows[i]) == limits[i]:
                        continue
                    stopped[i] = token == stop
                    if not stopped[i]:
                        rows[i].append(token)
                        if len(rows[i]) < limits[i]:
                            kept.append(place)
                if not kept:
                    break
                # Finished rows leave when they are a quarter, because that copies all the others.
                if len(kept) <= 0.75 * len(active):
                    active = [active[place] for place in kept]
                    for cache in caches:
                        cache.keep(kept)
                # A finished row that is still there writes its last token again.
                tokens = torch.tensor([rows[i][-1] for i in active], device=device)
                positions = torch.tensor([len(rows[i]) - 1 for i in active], device=device)
                logits = model.extend(tokens, positions, caches)
    return [row[len(prompt):] for row, prompt in zip(rows, prompts)], stopped


class Answers(NamedTuple):
    prompts: list
    golds: list
    written: list
    stopped: list  # whether each ended with the stop token


def exact(written, gold):
    """The same text, apart from space around it. Nothing written is wrong, whatever the gold."""
    return bool(written.strip()) and written.strip() == gold.strip()


def starts_with(written, gold):
    """The weaker test, for a model that never learned to stop [LLM-JEPA, sec. A.7]."""
    return bool(gold.strip()) and written.strip().startswith(gold.strip())


def mean(values):
    return sum(values) / len(values)


def percent(flags):
    return 100 * mean(flags)


def with_mean(metric, values):
    """{detail: value} -> {metric: their mean, "metric/detail": value, ...}."""
    details = {f"{metric}/{detail}": value for detail, value in values.items()}
    return {metric: mean(values.values())} | details


def over_pairs(vectors, measure):
    """{language: (N, D)} and measure(x, y) -> {metric: number}, asked of every language and the
    first -> {metric: mean over the pairs, "metric/de-en": number, ...}."""
    first, *others = vectors
    by_metric = {}
    for other in others:
        for metric, value in measure(vectors[other], vectors[first]).items():
            by_metric.setdefault(metric, {})[f"{other}-{first}"] = value
    scores = {}
    for metric, values in by_metric.items():
        scores |= with_mean(metric, values)
    return scores


# ---- retrieval: is a sentence's translation found among all sentences of the other language?


def unit(z):
    """Rows scaled to length 1: (N, D) -> (N, D) float64. ValueError for NaN and infinity, whose
    ranking would look like a result."""
    z = torch.as_tensor(z).double()
    if not z.isfinite().all():
        raise ValueError("vectors must be finite")
    # A row of zeros has no direction, and stays zero.
    return F.normalize(z, dim=1, eps=1e-300)


class Nearest(NamedTuple):
    cosines: torch.Tensor  # (N, k) float64, best first
    indices: torch.Tensor  # (N, k)


def search(x, y, k):
    """The k <= M rows of y (M, D) nearest by cosine to each row of x (N, D). Of equally near rows
    the first wins."""
    targets = unit(y)                    # (M, D) float64
    rough_targets = targets.float()
    wide = min(len(targets), k + 4)      # candidates of a row
    # What a float32 product of unit vectors of D numbers can be wrong by.
    error = (targets.shape[1] + 8) * 2 ** -24
    found = []
    # At most 2 million cosines, or numbers of candidates, are in memory at once.
    most = 2 ** 21 // max(len(targets), wide * targets.shape[1])
    for rows in unit(x).split(max(1, most)):
        rough, candidates = largest(rows.float() @ rough_targets.T, wide)  # (n, wide)
        candidates = candidates.sort(dim=1).values
        near = first_best((targets[candidates] @ rows[:, :, None])[:, :, 0], candidates, k)
        # Where a row that is no candidate could be as near, all rows are compared exactly.
        unsure = near.cosines[:, -1] <= rough[:, -1] + error
        if wide < len(targets) and unsure.any():
            every = torch.arange(len(targets)).expand(int(unsure.sum()), -1)
            exact = first_best(rows[unsure] @ targets.T, every, k)
            near.cosines[unsure], near.indices[unsure] = exact
        found.append(near)
    return Nearest(*map(torch.cat, zip(*found)))


def largest(cosines, k, group=64):
    """The k largest of each row of (n, M) and their places, (n, k) each: looked for in the k groups
    of columns with the largest maxima, since no other group can have one. Faster than in all M."""
    n, m = cosines.shape
    whole = m // group * group  # the columns behind are looked at, too
    if m <= k * group:
        return cosines.topk(k, dim=1)
    maxima = cosines[:, :whole].unflatten(1, (-1, group)).amax(2)  # (n, groups)
    groups = maxima.topk(k, dim=1).indices
    places = (groups[:, :, None] * group + torch.arange(group)).flatten(1)
    places = torch.cat([places, torch.arange(whole, m).expand(n, -1)], 1)
    values, found = cosines.gather(1, places).topk(k, dim=1)
    return values, places.gather(1, found)


def first_best(cosines, indices, k):
    """The k largest of each row of cosines (n, W), whose places in y are `indices`, ascending."""
    # The last bits of a product depend on its place in the matrix. They are rounded off, as equal
    # vectors must have equal cosines; of those the first is the nearest by a hair.
    cosines = cosines.round(decimals=9)
    later = torch.arange(cosines.shape[1]) * (1e-10 / cosines.shape[1])  # (W,)
    best = (cosines - later).topk(k, dim=1).indices
    return Nearest(cosines.gather(1, best), indices.gather(1, best))


def by_margin(nearest, back):
    """For each row i of x (N, D) the row j of y, among its `nearest`, with the highest cos / m ->
    (N,): m is the mean of i's and j's mean cosines with their neighbours, and `back` holds the rows
    of x nearest to those of y. [Artetxe & Schwenk 2019]"""
    # A hub is near to everything. Its large m keeps it from being everybody's translation.
    m = (nearest.cosines.mean(1, keepdim=True) + back.cosines.mean(1)[nearest.indices]) / 2
    best = (nearest.cosines / m).argmax(1, keepdim=True)  # (N, 1)
    return nearest.indices.gather(1, best)[:, 0]


def mine(x, y, k=4):
    """The row of y (M, D) with the best margin for each row of x (N, D) -> (N,)."""
    return by_margin(search(x, y, min(k, len(y))), search(y, x, min(k, len(x))))


def mistakes(found, texts=None):
    """Is each found row (N,) wrong? Right is the row of the same number or, given the texts, any
    row with an equal text."""
    texts = range(len(found)) if texts is None else texts
    return [texts[i] != texts[j] for i, j in enumerate(found.tolist())]


def xsim(x, y, texts=None, k=4):
    """Percent of the rows of x whose translation is not found in y: (N, D), (N, D) -> 0..100.
    [Heffernan et al. 2022; with the texts of y as LASER's command]"""
    return percent(mistakes(mine(x, y, k), texts))


def xsim_plus(x, y, negatives, hard, texts):
    """xsim when altered rows join y (N, D): negatives (M, D), hard [(text, row of y it was made
    from, type)], texts of y -> {"xsim++": percent wrong, "xsim++/TYPE": percent that took such an
    altered copy of their own text, "xsim++/misaligned": all other errors}. [Chen et al. 2023]"""
    # More targets change the margin of every row, so nothing of xsim can be used again.
    found = mine(x, torch.cat([y, negatives]))  # (N,)
    wrong = mistakes(found, [*texts, *(text for text, _, _ in hard)])
    counts = dict.fromkeys([*sorted({kind for _, _, kind in hard}), "misaligned"], 0)
    for i, j in enumerate(found.tolist()):
        error = "misaligned"
        if j >= len(y):
            _, source, kind = hard[j - len(y)]
            error = kind if texts[source] == texts[i] else error
        counts[error] += wrong[i]
    shares = {f"xsim++/{error}": 100 * count / len(x) for error, count in counts.items()}
    return {"xsim++": percent(wrong)} | shares


def retrieval(vectors, texts, negatives=None, hard=()):
    """Every language searched in the first: {language: (N, D)}, {language: N texts}, and for xsim++
    the altered rows as `xsim_plus` takes them -> {metric: mean, "metric/de-en": ...}."""
    texts = next(iter(texts.values()))

    def measure(x, y):
        plus = xsim_plus(x, y, negatives, hard, texts) if hard else {}
        return {"xsim": xsim(x, y, texts)} | plus

    scores = over_pairs(vectors, measure)
    # Of the types of errors of xsim++ only the mean is kept.
    return {name: value for name, value in scores.items() if name.count("/") < 2}


# ---- geometry: is the space in use, or has the encoder collapsed?


def spectrum(z, center):
    """Singular values in float64, largest first: (N, D) -> (min(N, D),)."""
    z = torch.as_tensor(z).double()
    # Below this is the rounding of float32 vectors, which would give one point many directions.
    floor = 1e-7 * z.norm()
    if center:
        z = z - z.mean(0)
    gram = z.T @ z if len(z) > z.shape[1] else z @ z.T  # the smaller of the two
    s = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().flip(0)
    return torch.where(s > floor, s, 0)


def rankme(z):
    """The directions in use, exp(-sum p log p) with p = s / sum s + 1e-7 and s the singular values:
    (N, D) -> 1..min(N, D). [Garrido et al. 2023]"""
    # It grows with N: only numbers of equally many rows can be compared.
    s = spectrum(z, center=False)
    p = s / s.sum().clamp(min=1e-300) + 1e-7
    return math.exp(torch.special.entr(p).sum().item())


def unit_or_zero(z):
    """Unit rows where a row of zeros, which has no direction, gets a dimension of its own, so that
    all such rows are one point: (N, D) -> (N, D + 1)."""
    u = unit(z)
    return torch.cat([u, (u == 0).all(1, keepdim=True)], 1)


def uniformity(z):
    """log mean exp(-2 |u_i - u_j|^2) over all i != j of unit rows: (N, D), N > 1 -> 0 (one point)
    ..-4 (the whole sphere). [Wang & Isola 2020, sec. 4]"""
    u = unit_or_zero(z)  # (N, D + 1)
    # |u_i - u_j|^2 = 2 - 2 cos. The pairs i = j would bias the mean upwards and are taken out.
    total = -(4 * (u.square().sum(1) - 1)).exp().sum().item()
    for rows in u.split(1024):
        total += (4 * (rows @ u.T - 1)).exp().sum().item()  # (1024, N)
    return math.log(total / (len(u) * (len(u) - 1)))


def std(z):
    """Standard deviation of each dimension of the unit rows, mean, times sqrt(D): (N, D) -> 0 (one
    point)..1 (healthy). [Chen & He 2021, SimSiam, fig. 2]"""
    u = unit(z)  # (N, D)
    return u.std(0, correction=0).mean().item() * math.sqrt(u.shape[1])


def cosines(x, y):
    """Cosine of row i of x and row i of y: (N, D), (N, D) -> (N,)."""
    return (unit(x) * unit(y)).sum(1)


def random_cosine(x, y):
    """Mean cosine of row i of x and row j != i of y: (N, D), (N, D), N > 1 -> -1..1."""
    u = unit_or_zero(x)  # (N, D + 1)
    v = unit_or_zero(y)  # (N, D + 1)
    # The sum over all pairs is the product of two sums.
    return ((u.sum(0) @ v.sum(0) - (u * v).sum()) / (len(u) * (len(u) - 1))).item()


def pair_cosines(x, y):
    return {"cosine/translations": cosines(x, y).mean().item(),
            "cosine/different": random_cosine(x, y)}


def geometry(vectors):
    """{language: (N, D)}, aligned, N > 1 -> means over languages, or over pairs with the first. All
    cosines but "translations" are of unrelated sentences. [BERT-JEPA, tables 4-7]"""
    each = list(vectors.values())
    scores = {"rankme": mean([rankme(z) for z in each])}
    scores["rankme_share"] = 100 * scores["rankme"] / min(each[0].shape)
    scores["uniformity"] = mean([uniformity(z) for z in each])
    scores["std"] = mean([std(z) for z in each])
    scores["length"] = mean([z.norm(dim=1).mean().item() for z in each])
    scores["cosine/same"] = mean([random_cosine(z, z) for z in each])
    zero = percent((torch.cat(each) == 0).all(1).tolist())
    if zero:
        scores["zero"] = zero
    return scores | over_pairs(vectors, pair_cosines)


def diagnose(results, views=2):
    """Is the encoder collapsing? Results of `geometry` or `run` -> measures and verdict, a line."""
    found = {name.removeprefix("geometry/"): value for name, value in results.items()}
    # Neither sign is enough alone. A pretrained BERT has a random cosine of .99 and can be trained
    # [BERT-JEPA, table 4], and vectors on a line through 0 have a random cosine of 0.
    together = found["cosine/same"]
    few = found["rankme_share"] < 5 or found["rankme"] < 2
    # With one view nobody taught the model what a translation is.
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
    if "zero" in found:
        verdict += f", {found['zero']:.0f} % of the vectors are zero"
    positive = f" | cos(pos) {found['cosine/translations']:.2f}" if pairs else ""
    return (f"health: RankMe {found['rankme']:.1f} ({found['rankme_share']:.0f} %) | cos(rand) "
            f"{together:.2f}{positive} | unif {found['uniformity']:.2f} | std {found['std']:.2f} | "
            f"length {found['length']:.1f} -> {verdict}")


# ---- the probe: what do vectors know of a sentence?


def linear_probe(x, labels, queries, gold):
    """Percent of the queries (M, D) whose class a linear map finds that was trained on x (N, D) and
    N labels: ridge regression on one-hot classes, in closed form."""
    classes = sorted(set(labels), key=str)
    targets = torch.tensor([classes.index(label) for label in labels])
    targets = F.one_hot(targets).double()                            # (N, classes)
    center = x.double().mean(0)                                      # (D,)
    z = x.double() - center                                          # (N, D)
    gram = z.T @ z                                                   # (D, D)
    # The penalty is relative to the mean variance of a dimension, so the scale does not count.
    gram.diagonal().add_(.01 * gram.diagonal().mean() + 1e-300)
    weight = torch.linalg.solve(gram, z.T @ targets)                 # (D, classes)
    scores = (queries.double() - center) @ weight + targets.mean(0)  # (M, classes)
    found = scores.argmax(1).tolist()                                # (M,)
    return percent([classes[number] == label for number, label in zip(found, gold)])


def rank_correlation(a, b):
    """Spearman's correlation of the ranks: (N,), (N,) -> -1..1; 0 if either is constant."""
    ranks = []
    for values in (a, b):
        # Values that differ by rounding alone are equal, and equal values share their rank.
        values = torch.as_tensor(values, dtype=torch.float64).round(decimals=9)  # (N,)
        _, place, count = values.unique(return_inverse=True, return_counts=True)
        ranks.append((count.cumsum(0) - (count.double() - 1) / 2)[place])
    # The correlation with a constant is 0 / 0, and counts as none.
    return torch.corrcoef(torch.stack(ranks))[0, 1].nan_to_num().item()


# ---- a model and the rows it is asked about


@dataclass
class Evaluation:
    """A model and the rows it is asked about. Vectors and answers are made once for all tasks.
    BadInput for fewer than two rows, and for a vector that is not finite."""
    model: torch.nn.Module
    tokenizer: Tokenizer
    rows: corpora.EvaluationRows
    affixes: Any = None             # (prefix, suffix) of the first column, and of the others
    max_length: int | None = None   # tokens of a text; the rest is cut; None: all the model takes
    answer_limit: int | None = 200  # rows that are answered
    max_new: int | None = None      # tokens of an answer
    views: int = 2                  # texts of a training example
    pool: str | None = None         # None: the model's

    def __post_init__(self):
        self.texts = self.rows.texts    # {column: N texts}, aligned
        self.hard = self.rows.hard      # [(text, row of the first column, type of error)]
        self.system = self.rows.system  # N texts that open a chat, or None
        self.affixes = self.affixes or (((), None), ((), None))
        self.pool = self.pool or self.model.config.pool
        self.count = len(next(iter(self.texts.values())))  # N
        if self.count < 2:
            raise BadInput(f"{self.rows.name} gives {self.count} of at least 2 rows that are "
                           "needed: a larger --limit, another --split or other --data may have "
                           "them")

    def again(self):
        """An Evaluation of the same rows, for when the model has changed."""
        other = replace(self)
        # The ids are taken over, so that it is not said again what was cut.
        other.ids = self.ids
        return other

    @property
    def label(self):
        """The rows in words, with a hash of their texts: two files can have the same name."""
        columns = ", ".join(self.texts)
        return f"{self.count} rows of {self.rows.name} ({columns}), {digest(self.texts)[:8]}"

    def ids_of(self, texts, column=0):
        """N texts -> rows of ids, as those of a column are."""
        affixes = self.affixes[min(column, 1)]
        return ids_of(self.model, self.tokenizer, texts, affixes, self.max_length)

    @functools.cached_property
    def ids(self):
        """{column: N rows of ids}, each [CLS] (system [SEP]) prefix text suffix."""
        found = {}
        for column, (name, texts) in enumerate(self.texts.items()):
            found[name] = self.ids_of(texts, column)
        if self.system:
            chat = self.tokenizer.special.chat
            affixes = (chat.system, chat.end)
            openings = ids_of(self.model, self.tokenizer, self.system, affixes, self.max_length)
            for name, rows in found.items():
                # The opening has the [CLS] of both.
                found[name] = [[*opening, *row[1:]] for opening, row in zip(openings, rows)]
        return found

    @functools.cached_property
    def vectors(self):
        """The sentence vectors of the rows -> {column: (N, D)}."""
        rows = sum(self.ids.values(), [])
        vectors = embed(self.model, rows, self.pool)  # (columns * N, D)
        return dict(zip(self.ids, vectors.split(self.count)))

    @functools.cached_property
    def answers(self):
        return self.answers_of(slice(self.answer_limit))

    def answers_of(self, rows):
        """Let a causal model continue [CLS] (system [SEP]) prompt [SEP] up to [SEP], for a slice of
        the rows -> Answers."""
        prompts, golds = (texts[rows] for texts in self.texts.values())
        system = self.system and self.system[rows]
        special = self.tokenizer.special
        max_new = self.max_new or 2 * max(map(len, self.tokenizer.encode(golds))) + 8
        # These ids are [SEP], or a chat model's own marks.
        suffix = [*special.chat.end, *special.chat.assistant]
        # A prompt that would fill the model is cut, so that there is room for its answer.
        longest = self.model.config.max_positions
        ids = rows_of(self.tokenizer, prompts, special.chat.user, suffix, system, self.max_length,
                      max(longest // 2, longest - max_new))
        written, stopped = generate(self.model, ids, special.sep, max_new)
        return Answers(prompts, golds, list(map(self.tokenizer.decode, written)), stopped)


# ---- tasks


class Task(NamedTuple):
    scores: Callable       # evaluation -> {"metric" or "metric/detail": number}
    unavailable: Callable  # evaluation -> why it cannot be done, or ""
    about: dict            # {metric: (unit, which way is better, what it is)}
    views: int = 1         # done unasked of objectives with so many views or more


def task_retrieval(evaluation):
    hard = evaluation.ids_of([text for text, _, _ in evaluation.hard])
    negatives = embed(evaluation.model, hard, evaluation.pool)  # (M, D)
    scores = retrieval(evaluation.vectors, evaluation.texts, negatives, evaluation.hard)
    # An equal text is right, so with few different texts the task is easier than its rows say.
    distinct = len(set(next(iter(evaluation.texts.values()))))
    if distinct < evaluation.count:
        scores["distinct"] = distinct
    return {"rows": evaluation.count} | scores


def no_retrieval(evaluation):
    if len(evaluation.texts) > 1:
        return ""
    return f"looks for translations, and {evaluation.rows.name} has one text a row: leave it out"


def task_geometry(evaluation):
    return {"rows": evaluation.count} | geometry(evaluation.vectors)


def task_probe(evaluation):
    """A linear probe for each property of labelled texts, and the rank correlation of cosines with
    graded similarity."""
    texts, properties = evaluation.rows.labelled
    first, second, similarity = zip(*evaluation.rows.graded)
    rows = evaluation.ids_of([*texts, *first, *second])
    vectors = embed(evaluation.model, rows, evaluation.pool)
    z, x, y = vectors.split([len(texts), len(first), len(second)])  # (N, D), (M, D), (M, D)
    found = {}     # {property: accuracy}
    majority = []  # share of its most frequent class
    for name, labels in properties.items():
        # Even rows are for training, odd rows for testing.
        gold = labels[1::2]
        found[name] = linear_probe(z[::2], labels[::2], z[1::2], gold)
        majority.append(100 * max(gold.count(label) for label in set(gold)) / len(gold))
    scores = {"rows": len(texts), "mean": mean(found.values()), "majority": mean(majority)} | found
    return scores | {"similarity": 100 * rank_correlation(cosines(x, y), similarity)}


def no_probe(evaluation):
    name = evaluation.rows.name
    return "" if evaluation.rows.labelled else f"needs labels, and {name} has none: give --data toy"


def task_generate(evaluation):
    answers = evaluation.answers
    pairs = list(zip(answers.written, answers.golds))
    return {"rows": len(pairs), "exact": percent([exact(*pair) for pair in pairs]),
            "startswith": percent([starts_with(*pair) for pair in pairs]),
            "stop": percent(answers.stopped)}


def no_generate(evaluation):
    if not evaluation.model.config.causal:
        return "needs a causal model (objectives ntp, llm-jepa), and this one reads both ways"
    if len(evaluation.texts) != 2:
        return (f"answers one column with another, and {evaluation.rows.name} has "
                f"{len(evaluation.texts)}: choose two with --langs a,b")
    return ""


ROWS = {"rows": ("", "", "rows of the data")}
ANSWERS = ROWS | {"stop": ("%", "higher", "it ended with the stop token, and was not cut")}
TASKS = {
    "retrieval": Task(task_retrieval, no_retrieval, views=2, about=ROWS | {
        "xsim": ("%", "lower", "wrong translation found: ratio margin, k = 4"),
        "xsim++": ("%", "lower", "wrong translation found among hard negatives"),
        "distinct": ("", "", "different texts among those searched; equal ones count as right"),
    }),
    "geometry": Task(task_geometry, lambda evaluation: "", about=ROWS | {
        "rankme": ("", "higher", "directions in use"),
        "rankme_share": ("%", "higher", "rankme as a share of the most possible"),
        "uniformity": ("", "lower", "0 is one point, -4 the whole sphere"),
        "std": ("", "higher", "deviation of unit rows, 0 is one point, 1 healthy"),
        "length": ("", "", "mean length of the vectors, before they are made unit vectors"),
        "zero": ("%", "lower", "vectors of zeros, which have no direction"),
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
    }),
}


def choose_tasks(evaluation, names=None, tasks=TASKS):
    """The tasks to do: those asked for or, where None are, all that apply. BadInput for one that is
    unknown or unavailable."""
    if names is None:
        return [name for name, task in tasks.items()
                if task.views <= evaluation.views and not task.unavailable(evaluation)]
    if not names:
        raise BadInput(f"--tasks names nothing: give some of {', '.join(tasks)}")
    for name in names:
        if name not in tasks:
            # The core does not know what tasks/ has.
            more = f"; more tasks: python -m tasks RUN --tasks {name}" if tasks is TASKS else ""
            near = did_you_mean(name, tasks, more)
            raise BadInput(f"task {name!r} is none of {', '.join(tasks)}{near}")
        if reason := tasks[name].unavailable(evaluation):
            raise BadInput(f"task {name!r} {reason}")
    return names


def run(evaluation, names=None, tasks=TASKS):
    """Do the tasks that `choose_tasks` gives -> {"task/metric": number}."""
    results = {}
    for name in choose_tasks(evaluation, names, tasks):
        found = tasks[name].scores(evaluation)
        results |= {f"{name}/{metric}": value for metric, value in found.items()}
    return results


class Shown(NamedTuple):
    query: str
    found: str  # what the model writes, or takes for the query's translation
    gold: str
    right: bool


def examples(evaluation):
    """Five rows to read -> list of Shown: answers of a causal model, else the translations found,
    from the languages in turn. [] for a model that was taught neither."""
    first, *others = evaluation.texts
    if not others or evaluation.views < 2:
        return []
    step = max(1, evaluation.count // 5)
    rows = slice(0, 5 * step, step)
    shown = []
    if not no_generate(evaluation):
        made = evaluation.answers_of(rows)
        shown = zip(made.prompts, made.written, made.golds)
    else:
        golds = evaluation.texts[first]
        for row, other in zip(range(evaluation.count)[rows], itertools.cycle(others)):
            found = mine(evaluation.vectors[other], evaluation.vectors[first])[row]
            shown.append((evaluation.texts[other][row], golds[found], golds[row]))
    return [Shown(*texts, exact(*texts[1:])) for texts in shown]


# ---- the table


def about(name, tasks=TASKS):
    """A result's name -> (unit, which way is better, what it is); the last is "" for a detail."""
    task, _, whole = name.partition("/")
    # train.py measures the loss of the objective and its terms.
    if task == "validation":
        # Two of the terms are weights and no losses.
        better = "" if whole in ("lambda", "teacher_start") else "lower"
        return "", better, "on held-out rows, without dropout"
    known = tasks[task].about if task in tasks else {}
    metric = whole
    # xsim++/de-en is a detail of xsim++.
    while metric not in known and "/" in metric:
        metric = metric.rpartition("/")[0]
    unit, better, what = known.get(metric, ("", "", ""))
    return unit, better, what if metric == whole else ""


def table(results, before=None, tasks=TASKS, rest="--json"):
    """Results, and those of the untrained model -> at most 20 aligned lines: name, values, unit,
    which way is better, what it is. `rest` says where all other numbers are."""
    names = list(results)
    # Details, such as single languages, are left out first.
    if len(names) > 20:
        names = [name for name in names if about(name, tasks)[2]][:20]
    width = max(map(len, names))
    lines = [f"{'':{width}} untrained   trained"] if before else []
    for name in names:
        unit, better, what = about(name, tasks)
        line = f"{name:{width}}"
        for column in filter(None, (before, results)):
            # A count is an int, and has no digits behind the point.
            value = column.get(name, "-")
            digits = 2 if unit else 4
            line += f" {value:>9.{digits}f}" if isinstance(value, float) else f" {value:>9}"
        lines.append(f"{line} {unit:1} {better:6} {what}".rstrip())
    if len(names) < len(results):
        lines.append(f"and {len(results) - len(names)} more numbers: {rest}")
    return "\n".join(lines)


def headline(results, step):
    """An evaluation in training, on one line."""
    parts = []
    for name in ("validation/loss", "retrieval/xsim", "retrieval/xsim++", "generate/exact",
                 "probe/mean"):
        if name in results:
            unit = about(name)[0]
            parts.append(f"{name} {results[name]:.1f} %" if unit else f"{name} {results[name]:.3f}")
    health = diagnose(results, views=2 if "retrieval/xsim" in results else 1)
    # Random weights look collapsed, which is no verdict on the training.
    parts.append(health if step else health.split(" -> ")[0] + " -> untrained")
    return "  ".join(parts)


# ---- the folder of a run


class RunFolder(NamedTuple):
    folder: Path
    model: torch.nn.Module
    tokenizer: Tokenizer
    first: dict      # the first line of the log
    config: dict     # its "config"
    untrained: dict  # the results of step 0; {} if there are none


def open_run(folder, device="cpu"):
    """The folder of a run -> RunFolder. BadInput if it is not whole."""
    folder = Path(folder)
    first = read_first(folder)
    model = load(folder / "model.pt", device)
    tokenizer = Tokenizer.read(folder / "tokenizer.json")
    is_other = first.get("tokenizer_hash", tokenizer.hash) != tokenizer.hash
    if is_other or tokenizer.vocab > model.config.vocab:
        raise BadInput(f"{folder}/tokenizer.json is not that of the training: put that file back")
    # The model of step 0 is gone, but train.py evaluated it on the rows for validation.
    untrained = {}
    for record in read_log(folder):
        if "eval" in record and record.get("step") == 0:
            untrained = record["eval"]
    return RunFolder(folder, model, tokenizer, first, first["config"], untrained)


def say_trained_on(config, rows):
    """Say on stderr how many of some EvaluationRows a run of this config was trained on, and the
    runs that it began from."""
    texts = list(zip(*rows.texts.values()))
    count = 0
    try:
        while config:
            if config.get("data"):
                count = max(count, corpora.count_trained_on(
                    config["data"], texts, comma_list(config.get("langs", "")),
                    config.get("skip_bad", False), not config.get("eval_data"),
                    config.get("header", "yes")))
            config = config.get("init") and read_first(config["init"])["config"]
    except BadInput as error:
        print(f"note: it cannot be told which of these rows were trained on: {error}",
              file=sys.stderr)
    if count:
        print(f"warning: {count:,} of {len(texts):,} rows of {rows.name} were trained on",
              file=sys.stderr)


def evaluation_of(opened, data=None, langs=None, split=None, limit=None, max_new=None, pool=None,
                  header=None):
    """A RunFolder and what was asked for -> Evaluation."""
    for flag, value, least in (("limit", limit, 0), ("max-new", max_new, 1)):
        if value is not None and value < least:
            raise BadInput(f"--{flag} {value} is too low: give at least {least}")
    config = opened.config
    own = config.get("eval_data") or config["data"]
    spec = data or own
    if not spec:
        raise BadInput(f"{opened.folder} has no data of its own: name some with --data")
    # The run's own file may be given under another name.
    if own and os.path.realpath(spec) == os.path.realpath(own):
        spec = own
        langs = langs or comma_list(config.get("langs", ""))
        header = header or config.get("header")
    if not split:
        split = "test" if spec in corpora.EMBEDDED or spec == config["data"] else "all"
    if limit is None and not Path(spec).is_dir():
        limit = 1000
    skip_bad = config.get("skip_bad", False)
    header = header or "yes"
    try:
        columns = corpora.open_text(spec, langs, skip_bad, header=header).columns
    except BadInput as error:
        if data:
            raise
        raise BadInput(f"{opened.folder} is asked about its own data: {error}; other rows come "
                       "with --data") from None
    # A run that was trained with system texts can be asked without them.
    system = config.get("chat") == "system" and "system" in columns
    rows = corpora.evaluation_rows(spec, langs, split, limit, skip_bad, system, header)
    if spec != own or split not in ("valid", "test") or config.get("init"):
        say_trained_on(config, rows)
    return Evaluation(opened.model, opened.tokenizer, rows, opened.first.get("affixes"),
                      config.get("max_length"), answer_limit=None, max_new=max_new,
                      views=opened.first.get("views", 2), pool=pool)


# ---- command line

def make_parser(prog, description, tasks):
    """The Parser of a program that evaluates a run."""
    parser = Parser(prog, description)
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run, such as out/mexma")
    add("--tasks", type=comma_list, help=f"some of {', '.join(tasks)}")
    add("--data", help="other rows than the run's own: toy, files, or a folder of CODE.devtest")
    add("--langs", type=comma_list, default=[], help="columns, as en,de; the first is searched in")
    add("--header", choices=("yes", "no"), help="does a table's first line name its columns? [yes]")
    add("--split", choices=("train", "valid", "test", "all"),
        help="of the run's own file valid and test are the same rows [test; of other files all]")
    add("--limit", type=int, help="at most so many rows, 0: all [1000; of a folder, all]")
    add("--max-new", type=int, help="cut answers after so many tokens")
    add("--pool", choices=("cls", "mean", "max", "last"), help="another pooling than the model's")
    add("--device", help="cpu, cuda, cuda:1 [cuda if there is one]")
    add("--json", action="store_true", help="print every number, as one JSON object")
    add("--out", help="JSON file for the numbers [RUN/eval.json; none if asked otherwise]")
    return parser


# Flags that change what the numbers are about. Without these the numbers are of the run's own rows.
OTHERWISE = ("data", "langs", "header", "split", "limit", "max_new", "pool")


def results_file(options, is_other=False):
    """The file for the numbers: --out or, for the run's own rows, RUN/eval.json; None for other
    rows. BadInput for an --out that cannot be written, or would destroy something else."""
    if not options.out:
        asked = [vars(options).get(name) not in (None, []) for name in OTHERWISE]
        return None if is_other or any(asked) else Path(options.run, "eval.json").absolute()
    path = Path(options.out).absolute()
    is_foreign = os.path.lexists(path) and "rows" not in read_results(path)
    if is_foreign or not path.parent.is_dir():
        raise BadInput(f"--out {options.out}: name a new file, or one with results, in a folder "
                       "that is there")
    return path


def main(argv):
    parser = make_parser("evaluate.py", "Evaluate a run. More: python -m tasks RUN --help", TASKS)
    options = parser.parse_args(argv)
    opened = open_run(options.run, usable_device(options.device))
    evaluation = evaluation_of(opened, options.data, options.langs, options.split, options.limit,
                               options.max_new, options.pool, options.header)
    names = choose_tasks(evaluation, options.tasks)
    path = results_file(options)
    results = run(evaluation, names)
    if options.json:
        print(json.dumps(results))
    else:
        before = opened.untrained if path and not options.out else None
        print(table(results, before))
        if before:
            print("untrained: at step 0, on the run's rows for validation; with other numbers of "
                  "rows RankMe, xsim and probes are not the same measure")
        if "geometry/rankme" in results:
            print(diagnose(results, evaluation.views))
    if path:
        write_results(opened.folder, path, results, evaluation.label)


if __name__ == "__main__":
    sys.exit(exit_status(main, sys.argv[1:]))
