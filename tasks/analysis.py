"""What the papers measure in embeddings, hidden states and attention, beyond evaluate.geometry.

The metrics come first, then the tasks. Embeddings are (N, D), u unit rows, s singular values.
"""

import dataclasses
import math

import numpy as np
import torch
from scipy.stats import entropy
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import cross_val_predict
from sklearn.preprocessing import StandardScaler

import evaluate
from common import BadInput, warn
from evaluate import (
    NotApplicable,
    cosines,
    embed,
    errors,
    knn,
    map_batches,
    mean,
    percent,
    random_cosine,
    rankme,
    retrieval,
    spectrum,
    uniformity,
    unit,
    with_mean,
)
from objectives import Ntp
from tasks import sets
from tasks.mining import need_translations
from tasks.probes import IN_LANGUAGES, measure

# ---- ranks


def explained(z):
    """Return the percentage of variance in the first 1, 2, ... principal components: (N, D) ->
    (min(N, D),), up to 100; zeros for one point."""
    variance = spectrum(z, center=True).square().cumsum(0)
    return 100 * variance / variance[-1].clamp(min=1e-300)


def directions(z):
    """Measure the effective dimension around the mean: (N, D) -> {metric: number}, zeros for one
    point. [Predict-and-Reconstruct, eq. 11-13]

    effective_rank: exp(-sum p log p), p = s / sum s [Roy & Vetterli 2007]. stable_rank: sum s^2 /
    max s^2 [Vershynin 2018]. rank_90: number of components that hold 90 % of the variance.
    spectral_entropy: log effective rank / log D."""
    s = spectrum(z, center=True)
    if not s.sum() > 0:
        return dict(effective_rank=0.0, stable_rank=0.0, rank_90=0.0, spectral_entropy=0.0)
    log_rank = float(entropy(s))  # SciPy scales s to sum 1
    return {"effective_rank": math.exp(log_rank),
            "stable_rank": (s.square().sum() / s[0] ** 2).item(),
            "rank_90": int((explained(z) < 90).sum()) + 1,
            "spectral_entropy": log_rank / math.log(z.shape[1])}


def alignment(x, y):
    """Return mean |u_i - v_i|^2 of matched unit rows: (N, D), (N, D) -> 0 (best)..4.
    [Wang & Isola 2020, sec. 4]"""
    return (unit(x) - unit(y)).square().sum(1).mean().item()


def ranks(embeddings):
    """Return Predict-and-Reconstruct's metrics of {column: (N, D)}, as means over columns;
    alignment is of translations."""
    first, *others = embeddings.values()
    each = [directions(z) | {"uniformity": uniformity(z)} for z in embeddings.values()]
    scores = {metric: mean([found[metric] for found in each]) for metric in each[0]}
    if others:
        scores["alignment"] = mean([alignment(x, first) for x in others])
    return scores


# ---- classes and tokens


def of_classes(z, labels):
    """Measure the distances within and between classes: (N, D), (N,) -> {metric: number}. Raises
    ValueError without pairs of both kinds. [Predict-and-Reconstruct, sec. 4.3 and its code]

    class_alignment: mean |u_i - u_j|^2 over the pairs of a class, then over classes.
    class_separation: mean distance within classes, divided by that between classes."""
    labels = torch.as_tensor(labels)
    if labels.is_floating_point():  # the released code makes five classes of scores
        labels = torch.bucketize(labels, torch.tensor([1., 2, 3, 4]), right=True)
    distances = torch.pdist(unit(z))  # (N (N - 1) / 2,) in the order of i, j
    i, j = torch.triu_indices(len(labels), len(labels), 1)
    same = labels[i] == labels[j]
    if same.all() or not same.any():
        raise ValueError("all pairs are of one class, or none is")
    within = distances[same]
    classes = [labels[i][same] == label for label in labels[i][same].unique()]
    return {"class_alignment": mean([within[one].square().mean().item() for one in classes]),
            "class_separation": (within.mean() / distances[~same].mean()).item()}


