"""The rows that a run trains on and is evaluated on."""

import functools
import os
from typing import NamedTuple

import corpora
from base.common import BadInput, comma_list, shown
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
    if views > 2 or not source.embedded:
        from corpora.columns import check_views  # here, because built-in pairs need no names
        check_views(source, settings.langs, views, objective_class)
    try:
        return read_rows(source, settings, objective_class, options, tokenizer, rank, world)
    except BadInput as error:  # a note can explain it, and none is printed yet
        raise BadInput("; ".join([str(error), *source.notes])) from None


def read_rows(source, settings, objective_class, options, tokenizer, rank, world):
    """Return the Data of a run on the rows of `source`."""
    eval_source = source
    views = objective_class.num_views(options)
    columns = source.columns[:source.num_text_columns]
    if settings.eval_data:
        eval_source = corpora.open_text(  # it may lack the negatives
            settings.eval_data, settings.langs, like=columns[:2] if views > 2 else columns,
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
    if views > 2 and (left := (langs or ())[2:]):
        runs.warn(f"not evaluated: {', '.join(left)}; the evaluations of this run read two texts")
    source = corpora.open_text(data, langs, limit or 20_000, opened.header.get("columns", ()),
                               views)
    # A run that was trained with system texts can also be evaluated without them.
    system = config.get("chat") == "system" and "system" in source.columns
    rows = corpora.evaluation_rows(source, langs, split, limit, system, views)
    if not (source.embedded and data == config["data"]):  # the splits of these share no row
        runs.warn_of_overlap(share_a_text(rows.hashes(), runs.read_trained(opened)), rows.name)
    return rows
