"""Ranks, classes, probes, linear maps, tokens and attention, beside NumPy, SciPy, scikit-learn and
plain loops."""

import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist, squareform
from sklearn.metrics import top_k_accuracy_score
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.preprocessing import normalize
from test_evaluate import evaluation as evaluation_of
from test_evaluate import rows, tiny
from test_metrics import normal
from test_tasks import WORDS, results_of, write_table

import evaluate
from base import metrics
from corpora import EvaluationRows
from data import Packed, Segment
from tasks import analysis

# ---- retrieval


def test_recall_and_mrr_are_those_of_a_plain_search_in_both_directions():
    en = normal(300, 8)
    en[7] = math.nan  # a text is missing
    de = en + 0.7 * normal(300, 8, 1)
    texts = list(map(str, range(300)))
    found = metrics.retrieval({"en": en, "de": de}, {"en": texts, "de": texts})
    wanted = {}
    for pair, x, y in (("de-en", de, en), ("en-de", en, de)):
        rows = ~en.isnan().any(1)
        scores = cosine_similarity(x[rows], y[rows])
        at = [0, *(100 * top_k_accuracy_score(range(299), scores, k=k) for k in range(1, 11))]
        wanted |= {f"recall@1/{pair}": at[1], f"recall@10/{pair}": at[10], f"mrr@10/{pair}": sum(
            (at[k] - at[k - 1]) / k for k in range(1, 11))}
    for name in ("recall@1", "recall@10", "mrr@10"):
        wanted[name] = (wanted[f"{name}/de-en"] + wanted[f"{name}/en-de"]) / 2
        assert wanted[f"{name}/de-en"] != wanted[f"{name}/en-de"] and 1 < wanted[name] < 99
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-12)


# ---- ranks


def test_one_point_has_no_directions():
    point = torch.full((50, 8), .1) * (1 + 1e-8 * torch.randn(50, 8))
    assert set(analysis.directions(point).values()) == {0.0}
    assert analysis.explained(torch.ones(5, 3)).tolist() == [0, 0, 0]


def test_ranks_are_those_of_numpy():
    z = (normal(15, 20) * torch.linspace(.1, 2, 20) + 1).numpy()
    s = np.linalg.svd(z - z.mean(0), compute_uv=False)
    p = s / s.sum()
    q = s ** 2 / (s ** 2).sum()
    assert analysis.directions(z) == pytest.approx({
        "effective_rank": np.exp(-(p * np.log(p)).sum()), "stable_rank": 1 / q[0],
        "rank_90": int((np.cumsum(q) < .9).sum()) + 1,
        "spectral_entropy": -(p * np.log(p)).sum() / np.log(20)})
    assert analysis.explained(z).tolist() == pytest.approx(100 * np.cumsum(q))
    x = torch.tensor([[3., 0], [0, 2]])
    y = torch.tensor([[0, 5.], [0, 1]])
    assert analysis.ranks({"a": x, "b": y})["alignment"] == pytest.approx((2 + 0) / 2)


# ---- classes and tokens


def test_class_alignment_is_the_mean_over_classes_of_the_mean_over_their_pairs():
    z = normal(23, 4)
    labels = torch.tensor([0] * 12 + [3] * 8 + [5] * 2 + [7])  # one class has a single row
    u = normalize(z.numpy())
    found = analysis.of_classes(z, labels)
    means = [(pdist(u[rows]) ** 2).mean() for rows in (slice(12), slice(12, 20), [20, 21])]
    assert found["class_alignment"] == pytest.approx(np.mean(means))
    distances = squareform(pdist(u))
    same = (labels[:, None] == labels).numpy()
    near = (distances * same).sum() / (same.sum() - 23)  # without i = j
    assert found["class_separation"] == pytest.approx(near / distances[~same].mean())


def test_the_target_of_a_token_probe_is_the_most_frequent_plain_token():
    rows = [[1, 9, 9, 5, 2]] * 5 + [[1, 7, 5, 5, 7, 2]] * 4 + [[1, 5, 2], [1, 1, 1, 2], [1, 30, 2]]
    assert analysis.commonest_tokens(rows, (1, 2)).tolist() == [9] * 5 + [5] * 5 + [-1, -1]


def test_a_probe_finds_what_the_embeddings_tell():
    labels = torch.arange(90) % 2
    z = torch.eye(2)[labels] + .1 * normal(90, 2)
    assert analysis.probe(z, labels, 5) == analysis.probe(z, 0 * labels, 5) == 100  # one class
    assert analysis.probe(z, torch.arange(90) % 5, 3) < 50
    assert analysis.probe(z, z.sum(1), 5) > 95


# ---- linear maps


