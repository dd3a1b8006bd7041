"""One table per paper, of the shape of the paper's: small encoders trained here on real data, beside the published numbers and honest controls.

    python results/papers.py train --files FOLDER --jobs 2        # sixteen runs in out/papers; what is finished is not trained again
    python results/papers.py measure --files FOLDER               # every task of every table -> results/papers.jsonl
    python results/papers.py report                               # out of it results/{bert-jepa,predict-and-reconstruct,llm-jepa,mexma}.md

FOLDER holds parallel/tatoeba_pairs, parallel/mafand, parallel/ntrex.tsv.xz, parallel/tatoeba_laser_v1, tasks, qa, llm, text (TSV and JSONL, xz).
Where a published test split is not at hand, the seeded one of tasks.py is used, and the table says so.
"""
import argparse
import json
import lzma
import os
import random
import subprocess
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import metrics  # noqa: E402

HERE = ROOT / "out" / "papers"
RECORDS = Path(__file__).parent / "papers.jsonl"
LANGUAGES = "ara bul cmn deu ell fra hin rus spa tur vie".split()  # XNLI's that the pairs have, and Swahili from MAFAND; no Thai, no Urdu
PAIRS = 12_000  # a language at most
SEEDS = (82, 23, 37, 84, 4)  # LLM-JEPA's
SHAPE = "--width 128 --layers 3 --heads 4 --hidden 512 --dropout 0.1"    # 2.1 million parameters with 12,000 pieces
NLRX = "--vocab 512 --lr 2e-3 --batch 32 --dropout 0.1 --steps 1000"     # results/nlrx.md has 2,000
RUNS = {
    **{kind: f"--objective {kind} {SHAPE} --cut 64 --steps 2500" for kind in ("mexma", "bepa", "contrastive", "mlm")},
    "text-hybrid": f"--objective hybrid --min-keep 32 {SHAPE} --steps 1500",
    "text-mlm": f"--objective mlm {SHAPE} --steps 1500",
    **{f"synth-{name}-{seed}": f"--objective {flags} {NLRX} --seed {seed}" for seed in SEEDS
       for name, flags in (("ntp", "ntp"), ("llm-jepa", "llm-jepa --predictors 2 --jepa-weight 1"))},
}


def multilingual(files):
    """English beside one of twelve languages a row, at most PAIRS of each, shuffled by seed 0 -> a table of 13 columns, made once."""
    path, chance, rows = HERE / "multilingual.tsv", random.Random(0), []
    if path.exists():                                                    # a new file would look like new data to a run that resumes
        return path
    names = ["eng", *LANGUAGES, "swa"]
    sources = [files / "parallel" / "tatoeba_pairs" / f"eng-{name}.tsv.xz" for name in LANGUAGES] + [files / "parallel" / "mafand" / "en-swa.train.tsv.xz"]
    for name, source in zip(names[1:], sources):
        with lzma.open(source, "rt", encoding="utf-8") as file:
            pairs = [line.rstrip("\n").split("\t") for line in file][1:]
        chance.shuffle(pairs)
        rows += [[english] + [other if column == name else "" for column in names[1:]] for english, other in pairs[:PAIRS]]
    chance.shuffle(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join("\t".join(row) for row in [names, *rows]) + "\n", encoding="utf-8")
    return path


def parallel(files):
    """NTREX in the thirteen languages -> a table of its first 500 rows, to watch training with, and one of the other 1,497, to report."""
    paths, spelled = [HERE / f"ntrex_{part}.tsv" for part in ("valid", "test")], {"ara": "arb", "cmn": "zho-CN"}
    with lzma.open(files / "parallel" / "ntrex.tsv.xz", "rt", encoding="utf-8") as file:
        table = [line.rstrip("\n").split("\t") for line in file]
    names = ["eng", *LANGUAGES, "swa"]
    places = [table[0].index(spelled.get(name, name)) for name in names]
    for path, part in zip(paths, (table[1:501], table[501:])):
        if not path.exists():
            path.write_text("".join("\t".join(row) + "\n" for row in [names, *([row[place] for place in places] for row in part)]), encoding="utf-8")
    return paths


