"""Our training steps, encoding and attention against what people would use instead.

    python -m results peers              # training steps and encoding, on one CPU thread
    python -m results gpu                # attention, training steps, tile sizes; one process each

The sides of a table run in turn; times are medians, and "times ours" is a side's time divided by
ours in the same round. A step is forward, backward, clipping and AdamW, in float32 and in the
fastest precision of the device; it is timed only if both sides have the same loss. --keep adds the
tables to records.jsonl.xz. Without a GPU, `gpu` runs at toy size with our kernels in Triton's
interpreter: that shows that its parts work.
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

import corpora
import data
import evaluate
import kernels
from common import BadInput, Parser, comma_list, usable_precision
from kernels import schedule
from model import DECODER, Model, ModelConfig, Packed, Segment, save, set_attention, to_device
from objectives import Bepa, Contrastive, LlmJepa, Mexma

from .compare import ROOT, keep_records, markdown

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")

# ---- the clock


def milliseconds(run, device):
    """Time a function: on a GPU with an emptied cache; on a CPU the time of this thread, whatever
    else the machine does."""
    if device.type == "cuda":
        import triton.testing
        return triton.testing.do_bench(run, warmup=20, rep=60, return_mode="median")
    start = time.thread_time()
    run()
    return 1000 * (time.thread_time() - start)


def interleaved(runs, rounds, device=DEVICE):
    """Time {side: function} in turn, after one round to warm up. Return {side: {"ms", "times ours",
    "range", ...}}; a side that cannot run says why. The first side is ours and may not fail."""
    first = next(iter(runs))
    times = {side: [] for side in runs}
    table = {side: {} for side in runs}
    for _, (side, run) in itertools.product(range(rounds + 1), runs.items()):
        if "failed" in table[side]:
            continue
        try:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()  # the weights of all sides
            times[side].append(milliseconds(run, device))
            if device.type == "cuda":
                peak = torch.cuda.max_memory_allocated() - before
                table[side]["peak GB"] = round(peak / 2**30, 2)
        except Exception as error:  # a peer may lack this layout, this GPU or the memory
            if side == first:
                raise
            table[side] = {"failed": repr(error)[:100].replace("\n", " ")}
    for side, row in table.items():
        if "failed" not in row:
            ratios = sorted(map(truediv, times[side][1:], times[first][1:]))
            row["ms"] = round(statistics.median(times[side][1:]), 4)
            row["times ours"] = round(statistics.median(ratios), 2)
            row["range"] = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    return table


# ---- models and batches with random numbers

SIZES = {"tiny": dict(width=32, layers=1, heads=2, ffn_dim=64),
         "toy": dict(width=128, layers=3, heads=4, ffn_dim=512),
         "MiniLM": dict(width=384, layers=6, heads=12, ffn_dim=1536, vocab=30522),
         "XLM-R large": dict(width=1024, layers=24, heads=16, ffn_dim=4096, vocab=250_002),
         "Llama 1B": dict(width=2048, layers=16, heads=32, kv_heads=8, ffn_dim=8192, vocab=128_256)}
# Lengths in tokens: mean, spread, smallest and largest of a log-normal distribution.
LENGTHS = {"8-40": (22, 0.4, 8, 40), "long tail": (33, 0.9, 4, 200)}
NL_RX = ((17, 0.2, 8, 40), (12, 0.3, 4, 40))  # Text and Code of LLM-JEPA's data
GSM8K = ((60, 0.4, 15, 200), (74, 0.45, 15, 300))


def draw_lengths(mean, spread, low, high, count, seed=0):
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - spread**2 / 2, spread, count)
    return np.clip(drawn, low, high).astype(int)


def exported(size, folder, **fields):
    """Return a random Model and a tokenizer; folder/theirs is the same model for transformers."""
    from interop.huggingface import export
    torch.manual_seed(0)
    tokenizer = data.open_corpus("toy", count=50).tokenizer
    model = Model(ModelConfig(**dict(vocab=tokenizer.vocab, dropout=0.0) | SIZES[size] | fields))
    save(model, folder / "model.pt")
    tokenizer.save(folder / "tokenizer.json")
    around = tokenizer.special.before, tokenizer.special.after
    first = {"format": 5, "config": {"objective": "none", "data": "toy", "max_length": None},
             "around": around, "affixes": (around, around), "tokenizer_hash": tokenizer.hash}
    (folder / "log.jsonl").write_text(json.dumps(first) + "\n", encoding="utf-8")
    export(folder, folder / "theirs")
    return model, tokenizer


# ---- training steps and encoding


def check_equal(is_equal, side):
    if not is_equal:
        raise BadInput(f"{side} computes something else than ours: install the versions of "
                       "requirements-dev.txt")


def padded_inputs(packed, passes, causal):
    """Return the rows of a batch as transformers takes them: `passes` grids (R, L) as wide as their
    longest row, and where they are real. Causal rows have a mask that is added to the scores."""
    rows = np.split(packed.tokens.numpy(), packed.cu_seqlens.numpy()[1:-1])
    grids = []
    for numbers in np.array_split(np.arange(len(rows)), passes):
        sizes = torch.tensor([len(rows[row]) for row in numbers])
        real = torch.arange(int(sizes.max())) < sizes[:, None]
        ids = torch.zeros(real.shape, dtype=torch.int64)
        ids[real] = torch.from_numpy(np.concatenate([rows[row] for row in numbers]))
        grid = dict(input_ids=ids, attention_mask=real.long())
        if causal:  # one pass
            mask = torch.full((len(ids), 1, *2 * ids.shape[1:]), torch.finfo(torch.float32).min)
            for one, row, size in zip(mask, numbers, sizes):
                one[0, :size, :size].masked_fill_(packed.mask(row), 0.0)
            positions = torch.zeros_like(ids)
            positions[real] = packed.positions
            grid |= dict(attention_mask=mask, position_ids=positions)
        grids.append((grid, real))
    return grids


def peer_of(objective, theirs, grids):
    """Return a copy of an objective whose hidden states a model of transformers computes on padded
    rows: the usual implementation, with the same loss."""
    peer = copy.deepcopy(objective)
    peer.theirs = theirs
    # One embedding matrix, and none of our layers: its optimizer has as much work as ours.
    theirs.get_input_embeddings().weight = peer.model.embed.weight
    peer.model.blocks = torch.nn.ModuleList()
    peer.model.forward = lambda packed: torch.cat([
        theirs(**grid).last_hidden_state[real] for grid, real in grids])
    return peer


def training_step(objective, batch, autocast):
    """Return a function that does one training step."""
    weights = [weight for weight in objective.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-5, fused=True)

    def step():
        with autocast():
            loss, _ = objective(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def training(objective_class, config, passes, size, count, lengths, rounds, device, **fields):
    """Time steps of our objective and of the same one on transformers' padded model, on pairs of
    random ids. Return {precision: table}. Raises BadInput if their losses differ."""
    import transformers
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = exported(size, Path(folder), head=objective_class.model_head(config),
                                    **fields)
        options = {} if model.config.causal else {"add_pooling_layer": False}
        theirs = transformers.AutoModel.from_pretrained(f"{folder}/theirs", **options).train()
    rng = np.random.default_rng(0)
    drawn = [draw_lengths(*one, count, i) for i, one in enumerate(lengths)]
    pairs = [data.Example([rng.integers(20, tokenizer.vocab, length) for length in both])
             for both in zip(*drawn)]
    batch = objective_class.collate(pairs, rng, config, tokenizer.special)
    grids = to_device(padded_inputs(batch["packed"], passes, model.config.causal), device)
    batch = to_device(batch, device)
    objective = objective_class(model, config).to(device)
    set_attention(objective, "auto", device, 4)
    sides = {"ours": objective,
             "transformers, padded": peer_of(objective, theirs.to(device), grids)}
    tables = {}
    for precision in dict.fromkeys(["float32", usable_precision("auto", device)]):
        narrow = precision != "float32"
        autocast = partial(torch.autocast, device.type, getattr(torch, precision), narrow)
        with autocast():
            own, other = (side(batch)[0].item() for side in sides.values())
        tolerance = (2e-2 if narrow else 1e-4) * max(1, abs(own))
        check_equal(abs(own - other) <= tolerance, "transformers")
        runs = {side: training_step(one, batch, autocast) for side, one in sides.items()}
        tables[precision] = interleaved(runs, rounds, device)
    return tables


def encoding(size, count, lengths, rounds, device):
    """Time the way from texts to embeddings, in float32."""
    from sentence_transformers import SentenceTransformer
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = exported(size, Path(folder), pool="mean")
        theirs = SentenceTransformer(f"{folder}/theirs", device="cpu")
    words = " ".join(map(" ".join, corpora.open_text("toy", count=400).rows("train"))).split()
    sizes = draw_lengths(18, 0.8, 2, 120, 40 * count)
    texts = [" ".join(words[7 * i % 999:][:size]) for i, size in enumerate(sizes)]
    runs = {"ours": partial(evaluate.encode, model.eval(), tokenizer, texts),
            "sentence-transformers": partial(theirs.encode, texts, show_progress_bar=False)}
    check_equal(np.allclose(*(run() for run in runs.values()), atol=1e-4), "sentence-transformers")
    return {"float32": interleaved(runs, rounds, device)}


SMALL_HEAD = Mexma.Config(head_layers=2, head_heads=2, head_hidden=512)
PEERS = {"contrastive": partial(training, Contrastive, Contrastive.Config(), 2),
         "mexma": partial(training, Mexma, SMALL_HEAD, 4),
         "bepa": partial(training, Bepa, Bepa.Config(cls_view="masked"), 3),
         "llm-jepa": partial(training, LlmJepa, LlmJepa.Config(), 1, causal=True, pool="last",
                             **DECODER),
         "encoding": encoding}


# ---- attention: every side maps one projection (T, (H + 2 Hkv) K) to (T, H K)


class Shape(NamedTuple):
    packed: Packed
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool | None = False  # None: tokens see two ranges


def blank(drawn, causal=False):
    return Packed.of([np.zeros(n, np.int64) for n in drawn], causal)


def one_forward(texts, codes, count=128):
    """Return LLM-JEPA's rows: Text with [PRED], the answer that shares the Text, the Code."""
    return Packed.of_segments([
        [Segment(np.zeros(text + 2, np.int64), True),
         Segment(np.zeros(code + 1, np.int64), True, (0, text + 1)),
         Segment(np.zeros(code, np.int64), True, (0, 1))]
        for text, code in zip(draw_lengths(*texts, count), draw_lengths(*codes, count, 1))])


