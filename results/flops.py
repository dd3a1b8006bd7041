"""How much compute a training step is, and how many steps equal another run.

    python -m results flops --objective mexma                       # and any other flag of train.py
    python -m results flops --match out/ntp --objective llm-jepa --data regex

"Better at equal steps" may only be "twice the compute": with --match a control gets its steps.
Of an objective of objectives.py the sizes of a batch tell it; one of another file is run.
"""

import itertools
import shlex
from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import evaluate
import train
from corpora.program import BadInput, Parser
from model import Block, to_device
from objectives import OBJECTIVES

PROBES = 32  # batches that are averaged
# {a line of a batch: the blocks that read it}.
LINES = {"packed": "model.blocks", "head_packed": "unmask", "predict": "predictor",
         "clean": "teacher.model.blocks"}
# {what a batch has one of for each row that linear maps read: these maps}.
ROWS = {"context_index": "predictor_embed", "mask_index": "predictor_proj",
        "cls_index": "predictor"}


def batch_flops(objective, batch):
    """FLOPs of an objective's forward and backward on a batch, from their sizes alone. Norms,
    activations and what compares vectors are left out: less than 2 %."""
    total = 0
    for line in LINES.keys() & batch.keys():
        packed = batch[line]
        for block in objective.get_submodule(LINES[line]):
            total += len(packed.tokens) * matrix_flops(block.parameters())
            # 4 H K a visible pair forward, twice that backward; a teacher is not trained.
            trained = any(weight.requires_grad for weight in block.parameters())
            factor = 12 if trained else 4
            total += factor * block.config.heads * block.config.key_dim * packed.visible_pairs()
    for rows in ROWS.keys() & batch.keys():
        # Of the [CLS] of two sentences one predicts the other.
        count = len(batch[rows]) // (2 if rows == "cls_index" else 1)
        total += count * matrix_flops(objective.get_submodule(ROWS[rows]).parameters())
    if "targets" in batch:
        total += len(batch["targets"]) * matrix_flops(vocabulary(objective))
    return total


def counted_flops(objective, batch):
    """As batch_flops, of any objective: its products are counted while they are made."""
    attended = 0

    def add_attention(block, arguments):
        nonlocal attended
        factor = 12 if torch.is_grad_enabled() else 4
        config = block.config
        attended += factor * config.heads * config.key_dim * arguments[1].visible_pairs()

    # PyTorch would count what is computed of attention, the masked pairs too.
    none = {op: lambda *shapes, **more: 0 for op in flop_registry if "attention" in str(op)}
    blocks = [module for module in objective.modules() if isinstance(module, Block)]
    hooks = [block.register_forward_pre_hook(add_attention) for block in blocks]
    with FlopCounterMode(display=False, custom_mapping=none) as counter:
        objective(to_device(batch, objective.model.embed.weight.device))[0].backward()
    for hook in hooks:
        hook.remove()
    objective.zero_grad()
    return attended + counter.get_total_flops()


def matrix_flops(weights):
    """FLOPs of one row: for each number of a matrix two forward, two for the row's gradient and two
    for the matrix's; none backward where nothing is trained."""
    weights = [weight for weight in weights if weight.ndim == 2]
    forward = 2 * sum(weight.numel() for weight in weights)
    trained = 2 * sum(weight.numel() for weight in weights if weight.requires_grad)
    return 2 * forward + trained if trained else forward


def vocabulary(objective):
    """The weights that the states at the target positions go through."""
    if getattr(objective, "regressor", None):
        return objective.regressor.parameters()
    model = objective.model
    _, weight, _ = model.head(model.embed.weight.new_zeros(0, model.config.width))
    return [weight, *(model.transform.parameters() if model.config.head == "transform" else [])]


def step_flops(arguments):
    """Flags of train.py -> (FLOPs of a step of one process, its number of steps)."""
    run = train.Run(train.parse(arguments), writes=False)
    options = run.settings.options
    # What some steps leave out by chance counts by its share, and not by how the draws fell.
    share = getattr(options, "jepa_dropout", 0.0)
    kinds = [(1.0, options)]
    if share:
        kinds = [(1 - share, replace(options, jepa_dropout=0.0)),
                 (share, replace(options, jepa_dropout=1.0))]
    count = batch_flops if type(run.objective) in OBJECTIVES.values() else counted_flops
    total = 0
    for weight, options in kinds:
        run.settings = run.settings._replace(options=options)
        for part in itertools.chain(*map(run.make_batch, range(PROBES))):
            total += weight * count(run.objective, part) / PROBES
    return total, run.train.steps


def match(wanted, arguments):
    """Flags of train.py -> (its steps with the wanted FLOPs, the FLOPs of one)."""
    flops, _ = step_flops(arguments)
    return max(1, round(wanted / flops)), flops


def run_flops(folder):
    """All FLOPs of a finished run, counted again from the command in its log."""
    first = evaluate.read_first(folder)
    words = shlex.split(first.get("command", ""))
    # The flags follow train.py, which may have been called by a path.
    words = list(itertools.dropwhile(lambda word: not word.endswith("train.py"), words))[1:]
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
    if options.match:
        steps, flops = match(run_flops(options.match), rest)
        print(f"{steps} steps of {flops / 1e9:.2f} GFLOP have the compute of {options.match}")
        return
    flops, steps = step_flops(rest)
    print(f"{flops / 1e9:.2f} GFLOP a step, {flops * steps / 1e12:.2f} TFLOP in {steps} steps")
