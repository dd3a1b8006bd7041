"""Settings, schedule, the loop, exact resume, kills, refusals, and training as a function."""

import functools
import json
import math
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from test_house import write_pairs
from test_text import lines, write
from torch.utils.flop_counter import FlopCounterMode

import evaluate
import model
import objectives
import train
from corpora.folder import lock
from corpora.program import BadInput, exit_status
from objectives import OBJECTIVES

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SMALL = dict(width=16, layers=1, heads=2, ffn_dim=32, dropout=0.1, batch=8, eval_limit=20,
             vocab=300)
EXTRA = {  # what else must be small
    "mexma": dict(head_layers=1, head_heads=2, head_hidden=16),
    "hybrid": dict(predictor_width=16, predictor_layers=1, predictor_heads=2)}
every = pytest.mark.parametrize("name", OBJECTIVES)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """A folder with a small TSV of made-up pairs, the same words under a cipher."""
    folder = tmp_path_factory.mktemp("pairs")
    write_pairs(folder / "pairs.tsv", 400)
    return folder


def flags(given):
    """{setting: value} as words of a command line; True and False are a flag alone."""
    words = []
    for name, value in given.items():
        flag = name.replace("_", "-")
        words.append(f"--no-{flag}" if value is False else f"--{flag}")
        words += [] if isinstance(value, bool) else [str(value)]
    return words


def settings(pairs, objective="mexma", **more):
    files = dict(data=str(pairs / "pairs.tsv"), cache=str(pairs / "cache"))
    return {**files, **SMALL, **EXTRA.get(objective, {}), **more}


def command(pairs, out, objective="mexma", **more):
    return ["--objective", objective, "--out", str(out), *flags(settings(pairs, objective, **more))]


def started(pairs, objective="mexma", out=None, **more):
    return train.start(objective, out=out, **settings(pairs, objective, **more))


def run_main(words):
    """The exit status of train.py."""
    return exit_status(train.main, words)


@pytest.fixture
def refused(refused):
    """refused(words) -> the line of train.py, which may have printed what it was about to do."""
    return functools.partial(refused, train.main, printed=None)


def begun(words):
    """A process that trains, from its step 0 on."""
    process = subprocess.Popen([sys.executable, str(ROOT / "train.py"), *words], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT)
    while "step     0" not in process.stdout.readline():
        assert process.poll() is None
    return process


def losses(run):
    return [record["loss"] for record in run.steps(every=1) if "loss" in record]


def checkpoint(folder):
    return torch.load(folder / "train.pt", weights_only=True)


def weights(folder):
    return torch.load(folder / "model.pt", weights_only=True)["weights"]


# Bit for bit, in whatever dicts and lists.
assert_equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


TIMES = {"seconds", "tokens_per_second", "product_share"}


def logged(folder):
    """The log without its first line and what differs from time to time."""
    records = evaluate.read_log(folder)[1:]
    return [{k: v for k, v in record.items() if k not in TIMES} for record in records]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def assert_same_run(one, two):
    """Weights, optimiser, random state and log are the same bit for bit."""
    first, second = checkpoint(one), checkpoint(two)
    for name in ("weights", "moments", "random", "step", "tokens", "untrained", "window"):
        assert_equal(first[name], second[name], msg=name)
    assert_equal(weights(one), weights(two))
    assert logged(one) == logged(two)


def stop_at(monkeypatch, step):
    """SIGTERM arrives when so many steps are done."""
    def asked(self, done):
        self.signal = signal.SIGTERM if done >= step else 0
        return self.signal
    monkeypatch.setattr(train.Progress, "step", asked)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    with pytest.raises(BadInput, match="cannot be made .* use another --out"):
        lock(tmp_path / ("x" * 300))


# ---- schedule and optimiser


@pytest.mark.parametrize("given, rates", [
    (dict(schedule="cosine"), {0: 0.2, 9: 2, 10: 2, 55: 1, 99: 1 + math.cos(math.pi * 89 / 90)}),
    (dict(schedule="linear"), {0: 0.2, 9: 2, 10: 2, 55: 1, 99: 2 / 90}),
    (dict(schedule="constant"), {0: 0.2, 9: 2, 10: 2, 55: 2, 99: 2}),
    (dict(schedule="wsd"), {0: 0.2, 10: 2, 81: 2, 82: 2, 91: 1, 99: 2 * 5 / 90}),
    # MEXMA's paper: from 1e-5, only rising.
    (dict(steps=300, lr=1e-4, warmup=1.0, lr_start=0.1), {0: 1e-5 + 9e-5 / 300, 299: 1e-4})])
def test_the_learning_rate_is_a_closed_form_of_the_step(given, rates):
    config = train.TrainConfig(**dict(steps=100, lr=2.0, warmup=0.1) | given)
    found = {step: train.learning_rate(step, config) for step in rates}
    assert found == pytest.approx(rates, rel=1e-4)


