"""Read pretrained models into run folders, and write runs as folders for other libraries.

transformers and sentence-transformers read and write the files. Both directions then compare our
numbers with theirs. A folder gets its name only if they are equal. Code and pickles are not loaded.

A run has two frames, ids before and after a text: `around`, which the tokenizer adds, and that of
its embedding, `affixes[0]`, such as a user's turn or a [PRED] at the end. An exported folder in
which they differ has two tokenizers: the root's adds `around`, for everybody who calls
tokenizer(text), and that in 0_Transformer adds the embedding's frame, for SentenceTransformer.
"""

import contextlib
import glob
import json
import logging
import os
import re
import secrets
import shutil
from dataclasses import replace
from pathlib import Path

import tokenizers
import torch
import transformers
from huggingface_hub import snapshot_download
from jinja2 import TemplateError
from safetensors import safe_open
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers.processors import TemplateProcessing

import evaluate
from base.common import BadInput, shown, warn
from base.tokenizer import Tokenizer
from corpora.store import remove_dead_parts
from data import Packed
from harness import pretrained, runs
from harness.weights import save
from interop.card import model_card
from interop.families import SIZES, copy_in, copy_out, read_config, write_config
from model import Model

LOCAL = {"trust_remote_code": False, "local_files_only": True}
# Attention is named, because otherwise a file of the folder names it, maybe a kernel on the hub.
WEIGHTS = LOCAL | {"use_safetensors": True, "dtype": torch.float32, "attn_implementation": "eager"}
# What a file may hand on to transformers: nothing that loads code, nor another file.
HARMLESS = {"add_pooling_layer", "dtype", "model_max_length", "padding_side", "text", "torch_dtype",
            "split_special_tokens", "trust_remote_code", "use_cache", "use_fast"}
DOWNLOADS = ("*.json", "*model*.safetensors", "*.jinja", "*.txt", "*.model")
POOLS = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last"}  # theirs: ours
OLDER_POOLS = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens",
               "max": "pooling_mode_max_tokens", "last": "pooling_mode_lasttoken"}
MODULES = re.compile(r"sentence_transformers\.\S*Transformer sentence_transformers\.\S*\.Pooling"
                     r"( sentence_transformers\.\S*\.Normalize)?")
FRAMED = "0_Transformer"  # the folder of sentence-transformers' part, if it needs its own tokenizer
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
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    remove_dead_parts(part.parent, f".{glob.escape(folder.name)}.*.part")
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


def frames(run):
    """Return the ids (before, after) that a run's tokenizer adds to a text, and those of the
    embedding of a text."""
    return [tuple(map(tuple, ids)) for ids in (run.header["around"], run.header["affixes"][0])]


def same_ids(what, ours, theirs):
    """Raise BadInput unless two rows of ids are equal."""
    if ours != theirs:
        raise BadInput(f"{what} has the ids {ours[:20]} here, and {theirs[:20]} in transformers")


def same_numbers(what, ours, theirs):
    """Raise BadInput unless two tensors are equal, up to rounding."""
    if not torch.allclose(ours, theirs, rtol=0, atol=1e-4 * theirs.abs().max().item()):
        raise BadInput(f"the {what} differ by up to {(ours - theirs).abs().max():.1g}: the two "
                       "libraries compute different models")


def compare(run, library, theirs):
    """Raise BadInput unless a run has the token ids and embeddings of a SentenceTransformer and, if
    the transformers model `theirs` has a head, its logits. Return in words what is equal."""
    before, after = frames(run)[1]
    limit = library.max_seq_length = min(library.max_seq_length, 512)  # the last text is longer
    longest = limit - len(before) - len(after)
    rows = [[*before, *ids[:longest].tolist(), *after] for ids in run.tokenizer.encode(SAMPLES)]
    for text, row in zip(SAMPLES, rows):
        same_ids("a text", row, library.preprocess([text])["input_ids"][0].tolist())
    compared = ["token ids", "embeddings"]
    same_numbers("embeddings", evaluate.embed(run.model, rows),
                 library.encode(SAMPLES, convert_to_tensor=True))
    if theirs.get_output_embeddings() is not None:
        compared.append("logits")
        with torch.no_grad():
            states = run.model(Packed.of(rows[1:2], run.model.config.causal))
            same_numbers("logits", run.model.logits(states),
                         theirs(torch.tensor(rows[1:2])).logits[0])
    return (f"{', '.join(compared)} of {len(SAMPLES)} texts, one of them truncated at {limit} "
            "tokens")


