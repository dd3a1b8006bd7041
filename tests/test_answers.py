"""Is an answer right? Tables of written and gold, SQL, likelihoods, whole tasks."""

import contextlib
import json
import sqlite3
import time
from pathlib import Path

import pytest
from test_evaluate import tiny
from test_tasks import results_of

from corpora import evaluation_rows
from corpora.program import BadInput
from data import Tokenizer
from evaluate import Answers
from model import Packed
from tasks import answers, metrics, sandbox
from tasks.probes import TaskOptions


def flags_of(task, pairs, prompts=None, **options):
    """What a judge says of [(written, gold), ...] -> {metric: flags}, {count: number}."""
    written, golds = map(list, zip(*pairs))
    given = Answers(prompts or golds, golds, written, [True] * len(pairs))
    return answers.JUDGES[task](given, TaskOptions(**options))


# ---- GSM8K, NQ-Open, labels, regular expressions


NUMBERS = {
    "so 72.\n#### 72": "72", "#### $1,080.50": "1080.5", "#### $-5": "-5", "#### \u22125": "-5",
    "#### 72.": "72", "#### 007": "7", "#### .5": "0.5", "#### -0": "0", "": None,
    "####72 dollars\n#### 5": "72", "####\n72": None, "#### 7/2": None, "#### 1e5": None}


@pytest.mark.parametrize("text", NUMBERS)
def test_the_answer_of_a_solution_is_the_number_after_four_hashes(text):
    assert answers.gsm8k_answer(text) == NUMBERS[text]


TABLES = {  # task: (written, gold, right, right as released code judges)
    "gsm8k": [
        ("a\n#### 72", "b\n#### 72", True, True), ("a\n#### 72", "b\n#### 7", False, False),
        ("a\n#### 1080", "b\n#### 1,080", True, False), ("", "b\n#### 72", False, False),
        ("a\n#### 72\nand more", "b\n#### 72", True, False)],
    "nq": [
        ("Vancouver", "Vancouver", True, True), ("In Vancouver.", "Vancouver", True, False),
        ("", "Vancouver", False, True), ("V", "Vancouver", False, True),
        ("Gene Kelly", "Debbie Reynolds; Gene Kelly", True, True)],
    "label": [
        (" Good\n", "Good", True), ("Good. I liked it", "Good", True), ("", "Good", False),
        ("Goodness", "Good", False), ("good", "Good", False),
        ("Good enough!", "Good", False), ("Good enough!", "Good enough", True)],
}


@pytest.mark.parametrize("task", TABLES)
def test_each_task_judges_answers_by_its_rule(task):
    table = TABLES[task]
    flags, _ = flags_of(task, [row[:2] for row in table])
    first, second = flags.values()
    assert first == [row[2] for row in table]
    assert second == [row[3] if len(row) > 3 else row[1] == "Good" for row in table]


def test_regular_expressions_that_prove_little_or_are_too_large_are_counted_apart():
    pairs = [("(a)&(b)", "[0-9]&(dog)"), ("a", "~(.*)"), ("a|b", "b|a"), ("b", "a"),
             (".*a.{30}", ".*(a|aa).{30}"), ("same(", "same("), ("a", "a("), ("(" * 3000, "a")]
    flags, counts = flags_of("regex", pairs)
    assert flags["equal"] == [True, False, True, False, False, True, False, False]
    assert flags["equal_not_vacuous"] == [None, None, True, False, False, True, False, False]
    assert counts == {"rows_vacuous": 2, "rows_undecided": 2}


# ---- what may run away


@pytest.fixture(scope="module")
def box():
    with contextlib.closing(sandbox.Sandbox(seconds=20)) as made:
        yield made


FOREVER = "WITH RECURSIVE t(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM t) SELECT max(x) FROM t"
LARGE = ("WITH RECURSIVE t(x) AS (SELECT zeroblob(9000000) UNION ALL SELECT x FROM t LIMIT 60) "
         "SELECT x FROM t")
UNLIKE = "".join(map(chr, range(0x4e00, 0x4e00 + 3000)))  # 3,000 letters to try at each place


@pytest.mark.parametrize("seconds, megabytes, function, arguments", [
    (.3, 1000, "query_result", ["SELECT printf('%.*c', 2000000000, 'x')"]),
    (.3, 1000, "query_result", [FOREVER]), (30, 200, "query_result", [LARGE]),
    (.3, 1000, "regex_equal", [UNLIKE, UNLIKE + "a"]),
], ids=["one step", "many steps", "memory", "expressions"])
def test_what_runs_away_is_ended_and_the_next_question_is_answered(
        seconds, megabytes, function, arguments, database):
    question = (str(database), False) if function == "query_result" else ()
    with contextlib.closing(sandbox.Sandbox(seconds, megabytes)) as small:
        began = time.monotonic()
        assert small.ask(function, *arguments, *question) is None
        assert time.monotonic() - began < 20  # alone they take a minute, or forever
        small.seconds = 20
        assert small.ask("regex_equal", "a|b", "[ab]") is True
        process = small.process
    assert process.poll() is not None  # it does not outlive its owner


