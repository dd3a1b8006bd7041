"""The folder of a run: files that are whole or absent, its lock, its log, its numbers."""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import sys
from pathlib import Path

import torch

from corpora.program import BadInput

# Windows does not have it.
try:
    import fcntl
except ImportError:
    fcntl = None


def write_atomic(path, content):
    """Write bytes into a file, whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            # Otherwise a power cut can leave the new name on old or no content.
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def lock(folder):
    """Lock a folder, as two processes would write into each other's files -> the open file of the
    lock, which ends with the process, however that ends. BadInput if the folder is taken."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{folder} cannot be made ({error.strerror}): use another --out") from None
    # A link is not followed, and nothing is cut off: the folder may be somebody else's.
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    held = open(os.open(folder / ".lock", flags, 0o644), "r+", encoding="utf-8")
    if os.fstat(held.fileno()).st_nlink > 1:
        raise BadInput(f"{folder / '.lock'} is a second name of another file: delete it")
    if fcntl is None:
        return held
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if held.read() == str(os.getpid()):
            raise BadInput(f"this process trains in {folder} already: end that loop first (close "
                           "its iterator, or restart the kernel)") from None
        raise BadInput(f"another process trains in {folder}: wait for it, or use another "
                       "--out") from None
    held.truncate(0)
    held.write(str(os.getpid()))
    held.flush()
    return held


@contextlib.contextmanager
def alone(folder):
    """`with alone(folder):` waits until no other process is in such a block; it leaves no file."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def remove_leftovers(folder):
    """Delete what killed processes left half written in a folder. It stands within `alone(folder)`,
    where no process that lives is writing."""
    for left in folder.glob(".*.part") if fcntl else ():
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()


def read_log(folder):
    """The records of log.jsonl, [] if there is none."""
    path = Path(folder) / "log.jsonl"
    records = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        # A kill may cut the last line short.
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


def hub_hint(folder):
    """The end of a line about a folder that is not there: its name may be that of a hub's model."""
    *above, name = Path(folder).parts or [""]
    if len(above) > 1 or above and Path(above[0]).is_dir():
        return ""
    return f"; a model of the Hugging Face hub: python -m interop import {folder} out/{name}"


def read_first(folder):
    """The first line of a run's log, which has its "config". BadInput if there is none."""
    if not Path(folder).is_dir():
        raise BadInput(f"there is no folder {folder}{hub_hint(folder)}")
    first = next(iter(read_log(folder)), {})
    if "config" not in first:
        raise BadInput(f"there is no run in {folder}: its log.jsonl does not begin with a config; "
                       "give the whole folder that train.py, or python -m interop import, wrote")
    return first


def read_results(path):
    """The numbers that `write_results` wrote; {} if there is no such file, or another one."""
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError:
        return {}


def write_results(folder, name, results, label=""):
    """Add numbers to a file of a run, whole or not at all. Its first entries say what they are of,
    a hash of model.pt and the rows: numbers of another model or of other rows are replaced."""
    path = Path(folder) / name
    with alone(path.parent):
        before = read_results(path)
        model = hash_of_file(Path(folder) / "model.pt")[:8]
        if before and (before.get("model"), before.get("rows")) != (model, label):
            print(f"note: {path} held the numbers of {before.get('rows')}, of model "
                  f"{before.get('model')}: replaced", file=sys.stderr)
            before = {}
        text = json.dumps(before | {"model": model, "rows": label} | results, indent=1,
                          allow_nan=False)
        write_atomic(path, text.encode())


def differences(old, new, free, prefix=""):
    """The values of nested dictionaries that are not the same, a text each; names in `free` may
    differ."""
    found = []
    for name in sorted(set(old) | set(new), key=str):
        before = old.get(name, "absent")
        now = new.get(name, "absent")
        if isinstance(before, dict) and isinstance(now, dict):
            found += differences(before, now, free, f"{prefix}{name}.")
        elif before != now and name not in free:
            found.append(f"{prefix}{name} was {before}, is {now}"[:500])
    return found


