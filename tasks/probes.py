"""Frozen embeddings on labeled sets: similarity, SentEval, and Predict-and-Reconstruct's probes.
Each score is given beside that of an untrained model and of a bag of embeddings.

Embeddings are (N, D), labels (N,).
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import pearsonr, spearmanr
from sklearn.base import clone
from sklearn.metrics import accuracy_score, average_precision_score, f1_score, matthews_corrcoef
from sklearn.metrics.pairwise import paired_distances
from sklearn.model_selection import GridSearchCV, ParameterGrid, StratifiedKFold, cross_val_predict
from sklearn.neural_network import MLPClassifier
from torch import nn

from common import BadInput, warn
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
    """Return a metric of N predictions, in percent or times 100. The correlation with a constant is
    0."""
    found = np.asarray(found)
    gold = np.asarray(gold)
    if name in OF_CLASSES:
        return 100 * OF_CLASSES[name](gold, found)
    if len(set(found)) == 1 or len(set(gold)) == 1:
        return 0.0
    correlation = pearsonr if name == "pearson" else spearmanr
    return 100 * float(correlation(found, gold).statistic)


def majority(gold):
    """Return the accuracy in percent of always predicting the most frequent label."""
    return 100 * max(Counter(gold).values()) / len(gold)


def similarities(u, v):
    """Return MTEB's similarities of the rows of u and v: (N, D), (N, D) -> {name: (N,)}."""
    found = {"dot": (u * v).sum(1).numpy()}
    for kind in ("cosine", "euclidean", "manhattan"):
        found[kind] = -paired_distances(u.double().numpy(), v.double().numpy(), metric=kind)
    return found


# ---- SentEval


def pair_features(u, v):
    """Return [|u - v|; u * v]: (N, D), (N, D) -> (N, 2 D), or u without v. [Tai et al. 2015]"""
    return u if v is None else torch.cat([(u - v).abs(), u * v], 1)


def classifier():
    """Return SentEval's classifier and the grid of its L2 penalty: a linear layer, trained with
    Adam. A twentieth of the rows selects the epoch, and training stops after 24 epochs without
    improvement. [SentEval's code]"""
    model = MLPClassifier((), activation="logistic", batch_size=64, early_stopping=True,
                          validation_fraction=.05, n_iter_no_change=24, tol=1e-9,
                          random_state=1111)
    # scikit-learn divides the penalty by the rows of a batch.
    return model, {"alpha": [64 * 10.0 ** power for power in range(-5, -1)]}


def senteval(x, labels, valid=None, test=None, k=10):
    """Return the classes predicted by SentEval's protocol: x (N, D), labels (N,), valid (x,
    labels), test (M, D) -> (M,), or without test rows -> (N,) by k-fold cross-validation. The
    penalty is chosen on the validation rows, or on k folds. [SentEval's code]"""
    model, grid = classifier()
    folds = StratifiedKFold(k, shuffle=True, random_state=1111)
    search = GridSearchCV(model, grid, cv=folds)
    if test is None:
        return cross_val_predict(search, x, labels, cv=folds)
    if valid is None:
        return search.fit(x, labels).predict(test)
    models = [clone(model).set_params(**one).fit(x, labels) for one in ParameterGrid(grid)]
    return max(models, key=lambda fitted: fitted.score(*valid)).predict(test)


# ---- Predict and Reconstruct

EPOCHS = {  # (epochs, batch)
    "sst2": (90, 32), "cola": (90, 32), "mrpc": (90, 32), "qqp": (10, 32), "mnli": (15, 128),
    "stsb": (15, 128), "ag-news": (90, 32)}


class Probe(nn.Module):
    """The heads of Predict-and-Reconstruct [sec. 4], after a LayerNorm of each embedding.

    single: a linear layer on u. pair: a linear layer on [u; v; |u - v|; u * v]. similarity:
    a cos(u, v) + b, with learned a and b."""

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
        """Return logits (N, classes) for embeddings (N, D), or scores (N,) for two of them."""
        u = self.norm(u)
        if self.kind == "single":
            return self.linear(self.dropout(u))
        v = self.norm(v)
        if self.kind == "pair":
            return self.linear(self.dropout(torch.cat([u, v, (u - v).abs(), u * v], 1)))
        cosine = F.cosine_similarity(self.dropout(u), self.dropout(v))
        return self.scale * cosine + self.bias

    @torch.no_grad()
    def predict(self, u, v=None):
        """Return classes or scores, (N,)."""
        found = self.eval()(u, v)
        return found if found.ndim == 1 else found.argmax(1)


