"""Semantic Tube Prediction (STP): a text's states go straight on."""

from dataclasses import dataclass

import numpy as np
import torch

from corpora.program import check_range, validate
from objectives import Ntp, cosine_distance


class Stp(Ntp):
    """Next-token prediction, and the displacement of the states over a random span points where
    that over the rest of the row does [STP, arXiv 2602.22617; code: --linear=random_span].

        loss = ntp + stp_weight * (1 - cos(h_e - h_s, (h_T - h_0) - (h_e - h_s))),  s < e random

    The formula is the code's. The paper's, which we know from others' summaries only, is
    1 - cos(h_t - h_r, h_r - h_s), s < r < t: the way before r and the way behind it. The code also
    leaves the chat's marks between Text and answer out of both ways; here that is one [SEP], and it
    stays. Nothing but ntp keeps the states from collapsing: at weight 1 they do.
    """
    name = "stp"  # other facts and training values are Ntp's
    toy = dict(Ntp.toy, data="regex")

    @dataclass(frozen=True)
    class Config:
        stp_weight: float = 0.02  # lambda of the paper

        def __post_init__(self):
            validate(self)
            check_range(self, "stp_weight", 0)

    # the keys of Ntp, and
    # span_index (4, N): of each row its first token, where the span starts and ends, its last token
    @staticmethod
    def collate(examples, rng, config, special):
        batch = Ntp.collate(examples, rng, Ntp.Config(), special)
        ends = batch["packed"].cu_seqlens.numpy().astype(np.int64)
        first = ends[:-1]
        last = ends[1:] - 1
        length = last - first  # (N,), at least 3: [CLS], a token, [SEP], a token
        start = rng.integers(0, length)
        # A span that starts at the first token ends before the last: something must be the rest.
        end = rng.integers(start + 1, np.where(start == 0, length, length + 1))
        index = np.stack([first, first + start, first + end, last])
        return dict(batch, span_index=torch.from_numpy(index))

    def forward(self, batch):
        states = self.model(batch["packed"])  # (T, D)
        ntp = self.vocabulary_loss(states, batch)

        first, start, end, last = states[batch["span_index"]]  # (N, D) each
        span = end - start
        rest = (last - first) - span
        stp = cosine_distance(span, rest)

        loss = ntp + self.config.stp_weight * stp
        return loss, {"ntp": ntp.detach(), "stp": stp.detach()}
