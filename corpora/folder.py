"""The folder of a run, and who may write into it: its log, its lock, what killed writes left."""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import sys
import zlib
from pathlib import Path

from corpora.program import BadInput, printable

try:
    import fcntl
except ImportError:  # Windows does not have it.
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
            # Otherwise a power cut can leave the new name on old or no content
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def lock(folder):
    """One process a folder: two would write into each other's files. -> the open file of the
    lock, which ends with the process, however that ends. BadInput if another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    held = open(folder / ".lock", "w", encoding="utf-8")
    if fcntl:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"another process trains in {folder}: wait for it, or use another "
                           "--out") from None
    return held


@contextlib.contextmanager
def alone(folder):
    """`with alone(folder):` until nobody else is: one process after the other, without a file."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def remove_leftovers(folder, name="*"):
    """Delete what killed writes left in a folder, of all files or of one, within `alone(folder)`:
    what is written by a process that lives is none of them."""
    for left in folder.glob(f".{name}.part") if fcntl else ():
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()


def read_log(folder):
    """The records of log.jsonl, [] if there is none; a damaged one is left out."""
    path = Path(folder) / "log.jsonl"
    records = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError, RecursionError):  # a kill may cut the last line short
            records.append(json.loads(line))
    return [one for one in records if isinstance(one, dict) and type(one.get("step", 0)) is int]


# What is read of a run's config, which may lack some
CONFIG = {"data": str, "langs": str, "eval_data": str, "chat": str, "header": str,
          "skip_bad": bool, "max_length": int}


def sealed(first):
    """The first line of a log -> the same with its checksum, whether it had one or not."""
    content = {name: value for name, value in first.items() if name != "checksum"}
    return content | {"checksum": zlib.crc32(json.dumps(content).encode())}


def hub_hint(folder):
    """What else a folder that is not there may be: a model of a hub, OWNER/NAME or NAME."""
    *above, name = Path(folder).parts or [""]
    if len(above) > 1 or above and Path(above[0]).is_dir():
        return ""
    return f"; a model of the Hugging Face hub: python -m interop import {folder} out/{name}"


def read_first(folder):
    """The first line of a run's log, which has its "config". BadInput if there is none."""
    if not Path(folder).is_dir():
        raise BadInput(f"there is no folder {folder}{hub_hint(folder)}")
    first = next(iter(read_log(folder)), {})
    if "checksum" in first and sealed(first) != first:
        raise BadInput(f"{folder}: the first line of log.jsonl, the run's settings, is not as it "
                       "was written: put the file back")
    config = first.get("config")
    is_config = isinstance(config, dict) and "data" in config
    for name, kind in CONFIG.items():
        is_config = is_config and isinstance(config.get(name, kind()), kind)
    if not is_config:
        raise BadInput(f"{folder} is no run, its log.jsonl does not begin with a config: give the "
                       "whole folder that train.py, or python -m interop import, wrote")
    return first


def read_results(path):
    """What `write_results` wrote; {} if it is missing, damaged, or a pipe, which never ends."""
    path = Path(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        json.dumps(found, allow_nan=False)  # a ValueError: Python alone reads NaN
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def refuse_no_file(path):
    """BadInput for a folder or a pipe where results are to be written."""
    if path.exists() and not path.is_file():
        raise BadInput(f"{path} is no file: move it away")


def write_results(folder, name, results, label=""):
    """Add numbers to a file of a run, whole or not at all. Its first entries say what they are of,
    a hash of model.pt and the rows: numbers of another model or of other rows are replaced.
    BadInput for what is no file."""
    path = Path(folder) / name
    refuse_no_file(path)
    with alone(path.parent):
        # Of an evaluation that was killed; a training may be writing other files
        remove_leftovers(path.parent, f"{path.name}.*")
        before = read_results(path)
        with open(Path(folder) / "model.pt", "rb") as file:
            model = hashlib.file_digest(file, "sha256").hexdigest()[:8]
        lost = ""
        if not before and path.exists():
            lost = "what is no JSON object of finite numbers"
        elif before and before.get("model") != model:
            lost = "the numbers of another model"
        elif before and before.get("rows") != label:
            lost = f"the numbers of {before.get('rows')}"
        if lost:
            note = printable(f"note: {path} held {lost}: replaced")
            print(note.replace("\n", " "), file=sys.stderr)
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


def outline(x):
    """All of a tensor but its numbers. One with another outline than its parameter's, taken from a
    file, would be written outside of its memory."""
    return f"{x.dtype} {tuple(x.shape)} {x.stride()} {x.layout}"


class TrainingFolder:
    """train.pt is read first, and the folder held later, while the loop runs: until then another
    run may be made of it, as in a cell that is run again. `version` tells whether it changed."""

    def __init__(self, path):
        self.path = path
        self.held = None  # the lock
        self.version = self.find_version()

    def find_version(self):
        """What train.pt is now; None if there is none."""
        path = self.path / "train.pt"
        found = path.stat() if path.exists() else None
        return found and (found.st_mtime_ns, found.st_ino)

    def check(self):
        """BadInput for a folder in which no run can be begun or resumed."""
        if self.path.exists():
            self.refuse_others()
            # Now, and not after the training whose results belong there.
            refuse_no_file(self.path / "eval.json")
            lock(self.path).close()

    def refuse_others(self):
        # What a run leaves that ended before its first checkpoint; it may be begun anew.
        begun = {"tokenizer.json", "log.jsonl", ".lock"}
        others = [one.name for one in self.path.iterdir() if not one.name.endswith(".part")]
        others = sorted(set(others) - begun)
        if others and not self.version:
            raise BadInput(f"{self.path} holds {others[0]} and no train.pt to go on from: put that "
                           "back, or use another --out")

    def take(self):
        """BadInput if another process trains here, or did since train.pt was read."""
        held = lock(self.path)
        if self.find_version() != self.version:
            held.close()
            raise BadInput(f"{self.path} was trained in meanwhile: start the run again")
        self.held = held
        self.refuse_others()
        with alone(self.path):  # an export into this folder is waited for
            remove_leftovers(self.path)

    def release(self):
        """Another run may go on here, in this process too."""
        if self.held:
            self.version = self.find_version()
            self.held.close()
            self.held = None

    # ---- the log

    def log(self, record):
        """Append an object to log.jsonl; what JSON cannot write (nan, inf) becomes a string."""
        record = json.loads(json.dumps(record), parse_constant=str)
        if "config" in record:
            record = sealed(record)
        with open(self.path / "log.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def is_finished(self, step):
        """Was this, the last step, evaluated, and is all written? A kill may have come between."""
        evaluated = [one["step"] for one in read_log(self.path) if "eval" in one and "step" in one]
        files = [(self.path / name).exists() for name in ("model.pt", "eval.json")]
        return step in evaluated and all(files)

    def rewind(self, step, is_last):
        """Drop what was logged after a step: it comes again, with the same numbers."""
        kept = [one for one in read_log(self.path) if one.get("step", 0) <= step]
        if not kept or "config" not in kept[0]:
            raise BadInput(f"{self.path / 'log.jsonl'} has lost its first line, the run's "
                           "settings: put the file back, or use another --out")
        if is_last and not self.is_finished(step):
            # The last evaluation is made again, if only because its file is not there.
            kept = [one for one in kept if "eval" not in one or one["step"] < step]
        lines = [json.dumps(record) + "\n" for record in kept]
        write_atomic(self.path / "log.jsonl", "".join(lines).encode())
