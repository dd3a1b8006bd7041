"""Comparison and statistics, a batch as a picture, compute, plots, the benchmark, experiments."""

import contextlib
import io
import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import evaluate
import train
from corpora.program import BadInput, exit_status
from model import Block, Packed
from results import bench, claims, compare, flops, inspect, memory, plots, readme, run, steps
from results.__main__ import work

TINY = dict(width=16, layers=1, heads=2, ffn_dim=32, dropout=0.0, vocab=300, eval_limit=20, batch=8)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Flags for a small TSV of made-up pairs."""
    folder = tmp_path_factory.mktemp("pairs")
    lines = [f"sun {i} moon {i % 7} tree\tSUN {i} MOON {i % 7} TREE\n" for i in range(300)]
    (folder / "pairs.tsv").write_text("a\tb\n" + "".join(lines), encoding="utf-8")
    return dict(data=str(folder / "pairs.tsv"), cache=str(folder / "cache"), header="yes")


def said(capsys, *words):
    """-> the status, stdout, stderr of a command"""
    status = exit_status(work, [str(word) for word in words])
    return status, *capsys.readouterr()


def as_words(flags):
    words = []
    for name, value in flags.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


# ---- compare


@pytest.fixture
def make(tmp_path):
    """make(name, scores, seed=..., ...) -> a folder as train.py and evaluate.py write it."""
    def write(name, scores, file="eval.json", tokenizer="t", **settings):
        folder = tmp_path / name
        folder.mkdir()
        config = dict(objective="mexma", data="toy", langs="", steps=60, lr=0.001, seed=0, init="",
                      mexma={"koleo_weight": 1.0}, out=name) | settings
        records = [{"config": config, "tokenizer_hash": tokenizer}, {"step": 60, "loss": 1.0}]
        lines = [json.dumps(record) + "\n" for record in records]
        damaged = '{"step": null}\n{"step": 9'
        (folder / "log.jsonl").write_text("".join(lines) + damaged, encoding="utf-8")
        (folder / "model.pt").write_bytes(b"")
        (folder / file).write_text(json.dumps(scores), encoding="utf-8")
        return str(folder)
    return write


@pytest.fixture
def runs(make):
    """Two groups with three seeds each; the second is better in every seed."""
    made = []
    for weight, values in ((1.0, (20.0, 22.0, 24.0)), (0.1, (18.0, 21.0, 21.0))):
        for seed, xsim in zip((1, 2, 3), values):
            scores = {"retrieval/xsim": xsim, "retrieval/rows": 100, "geometry/rankme": 50 + xsim}
            made.append(make(f"{weight}-{seed}", scores, seed=seed, mexma={"koleo_weight": weight}))
    return made


@pytest.mark.parametrize("t, p", [(2.131847, .05), (3.746947, .01), (0.0, .5), (-2.131847, .95)])
def test_the_critical_values_of_4_degrees_of_freedom(t, p):
    """Differences of mean m and deviation s: t = m / (s / sqrt 5)."""
    shift = t * math.sqrt(2.5 / 5)
    x = {seed: 50 + shift + seed for seed in (-2, -1, 0, 1, 2)}          # deviation sqrt 2.5
    y = dict.fromkeys(x, 50.0)
    found = compare.paired_test(x, y, "higher")
    assert found["p"] == pytest.approx(p, abs=1e-5)
    assert found["t"] == pytest.approx(t) and found["difference"] == pytest.approx(shift)
    assert compare.paired_test(x, y, "lower")["p"] == pytest.approx(1 - p, abs=1e-5)


def test_the_test_pairs_common_seeds_or_says_why_not():
    x = {1: 1.0, 2: 4.0, 3: 2.5, 4: 7.0, 9: 0.0}
    y = {1: 0.5, 2: 4.5, 3: 1.0, 4: 6.0, 8: 0.0}
    other = stats.ttest_rel(list(x.values())[:4], list(y.values())[:4], alternative="less")
    found = compare.paired_test(x, y, "lower")
    assert found["p"] == pytest.approx(other.pvalue)
    assert found["t"] == pytest.approx(-other.statistic)
    assert "2 common seeds, there are 1" in compare.paired_test({1: 1.0}, y, "lower")
    assert "same difference" in compare.paired_test({1: 1, 2: 2}, {1: 1, 2: 2}, "higher")


def test_the_table_has_a_row_a_group_and_p_is_golden(runs, capsys):
    """Differences 2, 1, 3 for the second: t = 3.4641 with 2 degrees of freedom."""
    status, out, err = said(capsys, "compare", *runs)
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert lines[0] == "| run | retrieval/xsim % (lower) | geometry/rankme (higher) | seeds |"
    assert lines[2] == "| mexma koleo_weight 1.0 | 22.00 ± 2.00 | 72.00 ± 2.00 | 1, 2, 3 |"
    assert lines[3] == "| mexma koleo_weight 0.1 | 20.00 ± 1.73 | 70.00 ± 1.73 | 1, 2, 3 |"
    assert "| mexma koleo_weight 0.1: retrieval/xsim | -2.00 | 3.46 | 0.037 |" in lines
    assert "| mexma koleo_weight 0.1: geometry/rankme | -2.00 | -3.46 | 0.963 |" in lines
    assert "2 tests: by chance alone, .05 would be passed 0.1 times; Holm" in out


def test_a_metric_that_some_runs_lack_is_counted_and_what_may_mislead_is_noted(make, capsys):
    runs = [make("a", {"retrieval/xsim": 1.0, "geometry/rankme": 3.0}, seed=1),
            make("b", {"geometry/rankme": 4.0}, seed=2),
            make("c", {"geometry/rankme": 5.0}, objective="mlm", steps=90, tokenizer="u")]
    os.utime(Path(runs[2]) / "eval.json", (0, 0))
    out = said(capsys, "compare", *runs)[1]
    for text in ("mexma | 1.00 | 3.50 ± 0.71 | 1, 2 |", "mlm | - | 5.00 | 0 |",
                 "mexma: retrieval/xsim has n = 1, not 2.", "steps 60 / 90.",
                 "step 60 of 90.", "eval.json is older", "The tokenizers differ"):
        assert text in out


def test_seeds_of_fine_tuning_are_pairs_with_those_of_training(make, capsys):
    runs = []
    for kind in ("bepa", "mlm"):
        for seed in (1, 2):
            scores = {"mnli/accuracy": 60.0, "mnli/accuracy/seed_7": 60.0 + len(runs),
                      "mnli/accuracy/seed_8": 61.0 - len(runs) % 2}
            runs.append(make(f"{kind}-{seed}", scores, "finetune-mnli.json", seed=seed,
                             objective=kind, init=f"out/start-{seed}"))
    out = said(capsys, "compare", *runs, "--files", "finetune-mnli.json")[1]
    assert "| bepa | 60.50 ± 0.58 | 1, 2 |" in out and "| mlm | 61.50 ± 1.29 | 1, 2 |" in out
    assert "mlm: mnli/accuracy has n = 4, not 2." in out
    assert "| mlm: mnli/accuracy | +1.00 | 1.73 | 0.091 |" in out


@pytest.mark.parametrize("more", [dict(data="regex"), dict(langs="en,de"),
                                  dict(scores={"retrieval/xsim": 1.0, "retrieval/rows": 50})])
def test_numbers_of_other_rows_are_refused(more, make, runs, capsys):
    other = make("other", **{"scores": {"retrieval/xsim": 1.0}} | more)
    status, out, err = said(capsys, "compare", runs[0], other)
    assert status == 2 and not out and "cannot be compared" in err


@pytest.mark.parametrize("words, message", [
    (["comparre"], "did you mean compare"), (["compare", "nowhere"], "nowhere is no run"),
    (["compare", "RUN", "--metrics", "retrieval/xsin"], "did you mean retrieval/xsim?"),
    (["compare", "RUN", "--files", "x.json"], "has no x.json: make it with python evaluate.py"),
    (["compare", "RUN", "RUN"], "the same run with the same seed 1"),
    (["inspect", "--step", "-1"], "--step -1"), (["gpu", "--only", "x"], "'x' is unknown"),
    (["inspect", "--row", "99", "PAIRS"], "--row 99: packed has rows 0 to 7"),
    (["inspect", "--line", "clean", "PAIRS"], "this batch has packed, head_packed"),
    (["flops", "--match", "nowhere", "PAIRS"], "nowhere is no run"),
    (["nlrx"], "--files None: give the folder of synth_train"),
    (["collapse", "--seeds", "x"], "--seeds ['x']")])
def test_a_mistake_is_one_line_and_status_2(words, message, runs, pairs, capsys):
    given = []
    for word in words:
        given += as_words(pairs) if word == "PAIRS" else [runs[0] if word == "RUN" else word]
    status, out, err = said(capsys, *given)
    assert (status, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
    assert message in err


# ---- inspect


NAMES = {  # of the parts of each second row of a batch of two
    "mexma": ["masked A", "masked B", "clean A", "clean B"],
    "bepa": ["masked A|masked B", "clean A", "clean B"],
    "llm-jepa": ["Text|[PRED]|answer|Code"], "ntp": ["Text|answer"], "mlm": ["masked"],
    "contrastive": ["clean A", "clean B"], "hybrid": ["masked", "context"],
    "hybrid --line predict": ["context|targets", "context|targets"],
    "mexma --no-symmetrical --align-views dirty": ["masked A", "clean B"],
    "bepa --cls-view masked": ["masked A|masked B", "clean A|hidden B", "clean B|hidden A|clean B"],
    "llm-jepa --mode two-row --reverse": ["Text|answer", "Text|Code|[PRED]"],
    "llm-jepa --mode three-row --labels all": ["Text|answer", "Text|[PRED]", "Code"],
}


@pytest.mark.parametrize("objective", NAMES)
def test_inspect_names_parts_marks_targets_and_explains_every_key(objective, pairs, capsys):
    langs = "a" if objective.startswith(("mlm", "hybrid")) else "a,b"
    flags = as_words(pairs | {"vocab": 300, "langs": langs})
    words = ["--objective", *objective.split(), *flags]
    status, out, err = said(capsys, "inspect", *words)
    assert (status, err) == (0, "") and max(map(len, out.splitlines())) <= 100
    rows, mask, keys = re.split("THE MASK|THE KEYS", out.partition("THE ROWS")[2])
    rows = rows.split("\n\n", 1)[1]
    names = []
    for line in rows.splitlines():
        if line[:4].strip():
            names.append(line[5:13].strip())
        elif line[5:13].strip():
            names[-1] += f"|{line[5:13].strip()}"
    assert names[::2] == names[1::2] == NAMES[objective]
    line = "predict" if "predict" in words else "packed"
    settings = train.parse([word for word in words if word not in ("--line", "predict")])
    usual = vars(train.settle(settings.kind.name, {}).options)
    own = {name: value for name, value in vars(settings.options).items() if value != usual[name]}
    batch = train.batch(settings.kind.name, 2, 0, **own, **pairs, vocab=300, langs=langs)
    assert all(f"\n{name} (" in keys or f"\n{name}: " in keys for name in batch)
    assert "see the comment" not in keys
    wanted = len(batch["mask_index"] if line == "predict" else batch.get("target_positions", ()))
    assert rows.count("→") + len(re.findall(r"(?<!\S)_\S+?_(?!\S)", rows)) == wanted
    cells = [list(one) for one in re.findall(r" ([#.]+)$", mask, re.M)]
    assert np.array_equal(np.array(cells) == "#", batch[line].mask(0))


def test_a_long_row_is_cut_to_what_fits(pairs, capsys):
    path = Path(pairs["data"]).with_name("long.tsv")
    path.write_text("a\tb\n" + ("sun moon " * 70 + "\t" + "sun moon " * 70 + "\n") * 20, "utf-8")
    out = said(capsys, "inspect", "--objective", "ntp", *as_words(pairs | {"data": path}),
               "--vocab", 300)[1]
    cells = re.findall(r" ([#.]+)$", out, re.M)
    assert len(cells) == len(cells[0]) == inspect.GRID and max(map(len, out.splitlines())) <= 100
    assert out.count(" tokens not drawn") == 2


# ---- compute


@pytest.mark.parametrize("words", [
    "mlm", "mlm --regressor", "contrastive", "mexma", "bepa --predictor mlp", "ntp",
    "llm-jepa --predictors 2", "hybrid"])
def test_flops_from_sizes_are_those_that_the_profiler_counts(words, pairs):
    """And in attention those of the visible pairs, whatever computes it."""
    shape = TINY | pairs | dict(width=64, ffn_dim=256, head_layers=1)
    words = ["--objective", *words.split(), *as_words(shape)]
    if words[1] != "mexma":
        words = words[:-2]
    one = train.Run(train.parse(words), writes=False)
    batch, = one.make_batch(0)
    counted = 0

    def count(block, arguments):
        nonlocal counted
        factor = 12 if torch.is_grad_enabled() else 4
        counted += factor * block.config.width * arguments[1].visible_pairs()

    for module in one.objective.modules():
        if isinstance(module, Block):
            module.register_forward_pre_hook(count)
    attention = {op: lambda *shapes, **more: 0 for op in flop_registry if "attention" in str(op)}
    with FlopCounterMode(display=False, custom_mapping=attention) as counter:
        one.objective(batch)[0].backward()
    counted += counter.get_total_flops()
    assert flops.batch_flops(one.objective, batch) == pytest.approx(counted, rel=0.02)


def test_the_chance_of_leaving_the_latent_loss_out_counts_by_its_share(pairs):
    def of(*words):
        return flops.step_flops(["--objective", *words, *as_words(TINY | pairs)])[0]

    found = [of("llm-jepa", "--jepa-dropout", "0.5", "--seed", str(seed)) for seed in range(3)]
    half = (of("ntp") + of("llm-jepa")) / 2
    assert found == pytest.approx([half] * 3, rel=0.05) and half > 1.1 * of("ntp")


def test_memory_says_what_fits(monkeypatch, pairs, capsys):
    monkeypatch.setattr(memory, "SIZES", ["toy"])
    flags = {name: value for name, value in (TINY | pairs).items() if name != "batch"}
    status, table, _ = said(capsys, "memory", "--objective", "ntp", "--rows", 2, *as_words(flags))
    assert status == 0 and re.fullmatch(r"\| toy(?: \| [\d.]+){6} \|", table.splitlines()[-1])


# ---- plots


def test_every_plot_is_drawn_the_same_each_time():
    vectors = {name: torch.randn(30, 8) for name in ("en", "de", "fr")}
    log = [{"config": {}}, {"step": 1, "loss": 2.0}, {"step": 2, "loss": "nan"},
           {"step": 2, "eval": {"probe/mean": 9}}]
    for draw in (plots.spectrum, plots.pca, plots.cosines):
        assert plots.png(draw(vectors)) == plots.png(draw(vectors))
    figure = plots.curves({"mexma": [log, log], "mlm": [log]})
    assert [axis.get_ylabel() for axis in figure.axes] == ["loss", "probe/mean"]
    assert plots.points_of(log, "loss") == {1: 2.0}                      # "nan" has no point


def test_plots_of_runs_are_of_what_each_has(pairs, tmp_path, capsys, monkeypatch):
    folders = []
    for name in ("mlm", "contrastive"):
        run = train.start(name, tmp_path / name, steps=1, **TINY | pairs)
        list(run.steps())
        folders.append(run.folder)
    scores = {"gap/sst2/mean/class_alignment": 0.5, "gap/sst2/mean/uniformity": -1.0,
              "gap/sst2/max/class_alignment": 0.1, "gap/sst2/max/uniformity": -2.0}
    (folders[0] / "eval-sets.json").write_text(json.dumps(scores), encoding="utf-8")
    scores = {"mlqa/f1": 2.0, "mlqa/f1/en-en": 3.0, "mlqa/f1/en-de": 1.0, "mlqa/f1/xlt": 3.0}
    (folders[1] / "finetune-mlqa.json").write_text(json.dumps(scores), encoding="utf-8")
    _, _, _, places = plots.of_run(folders[0], 20)
    assert places["mlm, sst2"] == [(0.5, -1.0)] and "mlm, sst2/max" not in places
    # Three languages are asked in of two contexts.
    axis, _ = plots.answers({"mlqa/f1/en-en": 3.0, "mlqa/f1/en-de": 1.0, "mlqa/f1/de-hi": 2.0}).axes
    assert axis.images[0].get_array().shape == (2, 3)
    assert said(capsys, "plots", *folders, "--out", tmp_path / "plots", "--limit", 20)[0] == 0
    assert {path.stem for path in (tmp_path / "plots").iterdir()} == {
        "attention-mlm", "attention-contrastive", "pca-mlm", "pca-contrastive", "cosines-mlm",
        "cosines-contrastive", "mlqa-contrastive", "spectrum", "explained", "curves", "plane",
        "differences"}
    monkeypatch.setattr(plots, "get_font", lambda path: SimpleNamespace(get_charmap=dict))
    assert plots.looked_at(run.evaluation()) is None


# ---- the benchmark


def test_short_rows_waste_a_third_of_what_blocks_of_128_do():
    """Computed over visible pairs."""
    found, = next(bench.tiles()).values()
    for name, expected in {
            "sentences 8-40": (2.93, 13.08), "MEXMA encoder, mean 35": (2.10, 7.08),
            "BERT-JEPA pairs, mean 90": (1.45, 3.57), "hybrid, 512": (1.00, 1.00),
            "causal documents, mean 600": (1.27, 1.40)}.items():
        measured = (found[name]["ours, forward and dq"], found[name]["blocks of 128"])
        assert measured == pytest.approx(expected, abs=0.02), name


def test_padded_states_are_the_packed_ones_and_a_peer_that_fails_says_why():
    model = bench.Model(bench.ModelConfig(vocab=60, width=32, heads=4, layers=2, dropout=0.0))
    packed = Packed.of([np.arange(7), np.arange(30, 33), np.arange(9, 20)])
    assert torch.allclose(model(packed), bench.padded_states(model, packed), atol=1e-5)
    found = bench.interleaved({"ours": list, "peer": lambda: [][0]}, 1, bench.core)
    assert found["peer"] == {"failed": "IndexError: list index out of range"}
    assert found["ours"]["times ours"] == 1 and "| peer |" in "".join(bench.table_of(found))


# ---- experiments


def test_a_steps_time_has_parts_and_the_page_is_what_was_measured(pairs, monkeypatch):
    monkeypatch.setattr(steps, "STARTS", {"nothing": "pass"})
    assert 0 < steps.starting(1)["nothing"]
    parts = steps.step_times(["--objective", "mlm", *as_words(TINY | pairs)])
    shares = [number for what, number in parts.items() if what.endswith(", %")][:-1]
    assert sum(shares) == pytest.approx(100, abs=4) and min(parts.values()) >= 0 < parts["ms"]
    few, many = (steps.point("contrastive", count, 4, 500, rounds=1) for count in (2, 64))
    assert 0 < few[0] < many[0]
    record = json.loads((steps.PLACE / "steps.json").read_text(encoding="utf-8"))
    assert (steps.PLACE / "steps.md").read_text(encoding="utf-8") == steps.page(record)
    assert plots.png(steps.picture(record)) == plots.png(steps.picture(record))


def test_every_experiment_has_commands_that_train_understands_and_a_page():
    for name in run.ALL:
        for job in run.jobs_of(name, [7]):
            # A run to start from is not there yet.
            words = re.sub("--(init|lora-rank) [^ ]+", "", job.train.replace("MATCH", "5")).split()
            if "train.py" in words:
                settings = train.parse(words[2:])
                assert settings.train.seed == 7 and settings.train.out == str(job.folder)
            assert job.tests.startswith("python ") and "RUN" not in job.train + job.tests
            assert ("MATCH" in job.train) == bool(job.equal)
        # Beside hybrid stands the paper's control: its head and recipe, without its loss.
        trained = " ".join(job.train for job in run.jobs_of(name, [7]))
        assert "--preset hybrid" in trained or "--objective hybrid" not in trained or (
            name == "encoders-rates")
        records = run.read_records(name)
        text = run.page(name, records)
        assert text.startswith(f"# {name}\n") and "Commit " in text
        # A page without records says so by having no table, and is not written.
        assert ("\n|---|" in text) == bool(records)
        path = run.RECORDS / f"{name}.md"
        assert not records or path.read_text(encoding="utf-8") == text


SEEDS = {0: 1.0, 1: 2.0, 2: 3.0}


@pytest.mark.parametrize("ours, word", [
    ({0: 2.0, 1: 3.1, 2: 4.0}, "holds here"), ({0: 0.0, 1: 1.1, 2: 2.0}, "the reverse holds here"),
    ({0: 0.0, 1: 3.0, 2: 3.1}, "no difference found"), ({0: 9.0, 1: 9.0}, "open: too few seeds"),
    (SEEDS, "no difference found"), ({}, "not measured yet")])
def test_the_verdict_on_a_claim_is_a_paired_test(ours, word):
    found, told = claims.verdict(ours, SEEDS, "higher")
    assert found == word
    assert word != "holds here" or "+0.89 to +1.18, p " in told


def test_the_board_of_claims_is_what_the_records_say():
    assert len(compare.DATA["claims"]) == 12
    assert claims.PAGE.read_text(encoding="utf-8") == claims.page()
    for claim in compare.DATA["claims"]:
        labels = [job["label"] for job in run.ALL[claim["experiment"]]["jobs"]]
        assert {claim["ours"], claim.get("control", claim["ours"])} <= set(labels)


def test_the_pictures_of_the_board_are_drawn_from_the_records(monkeypatch):
    places, seeds = claims.along("objectives", "retrieval/xsim", "TFLOP")["contrastive"]
    assert len(seeds) == 3 and places[0] == 0 and places[-1] == pytest.approx(7.06, abs=0.01)
    assert len(claims.picture().axes) == 5 + claims.page().count("Spearman")
    monkeypatch.setitem(claims.BOARD, "usefulness", {"experiments": {"a": ""}, "probes": "pq"})
    made = [("a", 1, 1, 3), ("a", 2, 3, 3), ("b", 1, 5, 4), ("c", 0, 7, 4), ("c", 1, 2, None)]
    records = []
    for seed, (label, *numbers) in enumerate(made):
        scores = {name: n for name, n in zip("xpq", numbers) if n is not None}
        records.append({"label": label, "seed": seed, "eval": scores})
    monkeypatch.setattr(claims, "read_records", lambda name: records)
    points, rank, _ = claims.usefulness("x")
    assert points == {"a": [(1, 2), (2, 3)], "b": [(1, 4.5)], "c": [(0, 5.5)]} and rank == -1


def test_the_first_screen_of_the_results_says_what_the_records_say():
    text = (run.RECORDS / "README.md").read_text(encoding="utf-8")[:2500]
    shown = claims.BOARD["signature"]
    records = run.read_records(shown["experiment"])
    for metric, digits in (("linear/residual_held_out", 3), ("linear/singular_100", 0),
                           ("geometry/rankme", 0), ("geometry/cosine/same", 3),
                           ("linear/residual_spread", 2), ("generate/exact", 1)):
        for label in shown["runs"]:
            mean = np.mean(list(compare.by_label(records, metric)[label].values()))
            assert f"{mean:.{digits}f}".lstrip("0") in text


def call_here(command, files, log):
    """run.call without a process of its own."""
    _, program, *words = command.split()
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        if program == "train.py":
            for _ in train.Run(train.parse(words), True, command=command).steps():
                pass
        else:
            assert program == "evaluate.py" and not evaluate.main(words)
    return shown.getvalue()


def test_a_command_has_one_thread_and_a_failure_is_told(tmp_path):
    code = "__import__('os').environ['OMP_NUM_THREADS']"
    assert run.call(f"python -c print({code},'FILES')", "/data", tmp_path / "log") == "1 /data\n"
    with pytest.raises(BadInput, match="ended with status 3: .*log says why"):
        run.call("python -c exit(3)", None, tmp_path / "log")


def test_the_runner_does_what_is_not_recorded_and_matches_compute(pairs, tmp_path, monkeypatch,
                                                                  capsys):
    jobs = [{"label": "ntp", "train": "--objective ntp --steps 4"},
            {"label": "equal", "train": "--objective llm-jepa --steps MATCH", "equal": "ntp"}]
    monkeypatch.setitem(run.ALL, "mini", {
        "about": "", "seeds": [3], "jobs": jobs, "paired": ["generate/exact"],
        "controls": {"equal": "ntp"}, "flags": " ".join(as_words(TINY | pairs))})
    for name, value in (("OUT", tmp_path), ("RECORDS", tmp_path), ("call", call_here)):
        monkeypatch.setattr(run, name, value)
    assert said(capsys, "mini")[0] == 0
    first, second = run.read_records("mini")
    assert (first["label"], first["seed"], first["steps"]) == ("ntp", 3, 4)
    assert first["flops"] == flops.run_flops(tmp_path / "mini-ntp-3")
    own = flops.step_flops(second["train"].replace("MATCH", "9").split()[2:])[0]
    assert second["steps"] == round(flops.run_flops(tmp_path / "mini-ntp-3") / own) < 4
    assert said(capsys, "mini", "list")[1] == ""
    page = (tmp_path / "mini.md").read_text(encoding="utf-8")
    assert "| ntp |" in page and "equal against ntp: generate/exact" in page and "health: " in page


def test_a_job_first_makes_the_run_that_it_starts_from(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(run, "call", lambda command, files, log: called.append(command))
    monkeypatch.setattr(run, "ROOT", tmp_path)
    job = run.jobs_of("decoder-lambda")[0]
    run.make(job, None, None)
    (tmp_path / "out/results/decoder-before-0").mkdir(parents=True)
    run.make(job, None, None)
    first = "python -m interop import FILES/smollm2 out/results/decoder-before-0"
    assert called == [first, job.train, job.train]


def test_the_readmes_tables_are_the_recorded_ones():
    for page in readme.PAGES:
        text = page.read_text(encoding="utf-8")
        assert readme.filled(text) == text
        assert readme.filled(text.replace("| mexma | ", "| mexma | 9")) == text
    with pytest.raises(BadInput, match="no table"):
        readme.filled("no table")