def shapes():
    """Return the Shapes of the papers; without a GPU small ones."""
    if not GPU:
        return {"MEXMA": Shape(blank([8, 13, 40]), 2, 2, 32),
                "LLM-JEPA NL-RX": Shape(one_forward(*NL_RX, 2), 4, 1, 32, None),
                "causal documents": Shape(blank([70], True), 2, 2, 32, True)}
    return {"MEXMA, mean 35": Shape(blank(draw_lengths(35, 0.7, 4, 200, 600)), 16, 16, 64),
            "BERT-JEPA pairs": Shape(blank(draw_lengths(90, 0.5, 10, 256, 128)), 12, 12, 64),
            "LLM-JEPA NL-RX": Shape(one_forward(*NL_RX), 32, 8, 64, None),
            "LLM-JEPA GSM8K": Shape(one_forward(*GSM8K), 32, 8, 64, None),
            "causal documents, 2048": Shape(blank([2048] * 16, True), 32, 8, 64, True),
            "one document, 16k": Shape(blank([16384], True), 16, 16, 128, True)}


def split_heads(shape, line):
    """Return q (T, H, K), k and v (T, Hkv, K) of a projection."""
    heads = [shape.heads, shape.kv_heads, shape.kv_heads]
    return line.unflatten(1, (-1, shape.head_dim)).split(heads, 1)


