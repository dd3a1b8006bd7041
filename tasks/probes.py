"""Frozen embeddings on labeled sets: similarity, SentEval, and Predict-and-Reconstruct's probes,
each beside an untrained model and a bag of embeddings. Embeddings are (N, D), labels (N,)."""

import itertools
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import pearsonr, spearmanr
from sklearn.base import clone
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    f1_score,
    matthews_corrcoef,
    roc_auc_score,
)
from sklearn.metrics.pairwise import paired_cosine_distances
from sklearn.model_selection import GridSearchCV, ParameterGrid, StratifiedKFold, cross_val_predict
from sklearn.neural_network import MLPClassifier
from torch import nn

from base.common import BadInput, warn
from base.metrics import majority, mean
from evaluate import embed
from model import Model
from tasks import sets

OF_CLASSES = {"accuracy": accuracy_score, "f1": partial(f1_score, zero_division=0),
              "mcc": matthews_corrcoef}


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


# ---- SentEval


def pair_features(u, v):
    """Return [|u - v|; u * v]: (N, D), (N, D) -> (N, 2 D), or u without v. [Tai et al. 2015]"""
    return u if v is None else torch.cat([(u - v).abs(), u * v], 1)


def classifier():
    """Return SentEval's classifier, a linear layer trained with Adam, and the grid of its L2
    penalty. A twentieth of the rows selects the epoch. [SentEval's code]"""
    model = MLPClassifier((), activation="logistic", batch_size=64, early_stopping=True,
                          validation_fraction=0.05, n_iter_no_change=24, tol=1e-9,
                          random_state=1111)
    # scikit-learn divides the penalty by the rows of a batch.
    return model, {"alpha": [64 * 10.0 ** power for power in range(-5, -1)]}


def senteval(parts, k=10):
    """Return the classes predicted by SentEval's protocol for the last of the parts, each x (N, D),
    labels (N,): of all rows by k-fold cross-validation, or of test rows after training rows. The
    penalty is chosen on the validation rows between these, or on k folds."""
    model, grid = classifier()
    folds = StratifiedKFold(k, shuffle=True, random_state=1111)
    search = GridSearchCV(model, grid, cv=folds)
    if len(parts) == 1:
        return cross_val_predict(search, *parts[0], cv=folds)
    test, _ = parts[-1]
    if len(parts) == 2:
        return search.fit(*parts[0]).predict(test)
    models = [clone(model).set_params(**one).fit(*parts[0]) for one in ParameterGrid(grid)]
    return max(models, key=lambda fitted: fitted.score(*parts[1])).predict(test)


# ---- Predict and Reconstruct

EPOCHS = {  # (epochs, batch): sst2, mnli and stsb as in table 2, qqp and mrpc as in the logs
    "sst2": (90, 32), "cola": (90, 32), "mrpc": (90, 32), "qqp": (10, 32), "mnli": (15, 128),
    "stsb": (15, 128), "ag-news": (90, 32)}


class Probe(nn.Module):
    """The heads of Predict-and-Reconstruct [sec. 4], after a LayerNorm of each embedding: a linear
    layer on u, or on [u; v; |u - v|; u * v] for pairs; for scores a cos(u, v) + b, with learned a
    and b."""

    def __init__(self, width, classes, is_pair):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.2 if classes else 0.1)
        self.linear = nn.Linear(width * (4 if is_pair else 1), classes) if classes else None
        if not classes:
            self.scale = nn.Parameter(torch.tensor(2.5))
            self.bias = nn.Parameter(torch.tensor(2.5))

    def forward(self, u, v=None):
        """Return logits (N, classes), or scores (N,), for embeddings (N, D)."""
        u = self.norm(u)
        if v is None:
            return self.linear(self.dropout(u))
        v = self.norm(v)
        if self.linear:
            return self.linear(self.dropout(torch.cat([u, v, (u - v).abs(), u * v], 1)))
        return self.scale * F.cosine_similarity(self.dropout(u), self.dropout(v)) + self.bias


