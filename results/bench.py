"""Our training steps and our attention against what people would use instead.

    python -m results peers                              # on one thread of the CPU; peers.md
    python -m results gpu                                # all PARTS, each a process; gpu.md

Sides run in turn. Times are medians; "times ours" is a side's time over ours in the same round:
median, least, most. A step is forward, backward, clipping and AdamW, in float32 and in the best
precision of the device, and is timed only if the losses of all sides agree. Without a GPU `gpu`
runs at toy size, our kernels in Triton's interpreter: that shows that its parts run.
"""

import copy
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from operator import truediv
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

import data
import evaluate
import kernels
from corpora.device import fastest_precision
from corpora.folder import write_atomic
from corpora.program import BadInput, Parser, comma_list
from kernels import schedule
from model import DECODER, Model, ModelConfig, Packed, Segment, each_tensor, save, set_attention
from objectives import Bepa, Contrastive, LlmJepa, Mexma, cosine_distance, info_nce, koleo, mse

from .tables import ROOT, markdown

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
ROUNDS = 5 if GPU else 1  # of what `gpu` runs

# ---- the clock, and tables of what it showed


def thread_ms(run):
    """Milliseconds of this thread, whatever else the machine does."""
    start = time.thread_time()
    run()
    return 1000 * (time.thread_time() - start)


def device_ms(run):
    """Milliseconds of the GPU; Triton's do_bench empties the GPU's cache before each run."""
    import triton.testing
    return triton.testing.do_bench(run, warmup=20, rep=60, return_mode="median")


def why(error):
    """The row of the table for a side that cannot run, from what it raised."""
    return {"failed": f"{type(error).__name__}: {str(error)[:100]}".replace("\n", " ")}


def interleaved(runs, rounds=5, device=DEVICE):
    """{name: function} -> {name: its row: ms, the ratio to ours, the memory of a GPU it takes, or
    why it failed}. The first is ours and may not fail. One round more comes first, to warm up."""
    first = next(iter(runs))
    on_gpu = device.type == "cuda"
    times = {name: [] for name in runs}
    found = {name: {} for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            if "failed" in found[name]:
                continue
            try:
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                    held = torch.cuda.memory_allocated()  # the weights of all sides
                times[name].append((device_ms if on_gpu else thread_ms)(run))
                if on_gpu:
                    peak = torch.cuda.max_memory_allocated() - held
                    found[name]["GB more than before"] = round(peak / 2**30, 2)
            # A peer may lack this layout, this GPU or the memory.
            except Exception as error:
                if name == first:
                    raise
                found[name] = why(error)
    for name, row in found.items():
        if "failed" not in row:
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


# ---- models and batches, made up

SIZES = {"tiny": dict(width=32, layers=1, heads=2, ffn_dim=64),
         "toy": dict(width=128, layers=3, heads=4, ffn_dim=512),
         "384 x 6": dict(width=384, layers=6, heads=6, ffn_dim=1536),
         "MiniLM": dict(width=384, layers=6, heads=12, ffn_dim=1536, vocab=30522),
         "XLM-R large": dict(width=1024, layers=24, heads=16, ffn_dim=4096, vocab=250_002),
         "Llama 1B": dict(width=2048, layers=16, heads=32, kv_heads=8, ffn_dim=8192, vocab=128_256)}
# {name: mean, spread, least and most of a log-normal draw}.
LENGTHS = {"8-40": (22, .4, 8, 40), "long tail": (33, .9, 4, 200)}
# The lengths of LLM-JEPA's data: of a Text, then of its Code.
NL_RX = ((17, .2, 8, 40), (12, .3, 4, 40))
GSM8K = ((60, .4, 15, 200), (74, .45, 15, 300))


class Setting(NamedTuple):
    size: str  # one of SIZES
    count: int  # examples of a batch
    lengths: tuple  # of the first texts, and of the second ones
    rounds: int
    device: torch.device
    folder: str  # to write in
    tokenizer: data.Tokenizer


def lengths(mean, spread, low, high, count, seed=0):
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - spread**2 / 2, spread, count)
    return np.clip(drawn, low, high).astype(int)


