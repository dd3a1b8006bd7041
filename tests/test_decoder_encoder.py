"""Encoders that start from a decoder: mask, [MASK], evaluations, refusals, exports."""

import contextlib
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import make_models
from sentence_transformers import SentenceTransformer
from test_evaluate import write_rows
from test_families import SHAPES, SPECIAL, make
from test_train import EXTRA

import evaluate
import train
from base.common import BadInput
from data import Example, Packed, Segment
from harness import runs, settings
from harness.pretrained import adapt_shape
from harness.settings import TrainConfig
from interop import families, huggingface
from objectives import Contrastive, Mlm

LIMITS = dict(langs="a,b", steps=2, batch=4, eval_limit=8, max_length=30, device="cpu",
              precision="float32")


@pytest.fixture(scope="module")
def decoders(tmp_path_factory):
    """Return a folder with pairs.tsv and two random Llamas, imported. Only `with begin` has a token
    before each text."""
    folder = tmp_path_factory.mktemp("decoders")
    with contextlib.chdir(folder):
        for name, single in (("with begin", "<|begin_of_text|> $A"), ("bare", "")):
            make_models.save(f"theirs {name}", "llama", make_models.llama3(single),
                             make_models.LLAMA_ROLES, True)
            huggingface.import_model(f"theirs {name}", name)
    texts = make_models.SENTENCES
    rows = [f"{text} {i}\t{other} {i}\t{other} {i + 1}"
            for i, (text, other) in enumerate(zip(texts, texts[::-1]))]
    write_rows(folder / "pairs.tsv", rows, "a\tb\tnegative")
    return folder


@pytest.fixture
def trained(decoders):
    """trained(...): train run/ from a decoder; return the run and the last record of its loop."""
    def train_run(objective="contrastive", name="with begin", **more):
        given = LIMITS | dict(init=decoders / name, data=decoders / "pairs.tsv", out="run")
        run = train.start(objective, **given | more)
        *_, record = run.steps()
        assert np.isfinite(list(record["eval"].values())).all()
        return run, record
    return train_run


def test_a_causal_batch_has_no_later_token():
    row = [Segment(np.arange(3)), Segment(np.arange(2), prefix=(0, 2)), Segment(np.arange(2), True)]
    packed = Packed.of_segments([[Segment(np.arange(4))], row])
    packed.plans["of the bidirectional mask"] = None
    causal = packed.as_causal()
    for number in (0, 1):
        assert torch.equal(causal.mask(number), packed.mask(number).tril())
    assert not causal.plans and packed.mask(0).all()
    # Wherever it is in a batch, which `prepared` changes.
    found, = train.prepared([{"views": [packed, (packed,)]}], True, (), torch.device("cpu"))
    for one in (found["views"][0], found["views"][1][0]):
        assert torch.equal(one.key_ranges, causal.key_ranges)


@pytest.mark.parametrize("causal, name", [(False, "with begin"), (True, "bare")])
def test_a_decoder_is_trained_as_an_encoder_and_exported(causal, name, trained, decoders, capsys):
    run, record = trained(name=name, causal=causal)
    assert run.model.config.pool == ("last" if causal else "mean")
    notes = "\n".join(run.notes)
    assert ("now see later ones" in notes) == (not causal)
    mask = "causal, pooling last" if causal else "bidirectional, pooling mean"
    assert f"{name}: all weights, {mask}" in notes
    # Training reads a text under the mask of the evaluation.
    packed = run.make_batch(0)[0]["packed"]
    rows = [row.tolist() for row in packed.tokens.split(packed.cu_seqlens.diff().tolist())]
    with torch.no_grad():
        assert torch.allclose(run.model.embeddings(packed), evaluate.embed(run.model, rows),
                              atol=1e-5)
    # Its evaluations are an encoder's.
    assert "retrieval/xsim" in record["eval"] and "generate/exact" not in record["eval"]
    assert not evaluate.main(["run"])
    assert "the translations that the model finds" in capsys.readouterr().out

    # What starts from it keeps its mask.
    given = LIMITS | dict(init="run", data=str(decoders / "pairs.tsv"))
    then = train.start("contrastive", **given)
    assert then.settings.causal == then.model.config.encodes == causal
    assert then.model.config.pool == run.model.config.pool
    if causal:
        then = train.start("contrastive", causal=False, **given)
        assert (then.model.config.causal, then.model.config.pool) == (False, "mean")

    huggingface.export("run", "made")
    library = SentenceTransformer("made", device="cpu", local_files_only=True)
    assert library[0].auto_model.config.model_type == ("llama" if causal else "eurobert")
    assert library[1].pooling_mode == ("lasttoken" if causal else "mean")
    huggingface.import_model("made", "again")
    before, again = runs.open_run("run"), runs.open_run("again")
    for name, weight in before.model.state_dict().items():
        assert torch.equal(weight, again.model.state_dict()[name])


@pytest.mark.parametrize("encodes, causal, pool", [
    (False, True, "last"), (False, False, "mean"), (True, True, "max"), (True, False, "mean")])