def commonest_tokens(rows, special):
    """Return the most frequent token of each row of ids that is not special (the smallest of
    several): (N,) ints; -1 if there is none, or if fewer than 5 rows have the same."""
    targets = []
    for ids in rows:
        plain = torch.tensor([token for token in ids if token not in special], dtype=torch.int64)
        targets.append(int(plain.bincount().argmax()) if len(plain) else -1)
    targets = torch.tensor(targets)
    _, index, counts = targets.unique(return_inverse=True, return_counts=True)
    return torch.where(counts[index] >= 5, targets, -1)


def predict_folds(z, labels, n):
    """Predict labels by a linear probe with n-fold cross-validation: (N, D), (N,) -> (N,). As in
    the released code, the dimensions are scaled over all rows. Raises ValueError for too few rows.
    """
    z = StandardScaler().fit_transform(z.double().numpy())
    labels = torch.as_tensor(labels)
    if len(labels.unique()) == 1:
        return labels
    probe = Ridge() if labels.is_floating_point() else LogisticRegression(max_iter=500)
    return cross_val_predict(probe, z, labels.numpy(), cv=n)


def probe_gap(z, targets, labels=None):
    """Compare a linear probe for labels with one for tokens: embeddings (N, D), `commonest_tokens`
    (N,), N classes or scores -> {metric: number}. "token" and "semantic" are accuracies (of scores,
    Spearman's correlation), "gap" is their difference. [Predict-and-Reconstruct, app. D]"""
    scores = {}
    known = targets >= 0
    if known.any():
        found = predict_folds(z[known], targets[known], 3)
        scores["token"] = measure("accuracy", found, targets[known])
    if labels is None:
        return scores
    found = predict_folds(z, labels, 5)
    metric = "spearman" if torch.as_tensor(labels).is_floating_point() else "accuracy"
    scores["semantic"] = measure(metric, found, labels)
    if "token" in scores:
        scores["gap"] = scores["semantic"] - scores["token"]
    return scores


# ---- linear maps between views


def linear_map(x, y):
    """Return LLM-JEPA's measures of two views: (N, D), (N, D) -> {metric: number}. [fig. 3, table
    14]

    residual: min over X of |x X - y| (Frobenius norm), on the rows that X is fitted to, so it is 0
    if N <= D; residual_relative: divided by |y|. singular_100: mean of the 100 largest singular
    values of x - y; singular_relative: divided by the mean L2 norm of a row."""
    x = x.double()
    y = y.double()
    fitted = torch.linalg.lstsq(x, y, rcond=1e-6, driver="gelsd").solution
    residual = (x @ fitted - y).norm().item()
    singular = spectrum(x - y, center=False)[:100].mean().item()
    norm = torch.cat([x, y]).norm(dim=1).mean().clamp(min=1e-300).item()
    return {"residual": residual, "residual_relative": residual / y.norm().item(),
            "singular_100": singular, "singular_relative": singular / norm}


RIDGE = (1e-6, 1e-4, .01, .1, 1.0, 10.0)  # strengths that are tried


def fit_ridge(x, y, strength):
    """Fit ridge regression with an intercept to x, y (N, D) float64 -> a function (M, D) -> (M, D).
    The strength is relative to the mean variance of a dimension of x."""
    alpha = strength * len(x) * x.var(0, correction=0).mean().item()
    fitted = Ridge(alpha).fit(x.numpy(), y.numpy())
    return lambda z: torch.from_numpy(fitted.predict(z.numpy()))


def r2(predicted, y, center):
    """Return 1 - sum |y - predicted|^2 / sum |y - center|^2: (N, D), (N, D), (D,) -> 1 (perfect), 0
    (no better than the center) or below; 0 if all of y is the center."""
    total = (y - center).square().sum()
    return (1 - (y - predicted).square().sum() / total).item() if total > 0 else 0.0


