"""Compare runs in a table. Runs that differ only in their seed are one row.

    python -m look compare out/a-0 out/a-1 out/b-0 out/b-1

Tests are paired over seeds and two-sided. ± is the standard deviation over seeds (n - 1).
"""

import math
import statistics

from base.common import BadInput, Parser, comma_list, did_you_mean, file_hash, shown
from harness import runs
from harness.screen import METRICS

from . import seen

# The metrics of a table by default: those that have a curve.
SHOWN = (*(name for name, about in METRICS.items() if about.range is not None), "step", "seconds")

# ---- statistics


def mean_std(values, decimals=None):
    """Return "59.9 ± 1.4", with two digits of the deviation. A number without a deviation has
    `decimals`, or four digits. Return "-" without numbers, or if one of them is infinity: that run
    ended before it reached its goal."""
    values = list(values)
    if not values or math.inf in values:
        return "-"
    mean = statistics.fmean(values)
    std = statistics.stdev(values) if len(values) > 1 else 0
    if all(isinstance(value, int) for value in values):
        return f"{mean:,.0f}"
    if std:
        decimals = decimals_of(std, 2)
    elif decimals is None:
        decimals = decimals_of(mean, 4)
    return f"{mean:.{decimals}f}" + (f" ± {std:.{decimals}f}" if std else "")


def decimals_of(value, digits):
    """Return the number of decimals with which a value has that many significant digits."""
    return max(0, digits - 1 - math.floor(math.log10(abs(value) or 1)))


def column(cells):
    """Return mean_std of each cell, a list of numbers. A number without a deviation has the
    decimals of its column: as many as the others usually have, or four digits of the largest."""
    cells = [list(values) for values in cells]
    texts = [mean_std(values) for values in cells]
    usual = [len(text.partition(" ")[0].partition(".")[2]) for text in texts if "±" in text]
    if usual:
        decimals = statistics.median_low(usual)
    else:
        decimals = decimals_of(max((abs(x) for values in cells for x in values
                                    if math.isfinite(x)), default=0), 4)
    return [mean_std(values, decimals) for values in cells]


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
                seeds = values[label].keys() & values[baseline].keys()
                rows.append([f"{label} against {baseline}", metric, str(len(seeds)),
                             f"{test['difference']:+.3g}",
                             f"{test['low']:+.3g} to {test['high']:+.3g}", p_text(test["p"])])
    return ["paired t-test, without a correction", "metric", "seeds", "difference",
            "95 % interval", "p"], rows


def markdown(heads, rows):
    """Return the lines of a Markdown table."""
    lines = [f"| {' | '.join(heads)} |", "| --- |" + " ---: |" * (len(heads) - 1)]
    return lines + [f"| {' | '.join(map(shown, row))} |" for row in rows]


def aligned(heads, rows):
    """Return the lines of a table whose columns are aligned with spaces."""
    # A foreign run can have an objective whose name would control the terminal.
    cells = [list(map(shown, row)) for row in (heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in cells]


# ---- runs


def same_results(every):
    """Return what eval.json says of each Seen: [{metric: number}]; [] unless all of them have it,
    for the same rows, and for the model that is there now."""
    stored = [runs.read_results(one.run / "eval.json") for one in every]
    for one, results in zip(every, stored):
        model = one.run / "model.pt"
        if not results or model.is_file() and results.get("model") != file_hash(model)[:8]:
            return []
    return stored if len({results.get("rows") for results in stored}) == 1 else []


def numbers(every):
    """Return {id of a Seen: its numbers}: those of the last evaluation in its log, and those of
    eval.json if all runs have it for the same rows, and for the model that is there now."""
    stored = same_results(every) or [{}] * len(every)
    return {id(one): one.last() | {metric: value for metric, value in more.items()
                                  if isinstance(value, (int, float))}
            for one, more in zip(every, stored)}


def differences(groups):
    """Return the settings in which rows differ and that their labels do not name."""
    names = seen.differing([seen.settings_of(members[0].header) for members in groups.values()])
    return [name for name in names
            if not any(name.replace("_", "-") in label for label in groups)]


def is_loss(metric):
    return metric.startswith("validation/")


def compare_command(words):
    parser = Parser("python -m look compare", "Print a table of runs. Runs that differ only in "
                    "their seed are one row, mean ± standard deviation. Other rows are tested "
                    "against the first over common seeds.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--metric", type=comma_list, default=(), help="metrics to show, comma-"
                        f"separated [those that apply of {', '.join(SHOWN)}]")
    options = parser.parse_args(words)
    every = [*map(seen.see, options.runs)]
    for number, one in enumerate(every):
        if one.run.resolve() in [other.run.resolve() for other in every[:number]]:
            raise BadInput(f"{shown(one.name)} is given twice: name each run once")
    groups, found = seen.grouped(every), numbers(every)
    known = {metric for one in found.values() for metric in one}
    for name in options.metric:
        if name not in known:
            raise BadInput(f"--metric {name}: no run has it{did_you_mean(name, sorted(known))}")
    unlike = len({*map(seen.loss_of, every)}) > 1
    scores = {metric: {label: {one.header["config"].get("seed"): found[id(one)][metric]
                               for one in members if metric in found[id(one)]}
                       for label, members in groups.items()}
              for metric in options.metric or SHOWN if metric in known
              if options.metric or not (unlike and is_loss(metric))}
    texts = [column(by_label[label].values() for label in groups) for by_label in scores.values()]
    rows = []
    for (label, members), *cells in zip(groups.items(), *texts):
        verdicts = dict.fromkeys(verdict[0].partition(" (")[0] for one in members
                                 if (verdict := seen.since(one)))
        rows.append([label, len(members), *cells, " / ".join(verdicts) or "-"])
    print(*aligned(["run", "seeds", *scores, "health"], rows), sep="\n")
    first, *others = groups
    tested = {metric: by_label for metric, by_label in scores.items()
              if metric not in ("step", "seconds") and not (unlike and is_loss(metric))}
    if unequal := differences(groups):
        print(f"\nthe rows also differ in: {', '.join(unequal)}")
    heads, tests = test_table(tested, dict.fromkeys(others, first))
    if tests:
        print("", *aligned(heads, tests), sep="\n")
    elif others:
        print("\nno t-test: it needs two seeds that both rows have")
    if unlike:
        print("\nlosses are not compared: those of these rows are different functions")
    # An imported run has no limit.
    limits = {one.header["config"].get("eval_limit") for one in every} - {None}
    if len(limits) > 1 and not same_results(every):
        print("\nthese runs can have been evaluated on different rows (--eval-limit "
              f"{', '.join(map(str, sorted(limits)))}): run evaluate.py on each of them")
    for one in every:
        step, steps = max(one.evaluations(), default=0), one.header["config"].get("steps", 0)
        if step < steps:
            print(f"\n{shown(one.name)}: its last evaluation is that of step {step} of {steps}")
        for record in one.records:
            if record.get("warning", "").startswith("--steps"):
                print("\n" + shown(f"{one.name}, step {record['step']}: {record['warning']}"))
