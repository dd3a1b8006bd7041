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

# ---- embed


@contextlib.contextmanager
def in_eval_mode(model):
    """Without dropout and gradients; afterwards the model is in the mode that it was in."""
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
    # The longest first: memory runs out at once or never
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] > room:
            batches.append([])
            room = max(tokens, lengths[i])  # a row longer than a batch is one alone
        batches[-1].append(i)
        room -= lengths[i]
    return batches


def read_rows(model, rows, read, tokens_per_batch=4096):
    """What `read(packed)` finds, one thing a row of a batch -> one for each of the rows of ids."""
    found = [None] * len(rows)
    device = next(model.parameters()).device
    batches = token_batches([len(row) for row in rows], tokens_per_batch)
    with in_eval_mode(model):
        for batch in tqdm(batches, "embed", leave=False, disable=None):  # None: in a file no bar
            packed = Packed.of([rows[i] for i in batch], causal=model.config.causal).to(device)
            for i, value in zip(batch, read(packed)):
                found[i] = value
    return found


def text_rows(model, tokenizer, texts, prefix, suffix, max_length):
    """N texts -> rows of ids [CLS] prefix text suffix, the suffix None being [SEP]."""
    special = tokenizer.special
    suffix = [special.sep] if suffix is None else suffix
    if not max_length:
        return rows_of(tokenizer, texts, prefix, suffix, max_length=model.config.max_positions)
    # As in training: so many tokens of the text, whatever stands around it
    return [[special.cls, *prefix, *ids[:max_length].tolist(), *suffix]
            for ids in tokenizer.encode(texts)]


def embed_rows(model, rows, pool=None):
    """N rows of ids -> vectors (N, D), float32 on the CPU."""

    def read(packed):
        return model.pool(model(packed), packed, pool).float().cpu()  # (rows of the batch, D)

    vectors = read_rows(model, rows, read)  # N of (D,)
    return torch.stack(vectors) if rows else torch.empty(0, model.config.width)


def embed(model, tokenizer, texts, prefix=(), suffix=None, max_length=None):
    """N texts -> vectors (N, D), float32 on the CPU, of their `text_rows`."""
    return embed_rows(model, text_rows(model, tokenizer, texts, prefix, suffix, max_length))


# ---- generate


def generate(model, prompts, stop, max_new, tokens_per_batch=16384):
    """Greedy continuations of rows of ids, of at most max_new tokens, stop included, and no longer
    than the model takes -> (lists of ids without the stop token, ended with it?). BadInput for NaN.
    """
    device = next(model.parameters()).device
    rows = [list(prompt) for prompt in prompts]
    limits = [min(len(row) + max_new, model.config.max_positions) for row in rows]
    stopped = [False] * len(rows)
    batches = token_batches(limits, tokens_per_batch)
    with in_eval_mode(model):
        for batch in tqdm(batches, "generate", leave=False, disable=None):
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
                    if len(rows[i]) > end:
                        continue  # its prompt says what comes here
                    stopped[i] = token == stop
                    if not stopped[i]:
                        rows[i].append(token)
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


def with_mean(metric, values):
    """{detail: value} -> {metric: their mean, "metric/detail": value, ...}."""
    details = {f"{metric}/{detail}": value for detail, value in values.items()}
    return {metric: mean(values.values())} | details


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


def unit(z):
    """Rows scaled to length 1: (N, D) -> (N, D) float64. ValueError for NaN and infinity, whose
    ranking would look like a result."""
    z = torch.as_tensor(z).double()
    if not z.isfinite().all():
        raise ValueError("vectors must be finite")
    return F.normalize(z, dim=1, eps=1e-300)  # a zero row stays zero


class Nearest(NamedTuple):
    cosines: torch.Tensor  # (N, k) float64, best first
    indices: torch.Tensor  # (N, k)


