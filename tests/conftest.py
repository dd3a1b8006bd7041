"""The models of the tests are tiny: one thread is faster than two, here and in the processes that tests start."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "true"

import torch  # noqa: E402

torch.set_num_threads(1)
