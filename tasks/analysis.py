"""What the papers look at in vectors and attention, beyond the core's geometry.

The metrics come first, then the tasks. Vectors are (N, D), u unit rows, s singular values.
"""

import dataclasses
import math
import sys

import numpy as np
import torch
from scipy.stats import entropy
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import cross_val_predict
from sklearn.preprocessing import StandardScaler

from corpora.program import BadInput
from data import rows_of
from evaluate import (
    cosines,
    embed,
    finite,
    mean,
    mistakes,
    over_pairs,
    percent,
    random_cosine,
    rankme,
    read_rows,
    retrieval,
    search,
    spectrum,
    uniformity,
    unit,
    with_mean,
)
from objectives import Ntp
from tasks import sets
from tasks.metrics import alignment
from tasks.probes import IN_LANGUAGES, measure


def explained(z):
    """Percent of the variance in the first 1, 2, ... principal components: (N, D) -> (min(N, D),),
    up to 100; zeros for one point."""
    share = spectrum(z, center=True).square().cumsum(0)
    return 100 * share / share[-1].clamp(min=1e-300)


def directions(z):
    """How many directions are in use around the mean: (N, D) -> {metric: number}, zeros for one
    point. [Predict-and-Reconstruct, eq. 11-13, its code]

    effective_rank: exp(-sum p log p) with p = s / sum s [Roy & Vetterli 2007]; stable_rank: sum s^2
    / max s^2 [Vershynin 2018]; rank_90: how many hold 90 % of the variance; spectral_entropy: log
    effective rank / log D, and in the released code that of s^2 over log min(N, D)."""
    s = spectrum(z, center=True)
    if not s.sum() > 0:
        return dict.fromkeys(("effective_rank", "stable_rank", "rank_90", "spectral_entropy",
                              "spectral_entropy_released"), 0.0)
    logarithm = float(entropy(s))  # SciPy scales s to sum 1
    variance = s.square()
    return {"effective_rank": math.exp(logarithm),
            "stable_rank": (variance.sum() / variance[0]).item(),
            "rank_90": int((explained(z) < 90).sum()) + 1,
            "spectral_entropy": logarithm / math.log(z.shape[1]),
            "spectral_entropy_released": float(entropy(variance)) / math.log(len(s))}


def ranks(vectors):
    """{column: (N, D)} -> Predict-and-Reconstruct's metrics, means over columns, by the formulas of
    its paper and of its code (_released, alignment_4, uniformity_1000). Alignment is of
    translations."""
    first, *others = vectors.values()
    each = []
    for z in vectors.values():
        some = torch.randperm(len(z), generator=torch.Generator().manual_seed(0))[:1000]
        each.append(directions(z) | {"uniformity": uniformity(z),
                                     "uniformity_1000": uniformity(z[some])})
    scores = {}
    for metric in each[0]:
        scores[metric] = mean([found[metric] for found in each])
    if others:
        scores["alignment"] = mean([alignment(x, first) for x in others])
        scores["alignment_4"] = mean([alignment(x, first, 4) for x in others])
    return scores


# ---- classes, words, and maps between views


def of_classes(z, labels):
    """How near are rows of a class? (N, D), (N,) -> "class_alignment", the mean of |u_i - u_j|^2
    over the pairs of a class, then over classes; "class_alignment_4", of power 4;
    "class_separation", the mean distance within classes over that between. ValueError if there are
    no such pairs. [Predict-and-Reconstruct, sec. 4.3, code]"""
    labels = torch.as_tensor(labels)
    # Its code makes five classes of scores.
    if labels.is_floating_point():
        labels = torch.bucketize(labels, torch.tensor([1., 2, 3, 4]), right=True)
    distances = torch.pdist(unit(z))  # (N (N - 1) / 2,) in the order of i, j
    i, j = torch.triu_indices(len(labels), len(labels), 1)
    same = labels[i] == labels[j]
    if same.all() or not same.any():
        raise ValueError("all pairs are of one class, or none is")
    within = distances[same]
    classes = [labels[i][same] == label for label in labels[i][same].unique()]
    return {"class_alignment": mean([within[one].square().mean().item() for one in classes]),
            "class_alignment_4": mean([within[one].pow(4).mean().item() for one in classes]),
            "class_separation": (within.mean() / distances[~same].mean()).item()}


