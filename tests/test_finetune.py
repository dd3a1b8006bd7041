"""Fine-tuning: the loop, rows of pairs, places of answers, windows, the matrix of languages. Everything is tiny."""

import argparse
import json
import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

import data
import finetune
import grammar
import tasks
from model import Model, ModelConfig, save

CAUSE = {lang: [(grammar.render(meaning, lang), int(bool(meaning.link))) for meaning in grammar.meanings("train", 300)] for lang in ("en", "de")}


@pytest.fixture(scope="module")
def tokenizer():
    return data.train_tokenizer([text for rows in CAUSE.values() for text, _ in rows] + ["日本語のテキスト, naïve café"], 700)


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"), tokenizer)


def make_run(folder, tokenizer, **changes):
    torch.manual_seed(1)
    save(Model(ModelConfig(**dict(vocab=700, width=32, layers=1, heads=2, hidden=64, max_length=96, pool="mean") | changes)), folder / "model.pt")
    data.write_tokenizer(tokenizer, folder / "tokenizer.json")
    (folder / "log.jsonl").write_text(json.dumps({"config": {"data": "toy"}}) + "\n", encoding="utf-8")
    return folder


@pytest.fixture
def causes(monkeypatch):
    """Is there a because or although? Of the embedded grammar, in place of a downloaded data set."""
    def read(name, folder, split, lang="en"):
        rows = CAUSE[lang][:200] if split == "train" else CAUSE[lang][200:]
        return tasks.Rows([text for text, _ in rows], None, [label for _, label in rows])
    monkeypatch.setattr(tasks, "read", read)
    monkeypatch.setattr(tasks, "made", lambda *_: "")
    monkeypatch.setattr(finetune, "LANGUAGES", {"xnli": ["en", "de"]})


def command(folder, capsys, *flags):
    status = finetune.main([str(folder), "--device", "cpu", *flags])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


FAST = ["--epochs", "5", "--lr", "1e-2", "--json"]


# ---- the loop


def test_the_loop_learns_a_separable_task_and_says_so(folder, causes, capsys):
    status, out, err = command(folder, capsys, "--task", "sst2", *FAST)
    found = json.loads(out)
    assert status == 0 and found == json.loads((folder / "finetune-sst2.json").read_text(encoding="utf-8"))
    assert found["sst2/accuracy"] > 85 > 65 > found["sst2/majority"] >= 50 and found["sst2/train_rows"] == 200
    epochs = [float(line.split("accuracy ")[1].split(",")[0]) for line in err.splitlines() if ", epoch " in line]
    assert len(epochs) == 5 and found["sst2/accuracy"] == pytest.approx(epochs[-1], abs=.01)           # the last epoch, not the best
    assert found["sst2/accuracy/best_epoch"] == pytest.approx(max(epochs), abs=.01)


def test_a_seed_gives_the_same_numbers_twice_and_another_seed_others(folder, causes, capsys):
    flags = ["--task", "sst2", "--epochs", "1", "--lr", "1e-3", "--limit", "64", "--eval-limit", "90", "--json"]
    one, same, other = (command(folder, capsys, *flags, "--seed", seed)[1:] for seed in ("3", "3", "4"))
    assert one == same and one != other


def test_languages_are_tested_zero_shot_and_the_control_starts_from_fresh_weights(folder, causes, capsys):
    status, out, _ = command(folder, capsys, "--task", "xnli", "--untrained", "--seeds", "1,2",
                             "--epochs", "1", "--lr", "1e-3", "--json", "--limit", "48", "--eval-limit", "40")
    found = json.loads(out)
    each = [found[f"xnli/accuracy/{lang}"] for lang in ("en", "de")]
    assert found["xnli/accuracy"] == pytest.approx(sum(each) / 2) and found["xnli/train_rows"] == 48
    values = [found[f"xnli/accuracy/de/seed_{seed}"] for seed in (1, 2)]
    assert found["xnli/accuracy/de"] == pytest.approx(np.mean(values)) and found["xnli/accuracy/de/sd"] == pytest.approx(np.std(values, ddof=1))
    assert 0 <= found["xnli/accuracy/de/untrained"] <= 100 and "mnli/accuracy/untrained/seed_2" in found and 33 < found["xnli/majority"] < 100
    assert found["mnli/accuracy/untrained/seed_1"] != found["mnli/accuracy/seed_1"] or found["xnli/accuracy/untrained"] != found["xnli/accuracy"]


