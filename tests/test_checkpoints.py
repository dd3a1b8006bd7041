"""Pretrained folders in and out: golden models that transformers made, round trips, and files that are not what they say."""

import importlib.util
import io
import json
import pickle
import re
import shutil
import struct
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import checkpoints
import data
import evaluate
import families
import train
from data import BadInput
from encoder import Encoder
from model import Model, ModelConfig, Packed, save, size_config

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("bert", "roberta", "xlm-roberta")
TEXTS = ["the dog runs .", "two cats", "a red cat sees the dog", "the cat"]


@pytest.fixture
def copy(tmp_path):
    """name -> a copy of a golden folder that a test may damage."""
    return lambda name="bert": Path(shutil.copytree(GOLDEN / name, tmp_path / name))


def change(folder, **values):
    """Change values of a config.json; None takes one out."""
    path = folder / "config.json"
    found = json.loads(path.read_text(encoding="utf-8")) | values
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}), encoding="utf-8")


def states(model, rows):
    with torch.no_grad():
        packed = Packed.of([np.array(row) for row in rows], causal=model.config.causal)
        found = model(packed)
        return found, model.logits(found)


def a_run(folder, tokenizer=None, **changes):
    """A folder with what an export reads of a run: random weights, a tokenizer of our own, the first line of a log, results."""
    tokenizer = tokenizer or data.train_tokenizer(TEXTS * 3, 300)
    torch.manual_seed(0)
    model = Model(ModelConfig(**dict(vocab=data.special(tokenizer).vocab, width=8, heads=2, hidden=12, layers=2, max_length=20) | changes))
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + (parameter.data == 1)
    folder.mkdir(parents=True, exist_ok=True)
    save(model, folder / "model.pt")
    data.write_tokenizer(tokenizer, folder / "tokenizer.json")
    (folder / "log.jsonl").write_text(json.dumps({"config": {"data": "toy", "objective": "mexma"}}) + "\n", encoding="utf-8")
    (folder / "eval.json").write_text('{"retrieval/xsim": 1.5}', encoding="utf-8")
    return model.eval()


# ------------------------------------------------------------------------------------------------------------------ in


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_model_gives_the_states_and_logits_that_transformers_gave(name):
    expected, loaded = json.loads((GOLDEN / name / "expected.json").read_text(encoding="utf-8")), checkpoints.read(GOLDEN / name)
    found, logits = states(loaded.model, expected["rows"])
    assert torch.allclose(found, torch.tensor([state for row in expected["hidden"] for state in row]), atol=1e-5)
    assert (loaded.model.config.head == "transform") == (expected["logits"][0] is not None) == (name != "roberta")
    if expected["logits"][0]:
        last = np.cumsum([len(row) for row in expected["rows"]]) - 1
        assert torch.allclose(logits[last], torch.tensor(expected["logits"]), atol=1e-5)


def test_rows_are_what_the_tokenizer_of_the_family_makes():
    for name in NAMES:
        tokenizer = checkpoints.read(GOLDEN / name).tokenizer
        assert evaluate.rows_of(tokenizer, TEXTS) == [tokenizer.encode(text).ids for text in TEXTS]


