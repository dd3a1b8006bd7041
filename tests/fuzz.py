"""A seeded attack on every program: bad flags, damaged folders, hostile files, kill -9.

    python tests/fuzz.py --cases 3000 --seed 0
    python tests/fuzz.py --kills 30     # of a training, and a third as many of three others

A case works on a copy of one tiny corpus, run, cache and model. It ends with status 0, its work
done, or with 2, one readable line and nothing changed.
"""

import argparse
import contextlib
import functools
import hashlib
import io
import multiprocessing
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
               "CUDA_VISIBLE_DEVICES": ""}
sys.path.insert(0, str(Path(__file__).parent.parent))
PROGRAMS = {name.split(".")[0]: import_module(name).main
            for name in ("train", "evaluate", "tasks.__main__", "interop.__main__")}
PROGRAMS["results"] = import_module("results.__main__").work
program = import_module("corpora.program")
torch = import_module("torch")  # after OMP_NUM_THREADS is set

MEMORY = (resource.RLIMIT_AS, (6 << 30, 6 << 30))  # bytes, of which libraries take one or two
SECONDS = 120  # that one case may take
FORK = multiprocessing.get_context("fork")
TINY = ("--objective contrastive --data pairs.tsv --vocab 300 --width 8 --layers 1 --heads 2 "
        "--ffn-dim 8 --batch 4 --max-length 16 --max-positions 32 --eval-limit 4 --device cpu")
TRAIN = f"train {TINY} --steps 1 --out new"
EXPORT = "interop export run new"
FINETUNE = "tasks finetune run --task mrpc --files sets --epochs 1 --batch 8 --max-length 16"
COMMANDS = (
    TRAIN.replace("new", "run"), TRAIN.replace("1 --out new", "2 --out run"), TRAIN, EXPORT,
    "train --objective contrastive --data pairs.tsv --init run --max-length 16 --batch 4 --steps 1",
    "evaluate run --json", "evaluate run --data pairs.tsv", "tasks run --tasks matrix,linear",
    "interop import model new", "interop encode run lines.txt --out v.npy", FINETUNE,
    "interop nearest run lines.txt --query dog", "results compare run run",
    f"results inspect {TINY}", f"results flops {TINY}")
# A checksum or a hash is kept of these.
SEALED = re.compile(r"run/(model|train)\.pt|(run|cache/.*)/tokenizer\.json|.*\.bin")
PLAIN = ("0 1 2 3 7 0.5 1e-3 en de,en pairs.tsv run lines.txt model sets new mean cls yes all test "
         "linear constant small learned pre info_nce none scheduled retrieval").split()
ODD = ["", "-1", "1e999", "nan", "9" * 12, "9" * 30, "a,,b", "--", "nothing/at/all", "\ud800", "\n",
       "\x1b[2J\u202e", "x" * 900, '"', '"é', "\r", "\t", "\x85\u2028", "\ufeff", '{"a": 1}', "en"]
JSON = b'null -1 0 999999999999 1e999 NaN true "" "\\u001b\\ud800" "\\u0000" [] {} [[1]]'.split()


def digests(kept=""):
    paths = [one for one in Path().rglob("*") if one.is_file() and one.name != ".lock"]
    return {str(one): hashlib.sha256(one.read_bytes()).hexdigest() for one in paths
            if one.parts[0] != "cache" and re.match(kept, str(one))}


def made():
    """The digests of what a program makes, the same each time."""
    return digests(r".*/(model\.|eval|finetune)|v\.npy")


@contextlib.contextmanager
def copy_of(base):
    folder = Path(tempfile.mkdtemp(dir=base.parent)) / "case"
    shutil.copytree(base, folder)
    os.chdir(folder)
    yield
    os.chdir(base)
    shutil.rmtree(folder.parent)


def call(words):
    """-> status, or the traceback of a bug; what was printed to stdout, to stderr."""
    streams = [io.StringIO(), io.StringIO()]
    try:
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            status = program.exit_status(PROGRAMS[words[0]], words[1:])
    except SystemExit as end:  # --help
        status = end.code or 0
    except Exception:
        status = traceback.format_exc()[-900:]
    return status, *(stream.getvalue() for stream in streams)


