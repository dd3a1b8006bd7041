"""Pretrained models in, standard folders out, without Hugging Face's transformers.

    a folder or a name on the hub -> read_model() -> import_model() -> a run folder
    a run folder -> export() -> a folder that AutoModel and SentenceTransformer open

Nothing of a file is executed: weights are safetensors.
"""

import contextlib
import io
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
from corpora.folder import alone, read_first, write_atomic
from corpora.program import BadInput
from data import Tokenizer, rows_of
from interop.card import card
from interop.families import FAMILIES, POSITIONS, spell
from model import Model, save

# ---- in

FILES = ("*.json", "model*.safetensors", "chat_template.jinja")
TEMPLATE = "chat_template.jinja"
POOLS = {  # the spelling up to sentence-transformers 5, then that from 6 on
    "pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max", "pooling_mode_lasttoken": "last",
    "cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last"}


class Pretrained(NamedTuple):
    model: Model
    tokenizer: Tokenizer
    vectors: str  # what its sentence vectors are, and who says so
    template: str | None  # of its chats, as Jinja text


def import_model(name, folder):
    """Write a pretrained model as a run folder, whole or not at all -> Pretrained."""
    with new_folder(folder) as part:
        found = read_model(name)
        # A row has [CLS] and [SEP] around the tokens of its text.
        max_length = longest_row(found.model) - 2
        config = {"data": "", "objective": "", "size": "imported", "max_length": max_length,
                  "model": asdict(found.model.config)}
        first = {"config": config, "affixes": None, "tokenizer_hash": found.tokenizer.hash,
                 "imported": {"name": str(name), "vectors": found.vectors}}
        save(found.model, part / "model.pt")
        found.tokenizer.save(part / "tokenizer.json")
        if found.template:
            write_atomic(part / TEMPLATE, found.template.encode())
        write_atomic(part / "log.jsonl", (json.dumps(first) + "\n").encode())
    return found


def longest_row(model):
    return model.config.max_tokens or model.config.max_positions


