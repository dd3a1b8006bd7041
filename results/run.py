"""The recorded experiments: each trains its runs, evaluates them on test rows, and writes results/NAME.md and results/NAME.jsonl.

    python results/run.py toy                                  # three objectives x seeds 0, 1, 2 on the embedded data
    python results/run.py ablations                            # MEXMA's ablations x seeds 0, 1, 2 on the embedded data
    python results/run.py objectives                           # the other four beside those of toy.jsonl, seeds 0, 1, 2, embedded data
    python results/run.py collapse                             # MSE alone, and each remedy, on the embedded data
    python results/run.py multi30k --files FOLDER              # English-German captions; FOLDER holds multi30k_*.tsv.xz
    python results/run.py nlrx-choice --files FOLDER           # llm-jepa's lambda and k on a split of NL-RX-SYNTH's training set
    python results/run.py nlrx --files FOLDER                  # ntp and llm-jepa x five seeds; FOLDER holds synth_train and synth_test (.jsonl.xz)
    python results/run.py wikitext --files FOLDER              # hybrid and mlm x seeds 0, 1, 2; FOLDER holds wikitext2_train, _valid and _test (.txt.xz)

Runs are kept in out/results; what is finished is not trained again, what was stopped resumes. One thread a run, --jobs at a time.
"""

import argparse
import json
import lzma
import os
import random
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import evaluate  # noqa: E402
import metrics  # noqa: E402

SEEDS = (0, 1, 2)
PAPER_SEEDS = (82, 23, 37, 84, 4)  # LLM-JEPA's
FILES = {"multi30k": ("multi30k_train.tsv.xz", "multi30k_val.tsv.xz", "multi30k_test_2016_flickr.tsv.xz"),
         "nlrx-choice": ("synth_train.jsonl.xz",), "nlrx": ("synth_train.jsonl.xz", "synth_test.jsonl.xz"),
         "wikitext": ("wikitext2_train.txt.xz", "wikitext2_valid.txt.xz", "wikitext2_test.txt.xz")}
NLRX = "--vocab 512 --lr 2e-3 --batch 32 --dropout 0.1 --eval-every 2000 --eval-limit 100"      # about a million parameters
CHOICES = {f"k={k}, lambda={weight}": f"--predictors {k} --jepa-weight {weight}"                # the paper's grid, crosswise
           for k, weight in [(k, 1) for k in range(5)] + [(1, 0.5), (1, 2), (1, 4)]}
CHOSEN = "k=2, lambda=1"  # the best of results/nlrx-choice.md
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
        rows = [("bepa", ""), ("hybrid", ""), ("llm-jepa", "--data regex"), ("ntp", "--data regex")]
        return [(f"objectives-{kind}-{seed}", kind, seed, f"--objective {kind} {flags}", "") for seed in SEEDS for kind, flags in rows]
    if name == "collapse":
        alone = "--objective mexma --steps 300 --mlm-weight 0 --koleo-weight 0 --lr 5e-4"
        return [(f"collapse-{label.replace('+ ', '').replace(' ', '-')}-0", label, 0, f"{alone} {flags}", "") for label, flags in COLLAPSE.items()]
    if name == "nlrx-choice":                                            # 4 epochs on 7,000 rows, exact match on the other 1,000
        runs = {"ntp": "--objective ntp"} | {label: f"--objective llm-jepa {flags}" for label, flags in CHOICES.items()}
        train, valid = split(files)
        return [(f"nlrx-choice-{label.replace(', ', '-')}-0", label, 0, f"{flags} --data {train} --eval-data {valid} {NLRX} --steps 875",
                 f"--data {valid} --tasks generate") for label, flags in runs.items()]
    if name == "nlrx":                                                   # 8 epochs; the evaluation in training is on rows that are trained on
        data = f"--data {files}/synth_train.jsonl.xz --eval-data {split(files)[1]} {NLRX}"
        runs = {"ntp": "--objective ntp --steps 2000", "llm-jepa": f"--objective llm-jepa {CHOICES[CHOSEN]} --steps 2000",
                "llm-jepa, equal FLOPs": f"--objective llm-jepa {CHOICES[CHOSEN]} --match-flops out/results/nlrx-ntp-SEED"}
        return [(f"nlrx-{label.replace(', equal ', '-')}-{seed}", label, seed, f"{flags.replace('SEED', str(seed))} {data}",
                 f"--data {files}/synth_test.jsonl.xz --tasks generate --limit 2000") for label, flags in runs.items() for seed in PAPER_SEEDS]
    if name == "wikitext":
        data = (f"--data {files}/wikitext2_train.txt.xz --eval-data {files}/wikitext2_valid.txt.xz --block 128 --batch 16 --eval-every 200 "
                "--eval-limit 300")
        runs = {"mlm": "--objective mlm --steps 400", "hybrid": "--objective hybrid --min-keep 32 --steps 400",
                "hybrid, equal FLOPs": "--objective hybrid --min-keep 32 --match-flops out/results/wikitext-mlm-SEED"}
        return [(f"wikitext-{label.replace(', equal ', '-')}-{seed}", label, seed, f"{flags.replace('SEED', str(seed))} {data}",
                 f"--data {files}/wikitext2_test.txt.xz --tasks geometry,poolings --limit 2000") for label, flags in runs.items() for seed in SEEDS]
    common = (f"--data {files}/multi30k_train.tsv.xz --langs en,de --eval-data {files}/multi30k_val.tsv.xz --steps 3000 --dropout 0.1 "
              "--eval-every 250 --eval-limit 1014")
    test = f"--data {files}/multi30k_test_2016_flickr.tsv.xz --langs en,de"
    return [(f"multi30k-{kind}-0", kind, 0, f"--objective {kind} {common}", test) for kind in ("mexma", "contrastive", "mlm")]