# ---- SQL


@pytest.fixture(scope="module")
def databases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("a folder?#%")
    place = folder / "spider" / "database" / "shop"
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


@pytest.fixture(scope="module")
def database(databases):
    return databases / "spider" / "database" / "shop" / "shop.sqlite"


NAMES = "SELECT name FROM item"
VOID = "SELECT name FROM void"


@pytest.mark.parametrize("query, gold, right", [
    ("select NAME AS x from item;", NAMES, True), (f"{NAMES} ORDER BY name", NAMES, True),
    (f"{NAMES} ORDER BY name DESC", f"{NAMES} ORDER BY name", False),
    # Only an ORDER BY of the outermost SELECT counts.
    (NAMES, f"SELECT name FROM ({NAMES} ORDER BY n)", True),
    (f"{NAMES} ORDER BY n", f"{NAMES} -- ORDER BY name", True),
    (NAMES, f"{NAMES} order/* x */\n by name", False),
    ("SELECT n FROM item", "SELECT DISTINCT n FROM item", False),
    ("SELECT sum(n) FROM item", "SELECT 10.0", True), ("SELECT '10'", "SELECT 10", False),
    ("SELECT NULL", "SELECT ''", False), ("SELECT 0.1 + 0.2", "SELECT 0.3", True),
    ("SELECT name FROM caf LIMIT 1", "SELECT name FROM caf LIMIT 1 OFFSET 1", False),  # latin-1
    # nothing, failing, refused: wrong even where gold returns no rows
    ("", VOID, False), ("SELEC name", VOID, False), ("-- SELECT", VOID, False),
    (f"{NAMES}; SELECT 1", NAMES, False), ("DROP TABLE item", VOID, False),
    ("PRAGMA user_version", "SELECT 0", False), ("ATTACH 'new.sqlite' AS b", VOID, False),
    ("VACUUM INTO 'new.sqlite'", VOID, False),
    ("SELECT '\x00'", "SELECT ''", False), ("SELECT '\ud800'", VOID, False),
])
def test_sql_is_judged_by_its_rows_and_writes_nothing(query, gold, right, database, box):
    before = database.read_bytes()
    assert sandbox.same_result(box, query, gold, database) is right
    assert database.read_bytes() == before
    assert [path.name for path in database.parent.iterdir()] == ["shop.sqlite"]
    assert not list(Path(sandbox.__file__).parents[1].glob("new.sqlite"))


def test_queries_are_left_out_and_counted_where_they_cannot_be_judged(databases):
    pairs = [(f"{NAMES} ORDER BY n", NAMES), ("", VOID), ("SELECT 1", "SELECT 1"),
             ("SELECT 1", "SELECT x FROM item")]
    prompts = ["For db_id:[shop] which?"] * 2 + ["For db_id:[farm] a", "For db_id:[shop] b"]
    flags, counts = flags_of("spider", pairs, prompts, files=str(databases))
    assert flags == {"result": [True, False, None, None]}
    assert counts == {"rows_left_out": 2, "rows_left_out/farm": 1, "rows_left_out/shop": 1}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["the cat sees A seven B dogs C and D a house", "A) B) C) D) Good A",
                            "For db_id:[shop] SELECT name FROM item B Very C Good D Bad"], 400)


def causal(**changes):
    shape = dict(vocab=400, positions="learned", causal=True, pool="last")
    return tiny(**(shape | changes))


# ---- extractive answers


@pytest.mark.parametrize("text, language, mlqa, squad", [
    ("a man, an ape, the end", "en", "man ape end", "man ape end"),
    ("“quoted” – $5 + 3", "en", "quoted 5 3", "“quoted” – 5 3"),
    ("những con mèo của tôi", "vi", "con mèo tôi", "những con mèo của tôi"),
    ("في البلد، نعم", "ar", "في بلد نعم", "في البلد، نعم"), ("तीन सौ।", "hi", "तीन सौ", "तीन सौ।"),
    ("《红楼梦》 by Cao", "zh", "红 楼 梦 by cao", "《红楼梦》 by cao"),
    ("東京タワー", "ja", "東 京 タ ワ ー", "東京タワー"),
])
def test_answers_are_normalised_by_the_rules_of_each_scorer(text, language, mlqa, squad):
    assert answers.normalise_answer(text, language, "mlqa") == mlqa
    assert answers.normalise_answer(text, language, "squad") == squad


