"""What vectors are worth, as pure functions that know nothing of models: retrieval and mining, geometry, predictions, statistics.

Vectors are (N, D), row i of two matrices belongs together where a function compares them. Error rates, accuracies and shares are percentages.
"""
import math

import torch
import torch.nn.functional as F

# ---------------------------------------------------------------------------------------------------------------------
# Retrieval metrics

MARGINS = ("ratio", "distance", "absolute")


def unit(z):
    """Rows scaled to length 1, (N, D) -> (N, D) float64, since cosines of a half-collapsed encoder differ in the fifth digit; a
    zero row stays zero. Raises ValueError for another shape, or for NaN and infinity: their ranking would look like a result."""
    z = torch.as_tensor(z).detach().double()
    if z.ndim != 2:
        raise ValueError(f"vectors must be (N, D), these are {tuple(z.shape)}")
    if not z.isfinite().all():
        raise ValueError(f"{int((~z.isfinite()).any(1).sum())} of {len(z)} vectors hold NaN or infinity")
    return z / z.norm(dim=1, keepdim=True).clamp(min=1e-300)


def paired(x, y):
    """Unit rows of two matrices whose rows i belong together. Raises ValueError if the shapes differ or there is no row."""
    x, y = unit(x), unit(y)
    if x.shape != y.shape or len(x) == 0:
        raise ValueError(f"x {tuple(x.shape)} and y {tuple(y.shape)} must have the same shape and at least one row")
    return x, y


def neighbours(x, y, k, block=2048):
    """The k rows of y nearest to each row of x by cosine, exact, best first: (N, D), (M, D) -> cosines (N, k), indices (N, k).
    Memory is block * block cosines, however large N and M. Raises ValueError unless 1 <= k <= M and the widths agree."""
    x, y = unit(x), unit(y)
    if not 1 <= k <= len(y) or x.shape[1] != y.shape[1]:
        raise ValueError(f"{k} neighbours of x {tuple(x.shape)} in y {tuple(y.shape)}: k must be 1..{len(y)}, the widths equal")
    cosines, indices = [], []
    for queries in x.split(block):
        best, where = queries.new_empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.int64, device=x.device)
        for start in range(0, len(y), block):
            top = (queries @ y[start:start + block].T).topk(min(k, len(y) - start, block), dim=1)
            best, where = torch.cat([best, top.values], 1), torch.cat([where, top.indices + start], 1)
            best, keep = best.topk(min(k, best.shape[1]), dim=1)         # (block, k): the best so far
            where = where.gather(1, keep)
        cosines.append(best)
        indices.append(where)
    return torch.cat(cosines), torch.cat(indices)


def mine(x, y, margin="ratio", k=4):
    """The row of y that margin-based mining takes for each row of x: (N, D), (M, D) -> indices (N,). Among the k nearest j of i,
    the highest score cos / m (ratio) or cos - m (distance), m = (mean cos of i to its k nearest in y + mean cos of j to its k
    nearest in x) / 2; "absolute" is the highest cosine. With fewer than k rows, k is what there is. [Artetxe & Schwenk 2019]"""
    if margin not in MARGINS:
        raise ValueError(f"margin {margin!r} is not one of {', '.join(MARGINS)}")
    if margin == "absolute":
        return neighbours(x, y, 1)[1][:, 0]
    cosines, candidates = neighbours(x, y, min(k, len(y)))               # (N, k)
    backward = neighbours(y, x, min(k, len(x)))[0].mean(1)               # (M,)
    mean = (cosines.mean(1, keepdim=True) + backward[candidates]) / 2    # (N, k)
    scores = cosines / mean if margin == "ratio" else cosines - mean
    return candidates.gather(1, scores.argmax(1, keepdim=True))[:, 0]


def mistakes(found, texts=None):
    """Found indices (N,) -> wrong (N,) bool. Right is the row's own index or, with `texts`, any whose text equals the row's."""
    found = found.cpu()
    wrong = found != torch.arange(len(found))
    for i in wrong.nonzero()[:, 0].tolist() if texts is not None else ():
        wrong[i] = texts[found[i]] != texts[i]
    return wrong


