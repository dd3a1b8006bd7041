"""The board: claims of the four papers and of those since, each with what was measured here.

    python -m results claims    # writes claims.md and its pictures, claims-1.png, ...

A claim of experiments.json names an experiment, a metric, the run that is claimed to be better and
its control. The verdict is a rule: a paired two-sided t-test over the common seeds, and Holm's
correction over all claims that have a test.
"""

import itertools
from statistics import fmean

from scipy import stats

from corpora.folder import write_atomic
from corpora.program import Parser

from . import plots
from .compare import by_label, mean_std, paired_test, unit_of
from .run import ALL, read_records
from .tables import DATA, ROOT, markdown

PAGE = ROOT / "results/claims.md"
BOARD = DATA["board"]  # what the pictures show
LEVEL = 0.05  # of the tests
SEEDS = 3  # at least; fewer say nothing


# ---- verdicts


def numbers_of(claim):
    """{seed: number} of the run that is claimed to be better, and of its control."""
    found = by_label(read_records(claim["experiment"]), claim["metric"])
    return found.get(claim["ours"], {}), found.get(claim.get("control"), {})


def last_mlm_loss(claim):
    """The largest MLM loss, in nats, that a run of the claim ended with; None without one."""
    losses = by_label(read_records(claim["experiment"]), "mlm")
    ended = [loss for label in (claim["ours"], claim.get("control"))
             for loss in losses.get(label, {}).values()]
    return max(ended, default=None)


def is_too_short(claim):
    """Whether some run of the claim has hardly learnt more than how frequent the words are: its MLM
    loss is not a nat below their entropy."""
    unigram = ALL[claim["experiment"]].get("unigram")
    return unigram is not None and last_mlm_loss(claim) > unigram - 1


def outcome(claim):
    """What `paired_test` gives of a claim, or a verdict where no test is possible, a text."""
    if is_too_short(claim):
        return "not testable at this length"
    # The paper has nothing beside this number.
    if "control" not in claim:
        return "not testable here"
    return claim_test(*numbers_of(claim))


def claim_test(ours, control):
    """{seed: number} of two runs -> what `paired_test` gives, or a verdict where no test is
    possible, a text."""
    if not ours or not control:
        return "not measured yet"
    if len(ours.keys() & control.keys()) < SEEDS:
        return "open: too few seeds"
    test = paired_test(ours, control)
    return test if isinstance(test, dict) else "no difference found"


def holm(ps):
    """{name: p} -> {name: corrected p}: the smallest of m is multiplied by m, the next by m - 1,
    and so on, and none is smaller than the one before it [Holm 1979]."""
    corrected = {}
    largest = 0.0
    for rank, name in enumerate(sorted(ps, key=ps.get)):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[name]))
        corrected[name] = largest
    return corrected


def verdict(test, corrected, better):
    """The outcome in words, out of what `paired_test` gave, its p after Holm's correction, and
    which way is better ("higher" or "lower")."""
    if test["p"] >= LEVEL:
        return "no difference found"
    is_better = (test["difference"] > 0) == (better == "higher")
    where = "here" if corrected < LEVEL else "before the correction only"
    return f"holds {where}" if is_better else f"the reverse holds {where}"


def p_text(p):
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def judge(claims):
    """Claims -> a pair of cells for each: what was measured, and the verdict."""
    found = [outcome(claim) for claim in claims]
    corrected = holm({number: test["p"] for number, test in enumerate(found)
                      if isinstance(test, dict)})
    cells = []
    for number, (claim, test) in enumerate(zip(claims, found)):
        ours, control = numbers_of(claim)
        unit = unit_of(claim["metric"])[0]
        shown = mean_std(list(ours.values()), unit)
        parts = [f"{shown} ({len(ours)} seeds)"]
        if control:
            parts = [f"{claim['control']} {mean_std(list(control.values()), unit)}",
                     f"{claim['ours']} {shown}",
                     f"{len(ours.keys() & control.keys())} common seeds"]
        if "unigram" in ALL[claim["experiment"]]:
            parts.append(f"MLM ended at {last_mlm_loss(claim):.2f} nats at most, the words' "
                         f"frequencies alone give {ALL[claim['experiment']]['unigram']}")
        word = test
        if isinstance(test, dict):
            word = verdict(test, corrected[number], claim["better"])
            parts += [f"difference {test['low']:+.2f} to {test['high']:+.2f}",
                      f"p {p_text(test['p'])}", f"corrected {p_text(corrected[number])}"]
        cells.append((", ".join(parts), word))
    return cells


