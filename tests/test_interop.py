"""Pretrained folders in and out: golden models of transformers, round trips, what leaves a run."""

import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import load_file, save_file

import evaluate
import train
from corpora.program import BadInput, exit_status
from data import Tokenizer, rows_of
from interop import __main__ as program
from interop import huggingface
from model import Model, ModelConfig, Packed, save
from tasks import finetune

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("bert", "roberta", "xlm-roberta")
TEXTS = ["the dog runs .", "two cats", "a red cat sees the dog", "the cat"]


@pytest.fixture
def folder(tmp_path):
    """A copy of a golden folder that a test may damage."""
    return Path(shutil.copytree(GOLDEN / "bert", tmp_path / "bert"))


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path, value):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value) + "\n", encoding="utf-8")


def run(*words):
    return exit_status(program.main, [str(word) for word in words])


def imported(name, folder):
    huggingface.import_model(GOLDEN / name, folder)
    return evaluate.open_run(folder)


def encode(run, texts):
    """As train.py's `Run.encode`, and of any length."""
    affixes, *_ = run.first.get("affixes") or [((), None)]
    length = run.config.get("max_length")
    return evaluate.encode(run.model, run.tokenizer, texts, affixes, length).numpy()


def states(model, rows):
    with torch.no_grad():
        found = model(Packed.of([np.array(row) for row in rows], causal=model.config.causal))
        return found, model.logits(found)


def assert_equal(weights, gold):
    """Bit for bit; BERT has no rows for positions before 0, which no token reads."""
    assert weights.keys() == gold.keys()
    assert all(torch.equal(value, gold[name][-len(value):]) for name, value in weights.items())


def a_run(folder, first=None, **changes):
    """A run folder: random weights, a tokenizer of ours, the first line of a log."""
    tokenizer = Tokenizer.train(TEXTS * 3, 300)
    torch.manual_seed(0)
    shape = dict(vocab=tokenizer.vocab, width=8, heads=2, ffn_dim=12, layers=2, max_positions=20)
    model = Model(ModelConfig(**(shape | changes)))
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + (parameter.data == 1)
    if model.config.pair == "segments":  # as BERT has them
        tables = model.position_embedding.weight.data.split(20)
        tables[1].copy_(tables[0] + tables[1][0])
    folder.mkdir(parents=True, exist_ok=True)
    save(model, folder / "model.pt")
    tokenizer.save(folder / "tokenizer.json")
    line = {"config": {"data": "toy", "objective": "mexma"}} | (first or {})
    write_json(folder / "log.jsonl", line)
    return model.eval()


# ---- in


