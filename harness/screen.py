"""What a person reads on the screen: rows to look at, tables of numbers, and how a run presents
itself while it trains. Nothing here computes a number that is not printed."""

import contextlib
import itertools
import os
import shlex
import signal
import sys
import time
from dataclasses import replace
from typing import NamedTuple

import torch
from tqdm import tqdm

from base.common import make_folder, shown
from base.metrics import cosines, exact, margin_search, present, verdict
from base.processes import together
from corpora.overlap import share_a_text
from data import Packed
from harness import runs
from model import in_eval_mode
from objectives import MaskConfig

# ---- rows to read


def examples(evaluation, count=5):
    """Return lines with some rows to read: answers of a causal model, or retrieved translations. []
    if the objective is not trained on pairs. More than one have a heading."""
    if len(evaluation.texts) < 2 or evaluation.views < 2:
        return []
    if evaluation.can_answer:
        queries, golds, answers, _ = replace(evaluation, answer_limit=count).answers
        found = "the answers that the model writes"
    else:
        found = "the translations that the model finds"
        golds, queries, *_ = evaluation.texts.values()
        y, x, *_ = evaluation.embeddings.values()
        both = present(x) & present(y)
        if both.sum() < 2:
            return []
        golds, queries = (list(itertools.compress(texts, both)) for texts in (golds, queries))
        answers = [golds[j] for j in margin_search(x[both], y[both])[:count].tolist()]
    lines = [f"texts, and {found} (= right, ! wrong):"] if count > 1 else []
    for query, text, gold in zip(queries, answers, golds):
        right = exact(text, gold)
        lines += [f"  {shown(query)}", f"    {'=' if right else '!'} {shown(text)}"]
        if not right:
            lines.append(f"    instead of {shown(gold)}")
    return lines


def has_twins(evaluation):
    """Return whether an encoder is evaluated on translations, some of which have twins."""
    return bool(evaluation.rows.reordered and len(evaluation.texts) > 1 and evaluation.views > 1
                and not evaluation.model.config.is_decoder)


def confused_twin(evaluation):
    """Return the number in rows.reordered of the first twin that the model takes for the
    translation of its sentence, among those that the order error counts. 0 if there is none."""
    rows = evaluation.rows
    y, x, *_ = evaluation.embeddings.values()
    index = [row for _, row, _ in rows.reordered]
    nearer = cosines(x[index], evaluation.reordered) > cosines(x[index], y[index])
    return next((number for number, (_, _, kind) in enumerate(rows.reordered)
                 if nearer[number] and (kind == rows.order_of or not rows.order_of)), 0)


def twin_lines(evaluation, number):
    """Return lines with a sentence, its translation and a twin, the text with this number in
    rows.reordered: the cosines, and which of the two the model prefers (= right, ! wrong)."""
    golds, sentences, *_ = evaluation.texts.values()
    y, x, *_ = evaluation.embeddings.values()
    twin, row, _ = evaluation.rows.reordered[number]
    # In a collapsed run all cosines are 1: a difference that is not printed gets no mark.
    right = round(cosines(x[[row]], y[[row]]).item(), 4)
    wrong = round(cosines(x[[row]], evaluation.reordered[[number]]).item(), 4)
    return [f"        {shown(sentences[row])}",
            f"      {'=' if right > wrong else ' '} {right:.4f} translation {shown(golds[row])}",
            f"      {'!' if wrong > right else ' '} {wrong:.4f} twin        {shown(twin)}"]


def gap_lines(objective, rows):
    """Return lines with the first row that has a text, whose middle token is masked, and the token
    that an objective with a vocabulary head predicts there."""
    tokenizer = rows.tokenizer
    first, texts = next(iter(rows.texts.items()))
    row = next((row for row, text in enumerate(texts) if text), 0)
    ids = list(rows.ids[first][row])
    middle = len(ids) // 2
    gold, ids[middle] = ids[middle], tokenizer.special.mask
    device = next(objective.parameters()).device
    packed = Packed.of([ids]).to(device)
    with in_eval_mode(objective):
        at = torch.tensor([objective.predicting(middle)], device=device)
        states = objective.model(packed, at=at)  # (1, D)
        found = objective.most_likely(states).item()
    around = ids[max(0, middle - 12):middle], [found], [gold], ids[middle + 1:middle + 13]
    before, said, right, after = (shown(tokenizer.decode(part).strip()) for part in around)
    if found == gold:
        return [f"      = {before} [{said}] {after}"]
    return [f"      ! {before} [{said}] {after}", f"        instead of [{right}]"]