def exported(setting, **fields):
    """A random Model with some fields of its config, and the folder into which it was exported."""
    from interop.huggingface import export
    torch.manual_seed(0)
    shape = dict(vocab=setting.tokenizer.vocab, dropout=0.0) | SIZES[setting.size]
    model = Model(ModelConfig(**shape | fields))
    run = Path(tempfile.mkdtemp(dir=setting.folder))
    save(model, run / "model.pt")
    setting.tokenizer.save(run / "tokenizer.json")
    first = {"config": {"data": "toy", "objective": "none"}}
    (run / "log.jsonl").write_text(json.dumps(first) + "\n", encoding="utf-8")
    return model, export(run, run / "theirs")


def opened(setting, path, kind):
    """The exported model as transformers opens it, to be trained."""
    import transformers
    options = {"add_pooling_layer": False} if kind == "AutoModel" else {}
    return getattr(transformers, kind).from_pretrained(path, **options).train().to(setting.device)


def batch_of(setting, model, kind, config):
    """An objective, and a batch of made-up pairs of random ids for it."""
    objective = kind(model, config).to(setting.device)
    set_attention(objective, "auto", setting.device, 4)
    rng = np.random.default_rng(0)
    special = setting.tokenizer.special
    pairs = []
    drawn = [lengths(*one, setting.count, i) for i, one in enumerate(setting.lengths)]
    for both in zip(*drawn):
        pair = [rng.integers(20, setting.tokenizer.vocab, length) for length in both]
        pairs.append(data.Example(pair))
    return objective, kind.collate(pairs, rng, objective.config, special)


def move(values, device):
    return each_tensor(values, lambda x: x.to(device))


def rows_of_ids(packed):
    return np.split(packed.tokens.numpy(), packed.cu_seqlens.numpy()[1:-1])


def padded(rows):
    """Rows of ids -> what transformers calls a batch: a grid as wide as the longest row."""
    sizes = torch.tensor([len(row) for row in rows])
    real = torch.arange(int(sizes.max())) < sizes[:, None]  # (R, L)
    ids = torch.zeros(real.shape, dtype=torch.int64)
    ids[real] = torch.from_numpy(np.concatenate(rows))
    return dict(input_ids=ids, attention_mask=real.long())


def on_grid(values, positions, real):
    """Values at positions of the line, on the grid of its rows; -100 elsewhere: (R, L)."""
    line = torch.full((int(real.sum()),), -100)
    line[positions] = values
    grid = torch.full(real.shape, -100)
    grid[real] = line
    return grid


# ---- training steps


def stepping(module, loss, autocast):
    """A function that does one training step of a module whose loss is loss()."""
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-5, fused=True)

    def step():
        with autocast():
            value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def demand_same(agrees, name):
    if not agrees:
        raise BadInput(f"{name} does not compute what ours does: install the versions of "
                       "requirements-dev.txt")


def race(setting, ours, batch, others):
    """Our objective on its batch, and {name: (module, its loss)} -> {precision: times of steps}, in
    float32 and in the best precision of the device. BadInput if a loss differs."""
    batch = move(batch, setting.device)
    sides = {"ours": (ours, lambda: ours(batch)[0])} | others
    found = {}
    for precision in dict.fromkeys(["float32", fastest_precision(setting.device)]):
        narrow = precision != "float32"
        dtype = getattr(torch, precision) if narrow else None
        autocast = partial(torch.autocast, setting.device.type, dtype, enabled=narrow)
        tolerance = 2e-2 if narrow else 1e-4
        runs = {}
        with autocast():
            losses = {name: loss().item() for name, (_, loss) in sides.items()}
        for name, (module, loss) in sides.items():
            difference = abs(losses[name] - losses["ours"])
            demand_same(difference <= tolerance * max(1, abs(losses["ours"])), name)
            runs[name] = stepping(module, loss, autocast)
        found[precision] = interleaved(runs, setting.rounds, setting.device)
    return found