def check_expected(model, expected):
    found, logits = states(model, expected["rows"])
    gold = torch.cat([torch.tensor(row) for row in expected["hidden"]])
    assert torch.allclose(found, gold, atol=1e-5)
    if expected["logits"][0]:
        last = np.cumsum([len(row) for row in expected["rows"]]) - 1
        assert torch.allclose(logits[last], torch.tensor(expected["logits"]), atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_model_gives_what_transformers_gave(name, tmp_path, capsys):
    assert run("import", GOLDEN / name, tmp_path / "run") == 0
    made = evaluate.open_run(tmp_path / "run")
    check_expected(made.model, read_json(GOLDEN / name / "expected.json"))
    assert (made.model.config.head == "transform") == (name != "roberta")
    gold = [made.tokenizer.inner.encode(text).ids for text in TEXTS]
    assert rows_of(made.tokenizer, TEXTS) == gold
    config = made.model.config
    assert made.config["max_length"] == config.max_positions - 2 and made.first["tokenizer_hash"]
    assert made.first["imported"]["name"] == str(GOLDEN / name)
    pooling = "sentence vectors: pooling mean, what sentence-transformers takes without a modules"
    assert pooling in capsys.readouterr().out


def test_shards_the_names_of_old_files_and_no_prefix_give_the_same_model(folder):
    gold = huggingface.read_model(folder).model.state_dict()
    weights = {"cls.seq_relationship.weight": torch.zeros(2, 8)}
    for name, value in load_file(folder / "model.safetensors").items():
        name = re.sub("(?<=LayerNorm.)weight", "gamma", name.removeprefix("bert."))
        weights[re.sub("(?<=LayerNorm.)bias", "beta", name)] = value
    (folder / "model.safetensors").unlink()
    index = {}
    for i in range(2):
        shard = f"model-0000{i + 1}-of-00002.safetensors"
        part = {name: weights[name] for name in sorted(weights)[i::2]}
        save_file(part, folder / shard)
        index |= dict.fromkeys(part, shard)
    write_json(folder / "model.safetensors.index.json", {"weight_map": index})
    assert_equal(huggingface.read_model(folder).model.state_dict(), gold)


def change(**values):
    """Changes values of a config.json."""
    def work(folder):
        path = folder / "config.json"
        write_json(path, read_json(path) | values)
    return work


def reweigh(edit):
    """Changes {name: weight} of the model.safetensors."""
    def work(folder):
        path = folder / "model.safetensors"
        weights = load_file(path)
        save_file(weights | edit(weights), path)
    return work


def damage(edit):
    """Changes the bytes of the model.safetensors."""
    def work(folder):
        path = folder / "model.safetensors"
        path.write_bytes(edit(path.read_bytes()))
    return work


def sentence(pooling, longest=7, more=()):
    """Makes a folder one of sentence-transformers."""
    def work(folder):
        modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2"), *more]
        write_json(folder / "modules.json", [
            dict(name=kind, path=path, type=f"sentence_transformers.models.{kind}")
            for kind, path in modules])
        write_json(folder / "sentence_bert_config.json", {"max_seq_length": longest})
        write_json(folder / "1_Pooling" / "config.json", pooling | {"word_embedding_dimension": 8})
    return work


KEY = "bert.encoder.layer.0.attention.self.key.weight"
TYPES = "bert.embeddings.token_type_embeddings.weight"
@pytest.mark.parametrize("kind", [
    errors.GatedRepoError, errors.RepositoryNotFoundError, ConnectionError])
def test_a_name_that_the_hub_does_not_give_is_refused(kind, monkeypatch):
    def download(name, allow_patterns):
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(BadInput, match=f"^someone/some-model is no folder.*{kind.__name__}.*$"):
        huggingface.find_folder("someone/some-model")


# ---- out


@pytest.mark.parametrize("changes", [
    dict(), dict(head="transform", pool="mean"), dict(position_offset=2), dict(pool="max"),
    dict(pair="sep-sep", position_offset=1), dict(pair="segments", normalize=True, max_tokens=9)])
def test_a_run_exports_and_comes_back_bit_for_bit(changes, tmp_path, capsys):
    model = a_run(tmp_path / "run", **changes)
    said = []
    first = huggingface.export(tmp_path / "run", tmp_path / "first", said.append)
    limit = model.config.max_tokens or model.config.max_positions
    assert f"the vectors of 6 texts, 2 of them cut at {limit} tokens, are those" in said[0]
    # [PAD] is 0: the positions of XLM-R would begin at 1
    kind = "xlm-roberta" if changes.get("pair") == "sep-sep" else "bert"
    assert read_json(first / "config.json")["model_type"] == kind
    again = imported(first, tmp_path / "again")
    assert not capsys.readouterr().err
    assert_equal(again.model.state_dict(), model.state_dict())
    vectors = encode(evaluate.open_run(tmp_path / "run"), TEXTS)
    assert np.array_equal(encode(again, TEXTS), vectors)
    for name in ("pool", "normalize", "max_tokens", "pair"):
        assert getattr(again.model.config, name) == getattr(model.config, name)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "first", "again"}


