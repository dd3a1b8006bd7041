"""Flags, schedule, the loop, exact resume, kills, refusals."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import evaluate
import train
from objectives import OBJECTIVES

ROOT = Path(__file__).parent.parent
SMALL = ["--width", "16", "--layers", "1", "--heads", "2", "--hidden", "32", "--batch", "8", "--eval-limit", "20", "--vocab", "300"]
HEAD = ["--head-layers", "1", "--head-heads", "2", "--head-hidden", "16"]


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """A small TSV of made-up pairs, the same words under a cipher, and its folder."""
    folder = tmp_path_factory.mktemp("pairs")
    words = "sun moon tree river stone bird fish cloud road house".split()
    lines = [f"{' '.join(words[i // 10 ** k % 10] for k in range(3))}\t{' '.join(words[i // 10 ** k % 10][::-1] for k in range(3))}" for i in range(400)]
    (folder / "pairs.tsv").write_text("a\tb\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return folder


def command(pairs, out, objective="mexma", *more):
    head = HEAD if objective == "mexma" else []
    return ["--objective", objective, "--data", str(pairs / "pairs.tsv"), "--cache", str(pairs / "cache"), "--out", str(out), *SMALL, *head,
            "--dropout", "0.1", *map(str, more)]


def states(folder):
    saved = torch.load(folder / "train.pt", weights_only=True)
    return {name: saved[name] for name in ("objective", "optimizer", "random", "step", "tokens", "first", "window")}


def assert_equal(one, two, where=""):
    assert type(one) is type(two), where
    if isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for key in one:
            assert_equal(one[key], two[key], f"{where}/{key}")
    elif isinstance(one, list):
        assert len(one) == len(two), where
        for i, pair in enumerate(zip(one, two)):
            assert_equal(*pair, f"{where}/{i}")
    else:
        assert torch.equal(one, two) if torch.is_tensor(one) else one == two, where


def logged(folder):
    return [{k: v for k, v in record.items() if "second" not in k} for record in train.read_log(folder)[1:]]


# ----------------------------------------------------------------------------------------------------------------------- schedule

@pytest.mark.parametrize("schedule, middle, last", [("cosine", 0.5, None), ("linear", 0.5, 1 / 90), ("constant", 1.0, 1.0)])
def test_the_learning_rate_is_a_closed_form_of_the_step(schedule, middle, last):
    config = train.TrainConfig(steps=100, lr=2.0, warmup=0.1, schedule=schedule)
    assert train.learning_rate(0, config) == pytest.approx(0.2) and train.learning_rate(9, config) == 2.0 == train.learning_rate(10, config)
    assert train.learning_rate(55, config) == pytest.approx(2 * middle)
    expected = last if last is not None else (1 + math.cos(math.pi * 89 / 90)) / 2
    assert train.learning_rate(99, config) == pytest.approx(2 * expected)


def test_a_warm_up_of_the_whole_run_only_rises():
    config = train.TrainConfig(steps=10, lr=1.0, warmup=1.0, schedule="cosine")
    assert [train.learning_rate(step, config) for step in (0, 4, 9)] == [0.1, 0.5, 1.0]


def test_a_warm_up_can_begin_above_zero_and_the_decay_can_end_behind_the_run():
    config = train.TrainConfig(steps=300, lr=1e-4, warmup=1.0, lr_start=0.1, schedule="cosine")             # MEXMA's paper: from 1e-5, rising
    assert train.learning_rate(0, config) == pytest.approx(1e-5 + 9e-5 / 300) and train.learning_rate(299, config) == pytest.approx(1e-4)
    config = train.TrainConfig(steps=21_875, lr=2e-5, warmup=500 / 21_875, schedule="linear", horizon=4.0)   # BERT-JEPA's code: in micro-batches
    assert train.learning_rate(21_875 - 1, config) / 2e-5 == pytest.approx(0.754, abs=1e-3)


def test_biases_norms_and_scalars_are_not_decayed(pairs, tmp_path):
    run = train.Run(command(pairs, tmp_path / "run", "mlm", "--steps", 1, "--weight-decay", 0.3))
    names = {id(p): name for name, p in run.objective.named_parameters()}
    decayed, spared = ([names[id(p)] for p in group["params"]] for group in run.optimizer.param_groups)
    assert [group["weight_decay"] for group in run.optimizer.param_groups] == [0.3, 0.0]
    assert len(decayed) + len(spared) == len(names) and "model.embed.weight" in decayed
    assert all("bias" in name or "norm" in name for name in spared) and not any("bias" in name or "norm" in name for name in decayed)


# -------------------------------------------------------------------------------------------------------------------------- flags

@pytest.mark.parametrize("words, message", [
    (["--stepz", "5"], "unknown flag --stepz: did you mean --steps?"),
    (["--objective", "mexmaa"], "did you mean mexma?"),
    (["--objective", "mlm", "--koleo-weight", "1"], "--koleo-weight belongs to objective mexma"),
    (["--objective", "mlm", "--no-symmetrical"], "--no-symmetrical belongs to objective mexma"),
    (["--size", "huge"], "size 'huge' is unknown: choose one of toy"),
    (["--steps", "many"], "invalid int value: 'many'"),
    (["--steps", "0"], "steps is 0"), (["--lr", "-1"], "lr -1"), (["--warmup", "500"], "warmup is 500"),
    (["--batch", "10", "--accumulate", "3"], "batch 10 cannot be split into 3"),
    (["--batch", "4", "--accumulate", "4"], "needs at least 2"),
    (["--schedule", "cosin"], "schedule is 'cosin'"), (["--device", "cuda:7"], "device 'cuda:7' cannot be used"),
    (["--precision", "float16", "--device", "cpu"], "precision float16 needs"), (["--heads", "3"], "width 128 is not a multiple of heads 3"),
    (["--data", "nowhere.tsv"], "nowhere.tsv"), (["--langs", "en,xx"], "xx"), (["--cut", "600"], "cut 600"), (["stray"], "'stray' is not expected"),
    (["--align", "cosin"], "align is 'cosin'"), (["--lr", "nan"], "lr is nan"), (["--koleo-weight", "inf"], "koleo_weight is inf"),
    (["--kv-heads", "-1"], "kv_heads is -1"), (["--layers", "-1"], "layers is -1"), (["--seed", "-3"], "seed is -3"), (["--vocab", "0"], "vocab is 0"),
    (["--width", "100000000000"], "width is 100000000000"), (["--device", "meta"], "device 'meta' cannot be used")])
def test_a_mistake_is_one_clear_line_and_status_2_and_leaves_nothing(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train.main([*words, *([] if "--data" in words else ["--data", "toy"])]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", OBJECTIVES, ids=lambda kind: kind.name)
def test_help_shows_every_flag_with_its_default_and_marks_whose_it_is(kind, capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(["--objective", kind.name, "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and f"objective {kind.name}" in text
    values, _ = train.defaults(kind, "toy")
    owned = text[text.index(f"objective {kind.name}"):]
    for name in [f.name for f in train.fields(kind.Config)]:
        assert "--" + name.replace("_", "-") in owned
    assert f"[{values['lr']}]" in text and f"[{values['steps']}]" in text


def test_toy_values_are_told_with_the_papers_and_give_way_to_flags():
    _, settings, _, config, notes = train.parse(["--objective", "mexma"])
    assert any("koleo_weight 1 (paper: 0.01)" in note for note in notes) and config.koleo_weight == 1.0
    _, settings, _, config, notes = train.parse(["--objective", "mexma", "--koleo-weight", "0.01", "--lr", "0.5"])
    assert config.koleo_weight == 0.01 and settings.lr == 0.5 and not any("koleo" in note or note.startswith("lr ") for note in notes)
    _, settings, _, config, notes = train.parse(["--objective", "mexma", "--size", "base"])
    assert (config.koleo_weight, config.head_layers, config.head_hidden, settings.lr, settings.batch, notes) == (0.01, 6, 3072, 1e-4, 150, [])


# ----------------------------------------------------------------------------------------------------------------- runs and resume

@pytest.mark.parametrize("kind", OBJECTIVES, ids=lambda kind: kind.name)
def test_every_objective_trains_logs_and_is_evaluated_from_its_folder_alone(kind, pairs, tmp_path, capsys):
    out = tmp_path / "run"
    assert train.main(command(pairs, out, kind.name, "--steps", 12, "--log-every", 5, "--eval-every", 6)) == 0
    shown = capsys.readouterr().out
    assert "health:" in shown and "step 0" in shown and "minutes left" in shown
    records = train.read_log(out)
    assert records[0]["config"]["objective"] == kind.name and records[0]["parameters"] > 0
    steps = [record for record in records[1:] if "loss" in record]
    assert [record["step"] for record in steps] == [5, 10, 12] and all(math.isfinite(record["loss"]) for record in steps)
    assert {"lr", "grad_norm", "tokens", "seconds", "tokens_per_second"} < steps[0].keys()
    assert [record["step"] for record in records if "eval" in record] == [0, 6, 12]
    assert {"model.pt", "train.pt", "tokenizer.json", "log.jsonl"} == {p.name for p in out.iterdir() if p.name != ".lock"}
    assert evaluate.main([str(out), "--json"]) == 0 and (out / "eval.json").is_file()
    assert "geometry/rankme" in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind", OBJECTIVES, ids=lambda kind: kind.name)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(kind, pairs, tmp_path, monkeypatch):
    flags = ["--steps", 9, "--save-every", 4, "--log-every", 2, "--eval-every", 5]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train.main(command(pairs, whole, kind.name, *flags)) == 0
    for until in (1, 2, 6, None):
        if until:
            monkeypatch.setattr(train.Run, "agree", lambda self, number, until=until: signal.SIGTERM if self.step >= until else 0)
            assert train.main(command(pairs, parts, kind.name, *flags)) == 128 + signal.SIGTERM
            monkeypatch.undo()
        else:
            assert train.main(command(pairs, parts, kind.name, *flags)) == 0
    assert_equal(states(whole), states(parts))
    assert logged(whole) == logged(parts)
    one, two = (torch.load(folder / "model.pt", weights_only=True) for folder in (whole, parts))
    assert_equal(one, two)


def test_the_same_command_after_the_end_says_that_the_run_is_finished(pairs, tmp_path, capsys):
    words = command(pairs, tmp_path / "run", "contrastive", "--steps", 2)
    assert train.main(words) == 0
    before = (tmp_path / "run" / "train.pt").read_bytes()
    capsys.readouterr()
    assert train.main(words) == 0
    assert "this run is finished: 2 steps" in capsys.readouterr().out and (tmp_path / "run" / "train.pt").read_bytes() == before


def test_resuming_with_other_settings_lists_the_differences_and_touches_nothing(pairs, tmp_path, capsys):
    out = tmp_path / "run"
    assert train.main(command(pairs, out, "mexma", "--steps", 2)) == 0
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    capsys.readouterr()
    assert train.main(command(pairs, out, "mexma", "--steps", 4, "--layers", 2, "--koleo-weight", 0.3, "--seed", 1)) == 2
    error = capsys.readouterr().err
    for text in ("mexma.koleo_weight was 1.0, is 0.3", "model.layers was 1, is 2", "seed was 0, is 1", "--out"):
        assert text in error
    assert train.main(command(pairs, out, "contrastive", "--steps", 2)) == 2
    assert "objective was mexma, is contrastive" in capsys.readouterr().err
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_resuming_on_changed_data_or_tokenizer_is_refused(pairs, tmp_path, capsys):
    source = tmp_path / "pairs.tsv"
    source.write_bytes((pairs / "pairs.tsv").read_bytes())
    words = [str(source) if word == str(pairs / "pairs.tsv") else word for word in command(pairs, tmp_path / "run", "mlm", "--steps", 2)]
    assert train.main(words) == 0
    source.write_bytes(source.read_bytes() + b"new\twen\n")
    assert train.main([*words, "--steps", "4"]) == 2
    assert "the data differs" in capsys.readouterr().err
    source.write_bytes((pairs / "pairs.tsv").read_bytes())
    tokenizer = json.loads((tmp_path / "run" / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
    (tmp_path / "run" / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    assert train.main([*words, "--steps", "4"]) == 2
    assert "the tokenizer differs" in capsys.readouterr().err


def test_more_steps_may_be_asked_of_a_run_and_are_told(pairs, tmp_path, capsys):
    assert train.main(command(pairs, tmp_path / "run", "mlm", "--steps", 2)) == 0
    assert train.main(command(pairs, tmp_path / "run", "mlm", "--steps", 3)) == 0
    assert "steps was 2, is 3" in capsys.readouterr().out


def test_a_damaged_checkpoint_is_named_and_never_silently_restarted(pairs, tmp_path, capsys):
    assert train.main(command(pairs, tmp_path / "run", "mlm", "--steps", 2)) == 0
    path = tmp_path / "run" / "train.pt"
    path.write_bytes(path.read_bytes()[:5000])
    assert train.main(command(pairs, tmp_path / "run", "mlm", "--steps", 4)) == 2
    assert "train.pt cannot be read" in capsys.readouterr().err


def test_a_folder_with_other_things_in_it_is_left_alone(pairs, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    assert train.main(command(pairs, tmp_path, "mlm", "--steps", 2)) == 2
    assert "holds no run" in capsys.readouterr().err and [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_loss_that_is_not_finite_stops_before_the_weights_and_keeps_the_batch(pairs, tmp_path, capsys):
    out = tmp_path / "run"
    assert train.main(command(pairs, out, "mexma", "--steps", 30, "--lr", "1e30", "--warmup", 0, "--clip", 0, "--save-every", 1)) == 2
    error = capsys.readouterr().err
    assert re.search(r"error: step \d+: the loss is not finite \(loss \w+, mlm \w+, align \w+, koleo \w+\)", error)
    bad = torch.load(out / "bad_batch.pt", weights_only=True)
    assert bad["step"] == torch.load(out / "train.pt", weights_only=True)["step"] and "tokens" in bad["parts"][0]["packed"]


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_step_that_is_not_finite_leaves_the_weights_bit_for_bit(factor, pairs, tmp_path):
    run = train.Run(command(pairs, tmp_path / "run", "contrastive", "--steps", 3))
    run.window.append(run.train_step(run.make_batch(0), run.objective))
    before = {name: value.clone() for name, value in run.objective.state_dict().items()}
    moments = [state["exp_avg"].clone() for state in run.optimizer.state.values()]

    def broken(batch):
        loss, terms = run.objective(batch)
        return loss * factor, terms

    run.step, run.window = 1, [*run.window, run.train_step(run.make_batch(1), broken)]
    assert all(torch.equal(before[name], value) for name, value in run.objective.state_dict().items())
    assert all(torch.equal(old, state["exp_avg"]) and state["step"] == 1 for old, state in zip(moments, run.optimizer.state.values()))
    run.step = 2
    with pytest.raises(train.BadInput, match="step 1: the loss is not finite"):
        run.read_window()
    run.locked.close()


def test_a_row_of_several_views_that_is_longer_than_the_model_is_refused_before_the_first_step(pairs, tmp_path, capsys):
    (tmp_path / "long.tsv").write_text("a\tb\n" + "".join(f"{'x y z ' * 9}{i}\t{'u v w ' * 9}{i}\n" for i in range(60)), encoding="utf-8")
    words = command(pairs, tmp_path / "run", "bepa", "--steps", 2, "--max-length", 40, "--cut", 38)
    words[3] = str(tmp_path / "long.tsv")
    assert train.main(words) == 2
    error = capsys.readouterr().err
    assert "cut 38: a row can have 80 tokens, [CLS] and [SEP] included, over max_length 40: lower --cut" in error and error.count("\n") == 1


@pytest.mark.parametrize("kind", OBJECTIVES, ids=lambda kind: kind.name)
def test_a_batch_in_one_buffer_is_the_batch(kind, pairs, tmp_path):
    run = train.Run(command(pairs, tmp_path / "run", kind.name, "--steps", 1))
    parts = run.make_batch(0)
    buffer, shape = train.lay_out(parts, pinned=False)
    for value in (before := []), (after := []):
        train.each_tensor(parts if value is before else train.pick_up(buffer.clone(), shape), value.append)
    assert len(before) == len(after) >= 8 and buffer.dtype == torch.uint8
    assert all(torch.equal(one, two) and one.dtype == two.dtype for one, two in zip(before, after))
    packed = train.pick_up(buffer, shape)[0]["packed"]
    assert type(packed) is type(parts[0]["packed"]) and packed.plans.keys() == parts[0]["packed"].plans.keys() == {"sdpa"}
    run.locked.close()


def test_a_compiled_run_has_the_same_losses(pairs, tmp_path, monkeypatch):
    """With the back end that stops before code is generated: a C++ compiler is none of the requirements, and takes a minute."""
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(train.Block, "compile", lambda self, **options: compiled(self, backend="aot_eager", **options))
    for name, more in (("plain", []), ("compiled", ["--compile", "--fill", 64, "--look-ahead", 4])):
        words = command(pairs, tmp_path / name, "mlm", "--steps", 3, "--log-every", 1, "--dropout", 0)
        assert train.main([*words, *map(str, more)]) == 0
    plain, compiled = ([record for record in train.read_log(tmp_path / name) if "loss" in record] for name in ("plain", "compiled"))
    assert [record["tokens"] for record in plain] != [record["tokens"] for record in compiled]     # the examples were shared out anew
    words = [str(word) for word in command(pairs, tmp_path / "again", "mlm", "--steps", 3, "--log-every", 1, "--dropout", 0, "--look-ahead", 4)]
    assert train.main(words) == 0
    again = [record for record in train.read_log(tmp_path / "again") if "loss" in record]
    for one, two in zip(compiled, again, strict=True):
        assert one["tokens"] == two["tokens"] and abs(one["loss"] - two["loss"]) < 1e-4


def test_a_compiler_that_does_not_work_is_one_line(pairs, tmp_path, monkeypatch, capsys):
    def broken(graph, inputs):
        raise RuntimeError("no working C++ compiler")

    compiled = torch.nn.Module.compile
    monkeypatch.setattr(train.Block, "compile", lambda self, **options: compiled(self, backend=broken))
    assert train.main(command(pairs, tmp_path / "run", "mlm", "--steps", 3, "--compile")) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: --compile does not work here") and "no working C++ compiler" in error


@pytest.mark.gpu
@pytest.mark.parametrize("kind", OBJECTIVES, ids=lambda kind: kind.name)
def test_a_step_on_a_gpu_never_waits_for_it(kind, pairs, tmp_path):
    run = train.Run(command(pairs, tmp_path / "run", kind.name, "--steps", 9, "--device", "cuda"))
    batches = [train.lay_out(run.make_batch(step), True) for step in range(4)]
    for batch in batches[:2]:                                            # kernels are built and buffers allocated in the first
        run.train_step(batch, run.objective)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches[2:]:
            run.window.append(run.train_step(batch, run.objective))
            run.objective.after_step(0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(row.isfinite().all() for row in run.window)
    run.locked.close()


def test_accumulation_takes_one_step_of_the_same_size(pairs, tmp_path):
    for parts in (1, 4):
        assert train.main(command(pairs, tmp_path / str(parts), "mlm", "--steps", 3, "--accumulate", parts, "--dropout", 0)) == 0
    one, four = (torch.load(tmp_path / name / "train.pt", weights_only=True) for name in ("1", "4"))
    assert one["tokens"] == four["tokens"] and four["step"] == 3


# ------------------------------------------------------------------------------------------------------------- processes and signals

def start(words, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, str(ROOT / "train.py"), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
                            **options)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_prints_the_command_that_resumes(number, pairs, tmp_path):
    out = tmp_path / "run"
    process = start(command(pairs, out, "contrastive", "--steps", 100000, "--eval-every", 100000, "--save-every", 100000))
    while "a step" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(number)
    shown, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "stopped and saved at step" in shown, errors
    assert f"python train.py --objective contrastive --data {pairs / 'pairs.tsv'}" in shown
    step = torch.load(out / "train.pt", weights_only=True)["step"]
    assert step >= 10 and f"step {step}" in shown


def test_several_seeds_are_the_runs_of_each_and_the_same_command_goes_on(pairs, tmp_path, capsys):
    words = command(pairs, tmp_path / "run", "contrastive", "--steps", 2)
    assert train.main([*words, "--seed", "23"]) == 0 and train.main([*words, "--out", str(tmp_path / "run-82"), "--seed", "82", "--steps", "1"]) == 0
    capsys.readouterr()
    assert train.main([*words, "--seeds", "82,23"]) == 0
    shown = capsys.readouterr().out
    assert "steps was 1, is 2" in shown and shown.endswith(f"\npython evaluate.py compare {tmp_path}/run-82 {tmp_path}/run-23\n")
    assert_equal(states(tmp_path / "run"), states(tmp_path / "run-23"))
    assert f"--seed 23 --out {tmp_path}/run-23" in train.read_log(tmp_path / "run-23")[0]["command"]
    assert train.main([*words, "--seeds", "82,23"]) == 0 and capsys.readouterr().out.count("this run is finished") == 2


def test_a_seed_that_fails_is_named_and_the_others_are_trained(pairs, tmp_path, capsys):
    (tmp_path / "run-1").mkdir()
    (tmp_path / "run-1" / "notes.txt").write_text("mine", encoding="utf-8")
    assert train.main(command(pairs, tmp_path / "run", "mlm", "--steps", 1, "--seeds", "1,2")) == 1
    assert "of the seeds 1, 2, 1 failed" in capsys.readouterr().err and (tmp_path / "run-2" / "model.pt").is_file()


@pytest.mark.parametrize("more, message", [
    (["--seeds", "1,1"], "seeds is '1,1': give different whole numbers"), (["--seeds", "1,x"], "seeds is '1,x'"), (["--seeds", ""], "seeds is ''"),
    (["--seeds", "1,2", "--seed", "3"], "seed 3 and seeds 1,2 exclude each other"), (["--seeds", "1,2", "--lr", "-1"], "lr -1"),
    (["--seeds", "1,2", "--data", "nowhere.tsv"], "nowhere.tsv")])
def test_seeds_that_cannot_be_trained_are_refused_in_one_line(more, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train.main(more) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "out").exists()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train.main(["--seeds", "1,2"]) == 2 and "torchrun trains one run; start it once per seed, with --seed 1 --out out/mexma-1" in capsys.readouterr().err


def test_a_signal_ends_the_sequence_with_the_command_that_resumes_it(pairs, tmp_path):
    words = command(pairs, tmp_path / "run", "contrastive", "--steps", 100000, "--eval-every", 100000, "--save-every", 100000, "--seeds", "82,23")
    process = start(words)
    while "a step" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    shown, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and shown.endswith(f"stopped at seed 82 of 82,23. To resume: python train.py {' '.join(words)}\n"), errors
    assert (tmp_path / "run-82" / "train.pt").is_file() and not (tmp_path / "run-23").exists()


def test_a_signal_in_the_last_evaluation_of_a_seed_ends_the_sequence_after_it(pairs, tmp_path, capsys, monkeypatch):
    finish = train.Run.finish
    monkeypatch.setattr(train.Run, "finish", lambda self: (os.kill(os.getpid(), signal.SIGTERM), finish(self)))
    assert train.main(command(pairs, tmp_path / "run", "contrastive", "--steps", 1, "--seeds", "1,2")) == 128 + signal.SIGTERM
    assert "stopped at seed 1 of 1,2" in capsys.readouterr().out and not (tmp_path / "run-2").exists()


KILLER = """
import os, random, signal, sys, time
import torch
import train
torch.set_num_threads(1)
words, kills, chance = sys.argv[2:], 0, random.Random(int(sys.argv[1]))
while True:
    child = os.fork()
    if not child:
        sys.stdout = open(os.devnull, "w")
        os._exit(train.main(words))
    wait, status = chance.uniform(0.05, 0.8) if kills < 20 else 60, None
    end = time.time() + wait
    while time.time() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.002)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1
        continue
    if status:
        sys.exit(f"status {status} after {kills} kills")
    if kills >= 20:
        break
    words[words.index("--steps") + 1] = str(int(words[words.index("--steps") + 1]))
    kills = 20
