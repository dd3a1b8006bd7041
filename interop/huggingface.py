"""Pretrained models in, standard folders out, without Hugging Face's transformers.

    a folder or a name on the hub -> read() -> import_model() -> a run folder
    a run folder -> export() -> a folder that AutoModel and SentenceTransformer open

Nothing of a file is executed: weights are safetensors.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import tokenizers
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_safetensors
from tokenizers.processors import TemplateProcessing

import evaluate
from corpora.folder import alone, sealed, write_atomic
from corpora.program import BadInput, machine_memory
from data import Tokenizer, rows_of
from interop.families import FAMILIES, OWN_FILE, POSITIONS, spell
from model import Model, save

# --------------------------------------------------------------------------------------------------
# In

FILES = ("*.json", "model*.safetensors")
POOLS = {  # the spelling up to sentence-transformers 5, then that from 6 on
    "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max", "pooling_mode_lasttoken": "last",
    "cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last"}


class Pretrained(NamedTuple):
    model: Model
    tokenizer: Tokenizer
    vectors: str  # what its sentence vectors are, and who says so


def import_model(name, folder):
    """Write a pretrained model as a run folder, whole or not at all -> Pretrained."""
    with new_folder(folder) as part:
        found = read(name)
        config = {"data": "", "objective": "", "size": "imported",
                  "model": asdict(found.model.config)}
        first = {"config": config, "affixes": None, "tokenizer_hash": found.tokenizer.hash,
                 "imported": {"name": str(name), "vectors": found.vectors}}
        save(found.model, part / "model.pt")
        found.tokenizer.save(part / "tokenizer.json")
        write_atomic(part / "log.jsonl", (json.dumps(sealed(first)) + "\n").encode())
    return found


@contextlib.contextmanager
def new_folder(folder):
    """A folder to write in, which gets its name when all is written; after an error it is gone."""
    folder = Path(folder).absolute()
    part = folder.with_name(f".{folder.name}.part")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone(folder.parent):
        if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
            raise BadInput(f"{folder} is there already: name a new folder")
        shutil.rmtree(part, ignore_errors=True)  # what a kill has left
        try:
            part.mkdir()
            yield part
            if folder.exists():
                folder.rmdir()
            os.replace(part, folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def read(name):
    """A folder or a name on the hub -> Pretrained; BadInput: what is missing, damaged or beyond."""
    folder = find(name)
    settings = read_json(folder / "config.json")
    kind = str(settings.get("model_type"))
    if kind not in FAMILIES:
        raise BadInput(f"{name} is a {kind!r} model: choose one of {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    try:
        config = family.config(settings)
    except BadInput as error:
        raise BadInput(f"{name}: {error}") from None
    config, vectors = with_sentences(config, folder)
    if not (folder / "tokenizer.json").is_file():
        raise BadInput(f"{name} has no tokenizer.json; transformers makes one: "
                       f"AutoTokenizer.from_pretrained('{name}').save_pretrained(FOLDER)")
    tokenizer = Tokenizer.read(folder / "tokenizer.json")
    # there may be more embeddings than pieces: some models have spare ones, which are kept
    if tokenizer.vocab > config.vocab:
        raise BadInput(f"{name}: its tokenizer.json has {tokenizer.vocab:,} pieces, but its "
                       f"config.json a vocabulary of {config.vocab:,}: they are not of one model")
    model = build(name, family, config, weight_files(folder), settings)
    return Pretrained(model, tokenizer, vectors)


def find(name):
    """A folder, or a name on the hub -> the folder of its files, fetched by huggingface_hub."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    if os.path.lexists(folder):
        raise BadInput(f"{name} is no folder: give the one that has the model's config.json")
    # here, because it is slow to import and only the hub needs it
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(str(name), allow_patterns=FILES))
    except Exception as error:  # one of a dozen types: no such name, no right to it, no network
        raise BadInput(f"{name} is no folder here, and the Hugging Face hub does not give it "
                       f"({type(error).__name__}): check the spelling, log in (hf auth login), or "
                       "give the folder of a download") from None


def read_json(path, kind=dict):
    try:
        # reading a pipe would never end
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"cannot read {path} ({type(error).__name__}): give the folder of a whole "
                       "model") from None
    if not isinstance(found, kind):
        raise BadInput(f"{path} is no file with a JSON {kind.__name__}: {OWN_FILE}")
    return found


