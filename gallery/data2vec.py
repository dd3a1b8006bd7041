"""data2vec: the states of a masked text predict those of the whole text."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from corpora.program import check_range, validate
from objectives import Objective, Packed, Teacher, mask_rows, row, token_targets, upcast


class Data2Vec(Objective):
    """At the masked places the states predict the mean of the teacher's top K layers, which read
    the whole text [data2vec, arXiv 2202.03555, sec. 3; data2vec 2.0, arXiv 2212.07525].

        loss = smooth_l1(P(h), sg 1/K sum over layers of norm(teacher's layer)), a square below 4

    norm is of each token, without weights; 2.0 norms each dimension over a row, and its loss is the
    square throughout. The code masks 35 % in stretches where the paper has BERT's 15 %, averages
    the outputs of the feed-forwards where this file has the blocks', sums over dimensions, and ends
    its momentum at .9999. Nothing but slowness and norm keeps the states from collapsing.
    """
    name = "data2vec"
    pool = "mean"
    paper = dict(lr=2e-4, batch=256, steps=1_000_000, warmup=0.01, clip=5.0, max_length=510)
    toy = dict(lr=1e-3, batch=64, steps=600, warmup=0.1, max_length=128, momentum=0.97,
               top_layers=2, mask_ratio=0.35)

    @dataclass(frozen=True)
    class Config:
        top_layers: int = 10  # K, of how many of the last layers the mean is predicted
        mask_ratio: float = 0.15  # share of the tokens whose states are predicted
        momentum: float = 0.999  # of the teacher at the start; it rises to 1 over the run

        def __post_init__(self):
            validate(self)
            check_range(self, "top_layers", 1)
            check_range(self, "mask_ratio momentum", 0, 1)

    def __init__(self, model, config):
        super().__init__(model, config)
        d = model.config.width
        self.predictor = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.teacher = Teacher(model, config.momentum)

    # packed: a corrupted row an example;  clean: the clean rows
    # target_positions (N,): the hidden tokens, in both;  num_targets (1,): N
    @staticmethod
    def collate(examples, rng, config, special):
        clean = [row(ids, special) for ids, in examples]
        rows, where, what = mask_rows(clean, "token", config.mask_ratio, rng, special)
        return dict(packed=Packed.of(rows), clean=Packed.of(clean),
                    **token_targets(where, what, [len(where)]))

    def forward(self, batch):
        where = batch["target_positions"]
        predicted = self.predictor(self.model(batch["packed"])[where])  # (N, D)
        layers = []
        with torch.no_grad():
            self.teacher.model(batch["clean"], layers)
        top = [upcast(layer[where]) for layer in layers[-self.config.top_layers:]]
        target = sum(F.layer_norm(one, one.shape[-1:]) for one in top) / len(top)
        share = len(where) / batch["num_targets"][0]  # Micro-batches weigh by their tokens.
        loss = share * F.smooth_l1_loss(upcast(predicted), target, beta=4.0)
        return loss, {"latent": loss.detach()}

    def after_step(self, progress):
        super().after_step(progress)
        self.teacher.update(self.model, progress)