print(kills)
"""


def test_after_kills_at_random_moments_nothing_is_lost_but_the_steps_since_the_last_checkpoint(pairs, tmp_path):
    """Checkpoints after every step, so that many of the 20 kills fall into the writing of one."""
    flags = ["--steps", 250, "--save-every", 1, "--log-every", 5, "--eval-every", 1000]
    assert train.main(command(pairs, tmp_path / "whole", "contrastive", *flags)) == 0
    process = subprocess.run([sys.executable, "-c", KILLER, "0", *command(pairs, tmp_path / "killed", "contrastive", *flags)], capture_output=True, text=True,
                             cwd=ROOT, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.returncode == 0 and process.stdout.strip() == "20", process.stdout + process.stderr
    assert_equal(states(tmp_path / "whole"), states(tmp_path / "killed"))
    assert logged(tmp_path / "whole") == logged(tmp_path / "killed")


def test_two_processes_train_as_one_with_twice_the_batch(pairs, tmp_path, capsys):
    """In-batch losses gather the other rank's vectors with gradients: the weights after three steps agree. One process cannot go on with their run."""
    flags = ["--steps", "3", "--dropout", "0", "--lr", "0.01", "--seed", "3"]
    words = [word for word in command(pairs, tmp_path / "two", "contrastive")]
    words = words + flags
    shared = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(ROOT / "train.py"), *words],
                         capture_output=True, text=True, env=shared, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]
    assert train.main([*command(pairs, tmp_path / "one", "contrastive"), *flags, "--batch", "16"]) == 0
    one, two = (torch.load(tmp_path / name / "train.pt", weights_only=True) for name in ("one", "two"))
    assert one["tokens"] == two["tokens"]
    for name, weight in one["objective"].items():
        if not name.endswith("qkv.bias"):                                # the bias of the keys has gradient 0: Adam scales up its rounding
            assert (weight - two["objective"][name]).abs().max() < 1e-5, name
    capsys.readouterr()
    assert train.main([*words, "--steps", "4"]) == 2 and "was trained by 2 processes, this is 1" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------------ init and LoRA

