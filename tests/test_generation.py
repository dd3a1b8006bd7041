"""What a model writes or prefers, judged task by task: evaluate.py's answers, with the rules of scores.py."""
import json
import math
import sqlite3
from types import SimpleNamespace

import pytest
import torch

import data
import evaluate
import scores
from data import BadInput
from evaluate import JUDGES, Answers, graded
from model import Model, ModelConfig, save


def judged(task, rows, known=None, prompts=None, **subject):
    """Scores of [(written, gold), ...] as a task gives them."""
    written, golds = map(list, zip(*rows))
    answers = Answers(prompts or [f"prompt {place}" for place in range(len(rows))], golds, written, [True] * len(rows), 0)
    flags, counts = JUDGES[task](answers, SimpleNamespace(progress=False, **subject))
    return flags, graded(answers, flags, known) | counts


# ---- hand-made tables of (written, gold, right, right as released code judges)

TABLES = {
    "regex": [
        ("(dog).*", "dog.*", True), ("", "dog", False), ("dog.* and more", "dog.*", False), ("(b)|(a)", "[ab]", True), ("(dog", "dog", False),
        ("~(cat)", "~(dog)", False), ("[^a]", ".&~(a)", True), (".*(dog).*(cat).*", ".*(cat).*(dog).*", False)],
    "gsm8k": [
        ("It is\n#### 72", "So\n#### 72", True, True), ("It is 72", "So\n#### 72", False, False), ("", "So\n#### 72", False, False),
        ("So\n#### 1,080", "So\n#### 1080", True, False), ("So\n#### $1,080.00.", "So\n#### 1,080", True, False), ("So\n#### 73", "So\n#### 72", False, False),
        ("So\n#### 72 apples", "So\n#### 72", True, False), ("So\n#### 72\n#### 5", "So\n#### 72", True, False), ("So\n#### 7/2", "So\n#### 7", False, False)],
    "nq": [
        ("It was Drew Carey.", "Bill Cullen; Drew Carey", True, False), ("Drew", "Bill Cullen; Drew Carey", False, True), ("", "Vancouver", False, True),
        ("Bill Cullen; Drew Carey; Bob", "Drew Carey", True, True),
        ("vancouver", "Vancouver", False, False), ("in Vancouver, Canada", "Vancouver", True, False)],
    "label": [
        ("Good", "Good", True), ("Good film", "Good", True), ("", "Good", False), ("Goodness", "Good", False), ("Good enough", "Good", False),
        ("Good enough", "Good enough", True), ("good", "Good", False), ("Bad, not Good", "Good", False), (" Bad", "Bad", True)],
    "generate": [("dog", "dog", True, True), ("dog.*", "dog", False, True), ("", "dog", False, False)],
}


@pytest.mark.parametrize("task", TABLES)
def test_each_task_judges_answers_by_its_rule(task):
    flags, found = judged(task, [row[:2] for row in TABLES[task]])
    first, *others = flags
    assert flags[first] == [row[2] for row in TABLES[task]]
    if len(TABLES[task][0]) > 3:
        assert flags[others[0]] == [row[3] for row in TABLES[task]]
    assert found[first] == pytest.approx(100 * sum(row[2] for row in TABLES[task]) / len(TABLES[task])) and found["rows"] == len(TABLES[task])


def test_the_share_of_the_most_frequent_label_stands_beside_the_accuracy():
    assert judged("label", [("Bad", "Good"), ("Good", "Good"), ("", "Good"), ("Bad", "Bad")])[1] | {} == {
        "accuracy": 50, "majority": 75, "stop": 100, "truncated": 0, "prompts_cut": 0, "rows": 4}


def test_regular_expressions_that_prove_little_or_are_too_large_are_counted_apart():
    rows = [("(a)&(b)", "[0-9]&(dog)"), ("a", "~(.*)"), ("a|b", "b|a"), ("b", "a"), (".*a.{30}", ".*a.{29}."), ("same(", "same("), ("a", "a(")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores, "regex_difference", lambda a, b, boundary, limit=0, judge=scores.regex_difference: judge(a, b, boundary, 3000))
        flags, found = judged("regex", rows, known={"~(.*)", "b|a", "prompt 3"})
    assert flags == {"equal": [True, False, True, False, None, True, False], "equal_not_vacuous": [None, None, True, False, None, True, False]}
    assert found["equal"] == pytest.approx(100 * 3 / 6) and found["equal_not_vacuous"] == 50
    assert (found["rows"], found["rows_vacuous"], found["rows_too_large"]) == (7, 2, 1)
    assert (found["rows_unseen"], found["equal_unseen"]) == (4, 50) and (found["rows_new_prompt"], found["equal_new_prompt"]) == (5, 60)