def search(x, y, k):
    """The k <= M rows of y nearest to each row of x by cosine: (N, D), (M, D) -> Nearest, exact."""
    targets = unit(y)  # (M, D)
    found = []
    # At most 16 million cosines at once
    for rows in torch.as_tensor(x).split(max(1, 2 ** 24 // len(targets))):
        found.append((unit(rows) @ targets.T).topk(k, dim=1))  # (n, M) -> (n, k)
    return Nearest(*map(torch.cat, zip(*found)))


def by_margin(nearest, back, score=torch.div):
    """Which of the rows j of y `nearest` to a row i of x has the highest score(cos, m), by default
    cos / m, m = (mean cos of i to its nearest + mean cos of j to its nearest) / 2? `back`: nearest
    rows of x to those of y -> scores (N,), rows of y (N,). [Artetxe & Schwenk 2019]"""
    # A hub is near to everything: its large m keeps it from being everybody's translation
    m = (nearest.cosines.mean(1, keepdim=True) + back.cosines.mean(1)[nearest.indices]) / 2
    best = score(nearest.cosines, m).max(1, keepdim=True)  # (N, k) -> (N, 1)
    return best.values[:, 0], nearest.indices.gather(1, best.indices)[:, 0]


def mine(x, y, k=4):
    """The row of y that margin-based mining takes for each row of x: (N, D), (M, D) -> (N,)."""
    return by_margin(search(x, y, min(k, len(y))), search(y, x, min(k, len(x))))[1]


def mistakes(found, texts=None):
    """Is a found row (N,) wrong? Right is one's own row or, given texts, an equal text."""
    pairs = enumerate(found.tolist())
    if texts is None:
        return [i != j for i, j in pairs]
    return [texts[i] != texts[j] for i, j in pairs]


def xsim(x, y, texts=None, k=4):
    """Percent of the rows of x whose translation is not found in y: (N, D), (N, D) -> 0..100.
    [Heffernan et al. 2022; with the texts of y as LASER's command]"""
    return percent(mistakes(mine(x, y, k), texts))


def xsim_plus(x, y, negatives, hard, texts):
    """xsim when y (N, D) is joined by M altered copies of its rows: negatives (M, D), hard [(text,
    row it was made from, type)], texts of y -> {"xsim++": percent wrong, "xsim++/TYPE": percent
    that took such a copy of their own, "xsim++/misaligned": anything else}. [Chen et al. 2023]"""
    # More targets change the margin of every row: nothing of xsim can be used again
    found = mine(x, torch.cat([y, negatives]))  # (N,)
    wrong = mistakes(found, [*texts, *(text for text, _, _ in hard)])
    counts = dict.fromkeys([*sorted({kind for _, _, kind in hard}), "misaligned"], 0)
    for i, j in enumerate(found.tolist()):
        error = "misaligned"
        if j >= len(y):  # an altered row
            _, source, kind = hard[j - len(y)]
            error = kind if texts[source] == texts[i] else error
        counts[error] += wrong[i]
    shares = {f"xsim++/{error}": 100 * count / len(x) for error, count in counts.items()}
    return {"xsim++": percent(wrong)} | shares


def top1(x, y):
    """Percent of the rows of x whose nearest row of y by cosine is their own."""
    return 100 - percent(mistakes(search(x, y, 1).indices[:, 0]))


# ---- geometry: is the space in use, or has the encoder collapsed?


def spectrum(z, center):
    """Singular values in float64, largest first: (N, D) -> (min(N, D),)."""
    z = torch.as_tensor(z).double()
    floor = 1e-7 * z.norm()  # below is the rounding of float32 vectors: one point has no directions
    if center:
        z = z - z.mean(0)
    gram = z.T @ z if len(z) > z.shape[1] else z @ z.T  # the smaller of the two
    s = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().flip(0)
    return torch.where(s > floor, s, 0)


def rankme(z):
    """exp(-sum p log p), p = s / sum s + 1e-7, s the singular values: (N, D) -> 1..min(N, D), the
    directions in use. [Garrido et al. 2023]"""
    # It grows with N: compare what was measured on equally many rows
    s = spectrum(z, center=False)
    p = s / s.sum().clamp(min=1e-300) + 1e-7
    return math.exp(torch.special.entr(p).sum().item())


def uniformity(z):
    """log mean exp(-2 |u_i - u_j|^2) over all i != j of unit rows: (N, D), N > 1 -> 0 (one point)
    ..-4 (the whole sphere). [Wang & Isola 2020, sec. 4]"""
    u = unit(z)  # (N, D)
    # |u_i - u_j|^2 = 2 - 2 cos; i = j is no pair, and would bias the mean upwards
    total = -(4 * (u.square().sum(1) - 1)).exp().sum().item()
    for rows in u.split(1024):
        total += (4 * (rows @ u.T - 1)).exp().sum().item()  # (1024, N)
    return math.log(total / (len(u) * (len(u) - 1)))


def alignment(x, y, power=2):
    """mean |u_i - v_i|^power of matched unit rows: (N, D), (N, D) -> 0 (best)..2^power.
    [Wang & Isola 2020, sec. 4]"""
    return (unit(x) - unit(y)).norm(dim=1).pow(power).mean().item()


def std(z):
    """Standard deviation of each dimension of the unit rows, mean, times sqrt(D): (N, D) -> 0 (one
    point)..1 (healthy). [Chen & He 2021, SimSiam, fig. 2]"""
    u = unit(z)  # (N, D)
    return u.std(0, correction=0).mean().item() * math.sqrt(u.shape[1])


def random_cosine(x, y):
    """Mean cosine of row i of x and row j != i of y: (N, D), (N, D), N > 1 -> -1..1. [BERT-JEPA,
    tables 4-7, unrelated]"""
    u = unit(x)  # (N, D)
    v = unit(y)  # (N, D)
    # All pairs together are the product of two sums
    return ((u.sum(0) @ v.sum(0) - (u * v).sum()) / (len(u) * (len(u) - 1))).item()


def cosine_table(vectors):
    """Mean cosines of {language: (N, D), aligned}: "same" (unrelated sentences of one language),
    "translations", "different" (unrelated, of two), and of each pair. [BERT-JEPA, tables 4-7]"""
    first, *others = vectors
    same = {name: random_cosine(z, z) for name, z in vectors.items()}
    means = {"same": mean(same.values())}
    translations = {}
    different = {}
    for other in others:
        pair = f"{other}-{first}"
        means[f"same/{pair}"] = (same[other] + same[first]) / 2  # each alone
        products = unit(vectors[other]) * unit(vectors[first])   # (N, D)
        translations[pair] = products.sum(1).mean().item()
        different[pair] = random_cosine(vectors[other], vectors[first])
    if others:
        means |= with_mean("translations", translations) | with_mean("different", different)
    return means


def geometry(vectors):
    """{language: (N, D), aligned}, N > 1 -> means over languages, or over pairs with the first."""
    first, *others = vectors.values()
    scores = {"rankme": mean([rankme(z) for z in vectors.values()])}
    scores["rankme_share"] = 100 * scores["rankme"] / min(first.shape)
    scores["uniformity"] = mean([uniformity(z) for z in vectors.values()])
    scores["std"] = mean([std(z) for z in vectors.values()])
    if others:
        scores["alignment"] = mean([alignment(x, first) for x in others])
    return scores | {f"cosine/{name}": value for name, value in cosine_table(vectors).items()}


def diagnose(results, views=2):
    """Is the encoder collapsing? Results of `geometry` or `run` -> measures and verdict, a line."""
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
    return (f"health: RankMe {found['rankme']:.1f} ({found['rankme_share']:.0f} %) | cos(rand) "
            f"{together:.2f}{positive} | unif {found['uniformity']:.2f} | std {found['std']:.2f} "
            f"-> {verdict}")


# ---- the probe: what do vectors know of a sentence?


def linear_probe(x, labels, queries, gold):
    """Percent of the queries (M, D) whose class a linear map finds, trained on x (N, D), N labels:
    ridge regression on one-hot classes, in closed form."""
    classes = sorted(set(labels), key=str)
    targets = torch.tensor([classes.index(label) for label in labels])
    targets = F.one_hot(targets).double()                            # (N, classes)
    center = x.double().mean(0)                                      # (D,)
    z = x.double() - center                                          # (N, D)
    gram = z.T @ z                                                   # (D, D)
    # The penalty is relative to the mean variance of a dimension: scale does not count
    gram.diagonal().add_(.01 * gram.diagonal().mean() + 1e-300)
    weight = torch.linalg.solve(gram, z.T @ targets)                 # (D, classes)
    scores = (queries.double() - center) @ weight + targets.mean(0)  # (M, classes)
    found = scores.argmax(1).tolist()                                # (M,)
    return percent([classes[number] == label for number, label in zip(found, gold)])


def rank_correlation(a, b):
    """Spearman's: correlation of the ranks, (N,), (N,) -> -1..1; 0 if either is constant."""
    ranks = []
    for values in (a, b):
        values = torch.as_tensor(values, dtype=torch.float64)  # (N,)
        _, place, count = values.unique(return_inverse=True, return_counts=True)
        ranks.append((count.cumsum(0) - (count.double() - 1) / 2)[place])  # equal ones share theirs
    return torch.corrcoef(torch.stack(ranks))[0, 1].nan_to_num().item()  # 0 / 0 is no correlation


# ---- a model and the rows it is asked about


@dataclass
class Evaluation:
    """A model and the rows it is asked about; vectors and answers are made once for all tasks.
    BadInput for fewer than two rows, or a vector that is not finite."""
    model: torch.nn.Module
    tokenizer: Tokenizer
    rows: corpora.EvaluationRows
    affixes: Any = None             # (prefix, suffix) of the first column, and of the others
    max_length: int | None = None   # tokens of a text, the rest is cut; None: all the model takes
    config: dict | None = None      # of the run, which names its training data
    answer_limit: int | None = 200  # rows that are answered
    max_new: int | None = None      # tokens of an answer
    views: int = 2                  # texts of a training example
    pool: str | None = None         # another pooling than the model's

    def __post_init__(self):
        self.texts = self.rows.texts    # {column: N texts}, aligned
        self.hard = self.rows.hard      # [(text, row of the first column, type of error)]
        self.system = self.rows.system  # N texts that open a chat, or None
        self.affixes = self.affixes or (((), None), ((), None))
        self.count = len(next(iter(self.texts.values())))  # N
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

    def row_ids(self, texts, affixes):
        return text_rows(self.model, self.tokenizer, texts, *affixes, self.max_length)

    def embed(self, rows, pool=None):
        """N rows of ids -> (N, D)."""
        return self.checked(embed_rows(self.model, rows, pool or self.pool))

    def encode(self, texts, pool=None):
        """N texts -> (N, D), as those of the first column are."""
        return self.embed(self.row_ids(texts, self.affixes[0]), pool)

    @functools.cached_property
    def ids(self):
        """{column: N rows of ids}, each [CLS] (system [SEP]) prefix text suffix."""
        chat = self.tokenizer.special.chat
        openings = self.system and self.row_ids(self.system, (chat.system, chat.end))
        found = {}
        for name, texts in self.texts.items():
            rows = self.row_ids(texts, self.affixes[1 if found else 0])
            if openings:
                rows = [[*opening, *row[1:]] for opening, row in zip(openings, rows)]  # one [CLS]
            found[name] = rows
        return found

    @functools.cached_property
    def vectors(self):
        """{column: (N, D)}"""
        rows = sum(self.ids.values(), [])
        return dict(zip(self.ids, self.embed(rows).split(self.count)))

    @functools.cached_property
    def answers(self):
        return self.answers_of(slice(self.answer_limit))

    def answers_of(self, rows):
        """What a causal model writes after [CLS] (system [SEP]) prompt [SEP], up to [SEP], of a
        slice of the rows -> Answers."""
        prompts, golds = (texts[rows] for texts in self.texts.values())
        system = self.system and self.system[rows]
        special = self.tokenizer.special
        longest = self.model.config.max_positions
        max_new = self.max_new or 2 * max(map(len, self.tokenizer.encode(golds))) + 8
        suffix = [*special.chat.end, *special.chat.assistant]  # [SEP], or a chat model's own marks
        ids = rows_of(self.tokenizer, prompts, special.chat.user, suffix, system, self.max_length)
        # A prompt that fills the model makes room for its answer
        kept = max(longest // 2, longest - max_new) - len(suffix)
        cut = 0
        for i, row in enumerate(ids):
            if len(row) >= longest:
                ids[i] = [*row[:kept], *suffix]
                cut += 1
        written, stopped = generate(self.model, ids, special.sep, max_new)
        return Answers(prompts, golds, list(map(self.tokenizer.decode, written)), stopped, cut)

    @functools.cached_property
    def train_texts(self):
        """The set for `answer_scores`, or None: the data may be on another machine."""
        config = self.config
        if not config or not config["data"]:
            return None
        try:
            return corpora.train_texts(config["data"], comma_list(config.get("langs", "")),
                                       config.get("skip_bad", False), not config.get("eval_data"))
        except BadInput as error:
            print(f"note: the scores of unseen rows are left out: {error}", file=sys.stderr)


# ---- tasks


class Task(NamedTuple):
    scores: Callable       # evaluation -> {"metric" or "metric/detail": number}
    unavailable: Callable  # evaluation -> why it cannot be done, or ""
    about: dict            # {metric: (unit, which way is better, what it is)}
    views: int = 1         # done unasked of objectives with so many views or more


def retrieval(vectors, texts, negatives=None, hard=()):
    """Every language searched in the first: {language: (N, D)}, {language: N texts}, of its altered
    rows what `xsim_plus` takes -> {metric: mean over languages, "xsim/de-en": ...}."""
    first, *others = vectors
    y = vectors[first]
    found = {}  # {metric: {pair of languages: value}}
    for other in others:
        x = vectors[other]
        scores = {"xsim": xsim(x, y, texts[first]), "top1": top1(x, y)}
        if hard:
            scores |= xsim_plus(x, y, negatives, hard, texts[first])
        for metric, value in scores.items():
            found.setdefault(metric, {})[f"{other}-{first}"] = value
        found["top1"][f"{first}-{other}"] = top1(y, x)
    results = {}
    for metric, values in found.items():
        results[metric] = mean(values.values())
        if "/" not in metric:  # of an error of xsim++ the mean alone
            results |= with_mean(metric, values)
    return results


def task_retrieval(evaluation):
    negatives = evaluation.encode([text for text, _, _ in evaluation.hard])  # (M, D)
    scores = retrieval(evaluation.vectors, evaluation.texts, negatives, evaluation.hard)
    return {"rows": evaluation.count} | scores


def no_retrieval(evaluation):
    if len(evaluation.texts) > 1:
        return ""
    return f"looks for translations, and {evaluation.rows.name} has one text a row: leave it out"


def task_geometry(evaluation):
    return {"rows": evaluation.count} | geometry(evaluation.vectors)


def task_probe(evaluation):
    """A linear probe for each property of labelled texts; do cosines rank pairs as graders do?"""
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
    scores = {"rows": len(texts), "mean": mean(found.values())} | found
    scores |= with_mean("majority", majority)
    return scores | {"similarity": 100 * rank_correlation(cosines, similarity)}


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
    "rows_new_prompt": ("", "", "prompts that were not trained on"),
    "rows_unseen": ("", "", "gold texts that were not trained on"),
}
TASKS = {
    "retrieval": Task(task_retrieval, no_retrieval, views=2, about=ROWS | {
        "xsim": ("%", "lower", "wrong translation found: ratio margin, k = 4"),
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
        "exact_new_prompt": ("%", "higher", "exact, of prompts not trained on"),
        "exact_unseen": ("%", "higher", "exact, of gold texts not trained on"),
    }),
}


def run(evaluation, names=None, tasks=TASKS):
    """Do tasks, by default all that apply -> {"task/metric": number}. BadInput for a task that is
    unknown or unavailable."""
    names = names or [name for name, task in tasks.items()
                      if task.views <= evaluation.views and not task.unavailable(evaluation)]
    for name in names:
        if name not in tasks:
            more = f"; tasks/ has more: python -m tasks RUN --tasks {name}"
            raise BadInput(f"task {name!r} is none of {', '.join(tasks)}"
                           + did_you_mean(name, tasks, more))
        reason = tasks[name].unavailable(evaluation)
        if reason:
            raise BadInput(f"task {name!r} {reason}")
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


def examples(evaluation):
    """Five rows to read -> list of Example: answers of a causal model, or retrieval, the languages
    in turn; [] where nobody taught either."""
    first, *others = evaluation.texts
    if not others or evaluation.views < 2:
        return []
    step = max(1, evaluation.count // 5)
    rows = slice(0, 5 * step, step)  # spread evenly
    golds = evaluation.texts[first]
    shown = []
    if not no_generate(evaluation):
        made = evaluation.answers_of(rows)
        shown = zip(made.prompts, made.written, made.golds)
    else:
        vectors = evaluation.vectors
        found = {other: mine(vectors[other], vectors[first]) for other in others[:5]}
        for turn, row in enumerate(range(evaluation.count)[rows]):
            other = others[turn % len(others)]
            shown.append((evaluation.texts[other][row], golds[found[other][row]], golds[row]))
    return [Example(*texts, exact(*texts[1:])) for texts in shown]


# ---- the table


def about(name, tasks=TASKS):
    """A result's name -> (unit, which way is better, what it is); the last is "" of a detail."""
    task, _, whole = name.partition("/")
    known = tasks[task].about if task in tasks else {}
    metric = whole
    # xsim++/de-en: is there an xsim++/de-en, an xsim++?
    while metric not in known and "/" in metric:
        metric = metric.rpartition("/")[0]
    unit, better, what = known.get(metric, ("", "", ""))
    return unit, better, what if metric == whole else ""


def table(results, before=None, tasks=TASKS):
    """Results, and those of the untrained model -> at most 20 aligned lines: name, values, unit,
    which way is better, what it is."""
    names = list(results)
    if len(names) > 20:  # without languages and other details
        names = [name for name in names if about(name, tasks)[2]][:20]
    width = max(map(len, names))
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
    health = diagnose(results, views=2 if "retrieval/xsim" in results else 1)
    # Random weights look collapsed: that is no verdict on training
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


def read_log(folder):
    """The objects of log.jsonl, [] if there is none."""
    path = Path(folder) / "log.jsonl"
    records = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):  # a kill may cut the last line short
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def read_first(folder):
    """The first line of a run's log, which has its "config". BadInput if there is none."""
    first = next(iter(read_log(folder)), {})
    config = first.get("config")
    if not isinstance(config, dict) or "data" not in config:
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
        with contextlib.suppress(ValueError, TypeError):  # a damaged file is written anew
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


def evaluation_of(opened, data=None, langs=None, split=None, limit=None, max_new=None, pool=None):
    """A RunFolder and what was asked for -> Evaluation."""
    config = opened.config
    own = config.get("eval_data") or config["data"]
    spec = data or own
    if not spec:
        raise BadInput(f"{opened.folder} has no data of its own: name some with --data")
    if own and Path(spec).resolve() == Path(own).resolve():
        spec = own  # the same file, perhaps under another name
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
                      config.get("max_length"), config, answer_limit=None, max_new=max_new,
                      views=opened.first.get("views", 2), pool=pool)


# ---- command line

MOVED = {"export": "interop", "encode": "interop", "nearest": "interop", "compare": "results"}


def file_name(arguments):
    """eval.json of the run's own rows; others have a name of their own: all eval.json are alike."""
    parts = []
    if arguments.data:
        parts.append(Path(arguments.data.split(",")[0]).resolve().name.split(".")[0] or "data")
    parts += [arguments.split, *arguments.langs, getattr(arguments, "pool", None)]
    return "-".join(["eval", *filter(None, parts)])[:200] + ".json"


def main(argv):
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
        print(diagnose(results, evaluation.views))


if __name__ == "__main__":
    sys.exit(exit_status(main, sys.argv[1:]))