def with_sentences(config, folder):
    """A ModelConfig with what the files of sentence-transformers say of sentence vectors: pooling,
    longest row, scaled to length 1? -> ModelConfig, this in words."""
    pool = "last" if config.causal else "mean"
    if not (folder / "modules.json").is_file():
        return replace(config, pool=pool), (
            f"pooling {pool}, what sentence-transformers takes without a modules.json")
    modules = {}
    for module in read_json(folder / "modules.json", list):
        module = module if isinstance(module, dict) else {"type": module}
        modules[str(module.get("type")).rpartition(".")[2]] = str(module.get("path"))
    lacking = modules.keys() - {"Transformer", "Pooling", "Normalize"}
    if "Pooling" in modules:
        found = read_json(folder / modules["Pooling"] / "config.json")
        modes = found.get("pooling_mode") or [
            name for name in found if name.startswith("pooling_mode_") and found[name]]
        pool = ", ".join(map(str, modes if isinstance(modes, list) else [modes]))
        if pool not in POOLS:
            lacking.add(f"the pooling {pool!r}")
    if lacking:
        raise BadInput(f"{folder}: modules.json has {', '.join(sorted(lacking))}, which our model "
                       "lacks; to take the model without it, remove modules.json from a copy")
    pool = POOLS.get(pool, pool)
    longest = config.max_positions
    for name, key in (("sentence_bert_config.json", "max_seq_length"),  # up to its version 5
                      ("tokenizer_config.json", "model_max_length")):  # from 6 on
        told = read_json(folder / name).get(key) if (folder / name).exists() else None
        if told is not None and not (type(told) in (int, float) and told > 2):
            raise BadInput(f"{folder}: {key} is {told!r}, which is no length of a row: {OWN_FILE}")
        longest = int(min(longest, told or longest))
    normalize = "Normalize" in modules
    unit = ", scaled to length 1" if normalize else ""
    most = longest if longest < config.max_positions else 0
    return replace(config, pool=pool, max_tokens=most, normalize=normalize), (
        f"pooling {pool} of up to {longest:,} tokens{unit}, as its modules.json says")


def weight_files(folder):
    """{their name: a function that reads this tensor} of the weights, in one file or several."""
    index = folder / "model.safetensors.index.json"
    parts = ["model.safetensors"]
    if index.is_file():
        parts = read_json(index).get("weight_map")
        parts = sorted(set(map(str, parts.values()))) if isinstance(parts, dict) else []
        if not parts or any(Path(part).name != part for part in parts):
            raise BadInput(f"{index} must name the files that lie beside it: {OWN_FILE}")
    elif not (folder / parts[0]).is_file():
        raise BadInput(f"{folder} has no model.safetensors; transformers makes one: "
                       f"AutoModel.from_pretrained('{folder}').save_pretrained(FOLDER)")
    return dict(itertools.chain(*(open_safetensors(folder / part).items() for part in parts)))


def open_safetensors(path):
    try:
        file = safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path} is damaged or cut short ({error}): fetch it again") from None
    return {name: lambda name=name: file.get_tensor(name) for name in file.keys()}


def build(name, family, config, files, settings):
    """Tensors under their names -> Model, in float32. `settings`: config.json, where `config` is
    from. BadInput lists every tensor that is missing, unknown, misshapen or not finite."""
    needed = least_bytes(config)
    if needed > machine_memory():
        raise BadInput(f"{name}: config.json describes a model of {needed:,} bytes, more than this "
                       f"machine has; choose a smaller one, or {OWN_FILE}")
    if config.layers > len(files):
        raise BadInput(f"{name}: config.json says {config.layers:,} layers, but there are "
                       f"{len(files):,} tensors: they are not of one model")
    found = {plain_name(key, family): key for key in files}
    for change in family.heads:
        made = replace(config, **change)
        names = family.names(made)
        wanted = {plain_name(their, family) for their in itertools.chain(*names.values())}
        if found.keys() >= wanted:
            break
    wrong = [f"missing {their}" for their in sorted(wanted - found.keys())]
    wrong += [f"{key} is there twice" for key in files if found[plain_name(key, family)] != key]
    wrong += [f"unknown {found[key]}" for key in found
              if key not in wanted and not re.fullmatch(family.ignored, key)]
    complain(name, wrong)
    with torch.device("meta"):  # shapes alone: no memory, and no random numbers
        model = Model(made)
    weights = {}
    for ours, theirs in names.items():
        keys = [found[plain_name(their, family)] for their in theirs]
        parts = [files[key]() for key in keys]
        misfits = unfit(keys, parts, part_shapes(model, ours, len(parts)))
        wrong += misfits
        if not misfits:
            weights[ours] = torch.cat(parts).float()  # a copy, for the file may change
    complain(name, wrong)
    model.load_state_dict(family.inward(weights, made, settings), assign=True)
    return model.eval()


