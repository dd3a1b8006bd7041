"""How much can be read off frozen vectors? MTEB's, SentEval's and Predict-and-Reconstruct's heads
on published sentence sets, each score beside those of an untrained model and a bag of embeddings.

Vectors are (N, D), labels (N,).
"""

import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import pearsonr, spearmanr
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, average_precision_score, f1_score, matthews_corrcoef
from sklearn.metrics.pairwise import paired_distances
from sklearn.model_selection import GridSearchCV, ParameterGrid, StratifiedKFold, cross_val_predict
from sklearn.neural_network import MLPClassifier
from torch import nn

from corpora.program import BadInput
from evaluate import embed, mean
from model import Model
from tasks import sets

OF_CLASSES = {
    "accuracy": accuracy_score,
    "f1": partial(f1_score, zero_division=0),
    "f1_macro": partial(f1_score, average="macro", zero_division=0),
    "mcc": matthews_corrcoef,
}


def measure(name, found, gold):
    """A metric of N predictions, in percent or times 100; correlations with a constant are 0."""
    found = np.asarray(found)
    gold = np.asarray(gold)
    if name in OF_CLASSES:
        return 100 * OF_CLASSES[name](gold, found)
    if len(set(found)) == 1 or len(set(gold)) == 1:
        return 0.0
    correlation = pearsonr if name == "pearson" else spearmanr
    return 100 * float(correlation(found, gold).statistic)


def majority(gold):
    """Percent of the most frequent label."""
    return 100 * max(Counter(gold).values()) / len(gold)


# ---- similarities and few samples


def similarities(u, v):
    """(N, D), (N, D) -> {name: (N,)}, the higher the more alike, as older MTEB tried them."""
    found = {"dot": (u * v).sum(1).numpy()}
    for kind in ("cosine", "euclidean", "manhattan"):
        found[kind] = -paired_distances(u.double().numpy(), v.double().numpy(), metric=kind)
    return found


def pairs(u, v):
    """[|u - v|; u * v]: (N, D), (N, D) -> (N, 2D). [Tai et al. 2015; SentEval]"""
    return u if v is None else torch.cat([(u - v).abs(), u * v], 1)


def few_shot(x, labels, queries, gold):
    """Mean accuracy of regressions on 8 random rows of each class, 10 draws. [MTEB]"""
    scores = []
    for seed in range(42, 52):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).numpy()
        chosen = np.concatenate([order[labels[order] == one][:8] for one in np.unique(labels)])
        classifier = LogisticRegression().fit(x[chosen], labels[chosen])
        scores.append(measure("accuracy", classifier.predict(queries), gold))
    return mean(scores)


# ---- SentEval


def logistic():
    """scikit-learn's regression, C from 1/4 to 8 -> (classifier, grid)."""
    return LogisticRegression(max_iter=1000), {"C": [2.0 ** power for power in range(-2, 4)]}


def adam(hidden=()):
    """SentEval's own classifier, linear or with layers of sigmoids -> (classifier, grid of L2).

    As in its code, a 20th of the rows chooses the state that is kept, and 24 epochs that are no
    better are the last."""
    classifier = MLPClassifier(hidden, activation="logistic", batch_size=64, early_stopping=True,
                               validation_fraction=.05, n_iter_no_change=24, tol=1e-9,
                               random_state=1111)
    # scikit-learn divides its penalty by the rows of a batch.
    return classifier, {"alpha": [64 * 10.0 ** power for power in range(-5, -1)]}


def senteval(x, labels, valid=None, test=None, kind=logistic, k=10):
    """SentEval's protocols: x (N, D), labels (N,), valid (x, labels), test (M, D) -> the classes of
    the test rows or, without, of all.

    The regularisation is chosen on the valid rows, or on k folds; without test rows each of k folds
    is tested once. [SentEval's code]"""
    model, grid = kind()
    folds = StratifiedKFold(k, shuffle=True, random_state=1111)
    chooser = GridSearchCV(model, grid, cv=folds)
    if test is None:
        return cross_val_predict(chooser, x, labels, cv=folds)
    if valid is None:
        return chooser.fit(x, labels).predict(test)
    models = [clone(model).set_params(**one).fit(x, labels) for one in ParameterGrid(grid)]
    return max(models, key=lambda fitted: fitted.score(*valid)).predict(test)


