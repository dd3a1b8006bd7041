"""The one runner of the recorded experiments, which experiments.json describes.

    python -m results collapse                         # train, evaluate, write results/collapse.md
    python -m results nlrx --files FOLDER --jobs 2 --seeds 82,23
    python -m results collapse report                  # only write the page again

Every job adds a line to results/NAME.jsonl, of which the page is made. What is recorded with the
same commands is not done again, and what was stopped resumes; runs are in out/results.
"""
# In commands RUN is the run's folder, FILES that of --files, MATCH the steps with the compute of
# the row `equal` above. With test_controls a job's tests lose their --no-controls.

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from tqdm import tqdm

import evaluate
from corpora.folder import alone, write_atomic
from corpora.program import BadInput, Parser, comma_list

from .compare import COLUMNS, mixed_precisions, paired_lines, table_lines
from .flops import match, run_flops, step_flops
from .tables import DATA, ROOT

OUT = Path("out/results")
RECORDS = ROOT / "results"
ALL = DATA["experiments"]
BUSY = defaultdict(Lock)  # {a run that several jobs start from: its lock}

# ---- doing a job


class Job(NamedTuple):
    label: str  # its row of the table
    seed: int
    folder: Path
    train: str  # the command that makes the run, as it is recorded
    # The commands that measure it, joined by " && "; each prints JSON. "NAME: " before a command
    # makes its numbers NAME/task/metric.
    tests: str
    equal: str | None  # the training whose compute MATCH stands for


def jobs_of(name, seeds=None):
    """Jobs of an experiment, seed by seed."""
    experiment = ALL[name]
    made = []
    for seed in seeds or experiment.get("seeds", [0, 1, 2]):
        trained = {}
        for job in experiment["jobs"]:
            # What no seed changes is done once.
            if seed not in job.get("seeds", [seed]):
                continue
            slug = job["label"].replace("+ ", "").replace(", equal", "").replace(", ", "-")
            folder = OUT / f"{job.get('run', f'{name}-{slug}')}-{seed}".replace(" ", "-")
            flags = f"{job.get('train')} {experiment.get('flags', '')}".strip()
            train = job.get("command", f"train.py {flags} --seed {seed} --out RUN")
            tests = job.get("tests") or experiment.get("tests") or ["evaluate.py RUN"]
            tests = " && ".join(re.sub(r"^(\w+: )?", r"\1python ", words) for words in tests)
            if "test_controls" in job:
                tests = tests.replace(" --no-controls", "")
            commands = [text.replace("RUN", str(folder)) for text in (f"python {train}", tests)]
            trained[job["label"]] = commands[0]
            equal = trained[job["equal"]] if "equal" in job else None
            made.append(Job(job["label"], seed, folder, *commands, equal))
    return made


def call(command, files, log):
    """Run a command with one thread -> its stdout; a log keeps all. BadInput if it fails."""
    words = command.replace("FILES", str(files)).split()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(log, "a", encoding="utf-8") as said:
        done = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, env=environment, text=True,
                              stdout=subprocess.PIPE, stderr=said)
        said.write(done.stdout)
    if done.returncode:
        raise BadInput(f"{command} ended with status {done.returncode}: {log} says why")
    return done.stdout


def flags_of(train, files):
    """The words that follow python train.py in a command."""
    return train.replace("FILES", str(files)).split()[2:]


def make(job, files, log):
    """Finish a job's run, and first make the imported one that it starts from."""
    train = job.train
    start = re.search(r"--init (\S+-(\d+))", train)
    if start:
        others = itertools.chain(*[jobs_of(name, [int(start[2])]) for name in ALL])
        make(next(one for one in others if str(one.folder) == start[1]), files, log)
    if job.equal:
        flops, steps = step_flops(flags_of(job.equal, files))
        matched, _ = match(flops * steps, flags_of(train.replace("MATCH", "1"), files))
        train = train.replace("MATCH", str(matched))
    with BUSY[job.folder]:
        # A finished training ends at once, an import would refuse.
        if "train.py" in train or not (ROOT / job.folder).exists():
            call(train, files, log)


