"""Queries and regular expressions that a model wrote, judged in a process that can be ended."""

import contextlib
import functools
import hashlib
import json
import math
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

from tasks import regex

# On Windows time alone is limited.
try:
    import resource
except ImportError:
    resource = None

SQL_PARTS = re.compile(
    r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?(?:\*/|$)|\w+|\S""", re.S)
READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION,
         sqlite3.SQLITE_RECURSIVE}


class Sandbox:
    """A process that answers questions. It has at most so many megabytes, where the system can
    limit them, and is ended when a question takes `seconds`; the next question starts a new one."""

    def __init__(self, seconds, megabytes=1000):
        self.seconds = seconds
        self.megabytes = megabytes
        self.process = None

    def start(self):
        command = [sys.executable, "-m", "tasks.sandbox", str(self.seconds), str(self.megabytes)]
        self.process = subprocess.Popen(
            command, cwd=Path(__file__).parents[1], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        # How long the start takes does not count.
        if self.process.stdout.readline() != "ready\n":
            raise OSError(f"{' '.join(command)} does not start")

    def close(self):
        if self.process:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def ask(self, name, *arguments):
        """What a function of FUNCTIONS returns; None if it fails or reaches a limit."""
        if not self.process:
            self.start()
        began = time.monotonic()
        clock = threading.Timer(self.seconds, self.process.kill)
        clock.start()
        try:
            self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            clock.cancel()
        # The clock may have struck just after the answer.
        if not line or time.monotonic() - began >= self.seconds:
            self.close()
            return None
        return json.loads(line)


# ---- SQL is judged by what it returns


def query_result(query, database, in_order):
    """The rows of one SELECT on a SQLite file -> a digest, equal for equal rows: numbers to 12
    digits, in order or in any order. Only reading is allowed; what fails is one of FAILURES."""

    def may(action, *_):
        return sqlite3.SQLITE_OK if action in READS else sqlite3.SQLITE_DENY

    address = f"{Path(database).as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(address, uri=True, isolation_level=None)) as connection:
        connection.text_factory = functools.partial(bytes.decode, errors="surrogateescape")
        connection.set_authorizer(may)
        cursor = connection.execute(query)
        if cursor.description is None:
            raise ValueError(f"{query[:80]!r} returns no table")
        rows = [repr(tuple(map(rounded, row))) for row in cursor]
    return hashlib.sha256("\n".join(rows if in_order else sorted(rows)).encode()).hexdigest()


def rounded(value):
    if not isinstance(value, float):
        return value
    value = float(f"{value:.12g}")
    return int(value) if value.is_integer() else value  # 10.0 is 10


def ordered(query):
    """Has the outermost SELECT an ORDER BY, not in brackets, a string or a comment?"""
    depth = 0
    before = ""
    for part in SQL_PARTS.findall(query):
        if part.startswith(("--", "/*")):
            continue
        depth += (part == "(") - (part == ")")
        if (before, part.lower()) == ("order", "by"):
            return True
        before = part.lower() if depth == 0 else ""
    return False


def same_result(sandbox, query, gold, database):
    """Do two queries return the same rows on this SQLite file, in any order unless the outermost
    gold SELECT has an ORDER BY? None if gold fails or there is no file. [LLM-JEPA, sec. 4.1]"""
    question = (str(Path(database).resolve()), ordered(gold))
    wanted = sandbox.ask("query_result", gold, *question)
    return wanted and sandbox.ask("query_result", query, *question) == wanted


# ---- the process

FUNCTIONS = {one.__name__: one for one in (query_result, regex.regex_equal, regex.regex_vacuous)}
FAILURES = (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError, RecursionError)


def serve(seconds, megabytes):
    """Answer questions, a line of JSON each, until there are no more."""
    if resource:
        # A lower limit may be set already.
        with contextlib.suppress(ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
    print("ready", flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        answer = None
        # Should nobody be left to end this process, it ends itself.
        if resource:
            signal.alarm(math.ceil(seconds) + 1)
        with contextlib.suppress(*FAILURES):
            answer = FUNCTIONS[name](*arguments)
        if resource:
            signal.alarm(0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(float(sys.argv[1]), int(sys.argv[2]))