# ---- Predict and Reconstruct

EPOCHS = {  # (epochs, batch)
    "sst2": (90, 32), "cola": (90, 32), "mrpc": (90, 32), "qqp": (10, 32), "mnli": (15, 128),
    "stsb": (15, 128), "ag-news": (90, 32)}


class Probe(nn.Module):
    """One text: LN, dropout .2, linear; two: LN each, [u; v; |u - v|; u * v], dropout .2, linear;
    similarity: a cos + b of LN, dropout .1. [Predict-and-Reconstruct, sec. 4]"""

    def __init__(self, width, classes, kind):
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(.1 if kind == "similarity" else .2)
        if kind == "similarity":
            self.scale = nn.Parameter(torch.tensor(2.5))
            self.bias = nn.Parameter(torch.tensor(2.5))
        else:
            self.linear = nn.Linear(width * (4 if kind == "pair" else 1), classes)

    def forward(self, u, v=None):
        """(N, D) -> logits (N, classes), or (N, D), (N, D) -> scores (N,)."""
        u = self.norm(u)
        if self.kind == "single":
            return self.linear(self.dropout(u))
        v = self.norm(v)
        if self.kind == "pair":
            return self.linear(self.dropout(torch.cat([u, v, (u - v).abs(), u * v], 1)))
        cosine = F.cosine_similarity(self.dropout(u), self.dropout(v))
        return self.scale * cosine + self.bias

    @torch.no_grad()
    def says(self, u, v=None):
        """Classes, or scores (N,)."""
        found = self.eval()(u, v)
        return found if found.ndim == 1 else found.argmax(1)


