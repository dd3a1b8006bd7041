"""Recorded experiments keep their settings when a default of the toy scale changes."""

import hashlib
import json
import re
from pathlib import Path

from harness import settings
from results.compare import EXPERIMENTS, ROOT
from results.run import jobs_of

STORED = Path(__file__).parent / "experiment_settings.json"


def resolved():
    """Return {"experiment: row": {setting: value}} of every row on real data that train.py makes,
    without names of folders."""
    found = {}
    for name, experiment in EXPERIMENTS.items():
        for job in jobs_of(name, [0]) if "files" in experiment else ():
            words = re.sub(r"MATCH\[.*?\]", "1", job.train).split()
            if words[1] != "train.py":
                continue
            objective, given = settings.parse(words[2:])
            paper, toy = settings.defaults(objective, given.get("size", "toy"),
                                           given.get("preset", ""))
            values = paper | toy | given
            for flag in ("out", "seed", "preset"):
                values.pop(flag, None)
            found[f"{name}: {job.label}"] = values
    return found


def hashed(values, names):
    """Hash the settings that have one of the names: a later edition can add others."""
    text = json.dumps({name: values[name] for name in names if name in values}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def test_experiments_on_real_data_have_the_settings_of_their_records(monkeypatch):
    monkeypatch.chdir(ROOT)  # commands name files such as gallery/stp.py
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    today = resolved()
    assert {row: hashed(today[row], stored["settings"]) for row in stored["rows"]} == stored["rows"]
    # The hashes notice a changed value.
    row = "encoders-recipe: mexma"
    changed = today[row] | {"koleo_weight": 0.5}
    assert hashed(changed, stored["settings"]) != stored["rows"][row]