# ---- attacks on the folder that it is in -> the path that was damaged, the words of a command


@functools.cache
def flags_of(words):
    said = [call([*words.split(), flag])[1] for flag in ("--help", "--help-all")]
    return sorted({*re.findall(r"--[a-z][a-z-]+", "".join(said))} - {"--help", "--compile"})


def bad_flags(rng):
    words = rng.choice(COMMANDS)
    if "--vocab" in words:
        words += " --objective " + rng.choice(list(import_module("train").OBJECTIVES))
    flags = rng.choices([*flags_of(words), "--x"], k=rng.randint(1, 3))
    words = words.split()
    for flag in flags:
        value = rng.choice(rng.choice([PLAIN, ODD]))
        if flag in ("--steps", "--epochs", "--rows"):  # so many would be done
            value = value[:3]
        words += [flag, value][:rng.choice([1, 2, 2, 2])]
    return "", words


def damage(rng):
    path = rng.choice(sorted(one for one in Path().rglob("[!.]*") if one.is_file()))
    content = path.read_bytes() or b"\n"
    cut = rng.randrange(len(content))
    flipped = content[:cut] + bytes([content[cut] ^ 1 << rng.randrange(8)]) + content[cut + 1:]
    ways = [content[:cut], flipped, flipped, flipped, content + content[:cut], bytes(len(content)),
            b"", b"PK\3\4", b"[" * 9999, Path("run/model.pt").read_bytes(),
            Path.touch, Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path.name)]
    if path.suffix == ".pt":
        ways += 3 * [lambda path: retyped(path, content, rng)]
    if "json" in path.suffix:
        values = list(re.finditer(rb'(?<=: )("[^"]*"|[^]\[{},"\s]+)', content))
        for value in rng.choices(values, k=9):
            ways.append(content[:value.start()] + rng.choice(JSON) + content[value.end():])
    way = rng.choice(ways)
    path.unlink()
    if isinstance(way, bytes):
        path.write_bytes(way)
    else:
        way(path)
    place = path.parts[0].replace("cache", "pairs.tsv")
    return str(path), rng.choice([one for one in COMMANDS if place in one.split()]).split()


def retyped(path, content, rng):
    """A whole file of torch's, in which one thing is of another type."""
    whole = torch.load(io.BytesIO(content), weights_only=True)
    part = whole
    while True:
        names = list(part) if isinstance(part, dict) else range(len(part))
        name = rng.choice(names)
        if not isinstance(part[name], (dict, list)) or not part[name] or rng.randrange(4) == 0:
            break
        part = part[name]
    part[name] = rng.choice([None, "7", [], {}, torch.zeros(2, 3), torch.tensor(3).bool()])
    torch.save(whole, path)


