"""Ranks, classes, probes, tokens and attention: NumPy, SciPy, scikit-learn and plain loops say the
same."""

import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist, squareform
from sklearn.preprocessing import normalize
from test_evaluate import tiny
from test_metrics import sphere
from test_tasks import WORDS, results_of

import evaluate
from corpora import EvaluationRows, evaluation_rows
from corpora.program import BadInput
from data import rows_of
from model import Packed, Segment
from tasks import analysis, metrics

# ---- ranks


def test_one_point_has_no_directions():
    point = torch.full((50, 8), .1) * (1 + 1e-8 * torch.randn(50, 8))
    assert set(analysis.directions(point).values()) == {0.0}
    assert analysis.explained(torch.ones(5, 3)).tolist() == [0, 0, 0]


def test_ranks_are_those_of_numpy():
    z = (sphere(15, 20) * torch.linspace(.1, 2, 20) + 1).numpy()
    s = np.linalg.svd(z - z.mean(0), compute_uv=False)
    p = s / s.sum()
    q = s ** 2 / (s ** 2).sum()
    assert analysis.directions(z) == pytest.approx({
        "effective_rank": np.exp(-(p * np.log(p)).sum()), "stable_rank": 1 / q[0],
        "rank_90": int((np.cumsum(q) < .9).sum()) + 1,
        "spectral_entropy": -(p * np.log(p)).sum() / np.log(20),
        "spectral_entropy_released": -(q * np.log(q)).sum() / np.log(15)})
    assert analysis.explained(z).tolist() == pytest.approx(100 * np.cumsum(q))


def test_alignment_is_a_power_of_the_distance_of_unit_vectors():
    x = torch.tensor([[3., 0], [0, 2]])
    y = torch.tensor([[0, 5.], [0, 1]])
    assert metrics.alignment(x, y) == pytest.approx((2 + 0) / 2)
    assert metrics.alignment(x, y, power=4) == pytest.approx((4 + 0) / 2)
    mean = evaluate.geometry({"a": x, "b": y})["cosine/translations"]
    assert metrics.alignment(x, y) == pytest.approx(2 - 2 * mean)


# ---- classes, words, maps


def test_class_alignment_is_the_mean_over_classes_of_the_mean_over_their_pairs():
    z = sphere(23, 4)
    labels = torch.tensor([0] * 12 + [3] * 8 + [5] * 2 + [7])  # one row has its own class
    u = normalize(z.numpy())
    found = analysis.of_classes(z, labels)
    for power, metric in ((2, "class_alignment"), (4, "class_alignment_4")):
        means = [(pdist(u[rows]) ** power).mean() for rows in (slice(12), slice(12, 20), [20, 21])]
        assert found[metric] == pytest.approx(np.mean(means))
    distances = squareform(pdist(u))
    same = (labels[:, None] == labels).numpy()
    near = (distances * same).sum() / (same.sum() - 23)  # a row is no pair with itself
    assert found["class_separation"] == pytest.approx(near / distances[~same].mean())


def test_the_target_of_a_token_probe_is_the_most_frequent_plain_token():
    rows = [[1, 9, 9, 5, 2]] * 5 + [[1, 7, 5, 5, 7, 2]] * 4 + [[1, 5, 2], [1, 1, 1, 2], [1, 30, 2]]
    assert analysis.commonest_tokens(rows, (1, 2)).tolist() == [9] * 5 + [5] * 5 + [-1, -1]


def test_the_gap_is_large_where_vectors_tell_labels_and_negative_where_they_tell_words():
    labels = torch.arange(90) % 2
    targets = torch.tensor([*range(5)] * 18)
    found = analysis.probe_gap(torch.eye(2)[labels] + .1 * sphere(90, 2), targets, labels)
    assert found["semantic"] == 100 and found["gap"] == 100 - found["token"] > 50
    assert found["semantic_f1"] == 100 * found["semantic_mcc"] == pytest.approx(100)
    found = analysis.probe_gap(torch.eye(5)[targets] + .1 * sphere(90, 5), targets, labels)
    assert found["token"] == 100 and found["gap"] < -30


