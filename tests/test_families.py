"""Decoders of other libraries: the same numbers out of the same weights; their chats; folders."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
from golden import decoders
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, models, pre_tokenizers, trainers
from tokenizers import decoders as byte_decoders

import evaluate
import train
from corpora import EvaluationRows
from corpora.program import BadInput, exit_status
from data import ROLES, Example, Tokenizer, rows_of
from interop import huggingface
from interop.families import FAMILIES
from interop.huggingface import build, part_shapes
from model import Model, Packed
from objectives import LlmJepa, Ntp

FOLDER = Path(__file__).parent / "golden"
GOLDEN = {version: json.loads((FOLDER / f"decoders-{version}.json").read_text(encoding="utf-8"))
          for version in "45"}


def settings_of(shape, **changes):
    return GOLDEN["5"][shape]["config"] | changes


def weights(settings):
    """{their name: weight} of the model of a config.json, as golden/decoders.py makes them."""
    family = FAMILIES[settings["model_type"]]
    model = Model(family.config(settings))
    around = settings["model_type"] != "gemma2"  # Gemma's norms multiply by 1 + weight
    made = {}
    for ours, theirs in family.names(model.config).items():
        for name, shape in zip(theirs, part_shapes(model, ours, len(theirs))):
            made[name] = torch.from_numpy(decoders.weight(name, shape))
            made[name] += "norm" in name and around
    return made


def made_of(settings):
    """The Model of a config.json with such weights."""
    family = FAMILIES[settings["model_type"]]
    files = {name: lambda weight=weight: weight for name, weight in weights(settings).items()}
    return build("test", family, family.config(settings), files, settings)


# ---- the same numbers


@pytest.mark.parametrize("shape", decoders.SHAPES)
@pytest.mark.parametrize("version", "45")
def test_states_and_logits_are_those_of_transformers(shape, version):
    """Out of configs as its versions 4 and 5 write them."""
    gold = GOLDEN[version][shape]
    model = made_of(gold["config"])
    with torch.no_grad():
        states = model(Packed.of([decoders.TOKENS[:3], decoders.TOKENS], causal=True))[3:]
        assert (states - torch.tensor(gold["states"])).abs().max() < 1e-5
        assert (model.logits(states[-1:]) - torch.tensor(gold["logits"])).abs().max() < 1e-5


@pytest.mark.parametrize("shape, change, message", [
    ("llama", dict(rope_parameters=None, rope_scaling=dict(type="yarn", factor=4.0)), "is 'yarn'"),
    ("llama", dict(mlp_bias=True), "mlp_bias is True"),
    ("qwen3", dict(attention_bias=True), "attention_bias is True"),
    ("gemma2", dict(hidden_activation="silu"), "hidden_activation is 'silu'"),
    ("llama", dict(num_key_value_heads=3), "kv_heads 3")])
def test_what_our_model_cannot_express_is_refused_by_name(shape, change, message):
    settings = settings_of(shape, **change)
    with pytest.raises(BadInput, match=message):
        FAMILIES[settings["model_type"]].config(settings)


@pytest.mark.parametrize("shape, change, longest", [
    ("gemma2", dict(), 32), ("mistral", dict(), 40), ("mistral", dict(sliding_window=None), 64),
    ("qwen2", dict(sliding_window=30), 64)])
def test_rows_are_no_longer_than_a_sliding_window(shape, change, longest):
    assert FAMILIES[shape].config(settings_of(shape, **change)).max_positions == longest


# ---- their chats

IM = "<|im_start|>"
ROW = {  # family: its special tokens, and what its template makes of one exchange: of a system text
    # before it, of none, of the user's turn and of the assistant's
    "llama-3": ("<|begin_of_text|> <|eot_id|> <|start_header_id|> <|end_header_id|>",
                "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{S}<|eot_id|>",
                "<|begin_of_text|>", "<|start_header_id|>user<|end_header_id|>\n\n{U}<|eot_id|>",
                "<|start_header_id|>assistant<|end_header_id|>\n\n{A}<|eot_id|>"),
    "qwen2": ("<|im_start|> <|im_end|> <|endoftext|>", IM + "system\n{S}<|im_end|>\n", "",
              IM + "user\n{U}<|im_end|>\n", IM + "assistant\n{A}<|im_end|>\n"),
    "qwen3": ("<|im_start|> <|im_end|> <|endoftext|> <think> </think>",
              IM + "system\n{S}<|im_end|>\n", "", IM + "user\n{U}<|im_end|>\n",
              IM + "assistant\n<think>\n\n</think>\n\n{A}<|im_end|>\n"),
    "gemma": ("<bos> <eos> <pad> <start_of_turn> <end_of_turn>", None, "<bos>",
              "<start_of_turn>user\n{U}<end_of_turn>\n",
              "<start_of_turn>model\n{A}<end_of_turn>\n"),
    "olmo2": ("<|endoftext|> <|pad|> <|endofprompt|> <|im_start|> <|im_end|>",
              "<|endoftext|><|system|>\n{S}\n", "<|endoftext|>", "<|user|>\n{U}\n",
              "<|assistant|>\n{A}<|endoftext|>"),
    "r1-distill": ("<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> "
                   "<｜User｜> <｜Assistant｜> <think>",
                   "<｜begin▁of▁sentence｜>{S}", "<｜begin▁of▁sentence｜>", "<｜User｜>{U}",
                   "<｜Assistant｜>{A}<｜end▁of▁sentence｜>"),
}
TEXTS = {"S": "Answer with a pattern.", "U": "lines that have a vowel", "A": "(.*[aeiou].*)"}
# line breaks never join the word behind them
CUT = r"\s*[\r\n]+| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"


def tokenizer_of(family, marks=()):
    """A byte-level tokenizer with a family's special tokens that cuts texts as theirs do."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(CUT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    inner.decoder = byte_decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    inner.train_from_iterator(
        [*TEXTS.values(), "user\n\nassistant\n\nsystem\nuser\n"] * 3, trainer)
    names = [*ROW[family][0].split(), *marks]
    inner.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    return Tokenizer(inner)