def test_the_papers_residual_and_singular_values_are_those_of_numpy():
    x = normal(60, 8)
    y = x @ normal(8, 8, 1) + normal(60, 8, 2)
    residual = np.linalg.lstsq(x.numpy(), y.numpy(), rcond=None)[1].sum() ** 0.5
    assert analysis.linear_map(x.float(), y.float()) == pytest.approx({
        "residual": residual, "residual_relative": residual / np.linalg.norm(y),
        "singular_100": np.linalg.svd((x - y).numpy(), compute_uv=False).mean()}, rel=1e-6)


def test_codes_are_found_by_a_linear_map_whatever_the_mean():
    x = normal(80, 6)
    y = x @ normal(6, 6, 1) + 3
    texts = [str(row) for row in range(80)]
    exact = analysis.predict_codes(x, y, texts)
    assert exact["r2"] == pytest.approx(1) and exact["retrieval_error_mapped"] == 0
    assert analysis.predict_codes(x + 100, y - 50, texts) == pytest.approx(exact, rel=1e-6)
    # An equal text is correct; an equal embedding of a different text is not.
    one = torch.ones(80, 6)
    assert analysis.predict_codes(x, one, texts)["r2"] == 0
    assert analysis.predict_codes(one, one, texts)["retrieval_error"] == 95
    assert analysis.predict_codes(one, one, ["same"] * 80)["retrieval_error"] == 0


def test_tfidf_takes_the_nearest_code_and_knows_no_word_of_the_tested_rows_alone():
    known, unknown = ([f"word{row // copies}" for row in range(80)] for copies in (4, 1))
    assert set(analysis.tfidf_errors(known, known).values()) == {0}
    assert analysis.tfidf_errors(unknown, unknown)["tfidf/words"] == 95  # all are one point


def test_both_positions_are_read_from_the_same_rows(tokenizer):
    model = tiny("last", causal=True)
    texts = [f"{word} {row}" for row in range(2) for word in WORDS]
    rows = EvaluationRows("x", {"text": texts, "code": texts[::-1]})
    cls, sep = tokenizer.special.cls, tokenizer.special.sep
    ids = [[cls, *one.tolist()] for one in tokenizer.encode(texts)]
    x, at_pred, at_sep = (evaluate.embed(model, [[*row, *after] for row in ids])
                          for after in ((), (20,), (sep,)))
    code = [[cls], []]
    cases = [([[[cls], [20]], code], at_pred, x), (None, at_sep, at_sep)]  # an imported model
    for affixes, train, train_code in cases:
        evaluation = evaluation_of(tokenizer, model, rows, affixes)
        scores = analysis.embedding_position(evaluation)
        paper = analysis.linear(evaluation)
        for position, prefix, a, b in (("last", "", x, x.flip(0)),
                                       ("train", "train/", train, train_code.flip(0))):
            for metric, value in analysis.predict_codes(a, b, texts[::-1]).items():
                assert scores[f"{position}/{metric}"] == pytest.approx(value, rel=1e-3), metric
            for metric, value in analysis.linear_map(a, b).items():
                assert paper[prefix + metric] == pytest.approx(value, rel=1e-3, abs=1e-3)
        assert scores | analysis.tfidf_errors(texts, texts[::-1]) == scores
    few = {"text": texts[:9], "code": texts[:9]}
    for columns, message in ((few, "needs 16"), (dict.fromkeys("abc", texts), "two columns")):
        with pytest.raises(evaluate.NotApplicable, match=message):
            analysis.embedding_position(
                evaluation_of(tokenizer, model, EvaluationRows("x", columns)))


# ---- tokens and attention


def test_the_kinds_of_matches_are_those_of_the_paper():
    query = torch.tensor([[0, 4, 17]])
    keys = {(0, 4, 9): "same_sentence", (0, 4, 17): "same_sentence", (2, 4, 9): "translation",
            (2, 4, 17): "translation", (0, 5, 17): "same_language", (0, 5, 9): "other",
            (2, 5, 17): "other", (2, 5, 9): "other"}
    for key, kind in keys.items():
        found = analysis.token_matches(query, torch.tensor([key]))
        assert found[kind] == 100 == sum(found.values())


def test_the_nearest_tokens_are_searched_in_all_columns_and_exclude_the_token_itself():
    rows = torch.arange(90).view(3, 6, 5) + 10
    rows[:, :, 0] = 1
    rows[:, :, -1] = 2
    states = torch.randn(3, 6, 5, 4)
    queries, found = analysis.nearest_tokens(rows.tolist(), [list(each) for each in states], (1, 2),
                                             limit=4)
    assert [column for column, *_ in queries.tolist()] == [0] * 12
    assert queries[:, 1].tolist() == [row for row in range(4) for _ in range(3)]
    keys = [(a, b, int(rows[a, b, c])) for a, b, c in np.ndindex(3, 6, 5) if 0 < c < 4]
    vectors = states[:, :, 1:4].reshape(-1, 4)
    for query, nearest in zip(queries.tolist(), found.tolist()):
        cosines = torch.cosine_similarity(vectors[keys.index(tuple(query))], vectors)
        assert tuple(nearest) == keys[cosines.argsort(descending=True)[1]]