@pytest.fixture(scope="module")
def databases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spider")
    (folder / "database" / "zoo").mkdir(parents=True)
    with sqlite3.connect(folder / "database" / "zoo" / "zoo.sqlite") as connection:
        connection.executescript("CREATE TABLE animal (name TEXT, age REAL); INSERT INTO animal VALUES ('cat', 3), ('dog', 5), ('ant', 1); "
                                 "CREATE TABLE plant (name TEXT);")
    connection.close()
    return folder


def test_queries_are_judged_by_what_they_return(databases):
    rows = [  # written, gold, right, right as released code judges
        ("SELECT name FROM animal ORDER BY age", "SELECT name FROM animal", True, False),              # permuted rows
        ("SELECT name FROM animal ORDER BY age", "SELECT name FROM animal ORDER BY age DESC", False, False),
        ("SELECT nme FROM animal", "SELECT name FROM plant", False, True),                             # it fails, gold returns nothing
        ("", "SELECT name FROM plant", False, True), ("", "SELECT name FROM animal", False, False),
        ("SELECT name FROM animal; and more", "SELECT name FROM animal", False, True), ("DELETE FROM animal", "SELECT name FROM animal", False, False),
        ("SELECT count(*) FROM animal", "SELECT 3", True, True)]
    prompts = ["For db_id:[zoo]\n\nWhich?"] * len(rows) + ["For db_id:[farm]\n\nWhich?"] * 2 + ["For db_id:[zoo] Which?"]
    flags, found = judged("spider", [row[:2] for row in rows] + [("SELECT 1", "SELECT 1")] * 2 + [("SELECT 1", "SELECT x FROM animal")], known=set(),
                          prompts=prompts, databases=databases)
    assert flags == {"result": [row[2] for row in rows] + [None] * 3, "released": [row[3] for row in rows] + [None] * 3}
    assert found["result"] == found["result_unseen"] == 25 and (found["rows"], found["rows_unseen"]) == (11, 8)
    assert {name: value for name, value in found.items() if "left" in name} == {"rows_left_out": 3, "rows_left_out/farm": 2, "rows_left_out/zoo": 1}


# ---- tasks


@pytest.fixture(scope="module")
def tokenizer():
    return data.train_tokenizer(["the cat sees seven dogs", "A) B) C) D) cat", "For db_id:[zoo] SELECT name FROM animal"], 400)


def tiny(causal=True, longest=64):
    torch.manual_seed(1)
    return Model(ModelConfig(vocab=400, width=16, layers=1, heads=2, hidden=32, max_length=longest, pool="last", causal=causal, dropout=.1))


def subject(tokenizer, path, rows, model=None, **more):
    """Of rows (user, assistant)."""
    path = path.with_stem(f"{path.stem}{len(list(path.parent.iterdir()))}")
    path.write_text("".join(json.dumps({"user": user, "assistant": assistant}) + "\n" for user, assistant in rows), encoding="utf-8")
    return evaluate.Subject(model or tiny(), tokenizer, str(path), split="all", **more)


def test_answers_are_written_once_for_all_tasks_and_cut_where_it_is_said(tokenizer, tmp_path, monkeypatch, databases):
    calls, plain = [], evaluate.generate
    monkeypatch.setattr(evaluate, "generate", lambda *args, **more: calls.append(args) or plain(*args, **more))
    rows = [(f"For db_id:[zoo] number {place} " + "dogs " * 40 * (place == 5), f"SELECT {place} -- #### {place}") for place in range(6)]
    asked = subject(tokenizer, tmp_path / "a.jsonl", rows, max_new=4, databases=databases, known={"SELECT 1 -- #### 1"})
    found = evaluate.run(asked, [*JUDGES])
    assert len(calls) == 1 and calls[0][3] == 4 and len(calls[0][1]) == 6 and max(map(len, calls[0][1])) == 60      # a long prompt leaves room for 4
    for task, first in zip(JUDGES, ("exact", "equal", "number", "result", "substring", "accuracy")):
        assert found[f"{task}/rows"] == 6 and found[f"{task}/prompts_cut"] == pytest.approx(100 / 6)
        assert found[f"{task}/stop"] + found[f"{task}/truncated"] == 100 and f"{task}/{first}_new_prompt" in found
    assert found["generate/rows_unseen"] == 5
    lines = evaluate.table(found).splitlines()
    assert len(lines) == len(found) and all("rows" in line or "%" in line for line in lines)
    assert "it returns what the gold query returns" in "\n".join(lines) and "rows_left_out" in "\n".join(lines)


