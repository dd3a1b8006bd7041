"""Ranks, classes, probes, linear maps, tokens and attention, beside NumPy, SciPy, scikit-learn and
plain loops."""

import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist, squareform
from sklearn.preprocessing import normalize
from test_evaluate import tiny
from test_metrics import normal
from test_tasks import WORDS, results_of, write_table

import evaluate
from common import BadInput
from corpora import EvaluationRows, evaluation_rows
from data import tokenize_rows
from model import Packed, Segment
from tasks import analysis

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


def test_alignment_is_the_squared_distance_of_unit_rows():
    x = torch.tensor([[3., 0], [0, 2]])
    y = torch.tensor([[0, 5.], [0, 1]])
    assert analysis.alignment(x, y) == pytest.approx((2 + 0) / 2)
    cosine = evaluate.geometry({"a": x, "b": y})["cosine/translations"]
    assert analysis.alignment(x, y) == pytest.approx(2 - 2 * cosine)


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


def test_the_gap_is_large_if_embeddings_tell_labels_and_negative_if_they_tell_tokens():
    labels = torch.arange(90) % 2
    targets = torch.tensor([*range(5)] * 18)
    found = analysis.probe_gap(torch.eye(2)[labels] + .1 * normal(90, 2), targets, labels)
    assert found["semantic"] == 100 and found["gap"] == 100 - found["token"] > 50
    found = analysis.probe_gap(torch.eye(5)[targets] + .1 * normal(90, 5), targets, labels)
    assert found["token"] == 100 and found["gap"] < -30


# ---- linear maps


def test_the_papers_residual_and_singular_values_are_those_of_numpy():
    x = normal(60, 8)
    turned = x @ normal(8, 8, 1)
    assert analysis.linear_map(x, turned)["residual"] < 1e-9
    y = turned + normal(60, 8, 2)
    s = np.linalg.svd((x - y).numpy(), compute_uv=False)
    solved = np.linalg.lstsq(x.numpy(), y.numpy(), rcond=None)[0]
    residual = np.linalg.norm(x.numpy() @ solved - y.numpy())
    norm = np.linalg.norm(torch.cat([x, y]), axis=1).mean()
    assert analysis.linear_map(x.float(), y.float()) == pytest.approx({
        "residual": residual, "residual_relative": residual / np.linalg.norm(y),
        "singular_100": s.mean(), "singular_relative": s.mean() / norm}, rel=1e-6)


def test_codes_are_predicted_by_a_linear_map_but_not_from_noise_whatever_the_mean():
    x = normal(80, 6)
    y = x @ normal(6, 6, 1) + 3
    texts = [str(row) for row in range(80)]
    exact = analysis.predict_codes(x, y, texts)
    assert exact["r2"] == pytest.approx(1) and exact["retrieval_error_mapped"] == 0
    assert exact["ridge"] == min(analysis.RIDGE) and exact["retrieval_error"] > 50
    noise = analysis.predict_codes(x, normal(80, 6, 2), texts)
    assert noise["r2"] < .1 and noise["ridge"] == max(analysis.RIDGE)
    moved = analysis.predict_codes(x + 100, y - 50, texts)
    assert moved == pytest.approx(exact, rel=1e-6)
    one = torch.ones(80, 6)
    assert analysis.predict_codes(x, one, texts)["r2"] == 0
    assert analysis.predict_codes(one, y, texts)["r2"] < 1e-9
    # An equal text is correct; an equal embedding of a different text is not.
    assert analysis.predict_codes(one, one, texts)["retrieval_error"] == 95
    assert analysis.predict_codes(one, one, ["same"] * 80)["retrieval_error"] == 0


def test_r2_is_that_of_ridge_regression_in_closed_form_on_rows_that_were_not_fitted():
    x = normal(80, 6).numpy()
    y = x @ normal(6, 6, 1).numpy() + 2 * normal(80, 6, 2).numpy()

    def r2(fitted, tested, strength):
        z = x[fitted] - x[fitted].mean(0)
        penalty = strength * len(z) * z.var(0).mean() * np.eye(6)
        center = y[fitted].mean(0)
        solved = np.linalg.solve(z.T @ z + penalty, z.T @ (y[fitted] - center))
        left = (x[tested] - x[fitted].mean(0)) @ solved + center - y[tested]
        return 1 - (left ** 2).sum() / ((y[tested] - center) ** 2).sum()

    rows = np.arange(80)
    fitted = rows[rows % 4 != 3]
    inner = np.arange(60) % 4 != 3
    best = max(analysis.RIDGE, key=lambda one: r2(fitted[inner], fitted[~inner], one))
    found = analysis.predict_codes(torch.tensor(x), torch.tensor(y), [""] * 80)
    assert found["ridge"] == best
    assert found["r2"] == pytest.approx(r2(fitted, rows[3::4], best))