def example_lines(run, evaluation):
    """Return lines that show what the model makes of one held-out row: a twin, a translation, an
    answer, or a masked token."""
    if has_twins(evaluation):
        if run.twin is None:
            run.twin = confused_twin(evaluation)
        return twin_lines(evaluation, run.twin)
    # With --shard, all processes would have to compute the masked token.
    if evaluation.views < 2 and isinstance(run.options, MaskConfig) and not run.settings.shard:
        return gap_lines(run.objective, evaluation.rows)
    return ["    " + line for line in examples(evaluation, count=1)]


# ---- tables of numbers


class Metric(NamedTuple):
    """How a number is shown: here, in look's curves, and in the tables of look compare."""
    title: str
    remark: str = ""  # what a good value is
    digits: int = 1  # decimals in its column, and in look's sentences
    range: tuple | None = None  # what the axis of its curve shows at least; None: it has no curve
    column: str = ""  # head of its column during training; "": it has none


# The numbers that people read, the most important ones first: the last table of train.py has the
# first eight. A new metric of a task that is here needs one line.
METRICS = {
    "generate/exact": Metric("exact match, %", "higher is better", 1, (0, 100), "exact match, %"),
    "generate/startswith": Metric("answers that begin with the gold text, %", "higher is better"),
    "generate/stop": Metric("answers that end with the stop token, %"),
    "retrieval/xsim": Metric("wrong translation (xsim), %", "lower is better", 1, (0, 100),
                             "wrong translation, %"),
    "retrieval/xsim++": Metric("... among hard negatives (xsim++), %",
                               "a bag is better: 0.1 on toy data", 1, (0, 100)),
    "retrieval/order": Metric("order error, %", "chance: 50; lower is better", 1, (0, 100),
                              "order error, %"),
    "geometry/rankme": Metric("effective rank (RankMe)", "dimensions in use; collapse: 1", 1, (0,),
                              "RankMe"),
    "geometry/cosine/same": Metric("cosine of unrelated sentences", "collapse: 1", 2, (0, 1),
                                   "cos(rand)"),
    "geometry/cosine/translations": Metric("cosine of translations", "", 2, (0, 1)),
    "validation/loss": Metric("loss on held-out rows", "without dropout", 3, (), "held-out loss"),
    "geometry/rankme_share": Metric("effective rank, % of the largest possible",
                                    "higher is better"),
    "geometry/uniformity": Metric("uniformity", "0: one point; about -4: a sphere"),
    "geometry/std": Metric("standard deviation of a dimension", "0: one point; 1: healthy"),
    "geometry/norm": Metric("mean L2 norm", "before normalization"),
    "geometry/cosine/different": Metric("cosine of unrelated sentences of two languages"),
    "retrieval/recall@1": Metric("partner has the highest cosine, both directions, %",
                                 "higher is better"),
    "retrieval/recall@10": Metric("partner is among the 10 of highest cosine, %",
                                  "higher is better"),
    "retrieval/mrr@10": Metric("mean of 1 / rank of the partner, 0 beyond 10, %",
                               "higher is better"),
    "probe/mean": Metric("linear probe, %", "no goal: random weights do as well", 1, (0, 100)),
    "probe/majority": Metric("accuracy of always the most frequent class, %"),
}
UNKNOWN = Metric("")  # a number that METRICS lacks


def others(results):
    """Return the names of 20 numbers of the tasks of which METRICS has none. So a task of your own
    returns the numbers that matter first."""
    tasks = {name.partition("/")[0] for name in results if name in METRICS}
    return [name for name in results if name.partition("/")[0] not in tasks][:20]