def written(tokenizer, text):
    """The ids of a text in which special tokens are spelled out."""
    inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
    return inner.encode(text, add_special_tokens=False).ids


def example_of(tokenizer, with_system):
    """(text, answer, system text) as ids, or the first two."""
    ids = tokenizer.encode([TEXTS[key] for key in "UAS"])
    return Example(ids if with_system else ids[:2])


@pytest.mark.parametrize("family", ROW)
@pytest.mark.parametrize("with_system", [False, True])
def test_a_row_of_next_token_prediction_is_what_the_chat_template_writes(
        family, with_system, monkeypatch):
    _, system, plain, user, assistant = ROW[family]
    tokenizer = tokenizer_of(family)
    special = tokenizer.special
    if with_system and system is None:
        assert special.chat.system is None
        return
    example = example_of(tokenizer, with_system)
    opening = system if with_system else plain
    gold = written(tokenizer, (opening + user + assistant).format(**TEXTS))
    batch = Ntp.collate([example], None, Ntp.Config(), special)
    targets = batch["targets"].tolist()
    row = [*batch["packed"].tokens.tolist(), targets[-1]]
    assert row == gold[:len(row)]
    assert tokenizer.inner.decode(gold[len(row):]) in ("", "\n")
    assert targets == [*example[1], special.sep]

    def generate(model, rows, stop, *_, **__):  # and an answer is asked for behind its header
        assert rows == [row[:-len(targets)]] and stop == special.sep
        return [[]], [True]

    monkeypatch.setattr(evaluate, "generate", generate)
    model = SimpleNamespace(config=SimpleNamespace(max_positions=128, pool="last"))
    rows = EvaluationRows("x", {"user": [TEXTS["U"]] * 2, "assistant": [TEXTS["A"]] * 2},
                          [TEXTS["S"]] * 2 if with_system else None)
    evaluate.Evaluation(model, tokenizer, rows).answers_of(slice(1))


