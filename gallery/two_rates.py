"""Two masking rates: masked words, and the lightly masked text predicts the heavily masked one."""

from dataclasses import dataclass

from torch import nn

from corpora.program import check_range, validate
from objectives import Objective, Packed, Teacher, cosine_distance, mask_rows, row, token_targets


class TwoRates(Objective):
    """Masked-language modelling of a lightly masked text, whose vector predicts the one that a slow
    copy of the model gives to the same text heavily masked [DLLM-JEPA, arXiv 2606.00091].

        loss = mlm(light) + jepa_weight * (1 - cos(P(z_light), sg z_heavy))

    The paper fine-tunes masked-diffusion decoders of 8 B. We read its abstract and a reproduction,
    where the rates are .2 and .7, momentum .996 throughout, P a few transformer layers and z the
    normed mean of the visible states; here P is an MLP and z the pooled vector, and hidden tokens
    are BERT's, 80 % [MASK], not all. No code of the authors was found. Masked words, and P before a
    slow teacher, stand against collapse.
    """
    name = "two-rates"
    head = "transform"
    pool = "mean"
    paper = dict(lr=1e-5, warmup=0.03, weight_decay=0.0, clip=1.0)  # the reproduction's
    toy = dict(lr=1e-3, batch=64, steps=600, warmup=0.1, max_length=128, momentum=0.97)

    @dataclass(frozen=True)
    class Config:
        jepa_weight: float = 1.0  # lambda of the paper: .5, 1 or 2
        light: float = 0.2  # share of the tokens that are hidden from the model
        heavy: float = 0.7  # share of the tokens that are hidden from the teacher
        momentum: float = 0.996  # of the teacher at the start; it rises to 1 over the run

        def __post_init__(self):
            validate(self)
            check_range(self, "jepa_weight", 0)
            check_range(self, "light heavy momentum", 0, 1)

    def __init__(self, model, config):
        super().__init__(model, config)
        d = model.config.width
        self.predictor = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.teacher = Teacher(model, config.momentum)

    # packed: a lightly masked row an example;  heavy: the heavily masked rows
    # target_positions (N,), targets (N,): the lightly hidden tokens;  num_targets (1,): N
    @staticmethod
    def collate(examples, rng, config, special):
        clean = [row(ids, special) for ids, in examples]
        light, where, targets = mask_rows(clean, "token", config.light, rng, special)
        heavy, _, _ = mask_rows(clean, "token", config.heavy, rng, special)
        return dict(packed=Packed.of(light), heavy=Packed.of(heavy),
                    **token_targets(where, targets, [len(where)]))

    def forward(self, batch):
        light = batch["packed"]
        heavy = batch["heavy"]
        states = self.model(light)  # (T, D)
        mlm = self.vocabulary_loss(states, batch)
        predicted = self.predictor(self.model.pool(states, light))  # (R, D)
        target = self.model.pool(self.teacher(heavy), heavy)  # (R, D)
        jepa = cosine_distance(predicted, target)
        loss = mlm + self.config.jepa_weight * jepa
        return loss, {"mlm": mlm.detach(), "jepa": jepa.detach()}

    def after_step(self, progress):
        super().after_step(progress)
        self.teacher.update(self.model, progress)
