"""BYOL for text: one masking's vector predicts what a slow copy makes of another masking."""

from dataclasses import dataclass

import torch
from torch import nn

from corpora.program import check_range, validate
from objectives import Objective, Packed, Teacher, cosine_distance, mask_rows, row


class Byol(Objective):
    """Two maskings of a text; the prediction from each, by q behind the projector g, is to be what
    a slow copy of model and g makes of the other [BYOL, arXiv 2006.07733, eq. 2].

        loss = |q(z_1) - z'_2|^2 + |q(z_2) - z'_1|^2, of unit vectors: each is 2 (1 - cos)

    The paper's views are crops of images; masking is ours. Its g and q have BatchNorm; a Teacher
    keeps no statistics, so here it is LayerNorm (BYOL works without BatchNorm: arXiv 2010.10241),
    and z is as wide as the vectors. Its momentum rises with a cosine, ours in a straight line.
    q and the slow copy alone stand against collapse; at toy values, 150 steps, they did not hold.
    """
    name = "byol"
    pool = "mean"
    paper = dict(batch=4096)  # of images, with LARS: other rates than ours
    toy = dict(lr=1e-3, batch=64, steps=600, warmup=0.1, max_length=128, momentum=0.97, hidden=256)

    @dataclass(frozen=True)
    class Config:
        mask_ratio: float = 0.3  # share of the tokens that each masking hides
        momentum: float = 0.996  # of the slow copy at the start; it rises to 1 over the run
        hidden: int = 4096  # width inside projector and predictor

        def __post_init__(self):
            validate(self)
            check_range(self, "mask_ratio momentum", 0, 1)
            check_range(self, "hidden", 1)

    def __init__(self, model, config):
        super().__init__(model, config)
        self.projector = mlp(model.config.width, config.hidden)
        self.predictor = mlp(model.config.width, config.hidden)
        self.teacher = Teacher(model, config.momentum)
        self.teacher_projector = Teacher(self.projector, config.momentum)

    # packed: a masking of each of N rows, then another of each;  num_targets (0,)
    @staticmethod
    def collate(examples, rng, config, special):
        clean = [row(ids, special) for ids, in examples]
        rows, _, _ = mask_rows(clean + clean, "token", config.mask_ratio, rng, special)
        return dict(packed=Packed.of(rows), num_targets=torch.zeros(0))

    def forward(self, batch):
        packed = batch["packed"]
        z = self.projector(self.model.pool(self.model(packed), packed))  # (2N, D)
        slow = self.teacher_projector(self.model.pool(self.teacher(packed), packed))  # (2N, D)
        q_1, q_2 = self.predictor(z).chunk(2)  # (N, D) each
        slow_1, slow_2 = slow.chunk(2)
        loss = 2 * cosine_distance(q_1, slow_2) + 2 * cosine_distance(q_2, slow_1)
        return loss, {"align": loss.detach()}

    def after_step(self, progress):
        super().after_step(progress)
        self.teacher.update(self.model, progress)
        self.teacher_projector.update(self.projector, progress)


def mlp(width, hidden):
    return nn.Sequential(nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.ReLU(),
                         nn.Linear(hidden, width))
