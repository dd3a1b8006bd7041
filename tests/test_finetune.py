"""Fine-tuning: the loop, rows of pairs, answers in windows, the matrix of languages."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from test_evaluate import tiny, write_run
from test_tasks import write_table

from base.common import BadInput
from base.tokenizer import Tokenizer
from corpora import toy
from tasks import __main__ as command
from tasks import finetune, questions

PLACE = {}
for lang in ("en", "de"):  # does the sentence name a place?
    meanings = toy.meanings("train", 300)
    PLACE[lang] = [(toy.render(meaning, lang), int(bool(meaning.place))) for meaning in meanings]


@pytest.fixture(scope="module")
def tokenizer():
    texts = [text for rows in PLACE.values() for text, _ in rows]
    return Tokenizer.train([*texts, "日本語のテキスト, naïve café"], 700)


@pytest.fixture
def ask(tokenizer, capsys):
    """Run the command with --json on a new run. Return its numbers and its stderr."""
    write_run("run", tiny("mean", vocab=700, layers=1, max_positions=96), tokenizer)

    def numbers(flags):
        command.main(["finetune", "run", "--files=.", "--device=cpu", "--json", *flags.split()])
        output = capsys.readouterr()
        found = {}
        for line in output.out.splitlines():
            found |= json.loads(line)
        return found, output.err
    return numbers


def test_what_is_learned_is_tested_zero_shot_and_the_control_has_fresh_weights(ask, monkeypatch):
    monkeypatch.setattr(finetune, "XNLI", ["en", "de"])
    write_table("mnli_train", PLACE["en"][:200])
    for name, lang in (("mnli", "en"), ("xnli", "en"), ("xnli-de", "de")):
        write_table(f"{name}_test", PLACE[lang][200:])
    found, err = ask("--task xnli --untrained --epochs 4 --lr 1e-2")
    assert found["xnli/train_rows"] == 200
    assert found["mnli/accuracy"] > 80 > 65 > found["mnli/majority"] >= 50
    each = [found[f"xnli/accuracy/{lang}"] for lang in ("en", "de")]
    assert found["xnli/accuracy"] == pytest.approx(sum(each) / 2) and each[0] > 80
    assert {"xnli/accuracy/de/untrained", "mnli/accuracy/untrained"} <= set(found)
    losses = [float(line.split("loss ")[1]) for line in err.splitlines() if "epoch " in line[:9]]
    assert len(losses) == 8 and losses[0] > losses[3] and losses[:4] != losses[4:]


def test_several_tasks_have_glues_metrics_and_their_mean(ask, monkeypatch):
    monkeypatch.setattr(finetune, "MEAN_OF", ["mrpc/accuracy", "stsb/pearson"])
    for name, rows in (("train", 30), ("test", 12)):
        write_table(f"mrpc_{name}", [("a b c d e", "c", row % 2) for row in range(rows)])
        write_table(f"stsb_{name}", [("a b", "c", row % 2) for row in range(rows)])
    found, err = ask("--task mrpc,stsb --untrained --epochs 1 --max-length 8")
    assert "mrpc: 30 of 30 rows are longer than --max-length 8 and were truncated" in err
    assert found["mrpc/train_rows"] == found["stsb/train_rows"] == 30
    assert {"mrpc/f1", "mrpc/majority", "stsb/spearman"} <= set(found)
    assert "stsb/pearson/untrained" in found
    each = [found[name] for name in ("mrpc/accuracy", "stsb/pearson")]
    assert found["glue/mean"] == pytest.approx(sum(each) / 2)
    with pytest.raises(BadInput, match="has diverged"):
        ask("--task mrpc --lr 1e15")


@pytest.mark.parametrize("given, wanted", [
    ((3, 4), (3, 4)), ((9, 3), (5, 3)), ((3, 9), (3, 5)), ((5, 9), (4, 4)), ((12,), (9,))])
def test_of_a_pair_that_is_too_long_the_longer_text_is_truncated_first(tokenizer, given, wanted):
    special = tokenizer.special
    texts = [np.arange(100, 100 + length) for length in given]
    row = finetune.pair_row(special, [special.sep], 11, *texts)
    lengths = np.diff(np.flatnonzero((row == special.sep) | (row == special.cls))) - 1
    assert tuple(lengths) == wanted and row[0] == special.cls and row[1] == 100


# ---- answers


WORDS = {"en": ("The river {} flows past Bonn and Köln for many days . ", "Which river?"),
         "de": ("Der Fluß {} fließt an Bonn und Köln vorbei . ", "Welcher Fluß?")}


def write_questions(name, languages):
    lines = []
    for lang, other in itertools.product(languages, languages):
        for river in "Rhine Łaba Főn Øy Aare Tejo Ebro Volga".split():
            context = WORDS[lang][0].format(river)
            answers = [{"text": river, "answer_start": context.index(river)}]
            lines.append(json.dumps({
                "context": context, "question": WORDS[other][1], "answers": answers,
                "lang_context": lang, "lang_question": other}))
    Path(f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")


def test_the_whole_matrix_is_tested_and_learned(ask):
    for name, languages in (("squad_train", ["en"]), ("squad_test", ["en"]), ("mlqa_test", WORDS)):
        write_questions(name, languages)
    found, _ = ask("--task mlqa --epochs 30 --lr 3e-3 --max-length 64")
    cells = [found[f"mlqa/f1/{pair}"] for pair in ("de-de", "en-en", "de-en", "en-de")]
    assert found["mlqa/f1"] == pytest.approx(sum(cells) / 4)
    assert found["mlqa/f1/xlt"] == pytest.approx(sum(cells[:2]) / 2)
    assert found["mlqa/f1/gxlt"] == pytest.approx(sum(cells[2:]) / 2)
    assert found["mlqa/train_rows"] == 8
    assert found["squad/f1"] == cells[1] > 60 and found["squad/f1"] >= found["squad/exact"]
    # A question that is too long is truncated, and one whose answer is elsewhere is left out.
    lines = [json.loads(line) for line in Path("squad_train.jsonl").read_text().splitlines()]
    lines[0]["question"] *= 40
    lines[1]["answers"][0]["answer_start"] += 1
    Path("squad_train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    _, printed = ask("--task mlqa --epochs 1 --max-length 64")
    assert "squad: 1 of 8 questions are not trained on" in printed
    assert "1 of 7 questions are longer than" in printed


def test_gold_answers_score_100_over_windows_scripts_and_rules(tokenizer):
    rows = [("zh", "长" * 90 + "东京是日本的首都。" + "长" * 50, "东京"),
            ("en", "word " * 120 + "In Łódź, near naïve cafés. " + "more " * 30, "naïve cafés"),
            ("hi", "नदी " * 30 + "गंगा भारत में है।", "गंगा"), ("de", "Der Rhein.", "Rhein")]
    asked = [questions.Question(text, "where is it " * 40, [answer], text.index(answer),
                                f"{lang}-en") for lang, text, answer in rows]
    windows = questions.make_windows(asked, tokenizer, [tokenizer.special.sep], 96)
    assert max(len(window.row) for window in windows) == 96 and len(windows) > 9
    assert len({window.at for window in windows}) == 1  # one question, truncated to one length
    outputs = []  # of a model that knows the answers
    for window in windows:
        logits = torch.zeros(len(window.row), 2)
        start, end = questions.gold_span(asked[window.question], window)
        logits[start, 0] = logits[end, 1] = 9
        logits[1:window.at - 1] = 99  # it would rather answer with the question
        outputs.append(logits)
    zeros = [torch.zeros(len(window.row), 2) for window in windows]
    assert questions.judge_answers(outputs, windows, asked) == {"f1": 100, "exact": 100}
    assert questions.judge_answers(zeros, windows, asked)["exact"] < 50
