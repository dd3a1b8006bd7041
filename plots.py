"""Plots of groups of runs, for `python evaluate.py compare RUN... --out FOLDER --plots`; matplotlib is asked for when one is drawn.

First a function for each plot, groups (`compare.Group`) -> (panels, notes on what is missing): plain data. Then one function that draws panels.
"""
import io
import math
import re
import statistics
import textwrap
from typing import NamedTuple

from data import BadInput


class Panel(NamedTuple):
    """series [(label, colour 0, 1, ..., x, y, band)] with x and y lists and band None or two more; of a heat map (label, rows of numbers)."""
    title: str
    x: str
    y: str
    series: list
    kind: str = "lines"
    log: bool = False


def over_seeds(label, colour, curves):
    """Curves {x: y} of several seeds -> one series: their mean, and as its band the least and the most, where all of them have a value."""
    x = sorted(set.intersection(*map(set, curves)))
    each = [[curve[place] for curve in curves] for place in x]
    return label, colour, x, [statistics.fmean(values) for values in each], ([*map(min, each)], [*map(max, each)]) if len(curves) > 1 else None


def having(groups, key):
    """-> [(label, colour, what the arrays of its runs hold under the key)] and what makes those that are missing."""
    found = [(each.label, place, [run.arrays[key] for run in each.runs if run.arrays.get(key)]) for place, each in enumerate(groups)]
    missing = [f"{label} has no {key}: python evaluate.py {groups[place].runs[0].folder} --arrays" for label, place, arrays in found if not arrays]
    return [each for each in found if each[2]], missing


def curves(groups, projection):
    """Every term of the loss, xsim and RankMe along training: lines are means over seeds, bands their range."""
    aside = {"step", "lr", "grad_norm", "tokens", "seconds", "tokens_per_second"}
    number = lambda value: isinstance(value, (int, float))
    terms = dict.fromkeys(name for each in groups for run in each.runs for record in run.log if "loss" in record for name in record if name not in aside)
    panels = []
    for name, title, y in [(name, name if name == "loss" else f"loss term {name}", f"{name}, nats" if name in ("mlm", "ntp") else name) for name in terms] + [
            ("retrieval/xsim", "translations not found", "xsim error, %"), ("geometry/rankme", "directions in use", "RankMe, directions")]:
        series = []
        for place, each in enumerate(groups):
            found = [{record["step"]: value for record in run.log for value in [record.get("eval", record).get(name)] if number(value)} for run in each.runs]
            series += [over_seeds(each.label, place, found)] if all(found) else []
        panels += [Panel(title, "training step", y, series)] if series else []
    return panels, []


def spectrum(groups, projection):
    """Singular values of the centred vectors, on a log scale; zeros have no place on it."""
    found, missing = having(groups, "singular_values")
    series = [over_seeds(label, colour, [{place: s for place, s in enumerate(values, 1) if s > 0} for values in arrays]) for label, colour, arrays in found]
    return [Panel("spectrum", "direction, largest first", "singular value", series, log=True)] if series else [], missing


def vectors(groups, projection):
    """Sentence vectors in two dimensions, a panel a group (its first run), a colour a column of the data."""
    found, missing = having(groups, "vectors")
    panels = []
    for label, _, (points, *_) in found:
        flat, said = (points["pca"], "PCA") if projection == "pca" else tsne(points["values"])
        series = []
        for colour, name in enumerate(dict.fromkeys(points["column"])):
            chosen = [place for place, column in zip(flat, points["column"]) if column == name]
            series.append((name, colour, [x for x, _ in chosen], [y for _, y in chosen], None))
        panels.append(Panel(f"{label}: {said}", f"{said.split(',')[0]} 1", f"{said.split(',')[0]} 2", series, "points"))
    return panels, missing


def tsne(values):
    """(N, D) -> (N, 2) and how: perplexity 30, less where rows are few, 1,000 iterations, seed 42. [BERT-JEPA and LLM-JEPA, figures]"""
    try:
        from sklearn.manifold import TSNE
    except ImportError:
        raise BadInput("t-SNE needs scikit-learn: pip install -r requirements-notebooks.txt, or --projection pca") from None
    import numpy
    perplexity = min(30, (len(values) - 1) / 3)
    flat = TSNE(perplexity=perplexity, max_iter=1000, random_state=42).fit_transform(numpy.array(values, dtype="float32"))
    return flat.tolist(), f"t-SNE, perplexity {perplexity:.3g}"


def cosines(groups, projection):
    """Cosines of translations and of unrelated texts, all pairs of languages and all seeds together, a panel a group."""
    found, missing = having(groups, "cosines")
    panels = []
    for label, _, arrays in found:
        pairs = [pair for each in arrays for pair in each.values()]
        edges, series = pairs[0]["edges"], []
        for colour, kind, said in ((0, "related", "translations"), (1, "unrelated", "unrelated texts")):
            counts = [sum(column) for column in zip(*(pair[kind] for pair in pairs))]
            x, y = [edges[0]], [0.0]                                     # the outline of the bars
            for left, right, count in zip(edges, edges[1:], counts):
                x, y = [*x, left, right], y + [100 * count / max(1, sum(counts))] * 2
            series.append((said, colour, [*x, edges[-1]], [*y, 0.0], None))
        panels.append(Panel(label, "cosine", "share of pairs, %", series))
    return panels, missing