def test_a_linear_map_leaves_no_residual_and_noise_leaves_itself():
    x = sphere(60, 8)
    turned = x @ sphere(8, 8, 1)
    found = analysis.linear_map(x, turned)
    assert max(found["residual"], found["residual_spread"]) < 1e-9
    y = turned + sphere(60, 8, 2)
    s = np.linalg.svd((x - y).numpy(), compute_uv=False)

    def left(fitted, tested):
        solved = np.linalg.lstsq(x[fitted].numpy(), y[fitted].numpy(), rcond=None)[0]
        return np.linalg.norm(x[tested].numpy() @ solved - y[tested].numpy())

    everything = left(slice(None), slice(None))
    half = left(slice(0, None, 2), slice(1, None, 2))
    length = np.linalg.norm(torch.cat([x, y]), axis=1).mean()
    assert analysis.linear_map(x.float(), y.float()) == pytest.approx({
        "residual": everything, "residual_relative": everything / np.linalg.norm(y),
        "residual_held_out": half / np.linalg.norm(y[1::2]),
        "residual_spread": half / np.linalg.norm(y[1::2] - y[::2].mean(0)),
        "singular_100": s.mean(), "singular_relative": s.mean() / length}, rel=1e-6)
    alike = analysis.linear_map(x + 1e4, y + 1e4)  # near to any map, which tells little of them
    assert alike["residual_held_out"] < 1e-3 and alike["residual_spread"] > .3


def test_text_to_code_tells_a_linear_map_from_noise_whatever_the_mean():
    x = sphere(80, 6)
    y = x @ sphere(6, 6, 1) + 3
    texts = [str(row) for row in range(80)]
    exact = analysis.text_to_code(x, y, texts)
    assert exact["r2"] == pytest.approx(1) and exact["not_found_mapped"] == 0
    assert exact["ridge"] == min(analysis.RIDGE) and exact["not_found"] > 50
    noise = analysis.text_to_code(x, sphere(80, 6, 2), texts)
    assert noise["r2"] < .1 and noise["ridge"] == max(analysis.RIDGE)
    moved = analysis.text_to_code(x + 100, y - 50, texts)
    assert moved == pytest.approx(exact, rel=1e-6)
    assert analysis.text_to_code(x, torch.ones(80, 6), texts)["r2"] == 0
    assert analysis.text_to_code(torch.ones(80, 6), y, texts)["r2"] < 1e-9
    # A text that is equal counts as found, an equal vector of another text does not.
    one = torch.ones(80, 6)
    assert analysis.text_to_code(one, one, texts)["not_found"] == 95
    assert analysis.text_to_code(one, one, ["same"] * 80)["not_found"] == 0


def test_r2_is_that_of_ridge_regression_in_closed_form_on_rows_that_were_not_fitted():
    x = sphere(80, 6).numpy()
    y = x @ sphere(6, 6, 1).numpy() + 2 * sphere(80, 6, 2).numpy()

    def closed_form(x, y, z, strength):
        centred = x - x.mean(0)
        penalty = strength * len(x) * x.var(0).mean() * np.eye(6)
        solved = np.linalg.solve(centred.T @ centred + penalty, centred.T @ (y - y.mean(0)))
        return (z - x.mean(0)) @ solved + y.mean(0)

    def told(fitted, tested, strength):
        left = closed_form(x[fitted], y[fitted], x[tested], strength) - y[tested]
        return 1 - (left ** 2).sum() / ((y[tested] - y[fitted].mean(0)) ** 2).sum()

    rows = np.arange(80)
    fitted = rows[rows % 4 != 3]
    inner = np.arange(60) % 4 != 3
    best = max(analysis.RIDGE, key=lambda one: told(fitted[inner], fitted[~inner], one))
    found = analysis.text_to_code(torch.tensor(x), torch.tensor(y), [""] * 80)
    assert found["ridge"] == best
    assert found["r2"] == pytest.approx(told(fitted, rows[3::4], best))


