"""How much can be read off frozen vectors? Heads that are trained on (vectors, labels), as four protocols have them.

`logistic` is scikit-learn's regression, and `few_shot` what MTEB does with it; `senteval` is SentEval's classifier with its cross-validation;
`probe` is Predict-and-Reconstruct's; `knn` has nothing to train. Vectors are (N, D), labels (N,); all is a pure function of its arguments.
Of a pair of vectors u, v a head sees `pairs`, or what its protocol says. `score` says which is used on which published set.
"""
import torch
import torch.nn.functional as F
from torch import nn

from data import BadInput
from metrics import accuracy, average_precision, f1, f1_macro, mcc, neighbours, pearson, spearman, unit

# ---------------------------------------------------------------------------------------------------------------------
# Similarities and neighbours


def similarities(u, v):
    """Rows that belong together, (N, D), (N, D) -> {name: (N,)}, the higher the more alike: cosine, and what older MTEB tried too."""
    u, v = torch.as_tensor(u).double(), torch.as_tensor(v).double()
    return {"cosine": (unit(u) * unit(v)).sum(1), "euclidean": -(u - v).norm(dim=1), "manhattan": -(u - v).abs().sum(1), "dot": (u * v).sum(1)}


def pairs(u, v):
    """[|u - v|; u * v]: (N, D), (N, D) -> (N, 2D). [Tai et al. 2015; SentEval]"""
    return torch.cat([(u - v).abs(), u * v], 1)


def knn(x, labels, queries, k=5):
    """Classes of the queries (M, D): of their k nearest rows of x by cosine the most frequent, of equally frequent ones the nearer -> (M,)."""
    cosines, places = neighbours(queries, x, min(k, len(x)))
    votes = F.one_hot(torch.as_tensor(labels)[places]).double()           # (M, k, classes)
    return (votes.sum(1) + (votes * cosines[:, :, None]).sum(1) / (10 * k)).argmax(1)


# ---------------------------------------------------------------------------------------------------------------------
# Logistic regression


def logistic(x, labels, c=1.0, max_iter=100):
    """Weights (D + 1, K) and what adds to logits, the last row, of the regression that minimises C sum CE + |W|^2 / 2; two classes have
    K = 1, the logit of the second. The biases are not punished. float64, L-BFGS. Equal to scikit-learn's LogisticRegression."""
    x, labels = torch.as_tensor(x).double(), torch.as_tensor(labels).long()
    classes = int(labels.max()) + 1
    x = torch.cat([x, x.new_ones(len(x), 1)], 1)
    w = x.new_zeros(x.shape[1], 1 if classes == 2 else classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([w], max_iter=max_iter, tolerance_grad=1e-6, tolerance_change=1e-12, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        value = F.cross_entropy(_logits(x, w), labels, reduction="sum") + w[:-1].square().sum() / (2 * c)
        value.backward()
        return value

    optimizer.step(loss)
    return w.detach()


def _logits(x, w):
    return torch.cat([x.new_zeros(len(x), 1), x @ w], 1) if w.shape[1] == 1 else x @ w


def classify(w, x):
    """Classes (N,) of vectors (N, D) by the weights of `logistic`."""
    x = torch.as_tensor(x).double()
    return _logits(torch.cat([x, x.new_ones(len(x), 1)], 1), w).argmax(1)


def few_shot(x, labels, queries, gold, samples=8, experiments=10, seed=42):
    """Mean accuracy of regressions on 8 random rows of each class, of 10 draws with growing seeds. [MTEB, classification]"""
    labels, scores = torch.as_tensor(labels), []
    for experiment in range(experiments):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed + experiment))
        chosen = torch.cat([order[labels[order] == one][:samples] for one in range(int(labels.max()) + 1)])
        scores.append(accuracy(classify(logistic(x[chosen], labels[chosen]), queries), gold))
    return sum(scores) / len(scores)


# ---------------------------------------------------------------------------------------------------------------------
# SentEval

REGULARISATIONS = tuple(10.0 ** power for power in range(-5, -1))


