"""The rows that a run trains on and is evaluated on."""

import functools
import os
from typing import NamedTuple

import corpora
from base.common import BadInput, comma_list, shown
from base.processes import Everywhere
from base.tokenizer import Tokenizer
from corpora.overlap import share_a_text
from data import Batches, Corpus, open_corpus
from harness import runs


class Data(NamedTuple):
    """The rows of a run, and its tokenizer."""
    source: object  # --data: a corpora.EmbeddedText, or a corpora.files.TextFiles
    eval_source: object  # --eval-data, or the same
    columns: tuple  # of texts, which all files have
    tokenizer: Tokenizer
    affixes: tuple  # (ids before, ids after) the first view, and the others
    views: int  # texts of an example
    corpus: Corpus  # the rows to train on
    batches: Batches
    held_out: Corpus
    validation: Batches | None
    notes: list  # for the user


def open_data(settings, objective_class, options, tokenizer=None, rank=0, world=1):
    """Return the Data that the settings name. Without a tokenizer, one is trained."""
    views = objective_class.num_views(options)
    source = corpora.open_text(settings.data, settings.langs, views=views)
    check_columns(source, settings.langs, objective_class, views)
    try:
        return read_rows(source, settings, objective_class, options, tokenizer, rank, world)
    except Everywhere:  # a mistake of another process, which all know
        raise
    except BadInput as error:  # a note can explain it, and none is printed yet
        raise BadInput("; ".join([str(error), *source.notes])) from None


def check_columns(source, langs, objective_class, views):
    """Raise BadInput for a column that is none of an example's texts, by its name."""
    if source.embedded and views < 3:
        return
    from corpora.columns import HARD, SCORES, no_view  # here, because built-in data needs no names
    columns = source.columns[:source.num_text_columns]
    name = objective_class.name
    for number, column in enumerate(columns):
        why = no_view(column) if views > 1 else ""
        follows_pair = why == HARD and views > 2 and number > 1
        is_answer = why == SCORES and objective_class.causal  # a decoder can write a label
        if why and not follows_pair and not is_answer:
            raise BadInput(f"--langs {shown(langs)}: {shown(column)} has {why}. {name} would read "
                           "it as one more text with the same meaning: leave it out")
    listed = shown(", ".join(columns))
    if len(columns) > views > 2:
        raise BadInput(f"--langs {shown(langs)}: {name} reads {views} columns, not {len(columns)}: "
                       "leave some out")
    are_negatives = all(no_view(column) == HARD for column in columns[2:])
    if objective_class.hard_negatives and not langs and not are_negatives:
        raise BadInput(f"{source.name} has no hard negatives among the columns {listed}: name "
                       "them negative, hard_neg or rejected, with any ending, or choose with "
                       "--langs")


def read_rows(source, settings, objective_class, options, tokenizer, rank, world):
    """Return the Data of a run on the rows of `source`."""
    eval_source = source
    views = objective_class.num_views(options)
    columns = source.columns[:source.num_text_columns]
    if settings.eval_data:
        eval_source = corpora.open_text(settings.eval_data, settings.langs, like=columns,
                                        views=views)
    open_rows = functools.partial(open_corpus, langs=settings.langs, vocab=settings.vocab,
                                  holdout=not settings.eval_data, block=settings.block)
    corpus = open_rows(source, tokenizer, split="train")
    lacking = 0  # rows
    if corpus.num_text_columns >= views > 2:
        lacking, corpus = len(corpus), corpus.complete(views)
        lacking -= len(corpus)
    make_batches = functools.partial(
        Batches, views=views, rank=rank, world=world,
        uses_in_batch_negatives=objective_class.uses_in_batch_negatives(options),
        max_length=settings.max_length, pairs=settings.pairs, system=settings.chat == "system")
    batches = make_batches(corpus, batch=settings.batch, seed=settings.seed)
    held_out = open_rows(eval_source, corpus.tokenizer, split="valid")
    if held_out.hash == corpus.hash:
        raise BadInput(f"--eval-data {settings.eval_data} has the same rows as --data: leave it "
                       "out, and rows will be held out")
    validation, notes = None, source.notes
    if lacking:
        notes = [*notes, f"{corpus.name}: {lacking:,} rows are not trained on: they lack one of "
                 f"{shown(', '.join(columns))}"]
    try:
        held_out = held_out.complete(views) if views > 2 else held_out
        size = min(settings.batch // settings.accumulate, max(1, len(held_out) // world))
        validation = make_batches(held_out, batch=size, seed=0)
    except BadInput as error:  # for example, too few distinct rows for in-batch negatives
        notes = [f"no validation loss can be computed: {error}", *notes]
    affixes = objective_class.affixes(options, corpus.tokenizer.special)
    return Data(source, eval_source, columns, corpus.tokenizer, affixes, views, corpus, batches,
                held_out, validation, notes)


def rows_of(opened, data, langs, split, limit):
    """Return the corpora.EvaluationRows that a user chose for a RunFolder: by default its own. Warn
    if the model was trained on some of them."""
    config, views = opened.config, opened.header["views"]
    own = config.get("eval_data") or config["data"]
    data = data or own
    if not data:
        raise BadInput(f"{opened.folder} has no data of its own: choose some with --data")
    if data == own:
        langs = langs or comma_list(config.get("langs", ""))
    if not split:  # without --eval-data, the run held rows of --data out
        split = "test" if data == config["data"] else "all"
    if limit is None:
        limit = 0 if os.path.isdir(os.path.expanduser(data)) else 1000
    source = corpora.open_text(data, langs, limit or 20_000, opened.header.get("columns", ()),
                               views)
    # A run that was trained with system texts can also be evaluated without them.
    system = config.get("chat") == "system" and "system" in source.columns
    rows = corpora.evaluation_rows(source, langs, split, limit, system, views)
    if not (source.embedded and data == config["data"]):  # the splits of these share no row
        runs.warn_of_overlap(share_a_text(rows.hashes(), runs.read_trained(opened)), rows.name)
    return rows
