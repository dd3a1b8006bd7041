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

import data
import evaluate
import train
from corpora.program import BadInput, exit_status
from results import claims, compare, diagrams, flops, mixtures, pictures, plots, readme, run
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
    counted = flops.counted_flops(one.objective, batch)
    assert flops.batch_flops(one.objective, batch) == pytest.approx(counted, rel=0.02)


def test_the_compute_of_an_objective_of_a_file_has_the_networks_that_the_file_adds(pairs):
    """Of NextLat: three maps of every state that has a successor, and the head of both states."""
    words = as_words(TINY | pairs | dict(width=64, ffn_dim=256))
    gallery = Path(flops.__file__).parent.parent / "gallery"
    found = {}
    for objective in ("ntp", gallery / "nextlat.py"):
        arguments = ["--objective", str(objective), *words]
        found[str(objective)], _ = flops.step_flops(arguments)
    run = train.Run(train.parse(arguments), writes=False)
    more = 0
    for step in range(flops.PROBES):
        batch, = run.make_batch(step)
        rows = len(batch["state_index"]) / flops.PROBES
        more += rows * 64 * (6 * (2 * 64 + 64 + 64) + 8 * run.corpus.special.vocab)
    assert found[str(objective)] - found["ntp"] == pytest.approx(more, rel=0.01)


# ---- plots


def test_plots_of_a_run_are_of_what_it_has(pairs, tmp_path, capsys):
    trained = train.start("contrastive", tmp_path / "run", steps=1, **TINY | pairs)
    list(trained.steps())
    measured = {f"gap/sst2/max/{name}": 0.5 for name in
                ("class_alignment", "uniformity", "semantic", "spectral_entropy")}
    (tmp_path / "run" / "gap.json").write_text(json.dumps(measured), encoding="utf-8")
    assert said(capsys, "plots", trained.folder, "--out", tmp_path / "plots", "--limit", 20,
                "--files", "gap.json")[0] == 0
    assert {path.stem for path in (tmp_path / "plots").iterdir()} == {
        "looked_at-run", "heads-run", "neighbours-run", "clouds-run", "cosines-run",
        "poolings-run", "spectrum", "explained", "curves", "plane", "plane-max", "differences"}


def log_of(objective, seed):
    """Two steps and three evaluations of a made-up run."""
    log = [{"config": {"objective": objective}}]
    for step in (0, 4, 8):
        log.append({"step": step, "eval": {"validation/mlm": 9.0 - step, "retrieval/xsim": 50.0}})
    return log + [{"step": step, "mlm": 10.0 - step + seed, "lr": 1.0} for step in (2, 4)]


@pytest.mark.parametrize("tflop, scale", [(None, 1), ({"a": 0.5, "b": 3.0}, 0.5)])
def test_curves_have_a_panel_a_term_with_both_kinds_of_rows(tflop, scale):
    logs = {"a": [log_of("bepa", 0), log_of("bepa", 1)], "b": [log_of("mlm", 0)]}
    figure = pictures.curves(logs, tflop)
    own, other, xsim = [axis for axis in figure.axes if axis.axison]
    assert [own.get_title(), other.get_title()] == ["bepa: mlm", "mlm: mlm"]
    assert own.get_ylabel() == "nats, lower is better"
    training, held_out = [line.get_xydata().tolist() for line in own.lines[:2]]
    assert training == [[2 * scale, 8.5], [4 * scale, 6.5]]
    assert held_out == [[0, 9], [4 * scale, 5], [8 * scale, 1]]
    assert len(xsim.lines) == 2 and xsim.get_ylabel() == "%, lower is better"
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["a", "b", "on rows held out"]


def test_names_at_the_ends_stand_apart_and_no_line_hides_another():
    series = {"one": ([0, 1], [5.0, 1.0]), "upon it": ([0, 1], [5.0, 1.01]),
              "high": ([0, 1], [5.0, 9.0])}
    figure = plots.lines(series, "step", "loss")
    plots.label_ends(figure.axes[0])
    names = figure.axes[0].texts
    assert [name.get_text() for name in names] == ["one", "upon it", "high"]
    assert [name.xy[1] for name in names] == pytest.approx([1.0, 1.01, 9.0])
    assert names[1].xyann[1] - names[0].xyann[1] > 0.04
    assert [line.is_dashed() for line in figure.axes[0].lines] == [False, True, False]


