"""Our training steps and attention against what people would use instead.

The sides of a table run in turn, on a GPU if there is one, otherwise on one CPU thread. Times are
medians, and "times ours" is the time of a side divided by ours in the same round. A step is
forward, backward, clipping and AdamW, in the fastest precision of the device; it is timed only if
both sides have the same loss in float32.
"""

import copy
import functools
import platform
import statistics
import time
from typing import NamedTuple

import numpy as np
import torch

import data
import kernels
from common import BadInput, Parser, usable_precision
from kernels import schedule
from model import DECODER, Model, ModelConfig, Packed, rows_at, set_attention, to_device
from objectives import Bepa, Contrastive, LlmJepa, Mexma

from .compare import keep_records, times_lines

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float32  # Triton's interpreter gets bfloat16 wrong
ROUNDS = 5

# ---- what is measured

# Lengths of both texts of a pair in tokens, log-normal: mean, spread, smallest and largest.
SHORT, LONG_TAIL = [(22, 0.4, 8, 40)] * 2, [(33, 0.9, 4, 200)] * 2
SENTENCES = [(33, 0.7, 2, 198)] * 2
NL_RX = [(17, 0.2, 8, 40), (12, 0.3, 4, 40)]
GSM8K = [(60, 0.4, 15, 200), (74, 0.45, 15, 300)]

SIZES = {"toy": dict(width=128, layers=3, heads=4, ffn_dim=512),
         "XLM-R large": dict(width=1024, layers=24, heads=16, ffn_dim=4096, vocab=250_002),
         "Llama 1B": dict(width=2048, layers=16, heads=32, kv_heads=8, ffn_dim=8192, vocab=128_256)}
# {name: (class, options, padded passes of the usual implementation, fields of ModelConfig)}
OBJECTIVES = {
    "contrastive": (Contrastive, Contrastive.Config(), 2, {}),
    "mexma": (Mexma, Mexma.Config(head_layers=2, head_heads=2, head_hidden=512), 4, {}),
    "bepa": (Bepa, Bepa.Config(cls_view="masked"), 3, {}),
    "llm-jepa": (LlmJepa, LlmJepa.Config(), 1, dict(causal=True, pool="last", **DECODER))}
# {title: (objective, size, pairs in a batch, their lengths)}
PAPERS = {"MEXMA": ("mexma", "XLM-R large", 150, SENTENCES),
          "BERT-JEPA": ("bepa", "XLM-R large", 64, SENTENCES),
          "LLM-JEPA on NL-RX": ("llm-jepa", "Llama 1B", 64, NL_RX),
          "LLM-JEPA on GSM8K": ("llm-jepa", "Llama 1B", 16, GSM8K)}
TOY = {f"{name}, {title}": (name, "toy", 64, lengths) for name in OBJECTIVES
       for title, lengths in (("8-40", SHORT), ("long tail", LONG_TAIL))}


def toy_special():
    return data.open_corpus("toy", count=50).tokenizer.special


def make_batch(name, count, lengths):
    """Return an objective's batch of pairs of random ids."""
    objective_class, config, _, _ = OBJECTIVES[name]
    special = toy_special()
    rng = np.random.default_rng(0)
    texts = []  # first all Texts, then all Codes
    for mean, spread, low, high in lengths:
        drawn = rng.lognormal(np.log(mean) - spread**2 / 2, spread, count).clip(low, high)
        texts.append([rng.integers(20, special.vocab, int(length)) for length in drawn])
    pairs = [data.Example(pair) for pair in zip(*texts)]
    return objective_class.collate(pairs, rng, config, special)


# ---- the clock


def milliseconds(run):
    """Time a function: on a GPU with an emptied cache; on a CPU the time of this thread, whatever
    else the machine does."""
    if GPU:
        import triton.testing
        return triton.testing.do_bench(run, warmup=20, rep=60, return_mode="median")
    start = time.thread_time()
    run()
    return 1000 * (time.thread_time() - start)


def interleaved(sides):
    """Time {side: function} in turn, after one call to warm up. Return {side: {"ms", "times ours",
    ...}}; a side that cannot run says why. The first side is ours and may not fail."""
    ours = next(iter(sides))
    table = {}
    for side, run in sides.items():
        table[side] = {}
        try:
            run()
        except Exception as error:  # it may not support this layout or GPU, or run out of memory
            if side == ours:
                raise
            table[side]["failed"] = repr(error)[:100].replace("\n", " ")
    able = [side for side in sides if not table[side]]
    rounds = [{side: milliseconds(sides[side]) for side in able} for _ in range(ROUNDS)]
    for side in able:
        ratios = sorted(times[side] / times[ours] for times in rounds)
        table[side] = {"ms": round(statistics.median(times[side] for times in rounds), 4),
                       "times ours": round(statistics.median(ratios), 2),
                       "range": f"{ratios[0]:.2f} to {ratios[-1]:.2f}"}
    return table


# ---- training steps


