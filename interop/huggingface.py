"""Read pretrained models into run folders, and write runs as folders for other libraries.

transformers and sentence-transformers read and write the files. Both directions then compare our
numbers with theirs, and a folder gets its name only if they are equal. Code and pickles in somebody
else's folder are never loaded.
"""

import contextlib
import io
import json
import logging
import os
import re
import shutil
from dataclasses import asdict, replace
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
from common import BadInput, atomic_file, make_folder, shown, warn
from data import Tokenizer
from interop.families import copy_in, copy_out, read_config, write_config
from model import Model, Packed, save

LOCAL = {"trust_remote_code": False, "local_files_only": True}
WEIGHTS = LOCAL | {"use_safetensors": True, "dtype": torch.float32}
DOWNLOADS = ("*.json", "*model*.safetensors", "*.jinja", "*.txt", "*.model")
GENERATION, TEMPLATE = "generation_config.json", "chat_template.jinja"
POOLS = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last"}  # theirs: ours
MODULES = re.compile(r"sentence_transformers\.\S*Transformer sentence_transformers\.\S*\.Pooling"
                     r"( sentence_transformers\.\S*\.Normalize)?")
# Without this setting sentence-transformers puts every text into the chat template, if any.
TEXT = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
SAMPLES = ["A dog runs.", "Ein Hund läuft schnell; 123 Kinder sehen zu!", "你好  no\nIt's me",
           " ".join(f"THE {number} old kings don't paint horses." for number in range(200))]


