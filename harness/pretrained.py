"""The model that a run starts from (--init), and LoRA."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from base.common import BadInput, atomic_file
from harness.weights import Uninitialized
from kernels.linear import in_whole_tiles
from model import DECODER, Model

HF_FILES = ("chat_template.jinja", "generation_config.json")


def adapt_shape(own, new, settings, objective_class, pool=None):
    """Return the ModelConfig of a run that starts from a model with the config `own`, and notes for
    the user. new: the config without --init; pool: that of the flags."""
    # EuroBERT predicts masked tokens by its vocabulary matrix alone, without BERT's head.
    head = "none" if own.norm == "rmsnorm" else new.head
    if not pool:
        pool = own.pool
        keeps = objective_class.causal or (own.encodes and settings.causal)
        if own.causal and not keeps:  # a decoder becomes an encoder
            pool = "last" if settings.causal else "mean"
    shape = replace(own, head=head, pool=pool, encodes=settings.causal,
                    causal=objective_class.causal or settings.causal)
    masked = "causal" if shape.causal else "bidirectional"
    weights = f"LoRA of rank {settings.lora_rank}" if settings.lora_rank else "all weights"
    notes = [f"from {settings.init}: {weights}, {masked}, pooling {shape.pool}"]
    if own.causal and not shape.causal:
        notes.append("the decoder's tokens now see later ones, too [LLM2Vec, arXiv 2404.05961]")
        # EuroBERT is transformers' only bidirectional class with the layers of a decoder: Llama's.
        lacking = [f"{name} {getattr(own, name)}" for name, value in DECODER.items()
                   if getattr(own, name) != value]
        if lacking:
            notes.append("this run cannot be exported: no bidirectional class of transformers has "
                         f"{', '.join(lacking)} (with --causal it can; interop encode reads both)")
    return shape, notes


def adapt_init(init, objective_class, options, shape):
    """Return the run of --init with embeddings for the objective's special tokens, and for [MASK]
    if a decoder becomes bidirectional. shape: the new ModelConfig. Raises BadInput if the objective
    cannot use the model."""
    name = objective_class.name
    own, special = init.model.config, init.tokenizer.special
    if objective_class.causal and not own.causal:
        raise BadInput(f"--init {init.folder}: {name} needs a causal model: choose another run")
    if objective_class.needs_cls and not special.before:
        raise BadInput(f"--init {init.folder}: {name} needs a token such as [CLS] before each text,"
                       " and this tokenizer adds none: use contrastive or mlm, or another model")
    names = objective_class.special_tokens(options)
    if own.causal and not shape.causal and special.mask is None:
        names += ("[MASK]",)
    tokenizer = init.tokenizer.with_tokens(names, chats=shape.causal)
    new = tokenizer.vocab - init.tokenizer.vocab
    model = add_tokens(init.model, new, init.tokenizer.vocab) if new else init.model
    return init._replace(tokenizer=tokenizer, model=model)


def load_init(model, init, lora_rank, masks):
    """Give a new model the weights of --init, as adapt_init returned it, and LoRA. masks: the
    objective masks tokens."""
    # strict=False: only the vocabulary head may be new or unused.
    new = model.load_state_dict(init.model.state_dict(), strict=False).missing_keys
    if lora_rank:
        # What has no meaning yet is trained too: the embeddings of [PRED] tokens, that of [MASK],
        # which a model may never have read, and a new head.
        special = init.tokenizer.special
        mask = (special.mask,) if masks and special.mask is not None else ()
        add_lora(model, lora_rank, special.preds + mask)
        for name in new:
            model.get_parameter(name).requires_grad_(True)


def copy_hf(source, target):
    """Copy what an export needs of an imported model, from one folder hf/ to another. A foreign run
    can have links there, which are neither followed nor copied."""
    for name in HF_FILES:
        file = source / name
        if file.is_file() and not file.is_symlink() and not source.is_symlink():
            target.mkdir(exist_ok=True)
            with atomic_file(target / name) as copy:
                copy.write(file.read_bytes())


def add_tokens(model, count, known):
    """Return a Model with embeddings for `count` more tokens: the mean of those of the `known`
    tokens that its tokenizer has."""
    weights = model.state_dict()
    for name in weights.keys() & {"embed.weight", "vocabulary.weight", "vocabulary_bias"}:
        old = weights[name]
        mean = old[:known].mean(0, keepdim=True).expand(count, *old.shape[1:])
        # The new tokens first get the unused rows after those of the tokenizer.
        weights[name] = torch.cat([old[:known], mean, old[known + count:]])
    with torch.device("meta"), Uninitialized():
        larger = Model(replace(model.config, vocab=max(known + count, model.config.vocab)))
    larger.load_state_dict(weights, assign=True)
    return larger.train(model.training)


# ---- LoRA: train a low-rank update of frozen weights [Hu et al. 2022, eq. 3]

LORA_SCALE = 2  # alpha / rank
LORA_DROPOUT = 0.1


class LowRank(nn.Module):
    """A frozen linear layer with a trained update of each projection that it has side by side:
    W x + (alpha / rank) B A dropout(x), B = 0 at first. `sizes`: outputs of the projections."""

    def __init__(self, linear, sizes, rank):
        super().__init__()
        like = linear.weight
        bound = like.shape[1] ** -0.5
        self.linear = linear
        self.dropout = nn.Dropout(LORA_DROPOUT)
        self.a = nn.ParameterList()
        self.b = nn.ParameterList()
        for size in sizes:
            a = like.new_empty(rank, like.shape[1])
            self.a.append(a.uniform_(-bound, bound))  # PEFT's initial values
            self.b.append(like.new_zeros(size, rank))

    @property
    def weight(self):
        updates = [b @ a for a, b in zip(self.a, self.b)]
        return self.linear.weight + torch.cat(updates) * LORA_SCALE

    def merged(self):
        """Return the weights of a linear layer that computes the same, for files."""
        return {**self.linear.state_dict(), "weight": self.weight.detach()}

    def forward(self, x):
        return in_whole_tiles(self.updated, x)

    def updated(self, x):
        updates = [F.linear(F.linear(self.dropout(x), a), b) for a, b in zip(self.a, self.b)]
        return self.linear(x) + torch.cat(updates, -1) * LORA_SCALE


class TrainableEmbeddingRows(nn.Module):
    """A frozen embedding of which only the rows `ids` are trained: those of new tokens."""

    def __init__(self, embedding, ids):
        super().__init__()
        ids = torch.as_tensor(ids, device=embedding.weight.device)
        self.embedding = embedding
        self.register_buffer("ids", ids, persistent=False)
        self.rows = nn.Parameter(embedding.weight[ids].clone())

    @property
    def weight(self):
        """The whole table (V, D), for tied logits too."""
        return self.embedding.weight.index_copy(0, self.ids, self.rows)

    def merged(self):
        return {"weight": self.weight.detach()}

    def forward(self, tokens):
        return F.embedding(tokens, self.weight)


def add_lora(model, rank, new_ids=()):
    """Freeze a Model; train low-rank updates of the seven projections of every block (six without
    a gate), and the embeddings of `new_ids`."""
    model.requires_grad_(False)
    for block in model.blocks:
        attention = block.attention
        mlp = block.mlp
        width = attention.out.out_features
        attention.qkv = LowRank(attention.qkv, attention.sizes, rank)
        attention.out = LowRank(attention.out, [width], rank)
        mlp.up = LowRank(mlp.up, mlp.sizes, rank)
        mlp.down = LowRank(mlp.down, [width], rank)
    if len(new_ids):
        model.embed = TrainableEmbeddingRows(model.embed, new_ids)
    return model