def table(results):
    """Format the results that METRICS explains as aligned lines, and some others."""
    names = [name for name in results if name in METRICS] + others(results)
    width = max(map(len, names))
    lines = []
    for name in names:
        about = METRICS.get(name, UNKNOWN)
        value = number_text(results[name], 2 if "%" in about.title else 4)
        words = "; ".join(filter(None, (about.title, about.remark)))
        lines.append(f"{name:{width}} {value:>9} {words}".rstrip())
    if len(names) < len(results):
        lines.append(f"and {len(results) - len(names)} more numbers: evaluate.py RUN --json")
    return "\n".join(lines)


def number_text(value, digits):
    """Return a float with some digits, a whole number as it is, and "-" for None."""
    if isinstance(value, float):
        return f"{value:.{digits}f}"
    return "-" if value is None else str(value)


def summary(results, before, start="untrained"):
    """Format the eight most important results of a run and some others, and those before its first
    step in a column with the title `start`."""
    names = [name for name in METRICS if name in results][:8] + others(results)
    titles = [METRICS.get(name, UNKNOWN).title or name for name in names]
    width = max(map(len, titles)) + 2
    lines = [f"{'':{width}} {start:>9} {'trained':>9}"]
    for name, title in zip(names, titles):
        about = METRICS.get(name, UNKNOWN)
        first, last = (number_text(one.get(name), 2) for one in (before, results))
        lines.append(f"{title:{width}} {first:>9} {last:>9}   {about.remark}".rstrip())
    return "\n".join(lines)


def columns(results):
    """Return {metric: Metric} of the columns of a run's evaluations: the loss comes first."""
    names = dict.fromkeys(["validation/loss", *METRICS])
    return {name: METRICS[name] for name in names if METRICS[name].column and name in results}


def heading(results):
    """Return the heads of the columns of `headline`."""
    return "  ".join(["   step", *(about.column for about in columns(results).values()), "verdict"])


def headline(results, step, start="untrained"):
    """Format an evaluation during training as one line of a table with the head `heading`."""
    cells = [f"{results[name]:{len(about.column)}.{about.digits}f}"
             for name, about in columns(results).items()]
    # Random weights look collapsed, which says nothing about the training.
    words = verdict(results).partition(" (")[0] if step else start
    return "  ".join([f"{step:>7}", *cells, words])


# ---- a run


def train_and_show(run):
    """Train a Run, and print what happens. Return the exit status."""
    def say(text):
        if run.rank == 0:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    # A mistake in --eval-limit or --out is found before anything is printed.
    with together():
        run.evaluation()
        if run.writes:
            make_folder(run.folder)
    introduce(run, say)
    bar = tqdm(total=run.settings.steps, initial=run.step, dynamic_ncols=True,
               disable=None if run.rank == 0 else True)  # None: no bar in a file
    progress = None
    if bar.disable and run.rank == 0:
        progress = ProgressLines(run.step, run.settings.steps)
    try:
        with bar, contextlib.closing(run.steps()) as records:
            for record in records:
                bar.update(run.step - bar.n)
                if "loss" in record:
                    speed = (f"loss {record['loss']:.3f}, "
                             f"{record['tokens_per_second']:,} tokens/s")
                    bar.set_postfix_str(speed)
                    if progress:
                        left = (run.settings.steps - run.step) / run.step * run.seconds
                        progress.show(run.step, f"{speed}, {left:.0f} s left")
                elif record["eval"]:  # only rank 0 has numbers
                    show_evaluation(run, record, say)
    except KeyboardInterrupt as stop:
        saved = f"saved at step {run.saved_step}" if run.saved_step else "nothing is saved yet"
        say(f"stopped; {saved}. To resume: {run.command}")
        return 128 + (stop.args[0] if stop.args else signal.SIGINT)
    if run.rank == 0:
        finish(run, record["eval"], say)
    return 0


class ProgressLines:
    """Progress for a file or a notebook, where no bar moves: a line after 30 s or 10 % of the
    steps, whichever comes first."""

    def __init__(self, step, steps):
        self.steps = steps
        self.step, self.time = step, time.monotonic()

    def show(self, step, text):
        """Print the step and a text to stderr if a line is due."""
        now = time.monotonic()
        if now - self.time >= 30 or step - self.step >= self.steps / 10:
            self.step, self.time = step, now
            print(f"step {step:>5} of {self.steps}  {text}", file=sys.stderr)