def test_a_causal_encoder_keeps_its_pooling(encodes, causal, pool):
    own = replace(make(next(iter(SHAPES)))[1].config, causal=True, encodes=encodes, pool="max")
    shape, _ = adapt_shape(own, own, TrainConfig(causal=causal), Contrastive)
    assert (shape.pool, shape.causal, shape.encodes) == (pool, causal, causal)


def test_help_has_the_defaults_of_a_run_from_an_imported_model(decoders, capsys):
    folder = decoders / "bare"
    given = dict(init=str(folder))
    found, *_ = settings.resolve_config(Contrastive, given, runs.open_run(folder))
    with pytest.raises(SystemExit):
        settings.parse(["--objective", "contrastive", "--init", str(folder), "--help", "all"])
    printed = capsys.readouterr().out
    for name in ("size", "steps", "batch", "optimizer"):
        assert re.search(rf"--{name} [^\[]*\[{getattr(found, name)}\]\n", printed), name


def test_an_imported_decoder_says_that_it_answers(decoders, capsys):
    words = [str(decoders / "bare"), "--data", str(decoders / "pairs.tsv"), "--langs", "a,b",
             "--limit", "4"]
    for more in ([], ["--tasks", "retrieval"]):
        assert not evaluate.main([*words, *more])
        assert ("answers each prompt, which takes long" in capsys.readouterr().err) == (not more)


@pytest.mark.parametrize("shape", [
    name for name, (kind, *_) in SHAPES.items() if "bert" not in kind])
def test_a_bidirectional_decoder_can_be_exported_if_it_is_like_llama(shape):
    own = make(shape)[1].config
    config, notes = adapt_shape(own, own, TrainConfig(), Contrastive)
    warned = [note for note in notes if "cannot be exported" in note]
    if SHAPES[shape][0] in ("llama", "mistral"):
        assert families.write_config(config, SPECIAL).model_type == "eurobert" and not warned
        return
    with pytest.raises(BadInput, match="eurobert, cannot have ") as refused:
        families.write_config(config, SPECIAL)
    # The line before the first step names the settings that the export refuses.
    names = str(refused.value).partition("cannot have ")[2]
    assert f"has {names} (" in warned[0]


@pytest.mark.parametrize("objective", ["mlm", "mexma", "bepa", "hybrid", "contrastive"])
def test_every_encoders_objective_starts_from_a_llama_and_resumes(objective, trained, decoders):
    more = EXTRA.get(objective, {})
    run, _ = trained(objective, lora_rank=2, **more)
    before, after = (runs.open_run(one).model.embed.weight
                     for one in (decoders / "with begin", "run"))
    assert torch.equal(after[:-1], before) and run.data.tokenizer.special.mask == len(before)
    # [MASK] starts as the mean, and is trained where it is used.
    is_mean = torch.allclose(after[-1], before.mean(0), atol=1e-6)
    assert is_mean != run.objective_class.masks
    assert trained(objective, lora_rank=2, **more)[0].step == 2


@pytest.mark.parametrize("objective", ["ntp", "llm-jepa"])
def test_a_decoder_without_mask_stays_a_decoder_under_lora(objective, trained):
    run, record = trained(objective, "bare", lora_rank=2)
    assert record["step"] == 2 and run.model.config.causal
    assert run.data.tokenizer.special.mask is None


@pytest.mark.parametrize("objective", ["mexma", "bepa"])
def test_a_head_needs_a_token_before_each_text(objective, trained):
    """test_train.py has what else --init refuses of a decoder."""
    trained(name="bare")
    for start in ({}, dict(init="run")):
        with pytest.raises(BadInput, match=r"^[^\n]*needs a token such as \[CLS] before each text"):
            trained(objective, "bare", out="new", **start)
    assert not Path("new").exists()


@pytest.mark.parametrize("name", ["with begin", "bare"])
def test_a_masked_token_is_predicted_by_the_state_before_it(name, trained, capsys):
    run, _ = trained("mlm", name, predict_from="previous", mask_ratio=0.5)
    special = run.data.tokenizer.special
    texts = [np.arange(10, 17), np.arange(20, 21), np.arange(30, 42)]
    line = np.concatenate([[*special.before, *ids] for ids in texts])
    predicted = set()
    for seed in range(40):
        batch = Mlm.collate([Example((ids,)) for ids in texts], np.random.default_rng(seed),
                            run.options, special)
        after = batch["target_positions"].numpy() + 1
        assert (line[after] == batch["targets"].numpy()).all()
        assert not np.isin(after, batch["packed"].cu_seqlens[:-1]).any()
        assert np.isin(np.flatnonzero(batch["packed"].tokens.numpy() != line), after).all()
        predicted |= {*line[after].tolist()}
    # Without a token before the text, its first word is the first token, which is never masked.
    assert predicted == {int(i) for ids in texts for i in ids[name == "bare":]}

    capsys.readouterr()
    huggingface.export("run", "made")
    assert "fill-mask reads the state of the mask" in capsys.readouterr().err
