"""What a small decoder writes from sentence vectors."""

import json
from dataclasses import replace

import pytest
import torch
from test_evaluate import tiny, write_run
from test_tasks import WORDS, asked

import evaluate
from corpora import EvaluationRows
from data import rows_of
from tasks import __main__ as command
from tasks import invert, metrics


@pytest.fixture
def quick(monkeypatch):
    """A recipe of a few steps."""
    def set_recipe(**changes):
        monkeypatch.setattr(invert, "RECIPE", replace(invert.RECIPE, **changes))
    set_recipe(steps=3, batch=4)
    return set_recipe


def evaluation_of(tokenizer, texts, vectors):
    """An Evaluation whose vectors are given."""
    made = evaluate.Evaluation(tiny(), tokenizer, EvaluationRows("made", texts))
    made.vectors = vectors
    return made


def test_a_decoder_writes_what_it_was_trained_on_and_what_a_vector_says_counts(tokenizer, quick):
    quick(steps=80, batch=12, lr=5e-3)
    texts = WORDS[::2]
    vectors = torch.randn(6, 64)
    trained = evaluation_of(tokenizer, {"en": texts}, {"en": vectors})
    both = {"en": texts, "de": texts[::-1]}
    tested = evaluation_of(tokenizer, both, {"en": vectors, "de": vectors})
    scores, written = invert.read(trained, tested)
    assert scores["exact"] == 100 and scores["chrf"] == 100 and list(written[""]) == texts
    assert scores["exact/shuffled"] == 0 and scores["chrf/shuffled"] < 90
    assert scores["loss"] < .1 < scores["loss/shuffled"]
    assert scores["exact/translation"] == 100 and list(written["/translation"]) == texts
    # A collapsed space says nothing, and all texts are read alike.
    quick(steps=3)
    point = torch.ones(6, 8)
    scores, written = invert.read(evaluation_of(tokenizer, {"en": texts}, {"en": point}),
                                  evaluation_of(tokenizer, {"en": texts}, {"en": point}))
    assert len(set(written[""])) == 1 and "exact/translation" not in scores
    assert scores["loss"] == pytest.approx(scores["loss/shuffled"])
    # So does no vector at all, of whatever space.
    blind, unread = invert.read(trained, tested, scale=0)
    assert len(set(unread[""])) == 1
    assert blind["loss"] == pytest.approx(blind["loss/translation"])
    assert blind["loss"] == pytest.approx(blind["loss/shuffled"])


