"""Make small random models in the layout of real ones; nothing is downloaded."""

import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

SENTENCES = [f"{who} {what} {number} {things} {where}."
             for number, who in enumerate(("The baker", "My sister", "A tall sailor", "Nobody"))
             for what in ("paints", "sells", "counts") for things in ("boats", "apples", "clocks")
             for where in ("by the river", "at noon", "in the old harbor")]
BERT_ROLES = dict(pad="[PAD]", unk="[UNK]", cls="[CLS]", sep="[SEP]", mask="[MASK]")
XLMR_ROLES = dict(bos="<s>", cls="<s>", pad="<pad>", eos="</s>", sep="</s>", unk="<unk>",
                  mask="<mask>")
XLMR_NAMES = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
LLAMA_ROLES = dict(bos="<|begin_of_text|>", eos="<|eot_id|>", pad="<|end_of_text|>")
QWEN_ROLES = dict(eos="<|im_end|>", pad="<|endoftext|>")
SIZES = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
DECODER = SIZES | dict(num_key_value_heads=2, max_position_embeddings=96)

# ---- tokenizers


def template(tokenizer, single):
    """Put special tokens around the texts of a tokenizer: "[CLS] $A [SEP]"."""
    names = sorted({*single.split()} - {"$A"})
    tokenizer.post_processor = TemplateProcessing(
        single=single, special_tokens=[(name, tokenizer.token_to_id(name)) for name in names])
    return tokenizer


def wordpiece(lowercase=True, single="[CLS] $A [SEP]"):
    """Return a tokenizer as BERT has it."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, show_progress=False,
                                        special_tokens=list(BERT_ROLES.values()))
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return template(tokenizer, single)


def unigram(single="<s> $A </s>", words=()):
    """Return a tokenizer as XLM-R has it. `words` are pieces of their own."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=XLMR_NAMES, unk_token="<unk>",
                                      show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    vocab = json.loads(tokenizer.to_str())["model"]["vocab"]
    tokenizer.model = models.Unigram(
        [*map(tuple, vocab), *((f"▁{word}", -1.0) for word in words)], unk_id=3)
    return template(tokenizer, single)


def byte_level(names, single=""):
    """Return a tokenizer as Llama 3 or Qwen have it. It adds no special tokens unless `single` has
    some."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=names, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return template(tokenizer, single) if single else tokenizer


def llama3(single="<|begin_of_text|> $A"):
    return byte_level([*LLAMA_ROLES.values(), "<|start_header_id|>", "<|end_header_id|>"], single)


def qwen(single="", *more):
    return byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *more], single)


# ---- models and folders


def random_model(kind, head, **settings):
    """Return a model of transformers: its model_type, with a vocabulary head or without. All its
    weights are random, biases and norms too, so a weight that is not copied changes the states."""
    sizes = SIZES | dict(max_position_embeddings=66) if "bert" in kind else DECODER
    config = transformers.AutoConfig.for_model(kind, **sizes | settings)
    auto = transformers.AutoModel if not head else (
        transformers.AutoModelForMaskedLM if "bert" in kind else transformers.AutoModelForCausalLM)
    model = auto.from_config(config).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn_like(parameter) + (parameter.data == 1)
    model.tie_weights()
    return model


def save(folder, kind, tokenizer, roles, head=False, chat_template=None, **settings):
    """Write a random model and its tokenizer as a folder of transformers; return the folder."""
    settings.setdefault("vocab_size", tokenizer.get_vocab_size())
    for role in ("pad", "bos", "eos"):
        settings[f"{role}_token_id"] = tokenizer.token_to_id(roles[role]) if role in roles else None
    random_model(kind, head, **settings).save_pretrained(folder)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{role}_token": name for role, name in roles.items()})
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return Path(folder)


def write_json(path, value):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def sentence(folder, pooling="mean", normalize=True, inside="", more=(), longest=48, pool=(),
             transformer=(), library=()):
    """Make a folder one of sentence-transformers; the last three change its files' settings."""
    kinds = ["Transformer", "Pooling", *["Normalize"] * normalize, *more]
    write_json(folder / "modules.json", [
        dict(idx=i, name=str(i), path=f"{i}_{kind}" if i else inside,
             type=f"sentence_transformers.models.{kind}") for i, kind in enumerate(kinds)])
    write_json(folder / "1_Pooling" / "config.json",
               {"word_embedding_dimension": 16, f"pooling_mode_{pooling}": True} | dict(pool))
    write_json(folder / inside / "sentence_bert_config.json",
               {"max_seq_length": longest, "do_lower_case": False} | dict(transformer))
    write_json(folder / "config_sentence_transformers.json", dict(library))


def bert(folder, **settings):
    return save(folder, "bert", wordpiece(), BERT_ROLES, **settings)


def configure(folder, **settings):
    """Let a folder's config say what its weights are not."""
    config = json.loads((folder / "config.json").read_bytes())
    write_json(folder / "config.json", config | settings)