def folds(labels, k, seed):
    """The fold 0..k - 1 of each row, (N,): every class is dealt out evenly, in random order."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    order = order[torch.as_tensor(labels)[order].argsort(stable=True)]
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order)) % k
    return place


def fit(x, labels, train, dev, l2, hidden=0, seed=1111, batch=64, tenacity=5, epoch_size=4, max_epoch=200):
    """SentEval's classifier, M of them at once: x (N, D), labels (N,), train and dev (M, N) bool, its rows; l2 (M,) -> (dev accuracies (M,),
    predict), predict(x) -> classes (N, M).

    Adam (1e-3, l2 as weight decay) on the mean cross entropy of 64 rows; every 4 epochs the dev rows are scored, the best state is kept, and
    the sixth time that is no better is the last. hidden=0 is linear, else one layer of sigmoids. Ours: all M see the same stream of rows and
    each leaves out what is not its own, so that its batches are of 64 rows on average; M models cost little more than one."""
    x, labels, classes, count = torch.as_tensor(x).float(), torch.as_tensor(labels), int(max(labels)) + 1, len(l2)
    chance = torch.Generator().manual_seed(seed)
    shapes = [(x.shape[1], hidden), (hidden, classes)] if hidden else [(x.shape[1], classes)]
    state = [((2 * torch.rand(rows, 1, width, generator=chance) - 1) / shape[0] ** .5).repeat(1, count, 1)
             for shape in shapes for rows, width in (shape, (1, shape[1]))]                     # as nn.Linear begins: weight, bias, ...
    moments, best = [[torch.zeros_like(one) for one in state] for _ in "mv"], [one.clone() for one in state]
    stream, held = (rows.any(0).nonzero()[:, 0] for rows in (train, dev))
    size = max(1, round(batch * len(stream) * count / int(train.sum())))
    scores, strikes, live, step, epoch = torch.full((count,), -1.0), torch.zeros(count), torch.arange(count), 0, 0
    while len(live) and epoch <= max_epoch:
        own, own_dev = train[live].T.float(), dev[live][:, held].T       # (N, live), (held, live)
        for _ in range(epoch_size):
            for rows in stream[torch.randperm(len(stream), generator=chance)].split(size):
                step += 1
                _descend(state, moments, step, x[rows], labels[rows], own[rows], l2[live])
        epoch += epoch_size
        right = _forward(state, x[held])[-1].argmax(2) == labels[held, None]
        found = (right & own_dev).sum(0) / own_dev.sum(0)
        better = found > scores[live]
        for kept, now in zip(best, state):
            kept[:, live[better]] = now[:, better]
        scores[live[better]] = found[better]
        stay = better | (strikes[live] < tenacity)
        strikes[live] += ~better
        live, state, moments = live[stay], [one[:, stay] for one in state], [[one[:, stay] for one in moment] for moment in moments]
    return scores, lambda x: _forward(best, torch.as_tensor(x).float())[-1].argmax(2)


def _forward(state, x):
    """State [weight (D, M, K), bias (1, M, K), ...], x (N, D) -> the layers' outputs, the last one the logits (N, M, classes)."""
    layers = [(x @ state[0].flatten(1)).unflatten(1, state[0].shape[1:]) + state[1]]            # all models are one product
    if len(state) == 4:
        layers = [layers[0].sigmoid()]
        layers.append(torch.einsum("nmh,hmk->nmk", layers[0], state[2]) + state[3])
    return layers


def _descend(state, moments, step, x, labels, own, l2):
    """One step of Adam in place for M models. own (B, M): 1 where a row is the model's. The gradients are written out: autograd would take
    most of the time."""
    layers = _forward(state, x)
    slope = (layers[-1].softmax(2) - F.one_hot(labels, layers[-1].shape[2])[:, None]) * (own / own.sum(0).clamp(min=1))[:, :, None]
    slopes = [slope.sum(0, keepdim=True)]                                # from the last layer to the first
    if len(state) == 4:
        slopes.append(torch.einsum("nmh,nmk->hmk", layers[0], slope))
        slope = torch.einsum("nmk,hmk->nmh", slope, state[2]) * layers[0] * (1 - layers[0])
        slopes.append(slope.sum(0, keepdim=True))
    slopes.append((x.T @ slope.flatten(1)).unflatten(1, slope.shape[1:]))
    for weight, first, second, gradient in zip(state, *moments, reversed(slopes)):
        gradient = gradient + l2[:, None] * weight
        first.lerp_(gradient, .1)
        second.mul_(.999).addcmul_(gradient, gradient, value=.001)
        weight.addcdiv_(first, (second / (1 - .999 ** step)).sqrt_().add_(1e-8), value=-1e-3 / (1 - .9 ** step))