def test_an_epoch_has_each_row_once_in_full_batches_of_like_length():
    lengths = np.random.default_rng(0).integers(1, 200, 331)
    made = finetune.order(lengths, 8, np.random.default_rng(1), window=6)
    assert sorted(np.concatenate(made).tolist()) == list(range(331)) and sorted(map(len, made))[:2] == [3, 8]
    assert np.mean([np.ptp(lengths[batch]) for batch in made]) < 40 < np.ptp(lengths)
    again = finetune.order(lengths, 8, np.random.default_rng(2), window=6)
    assert [batch.tolist() for batch in made] != [batch.tolist() for batch in again]


def test_a_stopped_run_and_a_diverged_one_write_nothing(tokenizer, causes, tmp_path, capsys, monkeypatch):
    folder = make_run(tmp_path, tokenizer)
    before = sorted(folder.iterdir())
    status, out, err = command(folder, capsys, "--task", "sst2", "--lr", "1e30", "--epochs", "2", "--clip", "0")
    assert status == 2 and out == "" and "lower --lr" in err

    def stopped(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(finetune, "predict", stopped)
    assert command(folder, capsys, "--task", "sst2", "--epochs", "1")[0] == 130 and sorted(folder.iterdir()) == before


# ---- classification


def write_tsv(path, header, rows):
    path.write_text("\n".join("\t".join(map(str, row)) for row in [header, *rows]) + "\n", encoding="utf-8")


@pytest.mark.parametrize("task, names, header, row", [
    ("mrpc", ("mrpc_train", "mrpc_test"), ("sentence1", "sentence2", "label"), lambda i: ("a b", f"c {i}", i % 2)),
    ("stsb", ("stsb_multi_train", "stsb_multi_test"), ("s1_en", "s2_en", "score"), lambda i: ("a b", f"c {i}", i / 8))])
def test_files_are_trained_on_whole_and_pairs_and_scores_have_glues_metrics(folder, tmp_path, capsys, task, names, header, row):
    for name, count in zip(names, (30, 12)):
        write_tsv(tmp_path / f"{name}.tsv", header, map(row, range(count)))
    status, out, _ = command(folder, capsys, "--task", task, "--files", str(tmp_path), "--epochs", "1", "--precision", "bfloat16", "--max-length", "16")
    found = json.loads((folder / f"finetune-{task}.json").read_text(encoding="utf-8"))
    assert status == 0 and found[f"{task}/train_rows"] == 30 and found[f"{task}/test_rows"] == 12 and f"{task}/train_rows" in out
    metrics = {name.split("/")[1] for name in found if name.endswith("best_epoch")}
    assert metrics == ({"accuracy", "f1"} if task == "mrpc" else {"pearson", "spearman"}) and (f"{task}/majority" in found) == (task == "mrpc")


@pytest.mark.parametrize("first, second, wanted", [(3, 4, (3, 4)), (9, 3, (5, 3)), (3, 9, (3, 5)), (9, 9, (4, 4)), (5, 9, (4, 4)),
                                                   (9, None, (9,)), (12, None, (9,))])
def test_of_a_pair_that_is_too_long_the_longer_text_is_cut_first(tokenizer, first, second, wanted):
    mark = data.special(tokenizer)
    row, cut = finetune.pair_row(np.arange(100, 100 + first), None if second is None else np.arange(200, 200 + second), mark, 11)
    lengths = np.diff(np.flatnonzero((row == mark.sep) | (row == mark.cls))) - 1
    assert tuple(lengths) == wanted and cut == (sum(wanted) < first + (second or 0)) and row[0] == mark.cls and row[1] == 100


def test_glues_metrics_are_those_of_scikit_learn_and_scipy():
    """Golden values of f1_score, matthews_corrcoef, pearsonr and spearmanr."""
    found, gold = torch.tensor([1, 1, 0, 0, 1, 0, 1, 1]), torch.tensor([1, 0, 0, 0, 1, 1, 1, 0])
    x, y = torch.tensor([.1, 2.5, 2.5, -1, 4]), torch.tensor([0, 1, 3.2, 1, 5], dtype=torch.float64)
    metric = finetune.METRICS
    assert metric["accuracy"](found, gold) == 62.5 and metric["f1"](found, gold) == pytest.approx(200 / 3)
    assert metric["mcc"](found, gold) == pytest.approx(.2581989) and metric["mcc"](found * 0, gold) == 0 == metric["pearson"](x * 0, y)
    assert metric["pearson"](x, y) == pytest.approx(.790738066) and metric["spearman"](x, y) == pytest.approx(.763157895)


def test_of_xnli_the_mean_is_over_its_fifteen_languages():
    values = dict.fromkeys(finetune.XNLI, 50.0) | {"ko": 0.0}
    assert finetune.means(values, "xnli") == {"": 50, "/all": pytest.approx(750 / 16)}


# ---- answers


TEXTS = ["Der Fluß heißt Łódź.", "日本語のテキスト、東京は首都。", "  naïve\u200b café 😀 — “x”", "क्षत्रिय ที่นี่ العربية", "a\n\nb\tc"]


def bert_tokenizer():
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    made.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=list(data.ROLES), show_progress=False))
    return made


