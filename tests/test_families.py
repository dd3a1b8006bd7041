"""Decoders of other libraries: the same states and logits as theirs, out of the same weights; their chats; folders that they read."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from golden import decoders
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers
from tokenizers import decoders as byte_decoders

import checkpoints
import data
import evaluate
import scores
import train
from checkpoints import build, part_rows
from data import BadInput
from evaluate import rows_of
from families import FAMILIES, spell
from model import Model, Packed
from objectives import LlmJepa, Ntp

GOLDEN = {kind: json.loads((Path(__file__).parent / "golden" / f"decoders-{kind}.json").read_text(encoding="utf-8")) for kind in "45"}
OPENELM = dict(model_type="openelm", vocab_size=20, model_dim=16, head_dim=4, num_transformer_layers=3, num_query_heads=[2, 4, 6], num_kv_heads=[1, 2, 2],
               ffn_multipliers=[0.5, 1.1, 2.0], ffn_dim_divisor=4, max_context_length=64, rope_freq_constant=300, normalize_qk_projections=True)


def weights(settings):
    """{their name: weight} of the model of a config.json, as golden/decoders.py makes them."""
    family = FAMILIES[settings["model_type"]]
    model, made = Model(family.config(settings)), {}
    for ours, theirs in family.names(model.config).items():
        own = model.state_dict()[ours]
        for name, rows in zip(theirs, part_rows(model, ours, len(theirs)) if len(theirs) > 1 else [len(own)]):
            made[name] = torch.from_numpy(decoders.weight(name, (rows, *own.shape[1:]))) + ("norm" in name and settings["model_type"] != "gemma2")
    return made


def made_of(settings):
    """The Model of a config.json with such weights."""
    family, files = FAMILIES[settings["model_type"]], {name: lambda weight=weight: weight for name, weight in weights(settings).items()}
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


@pytest.mark.parametrize("shape", decoders.SHAPES)
def test_the_stored_numbers_are_those_of_the_transformers_that_is_here(shape):
    pytest.importorskip("transformers")
    theirs = decoders.theirs(shape)
    with torch.no_grad():
        states = theirs(torch.tensor([decoders.TOKENS]), output_hidden_states=True).hidden_states[-1][0]
    assert (states - torch.tensor(GOLDEN["5"][shape]["states"])).abs().max() < 1e-5


def plain_openelm(weights, tokens):
    """OpenELM written out, in float64, one layer and one head at a time -> states (T, D), logits (T, V)."""
    w = {name.removeprefix("transformer."): weight.double() for name, weight in weights.items()}
    norm = lambda x, scale: x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale
    x, size, places = w["token_embeddings.weight"][tokens], OPENELM["head_dim"], torch.arange(len(tokens), dtype=torch.float64)
    angle = places[:, None] * OPENELM["rope_freq_constant"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)

    def turn(x):
        left, right = x[:, :size // 2], x[:, size // 2:]
        return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], 1)

    for i, (queries, keys, share) in enumerate(zip(OPENELM["num_query_heads"], OPENELM["num_kv_heads"], OPENELM["ffn_multipliers"])):
        part = {name.removeprefix(f"layers.{i}."): weight for name, weight in w.items()}
        heads = (norm(x, part["attn_norm.weight"]) @ part["attn.qkv_proj.weight"].T).split(size, 1)
        q, k, v = heads[:queries], heads[queries:queries + keys], heads[queries + keys:]
        mixed = []
        for head in range(queries):
            own = head * keys // queries
            scores = turn(norm(q[head], part["attn.q_norm.weight"])) @ turn(norm(k[own], part["attn.k_norm.weight"])).T / size ** 0.5
            mixed.append(scores.masked_fill(places[None] > places[:, None], -torch.inf).softmax(1) @ v[own])
        x = x + torch.cat(mixed, 1) @ part["attn.out_proj.weight"].T
        gate, up = (norm(x, part["ffn_norm.weight"]) @ part["ffn.proj_1.weight"].T).chunk(2, 1)
        assert gate.shape[1] == {0.5: 8, 1.1: 16, 2.0: 32}[share]        # 17.6 becomes 16: a multiple of 4, less than a tenth below
        x = x + (gate / (1 + (-gate).exp()) * up) @ part["ffn.proj_2.weight"].T
    x = norm(x, w["norm.weight"])
    return x, x @ w["token_embeddings.weight"].T


def test_openelm_equals_its_definition_written_out_in_float64():
    model = made_of(OPENELM).double()
    with torch.no_grad():
        states, logits = plain_openelm(weights(OPENELM), torch.tensor(decoders.TOKENS))
        found = model(Packed.of([decoders.TOKENS], causal=True))
        assert (found - states).abs().max() < 1e-12 and (model.logits(found) - logits).abs().max() < 1e-12


@pytest.mark.parametrize("shape, change, message", [
    ("llama", dict(rope_parameters=None, rope_scaling=dict(type="yarn", factor=4.0)), "rope_type is 'yarn'"),
    ("llama", dict(rope_parameters=dict(rope_type="dynamic", factor=2.0)), "rope_type is 'dynamic'"),
    ("llama", dict(hidden_act="gelu"), "hidden_act is 'gelu'"), ("llama", dict(mlp_bias=True), "mlp_bias is True"),
    ("qwen3", dict(attention_bias=True), "attention_bias is True"), ("gemma2", dict(hidden_activation="silu"), "hidden_activation is 'silu'"),
    ("llama", dict(num_key_value_heads=3), "kv_heads 3"), ("llama", dict(vocab_size="20"), "vocab_size is '20'")])
def test_what_our_model_cannot_express_is_refused_by_name(shape, change, message):
    with pytest.raises(BadInput, match=message):
        FAMILIES[GOLDEN["5"][shape]["config"]["model_type"]].config(GOLDEN["5"][shape]["config"] | change)


def test_rows_are_no_longer_than_a_sliding_window():
    longest = lambda shape, **change: FAMILIES[shape].config(GOLDEN["5"][shape]["config"] | change).max_length
    assert longest("gemma2") == 32 and longest("mistral") == 40 and longest("mistral", sliding_window=None) == 64
    assert longest("qwen2", sliding_window=30) == 64 and longest("qwen2", sliding_window=30, use_sliding_window=True) == 30


# ---- their chats

ROW = {  # family: its special tokens, what its template makes of one exchange with a system text, and of one without
    "llama-3": ("<|begin_of_text|> <|eot_id|> <|start_header_id|> <|end_header_id|>",
                "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{S}<|eot_id|>", "<|begin_of_text|>",
                "<|start_header_id|>user<|end_header_id|>\n\n{U}<|eot_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\n{A}<|eot_id|>"),
    "qwen2": ("<|im_start|> <|im_end|> <|endoftext|>", "<|im_start|>system\n{S}<|im_end|>\n", "", "<|im_start|>user\n{U}<|im_end|>\n",
              "<|im_start|>assistant\n{A}<|im_end|>\n"),
    "qwen3": ("<|im_start|> <|im_end|> <|endoftext|> <think> </think>", "<|im_start|>system\n{S}<|im_end|>\n", "", "<|im_start|>user\n{U}<|im_end|>\n",
              "<|im_start|>assistant\n<think>\n\n</think>\n\n{A}<|im_end|>\n"),
    "gemma": ("<bos> <eos> <pad> <start_of_turn> <end_of_turn>", None, "<bos>", "<start_of_turn>user\n{U}<end_of_turn>\n",
              "<start_of_turn>model\n{A}<end_of_turn>\n"),
    "olmo2": ("<|endoftext|> <|pad|> <|endofprompt|> <|im_start|> <|im_end|>", "<|endoftext|><|system|>\n{S}\n", "<|endoftext|>", "<|user|>\n{U}\n",
              "<|assistant|>\n{A}<|endoftext|>"),
    "r1-distill": ("<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <think> </think>", "<｜begin▁of▁sentence｜>{S}",
                   "<｜begin▁of▁sentence｜>", "<｜User｜>{U}", "<｜Assistant｜>{A}<｜end▁of▁sentence｜>"),
}
TEXTS = {"S": "Answer with a pattern.", "U": "lines that have a vowel", "A": "(.*[aeiou].*)"}


def tokenizer_of(family, marks=()):
    """A byte-level tokenizer with a family's special tokens that cuts texts as theirs do: line breaks never join the word behind them."""
    tokenizer = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(r"\s*[\r\n]+| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = byte_decoders.ByteLevel()
    tokenizer.train_from_iterator([*TEXTS.values(), "user\n\nassistant\n\nsystem\nuser\n"] * 3, trainers.BpeTrainer(
        vocab_size=320, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in [*ROW[family][0].split(), *marks]])
    return tokenizer


@pytest.mark.parametrize("family", ROW)
def test_a_row_of_next_token_prediction_is_what_the_chat_template_writes(family):
    _, system, plain, user, assistant = ROW[family]
    tokenizer = tokenizer_of(family)
    special, ids = data.special(tokenizer), dict(zip("SUA", data.encode(tokenizer, list(TEXTS.values()))))
    for opening in (plain, system):
        example = (ids["U"], ids["A"], ids["S"])[:2 + (opening is system)]
        if opening is None:
            assert special.chat.system is None
            continue
        written = tokenizer.encode((opening + user + assistant).format(**TEXTS), add_special_tokens=False).ids
        batch = Ntp.collate([example], None, Ntp.Config(), special)
        row = [*batch["packed"].tokens.tolist(), int(batch["targets"][-1])]
        assert row == written[:len(row)] and tokenizer.decode(written[len(row):]) in ("", "\n")
        assert batch["targets"].tolist() == [*ids["A"], special.sep]
        assert [row[place + 1] for place in batch["labels"].tolist()] == batch["targets"].tolist()
        every = Ntp.collate([example], None, Ntp.Config(labels="all"), special)
        assert every["targets"].tolist() == row[1:-1] and every["labels"].tolist() == list(range(len(row) - 2))


@pytest.mark.parametrize("family", ROW)
def test_the_chat_rows_are_those_of_transformers_own_rendering(family):
    transformers = pytest.importorskip("transformers")
    tokenizer, (_, system, plain, user, assistant) = tokenizer_of(family), ROW[family]
    text = lambda text, role: "{{ " + json.dumps(text or "").replace(f"{{{role}}}", "\" + m['content'] + \"") + " }}"
    template = ("{%- if messages[0]['role'] != 'system' %}" + text(plain, "") + "{%- endif %}{%- for m in messages %}{%- if m['role'] == 'system' %}"
                + text(system, "S") + "{%- elif m['role'] == 'user' %}" + text(user, "U") + "{%- else %}" + text(assistant, "A") + "{%- endif %}{%- endfor %}")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)
    turns = [dict(role=role, content=TEXTS[key]) for role, key in (("system", "S"), ("user", "U"), ("assistant", "A"))][system is None:]
    text, code, header = data.encode(tokenizer, [TEXTS[key] for key in "UAS"])
    row = Ntp.collate([(text, code, header)[:2 + (system is not None)]], None, Ntp.Config(), data.special(tokenizer))["packed"].tokens.tolist()
    assert theirs.apply_chat_template(turns, tokenize=True, return_dict=False)[:len(row)] == row