def xsim(x, y, margin="ratio", k=4, texts=None):
    """Percent of the rows of x whose translation is not found in y: (N, D), (N, D) -> 0..100. Direction x -> y; the papers put
    English at y. With `texts`, those of y, an equal text is as good (what LASER's command counts); without, the index must be
    the same (what its function counts). Raises ValueError if the shapes differ. [Heffernan et al. 2022; LASER, xsim.py]"""
    x, y = paired(x, y)
    return 100 * mistakes(mine(x, y, margin, k), texts).double().mean().item()


def xsim_plus(x, y, negatives, sources, types, margin="ratio", k=4, texts=None):
    """xsim when y is joined by M altered copies of its rows, and which alteration did the harm. [Chen et al. 2023, xsim++]

    negatives (M, D); sources (M,): the row of y each was made from; types (M,): the name of its error; texts: those of y, then
    those of the negatives. -> {"xsim++": percent wrong, each type: percent that took a negative of this type made from their own
    translation, "misaligned": percent that took anything else}: the parts add up to the whole. The larger set of targets
    changes the margin of every row, so nothing of xsim is reused. Raises ValueError if the lengths disagree."""
    x, y = paired(x, y)
    negatives = torch.as_tensor(negatives, dtype=y.dtype, device=y.device).reshape(-1, y.shape[1])
    sources, types = [int(row) for row in sources], list(types)
    if not len(negatives) == len(sources) == len(types):
        raise ValueError(f"{len(negatives)} negatives, {len(sources)} sources, {len(types)} types: there must be as many of each")
    found = mine(x, torch.cat([y, negatives]), margin, k)
    wrong = mistakes(found, texts)
    counts = dict.fromkeys(sorted(set(types)) + ["misaligned"], 0)
    for i in wrong.nonzero()[:, 0].tolist():
        j = int(found[i]) - len(y)                                       # below 0: an unaltered row of y
        own = j >= 0 and (sources[j] == i or texts is not None and texts[sources[j]] == texts[i])
        counts[types[j] if own else "misaligned"] += 1
    return {"xsim++": 100 * wrong.double().mean().item()} | {name: 100 * count / len(x) for name, count in counts.items()}


def top1(x, y):
    """Percent of the rows of x whose nearest row of y by cosine has their own index: (N, D), (N, D) -> 0..100."""
    return 100 - xsim(x, y, "absolute")


# ---------------------------------------------------------------------------------------------------------------------
# Geometry metrics; s are singular values, u unit rows


def spectrum(z, center):
    """Singular values in float64, largest first: (N, D) -> (min(N, D),). By the eigenvalues of the smaller Gram matrix; what is
    under 1e-7 of the norm is the rounding of float32 vectors and of this method, and becomes 0: one point has no directions."""
    z = torch.as_tensor(z).detach().double()
    floor = 1e-7 * z.norm()
    z = z - z.mean(0) if center else z
    s = torch.linalg.eigvalsh(z.T @ z if len(z) > z.shape[1] else z @ z.T).clamp(min=0).sqrt().flip(0)
    return torch.where(s > floor, s, 0)


def entropy(p):
    """-sum p log p in nats, with 0 log 0 = 0: (n,) -> float."""
    return -torch.special.xlogy(p, p).sum().item()


def rankme(z, center=False, normalize=False, epsilon=1e-7):
    """exp(-sum p log p), p = s / sum s + epsilon: (N, D) -> 1..min(N, D), the number of directions in use. [Garrido et al. 2023];
    BERT-JEPA's code has normalize=True (unit rows) and epsilon=1e-10. It grows with N until N is far above it (the paper: 25
    times), so compare only what was measured on equally many rows."""
    s = spectrum(unit(z) if normalize else z, center)
    return math.exp(entropy(s / s.sum().clamp(min=1e-300) + epsilon))


