"""Settings, schedule, the loop, exact resume, kills, refusals, and training from Python."""

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
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch
from test_house import write_pairs

import evaluate
import model
import objectives
import train
from common import BadInput, run_program
from objectives import OBJECTIVES

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
SMALL = dict(width=16, layers=1, heads=2, ffn_dim=32, dropout=0.1, batch=8, eval_limit=20,
             vocab=300)
EXTRA = {  # what else must be small
    "mexma": dict(head_layers=1, head_heads=2, head_hidden=16),
    "hybrid": dict(predictor_width=16, predictor_layers=1, predictor_heads=2)}
every = pytest.mark.parametrize("name", OBJECTIVES)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """Return a TSV file of made-up pairs: the same words under a cipher."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.tsv"
    write_pairs(path, 400)
    return path


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    """Run every test in its own folder: the cache of data files is in the working folder."""
    monkeypatch.chdir(tmp_path)


def flags(given):
    """Return {setting: value} as words of a command line."""
    words = []
    for name, value in given.items():
        flag = name.replace("_", "-")
        words.append(f"--no-{flag}" if value is False else f"--{flag}")
        words += [] if isinstance(value, bool) else [str(value)]
    return words


def settings(pairs, objective="mexma", **more):
    return {"data": str(pairs), **SMALL, **EXTRA.get(objective, {}), **more}


def command(pairs, out, objective="mexma", **more):
    return ["--objective", objective, "--out", str(out), *flags(settings(pairs, objective, **more))]


def started(pairs, objective="mexma", out=None, **more):
    return train.start(objective, out=out, **settings(pairs, objective, **more))


@pytest.fixture
def refused(refused):
    """refused(words): return the error line of train.py."""
    return functools.partial(refused, train.main, printed=None)


def begun(words):
    """Start a process that trains, and return it after step 0."""
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


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


# Bit for bit, in whatever dictionaries and lists.
assert_equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


def assert_same_run(one, two):
    """Assert that weights, optimizer and random state are the same bit for bit."""
    first, second = checkpoint(one), checkpoint(two)
    for name in ("weights", "optimizer", "random", "step", "untrained"):
        assert_equal(first[name], second[name], msg=name)
    assert_equal(weights(one), weights(two))


def stop_at(monkeypatch, step):
    """Send SIGTERM in the middle of a step."""
    whole = train.Run.train_step

    def interrupted(run, *arguments):
        if run.step + 1 == step:
            signal.raise_signal(signal.SIGTERM)
        return whole(run, *arguments)

    monkeypatch.setattr(train.Run, "train_step", interrupted)


# ---- schedule and optimizer


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


def train_and_count(run):
    """Train to the end and return how many numbers the forward passes kept for the backward."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x,
                                                  lambda x: x):
        list(run.steps())
    return sum(kept)


@pytest.mark.parametrize("objective", ["mexma", "hybrid"])
def test_gradient_checkpointing_changes_no_bit_of_a_step(pairs, objective):
    runs, kept = [], []
    for on in (False, True):
        runs.append(started(pairs, objective, steps=2, dropout=0.1, gradient_checkpointing=on))
        kept.append(train_and_count(runs[-1]))
    assert_equal(*(dict(run.objective.state_dict()) for run in runs))
    assert kept[1] < kept[0]


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


REFUSALS = [
    ("--stepz 5", "did you mean --steps?"), ("--objective mexmaa", "did you mean mexma?"),
    ("--obj mlm", "did you mean --objective?"), ("--objective", "--objective"),
    ("--size tiny", "did you mean toy?"), ("--objective nowhere.py", "nowhere.py"),
    ("--device meta", "meta"), ("--size huge", "huge"), ("--steps many", "many"),
    ("--steps 0", "steps is 0"), ("--lr -1", "lr is -1"), ("--lr nan", "nan"),
    ("--warmup 500", "a fraction, from 0 to 1"), ("--batch 10 --accumulate 3", "batch 10"),
    ("--batch 4 --accumulate 4", "batch 4"), ("--schedule cosin", "cosin"),
    ("--device cuda:7", "cuda:7"), ("--precision float16 --device cpu", "float16"),
    ("--heads 3", "heads"), ("--data nowhere.tsv", "nowhere.tsv"), ("--langs en,xx", "xx"),
    ("--langs en de", "--langs en,de"), ("stray", "stray"),
    ("--max-length 600 --max-positions 512", "max_length 600"), ("--koleo-weight inf", "inf"),
    ("--seed -3", "-3"), (f"--seed {10 ** 20}", "seed"), ("--vocab 7", "vocab is 7"),
    ("--max-positions 9223372036854775807", "max_positions"), ("--chat system", "chat system"),
    ("--block 32", "block 32"), ("--objective mlm --pairs neighbours", "pairs neighbours"),
    ("--objective llm-jepa --align info_nce --batch 8 --accumulate 8", "batch 8"),
    ("--init nowhere", "nowhere"), ("--preset nope", "preset 'nope'"),
    (f"--ffn-dim {2 ** 63}", "ffn_dim"),
    (f"--vocab {10 ** 9}", "vocab is 1000000000"), ("--lora-rank 4", "add --init"),
    ("--no-symmetrical", "add --align-views dirty"), (f"--out {'x' * 300}", "--out"),
    ("--out /dev/null/x", "/dev/null/x"), ("--max_length 8", "did you mean --max-length?"),
    *[(f"--{flag}", text) for flag, text in train.ELSEWHERE.items()]]


