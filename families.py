"""How each family of Hugging Face models spells its config and its weights, in both directions.

A family is one row of FAMILIES, keyed by the "model_type" of a config.json. checkpoints.py reads and writes the files.
"""

from typing import NamedTuple

import torch

from data import BadInput
from model import DECODER, ModelConfig


class Family(NamedTuple):
    """config(json) -> ModelConfig; BadInput for what our model cannot express.
    names(config) -> {our weight: their names}: several are concatenated along dimension 0; a name that our model lacks is for `inward`.
    export(config, special) -> config.json as a dictionary; BadInput with the reason where no class of theirs can express the model.
    inward(weights, config, json), outward(weights, config): our weights {name: tensor}, as read and as written, where the numbers differ too.
    prefix: may stand before their names or not. ignored: a pattern of names that may be in a file and have no part in our model.
    heads: changes of that ModelConfig; the first is taken whose weights are all in the file."""
    config: object
    names: object
    export: object
    inward: object = lambda weights, config, json: weights
    outward: object = lambda weights, config: weights
    prefix: str = ""
    ignored: str = r"$^"
    heads: tuple[dict, ...] = ({},)


def field(json, name, kind, default=None):
    """A value of a config.json; BadInput if it is missing without a default, or of another type."""
    value = json.get(name)
    value = default if value is None else value
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise BadInput(f"config.json: {name} is {json.get(name)!r}, where a {kind.__name__} belongs; take the file of the model's own folder")
    return value


def demand(json, **allowed):
    """BadInput unless each name of a config.json is absent or one of the values that our model can express, the first of which is its default."""
    for name, values in allowed.items():
        if json.get(name) not in (None, *values):
            raise BadInput(f"config.json: {name} is {json[name]!r}, and this model knows only {' or '.join(map(repr, values))}; choose another model")


def refuse(config, kind, **needed):
    """BadInput that names every field of a ModelConfig in which a class of theirs cannot follow; a field can have one of several values."""
    wrong = [f"{name} {getattr(config, name)} (it has {' or '.join(map(str, values))})" for name, values in needed.items()
             if getattr(config, name) not in values]
    if wrong:
        raise BadInput(f"no Hugging Face class can express this model: the nearest, {kind}, cannot have {', '.join(wrong)}")


# ---------------------------------------------------------------------------------------------------------------------
# Encoders: BERT, RoBERTa, XLM-R and what was distilled from them [Devlin et al. 2019; Liu et al. 2019; Conneau et al. 2020]

TYPES = "embeddings.token_type_embeddings.weight"


def encoder_config(json):
    """Of a bert, roberta or xlm-roberta config.json. The positions of the two last begin behind the id of the padding token."""
    demand(json, hidden_act=("gelu",), position_embedding_type=("absolute",), is_decoder=(False,), add_cross_attention=(False,))
    offset = field(json, "pad_token_id", int, 1) + 1 if json["model_type"] != "bert" else 0
    return ModelConfig(vocab=field(json, "vocab_size", int), width=field(json, "hidden_size", int), layers=field(json, "num_hidden_layers", int),
                       heads=field(json, "num_attention_heads", int), hidden=field(json, "intermediate_size", int),
                       max_length=field(json, "max_position_embeddings", int) - offset, position_offset=offset,
                       norm_epsilon=field(json, "layer_norm_eps", float, 1e-12), dropout=field(json, "hidden_dropout_prob", float, 0.1),
                       tied=field(json, "tie_word_embeddings", bool, True))


def encoder_names(config, prefix, head, dense, norm):
    """{our weight: their names}. A file of a model with a head for masked words has `prefix` before the names of the encoder."""
    front = prefix if config.head == "transform" else ""
    names = {"embed.weight": ["embeddings.word_embeddings.weight"], "place.weight": ["embeddings.position_embeddings.weight"], "types": [TYPES]}
    maps = {"norm": ["embeddings.LayerNorm"]}
    for i in range(config.layers):
        layer = f"encoder.layer.{i}."
        maps |= {f"blocks.{i}.qkv": [f"{layer}attention.self.{part}" for part in ("query", "key", "value")],
                 f"blocks.{i}.out": [f"{layer}attention.output.dense"], f"blocks.{i}.norm1": [f"{layer}attention.output.LayerNorm"],
                 f"blocks.{i}.up": [f"{layer}intermediate.dense"], f"blocks.{i}.down": [f"{layer}output.dense"],
                 f"blocks.{i}.norm2": [f"{layer}output.LayerNorm"]}
    of_maps = lambda maps: {f"{ours}.{kind}": [f"{their}.{kind}" for their in theirs] for ours, theirs in maps.items() for kind in ("weight", "bias")}
    names = {ours: [front + their for their in theirs] for ours, theirs in (names | of_maps(maps)).items()}
    if config.head == "transform":
        names |= of_maps({"transform": [head + dense], "transform_norm": [head + norm]}) | {"vocabulary_bias": [head + "bias"]}
    return names if config.tied else names | {"vocabulary.weight": [head + "decoder.weight"]}


