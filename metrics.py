"""What vectors are worth, as pure functions that know nothing of models: retrieval and mining, geometry, predictions, statistics.

Vectors are (N, D), row i of two matrices belongs together where a function compares them. Error rates, accuracies and shares are percentages.
"""
import itertools
import math

import torch
import torch.nn.functional as F

# ---------------------------------------------------------------------------------------------------------------------
# Retrieval metrics

MARGINS = ("ratio", "distance", "absolute")


def unit(z, start=0):
    """Rows scaled to length 1, (N, D) -> (N, D) float64, since cosines of a half-collapsed encoder differ in the fifth digit; a
    zero row stays zero. Raises ValueError for another shape, or for NaN and infinity: their ranking would look like a result, and
    names `start` if this is a block of more rows."""
    z = z.detach().double() if torch.is_tensor(z) else torch.tensor(z, dtype=torch.float64)    # a copy: a memory map may be read-only
    if z.ndim != 2:
        raise ValueError(f"vectors must be (N, D), these are {tuple(z.shape)}")
    if not z.isfinite().all():
        raise ValueError(f"{int((~z.isfinite()).any(1).sum())} of {len(z)} vectors hold NaN or infinity" + f", from row {start:,} on" * (start > 0))
    return z / z.norm(dim=1, keepdim=True).clamp(min=1e-300)


def matched(x, y):
    """Raises ValueError unless row i of one can belong to row i of the other: (N, D) both, and at least one row."""
    if not len(x.shape) == len(y.shape) == 2 or x.shape != y.shape or not len(x):
        raise ValueError(f"x {tuple(x.shape)} and y {tuple(y.shape)} must have the same shape (N, D) and at least one row")


def paired(x, y):
    """Unit rows of two matrices whose rows i belong together. Raises ValueError if the shapes differ or there is no row."""
    x, y = unit(x), unit(y)
    matched(x, y)
    return x, y


def keep_best(best, where, cosines, start):
    """Into the best so far of each row, in place, (n, k) cosines and indices, go its cosines (n, m) to the rows from `start` on."""
    gains = (cosines.amax(1) > best[:, -1]).nonzero()[:, 0] if start else slice(None)         # few of the later blocks hold a neighbour
    top = cosines[gains].topk(min(best.shape[1], cosines.shape[1]), dim=1)
    best[gains], keep = torch.cat([best[gains], top.values], 1).topk(best.shape[1], dim=1)
    where[gains] = torch.cat([where[gains], top.indices + start], 1).gather(1, keep)


def search(x, y, k, back=0, block=2048):
    """The k rows of y nearest to each row of x and the `back` rows of x nearest to each row of y, from one pass over all cosines:
    (N, D), (M, D) -> (cosines (N, k), indices (N, k)), (cosines (M, back), indices (M, back)), exact, best first.

    The vectors may be tensors, arrays or memory maps of any float type: a block at a time becomes unit rows in float64, so that the
    memory above the results is some blocks, however large N and M. Raises ValueError unless 1 <= k <= M, back <= N, the widths agree."""
    if not (len(x.shape) == len(y.shape) == 2 and 1 <= k <= len(y) and back <= len(x) and x.shape[1] == y.shape[1]):
        raise ValueError(f"{k} neighbours of x {tuple(x.shape)} in y {tuple(y.shape)}: k must be 1..{len(y)}, the widths equal, the shapes (N, D)")
    device = x.device if torch.is_tensor(x) else "cpu"
    found = [(torch.full(shape, -math.inf, dtype=torch.float64, device=device), torch.zeros(shape, dtype=torch.int64, device=device))
             for shape in ((len(x), k), (len(y), back))]
    for i in range(0, len(x), block):
        queries = unit(x[i:i + block], i)
        for j in range(0, len(y), block):
            cosines = queries @ unit(y[j:j + block], j).T                   # (block, block)
            keep_best(*(kept[i:i + block] for kept in found[0]), cosines, j)
            if back:
                keep_best(*(kept[j:j + block] for kept in found[1]), cosines.T, i)
    return found


def neighbours(x, y, k, block=2048):
    """The k rows of y nearest to each row of x by cosine, exact, best first: (N, D), (M, D) -> cosines (N, k), indices (N, k)."""
    return search(x, y, k, block=block)[0]


