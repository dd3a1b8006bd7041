"""Semantic Tube Prediction (STP): the hidden states of a text follow a straight line."""

from dataclasses import dataclass

import numpy as np
import torch

from base.common import NotNegative
from objectives import Ntp, Objective, cosine_distance, states_at


class Stp(Ntp):
    """The hidden states have to move in the same direction over a random span as over the rest of
    the row [STP, arXiv 2602.22617].

        loss = ntp + stp_weight * (1 - cos(h_e - h_s, (h_T - h_0) - (h_e - h_s))),  s < e random

    This is the formula of the released code (stp.py --linear=random_span), which we read, with the
    beginning of the paper (arXiv 2602.22617v1). The paper's own formula, which we know from
    summaries, is 1 - cos(h_t - h_r, h_r - h_s) for s < r < t. The code also leaves out the chat's
    tokens between Text and answer; ours is a single [SEP], and we keep it. At weight 1 the states
    collapse.
    """
    name = "stp"  # all other facts and settings are Ntp's

    @dataclass(frozen=True)
    class Config(Objective.Config):
        stp_weight: NotNegative = 0.02  # weight of the STP loss (lambda in the paper)

    # the keys of Ntp, and span_index (4, N): the first token of each row, the start and the end of
    # its span, and its last token
    @staticmethod
    def collate(examples, rng, config, special):
        batch = Ntp.collate(examples, rng, Ntp.Config(), special)
        ends = batch["packed"].cu_seqlens.numpy().astype(np.int64)
        first = ends[:-1]
        last = ends[1:] - 1
        length = last - first  # (N,), at least 3: [CLS], a token, [SEP], a token
        start = rng.integers(0, length)
        # A span from the first token ends before the last one, so that a rest is left.
        end = rng.integers(start + 1, np.where(start == 0, length, length + 1))
        index = np.stack([first, first + start, first + end, last])
        return dict(batch, span_index=torch.from_numpy(index))

    def forward(self, batch):
        targets, index = batch["target_positions"], batch["span_index"].flatten()  # (4N,)
        states, ends = states_at(self.model, batch["packed"], targets, index)
        ntp = self.target_loss(states, batch)

        first, start, end, last = ends.chunk(4)  # (N, D) each
        span = end - start
        rest = (last - first) - span
        stp = cosine_distance(span, rest)

        loss = ntp + self.config.stp_weight * stp
        return loss, {"ntp": ntp.detach(), "stp": stp.detach()}
