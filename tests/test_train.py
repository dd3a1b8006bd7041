"""Settings, schedule, the loop, exact resume, kills, refusals, and training from Python.

Other trainers resumed wrongly, and silently; most of these reports are of 2026. Here the examples
of a step are a pure function of (seed, step, rank), so nothing is skipped or counted, and a
checkpoint has all else that a step depends on. In brackets: what is tested here or in that file.

- A second resume restarts the data: torchtitan 3907 [test_every_kill_minus_nine_...; test_data.py:
  test_a_batch_depends_on_seed_step_and_rank_alone].
- After a resume in epoch n the data has the order of epoch 0: accelerate 4071 [test_data.py:
  test_every_row_comes_once_an_epoch_in_a_new_order].
- Skipping batches moves the restored random numbers: transformers 46628 [nothing is skipped].
- All later epochs are shorter: datasets 7447 [an epoch has no position that could be saved].
- The optimizer's moments are silently zero: KempnerForge 115; a later call of seed() overwrites the
  restored random numbers: ms-swift 9935 [test_an_objective_trains_..._resumes_bit_for_bit].
- One process ends while the others wait for it: torchtitan 3065 [test_attacks.py:
  test_whichever_of_two_processes_is_killed_...].
- The same seed gives other weights on a GPU: stevenybuilder/nextlat_forgetting [not tested: weights
  are equal to the last bit on CPUs alone].
"""

import contextlib
import functools
import json
import math
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_evaluate import write_rows
from test_house import ROOT, SHAPE, SMALL, write_pairs

import corpora
import evaluate
import kernels
import model
import train
from base import processes
from base.common import BadInput, file_hash, run_program, usable_device
from base.optimizer import learning_rate
from base.tokenizer import Tokenizer
from corpora.overlap import text_hash
from harness import runs, screen, settings
from model import ModelConfig
from objectives import OBJECTIVES, Contrastive

EXTRA = {  # what else must be small
    "mexma": dict(head_layers=1, head_heads=2, head_hidden=16),
    "hybrid": dict(predictor_width=16, predictor_layers=1, predictor_heads=2)}
every = pytest.mark.parametrize("name", OBJECTIVES)


@pytest.fixture(autouse=True)
def pairs(tmp_path):
    write_pairs(tmp_path / "pairs.tsv", 400)


def small_settings(objective, **more):
    """Return the settings of a small run. The model of --init brings its own shape."""
    return SMALL | ({} if "init" in more else SHAPE) | EXTRA.get(objective, {}) | more


def flags(given):
    names = {name: name.replace("_", "-") for name in given}
    return [{True: f"--{names[name]}", False: f"--no-{names[name]}"}[value]
            if isinstance(value, bool) else f"--{names[name]}={value}"
            for name, value in given.items()]


def command(objective, out="run", **more):
    """Return the words of a command line."""
    return ["--objective", objective, *flags(small_settings(objective, out=out, **more))]


def started(objective, out=None, **more):
    return train.start(objective, out=out, **small_settings(objective, **more))


@pytest.fixture
def refused(refused):
    """refused(words): return the error line of train.py."""
    return functools.partial(refused, train.main, printed=None)


def losses(run):
    return [record["loss"] for record in run.steps(every=1) if "loss" in record]


def checkpoint(folder):
    return torch.load(f"{folder}/train.pt", weights_only=True)


def weights(folder):
    return torch.load(f"{folder}/model.pt", weights_only=True)["weights"]


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


# Bit for bit, in whatever dictionaries and lists.
assert_equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


def assert_same_run(one, two):
    """Assert that weights, optimizer, random state and counts are the same bit for bit."""
    first, second = checkpoint(one), checkpoint(two)
    for name in ("weights", "optimizer", "random", "step", "tokens", "untrained"):
        assert_equal(first[name], second[name], msg=name)
    assert_equal(weights(one), weights(two))


def stop(words, step, number=signal.SIGTERM):
    """Run train.py and send it a signal in the middle of a step."""
    whole = train.Run.train_step

    def interrupted(run, *arguments):
        if run.step + 1 == step:
            signal.raise_signal(number)
        return whole(run, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Run, "train_step", interrupted)
        assert train.main(words) == 128 + number


# ---- schedule and optimizer


@pytest.mark.parametrize("given, rates", [
    (dict(schedule="cosine"), {0: 0.2, 9: 2, 10: 2, 55: 1, 99: 1 + math.cos(math.pi * 89 / 90)}),
    (dict(schedule="linear"), {0: 0.2, 9: 2, 10: 2, 55: 1, 99: 2 / 90}),
    (dict(schedule="constant"), {0: 0.2, 9: 2, 10: 2, 55: 2, 99: 2}),
    # MEXMA's paper: from 1e-5, only rising.
    (dict(steps=300, lr=1e-4, warmup=1.0, lr_start=0.1), {0: 1e-5 + 9e-5 / 300, 299: 1e-4})])
