"""Presets in --help; recorded experiments keep their settings when a default changes."""

import hashlib
import json
import re
from pathlib import Path

import pytest
from test_house import write_pairs
from test_train import started

from harness import runs, settings
from harness.presets import ABOUT, PRESETS
from objectives import Bepa, Contrastive, Objective
from results.compare import EXPERIMENTS, ROOT
from results.run import jobs_of

STORED = Path(__file__).parent / "experiment_settings.json"


def resolved(name):
    """Return the settings of each row of an experiment on real data that train.py makes, without
    names of folders."""
    found = []
    for job in jobs_of(name, [0]):
        words = re.sub(r"MATCH\[.*?\]", "1", job.train).split()
        if words[1] != "train.py":
            continue
        objective, given = settings.parse(words[2:])
        paper, toy = settings.defaults(objective, given.get("size", "toy"), given.get("preset", ""))
        found.append(paper | toy | given)
    return found


def hashed(rows, names):
    """Hash the settings that have one of the names: a later edition can add others."""
    text = json.dumps([{name: row[name] for name in names if name in row} for row in rows],
                      sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def test_experiments_on_real_data_have_the_settings_of_their_records(monkeypatch):
    """After a row is added or removed, store what this prints."""
    monkeypatch.chdir(ROOT)  # commands name files such as gallery/stp.py
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    today = {name: rows for name, experiment in EXPERIMENTS.items()
             if "files" in experiment and (rows := resolved(name))}
    hashes = {name: hashed(rows, stored["settings"]) for name, rows in today.items()}
    print(json.dumps(hashes, indent=0))
    assert hashes == stored["experiments"]
    # The hashes notice a changed value.
    *rest, last = today["encoders-recipe"]
    changed = hashed([*rest, last | {"koleo_weight": 0.5}], stored["settings"])
    assert changed != hashes["encoders-recipe"]


def test_a_readers_class_can_lack_an_option_of_the_class_that_it_extends():
    class Own(Bepa):
        paper = toy = {}
        Config = Objective.Config
    _, ours = settings.defaults(Own, "small")
    assert "cls_view" not in ours and ours["batch"] == 256


def test_help_says_what_every_preset_is(capsys):
    names = {"paper"}
    for objective, presets in PRESETS.items():
        with pytest.raises(SystemExit):
            settings.parse(["--objective", objective, "--help"])
        printed = capsys.readouterr().out
        for name in ("paper", *presets):
            assert re.search(rf"--preset {name} +{re.escape(ABOUT[name])}\n", printed)
        names |= presets.keys()
    assert names == ABOUT.keys()


@pytest.mark.parametrize("given, changes", [
    (dict(preset="from-bag"), True), (dict(preset="from-bag", size="small"), False),
    (dict(preset="bag", size="small"), True)])
def test_a_preset_without_values_for_a_size_says_so(given, changes):
    *_, notes = settings.resolve_config(Contrastive, given)
    lines = [note for note in notes if "changes nothing" in note]
    assert lines == [] if changes else lines == ["--preset from-bag changes nothing at size small"]


@pytest.mark.parametrize("preset, says", [("bag", True), ("cls", True), ("finetune", False)])
def test_a_preset_cannot_change_the_model_of_init_and_help_shows_that_model(preset, says, capsys):
    write_pairs(Path("pairs.tsv"), 100)
    list(started("contrastive", "run", steps=1, pool="mean", max_length=40).steps())
    init = runs.open_run("run")
    *_, notes = settings.resolve_config(Contrastive, dict(preset=preset, init="run"), init)
    said = [note for note in notes if note.startswith("--init brings its own")]
    assert len(said) == says and (not says or f"those of --preset {preset}" in said[0])
    used, _, model, _ = settings.resolve_config(Contrastive, dict(init="run"), init)
    with pytest.raises(SystemExit):
        settings.parse("--objective contrastive --init run --help all".split())
    shown = " ".join(capsys.readouterr().out.split())
    assert (used.max_length, model.pool) == (40, "mean")
    assert re.search(r"truncate texts to N tokens \[40", shown)
    assert re.search(r"make the sentence embedding \[mean", shown)