def commonest_tokens(rows, special):
    """The most frequent plain token of each row of ids, of several the smallest id -> (N,) ints; -1
    where a row has none, or fewer than 5 rows have the same."""
    targets = []
    for ids in rows:
        plain = torch.tensor([token for token in ids if token not in special], dtype=torch.int64)
        targets.append(int(plain.bincount().argmax()) if len(plain) else -1)
    targets = torch.tensor(targets)
    _, place, counts = targets.unique(return_inverse=True, return_counts=True)
    return torch.where(counts[place] >= 5, targets, -1)


def across_folds(z, labels, n):
    """What a linear probe says of rows whose fold it has not seen: (N, D), (N,) -> (N,). As in the
    released code each dimension is scaled over all rows. ValueError for too few rows."""
    z = StandardScaler().fit_transform(z.double().numpy())
    labels = torch.as_tensor(labels)
    # There may be nothing to tell apart.
    if len(labels.unique()) == 1:
        return labels
    probe = Ridge() if labels.is_floating_point() else LogisticRegression(max_iter=500)
    return cross_val_predict(probe, z, labels.numpy(), cv=n)


def probe_gap(z, targets, labels=None):
    """Do vectors tell labels better than words? Vectors (N, D), `commonest_tokens` (N,), N classes
    or scores -> "token" and "semantic", the accuracies (of scores Spearman's correlation) across 3
    and 5 folds, and "gap", their difference. [Predict-and-Reconstruct, app. D]"""
    scores = {}
    known = targets >= 0
    if known.any():
        found = across_folds(z[known], targets[known], 3)
        scores["token"] = measure("accuracy", found, targets[known])
    if labels is None:
        return scores
    found = across_folds(z, labels, 5)
    if torch.as_tensor(labels).is_floating_point():
        scores["semantic"] = measure("spearman", found, labels)
    else:
        scores["semantic"] = measure("accuracy", found, labels)
        scores["semantic_f1"] = measure("f1_macro", found, labels)
        scores["semantic_mcc"] = measure("mcc", found, labels) / 100
    if "token" in scores:
        scores["gap"] = scores["semantic"] - scores["token"]
    return scores


def linear_map(x, y):
    """How near is y to a linear map of x? (N, D), (N, D) -> {metric: number}. [LLM-JEPA, fig. 3,
    table 14]

    residual: min over X of |x X - y| (Frobenius), and _relative to |y|. X fitted to every second
    row, the residual of the others: _held_out over |y|, _spread over |y - mean y|. singular_100:
    mean of the 100 largest singular values of x - y, and _relative to a row's length.

    With fewer fitted rows than D there are many such X (the problem is ill posed), and the one of
    least norm, which is taken, tells little of the others: `text_to_code` is the better measure."""
    x = x.double()
    y = y.double()

    def residual(fitted, tested):
        solved = torch.linalg.lstsq(x[fitted], y[fitted], rcond=1e-6, driver="gelsd").solution
        return (x[tested] @ solved - y[tested]).norm().item()

    # With N <= D this is 0, whatever the vectors are.
    everything = residual(slice(None), slice(None))
    fitted = slice(0, None, 2)
    others = slice(1, None, 2)
    held_out = residual(fitted, others)
    # Vectors that are all alike are near to any map, so their differences are the better measure.
    spread = (y[others] - y[fitted].mean(0)).norm().clamp(min=1e-300).item()
    singular = spectrum(x - y, center=False)[:100].mean().item()
    length = torch.cat([x, y]).norm(dim=1).mean().clamp(min=1e-300).item()
    return {"residual": everything, "residual_relative": everything / y.norm().item(),
            "residual_held_out": held_out / y[others].norm().item(),
            "residual_spread": held_out / spread,
            "singular_100": singular, "singular_relative": singular / length}


RIDGE = (1e-6, 1e-4, .01, .1, 1.0, 10.0)  # strengths that are tried


def ridge(x, y, strength):
    """Ridge regression of y on x with an intercept: (N, D), (N, C) float64 -> a function of (M, D)
    to (M, C). The strength is relative to the mean variance of a dimension of x."""
    alpha = strength * len(x) * x.var(0, correction=0).mean().item()
    fitted = Ridge(alpha).fit(x.numpy(), y.numpy())
    return lambda z: torch.from_numpy(fitted.predict(z.numpy()))