@contextlib.contextmanager
def new_folder(folder):
    """Yield a temporary folder that gets its name `folder` if the block ends without an error."""
    folder = Path(folder).absolute()
    if os.path.lexists(folder):
        raise BadInput(f"{shown(folder)} exists already: name a new folder")
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    make_folder(part, "the folder")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    try:
        yield part
        os.rename(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def in_one_line(what):
    """Turn any error in the block, such as the libraries' for a damaged file, into BadInput."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"{what}: {error}") from None
    except Exception as error:
        reason = shown(" ".join(str(error).split()))
        raise BadInput(f"{what}: {type(error).__name__}: {reason}") from error


def special_tokens_around(tokenizer):
    """Return the ids that a tokenizer puts before a text and those after it, two tuples."""
    tokenizer.no_padding()
    text = tokenizer.encode("a", add_special_tokens=False).ids
    row = tokenizer.encode("a").ids
    start = next(i for i in range(len(row)) if row[i:i + len(text)] == text)
    return tuple(row[:start]), tuple(row[start + len(text):])


def compare(run, limit, library, theirs):
    """Raise BadInput unless a run has the token ids and embeddings of a SentenceTransformer and, if
    the transformers model `theirs` has a head, its logits. Return in words what is equal."""
    before, after = affixes = run.first["affixes"][0]
    library.max_seq_length = limit = min(limit, 512)  # the last text is longer
    with contextlib.redirect_stderr(io.StringIO()):  # a warning about that
        rows = evaluate.encode_ids(run.model, run.tokenizer, SAMPLES, affixes,
                                   limit - len(before) - len(after))
    gold = [library.preprocess([text])["input_ids"][0].tolist() for text in SAMPLES]
    for row, ids in zip(rows, gold):
        if row != ids:
            raise BadInput(f"a text has the ids {row[:20]} here, and {ids[:20]} in transformers")
    compared = {"embeddings": (
        evaluate.embed(run.model, rows),
        library.encode(SAMPLES, convert_to_tensor=True, show_progress_bar=False))}
    if theirs.get_output_embeddings() is not None:
        with torch.no_grad():
            states = run.model(Packed.of(rows[1:2], run.model.config.causal))
            gold = theirs(torch.tensor(rows[1:2])).logits[0]
            compared["logits"] = (run.model.logits(states), gold)
    for name, (ours, gold) in compared.items():
        if not torch.allclose(ours, gold, rtol=0, atol=1e-4 * gold.abs().max().item()):
            raise BadInput(f"the {name} differ by up to {(ours - gold).abs().max():.1g}, so the "
                           "libraries compute different models")
    return (f"{', '.join(['token ids', *compared])} of {len(SAMPLES)} texts, one of them truncated "
            f"at {limit} tokens")


# ---- import


def import_model(name, folder):
    """Write a model, from a folder or the hub, as a run folder. Return its ModelConfig, the names
    of its prompts, which are not imported, and what is equal. Raises BadInput."""
    with new_folder(folder) as part, in_one_line(f"cannot import {shown(name)}"):
        path, inside = find_model(name)
        theirs, config = load_weights(inside)
        library = load_library(path)
        limit = min(library.max_seq_length, config.max_positions)
        config = replace(config, pool=POOLS[library[1].pooling_mode], normalize=len(library) > 2,
                         max_tokens=limit if limit < config.max_positions else 0)
        model = Model(config)
        copy_in(theirs, model)
        save(model, part / "model.pt")
        inner = tokenizers.Tokenizer.from_str(library.tokenizer.backend_tokenizer.to_str())
        around = special_tokens_around(inner)
        tokenizer = Tokenizer(inner, around)
        tokenizer.save(part / "tokenizer.json")
        settings = {"data": "", "objective": "", "size": "imported", "model": asdict(config),
                    "max_length": limit - len(around[0]) - len(around[1])}
        first = {"format": 5, "config": settings, "imported": str(name), "around": around,
                 "affixes": [around, around], "views": 2, "tokenizer_hash": tokenizer.hash}
        with atomic_file(part / "log.jsonl") as file:
            file.write((json.dumps(first) + "\n").encode())
        (part / "hf").mkdir()
        if isinstance(library.tokenizer.chat_template, str):
            (part / "hf" / TEMPLATE).write_text(library.tokenizer.chat_template, encoding="utf-8")
        for file in map(inside.joinpath, ("config.json", GENERATION, TEMPLATE)):
            if file.is_file():
                shutil.copy(file, part / "hf")
        equal = compare(evaluate.open_run(part), limit, library, theirs)
    return config, [prompt for prompt, text in library.prompts.items() if text], equal


def find_model(name):
    """Return a model's folder and the folder inside it that has the weights, usually the same one.
    Raises BadInput for files that the libraries would misread or execute."""
    path = inside = Path(name)
    if not path.is_dir():
        path = inside = Path(snapshot_download(str(name), allow_patterns=DOWNLOADS))
    if (path / "modules.json").is_file():
        with in_one_line(path / "modules.json"):
            modules = json.loads((path / "modules.json").read_bytes())
            kinds = " ".join(module["type"] for module in modules)
            if not (path / "config.json").is_file():
                inside = path / modules[0]["path"]
        if not MODULES.fullmatch(kinds):
            raise BadInput(f"our model lacks one of the modules {shown(kinds)}; delete "
                           "modules.json in a copy of the folder to import without them")
    for file in (*path.glob("*.json"), *inside.glob("*.json")):
        with in_one_line(shown(file)):
            content = json.loads(file.read_bytes())
            if file.name in ("config.json", "tokenizer_config.json"):
                content.items()  # fails unless it is an object
    files = sorted(inside.glob("*.safetensors"))
    if not files:
        raise BadInput(f"{inside} has no .safetensors file. Pickles are not read, because they can "
                       "execute code: convert them where you trust them, with save_pretrained()")
    for file in files:
        with in_one_line(shown(file)), safe_open(file, "pt") as tensors:
            for key in tensors.keys():
                kind = tensors.get_slice(key).get_dtype()
                # transformers would convert other numbers without a word.
                if kind not in ("F64", "F32", "F16", "BF16") and "position_ids" not in key:
                    raise BadInput(f"{shown(key)} has numbers of type {kind}, but our model has "
                                   "floating-point numbers only")
    return path, inside


def load_weights(path):
    """Return a transformers model, with its vocabulary head if the folder has one, and its
    ModelConfig. Raises BadInput for weights that are missing, misshapen or not finite."""
    config = read_config(transformers.AutoConfig.from_pretrained(path, **LOCAL))
    kind = transformers.AutoModelForCausalLM if config.causal else transformers.AutoModelForMaskedLM
    theirs, report = kind.from_pretrained(
        path, output_loading_info=True, ignore_mismatched_sizes=True, **WEIGHTS)
    head = {key for key in report["missing_keys"] if key.startswith(("lm_head.", "cls."))}
    wrong = sorted(map(str, (report["missing_keys"] - head) | set(report["mismatched_keys"])))
    if wrong:
        raise BadInput(f"weights are missing or have another shape: {shown(', '.join(wrong[:4]))}")
    for name, weight in theirs.state_dict().items():
        if not weight.isfinite().all():
            raise BadInput(f"the weight {name} has NaN or infinity")
    if head:  # models for embeddings are often saved without
        return theirs.base_model, replace(config, tied=True)
    return theirs, replace(config, head="none" if config.causal else "transform")


def load_library(path):
    """Return a folder as a SentenceTransformer. Raises BadInput for settings that our model
    lacks."""
    library = SentenceTransformer(str(path), device="cpu", model_kwargs=WEIGHTS, **LOCAL)
    if not (path / "modules.json").is_file():
        library[0].modality_config = TEXT
    pooling = library[1]
    lacking = {"pooling_mode": pooling.pooling_mode not in [*POOLS] and pooling.pooling_mode,
               "include_prompt": not pooling.include_prompt and "false",
               "default_prompt_name": library.prompts.get(library.default_prompt_name),
               "truncate_dim": library.truncate_dim}
    for name, value in lacking.items():
        if value:
            raise BadInput(f"our model lacks {name} {shown(value)!r}; delete it in a copy of the "
                           "folder to import the model without it")
    # Batches need a padding token. The attention mask hides it, so any token will do.
    tokenizer = library.tokenizer
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token or tokenizer.unk_token
    return library


# ---- export


def export(name, folder):
    """Write a run as a folder for AutoModel, SentenceTransformer and, if it is a decoder,
    generate(). Return what is equal. Raises BadInput if no class of theirs can express the model.

    A prompt of a decoder ends where its answer begins, but a text to embed may end in [PRED] or
    [SEP]. If so, sentence-transformers gets a second folder, with a tokenizer of its own.
    """
    run = evaluate.open_run(name)
    config, special = run.model.config, run.tokenizer.special
    kept = run.folder / "hf"
    before, after = around = tuple(map(tuple, run.first["affixes"][0]))
    prompt = (special.before, special.after if kept.is_dir() else ()) if config.causal else around
    longest = config.max_tokens or config.max_positions
    limit = min(longest, (run.config.get("max_length") or longest) + len(before) + len(after))
    with new_folder(folder) as part, in_one_line(f"cannot export {shown(name)}"):
        theirs = make_theirs(run)
        theirs.save_pretrained(part)
        their_tokenizer(run, around, limit).save_pretrained(part)
        pooling = next(name for name, ours in POOLS.items() if ours == config.pool)
        modules = [
            # The name of a special token inside a text is text, as in data.Tokenizer.
            Transformer(str(part), model_kwargs=WEIGHTS, modality_config=TEXT,
                        module_output_name="token_embeddings",
                        processing_kwargs={"text": {"split_special_tokens": True}}),
            Pooling(config.width, pooling), *[Normalize()] * config.normalize]
        modules[0].save_in_root = prompt == around  # otherwise in part/0_Transformer
        # Without local_files_only the model card asks the hub for a model of this name.
        SentenceTransformer(modules=modules, device="cpu", **LOCAL).save_pretrained(str(part))
        if prompt == around:
            theirs.save_pretrained(part)  # sentence-transformers left out the head
        else:
            their_tokenizer(run, prompt, config.max_positions).save_pretrained(part)
        for file in map(kept.joinpath, (GENERATION, TEMPLATE)):
            if file.is_file():
                shutil.copy(file, part)
        library = SentenceTransformer(str(part), device="cpu", model_kwargs=WEIGHTS, **LOCAL)
        return compare(run, limit, library, type(theirs).from_pretrained(part, **WEIGHTS))


def make_theirs(run):
    """Return a run as a model of transformers."""
    config = run.model.config
    kind = transformers.AutoModelForCausalLM if config.causal else (
        transformers.AutoModel if config.head == "none" else transformers.AutoModelForMaskedLM)
    theirs = kind.from_config(write_config(config, run.tokenizer.special)).eval()
    error = copy_out(run.model, theirs)
    if error > 1e-5:
        warn("BERT adds one vector to all positions of a second text; the trained positions differ "
             f"from that by up to {error:.1g}. Single texts are exact")
    return theirs


def their_tokenizer(run, around, limit):
    """Return a run's tokenizer for transformers, which puts the ids `around` a text."""
    config, special = run.model.config, run.tokenizer.special
    inner = tokenizers.Tokenizer.from_str(run.tokenizer.inner.to_str())
    if special_tokens_around(inner) != around:
        first, last = [list(map(inner.id_to_token, ids)) for ids in around]
        second = {"sep": ["$B", *last], "sep-sep": [*last, "$B", *last],
                  "segments": [f"{piece}:1" for piece in ("$B", *last)]}
        inner.post_processor = TemplateProcessing(
            single=[*first, "$A", *last], pair=[*first, "$A", *last, *second[config.pair]],
            special_tokens=[(piece, inner.token_to_id(piece)) for piece in {*first, *last}])
    roles = {"cls": special.cls, "bos": special.cls, "sep": special.sep, "eos": special.sep,
             "pad": special.sep if special.pad is None else special.pad, "mask": special.mask}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, model_max_length=limit, clean_up_tokenization_spaces=False,
        padding_side="left" if config.causal else "right",
        **{f"{role}_token": inner.id_to_token(i) for role, i in roles.items() if i is not None})
    if config.causal and not (run.folder / "hf").is_dir():
        # Our own decoders read a chat as [CLS] question [SEP] answer [SEP].
        tokenizer.chat_template = ("{{ bos_token }}{% for turn in messages %}"
                                   "{{ turn.content + eos_token }}{% endfor %}")
    return tokenizer