def effective_rank(z):
    """exp(-sum p log p), p = s / sum s, centred: (N, D) -> 1..min(N - 1, D), or 0 if all rows are one point.
    [Roy & Vetterli 2007; Predict-and-Reconstruct, eq. 12]"""
    s = spectrum(z, center=True)
    return math.exp(entropy(s / s.sum())) if s.sum() > 0 else 0.0


def stable_rank(z):
    """sum s^2 / max s^2, centred: (N, D) -> 1..min(N - 1, D), or 0 if all rows are one point.
    [Vershynin 2018; Predict-and-Reconstruct, eq. 13]"""
    s = spectrum(z, center=True)
    return (s.square().sum() / s[0].square()).item() if s.sum() > 0 else 0.0


def spectral_entropy(z, squared=False, base="width"):
    """-sum p log p / log n, centred: (N, D) -> 0..1. Paper [Predict-and-Reconstruct, eq. 11]: p = s / sum s, n = D; released:
    p = s^2 / sum s^2 (squared=True), n = min(N, D) (base="min")."""
    if base not in ("width", "min"):
        raise ValueError(f'base {base!r} is not "width" or "min"')
    s = spectrum(z, center=True)
    s, n = s.square() if squared else s, z.shape[1] if base == "width" else min(z.shape)
    return entropy(s / s.sum()) / math.log(n) if s.sum() > 0 and n > 1 else 0.0


def rank_90(z):
    """How many directions hold 90 % of the variance, centred: (N, D) -> 0..min(N - 1, D). [Predict-and-Reconstruct's code]"""
    share = spectrum(z, center=True).square().cumsum(0)
    return int((share < 0.9 * share[-1]).sum()) + 1 if share[-1] > 0 else 0


def explained(z):
    """Percent of the variance that the first 1, 2, ... principal components hold together: (N, D) -> (min(N, D),), up to 100; zeros if
    all rows are one point."""
    share = spectrum(z, center=True).square().cumsum(0)
    return 100 * share / share[-1].clamp(min=1e-300)


def linear_map(x, y):
    """How near is y to a linear map of x? (N, D), (N, D) -> {"residual": min over X of |x X - y|_F [LLM-JEPA, table 14], which grows with
    the vectors and with N; "residual_relative": the same over |y|_F, 0..1; "residual_held_out": |x X - y|_F / |y|_F on every second
    row, X fitted to the others; "singular_mean" and "singular_100": mean of all singular values of x - y and of the 100 largest}. The first
    two are of the rows that X was fitted to: with N <= D they are 0 whatever the vectors, and they say little until N is several D.
    Directions under 1e-6 of the largest are rounding, and not fitted. Raises ValueError if the shapes differ or there are under 2 rows."""
    x, y = (torch.as_tensor(z).detach().double().cpu() for z in (x, y))
    if x.shape != y.shape or len(x) < 2:
        raise ValueError(f"x {tuple(x.shape)} and y {tuple(y.shape)} must have the same shape and at least two rows")
    fit = lambda rows: torch.linalg.lstsq(x[rows], y[rows], rcond=1e-6, driver="gelsd").solution               # (D, D)
    left = lambda rows, matrix: (x[rows] @ matrix - y[rows]).norm().item()
    whole, half, rest = slice(None), slice(0, None, 2), slice(1, None, 2)
    over = lambda value, rows: value / max(y[rows].norm().item(), 1e-300)
    residual, s = left(whole, fit(whole)), spectrum(x - y, center=False)
    return {"residual": residual, "residual_relative": over(residual, whole), "residual_held_out": over(left(rest, fit(half)), rest),
            "singular_100": s[:100].mean().item(), "singular_mean": s.mean().item()}


def alignment(x, y, power=2):
    """mean |u_i - v_i|^power over matched unit rows: (N, D), (N, D) -> 0 (best)..2^power. [Wang & Isola 2020, sec. 4];
    Predict-and-Reconstruct's code has power=4."""
    x, y = paired(x, y)
    return (x - y).norm(dim=1).pow(power).mean().item()


