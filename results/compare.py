"""Runs against each other: mean and standard deviation over seeds, and paired tests.

    python -m results compare out/a-82 out/a-23 out/b-82 out/b-23        # b is tested against a
    python -m results compare out/* --metrics retrieval/xsim,geometry/rankme

Runs that differ in nothing but their seed are one group, a row of the table.
"""
# First the table writer of this folder, then runs and groups, statistics, the command.

import json
import re
import statistics
from pathlib import Path
from typing import NamedTuple

from scipy import stats

import evaluate
from corpora.folder import read_first, read_log, read_results
from corpora.program import BadInput, Parser, comma_list, did_you_mean
from tasks import __main__ as wing
from tasks import finetune

# Settings that do not change what is learned, or only by chance.
FREE = set("seed out cache device attention compile log_every eval_every eval_limit save_every"
           .split())
# Results that must be the same before others may be compared.
AMOUNTS = ("rows", "train_rows", "epochs")
ROOT = Path(__file__).parent.parent
DATA = json.loads((ROOT / "results/experiments.json").read_text(encoding="utf-8"))
COLUMNS = DATA["columns"]  # {heading: metric} of a table that does not say its own

# --------------------------------------------------------------------------------------------------
# Tables


def markdown(heads, rows):
    """Headings and rows of cells -> the lines of a Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for row in rows:
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return lines


def mean_std(values, unit="%"):
    """Numbers -> "0.70 ± 0.10" (n - 1); of one number no deviation, of none "-"."""
    if not values:
        return "-"
    if isinstance(values[0], int) and len(set(values)) == 1:
        return f"{values[0]:,}"
    mean = statistics.fmean(values)
    digits = 2 if unit == "%" or abs(mean) >= 1 else 4
    numbers = [mean, statistics.stdev(values)] if len(values) > 1 else [mean]
    return " ± ".join(f"{number:.{digits}f}" for number in numbers)


def unit_of(name):
    """A metric's unit, and which way is better: "lower", "higher", "" if neither is or unknown."""
    task, _, rest = name.partition("/")
    if task not in {*evaluate.TASKS, *wing.TASKS} and rest.partition("/")[0] in evaluate.TASKS:
        # The experiments put the name of the rows before it.
        return unit_of(rest)
    if task in evaluate.TASKS and task not in wing.TASKS:
        return evaluate.about(name)[:2]
    known = wing.SENTENCES | finetune.ABOUT
    if task in wing.TASKS:
        known = wing.TASKS[task][2] | evaluate.ANSWERS
    for word in reversed(name.split("/")):
        if word in known:
            return known[word][:2]
    return "", ""


# --------------------------------------------------------------------------------------------------
# Runs and groups


class Run(NamedTuple):
    """settings: the config in one level ("lr", "model.layers", ...), without what is FREE; scores
    {metric: {(seed,): number}}, of fine-tuning {(seed, seed of fine-tuning): number}."""
    folder: Path
    settings: dict
    config: dict
    tokenizer: str
    scores: dict
    steps: int

    @property
    def seed(self):
        return self.config.get("seed", 0)


class Group(NamedTuple):
    label: str
    runs: list

    def scores(self, metric):
        """{seeds: number} of the runs that have it"""
        found = {}
        for run in self.runs:
            found |= run.scores.get(metric, {})
        return found


def read_scores(folder, files, seed):
    """The numbers of a run's files; "metric/seed_7" is the metric after fine-tuning with seed 7."""
    scores = {}
    for name in files:
        if not (folder / name).is_file():
            command = f"python evaluate.py {folder}"
            if name.startswith("finetune-"):
                task = name.removeprefix("finetune-").removesuffix(".json")
                command = f"python -m tasks finetune {folder} --task {task}"
            raise BadInput(f"{folder} has no {name}: make it with {command}")
        found = read_results(folder / name)
        if not found:
            raise BadInput(f"{folder / name} is no JSON object: make it again")
        double = found.keys() & scores.keys()
        if double:
            raise BadInput(f"--files: {name} and another both hold {min(double)}; give one of them")
        repeated = {}
        for key, value in found.items():
            part = re.fullmatch(r"(.+)/seed_(\d+)", key)
            if part:
                repeated.setdefault(part[1], {})[seed, int(part[2])] = value
            elif isinstance(value, (int, float)):
                scores[key] = {(seed,): value}
        scores |= repeated
    return scores


