"""Training steps of ours beside those of padded models of transformers and sentence-transformers.

The sides of a table run in turn, on a GPU if there is one, otherwise on one CPU thread; see
kernels/bench.py. A step is forward, backward, clipping and AdamW. On a CPU each side runs in the
faster of float32 and bfloat16; on a GPU both run in 16 bits. Nothing is timed unless all sides have
the same loss. A side whose package is not installed says so.
"""

import contextlib
import copy
import functools
import itertools
import platform
from pathlib import Path

import numpy as np
import torch

import data
from common import BadInput, Parser, usable_precision
from kernels import bench
from kernels.bench import DEVICE, GPU
from model import DECODER, Model, ModelConfig, rows_at, set_attention, to_device
from objectives import Bepa, Contrastive, LlmJepa, Mexma, Mlm

from .compare import keep_records, times_lines

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
    "mexma at the paper's size": (Mexma, Mexma.Config(), 4, {}),
    "bepa": (Bepa, Bepa.Config(cls_view="masked"), 3, {}),
    "llm-jepa": (LlmJepa, LlmJepa.Config(), 1, dict(causal=True, pool="last", **DECODER))}
# {title: (objective, size, pairs in a batch, their lengths)}. More than 64 pairs of padded XLM-R
# large do not fit into 80 GB.
PAPERS = {"MEXMA": ("mexma at the paper's size", "XLM-R large", 64, SENTENCES),
          "BERT-JEPA": ("bepa", "XLM-R large", 64, SENTENCES),
          "LLM-JEPA on NL-RX": ("llm-jepa", "Llama 1B", 64, NL_RX),
          "LLM-JEPA on GSM8K": ("llm-jepa", "Llama 1B", 16, GSM8K)}
TOY = {f"{name}, {title}": (name, "toy", 64, lengths)
       for name in ("contrastive", "mlm", "mexma", "bepa", "llm-jepa")
       for title, lengths in (("8-40", SHORT), ("long tail", LONG_TAIL))}
LIMIT = {"float32": 1e-4, "bfloat16": 0.03, "float16": 0.03}  # between losses, relative above 1


@functools.cache
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


class Step:
    """A training step of one side in one precision."""

    def __init__(self, objective, batch, precision):
        self.objective, self.batch = objective, batch
        self.autocast = torch.autocast(DEVICE.type, getattr(torch, precision),
                                       precision != "float32")
        self.element_size = getattr(torch, precision).itemsize

    @contextlib.contextmanager
    def on_device(self):
        """One side at a time is on the GPU: together they do not fit."""
        set_attention(self.objective.to(DEVICE), "auto", DEVICE, self.element_size)
        try:
            yield
        finally:
            self.objective.zero_grad()
            self.objective.to("cpu")

    def loss(self):
        with self.on_device(), torch.no_grad(), self.autocast:
            return self.objective(self.batch)[0].item()

    def milliseconds(self):
        """Time a step, after one that makes the moments of AdamW."""
        weights = [weight for weight in self.objective.parameters() if weight.requires_grad]

        def step():
            with self.autocast:
                loss, _ = self.objective(self.batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        with self.on_device():
            optimizer = torch.optim.AdamW(weights, lr=1e-5, fused=True)
            step()
            return bench.milliseconds(step)


def steps_of(name, size, count, lengths):
    """Return {side: {precision: Step}} of our objective, and of the same one on transformers'
    padded model. Raises BadInput if their losses differ."""
    objective_class, config, passes, fields = OBJECTIVES[name]
    torch.manual_seed(0)
    shape = dict(vocab=toy_special().vocab, dropout=0.0) | SIZES[size] | fields
    batch = make_batch(name, count, lengths)
    grids = to_device(padded_inputs(batch["packed"], passes), DEVICE)
    batch = to_device(batch, DEVICE)
    with DEVICE:  # draws a billion random weights in less time than a CPU
        model = Model(ModelConfig(**shape, head=objective_class.head_type(config)))
        ours = objective_class(model, config)
        sides = {"ours": ours, "transformers, padded": peer_of(ours, grids)}
        if name == "contrastive":
            peer = peer_of(ours, grids)
            sides["sentence-transformers"] = SentenceTransformers(peer, grids)
    for side in sides.values():
        side.to("cpu")
    precisions = dict.fromkeys([usable_precision("auto", DEVICE), *([] if GPU else ["float32"])])
    steps = {side: {precision: Step(one, batch, precision) for precision in precisions}
             for side, one in sides.items()}
    for precision in precisions:
        own, *others = (ways[precision].loss() for ways in steps.values())
        if any(abs(own - other) > LIMIT[precision] * max(1, abs(own)) for other in others):
            raise BadInput(f"our loss is {own} in {precision}, and those of the other sides are "
                           f"{others}: install the versions of requirements-dev.txt")
    return steps


def training_table(*job):
    """Return the table of one of PAPERS or TOY."""
    steps = steps_of(*job)
    ways = {side: {precision: step.milliseconds for precision, step in ways.items()}
            for side, ways in steps.items()}
    # Each call moves a model to the GPU and back, and times several steps.
    return bench.interleaved(ways, clock=lambda run: run(), rounds=2 if GPU else None)


# ---- the command


def cpu_name():
    """Return the name of the CPU, and whether it has instructions for bfloat16."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):  # Linux has a better name
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(": ")[2] for line in lines if "model name" in line), name)
    can = usable_precision("auto", torch.device("cpu")) == "bfloat16"
    return f"{name} ({'with' if can else 'without'} bfloat16)"


def device_name():
    return torch.cuda.get_device_name() if GPU else f"one thread of {cpu_name()}"


def peers_command(words):
    parser = Parser("python -m results peers", __doc__.partition("\n")[0])
    parser.add_argument("--keep", action="store_true", help="add the tables to records.jsonl.xz")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    for title, job in TOY.items():
        record = {"experiment": "peers", "label": title, "seed": 0, "device": device_name(),
                  "torch": torch.__version__, "table": training_table(*job)}
        print(*times_lines(record), "", sep="\n", flush=True)
        if options.keep:
            keep_records([record])
