"""Fine-tuning: the loop, rows of pairs, places of answers, windows, the matrix of languages."""

import json

import numpy as np
import pytest
import tokenizers
import torch
from test_tasks import tiny, write_run
from tokenizers import models, pre_tokenizers

from corpora import toy
from corpora.program import exit_status
from data import Tokenizer
from tasks import __main__ as command
from tasks import finetune, sets

CAUSE = {}
for lang in ("en", "de"):  # is there a because or although?
    meanings = toy.meanings("train", 300)
    CAUSE[lang] = [(toy.render(meaning, lang), int(bool(meaning.link))) for meaning in meanings]


@pytest.fixture(scope="module")
def tokenizer():
    texts = [text for rows in CAUSE.values() for text, _ in rows]
    return Tokenizer.train([*texts, "日本語のテキスト, naïve café"], 700)


def encoder(**changes):
    shape = dict(vocab=700, layers=1, max_positions=96, pool="mean")
    return tiny(**(shape | changes))


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"), encoder(), tokenizer)


@pytest.fixture
def causes(monkeypatch):
    """The embedded grammar in place of a downloaded set."""
    def read(name, folder, split, lang="en"):
        rows = CAUSE[lang][:200] if split == "train" else CAUSE[lang][200:]
        return sets.Rows([text for text, _ in rows], None, [label for _, label in rows])

    monkeypatch.setattr(sets, "read", read)
    monkeypatch.setattr(sets, "made", lambda *_: "")
    monkeypatch.setattr(finetune, "TESTED", {"xnli": ["en", "de"]})


def asked(folder, capsys, *flags):
    status = exit_status(command.main, ["finetune", str(folder), "--device", "cpu", *flags])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


# ---- the loop


def test_the_loop_learns_a_separable_task_and_says_so(folder, causes, capsys):
    status, out, err = asked(folder, capsys, "--task", "sst2", "--epochs", "5", "--lr", "1e-2",
                             "--json")
    found = json.loads(out)
    written = (folder / "finetune-sst2.json").read_text(encoding="utf-8")
    assert status == 0 and found == json.loads(written) and found["sst2/train_rows"] == 200
    assert found["sst2/accuracy"] > 85 > 65 > found["sst2/majority"] >= 50
    lines = [line for line in err.splitlines() if ", epoch " in line]
    epochs = [float(line.split("accuracy ")[1].split(",")[0]) for line in lines]
    assert len(epochs) == 5  # the last epoch is reported, not the best
    assert found["sst2/accuracy"] == pytest.approx(epochs[-1], abs=.01)
    assert found["sst2/accuracy/best_epoch"] == pytest.approx(max(epochs), abs=.01)


def test_languages_are_tested_zero_shot_and_the_control_has_fresh_weights(folder, causes, capsys):
    status, out, _ = asked(folder, capsys, "--task", "xnli", "--untrained", "--seeds", "1,2",
                           "--epochs", "1", "--lr", "1e-3", "--json", "--limit", "48",
                           "--eval-limit", "40")
    found = json.loads(out)
    each = [found[f"xnli/accuracy/{lang}"] for lang in ("en", "de")]
    assert status == 0 and found["xnli/accuracy"] == pytest.approx(sum(each) / 2)
    values = [found[f"xnli/accuracy/de/seed_{seed}"] for seed in (1, 2)]
    assert found["xnli/accuracy/de"] == pytest.approx(np.mean(values))
    assert found["xnli/accuracy/de/sd"] == pytest.approx(np.std(values, ddof=1))
    assert found["xnli/train_rows"] == 48 and 33 < found["xnli/majority"] < 100
    assert {"xnli/accuracy/de/untrained", "mnli/accuracy/untrained/seed_2"} <= set(found)


def test_a_stopped_run_and_a_diverged_one_write_nothing(tokenizer, causes, tmp_path, capsys,
                                                        monkeypatch):
    folder = write_run(tmp_path / "run", encoder(), tokenizer)
    before = sorted(folder.iterdir())
    status, out, err = asked(folder, capsys, "--task", "sst2", "--lr", "1e30", "--epochs", "2")
    assert status == 2 and out == "" and "lower --lr" in err

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(finetune, "predict", stopped)
    assert asked(folder, capsys, "--task", "sst2", "--epochs", "1")[0] == 130
    assert sorted(folder.iterdir()) == before


# ---- classification


@pytest.mark.parametrize("task, columns, metrics", [
    ("mrpc", ("sentence1", "sentence2", "label"), {"accuracy", "f1"}),
    ("stsb", ("s1_en", "s2_en", "score"), {"pearson", "spearman"})])
