"""Train an objective.

    python train.py --objective mexma                 # built-in data, CPU, about a minute
    python train.py --objective mexma --help          # all flags with their defaults
    torchrun --nproc_per_node 8 train.py ...          # the same on 8 GPUs

Run the same command again to resume. This file is the training loop: read Run.steps first, then
Run.train_step. harness/settings.py has the flags, and harness/ the files that a run writes.

In a notebook, pass the flags as keywords. With out=None no run folder is written:

    run = train.start("mexma", steps=300, out=None)
    for record in run.steps(every=10): print(record)
    run.scores(); run.encode(["A dog.", "Ein Hund."]); run.answer(["What is ...?"])
"""

import contextlib
import functools
import math
import os
import shlex
import signal
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__":
    missing = [name for name in ("numpy", "tokenizers", "torch", "tqdm") if not find_spec(name)]
    if missing:
        print(f"error: {', '.join(missing)} cannot be imported: pip install -r requirements.txt",
              file=sys.stderr)
        sys.exit(2)
    # While PyTorch is imported, Ctrl-C ends Python without a traceback. run_program changes that.
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # a shell's & ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    print("loading PyTorch ...", file=sys.stderr)  # the first import can take half a minute

import torch
from torch.nn.parallel import DistributedDataParallel

import corpora
import data
import evaluate
import kernels
from base.common import (
    run_program,
    uninterrupted,
    usable_device,
    usable_precision,
)
from base.optimizer import learning_rate, make_optimizer, set_learning_rate
from base.processes import (
    join_processes,
    leave_processes,
    mean_over_ranks,
    rank_and_world,
    together,
    whole,
)
from data import Packed, change_each, pinned, to_device
from harness import runs, screen
from harness.rows import open_data
from harness.settings import TrainConfig, find_objective, parse, resolve_config
from model import Block, Model, in_eval_mode, set_attention


