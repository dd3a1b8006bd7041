"""The sections of a page: pictures of the logs of several runs, and of the model of one.

Each section is a function that returns a Section, or raises BadInput with the reason if it does not
apply.
"""

import itertools
import textwrap
from collections import Counter
from typing import NamedTuple

import torch

from base import metrics
from base.common import BadInput, shown
from harness import runs, screen
from harness.facts import facts_of

from . import compare, plots, seen

# What has a title, and what has a panel beside the loss terms.
KNOWN = screen.METRICS | {
    "loss": screen.Metric("loss"), "lr": screen.Metric("learning rate", range=(0,)),
    "grad_norm": screen.Metric("gradient norm before clipping", range=(0,))}
DRAWN = [name for name, about in KNOWN.items() if about.range is not None]
TOTALS = ("loss", "validation/loss")
FACTS = {"step", "tokens", "seconds", "tokens_per_second", "eval", "warning", *DRAWN}


class Section(NamedTuple):
    """Plain texts and pictures: the page escapes every text."""
    words: str = ""    # a paragraph
    table: tuple = ()  # (heads, rows)
    figures: dict = {}


# ---- what was trained: {label: list of Seen} -> Section


# {metric: what the first and the last evaluation say about it}
IN_WORDS = {
    "retrieval/xsim": "The nearest sentence is a wrong translation (xsim) for {} % of the held-out "
                      "sentences (before training: {} %).",
    "retrieval/order": "Of a translation and a sentence with the same words in another order, the "
                       "wrong one is nearer in {} % of the cases (before training: {} %, chance: "
                       "50 %).",
    "generate/exact": "The model writes {} % of the held-out answers exactly (before training: "
                      "{} %).",
    "geometry/cosine/same": "Unrelated sentences have a mean cosine of {} (before training: {}; 1 "
                            "if all embeddings are equal).",
}


def verdict(groups):
    """Say in plain words, in a paragraph for each label, whether its runs collapsed and what they
    learned."""
    paragraphs = []
    for label, members in groups.items():
        found = [one for one in map(seen.since, members) if one]
        words = []
        for said, count in Counter(said for said, _ in found).items():
            who = f" of {count} of {len(members)} runs" * (len(members) > 1)
            health = {"ok": "are healthy", "COLLAPSING": "have collapsed into nearly one point"}
            since = f" since step {found[0][1]:,}" * (len(members) == 1)
            reason = f": {said}" * (said not in health)
            health = health.get(said, "are not healthy")
            words.append(f"The embeddings{who} {health}{since}{reason}.")
        for metric, sentence in IN_WORDS.items():
            last, first = [[scores[metric] for one in members for scores in [one.scores(index)]
                            if metric in scores] for index in (-1, 0)]
            if words and last:
                digits = screen.METRICS[metric].digits
                words.append(sentence.format(*(
                    f"{each[0]:.{digits}f}" if len(each) == 1 else compare.mean_std(each)
                    for each in (last, first))))
        paragraphs.append(f"{label}: " * (len(groups) > 1) + (
            " ".join(words) or "No model was evaluated after its training began."))
    return Section("\n".join(paragraphs))


def trained(groups):
    """Say what was trained, in a column for each run."""
    every = [(label, one) for label, members in groups.items() for one in members]
    found = [{"legend": label, **facts_of(one.header, one.last())} for label, one in every]
    names = dict.fromkeys(name for facts in found for name in facts)
    rows = [[name, *(shown(facts.get(name, "-")) for facts in found)] for name in names]
    return Section("", (["", *(one.name for _, one in every)], rows))


def results(groups):
    """Return a table of the first and the last evaluation, mean ± standard deviation over seeds."""
    rows = []
    for name in dict.fromkeys(name for members in groups.values() for one in members
                              for name in one.scores()):
        about = title_of(name) if name in KNOWN else ""
        cells = [compare.mean_std(scores[name] for one in members for scores in [one.scores(index)]
                                  if name in scores)
                 for members in groups.values() for index in (0, -1)]
        if about or compare.is_loss(name):
            rows.append([f"{name}\n{about}", *cells])
    if not rows:
        raise BadInput("no run has been evaluated")
    several = [f"{label}: " if len(groups) > 1 else "" for label in groups]
    heads = [label + when for label in several for when in ("first", "last")]
    return Section("Of the first and the last evaluation. Runs that differ only in their seed are "
                   "one column, mean ± standard deviation.", (["", *heads], rows))


# ---- along training


def curve_names(groups):
    """Return the names of everything that one of the runs logged: loss terms, then DRAWN."""
    logged = [record for one in itertools.chain(*groups.values()) for record in one.records]
    terms = dict.fromkeys(name for record in logged if "loss" in record for name in record)
    known = {name for record in logged for name in (*record, *record.get("eval", ()))}
    return [name for name in terms if name not in FACTS] + [name for name in DRAWN
                                                            if name in known]


def title_of(metric):
    """Return what a metric is, and what a good value of it is."""
    about = KNOWN.get(metric) or screen.Metric(f"loss term {metric}")
    return "; ".join(filter(None, (about.title, about.remark)))


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
    if metric == "retrieval/order":
        axis.axhline(50, color="black", linewidth=1, linestyle=":")  # chance
    show_range(axis, itertools.chain(*groups.values()), metric)
    return axis.figure