def by_margin(sides, margin):
    """What margin-based mining takes, of the results of `search` -> (scores (N,), rows of y (N,)), (scores (M,), rows of x (M,)). Among the
    k nearest j of i, the highest score cos / m (ratio) or cos - m (distance), m = (mean cos of i to its k nearest in y + mean cos of j
    to its k nearest in x) / 2; "absolute" is the highest cosine. [Artetxe & Schwenk 2019]"""
    if margin not in MARGINS:
        raise ValueError(f"margin {margin!r} is not one of {', '.join(MARGINS)}")
    taken = []
    for (cosines, candidates), (others, _) in (sides, sides[::-1]):
        mean = (cosines.mean(1, keepdim=True) + others.mean(1)[candidates]) / 2                # (N, k)
        scores = cosines / mean if margin == "ratio" else cosines - mean if margin == "distance" else cosines
        best, place = scores.max(1, keepdim=True)
        taken.append((best[:, 0], candidates.gather(1, place)[:, 0]))
    return taken


def mine_both(x, y, margin="ratio", k=4):
    """`by_margin` of all rows: (N, D), (M, D) -> (scores (N,), rows of y (N,)), (scores (M,), rows of x (M,)). With fewer than k rows, k is
    what there is."""
    return by_margin(search(x, y, min(k, len(y)), min(k, len(x))), margin)


def mine(x, y, margin="ratio", k=4):
    """The row of y that margin-based mining takes for each row of x: (N, D), (M, D) -> indices (N,)."""
    return neighbours(x, y, 1)[1][:, 0] if margin == "absolute" else mine_both(x, y, margin, k)[0][1]


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
    matched(x, y)
    return 100 * mistakes(mine(x, y, margin, k), texts).double().mean().item()


def xsim_all(x, y, k=4, texts=None):
    """xsim by every margin and `top1` both ways, from one search: (N, D), (N, D) -> {"ratio", "distance", "absolute", "top1", "top1_back"}."""
    matched(x, y)
    sides = search(x, y, min(k, len(y)), min(k, len(x)))
    wrong = lambda margin, side, texts: 100 * mistakes(by_margin(sides, margin)[side][1], texts).double().mean().item()
    return {margin: wrong(margin, 0, texts) for margin in MARGINS} | {
        "top1": 100 - wrong("absolute", 0, None), "top1_back": 100 - wrong("absolute", 1, None)}


def xsim_matrix(vectors, margin="ratio", k=4, texts=None):
    """xsim from every language to every other: {language: (N, D), aligned}, {language: N texts} -> {(from, to): 0..100}. One search
    serves both directions of a pair. [LASER, eval.py --nway]"""
    errors = {}
    for a, b in itertools.combinations(vectors, 2):
        matched(vectors[a], vectors[b])
        for pair, (_, found) in zip(((a, b), (b, a)), mine_both(vectors[a], vectors[b], margin, k)):
            errors[pair] = 100 * mistakes(found, texts and texts[pair[1]]).double().mean().item()
    return errors


def xsim_plus(x, y, negatives, sources, types, margin="ratio", k=4, texts=None):
    """xsim when y is joined by M altered copies of its rows, and which alteration did the harm. [Chen et al. 2023, xsim++]

    negatives (M, D); sources (M,): the row of y each was made from; types (M,): the name of its error; texts: those of y, then
    those of the negatives. -> {"xsim++": percent wrong, each type: percent that took a negative of this type made from their own
    translation, "misaligned": percent that took anything else}: the parts add up to the whole. The larger set of targets
    changes the margin of every row, so nothing of xsim is reused. Raises ValueError if the lengths disagree."""
    matched(x, y)
    y = torch.as_tensor(y)
    negatives = torch.as_tensor(negatives, device=y.device).reshape(-1, y.shape[1])
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


