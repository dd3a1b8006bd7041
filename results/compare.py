"""The recorded runs: tables, paired tests, and the claims of the papers.

Tests are paired over seeds and two-sided. ± is the standard deviation over seeds (n - 1).
"""

import collections
import functools
import json
import lzma
import re
import textwrap
from pathlib import Path

from common import BadInput, Parser, atomic_file, did_you_mean, shown
from look.compare import aligned, markdown, mean_std, p_text, paired_test, test_table

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "results/records.jsonl.xz"
DATA = json.loads((ROOT / "results/experiments.json").read_text(encoding="utf-8"))
EXPERIMENTS = DATA["experiments"]
LEVEL = 0.05  # significance level of every test
SEEDS = 3  # a claim with fewer common seeds is not tested

# ---- an experiment of your own


FIELDS = """The fields of an experiment of your own (results/README.md has an example):

jobs     {row: flags of train.py}; or {row: {"train": flags, "seeds": [...], "tests": [...],
         "command": a program in place of train.py, "prints": one that prints its numbers as JSON}}
flags    flags of train.py for all rows        seeds   [0] if it is not given
tests    commands that measure a run, [evaluate.py RUN] if it is not given
files    what the folder of --files has to contain
setup    {folder: the command that makes it}, before the first run
tables   [{"title": ..., "columns": {heading: metric}}]
tested   metrics of the paired t-tests         pairs   {row: its baseline}
finding  a sentence for `show`                 about   the paragraph of `show --about`

In commands RUN is the folder of the run, FOLDER[row] that of another row with the same seed, FILES
that of --files, and MATCH[row] the number of steps with the compute of another row."""


def open_spec(path):
    """Read the experiment of a file SPEC.json and keep its records beside it, in SPEC.jsonl.xz.
    Return its name, which is that of the file. Raises BadInput."""
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


def keep_records(new):
    """Add records to the file, each in place of one of the same experiment, label and seed; a table
    of times only in place of one of the same device."""
    kept = {(one["experiment"], one["label"], one["seed"], "table" in one and one["device"]): one
            for one in [*read_records(), *new]}
    ordered = sorted(kept.values(), key=lambda record: record["experiment"])
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in ordered)
    with atomic_file(RECORDS) as file:
        file.write(lzma.compress(text.encode(), preset=9))


def by_label(records, metric):
    """Return {label: {seed: number}} of a metric, a term of the last logged step, or a field such
    as "steps"."""
    values = {}
    for record in records:
        value = (record | record.get("last", {}) | record.get("eval", {})).get(metric)
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

# What `show` prints only if it is asked for.
PARTS = {"tables": "print every table with all of its columns",
         "tests": "print the tests of every metric",
         "commands": "print how each row is trained and measured",
         "about": "print the data, the models, and what we expected before the runs"}


