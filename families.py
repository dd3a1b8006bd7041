"""How each family of Hugging Face models spells its config and its weights, in both directions.

A family is one row of FAMILIES, keyed by the "model_type" of a config.json. checkpoints.py reads and writes the files.
"""

from typing import NamedTuple

import torch

from data import BadInput
from model import ModelConfig


class Family(NamedTuple):
    """config(json) -> ModelConfig; BadInput for what our model cannot express.
    names(config) -> {our weight: their names}: several are concatenated along dimension 0; a name that our model lacks is for `inward`.
    export(config, special) -> config.json as a dictionary; BadInput with the reason where no class of theirs can express the model.
    inward(weights, config), outward(weights, config): our weights {name: tensor}, as read and as written, where the numbers differ too.
    prefix: may stand before their names or not. ignored: a pattern of names that may be in a file and have no part in our model.
    heads: changes of that ModelConfig; the first is taken whose weights are all in the file."""
    config: object
    names: object
    export: object
    inward: object = lambda weights, config: weights
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


def fold_types(weights, config):
    """Every token of ours has type 0, so that row of the type table is added to the position table, once."""
    types, place = weights.pop("types"), weights["place.weight"]
    if types.ndim != 2 or types.shape[1] != place.shape[1] or not len(types):
        raise BadInput(f"{TYPES} has shape {tuple(types.shape)}, not (types, {place.shape[1]})")
    return weights | {"place.weight": place + types[:1]}


def encoder_export(config, special):
    """XLM-R where positions begin behind the padding token, else BERT, whose begin at 0."""
    refuse(config, "BERT or XLM-R", norm=["layernorm"], norm_place=["post"], positions=["learned"], activation=["gelu"], bias=[True], causal=[False],
           kv_heads=[0, config.heads], head=["none", "transform"], tied=[True] if config.head == "none" else [True, False])
    bert = config.position_offset != special.pad + 1
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

FAMILIES = {"bert": BERT, "roberta": ROBERTA, "xlm-roberta": ROBERTA}


def spell(config, special):
    """-> (the Family that can express a model, its config.json). BadInput with the reason if none can."""
    made = FAMILIES["bert"].export(config, special)
    return FAMILIES[made["model_type"]], made
