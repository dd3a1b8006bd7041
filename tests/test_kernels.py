"""The Triton kernels against the dense float64 definition: in Triton's interpreter, or on a GPU if
there is one (`-m gpu`, then bfloat16 too)."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_model import LAYOUTS, oracle, segment, visible
from test_objectives import SHAPE, batch_of, build
from torch._dynamo.testing import CompileCounter

import kernels
from data import Packed, change_each
from kernels import attention, schedule
from kernels.schedule import TILES
from model import DECODER, Model, ModelConfig, set_attention
from objectives import OBJECTIVES

ROOT = Path(__file__).parent.parent
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
# The rows of the table of tiles that fit this GPU; the interpreter runs all.
GPUS = {"other", "9.0"}
if DEVICE.type == "cuda" and torch.cuda.get_device_capability() != (9, 0):
    GPUS = {"other"}
LIMIT = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
SMALL = TILES["other", 4, 64][0]
NONE_LOCAL = SMALL._replace(local=(0, 4, 4))  # every row takes the general path
SHARED = "prefix, answer, isolated segment"


def plan_of(key_ranges, group_size=1, tiles=SMALL):
    plan = schedule.plan(torch.as_tensor(key_ranges).numpy(), group_size, tiles, tiles)
    return change_each(plan, lambda x: x.to(DEVICE))


APART = [segment(5), segment(3, True, (0, 5)), segment(4), segment(3, True, (0, 5))]


EVERY = {name: Packed.of_segments(rows) for name, rows in LAYOUTS.items()}


# ---- the schedule


def assert_visits_once(table, local, seen):
    """Assert that every visible pair is visited once and no pair twice."""
    times = np.zeros(seen.shape)
    for first, last in local:
        times[first:last, first:last] += 1
    for first, last, low, high, low2, high2, _ in table:
        times[first:last, low:high] += 1
        times[first:last, low2:high2] += 1
    assert times.max() <= 1 and (times[seen] == 1).all()


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("group_size", [1, 3, 4])
@pytest.mark.parametrize("tiles", [
    SMALL, NONE_LOCAL, TILES["9.0", 2, 64][1],
    SMALL._replace(local=(0, 4, 4), forward=(16, 8, 4, 2), keys=(8, 16, 4, 2))])
def test_a_plan_visits_every_visible_pair_once(name, tiles, group_size):
    key_ranges = EVERY[name].key_ranges
    plan = plan_of(key_ranges, group_size, tiles)
    seen = visible(key_ranges).numpy()
    assert np.array_equal(visible(plan.query_ranges).cpu(), seen.T)
    assert plan.two == (key_ranges[:, 2] < key_ranges[:, 3]).any()
    local, queries, keys = (table.tolist() for table in plan[1:4])
    assert_visits_once(queries, local, seen)
    assert_visits_once(keys, local, seen.T)
    for blocks, size in ((queries, tiles.forward[0] // group_size), (keys, tiles.keys[0]),
                         (local, tiles.local[0])):
        assert all(0 < last - first <= size for first, last, *_ in blocks)


def random_row(rng):
    """Return segments of random lengths and kinds, of which neighbors see a part of the first."""
    sizes = rng.integers(1, 90, rng.integers(1, 6))
    followers = rng.integers(1, 6, 2)
    prefix = (0, rng.integers(1, sizes[0] + 1))
    return [segment(n, rng.random() < 0.6, prefix if min(followers) <= i < max(followers) else None)
            for i, n in enumerate(sizes)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("group_size", [1, 3])
def test_the_core_of_a_block_is_what_all_its_tokens_see(seed, group_size):
    rng = np.random.default_rng(seed)
    packed = Packed.of_segments([random_row(rng) for _ in range(2)])
    tiles = NONE_LOCAL._replace(forward=(24, 8, 4, 2), keys=(8, 24, 4, 2))
    plan = plan_of(packed.key_ranges, group_size, tiles)
    seen = visible(packed.key_ranges).numpy()
    for table, mask in ((plan.queries, seen), (plan.keys, seen.T)):
        assert_visits_once(table.tolist(), [], mask)
        for first, last, low, high, _, _, core in table.tolist():
            assert low <= core <= high and mask[first:last, low:core].all()


@pytest.mark.parametrize("make, message", [
    (lambda: plan_of([[0, 3, 0, 0]]), "leaves the line of 1"),
    (lambda: plan_of([[0, 2, 0, 0], [0, 1, 0, 0]]), "segments and prefixes"),
    (lambda: plan_of([[0, 1, 0, 0], [0, 0, 0, 0]]), "segments and prefixes"),
    (lambda: plan_of([[0, 1, 1, 2], [1, 2, 0, 0]]), "segments and prefixes"),
    (lambda: plan_of([[0, 1, 0, 0]], 64), "64 query heads"),
    (lambda: schedule.choose_tiles((9, 0), 32, 8), "numbers have 8 bytes"),
    (lambda: Packed.of_segments([APART]).plan(("triton", 1, 32, 4)),
     "not next to each other.*use --attention auto or sdpa"),
    (lambda: attention.attention(torch.zeros(96, 4).T, 1, 1, None, None), "make it contiguous"),
    (lambda: set_attention(Model(ModelConfig(width=48, heads=2)), "triton", DEVICE, 4), "not 24"),
    (lambda: set_attention(Model(ModelConfig(attn_softcap=5.0)), "triton", DEVICE, 4), "cap")])
def test_what_the_kernels_cannot_do_is_refused_in_one_line(make, message):
    with pytest.raises(ValueError, match=f"^[^\n]*{message}[^\n]*$"):
        make()


# ---- the kernels


def both(packed, heads, kv_heads, size, dtype=torch.float32, tiles=SMALL):
    """Return our states and gradient, and those of the definition in float64, from a strided view
    and with memory that is filled with NaN."""
    torch.manual_seed(0)
    width = (heads + 2 * kv_heads) * size
    plan = plan_of(packed.key_ranges, heads // kv_heads, tiles)
    packed = packed.to(DEVICE)
    wide = torch.randn(len(packed.tokens), width + 16).to(DEVICE, dtype)
    qkv = wide[:, 8:8 + width].requires_grad_()
    weight = torch.randn(len(packed.tokens), heads * size).to(DEVICE, dtype)
    torch.use_deterministic_algorithms(True)  # then torch.empty returns NaN
    try:
        states = attention.attention(qkv, heads, kv_heads, packed.key_ranges, plan)
        ours = (states, *torch.autograd.grad(states, qkv, weight))
    finally:
        torch.use_deterministic_algorithms(False)
    exact = qkv.detach().double().requires_grad_()
    states = oracle(exact, heads, kv_heads, packed)
    return ours, (states, *torch.autograd.grad(states, exact, weight.double()))


def assert_close(results, dtype=torch.float32):
    """Compare relative to the largest value, or absolute below 1: a gradient can be exactly 0."""
    for ours, exact in zip(*results, strict=True):
        assert (ours.double() - exact).abs().max() <= LIMIT[dtype] * max(1, exact.abs().max())


@pytest.mark.parametrize("name, heads, tiles", [  # heads: of queries, of keys, their size
    *((name, (2, 1, 32), SMALL) for name in EVERY),
    *((name, (2, 1, 32), NONE_LOCAL) for name in ("bidirectional", SHARED)),
    *((SHARED, heads, SMALL) for heads in ((2, 2, 16), (8, 1, 16), (3, 1, 16), (4, 2, 64))),
    (SHARED, (2, 1, 128), TILES["other", 4, 128][0])])
def test_states_and_gradients_equal_the_definition(name, heads, tiles):
    assert_close(both(EVERY[name], *heads, tiles=tiles))


FULL = {
    "bidirectional": [segment(130)],
    "causal": [segment(130, True)],
    "prefix, answer": [segment(70, True), segment(60, True, (0, 70))],
    "far prefix": [segment(60), segment(20), segment(50, False, (0, 40))]}


@pytest.mark.parametrize("name", FULL)
def test_long_rows_equal_the_definition_though_many_of_their_tiles_have_no_mask(name):
    packed = Packed.of_segments([FULL[name]])
    plan = plan_of(packed.key_ranges, 2)
    for table, step in ((plan.queries, SMALL.forward[1]), (plan.keys, SMALL.keys[1] // 2)):
        _, _, low, high, low2, high2, core = table.T
        assert ((core - low) // step).sum() > 0.3 * ((high - low + high2 - low2) / step).sum()
    assert_close(both(packed, 2, 1, 32))


# The interpreter gets bfloat16 wrong.
@pytest.mark.parametrize("dtype", [
    torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize("row", [key for key in TILES if key[1] == 2 and key[0] in GPUS], ids=str)
@pytest.mark.parametrize("long", [False, True])
def test_every_row_of_the_table_agrees_within_the_precision_of_sixteen_bits(row, long, dtype):
    length = 140 if long else 70  # more than a block
    packed = Packed.of_segments([*LAYOUTS[SHARED], [segment(length, long)]])
    assert_close(both(packed, 2, 1, row[2], dtype, TILES[row][long]), dtype)


def test_the_same_input_gives_the_same_bits():
    for one, other in zip(*(both(EVERY[SHARED], 2, 1, 16)[0] for _ in range(2)), strict=True):
        assert torch.equal(one, other)


def test_the_operation_is_one_node_for_the_compiler():
    packed = Packed.of_segments(LAYOUTS[SHARED][1:])  # the short rows
    plan = plan_of(packed.key_ranges, 2)
    key_ranges = packed.key_ranges.to(DEVICE)
    qkv = torch.randn(len(packed.tokens), 4 * 16).to(DEVICE).requires_grad_()
    torch.library.opcheck(attention.forward,
                          (qkv, 2, 1, key_ranges, *plan[:5], plan.tiles.flat()))


def test_one_compilation_serves_every_number_of_tokens():
    counter = CompileCounter()
    attend = torch.compile(attention.forward, backend=counter, dynamic=True)
    for length in (20, 25, 30):
        packed = Packed.of([range(length)] * 3)
        plan = plan_of(packed.key_ranges, 2)
        qkv = torch.randn(3 * length, 4 * 16).to(DEVICE)
        attend(qkv, 2, 1, packed.key_ranges.to(DEVICE), *plan[:5], plan.tiles.flat())
    assert counter.frame_count == 1


# ---- two back ends


def results(objective_class, back_end):
    """Return loss terms and gradients of a tiny objective in which all heads have size 16."""
    shape = replace(SHAPE, width=32, heads=2)
    if objective_class.causal:
        shape = replace(shape, kv_heads=1, **DECODER)
    heads = {"mexma": dict(head_heads=2), "hybrid": dict(predictor_width=32, predictor_heads=2)}
    objective = build(objective_class, torch.float32, shape, **heads.get(objective_class.name, {}))
    objective.to(DEVICE)
    (layout, _), = set_attention(objective, back_end, DEVICE, 4)
    batch = change_each(batch_of(objective), lambda x: x.to(DEVICE))
    loss, terms = objective(batch)
    loss.backward()
    for packed in batch.values():  # no layer needs another plan
        assert not isinstance(packed, Packed) or packed.plans.keys() == {layout}
    return [*terms.values(), *(p.grad for p in objective.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_and_gradients_are_the_same_with_either_back_end(name):
    ours, theirs = (results(OBJECTIVES[name], back_end) for back_end in ("triton", "sdpa"))
    for one, other in zip(ours, theirs, strict=True):
        # On a GPU, PyTorch's kernel multiplies float32 as three products of TF32.
        assert (one - other).abs().max() <= (1e-4 if DEVICE.type == "cuda" else 1e-5)


def test_auto_falls_back_to_sdpa_for_a_mask_that_the_kernels_lack_with_one_warning(capsys):
    packed = Packed.of_segments([APART]).to(DEVICE)
    qkv = torch.randn(len(packed.tokens), 3 * 64).to(DEVICE, torch.float16)
    one, two, sdpa = (kernels.packed_attention(qkv, 2, 2, replace(packed, plans={}), back_end)
                      for back_end in ("auto", "auto", "sdpa"))
    assert torch.equal(one, sdpa) and torch.equal(two, sdpa)
    warning, = capsys.readouterr().err.splitlines()
    assert "warning: the Triton kernels do not support this mask" in warning
    # Masks that the kernels support do use them.
    plain = Packed.of([np.arange(1, 90)], causal=True).to(DEVICE)
    layout = kernels.layout_of("auto", 2, 2, 32, 2)
    assert isinstance(plain.within(89).plan(layout), schedule.Plan)
    assert not isinstance(plain.within(9).plan(layout), schedule.Plan)  # the window hides keys
    assert kernels.layout_of("auto", 2, 2, 32, 4) == "sdpa"  # no tensor cores in float32
    kernels.warn_once.cache_clear()


# ---- without a GPU


@pytest.mark.parametrize("words", ["9.0", "8.6 8.9 12.0 local_backward_kernel",
                                   "10.0 queries_kernel"])
def test_the_kernels_compile_for_a_gpu_that_is_not_here_without_spilling_registers(words):
    """Build the rows of one GPU, and for others the kernel that takes most of their shared memory.
    Without an argument the program builds all."""
    outside = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "tests/build.py", *words.split()], cwd=ROOT, env=outside,
                         capture_output=True, text=True, timeout=900)
    assert run.returncode == 0 and re.search(r"\d builds, 0 wrong", run.stdout), run.stdout
