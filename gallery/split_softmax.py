"""Split softmax: hard negatives get a softmax apart from that of the in-batch negatives."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from common import AtLeast1, Fraction, NotNegative, Positive
from data import add_special
from objectives import Objective, Packed, all_gather_with_grad, no_autocast, upcast


class SplitSoftmax(Objective):
    """Find the translation y_i of x_i in the batch and, apart from that, among edited copies h of
    y_i, which one softmax would drown [OmniSONAR, arXiv 2603.16606, stage 2].

        loss = (1 - gamma) * InfoNCE(x, y), with phi(x_i, y_i) lower by a margin
             + gamma * mean_i -log(e^phi(x_i, y_i) / (e^phi(x_i, y_i) + sum_h e^phi(x_i, h)))
        phi(x, y) = scale * cos(x, y)

    We know a summary of it, without gamma, margin and edits, and leave out its decoder. Of our
    edits, retrieval/order tests only `exchange`; the others show whether order itself is learned.
    """
    name, views, pool = "split_softmax", 2, "mean"
    toy = dict(lr=3e-4, embedding_lr=33.0, batch=128, steps=300, layers=2, zero_init=True,
               scale=14.0)

    @dataclass(frozen=True)
    class Config(Objective.Config):
        scale: Positive = 100.0  # factor of the cosines; 1 / scale is the temperature
        margin: NotNegative = 0.0  # what is subtracted from the cosine of a pair, in-batch only
        gamma: Fraction = 0.5  # weight of the hard negatives' softmax
        negatives: AtLeast1 = 1  # number of edited copies per pair
        # edit of a first sentence: exchange two tokens, move a span, or replace a token
        edit: Literal["exchange", "move", "replace"] = "exchange"

    @classmethod
    def uses_in_batch_negatives(cls, config):
        return True

    # packed: the N first sentences y, the N second ones x, then N * negatives edited copies of y
    @staticmethod
    def collate(examples, rng, config, special):
        texts = [pair.views[0] for pair in examples]
        copies = [edited(ids, config.edit, texts, rng) for ids in texts
                  for _ in range(config.negatives)]
        rows = texts + [pair.views[1] for pair in examples] + copies
        return dict(packed=Packed.of([add_special(ids, special) for ids in rows]))

    def forward(self, batch):
        c = self.config
        embeddings = self.model.embeddings(batch["packed"])
        z = F.normalize(upcast(embeddings), dim=1)  # (R, D)
        y, x, *hard = z.chunk(2 + c.negatives)  # (N, D) each
        h = torch.cat(hard).unflatten(0, (len(x), -1))  # (N, negatives, D)
        cosines = (x[:, None] * torch.cat([y[:, None], h], 1)).sum(2)  # (N, 1 + negatives)
        split = F.cross_entropy(c.scale * cosines, torch.zeros_like(x[:, 0]).long())
        x, y = map(all_gather_with_grad, (x, y))
        same = torch.eye(len(x)).to(x)  # (N, N): each row's class is its own number
        with no_autocast(x):
            logits = c.scale * (x @ y.T - c.margin * same)
        contrast = (F.cross_entropy(logits, same) + F.cross_entropy(logits.T, same)) / 2
        loss = (1 - c.gamma) * contrast + c.gamma * split
        return loss, {"contrast": contrast.detach(), "split": split.detach()}


def edited(ids, kind, texts, rng):
    """Return a copy of the ids (n,) with one edit. If it changes nothing, it has no gradient."""
    ids = ids.copy()
    if kind == "exchange":
        pair = rng.permutation(len(ids))[:2]
        ids[pair] = ids[pair[::-1]]
    elif kind == "move":
        first, middle, last = np.sort(rng.integers(len(ids) + 1, size=3))
        ids[first:last] = np.roll(ids[first:last], middle - first)
    else:
        ids[rng.integers(len(ids))] = rng.choice(texts[rng.integers(len(texts))])
    return ids