def hostile_data(rng):
    rows = [f"A dog {i}.\tEin Hund {i}." for i in range(rng.choice([0, 3, 30]))]
    for _ in range(rng.choice([1, 9])):
        rows.append("\t".join(
            rng.choices([*ODD, "\x00", "A dog."], k=rng.choice([1, 2, 2, 3]))))
    text = rng.choice(["\n", "\r\n", "\r"]).join(["en\tde"] * rng.randrange(2) + rows)
    codec = rng.choice(["utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "cp1252"])
    for name in ("pairs.tsv", "lines.txt", "sets/mrpc_train.tsv"):
        Path(name).write_bytes(text.encode(codec, "replace"))
    other = rng.choice(["a.csv", "a.jsonl", "a.txt", "a.tsv.gz", "a.tsv", "a.de,a.en"])
    Path("pairs.tsv").rename(other)
    return "", rng.choice(COMMANDS).replace("pairs.tsv", other).split()


# ---- what must hold


def check(number, seed, base):
    """-> the status of a case; what is wrong with it, or ""."""
    rng = random.Random(f"{seed} {number}")
    with copy_of(base):
        path, words = rng.choice([bad_flags, bad_flags, damage, damage, damage, hostile_data])(rng)
        before = digests()
        status, *said = call(words)
        wrong = judge(status, *said, before)
        found = made()
    if status == 0 and SEALED.fullmatch(path):
        with copy_of(base):
            call(words)
            gold = made()
        if any(found.get(name) != gold[name] for name in gold if name != path):
            wrong = "another result than without the damage"
    return status, wrong and f"case {number}: {path} {' '.join(words)!a:.900}\n  {wrong}"


def judge(status, said, complaints, before):
    lines = complaints.split("\n")
    errors = [line for line in lines if line.startswith("error: ")]
    if status not in (0, 2) or len(errors) != (status == 2) or errors not in ([], lines[-2:-1]):
        return f"status {status}: {complaints[-300:]!a}"
    if len("".join(errors)) > 3000:
        return f"unreadable: {said[-300:]!a} {complaints[-300:]!a}"
    after = digests()
    changed = [name for name in before if after.get(name) != before[name]]
    # A run is what a program that succeeds may change.
    changed = [name for name in changed if status or not name.startswith("run/")]
    changed += map(str, Path().rglob("*.part"))
    if changed:
        return f"status {status}, and changed {changed}"
    return "" if status or said or after != before else "nothing was done"


def campaign(cases, seed, first, base):
    """-> the number of failures."""
    pool = None
    count = Counter()
    for number in range(first, first + cases):
        pool = pool or ProcessPoolExecutor(1, FORK, resource.setrlimit, MEMORY)
        try:
            status, wrong = pool.submit(check, number, seed, base).result(SECONDS)
        except Exception as error:  # it died, or takes too long
            wrong = f"case {number}: {error!r}"
            for process in multiprocessing.active_children():
                process.kill()
            pool = None
        count["failed" if wrong else status] += 1
        if wrong:
            print(wrong, flush=True)
    print(f"{cases} cases: {count[0]} done, {count[2]} refused, {count['failed']} failed")
    return count["failed"]


def kill(words, times, base, rng):
    """Kill a program at random moments, start it again -> how often another result came of it."""
    words = words.split()
    begun = time.perf_counter()
    with copy_of(base):
        assert call(words)[0] == 0
        gold = made()
    longest = time.perf_counter() - begun
    count = Counter()
    while count["kills"] < times:
        status = -9
        with copy_of(base):
            while status < 0:
                process = FORK.Process(target=lambda: sys.exit(call(words)[0]))
                process.start()
                process.join(rng.uniform(0, longest) if count["kills"] < times else None)
                count["kills"] += process.is_alive()
                process.kill()
                process.join()
                status = process.exitcode
            count["wrong"] += status != 0 or made() != gold or any(Path().rglob("*.part"))
    print(f"{count['kills']} kills, {count['wrong']} failed: {' '.join(words)}", flush=True)
    return count["wrong"]


def prepare(base, rows):
    """The corpus, the run, the model and the set of all cases."""
    (base / "sets").mkdir(parents=True)
    os.chdir(base)
    pairs = [f"A dog {i} runs.\tEin Hund {i} rennt.\n" for i in range(rows)]
    Path("pairs.tsv").write_text("".join(["en\tde\n", *pairs]), encoding="utf-8")
    Path("lines.txt").write_text("A dog.\nEin Hund, ü.\n\n", encoding="utf-8")
    pairs = [f"{i % 2}\tA dog {i}.\tA cat {i % 3}.\n" for i in range(16)]
    for name in ("sets/mrpc_train.tsv", "sets/mrpc_val.tsv", "sets/mrpc_test.tsv"):
        text = "".join(["label\tsentence1\tsentence2\n", *pairs])
        Path(name).write_text(text, encoding="utf-8")
    for words in (COMMANDS[0], EXPORT.replace("new", "model")):
        assert call(words.split())[0] == 0, call(words.split())


def main():
    parser = argparse.ArgumentParser()
    for name, value in {"cases": 300, "seed": 0, "first": 0, "kills": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        prepare(base, 3000 if options.kills else 60)
        if not options.kills:
            return campaign(options.cases, options.seed, options.first, base)
        rng = random.Random(options.seed)
        return sum(kill(words, max(1, options.kills // part), base, rng) for words, part in [
            (f"{TRAIN} --steps 30 --save-every 1", 1), (EXPORT, 3), (FINETUNE, 3),
            (f"{TRAIN} --cache fresh", 3)])


if __name__ == "__main__":
    sys.exit(main() > 0)
