"""NITP: predict the next token and, from the last hidden state, its shallow state."""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from base.common import AtLeast1, BadInput, NotNegative
from model import MLP
from objectives import Objective, Packed, add_special, alignment_loss, token_targets


class Nitp(Objective):
    """Next-token prediction of a text. In the same pass, the last hidden state of a token also
    predicts what block k outputs for the next token [NITP, arXiv 2605.24956].

        loss = ntp + latent_weight * (1 - cos(P(h_t), sg z_t+1)),  z: the output of block k

    sg: no gradient; P: a SwiGLU of width 4 D, which is discarded after training. k is about a fifth
    of the depth. The next-token loss prevents collapse, because it needs shallow states that tell
    tokens apart. The worst of the paper's controls are --target-gradient and --no-shift. --align
    mse also lost, and --latent-weight 0 is its baseline. We read the paper; its code is not public.
    It does not say whether h is read before or after the final norm: ours is after.
    """
    name = "nitp"
    causal = True
    pool = "mean"
    paper = dict(lr=3e-4, batch=1024, steps=100_000, schedule="wsd", weight_decay=0.1)
    toy = dict(lr=2e-3, batch=32, steps=600, warmup=0.1, max_length=128)

    @dataclass(frozen=True)
    class Config(Objective.Config):
        # weight of the distance to the shallow state; 0: next-token prediction alone
        latent_weight: NotNegative = 1.0
        target_layer: AtLeast1 = 1  # number k of the block whose output is the target
        # predict the state of the next token; --no-shift: that of the same token
        shift: bool = True
        align: Literal["cosine", "mse"] = "cosine"  # distance of prediction and target
        target_gradient: bool = False  # backpropagate into the target too

    def __init__(self, model, config):
        super().__init__(model, config)
        c = model.config
        if config.target_layer > c.layers:
            raise BadInput(f"target_layer is {config.target_layer}: the model has {c.layers} "
                           "blocks, so choose one of 1 to that number")
        if config.latent_weight:
            self.projector = MLP(replace(c, activation="swiglu", bias=False, ffn_dim=4 * c.width))

    # packed: one row per text;  target_positions (N,): all tokens but the last of each row
    # targets (N,): the tokens after them
    @staticmethod
    def collate(examples, rng, config, special):
        rows = [add_special(example.views[0], special) for example in examples]
        packed = Packed.of(rows, causal=True)
        is_last = torch.isin(torch.arange(len(packed.tokens)), packed.cu_seqlens - 1)  # (T,)
        index = (~is_last).nonzero().flatten()
        return dict(packed=packed, **token_targets(index.numpy(), packed.tokens[index + 1].numpy()))

    def forward(self, batch):
        c = self.config
        layers = []
        states = self.model(batch["packed"], layers)  # (T, D)
        ntp = self.target_loss(states[batch["target_positions"]], batch)
        if not c.latent_weight:
            return ntp, {"ntp": ntp.detach()}

        index = batch["target_positions"]  # (N,)
        target = layers[c.target_layer - 1][index + int(c.shift)]  # (N, D)
        if not c.target_gradient:
            target = target.detach()
        latent = alignment_loss(c.align, self.projector(states[index]), target)
        latent = latent * (len(index) / batch["loss_denominators"][0])  # of this micro-batch
        loss = ntp + c.latent_weight * latent
        return loss, {"ntp": ntp.detach(), "latent": latent.detach()}
