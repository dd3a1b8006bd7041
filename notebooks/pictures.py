"""Draw the pictures that only the course needs, in the style of look/plots.py. Each function draws
on `axis` or on a new Figure, labels the axes, and returns the Figure.

    pictures.heat(cosines, x="English sentence", y="German sentence", label="cosine")
"""

import numpy as np
import torch
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle

from base import metrics
from look.plots import COLOURS, SMALL, Picture, finish, inches, lines, panels, plain

GREY = "#E8E8E8"
MONO = "DejaVu Sans Mono"  # comes with matplotlib


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


# ---- bars, histograms


def bars(groups, y, x="", axis=None, title=""):
    """Draw {group: {label: value, or (value, low, high) of an interval}}, one color per label. A
    bar that is too short to see has its value above it, such as 0."""
    axis = axis or panels()[1][0]
    labels = list(dict.fromkeys(label for group in groups.values() for label in group))
    width = 0.8 / len(labels)
    highest = max(np.max(value) for group in groups.values() for value in group.values())
    for number, label in enumerate(labels):
        found = {position: group[label] for position, group in enumerate(groups.values())
                 if label in group}
        positions = np.array(list(found)) + width * (number - (len(labels) - 1) / 2)
        values, low, high = zip(*(value if isinstance(value, tuple) else (value,) * 3
                                  for value in found.values()))
        axis.bar(positions, values, 0.9 * width, color=COLOURS[number % 7],
                 label=label if len(labels) > 1 else None)
        axis.vlines(positions, low, high, color="black", linewidth=1.2)
        for position, value in zip(positions, values):
            if abs(value) < 0.01 * highest:
                axis.annotate(f"{value:.2g}", (position, 0), (0, 2), textcoords="offset points",
                              ha="center", color=COLOURS[number % 7])
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