@pytest.mark.parametrize("prediction, golds, language, rules, exact, f1", [
    ("The Broncos.", ["Denver Broncos"], "en", "squad", 0, 2 / 3),
    ("", ["the"], "en", "mlqa", 0, 0),
    ("gold gold gold", ["gold"], "en", "squad", 0, .5),
    ("12,000", ["Paris", "12000"], "en", "mlqa", 1, 1), ("北京", ["京北"], "zh", "mlqa", 0, 1),
    ("der Rhein", ["Rhein"], "de", "mlqa", 1, 1),
])
def test_extractive_answers_have_these_scores(prediction, golds, language, rules, exact, f1):
    found = answers.qa_scores(prediction, golds, language, rules)
    assert found == {"exact": exact, "f1": pytest.approx(f1)}


# ---- tasks


def test_answers_to_what_was_not_trained_on_are_counted_apart():
    prompts = ["the cat", "seven dogs", "the cat sees", "dogs"]
    golds = ["Katze", "Hunde", "Katze sieht", "sieben"]
    written = ["Katze", "Hunde sieben", "Katze sieht", ""]
    given = Answers(prompts, golds, written, [True, False, False, True])
    judged, _ = metrics.judge_texts(given, None)
    plain = {"exact": 50, "startswith": 75, "stop": 50, "rows": 4}
    assert metrics.answer_scores(given, judged) == plain
    known = {"exact_new_prompt": 50, "rows_new_prompt": 2, "exact_unseen": pytest.approx(100 / 3),
             "rows_unseen": 3}
    found = metrics.answer_scores(given, judged, {"seven dogs", "Katze", "the cat"})
    assert found == plain | known
    found = metrics.answer_scores(given, judged, {*prompts, *golds})
    assert found["rows_unseen"] == 0 and "exact_unseen" not in found  # a share of no rows
    # What was left out does not count.
    some = metrics.answer_scores(given, {"equal": [True, None, False, None]}, {"dogs"})
    assert some["equal"] == 50 and some["rows_unseen"] == 2 and some["rows_new_prompt"] == 2


def rows_of(path, pairs):
    """Evaluation rows (user, assistant) of a file."""
    lines = [json.dumps({"user": user, "assistant": gold}) + "\n" for user, gold in pairs]
    path.write_text("".join(lines), encoding="utf-8")
    return evaluation_rows(str(path), split="all", limit=None)


ENDINGS = ["cat", "cat cat", "dogs", "the cat sees seven dogs"]


def test_letters_are_compared_after_the_prompt_of_hellaswags_own_fields(tokenizer, tmp_path,
                                                                       capsys):
    records = [{"ctx": context, "endings": ENDINGS, "label": label}
               for context, label in (("the cat", 0), ("seven", "3"), ("dogs\nsee " * 20, 2))]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    assert evaluation_rows(path, split="all").texts["assistant"][1] == ENDINGS[3]  # the views
    rows = evaluation_rows(path, ["question", "letter"], "all")
    model = causal(max_positions=64)
    letters = [ids[0] for ids in tokenizer.encode("ABCD")]
    prompts, golds = rows.texts.values()
    assert golds == list("ADC")
    right = []
    for prompt, gold in zip(tokenizer.encode(prompts), golds):
        row = [tokenizer.special.cls, *prompt[:62], tokenizer.special.sep]
        logits = model.logits(model(Packed.of([row], causal=True)))[-1, letters]
        right.append("ABCD"[int(logits.argmax())] == gold)
    model.train()  # the task turns dropout off, and on again
    found = results_of(model, tokenizer, rows, ["hellaswag-letter"])
    assert found["hellaswag-letter/accuracy"] == pytest.approx(100 * sum(right) / 3)
    assert model.training and "1 of 3 texts are longer than 64" in capsys.readouterr().err


@pytest.mark.parametrize("message, task, pairs", [
    ("spider.database is missing", "spider", [("For db_id:[shop] a", "SELECT 1")] * 2),
    ("'no number' does not end in ####", "gsm8k", [("a", "no number")] * 2),
    ("holds no answer", "nq", [("a", " ; ")] * 2),
    (r"begin with For db_id:\[NAME\], and .* has 'the cat'", "spider", [("the cat", "b")] * 2),
    ("row 1 of .* is not such.*question,letter", "hellaswag-letter", [("a\nA) b", "A")] * 2)])
def test_what_cannot_be_judged_is_refused(tokenizer, tmp_path, message, task, pairs):
    rows = rows_of(tmp_path / "a.jsonl", pairs)
    with pytest.raises(BadInput, match=message):
        results_of(causal(), tokenizer, rows, [task], files=str(tmp_path))