class Run:
    """One training run: its data, model and optimizer, and how it trains and is evaluated."""

    def __init__(self, objective_class, given, writes=True, command=""):
        """given: {flag: value}; writes: keep the run in the folder --out; command: for the log."""
        with together():
            saved = self.read(objective_class, given, writes, command)
            runs.agree(self, saved)
        self.device = join_processes(self.device)
        settings = self.settings
        dtype = getattr(torch, self.precision)
        self.layouts = set_attention(self.objective, settings.attention, self.device,
                                     dtype.itemsize)
        if settings.shard:
            from base.sharding import shard  # here, because most runs are not sharded
            self.model = shard(self.objective, self.blocks, self.device, self.rank, self.world)
        else:
            self.objective.to(self.device)
        # Its cache would keep every block's weights in bfloat16 until the end of the forward.
        self.autocast = functools.partial(torch.autocast, self.device.type, dtype,
                                          enabled=dtype != torch.float32,
                                          cache_enabled=not settings.shard)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == torch.float16)
        self.optimizer = make_optimizer(self.objective, settings)
        self.step = 0  # the number of complete steps
        self.tokens, self.seconds = 0, 0.0  # of training, up to the last flush_metrics
        self.first_scores = None  # {"task/metric": number} of the first evaluation
        self.twin = None  # the number of the one that this process shows at every evaluation
        self.saved_step = 0  # of the last save_checkpoint, which writes nothing without a folder
        self.new_schedule = ""  # what a resumed run says about another --steps
        self.records = []  # what this process appended to the log, also without a folder
        self.evaluated = None  # the step of the last evaluation
        self.example = []  # lines with what the model made of one row there
        self.pending = []  # metrics of the steps since the last record, still on the device
        torch.manual_seed(settings.seed + 1 + self.rank)  # each process has its own dropout
        if saved:
            runs.load_checkpoint(self, saved)

    def read(self, objective_class, given, writes, command):
        """Read all files, and make the model and the objective. Return the checkpoint, None for a
        new run. Raises BadInput."""
        # open_run and resolve_config look these up, so their types are checked first.
        TrainConfig(**{name: given[name] for name in ("size", "preset", "init") if name in given})
        init = runs.open_run(given["init"]) if given.get("init") else None
        settings, self.options, shape, self.notes = resolve_config(objective_class, given, init)
        self.settings = settings
        self.objective_class = objective_class
        self.init = init
        if init:
            from harness import pretrained  # here, because most runs start from random weights
            self.init = pretrained.adapt_init(init, objective_class, self.options, shape)
        self.command = command
        self.rank, self.world = rank_and_world()
        self.device = usable_device(settings.device)
        self.folder = Path(settings.out)
        self.writes = writes and self.rank == 0
        saved = runs.read_checkpoint(self.folder) if writes else None
        self.precision = usable_precision(settings.precision, self.device,
                                          saved["precision"] if saved else "")
        if settings.shard:
            from base.sharding import check_shard
            check_shard(settings, self.precision, self.world)
        tokenizer = self.init.tokenizer if self.init else None
        if saved and not self.init:  # a tokenizer that is trained again could give other ids
            tokenizer = runs.read_tokenizer(self.folder)
        self.data = open_data(settings, objective_class, self.options, tokenizer, self.rank,
                              self.world)

        torch.manual_seed(settings.seed)  # all processes start from the same weights
        self.model = Model(replace(shape, vocab=max(self.data.tokenizer.vocab, shape.vocab)))
        if init:
            pretrained.load_init(self.model, self.init, settings.lora_rank, objective_class.masks)
            self.init = self.init._replace(model=None)  # which needs memory
        by_lora = runs.frozen_names(self.model, "model")
        self.objective = objective_class(self.model, self.options)
        self.objective.tokenizer = self.data.tokenizer
        self.model = self.objective.model  # maybe a copy: what is evaluated, saved and exported
        self.names_in_init = runs.names_in_init(self, by_lora)
        self.blocks = [module for module in self.objective.modules() if isinstance(module, Block)]
        for block in self.blocks:
            block.is_checkpointed = settings.gradient_checkpointing
        self.config = runs.config_of(self)
        return saved

    # ---- the loop

    def steps(self, every=None):
        """Train to the last step. Yield a record every `every` steps (default: --log-every), and
        one for each evaluation.

        If you leave the loop (break, Ctrl-C, an exception in your code), a single process saves its
        last complete step, and the next loop continues from there. Several processes keep their
        last checkpoint."""
        records = self.loop(every)
        runs.close_at_exit(records)
        return records

    def loop(self, every):
        settings = self.settings
        # Read the rows now: an error in them must come before the folder exists.
        self.evaluation()
        # A background thread prepares the next batches while this one is being computed.
        prefetched = data.prefetch(self.make_batch, self.step, settings.steps)
        with (runs.owned(self), contextlib.closing(prefetched) as batches,
              runs.saved_when_left(self)):
            if settings.compile:
                kernels.compile_blocks(self.blocks)
            forward = self.objective
            if self.world > 1 and not settings.shard:  # without a second copy of all gradients
                untied = not self.model.config.tied  # an objective need not use the vocabulary
                forward = DistributedDataParallel(
                    forward, gradient_as_bucket_view=True,
                    find_unused_parameters=untied and not self.objective.causal)
            self.objective.train()  # evaluations turn dropout off and on again
            while True:
                if self.evaluation_is_due():
                    yield self.evaluate()
                if self.step == settings.steps:
                    break
                # A flush precedes each evaluation, save and yield, so the clock measures training.
                if not self.pending:
                    self.clock = time.perf_counter()
                micro_batches = next(batches)
                with uninterrupted():
                    self.pending.append(self.train_step(micro_batches, forward))
                    self.step += 1
                    self.objective.after_step(self.step / settings.steps)

                last = self.step == settings.steps
                logs = self.step % (every or settings.log_every) == 0 or last
                saves = self.step % settings.save_every == 0 or last
                if logs or saves or self.evaluation_is_due():
                    record = self.flush_metrics()
                if saves:
                    runs.save_checkpoint(self)
                if logs:  # after the save, so that whoever leaves here has a checkpoint
                    yield record

    def train_step(self, micro_batches, forward):
        """Run one optimizer step. `forward` is the objective, or DistributedDataParallel around it.
        Return {name: tensor ()}: the loss and its terms, averaged over micro-batches and processes;
        tokens, summed over micro-batches and averaged over processes; grad_norm, before clipping.
        Nothing here waits for the GPU, except float16's loss scaling with Muon."""
        set_learning_rate(self.optimizer, learning_rate(self.step, self.settings))
        micro_batches = average_denominators(to_device(micro_batches, self.device))
        total = {}
        for one in micro_batches:
            # With DDP the processes exchange gradients once a step, with the last micro-batch.
            exchanges = forward is self.objective or one is micro_batches[-1]
            with contextlib.nullcontext() if exchanges else forward.no_sync():
                with self.autocast():
                    loss, terms = forward(one)
                self.scaler.scale(loss / len(micro_batches)).backward()
            add_terms(total, loss, terms, len(micro_batches))
        tokens = sum(len(one["packed"].tokens) for one in micro_batches)
        total["tokens"] = torch.full((), float(tokens), device=self.device)
        metrics = mean_metrics(total)
        self.scaler.unscale_(self.optimizer)  # clip the true gradients, not the scaled ones
        norm = whole(torch.nn.utils.clip_grad_norm_(self.objective.parameters(),
                                                    self.settings.clip or math.inf))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return metrics | {"grad_norm": norm.float()}

    def make_batch(self, step, training=True):
        """Return the micro-batches of a step, a list of what collate returns: of training rows, or
        of held-out ones. With equal settings and data they depend on (seed, step, rank) alone."""
        batches, options = self.data.batches, self.options
        if not training:
            batches = self.data.validation
            options = replace(options, **self.objective_class.eval_overrides)
        examples = batches.examples(step)
        rng = batches.rng(step)  # for collate; `examples` draws from generators of its own
        size = self.settings.batch // self.settings.accumulate
        micro_batches = [self.objective_class.collate(examples[first:first + size], rng, options,
                                                      self.data.tokenizer.special)
                         for first in range(0, len(examples), size)]
        return prepared(micro_batches, self.settings.causal, self.layouts, self.device)

    # ---- a new objective never needs to look below this line

    def flush_metrics(self):
        """Average the metrics of the pending steps, log them and return the record."""
        with uninterrupted():
            runs.check_trained(self)
            pending = self.pending
            mean = mean_of_steps(pending, self.scaler.is_enabled())
            if not math.isfinite(mean["loss"]):
                raise runs.diverged(self, f"the loss is not finite ({mean})")
            seconds = time.perf_counter() - self.clock
            tokens = round(mean.pop("tokens") * len(pending) * self.world)
            self.pending = []
            self.tokens += tokens
            self.seconds += seconds
            record = {"step": self.step, **mean, "lr": learning_rate(self.step - 1, self.settings),
                      "tokens": self.tokens, "seconds": round(self.seconds, 3),
                      "tokens_per_second": round(tokens / max(seconds, 1e-9))}
            runs.append_log(self, record)
        return record

    # ---- evaluation

    def evaluation_is_due(self):
        """Return whether this step has an evaluation that this process has not done yet."""
        is_scheduled = self.step % self.settings.eval_every == 0 or self.step == self.settings.steps
        return is_scheduled and self.evaluated != self.step

    def evaluate(self):
        """Evaluate, log the results and return the record."""
        evaluation = self.evaluation()
        # A run prints no probe, and xsim++ only in its last table, beside that of the first step.
        in_table = self.step in (0, self.settings.steps)
        evaluation.skip = ("probe",) if in_table else ("probe", "xsim++")
        scores = self.scores(evaluation)
        results = {name: value for name, value in scores.items() if math.isfinite(value)}
        if self.first_scores is None:
            self.first_scores = results
            if self.writes:
                runs.write_untrained(self, evaluation.embeddings)
        warnings = [f"{name} is not a finite number" for name in scores if name not in results]
        for text in filter(None, [*warnings, self.objective.warning()]):
            runs.log_warning(self, text)
        if self.writes and self.step == self.settings.steps:
            runs.write_eval_json(self, results)
        record = {"step": self.step, "eval": results}
        runs.append_log(self, record)
        self.evaluated = self.step
        if self.rank == 0:
            self.example = screen.example_lines(self, evaluation)
        return record

    def scores(self, evaluation=None):
        """Evaluate on the held-out rows. Return {"task/metric": number}; {} on ranks above 0."""
        losses = validate(self)
        runs.trained_weights(self)  # with --shard into self.model, which is on the CPU
        if self.rank > 0:
            return {}
        self.model.to(self.device)
        scores = losses | evaluate.run(evaluation or self.evaluation())
        if self.settings.shard and self.step < self.settings.steps:
            self.model.to("cpu")  # the GPU needs the memory for training
        return scores

    @functools.cached_property
    def trained(self):
        """The hashes of all texts that the model is trained on."""
        return runs.trained_texts(self)

    @functools.cached_property
    def rows(self):
        """The held-out rows that evaluations read, as evaluate.EncodedRows."""
        settings = self.settings
        rows = corpora.evaluation_rows(
            self.data.eval_source, settings.langs, "all" if settings.eval_data else "valid",
            settings.eval_limit, settings.chat == "system", self.data.views)
        return evaluate.EncodedRows(rows, self.data.tokenizer, self.model.config,
                                    self.data.affixes, settings.max_length)

    def evaluation(self):
        """Return an evaluate.Evaluation of the model as it is now, on the held-out rows."""
        return evaluate.Evaluation(self.model, self.rows, self.data.views)

    def encode(self, texts):
        """Return the L2-normalized embeddings (N, D) of N texts, read as the first view is."""
        embeddings = evaluate.encode(self.model, self.data.tokenizer, texts, self.data.affixes[0],
                                     self.settings.max_length)
        return torch.nn.functional.normalize(embeddings, dim=-1)

    def answer(self, texts, max_new=128):
        """Return what a decoder answers to N texts, a list of N: at most max_new tokens, greedily.
        It reads no system text, also with --chat system. Raises BadInput for an encoder."""
        from harness.generation import answer
        return answer(self.model, self.data.tokenizer, evaluate.list_of(texts), max_new)[0]


