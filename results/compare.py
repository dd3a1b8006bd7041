"""The recorded runs: tables, paired tests, and the claims of the papers.

Tests are paired over seeds and two-sided. ± is the standard deviation over seeds (n - 1).
"""

import collections
import functools
import json
import lzma
import math
import re
from pathlib import Path

from common import BadInput, Parser, atomic_file, did_you_mean, shown
from look.compare import markdown, mean_std, p_text, paired_test, test_table

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "results/records.jsonl.xz"
DATA = json.loads((ROOT / "results/experiments.json").read_text(encoding="utf-8"))
EXPERIMENTS = DATA["experiments"]
LEVEL = 0.05  # significance level of every test
SEEDS = 3  # a claim with fewer common seeds is not tested

# ---- an experiment of your own


def open_spec(path):
    """Read the experiment of a file SPEC.json and keep its records beside it, in SPEC.jsonl.xz.
    Return its name, which is that of the file. Raises BadInput. results/README.md explains it."""
    global RECORDS
    path = Path(path).expanduser()
    try:
        spec = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{shown(path)} is no JSON file ({error}): results/README.md has an example"
                       ) from None
    known = {"jobs", *(field for one in EXPERIMENTS.values() for field in one)}
    if not isinstance(spec, dict) or not spec.get("jobs"):
        raise BadInput(f"{shown(path)} has no jobs: results/README.md has an example")
    for field in spec:
        if field not in known:
            raise BadInput(f"{shown(path)} has an unknown field {shown(field)!r}"
                           f"{did_you_mean(field, sorted(known))}")
    EXPERIMENTS[path.stem] = {"about": "", "seeds": [0], "flags": "", **spec, "file": str(path)}
    RECORDS = path.with_suffix(".jsonl.xz")
    if not RECORDS.exists():
        with atomic_file(RECORDS) as file:
            file.write(lzma.compress(b""))
    return path.stem


def check_columns(name, records):
    """Raise BadInput for a column that an experiment names and that none of its records has."""
    known = {metric for record in records for metric in (record | record.get("eval", {}))}
    for table in EXPERIMENTS[name].get("tables", ()):
        for heading, metric in table["columns"].items():
            if not any(by_label([record], metric) for record in records):
                raise BadInput(f"column {shown(heading)!r}: no record of {name} has the metric "
                               f"{shown(metric)}{did_you_mean(metric, sorted(known))}")


# ---- records: one line for each run, with the name of its experiment


