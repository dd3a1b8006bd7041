"""Draw the pictures of runs. Each function draws on `axis` or on a new Figure, labels the axes, and
returns the Figure.

    plots.lines({"mexma": (steps, losses)}, "step", "loss")
    figure, axes = plots.panels(1, 2)
"""

import html
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
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

# Distinguishable without red and green [Okabe & Ito 2008].
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
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


def title_of(figure):
    """Return the titles of a figure's panels, which can be those of their legends, in one line."""
    found = []
    for axis in figure.axes:
        legend = axis.get_legend()
        found.append(axis.get_title() or (legend.get_title().get_text() if legend else ""))
    return " ".join("; ".join(filter(None, found)).replace(r"\$", "$").split())


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
    view_box = re.search(' viewBox="[^"]*"', text)[0]
    # A screen reader reads the title, and not every tick.
    text = (f'<svg role="img" width="{width}"{view_box}><title>{html.escape(title_of(figure))}'
            f"</title>{text[text.index('>') + 1:]}")
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
    if all(isinstance(position, int) for positions, _ in series.values() for position in positions):
        axis.locator_params("x", integer=True, min_n_ticks=1)  # also around a single step
    for label, value in levels:
        axis.axhline(value, color="black", linewidth=1, linestyle=":", label=label)
    if scale != "linear":
        axis.set_yscale(scale)
    return finish(axis, x, y, title)


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
