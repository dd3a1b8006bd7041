"""Runs against each other: mean and standard deviation over seeds, and paired tests.

    python -m results compare out/a-82 out/a-23 out/b-82 out/b-23        # b is tested against a
    python -m results compare out/* --metrics retrieval/xsim,geometry/rankme

Runs that differ in nothing but their seed are one group, a row of the table.
"""

import difflib
import json
import re
import statistics
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from scipy import stats

import evaluate
from corpora.folder import read_first, read_log, read_results
from corpora.program import BadInput, Parser, comma_list, did_you_mean
from tasks import __main__ as wing
from tasks import metrics

from .tables import DATA, markdown

# Settings that do not change what is learned, or only by chance.
FREE = set("seed out cache device attention compile log_every eval_every eval_limit save_every"
           .split())
# Results that must be the same before others may be compared.
AMOUNTS = ("rows", "train_rows", "epochs")
TASKS = wing.make_tasks(None)  # for their metrics alone
COLUMNS = DATA["columns"]  # {heading: metric} of a table that names no columns of its own

# ---- tables of records


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
    if task not in TASKS and rest.partition("/")[0] in evaluate.TASKS:
        # The experiments put the name of the rows before it.
        return unit_of(rest)
    if task in evaluate.TASKS and task not in wing.FUNCTIONS:
        return evaluate.about(name)[:2]
    known = metrics.known_metrics("sets") | metrics.known_metrics("finetune")
    if task in TASKS:
        known = TASKS[task].about
    for word in reversed(name.split("/")):
        if word in known:
            return known[word][:2]
    return "", ""


def by_label(records, name):
    """{label: {seed: number}} of a result, a term of the last step, or a field such as "steps"."""
    found = {}
    for record in records:
        number = (record | record.get("last", {}) | record["eval"]).get(name)
        if number is not None:
            found.setdefault(record["label"], {})[record["seed"]] = number
    return found


def paired_test(scores, base):
    """Does a group differ from the base? {seeds: number} each -> {"difference", "low", "high", "t",
    "p"} of a paired two-sided t-test over the common seeds; low to high is the difference with 95 %
    confidence. Where no test is possible, a text says why. [Student 1908; LLM-JEPA, sec. 4]"""
    common = sorted(scores.keys() & base.keys())
    if len(common) < 2:
        return f"a test needs 2 common seeds, there are {len(common)}"
    differences = [scores[seeds] - base[seeds] for seeds in common]
    if min(differences) == max(differences):
        return f"the same difference, {differences[0]:+g}, in every seed"
    found = stats.ttest_1samp(differences, 0)
    low, high = found.confidence_interval()
    return {"difference": statistics.fmean(differences), "low": float(low), "high": float(high),
            "t": float(found.statistic), "p": float(found.pvalue)}


def table_lines(table, records):
    """A table of the page, mean ± deviation over seeds; what nobody measured is left out.

    columns {heading: metric}, or names behind one prefix; rows {heading: [label, ending of the
    metric's name]} behind all labels; published {heading: texts}; notes {label: text}.
    """
    columns = dict(table.get("columns", {} if "names" in table else COLUMNS))
    for name in table.get("names", "").split():
        columns[name.replace("_", " ")] = table["prefix"] + name
    labels = {record["label"]: [record["label"], ""] for record in records}
    rows = []
    for heading, (label, ending) in (labels | table.get("rows", {})).items():
        cells = [heading]
        for name in columns.values():
            numbers = by_label(records, name + ending).get(label, {})
            cells.append(mean_std(list(numbers.values()), unit_of(name)[0]))
        rows.append(cells)
    used = [i for i, cells in enumerate(zip(*rows)) if set(cells) != {"-"}]
    if len(used) <= 1:
        return []
    for label, texts in table.get("published", {}).items():
        rows.append([label, *texts, *["-"] * (len(columns) - len(texts))])
    rows = [list(itemgetter(*used)(row)) for row in (["run", *columns], *rows)]
    notes = table.get("notes")
    if notes:
        rows = [[*row, notes.get(row[0], "the paper's")] for row in rows]
    title = [f"## {table['title']}", ""] if table.get("title") else []
    return [*title, *markdown(rows[0], rows[1:]), ""]


