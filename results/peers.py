"""Time training steps of ours beside those of padded models of transformers.

The sides of a table run in turn, on a GPU if there is one, otherwise on one CPU thread; see
kernels/bench.py. A step is forward, backward, clipping and AdamW. Every side runs in the precision
that train.py would choose, and on a CPU in float32 too. Nothing is timed unless all have the same
loss.
"""

import copy
import functools
import itertools

import numpy as np
import torch

import data
from base.common import BadInput, Parser, usable_precision
from data import to_device
from harness.pretrained import add_lora
from kernels import bench
from kernels.bench import DEVICE, GPU
from model import DECODER, Model, ModelConfig, rows_at, set_attention
from objectives import Bepa, Contrastive, LlmJepa, Mexma, Mlm

from .compare import times_lines

# Lengths of both texts of a pair in tokens, log-normal: mean, spread, smallest and largest.
SHORT, LONG_TAIL = [(22, 0.4, 8, 40)] * 2, [(33, 0.9, 4, 200)] * 2
SENTENCES = [(33, 0.7, 2, 198)] * 2

SIZES = {"toy": dict(width=128, layers=3, heads=4, ffn_dim=512),
         "base": dict(width=768, layers=12, heads=12, ffn_dim=3072, vocab=250_002),
         "Llama 3.2 1B": dict(width=2048, layers=16, heads=32, kv_heads=8, ffn_dim=8192,
                              rope_theta=500_000.0, vocab=128_256),
         "XLM-R large": dict(width=1024, layers=24, heads=16, ffn_dim=4096, vocab=250_002)}
# {name: (class, options, padded passes of the usual implementation, fields of ModelConfig)}
OBJECTIVES = {
    "contrastive": (Contrastive, Contrastive.Config(), 2, {}),
    "mlm": (Mlm, Mlm.Config(), 1, {}),
    "mexma": (Mexma, Mexma.Config(head_layers=2, head_heads=2, head_hidden=512), 4, {}),
    "mexma at the paper's size": (Mexma, Mexma.Config(), 4, {}),
    "bepa": (Bepa, Bepa.Config(cls_view="masked"), 3, {}),
    "llm-jepa": (LlmJepa, LlmJepa.Config(), 1, dict(causal=True, pool="last", **DECODER))}
# {title: (objective, size, pairs in a batch, their lengths)}
JOBS = {f"{name}, {title}": (name, "toy", 64, lengths)
        for name in ("contrastive", "mlm", "mexma", "bepa", "llm-jepa")
        for title, lengths in (("8-40", SHORT), ("long tail", LONG_TAIL))}
# Of padded XLM-R large, 64 pairs do not fit into 80 GB beside the weights of the other side.
GPU_JOB = ("mexma at the paper's size", "XLM-R large", 32, SENTENCES)
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


def build(name, size, lora_rank=0):
    """Return an objective with a model of random weights on DEVICE."""
    objective_class, config, _, fields = OBJECTIVES[name]
    torch.manual_seed(0)
    shape = dict(vocab=toy_special().vocab, dropout=0.0) | SIZES[size] | fields
    with DEVICE:  # draws a billion random weights in less time than a CPU
        model = Model(ModelConfig(**shape, head=objective_class.head_type(config)))
        return objective_class(add_lora(model, lora_rank) if lora_rank else model, config)


def sides_of(name, size, count, lengths):
    """Return a batch, and {side: our objective, or the same one on a padded model}."""
    batch = make_batch(name, count, lengths)
    grids = to_device(padded_inputs(batch["packed"], OBJECTIVES[name][2]), DEVICE)
    ours = build(name, size)
    with DEVICE:
        sides = {"ours": ours, "transformers, padded": peer_of(ours, grids)}
    return to_device(batch, DEVICE), sides


def training_table(*job):
    """Return the table of a job. Raises BadInput if the losses differ."""
    batch, sides = sides_of(*job)
    steps = {}
    for precision in dict.fromkeys([usable_precision("auto", DEVICE), *["float32"] * (not GPU)]):
        dtype = getattr(torch, precision)
        autocast = torch.autocast(DEVICE.type, dtype, precision != "float32")
        set_attention(sides["ours"], "auto", DEVICE, dtype.itemsize)
        with torch.no_grad(), autocast:
            own, other = (objective(batch)[0].item() for objective in sides.values())
        if abs(own - other) > LIMIT[precision] * max(1, abs(own)):
            raise BadInput(f"our loss is {own} in {precision}, and that of transformers is {other}"
                           ": install the versions of requirements-dev.txt")
        for side, objective in sides.items():
            steps[f"{side}, {precision}"] = training_step(objective, batch, autocast)
    return bench.interleaved(steps)


def training_step(objective, batch, autocast):
    """Return a function that trains an objective on a batch."""
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


def device_name():
    return torch.cuda.get_device_name() if GPU else "one CPU thread"


def peers_command(words):
    Parser("python -m results peers", __doc__).parse_args(words)
    torch.set_num_threads(1)
    for title, job in JOBS.items():
        record = {"label": title, "device": device_name(), "torch": torch.__version__}
        print(*times_lines(record | {"table": training_table(*job)}), "", sep="\n", flush=True)