@pytest.mark.parametrize("family", ROW)
def test_the_views_of_llm_jepa_are_single_turns_with_the_preds_inside_the_users(family):
    tokenizer, (_, _, plain, user, assistant) = tokenizer_of(family, data.ROLES[5:7]), ROW[family]
    special, (text, code) = data.special(tokenizer), data.encode(tokenizer, [TEXTS["U"], TEXTS["A"]])
    opens = tokenizer.decode([special.cls], skip_special_tokens=False)
    fill = lambda turn, text: opens + (plain + turn).removeprefix(opens).replace("{U}", text).replace("{A}", text)
    written = lambda turn, text: tokenizer.encode(fill(turn, text), add_special_tokens=False).ids
    config = LlmJepa.Config(predictors=2, mode="three-row")
    batch = LlmJepa.collate([(text, code)], np.random.default_rng(0), config, special)
    _, *views = batch["packed"].tokens.split(batch["packed"].rows.diff().tolist())
    whole = written(user, TEXTS["U"] + "[PRED_2][PRED_1]"), written(assistant, TEXTS["A"])
    for view, turn in zip(views, whole):
        assert view.tolist() == turn[:len(view)]
    assert views[0].tolist()[-2:] == list(special.preds[::-1]) and views[1].tolist()[-len(code):] == code.tolist()
    front, back = LlmJepa.frames(config, special)
    assert rows_of(tokenizer, [TEXTS["U"]], None, front) == [views[0].tolist()] and rows_of(tokenizer, [TEXTS["A"]], None, back) == [views[1].tolist()]