def test_clouds_and_the_plane_draw_every_point():
    torch.manual_seed(0)
    vectors = {"en": torch.randn(20, 5), "de": torch.randn(20, 5) + 100}
    for draw in (plots.pca, plots.tsne):
        english, german = [np.array(one.get_offsets())
                           for one in draw(vectors).axes[0].collections]
        assert len(english) == len(german) == 20
        center = english.mean(0)
        # Two heaps far from each other stay two heaps.
        spread = np.linalg.norm(english - center, axis=1).max()
        assert np.linalg.norm(german - center, axis=1).min() > spread
    way, ring, dot = plots.plane({"run": [(0.1, 0.0), (0.5, -2.0)]}).axes[0].lines
    assert way.get_xydata().tolist() == [[0.1, 0.0], [0.5, -2.0]]
    assert ring.get_xydata().tolist() == [[0.1, 0.0]] and dot.get_xydata().tolist() == [[0.5, -2.0]]


def test_numbers_of_tasks_are_drawn_as_they_are():
    scores = {"gap/sst2/mean/semantic": 60.0, "gap/sst2/max/semantic": 55.0,
              "gap/sst2/cls/semantic": 1.0, "gap/sst2/max/uniformity": -0.5,
              "gap/sst2/mean/spectral_entropy": 0.9}
    entropy, probe, uniform = pictures.of_poolings(scores).axes
    heights = [[bar.get_height() for bar in axis.patches] for axis in (entropy, probe, uniform)]
    assert heights == [[0.9], [60.0, 55.0], [-0.5]]
    drawn = pictures.answers({"mlqa/f1/en-de": 40.0, "mlqa/f1/de-de": 30.0}).axes[0]
    assert drawn.images[0].get_array().tolist() == [[40.0], [30.0]]


def test_pictures_of_tokens_show_a_row_a_head_and_the_nearest(pairs, tmp_path):
    list(train.start("contrastive", tmp_path / "run", steps=1, **TINY | pairs).steps())
    evaluation = evaluate.evaluation_of(evaluate.open_run(tmp_path / "run"), limit=20)
    ids = evaluation.ids["en"][0]
    table = pictures.heads(evaluation).axes[0].images[0].get_array()
    assert table.shape == (2, len(ids))
    assert table.sum(1).tolist() == pytest.approx([100, 100], abs=len(ids))
    shown = [text.get_text() for text in pictures.neighbours(evaluation, 1).axes[0].texts]
    # A token, and the three nearest to it.
    assert [text for text in shown if text.startswith("1 ")] == [
        text for text in shown if re.fullmatch(r"1 (token|first|second|third), (en|de)", text)]
    assert sum(text.startswith("1 ") for text in shown) == 4


# ---- what runs write


def test_an_answer_is_marked_where_it_differs():
    assert compare.marked("(a)b", "(a)b") == "(a)b"
    assert compare.marked("(a)3,", "(a){3,}") == "(a)[-{-]3,[-}-]"
    assert compare.marked("xay", "a") == "{+x+}a{+y+}"
    assert compare.marked("", "a") == "[-a-]"


def test_answers_of_runs_stand_below_their_gold_text(pairs, tmp_path, capsys):
    for name in ("ntp", "llm-jepa"):
        list(train.start(name, tmp_path / name, steps=1, **TINY | pairs).steps())
    status, out, _ = said(capsys, "answers", tmp_path / "ntp", tmp_path / "llm-jepa", "--limit", 3)
    kinds = [line[:10].strip() for line in out.splitlines()]
    assert status == 0 and len(kinds) == 12
    assert kinds[1::4] == ["gold"] * 3 and kinds[2::4] == ["! ntp"] * 3
    assert kinds[3::4] == ["! llm-jepa"] * 3
    list(train.start("mlm", tmp_path / "mlm", steps=1, **TINY | pairs).steps())
    status, _, err = said(capsys, "answers", tmp_path / "mlm")
    assert status == 2 and "needs a causal model" in err


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
        # Beside hybrid stands the paper's control: its head and recipe, without its loss. (These
        # compare rates and optimisers, each with itself.)
        trained = " ".join(job.train for job in run.jobs_of(name, [7]))
        assert "--preset hybrid" in trained or "--objective hybrid" not in trained or (
            name in ("encoders-rates", "optimizers-rates", "optimizers"))
        records = run.read_records(name)
        text = run.experiment_page(name, records)
        assert text.startswith(f"# {name}\n") and "Commit " in text
        # A page without records says so by having no table, and is not written.
        assert ("\n|---|" in text) == bool(records)
        path = run.RECORDS / f"{name}.md"
        assert not records or path.read_text(encoding="utf-8") == text