def test_shards_pickles_prefixes_and_the_names_of_old_files_give_the_same_model(copy):
    folder = copy()
    gold, weights = checkpoints.read(folder).model.state_dict(), load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    same = lambda: all(torch.equal(value, gold[name]) for name, value in checkpoints.read(folder).model.state_dict().items())
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value for name, value in weights.items()}
    old |= {"bert.embeddings.position_ids": torch.arange(20)[None], "cls.predictions.decoder.weight": weights["bert.embeddings.word_embeddings.weight"],
            "cls.seq_relationship.weight": torch.zeros(2, 8), "bert.pooler.dense.weight": torch.zeros(8, 8)}
    torch.save(old, folder / "pytorch_model.bin")
    assert same()
    names, shards = sorted(weights), ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for place, shard in enumerate(shards):
        save_file({name.removeprefix("bert."): weights[name] for name in names[place::2]}, folder / shard)
    index = {"weight_map": {name: shards[place % 2] for place, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "pytorch_model.bin").unlink()
    assert same()
    index["weight_map"][names[0]] = "../model-00001-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(BadInput, match="must name the files that lie beside it"):
        checkpoints.read(folder)


def test_every_key_that_is_missing_unknown_or_misshapen_is_listed(copy):
    folder = copy()
    weights = load_file(folder / "model.safetensors")
    broken = {name: value for name, value in weights.items() if "layer.1.output.dense" not in name} | {"classifier.weight": torch.zeros(2, 8)}
    save_file(broken, folder / "model.safetensors")
    with pytest.raises(BadInput) as error:
        checkpoints.read(folder)
    for part in ("missing encoder.layer.1.output.dense.weight", "missing encoder.layer.1.output.dense.bias", "unknown classifier.weight"):
        assert part in str(error.value)
    key = "bert.encoder.layer.0.attention.self.key.weight"
    save_file(weights | {key: torch.zeros(7, 8), "bert.embeddings.LayerNorm.bias": torch.full((8,), torch.nan)}, folder / "model.safetensors")
    with pytest.raises(BadInput, match=rf"LayerNorm.bias is torch.float32 or not finite.*{key} has shape \(7, 8\), not \(8, 8\)"):
        checkpoints.read(folder)


CONTRADICTIONS = [
    (dict(num_hidden_layers=3), "missing encoder.layer.2"), (dict(num_hidden_layers=1), "unknown bert.encoder.layer.1"),
    (dict(num_hidden_layers=10 ** 9), "1,000,000,000 layers"), (dict(vocab_size=99), r"\(23, 8\), not \(99, 8\)"), (dict(vocab_size=5), "23 pieces"),
    (dict(hidden_size="8"), "hidden_size is '8'"), (dict(hidden_size=None), "hidden_size is None"), (dict(hidden_act="relu"), "hidden_act is 'relu'"),
    (dict(num_attention_heads=3), "width 8 is not a multiple of heads 3"), (dict(position_embedding_type="relative_key"), "relative_key"),
    (dict(is_decoder=True), "is_decoder"), (dict(model_type="t5"), "is a 't5' model: choose one of bert"), (dict(model_type=["bert"]), "choose one of bert"),
    (dict(max_position_embeddings=0), "max_length is 0"), (dict(layer_norm_eps=-1), "norm_epsilon is -1"),
    (dict(vocab_size=10 ** 18), "no tensor can have"), (dict(hidden_size=2 * 10 ** 30), "no tensor can have"), (dict(vocab_size=True), "vocab_size is True"),
]


@pytest.mark.parametrize("values, said", CONTRADICTIONS, ids=[next(iter(values)) + str(place) for place, (values, _) in enumerate(CONTRADICTIONS)])
def test_a_config_that_contradicts_the_weights_or_asks_for_another_model_is_one_line(values, said, copy, capsys):
    folder = copy()
    change(folder, **values)
    assert evaluate.main(["export", str(folder), str(folder.parent / "new")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and re.search(said, error), error
    assert not list(folder.parent.glob("*new*"))


def damage(path, kind):
    content = bytearray(path.read_bytes())
    if kind == "truncated":
        content = content[:len(content) // 2]
    elif kind == "long header":
        content[:8] = struct.pack("<Q", 2 ** 40)
    elif kind == "offsets beyond the end":
        content = content.replace(b'"data_offsets":[0,', b'"data_offsets":[8,', 1)
    elif kind == "not safetensors":
        content = b"<!DOCTYPE html>" * 9
    path.write_bytes(content)


@pytest.mark.parametrize("kind", ["truncated", "long header", "offsets beyond the end", "not safetensors"])
def test_damaged_safetensors_are_one_line(kind, copy):
    folder = copy()
    damage(folder / "model.safetensors", kind)
    with pytest.raises(BadInput, match="model.safetensors is damaged or cut short"):
        checkpoints.read(folder)


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")                                    # creates the file, if it is run


@pytest.mark.parametrize("write", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))], ids=["zip", "pickle"])
def test_a_pickle_with_code_in_it_is_refused_and_not_run(write, copy):
    folder = copy()
    (folder / "model.safetensors").unlink()
    write({"weight": Payload(str(folder / "ran"))}, folder / "pytorch_model.bin")
    with pytest.raises(BadInput, match="pytorch_model.bin cannot be read as a checkpoint"):
        checkpoints.read(folder)
    assert not (folder / "ran").exists()
    torch.save({"state_dict": {"weight": torch.zeros(1)}}, folder / "pytorch_model.bin")
    with pytest.raises(BadInput, match="other things than weights"):
        checkpoints.read(folder)


def test_what_a_folder_lacks_is_said_with_the_way_out(copy):
    for name, said in (("tokenizer.json", "save_pretrained"), ("model.safetensors", "has no weights"), ("config.json", "cannot read .*config.json")):
        folder = copy()
        (folder / name).unlink()
        with pytest.raises(BadInput, match=said):
            checkpoints.read(folder)
        shutil.rmtree(folder)
    with pytest.raises(BadInput, match="is a file"):
        checkpoints.read(GOLDEN / "bert" / "config.json")


def test_a_name_that_is_missing_gated_or_out_of_reach_is_one_line_each(monkeypatch):
    import huggingface_hub
    from huggingface_hub import errors

    def fail(kind):
        def raise_it(*arguments, **more):
            raise kind.__new__(kind)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", raise_it)

    for kind, said in ((errors.GatedRepoError, "is gated: accept its terms"), (errors.RepositoryNotFoundError, "neither a folder here nor a public model"),
                       (errors.LocalEntryNotFoundError, "cannot be reached"), (ConnectionError, "cannot be reached")):
        fail(kind)
        with pytest.raises(BadInput, match=said):
            checkpoints.find("someone/some-model")
    monkeypatch.undo()
    with pytest.raises(BadInput, match="neither a folder here"):         # no such name can exist, so the network is not asked
        checkpoints.find("/nowhere/at/all")


def test_a_name_on_the_hub_takes_safetensors_and_the_pickle_only_without_them(monkeypatch, tmp_path):
    import huggingface_hub
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, allow_patterns: asked.append(allow_patterns) or str(tmp_path))
    assert checkpoints.find("someone/some-model") == tmp_path and asked == [checkpoints.FILES, ["pytorch_model*.bin"]]
    (tmp_path / "model.safetensors").touch()
    checkpoints.find("someone/some-model")
    assert len(asked) == 3


