"""The promises of every objective: of ours, of those in gallery/, or of your own file.

    python -m pytest tests/test_any_objective.py --objective my_idea.py
"""

import contextlib
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from test_house import ROOT, columns_of, write_pairs
from test_train import meet_in, small_settings, start_processes

import data
import train
from base.common import BadInput
from base.processes import leave_processes
from data import Packed, change_each
from harness.settings import find_objective
from model import Model
from objectives import OBJECTIVES

SETTINGS = dict(steps=2, accumulate=1, save_every=1, dropout=0.0, optimizer="adamw", lr=0.01,
                embedding_lr=1.0, warmup=0.0, precision="float32")
# Two options that do not fit rows this short, or two processes: MEXMA's KoLeo is that of one.
OPTIONS = {"hybrid": dict(min_keep=2), "mexma": dict(koleo_weight=0.0)}


def objectives_of(config):
    """Return the file of --objective, or all objectives that are ours."""
    own = config.getoption("objective")
    if not own:
        return [*OBJECTIVES, *map(str, sorted((ROOT / "gallery").glob("*.py")))]
    if own.endswith(".py"):  # each test has a folder of its own
        own = str(config.invocation_params.dir / own)
    try:
        find_objective(own)
    except BadInput as error:
        raise pytest.UsageError(str(error)) from None
    return [own]


def pytest_generate_tests(metafunc):
    if "objective" in metafunc.fixturenames:
        metafunc.parametrize("objective", objectives_of(metafunc.config),
                             ids=lambda file: Path(file).stem)


def broken(sentence):
    """Fail with a sentence that says what the broken promise means, and without a traceback."""
    pytest.fail(sentence, pytrace=False)


@pytest.fixture(autouse=True)
def pairs(tmp_path):
    write_pairs(tmp_path / "pairs.tsv", 400, columns_of(8))


def start(objective, **more):
    """Return a small Run."""
    kind = find_objective(objective)
    given = SETTINGS | OPTIONS.get(kind.name, {}) | dict(langs=",".join(columns_of(kind.views)))
    return train.start(objective, **small_settings(objective, **given | more))


def weights(run):
    return {name: weight.clone() for name, weight in run.objective.state_dict().items()
            if weight.is_floating_point()}


def farthest(one, other):
    """Return by how much two models differ, and the name of the weight that differs most."""
    return max(((weight - other[name]).abs().max().item(), name) for name, weight in one.items())


class Lowest:
    """A random generator whose every draw is the lowest one. So what is drawn for a row does not
    depend on the other rows, and the halves of a batch have together what the whole batch has."""

    def random(self, size=None):
        return np.zeros(size or ())

    def uniform(self, low=0.0, high=1.0, size=None):
        return np.full(size or (), low)

    normal = uniform  # its mean

    def integers(self, low, high=None, size=None, **options):
        return np.full(size or (), 0 if high is None else low)

    def choice(self, items, size=None, replace=True, **options):
        items = self.permutation(items)
        return items[0] if size is None else items[:size]

    def permutation(self, items):
        return np.arange(items) if np.ndim(items) == 0 else items

    def __getattr__(self, name):
        broken(f"collate calls rng.{name}. This test has random, uniform, normal, integers, choice "
               "and permutation: use these, or add yours to Lowest in test_any_objective.py.")


@contextlib.contextmanager
def lowest_draws():
    """Give Lowest to collate."""
    drawn = data.Batches.rng

    def rng(batches, step, purpose=0, rank=None):
        return drawn(batches, step, purpose, rank) if purpose else Lowest()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.Batches, "rng", rng)
        yield


# ---- promises


def test_collate_is_a_pure_function_of_its_examples_and_rng(objective):
    def states():
        return np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), random.getstate()

    run = start(objective)
    before = states()
    one, two, _, three = (change_each(run.make_batch(step), torch.Tensor.tolist)
                          for step in (0, 0, 1, 0))
    if not one == two == three or states() != before:
        broken("collate makes two different batches from the same examples and rng, or draws from "
               "a global generator. A resumed run would train on other batches. Draw everything "
               "from rng, keep nothing between calls, and do not change the examples.")