@pytest.mark.parametrize("family", ROW)
def test_answers_are_asked_for_and_scored_behind_the_assistants_header(family, monkeypatch):
    tokenizer = tokenizer_of(family)
    special, texts = data.special(tokenizer), [TEXTS[key] for key in "UAS"]
    ids, headers = data.encode(tokenizer, texts), [texts[2]] if special.chat.system is not None else None
    row = Ntp.collate([tuple(ids[:2 + bool(headers)])], None, Ntp.Config(), special)["packed"].tokens.tolist()
    model, asked = made_of(GOLDEN["5"]["llama"]["config"] | dict(vocab_size=special.vocab, max_position_embeddings=128)), []
    monkeypatch.setattr(evaluate, "generate", lambda model, rows, stop, *_, **__: asked.append((rows, stop)) or ([[]], [True]))
    monkeypatch.setattr(scores, "score_branches", lambda model, questions: asked.append(questions) or [])
    evaluate.answer(model, tokenizer, texts[:1], texts[1:2], headers=headers, header=99)
    scores.option_likelihoods(model, tokenizer, texts[:1], [[texts[1]]], headers)
    prompt, answer = row[:-len(ids[1])], [*ids[1], special.sep]
    assert asked == [([prompt], special.sep), [(prompt, [answer], 0)]]


# ---- folders


def folder_of(settings, path, tokenizer):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    save_file({name: weight.contiguous() for name, weight in weights(settings).items()}, path / "model.safetensors")
    data.write_tokenizer(tokenizer, path / "tokenizer.json")
    return path


