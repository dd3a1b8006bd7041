"""Families of transformers: the same numbers from the same weights, and rows as their chats."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
from cases.make_models import DECODER, byte_level, random_model, save
from test_house import write_pairs
from test_train import EXTRA
from tokenizers import AddedToken, Regex, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

import train
from base.common import BadInput
from base.tokenizer import ROLES, Tokenizer
from data import Example, Packed
from interop import huggingface
from interop.families import copy_in, copy_out, read_config, write_config
from model import Model
from objectives import Ntp

LLAMA3 = dict(rope_type="llama3", rope_theta=100.0, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=64)
SHAPES = {  # name: (model_type, settings, longest row: the table of positions or the window)
    "bert": ("bert", dict(layer_norm_eps=1e-7, tie_word_embeddings=False), 66),
    "roberta": ("roberta", {}, 64),
    "xlm-r": ("xlm-roberta", dict(type_vocab_size=1), 64),
    "llama-2": ("llama", dict(num_key_value_heads=4, rms_norm_eps=1e-5), 96),
    "llama-3.1": ("llama", dict(rope_parameters=LLAMA3, tie_word_embeddings=True), 96),
    "mistral": ("mistral", dict(sliding_window=40), 40),
    "qwen2": ("qwen2", dict(tie_word_embeddings=True), 96),
    "qwen3": ("qwen3", dict(head_dim=6), 96),
    "olmo2": ("olmo2", {}, 96),
    "gemma2": ("gemma2", dict(head_dim=8, query_pre_attn_scalar=5, attn_logit_softcapping=2.0,
                              final_logit_softcapping=1.5, sliding_window=32), 32),
    "gemma2, no softcaps": ("gemma2", dict(head_dim=8, attn_logit_softcapping=None,
                                           final_logit_softcapping=None), 96),
    "eurobert": ("eurobert", dict(num_key_value_heads=2, mask_token_id=4), 66),
    "modernbert": ("modernbert", dict(num_hidden_layers=5, local_attention=6,
                                      local_rope_theta=10.0), 66),
    "mmbert": ("modernbert", dict(local_attention=8, local_rope_theta=160000.0), 66),
}
ROW = [0, 17, 5, 5, 11, 19, 3, 8, 14, 6, 2]
SPECIAL = SimpleNamespace(cls=0, pad=1, sep=2, mask=4)


def make(shape):
    """Return a random model of transformers and our copy of it."""
    kind, settings, longest = SHAPES[shape]
    theirs = random_model(kind, True, vocab_size=20, pad_token_id=1, bos_token_id=0, eos_token_id=2,
                          **settings)
    config = read_config(theirs.config)
    assert config.max_positions == longest
    model = Model(config).eval()
    copy_in(theirs, model)
    return theirs, model


def assert_close(found, gold):
    assert (found - gold).abs().max() < 1e-5 * max(1, gold.abs().max())


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_states_and_logits_equal_those_of_transformers_in_both_directions(shape):
    theirs, model = make(shape)
    gold = theirs(torch.tensor([ROW]), output_hidden_states=True)
    states = model(Packed.of([ROW[:3], ROW], model.config.causal))[3:]
    assert_close(states, gold.hidden_states[-1][0])
    assert_close(model.logits(states), gold.logits[0])

    auto = AutoModelForCausalLM if model.config.causal else AutoModelForMaskedLM
    again = auto.from_config(write_config(model.config, SPECIAL)).eval()
    same = {"mistral": "llama", "roberta": "xlm-roberta"}  # the same model under two names
    kind = theirs.config.model_type
    assert again.config.model_type == same.get(kind, kind)
    copy_out(model, again)
    assert_close(again(torch.tensor([ROW])).logits, gold.logits)


@pytest.mark.parametrize("kind, settings, message", [
    ("llama", dict(rope_parameters=dict(rope_type="yarn", factor=4.0, rope_theta=1.0)), "'yarn'"),
    ("qwen3", dict(attention_bias=True), "attention_bias is True"),
    ("gemma2", dict(hidden_activation="silu"), "hidden_activation is 'silu'"),
    ("bert", dict(is_decoder=True), "is_decoder is True"),
    ("modernbert", dict(norm_bias=True), "norm_bias is True"),
    ("modernbert", dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), "is 'yarn': our model"),
    ("deberta-v2", {}, "model_type is 'deberta-v2'")])
def test_what_our_model_cannot_express_is_refused_by_name(kind, settings, message):
    sizes = {} if "bert" in kind else DECODER
    with pytest.raises(BadInput, match=message):
        read_config(AutoConfig.for_model(kind, **sizes | settings))


@pytest.mark.parametrize("changes, message", [
    (dict(norm_position="pre"), "bert, cannot have norm_position pre"),
    (dict(positions="sinusoidal"), "positions sinusoidal"),
    (dict(pair="sep-sep", position_offset=1), "xlm-roberta, cannot have max_positions 66")])
def test_a_model_that_transformers_cannot_express_is_refused_with_the_reason(changes, message):
    with pytest.raises(BadInput, match=message):
        write_config(replace(make("bert")[1].config, **changes), SPECIAL)


@pytest.mark.parametrize("part", [torch.nn.Parameter(torch.zeros(4)), torch.nn.Linear(2, 2)])
def test_a_weight_of_your_own_is_refused_by_name(part):
    theirs, model = make("bert")
    model.query = part
    with pytest.raises(BadInput, match=r"bert has no place for the weight query\b"):
        copy_out(model, theirs)


# ---- encoders of today: training, LoRA and export

EURO = "<|begin_of_text|> <|end_of_text|> <|mask|> <|start_header_id|> <|eot_id|>"  # of Llama 3
ENCODERS = {  # shape: special tokens, those before and after a text, the mask
    "eurobert": (EURO, 0, 1, 2),
    "modernbert": ("[PAD] [UNK] [CLS] [SEP] [MASK]", 2, 3, 4),
    "mmbert": ("<bos> <eos> <mask> <pad> <start_of_turn> <end_of_turn> <s> </s>", 0, 1, 2)}


@pytest.mark.parametrize("shape, objective", [
    *((shape, "mlm") for shape in ENCODERS), ("modernbert", "bepa"), ("eurobert", "hybrid"),
    ("mmbert", "hybrid")])
def test_an_encoder_is_imported_trained_and_exported_with_its_head(shape, objective):
    kind, settings, _ = SHAPES[shape]
    names, *ends, mask = ENCODERS[shape]
    names = names.split()
    inner = byte_level(names, f"{names[ends[0]]} $A {names[ends[1]]}")
    roles = dict(zip(("bos", "eos", "mask"), (names[i] for i in (*ends, mask))))
    save("theirs", kind, inner, roles, True, **settings | {"max_position_embeddings": 200})
    assert "logits" in huggingface.import_model("theirs", "run")[1]
    write_pairs(Path("pairs.tsv"), 60)
    run = train.start(objective, "trained", init="run", data="pairs.tsv", steps=1, batch=4,
                      accumulate=1, eval_limit=4, max_length=60, device="cpu",
                      lora_rank=2 if objective == "bepa" else 0, **EXTRA.get(objective, {}))
    assert np.isfinite([one["loss"] for one in run.steps() if "loss" in one]).all()
    compared = huggingface.export("trained", "made")
    # hybrid has a head of its own, and then only EuroBERT's, which is one matrix, is left.
    assert ("a masked text" in compared) == (objective != "hybrid" or shape == "eurobert")
    again = replace(huggingface.import_model("made", "again")[0], max_tokens=0)
    assert again == replace(run.model.config, max_tokens=0, dropout=again.dropout)


# ---- chats

BOS = "<｜begin▁of▁sentence｜>"
CHATML = "<|im_start|>system\n{S}<|im_end|>\n", "", "<|im_start|>user\n{U}<|im_end|>\n"
CHATS = {  # family: its special tokens, whether its tokenizer adds the first one before a text, and
    # what its template writes: system text, start without it, user's turn, assistant's turn
    "llama-3": ("<|begin_of_text|> <|eot_id|> <|start_header_id|> <|end_header_id|>", True,
                "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{S}<|eot_id|>",
                "<|begin_of_text|>", "<|start_header_id|>user<|end_header_id|>\n\n{U}<|eot_id|>",
                "<|start_header_id|>assistant<|end_header_id|>\n\n{A}<|eot_id|>"),
    "qwen2": ("<|im_start|> <|im_end|> <|endoftext|>", False, *CHATML,
              "<|im_start|>assistant\n{A}<|im_end|>\n"),
    "qwen3": ("<|im_start|> <|im_end|> <|endoftext|> <think> </think>", False, *CHATML,
              "<|im_start|>assistant\n<think>\n\n</think>\n\n{A}<|im_end|>\n"),
    "gemma": ("<bos> <eos> <pad> <start_of_turn> <end_of_turn>", True, None, "<bos>",
              "<start_of_turn>user\n{U}<end_of_turn>\n",
              "<start_of_turn>model\n{A}<end_of_turn>\n"),
    "olmo2": ("<|endoftext|> <|pad|> <|endofprompt|> <|im_start|> <|im_end|>", False,
              "<|endoftext|><|system|>\n{S}\n", "<|endoftext|>", "<|user|>\n{U}\n",
              "<|assistant|>\n{A}<|endoftext|>"),
    "r1-distill": (f"{BOS} <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <think>", True,
                   BOS + "{S}", BOS, "<｜User｜>{U}", "<｜Assistant｜>{A}<｜end▁of▁sentence｜>"),
}
TEXTS = {"S": "Answer with a pattern.", "U": "lines that have a vowel", "A": "(.*[aeiou].*)"}
# A line break never joins the word after it, as in these families' tokenizers.
WORDS = Regex(r"\s*[\r\n]+| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+")


def chat_tokenizer(family):
    """Return a byte-level tokenizer with a family's special tokens and two [PRED]s."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(WORDS, "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    inner.train_from_iterator(
        [*TEXTS.values(), "user\n\nassistant\n\nsystem\nuser\n"] * 3, trainer)
    names = [*CHATS[family][0].split(), *ROLES[5:7]]
    inner.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    first = [inner.token_to_id(names[0])] if CHATS[family][1] else []
    return Tokenizer(inner, (first, []))


