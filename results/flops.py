"""How much compute a training step takes, and how many steps have the compute of another run: a
method that is better at equal steps may only have used twice the compute.

    python -m results flops --match out/ntp --objective llm-jepa --data regex
"""

import itertools
from dataclasses import fields, replace

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import train
from base.common import BadInput, Parser, shown
from data import to_device
from harness import runs, settings
from model import Block
from objectives import OBJECTIVES

BATCHES = 8  # that are averaged: the rows of a batch have random lengths


def batch_flops(objective, batch):
    """Return the FLOPs of an objective's forward and backward pass on a batch. Matmuls are counted
    while they run, and attention by its visible pairs, 4 * heads * head_dim each (12 with the
    backward pass), because a back end may compute masked pairs too."""
    attention = 0

    def count_attention(block, arguments):
        nonlocal attention
        config, packed = block.config, arguments[1]
        factor = 12 if torch.is_grad_enabled() else 4
        visible = packed.within(block.attention.window).visible_pairs()
        attention += factor * config.heads * config.key_dim * visible

    nothing = {op: lambda *shapes, **options: 0 for op in flop_registry if "attention" in str(op)}
    hooks = [module.register_forward_pre_hook(count_attention) for module in objective.modules()
             if isinstance(module, Block)]
    with FlopCounterMode(display=False, custom_mapping=nothing) as counter:
        objective(to_device(batch, objective.model.embed.weight.device))[0].backward()
    for hook in hooks:
        hook.remove()
    objective.zero_grad()
    return attention + counter.get_total_flops()


def step_flops(words):
    """Return (FLOPs of one step of one process, number of steps) for flags of train.py."""
    return count_flops(*settings.parse(words))


def count_flops(objective_class, given):
    """Return what `step_flops` returns, for an objective and {flag: value}."""
    run = train.Run(objective_class, given, writes=False)
    kinds = [(1.0, run.options)]
    # Count both kinds of steps and weight them, so that the result does not depend on the draws.
    if dropped := getattr(run.options, "jepa_dropout", 0.0):
        kinds = [(1 - dropped, replace(run.options, jepa_dropout=0.0)),
                 (dropped, replace(run.options, jepa_dropout=1.0))]
    total = 0
    for weight, run.options in kinds:
        for batch in itertools.chain.from_iterable(map(run.make_batch, range(BATCHES))):
            total += weight * batch_flops(run.objective, batch) / BATCHES
    return total, run.settings.steps


def matching_steps(flops, words):
    """Return the number of steps with which flags of train.py use that many FLOPs."""
    return max(1, round(flops / step_flops(words)[0]))


def run_flops(folder, named):
    """Return all FLOPs of a run until now, counted again with the settings in its log. `named`: the
    objective of this command, because a file that a log names is not run. Raises BadInput."""
    header = runs.read_header(folder)
    config = header["config"]
    name = config.get("objective")
    objective_class = named if name == named.name else OBJECTIVES.get(name)
    if not objective_class:
        raise BadInput(f"{folder} has the objective {shown(name)}, which is not one of ours: name "
                       "its file with --objective FILE, because the one in a log is not run")
    known = {field.name for one in (settings.TrainConfig, objective_class.Config)
             for field in fields(one)}.union(settings.SHAPE)
    known -= settings.FIXED_BY_INIT if config.get("init") else set()
    if config["model"].get("windows") and not config.get("window"):
        known.discard("window")  # the model of --init has windows of its own
    # --causal is a flag of encoders alone, and the model of every decoder is causal.
    values = config["model"] | config | config[name]
    # A log has every setting, also those of no effect, which train.py refuses as flags.
    known -= {flag for flag, (other, value) in settings.NEEDS.items()
              if values.get(other, value) != value}
    given = {name: value for name, value in values.items() if name in known and value is not None}
    steps = max(record.get("step", 0) for record in runs.read_log(folder))
    return count_flops(objective_class, given)[0] * steps * header["processes"]


def flops_command(words):
    parser = Parser("python -m results flops", "Compute of a training step. Accepts every flag of "
                    "train.py.")
    parser.add_argument("--match", metavar="RUN", help="print the number of steps that has the "
                        "compute of this run")
    options, words = parser.parse_known_args(words)
    if options.match is not None:
        flops = run_flops(options.match, settings.parse(words)[0])
        print(f"{matching_steps(flops, words)} steps have the compute of {options.match}, "
              f"{flops / 1e12:.2f} TFLOP")
        return
    flops, steps = step_flops(words)
    print(f"{flops / 1e9:.2f} GFLOP per step, {flops * steps / 1e12:.2f} TFLOP in {steps} steps")