@pytest.mark.parametrize("kind", ["bytes", "wordpiece"])
def test_places_lead_back_to_the_very_characters(tokenizer, kind):
    made = tokenizer if kind == "bytes" else bert_tokenizer()
    for text, (ids, places) in zip(TEXTS, finetune.encode_places(made, TEXTS)):
        assert len(ids) == len(places) and (data.encode(made, [text])[0] == ids).all()
        for first in range(len(text)):
            if kind == "wordpiece" and not text[first].isalnum() or text[first].isspace():
                continue                                                 # BERT's normaliser deletes some characters
            last = first + 1
            start, end = finetune.token_span(places, first, last)
            found = text[places[start, 0]:places[end, 1]]
            assert text[first:last] in found and start <= end
            if kind == "bytes":
                assert found.strip() == text[first:last] or len(found.strip()) > 1 and places[start, 0] <= first < places[end, 1]


def test_the_tokens_of_a_word_are_that_word_and_special_tokens_stay_text(tokenizer):
    text = "El «río» [SEP] naïve café 東京は"
    (ids, places), = finetune.encode_places(tokenizer, [text])
    assert not set(ids.tolist()) & set(data.special(tokenizer).ids.tolist())
    for word in ("El", "río", "SEP", "naïve", "café", "東京は"):
        start, end = finetune.token_span(places, text.index(word), text.index(word) + len(word))
        assert text[places[start, 0]:places[end, 1]].strip() == word
        gold = finetune.Question(text, "", [word], text.index(word), ("es", "es"))
        assert finetune.gold_span(gold, places) == (start, end) and finetune.gold_span(gold._replace(start=1), places) == (0, -1)


@pytest.mark.parametrize("count, room, stride", [(1, 10, 4), (10, 10, 4), (11, 10, 4), (13, 10, 5), (97, 10, 0), (384, 300, 128)])
def test_windows_are_those_into_which_tokenizers_cuts_a_long_text(count, room, stride):
    counting = Tokenizer(models.WordLevel({str(i): i for i in range(400)}, unk_token="0"))
    counting.pre_tokenizer = pre_tokenizers.Whitespace()
    counting.enable_truncation(room, stride=stride)
    found = counting.encode(" ".join(map(str, range(count))))
    assert finetune.windows(count, room, stride)[0] == [(each.ids[0], each.ids[-1] + 1) for each in (found, *found.overflowing)]


@pytest.mark.parametrize("count, room, stride", [(0, 10, 4), (7, 10, 4), (10, 10, 4), (11, 10, 4), (97, 10, 4), (97, 10, 0), (300, 120, 60)])
def test_windows_cover_every_token_and_each_has_one_best_context(count, room, stride):
    parts, best = finetune.windows(count, room, stride)
    assert parts[0][0] == 0 and parts[-1][1] == count and all(last - first <= room for first, last in parts)
    assert all(a[1] - b[0] == stride for a, b in zip(parts, parts[1:]))
    for token in range(count):                                           # the rule of BERT's run_squad, written out
        scores = [(min(token - first, last - 1 - token) + .01 * (last - first), -place) for place, (first, last) in enumerate(parts) if first <= token < last]
        assert best[token] == -max(scores)[1]


