"""What every program of ours shares: the user's mistakes, the parser of flags, the exit status."""

import argparse
import dataclasses
import difflib
import inspect
import math
import os
import re
import signal
import sys
import time
import types
import typing

from tqdm import tqdm

try:
    import fcntl
    import resource
except ImportError:  # Windows has neither
    fcntl = None
    resource = None


class BadInput(ValueError):
    """A mistake of the user's: one line with the value, the rule and the way out."""


def did_you_mean(word, known, otherwise=""):
    """"; did you mean X?", the end of a line about an unknown name; `otherwise` if none is near."""
    near = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {near[0]}?" if near else otherwise


def comma_list(text):
    """"en, de" -> ["en", "de"], each word once: the type of flags that take several values."""
    words = [word.strip() for word in text.split(",")]
    return list(dict.fromkeys(word for word in words if word))


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are BadInput, and whose flags may be written with - or _.

    `explain`: flag -> what else to say of a flag that is unknown here, or "".
    """

    def __init__(self, prog=None, description=None, epilog=None, add_help=True, explain=None,
                 formatter_class=argparse.RawDescriptionHelpFormatter, usage=None, color=False):
        super().__init__(prog, usage, description, epilog, add_help=add_help,
                         formatter_class=formatter_class, allow_abbrev=False)
        self.explain = explain
        self.color = color  # Python 3.14 gives it to the parsers of commands

    def error(self, message):
        raise BadInput(f"{message} (see {self.prog} --help)")

    def parse_known_args(self, args=None, namespace=None):
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([_with_hyphens(word) for word in words], namespace)

    def parse_args(self, args=None, namespace=None):
        options, unknown = self.parse_known_args(args, namespace)
        if not unknown:
            return options
        flag = unknown[0].split("=")[0]
        if not flag.startswith("-"):
            raise BadInput(f"{flag!r} is not expected here (see {self.prog} --help)")
        more = self.explain(flag) if self.explain else ""
        if more:
            raise BadInput(f"unknown flag {flag}: {more}")
        near = did_you_mean(flag, self._flags(), f": see {self.prog} --help")
        raise BadInput(f"unknown flag {flag}{near}")

    def _flags(self):
        """All flags, those of commands too."""
        found = []
        for action in self._actions:
            found += action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    found += command._flags()
        return found


def _with_hyphens(word):
    """--batch_size=a_b -> --batch-size=a_b"""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else word


def exit_status(work, *arguments):
    """Do the work of a program -> its exit status: what it returns or 0, 2 for the user's mistakes,
    130 if stopped. The only handler at the top of a program; a bug keeps its traceback."""
    try:
        status = work(*arguments) or 0
        sys.stdout.flush()
        return status
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever reads, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a folder that cannot be written
        what = f"{error.filename}: " if error.filename else ""
        print(f"error: {what}{error.strerror or error}; choose another place, or free this one",
              file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(*(stop.args or ["stopped; nothing is half written"]), file=sys.stderr)
        return 130


PLAIN = (bool, int, float, str)


def validate(config, at_least=None, above=None, shares=""):
    """Check a config's fields: choices are those of its Literals, numbers are finite, and keep to
    at_least and above {bound: "names"}; shares lie in [0, 1]. BadInput names the field."""
    values = vars(config)

    def demand(name, holds, rule):
        if not holds:
            raise BadInput(f"{name} is {values[name]!r}: {rule}")

    for name, kind in typing.get_type_hints(type(config)).items():
        if typing.get_origin(kind) is typing.Literal:
            choices = typing.get_args(kind)
            demand(name, values[name] in choices, f"choose one of {', '.join(map(str, choices))}")
        plain = [one for one in (typing.get_args(kind) or (kind,)) if one in PLAIN]
        if plain and typing.get_origin(kind) in (None, types.UnionType):
            wanted = (*plain, int) if float in plain else tuple(plain)
            # True is an int to Python, and to nobody else.
            holds = isinstance(values[name], wanted) and (
                bool in plain or not isinstance(values[name], bool))
            demand(name, holds or (values[name] is None and type(None) in typing.get_args(kind)),
                   f"it must be a {' or '.join(one.__name__ for one in plain)}")
        if isinstance(values[name], float):
            demand(name, math.isfinite(values[name]), "it must be a finite number")
    for bound, names in (at_least or {}).items():
        for name in names.split():
            demand(name, values[name] >= bound, f"it must be at least {bound}")
    for bound, names in (above or {}).items():
        for name in names.split():
            demand(name, values[name] > bound, f"it must be above {bound}")
    for name in shares.split():
        demand(name, 0 <= values[name] <= 1, "it must lie in [0, 1]")


def comments(config):
    """{field of a dataclass: the comment beside it}; {} for a class whose text is not in a file."""
    try:
        text = inspect.getsource(config)
    except (OSError, TypeError):
        return {}
    return dict(re.findall(r"^ +(\w+): [^#\n]+#\s*(.+)$", text, re.MULTILINE))


def add_flags(group, config, names, defaults):
    """A flag for each of the named fields of a dataclass; its comment is the help, its Literal the
    choices. A flag that is not given is None."""
    notes = comments(config)
    for field in dataclasses.fields(config):
        if field.name not in names:
            continue
        flag = "--" + field.name.replace("_", "-")
        note = notes.get(field.name, "").replace("%", "%%")
        types = typing.get_args(field.type) or (field.type,)
        if typing.get_origin(field.type) is typing.Literal:
            note = f"{note}: {'|'.join(types)}".removeprefix(": ")
            types = (str,)
        default = defaults.get(field.name)
        if default not in (None, ""):
            note += f" [{default}]"
        if types[0] is not bool:
            kind = types[0].__name__.upper()
            group.add_argument(flag, type=types[0], metavar=kind, help=note)
            continue
        # Both are accepted; help shows the one that changes something.
        for name, value in ((flag, True), (flag.replace("--", "--no-"), False)):
            group.add_argument(name, dest=field.name, action="store_const", const=value,
                               help=argparse.SUPPRESS if value == default else note)


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


class Progress:
    """Long work on the screen: a bar on a terminal, else a line now and then, both on stderr.
    SIGINT and SIGTERM ask to stop after the step at hand; a second one stops at once."""
    SECONDS = 20  # between lines where there is no terminal

    def __init__(self, total, done, show=True):
        self.terminal = sys.stderr.isatty()
        self.bar = tqdm(total=total, initial=done, file=sys.stderr, leave=False,
                        disable=not (show and self.terminal), dynamic_ncols=True)
        self.show = show
        self.total = total
        self.first = done
        self.begun = time.perf_counter()
        self.shown = self.begun
        self.signal = 0
        self.before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            self.before[number] = signal.signal(number, self.ask)

    def close(self):
        self.bar.close()
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def ask(self, number, frame):
        if self.signal:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal = number
        print("stopping after this step; once more to stop at once", file=sys.stderr)

    def step(self, done):
        """After each step: show it -> the signal that asked to stop, or 0."""
        self.bar.update()
        now = time.perf_counter()
        if self.show and not self.terminal and now - self.shown > self.SECONDS:
            self.shown = now
            pace = (now - self.begun) / (done - self.first)
            print(f"step {done} of {self.total}, {pace:.2f} s a step, about "
                  f"{pace * (self.total - done) / 60:.1f} minutes left", file=sys.stderr)
        return self.signal


def peak_memory():
    """The most bytes of memory that this process has held; 0 where the system does not tell."""
    if resource is None:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
