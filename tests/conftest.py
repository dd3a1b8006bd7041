"""The models of the tests are tiny: one thread is faster than two, here and in the processes that tests start."""

import os

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "true"

import torch  # noqa: E402

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"                                 # read when the kernels are imported; `auto` is sdpa on a CPU all the same


def pytest_collection_modifyitems(config, items):
    """Tests that need CUDA are left out, and counted as deselected, where there is none."""
    if not torch.cuda.is_available():
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(autouse=True)
def seeded():
    """Each test draws the same numbers whatever ran before it."""
    torch.manual_seed(0)
