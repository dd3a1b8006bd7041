"""How much compute a training step is, where its time goes, and how many steps equal another run.

    python -m results flops --objective mexma                       # and any other flag of train.py
    python -m results flops --objective mexma --time                # measured, of one thread
    python -m results flops --match out/ntp --objective llm-jepa --data regex

"Better at equal steps" may only be "twice the compute": with --match a control gets its steps.
"""

import functools
import itertools
import shlex
import statistics
import time
from dataclasses import replace

import torch

import evaluate
import train
from corpora.program import BadInput, Parser

PROBES = 32  # batches that are averaged
# A line of a batch, and the blocks that read it.
LINES = {"packed": "model.blocks", "head_packed": "unmask", "predict": "predictor",
         "clean": "teacher.model.blocks"}
# What a batch has one of for each row that linear maps read, and these.
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


def matrix_flops(weights):
    """Of one row: two for each number of a matrix forward, as many for the gradient of the row and
    for that of the matrix; none backward where nothing is trained."""
    weights = [weight for weight in weights if weight.ndim == 2]
    forward = 2 * sum(weight.numel() for weight in weights)
    trained = 2 * sum(weight.numel() for weight in weights if weight.requires_grad)
    return 2 * forward + trained if trained else forward


def vocabulary(objective):
    """What the states at the target positions go through."""
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
    total = 0
    for weight, options in kinds:
        run.settings = run.settings._replace(options=options)
        for part in itertools.chain(*map(run.make_batch, range(PROBES))):
            total += weight * batch_flops(run.objective, part) / PROBES
    return total, run.train.steps


# What an operation of PyTorch is, by how its name begins; the others are elementwise.
KINDS = {"matrix products": ("mm", "bmm", "addmm"), "attention": ("scaled_dot_product",),
         "optimiser": ("fused_adamw", "foreach", "linalg_vector_norm"),
         "gathers": ("index", "embedding", "gather", "cat"), "elementwise": ("",)}


def thread_ms(run):
    start = time.thread_time()
    run()
    return 1000 * (time.thread_time() - start)


def step_times(arguments):
    """Flags of train.py -> {what: number} of a step on a CPU: its ms, the percent of each kind of
    operation, ms of making the batch, which a thread does ahead, and the step's FLOPs a second in
    percent of those of a product of 1,024."""
    torch.set_num_threads(1)
    run = train.Run(train.parse(arguments), writes=False)
    parts = run.make_batch(0)
    square = torch.randn(1024, 1024)
    works = {"step": functools.partial(run.train_step, parts, run.objective),
             "batch": functools.partial(run.make_batch, 1),
             "product": functools.partial(torch.mm, square, square)}
    times = {name: [] for name in works}
    for number in range(6):
        for name, work in works.items():
            taken = thread_ms(work)
            if number:  # the first round warms up
                times[name].append(taken)
    ms = {name: statistics.median(taken) for name, taken in times.items()}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        start = time.perf_counter()
        works["step"]()
        whole = 1000 * (time.perf_counter() - start)
    spent = dict.fromkeys(KINDS, 0.0)  # ms
    for event in profile.key_averages():
        name = event.key.removeprefix("aten::").strip("_")
        if event.key.startswith("aten::"):
            kind = next(kind for kind, starts in KINDS.items() if name.startswith(starts))
            spent[kind] += event.self_cpu_time_total / 1000
    spent["Python and autograd"] = whole - sum(spent.values())
    speed = sum(batch_flops(run.objective, part) for part in parts) / ms["step"]
    return {"ms": round(ms["step"], 1),
            **{f"{kind}, %": round(100 * one / whole) for kind, one in spent.items()},
            "batch, ms": round(ms["batch"], 1),
            "of a product's speed, %": round(100 * speed * ms["product"] / (2 * 1024**3))}


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
    parser.add_argument("--time", action="store_true", help="measure where the time of a step goes")
    options, rest = parser.parse_known_args(arguments)
    if options.time:
        for what, number in step_times(rest).items():
            print(f"{number:>8}  {what}")
        return
    wanted = run_flops(options.match) if options.match else None
    flops, steps = step_flops(rest)
    if wanted is None:
        print(f"{flops / 1e9:.2f} GFLOP a step, {flops * steps / 1e12:.2f} TFLOP in {steps} steps")
        return
    matched = max(1, round(wanted / flops))
    print(f"{matched} steps of {flops / 1e9:.2f} GFLOP have the compute of {options.match}")