def backend(name, shape):
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
        return compiled(q, k, v, block_mask=mask, enable_gqa=True)[0].transpose(0, 1).flatten(1)

    return run


def varlen(shape):
    """PyTorch's kernel for rows end to end."""
    from torch.nn.attention.varlen import varlen_attn
    if shape.causal is None:
        raise ValueError("has one range per token")
    bounds = shape.packed.cu_seqlens.to(DEVICE)
    rows = (bounds, bounds, *[int(bounds.diff().max())] * 2)
    options = dict(window_size=(-1, 0 if shape.causal else -1), enable_gqa=True)
    return lambda line: varlen_attn(*split_heads(shape, line), *rows, **options).flatten(1)


SIDES = {"ours": partial(backend, "triton"), "our SDPA backend": partial(backend, "sdpa"),
         "FlexAttention": flex,
         "FlexAttention, max-autotune": partial(flex, mode="max-autotune-no-cudagraphs"),
         "torch varlen": varlen}


def forward(run, line):
    return run(line)


def backward(run, line):
    torch.autograd.grad(run(line).sum(), line)


def line_of(shape):
    torch.manual_seed(0)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    dtype = torch.bfloat16 if GPU else torch.float32  # the interpreter gets bfloat16 wrong
    return torch.randn(len(shape.packed.tokens), width, device=DEVICE, dtype=dtype,
                       requires_grad=True)