def flags(run, files):
    """The whole line of train.py that makes a run."""
    if run.startswith("text"):
        data = f"--data {files}/text/wikitext2_train.txt.xz --eval-data {files}/text/wikitext2_valid.txt.xz --block 128 --batch 16 --eval-limit 300"
    elif run.startswith("synth"):
        data = f"--data {files}/llm/synth_train.jsonl.xz --eval-limit 100"
    else:
        data = f"--data {multilingual(files)} --vocab 12000 --eval-data {parallel(files)[0]} --eval-limit 200"
    return f"{RUNS[run]} {data} --eval-every 1000 --out {HERE.relative_to(ROOT)}/{run}"


def train(run, files):
    HERE.mkdir(parents=True, exist_ok=True)
    with open(HERE / f"{run}.txt", "a", encoding="utf-8") as shown:
        subprocess.run([sys.executable, "train.py", *flags(run, files).split()], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=shown,
                       stderr=shown, check=True)


ENCODERS = ("mexma", "bepa", "contrastive", "mlm")
LOOKS = "retrieval,geometry,bucc,spectrum,tokens,attention,uniform"


def measures(files):
    """-> [(run, command after `python`)]; each is run once, and the records of a command that has changed are made anew."""
    data = lambda kind: f"--files {files / kind}"
    found = [(run, f"evaluate.py RUN --data out/papers/ntrex_test.tsv --limit 500 --tasks {LOOKS}") for run in ENCODERS]
    found += [(run, f"evaluate.py RUN --tasks tatoeba {data('parallel/tatoeba_laser_v1')}") for run in ENCODERS]
    found += [(run, f"evaluate.py RUN --tasks sts,pairs,senteval,fewshot --sets stsb,sick,mrpc,cr,subj,sst2 {data('tasks')}") for run in ENCODERS]
    for run in ("mlm", "bepa"):
        found += [(run, f"finetune.py RUN --task xnli --limit 4000 --eval-limit 500 {data('tasks')}{' --untrained' * (run == 'mlm')}"),
                  (run, f"finetune.py RUN --task mlqa --limit 2000 --eval-limit 30 {data('qa')}")]
        found += [(run, f"finetune.py RUN --task {task} --limit 4000 {data('tasks')}{' --untrained' * (run == 'mlm')}") for task in ("mrpc", "stsb", "sst2", "rte")]
    for run in ("text-mlm", "text-hybrid"):
        found += [(run, f"evaluate.py RUN --tasks hybrid-probes --sets sst2,cola,mrpc,stsb,mnli {data('tasks')}"),
                  (run, f"evaluate.py RUN --tasks gap --sets sst2,mrpc,cola,stsb,mnli --limit 2000 {data('tasks')}")]
    test = files / "llm" / "synth_test.jsonl.xz"
    found += [(run, f"evaluate.py RUN --data {test} --limit 2000 --tasks generate,regex,linear") for run in RUNS if run.startswith("synth")]
    return found


def measure(job, files):
    """Run one command -> its record, appended to RECORDS; paths are written as FILES and RUN."""
    run, words = job
    shown, begun = words.replace(str(files), "FILES").replace("RUN", f"out/papers/{run}"), time.time()
    if any(record["command"] == f"python {shown}" for record in records()):
        return
    done = subprocess.run([sys.executable, *words.replace("RUN", f"out/papers/{run}").split(), "--json"], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        print(f"{shown}\n{done.stderr[-2000:]}", file=sys.stderr)
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    results = {name: round(value, 4) for name, value in json.loads(done.stdout).items()}
    with open(RECORDS, "a", encoding="utf-8") as file:
        file.write(json.dumps(dict(run=run, command=f"python {shown}", commit=commit, seconds=round(time.time() - begun), results=results)) + "\n")


def records():
    return [json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines()] if RECORDS.exists() else []


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "measure", "report"])
    parser.add_argument("--files", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--runs", default=",".join(RUNS))
    options = parser.parse_args()
    options.runs = options.runs.split(",")
    if options.what == "report":
        report()
        sys.exit()
    multilingual(options.files)
    parallel(options.files)
    with ThreadPoolExecutor(options.jobs) as pool:
        if options.what == "train":
            list(pool.map(lambda run: train(run, options.files), options.runs))
        else:
            list(pool.map(lambda job: measure(job, options.files), [job for job in measures(options.files) if job[0] in options.runs]))