def test_the_centered_measures_do_not_depend_on_the_mean():
    x = normal(80, 6)
    y = x + .1 * normal(80, 6, 1)
    texts = [str(row) for row in range(80)]
    plain = analysis.text_and_code(x, y, texts)
    moved = analysis.text_and_code(x + 100, y + 100, texts)
    centered = [name for name in plain if name.endswith("_centered")]
    assert len(centered) == 3
    for name in [*centered, "r2", "retrieval_error", "retrieval_error_mapped", "singular_100"]:
        assert moved[name] == pytest.approx(plain[name], rel=1e-3, abs=1e-3), name
    assert moved["rankme"] < 2 < plain["rankme"] and moved["uniformity"] > -.01
    assert moved["cosine_random"] > .99 and abs(plain["cosine_random"]) < .1
    assert plain["cosine_pairs_centered"] > .9 and plain["retrieval_error"] < 20


def test_both_positions_are_read_from_the_same_rows(tokenizer, capsys):
    model = tiny("last", causal=True)
    texts = [f"{word} {row}" for row in range(2) for word in WORDS]
    rows = EvaluationRows("x", {"text": texts, "code": texts[::-1]})
    cls, sep = tokenizer.special.cls, tokenizer.special.sep
    ids = [[cls, *one.tolist()] for one in tokenizer.encode(texts)]
    x, at_pred, at_sep = (evaluate.embed(model, [[*row, *after] for row in ids])
                          for after in ((), (20,), (sep,)))
    code = [[cls], []]
    cases = [([[[cls], [20]], code], at_pred, x), ([code, code], x, x),  # k = 1, k = 0
             (None, at_sep, at_sep)]  # an imported model
    for affixes, train, train_code in cases:
        evaluation = evaluate.Evaluation(model, tokenizer, rows, affixes)
        scores = analysis.embedding_position(evaluation)
        paper = analysis.linear(evaluation)
        assert ("are the same" in capsys.readouterr().err) == (train is x)
        for position, pair in (("last", (x, x.flip(0))), ("train", (train, train_code.flip(0)))):
            for metric, value in analysis.text_and_code(*pair, texts[::-1]).items():
                assert scores[f"{position}/{metric}"] == pytest.approx(value, rel=1e-3), metric
            prefix = "train/" if position == "train" else ""
            for metric, value in analysis.linear_map(*pair).items():
                assert paper[prefix + metric] == pytest.approx(value, rel=1e-3, abs=1e-3)
    few = EvaluationRows("x", {"text": texts[:9], "code": texts[:9]})
    for one, read, message in ((model, few, "needs 16"), (tiny(), rows, "needs a causal")):
        with pytest.raises(evaluate.NotApplicable, match=message):
            analysis.embedding_position(evaluate.Evaluation(one, tokenizer, read))


@pytest.mark.parametrize("count", [63, 64])
def test_the_papers_residual_warns_if_it_is_ill_posed(tokenizer, capsys, count):
    texts = [f"{WORDS[row % 12]} {row}" for row in range(count)]
    rows = EvaluationRows("x", {"en": texts, "de": texts[::-1]})
    analysis.linear(evaluate.Evaluation(tiny("last", causal=True), tokenizer, rows))  # width 32
    assert ("ill-posed" in capsys.readouterr().err) == (count < 64)


# ---- tokens and attention


def test_the_kinds_of_matches_are_those_of_the_paper():
    query = torch.tensor([[0, 4, 17]])
    keys = {(0, 4, 9): "same_sentence", (0, 4, 17): "same_sentence", (2, 4, 9): "translation",
            (2, 4, 17): "translation", (0, 5, 17): "same_language", (0, 5, 9): "other",
            (2, 5, 17): "other", (2, 5, 9): "other"}
    for key, kind in keys.items():
        found = analysis.token_matches(query, torch.tensor([[key]]))
        assert found[kind] == 100 == sum(found.values())


def test_the_nearest_tokens_are_searched_in_all_columns_and_exclude_the_token_itself():
    chance = torch.Generator().manual_seed(0)
    rows = torch.randint(5, 12, (3, 6, 5), generator=chance)
    rows[:, :, 0] = 1
    rows[:, :, -1] = 2
    states = torch.randn(3, 6, 5, 4, generator=chance)
    queries, found = analysis.nearest_tokens(rows.tolist(), [list(each) for each in states], (1, 2),
                                             [0, 2, 5], queries=2, k=3)
    assert queries[:, 1].tolist() == [0, 0, 2, 2, 5, 5] and not queries[:, 0].any()
    keys = [[*index, int(rows[index])] for index in np.ndindex(3, 6, 5) if 0 < index[2] < 4]
    vectors = torch.stack([states[tuple(key[:3])] for key in keys])
    for (column, row, token), nearest in zip(queries.tolist(), found.tolist()):
        options = []
        for i in (rows[column, row] == token).nonzero()[:, 0]:  # it may be twice in its row
            cosines = torch.cosine_similarity(states[column, row, i], vectors)
            order = cosines.argsort(descending=True)[1:4].tolist()
            options.append([[*keys[j][:2], keys[j][3]] for j in order])
        assert nearest in options