def paired_lines(metrics, records, controls):
    """Does each label differ from its control, by default the first? -> lines, number of tests. A
    label whose control is None is asked nothing, nor of a metric that neither of the two has."""
    base, *others = dict.fromkeys(record["label"] for record in records)
    others = [one for one in others if controls.get(one, base)]
    rows = []
    count = 0
    for name in metrics:
        scores = by_label(records, name)
        for label in others:
            control = controls.get(label, base)
            if not (scores.get(label) or scores.get(control)):
                continue
            test = paired_test(scores.get(label, {}), scores.get(control, {}))
            cells = [test, "", "", ""]
            if isinstance(test, dict):
                count += 1
                cells = [f"{test['difference']:+.2f}", f"{test['low']:+.2f} to {test['high']:+.2f}",
                         f"{test['t']:.2f}", f"{test['p']:.3f}"]
            against = f" against {control}" if label in controls else ""
            rows.append([f"{label}{against}: {name}", *cells])
    base = "its control" if others and all(one in controls for one in others) else base
    title = f"## Other than {base}? Paired two-sided t-test over seeds"
    return [title, "", *markdown(["", "difference", "95 %", "t", "p"], rows), ""], count


def mixed_precisions(found):
    """{row: its precision} -> a line that says which rows have which, [] if all have the same."""
    rows = {}
    for row, precision in found.items():
        rows.setdefault(precision, []).append(row)
    if len(rows) < 2:
        return []
    said = [f"{precision} in {', '.join(names)}" for precision, names in sorted(rows.items())]
    return [f"The precision of the products is not the same in all rows: {'; '.join(said)}."]


# ---- runs and groups


class ScoredRun(NamedTuple):
    """settings: the config in one level ("lr", "model.layers", ...), without what is FREE; scores
    {metric: {(seed,): number}}, of fine-tuning {(seed, seed of fine-tuning): number}."""
    folder: Path
    settings: dict
    config: dict
    precision: str
    tokenizer: str
    scores: dict
    steps: int

    @property
    def seed(self):
        return self.config.get("seed", 0)


def read_scores(folder, files, seed):
    """The numbers of a run's files; "metric/seed_7" is the metric after fine-tuning with seed 7."""
    scores = {}
    for name in files:
        if not (folder / name).is_file():
            raise BadInput(f"{folder} has no {name}: make it with python evaluate.py {folder}, or "
                           "with python -m tasks")
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


def read_run(folder, files=("eval.json",)):
    folder = Path(folder)
    first = read_first(folder)
    settings = {}
    for name, value in first["config"].items():
        inner = value if isinstance(value, dict) else {"": value}
        settings |= {f"{name}.{key}".rstrip("."): one for key, one in inner.items()}
    settings = {name: one for name, one in settings.items() if name not in FREE}
    seed = first["config"].get("seed", 0)
    # A path that ends in the run's own seed: out/a-82 and out/a-23 start from the same.
    settings["init"] = re.sub(rf"\b{seed}/?$", "SEED", settings.get("init") or "")
    steps = max(record.get("step", 0) for record in read_log(folder))
    scores = read_scores(folder, files, seed)
    # Older logs have no precision.
    precision = first.get("precision", "float32")
    return ScoredRun(folder, settings, first["config"], precision, first.get("tokenizer_hash"),
                     scores, steps)


def label_of(settings, others):
    """A name for settings: the objective, and what tells them from others of it, as in "mexma
    koleo_weight 0.3"."""
    same = [other for other in others if other.get("objective") == settings.get("objective")]
    words = []
    for name, value in settings.items():
        if any(other.get(name) != value for other in same):
            words.append(f"{name.split('.')[-1]} {value if value != '' else 'none'}")
    more = f" and {len(words) - 3} more" if len(words) > 3 else ""
    return f"{settings.get('objective') or 'imported'} {', '.join(words[:3])}".strip() + more


def group(runs):
    """Runs -> {label: those that differ in nothing but their seed}, in the order of their first;
    BadInput for the same run twice."""
    found = {}
    for run in runs:
        own = found.setdefault(json.dumps(run.settings, sort_keys=True), {})
        if run.seed in own:
            raise BadInput(f"{own[run.seed].folder} and {run.folder} are the same run with the "
                           f"same seed {run.seed}: give one of them")
        own[run.seed] = run
    settings = [json.loads(key) for key in found]
    groups = {}
    for own, seeds in zip(settings, found.values()):
        label = label_of(own, settings)
        if label in groups:
            label += f" ({min(run.folder for run in seeds.values())})"
        groups[label] = list(seeds.values())
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
    notes += mixed_precisions({str(run.folder): run.precision for run in runs})
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
    each = [runs[0].settings for runs in groups.values()]
    said = []
    for name, value in each[0].items():
        values = [str(settings.get(name, value)) for settings in each]
        if "." not in name and name not in ("objective", "init") and len(set(values)) > 1:
            said.append(f"{name} {' / '.join(values)}")
    if not said:
        return []
    return [f"Settings that are not the same in all rows, in their order: {'; '.join(said)}."]


