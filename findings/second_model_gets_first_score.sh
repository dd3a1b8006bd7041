#!/usr/bin/env bash
# mteb 2.26.24: mteb.evaluate(SentenceTransformer("FOLDER"), tasks) gives every local model the same
# name, "no_model_name/available", and keeps results under this name. So the second model that you
# evaluate on a task is not run: you get the score of the first one, with the status of a normal
# result. With cache=None both models are run.
#
# Guess before: two models in two folders get two scores.
# What it costs: after each further training run the benchmark says that nothing has changed.
# The way out: mteb.evaluate(..., cache=None), or overwrite_strategy="always".
# Source: https://sbert.net/docs/sentence_transformer/usage/mteb_evaluation.html recommends this call
# and does not mention the cache. https://github.com/embeddings-benchmark/mteb/issues/5394 reports the
# same cache for one model in two precisions.
# Exit status: 0 if this is still so, 1 if the behavior has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 mteb==2.26.24 \
    transformers==5.23.0 sentence-transformers==6.2.0 datasets==5.2.0
cd "$folder"
HF_HUB_OFFLINE=1 MTEB_CACHE="$folder/cache" venv/bin/python - 2>stderr <<'PYTHON' ||
import sys

import mteb
import numpy as np
import torch
from datasets import Dataset
from mteb.abstasks.sts import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

WORDS = "the dog sees a bird king paints horse boat river".split()
UNKNOWN = dict.fromkeys("reference date domains task_subtypes license annotations_creators dialect "
                        "sample_creation bibtex_citation".split())


class OwnTask(AbsTaskSTS):
    metadata = TaskMetadata(
        name="OwnTask", description="40 pairs of random words with random scores", type="STS",
        dataset={"path": "own/task", "revision": "1"}, category="t2t", modalities=["text"],
        eval_splits=["test"], eval_langs=["eng-Latn"], main_score="cosine_spearman", **UNKNOWN)
    min_score, max_score = 0, 5

    def load_data(self, *_, **__):
        random = np.random.default_rng(0)
        texts = [" ".join(random.choice(WORDS, 4)) for _ in range(80)]
        self.dataset = {"test": Dataset.from_dict({
            "sentence1": texts[:40], "sentence2": texts[40:],
            "score": random.uniform(0, 5, 40).tolist()})}
        self.data_loaded = True


def make(folder, seed):
    """Write a random model as a folder of sentence-transformers."""
    inner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.train_from_iterator([" ".join(WORDS)] * 9, trainers.WordPieceTrainer(
        vocab_size=90, special_tokens=["[PAD]", "[UNK]"], show_progress=False))
    torch.manual_seed(seed)
    BertModel(BertConfig(
        vocab_size=inner.get_vocab_size(), hidden_size=16, intermediate_size=32,
        num_hidden_layers=1, num_attention_heads=2)).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]",
                            unk_token="[UNK]").save_pretrained(folder)
    SentenceTransformer(device="cpu", modules=[
        Transformer(folder), Pooling(16, "mean")]).save_pretrained(folder)


def score(folder, **options):
    """Return the name that mteb gives a model, and its score."""
    model = SentenceTransformer(folder, device="cpu")
    result = mteb.evaluate(model, [OwnTask()], show_progress_bar=False, **options)
    return result.model_name, round(float(result.task_results[0].get_score()), 4)


make("first", 0)
make("second", 1)
kept = [score(name) for name in ("first", "second")]
fresh = [score(name, cache=None) for name in ("first", "second")]
print("with the cache:", *kept)
print("cache=None:    ", *fresh)
sys.exit(not (kept[0] == kept[1] == fresh[0] and fresh[0][1] != fresh[1][1]))
PYTHON
    { grep -v "it/s" stderr; exit 1; }