def test_files_are_trained_on_whole_and_have_glues_metrics(folder, tmp_path, capsys, task, columns,
                                                           metrics):
    train = {"mrpc": "mrpc_train", "stsb": "stsb_multi_train"}[task]
    for name, count in ((train, 30), (train.replace("train", "test"), 12)):
        lines = ["\t".join(columns), *(f"a b\tc {row}\t{row % 2}" for row in range(count))]
        (tmp_path / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    status, out, _ = asked(folder, capsys, "--task", task, "--files", str(tmp_path), "--epochs",
                           "1", "--max-length", "16")
    found = json.loads((folder / f"finetune-{task}.json").read_text(encoding="utf-8"))
    assert status == 0 and f"{task}/train_rows" in out and found[f"{task}/train_rows"] == 30
    assert {name.split("/")[1] for name in found if name.endswith("best_epoch")} == metrics
    assert (f"{task}/majority" in found) == (task == "mrpc")


@pytest.mark.parametrize("first, second, wanted", [
    (3, 4, (3, 4)), (9, 3, (5, 3)), (3, 9, (3, 5)), (5, 9, (4, 4)), (12, None, (9,))])
def test_of_a_pair_that_is_too_long_the_longer_text_is_cut_first(tokenizer, first, second, wanted):
    special = tokenizer.special
    a = np.arange(100, 100 + first)
    b = None if second is None else np.arange(200, 200 + second)
    row = finetune.pair_row(a, b, special, 11)
    lengths = np.diff(np.flatnonzero((row == special.sep) | (row == special.cls))) - 1
    assert tuple(lengths) == wanted and row[0] == special.cls and row[1] == 100


def test_the_published_means_of_xnli_and_mlqa():
    values = dict.fromkeys(finetune.XNLI, 50.0) | {"ko": 0.0}
    assert finetune.means(values, "xnli") == {"": 50, "/all": pytest.approx(750 / 16)}
    cells = {"de-de": 1.0, "de-en": 2.0, "en-de": 4.0, "en-en": 5.0}
    assert finetune.means(cells, "mlqa") == {"": 3, "/xlt": 3, "/gxlt": 3}


# ---- answers


@pytest.mark.parametrize("count, room, stride", [
    (1, 10, 4), (13, 10, 5), (97, 10, 0), (300, 120, 60)])
def test_windows_are_those_of_tokenizers_and_each_token_has_one_best_context(count, room, stride):
    """The rule of BERT's run_squad, written out."""
    vocabulary = {str(i): i for i in range(400)}
    counting = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="0"))
    counting.pre_tokenizer = pre_tokenizers.Whitespace()
    counting.enable_truncation(room, stride=stride)
    found = counting.encode(" ".join(map(str, range(count))))
    parts, best = finetune.windows(count, room, stride)
    assert parts == [(each.ids[0], each.ids[-1] + 1) for each in (found, *found.overflowing)]
    for token in range(count):
        scores = []
        for place, (first, last) in enumerate(parts):
            if first <= token < last:
                shorter = min(token - first, last - 1 - token)
                scores.append((shorter + .01 * (last - first), -place))
        assert best[token] == -max(scores)[1]


def test_the_best_span_is_that_of_a_search_over_all():
    rng = np.random.default_rng(0)
    for _ in range(3):
        outputs = torch.tensor(rng.normal(size=(20, 2)), dtype=torch.float32)
        own = rng.random(12) < .7
        window = finetune.Window(np.zeros(20), 0, 5, 100, own)
        spans = []
        for i in np.flatnonzero(own).tolist():
            spans += [((outputs[5 + i, 0] + outputs[5 + j, 1]).item(), 100 + i, 100 + j)
                      for j in range(i, 12)]
        score, first, last = max(spans)
        found = finetune.best_span(outputs, window)
        assert found == (pytest.approx(score), first, last)


def write_qa(folder):
    """SQuAD to train on, and MLQA of two languages, as they are distributed."""
    words = {"en": "The river {} flows past Bonn and Köln for many days . ",
             "de": "Der Fluß {} fließt an Bonn und Köln vorbei . "}
    ask = {"en": "Which river?", "de": "Welcher Fluß?"}
    files = {"squad/train-v1.1.json": ("en", "en"), "squad/dev-v1.1.json": ("en", "en")}
    for a in words:
        for b in words:
            files[f"mlqa/MLQA_V1/test/test-context-{a}-question-{b}.json"] = (a, b)
    for path, (lang, asking) in files.items():
        rows = []
        for name in "Rhine Łaba Főn Øy Aare Tejo Ebro Volga".split():
            context = words[lang].format(name)
            answer = {"text": name, "answer_start": context.index(name)}
            rows.append({"context": context, "qas": [{"question": ask[asking],
                                                      "answers": [answer]}]})
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"data": [{"title": "rivers", "paragraphs": rows}]})
        (folder / path).write_text(text, encoding="utf-8")


