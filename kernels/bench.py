"""Attention, and whole training steps, against their peers: one process, interleaved, medians; correctness first.

    python kernels/bench.py                        # all that this machine can run -> results/gpu/bench.json and bench.md
    python kernels/bench.py --only tiles,steps     # parts: tiles, schedule, correctness, attention, steps, rest

Without a CUDA GPU the tile counts, the cost of a schedule, and steps and parts at toy size are measured, and the rest says "not yet measured".
At the end stands the table of what this project promises of a GPU (TARGETS), each row with what was measured, or not yet.
Time on a GPU is the device's (Triton's do_bench, which empties the cache between runs); a peer that cannot run says why.
"""

import argparse
import inspect
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))
import data  # noqa: E402
from data import Special  # noqa: E402
from kernels import schedule, why_not  # noqa: E402
from model import DECODER, Model, ModelConfig, Packed, View, attention, set_attention, size_config  # noqa: E402
from objectives import LlmJepa, Mexma, Ntp, koleo, mse, vocabulary_loss  # noqa: E402
from results.packed import padded_states  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MISSING = "not yet measured"


class Shape(NamedTuple):
    packed: Packed
    heads: int
    kv_heads: int
    size: int
    causal: bool | None  # None: tokens see two intervals


def lengths(mean, spread, low, high, count, seed=0):
    """Log-normal lengths; the means and ranges are those of the papers' data, the shapes are assumed."""
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - spread ** 2 / 2, spread, count)
    return np.clip(drawn, low, high).astype(int)


def one_forward(texts, codes):
    blank = lambda n, shares=None: View(np.zeros(n, np.int64), True, shares)
    return Packed.views([[blank(t + 2), blank(c + 1, (0, t + 1)), blank(c, (0, 1))] for t, c in zip(texts, codes)])


def shapes():
    blank = lambda drawn, causal=False: Packed.of([np.zeros(n, np.int64) for n in drawn], causal)
    uniform = lambda count: np.random.default_rng(0).integers(8, 41, count)
    return {"sentences 8-40, small": Shape(blank(uniform(64)), 16, 16, 64, False), "sentences 8-40": Shape(blank(uniform(640)), 16, 16, 64, False),
            "all of length 1": Shape(blank(np.ones(4096, int)), 16, 16, 64, False),
            "MEXMA encoder, mean 35": Shape(blank(lengths(35, .7, 4, 200, 600)), 16, 16, 64, False),
            "MEXMA head, mean 35": Shape(blank(lengths(35, .7, 4, 200, 300)), 8, 8, 128, False),
            "BERT-JEPA pairs, mean 90": Shape(blank(lengths(90, .5, 10, 256, 128)), 12, 12, 64, False),
            "hybrid, 512": Shape(blank([512] * 64), 8, 8, 64, False),
            "LLM-JEPA NL-RX": Shape(one_forward(lengths(17, .2, 8, 40, 128), lengths(12, .3, 4, 40, 128, 1)), 32, 8, 64, None),
            "LLM-JEPA GSM8K": Shape(one_forward(lengths(60, .4, 15, 200, 128), lengths(74, .45, 15, 300, 128, 1)), 32, 8, 64, None),
            "causal documents, mean 600": Shape(blank(lengths(600, .8, 20, 2048, 54), True), 8, 8, 64, True),
            "causal documents, 2048": Shape(blank([2048] * 16, True), 32, 8, 64, True),
            "one causal document, 16k": Shape(blank([16384], True), 16, 16, 128, True)}


# ---------------------------------------------------------------------------------------------------------------------
# Tiles and schedules: counted and timed on the host


