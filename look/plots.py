"""Draw pictures. Each function draws on `axis` or on a new Figure, labels the axes, and returns the
Figure.

    plots.lines({"mexma": (steps, losses)}, "step", "loss")
    figure, axes = plots.panels(1, 2)
"""

import io
import itertools
import re
import textwrap
import warnings

import matplotlib
import numpy as np
import torch
from cycler import cycler
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import metrics

# Distinguishable without red and green [Okabe & Ito 2008].
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
GREY = "#E8E8E8"
MONO = "DejaVu Sans Mono"  # comes with matplotlib
SMALL = 7  # font size of tick labels; axis labels have one point more
matplotlib.rcParams.update({
    "figure.dpi": 160, "font.size": SMALL, "axes.labelsize": SMALL + 1, "axes.titlesize": SMALL + 1,
    "legend.title_fontsize": SMALL + 1, "figure.titlesize": SMALL + 1.5, "lines.linewidth": 1.4,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    # When the colors repeat, lines are dashed.
    "axes.prop_cycle": cycler(color=2 * COLOURS, linestyle=7 * ["-"] + 7 * ["--"])})


class Picture(Figure):
    """A Figure that a notebook shows as a PNG, with the same bytes each time."""

    def _repr_png_(self):
        return png(self)


def png(figure):
    """Return the bytes of a picture. 64 colors take a quarter of the space; MAXCOVERAGE keeps those
    that are rare, such as the brightest cell of a table."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    file = io.BytesIO()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    ours = PngInfo()
    ours.add_text("Software", "nanoJEPA")
    picture.quantize(64, Image.Quantize.MAXCOVERAGE).save(file, "PNG", optimize=True, pnginfo=ours)
    return file.getvalue()


def svg(figure, prefix):
    """Return a picture as SVG inside a page: text stays text, colors are the page's variables, and
    ids begin with `prefix`, because a page can have each id once."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "look"}), \
            warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the browser has more letters than matplotlib
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    # A page has its own style, and is read without a network: without namespaces and comments.
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->|\n *",
                  "", text[text.index("<svg"):], flags=re.S)
    width = round(100 * figure.get_figwidth())  # in pixels
    text = re.sub(r'<svg[^>]*? viewBox="([^"]*)"[^>]*>', rf'<svg width="{width}" viewBox="\1">',
                  text, count=1)
    # Coordinates with two decimals: the picture looks the same.
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\.\d\d)\d+", r"\1", tag[0]), text)
    text = re.sub(r"(xlink:)?href", "href", re.sub(r"font-family: [^;\"]*;? ?", "", text))
    # The points of a line are alike: one style for all.
    text = re.sub(
        r'(?:<use [^>]* style="([^"]*)"/>)(?:<use [^>]* style="\1"/>)+', lambda points:
        f'<g style="{points[1]}">' + re.sub(' style="[^"]*"', "", points[0]) + "</g>", text)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{prefix}-", text)
    for number, color in enumerate(COLOURS):
        text = text.replace(color.lower(), f"var(--c{number})")
    return text