def bucc_f1(x, y, wanted=None):
    """BUCC as MTEB scores it: each row of x takes its nearest row of y by cosine, without margin or threshold; the F1 of each row of y
    as a class, weighted by how often it is wanted: (N, D), (M, D) -> 0..100. wanted (N,): the right rows of y (default: the own index).
    Near the accuracy of a row that is wanted once: a row of y taken by two counts 2/3. [Muennighoff et al. 2023; scikit-learn, f1_score]"""
    found = neighbours(x, y, 1)[1][:, 0].cpu()
    wanted = torch.arange(len(x)) if wanted is None else torch.as_tensor(wanted)
    if len(wanted) != len(x) or not len(x):
        raise ValueError(f"{len(x)} rows of x and {len(wanted)} wanted rows of y: there must be as many of each, and one at least")
    right, taken, there = (torch.bincount(rows, minlength=len(y)).double() for rows in (found[found == wanted], found, wanted))
    return 100 * (there * 2 * right / (taken + there).clamp(min=1)).sum().item() / len(x)


# ---- mining: which sentences of two texts are translations, when most have none. [Artetxe & Schwenk 2019; LASER, tasks/bucc]


def bitext(x, y, margin="ratio", k=4):
    """Pairs, best first, each row in one at most: (N, D), (M, D) -> rows of x (P,), rows of y (P,), scores (P,). The candidates are the
    best j of every i and the best i of every j by margin; of what is left, the highest score is taken. [LASER, --retrieval max]"""
    (forward, targets), (backward, sources) = mine_both(x, y, margin, k)
    scores, order = torch.cat([forward, backward]).cpu().sort(descending=True, stable=True)
    sources, targets = torch.cat([torch.arange(len(x)), sources.cpu()]), torch.cat([targets.cpu(), torch.arange(len(y))])
    used, kept = (set(), set()), []
    for place, i, j in zip(range(len(order)), sources[order].tolist(), targets[order].tolist()):
        if i not in used[0] and j not in used[1]:
            used[0].add(i)
            used[1].add(j)
            kept.append(place)
    return sources[order[kept]], targets[order[kept]], scores[kept]


def threshold(scores, right, count):
    """The score that cuts a ranking where F1 is best: scores (P,), best first, right (P,) bool, how many right pairs there are -> the
    middle of the last score kept and the next one, between different scores only; 0 if no pair is right."""
    f1 = 2 * right.cumsum(0).double() / (torch.arange(1, len(right) + 1) + count)
    f1[:-1][scores[:-1] == scores[1:]] = 0                               # equal scores stay together
    if not right.any():
        return 0.0
    best = int(f1.argmax())
    return scores[best:best + 2].mean().item()


def bucc_candidates(x, y, x_texts, y_texts, gold, margin="ratio", k=4):
    """A part of BUCC -> (scores (P,), best first, right (P,) bool, how many are right). x (N, D), y (M, D), their texts, gold {(row of x, row
    of y), ...}. As LASER's bucc.sh: one copy of every sentence is searched (`bitext`), and what is found for a sentence that occurs
    twice is left out, on either side, though its gold pair still counts as missed."""
    sides = []
    for z, texts in ((x, x_texts), (y, y_texts)):
        copies = {}
        for row, text in enumerate(texts):
            copies.setdefault(text.strip(), []).append(row)
        rows = list(copies.values())
        sides.append((z if len(rows) == len(z) else z[[own[0] for own in rows]], rows))
    (x, sources), (y, targets) = sides
    found = [(score, (sources[i][0], targets[j][0]) in gold) for i, j, score in zip(*(column.tolist() for column in bitext(x, y, margin, k)))
             if len(sources[i]) == len(targets[j]) == 1]
    return torch.tensor([score for score, _ in found], dtype=torch.float64), torch.tensor([right for _, right in found], dtype=torch.bool), len(gold)


def bucc_mine(tune, test, margin="ratio", k=4):
    """BUCC as a mining task: the threshold that gives the best F1 on `tune`, applied to `test`, both as `bucc_candidates` takes them ->
    {"precision", "recall", "f1": 0..100 on test, "f1_tune": the same on tune, "threshold"}. [Zweigenbaum et al. 2018; LASER, bucc.py]"""
    tune, test = (bucc_candidates(*part, margin, k) for part in (tune, test))
    cut, counted = threshold(*tune), []
    for scores, right, count in (tune, test):
        taken = int((scores >= cut).sum())
        hits = int(right[scores >= cut].sum())
        counted.append((100 * hits / max(1, taken), 100 * hits / max(1, count), 200 * hits / max(1, taken + count)))
    return dict(zip(("precision", "recall", "f1"), counted[1])) | {"f1_tune": counted[0][2], "threshold": cut}


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
