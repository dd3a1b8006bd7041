"""Pretrained models in, standard folders out: Hugging Face's layout, read and written without its library.

    python train.py --objective mexma --init xlm-roberta-base --data pairs.tsv       # a name on the hub, or a folder
    python evaluate.py export out/x folder                                           # for AutoModel and SentenceTransformer

Nothing of a file is executed: weights are safetensors, or pickles of tensors alone. families.py knows the names.
"""

import json
import os
import re
import secrets
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

import data
from data import BadInput
from evaluate import embed_rows, read_config, read_run, rows_of, table
from families import FAMILIES, spell
from model import Model, load, read_torch


class Loaded(NamedTuple):
    """A model and what its texts need. frame: of evaluate.rows_of; longest: where texts are cut, in tokens; unit: vectors are scaled to
    length 1; notes: lines that the user should see."""
    model: Model
    tokenizer: Tokenizer
    frame: tuple | None = None
    longest: int | None = None
    unit: bool = False
    notes: tuple[str, ...] = ()


# ---------------------------------------------------------------------------------------------------------------------
# In

FILES = ("*.json", "model*.safetensors")
POOLS = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_max_tokens": "max", "pooling_mode_lasttoken": "last",
         "cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last"}  # the spelling up to sentence-transformers 5, then that from 6 on


