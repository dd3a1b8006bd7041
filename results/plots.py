"""Pictures of vectors, masks, tokens and logs, each a function that returns a matplotlib Figure.

    python -m results plots out/mexma --out plots    # of a run's test rows and its log
    python -m results plots out/x --files gap.json   # and of numbers that --out wrote into out/x:
                                                     # gap's plane, the cells of MLQA
    python -m results plots out/a-0 out/a-1 out/b-0 --out plots    # curves: a line for a and for b

In a notebook: plots.mask(packed.mask(0)), plots.spectrum({"mexma": vectors}), ... Those that take
an `axis` draw there if they are given one: figure, axes = plots.panels(1, 2).
"""

import io
import math
import re
from pathlib import Path

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from PIL import Image

import evaluate
from corpora.folder import read_results, write_atomic
from corpora.program import Parser, comma_list
from tasks.metrics import alignment

# Told apart without red and green [Okabe & Ito 2008].
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
MONO = "DejaVu Sans Mono"  # comes with matplotlib
SMALL = 7  # points: numbers at an axis; its name has one more


class Picture(Figure):
    """A Figure that a notebook shows as a PNG, the same each time."""

    def _repr_png_(self):
        return png(self)


def panels(rows=1, columns=1, height=2.2, titles=()):
    """A Picture and its axes, row by row: 3.6 inches wide for one column, 5.4 for more."""
    width = 3.6 if columns == 1 else 5.4
    figure = Picture(figsize=(width, height * rows), dpi=160, layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(which="both", labelsize=SMALL)
        axis.yaxis.get_offset_text().set_fontsize(SMALL)
        # Where the colours begin again, dashes.
        axis.set_prop_cycle(color=2 * COLOURS, linestyle=7 * ["-"] + 7 * ["--"])
    for axis, title in zip(axes, titles, strict=False):
        axis.set_title(title, fontsize=SMALL + 1)
    return figure, axes


def canvas(axis, height=2.2):
    """The axis that is given, or that of a new picture."""
    return axis or panels(height=height)[1][0]


def finish(axis, x, y):
    """Name the axes and, above them where no line can be, what is drawn -> Figure."""
    axis.set_xlabel(x, fontsize=SMALL + 1)
    axis.set_ylabel(y, fontsize=SMALL + 1)
    labels = axis.get_legend_handles_labels()[1]
    if labels:
        inches = axis.figure.get_size_inches()[0] / axis.get_gridspec().ncols
        fitting = int(16 * inches / (max(map(len, labels)) + 9))
        axis.legend(title=axis.get_title() or None, title_fontsize=SMALL + 1, fontsize=SMALL,
                    ncols=max(1, fitting), loc="lower left", bbox_to_anchor=(0, 1),
                    borderaxespad=0.2, alignment="left", frameon=False)
        axis.set_title("")
    return axis.figure


# ---- tables


def name_ticks(axis, rows, columns):
    """Names at the lines and columns of a table; "" is none."""
    for names, ticks in ((rows, axis.yaxis), (columns, axis.xaxis)):
        places = [place for place, name in enumerate(names) if name]
        if places:
            ticks.set_ticks(places, [names[place] for place in places])
    stand_up(axis, columns)


def stand_up(axis, names):
    """Many names fit below an axis if they stand."""
    inches = axis.figure.get_size_inches()[0] / axis.get_gridspec().ncols
    written = sum(len(name) + 1 for name in names if name)
    axis.tick_params("x", rotation=90 if written > 12 * inches else 0)


def heat(table, rows=(), columns=(), x="", y="", label="", low=None, high=None, axis=None):
    """(N, M) as colours, with names of rows and columns, and as numbers if they are few: such as
    the F1 of each pair of languages [BERT-JEPA, fig. 3]."""
    table = torch.as_tensor(table).double()
    axis = canvas(axis, height=3)
    shown = axis.imshow(table.numpy(), cmap="cividis", vmin=low, vmax=high)
    name_ticks(axis, rows, columns)
    if table.numel() <= 100:
        for row, column in table.isfinite().nonzero().tolist():
            value = float(table[row, column])
            colour = "black" if shown.norm(value) > 0.5 else "white"
            axis.text(column, row, f"{value:.3g}", ha="center", va="center", fontsize=SMALL,
                      color=colour)
    if label:
        bar = axis.figure.colorbar(shown, ax=axis, shrink=0.9)
        bar.set_label(label, fontsize=SMALL + 1)
        bar.ax.tick_params(labelsize=SMALL)
    return finish(axis, x, y)


def mask(visible, tokens=(), axis=None, groups=0):
    """(L, L) bool, may a token (line) see a key (column)? With names of tokens; "" is none.
    `groups` (L,): the number of a colour for each key, such as its segment's."""
    axis = canvas(axis, height=3.4)
    seen = (torch.as_tensor(visible) * (1 + torch.as_tensor(groups))).numpy()
    axis.imshow(seen, cmap=ListedColormap(["#E8E8E8", *COLOURS]), vmin=0, vmax=len(COLOURS))
    name_ticks(axis, tokens, tokens)
    if len(seen) <= 40:
        for edge in range(1, len(seen)):
            axis.axhline(edge - 0.5, color="white", linewidth=0.6)
            axis.axvline(edge - 0.5, color="white", linewidth=0.6)
    return finish(axis, "key", "token that looks")


def similarity(x, y, label="cosine", low=0.0, axis=None):
    """(N, D), (M, D) -> the cosine of each row with each; what is below `low` is drawn as it."""
    cosines = evaluate.unit(x) @ evaluate.unit(y).T                                  # (N, M)
    return heat(cosines, (), (), "sentence", "sentence", label, low, 1, axis)


# ---- lines, bars, clouds


def lines(series, x, y, levels=(), scale="linear", axis=None):
    """{label: (P places, values (P,), or (seeds, P))} -> a line each, of seeds their mean and a
    band from least to most; a dotted one at each of `levels`, (label, value)."""
    axis = canvas(axis)
    for label, (places, values) in series.items():
        values = torch.as_tensor(values).double().reshape(-1, len(places))
        line, = axis.plot(places, values.mean(0), label=label, linewidth=1.4)
        axis.fill_between(places, *values.aminmax(dim=0), color=line.get_color(), alpha=0.2,
                          linewidth=0)
    for label, value in levels:
        axis.axhline(value, color="black", linewidth=1, linestyle=":", label=label)
    if scale != "linear":
        axis.set_yscale(scale)
    return finish(axis, x, y)


def bars(groups, y, x="", axis=None):
    """{group: {label: value, or (value, low, high) with its interval}} -> a colour for a label."""
    axis = canvas(axis)
    labels = list(dict.fromkeys(sum(map(list, groups.values()), [])))
    width = 0.8 / len(labels)
    for number, label in enumerate(labels):
        shift = width * (number - (len(labels) - 1) / 2)
        name = label if len(labels) > 1 else None
        for place, group in enumerate(groups.values()):
            if label in group:
                found = group[label] if isinstance(group[label], tuple) else (group[label],)
                axis.bar(place + shift, found[0], 0.9 * width, color=COLOURS[number % 7],
                         label=name)
                axis.vlines(place + shift, found[-2:][0], found[-1], color="black", linewidth=1.2)
                # One entry of the legend is enough.
                name = None
    axis.set_xticks(range(len(groups)), groups)
    stand_up(axis, groups)
    return finish(axis, x, y)


def histogram(values, x, bins=40, span=None, axis=None):
    """{label: numbers} -> which share of them is how large; `span`: (least, most)."""
    axis = canvas(axis)
    numbers = [torch.as_tensor(each).double().flatten() for each in values.values()]
    span = span or tuple(map(float, torch.cat(numbers).aminmax()))
    for label, each in zip(values, numbers):
        share = [100 / len(each)] * len(each)
        axis.hist(each.numpy(), bins, range=span, weights=share, label=label, alpha=0.6)
    return finish(axis, x, "share, %")


def points_of(log, name):
    """A log -> {step: number} of a term of the loss or of an evaluation's metric."""
    points = {}
    for record in log[1:]:
        value = record.get("eval", record).get(name)
        if isinstance(value, (int, float)):
            points[record["step"]] = value
    return points


CURVES = ("loss", "retrieval/xsim", "probe/mean", "geometry/rankme")


def curves(logs):
    """{label: [the log of each seed]} -> a panel for each of CURVES that the logs have."""
    found = {}
    for name in CURVES:
        for label, seeds in logs.items():
            each = [points_of(log, name) for log in seeds]
            if all(each):
                steps = sorted(set.intersection(*map(set, each)))
                values = [list(map(points.get, steps)) for points in each]
                found.setdefault(name, {})[label] = (steps, values)
    figure, axes = panels(max(1, len(found)), height=1.7)
    for axis, (name, series) in zip(axes, found.items(), strict=False):
        lines(series, "training step", name, axis=axis)
    return figure


# ---- vectors


def spectrum(vectors, center=True, axis=None):
    """{label: (N, D)} -> the first hundred singular values of each, on a log scale: a space that
    collapses falls off a cliff."""
    series = {}
    for label, z in vectors.items():
        values = evaluate.spectrum(z, center)[:100]
        # Zeros have no place on a log scale.
        values = values[values > 0]
        series[label] = (range(1, len(values) + 1), values)
    return lines(series, "direction, largest first", "singular value", (), "log", axis)


def differences(pairs, axis=None):
    """{label: (Texts (N, D), Codes (N, D))} -> `spectrum` of Enc(Text) - Enc(Code): where all is
    small the two are nearly the same [LLM-JEPA, fig. 3 left]."""
    return spectrum({label: text - code for label, (text, code) in pairs.items()}, False, axis)


def explained(vectors, most=20, axis=None):
    """{label: (N, D)} -> percent of the variance in each of the first principal components
    [BERT-JEPA, fig. 1]."""
    series = {}
    for label, z in vectors.items():
        variance = evaluate.spectrum(z, center=True).square()
        share = 100 * variance[:most] / variance.sum().clamp(min=1e-300)
        series[label] = (range(1, len(share) + 1), share)
    return lines(series, "principal component", "share of the variance, %", axis=axis)


def pca(vectors, axis=None):
    """{language: (N, D)} -> all rows in their two directions of most variance, a colour a
    language: where there are clouds, the vectors know the language."""
    axis = canvas(axis, height=3)
    line = torch.cat([torch.as_tensor(z).double() for z in vectors.values()])
    center = line.mean(0)
    directions = torch.linalg.svd(line - center, full_matrices=False).Vh[:2].T       # (D, 2)
    for label, z in vectors.items():
        flat = (torch.as_tensor(z).double() - center) @ directions                   # (N, 2)
        axis.scatter(*flat.T.numpy(), s=6, label=label, linewidths=0, alpha=0.8)
    axis.locator_params(nbins=5)
    return finish(axis, "direction 1", "direction 2")


def cosines(vectors, axis=None):
    """{language: (N, D), aligned} -> how often translations and unrelated texts have a cosine, of
    all languages and the first: one heap is a space in which nothing can be found."""
    first, *others = [evaluate.unit(z) for z in vectors.values()]
    tables = [other @ first.T for other in others]                                   # (N, N) each
    unrelated = ~torch.eye(len(first), dtype=torch.bool)
    found = {"translations": torch.cat([table.diagonal() for table in tables]),
             "unrelated": torch.cat([table[unrelated] for table in tables])}
    return histogram(found, "cosine", 40, (-1, 1), axis)


def cloud(points, x, y, axis=None):
    """{label: [(x, y), ...]} -> its points."""
    axis = canvas(axis)
    for number, (label, each) in enumerate(points.items()):
        # Where the colours begin again, another shape.
        axis.plot(*zip(*each), "o^s"[number // 7 % 3], markersize=3.5, label=label)
    return finish(axis, x, y)


def plane(runs, axis=None):
    """{label: [(alignment, uniformity), ...], its way through training} -> where each ends: best is
    low and to the left [Predict and Reconstruct; Wang & Isola 2020]."""
    axis = canvas(axis, height=2.8)
    for label, points in runs.items():
        line, = axis.plot(*zip(*points), linewidth=1, alpha=0.6)
        axis.plot(*points[-1], "o", color=line.get_color(), label=label)
    return finish(axis, "alignment: squared distance of partners",
                  "uniformity: 0 one point, -4 a sphere")


# ---- words


def words(rows):
    """{label: [(text, colour), ...]} -> lines of words; a colour is None, the number of a group, or
    a weight from 0. to 1., the darker the more."""
    start = max(map(len, rows)) + 2  # characters before the words, of 84 on a line
    placed = []
    height = 0
    for label, row in rows.items():
        placed.append((0, height, label, None))
        column = start
        for text, colour in row:
            if column + len(text) > 84:
                column = start
                height += 1
            placed.append((column, height, text, colour))
            column += len(text) + 1
        height += 1.5
    figure = Picture(figsize=(5.4, 0.2 * height), dpi=160)
    axis = figure.add_axes([0.01, 0, 0.98, 1])
    axis.set(xlim=(0, 84), ylim=(height - 0.7, -0.8))
    axis.set_axis_off()
    for column, line, text, colour in placed:
        is_weight = isinstance(colour, float)
        strength = colour if is_weight else 0.4
        paint = COLOURS[0 if is_weight or colour is None else colour % 7]
        box = dict(boxstyle="square,pad=0.15", facecolor=(paint, strength), linewidth=0)
        axis.text(column, line, text, fontsize=SMALL + 0.5, family=MONO, va="center",
                  color="white" if is_weight and colour > 0.6 else "black",
                  bbox=None if colour is None else box)
    return figure


def looked_at(evaluation, count=4):
    """A few texts of each language, the darker where the sentence vector's token looks in the last
    layer, mean of the heads [MEXMA, figs 7 to 10]. Texts with letters that the font lacks,
    say Chinese, are left out; None if all."""
    from tasks import analysis
    letters = get_font(findfont(MONO)).get_charmap()
    rows = {}
    for language, ids in evaluation.ids.items():
        weights = analysis.sentence_attention(evaluation, ids[:count])              # (H, L) each
        for number, (row, seen) in enumerate(zip(ids, weights), 1):
            seen = seen.mean(0)[1:-1]  # without [CLS] and [SEP]
            seen = (seen / seen.max()).tolist()
            pieces = [evaluation.tokenizer.decode([index]) for index in row[1:-1]]
            if letters.keys() >= set(map(ord, "".join(pieces))):
                rows[f"{language} {number}"] = list(zip(pieces, seen))
    return words(rows) if rows else None


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
    return heat(table, contexts, questions, "question", "context", "F1")


# ---- files


def png(figure):
    """The bytes of a picture, the same each time."""
    drawn = FigureCanvasAgg(figure)
    drawn.draw()
    picture = Image.fromarray(np.asarray(drawn.buffer_rgba())).convert("RGB")
    file = io.BytesIO()
    # 256 colours take a third of the bytes.
    picture.quantize().save(file, "PNG", optimize=True)
    return file.getvalue()


def of_run(folder, limit, files=()):
    """The pictures of one run, {name: figure}; its first vectors, {label: (N, D)}; what
    `differences` and `plane` take of it. `files`: names of files of numbers in its folder."""
    from tasks import analysis
    run = evaluate.open_run(folder)
    evaluation = evaluate.evaluation_of(run, limit=limit)
    x, *others = evaluation.vectors.values()
    pictures = {}
    pairs = {}
    places = {}
    causal = run.model.config.causal
    if others:
        for draw in (pca, cosines):
            pictures[f"{draw.__name__}-{folder.name}"] = draw(evaluation.vectors)
        # Text and Code where all models have them, and not at [PRED].
        same = analysis.last_tokens(evaluation) if causal else evaluation.vectors
        pairs[folder.name] = tuple(same.values())[:2]
        places[folder.name] = [(alignment(x, others[0]), evaluate.uniformity(x))]
    attention = looked_at(evaluation) if run.model.blocks and not causal else None
    if attention:
        pictures[f"attention-{folder.name}"] = attention
    found = {}
    for name in files:
        found |= read_results(folder / name)
    # The task gap measures within the classes of a set, as the paper's plane has it.
    for name, number in found.items():
        part = re.fullmatch("gap/(.+)/mean/class_alignment", name)
        if part:
            uniform = found[f"gap/{part[1]}/mean/uniformity"]
            places[f"{folder.name}, {part[1]}"] = [(number, uniform)]
    if "mlqa/f1" in found:
        pictures[f"mlqa-{folder.name}"] = answers(found)
    return pictures, {f"{folder.name}, {next(iter(evaluation.vectors))}": x}, pairs, places


def main(arguments):
    # Imported here, because a notebook need not wait for all tasks.
    from . import compare
    parser = Parser("python -m results plots", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--out", default="plots", metavar="FOLDER", help="for the PNGs [plots]")
    parser.add_argument("--limit", type=int, default=500, help="rows at most [500]")
    parser.add_argument("--files", type=comma_list, default=[],
                        help="of each run: what --out of tasks' gap or finetune mlqa wrote [none]")
    options = parser.parse_args(arguments)
    pictures = {}
    firsts = {}
    pairs = {}
    places = {}
    for folder in map(Path, options.runs):
        found = of_run(folder, options.limit, options.files)
        for whole, part in zip((pictures, firsts, pairs, places), found):
            whole |= part
    logs = {}
    groups = compare.group([compare.read_run(folder, ()) for folder in options.runs])
    for label, runs in groups.items():
        logs[label] = [evaluate.read_log(run.folder) for run in runs]
    pictures |= {"spectrum": spectrum(firsts), "explained": explained(firsts),
                 "curves": curves(logs)}
    if pairs:
        pictures["differences"] = differences(pairs)
    if places:
        pictures["plane"] = plane(places)
    for name, figure in pictures.items():
        write_atomic(Path(options.out) / f"{name}.png", png(figure))
        print(f"{options.out}/{name}.png")
