"""The sections of a page: pictures of the logs of several runs, and of the model of one.

Each section is a function that returns a Section, or raises BadInput with the reason if it does not
apply. SECTIONS and MODEL_SECTIONS have them in the order of the page.
"""

import itertools
import textwrap
from typing import NamedTuple

import torch

import evaluate
import metrics
from common import BadInput, did_you_mean, shown

from . import compare, plots, seen

# What has a panel beside the loss terms: {metric: (title, y axis with its unit)}.
METRICS = {
    "retrieval/xsim": ("Retrieval error (xsim)", "wrong translations, %"),
    "retrieval/xsim++": ("Retrieval error with hard negatives (xsim++)", "wrong translations, %"),
    "retrieval/order": ("Order error (chance: 50)", "reordered copies nearer, %"),
    "generate/exact": ("Exact match of the answers", "right answers, %"),
    "probe/mean": ("Linear probes", "accuracy, %"),
    "geometry/rankme": ("RankMe", "effective number of dimensions"),
    "geometry/cosine/same": ("cos(rand), of unrelated sentences", "mean cosine"),
    "geometry/cosine/translations": ("cos(pos), of translations", "mean cosine"),
    "validation/loss": ("Loss on held-out rows", "loss"),
    "lr": ("Learning rate", "learning rate"),
    "grad_norm": ("Gradient norm, before clipping", "L2 norm"),
    "tokens_per_second": ("Speed", "tokens per second"),
}
FACTS = {"step", "tokens", "seconds", "eval", "warning", *METRICS}
VERDICTS = {"ok": 2, "half-collapsed": 1, "COLLAPSING": 3, "translations": 4}  # and their colors


class Section(NamedTuple):
    """Plain texts and pictures: the page escapes every text."""
    words: str = ""    # a paragraph
    table: tuple = ()  # (heads, rows)
    figures: dict = {}


# ---- what was trained: {label: list of Seen} -> Section


def trained(groups):
    """Say what was trained, in a column for each run."""
    every = [(label, one) for label, members in groups.items() for one in members]
    facts = []
    for label, one in every:
        first, config, last = one.first, one.first["config"], one.last()
        verdict = seen.since(one)
        facts.append({
            "legend": label if len(every) > 1 else "",
            "command": first.get("command") or first.get("imported") or "from Python",
            "data": f"{config['data'] or 'none'} {config.get('langs') or ''}".strip(),
            "rows": "rows" in first and "{:,} to train on, {:,} held out".format(*first["rows"]),
            "parameters": "parameters" in first and f"{first['parameters']:,}",
            "steps": "step" in last and f"{last['step']:,} of {config['steps']:,}",
            "training time": "seconds" in last and f"{last['seconds']:,.0f} s",
            "health": verdict and "{}, found at step {:,}".format(*verdict)})
    rows = [[name, *(shown(each[name] or "-") for each in facts)] for name in facts[0]
            if any(each[name] for each in facts)]
    return Section("", (["", *(one.name for _, one in every)], rows))


def results(groups):
    """Return a table of the first and the last evaluation, mean ± standard deviation over seeds."""
    rows = []
    for name in dict.fromkeys(name for members in groups.values() for one in members
                              for name in one.scores()):
        about = "; ".join(filter(None, evaluate.METRICS.get(name, ())))
        cells = [compare.mean_std(scores[name] for one in members for scores in [one.scores(index)]
                                  if name in scores)
                 for members in groups.values() for index in (0, -1)]
        if about or name.startswith("validation/"):
            rows.append([f"{name}\n{about}", *cells])
    if not rows:
        raise BadInput("no run has been evaluated")
    several = [f"{label}: " if len(groups) > 1 else "" for label in groups]
    heads = [label + when for label in several for when in ("first", "last")]
    return Section("Of the first and the last evaluation. Runs that differ only in their seed are "
                   "one column, mean ± standard deviation.", (["", *heads], rows))


# ---- along training


def curve_names(groups):
    """Return {metric: (title, y)} of everything that one of the runs logged."""
    logged = [record for one in itertools.chain(*groups.values()) for record in one.records]
    terms = dict.fromkeys(name for record in logged if "loss" in record for name in record)
    known = {name for record in logged for name in (*record, *record.get("eval", ()))}
    return {name: ("Loss" if name == "loss" else f"Term {name}", name)
            for name in terms if name not in FACTS} | {
        name: METRICS[name] for name in METRICS if name in known}


def draw_curve(axis, groups, metric, title, y):
    """Draw a metric of {label: list of Seen}, at the steps that all seeds of a label have. The
    legend has the first and the last value."""
    for label, members in groups.items():
        curves = [curve for one in members if (curve := one.curve(metric))]
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        if steps:
            values = torch.tensor([[curve[step] for step in steps] for curve in curves])
            first, last = values.mean(0)[[0, -1]].tolist()
            label = textwrap.fill(f"{label}: {first:.4g} to {last:.4g}", 44)
            plots.lines({label: (steps, values)}, "training step", y, axis=axis, title=title)
        else:
            axis.plot([], [])  # uses up a color, so that a run has the same one in all panels
    return axis.figure


