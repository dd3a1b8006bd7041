"""How much compute a training step is, and how many steps are as much as another run.

    python -m results flops --objective mexma                       # and any other flag of train.py
    python -m results flops --match out/ntp --objective llm-jepa --data regex

"Better at equal steps" may only be "twice the compute": with --match a control gets its steps.
"""

import shlex

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import evaluate
import train
from corpora.program import BadInput, Parser
from model import Block


def count_flops(objective, batches):
    """Mean FLOPs of a step over batches (lists of parts): matrix products as PyTorch counts them;
    of attention 4 H K a visible pair and block forward, twice that backward. Gradients and random
    state are left as they were."""
    pairs = 0
    device = next(objective.parameters()).device
    # Attention is counted by what is visible and not by what a back end computes.
    ours = {op: _nothing for op in flop_registry if "attention" in str(op)}

    def count(block, arguments):
        nonlocal pairs
        config = block.config
        factor = 12 if torch.is_grad_enabled() else 4
        pairs += factor * config.heads * config.key_dim * arguments[1].visible_pairs()

    blocks = [module for module in objective.modules() if isinstance(module, Block)]
    hooks = [block.register_forward_pre_hook(count) for block in blocks]
    devices = [device] if device.type == "cuda" else []
    counter = FlopCounterMode(display=False, custom_mapping=ours)
    with torch.random.fork_rng(devices), counter:
        for parts in batches:
            for part in parts:
                objective(part)[0].backward()
    objective.zero_grad(set_to_none=True)
    for hook in hooks:
        hook.remove()
    return (pairs + counter.get_total_flops()) / len(batches)


def _nothing(*shapes, **more):
    return 0


def step_flops(arguments, probes=8):
    """Flags of train.py -> (FLOPs of a step of one process, its number of steps)."""
    run = train.Run(train.parse(arguments), writes=False)
    batches = [train.to_device(part, run.device) for part in map(run.make_batch, range(probes))]
    return count_flops(run.objective, batches), run.train.steps


def run_flops(folder):
    """All FLOPs of a finished run, counted again from the command in its log."""
    first = evaluate.read_first(folder)
    words = shlex.split(first.get("command", ""))
    words = words[words.index("train.py") + 1:] if "train.py" in words else []
    if not words:
        raise BadInput(f"{folder} has no command in its log: train it with python train.py")
    steps = first["config"]["steps"]
    last = max(record.get("step", 0) for record in evaluate.read_log(folder))
    if last < steps:
        raise BadInput(f"{folder} is at step {last} of {steps}: its compute is not known yet")
    return step_flops(words)[0] * steps * first["processes"]


def main(arguments):
    parser = Parser("python -m results flops", __doc__, "and every flag of train.py")
    parser.add_argument("--match", metavar="RUN", help="print the steps with the compute of this")
    options, rest = parser.parse_known_args(arguments)
    wanted = run_flops(options.match) if options.match else None
    flops, steps = step_flops(rest)
    if wanted is None:
        print(f"{flops / 1e9:.2f} GFLOP a step, {flops * steps / 1e12:.2f} TFLOP in {steps} steps")
        return
    matched = max(1, round(wanted / flops))
    print(f"{matched} steps of {flops / 1e9:.2f} GFLOP have the compute of {options.match}")