@pytest.mark.parametrize("family", ROW)
def test_the_views_of_llm_jepa_are_single_turns_with_the_preds_inside_the_users(family):
    _, _, plain, user, assistant = ROW[family]
    tokenizer = tokenizer_of(family, ROLES[5:7])
    special = tokenizer.special
    opens = tokenizer.inner.id_to_token(special.cls)
    turns = []
    for turn, text in ((user, TEXTS["U"] + "[PRED_2][PRED_1]"), (assistant, TEXTS["A"])):
        turn = opens + (plain + turn).removeprefix(opens)
        turns.append(written(tokenizer, turn.format(U=text, A=text)))
    config = LlmJepa.Config(predictors=2, mode="three-row")
    example = example_of(tokenizer, False)
    batch = LlmJepa.collate([example], np.random.default_rng(0), config, special)
    packed = batch["packed"]
    _, *views = packed.tokens.split(packed.cu_seqlens.diff().tolist())
    for view, turn in zip(views, turns):
        assert view.tolist() == turn[:len(view)]
    assert views[0].tolist()[-2:] == list(special.preds[::-1])
    assert views[1].tolist()[-len(example[1]):] == example[1].tolist()
    for view, affixes, key in zip(views, LlmJepa.affixes(config, special), "UA"):
        assert rows_of(tokenizer, [TEXTS[key]], *affixes) == [view.tolist()]


# ---- folders


def folder_of(settings, path, tokenizer, template=None):
    """A Hugging Face folder, and its run folder beside it."""
    path.mkdir()
    if template:
        text = json.dumps({"chat_template": template})
        (path / "tokenizer_config.json").write_text(text, encoding="utf-8")
    (path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    save_file(weights(settings), path / "model.safetensors")
    tokenizer.save(path / "tokenizer.json")
    huggingface.import_model(path, path.with_name("run"))


@pytest.mark.parametrize("shape", decoders.SHAPES)
def test_a_decoder_is_exported_as_its_family_and_comes_back_bit_for_bit(shape, tmp_path):
    settings = settings_of(shape, vocab_size=340)
    folder_of(settings, tmp_path / "theirs", tokenizer_of("llama-3"))
    huggingface.export(tmp_path / "run", tmp_path / "ours")
    found = json.loads((tmp_path / "ours" / "config.json").read_text(encoding="utf-8"))
    assert found["model_type"] == settings["model_type"].replace("mistral", "llama")
    theta = settings["rope_parameters"]["rope_theta"]
    assert found["rope_parameters"]["rope_theta"] == found["rope_theta"] == theta
    before, after = (huggingface.read_model(tmp_path / name).model for name in ("theirs", "ours"))
    assert before.config == after.config
    state = after.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in before.state_dict().items())
    if shape in ("llama-3.1", "gemma2", "qwen2"):  # and theirs reads it
        from transformers import AutoModelForCausalLM
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours",
                                                      attn_implementation="eager").float()
        with torch.no_grad():
            gold = theirs(torch.tensor([decoders.TOKENS]), output_hidden_states=True)
            states = after(Packed.of([decoders.TOKENS], causal=True))
        assert (gold.hidden_states[-1][0] - states).abs().max() < 1e-5


HEADER = "'<|start_header_id|>' + {} + '<|end_header_id|>\n\n'"
CHAT = ("{{ bos_token }}{% for m in messages %}{{ " + HEADER.format("m.role") + " + m.content + "
        "'<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}{{ "
        + HEADER.format("'assistant'") + " }}{% endif %}")


