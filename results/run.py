"""The recorded experiments: each trains its runs, evaluates them on test rows, and writes results/NAME.md and results/NAME.jsonl.

    python results/run.py toy                                  # three objectives x seeds 0, 1, 2 on the embedded data
    python results/run.py ablations                            # MEXMA's ablations x seeds 0, 1, 2 on the embedded data
    python results/run.py objectives                           # all seven objectives x seeds 0, 1, 2 on the embedded data
    python results/run.py collapse                             # MSE alone, and each remedy, on the embedded data
    python results/run.py multi30k --files FOLDER              # English-German captions; FOLDER holds multi30k_*.tsv.xz

Runs are kept in out/results; what is finished is not trained again, what was stopped resumes. One thread a run, --jobs at a time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).parent.parent
SEEDS = (0, 1, 2)
ABLATIONS = {   # name -> (flags, the paper's xsim, xsim++, SentEval and which of its tables)
    "full": ("", ".06 / 9.60 / 86.38 (table 11, 6)"),
    "no KoLeo": ("--koleo-weight 0", ".10 / 9.67 / 85.98 (table 11, 5)"),
    "no token gradients": ("--no-token-gradients", "without KoLeo too: .15 / 11.37 / 85.06 (table 11, 4)"),
    "dirty alignment": ("--align-views dirty", "without token gradients and KoLeo: .21 / 12.09 / 85.61 (table 11, 3)"),
    "non-symmetrical": ("--no-symmetrical --align-views dirty", "nor alignment, token gradients, KoLeo: .09 / 14.75 / 84.68 (table 11, 1)"),
    "InfoNCE, no KoLeo": ("--align info_nce --koleo-weight 0", ".12 / 10.93 / 85.94 (table 6)"),
}


COLLAPSE = {   # MSE alone, then one remedy each; everything else of MEXMA is off
    "MSE alone": "", "+ KoLeo": "--koleo-weight 1", "+ unmasking": "--mlm-weight 1", "InfoNCE instead": "--align info_nce", "VICReg instead": "--align vicreg",
    "Barlow Twins instead": "--align barlow", "SIGReg instead": "--align sigreg",
}


def plan(name, files):
    """-> [(run, label, seed, flags of train.py, flags of evaluate.py)]"""
    if name == "toy":
        return [(f"toy-{kind}-{seed}", kind, seed, f"--objective {kind}", "") for seed in SEEDS for kind in ("mexma", "contrastive", "mlm")]
    if name == "ablations":
        folder = lambda label: "toy-mexma" if label == "full" else "ablation-" + label.replace(", ", "-").replace(" ", "-")
        return [(f"{folder(label)}-{seed}", label, seed, f"--objective mexma {flags}", "") for seed in SEEDS for label, (flags, _) in ABLATIONS.items()]
    if name == "objectives":
        rows = [("toy" if kind in ("mexma", "contrastive", "mlm") else "objectives", kind, "") for kind in ("mexma", "bepa", "hybrid", "contrastive", "mlm")]
        rows += [("objectives", kind, "--data regex") for kind in ("llm-jepa", "ntp")]
        return [(f"{group}-{kind}-{seed}", kind, seed, f"--objective {kind} {flags}", "") for seed in SEEDS for group, kind, flags in rows]
    if name == "collapse":
        alone = "--objective mexma --steps 300 --mlm-weight 0 --koleo-weight 0 --lr 5e-4"
        return [(f"collapse-{label.replace('+ ', '').replace(' ', '-')}-0", label, 0, f"{alone} {flags}", "") for label, flags in COLLAPSE.items()]
    common = (f"--data {files}/multi30k_train.tsv.xz --langs en,de --eval-data {files}/multi30k_val.tsv.xz --steps 3000 --dropout 0.1 "
              "--eval-every 250 --eval-limit 1014")
    test = f"--data {files}/multi30k_test_2016_flickr.tsv.xz --langs en,de"
    return [(f"multi30k-{kind}-0", kind, 0, f"--objective {kind} {common}", test) for kind in ("mexma", "contrastive", "mlm")]


def execute(job):
    """Train and evaluate one run -> its record; the scripts' own output goes to a file beside the runs."""
    run, label, seed, flags, test = job
    folder = ROOT / "out" / "results" / run
    folder.parent.mkdir(parents=True, exist_ok=True)
    words = f"{flags} --seed {seed} --out out/results/{run}".split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(folder.with_suffix(".txt"), "a", encoding="utf-8") as shown:
        subprocess.run([sys.executable, "train.py", *words], cwd=ROOT, env=environment, stdout=shown, stderr=shown, check=True)
    found = subprocess.run([sys.executable, "evaluate.py", f"out/results/{run}", "--json", *test.split()], cwd=ROOT, env=environment, capture_output=True,
                           text=True, check=True)
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    short = lambda text: " ".join(word.rsplit("/", 1)[-1] if word.endswith(".xz") else word for word in text.split())
    curve = {str(record["step"]): {key: value for key, value in record["eval"].items() if key in ("retrieval/xsim", "retrieval/xsim++", "geometry/rankme",
             "geometry/cosine/same", "geometry/cosine/translations")} for record in log if "eval" in record}
    last = [record for record in log if "loss" in record][-1]
    return dict(label=label, seed=seed, train="python train.py " + short(" ".join(words)), test=short(f"python evaluate.py out/results/{run} {test}"),
                commit=log[0]["commit"], torch=log[0]["torch"], device=log[0]["device"], steps=last["step"], tokens=last["tokens"], seconds=last["seconds"],
                last={key: value for key, value in last.items() if isinstance(value, float)}, curve=curve, eval=json.loads(found.stdout))


