"""What the papers draw of a model, drawn of a run: PNGs of its vectors, tokens and curves.

    python -m results plots out/mexma --out plots    # of a run's test rows and its log
    python -m results plots out/x --data sst2.tsv --langs text     # of other rows
    python -m results plots out/x --files gap.json   # and of numbers that --out wrote into out/x:
                                                     # of the task gap, of finetune --task mlqa
    python -m results plots out/a-0 out/a-1 out/b-0 --flops    # curves: a line for a and for b
"""

import itertools
import math
import re
import textwrap
from pathlib import Path

import torch
from matplotlib.font_manager import findfont, get_font

import evaluate
import train
from corpora.folder import read_results, write_atomic
from corpora.program import Parser, comma_list
from tasks import analysis
from tasks.metrics import alignment

from . import compare, plots
from .flops import run_flops

# ---- curves

MEASURES = ("retrieval/xsim", "generate/exact", "probe/mean", "geometry/rankme",
            "geometry/cosine/translations", "geometry/cosine/same")
NO_TERMS = train.NO_TERMS | {"eval"}
NATS = ("mlm", "ntp")  # terms that are always cross-entropies


def points_of(log, name):
    """A log -> {step: number} of a term of the loss or of an evaluation's metric."""
    points = {}
    for record in log[1:]:
        value = record.get("eval", record).get(name)
        if isinstance(value, (int, float)):
            points[record["step"]] = value
    return points


def curve(logs, name):
    """The logs of the seeds of one row -> steps (P,), numbers (seeds, P); both may be empty."""
    each = [points_of(log, name) for log in logs]
    steps = sorted(set.intersection(*map(set, each)))
    return steps, [[points[step] for step in steps] for points in each]


def named_in(log):
    """A log -> {title of a panel: what it shows, of training and of the rows held out}."""
    objective = log[0]["config"]["objective"]
    terms = dict.fromkeys(itertools.chain(*log[1:]))
    # Losses of different objectives cannot be compared.
    found = {f"{objective}: {term}": (term, f"validation/{term}")
             for term in terms if term not in NO_TERMS}
    return found | {f"{name}: {evaluate.about(name)[2]}": (name,) for name in MEASURES}


def unit_and_way(name):
    """What stands at the axis of a term or a metric, such as "nats, lower is better"."""
    known = evaluate.TASKS.keys() & {name.split("/")[0]}
    unit, better, _ = evaluate.about(name if known else f"validation/{name}")
    parts = ["nats" if name in NATS else unit, better and f"{better} is better"]
    return ", ".join(filter(None, parts))