def find(name):
    """A folder, or the name of a model on the Hugging Face hub -> the folder of its files, fetched and cached by huggingface_hub."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise BadInput(f"{name} is a file: give the folder that it lies in")
    from huggingface_hub import errors, snapshot_download  # here, because it is slow to import and only the hub needs it
    try:
        folder = Path(snapshot_download(str(name), allow_patterns=FILES))
        if not any(folder.glob("model*.safetensors")):
            snapshot_download(str(name), allow_patterns=["pytorch_model*.bin"])
    except errors.GatedRepoError:
        raise BadInput(f"{name} is gated: accept its terms on https://huggingface.co/{name}, then log in with: hf auth login") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise BadInput(f"{name} is neither a folder here nor a public model on the Hugging Face hub: check the spelling, "
                       "or log in with: hf auth login") from None
    except Exception as error:                                           # one of a dozen types, by what is wrong with the network
        raise BadInput(f"there is no folder {name}, and the Hugging Face hub cannot be reached ({type(error).__name__}): "
                       "download the model elsewhere and give its folder") from None
    return folder


def read_json(path, kind=dict):
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"cannot read {path} ({type(error).__name__}): give the folder of a whole model") from None
    if not isinstance(found, kind):
        raise BadInput(f"{path} holds a {type(found).__name__}, not a {kind.__name__}: take the file of the model's own folder")
    return found


def weight_files(folder):
    """{their name: a function that reads this tensor} of the weights in a folder, in one file or several."""
    for stem in ("model.safetensors", "pytorch_model.bin"):
        paths = [folder / stem]
        if (index := folder / f"{stem}.index.json").is_file() and not paths[0].is_file():
            parts = read_json(index).get("weight_map")
            parts = set(map(str, parts.values())) if isinstance(parts, dict) else ()
            if not parts or any(Path(part).name != part for part in parts):
                raise BadInput(f"{index} must name the files that lie beside it: take the file of the model's own folder")
            paths = [folder / part for part in sorted(parts)]
        if paths[0].is_file() or len(paths) > 1:
            open_file = open_pickle if stem.endswith("bin") else open_safetensors
            return {name: read for path in paths for name, read in open_file(path).items()}
    raise BadInput(f"{folder} has no weights: it needs a model.safetensors or pytorch_model.bin, or their index.json")


def open_safetensors(path):
    try:
        file = safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{path} is damaged or cut short ({error}): fetch it again") from None
    return {name: lambda name=name: file.get_tensor(name) for name in file.keys()}


def open_pickle(path):
    """Of an old pytorch_model.bin, read as tensors and nothing else: a pickle that would run code is refused."""
    found = read_torch(path)
    if not isinstance(found, dict) or not all(torch.is_tensor(value) for value in found.values()):
        raise BadInput(f"{path} holds other things than weights by name: take the file of the model's own folder")
    return {name: lambda value=value: value for name, value in found.items()}


def part_rows(model, name, parts):
    """How many rows of our weight belong to each of the tensors that make it up."""
    rows = len(model.state_dict()[name])
    if parts == 3 and ".qkv." in name:
        block = model.get_submodule(name.rsplit(".", 2)[0])
        keys = block.kv_heads * block.size
        return [rows - 2 * keys, keys, keys]
    return [rows // parts] * parts


def complain(name, wrong):
    if wrong:
        raise BadInput(f"{name}: the weights do not fit config.json: {'; '.join(wrong[:20])}" + f"; and {len(wrong) - 20} more" * (len(wrong) > 20))


def build(name, family, config, files, settings):
    """The Model of a ModelConfig, which came of the `settings` of config.json, out of tensors under their names, as float32. BadInput lists
    every one that is missing, unknown, misshapen, or not finite."""
    strip = lambda key: re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", key)).removeprefix(family.prefix)
    found = {strip(key): key for key in files}
    if config.layers > len(files):
        raise BadInput(f"{name}: config.json says {config.layers:,} layers, but there are {len(files):,} tensors: they are not of one model")
    for change in family.heads:
        made = replace(config, **change)
        names = {ours: [strip(their) for their in theirs] for ours, theirs in family.names(made).items()}
        wanted = {their: None for theirs in names.values() for their in theirs}
        if found.keys() >= wanted.keys():
            break
    try:
        with torch.device("meta"):                                       # shapes alone: no memory, and no random numbers
            model = Model(made)
    except (RuntimeError, TypeError, OverflowError):
        raise BadInput(f"{name}: its config.json asks for sizes that no tensor can have: take the file of the model's own folder") from None
    complain(name, [f"missing {their}" for their in wanted if their not in found] + [f"{key} is there twice" for key in files if found[strip(key)] != key]
             + [f"unknown {found[key]}" for key in found if key not in wanted and not re.fullmatch(family.ignored, key)])
    weights, wrong, own = {}, [], model.state_dict()
    for ours, theirs in names.items():
        parts = [files[found[their]]() for their in theirs]
        for their, part, rows in zip(theirs, parts, part_rows(model, ours, len(parts)) if ours in own else ()):
            if part.shape != (rows, *own[ours].shape[1:]):
                wrong.append(f"{found[their]} has shape {tuple(part.shape)}, not {(rows, *own[ours].shape[1:])}")
        wrong += [f"{found[their]} is {part.dtype} or not finite" for their, part in zip(theirs, parts)
                  if not part.is_floating_point() or not part.float().isfinite().all()]
        if not wrong:
            weights[ours] = (torch.cat(parts) if len(parts) > 1 else parts[0].clone()).float()           # a copy: the file may change
    complain(name, wrong)
    model.load_state_dict(family.inward(weights, made, settings), assign=True)
    return model.eval()


def pooling(folder, config):
    """What modules.json says of sentence vectors -> (pool, are they scaled to length 1?). Without it the mean, as sentence-transformers takes."""
    if not (folder / "modules.json").is_file():
        return "last" if config.causal else "mean", False
    modules = read_json(folder / "modules.json", list)
    modules = {str(module.get("type")).rpartition(".")[2]: str(module.get("path")) for module in modules if isinstance(module, dict)}
    if extra := modules.keys() - {"Transformer", "Pooling", "Normalize"}:
        raise BadInput(f"{folder}: its modules.json has {', '.join(sorted(extra))}, which this model lacks; to take the rest, remove modules.json from a copy")
    if "Pooling" not in modules:
        return "last" if config.causal else "mean", "Normalize" in modules
    found = read_json(folder / modules["Pooling"] / "config.json")
    modes = found.get("pooling_mode") or [name for name in found if name.startswith("pooling_mode_") and found[name]]
    modes = list(map(str, modes if isinstance(modes, list) else [modes]))
    if len(modes) != 1 or modes[0] not in POOLS:
        raise BadInput(f"{folder}: its pooling {', '.join(modes)} is none of {', '.join(sorted(set(POOLS.values())))}; "
                       "to take the model without it, remove modules.json from a copy")
    return POOLS[modes[0]], "Normalize" in modules


def tokenizer_of(name):
    """The tokenizer of a run, of a folder, or of a name on the hub."""
    path = find(name) / "tokenizer.json"
    if not path.is_file():
        raise BadInput(f"{name} has no tokenizer.json; transformers makes one: AutoTokenizer.from_pretrained('{name}').save_pretrained(FOLDER)")
    return data.read_tokenizer(path)


def read(name):
    """A pretrained model of a folder or of the hub -> Loaded. BadInput says what is missing, damaged or beyond our model."""
    folder = find(name)
    found = read_json(folder / "config.json")
    kind = str(found.get("model_type"))
    if kind not in FAMILIES:
        raise BadInput(f"{name} is a {kind!r} model: choose one of {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    try:
        config = family.config(found)
    except BadInput as error:
        raise BadInput(f"{name}: {error}") from None
    pool, unit = pooling(folder, config)
    tokenizer = tokenizer_of(name)
    vocab, notes = data.special(tokenizer).vocab, []
    if vocab > config.vocab:
        raise BadInput(f"{name}: its tokenizer.json has {vocab:,} pieces, but config.json a vocabulary of {config.vocab:,}: they are not of one model")
    if vocab < config.vocab:
        notes.append(f"{name} has embeddings for {config.vocab - vocab:,} pieces more than its tokenizer; they are kept")
    longest = read_json(folder / "sentence_bert_config.json").get("max_seq_length") if (folder / "sentence_bert_config.json").is_file() else None
    model = build(name, family, replace(config, pool=pool), weight_files(folder), found)
    return Loaded(model, tokenizer, None, min(longest if type(longest) is int else config.max_length, config.max_length), unit, tuple(notes))


def open_model(name, device="cpu"):
    """A run of ours, or a pretrained model -> Loaded."""
    folder = Path(name)
    if not (folder / "model.pt").is_file():
        if (folder / "log.jsonl").is_file():
            read_config(folder)                                          # a run without its weights: it says so
        loaded = read(name)
        loaded.model.to(device)
        return loaded
    first, tokenizer = read_run(folder)
    model = load(folder / "model.pt", device)
    return Loaded(model, tokenizer, first.get("frames") and first["frames"][0], model.config.max_length)


def add_tokens(model, tokenizer, names):
    """Give a tokenizer the special tokens `names`, those that it lacks, -> the Model with a row for each: the mean of the rows there were."""
    known = data.special(tokenizer).vocab
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names if tokenizer.token_to_id(name) is None])
    total, weights = data.special(tokenizer).vocab, model.state_dict()
    for name in weights.keys() & {"embed.weight", "vocabulary.weight", "vocabulary_bias"}:
        old = weights[name]
        mean = old[:known].mean(0, keepdim=True).expand(total - known, *old.shape[1:])
        weights[name] = torch.cat([old[:known], mean, old[total:]])      # beyond the tokenizer's pieces there may be unused rows
    with torch.device("meta"):
        made = Model(replace(model.config, vocab=max(total, model.config.vocab)))
    made.load_state_dict(weights, assign=True)
    return made.train(model.training)


# ---------------------------------------------------------------------------------------------------------------------
# Out

ST = "sentence_transformers.models."  # the spelling that every version of that library reads
SAMPLES = ("A dog runs.", "Ein Hund läuft schnell durch den Park, 3 Kinder sehen zu.", "你好", "Two people, who had never met, sang a song.")


def their_weights(model, family):
    """{their name: tensor} of a Model, each with memory of its own."""
    weights, made = family.outward(model.state_dict(), model.config), {}
    for ours, theirs in family.names(model.config).items():
        rows = part_rows(model, ours, len(theirs)) if len(theirs) > 1 else [len(weights[ours])]
        made |= {their: part.detach().clone().contiguous() for their, part in zip(theirs, weights[ours].split(rows))}
    return made


def expressible(config, special):
    """-> (the Family that can express a model, its config.json). BadInput with the reason if none can."""
    if config.pool == "attention":
        raise BadInput("no Hugging Face class can express pooling attention: set another --pool when training")
    return spell(config, special)


def framed(loaded):
    """The tokenizer that puts by itself what the model's rows have around a text, as `rows_of` does."""
    tokenizer = Tokenizer.from_str(loaded.tokenizer.to_str())
    gold = rows_of(tokenizer, SAMPLES, None, loaded.frame)
    right = lambda: [tokenizer.encode(text).ids for text in SAMPLES] == gold
    if not right():
        special = data.special(tokenizer)
        front, back = loaded.frame or ((), (special.sep,))
        names = lambda ids: [tokenizer.id_to_token(place) for place in ids]
        front, back = names([special.cls, *front]), names(back)
        tokenizer.post_processor = TemplateProcessing(single=[*front, "$A", *back], pair=[*front, "$A", *back, "$B", *back],
                                                      special_tokens=[(name, tokenizer.token_to_id(name)) for name in {*front, *back}])
    if not right():
        raise BadInput("the tokenizer cannot be written so that others cut texts as this model does")
    return tokenizer