def attention():
    """Yield (title, table) of each shape: forward, and with the backward pass. A side that
    disagrees with ours is not timed."""
    for name, shape in shapes().items():
        line = line_of(shape)
        runs, failed = {}, {}
        for side, make in SIDES.items():
            try:
                runs[side] = make(shape)
                if (runs[side](line) - runs["ours"](line)).abs().max() > 0.03:
                    raise ValueError("disagrees with ours")
            except Exception as error:
                if side == "ours":
                    raise
                runs.pop(side, None)
                failed[side] = {"failed": repr(error)[:100].replace("\n", " ")}
        flops = shape.packed.visible_pairs() * shape.heads * shape.head_dim
        for call, factor in ((forward, 4), (backward, 14)):
            table = interleaved({side: partial(call, run, line) for side, run in runs.items()},
                                ROUNDS) | failed
            for row in table.values():
                if "ms" in row:
                    row["useful TFLOP/s"] = round(factor * flops / row["ms"] / 1e9, 1)
            yield f"Attention {call.__name__}: {name}, {str(line.dtype)[6:]}", table


ROUNDS = 5 if GPU else 1
# Numbers to try in a row of kernels.schedule.TILES: (index, number).
CHANGES = {"local": ((1, 4), (1, 8), (2, 4), (2, 8)),
           **dict.fromkeys(("forward", "queries", "keys"),
                           ((1, 32), (1, 64), (2, 4), (2, 8), (3, 2), (3, 3)))}


