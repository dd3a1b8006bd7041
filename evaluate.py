"""What a trained model is worth: sentence vectors, retrieval across languages, the geometry of the vectors, written answers.

    python evaluate.py out/x                                # everything that applies, on the run's own test rows
    python evaluate.py out/x --data pairs.tsv --langs en,de --tasks retrieval --json
    python evaluate.py out/x --data flores200_dataset/devtest --tasks retrieval,matrix      # all languages of a folder
    python evaluate.py out/y --tasks generate               # of a causal model: does it write the second column, given the first?
    python evaluate.py out/y --tasks generate,regex         # and does that denote the same language?
    python evaluate.py out/x --tasks gap,tokens,attention --sets sst2,stsb        # what the papers look at: probes, nearest tokens, attention
    python evaluate.py compare out/x-82 out/x-23 out/y-82 out/y-23      # runs against each other, over their seeds

First `embed` and `generate`; then the tasks (scores.py says which answers are right), whose numbers are named `task/metric` or
`task/metric/detail`; then the command line. Error rates, accuracies and shares are percentages.
"""
import argparse
import collections
import contextlib
import copy
import functools
import importlib
import json
import os
import re
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tqdm import tqdm

import data
import grammar
import metrics
import probes
import scores
import tasks
from data import BadInput
from metrics import bucc_f1, bucc_mine, diagnose, geometry, mine, top1, xsim_all, xsim_matrix, xsim_plus
from model import Model, Packed, attention_weights, load, mixed

# ---------------------------------------------------------------------------------------------------------------------
# Embedding and generating


