"""Other people's libraries compute what ours does before they are timed; and the command for a GPU,
at toy size."""

import json
from pathlib import Path

import pytest

from corpora.program import BadInput
from objectives import OBJECTIVES
from results import bench, gpu, peers

REQUIRED = (Path(__file__).parent.parent / "requirements-dev.txt").read_text(encoding="utf-8")
SMALL = ["--size", "tiny", "--count", "4", "--rounds", "1", "--megabytes", ".01"]


@pytest.mark.parametrize("name", peers.PEERS)
def test_a_peer_gives_our_losses_or_answers_or_is_named_as_missing(name, tmp_path):
    peers.main(["--only", name, *SMALL, "--out", str(tmp_path)])
    lines = (tmp_path / "peers.jsonl").read_text(encoding="utf-8").splitlines()
    for record in map(json.loads, lines):
        if "missing" in record:
            assert record["missing"].replace("_", "-") not in REQUIRED
        else:
            assert len(record["table"]) >= 2 and "ours" in record["table"]
        assert record["name"] in (tmp_path / "peers.md").read_text(encoding="utf-8")


def test_nothing_is_timed_if_the_losses_differ(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "info_nce", lambda *_, **__: bench.torch.zeros(()))
    with pytest.raises(BadInput, match="transformers does not compute what ours does"):
        peers.main(["--only", "contrastive", *SMALL, "--out", str(tmp_path)])


def test_a_part_for_a_gpu_that_fails_or_lasts_leaves_the_others_records(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "LONGEST", 0.01)
    assert gpu.main(["--only", "syncs", "--out", str(tmp_path)]) == 1
    assert "syncs stopped after" in (tmp_path / "README.md").read_text(encoding="utf-8")
    monkeypatch.setattr(gpu, "LONGEST", 300)
    assert gpu.main(["--only", "vocabulary", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "## Vocabulary loss" in text and "SHORT" not in text and "not measured yet" in text


@pytest.mark.parametrize("part", ["attention", "tuning", "steps", "syncs", "mexma", "llm-jepa"])
def test_every_part_runs_at_toy_size(part, monkeypatch):
    monkeypatch.setattr(bench, "OBJECTIVES", {name: OBJECTIVES[name] for name in ("mlm", "ntp")})
    tables = {}
    for found in gpu.PARTS[part]():
        tables |= found
    rows = [row for table in tables.values() for row in table.values()]
    assert rows and all(row for row in rows)


def test_what_falls_short_of_a_target_is_said():
    titles = {title for _, _, title, *_ in gpu.TARGETS}
    tables = {title: {"ours": {"ms": 1.0, "times ours": 1.0, "peak GB": 2.0},
                      "FlexAttention": {"times ours": 1.5},
                      "FlexAttention, max-autotune": {"times ours": 1.2}} for title in titles}
    rows = gpu.verdicts(tables, True)
    assert ["A1", "FlexAttention over ours (Attention forward: MEXMA)", ">= 1.3",
            "1.2, SHORT"] in rows
    assert "1.2, met" in {row[-1] for row in rows if row[0] == "A4"}
    assert {row[-1] for row in gpu.verdicts(tables, False)} == {"not measured yet"}