def execute(job, files):
    """Train and measure one job -> its record."""
    log = ROOT / f"{job.folder}.txt"
    make(job, files, log)
    begun = time.perf_counter()
    scores = {}
    for test in job.tests.split(" && "):
        rows, _, command = test.rpartition(": ")
        for name, number in json.loads(call(f"{command} --json", files, log)).items():
            scores[f"{rows}/{name}".lstrip("/")] = number
    lines = evaluate.read_log(ROOT / job.folder)
    last = ([line for line in lines if "loss" in line] or [{}])[-1]
    # The terms of the loss on the rows held out, as the last evaluation found them.
    ended = ([line["eval"] for line in lines if "eval" in line] or [{}])[-1]
    last = last | {name: one for name, one in ended.items() if name.startswith("validation/")}
    # What has a column, losses on the rows held out and a learned lambda, along training.
    kept = {"lambda", "validation/loss", "validation/mlm", *COLUMNS.values()}
    kept -= {"seconds", "steps"}
    curve = {}
    for line in lines[1:]:
        points = {name: one for name, one in line.get("eval", line).items() if name in kept}
        if points:
            curve[line["step"]] = curve.get(line["step"], {}) | points
    commit = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude", "*"], cwd=ROOT,
                            capture_output=True, text=True)
    record = {"label": job.label, "seed": job.seed, "train": job.train, "test": job.tests,
              "commit": commit.stdout.strip()}
    record |= {key: lines[0].get(key) for key in ("torch", "python", "device", "parameters")}
    # Older logs have no precision.
    record["precision"] = lines[0].get("precision", "float32")
    record |= {key: last.get(key) for key in ("tokens", "seconds")}
    record |= {"steps": last.get("step"), "test_seconds": round(time.perf_counter() - begun)}
    if "train.py" in job.train:
        record["flops"] = run_flops(ROOT / job.folder)
    if "geometry/rankme" in scores:
        record["health"] = evaluate.diagnose(scores, lines[0].get("views", 2))
    return record | {"last": last, "curve": curve, "eval": scores}


# ---- records and the page


def read_records(name):
    """An experiment's records, in the order of its jobs."""
    path = RECORDS / f"{name}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    order = [job["label"] for job in ALL[name]["jobs"]]
    return sorted(map(json.loads, lines), key=lambda one: order.index(one["label"]))


def keep_record(name, record):
    """Add a record to an experiment's, in place of an older one of the same row and seed; another
    runner beside this one waits meanwhile, so that neither loses what the other wrote."""
    key = (record["label"], record["seed"])
    with alone(RECORDS):
        kept = [one for one in read_records(name) if (one["label"], one["seed"]) != key]
        lines = [json.dumps(one) + "\n" for one in [*kept, record]]
        write_atomic(RECORDS / f"{name}.jsonl", "".join(lines).encode())