def predict_codes(x, y, texts):
    """Predict Codes from Texts by ridge regression, and test it on rows that it was not fitted to:
    Texts (N, D), Codes (N, D), the N texts of the Codes -> {metric: number}. [Hoerl & Kennard 1970]

    Every fourth row is a test row. r2: explained fraction of their variance around the mean of the
    fitted Codes. retrieval_error: percentage of the test rows whose nearest Code, by the cosine of
    centered embeddings, has a different text; _mapped: the same for the predicted Code. ridge: the
    strength, chosen on every fourth of the fitted rows."""
    x = x.double()
    y = y.double()
    tested = torch.arange(len(x)) % 4 == 3  # (N,)
    fitted_x = x[~tested]
    fitted_y = y[~tested]
    chosen = torch.arange(len(fitted_x)) % 4 == 3  # the fitted rows that choose the strength

    def r2_of(strength):
        predict = fit_ridge(fitted_x[~chosen], fitted_y[~chosen], strength)
        return r2(predict(fitted_x[chosen]), fitted_y[chosen], fitted_y[~chosen].mean(0))

    strength = max(RIDGE, key=r2_of)
    predicted = fit_ridge(fitted_x, fitted_y, strength)(x[tested])
    center = fitted_y.mean(0)
    codes = y[tested] - center
    texts = [text for text, is_tested in zip(texts, tested.tolist()) if is_tested]

    def error(queries):
        return percent(errors(knn(queries, codes, 1).indices[:, 0], texts))

    return {"r2": r2(predicted, y[tested], center),
            "retrieval_error": error(x[tested] - fitted_x.mean(0)),
            "retrieval_error_mapped": error(predicted - center), "ridge": strength}


def text_and_code(x, y, texts):
    """Return `predict_codes`, and the geometry of Texts (N, D) and Codes (N, D): rankme,
    cosine_random (unrelated texts) and uniformity are means over both columns, cosine_pairs is of a
    Text and its Code, _centered: of embeddings minus their mean; singular_100: see `linear_map`."""
    scores = predict_codes(x, y, texts)
    for ending, pair in (("", (x, y)), ("_centered", (x - x.mean(0), y - y.mean(0)))):
        scores[f"rankme{ending}"] = mean([rankme(z) for z in pair])
        scores[f"cosine_random{ending}"] = mean([random_cosine(z, z) for z in pair])
        scores[f"cosine_pairs{ending}"] = cosines(*pair).mean().item()
    scores["uniformity"] = mean([uniformity(x), uniformity(y)])
    scores["singular_100"] = spectrum(x - y, center=False)[:100].mean().item()
    return scores


# ---- hidden states and attention


def token_states(evaluation, rows, function=None):
    """Return the last hidden states of N rows of ids, (L, D) float32 each, or function(ids,
    states)."""

    def read(packed):
        lengths = packed.cu_seqlens.diff().tolist()
        states = evaluation.model(packed).float().cpu().split(lengths)
        return map(function, packed.tokens.cpu().split(lengths), states) if function else states

    return map_batches(evaluation.model, rows, read)


def nearest_tokens(columns, states, special, chosen, queries=3, k=5):
    """Find the k nearest of all tokens to random tokens of the `chosen` rows of the first column;
    special tokens do not count. columns: [rows of ids, ...], states: [list of (L, D), ...]. Return
    the queries (N, 3) and what was found (N, k, 3), each token as (column, row, id)."""
    keys = []
    for column, rows in enumerate(columns):
        for row, ids in enumerate(rows):
            keys += [(column, row, token) for token in ids]
    keys = torch.tensor(keys)  # (n, 3)
    plain = ~torch.isin(keys[:, 2], torch.as_tensor(special))
    keys = keys[plain]
    vectors = torch.cat([torch.cat(each) for each in states])[plain]  # (n, D)
    chance = torch.Generator().manual_seed(0)
    queried = []
    for row in chosen:
        index = ((keys[:, 0] == 0) & (keys[:, 1] == row)).nonzero()[:, 0]
        queried.append(index[torch.randperm(len(index), generator=chance)[:queries]])
    queried = torch.cat(queried)  # (N,)
    found = knn(vectors[queried], vectors, min(k + 1, len(vectors)))
    others = found.indices != queried[:, None]
    # With enough equally near tokens a token may not find itself. Then drop the last one found.
    others[others.all(1), -1] = False
    return keys[queried], keys[found.indices[others].view(len(queried), -1)]