def split(files):
    """NL-RX-SYNTH's training set without and with the 1,000 of its 8,000 rows that a seeded shuffle puts last -> two files, made once."""
    paths = [ROOT / "out" / "results" / name for name in ("nlrx_choose.jsonl", "nlrx_valid.jsonl")]
    with lzma.open(Path(files) / "synth_train.jsonl.xz", "rt", encoding="utf-8") as file:
        lines = file.readlines()
    random.Random(0).shuffle(lines)
    for path, part in zip(paths, (lines[:-1000], lines[-1000:])):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():                                            # a new file would look like new data to a run that resumes
            path.write_text("".join(part), encoding="utf-8")
    return paths


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
    short = lambda text: " ".join(word.rsplit("/", 1)[-1] if word.endswith((".xz", ".jsonl")) else word for word in text.split())
    curve = {str(record["step"]): {key: value for key, value in record["eval"].items() if key in ("retrieval/xsim", "retrieval/xsim++", "geometry/rankme",
             "geometry/cosine/same", "geometry/cosine/translations")} for record in log if "eval" in record}
    last = [record for record in log if "loss" in record][-1]
    scores = json.loads(found.stdout)
    return dict(label=label, seed=seed, train="python train.py " + short(" ".join(words)), test=short(f"python evaluate.py out/results/{run} {test}"),
                commit=log[0]["commit"], torch=log[0]["torch"], device=log[0]["device"], steps=last["step"], tokens=last["tokens"], seconds=last["seconds"],
                flops=log[0]["flops_per_step"] * last["step"], last={key: value for key, value in last.items() if isinstance(value, float)},
                health=metrics.diagnose(scores)[1] if "geometry/rankme" in scores else "", curve=curve, eval=scores)


def mean(records, key):
    values = [record["eval"].get(key) if isinstance(key, str) else key(record) for record in records]
    values = [value for value in values if value is not None]
    if not values:
        return "-"
    if all(isinstance(value, int) for value in values):                  # a count, such as steps
        return f"{min(values):,}" + (f" to {max(values):,}" if min(values) < max(values) else "")
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


