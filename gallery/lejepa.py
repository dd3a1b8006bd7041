"""LeJEPA for text: two masked versions of a text agree, and all embeddings form a Gaussian."""

from dataclasses import dataclass

from torch import nn

from base.common import AtLeast1, Fraction
from base.processes import all_gather_with_grad
from objectives import Objective, Packed, add_special, epps_pulley, mask_rows, upcast


class LeJepa(Objective):
    """Pull the projected embeddings of two masked versions of a text to their center, and make all
    projected embeddings an isotropic Gaussian [LeJEPA, arXiv 2511.08544; released MINIMAL.md].

        loss = (1 - w) * mean over views |z_v - center|^2 + w * mean over views SIGReg(z_v)

    w is our sigreg_weight, the paper's lambda: 0.05, and 0.02 in its minimal example. The paper's
    views are crops of images; masking is our choice. SIGReg keeps the projected embeddings from
    collapsing, but not the embeddings before the projector.
    """
    name = "lejepa"
    pool = "mean"
    paper = dict(lr=5e-4, batch=512, weight_decay=0.05)  # for images
    toy = dict(lr=1e-3, batch=64, steps=600, warmup=0.1, max_length=128, hidden=256,
               projected=64)

    @dataclass(frozen=True)
    class Config(Objective.Config):
        sigreg_weight: Fraction = 0.05  # weight of SIGReg; agreement has the rest
        mask_ratio: Fraction = 0.3  # fraction of tokens to mask in each version
        hidden: AtLeast1 = 2048  # hidden width of the projector
        projected: AtLeast1 = 128  # width of the projected embeddings

    def __init__(self, model, config):
        super().__init__(model, config)
        wide = config.hidden
        # A bias before BatchNorm would have no effect.
        self.projector = nn.Sequential(
            nn.Linear(model.config.width, wide, bias=False), nn.BatchNorm1d(wide), nn.ReLU(),
            nn.Linear(wide, wide, bias=False), nn.BatchNorm1d(wide), nn.ReLU(),
            nn.Linear(wide, config.projected))

    @classmethod
    def uses_in_batch_negatives(cls, config):
        return True  # SIGReg compares all texts of a batch

    # packed: a masked version of each of N rows, then another of each
    @staticmethod
    def collate(examples, rng, config, special):
        clean = [add_special(example.views[0], special) for example in examples]
        rows, _, _ = mask_rows(clean + clean, config.mask_ratio, rng, special)
        return dict(packed=Packed.of(rows))

    def forward(self, batch):
        w = self.config.sigreg_weight
        embeddings = self.model.embeddings(batch["packed"])  # (2N, D)
        x, y = map(all_gather_with_grad, upcast(self.projector(embeddings)).chunk(2))  # (N, P)
        center = (x + y) / 2
        agree = ((x - center).square().mean() + (y - center).square().mean()) / 2
        sigreg = (epps_pulley(x) + epps_pulley(y)) / 2
        loss = (1 - w) * agree + w * sigreg
        return loss, {"agree": agree.detach(), "sigreg": sigreg.detach()}