def test_the_centred_measures_do_not_see_a_common_vector():
    x = sphere(80, 6)
    y = x + .1 * sphere(80, 6, 1)
    texts = [str(row) for row in range(80)]
    plain = analysis.text_and_code(x, y, texts)
    moved = analysis.text_and_code(x + 100, y + 100, texts)
    centred = [name for name in plain if name.endswith("_centred")]
    assert len(centred) == 3
    for name in [*centred, "r2", "not_found", "not_found_mapped", "singular_100"]:
        assert moved[name] == pytest.approx(plain[name], rel=1e-3, abs=1e-3), name
    assert moved["rankme"] < 2 < plain["rankme"] and moved["uniformity"] > -.01
    assert moved["cosine_random"] > .99 and abs(plain["cosine_random"]) < .1
    assert plain["cosine_pairs_centred"] > .9 and plain["not_found"] < 20


# ---- tokens and attention


def test_the_kinds_of_matches_are_those_of_the_paper():
    query = torch.tensor([[0, 4, 17]])
    keys = {(0, 4, 9): "same_sentence", (0, 4, 17): "same_sentence", (2, 4, 9): "translation",
            (2, 4, 17): "translation", (0, 5, 17): "same_language", (0, 5, 9): "other",
            (2, 5, 17): "other", (2, 5, 9): "other"}
    for key, kind in keys.items():
        shares = analysis.token_matches(query, torch.tensor([[key]]))
        assert shares[kind] == 100 == sum(shares.values())


def test_the_nearest_tokens_are_searched_in_all_columns_and_exclude_the_token_itself():
    chance = torch.Generator().manual_seed(0)
    rows = torch.randint(5, 12, (3, 6, 5), generator=chance)
    rows[:, :, 0] = 1
    rows[:, :, -1] = 2
    states = torch.randn(3, 6, 5, 4, generator=chance)
    queries, found = analysis.nearest_tokens(rows.tolist(), [list(each) for each in states], (1, 2),
                                             [0, 2, 5], queries=2, k=3)
    assert queries[:, 1].tolist() == [0, 0, 2, 2, 5, 5] and not queries[:, 0].any()
    keys = [[*place, int(rows[place])] for place in np.ndindex(3, 6, 5) if 0 < place[2] < 4]
    vectors = torch.stack([states[tuple(key[:3])] for key in keys])
    for (column, row, token), nearest in zip(queries.tolist(), found.tolist()):
        options = []
        for place in (rows[column, row] == token).nonzero()[:, 0]:  # it may stand twice in its row
            cosines = torch.cosine_similarity(states[column, row, place], vectors)
            order = cosines.argsort(descending=True)[1:4].tolist()
            options.append([[*keys[i][:2], keys[i][3]] for i in order])
        assert nearest in options


def test_the_entropy_of_attention_has_its_known_values():
    sink = torch.tensor([[.1, .2, .3, .4], [.25, .25, .25, .25]])
    found = analysis.attention_entropy([sink, torch.ones(2, 2) / 2])  # the second has no inside
    golden = {"entropy": (1.2798542258 + math.log(4)) / 2, "entropy_of_mean": 1.3609399069,
              "entropy_no_end": (1.0114042648 + math.log(3)) / 2, "on_first": 17.5, "on_end": 32.5,
              "entropy_inside": (.6730116670 + math.log(2)) / 2, "entropy_uniform": math.log(4),
              "entropy_of_mean_inside": .6881388137}
    assert {name: found[name] for name in golden} == pytest.approx(golden)


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
    for place, each in enumerate(weights):
        low, high, low2, high2 = packed.key_ranges[place].tolist()
        seen = torch.cat([values[low2:high2], values[low:high]])                 # (L, H, K)
        mixed = torch.einsum("hl,lhk->hk", each, seen).flatten()
        assert each.sum(1).tolist() == pytest.approx([1] * heads[0])
        assert torch.allclose(mixed, kept[1][place], atol=1e-5)


# ---- tasks


TASKS = ["linear", "spectrum", "tokens", "attention", "uniform", "poolings"]


@pytest.fixture(scope="module")
def toy_rows():
    return evaluation_rows("toy", ["en", "de", "ru"], "test", 30)