def token_matches(queries, found):
    """Return what was found as percentages: queries (N, 3), found (N, k, 3) of (column, row, id) ->
    "same_sentence", "translation" (the same row in another column), "same_language" (the same token
    in another row), "other". [MEXMA, table 9]"""
    column, row, token = (found == queries[:, None]).unbind(-1)  # (N, k) each
    kinds = {"translation": ~column & row, "same_sentence": column & row,
             "same_language": column & ~row & token, "other": ~(column & token | row)}
    return {name: 100 * kind.double().mean().item() for name, kind in kinds.items()}


def attention_weights(model, packed, index):
    """Return the attention probabilities of the tokens at some indices (N,) in the last layer: for
    each (H, L), over the L keys that it attends to."""
    # The back ends never store these weights, so compute them again from the layer's input.
    attention = model.blocks[-1].attention
    given = []
    hook = attention.register_forward_pre_hook(lambda module, inputs: given.append(inputs))
    try:
        model(packed)
    finally:
        hook.remove()
    x, _, angles, *_ = given[0]
    parts = [attention.heads, attention.kv_heads, attention.kv_heads]
    qkv = attention.project(x, angles).unflatten(-1, (-1, attention.head_dim))
    q, k, _ = qkv.split(parts, 1)  # (T, H or Hkv, K)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)  # (T, H, K)
    weights = []
    for i, (low, high, low2, high2) in zip(index.tolist(), packed.key_ranges[index].tolist()):
        keys = torch.cat([k[low2:high2], k[low:high]])  # (L, H, K), the shared prefix first
        scores = (keys * q[i]).sum(-1) / q.shape[-1] ** 0.5  # (L, H)
        if attention.softcap:
            scores = attention.softcap * (scores / attention.softcap).tanh()
        weights.append(scores.float().softmax(0).T)
    return weights


def attention_entropy(weights):
    """Return entropies in nats of attention weights (H, L) of each row, as means over rows: of each
    head, and of the mean over heads. Rows of two tokens do not count. [MEXMA, sec. 5.6 and app. G,
    which do not say which]"""
    weights = [w.double().clamp(min=1e-300) for w in weights if w.shape[1] > 2]
    return {"entropy": mean([entropy(w, axis=1).mean().item() for w in weights]),
            "entropy_of_mean": mean([float(entropy(w.mean(0))) for w in weights]),
            "entropy_uniform": mean([math.log(w.shape[1]) for w in weights]),
            "on_first": mean([100 * w[:, 0].mean().item() for w in weights]),
            "on_end": mean([100 * w[:, -1].mean().item() for w in weights])}


# ---- tasks

POOLINGS = ("mean", "max", "weighted", "attention")  # of Predict-and-Reconstruct's tables


def pool(evaluation, rows, how):
    """Embed rows of ids, (N, D). "weighted" is the mean, because its weights are all equal, and
    "attention" has a random query and random keys, both as in Predict-and-Reconstruct's code.
    "words" is the mean without special tokens [MEXMA]."""
    if how not in ("attention", "words"):
        return embed(evaluation.model, rows, "mean" if how == "weighted" else how)
    width = evaluation.model.config.width
    chance = torch.Generator().manual_seed(0)
    keys = (2 * torch.rand(width, width, generator=chance) - 1) / width ** 0.5  # as nn.Linear's
    query = torch.randn(width, generator=chance) @ keys / width ** 0.5  # (D,)
    special = torch.as_tensor(evaluation.tokenizer.special.ids)

    def pooled(ids, states):
        if how == "attention":
            return (states @ query).softmax(0) @ states
        plain = ~torch.isin(ids, special)
        return states[plain].mean(0) if plain.any() else states.mean(0)

    return torch.stack(token_states(evaluation, rows, pooled))


