"""Evaluate a trained model: sentence embeddings, retrieval across languages, geometry, generation.

    python evaluate.py out/x                       # all tasks that apply, on the run's test rows
    python evaluate.py out/x --data pairs.tsv --langs en,de --tasks retrieval
    python evaluate.py out/x --json                # every number, not only those of the table

Numbers are named task/metric or task/metric/detail. N and M are rows, D the embedding width.
"""

import contextlib
import functools
import itertools
import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tqdm import tqdm

import corpora
from common import (
    BadInput,
    Parser,
    atomic_file,
    comma_list,
    did_you_mean,
    digest,
    file_hash,
    make_folder,
    run_program,
    shown,
    usable_device,
    warn,
)
from data import Tokenizer, tokenize_rows
from model import KeyValueCache, Packed, load

# ---- embeddings


@contextlib.contextmanager
def in_eval_mode(model):
    """Turn off dropout and gradients, and restore the model's mode at the end."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def token_batches(lengths, tokens):
    """Group rows into batches of at most `tokens` tokens. Return lists of row numbers."""
    batches = []
    room = 0
    # The longest rows come first: if memory runs out, it does so at once.
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] > room:
            batches.append([])
            room = max(tokens, lengths[i])  # a longer row is a batch of its own
        batches[-1].append(i)
        room -= lengths[i]
    return batches


def map_batches(model, rows, function, tokens_per_batch=4096):
    """Apply function(packed) to rows of ids, batch by batch. Return its value for each row."""
    # Deduplicate: the same text in two batches can get slightly different embeddings, which would
    # break ties at random.
    keys = [tuple(row) for row in rows]
    rows = list(dict.fromkeys(keys))
    values = {}
    device = next(model.parameters()).device
    batches = token_batches([len(row) for row in rows], tokens_per_batch)
    with in_eval_mode(model):
        for batch in tqdm(batches, "embed", leave=False, disable=None):  # None: no bar in a file
            packed = Packed.of([rows[i] for i in batch], causal=model.config.causal).to(device)
            for i, value in zip(batch, function(packed)):
                values[rows[i]] = value
    return [values[key] for key in keys]


def finite(values):
    """Return the values, one tensor per text, unchanged. Raises BadInput if one is not finite."""
    if bad := sum(not value.isfinite().all() for value in values):
        raise BadInput(f"the model returns NaN or infinity for {bad} of {len(values)} texts: its "
                       "training has diverged")
    return values


def embed(model, rows, pool=None):
    """Embed N rows of ids: (N, D) float32 on the CPU. Raises BadInput if one is not finite."""

    def pooled(packed):
        return model.pool(model(packed), packed, pool).float().cpu()  # (rows of the batch, D)

    if not rows:
        return torch.empty(0, model.config.width)
    z = finite(torch.stack(map_batches(model, rows, pooled)))  # (N, D)
    return F.normalize(z, dim=1) if model.config.normalize else z


def encode(model, tokenizer, texts, affixes=None, max_length=None, pool=None):
    """Embed N texts, each truncated to max_length tokens: (N, D) float32 on the CPU. affixes: the
    ids before and after a text, by default [CLS] and [SEP]. Raises BadInput for a bad text."""
    if isinstance(texts, str):
        raise BadInput(f"{shown(texts)!r} is one string: pass a list of texts")
    texts = list(texts)
    for index, text in enumerate(texts):
        try:
            text.encode()
        except (AttributeError, UnicodeEncodeError):
            raise BadInput(f"texts[{index}] is {shown(repr(text))}, which is not a text") from None
    return embed(model, encode_ids(model, tokenizer, texts, affixes, max_length), pool)


def encode_ids(model, tokenizer, texts, affixes=None, max_length=None, openings=None):
    """Tokenize N texts as rows of ids that fit into the model; see `data.tokenize_rows`."""
    # As in training, max_length counts the tokens of the text alone.
    longest = model.config.max_tokens or model.config.max_positions
    return tokenize_rows(tokenizer, texts, affixes, max_length=longest, max_text=max_length,
                         openings=openings)


# ---- generation


def generate(model, prompts, stop, max_new, tokens_per_batch=16384):
    """Continue rows of ids greedily by at most max_new tokens, the stop token included. Return the
    new ids without the stop token, and whether each row ended with it. Raises BadInput for NaN."""
    device = next(model.parameters()).device
    rows = [list(prompt) for prompt in prompts]
    limits = [min(len(row) + max_new, model.config.max_positions) for row in rows]
    stopped = [False] * len(rows)
    batches = token_batches(limits, tokens_per_batch)
    with in_eval_mode(model):
        for batch in tqdm(batches, "generate", leave=False, disable=None):
            batch = [i for i in batch if len(rows[i]) < limits[i]]
            if not batch:
                continue
            unfinished = set(batch)
            packed = Packed.of([rows[i] for i in batch], causal=True).to(device)
            caches = KeyValueCache.of(model, len(batch), max(limits[i] for i in batch))
            states = model(packed, caches=caches)
            logits = model.logits(model.pool(states, packed, "last"))  # (rows of the batch, V)
            while True:
                best, tokens = logits.max(1)
                if best.isnan().any():
                    raise BadInput("the model's logits are NaN: its training has diverged")
                for i, token in zip(batch, tokens.tolist()):
                    if i not in unfinished:
                        continue
                    stopped[i] = token == stop
                    if not stopped[i]:
                        rows[i].append(token)
                    if stopped[i] or len(rows[i]) == limits[i]:
                        unfinished.remove(i)
                if not unfinished:
                    break
                # Removing finished rows copies the cache, so wait until they are a quarter.
                if len(unfinished) <= 0.75 * len(batch):
                    kept = [index for index, i in enumerate(batch) if i in unfinished]
                    batch = [batch[index] for index in kept]
                    for cache in caches:
                        cache.keep(kept)
                # A finished row that is still in the batch repeats its last token.
                tokens = torch.tensor([rows[i][-1] for i in batch], device=device)
                positions = torch.tensor([len(rows[i]) - 1 for i in batch], device=device)
                logits = model.decode(tokens, positions, caches)
    return [row[len(prompt):] for row, prompt in zip(rows, prompts)], stopped


def exact(written, gold):
    """Are two texts equal apart from surrounding space? An empty answer is always wrong."""
    return bool(written.strip()) and written.strip() == gold.strip()


def starts_with(written, gold):
    """Does the answer begin with the gold text? For models that never stop [LLM-JEPA, sec. A.7]."""
    return bool(gold.strip()) and written.strip().startswith(gold.strip())


# ---- averages


def mean(values):
    return sum(values) / len(values)


def percent(flags):
    return 100 * mean(flags)


def with_mean(metric, values):
    """Return {metric: mean, "metric/detail": value, ...} of {detail: value}."""
    details = {f"{metric}/{detail}": value for detail, value in values.items()}
    return {metric: mean(values.values())} | details


def over_pairs(embeddings, measure):
    """Call measure(x, y) for every language x and the first language y; it returns {metric:
    number}. Return {metric: mean, "metric/de-en": number, ...}."""
    (first, y), *others = embeddings.items()
    pairs = {f"{name}-{first}": measure(x, y) for name, x in others}
    scores = {}
    for metric in next(iter(pairs.values()), ()):
        scores |= with_mean(metric, {pair: found[metric] for pair, found in pairs.items()})
    return scores


# ---- retrieval: find a sentence's translation among all sentences of the other language


def unit(z):
    """Scale rows to L2 norm 1 in float64: (N, D) -> (N, D). A row of zeros stays zero. Raises
    ValueError for NaN and infinity, because their ranking would look like a result."""
    z = torch.as_tensor(z).double()
    if not z.isfinite().all():
        raise ValueError("embeddings must be finite")
    return F.normalize(z, dim=1, eps=1e-300)


class Neighbors(NamedTuple):
    cosines: torch.Tensor  # (N, k) float64, best first
    indices: torch.Tensor  # (N, k)


def knn(x, y, k):
    """Find the k <= M rows of y (M, D) with the highest cosine to each row of x (N, D), exactly.
    Ties go to the lowest index."""
    targets = unit(y)                    # (M, D) float64
    targets32 = targets.float()
    width = min(len(targets), k + 4)     # candidates of a row
    error = (targets.shape[1] + 8) * 2 ** -24  # bound of a float32 cosine's rounding error
    results = []
    # At most 2 million cosines, or numbers of candidates, are in memory at once.
    block = 2 ** 21 // max(len(targets), width * targets.shape[1])
    for rows in unit(x).split(max(1, block)):
        # Find candidates in float32, then compute their cosines in float64.
        rough, candidates = grouped_topk(rows.float() @ targets32.T, width)  # (n, width)
        candidates = candidates.sort(dim=1).values
        near = topk_first((targets[candidates] @ rows[:, :, None])[:, :, 0], candidates, k)
        # If a row outside the candidates could be as near, compare all rows in float64.
        unsure = near.cosines[:, -1] <= rough[:, -1] + error
        if width < len(targets) and unsure.any():
            everyone = torch.arange(len(targets)).expand(int(unsure.sum()), -1)
            near.cosines[unsure], near.indices[unsure] = topk_first(
                rows[unsure] @ targets.T, everyone, k)
        results.append(near)
    return Neighbors(*map(torch.cat, zip(*results)))


def grouped_topk(cosines, k, group=64):
    """Return the k largest of each row (n, M) and their columns, (n, k) each. Faster than topk:
    only the k groups of columns with the largest maxima can contain them."""
    n, m = cosines.shape
    whole = m // group * group  # the columns of the last, incomplete group are all searched
    if m <= k * group:
        return cosines.topk(k, dim=1)
    maxima = cosines[:, :whole].unflatten(1, (-1, group)).amax(2)  # (n, groups)
    groups = maxima.topk(k, dim=1).indices
    columns = (groups[:, :, None] * group + torch.arange(group)).flatten(1)
    columns = torch.cat([columns, torch.arange(whole, m).expand(n, -1)], 1)
    values, index = cosines.gather(1, columns).topk(k, dim=1)
    return values, columns.gather(1, index)


def topk_first(cosines, indices, k):
    """Return the k largest of each row (n, W) as Neighbors, the first of equal ones; `indices`
    (n, W) are their row numbers in y, ascending."""
    # The last bits of a matmul depend on the position in the matrix. Rounding makes equal vectors
    # have equal cosines, and a tiny penalty that grows with the index then breaks ties.
    cosines = cosines.round(decimals=9)
    penalty = torch.arange(cosines.shape[1]) * (1e-10 / cosines.shape[1])  # (W,)
    best = (cosines - penalty).topk(k, dim=1).indices
    return Neighbors(cosines.gather(1, best), indices.gather(1, best))


def margin_rank(forward, backward):
    """Rank by ratio margin: cos(x, y) divided by the mean similarity of x and y to their neighbors.
    Takes the Neighbors of x in y and of y in x. Return the best row of y for each row of x (N,).
    [Artetxe & Schwenk 2019]"""
    # A hub is near to everything. The division keeps it from being everybody's translation.
    similar = forward.cosines.mean(1, keepdim=True) + backward.cosines.mean(1)[forward.indices]
    best = (forward.cosines / (similar / 2)).argmax(1, keepdim=True)  # (N, 1)
    return forward.indices.gather(1, best)[:, 0]


def margin_search(x, y, k=4):
    """Find for each row of x (N, D) the row of y (M, D) with the best margin: (N,)."""
    return margin_rank(knn(x, y, min(k, len(y))), knn(y, x, min(k, len(x))))


def errors(retrieved, texts=None):
    """Return for each retrieved row number (N,) whether it is wrong. Correct is the same row or,
    given the texts, one with an equal text."""
    texts = range(len(retrieved)) if texts is None else texts
    return [texts[i] != texts[j] for i, j in enumerate(retrieved.tolist())]


def xsim(x, y, texts=None, k=4):
    """Return the retrieval error in percent of x (N, D) in y (N, D); texts: those of y.
    [Heffernan et al. 2022]"""
    return percent(errors(margin_search(x, y, k), texts))


def xsim_plus(x, y, negatives, hard, texts):
    """Return {"xsim++": retrieval error if altered sentences join y (N, D), "xsim++/TYPE": altered
    copies of the right text that were retrieved, "xsim++/misaligned": other errors}. negatives
    (M, D) embed hard: [(altered text, row of y, type)]; texts: those of y. [Chen et al. 2023]"""
    # More candidates change the margin of every row, so everything is searched again.
    retrieved = margin_search(x, torch.cat([y, negatives]))  # (N,)
    wrong = errors(retrieved, [*texts, *(text for text, _, _ in hard)])
    counts = dict.fromkeys([*sorted({kind for _, _, kind in hard}), "misaligned"], 0)
    for i, j in enumerate(retrieved.tolist()):
        _, source, kind = hard[j - len(y)] if j >= len(y) else ("", i, "misaligned")
        counts[kind if texts[source] == texts[i] else "misaligned"] += wrong[i]
    types = {f"xsim++/{error}": 100 * count / len(x) for error, count in counts.items()}
    return {"xsim++": percent(wrong)} | types


def retrieval(embeddings, texts, negatives=None, hard=()):
    """Search every language in the first: {language: (N, D)}, {language: N texts}, and for xsim++
    the altered sentences. Return {metric: mean, "metric/de-en": number, ...}."""
    texts = next(iter(texts.values()))

    def measure(x, y):
        plus = xsim_plus(x, y, negatives, hard, texts) if hard else {}
        return {"xsim": xsim(x, y, texts)} | plus

    scores = over_pairs(embeddings, measure)
    # Keep only the mean over languages of each error type.
    return {name: value for name, value in scores.items() if name.count("/") < 2}


# ---- geometry: do the embeddings use the space, or has the encoder collapsed?


def spectrum(z, center):
    """Return the singular values in float64, largest first: (N, D) -> (min(N, D),)."""
    z = torch.as_tensor(z).double()
    # Smaller values are float32 rounding, which would give identical embeddings a high rank.
    floor = 1e-7 * z.norm()
    if center:
        z = z - z.mean(0)
    gram = z.T @ z if len(z) > z.shape[1] else z @ z.T  # the smaller of the two
    s = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().flip(0)
    return torch.where(s > floor, s, 0)


def rankme(z):
    """Return the effective rank exp(-sum p log p), p = s / sum s + 1e-7, s the singular values:
    (N, D) -> 1..min(N, D). It grows with N. [RankMe, Garrido et al. 2023]"""
    s = spectrum(z, center=False)
    p = s / s.sum().clamp(min=1e-300) + 1e-7
    return math.exp(torch.special.entr(p).sum().item())


def unit_or_zero(z):
    """Scale rows to L2 norm 1: (N, D) -> (N, D + 1). Rows of zeros, which have no direction, get
    the last dimension, so that all of them are one point."""
    u = unit(z)
    return torch.cat([u, (u == 0).all(1, keepdim=True)], 1)


def uniformity(z):
    """Return log mean exp(-2 |u_i - u_j|^2) over all i != j of unit rows: (N, D), N > 1 -> 0 (one
    point)..-4 (the whole sphere). [Wang & Isola 2020, sec. 4]"""
    u = unit_or_zero(z)  # (N, D + 1)
    # |u_i - u_j|^2 = 2 - 2 cos. The pairs i = j would bias the mean, so subtract them.
    total = -(4 * (u.square().sum(1) - 1)).exp().sum().item()
    for rows in u.split(1024):
        total += (4 * (rows @ u.T - 1)).exp().sum().item()  # (1024, N)
    return math.log(total / (len(u) * (len(u) - 1)))


def std(z):
    """Return the mean standard deviation of the dimensions of unit rows, times sqrt(D): (N, D) -> 0
    (one point)..1 (healthy). [SimSiam, Chen & He 2021, fig. 2]"""
    u = unit(z)  # (N, D)
    return u.std(0, correction=0).mean().item() * math.sqrt(u.shape[1])


def cosines(x, y):
    """Return the cosine of row i of x and row i of y: (N, D), (N, D) -> (N,)."""
    return (unit(x) * unit(y)).sum(1)


def random_cosine(x, y):
    """Return the mean cosine of row i of x and row j != i of y: (N, D), (N, D), N > 1 -> -1..1."""
    u = unit_or_zero(x)  # (N, D + 1)
    v = unit_or_zero(y)  # (N, D + 1)
    # The sum over all pairs is the product of two sums.
    return ((u.sum(0) @ v.sum(0) - (u * v).sum()) / (len(u) * (len(u) - 1))).item()


def pair_cosines(x, y):
    return {"cosine/translations": cosines(x, y).mean().item(),
            "cosine/different": random_cosine(x, y)}


def geometry(embeddings):
    """Measure {language: (N, D)}, aligned, N > 1: means over languages, or over pairs with the
    first. All cosines but "translations" are of unrelated sentences. [BERT-JEPA, tables 4-7]"""
    each = list(embeddings.values())
    rank = mean([rankme(z) for z in each])
    return {"rankme": rank, "rankme_share": 100 * rank / min(each[0].shape),
            "uniformity": mean([uniformity(z) for z in each]),
            "std": mean([std(z) for z in each]),
            "norm": mean([z.norm(dim=1).mean().item() for z in each]),
            "cosine/same": mean([random_cosine(z, z) for z in each]),
            **over_pairs(embeddings, pair_cosines)}


def diagnose(results, views=2):
    """Return the health line, which says whether the encoder is collapsing, for the results of
    `geometry` or `run`."""
    scores = {name.removeprefix("geometry/"): value for name, value in results.items()}
    # Neither sign is enough alone. A pretrained BERT has a random cosine of 0.99 and can be trained
    # [BERT-JEPA, table 4], and embeddings on a line through 0 have a random cosine of 0.
    unrelated = scores["cosine/same"]
    low_rank = scores["rankme_share"] < 5 or scores["rankme"] < 2
    # An objective with one view never sees translations.
    pairs = views > 1 and "cosine/translations" in scores
    if low_rank and unrelated > .9:
        verdict = "COLLAPSING"
    elif unrelated > .5:
        verdict = "half-collapsed (all embeddings share one direction)"
    elif low_rank:
        verdict = "half-collapsed (low effective rank)"
    elif pairs and scores["cosine/translations"] <= scores["cosine/different"]:
        verdict = "translations are less similar than unrelated sentences"
    else:
        verdict = "ok"
    positive = f" | cos(pos) {scores['cosine/translations']:.2f}" if pairs else ""
    return (f"health: RankMe {scores['rankme']:.1f} ({scores['rankme_share']:.0f} %) | cos(rand) "
            f"{unrelated:.2f}{positive} | unif {scores['uniformity']:.2f} | std "
            f"{scores['std']:.2f} | embedding norm {scores['norm']:.1f} -> {verdict}")


# ---- the probe: which properties of a sentence can be read from its embedding?


def linear_probe(x, labels, queries, gold):
    """Train a linear classifier on x (N, D) and N labels, by ridge regression on one-hot classes.
    Return its accuracy in percent on the queries (M, D) and their gold labels."""
    classes = sorted(set(labels), key=str)
    targets = torch.tensor([classes.index(label) for label in labels])
    targets = F.one_hot(targets).double()                            # (N, classes)
    center = x.double().mean(0)                                      # (D,)
    z = x.double() - center                                          # (N, D)
    gram = z.T @ z                                                   # (D, D)
    # The penalty is relative to the mean variance of a dimension, so the scale has no effect.
    gram.diagonal().add_(.01 * gram.diagonal().mean() + 1e-300)
    weight = torch.linalg.solve(gram, z.T @ targets)                 # (D, classes)
    scores = (queries.double() - center) @ weight + targets.mean(0)  # (M, classes)
    predicted = scores.argmax(1).tolist()                            # (M,)
    return percent([classes[index] == label for index, label in zip(predicted, gold)])


def rank_correlation(a, b):
    """Return Spearman's correlation: (N,), (N,) -> -1..1; 0 if either is constant."""
    ranks = []
    for values in (a, b):
        # Values that differ by rounding errors alone are ties, and ties share their rank.
        values = torch.as_tensor(values, dtype=torch.float64).round(decimals=9)  # (N,)
        _, index, count = values.unique(return_inverse=True, return_counts=True)
        ranks.append((count.cumsum(0) - (count.double() - 1) / 2)[index])
    # The correlation with a constant is 0 / 0.
    return torch.corrcoef(torch.stack(ranks))[0, 1].nan_to_num().item()


