"""How each family of Hugging Face models spells its config and its weights, in both directions.

A family is one row of FAMILIES, by the "model_type" of a config.json; huggingface.py reads and
writes the files.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from corpora.program import BadInput
from model import DECODER, ModelConfig


def unchanged(weights, *_):
    return weights


class Family(NamedTuple):
    """`settings` are a config.json, as a dict; `config` is a ModelConfig."""
    config: Callable  # (settings) -> config; BadInput for what our model cannot express
    names: Callable  # (config) -> {our weight: their names, concatenated along dimension 0}
    settings: Callable  # (config, special) -> settings; BadInput where no class of theirs fits
    inward: Callable = unchanged  # (weights, config, settings) -> weights, where numbers differ
    outward: Callable = unchanged  # (weights, config) -> weights
    prefix: str = ""  # may stand before their names or not
    ignored: str = r"$^"  # a pattern of names that have no part in our model
    heads: tuple[dict, ...] = ({},)  # changes of config; the first whose weights are all there


OWN_FILE = "take the file of the model's own folder"


def field(settings, name, kind, default=None):
    """A value of a config.json; BadInput if it is of another type, or missing and no default."""
    value = settings.get(name)
    if value is None:
        value = default
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise BadInput(f"config.json: {name} is {settings.get(name)!r}, where a {kind.__name__} "
                       f"belongs; {OWN_FILE}")
    return value


# what encoders and decoders spell alike: a field of ModelConfig and its key
SIZES = {"vocab": "vocab_size", "width": "hidden_size", "layers": "num_hidden_layers",
         "heads": "num_attention_heads", "ffn_dim": "intermediate_size"}


def read_sizes(settings):
    return {ours: field(settings, their, int) for ours, their in SIZES.items()}


def write_common(config, special):
    """What the settings of every family have, from the fields of a ModelConfig."""
    sizes = {their: getattr(config, ours) for ours, their in SIZES.items()}
    return {**sizes, "tie_word_embeddings": config.tied, "pad_token_id": special.pad,
            "bos_token_id": special.cls, "eos_token_id": special.sep}


def demand(settings, **allowed):
    """BadInput unless each name is absent or has a value that our model can express."""
    for name, values in allowed.items():
        if settings.get(name) not in (None, *values):
            raise BadInput(f"config.json: {name} is {settings[name]!r}, and this model knows only "
                           f"{' or '.join(map(repr, values))}; choose another model")


def refuse(config, kind, needed):
    """BadInput that names each field of a ModelConfig whose value is not among those needed."""
    wrong = []
    for name, values in needed.items():
        if getattr(config, name) not in values:
            wrong.append(f"{name} {getattr(config, name)} "
                         f"(it has {' or '.join(map(str, values))})")
    if wrong:
        raise BadInput("no Hugging Face class can express this model: the nearest, "
                       f"{kind}, cannot have {', '.join(wrong)}")


# --------------------------------------------------------------------------------------------------
# Encoders: BERT, RoBERTa, XLM-R and what was distilled from them
# [Devlin et al. 2019; Liu et al. 2019; Conneau et al. 2020]

TYPES = "embeddings.token_type_embeddings.weight"
ENCODER_LAYER = {  # our part of a block: theirs of a layer
    "attention.qkv": [f"attention.self.{part}" for part in ("query", "key", "value")],
    "attention.out": ["attention.output.dense"],
    "norm1": ["attention.output.LayerNorm"],
    "mlp.up": ["intermediate.dense"],
    "mlp.down": ["output.dense"],
    "norm2": ["output.LayerNorm"],
}


def encoder_config(settings):
    demand(settings, hidden_act=("gelu",), position_embedding_type=("absolute",),
           is_decoder=(False,), add_cross_attention=(False,))
    # RoBERTa counts positions from behind the id of the padding token
    offset = 0
    if settings["model_type"] != "bert":
        offset = field(settings, "pad_token_id", int, 1) + 1
    return ModelConfig(
        **read_sizes(settings),
        max_positions=field(settings, "max_position_embeddings", int) - offset,
        position_offset=offset,
        norm_epsilon=field(settings, "layer_norm_eps", float, 1e-12),
        dropout=field(settings, "hidden_dropout_prob", float, 0.1),
        tied=field(settings, "tie_word_embeddings", bool, True))


def encoder_names(config, prefix, head, dense, norm):
    """`prefix` stands before the encoder's names where the file has a head for masked words too,
    and `head` before those of the head, of which two are `dense` and `norm`."""
    front = prefix if config.head == "transform" else ""
    maps = {"embed_norm": [f"{front}embeddings.LayerNorm"]}
    for i in range(config.layers):
        for ours, theirs in ENCODER_LAYER.items():
            maps[f"blocks.{i}.{ours}"] = [f"{front}encoder.layer.{i}.{their}" for their in theirs]
    names = {"embed.weight": [f"{front}embeddings.word_embeddings.weight"],
             "position_embedding.weight": [f"{front}embeddings.position_embeddings.weight"],
             "types": [front + TYPES]}
    if config.head == "transform":
        maps |= {"transform": [head + dense], "transform_norm": [head + norm]}
        names["vocabulary_bias"] = [f"{head}bias"]
        if not config.tied:
            names["vocabulary.weight"] = [f"{head}decoder.weight"]
    return names | weight_and_bias(maps)


def weight_and_bias(maps):
    """{our map: their maps} -> {our weight: their weights}, each with its bias."""
    names = {}
    for ours, theirs in maps.items():
        for kind in ("weight", "bias"):
            names[f"{ours}.{kind}"] = [f"{their}.{kind}" for their in theirs]
    return names


def bert_names(config):
    return encoder_names(config, "bert.", "cls.predictions.", "transform.dense",
                         "transform.LayerNorm")


def roberta_names(config):
    return encoder_names(config, "roberta.", "lm_head.", "dense", "layer_norm")


def encoder_settings(config, special):
    """XLM-R where positions begin behind the padding token, else BERT, whose begin at 0."""
    refuse(config, "BERT or XLM-R", {
        "norm": ["layernorm"], "norm_position": ["post"], "positions": ["learned"],
        "activation": ["gelu"], "bias": [True], "causal": [False], "kv_heads": [0, config.heads],
        "head": ["none", "transform"], "tied": [True] if config.head == "none" else [True, False]})
    bert = config.position_offset != (special.pad or 0) + 1
    title = "Bert" if bert else "XLMRoberta"
    ending = "Model" if config.head == "none" else "ForMaskedLM"
    return {
        **write_common(config, special),
        "architectures": [title + ending],
        "model_type": "bert" if bert else "xlm-roberta",
        "hidden_act": "gelu",
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": config.max_positions + (0 if bert else config.position_offset),
        "type_vocab_size": 2 if bert else 1,
        "layer_norm_eps": config.norm_epsilon}


def fold_types(weights, config, settings):
    """Every token of ours has type 0: that row of the type table goes into the position table."""
    types = weights.pop("types")
    positions = weights["position_embedding.weight"]
    if types.ndim != 2 or types.shape[1] != positions.shape[1] or not len(types):
        raise BadInput(f"{TYPES} has shape {tuple(types.shape)}, not (types, {positions.shape[1]})")
    return weights | {"position_embedding.weight": positions + types[:1]}


def bert_outward(weights, config):
    """The type table is zero, its row being in the position table; no rows before position 0."""
    positions = weights["position_embedding.weight"][config.position_offset:]
    return weights | {"position_embedding.weight": positions, "types": torch.zeros(2, config.width)}


def roberta_outward(weights, config):
    return weights | {"types": torch.zeros(1, config.width)}


BERT = Family(
    encoder_config, bert_names, encoder_settings, fold_types, bert_outward, prefix="bert.",
    ignored=r"embeddings\.position_ids|pooler\..*|.*\.decoder\.(weight|bias)"
            r"|cls\.seq_relationship\..*",
    heads=({"head": "transform"}, {"tied": True}))
ROBERTA = BERT._replace(names=roberta_names, outward=roberta_outward, prefix="roberta.")

# --------------------------------------------------------------------------------------------------
# Decoders: Llama 2 and 3 [Touvron et al. 2023; Grattafiori et al. 2024] and what is nearly Llama

LLAMA = {**DECODER, "causal": True, "dropout": 0.0, "pool": "last"}
KINDS = {  # model_type: what all models of it have and LLAMA has not
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": "head"},
    "olmo2": {"norm_position": "branch", "qk_norm": "whole"},
    "gemma2": {"norm_position": "both", "activation": "geglu"},
}
NORMS = {  # norm_position: the norms of a block, ours and theirs
    "pre": {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"},
    "branch": {"post_norm1": "post_attention_layernorm",
               "post_norm2": "post_feedforward_layernorm"},
    "both": {"norm1": "input_layernorm", "post_norm1": "post_attention_layernorm",
             "norm2": "pre_feedforward_layernorm", "post_norm2": "post_feedforward_layernorm"},
}
SCALING = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"


def rope(settings):
    """-> (rope_theta, rope_scaling), as transformers 4 spells them and as 5 does."""
    found = field(settings, "rope_parameters", dict, {}) or field(
        settings, "rope_scaling", dict, {})
    theta = field(found, "rope_theta", float, field(settings, "rope_theta", float, 10000.0))
    kind = found.get("rope_type", found.get("type", "default"))
    demand({**found, "rope_type": kind}, rope_type=("default", "linear", "llama3"),
           partial_rotary_factor=(1.0,))
    if kind == "default":
        return theta, ()
    if kind == "linear":
        # llama3's, with every rate a slow one
        return theta, (field(found, "factor", float), 1.0, 2.0, 1.0)
    return theta, tuple(field(found, name, float) for name in SCALING)


def longest_row(settings, kind):
    """Where attention slides, a row is at most one window: nothing is hidden from its tokens."""
    longest = field(settings, "max_position_embeddings", int)
    slides = field(settings, "use_sliding_window", bool, kind in ("gemma2", "mistral"))
    if slides and settings.get("sliding_window") is not None:
        longest = min(longest, field(settings, "sliding_window", int))
    return longest


def softcap(settings, name, default):
    """A null in the file says: no cap; only a missing name has the default."""
    return field(settings, name, float, 0.0 if name in settings else default)


def decoder_config(settings):
    kind = settings["model_type"]
    gemma = kind == "gemma2"
    sizes = read_sizes(settings)
    heads = sizes["heads"]
    if gemma:
        demand(settings, hidden_activation=("gelu_pytorch_tanh",))
    else:
        demand(settings, hidden_act=("silu",))
    # Llama may have biases in all four maps of attention: then in those of the MLP too
    bias = kind == "llama" and field(settings, "attention_bias", bool, False)
    if kind != "qwen2":
        demand({"attention_bias": False, "mlp_bias": False, **settings},
               attention_bias=(bias,), mlp_bias=(bias,))
    head_dim = {"gemma2": 256, "qwen3": 128}.get(kind, sizes["width"] // max(1, heads))
    rope_theta, rope_scaling = rope(settings)
    fields = {
        **LLAMA, **KINDS[kind], **sizes,
        "bias": bias,
        "kv_heads": field(settings, "num_key_value_heads", int, heads),
        "head_dim": field(settings, "head_dim", int, head_dim),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "max_positions": longest_row(settings, kind),
        "norm_epsilon": field(settings, "rms_norm_eps", float, 1e-5 if kind == "olmo2" else 1e-6),
        "tied": field(settings, "tie_word_embeddings", bool, gemma)}
    if gemma:
        fields["embed_scale"] = sizes["width"] ** 0.5
        fields["attn_softcap"] = softcap(settings, "attn_logit_softcapping", 50.0)
        fields["logit_softcap"] = softcap(settings, "final_logit_softcapping", 30.0)
    return ModelConfig(**fields)


def decoder_names(config):
    maps = {"attention.qkv": [f"self_attn.{part}_proj" for part in "qkv"],
            "attention.out": ["self_attn.o_proj"],
            "mlp.up": ["mlp.gate_proj", "mlp.up_proj"],
            "mlp.down": ["mlp.down_proj"]}
    biased = []
    if config.bias:
        biased = list(maps)
    elif config.qkv_bias:
        biased = ["attention.qkv"]
    norms = dict(NORMS[config.norm_position])
    if config.qk_norm != "none":
        norms |= {f"attention.{part}": f"self_attn.{part}" for part in ("q_norm", "k_norm")}
    maps |= {ours: [their] for ours, their in norms.items()}
    names = {"embed.weight": ["model.embed_tokens.weight"],
             "final_norm.weight": ["model.norm.weight"]}
    if not config.tied:
        names["vocabulary.weight"] = ["lm_head.weight"]
    for i in range(config.layers):
        for ours, theirs in maps.items():
            for kind in ["weight", "bias"] if ours in biased else ["weight"]:
                names[f"blocks.{i}.{ours}.{kind}"] = [
                    f"model.layers.{i}.{their}.{kind}" for their in theirs]
    return names


# the fields that the config.json of every decoder tells, and those that only one family tells
TOLD = {*SIZES, "kv_heads", "head_dim", "max_positions", "norm_epsilon", "rope_theta",
        "rope_scaling", "tied", "dropout", "pool"}
TOLD_BY = {"llama": {"bias"}, "gemma2": {"attn_softcap", "logit_softcap"}}


def shared(kind, config):
    """{field: [value]} of a ModelConfig that every model of a kind has alike."""
    fields = {**LLAMA, **KINDS[kind]}
    if kind == "gemma2":
        fields["embed_scale"] = config.width ** 0.5
    told = TOLD | TOLD_BY.get(kind, set())
    every = vars(ModelConfig(**fields))
    return {name: [value] for name, value in every.items() if name not in told}


def fits(kind, config):
    return all(getattr(config, name) in values for name, values in shared(kind, config).items())


def rope_settings(config):
    """Rotary positions as transformers 4 spells them and as 5 does."""
    found = {"rope_type": "default"}
    if config.rope_scaling:
        found = {"rope_type": "llama3", **dict(zip(SCALING, config.rope_scaling))}
        found[SCALING[-1]] = int(found[SCALING[-1]])
    return {"rope_theta": config.rope_theta,
            "rope_scaling": found if config.rope_scaling else None,
            "rope_parameters": {**found, "rope_theta": config.rope_theta}}


def decoder_settings(config, special):
    """The first of KINDS that has all that the model has; Llama, if none does."""
    kind = next((kind for kind in KINDS if fits(kind, config)), "llama")
    refuse(config, kind, shared(kind, config))
    settings = {
        **write_common(config, special), **rope_settings(config),
        "architectures": [f"{kind.title()}ForCausalLM"],
        "model_type": kind,
        "num_key_value_heads": config.kv_heads or config.heads,
        "head_dim": config.key_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_epsilon,
        "attention_bias": config.bias,
        "mlp_bias": config.bias}
    if kind == "gemma2":
        settings |= {
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": config.key_dim,
            "attn_logit_softcapping": config.attn_softcap or None,
            "final_logit_softcapping": config.logit_softcap or None,
            "sliding_window": config.max_positions}
    return settings


def gemma_inward(weights, config, settings):
    """Gemma's norms multiply by 1 + weight; ours by the weight. Its scores are divided by the root
    of query_pre_attn_scalar, ours by that of the head's size: the queries make up for it."""
    scale = (config.key_dim / field(settings, "query_pre_attn_scalar", float, 256.0)) ** 0.5
    queries = config.heads * config.key_dim
    weights = shift_norms(weights, 1)
    for name, weight in weights.items():
        if ".qkv." in name:
            weights[name] = torch.cat([weight[:queries] * scale, weight[queries:]])
    return weights


