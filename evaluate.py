"""Evaluate a trained model: sentence embeddings, retrieval across languages, geometry, generation.

    python evaluate.py out/x                       # all tasks that apply, on the run's test rows
    python evaluate.py out/x --data pairs.tsv --langs en,de --tasks retrieval
    python evaluate.py out/x --json > numbers.json   # every number, not only those of the table

Numbers are named task/metric or task/metric/detail. N and M are rows, D the embedding width.
"""

import contextlib
import functools
import itertools
import json
import math
import os
import sys
from dataclasses import dataclass, replace
from typing import NamedTuple

if __name__ == "__main__":  # the first import of PyTorch can take half a minute
    print("loading PyTorch ...", file=sys.stderr)

import torch
import torch.nn.functional as F
from tqdm import tqdm

import corpora
import runs
from common import (
    BadInput,
    Parser,
    comma_list,
    did_you_mean,
    digest,
    file_hash,
    run_program,
    shown,
    usable_device,
    warn,
)
from corpora.overlap import share_a_text
from data import tokenize_rows
from metrics import (
    cosines,
    exact,
    geometry,
    linear_probe,
    margin_search,
    mean,
    percent,
    present,
    retrieval,
    starts_with,
)
from model import POOLS, Packed
from runs import open_run

# ---- embeddings


@contextlib.contextmanager
def in_eval_mode(model):
    """Turn off dropout and gradients until the block ends."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def token_batches(lengths, tokens):
    """Group rows into batches of at most `tokens` tokens. Return lists of row numbers."""
    batches = []
    room = 0
    # The longest rows come first: if memory runs out, it does so at once.
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] > room:
            batches.append([])
            room = max(tokens, lengths[i])  # a longer row is a batch of its own
        batches[-1].append(i)
        room -= lengths[i]
    return batches


def map_batches(model, rows, function, tokens_per_batch=4096):
    """Apply function(packed) to rows of ids, batch by batch. Return a tensor for each row. Raises
    BadInput if one is not finite."""
    # Equal rows are read once: in two batches they could get slightly different embeddings, which
    # would break ties at random.
    unique = list(dict.fromkeys(map(tuple, rows)))
    values = {}
    device = next(model.parameters()).device
    batches = token_batches([len(row) for row in unique], tokens_per_batch)
    with in_eval_mode(model):
        for batch in tqdm(batches, "embed", leave=False, disable=None):  # None: no bar in a file
            batch = [unique[i] for i in batch]
            packed = Packed.of(batch, causal=model.config.causal).to(device)
            values.update(zip(batch, function(packed)))
    if not all(value.isfinite().all() for value in values.values()):
        raise BadInput("the model returns NaN or infinity: its training has diverged")
    return [values[tuple(row)] for row in rows]


def embed(model, rows, pool=None):
    """Embed N rows of ids: (N, D) float32 on the CPU, D the model's truncate_dim if it has one. A
    row without a token gets zeros, and a warning names it."""
    filled = [i for i, row in enumerate(rows) if len(row)]
    if empty := sorted({*range(len(rows))} - {*filled}):
        warn(f"{len(empty)} of {len(rows)} texts have no token, so their embeddings are zero: rows "
             f"{', '.join(str(i + 1) for i in empty[:9])}{', ...' * (len(empty) > 9)}")
    z = torch.zeros(len(rows), model.config.width)
    if filled:
        z[filled] = torch.stack(map_batches(
            model, [rows[i] for i in filled],
            lambda packed: model.embeddings(packed, pool).float().cpu()))
    z = F.normalize(z, dim=1) if model.config.normalize else z
    # sentence-transformers normalizes first, too, so a truncated embedding is shorter than 1.
    return z[:, :model.config.truncate_dim or None]


def encode(model, tokenizer, texts, affixes=None, max_length=None):
    """Embed N texts: (N, D) float32 on the CPU. affixes: the ids before and after a text, by
    default [CLS] and [SEP]; max_length: tokens of a text alone, as in training."""
    if isinstance(texts, str) or not (texts := list(texts)):
        raise BadInput(f"{shown(texts)!r} is no list of texts with at least one text")
    rows = tokenize_rows(tokenizer, texts, affixes, model.config.longest_row, max_length)
    return embed(model, rows)


# ---- generation


def generate(model, prompts, stop, max_new, tokens_per_batch=16384):
    """Continue R rows of ids greedily by at most max_new tokens. Return the new ids of each row, up
    to the stop token, and whether it came."""
    rows = [list(prompt) for prompt in prompts]
    limits = [min(len(row) + max_new, model.config.max_positions) for row in rows]
    batches = token_batches(limits, tokens_per_batch)
    # Without autograd's bookkeeping a step of one row takes 0.9 of the time.
    with in_eval_mode(model), torch.inference_mode():
        for batch in tqdm(batches, "generate", leave=False, disable=None):
            batch = [i for i in batch if len(rows[i]) < limits[i]]
            if batch:
                extend([rows[i] for i in batch], [limits[i] for i in batch], stop, model)
    answers = [row[len(prompt):] for row, prompt in zip(rows, prompts)]
    stopped = [stop in answer for answer in answers]
    return [answer[:len(answer) - ended] for answer, ended in zip(answers, stopped)], stopped


def extend(rows, limits, stop, model):
    """Append to rows, lists of ids, what the model continues them with: up to the stop token, or to
    a limit of each row's length."""
    device = next(model.parameters()).device
    packed = Packed.of(rows, causal=True).to(device)
    cache = model.new_cache(len(rows), max(limits))
    states = model(packed, cache=cache, at=model.pool_index(packed, "last"))  # (R, D)
    logits = model.logits(states)                                             # (R, V)
    while True:
        for row, token in zip(rows, logits.argmax(1).tolist()):
            row.append(token)
        unfinished = [i for i, (row, limit) in enumerate(zip(rows, limits))
                      if row[-1] != stop and len(row) < limit]
        if not unfinished:
            break
        if len(unfinished) < len(rows):
            rows = [rows[i] for i in unfinished]
            limits = [limits[i] for i in unfinished]
            cache = cache[:, unfinished]
        tokens = torch.tensor([row[-1] for row in rows], device=device)
        positions = torch.tensor([len(row) - 1 for row in rows], device=device)
        logits = model.decode(tokens, positions, cache)