def tokenizer_config(tokenizer, longest):
    """Every role by name: transformers finds none in tokenizer.json. No type ids: the models that we write have one type."""
    special, name = data.special(tokenizer), tokenizer.id_to_token
    spaced = json.loads(tokenizer.to_str())["pre_tokenizer"] or {}         # transformers 4 overrides this with False, unless it is told
    unknown = next((piece for piece in ("[UNK]", "<unk>") if tokenizer.token_to_id(piece) is not None), None)
    return {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest, "model_input_names": ["input_ids", "attention_mask"],
            "padding_side": "right", "clean_up_tokenization_spaces": False, "cls_token": name(special.cls), "bos_token": name(special.cls),
            "sep_token": name(special.sep), "eos_token": name(special.sep), "pad_token": name(special.sep if special.pad is None else special.pad)
            } | ({} if special.mask is None else {"mask_token": name(special.mask)}) | ({"unk_token": unknown} if unknown else {}
            ) | {key: spaced[key] for key in spaced if key == "add_prefix_space"}


def card(name, config, folder):
    """The README of an exported model: how to use it, how it was trained, what it scored. The licence is its author's to choose."""
    lines = ["---", "library_name: sentence-transformers", "pipeline_tag: sentence-similarity",
             "tags: [sentence-transformers, sentence-similarity, feature-extraction, nanojepa]", "---", "", f"# {Path(name).name}", "",
             f"Texts to vectors of {config.width} numbers, compared by cosine; {config.layers} layers, pooling {config.pool}. Made with nanoJEPA.", "",
             "```python", "from sentence_transformers import SentenceTransformer", "",
             f'vectors = SentenceTransformer("{folder.name}").encode(["A dog runs.", "Ein Hund läuft."])', "```"]
    run = Path(name)
    if (run / "model.pt").is_file():
        settings = read_config(run)["config"]                            # without the paths of its author's machine
        told = [settings.get("objective", ""), "langs", "steps", "batch", "lr", "warmup", "schedule", "weight_decay", "clip", "precision", "seed"]
        lines += ["", "## Training", "", "```json", json.dumps({key: settings[key] for key in ["objective", *told] if key in settings}, indent=1), "```"]
        if (run / "eval.json").is_file():
            lines += ["", "## Results", "", "On the test rows of the run:", "", "```", table(read_json(run / "eval.json")), "```"]
    return "\n".join(lines) + "\n"


