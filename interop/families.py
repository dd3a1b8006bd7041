"""How each family of Hugging Face models spells its config and its weights, in both directions.

A family is one row of FAMILIES, by the "model_type" of a config.json; huggingface.py reads and
writes the files.
"""

from collections.abc import Callable
from dataclasses import replace
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
    settings: Callable  # (model_type, config, special) -> settings, of what its class can express
    inward: Callable = unchanged  # (weights, config, settings) -> weights, where numbers differ
    outward: Callable = unchanged  # (weights, config) -> weights
    prefix: str = ""  # may stand before their names or not
    ignored: str = r"$^"  # a pattern of names that have no part in our model
    heads: tuple[dict, ...] = ({},)  # changes of config; the first whose weights are all there


def field(settings, name, default=None):
    """A value of a config.json; null counts as absent. ModelConfig refuses another type."""
    value = settings.get(name)
    return default if value is None else value


# {a field of ModelConfig: its key}, where encoders and decoders have the same spelling.
SIZES = {"vocab": "vocab_size", "width": "hidden_size", "layers": "num_hidden_layers",
         "heads": "num_attention_heads", "ffn_dim": "intermediate_size"}


def read_sizes(settings):
    return {ours: settings[their] for ours, their in SIZES.items()}


def write_common(config, special):
    """The settings that every family has, from the fields of a ModelConfig."""
    sizes = {their: getattr(config, ours) for ours, their in SIZES.items()}
    return {**sizes, "tie_word_embeddings": config.tied, "pad_token_id": special.pad,
            "bos_token_id": special.cls, "eos_token_id": special.sep}


def demand(settings, **allowed):
    """BadInput unless each name is absent or has a value that our model can express."""
    for name, values in allowed.items():
        if settings.get(name) not in (None, *values):
            raise BadInput(f"config.json: {name} is {settings[name]!r}, and this model knows only "
                           f"{' or '.join(map(repr, values))}; choose another model")


def in_layers(config, parts, prefix):
    """{part of our block: theirs} -> {our map: their maps} of every layer."""
    maps = {}
    for i in range(config.layers):
        for ours, theirs in parts.items():
            maps[f"blocks.{i}.{ours}"] = [f"{prefix}.{i}.{their}" for their in theirs]
    return maps


def weights_of(maps, biased=()):
    """{our map: their maps} -> {our weight: their weights}; maps whose names end so have biases."""
    names = {}
    for ours, theirs in maps.items():
        for kind in ["weight", "bias"] if ours.endswith(biased) else ["weight"]:
            names[f"{ours}.{kind}"] = [f"{their}.{kind}" for their in theirs]
    return names


# ---- encoders: BERT, RoBERTa, XLM-R and what was distilled from them

# [Devlin et al. 2019; Liu et al. 2019; Conneau et al. 2020]
POSITIONS = "position_embedding.weight"
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
    if settings["model_type"] == "bert":
        offset = 0
        pair = "segments" if field(settings, "type_vocab_size", 2) > 1 else "sep"
    else:
        # RoBERTa counts positions from behind the id of the padding token.
        offset = field(settings, "pad_token_id", 1) + 1
        pair = "sep-sep"
    return ModelConfig(
        **read_sizes(settings),
        max_positions=settings["max_position_embeddings"] - offset,
        position_offset=offset,
        norm_epsilon=field(settings, "layer_norm_eps", 1e-12),
        pair=pair,
        dropout=field(settings, "hidden_dropout_prob", 0.1),
        tied=field(settings, "tie_word_embeddings", True))


def encoder_names(config, prefix, head, dense, norm):
    """`prefix` stands before the encoder's names where the file has a head for masked words too,
    and `head` before those of the head, of which two are `dense` and `norm`."""
    front = prefix if config.head == "transform" else ""
    maps = {"embed_norm": [f"{front}embeddings.LayerNorm"],
            **in_layers(config, ENCODER_LAYER, f"{front}encoder.layer")}
    names = {"embed.weight": [f"{front}embeddings.word_embeddings.weight"],
             POSITIONS: [f"{front}embeddings.position_embeddings.weight"],
             "types": [front + TYPES]}
    if config.head == "transform":
        maps |= {"transform": [head + dense], "transform_norm": [head + norm]}
        names["vocabulary_bias"] = [f"{head}bias"]
        if not config.tied:
            names["vocabulary.weight"] = [f"{head}decoder.weight"]
    return names | weights_of(maps, biased="")


def bert_names(config):
    return encoder_names(config, "bert.", "cls.predictions.", "transform.dense",
                         "transform.LayerNorm")


def roberta_names(config):
    return encoder_names(config, "roberta.", "lm_head.", "dense", "layer_norm")