def refuse_other_run(folder, saved, now, free, steps):
    """BadInput if a checkpoint is of a run with another identity, but for the names in `free`."""
    before = saved["config"]["objective"]
    asked = now["config"]["objective"]
    if before != asked:
        raise BadInput(f"{folder} holds a run of {before}, not of {asked}: use another --out, such "
                       f"as {folder}-2")
    changed = differences({name: saved[name] for name in now}, now, free)
    # Eight digits of a hash are enough to see that it is another one.
    changed = [re.sub(r"\b([0-9a-f]{8})[0-9a-f]{56}\b", r"\1", text) for text in changed]
    if saved["step"] > steps:
        changed.append(f"it is at step {saved['step']}, beyond --steps {steps}")
    if changed:
        raise BadInput(f"{folder} holds a run with other settings: {'; '.join(changed)}. "
                       f"Use another --out, such as {folder}-2, or take the change back")


def hash_of(weights):
    """The sha256 of {name: tensor}."""
    hasher = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        hasher.update(name.encode())
        hasher.update(weight.detach().cpu().flatten().view(torch.uint8).numpy())
    return hasher.hexdigest()


def hash_of_file(path):
    hasher = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            hasher.update(piece)
    return hasher.hexdigest()


def demand_finite(objective, step):
    """BadInput rather than a model.pt that nobody can use."""
    if not all(weight.isfinite().all() for weight in objective.parameters()):
        raise BadInput(f"step {step}: the weights are not finite and were not saved; begin anew in "
                       "another --out with a lower --lr")


def check_moments(saved, optimizer, path):
    """BadInput for moments of a file that are not as their parameters: fused AdamW trusts their
    shapes, and would write beyond their memory. (A group of Muon has ns_steps.)"""

    def outline(x):
        return f"{x.dtype} {tuple(x.shape)} {x.stride()} {x.layout}"

    trained = [(parameter, "ns_steps" in group) for group in optimizer.param_groups
               for parameter in group["params"]]
    for index, moments in saved.items():
        parameter, is_muon = trained[index]
        like = outline(parameter)
        wanted = {"step": outline(torch.zeros(())), "exp_avg": like, "exp_avg_sq": like}
        if is_muon:
            wanted = {"momentum_buffer": like}
        found = {name: outline(moment) for name, moment in moments.items()}
        if found != wanted:
            raise BadInput(f"{path}: moments {index} are {found}, of a parameter {like}: use "
                           "another --out")


class TrainingFolder:
    """A run's folder, of which one process at a time is the owner: its lock and its log."""

    def __init__(self, path):
        self.path = path
        self.held = None  # the lock, while the loop runs

    def take(self):
        """Become the owner. BadInput if somebody else is, or if the folder holds something else."""
        self.held = lock(self.path)
        self.refuse_others()
        # An export into this folder is waited for.
        with alone(self.path):
            remove_leftovers(self.path)

    def refuse_others(self):
        """BadInput for a folder with files and no train.pt: it may be anybody's."""
        for one in (self.path, *self.path.parents):
            if one.is_file():
                raise BadInput(f"{one} is a file: use another --out")
        if not self.path.exists() or (self.path / "train.pt").exists():
            return
        # What a run leaves that ended before its first checkpoint; it may be begun anew.
        begun = {"tokenizer.json", "log.jsonl", ".lock"}
        others = [one.name for one in self.path.iterdir() if not one.name.endswith(".part")]
        others = sorted(set(others) - begun)
        if others:
            raise BadInput(f"{self.path} holds {others[0]} and no train.pt to go on from: put that "
                           "back, or use another --out")

    def release(self):
        """Give up the lock, so that another run of this process may go on here."""
        if self.held:
            self.held.close()
            self.held = None

    def log(self, record):
        """Append an object to log.jsonl; what JSON cannot write (nan, inf) becomes a string."""
        record = json.loads(json.dumps(record), parse_constant=str)
        with open(self.path / "log.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def is_finished(self, step):
        """Was this last step evaluated, and are its files there? A kill may have come between."""
        evaluated = [one["step"] for one in read_log(self.path) if "eval" in one]
        files = [(self.path / name).exists() for name in ("model.pt", "eval.json")]
        return step in evaluated and all(files)

    def rewind(self, step, is_last):
        """Drop what was logged after a step: the run logs it again, with the same numbers."""
        kept = [one for one in read_log(self.path) if one.get("step", 0) <= step]
        if is_last and not self.is_finished(step):
            # The last evaluation is made again, if only because its file is not there.
            kept = [one for one in kept if "eval" not in one or one["step"] < step]
        lines = [json.dumps(record) + "\n" for record in kept]
        write_atomic(self.path / "log.jsonl", "".join(lines).encode())
