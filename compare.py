"""Runs against each other: mean and standard deviation over seeds, paired tests, plots.

    python evaluate.py compare out/a-82 out/a-23 out/b-82 out/b-23       # a table; b is tested against a over their common seeds
    python evaluate.py compare out/* --metrics retrieval/xsim,geometry/rankme --out out/compared --plots

Runs that differ in nothing but their seed are one group, a row of the table.
"""
# First what is read and how it is grouped, then statistics, then the command line; plots.py draws.
import argparse
import contextlib
import json
import math
import re
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import data
import evaluate
import metrics
from data import BadInput
from plots import PLOTS, draw

FREE = {"seed", "out", "cache", "device", "attention", "compile", "fill", "log_every", "eval_every", "eval_limit", "save_every"}
AMOUNTS = ("rows", "test_rows", "train_rows", "rows_train", "epochs")     # results that must be the same for others to be compared
HEADLINE = ("retrieval/xsim", "retrieval/xsim++", "retrieval/top1", "geometry/rankme", "geometry/cosine/same", "geometry/cosine/translations",
            "generate/exact", "generate/startswith")

# ---------------------------------------------------------------------------------------------------------------------
# Runs and groups


class Run(NamedTuple):
    """settings: its config in one level, "objective", "lr", "model.layers", ..., without what is FREE; scores {metric: {(seed,): number}}, of
    fine-tuning over several seeds {(seed, seed of fine-tuning): number}; log: the records of log.jsonl; arrays: arrays.json, or {}."""
    folder: Path
    seed: int
    settings: dict
    config: dict
    tokenizer: str
    scores: dict
    log: list
    arrays: dict


class Group(NamedTuple):
    label: str
    runs: list

    def scores(self, metric):
        """{seeds: number} of the runs that have it"""
        return {seeds: value for run in self.runs for seeds, value in run.scores.get(metric, {}).items()}


def read_json(path):
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError
        return found
    except (OSError, ValueError):
        raise BadInput(f"{path} is no JSON object: make it again") from None


def read_scores(folder, files, seed):
    """The numbers of a run's files -> {metric: {seeds: number}}; "metric/seed_7" is the metric after fine-tuning with seed 7."""
    scores = {}
    for name in files:
        if not (folder / name).is_file():
            task = name.removeprefix("finetune-").removesuffix(".json")
            command = (f"python finetune.py {folder} --task {task}" if name.startswith("finetune-") else f"python evaluate.py {folder}" +
                       " with the flags that name it so" * (name != "eval.json"))
            raise BadInput(f"{folder} has no {name}: make it with {command}")
        found = {key: value for key, value in read_json(folder / name).items() if isinstance(value, (int, float))}
        if double := found.keys() & scores.keys():
            raise BadInput(f"--files: {name} and another both hold {min(double)}; give one of them")
        scores |= {key: {(seed,): value} for key, value in found.items()}
        for key, value in found.items():
            if part := re.fullmatch(r"(.+)/seed_(\d+)", key):
                scores[part[1]] = {seeds: one for seeds, one in scores.get(part[1], {}).items() if len(seeds) > 1} | {(seed, int(part[2])): value}
                del scores[key]
    return scores


def read_run(folder, files):
    first = evaluate.read_config(folder)
    config = first["config"]
    flat = {}
    for name, value in config.items():
        flat |= {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
    settings = {name: value for name, value in flat.items() if name not in FREE}
    for name in ("init", "match_flops"):                                 # a path that ends in the run's own seed: out/a-82 and out/a-23 are the same
        settings[name] = re.sub(rf"\b{config['seed']}/?$", "SEED", settings.get(name) or "")
    if settings["match_flops"]:
        del settings["steps"]                                            # follows from it, and may differ by a step between seeds
    lines = []
    for line in (folder / "log.jsonl").read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):                            # a kill may have cut the last line short
            lines.append(json.loads(line))
    arrays = read_json(folder / "arrays.json") if (folder / "arrays.json").is_file() else {}
    log = [record for record in lines if isinstance(record, dict)]
    return Run(folder, config["seed"], settings, config, first.get("tokenizer_hash", ""), read_scores(folder, files, config["seed"]), log, arrays)


