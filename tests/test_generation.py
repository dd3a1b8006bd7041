"""What a causal model writes, and what counts as right."""

import math

import numpy as np
import pytest
import torch
from test_evaluate import tiny as encoder

import corpora
import evaluate
from corpora.program import BadInput
from model import DECODER, Model, ModelConfig, Packed

# ---- generate


SHAPES = {  # that the cache holds for every shape, test_model.py shows
    "learned": dict(position_offset=2, head="transform"),
    "sinusoidal": dict(positions="sinusoidal", head="bias"),
    "llama": dict(DECODER, kv_heads=2, logit_softcap=3.0),
}


def writer(shape, dropout=.1):
    """A random causal model whose next token depends on all of the prompt."""
    torch.manual_seed(4)
    values = dict(vocab=40, width=32, layers=2, heads=4, ffn_dim=64, max_positions=24, causal=True,
                  tied=False, dropout=dropout)
    model = Model(ModelConfig(**values | SHAPES[shape])).double()
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data *= 3
    return model


def plain_generate(model, prompt, stop, max_new):
    row = list(prompt)
    for _ in range(max_new):
        if len(row) == model.config.max_positions:
            break
        token = int(model.logits(model(Packed.of([row], causal=True))[-1:]).argmax())
        if token == stop:
            return row[len(prompt):], True
        row.append(token)
    return row[len(prompt):], False


@pytest.mark.parametrize("shape", SHAPES)
def test_generating_is_greedy_decoding_by_whole_forwards_for_prompts_of_any_length(shape):
    model = writer(shape).eval()
    rng = np.random.default_rng(0)
    lengths = (1, 5, 2, 20, 9, 9, 24, 13, 23, 3, 6, 11)
    prompts = [rng.integers(40, size=length).tolist() for length in lengths]
    free, _ = evaluate.generate(model, prompts, -1, 9)
    assert free == [plain_generate(model, prompt, -1, 9)[0] for prompt in prompts]
    assert len({*map(tuple, free)}) > 8
    often = [token for answer in free for token in answer[2:6]]
    stop = max(range(40), key=often.count)
    wanted = [plain_generate(model, prompt, stop, 9) for prompt in prompts]
    assert 1 < sum(stopped for _, stopped in wanted) < 11
    assert wanted[6] == ([], False) and len(wanted[3][0]) <= 4  # no room; little room
    for tokens_per_batch in (1, 40, 100, 10_000):
        found = evaluate.generate(model, prompts, stop, 9, tokens_per_batch)
        assert list(zip(*found)) == wanted
    backwards = evaluate.generate(model, prompts[::-1], stop, 9)
    assert list(zip(*backwards))[::-1] == wanted


def test_generating_leaves_no_trace_and_refuses_a_model_that_has_diverged():
    model = writer("llama", dropout=.5).train()
    state = torch.get_rng_state()
    first = evaluate.generate(model, [[1, 2], [3]], 0, 5)
    assert first == evaluate.generate(model, [[1, 2], [3]], 0, 5)  # no dropout
    assert all(module.training for module in model.modules())
    assert torch.equal(state, torch.get_rng_state())
    assert evaluate.generate(model, [], 0, 5) == ([], [])
    assert evaluate.generate(model, [[1]], 0, 0) == ([[]], [False])
    model.embed.weight.data.fill_(math.nan)
    with pytest.raises(BadInput, match="has diverged"):
        evaluate.generate(model, [[1]], 0, 5)


# ---- answers


@pytest.mark.parametrize("written, gold, exact, begins", [
    ("(.*)(dog)", "(.*)(dog)", True, True),
    ("  (.*)(dog)\n", "(.*)(dog) ", True, True),  # space around does not count
    ("(.*)( dog)", "(.*)(dog)", False, False),  # space inside does, and case
    ("(.*)(DOG)", "(.*)(dog)", False, False),
    ("(.*)(dog)(.*)", "(.*)(dog)", False, True),
    ("(.*)(do", "(.*)(dog)", False, False),
    (" \n", "(.*)(dog)", False, False),  # nothing written is always wrong
    ("", "", False, False), ("anything", "", False, False),
])
def test_which_answers_count_as_right(written, gold, exact, begins):
    assert evaluate.exact(written, gold) == exact
    assert evaluate.starts_with(written, gold) == begins


def tiny():
    return encoder("last", causal=True)


@pytest.fixture()
def scripted(monkeypatch, tokenizer):
    """Whatever the model is, it answers `said`, (text, stopped) for each prompt in turn."""
    said = []
    asked = []

    def generate(model, prompts, stop, max_new):
        asked.append((prompts, stop, max_new))
        texts, stopped = zip(*said[:len(prompts)])
        return [ids.tolist() for ids in tokenizer.encode(texts)], list(stopped)

    monkeypatch.setattr(evaluate, "generate", generate)
    return said, asked


PROMPTS = ["the cat", "seven dogs", "the cat sees", "dogs " * 100]
GOLDS = ["Katze", "Hunde", "Katze sieht", "sieben"]


def rows(user, assistant, **more):
    return corpora.EvaluationRows("x", {"user": user, "assistant": assistant}, **more)


def test_the_scores_of_known_answers(tokenizer, scripted):
    said, asked = scripted
    said += [("Katze", True), ("Hunde sieben", False), ("Katze sieht", False), ("", True)]
    one = evaluate.Evaluation(tiny(), tokenizer, rows(PROMPTS, GOLDS))
    plain = {"exact": 50, "startswith": 75, "stop": 50, "rows": 4}
    assert evaluate.task_generate(one) == plain
    assert len(asked) == 1  # answers are written once
    prompts, stop, max_new = asked[0]
    assert max_new == 2 * max(len(ids) for ids in tokenizer.encode(GOLDS)) + 8
    ids = tokenizer.encode(["the cat"])[0].tolist()
    assert prompts[0] == [tokenizer.special.cls, *ids, stop] and stop == tokenizer.special.sep
    assert len(prompts[3]) == max(24, 48 - max_new) and prompts[3][-1] == stop  # there is room