@pytest.mark.parametrize("words, value", REFUSALS, ids=[words[:40] for words, _ in REFUSALS])
def test_a_mistake_is_one_line_that_names_the_value_and_leaves_nothing(
        words, value, tmp_path, refused):
    assert value in refused(words)
    assert not (tmp_path / "out").exists()


@every
def test_help_shows_every_flag_with_its_default_and_the_objectives_own_first(name, capsys):
    with pytest.raises(SystemExit) as end:
        train.main(["--objective", name, "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    for config in (OBJECTIVES[name].Config, train.TrainConfig):
        for option in fields(config):
            assert f"--{option.name.replace('_', '-')}" in text
    values, toy = train.defaults(OBJECTIVES[name], "toy")
    assert f"[{(values | toy)['lr']}]" in text
    assert text.index(f"options of {name}") < text.index("training:")
    assert all(preset in text for preset in OBJECTIVES[name].presets)


def test_each_layer_of_settings_overrides_the_one_before():
    def resolved(words):
        return train.resolve_config(*train.parse(words.split()))

    train_config, options, _, notes = resolved("--objective mexma")
    assert options.koleo_weight == 1.0
    assert any("koleo_weight 1.0 (paper: 0.01)" in note for note in notes)
    train_config, options, _, notes = resolved("--koleo-weight 0.01 --lr 0.5")
    assert options.koleo_weight == 0.01 and train_config.lr == 0.5
    assert not any("koleo" in note or " lr " in note for note in notes)
    train_config, options, _, notes = resolved("--size base")
    assert (options.head_layers, options.head_hidden, notes) == (6, 3072, [])
    assert (train_config.lr, train_config.max_length) == (1e-4, 200)
    # As many positions as a row of two texts needs.
    train_config, _, shape, _ = resolved("--objective ntp --size small")
    assert train_config.max_length == 512 and shape.max_positions == 2 * (512 + 2)
    train_config, options, _, _ = resolved("--objective llm-jepa --preset scratch --size small "
                                           "--jepa-weight 4")
    assert (train_config.lr, options.jepa_weight, options.predictors) == (8e-5, 4, 3)
    assert train_config.data == "regex"
    with pytest.raises(BadInput, match="there is no setting learningrate"):
        train.start("mlm", learningrate=1)


# ---- how a program ends


def fail(error, arguments):
    raise error


@pytest.mark.parametrize("error, status, text", [
    (BadInput("a\nb"), 2, "error: a b\n"),
    (KeyboardInterrupt(), 130, "stopped; no file is half written\n")])
def test_a_mistake_and_ctrl_c_are_one_line(error, status, text, capsys):
    with pytest.raises(SystemExit) as end:
        run_program(functools.partial(fail, error))
    assert end.value.code == status and capsys.readouterr().err == text


def test_a_closed_pipe_ends_the_program_and_the_run_is_saved(pairs, tmp_path):
    process = begun(command(pairs, tmp_path / "run", "contrastive", steps=100000, eval_every=1))
    process.stdout.close()
    assert process.wait(timeout=60) == 141 and process.stderr.read() == ""
    assert checkpoint(tmp_path / "run")["step"] > 0


# ---- an objective of a file


IDEA = '''
from dataclasses import dataclass

import torch

from objectives import Objective, Packed, add_special


class Length(Objective):
    """Train every embedding to have a given norm."""
    name = "length"
    toy = dict(lr=1e-3, steps=4)

    @dataclass(frozen=True)
    class Config:
        target: float = 1.0  # norm of the embeddings

    @staticmethod
    def collate(examples, rng, config, special):
        rows = [add_special(ids, special) for ids, in examples]
        return dict(packed=Packed.of(rows), loss_denominators=torch.zeros(0))

    def forward(self, batch):
        embeddings = self.model.pool(self.model(batch["packed"]), batch["packed"])
        loss = (embeddings.norm(dim=1) - self.config.target).square().mean()
        return loss, {"length": loss.detach()}
'''


def test_an_objective_of_a_file_has_help_refusals_resume_and_evaluation(
        pairs, tmp_path, monkeypatch, refused, capsys):
    file = tmp_path / "my_idea.py"
    file.write_text(IDEA, encoding="utf-8")
    with pytest.raises(SystemExit):
        train.main(["--objective", str(file), "--help"])
    assert re.search(r"options of length:\n +--target FLOAT +norm of the embeddings \[1.0\]",
                     capsys.readouterr().out)
    words = command(pairs, tmp_path / "run", str(file), save_every=1)
    assert "did you mean --target?" in refused([*words, "--targt", "2"])
    # It is stopped, and the command that it prints resumes.
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        assert train.main(words) == 128 + signal.SIGTERM
    printed = shlex.split(capsys.readouterr().out.splitlines()[-1].partition("To resume: ")[2])
    assert printed[:2] == ["python", "train.py"] and train.main(printed[2:]) == 0
    assert "resuming at step 2 of 4" in capsys.readouterr().out
    assert train.main(command(pairs, tmp_path / "whole", str(file), save_every=1)) == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert not evaluate.main([str(tmp_path / "run"), "--json"])


# ---- runs and resume


@every
def test_every_objective_trains_logs_is_evaluated_and_resumes_bit_for_bit(
        name, pairs, tmp_path, monkeypatch, capsys):
    more = dict(steps=9, save_every=4, log_every=2, eval_every=5)
    out = tmp_path / "whole"
    assert train.main(command(pairs, out, name, **more)) == 0
    shown = capsys.readouterr().out
    assert "step     0" in shown and "tokens in" in shown
    first, *records = evaluate.read_log(out)
    assert first["config"]["objective"] == name and first["parameters"] > 0
    assert first["data_files"].keys() == {str(pairs)}
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == [2, 4, 6, 8, 9]
    assert all(math.isfinite(record["loss"]) for record in steps)
    rest = {"step", "lr", "grad_norm", "tokens", "seconds", "tokens_per_second"}
    assert rest < steps[0].keys() and steps[-1]["tokens"] > 0
    evaluated = [record for record in records if "eval" in record]
    assert [record["step"] for record in evaluated] == [0, 5, 9]
    terms = {f"validation/{term}" for term in steps[0].keys() - rest}
    assert all(terms < record["eval"].keys() for record in evaluated)
    written = {path.name for path in out.iterdir()}
    assert written == {"model.pt", "train.pt", "tokenizer.json", "log.jsonl", "eval.json"}
    known = json.loads((out / "eval.json").read_text(encoding="utf-8"))
    assert " rows of " in known.pop("rows") and len(known.pop("model")) == 8
    assert known == evaluated[-1]["eval"]
    for step in (1, 2, 6):
        with monkeypatch.context() as patch:
            stop_at(patch, step)
            status = train.main(command(pairs, tmp_path / "parts", name, **more))
        assert status == 128 + signal.SIGTERM and checkpoint(tmp_path / "parts")["step"] == step
        capsys.readouterr()
    assert train.main(command(pairs, tmp_path / "parts", name, **more)) == 0
    assert_same_run(out, tmp_path / "parts")
    logged = [record["step"] for record in evaluate.read_log(tmp_path / "parts")[1:]]
    assert logged == sorted(logged) and logged[-1] == 9
    capsys.readouterr()
    assert not evaluate.main([str(out), "--json"])
    assert "geometry/rankme" in json.loads(capsys.readouterr().out)


def test_auto_is_bfloat16_on_a_cpu_that_supports_it_and_a_run_keeps_its_precision(
        pairs, tmp_path, monkeypatch):
    can = {"avx512_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: can)
    words = command(pairs, tmp_path / "run", "contrastive", device="cpu", save_every=2)
    assert train.main([*words, "--steps", "2"]) == 0
    assert evaluate.read_log(tmp_path / "run")[0]["precision"] == "bfloat16"
    # The same run on a machine that does not support it, and a new run there.
    can.clear()
    run = started(pairs, "contrastive", tmp_path / "run", steps=3, device="cpu", save_every=2)
    assert run.precision == "bfloat16"
    assert started(pairs, "contrastive", steps=1, device="cpu").precision == "float32"
    # Embeddings are computed in float32 all the same.
    embeddings = run.encode(["sun moon", "road house"])
    assert embeddings.dtype == torch.float32
    run.model.double()
    assert torch.allclose(embeddings, run.encode(["sun moon", "road house"]).float(), atol=1e-5)


def test_muon_trains_matrices_that_are_no_embeddings_and_adamw_the_rest(pairs, tmp_path):
    """One step of each, recomputed; and a run that is resumed."""
    run = started(pairs, "mexma", steps=4, warmup=0, optimizer="muon", weight_decay=0.1, lr=1e-3,
                  precision="float32")
    before = {name: p.detach().clone() for name, p in run.objective.named_parameters()}
    run.train_step(run.make_batch(0), run.objective)
    after = dict(run.objective.named_parameters())
    tables = ("model.embed.weight", "model.position_embedding.weight")
    rate = run.train.lr
    for name, old in before.items():
        change = after[name].detach() - (old * (1 - rate * 0.1) if old.ndim == 2 else old)
        if old.ndim == 2 and name not in tables:
            # An orthogonal matrix has singular values of 1; the update has 0.2 sqrt(longer side).
            size = torch.linalg.svdvals(change) / (rate * 0.2 * math.sqrt(max(old.shape)))
            assert 0.6 < size.median() < 1.3, name
        else:
            # The first step of Adam is the sign of the gradient.
            moved = change[change.abs() > 0.5 * rate].abs()
            assert len(moved) and torch.allclose(moved, torch.full_like(moved, rate), rtol=0.02)
    more = dict(steps=4, optimizer="muon", save_every=1)
    list(started(pairs, "mexma", tmp_path / "whole", **more).steps())
    for record in started(pairs, "mexma", tmp_path / "parts", **more).steps(every=1):
        if record["step"] == 2:
            break
    list(started(pairs, "mexma", tmp_path / "parts", **more).steps())
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_the_validation_loss_is_that_of_fixed_batches_and_disturbs_nothing(pairs):
    trained = []
    for often in (1, 100):
        run = started(pairs, "mexma", steps=4, eval_every=often, align="sigreg")
        trained.append(losses(run))
    assert trained[0] == trained[1]
    run = started(pairs, "mexma", steps=4)
    assert run.scores() == run.scores()
    # The same loss, one batch after the other.
    micro_batches = []
    for step in range(20 // 8):  # --eval-limit // --batch
        micro_batches += run.make_batch(step, training=False)
    micro_batches = train.average_denominators(micro_batches, 1)
    with torch.no_grad():
        found = [run.objective.eval()(one)[0] for one in micro_batches]
    assert run.scores()["validation/loss"] == pytest.approx(float(sum(found) / len(found)))
    # Views that training drops are evaluated.
    whole, dropping = (started(pairs, "llm-jepa", steps=1, **options).validate() for options in (
        {}, dict(jepa_dropout=0.9)))
    assert whole == dropping and whole["validation/jepa"] > 0


def test_a_validation_loss_that_is_not_finite_is_a_warning(pairs, tmp_path, monkeypatch):
    whole = train.Run.validate
    monkeypatch.setattr(train.Run, "validate", lambda run: whole(run) | {"validation/x": math.nan})
    list(started(pairs, "mlm", out=tmp_path / "run", steps=2).steps())
    records = evaluate.read_log(tmp_path / "run")
    warnings = [(one["step"], one["warning"]) for one in records if "warning" in one]
    assert warnings == [(step, "validation/x is not a finite number") for step in (0, 2)]
    assert "validation/x" not in (tmp_path / "run/eval.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("momentum, warns", [(0.996, True), (0, False)])
def test_a_teacher_that_still_is_its_random_start_is_a_warning(pairs, tmp_path, momentum, warns):
    list(started(pairs, "hybrid", out=tmp_path / "run", steps=8, momentum=momentum).steps())
    records = evaluate.read_log(tmp_path / "run")
    assert warns == any("--momentum" in one.get("warning", "") for one in records)


def test_a_finished_run_is_left_alone_and_can_be_moved_and_trained_longer(pairs, tmp_path, capsys):
    out, moved = tmp_path / "run", tmp_path / "moved"
    more = dict(max_length=3)
    assert train.main(command(pairs, out, "ntp", steps=2, **more)) == 0
    shown = capsys.readouterr().out
    assert re.search(r"[1-9]\d* of 7\d\d texts are longer than --max-length 3", shown)
    before = contents(out)
    assert train.main(command(pairs, out, "ntp", steps=2, **more)) == 0
    assert "this run is finished" in capsys.readouterr().out and contents(out) == before
    out.rename(moved)
    assert train.main(command(pairs, moved, "ntp", steps=3, **more)) == 0
    assert checkpoint(moved)["step"] == 3


@pytest.fixture
def trained(pairs, tmp_path_factory, tmp_path):
    """Return a command that continues a run, and the run's train.pt."""
    more = dict(steps=4, save_every=2, log_every=3)
    first = tmp_path_factory.getbasetemp() / "trained"
    if not first.exists():
        for record in started(pairs, "mlm", out=first, **more).steps(every=2):
            if record.get("loss"):
                break
    shutil.copytree(first, tmp_path / "run")
    source = shutil.copy(pairs, tmp_path)
    words = command(pairs, tmp_path / "run", "mlm", **more | dict(data=source))
    return words, tmp_path / "run" / "train.pt"


def like(saved):
    return saved["optimizer"][0]["exp_avg"]


# What a file could do to the memory of fused AdamW, which trusts the moments' shapes.
HOSTILE = {
    "shape": lambda saved: saved["optimizer"][0].update(exp_avg=torch.zeros(3)),
    "sparse": lambda saved: saved["optimizer"][0].update(exp_avg=like(saved).to_sparse()),
    "step": lambda saved: saved["optimizer"][0].update(step=torch.zeros(7))}


def rewritten(change):
    def work(path):
        saved = checkpoint(path.parent)
        change(saved)
        torch.save(saved, path)
    return work


def add_row(path):
    with open(path.parents[1] / "pairs.tsv", "a", encoding="utf-8") as file:
        file.write("new\twen\n")


def swap_tokenizer(path):
    path = path.parent / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")


class Program:
    """What a pickle executes when it is read."""
    def __reduce__(self):
        return os.mkdir, ("executed",)


UNFIT = {  # flags, what happens to train.pt or beside it, what the error says
    "settings": ("--layers 2 --mask-ratio 0.3", None, "config.mlm.mask_ratio was 0.15, is 0.3; "
                 "config.model.layers was 1, is 2"),
    "objective": ("--objective contrastive", None, "objective was mlm, is contrastive"),
    "fewer steps": ("--steps 1", None, "step 2, after --steps 1"),
    "data": ("", add_row, "content of --data was"),
    "tokenizer": ("", swap_tokenizer, "tokenizer.json"),
    # A trained model without its checkpoint is not replaced by a new one.
    "gone": ("", Path.unlink, "model.pt, but no train.pt"),
    "cut": ("", lambda path: path.write_bytes(path.read_bytes()[:5000]), "train.pt"),
    "program": ("", lambda path: path.write_bytes(pickle.dumps(Program())), "train.pt"),
} | {name: ("", rewritten(change), "parameter 0 has the shape") for name, change in HOSTILE.items()}


@pytest.mark.parametrize("case", UNFIT)
def test_a_run_that_cannot_be_resumed_is_named_and_left_alone(case, trained, refused):
    words, path = trained
    given, change, text = UNFIT[case]
    if change:
        change(path)
    before = contents(path.parent)
    assert text in refused([*words, *given.split()])
    assert contents(path.parent) == before and not os.path.exists("executed")


def test_a_run_is_evaluated_on_the_same_rows_to_its_end(pairs, tmp_path, refused):
    for name, count in (("valid", 30), ("other", 40)):
        write_pairs(tmp_path / f"{name}.tsv", count)
    words = command(pairs, tmp_path / "run", "mlm", steps=1, eval_limit=0)
    assert train.main([*words, "--eval-data", "valid.tsv"]) == 0
    assert "held-out rows was" in refused([*words, "--eval-data", "other.tsv", "--steps", 2])
    (tmp_path / "valid.tsv").rename("moved.tsv")
    assert train.main([*words, "--eval-data", "moved.tsv", "--steps", "2"]) == 0


def test_a_folder_with_other_files_is_left_alone(pairs, tmp_path, refused):
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    for out in (tmp_path, tmp_path / "notes.txt" / "run"):
        assert "notes.txt" in refused(command(pairs, out, "mlm", steps=2))
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_only_one_run_at_a_time_trains_in_a_folder(pairs, tmp_path):
    words = command(pairs, tmp_path / "run", "mlm", steps=2)
    first, second = (train.Run(*train.parse(words)) for _ in range(2))
    steps = first.steps(every=1)
    next(steps)
    with pytest.raises(BadInput, match="a process is already training in"):
        next(second.steps())
    steps.close()
    list(second.steps())
    with pytest.raises(BadInput, match="was trained further by another process"):
        next(first.steps())


@pytest.mark.parametrize("lost", ["eval.json", "model.pt", "steps"])
def test_a_resumed_run_restores_what_a_kill_prevented(lost, trained):
    words, path = trained
    before = path.read_bytes()
    assert train.main(words) == 0
    results = path.with_name("eval.json").read_bytes()
    model = path.with_name("model.pt").read_bytes()
    if lost == "steps":  # after the last checkpoint, but in the log
        path.write_bytes(before)
    else:
        path.with_name(lost).unlink()
    (path.parent / ".model.pt.abc.part").write_bytes(b"half")
    assert train.main(words) == 0
    assert path.with_name("model.pt").read_bytes() == model
    assert path.with_name("eval.json").read_bytes() == results
    assert not list(path.parent.glob(".*.part"))
    steps = [record["step"] for record in evaluate.read_log(path.parent)[1:]]
    assert steps == sorted(steps)


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


def test_every_kill_minus_nine_can_be_resumed_bit_for_bit(pairs, tmp_path):
    """A process is killed before the fifth file that it wrote gets its name: before train.pt, then
    between train.pt and model.pt, and so on."""
    more = dict(steps=4, save_every=1, log_every=1)
    words = command(pairs, tmp_path / "run", "mlm", **more)
    status = []
    while not status or status[-1]:
        done = subprocess.run([sys.executable, "-c", KILLED, *words], capture_output=True,
                              env=ENVIRONMENT)
        status.append(done.returncode)
        assert status[-1] in (0, -signal.SIGKILL) and len(status) < 9, done.stderr
    assert len(status) > 2 and not list((tmp_path / "run").glob(".*.part"))
    assert train.main(command(pairs, tmp_path / "whole", "mlm", **more)) == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_an_exception_in_the_callers_loop_loses_no_step(pairs):
    run = started(pairs, "mlm", steps=5)
    with pytest.raises(ZeroDivisionError):
        for record in run.steps(every=1):
            record["step"] / (record["step"] != 2)
    assert [record["step"] for record in run.steps(every=1)] == [3, 4, 5, 5]


# ---- a masking of one's own


OWN_MASKING = """
import json, sys
import numpy as np
import data

def tail_mask(ids, ratio, rng, special):
    chosen = np.zeros(len(ids), bool)
    chosen[len(ids) // 2:] = ~np.isin(ids[len(ids) // 2:], special.ids)
    masked.append(int(chosen.sum()))
    return chosen

data.MASKS["tail"] = tail_mask  # the line that the dictionary gets
import train
for name, settings in json.loads(sys.argv[1]).items():
    masked = []
    batch = train.batch(name, masking="tail", **settings)
    assert sum(masked) == len(batch["target_positions"]) > 0, name
    words = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
    assert train.main(["--objective", name, "--masking", "tail", "--steps", "2",
                       "--out", f"out/{name}", *words]) == 0
"""


def test_a_new_masking_is_one_function_and_one_line(pairs, tmp_path):
    """For every objective that masks tokens, from the command line and from a notebook."""
    names = ("mlm", "mexma", "bepa", "hybrid")
    given = json.dumps({name: settings(pairs, name) for name in names})
    done = subprocess.run([sys.executable, "-c", OWN_MASKING, given], cwd=tmp_path, text=True,
                          capture_output=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(names)


# ---- what is not finite


def test_weights_that_are_not_finite_are_never_written(trained, refused):
    words, path = trained
    before = path.with_name("model.pt").read_bytes()
    rewritten(lambda saved: saved["weights"]["model.embed.weight"].fill_(math.nan))(path)
    assert "the weights are not finite and were not saved" in refused(words)
    assert path.with_name("model.pt").read_bytes() == before


def test_a_loss_that_is_not_finite_stops_and_the_checkpoint_is_intact(pairs, tmp_path, refused):
    out = tmp_path / "run"
    more = dict(steps=30, warmup=0, clip=0, log_every=5, precision="float32")
    error = refused(command(pairs, out, lr=1e30, save_every=1, **more))
    assert "not finite" in error
    if (out / "train.pt").exists():
        assert torch.isfinite(checkpoint(out)["weights"]["model.embed.weight"]).all()
    # Without a checkpoint the run can start again in the same folder.
    assert "not finite" in refused(command(pairs, tmp_path / "new", lr=1e30, **more))
    assert train.main(command(pairs, tmp_path / "new", steps=2)) == 0


# ---- compile, accumulation, signals


def test_a_compiled_run_has_the_same_losses(pairs, monkeypatch):
    """With a backend that generates no code, so that no C++ compiler is needed."""
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
    for micro_batches in batches[:2]:  # the first steps build kernels and allocate buffers
        run.train_step(micro_batches, run.objective)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    found = []
    try:
        for micro_batches in batches[2:]:
            found.append(run.train_step(micro_batches, run.objective))
            run.objective.after_step(0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(value.isfinite() for metrics in found for value in metrics.values())


def test_accumulation_takes_the_steps_of_the_whole_batch(pairs):
    """Of an objective that draws nothing, whose micro-batches have different numbers of tokens."""
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
    assert "a process is already training in" in refused(words)
    process.send_signal(number)
    shown, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "stopped; saved at step" in shown, errors
    assert f"To resume: python train.py --objective contrastive --out {out}" in shown
    assert f"step {checkpoint(out)['step']}" in shown


# ---- several processes


# AdamW: Muon's matrices are bfloat16, which rounds differently.
TWO = dict(steps=3, dropout=0.0, optimizer="adamw", lr=0.01, seed=3, precision="float32")
# These draw nothing, so one process with twice the batch takes the same steps.
DRAWN = {"contrastive": {}, "bepa": dict(order="given", mask_ratio=0.0),
         "llm-jepa": dict(align="info_nce")}
# Each job has its own rendezvous file: two processes can meet at one address only once.
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
    """Return a folder with runs of two processes, all started once, and what they printed."""
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
                             env=ENVIRONMENT)
    assert process.returncode == 0, process.stderr[-3000:]
    return folder, process.stdout


def test_two_processes_resume_bit_for_bit(two):
    """Each process has its own random numbers for dropout and continues them."""
    folder, printed = two
    one, other = checkpoint(folder / "whole"), checkpoint(folder / "parts")
    assert_equal(one["weights"], other["weights"])
    assert not torch.equal(one["random"][0]["cpu"], one["random"][1]["cpu"])
    assert printed.count("this run is finished") == 1


def assert_close(one, two):
    for name, weight in one.items():
        # The bias of the keys has gradient 0, and Adam scales up its rounding error.
        if not name.endswith("qkv.bias"):
            assert (weight - two[name]).abs().max() < 1e-5, name


@pytest.mark.parametrize("name", DRAWN)
def test_two_processes_train_as_one_with_twice_the_batch(name, two, pairs, tmp_path, refused):
    """In-batch losses gather the embeddings of all processes with gradients, so the weights after
    three steps agree. One process cannot resume the run of two."""
    folder, _ = two
    more = TWO | DRAWN[name]
    assert train.main(command(pairs, tmp_path / "one", name, **(more | dict(batch=16)))) == 0
    one, other = checkpoint(tmp_path / "one"), checkpoint(folder / name)
    assert one["tokens"] == other["tokens"]
    assert_close(one["weights"], other["weights"])
    loss = "validation/loss"
    assert one["untrained"][loss] == pytest.approx(other["untrained"][loss], rel=0.2)
    assert "processes was 2, is 1" in refused(command(pairs, folder / name, name, **more))


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in DRAWN])
def test_two_processes_with_masks_train_as_one_that_gets_both_halves(name, two, pairs):
    """Each process draws the masks of its own half of the batch."""
    folder, _ = two
    run = started(pairs, name, **TWO)
    run.world, ranks = 2, []
    for run.rank in (0, 1):
        ranks.append(run.make_batches(run.corpus, 8, 3))
    run.rank, run.world = 0, 1
    for step in range(3):
        micro_batches = []
        for run.batches in ranks:
            micro_batches += run.make_batch(step)
        run.train_step(micro_batches, run.objective.train())
        run.step += 1
        run.objective.after_step(run.step / 3)
    assert_close(run.objective.state_dict(), checkpoint(folder / name)["weights"])


# ---- another run as the start, LoRA, chats, blocks


def from_run(pairs, folder, **more):
    return dict(data=str(pairs), batch=8, eval_limit=20, init=str(folder), **more)


@pytest.fixture(scope="module")
def starts(pairs, tmp_path_factory):
    """Return runs to start from, {objective: folder}; tests must not change them."""
    folder = tmp_path_factory.mktemp("starts")
    for name in ("mlm", "ntp"):
        list(started(pairs, name, out=folder / name, steps=1).steps())
    return {name: folder / name for name in ("mlm", "ntp")}


def test_a_run_starts_from_the_weights_and_the_tokenizer_of_another(pairs, starts, tmp_path,
                                                                    refused, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(starts["mlm"], first)
    (first / "hf").mkdir()
    (first / "hf" / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    words = ["--objective", "contrastive", "--out", str(second),
             *flags(from_run(pairs, first, steps=2, optimizer="adamw", lr=5e-4))]
    assert train.main(words) == 0
    shown = capsys.readouterr()
    assert "-> start" in shown.out and "untrained" not in shown.out
    assert (first / "tokenizer.json").read_bytes() == (second / "tokenizer.json").read_bytes()
    assert (second / "hf" / "chat_template.jinja").exists()
    moved = (weights(first)["embed.weight"] - weights(second)["embed.weight"]).abs().max()
    assert 0 < moved < 2.5 * 2 * 5e-4  # two Adam steps away
    assert train.main([*words, "--steps", "3"]) == 0
    assert "width 32 cannot be changed with --init" in refused([*words, "--width", 32])
    list(started(pairs, "contrastive", tmp_path / "other", steps=1, vocab=350).steps())
    assert "contains a different run" in refused([*words, "--out", tmp_path / "other"])
    causal = ["--objective", "ntp", "--out", tmp_path / "x", *flags(from_run(pairs, first))]
    assert "needs a causal model" in refused(causal)
    # Another model in the same folder is another start.
    saved = torch.load(first / "model.pt", weights_only=True)
    saved["weights"]["embed.weight"] += 1
    torch.save(saved, first / "model.pt")
    assert "model of --init was" in refused([*words, "--steps", "4"])
    saved["weights"]["embed.weight"].fill_(math.nan)
    torch.save(saved, first / "model.pt")
    assert "its weights contain NaN" in refused([*words[:3], "third", *words[4:]])


def test_pooling_and_lengths_come_from_the_model_of_init(pairs, starts, tmp_path):
    first = tmp_path / "first"
    shutil.copytree(starts["mlm"], first)
    saved = torch.load(first / "model.pt", weights_only=True)
    saved["config"] |= dict(max_tokens=40, normalize=True, pool="max", dropout=0.3)
    torch.save(saved, first / "model.pt")
    with pytest.raises(BadInput, match="max_length 128: .* --max-length 38"):
        train.start("contrastive", **from_run(pairs, first, max_length=128))
    run = train.start("contrastive", **from_run(pairs, first))
    assert run.train.max_length == 38 and any("max_length 38 (not 128)" in x for x in run.notes)
    config = run.model.config
    assert (config.pool, config.max_tokens, config.normalize) == ("max", 40, True)
    assert config.dropout == run.model.dropout.p == 0.3
    run = train.start("contrastive", **from_run(pairs, first, max_length=30, pool="cls"))
    assert run.model.config.pool == "cls" and run.train.max_length == 30


@every
def test_lora_trains_with_every_objective_and_resumes_exactly(name, pairs, starts, tmp_path,
                                                              monkeypatch):
    start = starts["ntp" if OBJECTIVES[name].causal else "mlm"]
    more = from_run(pairs, start, lora_rank=2, steps=3, **EXTRA.get(name, {}))
    words = ["--objective", name, *flags(more)]
    assert train.main([*words, "--out", str(tmp_path / "whole")]) == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 1)
        assert train.main([*words, "--out", str(tmp_path / "parts")]) == 128 + signal.SIGTERM
    assert train.main([*words, "--out", str(tmp_path / "parts")]) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    saved = checkpoint(tmp_path / "whole")["weights"]
    assert "model.embed.weight" not in saved and any(".a." in key for key in saved)
    before, after = weights(start), weights(tmp_path / "whole")
    changed = [key for key in before if key in after and not torch.equal(before[key], after[key])]
    assert any("qkv" in key for key in changed) and not any("norm" in key for key in changed)


def chat(folder, **more):
    rows = [{"user": f"write {i} twice", "assistant": f"{i} {i}",
             "system": "You are short." if i % 3 else ""} for i in range(60)]
    path = folder / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return dict(SMALL, data=str(path), **more)


@pytest.mark.parametrize("name", ["ntp", "llm-jepa"])
def test_a_chat_trains_and_is_evaluated_with_and_without_its_system_text(name, tmp_path):
    tokens, lengths = {}, {}
    for view in ("plain", "system"):
        run = train.start(name, out=tmp_path / view, **chat(tmp_path, chat=view, steps=2))
        list(run.steps())
        assert not evaluate.main([str(tmp_path / view), "--json"])
        tokens[view] = run.tokens
        lengths[view] = sum(map(len, run.evaluation().ids["user"]))
    assert tokens["plain"] < tokens["system"] and lengths["plain"] < lengths["system"]


def test_llm_jepa_embeds_a_text_as_it_reads_it_in_training(tmp_path):
    run = train.start("llm-jepa", **chat(tmp_path, predictors=2, steps=1))
    special = run.corpus.special
    batch = run.make_batch(0)[0]
    read = batch["packed"].tokens[batch["vector_index"]]
    assert set(read[0].tolist()) == {special.preds[0]}  # [PRED]_1 is the last token of a Text
    ids = run.evaluation().ids
    for row in ids["user"]:
        assert list(row[-2:]) == [special.preds[1], special.preds[0]]
    for row in ids["assistant"]:
        assert not set(row) & {*special.preds, special.sep}


@pytest.mark.parametrize("name", ["mlm", "hybrid"])
def test_blocks_of_text_are_rows_of_one_length(name, tmp_path, refused):
    def written(file, pattern, count):
        path = tmp_path / file
        path.write_text("".join(pattern.format(i) for i in range(count)), encoding="utf-8")
        return str(path)

    text = written("text.txt", "line {} of the text\n", 300)
    valid = written("valid.txt", "another line {}\n", 30)
    more = dict(SMALL, **EXTRA.get(name, {}), data=text, block=32, steps=2)
    error = refused(["--objective", name, *flags(more), "--out", tmp_path / "run"])
    assert "block 32" in error and "--eval-data" in error
    with pytest.raises(BadInput, match="has the same rows as --data"):
        train.start(name, eval_data=written("copy.txt", "line {} of the text\n", 300), **more)
    run = train.start(name, eval_data=valid, **more)
    batch = run.make_batch(0)[0]
    clean = batch.get("clean", batch["packed"])
    assert clean.cu_seqlens.diff().tolist() == [34] * 8  # [CLS], 32 tokens, [SEP]


# ---- training from Python


def test_start_trains_without_a_folder_in_any_thread(pairs, tmp_path):
    run = started(pairs, "contrastive", steps=6)
    before = set(tmp_path.iterdir())  # the cache
    handler = signal.getsignal(signal.SIGINT)
    records = []
    thread = threading.Thread(target=lambda: records.extend(run.steps(every=2)))
    thread.start()
    thread.join(60)
    assert [record["step"] for record in records] == [0, 2, 4, 6, 6]
    assert {"loss", "align"} < records[1].keys() and "geometry/rankme" in records[0]["eval"]
    assert run.scores() == records[-1]["eval"]
    embeddings = run.encode(["sun moon", "road house", "fish"])
    assert embeddings.shape == (3, 16)
    assert torch.allclose(embeddings.norm(dim=1), torch.ones(3))
    assert set(tmp_path.iterdir()) == before and signal.getsignal(signal.SIGINT) is handler


def test_a_tilde_is_the_home_folder(pairs, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    list(started(pairs, "contrastive", "~/run", steps=1).steps())
    assert (tmp_path / "home" / "run" / "model.pt").exists()


@dataclass(frozen=True)
class Temperature:
    temperature: float = 0.05  # softmax temperature


class Mine(objectives.Contrastive):
    """A class of a notebook cell."""
    name = "mine"
    toy = dict(lr=1e-3, lr_start=0.0, max_length=128, dropout=0.2)
    Config = Temperature

    def forward(self, batch):
        x, y = self.model.pool(self.model(batch["packed"]), batch["packed"]).chunk(2)
        loss = objectives.info_nce(x, y, self.config.temperature)
        return loss, {"align": loss.detach()}


def test_a_class_is_trained_like_any_other_objective(pairs, monkeypatch):
    more = settings(pairs, "mine", steps=3)
    del more["dropout"]
    run = train.start(Mine, **more)
    assert len(losses(run)) == 3 and run.train.lr == 1e-3 and run.model.config.dropout == 0.2
    monkeypatch.setattr(Mine, "toy", dict(droput=0.1))
    with pytest.raises(BadInput, match="'droput', but there is no such setting; did you mean drop"):
        train.start(Mine)
