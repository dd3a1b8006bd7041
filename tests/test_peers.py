"""Other people's libraries compute what ours does before they are timed; the parts for a GPU run at
toy size."""

import json

import numpy as np
import pytest
import torch

from corpora.program import BadInput
from model import Packed
from results import bench

SMALL = ["--size", "tiny", "--count", "4", "--rounds", "1"]


def test_both_sides_give_the_same_loss_or_vectors_in_each_precision(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "LENGTHS", {"8-40": bench.LENGTHS["8-40"]})
    monkeypatch.setattr(bench, "fastest_precision", lambda device: "bfloat16")
    bench.peers([*SMALL, "--out", str(tmp_path)])
    records = [json.loads(line) for line in (tmp_path / "peers.jsonl").open(encoding="utf-8")]
    names = {f"{name}, 8-40, size tiny, 4 examples" for name in bench.PEERS}
    steps = {name for name in names if "encoding" not in name}
    assert {one["name"] for one in records} == names | {f"{name}, bfloat16" for name in steps}
    for record in records:
        assert len(record["table"]) >= 2 and record["table"]["ours"]["times ours"] == 1
        assert f"## {record['name']}\n" in (tmp_path / "peers.md").read_text(encoding="utf-8")


def test_nothing_is_timed_if_the_losses_differ(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "koleo", lambda vectors: torch.ones(()))
    with pytest.raises(BadInput, match="transformers does not compute what ours does"):
        bench.peers(["--only", "mexma", *SMALL, "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("part", bench.PARTS)
def test_every_part_for_a_gpu_runs_at_toy_size(part, tmp_path, monkeypatch):
    shape = bench.Shape(Packed.of([np.zeros(9, np.int64)]), 2, 2, 16)
    monkeypatch.setattr(bench, "shapes", lambda: {"nine tokens": shape})
    assert bench.gpu(["--only", part, "--out", str(tmp_path)]) == 0
    records = [json.loads(line) for line in (tmp_path / "gpu.jsonl").open(encoding="utf-8")]
    assert records and all("ms" in next(iter(one["table"].values())) for one in records)
    if part == "attention" and not bench.GPU:  # A side that cannot run here says why.
        assert "CPU" in records[0]["table"]["FlexAttention"]["failed"]