# ---- pictures


def along(experiment, metric, x):
    """{label: (places, (seeds, P))} of a metric along training; places are steps, or TFLOP if `x`
    says so."""
    found = {}
    for record in read_records(experiment):
        size = record["flops"] / record["steps"] / 1e12 if "TFLOP" in x else 1
        points = {int(step) * size: kept[metric]
                  for step, kept in record["curve"].items() if metric in kept}
        if points:
            first, seeds = found.setdefault(record["label"], (list(points), []))
            seeds.append(list(points.values())[:len(first)])
    return found


def across(shown):
    """{line: (places, (seeds, P))} of a metric at the end of runs that stand at different places,
    such as numbers of rows; the seeds that all runs of a line have."""
    found = by_label(read_records(shown["experiment"]), shown["metric"])
    series = {}
    for line, labels in shown["lines"].items():
        seeds = set.intersection(*(set(found[label]) for label in labels))
        numbers = [[found[label][seed] for label in labels] for seed in sorted(seeds)]
        series[line] = (shown["places"], numbers)
    return series


def line_picture(shown):
    """One of BOARD's "along" or "across": lines of a metric, with what comes of it as title."""
    if "lines" in shown:
        series = across(shown)
    else:
        found = along(shown["experiment"], shown["metric"], shown["x"])
        series = {label: found[label] for label in shown["runs"]}
    means = {label: [fmean(each) for each in zip(*seeds)] for label, (_, seeds) in series.items()}
    way = unit_of(shown["metric"])[1]
    ends = sorted(means, key=lambda label: means[label][-1], reverse=way == "higher")
    said = shown["title"].format(best=ends[0], worst=ends[-1], first=means[ends[0]][0],
                                 last=means[ends[0]][-1])
    axis, = plots.panels(height=2.6)[1]
    plots.lines(series, shown["x"], shown["y"] + (f"\n{way} is better" if way else ""), axis=axis)
    if "places" in shown:
        axis.set_xscale("log")
        axis.set_xticks(shown["places"], [f"{place:,}" for place in shown["places"]])
        axis.minorticks_off()
        axis.invert_xaxis()  # from many to few: there the lines part
    plots.label_ends(axis)
    return plots.headline(axis.figure, said)


def usefulness(geometry):
    """{experiment: {label: (geometry, mean of the probes)}}, means over the seeds of the encoders
    on the board, their rank correlation, and its p."""
    shown = BOARD["usefulness"]
    points = {}
    for experiment in shown["experiments"]:
        each = {}
        for record in read_records(experiment):
            numbers = [record["eval"].get(name) for name in (geometry, *shown["probes"])]
            if None not in numbers:
                pair = (numbers[0], fmean(numbers[1:]))
                each.setdefault(record["label"], []).append(pair)
        points[experiment] = {label: tuple(map(fmean, zip(*pairs)))
                              for label, pairs in each.items()}
    found = stats.spearmanr([pair for each in points.values() for pair in each.values()])
    return points, found.statistic, found.pvalue


def correlations():
    """Does geometry say what the probes find? A line for each measure."""
    lines = []
    for name, metric in BOARD["usefulness"]["geometry"].items():
        points, rank, p = usefulness(metric)
        lines.append(f"- {name} against the probes: Spearman {rank:.2f} (p {p:.2f}) over the means "
                     f"of {sum(map(len, points.values()))} encoders")
    return lines