@contextlib.contextmanager
def new_folder(folder):
    """A folder to write in, which gets its name when all is written; after an error it is gone."""
    folder = Path(folder).absolute()
    part = folder.with_name(f".{folder.name}.part")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone(folder.parent):
        if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
            raise BadInput(f"{folder} is there already: name a new folder")
        # A killed process may have left it.
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir()
            yield part
            if folder.exists():
                folder.rmdir()
            os.replace(part, folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def read_model(name):
    """A folder or a name on the hub -> Pretrained. BadInput names what is missing or cannot be."""
    folder = find_folder(name)
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
    # There may be more embeddings than pieces: some models have spare ones, which are kept.
    if tokenizer.vocab > config.vocab:
        raise BadInput(f"{name}: its tokenizer.json has {tokenizer.vocab:,} pieces, but its "
                       f"config.json a vocabulary of {config.vocab:,}: they are not of one model")
    model = build(name, family, config, weight_files(folder), settings)
    return Pretrained(model, tokenizer, vectors, read_template(folder))


def find_folder(name):
    """A folder, or a name on the hub -> the folder of its files, fetched by huggingface_hub."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    if os.path.lexists(folder):
        raise BadInput(f"{name} is no folder: give the one that has the model's config.json")
    # Imported here, because it is slow to import and only the hub needs it.
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(str(name), allow_patterns=FILES))
    # It is one of a dozen types: no such name, no right to the model, no network.
    except Exception as error:
        raise BadInput(f"{name} is no folder here, and the Hugging Face hub does not give it "
                       f"({type(error).__name__}): check the spelling, log in (hf auth login), or "
                       "give the folder of a download") from None


def read_template(folder):
    """The chat template of a Hugging Face folder, None if it has none."""
    if (folder / TEMPLATE).is_file():
        return (folder / TEMPLATE).read_text(encoding="utf-8")
    path = folder / "tokenizer_config.json"
    found = read_json(path).get("chat_template") if path.exists() else None
    # There are several, each with a name.
    if isinstance(found, list):
        found = next((one["template"] for one in found if one["name"] == "default"), None)
    return found


def read_json(path):
    if not path.is_file():
        raise BadInput(f"{path} is no file: give the folder of a whole model")
    return json.loads(path.read_text(encoding="utf-8"))


def with_sentences(config, folder):
    """A ModelConfig with the pooling, the longest row and the scaling to length 1 that the files of
    sentence-transformers ask for -> ModelConfig, the same in words."""
    pool = "last" if config.causal else "mean"
    if not (folder / "modules.json").is_file():
        return replace(config, pool=pool), (
            f"pooling {pool}, what sentence-transformers takes without a modules.json")
    modules = {}
    for module in read_json(folder / "modules.json"):
        modules[module["type"].rpartition(".")[2]] = module["path"]
    lacking = modules.keys() - {"Transformer", "Pooling", "Normalize"}
    if "Pooling" in modules:
        found = read_json(folder / modules["Pooling"] / "config.json")
        modes = found.get("pooling_mode") or [
            name for name in found if name.startswith("pooling_mode_") and found[name]]
        pool = modes if isinstance(modes, str) else ", ".join(modes)
        if pool not in POOLS:
            lacking.add(f"the pooling {pool!r}")
    if lacking:
        raise BadInput(f"{folder}: modules.json has {', '.join(sorted(lacking))}, which our model "
                       "lacks; to take the model without it, remove modules.json from a copy")
    pool = POOLS.get(pool, pool)
    longest = config.max_positions
    for name, key in (("sentence_bert_config.json", "max_seq_length"),  # up to its version 5
                      ("tokenizer_config.json", "model_max_length")):  # from 6 on
        path = folder / modules.get("Transformer", "") / name
        told = read_json(path).get(key) if path.exists() else None
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
        parts = sorted(set(read_json(index)["weight_map"].values()))
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
    from. BadInput names tensors that are missing, unknown or misshapen."""
    found = {weight_name(key, family): key for key in files}
    for change in family.heads:
        made = replace(config, **change)
        names = family.names(made)
        wanted = {weight_name(their, family) for their in itertools.chain(*names.values())}
        if found.keys() >= wanted:
            break
    wrong = [f"missing {their}" for their in sorted(wanted - found.keys())]
    wrong += [f"unknown {found[key]}" for key in found
              if key not in wanted and not re.fullmatch(family.ignored, key)]
    complain(name, wrong)
    # On this device there are shapes alone: no memory, and no random numbers.
    with torch.device("meta"):
        model = Model(made)
    weights = {}
    for ours, theirs in names.items():
        keys = [found[weight_name(their, family)] for their in theirs]
        parts = [files[key]() for key in keys]
        for key, part, shape in zip(keys, parts, part_shapes(model, ours, len(parts))):
            if shape and part.shape != shape:
                wrong.append(f"{key} has shape {tuple(part.shape)}, not {shape}")
        if not wrong:
            # It is a copy, because the file may change.
            weights[ours] = torch.cat(parts).float()
    complain(name, wrong)
    model.load_state_dict(family.inward(weights, made, settings), assign=True)
    return model.eval()


def weight_name(name, family):
    """A tensor's name without the family's prefix, and without the spelling of old BERT files."""
    name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
    return re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name).removeprefix(family.prefix)


