"""Evaluate a trained model: sentence embeddings, retrieval across languages, geometry, generation.

    python evaluate.py out/x                       # all tasks that apply, on the run's test rows
    python evaluate.py out/x --data pairs.tsv --langs en,de --tasks retrieval
    python evaluate.py out/x --json > numbers.json   # every number, not only those of the table

Numbers are named task/metric or task/metric/detail. N and M are rows, D the embedding width.
"""

import functools
import json
import math
import sys
from dataclasses import dataclass
from typing import NamedTuple

if __name__ == "__main__":  # the first import of PyTorch can take half a minute
    print("loading PyTorch ...", file=sys.stderr)

import torch
import torch.nn.functional as F
from tqdm import tqdm

from base.common import (
    BadInput,
    Parser,
    comma_list,
    did_you_mean,
    digest,
    run_program,
    shown,
    usable_device,
    warn,
    warn_once,
)
from base.metrics import (
    exact,
    geometry,
    linear_probe,
    majority,
    mean,
    percent,
    retrieval,
    starts_with,
    verdict,
)
from base.tokenizer import tokenize_rows
from data import Packed, token_batches
from harness import runs, screen
from harness.rows import rows_of
from model import POOLS, in_eval_mode

# ---- embeddings


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


def list_of(texts):
    """Return some texts as a list. Raises BadInput for a single text, and for none."""
    if isinstance(texts, str) or not (texts := list(texts)):
        raise BadInput(f"{shown(texts)!r} is no list of texts with at least one text")
    return texts


def encode(model, tokenizer, texts, affixes=None, max_length=None):
    """Embed N texts: (N, D) float32 on the CPU. affixes: the ids before and after a text, by
    default [CLS] and [SEP]; max_length: tokens of a text alone, as in training."""
    rows = tokenize_rows(tokenizer, list_of(texts), affixes, model.config.longest_row, max_length)
    return embed(model, rows)


# ---- a model and the rows on which it is evaluated