def sentence_files(config, longest):
    """{path: content} of what SentenceTransformer reads, in the spelling that its versions 2 to 6 accept."""
    pool = "mean" if config.pool == "weighted" else config.pool          # whose weights are all equal
    names = [key for key in POOLS if key.startswith("pooling_mode_")]
    return {"modules.json": [dict(idx=0, name="0", path="", type=f"{ST}Transformer"), dict(idx=1, name="1", path="1_Pooling", type=f"{ST}Pooling")],
            "sentence_bert_config.json": {"max_seq_length": longest, "do_lower_case": False}
            | ({} if config.causal else {"model_args": {"add_pooling_layer": False}}),
            "config_sentence_transformers.json": {"__version__": {"sentence_transformers": "3.0.0"}, "prompts": {}, "default_prompt_name": None,
                                                  "similarity_fn_name": "cosine"},
            "1_Pooling/config.json": {"word_embedding_dimension": config.width, "include_prompt": True} | {key: POOLS[key] == pool for key in names}}


def export(name, folder):
    """Write a run, or a pretrained model, as a folder that AutoModel and SentenceTransformer open: whole, read back and compared, or not at all."""
    folder, loaded = Path(folder).absolute(), open_model(name)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise BadInput(f"{folder} is there already: name a new folder")
    model, tokenizer = loaded.model, framed(loaded)
    family, config = expressible(model.config, data.special(tokenizer))
    files = sentence_files(model.config, loaded.longest)
    files |= {"config.json": config, "tokenizer_config.json": tokenizer_config(tokenizer, loaded.longest)}
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(6)}.part")
    try:
        (part / "1_Pooling").mkdir(parents=True)
        save_file(their_weights(model, family), part / "model.safetensors", metadata={"format": "pt"})
        for path, content in files.items():
            data.write_atomic(part / path, (json.dumps(content, indent=2) + "\n").encode())
        shutil.copymode(part / "config.json", part / "model.safetensors")     # save_file lets nobody else read it
        data.write_tokenizer(tokenizer, part / "tokenizer.json")
        data.write_atomic(part / "README.md", card(name, model.config, folder).encode())
        compare(model, tokenizer, read(part))
        if folder.exists():
            folder.rmdir()
        os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def compare(model, tokenizer, again):
    """BadInput unless a model that was read back has the same weights, bit for bit, and gives the same vectors."""
    own, read_back = model.state_dict(), again.model.state_dict()
    rows = [tokenizer.encode(text).ids[:model.config.max_length] for text in SAMPLES]
    # BERT's table has no rows before position 0, which no token reads
    if own.keys() != read_back.keys() or not all(torch.equal(own[key][-len(value):], value) for key, value in read_back.items()):
        raise BadInput("the folder does not hold the weights of the model: it was not written")
    if again.tokenizer.to_str() != tokenizer.to_str() or not torch.equal(embed_rows(model, rows), embed_rows(again.model, rows)):
        raise BadInput("the folder does not give the vectors of the model: it was not written")