def test_a_row_attends_to_itself_alone(objective):
    parts_of_batch = []
    change_each(start(objective).make_batch(0), parts_of_batch.append, Packed)
    for packed in parts_of_batch:
        row = packed.row_of_token()
        for first, last in packed.key_ranges.T.view(2, 2, -1):
            # PyTorch's attention pads each row and would not show it, but our kernels would.
            outside = (first < last) & ((first < packed.cu_seqlens[row])
                                        | (last > packed.cu_seqlens[row + 1]))
            if outside.any():
                broken(f"row {int(row[outside][0])} attends to another row, so its embedding "
                       "depends on the batch. key_ranges must stay between the row's two "
                       "cu_seqlens.")


def test_the_embedding_of_a_text_is_its_own(objective):
    run = start(objective)
    if "pool" in vars(run.model) or type(run.model).pool is not Model.pool:
        broken("the objective replaces model.pool. An exported run does not have the objective, so "
               "its embeddings would be others. Add the pooling to POOLS and Model.pool.")
    texts = [run.data.tokenizer.decode(example.views[0].tolist())
             for example in run.data.batches.examples(0)]
    alone = torch.cat([run.encode([text]) for text in texts])
    if not torch.allclose(run.encode(texts), alone, atol=1e-4):
        broken("the embedding of a text depends on the other texts of its batch: Model.pool, or "
               "what it pools, mixes rows.")


def test_evaluation_reads_a_text_under_the_mask_of_training(objective):
    run = start(objective)
    batch, = run.make_batch(0)
    example = max(run.data.batches.examples(0), key=lambda example: len(example.views[0]))
    text = run.data.tokenizer.decode(example.views[0].tolist())
    read = []
    run.model.register_forward_pre_hook(lambda model, inputs: read.append(inputs[0]))
    run.encode([text])
    mask = read[0].mask(0)
    packed = batch["packed"]
    if not any(torch.equal(part, mask) for row in range(len(packed))
               for part in parts(packed.mask(row))):
        broken('no row of batch["packed"] has the mask under which evaluations read its text: all '
               "tokens, or with causal = True all earlier ones. The numbers of the evaluations "
               "would be those of another model. For a sliding window, train with --window.")


def parts(mask):
    """Yield the mask of every part of a row that sees nothing else of it, (n, n) bool each."""
    seen = mask | torch.eye(len(mask), dtype=torch.bool)
    for _ in range(len(mask).bit_length()):  # what a token depends on after several layers
        seen = (seen.float() @ seen.float()) > 0
    for index in seen.unique(dim=0):
        yield mask[index][:, index]


def test_a_step_has_a_finite_loss_and_every_weight_a_gradient_unless_it_is_frozen(objective):
    run = start(objective)
    names = set()
    for step in range(3):
        loss, terms = run.objective(*run.make_batch(step))
        names.add(tuple(terms))
        for name, value in {"the loss": loss.detach(), **terms}.items():
            if value.shape != () or not value.isfinite() or value.requires_grad:
                broken(f"{name} is not one finite number without a gradient. forward returns the "
                       "loss () and {term: ()}, each term with .detach().")
        loss.backward()
    if len(names) > 1:
        broken(f"the terms differ from step to step: {names}. The log needs the same ones.")
    lacking = [name for name, weight in run.objective.named_parameters() if weight.requires_grad
               and (weight.grad is None or not weight.grad.abs().sum())]
    if lacking:
        broken(f"{', '.join(lacking)}: no gradient. Training on several GPUs would fail. Use "
               "these weights in forward, or freeze them in __init__ with requires_grad_(False).")


