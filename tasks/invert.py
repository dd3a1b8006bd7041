"""What does a sentence vector say? A small decoder learns to write the texts that frozen vectors
were made of, and then reads the vectors of texts that it was not trained on.

It is a causal Model whose rows have a vector in the place of [CLS], every dimension standardised
over the training texts: what a narrow cloud still tells apart is as loud as in a wide one. N
vectors, D their width, V vocabulary; a row is the ids [CLS] text [SEP].
"""

from dataclasses import replace

import numpy as np
import torch
from torch import nn
from tqdm import trange

from data import rows_of
from evaluate import exact, generate, percent
from kernels.cross_entropy import linear_cross_entropy
from model import DECODER, Model, ModelConfig, Packed
from tasks.metrics import chrf
from tasks.probes import untrained
from train import TrainConfig, learning_rate, make_optimizer

RECIPE = TrainConfig(steps=1000, batch=32, lr=3e-3, seed=0)  # the same for every run
SHAPE = dict(DECODER, width=128, layers=2, heads=4, ffn_dim=384, dropout=0.0, causal=True)
LONGEST = 64  # tokens of a text; the rest is cut, and need not be written


class Decoder(Model):
    """A causal Model for which the ids from V on are vectors (N, D), mapped to its width."""

    def __init__(self, vectors, vocab):
        super().__init__(ModelConfig(vocab, max_positions=LONGEST + 1, **SHAPE))
        self.map = nn.Linear(vectors.shape[1], self.config.width)
        self.register_buffer("vectors", vectors)

    def embed_tokens(self, tokens, positions):
        is_vector = tokens >= self.config.vocab
        x, angles = super().embed_tokens(tokens.masked_fill(is_vector, 0), positions)
        x[is_vector] = self.map(self.vectors[tokens[is_vector] - self.config.vocab])
        return x, angles

    def loss(self, numbers, rows):
        """Mean cross-entropy of a token of rows behind the vectors of these numbers, in nats."""
        inputs = [[self.config.vocab + i, *row[1:-1]] for i, row in zip(numbers, rows)]
        states = self(Packed.of(inputs, causal=True).to(self.vectors.device))  # (T, width)
        targets = torch.from_numpy(np.concatenate([row[1:] for row in rows])).to(states.device)
        return linear_cross_entropy(*self.head(states), targets) / len(targets)


def fit(vectors, rows, vocab, device="cpu"):
    """Train a Decoder on rows and their vectors, the first of (N, D)."""
    rng = np.random.default_rng(RECIPE.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(RECIPE.seed)
        decoder = Decoder(vectors, vocab).to(device)
    optimizer = make_optimizer(decoder, RECIPE)
    for step in trange(RECIPE.steps, desc="decoder", leave=False, disable=None):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, RECIPE)
        batch = rng.integers(len(rows), size=RECIPE.batch)
        decoder.loss(batch, [rows[i] for i in batch]).backward()
        nn.utils.clip_grad_norm_(decoder.parameters(), RECIPE.clip)
        optimizer.step()
        optimizer.zero_grad()
    return decoder


@torch.no_grad()
def judge(decoder, tokenizer, numbers, rows):
    """What do vectors say, and is it these rows? -> {metric: number}, what is written."""
    prompts = [[tokenizer.vocab + i] for i in numbers]
    ids, _ = generate(decoder, prompts, tokenizer.special.sep, LONGEST)
    pairs = [(tokenizer.decode(one), tokenizer.decode(gold)) for one, gold in zip(ids, rows)]
    written, golds = zip(*pairs)
    return {"loss": decoder.loss(numbers, rows).item(), "chrf": chrf(written, golds),
            "exact": percent([exact(*pair) for pair in pairs])}, written


def read(trained, tested, scale=1):
    """Fit a Decoder to one Evaluation, ask it about another -> {metric: number}, {kind: texts}.
    The vectors are multiplied by `scale`: with 0 it knows the language alone."""
    tokenizer = tested.tokenizer
    known, = trained.vectors.values()  # (N, D)
    vectors = torch.cat([known, *tested.vectors.values()])
    # A dimension that is the same for all texts stays at 0.
    vectors = scale * (vectors - known.mean(0)) / known.std(0).clamp(min=1e-6)
    texts, = trained.texts.values()
    rows = rows_of(tokenizer, texts + next(iter(tested.texts.values())), max_text=LONGEST)
    own = range(len(known), len(rows))
    # The vector of another text misleads.
    asked = {"": own, "/shuffled": [*own[1:], own[0]]}
    if len(vectors) > len(rows):
        asked["/translation"] = range(len(rows), len(vectors))
    decoder = fit(vectors, rows[:len(known)], tokenizer.vocab, tested.model.embed.weight.device)
    scores = {}
    written = {}
    for kind, numbers in asked.items():
        golds = rows[len(known):] * (len(numbers) // tested.count)
        found, written[kind] = judge(decoder, tokenizer, numbers, golds)
        scores |= {metric + kind: value for metric, value in found.items()}
    return scores, written


def invert(evaluation, options):
    """What Decoders write from a model's vectors, and from those of an untrained one."""
    trained, tested = (replace(evaluation, rows=rows) for rows in evaluation.apart)
    scores, written = read(trained, tested)
    column, *others = tested.texts
    for i in range(0, tested.count, -(-tested.count // 10)):  # ten texts to read
        options.lines += [tested.texts[column][i], f"    vector: {written[''][i]}"]
        if others:
            options.lines.append(f"    vector of {others[0]}: {written['/translation'][i]}")
    if options.controls:
        twin = untrained(evaluation.model)
        control, _ = read(replace(trained, model=twin), replace(tested, model=twin))
        scores |= {f"{name}/untrained": value for name, value in control.items()}
        control, _ = read(trained, tested, scale=0)
        scores |= {f"{name}/no_vector": control[name] for name in ("loss", "chrf", "exact")}
    return {"rows": tested.count, "rows_trained": trained.count} | scores