@contextlib.contextmanager
def in_eval_mode(model):
    """Without dropout and gradients; afterwards each module is in the mode it was in: a frozen part may have been in eval mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def batches(lengths, tokens):
    """Rows of these lengths in batches of at most `tokens` tokens (a longer row alone) -> lists of row numbers, the longest rows
    first, so that memory runs out at once or never."""
    made, room = [], 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] > room:
            made.append([])
            room = max(tokens, lengths[i])
        made[-1].append(i)
        room -= lengths[i]
    return made


def rows_of(tokenizer, texts, headers=None, frame=None, longest=None, header=None):
    """Rows of ids [CLS] text [SEP], or [CLS] header [SEP] text [SEP] with the texts that open a chat, at most `header` tokens of each.
    `frame`: other ids to stand before and behind the text than none and [SEP]. Texts whose row is longer than `longest` are cut, and
    counted on stderr."""
    mark, ids = data.special(tokenizer), data.encode(tokenizer, list(texts))
    front, back = frame or ((), (mark.sep,))
    heads = [[mark.cls]] * len(ids)
    if headers is not None:
        heads = [[mark.cls, *mark.chat.system, *head[:header].tolist(), *mark.chat.end] for head in data.encode(tokenizer, list(headers))]
    rows = [[*head, *front, *text.tolist(), *back] for head, text in zip(heads, ids)]
    if cut := sum(len(row) > longest for row in rows) if longest else 0:
        print(f"warning: {cut} of {len(rows)} texts are longer than {longest} tokens and were cut", file=sys.stderr)
        rows = [row if len(row) <= longest else [*row[:longest - len(back)], *back] for row in rows]
    return rows


def rows_of_columns(model, tokenizer, texts, headers, header, frames):
    """The rows of {column: texts}, one column after the other. `frames`: of `rows_of`, for the first column and for the others."""
    return [row for place, lines in enumerate(texts.values())
            for row in rows_of(tokenizer, lines, headers, frames and frames[place > 0], model.config.max_length, header)]


def embed(model, tokenizer, texts, max_length=None, tokens_per_batch=4096, progress=False):
    """Texts -> their vectors (N, D), float32 on the CPU, of rows [CLS] ids [SEP], pooled as model.config.pool says. Texts longer than
    max_length tokens (at most the model's) are cut, and counted on stderr."""
    longest = min(max_length or model.config.max_length, model.config.max_length)
    return embed_rows(model, rows_of(tokenizer, texts, longest=longest), tokens_per_batch, progress)


def embed_rows(model, rows, tokens_per_batch=4096, progress=False, pool=None):
    """Rows of ids -> their vectors (N, D), float32 on the CPU, pooled as `pool` or model.config.pool says. Sorted by length into batches
    and put back in order; what a row is batched with does not change its vector. Draws no random number, leaves the model in the
    mode it was in."""
    vectors = read_rows(model, rows, lambda packed: model.pool(model(packed), packed, pool).float().cpu(), tokens_per_batch, progress)
    return torch.stack(vectors) if rows else torch.empty(0, model.config.width)


def read_rows(model, rows, read, tokens_per_batch=4096, progress=False):
    """What `read(packed)` finds, one thing for each row of a batch -> one for each of the rows of ids, in their order."""
    found, device = [None] * len(rows), next(model.parameters()).device
    with in_eval_mode(model):
        plan = batches([len(row) for row in rows], tokens_per_batch)
        for batch in tqdm(plan, desc="embed", leave=False, disable=not (progress and sys.stderr.isatty())):
            packed = Packed.of([rows[i] for i in batch], causal=model.config.causal).to(device)
            for i, value in zip(batch, read(packed)):
                found[i] = value
    return found


def extend(model, tokens, start, cache):
    """Feed the next n tokens of each row (R, n), the first at place `start` -> logits (R, V) of what comes then. `cache`: each
    layer's keys and values (R, Hkv, L, K), filled in place. Causal attention is asked for at start 0; later n must be 1."""
    end = start + tokens.shape[1]
    causal = torch.ones(end, end, dtype=torch.bool, device=tokens.device).tril() if start == 0 else None
    x, angles = model.begin(tokens, torch.arange(start, end, device=tokens.device))            # (R, n, D)
    for block, past in zip(model.blocks, cache):
        def attend(qkv, block=block, past=past):
            q, *new = qkv.unflatten(-1, (-1, block.size)).transpose(1, 2).split([block.config.heads, block.kv_heads, block.kv_heads], 1)
            for kept, one in zip(past, new):                             # (R, Hkv, n, K)
                kept[:, :, start:end] = one
            return mixed(q, *(kept[:, :, :end] for kept in past), causal, block.config.score_cap).transpose(1, 2).flatten(2)
        x = block.branches(x, angles, attend)
    return model.logits(model.end(x[:, -1]))


def generate(model, prompts, stop, max_new, tokens_per_batch=16384, progress=False):
    """Greedy continuations of prompts (lists of ids) -> (lists of ids without the stop token, did each end with it?). An answer is
    cut after max_new tokens (the stop token is one), or where the row is as long as the model allows. All rows of a batch are at
    the same place, some still inside of their prompt: no padding, nothing to mask. ValueError for an empty or too long prompt."""
    c, device = model.config, next(model.parameters()).device
    if wrong := [len(prompt) for prompt in prompts if not 0 < len(prompt) <= c.max_length]:
        raise ValueError(f"a prompt has {wrong[0]} tokens: it must have 1 to {c.max_length}")
    limits = [min(len(prompt) + max_new, c.max_length) for prompt in prompts]
    rows, stopped = [list(prompt) for prompt in prompts], [False] * len(prompts)
    todo = [i for i, row in enumerate(rows) if len(row) < limits[i]]     # the others have no room for an answer
    with in_eval_mode(model):
        plan = [[todo[place] for place in batch] for batch in batches([limits[i] for i in todo], tokens_per_batch)]
        for batch in tqdm(plan, desc="generate", leave=False, disable=not (progress and sys.stderr.isatty())):
            longest, kind = max(limits[i] for i in batch), dict(dtype=model.embed.weight.dtype, device=device)
            cache = [[torch.empty(len(batch), block.kv_heads, longest, block.size, **kind) for _ in "kv"] for block in model.blocks]
            start, end = 0, min(len(rows[i]) for i in batch)
            while batch:
                logits = extend(model, torch.tensor([rows[i][start:end] for i in batch], device=device), start, cache)   # (R, V)
                if logits.isnan().any():
                    raise BadInput("the model gives NaN in place of a next token: its training has diverged")
                for i, token in zip(batch, logits.argmax(1).tolist()):
                    if len(rows[i]) == end:                              # else its prompt says what comes here
                        stopped[i] = token == stop
                        rows[i] += [] if stopped[i] else [token]
                keep = [place for place, i in enumerate(batch) if not stopped[i] and len(rows[i]) < limits[i]]
                if len(keep) < len(batch):                               # a finished row leaves the batch
                    batch, cache = [batch[place] for place in keep], [[kept[keep] for kept in past] for past in cache]
                start, end = end, end + 1
    return [row[len(prompt):] for row, prompt in zip(rows, prompts)], stopped


def exact(generated, gold):
    """The same text, apart from space around it. Nothing generated is wrong, whatever the gold text."""
    return bool(generated.strip()) and generated.strip() == gold.strip()


def starts_with(generated, gold):
    """The text begins with the gold text: what one can ask of a model that never learned to stop [LLM-JEPA, sec. A.7]."""
    return bool(gold.strip()) and generated.strip().startswith(gold.strip())


# ---------------------------------------------------------------------------------------------------------------------
# Tasks

def flores(folder, langs=None):
    """A folder with a file CODE.devtest or CODE.dev for each language, line N of all being one sentence -> {code: path}, eng_Latn first
    if there is no `langs`. Raises BadInput for another folder, or a language that is not in it."""
    found = {path.stem: path for ending in ("devtest", "dev") for path in sorted(Path(folder).glob(f"*.{ending}")) if "_augmented" not in path.stem}
    if len({path.suffix for path in found.values()}) != 1:
        raise BadInput(f"{folder} must hold files CODE.devtest or CODE.dev, of one kind: give such a folder, as flores200_dataset/devtest, or name files")
    if wrong := [code for code in langs or () if code not in found]:
        raise BadInput(f"--langs {wrong[0]}: there is no {folder}/{wrong[0]}{next(iter(found.values())).suffix}")
    return {code: found[code] for code in langs or sorted(found, key=lambda code: (code != "eng_Latn", code))}


def hard_rows(lines, types, gold):
    """xsim++'s files -> [(altered sentence, row, type of error), ...]: a file with a sentence a line, and a JSON object {altered sentence:
    {"src": the sentence of `gold` it was made from, "errtype": type}}. A line without a type, or whose source is no row, is searched too
    and, when it is found, counts as "misaligned", as in LASER; how many there are is said on stderr. Raises BadInput if all are such."""
    try:
        known = json.loads(Path(types).read_text(encoding="utf-8"))
        known = {text.strip(): (one["src"].strip(), str(one["errtype"])) for text, one in known.items()}
    except OSError as error:
        raise BadInput(f"--hard-types {types}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(f'--hard-types {types} is not a JSON object {{altered sentence: {{"src": sentence, "errtype": type}}}}') from None
    rows = {text.strip(): row for row, text in reversed(list(enumerate(gold)))}
    texts = next(iter(data.texts([lines], holdout=False).values()))
    found = [(text, rows.get(source), kind) for text in texts for source, kind in [known.get(text.strip(), ("", ""))]]
    if (lost := sum(row is None for _, row, _ in found)) == len(found):
        raise BadInput(f"no line of {lines} is in {types} with a source among the {len(gold)} rows: the first language must be the altered one")
    if lost:
        print(f"note: {lost:,} of {len(found):,} altered sentences have no type or no source among the rows: if found, misaligned", file=sys.stderr)
    return [(text, row, kind) if row is not None else (text, -1, "misaligned") for text, row, kind in found]


def test_rows(spec, langs=None, split="test", limit=1000, skip_bad=False, header=False, hard=None):
    """The rows to evaluate: ({language: texts, aligned}, [(text, row, type of error), ...]). `split`: train, valid, test, or all
    rows of a file; `header`: a chat's "system" texts are a column too. The second are hard negatives of the first language: those of
    two files (`hard`, as for `hard_rows`), or of the embedded parallel data, which has some because each of its sentences comes from a
    known meaning; it is rendered here, in one style, so that a negative differs by its error alone."""
    if split not in ("train", "valid", "test", "all"):
        raise BadInput(f"split {split!r} is unknown: choose from train, valid, test, all")
    part = "test" if split == "all" else split
    if spec != "toy":
        files = flores(spec, langs) if Path(spec).is_dir() else {}
        texts = data.texts(list(files.values()) or spec, part, None if files else langs, limit, holdout=split != "all", skip_bad=skip_bad, header=header)
        texts = dict(zip(files or texts, texts.values()))                # one file alone does not name its language
        if header and "system" not in texts:
            raise BadInput(f"{spec} has no system texts, and --chat shared-header opens every row with one: add them, or choose other rows")
        return texts, hard_rows(*hard, next(iter(texts.values()))) if hard else []
    if hard:
        raise BadInput("--hard needs --data: the embedded rows have hard negatives of their own")
    langs = langs or grammar.LANGUAGES
    for name in langs:
        if name not in grammar.LANGUAGES:
            raise BadInput(f"language {name!r} is not in the embedded data: choose from {', '.join(grammar.LANGUAGES)}")
    meanings = grammar.meanings(part, limit or 1000)
    texts = {name: [grammar.render(meaning, name) for meaning in meanings] for name in langs}
    gold = texts[langs[0]]
    hard = [(grammar.render(altered, langs[0]), row, kind) for row, meaning in enumerate(meanings)
            for kind, altered in grammar.negatives(meaning)]
    return texts, [(text, row, kind) for text, row, kind in hard if text != gold[row]]


def retrieval(vectors, texts, negatives=None, hard=()):
    """Every language searched in the first: {language: (N, D)}, {language: N texts}, and of hard negatives (M, D) and (text, row,
    type) -> {"xsim": mean over the languages, "xsim/de-en": one of them, ...}, percent. An equal text counts as right."""
    first, *others = vectors
    y, gold, scores = vectors[first], texts[first], {}
    lines, sources, types = zip(*hard) if hard else ((), (), ())
    for other in others:
        x, pair = vectors[other], f"{other}-{first}"
        errors = xsim_all(x, y, texts=gold)
        found = {f"xsim/{pair}": errors["ratio"], "xsim_distance": errors["distance"], "xsim_absolute": errors["absolute"],
                 f"top1/{pair}": errors["top1"], f"top1/{first}-{other}": errors["top1_back"]}
        parts = xsim_plus(x, y, negatives, sources, types, texts=[*gold, *lines]) if hard else {}
        found |= {f"xsim++/{pair}": parts.pop("xsim++")} if hard else {}
        for name, value in found.items():
            scores.setdefault(name.split("/")[0], []).append(value)
            scores |= {name: [value]} if "/" in name else {}
        for kind, value in parts.items():
            scores.setdefault(f"xsim++/{kind}", []).append(value)
    metrics = list(dict.fromkeys(name.split("/")[0] for name in scores))
    ordered = sorted(scores, key=lambda name: metrics.index(name.split("/")[0]))               # a metric, then its details
    return {name: sum(scores[name]) / len(scores[name]) for name in ordered}


def with_mean(name, scores):
    """{detail: value} -> {name: their mean, "name/detail": value, ...}."""
    return {name: sum(scores.values()) / len(scores)} | {f"{name}/{detail}": value for detail, value in scores.items()}


def matrix(vectors, texts):
    """xsim from every language to every other: the mean, the mean into each language, and each ordered pair. An equal text is right."""
    errors = xsim_matrix(vectors, texts=texts)
    into = {f"into/{name}": [value for (_, to), value in errors.items() if to == name] for name in vectors}
    return with_mean("xsim", {f"{a}-{b}": value for (a, b), value in errors.items()}) | {f"xsim/{name}": sum(each) / len(each) for name, each in into.items()}


def bucc(vectors):
    """MTEB's F1 of BUCC on aligned columns: "f1" is every language searched in the first, as in MTEB's de-en; "f1/en-de" is the other way."""
    first, *others = vectors
    scores = {f"{other}-{first}": bucc_f1(vectors[other], vectors[first]) for other in others}
    return with_mean("f1", scores) | {f"f1/{first}-{other}": bucc_f1(vectors[first], vectors[other]) for other in others}


UNIFORM = ("xsim", "xsim++", "top1")                                       # of task uniform
POOLINGS = ("mean", "max", "weighted", "attention")                       # those of Predict-and-Reconstruct's tables


def poolings(vectors):
    """{pooling: {language: (N, D)}} -> "mean/uniformity" and so on: Predict-and-Reconstruct's metrics under each of its poolings, by its
    paper's formulas and by its code's (_released, alignment_4, uniformity_1000). Alignment here is that of translations."""
    kept = ("spectral_entropy", "spectral_entropy_released", "effective_rank", "stable_rank", "rank_90", "alignment", "alignment_4", "uniformity")
    scores = {}
    for pool, each in vectors.items():
        scores |= {f"{pool}/{name}": value for name, value in geometry(each).items() if name in kept}
        scores[f"{pool}/uniformity_1000"] = sum(metrics.uniformity(metrics.sample(z)) for z in each.values()) / len(each)
    return scores


def averaged(each):
    """{pair or language: {metric: number}} -> {"metric": mean over them, "metric/de-en": number, ...}."""
    tables = (with_mean(metric, {kind: scores[metric] for kind, scores in each.items()}) for metric in next(iter(each.values())))
    return {name: value for one in tables for name, value in one.items()}


def seen(spec, langs=None, holdout=True, skip_bad=False):
    """All texts of the training split of a data set, a set: what `graded` needs to tell recall from more than that."""
    columns = data.texts(spec, "train", langs, holdout=holdout, skip_bad=skip_bad).values()
    return {text.strip() for column in columns for text in column}


class Answers(NamedTuple):
    prompts: list[str]
    golds: list[str]
    written: list[str]
    stopped: list[bool]  # did it end with the stop token?
    cut: int             # prompts cut


def answer(model, tokenizer, prompts, golds, max_new=None, progress=False, headers=None, header=None):
    """What a causal model writes after [CLS] (header [SEP]) prompt [SEP], up to the next [SEP] -> Answers. max_new: by default twice the longest
    gold text + 8 tokens. A prompt that fills the whole model is cut, to leave room for an answer. A decoder's family writes chats in a way of its
    own: data.Chat."""
    mark, longest = data.special(tokenizer), model.config.max_length
    max_new = max_new or 2 * max(len(ids) for ids in data.encode(tokenizer, golds)) + 8
    behind = mark.chat.end + mark.chat.assistant
    rows = rows_of(tokenizer, prompts, headers, (mark.chat.user, behind), header=header)
    cut, most = sum(len(row) >= longest for row in rows), max(longest // 2, longest - max_new)
    rows = [row if len(row) < longest else [*row[:most - len(behind)], *behind] for row in rows]
    written, stopped = generate(model, rows, mark.sep, max_new, progress=progress)
    return Answers(prompts, golds, [tokenizer.decode(ids) for ids in written], stopped, cut)


def share(flags):
    """True, False, and None for what is left out -> percent of True, or None if nothing is left."""
    flags = [flag for flag in flags if flag is not None]
    return 100 * sum(flags) / len(flags) if flags else None


def graded(answers, judged, known=None):
    """{metric: for each answer True, False or None, which leaves it out} -> percentages and counts. `known`, the texts of the training data, adds
    the first metric on the rows whose prompt, or whose gold text, is none of them. A share of no rows is left out."""
    found = judged | {"stop": answers.stopped, "truncated": [not stopped for stopped in answers.stopped]}
    counts = {"prompts_cut": 100 * answers.cut / len(answers.golds), "rows": len(answers.golds)}
    first = next(iter(judged))
    for name, texts in () if known is None else (("new_prompt", answers.prompts), ("unseen", answers.golds)):
        found[f"{first}_{name}"] = new = [flag for flag, text in zip(judged[first], texts) if text.strip() not in known]
        counts[f"rows_{name}"] = len(new) - new.count(None)
    return {name: value for name, flags in found.items() if (value := share(flags)) is not None} | counts


class Subject:
    """A model and the rows it is evaluated on. Rows, vectors and answers are made when a task first asks for them, once for all tasks.

    texts {column: N texts, aligned}, hard [(text, row, type of error)] of the first column, headers N texts or None; ids {column: N rows of
    ids}; vectors {column: (N, D)}, negatives (M, D) of `hard`; answers: Answers of the first `answer_limit` rows. databases: folder with
    database/DB/DB.sqlite; sentences: what the tasks on published sets are asked."""

    def __init__(self, model, tokenizer, spec, langs=None, split="test", limit=1000, skip_bad=False, progress=False, known=None,
                 answer_limit=200, header=0, frames=None, files="data", max_new=None, databases=None, sentences=None, hard=None):
        if limit is not None and limit < 2:
            raise BadInput(f"limit {limit} is too low: an evaluation needs at least 2 rows")
        if max_new is not None and max_new < 1:
            raise BadInput(f"--max-new {max_new} leaves no room for an answer: give at least 1, or leave it out")
        self.model, self.tokenizer, self.spec, self.split, self.progress = model, tokenizer, spec, split, progress
        self.limit = limit
        self.known, self.answer_limit, self.header, self.frames, self.files = known, answer_limit, header, frames, Path(files)
        self.max_new, self.databases = max_new, Path(databases or self.files / "spider")
        self.sentences, self.encoders = sentences or Sentences(), {}      # filled by `encoders`, a pooling at a time
        self.read = functools.partial(test_rows, spec, langs, split, limit, skip_bad, bool(header), hard)

    @functools.cached_property
    def rows(self):
        texts, hard = self.read()
        headers = texts.pop("system") if self.header else None
        if (count := len(next(iter(texts.values())))) < 2:
            raise BadInput(f"the {self.split} split of {self.spec} has {count} rows: an evaluation needs at least 2")
        return texts, hard, headers

    texts, hard, headers = (property(lambda self, place=place: self.rows[place]) for place in range(3))

    @property
    def count(self):
        return len(next(iter(self.texts.values())))

    def checked(self, found):
        """What was found of each text, if all of it is finite."""
        if bad := sum(not bool(value.isfinite().all()) for value in found):
            raise BadInput(f"the model gives NaN or infinity for {bad} of {len(found)} texts: its training has diverged")
        return found

    def embed(self, rows, pool=None):
        return self.checked(embed_rows(self.model, rows, progress=self.progress, pool=pool))

    def states(self, rows):
        """Rows of ids -> the last layer's states of their tokens, a list of (L, D), float32 on the CPU."""
        read = lambda packed: self.model(packed).float().cpu().split(packed.rows.diff().tolist())
        return self.checked(read_rows(self.model, rows, read, progress=self.progress))

    def words(self, rows):
        """Rows of ids -> the mean of the states of their tokens that are not special (R, D); of all, where all are."""
        plain = [~torch.isin(torch.tensor(ids), torch.as_tensor(data.special(self.tokenizer).ids)) for ids in rows]
        return torch.stack([states[which if which.any() else ...].mean(0) for which, states in zip(plain, self.states(rows))])

    def encode(self, texts, pool=None):
        """Any texts -> (N, D), in the frame of the first column."""
        return self.embed(self.rows_of(texts), pool)

    def rows_of(self, texts, headers=None):
        return rows_of(self.tokenizer, texts, headers, self.frames and self.frames[0], self.model.config.max_length)

    @functools.cached_property
    def ids(self):
        rows = rows_of_columns(self.model, self.tokenizer, self.texts, self.headers, self.header, self.frames)
        return {name: rows[place * self.count:(place + 1) * self.count] for place, name in enumerate(self.texts)}

    def pooled(self, pool=None):
        """{column: (N, D)} with another pooling than the model's."""
        return dict(zip(self.texts, self.embed([row for rows in self.ids.values() for row in rows], pool).split(self.count)))

    @functools.cached_property
    def attention(self):
        """{column: list of (H, L)}: what the token whose state is the sentence vector attends to in the last layer. It is the first, or the
        last where the model reads left to right."""
        place = lambda packed: packed.rows[1:] - 1 if self.model.config.causal else packed.rows[:-1]
        read = lambda packed: [weights.cpu() for weights in attention_weights(self.model, packed, place(packed).long())]
        return {name: self.checked(read_rows(self.model, rows, read, progress=self.progress)) for name, rows in self.ids.items()}

    @property
    def pairs(self):
        """("de-en", vectors of de, vectors of en) of every other column and the first."""
        first, *others = self.vectors
        return [(f"{other}-{first}", self.vectors[other], self.vectors[first]) for other in others]

    def pair(self, queries, texts):
        """Vectors of two lists of texts, the first in the frame of the other columns, the second in that of the first: what is searched in."""
        rows = rows_of_columns(self.model, self.tokenizer, {"": texts, "other": queries}, None, None, self.frames)
        y, x = self.embed(rows).split([len(texts), len(queries)])
        return x, y

    vectors = functools.cached_property(pooled)
    negatives = functools.cached_property(lambda self: self.encode([line for line, _, _ in self.hard]))

    @functools.cached_property
    def answers(self):
        few = slice(self.answer_limit)
        return answer(self.model, self.tokenizer, *(column[few] for column in self.texts.values()), self.max_new, self.progress,
                      self.headers and self.headers[few], self.header)


class Sentences(NamedTuple):
    """What the tasks on published sentence sets are asked. sets: some of probes.SETS, None for all that are there; epochs: of hybrid-probes, None
    for the paper's; released: as its code does, choosing the epoch on the rows that are reported."""
    sets: tuple | None = None
    langs: tuple = ("en",)
    controls: bool = True
    epochs: int | None = None
    released: bool = False


class Task(NamedTuple):
    """scores(subject) -> {"metric" or "metric/detail": number}; refuses(subject) -> why it cannot be done, or "". Tasks that are not
    `default` are done when they are named."""
    scores: object
    refuses: object = lambda subject: ""
    default: bool = True


def refuses_retrieval(subject):
    return "" if len(subject.texts) > 1 else f"looks for translations, and {subject.spec} has one text a row: choose --tasks geometry"


def refuses_generate(subject):
    if not subject.model.config.causal:
        return "needs a causal model (objectives ntp, llm-jepa), this one reads both ways: leave it out"
    if len(subject.texts) != 2:
        return f"answers one column with another, and {subject.spec} has {len(subject.texts)}: choose two with --langs a,b" + (
            "" if len(subject.texts) > 1 else " (of parallel text files, give each an ending of its own, such as x.en and x.regex)")
    return ""


def refuses_attention(subject):
    return "" if subject.model.blocks else "looks at the last layer, and this model has none: leave it out"


def task_retrieval(subject):
    return {"rows": subject.count} | retrieval(subject.vectors, subject.texts, subject.negatives, subject.hard)


def task_geometry(subject):
    return {"rows": subject.count} | geometry(subject.vectors)


def refuses_files(find):
    """A task of files of its own: what `find` misses in --files, before anything is computed."""
    def refuses(subject):
        try:
            find(subject.files)
        except BadInput as error:
            return f"needs files: {error}"
        return ""
    return refuses


def task_matrix(subject):
    return {"rows": subject.count} | matrix(subject.vectors, subject.texts)


def task_bucc(subject):
    return {"rows": subject.count} | bucc(subject.vectors)


def task_mine(subject):
    """BUCC as a mining task, of every language pair in --files, whole: --limit does not count here."""
    found, rows = {}, 0
    for pair, parts in tasks.bucc_files(subject.files).items():
        parts = [tasks.read_bucc(*part) for part in parts]
        rows += len(parts[1][0]) + len(parts[1][1])
        for name, value in bucc_mine(*((*subject.pair(x, y), x, y, gold) for x, y, gold in parts)).items():
            found.setdefault(name, {})[pair] = value
    return {"rows": rows} | {name: value for metric in ("f1", "precision", "recall", "f1_tune", "threshold")
                             for name, value in with_mean(metric, found[metric]).items()}


def task_tatoeba(subject):
    """Nearest by cosine, both ways, of every language in --files, whole. "into" (XTREME's and MTEB's direction) is found in English."""
    into, out, rows = {}, {}, 0
    for name, files in tasks.tatoeba_files(subject.files).items():
        texts = data.texts(files, holdout=False)
        if len(texts) != 2 or "eng" not in texts:
            raise BadInput(f"{files[0]} has the columns {', '.join(texts)}: a table of Tatoeba has {name} and eng")
        gold, queries = texts.pop("eng"), next(iter(texts.values()))
        x, y = subject.pair(queries, gold)
        into[f"{name}-eng"], out[f"eng-{name}"], rows = top1(x, y), top1(y, x), rows + len(gold)
    means = {name: sum(each.values()) / len(each) for name, each in (("into_eng", into), ("from_eng", out))}
    scores = with_mean("accuracy", into | out)
    return {"rows": rows, "error": 100 - scores["accuracy"]} | {f"accuracy_{name}": value for name, value in means.items()} | scores


def task_poolings(subject):
    return {"rows": subject.count} | poolings({pool: subject.pooled(pool) for pool in POOLINGS})


# Answers are written once and judged by as many rules as are asked for: judge(answers, subject) -> what `graded` takes, and counts.

def by_rules(**rules):
    """{metric: rule(written, gold) -> bool} -> a judge."""
    return lambda answers, subject: ({name: [rule(*pair) for pair in zip(answers.written, answers.golds)] for name, rule in rules.items()}, {})


def judge_regex(answers, subject):
    def judge(question, *texts):
        try:
            return question(*texts)
        except scores.TooLarge:                                          # not known: left out, and counted
            return None
        except scores.BadPattern:
            return False

    equal = [judge(scores.regex_equal, *pair) for pair in zip(answers.written, answers.golds)]
    vacuous = {gold: judge(scores.regex_vacuous, gold) for gold in set(answers.golds)}
    firm = [None if vacuous[gold] is not False else flag for flag, gold in zip(equal, answers.golds)]
    counts = {"rows_vacuous": sum(vacuous[gold] is True for gold in answers.golds), "rows_too_large": equal.count(None)}
    return {"equal": equal, "equal_not_vacuous": firm}, counts


def judge_label(answers, subject):
    """The labels are those that occur among the gold texts."""
    golds = [gold.strip() for gold in answers.golds]
    labels, majority = sorted(set(golds)), collections.Counter(golds).most_common(1)[0][0]
    return {"accuracy": [scores.label_prefix(written, gold, labels) for written, gold in zip(answers.written, golds)],
            "majority": [gold == majority for gold in golds]}, {}


def database(prompt):
    return found[1] if (found := re.match(r"\s*For db_id:\[([\w-]+)\]", prompt)) else None


def judge_spider(answers, subject):
    """Rows whose database is not there, or whose gold query fails on it, are left out and counted by database."""
    judged, left_out = {"result": [], "released": []}, collections.Counter()
    questions = [*zip(map(database, answers.prompts), answers.golds, answers.written)]
    for name, gold, written in tqdm(questions, desc="queries", leave=False, disable=not (subject.progress and sys.stderr.isatty())):
        path = subject.databases / "database" / name / f"{name}.sqlite"
        try:
            flags = [scores.same_result(written, gold, path, released=released) for released in (False, True)]
        except BadInput:
            flags, left_out[f"rows_left_out/{name}"] = (None, None), left_out[f"rows_left_out/{name}"] + 1
        for each, flag in zip(judged.values(), flags):
            each.append(flag)
    return judged, {"rows_left_out": left_out.total()} | dict(sorted(left_out.items()))


def refuses_spider(subject):
    if reason := refuses_generate(subject):
        return reason
    if wrong := [prompt for prompt in next(iter(subject.texts.values())) if not database(prompt)]:
        return f"reads the database from prompts that begin with For db_id:[NAME], and {subject.spec} has {wrong[0][:40]!r}: choose other rows"
    if (subject.databases / "database").is_dir():
        return ""
    if subject.databases == subject.files / "spider":
        from download import missing  # download.py is not needed where the data is there
        return "runs queries: " + missing("spider", subject.files, "database")
    return f"runs queries, and {subject.databases} has no folder database with DB/DB.sqlite in it: name the folder with --databases"


def task_answers(judge, subject):
    flags, counts = judge(subject.answers, subject)
    return graded(subject.answers, flags, subject.known) | counts


LETTERS = "ABCD"
OPTION = re.compile(rf"\n([{LETTERS}])\) ")                               # HellaSwag's prompt: the context, then a line for each ending


def refuses_choice(subject):
    if reason := refuses_generate(subject):
        return reason
    wrong = [row for row, (prompt, gold) in enumerate(zip(*subject.texts.values()), 1)
             if "".join(OPTION.findall(prompt)) != LETTERS or gold.strip() not in [*LETTERS]]
    return f"chooses between the lines A) to D) of a prompt, and row {wrong[0]} of {subject.spec} is not such a question with its letter" if wrong else ""


def task_hellaswag(subject):
    """Each ending after the context alone, as HellaSwag is asked elsewhere: with the endings in the prompt they would be copied."""
    prompts, golds = subject.texts.values()
    parts = [OPTION.split(prompt) for prompt in prompts]                 # context, A, ending, B, ending, ...
    with in_eval_mode(subject.model):
        found = scores.option_likelihoods(subject.model, subject.tokenizer, [part[0] for part in parts], [part[2::2] for part in parts], subject.headers)
    right = lambda values: share([LETTERS[each.index(max(each))] == gold.strip() for each, gold in zip(values, golds)])
    return {"accuracy": right([each.sums for each in found]), "accuracy_normalised": right([each.means for each in found]),
            "prompts_cut": share([each.cut > 0 for each in found]), "rows": len(golds)}


def task_letter(subject):
    prompts, golds = subject.texts.values()
    results = {"rows": len(golds)}
    for metric, cut, released in (("accuracy", "prompts_cut", False), ("released", "prompts_cut/released", True)):
        with in_eval_mode(subject.model):
            found = scores.letter_choices(subject.model, subject.tokenizer, prompts, LETTERS, subject.headers, released)
        results |= {metric: share([letter == gold.strip() for (letter, _), gold in zip(found, golds)]), cut: share([cut > 0 for _, cut in found])}
    return results


JUDGES = {
    "generate": by_rules(exact=exact, startswith=starts_with),
    "regex": judge_regex,
    "gsm8k": by_rules(number=scores.gsm8k_correct, released=functools.partial(scores.gsm8k_correct, released=True)),
    "spider": judge_spider,
    "nq": by_rules(substring=scores.nq_correct, released=functools.partial(scores.nq_correct, released=True)),
    "label": judge_label,
}


def task_linear(subject):
    """LLM-JEPA, fig. 3 and table 14: the first column is its Text, each other its Code; "_unit" is of unit rows, which scale does not move."""
    each = {pair: metrics.linear_map(x, y) | {f"{name}_unit": value for name, value in metrics.linear_map(metrics.unit(x), metrics.unit(y)).items()}
            for pair, y, x in subject.pairs}
    return {"rows": subject.count, "rows_per_width": subject.count / subject.model.config.width} | averaged(each)


def task_spectrum(subject):
    """Of the vectors of all columns together, as BERT-JEPA's PCA plots."""
    share = metrics.explained(torch.cat(list(subject.vectors.values())))
    return {"rows": subject.count} | {f"explained_{k}": share[min(k, len(share)) - 1].item() for k in (1, 2, 10, 50)}


def task_tokens(subject):
    """MEXMA's table 9. A first text that came before is left out: its tokens would be found in its copy."""
    first = next(iter(subject.texts.values()))
    new = sorted({text: row for row, text in reversed(list(enumerate(first)))}.values())
    columns = [[rows[row] for row in new] for rows in subject.ids.values()]
    queries, found = metrics.nearest_tokens(columns, map(subject.states, columns), data.special(subject.tokenizer).ids, range(min(250, len(new))))
    nearest, five = metrics.token_matches(queries, found[:, :1]), metrics.token_matches(queries, found)
    return {"rows": len(new), "rows_queries": len(queries)} | nearest | {f"{name}/nearest_5": value for name, value in five.items()}


def task_attention(subject):
    return {"rows": subject.count} | averaged({name: metrics.attention_entropy(weights) for name, weights in subject.attention.items()})


def task_uniform(subject):
    """MEXMA's table 10: retrieval with the model's own pooling, with the mean of a row's states, and with that of its plain tokens ("words").
    "change" is (own - other) / own, in percent of own; it is left out where own is 0."""
    own = subject.model.config.pool
    hard, scores = subject.rows_of([line for line, _, _ in subject.hard]), {}
    for kind in dict.fromkeys((own, "mean", "words")):
        encode = subject.words if kind == "words" else functools.partial(subject.embed, pool=kind)
        vectors = {name: encode(rows) for name, rows in subject.ids.items()}
        found = retrieval(vectors, subject.texts, encode(hard) if hard else None, subject.hard)
        scores |= {f"{name}/{kind}": found[name] for name in UNIFORM if name in found}
    change = {f"change/{name}": 100 * (before - value) / before for name, value in scores.items()
              if (before := scores[f"{name.split('/')[0]}/{own}"]) and not name.endswith(f"/{own}")}
    return {"rows": subject.count} | {name: scores[name] for name in sorted(scores)} | change


def task_gap(subject):
    """Predict-and-Reconstruct's tables 7-11, for each set of --sets and each pooling: its geometry, by the paper's formulas and its code's,
    and the probe gap. A pair is one row, [CLS] first [SEP] second [SEP], as in its code. Without --sets, the token probe of the first column."""
    asked, scores = subject.sentences, {}
    sets = {name if lang == "en" else f"{name}-{lang}": tasks.read(name, subject.files, "test", lang)
            for name in asked.sets or () for lang in (asked.langs if name in IN_LANGUAGES else ("en",))}
    if not sets:
        name, texts = next(iter(subject.texts.items()))
        sets = {name: tasks.Rows(texts, None, None)}
    for name, columns in sets.items():
        texts, second, labels = (column and column[:subject.limit] for column in columns)
        rows = subject.rows_of(second or texts, texts if second else None)
        targets = probes.token_targets(rows, data.special(subject.tokenizer).ids)
        scores[f"{name}/rows"], scores[f"{name}/rows_token"] = len(rows), int((targets >= 0).sum())
        for pool in dict.fromkeys((subject.model.config.pool, *POOLINGS)):
            z = subject.embed(rows, pool)
            try:
                found = classes(z, labels) | probes.probe_gap(z, targets, labels)
            except ValueError as error:
                raise BadInput(f"set {name} cannot be probed: {error}") from None
            scores |= {f"{name}/{metric}": value for metric, value in poolings({pool: {name: z}}).items()}
            scores |= {f"{name}/{pool}/{metric}": value for metric, value in found.items()}
    return scores


def classes(z, labels):
    """How near rows of a class are, (N, D), N labels or None; scores are binned at 1, 2, 3 and 4, as Predict-and-Reconstruct's code does."""
    if labels is None:
        return {}
    labels = torch.tensor(labels)
    of = torch.bucketize(labels, torch.tensor([1., 2, 3, 4]), right=True) if labels.is_floating_point() else labels
    return {"class_alignment": metrics.class_alignment(z, of), "class_alignment_4": metrics.class_alignment(z, of, 4),
            "class_separation": metrics.class_separation(z, of)}


# ---------------------------------------------------------------------------------------------------------------------
# Published sentence tasks: each score beside that of an untrained model and of a bag of embeddings

IN_LANGUAGES = ("stsb", "pawsx", "xnli")                                  # the other sets are English


def encoders(subject, pool=None):
    """{"model", "untrained", "bag"}: functions texts -> (N, D) that remember what they have embedded. An untrained model of the same config
    (seed 0), and the mean of this model's input embeddings: what its architecture, and its vocabulary, give without order."""
    def remembering(encode):
        known = {}
        def remember(texts):
            if new := [text for text in dict.fromkeys(texts) if text not in known]:
                known.update(zip(new, encode(new)))
            return torch.stack([known[text] for text in texts])
        return remember

    def bag(texts):
        ids, weight = data.encode(subject.tokenizer, texts), subject.model.embed.weight.detach().float().cpu()
        starts = torch.tensor([0, *map(len, ids[:-1])]).cumsum(0)
        return F.embedding_bag(torch.tensor([int(one) for row in ids for one in row], dtype=torch.int64), weight, starts, mode="mean")

    if pool not in subject.encoders:
        twin = copy.copy(subject)
        if subject.sentences.controls:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                twin.model = Model(subject.model.config).to(next(subject.model.parameters()))
        kinds = {"model": lambda texts: subject.encode(texts, pool), "untrained": lambda texts: twin.encode(texts, pool), "bag": bag}
        subject.encoders[pool] = {kind: remembering(encode) for kind, encode in kinds.items() if kind == "model" or subject.sentences.controls}
    return subject.encoders[pool]


def wanted(task, subject):
    """([(set, language)] that are there, why the others are not, a line each)."""
    there, absent, options = [], [], subject.sentences
    for name in probes.SETS[task].split() if options.sets is None else [name for name in probes.SETS[task].split() if name in options.sets]:
        for lang in options.langs if name in IN_LANGUAGES else ("en",):
            parts = [part for split in probes.splits(task, name, options.released) for part in split.split("+")]
            why = next(filter(None, (tasks.missing(name, subject.files, part, lang) for part in parts)), "")
            if why:
                absent.append(why)
            else:
                there.append((name, lang))
    return there, absent


def refuses_sentences(task, subject):
    sets = subject.sentences.sets
    for name in sets or ():
        tasks.find(name)
    if sets and not set(sets) & set(probes.SETS[task].split()):
        return f"has no set {', '.join(sets)}: its sets are {probes.SETS[task].replace(' ', ', ')}"
    there, absent = wanted(task, subject)
    return f"has no rows: {absent[0]}" if absent and (sets or not there) else ""


def sentences(task, subject):
    """A task on all sets that are there -> {"set/metric": number, "set/metric/untrained", ...}; what is not there is named on stderr."""
    there, absent = wanted(task, subject)
    for why in absent:
        print(f"note: {task} goes without {why}", file=sys.stderr)
    results, options = {}, subject.sentences
    for name, lang in there:
        label, pool = name if lang == "en" else f"{name}-{lang}", None
        if task == "hybrid-probes":
            label += "-released" * options.released + (f"-{options.epochs}-epochs" if options.epochs else "")
            pool = "cls" if options.released and name in ("mrpc", "qqp", "ag-news") else "mean"
        rows = [positives(task, name, tasks.read(name, subject.files, split, lang)) for split in probes.splits(task, name, options.released)]
        if alone := next((part for part in rows if len(set(part.labels)) < 2), None):
            raise BadInput(f"set {name} has {len(alone.labels)} rows of one label, {(alone.labels or ['none'])[0]}: there is nothing to tell apart")
        scores = {}
        for kind, encode in encoders(subject, pool).items():
            parts = [(encode(part.first), part.second and encode(part.second), torch.tensor(part.labels)) for part in rows]
            scores[kind] = probes.score(task, name, parts, options.epochs, options.released)
        gold = rows[-1].labels
        for metric, value in scores.pop("model").items():
            results[f"{label}/{metric}"] = value
            results |= {f"{label}/{metric}/{kind}": others[metric] for kind, others in scores.items()}
            if metric == "accuracy":
                results[f"{label}/accuracy/majority"] = 100 * max(map(gold.count, set(gold))) / len(gold)
            if metric.startswith("ap_"):
                results[f"{label}/{metric}/chance"] = 100 * sum(gold) / len(gold)
        results[f"{label}/rows"] = len(gold)
        if len(rows) > 1:
            results[f"{label}/rows_train"] = len(rows[0].labels)
        if probes.splits(task, name)[-1] == "test" and tasks.made(name, subject.files, "test", lang):
            results[f"{label}/rows_substitute"] = len(gold)
    return results


def positives(task, name, rows):
    """Of three-way inference a task on pairs asks entailment against contradiction, as MTEB does."""
    if task != "pairs" or name != "xnli":
        return rows
    kept = [row for row in zip(*rows) if row[2] != 1]
    return tasks.Rows([row[0] for row in kept], [row[1] for row in kept], [int(row[2] == 0) for row in kept])


TASKS = {
    "retrieval": Task(task_retrieval, refuses_retrieval),
    "geometry": Task(task_geometry),
    **{name: Task(functools.partial(task_answers, judge), refuses_spider if name == "spider" else refuses_generate, name == "generate")
       for name, judge in JUDGES.items()},
    "hellaswag": Task(task_hellaswag, refuses_choice, default=False),
    "hellaswag-letter": Task(task_letter, refuses_choice, default=False),
    "poolings": Task(task_poolings, default=False),
    "gap": Task(task_gap, default=False),
    "linear": Task(task_linear, refuses_retrieval, default=False),
    "spectrum": Task(task_spectrum, default=False),
    "tokens": Task(task_tokens, refuses_retrieval, default=False),
    "attention": Task(task_attention, refuses_attention, default=False),
    "uniform": Task(task_uniform, refuses_retrieval, default=False),
    "matrix": Task(task_matrix, refuses_retrieval, default=False),
    "bucc": Task(task_bucc, refuses_retrieval, default=False),
    "mine": Task(task_mine, refuses_files(tasks.bucc_files), default=False),
    "tatoeba": Task(task_tatoeba, refuses_files(tasks.tatoeba_files), default=False),
    **{name: Task(functools.partial(sentences, name), functools.partial(refuses_sentences, name), default=False) for name in probes.SETS},
}
ON_REQUEST = [name for name, task in TASKS.items() if not task.default]


def run(subject, tasks=None):
    """Evaluate a Subject -> {"task/metric": number}, as in eval.json. tasks=None is all that apply but those ON_REQUEST. Raises
    BadInput for a task that is unknown or that the model or the data cannot serve."""
    for task in tasks or ():
        if task not in TASKS:
            raise BadInput(f"task {task!r} is unknown: choose from {', '.join(TASKS)}{data.meant(task, TASKS)}")
        if reason := TASKS[task].refuses(subject):
            raise BadInput(f"task {task!r} {reason}")
    tasks = tasks or [name for name, task in TASKS.items() if task.default and not task.refuses(subject)]
    return {f"{task}/{name}": value for task in tasks for name, value in TASKS[task].scores(subject).items()}


def listed(tensor):
    """A tensor as nested lists for JSON, 6 digits."""
    return torch.round(tensor.double(), decimals=6).tolist()


def arrays(subject, most=500):
    """What plots need, ready for JSON; pairs are named "de-en", as everywhere.

    "singular_values" and "explained" (cumulative percent): of the vectors of all columns, centred. "vectors": {"column", "row", "values",
    "pca"} of at most so many vectors, the same rows of each column; the two axes of pca are those of all vectors. Of pairs: "cosines"
    {"edges", "related", "unrelated"}, counts in bins over at most 1,000 rows; "differences", the 100 largest singular values of one column
    minus the other; "retrieval" {"columns", "xsim"}, percent wrong from the row's column into the column's. "attention" {column:
    {"by_position", "on_end", "examples"}}: of the sentence's token, mean of the heads, at each of the first 64 places but the last of a row."""
    whole = torch.cat(list(subject.vectors.values())).double()
    s, axes = metrics.spectrum(whole, center=True), torch.linalg.svd(whole - whole.mean(0), full_matrices=False).Vh[:2].T      # (D, 2)
    axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()          # whichever way an axis points, plots agree
    rows = range(min(subject.count, max(1, most // len(subject.vectors))))
    shown = torch.cat([z[:len(rows)] for z in subject.vectors.values()])
    found = {"singular_values": listed(s), "explained": listed(metrics.explained(whole)),
             "vectors": {"column": [name for name in subject.vectors for _ in rows], "row": [*rows] * len(subject.vectors),
                         "values": listed(shown), "pca": listed((shown - whole.mean(0)) @ axes)}}
    if pairs := subject.pairs:
        names = list(subject.vectors)
        found["cosines"] = {pair: metrics.cosine_counts(x[:1000], y[:1000]) for pair, x, y in pairs}
        found["differences"] = {pair: listed(metrics.spectrum(x - y, center=False)[:100]) for pair, x, y in pairs}
        errors = xsim_matrix(subject.vectors, texts=subject.texts)
        found["retrieval"] = {"columns": names, "xsim": [[errors.get((a, b), 0.0) for b in names] for a in names]}
    if subject.model.blocks:
        found["attention"] = {name: attention_places(subject.tokenizer, subject.ids[name], each) for name, each in subject.attention.items()}
    return found


def attention_places(tokenizer, rows, weights, most=64, examples=10):
    """Where the attention (H, L) of rows of ids goes, mean of the heads, for `arrays`."""
    means = [each.mean(0) for each in weights]                           # (L,) each
    sums, counts = torch.zeros(most), torch.zeros(most)
    for mean in means:
        sums[:len(mean) - 1] += mean[:-1][:most]
        counts[:len(mean) - 1] += 1
    return {"by_position": listed((sums / counts)[counts > 0]), "on_end": sum(mean[-1].item() for mean in means) / len(means),
            "examples": [{"tokens": [tokenizer.id_to_token(token) for token in ids], "weights": listed(mean)} for ids, mean in zip(rows[:examples], means)]}


class Example(NamedTuple):
    query: str
    found: str  # what the model writes, or takes for the query's translation into the first language
    gold: str
    right: bool


def examples(model, tokenizer, texts, n=5, header=0, frames=None):
    """n examples to read: {language: texts, aligned} -> list of Example, the rows spread evenly. Of a causal model and two columns its answers;
    else retrieval, the languages in turn, each text found among all of the first language as `xsim` does. None if there is one language."""
    headers = texts["system"] if header else None
    texts = {name: lines for name, lines in texts.items() if name != "system" or not header}
    first, *others = texts
    count = len(texts[first])
    if not others or not count:
        return []
    chosen = [turn * count // n for turn in range(min(n, count))]
    if model.config.causal and len(others) == 1:
        parts = ([lines[row] for row in chosen] for lines in texts.values())
        made = answer(model, tokenizer, *parts, headers=headers and [headers[row] for row in chosen], header=header)
        return [Example(*row, exact(*row[1:])) for row in zip(made.prompts, made.written, made.golds)]
    rows = rows_of_columns(model, tokenizer, texts, headers, header, frames)
    vectors = dict(zip(texts, embed_rows(model, rows).split(count)))
    found, made = {other: mine(vectors[other], vectors[first]).tolist() for other in others[:n]}, []
    for turn, row in enumerate(chosen):
        other = others[turn % len(others)]
        gold, taken = texts[first][row], texts[first][found[other][row]]
        made.append(Example(texts[other][row], taken, gold, taken == gold))
    return made


# ---------------------------------------------------------------------------------------------------------------------
# Command line

ABOUT = {  # metric -> unit, which way is better, what it is
    "xsim": ("%", "lower", "wrong translation found: ratio margin, k = 4"),
    "xsim_distance": ("%", "lower", "the same by distance margin"),
    "xsim_absolute": ("%", "lower", "the same by cosine alone"),
    "top1": ("%", "higher", "nearest by cosine is the translation, both directions"),
    "xsim++": ("%", "lower", "wrong translation found among hard negatives"),
    "matrix/xsim": ("%", "lower", "every language searched in every other, mean"),
    "bucc/f1": ("%", "higher", "nearest by cosine, F1 weighted as in MTEB"),
    "mine/f1": ("%", "higher", "translations mined out of two texts: ratio margin, k = 4"),
    "mine/precision": ("%", "higher", "what was mined is right"),
    "mine/recall": ("%", "higher", "what is right was mined"),
    "mine/f1_tune": ("%", "higher", "f1 on the part that gave the threshold"),
    "mine/threshold": ("", "", "least margin of what is taken"),
    "tatoeba/accuracy": ("%", "higher", "nearest by cosine is the translation, both directions"),
    "tatoeba/accuracy_into_eng": ("%", "higher", "the same, found in English"),
    "tatoeba/accuracy_from_eng": ("%", "higher", "the same, English searched for"),
    "tatoeba/error": ("%", "lower", "100 - accuracy"),
    "rankme": ("", "higher", "directions in use"),
    "rankme_normalized": ("", "higher", "the same of unit rows (BERT-JEPA's code)"),
    "rankme_share": ("%", "higher", "rankme as a share of the most possible"),
    "effective_rank": ("", "higher", "directions in use, centred"),
    "stable_rank": ("", "higher", "variance over that of its largest direction"),
    "rank_90": ("", "higher", "directions that hold 90 % of the variance, centred"),
    "spectral_entropy": ("", "higher", "log effective rank, 0 to 1"),
    "spectral_entropy_released": ("", "higher", "the same of squares (Predict-and-Reconstruct's code)"),
    "uniformity": ("", "lower", "0 is one point, -4 the whole sphere"),
    "isotropy": ("", "higher", ".14 is one direction, 1 none"),
    "spread": ("", "higher", "deviation of unit rows, 0 is one point, 1 healthy"),
    "alignment": ("", "lower", "squared distance of translations"),
    "alignment_4": ("", "lower", "4th power of it (Predict-and-Reconstruct's code)"),
    "cosine/same": ("", "lower", "unrelated sentences, one language"),
    "cosine/translations": ("", "higher", "translations"),
    "cosine/different": ("", "lower", "unrelated sentences, two languages"),
    "uniformity_1000": ("", "lower", "the same of at most 1,000 random rows (Predict-and-Reconstruct's code)"),
    "class_alignment": ("", "lower", "squared distance of rows of one class"),
    "class_alignment_4": ("", "lower", "4th power of it (Predict-and-Reconstruct's code)"),
    "class_separation": ("", "lower", "distance within classes over that between, 1: they do not show"),
    "token": ("%", "", "a linear probe finds the row's most frequent token, 3 folds"),
    "semantic": ("%", "higher", "a linear probe finds the label, 5 folds (of scores: Spearman)"),
    "semantic_f1": ("%", "higher", "macro-F1 of that"),
    "semantic_mcc": ("", "higher", "Matthews correlation of that"),
    "gap": ("%", "higher", "semantic - token"),
    "rows_token": ("", "", "rows whose most frequent token is that of 5 rows or more"),
    "residual": ("", "lower", "|T X - C|, best linear map X of the first column to another; 0 if rows_per_width is under 1"),
    "residual_relative": ("", "lower", "the same over |C|, 0 is a linear map"),
    "residual_held_out": ("", "lower", "the same on every second row, X fitted to the others"),
    "singular_100": ("", "lower", "mean of the 100 largest singular values of T - C"),
    "singular_mean": ("", "lower", "mean of all of them"),
    "residual_unit": ("", "lower", "|T X - C| of unit rows"),
    "residual_relative_unit": ("", "lower", "over |C|"),
    "residual_held_out_unit": ("", "lower", "on every second row"),
    "singular_100_unit": ("", "lower", "mean of the 100 largest singular values of T - C, unit rows"),
    "singular_mean_unit": ("", "lower", "mean of all of them"),
    "rows_per_width": ("", "", "rows over dimensions"),
    "explained_1": ("%", "lower", "variance in the largest principal component, all columns together"),
    "explained_2": ("%", "lower", "in the first 2"),
    "explained_10": ("%", "lower", "in the first 10"),
    "explained_50": ("%", "lower", "in the first 50"),
    "translation": ("%", "higher", "tokens whose nearest token stands in a translation of their row"),
    "same_sentence": ("%", "lower", "in the same row"),
    "same_language": ("%", "lower", "is the same token in another row of the column"),
    "other": ("%", "lower", "anything else"),
    "rows_queries": ("", "", "tokens asked for, 3 of each of the first 250 rows"),
    "entropy": ("", "", "nats: attention of the first token (causal: the last), last layer, mean of heads"),
    "entropy_no_end": ("", "", "the same without the last token, rescaled"),
    "entropy_inside": ("", "", "the same without first and last"),
    "entropy_of_mean": ("", "", "entropy of the heads' mean"),
    "entropy_of_mean_no_end": ("", "", "the same without the last token"),
    "entropy_of_mean_inside": ("", "", "the same without first and last"),
    "entropy_uniform": ("", "", "log of the tokens in a row: the most there can be"),
    "on_first": ("%", "", "of that attention on the first token"),
    "on_end": ("%", "", "on the last"),
    "change": ("%", "", "(own pooling - this one) / own"),
    "exact": ("%", "higher", "greedy answer is the gold text"),
    "startswith": ("%", "higher", "it begins with the gold text"),
    "stop": ("%", "higher", "it ended with the stop token"),
    "truncated": ("%", "lower", "it did not, and was cut"),
    "prompts_cut": ("%", "lower", "prompts that fill the whole model"),
    "equal": ("%", "higher", "it denotes the gold expression's language"),
    "equal_not_vacuous": ("%", "higher", "the same where gold matches some lines and not all"),
    "number": ("%", "higher", "its final number is the gold one"),
    "result": ("%", "higher", "it returns what the gold query returns"),
    "substring": ("%", "higher", "it contains a gold answer"),
    "accuracy": ("%", "higher", "right class, label, letter or ending"),
    "accuracy_normalised": ("%", "higher", "the same by likelihood per token"),
    "majority": ("%", "", "share of the most frequent label: what needs no model"),
    "released": ("%", "higher", "the same as LLM-JEPA's code judges it"),
    "spearman": ("", "higher", "rank correlation of similarity and score, times 100"),
    "pearson": ("", "higher", "correlation of similarity and score, times 100"),
    "f1": ("%", "higher", "F1 of the pairs that mean the same"),
    "mcc": ("", "higher", "Matthews' correlation, times 100"),
    "ap_cosine": ("%", "higher", "average precision of the cosine"),
    "ap_max": ("%", "higher", "the best of cosine, two distances, dot product"),
    "rows_train": ("", "", "rows the head is trained on"),
    "rows_substitute": ("", "", "of the rows, those that stand for a test split that is not there"),
    "rows": ("", "", "rows of the data"),
    "rows_new_prompt": ("", "", "those whose prompt is not in the training data"),
    "rows_unseen": ("", "", "those whose gold text is not in the training data"),
    "rows_vacuous": ("", "", "those whose gold expression matches no line, or every line"),
    "rows_too_large": ("", "", "those that could not be compared, and are left out"),
    "rows_left_out": ("", "", "those whose gold query cannot be run"),
    **{f"{metric}_{rows}": ("%", "higher", f"{metric}, where the {what} is not in the training data")
       for metric in ("exact", "equal", "number", "result", "substring", "accuracy") for rows, what in (("new_prompt", "prompt"), ("unseen", "gold text"))},
}


MOST_PAIRS = 12


def about(name):
    """A result's row of ABOUT: unit, which way is better, what it is. A detail has its metric's unit. KeyError for another name."""
    task, _, metric = name.partition("/")
    if task in ("poolings", *probes.SETS):                               # task/set/metric
        metric = metric.partition("/")[2] or metric
    metric = metric.rpartition("/")[2] if task == "gap" else metric
    key = next((key for key in (name, metric, "/".join(name.split("/")[:2])) if key in ABOUT), metric.split("/")[0])
    return ABOUT[key] if key in (name, metric) else (*ABOUT[key][:2], "")


def table(results):
    """Results -> aligned lines: name, value, unit, which way is better, what it is. Cosines of single pairs are in the file, and so are
    the single pairs of a metric that has more than MOST_PAIRS of them."""
    controls = ("untrained", "bag", "majority", "chance")                 # stand beside the score
    shown = [name for name in results if not (name.startswith("geometry/cosine/") and name.count("/") > 2)
             and not (name.rpartition("/")[2] in controls and name.rpartition("/")[0] in results)]
    is_pair = lambda name: "-" in name.rpartition("/")[2] or "/into/" in name
    pairs = collections.Counter(name.rpartition("/")[0] for name in shown if is_pair(name))
    hidden = {name for name in shown if is_pair(name) and pairs[name.rpartition("/")[0]] > MOST_PAIRS}
    shown = [name for name in shown if name not in hidden]
    width, lines = max(map(len, shown)), []
    for name in shown:
        sign, better, said = about(name)
        value = f"{results[name]}" if "/rows" in name else f"{results[name]:.{2 if sign else 4}f}"
        beside = ", ".join(f"{kind} {results[f'{name}/{kind}']:.2f}" for kind in controls if f"{name}/{kind}" in results)
        lines.append(f"{name:<{width}} {value:>10} {sign:<1}  {better:<6}  {said}{f' ({beside})' * bool(beside)}".rstrip())
    lines += [f"and {len(hidden)} numbers of single languages and pairs, which are in the file"] if hidden else []
    return "\n".join(lines)


def read_config(folder):
    """-> the first line of a run's log, with its "config". Raises BadInput that says what is missing."""
    if not folder.is_dir():
        raise BadInput(f"there is no run {folder}: give a folder that train.py wrote, such as out/mexma")
    if not (folder / "model.pt").is_file():
        raise BadInput(f"{folder} has no model.pt: it is no run, or was stopped before its first checkpoint")
    try:
        with open(folder / "log.jsonl", encoding="utf-8") as file:
            first = json.loads(file.readline())
        first["config"]["data"]
        return first
    except (OSError, ValueError, KeyError, TypeError):
        raise BadInput(f"{folder / 'log.jsonl'} does not begin with the config of the run: copy the run's folder whole") from None


def read_run(folder):
    """-> (the first line of a run's log, its tokenizer). Raises BadInput if that is not the one that the run was trained with."""
    first, tokenizer = read_config(folder), data.read_tokenizer(folder / "tokenizer.json")
    if first.get("tokenizer_hash", data.tokenizer_hash(tokenizer)) != data.tokenizer_hash(tokenizer):
        raise BadInput(f"{folder / 'tokenizer.json'} is not the one that the run was trained with: put that file back")
    return first, tokenizer


def write_results(folder, name, results):
    """Write results to folder/name, whole or not at all. In eval.json other tasks' numbers stay if they are newer than the model."""
    part = lambda key: key.split("/")[:2 if key.split("/")[0] in probes.SETS else 1]                  # a task, or one set of it
    path, kept, new = folder / name, {}, [part(key) for key in results]
    if name == "eval.json" and path.is_file() and path.stat().st_mtime >= max(path.stat().st_mtime for path in folder.glob("*model*")):
        with contextlib.suppress(ValueError, AttributeError):            # a damaged file is written anew
            old = json.loads(path.read_text(encoding="utf-8"))
            kept = {key: value for key, value in old.items() if part(key) not in new}
    data.write_atomic(path, (json.dumps(kept | results, indent=1, allow_nan=False) + "\n").encode())


def file_ending(arguments):
    """"-DATA-SPLIT-LANGUAGES.json", of what was given; many languages are a number and a checksum, since names of files have an end."""
    parts = [Path(arguments.data.split(",")[0]).name.split(".")[0]] if arguments.data else []
    parts += ([arguments.split] if arguments.split else []) + (["hard"] if arguments.hard else [])
    langs = arguments.langs or []
    langs = langs if len(langs) <= MOST_PAIRS else [f"{len(langs)}-languages", f"{zlib.crc32(','.join(langs).encode()):08x}"]
    return "".join(f"-{part}" for part in [*parts, *langs]) + ".json"


def usable_device(name):
    """The name of a device, by default the GPU if there is one. BadInput if it cannot be used here."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if torch.device(name).type not in ("cpu", "cuda", "mps"):
            raise RuntimeError
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError):                               # an AssertionError where torch has no CUDA at all
        raise BadInput(f"device {name!r} cannot be used here: leave --device out, or give cpu") from None
    return name


OWN_ROWS = ("tatoeba", "mine", *probes.SETS)                              # tasks that read nothing of --data
USED_BY = {  # flag -> the tasks that use it
    **dict.fromkeys(("data", "langs", "split", "limit"), [name for name in TASKS if name not in OWN_ROWS]),
    "max_new": list(JUDGES), "databases": ["spider"], "hard": ["retrieval", "uniform"], "probe_epochs": ["hybrid-probes"], "probe_released": ["hybrid-probes"],
    "sets": ["gap", *probes.SETS], "task_langs": ["gap", *probes.SETS], "no_controls": list(probes.SETS)}


def check_flags(arguments):
    """Refuse a flag that none of the tasks asked for uses, an empty list, and a set that none of them has."""
    for name in ("tasks", "sets", "task_langs"):
        if getattr(arguments, name) == []:
            raise BadInput(f"--{name.replace('_', '-')} names nothing: leave it out, or give names with commas between them")
    asked = arguments.tasks or [name for name in TASKS if name not in ON_REQUEST]
    for flag, users in USED_BY.items():
        plotted = flag in ("data", "langs", "split", "limit") and arguments.arrays
        if getattr(arguments, flag) not in (None, False) and not plotted and not set(asked) & set(users):
            raise BadInput(f"--{flag.replace('_', '-')} is for the tasks {', '.join(users)}: leave it out, or name one of them with --tasks")
    if arguments.probe_epochs is not None and arguments.probe_epochs < 1:
        raise BadInput(f"--probe-epochs is {arguments.probe_epochs}: it must be at least 1")
    groups = [probes.SETS[task].split() for task in asked if task in probes.SETS]
    if lost := [name for name in arguments.sets or () if "gap" not in asked and name in tasks.TASKS and not any(name in group for group in groups)]:
        raise BadInput(f"--sets {lost[0]}: none of the tasks {', '.join(asked)} has this set: leave it out, or name another task")
    chosen = set(arguments.sets or ()) if "gap" in asked else {name for group in groups for name in group if name in (arguments.sets or group)}
    if arguments.task_langs and not chosen & set(IN_LANGUAGES):
        raise BadInput(f"--task-langs chooses languages of {', '.join(IN_LANGUAGES)}, and none of these sets is asked for: leave it out")


def evaluate_run(arguments):
    """`evaluate.py RUN`: numbers to stdout and RUN/eval.json. Rows other than the run's own test rows get a file of their own,
    named by what was given, RUN/eval-DATA-SPLIT-LANGUAGES.json, so that the eval.json of all runs hold the same thing."""
    folder = Path(arguments.run)
    pretrained = (folder / "config.json").is_file() and not (folder / "model.pt").is_file()
    if pretrained:
        loaded = importlib.import_module("checkpoints").read(folder)
        first, tokenizer = {"config": {"data": ""}}, loaded.tokenizer
        loaded.model.config = replace(loaded.model.config, max_length=loaded.longest)
        if loaded.unit:
            print(f"note: {folder} scales its vectors to length 1; here they are measured as the pooling gives them", file=sys.stderr)
        if not arguments.data and not (arguments.tasks and set(arguments.tasks) <= {*OWN_ROWS, *(["gap"] if arguments.sets else [])}):
            raise BadInput(f"{folder} is a pretrained model, without rows of its own: give --data, or --tasks with sets of their own, such as sts")
    else:
        first, tokenizer = read_run(folder)
    config = first["config"]
    own = config.get("eval_data") or config["data"]
    spec = arguments.data or own
    if Path(spec).exists() and Path(own).exists() and Path(spec).resolve() == Path(own).resolve():
        spec = own                                                       # the same file under another name
    langs = arguments.langs or (names(config.get("langs") or "") if spec == own else None)
    held_out = spec in data.EMBEDDED or spec == config["data"]           # other files were not trained on: all their rows serve
    split = arguments.split or ("test" if held_out else "all")
    device = usable_device(arguments.device)
    model = loaded.model.to(device) if pretrained else load(folder / "model.pt", device)
    check_flags(arguments)
    if bool(arguments.hard) != bool(arguments.hard_types):
        raise BadInput("--hard and --hard-types go together: the altered sentences, and what each was made from")
    known, skip_bad = None, bool(config.get("skip_bad"))
    if not pretrained and model.config.causal and not JUDGES.keys().isdisjoint(arguments.tasks or TASKS):
        try:
            known = seen(config["data"], names(config.get("langs") or ""), not config.get("eval_data"), skip_bad)
        except BadInput as error:                                        # the data may be on another machine
            print(f"note: the scores on unseen rows and new prompts are left out: {error}", file=sys.stderr)
    header = config["cut"] if config.get("chat") == "shared-header" else 0
    if header and (Path(spec).is_dir() or not data.has_header(spec, langs, skip_bad)):
        print(f"note: {spec} has no system texts in the columns chosen, and this run was trained with them: rows open with [CLS] alone", file=sys.stderr)
        header = 0
    asked = Sentences(arguments.sets and tuple(arguments.sets), tuple(arguments.task_langs or ("en",)), not arguments.no_controls, arguments.probe_epochs,
                      arguments.probe_released)
    limit = arguments.limit if arguments.limit is not None or Path(spec).is_dir() else 1000
    subject = Subject(model, tokenizer, spec, langs, split, limit, skip_bad, progress=True, known=known, answer_limit=limit,
                      header=header, frames=first.get("frames"), files=arguments.files, max_new=arguments.max_new, databases=arguments.databases,
                      sentences=asked, hard=arguments.hard and (arguments.hard, arguments.hard_types))
    results = run(subject, arguments.tasks)
    ending = file_ending(arguments)
    if arguments.arrays:
        data.write_atomic(folder / f"arrays{ending}", (json.dumps(arrays(subject), allow_nan=False) + "\n").encode())
    write_results(folder, f"eval{ending}", results)
    if arguments.json:
        print(json.dumps(results))
        return
    print(table(results))
    if "geometry/rankme" in results:
        print(diagnose(results)[1])
    if "retrieval/xsim" not in results and not arguments.tasks:
        print("note: retrieval was left out, it needs two columns of texts", file=sys.stderr)


def names(text):
    """"a,b" -> ["a", "b"], the type of a flag that takes several."""
    return [part.strip() for part in text.split(",") if part.strip()]


COMMANDS = {"compare": "compare"} | dict.fromkeys(["export", "encode", "nearest"], "encoder")           # first word -> file whose main(argv) does it


def main(argv=None):
    """Returns the exit status: 0, or 2 for bad input, which is one line on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        return importlib.import_module(COMMANDS[argv[0]]).main(argv)
    parser = argparse.ArgumentParser(prog="evaluate.py", description="Evaluate a run.", allow_abbrev=False,
                                     epilog=f"Other commands, each with its own --help: {', '.join(f'evaluate.py {word}' for word in COMMANDS)}")
    parser.add_argument("run", metavar="RUN", help="folder of a run, such as out/mexma, or of a pretrained model")
    parser.add_argument("--data", help="other data than the run's own: toy, files as for train.py, or a folder of files CODE.devtest")
    parser.add_argument("--langs", type=names, help="languages, such as en,de; the first is searched in (default: the run's)")
    parser.add_argument("--split", help="train, valid, test, or all of a file (default: what was not trained on)")
    usual = ", ".join(name for name in TASKS if name not in ON_REQUEST)
    parser.add_argument("--tasks", type=names, help=f"default: {usual}, as far as they apply; on request: {', '.join(ON_REQUEST)}")
    parser.add_argument("--files", default="data", help="folder with the data sets of tasks that have their own (default: data, where data.py downloads to)")
    parser.add_argument("--databases", metavar="DIR", help="folder with database/DB/DB.sqlite of task spider (default: FILES/spider)")
    parser.add_argument("--max-new", type=int, metavar="N", help="cut answers after N tokens (default: twice the longest gold answer + 8)")
    parser.add_argument("--limit", type=int, help="at most so many rows (default: 1000; of a folder, all)")
    parser.add_argument("--arrays", action="store_true", help="also write RUN/arrays.json: spectrum, vectors, cosines, attention, for plots")
    parser.add_argument("--hard", metavar="FILE", help="altered sentences of the first language, xsim++'s eng_Latn_augmented.devtest")
    parser.add_argument("--hard-types", metavar="FILE", help="what each was made from, xsim++'s eng_Latn_errtype.devtest.json")
    parser.add_argument("--sets", type=names, help="of the tasks on published sets only these, such as sst2,mrpc (default: all that are there)")
    parser.add_argument("--task-langs", type=names, help=f"languages of {', '.join(IN_LANGUAGES)} (default: en)")
    parser.add_argument("--no-controls", action="store_true", help="leave out the same scores of an untrained model and of a bag of embeddings")
    parser.add_argument("--probe-epochs", type=int, help="epochs of hybrid-probes (default: the paper's, 10 to 90)")
    parser.add_argument("--probe-released", action="store_true", help="hybrid-probes as the paper's code: epoch chosen on the reported rows")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda if there is one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return reported(evaluate_run, parser.parse_args(argv))


def reported(work, options):
    """Do the work of a command -> exit status: 0; 2 for bad input, or a file that cannot be read or written, which is one line on stderr; 130 if stopped."""
    try:
        return work(options) or 0
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:                                              # whoever reads, such as head, has seen enough
        os.dup2(open(os.devnull, "wb").fileno(), sys.stdout.fileno())
    except OSError as error:
        print(f"error: {error.filename or 'a file'}: {error.strerror or error}; choose another place, or free this one", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; nothing is half written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
