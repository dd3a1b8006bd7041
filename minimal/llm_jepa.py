"""LLM-JEPA on one page: a decoder that also predicts its answer's embedding [arXiv 2509.14252].

A decoder learns to translate English (the Text) into a regular expression (the Code). A second loss
appends a token [PRED] to the Text, and its hidden state has to predict that of the Code's last
token. Nothing but the first loss keeps these embeddings apart, so here they collapse: they become
all alike. The paper fine-tunes pretrained decoders of 1 to 8 billion parameters; we start from
random weights. Its code trains all tokens but the stop token, and we only the answer and [SEP].

Run it: python -m minimal.llm_jepa (two minutes on one CPU core). At the end we count the Texts, of
1,000 unseen ones, for which the decoder generates exactly the right Code, and compare the
embeddings.
"""
import re
import sys

import torch
import torch.nn.functional as F
from torch import nn

sys.path.append(sys.path[0] + "/..")  # for python minimal/llm_jepa.py
from corpora.toy_regex import regex

STEPS, BATCH, D, HEADS, LAYERS = 600, 32, 128, 4, 2  # D: width of the model

# ---- Data: 20,000 pairs like ("lines with a number", "[0-9]"). Each word and each sign is a token.
split_words = re.compile(r"\w+|[^\w\s]").findall
pairs = regex("train", 20_000)
vocabulary = sorted({word for pair in pairs for text in pair for word in split_words(text)})
PAD, CLS, SEP, PRED = range(4)  # the special tokens
token_id = {word: i for i, word in enumerate(vocabulary, start=4)}
V = 4 + len(vocabulary)

def tokenize(pairs):  # Return a pair of lists of token ids for each pair of texts.
    return [[[token_id[word] for word in split_words(text)] for text in pair] for pair in pairs]

def pad(rows):  # N lists of token ids -> (N, L)
    return nn.utils.rnn.pad_sequence(list(map(torch.tensor, rows)), batch_first=True)  # PAD is 0.

# ---- Model: a small GPT.
class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(V, D), nn.Parameter(0.05 * torch.randn(256, D))
        self.embed.weight.data *= 0.05  # It makes the logits too: a std of 1 would be too large.
        self.norm, self.blocks = nn.LayerNorm(D), nn.ModuleList(nn.TransformerEncoderLayer(
            D, HEADS, 4 * D, dropout=0, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(LAYERS))

    def forward(self, rows):  # N lists of token ids -> hidden states (N, L, D)
        x = pad(rows)
        h = self.embed(x) + self.position[:x.shape[1]]
        # A token attends to itself and to earlier tokens, so it never sees the padding at the end.
        future = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for block in self.blocks:
            h = block(h, future, is_causal=True)
        return self.norm(h)

    def embedding(self, rows):  # the hidden states of the last tokens: (N, D)
        return self(rows)[range(len(rows)), [len(row) - 1 for row in rows]]

    def next_tokens(self, texts, codes):  # Return logits (M, V), targets (M,), and their rows (M,).
        h = self([[CLS, *text, SEP, *code] for text, code in zip(texts, codes)])
        # Each token predicts the next one. The targets are the Code and the [SEP] that ends it.
        y = pad([[PAD] * (len(text) + 1) + [*code, SEP] for text, code in zip(texts, codes)])
        return h[y != PAD] @ self.embed.weight.T, y[y != PAD], (y != PAD).nonzero()[:, 0]

    def views(self, texts, codes):  # Return Pred(Enc(Text)) and Enc(Code): (N, D) each.
        predicted = self.embedding([[CLS, *text, PRED] for text in texts])
        return predicted, self.embedding([[CLS, *code] for code in codes])  # It sees no Text.

    def loss(self, texts, codes):  # L = L_LLM + lambda d(Pred(Enc(Text)), Enc(Code))  (equation 2)
        logits, targets, _ = self.next_tokens(texts, codes)
        distance = 1 - F.cosine_similarity(*self.views(texts, codes))  # It trains both views.
        return F.cross_entropy(logits, targets) + 1.0 * distance.mean()

def main():
    torch.manual_seed(0)
    model = Decoder()
    print(f"parameters: {sum(x.numel() for x in model.parameters()) / 1e6:.2f} million")
    train = sorted(tokenize(pairs), key=lambda pair: len(pair[0]) + len(pair[1]))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0)
    for step in range(1, STEPS + 1):
        start = torch.randint(len(train) - BATCH, ()).item()
        loss = model.loss(*zip(*train[start:start + BATCH]))  # Similar lengths need little padding.
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 3e-3 * min(step / 50, 1 - step / STEPS)
        optimizer.step()
        if step == 1 or step % 50 == 0:
            print(f"step {step}: loss {loss.item():.2f}")
    texts, codes = zip(*tokenize(regex("test", 1000)))
    with torch.no_grad():
        logits, targets, row = model.next_tokens(texts, codes)
        predicted, code = model.views(texts, codes)
    # Greedy decoding gives the right Code if each of its tokens is the most likely next token.
    wrong = row[logits.argmax(1) != targets].unique()
    print(f"exact match: {1 - len(wrong) / len(texts):.1%}")
    for name, other in (("its Code", code), ("an unrelated Code", code.roll(1, 0))):
        print(f"cosine of a Text and {name}: {F.cosine_similarity(predicted, other).mean():.3f}")

if __name__ == "__main__":
    main()
# Not on this page, but in objectives.py: --predictors (k), --pred-position, --reverse, --align,
# --view-end, --jepa-dropout, --labels, --gamma, --jepa-weight. There, a row has all three texts.
