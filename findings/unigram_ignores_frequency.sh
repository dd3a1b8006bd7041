#!/usr/bin/env bash
# tokenizers 0.23.3: UnigramTrainer does not learn a word, however often it occurs, unless another
# word contains the same letters. 12 words occur 432 times each and 100 pieces are asked for: it
# learns 24, all but one of them single letters. A 13th word that occurs once, "boatsx", makes
# "boats" a piece. SentencePiece 0.2.3 learns all 12 words from the same lines.
#
# Guess before: every word becomes a piece, because there is room for all of them.
# Why: tokenizers splits lines into words first, and then looks for repeated substrings in the list
# of different words, without their counts. SentencePiece looks for them in the sentences.
# Source: https://github.com/huggingface/tokenizers/pull/292 says that the words are split first.
# Nothing on the page of the trainer says what that means for frequent words.
# Exit status: 0 if this is still so, 1 if the behavior has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check tokenizers==0.23.3 sentencepiece==0.2.3
"$folder/venv/bin/python" - <<'PYTHON'
import io
import sys

import sentencepiece
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

WORDS = "boats apples clocks paints sells counts baker sister sailor harbor river noon".split()
LINES = [f"{a} {b} {c}" for a in WORDS for b in WORDS for c in WORDS]


def learned(lines):
    """Train a Unigram model on lines. Return how many pieces it has, and those of some words."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(lines, trainers.UnigramTrainer(
        vocab_size=100, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False))
    return tokenizer.get_vocab_size(), tokenizer.encode("boats apples").tokens


size, pieces = learned(LINES)
_, with_another = learned([*LINES, "boatsx"])
model = io.BytesIO()
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(LINES), model_writer=model, vocab_size=100, model_type="unigram",
    hard_vocab_limit=False, minloglevel=2)
reference = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).encode(
    "boats apples", out_type=str)
print("each word occurs", " ".join(LINES).split().count("boats"), "times")
print(f"tokenizers, {size} pieces of 100:", *pieces)
print("tokenizers, and boatsx once:", *with_another)
print("SentencePiece:", *reference)
same = ("▁boats" not in pieces and "▁apples" not in pieces and with_another[0] == "▁boats"
        and "▁apples" not in with_another and reference == ["▁boats", "▁apples"])
sys.exit(not same)
PYTHON
