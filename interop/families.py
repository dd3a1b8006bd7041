"""What transformers calls our settings and weights, for each family of models.

Import and export use the same tables: {our field: their setting}, {our module: their modules}.
"""

import re
from dataclasses import asdict

import torch
from transformers import AutoConfig

from base.common import BadInput, shown
from model import DECODER, ModelConfig

BERTS = ("bert", "roberta", "xlm-roberta")
LLAMAS = {  # model_type: the fields in which the family differs from Llama
    "mistral": {},
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": "head"},
    "olmo2": {"norm_position": "branch", "qk_norm": "whole"},
    "gemma2": {"norm_position": "both", "activation": "geglu"},
    "eurobert": {"causal": False},
    "modernbert": {"causal": False, "norm": "layernorm", "norm_position": "embed",
                   "activation": "geglu-erf"}}

# ---- settings: {field of ModelConfig: name in transformers}

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
         "intermediate_size", "max_position_embeddings")
SHARED = dict(zip(("vocab", "width", "layers", "heads", "ffn_dim", "max_positions"), SIZES),
              tied="tie_word_embeddings")
OF_BERTS = SHARED | {"norm_epsilon": "layer_norm_eps", "dropout": "hidden_dropout_prob"}
OF_LLAMAS = SHARED | {
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "norm_epsilon": "rms_norm_eps",
    "attn_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
NAMES = dict.fromkeys(LLAMAS, OF_LLAMAS) | dict.fromkeys(BERTS, OF_BERTS) | {
    "modernbert": SHARED | {"norm_epsilon": "norm_eps"}}
ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_config(theirs):
    """Return the ModelConfig for a config of transformers. Raises BadInput for a family or a
    setting that our model lacks."""
    kind = theirs.model_type
    known = (*BERTS, *LLAMAS)
    if kind not in known:
        raise BadInput(f"model_type is {shown(kind)!r}: choose a model of {', '.join(known)}")
    bert, gemma, modern = kind in BERTS, kind == "gemma2", kind == "modernbert"
    needed = {"hidden_activation" if gemma or modern else "hidden_act":
              "gelu" if bert or modern else "gelu_pytorch_tanh" if gemma else "silu",
              "is_decoder": False, "attention_bias": False, "mlp_bias": False, "norm_bias": False,
              "classifier_activation": "gelu", "classifier_bias": False, "decoder_bias": True,
              "position_embedding_type": "absolute"}
    for name, value in needed.items():
        found = getattr(theirs, name, value)
        if found != value:
            raise BadInput(f"{name} is {shown(repr(found))}: our model has {value!r} only")
    fields = {ours: value for ours, name in NAMES[kind].items()
              if (value := getattr(theirs, name, None)) is not None}
    if bert:
        # RoBERTa's first position is the one after the id of the padding token.
        offset = 0 if kind == "bert" else theirs.pad_token_id + 1
        fields["max_positions"] -= offset
        return ModelConfig(**fields, position_offset=offset, head="transform",
                           pair="sep" if kind == "bert" else "sep-sep")
    ropes = [theirs.rope_parameters]
    scalings = {"default": (), "llama3": ROPE}
    if modern:  # two types of layers, with ropes of their own
        ropes = [ropes[0][one] for one in theirs.layer_types]
        del scalings["llama3"]
        fields |= {"head": "transform",
                   "rope_thetas": tuple(float(rope["rope_theta"]) for rope in ropes),
                   "windows": tuple(theirs.sliding_window * (one == "sliding_attention")
                                    for one in theirs.layer_types)}
    elif window := getattr(theirs, "sliding_window", None):
        # In a text that fits into one sliding window, every token sees all tokens before it.
        fields["max_positions"] = min(fields["max_positions"], window)
    for rope in ropes:
        if rope["rope_type"] not in scalings:
            raise BadInput(f"rope_type is {shown(rope['rope_type'])!r}: our model has "
                           f"{', '.join(scalings)}")
    return ModelConfig(**fields | DECODER | {"causal": True} | LLAMAS[kind] | {
        "dropout": 0.0,
        "rope_theta": float(rope["rope_theta"]),
        "rope_scaling": tuple(float(rope[name]) for name in scalings[rope["rope_type"]]),
        "embed_scale": theirs.hidden_size ** 0.5 if gemma else 1.0})


def write_config(config, special):
    """Return a transformers config for our model, of the nearest family. Raises BadInput, with the
    reason, if that family cannot express the model."""
    ours = compared_fields(config)
    fields = asdict(config) | ours
    kinds = [name for name, own in LLAMAS.items() if own.items() <= fields.items()]
    # Only BERTs have biases everywhere.
    kind = kinds[-1] if not config.bias else "bert" if config.pair == "sep" else "xlm-roberta"
    # A softcap that is off is None: Gemma-2 would divide by 0.
    settings = {name: fields[field] or None if "softcap" in field else fields[field]
                for field, name in NAMES[kind].items()} | {
        "bos_token_id": special.cls, "eos_token_id": special.sep, "pad_token_id": special.pad}
    if kind in LLAMAS:
        rope = {"rope_type": "default", "rope_theta": config.rope_theta}
        if config.rope_scaling:
            rope |= {"rope_type": "llama3", **dict(zip(ROPE, config.rope_scaling))}
        settings |= {"rope_parameters": rope, "query_pre_attn_scalar": config.key_dim}
        if kind == "eurobert":
            settings["mask_token_id"] = special.mask
        if kind == "modernbert":
            types = ["sliding_attention" if one else "full_attention" for one in ours["windows"]]
            settings |= {"cls_token_id": special.cls, "sep_token_id": special.sep,
                         "layer_types": types, "local_attention": 2 * max(ours["windows"]),
                         "rope_parameters": {one: rope | {"rope_theta": theta}
                                             for one, theta in zip(types, ours["rope_thetas"])}}
    else:
        settings["attention_probs_dropout_prob"] = 0.0  # as in our training
        if kind == "xlm-roberta":
            settings["max_position_embeddings"] += config.position_offset
    theirs = AutoConfig.for_model(kind, **settings)
    found = compared_fields(read_config(theirs))
    lacking = [f"{name} {value}" for name, value in ours.items() if value != found[name]]
    if lacking:
        raise BadInput("transformers has no class for this model: the nearest family, "
                       f"{kind}, cannot have {', '.join(lacking)}")
    return theirs


def compared_fields(config):
    """Return {field: value} of what decides the numbers of a forward pass, without defaults."""
    fields = asdict(config) | {"kv_heads": config.kv_heads or config.heads,
                               "head_dim": config.key_dim,
                               "windows": config.windows or (0,) * config.layers,
                               "rope_thetas": config.rope_thetas
                               or (config.rope_theta,) * config.layers}
    for name in ("dropout", "pool", "normalize", "truncate_dim", "max_tokens", "position_offset",
                 "zero_init", "rope_theta", "head", "encodes"):
        del fields[name]
    return fields


# ---- weights: {our module: their modules, one after the other}; * is a layer

BERT = {
    "embed": "embeddings.word_embeddings",
    "position_embedding": "embeddings.position_embeddings",
    "embed_norm": "embeddings.LayerNorm",
    "*.attention.qkv": "*.attention.self.query *.attention.self.key *.attention.self.value",
    "*.attention.out": "*.attention.output.dense",
    "*.norm1": "*.attention.output.LayerNorm",
    "*.mlp.up": "*.intermediate.dense",
    "*.mlp.down": "*.output.dense",
    "*.norm2": "*.output.LayerNorm",
    "transform": "cls.predictions.transform.dense",
    "transform_norm": "cls.predictions.transform.LayerNorm",
    "vocabulary": "cls.predictions.decoder"}
ROBERTA = BERT | {"transform": "lm_head.dense", "transform_norm": "lm_head.layer_norm",
                  "vocabulary": "lm_head.decoder"}
LLAMA = {
    "embed": "embed_tokens",
    "*.attention.qkv": "*.self_attn.q_proj *.self_attn.k_proj *.self_attn.v_proj",
    "*.attention.q_norm": "*.self_attn.q_norm",
    "*.attention.k_norm": "*.self_attn.k_norm",
    "*.attention.out": "*.self_attn.o_proj",
    "*.mlp.up": "*.mlp.gate_proj *.mlp.up_proj",
    "*.mlp.down": "*.mlp.down_proj",
    "*.norm1": "*.input_layernorm",
    "*.norm2": "*.post_attention_layernorm",
    "final_norm": "norm",
    "vocabulary": "lm_head"}
MODERNBERT = {
    "embed": "embeddings.tok_embeddings",
    "embed_norm": "embeddings.norm",
    "*.norm1": "*.attn_norm",
    "*.attention.qkv": "*.attn.Wqkv",
    "*.attention.out": "*.attn.Wo",
    "*.norm2": "*.mlp_norm",
    "*.mlp.up": "*.mlp.Wi",
    "*.mlp.down": "*.mlp.Wo",
    "final_norm": "final_norm",
    "transform": "head.dense",
    "transform_norm": "head.norm",
    "vocabulary": "decoder"}
POST_NORMS = LLAMA | {
    "*.post_norm1": "*.post_attention_layernorm",
    "*.norm2": "*.pre_feedforward_layernorm",
    "*.post_norm2": "*.post_feedforward_layernorm"}
MODULES = {"bert": BERT, "roberta": ROBERTA, "xlm-roberta": ROBERTA, "modernbert": MODERNBERT,
           "olmo2": POST_NORMS, "gemma2": POST_NORMS}


def pairs(model, theirs):
    """Yield (part of our tensor, their tensor), which hold the same numbers, for all weights. They
    share memory with the two models, so a copy in either direction changes a model. Raises BadInput
    for a weight of your own."""
    kind = theirs.config.model_type
    layer = "encoder.layer" if kind in BERTS else "layers"
    prefix = f"{theirs.base_model_prefix}."  # "bert." or "model."; a base model has none
    weights = {name.removeprefix(prefix): weight for name, weight in theirs.state_dict().items()}
    for key, ours in model.state_dict().items():
        if key == "position_embedding.weight" and kind == "bert":
            ours = ours[model.config.position_offset:]  # BERT has no rows before position 0
        key = key.replace("vocabulary_bias", "vocabulary.bias")
        number, module, suffix = re.fullmatch(r"(?:blocks\.(\d+))?(.*?)\.?(\w+)", key).groups()
        if module == "vocabulary" and theirs.get_output_embeddings() is None:
            continue  # an objective with a head of its own has left ours unused
        names = MODULES.get(kind, LLAMA).get("*" * bool(number) + module)
        if not names:
            raise BadInput(f"{kind} has no place for the weight {key}: use python -m interop "
                           "encode")
        found = [weights[f"{name}.{suffix}"]
                 for name in names.replace("*", f"{layer}.{number}").split()]
        yield from zip(ours.split([len(weight) for weight in found]), found)


@torch.no_grad()
def copy_in(theirs, model):
    """Copy the weights of a transformers model into our model."""
    config = model.config
    for our, their in pairs(model, theirs):
        our.copy_(their)
    if theirs.config.model_type in BERTS:
        # Our model has no token types. A text has type 0 at every position.
        types = theirs.base_model.embeddings.token_type_embeddings.weight
        model.position_embedding.weight += types[0]
    if theirs.config.model_type == "gemma2":
        shift_norms(model, 1)  # Gemma multiplies by 1 + weight
        # Gemma divides scores by the root of a setting, our model by the root of the head's size.
        scale = (config.key_dim / theirs.config.query_pre_attn_scalar) ** 0.5
        for block in model.blocks:
            block.attention.qkv.weight[:config.heads * config.key_dim] *= scale


@torch.no_grad()
def copy_out(model, theirs):
    """Copy the weights of our model into a transformers model."""
    for our, their in pairs(model, theirs):
        their.copy_(our)
    if theirs.config.model_type in BERTS:
        theirs.base_model.embeddings.token_type_embeddings.weight.zero_()
    if theirs.config.model_type == "gemma2":
        shift_norms(theirs, -1)


def shift_norms(model, number):
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight += number