ENDINGS = ["cat", "cat cat", "dogs", "the cat sees seven dogs"]


def question(context, right, endings=ENDINGS):
    return context + "".join(f"\n{letter}) {text}" for letter, text in zip("ABCD", endings)), right


def test_endings_are_compared_after_the_context_alone_and_letters_after_the_whole_prompt(tokenizer, tmp_path, monkeypatch):
    questions = [question("the cat", "A"), question("seven", "D"), question("dogs\nsee " * 20, "C")]
    asked = subject(tokenizer, tmp_path / "a.jsonl", questions)
    prompts = asked.texts["user"]
    contexts = ["the cat", "seven", ("dogs\nsee " * 20)]
    model = asked.model.eval()
    wanted = scores.option_likelihoods(model, tokenizer, contexts, [ENDINGS] * 3)
    model.train()                                                        # the task turns dropout off, and on again
    found = evaluate.run(asked, ["hellaswag", "hellaswag-letter"])
    assert model.training
    best = lambda values: "ABCD"[max(range(4), key=values.__getitem__)]
    share = lambda chosen: 100 * sum(map(str.__eq__, chosen, "ADC")) / 3
    assert found["hellaswag/accuracy"] == pytest.approx(share([best(each.sums) for each in wanted]))
    assert found["hellaswag/accuracy_normalised"] == pytest.approx(share([best(each.means) for each in wanted]))
    assert found["hellaswag/prompts_cut"] == pytest.approx(100 / 3) == found["hellaswag-letter/prompts_cut"] and found["hellaswag/rows"] == 3
    letters = scores.letter_choices(model.eval(), tokenizer, prompts)
    assert found["hellaswag-letter/accuracy"] == pytest.approx(share([letter for letter, _ in letters])) and "hellaswag-letter/released" in found
    assert len(evaluate.table(found).splitlines()) == len(found)
    likely = [scores.Likelihood([-9., -2., -3., -4.], [-1., -2., -3., -4.], 0)] * 3
    monkeypatch.setattr(scores, "option_likelihoods", lambda model, tokenizer, *given: likely if given == (contexts, [ENDINGS] * 3, None) else None)
    assert [evaluate.run(asked, ["hellaswag"])[f"hellaswag/accuracy{name}"] for name in ("", "_normalised")] == [0, pytest.approx(100 / 3)]
    monkeypatch.undo()
    roomy = evaluate.run(subject(tokenizer, tmp_path / "a.jsonl", questions, tiny(longest=256)), ["hellaswag-letter"])
    assert (roomy["hellaswag-letter/prompts_cut"], roomy["hellaswag-letter/prompts_cut/released"]) == (0, pytest.approx(100 / 3))     # 128 tokens
    model.embed.weight.data.fill_(math.nan)
    with pytest.raises(BadInput, match="has diverged"):
        evaluate.run(asked, ["hellaswag"])


