"""Attention, training steps and their parts against their peers: interleaved rounds, medians.

`python -m results gpu` runs the PARTS, each in a process of its own. Time on a GPU is the device's
(Triton's do_bench, which empties the cache); without one, shapes are of toy size, our kernels run
in Triton's interpreter, and time is this thread's. A peer that cannot run says why.
"""
# First the shapes and the clock, then tiles, attention, whole steps, and the tuning of the tiles.

import itertools
import statistics
import time
import warnings
from dataclasses import replace
from functools import partial
from operator import truediv
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

import data
import kernels
import train
from kernels import schedule
from kernels.cross_entropy import linear_cross_entropy
from model import (
    DECODER,
    Model,
    ModelConfig,
    Packed,
    Segment,
    each_tensor,
    set_attention,
    size_config,
)
from objectives import OBJECTIVES, LlmJepa, Mexma, Ntp, koleo, mse

from .compare import markdown
from .flops import batch_flops

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
XLMR_VOCAB = 250_002


class Shape(NamedTuple):
    packed: Packed
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool | None = False  # None: tokens see two intervals


def lengths(mean, spread, low, high, count, seed=0):
    """Log-normal lengths; mean and range are those of the papers' data."""
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - spread**2 / 2, spread, count)
    return np.clip(drawn, low, high).astype(int)


# Lengths of Text and of Code.
LLM = {"NL-RX": ((17, .2, 8, 40), (12, .3, 4, 40)),
       "Spider": ((24, .3, 8, 60), (30, .5, 8, 120)),
       "GSM8K": ((60, .4, 15, 200), (74, .45, 15, 300))}


def blank(drawn, causal=False):
    return Packed.of([np.zeros(n, np.int64) for n in drawn], causal)


def one_forward(name, count=128):
    """LLM-JEPA's rows: Text with [PRED], the answer that shares the Text, the Code."""
    texts, codes = LLM[name]
    rows = []
    for text, code in zip(lengths(*texts, count), lengths(*codes, count, 1)):
        rows.append([Segment(np.zeros(text + 2, np.int64), True),
                     Segment(np.zeros(code + 1, np.int64), True, (0, text + 1)),
                     Segment(np.zeros(code, np.int64), True, (0, 1))])
    return Packed.of_segments(rows)


def shapes():
    sentences = np.random.default_rng(0).integers(8, 41, 640)
    documents = lengths(600, .8, 20, 2048, 54)
    return {
        "sentences 8-40": Shape(blank(sentences), 16, 16, 64),
        "MEXMA encoder, mean 35": Shape(blank(lengths(35, .7, 4, 200, 600)), 16, 16, 64),
        "BERT-JEPA pairs, mean 90": Shape(blank(lengths(90, .5, 10, 256, 128)), 12, 12, 64),
        "hybrid, 512": Shape(blank([512] * 64), 8, 8, 64),
        "LLM-JEPA NL-RX": Shape(one_forward("NL-RX"), 32, 8, 64, None),
        "LLM-JEPA GSM8K": Shape(one_forward("GSM8K"), 32, 8, 64, None),
        "causal documents, mean 600": Shape(blank(documents, True), 8, 8, 64, True),
        "causal documents, 2048": Shape(blank([2048] * 16, True), 32, 8, 64, True),
        "one causal document, 16k": Shape(blank([16384], True), 16, 16, 128, True),
    }


# The interpreter takes a second for a few hundred tokens.
TOY_SHAPES = {
    "sentences 8-40": Shape(blank([8, 13, 40]), 2, 2, 32),
    "LLM-JEPA NL-RX": Shape(one_forward("NL-RX", 2), 4, 1, 32, None),
    "causal documents, 2048": Shape(blank([70], True), 2, 2, 32, True),
}


# --------------------------------------------------------------------------------------------------
# The clock


def core(run):
    """Milliseconds of this thread, whatever else the machine does."""
    start = time.thread_time()
    run()
    return 1000 * (time.thread_time() - start)


def device(run):
    import triton.testing
    return triton.testing.do_bench(run, warmup=20, rep=60, return_mode="median")


