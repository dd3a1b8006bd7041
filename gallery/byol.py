"""BYOL for text: predict the EMA teacher's embedding of another masked version of the text."""

from dataclasses import dataclass

from torch import nn

from base.common import AtLeast1, Fraction
from objectives import Objective, Packed, Teacher, add_special, cosine_distance, mask_rows


class Byol(Objective):
    """Mask a text twice. From the embedding of each version, projector g and predictor q predict
    the teacher's projected embedding of the other version [BYOL, arXiv 2006.07733, eq. 2].

        loss = |q(z_1) - z'_2|^2 + |q(z_2) - z'_1|^2, L2-normalized: each term is 2 (1 - cos)

    The paper's views are crops of images; masking is our choice. Its g and q have BatchNorm. A
    Teacher keeps no statistics, so ours have LayerNorm (BYOL works without BatchNorm: arXiv
    2010.10241), and z is as wide as the embedding. The paper's momentum rises with a cosine, ours
    linearly. With toy settings the embeddings have collapsed after 150 steps.
    """
    name = "byol"
    pool = "mean"
    paper = dict(batch=4096)  # of images, with LARS, so its learning rate does not apply
    toy = dict(lr=1e-3, batch=64, steps=600, warmup=0.1, max_length=128, momentum=0.97, hidden=256)

    @dataclass(frozen=True)
    class Config(Objective.Config):
        mask_ratio: Fraction = 0.3  # fraction of tokens to mask in each version
        momentum: Fraction = 0.996  # EMA decay of the teacher at step 0; it rises to 1 over the run
        hidden: AtLeast1 = 4096  # hidden width of projector and predictor

    def __init__(self, model, config):
        super().__init__(model, config)
        self.projector = mlp(model.config.width, config.hidden)
        self.predictor = mlp(model.config.width, config.hidden)
        self.teacher = Teacher(model, config.momentum)
        self.teacher_projector = Teacher(self.projector, config.momentum)

    # packed: a masked version of each of N rows, then another of each
    @staticmethod
    def collate(examples, rng, config, special):
        clean = [add_special(example.views[0], special) for example in examples]
        rows, _, _ = mask_rows(clean + clean, config.mask_ratio, rng, special)
        return dict(packed=Packed.of(rows))

    def forward(self, batch):
        packed = batch["packed"]
        z = self.projector(self.model.embeddings(packed))  # (2N, D)
        target = self.teacher_projector(self.model.pool(self.teacher(packed), packed))  # (2N, D)
        q_1, q_2 = self.predictor(z).chunk(2)  # (N, D) each
        target_1, target_2 = target.chunk(2)
        loss = 2 * cosine_distance(q_1, target_2) + 2 * cosine_distance(q_2, target_1)
        return loss, {"align": loss.detach()}

    def after_step(self, progress):
        super().after_step(progress)
        self.teacher.update(self.model, progress)
        self.teacher_projector.update(self.projector, progress)


def mlp(width, hidden):
    return nn.Sequential(nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.ReLU(),
                         nn.Linear(hidden, width))