def class_alignment(z, labels, power=2):
    """mean |u_i - u_j|^power over the pairs of a class, then the plain mean over classes: (N, D), N labels -> 0 (best)..2^power. A class
    of one row has no pair and is left out; ValueError if no class is left. [Predict-and-Reconstruct, sec. 4.3; its code has power=4]"""
    u, classes = unit(z), torch.as_tensor(labels)
    means = [torch.pdist(u[classes == label]).pow(power).mean() for label in classes.unique() if (classes == label).sum() > 1]
    if not means:
        raise ValueError(f"none of the classes of {len(u)} rows has two rows")
    return torch.stack(means).mean().item()


def class_separation(z, labels):
    """Mean distance of the pairs of one class over that of pairs of two classes, of unit rows: (N, D), N labels -> 0 (each class is a
    point)..1 (classes do not show). ValueError unless there are pairs of both kinds. [Predict-and-Reconstruct's code]"""
    distances, classes = torch.pdist(unit(z)), torch.as_tensor(labels)
    i, j = torch.triu_indices(len(classes), len(classes), 1)
    same = classes[i] == classes[j]                                      # (N (N - 1) / 2,), the order of pdist
    if same.all() or not same.any():
        raise ValueError("all pairs are of one class, or none is")
    return (distances[same].mean() / distances[~same].mean()).item()


def uniformity(z, t=2, block=1024):
    """log mean exp(-t |u_i - u_j|^2) over all i != j: (N, D) -> -4t..0; 0 is one point, -2t = -4 the whole sphere of many
    dimensions. Counting i = j as well would bias it upwards. Raises ValueError below two rows. [Wang & Isola 2020, sec. 4]"""
    u, sums = unit(z), []
    if len(u) < 2:
        raise ValueError(f"uniformity is about pairs of rows; there are {len(u)} rows")
    for start in range(0, len(u), block):
        terms = -t * (2 - 2 * u[start:start + block] @ u.T).clamp(min=0)                       # (block, N)
        terms[torch.arange(len(terms)), torch.arange(start, start + len(terms))] = -math.inf   # i = j
        sums.append(terms.logsumexp((0, 1)))
    return torch.stack(sums).logsumexp(0).item() - math.log(len(u) * (len(u) - 1))


def sample(z, most=1000, seed=0):
    """At most so many rows of z, drawn without replacement: Predict-and-Reconstruct's code measures uniformity on these."""
    return z[torch.randperm(len(z), generator=torch.Generator().manual_seed(seed))[:most]]


def isotropy(z):
    """min F(c) / max F(c), F(c) = sum_i exp(c . u_i), over the eigenvectors c of U'U and their opposites: (N, D) -> e^-2 (one
    direction)..1 (none is special). [Mu & Viswanath 2018, sec. 2], here of unit rows, so that scale does not count."""
    u = unit(z)
    along = u @ torch.linalg.eigh(u.T @ u).eigenvectors                  # (N, D)
    partition = torch.cat([along, -along], 1).logsumexp(0)               # (2D,)
    return (partition.min() - partition.max()).exp().item()


def spread(z):
    """Standard deviation of each dimension of the unit rows, averaged, times sqrt(D): (N, D) -> 0 (one point)..1 (healthy).
    [Chen & He 2021, SimSiam, fig. 2]"""
    u = unit(z)
    return u.std(0, correction=0).mean().item() * math.sqrt(u.shape[1])


def random_cosine(x, y=None):
    """Mean cosine of row i of x and row j != i of y (None: of x), over all such pairs: (N, D), (N, D) -> -1..1. Exact at once:
    all pairs together are the product of two sums. Raises ValueError below two rows. [BERT-JEPA, tables 4-7, unrelated]"""
    x, y = paired(x, x if y is None else y)
    if len(x) < 2:
        raise ValueError("a random pair needs two rows; there is one")
    return ((x.sum(0) @ y.sum(0) - (x * y).sum()) / (len(x) * (len(x) - 1))).item()