def test_the_whole_matrix_is_tested_and_its_means_are_right(folder, tmp_path, capsys):
    write_qa(tmp_path)
    status, out, _ = asked(folder, capsys, "--task", "mlqa", "--files", str(tmp_path), "--epochs",
                           "30", "--lr", "3e-3", "--max-length", "64", "--json")
    found = json.loads(out)
    pairs = ("de-de", "de-en", "en-de", "en-en")
    cells = {pair: found[f"mlqa/f1/{pair}"] for pair in pairs}
    assert status == 0 and found["mlqa/f1"] == pytest.approx(sum(cells.values()) / 4)
    assert found["mlqa/f1/xlt"] == pytest.approx((cells["de-de"] + cells["en-en"]) / 2)
    assert found["mlqa/f1/gxlt"] == pytest.approx((cells["de-en"] + cells["en-de"]) / 2)
    assert found["mlqa/train_rows"] == 8
    assert found["squad/f1"] == cells["en-en"] > 60 and found["squad/f1"] >= found["squad/exact"]


def test_gold_answers_score_100_over_windows_scripts_and_rules(tokenizer):
    rows = [("zh", "长" * 90 + "东京是日本的首都。" + "长" * 50, "东京"),
            ("en", "word " * 120 + "In Łódź, near naïve cafés. " + "more " * 30, "naïve cafés"),
            ("hi", "नदी " * 30 + "गंगा भारत में है।", "गंगा"), ("de", "Der Rhein.", "Rhein")]
    questions = [finetune.Question(text, "where is it " * 40, [answer], text.index(answer),
                                   (lang, "en")) for lang, text, answer in rows]
    made, places = finetune.cut_windows(questions, tokenizer, 96)
    assert len(made) > len(questions) + 5 and max(len(window.row) for window in made) == 96
    assert sum(window.own.sum() for window in made) == sum(map(len, places))
    outputs = []  # of a model that knows the answers
    for window in made:
        logits = torch.zeros(len(window.row), 2)
        start, end = finetune.gold_span(questions[window.question], places[window.question])
        if window.first <= start and end < window.first + len(window.own):
            logits[window.at + start - window.first, 0] = 9
            logits[window.at + end - window.first, 1] = 9
        logits[1:window.at - 1] = 99  # it would rather answer with the question
        outputs.append(logits)
    for rules in ("mlqa", "squad"):
        judge = finetune.judge_answers(made, questions, places, rules)
        assert judge(outputs) == {"f1": 100, "exact": 100}
        assert judge([torch.zeros(len(window.row), 2) for window in made])["exact"] < 50


def test_jsonl_and_squads_json_are_the_same_questions(tmp_path):
    write_qa(tmp_path)
    plain = finetune.read_questions("mlqa", tmp_path)["de-en"]
    lines = [json.dumps({"lang_context": "de", "lang_question": "en", "context": q.context,
                         "question": q.question,
                         "answers": [{"text": q.answers[0], "start": q.start}]}) for q in plain]
    path = tmp_path / "other" / "qa" / "mlqa_test.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(lines), encoding="utf-8")
    assert finetune.read_questions("mlqa", tmp_path / "other") == {"de-en": plain}


# ---- bad input


@pytest.mark.parametrize("flags, message", [
    (["--task", "xmli"], "did you mean xnli?"), (["--tusk", "sst2"], "--task"),
    (["--task", "sst2", "--max-length", "500"], "at most 96 tokens"),
    (["--task", "sst2", "--lr", "nan"], "--lr: nan"),
    (["--task", "sst2", "--seeds", "1,x"], "whole numbers"),
    (["--task", "mlqa", "--files", "nowhere"], "python -m corpora.download"),
    (["--task", "sst2", "--device", "abacus"], "'abacus'")])
def test_each_mistake_is_one_line(folder, capsys, flags, message):
    status, out, err = asked(folder, capsys, *flags)
    last = err.splitlines()[-1]
    assert (status, out) == (2, "") and message in last and last.startswith("error: ")


def test_a_vector_that_has_read_nothing_is_refused(tokenizer, causes, tmp_path, capsys):
    folder = write_run(tmp_path / "run", encoder(causal=True, pool="cls"), tokenizer)
    assert "has read nothing" in asked(folder, capsys, "--task", "sst2")[2]
