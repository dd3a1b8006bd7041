"""Split softmax: hard negatives get a softmax apart from that of the in-batch negatives."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from common import AtLeast1, Fraction, NotNegative, Positive
from data import add_special, concat_ids
from objectives import Objective, Packed, all_gather_with_grad, no_autocast, upcast


class SplitSoftmax(Objective):
    """Find the translation y_i of x_i among the sentences of the batch, and, apart from that, among
    edited copies h of y_i. One softmax would drown the few copies in the many other sentences
    [OmniSONAR, arXiv 2603.16606, stage 2].

        loss = (1 - gamma) * InfoNCE(x, y), with phi(x_i, y_i) lower by a margin
             + gamma * mean_i -log(e^phi(x_i, y_i) / (e^phi(x_i, y_i) + sum_h e^phi(x_i, h)))
        phi(x, y) = scale * cos(x, y)

    We know this form from a summary and have not read its gamma, margin, edits and number of
    negatives. We leave out its decoder. `exchange` is what retrieval/order tests; `move` and
    `replace` are not, so they show whether a model learned order or the edit.
    """
    name = "split_softmax"
    views = 2
    pool = "mean"
    toy = dict(lr=1e-3, batch=128, steps=300, layers=2, norm_position="pre", scale=14.0)

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
        states = self.model(batch["packed"])  # (T, D)
        z = F.normalize(upcast(self.model.pool(states, batch["packed"])), dim=1)  # (R, D)
        y, x, *hard = z.chunk(2 + c.negatives)  # (N, D) each
        h = torch.cat(hard).unflatten(0, (len(x), -1))  # (N, negatives, D)
        own = (x * y).sum(1, keepdim=True)  # cosines of the pairs, (N, 1)
        against = torch.cat([own, (x[:, None] * h).sum(2)], 1)  # (N, 1 + negatives)
        split = F.cross_entropy(c.scale * against, torch.zeros_like(x[:, 0]).long())
        x, y = map(all_gather_with_grad, (x, y))
        partner = torch.arange(len(x), device=x.device)
        with no_autocast(x):
            logits = c.scale * (x @ y.T - c.margin * torch.eye(len(x)).to(x))
        contrast = (F.cross_entropy(logits, partner) + F.cross_entropy(logits.T, partner)) / 2
        loss = (1 - c.gamma) * contrast + c.gamma * split
        return loss, {"contrast": contrast.detach(), "split": split.detach()}


def edited(ids, kind, texts, rng):
    """Return a copy of the ids (n,) with one edit. If it changes nothing, it has no gradient."""
    ids = ids.copy()
    first, middle, last = np.sort(rng.integers(len(ids) + 1, size=3))
    if kind == "move":
        return concat_ids(ids[:first], ids[middle:last], ids[first:middle], ids[last:])
    if kind == "replace":
        other = texts[rng.integers(len(texts))]
        ids[rng.integers(len(ids))] = other[rng.integers(len(other))]
        return ids
    pair = rng.permutation(len(ids))[:2]
    ids[pair] = ids[pair[::-1]]
    return ids