def padded_inputs(packed, passes):
    """Return the rows of a batch as transformers takes them: `passes` grids (R, L) as wide as their
    longest row, and where they are real."""
    grids = []
    for rows in np.array_split(np.arange(len(packed)), passes):
        start, end = packed.cu_seqlens[[rows[0], rows[-1] + 1]].tolist()
        sizes = packed.cu_seqlens.diff()[rows]
        real = torch.arange(int(sizes.max())) < sizes[:, None]
        ids, positions = torch.zeros(2, *real.shape, dtype=torch.int64)
        ids[real] = packed.tokens[start:end]
        positions[real] = packed.positions[start:end]
        mask = torch.zeros(len(rows), 1, *2 * real.shape[1:], dtype=torch.bool)
        mask[..., 0] = True  # padding sees one token: an empty softmax is NaN
        for one, row, size in zip(mask, rows, sizes):
            one[0, :size, :size] = packed.mask(row)
        grids.append((dict(input_ids=ids, position_ids=positions, attention_mask=mask), real))
    return grids


def peer_of(objective, grids):
    """Return a copy of an objective whose hidden states a model of transformers computes on padded
    rows: the usual implementation, with the same loss."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    from interop.families import copy_out, write_config
    peer = copy.deepcopy(objective)
    kind = AutoModelForCausalLM if peer.model.config.causal else AutoModelForMaskedLM
    theirs = kind.from_config(write_config(peer.model.config, toy_special()))
    copy_out(peer.model, theirs)
    peer.theirs = theirs = theirs.base_model.train()  # without their head
    # One embedding matrix, and none of our layers: its optimizer has as much work as ours.
    theirs.get_input_embeddings().weight = peer.model.embed.weight
    peer.model.blocks = torch.nn.ModuleList()

    def forward(packed, at=None):
        states = torch.cat([theirs(**grid).last_hidden_state[real] for grid, real in grids])
        return rows_at(states, at)

    peer.model.forward = forward
    return peer


def training_step(objective, batch, autocast):
    """Return a function that does one training step."""
    weights = [weight for weight in objective.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-5, fused=True)

    def step():
        with autocast:
            loss, _ = objective(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def training(batches):
    """Yield (title, table) of each batch: steps of our objective, and of the same one on
    transformers' padded model. Raises BadInput if their losses differ."""
    for title, (name, size, count, lengths) in batches.items():
        objective_class, config, passes, fields = OBJECTIVES[name]
        torch.manual_seed(0)
        shape = dict(vocab=toy_special().vocab, dropout=0.0) | SIZES[size] | fields
        model = Model(ModelConfig(**shape, head=objective_class.head_type(config)))
        batch = make_batch(name, count, lengths)
        grids = to_device(padded_inputs(batch["packed"], passes), DEVICE)
        batch = to_device(batch, DEVICE)
        ours = objective_class(model, config)
        set_attention(ours, "auto", DEVICE, 4)
        sides = {"ours": ours, "transformers, padded": peer_of(ours, grids)}
        own, other = (side.to(DEVICE)(batch)[0].item() for side in sides.values())
        if abs(own - other) > 1e-4 * max(1, abs(own)):
            raise BadInput(f"our loss is {own}, and {other} with transformers: install the "
                           "versions of requirements-dev.txt")
        precision = usable_precision("auto", DEVICE)
        autocast = torch.autocast(DEVICE.type, getattr(torch, precision), precision != "float32")
        yield f"{title}, {precision}", interleaved({
            side: training_step(one, batch, autocast) for side, one in sides.items()})


# ---- attention: every side maps one projection (T, (H + 2 Hkv) K) to (T, H K)


class Shape(NamedTuple):
    packed: Packed
    heads: int
    kv_heads: int
    head_dim: int


