"""Print experiments and claims, and write recorded numbers into the pages."""

import collections
import re
import textwrap

from base.common import BadInput, Parser, atomic_file, did_you_mean, shown
from look.compare import aligned, column, markdown, mean_std, p_text, test_table

from .compare import DATA, EXPERIMENTS, ROOT, by_label, judge, read_records, times_lines
from .run import jobs_of

# ---- one experiment

# What `show` prints only if it is asked for.
PARTS = {"tables": "print every table with all of its columns",
         "tests": "print the tests of every metric",
         "commands": "print how each row is trained and measured",
         "about": "print the data, the models, and what we expected before the runs"}


def tables_of(name):
    return EXPERIMENTS[name].get("tables", [{"columns": DATA["columns"]}])


def table_of(records, columns, rows, published=None):
    """Return the heads and the rows of a table, of mean ± std over seeds; None if it is empty.

    columns {heading: metric}; rows {heading: label, or [label, ending of the metric's name]};
    published {heading: texts}. Columns and rows that nobody measured are left out."""
    found, seeds = [], []
    for row in rows.values():
        label, ending = (row, "") if isinstance(row, str) else row
        found.append([by_label(records, metric + ending).get(label, {})
                      for metric in columns.values()])
        seeds.append(sorted({len(scores) for scores in found[-1] if scores}))
    texts = [column(scores.values() for scores in cells) for cells in zip(*found)]
    table = [[heading, "-".join(map(str, counts)), *cells]
             for heading, counts, *cells in zip(rows, seeds, *texts) if counts]
    for heading, cells in (published or {}).items():
        table.append([heading, "-", *cells, *["-"] * (len(columns) - len(cells))])
    heads = ["run", "seeds", *columns]
    used = [i for i, cells in enumerate(zip(*table)) if i < 2 or set(cells) != {"-"}]
    heads, *table = [[row[i] for i in used] for row in (heads, *table)]
    return (heads, table) if len(used) > 2 else None


def labels_of(records):
    return {record["label"]: record["label"] for record in records}


def command_lines(name, records):
    """Return the commands of each row in experiments.json, with its first seed, and the commits of
    its records. A row that is no longer there has its recorded commands."""
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
    tables = tables_of(name)
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


# ---- the board


def board_lines():
    """Return the claims, paper by paper, with the scores of both sides over the seeds that both
    have, how many these are, and the verdict."""
    papers = {}
    for claim, one in zip(DATA["claims"], judge().values()):
        papers.setdefault(claim["of"], []).append(
            [f"{claim['id']:4}{claim['claim']}", mean_std(one["baseline"].values()),
             mean_std(one["ours"].values()), str(len(one["ours"])),
             p_text(one["holm"]) if one["test"] else "-", one["verdict"], one["bag"]])
    rows = [row for paper, its in papers.items() for row in ([paper, *[""] * 6], *its)]
    heads = ["", "baseline", "method", "seeds", "p (Holm)", "verdict", "bag; method better?"]
    return aligned(heads, rows)


def numbers(seeds):
    return ", ".join(map(str, sorted(seeds)))


def claim_lines(claim, one):
    """Return all about a claim, given what judge returns for it."""
    test, family = one["test"], claim["family"]
    sides = {"baseline": one["baseline"]} if "baseline" in claim else {}
    rows = {"measure": f"{claim['measure']} ({claim['better']} is better)"}
    rows |= {side: f"{mean_std(scores.values())}  {claim.get(side)}"
             for side, scores in (*sides.items(), ("ours", one["ours"]))}
    rows["compared"] = f"at equal {claim['matched']}, seeds {numbers(one['ours'])}"
    for side in sides and ("ours", "baseline"):
        if left_out := one["all"][side].keys() - one["ours"].keys():
            rows["compared"] += f"; left out: {numbers(left_out)} of {claim[side]}"
    if test:
        rows["difference"] = f"95 % interval {test['low']:+.2f} to {test['high']:+.2f}"
        rows["p"] = (f"{p_text(test['p'])}; {p_text(one['holm'])} after Holm's correction over the "
                     f"family {family!r}")
    rows |= {"verdict": one["verdict"], "a bag": one["bag"], "the paper": claim["paper"],
             "note": claim["note"] or "-", "runs": f"python -m results show {claim['experiment']}"}
    commands = {job.label: job.train.partition(" --seed ")[0]
                for job in jobs_of(claim["experiment"])}
    rows |= {f"run: {side}": commands[claim[side]] for side in (*sides, "ours")}
    lines = [f"{claim['id']}. {claim['of']}: {claim['claim']}"]
    for name, text in rows.items():
        lines += textwrap.wrap(text, 100, initial_indent=f"  {name:14}", subsequent_indent=" " * 16)
    return lines


def board_command(words):
    parser = Parser("python -m results board", "The claims of the papers, and what we measured.")
    parser.add_argument("claim", nargs="?", help="number of a claim: print its measure, interval, "
                        "runs, the paper's numbers and notes")
    number = parser.parse_args(words).claim
    if number is not None:
        claims = {claim["id"]: claim for claim in DATA["claims"]}
        if number not in claims:
            raise BadInput(f"there is no claim {shown(number)!r}{did_you_mean(number, claims)} "
                           "(see python -m results board)")
        return print(*claim_lines(claims[number], judge()[number]), sep="\n")
    notes = ("Scores and tests are over the seeds that both rows have. p (Holm) is corrected for "
             "the number of tests in the claim's family: the four papers, newer papers, our "
             "controls, order of captions, a decoder that also retrieves. In the last column p is "
             "below 0.05, uncorrected. python -m results board 9 prints all about claim 9.")
    print(*board_lines(), "", *textwrap.wrap(notes, 100), sep="\n")


# ---- recorded numbers inside the README files


def filled(text):
    """Return a page with the recorded numbers in the table after each `<!-- table NAME -->`, which
    is one of "pages" in experiments.json. Of several experiments, a row is "EXPERIMENT: LABEL"."""
    def with_table(match):
        table = DATA["pages"][match[2]]
        names = table["experiments"]
        records = [one if len(names) == 1 else one | {"label": f"{name}: {one['label']}"}
                   for name in names for one in read_records(name)]
        found = table_of(records, table["columns"], table["rows"])
        return "\n".join([match[1], *(markdown(*found) if found else ()), ""])
    return re.sub(r"(<!-- table (\S+) -->)\n(?:\|.*\n)*", with_table, text)


def readme_command(words):
    Parser("python -m results readme", "Write the recorded numbers into README.md and "
           "results/README.md.").parse_args(words)
    for page in (ROOT / "README.md", ROOT / "results/README.md"):
        text = filled(page.read_text(encoding="utf-8"))
        with atomic_file(page) as file:
            file.write(text.encode())