@functools.cache
def parsed(path, time):
    """Return the records of a file. `time`, when it was modified, makes the cache read it again."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return list(map(json.loads, file))


def read_records(experiment=None):
    """Return the recorded runs, all or those of one experiment, in the order of its jobs."""
    records = parsed(RECORDS, RECORDS.stat().st_mtime_ns)
    if experiment is None:
        return records
    records = [record for record in records if record["experiment"] == experiment]
    order = [*EXPERIMENTS.get(experiment, {}).get("jobs", ()), *(one["label"] for one in records)]
    return sorted(records, key=lambda record: order.index(record["label"]))


def count_runs():
    """Return {experiment: number of its recorded runs}."""
    counts = collections.Counter(record["experiment"] for record in read_records())
    return {name: counts[name] for name in EXPERIMENTS}


def keep_records(new):
    """Add records to the file, each in place of one of the same experiment, label and seed; a table
    of times only in place of one of the same device."""
    kept = {(one["experiment"], one["label"], one["seed"], "table" in one and one["device"]): one
            for one in [*read_records(), *new]}
    ordered = sorted(kept.values(), key=lambda record: record["experiment"])
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in ordered)
    with atomic_file(RECORDS) as file:
        file.write(lzma.compress(text.encode(), preset=9))


def value_of(record, metric):
    """Return a metric, a term of the last logged step, or a field such as "steps".

    Along training, "retrieval/xsim@60" is the metric after 60 seconds, "retrieval/xsim<10" the
    first step at which it is below 10, and "retrieval/xsim<10 s" the seconds until then; infinity
    if the run ended earlier. `pace` of a record is the seconds of a step where nothing else
    runs."""
    name, sign, number, unit = re.fullmatch(r"(.*?)(?:([<@])(\d+)( s)?)?", metric).groups()
    if not sign:
        return (record | record.get("last", {}) | record.get("eval", {})).get(metric)
    pace = record.get("pace") or record["seconds"] / record["steps"]
    points = {int(step): values[name] for step, values in record["curve"].items() if name in values}
    if not points:
        return None
    if sign == "@":
        if record["steps"] * pace < int(number):
            return math.inf
        return points[max(step for step in points if step * pace <= int(number))]
    reached = [step for step, value in points.items() if value < int(number)]
    return min(reached, default=math.inf) * (pace if unit else 1)


def by_label(records, metric):
    """Return {label: {seed: number}} of a metric: see value_of."""
    values = {}
    for record in records:
        value = value_of(record, metric)
        if isinstance(value, (int, float)):
            values.setdefault(record["label"], {})[record["seed"]] = value
    return values


# ---- statistics


def holm(ps):
    """Correct {name: p} for the number of tests: multiply the smallest of m by m, the next by
    m - 1, and so on, and let none be smaller than the one before it. [Holm 1979]"""
    corrected = {}
    largest = 0.0
    for rank, name in enumerate(sorted(ps, key=ps.get)):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[name]))
        corrected[name] = largest
    return corrected


def equivalence_p(test, seeds, margin):
    """Return the p value of two one-sided paired t-tests (TOST), given paired_test's result: it is
    small if the mean difference is between -margin and margin. [Schuirmann 1987]"""
    from scipy import stats
    error = (test["high"] - test["low"]) / 2 / stats.t.ppf(0.975, seeds - 1)
    return float(stats.t.sf((margin - abs(test["difference"])) / error, seeds - 1))


# ---- one experiment


def table_lines(records, columns, rows, published=None):
    """Return a table of mean ± std over seeds.

    columns {heading: metric}; rows {heading: label, or [label, ending of the metric's name], or
    [label, {metric of a column: what this row has in its place}]}; published {heading: texts}.
    Columns and rows that nobody measured are left out."""
    table = []
    for heading, row in rows.items():
        label, change = (row, "") if isinstance(row, str) else row
        cells = []
        for metric in columns.values():
            name = metric + change if isinstance(change, str) else change.get(metric, metric)
            cells.append(mean_std(by_label(records, name).get(label, {}).values()))
        if set(cells) != {"-"}:
            table.append([heading, *cells])
    used = [i for i, cells in enumerate(zip(*table)) if i == 0 or set(cells) != {"-"}]
    for heading, texts in (published or {}).items():
        table.append([heading, *texts, *["-"] * (len(columns) - len(texts))])
    table = [[row[i] for i in used] for row in (["run", *columns], *table)]
    return markdown(table[0], table[1:]) if len(used) > 1 else []


def test_lines(records, metrics, pairs):
    """Return a table of paired tests of {label: its baseline}, for each metric."""
    heads, rows = test_table({metric: by_label(records, metric) for metric in metrics}, pairs)
    return markdown(heads, rows) if rows else []


def times_lines(record):
    """Return the table of times that peers or gpu recorded."""
    heads = list(dict.fromkeys(key for row in record["table"].values() for key in row))
    rows = [[side, *(row.get(key, "-") for key in heads)] for side, row in record["table"].items()]
    return [f"## {record['label']}", "", *markdown(["", *heads], rows), "",
            f"torch {record['torch']}, {record['device']}"]


def command_lines(records):
    """Return the commands of each row, those of its first seed."""
    rows = {}
    for record in records:
        rows.setdefault(record["label"], []).append(record)
    lines = []
    for label, (first, *others) in rows.items():
        seeds = ", ".join(str(record["seed"]) for record in (first, *others))
        lines.append(f"- {label} (commit {first.get('commit')}, seed{'s' * bool(others)} {seeds}):")
        lines += [f"  `{first[key]}`" for key in ("train", "test") if key in first]
    return lines


def show(name):
    """Return the text of an experiment: finding, set-up, tables, tests, and the commands."""
    if name not in EXPERIMENTS:
        raise BadInput(f"there is no experiment {name!r}{did_you_mean(name, EXPERIMENTS)} (see "
                       "python -m results show)")
    experiment, records = EXPERIMENTS[name], read_records(name)
    if records and "file" in experiment:
        check_columns(name, records)
    blocks = [[f"# {name}"], [experiment[key] for key in ("finding", "about") if key in experiment]]
    for table in experiment.get("tables", [{"columns": DATA["columns"]}]):
        rows = {record["label"]: record["label"] for record in records} | table.get("rows", {})
        lines = table_lines(records, table["columns"], rows, table.get("published"))
        if lines and "title" in table:
            blocks.append([f"## {table['title']}"])
        blocks.append(lines)
    blocks.append(test_lines(records, experiment.get("tested", ()), experiment.get("pairs", {})))
    blocks += [times_lines(record) for record in records if "table" in record]
    blocks.append(command_lines([record for record in records if "table" not in record]))
    return "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"


def show_command(words):
    parser = Parser("python -m results show", "Print what was recorded.")
    parser.add_argument("name", nargs="?", help="the experiment; without it, list all")
    name = parser.parse_args(words).name
    if name:
        return print(show(name), end="")
    for name, count in count_runs().items():
        print(f"{name:28}{count:4} runs  {EXPERIMENTS[name]['finding']}")


# ---- the board: what the papers claim, and what we measured


def judge():
    """Return {number of a claim: {"baseline", "ours", "test", "holm", "verdict", "bag"}}.

    The baseline is another row, by the same metric or by "baseline_metric". Holm's correction is
    over the claims of the same "family" (papers: the four papers'; newer: newer papers'; decoder: a
    decoder that retrieves; controls: ours, which no paper has). A claim is not tested if there is
    no baseline or there are fewer than three common seeds. "bag" is what against_bag returns."""
    judged = {}
    families = {}
    for claim in DATA["claims"]:
        records = read_records(claim["experiment"])
        scores = by_label(records, claim["metric"])
        theirs = by_label(records, claim.get("baseline_metric", claim["metric"]))
        ours, baseline = scores.get(claim["ours"], {}), theirs.get(claim.get("baseline"), {})
        if "baseline" in claim:  # everything is over the seeds that both have
            seeds = ours.keys() & baseline.keys()
            ours, baseline = ({seed: one[seed] for seed in seeds} for one in (ours, baseline))
        test = paired_test(ours, baseline) if len(baseline) >= SEEDS else None
        if test and "within" in claim:
            test["p"] = equivalence_p(test, len(ours), claim["within"])
        if test:
            families.setdefault(claim["family"], {})[claim["id"]] = test["p"]
        judged[claim["id"]] = {"baseline": baseline, "ours": ours, "test": test,
                               "bag": against_bag(claim, scores)}
    corrected = collections.ChainMap(*map(holm, families.values()))
    for claim in DATA["claims"]:
        one = judged[claim["id"]]
        one["holm"] = corrected.get(claim["id"])
        one["verdict"] = verdict(claim, one["test"], one["holm"])
    return judged


def verdict(claim, test, p):
    """Return the verdict of a claim, given its paired test and the corrected p value."""
    if not test:
        return "not tested"
    if "within" in claim:
        return f"equal within {claim['within']}" if p < LEVEL else "not shown to be equal"
    if p >= LEVEL:
        return "no significant difference"
    return "better" if is_better(claim, test) else "worse"


def is_better(claim, test):
    """Return whether the difference of a paired test has the direction of the claim."""
    return (test["difference"] > 0) == (claim["better"] == "higher")


def against_bag(claim, scores):
    """Return "7.9 ± 1.1: no", the score of a bag of token embeddings (row "bag", or what the claim
    names) and whether the method is better than it (p below 0.05, without a correction); "-" if
    the experiment has no bag."""
    bag, ours = (scores.get(label, {}) for label in (claim.get("bag", "bag"), claim["ours"]))
    if len(bag.keys() & ours.keys()) < SEEDS:
        return "-"
    test = paired_test(ours, bag)  # None if all seeds have the same difference
    holds = test and test["p"] < LEVEL and is_better(claim, test)
    return f"{mean_std(bag.values())}: {'yes' if holds else 'no'}"


def board_lines():
    """Return the table of claims, one value per cell."""
    rows = []
    for claim, one in zip(DATA["claims"], judge().values()):
        test = one["test"]
        interval, p, corrected = ["-"] * 3 if not test else [
            f"{test['low']:+.2f} to {test['high']:+.2f}", p_text(test["p"]), p_text(one["holm"])]
        rows.append([claim["id"], claim["claim"], claim["measure"],
                     mean_std(one["baseline"].values()), mean_std(one["ours"].values()),
                     len(one["ours"]) or "-", interval, p, claim["family"], corrected,
                     one["verdict"], one["bag"]])
    return markdown(["", "claim", "measure", "baseline", "method", "seeds",
                     "95 % interval of the difference", "p", "family", "p (Holm)", "verdict",
                     "a bag; better than it?"], rows)


def board_command(words):
    Parser("python -m results board", "The claims of the papers, and what we measured.").parse_args(
        words)
    print(*board_lines(), "", "Holm's correction is over the claims of a family: those of the four "
          "papers, those of newer papers, those about a decoder that also retrieves, and our "
          "controls, which no paper has.",
          "The p value of a claim of equality is that of two one-sided paired t-tests.",
          "The last column has the score of a bag of token embeddings, and whether the method is "
          "better than it (p below 0.05, without a correction).",
          "Claims A to D2 are with Muon, all others with AdamW. `python -m results show "
          "encoders-muon` has claims 9 to 12 and 17 with Muon.", sep="\n")
    for claim in DATA["claims"]:
        against = f" against `{claim['baseline']}`" if "baseline" in claim else ""
        print(f"{claim['id']}. `{claim['ours']}`{against} at equal {claim['matched']}; `python -m "
              f"results show {claim['experiment']}`. The paper: {claim['paper']}. {claim['note']}")


# ---- recorded numbers inside the README files


def filled(text):
    """Return a page with the recorded numbers in the table after each `<!-- table NAME -->`: one of
    "pages" in experiments.json, or the board."""
    def with_table(match):
        if match[2] == "board":
            lines = board_lines()
        else:
            table = DATA["pages"][match[2]]
            records = [one for name in table["experiments"] for one in read_records(name)]
            lines = table_lines(records, table["columns"], table["rows"])
        return "\n".join([match[1], *lines, ""])
    return re.sub(r"(<!-- table (\S+) -->)\n(?:\|.*\n)*", with_table, text)


def readme_command(words):
    Parser("python -m results readme", "Write the recorded numbers into README.md and "
           "results/README.md.").parse_args(words)
    for page in (ROOT / "README.md", ROOT / "results/README.md"):
        text = filled(page.read_text(encoding="utf-8"))
        with atomic_file(page) as file:
            file.write(text.encode())
