"""Muon on matrices and AdamW on the rest, as one optimiser: `--optimizer muon`."""

import torch


class MuonAndAdamW:
    """torch.optim.Muon for the matrices of blocks and heads; fused AdamW for embeddings and for
    what is no matrix, without decay on the latter [Muon, Keller Jordan 2024; its steps as long as
    AdamW's, so that the rates of one suit the other: arXiv 2502.16982, sec. 2.2].

    The state is numbered as that of one optimiser: Muon's parameters first. A qkv matrix is one
    matrix for it; others split it in three.
    """

    def __init__(self, objective, lr, weight_decay):
        matrices, embeddings, others = [], [], []
        for name, parameter in objective.named_parameters():
            is_table = {"embed", "position_embedding"} & set(name.split("."))
            kind = others if parameter.ndim != 2 else embeddings if is_table else matrices
            if parameter.requires_grad:
                kind.append(parameter)
        self.muon = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay,
                                     adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW([dict(params=embeddings, weight_decay=weight_decay),
                                        dict(params=others, weight_decay=0.0)], lr=lr, fused=True)
        self.count = len(matrices)
        self.found_inf = torch.zeros(())  # not 0: the step changes nothing

    @property
    def param_groups(self):
        # Loading a state makes new ones.
        return self.muon.param_groups + self.adamw.param_groups

    def step(self):
        # Muon does not look at it, and a wait for the device is little beside its products.
        if not self.found_inf:
            self.muon.step()
            self.adamw.step()

    def zero_grad(self, set_to_none=True):
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)

    def state_dict(self):
        rest = self.adamw.state_dict()["state"]
        state = {self.count + number: moments for number, moments in rest.items()}
        return {"state": self.muon.state_dict()["state"] | state}

    def load_state_dict(self, saved):
        first = {number: one for number, one in saved["state"].items() if number < self.count}
        rest = {number - self.count: one for number, one in saved["state"].items()
                if number >= self.count}
        self.muon.load_state_dict(self.muon.state_dict() | {"state": first})
        self.adamw.load_state_dict(self.adamw.state_dict() | {"state": rest})
