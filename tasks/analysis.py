"""What the papers measure in embeddings, hidden states and attention, beyond metrics.geometry.

The metrics come first, then the tasks. Embeddings are (N, D), u unit rows, s singular values.
"""

import copy
import math
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import torch
from scipy.stats import entropy
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import cross_val_predict
from sklearn.preprocessing import StandardScaler

from base.metrics import (
    errors,
    knn,
    mean,
    percent,
    random_cosine,
    rankme,
    spectrum,
    uniformity,
    unit,
    with_mean,
)
from evaluate import (
    NotApplicable,
    embed,
    map_batches,
    need_answers,
    need_translations,
    task_retrieval,
)
from objectives import Ntp
from tasks.probes import measure

# ---- ranks


def explained(z):
    """Return the percentage of variance in the first 1, 2, ... principal components: (N, D) ->
    (min(N, D),)."""
    variance = spectrum(z, center=True).square().cumsum(0)
    return 100 * variance / variance[-1].clamp(min=1e-300)


def directions(z):
    """Measure the effective dimension: (N, D) -> {metric: number}. [Predict-and-Reconstruct, eq.
    11-13]

    effective_rank: exp(-sum p log p), p = s / sum s [Roy & Vetterli 2007]. stable_rank: sum s^2 /
    max s^2 [Vershynin 2018]. rank_90: number of components that hold 90 % of the variance.
    spectral_entropy: log effective rank / log D; the released code, and so the paper's numbers,
    have s^2 and log min(N, D)."""
    s = spectrum(z, center=True)
    if not s.any():  # one point
        return dict(effective_rank=0.0, stable_rank=0.0, rank_90=0.0, spectral_entropy=0.0)
    log_rank = float(entropy(s))  # SciPy scales s to sum 1
    return {"effective_rank": math.exp(log_rank),
            "stable_rank": (s.square().sum() / s[0] ** 2).item(),
            "rank_90": int((explained(z) < 90).sum()) + 1,
            "spectral_entropy": log_rank / math.log(z.shape[1])}


def ranks(embeddings):
    """Return Predict-and-Reconstruct's metrics of {column: (N, D)}, as means over columns.
    alignment: mean |u_i - v_i|^2 of translations, 0 (best)..4 [Wang & Isola 2020, sec. 4]."""
    each = [directions(z) | {"uniformity": uniformity(z)} for z in embeddings.values()]
    scores = {metric: mean([found[metric] for found in each]) for metric in each[0]}
    first, *others = map(unit, embeddings.values())
    if others:
        scores["alignment"] = mean([(x - first).square().sum(1).mean().item() for x in others])
    return scores


# ---- classes and tokens


def of_classes(z, labels):
    """Measure the distances within and between classes: (N, D), (N,) -> {metric: number}.
    [Predict-and-Reconstruct, sec. 4.3]

    class_alignment: mean |u_i - u_j|^2 over the pairs of a class, then over classes. The released
    code, and so the paper's numbers, have the fourth power.
    class_separation: mean distance within classes, divided by that between classes."""
    if labels.is_floating_point():  # the released code makes five classes of scores
        labels = torch.bucketize(labels, torch.tensor([1., 2, 3, 4]), right=True)
    distances = torch.pdist(unit(z))  # (N (N - 1) / 2,) in the order of i, j
    i, j = torch.triu_indices(len(labels), len(labels), 1)
    same = labels[i] == labels[j]
    squares = [distances[same & (labels[i] == label)].square() for label in labels.unique()]
    return {"class_alignment": mean([one.mean().item() for one in squares if len(one)]),
            "class_separation": (distances[same].mean() / distances[~same].mean()).item()}


def commonest_tokens(rows, special):
    """Return the most frequent token of each row of ids that is not special (the smallest of
    several): (N,) ints; -1 if there is none, or if fewer than 5 rows have the same."""
    targets = []
    for ids in rows:
        counts = Counter(sorted(int(token) for token in ids if token not in special))
        targets.append(max(counts, key=counts.get, default=-1))
    rows_with = Counter(targets)
    return torch.tensor([target if rows_with[target] >= 5 else -1 for target in targets])