def panels(rows=1, columns=1, height=2.2, titles=()):
    """Return a Figure and its axes, row by row: 3.6 inches wide for one column, 5.4 for more."""
    width = 3.6 if columns == 1 else 5.4
    figure = Picture(figsize=(width, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, title in zip(axes, titles):
        axis.set_title(title)
    return figure, axes


def plain(text):
    """Return a user's text for a label: matplotlib reads $ as mathematics, and leaves a label out
    of the legend if it begins with _."""
    text = text.replace("$", r"\$")
    return "\u200b" + text if text.startswith("_") else text


def inches(axis):
    return axis.figure.get_size_inches()[0] / axis.get_gridspec().ncols


def finish(axis, x, y, title=""):
    """Label the axes, put title and legend above the plot, and return the Figure."""
    axis.set(xlabel=plain(x), ylabel=plain(y))
    title = textwrap.fill(plain(title or axis.get_title()), int(13 * inches(axis)))
    labels = axis.get_legend_handles_labels()[1]
    axis.set_title("" if labels else title)
    if labels:
        columns = max(1, int(16 * inches(axis) / (max(map(len, labels)) + 9)))
        axis.legend(title=title or None, ncols=columns, loc="lower left", bbox_to_anchor=(0, 1),
                    borderaxespad=0.2, alignment="left")
    return axis.figure


def headline(figure, text):
    """Write what a figure shows above its panels, and return it."""
    figure.suptitle(textwrap.fill(text, int(14 * figure.get_size_inches()[0])), x=0.02, ha="left")
    return figure


def name_ticks(axis, columns, rows=()):
    """Write names, or nothing for "", beside the rows and below the columns, vertically if there is
    no room."""
    for names, ticks in ((columns, axis.xaxis), (rows, axis.yaxis)):
        marks = [index for index, name in enumerate(names) if name]
        if marks:
            ticks.set_ticks(marks, [plain(names[index]) for index in marks])
    letters = sum(len(name) + 1 for name in columns if name)
    axis.tick_params("x", rotation=90 if letters > 12 * inches(axis) else 0)


# ---- tables of colors


def heat(table, rows=(), columns=(), x="", y="", label="", low=None, high=None, axis=None,
         title=""):
    """Draw a table (N, M) as colors, and its numbers too if there are at most 100."""
    table = torch.as_tensor(table).double()
    axis = axis or panels(height=3)[1][0]
    image = axis.imshow(table.numpy(), cmap="cividis", vmin=low, vmax=high)
    name_ticks(axis, columns, rows)
    if table.numel() <= 100:
        for row, column in table.isfinite().nonzero().tolist():
            value = float(table[row, column])
            axis.text(column, row, f"{value:.3g}", ha="center", va="center",
                      color="black" if image.norm(value) > 0.5 else "white")
    if label:
        axis.figure.colorbar(image, ax=axis, shrink=0.9, label=label)
    return finish(axis, x, y, title)


def mask(visible, tokens=(), axis=None, groups=0, title=""):
    """Draw a mask (L, L) bool: a row is a query, a column a key. groups (L,): number of each key's
    color, such as its segment's."""
    if not axis:
        size = 1.5 + 0.13 * len(tokens)  # in inches
        axis, = panels(height=max(size, 3.4))[1]
        axis.figure.set_figwidth(max(size, 3.6))
    shown = (torch.as_tensor(visible) * (1 + torch.as_tensor(groups))).numpy()
    axis.imshow(shown, cmap=ListedColormap([GREY, *COLOURS]), vmin=0, vmax=len(COLOURS))
    name_ticks(axis, tokens, tokens)
    if len(shown) <= 40:
        for edge in range(1, len(shown)):
            axis.axhline(edge - 0.5, color="white", linewidth=0.6)
            axis.axvline(edge - 0.5, color="white", linewidth=0.6)
    return finish(axis, "key", "query", title)


# ---- lines, bars, histograms


def lines(series, x, y, levels=(), scale="linear", axis=None, title=""):
    """Draw {label: (N positions, values (N,) or (seeds, N))} as lines, with dots if they are few.
    Seeds are thin lines, with their mean. levels [(label, value)] are dotted."""
    axis = axis or panels()[1][0]
    for label, (positions, values) in series.items():
        values = torch.as_tensor(values).double().reshape(-1, len(positions))
        line, = axis.plot(positions, values.mean(0), label=plain(label), markersize=2.5,
                          marker="o" if len(positions) < 16 else None)
        # With both color and style, a thin line does not use up the next color.
        same = dict(color=line.get_color(), linestyle=line.get_linestyle())
        for seed in values if len(values) > 1 else ():
            axis.plot(positions, seed, linewidth=0.5, alpha=0.5, **same)
    for label, value in levels:
        axis.axhline(value, color="black", linewidth=1, linestyle=":", label=label)
    if scale != "linear":
        axis.set_yscale(scale)
    return finish(axis, x, y, title)


def bars(groups, y, x="", axis=None, title=""):
    """Draw {group: {label: value, or (value, low, high) of an interval}}, one color per label."""
    axis = axis or panels()[1][0]
    labels = list(dict.fromkeys(label for group in groups.values() for label in group))
    width = 0.8 / len(labels)
    for number, label in enumerate(labels):
        found = {position: group[label] for position, group in enumerate(groups.values())
                 if label in group}
        positions = np.array(list(found)) + width * (number - (len(labels) - 1) / 2)
        values, low, high = zip(*(value if isinstance(value, tuple) else (value,) * 3
                                  for value in found.values()))
        axis.bar(positions, values, 0.9 * width, color=COLOURS[number % 7],
                 label=label if len(labels) > 1 else None)
        axis.vlines(positions, low, high, color="black", linewidth=1.2)
    name_ticks(axis, list(groups))
    return finish(axis, x, y, title)


def histogram(values, x, bins=40, span=None, axis=None, title=""):
    """Draw the distribution of {label: numbers}; span: (lowest, highest) value of the axis."""
    axis = axis or panels()[1][0]
    numbers = [torch.as_tensor(each).double().flatten() for each in values.values()]
    span = span or tuple(map(float, torch.cat(numbers).aminmax()))
    for label, each in zip(values, numbers):
        axis.hist(each.numpy(), bins, range=span, weights=[100 / len(each)] * len(each),
                  label=label, alpha=0.6)
    return finish(axis, x, "% of all", title)


# ---- embeddings


def spectrum(embeddings, center=True, axis=None, title=""):
    """Draw the first 100 singular values of {label: (N, D)}: a collapse falls off a cliff."""
    series = {}
    for label, z in embeddings.items():
        values = metrics.spectrum(z, center)[:100]
        values = values[values > 0]  # a log scale has no zero
        series[label] = (range(1, len(values) + 1), values)
    return lines(series, "index, largest first", "singular value", (), "log", axis, title)


def pca(embeddings, axis=None, title="", joined=0):
    """Draw {language: (N, D)} in the plane of their first two principal components, with their
    shares of the variance. A gray line joins the translations of each of the first `joined`
    sentences."""
    axis = axis or panels(height=3)[1][0]
    z = torch.stack([torch.as_tensor(one).double() for one in embeddings.values()])  # (L, N, D)
    z = z - z.mean((0, 1))
    _, s, directions = torch.linalg.svd(z.flatten(0, 1), full_matrices=False)
    flat = (z @ directions[:2].T).numpy()  # (L, N, 2)
    # One line with gaps is smaller than many lines.
    paths = np.concatenate([flat, np.full_like(flat[:1], np.nan)])[:, :joined]
    paths = paths.transpose(2, 1, 0).reshape(2, -1)
    axis.plot(*paths, "-", color="#909090", linewidth=0.6, zorder=0)
    for label, points, color in zip(embeddings, flat, itertools.cycle(COLOURS)):
        dots = dict(marker="o", linestyle="", color=color, markeredgewidth=0)
        axis.plot(*points[:joined or None].T, **dots, markersize=3 + bool(joined),
                  label=plain(label))
        if joined:
            axis.plot(*points[joined:].T, **dots, markersize=2.4, alpha=0.35)
    axis.locator_params(nbins=5)
    shares = 100 * s[:2].square() / s.square().sum().clamp(min=1e-300)
    return finish(axis, *(f"principal component {number} ({share:.0f} %)"
                          for number, share in enumerate(shares.tolist(), 1)), title)


def cosines(embeddings, axis=None, title=""):
    """Draw the cosines of translations and of unrelated sentences, of {language: (N, D)} with the
    first language."""
    first, *others = [metrics.unit(z) for z in embeddings.values()]
    tables = torch.stack([other @ first.T for other in others])  # (L - 1, N, N)
    unrelated = ~torch.eye(len(first), dtype=torch.bool)
    values = {"translations": tables.diagonal(dim1=1, dim2=2), "unrelated": tables[:, unrelated]}
    values = {f"{label}: mean {each.mean():.2f}": each for label, each in values.items()}
    return histogram(values, "cosine", 40, (-1, 1), axis, title)


# ---- words and cells


def words(rows, title):
    """Draw {label: [(word, color), ...]} as lines of text. A color is None, the number of a group,
    or a weight from 0.0 to 1.0: the darker, the more."""
    start = max(map(len, rows)) + 2  # characters before the words, of 84 in a line
    figure = Picture(figsize=(5.4, 1))
    axis = figure.add_axes([0.01, 0, 0.98, 1], xlim=(0, 84))
    axis.set_axis_off()
    axis.text(0, 0, title, fontsize=SMALL + 1, va="center")
    font = dict(fontsize=SMALL + 0.5, family=MONO, va="center")
    line = 1.5
    for label, row in rows.items():
        axis.text(0, line, label, **font)
        column = start
        for word, color in row:
            if column + len(word) > 84:
                column = start
                line += 1
            is_weight = isinstance(color, float)
            box = None if color is None else dict(
                boxstyle="square,pad=0.15", linewidth=0,
                facecolor=(COLOURS[0], color) if is_weight else (COLOURS[color % 7], 0.4))
            axis.text(column, line, word, bbox=box, **font,
                      color="white" if is_weight and color > 0.6 else "black")
            column += len(word) + 1
        line += 1.5
    axis.set_ylim(line - 0.7, -0.8)
    figure.set_figheight(0.2 * line)
    return figure


def cells(rows, title, arrows=(), notes=()):
    """Draw {label: {column: (text, color)}}, each row a line of cells; arrows [(column, from row,
    to row)], notes [(column, row, text)]. Row 0 is at the top; rows may be fractions."""
    columns = 1 + max(column for row in rows.values() for column in row)
    figure = Picture(figsize=(0.47 * (columns + 3.2), 0.48 * (len(rows) + 0.6)))
    axis = figure.add_axes([0, 0, 1, 1], xlim=(-3, columns + 0.2), ylim=(len(rows) - 0.6, -1.1))
    axis.set_axis_off()
    axis.text(-2.9, -0.75, title, fontsize=SMALL + 1, va="center")
    for number, (label, row) in enumerate(rows.items()):
        axis.text(-2.9, number, label, va="center")
        for column, (text, color) in row.items():
            axis.add_patch(Rectangle((column + 0.04, number - 0.22), 0.92, 0.44, linewidth=0,
                                     facecolor=color, alpha=1 if color == GREY else 0.45))
            axis.text(column + 0.5, number, text, fontsize=SMALL * min(1, 7 / len(text)),
                      family=MONO, ha="center", va="center")
    for column, start, end in arrows:
        way = 0.24 if end > start else -0.24
        axis.annotate("", (column + 0.5, end - way), (column + 0.5, start + way),
                      arrowprops=dict(arrowstyle="->", linewidth=0.8, mutation_scale=10, shrinkA=0,
                                      shrinkB=0))
    for column, row, text in notes:
        axis.text(column, row, text, va="center", style="italic",
                  bbox=dict(facecolor="white", linewidth=0, pad=1))
    return figure
