"""Bags of words and of word pairs on one page: how far does one get without a transformer?

An embedding is the mean of one learned vector for each thing that we count in a sentence: words,
neighboring pairs ("old nurse"), triples, or all ordered pairs ("nurse ... dog").

Run it: python -m minimal.bag (a minute on one CPU core). It prints errors on 1,000 unseen scenes.
Rows of your own: --train TABLE --test TABLE --edits FILE. A TABLE has columns separated by tabs,
names in line 1, no empty cell. FILE: JSON {copy: {"src": a sentence of the first column of --test,
"errtype": kind}}; at least one copy has the words of its src in another order.
"""
import argparse
import json
import random
import re
import sys
import time
import zlib
from functools import lru_cache

import torch
import torch.nn.functional as F

sys.path.append(sys.path[0] + "/..")  # for python minimal/bag.py
from corpora.toy import meanings, toy, twins

BATCH, D, BUCKETS, TEMPERATURE = 256, 128, 2 ** 16, 0.05  # D: width of an embedding
MODES = {"words": 1, "pairs": 2, "triples": 3, "ordered": 1}  # most neighbors that we count as one
split_words = re.compile(r"\w+|[^\w\s]").findall

# ---- Data: rows {language: sentence}, and copies [(text, row, kind)] of the first language.
def read_table(path):
    names, *rows = [line.rstrip("\n").split("\t") for line in open(path, encoding="utf-8")]
    return [dict(zip(names, row, strict=True)) for row in rows]

def read_edits(path, rows):  # those that have the same words in another order
    number = {next(iter(row.values())): i for i, row in enumerate(rows)}
    return [(text, number[one["src"]], one["errtype"])
            for text, one in json.load(open(path, encoding="utf-8")).items()
            if sorted(split_words(text.lower())) == sorted(split_words(one["src"].lower()))]

# ---- Model: the mean of the vectors of what we count. A hash chooses each vector.
@lru_cache(None)
def count(text, mode, distance):  # -> the numbers of the vectors
    words = split_words(text)
    found = [gram for n in range(MODES[mode]) for gram in zip(*(words[i:] for i in range(n + 1)))]
    if mode == "ordered":
        found += [(a, "...", b) for i, a in enumerate(words) for b in words[i + 1:i + 1 + distance]]
    return torch.tensor([zlib.crc32(" ".join(one).encode()) % BUCKETS for one in found])

def train(rows, mode, distance, steps, rate=0.01, batch=BATCH, temperature=TEMPERATURE):
    bag = torch.nn.EmbeddingBag(BUCKETS, D, mode="mean")
    torch.nn.init.normal_(bag.weight, std=0.02)
    def encode(texts):
        counts = [count(text, mode, distance) for text in texts]
        offsets = torch.tensor([0, *map(len, counts[:-1])]).cumsum(0)
        return F.normalize(bag(torch.cat(counts), offsets), dim=1)
    optimizer = torch.optim.AdamW(bag.parameters(), rate, weight_decay=0, fused=True)
    for step in range(1, steps + 1):  # A row gives its sentences in two random languages.
        pairs = [random.sample([*row.values()], 2) for row in random.sample(rows, batch)]
        a, b = map(encode, zip(*pairs))
        s = a @ b.T / temperature  # InfoNCE: -log(exp(s_ii) / sum over k of exp(s_ik)), both ways
        loss = F.cross_entropy(s, torch.arange(batch)) + F.cross_entropy(s.T, torch.arange(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = rate * min(step / 20, 1.02 - step / steps)
        optimizer.step()
    return torch.no_grad()(encode)  # N texts -> (N, D), length 1

# ---- Errors in percent: we search the translations of the other languages in the first.
def xsim(x, y, k=4):  # cosine / mean cosine of both to their k nearest [Artetxe & Schwenk 2019]
    near, back = (x @ y.T).topk(k, 1), (y @ x.T).topk(k, 1).values.mean(1)
    best = (near.values / (near.values.mean(1, keepdim=True) + back[near.indices])).argmax(1)
    return (near.indices[range(len(x)), best] != torch.arange(len(x))).float().mean()

def evaluate(encode, rows, copies):
    y, *others = [encode([row[name] for row in rows]) for name in rows[0]]
    texts, i, kinds = map(list, zip(*copies))
    z, scores = encode(texts), {"xsim": sum(xsim(x, y) for x in others) / len(others)}
    nearer = torch.stack([(x[i] * (z - y[i])).sum(1) for x in others])
    # A tie is half an error, and NaN, after a rate that is too high, is one.
    wrong = torch.where(nearer.abs() < 1e-6, 0.5, (~(nearer < 0)).float()).mean(0)
    scores["order"] = wrong[[kind != "near" for kind in kinds]].mean()
    scores |= {f"order/{k}": wrong[[kind == k for kind in kinds]].mean() for k in sorted({*kinds})}
    return {f"retrieval/{name}": 100 * value.item() for name, value in scores.items()}

def fail(message):  # a mistake is one line
    print("error:", " ".join(str(message).split()), file=sys.stderr)
    sys.exit(2)

def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", choices=MODES, help="train this bag alone")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each bag")
    for name, default in dict(steps=200, rate=0.01, batch=BATCH, temperature=TEMPERATURE, seed=0,
                              distance=99, split="valid", train="", test="", edits="").items():
        parser.add_argument(f"--{name}", default=default, type=type(default))
    parser.error = fail
    flags = parser.parse_args()
    if not (0 < flags.rate < 10 and flags.temperature > 0 and flags.steps > 0 and flags.batch > 1):
        fail("--rate and --temperature are above 0, --steps at least 1, --batch at least 2")
    if flags.split not in ("train", "valid", "test"):
        fail("--split is train, valid or test")
    if flags.test and not flags.edits:
        fail("--test needs --edits")
    torch.set_num_threads(1)
    try:
        rows = read_table(flags.train) if flags.train else toy("train", 20_000)
        test = read_table(flags.test) if flags.test else toy(flags.split, 1000)
        copies = (read_edits(flags.edits, test) if flags.test or flags.edits
                  else twins(meanings(flags.split, 1000), "en"))
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        fail(f"a file of --train, --test or --edits: {type(error).__name__}: {error}")
    if (len(rows) < flags.batch or len(test) < 4 or len(rows[0]) < 2 or len(test[0]) < 2
            or not copies):
        fail(f"--train needs {flags.batch} rows, --test 4, both 2 columns, --edits a copy")
    print("50 % is chance: a far twin keeps the words and the neighboring pairs.", file=sys.stderr)
    for mode in [flags.only] if flags.only else MODES:
        torch.manual_seed(flags.seed)
        random.seed(flags.seed)
        start = time.thread_time()
        encode = train(rows, mode, flags.distance, flags.steps, flags.rate, flags.batch,
                       flags.temperature)
        scores = {"thread_seconds": time.thread_time() - start} | evaluate(encode, test, copies)
        orders = [f"{k.split('/')[2]} {scores[k]:4.1f} %" for k in scores if "order/" in k]
        print(json.dumps(scores) if flags.json else f"{mode:8} twins: {'  '.join(orders)}   wrong "
              f"translation: {scores['retrieval/xsim']:.1f} %   {scores['thread_seconds']:.0f} s")

if __name__ == "__main__":
    main()