# ---- a model and the rows on which it is evaluated


class NotApplicable(BadInput):
    """A task does not fit the model or the rows."""


class Misleading(NotApplicable):
    """A task would give a wrong number for these rows: a warning says so."""


class Answers(NamedTuple):
    prompts: list
    golds: list
    written: list
    stopped: list  # whether the model generated the stop token


class EncodedRows:
    """The rows of an evaluation as texts and as ids. They stay the same while a model trains.

    rows: corpora.EvaluationRows; config: the model's; affixes: (ids before, ids after) of a text in
    the first column, and in the others; max_length: tokens of a text, None for all that the model
    can read."""

    def __init__(self, rows, tokenizer, config, affixes=None, max_length=None):
        special = tokenizer.special
        (self.name, self.texts, self.system, self.hard, self.labelled, self.reordered,
         self.order_of) = rows
        self.tokenizer = tokenizer
        self.config = config
        self.affixes = affixes or ((special.before, special.after),) * 2
        self.max_length = max_length
        self.count = len(next(iter(self.texts.values())))  # N
        if self.count < 2:
            raise BadInput(f"{self.name} has {self.count} rows to evaluate, and at least 2 are "
                           "needed: choose a larger limit, or other data")

    @property
    def label(self):
        """Name the rows, with a hash of their texts, because two files can have one name."""
        columns = ", ".join(self.texts)
        return f"{self.count} rows of {self.name} ({columns}), {digest(self.texts)[:8]}"

    def openings(self):
        """Return the ids of each row's system text, which opens a chat; None without them."""
        chat = self.tokenizer.special.chat
        return self.system and [
            [*chat.start, *chat.system, *ids[:self.max_length].tolist(), *chat.end]
            for ids in self.tokenizer.encode(self.system)]

    def encode(self, texts, column=0, openings=None):
        """Tokenize N texts like those of a column: N rows of ids that fit into the model."""
        return tokenize_rows(self.tokenizer, texts, self.affixes[min(column, 1)],
                             self.config.longest_row, self.max_length, openings)

    def encode_prompts(self, prompts, longest):
        """Tokenize prompts as [CLS] prompt [SEP], or by the chat template of the model's family."""
        chat = self.tokenizer.special.chat
        affixes = (*chat.start, *chat.user), (*chat.end, *chat.assistant)
        return tokenize_rows(self.tokenizer, prompts, affixes, longest, openings=self.openings())

    @functools.cached_property
    def ids(self):
        """{column: N rows of ids}."""
        openings = self.openings()
        return {name: self.encode(texts, column, openings)
                for column, (name, texts) in enumerate(self.texts.items())}


