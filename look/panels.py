"""The panels of a page: {name: Figure} of the logs of several runs, or of the model of one."""

import itertools
import textwrap

import numpy as np
import torch

import evaluate
import metrics
from common import BadInput, did_you_mean
from data import Example
from model import Packed

from . import plots
from .attention import attention_weights
from .batch import token_texts
from .seen import options_of

# What has a panel beside the loss terms: {metric: (title, y axis with its unit)}.
METRICS = {
    "retrieval/xsim": ("Retrieval error (xsim)", "wrong translations, %"),
    "retrieval/xsim++": ("Retrieval error with hard negatives (xsim++)", "wrong translations, %"),
    "generate/exact": ("Exact match of the answers", "right answers, %"),
    "probe/mean": ("Linear probes", "accuracy, %"),
    "geometry/rankme": ("RankMe", "effective number of dimensions"),
    "geometry/cosine/same": ("cos(rand), of unrelated sentences", "mean cosine"),
    "geometry/cosine/translations": ("cos(pos), of translations", "mean cosine"),
    "lr": ("Learning rate", "learning rate"),
    "grad_norm": ("Gradient norm, before clipping", "L2 norm"),
    "tokens_per_second": ("Speed", "tokens per second"),
}
FACTS = {"step", "tokens", "seconds", "eval", "warning", *METRICS}
VERDICTS = {"ok": 2, "half-collapsed": 1, "COLLAPSING": 3, "translations": 4}  # and their colors
SHOWN_LAYERS, SHOWN_HEADS = 6, 8
DASHED = " (dashed: held out)"
GRID = 24  # largest number of tokens whose mask is drawn


# ---- along training


def curve_names(every):
    """Return {metric: (title, y)} of everything that one of the runs logged."""
    logged = [record for one in every for record in one.records]
    terms = dict.fromkeys(name for record in logged if "loss" in record for name in record)
    names = {name: ("Loss" if name == "loss" else f"Term {name}", name)
             for name in terms if name not in FACTS}
    known = {name for record in logged for name in (*record, *record.get("eval", ()))}
    return names | {name: METRICS[name] for name in METRICS if name in known}


def mean_curve(curves):
    """Return the steps that all curves have, and their mean there."""
    tables = [dict(zip(*curve)) for curve in curves]
    steps = sorted(set.intersection(*map(set, tables))) if tables else []
    return steps, [metrics.mean([table[step] for table in tables]) for step in steps]


def draw_curve(axis, groups, metric, title, y):
    """Draw a metric of {label: list of Seen}: seeds as thin lines and their mean; held-out rows
    dashed. The legend has the last values, or the title the first and the last of a single run."""
    for number, (label, members) in enumerate(groups.items()):
        color = plots.COLOURS[number % 7]
        for name, dash in ((metric, "-" if number < 7 else "-."), (f"validation/{metric}", "--")):
            curves = [curve for one in members if (curve := one.points(name))[0]]
            for curve in curves if len(curves) > 1 else ():
                axis.plot(*curve, dash, color=color, linewidth=0.6, alpha=0.5)
            steps, values = mean_curve(curves)
            if not steps:
                continue
            line, = axis.plot(steps, values, dash, color=color, markersize=2.5,
                              marker="o" if len(steps) < 8 else None)
            if name != metric:
                title = title.removesuffix(DASHED) + DASHED
            elif len(groups) > 1:
                line.set_label(plots.plain(f"{label}: {values[-1]:.4g}"))
            else:
                title += f": {values[0]:.4g} at the start, {values[-1]:.4g} at the end"
    return plots.finish(axis, "training step", plots.plain(y), plots.plain(title))


def height(groups):
    """Return the height of a panel in inches: the legend has a line for each label."""
    return 2.4 + 0.15 * max(0, len(groups) - 2)