def senteval(x, labels, valid=None, test=None, hidden=0, k=10, seed=1111, **schedule):
    """SentEval's protocols -> classes that are found for the test rows, (M,), or for all rows where there is no test. valid: (x, labels); test (M, D).

    With valid and test rows, the valid ones choose L2 and the epoch. With test rows alone, k-fold cross-validation chooses L2, and one row in
    20 the epoch. Without, each of k folds is tested once; L2 is chosen by k folds inside of the others."""
    x, labels = torch.as_tensor(x).float(), torch.as_tensor(labels)
    if valid is not None:
        both, gold = torch.cat([x, torch.as_tensor(valid[0]).float()]), torch.cat([labels, torch.as_tensor(valid[1])])
        train = (torch.arange(len(both)) < len(x)).expand(len(REGULARISATIONS), -1)
        scores, predict = fit(both, gold, train, ~train, torch.tensor(REGULARISATIONS), hidden, seed, **schedule)
        return predict(test)[:, scores.argmax()]
    outer = folds(labels, k, seed) if test is None else torch.full_like(labels, -1)
    inside, train, dev = [], [], []                                      # one for each outer fold, inner fold and L2
    for fold in range(k) if test is None else (0,):
        rows = (outer != fold).nonzero()[:, 0]
        inner = torch.full_like(labels, -1)
        inner[rows] = folds(labels[rows], k, seed)
        inside.append(outer != fold)
        train += [(inner >= 0) & (inner != one) for one in range(k) for _ in REGULARISATIONS]
        dev += [inner == one for one in range(k) for _ in REGULARISATIONS]
    scores, _ = fit(x, labels, torch.stack(train), torch.stack(dev), torch.tensor(REGULARISATIONS).repeat(len(inside) * k), hidden, seed, **schedule)
    l2 = torch.tensor(REGULARISATIONS)[scores.view(len(inside), k, -1).mean(1).argmax(1)]
    inside = torch.stack(inside)                                         # (outer folds, N)
    twentieth = torch.stack([folds(labels, 20, seed + fold) == 0 for fold in range(len(inside))])
    _, predict = fit(x, labels, inside & ~twentieth, inside & twentieth, l2, hidden, seed, **schedule)
    return predict(test)[:, 0] if test is not None else predict(x)[torch.arange(len(x)), outer]


# ---------------------------------------------------------------------------------------------------------------------
# Predict and Reconstruct

EPOCHS = {"sst2": (90, 32), "cola": (90, 32), "mrpc": (90, 32), "qqp": (10, 32), "mnli": (15, 128), "stsb": (15, 128), "ag-news": (90, 32)}
RELEASED = EPOCHS | {"stsb": (10, 128)}                                   # (epochs, batch); the paper says 15 for STS-B, its logs 10


class Probe(nn.Module):
    """One text: LN -> dropout .2 -> linear. Two: LN each, [u; v; |u - v|; u * v] -> dropout .2 -> linear. Similarity: a cos + b of
    LN -> dropout .1, a = b = 2.5 at first. [Predict-and-Reconstruct, sec. 4; 2,050, 5,122 (7,171 of 3 classes) and 1,026 parameters at D = 512]"""

    def __init__(self, width, classes, kind):
        super().__init__()
        self.kind, self.norm, self.dropout = kind, nn.LayerNorm(width), nn.Dropout(.1 if kind == "similarity" else .2)
        if kind == "similarity":
            self.scale, self.bias = (nn.Parameter(torch.tensor(2.5)) for _ in "ab")
        else:
            self.linear = nn.Linear(width * (4 if kind == "pair" else 1), classes)

    def forward(self, u, v=None):
        """(N, D) -> logits (N, classes), or (N, D), (N, D) -> scores (N,)."""
        u, v = self.norm(u), None if v is None else self.norm(v)
        if self.kind == "similarity":
            return self.scale * F.cosine_similarity(self.dropout(u), self.dropout(v)) + self.bias
        return self.linear(self.dropout(u if v is None else torch.cat([u, v, (u - v).abs(), u * v], 1)))


