"""MEXMA on one page: sentence embeddings learned from translations [arXiv 2409.12737].

We mask 40 % of the words of a sentence. The model predicts them from the words that are left and
from the embedding of the *translation*, so this one embedding has to carry the whole meaning. A
second loss pulls the embeddings of translations together, and a third, KoLeo, pushes each away from
its nearest neighbor. The paper starts from XLM-R and says that unmasking prevents collapse, where
all embeddings are the same. We start from random weights, and here KoLeo prevents it.

Run it: python -m minimal.mexma (two minutes on one CPU core). At the end we look up the
translations of 1,000 unseen German sentences among 1,000 English ones, and compare each with its
far twins. These have its words and neighboring pairs: a bag of them (minimal.bag) only guesses.
"""
import re
import sys

import torch
import torch.nn.functional as F
from torch import nn

sys.path.append(sys.path[0] + "/..")  # for python minimal/mexma.py
from corpora.toy import meanings, toy, twins

STEPS, BATCH, D, HEADS, LAYERS, HEAD_LAYERS = 220, 64, 128, 4, 2, 1  # D: width of the model

# ---- Data: 20,000 sentences of a toy language in English and German. Every word is one token.
split_words = re.compile(r"\w+|[^\w\s]").findall
pairs = [(row["en"], row["de"]) for row in toy("train", 20_000)]
vocabulary = sorted({word for pair in pairs for text in pair for word in split_words(text)})
PAD, CLS, SEP, MASK = range(4)  # the special tokens
token_id = {word: i for i, word in enumerate(vocabulary, start=4)}
V = 4 + len(vocabulary)

def tokenize(texts):  # N texts -> (N, L): [CLS] words [SEP], padded to the longest
    rows = [torch.tensor([CLS, *map(token_id.get, split_words(text)), SEP]) for text in texts]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)  # It pads with 0, which is PAD.

def mask_words(x):  # -> the masked tokens (N, L), and True (N, L) where the model has to predict
    chosen = (torch.rand(x.shape) < 0.4) & (x > MASK)
    dice = torch.rand(x.shape)  # As in BERT, 80 % become [MASK], 10 % a random word, 10 % stay.
    masked = torch.where(chosen & (dice < 0.8), MASK, x)
    return torch.where(chosen & (dice > 0.9), torch.randint(4, V, x.shape), masked), chosen

# ---- Model: a small BERT, and a head that predicts the masked words.
def make_blocks(count):
    return nn.ModuleList(nn.TransformerEncoderLayer(
        D, HEADS, 4 * D, dropout=0, activation="gelu", layer_norm_eps=1e-12, batch_first=True)
        for _ in range(count))  # 1e-12 as in the released code

def run_blocks(blocks, h, x):  # h (N, L, D): hidden states of the tokens x (N, L)
    for block in blocks:
        h = block(h, src_key_padding_mask=x == PAD)  # All tokens attend to all but the padding.
    return h

def koleo(s):  # -mean log(distance to the nearest other embedding) of the rows of (N, D)
    s = F.normalize(s, dim=-1)  # as in the released code; the paper's formula has raw embeddings
    nearest = (s @ s.T).detach().fill_diagonal_(-2).argmax(1)
    return -(F.pairwise_distance(s, s[nearest], eps=1e-8) + 1e-8).log().mean()

class Mexma(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(V, D), nn.Parameter(0.05 * torch.randn(64, D))
        self.embed.weight.data *= 0.05  # The same matrix computes the logits, so its std is small.
        self.norm, self.bias = nn.LayerNorm(D, 1e-12), nn.Parameter(torch.zeros(V))
        self.blocks, self.head = make_blocks(LAYERS), make_blocks(HEAD_LAYERS)

    def encode(self, x):  # (N, L) -> hidden states (N, L, D)
        h = self.norm(self.embed(x) + self.position[:x.shape[1]])
        return run_blocks(self.blocks, h, x)

    def cross_unmask(self, x, s):  # CE([s, x^], x), where s is the embedding of the translation
        masked, chosen = mask_words(x)
        h = torch.cat([s[:, None], self.encode(masked)[:, 1:]], 1)  # s replaces the state of [CLS].
        h = run_blocks(self.head, h, x)
        return F.cross_entropy(h[chosen] @ self.embed.weight.T + self.bias, x[chosen])

    def loss(self, a, b):  # L = alpha L_alignment + beta L_mlm + gamma L_KoLeo (section 3)
        # The paper has alpha = 1, beta = 1/2, so that mlm is a mean, and gamma = 0.005. From random
        # weights its MSE only shrinks all embeddings: we take the cosine, alpha = 2, gamma = 0.5.
        s_a, s_b = self.encode(a)[:, 0], self.encode(b)[:, 0]  # the embeddings: states at [CLS]
        mlm = self.cross_unmask(a, s_b) + self.cross_unmask(b, s_a)
        alignment = (1 - F.cosine_similarity(s_a, s_b)).mean()
        return 2 * alignment + 0.5 * mlm + 0.5 * (koleo(s_a) + koleo(s_b))

def main():
    torch.manual_seed(0)
    model = Mexma()
    print(f"parameters: {sum(x.numel() for x in model.parameters()) / 1e6:.2f} million")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0)
    for step in range(1, STEPS + 1):
        batch = zip(*[pairs[i] for i in torch.randperm(len(pairs))[:BATCH]])
        loss = model.loss(*map(tokenize, batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 1e-3 * min(step / 50, 1 - step / STEPS)
        optimizer.step()
        if step == 1 or step % 50 == 0:
            print(f"step {step}: loss {loss.item():.2f}")
    en, de = zip(*[(row["en"], row["de"]) for row in toy("test", 1000)])
    far, i = zip(*[one[:2] for one in twins(meanings("test", 1000), "en") if one[2] == "far"])
    with torch.no_grad():
        en, de, far = [F.normalize(model.encode(tokenize(x))[:, 0], dim=-1) for x in (en, de, far)]
    wrong = (de @ en.T).argmax(1) != torch.arange(len(de))
    print(f"wrong translation: {wrong.double().mean():.1%}")
    wrong = (de[[*i]] * far).sum(1) > (de[[*i]] * en[[*i]]).sum(1)  # Is the twin nearer?
    print(f"order error: {wrong.double().mean():.1%} (bag of words or pairs: 50% by construction)")

if __name__ == "__main__":
    main()
# Only in objectives.py: --align, --align-views, --koleo-input, --no-symmetrical, dropout.