def damaged(folder, name, text):
    (bert(folder) / name).write_text(text, encoding="utf-8")


def moved(folder, make):
    """Move the model of a folder of sentence-transformers into 0_Transformer."""
    make(folder / "0_Transformer")
    sentence(folder, "mean_tokens", inside="0_Transformer")


def gpt(folder, kind, tokenizer, roles, pooling="lasttoken", **settings):
    sentence(save(folder, kind, tokenizer, roles, **settings), pooling)


CASES = {  # name: (function of a new folder, what import then says; "": its embeddings are equal)
    "k3_qwen3_embedding": (lambda folder: gpt(
        folder, "qwen3", qwen("$A <|endoftext|>", "<think>", "</think>"), QWEN_ROLES), ""),
    "k3_llama3_mean": (lambda folder: gpt(
        folder, "llama", llama3(), LLAMA_ROLES, "mean_tokens"), ""),
    "k3_two_around": (lambda folder: gpt(
        folder, "gemma2", llama3("<|begin_of_text|> <|end_header_id|> $A <|eot_id|> <|eot_id|>"),
        LLAMA_ROLES, head_dim=8), ""),
    "k4_lower_case": (lambda folder: sentence(save(
        folder, "bert", wordpiece(lowercase=False), BERT_ROLES), "cls_token",
        transformer={"do_lower_case": True}), ""),
    "k4_max_pooling": (lambda folder: sentence(bert(folder), "max_tokens", normalize=False), ""),
    "k4_prompt_of_queries": (lambda folder: sentence(
        bert(folder), "mean_tokens", library={"prompts": {"query": "Find: "}}), ""),
    "k4_default_prompt": (lambda folder: sentence(
        bert(folder), "mean_tokens",
        library={"prompts": {"query": "Find: "}, "default_prompt_name": "query"}),
        "our model lacks default_prompt_name 'Find: '"),
    "k4_include_prompt": (lambda folder: sentence(
        bert(folder), "mean_tokens", pool={"include_prompt": False}),
        "our model lacks include_prompt 'false'"),
    "k4_truncate_dim": (lambda folder: sentence(
        bert(folder), "mean_tokens", library={"truncate_dim": 8}), ""),
    "k4_truncate_dim_too_large": (lambda folder: sentence(
        bert(folder), "cls_token", library={"truncate_dim": 64}), ""),
    "k4_weighted_mean": (lambda folder: sentence(bert(folder), "weightedmean_tokens"),
                         "our model lacks pooling_mode 'weightedmean'"),
    "k4_dense": (lambda folder: sentence(bert(folder), "mean_tokens", more=["Dense"]),
                 "models.Dense: delete modules.json"),
    "k5_tied_in_config_alone": (lambda folder: configure(save(
        folder, "llama", llama3(), LLAMA_ROLES, head=True, tie_word_embeddings=False),
        tie_word_embeddings=True), ""),
    "k5_tied_in_config_alone_bert": (lambda folder: configure(bert(
        folder, head=True, tie_word_embeddings=False), tie_word_embeddings=True), ""),
    "k5_missing_weights": (lambda folder: configure(bert(folder), num_hidden_layers=3),
                           "weights are missing or have another shape: bert.encoder"),
    "k5_no_head": (lambda folder: gpt(
        folder, "mistral", llama3(), LLAMA_ROLES, tie_word_embeddings=False), ""),
    "k5_no_head_xlmr": (lambda folder: save(folder, "xlm-roberta", unigram(), XLMR_ROLES), ""),
    "k14_damaged_config": (lambda folder: damaged(folder, "config.json", '{"model_type": "bert",'),
                           "theirs/config.json is damaged"),
    "k16_apple_double": (lambda folder: [damaged(folder, name, "\x00\x05\x16\x07") for name in (
        "._config.json", "._model.safetensors")], ""),
    "k16_old_layout": (lambda folder: moved(folder, bert), ""),
    # An empty text has no token, if the tokenizer adds none. sentence-transformers then returns
    # zeros for these two poolings only.
    "w8_bert_mean": (lambda folder: sentence(save(
        folder, "bert", wordpiece(single="$A"), BERT_ROLES), "mean_tokens"), ""),
    "x15_no_tokenizer": (lambda folder: (bert(folder) / "tokenizer.json").unlink(),
                         "theirs has no tokenizer: save it there"),
    "x15_few_tokens": (lambda folder: bert(folder, vocab_size=999), " tokens, and the model 999: "),
    "x16_relative_positions": (lambda folder: configure(
        bert(folder), position_embedding_type="relative_key"),
        "position_embedding_type is 'relative_key': our model has 'absolute' only"),
    "x16_more_layers": (lambda folder: configure(bert(folder, head=True), num_hidden_layers=1),
                        "lacks weights that the file has: correct it, or remove them (bert.en"),
    "w8_qwen2_last": (lambda folder: gpt(folder, "qwen2", qwen(), QWEN_ROLES), ""),
}