def probe(kind, train, valid, test, score, epochs, batch, weighted=False, seed=0, lr=1e-3):
    """Predict-and-Reconstruct's probe -> what it says of the test rows: classes, or scores (N,). train, valid: (u, v or None, labels); of
    test only u, v. AdamW, decay .01; the state of the epoch is kept whose score(found, labels) of the valid rows is highest; the paper's code takes
    the test rows for that. `weighted`: classes count n / (classes n_c), for CoLA. Raises BadInput unless there is a class to learn."""
    u, v, labels = train
    labels = torch.as_tensor(labels, dtype=torch.float32 if kind == "similarity" else torch.int64)
    counts = torch.ones(1) if kind == "similarity" else torch.bincount(labels).float()
    if kind != "similarity" and (len(counts) < 2 or not counts.all()):
        raise BadInput(f"the train rows have {int((counts > 0).sum())} classes: a probe needs each of at least 2")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Probe(u.shape[1], len(counts), kind)
        optimizer = torch.optim.AdamW(head.parameters(), lr, weight_decay=.01, fused=True)
        loss = F.mse_loss if kind == "similarity" else nn.CrossEntropyLoss(len(labels) / len(counts) / counts if weighted else None)
        best, kept = -torch.inf, None
        for _ in range(epochs):
            head.train()
            for rows in torch.randperm(len(labels)).split(batch):
                optimizer.zero_grad()
                loss(head(u[rows], None if v is None else v[rows]), labels[rows]).backward()
                optimizer.step()
            if (now := score(_say(head, *valid[:2]), valid[2])) > best:
                best, kept = now, _say(head, *test[:2])
    return kept


def _say(head, u, v):
    with torch.no_grad():
        said = head.eval()(u, v)
    return said if said.ndim == 1 else said.argmax(1)


# ---------------------------------------------------------------------------------------------------------------------
# Predict and Reconstruct's analysis: what a linear map of the vectors tells of words and of labels, across folds [app. D, and its code]


def token_targets(rows, special, least=5):
    """What a token probe is asked for: the most frequent token of each row of ids that is not special, of equals the smallest id ->
    (N,) ints; -1 where the row has none, or fewer than `least` rows have the same target."""
    plain = [[token for token in ids if token not in special] for ids in rows]
    targets = torch.tensor([torch.tensor(ids).bincount().argmax().item() if ids else -1 for ids in plain])
    seen, place, counts = targets.unique(return_inverse=True, return_counts=True)
    return torch.where(counts[place] >= least, targets, -1)


def stratified(labels, n):
    """Each row's fold, (N,) labels -> (N,) of 0..n-1: every class is dealt out evenly and in order, as scikit-learn's StratifiedKFold
    without shuffling does. Labels that are floats are cut into n runs, as its KFold does."""
    labels = torch.as_tensor(labels)
    if labels.is_floating_point():
        return torch.cat([torch.full((len(part),), number) for number, part in enumerate(labels.tensor_split(n))])
    of = labels.unique(return_inverse=True)[1]                           # classes in the order of their first row, as there
    order = torch.tensor([(of == one).nonzero()[0, 0] for one in range(int(of.max()) + 1)]).argsort().argsort()[of]
    dealt, found = order.sort().values, torch.empty(len(of), dtype=torch.int64)
    for one in range(int(of.max()) + 1):
        found[order == one] = torch.repeat_interleave(torch.stack([(dealt[fold::n] == one).sum() for fold in range(n)]))
    return found


def ridge(x, scores, queries, alpha=1.0):
    """Ridge regression on (N, D), (N,) -> scores of the queries (M, D), (M,); the intercept costs nothing."""
    centre, mean = x.mean(0), scores.mean()
    w = torch.linalg.solve((x - centre).T @ (x - centre) + alpha * torch.eye(x.shape[1], dtype=x.dtype), (x - centre).T @ (scores - mean))
    return (queries - centre) @ w + mean


def across_folds(z, labels, n):
    """What a probe says of each row that has not seen the row's fold: logistic regression for integer labels, ridge for scores;
    (N, D), (N,) -> (N,). Each dimension is first scaled to mean 0, deviation 1 over all rows, as the released code does. ValueError if
    there are fewer than n rows or, of every class, fewer than n."""
    z, labels = torch.as_tensor(z).double(), torch.as_tensor(labels)
    classes, of = (None, labels.double()) if labels.is_floating_point() else labels.unique(return_inverse=True)
    if len(z) < n or classes is not None and of.bincount().max() < n:
        raise ValueError(f"{len(z)} rows are too few for {n} folds")
    deviation = z.std(0, correction=0)
    z, fold = (z - z.mean(0)) / torch.where(deviation > 0, deviation, 1), stratified(labels, n)
    found = torch.empty_like(of)
    for number in range(n):
        out = fold == number
        given = z[~out], of[~out]
        found[out] = ridge(*given, z[out]) if classes is None else classify(logistic(*given, max_iter=500), z[out])
    return found if classes is None else classes[found]