def r2(predicted, y, center):
    """1 - sum |y - predicted|^2 / sum |y - center|^2: (N, D), (N, D), (D,) -> 1 (all of y is
    predicted)..0 (no more than the center tells) and below; 0 if all of y is the center."""
    total = (y - center).square().sum()
    return (1 - (y - predicted).square().sum() / total).item() if total > 0 else 0.0


def text_to_code(x, y, texts):
    """What do Texts x tell of their Codes y? (N, D), (N, D), the N texts of y -> {metric: number},
    in float64. Every fourth row is tested, the others are fitted; m are the means of fitted rows.

    r2: of the tested y around m_y, predicted by `ridge` from x. ridge: its strength, the one of
    RIDGE that predicts every fourth of the fitted rows best when it is fitted to the others.
    not_found: percent of the tested rows for which the y - m_y of highest cosine with x_i - m_x is
    of another text than y_i; not_found_mapped: the same with the predicted y_i - m_y for x_i - m_x.
    [ridge: Hoerl & Kennard 1970; LLM-JEPA's linear map, table 14, is tested on the fitted rows]"""
    x = x.double()
    y = y.double()
    tested = torch.arange(len(x)) % 4 == 3  # (N,)
    fitted_x = x[~tested]
    fitted_y = y[~tested]
    chosen = torch.arange(len(fitted_x)) % 4 == 3  # the fitted rows that choose the strength

    def of_strength(strength):
        predict = ridge(fitted_x[~chosen], fitted_y[~chosen], strength)
        return r2(predict(fitted_x[chosen]), fitted_y[chosen], fitted_y[~chosen].mean(0))

    strength = max(RIDGE, key=of_strength)
    predicted = ridge(fitted_x, fitted_y, strength)(x[tested])
    center = fitted_y.mean(0)
    codes = y[tested] - center
    texts = [text for text, is_tested in zip(texts, tested.tolist()) if is_tested]

    def not_found(queries):
        return percent(mistakes(search(queries, codes, 1).indices[:, 0], texts))

    return {"r2": r2(predicted, y[tested], center),
            "not_found": not_found(x[tested] - fitted_x.mean(0)),
            "not_found_mapped": not_found(predicted - center), "ridge": strength}


def text_and_code(x, y, texts):
    """LLM-JEPA's picture of a space, and what its mean alone makes of it: Texts (N, D), Codes
    (N, D), the N texts of the Codes -> {metric: number}.

    All of `text_to_code`; rankme, cosine_random (of unrelated texts) and uniformity: means over
    Texts and Codes; cosine_pairs: of a Text and its Code; singular_100: mean of the 100 largest
    singular values of x - y [LLM-JEPA, fig. 3]. _centred: each column less its mean."""
    scores = text_to_code(x, y, texts)
    for ending, pair in (("", (x, y)), ("_centred", (x - x.mean(0), y - y.mean(0)))):
        scores[f"rankme{ending}"] = mean([rankme(z) for z in pair])
        scores[f"cosine_random{ending}"] = mean([random_cosine(z, z) for z in pair])
        scores[f"cosine_pairs{ending}"] = cosines(*pair).mean().item()
    scores["uniformity"] = mean([uniformity(x), uniformity(y)])
    scores["singular_100"] = spectrum(x - y, center=False)[:100].mean().item()
    return scores


# ---- tokens and attention


def token_states(evaluation, rows, make=None):
    """Rows of ids -> the last layer's states of their tokens, (L, D) float32 each, or what
    make(ids, states) is of them."""

    def read(packed):
        lengths = packed.cu_seqlens.diff().tolist()
        states = evaluation.model(packed).float().cpu().split(lengths)
        return map(make, packed.tokens.cpu().split(lengths), states) if make else states

    return finite(read_rows(evaluation.model, rows, read))


