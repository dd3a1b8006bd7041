"""Read pretrained models into run folders, and write runs as folders for other libraries.

transformers and sentence-transformers read and write the files. Both directions then compare our
numbers with theirs. A folder gets its name only if they are equal. Code and pickles are not loaded.
"""

import contextlib
import json
import logging
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import tokenizers
import torch
import transformers
from huggingface_hub import snapshot_download
from safetensors import safe_open
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers.processors import TemplateProcessing

import evaluate
import runs
from common import BadInput, shown, warn
from data import Tokenizer
from interop.families import copy_in, copy_out, read_config, write_config
from model import Model, Packed, save

LOCAL = {"trust_remote_code": False, "local_files_only": True}
WEIGHTS = LOCAL | {"use_safetensors": True, "dtype": torch.float32}
DOWNLOADS = ("*.json", "*model*.safetensors", "*.jinja", "*.txt", "*.model")
POOLS = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last"}  # theirs: ours
MODULES = re.compile(r"sentence_transformers\.\S*Transformer sentence_transformers\.\S*\.Pooling"
                     r"( sentence_transformers\.\S*\.Normalize)?")
SAMPLES = ["A dog runs.", "Ein Hund läuft schnell; 123 Kinder sehen zu!", "你好  no\nIt's me",
           " ".join(f"THE {number} old kings don't paint horses." for number in range(200))]

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
logging.getLogger("sentence_transformers").setLevel(logging.ERROR)