def ids_of(tokenizer, text):
    """Return the ids of a text in which the names of special tokens mean these tokens."""
    inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
    return inner.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("family", CHATS)
def test_rows_of_next_token_prediction_equal_the_chat_template(family):
    _, _, system, start, user, assistant = CHATS[family]
    tokenizer = chat_tokenizer(family)
    assert (tokenizer.special.chat.system is None) == (system is None)
    for keys, opening in (("UA", start), ("UAS", system)):
        if opening is None:  # chats of this family have no system turn
            continue
        text, answer, *system = tokenizer.encode([TEXTS[key] for key in keys])
        example = Example((text, answer), system=system[0] if system else None)
        gold = ids_of(tokenizer, (opening + user + assistant).format(**TEXTS))
        batch = Ntp.collate([example], None, Ntp.Config(), tokenizer.special)
        targets = batch["targets"].tolist()
        row = [*batch["packed"].tokens.tolist(), targets[-1]]
        assert row == gold[:len(row)]
        assert tokenizer.inner.decode(gold[len(row):]) in ("", "\n")
        assert targets == [*answer, tokenizer.special.sep]


def test_an_encoder_with_a_decoders_vocabulary_has_the_ends_of_its_texts_and_no_chats():
    names = "<bos> <eos> <pad> <mask> <s> </s> <start_of_turn> <end_of_turn>".split()
    inner = chat_tokenizer("gemma").inner  # mmBERT has Gemma's vocabulary
    inner.add_special_tokens(names)
    ids = {name: inner.token_to_id(name) for name in names}
    encoder = Tokenizer(inner, ([ids["<bos>"]], [ids["<eos>"]]), chats=False)
    for special in (encoder.special, encoder.with_tokens(["[PRED_3]"]).special):
        assert (special.cls, special.sep) == (ids["<bos>"], ids["<eos>"])
        assert special.mask == ids["<mask>"] and special.chat.system == ()
    assert Tokenizer(inner).special.sep == ids["<end_of_turn>"]  # a decoder's chats end so