def poolings(evaluation):
    """Return `ranks` under each of Predict-and-Reconstruct's poolings."""
    scores = {"rows": evaluation.count}
    for how in POOLINGS:
        embeddings = {name: pool(evaluation, rows, how) for name, rows in evaluation.ids.items()}
        scores |= {f"{how}/{name}": value for name, value in ranks(embeddings).items()}
    return scores


def spectra(evaluation):
    """Return the variance in the first principal components of all columns together, and `ranks`.
    [BERT-JEPA, fig. 1]"""
    variance = explained(torch.cat(list(evaluation.embeddings.values())))
    scores = {"rows": evaluation.count}
    for k in (1, 2, 10, 50):
        scores[f"explained_{k}"] = variance[min(k, len(variance)) - 1].item()
    return scores | ranks(evaluation.embeddings)


def frequencies(evaluation):
    """Return the entropy of the tokens in nats: the loss of a model that has learned only how
    frequent each token is."""
    ids = np.concatenate(evaluation.tokenizer.encode(sum(evaluation.texts.values(), [])))
    return {"tokens": len(ids), "nats": float(entropy(np.bincount(ids)))}


def text_and_code_states(evaluation, task):
    """Embed Texts and Codes at two positions of the same rows: {"last": (Texts (N, D), Codes), the
    last tokens of the texts themselves, "train": the last tokens of the rows, where the objective
    reads embeddings: [PRED] for llm-jepa, the stop token for ntp and for imported models}."""
    if not evaluation.model.config.causal or len(evaluation.texts) != 2:
        raise NotApplicable(f"{task} needs a causal model and two columns, Text and Code: choose "
                            "them with --langs a,b")
    special = evaluation.tokenizer.special
    chat = special.chat
    affixes = [tuple(map(tuple, pair)) for pair in evaluation.affixes]
    if affixes == [(special.before, special.after)] * 2:  # an imported model
        affixes = Ntp.affixes(None, special)
    afters = [after for _, after in affixes]
    if not any(afters):
        warn(f"{task}: this objective reads a text at its own last token, so the positions last "
             "and train are the same")
    # Without [PRED] before a text, so that "last" is the same position for all objectives.
    befores = [chat.start + chat.user, chat.start + chat.assistant]
    found = {}
    for position, pairs in (("last", [(before, ()) for before in befores]), ("train", affixes)):
        found[position] = tuple(dataclasses.replace(evaluation, affixes=pairs).embeddings.values())
    return found


def linear(evaluation):
    """Return `linear_map` of the two columns at the texts' own last tokens, and for "train/" where
    the objective reads embeddings. It warns if the fit is ill-posed."""
    positions = text_and_code_states(evaluation, "linear")
    width = evaluation.model.config.width
    if evaluation.count < 2 * width:
        warn(f"linear: with {evaluation.count} rows of width {width} the fit is ill-posed: its "
             "residual is small whatever the embeddings are. Give more rows, or use --tasks "
             "embedding-position, which tests on rows that it does not fit")
    return {"rows": evaluation.count, "rows_per_width": evaluation.count / width,
            **linear_map(*positions["last"]),
            **{f"train/{name}": value for name, value in linear_map(*positions["train"]).items()}}


def embedding_position(evaluation):
    """Return `text_and_code` at the texts' own last tokens and where the objective reads."""
    if evaluation.count < 16:
        raise NotApplicable("embedding-position fits a map to three of four rows and needs 16, and "
                            f"there are {evaluation.count}")
    codes = list(evaluation.texts.values())[1]
    found = {position: text_and_code(*pair, codes) for position, pair in
             text_and_code_states(evaluation, "embedding-position").items()}
    scores = {"rows": evaluation.count}
    for metric in found["last"]:
        scores |= {f"{position}/{metric}": found[position][metric] for position in found}
    return scores