def label_of(settings, others):
    """What tells these settings from the others of the same objective, after the objective's name: "mexma koleo_weight 0.3"."""
    others = [other for other in others if other["objective"] == settings["objective"]]
    differ = {name.split(".")[-1]: value for name, value in settings.items() if any(other.get(name) != value for other in others)}
    words = [f"{name} {value if value != '' else 'none'}" for name, value in differ.items()]
    return " ".join([settings["objective"], ", ".join(words[:3])]).strip() + f" and {len(words) - 3} more" * (len(words) > 3)


def group(runs):
    """Runs -> Groups, in the order of their first runs."""
    found = {}
    for run in runs:
        found.setdefault(json.dumps(run.settings, sort_keys=True), []).append(run)
    for each in found.values():
        seeds = [run.seed for run in each]
        for place, seed in enumerate(seeds):
            if seed in seeds[:place]:
                raise BadInput(f"{each[seeds.index(seed)].folder} and {each[place].folder} are the same run with the same seed {seed}: give one of them")
    labels = [label_of(each[0].settings, [other[0].settings for other in found.values()]) for each in found.values()]
    return [Group(f"{label} ({each[0].folder})" if labels.count(label) > 1 else label, each) for label, each in zip(labels, found.values())]


def check_same_rows(runs, names, files):
    """Numbers of different rows are refused. -> notes on what does not forbid to compare. eval.json is of the run's own rows."""
    first, notes = runs[0], []
    for run in runs[1:] if "eval.json" in files else ():
        one, two = ((each.config.get("eval_data") or each.config["data"], each.config.get("langs") or "all columns") for each in (first, run))
        if [Path(one[0]).name, one[1]] != [Path(two[0]).name, two[1]]:
            raise BadInput(f"{first.folder} was evaluated on {one[0]} ({one[1]}), {run.folder} on {two[0]} ({two[1]}): their numbers cannot be compared; "
                           "evaluate both with the same --data and --langs, and name the file that this writes with --files")
        if one[0] != two[0]:
            notes.append(f"{one[0]} and {two[0]} have the same name: whether they are the same file was not checked.")
    done = {name.split("/")[0] for name in names}
    for count in dict.fromkeys(name for run in runs for name in run.scores if name.split("/")[0] in done and name.split("/")[-1] in AMOUNTS):
        found = [(run, set(run.scores[count].values())) for run in runs if count in run.scores]
        for run, value in found[1:]:
            if value != found[0][1]:
                raise BadInput(f"{count} is {found[0][1].pop()} in {found[0][0].folder} and {value.pop()} in {run.folder}: their numbers "
                               "cannot be compared; evaluate both with the same --limit and --data")
    if len({run.tokenizer for run in runs}) > 1:
        notes.append("The tokenizers differ: losses and metrics of tokens cannot be compared, those of texts can.")
    for run in runs:
        last = max((record.get("step", 0) for record in run.log), default=0)
        if last < run.config["steps"]:
            notes.append(f"{run.folder} is not finished: step {last} of {run.config['steps']}.")
        notes += [f"{run.folder / name} is older than the model: it was trained on since." for name in files
                  if (run.folder / name).stat().st_mtime < (run.folder / "model.pt").stat().st_mtime]
    return list(dict.fromkeys(notes))


def choose(asked, known):
    """Metrics that were asked for, or else the HEADLINE, or else every metric without its details."""
    for name in asked or ():
        if name not in known:
            raise BadInput(f"metric {name!r} is in none of the runs{data.meant(name, known, f': there is {chr(44).join(known)}')}")
    return asked or [name for name in HEADLINE if name in known] or [name for name in known if name.count("/") == 1 and unit_of(name)[1]] or list(known)


# ---------------------------------------------------------------------------------------------------------------------
# Statistics