def check_answers(name, path):
    """transformers writes from a chat what `evaluate.generate` writes from the run's own row, and
    its tokenizer adds neither [PRED] nor [SEP] to a text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    run = evaluate.open_run(name)
    special = run.tokenizer.special
    chat = special.chat
    theirs = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert not {special.sep, *special.preds} & set(tokenizer("a dog")["input_ids"])
    assert theirs.generation_config.eos_token_id == special.sep
    for system in (None, "Answer with a pattern."):
        texts = ["lines that have a dog", " two  'vowels' (.*) "]
        rows = rows_of(run.tokenizer, texts, chat.user, [*chat.end, *chat.assistant],
                       system and [system] * 2)
        turns = [dict(role="system", content=system)] if system else []
        chats = [[*turns, dict(role="user", content=text)] for text in texts]
        batch = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt")
        found = [ids[mask.bool()].tolist() for ids, mask in zip(*batch.values())]
        assert found == rows
        width = batch["input_ids"].shape[1]
        answers = theirs.generate(**batch, max_new_tokens=12)[:, width:].tolist()
        gold, stopped = evaluate.generate(run.model, rows, special.sep, 12)
        for answer, ids, stop in zip(answers, gold, stopped, strict=True):
            ids = [*ids, special.sep] if stop else ids
            assert answer[:len(ids)] == ids


@pytest.mark.parametrize("family", ROW)
def test_without_a_template_of_its_own_a_family_gets_one_that_writes_its_rows(family):
    from transformers.utils.chat_template_utils import render_jinja_template
    _, system, plain, user, assistant = ROW[family]
    template = huggingface.plain_template(tokenizer_of(family))
    for opening in filter(None, (system, plain)):
        roles = ["system", "user"] if opening == system else ["user"]
        chat = [dict(role=role, content=TEXTS[role[0].upper()]) for role in roles]
        found = render_jinja_template([chat], chat_template=template, add_generation_prompt=True)
        asked, _, _ = assistant.partition("{A}")
        assert found[0] == [(opening + user + asked).format(**TEXTS)]


def test_a_decoder_of_ours_answers_in_transformers_as_here(tmp_path):
    rows = [f"lines with {i}\t(.*{i}.*)\n" for i in range(80)]
    (tmp_path / "a.tsv").write_text("english\tregex\n" + "".join(rows), encoding="utf-8")
    words = (f"--objective llm-jepa --data {tmp_path / 'a.tsv'} --vocab 300 --steps 30 --batch 8 "
             f"--eval-limit 3 --device cpu --out {tmp_path / 'run'} --cache {tmp_path / 'cache'}")
    assert exit_status(train.main, words.split()) == 0
    check_answers(tmp_path / "run", huggingface.export(tmp_path / "run", tmp_path / "made"))


def test_a_decoder_without_preds_trains_with_lora_on_chats_and_is_exported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = tokenizer_of("llama-3")
    count = tokenizer.vocab
    settings = settings_of("llama-3.1", vocab_size=count, max_position_embeddings=256)
    folder_of(settings, Path("llama"), tokenizer, CHAT)
    with open("chats.jsonl", "w", encoding="utf-8") as file:
        for word in range(80):
            turns = {"system": TEXTS["S"], "user": f"lines with {word}", "assistant": f"(.*{word})"}
            messages = [dict(role=role, content=text) for role, text in turns.items()]
            file.write(json.dumps({"messages": messages}) + "\n")
    words = ("--objective llm-jepa --init run --data chats.jsonl --lora-rank 8 --steps 3 --batch 4 "
             "--chat system --max-length 60 --eval-limit 3 --device cpu --out out")
    assert exit_status(train.main, words.split()) == 0
    before = evaluate.open_run("run").model
    after = evaluate.open_run("out")
    model = after.model
    assert model.config.vocab == count + 1 and after.tokenizer.special.preds == (count,)
    assert torch.equal(before.embed.weight, model.embed.weight[:-1])
    assert not torch.equal(before.blocks[0].mlp.up.weight, model.blocks[0].mlp.up.weight)
    for name in ("run", "out"):
        path = huggingface.export(name, f"{name}-exported")
        again = huggingface.read_model(path)
        weight = evaluate.open_run(name).model.embed.weight
        assert torch.equal(again.model.embed.weight, weight) and again.template == CHAT
        check_answers(name, path)
