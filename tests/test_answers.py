"""Judging answers: tables of generated and gold texts, SQL, letters, and whole tasks."""

import sqlite3
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_evaluate import tiny
from test_tasks import flags_with, results_of

from base.common import BadInput
from base.tokenizer import Tokenizer
from corpora import EvaluationRows
from data import Packed
from evaluate import Answers
from tasks import answers, questions

NUMBERS = {"so 72.\n#### 72": 72, "#### $1,080.50": 1080.5, "#### $-5": -5, "#### 72.": 72,
           "": None, "####72 dollars\n#### 5": 72, "####\n72": None, "#### 72/2": None}


def test_the_answer_of_a_solution_is_the_number_after_four_hashes():
    assert {text: answers.gsm8k_answer(text) for text in NUMBERS} == NUMBERS


@pytest.mark.parametrize("task, rows", [  # written, gold, right, right by the released code
    ("gsm8k", [
        ("a\n#### 72", "b\n#### 72", True, True), ("a\n#### 72", "b\n#### 7", False, False),
        ("a\n#### 1080", "b\n#### 1,080", True, False), ("", "b\n#### 72", False, False),
        ("a\n#### 72\nand more", "b\n#### 72", True, False)]),
    ("nq", [
        ("Vancouver", "Vancouver", True, True), ("In Vancouver.", "Vancouver", True, False),
        ("", "Vancouver", False, True), ("V; W", "Vancouver", False, True),
        ("Gene Kelly", "Debbie Reynolds; Gene Kelly", True, True)]),
    ("label", [
        (" Good\n", "Good", True), ("Good. I liked it", "Good", True), ("", "Good", False),
        ("Goodness", "Good", False), ("Very good", "Very good", True)]),
    ("generate", [(" a|b\n", "a|b", True, True), ("b|a", "a|b", False, False),
                  ("a|b.", "a|b", False, True), ("", "a|b", False, False)])])
def test_each_task_judges_answers_by_its_rule(task, rows):
    written, golds, *decisions = zip(*rows)
    found = answers.JUDGES[task](Answers(golds, golds, written, ()), flags_with())
    assert list(map(tuple, found.values())) == decisions


# ---- SQL


@pytest.fixture(scope="module")
def databases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("a folder?#%")
    place = folder / "database" / "shop"
    place.mkdir(parents=True)
    with sqlite3.connect(place / "shop.sqlite") as made:
        made.executescript("""
            CREATE TABLE item (name TEXT, price REAL, n INTEGER, note TEXT);
            INSERT INTO item VALUES ('pen', 1.5, 2, NULL), ('ink', 3.0, 1, 'a;b'),
                ('pad', 2.25, 2, ''), ('cap', 3.0, 5, 'x');
            CREATE TABLE void (name TEXT); CREATE TABLE caf (name TEXT);
            INSERT INTO caf VALUES (CAST(x'436166e9' AS TEXT)), (CAST(x'436166e8' AS TEXT));""")
    made.close()
    return folder


NAMES = "SELECT name FROM item"
VOID = "SELECT name FROM void"
FOREVER = "WITH RECURSIVE t(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM t) SELECT {} FROM t"


@pytest.mark.parametrize("query, gold, right", [
    ("select NAME AS x from item;", NAMES, True), (f"{NAMES} ORDER BY name", NAMES, True),
    (f"{NAMES} ORDER BY name DESC", f"{NAMES} ORDER BY name", False),
    ("SELECT n FROM item", "SELECT DISTINCT n FROM item", False),
    ("SELECT '10'", "SELECT 10", False),
    ("SELECT 0.1 + 0.2", "SELECT 0.3", True),
    ("SELECT name FROM caf LIMIT 1", "SELECT name FROM caf LIMIT 1 OFFSET 1", False),  # latin-1
    # A query that fails or may not run is wrong, also if gold returns no rows.
    ("SELEC name", VOID, False), (f"{NAMES}; SELECT 1", NAMES, False),
    ("DROP TABLE item", VOID, False), ("ATTACH 'new.sqlite' AS b", VOID, False),
    ("VACUUM INTO 'new.sqlite'", VOID, False), ("SELECT load_extension('x')", VOID, False),
    ("SELECT fts3_tokenizer('a', x'4141414141414141')", VOID, False),
    (FOREVER.format("max(x)"), VOID, False), ("SELECT printf('%.*c', 2000000, 'x')", VOID, False),
])
def test_sql_is_judged_by_its_rows_and_writes_nothing(query, gold, right, databases, monkeypatch):
    monkeypatch.setattr(answers, "STEPS", 500_000)
    database = databases / "database" / "shop" / "shop.sqlite"
    before = database.read_bytes()
    assert answers.same_result(query, gold, database) is right
    assert database.read_bytes() == before
    assert [path.name for path in database.parent.iterdir()] == ["shop.sqlite"]
    assert not Path("new.sqlite").exists()