def contrastive(setting):
    """Two padded encodes and the loss of sentence-transformers."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import losses
    model, path = exported(setting)
    ours, batch = batch_of(setting, model, Contrastive, Contrastive.Config())
    rows = rows_of_ids(batch["packed"])
    sides = [padded(rows[:setting.count]), padded(rows[setting.count:])]
    sides = move(sides, setting.device)
    theirs = SentenceTransformer(str(path), device=str(setting.device)).train()
    ranking = losses.MultipleNegativesRankingLoss(
        theirs, scale=1 / ours.config.temperature, partition_mode="per_direction",
        directions=("query_to_doc", "doc_to_query"))

    def loss():
        return ranking([dict(side) for side in sides], None)

    return race(setting, ours, batch, {"sentence-transformers": (theirs, loss)})


def padded_blocks(blocks, x, real):
    """Blocks without rotary positions on a grid (R, L, D) of which (R, L) is real."""
    for block in blocks:
        qkv = block.attention.qkv(x).unflatten(-1, (3, block.attention.heads, -1))
        out = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), real[:, None, None])
        x = block.norm1(x + block.attention.out(out.transpose(1, 2).flatten(2)))
        x = block.norm2(x + block.mlp(x))
    return x


def mexma(setting):
    """Four padded encodes, and the released head: padded too, with the logits of all tokens."""
    model, path = exported(setting)
    config = Mexma.Config()
    if model.config.width < 1024:
        config = Mexma.Config(head_layers=2, head_heads=2, head_hidden=512)
    ours, batch = batch_of(setting, model, Mexma, config)
    n = setting.count
    rows = rows_of_ids(batch["packed"])
    passes = [padded(rows[i * n:(i + 1) * n]) for i in range(4)]
    real = padded(rows[:2 * n])["attention_mask"].bool()  # of the masked rows, as one grid
    wanted = on_grid(batch["targets"], batch["target_positions"], real)
    passes, real, wanted = move([passes, real, wanted], setting.device)
    theirs = copy.deepcopy(ours)
    theirs.model = opened(setting, path, "AutoModel")

    def loss():
        *masked, a, b = (theirs.model(**one).last_hidden_state for one in passes)
        a = a[:, 0]
        b = b[:, 0]
        width = real.shape[1]
        x = torch.cat([F.pad(one, (0, 0, 0, width - one.shape[1])) for one in masked])
        x = torch.cat([torch.cat([b, a])[:, None], x[:, 1:]], 1)
        x = padded_blocks(theirs.unmask, x, real)
        logits = F.linear(x, theirs.model.get_input_embeddings().weight, theirs.vocabulary_bias)
        mlm = sum(F.cross_entropy(half.flatten(0, 1), labels.flatten())
                  for half, labels in zip(logits.chunk(2), wanted.chunk(2)))
        spread = config.koleo_weight * (koleo(a) + koleo(b))
        return mse(a, b) + mlm / 2 + spread / 2

    return race(setting, ours, batch, {"transformers": (theirs, loss)})


def bepa(setting):
    """Three padded passes: the masked pairs, and a pass for each sentence's [CLS], as released."""
    model, path = exported(setting, head="transform")
    ours, batch = batch_of(setting, model, Bepa, Bepa.Config(cls_view="masked"))
    n = setting.count
    rows = rows_of_ids(batch["packed"])
    passes = [padded(rows[i * n:(i + 1) * n]) for i in range(3)]
    real = passes[0]["attention_mask"].bool()
    labels = on_grid(batch["targets"], batch["target_positions"], real)
    places = list((batch["cls_index"] - batch["packed"].cu_seqlens[n:-1]).chunk(2))
    passes, labels, places = move([passes, labels, places], setting.device)
    theirs = opened(setting, path, "AutoModelForMaskedLM")

    def loss():
        mlm = theirs(**passes[0], labels=labels).loss
        states = [theirs.base_model(**one).last_hidden_state for one in passes[1:]]
        x, y = (one[torch.arange(n), place] for one, place in zip(states, places))
        return mlm + info_nce(x, y, ours.config.temperature)

    return race(setting, ours, batch, {"transformers": (theirs, loss)})


def in_rows(batch, count):
    """LLM-JEPA's batch of one row an example -> the same texts in 2 or 3 rows: Text and answer, and
    then Text with [PRED] and Code, which share a row as in the released code, or do not."""
    packed = batch["packed"]
    # All tokens of a segment have the same first key.
    edges = packed.key_ranges[:, 0].diff().nonzero()[:, 0] + 1
    pieces = np.split(packed.tokens.numpy(), edges)
    texts, answers, codes = (pieces[i::3] for i in range(3))
    rows = []
    scored = []
    for text, answer in zip(texts, answers):
        rows.append([Segment(np.append(text[:-1], answer), True)])
        scored += [False] * (len(text) - 1) + [True] * len(answer)
    views = [[Segment(text, True), Segment(code, True, (0, 1))]
             for text, code in zip(texts, codes)]
    if count == 3:
        views = [[Segment(text, True)] for text in texts]
        views += [[Segment(np.append(texts[0][:1], code), True)] for code in codes]
    sizes = [len(segment.tokens) for segment in itertools.chain(*views)]
    ends = len(scored) + np.cumsum(sizes) - 1
    vectors = ends.reshape(2, -1) if count == 3 else ends.reshape(-1, 2).T
    return batch | dict(packed=Packed.of_segments(rows + views),
                        target_positions=torch.tensor(scored).nonzero()[:, 0],
                        vector_index=torch.from_numpy(np.ascontiguousarray(vectors)))