def mean(records, key):
    values = [record["eval"].get(key) if isinstance(key, str) else key(record) for record in records]
    values = [value for value in values if value is not None]
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


COLUMNS = {"xsim %": "retrieval/xsim", "xsim++ %": "retrieval/xsim++", "RankMe": "geometry/rankme", "uniformity": "geometry/uniformity",
           "cos random": "geometry/cosine/same", "cos translations": "geometry/cosine/translations", "exact match %": "generate/exact",
           "exact, unseen target %": "generate/exact_unseen", "stops %": "generate/stop"}
ERRORS = ("number", "entity", "role", "tense", "cause", "negation", "misaligned")


def table(labels, of, columns, last=None):
    """Markdown lines: one row a label, one column each of {title: key}, and with {label: text} a last column."""
    titles = [*columns] + (["paper: xsim / xsim++ / SentEval"] if last else [])
    lines = ["| run | " + " | ".join(titles) + " |", "|---|" + "---:|" * len(titles)]
    for label in labels:
        cells = [mean(of[label], key) for key in columns.values()] + ([last[label]] if last else [])
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return lines


def report(name, records):
    """The Markdown of an experiment: one row a label, mean ± standard deviation over its seeds."""
    labels = list(dict.fromkeys(record["label"] for record in records))
    of = {label: [record for record in records if record["label"] == label] for label in labels}
    hard = any("retrieval/xsim++" in record["eval"] for record in records)
    columns = {title: key for title, key in COLUMNS.items() if any(key in record["eval"] for record in records)}
    columns |= {"step 0 xsim %": lambda record: record["curve"]["0"]["retrieval/xsim"], "minutes": lambda record: record["seconds"] / 60}
    seeds = f"mean ± standard deviation over {len(of[labels[0]])} seeds" if len(of[labels[0]]) > 1 else "one seed"
    command, rows = f"python results/run.py {name}{' --files FOLDER' if name == 'multi30k' else ''}", records[0]["eval"]["retrieval/rows"]
    lines = [f"# {name}", "", f"`{command}`: {seeds}, {rows} test "
             "rows; step 0 is measured on the validation rows; minutes of training with one thread a run on a machine that others used.", ""]
    lines += table(labels, of, columns, {label: ABLATIONS[label][1] for label in labels} if name == "ablations" else {})
    if hard:
        lines += ["", "What was found instead of the translation among the hard negatives, % of the queries:", ""]
        lines += table(labels, of, {error: f"retrieval/xsim++/{error}" for error in ERRORS})
    lines += ["", "xsim in percent along training (seed 0, validation rows):", ""]
    for label in labels:
        curve = of[label][0]["curve"]
        lines.append(f"- {label}: " + ", ".join(f"{step}: {point['retrieval/xsim']:.1f}" for step, point in curve.items() if "retrieval/xsim" in point))
    lines += ["", "Commands:", ""] + [f"- `{record['train']}`, then `{record['test']}`" for record in records if record["seed"] == 0]
    lines += ["", f"Commit {records[0]['commit']}, torch {records[0]['torch']}, {records[0]['device']}."]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("toy", "ablations", "objectives", "collapse", "multi30k"))
    parser.add_argument("--files", default="", help="folder of the Multi30k files")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--report", action="store_true", help="only write the Markdown again from the recorded JSON lines")
    options = parser.parse_args()
    folder = ROOT / "results"
    if options.report:
        records = [json.loads(line) for line in (folder / f"{options.name}.jsonl").read_text(encoding="utf-8").splitlines()]
        (folder / f"{options.name}.md").write_text(report(options.name, records), encoding="utf-8")
        return
    if options.name == "multi30k" and not (Path(options.files) / "multi30k_train.tsv.xz").is_file():
        parser.error(f"--files {options.files!r} must be the folder that holds multi30k_train, _val and _test_2016_flickr (.tsv.xz)")
    jobs = plan(options.name, options.files and Path(options.files).resolve())
    with ThreadPoolExecutor(options.jobs) as pool:
        records = list(tqdm(pool.map(execute, jobs), total=len(jobs), disable=not sys.stderr.isatty()))
    (folder / f"{options.name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    (folder / f"{options.name}.md").write_text(report(options.name, records), encoding="utf-8")
    print(report(options.name, records))


if __name__ == "__main__":
    main()