def test_rows_of_spider_that_cannot_be_judged_are_left_out(databases, capsys):
    pairs = [(f"{NAMES} ORDER BY n", NAMES), ("", VOID), ("SELECT 1", "SELECT 1"),
             ("SELECT 1", "SELECT x FROM item"), ("SELECT 1", "SELECT 1")]
    prompts = [*["For db_id:[shop] which?"] * 2, "For db_id:[farm] a", "For db_id:[shop] b", "c"]
    written, golds = zip(*pairs)
    evaluation = SimpleNamespace(answers=Answers(prompts, golds, written, [True] * 5))
    scores = answers.answer_task("spider", evaluation, flags_with(files=databases))
    assert scores == {"result": 50, "rows": 5, "stop": 100}
    assert "leaves out 3 rows" in capsys.readouterr().err
    none = SimpleNamespace(answers=Answers(["c"], ["SELECT 1"], ["SELECT 1"], [True]))
    with pytest.raises(BadInput, match="spider left out all rows"):
        answers.answer_task("spider", none, flags_with(files=databases))


# ---- extractive answers


@pytest.mark.parametrize("text, language, wanted", [
    ("a man, an ape, the end", "en", "man ape end"), ("“quoted” – $5 + 3", "en", "quoted 5 3"),
    ("những con mèo của tôi", "vi", "con mèo tôi"), ("في البلد، نعم", "ar", "في بلد نعم"),
    ("《红楼梦》 by Cao", "zh", "红 楼 梦 by cao")])
def test_answers_are_normalized_by_the_rules_of_their_language(text, language, wanted):
    assert questions.normalize_answer(text, language) == wanted


@pytest.mark.parametrize("prediction, golds, language, exact, f1", [
    ("The Broncos.", ["Denver Broncos"], "en", 0, 2 / 3), ("", ["the"], "en", 0, 0),
    ("gold gold gold", ["gold"], "en", 0, .5), ("12,000", ["Paris", "12000"], "en", 1, 1),
    ("北京", ["京北"], "zh", 0, 1), ("der Rhein", ["Rhein"], "de", 1, 1)])
def test_extractive_answers_have_these_scores(prediction, golds, language, exact, f1):
    found = questions.qa_scores(prediction, golds, language)
    assert found == {"exact": exact, "f1": pytest.approx(f1)}


# ---- tasks


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["the cat sees A seven B dogs C and D a house", "A) B) C) D) Good A"],
                           400)


def test_letters_are_compared_after_the_prompt(tokenizer, capsys):
    endings = "".join(f"\n{letter}) {text}" for letter, text in zip("ABCD", ("cat", "A", "a", "D")))
    prompts = [context + endings for context in ("the cat", "seven", "dogs\nsee " * 20)]
    model = tiny("last", True, vocab=400, max_positions=64)
    letters = [ids[-1] for ids in tokenizer.encode("ABCD")]
    right = []
    for prompt, gold in zip(tokenizer.encode(prompts), "ADC"):
        row = [tokenizer.special.cls, *prompt[:62], tokenizer.special.sep]
        logits = model.logits(model(Packed.of([row], causal=True)))[-1, letters]
        right.append("ABCD"[int(logits.argmax())] == gold)
    model.train()  # the task turns dropout off, and on again
    rows = EvaluationRows("x", {"user": prompts, "assistant": list("ADC")})
    found = results_of(model, tokenizer, rows, ["hellaswag-letter"])
    assert found["hellaswag-letter/accuracy"] == pytest.approx(100 * sum(right) / 3)
    assert model.training and "1 of 3 texts are longer than 64" in capsys.readouterr().err


@pytest.mark.parametrize("message, task, prompt, gold", [
    ("'no number' does not end in ####", "gsm8k", "a", "no number"),
    ("the lines A", "hellaswag-letter", "a\nA) b", "A")])
def test_what_cannot_be_judged_is_refused(tokenizer, message, task, prompt, gold):
    rows = EvaluationRows("x", {"user": [prompt] * 2, "assistant": [gold] * 2})
    with pytest.raises(BadInput, match=message):
        results_of(tiny("last", True, vocab=400), tokenizer, rows, [task])


def test_the_baselines_answer_by_frequency_and_by_the_nearest_text(tokenizer):
    rows = EvaluationRows("x", {"user": ["lines with a Dog", "cats!", "zebras"],
                                "assistant": ["dog", "cat", "none"]})
    train = [("lines with a cat", "cat"), ("a dog", "dog"), ("two dogs", "none"),
             ("three dogs", "none"), ("cats", "cat"), ("four dogs", "none"), ("", "cat")]
    found = results_of(tiny("last", True, vocab=400), tokenizer, rows, ["baselines"],
                       train_rows=train)
    # "lines with a Dog" is nearest to "lines with a cat", and "zebras" to the first of all rows.
    assert found == {"baselines/rows": 3, "baselines/frequent/exact": pytest.approx(100 / 3),
                     "baselines/nearest/exact": pytest.approx(100 / 3)}
    with pytest.raises(BadInput, match="needs the training data"):
        results_of(tiny("last", True, vocab=400), tokenizer, rows, ["baselines"])