def nearest_tokens(columns, states, special, chosen, queries=3, k=5):
    """The k nearest of all plain tokens to random tokens of the `chosen` rows of the first column:
    columns [rows of ids, ...], states [list of (L, D), ...] -> the tokens asked about (N, 3) and
    those found (N, k, 3), each as (column, row, token id). Itself no token finds."""
    keys = []
    for column, rows in enumerate(columns):
        for row, ids in enumerate(rows):
            keys += [(column, row, token) for token in ids]
    keys = torch.tensor(keys)  # (n, 3)
    plain = ~torch.isin(keys[:, 2], torch.as_tensor(special))
    keys = keys[plain]
    vectors = torch.cat([torch.cat(each) for each in states])[plain]  # (n, D)
    chance = torch.Generator().manual_seed(0)
    asked = []
    for row in chosen:
        places = ((keys[:, 0] == 0) & (keys[:, 1] == row)).nonzero()[:, 0]
        asked.append(places[torch.randperm(len(places), generator=chance)[:queries]])
    asked = torch.cat(asked)  # (N,)
    found = search(vectors[asked], vectors, min(k + 1, len(vectors)))
    others = found.indices != asked[:, None]
    # Where others are equally near, the token may not find itself. Then the last one is left out.
    others[others.all(1), -1] = False
    return keys[asked], keys[found.indices[others].view(len(asked), -1)]


def token_matches(queries, found):
    """(N, 3), (N, k, 3) of (column, row, token id) -> percent of what was found that is in the same
    row ("same_sentence"), in this row of another column ("translation"), the same token elsewhere
    ("same_language"), or "other". [MEXMA, table 9]"""
    column, row, token = (found == queries[:, None]).unbind(-1)  # (N, k) each
    kinds = {"translation": ~column & row, "same_sentence": column & row,
             "same_language": column & ~row & token, "other": ~(column & token | row)}
    return {name: 100 * kind.double().mean().item() for name, kind in kinds.items()}


def attention_weights(model, packed, index):
    """What the tokens at some places of the line (N,) attend to in the last layer -> for each
    (H, L), the probabilities of the L keys that it sees."""
    # The back ends never form these weights, so they are made once more, of the layer's input.
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
    for place, (low, high, low2, high2) in zip(index.tolist(), packed.key_ranges[index].tolist()):
        seen = torch.cat([k[low2:high2], k[low:high]])  # (L, H, K), the shared prefix first
        scores = (seen * q[place]).sum(-1) / q.shape[-1] ** 0.5  # (L, H)
        if attention.softcap:
            scores = attention.softcap * (scores / attention.softcap).tanh()
        weights.append(scores.float().softmax(0).T)
    return weights


def attention_entropy(weights):
    """How widely do sentence vectors look? Weights (H, L) of each row -> entropies in nats, means
    over rows: of each head and of the heads' mean, both also without the last token, and without
    the first and the last. A row of two tokens does not count. [MEXMA, sec. 5.6 and app. G, which
    does not say which of these it is]"""
    weights = [w.double() for w in weights if w.shape[1] > 2]
    scores = {}
    for name, part in (("", slice(None)), ("_no_end", slice(-1)), ("_inside", slice(1, -1))):
        # SciPy scales what is left to sum 1.
        kept = [w[:, part].clamp(min=1e-300) for w in weights]
        scores[f"entropy{name}"] = mean([entropy(w, axis=1).mean().item() for w in kept])
        scores[f"entropy_of_mean{name}"] = mean([float(entropy(w.mean(0))) for w in kept])
    scores["entropy_uniform"] = mean([math.log(w.shape[1]) for w in weights])
    scores["on_first"] = mean([100 * w[:, 0].mean().item() for w in weights])
    scores["on_end"] = mean([100 * w[:, -1].mean().item() for w in weights])
    return scores


# ---- tasks

POOLINGS = ("mean", "max", "weighted", "attention")  # of Predict-and-Reconstruct's tables


def pool(evaluation, rows, how):
    """Rows of ids -> (N, D). "weighted" is the mean, as its weights are all equal, and "attention"
    has a random query and random keys [both as Predict-and-Reconstruct's code]; "words" is the mean
    without special tokens [MEXMA]."""
    if how not in ("attention", "words"):
        return embed(evaluation.model, rows, "mean" if how == "weighted" else how)
    width = evaluation.model.config.width
    chance = torch.Generator().manual_seed(0)
    keys = (2 * torch.rand(width, width, generator=chance) - 1) / width ** 0.5  # as nn.Linear's
    query = torch.randn(width, generator=chance) @ keys / width ** 0.5  # (D,)
    special = torch.as_tensor(evaluation.tokenizer.special.ids)

    def make(ids, states):
        if how == "attention":
            return (states @ query).softmax(0) @ states
        plain = ~torch.isin(ids, special)
        return states[plain].mean(0) if plain.any() else states.mean(0)

    return torch.stack(token_states(evaluation, rows, make))