class NotApplicable(BadInput):
    """A task does not fit the model or the rows."""


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
        self.name = rows.name
        self.texts = rows.texts
        self.system = rows.system
        self.hard = rows.hard
        self.labelled = rows.labelled
        self.reordered = rows.reordered
        self.order_of = rows.order_of
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
        if not self.system:
            return None
        turns = self.tokenizer.encode(self.system)
        if cut := sum(len(ids) > (self.max_length or math.inf) for ids in turns):
            warn_once(f"{cut} of {len(turns)} system texts of {self.name} are longer than "
                      f"{self.max_length} tokens and were truncated")
        return [[*chat.start, *chat.system, *ids[:self.max_length].tolist(), *chat.end]
                if len(ids) else [*chat.start] for ids in turns]

    def encode(self, texts, column=0, openings=None):
        """Tokenize N texts like those of a column: N rows of ids that fit into the model."""
        return tokenize_rows(self.tokenizer, texts, self.affixes[min(column, 1)],
                             self.config.longest_row, self.max_length, openings)

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
    skip: tuple = ()  # of "probe" and "xsim++", which are slow

    def __post_init__(self):
        self.pool = self.pool or self.model.config.pool

    @property
    def texts(self):
        """{column: N texts}."""
        return self.rows.texts

    @functools.cached_property
    def embeddings(self):
        """{column: (N, D)}, NaN for a text that a row lacks."""
        cells = [(column, row) for column, texts in self.texts.items()
                 for row, text in enumerate(texts) if text]
        # In one call, because the last bits of an embedding depend on the rows of its batch.
        found = embed(self.model, [self.rows.ids[column][row] for column, row in cells], self.pool)
        missing = found.new_full((self.rows.count, found.shape[1]), math.nan)
        embeddings = {column: missing.clone() for column in self.texts}
        for (column, row), z in zip(cells, found):
            embeddings[column][row] = z
        return embeddings

    @functools.cached_property
    def reordered(self):
        """(M, D), the embeddings of rows.reordered; None without these."""
        ids = self.rows.encode([text for text, _, _ in self.rows.reordered])
        return embed(self.model, ids, self.pool) if ids else None

    @property
    def can_answer(self):
        return self.model.config.is_decoder and len(self.rows.texts) == 2

    @functools.cached_property
    def answers(self):
        """Answers of a causal model to the first prompts, up to the stop token."""
        need_answers(self, "this task")
        from harness.generation import answer  # here, because only decoders answer
        tokenizer = self.rows.tokenizer
        prompts, golds = (texts[:self.answer_limit] for texts in self.rows.texts.values())
        max_new = 2 * max(map(len, tokenizer.encode(golds))) + 8
        written, stopped = answer(self.model, tokenizer, prompts, max_new, self.rows.openings())
        return Answers(prompts, golds, written, stopped)


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
    hard = () if "xsim++" in evaluation.skip else rows.hard

    ids = rows.encode([text for text, _, _ in hard])
    return {"rows": rows.count} | retrieval(
        evaluation.embeddings, rows.texts,
        embed(evaluation.model, ids, evaluation.pool) if ids else None, hard,
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
        raise NotApplicable("probe is trained on --split train: choose another --split")
    rows = evaluation.rows.encode(texts + queries)
    z, z_queries = embed(evaluation.model, rows, evaluation.pool).split([len(texts), len(queries)])
    accuracy = {name: linear_probe(z, properties[name], z_queries, gold)
                for name, gold in golds.items()}
    return {"rows": len(queries), "mean": mean(accuracy.values()),
            "majority": mean([*map(majority, golds.values())]), **accuracy}


def task_generate(evaluation):
    """Compare greedy answers with the gold text."""
    answers = evaluation.answers
    pairs = list(zip(answers.written, answers.golds))
    return {"rows": len(pairs), "exact": percent([exact(*pair) for pair in pairs]),
            "startswith": percent([starts_with(*pair) for pair in pairs]),
            "stop": percent(answers.stopped)}


# A task returns numbers by name. Those that people read have a line in METRICS, harness/screen.py.
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
        # By default these run only for objectives that are trained on pairs, and a decoder, which
        # learns to answer, searches no translations.
        if not names and name in ("retrieval", "generate") and evaluation.views < 2:
            continue
        if not names and name == "retrieval" and evaluation.can_answer:
            continue
        if not names and name in evaluation.skip:
            continue
        try:
            scores = tasks[name](evaluation)
        except NotApplicable:
            if names:
                raise
            continue
        results |= {f"{name}/{metric}": value for metric, value in scores.items()}
    return results


# ---- the rows of a run


def evaluation_of(opened, data="", langs=(), split="", limit=None, pool=None, complete=False):
    """Return the Evaluation of a RunFolder, by default on its own test rows. `complete`: without
    rows that lack a text."""
    rows = rows_of(opened, data, langs, split, limit)
    if complete and (whole := rows.complete()) is not rows:
        warn(f"only the {len(whole.hashes()):,} of {len(rows.hashes()):,} rows of {rows.name} that "
             "have all texts are evaluated")
        rows = whole
    return Evaluation(opened.model, encoded(opened, rows), opened.header["views"], pool,
                      answer_limit=None)


def encoded(opened, rows):
    """Return corpora.EvaluationRows as EncodedRows, tokenized as in the training of a RunFolder."""
    return EncodedRows(rows, opened.tokenizer, opened.model.config, opened.header["affixes"],
                       opened.config.get("max_length"))


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
    add("--device", help="cpu, cuda, cuda:1 or mps [a CUDA GPU if there is one]")
    add("--json", action="store_true", help="print every number, as one JSON object")
    return parser


def main(argv):
    parser = make_parser("evaluate.py", "Evaluate a run, by default on all tasks that apply. "
                         "python -m tasks has more tasks.", TASKS)
    options = parser.parse_args(argv)
    opened = runs.open_run(options.run, usable_device(options.device))
    evaluation = evaluation_of(opened, options.data, options.langs, options.split, options.limit,
                               options.pool)
    if evaluation.can_answer and "imported" in opened.header and not options.tasks:
        warn("the decoder answers each prompt, which takes long: --tasks retrieval,geometry "
             "measures its embeddings instead")
    results = run(evaluation, options.tasks)
    if options.json:
        lines = [json.dumps(results)]
    else:
        lines = [shown(evaluation.rows.label), screen.table(results)]
        if not options.tasks:
            lines += screen.examples(evaluation)
        if "geometry/rankme" in results:
            lines.append(f"health: {verdict(results)}")
    print(*lines, sep="\n", flush=True)
    runs.keep_results(options, opened, results, evaluation.rows.label)


if __name__ == "__main__":
    run_program(main)