def compare_use(run, folder, library, theirs):
    """Raise BadInput unless an exported folder gives people what the run has: tokenizer(text), a
    rendered chat, an empty text, a masked text in fill-mask. Return in words what is equal."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **LOCAL)
    inner = tokenizers.Tokenizer.from_str(run.tokenizer.inner.to_str())  # reads special tokens
    (before, after), frame = frames(run)
    texts = {"an empty text": "", "a plain text": SAMPLES[1], "a rendered chat": chat_of(tokenizer)}
    compared = [what for what, text in texts.items() if text is not None]
    for what in compared:
        ids = inner.encode(texts[what], add_special_tokens=False).ids
        same_ids(what, [*before, *ids, *after], tokenizer(texts[what])["input_ids"])
    # For a text without a token, sentence-transformers pools padding if the pooling is another.
    if any(frame) or run.model.config.pool in ("mean", "last"):
        texts = ["", "A"]
        rows = [[*frame[0], *ids.tolist(), *frame[1]] for ids in run.tokenizer.encode(texts)]
        ours = torch.zeros(2, library.get_embedding_dimension())
        filled = [i for i, row in enumerate(rows) if row]
        ours[filled] = evaluate.embed(run.model, [rows[i] for i in filled])
        same_numbers("embeddings of an empty text", ours,
                     library.encode(texts, convert_to_tensor=True))
    is_encoder = theirs.get_output_embeddings() is not None and not run.model.config.causal
    if is_encoder and run.tokenizer.special.mask is not None:
        compared += compare_mask(run, tokenizer, theirs)
    return ", ".join(compared)


def chat_of(tokenizer):
    """Return a user's turn as a tokenizer's chat template writes it; None without a template."""
    if not tokenizer.chat_template:
        return None
    try:
        return tokenizer.apply_chat_template([{"role": "user", "content": SAMPLES[0]}],
                                             tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        warn(f"a rendered chat is not compared: the chat template stops with {shown(error)}")
        return None


def compare_mask(run, tokenizer, theirs):
    """Raise BadInput unless fill-mask reads a masked text as the run's training does, and finds the
    same token with the same probability. Return what is equal: nothing if tokens cross words."""
    special = run.tokenizer.special
    start, whole = (ids.tolist() for ids in run.tokenizer.encode(["A dog", "A dog runs."]))
    if whole[:len(start)] != start:
        return []
    row = [*special.before, *start, special.mask, *whole[len(start):], *special.after]
    text = f"A dog {tokenizer.mask_token} runs."
    same_ids("a masked text", row, tokenizer(text)["input_ids"])
    found = transformers.pipeline("fill-mask", theirs, tokenizer=tokenizer, device="cpu")(
        text, top_k=1)[0]
    with torch.no_grad():
        states = run.model(Packed.of([row]))[[row.index(special.mask)]]
        best = run.model.logits(states).softmax(1)[0]
    same_numbers("probabilities of a masked token",
                 torch.stack([best[found["token"]], best.max()]), torch.tensor(found["score"]))
    return ["a masked text"]


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
                         truncate_dim=library.truncate_dim or 0, max_tokens=limit)
        model = Model(config)
        copy_in(theirs, model)
        save(model, part / "model.pt")
        source = library.tokenizer
        if inside != path and (path / "tokenizer.json").is_file():  # one of our exports, see above
            source = transformers.AutoTokenizer.from_pretrained(path, **LOCAL)
        inner = tokenizers.Tokenizer.from_str(source.backend_tokenizer.to_str())
        # For a folder without a tokenizer, transformers makes one of special tokens alone.
        if (size := inner.get_vocab_size()) < config.vocab / 2:
            raise BadInput(f"the tokenizer has {size:,} tokens, and the model {config.vocab:,}: "
                           "save the model's tokenizer into the folder")
        around = special_tokens_around(inner)
        frame = special_tokens_around(library.tokenizer.backend_tokenizer)
        tokenizer = Tokenizer(inner, around, chats=config.causal)
        tokenizer.save(part / "tokenizer.json")
        longest = limit - sum(map(len, frame))
        first = {"format": runs.FORMAT, "imported": str(name), "tokenizer_hash": tokenizer.hash,
                 "config": {"data": "", "size": "imported", "max_length": longest,
                            "model": {"causal": config.causal}},
                 "views": 2, "around": around, "affixes": [frame] * 2}
        (part / "log.jsonl").write_text(json.dumps(first) + "\n", encoding="utf-8")
        # train.py hands these files on to the runs that start here, for their export.
        kept = part / "hf"
        kept.mkdir()
        template = source.chat_template
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
    check_inside(path, path.rglob("*"))
    inside = path
    # Names that start with a dot, such as ._config.json, are macOS's.
    for file in (*path.glob("[!.]*.json"), *path.glob("[!.]*/[!.]*.json")):
        check_settings(file)
    if (path / "modules.json").is_file():
        modules = json.loads((path / "modules.json").read_bytes())
        kinds = " ".join(module["type"] for module in modules)
        if not MODULES.fullmatch(kinds):
            raise BadInput(f"our model lacks one of the modules {shown(kinds)}: delete "
                           "modules.json in a copy of the folder to import without it")
        inside = path / modules[0]["path"]
        check_inside(path, [inside])
        for file in inside.glob("[!.]*.json"):  # the folder can be deeper
            check_settings(file)
    for file in inside.glob("*.index.json"):
        parts = json.loads(file.read_bytes())["weight_map"].values()
        check_inside(path, [inside / name for name in parts])
    files = sorted(inside.glob("[!.]*.safetensors"))
    if not files:
        raise BadInput(f"{inside} has no .safetensors file; pickles are not read, because they can "
                       "execute code: convert them with save_pretrained()")
    if not any(re.fullmatch(r"tokenizer\.json|vocab\..*|tekken\.json|[^.].*\.model", file.name)
               for file in inside.iterdir()):
        raise BadInput(f"{inside} has no tokenizer: save it there, tokenizer.save_pretrained()")
    for file in files:
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():
                kind = tensors.get_slice(key).get_dtype()
                # transformers would convert other numbers without a word.
                if kind not in ("F64", "F32", "F16", "BF16") and "position_ids" not in key:
                    raise BadInput(f"{shown(key)} has numbers of type {kind}: only weights in "
                                   "floating point can be imported")
    return path, inside


def check_inside(path, files):
    """Raise BadInput if a file leads out of a model's folder, as a link or by its name: a run and
    its exports could get any file of yours."""
    homes = [path.resolve()]
    hub = homes[0].parent.parent
    if hub.name.startswith("models--") and homes[0].parent == hub / "snapshots":
        homes.append(hub / "blobs")  # where the files of a snapshot in the hub's cache are
    for file in files:
        if not any(map(file.resolve().is_relative_to, homes)):
            raise BadInput(f"{shown(file)} leads out of the folder: put the file itself there")


def check_settings(file):
    """Raise BadInput if a JSON file is damaged, or has a setting with which the libraries would
    load code or files from elsewhere."""
    if file.name == "adapter_config.json":
        raise BadInput(f"{shown(file)}: an adapter is not imported: merge it into its model first")
    try:
        settings = json.loads(file.read_bytes())
    except ValueError as error:
        raise BadInput(f"{shown(file)} is damaged: {shown(error)}") from None
    if "config" not in file.name:  # a vocabulary
        return
    refused = []
    for parents, name, value in walk_settings(settings):
        is_handed_on = any(parent.endswith(("_kwargs", "_args")) for parent in parents)
        names_code = re.search("(attn|experts)_implementation", name) and value not in (
            None, True, False, "eager", "sdpa")
        loads = name in ("quantization_config", "tokenizer_name_or_path", "fast_tokenizer_files")
        if is_handed_on and name not in HARMLESS or names_code or loads and value:
            refused.append(".".join([*parents, name]))
    if refused:
        raise BadInput(f"{shown(file)}: {shown(', '.join(refused))} is not imported, because such "
                       "settings can load code or files from elsewhere: delete it in a copy of the "
                       "folder to import without it")


def walk_settings(value, parents=()):
    """Yield (names of the settings around it, its name, its value) for every setting in JSON."""
    if isinstance(value, list):
        for item in value:
            yield from walk_settings(item, parents)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield parents, name, item
            yield from walk_settings(item, (*parents, name))


def load_weights(path):
    """Return a transformers model, with its vocabulary head if the folder has one, and its
    ModelConfig. Raises BadInput for weights that are missing or have another shape."""
    config = read_config(transformers.AutoConfig.from_pretrained(path, **LOCAL))
    kind = transformers.AutoModelForCausalLM if config.causal else transformers.AutoModelForMaskedLM
    theirs, report = kind.from_pretrained(
        path, output_loading_info=True, ignore_mismatched_sizes=True, **WEIGHTS)
    base = theirs.base_model
    trunk = tuple(f"{name}." for name in (theirs.base_model_prefix, *dict(base.named_children())))
    unknown = sorted(key for key in report["unexpected_keys"] if key.startswith(trunk)
                     and not re.search("pooler|position_ids|inv_freq", key))
    if unknown:
        raise BadInput("the model of config.json lacks weights that the file has: correct it, or "
                       f"remove them ({shown(', '.join(unknown[:4]))})")
    head = {key for key in report["missing_keys"]
            if key.startswith(("lm_head.", "cls.", "head.", "decoder."))}
    wrong = sorted(map(str, (report["missing_keys"] - head) | set(report["mismatched_keys"])))
    if wrong:
        settings = json.loads((path / "config.json").read_bytes())
        lacking = [name for name in SIZES if name not in settings]
        raise BadInput(f"weights are missing or have another shape: {shown(', '.join(wrong[:4]))}"
                       + f" (config.json lacks {', '.join(lacking)})" * bool(lacking))
    if head:  # models for embeddings are often saved without
        if not config.tied:
            warn("the folder has no vocabulary head: the token embeddings replace it")
        return base, replace(config, tied=True, head="none")
    # If the file has a second matrix, transformers loads it, whatever the config says.
    tied = theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
    return theirs, replace(config, tied=tied)


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
               "truncation_side": library.tokenizer.truncation_side == "left" and "left",
               "default_prompt_name": library.prompts.get(library.default_prompt_name)}
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
    if run.config.get("mlm", {}).get("predict_from") == "previous":
        warn("fill-mask reads the state of the mask, and --predict-from previous trained the state "
             "before it: its words will be wrong")
    first, other = run.header["affixes"]
    if first != other:
        warn(f"the run reads a second text with other ids around it ({other}) than a first one "
             f"({first}), and the folder reads every text as a first one")
    with new_folder(folder, f"cannot export {shown(name)}") as part:
        their_config = write_config(config, run.tokenizer.special)
        kind = transformers.AutoModelForCausalLM if config.causal else (
            transformers.AutoModelForMaskedLM if config.head == read_config(their_config).head else
            transformers.AutoModel)  # an objective with a head of its own has left ours unused
        theirs = kind.from_config(their_config)
        if hasattr(theirs, "pooler"):
            theirs.pooler = None  # its random weights would look like trained ones
        copy_out(run.model, theirs)
        around, frame = frames(run)
        framed = part if frame == around else part / FRAMED
        theirs.save_pretrained(framed)
        their_tokenizer(run, frame).save_pretrained(framed)
        theirs_of = {ours: name for name, ours in POOLS.items()}
        if config.pool not in theirs_of:
            raise BadInput(f"sentence-transformers has no pooling {config.pool}: train with --pool "
                           "mean, or use python -m interop encode")
        # The name of a special token inside a text is text, as in base.tokenizer.Tokenizer.
        transformer = Transformer(str(framed), model_kwargs=WEIGHTS,
                                  processing_kwargs={"text": {"split_special_tokens": True}})
        transformer.save_in_root = framed == part
        modules = [transformer, Pooling(config.width, theirs_of[config.pool]),
                   *[Normalize()] * config.normalize]
        SentenceTransformer(modules=modules, device="cpu", truncate_dim=config.truncate_dim or None,
                            **LOCAL).save_pretrained(str(part), create_model_card=False)
        (part / "README.md").write_text(model_card(run), encoding="utf-8")
        for path in {part, framed}:
            theirs.save_pretrained(path)  # sentence-transformers left out the head, added a pooler
        write_older_modules(part, config)
        if framed != part:
            their_tokenizer(run, around).save_pretrained(part)
        pretrained.copy_hf(run.folder / "hf", part)
        library, theirs = load_library(part), load_weights(part)[0]
        return f"{compare(run, library, theirs)}; {compare_use(run, part, library, theirs)}"


def write_older_modules(folder, config):
    """Name the modules of a folder and its pooling as sentence-transformers did before 5.4, which
    newer versions read too. Without these names, vLLM and llama.cpp of early 2026 take [CLS]."""
    file = folder / "modules.json"
    modules = json.loads(file.read_bytes())
    for module in modules:
        module["type"] = f"sentence_transformers.models.{module['type'].rpartition('.')[2]}"
    file.write_text(json.dumps(modules, indent=2), encoding="utf-8")
    pooling = {"word_embedding_dimension": config.width}
    pooling |= {theirs: ours == config.pool for ours, theirs in OLDER_POOLS.items()}
    (folder / modules[1]["path"] / "config.json").write_text(json.dumps(pooling), encoding="utf-8")


def their_tokenizer(run, around):
    """Return a run's tokenizer for transformers, which puts these ids around a text and truncates
    it where `encode` does."""
    config, special = run.model.config, run.tokenizer.special
    longest = config.longest_row
    limit = min(longest, (run.config.get("max_length") or longest) + sum(map(len, around)))
    inner = tokenizers.Tokenizer.from_str(run.tokenizer.inner.to_str())
    if special_tokens_around(inner) != around:
        before, after = [list(map(inner.id_to_token, ids)) for ids in around]
        middle = after * (2 if config.pair == "sep-sep" else 1)
        inner.post_processor = TemplateProcessing(
            single=[*before, "$A", *after], pair=[*before, "$A", *middle, "$B", *after],
            special_tokens=[(piece, inner.token_to_id(piece)) for piece in {*before, *after}])
    if special.mask is not None:
        inner = with_bare_mask(inner, special.mask)
    roles = {"cls": special.cls, "bos": special.cls, "sep": special.sep, "eos": special.sep,
             "pad": special.sep if special.pad is None else special.pad, "mask": special.mask}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, model_max_length=limit,
        padding_side="left" if config.causal else "right",
        **{f"{role}_token": inner.id_to_token(i) for role, i in roles.items() if i is not None})


def with_bare_mask(inner, mask):
    """Return a tokenizer that adds no space at either side of a mask in a text. In training, [MASK]
    replaces a token that includes the space before it, and nothing else changes."""
    state = json.loads(inner.to_str())
    name = inner.id_to_token(mask)
    if inner.encode(f"a {name}", add_special_tokens=False).ids.index(mask) > len(
            inner.encode("a", add_special_tokens=False).ids):
        for token in state["added_tokens"]:
            token["lstrip"] |= token["id"] == mask  # the mask replaces the space before it, too
    # Put a space before the text only, not before what follows a special token.
    kind = state["pre_tokenizer"] or {}
    if kind.get("type") == "ByteLevel" and kind["add_prefix_space"]:
        first = dict(type="Metaspace", replacement=" ", prepend_scheme="first", split=False)
        state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
            first, kind | {"add_prefix_space": False}]}
    elif kind.get("type") == "Metaspace" and kind["prepend_scheme"] == "always":
        kind["prepend_scheme"] = "first"
    return tokenizers.Tokenizer.from_str(json.dumps(state))
