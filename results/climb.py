"""The experiment `climb` on one grammar, as JSON: all variants of the learner of minimal/climb.py,
or the same climb by gradient descent.

    python -m results.climb learner --seed 10
    python -m results.climb network --seed 10 --contexts latents --loss cross-entropy
"""

import json

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import Parser, comma_list, run_program
from minimal.climb import DEPTHS, SIZES, Grammar, V, climb, explained, texts_needed

DEPTH = 4  # levels below the root, where we do not compare depths
CODES, BATCH, TEACHER = 12, 128, 0.9  # groups at each level; texts of a step; EMA of the teacher
TESTED = 3000  # texts on which a network is probed


# ---- the learner of the page


def projection(seed, dimensions):
    """Return a function that draws latents (codes, dimensions) for codes, level after level."""
    rng = np.random.default_rng(seed)
    return lambda codes: rng.standard_normal((codes, dimensions))


def learner_scores(seed):
    """Return the percentage of the symbols of level 1 that each variant of the learner finds, and
    the number of texts that it needs. All variants read the same texts of one tree."""
    tree = Grammar(seed).sample(SIZES[-1])
    scores = {}

    def learn(row, column="", depth=DEPTH, sizes=SIZES, contexts="latents", codes=V, dimensions=V):
        found = []
        for texts in sizes:  # a code has the same latent at each size
            latent = projection(seed, dimensions) if dimensions < V else np.eye
            found.append(climb(tree[:depth + 1], texts, contexts, codes, latent))
            scores[f"found{column}, {texts} texts/{row}"] = 100 * found[-1]
        return found

    for contexts in ("latents", "tokens"):
        needed = {depth: texts_needed(learn(contexts, f", depth {depth}", depth, SIZES, contexts))
                  for depth in DEPTHS}
        for depth, texts in needed.items():
            scores[f"texts, depth {depth}/{contexts}"] = texts
        # The factor for each level of depth.
        scores[f"growth/{contexts}"] = (needed[5] / needed[3]) ** 0.5
    for codes in (4, 6, 7, 8, 9, 10, 12, 16):
        few, _, many = learn(f"{codes} codes", sizes=[2048, 4096, 8192], codes=codes)
        scores[f"gain/{codes} codes"] = 100 * (many - few)
    for dimensions in (1, 2, 3, 5, 8):
        row = f"{dimensions} dimensions"
        scores[f"texts/{row}"] = texts_needed(learn(row, dimensions=dimensions))
    for percent in (3, 10):
        tree = Grammar(seed, redrawn=percent / 100).sample(SIZES[-1])
        for contexts in ("latents", "tokens"):
            learn(contexts, f", {percent} % redrawn", sizes=[8192], contexts=contexts)
    for number, r2 in enumerate(explained(Grammar(seed, depth=DEPTH)), 1):
        scores[f"R2/{number}"] = r2
    return scores


# ---- the same climb by gradient descent