def test_the_learning_rate_is_a_closed_form_of_the_step(given, rates):
    config = settings.TrainConfig(**dict(steps=100, lr=2.0, warmup=0.1) | given)
    found = {step: learning_rate(step, config) for step in rates}
    assert found == pytest.approx(rates, rel=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_biases_norms_and_scalars_are_not_decayed(optimizer):
    run = started("hybrid", optimizer=optimizer, weight_decay=0.3)
    decayed = {p for group in run.optimizer.param_groups if group["weight_decay"]
               for p in group["params"]}
    assert decayed == {p for p in run.objective.parameters() if p.ndim == 2 and p.requires_grad}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_first_step_of_every_weight_has_the_size_that_its_optimizer_gives(optimizer):
    """Muon trains the matrices that are no embeddings, and AdamW the rest. Embeddings have a factor
    of the learning rate, also where they are the weights of the vocabulary, as in mexma."""
    # Without zero_init: where the output of a block is zero, its other matrices have no gradient.
    run = started("mexma", warmup=0, optimizer=optimizer, weight_decay=0, lr=1e-3, embedding_lr=8.0,
                  zero_init=False, ffn_dim=256, precision="float32")
    before = {name: p.detach().clone() for name, p in run.objective.named_parameters()}
    run.train_step(run.make_batch(0), run.objective)
    for name, p in run.objective.named_parameters():
        change = (p.detach() - before[name]) / 1e-3
        is_embedding = name.endswith(("embed.weight", "position_embedding.weight"))
        if optimizer == "muon" and p.ndim == 2 and not is_embedding:
            # An orthogonal matrix has singular values of 1; the update has 0.2 sqrt(longer side).
            size = torch.linalg.svdvals(change) / (0.2 * math.sqrt(max(p.shape)))
            assert 0.6 < size.median() < 1.3, name
        else:
            # The first step of Adam is the sign of the gradient, but of gradients near its epsilon.
            size = change.abs() / (8 if is_embedding else 1)
            assert (size[size > 0.5] - 1).abs().lt(0.02).float().mean() > 0.99, name
    assert run.config["embedding_lr"] == 8


def test_with_zero_init_an_encoder_starts_as_a_bag_of_its_embeddings():
    run = started("contrastive", zero_init=True, norm_position="pre", dropout=0.0)
    packed = run.make_batch(0)[0]["packed"]
    start, _ = run.model.embed_tokens(packed.tokens, packed.positions)
    assert torch.equal(run.model(packed), run.model.final_norm(start))
    run.train_step(run.make_batch(0), run.objective)
    assert all(block.mlp.down.weight.any() for block in run.model.blocks)
    assert run.config["model"]["zero_init"]


def test_gradient_checkpointing_keeps_fewer_numbers_and_changes_no_bit_of_a_step():
    weights, counts = [], []
    for on in (False, True):
        run = started("mexma", gradient_checkpointing=on)
        counts.append([])
        with torch.autograd.graph.saved_tensors_hooks(
                lambda x: counts[-1].append(x.numel()) or x, lambda x: x):
            run.train_step(run.make_batch(0), run.objective)
        weights.append(dict(run.objective.state_dict()))
    assert_equal(*weights)
    assert sum(counts[1]) < sum(counts[0])


# ---- settings


@pytest.mark.parametrize("words, value", [
    ("--obj mlm", "did you mean --objective?"), ("--max_length 8", "did you mean --max-length?"),
    ("--data a.tsv b.tsv", "commas between several"),
    ("--deepspeed x", "unknown flag --deepspeed: see"), ("--steps 0", "steps is 0"),
    ("--koleo-weight inf", "inf"), ("--preset nope", "'nope'"),
    ("--batch 10 --accumulate 3", "batch 10"), ("--batch 4 --accumulate 4", "batch 4"),
    ("--device cuda:77", "cuda:77"),
    ("--precision float16 --device cpu", "float16"), ("--vocab 7", "7"),
    ("--max-length 600 --max-positions 512", "max_length 600"),
    ("--langs en,xx", "xx"), ("--eval-data pairs.tsv --eval-limit 0", "same rows as --data"),
    ("--epochs 3", "did you mean --steps?"), ("--objective ntp --window 3", "window 3"),
    ("--temperature 0.1", "no effect without --align info_nce"),
    ("--objective mlm --pairs neighbours", "pairs neighbours"), ("--init nowhere", "nowhere"),
    ("--lora-rank 4", "add --init"), ("--preset finetune", "add --init"), ("--shard", "torchrun"),
    ("--init STARTS/mlm --width 32", "width 32"),
    ("--objective ntp --init STARTS/mlm", "needs a causal model"),
    ("--objective ntp --causal --init STARTS/ntp", "causal is for encoders"),
    ("--objective contrastive --causal", "add --init of one"),
    ("--objective contrastive --causal --init STARTS/mlm", "add --init of one"),
    ("--objective mlm --causal --init STARTS/ntp", "masks = True"),
    ("--objective contrastive --causal --window 8 --init STARTS/ntp", "for a bidirectional model"),
    ("--no-symmetrical", "add --align-views dirty"),
    ("--mask-first 0 --mask-second 0", "mask_first is 0, and mask_second is 0"),
    ("--objective mlm --max-length 1000000000", "a row would have 1000000002 tokens"),
    ("--warmup 2000", "warmup is 2000.0: it must be a fraction, from 0 to 1"),
    ("--out pairs.tsv/run", "pairs.tsv/run"),
    ("--out pairs.tsv", "(File exists)"), ("--help al", "choose from 'all'"),
    ("--langs en", "mlm; pairs: columns not read: de (not in --langs)"),
    ("--langs ,", "',' names nothing"), ("--eval-limit 1", "has 1 rows to evaluate"),
    ("--max-length 1", "use a smaller --batch or a larger --max-length")])
def test_a_mistake_is_one_line_that_names_the_value_and_leaves_nothing(words, value, starts,
                                                                       refused):
    words = [word.replace("STARTS", str(starts)) for word in words.split()]
    given = flags(SMALL | ({} if "--init" in words else SHAPE))
    assert value in refused([*given, "--out=run", "--steps=1", *words], printed="")
    assert not Path("run").exists()


def test_what_evaluation_data_cannot_measure_is_said():
    write_rows("same.tsv", ["a cat\teine Katze"] * 30)
    notes = [note for name in ("mlm", "mexma")
             for note in started(name, eval_data="same.tsv").data.notes]
    assert [note for note in notes if "no validation loss" in note and "has only 1 rows" in note]


@pytest.mark.parametrize("words, expected", [
    ("--objective mexma", dict(koleo_weight=1.0)),
    ("--koleo-weight 0.01 --lr 0.5", dict(koleo_weight=0.01, lr=0.5)),
    # From random weights MEXMA's losses would collapse.
    ("--size base", dict(head_layers=1, align="cosine", koleo_weight=1.0, lr=1e-4, max_length=200,
                         steps=300_000, eval_every=15_000, save_every=6_000)),
    ("--size base --preset paper", dict(head_layers=6, align="mse", koleo_weight=0.01)),
    ("--preset paper", dict(layers=3, head_layers=6, align="mse", steps=300_000, eval_every=150)),
    ("--size small --eval-every 7", dict(layers=6, align="cosine", batch=256, steps=20_000,
                                         eval_every=7, save_every=400)),
    ("--size small --steps 600", dict(steps=600, eval_every=150, save_every=100)),
    ("--objective llm-jepa --size small", dict(align="info_nce", jepa_weight=0.1, steps=20_000)),
    # As many positions as a row of two texts needs.
    ("--objective ntp --size small", dict(max_length=512, max_positions=2 * (512 + 2), lr=4e-3)),
    ("--objective llm-jepa --preset scratch --size small --jepa-weight 4",
     dict(lr=8e-5, jepa_weight=4, predictors=3, data="regex"))])
def test_each_layer_of_settings_overrides_the_one_before(words, expected):
    *configs, notes = settings.resolve_config(*settings.parse(words.split()))
    found = {name: value for config in configs for name, value in vars(config).items()}
    assert expected.items() <= found.items()
    assert any("toy scale" in note for note in notes) == ({"--size", "paper"}.isdisjoint(
        words.split()))


@pytest.mark.parametrize("name", ["mexma", "contrastive"])
def test_with_a_pretrained_model_the_papers_rate_rises_and_finetune_lets_it_fall(name):
    init = SimpleNamespace(model=SimpleNamespace(config=ModelConfig()),
                           config=dict(size="imported", max_length=128))
    resolve = functools.partial(settings.resolve_config, OBJECTIVES[name], init=init)
    found, options, _, notes = resolve(dict(init="model"))
    assert found.warmup == 1 and "are the paper's" in notes[0] and "rises until" in notes[1]
    assert getattr(options, "align", "mse") == "mse"
    found, _, _, notes = resolve(dict(init="model", preset="finetune"))
    assert found.schedule == "cosine" and found.eval_every == 150
    assert notes == ["from model: all weights, bidirectional, pooling cls"]
    assert learning_rate(found.steps - 1, found) < found.lr / 100


@every
def test_the_note_counts_the_values_that_help_all_shows_beside_the_papers(name, capsys):
    with pytest.raises(SystemExit):
        train.main(["--objective", name, "--help", "all"])
    text = capsys.readouterr().out
    *_, notes = settings.resolve_config(OBJECTIVES[name], {})
    count = len(re.findall(r"; paper [^]]+\]", re.sub(r"\s+", " ", text)))
    assert count > 4 and f"toy scale: {count} settings differ from the paper's" in notes[0]
    assert f"--objective {name} --init" in text and max(map(len, text.splitlines())) <= 100


def test_a_run_measures_what_it_prints(few_rows):
    run = started("mexma", data="toy", langs="en,de", steps=2, eval_every=1, eval_limit=20)
    found = [record["eval"] for record in run.steps() if "eval" in record]
    assert ["retrieval/xsim++" in one for one in found] == [True, False, True]
    assert not any("probe/mean" in one for one in found) and "probe/mean" in run.scores()


# ---- how a program ends


@pytest.mark.parametrize("error, status, text", [
    (BadInput("a\nb"), 2, "error: a b\n"),
    (ModuleNotFoundError("No module", name="matplotlib"), 2, "error: matplotlib is not installed, "
     "and this command needs it: pip install -r requirements-dev.txt\n"),
    (KeyboardInterrupt(signal.SIGTERM), 143, "stopped; no file is half written\n")])
def test_a_mistake_a_missing_package_and_ctrl_c_are_one_line(error, status, text, capsys):
    with pytest.raises(SystemExit) as end:
        run_program(Mock(side_effect=error))
    assert end.value.code == status and capsys.readouterr().err == text


# ---- runs and resume


def test_an_objective_trains_logs_is_evaluated_and_resumes_bit_for_bit():
    """The one with most state, an EMA teacher. test_any_objective.py resumes all."""
    more = dict(steps=6, save_every=4, log_every=2, eval_every=3)
    assert train.main(command("hybrid", "whole", **more)) == 0
    first, *records = runs.read_log("whole")
    assert first["config"]["objective"] == "hybrid" and first["columns"] == ["en", "de"]
    texts = {text for row in corpora.open_text("pairs.tsv").rows("train") for text in row}
    assert np.load("whole/trained.npy").tolist() == sorted(map(text_hash, texts))
    steps, evaluated = ([record for record in records if kind in record]
                        for kind in ("loss", "eval"))
    assert [record["step"] for record in steps] == [2, 3, 4, 6]  # 3: before the evaluation
    assert [record["step"] for record in evaluated] == [0, 3, 6]
    rest = {"step", "lr", "grad_norm", "tokens", "seconds", "tokens_per_second"}
    assert rest < steps[0].keys() and steps[-1]["tokens"] > 0
    terms = {f"validation/{term}" for term in steps[0].keys() - rest}
    assert all(terms < record["eval"].keys() for record in evaluated)
    written = contents("whole")
    assert written.keys() == {"model.pt", "train.pt", "tokenizer.json", "log.jsonl", "eval.json",
                              "trained.npy", "untrained.npy"}
    known = json.loads(written["eval.json"])
    assert known.pop("model") and known.pop("rows") and known == evaluated[-1]["eval"]
    words = command("hybrid", "parts", **more)
    for step, number in ((1, signal.SIGINT), (5, signal.SIGTERM)):
        stop(words, step, number)
        assert checkpoint("parts")["step"] == step
    assert train.main(words) == 0
    assert_same_run("whole", "parts")
    logged = [record["step"] for record in runs.read_log("parts")[1:]]
    assert logged == sorted(logged) and logged[-1] == 6


def test_the_readmes_own_objective_has_help_refusals_resume_and_evaluation(refused, capsys):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example, = [block for block in re.findall(r"```python\n(.*?)```", readme, re.S)
                if "\nclass " in block]
    Path("my_idea.py").write_text(example, encoding="utf-8")
    shared = eval("dict(" + re.search(r'\n +(optimizer="muon".*\))\n', example)[1])
    for name in ("contrastive", "bepa", "mexma"):
        assert shared.items() <= OBJECTIVES[name].toy.items()
    with pytest.raises(SystemExit):
        train.main(["--objective", "my_idea.py", "--help"])
    options = (r"(?s) --lr FLOAT +peak learning rate \[0.002\]\n.*"  # of the toy scale
               r"loss of my_idea:\n +--temperature FLOAT +softmax temperature .* \[0.05\]\n")
    assert re.search(options, capsys.readouterr().out)
    assert "did you mean my_idea.py?" in refused(["--objective=my_idea"])
    words = command("my_idea.py", "my run", steps=3)
    assert "did you mean --temperature?" in refused([*words, "--temprature", "2"])
    # It is stopped, and the command that it prints resumes.
    stop(words, 2)
    printed = shlex.split(capsys.readouterr().out.splitlines()[-1].partition("To resume: ")[2])
    assert printed[:2] == ["python", "train.py"] and train.main(printed[2:]) == 0
    assert "resuming at step 2 of 3" in capsys.readouterr().out
    assert not evaluate.main(["my run", "--json"])


@pytest.mark.parametrize("name, advice", [
    ("mexma", "add --koleo-weight 1 or --align info_nce"), ("bepa", "add --align info_nce"),
    ("mlm", "FAQ.md"), ("ntp", "FAQ.md")])
def test_the_screen_explains_its_marks_and_says_what_to_do(name, advice, few_rows, monkeypatch,
                                                           capsys):
    monkeypatch.setattr(screen, "verdict", lambda results: "COLLAPSING")
    has_twins = name == "mexma"
    given = dict(data="toy", langs="en,de") if has_twins else {}
    assert train.main(command(name, "a folder/run", steps=1, **given)) == 0
    text = capsys.readouterr().out
    assert text.count(f"  COLLAPSING\n        all embeddings become the same: {advice}") == 1
    assert text.count("\ntexts, and the ") == (name != "mlm")
    assert text.count("\ntwin: the same words") == has_twins
    assert "\n\n\n" not in text
    comments = [line.index("  # ") for line in text.splitlines() if line.startswith("  python ")]
    # minimal.bag is named where the run has its numbers.
    assert len(comments) == 2 + has_twins and len({*comments}) == 1
    summary = text[text.rindex("untrained "):text.index("tokens in")].splitlines()
    assert len(summary) > 8 and max(map(len, summary)) <= 100


def test_a_run_in_float16_goes_on_on_a_gpu_alone(refused):
    list(started("mlm", "run", steps=1).steps())
    torch.save(checkpoint("run") | dict(precision="float16"), "run/train.pt")
    assert "resume this run on one" in refused(command("mlm", steps=1, device="cpu"))


@pytest.mark.parametrize("load, threads, says", [(9.0, 2, 1), (9.0, 1, 0), (0.5, 2, 0)])
def test_a_run_says_that_the_machine_is_busy(load, threads, says, monkeypatch, capsys):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert train.main(command("mlm", "run", steps=1, device="cpu")) == 0
    assert capsys.readouterr().out.count("one thread can be faster") == says


@pytest.mark.parametrize("words", ["ok", "half-collapsed (low effective rank)"])
def test_the_last_verdict_has_a_line_unless_it_is_ok(words, monkeypatch, capsys):
    monkeypatch.setattr(screen, "verdict", lambda results: words)
    assert train.main(command("mlm", "run", steps=2, eval_every=1)) == 0
    said = capsys.readouterr().out
    assert said.count(f"\n{words}: the first entry of FAQ.md") == (words != "ok")


def test_auto_is_bfloat16_on_a_cpu_that_supports_it_and_a_run_keeps_its_precision(monkeypatch):
    can = {"avx512_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: can)
    list(started("contrastive", "run", steps=2, device="cpu").steps())
    assert runs.read_log("run")[0]["precision"] == "bfloat16"
    # The same run on a machine that does not support it, and a new run there.
    can.clear()
    run = started("contrastive", "run", steps=3, device="cpu")
    assert run.precision == "bfloat16"
    assert started("contrastive", device="cpu").precision == "float32"
    # Embeddings are computed in float32 all the same.
    embeddings = run.encode(["sun moon"])
    run.model.double()
    assert torch.allclose(embeddings, run.encode(["sun moon"]).float(), atol=1e-5)


def test_the_validation_loss_is_that_of_fixed_batches_and_disturbs_nothing():
    often, seldom = (losses(started("mexma", steps=4, eval_every=steps, align="sigreg"))
                     for steps in (1, 100))
    assert often == seldom
    run = started("mexma")
    assert run.scores() == run.scores()
    # The same loss, one batch after the other.
    micro_batches = []
    for step in range(20 // 8):  # --eval-limit // --batch
        micro_batches += run.make_batch(step, training=False)
    micro_batches = train.average_denominators(micro_batches)
    with torch.no_grad():
        found = [run.objective.eval()(one)[0] for one in micro_batches]
    assert run.scores()["validation/loss"] == pytest.approx(float(sum(found) / len(found)))
    # Views that training drops are evaluated.
    whole, dropping = (train.validate(started("llm-jepa", jepa_dropout=rate))
                       for rate in (0.0, 0.9))
    assert whole == dropping and whole["validation/jepa"] > 0


def test_a_number_that_is_not_finite_and_what_the_objective_finds_are_warnings(monkeypatch):
    validate = train.validate
    monkeypatch.setattr(train, "validate", lambda run: validate(run) | {"validation/x": math.nan})
    list(started("hybrid", "run", steps=1, momentum=0.996).steps())
    warnings = [(one["step"], one["warning"].split()[0])
                for one in runs.read_log("run") if "warning" in one]
    assert warnings == [(0, "validation/x"), (1, "validation/x"), (1, "100%")]  # of the teacher
    assert b"validation/x" not in contents("run")["eval.json"]


def test_a_finished_run_is_evaluated_again_and_can_be_moved_and_trained_longer(refused, capsys):
    for name, count in (("valid", 30), ("other", 40)):
        write_pairs(Path(f"{name}.tsv"), count)
    more = dict(max_length=3, eval_limit=0)
    words = command("ntp", steps=1, eval_data="valid.tsv", **more)
    assert train.main(words) == 0
    assert " texts are longer than --max-length 3" in capsys.readouterr().out
    before = contents("run")
    Path("run/eval.json").unlink()  # as if it had been killed just before
    assert train.main(words) == 0
    assert "this run is finished" in capsys.readouterr().out and contents("run") == before
    model_hash = file_hash(Path("run/model.pt"))
    runs.write_results("run/eval.json", {"a": 1}, "other rows", model_hash)
    assert train.main(words) == 0 and runs.read_results("run/eval.json")["a"] == 1
    for name in ("run", "valid.tsv"):
        os.rename(name, f"moved_{name}")
    more |= dict(out="moved_run", steps=2)
    torch.save(checkpoint("moved_run") | dict(source="other"), "moved_run/train.pt")
    assert "held-out rows" in refused(command("ntp", eval_data="other.tsv", **more))
    capsys.readouterr()
    assert train.main(command("ntp", eval_data="moved_valid.tsv", **more)) == 0
    text = capsys.readouterr().out
    said, = [one["warning"] for one in runs.read_log("moved_run")[1:] if "warning" in one]
    assert said in text and re.match("--steps was 1, is 2, .* from .*e-0. to .*e-0.$", said)
    assert "objectives.py was edited since step 1: " in text
    assert checkpoint("moved_run")["step"] == 2
    assert not evaluate.main(["moved_run", "--json"])  # it finds the rows where they are now


def test_a_schedule_is_named_once_at_the_step_where_it_changed(starts):
    killed = [{"step": 2, "warning": "--steps was 2, is 60"}]
    for out, mistaken in (("run", []), ("killed", killed)):
        shutil.copytree(starts / "mlm", out)
        with open(f"{out}/log.jsonl", "a", encoding="utf-8") as log:
            log.writelines(json.dumps(line) + "\n" for line in mistaken)  # killed before a save
        run = started("mlm", out, steps=4)
        for record in run.steps(every=1):
            if record["step"] == 3:
                break
        assert run.step == 3 and list(run.steps())
        said, = [one for one in runs.read_log(out)[1:] if "warning" in one]
        assert said["step"] == 2 and said["warning"].startswith("--steps was 2, is 4, ")


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    """Return a folder with the runs mlm and ntp, which tests must not change."""
    folder = tmp_path_factory.mktemp("starts")
    with contextlib.chdir(folder):
        write_pairs(Path("pairs.tsv"), 400)
        for name in ("mlm", "ntp"):
            list(started(name, name, steps=2).steps())
    return folder


def rewritten(change):
    def work(path):
        saved = checkpoint(path.parent)
        change(saved["weights"]["model.embed.weight"], saved["optimizer"][0])
        torch.save(saved, path)
    return work


def flipped(path):
    """Flip one bit of a moment of the optimizer."""
    content, moments = path.read_bytes(), checkpoint(path.parent)["optimizer"]
    start = content.index(moments[0]["exp_avg_sq"].numpy().tobytes()) + 41
    path.write_bytes(content[:start] + bytes([content[start] ^ 16]) + content[start + 1:])


@pytest.mark.parametrize("change, text", [  # flags, or what happens to train.pt or beside it
    ("--layers=2 --mask-ratio=0.3", "mask_ratio was 0.15, is 0.3; config.model.layers was 1, is 2"),
    ("--layers=2 --mask-ratio=0.3 --lr=0.5 --batch=4", "; and 1 more): undo the change, or choose"),
    ("--objective=contrastive", "a different run (config.objective was mlm, is contrastive; "),
    ("--steps=1", "step 2, after --steps 1"),
    (lambda path: write_pairs(Path("pairs.tsv"), 401), "content of --data was"),
    (lambda path: Tokenizer.train([], 300).save(path.with_name("tokenizer.json")),
     "json is"),
    (lambda path: torch.save(checkpoint(path.parent) | dict(precision="float16"), path),
     "resume this run on one"),
    (lambda path: torch.save(checkpoint(path.parent) | dict(weights={}), path),
     "has other weights than this version trains"),
    # A trained model without its checkpoint is not replaced by a new one.
    (Path.unlink, "model.pt, but no train.pt"),
    (lambda path: path.write_bytes(b"cos\nmkdir\n(S'executed'\ntR."), "train.pt"),  # a program
    # What a file could do to the memory of fused AdamW, which trusts the moments' shapes.
    (rewritten(lambda _, moments: moments["exp_avg"].resize_(3)), "exp_avg of parameter 0"),
    (rewritten(lambda _, moments: moments.update(exp_avg=moments["exp_avg"].to_sparse())),
     "exp_avg of parameter 0"),
    (rewritten(lambda _, moments: moments.update(step=torch.ones(7))), "step of parameter 0"),
    (flipped, "train.pt is not a checkpoint of tensors and plain values (BadZipFile)")])
def test_a_run_that_cannot_be_resumed_is_named_and_left_alone(change, text, starts, refused):
    shutil.copytree(starts / "mlm", "run")
    words = command("mlm", steps=3, device="cpu")
    if isinstance(change, str):
        words += change.split()
    else:
        change(Path("run/train.pt"))
    before = contents("run")
    assert text in refused(words)
    assert contents("run") == before and not os.path.exists("executed")


# What is evaluated is a frozen copy, and more is frozen at half, once.
EMA = """
import copy
from dataclasses import dataclass
from objectives import Contrastive, info_nce, torch
class Ema(Contrastive):
    name, pool = "ema", "mean"
    @dataclass(frozen=True)
    class Config(Contrastive.Config):
        freeze: bool = False
        thaw: bool = False
    def __init__(self, model, config):
        super().__init__(model, config)
        self.student = copy.deepcopy(model)
        self.student.embed_norm.requires_grad_(True)  # LoRA froze it
        model.requires_grad_(False)
    def forward(self, batch):
        loss = info_nce(*self.student.embeddings(batch["packed"]).chunk(2), 0.1)
        return loss, {"align": loss.detach()}
    @torch.no_grad()
    def after_step(self, progress):
        super().after_step(progress)
        for slow, fast in zip(self.model.parameters(), self.student.parameters()):
            slow.lerp_(fast, 0.5)
        if progress == 0.5 and self.config.freeze:
            self.student.blocks.requires_grad_(False)
        self.model.requires_grad_(self.config.thaw)
"""


@pytest.mark.parametrize("start", [{}, dict(init="mlm"), dict(init="mlm", lora_rank=2)])
def test_weights_without_a_gradient_are_in_the_checkpoint_and_frozen_ones_stay_frozen(
        start, starts, refused):
    Path("ema.py").write_text(EMA)
    start = {name: starts / value if name == "init" else value for name, value in start.items()}
    more = dict(steps=4, freeze=True, lr=0.01, **start)
    assert train.main(command("ema.py", "whole", **more)) == 0
    words = command("ema.py", "parts", **more)
    stop(words, 1)
    before = weights("parts")
    stop(words, 3)
    assert train.main(words) == 0
    assert_same_run("whole", "parts")
    trained = contents("parts")["model.pt"]
    assert not torch.equal(weights("parts")["embed_norm.weight"], before["embed_norm.weight"])
    assert train.main(words) == 0 and contents("parts")["model.pt"] == trained
    assert "unfreeze it in __init__" in refused(command("ema.py", "new", thaw=True, **more))


def test_a_model_of_init_that_is_written_over_does_not_change_the_run(starts, tmp_path):
    shutil.copytree(starts / "mlm", "first")
    list(started("mlm", "whole", init="first", lora_rank=2, steps=3).steps())
    content = Path("first/model.pt").read_bytes()
    for _ in started("mlm", "run", init="first", lora_rank=2, steps=3).steps(every=1):
        Path("first/model.pt").write_bytes(b"another, shorter model")  # as cp does
    assert_equal(weights("run"), weights("whole"))
    # A file that changes while it is read ends the start.
    Path("first/model.pt").write_bytes(content)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(BadInput, match="changed while"):
        patch.setattr(runs, "load", lambda *given, function=runs.load: (
            function(*given), Path("first/model.pt").write_bytes(b""))[0])
        started("mlm", "new", init="first", lora_rank=2)


def test_a_window_is_that_of_training_of_evaluations_and_of_a_run_that_starts_there():
    run = started("contrastive", "run", window=2, pool="mean", steps=1, precision="float32")
    list(run.steps())
    rows = sum(run.rows.ids.values(), [])[:9]
    found = evaluate.embed(run.model, rows)
    assert_equal(evaluate.embed(runs.open_run("run").model, rows), found)
    assert set(started("mlm", init="run").model.config.windows) == {2}
    assert started("mlm", init="run", window=0).model.config.windows == ()
    for block in run.model.blocks:
        block.attention.window = 0
    assert not torch.allclose(evaluate.embed(run.model, rows), found, atol=1e-3)


def test_a_loop_that_is_left_saves_its_step_and_one_run_at_a_time_trains_in_a_folder():
    first, second = (started("mlm", "run", steps=5) for _ in range(2))
    for record in first.steps(every=1):
        with pytest.raises(BadInput, match="already training"):
            next(second.steps())
        if record["step"] == 3:
            break
    assert checkpoint("run")["step"] == 3
    assert [record["step"] for record in first.steps(every=1)] == [4, 5, 5]
    with pytest.raises(BadInput, match="trained further"):
        next(second.steps())
    list(started("mlm", "whole", steps=5).steps())
    assert_same_run("run", "whole")


# Eleven processes train a run. Each but the last is killed before a file gets its name.
KILLED = """
import os, signal, sys
import torch._dynamo, train  # an optimizer imports torch._dynamo: here once for all processes
rename = os.replace
for victim in ["log.jsonl", "train.pt", "model.pt"] * 3 + ["eval.json", ""]:
    child = os.fork()
    if not child:
        renamed = []
        def replace(part, path):
            # A run that is resumed writes model.pt twice; this is the one after train.pt.
            if path.name == victim and (victim != "model.pt" or "train.pt" in renamed):
                os.kill(os.getpid(), signal.SIGKILL)
            renamed.append(path.name)
            rename(part, path)
        os.replace = replace
        sys.exit(train.main(sys.argv[1:]))
    assert os.waitpid(child, 0)[1] == (signal.SIGKILL if victim else 0), victim
"""


def test_every_kill_minus_nine_can_be_resumed_bit_for_bit():
    more = dict(steps=6, save_every=2, log_every=4, eval_every=2)
    done = subprocess.run([sys.executable, "-c", KILLED, *command("mlm", **more)], text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    assert train.main(command("mlm", "whole", **more)) == 0
    assert_same_run("run", "whole")
    killed, whole = contents("run"), contents("whole")
    assert killed.keys() == whole.keys() and killed["eval.json"] == whole["eval.json"]
    logs = [[(record["step"], "eval" in record) for record in runs.read_log(name)[1:]]
            for name in ("run", "whole")]
    assert logs[0] == logs[1]


def test_what_is_not_finite_stops_and_the_checkpoint_is_intact(refused):
    words = command("mexma", lr=1e15, warmup=0, clip=0, save_every=1, precision="float32")
    assert "the loss is not finite" in refused(words)
    assert torch.isfinite(checkpoint("run")["weights"]["model.embed.weight"]).all()


def test_weights_that_are_not_finite_are_not_saved():
    run = started("mlm", "run", steps=5)
    records = run.steps(every=1)
    while next(records)["step"] < 2:
        pass
    run.model.embed.weight.data.fill_(math.nan)
    with pytest.raises(BadInput, match="the weights are not finite"):
        records.close()
    assert not os.path.exists("run/train.pt") and not os.path.exists("run/model.pt")


# ---- compile, GPU


def test_a_compiled_run_has_the_same_losses(monkeypatch):
    """With a backend that generates no code, so that no C++ compiler is needed."""
    compiled = Mock(wraps=functools.partial(torch.nn.Module.compile, backend="aot_eager"))
    monkeypatch.setattr(model.Block, "compile", lambda self, **more: compiled(self, **more))
    monkeypatch.setattr(train.Run, "evaluation_is_due", lambda run: False)
    found = []
    for asked in (False, True):
        found.append(losses(started("mlm", steps=2, dropout=0.0, compile=asked)))
        assert compiled.called == asked
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def test_a_run_that_reaches_the_limit_of_compilations_warns_and_goes_on(monkeypatch, caplog):
    monkeypatch.setattr(model.Block, "compile", functools.partialmethod(
        torch.nn.Module.compile, backend="eager"))
    monkeypatch.setattr(kernels, "MOST_COMPILATIONS", 1)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8):  # what a test after this one has
        assert len(losses(started("mlm", steps=2, compile=True))) == 2
    torch._dynamo.reset()
    assert "hit config.recompile_limit (1)" in caplog.text


def test_a_step_that_loss_scaling_skips_is_not_in_the_mean_of_gradient_norms():
    run = started("mlm")
    run.scaler, run.clock = torch.amp.GradScaler("cpu"), 0.0
    run.pending = [{name: torch.tensor(value) for name, value in dict(
        loss=1.0, tokens=5.0, grad_norm=norm).items()} for norm in (math.nan, 2.0, math.inf, 4.0)]
    step = run.pending[0]
    assert run.flush_metrics()["grad_norm"] == 3.0
    run.pending = [step]
    assert "grad_norm" not in run.flush_metrics()


# ---- several processes


# AdamW: Muon's matrices are bfloat16, which rounds differently.
TWO = dict(steps=2, dropout=0.0, optimizer="adamw", lr=0.01, embedding_lr=1, seed=3,
           precision="float32")
# What is trained with and without --shard. hybrid has an EMA teacher; dropout draws numbers.
SHARDED = {"mexma": ("mexma", dict(accumulate=2, dropout=0.1, eval_every=1)),
           "hybrid": ("hybrid", dict(balance="fixed", accumulate=2, clip=0.1)),
           "llm-jepa": ("llm-jepa", dict(gradient_checkpointing=True)),
           "lora": ("llm-jepa", dict(init="ntp", lora_rank=2, dropout=0.1)),
           "ema": ("ema.py", dict(eval_every=1))}


def meet_in(file, rank):
    """Let two processes meet in a file, which they can do only once."""
    store = dist.FileStore(file, 2)
    dist.rendezvous = lambda *_, **__: iter([(store, rank, 2)])


def start_processes(function, *arguments, count=2):
    """Call function(rank, *arguments) in new processes. They are copies of one that has imported
    PyTorch and knows nothing of this one."""
    multiprocessing.set_forkserver_preload(["torch._dynamo", "train"])
    torch.multiprocessing.start_processes(function, arguments, count, start_method="forkserver")


def one_of_two(rank, folder, jobs):
    """Run train.py on each command line, as one of two processes."""
    os.chdir(folder)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    for number, words in enumerate(jobs):
        meet_in(f"{folder}/{number}", rank)
        with open(f"stdout{rank}", "a") as file, contextlib.redirect_stdout(file):
            assert train.main(words) == 0


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Return a folder with runs of two processes, which train them one after the other."""
    folder = tmp_path_factory.mktemp("two")
    write_pairs(folder / "pairs.tsv", 400)
    (folder / "ema.py").write_text(EMA)
    jobs = [command("ntp", "ntp", **TWO)]  # lora starts from it
    for name, (objective, given) in SHARDED.items():
        jobs += [command(objective, f"{kind}-{name}", **TWO | given, shard=kind == "sharded")
                 for kind in ("ddp", "sharded")]
    # From one to the other and back.
    more = TWO | dict(schedule="constant")
    jobs += [command("mexma", "moved", **more | dict(steps=steps), shard=steps == 2)
             for steps in (1, 2, 3)]
    jobs.append(command("mexma", "stayed", **more | dict(steps=3)))
    start_processes(one_of_two, folder, jobs)
    return folder


def node(rank, folder, jobs):
    """Run train.py on each command line, as one of two machines without a shared disk."""
    os.chdir(folder / str(rank))
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    for number, words in enumerate(jobs):
        meet_in(f"{folder}/meeting {number}", rank)
        sys.argv[1:] = words
        with (open(f"{number}", "w") as file, contextlib.redirect_stdout(file),
              contextlib.redirect_stderr(file), pytest.raises(SystemExit) as end):
            run_program(train.main)
        assert end.value.code == (2 if number else 0), number


def test_machines_that_differ_end_with_one_line_before_the_first_step(tmp_path):
    """Both print the mistake of one, and nobody waits for the other."""
    for rank in (0, 1):
        (tmp_path / f"{rank}").mkdir()
        write_pairs(tmp_path / f"{rank}/pairs.tsv", 400)
        write_pairs(tmp_path / f"{rank}/other.tsv", 400 + rank)
    (tmp_path / "0/mine.py").write_text(EMA)
    cases = {"train.pt (of step 1": command("mlm", steps=2),
             "content of --data": command("mlm", "new", data="other.tsv"),
             "process 1: --objective mine.py": command("mine.py", "new"),
             "process 1: run is no folder": command("mlm", "new", init="run"),
             "process 0: steps is 0": command("mlm", "new", steps=0)}
    jobs = [command("mlm", steps=1), *cases.values()]
    start_processes(node, tmp_path, jobs)
    for number, text in enumerate(cases, 1):
        for rank in (0, 1):
            said = (tmp_path / f"{rank}/{number}").read_text().splitlines()
            assert len(said) == 1 and said[0].startswith("error: process ") and text in said[0]
    assert not (tmp_path / "0/new").exists()


def test_each_process_has_random_numbers_of_its_own_for_dropout(monkeypatch):
    seeds = set()
    for rank in range(2):
        monkeypatch.setattr(train, "rank_and_world", lambda rank=rank: (rank, 2))
        started("mlm")
        seeds.add(torch.initial_seed())
    assert len(seeds) == 2


def test_a_process_of_torchrun_touches_its_own_gpu_alone(monkeypatch):
    used, zeros = [], torch.zeros
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.append(str(device)))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(processes, "meeting_place", lambda: None)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: (used.append(device), zeros(1))[1])
    with pytest.raises(BadInput, match="^WORLD_SIZE is 8, and LOCAL_RANK.*torchrun$"):
        processes.join_processes(torch.device("cuda"))
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert processes.join_processes(usable_device("auto")) == torch.device("cuda:5")
    assert used == ["cuda:5", "cuda:5"]


def assert_close(one, two):
    for name, weight in one.items():
        # The bias of the keys has gradient 0, and Adam scales up its rounding error.
        if not name.endswith("qkv.bias"):
            assert (weight - two[name]).abs().max() < 1e-5, name


@pytest.mark.parametrize("name", SHARDED)
def test_a_sharded_run_trains_is_evaluated_and_saved_like_one_that_is_not(name, two):
    folders = [two / f"{kind}-{name}" for kind in ("ddp", "sharded")]
    one, other = map(checkpoint, folders)
    assert one.keys() == other.keys() and one["tokens"] == other["tokens"]
    assert one["weights"].keys() == other["weights"].keys()
    assert_close(one["weights"], other["weights"])
    assert_close(*map(weights, folders))
    assert_equal(one["random"], other["random"])
    for index, moments in one["optimizer"].items():
        for key, moment in moments.items():
            assert moment.shape == other["optimizer"][index][key].shape
    logs = []
    for folder in folders:
        rows = [record.get("eval", record) for record in runs.read_log(folder)[1:]]
        logs.append({f"{row} {key}": value for row, record in enumerate(rows)
                     for key, value in record.items() if key != "warning" and "second" not in key})
    assert logs[0] == pytest.approx(logs[1], rel=1e-4, abs=1e-5) and "1 loss" in logs[0]


def test_a_run_goes_on_with_and_without_shard_and_evaluate_reads_it(two, monkeypatch, capsys,
                                                                    refused):
    assert_close(checkpoint(two / "moved")["weights"], checkpoint(two / "stayed")["weights"])
    assert "2 steps of 8 examples x 2 processes" in (two / "stdout0").read_text()
    monkeypatch.chdir(two)
    more = TWO | dict(schedule="constant", steps=3)
    assert "processes was 2, is 1" in refused(command("mexma", "stayed", **more))
    capsys.readouterr()
    assert not evaluate.main(["sharded-mexma", "--json"])
    assert json.loads(capsys.readouterr().out)


# ---- another run as the start, LoRA, chats


def test_a_run_starts_from_the_weights_and_the_tokenizer_of_another(starts, refused, capsys):
    shutil.copytree(starts / "mlm", "first")
    words = command("contrastive", init="first", steps=2, lr=5e-4, embedding_lr=1)
    assert train.main(words) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\n +0  .*  start\n", shown) and "untrained" not in shown
    assert contents("first")["tokenizer.json"] == contents("run")["tokenizer.json"]

    moved = (weights("first")["embed.weight"] - weights("run")["embed.weight"]).abs().max()
    assert 0 < moved < 2.5 * 2 * 5e-4  # two Adam steps away
    # Another model in the same folder is another start.
    saved = torch.load("first/model.pt", weights_only=True)
    saved["weights"]["embed.weight"].fill_(1)
    torch.save(saved, "first/model.pt")
    assert "model of --init was" in refused([*words, "--steps=3"])


def test_pooling_and_lengths_come_from_the_model_of_init(starts):
    shutil.copytree(starts / "mlm", "first")
    saved = torch.load("first/model.pt", weights_only=True)
    saved["config"] |= dict(max_tokens=40, normalize=True, pool="max", dropout=0.3)
    torch.save(saved, "first/model.pt")
    with pytest.raises(BadInput, match="max_length 128: .* --max-length 38"):
        started("contrastive", init="first", max_length=128)
    for given, length, pool in ({}, 38, "max"), (dict(max_length=30, pool="cls"), 30, "cls"):
        run = started("contrastive", init="first", **given)
        config = run.model.config
        assert (run.settings.max_length, config.pool) == (length, pool)
        assert config.normalize and config.dropout == run.model.dropout.p == 0.3


@pytest.mark.parametrize("name", ["llm-jepa", "hybrid"])
def test_lora_trains_beside_the_heads_of_an_objective_and_resumes_exactly(name, starts):
    start = starts / ("ntp" if OBJECTIVES[name].causal else "mlm")
    more = dict(init=start, lora_rank=2, steps=2)
    list(started(name, "whole", **more).steps())
    stop(command(name, "parts", **more), 1)
    list(started(name, "parts", **more).steps())
    assert_same_run("whole", "parts")
    saved = checkpoint("whole")["weights"]
    assert any(".a." in key for key in saved)
    # --init has what LoRA froze, but hybrid's after_step could have moved it.
    assert ("model.embed.embedding.weight" in saved) == (name == "hybrid")
    before, after = weights(start), weights("whole")
    changed = [key for key in before if key in after and not torch.equal(before[key], after[key])]
    assert any("qkv" in key for key in changed) and not any("norm" in key for key in changed)


def test_lora_trains_a_new_vocabulary_head_and_the_embedding_of_mask(starts):
    """A contrastive run has no such head, and has never read [MASK]."""
    list(started("contrastive", "first", steps=1).steps())
    run = started("mlm", "run", init="first", lora_rank=2, steps=2)
    trained = [name for name, one in run.model.named_parameters() if one.requires_grad]
    new = {"transform.weight", "transform.bias", "transform_norm.weight", "transform_norm.bias",
           "vocabulary_bias", "embed.rows"}
    assert {name for name in trained if not re.search(r"\.[ab]\.\d$", name)} == new
    list(run.steps())
    assert_equal(runs.open_run("run").model.state_dict(), weights("run"))
    before, after = weights("first")["embed.weight"], weights("run")["embed.weight"]
    special = run.data.tokenizer.special
    changed = {row for row in range(len(after)) if not torch.equal(before[row], after[row])}
    assert {special.mask} <= changed <= {special.mask, *special.preds}


def test_a_chat_trains_and_is_evaluated_with_and_without_its_system_text():
    rows = [f"write {i} twice\t{i} {i}\t{'You are short.' * (i % 3)}" for i in range(60)]
    write_rows("chat.tsv", rows, "user\tassistant\tsystem")
    tokens, lengths = [], []
    for view in ("plain", "system"):
        run = started("llm-jepa", view, data="chat.tsv", chat=view, steps=1)
        list(run.steps())
        assert not evaluate.main([view, "--json"])
        tokens.append(run.tokens)
        lengths.append(sum(map(len, run.rows.ids["user"])))
    assert tokens[0] < tokens[1] and lengths[0] < lengths[1]


# ---- training from Python


class Mine(Contrastive):
    """A class of a notebook cell."""
    name = "mine"
    toy = dict(lr=1e-3)


def test_a_class_trains_without_a_folder_in_any_thread(tmp_path, monkeypatch):
    run = train.start(Mine, steps=4, **SMALL, **SHAPE)
    before = set(tmp_path.iterdir())  # the cache
    handler = signal.getsignal(signal.SIGINT)
    records = []
    thread = threading.Thread(target=lambda: records.extend(run.steps(every=2)))
    thread.start()
    thread.join(60)
    assert [record["step"] for record in records] == [0, 2, 4, 4] and run.settings.lr == 1e-3
    assert "align" in records[1] and run.scores() == records[-1]["eval"]
    assert run.encode(["sun moon", "fish"]).norm(dim=1).tolist() == pytest.approx([1, 1])
    assert set(tmp_path.iterdir()) == before and signal.getsignal(signal.SIGINT) is handler
    with pytest.raises(BadInput, match="learningrate"):
        train.start(Mine, learningrate=1)
    monkeypatch.setattr(Mine, "toy", dict(droput=0.1))
    with pytest.raises(BadInput, match="'droput'.*did you mean dropout"):
        train.start(Mine)
