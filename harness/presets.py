"""Presets: named sets of values that experiments and baselines use, train.py --preset NAME.

Experiments name them, so together with the objective's class each of them has all values.
"""

from objectives import HYBRID, HYBRID_TOY, MEXMA_TOY, PAIRS_TOY

# FROM_BAG starts as a bag of words, and reads the mean of the hidden states; CLS is a [CLS]
# embedding with Muon.
FROM_BAG = dict(PAIRS_TOY, optimizer="adamw", layers=2, pool="mean", zero_init=True)
CLS = dict(PAIRS_TOY, optimizer="muon", embedding_lr=1.0, layers=3, pool="cls", zero_init=False)

# {objective: {preset: (values on top of its `paper`, values on top of its `toy`)}}. In
# dict(A | B, name=value), B overrides A, and the named values override both.
PRESETS = {
    "mexma": {
        "from-bag": ({}, dict(FROM_BAG | MEXMA_TOY, lr=5e-4, embedding_lr=20.0, steps=340,
                              eval_every=150, mask_first=0.95, mask_second=0.95, head_layers=1)),
        "cls": ({}, dict(CLS | MEXMA_TOY, lr=4e-3, steps=300, eval_every=150, mask_first=0.4,
                         mask_second=0.4, head_layers=2))},
    "bepa": {"cls": ({}, dict(CLS, lr=4e-3, steps=500, schedule="linear", cls_view="clean"))},
    "contrastive": {
        "from-bag": ({}, dict(FROM_BAG, lr=1e-3, embedding_lr=10.0, steps=700)),
        "cls": ({}, dict(CLS, lr=2e-3, steps=500)),
        # The mean of the token embeddings, the simplest encoder. Rotary positions act inside
        # attention alone, so it does not know the order of the tokens.
        "bag": (dict(layers=0, pool="mean", positions="rotary"),
                dict(FROM_BAG, lr=1e-2, embedding_lr=1.0, batch=256, steps=500, layers=0,
                     zero_init=False))},
    "mlm": {"hybrid": (dict(HYBRID, regressor=True), HYBRID_TOY)},  # the baseline of hybrid
    "ntp": {"scratch": (dict(lr=8e-5), {})},
    "llm-jepa": {"scratch": (dict(lr=8e-5, jepa_weight=2.0, predictors=3), {})},  # [table 2]
}
