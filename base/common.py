"""What all programs share: one-line errors, flags, atomic files and devices."""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import hashlib
import inspect
import json
import os
import re
import secrets
import signal
import sys
import threading
import typing
import zipfile
from pathlib import Path
from typing import Annotated

import torch
from tqdm import tqdm

try:
    import fcntl
except ImportError:  # Windows: no locks there
    fcntl = None


class BadInput(argparse.ArgumentTypeError, ValueError):  # argparse adds the flag
    """A user's mistake, in one line: the value, the rule and the way out."""


# Hugging Face has a library of this name. The module that is imported first is the only one.
if other := getattr(sys.modules.get("evaluate"), "__file__", None):
    if Path(other).resolve().parent != Path(__file__).resolve().parent.parent:
        raise BadInput(f"another module `evaluate` is imported already ({other}): restart Python, "
                       "and import nanoJEPA first, or use that library in a process of its own")


def shown(value):
    """Return a user's text for a message: at most 200 characters, none a control character."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))
    return text if len(text) <= 200 else f"{text[:100]}...{text[-80:]}"


def did_you_mean(word, known, otherwise=""):
    """Return "; did you mean X?" for the nearest known word, or `otherwise`."""
    word, known = str(word), [str(one) for one in known]
    near = [one for one in known if one.startswith(word)]
    near = near or difflib.get_close_matches(word, known, 1, cutoff=0.65)
    return f"; did you mean {near[0]}?" if near else otherwise


def comma_list(text):
    """Split "en, de" into ["en", "de"]. The type of flags that take several values."""
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if text and not words:
        raise BadInput(f"{shown(repr(text))} names nothing: write words and commas")
    return words


def warn(text):
    """Print a warning to stderr, above a progress bar if there is one."""
    tqdm.write(f"warning: {text}", file=sys.stderr)


warn_once = functools.cache(warn)

# What requirements-dev.txt installs and only the wings import.
WING_PACKAGES = ("matplotlib", "scipy", "sklearn", "safetensors", "transformers",
                 "sentence_transformers")


def run_program(main):
    """Run main(words of the command line) and exit: 0 or what main returns, 2 for a user's mistake
    or a missing package, 130 for Ctrl-C, 141 if the reader of our output is gone (`| head`)."""
    for number in STOPS:  # nohup ignores a closed terminal, and a shell's & ignores Ctrl-C
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a Windows code page lacks most characters
            stream.reconfigure(errors="replace")
    try:
        status = main(sys.argv[1:]) or 0
        sys.stdout.flush()
    except BadInput as error:
        print("error: " + str(error).replace("\n", " "), file=sys.stderr)
        status = 2
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in WING_PACKAGES:
            raise
        print(f"error: {package} is not installed, and this command needs it: pip install -r "
              "requirements-dev.txt", file=sys.stderr)
        status = 2
    except KeyboardInterrupt as stop:
        print("stopped; no file is half written", file=sys.stderr)
        status = 128 + (stop.args[0] if stop.args else signal.SIGINT)
    except BrokenPipeError:
        # Python flushes stdout once more when it exits, so it must lead somewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 128 + signal.SIGPIPE
    sys.exit(status)


def interrupt(number, frame):
    """Handle a signal of STOPS: with an exception, unfinished files are removed."""
    raise KeyboardInterrupt(number)


# Ctrl-C and Jupyter's Stop, kill, and a closed terminal (which Windows lacks).
STOPS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP")
         if hasattr(signal, name)]


@contextlib.contextmanager
def uninterrupted():
    """Delay the signals of STOPS to the end of the block, so that an optimizer step, a record of
    metrics, or a save is done completely or not at all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught = []
    before = {number: signal.signal(number, lambda *call: caught.append(call))
              for number in STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if caught:
        signal.raise_signal(caught[0][0])


# ---- flags: one for each field of a dataclass. The comment after a field is its help text.

class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises BadInput, and for an unknown flag names the nearest one."""

    def __init__(self, prog, description, **options):
        super().__init__(prog, description=description, allow_abbrev=False, **options)

    def error(self, message):
        raise BadInput(f"{shown(message)} (see {self.prog} --help)")

    def parse_args(self, args=None, namespace=None):
        options, unknown = self.parse_known_args(args, namespace)
        if not unknown:
            return options
        word = unknown[0].partition("=")[0]
        if not word.startswith("-"):
            raise BadInput(f"{shown(word)!r} is not expected here: put a flag before a value, and "
                           "commas between several, as in --langs en,de")
        # Without dashes, which would make all flags alike.
        flags = [flag[2:] for flag in self._option_string_actions if flag.startswith("--")]
        name = "steps" if "epochs" in word else word.strip("-")
        near = did_you_mean(name, flags, f": see {self.prog} --help")
        raise BadInput(f"unknown flag {shown(word)}{near.replace('mean ', 'mean --')}")


@functools.cache  # reading the source takes a tenth of a second
def comments(config):
    """Return {field: help text} of a dataclass: the comment after the field, or the line above; a
    field without one has that of the base class."""
    notes = {}
    for base in reversed(config.__mro__[:-1]):
        try:
            lines = inspect.getsource(base).splitlines()
        except (OSError, TypeError):  # a class typed into a Python prompt
            continue
        above = []
        for line in lines:
            # "    lr: Positive = 1e-4  # peak learning rate" has the field lr and this note.
            if field := re.match(r" +(\w+): [^#]*(?:# *(.+))?$", line):
                name, note = field.groups()
                notes[name] = note or " ".join(above) or notes.get(name, "")
            above = [*above, line.strip("# ")] if line.strip().startswith("#") else []
    return notes


def add_flags(group, config, defaults, papers, only=None, helped=None):
    """Add a flag for each field of a dataclass to a group of a parser. A flag that is not given
    parses to None, because its default can depend on other flags.

    defaults and papers: {field: value}, the default that --help shows, and the paper's value, if
    they differ; only: the fields to add [all]; helped: the fields that --help shows [all]."""
    notes = comments(config)
    kinds = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if only and field.name not in only:
            continue
        types = typing.get_args(kinds[field.name]) or (kinds[field.name],)
        if types[0] is bool:
            how = dict(action=argparse.BooleanOptionalAction)
        elif types[0] in (int, float, str):
            how = dict(type=types[0], metavar=types[0].__name__.upper())
        else:  # the choices of a Literal
            how = dict(metavar="|".join(map(str, types)))
        note = notes.get(field.name, "").replace("%", "%%")
        note += default_text(defaults.get(field.name), papers.get(field.name))
        if helped is not None and field.name not in helped:
            note = argparse.SUPPRESS
        group.add_argument("--" + field.name.replace("_", "-"), default=None, help=note, **how)


def default_text(default, paper):
    """Return " [0.95; paper 0.4]", or " [0.95]" if both are equal; "" for no default."""
    if default in (None, ""):
        return ""
    default, paper = [("no", "yes")[one] if isinstance(one, bool) else one
                      for one in (default, paper)]
    return f" [{default}]" if default == paper else f" [{default}; paper {paper}]"


# Types for the fields of a dataclass, with the range that Checked checks. A field that can be None
# is `int | None`, without a range.
AtLeast0 = Annotated[int, "at least 0", lambda x: x >= 0]
AtLeast1 = Annotated[int, "at least 1", lambda x: x >= 1]
NotNegative = Annotated[float, "at least 0", lambda x: x >= 0]
Positive = Annotated[float, "above 0", lambda x: x > 0]
Fraction = Annotated[float, "a fraction, from 0 to 1", lambda x: 0 <= x <= 1]
PositiveFraction = Annotated[float, "a fraction above 0, at most 1", lambda x: 0 < x <= 1]


class Checked:
    """The base of a dataclass that checks its fields: types, choices, finite numbers and the ranges
    of the types above. Raises BadInput."""

    def __post_init__(self):
        for name, kind in typing.get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            rule, fits = "", None
            if typing.get_origin(kind) is Annotated:
                kind, rule, fits = typing.get_args(kind)
            if typing.get_origin(kind) is typing.Literal:
                check_choice(name, value, typing.get_args(kind))
            elif typing.get_origin(kind) is not tuple:
                check_type(name, value, typing.get_args(kind) or (kind,))
            if rule and not fits(value):
                raise BadInput(f"{name} is {value}: it must be {rule}")


def check_choice(name, value, choices):
    """Raise BadInput for a value that is none of the choices of a Literal."""
    if value not in choices:
        raise BadInput(f"{name} is {shown(repr(value))}: choose one of "
                       f"{', '.join(map(str, choices))}{did_you_mean(value, choices)}")


def check_type(name, value, types):
    """Raise BadInput for a value of another type, or a number that is not finite."""
    # bool is a subclass of int, and every int is a float here.
    if not (type(value) in types or type(value) is int and float in types):
        names = " or ".join(one.__name__ for one in types).replace("NoneType", "None")
        raise BadInput(f"{name} is {shown(repr(value))}: it must be of type {names}")
    if isinstance(value, (int, float)) and not abs(value) < 2 ** 53:  # NaN is not
        raise BadInput(f"{name} is {value}: it must be a finite number below 2^53")


# ---- files that are complete or absent


@contextlib.contextmanager
def atomic_file(path):
    """Open a binary file for writing that gets its name only when the block ends without error.
    Raises BadInput if no such file can be created."""
    path = Path(path)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        if os.path.isdir(path):
            raise OSError("it is a folder")
        file = open(part, "xb")
    except OSError as error:
        raise BadInput(f"{shown(path)} cannot be written ({error.strerror or error}): choose "
                       "another name") from None
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # otherwise a power cut can leave the name without the content
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def new_file(flag, name, ending, mark=None):
    """Return the path that a flag names. Raises BadInput if it does not end in `ending`, and if the
    file exists, unless `mark` is in its first 1,000 bytes: then we wrote it."""
    path = Path(name).expanduser()
    if path.suffix.lower() != ending:
        raise BadInput(f"{flag} is {shown(name)}: the name must end in {ending}")
    if os.path.lexists(path):
        with contextlib.suppress(OSError):
            if mark and path.is_file() and mark in path.open("rb").read(1000):
                return path
        raise BadInput(f"{flag} {shown(path)} exists already: name a new file")
    return path


def make_folder(path, flag="--out"):
    """Create a folder. Raises BadInput if that is impossible."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        raise BadInput(f"{flag} {shown(path)}: this folder cannot be created ({reason}): choose "
                       "another") from None


