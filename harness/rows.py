"""The rows that a run trains on and is evaluated on."""

import functools
from typing import NamedTuple

import corpora
from base.common import BadInput
from base.tokenizer import Tokenizer
from data import Batches, Corpus, open_corpus


class Data(NamedTuple):
    """The rows of a run, and its tokenizer."""
    source: object  # --data: a corpora.EmbeddedText, or a corpora.files.TextFiles
    eval_source: object  # --eval-data, or the same
    columns: tuple  # of texts, which all files have
    tokenizer: Tokenizer
    affixes: tuple  # (ids before, ids after) the first view, and the others
    corpus: Corpus  # the rows to train on
    batches: Batches
    held_out: Corpus
    validation: Batches | None
    notes: list  # for the user


def open_data(settings, objective_class, options, tokenizer=None, rank=0, world=1):
    """Return the Data that the settings name. Without a tokenizer, one is trained."""
    source = corpora.open_text(settings.data, settings.langs)
    try:
        return read_rows(source, settings, objective_class, options, tokenizer, rank, world)
    except BadInput as error:  # a note can explain it, and none is printed yet
        raise BadInput("; ".join([str(error), *source.notes])) from None


def read_rows(source, settings, objective_class, options, tokenizer, rank, world):
    """Return the Data of a run on the rows of `source`."""
    eval_source = source
    columns = source.columns[:source.num_text_columns]
    if settings.eval_data:
        eval_source = corpora.open_text(settings.eval_data, settings.langs, like=columns)
    open_rows = functools.partial(open_corpus, langs=settings.langs, vocab=settings.vocab,
                                  holdout=not settings.eval_data, block=settings.block)
    corpus = open_rows(source, tokenizer, split="train")
    make_batches = functools.partial(
        Batches, views=objective_class.views, rank=rank, world=world,
        uses_in_batch_negatives=objective_class.uses_in_batch_negatives(options),
        max_length=settings.max_length, pairs=settings.pairs, system=settings.chat == "system")
    batches = make_batches(corpus, batch=settings.batch, seed=settings.seed)
    held_out = open_rows(eval_source, corpus.tokenizer, split="valid")
    if held_out.hash == corpus.hash:
        raise BadInput(f"--eval-data {settings.eval_data} has the same rows as --data: leave it "
                       "out, and rows will be held out")
    size = min(settings.batch // settings.accumulate, max(1, len(held_out) // world))
    validation, notes = None, source.notes
    try:
        validation = make_batches(held_out, batch=size, seed=0)
    except BadInput as error:  # for example, too few distinct rows for in-batch negatives
        notes = [f"no validation loss can be computed: {error}", *notes]
    affixes = objective_class.affixes(options, corpus.tokenizer.special)
    return Data(source, eval_source, columns, corpus.tokenizer, affixes, corpus, batches, held_out,
                validation, notes)