def probe_gap(z, targets, labels=None):
    """Do vectors tell labels better than words? (N, D), `token_targets` (N,), N labels (classes as ints, or scores as floats) -> "token",
    accuracy on the targets across 3 folds, of rows that have one; "semantic", accuracy on the labels across 5 folds, with "semantic_f1"
    (macro) and "semantic_mcc", or of scores 100 times Spearman's correlation; "gap", semantic - token. Of the predictions of all folds."""
    scores, known = {}, targets >= 0
    if known.any():
        scores["token"] = accuracy(across_folds(z[known], targets[known], 3), targets[known])
    if labels is None:
        return scores
    labels = torch.as_tensor(labels)
    found = across_folds(z, labels, 5)
    if labels.is_floating_point():
        scores["semantic"] = 100 * spearman(found, labels)
    else:
        scores |= {"semantic": accuracy(found, labels), "semantic_f1": f1_macro(found, labels), "semantic_mcc": mcc(found, labels)}
    return scores | ({"gap": scores["semantic"] - scores["token"]} if "token" in scores else {})


# ---------------------------------------------------------------------------------------------------------------------
# What is asked of which set

CLASSES = "sst2 sst cola mr cr subj mpqa trec ag-news"
SETS = {  # task of evaluate.py -> the sets that it has, names of tasks.TASKS
    "sts": "stsb sick", "pairs": "mrpc qqp pawsx rte xnli", "senteval": "mr cr subj mpqa sst sst2 trec mrpc", "fewshot": CLASSES, "knn": CLASSES,
    "mlp": CLASSES + " mrpc", "hybrid-probes": " ".join(EPOCHS),
}


def splits(task, name, released=False):
    """The splits that a task reads of a set, the reported one last. SentEval's train and valid rows of TREC and MRPC are one split."""
    if task in ("sts", "pairs"):
        return ("test",)
    if task == "senteval" and name in ("mr", "cr", "subj", "mpqa"):
        return ("train+valid+test",)                                     # cross-validated
    if task in ("fewshot", "knn") or task == "senteval" and name in ("trec", "mrpc") or task == "hybrid-probes" and released:
        return "train+valid", "test"
    return "train", "valid", "test"


def judge(found, gold, name):
    """Classes found (N,) -> the metrics that papers give for the set."""
    scores = {"accuracy": accuracy(found, gold)}
    return scores | ({"f1": f1(found, gold)} if name in ("mrpc", "qqp") else {"mcc": 100 * mcc(found, gold)} if name == "cola" else {})


def correlate(found, gold):
    return {"spearman": 100 * spearman(found, gold), "pearson": 100 * pearson(found, gold)}


def score(task, name, parts, epochs=None, released=False):
    """A task on a set: parts [(u (N, D), v or None, labels (N,))] as `splits` names them -> {metric: number}. epochs, released: of
    hybrid-probes, in place of the paper's; choosing the epoch on the reported rows, as its code does."""
    u, v, gold = parts[-1]
    if task == "sts":
        return correlate(similarities(u, v)["cosine"], gold)
    if task == "pairs":
        found = {kind: average_precision(values, gold) for kind, values in similarities(u, v).items()}
        return {"ap_cosine": found["cosine"], "ap_max": max(found.values())}
    if task == "hybrid-probes":
        usual, batch = (RELEASED if released else EPOCHS)[name]
        kind, measure = "similarity" if name == "stsb" else "single" if v is None else "pair", {"stsb": spearman, "cola": mcc}.get(name, accuracy)
        found = probe(kind, parts[0], parts[1], (u, v), measure, epochs or usual, batch, weighted=name == "cola")
        return correlate(found, gold) if kind == "similarity" else judge(found, gold, name)
    (x, labels), *valid, (test, _) = [(u if v is None else pairs(u, v), labels) for u, v, labels in [*parts, parts[-1]][:max(2, len(parts))]]
    if task == "fewshot":
        return {"accuracy": few_shot(x, labels, test, gold)}
    if task == "knn":
        return judge(knn(x, labels, test), gold, name)
    return judge(senteval(x, labels, *valid or [None], None if len(parts) == 1 else test, 50 if task == "mlp" else 0), gold, name)