def test_what_a_task_cannot_judge_is_refused_before_anything_is_written(tokenizer, tmp_path, databases, monkeypatch):
    monkeypatch.setattr(evaluate, "generate", None)
    zoo, path = [("For db_id:[zoo] a", "SELECT 1")] * 2, tmp_path / "a.jsonl"
    for message, task, asked in [
        (r"spider.database is missing.*put that into", "spider", subject(tokenizer, path, zoo, files=tmp_path)),
        ("has no folder database with DB/DB.sqlite", "spider", subject(tokenizer, path, zoo, databases=tmp_path)),
        (r"begin with For db_id:\[NAME\], and .* has 'the cat'", "spider", subject(tokenizer, path, [*zoo, ("the cat", "b")], databases=databases)),
        ("row 2 of .* is not such a question", "hellaswag", subject(tokenizer, path, [question("a", "A"), question("b", "E")])),
        ("row 1 of .* is not such a question", "hellaswag-letter", subject(tokenizer, path, [("a\nA) b\nB) c", "A"), question("b", "D")])),
        *(("needs a causal model", task, subject(tokenizer, path, zoo, tiny(causal=False))) for task in ("regex", "spider", "hellaswag")),
    ]:
        with pytest.raises(BadInput, match=message):
            evaluate.run(asked, [task])
    (tmp_path / "src.txt").write_text("the cat\ndogs\n", encoding="utf-8")
    with pytest.raises(BadInput, match=r"has 1: choose two with --langs a,b \(of parallel text files, give each an ending of its own"):
        evaluate.run(evaluate.Subject(tiny(), tokenizer, str(tmp_path / "src.txt"), split="all"), ["regex"])
    with pytest.raises(BadInput, match="--max-new 0 leaves no room"):
        subject(tokenizer, path, zoo, max_new=0)


def test_a_gold_answer_that_is_no_answer_of_the_task_says_so(tokenizer, tmp_path):
    with pytest.raises(BadInput, match="is this GSM8K"):
        evaluate.run(subject(tokenizer, tmp_path / "a.jsonl", [("the cat", "seven"), ("dogs", "#### 3")]), ["gsm8k"])


# ---- data as it is published, and the command


def test_files_as_they_are_published_are_read(tmp_path):
    for name, lines, wanted in [
        ("gsm8k.jsonl", [{"question": "How many?", "answer": "2\n#### 2"}], [("How many?", "2\n#### 2")]),
        ("nq.jsonl", [{"question": "who", "answer": ["Bill Cullen", "Drew Carey"]}, {"question": "where", "answer": ["Rome"]}],
         [("who", "Bill Cullen; Drew Carey"), ("where", "Rome")]),
        ("hellaswag.jsonl", [{"ind": 4, "ctx": "A man", "endings": ["sits.", "runs.", "eats.", "is."], "label": label} for label in (3, "0")],
         [question("A man", "D", ["sits.", "runs.", "eats.", "is."]), question("A man", "A", ["sits.", "runs.", "eats.", "is."])]),
    ]:
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        assert [*zip(*data.texts(str(tmp_path / name), holdout=False).values())] == wanted
    for bad in ({"ctx": "A man", "endings": ["a", "b"], "label": ""}, {"ctx": "A man", "endings": ["a", "b"], "label": 2}, {"question": "who", "answer": [1]}):
        (tmp_path / "bad.jsonl").write_text(json.dumps(bad) + "\n", encoding="utf-8")
        with pytest.raises(BadInput, match="no known keys|not a string"):
            data.texts(str(tmp_path / "bad.jsonl"), holdout=False)


def test_the_command_judges_answers_and_writes_the_numbers_down(tokenizer, tmp_path, capsys):
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("".join(json.dumps({"question": f"the cat {place}", "answer": f"so\n#### {place}"}) + "\n" for place in range(40)), encoding="utf-8")
    folder = tmp_path / "run"
    folder.mkdir()
    save(tiny(), folder / "model.pt")
    data.write_tokenizer(tokenizer, folder / "tokenizer.json")
    (folder / "log.jsonl").write_text(json.dumps({"config": {"data": str(path), "langs": ""}}) + "\n", encoding="utf-8")
    assert evaluate.main([str(folder), "--tasks", "gsm8k,regex", "--max-new", "3", "--device", "cpu", "--json"]) == 0
    written = json.loads((folder / "eval.json").read_text(encoding="utf-8"))
    assert written == json.loads(capsys.readouterr().out) and written["gsm8k/rows_unseen"] == written["regex/rows"] == 4
    assert {"gsm8k/number", "gsm8k/released", "gsm8k/truncated", "regex/equal"} <= written.keys()
    assert evaluate.main([str(folder), "--tasks", "gsm8k", "--max-new", "-1", "--device", "cpu"]) == 2
    assert evaluate.main([str(folder), "--tasks", "spider", "--files", str(tmp_path), "--device", "cpu"]) == 2
    assert capsys.readouterr().err.count("error: ") == 2