@pytest.mark.parametrize("changes", [
    {"attn_softcap": .5}, {"causal": True, "positions": "rotary", "kv_heads": 1}])
def test_attention_weights_give_what_the_layer_computes(changes):
    """Weights times values are the layer's output, before its last map."""
    model = tiny(**changes)
    causal = model.config.causal
    row = [Segment([5, 6, 7], causal), Segment([8, 9], causal, (0, 3))]
    packed = Packed.of_segments([[Segment([11, 12, 13], causal)], row])
    attention = model.blocks[-1].attention
    kept = []
    attention.qkv.register_forward_hook(lambda module, given, made: kept.append(made))
    attention.out.register_forward_pre_hook(lambda module, given: kept.append(given[0]))
    with torch.no_grad():
        weights = analysis.attention_weights(model, packed, torch.arange(8))
    heads = (attention.heads, attention.kv_heads)
    values = kept[0].unflatten(-1, (-1, attention.head_dim))[:, -heads[1]:]      # (T, Hkv, K)
    values = values.repeat_interleave(heads[0] // heads[1], 1)
    for i, each in enumerate(weights):
        low, high, low2, high2 = packed.key_ranges[i].tolist()
        seen = torch.cat([values[low2:high2], values[low:high]])                 # (L, H, K)
        mixed = torch.einsum("hl,lhk->hk", each, seen).flatten()
        assert each.sum(1).tolist() == pytest.approx([1] * heads[0])
        assert torch.allclose(mixed, kept[1][i], atol=1e-5)


# ---- tasks


@pytest.mark.parametrize("causal", [False, True])
def test_the_tasks_are_the_metrics_of_the_rows(tokenizer, causal):
    model = tiny("last" if causal else "cls", causal)
    toy_rows = rows()
    evaluation = evaluation_of(tokenizer, model, toy_rows)
    found = results_of(model, tokenizer, toy_rows, [
        "spectrum", "tokens", "attention", "uniform", "poolings", "frequencies"])
    assert all(math.isfinite(value) for value in found.values())
    together = analysis.explained(torch.cat(list(evaluation.embeddings.values())))
    assert found["spectrum/explained_10"] == pytest.approx(together[9].item(), rel=1e-4)
    assert found["tokens/rows_queries"] == 90
    for pool in {model.config.pool, "mean"}:
        there = evaluation_of(tokenizer, model, toy_rows, pool=pool)
        for metric in ("xsim", "xsim++"):
            assert found[f"uniform/{metric}/{pool}"] == evaluate.task_retrieval(there)[metric]
    packed = Packed.of(evaluation.rows.ids["en"], causal=causal)
    ends = packed.cu_seqlens[1:] - 1 if causal else packed.cu_seqlens[:-1]
    with torch.no_grad():
        weights = analysis.attention_weights(model, packed, ends)
    entropies = [-(w * w.log()).sum(1).mean().item() for w in weights]
    assert found["attention/entropy/en"] == pytest.approx(np.mean(entropies), rel=1e-4)
    maxima = {name: evaluate.embed(model, ids, "max") for name, ids in evaluation.rows.ids.items()}
    for metric, value in analysis.ranks(maxima).items():
        assert found[f"poolings/max/{metric}"] == pytest.approx(value, rel=1e-4)
    ids = np.concatenate(tokenizer.encode(sum(toy_rows.texts.values(), [])))
    p = np.unique(ids, return_counts=True)[1] / len(ids)
    assert found["frequencies/nats"] == pytest.approx(-(p * np.log(p)).sum())


def test_the_probe_gap_reads_a_pair_as_one_row(tokenizer):
    first, second = ([WORDS[row % size] for row in range(40)] for size in (4, 3))
    write_table("stsb_test", [(a, b, i % 6) for i, (a, b) in enumerate(zip(first, second))])
    found = results_of(tiny(), tokenizer, None, ["gap"], limit=36)
    assert found["gap/stsb/rows"] == 36
    gap = found["gap/stsb/attention/semantic"] - found["gap/stsb/attention/token"]
    assert found["gap/stsb/attention/gap"] == pytest.approx(gap)
    special = tokenizer.special
    rows = [[special.cls, *a.tolist(), special.sep, *b.tolist(), special.sep]
            for a, b in zip(tokenizer.encode(first[:36]), tokenizer.encode(second[:36]))]
    bins = torch.tensor([row % 6 for row in range(36)]).clamp(max=4)
    for metric, value in analysis.of_classes(evaluate.embed(tiny(), rows, "mean"), bins).items():
        assert found[f"gap/stsb/mean/{metric}"] == pytest.approx(value, rel=1e-4)