def curves(groups):
    """Return {name: Figure}, one for each metric in the logs."""
    found = {}
    for metric, (title, y) in curve_names(itertools.chain(*groups.values())).items():
        axis, = plots.panels(height=height(groups))[1]
        found[metric] = draw_curve(axis, groups, metric, title, y)
    return found


def curves_figure(groups, chosen=()):
    """Return one Figure with all panels, or those of the chosen metrics."""
    names = curve_names(itertools.chain(*groups.values()))
    for name in chosen:
        if name not in names:
            raise BadInput(f"metric {name}: no run has it{did_you_mean(name, names)}")
    names = {name: names[name] for name in chosen or names}
    figure, axes = plots.panels(-(-len(names) // 2), min(2, len(names)), height(groups))
    for axis, (metric, (title, y)) in zip(axes, names.items()):
        draw_curve(axis, groups, metric, title, y)
    for axis in axes[len(names):]:
        axis.remove()
    return figure


def since(one):
    """Return the last verdict of a run and the first step of its last stretch; None without."""
    stretch = None
    for step, verdict in one.verdicts().items():
        if stretch is None or stretch[0] != verdict:
            stretch = verdict, step
    return stretch


def health(groups):
    """Return a Figure: each stretch of steps in the color of the verdict at its end."""
    rows = [(label if len(members) == 1 else f"{label}, seed {one.first['config'].get('seed')}",
             one) for label, members in groups.items() for one in members if one.verdicts()]
    labels = [plots.plain(textwrap.fill(label, 18)) for label, _ in rows]
    lines = 1 + max(label.count("\n") for label in labels)
    axis, = plots.panels(height=1.1 + (0.14 + 0.12 * lines) * len(rows))[1]
    named = {}
    for number, (_, one) in enumerate(rows):
        start = 0
        for step, verdict in one.verdicts().items():
            key = next(key for key in VERDICTS if verdict.startswith(key))
            bar = axis.barh(number, max(step - start, 1e-9), 0.6, left=start, edgecolor="white",
                            linewidth=0.5, color=plots.COLOURS[VERDICTS[key]])
            named.setdefault(verdict, bar)
            start = step
    for verdict, bar in named.items():
        bar.set_label(verdict.partition(" (")[0])
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.set_yticks(range(len(rows)), labels)
    well = sum(since(one)[0] == "ok" for _, one in rows)
    return plots.finish(axis, "training step", "run", f"Health: {well} of {len(rows)} ok at last")


# ---- what the model learned


def embeddings(evaluation, title, joined=25):
    """Return a Figure of all columns in two dimensions."""
    found = {plots.plain(name): z for name, z in evaluation.embeddings.items()}
    return plots.pca(found, title=title, joined=joined if len(found) > 1 else 0)


def cosines(evaluation):
    """Return a Figure of the distribution of cosines, with hard negatives if there are some."""
    evaluate.need_translations(evaluation, "the distribution of cosines")
    altered = evaluation.rows.hard and evaluate.embed(
        evaluation.model, evaluation.rows.encode([text for text, _, _ in evaluation.rows.hard]),
        evaluation.pool)
    hard = (altered, [row for _, row, _ in evaluation.rows.hard]) if evaluation.rows.hard else None
    y, *others = evaluation.embeddings.values()
    means = metrics.mean([metrics.cosines(x, y).mean().item() for x in others])
    unrelated = metrics.mean([metrics.random_cosine(x, y) for x in others])
    return plots.cosines(evaluation.embeddings, hard=hard, title="Translations have a mean cosine "
                         f"of {means:.2f}, unrelated sentences of {unrelated:.2f}")


def neighbors(evaluation, count=20, k=3):
    """Return [(column, query, [(text, cosine, is right)])]: the nearest texts of the first
    column to `count` rows of the others, by cosine."""
    evaluate.need_translations(evaluation, "the list of neighbors")
    (first, y), *others = evaluation.embeddings.items()
    golds = evaluation.rows.texts[first]
    found = []
    for row in range(min(count, len(golds))):
        name, x = others[row % len(others)]
        near = metrics.knn(x[row:row + 1], y, min(k, len(golds)))
        texts = [golds[index] for index in near.indices[0].tolist()]
        found.append((name, evaluation.rows.texts[name][row], [
            (text, cosine, text == golds[row])
            for text, cosine in zip(texts, near.cosines[0].tolist())]))
    return found


def spread(count, most):
    """Return at most `most` of the numbers 0 ... count - 1, from the first to the last."""
    if count <= most:
        return list(range(count))
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]


def attention(evaluation):
    """Return a Figure of the attention in one sentence: a layer a row, a head a column."""
    name, rows = next(iter(evaluation.rows.ids.items()))
    ids = next((ids for ids in rows if len(ids) <= 16), rows[0])[:16]
    model = evaluation.model
    packed = Packed.of([ids], causal=model.config.causal)
    texts = token_texts({"packed": packed}, "packed", evaluation.rows.tokenizer)
    names = [*map(plots.plain, texts)]
    layers = spread(len(model.blocks), SHOWN_LAYERS)
    heads = spread(model.config.heads, SHOWN_HEADS)
    figure, axes = plots.panels(len(layers), len(heads), 1.55)
    figure.set_size_inches(1.3 * len(heads) + 1.8, 1.3 * len(layers) + 1.3)
    weights = torch.zeros(len(layers), model.config.heads, len(ids), len(ids))  # (.., query, key)
    with evaluate.in_eval_mode(model):
        for number, layer in enumerate(layers):
            for query, found in enumerate(attention_weights(
                    model, packed, torch.arange(len(ids)), layer)):
                weights[number, :, query, :found.shape[1]] = found
    for axis, (number, head) in zip(axes, itertools.product(range(len(layers)), heads)):
        image = axis.imshow(weights[number, head].numpy(), cmap="cividis", vmin=0,
                            vmax=weights.max().item())
        axis.set_title(f"layer {layers[number] + 1}, head {head + 1}")
        plots.name_ticks(axis, names, names)
        axis.tick_params(labelsize=5, labelbottom=number == len(layers) - 1, labelleft=head == 0)
    figure.supxlabel("key (token that is read)", fontsize=plots.SMALL + 1)
    figure.supylabel("query (token that reads)", fontsize=plots.SMALL + 1)
    figure.colorbar(image, ax=axes, shrink=0.5, aspect=30, label="attention weight")
    return plots.headline(figure, f"Attention in a sentence of {plots.plain(name)}: "
                          f"{len(layers)} of {len(model.blocks)} layers, {len(heads)} of "
                          f"{model.config.heads} heads")


def packed_rows(one, evaluation):
    """Return the rows that the objective packs of two held-out examples, as lists of words (after
    an arrow the token to predict), and a Figure of the first row's mask. Raises BadInput without
    the objective."""
    kind, options = one.objective, options_of(one)
    tokenizer, texts = evaluation.rows.tokenizer, evaluation.rows.texts
    columns = [*list(texts.values())[:kind.views], evaluation.rows.system or ["", ""]]
    cells = [[ids[:evaluation.rows.max_length] for ids in tokenizer.encode(column[:2])]
             for column in columns]  # the views, and the system text
    examples = [Example(tuple(views), system=system if evaluation.rows.system else None)
                for *views, system in zip(*cells)]
    batch = kind.collate(examples, np.random.default_rng(0), options, tokenizer.special)
    packed = batch["packed"]
    texts = token_texts(batch, "packed", tokenizer)
    rows = [texts[start:end] for start, end in itertools.pairwise(packed.cu_seqlens.tolist())]
    figure = plots.mask(packed.mask(0)[:GRID, :GRID], [*map(plots.plain, rows[0][:GRID])],
                        title="Mask of row 0 (colored: visible)")
    return rows, figure
