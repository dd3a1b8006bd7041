"""Masked latents: MLM, and the states of a masked text predict those of the whole text."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

from common import NotNegative, PositiveFraction
from model import MLP
from objectives import Mlm, Objective, Packed, add_special, align, epps_pulley, upcast


class MaskedLatents(Objective):
    """Masked-language modeling. The hidden states of the masked tokens also predict those that the
    same weights give for the whole text [ProteinJEPA, arXiv 2605.07554].

        loss = mlm + latent_weight * (1 - cos(P(h), sg LN(h'))) + sigreg_weight * SIGReg(P(h))

    sg: no gradient; P: a SwiGLU of width 8/3 D; LN: a layer norm without weights. There is no EMA
    teacher: the MLM loss and SIGReg prevent collapse, which the paper saw with the latent loss
    alone. Its control with all positions and MSE gained nothing (--where all --align mse).

    The paper applies LN to P(h) too. Then the MSE is 2 (1 - cos), so its MSE would differ in weight
    alone: our --align mse takes P(h) without LN. In the cosine that LN only subtracts the mean over
    dimensions, and we leave it out. We know the paper from a detailed summary. We do not know
    whether h' has dropout (ours has the model's), or whether SIGReg has a factor N, as ours has.
    With it, a weight of 1 keeps a small model from learning words (`results show masked-latents`).
    """
    name = "masked_latents"
    head = "transform"
    pool = "mean"
    paper = dict(Mlm.paper, lr=3e-4)  # from scratch; 3e-5 for a trained model
    toy = Mlm.toy

    @dataclass(frozen=True)
    class Config(Objective.Config):
        mask_ratio: PositiveFraction = 0.2  # fraction of tokens to mask
        where: Literal["masked", "all"] = "masked"  # tokens whose hidden states are predicted
        align: Literal["cosine", "mse"] = "cosine"  # distance of prediction and target
        latent_weight: NotNegative = 0.45  # weight of the latent loss
        sigreg_weight: NotNegative = 1.0  # weight of SIGReg, which spreads out the predictions

    def __init__(self, model, config):
        super().__init__(model, config)
        shape = replace(model.config, activation="swiglu", bias=False,
                        ffn_dim=8 * model.config.width // 3)
        self.predictor = MLP(shape)

    @classmethod
    def uses_in_batch_negatives(cls, config):
        return config.sigreg_weight > 0  # SIGReg compares the tokens of all texts of a batch

    # the keys of Mlm;  clean: the unmasked rows
    # loss_denominators (2,): the number of targets, and that of all tokens
    @staticmethod
    def collate(examples, rng, config, special):
        batch = Mlm.collate(examples, rng, config, special)
        clean = Packed.of([add_special(example.views[0], special) for example in examples])
        counts = torch.cat([batch["loss_denominators"], torch.tensor([float(len(clean.tokens))])])
        return dict(batch, clean=clean, loss_denominators=counts)

    def forward(self, batch):
        c = self.config
        states = self.model(batch["packed"])  # (T, D)
        mlm = self.vocabulary_loss(states, batch)
        with torch.no_grad():
            target = upcast(self.model(batch["clean"]))  # (T, D)
        if c.where == "masked":
            states, target = (x[batch["target_positions"]] for x in (states, target))  # (N, D)
        predicted = self.predictor(states)
        latent = align(c.align, predicted, F.layer_norm(target, target.shape[-1:]))
        # The weight makes it the mean over all micro-batches.
        latent = latent * (len(target) / batch["loss_denominators"][int(c.where == "all")])
        sigreg = epps_pulley(predicted)
        loss = mlm + c.latent_weight * latent + c.sigreg_weight * sigreg
        return loss, {"mlm": mlm.detach(), "latent": latent.detach(), "sigreg": sigreg.detach()}
