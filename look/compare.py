"""Compare runs in a table. Runs that differ only in their seed are one row.

    python -m look compare out/a-0 out/a-1 out/b-0 out/b-1

Tests are paired over seeds and two-sided. ± is the standard deviation over seeds (n - 1).
"""

import math
import statistics

import runs
from common import BadInput, Parser, comma_list, did_you_mean

from . import seen

SHOWN = ("retrieval/xsim", "retrieval/xsim++", "generate/exact", "probe/mean", "geometry/rankme",
         "geometry/cosine/same", "validation/loss", "step", "seconds")

# ---- statistics


def mean_std(values):
    """Return "59.9 ± 1.4", with two digits of the deviation; one number has four digits. Return "-"
    without numbers, or if one of them is infinity: that run ended before it reached its goal."""
    values = list(values)
    if not values or math.inf in values:
        return "-"
    mean = statistics.fmean(values)
    std = statistics.stdev(values) if len(values) > 1 else 0
    if all(isinstance(value, int) for value in values):
        return f"{mean:,.0f}"
    size, digits = (std, 2) if std else (abs(mean) or 1, 4)
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    return f"{mean:.{decimals}f}" + (f" ± {std:.{decimals}f}" if std else "")


def paired_test(scores, baseline):
    """Test {seed: number} of a method against a baseline over their common seeds. Return
    {"difference", "low", "high", "t", "p"} with the 95 % interval of the difference, or None if all
    differences are equal, or fewer than two. [paired t-test, Student 1908; LLM-JEPA, sec. 4]"""
    from scipy import stats  # reading and writing records needs only requirements.txt
    seeds = sorted(scores.keys() & baseline.keys())
    differences = [scores[seed] - baseline[seed] for seed in seeds]
    if len(set(differences)) < 2:
        return None
    test = stats.ttest_1samp(differences, 0)
    low, high = map(float, test.confidence_interval())
    return {"difference": statistics.fmean(differences), "low": low, "high": high,
            "t": float(test.statistic), "p": float(test.pvalue)}


def p_text(p):
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def test_table(scores, pairs):
    """Return the heads and rows of a table of paired tests: scores {metric: {label: {seed:
    number}}}, pairs {label: its baseline}."""
    rows = []
    for metric, values in scores.items():
        for label, baseline in pairs.items():
            test = paired_test(values.get(label, {}), values.get(baseline, {}))
            if test:
                rows.append([f"{label} against {baseline}", metric, f"{test['difference']:+.3g}",
                             f"{test['low']:+.3g} to {test['high']:+.3g}", p_text(test["p"])])
    return ["paired t-test, without a correction", "metric", "difference", "95 % interval",
            "p"], rows


def markdown(heads, rows):
    """Return the lines of a Markdown table."""
    lines = [f"| {' | '.join(heads)} |", "| --- |" + " ---: |" * (len(heads) - 1)]
    return lines + [f"| {' | '.join(map(str, row))} |" for row in rows]


def aligned(heads, rows):
    """Return the lines of a table whose columns are aligned with spaces."""
    cells = [list(map(str, row)) for row in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in cells]


# ---- runs


def numbers(every):
    """Return {id of a Seen: its numbers}: those of eval.json if all runs have it for the same rows,
    else those of the last evaluation in their logs."""
    stored = [runs.read_results(f"{one.run}/eval.json") for one in every]
    rows = {results.get("rows") for results in stored}
    if len(rows) > 1:
        stored = [{}] * len(every)
    return {id(one): one.last() | {metric: value for metric, value in more.items()
                                  if isinstance(value, (int, float))}
            for one, more in zip(every, stored)}


def chosen_metrics(every, names=()):
    """Return the metrics that some runs have, of those that were named or are shown by default.
    Raises BadInput for a named one that no run has."""
    known = {metric for found in numbers(every).values() for metric in found}
    for name in names:
        if name not in known:
            raise BadInput(f"--metric {name}: no run has it{did_you_mean(name, sorted(known))}")
    return [name for name in names or SHOWN if name in known]


def table(groups, metrics):
    """Return the heads and rows of {label: list of Seen}: mean ± std over seeds, and the verdict of
    the health line."""
    found = numbers([one for members in groups.values() for one in members])
    rows = []
    for label, members in groups.items():
        cells = [mean_std([found[id(one)][metric] for one in members if metric in found[id(one)]])
                 for metric in metrics]
        said = dict.fromkeys(list(one.verdicts().values())[-1].partition(" (")[0]
                             for one in members if one.verdicts())
        rows.append([label, len(members), *cells, " / ".join(said) or "-"])
    return ["run", "seeds", *metrics, "health"], rows


def compare_command(words):
    parser = Parser("python -m look compare", "Print a table of runs. Runs that differ only in "
                    "their seed are one row, mean ± standard deviation. Other rows are tested "
                    "against the first over common seeds.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--metric", type=comma_list, default=(), help="metrics to show, comma-"
                        f"separated [those that apply of {', '.join(SHOWN)}]")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    options = parser.parse_args(words)
    every = [*map(seen.see, options.runs)]
    groups = seen.grouped(every)
    metrics = chosen_metrics(every, options.metric)
    lines = markdown if options.markdown else aligned
    print(*lines(*table(groups, metrics)), sep="\n")
    found = numbers(every)
    scores = {metric: {label: {one.first["config"].get("seed"): found[id(one)][metric]
                               for one in members if metric in found[id(one)]}
                       for label, members in groups.items()}
              for metric in metrics if metric not in ("step", "seconds")}
    first, *others = groups
    heads, tests = test_table(scores, dict.fromkeys(others, first))
    if tests:
        print("", *lines(heads, tests), sep="\n")
    elif others:
        print("\nno t-test: it needs two seeds that both rows have")
    unnamed = seen.differing([seen.settings_of(members[0].first) for members in groups.values()])
    unnamed = [name for name in unnamed if not any(name.replace("_", "-") in label
                                                   for label in groups)]
    if unnamed:
        print(f"\nthe rows also differ in: {', '.join(unnamed)}")