@pytest.mark.parametrize("causal", [False, True])
def test_the_tasks_are_the_metrics_of_the_rows(tokenizer, causal, toy_rows):
    model = tiny("last" if causal else "cls", causal)
    evaluation = evaluate.Evaluation(model, tokenizer, toy_rows)
    found = results_of(model, tokenizer, toy_rows, TASKS)
    assert all(math.isfinite(value) for value in found.values())
    vectors = evaluation.vectors
    linear = analysis.linear_map(vectors["en"], vectors["de"])
    own = "own/" if causal else ""
    assert found[f"linear/{own}residual/de-en"] == pytest.approx(linear["residual"])
    together = analysis.explained(torch.cat(list(vectors.values())))
    assert found["spectrum/explained_10"] == pytest.approx(together[9].item(), rel=1e-4)
    assert found["tokens/rows_queries"] == 90
    own = model.config.pool
    assert found[f"uniform/xsim/{own}"] == evaluate.retrieval(vectors, evaluation.texts)["xsim"]
    before = found[f"uniform/xsim++/{own}"]
    change = 100 * (before - found["uniform/xsim++/words"]) / before
    assert found["uniform/change/xsim++/words"] == pytest.approx(change)
    maxima = {name: evaluate.embed(model, ids, "max") for name, ids in evaluation.ids.items()}
    for metric, value in analysis.ranks(maxima).items():
        assert found[f"poolings/max/{metric}"] == pytest.approx(value, rel=1e-4)


def test_frequencies_are_the_loss_of_who_knows_nothing_else(tokenizer):
    rows = EvaluationRows("x", {"en": WORDS, "de": WORDS[:1] * len(WORDS)})
    found = analysis.frequencies(evaluate.Evaluation(tiny("cls", False), tokenizer, rows))
    ids = torch.as_tensor([token for texts in rows.texts.values() for text in texts
                           for token in tokenizer.encode([text])[0].tolist()])
    share = ids.bincount().double() / len(ids)
    assert found["tokens"] == len(ids)
    # The cross-entropy of a model whose logits are the logarithms of the shares.
    wanted = torch.nn.functional.cross_entropy(share.log().expand(len(ids), -1), ids)
    assert found["nats"] == pytest.approx(wanted.item())


def test_the_linear_map_is_read_at_the_same_positions_whatever_the_objective(tokenizer):
    model = tiny("last", causal=True)
    rows = EvaluationRows("x", {"en": WORDS, "de": WORDS[::-1]})
    plain = [[tokenizer.special.cls, *ids.tolist()] for ids in tokenizer.encode(WORDS)]
    x = evaluate.embed(model, plain)
    wanted = analysis.linear_map(x, x.flip(0))["singular_relative"]
    own = set()
    for suffix in ([tokenizer.special.sep], [20], []):  # of ntp, of [PRED], of k = 0
        evaluation = evaluate.Evaluation(model, tokenizer, rows, [[[], suffix], [[], []]])
        scores = analysis.linear(evaluation)
        assert scores["singular_relative"] == pytest.approx(wanted, rel=1e-4)
        own.add(round(scores["own/singular_relative"], 4))
    assert len(own) == 3


def test_the_linear_map_says_when_it_is_ill_posed(tokenizer, capsys):
    for count, is_said in ((62, True), (63, False)):  # 31 and 32 rows are fitted, the width is 32
        texts = [f"{WORDS[row % 12]} {row}" for row in range(count)]
        rows = EvaluationRows("x", {"en": texts, "de": texts[::-1]})
        analysis.linear(evaluate.Evaluation(tiny("last", causal=True), tokenizer, rows))
        assert ("ill posed" in capsys.readouterr().err) == is_said


