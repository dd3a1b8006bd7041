"""SimCSE: encode a text twice with different dropout, and find it among the other texts."""

from dataclasses import dataclass

from torch import nn

from base.common import Positive
from base.processes import all_gather_with_grad
from objectives import Objective, Packed, add_special, info_nce


class SimCse(Objective):
    """Dropout is the only difference between the two embeddings z and z' of a text. The other texts
    of the batch are negatives [unsupervised SimCSE, arXiv 2104.08821, eq. 4].

        loss = mean over i of -log(exp(cos(z_i, z'_i) / t) / sum over j of exp(cos(z_i, z'_j) / t))

    z is an MLP of [CLS], which is discarded after training, as in the paper and its code. They
    start from BERT, and they have dropout in attention too, which our model lacks. Ignore the
    validation loss: dropout is off in evaluation, so both embeddings are identical.
    """
    name = "simcse"
    masks = False
    paper = dict(lr=3e-5, batch=64, steps=15_625, warmup=0.0, schedule="linear", weight_decay=0.0,
                 max_length=30, dropout=0.1)  # BERT-base, one epoch of a million sentences
    toy = dict(lr=1e-3, steps=300, warmup=0.1, max_length=128)

    @dataclass(frozen=True)
    class Config(Objective.Config):
        temperature: Positive = 0.05  # softmax temperature

    def __init__(self, model, config):
        super().__init__(model, config)
        d = model.config.width
        self.projector = nn.Sequential(nn.Linear(d, d), nn.Tanh())

    @classmethod
    def uses_in_batch_negatives(cls, config):
        return True

    # packed: the N rows, and the same rows again
    @staticmethod
    def collate(examples, rng, config, special):
        rows = [add_special(example.views[0], special) for example in examples]
        return dict(packed=Packed.of(rows + rows))

    def forward(self, batch):
        embeddings = self.projector(self.model.embeddings(batch["packed"]))  # (2N, D)
        x, y = map(all_gather_with_grad, embeddings.chunk(2))  # (N, D) each
        loss = info_nce(x, y, self.config.temperature, symmetric=False)
        return loss, {"align": loss.detach()}