def hybrid_probe(kind, train, valid, test, metric, epochs, batch, weighted=False, lr=1e-3):
    """Train a Probe and return its predictions for the test rows (N,). train, valid: (u, v or None,
    labels); test: (u, v). The epoch is the one with the best `metric` on the validation rows; the
    released code chooses it on the test rows. weighted: weight class c by n / (classes n_c).
    [Predict-and-Reconstruct, sec. 4]"""
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
        predicted = None
        for _ in range(epochs):
            head.train()
            for rows in torch.randperm(len(labels)).split(batch):
                adam.zero_grad()
                loss(head(u[rows], None if v is None else v[rows]), labels[rows]).backward()
                adam.step()
            score = measure(metric, head.predict(*valid[:2]), valid[2])
            if score > best:
                best = score
                predicted = head.predict(*test[:2])
    return predicted


# ---- tasks

SETS = {"sts": ("stsb", "sick"), "pairs": ("mrpc", "qqp", "pawsx", "rte", "xnli"),
        "senteval": ("mr", "cr", "subj", "mpqa", "sst", "sst2", "trec", "mrpc"),
        "hybrid-probes": tuple(EPOCHS)}
IN_LANGUAGES = ("stsb", "pawsx", "xnli")  # the other sets are English
# The metric whose mean over a task's sets is reported first.
HEADLINES = {"sts": "spearman", "pairs": "ap_cosine", "senteval": "accuracy"}
CORRELATIONS = ("spearman", "pearson")
METRICS = {"mrpc": ("accuracy", "f1"), "qqp": ("accuracy", "f1"), "cola": ("accuracy", "mcc"),
           "stsb": CORRELATIONS, "sick": CORRELATIONS}


@dataclass
class Options:
    """The flags that are for tasks of this package."""
    files: str = "data"
    sets: tuple | None = None  # None: all that are there
    langs: tuple = ("en",)
    limit: int | None = None
    controls: bool = True
    pool: str | None = None    # None: the task's or the model's
    train_texts: set | None = None  # the texts that the model was trained on


def splits(task, name):
    """Return the splits that a task reads of a set, the tested one last."""
    if task in ("sts", "pairs"):
        return ("test",)
    if task == "senteval" and name in ("mr", "cr", "subj", "mpqa"):
        return ("train+valid+test",)  # cross-validation over all rows
    if task == "senteval" and name in ("trec", "mrpc"):
        return "train+valid", "test"
    return "train", "valid", "test"


def score(task, name, parts):
    """Return {metric: number} of a task on a set. parts: (u (N, D), v or None, labels (N,)) for
    each of its `splits`."""
    u, v, gold = parts[-1]
    if task == "sts":
        cosine = similarities(u, v)["cosine"]
        return {metric: measure(metric, cosine, gold) for metric in CORRELATIONS}
    if task == "pairs":
        found = {kind: 100 * average_precision_score(gold, values)
                 for kind, values in similarities(u, v).items()}
        return {"ap_cosine": found["cosine"], "ap_max": max(found.values())}
    if task == "hybrid-probes":
        chosen_by = {"stsb": "spearman", "cola": "mcc"}.get(name, "accuracy")
        kind = "similarity" if name == "stsb" else "single" if v is None else "pair"
        found = hybrid_probe(kind, parts[0], parts[1], (u, v), chosen_by, *EPOCHS[name],
                             weighted=name == "cola")
    else:
        heads = [(pair_features(*part[:2]).double().numpy(), part[2].numpy()) for part in parts]
        valid = heads[1] if len(heads) > 2 else None
        found = senteval(*heads[0], valid, heads[-1][0] if len(heads) > 1 else None)
    return {metric: measure(metric, found, gold) for metric in METRICS.get(name, ("accuracy",))}


def make_encoders(evaluation, options, pool):
    """Return {name: function of N texts -> (N, D)} for the model and its controls: "untrained", the
    same model with fresh weights, and "bag", the mean of its token embeddings."""
    encoders = {"model": remembering(evaluation, evaluation.model, pool)}
    if options.controls:
        encoders["untrained"] = remembering(evaluation, untrained(evaluation.model), pool)
        encoders["bag"] = partial(bag, evaluation)
    return encoders