def attention(groups, projection):
    """Where the sentence's token looks in the last layer, mean and range over seeds and columns; the entropy of that, with its deviation over seeds."""
    found, missing = having(groups, "attention")
    lines, bars = [], []
    for label, colour, arrays in found:
        each = [{place: 100 * share for place, share in enumerate(column["by_position"])} for one in arrays for column in one.values()]
        lines.append(over_seeds(label, colour, each))
    for colour, one in enumerate(groups):
        if values := list(one.scores("attention/entropy").values()):
            mean, spread = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
            bars.append((one.label, colour, [colour], [mean], spread and ([mean - spread], [mean + spread])))
        else:
            missing.append(f"{one.label} has no attention/entropy: python evaluate.py {one.runs[0].folder} --tasks attention")
    return ([Panel("attention of the sentence's token", "position in the row, tokens (0 opens it)", "attention, %", lines)] if lines else []) + (
        [Panel("its entropy", "", "entropy, nats", bars, "bars")] if bars else []), missing


def matrix(groups, projection):
    """xsim from every language to every other, a panel a group, means over seeds; out of arrays.json or of the task matrix."""
    found, panels, missing = having(groups, "retrieval")[0], [], []
    for place, each in enumerate(groups):
        tables = next((arrays for _, colour, arrays in found if colour == place), [])
        pairs = {tuple(name.split("/")[2].split("-")): list(each.scores(name).values()) for run in each.runs for name in run.scores
                 if re.fullmatch(r"matrix/xsim/[^/-]+-[^/-]+", name)}
        for one in () if pairs else tables:                              # the task's own numbers first
            pairs |= {(a, b): [*pairs.get((a, b), []), one["xsim"][i][j]] for i, a in enumerate(one["columns"]) for j, b in enumerate(one["columns"]) if i != j}
        names = list(dict.fromkeys(name for pair in pairs for name in pair))
        rows = [[statistics.fmean(pairs[a, b]) if (a, b) in pairs else math.nan for b in names] for a in names]
        panels += [Panel(f"{each.label}: xsim error, %", "searched in", "texts of", [(names, rows)], "heat")] if pairs else []
        missing += [] if pairs else [f"{each.label} has no retrieval: python evaluate.py {each.runs[0].folder} --arrays"]
    return panels, missing


PLOTS = {one.__name__: one for one in (curves, spectrum, vectors, cosines, attention, matrix)}

# ---------------------------------------------------------------------------------------------------------------------
# Drawing

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")      # told apart without red and green [Okabe & Ito 2008]
STYLES, MARKS = ("-", "--", ":", "-."), "o^sDvPX"


def draw(panels):
    """Panels -> the bytes of a PNG of half a page's width, panels below each other, the legend above them. The same bytes each time."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise BadInput("plots need matplotlib: pip install -r requirements-notebooks.txt") from None
    small = {"font.size": 8, "axes.titlesize": 8, "axes.spines.top": False, "axes.spines.right": False, "lines.linewidth": 1.2, "axes.grid": True,
             "grid.color": "#dddddd", "grid.linewidth": .5, "axes.axisbelow": True}
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **small, "backend": "agg"}):
        heights = [3.2 if panel.kind == "heat" else 2.8 if panel.kind == "points" else 1.7 for panel in panels]
        figure = Figure(figsize=(3.4, sum(heights) + .4), dpi=250, layout="constrained")
        handles = {}
        for axis, panel in zip(figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0], panels):
            axis.set(title=textwrap.fill(panel.title, 45), xlabel=panel.x, ylabel=panel.y)
            for label, handle in (heat(axis, panel.series[0]) if panel.kind == "heat" else curve(axis, panel)):
                handles.setdefault(label, handle)
        if handles:
            figure.legend(handles.values(), [textwrap.fill(label, 45) for label in handles], loc="outside upper center",
                          ncols=1 if max(map(len, handles)) > 16 else 3, frameon=False)
        file = io.BytesIO()
        figure.savefig(file, metadata={"Software": None})
        return file.getvalue()


def curve(axis, panel):
    """Lines, points or bars. -> [(label, handle)] for the legend"""
    handles = []
    for label, number, x, y, band in panel.series:
        colour, turn = COLOURS[number % len(COLOURS)], number // len(COLOURS)
        if panel.kind == "points":
            handles.append((label, axis.scatter(x, y, s=6, color=colour, marker=MARKS[number % len(MARKS)], linewidths=0, alpha=.8)))
        elif panel.kind == "bars":
            reach = band and [[y[0] - band[0][0]], [band[1][0] - y[0]]]
            handles.append((label, axis.bar(x, y, .6, color=colour, yerr=reach, capsize=3)))
        else:
            handles.append((label, axis.plot(x, y, color=colour, linestyle=STYLES[turn % len(STYLES)])[0]))
            if band:
                axis.fill_between(x, *band, color=colour, alpha=.2, linewidth=0)
    if panel.kind != "lines":                                            # projections have no unit, bars are named by the legend
        axis.set_xticks([])
    if panel.kind == "points":
        axis.set_yticks([])
    elif panel.kind == "bars":
        axis.set_xlim(-1, max(x[0] for _, _, x, _, _ in panel.series) + 1)
    if panel.log:
        axis.set_yscale("log")
    return handles


def heat(axis, series):
    """A matrix as colours and numbers: errors in percent, blank where there is none."""
    names, rows = series
    shown = axis.imshow(rows, cmap="cividis", vmin=0, vmax=100)
    axis.grid(False)
    many = len(names) > 7
    axis.set_xticks(range(len(names)), names, rotation=90 if many else 0)
    axis.set_yticks(range(len(names)), names)
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            if not math.isnan(value):
                axis.text(j, i, f"{value:.{0 if many else 1}f}", ha="center", va="center", color="black" if value > 50 else "white", fontsize=5 if many else 7)
    axis.figure.colorbar(shown, ax=axis, fraction=.046, label="%")
    return []
