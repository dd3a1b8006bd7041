"""Presets: named sets of values, train.py --preset NAME; and what replaces the paper's values from
random weights. Every objective with a paper also has the preset `paper`: its values alone.

Experiments name presets, so together with the objective's class each of them has all values.
"""

from objectives import HYBRID, HYBRID_TOY, MEXMA_SCRATCH, PAIRS_TOY

# FROM_BAG starts as a bag of words, and reads the mean of the hidden states; CLS is a [CLS]
# embedding with Muon.
FROM_BAG = dict(PAIRS_TOY, optimizer="adamw", layers=2, pool="mean", zero_init=True)
CLS = dict(PAIRS_TOY, optimizer="muon", embedding_lr=1.0, layers=3, pool="cls", zero_init=False)

# With --init: the learning rate falls, and does not rise until the last step as in MEXMA's paper.
# Its value is the best of three for InfoNCE (python -m results show minilm-parts-search).
FINETUNE = dict(lr=2e-4, warmup=0.1, lr_start=0.0, schedule="cosine", steps=1000, batch=64,
                accumulate=1, optimizer="adamw")

# {objective: {preset: (values on top of its `paper`, values on top of its `toy`)}}. In
# dict(A | B, name=value), B overrides A, and the named values override both.
PRESETS = {
    "mexma": {
        "finetune": (FINETUNE, FINETUNE),
        "from-bag": ({}, dict(FROM_BAG | MEXMA_SCRATCH, lr=5e-4, embedding_lr=20.0, steps=340,
                              eval_every=150, mask_first=0.95, mask_second=0.95)),
        "cls": ({}, dict(CLS | MEXMA_SCRATCH, lr=4e-3, steps=300, eval_every=150, mask_first=0.4,
                         mask_second=0.4, head_layers=2))},
    "bepa": {"cls": ({}, dict(CLS, lr=4e-3, steps=500, schedule="linear", cls_view="clean"))},
    "contrastive": {
        "finetune": (FINETUNE, FINETUNE),
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

ABOUT = {  # for --help
    "paper": "the paper's values alone",
    "finetune": "for --init: 1,000 steps of 64, and a learning rate that rises and falls",
    "bag": "the mean of token embeddings, the simplest encoder",
    "from-bag": "a transformer that starts as a bag, and reads the mean",
    "cls": "reads [CLS], and trains with Muon",
    "hybrid": "the model and the settings of hybrid, as its baseline",
    "scratch": "the paper's values from random weights [table 2]"}

# What replaces the paper's values without --init, at every size but toy: with the losses of these
# papers the embeddings would collapse.
SCRATCH = {"mexma": MEXMA_SCRATCH, "llm-jepa": dict(align="info_nce", jepa_weight=0.1)}
# And at --size small, so that one GPU is done in an afternoon. contrastive has the best of three
# learning rates on captions, after 300 steps of 64 (python -m results show small-search). mexma and
# bepa were tried at 2e-3: 200 steps without a collapse.
AFTERNOON = dict(steps=20_000, accumulate=1, warmup=0.1, lr_start=0.0, schedule="cosine")
PAIRS = dict(AFTERNOON, optimizer="muon", lr=2e-3, batch=256)
SMALL = {
    "mexma": PAIRS,
    "contrastive": dict(PAIRS, lr=1e-3),
    "bepa": dict(PAIRS, cls_view="clean"),
    "ntp": dict(AFTERNOON, optimizer="muon", lr=4e-3),  # and llm-jepa
    "mlm": dict(AFTERNOON, lr=1e-3),
    "hybrid": dict(AFTERNOON, lr=1e-3),
}


def of_class(table, objective_class):
    """Return the values of a table for an objective, {} without any. A class that extends another
    one has its values."""
    names = [getattr(one, "name", "") for one in objective_class.__mro__]
    return next((table[name] for name in names if name in table), {})


def from_scratch(objective_class, size):
    """Return what replaces the paper's values without --init, at a size other than toy."""
    small = of_class(SMALL, objective_class) if size == "small" else {}
    return of_class(SCRATCH, objective_class) | small