def unit_of(name):
    """-> unit, which way is better: "lower", "higher", or "" if neither is or the metric is not one of evaluate.py"""
    try:
        return evaluate.about(name)[:2]
    except KeyError:
        return "", ""


def paired_test(scores, base, better):
    """Is a group better than the base? {seeds: number} each -> {"n", "difference", "t", "p"} of a paired one-tailed t-test over the common
    seeds, with p near 1 if it is worse; or why there is none, a text. [Student 1908; LLM-JEPA, sec. 4]"""
    common = sorted(scores.keys() & base.keys())
    if not better:
        return "which way is better is not known"
    if len(common) < 2:
        return f"{len(common)} common seed{'s' * (len(common) != 1)}, and a test needs 2"
    x, y = ([each[seeds] for seeds in common] for each in (scores, base))
    difference, t, p = metrics.paired_t(x, y) if better == "higher" else metrics.paired_t(y, x)
    if math.isnan(t):
        return "no difference in any seed"
    return {"n": len(common), "difference": difference if better == "higher" else -difference, "t": t if math.isfinite(t) else str(t), "p": p}


def compare(groups, names, base):
    """-> [{"label", "runs", "seeds", "settings", "metrics": {metric: {"mean", "std" (n - 1; None of one), "n", "test"}}}], a group each."""
    rows = []
    for each in groups:
        found = {}
        for name in names:
            scores = each.scores(name)
            values = list(scores.values())
            found[name] = {"mean": statistics.fmean(values) if values else None, "std": statistics.stdev(values) if len(values) > 1 else None,
                           "n": len(values), "test": paired_test(scores, base.scores(name), unit_of(name)[1]) if each is not base and values else None}
        rows.append({"label": each.label, "runs": [str(run.folder) for run in each.runs], "seeds": [run.seed for run in each.runs],
                     "settings": each.runs[0].settings, "metrics": found})
    return rows


def cell(found, unit, runs):
    """One cell of the table: "0.70 ± 0.10, p = 0.012 (n 5)"; the n where it says something that the column of seeds does not."""
    if not found["n"]:
        return f"- (0 of {runs})"
    number, spread = (("{:.2f}", "{:.2f}") if unit == "%" else ("{:.4g}", "{:.2g}"))
    text = number.format(found["mean"]) + (f" ± {spread.format(found['std'])}" if found["std"] is not None else "")
    if isinstance(found["test"], dict):
        p, n = found["test"]["p"], found["test"]["n"]
        return text + (f", p = {p:.3f}" if p >= .001 else ", p < 0.001") + f" (n {n})"
    return text + (f" (n {found['n']})" if found["n"] > runs else f" ({found['n']} of {runs})" * (found["n"] < runs))


def markdown(rows, names, base, notes):
    """The table, a row a group, and what one must know to read it."""
    head = [f"{name}{f' {unit}' if unit else ''}{f' ({better})' if better else ''}" for name in names for unit, better in [unit_of(name)]]
    lines = ["| run | seeds | " + " | ".join(head) + " |", "|---|---|" + "---:|" * len(names)]
    for row in rows:
        cells = [cell(row["metrics"][name], unit_of(name)[0], len(row["runs"])) for name in names]
        lines.append(f"| {row['label']} | {', '.join(map(str, row['seeds']))} | " + " | ".join(cells) + " |")
    tests = [found["test"] for row in rows for found in row["metrics"].values() if isinstance(found["test"], dict)]
    lines += ["", "Mean ± standard deviation (n - 1) over seeds; lower, higher: which way is better."]
    if tests:
        lines.append(f"p: paired one-tailed t-test over n common seeds, that the row is better than {base.label}; near 1, it is worse. {len(tests)} "
                     f"test{'s' * (len(tests) > 1)}" + (f": by chance alone, .05 would be passed {.05 * len(tests):.1f} times; Holm's correction asks "
                     f"{.05 / len(tests):.2g} of the smallest p." if len(tests) > 1 else "."))
    for row in rows:
        for reason in dict.fromkeys(found["test"] for found in row["metrics"].values() if isinstance(found["test"], str)):
            of = [name for name, found in row["metrics"].items() if found["test"] == reason]
            lines.append(f"No p for {row['label']}, {', '.join(of) if len(of) < len(names) else 'all metrics'}: {reason}.")
    return "\n".join(lines + notes) + "\n"


