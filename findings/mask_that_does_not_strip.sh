#!/usr/bin/env bash
# transformers 5.23.0: a mask token given as AddedToken(lstrip=True) is stored and shown with
# lstrip=True, but the space before it stays a token of its own if the tokenizer already has this
# mask. A tokenizer trained with special tokens always has it. Saving and loading changes nothing.
#
# Guess before: the flag that the tokenizer shows is the flag that it uses.
# What it costs: fill-mask then reads "a", space, mask, where training read "a", mask. A model of ours
# predicted the right word for 59 of 60 masks in training's form, and for 0 of 60 in this one.
# The way out: write lstrip into the list added_tokens of tokenizer.json.
# Source: https://huggingface.co/docs/tokenizers/api/added-tokens says what lstrip does, and
# https://github.com/huggingface/tokenizers/issues/575 is about the space before the mask. Neither
# says that the flag is dropped.
# Exit status: 0 if this is still so, 1 if the behavior has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check transformers==5.23.0 tokenizers==0.23.3
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - 2>/dev/null <<'PYTHON'
import sys

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast


def make(special_tokens):
    """Train a byte-level tokenizer that has these special tokens."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(["a dog sees a bird"] * 9, trainers.BpeTrainer(
        vocab_size=300, special_tokens=special_tokens, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return inner


mask = AddedToken("<mask>", lstrip=True, special=True)
found = {}
for name, special in {"the mask is new": ["<pad>"], "the mask is known": ["<pad>", "<mask>"]}.items():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make(special), mask_token=mask,
                                        pad_token="<pad>")
    tokenizer.save_pretrained("saved")
    again = AutoTokenizer.from_pretrained("saved")
    found[name] = [t.convert_ids_to_tokens(t("dog <mask>")["input_ids"]) for t in (tokenizer, again)]
    shown = tokenizer._special_tokens_map["mask_token"].lstrip
    print(f"{name}: shows lstrip={shown}, reads {found[name][0]}, after loading {found[name][1]}")
same = all("Ġ" not in tokens for tokens in found["the mask is new"]) and all(
    tokens[-2:] == ["Ġ", "<mask>"] for tokens in found["the mask is known"]) and shown
sys.exit(not same)
PYTHON