def causal_loss(theirs, batch, is_additive):
    """The loss of transformers' Llama on the rows of a batch, with the logits of all tokens.

    is_additive: the mask is a number for each pair of tokens that is added to its score.
    """
    packed = batch["packed"]
    inputs = padded(rows_of_ids(packed))
    real = inputs["attention_mask"].bool()
    width = real.shape[1]
    positions = torch.zeros(real.shape, dtype=torch.int64)
    positions[real] = packed.positions
    labels = on_grid(batch["targets"], batch["target_positions"], real)
    if is_additive:
        mask = torch.full((len(packed), 1, width, width), torch.finfo(torch.float32).min)
        for row, one in enumerate(mask):
            visible = packed.mask(row)
            one[0, :len(visible), :len(visible)].masked_fill_(visible, 0.0)
        inputs["attention_mask"] = mask
    inputs |= {"position_ids": positions}
    vectors = batch["vector_index"]
    inputs, real, labels, vectors = move([inputs, real, labels, vectors], theirs.device)

    def loss():
        states = theirs.model(**inputs).last_hidden_state
        total = F.cross_entropy(theirs.lm_head(states).flatten(0, 1), labels.flatten())
        return total + cosine_distance(*states[real][vectors])

    return loss


def llm_jepa(setting):
    """The official two rows with an additive mask, and three rows."""
    model, path = exported(setting, causal=True, pool="last", **DECODER)
    ours, batch = batch_of(setting, model, LlmJepa, LlmJepa.Config())
    sides = {}
    for count, word in ((2, "two-row"), (3, "three-row")):
        theirs = opened(setting, path, "AutoModelForCausalLM")
        loss = causal_loss(theirs, in_rows(batch, count), count == 2)
        sides[f"transformers, {word}"] = (theirs, loss)
    return race(setting, ours, batch, sides)


def encoding(setting):
    """From text to vectors, in float32."""
    from sentence_transformers import SentenceTransformer
    model, path = exported(setting, pool="mean")
    sentences = SentenceTransformer(str(path), device="cpu")
    words = " ".join(map(" ".join, data.open_text("toy", count=400).rows("train"))).split()
    sizes = lengths(18, .8, 2, 120, 40 * setting.count)
    texts = [" ".join(words[7 * i % 999:][:size]) for i, size in enumerate(sizes)]
    encode = partial(sentences.encode, texts, show_progress_bar=False)
    embed = partial(evaluate.encode, model.eval(), setting.tokenizer, texts)
    demand_same(np.allclose(embed(), encode(), atol=1e-4), "sentence-transformers")
    runs = {"ours": embed, "sentence-transformers": encode}
    return {"float32": interleaved(runs, setting.rounds, setting.device)}


PEERS = {"contrastive": contrastive, "mexma": mexma, "bepa": bepa, "llm-jepa": llm_jepa,
         "encoding": encoding}


# ---- attention: every side takes one fused projection (T, (H + 2 Hkv) K) and gives (T, H K)


class Shape(NamedTuple):
    packed: Packed
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool | None = False  # None: tokens see two intervals


def blank(drawn, causal=False):
    return Packed.of([np.zeros(n, np.int64) for n in drawn], causal)


def one_forward(texts, codes, count=128):
    """LLM-JEPA's rows: Text with [PRED], the answer that shares the Text, the Code."""
    rows = []
    for text, code in zip(lengths(*texts, count), lengths(*codes, count, 1)):
        rows.append([Segment(np.zeros(text + 2, np.int64), True),
                     Segment(np.zeros(code + 1, np.int64), True, (0, text + 1)),
                     Segment(np.zeros(code, np.int64), True, (0, 1))])
    return Packed.of_segments(rows)


