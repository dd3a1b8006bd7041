"""Evaluate a trained model: sentence embeddings, retrieval across languages, geometry, generation.

    python evaluate.py out/x                       # all tasks that apply, on the run's test rows
    python evaluate.py out/x --data pairs.tsv --langs en,de --tasks retrieval
    python evaluate.py out/x --json > numbers.json   # every number, not only those of the table

Numbers are named task/metric or task/metric/detail. N and M are rows, D the embedding width.
"""

import contextlib
import functools
import json
import math
import os
from argparse import ArgumentTypeError
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
    run_program,
    shown,
    usable_device,
    warn,
)
from data import Tokenizer, tokenize_rows
from model import Packed, load

# ---- embeddings


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
    """Apply function(packed) to rows of ids, batch by batch. Return a tensor for each row. Raises
    BadInput if one is not finite."""
    # Equal rows are read once: in two batches they could get slightly different embeddings, which
    # would break ties at random.
    unique = list(dict.fromkeys(map(tuple, rows)))
    values = {}
    device = next(model.parameters()).device
    batches = token_batches([len(row) for row in unique], tokens_per_batch)
    with in_eval_mode(model):
        for batch in tqdm(batches, "embed", leave=False, disable=None):  # None: no bar in a file
            batch = [unique[i] for i in batch]
            packed = Packed.of(batch, causal=model.config.causal).to(device)
            values.update(zip(batch, function(packed)))
    if not all(value.isfinite().all() for value in values.values()):
        raise BadInput("the model returns NaN or infinity: its training has diverged")
    return [values[tuple(row)] for row in rows]


def embed(model, rows, pool=None):
    """Embed N rows of ids: (N, D) float32 on the CPU."""
    z = torch.stack(map_batches(  # (N, D)
        model, rows, lambda packed: model.pool(model(packed), packed, pool).float().cpu()))
    return F.normalize(z, dim=1) if model.config.normalize else z


def encode_ids(model, tokenizer, texts, affixes=None, max_length=None, openings=None):
    """Tokenize N texts as rows of ids that fit into the model. As in training, max_length counts
    the tokens of a text alone; see `data.tokenize_rows`."""
    return tokenize_rows(tokenizer, texts, affixes, model.config.longest_row, max_length, openings)


def encode(model, tokenizer, texts, affixes=None, max_length=None, pool=None):
    """Embed N texts: (N, D) float32 on the CPU. affixes: the ids before and after a text, by
    default [CLS] and [SEP]."""
    if isinstance(texts, str) or not (texts := list(texts)):
        raise BadInput(f"{shown(texts)!r} is no list of texts with at least one text")
    return embed(model, encode_ids(model, tokenizer, texts, affixes, max_length), pool)


# ---- generation


def generate(model, prompts, stop, max_new, tokens_per_batch=16384):
    """Continue R rows of ids greedily by at most max_new tokens. Return the new ids of each row, up
    to the stop token, and whether it came."""
    device = next(model.parameters()).device
    rows = [list(prompt) for prompt in prompts]
    limits = [min(len(row) + max_new, model.config.max_positions) for row in rows]
    batches = token_batches(limits, tokens_per_batch)
    with in_eval_mode(model):
        for batch in tqdm(batches, "generate", leave=False, disable=None):
            batch = [i for i in batch if len(rows[i]) < limits[i]]
            if not batch:
                continue
            packed = Packed.of([rows[i] for i in batch], causal=True).to(device)
            cache = model.new_cache(len(batch), max(limits[i] for i in batch))
            states = model.pool(model(packed, cache=cache), packed, "last")  # (R, D)
            logits = model.logits(states)                                      # (R, V)
            while True:
                for i, token in zip(batch, logits.argmax(1).tolist()):
                    rows[i].append(token)
                unfinished = [index for index, i in enumerate(batch)
                              if rows[i][-1] != stop and len(rows[i]) < limits[i]]
                if not unfinished:
                    break
                if len(unfinished) < len(batch):
                    batch = [batch[index] for index in unfinished]
                    cache = cache[:, unfinished]
                tokens = torch.tensor([rows[i][-1] for i in batch], device=device)
                positions = torch.tensor([len(rows[i]) - 1 for i in batch], device=device)
                logits = model.decode(tokens, positions, cache)
    answers = [row[len(prompt):] for row, prompt in zip(rows, prompts)]
    stopped = [stop in answer for answer in answers]
    return [answer[:len(answer) - ended] for answer, ended in zip(answers, stopped)], stopped