@dataclass
class Evaluation:
    """What a model makes of some rows: embeddings and answers, each computed once."""
    model: torch.nn.Module
    rows: EncodedRows
    views: int = 2  # texts of a training example
    pool: str | None = None  # None: the model's
    answer_limit: int | None = 200  # number of rows that are answered

    def __post_init__(self):
        self.pool = self.pool or self.model.config.pool

    @property
    def texts(self):
        """{column: N texts}."""
        return self.rows.texts

    @functools.cached_property
    def embeddings(self):
        """{column: (N, D)}, NaN for a text that a row lacks."""
        ids = sum(self.rows.ids.values(), [])
        has_text = torch.tensor([bool(text) for texts in self.rows.texts.values()
                                 for text in texts])
        found = embed(self.model, list(itertools.compress(ids, has_text)), self.pool)
        z = found.new_full((len(ids), found.shape[1]), math.nan)  # (columns * N, D)
        z[has_text] = found
        return dict(zip(self.rows.texts, z.split(self.rows.count)))

    @functools.cached_property
    def reordered(self):
        """(M, D), the embeddings of rows.reordered; None without these."""
        ids = self.rows.encode([text for text, _, _ in self.rows.reordered])
        return embed(self.model, ids, self.pool) if ids else None

    @property
    def can_answer(self):
        return self.model.config.causal and len(self.rows.texts) == 2

    @functools.cached_property
    def answers(self):
        """Answers of a causal model to the first prompts, up to the stop token."""
        need_answers(self, "this task")
        tokenizer = self.rows.tokenizer
        prompts, golds = (texts[:self.answer_limit] for texts in self.rows.texts.values())
        max_new = 2 * max(map(len, tokenizer.encode(golds))) + 8
        # Truncate prompts that would leave no room for the answer.
        longest = self.model.config.max_positions
        ids = self.rows.encode_prompts(prompts, max(longest // 2, longest - max_new))
        written, stopped = generate(self.model, ids, tokenizer.special.sep, max_new)
        return Answers(prompts, golds, list(map(tokenizer.decode, written)), stopped)


# ---- tasks: Evaluation -> {"metric" or "metric/detail": number}


def need_answers(evaluation, task):
    if not evaluation.can_answer:
        raise NotApplicable(f"{task} needs a causal model (objective ntp or llm-jepa) and two "
                            "columns, prompt and answer: choose them with --langs a,b")


def need_translations(evaluation, task):
    if len(evaluation.texts) < 2:
        raise NotApplicable(f"{task} needs translations, and {evaluation.rows.name} has one text "
                            "per row")


def task_retrieval(evaluation):
    """Search the translations of every language in the first."""
    need_translations(evaluation, "retrieval")
    rows = evaluation.rows

    hard = rows.encode([text for text, _, _ in rows.hard])
    return {"rows": rows.count} | retrieval(
        evaluation.embeddings, rows.texts,
        embed(evaluation.model, hard, evaluation.pool) if hard else None, rows.hard,
        evaluation.reordered, rows.reordered, rows.order_of)


def task_geometry(evaluation):
    return {"rows": evaluation.rows.count} | geometry(evaluation.embeddings)


def task_probe(evaluation):
    """Train a linear probe for each property on sentences of the training split, and test it on
    sentences of the split that is evaluated."""
    if not evaluation.rows.labelled:
        raise NotApplicable(f"probe needs labels, and {evaluation.rows.name} has none: use --data "
                            "toy")
    (texts, properties), (queries, golds) = evaluation.rows.labelled
    if texts[0] == queries[0]:  # both are the first of --split train
        raise Misleading("no probe: it is trained on --split train, so choose another --split")
    rows = evaluation.rows.encode(texts + queries)
    z, z_queries = embed(evaluation.model, rows, evaluation.pool).split([len(texts), len(queries)])
    accuracy = {}
    majority = []  # accuracy of always predicting the most frequent class
    for name, gold in golds.items():
        accuracy[name] = linear_probe(z, properties[name], z_queries, gold)
        majority.append(100 * max(map(gold.count, gold)) / len(gold))
    return {"rows": len(queries), "mean": mean(accuracy.values()), "majority": mean(majority),
            **accuracy}


def task_generate(evaluation):
    """Compare greedy answers with the gold text."""
    answers = evaluation.answers
    pairs = list(zip(answers.written, answers.golds))
    return {"rows": len(pairs), "exact": percent([exact(*pair) for pair in pairs]),
            "startswith": percent([starts_with(*pair) for pair in pairs]),
            "stop": percent(answers.stopped)}


TASKS = {"retrieval": task_retrieval, "geometry": task_geometry, "probe": task_probe,
         "generate": task_generate}


def run(evaluation, names=None, tasks=TASKS):
    """Run tasks by name, or by default all that apply. Return {"task/metric": number}."""
    for name in names or ():
        if name not in tasks:
            near = did_you_mean(name, tasks, "; python -m tasks --tasks list")
            raise BadInput(f"there is no task {shown(name)!r} among {', '.join(tasks)}{near}")
    results = {}
    for name in names or tasks:
        # By default these run only for objectives that are trained on pairs.
        if not names and name in ("retrieval", "generate") and evaluation.views < 2:
            continue
        try:
            scores = tasks[name](evaluation)
        except NotApplicable as error:
            if names:
                raise
            if isinstance(error, Misleading):
                warn(error)
            continue
        results |= {f"{name}/{metric}": value for metric, value in scores.items()}
    return results


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
                and not evaluation.model.config.causal)


def confused_twin(evaluation):
    """Return the number in rows.reordered of the first twin that the model takes for the
    translation of its sentence, among those that the order error counts. 0 if there is none."""
    if not has_twins(evaluation):
        return 0
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
    """Return lines with the first row, whose middle token is masked, and the token that an
    objective with a vocabulary head predicts there."""
    tokenizer = rows.tokenizer
    ids = list(next(iter(rows.ids.values()))[0])
    middle = len(ids) // 2
    gold, ids[middle] = ids[middle], tokenizer.special.mask
    device = next(objective.parameters()).device
    packed = Packed.of([ids]).to(device)
    with in_eval_mode(objective):
        states = objective.model(packed, at=torch.tensor([middle], device=device))  # (1, D)
        found = objective.most_likely(states).item()
    around = ids[max(0, middle - 12):middle], [found], [gold], ids[middle + 1:middle + 13]
    before, said, right, after = (shown(tokenizer.decode(part).strip()) for part in around)
    if found == gold:
        return [f"      = {before} [{said}] {after}"]
    return [f"      ! {before} [{said}] {after}", f"        instead of [{right}]"]


# ---- the table

# The numbers that people read, the most important ones first: {metric: (name, remark)}.
METRICS = {
    "generate/exact": ("exact match, %", "higher is better"),
    "generate/startswith": ("answers that begin with the gold text, %", "higher is better"),
    "generate/stop": ("answers that end with the stop token, %", ""),
    "retrieval/xsim": ("wrong translation (xsim), %", "lower is better"),
    "retrieval/xsim++": ("... among hard negatives (xsim++), %", "lower is better"),
    "retrieval/order": ("order error, %", "chance: 50; lower is better"),
    "probe/mean": ("linear probe, %", "no goal: random weights do as well"),
    "geometry/rankme": ("effective rank (RankMe)", "dimensions in use; collapse: 1"),
    "geometry/cosine/same": ("cosine of unrelated sentences", "collapse: 1"),
    "geometry/cosine/translations": ("cosine of translations", ""),
    "validation/loss": ("loss on held-out rows", "without dropout"),
    "geometry/rankme_share": ("effective rank, % of the largest possible", "higher is better"),
    "geometry/uniformity": ("uniformity", "0: one point; about -4: a sphere"),
    "geometry/std": ("standard deviation of a dimension", "0: one point; 1: healthy"),
    "geometry/norm": ("mean L2 norm", "before normalization"),
    "geometry/cosine/different": ("cosine of unrelated sentences of two languages", ""),
    "probe/majority": ("accuracy of always the most frequent class, %", ""),
}


def table(results):
    """Format the results that METRICS explains as aligned lines, or some if it explains none."""
    names = [name for name in results if name in METRICS] or list(results)[:20]
    width = max(map(len, names))
    lines = []
    for name in names:
        about = METRICS.get(name, ("", ""))
        value = number_text(results[name], 2 if "%" in about[0] else 4)
        lines.append(f"{name:{width}} {value:>9} {'; '.join(filter(None, about))}".rstrip())
    if len(names) < len(results):
        lines.append(f"and {len(results) - len(names)} more numbers: evaluate.py RUN --json")
    return "\n".join(lines)


def number_text(value, digits):
    """Return a float with some digits, a whole number as it is, and "-" for None."""
    if isinstance(value, float):
        return f"{value:.{digits}f}"
    return "-" if value is None else str(value)


def summary(results, before, start="untrained"):
    """Format the eight most important results of a run, and those before its first step in a column
    with the title `start`."""
    names = [name for name in METRICS if name in results][:8]
    width = max(len(METRICS[name][0]) for name in names) + 2
    lines = [f"{'':{width}} {start:>9} {'trained':>9}"]
    for name in names:
        title, remark = METRICS[name]
        first, last = (number_text(one.get(name), 2) for one in (before, results))
        lines.append(f"{title:{width}} {first:>9} {last:>9}   {remark}".rstrip())
    return "\n".join(lines)


def verdict(results):
    """Return in some words whether the encoder that has these results of `run` collapses."""
    scores = {name.removeprefix("geometry/"): value for name, value in results.items()}
    unrelated = scores["cosine/same"]
    low_rank = scores["rankme_share"] < 5 or scores["rankme"] < 2
    # Neither sign is enough: a pretrained BERT has a random cosine of 0.99 and can be trained
    # [BERT-JEPA, table 4], and embeddings on a line through 0 have one of 0.
    if low_rank and unrelated > 0.9:
        return "COLLAPSING"
    if unrelated > 0.5:
        return "half-collapsed (all embeddings share one direction)"
    if low_rank:
        return "half-collapsed (low effective rank)"
    # By default, an objective that never sees translations is evaluated without retrieval.
    if "retrieval/xsim" in results and scores["cosine/translations"] <= scores["cosine/different"]:
        return "not aligned (translations are less similar than unrelated sentences)"
    return "ok"


# The columns of a run's evaluations: {metric: (title, digits)}.
PROGRESS = {"validation/loss": ("held-out loss", 3), "generate/exact": ("exact match, %", 1),
            "retrieval/xsim": ("wrong translation, %", 1), "retrieval/order": ("order error, %", 1),
            "geometry/rankme": ("RankMe", 1), "geometry/cosine/same": ("cos(rand)", 2)}


def heading(results):
    """Return the heads of the columns of `headline`."""
    return "  ".join(["   step", *(title for name, (title, _) in PROGRESS.items()
                                   if name in results), "verdict"])


def headline(results, step, start="untrained"):
    """Format an evaluation during training as one line of a table with the head `heading`."""
    cells = [f"{results[name]:{len(title)}.{digits}f}" for name, (title, digits) in PROGRESS.items()
             if name in results]
    # Random weights look collapsed, which says nothing about the training.
    words = verdict(results).partition(" (")[0] if step else start
    return "  ".join([f"{step:>7}", *cells, words])


# ---- the rows of a run


def evaluation_of(opened, data="", langs=(), split="", limit=None, pool=None, complete=False):
    """Return the Evaluation of a RunFolder, by default on its own test rows. `complete`: without
    rows that lack a text."""
    rows = rows_of(opened, data, langs, split, limit)
    rows = encoded(opened, rows.complete() if complete else rows)
    return Evaluation(opened.model, rows, opened.first["views"], pool, answer_limit=None)


def encoded(opened, rows):
    """Return corpora.EvaluationRows as EncodedRows, tokenized as in the training of a RunFolder."""
    return EncodedRows(rows, opened.tokenizer, opened.model.config, opened.first["affixes"],
                       opened.config.get("max_length"))


def rows_of(opened, data, langs, split, limit):
    """Return the corpora.EvaluationRows that a user chose for a RunFolder: by default its own."""
    config = opened.config
    own = config.get("eval_data") or config["data"]
    data = data or own
    if not data:
        raise BadInput(f"{opened.folder} has no data of its own: choose some with --data")
    if data == own:
        langs = langs or comma_list(config.get("langs", ""))
    # Without --eval-data, the run held rows out.
    has_held_out = data == config["data"]
    split = split or ("test" if has_held_out else "all")
    if limit is None:
        limit = 0 if os.path.isdir(os.path.expanduser(data)) else 1000

    source = corpora.open_text(data, langs, limit or 20_000, opened.first.get("columns", ()))
    # A run that was trained with system texts can also be evaluated without them.
    system = config.get("chat") == "system" and "system" in source.columns
    rows = corpora.evaluation_rows(source, langs, split, limit, system)
    if not (source.embedded and has_held_out):  # the splits of these share no row
        runs.warn_of_overlap(share_a_text(rows.hashes(), runs.read_trained(opened)), rows.name)
    return rows


# ---- command line


def row_limit(text):
    """Return the number of --limit."""
    if int(text) < 0:
        raise BadInput(f"{text}: it must be at least 0")
    return int(text)


def make_parser(prog, description, tasks):
    """Return the Parser of a program that evaluates a run."""
    parser = Parser(prog, description=description)
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a run, such as out/mexma; its eval.json keeps the "
        "numbers, unless --data, --langs, --split, --limit or --pool is given")
    add("--tasks", type=comma_list, help=f"comma-separated, some of {', '.join(tasks)}")
    add("--data", help="rows to evaluate: toy, documents, regex, a file, or a folder of files "
        "CODE.devtest [the run's own data]")
    add("--langs", type=comma_list, help="columns to use, e.g. en,de; retrieval searches the first "
        "column for the translation of each text of the others")
    add("--split", choices=("train", "valid", "test", "all"), help="which split to evaluate; valid "
        "and test are the same rows of a file [test for the run's own data, all for other files]")
    add("--limit", type=row_limit, help="maximum number of rows; 0: all [1000; all of a folder]")
    add("--pool", choices=POOLS, help="pooling [the model's]")
    add("--device", help="cpu, cuda, cuda:1 or mps [a GPU if there is one]")
    add("--json", action="store_true", help="print every number, as one JSON object")
    return parser