def cosine_table(vectors):
    """The mean cosines of BERT-JEPA's tables 4-7, {language: (N, D), aligned} -> for each language and the first
    "same/de-en" (unrelated sentences of one language, mean of the two), "translations/de-en", "different/de-en" (unrelated, one
    in each); and the means "same" over languages, "translations" and "different" over pairs. One language has only "same"."""
    first, *others = vectors
    same, table = {name: random_cosine(z) for name, z in vectors.items()}, {}
    for other in others:
        x, y = paired(vectors[other], vectors[first])
        table[f"same/{other}-{first}"] = (same[other] + same[first]) / 2
        table[f"translations/{other}-{first}"] = (x * y).sum(1).mean().item()
        table[f"different/{other}-{first}"] = random_cosine(x, y)
    means = {"same": sum(same.values()) / len(same)}
    for kind in ("translations", "different") if others else ():
        means[kind] = sum(table[f"{kind}/{other}-{first}"] for other in others) / len(others)
    return means | table


def cosine_counts(x, y, bins=40):
    """Histograms of cosines, (N, D), (N, D) aligned -> {"edges" (bins + 1) from -1 to 1, "related": how many rows i of x and y fall in each
    bin, "unrelated": how many pairs i != j}."""
    x, y = paired(x, y)
    cosines = (x @ y.T).clamp(-1, 1)
    related, whole = (torch.histc(part, bins, -1, 1).long() for part in (cosines.diagonal(), cosines))
    return {"edges": torch.linspace(-1, 1, bins + 1).tolist(), "related": related.tolist(), "unrelated": (whole - related).tolist()}


def geometry(vectors):
    """Every geometry metric of {language: (N, D), aligned}, N >= 2: means over languages, or over each and the first."""
    first, *others = vectors.values()
    mean = lambda values: sum(values) / len(values)
    each = lambda metric, *options: mean([metric(z, *options) for z in vectors.values()])
    scores = {"rankme": each(rankme), "rankme_normalized": each(rankme, False, True, 1e-10)}
    scores["rankme_share"] = 100 * scores["rankme"] / min(first.shape)
    for metric in (effective_rank, stable_rank, rank_90, spectral_entropy, uniformity, isotropy, spread):
        scores[metric.__name__] = each(metric)
    scores["spectral_entropy_released"] = each(spectral_entropy, True, "min")
    if others:
        scores["alignment"] = mean([alignment(x, first) for x in others])
        scores["alignment_4"] = mean([alignment(x, first, 4) for x in others])
    return scores | {f"cosine/{name}": value for name, value in cosine_table(vectors).items()}


def health(x, y=None):
    """Is this encoder collapsing? Vectors (N, D) of one view and, aligned, of another -> (measures and "verdict", one line)."""
    return diagnose(geometry({"x": x} if y is None else {"x": x, "y": y}))


def diagnose(scores):
    """The same from scores that `geometry` or `run` have made. Collapse is all vectors pointing one way (cosine > .9) AND few
    directions in use (RankMe < 5 %). Either alone is half of it: a pretrained BERT has a random cosine of .99 and can still be
    trained (BERT-JEPA, table 4), and vectors on a line through 0 have one of 0. A RankMe under 2 is few at any width."""
    keep = ("rankme", "rankme_share", "cosine/same", "cosine/translations", "uniformity", "spread")
    scores = {name.removeprefix("geometry/"): value for name, value in scores.items()}
    found = {name: scores[name] for name in keep if name in scores}
    few, together = found["rankme_share"] < 5 or found["rankme"] < 2, found["cosine/same"]
    found["verdict"] = ("COLLAPSING" if few and together > .9 else
                        "half-collapsed (all vectors share one direction)" if together > .5 else
                        "half-collapsed (few directions in use)" if few else "ok")
    positive = f" | cos(pos) {found['cosine/translations']:.2f}" if "cosine/translations" in found else ""
    return found, (f"health: RankMe {found['rankme']:.1f} ({found['rankme_share']:.0f} %) | cos(rand) {together:.2f}{positive} | "
                   f"unif {found['uniformity']:.2f} | spread {found['spread']:.2f} -> {found['verdict']}")


