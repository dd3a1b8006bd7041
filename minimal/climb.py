"""When does predicting latents beat predicting tokens? An exact answer on one page of NumPy, with
the learner of Own Latents [arXiv 2605.27734] on the grammar of arXiv 2307.02129.

A random grammar writes texts: the root becomes a pair of symbols, each of them becomes a pair, down
to the tokens. Each symbol has m synonymous pairs. A learner sees only tokens and climbs back up: it
groups the pairs that have similar contexts, replaces each pair by its group, and repeats. A context
is what the sibling of a pair contains: its *tokens*, or two *latents*, the learner's own groups.
Run it: python -m minimal.climb (10 seconds). It prints how many texts each kind of context needs.
It does not show that latents win on language: here the tree is fixed, the learner knows which
tokens belong together, all positions share their rules, and (almost) no pair has two parents."""
import numpy as np

V, M, DEPTHS, GRAMMARS = 8, 4, (3, 4, 5), 3  # symbols of a level, pairs of a symbol, levels
SIZES, ENOUGH = [2 ** power for power in range(8, 18)], 0.95  # of texts; fraction to be found

class Grammar:
    def __init__(self, seed, v=V, m=M, depth=DEPTHS[-1], redrawn=0.0):
        self.rng, self.v, self.pairs, self.rules = np.random.default_rng(seed), v, [], []
        for _ in range(depth):
            pairs = self.rng.permutation(v * v)[:v * m]  # All are different: each has one parent,
            again = self.rng.random(v * m) < redrawn     # except for pairs that are drawn again.
            pairs[again] = self.rng.choice(pairs, again.sum())
            self.pairs.append(np.stack(np.divmod(pairs, v), -1).reshape(v, m, 2))
            # rule[a, b, c] = p(symbol a becomes the pair of b and c)
            self.rules.append(np.eye(v * v)[pairs].reshape(v, m, v, v).mean(1))

    def sample(self, texts):  # -> the symbols of each level, (texts, 2 ** level); the last: tokens
        levels = [self.rng.integers(self.v, size=(texts, 1))]
        for pairs in self.pairs:
            choice = self.rng.integers(pairs.shape[1], size=levels[-1].shape)
            levels.append(pairs[levels[-1], choice].reshape(texts, -1))
        return levels

    def posterior(self, tokens, visible):  # both (N, L) -> each level's p(symbol | visible tokens)
        # Belief propagation is exact on a tree. Upwards: p(visible tokens below | symbol).
        up = [np.where(visible[..., None], np.eye(self.v)[tokens], 1.0)]
        for rule in self.rules[::-1]:
            message = np.einsum("abc,nib,nic->nia", rule, up[0][:, ::2], up[0][:, 1::2])
            up.insert(0, normalize(message))
        down = [np.full(up[0].shape, 1 / self.v)]  # p(symbol | visible tokens that are not below)
        for rule, below in zip(self.rules, up[1:]):
            left = np.einsum("abc,nia,nic->nib", rule, down[-1], below[:, 1::2])
            right = np.einsum("abc,nia,nib->nic", rule, down[-1], below[:, ::2])
            down.append(normalize(np.stack([left, right], 2).reshape(below.shape)))
        return [normalize(one * other) for one, other in zip(up, down)]

def normalize(p):
    return p / p.sum(-1, keepdims=True)

def explained(grammar, texts=1000):
    """Return R2 given the context for each direction of a masked pair of tokens, largest first."""
    tokens = grammar.sample(texts)[-1]
    masked = grammar.rng.random((texts, tokens.shape[1] // 2)) < 0.3
    parents = grammar.posterior(tokens, ~masked.repeat(2, 1))[-2][masked]  # (N, v)
    rule = grammar.rules[-1].reshape(grammar.v, -1)
    p = parents @ rule[:, rule.any(0)]  # (N, v * m): p(pair | context)
    scale = np.sqrt(p.mean(0))  # The eigenvalues are R2, and one 0 because each row sums to 1.
    return np.linalg.eigvalsh(np.cov(p.T, bias=True) / scale / scale[:, None])[:0:-1]

def cluster(points, size, count):  # (N, D) -> the group of each point (N,), one of `count`
    """Merge the two groups whose merger adds the least squared error, and repeat [Ward 1963]."""
    group, points, size = np.arange(len(points)), points.copy(), size.copy()
    while len(points) > count:
        cost = ((points[:, None] - points) ** 2).sum(-1) / (1 / size[:, None] + 1 / size)
        np.fill_diagonal(cost, np.inf)
        a, b = sorted(divmod(cost.argmin(), len(points)))
        points[a], size[a] = np.average(points[[a, b]], 0, size[[a, b]]), size[a] + size[b]
        points, size = np.delete(points, b, 0), np.delete(size, b)
        group = np.where(group == b, a, group - (group > b))
    return group

def climb(levels, texts, contexts="latents", codes=V):
    """Climb from the tokens to level 1 -> the fraction of its symbols that are found. `codes`: the
    number of groups at the levels between."""
    levels = [level[:texts] for level in levels]
    code, kinds = levels[-1], V  # the code of each node, out of `kinds`
    for level in range(len(levels) - 2, 0, -1):
        inside, n = (levels[-1], V) if contexts == "tokens" else (code, kinds)
        sibling = inside.reshape(texts, 2 ** level, -1)[:, np.arange(2 ** level) ^ 1]
        pair = code[:, ::2] * kinds + code[:, 1::2]  # (N, nodes)
        counts = np.stack([np.bincount((pair * n + symbol).ravel(), minlength=kinds * kinds * n)
                           for symbol in np.moveaxis(sibling, 2, 0)]).reshape(-1, kinds ** 2, n)
        size = counts[0].sum(-1).astype(float)  # how often each pair occurs
        means = normalize(counts[:, size > 0])  # (width, pairs, n): p(context | pair)
        kinds = codes if level > 1 else V
        group = np.zeros(len(size), int)
        group[size > 0] = cluster(np.hstack(means), size[size > 0], kinds)
        code = group[pair]
    table = np.bincount((code * V + levels[1]).ravel(), minlength=V * V).reshape(V, V)
    return table.max(1).sum() / table.sum()  # The most frequent symbol of a group is found.

def texts_needed(found):  # [fraction for each of SIZES] -> texts, at most the largest size
    from_here_on = np.minimum.accumulate(found[::-1])[::-1]
    return 2 ** np.interp(ENOUGH, from_here_on, np.log2(SIZES))

def main():
    r2 = explained(Grammar(0, depth=4))
    print(f"The context of a masked pair explains {(r2 > 1e-9).sum()} of its {len(r2)} directions.")
    print(f"texts for {ENOUGH:.0%}", *(f"{f'depth {depth}':>9}" for depth in DEPTHS))
    trees = [Grammar(seed).sample(SIZES[-1]) for seed in range(GRAMMARS)]
    for contexts in ("latents", "tokens"):
        row = f"{contexts:13}"
        for depth in DEPTHS:
            needed = [texts_needed([climb(tree[:depth + 1], texts, contexts) for texts in SIZES])
                      for tree in trees]
            row += f" {np.exp(np.log(needed).mean()):9,.0f}"
        print(row)

if __name__ == "__main__":
    main()