def tuning():
    """Yield (title, table): forward and backward with our tile sizes, and with one changed."""
    from kernels.attention import attention as fused
    capability = torch.cuda.get_device_capability() if GPU else None
    for name, shape in shapes().items():
        line = line_of(shape)
        packed = shape.packed.to(DEVICE)
        plan = partial(schedule.plan, shape.packed.key_ranges.numpy(),
                       shape.heads // shape.kv_heads)
        tiles = plan(*schedule.choose_tiles(capability, shape.head_dim, line.element_size())).tiles
        variants = {"as in the table": tiles}
        for field, changes in CHANGES.items():
            for index, number in changes:
                numbers = list(getattr(tiles, field))
                numbers[index] = number
                variants[f"{field} {tuple(numbers)}"] = tiles._replace(**{field: tuple(numbers)})
        runs = {}
        for what, one in list(variants.items())[:None if GPU else 2]:
            run = partial(fused, heads=shape.heads, kv_heads=shape.kv_heads,
                          key_ranges=packed.key_ranges, plan=to_device(plan(one, one), DEVICE))
            runs[what] = partial(backward, run, line)
        yield f"Tuning: {name}", interleaved(runs, ROUNDS)


def steps():
    """Yield (title, table): training steps at the sizes of the papers."""
    pairs = [(33, 0.7, 2, 198)] * 2
    for name, size, count, each in (("mexma", "XLM-R large", 150, pairs),
                                    ("bepa", "XLM-R large", 64, pairs),
                                    ("llm-jepa", "Llama 1B", 16, NL_RX),
                                    ("llm-jepa", "Llama 1B", 16, GSM8K)):
        shape = (size, count) if GPU else ("tiny", 4)
        for precision, table in PEERS[name](*shape, each, ROUNDS, DEVICE).items():
            yield f"Step: {name}, texts of mean {each[0][0]}, {precision}", table


PARTS = {"attention": attention, "steps": steps, "tuning": tuning}

# ---- the two commands


def report(experiment, title, table, keep):
    """Print a table, and add it to the records if asked."""
    heads = list(dict.fromkeys(key for row in table.values() for key in row))
    rows = [[side, *(row.get(key, "-") for key in heads)] for side, row in table.items()]
    print(f"## {title}", "", *markdown(["", *heads], rows), "", sep="\n", flush=True)
    if keep:
        device = f"one thread of a {platform.machine()} CPU"
        if experiment == "gpu":
            device = torch.cuda.get_device_name()
        keep_records([{"experiment": experiment, "label": title, "seed": 0, "device": device,
                       "torch": torch.__version__, "table": table}])


def parse(command, names, words):
    parser = Parser(f"python -m results {command}", __doc__.partition("\n")[0])
    parser.add_argument("--only", type=comma_list, help=f"some of {', '.join(names)} [all]")
    parser.add_argument("--keep", action="store_true", help="add the tables to records.jsonl.xz")
    parser.add_argument("--size", choices=SIZES, default="toy", help="model size of peers [toy]")
    parser.add_argument("--count", type=int, default=64, help="examples in a batch of peers [64]")
    options = parser.parse_args(words)
    for name in options.only or ():
        if name not in names:
            raise BadInput(f"--only {name}: choose from {', '.join(names)}")
    torch.set_num_threads(1)
    return options, options.only or list(names)


def peers_command(words):
    options, names = parse("peers", PEERS, words)
    for name in names:
        for word in ["8-40"] if name == "encoding" else LENGTHS:
            tables = PEERS[name](options.size, options.count, [LENGTHS[word]] * 2, 5,
                                 torch.device("cpu"))
            for precision, table in tables.items():
                title = f"{name}, {word}, size {options.size}, {options.count} examples"
                title += "" if precision == "float32" else f", {precision}"
                report("peers", title, table, options.keep)


def gpu_command(words):
    options, parts = parse("gpu", PARTS, words)
    if not GPU:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
    if len(parts) == 1:
        for title, table in PARTS[parts[0]]():
            report("gpu", title, table, options.keep and GPU)
        return 0
    # Each part is a process, so that a fault of the GPU ends only that part.
    failed = [part for part in parts if subprocess.run(
        [sys.executable, "-m", "results", "gpu", "--only", part, *["--keep"] * options.keep],
        cwd=ROOT).returncode]
    print(f"failed: {', '.join(failed) or 'nothing'}")
    return int(bool(failed))