def trained_counting(run):
    """Train to the end -> how many numbers the forward kept for the backward."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x,
                                                  lambda x: x):
        list(run.steps())
    return sum(kept)


@pytest.mark.parametrize("objective", ["mexma", "hybrid"])
def test_gradient_checkpointing_changes_no_bit_of_a_step(pairs, objective):
    weights = []
    kept = []
    for on in (False, True):
        run = started(pairs, objective, steps=2, dropout=0.1, gradient_checkpointing=on)
        kept.append(trained_counting(run))
        weights.append(run.objective.state_dict())
    plain, again = weights
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert kept[1] < kept[0]


def test_the_head_for_uv_has_the_core_s_requirements():
    """`uv run train.py` reads it (PEP 723)."""
    text = (ROOT / "train.py").read_text(encoding="utf-8")
    head = text.split("# ///")[1].removeprefix(" script").replace("\n# ", "\n")
    wanted = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    wanted = [line for line in wanted if "==" in line and not line.startswith(("pytest", "triton"))]
    assert tomllib.loads(head)["dependencies"] == wanted


def test_biases_norms_and_scalars_are_not_decayed(pairs):
    run = started(pairs, "mlm", steps=1, weight_decay=0.3)
    names = {id(p): name for name, p in run.objective.named_parameters()}
    decayed, spared = ([names[id(p)] for p in group["params"]]
                       for group in run.optimizer.param_groups)
    assert [group["weight_decay"] for group in run.optimizer.param_groups] == [0.3, 0.0]
    assert len(decayed) + len(spared) == len(names) and "model.embed.weight" in decayed
    assert all("bias" in name or "norm" in name for name in spared)
    assert not any("bias" in name or "norm" in name for name in decayed)


# ---- settings


LARGE = 10 ** 12
REFUSALS = [
    ("--stepz 5", "--steps"), ("--objective mexmaa", "did you mean mexma?"),
    ("--obj mlm", "did you mean --objective?"), ("--objective", "--objective"),
    ("--objective mlm --koleo-weight 1", "--koleo-weight: it belongs to mexma, not to mlm"),
    ("--objective mlm --no-symmetrical", "--no-symmetrical: it belongs to mexma, not to mlm"),
    ("--learning-rate 1", "did you mean --lr?"), ("--size tiny", "did you mean toy?"),
    ("contrastive", "did you mean --objective contrastive?"),
    ("--objective nowhere.py", "there is no file nowhere.py"), ("--device meta", "meta"),
    ("--size huge", "huge"), ("--steps many", "'many'"), ("--steps 0", "steps"),
    ("--lr -1", "lr"), ("--lr nan", "nan"), ("--warmup 500", "500"),
    ("--batch 10 --accumulate 3", "batch 10"), ("--batch 4 --accumulate 4", "batch 4"),
    ("--schedule cosin", "cosin"), ("--device cuda:7", "cuda:7"),
    ("--precision float16 --device cpu", "float16"), ("--heads 3", "heads"),
    ("--data nowhere.tsv", "nowhere.tsv"), ("--langs en,xx", "xx"), ("stray", "stray"),
    ("--max-length 600 --max-positions 512", "max_length 600"), ("--koleo-weight inf", "inf"),
    ("--seed -3", "-3"), (f"--seed {10 ** 20}", "seed"), ("--vocab 7", "vocab is 7"),
    ("--chat system", "chat system"),
    ("--block 32", "block 32"), ("--objective mlm --pairs neighbours", "pairs neighbours"),
    ("--objective llm-jepa --align info_nce --batch 8 --accumulate 8", "batch 8"),
    ("--init nowhere", "nowhere"), ("--preset nope", "preset 'nope'"),
    (f"--layers {LARGE}", f"layers is {LARGE}"), (f"--head-layers {LARGE}", f"layers is {LARGE}"),
    (f"--ffn-dim {2 ** 63}", "ffn_dim"), (f"--vocab {10 ** 9}", "vocab is 1000000000"),
    # What would be asked for in vain.
    ("--lora-rank 4", "lora_rank 4 freezes the weights of --init, and there is none"),
    ("--objective hybrid --masking word --mask-special", "mask_special needs --masking token"),
    ("--no-symmetrical", "add --align-views dirty")]


@pytest.mark.parametrize("words, value", REFUSALS)
def test_a_mistake_is_one_line_that_names_the_value_and_leaves_nothing(
        words, value, tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert value in refused(words)
    assert not (tmp_path / "out").exists()


@every
def test_help_is_short_and_shows_the_objectives_own_options_first(name, capsys):
    kind = OBJECTIVES[name]
    texts = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as stop:
            run_main(["--objective", name, flag])
        assert stop.value.code == 0
        texts.append(capsys.readouterr().out)
    text, everything = texts
    assert "[0.1]" in re.search("--lora-dropout.*", everything)[0]
    for option in train.names(kind.Config):
        flag = option.replace("_", "-")
        found = re.search(f"--(no-)?{flag} ", text)
        assert found and found.start() < text.index("training:")
    paper, toy = train.defaults(kind, "toy")
    values = paper | toy
    assert f"[{values['lr']}]" in text and f"optimiser steps [{values['steps']}]" in text
    assert all(preset in text for preset in kind.presets)


def test_toy_values_are_told_with_the_papers_and_give_way_to_presets_and_flags():
    asked = train.parse(["--objective", "mexma"])
    assert asked.options.koleo_weight == 1.0
    assert any("koleo_weight 1.0 (paper: 0.01)" in note for note in asked.notes)
    asked = train.parse(["--koleo-weight", "0.01", "--lr", "0.5"])
    assert asked.options.koleo_weight == 0.01 and asked.train.lr == 0.5
    assert not any("koleo" in note or " lr " in note for note in asked.notes)
    asked = train.parse(["--size", "base"])
    assert (asked.options.head_layers, asked.options.head_hidden) == (6, 3072)
    assert (asked.train.lr, asked.train.max_length) == (1e-4, 200)
    assert asked.notes == ["  accumulate 2: the loss compares the examples of a batch, and sees "
                           "each part of 150 apart"]
    # As many positions as a row of two texts needs.
    asked = train.parse(["--objective", "ntp", "--size", "small"])
    assert asked.train.max_length == 512 and asked.model.max_positions == 2 * (512 + 2)
    asked = train.settle("llm-jepa", dict(preset="scratch", size="small", jepa_weight=4.0))
    assert (asked.train.lr, asked.options.jepa_weight, asked.options.predictors) == (8e-5, 4, 3)
    assert train.settle("mlm", dict(preset="hybrid")).train.data == "documents"


# ---- how a program ends


def fail(error):
    raise error


@pytest.mark.parametrize("error, status, said", [
    (BadInput("a\nb"), 2, "error: a b\n"),
    (KeyboardInterrupt(), 130, "stopped; nothing is half written\n")])
def test_a_mistake_and_ctrl_c_are_one_line(error, status, said, capsys):
    assert exit_status(fail, error) == status
    assert capsys.readouterr().err == said


def test_everything_else_is_pythons_traceback():
    for error in (MemoryError(), OSError(28, "No space left"), RuntimeError("shapes differ")):
        with pytest.raises(type(error)):
            exit_status(fail, error)


def test_a_closed_pipe_ends_the_program_and_what_was_done_is_saved(pairs, tmp_path):
    process = begun(command(pairs, tmp_path / "run", "contrastive", steps=100000, eval_every=1))
    process.stdout.close()
    assert process.wait(timeout=60) == 141 and process.stderr.read() == ""
    assert checkpoint(tmp_path / "run")["step"] > 0


@pytest.mark.parametrize("given", [dict(WORLD_SIZE="2"), dict(RANK="1"), dict(WORLD_SIZE="abc"),
                                   dict(RANK="0", LOCAL_RANK="x", WORLD_SIZE="2")])
def test_half_of_torchruns_environment_is_one_line(given, pairs, tmp_path, monkeypatch, refused):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert "torchrun" in refused(command(pairs, tmp_path / "run"))


# ---- an objective of a file


IDEA = '''
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from objectives import Contrastive, Objective, Packed, row


class Length(Objective):
    """Every text's vector gets the length 1."""
    name = "length"
    toy = dict(lr=1e-3, steps=4)

    @dataclass(frozen=True)
    class Config:
        wanted: float = 1.0  # length that a vector is to have

    @staticmethod
    def collate(examples, rng, config, special):
        rows = [row(ids, special) for ids, in examples]
        return dict(packed=Packed.of(rows), num_targets=torch.zeros(0))

    def forward(self, batch):
        vectors = self.model.pool(self.model(batch["packed"]), batch["packed"])
        loss = (vectors.norm(dim=1) - self.config.wanted).square().mean()
        return loss, {"length": loss.detach()}