@contextlib.contextmanager
def new_folder(folder, what):
    """Yield a temporary folder that gets its name `folder` if the block ends without an error.
    Every error becomes BadInput: the libraries raise a dozen types for a bad file."""
    folder = Path(folder).absolute()
    if os.path.lexists(folder):
        raise BadInput(f"{shown(folder)} exists already: name a new folder")
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        yield part
        os.rename(part, folder)
    except BadInput as error:
        raise BadInput(f"{what}: {error}") from None
    except Exception as error:
        reason = shown(" ".join(str(error).split()))
        raise BadInput(f"{what}: {type(error).__name__}: {reason}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def special_tokens_around(tokenizer):
    """Return the ids that a tokenizer puts before a text and those after it, two tuples."""
    tokenizer.no_padding()
    row = tokenizer.encode("a")
    start = row.special_tokens_mask.index(0)
    end = start + row.special_tokens_mask.count(0)
    return tuple(row.ids[:start]), tuple(row.ids[end:])


def compare(run, library, theirs):
    """Raise BadInput unless a run has the token ids and embeddings of a SentenceTransformer and, if
    the transformers model `theirs` has a head, its logits. Return in words what is equal."""
    before, after = run.first["affixes"][0]
    limit = library.max_seq_length = min(library.max_seq_length, 512)  # the last text is longer
    longest = limit - len(before) - len(after)
    rows = [[*before, *ids[:longest].tolist(), *after] for ids in run.tokenizer.encode(SAMPLES)]
    for text, row in zip(SAMPLES, rows):
        ids = library.preprocess([text])["input_ids"][0].tolist()
        if row != ids:
            raise BadInput(f"a text has the ids {row[:20]} here, and {ids[:20]} in transformers")
    compared = {"embeddings": (
        evaluate.embed(run.model, rows), library.encode(SAMPLES, convert_to_tensor=True))}
    if theirs.get_output_embeddings() is not None:
        with torch.no_grad():
            states = run.model(Packed.of(rows[1:2], run.model.config.causal))
            gold = theirs(torch.tensor(rows[1:2])).logits[0]
            compared["logits"] = (run.model.logits(states), gold)
    for name, (ours, gold) in compared.items():
        if not torch.allclose(ours, gold, rtol=0, atol=1e-4 * gold.abs().max().item()):
            raise BadInput(f"the {name} differ by up to {(ours - gold).abs().max():.1g}: the two "
                           "libraries compute different models")
    return (f"{', '.join(['token ids', *compared])} of {len(SAMPLES)} texts, one of them truncated "
            f"at {limit} tokens")


# ---- import


def import_model(name, folder):
    """Write a model, from a folder or the hub, as a run folder. Return its ModelConfig, and what is
    equal. Raises BadInput."""
    with new_folder(folder, f"cannot import {shown(name)}") as part:
        path, inside = find_model(name)
        theirs, config = load_weights(inside)
        library = load_library(path)
        limit = library.max_seq_length = min(library.max_seq_length, config.max_positions)
        config = replace(config, pool=POOLS[library[1].pooling_mode], normalize=len(library) > 2,
                         max_tokens=limit)
        model = Model(config)
        copy_in(theirs, model)
        save(model, part / "model.pt")
        inner = tokenizers.Tokenizer.from_str(library.tokenizer.backend_tokenizer.to_str())
        around = special_tokens_around(inner)
        tokenizer = Tokenizer(inner, around)
        tokenizer.save(part / "tokenizer.json")
        longest = limit - sum(map(len, around))
        first = {"format": runs.FORMAT, "imported": str(name), "tokenizer_hash": tokenizer.hash,
                 "config": {"data": "", "size": "imported", "max_length": longest},
                 "views": 2, "around": around, "affixes": [around] * 2}
        (part / "log.jsonl").write_text(json.dumps(first) + "\n", encoding="utf-8")
        # train.py hands these files on to the runs that start here, for their export.
        kept = part / "hf"
        kept.mkdir()
        template = library.tokenizer.chat_template
        if isinstance(template, dict):  # several, each with a name
            warn(f"of the chat templates {shown(', '.join(template))} only default is imported")
            template = template.get("default")
        if template:
            (kept / "chat_template.jinja").write_text(template, encoding="utf-8")
        if (inside / "generation_config.json").is_file():
            shutil.copy(inside / "generation_config.json", kept)
        return config, compare(runs.open_run(part), library, theirs)


def find_model(name):
    """Return a model's folder, and the folder of its weights, usually the same one. Raises BadInput
    for files that the libraries would misread or execute."""
    path = Path(name)
    if not path.is_dir():
        path = Path(snapshot_download(str(name), allow_patterns=DOWNLOADS))
    inside = path
    # Names that start with a dot, such as ._config.json, are macOS's.
    for file in (*path.glob("[!.]*.json"), *path.glob("[!.]*/[!.]*.json")):
        try:
            json.loads(file.read_bytes())
        except ValueError as error:
            raise BadInput(f"{shown(file)} is damaged: {shown(error)}") from None
    if (path / "modules.json").is_file():
        modules = json.loads((path / "modules.json").read_bytes())
        kinds = " ".join(module["type"] for module in modules)
        if not MODULES.fullmatch(kinds):
            raise BadInput(f"our model lacks one of the modules {shown(kinds)}: delete "
                           "modules.json in a copy of the folder to import without it")
        inside = path / modules[0]["path"]
    files = sorted(inside.glob("[!.]*.safetensors"))
    if not files:
        raise BadInput(f"{inside} has no .safetensors file; pickles are not read, because they can "
                       "execute code: convert them with save_pretrained()")
    for file in files:
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():
                kind = tensors.get_slice(key).get_dtype()
                # transformers would convert other numbers without a word.
                if kind not in ("F64", "F32", "F16", "BF16") and "position_ids" not in key:
                    raise BadInput(f"{shown(key)} has numbers of type {kind}: only weights in "
                                   "floating point can be imported")
    return path, inside


def load_weights(path):
    """Return a transformers model, with its vocabulary head if the folder has one, and its
    ModelConfig. Raises BadInput for weights that are missing or have another shape."""
    config = read_config(transformers.AutoConfig.from_pretrained(path, **LOCAL))
    kind = transformers.AutoModelForCausalLM if config.causal else transformers.AutoModelForMaskedLM
    theirs, report = kind.from_pretrained(
        path, output_loading_info=True, ignore_mismatched_sizes=True, **WEIGHTS)
    head = {key for key in report["missing_keys"] if key.startswith(("lm_head.", "cls."))}
    wrong = sorted(map(str, (report["missing_keys"] - head) | set(report["mismatched_keys"])))
    if wrong:
        raise BadInput(f"weights are missing or have another shape: {shown(', '.join(wrong[:4]))}")
    if head:  # models for embeddings are often saved without
        if not config.tied:
            warn("the folder has no vocabulary head: the token embeddings replace it")
        return theirs.base_model, replace(config, tied=True)
    return theirs, replace(config, head="none" if config.causal else "transform")


def load_library(path):
    """Return a folder as a SentenceTransformer. Raises BadInput if our model lacks a setting."""
    library = SentenceTransformer(str(path), device="cpu", model_kwargs=WEIGHTS, **LOCAL)
    if not (path / "modules.json").is_file():
        # Otherwise sentence-transformers puts every text into the chat template, if there is one.
        library[0].modality_config = {"text": {"method": "forward",
                                               "method_output_name": "last_hidden_state"}}
    pooling = library[1]
    lacking = {"pooling_mode": pooling.pooling_mode not in [*POOLS] and pooling.pooling_mode,
               "include_prompt": not pooling.include_prompt and "false",
               "default_prompt_name": library.prompts.get(library.default_prompt_name),
               "truncate_dim": library.truncate_dim}
    for name, value in lacking.items():
        if value:
            raise BadInput(f"our model lacks {name} {shown(value)!r}: delete it in a copy of the "
                           "folder to import without it")
    if prompts := [name for name, text in library.prompts.items() if text]:
        warn(f"not imported: the prompts {shown(', '.join(prompts))}; put them before your texts")
    # Batches need a padding token. The attention mask hides it, so any token will do.
    tokenizer = library.tokenizer
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token or tokenizer.unk_token
    return library


# ---- export


def export(name, folder):
    """Write a run as a folder for AutoModel and SentenceTransformer. Return what is equal. Raises
    BadInput if no class of theirs can express the model."""
    run = runs.open_run(name)
    config = run.model.config
    with new_folder(folder, f"cannot export {shown(name)}") as part:
        kind = transformers.AutoModelForCausalLM if config.causal else (
            transformers.AutoModel if config.head == "none" else transformers.AutoModelForMaskedLM)
        theirs = kind.from_config(write_config(config, run.tokenizer.special))
        copy_out(run.model, theirs)
        theirs.save_pretrained(part)
        their_tokenizer(run).save_pretrained(part)
        pooling = next(name for name, ours in POOLS.items() if ours == config.pool)
        # The name of a special token inside a text is text, as in data.Tokenizer.
        transformer = Transformer(str(part), model_kwargs=WEIGHTS,
                                  processing_kwargs={"text": {"split_special_tokens": True}})
        modules = [transformer, Pooling(config.width, pooling), *[Normalize()] * config.normalize]
        # Without local_files_only the model card asks the hub for a model of this name.
        SentenceTransformer(modules=modules, device="cpu", **LOCAL).save_pretrained(str(part))
        theirs.save_pretrained(part)  # sentence-transformers left out the head
        # Nothing else: a foreign run can have files that replace ours, or links to yours.
        for name in ("chat_template.jinja", "generation_config.json"):
            file = run.folder / "hf" / name
            if file.is_file() and not file.is_symlink():
                shutil.copy(file, part)
        return compare(run, load_library(part), load_weights(part)[0])


def their_tokenizer(run):
    """Return a run's tokenizer for transformers, which puts the run's ids around a text and
    truncates it where `encode` does."""
    config, special = run.model.config, run.tokenizer.special
    around = tuple(map(tuple, run.first["affixes"][0]))
    longest = config.longest_row
    limit = min(longest, (run.config.get("max_length") or longest) + sum(map(len, around)))
    inner = tokenizers.Tokenizer.from_str(run.tokenizer.inner.to_str())
    if special_tokens_around(inner) != around:
        before, after = [list(map(inner.id_to_token, ids)) for ids in around]
        inner.post_processor = TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(piece, inner.token_to_id(piece)) for piece in {*before, *after}])
    roles = {"cls": special.cls, "bos": special.cls, "sep": special.sep, "eos": special.sep,
             "pad": special.sep if special.pad is None else special.pad, "mask": special.mask}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, model_max_length=limit,
        padding_side="left" if config.causal else "right",
        **{f"{role}_token": inner.id_to_token(i) for role, i in roles.items() if i is not None})