def scatter_picture():
    """Each measure of geometry against the probes, a point an encoder."""
    scatters = BOARD["usefulness"]["geometry"]
    figure, axes = plots.panels(1, len(scatters), height=2.7)
    for axis, (name, metric) in zip(axes, scatters.items()):
        points, rank, p = usefulness(metric)
        for (experiment, each), mark in zip(points.items(), "o^"):
            axis.plot(*zip(*each.values()), mark, markersize=4, label=experiment)
        way = unit_of(metric)[1]
        plots.finish(axis, f"{name}\n{way} is better", "")
        axis.get_legend().remove()
        verb = "tells" if p < LEVEL else "does not tell"
        axis.set_title(f"{verb}:\nSpearman {rank:.2f}, p {p_text(p)}", fontsize=plots.SMALL + 0.5)
    axes[0].set_ylabel("mean of five probes, %\nhigher is better", fontsize=plots.SMALL + 1)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower left", ncols=2,
                  fontsize=plots.SMALL + 0.5, frameon=False)
    return plots.headline(figure, "Does geometry tell what probes find? A point an encoder")


def signature():
    """Each measure of a decoder with the JEPA loss, in percent of what it is without."""
    shown = BOARD["signature"]
    records = read_records(shown["experiment"])
    axis, = plots.panels()[1]
    axis.figure.set_size_inches(5.4, 0.6 + 0.35 * len(shown["metrics"]))
    names = []
    for place, (name, metric) in enumerate(shown["metrics"].items()):
        ours, control = (by_label(records, metric)[label] for label in shown["runs"])
        shares = [100 * ours[seed] / control[seed] for seed in ours.keys() & control.keys()]
        word = "no difference found"
        way = unit_of(metric)[1]
        test = paired_test(ours, control)
        if test["p"] < LEVEL:
            word = "better" if (test["difference"] > 0) == (way == "higher") else "worse"
        colour = {"better": plots.COLOURS[0], "worse": plots.COLOURS[3]}.get(word, "grey")
        axis.barh(place, fmean(shares), color=colour)
        axis.hlines(place, min(shares), max(shares), color="black", linewidth=1.2)
        axis.text(max(shares) + 2, place, word, va="center", fontsize=plots.SMALL + 0.5,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
        names.append(f"{name}\n{way} is better")
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.axvline(100, color="black", linewidth=1, linestyle=":")
    plots.finish(axis, "{}, % of {}'s".format(*shown["runs"]), "")
    return plots.headline(axis.figure, shown["title"])


def pictures():
    """{name of the file: figure}."""
    drawn = [*map(line_picture, BOARD["along"]), scatter_picture(),
             *map(line_picture, BOARD["across"])]
    return {f"claims-{number}": figure for number, figure in enumerate(drawn, 1)}


def hours():
    """All recorded trainings and tests, in hours of one thread."""
    each = itertools.chain(*map(read_records, ALL))
    return sum((one.get("seconds") or 0) + one.get("test_seconds", 0) for one in each) / 3600


# ---- the page


def board():
    """The Markdown of the board."""
    rows = []
    notes = []
    judged = judge(DATA["claims"])
    for number, (claim, (numbers, word)) in enumerate(zip(DATA["claims"], judged), start=1):
        word = f"**{word}**" + claim.get("but", "")
        rows.append([number, claim["claim"], claim["paper"], claim["measure"], numbers,
                     claim["matched"], word, f"`python -m results {claim['experiment']}`"])
        notes.append(f"{number}. {claim['note']}")
    heads = ["", "claim", "the paper says", "measure", "measured here", "matched", "verdict",
             "command"]
    head, line, *body = markdown(heads, rows)
    return "\n".join([
        "# Claims of the four papers, and of those since", "",
        BOARD["rule"].format(seeds=SEEDS, level=LEVEL), "",
        f"All recorded runs took {hours():.0f} hours of one thread.", "",
        head, line.replace(":", ""), *body, "", "## How to read each", "", *notes, "",
        "## Pictures", "", *[f"![{name}]({name}.png)" for name in pictures()], "",
        BOARD["about"], "", *correlations()]) + "\n"


def main(arguments):
    Parser("python -m results claims", __doc__).parse_args(arguments)
    write_atomic(PAGE, board().encode())
    for name, figure in (pictures() | {"signature": signature()}).items():
        write_atomic(PAGE.with_name(f"{name}.png"), plots.png(figure))
    print("results/claims.md")