def test_a_run_starts_from_another_with_its_weights_and_tokenizer(pairs, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    assert train.main(command(pairs, first, "mlm", "--steps", 3)) == 0
    words = ["--objective", "contrastive", "--data", str(pairs / "pairs.tsv"), "--cache", str(pairs / "cache"), "--out", str(second), "--init", str(first),
             "--batch", "8", "--eval-limit", "20", "--steps", "2"]
    assert train.main(words) == 0
    shown = capsys.readouterr().out
    assert f"starting from {first}" in shown and "left behind: vocabulary_bias, transform.weight" in shown
    assert (first / "tokenizer.json").read_bytes() == (second / "tokenizer.json").read_bytes()
    one, two = (torch.load(folder / "model.pt", weights_only=True)["weights"] for folder in (first, second))
    moved = (one["embed.weight"] - two["embed.weight"]).abs().max()
    assert 0 < moved < 2.5 * 2 * 5e-4                                    # two Adam steps away, not another beginning
    assert train.main([*words, "--steps", "3"]) == 0                     # resumes, also when the first run is gone


@pytest.mark.parametrize("more, message", [(["--width", "32"], "width 32 (it has 16)"), (["--objective", "ntp"], "objective ntp (causal)")])
def test_a_run_that_does_not_fit_is_refused(more, message, pairs, tmp_path, capsys):
    assert train.main(command(pairs, tmp_path / "first", "mlm", "--steps", 1)) == 0
    words = ["--objective", "mlm", "--data", str(pairs / "pairs.tsv"), "--cache", str(pairs / "cache"), "--out", str(tmp_path / "second"),
             "--init", str(tmp_path / "first")]
    assert train.main([*words, *more]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "second").exists()


# --------------------------------------------------------------------------------------------------------------- chats and blocks

def chat(folder, system=True):
    rows = [{"user": f"write {i} twice", "assistant": f"{i} {i}"} | ({"system": "You are short." if i % 3 else ""} if system else {}) for i in range(60)]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return ["--data", str(folder / "chat.jsonl"), "--cache", str(folder / "cache"), "--steps", "2", *SMALL]


@pytest.mark.parametrize("kind", ["ntp", "llm-jepa"])
def test_a_chat_trains_with_and_without_its_header_and_evaluates_as_it_was_trained(kind, tmp_path, capsys, monkeypatch):
    asked = []
    rows_of = evaluate.rows_of
    watched = lambda tokenizer, texts, headers=None, *more, **named: asked.append(headers) or rows_of(tokenizer, texts, headers, *more, **named)
    monkeypatch.setattr(evaluate, "rows_of", watched)
    tokens = {}
    for view in ("plain", "shared-header"):
        asked.clear()
        assert train.main(["--objective", kind, *chat(tmp_path), "--chat", view, "--out", str(tmp_path / view)]) == 0
        assert evaluate.main([str(tmp_path / view)]) == 0
        capsys.readouterr()
        assert asked and any(headers is not None for headers in asked) == (view == "shared-header")
        if view == "shared-header":
            assert {"You are short.", ""} >= {text for headers in asked if headers for text in headers}
        tokens[view] = train.read_log(tmp_path / view)[-2]["tokens"]
    assert tokens["plain"] < tokens["shared-header"]


def test_llm_jepa_embeds_a_text_as_it_reads_it_in_training_and_evaluate_does_too(tmp_path, capsys, monkeypatch):
    framed = []
    embed_rows = evaluate.embed_rows
    monkeypatch.setattr(evaluate, "embed_rows", lambda model, rows, *more, **options: framed.append(rows) or embed_rows(model, rows, *more, **options))
    out = tmp_path / "run"
    assert train.main(["--objective", "llm-jepa", "--predictors", "2", *chat(tmp_path), "--out", str(out)]) == 0
    assert evaluate.main([str(out), "--tasks", "retrieval"]) == 0
    mark = train.data.special(train.data.read_tokenizer(out / "tokenizer.json"))
    run = train.Run(["--objective", "llm-jepa", "--predictors", "2", *chat(tmp_path), "--out", str(out)])
    batch = run.make_batch(0)[0]
    read = batch["packed"].tokens[batch["lasts"]]                        # what training reads: [PRED]_1 behind a text, the last token of a code
    assert set(read[0].tolist()) == {mark.preds[0]}
    for rows in framed:
        half = len(rows) // 2
        assert all(row[-2:] == [mark.preds[1], mark.preds[0]] for row in rows[:half]) and not any(set(row) & {*mark.preds, mark.sep} for row in rows[half:])
    run.locked.close()
    capsys.readouterr()


def test_a_header_is_refused_where_there_is_none_or_nothing_reads_it(tmp_path, capsys):
    words = chat(tmp_path, system=False)
    (tmp_path / "pairs.tsv").write_text("a\tb\n" + "".join(f"x {i}\ty {i}\n" for i in range(60)), encoding="utf-8")
    words[1] = str(tmp_path / "pairs.tsv")
    assert train.main(["--objective", "ntp", *words, "--chat", "shared-header", "--out", str(tmp_path / "run")]) == 2
    assert "has no system texts" in capsys.readouterr().err
    assert train.main(["--objective", "contrastive", *words, "--block", "32", "--out", str(tmp_path / "run")]) == 2
    assert "needs an objective with one view" in capsys.readouterr().err
    assert train.main(["--objective", "mexma", *chat(tmp_path), "--chat", "shared-header", "--out", str(tmp_path / "run")]) == 2
    assert "chat shared-header has no meaning for mexma" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_evaluation_rows_without_system_texts_are_refused_in_training_and_noted_afterwards(tmp_path, capsys):
    words = ["--objective", "llm-jepa", *chat(tmp_path), "--chat", "shared-header"]
    (tmp_path / "pairs.tsv").write_text("user\tassistant\n" + "".join(f"x {i}\ty {i}\n" for i in range(60)), encoding="utf-8")
    assert train.main([*words, "--out", str(tmp_path / "run"), "--eval-data", str(tmp_path / "pairs.tsv")]) == 2
    assert "has no system texts" in capsys.readouterr().err
    assert train.main([*words, "--out", str(tmp_path / "run2"), "--langs", "system,assistant,user"]) == 0
    capsys.readouterr()
    assert evaluate.main([str(tmp_path / "run2"), "--data", str(tmp_path / "pairs.tsv"), "--tasks", "geometry"]) == 0
    assert "rows open with [CLS] alone" in capsys.readouterr().err
    assert evaluate.main([str(tmp_path / "run2"), "--langs", "user,assistant", "--tasks", "geometry"]) == 0
    assert "rows open with [CLS] alone" in capsys.readouterr().err
    (tmp_path / "none.jsonl").write_text("".join(json.dumps({"user": f"x {i}", "assistant": "y"}) + "\n" for i in range(60)), encoding="utf-8")
    words[words.index("--data") + 1] = str(tmp_path / "none.jsonl")
    assert train.main([*words, "--out", str(tmp_path / "run3")]) == 2 and "has no system texts" in capsys.readouterr().err


def test_a_long_system_text_is_cut_in_evaluation_as_in_training(tmp_path):
    tokenizer = train.data.open_corpus("toy", count=60, vocab=400).tokenizer
    long = "the cat saw a dog " * 300
    one, two = evaluate.rows_of(tokenizer, ["a bird", "two cows"], [long, long], None, 64, header=16)
    assert len(one) < 64 and one[:17] == two[:17] and one != two


@pytest.mark.parametrize("flags, message", [
    (["mlm", "--look-ahead", 4, "--accumulate", 2], "cannot split them into equal parts"), (["mexma", "--look-ahead", 4], "compares the examples"),
    (["llm-jepa", "--distance", "vicreg", "--look-ahead", 4], "compares the examples"),
    (["hybrid", "--latent", "barlow", "--look-ahead", 4], "compares the examples"), (["mlm", "--lr-start", 0.5, "--warmup", 0], "needs a --warmup"),
    (["llm-jepa", "--distance", "info_nce", "--accumulate", 8], "needs at least 2 at a time"),
    (["mlm", "--horizon", 2, "--schedule", "constant"], "a schedule that falls"), (["bepa", "--cut", 300], "a row can have 604 tokens")])
def test_flags_that_cannot_work_together_are_refused(flags, message, pairs, tmp_path, capsys):
    assert train.main(command(pairs, tmp_path / "run", flags[0], *flags[1:])) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_weights_that_are_not_finite_are_not_saved(pairs, tmp_path, capsys):
    out = tmp_path / "run"
    assert train.main(command(pairs, out, "mlm", "--steps", 3, "--lr", "1e39", "--warmup", 0, "--clip", 0, "--save-every", 1)) == 2
    assert "the weights are not finite" in capsys.readouterr().err and not (out / "train.pt").exists()


@pytest.mark.parametrize("kind", ["mlm", "hybrid"])
def test_blocks_of_text_are_rows_of_one_length(kind, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("".join(f"line {i} of the text\n" for i in range(300)), encoding="utf-8")
    (tmp_path / "valid.txt").write_text("".join(f"line {i} of another text\n" for i in range(30)), encoding="utf-8")
    words = ["--objective", kind, "--data", str(tmp_path / "text.txt"), "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "run"), *SMALL,
             "--block", "32", "--steps", "2"] + (["--predictor-width", "16", "--predictor-layers", "1", "--predictor-heads", "2"] if kind == "hybrid" else [])
    assert train.main(words) == 2
    assert "block 32 runs across the rows that would be held out: name other rows with --eval-data" in capsys.readouterr().err
    words += ["--eval-data", str(tmp_path / "valid.txt")]
    run = train.Run(words)
    clean = run.make_batch(0)[0].get("clean", run.make_batch(0)[0]["packed"])
    assert clean.rows.diff().tolist() == [34] * 8                        # [CLS], 32 tokens, [SEP]
    first, second = run.corpus.ids(0, 0), run.corpus.ids(1, 0)
    text = run.corpus.tokenizer.decode([*first.tolist(), *second.tolist()])
    assert text.startswith("line 0 of the text line 1 of the text")
    assert len(run.corpus) == len(run.corpus.tokens) // 32
    run.locked.close()
    for more, message in ((["--block", "200"], "block 200 is longer than cut 128"), (["--block", "4"], "block is 4")):
        assert train.main([*words, *more]) == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("kind", OBJECTIVES, ids=lambda kind: kind.name)
def test_lora_trains_with_every_objective_and_resumes_exactly(kind, pairs, tmp_path, monkeypatch):
    start = "ntp" if kind.causal else "mlm"
    assert train.main(command(pairs, tmp_path / "start", start, "--steps", 1)) == 0
    small = ["--head-layers", "1", "--head-heads", "2", "--head-hidden", "16"] if kind.name == "mexma" else []
    words = ["--objective", kind.name, "--data", str(pairs / "pairs.tsv"), "--cache", str(pairs / "cache"), "--init", str(tmp_path / "start"),
             "--lora-rank", "2", "--batch", "8", "--eval-limit", "20", "--steps", "3", *small]
    assert train.main([*words, "--out", str(tmp_path / "whole")]) == 0
    monkeypatch.setattr(train.Run, "agree", lambda self, number: signal.SIGTERM if self.step == 1 else 0)
    assert train.main([*words, "--out", str(tmp_path / "parts")]) == 128 + signal.SIGTERM
    monkeypatch.undo()
    assert train.main([*words, "--out", str(tmp_path / "parts")]) == 0
    one, two = (torch.load(tmp_path / name / "train.pt", weights_only=True)["objective"] for name in ("whole", "parts"))
    assert_equal(one, two)
    assert any(name.endswith("qkv.b") for name in one)
    begun, ended = (torch.load(tmp_path / name / "model.pt", weights_only=True)["weights"] for name in ("start", "whole"))
    assert not torch.equal(begun["blocks.0.qkv.weight"], ended["blocks.0.qkv.weight"]) and torch.equal(begun["norm.weight"], ended["norm.weight"])


def test_lora_without_a_run_to_start_from_is_refused(capsys):
    assert train.main(["--objective", "mlm", "--lora-rank", "4"]) == 2
    assert "--init" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------------------------- FLOPs

def test_flops_are_those_of_the_matrices_and_of_the_visible_pairs(pairs, tmp_path):
    run = train.Run(command(pairs, tmp_path / "run", "mlm", "--steps", 1))
    batch = run.make_batch(0)
    packed, n, d = batch[0]["packed"], len(batch[0]["labels"]), 16
    tokens = len(packed.tokens)
    linear = 2 * tokens * (3 * d * d + d * d + 2 * d * 32) + 2 * n * (d * d + d * run.corpus.special.vocab)
    lengths = packed.rows.diff().long()
    assert packed.pairs() == int((lengths ** 2).sum())
    expected = 3 * (linear + 4 * d * packed.pairs())
    assert train.count_flops(run.objective, [batch]) == pytest.approx(expected, rel=0.01)
    assert all(p.grad is None for p in run.objective.parameters())


def test_counting_flops_changes_nothing_of_the_run(pairs, tmp_path, monkeypatch):
    flags = ["--steps", 3]
    assert train.main(command(pairs, tmp_path / "one", "mlm", *flags)) == 0
    monkeypatch.setattr(train, "count_flops", lambda objective, batches: 1.0)
    assert train.main(command(pairs, tmp_path / "two", "mlm", *flags)) == 0
    assert_equal(states(tmp_path / "one"), states(tmp_path / "two"))


def test_match_flops_gives_a_run_the_compute_of_another(pairs, tmp_path, capsys):
    assert train.main(command(pairs, tmp_path / "ntp", "ntp", "--steps", 30)) == 0
    words = command(pairs, tmp_path / "jepa", "llm-jepa", "--match-flops", tmp_path / "ntp")
    assert train.main(words) == 0
    base, own = (train.read_log(tmp_path / name)[0] for name in ("ntp", "jepa"))
    assert 10 < own["config"]["steps"] < 30
    assert own["config"]["steps"] * own["flops_per_step"] == pytest.approx(30 * base["flops_per_step"], rel=0.05)
    assert train.main(words) == 0 and "this run is finished" in capsys.readouterr().out
    assert train.main([*words, "--out", str(tmp_path / "other"), "--match-flops", str(tmp_path)]) == 2


# ------------------------------------------------------------------------------------------------------------- odd states of a folder

def test_leftovers_of_a_killed_write_are_ignored_and_removed(pairs, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / ".train.pt.abc.part").write_bytes(b"half")                    # killed while it wrote its first checkpoint
    assert train.main(command(pairs, out, "mlm", "--steps", 1)) == 0
    (out / ".model.pt.abc.part").write_bytes(b"half")
    assert train.main(command(pairs, out, "mlm", "--steps", 2)) == 0
    assert not list(out.glob(".*.part"))


def test_a_moved_run_resumes_and_one_without_its_log_says_so(pairs, tmp_path, capsys):
    assert train.main(command(pairs, tmp_path / "run", "mlm", "--steps", 1)) == 0
    (tmp_path / "run").rename(tmp_path / "moved")
    assert train.main(command(pairs, tmp_path / "moved", "mlm", "--steps", 2)) == 0
    (tmp_path / "moved" / "log.jsonl").unlink()
    assert train.main(command(pairs, tmp_path / "moved", "mlm", "--steps", 3)) == 2
    assert "log.jsonl has lost its first line" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_one_line(pairs, tmp_path, capsys):
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert train.main(command(pairs, tmp_path / "file" / "run", "mlm", "--steps", 1)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


def test_fewer_steps_than_there_are_is_refused(pairs, tmp_path, capsys):
    assert train.main(command(pairs, tmp_path / "run", "mlm", "--steps", 3)) == 0
    assert train.main(command(pairs, tmp_path / "run", "mlm", "--steps", 2)) == 2
    assert "is already at step 3, beyond the 2 asked for" in capsys.readouterr().err


def test_a_second_process_on_the_same_folder_is_refused(pairs, tmp_path, capsys):
    words = command(pairs, tmp_path / "run", "mlm", "--steps", 1)
    first = train.Run(words)
    assert train.main(words) == 2 and "another process trains in" in capsys.readouterr().err
    first.locked.close()
    assert train.main(words) == 0


def test_a_kill_during_the_last_evaluation_is_made_good(pairs, tmp_path, capsys):
    out = tmp_path / "run"
    assert train.main(command(pairs, out, "contrastive", "--steps", 2)) == 0
    whole = train.read_log(out)
    lines = (out / "log.jsonl").read_text(encoding="utf-8").splitlines()
    (out / "log.jsonl").write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
    (out / "model.pt").unlink()
    capsys.readouterr()
    assert train.main(command(pairs, out, "contrastive", "--steps", 2)) == 0
    assert "step 0       now" in capsys.readouterr().out and (out / "model.pt").exists()
    assert train.read_log(out)[-1] == whole[-1]


def test_a_diverged_run_can_be_tried_again_with_other_flags(pairs, tmp_path, capsys):
    out = tmp_path / "run"
    assert train.main(command(pairs, out, "contrastive", "--steps", 30, "--lr", "1e30", "--warmup", 0, "--clip", 0)) == 2
    assert "there is no checkpoint yet" in capsys.readouterr().err and (out / "bad_batch.pt").exists()
    assert train.main(command(pairs, out, "contrastive", "--steps", 2)) == 0


@pytest.mark.parametrize("content", [{"a": 1}, [1], "optimizer"])
def test_a_file_that_is_no_checkpoint_is_one_line(content, pairs, tmp_path, capsys):
    out = tmp_path / "run"
    assert train.main(command(pairs, out, "mlm", "--steps", 1)) == 0
    saved = torch.load(out / "train.pt", weights_only=True)
    torch.save(saved | {"optimizer": {"state": 5}} if content == "optimizer" else content, out / "train.pt")
    assert train.main(command(pairs, out, "mlm", "--steps", 2)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "train.pt is not a checkpoint" in error


def test_a_swapped_tokenizer_is_refused_by_evaluate_and_init(pairs, tmp_path, capsys):
    out = tmp_path / "run"
    assert train.main(command(pairs, out, "mlm", "--steps", 1)) == 0
    content = json.loads((out / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["merges"] = content["model"]["merges"][:-1]
    (out / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    assert evaluate.main([str(out)]) == 2 and "is not the one that the run was trained with" in capsys.readouterr().err
    words = ["--objective", "mlm", "--data", str(pairs / "pairs.tsv"), "--cache", str(pairs / "cache"), "--out", str(tmp_path / "next"), "--init", str(out)]
    assert train.main(words) == 2 and "is not the one that" in capsys.readouterr().err


def test_a_flag_newer_than_a_run_does_not_stop_it_at_its_default(pairs, tmp_path):
    out = tmp_path / "run"
    assert train.main(command(pairs, out, "mlm", "--steps", 1)) == 0
    saved = torch.load(out / "train.pt", weights_only=True)
    del saved["config"]["pairs"]
    torch.save(saved, out / "train.pt")
    assert train.main(command(pairs, out, "mlm", "--steps", 2)) == 0
    assert train.main([*command(pairs, out, "mlm", "--steps", 3), "--pairs", "neighbours"]) == 2


def test_a_trained_run_without_its_checkpoint_is_never_silently_restarted(pairs, tmp_path, capsys):
    out = tmp_path / "run"
    words = command(pairs, out, "mlm", "--steps", 4, "--save-every", 2, "--log-every", 1)
    assert train.main(words) == 0
    (out / "train.pt").unlink()
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert train.main(words) == 2 and "a run of 4 steps without its train.pt" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    lines = (out / "log.jsonl").read_text(encoding="utf-8").splitlines()
    (out / "log.jsonl").write_text("\n".join(lines[:3]) + "\n", encoding="utf-8")      # killed in the first save, at step 2 at most
    assert train.main(words) == 0 and "stopped before its first checkpoint" in capsys.readouterr().out