def exact(written, gold):
    """Return whether two texts are equal, apart from space around them."""
    return written.strip() == gold.strip()


def starts_with(written, gold):
    """Return whether an answer begins with the gold text. [LLM-JEPA, sec. A.7]"""
    return written.strip().startswith(gold.strip())


# ---- averages


def mean(values):
    return sum(values) / len(values)


def percent(flags):
    return 100 * mean(flags)


def with_mean(metric, values):
    """Return {metric: mean, "metric/detail": value, ...} for {detail: value, ...}."""
    details = {f"{metric}/{detail}": value for detail, value in values.items()}
    return {metric: mean(values.values())} | details


def over_pairs(embeddings, measure):
    """Return {metric: mean, "metric/de-en": number, ...} of measure(x, y), which returns {metric:
    number}, over all languages x and the first language y."""
    (first, y), *others = embeddings.items()
    pairs = {f"{name}-{first}": measure(x, y) for name, x in others}
    scores = {}
    for metric in next(iter(pairs.values()), ()):
        scores |= with_mean(metric, {pair: values[metric] for pair, values in pairs.items()})
    return scores


# ---- retrieval: find a sentence's translation among all sentences of the other language


def unit(z):
    """Scale rows to L2 norm 1 in float64: (N, D) -> (N, D). A row of zeros stays zero."""
    return F.normalize(torch.as_tensor(z).double(), dim=1, eps=1e-300)


class Neighbors(NamedTuple):
    cosines: torch.Tensor  # (N, k) float64, best first
    indices: torch.Tensor  # (N, k)


def best_first(cosines, indices, k):
    """Return the k largest of each row (n, W) as Neighbors, the first of equal ones. `indices`
    (n, W) are their row numbers in y, ascending."""
    # The last bits of a cosine depend on its position in the matmul, so equal ones need rounding.
    cosines, order = cosines.round(decimals=9).sort(dim=1, descending=True, stable=True)
    return Neighbors(cosines[:, :k], indices.gather(1, order[:, :k]))


def knn(x, y, k):
    """Find the k <= M rows of y (M, D) with the highest cosine to each row of x (N, D), exactly.
    Ties go to the lowest index."""
    y = unit(y)
    y32 = y.float()
    width = min(len(y), k + 4)           # candidates of a row
    error = (y.shape[1] + 8) * 2 ** -24  # bound of a float32 cosine's rounding error
    results = []
    # At most 2 million numbers are in memory at once.
    block = 2 ** 21 // max(len(y), width * y.shape[1])
    for rows in unit(x).split(max(1, block)):
        # Find candidates in float32, which is faster, then compute their cosines in float64.
        rough, candidates = (rows.float() @ y32.T).topk(width)  # (n, width)
        candidates = candidates.sort(dim=1).values
        near = best_first((y[candidates] @ rows[:, :, None])[:, :, 0], candidates, k)
        # If a row outside the candidates could be as near, compare all rows in float64.
        unsure = near.cosines[:, -1] <= rough[:, -1] + error
        if width < len(y) and unsure.any():
            cosines = rows[unsure] @ y.T
            every = torch.arange(len(y)).expand_as(cosines)
            near.cosines[unsure], near.indices[unsure] = best_first(cosines, every, k)
        results.append(near)
    return Neighbors(*map(torch.cat, zip(*results)))


def margin_rank(forward, backward):
    """Return the best row of y for each row of x (N,), given the Neighbors of x in y and of y in x,
    by cos(x, y) / mean cosine of x and y to their neighbors. [Artetxe & Schwenk 2019]"""
    # A hub is near to everything. The division keeps it from being everybody's translation.
    similar = forward.cosines.mean(1, keepdim=True) + backward.cosines.mean(1)[forward.indices]
    best = (forward.cosines / (similar / 2)).argmax(1, keepdim=True)  # (N, 1)
    return forward.indices.gather(1, best)[:, 0]


def margin_search(x, y, k=4):
    """Find for each row of x (N, D) the row of y (M, D) with the best margin: (N,)."""
    return margin_rank(knn(x, y, min(k, len(y))), knn(y, x, min(k, len(x))))