def probe(z, labels, folds):
    """Return the accuracy of a linear probe for labels (N,), of scores Spearman's correlation, by
    cross-validation. As in the released code, dimensions are scaled over all rows.
    [Predict-and-Reconstruct, app. D]"""
    if len(labels.unique()) == 1:
        return 100.0
    z = StandardScaler().fit_transform(z.double().numpy())
    is_score = labels.is_floating_point()
    model = Ridge() if is_score else LogisticRegression(max_iter=500)
    found = cross_val_predict(model, z, labels.numpy(), cv=folds)
    return measure("spearman" if is_score else "accuracy", found, labels)


# ---- linear maps between views


def linear_map(x, y):
    """Return LLM-JEPA's measures of two views: (N, D), (N, D) -> {metric: number}. [table 14]

    residual: min over X of |x X - y| (Frobenius norm), on the rows that X is fitted to, so it is 0
    if N <= D; residual_relative: divided by |y|. singular_100: mean of the 100 largest singular
    values of x - y."""
    x = x.double()
    y = y.double()
    fitted = torch.linalg.lstsq(x, y, rcond=1e-6, driver="gelsd").solution
    residual = (x @ fitted - y).norm().item()
    return {"residual": residual, "residual_relative": residual / y.norm().item(),
            "singular_100": spectrum(x - y, center=False)[:100].mean().item()}


RIDGE = (1e-6, 1e-4, 0.01, 0.1, 1.0, 10.0)  # strengths, relative to the variance of a dimension


def predict_codes(x, y, texts):
    """Predict Codes from Texts by ridge regression, and test it on every fourth row, to which it is
    not fitted: Texts (N, D), Codes (N, D), the N texts of the Codes -> {metric: number}.

    r2: explained fraction of the variance around the mean of the fitted Codes. retrieval_error:
    percentage of the test rows whose nearest Code, by the cosine of centered embeddings, has a
    different text; _mapped: the same for the predicted Code."""
    x = x.double()
    y = y.double()

    def predict(fitted, tested, strength):
        """Fit a map to some rows. Return its predictions for other rows, and their R2."""
        alpha = strength * len(fitted) * x[fitted].var(0, correction=0).mean().item()
        ridge = Ridge(alpha).fit(x[fitted].numpy(), y[fitted].numpy())
        predicted = torch.from_numpy(ridge.predict(x[tested].numpy()))
        left = (y[tested] - predicted).square().sum()
        total = (y[tested] - y[fitted].mean(0)).square().sum()
        return predicted, (1 - left / total).item() if total > 0 else 0.0

    rows = np.arange(len(x))
    tested = rows[3::4]
    fitted = np.delete(rows, tested)
    # Every fourth of the fitted rows chooses the strength.
    others = np.delete(fitted, slice(3, None, 4))
    strength = max(RIDGE, key=lambda one: predict(others, fitted[3::4], one)[1])
    predicted, r2 = predict(fitted, tested, strength)
    center = y[fitted].mean(0)

    def error(queries):
        nearest = knn(queries, y[tested] - center, 1).indices[:, 0]
        return percent(errors(nearest, texts[3::4]))

    return {"r2": r2, "retrieval_error": error(x[tested] - x[fitted].mean(0)),
            "retrieval_error_mapped": error(predicted - center)}


def words_of(text):
    return re.findall(r"\w+", text.lower()) or [text]  # a text without words is one word