def test_the_model_card_has_no_numbers_of_another_model(tmp_path):
    a_run(tmp_path / "run")
    write_json(tmp_path / "run" / "eval.json", {"model": "0" * 8, "rows": "x", "geometry/std": 1.0})
    path = huggingface.export(tmp_path / "run", tmp_path / "made")
    assert "geometry/std" not in (path / "README.md").read_text(encoding="utf-8")


def test_what_training_made_of_the_types_of_bert_is_said(tmp_path, capsys):
    model = a_run(tmp_path / "run", pair="segments")
    model.position_embedding.weight.data[25] += 0.4
    save(model, tmp_path / "run" / "model.pt")
    huggingface.export(tmp_path / "run", tmp_path / "made")
    assert "are up to 0.2 off what was trained" in capsys.readouterr().err


def test_a_failed_self_check_leaves_nothing(tmp_path, monkeypatch, refused):
    a_run(tmp_path / "run")
    monkeypatch.setattr(evaluate, "embed", lambda model, rows, *_: torch.rand(len(rows), 8))
    words = f"export {tmp_path / 'run'} {tmp_path / 'new'}"
    assert "was not written" in refused(program.main, words)
    assert os.listdir(tmp_path) == ["run"]


# ---- in use


def test_encode_writes_one_vector_a_line_and_nearest_finds_the_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a_run(Path("run"), {"config": {"data": "toy", "max_length": 4}}, pool="mean")
    Path("lines.txt").write_text("\n".join([*TEXTS, "", "two"]) + "\n", encoding="utf-8")
    assert run("encode", "run", "lines.txt", "--out", "v.npy", "--batch", 7, "--device", "cpu") == 0
    assert "warning: 1 of 6 texts are longer than 4 tokens and were cut" in capsys.readouterr().err
    assert run("encode", "run", "lines.txt", "--out", "raw.npy", "--raw") == 0
    vectors = np.load("v.npy")
    raw = np.load("raw.npy")
    assert vectors.shape == (6, 8) and vectors.dtype == np.float32
    assert np.allclose(raw[:4], encode(evaluate.open_run("run"), TEXTS), atol=1e-6)
    assert np.allclose(vectors, raw / np.linalg.norm(raw, axis=1, keepdims=True), atol=1e-6)
    capsys.readouterr()
    for given in ([], ["--vectors", "v.npy"], ["--vectors", "raw.npy"]):
        words = ["nearest", "run", "lines.txt", "--query", "two cats", "--count", 2, *given]
        assert run(*words) == 0
        said = capsys.readouterr()
        lines = said.out.splitlines()
        assert lines[:2] == ["two cats", "  1.000  2  two cats"] and len(lines) == 3
        assert ("1 of 6 texts" in said.err) != bool(given)  # then the lines are not embedded
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n"))
    assert run("nearest", "run", "lines.txt", "--count", 1) == 0
    assert "  1.000  4  the cat" in capsys.readouterr().out


