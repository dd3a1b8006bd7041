"""BERT-JEPA on one page: masked words, and one embedding for both languages [arXiv 2601.00366].

BERT reads a sentence and its translation in one row and predicts masked words. A second loss pulls
the [CLS] embeddings of the two sentences together and pushes those of unrelated sentences apart,
which prevents collapse, where all embeddings become the same. The paper starts from XLM-R, a
pretrained encoder whose [CLS] embeddings are nearly the same; we start from random weights.

Run it: python -m minimal.bert_jepa (two minutes on one CPU core). At the end we look up the
translations of 1,000 unseen German sentences among 1,000 English ones, and compare each of them
with its far twins: sentences of the same words, and the same neighboring pairs of words.
"""
import re
import sys

import torch
import torch.nn.functional as F
from torch import nn

sys.path.append(sys.path[0] + "/..")  # for python minimal/bert_jepa.py
from corpora.toy import meanings, toy, twins

STEPS, BATCH, D, HEADS, LAYERS = 250, 64, 128, 4, 2  # D: width of the model

# ---- Data: 20,000 sentences of a toy language in English and German. Every word is one token.
split_words = re.compile(r"\w+|[^\w\s]").findall
pairs = [(row["en"], row["de"]) for row in toy("train", 20_000)]
vocabulary = sorted({word for pair in pairs for text in pair for word in split_words(text)})
PAD, CLS, SEP, MASK = range(4)  # the special tokens
token_id = {word: i for i, word in enumerate(vocabulary, start=4)}
V = 4 + len(vocabulary)

def tokenize(text):  # Return a list of token ids: [CLS] words [SEP].
    return [CLS, *map(token_id.get, split_words(text)), SEP]

def pad(rows):  # N lists of token ids -> (N, L)
    return nn.utils.rnn.pad_sequence(list(map(torch.tensor, rows)), batch_first=True)  # PAD is 0.

def mask_words(x):  # Return the masked tokens, and True where the model has to predict: (N, L) each
    chosen = (torch.rand(x.shape) < 0.15) & (x > MASK)
    dice = torch.rand(x.shape)  # As in BERT, 80 % become [MASK], 10 % a random word, 10 % stay.
    masked = torch.where(chosen & (dice < 0.8), MASK, x)
    return torch.where(chosen & (dice > 0.9), torch.randint(4, V, x.shape), masked), chosen

# ---- Model: a small BERT.
class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(V, D), nn.Parameter(0.05 * torch.randn(128, D))
        self.embed.weight.data *= 0.05  # It makes the logits too: a std of 1 would be too large.
        self.norm, self.blocks = nn.LayerNorm(D), nn.ModuleList(nn.TransformerEncoderLayer(
            D, HEADS, 4 * D, dropout=0, activation="gelu", batch_first=True) for _ in range(LAYERS))
        self.head = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.LayerNorm(D))
        self.bias = nn.Parameter(torch.zeros(V))

    def forward(self, x):  # (N, L) -> hidden states (N, L, D)
        h = self.norm(self.embed(x) + self.position[:x.shape[1]])
        for block in self.blocks:
            h = block(h, src_key_padding_mask=x == PAD)  # All tokens attend to all but the padding.
        return h

    def embedding(self, texts):  # the hidden states of N sentences at [CLS]: (N, D)
        # Each sentence is read alone, as in the released code. The paper hides the other one in
        # their row, so there the second sentence has later positions.
        return self(pad(map(tokenize, texts)))[:, 0]

    def loss(self, a, b):  # L_BEPA = L_MLM + lambda L_alignment, with lambda = 1 (section 3.2)
        # The rows are [CLS] a [SEP] [CLS] b [SEP]: the translation can help with a masked word.
        x = pad([tokenize(one) + tokenize(other) for one, other in zip(a, b)])
        masked, chosen = mask_words(x)
        logits = self.head(self(masked)[chosen]) @ self.embed.weight.T + self.bias
        alignment = info_nce(self.embedding(a), self.embedding(b))
        return F.cross_entropy(logits, x[chosen]) + alignment

# Each embedding i of 2N must find its translation j among all others:
# -log(exp(s_ij) / sum over k != i of exp(s_ik)). The released code also has k = i.
def info_nce(a, b, temperature=0.07):
    z = F.normalize(torch.cat([a, b]), dim=-1)
    s = (z @ z.T / temperature).fill_diagonal_(-torch.inf)  # cosines, (2N, 2N)
    return F.cross_entropy(s, torch.arange(len(z)).roll(len(a)))

def main():
    torch.manual_seed(0)
    model = Bert()
    print(f"parameters: {sum(x.numel() for x in model.parameters()) / 1e6:.2f} million")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0)
    for step in range(1, STEPS + 1):
        loss = model.loss(*zip(*[pairs[i] for i in torch.randperm(len(pairs))[:BATCH]]))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 2e-3 * min(step / 50, 1 - step / STEPS)
        optimizer.step()
        if step == 1 or step % 50 == 0:
            print(f"step {step}: loss {loss.item():.2f}")
    en, de = zip(*[(row["en"], row["de"]) for row in toy("test", 1000)])
    far, i = zip(*[one[:2] for one in twins(meanings("test", 1000), "en") if one[2] == "far"])
    with torch.no_grad():
        en, de, far = [F.normalize(model.embedding(texts), dim=-1) for texts in (en, de, far)]
    wrong = (de @ en.T).argmax(1) != torch.arange(len(de))
    print(f"wrong translation: {wrong.double().mean():.1%}")
    wrong = (de[[*i]] * far).sum(1) > (de[[*i]] * en[[*i]]).sum(1)  # Is the twin nearer?
    print(f"order error: {wrong.double().mean():.1%} (bags of words or neighboring pairs: 50.0%)")
    for name, other in (("its translation", en), ("an unrelated sentence", en.roll(1, 0))):
        print(f"cosine of a sentence and {name}: {(de * other).sum(1).mean():.2f}")

if __name__ == "__main__":
    main()
# Not on this page, but in objectives.py: --align, --include-self, --order, --packing, --cls-view,
# and dropout. Its batches are one line of tokens, unpadded.
