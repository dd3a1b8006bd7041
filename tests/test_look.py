"""Pictures and what they are drawn from."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from test_house import write_pairs

import train
from look import plots
from look.__main__ import main


@pytest.fixture
def pairs():
    write_pairs(Path("pairs.tsv"), 300)


@pytest.mark.parametrize("words, error", [
    ("bach", "'bach' is not a command"), ("batch --row 99 --data pairs.tsv", "rows 0 to 7"),
    ("batch --part clean --data pairs.tsv", "this batch has packed, head_packed")])
def test_a_mistake_is_one_line_that_names_it(words, error, pairs, refused):
    assert error in refused(main, words)


@pytest.mark.parametrize("objective, part", [
    ("mexma", "packed"), ("mexma", "head_packed"), ("bepa", "packed"), ("llm-jepa", "packed"),
    ("hybrid", "predict")])
def test_batch_shows_rows_targets_and_mask(objective, part, pairs, capsys):
    langs = "en" if objective == "hybrid" else "en,de"
    main(f"batch --objective {objective} --part {part} --langs {langs} --vocab 300 "
         "--data pairs.tsv".split())
    text = capsys.readouterr().out
    batch = train.batch(objective, 2, 0, data="pairs.tsv", vocab=300, langs=langs)
    rows = text.partition("ROWS")[2].partition("\n")[2].partition("\nMASK")[0]
    assert len(set(re.findall(r"^ {3}\d ", rows, re.M))) == len(batch[part])
    targets = batch["mask_index"] if part == "predict" else batch["target_positions"]
    assert rows.count("→") == len(targets)
    cells = [list(one) for one in re.findall(r" ([#.]+)$", text, re.M)]
    assert np.array_equal(np.array(cells) == "#", batch[part].mask(0))


def test_every_picture_has_a_title_and_axes():
    z = {"en": torch.randn(20, 5), "de": torch.randn(20, 5) + 9}
    drawn = [plots.lines({"a": ([0, 1], [2.0, 3.0])}, "step", "loss", title="T"),
             plots.bars({"g": {"a": 1.0, "b": (2.0, 1.5, 2.5)}}, "y", "x", title="T"),
             plots.heat(torch.eye(3), "abc", "abc", "x", "y", title="T"),
             plots.mask(torch.eye(4).bool(), title="T"), plots.spectrum(z, title="T"),
             plots.pca(z, title="T", joined=3), plots.cosines(z, title="T")]
    for figure in drawn:
        axis = figure.axes[0]
        legend = axis.get_legend()
        title = legend.get_title().get_text() if legend else axis.get_title()
        assert title == "T"
        assert axis.get_xlabel() and axis.get_ylabel() and plots.png(figure)[:4] == b"\x89PNG"