def interleaved(runs, rounds=5 if GPU else 1, clock=device if GPU else core):
    """{name: function} -> {name: median ms of the rounds; their ratio to ours in the same round,
    median, least, most; peak memory; or why it failed}. The first is ours: it may not fail."""
    first = next(iter(runs))
    times = {name: [] for name in runs}
    found = {name: {} for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            if "failed" in found[name]:
                continue
            try:
                times[name].append(clock(run))
                if GPU:
                    found[name]["peak GB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
                    torch.cuda.reset_peak_memory_stats()
            except Exception as error:  # a peer that lacks this layout, this GPU or the memory
                if name == first:
                    raise
                found[name] = why(error)
    for name, row in found.items():
        if "failed" not in row:
            # The first round compiles and warms up.
            ratios = sorted(map(truediv, times[name][1:], times[first][1:]))
            row["ms"] = round(statistics.median(times[name][1:]), 4)
            row["times ours"] = round(statistics.median(ratios), 2)
            row["range"] = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    return found


def table_of(rows):
    """{row: {column: value}} -> lines of Markdown."""
    heads = {}
    for row in rows.values():
        heads |= dict.fromkeys(row, "-")
    return markdown(["", *heads], [[label, *(heads | row).values()] for label, row in rows.items()])


def why(error):
    """An error as one short text."""
    lines = str(error).splitlines() or [""]
    return {"failed": f"{type(error).__name__}: {lines[0][:100]}"}


# --------------------------------------------------------------------------------------------------
# Tiles and schedules: counted and timed on the host


def aligned(packed, size):
    """Pairs computed by blocks of `size` tokens at multiples of it, as FlexAttention's are."""
    count = -(-len(packed.tokens) // size)
    grid = np.zeros((count, count + 1), np.int64)
    block = np.arange(len(packed.tokens)) // size
    for low, high in packed.key_ranges.numpy().reshape(-1, 2, 2).transpose(1, 2, 0):
        some = low < high
        np.add.at(grid, (block[some], low[some] // size), 1)
        np.subtract.at(grid, (block[some], -(-high[some] // size)), 1)
    return int((grid.cumsum(1) > 0).sum()) * size**2


def plan_of(shape):
    sizes = schedule.choose((9, 0), shape.head_dim, 2)
    return schedule.plan(shape.packed.key_ranges.numpy(), shape.heads // shape.kv_heads, *sizes)


def tiles():
    """Computed over visible pairs, a head: 1 is no waste. And the ms of one core for the plan."""
    table = {}
    for name, shape in shapes().items():
        packed = shape.packed
        pairs = packed.visible_pairs()
        done = schedule.computed(plan_of(shape), shape.heads // shape.kv_heads)
        computed = {"ours, forward and dq": done["forward"], "ours, dk and dv": done["keys"],
                    "blocks of 128": aligned(packed, 128)}
        row = {"tokens": len(packed.tokens), "keys a token": round(pairs / len(packed.tokens), 1)}
        for kind, count in computed.items():
            row[kind] = round(count / pairs, 2)
        times = [core(partial(plan_of, shape)) for _ in range(5)]
        table[name] = row | {"plan, ms": round(statistics.median(times), 3)}
    yield {"Tiles: computed over visible pairs, sm_90's sizes; the plan, on the host": table}


# --------------------------------------------------------------------------------------------------
# Attention: every peer takes one fused projection (T, (H + 2 Hkv) K) and gives (T, H K)


def split(shape, line):
    """-> q (T, H, K), k, v (T, Hkv, K)"""
    heads = [shape.heads, shape.kv_heads, shape.kv_heads]
    return line.unflatten(1, (-1, shape.head_dim)).split(heads, 1)


def back_end(name, shape):
    """One of our own back ends: triton, or PyTorch's attention on padded rows."""
    packed = shape.packed.to(DEVICE)
    return lambda line: kernels.packed_attention(line, shape.heads, shape.kv_heads, packed, name)


def flex(shape, mode="default"):
    """FlexAttention with a block mask of our rule; on a CPU it is not compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    low, high, low2, high2 = (x.contiguous() for x in shape.packed.key_ranges.to(DEVICE).T)

    def visible(batch, head, query, key):
        own = (low[query] <= key) & (key < high[query])
        return own | (low2[query] <= key) & (key < high2[query])

    count = len(shape.packed.tokens)
    mask = torch.compile(create_block_mask, disable=not GPU)(visible, None, None, count, count,
                                                             device=DEVICE)
    compiled = torch.compile(flex_attention, dynamic=False, mode=mode, disable=not GPU)

    def run(line):
        q, k, v = (x.transpose(0, 1)[None] for x in split(shape, line))
        out = compiled(q, k, v, block_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    return run


def varlen(shape):
    """PyTorch's kernel for rows end to end, which knows rows and nothing else."""
    from torch.nn.attention.varlen import varlen_attn
    if shape.causal is None:
        raise ValueError("has one interval a token")
    bounds = shape.packed.cu_seqlens.to(DEVICE)
    rows = (bounds, bounds, *[int(bounds.diff().max())] * 2)
    more = dict(window_size=(-1, 0 if shape.causal else -1), enable_gqa=True)
    return lambda line: varlen_attn(*split(shape, line), *rows, **more).flatten(1)


def dense(shape):
    """PyTorch's attention with a mask of all tokens by all."""
    if len(shape.packed.tokens) > 8192:
        raise ValueError("has a mask of more than 8192 x 8192")
    whole = torch.tensor([0, len(shape.packed.tokens)])
    visible = replace(shape.packed, cu_seqlens=whole).mask(0).to(DEVICE)

    def run(line):
        q, k, v = (x.transpose(0, 1)[None] for x in split(shape, line))
        out = F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    return run


PEERS = {"our sdpa back end": partial(back_end, "sdpa"), "FlexAttention": flex,
         "FlexAttention, max-autotune": partial(flex, mode="max-autotune-no-cudagraphs"),
         "torch varlen": varlen, "SDPA, dense mask": dense}


def backward(run, line):
    torch.autograd.grad(run(line).sum(), line)


def agreeing(shape, line):
    """{peer: its function} of those that give what ours gives, and why the others do not."""
    failed = {}
    runs = {"ours": back_end("triton", shape)}
    right = runs["ours"](line)
    for peer, make in PEERS.items():
        try:
            run = make(shape)
            if (run(line) - right).abs().max() > 0.03:
                raise ValueError("disagrees with ours")
            runs[peer] = run
        except Exception as error:  # as in `interleaved`
            failed[peer] = why(error)
    return runs, failed


def line_of(shape):
    torch.manual_seed(0)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    dtype = torch.bfloat16 if GPU else torch.float32  # the interpreter gets bfloat16 wrong
    line = torch.randn(len(shape.packed.tokens), width, device=DEVICE, dtype=dtype)
    return line.requires_grad_()


def attentions():
    """Forward, and forward with backward, of each shape; a peer that disagrees is not timed."""
    for name, shape in (shapes() if GPU else TOY_SHAPES).items():
        line = line_of(shape)
        runs, failed = agreeing(shape, line)
        flops = shape.packed.visible_pairs() * shape.heads * shape.head_dim
        forward = {peer: partial(run, line) for peer, run in runs.items()}
        both = {peer: partial(backward, run, line) for peer, run in runs.items()}
        for what, each, factor in (("forward", forward, 4), ("and backward", both, 14)):
            table = interleaved(each) | failed
            for row in table.values():
                if "ms" in row:
                    row["useful TFLOP/s"] = round(factor * flops / row["ms"] / 1e9, 1)
            yield {f"Attention {what}: {name}": table}


# --------------------------------------------------------------------------------------------------
# Whole training steps


def special(vocab):
    return data.open_corpus("toy", count=50).special._replace(vocab=vocab)


def drawn_pairs(first, second, count, vocab):
    """Pairs of random ids, their lengths drawn as `lengths` says."""
    rng = np.random.default_rng(0)
    pairs = []
    for lengths_of_pair in zip(lengths(*first, count), lengths(*second, count, 1)):
        pair = [rng.integers(20, vocab, length) for length in lengths_of_pair]
        pairs.append(data.Example(pair))
    return pairs


def rows_of(packed):
    return np.split(packed.tokens.numpy(), packed.cu_seqlens.numpy()[1:-1])


def move(batch):
    return each_tensor(batch, lambda x: x.to(DEVICE))


def settle(module):
    set_attention(module, "auto", DEVICE, 2 if GPU else 4)
    return module.to(DEVICE)


def stepping(module):
    """A module -> a function that does a training step with a loss() of it, in the precision of
    the device: forward, backward, clipping, AdamW."""
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-5, fused=True)

    def step(loss):
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=GPU):
            value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def timed(module, losses):
    """{name: function that gives a loss of the module} -> the times of its training steps."""
    step = stepping(module)
    return interleaved({name: partial(step, loss) for name, loss in losses.items()})


def padded_states(model, packed):
    """The usual way: the same encoder on a grid of the longest row, (R, L) with a key mask, from
    the embedding to the last block; what is real of it, (T, D)."""
    sizes = packed.cu_seqlens.diff()
    index = torch.arange(int(sizes.max()), device=sizes.device)
    real = index < sizes[:, None]
    grid = torch.zeros(real.shape, dtype=torch.int64, device=sizes.device)
    grid[real] = packed.tokens
    x, _ = model.embed_tokens(grid, index)  # (R, L, D)
    return padded_blocks(model.blocks, x, real)[real]


def padded_blocks(blocks, x, real):
    """Blocks without rotary positions on a grid (R, L, D) of which (R, L) is real."""
    for block in blocks:
        qkv = block.attention.qkv(x).unflatten(-1, (3, block.attention.heads, -1))
        out = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), real[:, None, None])
        x = block.norm1(x + block.attention.out(out.transpose(1, 2).flatten(2)))
        x = block.norm2(x + block.mlp(x))
    return x


def mexma():
    """XLM-R large (toy size on a CPU), pairs of mean 35 tokens: ours, and the released recipe, four
    encodes and the logits of all tokens, over our blocks."""
    count = 150 if GPU else 8
    config = size_config("large", vocab=XLMR_VOCAB) if GPU else size_config("toy", vocab=4096)
    options = Mexma.Config()
    if not GPU:
        options = Mexma.Config(head_layers=2, head_heads=4, head_hidden=512)
    torch.manual_seed(0)
    objective = settle(Mexma(Model(config), options))
    pairs = drawn_pairs((33, .7, 2, 198), (33, .7, 2, 198), count, config.vocab)
    batch = Mexma.collate(pairs, np.random.default_rng(0), options, special(config.vocab))
    rows = rows_of(batch["packed"])
    four = [Packed.of(rows[i * count:(i + 1) * count]).to(DEVICE) for i in range(4)]
    batch = move(batch)
    head = batch["head_packed"]
    wanted = torch.full((len(head.tokens),), -100, device=DEVICE)
    wanted[batch["target_positions"]] = batch["targets"]

    def recipe(encode):
        masked = torch.cat([encode(four[0]), encode(four[1])])
        a, b = (encode(one)[one.cu_seqlens[:-1].long()] for one in four[2:])
        others = torch.cat([b, a]).to(masked.dtype)
        x = masked.index_copy(0, head.cu_seqlens[:-1].long(), others)
        for block in objective.unmask:
            x = block(x, head)
        logits = F.linear(x, objective.model.embed.weight, objective.vocabulary_bias)
        spread = 0.01 * (koleo(a) + koleo(b)) / 2
        return F.cross_entropy(logits.float(), wanted) + mse(a, b) + spread

    padded = partial(padded_states, objective.model)
    assert (objective.model(four[2]) - padded(four[2])).abs().max() < 1e-2
    found = timed(objective, {
        "ours: one packed forward, logits of masked tokens": partial(loss_of, objective, batch),
        "four packed encodes, logits of all tokens": partial(recipe, objective.model),
        "four padded encodes, logits of all tokens": partial(recipe, padded)})
    return {f"MEXMA step, {count} pairs, {sum(map(len, rows))} tokens": found}


def llm_jepa(name, samples):
    """Llama-1B's shape (toy size on a CPU): the three forms, next-token prediction alone, and the
    released recipe, three rows padded to 512 with the logits of every token."""
    shape = dict(vocab=4096)
    if GPU:
        shape = dict(vocab=128256, width=2048, layers=16, heads=32, kv_heads=8, ffn_dim=8192)
    torch.manual_seed(0)
    config = ModelConfig(**shape, dropout=0.0, causal=True, pool="last", **DECODER)
    objective = settle(LlmJepa(Model(config), LlmJepa.Config()))
    pairs = drawn_pairs(*LLM[name], samples, config.vocab)
    ids = special(config.vocab)
    losses = {}
    for mode in ("one-forward", "two-row", "three-row"):
        options = LlmJepa.Config(mode=mode)
        batch = LlmJepa.collate(pairs, np.random.default_rng(0), options, ids)
        losses[f"ours: {mode}"] = partial(loss_of, objective, move(batch))
    plain = Ntp(objective.model, Ntp.Config())
    alone = Ntp.collate(pairs, np.random.default_rng(0), plain.config, ids)
    losses["ours: next-token prediction alone"] = partial(loss_of, plain, move(alone))
    longest = 512 if GPU else 128
    rows = [row[:longest] for row in rows_of(batch["packed"])]  # of three-row
    grid = [np.pad(row, (0, longest - len(row))) for row in rows]
    grid = Packed.of(grid, causal=True).to(DEVICE)
    ends = [number * longest + len(row) - 1 for number, row in enumerate(rows)]
    ends = torch.tensor(ends[samples:], device=DEVICE)

    def recipe():
        states = objective.model(grid)
        text, code = states[ends].float().chunk(2)
        logits = objective.model.logits(states).float()
        jepa = (1 - F.cosine_similarity(text, code, dim=-1)).mean()
        return F.cross_entropy(logits, grid.tokens.roll(-1)) + jepa

    if samples <= 16:
        losses[f"three rows padded to {longest}, logits of all tokens"] = recipe
    return {f"LLM-JEPA step, {name}, {samples} pairs": timed(objective, losses)}


def loss_of(objective, batch):
    return objective(batch)[0]


def steps():
    yield mexma()
    for name in LLM:
        yield llm_jepa(name, 16 if GPU else 4)
    yield llm_jepa("NL-RX", 256 if GPU else 17)


def vocabulary():
    """The loss over XLM-R's words at 3,950 places (a toy vocabulary on a CPU), with gradients."""
    rows = 3950 if GPU else 100
    vocab = XLMR_VOCAB if GPU else 4096
    torch.manual_seed(0)
    inputs = []
    for shape in ((rows, 1024), (vocab, 1024), (vocab,)):
        inputs.append((torch.randn(shape, device=DEVICE) * 0.05).requires_grad_())
    targets = torch.randint(0, vocab, (rows,), device=DEVICE)

    def whole():
        return F.cross_entropy(F.linear(*inputs).float(), targets)

    def gradients(loss):
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=GPU):
            value = loss()
        torch.autograd.grad(value, inputs)

    chunks = partial(linear_cross_entropy, *inputs, targets)
    runs = {"ours: in chunks": partial(gradients, chunks),
            "all logits at once": partial(gradients, whole)}
    held = 2 * sum(x.nbytes for x in inputs) / 2**30
    yield {f"Vocabulary loss, {rows} places; any way holds {held:.2f} GB": interleaved(runs)}


# --------------------------------------------------------------------------------------------------
# Whole runs, and what they wait for


def waits(run, step):
    """How often the host waits for the GPU in a training step; "-" without one."""
    parts = run.make_batch(step)
    if not GPU:
        run.train_step(parts, run.objective)
        return "-"
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            run.train_step(parts, run.objective)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in found)


def syncs():
    """Of the third step of each objective: kernels are built and buffers allocated before."""
    table = {}
    for name in OBJECTIVES:
        data = "regex" if OBJECTIVES[name].causal else "toy"
        run = train.start(name, data=data, batch=8, steps=9, eval_limit=8)
        table[name] = {"waits": [waits(run, step) for step in range(3)][-1]}
    yield {"Host synchronisations of a training step": table}


def training(name, settings):
    """A short real run, with settings of train.py: loss, speed, compute and peak memory."""
    run = train.start(name, eval_limit=20, **settings)
    records = [record for record in run.steps(every=run.train.steps // 5) if "loss" in record]
    flops = sum(batch_flops(run.objective, part) for part in run.make_batch(0))
    ends = [{"tokens": 0, "seconds": 0}, *records]
    speed = statistics.median((now["tokens"] - then["tokens"]) / (now["seconds"] - then["seconds"])
                              for then, now in zip(ends, records))
    per_step = records[-1]["tokens"] / run.train.steps
    row = {"parameters, M": round(sum(p.numel() for p in run.objective.parameters()) / 1e6, 1),
           "steps": run.train.steps, "first loss": round(records[0]["loss"], 4),
           "last loss": round(records[-1]["loss"], 4), "tokens a second": round(speed),
           "ms a step": round(1000 * per_step / speed, 1),
           "TFLOP/s": round(flops * speed / per_step / 1e12, 3)}
    if GPU:
        row["peak GB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    yield {f"Training: {name}": {str(settings): row}}


def train_mexma():
    shape = dict(size="base", steps=200, batch=128) if GPU else dict(steps=5, batch=8)
    yield from training("mexma", shape)


def train_llm_jepa():
    """Llama-1B's shape with random weights."""
    shape = dict(data="regex", steps=5, batch=4)
    if GPU:
        shape |= dict(width=2048, layers=16, heads=32, ffn_dim=8192, steps=50, batch=32)
    yield from training("llm-jepa", shape)


# --------------------------------------------------------------------------------------------------
# The table of tiles


# What is tried in place of the numbers of a row: warps, stages, and tokens of a step.
CHANGES = {"local": ((1, 4), (1, 8), (2, 4), (2, 8)),
           **dict.fromkeys(("forward", "queries", "keys"),
                           ((1, 32), (1, 64), (2, 4), (2, 8), (3, 2), (3, 3)))}


def variants(tiles):
    """{what is other: Tiles} with one number changed, the row itself first."""
    found = {"as in the table": tiles}
    for field, changes in CHANGES.items():
        for place, number in changes:
            numbers = list(getattr(tiles, field))
            numbers[place] = number
            changed = tiles._replace(**{field: tuple(numbers)})
            if changed != tiles:
                found[f"{field} {tuple(numbers)}"] = changed
    return found


def tuning():
    """Forward and backward with the row of the table, and with one number of it changed."""
    from kernels.attention import attention
    known = shapes()
    names = ("MEXMA encoder, mean 35", "BERT-JEPA pairs, mean 90", "LLM-JEPA GSM8K",
             "causal documents, 2048")
    for name in names if GPU else TOY_SHAPES:
        shape = known[name] if GPU else TOY_SHAPES[name]
        line = line_of(shape)
        share = shape.heads // shape.kv_heads
        packed = shape.packed.to(DEVICE)
        capability = torch.cuda.get_device_capability() if GPU else None
        pair = schedule.choose(capability, shape.head_dim, line.element_size())
        tiles = schedule.plan(shape.packed.key_ranges.numpy(), share, *pair).tiles
        runs = {}
        for what, one in itertools.islice(variants(tiles).items(), 99 if GPU else 2):
            plan = schedule.plan(shape.packed.key_ranges.numpy(), share, one, one)
            plan = each_tensor(plan, lambda x: x.to(DEVICE))
            run = partial(attention, heads=shape.heads, kv_heads=shape.kv_heads,
                          key_ranges=packed.key_ranges, plan=plan)
            runs[what] = partial(backward, run, line)
        yield {f"Tuning: {name}": interleaved(runs)}


PARTS = {"tiles": tiles, "attention": attentions, "steps": steps, "vocabulary": vocabulary,
         "syncs": syncs, "tuning": tuning, "mexma": train_mexma, "llm-jepa": train_llm_jepa}