def shapes():
    """The Shapes of the papers; without a GPU a few tokens."""
    if not GPU:
        return {"MEXMA encoder": Shape(blank([8, 13, 40]), 2, 2, 32),
                "LLM-JEPA NL-RX": Shape(one_forward(*NL_RX, 2), 4, 1, 32, None),
                "causal documents, 2048": Shape(blank([70], True), 2, 2, 32, True)}
    return {
        "MEXMA encoder, mean 35": Shape(blank(lengths(35, .7, 4, 200, 600)), 16, 16, 64),
        "BERT-JEPA pairs": Shape(blank(lengths(90, .5, 10, 256, 128)), 12, 12, 64),
        "LLM-JEPA NL-RX": Shape(one_forward(*NL_RX), 32, 8, 64, None),
        "LLM-JEPA GSM8K": Shape(one_forward(*GSM8K), 32, 8, 64, None),
        "causal documents, 2048": Shape(blank([2048] * 16, True), 32, 8, 64, True),
        "one document, 16k": Shape(blank([16384], True), 16, 16, 128, True)}


def split_heads(shape, line):
    """A fused projection -> q (T, H, K), k and v (T, Hkv, K)."""
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
        q, k, v = (x.transpose(0, 1)[None] for x in split_heads(shape, line))
        out = compiled(q, k, v, block_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    return run


def varlen(shape):
    """PyTorch's kernel for rows end to end."""
    from torch.nn.attention.varlen import varlen_attn
    if shape.causal is None:
        raise ValueError("has one interval a token")
    bounds = shape.packed.cu_seqlens.to(DEVICE)
    rows = (bounds, bounds, *[int(bounds.diff().max())] * 2)
    more = dict(window_size=(-1, 0 if shape.causal else -1), enable_gqa=True)
    return lambda line: varlen_attn(*split_heads(shape, line), *rows, **more).flatten(1)


SIDES = {"ours": partial(back_end, "triton"), "our sdpa back end": partial(back_end, "sdpa"),
         "FlexAttention": flex,
         "FlexAttention, max-autotune": partial(flex, mode="max-autotune-no-cudagraphs"),
         "torch varlen": varlen}


def backward(run, line):
    torch.autograd.grad(run(line).sum(), line)


def line_of(shape):
    torch.manual_seed(0)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    # The interpreter gets bfloat16 wrong.
    dtype = torch.bfloat16 if GPU else torch.float32
    line = torch.randn(len(shape.packed.tokens), width, device=DEVICE, dtype=dtype)
    return line.requires_grad_()


def attention_sides():
    """Forward, and forward with backward, of each shape; a side that disagrees is not timed."""
    for name, shape in shapes().items():
        line = line_of(shape)
        runs = {}
        failed = {}
        for side, make in SIDES.items():
            try:
                run = make(shape)
                out = run(line)
                if side != "ours" and (out - runs["ours"](line)).abs().max() > 0.03:
                    raise ValueError("disagrees with ours")
                runs[side] = run
            except Exception as error:
                if side == "ours":
                    raise
                failed[side] = why(error)
        flops = shape.packed.visible_pairs() * shape.heads * shape.head_dim
        forward = {side: partial(run, line) for side, run in runs.items()}
        both = {side: partial(backward, run, line) for side, run in runs.items()}
        for what, each, factor in (("forward", forward, 4), ("and backward", both, 14)):
            table = interleaved(each, ROUNDS) | failed
            for row in table.values():
                if "ms" in row:
                    row["useful TFLOP/s"] = round(factor * flops / row["ms"] / 1e9, 1)
            yield f"Attention {what}: {name}, {str(line.dtype)[6:]}", table


# What is tried in place of the numbers of a row of kernels.schedule.TILES: (place, number).
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
    """Forward and backward with the row of the table of tiles, and with one number changed."""
    from kernels.attention import attention as fused
    for name, shape in shapes().items():
        line = line_of(shape)
        packed = shape.packed.to(DEVICE)
        ranges = shape.packed.key_ranges.numpy()
        share = shape.heads // shape.kv_heads
        capability = torch.cuda.get_device_capability() if GPU else None
        pair = schedule.choose_tiles(capability, shape.head_dim, line.element_size())
        tiles = schedule.plan(ranges, share, *pair).tiles
        runs = {}
        for what, one in list(variants(tiles).items())[:None if GPU else 2]:
            plan = move(schedule.plan(ranges, share, one, one), DEVICE)
            run = partial(fused, heads=shape.heads, kv_heads=shape.kv_heads,
                          key_ranges=packed.key_ranges, plan=plan)
            runs[what] = partial(backward, run, line)
        yield f"Tuning: {name}", interleaved(runs, ROUNDS)


# ---- a GPU at the sizes of the papers


def steps():
    """Training steps against transformers."""
    pairs = [(33, .7, 2, 198)] * 2
    for name, size, count, each in (("mexma", "XLM-R large", 150, pairs),
                                    ("bepa", "XLM-R large", 64, pairs),
                                    ("llm-jepa", "Llama 1B", 16, NL_RX),
                                    ("llm-jepa", "Llama 1B", 16, GSM8K)):
        shape = (size, count) if GPU else ("tiny", 4)
        for precision, table in compared(name, *shape, each, ROUNDS, DEVICE).items():
            yield f"Step: {name}, texts of mean {each[0][0]}, {precision}", table


PARTS = {"attention": attention_sides, "steps": steps, "tuning": tuning}

# ---- the two commands


def compared(name, size, count, each, rounds, device):
    """One of PEERS -> {precision: table}."""
    tokenizer = data.open_corpus("toy", count=50).tokenizer
    with tempfile.TemporaryDirectory() as folder:
        return PEERS[name](Setting(size, count, each, rounds, device, folder, tokenizer))


def keep_table(path, title, table):
    """Add a table to a file of records, in place of an older one of the same title, and write the
    page of all of them beside it."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records = {record["name"]: record for record in map(json.loads, lines)}
    device = f"one thread of a {platform.machine()} CPU"
    if GPU and path.stem == "gpu":
        device = torch.cuda.get_device_name()
    records[title] = {"name": title, "torch": torch.__version__, "device": device, "table": table}
    write_atomic(path, "".join(json.dumps(one) + "\n" for one in records.values()).encode())
    lines = ["# Against what people would use instead", "",
             f"`python -m results {path.stem}`; rounds in turn, medians. \"times ours\": a side's "
             "time over ours in the same round, median, least, most; above 1 we are ahead. All "
             "sides of a table have one precision, float32 where none is named.", ""]
    for record in records.values():
        made = f"torch {record['torch']}, {record.get('device', 'one thread of a CPU')}"
        lines += [f"## {record['name']}", "", *table_of(record["table"]), "", f"{made}.", ""]
    write_atomic(path.with_suffix(".md"), "\n".join(lines).encode())


def parser_of(command, known, out):
    parser = Parser(f"python -m results {command}", __doc__)
    parser.add_argument("--only", type=comma_list, help=f"of {', '.join(known)} [all]")
    parser.add_argument("--out", type=Path, default=Path(out), help=f"[{out}]")
    return parser


def chosen(only, known):
    """The names that --only gives, by default all. BadInput for one that is unknown."""
    for name in only or ():
        if name not in known:
            raise BadInput(f"--only {name}: choose from {', '.join(known)}")
    return only or list(known)


def peers(arguments):
    parser = parser_of("peers", PEERS, "results")
    parser.add_argument("--size", choices=SIZES, default="toy")
    parser.add_argument("--count", type=int, default=64, help="examples of a batch [64]")
    parser.add_argument("--rounds", type=int, default=5, help="that are timed [5]")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in chosen(options.only, PEERS):
        for word in ["8-40"] if name == "encoding" else LENGTHS:
            title = f"{name}, {word}, size {options.size}, {options.count} examples"
            print(f"{title} ...", file=sys.stderr)
            found = compared(name, options.size, options.count, [LENGTHS[word]] * 2,
                             options.rounds, torch.device("cpu"))
            for precision, table in found.items():
                own = title if precision == "float32" else f"{title}, {precision}"
                keep_table(options.out / "peers.jsonl", own, table)


def gpu(arguments):
    options = parser_of("gpu", PARTS, "results" if GPU else "out").parse_args(arguments)
    parts = chosen(options.only, PARTS)
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    if not GPU:
        # It is read when the kernels are imported.
        os.environ["TRITON_INTERPRET"] = "1"
    if len(parts) == 1:
        for title, table in PARTS[parts[0]]():
            keep_table(out / "gpu.jsonl", title, table)
        return 0
    failed = []
    # Each part is a process of its own, so that a fault of the GPU ends that part alone.
    for part in parts:
        print(f"{part} ...", file=sys.stderr)
        words = [sys.executable, "-m", "results", "gpu", "--only", part, "--out", str(out)]
        if subprocess.run(words, cwd=ROOT).returncode:
            failed.append(part)
    print(f"{out / 'gpu.md'}; failed: {', '.join(failed) or 'nothing'}")
    return int(bool(failed))
