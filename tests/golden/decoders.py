"""What transformers computes of small decoders, for tests/test_families.py.

    python tests/golden/decoders.py     # writes decoders-4.json or decoders-5.json, by its version

No weights are stored: each is a function of its name, here and in the test.
"""

import json
import math
import zlib
from pathlib import Path

import numpy as np

SMALL = dict(vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
             pad_token_id=0, bos_token_id=1, eos_token_id=2)
SCALED = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
SHAPES = {
    "llama": dict(rms_norm_eps=1e-5, rope_theta=500.0),
    "llama-3.1": dict(max_position_embeddings=128, rope_theta=100.0, rope_scaling=SCALED,
                      tie_word_embeddings=True),
    "llama-linear": dict(rope_scaling=dict(rope_type="linear", factor=4.0)),
    "mistral": dict(sliding_window=40),
    "qwen2": dict(rope_theta=1e6, tie_word_embeddings=True),
    "qwen3": dict(head_dim=6),
    "olmo2": dict(rope_theta=500.0),
    "gemma2": dict(head_dim=8, query_pre_attn_scalar=5, attn_logit_softcapping=2.0,
                   final_logit_softcapping=1.5, sliding_window=32, rope_theta=300.0),
}
TOKENS = [1, 17, 5, 5, 11, 19, 3, 8, 14, 6, 2]


def weight(name, shape):
    """Numbers in (-0.5, 0.5) from the raw bits of NumPy's Philox, which never change; norms around
    1, or 0 for Gemma."""
    bits = np.random.Philox(key=zlib.crc32(name.encode())).random_raw(math.prod(shape))
    return ((bits >> np.uint64(40)).astype(np.float32) / 2 ** 24 - 0.5).reshape(shape)


def theirs(shape):
    """A model of transformers, by the name of a shape, with these weights."""
    import torch
    import transformers  # here, because most tests do without, and it is slow to import
    kind = shape.partition("-")[0]
    more = dict(SHAPES[shape])
    if transformers.__version__ >= "5" and ("rope_theta" in more or "rope_scaling" in more):
        scaling = more.pop("rope_scaling", {})
        theta = more.pop("rope_theta", 10000.0)
        more["rope_parameters"] = {"rope_type": "default", **scaling, "rope_theta": theta}
    config = transformers.AutoConfig.for_model(kind, **(SMALL | more))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            made = torch.from_numpy(weight(name, tuple(parameter.shape)))
            parameter.copy_(made + 1 if "norm" in name and kind != "gemma2" else made)
    return model


def main():
    import torch
    import transformers
    made = {}
    for shape in SHAPES:
        model = theirs(shape)
        with torch.no_grad():
            found = model(torch.tensor([TOKENS]), output_hidden_states=True)
        config = json.loads(model.config.to_json_string())
        config.pop("id2label", None)
        config.pop("label2id", None)
        made[shape] = {"config": config, "states": found.hidden_states[-1][0].tolist(),
                       "logits": found.logits[0, -1].tolist()}
    digits = json.loads(json.dumps(made), parse_float=lambda text: float(f"{float(text):.7g}"))
    lines = ",\n".join(f"{json.dumps(shape)}: {json.dumps(one)}" for shape, one in digits.items())
    version = transformers.__version__
    path = Path(__file__).with_name(f"decoders-{version.partition('.')[0]}.json")
    path.write_text(f'{{"transformers": "{version}",\n{lines}}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