'''


def test_an_objective_of_a_file_has_help_refusals_resume_and_evaluation(
        pairs, tmp_path, monkeypatch, refused, capsys):
    file = tmp_path / "my_idea.py"
    file.write_text(IDEA, encoding="utf-8")
    with pytest.raises(SystemExit):
        run_main(["--objective", str(file), "--help"])
    shown = capsys.readouterr().out
    assert "only length has these" in shown and "length that a vector is to have [1.0]" in shown
    words = command(pairs, tmp_path / "run", str(file), save_every=1)
    assert "did you mean --wanted?" in refused([*words, "--wantd", "2"])
    # It is stopped, and the command that it prints resumes.
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        assert run_main(words) == 128 + signal.SIGTERM
    printed = shlex.split(capsys.readouterr().out.splitlines()[-1].partition("To resume: ")[2])
    assert printed[:2] == ["python", "train.py"] and run_main(printed[2:]) == 0
    assert "resuming at step 2 of 4" in capsys.readouterr().out
    whole = command(pairs, tmp_path / "whole", str(file), save_every=1)
    assert run_main(whole) == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert exit_status(evaluate.main, [str(tmp_path / "run"), "--json"]) == 0
    # An edited file is another objective.
    file.write_text(IDEA.replace("square()", "abs()"), encoding="utf-8")
    assert re.search(r"the file of the objective was [0-9a-f]{8}, is .*take the change back",
                     refused(words))
    # Another objective's options are no list of differences.
    other = command(pairs, tmp_path / "run", "mlm")
    assert "holds a run of length, not of mlm: use another --out" in refused(other)
    assert f"did you mean {file}?" in refused(["--objective", str(file.with_suffix(""))])
    # Of several classes one is named.
    file.write_text(IDEA + "class Other(Length):\n    name = 'other'\n", encoding="utf-8")
    assert "Length, Other" in refused(words)
    assert train.find_objective(f"{file}:Other").name == "other"
    for text, said in (
            ("", "defines no objective: write a class"),
            (IDEA.replace('name = "length"', ""), "Length has no name"),
            (IDEA.replace('name = "length"', 'name = "mexma"'), "'mexma' is that of an objective"),
            (IDEA.replace("wanted: float", "batch: float"), "has an option 'batch', as training")):
        file.write_text(text, encoding="utf-8")
        assert said in refused(words)


# ---- runs and resume


@every
def test_every_objective_trains_logs_is_evaluated_and_resumes_bit_for_bit(
        name, pairs, tmp_path, monkeypatch, capsys):
    more = dict(steps=9, save_every=4, log_every=2, eval_every=5)
    out = tmp_path / "whole"
    assert run_main(command(pairs, out, name, **more)) == 0
    shown = capsys.readouterr().out
    assert "step     0" in shown and "tokens in" in shown
    first, *records = evaluate.read_log(out)
    assert first["config"]["objective"] == name and first["parameters"] > 0
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == [2, 4, 6, 8, 9]
    assert all(math.isfinite(record["loss"]) for record in steps)
    assert train.NO_TERMS < steps[0].keys()
    assert all(record["tokens_per_second"] > 0 <= record["product_share"] for record in steps)
    evaluated = [record for record in records if "eval" in record]
    assert [record["step"] for record in evaluated] == [0, 5, 9]
    terms = {f"validation/{term}" for term in steps[0].keys() - train.NO_TERMS}
    assert all(terms < record["eval"].keys() for record in evaluated)
    written = {path.name for path in out.iterdir()} - {".lock"}
    assert written == {"model.pt", "train.pt", "tokenizer.json", "log.jsonl", "eval.json"}
    known = json.loads((out / "eval.json").read_text(encoding="utf-8"))
    assert " rows of " in known.pop("rows") and len(known.pop("model")) == 8
    assert known == evaluated[-1]["eval"]
    for step in (1, 2, 6):
        stop_at(monkeypatch, step)
        status = run_main(command(pairs, tmp_path / "parts", name, **more))
        assert status == 128 + signal.SIGTERM and checkpoint(tmp_path / "parts")["step"] >= step
    monkeypatch.undo()
    assert run_main(command(pairs, tmp_path / "parts", name, **more)) == 0
    assert_same_run(out, tmp_path / "parts")
    capsys.readouterr()
    assert exit_status(evaluate.main, [str(out), "--json"]) == 0
    assert "geometry/rankme" in json.loads(capsys.readouterr().out)


def test_auto_is_bfloat16_on_a_cpu_with_its_instructions_and_a_run_keeps_what_it_began_with(
        pairs, tmp_path, monkeypatch, capsys):
    can = {"avx512_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: can)
    words = command(pairs, tmp_path / "run", "contrastive", device="cpu", save_every=2)
    assert run_main([*words, "--steps", "2"]) == 0
    assert "in bfloat16 on cpu" in capsys.readouterr().out
    assert evaluate.read_log(tmp_path / "run")[0]["precision"] == "bfloat16"
    # The same run on a machine without them; then another one.
    can.clear()
    assert run_main([*words, "--steps", "3"]) == 0
    assert "in bfloat16 on cpu" in capsys.readouterr().out
    other = started(pairs, "contrastive", steps=1, device="cpu")
    assert other.precision == "float32" and other.dtype is None
    # Its vectors are in float32, and not only of that type.
    run = started(pairs, "contrastive", tmp_path / "run", steps=3, device="cpu", save_every=2)
    texts = ["sun moon", "road house"]
    vectors = run.encode(texts)
    assert run.precision == "bfloat16" and vectors.dtype == torch.float32
    run.model.double()
    assert torch.allclose(vectors, run.encode(texts).float(), rtol=0, atol=1e-5)


def test_muon_trains_matrices_that_are_no_embeddings_and_adamw_the_rest(pairs, tmp_path):
    """One step of each, by hand; and a run that is resumed."""
    run = started(pairs, "mexma", steps=4, warmup=0, optimizer="muon", weight_decay=0.1,
                  precision="float32")
    before = {name: p.detach().clone() for name, p in run.objective.named_parameters()}
    run.train_step(run.make_batch(0), run.objective)
    after = dict(run.objective.named_parameters())
    tables = ("model.embed.weight", "model.position_embedding.weight")
    rate = run.train.lr
    for name, old in before.items():
        change = after[name].detach() - (old * (1 - rate * 0.1) if old.ndim == 2 else old)
        if old.ndim == 2 and name not in tables:
            # An orthogonal matrix has singular values of 1, and .2 sqrt(longer side) of them.
            size = torch.linalg.svdvals(change) / (rate * 0.2 * math.sqrt(max(old.shape)))
            assert 0.6 < size.median() < 1.3, name
        else:
            # The first step of Adam is the sign of the gradient.
            moved = change[change.abs() > 0.5 * rate].abs()
            assert len(moved) and torch.allclose(moved, torch.full_like(moved, rate), rtol=0.02)
    # A step that is not finite changes nothing.
    batch = run.make_batch(1)
    with torch.no_grad():
        run.objective.vocabulary_bias[0] = math.nan
    weights_then = run.model.embed.weight.detach().clone()
    run.train_step(batch, run.objective)
    assert torch.equal(run.model.embed.weight, weights_then)
    for name, steps in (("whole", [4]), ("parts", [2, 4])):
        for last in steps:
            part = started(pairs, "mexma", tmp_path / name, steps=4, optimizer="muon")
            list(part.steps(on_step=lambda run, last=last: run.step == last))
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@every
def test_the_products_of_a_step_are_counted_as_pytorch_counts_them(name, pairs):
    run = started(pairs, name, steps=2)
    parts = run.make_batch(0)
    with FlopCounterMode(display=False) as counter:
        run.train_step(parts, run.objective)
    with run.pace.step(parts):
        run.train_step(parts, run.objective)
    tokens = sum(len(part["packed"].tokens) for part in parts)
    assert round(run.pace.flops * tokens) == counter.get_total_flops() > 0
    run.pace.seconds = 2.0
    pace = run.pace.close(world=3)
    assert pace["tokens_per_second"] == round(1.5 * tokens)
    assert pace["product_share"] == pytest.approx(
        run.pace.flops * tokens / 2 / run.pace.peak, abs=1e-4)
    assert run.pace.tokens == run.pace.seconds == 0


def test_a_peak_that_was_measured_too_low_is_measured_again(pairs):
    pace = started(pairs, "mlm", steps=2).pace
    pace.peak = 1.0
    pace.close(world=1)
    assert pace.peak > 1e6


def test_the_loss_on_rows_held_out_is_that_of_fixed_batches_and_disturbs_nothing(pairs):
    trained = []
    for often in (1, 100):
        run = started(pairs, "mexma", steps=4, eval_every=often)
        trained.append(losses(run))
        assert run.scores() == run.scores()
    assert trained[0] == trained[1]
    # By hand: each batch alone, weighted as the parts of a step are.
    parts = []
    for step in range(run.validation_steps):
        parts += run.make_batch(step, training=False)
    parts = train.share_counts(parts, 1)
    with torch.no_grad():
        found = [run.objective.eval()(part)[0] for part in parts]
    assert run.scores()["validation/loss"] == pytest.approx(float(sum(found) / len(parts)))
    held = set(run.corpus.held.tolist())
    assert held and not held & set(run.corpus.rows.tolist())
    # Fewer rows than a batch: a smaller one.
    run = started(pairs, "contrastive", steps=1, batch=64)
    assert 1 < run.validation.batch < 64 and "validation/loss" in run.scores()
    # Views that training drops are there.
    whole, dropping = (started(pairs, "llm-jepa", steps=1, **options).validate() for options in (
        {}, dict(jepa_dropout=0.9)))
    assert whole == dropping and whole["validation/jepa"] > 0


def test_a_validation_loss_that_is_not_finite_is_a_warning_and_training_goes_on(
        pairs, tmp_path, monkeypatch):
    whole = train.Run.validate
    monkeypatch.setattr(train.Run, "validate", lambda run: whole(run) | {"validation/x": math.nan})
    list(started(pairs, "mlm", out=tmp_path / "run", steps=2).steps())
    records = evaluate.read_log(tmp_path / "run")
    warnings = [(one["step"], one["warning"]) for one in records if "warning" in one]
    assert warnings == [(step, "validation/x: not a finite number") for step in (0, 2)]
    assert "validation/x" not in (tmp_path / "run/eval.json").read_text(encoding="utf-8")


def test_vectors_that_have_become_half_as_long_are_a_warning(pairs, tmp_path, monkeypatch):
    lengths = iter([8.0, 4.1, 3.9])
    evaluated = train.evaluate.run

    def shorter(*arguments, **options):
        return evaluated(*arguments, **options) | {"geometry/length": next(lengths)}

    monkeypatch.setattr(train.evaluate, "run", shorter)
    list(started(pairs, "mlm", out=tmp_path / "run", steps=2, eval_every=1).steps())
    records = evaluate.read_log(tmp_path / "run")
    warnings = [(one["step"], one["warning"]) for one in records if "warning" in one]
    assert len(warnings) == 1 and warnings[0][0] == 2
    assert "mean length fell from 8.0 to 3.9" in warnings[0][1]


@pytest.mark.parametrize("momentum, is_said", [(0.996, True), (0, False)])
def test_a_teacher_that_is_still_its_random_start_is_a_warning(
        pairs, tmp_path, momentum, is_said):
    list(started(pairs, "hybrid", out=tmp_path / "run", steps=8, momentum=momentum).steps())
    records = evaluate.read_log(tmp_path / "run")
    said = [one for one in records if "step 0: lower --momentum" in one.get("warning", "")]
    assert bool(said) == is_said
    # The log says the share, too.
    last = [one["eval"]["validation/teacher_start"] for one in records if "eval" in one][-1]
    assert (last > 0.01) == is_said


def test_a_finished_run_says_so_and_more_steps_may_be_asked_of_it_in_another_place(
        pairs, tmp_path, capsys):
    out, moved = tmp_path / "run", tmp_path / "moved"
    more = dict(max_length=3)
    assert run_main(command(pairs, out, "ntp", steps=2, **more)) == 0
    before = contents(out)
    shown = capsys.readouterr().out
    assert re.search(r"[1-9]\d* of 7\d\d texts are longer than --max-length 3 and are cut", shown)
    assert run_main(command(pairs, out, "ntp", steps=2, **more)) == 0
    assert "this run is finished: 2 steps" in capsys.readouterr().out and contents(out) == before
    out.rename(moved)
    assert run_main(command(pairs, moved, "ntp", steps=3, **more)) == 0
    assert checkpoint(moved)["step"] == 3


def swap_tokenizer(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


@pytest.fixture
def trained(pairs, tmp_path_factory, tmp_path):
    """A command that goes on with a run, and the run's train.pt."""
    more = dict(steps=4, save_every=2, log_every=3)
    first = tmp_path_factory.getbasetemp() / "trained"
    if not first.exists():
        run = started(pairs, "mlm", out=first, **more)
        for _ in run.steps(on_step=lambda run: run.step == 2):
            pass
    shutil.copytree(first, tmp_path / "run")
    source = shutil.copy(pairs / "pairs.tsv", tmp_path)
    words = command(pairs, tmp_path / "run", "mlm", data=source, **more)
    return words, tmp_path / "run" / "train.pt"


def like(saved):
    return saved["moments"][0]["exp_avg"]


# What a file could do to the memory of fused AdamW, which trusts its moments.
HOSTILE = {
    "shape": lambda saved: saved["moments"][0].update(exp_avg=torch.zeros(3)),
    "dtype": lambda saved: saved["moments"][0].update(exp_avg_sq=like(saved).half()),
    "stride": lambda saved: saved["moments"][0].update(
        exp_avg=torch.zeros(1).expand(like(saved).shape)),
    "step": lambda saved: saved["moments"][0].update(step=torch.zeros(7))}


def hostile(change):
    def work(path):
        saved = checkpoint(path.parent)
        change(saved)
        torch.save(saved, path)
    return work


def add_row(path):
    with open(path.parents[1] / "pairs.tsv", "a", encoding="utf-8") as file:
        file.write("new\twen\n")


class Program:
    """What a pickle executes when it is read."""
    def __reduce__(self):
        return os.mkdir, ("executed",)


UNFIT = {  # flags, what happens to train.pt or beside it, what is said of the run
    "settings": ("--layers 2 --mask-ratio 0.3 --seed 1", None, "config.mlm.mask_ratio was 0.15, "
                 "is 0.3; config.model.layers was 1, is 2; config.seed was 0, is 1"),
    "objective": ("--objective contrastive", None, "a run of mlm, not of contrastive"),
    "fewer steps": ("--steps 1", None, "step 2, beyond --steps 1"),
    "data": ("", add_row, "rows was"),
    "tokenizer": ("", lambda path: swap_tokenizer(path.parent), "tokenizer was"),
    # A trained model whose checkpoint is gone is not replaced by a new one.
    "gone": ("", Path.unlink, "model.pt and no train.pt"),
    "cut": ("", lambda path: path.write_bytes(path.read_bytes()[:5000]), "train.pt"),
    "other": ("", lambda path: torch.save([1], path), "train.pt"),
    "old": ("", hostile(lambda saved: saved.update(format=1)), "no checkpoint of this version"),
    "program": ("", lambda path: path.write_bytes(pickle.dumps(Program())), "train.pt"),
} | {name: ("", hostile(change), "moments 0 are") for name, change in HOSTILE.items()}


@pytest.mark.parametrize("case", UNFIT)
def test_what_cannot_be_gone_on_with_is_named_and_nothing_is_touched(
        case, trained, refused, monkeypatch):
    words, path = trained
    monkeypatch.chdir(path.parents[1])
    flags, change, said = UNFIT[case]
    if change:
        change(path)
    before = contents(path.parent)
    line = refused([*words, *flags.split()])
    assert said in line and (change or "damaged" not in line)
    assert contents(path.parent) == before and not os.path.exists("executed")


def test_a_folder_with_other_things_in_it_is_left_alone(pairs, tmp_path, refused):
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    for out in (tmp_path, tmp_path / "notes.txt" / "run"):
        assert "notes.txt" in refused(command(pairs, out, "mlm", steps=2))
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_leftovers_of_killed_writes_are_removed_by_the_run_that_owns_the_folder(trained):
    words, path = trained
    left = path.parent / ".export.abc.part"
    for step in (3, 4):
        (left / "deep").mkdir(parents=True)
        (path.parent / ".model.pt.abc.part").write_bytes(b"half")
        assert run_main([*words, "--steps", str(step)]) == 0
        assert not list(path.parent.glob(".*.part"))
    shutil.rmtree(path.parent)
    (left / "deep").mkdir(parents=True)
    assert run_main(words) == 0 and not left.exists()


def test_a_run_whose_folder_was_trained_in_meanwhile_is_refused(pairs, tmp_path):
    words = command(pairs, tmp_path / "run", "mlm", steps=2)
    first = train.Run(train.parse(words), True)
    train.Run(train.parse(words), True)  # a cell that is run again
    steps = first.steps(every=1)
    next(steps)
    with pytest.raises(BadInput, match="this process trains in .* already: end that loop first"):
        next(train.Run(train.parse(words), True).steps())
    steps.close()  # saved at step 0
    assert run_main(words) == 0
    with pytest.raises(BadInput, match="was trained in meanwhile"):
        next(first.steps())


@pytest.mark.parametrize("lost", ["eval.json", "model.pt", "last line", "steps"])
def test_what_a_kill_has_undone_is_made_good(lost, trained):
    words, path = trained
    before = path.read_bytes()
    assert run_main(words) == 0
    log = path.with_name("log.jsonl")
    records = logged(path.parent)
    results = path.with_name("eval.json").read_bytes()
    if lost == "steps":  # after the last checkpoint, and logged all the same
        path.write_bytes(before)
    elif lost == "last line":
        lines = log.read_text(encoding="utf-8").splitlines()
        log.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
    else:
        path.with_name(lost).unlink()
    assert run_main(words) == 0 and path.with_name("model.pt").exists()
    assert logged(path.parent) == records and path.with_name("eval.json").read_bytes() == results


KILLED = """
import os, signal, sys
import train
rename, left = os.replace, iter(range(4))
def replace(*paths):
    if next(left, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(*paths)
os.replace = replace
sys.exit(train.main(sys.argv[1:]))
"""


def test_every_kill_minus_nine_is_made_good_bit_for_bit(pairs, tmp_path):
    """A process is killed before the fifth file that it wrote gets its name: before train.pt, then
    between train.pt and model.pt, then before eval.json."""
    more = dict(steps=4, save_every=1, log_every=1)
    words = command(pairs, tmp_path / "run", "mlm", **more)
    status = []
    while not status or status[-1]:
        done = subprocess.run([sys.executable, "-c", KILLED, *words], capture_output=True,
                              env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)})
        status.append(done.returncode)
        assert status[-1] in (0, -signal.SIGKILL) and len(status) < 9, done.stderr
    assert len(status) > 3 and not list((tmp_path / "run").glob(".*.part"))
    assert run_main(command(pairs, tmp_path / "whole", "mlm", **more)) == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_lock_that_is_a_link_is_not_followed(pairs, tmp_path):
    (tmp_path / "target").write_text("mine", encoding="utf-8")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        run_main(command(pairs, tmp_path / "run", "mlm", steps=1))
    assert (tmp_path / "target").read_text(encoding="utf-8") == "mine"


# ---- a masking of one's own


OWN_MASKING = """
import json, sys
import numpy as np
import data

def tail_mask(ids, ratio, rng, special):
    chosen = np.zeros(len(ids), bool)
    chosen[len(ids) // 2:] = ~np.isin(ids[len(ids) // 2:], special.ids)
    hidden.append(int(chosen.sum()))
    return chosen

data.MASKS["tail"] = tail_mask  # the line that the dict gets
import train
for name, settings in json.loads(sys.argv[1]).items():
    hidden = []
    batch = train.batch(name, masking="tail", **settings)
    assert sum(hidden) == len(batch["target_positions"]) > 0, name
    words = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
    assert train.main(["--objective", name, "--masking", "tail", "--steps", "2",
                       "--out", f"out/{name}", *words]) == 0
"""


def test_a_new_masking_is_one_function_and_one_line(pairs, tmp_path):
    """For every objective that hides tokens, from the command line and from a notebook."""
    names = ("mlm", "mexma", "bepa", "hybrid")
    given = json.dumps({name: settings(pairs, name) for name in names})
    done = subprocess.run([sys.executable, "-c", OWN_MASKING, given], cwd=tmp_path, text=True,
                          capture_output=True, env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-2000:]
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(names)


# ---- what is not finite


def test_resuming_never_writes_weights_that_are_not_finite(trained, refused):
    words, path = trained
    model = path.with_name("model.pt")
    before = model.read_bytes()
    hostile(lambda saved: saved["weights"]["model.embed.weight"].fill_(math.nan))(path)
    os.utime(model, (1, 1))  # older, as if a kill had come before it was written
    assert "the weights are not finite and were not saved" in refused(words)
    assert model.read_bytes() == before


def test_a_loss_that_is_not_finite_stops_and_other_flags_may_be_tried(pairs, tmp_path, refused):
    out = tmp_path / "run"
    more = dict(steps=30, warmup=0, clip=0, log_every=5)
    error = refused(command(pairs, out, lr=1e30, save_every=1, **more))
    assert "not finite (loss " in error and "koleo" in error
    assert torch.isfinite(checkpoint(out)["weights"]["model.embed.weight"]).all()
    # Without a checkpoint the folder may be begun anew.
    error = refused(command(pairs, tmp_path / "new", lr=1e30, **more))
    assert "not finite" in error
    assert run_main(command(pairs, tmp_path / "new", steps=2)) == 0


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_step_that_is_not_finite_leaves_the_weights_bit_for_bit(factor, pairs):
    run = started(pairs, "contrastive", steps=3)
    run.window.append(run.train_step(run.make_batch(0), run.objective))
    before = {name: value.clone() for name, value in run.objective.state_dict().items()}
    moments = [state["exp_avg"].clone() for state in run.optimizer.state.values()]

    def broken(batch):
        loss, terms = run.objective(batch)
        return loss * factor, terms

    run.window.append(run.train_step(run.make_batch(1), broken))
    assert_equal(before, dict(run.objective.state_dict()))
    for old, state in zip(moments, run.optimizer.state.values()):
        assert torch.equal(old, state["exp_avg"]) and state["step"] == 1
    run.step = 2
    with pytest.raises(BadInput, match="step 1: the loss or gradient is not finite"):
        run.numbers()


# ---- compile, accumulation, signals


def test_a_compiled_run_has_the_same_losses(pairs, monkeypatch):
    """With the back end that stops before code is generated: no C++ compiler is required."""
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(model.Block, "compile",
                        lambda self, **more: compiled(self, backend="aot_eager", **more))
    found = [losses(started(pairs, "mlm", steps=3, dropout=0.0, compile=asked))
             for asked in (False, True)]
    assert found[0] == pytest.approx(found[1], abs=1e-4)


@pytest.mark.gpu
@every
def test_a_step_on_a_gpu_never_waits_for_it(name, pairs):
    run = started(pairs, name, steps=9, device="cuda")
    batches = [run.make_batch(step) for step in range(4)]
    for parts in batches[:2]:  # kernels are built and buffers allocated in the first
        run.train_step(parts, run.objective)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for parts in batches[2:]:
            run.window.append(run.train_step(parts, run.objective))
            run.objective.after_step(0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(value.isfinite() for row in run.window for value in row.values())


def test_accumulation_takes_the_steps_of_the_whole_batch(pairs):
    """Of an objective that draws nothing, whose parts have different numbers of tokens."""
    same = dict(steps=3, dropout=0.0, lr=0.01, precision="float32")
    whole, parts = (losses(started(pairs, "ntp", accumulate=count, **same)) for count in (1, 4))
    assert whole == pytest.approx(parts, rel=1e-5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_prints_the_command_that_resumes(number, pairs, tmp_path, refused):
    out = tmp_path / "run"
    words = command(pairs, out, "contrastive", steps=100000, eval_every=100000, save_every=100000)
    process = begun(words)
    while len(evaluate.read_log(out)) < 3:  # in the middle of the loop
        assert process.poll() is None
    assert "another process trains in" in refused(words)
    process.send_signal(number)
    shown, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "stopped and saved at step" in shown, errors
    assert f"To resume: python {ROOT / 'train.py'} --objective contrastive --out {out}" in shown
    assert f"step {checkpoint(out)['step']}" in shown


# ---- several processes


TWO = dict(steps=3, dropout=0.0, lr=0.01, seed=3, precision="float32")
# Of which no rank draws anything, and one process with twice the batch does the same.
DRAWN = {"contrastive": {}, "bepa": dict(order="given", mask_ratio=0.0)}
# Each job meets at a file of its own: at one address two processes meet only once.
JOBS = """
import functools, json, os, sys
import torch.distributed as dist
import train
meet = functools.partial(dist.init_process_group, rank=int(os.environ["RANK"]), world_size=2)
for number, words in enumerate(json.loads(sys.argv[1])):
    dist.init_process_group = functools.partial(meet, init_method=f"file://{__file__}.{number}")
    assert train.main(words) == 0
"""


@pytest.fixture(scope="module")
def two(pairs, tmp_path_factory):
    """A folder with runs of two processes, started once for all of them, and what they printed."""
    folder = tmp_path_factory.mktemp("two")
    jobs = [command(pairs, folder / name, name, **TWO, **DRAWN.get(name, {}))
            for name in OBJECTIVES]
    more = dict(save_every=2, log_every=1, schedule="constant", warmup=0.0)
    for name, steps in (("whole", 4), ("parts", 2), ("parts", 4), ("parts", 4)):
        jobs.append(command(pairs, folder / name, "mlm", steps=steps, **more))
    (folder / "jobs.py").write_text(JOBS, encoding="utf-8")
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    words = [sys.executable, *start, str(folder / "jobs.py"), json.dumps(jobs)]
    process = subprocess.run(words, text=True, capture_output=True, timeout=200,
                             env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)})
    assert process.returncode == 0, process.stderr[-3000:]
    return folder, process.stdout


def test_two_processes_resume_bit_for_bit_and_say_that_they_are_finished(two):
    """Each rank has random numbers of its own for dropout, and goes on with them."""
    folder, printed = two
    one, other = checkpoint(folder / "whole"), checkpoint(folder / "parts")
    assert_equal(one["weights"], other["weights"])
    assert not torch.equal(one["random"][0]["cpu"], one["random"][1]["cpu"])
    assert printed.count("this run is finished: 4 steps") == 1


def assert_close(one, two):
    for name, weight in one.items():
        # The bias of the keys has gradient 0, and Adam scales up its rounding.
        if not name.endswith("qkv.bias"):
            assert (weight - two[name]).abs().max() < 1e-5, name


@pytest.mark.parametrize("name", DRAWN)
def test_two_processes_train_as_one_with_twice_the_batch(name, two, pairs, tmp_path, refused):
    """In-batch losses gather the other rank's vectors with gradients: the weights after three steps
    agree. One process cannot go on with their run."""
    folder, _ = two
    more = TWO | DRAWN[name]
    assert run_main(command(pairs, tmp_path / "one", name, **(more | dict(batch=16)))) == 0
    one, other = checkpoint(tmp_path / "one"), checkpoint(folder / name)
    assert one["tokens"] == other["tokens"]
    assert_close(one["weights"], other["weights"])
    loss = "validation/loss"
    assert one["untrained"][loss] == pytest.approx(other["untrained"][loss], rel=0.2)
    assert "processes was 2, is 1" in refused(command(pairs, folder / name, name, **more))


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in DRAWN])
def test_two_processes_with_masks_train_as_one_that_is_given_both_their_parts(name, two, pairs):
    """Each rank draws the masks of its own part, so one process with twice the batch has others."""
    folder, _ = two
    run = started(pairs, name, **TWO)
    ranks = [train.make_batches(run.settings, run.corpus, 8, 3, rank, 2) for rank in (0, 1)]
    for step in range(3):
        parts = []
        for run.batches in ranks:
            parts += run.make_batch(step)
        run.train_step(parts, run.objective.train())
        run.step += 1
        run.objective.after_step(run.step / 3)
    assert_close(run.objective.state_dict(), checkpoint(folder / name)["weights"])


# ---- another run as the start, LoRA, chats, blocks


def from_run(pairs, folder, **more):
    return dict(data=str(pairs / "pairs.tsv"), cache=str(pairs / "cache"), batch=8, eval_limit=20,
                init=str(folder), **more)


@pytest.fixture(scope="module")
def starts(pairs, tmp_path_factory):
    """Runs to begin from: {objective: folder}, not to be changed."""
    folder = tmp_path_factory.mktemp("starts")
    for name in ("mlm", "ntp"):
        list(started(pairs, name, out=folder / name, steps=1).steps())
    return {name: folder / name for name in ("mlm", "ntp")}


def test_a_run_starts_from_another_with_its_weights_and_tokenizer(pairs, starts, tmp_path, refused):
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(starts["mlm"], first)
    words = ["--objective", "contrastive", "--out", str(second),
             *flags(from_run(pairs, first, steps=2))]
    assert run_main(words) == 0
    assert (first / "tokenizer.json").read_bytes() == (second / "tokenizer.json").read_bytes()
    moved = (weights(first)["embed.weight"] - weights(second)["embed.weight"]).abs().max()
    assert 0 < moved < 2.5 * 2 * 5e-4  # two Adam steps away, not another beginning
    assert run_main([*words, "--steps", "3"]) == 0
    assert "width 32 has no effect with --init" in refused([*words, "--width", 32])
    causal = ["--objective", "ntp", "--out", tmp_path / "x", *flags(from_run(pairs, first))]
    assert "left to right" in refused(causal)
    swap_tokenizer(first)
    assert "tokenizer.json" in refused([*words[:2], "--out", tmp_path / "x", *words[4:]])


def test_rows_that_the_run_of_init_was_trained_on_are_said(pairs, tmp_path, capsys):
    path = pairs / "pairs.tsv"
    rest = tmp_path / "rest.tsv"
    rest.write_text("en\tde\nnew\twen\nother\trehto\nmore\terom\n", encoding="utf-8")
    first = command(pairs, tmp_path / "first", "mlm", steps=1, eval_data=rest, langs="en")
    assert run_main(first) == 0 and "were trained on" not in capsys.readouterr().err
    words = flags(from_run(pairs, tmp_path / "first", steps=1, langs="en"))
    assert run_main(["--objective", "mlm", "--out", str(tmp_path / "second"), *words]) == 0
    assert f"rows of {path.stem} were trained on" in capsys.readouterr().err


def test_what_a_vector_is_and_how_long_a_row_goes_with_the_model(pairs, starts, tmp_path):
    first = tmp_path / "first"
    shutil.copytree(starts["mlm"], first)
    saved = torch.load(first / "model.pt", weights_only=True)
    saved["config"] |= dict(max_tokens=40, normalize=True, pool="max", dropout=0.3)
    torch.save(saved, first / "model.pt")
    with pytest.raises(BadInput, match="max_length 128: .* --max-length 38 fits"):
        train.start("contrastive", **from_run(pairs, first, max_length=128))
    with pytest.raises(BadInput, match="width 64 has no effect with --init"):
        train.settle("contrastive", from_run(pairs, first, width=64))
    own = train.settle("contrastive", from_run(pairs, first))
    assert own.train.max_length == 38
    assert any("max_length 38, not 128" in note for note in own.notes)
    run = train.start("contrastive", **from_run(pairs, first, steps=1, max_length=30))
    config = run.model.config
    assert (config.pool, config.max_tokens, config.normalize) == ("max", 40, True)
    assert config.dropout == run.model.dropout.p == 0.3
    assert any("pool max" in note and "cls" in note for note in run.settings.notes)
    bepa = train.settle("bepa", from_run(pairs, first))
    assert any("loss of bepa reads [CLS]" in note for note in bepa.notes)
    asked = train.settle("contrastive", from_run(pairs, first, max_length=30, pool="cls"))
    assert asked.model.pool == "cls" and not any("pool" in note for note in asked.notes)


@every
def test_lora_trains_with_every_objective_and_resumes_exactly(
        name, pairs, starts, tmp_path, monkeypatch):
    begin = starts["ntp" if OBJECTIVES[name].causal else "mlm"]
    more = from_run(pairs, begin, lora_rank=2, steps=3, **EXTRA.get(name, {}))
    words = ["--objective", name, *flags(more)]
    assert run_main([*words, "--out", str(tmp_path / "whole")]) == 0
    stop_at(monkeypatch, 1)
    assert run_main([*words, "--out", str(tmp_path / "parts")]) == 128 + signal.SIGTERM
    monkeypatch.undo()
    assert run_main([*words, "--out", str(tmp_path / "parts")]) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    saved = checkpoint(tmp_path / "whole")["weights"]
    assert "model.embed.weight" not in saved and any(".a." in key for key in saved)
    before, after = weights(begin), weights(tmp_path / "whole")
    trained = [key for key in before if key in after and not torch.equal(before[key], after[key])]
    assert any("qkv" in key for key in trained) and not any("norm" in key for key in trained)


def chat(folder, **more):
    rows = []
    for i in range(60):
        system = "You are short." if i % 3 else ""
        rows.append({"user": f"write {i} twice", "assistant": f"{i} {i}", "system": system})
    data = write(folder / "chat.jsonl", lines(*rows))
    return dict(SMALL, data=data, cache=str(folder / "cache"), **more)


@pytest.mark.parametrize("name", ["ntp", "llm-jepa"])
def test_a_chat_trains_with_and_without_its_system_text_and_is_evaluated_alike(name, tmp_path):
    tokens = {}
    lengths = {}
    for view in ("plain", "system"):
        more = chat(tmp_path, chat=view, steps=2)
        run = train.start(name, out=tmp_path / view, **more)
        list(run.steps())
        assert exit_status(evaluate.main, [str(tmp_path / view), "--json"]) == 0
        tokens[view] = run.tokens
        lengths[view] = sum(map(len, run.evaluation().ids["user"]))
    assert tokens["plain"] < tokens["system"] and lengths["plain"] < lengths["system"]


def test_llm_jepa_embeds_a_text_as_it_reads_it_in_training(tmp_path):
    run = train.start("llm-jepa", **chat(tmp_path, predictors=2, steps=1))
    special = run.corpus.special
    batch = run.make_batch(0)[0]
    read = batch["packed"].tokens[batch["vector_index"]]
    assert set(read[0].tolist()) == {special.preds[0]}  # [PRED]_1 stands last behind a text
    ids = run.evaluation().ids
    for row in ids["user"]:
        assert list(row[-2:]) == [special.preds[1], special.preds[0]]
    for row in ids["assistant"]:
        assert not set(row) & {*special.preds, special.sep}


@pytest.mark.parametrize("name", ["mlm", "hybrid"])
def test_blocks_of_text_are_rows_of_one_length(name, tmp_path, refused):
    text = write(tmp_path / "text.txt", "".join(f"line {i} of the text\n" for i in range(300)))
    valid = write(tmp_path / "valid.txt", "".join(f"another line {i}\n" for i in range(30)))
    more = dict(SMALL, **EXTRA.get(name, {}), data=text, block=32, steps=2,
                cache=str(tmp_path / "cache"))
    error = refused(["--objective", name, *flags(more), "--out", tmp_path / "run"])
    assert "block 32" in error and "--eval-data" in error
    copy = write(tmp_path / "copy.txt", Path(text).read_bytes())
    with pytest.raises(BadInput, match="copy.txt holds the rows that --data trains on"):
        train.start(name, eval_data=copy, **more)
    run = train.start(name, eval_data=valid, **more)
    batch = run.make_batch(0)[0]
    clean = batch.get("clean", batch["packed"])
    assert clean.cu_seqlens.diff().tolist() == [34] * 8  # [CLS], 32 tokens, [SEP]


# ---- training as a function


def test_start_trains_without_a_folder_and_gives_a_model_to_use(pairs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = started(pairs, "contrastive", steps=6)
    handlers = signal.getsignal(signal.SIGINT)
    records = []
    thread = threading.Thread(target=lambda: records.extend(run.steps(every=2)))
    thread.start()  # there too
    thread.join(60)
    assert [record["step"] for record in records] == [0, 2, 4, 6, 6]
    assert {"loss", "align"} < records[1].keys() and "geometry/rankme" in records[0]["eval"]
    assert run.scores() == records[-1]["eval"]
    vectors = run.encode(["sun moon", "road house", "fish"])
    assert vectors.shape == (3, 16) and torch.allclose(vectors.norm(dim=1), torch.ones(3))
    assert list(tmp_path.iterdir()) == [] and signal.getsignal(signal.SIGINT) is handlers


def test_leaving_the_loop_leaves_a_usable_model_and_the_folder_goes_on(pairs, tmp_path):
    more = dict(steps=9, log_every=2, save_every=100, eval_every=4)
    run = started(pairs, "mlm", out=tmp_path / "parts", **more)
    for record in run.steps():
        if record["step"] == 4:
            break
    assert run.encode(["sun"]).isfinite().all() and checkpoint(tmp_path / "parts")["step"] == 4
    list(started(pairs, "mlm", out=tmp_path / "parts", **more).steps())
    list(started(pairs, "mlm", out=tmp_path / "whole", **more).steps())
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


CELL = """
class Mine(objectives.Contrastive):
    name = "mine"
    toy = dict(lr=1e-3, lr_start=0.0, max_length=128, dropout=0.2)

    @dataclass(frozen=True)
    class Config:
        temperature: float = 0.05  # divides the cosines

    def forward(self, batch):
        x, y = self.model.pool(self.model(batch["packed"]), batch["packed"]).chunk(2)
        loss = objectives.info_nce(x, y, self.config.temperature)
        return loss, {"align": loss.detach()}
"""


def test_a_class_of_a_notebook_cell_is_trained_like_any_other(pairs, monkeypatch, capsys):
    space = {"objectives": objectives, "dataclass": dataclass}
    exec(CELL, space)  # its text is in no file
    monkeypatch.setitem(OBJECTIVES, "mine", space["Mine"])
    more = settings(pairs, "mine", steps=3)
    del more["dropout"]
    run = train.start("mine", **more)
    assert len(losses(run)) == 3 and run.train.lr == 1e-3 and run.model.config.dropout == 0.2
    with pytest.raises(SystemExit):
        run_main(["--objective", "mine", "--help"])
    assert "--temperature" in capsys.readouterr().out
    monkeypatch.setattr(space["Mine"], "toy", dict(droput=0.1))
    with pytest.raises(BadInput, match="'droput', which is no setting; did you mean dropout"):
        train.start("mine")