def introduce(run, say):
    """Print what is trained on what, and which values are not the paper's."""
    settings, rows = run.settings, run.data
    processes = f" x {run.world} processes" if run.world > 1 else ""
    say(f"nanoJEPA: {run.objective_class.name}, size {settings.size}, {settings.steps} steps of "
        f"{settings.batch} examples{processes}, {run.precision} on {run.device}")
    sizes = [p.numel() for p in run.objective.parameters() if p.requires_grad]
    epochs = settings.steps * settings.batch * run.world / len(rows.corpus)
    say(f"  {sum(sizes):,} trained parameters, vocabulary {rows.tokenizer.vocab:,}, "
        f"{epochs:.2f} epochs")
    for note in run.notes + rows.notes:
        say(note)
    columns = shown(", ".join(rows.columns))
    if "system" in rows.corpus.columns[1:]:
        columns += ", system" if settings.chat == "system" else " (not system: --chat plain)"
    say(f"data {rows.corpus.name}: {len(rows.corpus):,} rows of {columns}, and "
        f"{len(rows.held_out):,} {'in --eval-data' if settings.eval_data else 'held out'}")
    truncated, count, lost = rows.corpus.count_truncated(settings.max_length,
                                                         settings.chat == "system")
    if truncated:
        say(f"{truncated:,} of {count:,} texts are longer than --max-length {settings.max_length} "
            f"and will be truncated, which leaves out {lost:.0%} of all tokens")
    if (settings.eval_data or settings.init) and not rows.eval_source.embedded:
        hashes = rows.eval_source.find_hashes("all" if settings.eval_data else "valid",
                                             rows.held_out.columns)
        runs.warn_of_overlap(share_a_text(hashes, run.trained), rows.eval_source.name)
    if run.step == settings.steps:
        say("this run is finished, and is evaluated again")
    elif run.step:
        say(f"resuming at step {run.step} of {settings.steps}")
    if run.new_schedule:
        say(run.new_schedule)
    load, cores = getattr(os, "getloadavg", lambda: [0])()[0], os.cpu_count()
    if run.device.type == "cpu" and load > cores and torch.get_num_threads() > 1:
        say(f"other programs use this machine (load {load:.0f}, {cores} cores): one thread can be "
            "faster (OMP_NUM_THREADS=1)")


def show_evaluation(run, record, say):
    """Print an evaluation as a row of a table, and what the model makes of one held-out row."""
    results, step = record["eval"], record["step"]
    if len([one for one in run.records if "eval" in one]) == 1:  # the first of this process
        if "retrieval/order" in results:
            say("\ntwin: the same words and neighboring pairs, another meaning; = right, ! wrong "
                "(an order error)")
        say("\n" + heading(results))
    say(headline(results, step, "start" if run.settings.init else "untrained"))
    if step and verdict(results) == "COLLAPSING":
        say(f"        all embeddings become the same: {run.objective_class.collapse_advice}")
    for line in run.example:
        say(line)


def finish(run, results, say):
    """Print three examples, the results before and after training, and the next commands."""
    if lines := examples(run.evaluation(), count=3):
        say("\n".join(["", *lines]))
    say("\n" + summary(results, run.first_scores, "start" if run.settings.init else "untrained"))
    words = verdict(results)
    if words not in ("ok", "COLLAPSING"):
        say(f"{words}: the first entry of FAQ.md says when that is bad")
    folder = shlex.quote(str(run.folder))
    if run.device.type == "cuda":
        say(f"peak memory of the GPU: {torch.cuda.max_memory_allocated(run.device) / 1e9:.1f} GB")
    say(f"\n{run.tokens:,} tokens in {run.seconds:.0f} s. The run is in {run.folder}")
    commands = {}
    if "retrieval/order" in results and run.data.eval_source.embedded:
        commands["-m minimal.bag"] = "what bags of words and of word pairs reach"
    rows = "the test split" if run.data.eval_source.embedded else "the same rows"
    commands |= {f"evaluate.py {folder}": f"all measures, on {rows}",
                 f"-m look {folder}": "one page of pictures; needs requirements-dev.txt"}
    if run.settings.init:
        commands[f"-m interop export {folder} FOLDER"] = "for SentenceTransformer"
    say("next:")
    width = max(map(len, commands))
    for command, about in commands.items():
        say(f"  python {command:{width}}  # {about}")
