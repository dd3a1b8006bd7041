"""The Triton kernels against the dense float64 definition: in Triton's interpreter, or on a GPU where there is one (`-m gpu`, bfloat16 too)."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from data import BadInput
from model import DECODER, Model, ModelConfig, Packed, View, each_tensor, set_attention
from objectives import OBJECTIVES

triton = pytest.importorskip("triton", reason="Triton is not installed")

from test_objectives import SPECIAL, examples  # noqa: E402

from kernels import attention, bench, schedule  # noqa: E402
from kernels.schedule import TILES  # noqa: E402

ROOT = Path(__file__).parent.parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
LIMIT = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
SMALL = TILES["other", 4, 64][0]
NONE_LOCAL = SMALL._replace(local=(0, 4, 4))                             # every row takes the general path


def moved(plan):
    return each_tensor(plan, lambda x: x.to(DEVICE))


def view(length, causal=False, shares=None):
    return View(np.zeros(length, np.int64), causal, shares)


LAYOUTS = {"lengths from one up": [[view(n)] for n in (1, 7, 3, 12, 1, 40, 5, 33, 2, 9)],
           "causal": [[view(n, True)] for n in (1, 9, 70, 2, 31)],
           "one token": [[view(1)]],
           "all of length one": [[view(1)] for _ in range(40)],
           "one long row": [[view(150)]],
           "prefix, answer, isolated view": [[view(n, True), view(m, True, (0, n - 1)), view(m, True)] for n, m in ((20, 30), (4, 3), (45, 20), (2, 1))],
           "far prefix": [[view(20, True), view(60), view(25, True, (0, 18))], [view(3), view(50), view(1, True, (0, 3))]],
           "views apart": [[view(3), view(50)], [view(2, True), view(2)]]}


def seen(rows):
    return Packed.views(rows).sees


def with_dead(sees):
    """Three dead tokens at the start of the line, between two of its rows, and at its end; the others see what they saw."""
    bounds, dead = schedule.groups(sees.numpy().astype(np.int64)), torch.zeros(3, 4, dtype=torch.int32)
    cut = bounds[len(bounds) // 2]
    moved = sees + torch.where(torch.arange(len(sees)) < cut, 3, 6).int()[:, None]
    moved[:, 2:] *= sees[:, 3:] > sees[:, 2:3]
    return torch.cat([dead, moved[:cut], dead, moved[cut:], dead])


def mask(intervals):
    place = np.arange(len(intervals))
    low, high, low2, high2 = np.asarray(intervals).T[..., None]
    return (low <= place) & (place < high) | (low2 <= place) & (place < high2)


def both(sees, heads, kv_heads, size, dtype=torch.float32, tiles=(SMALL, SMALL), seed=0):
    """-> our states and gradient, and the definition's in float64, from a strided view and over memory filled with NaN."""
    torch.manual_seed(seed)
    sees, width = torch.as_tensor(sees), (heads + 2 * kv_heads) * size
    plan = moved(schedule.plan(sees.numpy(), heads // kv_heads, *tiles))
    wide = torch.randn(len(sees), width + 16).to(DEVICE, dtype)
    qkv, weight = wide[:, 8:8 + width].requires_grad_(), torch.randn(len(sees), heads * size).to(DEVICE, dtype)
    torch.use_deterministic_algorithms(True)                             # what torch.empty returns is then NaN
    try:
        states = attention.attention(qkv, heads, kv_heads, sees.to(DEVICE), plan)
        ours = states, torch.autograd.grad(states, qkv, weight)[0]
    finally:
        torch.use_deterministic_algorithms(False)
    exact = qkv.detach().double().requires_grad_()
    states = attention.reference(exact, heads, kv_heads, sees.to(DEVICE))
    return ours, (states, torch.autograd.grad(states, exact, weight.double())[0])


def assert_close(results, dtype=torch.float32):
    """Relative to the largest value, and absolute below 1: a gradient that is 0 by definition has no size of its own."""
    for ours, exact in zip(*results):
        assert (ours.double() - exact).abs().max() <= LIMIT[dtype] * max(1, exact.abs().max())


# ---------------------------------------------------------------------------------------------------------------------- the mask

def collated():
    """Every Packed that an objective's collate makes, by name."""
    small = dict(hybrid=dict(min_keep=2))
    more = {"llm-jepa": [dict(mode="two-row"), dict(mode="three-row"), dict(predictors=3, reverse=True)],
            "bepa": [dict(cls_view="masked"), dict(packing="separate")]}
    for kind in OBJECTIVES:
        for change in [{}, *more.get(kind.name, [])]:
            batch = kind.collate(examples(kind), np.random.default_rng(0), kind.Config(**small.get(kind.name, {}), **change), SPECIAL)
            for name, value in batch.items():
                if hasattr(value, "sees"):
                    yield " ".join([kind.name, name, *map(str, change.values())]), value.sees


EVERY = {name: seen(rows) for name, rows in LAYOUTS.items()} | dict(collated())
EVERY["dead tokens"] = with_dead(EVERY["prefix, answer, isolated view"])
EVERY["dead tokens in far rows"] = with_dead(EVERY["far prefix"])
EVERY["nothing but dead tokens"] = torch.zeros(5, 4, dtype=torch.int32)
every = pytest.mark.parametrize("name", EVERY)


@every
def test_the_queries_that_see_a_key_are_the_transpose_of_the_keys_that_a_query_sees(name):
    sees = schedule.tidy(EVERY[name].numpy())
    assert (mask(schedule.columns(sees)) == mask(sees).T).all()


@every
@pytest.mark.parametrize("tiles", [SMALL, NONE_LOCAL, TILES["9.0", 2, 64][1], SMALL._replace(local=(0, 4, 4), forward=(16, 8, 4, 2), keys=(8, 16, 4, 2))])
@pytest.mark.parametrize("share", [1, 3, 4])
def test_a_schedule_visits_every_visible_pair_exactly_once(name, tiles, share):
    sees = schedule.tidy(EVERY[name].numpy())
    plan, visible = schedule.plan(sees, share, tiles, tiles), mask(sees)
    for table, transposed in ((plan.queries, False), (plan.keys, True)):
        times, size = np.zeros(visible.shape, int), tiles.keys[0] if transposed else tiles.forward[0] // share
        for first, last in plan.local.tolist():
            assert 0 < last - first <= tiles.local[0]
            times[first:last, first:last] += 1
        for first, last, low, high, low2, high2 in table.tolist():
            assert 0 < last - first <= size
            times[first:last, low:high] += 1
            times[first:last, low2:high2] += 1
        assert times.max() <= 1 and (times[visible.T if transposed else visible] == 1).all()
        covered = np.concatenate([np.arange(*block) for block in plan.local.tolist() + table[:, :2].tolist()])
        assert sorted(covered) == list(range(len(sees)))                 # each token has its gradients written once


def test_groups_are_the_smallest_stretches_that_nothing_sees_across():
    for name, sees in EVERY.items():
        sees = schedule.tidy(sees.numpy())
        visible, cuts = mask(sees), [0, *(p for p in range(1, len(sees)) if not mask(sees)[:p, p:].any() and not mask(sees)[p:, :p].any()), len(sees)]
        assert schedule.groups(sees).tolist() == cuts, name
        assert visible.shape == (len(sees), len(sees))


def test_long_blocks_come_first():
    plan = schedule.plan(seen([[view(300, True)], [view(90)]]).numpy(), 1, NONE_LOCAL, NONE_LOCAL)
    work = (plan.queries[:, 3] - plan.queries[:, 2] + 31) // 32
    assert (work.diff() <= 0).all() and work[0] == 10


def test_a_mask_that_is_not_of_this_form_is_refused():
    apart = Packed.views([[view(5), view(3, True, (0, 5)), view(4), view(3, True, (0, 5))]])
    with pytest.raises(ValueError, match="side by side"):
        schedule.plan(apart.sees.numpy(), 1, SMALL, SMALL)
    with pytest.raises(ValueError, match="leaves the line"):
        schedule.plan(np.array([[0, 3, 0, 0]]), 1, SMALL, SMALL)
    with pytest.raises(ValueError, match="64 query heads"):
        schedule.plan(np.array([[0, 1, 0, 0]]), 64, SMALL, SMALL)


# --------------------------------------------------------------------------------------------------------------------- the kernels

@every
def test_states_and_gradients_equal_the_definition_on_every_layout(name):
    assert_close(both(EVERY[name], 2, 1, 32))


@pytest.mark.parametrize("name", ["lengths from one up", "prefix, answer, isolated view", "dead tokens"])
def test_rows_that_would_be_local_agree_on_the_general_path(name):
    assert_close(both(EVERY[name], 2, 2, 32, tiles=(NONE_LOCAL, NONE_LOCAL)))


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 2), (4, 1), (8, 1), (3, 1)])
def test_head_sizes_and_shared_heads_agree(size, heads, kv_heads):
    assert_close(both(EVERY["dead tokens"], heads, kv_heads, size, tiles=TILES["other", 4, 64 if size <= 64 else 128]))