# A change of the folder BERT, before the command, and what is then said.
SPOILT = [
    (change(num_hidden_layers=3), "; missing encoder.layer.2."),
    (reweigh(lambda weights: {"other.weight": torch.zeros(2, 8)}), "unknown other.weight"),
    (reweigh(lambda weights: {KEY: weights[KEY][1:]}), f"{KEY} has shape (7, 8), not (8, 8)"),
    (reweigh(lambda weights: {TYPES: weights[TYPES][:1]}), "has shape (1, 8), not (2, 8)"),
    (change(vocab_size=5), "23 pieces"), (change(vocab_size=True), "vocab is True"),
    (change(hidden_act="relu"), "hidden_act is 'relu'"),
    (change(model_type="t5"), "is a 't5' model: choose one of bert"),
    (damage(lambda old: old[:len(old) // 2]), "model.safetensors is damaged or cut short"),
    (lambda folder: (folder / "tokenizer.json").unlink(), "save_pretrained"),
    (lambda folder: (folder / "config.json").unlink(), "config.json is no file"),
    (lambda folder: (folder / "model.safetensors").unlink(), "has no model.safetensors"),
    (sentence({}), "has the pooling '', which our model lacks"),
    (sentence({"pooling_mode": "mean"}, more=[("Evil\x1b[2J", "3")]), "has Evil")]
REFUSED = [
    ("nearest RUN LINES --query a --count 9", "--count is 9"),
    ("nearest RUN LINES --query a --count 1 --vectors 3.npy", "--vectors 3.npy has shape (3, 8)"),
    ("nearest RUN LINES --query a --count 1 --vectors NAN.npy", "finite numbers of shape (2, 8)"),
    ("nearest RUN LINES --query a --count 1 --vectors LINES", "LINES is no array of NumPy"),
    ("encode RUN RUN/model.pt --out v.npy", "model.pt is not UTF-8"),
    ("encode RUN no.txt --out v.npy", "no.txt"), ("encode RUN NONE --out v.npy", "NONE is empty"),
    ("encode RUN LINES --out LINES", "LINES will be an array of NumPy: name a file in .npy"),
    ("encode RUN LINES --out v.npy --batch 0", "--batch is 0"),
    ("encode NAN LINES --out v.npy", "its training has diverged"),
    ("encode BERT LINES --out v.npy", "interop"), ("export nothing new", "nothing"),
    ("export PRE new", "bert, cannot have kv_heads 1 (it has 2), norm_position pre (it has post)"),
    ("export RUN NAN", "NAN is there already"), ("import BERT RUN", "RUN is there already"),
    ("import LINES new", "LINES is no folder: give the one that has"),
    ("import /nowhere/at/all new", "no folder here")]  # can be no name: nobody is asked


@pytest.mark.parametrize("words, spoil, said", [
    *(("import BERT new", spoil, said) for spoil, said in SPOILT),
    *((words, None, said) for words, said in REFUSED)])
def test_what_cannot_be_done_is_refused_in_one_line(
        words, spoil, said, folder, tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = folder.rename("BERT")
    if spoil:
        spoil(folder)
    a_run(Path("RUN"))
    a_run(Path("PRE"), norm_position="pre", kv_heads=1, tied=False)
    model = a_run(Path("NAN"))
    model.embed.weight.data.fill_(float("nan"))
    save(model, Path("NAN/model.pt"))
    Path("LINES").write_text("a\nb\n", encoding="utf-8")
    Path("NONE").touch()
    np.save("3.npy", np.ones((3, 8)))
    np.save("NAN.npy", np.full((2, 8), np.nan))
    before = [(path, path.lstat().st_ino) for path in sorted(tmp_path.iterdir())]
    assert said in refused(program.main, words)
    assert [(path, path.lstat().st_ino) for path in sorted(tmp_path.iterdir())] == before


# ---- against transformers and sentence-transformers


def exported(source, folder):
    """A golden model by its name, or a run of these changes -> the run, its exported folder."""
    if isinstance(source, str):
        imported(source, folder / "run")
    else:
        a_run(folder / "run", **source)
    path = huggingface.export(folder / "run", folder / "made")
    return evaluate.open_run(folder / "run"), path


@pytest.mark.parametrize("source", [
    dict(pool="mean", head="transform"), dict(pool="max", position_offset=1),
    dict(pool="last", position_offset=2), *NAMES])
def test_an_exported_folder_opens_elsewhere_with_the_same_numbers(source, tmp_path):
    """In AutoModel, AutoTokenizer and SentenceTransformer."""
    import sentence_transformers
    import transformers
    made, path = exported(source, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    real = batch.attention_mask.bool()
    rows = [ids[mask].tolist() for ids, mask in zip(batch.input_ids, real)]
    assert rows == rows_of(made.tokenizer, TEXTS) and tokenizer.mask_token and tokenizer.unk_token
    gold = states(made.model, rows)
    kinds = [(transformers.AutoModel, dict(add_pooling_layer=False), "last_hidden_state", 0)]
    if made.model.config.head == "transform":
        kinds.append((transformers.AutoModelForMaskedLM, {}, "logits", 1))
    for kind, options, output, i in kinds:
        theirs, report = kind.from_pretrained(path, output_loading_info=True, **options)
        assert not report["missing_keys"] and not report["mismatched_keys"]
        with torch.no_grad():
            assert torch.allclose(gold[i], theirs.eval()(**batch)[output][real], atol=1e-5)
    vectors = sentence_transformers.SentenceTransformer(str(path), device="cpu").encode(TEXTS)
    assert np.allclose(vectors, encode(made, TEXTS), atol=1e-5)
    if isinstance(source, str):
        assert theirs.config.model_type == ("bert" if source == "bert" else "xlm-roberta")
        assert Tokenizer.read(path / "tokenizer.json").hash == made.tokenizer.hash


@pytest.fixture
def pairs(tmp_path):
    """A table of two columns."""
    words = itertools.product("the dog runs two cats red cat sees".split(), repeat=2)
    lines = [f"a {one} {other}\t{other} {one} .\n" for one, other in words]
    (tmp_path / "pairs.tsv").write_text("en\tde\n" + "".join(lines), encoding="utf-8")
    return tmp_path / "pairs.tsv"


@pytest.mark.parametrize("objective", ["mexma", "llm-jepa"])
def test_a_trained_run_has_the_same_vectors_in_sentence_transformers(objective, pairs, tmp_path):
    """Of short texts, of longer ones than --max-length, blank ones and names of special tokens."""
    from sentence_transformers import SentenceTransformer
    from transformers import AutoTokenizer
    words = (f"--objective {objective} --data {pairs} --steps 2 --batch 4 --max-length 16 "
             f"--vocab 300 --eval-limit 3 --device cpu --out {tmp_path / 'run'} "
             f"--cache {tmp_path / 'cache'}")
    assert exit_status(train.main, words.split()) == 0
    made = evaluate.open_run(tmp_path / "run")
    (prefix, suffix), other = made.first["affixes"]
    said = []
    path = huggingface.export(tmp_path / "run", tmp_path / "made", said.append)
    limit = 17 + len(prefix) + len(suffix)
    both = ", framed as the first column and as the others" if other != [prefix, suffix] else ""
    assert f"of 6 texts, 2 of them cut at {limit} tokens{both}, are those of the run" in said[0]
    many = "two red dogs see the old cat in a house on the beach when it rains and ".split() * 4
    texts = [" ".join(many[:count]) for count in (1, 4, 9, 14, 15, 16, 30, 60)]
    lengths = [len(ids) for ids in made.tokenizer.encode(texts)]
    assert min(lengths) <= 5 and max(lengths) >= 60
    library = SentenceTransformer(str(path), device="cpu")
    texts += ["", " ", " a dog ", "a [SEP] b", "[CLS][PAD] [PRED_1]"]
    assert np.allclose(library.encode(texts), encode(made, texts), atol=1e-5)
    assert library.max_seq_length == limit
    place = path / ("0_Transformer" if objective == "llm-jepa" else "")
    rows = AutoTokenizer.from_pretrained(place)(texts[:8], truncation=True)["input_ids"]
    assert rows == evaluate.ids_of(made.model, made.tokenizer, texts[:8], (prefix, suffix), 16)
    one = os.stat(place / "model.safetensors")
    assert one.st_ino == os.stat(path / "model.safetensors").st_ino  # the weights lie there once
    card = (path / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlibrary_name: ") and f"- {objective}\n---\n" in card
    assert f"--objective {objective}" in card and "geometry/rankme " in card
    assert f"has {limit} tokens" in card and "3 rows of" in card


@pytest.mark.parametrize("source", [dict(pair="sep-sep", position_offset=1), dict(), *NAMES])
def test_a_row_of_two_texts_is_the_familys_and_has_its_states(source, tmp_path):
    """[CLS] a [SEP] b [SEP]: with token types in BERT, with two [SEP] between in XLM-R."""
    import transformers
    made, path = exported(source, tmp_path)
    config = made.model.config
    special = made.tokenizer.special
    first, second = made.tokenizer.encode(TEXTS[:2])
    row = [special.cls, *first, *[special.sep] * (1 + (config.pair == "sep-sep"))]
    types = np.repeat([0, config.pair == "segments"], [len(row), len(second) + 1])
    row = np.array([*row, *second, special.sep])
    # Fine-tuning makes the same row and reads the same states.
    tuned = finetune.Finetuned(made.model, 2, False, special.sep).eval()
    middle = finetune.between(made)
    assert np.array_equal(finetune.pair_row(first, second, special, middle, 20), row)
    ours = tuned.states(Packed.of([row]))
    batch = dict(input_ids=torch.tensor(row)[None], token_type_ids=torch.tensor(types)[None])
    folders = [path]
    if isinstance(source, str):
        folders.append(GOLDEN / source)
        assert config.pair == ("segments" if source == "bert" else "sep-sep")
    else:
        theirs = transformers.AutoTokenizer.from_pretrained(path)(*TEXTS[:2], return_tensors="pt")
        assert torch.equal(theirs["input_ids"], batch["input_ids"])
    for folder in folders:
        theirs = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()
        with torch.no_grad():
            assert torch.allclose(ours, theirs(**batch).last_hidden_state[0], atol=1e-5)


@pytest.mark.parametrize("pooling, pool", [
    ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
    ({"pooling_mode": "lasttoken"}, "last")])
def test_a_folder_of_sentence_transformers_trains_and_goes_back_as_it_came(
        pooling, pool, folder, pairs, tmp_path, capsys):
    from sentence_transformers import SentenceTransformer
    sentence(pooling)(folder)
    library = SentenceTransformer(str(folder), device="cpu")
    texts = [*TEXTS, "the dog " * 9]
    assert run("import", folder, tmp_path / "run") == 0
    said = f"vectors: pooling {pool} of up to 7 tokens, scaled to length 1, as its modules.json say"
    assert said in capsys.readouterr().out
    made = evaluate.open_run(tmp_path / "run")
    assert np.allclose(encode(made, texts), library.encode(texts), atol=1e-5)
    assert made.config["max_length"] == 5
    words = (f"--objective contrastive --init {tmp_path / 'run'} --data {pairs} --steps 1 "
             f"--batch 4 --max-length 5 --eval-limit 2 --device cpu --out {tmp_path / 'out'} "
             f"--cache {tmp_path / 'cache'}")
    assert exit_status(train.main, words.split()) == 0
    library.save(str(tmp_path / "saved"))  # in the spelling of the version that is here
    for name in ("run", "out"):
        folder = huggingface.export(tmp_path / name, tmp_path / f"{name}-back")
        back = SentenceTransformer(str(folder), device="cpu")
        assert [type(module) for module in back] == [type(module) for module in library]
        assert back[1].get_config_dict() == library[1].get_config_dict()
        assert back.max_seq_length == library.max_seq_length == 7
        vectors = encode(evaluate.open_run(tmp_path / name), texts)
        assert np.allclose(back.encode(texts), vectors, atol=1e-5)
    for name in ("run-back", "out-back", "saved"):
        config = huggingface.read_model(tmp_path / name).model.config
        assert (config.pool, config.max_tokens, config.normalize) == (pool, 7, True)


def test_vectors_and_batches_are_seen_with_the_cores_packages_alone():
    """What encode, nearest and inspect import."""
    missing = ["safetensors", "scipy", "sklearn", "matplotlib", "transformers"]
    code = (f"import sys; sys.modules.update(dict.fromkeys({missing})); "
            "import interop.__main__, results.__main__, results.inspect")
    subprocess.run([sys.executable, "-c", code], cwd=GOLDEN.parent.parent, check=True)
