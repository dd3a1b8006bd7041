#!/usr/bin/env bash
# sentence-transformers 6.2.0: the embedding of an empty text, with a tokenizer that adds no special
# tokens, such as Qwen2's. In a batch with other texts, mean pooling gives zeros. cls pooling gives
# the hidden state of a padding token, after normalization a unit vector like any other. max pooling
# gives NaN after normalization. Nothing is logged. Alone, the empty text is an error.
#
# Guess before: zeros for every pooling, or an error for every pooling.
# What it costs: with cls pooling, all empty rows of a collection are the same plausible neighbor.
# Source: the docstring of Pooling in github.com/huggingface/sentence-transformers does not mention a
# text without tokens. https://github.com/embeddings-benchmark/mteb/issues/1043 reports NaN of other
# models for the empty texts of two benchmarks.
# Exit status: 0 if this is still so, 1 if the behavior has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check \
    torch==2.13.0 transformers==5.23.0 sentence-transformers==6.2.0
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - 2>stderr <<'PYTHON' || { grep -v "it/s" stderr; exit 1; }
import sys

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

inner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
inner.train_from_iterator(["the dog sees a bird"] * 9, trainers.WordPieceTrainer(
    vocab_size=60, special_tokens=["[PAD]", "[UNK]"], show_progress=False))
PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]",
                        unk_token="[UNK]").save_pretrained("model")
torch.manual_seed(0)
BertModel(BertConfig(
    vocab_size=inner.get_vocab_size(), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, max_position_embeddings=32)).save_pretrained("model")
norms = {}
for pooling in ("mean", "cls", "max"):
    model = SentenceTransformer(device="cpu", modules=[
        Transformer("model"), Pooling(16, pooling), Normalize()])
    norms[pooling] = float(np.linalg.norm(model.encode(["the dog", ""])[1]))
    try:
        model.encode([""])
        alone = "is embedded"
    except RuntimeError as error:
        alone = f"is an error ({type(error).__name__})"
    print(f"{pooling} pooling: norm {norms[pooling]:.3f} in a batch; alone, the empty text {alone}")
same = (norms["mean"] == 0 and abs(norms["cls"] - 1) < 1e-4 and np.isnan(norms["max"])
        and alone.startswith("is an error"))
sys.exit(not same)
PYTHON
