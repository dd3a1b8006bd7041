"""Groups of runs, their statistics, refusals, and the data of every plot."""

import json
import math
import os

import pytest

import compare
import evaluate
import plots

CONFIG = {"objective": "mexma", "data": "toy", "langs": "", "eval_data": "", "steps": 60, "lr": 0.001, "seed": 0, "out": "", "init": "", "match_flops": "",
          "model": {"layers": 4}, "mexma": {"koleo_weight": 1.0}}


@pytest.fixture
def make(tmp_path):
    """make(name, scores, seed=..., other settings) -> a folder as train.py and evaluate.py write it."""
    def run(name, scores, arrays=None, tokenizer="t", **settings):
        folder = tmp_path / name
        folder.mkdir()
        config = {**CONFIG, "out": str(folder), **settings}
        config = {key: value for key, value in config.items() if key != "mexma" or config["objective"] == "mexma"}
        records = [{"config": config, "tokenizer_hash": tokenizer}, {"step": 0, "eval": {"retrieval/xsim": 99.0, "geometry/rankme": 2.0}},
                   {"step": 30, "loss": 3.0 + config["seed"], "mlm": 2.0, "lr": 0.1, "tokens": 7}, {"step": 60, "loss": 1.0, "mlm": "nan", "lr": 0.1},
                   {"step": 60, "eval": {"retrieval/xsim": 10.0 + config["seed"]}}]
        (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 9', encoding="utf-8")
        (folder / "model.pt").write_bytes(b"")
        for file, content in (("eval.json", scores), ("arrays.json", arrays)):
            if content is not None:
                (folder / file).write_text(json.dumps(content), encoding="utf-8")
        return str(folder)
    return run


@pytest.fixture
def runs(make):
    """Two groups with three seeds each; the second is better in every seed."""
    xsim = {"a": (20.0, 22.0, 24.0), "b": (18.0, 21.0, 21.0)}
    return [make(f"{name}-{seed}", {"retrieval/xsim": value, "retrieval/rows": 100, "geometry/rankme": 50 + value}, seed=seed,
                 mexma={"koleo_weight": weight}) for name, weight in (("a", 1.0), ("b", 0.1)) for seed, value in zip((1, 2, 3), xsim[name])]


def said(capsys, *words):
    """-> the status, stdout, stderr of the command"""
    status = evaluate.main(["compare", *map(str, words)])
    return status, *capsys.readouterr()


# --------------------------------------------------------------------------------------------------------------------- statistics

@pytest.mark.parametrize("t, p", [(2.131847, 0.05), (3.746947, 0.01), (0.0, 0.5), (-2.131847, 0.95)])
def test_the_critical_values_of_4_degrees_of_freedom(t, p):
    """Differences with mean m and deviation s have t = m / (s / sqrt 5)."""
    noise = [-2.0, -1.0, 0.0, 1.0, 2.0]                                  # deviation sqrt 2.5
    shift = t * math.sqrt(2.5 / 5)
    x = {(seed,): 50 + shift + e for seed, e in zip((82, 23, 37, 84, 4), noise)}
    y = {(seed,): 50.0 for seed in (82, 23, 37, 84, 4)}
    found = compare.paired_test(x, y, "higher")
    assert found["n"] == 5 and found["p"] == pytest.approx(p, abs=1e-5) and found["t"] == pytest.approx(t) and found["difference"] == pytest.approx(shift)
    lower = compare.paired_test(x, y, "lower")
    assert lower["p"] == pytest.approx(1 - p, abs=1e-5) and lower["difference"] == found["difference"]


def test_the_test_is_that_of_scipy():
    scipy = pytest.importorskip("scipy.stats")
    x, y = {(i,): value for i, value in enumerate((1.0, 4.0, 2.5, 7.0))}, {(i,): value for i, value in enumerate((0.5, 4.5, 1.0, 6.0))}
    other = scipy.ttest_rel(list(x.values()), list(y.values()), alternative="less")
    found = compare.paired_test(x, y, "lower")
    assert found["p"] == pytest.approx(other.pvalue, abs=1e-6) and found["t"] == pytest.approx(-other.statistic)


def test_without_common_seeds_or_a_direction_there_is_no_p_and_it_says_why():
    assert compare.paired_test({(1,): 1.0, (2,): 2.0}, {(3,): 1.0}, "lower") == "0 common seeds, and a test needs 2"
    assert compare.paired_test({(1,): 1.0}, {(1,): 2.0}, "lower") == "1 common seed, and a test needs 2"
    assert compare.paired_test({(1,): 1.0, (2,): 2.0}, {(1,): 1.0, (2,): 2.0}, "higher") == "no difference in any seed"
    assert compare.paired_test({(1,): 1.0, (2,): 2.0}, {(1,): 3.0, (2,): 2.0}, "") == "which way is better is not known"
    assert compare.paired_test({(1,): 1.0, (2,): 2.0, (3,): 9.0}, {(1,): 3.0, (2,): 2.0, (4,): 0.0}, "higher")["n"] == 2


def test_the_table_has_a_row_a_group_and_p_is_golden(runs, capsys):
    """Differences 2, 1, 3 in favour of the second: t = 2 / (1 / sqrt 3) = 3.4641 with 2 degrees of freedom, p = .0371 (SciPy)."""
    status, out, err = said(capsys, *runs)
    lines = out.splitlines()
    assert (status, err) == (0, "") and lines[0] == "| run | seeds | retrieval/xsim % (lower) | geometry/rankme (higher) |"
    assert lines[2] == "| mexma koleo_weight 1.0 | 1, 2, 3 | 22.00 ± 2.00 | 72 ± 2 |"
    assert lines[3] == "| mexma koleo_weight 0.1 | 1, 2, 3 | 20.00 ± 1.73, p = 0.037 (n 3) | 70 ± 1.7, p = 0.963 (n 3) |"
    assert "better than mexma koleo_weight 1.0" in out and "2 tests: by chance alone, .05 would be passed 0.1 times; Holm's correction asks 0.025" in out


def test_the_base_can_be_another_group_and_json_holds_everything(runs, tmp_path, capsys):
    status, out, _ = said(capsys, *runs, "--against", runs[4], "--metrics", "retrieval/xsim", "--json", "--out", tmp_path / "out")
    found = json.loads(out)
    assert status == 0 and found["against"] == "mexma koleo_weight 0.1" and found["groups"][1]["metrics"]["retrieval/xsim"]["test"] is None
    first = found["groups"][0]
    assert first["runs"] == runs[:3] and first["seeds"] == [1, 2, 3] and first["settings"]["mexma.koleo_weight"] == 1.0
    assert first["metrics"]["retrieval/xsim"]["std"] == pytest.approx(2.0) and first["metrics"]["retrieval/xsim"]["test"]["p"] == pytest.approx(0.963, abs=1e-3)
    assert json.loads((tmp_path / "out" / "compare.json").read_text(encoding="utf-8")) == found
    assert (tmp_path / "out" / "compare.md").read_text(encoding="utf-8").startswith("| run |")


def test_a_metric_that_some_runs_lack_is_counted(make, capsys):
    runs = [make("a", {"retrieval/xsim": 1.0, "geometry/rankme": 3.0}, seed=1), make("b", {"geometry/rankme": 4.0}, seed=2),
            make("c", {"geometry/rankme": 5.0}, objective="contrastive", lr=0.1)]
    status, out, _ = said(capsys, *runs, "--metrics", "retrieval/xsim,geometry/rankme")
    assert "| mexma | 1, 2 | 1.00 (1 of 2) | 3.5 ± 0.71 |" in out and "| contrastive | 0 | - (0 of 1) | 5 |" in out
    assert "No p for contrastive, geometry/rankme: 0 common seeds" in out and "in their order: lr 0.001 / 0.1." in out


def test_seeds_of_fine_tuning_are_pairs_with_those_of_training(make, tmp_path, capsys):
    runs = [make(f"{kind}-{seed}", None, seed=seed, objective=kind) for kind in ("bepa", "mlm") for seed in (1, 2)]
    for place, folder in enumerate(runs):
        (tmp_path / folder / "finetune-mnli.json").write_text(json.dumps(
            {"mnli/accuracy": 60.0, "mnli/accuracy/sd": 1.0, "mnli/accuracy/seed_7": 60.0 + place, "mnli/accuracy/seed_8": 61.0 - place % 2}), encoding="utf-8")
    status, out, _ = said(capsys, *runs, "--files", "finetune-mnli.json", "--metrics", "mnli/accuracy")
    assert status == 0 and "| bepa | 1, 2 | 60.50 ± 0.58 (n 4) |" in out
    assert "| mlm | 1, 2 | 61.50 ± 1.29, p = 0.091 (n 4) |" in out                             # differences 2, 0, 2, 0: t = sqrt 3 (SciPy)


def test_runs_that_start_from_one_run_a_seed_are_a_group(make):
    paths = [make(f"x-{seed}", {"geometry/rankme": 1.0}, seed=seed, init=f"out/a-{seed}", match_flops=f"out/b-{seed}", steps=60 + seed) for seed in (4, 84)]
    runs = [compare.read_run(compare.Path(path), ["eval.json"]) for path in paths]
    assert [len(each.runs) for each in compare.group(runs)] == [2]


# ----------------------------------------------------------------------------------------------------------------------- refusals

@pytest.mark.parametrize("words, message", [
    (["--metrics", "retrieval/xsin"], "metric 'retrieval/xsin' is in none of the runs; did you mean retrieval/xsim?"),
    (["--against", "elsewhere"], "--against elsewhere is none of the runs"), (["--plots"], "--plots needs a folder"),
    (["--out", "x", "--plots", "curvs"], "plot 'curvs' is unknown: choose from curves"), (["--files", "eval-x.json"], "has no eval-x.json")])
def test_a_mistake_is_one_line_and_status_2(words, message, runs, capsys):
    status, out, err = said(capsys, *runs, *words)
    assert (status, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_numbers_of_other_rows_are_refused(make, runs, capsys):
    bare = make("bare", None)
    assert f"bare has no eval.json: make it with python evaluate.py {bare}" in said(capsys, runs[0], bare)[2]
    others = {"rows": dict(scores={"retrieval/xsim": 1.0, "retrieval/rows": 50}), "data": dict(scores={"retrieval/xsim": 1.0}, data="regex"),
              "langs": dict(scores={"retrieval/xsim": 1.0}, langs="en,de")}
    for name, more in others.items():
        status, out, err = said(capsys, runs[0], make(name, **more))
        assert status == 2 and not out and "cannot be compared" in err, name
    assert "same run with the same seed 1" in said(capsys, runs[0], make("twice", {"retrieval/xsim": 1.0}, seed=1))[2]


def test_what_only_may_mislead_is_noted(make, runs, capsys):
    longer = make("long", {"retrieval/xsim": 1.0}, steps=90, tokenizer="u", seed=1)
    os.utime(compare.Path(longer) / "eval.json", (0, 0))
    status, out, _ = said(capsys, *runs, longer)
    assert status == 0 and "eval.json is older than the model" in out and "long is not finished: step 60 of 90." in out and "The tokenizers differ" in out


# -------------------------------------------------------------------------------------------------------------------------- plots

ARRAYS = {"singular_values": [8.0, 2.0, 0.0], "vectors": {"column": ["en", "en", "de"], "row": [0, 1, 0], "values": [[0.0, 1], [1, 0], [1, 1]],
          "pca": [[0.0, 1.0], [1.0, 2.0], [3.0, 4.0]]}, "cosines": {"de-en": {"edges": [-1.0, 0.0, 1.0], "related": [1, 3], "unrelated": [6, 0]}},
          "retrieval": {"columns": ["en", "de"], "xsim": [[0.0, 30.0], [10.0, 0.0]]},
          "attention": {"en": {"by_position": [0.5, 0.25], "on_end": 0.25, "examples": []}}}


@pytest.fixture
def groups(make):
    other = {**ARRAYS, "singular_values": [4.0, 4.0, 1.0], "retrieval": {"columns": ["en", "de"], "xsim": [[0.0, 50.0], [20.0, 0.0]]}}
    paths = [make("a", {"attention/entropy": 1.0}, ARRAYS, seed=1), make("b", {"attention/entropy": 3.0}, other, seed=2),
             make("c", {"matrix/xsim/en-de": 7.0, "matrix/xsim": 7.0}, objective="contrastive")]
    return compare.group([compare.read_run(compare.Path(path), ["eval.json"]) for path in paths])


def test_curves_are_means_over_seeds_with_their_range(groups):
    panels, missing = plots.curves(groups, "pca")
    assert [panel.title for panel in panels] == ["loss", "loss term mlm", "translations not found", "directions in use"] and not missing
    assert panels[0].series[0] == ("mexma", 0, [30, 60], [4.5, 1.0], ([4.0, 1.0], [5.0, 1.0]))
    assert panels[1].series[1] == ("contrastive", 1, [30], [2.0], None)                        # the loss that was "nan" has no point
    assert panels[2].series[0][2:4] == ([0, 60], [99.0, 11.5]) and panels[3].series[0][2:4] == ([0], [2.0])


def test_a_spectrum_leaves_out_what_a_log_scale_cannot_show(groups):
    panels, missing = plots.spectrum(groups, "pca")
    assert panels[0].log and panels[0].series == [("mexma", 0, [1, 2], [6.0, 3.0], ([4.0, 2.0], [8.0, 4.0]))]
    assert len(missing) == 1 and missing[0].startswith("contrastive has no singular_values: python evaluate.py ") and missing[0].endswith("c --arrays")


def test_vectors_are_points_of_each_language(groups):
    panels, _ = plots.vectors(groups, "pca")
    assert panels[0].kind == "points" and panels[0].series == [("en", 0, [0.0, 1.0], [1.0, 2.0], None), ("de", 1, [3.0], [4.0], None)]


def test_cosines_are_shares_of_the_pairs_of_all_seeds(groups):
    panels, _ = plots.cosines(groups, "pca")
    assert panels[0].series[0] == ("translations", 0, [-1.0, -1.0, 0.0, 0.0, 1.0, 1.0], [0.0, 25.0, 25.0, 75.0, 75.0, 0.0], None)
    assert panels[0].series[1][3] == [0.0, 100.0, 100.0, 0.0, 0.0, 0.0]


def test_attention_has_places_in_percent_and_entropies_with_their_deviation(groups):
    (places, bars), missing = plots.attention(groups, "pca")
    assert places.series[0][2:4] == ([0, 1], [50.0, 25.0]) and bars.series[0][3] == [2.0]
    assert bars.series[0][4] == ([pytest.approx(2 - math.sqrt(2))], [pytest.approx(2 + math.sqrt(2))])
    assert any("contrastive has no attention/entropy" in line and line.endswith("--tasks attention") for line in missing)


def test_a_matrix_is_read_from_arrays_or_from_its_task(groups):
    (arrays, task), missing = plots.matrix(groups, "pca")
    names, rows = arrays.series[0]
    assert names == ["en", "de"] and rows[0][1] == 40.0 and rows[1][0] == 15.0 and math.isnan(rows[0][0]) and not missing
    names, rows = task.series[0]
    assert (names, rows[0][1]) == (["en", "de"], 7.0) and math.isnan(rows[1][0])


def test_tsne_is_the_same_each_time():
    pytest.importorskip("sklearn")
    values = [[math.sin(i * j) for j in range(4)] for i in range(20)]
    flat, how = plots.tsne(values)
    assert len(flat) == 20 and how == "t-SNE, perplexity 6.33" and plots.tsne(values)[0] == flat


def test_every_plot_is_drawn_the_same_each_time_and_a_plot_that_was_named_needs_its_data(groups, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    paths = [run.folder for each in groups for run in each.runs]
    words = [*paths, "--metrics", "attention/entropy", "--out", tmp_path / "out", "--projection", "pca", "--plots"]
    status, _, err = said(capsys, *words)
    assert status == 0 and "note: plot spectrum: contrastive has no singular_values" in err
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.png")}
    assert set(drawn) == {f"{name}.png" for name in plots.PLOTS} and all(content.startswith(b"\x89PNG") for content in drawn.values())
    assert said(capsys, *words, "matrix,curves")[0] == 0 and said(capsys, *words, "spectrum")[0] == 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.png")} == drawn


def test_plots_without_matplotlib_say_what_to_install(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(compare.sys.modules, "matplotlib", None)
    status, _, err = said(capsys, *runs, "--out", tmp_path / "out", "--plots", "curves")
    assert status == 2 and err == "error: plots need matplotlib: pip install -r requirements-notebooks.txt\n"