COLUMNS = {"xsim %": "retrieval/xsim", "xsim++ %": "retrieval/xsim++", "RankMe": "geometry/rankme", "uniformity": "geometry/uniformity",
           "cos random": "geometry/cosine/same", "cos translations": "geometry/cosine/translations", "exact match %": "generate/exact",
           "startswith %": "generate/startswith", "stops %": "generate/stop", "exact, unseen target %": "generate/exact_unseen",
           "exact, new prompt %": "generate/exact_new_prompt"}
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
    if any("flops" in record for record in records):
        columns |= {"steps": lambda record: record["steps"], "TFLOP": lambda record: record["flops"] / 1e12 if "flops" in record else None}
    if any("retrieval/xsim" in record["eval"] for record in records):                # not where only answers are judged
        columns |= {"step 0 xsim %": lambda record: record["curve"]["0"].get("retrieval/xsim")}
    columns |= {"minutes": lambda record: record["seconds"] / 60}
    seeds = f"mean ± standard deviation over {len(of[labels[0]])} seeds" if len(of[labels[0]]) > 1 else "one seed"
    rows = {value for record in records for key, value in record["eval"].items() if key.count("/") == 1 and key.endswith("/rows")}
    command = f"python results/run.py {name}{' --files FOLDER' if name in FILES else ''}"
    lines = [f"# {name}", "", f"`{command}`: {seeds}, {' or '.join(map(str, sorted(rows)))} test rows; step 0 is measured on the validation rows; "
             "minutes of training with one thread a run on a machine that others used.", ""]
    lines += table(labels, of, columns, {label: ABLATIONS[label][1] for label in labels} if name == "ablations" else {})
    if hard:
        lines += ["", "What was found instead of the translation among the hard negatives, % of the queries:", ""]
        found = [label for label in labels if "retrieval/xsim++" in of[label][0]["eval"]]
        lines += table(found, of, {error: f"retrieval/xsim++/{error}" for error in ERRORS})
    for title, keys in (("exact match", "generate/exact"), ("startswith", "generate/startswith"), ("stops", "generate/stop"),
                        ("exact match, unseen target", "generate/exact_unseen"), ("exact match, new prompt", "generate/exact_new_prompt")):
        for label in labels[1:] if name == "nlrx" else ():
            scores = [[record["eval"][keys] for record in of[one]] for one in (label, labels[0])]
            difference, t, p = metrics.paired_t(*scores)
            lines += [""] * (label == labels[1] and title == "exact match") + [f"- {title}, {label} above {labels[0]}: {difference:+.2f} points, "
                                                                             f"paired t = {t:.2f}, one-tailed p = {p:.3f}"]
    for pool in evaluate.POOLINGS if "poolings/mean/uniformity" in records[0]["eval"] else ():
        lines += ["", f"Pooling: {pool}", ""]
        lines += table(labels, of, {metric.replace("_", " "): f"poolings/{pool}/{metric}" for metric in
                                    ("uniformity", "effective_rank", "stable_rank", "rank_90", "spectral_entropy")})
    curves = [(label, [f"{step}: {point['retrieval/xsim']:.1f}" for step, point in of[label][0]["curve"].items() if "retrieval/xsim" in point])
              for label in labels]
    if any(curve for _, curve in curves) and not name.startswith("nlrx"):
        lines += ["", "xsim in percent along training (seed 0, validation rows):", ""]
        lines += [f"- {label}: " + ", ".join(curve) for label, curve in curves if curve]
    ranks = [(label, [f"{step}: {point['geometry/rankme']:.1f}" for step, point in of[label][0]["curve"].items() if "geometry/rankme" in point])
             for label in labels]
    if name in ("collapse", "wikitext"):
        lines += ["", "RankMe along training (first seed, validation rows):", ""] + [f"- {label}: " + ", ".join(curve) for label, curve in ranks]
    if name == "collapse":
        lines += ["", "The health line at the end:", ""] + [f"- {label}: `{of[label][0]['health']}`" for label in labels]
    lines += ["", "Commands:", ""] + [f"- `{record['train']}`, then `{record['test']}`" for record in records if record["seed"] == records[0]["seed"]]
    commits = ", ".join(dict.fromkeys(record["commit"] for record in records))
    lines += ["", f"Commit {commits}, torch {records[0]['torch']}, {records[0]['device']}."]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("toy", "ablations", "objectives", "collapse", *FILES))
    parser.add_argument("--files", default="", help="folder of the files that multi30k, nlrx and wikitext read")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--report", action="store_true", help="only write the Markdown again from the recorded JSON lines")
    options = parser.parse_args()
    folder = ROOT / "results"
    if options.report:
        records = [json.loads(line) for line in (folder / f"{options.name}.jsonl").read_text(encoding="utf-8").splitlines()]
        (folder / f"{options.name}.md").write_text(report(options.name, records), encoding="utf-8")
        return
    for file in FILES.get(options.name, ()):
        if not (Path(options.files) / file).is_file():
            parser.error(f"--files {options.files!r} must be the folder that holds {file}")
    jobs = plan(options.name, options.files and Path(options.files).resolve())
    earlier = (folder / "toy.jsonl").read_text(encoding="utf-8").splitlines() if options.name == "objectives" else []
    with ThreadPoolExecutor(options.jobs) as pool:
        records = [json.loads(line) for line in earlier] + list(tqdm(pool.map(execute, jobs), total=len(jobs), disable=not sys.stderr.isatty()))
    (folder / f"{options.name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    (folder / f"{options.name}.md").write_text(report(options.name, records), encoding="utf-8")
    print(report(options.name, records))


if __name__ == "__main__":
    main()
