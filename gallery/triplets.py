"""Triplets: find the positive among the positives and the hard negatives of a batch."""

from dataclasses import dataclass
from hashlib import blake2b

import torch
import torch.nn.functional as F

from base.common import AtLeast1, Positive
from base.processes import all_gather_with_grad
from objectives import Contrastive, Objective, Packed, add_special, no_autocast, upcast


class Triplets(Objective):
    """InfoNCE with hard negatives: anchor a_i finds its positive p_i among all texts of the batch
    that are no anchors, N positives and K N negatives [DPR, arXiv 2004.04906, eq. 2, sec. 3.2].

        loss = mean over i of -log(exp(cos(a_i, p_i) / t) / sum over c_j of exp(cos(a_i, c_j) / t))

    The c_j are p_i and every other text once, except those equal to a_i or p_i: the negative of one
    row is often the positive of another. The paper has inner products without a temperature, and
    its hard negatives come from BM25.

    Columns are those of a pair, then negative, hard_neg or rejected with any ending, in their
    order. FAQ.md shows how to mine negatives.
    """
    name = "triplets"
    views = 3
    hard_negatives = True
    masks = False
    toy = Contrastive.toy

    @dataclass(frozen=True)
    class Config(Objective.Config):
        negatives: AtLeast1 = 1  # number of hard negatives of a row (K)
        temperature: Positive = 0.07  # softmax temperature

    @classmethod
    def num_views(cls, config):
        return 2 + config.negatives

    @classmethod
    def uses_in_batch_negatives(cls, config):
        return True

    # packed: the N anchors, the N positives, the first negative of each, the second ...
    # text_hash ((2 + K) N,): equal for equal texts, also of different processes
    @staticmethod
    def collate(examples, rng, config, special):
        texts = [ids for view in zip(*(example.views for example in examples)) for ids in view]
        hashes = [int.from_bytes(blake2b(ids.tobytes(), digest_size=7).digest(), "little")
                  for ids in texts]
        return dict(packed=Packed.of([add_special(ids, special) for ids in texts]),
                    text_hash=torch.tensor(hashes))

    def forward(self, batch):
        views = self.num_views(self.config)
        z = F.normalize(upcast(self.model.embeddings(batch["packed"])), dim=-1)
        a, *candidates = map(all_gather_with_grad, z.chunk(views))  # (N, D) each
        a_text, *texts = map(all_gather_with_grad, batch["text_hash"].chunk(views))  # (N,) each
        c, c_text = torch.cat(candidates), torch.cat(texts)  # ((1 + K) N, D), ((1 + K) N,)
        with no_autocast(z):
            logits = a @ c.T / self.config.temperature  # (N, (1 + K) N)
        logits = logits.masked_fill(self.left_out(a_text, c_text), -torch.inf)
        loss = F.cross_entropy(logits, torch.arange(len(a), device=z.device))
        return loss, {"align": loss.detach()}

    @staticmethod
    def left_out(a_text, c_text):
        """Return which texts are no c_j of row i, (N,), (M,) -> (N, M) bool. Text i is p_i."""
        p_text = c_text[:len(a_text)]
        is_own = (c_text == a_text[:, None]) | (c_text == p_text[:, None])  # (N, M)
        is_copy = (c_text == c_text[:, None]).tril(-1).any(1)  # (M,), of an earlier candidate
        return (is_own | is_copy).fill_diagonal_(False)