def experiment_page(name, records):
    """The Markdown of an experiment out of its records."""
    experiment = ALL[name]
    seeds = dict.fromkeys(record["seed"] for record in records)
    files = " --files FOLDER" if "files" in experiment else ""
    lines = [f"# {name}", "", experiment["about"], "",
             f"`python -m results {name}{files}`: mean ± standard deviation over seeds "
             f"{str(list(seeds))[1:-1]}; one thread a run, on a machine that others used.", ""]
    if "unigram" in experiment:
        data = re.search(r"--data (\S+)", experiment["flags"])[1]
        command = f"python -m tasks RUN --data {data} --split all --limit 0 --tasks frequencies"
        lines += ["Who knows how frequent words are and nothing else has "
                  f"{experiment['unigram']} nats of masked words (`{command}`).", ""]
    # Only training has a precision; of rows that are named after theirs it need not be said.
    precisions = {f"{one['label']}, seed {one['seed']}": one.get("precision", "float32")
                  for one in records if "train.py" in one["train"]}
    mixed = mixed_precisions({row: precision for row, precision in precisions.items()
                              if precision not in row})
    if mixed:
        lines += [*mixed, ""]
    whole = {"notes": experiment.get("notes")}
    tables = experiment.get("tables", (whole, DATA["errors"]))
    if isinstance(tables, str):  # those of another experiment
        tables = ALL[tables]["tables"]
    for table in tables:
        lines += table_lines(table, records)
    if "paired" in experiment and records:
        lines += paired_lines(experiment["paired"], records, experiment.get("controls", {}))[0]
    lines += ["## Runs of the first seed; commands as they were at that commit", ""]
    for one in records:
        if one["seed"] == records[0]["seed"]:
            lines.append(f"- {one['label']}: `{one['train']}`, then `{one['test']}`")
            for metric in experiment.get("curves", ["retrieval/xsim"]):
                points = one.get("curve", {}).items()
                shown = [f"{step}: {kept[metric]:.1f}" for step, kept in points if metric in kept]
                if shown:
                    lines.append(f"  - {metric} along training: {', '.join(shown)}")
            if one.get("health"):
                lines.append(f"  - {one['health']}")
    made = {f"{one['commit']}, torch {one['torch']}, {one['device']}, "
            f"{one.get('precision', 'float32')}" for one in records}
    return "\n".join([*lines, "", f"Commit {'; '.join(sorted(made))}."]) + "\n"


# ---- the command


def work_through(name, todo, files, side_by_side):
    """Do jobs, and keep a record of each. BadInput if some failed, when all others are done."""
    failed = []
    progress = tqdm(total=len(todo), disable=not sys.stderr.isatty())
    with ThreadPoolExecutor(side_by_side) as pool:
        for done in as_completed([pool.submit(execute, job, files) for job in todo]):
            progress.update()
            try:
                record = done.result()
            except BadInput as error:
                failed.append(str(error))
                continue
            keep_record(name, record)
    progress.close()
    if failed:
        raise BadInput(f"{len(failed)} of {len(todo)} jobs failed; the first: {failed[0]}")


def main(name, arguments):
    """Do the jobs of an experiment that are not recorded, and write its page."""
    parser = Parser(f"python -m results {name}", f"{ALL[name]['about']}\n\n{__doc__}")
    parser.add_argument("what", nargs="?", choices=("do", "list", "report"), default="do",
                        help="do it, list what is to be done, or write the page [do]")
    parser.add_argument("--files", type=Path, metavar="FOLDER", help=ALL[name].get("files"))
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side [1]")
    parser.add_argument("--seeds", type=comma_list, help="in place of its own")
    options = parser.parse_args(arguments)
    if not all(seed.isdecimal() for seed in options.seeds or ()) or options.jobs < 1:
        raise BadInput(f"--seeds {options.seeds} --jobs {options.jobs}: numbers, at least one job")
    done = [(one["label"], one["seed"], one["train"], one["test"]) for one in read_records(name)]
    jobs = jobs_of(name, [int(seed) for seed in options.seeds or ()])
    todo = [job for job in jobs if (job.label, job.seed, job.train, job.tests) not in done]
    if options.what == "list":
        for job in todo:
            print(f"{job.train} && {job.tests}")
        return
    if options.what == "do" and todo:
        if "files" in ALL[name] and not (options.files and options.files.is_dir()):
            raise BadInput(f"--files {options.files}: give the folder of {ALL[name]['files']}")
        (ROOT / OUT).mkdir(parents=True, exist_ok=True)
        work_through(name, todo, options.files and options.files.resolve(), options.jobs)
    records = read_records(name)
    if not records:
        raise BadInput(f"results/{name}.jsonl has no records: run python -m results {name}")
    write_atomic(RECORDS / f"{name}.md", experiment_page(name, records).encode())
    print(f"results/{name}.md")