def test_the_decoders_tested_rows_share_no_text_with_a_trained_one_or_one_another():
    lines = [json.dumps({"user": f"u{row}", "assistant": f"a{row}"}) for row in range(1920)]
    for user, assistant in (("u5", "new"), ("new", "a5"), ("x", "y"), ("x", "z"), ("w", "v")):
        lines.append(json.dumps({"user": user, "assistant": assistant}))
    trained, tested = mixtures.decoder_rows(lines)
    assert trained == lines[:1920] and tested == [lines[1922], lines[1924]]


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
    verdicts = [word for _, word in claims.judge(DATA["claims"])]
    for number, claim in enumerate(DATA["claims"]):
        ended = [record["last"]["mlm"] for record in run.read_records(claim["experiment"])
                 if record["label"] in (claim["ours"], claim.get("control"))
                 and "unigram" in run.ALL[claim["experiment"]]]
        if any(loss > run.ALL[claim["experiment"]]["unigram"] - 1 for loss in ended):
            assert verdicts[number] == "not testable at this length"
            continue
        ours, control = claims.numbers_of(claim)
        seeds = sorted(ours.keys() & control.keys())
        if seeds:
            ps[number] = stats.ttest_rel(*([of[s] for s in seeds] for of in (ours, control))).pvalue
    # In the order of p, stop at the first that is above .05 / (m - k).
    still = True
    for rank, number in enumerate(sorted(ps, key=ps.get)):
        still = still and ps[number] < .05 / (len(ps) - rank)
        word = "holds here" if still else "holds before the correction only"
        assert (word if ps[number] < .05 else "no difference found") in verdicts[number]


def test_the_pictures_of_the_board_draw_the_records():
    for shown in claims.BOARD["along"]:
        figure = claims.line_picture(shown)
        axis, = figure.axes
        drawn = {line.get_label(): line.get_ydata() for line in axis.lines}
        assert list(drawn) == shown["runs"]
        each = {}
        for record in run.read_records(shown["experiment"]):
            points = [kept[shown["metric"]] for kept in record["curve"].values()
                      if shown["metric"] in kept]
            if record["label"] in drawn:
                each.setdefault(record["label"], []).append(points)
        for label, seeds in each.items():
            assert drawn[label] == pytest.approx([np.mean(one) for one in zip(*seeds)])
        ends = {label: values[-1] for label, values in drawn.items()}
        best = (max if "higher" in axis.get_ylabel() else min)(ends, key=ends.get)
        title = " ".join(figure.get_suptitle().split())
        assert best in title or "{best}" not in shown["title"]
    for shown in claims.BOARD["across"]:
        axis, = claims.line_picture(shown).axes
        found = compare.by_label(run.read_records(shown["experiment"]), shown["metric"])
        assert [line.get_label() for line in axis.lines] == list(shown["lines"])
        for line, labels in zip(axis.lines, shown["lines"].values()):
            seeds = set.intersection(*(set(found[label]) for label in labels))
            means = [np.mean([found[label][seed] for seed in seeds]) for label in labels]
            assert list(line.get_xdata()) == shown["places"]
            assert line.get_ydata() == pytest.approx(means)
    for axis, metric in zip(claims.scatter_picture().axes, claims.BOARD["usefulness"][
            "geometry"].values(), strict=True):
        means = [pair for each in claims.usefulness(metric)[0].values() for pair in each.values()]
        drawn = np.concatenate([line.get_xydata() for line in axis.lines])
        assert drawn == pytest.approx(np.array(means))


def test_the_signature_says_what_is_better():
    axis, = claims.signature().axes
    shown = claims.BOARD["signature"]
    words = [text.get_text() for text in axis.texts]
    for place, metric in enumerate(shown["metrics"].values()):
        ours, control = (compare.by_label(run.read_records(shown["experiment"]), metric)[label]
                         for label in shown["runs"])
        shares = [100 * ours[seed] / control[seed] for seed in ours]
        assert axis.patches[place].get_width() == pytest.approx(np.mean(shares))
        p = stats.ttest_rel(list(map(ours.get, sorted(ours))),
                            list(map(control.get, sorted(ours)))).pvalue
        rises = np.mean(shares) > 100
        name = axis.get_yticklabels()[place].get_text()
        word = "better" if rises == name.endswith("higher is better") else "worse"
        assert words[place] == (word if p < .05 else "no difference found")


# ---- the runner


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


def test_the_runner_does_what_is_not_recorded_and_matches_compute(pairs, tmp_path, monkeypatch,
                                                                  capsys):
    jobs = [{"label": "ntp", "train": "--objective ntp --steps 4"},
            {"label": "equal", "train": "--objective llm-jepa --steps MATCH", "equal": "ntp"}]
    monkeypatch.setitem(run.ALL, "mini", {
        "about": "", "seeds": [3], "jobs": jobs, "paired": ["generate/exact", "not/measured"],
        "controls": {"equal": "ntp"},
        "flags": " ".join(as_words(TINY | pairs | {"precision": "float32"}))})
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
    # What neither row has is not asked, and labels that name a precision say enough.
    assert "not/measured" not in page
    other = second | {"precision": "bfloat16"}
    assert "not the same in all rows" in run.experiment_page("mini", [first, other])
    other |= {"label": "equal, bfloat16"}
    named = run.experiment_page("mini", [first | {"label": "ntp, float32"}, other])
    assert "not the same in all rows" not in named


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