def gemma_outward(weights, config):
    return shift_norms(weights, -1)


def shift_norms(weights, number):
    return {name: weight + number if "norm" in name else weight for name, weight in weights.items()}


DECODERS = Family(decoder_config, decoder_names, decoder_settings, prefix="model.",
                  ignored=r"lm_head\.weight|.*rotary_emb\.inv_freq")  # the head of a tied model
GEMMA = DECODERS._replace(inward=gemma_inward, outward=gemma_outward)

# --------------------------------------------------------------------------------------------------
# OpenELM [Mehta et al. 2024], whose blocks grow from the first to the last

OPENELM_LAYER = {"attention.qkv": "attn.qkv_proj", "attention.out": "attn.out_proj",
                 "mlp.up": "ffn.proj_1", "mlp.down": "ffn.proj_2",
                 "norm1": "attn_norm", "norm2": "ffn_norm"}


def per_layer(settings, name, layers):
    """A list of one positive number for each layer."""
    numbers = field(settings, name, list)
    if len(numbers) != layers or not all(type(x) in (int, float) and x > 0 for x in numbers):
        raise BadInput(f"config.json: {name} must be a list of {layers} numbers; {OWN_FILE}")
    return numbers


def openelm_width(wanted, divisor):
    """The nearest multiple of a divisor, but never a tenth below what is wanted."""
    width = max(divisor, int(wanted + divisor / 2) // divisor * divisor)
    return width + divisor if width < 0.9 * wanted else width


def openelm_config(settings):
    demand(settings, activation_fn_name=("swish",), normalization_layer_name=("rms_norm",),
           ffn_with_glu=(True,), share_input_output_layers=(True,))
    width = field(settings, "model_dim", int)
    layers = field(settings, "num_transformer_layers", int)
    divisor = field(settings, "ffn_dim_divisor", int)
    heads = per_layer(settings, "num_query_heads", layers)
    kv_heads = per_layer(settings, "num_kv_heads", layers)
    shares = per_layer(settings, "ffn_multipliers", layers)
    ffn_dims = [openelm_width(share * width, divisor) for share in shares]
    return ModelConfig(**{
        **LLAMA,
        "qk_norm": "head" if settings.get("normalize_qk_projections") else "none",
        "vocab": field(settings, "vocab_size", int),
        "width": width,
        "layers": layers,
        "layer_shapes": tuple(zip(heads, kv_heads, ffn_dims)),
        "heads": heads[0],
        "kv_heads": kv_heads[0],
        "ffn_dim": ffn_dims[0],
        "head_dim": field(settings, "head_dim", int),
        "max_positions": field(settings, "max_context_length", int),
        "norm_epsilon": 1e-6,
        "rope_theta": field(settings, "rope_freq_constant", float, 10000.0)})


def openelm_names(config):
    names = {"embed.weight": ["transformer.token_embeddings.weight"],
             "final_norm.weight": ["transformer.norm.weight"]}
    parts = dict(OPENELM_LAYER)
    if config.qk_norm != "none":
        parts |= {f"attention.{part}": f"attn.{part}" for part in ("q_norm", "k_norm")}
    for i in range(config.layers):
        for ours, their in parts.items():
            names[f"blocks.{i}.{ours}.weight"] = [f"transformer.layers.{i}.{their}.weight"]
    return names


OPENELM = Family(openelm_config, openelm_names, decoder_settings)

FAMILIES = {"bert": BERT, "roberta": ROBERTA, "xlm-roberta": ROBERTA,
            **dict.fromkeys(KINDS, DECODERS), "gemma2": GEMMA, "openelm": OPENELM}


def spell(config, special):
    """-> (the Family that can express a model, its config.json); BadInput if none can."""
    nearest = FAMILIES["llama" if config.causal else "bert"]
    settings = nearest.settings(config, special)
    return FAMILIES[settings["model_type"]], settings