def test_pooling_is_read_in_the_old_and_the_new_spelling(copy):
    folder = copy()
    assert checkpoints.read(folder).model.config.pool == "mean"          # what sentence-transformers takes without modules.json
    (folder / "1_Pooling").mkdir()
    modules = [dict(type=f"sentence_transformers.models.{kind}", path=path)
               for kind, path in (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2"))]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 7}', encoding="utf-8")
    for found, pool in (({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"), ({"pooling_mode": "lasttoken"}, "last")):
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(found), encoding="utf-8")
        loaded = checkpoints.read(folder)
        assert (loaded.model.config.pool, loaded.unit, loaded.longest) == (pool, True, 7)
    assert np.allclose(np.linalg.norm(Encoder(folder).encode(TEXTS), axis=1), 1, atol=1e-6)
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": ["cls", "mean"]}', encoding="utf-8")
    with pytest.raises(BadInput, match="pooling cls, mean is none of"):
        checkpoints.read(folder)
    (folder / "modules.json").write_text(json.dumps([*modules, dict(type="sentence_transformers.models.Dense", path="3")]), encoding="utf-8")
    with pytest.raises(BadInput, match="has Dense"):
        checkpoints.read(folder)


def test_new_tokens_get_the_mean_of_the_rows_and_the_other_rows_stay():
    loaded = checkpoints.read(GOLDEN / "bert")
    old = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    model = checkpoints.add_tokens(loaded.model, loaded.tokenizer, ["[MASK]", "[PRED_1]", "[PRED_2]"])
    new, count = model.state_dict(), len(old["embed.weight"])
    assert data.special(loaded.tokenizer).preds == (count, count + 1) and model.config.vocab == count + 2
    for name in ("embed.weight", "vocabulary_bias"):
        assert torch.equal(new[name][:count], old[name]) and torch.allclose(new[name][count:], old[name].mean(0).expand_as(new[name][count:]))
    assert all(torch.equal(new[name], old[name]) for name in old.keys() - {"embed.weight", "vocabulary_bias"})
    wide = Model(ModelConfig(vocab=count + 10, width=8, heads=2, layers=1))   # rows that no piece has: they are there to be taken
    before = wide.embed.weight.detach().clone()
    wide = checkpoints.add_tokens(wide, loaded.tokenizer, ["[PRED_3]"])
    assert wide.config.vocab == count + 10 and torch.allclose(wide.embed.weight[count + 2], before[:count + 2].mean(0))
    assert torch.equal(wide.embed.weight[count + 3:], before[count + 3:])


# ------------------------------------------------------------------------------------------------------------------ out


@pytest.mark.parametrize("changes", [dict(), dict(head="transform", pool="mean"), dict(position_offset=2), dict(pool="max"), dict(position_offset=1)])
def test_a_run_exports_and_comes_back_bit_for_bit(changes, tmp_path):
    model = a_run(tmp_path / "run", **changes)
    folder = checkpoints.export(tmp_path / "run", tmp_path / "folder")
    again, own = checkpoints.read(folder), model.state_dict()
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
    assert kind == ("xlm-roberta" if changes.get("position_offset") == 1 else "bert")     # [PAD] is 0: the positions of XLM-R would begin at 1
    for name, value in again.model.state_dict().items():
        assert torch.equal(value, own[name][own[name].shape[0] - value.shape[0]:])
    assert np.array_equal(Encoder(folder).encode(TEXTS), Encoder(tmp_path / "run").encode(TEXTS))
    assert again.model.config.pool == model.config.pool and again.model.config.head == model.config.head
    assert {path.name for path in tmp_path.iterdir()} == {"run", "folder"} and "retrieval/xsim" in (folder / "README.md").read_text(encoding="utf-8")
    second = checkpoints.export(folder, tmp_path / "second")
    assert (second / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_a_pretrained_model_exports_as_its_own_family_and_keeps_its_tokenizer(name, tmp_path):
    folder = checkpoints.export(GOLDEN / name, tmp_path / "folder")
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"] == ("bert" if name == "bert" else "xlm-roberta")
    roles = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert roles["mask_token"] == ("[MASK]" if name == "bert" else "<mask>") and roles["unk_token"] == ("[UNK]" if name == "bert" else "<unk>")
    assert data.read_tokenizer(folder / "tokenizer.json").to_str() == data.read_tokenizer(GOLDEN / name / "tokenizer.json").to_str()


def test_an_exported_tokenizer_puts_the_frame_around_a_text(tmp_path):
    a_run(tmp_path / "run")
    first = json.loads((tmp_path / "run" / "log.jsonl").read_text(encoding="utf-8")) | {"frames": [[[], [5, 3]], [[], [3]]]}
    (tmp_path / "run" / "log.jsonl").write_text(json.dumps(first), encoding="utf-8")
    tokenizer = data.read_tokenizer(checkpoints.export(tmp_path / "run", tmp_path / "folder") / "tokenizer.json")
    assert tokenizer.encode("the dog").tokens[0] == "[CLS]" and tokenizer.encode("the dog").tokens[-2:] == ["[PRED_1]", "[SEP]"]


REFUSED = [(dict(norm_place="pre"), "norm_place pre"), (dict(positions="rotary"), "positions rotary"), (dict(pool="attention"), "pooling attention"),
           (dict(norm="rmsnorm", activation="swiglu"), "norm rmsnorm.*activation swiglu"), (dict(kv_heads=1), "kv_heads 1"),
           (dict(head="bias"), "head bias"), (dict(tied=False), "tied False")]


@pytest.mark.parametrize("changes, said", REFUSED, ids=[said for _, said in REFUSED])
def test_what_no_class_of_theirs_can_express_is_refused_with_the_reason(changes, said, tmp_path):
    a_run(tmp_path / "run", **changes)
    with pytest.raises(BadInput, match=f"no Hugging Face class can express.*{said}"):
        checkpoints.export(tmp_path / "run", tmp_path / "folder")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_every_encoder_size_exports():
    special = data.special(data.train_tokenizer(TEXTS * 3, 300))
    for size in ("toy", "small", "base", "large"):
        assert families.spell(size_config(size), special)[1]["model_type"] == "bert"
    for size in ("base", "large"):
        assert families.spell(size_config(size), special._replace(pad=1))[1]["model_type"] == "xlm-roberta"


def test_a_folder_that_is_there_stays_and_a_failed_self_check_leaves_nothing(tmp_path, monkeypatch, capsys):
    a_run(tmp_path / "run")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.txt").write_text("mine", encoding="utf-8")
    assert evaluate.main(["export", str(tmp_path / "run"), str(tmp_path / "folder")]) == 2 and "is there already" in capsys.readouterr().err
    family = families.FAMILIES["bert"]
    wrong = lambda weights, config: family.outward(weights, config) | {"norm.bias": weights["norm.bias"] + 1}
    monkeypatch.setitem(families.FAMILIES, "bert", family._replace(outward=wrong))
    assert evaluate.main(["export", str(tmp_path / "run"), str(tmp_path / "new")]) == 2 and "not hold the weights" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"run", "folder"}


# ------------------------------------------------------------------------------------------------------------------ in use


def test_encode_writes_one_vector_a_line_and_nearest_finds_the_line_itself(tmp_path, capsys, monkeypatch):
    a_run(tmp_path / "run", pool="mean")
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join([*TEXTS, "", "two"]) + "\n", encoding="utf-8")
    assert evaluate.main(["encode", str(tmp_path / "run"), str(lines), "--out", str(tmp_path / "v.npy")]) == 0
    vectors = np.load(tmp_path / "v.npy")
    assert vectors.shape == (6, 8) and vectors.dtype == np.float32
    assert np.array_equal(vectors[:4], Encoder(tmp_path / "run").encode([*TEXTS, "", "two"])[:4])
    capsys.readouterr()
    assert evaluate.main(["nearest", str(tmp_path / "run"), str(lines), "--query", "two cats", "--count", "2"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["two cats", "  1.000  2  two cats"] and len(said) == 3
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n"))
    assert evaluate.main(["nearest", str(tmp_path / "run"), str(lines), "--count", "1"]) == 0 and "  1.000  4  the cat" in capsys.readouterr().out
    for words in (["nearest", str(tmp_path / "run"), str(lines), "--query", "a", "--count", "9"], ["encode", str(tmp_path / "run"), "no.txt", "--out", "v.npy"],
                  ["encode", str(tmp_path / "nothing"), str(lines), "--out", "v.npy"]):
        assert evaluate.main(words) == 2 and capsys.readouterr().err.startswith("error: ")


def test_a_pretrained_folder_is_evaluated_as_a_run_is(copy, tmp_path, capsys):
    folder = copy("bert")
    (tmp_path / "pairs.tsv").write_text("en\tde\n" + "".join(f"{text}\t{text} .\n" for text in TEXTS), encoding="utf-8")
    assert evaluate.main([str(folder), "--data", str(tmp_path / "pairs.tsv"), "--tasks", "retrieval,geometry", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["retrieval/rows"] == 4 and json.loads((folder / "eval-pairs.json").read_text(encoding="utf-8")) == found
    for flags in ([], ["--tasks", "sts,geometry"]):
        assert evaluate.main([str(folder), *flags]) == 2
        assert "is a pretrained model, without rows of its own: give --data" in capsys.readouterr().err


def test_a_pretrained_folder_is_cut_where_it_says_and_diverged_weights_are_no_vectors(copy, tmp_path, capsys):
    folder, lines = copy("bert"), tmp_path / "lines.txt"
    lines.write_text("".join(f"{text} .\n" for text in TEXTS), encoding="utf-8")
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 4}', encoding="utf-8")
    assert evaluate.main([str(folder), "--data", str(lines), "--tasks", "geometry"]) == 0
    assert "longer than 4 tokens and were cut" in capsys.readouterr().err
    a_run(tmp_path / "run")
    model = checkpoints.open_model(tmp_path / "run").model
    model.embed.weight.data.fill_(float("nan"))
    save(model, tmp_path / "run" / "model.pt")
    for command, *more in (["encode", "--out", str(tmp_path / "v.npy")], ["nearest", "--query", "a", "--count", "1"]):
        assert evaluate.main([command, str(tmp_path / "run"), str(lines), *more]) == 2 and "its training has diverged" in capsys.readouterr().err
    for out in (tmp_path, tmp_path / "no" / "v.npy"):
        assert evaluate.main(["encode", str(folder), str(lines), "--out", str(out)]) == 2
        assert "must be a file in a folder that is there" in capsys.readouterr().err
    assert evaluate.main(["export", str(folder), str(lines / "sub")]) == 2 and not (tmp_path / "v.npy").exists()


def test_the_readmes_mteb_adapter_keeps_to_the_protocol(tmp_path):
    """mteb 2: encode(DataLoader of {"text": [...]}, *, ...) -> (N, D), similarity, similarity_pairwise, mteb_model_meta."""
    a_run(tmp_path / "run")
    code = re.search(r"```python\n(class ForMTEB:.*?)```", (GOLDEN.parent.parent / "README.md").read_text(encoding="utf-8"), re.S)[1]
    meta = types.SimpleNamespace(create_empty=lambda values: types.SimpleNamespace(**values))
    scope = dict(Encoder=Encoder, ModelMeta=meta, np=np, torch=torch, normalize=torch.nn.functional.normalize)
    exec(code, scope)
    adapter, loader = scope["ForMTEB"](tmp_path / "run"), torch.utils.data.DataLoader([{"text": text} for text in TEXTS], batch_size=3)
    vectors = adapter.encode(loader, task_metadata=None, hf_split="test", hf_subset="default", prompt_type=None, batch_size=3)
    assert np.allclose(vectors, Encoder(tmp_path / "run").encode(TEXTS), atol=1e-6) and adapter.mteb_model_meta.name
    cosines = torch.nn.functional.cosine_similarity(torch.tensor(vectors)[:, None], torch.tensor(vectors)[None], dim=-1)
    assert torch.allclose(adapter.similarity(vectors, vectors), cosines, atol=1e-6)
    assert torch.allclose(adapter.similarity_pairwise(vectors, vectors[::-1].copy()), cosines.flip(1).diagonal(), atol=1e-6)
    assert len(code.splitlines()) <= 15


def start(folder, out, *more):
    """The words that continue a golden model on a few pairs."""
    (folder / "pairs.tsv").write_text("".join(f"{TEXTS[i % 4]} {i}\tein hund {i}\n" for i in range(60)), encoding="utf-8")
    return ["--data", str(folder / "pairs.tsv"), "--cache", str(folder / "cache"), "--out", str(out), "--batch", "4", "--steps", "2", "--eval-limit", "8",
            "--cut", "8", "--precision", "float32", *map(str, more)]


def test_training_starts_from_a_pretrained_model_and_ends_in_a_folder(tmp_path, capsys):
    words = start(tmp_path, tmp_path / "run", "--objective", "mlm", "--init", GOLDEN / "xlm-roberta")
    assert train.main(words) == 0
    shown = capsys.readouterr().out
    assert f"starting from {GOLDEN / 'xlm-roberta'}" in shown and "toy scale" not in shown and "size of --init" in shown and "will refuse" not in shown
    gold, (config, weights) = checkpoints.read(GOLDEN / "xlm-roberta").model, torch.load(tmp_path / "run" / "model.pt", weights_only=True).values()
    assert 0 < (weights["blocks.0.out.weight"] - gold.state_dict()["blocks.0.out.weight"]).abs().max() < 0.01      # two steps away
    assert config["position_offset"] == 2 and config["norm_epsilon"] == 1e-5 and config["vocab"] == gold.config.vocab
    assert train.main(words) == 0 and "is finished" in capsys.readouterr().out
    folder = checkpoints.export(tmp_path / "run", tmp_path / "folder")
    assert torch.equal(checkpoints.read(folder).model.blocks[0].out.weight, weights["blocks.0.out.weight"])
    assert data.main(["inspect", *words]) == 0 and "hund" in capsys.readouterr().out


CONTRARY = [(["--size", "base"], r"width 768 \(it has 8\), layers 12"), (["--width", "16"], r"width 16 \(it has 8\)"), (["--cut", "60"], "over max_length 20"),
            (["--vocab", "500"], "vocab 500 has no effect"), (["--objective", "ntp"], r"objective ntp \(causal\)")]


@pytest.mark.parametrize("more, said", CONTRARY, ids=[more[0] for more, _ in CONTRARY])
def test_flags_that_contradict_a_pretrained_model_are_refused(more, said, tmp_path, capsys):
    assert train.main([*start(tmp_path, tmp_path / "run", "--objective", "mlm", "--init", GOLDEN / "bert"), *more]) == 2
    assert re.search(said, capsys.readouterr().err) and not (tmp_path / "run").exists()


def test_a_model_that_cannot_be_exported_says_so_before_it_is_trained(tmp_path, capsys):
    small = ["--width", "16", "--heads", "2", "--hidden", "16", "--vocab", "300"]
    assert train.main(start(tmp_path, tmp_path / "run", "--objective", "mlm", *small, "--norm-place", "pre")) == 0
    shown = capsys.readouterr().out
    assert "will refuse this model: no Hugging Face class can express" in shown and shown.index("norm_place pre") < shown.index("step     0")


# ------------------------------------------------------------------------------------------------------------------ against transformers


@pytest.fixture(scope="module")
def golden_script():
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("make", GOLDEN / "make.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize("name", NAMES)
def test_what_transformers_saves_is_read_and_computed_alike(name, golden_script, tmp_path):
    golden_script.make(name, *golden_script.KINDS[name], tmp_path, seed=1)
    expected, loaded = json.loads((tmp_path / "expected.json").read_text(encoding="utf-8")), checkpoints.read(tmp_path)
    found, logits = states(loaded.model, expected["rows"])
    assert torch.allclose(found, torch.tensor([state for row in expected["hidden"] for state in row]), atol=1e-5)
    if expected["logits"][0]:
        assert torch.allclose(logits[np.cumsum([len(row) for row in expected["rows"]]) - 1], torch.tensor(expected["logits"]), atol=1e-5)


OURS = [dict(), dict(pool="mean", head="transform"), dict(pool="max", position_offset=1), dict(pool="weighted", position_offset=2), dict(pool="last")]


@pytest.mark.parametrize("changes", [*OURS, *NAMES])
def test_an_exported_folder_opens_in_automodel_and_gives_the_same_states_and_logits(changes, tmp_path):
    transformers = pytest.importorskip("transformers")
    name = GOLDEN / changes if isinstance(changes, str) else tmp_path / "run"
    model = checkpoints.read(name).model if isinstance(changes, str) else a_run(name, **changes)
    folder = checkpoints.export(name, tmp_path / "folder")
    theirs, report = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    rows = [ids[mask.bool()].tolist() for ids, mask in zip(batch.input_ids, batch.attention_mask)]
    assert rows == evaluate.rows_of(checkpoints.open_model(name).tokenizer, TEXTS) and batch.input_ids.shape[1] > min(map(len, rows))
    found, logits = states(model, rows)
    with torch.no_grad():
        hidden = theirs.eval()(**batch).last_hidden_state[batch.attention_mask.bool()]
    assert torch.allclose(found, hidden, atol=1e-5)
    if model.config.head == "transform":
        masked, report = transformers.AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
        assert not report["missing_keys"]
        with torch.no_grad():
            assert torch.allclose(logits, masked.eval()(**batch).logits[batch.attention_mask.bool()], atol=1e-5)


@pytest.mark.parametrize("changes", [*OURS, *NAMES])
def test_an_exported_folder_opens_in_sentencetransformer_and_gives_the_same_vectors(changes, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    name = GOLDEN / changes if isinstance(changes, str) else tmp_path / "run"
    if not isinstance(changes, str):
        a_run(name, **changes)
    theirs = library.SentenceTransformer(str(checkpoints.export(name, tmp_path / "folder")), device="cpu").encode(TEXTS)
    assert np.allclose(theirs, Encoder(name).encode(TEXTS), atol=1e-5)
