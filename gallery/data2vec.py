"""data2vec: the hidden states of a masked text predict those of the whole text."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from base.common import AtLeast1, Fraction, PositiveFraction
from objectives import Mlm, Objective, Packed, Teacher, add_special, upcast


class Data2Vec(Objective):
    """Predict, at the masked positions, the mean of the top K layers of an EMA teacher that reads
    the whole text [data2vec, arXiv 2202.03555, sec. 3; data2vec 2.0, arXiv 2212.07525].

        loss = smooth_l1(P(h), sg 1/K sum over layers of norm(teacher's layer)), quadratic below 4

    sg: no gradient; norm: a layer norm without weights. data2vec 2.0 normalizes each dimension over
    a row, and its loss is the square everywhere. The code masks 35 % of the tokens in spans, all by
    the mask token, where the paper has BERT's 15 %; it averages the outputs of the feed-forward
    layers, where we average those of the blocks; it sums over dimensions; and its momentum ends at
    0.9999.
    """
    name = "data2vec"
    pool = "mean"
    paper = dict(lr=2e-4, batch=256, steps=1_000_000, warmup=0.01, clip=5.0, max_length=510)
    toy = dict(lr=1e-3, batch=64, steps=600, warmup=0.1, max_length=128, momentum=0.97,
               top_layers=2, mask_ratio=0.35)

    @dataclass(frozen=True)
    class Config(Objective.Config):
        top_layers: AtLeast1 = 10  # number of top layers that the target averages (K)
        mask_ratio: PositiveFraction = 0.15  # fraction of tokens to mask
        momentum: Fraction = 0.999  # EMA decay of the teacher at step 0; it rises to 1 over the run

    def __init__(self, model, config):
        super().__init__(model, config)
        d = model.config.width
        self.predictor = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.teacher = Teacher(model, config.momentum)

    # the keys of Mlm;  clean: the unmasked rows
    @staticmethod
    def collate(examples, rng, config, special):
        batch = Mlm.collate(examples, rng, Mlm.Config(config.mask_ratio), special)
        clean = [add_special(example.views[0], special) for example in examples]
        return dict(batch, clean=Packed.of(clean))

    def forward(self, batch):
        positions = batch["target_positions"]
        predicted = self.predictor(self.model(batch["packed"], at=positions))  # (N, D)
        layers = []
        with torch.no_grad():
            self.teacher.model(batch["clean"], layers=layers)
        top = [upcast(layer[positions]) for layer in layers[-self.config.top_layers:]]
        target = sum(F.layer_norm(states, states.shape[-1:]) for states in top) / len(top)
        weight = len(positions) / batch["loss_denominators"][0]  # of this micro-batch
        loss = weight * F.smooth_l1_loss(upcast(predicted), target, beta=4.0)
        return loss, {"latent": loss.detach()}

    def after_step(self, progress):
        super().after_step(progress)
        self.teacher.update(self.model, progress)