def poolings(evaluation, options=None):
    """`ranks` under each of Predict-and-Reconstruct's poolings."""
    scores = {"rows": evaluation.count}
    for how in POOLINGS:
        vectors = {name: pool(evaluation, rows, how) for name, rows in evaluation.ids.items()}
        scores |= {f"{how}/{name}": value for name, value in ranks(vectors).items()}
    return scores


def spectra(evaluation, options=None):
    """Principal components of all columns together, as BERT-JEPA's plots; ranks."""
    share = explained(torch.cat(list(evaluation.vectors.values())))
    scores = {"rows": evaluation.count}
    for k in (1, 2, 10, 50):
        scores[f"explained_{k}"] = share[min(k, len(share)) - 1].item()
    return scores | ranks(evaluation.vectors)


def frequencies(evaluation, options=None):
    """The entropy of the texts' tokens in nats: the loss of masked words, and of the next, of who
    knows how frequent each is and nothing else."""
    ids = np.concatenate(evaluation.tokenizer.encode(sum(evaluation.texts.values(), [])))
    return {"tokens": len(ids), "nats": float(entropy(np.bincount(ids)))}


def last_tokens(evaluation):
    """Vectors of the texts' own last tokens -> {column: (N, D)}: the same positions whatever the
    objective puts behind a text."""
    chat = evaluation.tokenizer.special.chat
    affixes = ((chat.user, ()), (chat.assistant, ()))
    return dataclasses.replace(evaluation, affixes=affixes).vectors


def linear(evaluation, options=None):
    """`linear_map` of the first column, LLM-JEPA's Text, and each other, its Code. Both are read at
    their `last_tokens`, and for "own/" where the objective reads them, say at [PRED]. The residual
    is the paper's. With fewer fitted rows, half of all, than dimensions it is ill posed, which is
    said: `places` asks the same of ridge regression."""
    places = {"": evaluation.vectors}
    if evaluation.model.config.causal:
        places = {"": last_tokens(evaluation), "own/": evaluation.vectors}
    width = evaluation.model.config.width
    fitted = (evaluation.count + 1) // 2
    if fitted < width:
        print(f"warning: linear: {fitted} rows are fitted for width {width}, so the map is ill "
              "posed: give more rows, or --tasks places", file=sys.stderr)
    scores = {"rows": evaluation.count, "rows_per_width": evaluation.count / width}
    for place, vectors in places.items():
        found = over_pairs(vectors, lambda code, text: linear_map(text, code))
        scores |= {place + name: value for name, value in found.items()}
    return scores


def places(evaluation, options=None):
    """`text_and_code` of the two columns at two places of the same rows: "last", the last token of
    the text itself, and "own", the last token of the row, where the objective reads it: llm-jepa at
    [PRED], ntp at the stop token behind the text, as is an imported model. They are one place if
    nothing stands behind the text (llm-jepa with k 0), which is said."""
    # An imported model has no place of its own.
    if evaluation.affixes == (((), None), ((), None)):
        affixes = Ntp.affixes(None, evaluation.tokenizer.special)
        evaluation = dataclasses.replace(evaluation, affixes=affixes)
    suffixes = [suffix for _, suffix in evaluation.affixes]
    last = []
    own = []
    for rows, suffix in zip(evaluation.ids.values(), suffixes):
        ends = [-1 - len(suffix), -1]
        # What stands behind a text changes nothing before it, so that one pass reads both.
        read = token_states(evaluation, rows, lambda ids, states, ends=ends: states[ends])
        vectors = torch.stack(read)  # (N, 2, D)
        last.append(vectors[:, 0])
        own.append(vectors[:, 1])
    codes = list(evaluation.texts.values())[1]
    found = {"last": text_and_code(*last, codes)}
    found["own"] = text_and_code(*own, codes) if any(suffixes) else found["last"]
    if not any(suffixes):
        print("note: places: this objective reads a text at its own last token, so last and own "
              "are one place", file=sys.stderr)
    scores = {"rows": evaluation.count}
    for metric in found["last"]:
        scores |= {f"{place}/{metric}": found[place][metric] for place in found}
    return scores


def no_places(evaluation, options=None):
    if not evaluation.model.config.causal or len(evaluation.texts) != 2:
        return "needs a causal model and two columns, Text and Code: choose them with --langs a,b"
    if evaluation.count < 16:
        return f"fits a map to three of four rows, and there are {evaluation.count}: 16 are needed"
    return ""


