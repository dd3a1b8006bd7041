"""Muon for matrices and AdamW for the rest as one optimizer (`--optimizer muon`), and loading the
state of either from a checkpoint."""

import torch

from common import BadInput


class MuonAndAdamW:
    """torch.optim.Muon for the weight matrices of blocks and heads; fused AdamW for embeddings, and
    without weight decay for biases, norms and scalars [Muon, Keller Jordan 2024]. Muon's updates
    are scaled to the size of AdamW's, so both work at similar learning rates
    [arXiv 2502.16982, section 2.2].

    A QKV matrix counts as one matrix; other implementations split it into three.
    """

    def __init__(self, objective, lr, weight_decay):
        matrices, embeddings, others = [], [], []
        for name, parameter in objective.named_parameters():
            is_embedding = {"embed", "position_embedding"} & set(name.split("."))
            group = others if parameter.ndim != 2 else embeddings if is_embedding else matrices
            if parameter.requires_grad:
                group.append(parameter)
        if not matrices:
            raise BadInput("optimizer muon trains weight matrices, and this model has none: use "
                           "--optimizer adamw")
        self.muon = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay,
                                     adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW([dict(params=embeddings, weight_decay=weight_decay),
                                        dict(params=others, weight_decay=0.0)], lr=lr, fused=True)
        # {parameter: its moments}; both optimizers write into one dict.
        self.state = self.adamw.state = self.muon.state

    @property
    def param_groups(self):
        return self.muon.param_groups + self.adamw.param_groups

    def step(self):
        self.muon.step()
        self.adamw.step()

    def zero_grad(self, set_to_none=True):
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)

    def state_dict(self):
        return {"state": {index: self.state[parameter]
                          for index, parameter in enumerate(parameters_of(self))
                          if parameter in self.state}}


def parameters_of(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def load_moments(optimizer, state, path):
    """Load the moments of a checkpoint; learning rate and other settings stay those of this run.

    Raises BadInput for moments whose shapes do not fit the parameters: fused AdamW trusts the
    shapes of a file and would write outside of its memory."""
    parameters = parameters_of(optimizer)
    for index, moments in state.items():
        parameter = parameters[index]
        for name, moment in moments.items():
            is_step = name == "step"
            shape = torch.Size([]) if is_step else parameter.shape
            if moment.shape != shape or moment.layout != torch.strided:
                raise BadInput(f"{path}: {name} of parameter {index} has the shape "
                               f"{tuple(moment.shape)} instead of {tuple(shape)}: choose another "
                               "--out")
            dtype = torch.float32 if is_step else parameter.dtype
            moments[name] = moment.to(parameter.device, dtype).contiguous()
        optimizer.state[parameter] = moments
