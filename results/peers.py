"""What people would use instead: the same weights, batches and losses, interleaved rounds.

    python -m results peers                              # all that is installed
    python -m results peers --only mexma,lora --size MiniLM --count 16
    python -m results peers --only reading --megabytes 1000

It writes results/peers.jsonl and peers.md. Our model is exported and the peer opens it; nothing is
timed unless losses agree to 1e-4. A step is forward, backward, clipping and AdamW, on one thread.
"""

import copy
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

import data
import evaluate
from corpora.folder import write_atomic
from corpora.program import BadInput, Parser, comma_list
from interop.huggingface import export
from model import DECODER, Model, ModelConfig, add_lora, save, set_attention
from objectives import (
    Bepa,
    Contrastive,
    LlmJepa,
    Mexma,
    Ntp,
    cosine_distance,
    info_nce,
    koleo,
    mse,
)

from . import bench

SIZES = {"tiny": dict(width=32, layers=1, heads=2, ffn_dim=64),
         "toy": dict(width=128, layers=3, heads=4, ffn_dim=512),
         "384 x 6": dict(width=384, layers=6, heads=6, ffn_dim=1536),
         "MiniLM": dict(width=384, layers=6, heads=12, ffn_dim=1536, vocab=30522)}
# Mean, spread, least and most of a log-normal draw, cut at both ends.
LENGTHS = {"8-40": (22, .4, 8, 40), "long tail": (33, .9, 4, 200)}
CPU = torch.device("cpu")


class Setting(NamedTuple):
    size: str  # of SIZES
    count: int  # examples of a batch
    lengths: tuple  # of LENGTHS
    rounds: int
    megabytes: float
    folder: str  # to write in
    tokenizer: data.Tokenizer


def exported(setting, **fields):
    """A random Model with some fields of its config, and the folder into which it was exported."""
    torch.manual_seed(0)
    shape = dict(vocab=setting.tokenizer.vocab, dropout=0.0) | SIZES[setting.size]
    model = Model(ModelConfig(**shape | fields))
    run = Path(tempfile.mkdtemp(dir=setting.folder))
    save(model, run / "model.pt")
    setting.tokenizer.save(run / "tokenizer.json")
    (run / "log.jsonl").write_text('{"config": {"data": "toy"}}\n', encoding="utf-8")
    return model, export(run, run / "theirs")


def batch_of(setting, model, kind, config):
    """-> the objective, and a batch of made-up pairs with its plans."""
    objective = kind(model, config)
    set_attention(objective, "auto", CPU, 4)  # also where there is a GPU
    pairs = bench.drawn_pairs(setting.lengths, setting.lengths, setting.count,
                              setting.tokenizer.vocab)
    special = setting.tokenizer.special
    return objective, kind.collate(pairs, np.random.default_rng(0), objective.config, special)


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


def race(setting, ours, batch, others):
    """Our objective on its batch, and {name: (module, its loss)} -> the times of steps.

    BadInput if a loss differs.
    """
    sides = {"ours": (ours, partial(bench.loss_of, ours, batch))} | others
    wanted = sides["ours"][1]().item()
    runs = {}
    for name, (module, loss) in sides.items():
        same(abs(loss().item() - wanted) <= 1e-4 * max(1, abs(wanted)), name)
        runs[name] = partial(bench.stepping(module), loss)
    return timed(runs, setting)


def timed(runs, setting):
    return bench.interleaved(runs, setting.rounds, bench.core)


def same(agrees, name):
    if not agrees:
        raise BadInput(f"{name} does not compute what ours does, so its time means nothing: "
                       "install the versions of requirements-dev.txt")


# ---- training


def contrastive(setting):
    """Two padded encodes; sentence-transformers' own loss."""
    from sentence_transformers import SentenceTransformer, losses
    from transformers import AutoModel
    model, path = exported(setting)
    ours, batch = batch_of(setting, model, Contrastive, Contrastive.Config())
    rows = bench.rows_of(batch["packed"])
    queries = padded(rows[:setting.count])
    documents = padded(rows[setting.count:])
    plain = AutoModel.from_pretrained(path, add_pooling_layer=False).train()

    def loss():
        x, y = (plain(**side).last_hidden_state[:, 0] for side in (queries, documents))
        return info_nce(x, y, ours.config.temperature, within=False)

    sentences = SentenceTransformer(str(path), device="cpu").train()
    ranking = losses.MultipleNegativesRankingLoss(
        sentences, scale=1 / ours.config.temperature, partition_mode="per_direction",
        directions=("query_to_doc", "doc_to_query"))

    def ranking_loss():
        return ranking([dict(queries), dict(documents)], None)

    return race(setting, ours, batch, {"transformers": (plain, loss),
                                       "sentence-transformers": (sentences, ranking_loss)})