def height(groups):
    """Return the height of a panel in inches: the legend has a line for each label."""
    return 2.4 + 0.15 * max(0, len(groups) - 2)


def along_training(groups):
    """Draw a panel for each metric in the logs."""
    found = {}
    for metric, (title, y) in curve_names(groups).items():
        axis, = plots.panels(height=height(groups))[1]
        found[metric] = draw_curve(axis, groups, metric, title, y)
    if not found:
        raise BadInput("the log has no steps")
    return Section("Thin lines are seeds, thick lines their mean." * (
        max(map(len, groups.values())) > 1), figures=found)


def curves_figure(groups, chosen=()):
    """Return one Figure with all panels, or those of the chosen metrics."""
    names = curve_names(groups)
    for name in chosen:
        if name not in names:
            raise BadInput(f"metric {name}: no run has it{did_you_mean(name, names)}")
    chosen = chosen or list(names)
    figure, axes = plots.panels(-(-len(chosen) // 2), min(2, len(chosen)), height(groups))
    for axis, metric in zip(axes, chosen):
        draw_curve(axis, groups, metric, *names[metric])
    for axis in axes[len(chosen):]:
        axis.remove()
    return figure


def health(groups):
    """Draw the verdict of each evaluation as a square in its color."""
    rows = [(label, one) for label, members in groups.items()
            for one in members if one.verdicts()]
    if not rows:
        raise BadInput("no evaluation of a trained model has the numbers that it needs")
    axis, = plots.panels(height=1.1 + 0.4 * len(rows))[1]
    for kind, color in VERDICTS.items():
        points = [(step, row) for row, (_, one) in enumerate(rows)
                  for step, verdict in one.verdicts().items() if verdict.startswith(kind)]
        if points:
            axis.plot(*zip(*points), "s", color=plots.COLOURS[color], label=kind)
    axis.set_ylim(len(rows) - 0.4, -0.6)
    plots.name_ticks(axis, (), [textwrap.fill(f"{label} ({one.name})", 22) for label, one in rows])
    well = sum(seen.since(one)[0] == "ok" for _, one in rows)
    return Section("A square is the health line of an evaluation.", figures={"health": plots.finish(
        axis, "training step", "run", f"Health: {well} of {len(rows)} ok at last")})


# ---- what the model learned: Seen, Evaluation -> Section


def embeddings(one, evaluation):
    """Draw all columns in two dimensions, before and after training."""
    words = f"{evaluation.rows.label}, in the plane of their two principal components."
    joined = 25 if len(evaluation.texts) > 1 else 0
    if joined:
        words += " A gray line joins translations."
    before = seen.untrained(one)
    figures = {}
    if before is None:
        words += (" Embeddings before training are left out, because the run has no file "
                  "untrained.npy.")
    else:
        before = dict(zip(evaluation.texts, before))
        figures["untrained"] = plots.pca(before, title="Embeddings before training", joined=joined)
    figures["embeddings"] = plots.pca(evaluation.embeddings, joined=joined,
                                      title="Embeddings of the trained model")
    return Section(words, figures=figures)


def answers(evaluation):
    """Return the answers of a decoder to prompts, and the gold texts."""
    prompts, golds, written, _ = evaluation.answers
    right = [*map(metrics.exact, written, golds)]
    rows = [(shown(prompt), mark(good) + shown(answer), shown(gold))
            for prompt, answer, gold, good in zip(prompts, written, golds, right)]
    return Section(f"{sum(right)} of {len(rows)} answers are right.",
                   (["prompt", "answer", "gold text"], rows))


def neighbors(one, evaluation, count=20, k=3):
    """Return the nearest texts of the first column to `count` rows of the others, by cosine; for a
    decoder its answers."""
    if evaluation.can_answer:
        return answers(evaluation)
    evaluate.need_translations(evaluation, "the list of neighbors")
    (first, y), *others = evaluation.embeddings.items()
    golds = evaluation.texts[first]
    rows, right = [], 0
    for row in range(min(count, len(golds))):
        name, x = others[row % len(others)]
        near = metrics.knn(x[row:row + 1], y, min(k, len(golds)))
        found = [golds[index] for index in near.indices[0].tolist()]
        right += found[0] == golds[row]
        rows.append((name, shown(evaluation.texts[name][row]), "\n".join(
            f"{mark(text == golds[row])}{cosine:.2f} {shown(text)}"
            for text, cosine in zip(found, near.cosines[0].tolist()))))
    return Section(f"The three nearest of {len(golds)} texts in {first}, by cosine. The nearest is "
                   f"the translation for {right} of {len(rows)} queries.",
                   (["", "query", "nearest, with their cosines"], rows))


def mark(right):
    return "✓ " if right else "✗ "


SECTIONS = {"What was trained": trained, "Results": results, "Along training": along_training,
            "Health: did it collapse?": health}
MODEL_SECTIONS = {"Embeddings": embeddings, "Twenty held-out rows": neighbors}
