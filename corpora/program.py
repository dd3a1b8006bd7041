"""What every program of ours shares: the user's mistakes, the parser of flags, the exit status."""

import argparse
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
import typing
from pathlib import Path

from tqdm import tqdm


from common import BadInput  # noqa: E402  (until all files use common.py)


def did_you_mean(word, known, otherwise=""):
    """"; did you mean X?", the end of a line about an unknown name; `otherwise` if none is near."""
    near = [name for name in known if name.startswith(word)]
    near = near or difflib.get_close_matches(word, known, 1, cutoff=0.55)
    return f"; did you mean {near[0]}?" if near else otherwise


def shortened(text):
    """The two ends of a text that a user gave, if it is long."""
    return text if len(text) <= 240 else f"{text[:80]}...{text[-80:]}"


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
        words = []
        for word in sys.argv[1:] if args is None else args:
            # --batch_size=a_b -> --batch-size=a_b
            flag, equals, value = word.partition("=")
            is_flag = flag.startswith("--")
            words.append(flag.replace("_", "-") + equals + value if is_flag else word)
        return super().parse_known_args(words, namespace)

    def parse_args(self, args=None, namespace=None):
        options, unknown = self.parse_known_args(args, namespace)
        if not unknown:
            return options
        flag = shortened(unknown[0].split("=")[0])
        more = self.explain(flag) if self.explain else ""
        if not flag.startswith("-"):
            raise BadInput(f"{flag!r} is not expected here: {more or f'see {self.prog} --help'}")
        if more:
            raise BadInput(f"unknown flag {flag}: {more}")
        # --learning-rate is no flag, and the help of --lr has both words.
        words = set(flag.strip("-").split("-"))
        meant = [action.option_strings[0] for action in self._actions
                 if action.option_strings and words <= set((action.help or "").split())]
        hint = f"; did you mean {meant[0]}?" if meant else f": see {self.prog} --help"
        raise BadInput(f"unknown flag {flag}{did_you_mean(flag, self._flags(), hint)}")

    def _flags(self):
        """All flags, those of commands too."""
        found = []
        for action in self._actions:
            found += action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    found += command._flags()
        return found


def exit_status(work, *arguments):
    """Do the work of a program -> its exit status: what the work returns, or 0; 2 for a mistake of
    the user's, 130 for Ctrl-C, 141 for a closed pipe. Everything else is Python's traceback."""
    try:
        status = work(*arguments) or 0
        sys.stdout.flush()
        return status
    except BadInput as error:
        print("error: " + str(error).replace("\n", " "), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; nothing is half written", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Whoever reads the output, such as head, has seen enough. Python tries to print the rest
        # once more when it ends, so the output goes nowhere from here on.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def validate(config):
    """Check each field of a dataclass against its type: a Literal's choices, a plain type, finite
    numbers. BadInput names the field."""
    for name, kind in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        kinds = typing.get_args(kind) or (kind,)
        if typing.get_origin(kind) is typing.Literal:
            if value not in kinds:
                near = did_you_mean(str(value), kinds)
                raise BadInput(f"{name} is {shortened(repr(value))}: choose one of "
                               f"{', '.join(map(str, kinds))}{near}")
            continue
        if typing.get_origin(kind) is tuple:
            continue
        # True is an int to Python, and to nobody else.
        is_bool = isinstance(value, bool)
        is_whole = isinstance(value, int) and not is_bool
        if not (type(value) in kinds or (is_whole and float in kinds)):
            wanted = " or ".join("an int" if one is int else f"a {one.__name__}" for one in kinds)
            raise BadInput(f"{name} is {shortened(repr(value))}: it must be {wanted}")
        if is_whole and value >= 2 ** 63 or isinstance(value, float) and not math.isfinite(value):
            raise BadInput(f"{name} is {shortened(repr(value))}: it must be a finite number")


def check_range(config, fields, low=-math.inf, high=math.inf, above=-math.inf):
    """BadInput unless each of the fields, names in one text, lies in [low, high] and above
    `above`."""
    for name in fields.split():
        value = getattr(config, name)
        if not (low <= value <= high and value > above):
            rule = f"at least {low}" if high == math.inf else f"from {low} to {high}"
            rule = rule if above == -math.inf else f"above {above}"
            raise BadInput(f"{name} is {shortened(repr(value))}: it must be {rule}")


def names(config):
    """The names of the fields of a dataclass."""
    return [field.name for field in dataclasses.fields(config)]


def pick(config, values):
    """A dataclass, made of those of the values that it has fields for."""
    return config(**{name: values[name] for name in names(config)})


def flag_of(name):
    return "--" + name.replace("_", "-")


@functools.cache
def comments(config):
    """{field of a dataclass: the comment beside it}; {} for a class whose text is not in a file."""
    try:
        text = Path(inspect.getfile(config)).read_text(encoding="utf-8")
    except (OSError, TypeError):
        return {}
    # inspect.getsource finds the same, but parses the whole file, which takes a tenth of a second.
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
        if types[0] is not bool:
            if default not in (None, ""):
                note += f" [{default}]"
            kind = types[0].__name__.upper()
            note = argparse.SUPPRESS if field.name in hidden else note
            group.add_argument(flag, type=types[0], metavar=kind, help=note)
            continue
        # Both are accepted; help shows the one that changes something.
        for name, value in ((flag, True), (flag.replace("--", "--no-"), False)):
            is_hidden = value == default or field.name in hidden
            said = note if value else f"do not: {note}"
            group.add_argument(name, dest=field.name, action="store_const", const=value,
                               help=argparse.SUPPRESS if is_hidden else said)


class Progress:
    """Long work on the screen: a bar on a terminal, else a line now and then, both on stderr.
    SIGINT and SIGTERM ask to stop after the step at hand; a second one stops at once."""
    SECONDS = 20  # between two lines where there is no terminal

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
        self.pace = ""  # as the last record has it
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

    def show_pace(self, rate, share, terms):
        """What the lines say from now on: tokens a second, the share of the device's peak (if it is
        known), and on the bar the terms of the loss."""
        known = f", {100 * share:.0f} % of the device's peak" if share else ""
        self.pace = f"{rate:,} tokens/s{known}, "
        shown = ", ".join(f"{name} {value}" for name, value in terms.items())
        self.bar.set_postfix_str(self.pace + shown, refresh=False)

    def step(self, done):
        """After each step: show it -> the signal that asked to stop, or 0."""
        self.bar.update()
        now = time.perf_counter()
        if self.show and not self.terminal and now - self.shown > self.SECONDS:
            self.shown = now
            pace = (now - self.begun) / (done - self.first)
            print(f"step {done} of {self.total}, {pace:.2f} s a step, {self.pace}about "
                  f"{pace * (self.total - done) / 60:.1f} minutes left", file=sys.stderr)
        return self.signal