# ---------------------------------------------------------------------------------------------------------------------
# Tokens and attention


def nearest_tokens(columns, states, special, chosen, queries=3, k=5, seed=0):
    """For `queries` random tokens of each of the `chosen` rows of the first column, the k nearest of all tokens of all columns but itself:
    columns [rows of ids, ...], states [list of (L, D), ...] -> (N, 3), (N, k, 3) of (column, row, token id), for `token_matches`.
    Special tokens neither ask nor answer. One column is compared at a time."""
    chance, best = torch.Generator().manual_seed(seed), None
    for column, (rows, each) in enumerate(zip(columns, states)):
        keys = torch.tensor([(column, row, token) for row, ids in enumerate(rows) for token in ids])           # (n, 3)
        plain = ~torch.isin(keys[:, 2], torch.as_tensor(special))
        keys, vectors = keys[plain], torch.cat(each)[plain]
        if best is None:
            asked = torch.cat([(place := (keys[:, 1] == row).nonzero()[:, 0])[torch.randperm(len(place), generator=chance)[:queries]] for row in chosen])
            asking, best, found = vectors[asked], torch.empty(len(asked), 0, dtype=torch.float64), keys.new_empty(len(asked), 0, 3)
        cosines, places = neighbours(asking, vectors, min(k + 1, len(vectors)))
        if column == 0:
            ask, cosines = keys[asked], torch.where(places == asked[:, None], -2, cosines)                     # a token is not its own neighbour
        best, found = torch.cat([best, cosines], 1), torch.cat([found, keys[places]], 1)
        best, order = best.topk(min(k, best.shape[1] - (column == 0)), dim=1)       # the query itself is last
        found = found.gather(1, order[..., None].expand(-1, -1, 3))
    return ask, found


def token_matches(queries, found):
    """What the nearest tokens of some tokens are. queries (N, 3) and found (N, k, 3), both of (column, row, token id) -> percent of all
    found that are "same_sentence" (column and row of the query), "translation" (any token of the query's row in another column: nobody has
    aligned the words), "same_language" (the same token in another row of the column) or "other". [MEXMA, table 9]"""
    column, row, token = (found == queries[:, None]).unbind(-1)          # (N, k) each
    kinds = {"translation": ~column & row, "same_sentence": column & row, "same_language": column & ~row & token}
    shares = {name: 100 * kind.double().mean().item() for name, kind in kinds.items()}
    return shares | {"other": 100 * (1 - (column & token | row).double().mean().item())}


def attention_entropy(weights):
    """How widely do sentence vectors look? For each row the attention (H, L) of its first token to its L tokens -> means over the rows, in
    nats: "entropy" (of each head, then their mean), "entropy_of_mean" (of the mean of the heads, never lower), both again "_no_end"
    (without the row's last token, an attention sink) and "_inside" (without its first and last), what is left scaled to sum 1;
    "entropy_uniform", log L, the most there can be; "on_first" and "on_end", percent of the attention that those two tokens get.
    Rows without a token inside do not count; ValueError if no row is left. [MEXMA, sec. 5.6 and app. G, which does not say which]"""
    weights = [torch.as_tensor(w).double() for w in weights if w.shape[1] > 2]
    if not weights:
        raise ValueError("no row has a token between its first and its last")
    mean = lambda value: sum(map(value, weights)) / len(weights)
    scores = {}
    for name, part in (("", slice(None)), ("_no_end", slice(-1)), ("_inside", slice(1, -1))):
        scaled = lambda w: w[:, part] / w[:, part].sum(1, keepdim=True).clamp(min=1e-300)
        scores[f"entropy{name}"] = mean(lambda w: entropy(scaled(w)) / len(w))
        scores[f"entropy_of_mean{name}"] = mean(lambda w: entropy(scaled(w.mean(0, keepdim=True))))
    return scores | {"entropy_uniform": mean(lambda w: math.log(w.shape[1])), "on_first": mean(lambda w: 100 * w[:, 0].mean().item()),
                     "on_end": mean(lambda w: 100 * w[:, -1].mean().item())}