def curves(logs, tflop=None):
    """{label: [the log of each seed]} -> a panel for each term of the loss and each of MEASURES
    that the logs have: the mean of the seeds and a band from least to most. With `tflop`, {label:
    of a step}, against compute."""
    panels = {}
    for label, seeds in logs.items():
        for title, names in named_in(seeds[0]).items():
            for name, style in zip(names, ("-", "--")):
                steps, values = curve(seeds, name)
                if steps:
                    panels.setdefault(title, (names[0], {}))[1][label, style] = (steps, values)
    # The terms of the losses first, of all objectives.
    panels = dict(sorted(panels.items(), key=lambda panel: "/" in panel[0]))
    figure, axes = plots.panels(-(-len(panels) // 2), 2, height=1.9,
                                titles=[textwrap.fill(title, 40) for title in panels])
    handles = {}
    for axis, (name, drawn) in zip(axes, panels.values(), strict=False):
        for (label, style), (steps, values) in drawn.items():
            colour = plots.COLOURS[list(logs).index(label) % 7]
            places = [step * tflop[label] for step in steps] if tflop else steps
            values = torch.tensor(values)
            line, = axis.plot(places, values.mean(0), style, color=colour, linewidth=1.4)
            axis.fill_between(places, *values.aminmax(dim=0), color=colour, alpha=0.2, linewidth=0)
            if style == "-":
                handles[label] = line
        plots.finish(axis, "compute, TFLOP" if tflop else "training step", unit_and_way(name))
    for axis in axes[len(panels):]:
        axis.axis("off")
    handles["on rows held out"], = axes[0].plot([], [], "--", color="black")
    figure.legend(handles.values(), handles, loc="outside upper left", fontsize=plots.SMALL + 1,
                  ncols=2, frameon=False)
    return figure


# ---- tokens


def pieces_of(tokenizer, ids):
    """The tokens of a row as texts, without those around it; None if the font lacks a letter, say a
    Chinese one."""
    letters = get_font(findfont(plots.MONO)).get_charmap()
    pieces = [tokenizer.decode([index]) for index in ids[1:-1]]
    return pieces if letters.keys() >= set(map(ord, "".join(pieces))) else None


def looked_at(evaluation, count=4):
    """A few texts of each language, the darker where the sentence vector's token looks in the last
    layer, mean of the heads [MEXMA, figs 7 to 10]; None if the font has letters for none."""
    rows = {}
    for language, ids in evaluation.ids.items():
        weights = analysis.sentence_attention(evaluation, ids[:count])              # (H, L) each
        for number, (row, seen) in enumerate(zip(ids, weights), 1):
            seen = seen.mean(0)[1:-1]  # without [CLS] and [SEP]
            pieces = pieces_of(evaluation.tokenizer, row)
            if pieces:
                rows[f"{language} {number}"] = list(zip(pieces, (seen / seen.max()).tolist()))
    return plots.words(rows) if rows else None


def heads(evaluation):
    """Where each head of the last layer looks from the first text's sentence vector [MEXMA, fig.
    11]; None if the font lacks its letters."""
    ids = next(iter(evaluation.ids.values()))[0]
    pieces = pieces_of(evaluation.tokenizer, ids)
    if not pieces:
        return None
    weights, = analysis.sentence_attention(evaluation, [ids])                        # (H, L)
    names = [f"head {number}" for number in range(1, len(weights) + 1)]
    axis, = plots.panels(height=1.8)[1]
    return plots.heat((100 * weights).round(), names, ["start", *pieces, "end"],
                      label="attention, %", low=0, axis=axis)


def neighbours(evaluation, count=3, rows=200):
    """A token of each of the first texts, and below it the three of all texts with the nearest
    states, each where it stands [MEXMA, figs 2 to 6]."""
    languages = list(evaluation.ids)
    columns = [ids[:rows] for ids in evaluation.ids.values()]
    states = [analysis.token_states(evaluation, column) for column in columns]
    asked, found = analysis.nearest_tokens(columns, states, evaluation.tokenizer.special.ids,
                                           range(min(count, len(columns[0]))), 1, 3)
    shown = {}
    for number, (query, near) in enumerate(zip(asked.tolist(), found.tolist()), 1):
        for place, (column, row, token) in enumerate([query, *near]):
            ids = columns[column][row]
            pieces = pieces_of(evaluation.tokenizer, ids)
            colours = [(0 if place == 0 else 4) if one == token else None for one in ids[1:-1]]
            label = f"{number} {('token', 'first', 'second', 'third')[place]}, {languages[column]}"
            if pieces:
                shown[label] = list(zip(pieces, colours))
    return plots.words(shown) if shown else None


# ---- numbers that tasks wrote


def answers(scores):
    """The F1 that `finetune --task mlqa` found, the language of the context by that of the question
    [BERT-JEPA, fig. 3]."""
    cells = {}
    for name, number in scores.items():
        part = re.fullmatch(r"mlqa/f1/(\w\w)-(\w\w)", name)
        if part:
            cells[part[1], part[2]] = number
    contexts = list(dict.fromkeys(context for context, _ in cells))
    questions = list(dict.fromkeys(question for _, question in cells))
    table = torch.full((len(contexts), len(questions)), math.nan)
    for (context, question), number in cells.items():
        table[contexts.index(context), questions.index(question)] = number
    return plots.heat(table, contexts, questions, "question", "context", "F1, %")


def of_poolings(scores):
    """What the task gap found of each set under four poolings [Predict and Reconstruct, fig. 2]."""
    shown = {"spectral_entropy": "spectral entropy\nhigher is better",
             "semantic": "probe of the label, %\nhigher is better",
             "uniformity": "uniformity\nlower is better"}
    figure, axes = plots.panels(1, 3, 2.6)
    for axis, (metric, name) in zip(axes, shown.items()):
        groups = {}
        for key, number in scores.items():
            part = re.fullmatch(f"gap/(.+)/(.+)/{metric}", key)
            if part and part[2] in analysis.POOLINGS:
                groups.setdefault(part[2], {})[part[1]] = number
        plots.bars(groups, name, axis=axis)
        # The first panel's names of the sets are enough.
        if axis is not axes[0] and axis.get_legend():
            axis.get_legend().remove()
    return figure


# ---- the command


def of_run(folder, options):
    """The pictures of one run, {name: figure}; its first vectors, {label: (N, D)}; what
    `differences` takes of it; {name of a picture: what `plane` takes}."""
    run = evaluate.open_run(folder)
    evaluation = evaluate.evaluation_of(run, options.data, options.langs, limit=options.limit)
    x, *others = evaluation.vectors.values()
    pictures = {}
    pairs = {}
    planes = {}
    causal = run.model.config.causal
    if others:
        figure, (left, right) = plots.panels(1, 2, 3, ["PCA", "t-SNE"])
        plots.pca(evaluation.vectors, left)
        plots.tsne(evaluation.vectors, right)
        pictures[f"clouds-{folder.name}"] = figure
        pictures[f"cosines-{folder.name}"] = plots.cosines(evaluation.vectors)
        # Text and Code where all models have them, and not at [PRED].
        same = analysis.last_tokens(evaluation) if causal else evaluation.vectors
        pairs[folder.name] = tuple(same.values())[:2]
        log = evaluate.read_log(folder)
        cosine = points_of(log, "geometry/cosine/translations")
        uniform = points_of(log, "geometry/uniformity")
        # Unit vectors: |u - v|^2 = 2 - 2 cos.
        way = [(2 - 2 * cosine[step], uniform[step]) for step in cosine]
        # Of other rows, and of a model that was not trained here, only the end is known.
        if options.data or not way:
            way = [(alignment(x, others[0]), evaluate.uniformity(x))]
        planes["plane"] = {folder.name: way}
    if run.model.blocks and not causal:
        for draw in (looked_at, heads, neighbours):
            pictures[f"{draw.__name__}-{folder.name}"] = draw(evaluation)
    found = {}
    for name in options.files:
        found |= read_results(folder / name)
    # The task gap measures within the classes of a set, as the paper's planes have it.
    for name, number in found.items():
        part = re.fullmatch("gap/(.+)/(.+)/class_alignment", name)
        if part and part[2] in analysis.POOLINGS:
            uniform = found[f"gap/{part[1]}/{part[2]}/uniformity"]
            points = planes.setdefault(f"plane-{part[2]}", {})
            points[f"{folder.name}, {part[1]}"] = [(number, uniform)]
            pictures[f"poolings-{folder.name}"] = of_poolings(found)
    if "mlqa/f1" in found:
        pictures[f"mlqa-{folder.name}"] = answers(found)
    # Where the font lacks the letters there is no picture of words.
    drawn = {name: figure for name, figure in pictures.items() if figure}
    return drawn, {f"{folder.name}, {next(iter(evaluation.vectors))}": x}, pairs, planes


def main(arguments):
    parser = Parser("python -m results plots", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--out", default="plots", metavar="FOLDER", help="for the PNGs [plots]")
    parser.add_argument("--limit", type=int, default=500, help="rows at most [500]")
    parser.add_argument("--data", help="other rows than the runs' own, as evaluate.py takes them")
    parser.add_argument("--langs", type=comma_list, default=[], help="columns of --data [all]")
    parser.add_argument("--files", type=comma_list, default=[],
                        help="of each run: what --out of tasks' gap or finetune mlqa wrote [none]")
    parser.add_argument("--flops", action="store_true", help="curves against compute, not steps")
    options = parser.parse_args(arguments)
    pictures = {}
    firsts = {}
    pairs = {}
    planes = {}
    for folder in map(Path, options.runs):
        *found, own_planes = of_run(folder, options)
        for whole, part in zip((pictures, firsts, pairs), found):
            whole |= part
        for name, points in own_planes.items():
            planes.setdefault(name, {}).update(points)
    logs = {}
    tflop = {}
    groups = compare.group([compare.read_run(folder, ()) for folder in options.runs])
    for label, runs in groups.items():
        logs[label] = [evaluate.read_log(run.folder) for run in runs]
        if options.flops:
            tflop[label] = run_flops(runs[0].folder) / runs[0].steps / 1e12
    pictures |= {"spectrum": plots.spectrum(firsts), "explained": plots.explained(firsts),
                 "curves": curves(logs, tflop)}
    if pairs:
        pictures["differences"] = plots.differences(pairs)
    for name, points in planes.items():
        pictures[name] = plots.plane(points)
    for name, figure in pictures.items():
        write_atomic(Path(options.out) / f"{name}.png", plots.png(figure))
        print(f"{options.out}/{name}.png")