def keep_results(options, opened, results, label):
    """Write the results to the run's eval.json, if no flag chose other rows or another pooling.
    Warn if that is impossible, or if the run has another model by now."""
    chosen = options.data, options.langs, options.split, options.limit, options.pool
    if any(value not in (None, "", []) for value in chosen):  # --limit 0 chooses all rows
        return
    try:
        if file_hash(opened.folder / "model.pt") != opened.model_hash:
            raise BadInput(f"{opened.folder} was trained further: evaluate it again")
        runs.write_results(opened.folder / "eval.json", results, label, opened.model_hash)
    except (BadInput, OSError) as error:
        warn(f"the numbers are not kept in eval.json: {error}")


def main(argv):
    parser = make_parser("evaluate.py", "Evaluate a run, by default on all tasks that apply. "
                         "python -m tasks has more tasks.", TASKS)
    options = parser.parse_args(argv)
    opened = open_run(options.run, usable_device(options.device))
    evaluation = evaluation_of(opened, options.data, options.langs, options.split, options.limit,
                               options.pool)
    results = run(evaluation, options.tasks)
    if options.json:
        lines = [json.dumps(results)]
    else:
        lines = [shown(evaluation.rows.label), table(results)]
        if not options.tasks:
            lines += examples(evaluation)
        if "geometry/rankme" in results:
            lines.append(f"health: {verdict(results)}")
    print(*lines, sep="\n", flush=True)
    keep_results(options, opened, results, evaluation.rows.label)


if __name__ == "__main__":
    run_program(main)