def mexma(setting):
    """Four padded encodes, and the released head: padded too, with the logits of all tokens."""
    from transformers import AutoModel
    model, path = exported(setting)
    config = Mexma.Config(head_layers=2, head_heads=2, head_hidden=512)
    ours, batch = batch_of(setting, model, Mexma, config)
    n = setting.count
    rows = bench.rows_of(batch["packed"])
    passes = [padded(rows[i * n:(i + 1) * n]) for i in range(4)]
    real = padded(rows[:2 * n])["attention_mask"].bool()  # of the masked ones, as one grid
    wanted = on_grid(batch["targets"], batch["target_positions"], real)
    theirs = copy.deepcopy(ours)
    theirs.model = AutoModel.from_pretrained(path, add_pooling_layer=False).train()

    def loss():
        *masked, a, b = (theirs.model(**one).last_hidden_state for one in passes)
        a = a[:, 0]
        b = b[:, 0]
        width = real.shape[1]
        x = torch.cat([F.pad(one, (0, 0, 0, width - one.shape[1])) for one in masked])
        x = torch.cat([torch.cat([b, a])[:, None], x[:, 1:]], 1)
        x = bench.padded_blocks(theirs.unmask, x, real)
        logits = F.linear(x, theirs.model.get_input_embeddings().weight, theirs.vocabulary_bias)
        mlm = sum(F.cross_entropy(half.flatten(0, 1), labels.flatten())
                  for half, labels in zip(logits.chunk(2), wanted.chunk(2)))
        spread = ours.config.koleo_weight * (koleo(a) + koleo(b))
        return mse(a, b) + mlm / 2 + spread / 2

    return race(setting, ours, batch, {"transformers": (theirs, loss)})


def bepa(setting):
    """Three padded passes: the masked pairs, and a pass for each sentence's [CLS], as released."""
    from transformers import AutoModelForMaskedLM
    model, path = exported(setting, head="transform")
    ours, batch = batch_of(setting, model, Bepa, Bepa.Config(cls_view="masked"))
    n = setting.count
    rows = bench.rows_of(batch["packed"])
    passes = [padded(rows[i * n:(i + 1) * n]) for i in range(3)]
    labels = on_grid(batch["targets"], batch["target_positions"],
                     passes[0]["attention_mask"].bool())
    places = (batch["cls_index"] - batch["packed"].cu_seqlens[n:-1]).chunk(2)
    theirs = AutoModelForMaskedLM.from_pretrained(path).train()

    def loss():
        mlm = theirs(**passes[0], labels=labels).loss
        states = [theirs.base_model(**one).last_hidden_state for one in passes[1:]]
        x, y = (one[torch.arange(n), place] for one, place in zip(states, places))
        return mlm + info_nce(x, y, ours.config.temperature)

    return race(setting, ours, batch, {"transformers": (theirs, loss)})


def decoder(setting):
    return exported(setting, causal=True, pool="last", **DECODER)


def causal_loss(theirs, batch, is_additive):
    """The loss of transformers' Llama on the rows of a batch, with the logits of all tokens.

    is_additive: the mask is a number a pair of tokens that is added to the scores, (R, 1, L, L).
    """
    packed = batch["packed"]
    inputs = padded(bench.rows_of(packed))
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

    def loss():
        states = theirs.model(**inputs, position_ids=positions).last_hidden_state
        total = F.cross_entropy(theirs.lm_head(states).flatten(0, 1), labels.flatten())
        if "vector_index" in batch:
            total = total + cosine_distance(*states[real][batch["vector_index"]])
        return total

    return loss


def llm_jepa(setting):
    """The official two rows with an additive mask, and three rows."""
    from transformers import AutoModelForCausalLM
    model, path = decoder(setting)
    ours, batch = batch_of(setting, model, LlmJepa, LlmJepa.Config())
    sides = {}
    for mode in ("two-row", "three-row"):
        theirs = AutoModelForCausalLM.from_pretrained(path).train()
        _, rows = batch_of(setting, model, LlmJepa, LlmJepa.Config(mode=mode))
        sides[f"transformers, {mode}"] = (theirs, causal_loss(theirs, rows, mode == "two-row"))
    return race(setting, ours, batch, sides)


