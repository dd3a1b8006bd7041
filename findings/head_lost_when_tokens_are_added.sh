#!/usr/bin/env bash
# transformers 5.23.0: a folder has two different vocabulary matrices, and its config says
# tie_word_embeddings=True. from_pretrained loads both and warns that it will not tie them, and
# save_pretrained writes both. But config.tie_word_embeddings stays True, so that
# resize_token_embeddings, the usual call after adding a token, replaces the output matrix by the
# input matrix. Its log says that it has initialized the new rows of the output matrix.
#
# Guess before: a model that was loaded with two matrices keeps two.
# What it costs: after one token was added, the logits of all old tokens are different.
# The way out: set model.config.tie_word_embeddings = False after loading.
# Source: https://github.com/huggingface/transformers/pull/42612 is about the same matrices in
# from_pretrained, and https://github.com/huggingface/transformers/issues/35141 about resizing when the
# config says False. The docstring of resize_token_embeddings says that it ties the weights if the
# model class has a method for it; it does not say that this undoes from_pretrained's decision.
# Exit status: 0 if this is still so, 1 if the behavior has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0 numpy
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - 2>stderr <<'PYTHON' || { grep -v "it/s" stderr; exit 1; }
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(
    vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, tie_word_embeddings=False)).save_pretrained("model")
config = Path("model/config.json")
config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))

model = AutoModelForCausalLM.from_pretrained("model")
head = model.lm_head.weight.detach().clone()
row = torch.tensor([[1, 2, 3]])
before = model(row).logits
model.save_pretrained("again")
kept = torch.equal(AutoModelForCausalLM.from_pretrained("again").lm_head.weight, head)
two = not torch.equal(head, model.model.embed_tokens.weight)
model.resize_token_embeddings(51)
lost = torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
change = (model(row).logits[..., :50] - before).abs().max().item()
print("two matrices after loading:", two, "| after saving and loading:", kept)
print("one matrix after adding a token:", lost, f"| largest change of a logit: {change:.2f}")
print("config.tie_word_embeddings:", model.config.tie_word_embeddings)
sys.exit(not (two and kept and lost and change > 0.01))
PYTHON