def tokens(evaluation):
    """Return MEXMA's table 9: `token_matches` of three tokens in each of 250 rows."""
    need_translations(evaluation, "tokens")
    # Keep one of equal texts: otherwise tokens would be found in the copy of their row.
    new = {}
    for row, text in enumerate(next(iter(evaluation.texts.values()))):
        new.setdefault(text, row)
    columns = [[ids[row] for row in new.values()] for ids in evaluation.ids.values()]
    states = [token_states(evaluation, column) for column in columns]
    special = evaluation.tokenizer.special.ids
    queries, found = nearest_tokens(columns, states, special, range(min(250, len(new))))
    five = token_matches(queries, found)
    return {"rows": len(new), "rows_queries": len(queries)} | token_matches(
        queries, found[:, :1]) | {f"{name}/nearest_5": value for name, value in five.items()}


def attention(evaluation):
    """Return `attention_entropy` of the token whose state is the embedding, the first one or, in a
    causal model, the last, in the last layer, for every column. [MEXMA, figs 7-10]"""
    model = evaluation.model
    if not model.blocks:
        raise NotApplicable("attention reads the last layer, and this model has none")

    def read(packed):
        ends = packed.cu_seqlens[1:] - 1 if model.config.causal else packed.cu_seqlens[:-1]
        return [each.cpu() for each in attention_weights(model, packed, ends.long())]

    each = {name: attention_entropy(map_batches(model, rows, read))
            for name, rows in evaluation.ids.items()}
    scores = {"rows": evaluation.count}
    for metric in next(iter(each.values())):
        scores |= with_mean(metric, {name: found[metric] for name, found in each.items()})
    return scores


def uniform(evaluation):
    """Return MEXMA's table 10: retrieval with the model's own pooling, with the mean, and with the
    mean of tokens that are not special; "change" is (own - other) / own, in percent."""
    need_translations(evaluation, "uniform")
    own = evaluation.pool
    hard = evaluation.encode_ids([text for text, _, _ in evaluation.hard])
    scores = {"rows": evaluation.count}
    for how in dict.fromkeys((own, "mean", "words")):
        embeddings = {name: pool(evaluation, rows, how) for name, rows in evaluation.ids.items()}
        negatives = pool(evaluation, hard, how) if hard else None
        found = retrieval(embeddings, evaluation.texts, negatives, evaluation.hard)
        for name in sorted({"xsim", "xsim++"} & found.keys()):
            scores[f"{name}/{how}"] = found[name]
            before = scores[f"{name}/{own}"]
            if how != own and before:
                scores[f"change/{name}/{how}"] = 100 * (before - found[name]) / before
    return scores


def gap(evaluation, options):
    """Return Predict-and-Reconstruct's tables 7-11 for each of --sets and each pooling; without
    --sets, the token probe of the first column. As in its code, a pair is one row."""
    chosen = {name: sets.Rows(texts, None, None)
              for name, texts in list(evaluation.texts.items())[:1] if not options.sets}
    for name in options.sets or ():
        for lang in options.langs if name in IN_LANGUAGES else ("en",):
            chosen[sets.label_of(name, lang)] = sets.read_set(name, options.files, "test", lang)
    special = evaluation.tokenizer.special
    scores = {}
    for name, columns in chosen.items():
        texts, second, labels = (column and column[:options.limit] for column in columns)
        rows = evaluation.encode_ids(texts)
        if second:
            firsts = [[*special.chat.start, *ids.tolist(), special.sep]
                      for ids in evaluation.tokenizer.encode(texts)]
            rows = evaluate.encode_ids(evaluation.model, evaluation.tokenizer, second,
                                       evaluation.affixes[0], openings=firsts)
        targets = commonest_tokens(rows, special.ids)
        scores[f"{name}/rows"] = len(rows)
        scores[f"{name}/rows_token"] = int((targets >= 0).sum())
        for how in dict.fromkeys((evaluation.pool, *POOLINGS)):
            z = pool(evaluation, rows, how)
            try:
                found = ranks({name: z}) | probe_gap(z, targets, labels)
                if labels:
                    found |= of_classes(z, labels)
            except ValueError as error:
                raise BadInput(f"the set {name} cannot be probed: {error}") from None
            scores |= {f"{name}/{how}/{metric}": value for metric, value in found.items()}
    return scores