def test_where_a_cloud_lies_and_how_wide_it_is_does_not_count(tokenizer, quick):
    vectors = torch.randn(12, 8)
    found = []
    for z in (vectors, 5 + vectors * torch.linspace(.01, 10, 8)):
        one = evaluation_of(tokenizer, {"en": WORDS}, {"en": z})
        found.append(invert.read(one, one)[0]["loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_a_decoder_depends_on_its_seed_alone(tokenizer, quick):
    rows = rows_of(tokenizer, WORDS)
    vectors = torch.randn(12, 8)
    state = torch.get_rng_state()
    first, second = (invert.fit(vectors, rows, tokenizer.vocab) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    quick(seed=1)
    other = invert.fit(vectors, rows, tokenizer.vocab)
    assert not torch.equal(first.embed.weight, other.embed.weight)
    long = rows_of(tokenizer, ["dogs " * 80], max_text=invert.LONGEST)
    _, (text,) = invert.judge(first, tokenizer, [0], long)
    assert len(tokenizer.encode([text])[0]) <= invert.LONGEST


def test_a_row_is_a_vector_and_the_tokens_before_each_target(tokenizer):
    vectors = torch.randn(2, 8)
    decoder = invert.Decoder(vectors, 300)
    rows = rows_of(tokenizer, WORDS[:2])
    losses = []
    for number, row in enumerate(rows):
        x = torch.cat([decoder.map(vectors[number:number + 1]), decoder.embed(
            torch.tensor(row[1:-1]))])
        angles = decoder.embed_tokens(torch.zeros(len(x), dtype=int), torch.arange(len(x)))[1]
        packed = invert.Packed.of([row[:-1]], causal=True)
        for block in decoder.blocks:
            x = block(x, packed, angles)
        logits = decoder.logits(decoder.final_norm(x))
        losses += torch.nn.functional.cross_entropy(logits, torch.tensor(row[1:]),
                                                    reduction="none").tolist()
    assert decoder.loss([0, 1], rows).item() == pytest.approx(sum(losses) / len(losses), rel=1e-5)


@pytest.mark.parametrize("pool, causal", [("cls", False), ("mean", False), ("last", True)])
def test_the_task_reads_runs_of_every_kind(tokenizer, quick, pool, causal, tmp_path, capsys):
    file = tmp_path / "rows.tsv"
    rows = [f"{text} {i}\t{i} {text}\t{text} {text} {i}\n" for i, text in enumerate(WORDS * 5)]
    file.write_text("en\tde\tfr\n" + "".join(rows), encoding="utf-8")
    run = write_run(tmp_path / "run", tiny(pool, causal), tokenizer, file)
    flags = ["--tasks", "invert"]
    assert asked(run, *flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("    vector: ") for line in lines) == 6
    assert sum(line.startswith("    vector of de: ") for line in lines) == 6
    assert any(line.startswith("invert/chrf/shuffled") for line in lines)
    assert asked(run, *flags, "--no-controls", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["invert/rows"] == 6 and found["invert/rows_trained"] == 54
    assert not [name for name in found if "untrained" in name or "no_vector" in name]


def test_texts_are_trained_on_once_and_never_tested(tokenizer, quick, tmp_path, capsys, refused):
    texts = [f"{word} number {count % 25}" for count, word in enumerate(WORDS * 5)]
    file = tmp_path / "texts.txt"
    file.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    run = write_run(tmp_path / "run", tiny(), tokenizer, file)
    opened = evaluate.open_run(run)
    tested = evaluate.evaluation_of(opened)
    train, test = (next(iter(rows.texts.values()))
                   for rows in metrics.texts_apart(opened.config, tested))
    assert not set(train) & set(test) and set(train) | set(test) <= set(texts)
    assert len(train) == len(set(train)) > 2 and len(test) == len(set(test)) >= 2
    # Of another file the rows that are not tested are trained on.
    half = evaluate.evaluation_of(opened, str(file), split="all", limit=20)
    other = tmp_path / "other.txt"
    other.write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    config = {"data": "toy", "eval_data": str(file)}
    for given in ((config | {"data": str(other)}, half), (config, half, str(other))):
        train, test = (set(*rows.texts.values()) for rows in metrics.texts_apart(*given))
        assert train and not train & test and test == set(texts[:20])
    foreign = tmp_path / "foreign.txt"
    foreign.write_text("nothing of it\nwas trained on\n", encoding="utf-8")
    flags = f"{run} --device cpu --tasks invert --data {foreign}"
    assert "give --split test" in refused(command.main, flags)
    assert asked(run, "--tasks", "invert", "--json", "--data", str(other), "--split", "test") == 0
    found = json.loads(capsys.readouterr().out)
    assert "invert/chrf/untrained" in found and "invert/chrf/translation" not in found
    assert found["invert/loss/no_vector"] > 0


def test_chrf_by_hand():
    # "abc" and "abd": 2 of 3 letters, 1 of 2 pairs, no run of three; longer ones do not exist.
    assert metrics.chrf(["a bc"], ["ab d"]) == pytest.approx(100 * (2 / 3 + 1 / 2 + 0) / 3)
    # Precision 2/3 and 1/2, recall 1 and 1; no gold has three letters.
    precision, recall = (2 / 3 + 1 / 2) / 2, 1
    wanted = 500 * precision * recall / (4 * precision + recall)
    assert metrics.chrf(["abc"], ["ab"]) == pytest.approx(wanted)
    assert metrics.chrf(["aaa", "the same"], ["aaa", "the same"]) == pytest.approx(100)
    assert metrics.chrf(["aa"], ["ab"]) == pytest.approx(25)  # "aa" shares one a, and no pair
    assert metrics.chrf(["x", ""], ["y", "z"]) == 0 and metrics.chrf([""], ["y"]) == 0
