"""The board: twelve claims of the four papers, each with what was measured here.

    python -m results claims             # writes results/claims.md from the records

A claim of experiments.json names an experiment, a metric, the run that is claimed to be better and
its control. The verdict is a rule, not an opinion: a paired one-tailed t-test over the common
seeds, of three seeds at least.
"""

from corpora.program import Parser
from corpora.text import write_atomic

from .compare import DATA, ROOT, by_label, markdown, mean_std, paired_test, unit_of
from .run import read_records

PAGE = ROOT / "results/claims.md"
LEVEL = 0.05  # of the test
SEEDS = 3  # fewer say nothing


def verdict(ours, control, better):
    """{seed: number} of two runs, "higher" or "lower" -> a word or two, and p or ""."""
    if not ours or not control:
        return "not measured yet", ""
    if len(ours.keys() & control.keys()) < SEEDS:
        return "open: too few seeds", ""
    test = paired_test(ours, control, better)
    if not isinstance(test, dict):
        return "no difference found", ""
    p = "p < 0.001" if test["p"] < 0.001 else f"p {test['p']:.3f}"
    if test["p"] < LEVEL:
        return "holds here", p
    if test["p"] > 1 - LEVEL:
        return "the reverse holds here", p
    return "no difference found", p


def measured(claim):
    """-> the cells of a claim: what was measured, its verdict."""
    records = read_records(claim["experiment"])
    found = by_label(records, claim["metric"])
    unit = unit_of(claim["metric"])[0]
    ours = found.get(claim["ours"], {})
    if "control" not in claim:  # a number that the paper has nothing beside
        return f"{mean_std(list(ours.values()), unit)} ({len(ours)} seeds)", "not testable here"
    control = found.get(claim["control"], {})
    word, p = verdict(ours, control, claim["better"])
    numbers = [f"{label} {mean_std(list(scores.values()), unit)}"
               for label, scores in ((claim["control"], control), (claim["ours"], ours))]
    seeds = f"{len(ours.keys() & control.keys())} common seeds"
    return ", ".join(filter(None, [*numbers, seeds, p])), word


def page():
    """The Markdown of the board."""
    rows = []
    notes = []
    for number, claim in enumerate(DATA["claims"], start=1):
        numbers, word = measured(claim)
        rows.append([number, claim["claim"], claim["paper"], numbers, claim["matched"],
                     f"**{word}**", f"`python -m results {claim['experiment']}`"])
        notes.append(f"{number}. {claim['note']}")
    heads = ["", "claim", "the paper says", "measured here", "matched", "verdict", "command"]
    head, line, *body = markdown(heads, rows)
    return "\n".join([
        "# Twelve claims of the four papers", "",
        "Written by `python -m results claims` from the records of the experiments. Models here "
        "are a hundred times smaller than the papers' and, where nothing else is said, trained "
        "from scratch: a verdict is about this scale.", "",
        f"Verdict: paired one-tailed t-test over common seeds, level {LEVEL}, at least {SEEDS} "
        "seeds; of fewer none.", "",
        head, line.replace(":", ""), *body, "", "## How to read each", "", *notes]) + "\n"


def main(arguments):
    Parser("python -m results claims", __doc__).parse_args(arguments)
    write_atomic(PAGE, page().encode())
    print("results/claims.md")
