"""Comparison and statistics, a batch as text, compute, plots, experiments and their records."""

import contextlib
import io
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import data
import evaluate
import train
from corpora.program import BadInput, exit_status
from model import Block
from results import claims, diagrams, flops, readme, run
from results.__main__ import work
from results.tables import DATA

TINY = dict(width=16, layers=1, heads=2, ffn_dim=32, dropout=0.0, vocab=300, eval_limit=20, batch=8)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Flags for a small TSV of made-up pairs."""
    folder = tmp_path_factory.mktemp("pairs")
    lines = [f"sun {i} moon {i % 7} tree\tSUN {i} MOON {i % 7} TREE\n" for i in range(300)]
    (folder / "pairs.tsv").write_text("en\tde\n" + "".join(lines), encoding="utf-8")
    return dict(data=str(folder / "pairs.tsv"), cache=str(folder / "cache"))


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
    def write(name, scores, tokenizer="t", precision="float32", **settings):
        folder = tmp_path / name
        folder.mkdir()
        config = dict(objective="mexma", data="toy", langs="", steps=60, lr=0.001, seed=0, init="",
                      mexma={"koleo_weight": 1.0}, out=name) | settings
        first = {"config": config, "tokenizer_hash": tokenizer, "precision": precision}
        records = [first, {"step": 60, "loss": 1.0}]
        lines = [json.dumps(record) + "\n" for record in records]
        cut = '{"step": 9'  # As a kill leaves the last line.
        (folder / "log.jsonl").write_text("".join(lines) + cut, encoding="utf-8")
        (folder / "model.pt").write_bytes(b"")
        (folder / "eval.json").write_text(json.dumps(scores), encoding="utf-8")
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


def test_the_table_has_a_row_a_group_and_p_is_golden(runs, capsys):
    """Differences 2, 1, 3 for the second: t = 3.4641 with 2 degrees of freedom."""
    status, out, err = said(capsys, "compare", *runs)
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert lines[0] == "| run | retrieval/xsim % (lower) | geometry/rankme (higher) | seeds |"
    assert lines[3] == "| mexma koleo_weight 0.1 | 20.00 ± 1.73 | 70.00 ± 1.73 | 1, 2, 3 |"
    test = "-2.00 | -4.48 to +0.48 | -3.46 | 0.074 |"
    assert f"| mexma koleo_weight 0.1: retrieval/xsim | {test}" in lines
    assert f"| mexma koleo_weight 0.1: geometry/rankme | {test}" in lines
    assert "2 tests: by chance alone, .05 would be passed 0.1 times; Holm" in out


REFUSED = [
    ("comparre", "did you mean compare"), ("compare nowhere", "nowhere"),
    ("compare RUN --metrics retrieval/xsin", "did you mean retrieval/xsim?"),
    ("compare RUN --files x.json", "has no x.json: make it with python evaluate.py"),
    ("compare RUN RUN", "the same run with the same seed 1"),
    ("compare RUN OTHER", "cannot be compared"),  # numbers of other rows
    ("inspect --step -1", "--step -1"), ("gpu --only x", "--only x: choose from"),
    ("inspect --row 99 PAIRS", "--row 99: packed has rows 0 to 7"),
    ("inspect --line clean PAIRS", "this batch has packed, head_packed"),
    ("flops --match nowhere PAIRS", "nowhere"),
    ("nlrx", "--files None: give the folder of synth_train"),
    ("collapse --seeds x", "--seeds ['x']")]


@pytest.mark.parametrize("words, said", REFUSED)
def test_a_mistake_is_one_line_that_names_it(words, said, make, runs, pairs, refused):
    other = make("other", {"retrieval/xsim": 1.0}, data="regex")
    given = {"RUN": [runs[0]], "OTHER": [other], "PAIRS": as_words(pairs)}
    words = [word for one in words.split() for word in given.get(one, [one])]
    assert said in refused(work, words)


def test_what_may_mislead_is_noted(make, capsys):
    runs = [make("a", {"retrieval/xsim": 1.0, "geometry/rankme": 3.0}, seed=1),
            make("b", {"geometry/rankme": 4.0}, seed=2),
            make("c", {"geometry/rankme": 5.0}, objective="mlm", steps=90, tokenizer="u",
                 precision="bfloat16")]
    os.utime(Path(runs[2]) / "eval.json", (0, 0))
    out = said(capsys, "compare", *runs)[1]
    for text in ("mexma | 1.00 | 3.50 ± 0.71 | 1, 2 |", "retrieval/xsim has n = 1, not 2.",
                 "steps 60 / 90.", "step 60 of 90.", "eval.json is older", "The tokenizers differ",
                 f"bfloat16 in {runs[2]}; float32 in {runs[0]}, {runs[1]}."):
        assert text in out


# ---- inspect


def inspected(capsys, *words):
    """-> the rows, the mask and the keys that the command prints."""
    status, out, err = said(capsys, "inspect", *words)
    assert (status, err) == (0, "") and max(map(len, out.splitlines())) <= 100
    return re.split("THE MASK|THE KEYS", out.partition("THE ROWS")[2])


@pytest.mark.parametrize("objective", [
    "mexma", "mexma --line head_packed", "bepa", "llm-jepa", "mlm", "hybrid --line predict"])
def test_inspect_shows_rows_targets_mask_and_keys(objective, pairs, capsys):
    name, *line = objective.split()
    langs = "en" if name in ("mlm", "hybrid") else "en,de"
    rows, mask, keys = inspected(capsys, "--objective", name, *line,
                                 *as_words(pairs | {"vocab": 300, "langs": langs}))
    batch = train.batch(name, 2, 0, **pairs, vocab=300, langs=langs)
    shown = batch[line[-1] if line else "packed"]
    numbers = [line[:4].strip() for line in rows.split("\n\n", 1)[1].splitlines()]
    assert list(filter(None, numbers)) == [str(row) for row in range(len(shown))]
    wanted = batch["mask_index"] if line == ["--line", "predict"] else batch.get("target_positions")
    assert rows.split("\n\n", 1)[1].count("→") == len([] if wanted is None else wanted)
    cells = [list(one) for one in re.findall(r" ([#.]+)$", mask, re.M)]
    assert np.array_equal(np.array(cells) == "#", shown.mask(0))
    assert all(f"\n{key}: " in keys for key in batch)


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


# ---- plots


def test_plots_of_a_run_are_of_what_it_has(pairs, tmp_path, capsys):
    trained = train.start("contrastive", tmp_path / "run", steps=1, **TINY | pairs)
    list(trained.steps())
    assert said(capsys, "plots", trained.folder, "--out", tmp_path / "plots", "--limit", 20)[0] == 0
    assert {path.stem for path in (tmp_path / "plots").iterdir()} == {
        "attention-run", "pca-run", "cosines-run", "spectrum", "explained", "curves", "plane",
        "differences"}


# ---- experiments


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
        text = run.experiment_page(name, records)
        assert text.startswith(f"# {name}\n") and "Commit " in text
        # A page without records says so by having no table, and is not written.
        assert ("\n|---|" in text) == bool(records)
        path = run.RECORDS / f"{name}.md"
        assert not records or path.read_text(encoding="utf-8") == text


# ---- the board


SEEDS = {0: 1.0, 1: 2.0, 2: 3.0}
BETTER = {0: 2.0, 1: 3.1, 2: 4.0}


@pytest.mark.parametrize("ours, better, corrected, word", [
    (BETTER, "higher", .01, "holds here"), (BETTER, "lower", .01, "the reverse holds here"),
    (BETTER, "higher", .2, "holds before the correction only"),
    (BETTER, "lower", .2, "the reverse holds before the correction only"),
    ({0: 0.0, 1: 3.0, 2: 3.1}, "higher", .9, "no difference found"),
    (SEEDS, "higher", 1, "no difference found"), ({}, "higher", 1, "not measured yet"),
    ({0: 9.0, 1: 9.0}, "higher", 1, "open: too few seeds")])
def test_a_verdict_is_a_two_sided_test_and_its_correction(ours, better, corrected, word):
    found = claims.claim_test(ours, SEEDS)
    # Where no test is possible the verdict says so.
    assert word == (found if isinstance(found, str) else claims.verdict(found, corrected, better))


def test_the_board_of_claims_is_what_the_records_say():
    """Its verdicts again from the records: the paired test by scipy, Holm as his paper puts it."""
    def lines_of(page):  # A run of something else adds to the hours of all.
        return [line for line in page.splitlines() if "All recorded runs took" not in line]

    assert lines_of(claims.PAGE.read_text(encoding="utf-8")) == lines_of(claims.board())
    ps = {}
    for number, claim in enumerate(DATA["claims"]):
        ours, control = claims.numbers_of(claim)
        seeds = sorted(ours.keys() & control.keys())
        if seeds:
            ps[number] = stats.ttest_rel(*([of[s] for s in seeds] for of in (ours, control))).pvalue
    verdicts = [word for _, word in claims.judge(DATA["claims"])]
    # In the order of p, stop at the first that is above .05 / (m - k).
    still = True
    for rank, number in enumerate(sorted(ps, key=ps.get)):
        still = still and ps[number] < .05 / (len(ps) - rank)
        word = "holds here" if still else "holds before the correction only"
        assert (word if ps[number] < .05 else "no difference found") in verdicts[number]


# ---- the runner


def call_here(command, files, log):
    """run.call without a process of its own."""
    _, program, *words = command.split()
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        if program == "train.py":
            for _ in train.Run(train.parse(words), True, arguments=words).steps():
                pass
        else:
            assert program == "evaluate.py" and not evaluate.main(words)
    return shown.getvalue()


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
    assert first["precision"] == "float32"
    assert first["flops"] == flops.run_flops(tmp_path / "mini-ntp-3")
    own = flops.step_flops(second["train"].replace("MATCH", "9").split()[2:])[0]
    assert second["steps"] == round(flops.run_flops(tmp_path / "mini-ntp-3") / own) < 4
    assert said(capsys, "mini", "list")[1] == ""
    page = (tmp_path / "mini.md").read_text(encoding="utf-8")
    assert "| ntp |" in page and "equal against ntp: generate/exact" in page and "health: " in page


def test_the_readmes_tables_are_the_recorded_ones():
    for page in readme.PAGES:
        text = page.read_text(encoding="utf-8")
        assert readme.filled(text) == text
        assert readme.filled(text.replace("| mexma | ", "| mexma | 9")) == text
    with pytest.raises(BadInput, match="no table"):
        readme.filled("no table")


# ---- diagrams


@pytest.mark.parametrize("objective, name, said", (
    ("mexma", "toy", ("S_A", "S_B", "clean A", "masked B")),
    ("hybrid", "documents", ("teacher: the clean row", "predictor, block 2", "?"))))
def test_a_diagram_shows_the_first_example_of_its_batch(objective, name, said):
    corpus = data.open_corpus(name, count=100)
    batch, name_of = diagrams.example_of(objective, corpus, 0, 12, 5)
    figure = getattr(diagrams, objective)(batch, name_of)
    texts = [one.get_text() for axis in figure.axes for one in axis.texts]
    assert {*said, *map(name_of, batch["targets"])} <= set(texts)
    # Every hidden word in its row, and a context's once more.
    masks = batch["packed"].tokens == corpus.special.mask
    assert texts.count("[MASK]") == masks.sum() > 0
