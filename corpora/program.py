"""What every program of ours shares: the user's mistakes, the parser of flags, the exit status."""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import inspect
import math
import os
import re
import signal
import sys
import time
import types
import typing
from pathlib import Path

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
    near = [name for name in known if name.startswith(word)]
    near = near or difflib.get_close_matches(word, known, 1)
    return f"; did you mean {near[0]}?" if near else otherwise


def shortened(text, ends=80):
    """The two ends of a text that a user gave, if it is long."""
    return text if len(text) <= 3 * ends else f"{text[:ends]}...{text[-ends:]}"


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
        raise BadInput(f"{shortened(message)} (see {self.prog} --help)")

    def parse_known_args(self, args=None, namespace=None):
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([_with_hyphens(word) for word in words], namespace)

    def parse_args(self, args=None, namespace=None):
        options, unknown = self.parse_known_args(args, namespace)
        if not unknown:
            return options
        flag = shortened(unknown[0].split("=")[0])
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


# Everything but a line break that moves a terminal's cursor or turns its text around, and halves of
# characters, which no encoding can write.
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text):
    """Text that may come from anywhere, without its control characters."""
    return CONTROL.sub(" ", text)


def exit_status(work, *arguments):
    """Do the work of a program -> its exit status: what it returns or 0, 2 for the user's mistakes
    and what the machine cannot do, 130 and 141 if stopped. The only handler at the top of a
    program; a bug keeps its traceback."""
    if sys.stderr is None:  # closed: nobody hears of progress, and the work goes on
        sys.stderr = open(os.devnull, "w", encoding="utf-8")
    if sys.stdout is None:
        return _failed("the output is closed: send it to a file, or to /dev/null")
    is_done = False
    try:
        status = work(*arguments) or 0
        is_done = True
        sys.stdout.flush()
        return status
    except BadInput as error:
        return _failed(error)
    except UnicodeEncodeError as error:
        return _failed(f"{error.object[error.start]!a} cannot be written in {error.encoding}: set "
                       "PYTHONIOENCODING=utf-8")
    except BrokenPipeError:  # whoever reads, such as head, has seen enough
        _discard_output()
        if is_done:
            return 0
        print("stopped: the output was closed before the work was done", file=sys.stderr)
        return 128 + 13  # as a program that SIGPIPE ends
    except OSError as error:  # a full disk, a folder that cannot be written
        with contextlib.suppress(OSError):
            _discard_output()
        what = f"{error.filename}: " if error.filename else ""
        return _failed(f"{what}{error.strerror or error}; choose another place, or free this one")
    except ModuleNotFoundError as error:
        return _missing_package(error)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        return _failed("out of memory: lower --batch (or raise --accumulate), --max-length, "
                       f"--limit, or the size of the model ({str(error).splitlines()[0][:150]})")
    except KeyboardInterrupt as stop:
        print(*(stop.args or ["stopped; nothing is half written"]), file=sys.stderr)
        return 130


def _failed(why):
    """Say on one line why a program ends here -> its exit status."""
    print("error: " + printable(str(why)).replace("\n", " "), file=sys.stderr)
    return 2