def part_shapes(model, name, parts):
    """The shape of each part of our weight; None for a weight that we do not have."""
    module, _, kind = name.rpartition(".")
    if kind == "types":
        return [None]
    rows, *rest = model.get_parameter(name).shape
    # Their table is one, however many token types there are.
    if name == POSITIONS:
        rows = model.config.max_positions + model.config.position_offset
    if ".qkv." in name and parts == 3:
        attention = model.get_submodule(module.removesuffix(".qkv"))
        keys = attention.kv_heads * attention.head_dim
        return [(count, *rest) for count in (rows - 2 * keys, keys, keys)]
    return [(rows // parts, *rest)] * parts


def complain(name, wrong):
    if wrong:
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise BadInput(f"{name}: the weights do not fit config.json: {'; '.join(wrong[:5])}{more}")


# ---- out

SENTENCE = "0_Transformer/"  # of a decoder's folder: what its sentence vectors need
SAMPLES = ("A dog runs.", "Ein Hund läuft schnell durch den Park, 3 Kinder sehen zu.", "你好",
           "Two people, who had never met, sang a song.")
# The vectors of rows of more tokens than this take too long to be compared.
LONGEST_COMPARED = 1024


def export(name, folder, say=lambda compared: None):
    """Write a run as a folder that AutoModel and SentenceTransformer open -> its path. It is read
    back and compared before it gets its name; `say` is told what was compared.

    A decoder's prompt ends where its answer begins, but a text that becomes a vector may end in
    [PRED] or [SEP]. So SentenceTransformer has a folder of its own, with another tokenizer beside
    a hard link to the weights, which takes no room on this disk (a copy elsewhere doubles them).
    """
    run = evaluate.open_run(name)
    config = run.model.config
    special = run.tokenizer.special
    family, settings = spell(config, special)
    tokenizer = framed(run)
    limit = row_limit(run)
    place = SENTENCE if config.causal else ""
    said = limits_of(run, tokenizer, limit)
    files = {**sentence_files(config, place, limit), f"{place}config.json": settings,
             f"{place}tokenizer.json": json.loads(tokenizer.to_str()),
             f"{place}tokenizer_config.json": tokenizer_config(run, limit)}
    if config.causal:
        template = own_template(run)
        if template:
            said.append("The chat template came with the model that the training began from: it "
                        "may add a system text, which the rows of the training did not have.")
        else:
            template = plain_template(run.tokenizer)
        files["config.json"] = settings
        files["tokenizer.json"] = json.loads(prompting(run.tokenizer).to_str())
        files["tokenizer_config.json"] = tokenizer_config(run, config.max_positions) | {
            "padding_side": "left", "chat_template": template}
        pad = special.sep if special.pad is None else special.pad
        files["generation_config.json"] = {"do_sample": False, "bos_token_id": special.cls,
                                           "eos_token_id": special.sep, "pad_token_id": pad}
    with new_folder(folder) as part:
        weights = to_safetensors(their_weights(run.model, family), {"format": "pt"})
        write_atomic(part / "model.safetensors", weights)
        for path, content in files.items():
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            write_atomic(part / path, text.encode())
        write_atomic(part / "README.md", card(run, Path(folder).name, said).encode())
        if place:
            link(part / "model.safetensors", part / place / "model.safetensors")
        compared = compare_written(run, part, part / place / "tokenizer.json", limit)
    say(f"{folder}: written and read back; {compared}")
    return Path(folder).absolute()


def link(source, target):
    """A second name of a file; a copy where the disk knows no such names."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)


def affixes_of(run):
    """The (prefix, suffix) of texts of the run's first column and, if they differ, of the others ->
    a list of one or two."""
    first, *others = run.first.get("affixes") or [((), None)]
    return [first, *(one for one in others if one != first)]


def row_limit(run):
    """The tokens at which a row of the first column is cut: the run's max_length, and what stands
    around a text."""
    prefix, suffix = affixes_of(run)[0]
    around = 1 + len(prefix) + (1 if suffix is None else len(suffix))
    longest = longest_row(run.model)
    max_length = run.config.get("max_length")
    return min(longest, max_length + around) if max_length else longest


def limits_of(run, tokenizer, limit):
    """What the vectors of the exported folder cannot do, a sentence each; what differs from the run
    is said on stderr too."""
    sep = tokenizer.id_to_token(run.tokenizer.special.sep)
    said = [f"A text is cut where its row has {limit} tokens, special tokens included.",
            f"SentenceTransformer reads {sep!r} in a text as text, as the training did. "
            "AutoTokenizer reads it as the token; with `split_special_tokens=True` as text.",
            "SentenceTransformer before version 6 drops spaces around a text, the run does not."]
    texts = ("", " ", f"the {sep} end")
    rows = rows_of(run.tokenizer, texts, *affixes_of(run)[0])
    for text, row in zip(texts, rows):
        if tokenizer.encode(text).ids != row:
            said.append(f"The text {text!r} has another vector here than in the run.")
            print(f"note: {said[-1]}", file=sys.stderr)
    if len(affixes_of(run)) > 1:
        said.append("A text is read as one of the first column of the training data; in training "
                    "other tokens stood around the texts of other columns.")
    return said


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
    """The tokenizer that puts around a text what `rows_of` puts around one of the first column."""
    special = run.tokenizer.special
    tokenizer = tokenizers.Tokenizer.from_str(run.tokenizer.inner.to_str())
    tokenizer.encode_special_tokens = True
    prefix, suffix = affixes_of(run)[0]
    gold = rows_of(run.tokenizer, SAMPLES, prefix, suffix)
    if [tokenizer.encode(text).ids for text in SAMPLES] == gold:
        return tokenizer
    before = [tokenizer.id_to_token(i) for i in (special.cls, *prefix)]
    after = [tokenizer.id_to_token(i) for i in ((special.sep,) if suffix is None else suffix)]
    single = [*before, "$A", *after]
    second = {"sep": ["$B", *after], "sep-sep": [*after, "$B", *after],
              "segments": [f"{piece}:1" for piece in ("$B", *after)]}
    set_template(tokenizer, single, [*single, *second[run.model.config.pair]])
    if [tokenizer.encode(text).ids for text in SAMPLES] != gold:
        raise BadInput("the tokenizer cannot be written so that others cut texts as this run does")
    return tokenizer


def set_template(tokenizer, single, pair):
    """Let a tokenizer put these pieces around a text $A, and around a pair $A and $B."""
    names = {piece.removesuffix(":1") for piece in pair} - {"$A", "$B"}
    tokenizer.post_processor = TemplateProcessing(
        single=single, pair=pair,
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in names])


def prompting(tokenizer):
    """The tokenizer of a decoder's prompts: a family's as it came, our own with [CLS] in front."""
    inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
    if inner.post_processor is None and tokenizer.special.family is None:
        cls = inner.id_to_token(tokenizer.special.cls)
        set_template(inner, [cls, "$A"], [cls, "$A", "$B"])
    return inner


def own_template(run):
    """The chat template that came with the model, None if none did or it is out of reach."""
    folder = run.folder
    config = run.config
    # It lies in the run that was imported, where the training of this one may have begun.
    while not (folder / TEMPLATE).is_file():
        folder = Path(config.get("init") or "")
        if not config.get("init") or not (folder / "log.jsonl").is_file():
            return None
        config = read_first(folder)["config"]
    return (folder / TEMPLATE).read_text(encoding="utf-8")


def plain_template(tokenizer):
    """A chat template, Jinja text, that writes our rows: [CLS] (system S end) user U end assistant,
    behind which the answer and [SEP] follow. None, and a note, if its text has other ids."""
    special = tokenizer.special
    chat = special.chat
    inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())

    def text(ids):
        return inner.decode(list(ids), skip_special_tokens=False)

    turns = {"user": (chat.user, chat.end), "assistant": (chat.assistant, [special.sep])}
    if chat.system is not None:
        turns = {"system": (chat.system, chat.end), **turns}
    example = text([special.cls])
    template = "{{ " + json.dumps(example) + " }}{% for message in messages %}"
    for role, around in turns.items():
        before, after = map(text, around)
        template += ("{% if message['role'] == '" + role + "' %}{{ " + json.dumps(before)
                     + " + message['content'] + " + json.dumps(after) + " }}{% endif %}")
        example += before
        if role != "assistant":
            example += SAMPLES[0] + after
    system = SAMPLES[:1] if "system" in turns else None
    rows = rows_of(tokenizer, SAMPLES[:1], chat.user, [*chat.end, *chat.assistant], system)
    if inner.encode(example, add_special_tokens=False).ids != rows[0]:
        print("note: no chat template can write this tokenizer's rows: make them of ids",
              file=sys.stderr)
        return None
    return (template + "{% endfor %}{% if add_generation_prompt %}{{ "
            + json.dumps(text(chat.assistant)) + " }}{% endif %}")


def tokenizer_config(run, longest):
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
            "model_max_length": longest, "clean_up_tokenization_spaces": False}
    # transformers 4 overrides this with False, unless it is told.
    spaced = json.loads(tokenizer.to_str())["pre_tokenizer"] or {}
    if "add_prefix_space" in spaced:
        made["add_prefix_space"] = spaced["add_prefix_space"]
    return made | {f"{role}_token": name for role, name in names.items()}


def sentence_files(config, place, limit):
    """{path: content} of what SentenceTransformer reads, as its versions 2 to 6 accept it."""
    parts = {"Transformer": place.rstrip("/"), "Pooling": "1_Pooling"}
    if config.normalize:
        parts["Normalize"] = "2_Normalize"
    # A special token spelled out in a text stays text, as in data.Tokenizer.
    transformer = {"max_seq_length": limit, "do_lower_case": False,
                   "tokenizer_args": {"split_special_tokens": True}}
    if not config.causal:
        transformer["model_args"] = {"add_pooling_layer": False}
    pools = {key: pool == config.pool for key, pool in POOLS.items() if key.startswith("pooling_")}
    return {
        "modules.json": [{"idx": i, "name": str(i), "path": path,
                          "type": f"sentence_transformers.models.{kind}"}
                         for i, (kind, path) in enumerate(parts.items())],
        f"{place}sentence_bert_config.json": transformer,
        "1_Pooling/config.json": {
            "word_embedding_dimension": config.width, "include_prompt": True, **pools}}


def compare_written(run, part, path, limit):
    """Compare a run with the folder `part` that was written, read back with the tokenizer.json at
    `path` -> what is the same bit for bit, in words. BadInput if anything is not."""
    again = read_model(part)
    ours = run.model.state_dict()
    theirs = again.model.state_dict()
    if run.model.config.pair == "segments":
        longest = run.model.config.max_positions
        off = (ours[POSITIONS] - theirs[POSITIONS])[longest:].abs().max().item()
        if off:
            print("warning: BERT has one vector for all second texts of pairs, whose positions are "
                  f"up to {off:.1g} off what was trained; single texts are exact", file=sys.stderr)
        for weights in (ours, theirs):
            weights[POSITIONS] = weights[POSITIONS][:longest]
    # BERT's table has no rows before position 0, which no token reads.
    same = ours.keys() == theirs.keys() and all(
        torch.equal(ours[key][-len(weight):], weight) for key, weight in theirs.items())

    # This is how sentence-transformers uses a tokenizer.
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.encode_special_tokens = True
    tokenizer.enable_truncation(limit)
    # Each sample has more than 8 tokens, so that these are too long.
    long = [" ".join([sample] * (limit // 8 + 1)) for sample in SAMPLES[1::2]]
    texts = [*SAMPLES, *long]
    count = len(SAMPLES) if limit > LONGEST_COMPARED else len(texts)
    columns = affixes_of(run)
    max_length = run.config.get("max_length")
    # That texts are cut is not said here: they were made too long.
    with contextlib.redirect_stderr(io.StringIO()):
        for i, affixes in enumerate(columns):
            rows = evaluate.ids_of(run.model, again.tokenizer, texts, affixes, max_length)
            # SentenceTransformer frames every text as one of the first column.
            same = same and (i > 0 or rows == [tokenizer.encode(text).ids for text in texts])
            gold = evaluate.encode(run.model, run.tokenizer, texts[:count], affixes, max_length)
            same = same and torch.equal(gold, evaluate.embed(again.model, rows[:count]))
    if not same:
        raise BadInput("read back, the folder is not the model it was made of: it was not written")
    cut = f", {len(long)} of them cut at {limit} tokens" if count > len(SAMPLES) else ""
    framed_as = ", framed as the first column and as the others" if len(columns) > 1 else ""
    return (f"the weights, and the vectors of {count} texts{cut}{framed_as}, are those of the run "
            "bit for bit")
