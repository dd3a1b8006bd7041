"""All that a GPU must show, in one command of at most 25 minutes: tests, the benchmark against its
peers, tuning of the tiles, short real runs.

    python -m results gpu                        # writes results/gpu
    python -m results gpu --only tiles,steps     # some parts anew; the records of others stay

Each part is a process of its own with a time limit, and what it has written stays when it fails.
Without a GPU the parts run at toy size, our kernels in Triton's interpreter, into out/gpu: that
shows that they run, and no more.
"""

import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

from corpora.folder import write_atomic
from corpora.program import BadInput, Parser, comma_list

from . import bench
from .compare import ROOT, markdown

# Seconds that a part may take on a GPU, in all less than 25 minutes; without one LONGEST.
LONGEST = 600
LIMITS = {"tests": 300, "tiles": 30, "attention": 420, "steps": 180, "vocabulary": 60,
          "syncs": 60, "tuning": 210, "mexma": 90, "llm-jepa": 90}
# What is tested: all that needs a GPU or, in the interpreter, a few cases of the kernels.
TESTS = ["-m", "gpu"] if bench.GPU else ["-k", "sixteen_bits_agree and 32"]

FLEX = "FlexAttention"
FORWARD = "Attention forward: "
BOTH = "Attention and backward: "
RATIO = "times ours"
# Of one H200 in bfloat16: name, what, start of a table's title, start of a row's name (of several
# rows the best counts), column, comparison, number.
TARGETS = [
    ("A1", "FlexAttention over ours", FORWARD + "MEXMA", FLEX, RATIO, ">=", 1.3),
    ("A2", "the same with the backward", BOTH + "MEXMA", FLEX, RATIO, ">=", 2.0),
    ("A3", "torch varlen over ours", FORWARD + "MEXMA", "torch varlen", RATIO, ">=", 1.3),
    ("A3", "the same with the backward", BOTH + "MEXMA", "torch varlen", RATIO, ">=", 1.5),
    ("A4", "FlexAttention over ours, pairs", BOTH + "BERT-JEPA", FLEX, RATIO, ">=", 1.15),
    ("A5", "the same, NL-RX", BOTH + "LLM-JEPA NL-RX", FLEX, RATIO, ">=", 1.3),
    ("A5", "the same, GSM8K", BOTH + "LLM-JEPA GSM8K", FLEX, RATIO, ">=", 1.3),
    ("A6", "the same, documents, forward", FORWARD + "causal documents, 2048", FLEX, RATIO, ">=",
     0.95),
    ("A6", "the same with the backward", BOTH + "causal documents, 2048", FLEX, RATIO, ">=", 0.95),
    ("A7", "the best peer over ours", FORWARD + "one causal document", "", RATIO, ">=", 0.55),
    ("A8", "plan of a batch, ms of the host", "Tiles", "MEXMA", "plan, ms", "<=", 0.3),
    ("A9", "GPU tests that fail, equal bits among them", "Tests", "", "failed", "<=", 0),
    ("B1", "four packed encodes over ours", "MEXMA step", "four packed", RATIO, ">=", 1.4),
    ("B2", "four padded encodes over ours", "MEXMA step", "four padded", RATIO, ">=", 3.0),
    ("B3", "vocabulary loss, GB at its peak", "Vocabulary loss", "ours", "peak GB", "<=", 3.1),
    ("B4", "three padded rows over one-forward", "LLM-JEPA step, NL-RX, 16", "three rows", RATIO,
     ">=", 8.0),
    ("B4", "the same, Spider", "LLM-JEPA step, Spider", "three rows", RATIO, ">=", 6.0),
    ("B4", "the same, GSM8K", "LLM-JEPA step, GSM8K", "three rows", RATIO, ">=", 4.0),
    ("B5", "two-row over one-forward", "LLM-JEPA step, NL-RX, 256", "ours: two-row", RATIO, ">=",
     1.25),
    ("B6", "next-token prediction alone over one-forward", "LLM-JEPA step, NL-RX, 256",
     "ours: next-token", RATIO, ">=", 0.67),
    ("D1", "vocabulary loss, ms", "Vocabulary loss", "ours", "ms", "<=", 12.3),
    *[("D3", f"waits of a step of {name}", "Host", name, "waits", "<=", 0)
      for name in bench.OBJECTIVES],
]


def tests():
    done = subprocess.run([sys.executable, "-m", "pytest", *TESTS], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE)
    last = done.stdout.strip().splitlines()[-1]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed)", last)}
    wrong = re.findall(r"^FAILED (.*)", done.stdout, re.M)
    table = {"all": {"passed": 0, "failed": 0} | counts}
    yield {"Tests": table | {name[:100]: {"failed": 1} for name in wrong}}


