"""Pictures, the page of a run, and what they are drawn from."""

import itertools
import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from test_evaluate import write_rows
from test_house import ROOT, write_pairs
from test_train import assert_same_run, started

import train
from base.common import file_hash
from data import Packed
from harness import runs, screen
from look import batch, compare, panels, plots, report, seen
from look.__main__ import main

STEPS = dict(steps=4, eval_every=2, log_every=1, save_every=2)


@pytest.fixture
def pairs():
    write_pairs(Path("pairs.tsv"), 300)


# ---- a batch, and single pictures


@pytest.mark.parametrize("words, error", [
    ("bach", "bach is no folder"), ("compare nowhere", "nowhere is no folder")])
def test_a_mistake_is_one_line_that_names_it(words, error, refused):
    assert error in refused(main, words)


@pytest.mark.parametrize("objective, part", [
    ("mexma", "head_packed"), ("llm-jepa", "packed"), ("hybrid", "predictor_packed")])
def test_batch_shows_rows_targets_and_mask(objective, part, pairs, capsys):
    langs = "en" if objective == "hybrid" else "en,de"
    main(f"batch --objective {objective} --langs {langs} --vocab 300 --data pairs.tsv".split())
    text = capsys.readouterr().out
    batch = train.batch(objective, 2, 0, data="pairs.tsv", vocab=300, langs=langs)
    parts = re.split(r"^(\w+): \d+% of all pairs .*\n\n", text, flags=re.M)[1:]
    assert parts[::2] == [name for name, value in batch.items() if isinstance(value, Packed)]
    rows, _, table = dict(zip(parts[::2], parts[1::2]))[part].partition("\n\n")
    assert len(set(re.findall(r"^ {3}\d ", rows, re.M))) == len(batch[part])
    targets = batch["block_to"] if part == "predictor_packed" else batch["target_positions"]
    assert rows.count("→") == len(targets)
    assert table == f"{batch[part]}\n\n"


def test_ticks_are_at_whole_steps():
    figure = plots.lines({"a": ([2], [0.5])}, "training step", "loss")
    low, high = figure.axes[0].get_xlim()
    assert [tick for tick in figure.axes[0].get_xticks() if low <= tick <= high] == [2]


def title_of(axis):
    legend = axis.get_legend()
    return legend.get_title().get_text() if legend else axis.get_title()


# ---- the page


class Page(HTMLParser):
    """What the standard library reads in a page: its words, tags, attributes and figures."""

    def __init__(self, text):
        super().__init__()
        self.text, self.tags, self.values, self.figures = [], [], [], {}
        self.open = None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.values += attributes
        if tag == "figure":
            self.open = self.figures.setdefault(dict(attributes)["aria-label"], [])

    def handle_endtag(self, tag):
        if tag == "figure":
            self.open = None

    def handle_data(self, data):
        (self.text if self.open is None else self.open).append(data)

    @property
    def words(self):
        return " ".join(self.text)


def train_small(objective, out, **given):
    list(started(objective, out, **STEPS, **given).steps())


# A folder, columns, texts and a command that would be markup.
ENCODER = "<i>the encoder's & others"
EVIL = ["<script>alert(1)</script>", "_a&\"b'$x$"]
COMMAND = "python '<u>' & \"x\""
KINDS = {  # {kind: (objective, other settings)}
    ENCODER: ("mexma", dict(data="evil.tsv", langs=",".join(EVIL))),
    "decoder": ("llm-jepa", {}),
    "gallery": (str(ROOT / "gallery/simcse.py"), dict(langs="en")),
}