def _discard_output():
    """What could not be printed is not tried once more when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_out_of_memory(error):
    texts = ("not enough memory", "DefaultCPUAllocator")
    # That of torch.cuda by its name: this file does without torch.
    is_named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_named or any(text in str(error) for text in texts)


# What requirements-dev.txt has more than requirements.txt.
WING_PACKAGES = ("huggingface_hub", "matplotlib", "safetensors", "scipy", "sklearn", "transformers")


def _missing_package(error):
    name = (error.name or "").split(".")[0]
    if name not in WING_PACKAGES:
        raise error
    return _failed(f"{name} is not installed: pip install -r requirements-dev.txt")


@contextlib.contextmanager
def wing_imports():
    """`with wing_imports():` around the imports of a program whose packages the core does not need;
    where one is missing the program ends here, in one line."""
    try:
        yield
    except ModuleNotFoundError as error:
        sys.exit(_missing_package(error))


PLAIN = (bool, int, float, str)


def validate(config, at_least=None, above=None, shares="", at_most=None):
    """Check a config's fields: choices are those of its Literals, numbers are finite (and whole
    ones fit 64 bits), and keep to at_least, above and at_most {bound: "names"}; shares lie in
    [0, 1]. BadInput names the field."""
    values = vars(config)

    def demand(name, holds, rule):
        if not holds:
            raise BadInput(f"{name} is {shortened(repr(values[name]))}: {rule}")

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
        if typing.get_origin(kind) is tuple:
            holds = isinstance(values[name], (list, tuple)) and set(map(type, values[name])) <= {
                int, float}
            demand(name, holds, "it must be a list of numbers")
        if isinstance(values[name], float):
            demand(name, math.isfinite(values[name]), "it must be a finite number")
        if isinstance(values[name], int):
            demand(name, values[name] < 2 ** 63, "it must be below 2 ** 63")
    for bound, names in (at_least or {}).items():
        for name in names.split():
            demand(name, values[name] >= bound, f"it must be at least {bound}")
    for bound, names in (above or {}).items():
        for name in names.split():
            demand(name, values[name] > bound, f"it must be above {bound}")
    for bound, names in (at_most or {}).items():
        for name in names.split():
            demand(name, values[name] <= bound, f"it must be at most {bound}")
    for name in shares.split():
        demand(name, 0 <= values[name] <= 1, "it must lie in [0, 1]")


def names(config):
    """Of the fields of a dataclass."""
    return [field.name for field in dataclasses.fields(config)]


def pick(config, values):
    """A dataclass made of those of the values that it has."""
    return config(**{name: values[name] for name in names(config)})


def flag_of(name):
    return "--" + name.replace("_", "-")


def unmet(needs, given, values):
    """The line about the first of the given options {name: value} that has no effect, or None.

    needs {option: condition}, of all values: "other" is on; "other=a|b" is one of these; "other="
    is off; "other!=a" is not this. Several conditions are joined by " and ".
    """
    for option in filter(needs.get, given):
        for condition in needs[option].split(" and "):
            other, relation, wanted = re.match(r"(\w+)(!?=)?(.*)", condition).groups()
            flag = flag_of(other)
            # 0, "" and False are how a setting is off.
            value = str(values[other]) if values[other] else ""
            holds = bool(value)
            lacks = f"without {flag}"
            if relation:
                holds = (value in wanted.split("|")) == (relation == "=")
            if relation == "=" and wanted:
                lacks += " " + wanted.replace("|", " or ")
            elif relation:
                lacks = f"with {flag} {wanted}".strip()
            if not holds:
                return f"{option} {given[option]} has no effect {lacks}: drop it"
    return None


@functools.cache
def comments(config):
    """{field of a dataclass: the comment beside it}; {} for a class whose text is not in a file."""
    try:
        text = Path(inspect.getfile(config)).read_text(encoding="utf-8")
    except (OSError, TypeError):
        return {}
    # inspect.getsource finds the same, but parses the whole file, which takes a tenth of a second
    for name in config.__qualname__.split("."):
        text = re.split(rf"^ *class {name}\b", text, maxsplit=1, flags=re.MULTILINE)[-1]
    fields = re.split(r"^ *(?:@|class |def )", text, maxsplit=1, flags=re.MULTILINE)[0]
    return dict(re.findall(r"^ +(\w+): [^#\n]+#\s*(.+)$", fields, re.MULTILINE))


def add_flags(group, config, names, defaults, hidden=()):
    """A flag for each of the named fields of a dataclass; its comment is the help, its Literal the
    choices. Help does not show the `hidden` ones. A flag that is not given is None."""
    notes = comments(config)
    for field in dataclasses.fields(config):
        if field.name not in names:
            continue
        flag = flag_of(field.name)
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
            note = argparse.SUPPRESS if field.name in hidden else note
            group.add_argument(flag, type=types[0], metavar=kind, help=note)
            continue
        # Both are accepted; help shows the one that changes something.
        for name, value in ((flag, True), (flag.replace("--", "--no-"), False)):
            is_hidden = value == default or field.name in hidden
            group.add_argument(name, dest=field.name, action="store_const", const=value,
                               help=argparse.SUPPRESS if is_hidden else note)


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


def machine_memory():
    """Bytes of memory that this machine has; infinite where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):
        return math.inf
