"""Predict and Reconstruct on one page: a JEPA and masked words in one model [arXiv 2606.05173].

Reconstruct: the encoder predicts masked words, which also prevents collapse. Predict: it reads a
part of the sentence, and a small predictor guesses the hidden states of two other parts. An EMA
teacher, a copy of the encoder that follows it slowly, computes them from the whole sentence. A
learned lambda balances the two losses. (The paper's rows have 512 tokens, ours have 22.)
Run it: python -m minimal.predict_and_reconstruct (two minutes on one CPU core).
"""
import copy
import re
import sys

import torch
import torch.nn.functional as F
from torch import nn

sys.path.append(sys.path[0] + "/..")  # for python minimal/predict_and_reconstruct.py
from corpora.toy import toy

STEPS, BATCH, D, LAYERS, HEADS = 200, 64, 128, 3, 4  # D: width of the encoder
# ---- Data: 20,000 sentences of a toy English. Every word is one token.
split_words = re.compile(r"\w+|[^\w\s]").findall
sentences = [row["en"] for row in toy("train", 20_000)]
vocabulary = sorted({word for text in sentences for word in split_words(text)})
PAD, CLS, SEP, MASK = range(4)  # the special tokens
token_id, V = {word: i for i, word in enumerate(vocabulary, start=4)}, 4 + len(vocabulary)

def tokenize(texts):  # N texts -> (N, L): [CLS] words [SEP], padded to the longest
    rows = [torch.tensor([CLS, *map(token_id.get, split_words(text)), SEP]) for text in texts]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)  # It pads with 0, which is PAD.

def mask_words(x):  # Return the masked tokens, and True where the model has to predict: (N, L) each
    chosen = (torch.rand(x.shape) < 0.15) & (x > MASK)
    dice = torch.rand(x.shape)  # As in BERT, 80 % become [MASK], 10 % a random word, 10 % stay.
    masked = torch.where(chosen & (dice < 0.8), MASK, x)
    return torch.where(chosen & (dice > 0.9), torch.randint(4, V, x.shape), masked), chosen

def draw_blocks(x, count, low, high):  # (N, L) -> (N, count, L): True inside of a random block
    length = (x != PAD).sum(1)[:, None, None]
    size = (length * torch.empty(()).uniform_(low, high)).int().clamp(min=1)
    start = (torch.rand(len(x), count, 1) * (length - size + 1)).int()
    return (start <= torch.arange(x.shape[1])) & (torch.arange(x.shape[1]) < start + size)

# ---- Model: the encoder, the teacher and the predictor are all a Transformer.
class Transformer(nn.Module):
    def __init__(self, inputs, d, layers):
        super().__init__()
        self.inputs, self.norm = inputs, nn.LayerNorm(d)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(d, HEADS, 4 * d, dropout=0,
            activation="gelu", batch_first=True, norm_first=True) for _ in range(layers))
        angle = torch.arange(64)[:, None] / 10_000 ** (torch.arange(0, d, 2) / d)  # sinusoids
        self.register_buffer("position", torch.stack([angle.sin(), angle.cos()], 2).flatten(1))

    def forward(self, x, visible):  # Every token attends to the tokens that are visible, (N, L).
        h = self.inputs(x) + self.position[:x.shape[1]]
        for block in self.blocks:
            h = block(h, src_key_padding_mask=~visible)
        return self.norm(h)  # (N, L, d)

class Hybrid(nn.Module):
    def __init__(self, d=64):  # d: width of the predictor
        super().__init__()
        self.encoder = Transformer(nn.Embedding(V, D), D, LAYERS)
        self.teacher = copy.deepcopy(self.encoder).requires_grad_(False)
        self.to_predictor, self.to_states = nn.Linear(D, d), nn.Linear(d, D)
        self.w, self.mask_token = nn.Parameter(torch.zeros(())), nn.Parameter(0.02 * torch.randn(d))
        self.predictor = Transformer(nn.Identity(), d, 2)
        self.regressor = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.LayerNorm(D), nn.Linear(D, V))

    def predict(self, x, masked):  # Return guesses and true states of the blocks' tokens: (K, D)
        blocks = draw_blocks(x, 2, 0.10, 0.25)  # (N, 2, L); the numbers are fractions of a row
        context = draw_blocks(x, 1, 0.65, 0.85) & ~blocks.any(1, keepdim=True)  # (N, 1, L)
        # The encoder reads only the context. The predictor also knows where one of the blocks is.
        h = self.to_predictor(self.encoder(masked, context[:, 0]))[:, None]  # (N, 1, L, d)
        rows, visible = torch.where(blocks[..., None], self.mask_token, h), context | blocks
        guesses = self.to_states(self.predictor(rows.flatten(0, 1), visible.flatten(0, 1)))
        true = self.teacher(x, x != PAD).repeat_interleave(2, 0)  # (2N, L, D)
        return guesses[blocks.flatten(0, 1)], true[blocks.flatten(0, 1)]

    def losses(self, x):  # L = lambda L_JEPA + (1 - lambda) L_MLM, lambda = sigmoid(w); L_MLM alone
        masked, chosen = mask_words(x)
        mlm = F.cross_entropy(self.regressor(self.encoder(masked, x != PAD)[chosen]), x[chosen])
        jepa = (1 - F.cosine_similarity(*self.predict(x, masked))).mean()
        return self.w.sigmoid() * jepa + (1 - self.w.sigmoid()) * mlm, mlm

def main():
    torch.manual_seed(0)
    model = Hybrid()
    print(f"parameters: {sum(x.numel() for x in model.parameters()) / 1e6:.2f} million")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    for step in range(1, STEPS + 1):
        loss, mlm = model.losses(tokenize([sentences[i] for i in torch.randperm(20_000)[:BATCH]]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 2e-3 * min(step / 50, 1 - step / STEPS)
        optimizer.step()
        for slow, fast in zip(model.teacher.parameters(), model.encoder.parameters()):
            slow.lerp_(fast.detach(), 0.03 * (1 - step / STEPS))  # m from 0.97 (paper 0.996) to 1
        if step == 1 or step % 50 == 0:
            print(f"step {step}: loss {loss:.2f}, mlm {mlm:.2f}, lambda {model.w.sigmoid():.2f}")
    x = tokenize([row["en"] for row in toy("test", 1000)])
    with torch.no_grad():
        guesses, true = model.predict(x, x)
        print(f"loss of masked words: {model.losses(x)[1]:.2f} nats (word frequencies: 3.3)")
    print(f"lambda: {model.w.sigmoid():.2f} (0.50 before training: it drifts to the smaller loss)")
    for name, states in (("true", true), ("unrelated", true.roll(100, 0))):
        print(f"cosine, guess and {name} state: {F.cosine_similarity(guesses, states).mean():.2f}")

if __name__ == "__main__":
    main()
