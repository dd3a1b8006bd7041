"""SimCSE: a text read twice, with other dropout, finds itself among the texts of the batch."""

from dataclasses import dataclass

import torch
from torch import nn

from corpora.program import check_range, validate
from objectives import Objective, Packed, all_gather_with_grad, info_nce, row


class SimCse(Objective):
    """Dropout is the only difference between the two vectors of a text, and the other texts of the
    batch are what it must not be taken for [unsupervised SimCSE, arXiv 2104.08821, eq. 4].

        loss = mean over i of -log(exp(cos(z_i, z'_i) / t) / sum over j of exp(cos(z_i, z'_j) / t))

    z is an MLP of [CLS], which is thrown away after training, as in paper and code. They start from
    BERT, with dropout inside attention too, which this model lacks. The negatives keep the vectors
    from collapsing.
    """
    name = "simcse"
    paper = dict(lr=3e-5, batch=64, steps=15_625, warmup=0.0, schedule="linear", weight_decay=0.0,
                 max_length=30, dropout=0.1)  # BERT-base, an epoch of a million sentences
    toy = dict(lr=1e-3, steps=300, warmup=0.1, max_length=128)

    @dataclass(frozen=True)
    class Config:
        temperature: float = 0.05  # divides the cosines

        def __post_init__(self):
            validate(self)
            check_range(self, "temperature", above=0)

    def __init__(self, model, config):
        super().__init__(model, config)
        d = model.config.width
        self.projector = nn.Sequential(nn.Linear(d, d), nn.Tanh())

    @classmethod
    def in_batch(cls, config):
        return True

    # packed: the N rows, and the same rows again;  num_targets (0,)
    @staticmethod
    def collate(examples, rng, config, special):
        rows = [row(ids, special) for ids, in examples]
        return dict(packed=Packed.of(rows + rows), num_targets=torch.zeros(0))

    def forward(self, batch):
        states = self.model(batch["packed"])  # (T, D)
        vectors = self.projector(self.model.pool(states, batch["packed"]))  # (2N, D)
        x, y = map(all_gather_with_grad, vectors.chunk(2))  # (N, D) each
        loss = info_nce(x, y, self.config.temperature, within=False, both=False)
        return loss, {"align": loss.detach()}