def tfidf_errors(texts, codes):
    """Return the retrieval error of `predict_codes` without a model: the embeddings are TF-IDF over
    words and over 1 to 3 characters, with weights from the rows that it does not test: N texts,
    N texts -> {name: number}."""
    tested = np.arange(len(texts)) % 4 == 3
    fitted = [text for column in (texts, codes) for text, test in zip(column, tested) if not test]
    kinds = {"words": TfidfVectorizer(analyzer=words_of),
             "characters": TfidfVectorizer(analyzer="char", ngram_range=(1, 3))}
    scores = {}
    for name, vectorizer in kinds.items():
        vectorizer.fit(fitted)
        sides = []
        for column in (texts, codes):
            z = vectorizer.transform(column)  # (N, V), sparse
            sides.append(torch.from_numpy(z[tested].toarray() - np.asarray(z[~tested].mean(0))))
        nearest = knn(*sides, 1).indices[:, 0]
        scores[f"tfidf/{name}"] = percent(errors(nearest, codes[3::4]))
    return scores


# ---- hidden states and attention


def token_states(evaluation, rows):
    """Return the last hidden states of N rows of ids, (L, D) float32 each."""
    return map_batches(evaluation.model, rows, lambda packed: (
        evaluation.model(packed).float().cpu().split(packed.cu_seqlens.diff().tolist())))


def nearest_tokens(columns, states, special, limit=250):
    """Find the nearest of all other plain tokens to three random ones in each of the first rows of
    the first column. columns: [rows of ids, ...], states: [list of (L, D), ...]. Return the queries
    and what was found, (N, 3) each, as (column, row, id)."""
    keys = torch.tensor([(column, row, token) for column, rows in enumerate(columns)
                         for row, ids in enumerate(rows) for token in ids])  # (n, 3)
    plain = ~torch.isin(keys[:, 2], torch.as_tensor(special))
    keys = keys[plain]
    vectors = torch.cat(sum(states, []))[plain]  # (n, D)
    chance = torch.Generator().manual_seed(0)
    queries = []
    for row in range(min(limit, len(columns[0]))):
        index = ((keys[:, 0] == 0) & (keys[:, 1] == row)).nonzero()[:, 0]
        queries.append(index[torch.randperm(len(index), generator=chance)[:3]])
    queries = torch.cat(queries)  # (N,)
    first, second = knn(vectors[queries], vectors, 2).indices.T
    return keys[queries], keys[torch.where(first == queries, second, first)]


def token_matches(queries, found):
    """Return what was found as percentages: queries (N, 3), found (N, 3) of (column, row, id) ->
    "same_sentence", "translation" (the same row in another column), "same_language" (the same token
    in another row), "other". [MEXMA, table 9]"""
    column, row, token = (found == queries).T  # (N,) each
    kinds = {"translation": ~column & row, "same_sentence": column & row,
             "same_language": column & ~row & token, "other": ~(column & token | row)}
    return {name: 100 * kind.double().mean().item() for name, kind in kinds.items()}


# ---- tasks

POOLINGS = ("mean", "max", "weighted", "attention")  # of Predict-and-Reconstruct's tables


def pool(evaluation, rows, how):
    """Embed rows of ids, (N, D). "weighted" is the mean, because its weights are all equal, and
    "attention" has a random query and random keys, both as in Predict-and-Reconstruct's code."""
    if how != "attention":
        return embed(evaluation.model, rows, "mean" if how == "weighted" else how)
    width = evaluation.model.config.width
    chance = torch.Generator().manual_seed(0)
    keys = (2 * torch.rand(width, width, generator=chance) - 1) / width ** 0.5  # as nn.Linear's
    query = torch.randn(width, generator=chance) @ keys / width ** 0.5  # (D,)
    return torch.stack([(states @ query).softmax(0) @ states
                        for states in token_states(evaluation, rows)])


def poolings(evaluation):
    """Return `ranks` under each of Predict-and-Reconstruct's poolings."""
    scores = {"rows": evaluation.rows.count}
    for how in POOLINGS:
        embeddings = {name: pool(evaluation, rows, how)
                      for name, rows in evaluation.rows.ids.items()}
        scores |= {f"{how}/{name}": value for name, value in ranks(embeddings).items()}
    return scores