def hybrid_probe(kind, train, valid, test, metric, epochs, batch, weighted=False, lr=1e-3):
    """Train and valid (u, v or None, labels), test (u, v) -> the classes, or scores, of the test
    rows (N,) in the epoch whose `metric` of the valid rows is highest; the released code takes the
    test rows for that. `weighted`: classes count n / (classes n_c). [Predict-and-Reconstruct,
    sec. 4]"""
    u, v, labels = train
    labels = torch.as_tensor(labels)
    counts = torch.ones(1)  # a score has one output
    loss = nn.MSELoss()
    if kind != "similarity":
        counts = labels.bincount().float()
        loss = nn.CrossEntropyLoss(len(labels) / len(counts) / counts if weighted else None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = Probe(u.shape[1], len(counts), kind)
        adam = torch.optim.AdamW(head.parameters(), lr, weight_decay=.01, fused=True)
        best = -torch.inf
        kept = None
        for _ in range(epochs):
            head.train()
            for rows in torch.randperm(len(labels)).split(batch):
                adam.zero_grad()
                loss(head(u[rows], None if v is None else v[rows]), labels[rows]).backward()
                adam.step()
            now = measure(metric, head.says(*valid[:2]), valid[2])
            if now > best:
                best = now
                kept = head.says(*test[:2])
    return kept


# ---- what is asked of which set

CLASSES = "sst2 sst cola mr cr subj mpqa trec ag-news"
SENTEVAL = "mr cr subj mpqa sst sst2 trec mrpc"
SETS = {task: names.split() for task, names in {
    "sts": "stsb sick", "pairs": "mrpc qqp pawsx rte xnli",
    "senteval": SENTEVAL, "senteval-adam": SENTEVAL, "fewshot": CLASSES,
    "mlp": CLASSES + " mrpc", "hybrid-probes": " ".join(EPOCHS)}.items()}
IN_LANGUAGES = ("stsb", "pawsx", "xnli")                  # the other sets are English
# The metric whose mean over a task's sets is its headline. SentEval's own SST-2 is `sst`, so GLUE's
# does not count.
HEADLINES = {"sts": "spearman", "pairs": "ap_cosine", "senteval": "accuracy",
             "senteval-adam": "accuracy"}


@dataclass
class TaskOptions:
    """What the tasks of this folder are asked, as their flags say."""
    files: str = "data"
    sets: tuple | None = None  # None: all that are there
    langs: tuple = ("en",)
    limit: int | None = None
    controls: bool = True
    pool: str | None = None    # None: the task's or the model's
    encoders: dict = field(default_factory=dict)  # made by `encoders`, one set a pooling
    lines: list = field(default_factory=list)  # to read, which the command prints below the table


def splits(task, name):
    """The splits that a task reads of a set, the reported one last."""
    if task in ("sts", "pairs"):
        return ("test",)
    is_senteval = task in ("senteval", "senteval-adam")
    if is_senteval and name in ("mr", "cr", "subj", "mpqa"):
        return ("train+valid+test",)                      # cross-validated
    if task == "fewshot" or is_senteval and name in ("trec", "mrpc"):
        return "train+valid", "test"
    return "train", "valid", "test"


CORRELATIONS = ("spearman", "pearson")
METRICS = {"mrpc": ("accuracy", "f1"), "qqp": ("accuracy", "f1"), "cola": ("accuracy", "mcc"),
           "stsb": CORRELATIONS, "sick": CORRELATIONS}


def score(task, name, parts):
    """Parts [(u (N, D), v or None, labels (N,))] as `splits` names them -> {metric: number}."""
    u, v, gold = parts[-1]
    if task == "sts":
        cosine = similarities(u, v)["cosine"]
        return {metric: measure(metric, cosine, gold) for metric in CORRELATIONS}
    if task == "pairs":
        found = {kind: 100 * average_precision_score(gold, values)
                 for kind, values in similarities(u, v).items()}
        return {"ap_cosine": found["cosine"], "ap_max": max(found.values())}
    metrics = METRICS.get(name, ("accuracy",))
    if task == "hybrid-probes":
        chooses = {"stsb": "spearman", "cola": "mcc"}.get(name, "accuracy")
        kind = "similarity" if name == "stsb" else sets.find_set(name).kind
        found = hybrid_probe(kind, parts[0], parts[1], (u, v), chooses, *EPOCHS[name],
                             weighted=name == "cola")
        return {metric: measure(metric, found, gold) for metric in metrics}
    heads = [(pairs(*part[:2]).double().numpy(), part[2].numpy()) for part in parts]
    x, labels = heads[0]
    test, _ = heads[-1]
    if task == "fewshot":
        return {"accuracy": few_shot(x, labels, test, gold)}
    kinds = {"senteval": logistic, "senteval-adam": adam, "mlp": partial(adam, (50,))}
    valid = heads[1] if len(heads) > 2 else None
    found = senteval(x, labels, valid, None if len(parts) == 1 else test, kinds[task])
    return {metric: measure(metric, found, gold) for metric in metrics}


# ---- the tasks: each score beside its controls


def encoders(evaluation, options, pool=None):
    """{"model", "untrained" (seed 0), "bag": the mean of the input embeddings}: functions texts ->
    (N, D), which remember what they have embedded."""
    if pool not in options.encoders:
        pooled = pool or evaluation.pool
        found = {"model": remembering(evaluation, evaluation.model, pooled)}
        if options.controls:
            found["untrained"] = remembering(evaluation, untrained(evaluation.model), pooled)
            found["bag"] = partial(bag, evaluation)
        options.encoders[pool] = found
    return options.encoders[pool]


def untrained(model):
    """A Model of the same shape with fresh weights, always the same ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model(model.config).to(next(model.parameters()))


def remembering(evaluation, model, pool):
    known = {}

    def remember(texts):
        new = [text for text in dict.fromkeys(texts) if text not in known]
        if new:
            known.update(zip(new, embed(model, evaluation.ids_of(new), pool)))
        return torch.stack([known[text] for text in texts])
    return remember


def bag(evaluation, texts):
    weight = evaluation.model.embed.weight.detach().float().cpu()
    ids = [torch.from_numpy(row.astype(int)) for row in evaluation.tokenizer.encode(texts)]
    starts = torch.tensor([0, *map(len, ids[:-1])]).cumsum(0)
    return F.embedding_bag(torch.cat(ids), weight, starts, mode="mean")


def wanted(task, options):
    """([(set, language)] that are there, why the others are not, a line each)."""
    there = []
    absent = []
    for name in [name for name in SETS[task] if name in (options.sets or SETS[task])]:
        for lang in options.langs if name in IN_LANGUAGES else ("en",):
            parts = "+".join(splits(task, name)).split("+")
            why = {sets.missing_rows(name, options.files, part, lang) for part in parts} - {""}
            if why:
                absent.append(min(why))
            else:
                there.append((name, lang))
    return there, absent


def no_sets(task, evaluation, options):
    """Why a task cannot be done, or ""."""
    for name in options.sets or ():
        sets.find_set(name)
    if options.sets and not set(options.sets) & set(SETS[task]):
        return f"has no set {', '.join(options.sets)}: its sets are {', '.join(SETS[task])}"
    there, absent = wanted(task, options)
    return f"has no rows: {absent[0]}" if absent and (options.sets or not there) else ""


def headline_means(results, names):
    """{"mean": of the numbers of these names} or, where some are missing, {"mean/of_N": of N > 1};
    the same of their controls."""
    found = {}
    for kind in ("", "/untrained", "/bag"):
        values = [results[name + kind] for name in names if name + kind in results]
        if len(values) > 1:
            label = "mean" if len(values) == len(names) else f"mean/of_{len(values)}"
            found[label + kind] = mean(values)
    return found


def sentences(task, evaluation, options):
    """A task on all sets that are there -> {"set/metric": number, "set/metric/untrained", ...}."""
    there, absent = wanted(task, options)
    for why in absent:
        print(f"note: {task} goes without {why}", file=sys.stderr)
    results = {}
    pool = "mean" if task == "hybrid-probes" and not options.pool else None  # the paper's
    for name, lang in there:
        label = name if lang == "en" else f"{name}-{lang}"
        rows = [sets.read_set(name, options.files, split, lang) for split in splits(task, name)]
        if task == "pairs" and name == "xnli":
            rows = [positives(part) for part in rows]
        gold = rows[-1].labels
        if min(len(set(part.labels)) for part in rows) < 2:
            raise BadInput(f"set {name} has rows of one label: there is nothing to tell apart")
        found = {}
        for kind, encode in encoders(evaluation, options, pool).items():
            vectors = [(encode(part.first), part.second and encode(part.second),
                        torch.tensor(part.labels)) for part in rows]
            found[kind] = score(task, name, vectors)
        for metric, value in found.pop("model").items():
            results[f"{label}/{metric}"] = value
            for kind, others in found.items():
                results[f"{label}/{metric}/{kind}"] = others[metric]
            if metric == "accuracy":
                results[f"{label}/accuracy/majority"] = majority(gold)
            if metric == "ap_cosine":
                results[f"{label}/ap_cosine/chance"] = 100 * sum(gold) / len(gold)
        results[f"{label}/rows"] = len(gold)
    names = [f"{name}/{HEADLINES.get(task)}" for name in SETS[task] if name != "sst2"]
    return headline_means(results, names) | results


def positives(rows):
    """The rows of three-way inference that are entailment (1) or contradiction (0), as MTEB asks
    for `pairs`."""
    kept = [row for row in zip(*rows) if row[2] != 1]
    first, second, labels = map(list, zip(*kept))
    return sets.Rows(first, second, [int(label == 0) for label in labels])
