"""The models of the tests are tiny: one thread is faster than two, here and in what tests start."""

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "true"

import torch  # noqa: E402

from corpora.program import exit_status  # noqa: E402
from data import Tokenizer  # noqa: E402

torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Read when the kernels are imported; `auto` is sdpa on a CPU all the same.
    os.environ["TRITON_INTERPRET"] = "1"


# With requirements.txt alone the tests of the core run; those of what needs more are left out.
MISSING = [name for name in ("sklearn", "scipy", "safetensors", "matplotlib", "nbformat",
                             "transformers", "sentence_transformers") if find_spec(name) is None]
WING = re.compile(r"^(from|import) (tasks|interop|results|nbformat|test_tasks)\b", re.M)
collect_ignore = []
for path in sorted(Path(__file__).parent.glob("test_*.py")) if MISSING else ():
    if WING.search(path.read_text(encoding="utf-8")):
        collect_ignore.append(path.name)


def pytest_report_header():
    if MISSING:
        return (f"left out, as {', '.join(MISSING)} of requirements-dev.txt cannot be imported: "
                f"{', '.join(collect_ignore)}")


def pytest_collection_modifyitems(config, items):
    """Tests that need CUDA, and the README's commands of the wings, are left out, and counted as
    deselected, where CUDA or the wings' packages are missing."""
    left = []
    for item in items:
        needs_cuda = item.get_closest_marker("gpu") and not torch.cuda.is_available()
        if needs_cuda or MISSING and re.search("-m (tasks|interop|results)", item.name):
            left.append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


@pytest.fixture(autouse=True)
def seeded():
    """Each test draws the same numbers whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def refused(capsys):
    """refused(program, words) -> the one line with which it ends, with status 2; it prints nothing
    else. Words are a list, or a text with spaces between them."""
    def line_of(program, words, printed=""):
        words = words.split(" ") if isinstance(words, str) else words
        capsys.readouterr()
        assert exit_status(program, [str(word) for word in words]) == 2
        shown = capsys.readouterr()
        assert shown.err.startswith("error: ") and shown.err.count("\n") == 1, shown.err
        assert printed is None or shown.out == printed
        return shown.err
    return line_of


@pytest.fixture(scope="session")
def tokenizer():
    """Of 300 pieces, for models that learn nothing."""
    return Tokenizer.train(["the cat sees seven dogs", "die Katze sieht sieben Hunde"], 300)
