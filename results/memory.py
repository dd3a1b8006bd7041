"""Does memory grow with the data? Prepare and train on a small and a large generated file, and compare the peaks.

    python results/memory.py                       # 10 MB and 1 GB: about ten minutes and 2 GB of disk
    python results/memory.py --large 100           # a quick look

Peak memory is ru_maxrss of a fresh process: it counts the pages of the token store that were touched, too. Exits with 1 if a large
file costs more than 1.2 times the memory of the small one.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
LIMIT = 1.2


def write_table(path, megabytes):
    """A TSV of the toy corpus, again and again, each line with a running number in every language so that no two are alike."""
    import grammar
    rows, size = grammar.toy("train", 20_000), 0
    with open(path, "w", encoding="utf-8") as file:
        size += file.write("\t".join(grammar.LANGUAGES) + "\n")
        for number in itertools.count():
            line = "\t".join(f"{number} {text}" for text in rows[number % len(rows)].values()) + "\n"
            file.write(line)
            size += len(line.encode())
            if size >= megabytes * 1_000_000:
                return number + 1


def measure(words):
    """Run a program in a fresh process -> (peak resident memory in MB, seconds)."""
    start, environment = time.perf_counter(), os.environ | {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)  # the usage of this child alone; RUSAGE_CHILDREN is the maximum over all so far
    if status:
        sys.exit(f"{' '.join(words)} failed: {said[-500:]}")
    return used.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6, time.perf_counter() - start  # Linux counts in KiB


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=int, default=10, metavar="MB", help="size of the small file (default: 10)")
    parser.add_argument("--large", type=int, default=1000, metavar="MB", help="size of the large file (default: 1000)")
    parser.add_argument("--folder", help="where to put files and stores (default: a temporary folder)")
    options = parser.parse_args()
    peaks = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print(f"{'file':>8} {'rows':>12} {'step':>8} {'peak MB':>9} {'seconds':>9}")
        for megabytes in (options.small, options.large):
            path, cache = f"{folder}/{megabytes}.tsv", f"{folder}/cache"
            rows = subprocess.run([sys.executable, __file__, "--write", path, str(megabytes)], capture_output=True, text=True, check=True).stdout
            steps = {"prepare": ["data.py", "prepare", path, "--cache", cache],
                     "train": ["train.py", "--objective", "mlm", "--steps", "5", "--batch", "64", "--data", path, "--cache", cache,
                               "--out", f"{folder}/out-{megabytes}"]}
            for step, words in steps.items():
                peak, seconds = measure(words)
                peaks.setdefault(step, []).append(peak)
                print(f"{megabytes:>5} MB {int(rows):12,} {step:>8} {peak:9.1f} {seconds:9.1f}", flush=True)
    ratios = {step: large / small for step, (small, large) in peaks.items()}
    print(", ".join(f"{step}: {ratio:.3f} times the memory" for step, ratio in ratios.items()) + f" (at most {LIMIT})")
    return int(max(ratios.values()) > LIMIT)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:  # in a process of its own: a child's peak begins at the size of the process that forks it
        print(write_table(sys.argv[2], int(sys.argv[3])))
    else:
        sys.exit(main())
