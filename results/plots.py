"""Plots of vectors and of logs, each a function that returns a matplotlib Figure.

    python -m results plot out/mexma --out plots            # of a run's test rows, and of its log
    python -m results plot out/a-0 out/a-1 out/b-0 --out plots     # curves: a line for a and for b

In a notebook: plots.spectrum({"mexma": vectors}), plots.curves({"mexma": [log, log]}), ...
"""

import io
from pathlib import Path

import torch
from matplotlib.figure import Figure

import evaluate
from corpora.program import Parser
from corpora.text import write_atomic

from . import compare

# Told apart without red and green [Okabe & Ito 2008].
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")


def new_figure(panels=1, height=2.2):
    """-> Figure of half a page's width, and its axes from top to bottom."""
    figure = Figure(figsize=(3.6, height * panels), dpi=200, layout="constrained")
    axes = list(figure.subplots(panels, squeeze=False)[:, 0])
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=7)
        axis.set_prop_cycle(color=COLOURS)
    return figure, axes


def finish(axis, x, y, scale="linear"):
    """Name the axes, and what is drawn."""
    axis.set(xlabel=x, ylabel=y, yscale=scale)
    axis.legend(frameon=False, fontsize=7)
    return axis.figure


def spectrum(vectors):
    """{label: (N, D)} -> the singular values of each, centred, on a log scale: a space that
    collapses falls off a cliff."""
    _, (axis,) = new_figure()
    for label, z in vectors.items():
        values = evaluate.spectrum(z, center=True)
        values = values[values > 0]  # zeros have no place on a log scale
        axis.plot(range(1, len(values) + 1), values, label=label)
    return finish(axis, "direction, largest first", "singular value", "log")


def pca(vectors):
    """{language: (N, D)} -> all rows in their two directions of most variance, a colour a
    language: where there are clouds, the vectors know the language."""
    _, (axis,) = new_figure(height=3)
    line = torch.cat([torch.as_tensor(z).double() for z in vectors.values()])
    center = line.mean(0)
    directions = torch.linalg.svd(line - center, full_matrices=False).Vh[:2].T       # (D, 2)
    for label, z in vectors.items():
        flat = (torch.as_tensor(z).double() - center) @ directions                   # (N, 2)
        axis.scatter(*flat.T.numpy(), s=5, label=label, linewidths=0, alpha=0.8)
    return finish(axis, "direction 1", "direction 2")


def cosines(vectors, bins=40):
    """{language: (N, D), aligned} -> how often translations and unrelated texts have a cosine, of
    all languages and the first: one heap is a space in which nothing can be found."""
    first, *others = [evaluate.unit(z) for z in vectors.values()]
    related = []
    unrelated = []
    for other in others:
        table = other @ first.T                                                      # (N, N)
        related.append(table.diagonal())
        unrelated.append(table[~torch.eye(len(table), dtype=torch.bool)])
    _, (axis,) = new_figure()
    for label, values in (("translations", related), ("unrelated", unrelated)):
        values = torch.cat(values).numpy()
        share = [100 / len(values)] * len(values)
        axis.hist(values, bins, range=(-1, 1), weights=share, label=label, alpha=0.6)
    return finish(axis, "cosine", "share of pairs, %")


def points_of(log, name):
    """A log -> {step: number} of a term of the loss or of an evaluation's metric."""
    points = {}
    for record in log[1:]:
        value = record.get("eval", record).get(name)
        if isinstance(value, (int, float)):
            points[record["step"]] = value
    return points


def curves(logs, names=("loss", "retrieval/xsim", "probe/mean", "geometry/rankme")):
    """{label: [the log of each seed]} -> a panel for each name that the logs have: mean over seeds,
    and a band from least to most."""
    found = {}
    for name in names:
        for label, seeds in logs.items():
            each = [points_of(log, name) for log in seeds]
            if all(each):
                found.setdefault(name, {})[label] = each
    figure, axes = new_figure(max(1, len(found)), height=1.7)
    for axis, (name, lines) in zip(axes, found.items(), strict=False):
        for label, each in lines.items():
            steps = sorted(set.intersection(*map(set, each)))
            values = torch.tensor([list(map(points.get, steps)) for points in each]).double().T
            line, = axis.plot(steps, values.mean(1), label=label)
            low, high = values.aminmax(dim=1)
            axis.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        finish(axis, "training step", name)
    return figure


def matrix(vectors):
    """{language: (N, D), aligned} -> percent of a language's texts (lines) whose translation is not
    found in another (columns)."""
    names = list(vectors)
    table = torch.full((len(names), len(names)), torch.nan)
    for row, one in enumerate(names):
        for column, other in enumerate(names):
            if row != column:
                table[row, column] = evaluate.xsim(vectors[one], vectors[other])
    figure, (axis,) = new_figure(height=3)
    shown = axis.imshow(table.numpy(), cmap="cividis", vmin=0, vmax=100)
    axis.set(xlabel="searched in", ylabel="texts of")
    axis.set_xticks(range(len(names)), names)
    axis.set_yticks(range(len(names)), names)
    for row, column in table.isfinite().nonzero().tolist():
        value = float(table[row, column])
        dark = "black" if value > 50 else "white"
        axis.text(column, row, f"{value:.0f}", ha="center", va="center", color=dark)
    figure.colorbar(shown, ax=axis, label="xsim error, %")
    return figure


def png(figure):
    """The bytes of a picture, the same each time."""
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def main(arguments):
    parser = Parser("python -m results plot", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--out", default="plots", metavar="FOLDER", help="for the PNGs [plots]")
    parser.add_argument("--data", help="rows to embed [the run's test rows]")
    parser.add_argument("--limit", type=int, default=500, help="rows at most [500]")
    options = parser.parse_args(arguments)
    spectra = {}
    pictures = {}
    for folder in map(Path, options.runs):
        run = evaluate.open_run(folder)
        rows = evaluate.evaluation_of(run, options.data, limit=options.limit)
        first = next(iter(rows.vectors))
        spectra[f"{folder.name}, {first}"] = rows.vectors[first]
        if len(rows.vectors) > 1:
            for draw in (pca, cosines, matrix):
                pictures[f"{draw.__name__}-{folder.name}"] = draw(rows.vectors)
    logs = {}
    for each in compare.group([compare.read_run(Path(run), ()) for run in options.runs]):
        logs[each.label] = [evaluate.read_log(run.folder) for run in each.runs]
    pictures["spectrum"] = spectrum(spectra)
    pictures["curves"] = curves(logs)
    for name, figure in pictures.items():
        write_atomic(Path(options.out) / f"{name}.png", png(figure))
        print(f"{options.out}/{name}.png")