def least_bytes(config):
    """What a model's large weights take in float32, from its sizes alone."""
    rows = config.layers * (2 * config.heads * config.key_dim + 2 * config.ffn_dim)
    return 4 * config.width * (rows + config.vocab + config.max_positions)


def plain_name(name, family):
    """A tensor's name without the family's prefix, and without the spelling of old BERT files."""
    name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
    return re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name).removeprefix(family.prefix)


def part_shapes(model, name, parts):
    """The shape of each part of our weight; None for a weight that we do not have."""
    module, _, kind = name.rpartition(".")
    if kind == "types":
        return [None]
    rows, *rest = model.get_parameter(name).shape
    if name == POSITIONS:  # theirs is one table, whatever the types
        rows = model.config.max_positions + model.config.position_offset
    if ".qkv." in name and parts == 3:
        attention = model.get_submodule(module.removesuffix(".qkv"))
        keys = attention.kv_heads * attention.head_dim
        return [(count, *rest) for count in (rows - 2 * keys, keys, keys)]
    return [(rows // parts, *rest)] * parts


def unfit(names, parts, shapes):
    """What is wrong with tensors that should have these shapes."""
    wrong = []
    for name, part, shape in zip(names, parts, shapes):
        if shape and part.shape != shape:
            wrong.append(f"{name} has shape {tuple(part.shape)}, not {shape}")
        elif not part.is_floating_point() or not part.float().isfinite().all():
            wrong.append(f"{name} is {part.dtype} or not finite")
    return wrong


def complain(name, wrong):
    if wrong:
        more = f"; and {len(wrong) - 20} more" if len(wrong) > 20 else ""
        raise BadInput(f"{name}: the weights do not fit config.json: {'; '.join(wrong[:20])}{more}")


# --------------------------------------------------------------------------------------------------
# In use


def encode(run, texts):
    """N texts -> float32 array (N, D): their vectors, as the run of `evaluate.open_run` says."""
    return evaluate.encode(run.model, run.tokenizer, texts, affixes(run),
                           run.config.get("max_length")).numpy()


def affixes(run):
    """-> (prefix, suffix) that the run puts around a text of its first column."""
    return run.first["affixes"][0] if run.first.get("affixes") else ((), None)


# --------------------------------------------------------------------------------------------------
# Out

SAMPLES = ("A dog runs.", "Ein Hund läuft schnell durch den Park, 3 Kinder sehen zu.", "你好",
           "Two people, who had never met, sang a song.")


def export(name, folder):
    """Write a run as a folder that AutoModel and SentenceTransformer open -> its path. It is read
    back and compared before it gets its name."""
    run = evaluate.open_run(name)
    config = run.model.config
    tokenizer = framed(run)
    family, settings = spell(config, run.tokenizer.special)
    files = {"config.json": settings, "tokenizer_config.json": tokenizer_config(run),
             **sentence_files(config)}
    with new_folder(folder) as part:
        weights = to_safetensors(their_weights(run.model, family), {"format": "pt"})
        write_atomic(part / "model.safetensors", weights)
        for path, content in files.items():
            write_atomic(part / path, (json.dumps(content, indent=2) + "\n").encode())
        write_atomic(part / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
        compare(run.model, tokenizer, read(part))
    return Path(folder).absolute()


def their_weights(model, family):
    """{their name: array} of a Model."""
    weights = family.outward(model.state_dict(), model.config)
    made = {}
    for ours, theirs in family.names(model.config).items():
        parts = [weights[ours]]
        if len(theirs) > 1:
            rows = [shape[0] for shape in part_shapes(model, ours, len(theirs))]
            parts = weights[ours].split(rows)
        for their, part in zip(theirs, parts):
            made[their] = part.contiguous().numpy()
    return made


def framed(run):
    """The tokenizer that puts by itself what `rows_of` puts around a text."""
    special = run.tokenizer.special
    tokenizer = tokenizers.Tokenizer.from_str(run.tokenizer.inner.to_str())
    prefix, suffix = affixes(run)
    gold = rows_of(run.tokenizer, SAMPLES, prefix, suffix)
    if [tokenizer.encode(text).ids for text in SAMPLES] == gold:
        return tokenizer
    before = [tokenizer.id_to_token(i) for i in (special.cls, *prefix)]
    after = [tokenizer.id_to_token(i) for i in ((special.sep,) if suffix is None else suffix)]
    single = [*before, "$A", *after]
    second = {"sep": ["$B", *after], "sep-sep": [*after, "$B", *after],
              "segments": [f"{piece}:1" for piece in ("$B", *after)]}
    tokenizer.post_processor = TemplateProcessing(
        single=single, pair=[*single, *second[run.model.config.pair]],
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in {*before, *after}])
    if [tokenizer.encode(text).ids for text in SAMPLES] != gold:
        raise BadInput("the tokenizer cannot be written so that others cut texts as this run does")
    return tokenizer


def tokenizer_config(run):
    """Every role by name: transformers finds none in tokenizer.json."""
    special = run.tokenizer.special
    tokenizer = run.tokenizer.inner
    roles = {"cls": special.cls, "bos": special.cls, "sep": special.sep, "eos": special.sep,
             "pad": special.sep if special.pad is None else special.pad, "mask": special.mask}
    names = {role: tokenizer.id_to_token(i) for role, i in roles.items() if i is not None}
    for piece in ("[UNK]", "<unk>"):
        if tokenizer.token_to_id(piece) is not None:
            names["unk"] = piece
    config = run.model.config
    inputs = ["input_ids", "attention_mask"]
    if config.pair == "segments":
        inputs.insert(1, "token_type_ids")
    made = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": inputs,
            "model_max_length": config.max_tokens or config.max_positions}
    # transformers 4 overrides this with False, unless it is told
    spaced = json.loads(tokenizer.to_str())["pre_tokenizer"] or {}
    if "add_prefix_space" in spaced:
        made["add_prefix_space"] = spaced["add_prefix_space"]
    return made | {f"{role}_token": name for role, name in names.items()}


def sentence_files(config):
    """{path: content} of what SentenceTransformer reads, as its versions 2 to 6 accept it."""
    parts = {"Transformer": "", "Pooling": "1_Pooling"}
    if config.normalize:
        parts["Normalize"] = "2_Normalize"
    transformer = {"max_seq_length": config.max_tokens or config.max_positions,
                   "do_lower_case": False}
    if not config.causal:
        transformer["model_args"] = {"add_pooling_layer": False}
    pools = {key: pool == config.pool for key, pool in POOLS.items() if key.startswith("pooling_")}
    return {
        "modules.json": [{"idx": i, "name": str(i), "path": path,
                          "type": f"sentence_transformers.models.{kind}"}
                         for i, (kind, path) in enumerate(parts.items())],
        "sentence_bert_config.json": transformer,
        "1_Pooling/config.json": {
            "word_embedding_dimension": config.width, "include_prompt": True, **pools}}


def compare(model, tokenizer, again):
    """BadInput unless what was read back has the same weights and vectors, bit for bit."""
    ours = model.state_dict()
    theirs = again.model.state_dict()
    if model.config.pair == "segments":
        longest = model.config.max_positions
        off = (ours[POSITIONS] - theirs[POSITIONS])[longest:].abs().max().item()
        if off:
            print("warning: BERT has one vector for all second texts of pairs, whose positions are "
                  f"up to {off:.1g} off what was trained; single texts are exact", file=sys.stderr)
        for weights in (ours, theirs):
            weights[POSITIONS] = weights[POSITIONS][:longest]
    # BERT's table has no rows before position 0, which no token reads
    same = ours.keys() == theirs.keys() and all(
        torch.equal(ours[key][-len(weight):], weight) for key, weight in theirs.items())
    rows = [tokenizer.encode(text).ids[:model.config.max_positions] for text in SAMPLES]
    vectors = [evaluate.embed(one, rows) for one in (model, again.model)]
    same = same and torch.equal(*vectors) and again.tokenizer.inner.to_str() == tokenizer.to_str()
    if not same:
        raise BadInput("read back, the folder is not the model it was made of: it was not written")