def test_the_best_span_is_that_of_a_search_over_all(tokenizer):
    rng = np.random.default_rng(0)
    for most in (1, 3, 30):
        outputs, own = torch.tensor(rng.normal(size=(20, 2)), dtype=torch.float32), rng.random(12) < .7
        window = finetune.Window(np.zeros(20), 0, 5, 100, own)
        wanted = max(((outputs[5 + i, 0] + outputs[5 + j, 1]).item(), 100 + i, 100 + j) for i in range(12) for j in range(i, min(12, i + most)) if own[i])
        assert finetune.best_span(outputs, window, 20, most) == (pytest.approx(wanted[0]), *wanted[1:])
    assert finetune.best_span(outputs, window._replace(own=np.zeros(12, bool)), 20, 30)[0] == -math.inf


def test_the_loss_is_the_mean_of_two_cross_entropies_over_each_row():
    outputs, lengths, targets = torch.randn(9, 2, generator=torch.Generator().manual_seed(0)), [4, 5], torch.tensor([[0, 3], [2, 2]])
    plain = np.mean([math.log(sum(math.exp(x) for x in row[:, side])) - row[target[side], side]
                     for row, target in zip(np.split(outputs.double().numpy(), [4]), targets.tolist()) for side in (0, 1)])
    assert finetune.span_loss(outputs, targets, lengths).item() == pytest.approx(plain, rel=1e-6)


def write_qa(folder):
    """SQuAD to train on, and MLQA of two languages, in the form in which they are distributed."""
    words = {"en": "The river {} flows past Bonn and Köln for many days .", "de": "Der Fluß {} fließt an Bonn und Köln vorbei ."}
    names = "Rhine Łaba Főn Øy Aare Tejo Ebro Volga".split()
    ask = {"en": "Which river?", "de": "Welcher Fluß?"}

    def document(lang, question):
        rows = []
        for number, name in enumerate(names):
            context = (words[lang].format(name) + " ") * 1
            rows.append(dict(context=context, qas=[dict(id=str(number), question=ask[question], answers=[dict(text=name, answer_start=context.index(name))])]))
        return json.dumps({"data": [dict(title="rivers", paragraphs=rows)]}, ensure_ascii=False)

    for name, lang, question in [("squad/train-v1.1.json", "en", "en"), ("squad/dev-v1.1.json", "en", "en")] + [
            (f"mlqa/MLQA_V1/test/test-context-{a}-question-{b}.json", a, b) for a in words for b in words]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(document(lang, question), encoding="utf-8")
    return folder


def test_the_whole_matrix_is_tested_and_its_means_are_right(folder, tmp_path, capsys):
    write_qa(tmp_path)
    status, out, err = command(folder, capsys, "--task", "mlqa", "--files", str(tmp_path), "--epochs", "30", "--lr", "3e-3", "--max-length", "64", "--json")
    found = json.loads(out)
    cells = {pair: found[f"mlqa/f1/{pair}"] for pair in ("de-de", "de-en", "en-de", "en-en")}
    assert status == 0 and found["mlqa/f1"] == pytest.approx(sum(cells.values()) / 4)
    assert found["mlqa/f1/xlt"] == pytest.approx((cells["de-de"] + cells["en-en"]) / 2)
    assert found["mlqa/f1/gxlt"] == pytest.approx((cells["de-en"] + cells["en-de"]) / 2)
    assert (found["mlqa/train_rows"], found["mlqa/test_rows"], found["mlqa/answers_lost"], found["mlqa/answers_too_long"]) == (8, 40, 0, 0)
    assert found["squad/f1"] == cells["en-en"] > 60 and found["squad/f1"] >= found["squad/exact"]
    shown = finetune.table(found).splitlines()
    grid = shown.index("mlqa/f1: a row is a language of contexts, a column one of questions")
    assert shown[grid + 1].split() == ["de", "en"] and shown[grid + 3].split() == ["en", f"{cells['en-de']:.2f}", f"{cells['en-en']:.2f}"]