def tokens(evaluation, options=None):
    """MEXMA's table 9, of 250 rows."""
    # Of equal texts one is kept: tokens would be found in the copy of their row.
    new = {}
    for row, text in enumerate(next(iter(evaluation.texts.values()))):
        new.setdefault(text, row)
    columns = []
    for ids in evaluation.ids.values():
        columns.append([ids[row] for row in new.values()])
    states = [token_states(evaluation, column) for column in columns]
    special = evaluation.tokenizer.special.ids
    queries, found = nearest_tokens(columns, states, special, range(min(250, len(new))))
    five = token_matches(queries, found)
    return {"rows": len(new), "rows_queries": len(queries)} | token_matches(
        queries, found[:, :1]) | {f"{name}/nearest_5": value for name, value in five.items()}


def sentence_attention(evaluation, rows):
    """What the token of the sentence vector looks at in the last layer -> (H, L) for each row of
    ids. It is the first token or, if the model is causal, the last. [MEXMA, figs 7-10]"""
    causal = evaluation.model.config.causal

    def read(packed):
        index = packed.cu_seqlens[1:] - 1 if causal else packed.cu_seqlens[:-1]
        weights = attention_weights(evaluation.model, packed, index.long())
        return [each.cpu() for each in weights]

    return finite(read_rows(evaluation.model, rows, read))


def attention(evaluation, options=None):
    """MEXMA's entropies, of every column."""
    each = {}
    for name, rows in evaluation.ids.items():
        each[name] = attention_entropy(sentence_attention(evaluation, rows))
    scores = {"rows": evaluation.count}
    for metric in each[name]:
        scores |= with_mean(metric, {language: found[metric] for language, found in each.items()})
    return scores


def no_blocks(evaluation, options=None):
    if evaluation.model.blocks:
        return ""
    return "looks at the last layer, and this model has none: leave it out"


def uniform(evaluation, options=None):
    """MEXMA's table 10: retrieval with the model's own pooling, with the mean, and with the mean of
    plain tokens; "change" is (own - other) / own."""
    own = evaluation.pool
    hard = evaluation.ids_of([text for text, _, _ in evaluation.hard])
    scores = {"rows": evaluation.count}
    for how in dict.fromkeys((own, "mean", "words")):
        vectors = {name: pool(evaluation, rows, how) for name, rows in evaluation.ids.items()}
        negatives = pool(evaluation, hard, how) if hard else None
        found = retrieval(vectors, evaluation.texts, negatives, evaluation.hard)
        for name in sorted({"xsim", "xsim++"} & found.keys()):
            scores[f"{name}/{how}"] = found[name]
            before = scores[f"{name}/{own}"]
            if how != own and before:
                scores[f"change/{name}/{how}"] = 100 * (before - found[name]) / before
    return scores


def gap(evaluation, options):
    """Predict-and-Reconstruct's tables 7-11, of each set and pooling. A pair is one row, as in its
    code. Without --sets there is only the token probe of the first column."""
    name, texts = next(iter(evaluation.texts.items()))
    chosen = {} if options.sets else {name: sets.Rows(texts, None, None)}
    for name in options.sets or ():
        for lang in options.langs if name in IN_LANGUAGES else ("en",):
            label = name if lang == "en" else f"{name}-{lang}"
            chosen[label] = sets.read_set(name, options.files, "test", lang)
    scores = {}
    for name, columns in chosen.items():
        texts, second, labels = (column and column[:options.limit] for column in columns)
        if second:
            rows = rows_of(evaluation.tokenizer, second, *evaluation.affixes[0], texts,
                           max_length=evaluation.model.config.max_positions)
        else:
            rows = evaluation.ids_of(texts)
        targets = commonest_tokens(rows, evaluation.tokenizer.special.ids)
        scores[f"{name}/rows"] = len(rows)
        scores[f"{name}/rows_token"] = int((targets >= 0).sum())
        for how in dict.fromkeys((evaluation.pool, *POOLINGS)):
            z = pool(evaluation, rows, how)
            try:
                found = ranks({name: z}) | probe_gap(z, targets, labels)
                if labels:
                    found |= of_classes(z, labels)
            except ValueError as error:
                raise BadInput(f"set {name} cannot be probed: {error}") from None
            scores |= {f"{name}/{how}/{metric}": value for metric, value in found.items()}
    return scores