# ---- a model and the rows on which it is evaluated


class Answers(NamedTuple):
    prompts: list
    golds: list
    written: list
    stopped: list  # whether the model generated the stop token


@dataclass
class Evaluation:
    """A model and the rows on which it is evaluated. Embeddings and answers are computed once."""
    model: torch.nn.Module
    tokenizer: Tokenizer
    rows: corpora.EvaluationRows
    affixes: Any = None             # (ids before, ids after) of the first view, and of the others
    max_length: int | None = None   # tokens of a text; None: all that the model can take
    answer_limit: int | None = 200  # number of rows that are answered
    max_new: int | None = None      # tokens of an answer
    views: int = 2                  # texts of a training example
    pool: str | None = None         # None: the model's

    def __post_init__(self):
        self.texts = self.rows.texts    # {column: N texts}, aligned
        self.hard = self.rows.hard      # [(altered text, row of the first column, error type)]
        special = self.tokenizer.special
        self.affixes = self.affixes or ((special.before, special.after),) * 2
        self.pool = self.pool or self.model.config.pool
        self.count = len(next(iter(self.texts.values())))  # N
        if self.count < 2:
            raise BadInput(f"{self.rows.name} has {self.count} rows to evaluate, and at least 2 "
                           "are needed: choose a larger limit, or other data")

    def with_fresh_cache(self):
        """Return an Evaluation of the same rows, for when the model has changed."""
        other = replace(self)
        other.ids = self.ids  # tokenizing again would print its warnings again
        return other

    @property
    def label(self):
        """The rows in words, with a hash of their texts, because two files can have one name."""
        columns = ", ".join(self.texts)
        return f"{self.count} rows of {self.rows.name} ({columns}), {digest(self.texts)[:8]}"

    def encode_ids(self, texts, column=0, openings=None):
        """Tokenize N texts like those of a column."""
        affixes = self.affixes[min(column, 1)]
        return encode_ids(self.model, self.tokenizer, texts, affixes, self.max_length, openings)

    def openings(self):
        """Return the ids of each row's system text, which opens a chat; None without them."""
        chat = self.tokenizer.special.chat
        return self.rows.system and [
            [*chat.start, *chat.system, *ids[:self.max_length].tolist(), *chat.end]
            for ids in self.tokenizer.encode(self.rows.system)]

    @functools.cached_property
    def ids(self):
        """{column: N rows of ids}."""
        openings = self.openings()
        return {name: self.encode_ids(texts, column, openings)
                for column, (name, texts) in enumerate(self.texts.items())}

    @functools.cached_property
    def embeddings(self):
        """{column: (N, D)}."""
        z = embed(self.model, sum(self.ids.values(), []), self.pool)  # (columns * N, D)
        return dict(zip(self.ids, z.split(self.count)))

    @functools.cached_property
    def answers(self):
        return self.answers_of(slice(self.answer_limit))

    @property
    def can_answer(self):
        """Is the model causal, and are there two columns: prompts and gold answers?"""
        return self.model.config.causal and len(self.texts) == 2

    def answers_of(self, rows):
        """Let a causal model answer a slice of the prompts, up to the stop token."""
        prompts, golds = (texts[rows] for texts in self.texts.values())
        openings = self.openings()
        chat = self.tokenizer.special.chat
        max_new = self.max_new or 2 * max(map(len, self.tokenizer.encode(golds))) + 8
        # [CLS] prompt [SEP], or the chat template of the model's family.
        affixes = (*chat.start, *chat.user), (*chat.end, *chat.assistant)
        # Truncate prompts that would leave no room for the answer.
        longest = self.model.config.max_positions
        longest = max(longest // 2, longest - max_new)
        ids = tokenize_rows(self.tokenizer, prompts, affixes, max_length=longest,
                            openings=openings and openings[rows])
        written, stopped = generate(self.model, ids, self.tokenizer.special.sep, max_new)
        return Answers(prompts, golds, list(map(self.tokenizer.decode, written)), stopped)


# ---- tasks: Evaluation -> {"metric" or "metric/detail": number}


class NotApplicable(BadInput):
    """A task does not fit the model or the rows."""


def task_retrieval(evaluation):
    """Search the translations of every language in the first."""
    if len(evaluation.texts) < 2:
        raise NotApplicable(f"retrieval needs translations, and {evaluation.rows.name} has one "
                            "text per row")
    hard = evaluation.encode_ids([text for text, _, _ in evaluation.hard])
    negatives = embed(evaluation.model, hard, evaluation.pool)  # (M, D)
    return {"rows": evaluation.count} | retrieval(
        evaluation.embeddings, evaluation.texts, negatives, evaluation.hard)


def task_geometry(evaluation):
    return {"rows": evaluation.count} | geometry(evaluation.embeddings)


def task_probe(evaluation):
    """Train a linear probe for each property of the labeled texts, and correlate cosines with
    graded similarity."""
    if not evaluation.rows.labelled:
        raise NotApplicable(f"probe needs labels, and {evaluation.rows.name} has none: use --data "
                            "toy")
    texts, properties = evaluation.rows.labelled
    first, second, similarity = zip(*evaluation.rows.graded)
    rows = evaluation.encode_ids([*texts, *first, *second])
    embeddings = embed(evaluation.model, rows, evaluation.pool)
    z, x, y = embeddings.split([len(texts), len(first), len(second)])  # (N, D), (M, D), (M, D)
    accuracy = {}
    majority = []  # accuracy of always predicting the most frequent class
    for name, labels in properties.items():
        # Train on even rows, test on odd rows.
        gold = labels[1::2]
        accuracy[name] = linear_probe(z[::2], labels[::2], z[1::2], gold)
        majority.append(100 * max(gold.count(label) for label in set(gold)) / len(gold))
    return {"rows": len(texts), "mean": mean(accuracy.values()), "majority": mean(majority),
            **accuracy, "similarity": 100 * rank_correlation(cosines(x, y), similarity)}


def task_generate(evaluation):
    """Compare greedy answers with the gold text."""
    if not evaluation.can_answer:
        raise NotApplicable("generate needs a causal model (objective ntp or llm-jepa) and two "
                            "columns, prompt and answer: choose them with --langs a,b")
    answers = evaluation.answers
    pairs = list(zip(answers.written, answers.golds))
    return {"rows": len(pairs), "exact": percent([exact(*pair) for pair in pairs]),
            "startswith": percent([starts_with(*pair) for pair in pairs]),
            "stop": percent(answers.stopped)}


TASKS = {"retrieval": task_retrieval, "geometry": task_geometry, "probe": task_probe,
         "generate": task_generate}
# By default these run only for objectives that are trained on pairs.
OF_PAIRS = ("retrieval", "generate")


def run(evaluation, names=None, tasks=TASKS):
    """Run tasks by name, or by default all that apply. Return {"task/metric": number}. Raises
    BadInput for a task that is unknown, and NotApplicable."""
    for name in names or ():
        if name not in tasks:
            near = did_you_mean(name, tasks, "; python -m tasks --help lists more")
            raise BadInput(f"there is no task {shown(name)!r} among {', '.join(tasks)}{near}")
    results = {}
    for name in names or tasks:
        if not names and name in OF_PAIRS and evaluation.views < 2:
            continue
        try:
            scores = tasks[name](evaluation)
        except NotApplicable:
            if not names:
                continue
            raise
        results |= {f"{name}/{metric}": value for metric, value in scores.items()}
    return results


class Example(NamedTuple):
    query: str
    found: str  # the generated answer, or the retrieved translation
    gold: str
    right: bool


def examples(evaluation):
    """Return five Examples to read: answers of a causal model, otherwise retrieved translations,
    from the languages in turn. [] if the objective is not trained on pairs."""
    first, *others = evaluation.texts
    if not others or evaluation.views < 2:
        return []
    step = max(1, evaluation.count // 5)
    rows = slice(0, 5 * step, step)
    if evaluation.can_answer:
        answers = evaluation.answers_of(rows)
        triples = zip(answers.prompts, answers.written, answers.golds)
    else:
        golds = evaluation.texts[first]
        triples = []
        for row, other in zip(range(evaluation.count)[rows], itertools.cycle(others)):
            found = margin_search(evaluation.embeddings[other], evaluation.embeddings[first])[row]
            triples.append((evaluation.texts[other][row], golds[found], golds[row]))
    return [Example(*texts, exact(*texts[1:])) for texts in triples]


# ---- the table

# The table shows these numbers; --json prints all. Explanations of percentages begin with %.
METRICS = {
    "validation/*": "on held-out rows, without dropout",
    "retrieval/xsim": "% wrong translation retrieved (ratio margin, k = 4); lower is better",
    "retrieval/xsim++": "% the same, with hard negatives; lower is better",
    "geometry/rankme": "effective rank; higher is better",
    "geometry/rankme_share": "% effective rank, as a fraction of the largest possible",
    "geometry/uniformity": "0 is one point, -4 the whole sphere; lower is better",
    "geometry/std": "0 is one point, 1 is healthy",
    "geometry/norm": "mean L2 norm of the embeddings, before normalization",
    "geometry/cosine/same": "unrelated sentences, one language; lower is better",
    "geometry/cosine/translations": "translations; higher is better",
    "geometry/cosine/different": "unrelated sentences, two languages; lower is better",
    "probe/mean": "% accuracy of linear probes (tense, number, ...); higher is better",
    "probe/majority": "% accuracy of always predicting the most frequent class",
    "probe/similarity": "Spearman x 100 of cosine and graded similarity; higher is better",
    "generate/exact": "% exact match of the greedy answer; higher is better",
    "generate/startswith": "% answers that begin with the gold text; higher is better",
    "generate/stop": "% answers that end with the stop token",
}


def table(results, before=None, about=METRICS, start="untrained"):
    """Format the results that `about` explains as aligned lines. `before` are the results of step
    0, and `start` is the title of their column."""

    def explanation(name):
        return about.get(name) or about.get(name.partition("/")[0] + "/*", "")

    names = [name for name in results if explanation(name)] or list(results)[:20]
    width = max(map(len, names))
    lines = [f"{'':{width}} {start:>9}   trained"] if before else []
    for name in names:
        line = f"{name:{width}}"
        digits = 2 if explanation(name).startswith("%") else 4
        for column in (before, results) if before else (results,):
            value = column.get(name, "-")
            line += f" {value:>9.{digits}f}" if isinstance(value, float) else f" {value:>9}"
        lines.append(f"{line} {explanation(name)}".rstrip())
    if len(names) < len(results):
        lines.append(f"and {len(results) - len(names)} more numbers: --json")
    return "\n".join(lines)


def headline(results, step, start="untrained"):
    """Format an evaluation during training as one line."""
    parts = [f"{name} {results[name]:.1f} %" for name in ("retrieval/xsim", "retrieval/xsim++",
             "generate/exact", "probe/mean") if name in results]
    if "validation/loss" in results:
        parts.insert(0, f"validation/loss {results['validation/loss']:.3f}")
    health = diagnose(results, views=2 if "retrieval/xsim" in results else 1)
    # Random weights look collapsed, which says nothing about the training.
    parts.append(health if step else health.partition(" -> ")[0] + f" -> {start}")
    return "  ".join(parts)


# ---- the folder of a run

FORMAT = 5  # of log.jsonl


class RunFolder(NamedTuple):
    folder: Path
    model: torch.nn.Module
    tokenizer: Tokenizer
    first: dict      # the first line of the log
    config: dict     # its "config"
    untrained: dict  # the results of step 0; {} if there are none
    model_hash: str  # sha256 of the model.pt that was loaded


def read_log(folder):
    """Return the records of a run's log.jsonl; [] without one."""
    path = Path(folder) / "log.jsonl"
    records = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):  # a kill can truncate the last line
            records.append(json.loads(line))
    return records


def read_first(folder):
    """Return the first line of a run's log, which has its "config". Raises BadInput."""
    folder = Path(folder).expanduser()
    if not os.path.isdir(folder):
        top = folder.parts[0]
        looks_like_hub = len(folder.parts) < 3 and top != "out" and not os.path.exists(top)
        hint = (f"; import a Hugging Face model with python -m interop import {shown(folder)} "
                f"out/{shown(folder.name)}")
        raise BadInput(f"there is no folder {shown(folder)}{hint if looks_like_hub else ''}")
    first = next(iter(read_log(folder)), {})
    if first.get("format") != FORMAT:
        raise BadInput(f"{folder} is not a run of this edition of nanoJEPA: its log.jsonl does not "
                       f'have "format": {FORMAT}. Train or import it again')
    return first


def read_tokenizer(folder):
    """Return the Tokenizer of a run. Raises BadInput if it is not that of the training."""
    path = Path(folder) / "tokenizer.json"
    first = read_first(folder)
    tokenizer = Tokenizer.read(path, tuple(map(tuple, first["around"])))
    if tokenizer.hash != first["tokenizer_hash"]:
        raise BadInput(f"{path} is not the file of the training: restore it")
    return tokenizer


def open_run(folder, device="cpu"):
    """Load the folder of a run as a RunFolder. Raises BadInput if a file is missing or damaged."""
    folder = Path(folder).expanduser()
    first = read_first(folder)
    path = folder / "model.pt"
    model_hash = path.is_file() and file_hash(path)
    model = load(path, device)
    if file_hash(path) != model_hash:
        raise BadInput(f"{path} was replaced while it was being read: run the command again")
    # The weights of step 0 are not saved, but train.py evaluated them on the validation rows.
    untrained = [record["eval"] for record in read_log(folder)
                 if record.get("step") == 0 and "eval" in record]
    return RunFolder(folder, model, read_tokenizer(folder), first, first["config"],
                     untrained[-1] if untrained else {}, model_hash)


def warn_train_test_overlap(first, rows, held_out=False):
    """Warn if a run (the first line of its log), or one that it was started from, was trained on
    some EvaluationRows, or if its data has changed. held_out: the run itself held these rows out.
    """
    texts = list(zip(*rows.texts.values()))
    count = 0
    visited = set()
    try:
        while True:
            config = first["config"]
            changed = [path for path, old in first.get("data_files", {}).items()
                       if os.path.isfile(path) and file_hash(path) != old]
            for path in changed:
                warn(f"{shown(path)} has changed since training: rows that are test rows now may "
                     "have been trained on")
            if config.get("data") and (changed or not held_out):
                count = max(count, corpora.count_trained_on(
                    config["data"], texts, comma_list(config.get("langs", "")),
                    not config.get("eval_data")))
            folder = config.get("init") and os.path.realpath(os.path.expanduser(config["init"]))
            if not folder or folder in visited:  # renamed folders can form a cycle
                break
            visited.add(folder)
            first, held_out = read_first(folder), False
    except BadInput as error:
        warn(f"we cannot tell which of these rows the model was trained on: {error}")
    if count:
        warn(f"the model was trained on {count:,} of the {len(texts):,} rows of {rows.name}")


def evaluation_of(opened, data=None, langs=(), split=None, limit=None, max_new=None, pool=None):
    """Return the Evaluation of a RunFolder, by default on its own test rows. Raises BadInput."""
    config = opened.config
    own = config.get("eval_data") or config["data"]
    spec = data or own
    if not spec:
        raise BadInput(f"{opened.folder} has no data of its own: choose some with --data")
    if (limit or 0) < 0 or max_new is not None and max_new < 1:
        raise BadInput("--limit must be at least 0, and --max-new at least 1")
    if spec == own:
        langs = langs or comma_list(config.get("langs", ""))
    if not split:
        split = "test" if spec in corpora.EMBEDDED or spec == config["data"] else "all"
    if limit is None and not os.path.isdir(spec):
        limit = 1000
    # A run that was trained with system texts can also be evaluated without them.
    system = (config.get("chat") == "system"
              and "system" in corpora.open_text(spec, langs).columns)
    rows = corpora.evaluation_rows(spec, langs, split, limit or 0, system)
    held_out = spec == config["data"] and not config.get("eval_data") and split in ("valid", "test")
    warn_train_test_overlap(opened.first, rows, held_out)
    return Evaluation(opened.model, opened.tokenizer, rows, opened.first["affixes"],
                      config.get("max_length"), answer_limit=None, max_new=max_new,
                      views=opened.first["views"], pool=pool)


def read_results(path):
    """Return the numbers that `write_results` wrote; {} for a missing or different file."""
    try:
        results = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return results if isinstance(results, dict) else {}


def write_results(path, results, label, model_hash):
    """Add numbers to a JSON file that begins with the model and the rows. Numbers of a different
    model or of different rows are replaced."""
    facts = {"model": model_hash[:8], "rows": label}
    before = read_results(path)
    if facts.items() <= before.items():
        results = before | results
    with atomic_file(path) as file:
        file.write(json.dumps(facts | results, indent=1, allow_nan=False).encode())


# ---- command line


def make_parser(prog, description, tasks):
    """Return the Parser of a program that evaluates a run."""
    parser = Parser(prog, description=description)
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run, such as out/mexma")
    add("--tasks", type=comma_list, help=f"some of {', '.join(tasks)}")
    add("--data", help="rows to evaluate: toy, documents, regex, a file, or a folder of files "
        "CODE.devtest [the run's own data]")
    add("--langs", type=comma_list, default=[], help="columns to use, e.g. en,de; queries come "
        "from the others and are searched for in the first")
    add("--split", choices=("train", "valid", "test", "all"),
        help="which split to evaluate. Files have one held-out split, used as both valid and test "
        "[test for the run's own data, all for other files]")
    add("--limit", type=int, help="maximum number of rows; 0: all [1000; all of a folder]")
    add("--max-new", type=int, help="maximum number of tokens of a generated answer")
    add("--pool", choices=("cls", "mean", "max", "last"), help="pooling [the model's]")
    add("--device", help="cpu, cuda or cuda:1 [cuda if there is a GPU]")
    add("--json", action="store_true", help="print every number, as one JSON object")
    add("--out", help="JSON file for the numbers [RUN/eval.json, unless a flag chooses other rows "
        "or a different pooling]")
    return parser


def results_file(options, label):
    """Return the path for the numbers, or None: --out, or RUN/eval.json if no flag chooses other
    rows. Raises BadInput for an --out that exists and is no file of results."""
    if not options.out:
        chosen = (options.data, options.langs, options.split, options.limit, options.max_new,
                  options.pool)
        is_own = all(value in (None, []) for value in chosen)
        return Path(options.run).expanduser() / "eval.json" if is_own else None
    path = Path(options.out).expanduser()
    make_folder(path.parent)
    rows = read_results(path).get("rows")
    if os.path.lexists(path) and not rows:
        raise BadInput(f"--out {shown(path)} is a file without results: choose another name")
    if rows not in (None, label):
        warn(f"{shown(path)} has the numbers of {rows}, which will be replaced")
    return path


def main(argv):
    parser = make_parser("evaluate.py", "Evaluate a run, by default on all tasks that apply. "
                         "python -m tasks has more tasks.", TASKS)
    options = parser.parse_args(argv)
    opened = open_run(options.run, usable_device(options.device))
    evaluation = evaluation_of(opened, options.data, options.langs, options.split, options.limit,
                               options.max_new, options.pool)
    path = results_file(options, evaluation.label)
    results = run(evaluation, options.tasks)
    if options.json:
        print(json.dumps(results))
    else:
        print(shown(evaluation.label))
        before = opened.untrained if path and not options.out else None
        start = "start" if opened.config.get("init") else "untrained"
        print(table(results, before, start=start))
        if before:
            print(f"{start}: at step 0, on the validation rows; with a different number of rows "
                  "RankMe, xsim and probes are not comparable")
        if "geometry/rankme" in results:
            print(diagnose(results, evaluation.views))
    if path:
        write_results(path, results, evaluation.label, opened.model_hash)


if __name__ == "__main__":
    run_program(main)
