"""What a causal model writes, and how it is judged."""

import numpy as np
from test_evaluate import evaluation as evaluation_of
from test_evaluate import tiny

import corpora
import evaluate
from model import DECODER, Packed


def slow_generate(model, prompt, stop, max_new):
    row = list(prompt)
    for _ in range(max_new):
        if len(row) == model.config.max_positions:
            break
        token = int(model.logits(model(Packed.of([row], causal=True))[-1:]).argmax())
        if token == stop:
            return row[len(prompt):], True
        row.append(token)
    return row[len(prompt):], False


def test_generation_is_greedy_decoding_by_whole_forwards():
    """test_model.py tests the cache of every kind of model."""
    model = tiny("last", True, **DECODER, vocab=40, heads=4, kv_heads=2, max_positions=24,
                 tied=False, dropout=.5).double()
    for weight in model.parameters():  # so that the next token depends on the whole prompt
        weight.data *= 3 if weight.ndim > 1 else 1
    rng = np.random.default_rng(0)
    lengths = (1, 5, 2, 20, 9, 9, 24, 13, 23, 3, 6, 11)
    prompts = [rng.integers(40, size=length).tolist() for length in lengths]
    free, _ = evaluate.generate(model, prompts, -1, 9)
    assert free == [slow_generate(model, prompt, -1, 9)[0] for prompt in prompts]
    often = [token for answer in free for token in answer[2:6]]
    stop = max(range(40), key=often.count)
    prompts[8] = [*prompts[8][:-1], stop]  # a stop token in the prompt stops nothing
    wanted = [slow_generate(model, prompt, stop, 9) for prompt in prompts]
    assert 1 < sum(stopped for _, stopped in wanted) < 11
    assert wanted[6] == ([], False)  # the prompt fills the context
    assert len(wanted[3][0]) <= 4  # four tokens are left
    model.train()  # generation turns dropout off, and on again
    for tokens_per_batch in (1, 40, 100, 10_000):
        assert list(zip(*evaluate.generate(model, prompts, stop, 9, tokens_per_batch))) == wanted
    assert all(module.training for module in model.modules())


def test_the_scores_of_known_answers(tokenizer, monkeypatch):
    calls = []

    def generate(model, prompts, stop, max_new):
        calls.append((prompts, stop, max_new))
        texts = ["  Katze\n", "Hunde sieben", "Katze sieht", ""]
        return [ids.tolist() for ids in tokenizer.encode(texts)], [True, False, False, True]

    monkeypatch.setattr(evaluate, "generate", generate)
    golds = ["Katze", "Hunde", "Katze sieht", "sieben"]
    texts = {"user": ["the cat", "seven dogs", "the cat sees", "dogs " * 100], "assistant": golds}
    evaluation = evaluation_of(tokenizer, tiny("last", causal=True),
                               corpora.EvaluationRows("x", texts))
    scores = {"exact": 50, "startswith": 75, "stop": 50, "rows": 4}
    assert evaluate.task_generate(evaluation) == evaluate.task_generate(evaluation) == scores
    [(prompts, stop, max_new)] = calls  # the answers are generated once
    assert max_new == 2 * max(map(len, tokenizer.encode(golds))) + 8
    assert prompts[0] == [tokenizer.special.cls, *tokenizer.encode(["the cat"])[0], stop]
    # A long prompt is truncated, so that there is room for the answer.
    assert stop == tokenizer.special.sep == prompts[3][-1]
    assert len(prompts[3]) == max(24, 48 - max_new)