def gold_outputs(made, questions, places):
    """What a model would give that knows the answers: one for their ends, in each window that has the whole."""
    outputs = []
    for window in made:
        question, logits = questions[window.question], torch.zeros(len(window.row), 2)
        start, end = finetune.gold_span(question, places[window.question])
        if window.first <= start and end < window.first + len(window.own):
            logits[window.at + start - window.first, 0] = logits[window.at + end - window.first, 1] = 9
        logits[1:window.at - 1] = 99                                     # it would rather answer with the question
        outputs.append(logits)
    return outputs


def test_gold_answers_score_100_over_windows_scripts_and_rules(tokenizer):
    rows = [("zh", "长" * 90 + "东京是日本的首都。" + "长" * 50, "东京"),
            ("en", "word " * 120 + "It lies in Łódź, near naïve cafés. " + "more " * 30, "naïve cafés"),
            ("hi", "नदी " * 30 + "गंगा भारत में है।", "गंगा"), ("de", "Der Rhein.", "Rhein")]
    questions = [finetune.Question(text, "where is it " * 40, [answer], text.index(answer), (lang, "en")) for lang, text, answer in rows]
    for rules in ("mlqa", "squad", "released"):
        options = argparse.Namespace(n_best=20, max_answer=40, rules=rules)
        made, places, long = finetune.cut_windows(questions, tokenizer, 96, 128)
        assert len(made) > len(questions) + 5 and max(len(window.row) for window in made) == 96 and long == 4
        assert sum(window.own.sum() for window in made) == sum(map(len, places))
        judge = finetune.judge_answers(made, questions, places, options)
        assert judge(gold_outputs(made, questions, places)) == {"f1": 100, "exact": 100}
        assert judge([torch.zeros(len(window.row), 2) for window in made])["exact"] < 50


def test_jsonl_and_squads_json_are_the_same_questions(tmp_path):
    write_qa(tmp_path)
    plain = finetune.read_questions("mlqa", tmp_path)["de-en"]
    (tmp_path / "other" / "qa").mkdir(parents=True)
    lines = [dict(lang_context="de", lang_question="en", context=q.context, question=q.question, answers=[dict(text=q.answers[0], start=q.start)])
             for q in plain]
    (tmp_path / "other" / "qa" / "mlqa_test.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert finetune.read_questions("mlqa", tmp_path / "other") == {"de-en": plain} and len(plain) == 8
    assert plain[1].context[plain[1].start:][:4] == "Łaba" and plain[1].languages == ("de", "en")


# ---- bad input


@pytest.mark.parametrize("flags, message", [
    (["--task", "xmli"], "did you mean xnli?"), (["--task", "sst2", "--max-length", "500"], "16 to 96"),
    (["--task", "sst2", "--epochs", "0"], "epochs 0: it must be 1 to"),
    (["--task", "sst2", "--seeds", "1,1"], "each once"), (["--task", "sst2", "--seeds", "1,x"], "whole numbers"), (["--tusk", "sst2"], "--task"),
    (["--task", "mlqa", "--files", "nowhere"], "python data.py download"),
    (["--task", "sst2", "--device", "abacus"], "'abacus'"),
    (["--task", "sst2", "--seeds", "01,1"], "each once"), (["--task", "sst2", "--train-on", "cola"], "choose data sets with the same labels"),
    (["--task", "mnli", "--train-on", "mnli,mnli"], "names a task twice"), (["--task", "sst2", "--stride", "5"], "--stride is for squad"),
    (["--task", "sst2", "--device", "meta"], "cannot be used here"),
    (["--task", "xnli", "--train-on", "mrpc"], "the labels entailment"), (["--task", "squad", "--train-on", "mnli"], "is trained on SQuAD")])
def test_each_mistake_is_one_line(folder, capsys, flags, message):
    status, out, err = command(folder, capsys, *flags)
    assert (status, out) == (2, "") and message in err.splitlines()[-1] and err.splitlines()[-1].startswith("error: ")


def test_a_vector_that_has_read_nothing_is_refused_and_a_causal_model_with_another_is_not(tokenizer, causes, tmp_path, capsys):
    folder = make_run(tmp_path, tokenizer, causal=True, pool="cls")
    assert "has read nothing" in command(folder, capsys, "--task", "sst2")[2]
    make_run(folder, tokenizer, causal=True, pool="last")
    assert command(folder, capsys, "--task", "sst2", "--epochs", "1", "--limit", "40", "--eval-limit", "20")[0] == 0