def hybrid_probe(train, valid, test, metric, epochs, batch, weighted=False, lr=1e-3):
    """Train a Probe and return its predictions for the test rows (N,). train, valid: (u, v or None,
    classes or scores); test: (u, v or None). The epoch is the one with the best `metric` on the
    validation rows; the released code chooses it on the test rows. weighted: weight class c by
    n / (classes n_c). [Predict-and-Reconstruct, sec. 4]"""
    u, v, labels = train
    counts = []
    loss = nn.MSELoss()
    if not labels.is_floating_point():
        counts = labels.bincount().float()
        loss = nn.CrossEntropyLoss(len(labels) / len(counts) / counts if weighted else None)

    def predict(u, v):
        with torch.no_grad():
            found = head.eval()(u, v)
        return found.argmax(1) if len(counts) else found

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = Probe(u.shape[1], len(counts), v is not None)
        adam = torch.optim.AdamW(head.parameters(), lr, weight_decay=0.01, fused=True)
        best = -torch.inf
        for _ in range(epochs):
            head.train()
            for rows in torch.randperm(len(labels)).split(batch):
                adam.zero_grad()
                loss(head(u[rows], None if v is None else v[rows]), labels[rows]).backward()
                adam.step()
            score = measure(metric, predict(*valid[:2]), valid[2])
            if score > best:
                best = score
                predicted = predict(*test)
    return predicted


# ---- tasks

TEST = ("test",)
THREE = ("train", "valid", "test")
TWO = ("train+valid", "test")   # the penalty is chosen by cross-validation
ALL = ("train+valid+test",)     # so are the scores
# {task: {set: the splits that it reads, the tested one last}}
SETS = {"sts": dict.fromkeys(("stsb", "sick"), TEST),
        "pairs": dict.fromkeys(("mrpc", "qqp", "pawsx", "rte", "xnli"), TEST),
        "senteval": {"mr": ALL, "cr": ALL, "subj": ALL, "mpqa": ALL, "sst2": THREE, "trec": TWO,
                     "mrpc": TWO},
        "hybrid-probes": dict.fromkeys(EPOCHS, THREE), "gap": dict.fromkeys(EPOCHS, TEST)}
IN_LANGUAGES = ("stsb", "pawsx", "xnli")  # the other sets are English
CORRELATIONS = ("spearman", "pearson")
# The first metric chooses the epoch of a probe.
METRICS = {"mrpc": ("accuracy", "f1"), "qqp": ("accuracy", "f1"), "cola": ("mcc", "accuracy"),
           "stsb": CORRELATIONS, "sick": CORRELATIONS}


def read_sets(task, flags):
    """Return {set: the rows of each of its splits} for the sets of a task, or those of --sets, that
    are in --files. Raises BadInput if one of --sets is missing, or if all are."""
    names = [name for name in flags.sets or SETS[task] if name in SETS[task]]
    if not names:
        raise BadInput(f"{task} has no set {', '.join(flags.sets)}: its sets are "
                       f"{', '.join(SETS[task])}")
    found = {}
    missing = []
    translated = {*IN_LANGUAGES} & {*names} if task in ("sts", "pairs") else ()
    for name in names:
        for lang in flags.task_langs if name in translated else ("en",):
            try:
                found[sets.in_language(name, lang)] = [
                    sets.read_set(name, flags.files, split, lang) for split in SETS[task][name]]
            except sets.Missing as error:
                missing.append(f"{task}: {error}")
    if missing and (flags.sets or not found):
        raise BadInput(missing[0])
    for lang in flags.task_langs if translated else ():
        if not any(sets.in_language(name, lang) in found for name in translated):
            raise BadInput(f"{task}: no set has a table in the language {lang} of --task-langs")
    for line in missing:
        warn(line)
    return found


def score(task, name, parts):
    """Return {metric: number} of a task on a set. parts: (u (N, D), v or None, labels (N,)) for
    each of its splits."""
    u, v, gold = parts[-1]
    if task in ("sts", "pairs"):
        if v is None:
            raise BadInput(f"{task}: a row of {name} has no text2")
        cosine = -paired_cosine_distances(u.double().numpy(), v.double().numpy())
        if task == "pairs":
            return {"ap_cosine": 100 * average_precision_score(gold, cosine),
                    "auc_cosine": 100 * roc_auc_score(gold, cosine)}
        return {metric: measure(metric, cosine, gold) for metric in CORRELATIONS}
    metrics = METRICS.get(name, ("accuracy",))
    if task == "hybrid-probes":
        found = hybrid_probe(*parts[:2], (u, v), metrics[0], *EPOCHS[name], name == "cola")
    else:
        found = senteval([(pair_features(*part[:2]).double().numpy(), part[2].numpy())
                          for part in parts])
    return {metric: measure(metric, found, gold) for metric in metrics}


