"""NextLat: predict the next token and, from it, the next hidden state."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from base.common import NotNegative
from objectives import Ntp, Objective, no_autocast, upcast


class NextLat(Ntp):
    """A small network f predicts each hidden state from the state before it and the token between
    them [NextLat, arXiv 2511.05963].

        g_t+1 = h_t + f(h_t, x_t+1)
        loss = ntp + latent_weight * smooth_l1(g_t+1, sg h_t+1)
             + kl_weight * KL(sg p(h_t+1) | p(g_t+1)),  p: the frozen head; sg: no gradient

    We predict one step ahead; the paper also rolls f out over several. We read the beginning of the
    paper and other people's code, which say that f is an MLP of three layers on h after the final
    norm, and that the weights are 1 and 1. Our last two terms are means over all tokens, those of
    the Text included; a public reproduction has the KL over the answer only.
    """
    name = "nextlat"  # all other facts and settings are Ntp's

    @dataclass(frozen=True)
    class Config(Objective.Config):
        latent_weight: NotNegative = 1.0  # weight of the distance to the true next state
        kl_weight: NotNegative = 1.0  # weight of the KL between the tokens that both states predict

    def __init__(self, model, config):
        super().__init__(model, config)
        d = model.config.width
        self.f = nn.Sequential(nn.LayerNorm(2 * d), nn.Linear(2 * d, d), nn.GELU(),
                               nn.Linear(d, d), nn.GELU(), nn.Linear(d, d))

    # the keys of Ntp;  state_index (M,): all tokens but the last of each row
    # loss_denominators (2,): the number of targets, and M
    @staticmethod
    def collate(examples, rng, config, special):
        batch = Ntp.collate(examples, rng, Ntp.Config(), special)
        packed = batch["packed"]
        is_last = torch.isin(torch.arange(len(packed.tokens)), packed.cu_seqlens - 1)  # (T,)
        index = (~is_last).nonzero().flatten()
        counts = torch.cat([batch["loss_denominators"], torch.tensor([float(len(index))])])
        return dict(batch, state_index=index, loss_denominators=counts)

    def forward(self, batch):
        c = self.config
        states = self.model(batch["packed"])  # (T, D)
        ntp = self.target_loss(states[batch["target_positions"]], batch)

        index = batch["state_index"]
        token = self.model.embed(batch["packed"].tokens[index + 1])  # (M, D)
        predicted = states[index] + self.f(torch.cat([states[index], token], -1))
        target = states[index + 1].detach()
        weight = len(index) / batch["loss_denominators"][1]  # of this micro-batch
        latent = weight * F.smooth_l1_loss(upcast(predicted), upcast(target))

        # (V, D); Gemma-2's softcap is left out
        _, table, _ = self.model.vocabulary_projection(target)
        with no_autocast(states):
            logits = F.linear(upcast(torch.stack([target, predicted])), table.detach())
        log_p, log_q = logits.log_softmax(-1)  # (M, V) each
        kl = weight * F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)

        loss = ntp + c.latent_weight * latent + c.kl_weight * kl
        return loss, {"ntp": ntp.detach(), "latent": latent.detach(), "kl": kl.detach()}
