"""Decoders of other libraries: the same states and logits as theirs, out of the same weights, and folders that they read."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from golden import decoders
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

import checkpoints
from checkpoints import build, part_rows, their_weights
from data import BadInput
from families import FAMILIES, spell
from model import DECODER, Model, ModelConfig, Packed

GOLDEN = {kind: json.loads((Path(__file__).parent / "golden" / f"decoders-{kind}.json").read_text(encoding="utf-8")) for kind in "45"}
every = pytest.mark.parametrize("shape", decoders.SHAPES)


def files(settings, seed=None):
    """{their name: a function that makes this weight} of the model of a config.json."""
    family = FAMILIES[settings["model_type"]]
    config, made = family.config(settings), {}
    model = Model(config)
    for ours, theirs in family.names(config).items():
        own = model.state_dict()[ours]
        for name, rows in zip(theirs, part_rows(model, ours, len(theirs)) if len(theirs) > 1 else [len(own)]):
            made[name] = decoders.weight(name, (rows, *own.shape[1:])) + ("norm" in name and settings["model_type"] != "gemma2")
    return {name: lambda value=value: torch.from_numpy(value) for name, value in made.items()}


def ours(settings):
    family = FAMILIES[settings["model_type"]]
    return build("test", family, family.config(settings), files(settings), settings)


@every
@pytest.mark.parametrize("version", "45")
def test_states_and_logits_are_those_of_transformers(shape, version):
    """Config files as its versions 4 and 5 write them; what the numbers were computed with is in the file."""
    gold = GOLDEN[version][shape]
    model = ours(gold["config"])
    assert replace(model.config, **{name: getattr(ModelConfig(), name) for name in vars(model.config)}) == ModelConfig()
    with torch.no_grad():
        states = model(Packed.of([decoders.TOKENS[:3], decoders.TOKENS], causal=True))[3:]
        assert (states - torch.tensor(gold["states"])).abs().max() < 1e-5
        assert (model.logits(states[-1:]) - torch.tensor(gold["logits"])).abs().max() < 1e-5


