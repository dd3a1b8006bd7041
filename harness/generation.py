"""Greedy generation, with the keys and values of all earlier tokens in a cache.

The model knows nothing of it: its layers call `attend` of the batch that they read, and the two
kinds of batches in this file keep what a layer attends to.
"""

import torch
from tqdm import tqdm

from base.common import BadInput
from base.tokenizer import tokenize_rows
from data import Packed, pinned, to_device, token_batches
from kernels import uncompiled
from kernels.padded import sdpa
from model import in_eval_mode


def prompt_rows(tokenizer, prompts, longest, openings=None):
    """Tokenize prompts as [CLS] prompt [SEP], or by the chat template of the model's family."""
    chat = tokenizer.special.chat
    affixes = (*chat.start, *chat.user), (*chat.end, *chat.assistant)
    return tokenize_rows(tokenizer, prompts, affixes, longest, openings=openings)


def answer(model, tokenizer, prompts, max_new, openings=None):
    """Continue N prompts greedily by at most max_new tokens, up to the stop token. Return N texts,
    and whether each ended with that token. Raises BadInput for an encoder."""
    if not model.config.is_decoder:
        raise BadInput("this model is an encoder, which cannot answer: use ntp or llm-jepa")
    # Truncate prompts that would leave no room for the answer.
    longest = model.config.max_positions
    rows = prompt_rows(tokenizer, prompts, max(longest // 2, longest - max_new), openings)
    written, stopped = generate(model, rows, tokenizer.special.sep, max_new)
    return list(map(tokenizer.decode, written)), stopped


class Prefill:
    """Whole prompts of R rows, which will have at most M tokens. `cache` gets {layer: its keys and
    values (R, 2 Hkv, M, K)}. Token i of a row is at index i, so nothing is padded."""

    def __init__(self, packed, longest):
        self.packed = packed
        self.tokens, self.positions = packed.tokens, packed.positions
        self.longest = longest  # M
        self.cache = {}

    def attend(self, layer, qkv):
        uncompiled(self.store)(layer, qkv)
        return self.packed.attend(layer, qkv)

    def store(self, layer, qkv):
        kv = qkv.unflatten(1, (-1, layer.head_dim))[:, layer.heads:]  # (T, 2 Hkv, K)
        # Zeros: masked slots must be finite, because 0 * NaN is NaN.
        self.cache[layer] = kv.new_zeros(len(self.packed), kv.shape[1], self.longest, kv.shape[2])
        self.cache[layer][self.packed.row_of_token(), :, self.positions] = kv


class DecodeStep:
    """The last token of each of R rows, lists of ids, whose earlier ones are in the cache."""

    def __init__(self, rows, cache, device):
        lengths = [len(row) for row in rows]
        new = torch.tensor([[row[-1] for row in rows], [length - 1 for length in lengths]])
        self.tokens, self.positions = to_device(pinned(new, device), device)  # (R,) each
        self.cache = cache
        self.row = torch.arange(len(rows), device=device)
        self.longest = max(lengths)  # M, which the GPU need not be asked for
        self.mask = None  # or (R, 1, 1, M) bool: a token attends to all up to itself
        if min(lengths) < self.longest:
            keys = torch.arange(self.longest, device=device)
            self.mask = (keys <= self.positions[:, None])[:, None, None]

    def attend(self, layer, qkv):
        return uncompiled(self.attend_to_cache)(layer, qkv)

    def attend_to_cache(self, layer, qkv):
        heads = [layer.heads, 2 * layer.kv_heads]
        q, kv = qkv.unflatten(1, (-1, layer.head_dim)).split(heads, 1)
        cache = self.cache[layer]  # (R, 2 Hkv, M', K)
        cache[self.row, :, self.positions] = kv
        k, v = cache[:, :, :self.longest].chunk(2, 1)  # (R, Hkv, M, K) each
        # The G query heads of a key head count as G queries: groups that need no copies.
        q = q.unflatten(1, (layer.kv_heads, -1))  # (R, Hkv, G, K)
        return sdpa(q, k, v, self.mask, layer.softcap).flatten(1)


def generate(model, prompts, stop, max_new, tokens_per_batch=16384):
    """Continue R rows of ids greedily by at most max_new tokens. Return the new ids of each row, up
    to the stop token, and whether it came."""
    rows = [list(prompt) for prompt in prompts]
    limits = [min(len(row) + max_new, model.config.max_positions) for row in rows]
    batches = token_batches(limits, tokens_per_batch)
    # Without autograd's bookkeeping a step of one row takes 0.9 of the time.
    with in_eval_mode(model), torch.inference_mode():
        for batch in tqdm(batches, "generate", leave=False, disable=None):
            batch = [i for i in batch if len(rows[i]) < limits[i]]
            if batch:
                extend([rows[i] for i in batch], [limits[i] for i in batch], stop, model)
    answers = [row[len(prompt):] for row, prompt in zip(rows, prompts)]
    stopped = [stop in answer for answer in answers]
    return [answer[:len(answer) - ended] for answer, ended in zip(answers, stopped)], stopped


def extend(rows, limits, stop, model):
    """Append to rows, lists of ids, what the model continues them with: up to the stop token, or to
    a limit of each row's length."""
    device = next(model.parameters()).device
    packed = Packed.of(rows, causal=True).to(device)
    prefill = Prefill(packed, max(limits))
    states = model(prefill, at=model.pool_index(packed, "last"))  # (R, D)
    cache = prefill.cache
    while True:
        logits = model.logits(states)  # (R, V)
        for row, token in zip(rows, logits.argmax(1).tolist()):
            row.append(token)
        unfinished = [i for i, (row, limit) in enumerate(zip(rows, limits))
                      if row[-1] != stop and len(row) < limit]
        if not unfinished:
            break
        if len(unfinished) < len(rows):
            rows = [rows[i] for i in unfinished]
            limits = [limits[i] for i in unfinished]
            index = to_device(pinned(torch.tensor(unfinished), device), device)
            cache = {layer: kept.index_select(0, index) for layer, kept in cache.items()}
        states = model(DecodeStep(rows, cache, device))  # (R, D)