def encoder_settings(kind, config, special):
    bert = kind == "bert"
    title = "Bert" if bert else "XLMRoberta"
    ending = "Model" if config.head == "none" else "ForMaskedLM"
    return {
        **write_common(config, special),
        "architectures": [title + ending],
        "model_type": kind,
        "hidden_act": "gelu",
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": config.max_positions + (0 if bert else config.position_offset),
        "type_vocab_size": 2 if config.pair == "segments" else 1,
        "layer_norm_eps": config.norm_epsilon}


def fold_types(weights, config, settings):
    """Token types go into the positions: a table of those with type 0 and, where the second text
    of a pair has type 1, behind it one of those with type 1."""
    types = weights.pop("types")  # (types, D)
    first = weights[POSITIONS]
    needed = 2 if config.pair == "segments" else 1
    if types.ndim != 2 or types.shape[1] != config.width or len(types) < needed:
        raise BadInput(f"{TYPES} has shape {tuple(types.shape)}, not ({needed}, {config.width})")
    tables = [first + types[0]]
    if needed == 2:
        # It is added to the first table, so that `type_between` finds the difference again.
        tables.append(tables[0] + (types[1] - types[0]))
    return weights | {POSITIONS: torch.cat(tables)}


def type_between(first, second):
    """Tables (P, D) of the two types -> the difference (D,) that added to the first rounds to the
    second, bit for bit; where training left none, the one that is nearest to all rows."""
    bounds = []
    for end in (-torch.inf, torch.inf):
        # Sums round to a number up to halfway to its neighbour, which float64 can tell.
        neighbour = second.nextafter(torch.full_like(second, end))
        bounds.append((second.double() + neighbour.double()) / 2 - first.double())
    return ((bounds[0].amax(0) + bounds[1].amin(0)) / 2).float()


def encoder_outward(weights, config):
    """Takes the token types out of the position table again: type 0 is zeros, as its vector stays
    in that table, and type 1 the difference of the two halves."""
    positions = weights[POSITIONS]
    types = torch.zeros(1, config.width)
    if config.pair == "segments":
        positions, second = positions.split(config.max_positions)
        types = torch.cat([types, type_between(positions, second)[None]])
    return weights | {POSITIONS: positions, "types": types}


def bert_outward(weights, config):
    # BERT has no rows before position 0.
    positions = weights[POSITIONS][config.position_offset:]
    return encoder_outward(weights | {POSITIONS: positions}, config)


BERT = Family(
    encoder_config, bert_names, encoder_settings, fold_types, bert_outward, prefix="bert.",
    ignored=r"embeddings\.position_ids|pooler\..*|.*\.decoder\.(weight|bias)"
            r"|cls\.seq_relationship\..*",
    heads=({"head": "transform"}, {"tied": True}))
ROBERTA = BERT._replace(names=roberta_names, outward=encoder_outward, prefix="roberta.")

# ---- decoders: Llama 2 and 3 [Touvron et al. 2023; Grattafiori et al. 2024], what is nearly Llama

LLAMA = {**DECODER, "causal": True, "dropout": 0.0, "pool": "last"}
KINDS = {  # model_type: what all models of it have and LLAMA has not
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": "head"},
    "olmo2": {"norm_position": "branch", "qk_norm": "whole"},
    "gemma2": {"norm_position": "both", "activation": "geglu"},
}
DECODER_LAYER = {
    "attention.qkv": [f"self_attn.{part}_proj" for part in "qkv"],
    "attention.out": ["self_attn.o_proj"],
    "mlp.up": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.down": ["mlp.down_proj"],
}
QK_NORMS = {f"attention.{part}": [f"self_attn.{part}"] for part in ("q_norm", "k_norm")}
NORMS = {  # norm_position: the norms of a block, ours and theirs
    "pre": {"norm1": ["input_layernorm"], "norm2": ["post_attention_layernorm"]},
    "branch": {"post_norm1": ["post_attention_layernorm"],
               "post_norm2": ["post_feedforward_layernorm"]},
    "both": {"norm1": ["input_layernorm"], "post_norm1": ["post_attention_layernorm"],
             "norm2": ["pre_feedforward_layernorm"], "post_norm2": ["post_feedforward_layernorm"]},
}
SCALING = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"


def read_rope(settings):
    """The rotary positions of a config.json, as transformers 4 or 5 spells them -> (rope_theta,
    rope_scaling)."""
    found = field(settings, "rope_parameters", field(settings, "rope_scaling", {}))
    theta = field(found, "rope_theta", field(settings, "rope_theta", 10000.0))
    kind = found.get("rope_type", found.get("type", "default"))
    demand({**found, "rope_type": kind}, rope_type=("default", "linear", "llama3"),
           partial_rotary_factor=(1.0,))
    if kind == "default":
        return theta, ()
    if kind == "linear":
        # This is llama3's scaling with every rate a slow one.
        return theta, (found["factor"], 1.0, 2.0, 1.0)
    return theta, tuple(found[name] for name in SCALING)