def make_encoders(evaluation, flags, pool):
    """Return {ending of a metric: function of N texts -> (N, D)} for the model, "", and its
    controls: "/untrained", the same model with fresh weights, and "/bag", the mean of its token
    embeddings."""

    def encoder(model):
        known = {}  # each text is embedded only once

        def encode(texts):
            new = [text for text in dict.fromkeys(texts) if text not in known]
            if new:
                known.update(zip(new, embed(model, evaluation.rows.encode(new), pool)))
            return torch.stack([known[text] for text in texts])
        return encode

    model = evaluation.model
    if flags.no_controls:
        return {"": encoder(model)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        fresh = Model(model.config).to(next(model.parameters()))
    return {"": encoder(model), "/untrained": encoder(fresh), "/bag": partial(bag, evaluation)}


def bag(evaluation, texts):
    """Return the mean token embedding of N texts, (N, D)."""
    weight = evaluation.model.embed.weight.detach().float().cpu()
    ids = [torch.from_numpy(row.astype(int)) for row in evaluation.rows.tokenizer.encode(texts)]
    starts = torch.tensor([0, *map(len, ids[:-1])]).cumsum(0)
    return F.embedding_bag(torch.cat(ids), weight, starts, mode="mean")


def headline_mean(name, results, parts):
    """Return {name: mean of these numbers of `results`}, or {} if one is missing."""
    return {name: mean([results[part] for part in parts])} if results.keys() >= {*parts} else {}


def across_languages(tables):
    """Return {"pawsx-en-de": its splits, ...}: the pairs of PAWS-X with the first text in one
    language and the second in the other, then the reverse. tables: {set: its splits}, of which row
    i has the same pair in every language. Sets whose labels differ are not aligned: left out."""
    found = {}
    names = [name for name in tables if name.partition("-")[0] == "pawsx"]
    for one, other in itertools.combinations(names, 2):
        pairs = list(zip(tables[one], tables[other]))
        if all([row[2] for row in a] == [row[2] for row in b] for a, b in pairs):
            langs = (name.partition("-")[2] or "en" for name in (one, other))
            found["-".join(("pawsx", *langs))] = [
                [(x[0], y[1], x[2]) for first, second in ((a, b), (b, a))
                 for x, y in zip(first, second)] for a, b in pairs]
    return found


def sentences(task, evaluation, flags):
    """Run a task of SETS. Return {"set/metric": number, "set/metric/untrained": ..., ...}."""
    results = {}
    is_mean = task == "hybrid-probes" and not flags.pool  # as in the paper
    encoders = make_encoders(evaluation, flags, "mean" if is_mean else evaluation.pool)
    all_tables = flags.tables[task]
    if task == "pairs":
        all_tables = all_tables | across_languages(all_tables)
    for name, tables in all_tables.items():
        if task == "pairs" and name.startswith("xnli"):
            # As in MTEB, the two classes are entailment and contradiction.
            tables = [[(a, b, int(label == 0)) for a, b, label in rows if label != 1]
                      for rows in tables]
        for kind, encode in encoders.items():
            parts = []
            for rows in tables:
                first, second, gold = zip(*rows)
                parts.append([encode(first), None if None in second else encode(second),
                              torch.tensor(gold)])
            try:
                scores = score(task, name, parts)
            except ValueError as error:  # of scikit-learn, for example too few rows of a class
                raise BadInput(f"{task} cannot score {name}: {error}") from None
            for metric, value in scores.items():
                results[f"{name}/{metric}{kind}"] = value
        if f"{name}/accuracy" in results:
            results[f"{name}/accuracy/majority"] = majority(gold)
        if task == "pairs":
            results[f"{name}/ap_cosine/chance"] = 100 * sum(gold) / len(gold)
        results[f"{name}/rows"] = len(gold)
    parts = [f"{name}/accuracy" for name in SETS["senteval"]]
    return headline_mean("mean", results, parts) | results