def read_run(folder, files=("eval.json",), ignored=()):
    folder = Path(folder)
    first = read_first(folder)
    settings = {}
    for name, value in first["config"].items():
        inner = value if isinstance(value, dict) else {"": value}
        settings |= {f"{name}.{key}".rstrip("."): one for key, one in inner.items()}
    settings = {name: one for name, one in settings.items() if name not in FREE | set(ignored)}
    seed = first["config"].get("seed", 0)
    # A path that ends in the run's own seed: out/a-82 and out/a-23 start from the same.
    settings["init"] = re.sub(rf"\b{seed}/?$", "SEED", settings.get("init") or "")
    steps = max(record.get("step", 0) for record in read_log(folder))
    scores = read_scores(folder, files, seed)
    return Run(folder, settings, first["config"], first.get("tokenizer_hash"), scores, steps)


def label_of(settings, others):
    """What tells these settings from others of their objective: "mexma koleo_weight 0.3"."""
    same = [other for other in others if other.get("objective") == settings.get("objective")]
    words = []
    for name, value in settings.items():
        if any(other.get(name) != value for other in same):
            words.append(f"{name.split('.')[-1]} {value if value != '' else 'none'}")
    more = f" and {len(words) - 3} more" if len(words) > 3 else ""
    return f"{settings.get('objective') or 'imported'} {', '.join(words[:3])}".strip() + more


def group(runs):
    """Runs -> Groups, in the order of their first runs; BadInput for the same run twice."""
    found = {}
    for run in runs:
        own = found.setdefault(json.dumps(run.settings, sort_keys=True), {})
        if run.seed in own:
            raise BadInput(f"{own[run.seed].folder} and {run.folder} are the same run with the "
                           f"same seed {run.seed}: give one of them")
        own[run.seed] = run
    settings = [json.loads(key) for key in found]
    groups = []
    for own, runs in zip(settings, found.values()):
        label = label_of(own, settings)
        if label in [group.label for group in groups]:
            label += f" ({min(run.folder for run in runs.values())})"
        groups.append(Group(label, list(runs.values())))
    return groups


def check_same_rows(runs, names, files):
    """Numbers of different rows are refused. -> notes on what does not forbid to compare."""
    used = {name.split("/")[0] for name in names}
    seen = {}
    for run in runs:
        config = run.config
        amounts = {}
        if "eval.json" in files:
            amounts["the data"] = Path(config.get("eval_data") or config.get("data", "")).name
            amounts["--langs"] = config.get("langs") or "all"
        for name, values in run.scores.items():
            if name.split("/")[0] in used and name.split("/")[-1] in AMOUNTS:
                amounts[name] = min(values.values())
        for name, value in amounts.items():
            other, folder = seen.setdefault(name, (value, run.folder))
            if value != other:
                raise BadInput(f"{name} is {other} in {folder} and {value} in {run.folder}: their "
                               "numbers cannot be compared; evaluate both with the same --data, "
                               "--langs and --limit, and name the file with --files")
    notes = []
    if len({run.tokenizer for run in runs}) > 1:
        notes.append("The tokenizers differ: metrics of tokens cannot be compared, of texts can.")
    for run in runs:
        asked = run.config.get("steps", 0)
        if run.steps < asked:
            notes.append(f"{run.folder} is not finished: step {run.steps} of {asked}.")
        trained = (run.folder / "model.pt").stat().st_mtime
        for name in files:
            if (run.folder / name).stat().st_mtime < trained:
                notes.append(f"{run.folder / name} is older than the model: it was trained since.")
    return notes


def unequal(groups):
    """A note on common settings that are not the same in all rows: labels do not show them."""
    each = [one.runs[0].settings for one in groups]
    said = []
    for name, value in each[0].items():
        values = [str(settings.get(name, value)) for settings in each]
        if "." not in name and name not in ("objective", "init") and len(set(values)) > 1:
            said.append(f"{name} {' / '.join(values)}")
    if not said:
        return []
    return [f"Settings that are not the same in all rows, in their order: {'; '.join(said)}."]


# --------------------------------------------------------------------------------------------------
# Statistics