def spectra(evaluation):
    """Return the variance in the first principal components of all columns together, and `ranks`.
    [BERT-JEPA, fig. 1]"""
    variance = explained(torch.cat(list(evaluation.embeddings.values())))
    first = {f"explained_{k}": variance[:k][-1].item() for k in (1, 2, 10, 50)}
    return {"rows": evaluation.rows.count} | first | ranks(evaluation.embeddings)


def frequencies(evaluation):
    """Return the entropy of the tokens in nats: the loss of a model that knows only how frequent
    each token is."""
    ids = np.concatenate(evaluation.rows.tokenizer.encode(sum(evaluation.texts.values(), [])))
    return {"tokens": len(ids), "nats": float(entropy(np.bincount(ids)))}


def with_affixes(rows, affixes):
    """Return the same EncodedRows with different ids around a text."""
    rows = copy.copy(rows)
    vars(rows).pop("ids", None)
    rows.affixes = affixes
    return rows


def at_both_positions(evaluation, measure):
    """Return {"last/metric": number} of measure(Texts (N, D), Codes (N, D)) at the last tokens of
    the texts themselves, and "train/metric" where the objective reads: at [PRED] for llm-jepa, else
    at the stop token. An encoder has "train/metric" alone, by its pooling."""
    special = evaluation.rows.tokenizer.special
    positions = {"train": [tuple(map(tuple, pair)) for pair in evaluation.rows.affixes]}
    if evaluation.model.config.is_decoder:
        if positions["train"] == [(special.before, special.after)] * 2:  # an imported model
            positions["train"] = Ntp.affixes(None, special)
        # Without [PRED] before a text, so that "last" is the same position for all objectives.
        turns = (special.chat.user, special.chat.assistant)
        positions["last"] = [(special.chat.start + turn, ()) for turn in turns]
    scores = {"rows": evaluation.rows.count}
    for position, affixes in positions.items():
        there = replace(evaluation, rows=with_affixes(evaluation.rows, affixes))
        found = measure(*there.embeddings.values())
        scores |= {f"{position}/{metric}": value for metric, value in found.items()}
    return scores


def linear(evaluation):
    """Return `linear_map` of the two columns at both positions, with no prefix for "last"."""
    need_answers(evaluation, "linear")
    scores = at_both_positions(evaluation, linear_map)
    return {name.removeprefix("last/"): value for name, value in scores.items()}


def embedding_position(evaluation):
    """Return `predict_codes` at both positions, and the geometry of both columns there;
    rankme_centered is of embeddings minus their mean. `tfidf_errors` is the control."""
    if len(evaluation.texts) != 2:
        raise NotApplicable("embedding-position needs two columns, Text and Code: choose them with "
                            "--langs a,b")
    if evaluation.rows.count < 16:
        raise NotApplicable("embedding-position needs 16 rows to fit a map, and there are "
                            f"{evaluation.rows.count}")

    def measure(x, y):
        return predict_codes(x, y, list(evaluation.texts.values())[1]) | {
            "rankme": mean([rankme(x), rankme(y)]),
            "rankme_centered": mean([rankme(x - x.mean(0)), rankme(y - y.mean(0))]),
            "cosine_random": mean([random_cosine(x, x), random_cosine(y, y)]),
            "singular_100": spectrum(x - y, center=False)[:100].mean().item()}

    scores = at_both_positions(evaluation, measure)
    return scores | tfidf_errors(*evaluation.texts.values())


def tokens(evaluation):
    """Return MEXMA's table 9: `token_matches` of three tokens in each of 250 rows."""
    need_translations(evaluation, "tokens")
    # Keep one of equal texts: otherwise tokens would be found in the copy of their row.
    texts = next(iter(evaluation.texts.values()))
    new = [row for row, text in enumerate(texts) if texts.index(text) == row]
    columns = [[ids[row] for row in new] for ids in evaluation.rows.ids.values()]
    states = [token_states(evaluation, column) for column in columns]
    queries, found = nearest_tokens(columns, states, evaluation.rows.tokenizer.special.ids)
    return {"rows": len(new), "rows_queries": len(queries)} | token_matches(queries, found)