PARTS = {"tests": tests, **bench.PARTS}


def do(part, out):
    """One part, in this process; a table is written as soon as it is known."""
    torch.set_num_threads(1)
    record = {"device": torch.cuda.get_device_name() if bench.GPU else
              f"{platform.machine()} CPU, one thread", "torch": torch.__version__, "tables": {}}
    for tables in PARTS[part]():
        record["tables"] |= tables
        write_atomic(out / f"{part}.json", (json.dumps(record, indent=1) + "\n").encode())


def attempt(part, out, limit):
    """One part in a process of its own -> how it ended."""
    words = [sys.executable, "-m", "results", "gpu", "--out", str(out), "--here", part]
    variables = dict(os.environ)
    if not bench.GPU:
        variables |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(words, cwd=ROOT, env=variables, timeout=limit, text=True,
                              stderr=subprocess.PIPE)
    except subprocess.TimeoutExpired:
        return f"stopped after {limit} s"
    lines = done.stderr.strip().splitlines() or [""]
    return f"failed: {lines[-1][:200]}" if done.returncode else "done"


def all_tables(records):
    tables = {}
    for record in records.values():
        tables |= record["tables"]
    return tables


def measured(tables, title, row, column):
    """The number of the best row, or None."""
    found = []
    for name, rows in tables.items():
        for label, cells in rows.items():
            is_peer = row or not label.startswith("ours")
            if name.startswith(title) and label.startswith(row) and is_peer and column in cells:
                found.append(cells[column])
    return min(found, default=None)


def verdicts(tables, is_gpu):
    """Rows of the table of targets; without a GPU all but the host's is not measured yet."""
    rows = []
    for name, what, title, row, column, comparison, number in TARGETS:
        value = measured(tables, title, row, column) if is_gpu or name == "A8" else None
        verdict = "not measured yet"
        if value is not None:
            met = value >= number if comparison == ">=" else value <= number
            verdict = f"{value}, {'met' if met else 'SHORT'}"
        rows.append([name, f"{what} ({title})", f"{comparison} {number}", verdict])
    return rows


def page(records, states, is_gpu):
    """{part: record}, {part: how it ended} -> Markdown."""
    lines = ["# What a GPU must show", "", "`python -m results gpu`; interleaved rounds, medians."]
    if not is_gpu:
        lines += ["", "No GPU has run this yet. The tables are of toy size, and those of attention "
                  "and tuning are of Triton's interpreter: they show that the parts run."]
    tables = all_tables(records)
    devices = {f"{record['device']}, torch {record['torch']}" for record in records.values()}
    ended = [f"{part} {state}" for part, state in states.items()]
    lines += ["", f"{'; '.join(sorted(devices))}. Parts: {', '.join(ended)}.", "",
              "## Targets for one H200, bfloat16", "",
              *markdown(["", "what", "target", "measured"], verdicts(tables, is_gpu)), ""]
    for title, rows in tables.items():
        lines += [f"## {title}", "", *bench.table_of(rows), ""]
    return "\n".join(lines)


def main(arguments):
    parser = Parser("python -m results gpu", __doc__)
    parser.add_argument("--only", type=comma_list, help=f"of {', '.join(PARTS)} [all]")
    parser.add_argument("--out", type=Path, default=Path("results/gpu" if bench.GPU else "out/gpu"),
                        metavar="FOLDER")
    parser.add_argument("--here", choices=PARTS, help="one part, in this process")
    options = parser.parse_args(arguments)
    for part in options.only or ():
        if part not in PARTS:
            raise BadInput(f"part {part!r} is unknown: choose from {', '.join(PARTS)}")
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if options.here:
        return do(options.here, out)
    states = {}
    for part in options.only or PARTS:
        begun = time.perf_counter()
        (out / f"{part}.json").unlink(missing_ok=True)  # not an older one's, if this fails
        states[part] = attempt(part, out, LIMITS[part] if bench.GPU else LONGEST)
        print(f"{part}: {states[part]}, {time.perf_counter() - begun:.0f} s", file=sys.stderr)
    records = {part: json.loads((out / f"{part}.json").read_text(encoding="utf-8"))
               for part in PARTS if (out / f"{part}.json").exists()}
    write_atomic(out / "README.md", page(records, states, bench.GPU).encode())
    print(f"{out / 'README.md'} is written; what falls short:")
    for row in verdicts(all_tables(records), bench.GPU):
        if "SHORT" in row[-1]:
            print("  " + " ".join(row))
    return int(any(state != "done" for state in states.values()))