def unequal(groups):
    """A note on what differs between objectives and is no flag of their own: unequal lengths, batches or rates are not seen in a label."""
    first, *others = (each.runs[0].settings for each in groups)
    common = [name for name in first if "." not in name and name not in ("objective", "match_flops", "init")]
    differ = [name for name in common if any(other.get(name, first[name]) != first[name] for other in others)]
    show = lambda name: f"{name} " + " / ".join(str(settings.get(name)) for settings in (first, *others))
    return [f"Settings that are not the same in all rows, in their order: {'; '.join(map(show, differ))}."] if differ else []


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def compare_runs(options):
    """-> the exit status: 2 if a plot that was named lacks its data"""
    if options.plots is not None and not options.out:
        raise BadInput("--plots needs a folder to write into: add --out FOLDER")
    for name in options.plots or ():
        if name not in PLOTS:
            raise BadInput(f"plot {name!r} is unknown: choose from {', '.join(PLOTS)}; runs stand before --plots")
    groups = group([read_run(Path(folder), options.files) for folder in options.runs])
    runs = [run for each in groups for run in each.runs]
    base = groups[0]
    if options.against:
        base = next((each for each in groups if any(run.folder == Path(options.against) for run in each.runs)), None)
        if base is None:
            raise BadInput(f"--against {options.against} is none of the runs: give one of {', '.join(options.runs)}")
    names = choose(options.metrics, dict.fromkeys(name for run in runs for name in run.scores))
    notes = check_same_rows(runs, names, options.files) + unequal(groups)
    rows = compare(groups, names, base)
    text = markdown(rows, names, base, notes)
    found = json.dumps({"against": base.label, "groups": rows, "notes": notes}, indent=1, allow_nan=False) + "\n"
    print(found if options.json else text, end="")
    lacking = False
    if options.out:
        data.write_atomic(Path(options.out) / "compare.md", text.encode())
        data.write_atomic(Path(options.out) / "compare.json", found.encode())
    for name in PLOTS if options.plots == [] else options.plots or ():
        panels, missing = PLOTS[name](groups, options.projection)
        for line in missing:
            print(f"note: plot {name}: {line}", file=sys.stderr)
        if panels:
            data.write_atomic(Path(options.out) / f"{name}.png", draw(panels))
        lacking |= bool(missing)
    return 2 if lacking and options.plots else 0


def main(argv):
    """argv: "compare", then what follows it. Returns the exit status: 0, or 2 for bad input, which is one line on stderr."""
    parser = argparse.ArgumentParser(prog="evaluate.py compare", description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders that train.py wrote and evaluate.py has evaluated; the first one's group is the base")
    parser.add_argument("--metrics", type=evaluate.names, metavar="NAME,NAME", help=f"such as retrieval/xsim,geometry/rankme (default: {', '.join(HEADLINE)})")
    parser.add_argument("--files", type=evaluate.names, default=["eval.json"], metavar="FILE,FILE",
                        help="files of each run to read, such as eval-flores-test.json,finetune-mnli.json (default: eval.json)")
    parser.add_argument("--against", metavar="RUN", help="a run of the group that the others are tested against (default: the first)")
    parser.add_argument("--out", metavar="FOLDER", help="write compare.md, compare.json and the plots into this folder")
    parser.add_argument("--plots", type=evaluate.names, nargs="?", const=[], metavar="NAME,NAME", help=f"draw {', '.join(PLOTS)}, or some of them")
    parser.add_argument("--projection", choices=("tsne", "pca"), default="tsne", help="how the plot of vectors gets from D dimensions to 2 (default: tsne)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return evaluate.reported(compare_runs, parser.parse_args(argv[1:]))