def read_positions(settings, kind):
    """The longest row. Where attention slides it is one window, so that no token is hidden."""
    longest = settings["max_position_embeddings"]
    slides = field(settings, "use_sliding_window", kind in ("gemma2", "mistral"))
    if slides and settings.get("sliding_window") is not None:
        longest = min(longest, settings["sliding_window"])
    return longest


def softcap(settings, name, default):
    """A cap of a config.json. Null says that there is none; only a missing name has the default."""
    return settings.get(name, default) or 0.0


def decoder_config(settings):
    kind = settings["model_type"]
    gemma = kind == "gemma2"
    sizes = read_sizes(settings)
    heads = sizes["heads"]
    if gemma:
        demand(settings, hidden_activation=("gelu_pytorch_tanh",))
    else:
        demand(settings, hidden_act=("silu",))
    if kind != "qwen2":
        demand(settings, attention_bias=(False,), mlp_bias=(False,))
    head_dim = {"gemma2": 256, "qwen3": 128}.get(kind, sizes["width"] // heads)
    rope_theta, rope_scaling = read_rope(settings)
    fields = {
        **LLAMA, **KINDS[kind], **sizes,
        "kv_heads": field(settings, "num_key_value_heads", heads),
        "head_dim": field(settings, "head_dim", head_dim),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "max_positions": read_positions(settings, kind),
        "norm_epsilon": field(settings, "rms_norm_eps", 1e-5 if kind == "olmo2" else 1e-6),
        "tied": field(settings, "tie_word_embeddings", gemma)}
    if gemma:
        fields["embed_scale"] = sizes["width"] ** 0.5
        fields["attn_softcap"] = softcap(settings, "attn_logit_softcapping", 50.0)
        fields["logit_softcap"] = softcap(settings, "final_logit_softcapping", 30.0)
    return ModelConfig(**fields)


def decoder_names(config):
    parts = DECODER_LAYER | NORMS[config.norm_position]
    if config.qk_norm != "none":
        parts |= QK_NORMS
    maps = {"embed": ["model.embed_tokens"], "final_norm": ["model.norm"],
            **in_layers(config, parts, "model.layers")}
    if not config.tied:
        maps["vocabulary"] = ["lm_head"]
    return weights_of(maps, biased="attention.qkv" if config.qkv_bias else ())


def rope_settings(config):
    """Rotary positions as transformers 4 spells them and as 5 does."""
    found = {"rope_type": "default"}
    if config.rope_scaling:
        found = {"rope_type": "llama3", **dict(zip(SCALING, config.rope_scaling))}
        found[SCALING[-1]] = int(found[SCALING[-1]])
    return {"rope_theta": config.rope_theta,
            "rope_scaling": found if config.rope_scaling else None,
            "rope_parameters": {**found, "rope_theta": config.rope_theta}}


def decoder_settings(kind, config, special):
    settings = {
        **write_common(config, special), **rope_settings(config),
        "architectures": [f"{kind.title()}ForCausalLM"],
        "model_type": kind,
        "num_key_value_heads": config.kv_heads or config.heads,
        "head_dim": config.key_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_epsilon,
        "attention_bias": False,
        "mlp_bias": False}
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
    scale = (config.key_dim / field(settings, "query_pre_attn_scalar", 256.0)) ** 0.5
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

FAMILIES = {"bert": BERT, "roberta": ROBERTA, "xlm-roberta": ROBERTA,
            **dict.fromkeys(KINDS, DECODERS), "gemma2": GEMMA}


# Told by the files of sentence-transformers, or without a part in a forward.
UNTOLD = {"pool", "normalize", "max_tokens", "dropout", "position_offset"}


def facts(config):
    """{field: value} of all that a config.json tells, defaults written out."""
    kv_heads = config.kv_heads or config.heads
    every = vars(replace(config, kv_heads=kv_heads, head_dim=config.key_dim))
    return {name: value for name, value in every.items() if name not in UNTOLD}


def spell(config, special):
    """Find the first Family that reads the config of a model back out of the config.json that it
    writes -> the family, this config.json. BadInput if there is none."""
    # Positions behind the padding token and pairs with two [SEP] are XLM-R's.
    roberta = config.pair == "sep-sep" and config.position_offset == (special.pad or 0) + 1
    encoder = "xlm-roberta" if roberta else "bert"
    kinds = KINDS if config.causal else [encoder]
    ours = facts(config)
    found = []
    for kind in kinds:
        family = FAMILIES[kind]
        settings = family.settings(kind, config, special)
        for change in family.heads:
            theirs = facts(replace(family.config(settings), **change))
            wrong = [f"{name} {value} (it has {theirs[name]})" for name, value in ours.items()
                     if value != theirs[name]]
            if not wrong:
                return family, settings
            found.append((kind, wrong))
    nearest, wrong = min(found, key=lambda one: len(one[1]))
    raise BadInput(f"no Hugging Face class can express this model: the nearest, {nearest}, cannot "
                   f"have {', '.join(wrong)}")
