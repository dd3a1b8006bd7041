"""What a trained model is worth: sentence vectors, retrieval across languages, the geometry of the vectors, written answers.

    python evaluate.py out/x                                # everything that applies, on the run's own test rows
    python evaluate.py out/x --data pairs.tsv --langs en,de --tasks retrieval --json
    python evaluate.py out/y --tasks generate               # of a causal model: does it write the second column, given the first?

First `embed` and `generate`; then the tasks, whose
numbers are named `task/metric` or `task/metric/detail`; then the command line. Error rates, accuracies and shares are percentages.
"""
import argparse
import contextlib
import difflib
import functools
import importlib
import json
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tqdm import tqdm

import data
import grammar
from data import BadInput
from metrics import diagnose, geometry, mine, top1, xsim, xsim_plus
from model import Packed, load, rotary, rotate, sinusoids

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
    heads = [[mark.cls]] * len(ids) if headers is None else [[mark.cls, *head[:header].tolist(), mark.sep] for head in data.encode(tokenizer, list(headers))]
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
    vectors, device = torch.empty(len(rows), model.config.width), next(model.parameters()).device
    with in_eval_mode(model):
        plan = batches([len(row) for row in rows], tokens_per_batch)
        for batch in tqdm(plan, desc="embed", leave=False, disable=not (progress and sys.stderr.isatty())):
            packed = Packed.of([rows[i] for i in batch], causal=model.config.causal).to(device)
            vectors[batch] = model.pool(model(packed), packed, pool).float().cpu()             # (R, D)
    return vectors