def show_range(axis, every, metric):
    """Let the y axis show at least the metric's range, given what has its curves."""
    at_least = list(KNOWN[metric].range) if metric in DRAWN else []
    if metric == "geometry/rankme":  # the highest possible one, that of the log
        at_least += [100 * rank / share for one in every for rank, share in zip(
            one.curve(metric).values(), one.curve("geometry/rankme_share").values())]
    axis.update_datalim([(0, value) for value in at_least], updatex=False)
    axis.autoscale_view()


def comparable(groups, metric):
    """Return {name of a panel: groups} for a metric: one panel, or one for each different loss.
    A panel has all labels, so that they keep their colors, and the runs that belong in it."""
    if metric in DRAWN and metric not in TOTALS:
        return {metric: groups}
    panels = {}
    for label, members in groups.items():
        if any(one.curve(metric) for one in members):
            kind = seen.loss_of(members[0], metric in TOTALS)
            panels.setdefault(kind, {})[label] = members
    if len(panels) < 2:
        return {metric: groups}
    return {f"{metric}: {' / '.join(its)}": dict.fromkeys(groups, []) | its
            for its in panels.values()}


def along_training(groups):
    """Draw a panel for each metric in the logs."""
    found = {}
    for metric in curve_names(groups):
        for name, members in comparable(groups, metric).items():
            # The legend has a line for each label.
            axis, = plots.panels(height=2.4 + 0.15 * max(0, len(groups) - 2))[1]
            found[name] = draw_curve(axis, members, metric, title_of(metric), metric)
    if not found:
        raise BadInput("the log has no steps")
    return Section("Thin lines are seeds, thick lines their mean." * (
        max(map(len, groups.values())) > 1), figures=found)


# ---- what the model learned: Seen, Evaluation -> Section


def embeddings(one, evaluation):
    """Draw all columns in two dimensions, before and after training, with the same axes."""
    words = f"{evaluation.rows.label}, in the plane of their two principal components."
    joined = 25 if len(evaluation.texts) > 1 else 0
    if joined:
        words += " A gray line joins the texts of a row."
    before = runs.read_untrained(one.run)
    figures = {}
    if before is None:
        words += (" Embeddings before training are left out, because the run has no file "
                  "untrained.npy.")
    else:
        before = dict(zip(evaluation.texts, before))
        figures["untrained"] = plots.pca(before, title="Embeddings before training", joined=joined)
        words += " Both panels have the same axes, so a collapsed cloud is a dot."
    figures["embeddings"] = plots.pca(evaluation.embeddings, joined=joined,
                                      title="Embeddings of the trained model")
    axes = [figure.axes[0] for figure in figures.values()]
    edge = 1.05 * max(abs(axis.dataLim.extents).max() for axis in axes)
    for axis in axes:
        axis.set(xlim=(-edge, edge), ylim=(-edge, edge))
    return Section(words, figures=figures)


def answers(evaluation):
    """Return the answers of a decoder to prompts, and the gold texts."""
    prompts, golds, written, _ = evaluation.answers
    right = [*map(metrics.exact, written, golds)]
    rows = [(shown(prompt), mark(good) + shown(answer), shown(gold))
            for prompt, answer, gold, good in zip(prompts, written, golds, right)]
    return Section(f"{sum(right)} of {len(rows)} answers are right.",
                   (["prompt", "answer", "gold text"], rows))


def neighbors(one, evaluation, count=4, k=3):
    """Return the nearest texts of the first column to `count` rows of the others, by cosine; to its
    own rows if it is the only one; for a decoder its answers."""
    if evaluation.can_answer:
        return answers(evaluation)
    (first, y), *others = evaluation.embeddings.items()
    golds = evaluation.texts[first]
    rows, right = [], 0
    for row in range(min(count, len(golds))):
        name, x = others[row % len(others)] if others else (first, y)
        near = metrics.knn(x[row:row + 1], y, k + 1)
        # A text of the column that is searched is nearest to itself.
        found = [(golds[index], cosine) for index, cosine in zip(
            near.indices[0].tolist(), near.cosines[0].tolist()) if others or index != row][:k]
        right += bool(others) and found[0][0] == golds[row]
        lines = [f"{cosine:.2f} {shown(text)}" for text, cosine in found]
        if others:  # only the nearest text is a hit or a mistake
            lines[0] = mark(found[0][0] == golds[row]) + lines[0]
        rows.append((name, shown(evaluation.texts[name][row]), "\n".join(lines)))
    words = f"The three nearest of {len(golds)} texts in {first}, by cosine."
    if others:
        words += f" The nearest is the translation for {right} of {len(rows)} queries."
    return Section(words, (["", "query", "nearest, with their cosines"], rows))


def mark(right):
    return "✓ " if right else "✗ "


# After the verdict, in the order of the page. FOLDED are closed until a reader opens them.
MODEL_SECTIONS = {"What the model finds": neighbors, "Embeddings": embeddings}
SECTIONS = {"Along training": along_training}
FOLDED = {"Settings": trained, "All metrics": results}