def fold_types(weights, config, json):
    """Every token of ours has type 0, so that row of the type table is added to the position table, once."""
    types, place = weights.pop("types"), weights["place.weight"]
    if types.ndim != 2 or types.shape[1] != place.shape[1] or not len(types):
        raise BadInput(f"{TYPES} has shape {tuple(types.shape)}, not (types, {place.shape[1]})")
    return weights | {"place.weight": place + types[:1]}


def encoder_export(config, special):
    """XLM-R where positions begin behind the padding token, else BERT, whose begin at 0."""
    refuse(config, "BERT or XLM-R", norm=["layernorm"], norm_place=["post"], positions=["learned"], activation=["gelu"], bias=[True], causal=[False],
           kv_heads=[0, config.heads], head=["none", "transform"], tied=[True] if config.head == "none" else [True, False])
    bert = config.position_offset != (special.pad or 0) + 1
    offset, title = (0, "Bert") if bert else (config.position_offset, "XLMRoberta")
    return {"architectures": [f"{title}{'ForMaskedLM' if config.head == 'transform' else 'Model'}"], "model_type": "bert" if bert else "xlm-roberta",
            "vocab_size": config.vocab, "hidden_size": config.width, "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
            "intermediate_size": config.hidden, "hidden_act": "gelu", "hidden_dropout_prob": config.dropout, "attention_probs_dropout_prob": 0.0,
            "max_position_embeddings": config.max_length + offset, "type_vocab_size": 2 if bert else 1, "layer_norm_eps": config.norm_epsilon,
            "initializer_range": 0.02, "position_embedding_type": "absolute", "use_cache": False, "tie_word_embeddings": config.tied,
            "pad_token_id": special.pad, "bos_token_id": special.cls, "eos_token_id": special.sep, "torch_dtype": "float32"}


def export_types(weights, config, types, drop=False):
    """The type table is zero, since its row is in the position table; BERT's has no rows before position 0."""
    place = weights["place.weight"][config.position_offset if drop else 0:]
    return weights | {"place.weight": place, "types": torch.zeros(types, config.width)}


IGNORED = r"embeddings\.position_ids|pooler\..*|.*\.decoder\.(weight|bias)|cls\.seq_relationship\..*"
BERT = Family(encoder_config, lambda config: encoder_names(config, "bert.", "cls.predictions.", "transform.dense", "transform.LayerNorm"), encoder_export,
              fold_types, lambda weights, config: export_types(weights, config, 2, True), "bert.", IGNORED, ({"head": "transform"}, {"tied": True}))
ROBERTA = BERT._replace(names=lambda config: encoder_names(config, "roberta.", "lm_head.", "dense", "layer_norm"), prefix="roberta.",
                        outward=lambda weights, config: export_types(weights, config, 1))

# ---------------------------------------------------------------------------------------------------------------------
# Decoders: Llama 2 and 3 [Touvron et al. 2023; Grattafiori et al. 2024] and what differs from it in a few places

LLAMA = DECODER | dict(causal=True, dropout=0.0, pool="last")
KINDS = {  # model_type -> what all models of it have and LLAMA has not
    "llama": {}, "mistral": {}, "qwen2": dict(qkv_bias=True), "qwen3": dict(qk_norm="head"), "olmo2": dict(norm_place="branch", qk_norm="whole"),
    "gemma2": dict(norm_place="both", activation="geglu")}