def errors(retrieved, texts):
    """Return for each retrieved row number (N,) whether its text is a wrong one."""
    return [texts[i] != texts[j] for i, j in enumerate(retrieved.tolist())]


def xsim(x, y, texts=None):
    """Return the percentage of rows of x (N, D) that retrieve a wrong row of y (N, D). Rows with
    equal texts (those of y) are both correct. [Heffernan et al. 2022]"""
    return percent(errors(margin_search(x, y), texts or range(len(x))))


def xsim_plus(x, y, negatives, hard, texts):
    """Return {"xsim++": error if altered sentences join y (N, D), "xsim++/TYPE": altered copies of
    the right text, "xsim++/misaligned": other errors}, in percent. negatives (M, D) embed hard:
    [(altered text, row of y, type)]; texts: those of y. [Chen et al. 2023]"""
    candidates = [*((text, row, "misaligned") for row, text in enumerate(texts)), *hard]
    counts = dict.fromkeys([*sorted({kind for _, _, kind in hard}), "misaligned"], 0)
    for gold, j in zip(texts, margin_search(x, torch.cat([y, negatives])).tolist()):
        text, source, kind = candidates[j]
        counts[kind if texts[source] == gold else "misaligned"] += text != gold
    types = {f"xsim++/{error}": 100 * count / len(x) for error, count in counts.items()}
    return {"xsim++": 100 * (sum(counts.values()) / len(x))} | types


def retrieval(embeddings, texts, negatives=None, hard=()):
    """Measure xsim of {language: (N, D)} with {language: N texts}, and xsim++ if there are altered
    sentences: means over languages, and "metric/de-en"."""
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
    """Scale rows to L2 norm 1: (N, D) -> (N, D + 1). All rows of zeros are one point, in the last
    dimension."""
    u = unit(z)
    return torch.cat([u, (u == 0).all(1, keepdim=True)], 1)


def uniformity(z):
    """Return log mean exp(-2 |u_i - u_j|^2) over all i != j of unit rows: (N, D), N > 1 -> 0 (one
    point)..about -4 (the whole sphere, in many dimensions). [Wang & Isola 2020, sec. 4]"""
    u = unit_or_zero(z)
    # |u_i - u_j|^2 = 2 - 2 cos. The pairs i = j would bias the mean, so subtract them.
    total = -(4 * (u.square().sum(1) - 1)).exp().sum().item()
    for rows in u.split(1024):
        total += (4 * (rows @ u.T - 1)).exp().sum().item()  # (1024, N)
    return math.log(total / (len(u) * (len(u) - 1)))


def std(z):
    """Return the mean standard deviation of the dimensions of unit rows, times sqrt(D): (N, D) -> 0
    (one point)..1 (healthy). [SimSiam, Chen & He 2021, fig. 2]"""
    u = unit(z)
    return u.std(0, correction=0).mean().item() * math.sqrt(u.shape[1])


def cosines(x, y):
    """Return the cosine of row i of x and row i of y: (N, D), (N, D) -> (N,)."""
    return (unit(x) * unit(y)).sum(1)


def random_cosine(x, y):
    """Return the mean cosine of row i of x and row j != i of y: (N, D), (N, D), N > 1 -> -1..1."""
    u, v = unit_or_zero(x), unit_or_zero(y)
    # The sum over all pairs is the product of two sums.
    return ((u.sum(0) @ v.sum(0) - (u * v).sum()) / (len(u) * (len(u) - 1))).item()


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
            **over_pairs(embeddings, lambda x, y: {
                "cosine/translations": cosines(x, y).mean().item(),
                "cosine/different": random_cosine(x, y)})}


def diagnose(results):
    """Return the health line for results of `run`: is the encoder collapsing?"""
    scores = {name.removeprefix("geometry/"): value for name, value in results.items()}
    unrelated = scores["cosine/same"]
    low_rank = scores["rankme_share"] < 5 or scores["rankme"] < 2
    # By default, an objective that never sees translations is evaluated without retrieval.
    pairs = "retrieval/xsim" in results
    # Neither sign is enough: a pretrained BERT has a random cosine of 0.99 and can be trained
    # [BERT-JEPA, table 4], and embeddings on a line through 0 have one of 0.
    if low_rank and unrelated > 0.9:
        verdict = "COLLAPSING"
    elif unrelated > 0.5:
        verdict = "half-collapsed (all embeddings share one direction)"
    elif low_rank:
        verdict = "half-collapsed (low effective rank)"
    elif pairs and scores["cosine/translations"] <= scores["cosine/different"]:
        verdict = "translations are less similar than unrelated sentences"
    else:
        verdict = "ok"
    line = ("health: RankMe {rankme:.1f} ({rankme_share:.0f} %) | cos(rand) {cosine/same:.2f}"
            + (" | cos(pos) {cosine/translations:.2f}" if pairs else "")
            + " | unif {uniformity:.2f} | std {std:.2f} | embedding norm {norm:.1f} -> ")
    return line.format_map(scores) + verdict