def extend(model, tokens, start, cache):
    """Feed the next n tokens of each row (R, n), the first at place `start` -> logits (R, V) of what comes then. `cache`: each
    layer's keys and values (R, Hkv, L, K), filled in place. Causal attention is asked for at start 0; later n must be 1."""
    c, angles, end = model.config, None, start + tokens.shape[1]
    post, places = c.norm_place == "post", torch.arange(start, end, device=tokens.device)
    x = model.embed(tokens)                                              # (R, n, D)
    if c.positions == "learned":
        x = x + model.place(places + c.position_offset)
    elif c.positions == "sinusoidal":
        x = x + sinusoids(places, c.width).to(x.dtype)
    else:
        angles = rotary(places, c.width // c.heads, c.theta)
    x = model.norm(x) if post else x
    for block, past in zip(model.blocks, cache):
        qkv = block.qkv(x if post else block.norm1(x)).unflatten(-1, (-1, block.size))         # (R, n, H + 2 Hkv, K)
        q, k, v = qkv.split([c.heads, block.kv_heads, block.kv_heads], 2)
        q, k = (q, k) if angles is None else (rotate(q, angles), rotate(k, angles))
        for kept, new in zip(past, (k, v)):
            kept[:, :, start:end] = new.transpose(1, 2)
        k, v = (kept[:, :, :end] for kept in past)                       # (R, Hkv, end, K)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=start == 0, enable_gqa=c.heads != block.kv_heads)
        out = block.out(out.transpose(1, 2).flatten(2))                  # (R, n, D)
        x = block.norm1(x + out) if post else x + out
        x = block.norm2(x + block.feed(x)) if post else x + block.feed(block.norm2(x))
    return model.logits(x[:, -1] if post else model.norm(x[:, -1]))


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
            shape = len(batch), c.kv_heads or c.heads, max(limits[i] for i in batch), c.width // c.heads
            cache = [[torch.empty(shape, dtype=model.embed.weight.dtype, device=device) for _ in "kv"] for _ in model.blocks]
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

def test_rows(spec, langs=None, split="test", limit=1000, skip_bad=False, header=False):
    """The rows to evaluate: ({language: texts, aligned}, [(text, row, type of error), ...]). `split`: train, valid, test, or all
    rows of a file; `header`: a chat's "system" texts are a column too. The second are hard negatives of the first language, which the
    embedded parallel data has because each of its sentences comes from a known meaning; it is rendered here, in one style, so that a
    negative differs by its error alone."""
    if split not in ("train", "valid", "test", "all"):
        raise BadInput(f"split {split!r} is unknown: choose from train, valid, test, all")
    part = "test" if split == "all" else split
    if spec != "toy":
        texts = data.texts(spec, part, langs, limit, holdout=split != "all", skip_bad=skip_bad, header=header)
        if header and "system" not in texts:
            raise BadInput(f"{spec} has no system texts, and --chat shared-header opens every row with one: add them, or choose other rows")
        return texts, []
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
        found = {f"xsim/{pair}": xsim(x, y, texts=gold), "xsim_distance": xsim(x, y, "distance", texts=gold),
                 "xsim_absolute": xsim(x, y, "absolute", texts=gold),
                 f"top1/{pair}": top1(x, y), f"top1/{first}-{other}": top1(y, x)}
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


POOLINGS = ("mean", "max", "weighted", "attention")                       # those of Predict-and-Reconstruct's tables


def poolings(vectors):
    """{pooling: {language: (N, D)}} -> "mean/uniformity" and so on: Predict-and-Reconstruct's six metrics under each of its poolings."""
    metrics = ("spectral_entropy", "effective_rank", "stable_rank", "rank_90", "alignment", "uniformity")
    return {f"{pool}/{name}": value for pool, each in vectors.items() for name, value in geometry(each).items() if name in metrics}


def seen(spec, langs=None, holdout=True, skip_bad=False):
    """All texts of the training split of a data set, a set: what `generation` needs to tell recall from more than that."""
    columns = data.texts(spec, "train", langs, holdout=holdout, skip_bad=skip_bad).values()
    return {text.strip() for column in columns for text in column}


def generation(model, tokenizer, prompts, golds, known=None, max_new=None, progress=False, headers=None, header=None):
    """What a causal model writes after [CLS] (header [SEP]) prompt [SEP], up to the next [SEP], against the gold texts -> percentages and counts.
    max_new: by default twice the longest gold text + 8 tokens. `known`, the texts of the training data, adds the exact match on rows
    whose prompt, or whose gold text, is none of them. A prompt that fills the whole model is cut, to leave room for an answer."""
    mark, longest = data.special(tokenizer), model.config.max_length
    max_new = max_new or 2 * max(len(ids) for ids in data.encode(tokenizer, golds)) + 8
    rows = rows_of(tokenizer, prompts, headers, header=header)
    cut, most = sum(len(row) >= longest for row in rows), max(longest // 2, longest - max_new)
    rows = [row if len(row) < longest else row[:most - 1] + [mark.sep] for row in rows]
    written, stopped = generate(model, rows, mark.sep, max_new, progress=progress)
    written = [tokenizer.decode(ids) for ids in written]
    right = [exact(*pair) for pair in zip(written, golds)]
    share = lambda flags: 100 * sum(flags) / len(flags)
    scores = {"exact": share(right), "startswith": share([starts_with(*pair) for pair in zip(written, golds)]),
              "stop": share(stopped), "truncated": 100 - share(stopped), "prompts_cut": 100 * cut / len(rows), "rows": len(rows)}
    for name, texts in () if known is None else (("new_prompt", prompts), ("unseen", golds)):
        new = [flag for flag, text in zip(right, texts) if text.strip() not in known]
        scores |= {f"exact_{name}": share(new)} if new else {}
        scores[f"rows_{name}"] = len(new)
    return scores


class Subject:
    """A model and the rows it is evaluated on. Rows, vectors and answers are made when a task first asks for them, once for all tasks.

    texts {column: N texts, aligned}, hard [(text, row, type of error)] of the first column, headers N texts or None; vectors {column:
    (N, D)}, negatives (M, D) of `hard`; answers (texts written, did each end?, how many prompts were cut)."""

    def __init__(self, model, tokenizer, spec, langs=None, split="test", limit=1000, skip_bad=False, progress=False, known=None,
                 answer_limit=200, header=0, frames=None, files="data"):
        if limit is not None and limit < 2:
            raise BadInput(f"limit {limit} is too low: an evaluation needs at least 2 rows")
        self.model, self.tokenizer, self.spec, self.split, self.progress = model, tokenizer, spec, split, progress
        self.known, self.answer_limit, self.header, self.frames, self.files = known, answer_limit, header, frames, Path(files)
        self.read = functools.partial(test_rows, spec, langs, split, limit, skip_bad, bool(header))

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

    def embed(self, rows, pool=None):
        vectors = embed_rows(self.model, rows, progress=self.progress, pool=pool)
        if bad := int((~vectors.isfinite()).any(1).sum()):
            raise BadInput(f"the model gives NaN or infinity for {bad} of {len(vectors)} texts: its training has diverged")
        return vectors

    def encode(self, texts, pool=None):
        """Any texts -> (N, D), in the frame of the first column."""
        return self.embed(rows_of(self.tokenizer, texts, None, self.frames and self.frames[0], self.model.config.max_length), pool)

    def pooled(self, pool=None):
        """{column: (N, D)} with another pooling than the model's."""
        rows = rows_of_columns(self.model, self.tokenizer, self.texts, self.headers, self.header, self.frames)
        return dict(zip(self.texts, self.embed(rows, pool).split(self.count)))

    vectors = functools.cached_property(pooled)
    negatives = functools.cached_property(lambda self: self.encode([line for line, _, _ in self.hard]))


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
        return f"answers one column with another, and {subject.spec} has {len(subject.texts)}: choose two with --langs a,b"
    return ""


def task_retrieval(subject):
    return {"rows": subject.count} | retrieval(subject.vectors, subject.texts, subject.negatives, subject.hard)


def task_geometry(subject):
    return {"rows": subject.count} | geometry(subject.vectors)


def task_generate(subject):
    few = slice(subject.answer_limit)
    return generation(subject.model, subject.tokenizer, *(column[few] for column in subject.texts.values()), subject.known,
                      progress=subject.progress, headers=subject.headers and subject.headers[few], header=subject.header)


def task_poolings(subject):
    return {"rows": subject.count} | poolings({pool: subject.pooled(pool) for pool in POOLINGS})


TASKS = {
    "retrieval": Task(task_retrieval, refuses_retrieval),
    "geometry": Task(task_geometry),
    "generate": Task(task_generate, refuses_generate),
    "poolings": Task(task_poolings, default=False),
}
ON_REQUEST = [name for name, task in TASKS.items() if not task.default]


def run(subject, tasks=None):
    """Evaluate a Subject -> {"task/metric": number}, as in eval.json. tasks=None is all that apply but those ON_REQUEST. Raises
    BadInput for a task that is unknown or that the model or the data cannot serve."""
    for task in tasks or ():
        if task not in TASKS:
            near = difflib.get_close_matches(task, TASKS, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise BadInput(f"task {task!r} is unknown: choose from {', '.join(TASKS)}{hint}")
        if reason := TASKS[task].refuses(subject):
            raise BadInput(f"task {task!r} {reason}")
    tasks = tasks or [name for name, task in TASKS.items() if task.default and not task.refuses(subject)]
    return {f"{task}/{name}": value for task in tasks for name, value in TASKS[task].scores(subject).items()}


class Translation(NamedTuple):
    query: str
    found: str  # what the model takes for its translation into the first language
    gold: str
    right: bool


def translations(model, tokenizer, texts, n=5, header=0, frames=None):
    """n examples of retrieval to read: {language: texts, aligned} -> list of Translation, the languages in turn, the rows spread
    evenly, each found among all texts of the first language as `xsim` does. No example if there is one language."""
    headers = texts["system"] if header else None
    texts = {name: lines for name, lines in texts.items() if name != "system" or not header}
    first, *others = texts
    count = len(texts[first])
    if not others or not count:
        return []
    rows = rows_of_columns(model, tokenizer, texts, headers, header, frames)
    vectors = dict(zip(texts, embed_rows(model, rows).split(count)))
    found = {other: mine(vectors[other], vectors[first]).tolist() for other in others[:n]}
    n, examples = min(n, count), []
    for turn in range(n):
        other, row = others[turn % len(others)], turn * count // n
        gold, taken = texts[first][row], texts[first][found[other][row]]
        examples.append(Translation(texts[other][row], taken, gold, taken == gold))
    return examples


# ---------------------------------------------------------------------------------------------------------------------
# Command line

ABOUT = {  # metric -> unit, which way is better, what it is
    "xsim": ("%", "lower", "wrong translation found: ratio margin, k = 4"),
    "xsim_distance": ("%", "lower", "the same by distance margin"),
    "xsim_absolute": ("%", "lower", "the same by cosine alone"),
    "top1": ("%", "higher", "nearest by cosine is the translation, both directions"),
    "xsim++": ("%", "lower", "wrong translation found among hard negatives"),
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
    "exact": ("%", "higher", "greedy answer is the gold text"),
    "startswith": ("%", "higher", "it begins with the gold text"),
    "stop": ("%", "higher", "it ended with the stop token"),
    "truncated": ("%", "lower", "it did not, and was cut"),
    "prompts_cut": ("%", "lower", "prompts that fill the whole model"),
    "exact_new_prompt": ("%", "higher", "exact, where the prompt is not in the training data"),
    "exact_unseen": ("%", "higher", "exact, where the gold text is not in the training data"),
    "rows": ("", "", "rows of the data"),
    "rows_new_prompt": ("", "", "those whose prompt is not in the training data"),
    "rows_unseen": ("", "", "those whose gold text is not in the training data"),
}


def table(results):
    """Results -> aligned lines: name, value, unit, which way is better, what it is. Cosines of single pairs are in the file."""
    shown = [name for name in results if not (name.startswith("geometry/cosine/") and name.count("/") > 2)]
    width, lines = max(map(len, shown)), []
    for name in shown:
        metric = name.partition("/")[2]
        metric = metric.partition("/")[2] or metric if name.startswith("poolings/") else metric
        sign, better, about = ABOUT.get(metric) or (*ABOUT[metric.split("/")[0]][:2], "")      # a detail has its metric's unit
        value = f"{results[name]}" if metric.startswith("rows") else f"{results[name]:.{2 if sign else 4}f}"
        lines.append(f"{name:<{width}} {value:>10} {sign:<1}  {better:<6}  {about}".rstrip())
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


def write_results(folder, name, results):
    """Write results to folder/name, whole or not at all. In eval.json other tasks' numbers stay if they are newer than the model."""
    path, kept, tasks = folder / name, {}, {key.split("/")[0] for key in results}
    if name == "eval.json" and path.is_file() and path.stat().st_mtime >= (folder / "model.pt").stat().st_mtime:
        with contextlib.suppress(ValueError, AttributeError):            # a damaged file is written anew
            old = json.loads(path.read_text(encoding="utf-8"))
            kept = {key: value for key, value in old.items() if key.split("/")[0] not in tasks}
    data.write_atomic(path, (json.dumps(kept | results, indent=1, allow_nan=False) + "\n").encode())


def evaluate_run(arguments):
    """`evaluate.py RUN`: numbers to stdout and RUN/eval.json. Rows other than the run's own test rows get a file of their own,
    named by what was given, RUN/eval-DATA-SPLIT-LANGUAGES.json, so that the eval.json of all runs hold the same thing."""
    folder = Path(arguments.run)
    first = read_config(folder)
    config, tokenizer = first["config"], data.read_tokenizer(folder / "tokenizer.json")
    if first.get("tokenizer_hash", data.tokenizer_hash(tokenizer)) != data.tokenizer_hash(tokenizer):
        raise BadInput(f"{folder / 'tokenizer.json'} is not the one that the run was trained with: put that file back")
    own = config.get("eval_data") or config["data"]
    spec = arguments.data or own
    if Path(spec).exists() and Path(own).exists() and Path(spec).resolve() == Path(own).resolve():
        spec = own                                                       # the same file under another name
    langs = arguments.langs or (names(config.get("langs") or "") if spec == own else None)
    held_out = spec in data.EMBEDDED or spec == config["data"]           # other files were not trained on: all their rows serve
    split = arguments.split or ("test" if held_out else "all")
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if torch.device(device).type not in ("cpu", "cuda", "mps"):
            raise RuntimeError
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):                               # an AssertionError where torch has no CUDA at all
        raise BadInput(f"device {device!r} cannot be used here: leave --device out, or give cpu") from None
    model = load(folder / "model.pt", device)
    if arguments.tasks == []:
        raise BadInput(f"--tasks names no task: choose from {', '.join(TASKS)}, or leave it out")
    known, skip_bad = None, bool(config.get("skip_bad"))
    if model.config.causal and "generate" in (arguments.tasks or TASKS):
        try:
            known = seen(config["data"], names(config.get("langs") or ""), not config.get("eval_data"), skip_bad)
        except BadInput as error:                                        # the data may be on another machine
            print(f"note: generate/exact_unseen and exact_new_prompt are left out: {error}", file=sys.stderr)
    header = config["cut"] if config.get("chat") == "shared-header" else 0
    if header and not data.has_header(spec, langs, skip_bad):
        print(f"note: {spec} has no system texts in the columns chosen, and this run was trained with them: rows open with [CLS] alone", file=sys.stderr)
        header = 0
    results = run(Subject(model, tokenizer, spec, langs, split, arguments.limit, skip_bad, progress=True, known=known,
                          answer_limit=arguments.limit, header=header, frames=first.get("frames"), files=arguments.files), arguments.tasks)
    parts = [Path(arguments.data.split(",")[0]).name.split(".")[0]] if arguments.data else []
    parts += [arguments.split] if arguments.split else []
    write_results(folder, "-".join(["eval", *parts, *(arguments.langs or [])]) + ".json", results)
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


COMMANDS = {"export": "encoder", "encode": "encoder", "nearest": "encoder"}  # word -> file whose main() does it


def main(argv=None):
    """Returns the exit status: 0, or 2 for bad input, which is one line on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        return importlib.import_module(COMMANDS[argv[0]]).main(argv)
    parser = argparse.ArgumentParser(prog="evaluate.py", description="Evaluate a run.", allow_abbrev=False,
                                     epilog=f"Other commands, each with its own --help: evaluate.py {', evaluate.py '.join(COMMANDS)}")
    parser.add_argument("run", metavar="RUN", help="folder of a run, such as out/mexma")
    parser.add_argument("--data", help="other data than the run's own: toy, or files as for train.py")
    parser.add_argument("--langs", type=names, help="languages, such as en,de; the first is searched in (default: the run's)")
    parser.add_argument("--split", help="train, valid, test, or all of a file (default: what was not trained on)")
    parser.add_argument("--tasks", type=names, help=f"some of {','.join(TASKS)} (default: all that apply, without {', '.join(ON_REQUEST)})")
    parser.add_argument("--files", default="data", help="folder with the data sets of tasks that have their own (default: data, where data.py downloads to)")
    parser.add_argument("--limit", type=int, default=1000, help="at most so many rows (default: 1000)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda if there is one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    try:
        evaluate_run(parser.parse_args(argv))
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