@contextlib.contextmanager
def locked(path, refusal=""):
    """Lock a file or a folder until the block ends. The end of the process unlocks it too, even by
    kill -9. If a process has locked it, raise BadInput(refusal), or wait without one."""
    if fcntl is None:
        yield
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (fcntl.LOCK_NB if refusal else 0))
        except BlockingIOError:
            raise BadInput(refusal) from None
        except OSError as error:  # Lustre, and some NFS
            warn_once(f"files cannot be locked here ({error.strerror}): do not start this twice")
        yield
    finally:
        os.close(handle)


def read_torch(path, device="cpu", mmap=False):
    """Read a file of torch.save that holds tensors and plain values; nothing in it is executed.
    mmap: the tensors are pages of the file, which all processes share until they write to them.
    Raises BadInput if it is missing, damaged or holds anything else."""
    if not os.path.isfile(path):
        raise BadInput(f"{path} does not exist: give the folder of a run, such as out/mexma")
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip():  # torch.load does not check these checksums
                raise zipfile.BadZipFile
        # Windows cannot replace a file that is mapped.
        return torch.load(path, device, weights_only=True, mmap=mmap and os.name == "posix")
    except Exception as error:  # PyTorch raises a dozen types for a bad file
        raise BadInput(f"{path} is not a checkpoint of tensors and plain values "
                       f"({type(error).__name__}): it is damaged or of another kind") from None