NORMS = {  # norm_place -> the norms of a block: ours and theirs
    "pre": {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"},
    "branch": {"end1": "post_attention_layernorm", "end2": "post_feedforward_layernorm"},
    "both": {"norm1": "input_layernorm", "end1": "post_attention_layernorm", "norm2": "pre_feedforward_layernorm", "end2": "post_feedforward_layernorm"}}


STRETCH = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"


def rope(json):
    """-> (theta, stretch) of rotary positions, as transformers 4 spells them and as 5 does."""
    found = json.get("rope_parameters") or json.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise BadInput(f"config.json: its rotary positions are {found!r}, where an object belongs; take the file of the model's own folder")
    theta, kind = field(found, "rope_theta", float, field(json, "rope_theta", float, 10000.0)), found.get("rope_type", found.get("type", "default"))
    demand(found | {"rope_type": kind}, rope_type=("default", "linear", "llama3"), partial_rotary_factor=(1.0,))
    if kind == "default":
        return theta, ()
    if kind == "linear":                                                 # llama3's with every rate among the slow ones
        return theta, (field(found, "factor", float), 1.0, 2.0, 1.0)
    return theta, tuple(field(found, name, float) for name in STRETCH)


def decoder_config(json):
    """Of a config.json of KINDS. Where attention slides, max_length is its window, so that nothing is hidden from a row."""
    kind, (theta, stretch) = json["model_type"], rope(json)
    gemma, width, heads = kind == "gemma2", field(json, "hidden_size", int), field(json, "num_attention_heads", int)
    demand(json, **{"hidden_activation" if gemma else "hidden_act": ("gelu_pytorch_tanh",) if gemma else ("silu",)})
    bias = kind == "llama" and field(json, "attention_bias", bool, False)                # of all four maps of attention: then of the others too
    if kind != "qwen2":
        demand({"attention_bias": False, "mlp_bias": False} | json, attention_bias=(bias,), mlp_bias=(bias,))
    sliding = field(json, "use_sliding_window", bool, kind in ("gemma2", "mistral")) and json.get("sliding_window") is not None
    longest = field(json, "max_position_embeddings", int)
    cap = lambda name, default: field(json, name, float, 0.0 if name in json else default)              # null: none
    caps = dict(score_cap=cap("attn_logit_softcapping", 50.0), logit_cap=cap("final_logit_softcapping", 30.0), embed_scale=width ** 0.5) if gemma else {}
    return ModelConfig(**LLAMA | KINDS[kind] | caps | dict(bias=bias), vocab=field(json, "vocab_size", int), width=width, heads=heads, theta=theta,
                       stretch=stretch, layers=field(json, "num_hidden_layers", int), kv_heads=field(json, "num_key_value_heads", int, heads),
                       head_size=field(json, "head_dim", int, {"gemma2": 256, "qwen3": 128}.get(kind, width // max(1, heads))),
                       hidden=field(json, "intermediate_size", int), tied=field(json, "tie_word_embeddings", bool, gemma),
                       max_length=min(longest, field(json, "sliding_window", int)) if sliding else longest,
                       norm_epsilon=field(json, "rms_norm_eps", float, 1e-5 if kind == "olmo2" else 1e-6))


def decoder_names(config):
    names = {"embed.weight": ["model.embed_tokens.weight"], "norm.weight": ["model.norm.weight"]}
    for i in range(config.layers):
        block, layer = f"blocks.{i}.", f"model.layers.{i}."
        maps = {"qkv": [f"self_attn.{part}_proj" for part in "qkv"], "out": ["self_attn.o_proj"], "up": ["mlp.gate_proj", "mlp.up_proj"],
                "down": ["mlp.down_proj"]}
        biased = maps if config.bias else ["qkv"] * config.qkv_bias
        norms = NORMS[config.norm_place] | ({"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"} if config.qk_norm != "none" else {})
        for ours, theirs in (maps | {ours: [their] for ours, their in norms.items()}).items():
            for kind in ("weight", "bias")[:1 + (ours in biased)]:
                names[f"{block}{ours}.{kind}"] = [f"{layer}{their}.{kind}" for their in theirs]
    return names if config.tied else names | {"vocabulary.weight": ["lm_head.weight"]}


FREE = "vocab width layers heads kv_heads head_size hidden max_length norm_epsilon theta stretch tied dropout pool".split()


def common(kind, config):
    """{field: values} of a ModelConfig that every model of a kind has: all fields but those that its config.json tells."""
    free = {*FREE, *{"llama": ["bias"], "gemma2": ["score_cap", "logit_cap"]}.get(kind, [])}
    model = ModelConfig(**LLAMA | KINDS[kind] | (dict(embed_scale=config.width ** 0.5) if kind == "gemma2" else {}))
    return {name: [value] for name, value in vars(model).items() if name not in free}


def decoder_export(config, special):
    """The first of KINDS that has all that the model has; Llama, if none does."""
    kind = next((kind for kind in KINDS if all(getattr(config, name) in values for name, values in common(kind, config).items())), "llama")
    refuse(config, kind, **common(kind, config))
    turning = {"rope_type": "llama3" if config.stretch else "default", **dict(zip(STRETCH, config.stretch))}
    turning |= {STRETCH[-1]: int(config.stretch[-1])} if config.stretch else {}
    made = {"architectures": [{"gemma2": "Gemma2", "olmo2": "Olmo2"}.get(kind, kind.title()) + "ForCausalLM"], "model_type": kind, "vocab_size": config.vocab,
            "hidden_size": config.width, "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads or config.heads, "head_dim": config.size, "intermediate_size": config.hidden, "hidden_act": "silu",
            "max_position_embeddings": config.max_length, "rms_norm_eps": config.norm_epsilon, "rope_theta": config.theta,
            "rope_scaling": turning if config.stretch else None, "rope_parameters": turning | {"rope_theta": config.theta},
            "attention_bias": config.bias, "mlp_bias": config.bias, "attention_dropout": 0.0, "tie_word_embeddings": config.tied, "use_cache": True,
            "initializer_range": 0.02, "pad_token_id": special.pad, "bos_token_id": special.cls, "eos_token_id": special.sep, "torch_dtype": "float32"}
    gemma = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": config.size,
             "attn_logit_softcapping": config.score_cap or None, "final_logit_softcapping": config.logit_cap or None, "sliding_window": config.max_length}
    return made | (gemma if kind == "gemma2" else {})


def fold_gemma(weights, config, json):
    """Gemma's norms multiply by 1 + w. Its scores are divided by the root of query_pre_attn_scalar, ours by that of K: the queries make it up."""
    scale = (config.size / field(json, "query_pre_attn_scalar", float, 256.0)) ** 0.5
    rows = config.heads * config.size
    return shift_norms(weights, 1) | {name: torch.cat([weight[:rows] * scale, weight[rows:]]) for name, weight in weights.items() if ".qkv." in name}


def shift_norms(weights, number):
    return {name: weight + number if "norm" in name or ".end" in name else weight for name, weight in weights.items()}


DECODERS = Family(decoder_config, decoder_names, decoder_export, prefix="model.", ignored=r"lm_head\.weight|.*rotary_emb\.inv_freq")     # a tied head

# OpenELM [Mehta et al. 2024], whose blocks grow from the first to the last


def openelm_config(json):
    demand(json, activation_fn_name=("swish",), normalization_layer_name=("rms_norm",), ffn_with_glu=(True,), share_input_output_layers=(True,))
    width, layers, divisor = (field(json, name, int) for name in ("model_dim", "num_transformer_layers", "ffn_dim_divisor"))
    lists = [field(json, name, list) for name in ("num_query_heads", "num_kv_heads", "ffn_multipliers")]
    if any(len(one) != layers or not all(type(number) in (int, float) and number > 0 for number in one) for one in lists):
        raise BadInput(f"config.json: num_query_heads, num_kv_heads and ffn_multipliers must be lists of {layers} numbers; take the model's own file")
    heads, kv_heads, shares = lists
    hidden = [max(divisor, int(share * width + divisor / 2) // divisor * divisor) for share in shares]
    hidden = [size + divisor * (size < 0.9 * share * width) for size, share in zip(hidden, shares)]         # rounded, but never down by a tenth
    return ModelConfig(**LLAMA | dict(shapes=tuple(zip(heads, kv_heads, hidden)), qk_norm="head" if json.get("normalize_qk_projections") else "none"),
                       vocab=field(json, "vocab_size", int), width=width, layers=layers, heads=heads[0], kv_heads=kv_heads[0], hidden=hidden[0],
                       head_size=field(json, "head_dim", int), max_length=field(json, "max_context_length", int), norm_epsilon=1e-6,
                       theta=field(json, "rope_freq_constant", float, 10000.0))


def openelm_names(config):
    names = {"embed.weight": ["transformer.token_embeddings.weight"], "norm.weight": ["transformer.norm.weight"]}
    parts = {"qkv": "attn.qkv_proj", "out": "attn.out_proj", "up": "ffn.proj_1", "down": "ffn.proj_2", "norm1": "attn_norm", "norm2": "ffn_norm"}
    parts |= {"q_norm": "attn.q_norm", "k_norm": "attn.k_norm"} if config.qk_norm != "none" else {}
    return names | {f"blocks.{i}.{ours}.weight": [f"transformer.layers.{i}.{their}.weight"] for i in range(config.layers) for ours, their in parts.items()}


OPENELM = Family(openelm_config, openelm_names, decoder_export)

# ---------------------------------------------------------------------------------------------------------------------

FAMILIES = {"bert": BERT, "roberta": ROBERTA, "xlm-roberta": ROBERTA} | dict.fromkeys(KINDS, DECODERS) | {
    "gemma2": DECODERS._replace(inward=fold_gemma, outward=lambda weights, config: shift_norms(weights, -1)), "openelm": OPENELM}


def spell(config, special):
    """-> (the Family that can express a model, its config.json). BadInput with the reason if none can."""
    made = FAMILIES["llama" if config.causal else "bert"].export(config, special)
    return FAMILIES[made["model_type"]], made