def table_of(records, columns, rows, published=None):
    """Return the heads and the rows of a table, of mean ± std over seeds; None if it is empty.

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
    heads, *table = [[row[i] for i in used] for row in (["run", *columns], *table)]
    return (heads, table) if len(used) > 1 else None


def labels_of(records):
    return {record["label"]: record["label"] for record in records}


def times_lines(record):
    """Return the table of times that peers or gpu recorded."""
    heads = list(dict.fromkeys(key for row in record["table"].values() for key in row))
    rows = [[side, *(row.get(key, "-") for key in heads)] for side, row in record["table"].items()]
    return [f"## {record['label']}", "", *aligned(["", *heads], rows), "",
            f"torch {record['torch']}, {record['device']}"]


def command_lines(name, records):
    """Return the commands of each row in experiments.json, with its first seed, and the commits of
    its records. A row that is no longer there has its recorded commands."""
    from .run import jobs_of
    jobs, commits = {}, {}
    for job in jobs_of(name):
        jobs.setdefault(job.label, [job.train, job.tests])
    for record in records:
        if "train" in record:
            jobs.setdefault(record["label"], [record["train"], record.get("test", "")])
            commits.setdefault(record["label"], {})[record["commit"]] = True
    return [line for label, commands in jobs.items() for line in (
        f"{label} ({', '.join(commits.get(label, ['not run yet']))}):",
        *(f"  {command}" for command in commands if command))]


def table_blocks(name, records, every):
    """Return the lines of the tables of an experiment: of the first seven columns of the first one,
    or of all."""
    tables = EXPERIMENTS[name].get("tables", [{"columns": DATA["columns"]}])
    for table in tables if every else tables[:1]:
        columns = dict(list(table["columns"].items())[:None if every else 7])
        found = table_of(records, columns, labels_of(records) | table.get("rows", {}),
                         table.get("published"))
        if found:
            yield [*([table["title"]] if "title" in table else []), *aligned(*found)]


def show(name, parts=()):
    """Return the text of an experiment: a sentence, a table, tests of two metrics, and `parts`,
    which are some of PARTS."""
    if name not in EXPERIMENTS:
        raise BadInput(f"there is no experiment {name!r}{did_you_mean(name, EXPERIMENTS)} (see "
                       "python -m results show --all)")
    experiment, records = EXPERIMENTS[name], read_records(name)
    if records and "file" in experiment:
        check_columns(name, records)
    blocks = [[f"{name}: {len(records)} runs", *filter(None, [experiment.get("finding")])]]
    if "about" in parts:
        blocks.append(textwrap.wrap(experiment["about"], 100))
    blocks += table_blocks(name, records, "tables" in parts)
    blocks += [times_lines(record) for record in records if "table" in record]
    metrics = experiment.get("tested", ())[:None if "tests" in parts else 2]
    heads, rows = test_table({metric: by_label(records, metric) for metric in metrics},
                             experiment.get("pairs", {}))
    blocks.append(aligned(heads, rows) if rows else [])
    if "commands" in parts:
        blocks.append(command_lines(name, records))
    if more := [f"--{part}" for part in PARTS if part not in parts]:
        blocks.append([f"More: {', '.join(more)}"])
    return "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"


def list_lines(every=False):
    """Return a line for each experiment, by paper; without `every` only those of "groups"."""
    groups = dict(DATA["groups"])
    others = [name for name in EXPERIMENTS if name not in sum(groups.values(), [])]
    if every:
        groups["Others"] = others
    counts = collections.Counter(record["experiment"] for record in read_records())
    lines = []
    for heading, names in groups.items():
        lines += [heading, *(f"  {name:26}{counts[name]:3} runs  "
                             f"{textwrap.shorten(EXPERIMENTS[name]['finding'], 88)}"
                             for name in names)]
    return lines + ([] if every else [f"{len(others)} more: python -m results show --all"])


def show_command(words):
    parser = Parser("python -m results show", "Print what was recorded: a sentence, a table, and "
                    "paired t-tests of the first two metrics.")
    parser.add_argument("name", nargs="?", help="the experiment; without it, list them by paper")
    parser.add_argument("--all", action="store_true", help="list all experiments")
    for part, text in PARTS.items():
        parser.add_argument(f"--{part}", action="store_true", help=text)
    flags = parser.parse_args(words)
    parts = [part for part in PARTS if getattr(flags, part)]
    if not flags.name and parts:
        raise BadInput(f"--{parts[0]} needs the name of an experiment (see python -m results show)")
    if flags.name and flags.all:
        raise BadInput("--all lists all experiments: give it without a name")
    print(show(flags.name, parts) if flags.name else "\n".join(list_lines(flags.all)))


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
    """Return the claims, paper by paper, with the scores of both sides and the verdict."""
    papers = {}
    for claim, one in zip(DATA["claims"], judge().values()):
        papers.setdefault(claim["of"], []).append(
            [f"{claim['id']:4}{claim['claim']}", mean_std(one["baseline"].values()),
             mean_std(one["ours"].values()), p_text(one["holm"]) if one["test"] else "-",
             one["verdict"], one["bag"]])
    rows = [row for paper, its in papers.items() for row in ([paper, *[""] * 5], *its)]
    return aligned(["", "baseline", "method", "p (Holm)", "verdict", "a bag: better than it?"],
                   rows)


def claim_lines(claim, one):
    """Return all about a claim, given what judge returns for it."""
    test, family = one["test"], claim["family"]
    sides = {"baseline": one["baseline"]} if "baseline" in claim else {}
    rows = {"measure": f"{claim['measure']} ({claim['better']} is better)"}
    rows |= {side: f"{mean_std(scores.values())}  {claim.get(side)}"
             for side, scores in (*sides.items(), ("ours", one["ours"]))}
    rows["compared"] = f"at equal {claim['matched']}, {len(one['ours'])} seeds"
    if test:
        rows["difference"] = f"95 % interval {test['low']:+.2f} to {test['high']:+.2f}"
        rows["p"] = (f"{p_text(test['p'])}; {p_text(one['holm'])} after Holm's correction over the "
                     f"family {family!r}")
    rows |= {"verdict": one["verdict"], "a bag": one["bag"], "the paper": claim["paper"],
             "note": claim["note"] or "-", "runs": f"python -m results show {claim['experiment']}"}
    lines = [f"{claim['id']}. {claim['of']}: {claim['claim']}"]
    for name, text in rows.items():
        lines += textwrap.wrap(text, 100, initial_indent=f"  {name:12}", subsequent_indent=" " * 14)
    return lines


def board_command(words):
    parser = Parser("python -m results board", "The claims of the papers, and what we measured.")
    parser.add_argument("claim", nargs="?", help="number of a claim: print its measure, interval, "
                        "runs, the paper's numbers and notes")
    number = parser.parse_args(words).claim
    if number:
        claims = {claim["id"]: claim for claim in DATA["claims"]}
        if number not in claims:
            raise BadInput(f"there is no claim {shown(number)!r}{did_you_mean(number, claims)} "
                           "(see python -m results board)")
        return print(*claim_lines(claims[number], judge()[number]), sep="\n")
    print(*board_lines(), "", "p (Holm) is corrected for the number of tests in the claim's "
          "family: the four papers, newer papers, our", "controls, a decoder that also retrieves. "
          "In the last column p is below 0.05, uncorrected.",
          "python -m results board 9 prints all about claim 9.", sep="\n")


# ---- recorded numbers inside the README files


def filled(text):
    """Return a page with the recorded numbers in the table after each `<!-- table NAME -->`, which
    is one of "pages" in experiments.json. Without "rows" it has every recorded row; of several
    experiments, a row is "EXPERIMENT: LABEL"."""
    def with_table(match):
        table = DATA["pages"][match[2]]
        names = table["experiments"]
        records = [one if len(names) == 1 else one | {"label": f"{name}: {one['label']}"}
                   for name in names for one in read_records(name)]
        found = table_of(records, table["columns"], table.get("rows") or labels_of(records))
        return "\n".join([match[1], *(markdown(*found) if found else ()), ""])
    return re.sub(r"(<!-- table (\S+) -->)\n(?:\|.*\n)*", with_table, text)


def readme_command(words):
    Parser("python -m results readme", "Write the recorded numbers into README.md and "
           "results/README.md.").parse_args(words)
    for page in (ROOT / "README.md", ROOT / "results/README.md"):
        text = filled(page.read_text(encoding="utf-8"))
        with atomic_file(page) as file:
            file.write(text.encode())