def attention_weights(model, packed, index):
    """Return the attention of the tokens at some indices (N,) in the last layer: (H, L) for each,
    over the L keys that it attends to. The back ends never store it, so it is computed again from
    the layer's input."""
    attention = model.blocks[-1].attention
    given = []
    with attention.register_forward_pre_hook(lambda module, inputs: given.append(inputs)):
        model(packed)
    x, _, angles, *_ = given[0]
    parts = [attention.heads, attention.kv_heads, attention.kv_heads]
    qkv = attention.project(x, angles).unflatten(-1, (-1, attention.head_dim))
    q, k, _ = qkv.split(parts, 1)  # (T, H or Hkv, K)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)  # (T, H, K)
    packed = packed.within(attention.window)
    weights = []
    for i in index.tolist():
        low, high, low2, high2 = packed.key_ranges[i].tolist()
        keys = torch.cat([k[low2:high2], k[low:high]])  # (L, H, K), the shared prefix first
        scores = (keys * q[i]).sum(-1) / q.shape[-1] ** 0.5  # (L, H)
        if attention.softcap:
            scores = attention.softcap * (scores / attention.softcap).tanh()
        weights.append(scores.float().softmax(0).T)
    return weights


def attention(evaluation):
    """Return the entropy in nats of the last layer's attention from the first token or, in a causal
    model, the last one: with pooling cls or last its state is the embedding. It is averaged over
    heads and rows. [MEXMA, sec. 5.6, which does not say how]"""
    model = evaluation.model

    def read(packed):
        ends = packed.cu_seqlens[1:] - 1 if model.config.causal else packed.cu_seqlens[:-1]
        return [torch.tensor(entropy(weights.double().cpu(), axis=1).mean())
                for weights in attention_weights(model, packed, ends)]

    return {"rows": evaluation.rows.count} | with_mean("entropy", {
        name: mean(map_batches(model, rows, read)).item()
        for name, rows in evaluation.rows.ids.items()})


def uniform(evaluation):
    """Return MEXMA's table 10: retrieval with the model's own pooling and with the mean."""
    scores = {"rows": evaluation.rows.count}
    for how in (evaluation.pool, "mean"):
        found = task_retrieval(replace(evaluation, pool=how))
        scores |= {f"{name}/{how}": found[name] for name in ("xsim", "xsim++") if name in found}
    return scores


def gap(evaluation, flags):
    """Return Predict-and-Reconstruct's tables 4-11 for each set and each pooling. "gap" is the
    score of a probe for labels, "semantic" (CoLA's is the accuracy, in table 10 MCC), minus that of
    one for `commonest_tokens`, "token". As in its code, a pair is one row."""
    special = evaluation.rows.tokenizer.special
    longest = evaluation.model.config.longest_row
    scores = {}
    for name, (table,) in flags.tables["gap"].items():
        texts, second, labels = zip(*table[:flags.limit or None])
        labels = torch.tensor(labels)
        rows = evaluation.rows.encode(texts)
        if None not in second:
            rows = [[special.cls, *a, special.sep, *b][:longest - 1] + [special.sep]
                    for a, b in zip(*map(evaluation.rows.tokenizer.encode, (texts, second)))]
        targets = commonest_tokens(rows, special.ids)
        known = targets >= 0
        scores[f"{name}/rows"] = len(rows)
        for how in dict.fromkeys((evaluation.pool, *POOLINGS)):
            z = pool(evaluation, rows, how)
            found = {"semantic": probe(z, labels, 5)}
            if known.any():
                found["token"] = probe(z[known], targets[known], 3)
                found["gap"] = found["semantic"] - found["token"]
            found |= ranks({name: z}) | of_classes(z, labels)
            scores |= {f"{name}/{how}/{metric}": value for metric, value in found.items()}
    return scores
