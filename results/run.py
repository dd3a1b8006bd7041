"""Run the experiments that experiments.json describes, and record them in records.jsonl.xz.

Runs are in out/results, one thread each, one after another. An interrupted run resumes.

In a command of experiments.json, RUN is the run's folder, SEED its seed, FILES is the folder of
--files, and MATCH[row] is the number of steps with the same compute as the run `row`. A job
{"prints": COMMAND} has no run folder: COMMAND prints its numbers as one JSON object.
"""

import json
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from base.common import BadInput, Parser
from harness import runs

from .compare import EXPERIMENTS, ROOT, keep_records, read_records
from .flops import matching_steps, step_flops

OUT = Path("out/results")


class Job(NamedTuple):
    label: str  # the row of the experiment's table
    seed: int
    folder: Path
    train: str  # the command that makes the run
    # The commands that measure it, joined by " && "; "NAME: " puts NAME/ before metrics. Empty if
    # the first command prints the numbers.
    tests: str


def folder_of(name, label, seed):
    """Return the run folder of a row of an experiment."""
    return OUT / re.sub(r"[^\w.-]+", "-", f"{name}-{label}-{seed}")


def jobs_of(name, seeds=None):
    """Return the jobs of an experiment, seed by seed."""
    experiment = EXPERIMENTS[name]
    given = {label: {"train": job} if isinstance(job, str) else job
             for label, job in experiment["jobs"].items()}
    wanted = {label: job.get("seeds", seeds or experiment["seeds"]) for label, job in given.items()}
    jobs = []
    for seed in seeds or dict.fromkeys(sum(wanted.values(), [])):
        for label, job in given.items():
            if seed not in wanted[label]:
                continue  # a row with other seeds than most
            if "prints" in job:
                jobs.append(Job(label, seed, None, f"python {job['prints']} --seed {seed}", ""))
                continue
            folder = folder_of(name, label, seed)
            flags = f"{job.get('train')} {experiment['flags']} --seed {seed} --out RUN"
            train = job.get("command", f"train.py {flags.strip()}")
            tests = job.get("tests", experiment.get("tests", ["evaluate.py RUN"]))
            train = train.replace("SEED", str(seed))
            train, *tests = [re.sub(r"^(\w+: )?", r"\1python ", one).replace("RUN", str(folder))
                             for one in [train, *tests]]
            jobs.append(Job(label, seed, folder, train, " && ".join(tests)))
    return jobs


def call(command, files):
    """Run a command with one thread and return its stdout. Raises BadInput if it fails."""
    words = command.replace("FILES", str(files)).split()
    child = subprocess.Popen([sys.executable, *words[1:]], cwd=ROOT, text=True,
                             stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        printed, _ = child.communicate()
    except KeyboardInterrupt as stop:
        # It saves its last step. Ctrl-C in a terminal reaches it without us, and kill does not.
        child.send_signal(stop.args[0] if stop.args else signal.SIGINT)
        child.communicate()
        raise
    if child.returncode:
        raise BadInput(f"{command} ended with status {child.returncode}")
    return printed


def with_steps(job, jobs, files):
    """Return the training command of a job, with the number of steps instead of MATCH[row]."""
    match = re.search(r"MATCH\[(.*?)\]", job.train)
    if not match:
        return job.train
    other, = [one.train for one in jobs if (one.label, one.seed) == (match[1], job.seed)]
    theirs, ours = [command.replace("FILES", str(files)).split()[2:]
                    for command in (other, job.train.replace(match[0], "1"))]
    flops, steps = step_flops(theirs)
    return job.train.replace(match[0], str(matching_steps(flops * steps, ours)))


def read_commit():
    """Return the commit of this checkout, with "-dirty" if files other than the records differ."""
    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout

    differ = git("status", "--porcelain", "--untracked-files=no", ".",
                 ":!results/records.jsonl.xz")
    return git("rev-parse", "--short", "HEAD").strip() + ("-dirty" if differ else "")


def record_of(job, train, scores):
    """Return the record of a run that has been trained and measured. "last" has the terms of the
    last logged step and the last losses on the held-out rows."""
    first, *lines = runs.read_log(ROOT / job.folder)
    last, validation = {}, {}
    for line in lines:
        if "loss" in line:
            last = line
        if "eval" in line:
            validation = {name: one for name, one in line["eval"].items()
                          if name.startswith("validation/")}
    record = {"label": job.label, "seed": job.seed, "train": train, "test": job.tests,
              "commit": read_commit(), "steps": last.get("step")}
    record |= {key: first.get(key) for key in ("torch", "python", "device", "parameters",
                                               "precision")}
    record |= {key: last.get(key) for key in ("tokens", "seconds")}
    return record | {"last": last | validation, "eval": scores}


def execute(name, job, files):
    """Train and measure one job and record it."""
    if not job.tests:
        return keep_records([{
            "experiment": name, "label": job.label, "seed": job.seed, "train": job.train,
            "commit": read_commit(), "torch": torch.__version__,
            "python": platform.python_version(), "eval": json.loads(call(job.train, files))}])
    for folder, command in EXPERIMENTS[name].get("setup", {}).items():
        if not (ROOT / folder).exists():  # a pretrained model that the runs start from
            call(command, files)
    train = with_steps(job, jobs_of(name, [job.seed]), files)
    # A finished training is only evaluated; an import would refuse the folder.
    if "train.py" in train or not (ROOT / job.folder).exists():
        call(train, files)
    scores = {}
    for test in job.tests.split(" && "):
        prefix, _, command = test.rpartition(": ")
        for metric, number in json.loads(call(f"{command} --json", files)).items():
            scores[f"{prefix}/{metric}".lstrip("/")] = number
    keep_records([{"experiment": name, **record_of(job, train, scores)}])


def seeds(text):
    return [int(word) for word in text.split(",")]


def run_command(name, words):
    """Run the jobs of an experiment that are not recorded."""
    experiment = EXPERIMENTS[name]
    parser = Parser(f"python -m results {name}", experiment["about"])
    parser.add_argument("--files", type=Path, metavar="FOLDER", help=experiment.get("files"))
    parser.add_argument("--seeds", type=seeds, help="such as 0,1 [those of the experiment]")
    parser.add_argument("--again", action="store_true", help="also run what is recorded")
    options = parser.parse_args(words)
    recorded = {(one["label"], one["seed"]) for one in read_records(name)}
    jobs = [job for job in jobs_of(name, options.seeds)
            if options.again or (job.label, job.seed) not in recorded]
    if jobs and "files" in experiment and not (options.files and options.files.is_dir()):
        given = "--files is not given" if options.files is None else f"{options.files} is no folder"
        raise BadInput(f"{given}: give the folder with {experiment['files']}")
    for number, job in enumerate(jobs, 1):
        print(f"run {number} of {len(jobs)}: {job.label}, seed {job.seed}", file=sys.stderr)
        execute(name, job, options.files.absolute() if options.files else None)
    print(f"python -m results show {name}")