def test_places_reads_the_texts_own_last_token_and_where_the_objective_reads(tokenizer, capsys):
    model = tiny("last", causal=True)
    texts = [f"{word} {row}" for row in range(2) for word in WORDS]
    rows = EvaluationRows("x", {"text": texts, "code": texts[::-1]})
    start = [tokenizer.special.cls]
    ids = [[*start, *one.tolist()] for one in tokenizer.encode(texts)]
    x, y, at_pred = (evaluate.embed(model, one) for one in
                     (ids, ids[::-1], [[*row, 20] for row in ids]))
    sep = tokenizer.special.sep
    at_sep = evaluate.embed(model, [[*row, sep] for row in ids])
    cases = [([[[], [20]], [[], []]], at_pred, y),  # k = 1
             ([[[], []], [[], []]], x, y),  # k = 0
             (None, at_sep, at_sep.flip(0))]  # an imported model
    for affixes, own, own_y in cases:
        scores = analysis.places(evaluate.Evaluation(model, tokenizer, rows, affixes))
        for place, pair in (("last", (x, y)), ("own", (own, own_y))):
            for metric, value in analysis.text_and_code(*pair, texts[::-1]).items():
                assert scores[f"{place}/{metric}"] == pytest.approx(value, rel=1e-3), metric
        assert ("one place" in capsys.readouterr().err) == (own is x)
    few = EvaluationRows("x", {"text": texts[:9], "code": texts[:9]})
    for read, asked, message in ((model, few, "16 are needed"), (tiny(), rows, "needs a causal")):
        assert message in analysis.no_places(evaluate.Evaluation(read, tokenizer, asked))


def test_poolings_are_those_of_their_definitions(tokenizer):
    evaluation = evaluate.Evaluation(tiny(), tokenizer, EvaluationRows("x", {"en": WORDS}))
    rows = rows_of(tokenizer, ["the cat sees", ""])
    states = analysis.token_states(evaluation, rows)
    words = analysis.pool(evaluation, rows, "words")
    assert torch.allclose(words, torch.stack([states[0][1:-1].mean(0), states[1].mean(0)]))
    chance = torch.Generator().manual_seed(0)
    keys = (2 * torch.rand(32, 32, generator=chance) - 1) / 32 ** .5
    weights = ((states[0] @ keys.T) @ torch.randn(32, generator=chance) / 32 ** .5).softmax(0)
    found = analysis.pool(evaluation, rows, "attention")[0]
    assert torch.allclose(found, weights @ states[0], atol=1e-6)


def test_the_probe_gap_of_sets_and_of_rows_without_labels(tokenizer, tmp_path, toy_rows):
    lines = [f"{row % 6}\t{WORDS[row % 4]}\t{WORDS[row % 3]}\n" for row in range(40)]
    text = "score\ts1_en\ts2_en\n" + "".join(lines)
    (tmp_path / "stsb_multi_test.tsv").write_text(text, encoding="utf-8")
    found = results_of(tiny(), tokenizer, None, ["gap"], files=str(tmp_path), limit=36,
                       sets=["stsb"])
    assert found["gap/stsb/rows"] == 36 and len(found) == 2 + 5 * 13
    evaluation = evaluate.Evaluation(tiny(), tokenizer, toy_rows)
    special = tokenizer.special
    first, second = ([WORDS[row % size] for row in range(36)] for size in (4, 3))
    rows = [[special.cls, *a.tolist(), special.sep, *b.tolist(), special.sep]
            for a, b in zip(tokenizer.encode(first), tokenizer.encode(second))]
    bins = torch.tensor([row % 6 for row in range(36)]).clamp(max=4)
    wanted = analysis.of_classes(evaluate.embed(evaluation.model, rows, "mean"), bins)
    for metric, value in wanted.items():
        assert found[f"gap/stsb/mean/{metric}"] == pytest.approx(value, rel=1e-4)
    plain = results_of(tiny(), tokenizer, toy_rows, ["gap"])
    assert "gap/en/cls/token" in plain and "gap/en/cls/semantic" not in plain
    with pytest.raises(BadInput, match="set stsb cannot be probed"):
        results_of(tiny(), tokenizer, None, ["gap"], files=str(tmp_path), limit=4, sets=["stsb"])


def test_the_tasks_refuse_what_they_cannot_do(tokenizer, toy_rows):
    one = EvaluationRows("x", {"en": WORDS})
    with pytest.raises(BadInput, match="this model has none"):
        results_of(tiny(layers=0), tokenizer, one, ["attention"])
    model = tiny()
    model.blocks[-1].attention.qkv.weight.data.fill_(math.nan)
    with pytest.raises(BadInput, match="has diverged"):
        results_of(model, tokenizer, toy_rows, ["attention"])