def paired_test(scores, base, better):
    """Is a group better than the base? {seeds: number} each -> {"n", "difference", "t", "p"} of a
    paired one-tailed t-test over the common seeds, p near 1 if it is worse; or why there is none,
    a text. [Student 1908; LLM-JEPA, sec. 4]"""
    common = sorted(scores.keys() & base.keys())
    if not better:
        return "which way is better is not known"
    if len(common) < 2:
        return f"a test needs 2 common seeds, there are {len(common)}"
    differences = [scores[seeds] - base[seeds] for seeds in common]
    if min(differences) == max(differences):
        return f"the same difference, {differences[0]:+g}, in every seed"
    sign = 1 if better == "higher" else -1
    found = stats.ttest_1samp([sign * one for one in differences], 0, alternative="greater")
    return {"n": len(common), "difference": statistics.fmean(differences),
            "t": float(found.statistic), "p": float(found.pvalue)}


def compare(groups, names):
    """-> a dict for each group: label, seeds, settings and metrics {name: {"values", "test"}};
    test: `paired_test` against the first group, None of that itself."""
    rows = []
    for each in groups:
        metrics = {}
        for name in names:
            scores = each.scores(name)
            test = None
            if scores and each is not groups[0]:
                test = paired_test(scores, groups[0].scores(name), unit_of(name)[1])
            metrics[name] = {"values": list(scores.values()), "test": test}
        rows.append({"label": each.label, "seeds": [run.seed for run in each.runs],
                     "metrics": metrics, "settings": each.runs[0].settings})
    return rows


def cell(found, unit, runs):
    """A cell: "0.70 ± 0.10, p = 0.012 (n 5)"; n where the column of seeds does not say it."""
    values = found["values"]
    text = mean_std(values, unit)
    if isinstance(found["test"], dict):
        p = found["test"]["p"]
        shown = f"p = {p:.3f}" if p >= 0.001 else "p < 0.001"
        return f"{text}, {shown} (n {found['test']['n']})"
    if len(values) > runs:
        return f"{text} (n {len(values)})"
    return text if len(values) == runs else f"{text} ({len(values)} of {runs})"


def page(rows, names, notes):
    """The table, a row a group, and what one must know to read it."""
    heads = ["run", "seeds"]
    for name in names:
        unit, better = unit_of(name)
        heads.append(" ".join(filter(None, [name, unit, better and f"({better})"])))
    cells = []
    tests = 0
    reasons = {}
    for row in rows:
        line = [row["label"], str(row["seeds"])[1:-1]]
        for name, found in row["metrics"].items():
            line.append(cell(found, unit_of(name)[0], len(row["seeds"])))
            tests += isinstance(found["test"], dict)
            if isinstance(found["test"], str):
                reasons.setdefault((row["label"], found["test"]), []).append(name)
        cells.append(line)
    lines = markdown(heads, cells)
    lines += ["", "Mean ± standard deviation (n - 1) over seeds; lower, higher: what is better."]
    if tests:
        lines.append("p: paired one-tailed t-test over n common seeds, that the row is better than "
                     f"{rows[0]['label']}; near 1, it is worse.")
    if tests > 1:
        lines.append(f"{tests} tests: by chance alone, .05 would be passed {0.05 * tests:.1f} "
                     f"times; Holm's correction asks {0.05 / tests:.2g} of the smallest p.")
    for (label, reason), of in reasons.items():
        which = ", ".join(of) if len(of) < len(names) else "all metrics"
        lines.append(f"No p for {label}, {which}: {reason}.")
    return "\n".join(lines + notes)


# --------------------------------------------------------------------------------------------------
# The command


def main(arguments):
    parser = Parser("python -m results compare", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="evaluated runs; the first is base")
    parser.add_argument("--metrics", type=comma_list, help="such as retrieval/xsim,geometry/rankme")
    parser.add_argument("--files", type=comma_list, default=["eval.json"],
                        help="of each run, such as eval-flores.json,finetune-mnli.json [eval.json]")
    parser.add_argument("--ignore", type=comma_list, default=[], help="settings that may differ")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    options = parser.parse_args(arguments)
    runs = [read_run(folder, options.files, options.ignore) for folder in options.runs]
    groups = group(runs)
    known = {}
    for run in runs:
        known |= run.scores
    for name in options.metrics or ():
        if name not in known:
            near = did_you_mean(name, known, f": there is {', '.join(known)}")
            raise BadInput(f"metric {name!r} is in none of the runs{near}")
    names = options.metrics or [name for name in COLUMNS.values() if name in known]
    names = names or [name for name in known if unit_of(name)[1]]
    notes = check_same_rows(runs, names, options.files) + unequal(groups)
    rows = compare(groups, names)
    if options.json:
        print(json.dumps({"groups": rows, "notes": notes}, indent=1))
    else:
        print(page(rows, names, notes))