def shapes():
    """Return {title: Shape} of the papers' batches and of long causal rows."""
    found = {}
    for title, (name, size, *batch) in PAPERS.items():
        heads = SIZES[size]["heads"]
        found[title] = Shape(make_batch(name, *batch)["packed"], heads,
                             SIZES[size].get("kv_heads", heads), SIZES[size]["width"] // heads)
    for title, rows, length, *heads in (("16 causal documents of 2048", 16, 2048, 32, 8, 64),
                                        ("a causal document of 16384", 1, 16384, 16, 16, 128)):
        found[title] = Shape(Packed.of([np.zeros(length, np.int64)] * rows, True), *heads)
    return found


def split_heads(shape, line):
    """Return q (T, H, K), k and v (T, Hkv, K) of a projection."""
    heads = [shape.heads, shape.kv_heads, shape.kv_heads]
    return line.unflatten(1, (-1, shape.head_dim)).split(heads, 1)


def back_end(name, shape):
    packed = shape.packed.to(DEVICE)
    return lambda line: kernels.packed_attention(line, shape.heads, shape.kv_heads, packed, name)


def flex(shape):
    """FlexAttention with a block mask of our rule; on a CPU it is not compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    low, high, low2, high2 = (x.contiguous() for x in shape.packed.key_ranges.to(DEVICE).T)

    def visible(batch, head, query, key):
        own = (low[query] <= key) & (key < high[query])
        return own | (low2[query] <= key) & (key < high2[query])

    compiled = functools.partial(torch.compile, dynamic=False, disable=not GPU)
    count = len(shape.packed.tokens)
    mask = compiled(create_block_mask)(visible, None, None, count, count, device=DEVICE)
    attention = compiled(flex_attention)

    def attend(line):
        q, k, v = (x.transpose(0, 1)[None] for x in split_heads(shape, line))
        return attention(q, k, v, block_mask=mask, enable_gqa=True)[0].transpose(0, 1).flatten(1)

    return attend


def varlen(shape):
    """PyTorch's kernel for rows end to end, bidirectional or causal."""
    from torch.nn.attention.varlen import varlen_attn
    ranges = shape.packed.key_ranges
    if ranges[:, 3].any():
        raise ValueError("its tokens see one range")
    is_causal = bool((ranges[:, 1] == torch.arange(1, len(ranges) + 1)).all())
    bounds = shape.packed.cu_seqlens.to(DEVICE)
    rows = (bounds, bounds, *[int(bounds.diff().max())] * 2)
    options = dict(window_size=(-1, 0 if is_causal else -1), enable_gqa=True)
    return lambda line: varlen_attn(*split_heads(shape, line), *rows, **options).flatten(1)


SIDES = {"ours": functools.partial(back_end, "triton"),
         "our SDPA back end": functools.partial(back_end, "sdpa"),
         "FlexAttention": flex, "torch varlen": varlen}


def with_tiles(tiles, shape):
    """Our kernels with these Tiles."""
    from kernels.attention import attention
    ranges, heads = shape.packed.key_ranges, dict(heads=shape.heads, kv_heads=shape.kv_heads)
    plan = schedule.plan(ranges.numpy(), shape.heads // shape.kv_heads, tiles, tiles)
    return functools.partial(attention, **heads, key_ranges=ranges.to(DEVICE),
                             plan=to_device(plan, DEVICE))


# Numbers to try in a row of kernels.schedule.TILES: (field, index, number).
CHANGES = [("local", index, number) for index in (1, 2) for number in (4, 8)]
CHANGES += [(field, index, number) for field in ("forward", "queries", "keys")
            for index, number in ((1, 32), (1, 64), (2, 4), (2, 8), (3, 2), (3, 3))]


def other_tiles(shape):
    """Return {title: side} of our kernels with one number of TILES changed."""
    need = kernels.plan_needed("triton", shape.heads, shape.kv_heads, shape.head_dim,
                               DTYPE.itemsize)
    tiles = shape.packed.to(DEVICE).plan(need).tiles
    sides = {}
    for field, index, number in CHANGES:
        numbers = list(getattr(tiles, field))
        numbers[index] = number
        changed = tiles._replace(**{field: tuple(numbers)})
        sides[f"ours, {field} {numbers}"] = functools.partial(with_tiles, changed)
    return sides


def time_attention(shape, sides, backward):
    """Time one or both passes of all sides. A side that disagrees with ours is not timed."""
    torch.manual_seed(0)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    line = torch.randn(len(shape.packed.tokens), width, device=DEVICE, dtype=DTYPE,
                       requires_grad=True)
    expected = SIDES["ours"](shape)(line.detach())

    @functools.cache
    def built(side):
        attend = sides[side](shape)
        if (attend(line.detach()) - expected).abs().max() > 0.03:
            raise ValueError("disagrees with ours")
        return attend

    def run(side):
        if backward:
            torch.autograd.grad(built(side)(line).sum(), line)
        else:
            built(side)(line.detach())

    return interleaved({side: functools.partial(run, side) for side in sides})


def attention():
    """Yield (title, table) of each shape: forward, and both passes, also with other tile sizes."""
    for title, shape in shapes().items():
        yield f"attention forward: {title}", time_attention(shape, SIDES, backward=False)
        yield f"attention, both passes: {title}", time_attention(
            shape, SIDES | other_tiles(shape), backward=True)


# ---- the two commands


def measure(command, words, parts):
    """Print, and with --keep record, the tables of {part: function that yields (title, table)}."""
    parser = Parser(f"python -m results {command}", __doc__.partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="add the tables to records.jsonl.xz")
    parser.add_argument("--only", choices=parts, help="measure only this part [all]")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    device = torch.cuda.get_device_name() if GPU else f"one thread of a {platform.machine()} CPU"
    for part in [options.only] if options.only else parts:
        for title, table in parts[part]():
            record = {"experiment": command, "label": title, "seed": 0, "device": device,
                      "torch": torch.__version__, "table": table}
            print(*times_lines(record), "", sep="\n", flush=True)
            if options.keep:
                keep_records([record])


def peers_command(words):
    measure("peers", words, {"training": functools.partial(training, TOY)})


def gpu_command(words):
    if not GPU:
        raise BadInput("python -m results gpu needs a CUDA GPU; python -m results peers runs here")
    measure("gpu", words, {"attention": attention,
                           "training": functools.partial(training, PAPERS)})