def test_the_entropy_of_attention_has_its_known_values():
    sink = torch.tensor([[.1, .2, .3, .4], [.25, .25, .25, .25]])
    found = analysis.attention_entropy([sink, torch.ones(2, 2) / 2])  # two tokens do not count
    assert found == pytest.approx({
        "entropy": (1.2798542258 + math.log(4)) / 2, "entropy_of_mean": 1.3609399069,
        "entropy_uniform": math.log(4), "on_first": 17.5, "on_end": 32.5})


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


@pytest.fixture(scope="module")
def toy_rows():
    return evaluation_rows("toy", ["en", "de", "ru"], "test", 30)


@pytest.mark.parametrize("causal", [False, True])
def test_the_tasks_are_the_metrics_of_the_rows(tokenizer, causal, toy_rows):
    model = tiny("last" if causal else "cls", causal)
    evaluation = evaluate.Evaluation(model, tokenizer, toy_rows)
    found = results_of(model, tokenizer, toy_rows, [
        "spectrum", "tokens", "attention", "uniform", "poolings", "frequencies"])
    assert all(math.isfinite(value) for value in found.values())
    embeddings = evaluation.embeddings
    together = analysis.explained(torch.cat(list(embeddings.values())))
    assert found["spectrum/explained_10"] == pytest.approx(together[9].item(), rel=1e-4)
    assert found["tokens/rows_queries"] == 90
    own = model.config.pool
    retrieval = evaluate.retrieval(embeddings, evaluation.texts)
    assert found[f"uniform/xsim/{own}"] == retrieval["xsim"]
    before = found[f"uniform/xsim++/{own}"]
    change = 100 * (before - found["uniform/xsim++/words"]) / before
    assert found["uniform/change/xsim++/words"] == pytest.approx(change)
    maxima = {name: evaluate.embed(model, ids, "max") for name, ids in evaluation.ids.items()}
    for metric, value in analysis.ranks(maxima).items():
        assert found[f"poolings/max/{metric}"] == pytest.approx(value, rel=1e-4)
    # The cross-entropy of a model whose logits are the logarithms of the frequencies.
    ids = torch.as_tensor(np.concatenate(tokenizer.encode(sum(toy_rows.texts.values(), []))).astype(
        np.int64))
    logits = (ids.bincount().double() / len(ids)).log().expand(len(ids), -1)
    wanted = torch.nn.functional.cross_entropy(logits, ids)
    assert found["frequencies/nats"] == pytest.approx(wanted.item())


def test_poolings_are_those_of_their_definitions(tokenizer):
    evaluation = evaluate.Evaluation(tiny(), tokenizer, EvaluationRows("x", {"en": WORDS}))
    rows = tokenize_rows(tokenizer, ["the cat sees", ""])
    states = analysis.token_states(evaluation, rows)
    words = analysis.pool(evaluation, rows, "words")
    assert torch.allclose(words, torch.stack([states[0][1:-1].mean(0), states[1].mean(0)]))
    chance = torch.Generator().manual_seed(0)
    keys = (2 * torch.rand(32, 32, generator=chance) - 1) / 32 ** .5
    weights = ((states[0] @ keys.T) @ torch.randn(32, generator=chance) / 32 ** .5).softmax(0)
    found = analysis.pool(evaluation, rows, "attention")[0]
    assert torch.allclose(found, weights @ states[0], atol=1e-6)


def test_the_probe_gap_of_sets_and_of_rows_without_labels(tokenizer, tmp_path, toy_rows):
    write_table(tmp_path, "stsb_test", [(WORDS[row % 4], WORDS[row % 3], row % 6)
                                        for row in range(40)])
    options = dict(files=tmp_path, sets=["stsb"])
    found = results_of(tiny(), tokenizer, None, ["gap"], limit=36, **options)
    assert found["gap/stsb/rows"] == 36 and "gap/stsb/attention/gap" in found
    special = tokenizer.special
    first, second = ([WORDS[row % size] for row in range(36)] for size in (4, 3))
    rows = [[special.cls, *a.tolist(), special.sep, *b.tolist(), special.sep]
            for a, b in zip(tokenizer.encode(first), tokenizer.encode(second))]
    bins = torch.tensor([row % 6 for row in range(36)]).clamp(max=4)
    for metric, value in analysis.of_classes(evaluate.embed(tiny(), rows, "mean"), bins).items():
        assert found[f"gap/stsb/mean/{metric}"] == pytest.approx(value, rel=1e-4)
    plain = results_of(tiny(), tokenizer, toy_rows, ["gap"])
    assert "gap/en/cls/token" in plain and "gap/en/cls/semantic" not in plain
    with pytest.raises(BadInput, match="set stsb cannot be probed"):
        results_of(tiny(), tokenizer, None, ["gap"], limit=4, **options)


def test_attention_is_refused_without_layers_and_after_divergence(tokenizer, toy_rows):
    model = tiny()
    model.blocks[-1].attention.qkv.weight.data.fill_(math.nan)
    for one, message in ((tiny(layers=0), "this model has none"), (model, "has diverged")):
        with pytest.raises(BadInput, match=message):
            results_of(one, tokenizer, toy_rows, ["attention"])
