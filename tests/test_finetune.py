"""Fine-tuning: the loop, rows of pairs, places of answers, windows, the matrix of languages."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from test_evaluate import tiny, write_run

import evaluate
from corpora import toy
from corpora.program import exit_status
from data import Tokenizer
from model import Packed
from tasks import __main__ as command
from tasks import finetune, sets

ROOT = Path(__file__).parent.parent
CAUSE = {}
for lang in ("en", "de"):  # is there a because or although?
    meanings = toy.meanings("train", 300)
    CAUSE[lang] = [(toy.render(meaning, lang), int(bool(meaning.link))) for meaning in meanings]


@pytest.fixture(scope="module")
def tokenizer():
    texts = [text for rows in CAUSE.values() for text, _ in rows]
    return Tokenizer.train([*texts, "日本語のテキスト, naïve café"], 700)


@pytest.fixture
def new_run(tokenizer, tmp_path):
    def make(name="run", **changes):
        shape = dict(vocab=700, layers=1, max_positions=96, pool="mean")
        return write_run(tmp_path / name, tiny(**(shape | changes)), tokenizer)
    return make


@pytest.fixture
def causes(monkeypatch):
    """The embedded grammar in place of a downloaded set."""
    def read(name, folder, split, lang="en"):
        rows = CAUSE[lang][:200] if split == "train" else CAUSE[lang][200:]
        return sets.Rows([text for text, _ in rows], None, [label for _, label in rows])

    monkeypatch.setattr(sets, "read_set", read)
    monkeypatch.setattr(sets, "made", lambda *_: "")
    monkeypatch.setattr(finetune, "TESTED", {"xnli": ["en", "de"]})


def asked(folder, capsys, *flags):
    """-> status, what was printed (of JSON the numbers), what was said."""
    status = exit_status(command.main, ["finetune", str(folder), "--device", "cpu", *flags])
    shown = capsys.readouterr()
    found = {}
    for line in shown.out.splitlines() if "--json" in flags else ():
        found |= json.loads(line)
    return status, found or shown.out, shown.err


# ---- the loop


def test_what_is_learned_is_tested_zero_shot_and_the_control_has_fresh_weights(new_run, causes,
                                                                               capsys):
    folder = new_run()
    status, found, err = asked(folder, capsys, "--task", "xnli", "--untrained", "--seeds", "1,2",
                               "--epochs", "4", "--lr", "1e-2", "--json", "--out",
                               str(folder / "xnli.json"))
    written = json.loads((folder / "xnli.json").read_text(encoding="utf-8"))
    assert status == 0 and found.items() <= written.items() and found["xnli/train_rows"] == 200
    assert found["mnli/accuracy"] > 85 > 65 > found["mnli/majority"] >= 50
    each = [found[f"xnli/accuracy/{lang}"] for lang in ("en", "de")]
    assert found["xnli/accuracy"] == pytest.approx(sum(each) / 2)
    values = [found[f"xnli/accuracy/de/seed_{seed}"] for seed in (1, 2)]
    assert found["xnli/accuracy/de"] == pytest.approx(np.mean(values))
    assert found["xnli/accuracy/de/sd"] == pytest.approx(np.std(values, ddof=1))
    assert {"xnli/accuracy/de/untrained", "mnli/accuracy/untrained/seed_2"} <= set(found)
    losses = [float(line.split("loss ")[1]) for line in err.splitlines() if ", epoch " in line]
    assert len(losses) == 16 and losses[0] > .3 > .1 > losses[3]


def test_a_diverged_run_writes_nothing(new_run, causes, capsys):
    folder = new_run()
    before = sorted(folder.iterdir())
    status, out, err = asked(folder, capsys, "--task", "sst2", "--lr", "1e30", "--epochs", "1")
    assert (status, out) == (2, "") and "has diverged" in err and sorted(folder.iterdir()) == before


def test_a_head_reads_the_pooling_that_is_asked_for(new_run):
    rows = [np.arange(5), np.arange(3)]
    model = finetune.Finetuned(evaluate.open_run(new_run()).model, 2, False, 4, "cls").eval()
    states = torch.stack([model.encoder(Packed.of([row]))[0] for row in rows])
    assert torch.allclose(model(Packed.of(rows)), model.head(states), atol=1e-6)


# ---- classification


def write_pairs(folder, texts=("a b", "c")):
    """MRPC and STS-B, tiny."""
    headers = {"mrpc": "sentence1\tsentence2\tlabel", "stsb_multi": "s1_en\ts2_en\tscore"}
    for name, header in headers.items():
        for split, count in (("train", 30), ("test", 12)):
            rows = "".join("\t".join([*texts, f"{row % 2}\n"]) for row in range(count))
            (folder / f"{name}_{split}.tsv").write_text(f"{header}\n{rows}", encoding="utf-8")


def test_several_tasks_have_glues_metrics_and_their_mean(new_run, tmp_path, capsys):
    write_pairs(tmp_path)
    flags = ["--files", str(tmp_path), "--epochs", "1", "--json", "--out", str(tmp_path / "all")]
    status, found, _ = asked(new_run(), capsys, "--task", "mrpc,stsb", "--untrained", *flags)
    assert status == 0 and found["mrpc/train_rows"] == found["stsb/train_rows"] == 30
    assert {"mrpc/f1", "mrpc/majority", "stsb/spearman"} <= set(found)
    assert "stsb/majority" not in found and "glue/mean" not in found
    for kind in ("", "/untrained"):
        each = [found[name + kind] for name in ("mrpc/accuracy", "stsb/pearson")]
        assert found[f"glue/mean/of_2{kind}"] == pytest.approx(sum(each) / 2)
    assert found.items() <= json.loads((tmp_path / "all").read_text(encoding="utf-8")).items()


@pytest.mark.parametrize("first, second, wanted", [
    (3, 4, (3, 4)), (9, 3, (5, 3)), (3, 9, (3, 5)), (5, 9, (4, 4)), (12, None, (9,))])
def test_of_a_pair_that_is_too_long_the_longer_text_is_cut_first(tokenizer, first, second, wanted):
    special = tokenizer.special
    b = None if second is None else np.arange(200, 200 + second)
    row = finetune.pair_row(np.arange(100, 100 + first), b, special, [special.sep], 11)
    lengths = np.diff(np.flatnonzero((row == special.sep) | (row == special.cls))) - 1
    assert tuple(lengths) == wanted and row[0] == special.cls and row[1] == 100


# ---- answers


WORDS = {"en": ("The river {} flows past Bonn and Köln for many days . ", "Which river?"),
         "de": ("Der Fluß {} fließt an Bonn und Köln vorbei . ", "Welcher Fluß?")}


def write_qa(folder):
    """SQuAD to train on, a question a line, and as they are distributed SQuAD's dev rows and MLQA
    of two languages."""
    files = {"squad/dev-v1.1.json": ("en", "en")}
    for a in WORDS:
        files |= {f"mlqa/MLQA_V1/test/test-context-{a}-question-{b}.json": (a, b) for b in WORDS}
    for path, (lang, asking) in files.items():
        documents = []
        lines = []
        for name in "Rhine Łaba Főn Øy Aare Tejo Ebro Volga".split():
            context = WORDS[lang][0].format(name)
            answers = [{"text": name, "answer_start": context.index(name)}]
            asked = {"question": WORDS[asking][1], "answers": answers}
            documents.append({"paragraphs": [{"context": context, "qas": [asked]}]})
            lines.append(json.dumps(asked | {"context": context}))
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(json.dumps({"data": documents}), encoding="utf-8")
        if path.startswith("squad"):
            (folder / "qa").mkdir()
            (folder / "qa" / "squad_v1.1_train.jsonl").write_bytes("\n".join(lines).encode())


def test_the_whole_matrix_is_tested_and_learned(new_run, tmp_path, capsys):
    write_qa(tmp_path)
    status, found, _ = asked(new_run(), capsys, "--task", "mlqa", "--files", str(tmp_path),
                             "--epochs", "30", "--lr", "3e-3", "--max-length", "64", "--json")
    cells = [found[f"mlqa/f1/{pair}"] for pair in ("de-de", "en-en", "de-en", "en-de")]
    assert status == 0 and found["mlqa/f1"] == pytest.approx(sum(cells) / 4)
    assert found["mlqa/f1/xlt"] == pytest.approx(sum(cells[:2]) / 2)
    assert found["mlqa/f1/gxlt"] == pytest.approx(sum(cells[2:]) / 2)
    assert found["mlqa/train_rows"] == 8
    assert found["squad/f1"] == cells[1] > 60 and found["squad/f1"] >= found["squad/exact"]


def test_gold_answers_score_100_over_windows_scripts_and_rules(tokenizer):
    rows = [("zh", "长" * 90 + "东京是日本的首都。" + "长" * 50, "东京"),
            ("en", "word " * 120 + "In Łódź, near naïve cafés. " + "more " * 30, "naïve cafés"),
            ("hi", "नदी " * 30 + "गंगा भारत में है।", "गंगा"), ("de", "Der Rhein.", "Rhein")]
    questions = [finetune.Question(text, "where is it " * 40, [answer], text.index(answer),
                                   (lang, "en")) for lang, text, answer in rows]
    made, places = finetune.cut_windows(questions, tokenizer, [tokenizer.special.sep], 96)
    assert max(len(window.row) for window in made) == 96
    # Each window has half of the one before; the last ends where the context does
    ends = {window.question: window.first + window.count for window in made}
    assert list(ends.values()) == [len(one) for one in places] and len(made) > 9
    for left, right in zip(made, made[1:]):
        assert right.first in (0, left.first + left.count - left.count // 2)
    outputs = []  # of a model that knows the answers
    for window in made:
        logits = torch.zeros(len(window.row), 2)
        start, end = finetune.gold_span(questions[window.question], places[window.question])
        if window.first <= start and end < window.first + window.count:
            logits[window.at + start - window.first, 0] = 9
            logits[window.at + end - window.first, 1] = 9
        logits[1:window.at - 1] = 99  # it would rather answer with the question
        outputs.append(logits)
    for rules in ("mlqa", "squad"):
        judge = finetune.judge_answers(made, questions, places, rules)
        assert judge(outputs) == {"f1": 100, "exact": 100}
        assert judge([torch.zeros(len(window.row), 2) for window in made])["exact"] < 50


# ---- bad input


@pytest.mark.parametrize("flags, message", [
    ("--task xmli", "did you mean xnli?"), ("--task ", "--task "),
    ("--task squad --max-length 3", "8 to 96 tokens"),
    ("--task sst2 --lr nan", "--lr nan: it must be a number above 0"),
    ("--task sst2 --seeds 1,x", "whole numbers"),
    ("--task glue --files nowhere", "python -m corpora.download"),
    ("--task squad --files FILES", "not questions with answers"),
    ("--task sst2", "has read nothing")])
def test_each_mistake_is_one_line(new_run, tmp_path, refused, flags, message):
    (tmp_path / "squad").mkdir()
    text = '{"data": [{"paragraphs": [{"context": "", "qas": [{"answers": [{"text": 1}]}]}]}]}'
    (tmp_path / "squad" / "dev-v1.1.json").write_text(text, encoding="utf-8")
    # A model that reads left to right has read nothing at its first token.
    shape = dict(causal=True, pool="cls") if "nothing" in message else {}
    flags = flags.replace("FILES", str(tmp_path))
    assert message in refused(command.main, f"finetune {new_run(**shape)} --device cpu {flags}")