@pytest.fixture(scope="module")
def small_runs(tmp_path_factory):
    """Return a folder with one small run of each kind."""
    folder = tmp_path_factory.mktemp("runs")
    write_pairs(folder / "pairs.tsv", 300)
    lines = ["\t".join(EVIL)]
    for number in range(200):
        lines.append(f"<b>{number}</b> & \"text\" $1\t<img src=x onerror=alert(1)>{number}")
    (folder / "evil.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for kind, (objective, given) in KINDS.items():
        given = given | {"data": folder / given.get("data", "pairs.tsv")}
        train_small(objective, folder / kind, **given)
    log = folder / ENCODER / "log.jsonl"
    first, rest = log.read_text().split("\n", 1)
    log.write_text(json.dumps(json.loads(first) | {"command": COMMAND}) + "\n" + rest)
    return folder


@pytest.fixture(scope="module")
def pages(small_runs):
    """Return {kind: (HTML, {name: Figure})}."""
    found = {kind: report.Page([seen.see(small_runs / kind)]) for kind in KINDS}
    return {kind: (page.html(), {name: figure for section in page.sections.values()
                                 for name, figure in section.figures.items()})
            for kind, page in found.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_of_each_kind_of_run_has_titles_axes_and_the_numbers_of_the_log(
        kind, small_runs, pages):
    text, figures = pages[kind]
    page = Page(text)
    assert page.figures.keys() == figures.keys() > {"untrained", "embeddings"}
    for name, figure in figures.items():
        drawn = " ".join(page.figures[name])
        axis = figure.axes[0]
        title = title_of(axis)
        labels = (axis.get_xlabel() or figure.get_supxlabel(),
                  axis.get_ylabel() or figure.get_supylabel())
        assert page.figures[name][0] == " ".join(title.split())  # for a screen reader
        for line in "\n".join([title, *labels]).splitlines():
            assert line and line.replace("\\$", "$") in drawn, (name, line)
    log = runs.read_log(small_runs / kind)
    losses = [record["loss"] for record in log if "loss" in record]
    assert f": {losses[0]:.4g} to {losses[-1]:.4g}" in " ".join(page.figures["loss"])
    x, y = figures["loss"].axes[0].lines[0].get_data()
    assert [*x] == [1, 2, 3, 4] and [*y] == losses
    for name, value in log[-1]["eval"].items():
        if name in screen.METRICS or name.startswith("validation/"):
            assert compare.mean_std([value]) in page.words, name
    assert "Left out" not in page.words and text.count('<svg role="img"') == len(figures)


def test_a_metric_with_a_range_has_a_curve_and_a_column():
    drawn = {name for name, about in screen.METRICS.items() if about.range is not None}
    assert drawn == {*panels.DRAWN} - {"lr", "grad_norm"} == {*compare.SHOWN} - {"step", "seconds"}


def test_a_page_is_one_file_with_unique_ids_and_no_address(pages):
    text, _ = pages[ENCODER]
    page = Page(text)
    assert "://" not in text and "url(#" in text
    ids = [value for name, value in page.values if name == "id"]
    assert len(ids) == len(set(ids))
    for name, value in page.values:
        if name in ("href", "src"):
            assert value[0] == "#" and value[1:] in ids or value.startswith("data:image/png")
    assert not {"script", "link"} & set(page.tags)


def test_the_pages_of_unfinished_and_imported_runs_leave_out_what_they_lack(small_runs, tmp_path):
    shutil.copytree(small_runs / ENCODER, tmp_path / "killed")
    (tmp_path / "killed/model.pt").unlink()
    log = (tmp_path / "killed/log.jsonl").read_text().splitlines()
    (tmp_path / "killed/log.jsonl").write_text("\n".join([*log[:3], log[3][:20]]))
    page = Page(report.Page([seen.see(tmp_path / "killed")]).html())
    assert "there is no model.pt yet" in page.words and "loss" in page.figures
    first = json.loads(log[0])
    first = {name: first[name] for name in ("format", "around", "affixes", "views",
                                            "tokenizer_hash")}
    first |= {"imported": "somebody/model", "config": {"data": "", "max_length": 20}}
    shutil.copytree(small_runs / ENCODER, tmp_path / "imported")
    (tmp_path / "imported/log.jsonl").write_text(json.dumps(first) + "\n")
    (tmp_path / "imported/untrained.npy").unlink()
    page = Page(report.Page([seen.see(tmp_path / "imported")]).html())
    assert "the log has no steps" in page.words and "no file untrained.npy" in page.words
    assert "rows of toy" in page.words and page.figures.keys() == {"embeddings"}


def test_a_run_with_one_column_shows_the_nearest_other_texts(small_runs):
    one = seen.see(small_runs / "gallery")
    evaluation = seen.evaluation(one)
    (texts,), (z,) = evaluation.texts.values(), evaluation.embeddings.values()
    cosines = torch.cosine_similarity(z[1], z)
    cosines[1] = -2  # the query itself
    _, query, nearest = panels.neighbors(one, evaluation).table[1][1]
    best = int(cosines.argmax())
    assert query == texts[1] and nearest.count("\n") == 2
    assert nearest.startswith(f"{cosines[best]:.2f} {texts[best]}\n")


def test_a_page_of_several_runs_is_a_file_of_its_own(small_runs, capsys):
    every = [small_runs / "decoder", small_runs / "gallery"]
    main([*map(str, every)])
    out = small_runs / "decoder+gallery.html"
    assert capsys.readouterr().out == f"{out}\n" and not out.with_name("decoder.html").exists()
    page = Page(out.read_text())
    assert all(str(one) in page.words for one in every)
    assert page.tags.count("details") == 2 and {"lr", "embeddings"} < page.figures.keys()
    out.unlink()
    assert report.title_of([seen.see(every[0])] * 5) == "decoder+4-others"


def test_no_page_replaces_a_file_of_somebody_else(small_runs, pairs, refused):
    run = small_runs / "decoder"
    for name in ("mine.html", "decoder.html"):
        Path(name).write_text("<!DOCTYPE html> mine", encoding="utf-8")
    shutil.copytree(run, "decoder")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    for words, message in (
            ("decoder --out pairs.tsv", "--out is pairs.tsv: the name must end in .html"),
            ("decoder --out decoder/train.pt", "the name must end in .html"),
            ("decoder --out mine.html", "--out mine.html exists already: name a new file"),
            ("decoder", "--out decoder.html exists already: name a new file")):
        assert message in refused(main, words)
    assert {path: path.read_bytes() for path in before} == before
    for _ in range(2):  # ours are replaced
        main(["decoder", "--out", "new.html"])
    assert report.MARK in Path("new.html").read_bytes()[:1000]


def test_names_texts_and_commands_are_shown_and_never_markup(pages):
    page = Page(pages[ENCODER][0])
    assert not {"script", "img", "i", "u"} & set(page.tags)
    assert not [name for name, _ in page.values if name.startswith("on")]
    shown = page.words + " ".join(" ".join(words) for words in page.figures.values())
    for word in (*EVIL, ENCODER, COMMAND, "<img src=x onerror=alert(1)>", "<b>"):
        assert word in shown, word


def test_untrained_npy_has_the_embeddings_of_step_0_and_no_resume_needs_it(monkeypatch):
    monkeypatch.setattr(runs, "UNTRAINED_ROWS", 9)
    write_pairs(Path("pairs.tsv"), 150)
    write_rows("three.tsv", [f"a dog {n}\tein Hund {n}\tun chien {n}" for n in range(150)],
               "en\tde\tfr")
    given = STEPS | dict(data="pairs.tsv,three.tsv", eval_limit=0)
    run = started("mexma", "run", **given)
    before = run.evaluation()
    z = torch.stack([*before.embeddings.values()])  # (3, N, D)
    complete = [row for row, cells in enumerate(zip(*before.texts.values())) if all(cells)][:9]
    assert z.isnan().any() and complete[-1] >= len(complete) == 9
    for record in run.steps():
        if record["step"] == 2 and "loss" in record:
            break
    stored = np.load("run/untrained.npy")
    assert stored.dtype == np.float16 and np.array_equal(stored, z[:, complete].half())
    one = seen.see("run")
    assert torch.equal(runs.read_untrained("run"), z[:, complete].half().float())
    texts = {name: [cells[row] for row in complete] for name, cells in before.texts.items()}
    assert seen.evaluation(one).texts == texts
    Path("run/untrained.npy").unlink()
    for folder in ("run", "whole"):
        list(started("mexma", folder, **given).steps())
    assert_same_run("run", "whole")
    assert not Path("run/untrained.npy").exists()


def test_without_a_row_that_has_all_texts_there_is_no_untrained_npy():
    for name, other in (("a", "de"), ("b", "fr")):
        write_pairs(Path(f"{name}.tsv"), 200, ["en", other])
    train_small("contrastive", "run", data="a.tsv,b.tsv")
    assert not Path("run/untrained.npy").exists()


# ---- several runs


@pytest.fixture(scope="module")
def four_runs(tmp_path_factory):
    """Return the folders of two settings with two seeds each."""
    folder = tmp_path_factory.mktemp("four")
    write_pairs(folder / "pairs.tsv", 100)
    for weight in (0.0, 1.0):
        for seed in range(2):
            train_small("mexma", folder / f"koleo-{weight:.0f}-{seed}", koleo_weight=weight,
                        data=folder / "pairs.tsv", seed=seed)
    return sorted(folder.glob("koleo*"))


def test_names_and_texts_of_others_do_not_control_the_terminal(capsys):
    for lines in (compare.aligned(["run"], [["\x1b[2J"]]), compare.markdown(["a"], [["\x1b[2J"]])):
        assert r"\x1b[2J" in lines[-1] and "\x1b" not in lines[-1]
    Path("own.tsv").write_text("en\tde\n" + "".join(
        f"The \x1b[31m cat {i}\tDer \x9b31m Kater {i}\n" for i in range(40)), encoding="utf-8")
    batch.batch_command(["--objective=contrastive", "--data=own.tsv", "--vocab=300"])
    printed = capsys.readouterr().out
    assert r"\x1b" in printed and "\x1b" not in printed and "\x9b" not in printed


def test_compare_has_a_row_for_each_setting_and_the_paired_test(four_runs, capsys, refused):
    words = ["compare", "--metric", "geometry/rankme,validation/loss", *map(str, four_runs)]
    main(words)
    text = capsys.readouterr().out
    values = [runs.read_log(one)[-1]["eval"]["geometry/rankme"] for one in four_runs]
    for weight, group in (("0", values[:2]), ("1", values[2:])):
        row, = [line for line in text.splitlines() if line.startswith(f"koleo-weight {weight}  ")]
        mean, deviation = re.search(r"2 +(\S+) ± (\S+)", row).groups()
        assert float(mean) == pytest.approx(np.mean(group), rel=0.05)
        assert float(deviation) == pytest.approx(np.std(group, ddof=1), rel=0.05)
    differences = np.subtract(values[2:], values[:2])
    t = differences.mean() / (differences.std(ddof=1) / math.sqrt(2))
    # Only the seeds that both have are compared, in whatever order.
    test = compare.paired_test(dict(enumerate(values[2:])), {7: 0.0, 1: values[1], 0: values[0]})
    assert test["t"] == pytest.approx(t)
    assert compare.paired_test({1: 2.0, 2: 3.0}, {1: 1.0, 2: 2.0}) is None  # equal differences
    row = f"koleo-weight 1 against koleo-weight 0  geometry/rankme  2  {differences.mean():+.3g}"
    assert row in re.sub(" {2,}", "  ", text)
    assert "is given twice" in refused(main, ["compare", four_runs[0], f"{four_runs[0]}/"])
    words[2] = "geometry/rank"
    assert "no run has it; did you mean geometry/rankme?" in refused(main, words)


def test_compare_says_what_makes_numbers_different_beside_the_seed(four_runs, tmp_path, capsys):
    copies = [tmp_path / run.name for run in four_runs[:2]]

    def compared(pattern="", replacement=""):
        """Compare two seeds, after a change of the second one's log."""
        for run, copy in zip(four_runs, copies):
            copy.mkdir(exist_ok=True)
            for name in ("log.jsonl", "model.pt", "tokenizer.json"):
                shutil.copy(run / name, copy)
        log = copies[1] / "log.jsonl"
        log.write_text(re.sub(pattern, replacement, log.read_text("utf-8"), count=1), "utf-8")
        main(["compare", "--metric", "retrieval/xsim", *map(str, copies)])
        return capsys.readouterr().out

    as_it_is = compared()
    assert "2  " in as_it_is and "its last evaluation" not in as_it_is
    assert "processes" in compared('"processes": 1', '"processes": 2')
    assert "on different rows (--eval-limit " in compared(r'"eval_limit": \d+', '"eval_limit": 7')
    # An imported run has no limit.
    assert "--eval-limit" not in compared(r'"eval_limit": \d+, ', "")
    assert "is that of step 4 of 9" in compared(r'"steps": \d+', '"steps": 9')
    # With more texts in a batch, InfoNCE has more candidates. The distance of a pair is the same.
    compared(r'"batch": \d+', '"batch": 3')
    every = [seen.see(copy) for copy in copies]
    for align, losses in (("cosine", 1), ("info_nce", 2)):
        for one in every:
            one.header["config"]["mexma"]["align"] = align
        assert len({*map(seen.loss_of, every)}) == losses
    compared()
    for stored in ("0" * 8, None):  # numbers of an older model, and of this one
        for copy in copies:
            runs.write_results(copy / "eval.json", {"retrieval/xsim": 12.5}, "test",
                               stored or file_hash(copy / "model.pt"))
        assert ("12.5" in compared()) == (stored is None)


def test_losses_of_different_objectives_are_never_compared(four_runs, small_runs, capsys):
    """Nor are those with other weights; their terms are."""
    both = [*four_runs[:2], small_runs / "gallery"]
    for every, panels_of_losses in ((both, 2), (four_runs, 2), (four_runs[:2], 1)):
        groups = seen.grouped([*map(seen.see, every)])
        figures = panels.along_training(groups).figures
        assert len([name for name in figures if name.partition(":")[0] == "loss"]) == \
            len([name for name in figures if name.startswith("validation/loss")]) == \
            panels_of_losses
        for name, figure in figures.items():  # each run once, with the color of its label
            names = name.partition(": ")[2].split(" / ") if ": " in name else [*groups]
            drawn = {line.get_color() for line in figure.axes[0].lines if len(line.get_xdata())}
            colors = {line.get_color() for line in figures["geometry/rankme"].axes[0].lines}
            assert len(drawn - {"black"}) <= len(names) and drawn - {"black"} <= colors
        main(["compare", *map(str, every)])
        text = capsys.readouterr().out
        assert ("validation/loss" in text) == (panels_of_losses == 1)
        assert ("losses are not compared" in text) == (panels_of_losses == 2)
    assert {"mlm", "align"} < panels.along_training(seen.grouped([*map(
        seen.see, four_runs)])).figures.keys()
    main(["compare", "--metric", "validation/loss,geometry/rankme", *map(str, four_runs)])
    head, *tests = capsys.readouterr().out.partition("paired t-test")
    assert "validation/loss" in head and "validation/loss" not in "".join(tests)


def test_a_number_without_a_deviation_has_the_decimals_of_its_column():
    assert compare.column([[0.5229], [3.0, 9.0], [2.0, 2.4], []]) == [
        "0.5", "6.0 ± 4.2", "2.20 ± 0.28", "-"]
    assert compare.column([[0.005928], [0.4961]]) == ["0.0059", "0.4961"]
    assert compare.mean_std([0.7810, 0.7812]) == "0.78110 ± 0.00014"
    assert compare.column([[700, 700], [2000]]) == ["700", "2,000"]
    assert compare.column([[0.0], [math.inf]]) == ["0.000", "-"]


def test_seeds_are_lines_with_their_mean_in_one_panel(four_runs):
    figure = panels.along_training(seen.grouped([*map(seen.see, four_runs)])).figures[
        "geometry/rankme"]
    mean, *seeds = figure.axes[0].lines[:3]
    assert len(figure.axes[0].lines) == 6  # of two settings
    assert mean.get_ydata() == pytest.approx(np.mean([one.get_ydata() for one in seeds], 0))


def test_the_verdict_names_the_first_step_of_what_it_says_and_what_the_model_finds():
    def record(step, rank, cosine):
        names = {"rankme": rank, "rankme_share": rank, "cosine/same": cosine, "uniformity": 0.0,
                 "std": 1.0, "norm": 1.0}
        return {"step": step, "eval": {f"geometry/{name}": value for name, value in names.items()}}
    records = [record(0, 1, 1), record(10, 50, .1), record(20, 1, .99), record(30, 1, 1)]
    first = {"config": {"objective": "x", "seed": 0, "data": ""}}
    one = seen.Seen("fallen", first, records, Path("fallen"))
    assert seen.since(one) == ("COLLAPSING", 20)
    alone = panels.verdict({"x": [one]}).words
    assert alone.startswith("The embeddings have collapsed into nearly one point since step 20. ")
    assert "mean cosine of 1.00 (before training: 1.00; 1 if" in alone
    assert "translation" not in alone
    well = seen.Seen("well", first, records[:2], Path("well"))
    records[1]["eval"] |= {"retrieval/xsim": 12.5, "geometry/cosine/translations": 0.9,
                           "geometry/cosine/different": 0.1}
    both, healthy = panels.verdict({"x": [one, well], "y": [well]}).words.splitlines()
    assert both.startswith("x: The embeddings of 1 of 2 runs have collapsed into nearly one point. "
                           "The embeddings of 1 of 2 runs are healthy. ")
    assert healthy.startswith("y: The embeddings are healthy since step 10. ")
    assert "a wrong translation (xsim) for 12.5 % of the held-out sentences" in healthy
    unsure = seen.Seen("unsure", first, records[:1], Path("unsure"))
    assert panels.verdict({"x": [unsure]}).words.startswith("No model was evaluated after")


def test_axes_show_the_whole_range_of_a_measure_and_the_chance_of_the_order_error():
    def limits(metric, values):
        records = [{"step": step, "eval": {metric: value, "geometry/rankme_share": 50.0}}
                   for step, value in enumerate(values)]
        one = seen.Seen("a", {}, records, Path("a"))
        figure = panels.draw_curve(plots.panels()[1][0], {"a": [one]}, metric, "T", "y")
        return figure.axes[0], figure.axes[0].get_ylim()
    axis, (low, high) = limits("retrieval/order", [0.1, 0.0])
    assert -10 < low <= 0 and 100 <= high < 110
    assert [*axis.lines[-1].get_ydata()] == [50, 50] and axis.lines[-1].get_linestyle() == ":"
    assert limits("retrieval/xsim", [0.1, 0.0])[1] == (low, high)
    low, high = limits("geometry/rankme", [8.0, 8.0])[1]  # 8 are half of 16 dimensions
    assert low <= 0 and 16 <= high < 18
    low, high = limits("geometry/cosine/same", [-0.5, 0.5])[1]
    assert low < -0.5 and high >= 1
    assert limits("validation/loss", [7.0, 8.0])[1][0] > 6.9


def test_the_clouds_before_and_after_have_the_same_axes_and_a_collapsed_one_is_a_dot(small_runs):
    one = seen.see(small_runs / ENCODER)
    evaluation = seen.evaluation(one)
    # A cached property: the model has collapsed.
    evaluation.embeddings = {name: 1e-3 * z for name, z in evaluation.embeddings.items()}
    figures = panels.embeddings(one, evaluation).figures
    before, after = [figure.axes[0] for figure in figures.values()]
    assert before.get_xlim() == after.get_xlim() == before.get_ylim() == after.get_ylim()
    z = np.concatenate([line.get_xydata() for line in after.lines])
    assert np.nanmax(abs(z)) < 0.05 * after.get_xlim()[1]
    z = np.concatenate([line.get_xydata() for line in before.lines])
    assert 0.9 * before.get_xlim()[1] < np.nanmax(abs(z)) < before.get_xlim()[1]


def drawn_texts(figure, monkeypatch):
    """Draw a figure; return each text that is drawn, and its box in pixels."""
    boxes, draw = [], Text.draw

    def drawing(text, renderer, *more):
        if text.get_visible() and text.get_text().strip():
            boxes.append((text.get_text(), text.get_window_extent(renderer)))
        draw(text, renderer, *more)

    with monkeypatch.context() as patch:
        patch.setattr(Text, "draw", drawing)
        figure.draw_without_rendering()
    return boxes


def test_no_text_of_a_picture_overlaps_another_or_is_cut_off(pages, four_runs, monkeypatch):
    several = report.Page([*map(seen.see, four_runs)]).sections.values()
    for _, figures in pages.values():
        for figure in figures.values():
            figure.set_layout_engine("none")  # it was arranged for the page
    for figures in (*(figures for _, figures in pages.values()),
                    *(section.figures for section in several)):
        for name, figure in figures.items():
            boxes = drawn_texts(figure, monkeypatch)
            assert len(boxes) > 4
            for (word, one), (other, two) in itertools.combinations(boxes, 2):
                both = one.width > 0 and Bbox.intersection(one, two)
                smaller = min(one.width * one.height, two.width * two.height)
                # A box has room above and below its word.
                assert not both or both.width * both.height < 0.4 * smaller, (name, word, other)
            for word, box in boxes:
                inside = Bbox.intersection(box, figure.bbox)
                assert inside and inside.width > box.width - 2, (name, word)
                assert inside.height > box.height - 2, (name, word)