@pytest.mark.parametrize("row", [key for key in TILES if key[1] == 2], ids=str)
@pytest.mark.parametrize("long", [False, True])
def test_every_row_of_the_table_agrees(row, long):
    rows = LAYOUTS["lengths from one up"] + [[view(n, long)] for n in (140, 66)] + LAYOUTS["far prefix"]
    assert_close(both(seen(rows), 2, 1, 32, tiles=(TILES[row][long],) * 2))


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)    # the interpreter gets bfloat16 wrong
@pytest.mark.parametrize("name", ["lengths from one up", "far prefix", "dead tokens"])
@pytest.mark.parametrize("size", [32, 128])
def test_sixteen_bits_agree_within_their_precision(dtype, name, size):
    assert_close(both(EVERY[name], 4, 2, size, dtype, TILES["other", 2, 64 if size <= 64 else 128]), dtype)


def test_the_same_input_gives_the_same_bits():
    for ours, again in zip(*(both(EVERY["dead tokens"], 4, 2, 32)[0] for _ in range(2))):
        assert torch.equal(ours, again)


def test_a_dead_token_gives_zeros_and_takes_no_gradient():
    sees = EVERY["dead tokens"]
    (states, gradient), _ = both(sees, 4, 2, 32)
    dead = (sees == 0).all(1).to(DEVICE)
    assert dead.sum() == 9 and not states[dead].any() and not gradient[dead].any() and torch.isfinite(gradient).all()