# ---- parts of the loop


def validate(run):
    """Return {"validation/TERM": number}, the loss terms on held-out rows."""
    validation, count = run.data.validation, len(run.data.held_out)
    if not validation:
        return {}
    rows = min(run.settings.eval_limit or count, count)
    micro_batches = []
    for step in range(max(1, rows // (validation.batch * run.world))):
        micro_batches += run.make_batch(step, training=False)
    micro_batches = average_denominators(to_device(micro_batches, run.device))
    total = {}
    devices = [run.device] if run.device.type == "cuda" else []
    with in_eval_mode(run.objective), torch.random.fork_rng(devices):
        for one in micro_batches:
            add_terms(total, *run.objective(one), len(micro_batches))
    metrics = mean_metrics(total)
    return {f"validation/{name}": value.item() for name, value in metrics.items()}


def prepared(micro_batches, is_causal, layouts, device):
    """Return micro-batches with what attention and the copy to a GPU need, in the background
    thread. is_causal: an encoder keeps the mask of its decoder."""
    def planned(packed):
        packed = packed.as_causal() if is_causal else packed
        return packed.make_plans(layouts, device)

    return pinned(change_each(micro_batches, planned, Packed), device)


def average_denominators(micro_batches):
    """Give every micro-batch the mean number of target tokens over all micro-batches and processes.
    Averaging the losses then gives exactly the gradient of one large batch."""
    if "loss_denominators" not in micro_batches[0]:  # the objective predicts no tokens
        return micro_batches
    counts = torch.stack([one["loss_denominators"] for one in micro_batches]).mean(0)
    mean = mean_over_ranks(counts)
    return [one | {"loss_denominators": mean} for one in micro_batches]


def add_terms(total, loss, terms, count):
    """Add a loss and its terms, divided by the number of micro-batches, to the totals."""
    for name, value in {"loss": loss.detach(), **terms}.items():
        total[name] = total.get(name, 0) + value / count


def mean_metrics(total):
    """Return {name: tensor ()} in float32, averaged over all processes."""
    values = torch.stack([value.float() for value in total.values()])
    return dict(zip(total, mean_over_ranks(values)))


def mean_of_steps(pending, is_scaled):
    """Return {name: number}, the means of the metrics of some steps. is_scaled: float16's loss
    scaling skips a step whose gradients overflow, which has no grad_norm."""
    steps = torch.stack([torch.stack(list(one.values())) for one in pending])
    # This is the only line that waits for the GPU. In float64 the sum of tokens is exact.
    columns = dict(zip(pending[0], steps.cpu().double().T))
    if is_scaled:
        norms = columns["grad_norm"]
        columns["grad_norm"] = norms[norms.isfinite()]
    return {name: values.mean().item() for name, values in columns.items() if len(values)}


# ---- training from Python


def start(objective, out=None, **given):
    """Return a Run for a notebook or a script. The keywords are the flags of the command line.

    objective: a name, a file or a class. out=None writes no run folder; a folder that already holds
    this run resumes it."""
    given = {name: str(value) if isinstance(value, Path) else value
             for name, value in given.items()}
    if isinstance(objective, Path):
        objective = str(objective)
    return Run(find_objective(objective), given | {"out": str(out or "")}, writes=out is not None)


def batch(objective, rows=4, step=0, **given):
    """Return the batch that an objective's collate makes of `rows` examples: a dictionary."""
    run = start(objective, **{"eval_limit": 2, "batch": rows, "accumulate": 1} | given)
    return run.make_batch(step)[0]


# ---- command line


def main(arguments):
    """Train as the command line says. Return the exit status."""
    try:
        with together():
            objective_class, given = parse(arguments)
        _, world = rank_and_world()
        of_node = os.environ.get("LOCAL_WORLD_SIZE", str(world))
        program = ["python"] if world == 1 else ["torchrun", "--nproc_per_node", of_node]
        command = shlex.join([*program, "train.py", *arguments])
        return screen.train_and_show(Run(objective_class, given, command=command))
    finally:
        leave_processes()


if __name__ == "__main__":
    run_program(main)