def lora(setting):
    """Next-token prediction with differences of rank 8 in all projections; B begins as zeros."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    model, path = decoder(setting)
    ours, batch = batch_of(setting, add_lora(model, 8, 16), Ntp, Ntp.Config())
    theirs = AutoModelForCausalLM.from_pretrained(path)
    loss = causal_loss(theirs, batch, False)  # PEFT changes the model in place
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    return race(setting, ours, batch, {"peft": (get_peft_model(theirs, config).train(), loss)})


# ---- in use


def encoding(setting):
    """Sentences of mixed lengths, from text to vectors."""
    from sentence_transformers import SentenceTransformer
    model, path = exported(setting, pool="mean")
    sentences = SentenceTransformer(str(path), device="cpu")
    words = " ".join(map(" ".join, data.open_text("toy", count=400).rows("train"))).split()
    sizes = bench.lengths(18, .8, 2, 120, 40 * setting.count)
    texts = [" ".join(words[7 * i % 999:][:size]) for i, size in enumerate(sizes)]
    encode = partial(sentences.encode, texts, show_progress_bar=False)
    embed = partial(evaluate.encode, model.eval(), setting.tokenizer, texts)
    same(np.allclose(embed(), encode(), atol=1e-4), "sentence-transformers")
    return timed({"ours": embed, "sentence-transformers": encode}, setting)


def xsim(setting):
    """The best of all rows by margin, against the exact index of faiss."""
    import faiss
    faiss.omp_set_num_threads(1)
    count = 150 * setting.count
    rng = np.random.default_rng(0)
    x = rng.standard_normal((count, 128), np.float32)
    y = x + rng.standard_normal((count, 128), np.float32)

    def nearest(one, other):
        index = faiss.IndexFlatIP(one.shape[1])
        index.add(other)
        cosines, places = index.search(one, 4)
        return evaluate.Nearest(torch.from_numpy(cosines), torch.from_numpy(places))

    def mine():
        unit = [np.ascontiguousarray(F.normalize(torch.from_numpy(one))) for one in (x, y)]
        return evaluate.by_margin(nearest(*unit), nearest(*unit[::-1]))[1]

    ours = partial(evaluate.mine, torch.from_numpy(x), torch.from_numpy(y))
    same(torch.equal(ours(), mine()), "faiss")
    return timed({"ours": ours, "faiss": mine}, setting)


def generation(setting):
    """Greedy answers to a batch of prompts, those of transformers padded on the left."""
    from transformers import AutoModelForCausalLM
    model, path = decoder(setting)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(20, setting.tokenizer.vocab, n)
               for n in bench.lengths(*setting.lengths, setting.count)]
    theirs = AutoModelForCausalLM.from_pretrained(path).eval()
    backwards = padded([row[::-1] for row in prompts])
    inputs = {name: grid.flip(1) for name, grid in backwards.items()}
    width = inputs["input_ids"].shape[1]
    stop = setting.tokenizer.special.sep

    def generate():
        out = theirs.generate(**inputs, max_new_tokens=32, do_sample=False, eos_token_id=stop,
                              pad_token_id=stop)
        written = []
        for row in out[:, width:].tolist():
            written.append(row[:row.index(stop)] if stop in row else row)
        return written

    def ours():
        return evaluate.generate(model, prompts, stop, 32)[0]

    same(ours() == generate(), "transformers")
    return timed({"ours": ours, "transformers": generate}, setting)


# ---- data: a process for each, because memory that was taken once counts for ever


MEASURE = """
import time
status = open("/proc/self/status", encoding="utf-8").read()  # Linux
print(rows, status.split("VmHWM:")[1].split()[0], time.process_time())
"""
OURS = """
import data
corpus = data.open_corpus({path!r}, data.Tokenizer.read({tokenizer!r}), cache={cache!r})
rows = len(corpus.offsets) // 2
"""
THEIRS = """
import datasets, tokenizers
datasets.disable_progress_bars()
tokenizer = tokenizers.Tokenizer.from_file({tokenizer!r})
table = datasets.load_dataset("csv", data_files={path!r}, delimiter="\\t", cache_dir={cache!r})
def tokenise(batch):
    return {{name: [found.ids for found in tokenizer.encode_batch_fast(batch[name])]
             for name in ("en", "de")}}