@pytest.mark.parametrize("shape", ["llama", "llama-3.1", "llama-linear", "llama-biased", "mistral", "qwen2", "qwen3", "olmo2", "gemma2"])
def test_a_decoder_is_exported_as_its_family_and_comes_back_bit_for_bit(shape, tmp_path):
    settings = GOLDEN["5"][shape]["config"] | dict(vocab_size=340)
    folder_of(settings, tmp_path / "theirs", tokenizer_of("llama-3"))
    checkpoints.export(tmp_path / "theirs", tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "config.json").read_text(encoding="utf-8"))
    assert written["model_type"] == settings["model_type"].replace("mistral", "llama")
    assert written["rope_parameters"]["rope_theta"] == written["rope_theta"] == settings["rope_parameters"]["rope_theta"]
    before, after = (checkpoints.read(tmp_path / name).model for name in ("theirs", "ours"))
    assert before.config == after.config and all(torch.equal(weight, after.state_dict()[name]) for name, weight in before.state_dict().items())
    if shape in ("llama-3.1", "gemma2", "qwen2"):                        # and theirs reads it
        transformers = pytest.importorskip("transformers")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").float()
        with torch.no_grad():
            states = theirs(torch.tensor([decoders.TOKENS]), output_hidden_states=True).hidden_states[-1][0]
            assert (states - after(Packed.of([decoders.TOKENS], causal=True))).abs().max() < 1e-5


def test_what_no_decoder_of_theirs_has_is_not_exported():
    special = data.special(tokenizer_of("llama-3"))
    for config, message in ((made_of(OPENELM).config, "shapes"), (made_of(GOLDEN["5"]["olmo2"]["config"] | dict(vocab_size=20)).config, None)):
        if message:
            with pytest.raises(BadInput, match=f"the nearest, llama, cannot have {message}"):
                spell(config, special)
        else:
            assert spell(config, special)[1]["architectures"] == ["Olmo2ForCausalLM"]


def test_a_pretrained_decoder_trains_with_lora_on_chats_and_the_run_is_evaluated_and_exported(tmp_path, capsys):
    """train.py --objective llm-jepa --init FOLDER --data chats.jsonl --lora-rank 8, from a folder without [PRED] tokens."""
    tokenizer = tokenizer_of("llama-3")
    count = data.special(tokenizer).vocab
    folder_of(GOLDEN["5"]["llama-3.1"]["config"] | dict(vocab_size=count, max_position_embeddings=256), tmp_path / "llama", tokenizer)
    turns = [dict(messages=[dict(role="system", content=TEXTS["S"]), dict(role="user", content=f"lines that have {word}"),
                            dict(role="assistant", content=f"(.*{word}.*)")]) for word in "a dog,the cat,seven,no vowel,one or two".split(",")]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns * 8), encoding="utf-8")
    words = ["--objective", "llm-jepa", "--init", str(tmp_path / "llama"), "--data", str(tmp_path / "chats.jsonl"), "--lora-rank", "8", "--steps", "3",
             "--chat", "shared-header", "--batch", "4", "--cut", "60", "--eval-limit", "3", "--device", "cpu", "--cache", str(tmp_path / "cache")]
    assert train.main([*words, "--out", str(tmp_path / "run")]) == 0, capsys.readouterr().err
    assert "[PRED_1] added to the tokenizer" in capsys.readouterr().out
    before, after = checkpoints.read(tmp_path / "llama").model, checkpoints.open_model(tmp_path / "run")
    assert after.model.config.vocab == count + 1 and data.special(after.tokenizer).preds == (count,)
    assert torch.equal(before.embed.weight, after.model.embed.weight[:-1]) and not torch.equal(before.blocks[0].up.weight, after.model.blocks[0].up.weight)
    front = [after.tokenizer.id_to_token(place) for place in after.frame[0]]
    assert front[0] == "<|start_header_id|>" and after.tokenizer.id_to_token(after.frame[1][0]) == "[PRED_1]"
    assert evaluate.main([str(tmp_path / "run"), "--device", "cpu", "--limit", "3"]) == 0
    checkpoints.export(tmp_path / "run", tmp_path / "exported")
    assert torch.equal(checkpoints.read(tmp_path / "exported").model.embed.weight, after.model.embed.weight)
    assert train.main([*words[:-2], "--cut", "120", "--out", str(tmp_path / "long")]) == 2 and "lower --cut" in capsys.readouterr().err
    assert data.main(["inspect", *words]) == 0 and "[PRED_1]" in capsys.readouterr().out
    mlm = ["--objective", "mlm", "--init", str(tmp_path / "llama"), "--data", str(tmp_path / "chats.jsonl"), "--out", str(tmp_path / "mlm")]
    assert train.main(mlm) == 2 and "does not fit objective mlm (bidirectional)" in capsys.readouterr().err
