"""The recorded runs, statistics, and the verdicts on the claims.

Tests are paired over seeds and two-sided. ± is the standard deviation over seeds (n - 1).
"""

import collections
import functools
import json
import lzma
from pathlib import Path

from base.common import atomic_file, locked
from look.compare import aligned, mean_std, paired_test

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "results/records.jsonl.xz"
DATA = json.loads((ROOT / "results/experiments.json").read_text(encoding="utf-8"))
EXPERIMENTS = DATA["experiments"]
LEVEL = 0.05  # significance level of every test
SEEDS = 3  # a claim with fewer common seeds is not tested

# ---- records: one line for each run, with the name of its experiment


@functools.cache
def parsed(path, state):
    """Return the records of a file. Its `state`, when it was written, makes the cache read it
    again."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return list(map(json.loads, file))


def read_records(experiment=None):
    """Return the recorded runs, all or those of one experiment, in the order of its jobs."""
    state = RECORDS.stat()
    records = parsed(RECORDS, (state.st_ino, state.st_mtime_ns))
    if experiment is None:
        return records
    records = [record for record in records if record["experiment"] == experiment]
    order = [*EXPERIMENTS.get(experiment, {}).get("jobs", ()), *(one["label"] for one in records)]
    return sorted(records, key=lambda record: order.index(record["label"]))


def keep_records(new):
    """Add records to the file, each in place of one of the same experiment, label and seed."""
    with locked(RECORDS.parent):  # several experiments can run at once
        kept = {(one["experiment"], one["label"], one["seed"]): one
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


def table_lines(title, table):
    """Return the lines of {row: {column: value}}, whose rows may lack columns."""
    heads = list(dict.fromkeys(key for row in table.values() for key in row))
    rows = [[side, *(row.get(key, "-") for key in heads)] for side, row in table.items()]
    return [f"## {title}", "", *aligned(["", *heads], rows), ""]


def times_lines(record):
    """Return the lines of a table of times, as peers makes it."""
    return [*table_lines(record["label"], record["table"]),
            f"torch {record['torch']}, {record['device']}"]


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


# ---- the board: what the papers claim, and what we measured


def judge():
    """Return {number of a claim: {"baseline", "ours", "test", "holm", "verdict", "bag", "all"}}.

    Both sides are {seed: number} of the seeds that both have; "all" has those of all runs. The
    baseline is another row, by the same metric or by "baseline_metric". Holm's correction is
    over the claims of the same "family" (papers: the four papers'; newer: newer papers'; decoder: a
    decoder that retrieves; order: that of captions; controls: ours, which no paper has). A claim is
    not tested if there is no baseline or there are fewer than three common seeds. "bag" is what
    against_bag returns."""
    judged = {}
    families = {}
    for claim in DATA["claims"]:
        records = read_records(claim["experiment"])
        scores = by_label(records, claim["metric"])
        theirs = by_label(records, claim.get("baseline_metric", claim["metric"]))
        ours, baseline = scores.get(claim["ours"], {}), theirs.get(claim.get("baseline"), {})
        every = {"ours": ours, "baseline": baseline}
        if "baseline" in claim:  # everything is over the seeds that both have
            seeds = ours.keys() & baseline.keys()
            ours, baseline = ({seed: one[seed] for seed in seeds} for one in (ours, baseline))
        test = paired_test(ours, baseline) if len(baseline) >= SEEDS else None
        if test and "within" in claim:
            test["p"] = equivalence_p(test, len(ours), claim["within"])
        if test:
            families.setdefault(claim["family"], {})[claim["id"]] = test["p"]
        judged[claim["id"]] = {"baseline": baseline, "ours": ours, "test": test,
                               "bag": against_bag(claim, scores), "all": every}
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