rows = len(table["train"].map(tokenise, batched=True))
"""


def reading(setting):
    """A TSV, from the file to token ids that training reads."""
    folder = Path(tempfile.mkdtemp(dir=setting.folder))
    texts = ["\t".join(row[:2]) for row in data.open_text("toy", count=2000).rows("train")]
    with open(folder / "pairs.tsv", "w", encoding="utf-8") as file:
        file.write("en\tde\n")
        number = 0
        while file.tell() < setting.megabytes * 1e6:
            file.write(f"{texts[number % len(texts)]} {number}\n")
            number += 1
    setting.tokenizer.save(folder / "tokenizer.json")
    found = {}
    for name, code in (("ours", OURS), ("datasets", THEIRS)):
        values = dict(path=str(folder / "pairs.tsv"), tokenizer=str(folder / "tokenizer.json"),
                      cache=str(folder / name))
        done = subprocess.run([sys.executable, "-c", code.format(**values) + MEASURE], text=True,
                              capture_output=True, cwd=Path(__file__).parent.parent)
        if done.returncode:
            why = done.stderr.strip().splitlines()[-1]
            if "No module named 'datasets'" in why:
                raise ModuleNotFoundError(name="datasets")
            raise BadInput(f"{name}: {why[:200]}")
        rows, memory, seconds = map(float, done.stdout.split())
        same(rows == number, name)
        found[name] = {"rows a second of a core": round(number / seconds),
                       "peak MB": round(memory / 1024)}
    return found


STEPS = {"contrastive": contrastive, "mexma": mexma, "bepa": bepa, "llm-jepa": llm_jepa,
         "lora": lora}
PEERS = STEPS | {"encoding": encoding, "xsim": xsim, "generation": generation, "reading": reading}


def page(records):
    """Records, each a line of peers.jsonl -> Markdown."""
    lines = ["# Against what people would use instead", "",
             "`python -m results peers`; one thread of a machine that others used, interleaved "
             "rounds, medians. \"times ours\" is their time over ours in the same round, median, "
             "least and most: above 1 we are ahead.", ""]
    for record in records:
        lines += [f"## {record['name']}", ""]
        if "missing" in record:
            lines += [f"Not measured: {record['missing']} is not installed.", ""]
        else:
            lines += [*bench.table_of(record["table"]), ""]
    return "\n".join(lines)


def compare(name, lengths, options, tokenizer):
    """One comparison -> its record."""
    title = f"{name}, {lengths}, size {options.size}, {options.count} examples"
    if name == "reading":
        title = f"reading, {options.megabytes:g} MB"
    record = {"name": title, "torch": torch.__version__}
    print(f"{title} ...", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(options.size, options.count, LENGTHS[lengths], options.rounds,
                          options.megabytes, folder, tokenizer)
        try:
            return record | {"table": PEERS[name](setting)}
        except ModuleNotFoundError as error:
            return record | {"missing": error.name}


def main(arguments):
    parser = Parser("python -m results peers", __doc__)
    parser.add_argument("--only", type=comma_list, help=f"of {', '.join(PEERS)} [all]")
    parser.add_argument("--size", choices=SIZES, default="toy", help="[toy]")
    parser.add_argument("--count", type=int, default=64, help="examples of a batch [64]")
    parser.add_argument("--rounds", type=int, default=5, help="that are timed [5]")
    parser.add_argument("--megabytes", type=float, default=10, help="of the file that is read [10]")
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="FOLDER")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    path = options.out / "peers.jsonl"
    records = {}
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines()
        records = {record["name"]: record for record in map(json.loads, lines)}
    tokenizer = data.open_corpus("toy", count=50).tokenizer
    for name in options.only or PEERS:
        if name not in PEERS:
            raise BadInput(f"{name!r} is no comparison: choose from {', '.join(PEERS)}")
        for lengths in LENGTHS if name in STEPS else ["8-40"]:
            record = compare(name, lengths, options, tokenizer)
            records[record["name"]] = record
            lines = [json.dumps(record) + "\n" for record in records.values()]
            write_atomic(path, "".join(lines).encode())
            write_atomic(options.out / "peers.md", page(records.values()).encode())