# ---------------------------------------------------------------------------------------------------------------------
# Predictions against gold: classes (N,) whole numbers, scores (N,)


def accuracy(found, gold):
    """Percent that are right: (N,), (N,) -> 0..100."""
    return 100 * (torch.as_tensor(found) == torch.as_tensor(gold)).double().mean().item()


def f1(found, gold, positive=1):
    """2 TP / (2 TP + FP + FN) of the class `positive`, percent; 0 where it is neither found nor there."""
    found, gold = (torch.as_tensor(classes) == positive for classes in (found, gold))
    return 200 * (found & gold).sum().item() / max(1, (found.sum() + gold.sum()).item())


def f1_macro(found, gold):
    """The mean of f1 over all classes that are found or there."""
    classes = torch.cat([torch.as_tensor(found), torch.as_tensor(gold)]).unique().tolist()
    return sum(f1(found, gold, one) for one in classes) / len(classes)


def mcc(found, gold):
    """Matthews' correlation of two lists of classes, -1..1; 0 if either is constant. [Gorodkin 2004, R_K; CoLA's metric]"""
    found, gold = (F.one_hot(torch.as_tensor(classes), int(max(max(found), max(gold))) + 1).double() for classes in (found, gold))
    found, gold = found - found.mean(0), gold - gold.mean(0)
    norm = (found.square().sum() * gold.square().sum()).sqrt()
    return ((found * gold).sum() / norm).item() if norm > 0 else 0.0


def pearson(x, y):
    """Linear correlation: (N,), (N,) -> -1..1; 0 if either is constant."""
    x, y = (torch.as_tensor(values, dtype=torch.float64) for values in (x, y))
    x, y = x - x.mean(), y - y.mean()
    norm = x.norm() * y.norm()
    return (x @ y / norm).item() if norm > 0 else 0.0


def spearman(x, y):
    """Correlation of the ranks, equal values sharing the mean of theirs: (N,), (N,) -> -1..1."""
    def ranks(values):
        _, place, count = torch.as_tensor(values, dtype=torch.float64).unique(return_inverse=True, return_counts=True)
        return (count.cumsum(0) - (count - 1) / 2)[place]
    return pearson(ranks(x), ranks(y))


def average_precision(scores, gold):
    """Area under precision over recall, percent: scores (N,), gold (N,) 0 or 1 -> 0..100; equal scores are found together. Chance is the
    share of gold. 0 if there is no gold. [scikit-learn's definition, without interpolation]"""
    scores, gold = torch.as_tensor(scores, dtype=torch.float64), torch.as_tensor(gold).double()
    levels, place = scores.unique(return_inverse=True)
    hits = torch.zeros(len(levels), dtype=torch.float64).index_add_(0, place, gold).flip(0)
    found = torch.bincount(place, minlength=len(levels)).flip(0).cumsum(0)
    return 100 * (hits * hits.cumsum(0) / found).sum().item() / max(1.0, gold.sum().item())


# ---------------------------------------------------------------------------------------------------------------------
# Statistics


def paired_t(x, y):
    """Is x above y? Scores of the same seeds, n >= 2 each -> (mean difference, t, one-tailed p of a paired t-test with n - 1 degrees of
    freedom). Equal differences give t = +-inf, or nan if there is none. [Student 1908; LLM-JEPA, sec. 4]"""
    differences = torch.tensor([a - b for a, b in zip(x, y, strict=True)], dtype=torch.float64)
    n, mean = len(differences), differences.mean().item()
    error = differences.std().item() / math.sqrt(n)
    t = mean / error if error else math.copysign(math.inf, mean) if mean else math.nan
    angle = torch.linspace(math.atan(t / math.sqrt(n - 1)), math.pi / 2, 10_001, dtype=torch.float64)      # t = sqrt(n - 1) tan(angle)
    tail = torch.trapezoid(angle.cos() ** (n - 2), angle).item()
    return mean, t, tail * math.gamma(n / 2) / (math.sqrt(math.pi) * math.gamma((n - 1) / 2))