def skip_if_parts_differ(run):
    """Skip an objective whose loss on a part of a batch is not its part of the loss."""
    if any("BatchNorm" in type(module).__name__ for module in run.objective.modules()):
        pytest.skip("not promised: BatchNorm has statistics of one micro-batch of one process")
    before = torch.get_rng_state()
    run.objective(*run.make_batch(0))
    if not torch.equal(torch.get_rng_state(), before):
        pytest.skip("not promised: forward draws new random numbers for each part of a batch")


def test_micro_batches_train_as_one_batch(objective):
    with lowest_draws():
        runs = [start(objective, accumulate=count) for count in (1, 4)]
        if runs[0].data.batches.uses_in_batch_negatives:
            pytest.skip("not promised: a micro-batch has fewer in-batch negatives")
        skip_if_parts_differ(runs[0])
        found = [run.train_step(run.make_batch(0), run.objective.train()) for run in runs]
    # Adam and clipping would hide a factor of the gradient.
    for name in ("loss", "grad_norm"):
        one, two = (metrics[name].item() for metrics in found)
        if not abs(one - two) <= 1e-4 * abs(one):
            broken(f"--accumulate 4 changes the {name} from {one:.6f} to {two:.6f}. Divide a sum "
                   'over tokens by batch["loss_denominators"], as Mlm does. If the loss compares '
                   "the rows of a batch, let uses_in_batch_negatives return True.")


def test_a_run_that_is_stopped_and_resumed_has_the_weights_of_an_uninterrupted_one(objective):
    more = dict(steps=4, dropout=0.1)
    whole = start(objective, out="whole", **more)
    list(whole.steps())
    stopped = start(objective, out="parts", **more)
    for record in stopped.steps(every=1):
        if record["step"] == 2 and "loss" in record:
            break
    resumed = start(objective, out="parts", **more)
    assert resumed.step == 2
    list(resumed.steps())
    error, name = farthest(weights(whole), weights(resumed))
    if error:
        broken(f"a run that is stopped at step 2 and resumed ends with other weights ({name} "
               f"differs by {error:.1g}). What the loss depends on must be a parameter or a "
               "buffer: self.register_buffer(name, tensor), not a plain attribute.")


# ---- two processes


def one_of_two(rank, folder, objectives):
    os.chdir(folder)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    for number, objective in enumerate(objectives):
        meet_in(f"{folder}/{number}", rank)
        try:
            with lowest_draws():
                run = start(objective)
                list(run.steps())
            if rank == 0:
                torch.save(weights(run), f"{number}.pt")
        except (Exception, pytest.fail.Exception) as error:  # its test fails with this
            Path(f"{number}.txt").write_text(f"{type(error).__name__}: {error}")
        leave_processes()


@pytest.fixture(scope="module")
def two(request, tmp_path_factory):
    """Return {objective: file of the weights that two processes trained}."""
    objectives = objectives_of(request.config)
    folder = tmp_path_factory.mktemp("two")
    write_pairs(folder / "pairs.tsv", 400, columns_of(8))
    start_processes(one_of_two, folder, objectives)
    return {objective: folder / f"{number}.pt" for number, objective in enumerate(objectives)}


def test_two_processes_train_as_one_with_twice_the_batch(objective, two):
    with lowest_draws():
        run = start(objective, batch=16)
        skip_if_parts_differ(run)
        list(run.steps())
    if not two[objective].exists():
        broken(f"two processes stop: {two[objective].with_suffix('.txt').read_text()[:500]}")
    # The bias of the keys has gradient 0, and Adam scales up its rounding error.
    found = {name: weight for name, weight in weights(run).items() if not name.endswith("qkv.bias")}
    error, name = farthest(found, torch.load(two[objective]))
    if error > 1e-4:
        broken(f"two processes train other weights than one with twice the batch ({name} differs "
               f"by {error:.1g}). If the loss compares rows, gather them first: "
               "all_gather_with_grad(embeddings).")