def test_what_a_token_may_not_see_does_not_change_it():
    sees, changed = EVERY["far prefix"], 30
    torch.manual_seed(0)
    qkv, plan = torch.randn(len(sees), 8 * 32).to(DEVICE), moved(schedule.plan(sees.numpy(), 2, SMALL, SMALL))
    before = attention.attention(qkv, 4, 2, sees.to(DEVICE), plan)
    qkv[changed] += 1
    after = attention.attention(qkv, 4, 2, sees.to(DEVICE), plan)
    hidden = torch.from_numpy(~mask(sees.numpy())[:, changed])
    assert torch.equal(before[hidden], after[hidden]) and (before[~hidden] != after[~hidden]).any(1).all()


def test_the_operation_is_one_node_for_the_compiler():
    sees = EVERY["prefix, answer, isolated view"]
    plan = moved(schedule.plan(sees.numpy(), 2, SMALL, SMALL))
    qkv = torch.randn(len(sees), 8 * 32, device=DEVICE, requires_grad=True)
    arguments = (qkv, 4, 2, sees.to(DEVICE), *plan[:5], plan.tiles.flat())
    torch.library.opcheck(attention.forward, arguments, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
    run = lambda qkv: attention.attention(qkv * 2, 4, 2, sees.to(DEVICE), plan) * 2
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for ours, exact in zip(*((states, *torch.autograd.grad(states.sum(), qkv)) for states in (compiled(qkv), run(qkv)))):
        assert torch.equal(ours, exact)


def test_a_line_whose_heads_are_not_neighbours_in_memory_is_refused():
    with pytest.raises(ValueError, match="make it contiguous"):
        attention.attention(torch.zeros(3 * 32, 4, device=DEVICE).T, 1, 1, None, None)


# ------------------------------------------------------------------------------------------------------------------ two back ends

def losses(kind, back_end, steps=3):
    """Loss terms and weights of a few steps of a tiny objective."""
    small = {"mexma": dict(head_layers=1, head_heads=2, head_hidden=32), "hybrid": dict(predictor_width=64, predictor_layers=1, predictor_heads=2, min_keep=2)}
    torch.manual_seed(0)
    shape = replace(ModelConfig(vocab=60, width=64, layers=1, heads=2, kv_heads=1 if kind.causal else 0, hidden=64, dropout=0.0), causal=kind.causal,
                    head=kind.head, pool=kind.pool, **(DECODER if kind.causal else {}))
    objective = kind(Model(shape), kind.Config(**small.get(kind.name, {}))).to(DEVICE)
    needs = set_attention(objective, back_end, torch.device(DEVICE), 4)
    assert needs == {"sdpa"} if back_end == "sdpa" else needs == {(2 if kind.causal else 1, 32, 4)}
    optimizer, found = torch.optim.SGD([p for p in objective.parameters() if p.requires_grad], 0.1), []
    for step in range(steps):
        batch = objective.collate(examples(kind, seed=step), np.random.default_rng(step), objective.config, SPECIAL)
        for packed in (value for value in batch.values() if hasattr(value, "sees")):
            for need in needs:
                packed.plan(need, torch.device(DEVICE))
        batch = {name: value.to(DEVICE) if hasattr(value, "to") else value for name, value in batch.items()}
        loss, terms = objective(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        objective.after_step((step + 1) / steps)
        found.append([float(value.detach()) for value in (loss, *terms.values())])
        assert all(set(value.plans) == needs for value in batch.values() if hasattr(value, "sees"))           # no layer had to make one
    return found


@pytest.mark.parametrize("kind", OBJECTIVES, ids=lambda kind: kind.name)
def test_training_takes_the_same_steps_with_either_back_end(kind):
    assert np.abs(np.array(losses(kind, "triton")) - np.array(losses(kind, "sdpa"))).max() <= 1e-5


def test_auto_is_sdpa_on_a_cpu_and_the_kernels_on_a_gpu_for_the_head_sizes_they_have():
    model = Model(ModelConfig(width=64, heads=2))
    assert set_attention(model, "auto", torch.device("cpu"), 4) == {"sdpa"} == set_attention(model, "sdpa", torch.device("cpu"), 4)
    assert set_attention(model, "triton", torch.device(DEVICE), 2) == {(1, 32, 2)} and model.blocks[0].back_end == "triton"
    with pytest.raises(BadInput, match="heads of size 24 are none of its sizes 16, 32, 64, 128"):
        set_attention(Model(ModelConfig(width=48, heads=2)), "triton", torch.device(DEVICE), 4)


def test_a_line_brings_its_plans_along_and_makes_each_once():
    packed = Packed.views(LAYOUTS["far prefix"])
    plan = packed.plan((1, 32, 4))
    assert packed.plan((1, 32, 4)) is plan and packed.plans.keys() == {(1, 32, 4)} and packed.to("cpu").plans.keys() == {(1, 32, 4)}
    assert packed.to("meta").plans[1, 32, 4].queries.device.type == "meta"
    with pytest.raises(BadInput, match="--attention sdpa can"):
        Packed.views([[view(5), view(3, True, (0, 5)), view(4), view(3, True, (0, 5))]]).plan((1, 32, 4))


@pytest.mark.parametrize("shape", [{}, dict(DECODER, norm_place="both", qk_norm="whole", qkv_bias=True, stretch=(8.0, 1.0, 4.0, 64))])
def test_a_whole_model_compiles_as_one_graph(shape):
    packed = Packed.views(LAYOUTS["lengths from one up"]).to(DEVICE)
    model = Model(ModelConfig(width=64, heads=2, layers=1, hidden=64, dropout=0.0, **shape)).to(DEVICE)
    set_attention(model, "triton", torch.device(DEVICE), 4)
    packed.plan((1, 32, 4))
    assert torch.allclose(torch.compile(model, fullgraph=True, backend="aot_eager")(packed), model(packed), atol=1e-5)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """A command for a tiny run on a tiny file."""
    file = tmp_path_factory.mktemp("pairs") / "pairs.tsv"
    words = "sun moon tree river stone bird fish cloud road house".split()
    file.write_text("a\tb\n" + "".join(f"{words[i // 10]} {words[i % 10]}\t{words[i % 10]} {words[i // 10]} {i}\n" for i in range(99)), encoding="utf-8")
    return ["--objective", "contrastive", "--data", str(file), "--cache", str(file.parent / "cache"), "--vocab", "300", "--width", "32", "--layers", "1",
            "--heads", "2", "--hidden", "32", "--batch", "4", "--eval-limit", "10", "--log-every", "1"]


def test_the_flag_chooses_and_a_resumed_run_may_choose_anew(flags, tmp_path, capsys):
    more = [*flags, "--device", DEVICE, "--precision", "float32", "--dropout", "0"]
    for back_end in ("triton", "sdpa"):
        assert train.main([*more, "--out", str(tmp_path / back_end), "--steps", "2", "--attention", back_end]) == 0
    assert "attention: triton for heads of size 16" in capsys.readouterr().out
    one, two = ([record["loss"] for record in train.read_log(tmp_path / back_end) if "loss" in record] for back_end in ("triton", "sdpa"))
    assert len(one) == 2 and np.abs(np.array(one) - np.array(two)).max() <= 1e-5
    assert train.main([*more, "--out", str(tmp_path / "triton"), "--steps", "3"]) == 0


def test_triton_is_refused_in_one_line_where_it_cannot_run(flags, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert train.main([*flags, "--out", str(tmp_path / "run"), "--device", "cpu", "--attention", "triton"]) == 2
    assert capsys.readouterr().err == "error: attention triton cannot be used here: Triton needs a CUDA GPU, and the device is cpu; --attention auto chooses\n"
    assert train.main([*flags, "--out", str(tmp_path / "run"), "--attention", "flash"]) == 2 and not (tmp_path / "run").exists()
    assert "attention is 'flash': choose one of auto, sdpa, triton" in capsys.readouterr().err


def test_the_project_trains_without_triton_and_says_so_when_it_is_asked_for(flags, tmp_path):
    code = "import sys; sys.modules['triton'] = None; import train; sys.exit(train.main(sys.argv[1:]))"
    run = lambda *more: subprocess.run([sys.executable, "-c", code, *flags, "--steps", "2", "--out", str(tmp_path / "run"), *more], cwd=ROOT,
                                       capture_output=True, text=True, timeout=300)
    refused = run("--attention", "triton")
    assert refused.returncode == 2 and "Triton is not installed here" in refused.stderr and len(refused.stderr.splitlines()) == 1
    trained = run()
    assert trained.returncode == 0, trained.stderr


# ------------------------------------------------------------------------------------------------------------------ without a GPU

def test_short_rows_waste_a_third_of_what_blocks_of_128_do():
    """Computed over visible pairs. The general path alone repeats the prototype's counts (3.65, 2.65, 1.72, 1.00, 1.14 at 64 x 32) or betters them."""
    names = {"sentences 8-40": (2.93, 13.08, 3.71), "MEXMA encoder, mean 35": (2.10, 7.08, 2.26), "BERT-JEPA pairs, mean 90": (1.45, 3.57, 1.44),
             "hybrid, 512": (1.00, 1.00, 1.00), "causal documents, mean 600": (1.27, 1.40, 1.13)}
    found, shapes, general = bench.tiles(), bench.shapes(), TILES["9.0", 2, 64][0]._replace(local=(0, 4, 4))
    for name, (ours, blocks, alone) in names.items():
        assert found[name]["ours, forward and dq"] == pytest.approx(ours, abs=0.02) and found[name]["blocks of 128"] == pytest.approx(blocks, abs=0.02)
        plan = schedule.plan(shapes[name].packed.sees.numpy(), 1, general, general)
        assert schedule.computed(plan, 1)["forward"] / shapes[name].packed.pairs() == pytest.approx(alone, abs=0.02), name


def test_the_benchmark_says_what_it_did_not_measure(tmp_path):
    run = subprocess.run([sys.executable, "kernels/bench.py", "--only", "tiles,attention", "--out", str(tmp_path)], cwd=ROOT, capture_output=True,
                         text=True, timeout=300, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert run.returncode == 0, run.stderr[-2000:]
    assert "Attention, bfloat16: not yet measured (no CUDA GPU)" in (tmp_path / "bench.md").read_text(encoding="utf-8")
    found = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert found["attention"].startswith("not yet measured") and len(found["targets"]) > 25
    assert {row["met"] for row in found["targets"].values()} == {"not yet measured"}


def test_the_table_of_targets_judges_what_was_measured_on_a_gpu_and_nothing_else():
    from kernels import bench
    times = lambda **rows: {name.replace("_", " "): {"times ours": value} for name, value in rows.items()}
    peers = {"FlexAttention, blocks of 128": {"times ours": 2.5}, "FlexAttention, blocks of 64": {"times ours": 1.2}, "torch varlen": {"failed": "no"}}
    found = {"machine": {"gpu": True}, "attention": {bench.MEXMA_SHAPE: {"forward": peers, "backward": peers}},
             "schedule": {bench.MEXMA_SHAPE: {"ms": 0.25}}, "rest": {"vocabulary": {"ours: in chunks": {"ms": 13.0, "GB over weights and gradients": 0.7}}},
             "steps": {"MEXMA": times(four=1.0), "LLM-JEPA, NL-RX, large batch": {"ours: next-token prediction alone": {"times ours": 0.8}}}}
    table = bench.targets(found)
    verdict = lambda start: next((row["measured"], row["met"]) for name, row in table.items() if name.startswith(start))
    assert verdict("A1") == (1.2, "no") and verdict("A8") == (0.25, "yes") and verdict("B3") == (0.7, "yes") and verdict("D1") == (13.0, "no")
    assert verdict("B6") == (1.25, "yes") and verdict("A3") == verdict("B1") == verdict("C1") == ("not yet measured",) * 2
    assert bench.targets(found | {"machine": {"gpu": False}})["A1 forward, MEXMA sentences, FlexAttention's best over ours"]["met"] == "not yet measured"


def test_every_row_of_the_table_compiles_without_spilling_registers():
    """The tightest head size and GPU of each row; `python kernels/build.py` builds them all."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "kernels/build.py", "--brief"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0 and re.search(r"\d\d builds, 0 wrong", run.stdout), run.stdout + run.stderr[-2000:]