def aligned(packed, size):
    """Pairs computed by blocks of `size` queries and keys at multiples of `size`: FlexAttention's block mask."""
    count = -(-len(packed.tokens) // size)
    grid, block = np.zeros((count, count + 1), np.int64), np.arange(len(packed.tokens)) // size
    for low, high in packed.sees.numpy().reshape(-1, 2, 2).transpose(1, 2, 0):
        some = low < high
        np.add.at(grid, (block[some], low[some] // size), 1)
        np.subtract.at(grid, (block[some], -(-high[some] // size)), 1)
    return int((grid.cumsum(1) > 0).sum()) * size ** 2


def per_row(packed, causal, size):
    """Pairs computed by kernels that give each row its own tiles (varlen): `size` queries by `size` keys."""
    blocks = -(-packed.rows.diff().long() // size)
    return int((blocks * (blocks + 1) // 2 if causal else blocks ** 2).sum()) * size ** 2


def plan_of(shape):
    share = shape.heads // shape.kv_heads
    return schedule.plan(shape.packed.sees.numpy(), share, *schedule.choose((9, 0), shape.size, 2))


def tiles():
    """Computed over visible pairs, per head: 1 is no waste."""
    table = {}
    for name, shape in shapes().items():
        ours, pairs = plan_of(shape), shape.packed.pairs()
        done = schedule.computed(ours, shape.heads // shape.kv_heads)
        local = (ours.local[:, 1] - ours.local[:, 0]).sum().item()
        table[name] = {"tokens": len(shape.packed.tokens), "keys a token": round(pairs / len(shape.packed.tokens), 1),
                       "tokens in local tiles, %": round(100 * local / len(shape.packed.tokens), 1),
                       "local tiles full, %": round(100 * local / max(1, len(ours.local) * ours.tiles.local[0]), 1),
                       "ours, forward and dq": round(done["forward"] / pairs, 2), "ours, dk and dv": round(done["keys"] / pairs, 2),
                       "blocks of 128": round(aligned(shape.packed, 128) / pairs, 2), "blocks of 64": round(aligned(shape.packed, 64) / pairs, 2),
                       "128 by 128 per row": "-" if shape.causal is None else round(per_row(shape.packed, shape.causal, 128) / pairs, 2)}
    return table


def schedules():
    """Milliseconds of one core to make a batch's plan, once for all layers."""
    table = {}
    for name, shape in shapes().items():
        times = interleaved({"plan": lambda: plan_of(shape)}, 5, core)
        table[name] = {"tokens": len(shape.packed.tokens), "ms": times["plan"]["ms"]}
    return table


# ---------------------------------------------------------------------------------------------------------------------
# Time


def host(run):
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start)


def core(run):
    """Milliseconds of this thread, whatever else the machine does."""
    start = time.thread_time()
    run()
    return 1000 * (time.thread_time() - start)


def device(run):
    import triton.testing
    return triton.testing.do_bench(run, warmup=20, rep=60, return_mode="median")


def interleaved(runs, rounds, clock=None):
    """{name: function} -> {name: median ms of the rounds, their spread, and peak memory; or why it failed}. The first is ours: it may not fail."""
    clock, first = clock or (device if DEVICE.type == "cuda" else host), next(iter(runs))
    times, peak, found = {name: [] for name in runs}, dict.fromkeys(runs, 0), {}
    for number in range(rounds + 1):
        for name, run in runs.items():
            if name not in found:
                try:
                    if DEVICE.type == "cuda":
                        torch.cuda.reset_peak_memory_stats()
                    times[name].append(clock(run))
                    peak[name] = torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else 0
                except Exception as error:                               # a peer that lacks this layout, this GPU or the memory
                    if name == first:
                        raise
                    found[name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"}
    for name in runs:
        if name not in found:
            kept = times[name][1:]                                       # the first round compiles and warms up
            found[name] = {"ms": round(statistics.median(kept), 4), "spread, %": round(100 * (max(kept) - min(kept)) / statistics.median(kept), 1)}
            found[name] |= {"peak GB": round(peak[name] / 2 ** 30, 2)} if peak[name] else {}
    base = found[first]["ms"]
    return {name: row | ({"times ours": round(row["ms"] / base, 2)} if "ms" in row else {}) for name, row in found.items() if name in runs}


# ---------------------------------------------------------------------------------------------------------------------
# Attention: every function takes q (T, H, K), k, v (T, Hkv, K) and gives (T, H, K)


def flex(shape, block):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    low, high, low2, high2 = (x.contiguous() for x in shape.packed.sees.to(DEVICE).T)

    def visible(batch, head, query, key):
        return (low[query] <= key) & (key < high[query]) | (low2[query] <= key) & (key < high2[query])

    count, compiled = len(shape.packed.tokens), torch.compile(flex_attention, dynamic=False)
    make = lambda: torch.compile(create_block_mask)(visible, None, None, count, count, device=DEVICE, BLOCK_SIZE=block)
    mask = make()

    def run(q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return compiled(q, k, v, block_mask=mask, enable_gqa=shape.heads != shape.kv_heads)[0].transpose(0, 1)

    return run, make


def varlen(shape):
    from torch.nn.attention.varlen import varlen_attn
    bounds, longest = shape.packed.rows.to(DEVICE), int(shape.packed.rows.diff().max())
    names = inspect.signature(varlen_attn).parameters                    # the causal argument was renamed
    more = dict(is_causal=shape.causal) if "is_causal" in names else dict(window_size=(-1, 0) if shape.causal else (-1, -1))
    more |= dict(enable_gqa=True) if shape.heads != shape.kv_heads else {}
    return lambda q, k, v: varlen_attn(q, k, v, bounds, bounds, longest, longest, **more)


def efficient(shape):
    """CUTLASS's kernel that xFormers' BlockDiagonalMask used, hence MEXMA's code."""
    if shape.heads != shape.kv_heads:
        raise ValueError("no shared heads")
    bounds, longest = shape.packed.rows.to(DEVICE), int(shape.packed.rows.diff().max())
    return lambda q, k, v: torch.ops.aten._efficient_attention_forward(q[None], k[None], v[None], None, bounds, bounds, longest, longest, 0.0,
                                                                       int(shape.causal), True)[0][0]


def dense(shape):
    if len(shape.packed.tokens) > 4096:
        raise ValueError("a mask of T x T is too large")
    low, high, low2, high2 = shape.packed.sees.to(DEVICE).T[..., None]
    key = torch.arange(len(low), device=DEVICE)
    mask = (low <= key) & (key < high) | (low2 <= key) & (key < high2)
    return lambda q, k, v: F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), mask,
                                                          enable_gqa=shape.heads != shape.kv_heads)[0].transpose(0, 1)


def padded(shape):
    """One rectangle of the longest row, with a key mask. The copies into it and out of it count."""
    starts, sizes = shape.packed.rows[:-1].long().to(DEVICE), shape.packed.rows.diff().long().to(DEVICE)
    place = torch.arange(int(sizes.max()), device=DEVICE)
    real = place < sizes[:, None]                                        # (R, L)
    token = torch.where(real, starts[:, None] + place, 0)
    slot = real.flatten().nonzero()[:, 0]
    mask = real[:, None, None] & (place <= place[:, None] if shape.causal else True)

    def run(q, k, v):
        q, k, v = (x[token].transpose(1, 2) for x in (q, k, v))          # (R, heads, L, K)
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=shape.heads != shape.kv_heads)
        return out.transpose(1, 2).flatten(0, 1)[slot]

    return run


PEERS = {"FlexAttention, blocks of 128": lambda shape: flex(shape, 128)[0], "FlexAttention, blocks of 64": lambda shape: flex(shape, 64)[0],
         "torch varlen": varlen, "efficient attention with cu_seqlens": efficient, "SDPA, dense mask": dense, "SDPA, padded": padded}
ONE_INTERVAL = ("torch varlen", "efficient attention with cu_seqlens", "SDPA, padded")


def attentions(dtype=torch.bfloat16, names=None):
    """Forward and backward of each shape, ours and the peers', on views of one fused projection; peers that disagree with ours are not timed."""
    table = {}
    for name, shape in ((name, shape) for name, shape in shapes().items() if names is None or name in names):
        heads, kv_heads, size = shape[1:4]
        torch.manual_seed(0)
        qkv = torch.randn(len(shape.packed.tokens), (heads + 2 * kv_heads) * size, device=DEVICE, dtype=dtype)
        grad, packed = torch.randn(len(qkv), heads * size, device=DEVICE, dtype=dtype), shape.packed.to(DEVICE)
        leaf = qkv.clone().requires_grad_()
        forward, backward, failed = {"ours": lambda: attention(leaf, heads, kv_heads, packed, "triton")}, {}, {}
        out = forward["ours"]()
        backward["ours"] = lambda: torch.autograd.grad(out, leaf, grad, retain_graph=True)
        for peer, make in PEERS.items():
            try:
                if shape.causal is None and peer in ONE_INTERVAL:
                    raise ValueError("has one interval a token")
                run, parts = make(shape), [x.detach().requires_grad_() for x in qkv.unflatten(1, (-1, size)).split([heads, kv_heads, kv_heads], 1)]
                theirs = run(*parts)
                if (theirs.flatten(1) - out).abs().max() > 0.03:
                    raise ValueError("disagrees with ours")
                forward[peer] = lambda run=run, parts=parts: run(*parts)
                backward[peer] = lambda theirs=theirs, parts=parts: torch.autograd.grad(theirs, parts, grad.view_as(theirs), retain_graph=True)
            except Exception as error:
                failed[peer] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"}
        both = {"forward": interleaved(forward, 5) | failed, "backward": interleaved(backward, 5) | failed}
        flops, item = shape.packed.pairs() * heads * size, qkv.element_size()
        moved = len(qkv) * (2 * heads + 2 * kv_heads) * size * item       # q, k, v and the states, once each
        for what, factor, bytes in (("forward", 4, moved), ("backward", 10, 2 * moved + len(qkv) * heads * size * item)):
            for row in both[what].values():
                if "ms" in row:
                    row |= {"useful TFLOP/s": round(factor * flops / row["ms"] / 1e9, 1), "GB/s of the least traffic": round(bytes / row["ms"] / 1e6)}
        if DEVICE.type == "cuda":
            both["mask"] = interleaved({"our plan (host)": lambda: plan_of(shape)}, 3, core)
            try:
                both["mask"] |= {"FlexAttention's block mask, compiled": interleaved({"mask": flex(shape, 128)[1]}, 3)["mask"]}
            except Exception as error:
                both["mask"] |= {"FlexAttention's block mask, compiled": {"failed": type(error).__name__}}
        table[name] = both
    return table


def correctness():
    """Worst error against the float64 definition, relative to the largest value, and whether a second run gives the same bits."""
    from kernels.attention import reference
    table, small = {}, {"sentences": [[View(np.zeros(n, np.int64))] for n in (1, 40, 7, 90, 3)],
                        "one-forward": [[View(np.zeros(n, np.int64), True), View(np.zeros(9, np.int64), True, (0, n - 1)), View(np.zeros(9, np.int64), True)]
                                        for n in (20, 70)]}
    for name, rows in small.items():
        packed = Packed.views(rows).to(DEVICE)
        for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
            for heads, kv_heads, size in ((4, 4, 64), (8, 2, 64), (4, 4, 128)):
                qkv = torch.randn(len(packed.tokens), (heads + 2 * kv_heads) * size, device=DEVICE, dtype=dtype).requires_grad_()
                exact, found = qkv.detach().double().requires_grad_(), []
                for _ in range(2):
                    out = attention(qkv, heads, kv_heads, packed, "triton")
                    found.append((out, torch.autograd.grad(out.sum(), qkv)[0]))
                out = reference(exact, heads, kv_heads, packed.sees)
                pairs = list(zip(found[0], (out, torch.autograd.grad(out.sum(), exact)[0])))
                error = max(float((ours - true).abs().max() / true.abs().max().clamp(min=1)) for ours, true in pairs)
                same = all(torch.equal(one, two) for one, two in zip(*found))
                if error > limit or not same:
                    raise AssertionError(f"{name}, {dtype}, {heads}/{kv_heads} heads of {size}: error {error:.1e}, the same bits again: {same}")
                table[f"{name}, {str(dtype)[6:]}, {heads}/{kv_heads} heads of {size}"] = {"error": f"{error:.1e}", "limit": limit, "same bits": same}
    return table


# ---------------------------------------------------------------------------------------------------------------------
# Whole training steps


def special(vocab):
    ids = np.arange(20)
    return Special(0, 2, 3, 4, tuple(range(5, 15)), vocab, ids, np.ones(vocab, bool))


def texts(drawn, vocab, seed):
    return np.split(np.random.default_rng(seed).integers(20, vocab, drawn.sum()), drawn.cumsum()[:-1])


def move(batch):
    return {name: value.to(DEVICE) if hasattr(value, "to") else value for name, value in batch.items()}


def stepper(module, loss):
    """A training step in the precision of the device: forward, backward, AdamW."""
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-5, fused=True)

    def step():
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def settle(module):
    set_attention(module, "auto", DEVICE, 2 if DEVICE.type == "cuda" else 4)
    return module


def mexma():
    """150 pairs of mean 35 tokens, XLM-R large (toy size on a CPU): ours, and the recipe of the released code over our own blocks."""
    big = DEVICE.type == "cuda"
    config = size_config("large", vocab=250002) if big else size_config("toy", vocab=4096)
    count, vocab = (150, config.vocab) if big else (32, config.vocab)
    torch.manual_seed(0)
    objective = settle(Mexma(Model(config), Mexma.Config() if big else Mexma.Config(head_layers=2, head_heads=4, head_hidden=512)).to(DEVICE))
    sides = [texts(lengths(33, .7, 2, 198, count, seed), vocab, seed) for seed in (0, 1)]
    batch = Mexma.collate(list(zip(*sides)), np.random.default_rng(0), objective.config, special(vocab))
    tokens, rows = batch["packed"].tokens.numpy(), batch["packed"].rows.numpy()
    cut = np.split(tokens, rows[1:-1])
    four = [Packed.of(cut[i * count:(i + 1) * count]).to(DEVICE) for i in range(4)]
    wanted = np.full(len(batch["head"].tokens), -100)
    wanted[batch["labels"].numpy()] = batch["targets"].numpy()
    batch, wanted, model = move(batch), torch.from_numpy(wanted).to(DEVICE), objective.model

    def recipe(encode, table):
        """Four encodes, logits of every token, the loss on the masked ones."""
        masked, clean = torch.cat([encode(0), encode(1)]), [encode(i)[four[i].rows[:-1].long()] for i in (2, 3)]
        x = masked.index_copy(0, batch["head"].rows[:-1].long(), torch.cat(clean[::-1]).to(masked.dtype))
        for block in objective.unmask:
            x = block(x, batch["head"])
        logits = F.linear(x, table, objective.vocabulary_bias)
        return F.cross_entropy(logits.float(), wanted) + mse(*clean) + 0.01 * sum(map(koleo, clean)) / 2

    grids = []
    for packed in four:
        real = torch.arange(int(packed.rows.diff().max()), device=DEVICE) < packed.rows.diff()[:, None]
        grids.append((torch.zeros(real.shape, dtype=torch.int64, device=DEVICE).masked_scatter(real, packed.tokens), real))
    runs = {"ours: one packed forward, logits of masked tokens": stepper(objective, lambda: objective(batch)[0]),
            "four packed encodes, logits of all tokens": stepper(objective, lambda: recipe(lambda i: model(four[i]), model.embed.weight)),
            "four padded encodes, logits of all tokens": stepper(objective, lambda: recipe(lambda i: padded_states(model, *grids[i])[grids[i][1]],
                                                                                           model.embed.weight))}
    missing = {}
    try:
        import transformers
        shape = transformers.XLMRobertaConfig(vocab_size=vocab, hidden_size=config.width, num_hidden_layers=config.layers, num_attention_heads=config.heads,
                                              intermediate_size=config.hidden, max_position_embeddings=config.max_length + 2)
        theirs = transformers.XLMRobertaModel(shape, add_pooling_layer=False).to(DEVICE)
        encode = lambda i: theirs(grids[i][0], attention_mask=grids[i][1].long()).last_hidden_state[grids[i][1]]
        runs["Hugging Face XLM-R, padded, with our head and the logits of all tokens"] = stepper(
            torch.nn.ModuleList([theirs, objective.unmask]), lambda: recipe(encode, theirs.embeddings.word_embeddings.weight))
    except ImportError:
        missing["Hugging Face XLM-R, padded"] = {"failed": f"{MISSING}: transformers is not installed"}
    return interleaved(runs, 5) | missing | {"pairs": count, "tokens": len(tokens)}


LLM = {"NL-RX": ((17, .2, 8, 40), (12, .3, 4, 40)), "Spider": ((24, .3, 8, 60), (30, .5, 8, 120)), "GSM8K": ((60, .4, 15, 200), (74, .45, 15, 300))}


def llm_jepa(name, samples=16):
    """Llama-1B's shape (toy size on a CPU): one forward; the other two forms; plain next-token prediction; and the released recipe, three rows
    padded to 512 with the logits of every token. `header`: a chat header of 27 tokens opens every view."""
    big = DEVICE.type == "cuda"
    shape = dict(vocab=128256, width=2048, layers=16, heads=32, kv_heads=8, hidden=8192, dropout=0.0) if big else dict(vocab=4096, dropout=0.0)
    longest, vocab = 512 if big else 256, shape["vocab"]
    torch.manual_seed(0)
    objective = settle(LlmJepa(Model(ModelConfig(**shape, causal=True, pool="last", **DECODER)), LlmJepa.Config()).to(DEVICE))
    plain = Ntp(objective.model, Ntp.Config())
    pairs = list(zip(*(texts(lengths(*drawn, samples), vocab, seed) for seed, drawn in enumerate(LLM[name]))))
    headed = [(*pair, np.arange(27) + 20) for pair in pairs]
    collate = lambda examples, mode: LlmJepa.collate(examples, np.random.default_rng(0), LlmJepa.Config(mode=mode), special(vocab))
    batches = {mode: collate(pairs, mode) for mode in ("one-forward", "two-row", "three-row")}
    batches |= {f"{mode}, header": collate(headed, mode) for mode in ("one-forward", "two-row")}
    line = batches["three-row"]["packed"]
    rows = np.split(line.tokens.numpy(), line.rows.numpy()[1:-1])
    grid = Packed.of([np.pad(row[:longest], (0, max(0, longest - len(row)))) for row in rows], causal=True).to(DEVICE)
    last = torch.tensor([i * longest + min(len(row), longest) - 1 for i, row in enumerate(rows)][len(pairs):], device=DEVICE).view(2, -1)
    wanted = torch.full((len(grid.tokens),), -100, device=DEVICE)
    for i, (text, code) in enumerate(pairs):
        start = i * longest + len(text) + 1
        end = min(start + len(code), (i + 1) * longest)
        wanted[start:end] = torch.from_numpy(code[:end - start]).to(DEVICE)

    def recipe():
        states = objective.model(grid)
        jepa = (1 - F.cosine_similarity(states[last[0]].float(), states[last[1]].float(), dim=-1)).mean()
        return F.cross_entropy(objective.model.logits(states).float(), wanted) + jepa

    moved = {mode: move(batch) for mode, batch in batches.items()}
    runs = {f"ours: {mode}": stepper(objective, lambda mode=mode: objective(moved[mode])[0]) for mode in moved}
    ntp = move(Ntp.collate(pairs, np.random.default_rng(0), Ntp.Config(), special(vocab)))
    runs["ours: next-token prediction alone"] = stepper(plain, lambda: plain(ntp)[0])
    if samples <= 16:
        runs[f"three rows padded to {longest}, logits of all tokens"] = stepper(objective, recipe)
    return interleaved(runs, 5) | {"samples": samples, "tokens of one forward": len(batches["one-forward"]["packed"].tokens)}


# ---------------------------------------------------------------------------------------------------------------------
# The rest of a step


def vocabulary():
    """The loss over XLM-R's 250,002 words, 3,950 scored tokens (a toy vocabulary on a CPU): forward and backward, and what it holds in memory."""
    rows, vocab, width = (3950, 250002, 1024) if DEVICE.type == "cuda" else (400, 16384, 128)
    torch.manual_seed(0)
    states, weight, bias = (torch.randn(shape, device=DEVICE) * 0.05 for shape in ((rows, width), (vocab, width), (vocab,)))
    inputs, targets = [x.requires_grad_() for x in (states, weight, bias)], torch.randint(0, vocab, (rows,), device=DEVICE)

    def step(loss):
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
            value = loss()
        torch.autograd.grad(value, inputs)

    found = interleaved({"ours: in chunks": lambda: step(lambda: vocabulary_loss(*inputs, targets, float(rows))),
                         "all logits at once": lambda: step(lambda: F.cross_entropy(F.linear(*inputs).float(), targets))}, 5)
    held = sum(x.nbytes for x in inputs) * 2 / 2 ** 30                    # weights and their gradients, which any way holds
    for row in found.values():
        row |= {"GB over weights and gradients": round(row["peak GB"] - held, 2)} if "peak GB" in row else {}
    return found | {"TFLOP of the three products": round(6 * rows * vocab * width / 1e12, 3)}


def optimiser():
    """AdamW, the teacher's average and the gradient's norm over 0.6 billion numbers (6 million on a CPU), as traffic: 28, 12 and 4 bytes a number."""
    count = (6 if DEVICE.type == "cpu" else 600) * 2 ** 20
    weights = [torch.nn.Parameter(torch.randn(count // 64, device=DEVICE)) for _ in range(64)]
    teacher = [torch.randn_like(x) for x in weights]
    for x in weights:
        x.grad = torch.randn_like(x)
    adamw = torch.optim.AdamW(weights, lr=1e-6, fused=True)

    def average():
        with torch.no_grad():
            torch._foreach_lerp_(teacher, weights, 0.004)

    found = interleaved({"AdamW": adamw.step, "teacher": average, "norm and clip": lambda: torch.nn.utils.clip_grad_norm_(weights, 1e9)}, 5)
    for (name, row), size in zip(found.items(), (28, 12, 12)):            # clipping reads the gradients twice and writes them once
        row |= {"TB/s": round(count * size / row["ms"] / 1e9, 3)}
        row.pop("times ours")
    return found


def loader():
    """One thread that draws, masks and packs MEXMA's batches of the embedded corpus, with the kernels' plan: tokens of the line a second."""
    corpus = data.open_corpus("toy", count=4000)
    batches, config = data.Batches(corpus, 2, 150, 0, distinct=True, max_length=128), Mexma.Config()
    made, start = 0, time.thread_time()
    for step in range(12):
        batch = Mexma.collate(batches.examples(step), batches.rng(step), config, corpus.special)
        plan_of(Shape(batch["packed"], 16, 16, 64, False))
        made += len(batch["packed"].tokens)
    return {"tokens a second of one worker": round(made / (time.thread_time() - start))}


def models():
    """Utilisation of forward and backward, torch.compile: required FLOPs of the three backbones against 989 TFLOP/s, the datasheet's."""
    shapes = {"encoder, XLM-R large": (size_config("large", vocab=250002), lengths(35, .7, 4, 200, 600), False),
              "decoder, 1 B": (ModelConfig(vocab=128256, width=2048, layers=16, heads=32, kv_heads=8, hidden=8192, dropout=0.0, causal=True, pool="last",
                                           max_length=2048, **DECODER), [2048] * 8, True),
              "hybrid, width 512": (ModelConfig(vocab=30522, width=512, layers=6, heads=8, hidden=2048, norm_place="pre", dropout=0.0), [512] * 64, False)}
    found = {}
    for name, (config, drawn, causal) in shapes.items():
        torch.manual_seed(0)
        model = settle(Model(config).to(DEVICE))
        packed = Packed.of([np.random.default_rng(0).integers(20, config.vocab, n) for n in drawn], causal).to(DEVICE)
        products = sum(weight.numel() for part, weight in model.named_parameters() if part.startswith("blocks.") and weight.ndim == 2)
        flops = 6 * products * len(packed.tokens) + 12 * config.layers * config.width * packed.pairs()
        for compiled in (False, True):
            if compiled:
                for block in model.blocks:
                    block.compile(dynamic=True)
            run = stepper(model, lambda model=model, packed=packed: model(packed).float().square().mean())
            row = interleaved({"step": run}, 5)["step"]
            found[name + (", compiled" if compiled else "")] = row | {"tokens": len(packed.tokens), "MFU, %": round(flops / row["ms"] / 989e7, 1)}
    return found


def ceilings():
    """What this GPU reaches: a large bf16 matrix product, and a copy."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    x = torch.empty(2 ** 30, device=DEVICE, dtype=torch.uint8)
    return {"TFLOP/s": round(2 * 8192 ** 3 / device(lambda: a @ b) / 1e9), "copy, TB/s": round(2 * len(x) / device(lambda: x.clone()) / 1e9, 2)}


# ---------------------------------------------------------------------------------------------------------------------
# Results


def markdown(value, title="", level=2):
    """A dictionary of dictionaries of numbers becomes a table; one more level, a section each."""
    if not isinstance(value, dict):
        return [f"{title}: {value}", ""]
    if any(isinstance(item, dict) and any(isinstance(inner, dict) for inner in item.values()) for item in value.values()):
        return [f"{'#' * level} {title}", ""] + [line for name, item in value.items() for line in markdown(item, name, level + 1)]
    rows = {name: item for name, item in value.items() if isinstance(item, dict)}
    heads = list(dict.fromkeys(key for item in rows.values() for key in item))
    lines = [f"{'#' * level} {title}", ""] + [f"{name}: {item}" for name, item in value.items() if not isinstance(item, dict)]
    if rows:
        lines += ["", "| | " + " | ".join(heads) + " |", "|---|" + "--:|" * len(heads)]
        lines += [f"| {name} | " + " | ".join(str(item.get(key, "-")) for key in heads) + " |" for name, item in rows.items()]
    return lines + [""]


def at(found, *keys):
    """found[key][key]...[key], or None where a key is missing."""
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def against(found, shape, what, peers):
    """How many times longer the quickest of these peers takes than ours; None if none of them ran."""
    times = [at(found, "attention", shape, what, peer, "times ours") for peer in peers]
    return min((time for time in times if time is not None), default=None)


FLEX, VARLEN = list(PEERS)[:2], list(PEERS)[2:4]
MEXMA_SHAPE, ROWS = "MEXMA encoder, mean 35", "three rows padded to 512, logits of all tokens"
LINE = ("rest", "vocabulary")
TARGETS = {   # what a GPU must show: (the target, least or most, how it follows from the results)
    "A1 forward, MEXMA sentences, FlexAttention's best over ours": (1.3, ">=", lambda f: against(f, MEXMA_SHAPE, "forward", FLEX)),
    "A2 backward, the same": (2.0, ">=", lambda f: against(f, MEXMA_SHAPE, "backward", FLEX)),
    "A3 forward, varlen kernels over ours": (1.3, ">=", lambda f: against(f, MEXMA_SHAPE, "forward", VARLEN)),
    "A3 backward, the same": (1.5, ">=", lambda f: against(f, MEXMA_SHAPE, "backward", VARLEN)),
    "A4 backward, BERT-JEPA pairs, FlexAttention over ours": (1.15, ">=", lambda f: against(f, "BERT-JEPA pairs, mean 90", "backward", FLEX)),
    "A5 backward, LLM-JEPA NL-RX, FlexAttention over ours": (1.3, ">=", lambda f: against(f, "LLM-JEPA NL-RX", "backward", FLEX)),
    "A5 backward, LLM-JEPA GSM8K, FlexAttention over ours": (1.3, ">=", lambda f: against(f, "LLM-JEPA GSM8K", "backward", FLEX)),
    "A6 forward, documents of 2048, FlexAttention over ours": (0.95, ">=", lambda f: against(f, "causal documents, 2048", "forward", FLEX)),
    "A6 backward, the same": (0.95, ">=", lambda f: against(f, "causal documents, 2048", "backward", FLEX)),
    "A7 forward, one document of 16k, the best peer over ours": (0.55, ">=", lambda f: against(f, "one causal document, 16k", "forward", PEERS)),
    "A8 plan of a MEXMA batch on the host, ms": (0.3, "<=", lambda f: at(f, "schedule", MEXMA_SHAPE, "ms")),
    "A9 the same bits in a second run, of all cases": (1, ">=", lambda f: isinstance(at(f, "correctness"), dict) and float(all(
        row["same bits"] for row in f["correctness"].values())) or None),
    "B1 MEXMA step, four packed encodes with all logits, over ours": (1.4, ">=", lambda f: at(f, "steps", "MEXMA",
                                                                      "four packed encodes, logits of all tokens", "times ours")),
    "B2 MEXMA step, padded Hugging Face XLM-R over ours": (3.0, ">=", lambda f: at(
        f, "steps", "MEXMA", "Hugging Face XLM-R, padded, with our head and the logits of all tokens", "times ours")),
    "B3 vocabulary loss, GB over weights and gradients": (1.0, "<=", lambda f: at(f, *LINE, "ours: in chunks", "GB over weights and gradients")),
    "B4 LLM-JEPA NL-RX, 3 x 512 over one-forward": (8.0, ">=", lambda f: at(f, "steps", "LLM-JEPA, NL-RX", ROWS, "times ours")),
    "B4 LLM-JEPA Spider, the same": (6.0, ">=", lambda f: at(f, "steps", "LLM-JEPA, Spider", ROWS, "times ours")),
    "B4 LLM-JEPA GSM8K, the same": (4.0, ">=", lambda f: at(f, "steps", "LLM-JEPA, GSM8K", ROWS, "times ours")),
    "B5 two-row over one-forward, NL-RX, large batch": (1.25, ">=", lambda f: at(f, "steps", "LLM-JEPA, NL-RX, large batch", "ours: two-row", "times ours")),
    "B5 the same with a shared header": (1.35, ">=", lambda f: (lambda two, one: two and one and round(two / one, 2))(
        *(at(f, "steps", "LLM-JEPA, NL-RX, large batch", f"ours: {mode}, header", "ms") for mode in ("two-row", "one-forward")))),
    "B6 one-forward over next-token prediction alone, NL-RX": (1.5, "<=", lambda f: (lambda times: times and round(1 / times, 2))(
        at(f, "steps", "LLM-JEPA, NL-RX, large batch", "ours: next-token prediction alone", "times ours"))),
    "C1 encoder, MFU %": (45, ">=", lambda f: at(f, "rest", "models", "encoder, XLM-R large, compiled", "MFU, %")),
    "C2 decoder, MFU %": (45, ">=", lambda f: at(f, "rest", "models", "decoder, 1 B, compiled", "MFU, %")),
    "C3 hybrid, MFU %": (35, ">=", lambda f: at(f, "rest", "models", "hybrid, width 512, compiled", "MFU, %")),
    "D1 vocabulary loss, ms": (12.3, "<=", lambda f: at(f, *LINE, "ours: in chunks", "ms")),
    "D2 AdamW, TB/s": (3.2, ">=", lambda f: at(f, "rest", "optimiser", "AdamW", "TB/s")),
    "D2 teacher, TB/s": (3.0, ">=", lambda f: at(f, "rest", "optimiser", "teacher", "TB/s")),
    "D2 norm and clip, TB/s": (3.0, ">=", lambda f: at(f, "rest", "optimiser", "norm and clip", "TB/s")),
    "D4 loader, tokens a second of its one thread (3 x 227,000)": (681_000, ">=", lambda f: at(f, "rest", "loader", "loader", "tokens a second of one worker")),
}


def targets(found):
    """{target: the value asked for, the value measured on a GPU, or not yet, and whether it is met}; D3, no host sync in a step, is a GPU test."""
    gpu, table = at(found, "machine", "gpu"), {}
    for name, (value, sign, measured) in TARGETS.items():
        on_host = name.startswith(("A8", "D4"))
        got = measured(found) if gpu or on_host else None
        met = MISSING if got is None else "yes" if (got >= value if sign == ">=" else got <= value) else "no"
        table[name] = {"target": f"{sign} {value:,}", "measured": MISSING if got is None else got, "met": met}
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="tiles,schedule,correctness,attention,steps,rest")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "results/gpu")
    options = parser.parse_args()
    parts, gpu = options.only.split(","), DEVICE.type == "cuda"
    reason = why_not(DEVICE) if gpu else "no CUDA GPU"
    name = torch.cuda.get_device_name() if gpu else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    found = {"machine": {"device": name, "gpu": gpu, "torch": torch.__version__, "python": platform.python_version(), "numpy": np.__version__}}
    if gpu:
        found["machine"] |= ceilings()
    toy = "" if gpu else ", toy size"
    samples = 256 if gpu else 32
    here = {"tiles": ("Tiles: computed over visible pairs, sm_90's sizes", tiles, True), "schedule": ("Schedule, on the host", schedules, True),
            "correctness": ("Correctness", correctness, not reason), "attention": ("Attention, bfloat16", attentions, not reason),
            "steps": ("Training steps" + toy, lambda: {"MEXMA": mexma()} | {f"LLM-JEPA, {name}": llm_jepa(name) for name in LLM}
                      | {"LLM-JEPA, NL-RX, large batch": llm_jepa("NL-RX", samples)}, True),
            "rest": ("The rest of a step" + toy, lambda: {"vocabulary": vocabulary(), "optimiser": optimiser(), "loader": {"loader": loader()}}
                     | ({"models": models()} if gpu else {}), True)}
    titles = {"machine": "machine"}
    for part in parts:
        if part not in here:
            parser.error(f"part {part!r} is unknown: choose from {', '.join(here)}")
        titles[part], run, possible = here[part]
        print(f"{titles[part]} ..." if possible else f"{titles[part]}: {MISSING} ({reason})", file=sys.stderr, flush=True)
        found[part] = run() if possible else f"{MISSING} ({reason})"
    found["targets"], titles["targets"] = targets(found), "Targets for one H200, bfloat16"
    options.out.mkdir(parents=True, exist_ok=True)
    lines = ["# Attention and training steps against their peers", "", f"`python kernels/bench.py`; times are medians of interleaved rounds. {name}, "
             f"torch {torch.__version__}." + ("" if gpu else " No GPU: what needs one is not yet measured, and the steps below are of toy size."), ""]
    lines += [line for part, value in found.items() for line in markdown({"": value} if part == "machine" else value, titles[part])]
    (options.out / "bench.md").write_text("\n".join(lines), encoding="utf-8")
    (options.out / "bench.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