# ---- the probe: which properties of a sentence can be read from its embedding?


def linear_probe(x, labels, queries, gold):
    """Fit N labels to x (N, D) by ridge regression on one-hot classes. Return the accuracy in
    percent on the queries (M, D) and their gold labels."""
    classes = sorted(set(labels), key=str)
    targets = torch.tensor([[label == one for one in classes] for label in labels]).double()
    center = x.double().mean(0)  # (D,)
    z = x.double() - center  # (N, D)
    gram = z.T @ z  # (D, D)
    # The penalty is relative to the mean variance of a dimension, so the scale has no effect.
    gram.diagonal().add_(0.01 * gram.diagonal().mean() + 1e-300)
    weight = torch.linalg.solve(gram, z.T @ targets)  # (D, classes)
    scores = (queries.double() - center) @ weight + targets.mean(0)  # (M, classes)
    return percent([classes[i] == label for i, label in zip(scores.argmax(1).tolist(), gold)])


# ---- a model and the rows on which it is evaluated


class NotApplicable(BadInput):
    """A task does not fit the model or the rows."""


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
    affixes: Any = None  # (ids before, ids after) of the first view, and of the others
    max_length: int | None = None  # tokens of a text; None: all that the model can take
    answer_limit: int | None = 200  # number of rows that are answered
    views: int = 2  # texts of a training example
    pool: str | None = None  # None: the model's

    def __post_init__(self):
        self.texts = self.rows.texts  # {column: N texts}
        self.hard = self.rows.hard  # [(altered text, row of the first column, error type)]
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
        """Name the rows, with a hash of their texts, because two files can have one name."""
        columns = ", ".join(self.texts)
        return f"{self.count} rows of {self.rows.name} ({columns}), {digest(self.texts)[:8]}"

    def openings(self):
        """Return the ids of each row's system text, which opens a chat; None without them."""
        chat = self.tokenizer.special.chat
        return self.rows.system and [
            [*chat.start, *chat.system, *ids[:self.max_length].tolist(), *chat.end]
            for ids in self.tokenizer.encode(self.rows.system)]

    def encode_ids(self, texts, column=0, openings=None):
        """Tokenize N texts like those of a column."""
        affixes = self.affixes[min(column, 1)]
        return encode_ids(self.model, self.tokenizer, texts, affixes, self.max_length, openings)

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

    def prompt_ids(self, prompts, longest):
        """Tokenize prompts as [CLS] prompt [SEP], or by the chat template of the model's family."""
        chat = self.tokenizer.special.chat
        affixes = (*chat.start, *chat.user), (*chat.end, *chat.assistant)
        return tokenize_rows(self.tokenizer, prompts, affixes, longest, openings=self.openings())

    @property
    def can_answer(self):
        return self.model.config.causal and len(self.texts) == 2

    @functools.cached_property
    def answers(self):
        """Answers of a causal model to the first prompts, up to the stop token."""
        need_answers(self, "this task")
        prompts, golds = (texts[:self.answer_limit] for texts in self.texts.values())
        max_new = 2 * max(map(len, self.tokenizer.encode(golds))) + 8
        # Truncate prompts that would leave no room for the answer.
        longest = self.model.config.max_positions
        ids = self.prompt_ids(prompts, max(longest // 2, longest - max_new))
        written, stopped = generate(self.model, ids, self.tokenizer.special.sep, max_new)
        return Answers(prompts, golds, list(map(self.tokenizer.decode, written)), stopped)


# ---- tasks: Evaluation -> {"metric" or "metric/detail": number}


def need_answers(evaluation, task):
    if not evaluation.can_answer:
        raise NotApplicable(f"{task} needs a causal model (objective ntp or llm-jepa) and two "
                            "columns, prompt and answer: choose them with --langs a,b")


def need_translations(evaluation, task):
    if len(evaluation.texts) < 2:
        raise NotApplicable(f"{task} needs translations, and {evaluation.rows.name} has one text "
                            "per row")


def task_retrieval(evaluation):
    """Search the translations of every language in the first."""
    need_translations(evaluation, "retrieval")
    hard = evaluation.encode_ids([text for text, _, _ in evaluation.hard])
    negatives = embed(evaluation.model, hard, evaluation.pool) if hard else None  # (M, D)
    return {"rows": evaluation.count} | retrieval(
        evaluation.embeddings, evaluation.texts, negatives, evaluation.hard)


def task_geometry(evaluation):
    return {"rows": evaluation.count} | geometry(evaluation.embeddings)


def task_probe(evaluation):
    """Train a linear probe for each property on even rows, and test it on odd rows."""
    if not evaluation.rows.labelled:
        raise NotApplicable(f"probe needs labels, and {evaluation.rows.name} has none: use --data "
                            "toy")
    texts, properties = evaluation.rows.labelled
    z = embed(evaluation.model, evaluation.encode_ids(texts), evaluation.pool)  # (N, D)
    accuracy = {}
    majority = []  # accuracy of always predicting the most frequent class
    for name, labels in properties.items():
        gold = labels[1::2]
        accuracy[name] = linear_probe(z[::2], labels[::2], z[1::2], gold)
        majority.append(100 * max(map(gold.count, gold)) / len(gold))
    return {"rows": len(texts), "mean": mean(accuracy.values()), "majority": mean(majority),
            **accuracy}


def task_generate(evaluation):
    """Compare greedy answers with the gold text."""
    answers = evaluation.answers
    pairs = list(zip(answers.written, answers.golds))
    return {"rows": len(pairs), "exact": percent([exact(*pair) for pair in pairs]),
            "startswith": percent([starts_with(*pair) for pair in pairs]),
            "stop": percent(answers.stopped)}


TASKS = {"retrieval": task_retrieval, "geometry": task_geometry, "probe": task_probe,
         "generate": task_generate}


def run(evaluation, names=None, tasks=TASKS):
    """Run tasks by name, or by default all that apply. Return {"task/metric": number}."""
    for name in names or ():
        if name not in tasks:
            near = did_you_mean(name, tasks, "; python -m tasks --help lists more")
            raise BadInput(f"there is no task {shown(name)!r} among {', '.join(tasks)}{near}")
    results = {}
    for name in names or tasks:
        # By default these run only for objectives that are trained on pairs.
        if not names and name in ("retrieval", "generate") and evaluation.views < 2:
            continue
        try:
            scores = tasks[name](evaluation)
        except NotApplicable:
            if names:
                raise
            continue
        results |= {f"{name}/{metric}": value for metric, value in scores.items()}
    return results


def examples(evaluation):
    """Return lines with five rows to read: answers of a causal model, or retrieved translations. []
    if the objective is not trained on pairs."""
    if len(evaluation.texts) < 2 or evaluation.views < 2:
        return []
    if evaluation.can_answer:
        queries, golds, answers, _ = replace(evaluation, answer_limit=5).answers
    else:
        golds, queries, *_ = evaluation.texts.values()
        y, x, *_ = evaluation.embeddings.values()
        answers = [golds[j] for j in margin_search(x, y)[:5].tolist()]
    lines = []
    for query, text, gold in zip(queries, answers, golds):
        right = exact(text, gold)
        lines += [f"  {shown(query)}", f"    {'=' if right else '!'} {shown(text)}"]
        if not right:
            lines.append(f"    instead of {shown(gold)}")
    return lines


# ---- the table

# The table shows these numbers; --json prints all. Explanations of percentages begin with %.
METRICS = {
    "validation": "on held-out rows, without dropout",
    "retrieval/xsim": "% wrong translation retrieved (ratio margin, k = 4); lower is better",
    "retrieval/xsim++": "% the same, with hard negatives; lower is better",
    "geometry/rankme": "effective rank; higher is better",
    "geometry/rankme_share": "% effective rank, as a fraction of the largest possible",
    "geometry/uniformity": "0 is one point, about -4 the whole sphere; lower is better",
    "geometry/std": "0 is one point, 1 is healthy",
    "geometry/norm": "mean L2 norm of the embeddings, before normalization",
    "geometry/cosine/same": "unrelated sentences, one language; lower is better",
    "geometry/cosine/translations": "translations; higher is better",
    "geometry/cosine/different": "unrelated sentences, two languages; lower is better",
    "probe/mean": "% accuracy of linear probes (tense, number, ...); higher is better",
    "probe/majority": "% accuracy of always predicting the most frequent class",
    "generate/exact": "% exact match of the greedy answer; higher is better",
    "generate/startswith": "% answers that begin with the gold text; higher is better",
    "generate/stop": "% answers that end with the stop token",
}


def table(results, before=None, about=METRICS, start="untrained"):
    """Format the results that `about` explains as aligned lines, beside those of step 0, `before`,
    in a column with the title `start`."""
    known = {name: about.get(name) or about.get(name.partition("/")[0], "") for name in results}
    names = [name for name in results if known[name]] or list(results)[:20]
    width = max(map(len, names))
    lines = [f"{'':{width}} {start:>9}   trained"] if before else []
    for name in names:
        line = f"{name:{width}}"
        digits = 2 if known[name].startswith("%") else 4
        for column in (before, results) if before else (results,):
            value = column.get(name, "-")
            line += f" {value:>9.{digits}f}" if isinstance(value, float) else f" {value:>9}"
        lines.append(f"{line} {known[name]}".rstrip())
    if len(names) < len(results):
        lines.append(f"and {len(results) - len(names)} more numbers: --json")
    return "\n".join(lines)


def headline(results, step, start="untrained"):
    """Format an evaluation during training as one line."""
    parts = [f"{name} {results[name]:.1f} %" for name in ("retrieval/xsim", "retrieval/xsim++",
             "generate/exact", "probe/mean") if name in results]
    if "validation/loss" in results:
        parts.insert(0, f"validation/loss {results['validation/loss']:.3f}")
    health = diagnose(results)
    # Random weights look collapsed, which says nothing about the training.
    parts.append(health if step else health.partition(" -> ")[0] + f" -> {start}")
    return "  ".join(parts)


# ---- the folder of a run

FORMAT = 6  # of log.jsonl


class RunFolder(NamedTuple):
    folder: Path
    model: torch.nn.Module
    tokenizer: Tokenizer
    first: dict      # the first line of the log
    config: dict     # its "config"
    model_hash: str  # sha256 of the model.pt that was loaded


def read_log(folder):
    """Return the records of a run's log; [] without one."""
    path = Path(folder) / "log.jsonl"
    records = []
    for line in path.read_bytes().splitlines() if os.path.isfile(path) else ():
        with contextlib.suppress(ValueError):  # a kill can truncate the last line
            records.append(json.loads(line))
    return records


def read_first(folder):
    """Return the first line of a run's log, which has its "config"."""
    folder = Path(folder).expanduser()
    first = next(iter(read_log(folder)), {})
    if first.get("format") != FORMAT:
        raise BadInput(f'{shown(folder)} has no log.jsonl with "format": {FORMAT}: give the folder '
                       "of a run, or import a model with python -m interop")
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
    """Load the folder of a run as a RunFolder."""
    folder = Path(folder).expanduser()
    first = read_first(folder)
    path = folder / "model.pt"
    model_hash = os.path.isfile(path) and file_hash(path)  # load reports a missing file
    return RunFolder(folder, load(path, device), read_tokenizer(folder), first, first["config"],
                     model_hash)


def warn_train_test_overlap(first, rows, held_out=False, visited=()):
    """Warn if a run (the first line of its log), or one that it was started from, was trained on
    some EvaluationRows, or if its data has changed. held_out: the run held these rows out. visited:
    folders of earlier runs, because renamed ones can form a cycle."""
    config = first["config"]
    for path, known in first.get("data_files", {}).items():
        if os.path.isfile(path) and file_hash(path) != known:
            warn(f"{shown(path)} has changed since training: rows that are test rows now may have "
                 "been trained on")
    try:
        if config.get("data") and not held_out:
            texts = list(zip(*rows.texts.values()))
            count = corpora.count_trained_on(config["data"], texts, comma_list(config["langs"]),
                                             not config.get("eval_data"))
            if count:
                warn(f"the model was trained on {count:,} of the {len(texts):,} rows of "
                     f"{rows.name}")
        init = config.get("init")
        if init and init not in visited:
            warn_train_test_overlap(read_first(init), rows, visited=(*visited, init))
    except BadInput as error:
        warn(f"we cannot tell which of these rows the model was trained on: {error}")


def evaluation_of(opened, data="", langs=(), split="", limit=None, pool=None):
    """Return the Evaluation of a RunFolder, by default on its own test rows."""
    config = opened.config
    own = config.get("eval_data") or config["data"]
    spec = data or own
    if not spec:
        raise BadInput(f"{opened.folder} has no data of its own: choose some with --data")
    if limit is None:
        limit = 0 if os.path.isdir(os.path.expanduser(spec)) else 1000
    if spec == own:
        langs = langs or comma_list(config.get("langs", ""))
    split = split or ("test" if spec == config["data"] else "all")
    # A run that was trained with system texts can also be evaluated without them.
    system = config.get("chat") == "system" and "system" in corpora.open_text(spec, langs).columns
    rows = corpora.evaluation_rows(spec, langs, split, limit, system)
    held_out = spec == config["data"] and not config.get("eval_data") and split in ("valid", "test")
    warn_train_test_overlap(opened.first, rows, held_out)
    return Evaluation(opened.model, opened.tokenizer, rows, opened.first["affixes"],
                      config.get("max_length"), None, opened.first["views"], pool)


def read_results(path):
    """Return what `write_results` wrote; {} for a missing or different file."""
    try:
        results = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return results if isinstance(results, dict) else {}


def write_results(path, results, label, model_hash):
    """Add numbers to a JSON file that begins with the model and the rows. Those of a different
    model or of different rows are replaced."""
    facts = {"model": model_hash[:8], "rows": label}
    before = read_results(path)
    if facts.items() <= before.items():
        results = before | results
    with atomic_file(path) as file:
        file.write(json.dumps(facts | results, indent=1, allow_nan=False).encode())


# ---- command line


def row_limit(text):
    """Return the number of --limit."""
    if int(text) < 0:
        raise ArgumentTypeError(f"{text}: it must be at least 0")
    return int(text)


def make_parser(prog, description, tasks):
    """Return the Parser of a program that evaluates a run."""
    parser = Parser(prog, description=description)
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run, such as out/mexma; its eval.json keeps the "
        "numbers, unless --data, --langs, --split, --limit or --pool is given")
    add("--tasks", type=comma_list, help=f"comma-separated, some of {', '.join(tasks)}")
    add("--data", help="rows to evaluate: toy, documents, regex, a file, or a folder of files "
        "CODE.devtest [the run's own data]")
    add("--langs", type=comma_list, help="columns to use, e.g. en,de; retrieval searches the first "
        "column for the translation of each text of the others")
    add("--split", choices=("train", "valid", "test", "all"), help="which split to evaluate; valid "
        "and test are the same rows of a file [test for the run's own data, all for other files]")
    add("--limit", type=row_limit, help="maximum number of rows; 0: all [1000; all of a folder]")
    add("--pool", choices=("cls", "mean", "max", "last"), help="pooling [the model's]")
    add("--device", help="cpu, cuda, cuda:1 or mps [a GPU if there is one]")
    add("--json", action="store_true", help="print every number, as one JSON object")
    return parser


def keep_results(options, opened, results, label):
    """Write the numbers of a run's own test rows, as it reads them by default, to its eval.json."""
    chosen = options.data, options.langs, options.split, options.limit, options.pool
    if all(value in (None, "", []) for value in chosen):  # --limit 0 chooses all rows
        write_results(opened.folder / "eval.json", results, label, opened.model_hash)


def main(argv):
    parser = make_parser("evaluate.py", "Evaluate a run, by default on all tasks that apply. "
                         "python -m tasks has more tasks.", TASKS)
    options = parser.parse_args(argv)
    opened = open_run(options.run, usable_device(options.device))
    evaluation = evaluation_of(opened, options.data, options.langs, options.split, options.limit,
                               options.pool)
    results = run(evaluation, options.tasks)
    keep_results(options, opened, results, evaluation.label)
    if options.json:
        return print(json.dumps(results))
    lines = [shown(evaluation.label), table(results)]
    if not options.tasks:
        lines += examples(evaluation)
    if "geometry/rankme" in results:
        lines.append(diagnose(results))
    print(*lines, sep="\n")


if __name__ == "__main__":
    run_program(main)