def differences(old, new, words="{} was {}, is {}", prefix=""):
    """Yield (name, text) for every value that differs between two nested dictionaries."""
    for name in sorted(old.keys() | new.keys()):
        before, now = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            yield from differences(before, now, words, f"{prefix}{name}.")
        elif before != now:  # the first digits identify a hash
            yield name, words.format(f"{prefix}{name}", str(before)[:40], str(now)[:40])


def file_state(path):
    """Return the path, size and times of a file, which change if somebody writes into it; None
    without a file."""
    if not os.path.isfile(path):
        return None
    found = os.stat(path)
    # A program can keep the time of the content, but not that of the last change.
    return [os.path.realpath(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def file_hash(path):
    """Return the sha256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(value):
    """Return the sha256 of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


# ---- devices


def usable_device(name):
    """Return a torch.device; "auto" is a CUDA GPU if there is one. Raises BadInput."""
    if name in ("", "auto", None):
        # A Mac's GPU has not run the tests, so it needs --device mps.
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:  # otherwise every process would use GPU 0 too
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        torch.zeros(1, device=name).item()  # "meta" has no numbers to read back
    except (RuntimeError, AssertionError, ModuleNotFoundError):
        raise BadInput(f"device {shown(name)!r} cannot be used here: try cpu") from None
    return torch.device(name)


def usable_precision(name, device, resumed=""):
    """Return the precision of matmuls; "auto" is that of a resumed run, also on a machine that
    would choose another one, or the fastest that the device supports."""
    if name == "auto" and resumed:
        name = resumed
    if name == "float16" and device.type != "cuda":
        way_out = "resume this run on one" if resumed else "use bfloat16"
        raise BadInput(f"precision float16 needs a CUDA GPU (for loss scaling): {way_out}")
    if name != "auto":
        return name
    if device.type == "cuda":
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return "bfloat16" if has_bfloat16 else "float16"
    can = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return "bfloat16" if can.get("avx512_bf16") or can.get("amx_bf16") else "float32"