def untrained(model):
    """Return a Model of the same shape with fresh weights, always the same ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model(model.config).to(next(model.parameters()))


def remembering(evaluation, model, pool):
    """Return a function that embeds N texts, (N, D), and each text only once."""
    known = {}

    def encode(texts):
        new = [text for text in dict.fromkeys(texts) if text not in known]
        if new:
            known.update(zip(new, embed(model, evaluation.encode_ids(new), pool)))
        return torch.stack([known[text] for text in texts])
    return encode


def bag(evaluation, texts):
    """Return the mean token embedding of N texts, (N, D)."""
    weight = evaluation.model.embed.weight.detach().float().cpu()
    ids = [torch.from_numpy(row.astype(int)) for row in evaluation.tokenizer.encode(texts)]
    starts = torch.tensor([0, *map(len, ids[:-1])]).cumsum(0)
    return F.embedding_bag(torch.cat(ids), weight, starts, mode="mean")


def find_sets(task, options):
    """Return [(set, language)] of a task that are in --files. Raises BadInput if one of --sets is
    missing, or if all are."""
    found = []
    reasons = []
    for name in SETS[task]:
        for lang in options.langs if name in IN_LANGUAGES else ("en",):
            if options.sets and name not in options.sets:
                continue
            why = [sets.missing(name, options.files, one, lang)
                   for split in splits(task, name) for one in split.split("+")]
            if any(why):
                reasons.append(next(filter(None, why)))
            else:
                found.append((name, lang))
    if not (found or reasons):
        raise BadInput(f"{task} has no set {', '.join(options.sets)}: its sets are "
                       f"{', '.join(SETS[task])}")
    if reasons and (options.sets or not found):
        raise BadInput(f"{task}: {reasons[0]}")
    for reason in reasons:
        warn(f"{task}: {reason}")
    return found


def headline_means(results, names):
    """Return {"mean": mean of the numbers of these names}, or {"mean/of_N"} if only N > 1 of them
    are there, and the same for the controls."""
    found = {}
    for kind in ("", "/untrained", "/bag"):
        values = [results[name + kind] for name in names if name + kind in results]
        if len(values) > 1:
            label = "mean" if len(values) == len(names) else f"mean/of_{len(values)}"
            found[label + kind] = mean(values)
    return found


def sentences(task, evaluation, options):
    """Run a task of SETS on its sets. Return {"set/metric": number, "set/metric/untrained": ...}.
    """
    results = {}
    is_mean = task == "hybrid-probes" and not options.pool  # as in the paper
    encoders = make_encoders(evaluation, options, "mean" if is_mean else evaluation.pool)
    for name, lang in find_sets(task, options):
        label = sets.label_of(name, lang)
        rows = [sets.read_set(name, options.files, split, lang) for split in splits(task, name)]
        if task == "pairs" and name == "xnli":
            rows = [positives(part) for part in rows]
        gold = rows[-1].labels
        if min(len(set(part.labels)) for part in rows) < 2:
            raise BadInput(f"all rows of {label} have one label, so there is nothing to predict")
        found = {}
        for kind, encode in encoders.items():
            parts = [(encode(part.first), part.second and encode(part.second),
                      torch.tensor(part.labels)) for part in rows]
            found[kind] = score(task, name, parts)
        for metric, value in found.pop("model").items():
            results[f"{label}/{metric}"] = value
            for kind, others in found.items():
                results[f"{label}/{metric}/{kind}"] = others[metric]
            if metric == "accuracy":
                results[f"{label}/accuracy/majority"] = majority(gold)
            if metric == "ap_cosine":
                results[f"{label}/ap_cosine/chance"] = 100 * sum(gold) / len(gold)
        results[f"{label}/rows"] = len(gold)
    # SentEval's own SST-2 is `sst`, so GLUE's does not count.
    names = [f"{name}/{HEADLINES.get(task)}" for name in SETS[task] if name != "sst2"]
    return headline_means(results, names) | results


def positives(rows):
    """Return the rows that are entailment (now 1) or contradiction (now 0), as MTEB does."""
    kept = [row for row in zip(*rows) if row[2] != 1]
    first, second, labels = map(list, zip(*kept))
    return sets.Rows(first, second, [int(label == 0) for label in labels])
