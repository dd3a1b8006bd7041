"""Pictures of vectors, masks, tokens and numbers, each a function that returns a matplotlib Figure.

In a notebook: plots.mask(packed.mask(0)), plots.spectrum({"mexma": vectors}), ... Those that take
an `axis` draw there if they are given one: figure, axes = plots.panels(1, 2). What the command
`python -m results plots` draws of a run is in pictures.py.
"""

import io
import textwrap

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from PIL import Image

import evaluate

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


def label_ends(axis):
    """Write the names of lines at their ends, in place of a legend. A line upon another is dashed,
    so that both are seen."""
    axis.get_legend().remove()
    named = [line for line in axis.lines if not line.get_label().startswith("_")]
    near = np.ptp(axis.get_ylim()) / 40
    for number, line in enumerate(named):
        x, y = line.get_data()
        hidden = sum(np.array_equal(x, other.get_xdata()) and
                     abs(y - other.get_ydata()).max() < near for other in named[:number])
        if hidden:
            line.set_linestyle((0, (8, 8 * hidden)))
    ends = {line: axis.transLimits.transform(line.get_xydata()[-1])[1] for line in named}
    named.sort(key=ends.get)
    places = [ends[line] for line in named]
    # The height of a name, as a share of the axis.
    gap = 1.9 * SMALL / 72 / axis.figure.get_size_inches()[1]
    for _ in range(200):
        for i in range(1, len(places)):
            overlap = max(0, gap - (places[i] - places[i - 1]))
            places[i - 1] -= overlap / 2
            places[i] += overlap / 2
    for line, place in zip(named, places):
        axis.annotate(line.get_label(), line.get_xydata()[-1], (1.1, place), va="center",
                      textcoords="axes fraction", fontsize=SMALL + 0.5, annotation_clip=False,
                      arrowprops=dict(arrowstyle="-", color=line.get_color(), linewidth=0.6,
                                      shrinkA=1, shrinkB=1, relpos=(0, 0.5)))


def headline(figure, text):
    """What a picture says, above it -> the Figure."""
    text = textwrap.fill(text, int(14 * figure.get_size_inches()[0]))
    figure.suptitle(text, x=0.02, ha="left", fontsize=SMALL + 1.5)
    return figure


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
    axis = canvas(axis)
    axis.locator_params(axis="x", integer=True)
    series = {}
    for label, z in vectors.items():
        variance = evaluate.spectrum(z, center=True).square()
        share = 100 * variance[:most] / variance.sum().clamp(min=1e-300)
        series[label] = (range(1, len(share) + 1), share)
    return lines(series, "principal component", "share of the variance, %", axis=axis)


def scatter(vectors, flat, x, y, axis):
    """Places in a plane (all rows, 2), a colour for each of {language: (N, D)}."""
    axis = canvas(axis, height=3)
    for label, part in zip(vectors, np.split(flat, len(vectors))):
        axis.scatter(*part.T, s=6, label=label, linewidths=0, alpha=0.8)
    axis.locator_params(nbins=5)
    return finish(axis, x, y)


def pca(vectors, axis=None):
    """{language: (N, D)} -> all rows in their two directions of most variance, a colour a
    language: where there are clouds, the vectors know the language."""
    rows = torch.cat([torch.as_tensor(z).double() for z in vectors.values()])
    rows = rows - rows.mean(0)
    directions = torch.linalg.svd(rows, full_matrices=False).Vh[:2].T                # (D, 2)
    return scatter(vectors, (rows @ directions).numpy(), "direction 1", "direction 2", axis)


def tsne(vectors, axis=None):
    """{language: (N, D)} -> all rows in a plane in which near rows stay near; distances and places
    say nothing else [van der Maaten & Hinton 2008]."""
    from sklearn.manifold import TSNE
    rows = torch.cat([torch.as_tensor(z) for z in vectors.values()]).numpy()
    found = TSNE(perplexity=min(30, (len(rows) - 1) / 3), random_state=0).fit_transform(rows)
    return scatter(vectors, found, "t-SNE 1, no unit", "t-SNE 2, no unit", axis)


def cosines(vectors, axis=None):
    """{language: (N, D), aligned} -> how often translations and unrelated texts have a cosine, of
    all languages and the first: one heap is a space in which nothing can be found."""
    first, *others = [evaluate.unit(z) for z in vectors.values()]
    tables = [other @ first.T for other in others]                                   # (N, N) each
    unrelated = ~torch.eye(len(first), dtype=torch.bool)
    found = {"translations": torch.cat([table.diagonal() for table in tables]),
             "unrelated": torch.cat([table[unrelated] for table in tables])}
    return histogram(found, "cosine", 40, (-1, 1), axis)


def plane(runs, axis=None):
    """{label: [(alignment, uniformity), ...], its way through training} -> the way, a ring where it
    begins and a dot where it ends [Predict and Reconstruct; Wang & Isola 2020]."""
    axis = canvas(axis, height=3)
    for label, points in runs.items():
        line, = axis.plot(*zip(*points), linewidth=1.2)
        if len(points) > 1:
            axis.plot(*points[0], "o", color=line.get_color(), markerfacecolor="white")
        axis.plot(*points[-1], "o", color=line.get_color(), label=label)
    # The corner of collapse and that of the goal are always in the picture.
    axis.set(xlim=(-0.08, 2.08), ylim=(-4.15, 0.15))
    for x, y, word in ((0.03, 0.03, "best"), (0.1, 0.94, "all texts one point")):
        axis.text(x, y, word, transform=axis.transAxes, fontsize=SMALL, style="italic")
    return finish(axis, "alignment: squared distance, lower is better",
                  "uniformity, lower is better")


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