# ---- the command


def records_of(groups):
    """{label: runs} -> a record for each number, as `by_label` reads them."""
    records = []
    for label, runs in groups.items():
        for run in runs:
            for name, found in run.scores.items():
                records += [{"label": label, "seed": seeds, "eval": {name: number}}
                            for seeds, number in found.items()]
    return records


def comparison(groups, names, notes):
    """The lines of the table, a row a group, of the tests, and of what one must know to read it."""
    records = records_of(groups)
    seeds = {"run": "seeds"}
    for label, runs in groups.items():
        seeds[label] = str([run.seed for run in runs])[1:-1]
    columns = {}
    for name in names:
        unit, better = unit_of(name)
        columns[" ".join(filter(None, [name, unit, better and f"({better})"]))] = name
    lines = table_lines({"columns": columns, "notes": seeds}, records)
    lines.append("Mean ± standard deviation (n - 1) over seeds; lower, higher: what is better.")
    for name in names:
        for label, found in by_label(records, name).items():
            if len(found) != len(groups[label]):
                lines.append(f"{label}: {name} has n = {len(found)}, not {len(groups[label])}.")
    tested = [name for name in names if unit_of(name)[1]]
    tests, count = paired_lines(tested, records, {})
    if count:
        lines += ["", *tests,
                  f"{count} tests: by chance alone, .05 would be passed {0.05 * count:.1f} times; "
                  f"Holm's correction asks {0.05 / count:.2g} of the smallest p."]
    return lines + notes


def main(arguments):
    parser = Parser("python -m results compare", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="evaluated runs; the first is base")
    parser.add_argument("--metrics", type=comma_list, help="such as retrieval/xsim,geometry/rankme")
    parser.add_argument("--files", type=comma_list, default=["eval.json"],
                        help="of each run, such as flores.json that --out wrote [eval.json]")
    options = parser.parse_args(arguments)
    runs = [read_run(folder, options.files) for folder in options.runs]
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
    print(*comparison(groups, names, notes), sep="\n")


# ---- what runs write


def marked(written, gold):
    """An answer with {+what it has too much+} and [-what it lacks-]."""
    parts = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, gold, written, False).get_opcodes():
        if kind == "equal":
            parts.append(gold[a:b])
            continue
        parts += [f"[-{gold[a:b]}-]"] if b > a else []
        parts += [f"{{+{written[c:d]}+}}"] if d > c else []
    return "".join(parts)


def answers(arguments):
    """Prompts, gold texts and what each run writes [LLM-JEPA, tables 1 and 11]."""
    parser = Parser("python -m results answers", """Prompts, gold texts, and what causal runs write:
= is right, ! is not; {+this+} an answer has too much, [-this-] it lacks.""")
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--data", help="other rows than the first run's own")
    parser.add_argument("--langs", type=comma_list, default=[], help="columns: prompt,answer")
    parser.add_argument("--limit", type=int, default=10, help="rows [10]")
    options = parser.parse_args(arguments)
    opened = [evaluate.open_run(folder) for folder in options.runs]
    data = options.data or opened[0].config["data"]
    made = []
    for run in opened:
        one = evaluate.evaluation_of(run, data, options.langs, limit=options.limit)
        evaluate.choose_tasks(one, ["generate"])
        made.append(one.answers)
    if len({str(found.golds) for found in made}) > 1:
        raise BadInput(f"the runs hold out other rows of {data}: give a file with --data")
    width = max(len(run.folder.name) for run in opened)
    for row, gold in enumerate(made[0].golds):
        print(f"{made[0].prompts[row]}\n  {'gold':{width}}  {gold}")
        for run, found in zip(opened, made):
            written = found.written[row]
            sign = "=" if evaluate.exact(written, gold) else "!"
            print(f"{sign} {run.folder.name:{width}}  {marked(written.strip(), gold.strip())}")