class Climber(nn.Module):
    """All levels at once. Each level maps a pair of codes to CODES soft groups, and predicts from
    the group what the sibling contains: tokens, or the codes of an EMA teacher one level below.

    A level is trained by its own loss alone: no gradient reaches the levels below it."""

    def __init__(self, contexts, loss):
        super().__init__()
        self.contexts, self.loss = contexts, loss
        self.group, self.predict = nn.ParameterList(), nn.ParameterList()
        for height in range(1, DEPTH):
            below = V if height == 1 else CODES
            size = V * 2 ** height if contexts == "tokens" else 2 * below
            self.group.append(torch.randn(below * below, CODES))
            self.predict.append(torch.zeros(CODES, size))
        levels = 0 if contexts == "tokens" else DEPTH - 2  # whose codes are targets
        self.teacher = [weight.detach().clone() for weight in self.group[:levels]]

    def codes(self, tokens, weights):
        """Return the codes (N, nodes, kinds) of each level, the tokens' first."""
        levels = [F.one_hot(tokens, V).float()]
        for weight in weights:
            left, right = levels[-1].detach()[:, ::2], levels[-1].detach()[:, 1::2]
            pair = left[..., :, None] * right[..., None, :]  # (N, nodes, kinds, kinds)
            levels.append((pair.flatten(2) @ weight).softmax(-1))
        return levels

    def forward(self, tokens):
        """Return the sum of the losses of all levels."""
        levels = self.codes(tokens, self.group)
        with torch.no_grad():
            teacher = self.codes(tokens, self.teacher)
        total = 0
        for height, code in enumerate(levels[1:], 1):
            inside = teacher[0 if self.contexts == "tokens" else height - 1]
            target = inside.unflatten(1, (code.shape[1], -1))  # (N, nodes, what is inside, kinds)
            target = target.unflatten(1, (-1, 2)).flip(2).flatten(1, 2)  # of the sibling
            predicted = (code @ self.predict[height - 1]).view(target.shape)
            if self.loss == "cross-entropy":
                total -= (target * predicted.log_softmax(-1)).sum(-1).mean()
            else:
                total += (target - predicted).square().sum(-1).mean()
        return total

    def after_step(self):
        for slow, weight in zip(self.teacher, self.group):
            slow.lerp_(weight.detach(), 1 - TEACHER)

    @torch.no_grad()
    def probe(self, levels):
        """Return the accuracy in percent of a ridge regression from the codes to the symbols of
        level 1, fitted on half of the texts and tested on the other."""
        x = self.codes(torch.as_tensor(levels[-1]), self.group)[-1].flatten(0, 1).double()
        y = torch.as_tensor(levels[1]).flatten()
        half = len(x) // 2
        gram = x[:half].T @ x[:half] + 0.1 * torch.eye(CODES)
        ridge = torch.linalg.solve(gram, x[:half].T @ F.one_hot(y[:half], V).double())
        return 100 * ((x[half:] @ ridge).argmax(-1) == y[half:]).double().mean()


def network_scores(seed, contexts, loss, lr, steps, probed):
    """Return the accuracy of a network that is trained on 2,048 and on 8,192 texts."""
    tree = Grammar(seed).sample(SIZES[-1])[:DEPTH + 1]
    tested = [level[-TESTED:] for level in tree]
    scores = {}
    for texts in (2048, 8192):
        torch.manual_seed(seed)
        tokens = torch.as_tensor(tree[-1][:texts])
        model = Climber(contexts, loss)
        optimizer = torch.optim.Adam(model.parameters(), lr)
        for step in range(1, steps + 1):
            objective = model(tokens[torch.randint(texts, (BATCH,))])
            optimizer.zero_grad()
            objective.backward()
            optimizer.step()
            model.after_step()
            if step in probed:
                scores[f"found, {texts} texts, step {step}"] = model.probe(tested)
        scores[f"found, {texts} texts"] = model.probe(tested)
    return scores


# ---- the command


def numbers(text):
    return [int(word) for word in comma_list(text)]


def parse(words):
    parser = Parser("python -m results.climb", __doc__.partition("\n\n")[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    learner, network = (kinds.add_parser(kind, description=description) for kind, description in (
        ("learner", "Group pairs by their contexts."), ("network", "Learn the groups by Adam.")))
    for one in (learner, network):
        one.add_argument("--seed", type=int, required=True, help="of the grammar and its texts")
    add = network.add_argument
    add("--contexts", choices=["latents", "tokens"], required=True, help="what a group predicts")
    add("--loss", choices=["cross-entropy", "squared-error"], required=True)
    add("--lr", type=float, required=True, help="learning rate of Adam")
    add("--steps", type=int, required=True, help=f"training steps of {BATCH} texts")
    add("--probed", type=numbers, default=[], help="also probe after these steps")
    return parser.parse_args(words)


def main(words):
    options = vars(parse(words))
    scores = {"learner": learner_scores, "network": network_scores}[options.pop("kind")](**options)
    print(json.dumps({name: round(float(value), 4) for name, value in scores.items()}))


if __name__ == "__main__":
    run_program(main)
