"""LeJEPA for text: two maskings of a text agree, and all vectors together are a round cloud."""

from dataclasses import dataclass

import torch
from torch import nn

from corpora.program import check_range, validate
from objectives import Objective, Packed, all_gather_with_grad, epps_pulley, mask_rows, row, upcast


class LeJepa(Objective):
    """The projected vectors of two maskings of a text are pulled to their centre, and SIGReg makes
    each side's an isotropic Gaussian [LeJEPA, arXiv 2511.08544; released MINIMAL.md].

        loss = (1 - share) * mean over views |z_v - centre|^2 + share * mean over views SIGReg(z_v)

    The paper's views are crops of images; for text there is no agreed one, and masking is ours.
    Lambda is .05 in the paper, .02 in the minimal example. No teacher, no negatives, no tokens: a
    cloud that SIGReg keeps round cannot collapse, but what is pooled before the projector can.
    """
    name = "lejepa"
    pool = "mean"
    paper = dict(lr=5e-4, batch=512, weight_decay=0.05)  # for images
    toy = dict(lr=1e-3, batch=64, steps=600, warmup=0.1, max_length=128, hidden=256,
               projected=64)

    @dataclass(frozen=True)
    class Config:
        share: float = 0.05  # lambda of the paper: SIGReg's share of the loss
        mask_ratio: float = 0.3  # share of the tokens that each masking hides
        hidden: int = 2048  # width inside the projector
        projected: int = 128  # width of the projected vectors

        def __post_init__(self):
            validate(self)
            check_range(self, "share mask_ratio", 0, 1)
            check_range(self, "hidden projected", 1)

    def __init__(self, model, config):
        super().__init__(model, config)
        wide = config.hidden
        # BatchNorm takes a bias before it away again.
        self.projector = nn.Sequential(
            nn.Linear(model.config.width, wide, bias=False), nn.BatchNorm1d(wide), nn.ReLU(),
            nn.Linear(wide, wide, bias=False), nn.BatchNorm1d(wide), nn.ReLU(),
            nn.Linear(wide, config.projected))

    @classmethod
    def in_batch(cls, config):
        return True

    # packed: a masking of each of N rows, then another of each
    # seed: of SIGReg's directions;  num_targets (0,)
    @staticmethod
    def collate(examples, rng, config, special):
        clean = [row(ids, special) for ids, in examples]
        rows, _, _ = mask_rows(clean + clean, "token", config.mask_ratio, rng, special)
        return dict(packed=Packed.of(rows), num_targets=torch.zeros(0),
                    seed=int(rng.integers(1 << 31)))

    def forward(self, batch):
        share = self.config.share
        vectors = self.model.pool(self.model(batch["packed"]), batch["packed"])  # (2N, D)
        x, y = map(all_gather_with_grad, upcast(self.projector(vectors)).chunk(2))  # (N, P) each
        centre = (x + y) / 2
        agree = ((x - centre).square().mean() + (y - centre).square().mean()) / 2
        sigreg = (epps_pulley(x, batch["seed"]) + epps_pulley(y, batch["seed"])) / 2
        loss = (1 - share) * agree + share * sigreg
        return loss, {"agree": agree.detach(), "sigreg": sigreg.detach()}
