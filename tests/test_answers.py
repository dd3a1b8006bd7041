import itertools
import random
import re
import sqlite3
import time

import pytest
import torch

import data
import scores
from data import BadInput
from model import Model, ModelConfig, Packed

# ---- regular expressions: by hand


def option_likelihood(model, tokenizer, prompt, options, header=None, stop=True):
    """One question alone."""
    return scores.option_likelihoods(model, tokenizer, [prompt], [options], None if header is None else [header], stop)[0]


@pytest.mark.parametrize("generated, gold, right", [
    ("[ab]", "(a)|(b)", True), ("a|b", "b|a", True), ("(a&b)|c", "c", True), ("~(~(dog))", "dog", True), ("a+", "aa*", True),
    ("a{2,}", "aaa*", True), ("a{1,3}", "a(a(a)?)?", True), ("a{2}", "aa", True), ("(.*)(dog).*", ".*dog.*", True), ("(a*)*", "a*", True),
    ("~(.*dog.*)&~(.*truck.*)", "~((.*dog.*)|(.*truck.*))", True), ("[A-Za-z]", "[A-Z]|[a-z]", True), ("[^a]", ".&~(a)", True),
    ("[a\\-z]", "a|z|\\-", True), ("[-az]", "[az-]", True), (r"\d", "[0-9]", True), (r"\W", "[^A-Za-z0-9_]", True), (r"\.", "[.]", True),
    ("[а-я]", "[а-яб]", True), ("[а-я]", "а|я", False), ("é", "è", False),
    ("[a-é]", "[a-ê]", False), ("(dog)&(truck)", "(ring)&(lake)", True), ("()|a", "a?", True),
    ("a", "b", False), (".*", ".+", False), ("a{2,}", "a{3,}", False), ("~(dog)", ".*", False), ("~(a)*", "~(a*)", False), ("ab|c", "a(b|c)", False),
    ("a|b&c", "(a|b)&c", False), ("ab*&a", "a(b*&a)", False), ("~ab", "~(ab)", False), ("[0-9].*", "([0-9].*)+.+", False),
    # what is not an answer
    ("", "a*", False), ("", "", False), ("  ", "dog", False), (" dog\n", "dog", True), ("dog dog", "dog", False),
    ("dog\nlines with a cat", "dog", False),
    # what cannot be read is right only as the same text
    ("(dog", "(dog", True), ("(dog", "dog", False), ("dog)", "dog", False), ("*", "a", False), ("a||b", "a|b", False), ("a&", "a", False),
    ("[]", "a", False),
    ("[z-a]", "a", False), ("a{3,2}", "a", False), ("a{,2}", "a{0,2}", False), ("^dog$", "dog", False), ("(?:a)", "a", False), (r"\q", "q", False),
    ("a\\", "a", False), ("[a", "a", False), ("~", "a", False), ("(" * 5000, "a", False), (r"(a)\1", "aa", False), ("[\\d-z]", "a", False),
])
def test_regular_expressions_are_equal_if_they_match_the_same_lines(generated, gold, right):
    assert scores.regex_equal(generated, gold) is right


@pytest.mark.parametrize("a, b, as_edge, as_letter", [
    (r"\b(dog)\b", "dog", True, False),                                  # the ends of the line are edges of words
    (r"\b(dog)\b", "b(dog)b", False, True),
    (r"\b([AEIOUaeiou])&([a-z])\b", "[aeiou]", True, False),             # & is looser than putting side by side: \bV and L\b
    (r"\b([AEIOUaeiou])&([a-z])\b", "a&b", False, True),                 # as a letter: two signs, the first a b and a vowel
    (r"a\bb", "(a)&(b)", True, False),                                   # no edge inside of a word
    (r".*\ba\b.*", r"(.*[^A-Za-z0-9_])?a([^A-Za-z0-9_].*)?", True, False),
    (r"(\b|(a-)){2}&(a-)", "a-", True, False),                           # one of the two turns is the edge at the start
    (r"\b\b", r"\b", True, False), (r"(\b)*", "()", True, False), (r"a\b-", "a-", True, False), (r"-\b-", "a&b", True, False),
    (r"(\ba\b|-)*", r"(\ba\b|(-)|(\ba\b)(-))*", True, True), (r"(\b(.*)([a-z])\b){2,}", r"(\b(.*)([a-z])\b)(\b(.*)([a-z])\b)+", True, True),
])
def test_a_word_boundary_has_no_width_or_is_a_plain_letter(a, b, as_edge, as_letter):
    assert scores.regex_equal(a, b) is as_edge and scores.regex_equal(a, b, "letter") is as_letter


def test_expressions_that_match_no_line_or_every_line_are_known():
    assert [scores.regex_vacuous(text) for text in ("([0-9])&(dog)", "(.*)|(dog)", "~(dog&truck)", "dog", "~(dog)", r"\b.*", r"a\ba")] == [
        True, True, True, False, False, False, True]


def test_a_comparison_beyond_its_limit_says_so_and_guesses_nothing():
    with pytest.raises(scores.TooLarge, match="more than 1000 parts"):
        scores.regex_equal(".*a.{12}", ".*a.{11}.", limit=1000)
    started = time.process_time()
    with pytest.raises(scores.TooLarge):
        scores.regex_equal(".*a.{30}", ".*a.{29}.")
    assert time.process_time() - started < 15
    assert scores.regex_equal("(" * 60 + "a" + ")" * 60, "a")
    with pytest.raises(scores.TooLarge, match="nested too deep"):
        scores.regex_equal("(" * 3000 + "a" + ")" * 3000, "a")
    with pytest.raises(ValueError, match='boundary \'zero\' is not "word" or "letter"'):
        scores.regex_equal("a", "b", "zero")
    with pytest.raises(scores.BadPattern, match=r"'a\|\|b' is no regular expression .* before character 4"):
        scores.regex_difference("a||b", "b")


# ---- regular expressions: the definition once more, by the stretches of one line that each part matches


def stretches(tree, line):
    """{(start, end)}: what the tree matches of the line."""
    every = {(i, j) for i in range(len(line) + 1) for j in range(i, len(line) + 1)}
    kind, *parts = tree
    if kind == "edge":
        inside = [False, *(sign.isalnum() for sign in line), False]
        return {(i, i) for i in range(len(line) + 1) if inside[i] != inside[i + 1]}
    if kind == "set":
        return {(i, i + 1) for i, sign in enumerate(line) if re.fullmatch(parts[0], sign, re.S)}
    if kind == "many":
        inner, low, high = stretches(parts[0], line), parts[1], parts[2]
        found = [{(i, i) for i in range(len(line) + 1)}]
        for _ in range(low + len(line) + 1 if high is None else high):
            found.append({(i, k) for i, j in found[-1] for j2, k in inner if j == j2})
        return set().union(*found[low:])
    inner = [stretches(part, line) for part in parts]
    if kind == "not":
        return every - inner[0]
    if kind == "then":
        return {(i, k) for i, j in inner[0] for j2, k in inner[1] if j == j2}
    return inner[0] | inner[1] if kind == "or" else inner[0] & inner[1]


def written(tree):
    kind, *parts = tree
    if kind in ("edge", "set"):
        return parts[0] if parts else r"\b"
    if kind == "many":
        counts = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get(tuple(parts[1:]), "{%s,%s}" % (parts[1], "" if parts[2] is None else parts[2]))
        return f"({written(parts[0])}){counts}"
    inner = [f"({written(part)})" for part in parts]
    return {"not": "~", "then": "", "or": "|", "and": "&"}[kind].join(["", *inner] if kind == "not" else inner)


def random_tree(rng, depth, kinds):
    kind = rng.choice(kinds) if depth else "set"
    if kind == "set" or kind == "edge":
        return ("edge",) if kind == "edge" else ("set", rng.choice(["a", "b", "-", ".", "[ab]", "[^a]"]))
    inner = [random_tree(rng, depth - 1, kinds) for _ in range(1 if kind in ("many", "not") else 2)]
    return (kind, *inner, *(rng.choice([(0, None), (1, None), (0, 1), (2, None), (1, 2), (2, 3)]) if kind == "many" else ()))


LINES = ["".join(line) for size in range(5) for line in itertools.product("ab-", repeat=size)]
PLAIN, ALL = ("set", "edge", "then", "or", "many"), ("set", "edge", "then", "or", "and", "not", "many")


def test_equivalence_of_random_expressions_is_that_of_brute_force():
    rng, equal = random.Random(0), 0
    for turn in range(800):
        a = random_tree(rng, 3, ALL)
        b = random_tree(rng, 2, ALL) if turn % 4 else ("or", a, ("and", a, random_tree(rng, 2, ALL)))
        line = scores.regex_difference(written(a), written(b))
        matches = lambda tree, line: (0, len(line)) in stretches(tree, line)
        if line is None:
            equal += 1
            assert all(matches(a, line) == matches(b, line) for line in rng.sample(LINES, 40)), (written(a), written(b))
        else:                                                            # the witness is one, by the other definition
            assert matches(a, line) != matches(b, line), (written(a), written(b), line)
    assert 200 < equal < 600


def test_a_plain_expression_matches_the_lines_that_pythons_re_says():
    rng, matched = random.Random(1), 0
    for _ in range(120):
        text = written(random_tree(rng, 3, PLAIN))
        for line in rng.sample(LINES, 8):
            wanted = re.fullmatch(text, line, re.S | re.A) is not None
            exactly = "".join(re.escape(sign) for sign in line) or "()"
            assert scores.regex_equal(f"({text})&({exactly})", exactly) is wanted, (text, line)
            matched += wanted
    assert 60 < matched < 800


# ---- GSM8K, NQ-Open, labels


@pytest.mark.parametrize("text, answer", [
    ("so 72.\n#### 72", "72"), ("#### 1,080", "1080"), ("#### $1,080.50", "1080.5"), ("#### -5", "-5"), ("#### -$5", "-5"), ("#### $-5", "-5"),
    ("#### \u22125", "-5"), ("#### 72.", "72"), ("#### 72.0", "72"), ("#### 007", "7"), ("#### .5", "0.5"), ("#### -0", "0"), ("####72", "72"),
    ("#### 72 dollars", "72"), ("#### 5%", "5"), ("#### 72\n\nQ: next?\n#### 5", "72"), ("#### 72, of course", "72"), ("#### +3", "3"),
    ("#### 123456789012345678901234567890.10", "123456789012345678901234567890.1"), ("#### \u20ac3", "3"), ("#### 1,000,000", "1000000"),
    ("", None), ("72", None), ("#### ", None), ("#### seventy-two", None), ("####\n72", None), ("#### x = 3\n#### 3", None), ("#### 7/2", None),
    ("#### 5 - 3", None), ("#### 3:45", None), ("#### 1e5", None), ("#### 1.2.3", None), ("### 72", None), ("#### --", None),
])
def test_the_answer_of_a_solution_is_the_number_after_four_hashes(text, answer):
    assert scores.gsm8k_answer(text) == answer


@pytest.mark.parametrize("generated, gold, paper, released", [
    ("a\n#### 72", "b\n#### 72", True, True), ("a\n#### 72", "b\n#### 7", False, False), ("a\n#### 1080", "b\n#### 1,080", True, False),
    ("a\n#### 72.", "b\n#### 72", True, False), ("a\n#### 72\nand more", "b\n#### 72", True, False), ("#### 72", "b\n#### 72", True, False),
    ("a\n#### 72 ", "b\n#### 72", True, True), ("", "b\n#### 72", False, False), ("the answer is 72", "b\n#### 72", False, False),
    ("a\n#### 7", "b\n#### 72", False, False), ("a\n#### -72", "b\n#### 72", False, False), ("a\n#### 72.5", "b\n#### 72", False, False),
])
def test_a_solution_is_right_by_its_number_or_as_the_released_code_has_it(generated, gold, paper, released):
    assert scores.gsm8k_correct(generated, gold) is paper and scores.gsm8k_correct(generated, gold, released=True) is released


def test_gold_without_a_number_is_refused_where_the_released_code_calls_two_of_them_equal():
    assert scores.gsm8k_correct("", "no number", released=True)
    with pytest.raises(BadInput, match="'no number' does not end in ####"):
        scores.gsm8k_correct("", "no number")


@pytest.mark.parametrize("generated, answers, paper, released", [
    ("Vancouver", "Vancouver", True, True), ("It was filmed in Vancouver.", "Vancouver", True, False), ("", "Vancouver", False, True),
    (" \n", "Vancouver", False, True), ("V", "Vancouver", False, True), ("Paris", "Vancouver", False, False),
    ("Gene Kelly", "Debbie Reynolds; Gene Kelly", True, True),
    ("Paris; Gene Kelly", "Debbie Reynolds; Gene Kelly", True, True), ("It is Gene Kelly; really", ["Gene Kelly"], True, False),
    ("vancouver", "Vancouver", False, False), ("; ", "Vancouver", False, False), ("Rome; ", ["Vancouver", ""], False, False),
    ("Debbie Reynolds; Gene Kelly", "Gene Kelly; Debbie Reynolds", True, True),
])
def test_an_open_answer_holds_a_gold_answer_and_the_released_code_asks_the_reverse(generated, answers, paper, released):
    assert scores.nq_correct(generated, answers) is paper and scores.nq_correct(generated, answers, released=True) is released


@pytest.mark.parametrize("answers", ["", " ; ", [], [""]])
def test_a_question_without_gold_answers_is_refused(answers):
    with pytest.raises(BadInput, match="holds no answer"):
        scores.nq_correct("anything", answers)


STARS = ("Very Bad", "Bad", "Mediocre", "Good", "Very Good")


@pytest.mark.parametrize("generated, label, labels, right", [
    ("Good", "Good", STARS, True), (" Good\n", "Good", STARS, True), ("Good. I liked it", "Good", STARS, True), ("Goodness", "Good", STARS, False),
    ("Very Good", "Good", STARS, False), ("Very Good", "Very Good", STARS, True), ("good", "Good", STARS, False), ("", "Good", STARS, False),
    ("Bad", "Good", STARS, False), ("It is Good", "Good", STARS, False), ("Good enough", "Good", (), True),
    ("Good enough!", "Good", ("Good", "Good enough"), False),
    ("Good enough!", "Good enough", ("Good", "Good enough"), True), ("Good enoughs", "Good", ("Good", "Good enough"), True),
    ("1", "1", (), True), ("12", "1", (), False),
])
def test_a_label_is_the_longest_that_the_text_begins_with(generated, label, labels, right):
    assert scores.label_prefix(generated, label, labels) is right


def test_a_label_that_the_data_does_not_have_is_refused():
    for label in ("", "Great"):
        with pytest.raises(BadInput, match=f"label '{label}' is empty or none of Very Bad"):
            scores.label_prefix("Great", label, STARS)


# ---- SQL


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    path = tmp_path_factory.mktemp("a folder?#%") / "shop.sqlite"
    with sqlite3.connect(path) as made:
        made.executescript("""CREATE TABLE item (name TEXT, price REAL, n INTEGER, note TEXT);
            INSERT INTO item VALUES ('pen', 1.5, 2, NULL), ('ink', 3.0, 1, 'a;b'), ('pad', 2.25, 2, ''), ('cap', 3.0, 5, 'x');
            CREATE TABLE void (name TEXT); CREATE TABLE caf (name TEXT);
            INSERT INTO caf VALUES (CAST(x'436166e9' AS TEXT)), (CAST(x'436166e8' AS TEXT));""")
    made.close()
    return path


ALL_NAMES = "SELECT name FROM item"


@pytest.mark.parametrize("query, gold, paper, released", [
    (ALL_NAMES, ALL_NAMES, True, True), ("select NAME from item;", ALL_NAMES, True, True),
    ("SELECT name FROM item ORDER BY name", ALL_NAMES, True, False),
    ("SELECT name FROM item ORDER BY name DESC", "SELECT name FROM item ORDER BY name", False, False),
    ("SELECT name FROM item ORDER BY name DESC", "SELECT name FROM item WHERE n > (SELECT 0 ORDER BY 1) -- ORDER BY", True, False),
    ("SELECT n FROM item", "SELECT DISTINCT n FROM item", False, False), ("SELECT n, name FROM item", "SELECT name, n FROM item", False, False),
    ("SELECT name AS x FROM item", ALL_NAMES, True, True), ("SELECT sum(n) FROM item", "SELECT 10.0", True, False),
    ("SELECT '10'", "SELECT 10", False, True),
    ("SELECT NULL", "SELECT ''", False, True), ("SELECT 0.1 + 0.2", "SELECT 0.3", True, True), ("SELECT 0.3000001", "SELECT 0.3", False, False),
    ("SELECT note FROM item WHERE note = 'a;b'", "SELECT 'a;b'", True, True),
    # nothing, failing, refused
    ("", "SELECT name FROM void", False, True), ("SELEC name", "SELECT name FROM void", False, True),
    ("SELECT nam FROM item", ALL_NAMES, False, False),
    ("SELECT name FROM void", "SELECT name FROM void", True, True), (" ", ALL_NAMES, False, False),
    ("-- SELECT 1", "SELECT name FROM void", False, True),
    (ALL_NAMES + "; SELECT 1", ALL_NAMES, False, False), (ALL_NAMES + "; and that is it", ALL_NAMES, False, True),
    ("DROP TABLE item", "SELECT name FROM void", False, True),
    ("INSERT INTO item VALUES (1, 2, 3, 4) RETURNING 1", "SELECT 1", False, False), ("PRAGMA user_version", "SELECT 0", False, False),
    ("ATTACH 'new.sqlite' AS b", "SELECT name FROM void", False, True),
    ("SELECT load_extension('x')", "SELECT name FROM void", False, True), ("VACUUM INTO 'new.sqlite'", "SELECT name FROM void", False, True),
    ("SELECT '\x00'", "SELECT ''", False, False), ("SELECT '\ud800'", "SELECT name FROM void", False, True),
    ("SELECT length(zeroblob(100000000))", "SELECT 100000000", False, False),
    ("The answer is 4", "SELECT name FROM void", False, True),
    # latin-1
    ("SELECT name FROM caf ORDER BY name DESC", "SELECT name FROM caf", True, False),
    ("SELECT name FROM caf LIMIT 1", "SELECT name FROM caf LIMIT 1 OFFSET 1", False, False),
])
def test_sql_is_judged_by_its_rows_or_as_the_released_code_has_it(query, gold, paper, released, database, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = database.read_bytes()
    assert scores.same_result(query, gold, database) is paper and scores.same_result(query, gold, database, released=True) is released
    assert database.read_bytes() == before and not list(tmp_path.iterdir()) and [path.name for path in database.parent.iterdir()] == ["shop.sqlite"]


def test_sql_is_stopped_by_time_and_by_rows(database):
    forever = "WITH RECURSIVE t(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM t) SELECT {} FROM t"
    started = time.monotonic()
    assert not scores.same_result(forever.format("max(x)"), ALL_NAMES, database, timeout=.1)
    assert not scores.same_result(forever.format("max(x)"), ALL_NAMES, database, timeout=.1, released=True)
    assert time.monotonic() - started < 20
    with pytest.raises(scores.BadQuery, match="more than 50 rows"):
        scores.run_query(forever.format("x"), database, most=50)
    assert len(scores.run_query(forever.format("x") + " LIMIT 50", database, most=50)) == 50


def test_a_database_is_opened_read_only_whatever_the_query(database, monkeypatch):
    opened, connect = [], sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda name, **options: opened.append((name, options["uri"])) or connect(name, **options))
    scores.run_query(ALL_NAMES, database)
    assert opened == [(database.as_uri() + "?mode=ro", True)]


def test_a_gold_query_or_a_database_that_cannot_be_used_is_refused(database):
    with pytest.raises(BadInput, match="the gold query cannot be used on .*no such column: nam"):
        scores.same_result(ALL_NAMES, "SELECT nam FROM item", database)
    with pytest.raises(BadInput, match="there is no database"):
        scores.same_result(ALL_NAMES, ALL_NAMES, database.parent / "other.sqlite")


@pytest.mark.parametrize("query, outermost", [
    ("SELECT a FROM t ORDER BY a", True), ("select a from t order\n by a limit 1", True), ("SELECT a FROM t", False),
    ("SELECT a FROM (SELECT b FROM t ORDER BY b)", False),
    ("SELECT 'ORDER BY' FROM t", False), ("SELECT a FROM t -- ORDER BY a", False), ("SELECT a FROM t /* ORDER BY a */", False),
    ('SELECT a AS "order by" FROM t', False),
    ("SELECT row_number() OVER (ORDER BY a) FROM t", False), ("SELECT a FROM t UNION SELECT b FROM t ORDER/* x */BY 1", True),
    ("SELECT order_by FROM t", False),
    ("WITH u AS (SELECT a FROM t ORDER BY a) SELECT a FROM u", False), ("SELECT ')' FROM t WHERE a IN (SELECT 1) ORDER BY 1", True),
    ("SELECT a FROM t GROUP BY a", False),
])
def test_only_an_order_by_of_the_outermost_select_counts(query, outermost):
    assert scores.ordered(query) is outermost


def test_the_released_text_is_that_of_the_command_line(database):
    query = "SELECT NULL, 1, 1.0, 1e20, 0.1 + 0.2, -2.5e-7, 9e999, 'a|b', x'78797a' UNION ALL SELECT 1, 2, 3, 4, 5, 6, 7, 8, 9; SELECT ';'; nonsense; SELECT 2"
    assert scores.printed(query, database, 5) == "|1|1.0|1.0e+20|0.3|-2.5e-07|Inf|a|b|xyz\n1|2|3|4|5|6|7|8|9\n;\n"


# ---- multiple choice


@pytest.fixture(scope="module")
def tokenizer():
    return data.train_tokenizer(["the cat sees A seven B dogs C and D a house", "Good A enough B Very C Good D Bad"], 310)


def tiny(positions="learned", **changes):
    torch.manual_seed(1)
    config = dict(vocab=310, width=32, layers=2, heads=2, hidden=64, max_length=48, causal=True, positions=positions)
    return Model(ModelConfig(**config | changes)).double().eval()


PROMPTS = ["the cat sees", "a house and seven dogs", "x"]
OPTIONS = [["seven dogs", "a house", "seven dogs and the cat", "B"], ["the cat", "dogs"], ["seven"]]


def in_its_own_row(model, row, answer):
    """log p of the tokens of an answer after a row, one row a time."""
    with torch.no_grad():
        logits = model.logits(model(Packed.of([[*row, *answer[:-1]]], causal=True))).log_softmax(1)
    return [logits[len(row) - 1 + place, token].item() for place, token in enumerate(answer)]


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize("headers", [None, ["which is best", "", "the dogs"]])
def test_an_option_is_as_likely_as_in_a_row_of_its_own(tokenizer, positions, stop, headers):
    model, mark = tiny(positions), data.special(tokenizer)
    ids = lambda text: data.encode(tokenizer, [text])[0].tolist()
    together = scores.option_likelihoods(model, tokenizer, PROMPTS, OPTIONS, headers, stop)
    assert together != scores.option_likelihoods(model, tokenizer, PROMPTS[::-1], OPTIONS, headers, stop)
    for turn, (prompt, options, found) in enumerate(zip(PROMPTS, OPTIONS, together)):
        head = [] if headers is None else [*ids(headers[turn]), mark.sep]
        assert found.cut == 0 and len(found.sums) == len(found.means) == len(options)
        for text, total, mean in zip(options, found.sums, found.means):
            wanted = in_its_own_row(model, [mark.cls, *head, *ids(prompt), mark.sep], ids(text) + [mark.sep] * stop)
            assert total == pytest.approx(sum(wanted), abs=1e-10) and mean == pytest.approx(sum(wanted) / len(wanted), abs=1e-10)
        alone = option_likelihood(model, tokenizer, prompt, options, headers and headers[turn], stop)
        assert alone.sums == pytest.approx(found.sums, abs=1e-10)


def test_questions_share_one_forward_and_small_batches_change_nothing(tokenizer, monkeypatch):
    model, calls, forward = tiny(), [], Model.forward
    monkeypatch.setattr(Model, "forward", lambda self, packed: calls.append(len(packed.tokens)) or forward(self, packed))
    together = scores.option_likelihoods(model, tokenizer, PROMPTS, OPTIONS)
    ids = lambda text: len(data.encode(tokenizer, [text])[0])
    assert calls == [sum(ids(prompt) + 2 + sum(map(ids, options)) for prompt, options in zip(PROMPTS, OPTIONS))]     # the prompts once
    one_by_one = scores.option_likelihoods(model, tokenizer, PROMPTS, OPTIONS, tokens_per_batch=1)
    assert len(calls) == 1 + len(PROMPTS)
    assert [each.sums for each in one_by_one] == [pytest.approx(each.sums, abs=1e-10) for each in together]
    assert scores.option_likelihoods(model, tokenizer, [], []) == []


def test_a_long_prompt_loses_its_first_tokens_and_they_are_counted(tokenizer):
    model, mark = tiny(max_length=20), data.special(tokenizer)
    ids = lambda text: data.encode(tokenizer, [text])[0].tolist()
    prompt, options, header = "the cat sees seven dogs and a house " * 4 + "end", ["seven dogs", "a"], "x"
    longest = max(len(ids(text)) for text in options)
    found = option_likelihood(model, tokenizer, prompt, options, header)
    kept = 20 - longest - 2 - len(ids(header)) - 1                       # [CLS] header [SEP] prompt [SEP] option, all but the last token read
    assert found.cut == len(ids(prompt)) - kept > 0
    wanted = [sum(in_its_own_row(model, [mark.cls, *ids(header), mark.sep, *ids(prompt)[-kept:], mark.sep], [*ids(text), mark.sep])) for text in options]
    assert found.sums == pytest.approx(wanted, abs=1e-10)
    assert option_likelihood(model, tokenizer, "other words in front " + prompt, options, header).sums == pytest.approx(found.sums, abs=1e-10)
    with pytest.raises(BadInput, match="leave no room for a prompt in the model's 20 tokens"):
        option_likelihood(model, tokenizer, "a", ["the cat sees seven dogs and a house " * 4])


def test_a_letter_is_chosen_at_the_end_of_the_prompt_and_by_the_released_code_after_128_tokens(tokenizer):
    model, mark = tiny(max_length=400, positions="rotary"), data.special(tokenizer)
    for block in model.blocks:                                           # so that what was read long ago counts
        block.qkv.weight.data *= 10
        block.out.weight.data *= 10
    question = "the cat sees A seven B dogs C house D " * 10
    prompts = [question + end for end in ("a", "the", "dogs", "x y z", "cat", "seven")]
    rows = [[mark.cls, *data.encode(tokenizer, [prompt])[0].tolist(), mark.sep] for prompt in prompts]
    letter_ids = [ids.item() for ids in data.encode(tokenizer, list("ABCD"))]
    with torch.no_grad():
        plain = [model.logits(model(Packed.of([row], causal=True))[-1:])[0, letter_ids].argmax().item() for row in rows]
        short = model.logits(model(Packed.of([rows[0][:128]], causal=True))[-1:])[0, letter_ids].argmax().item()
    found = scores.letter_choices(model, tokenizer, prompts)
    assert found == [("ABCD"[place], 0) for place in plain] and len(set(plain)) > 1
    released = scores.letter_choices(model, tokenizer, prompts, released=True)
    assert released == [("ABCD"[short], len(row) - 128) for row in rows]                       # their ends are gone, and with them what differs
    with pytest.raises(BadInput, match="letters A, é are not equally many tokens"):
        scores.letter_choices(model, tokenizer, prompts, letters="Aé")


def test_likelihoods_are_refused_where_they_would_mean_nothing(tokenizer):
    with pytest.raises(ValueError, match="call model.eval"):
        option_likelihood(tiny().train(), tokenizer, "a", ["b"])
    with pytest.raises(BadInput, match="need a causal model"):
        option_likelihood(tiny(causal=False), tokenizer, "a", ["b"])
    with pytest.raises(ValueError, match="as many of each"):
        scores.option_likelihoods(tiny(), tokenizer, ["a", "b"], [["c"]])
    with pytest.raises(ValueError, match="no empty list"):
        scores.option_likelihoods(tiny(), tokenizer, ["a"], [[]])
    with pytest.raises(ValueError, match="is empty"):
        option_likelihood(tiny(), tokenizer, "a", ["b", ""], stop=False)
    assert len(option_likelihood(tiny(), tokenizer, "a", ["b", ""]).sums) == 2          # with the stop token even "" is an answer


# ---- extractive answers


@pytest.mark.parametrize("text, language, mlqa, squad, released", [
    ("The  Eiffel-Tower!", "en", "eiffeltower", "eiffeltower", "eiffeltower"),
    ("a man, an ape, the end", "en", "man ape end", "man ape end", "man ape end"),
    ("Theatre", "en", "theatre", "theatre", "theatre"), ("“quoted” – yes", "en", "quoted yes", "“quoted” – yes", "“quoted” – yes"),
    ("$5 + 3", "en", "5 3", "5 3", "5 3"), ("La casa de los Unos", "es", "casa de", "la casa de los unos", "la casa de los unos"),
    ("¿Qué, a?", "es", "qué a", "¿qué", "¿qué a"), ("Der Hund des Königs", "de", "hund königs", "der hund des königs", "der hund des königs"),
    ("những con mèo của tôi", "vi", "con mèo tôi", "những con mèo của tôi", "những con mèo của tôi"),
    ("القاهرة", "ar", "قاهرة", "القاهرة", "القاهرة"),
    ("في البلد، نعم", "ar", "في بلد نعم", "في البلد، نعم", "في البلد، نعم"), ("तीन सौ।", "hi", "तीन सौ", "तीन सौ।", "तीन सौ।"),
    ("北京2008年", "zh", "北 京 2008 年", "北京2008年", "北京2008年"), ("《红楼梦》 by Cao", "zh", "红 楼 梦 by cao", "《红楼梦》 by cao", "《红楼梦》 by cao"),
    ("iPhone 6S手机", "zh", "iphone 6s 手 机", "iphone 6s手机", "iphone 6s手机"), ("東京タワー", "ja", "東 京 タ ワ ー", "東京タワー", "東京タワー"),
    ("ไทย 5", "th", "ไ ท ย 5", "ไทย 5", "ไทย 5"), ("the Волга", "ru", "the волга", "волга", "the волга"), ("", "en", "", "", ""),
    ("the", "en", "", "", ""),
])
def test_answers_are_normalised_by_the_rules_of_each_scorer(text, language, mlqa, squad, released):
    assert [scores.normalise_answer(text, language, rules) for rules in scores.RULES] == [mlqa, squad, released]


@pytest.mark.parametrize("prediction, golds, language, rules, exact, f1", [
    ("Denver Broncos", ["Denver Broncos", "the Broncos"], "en", "squad", True, 1), ("The Broncos.", ["Denver Broncos"], "en", "squad", False, 2 / 3),
    ("Saint Bernadette Soubirous", ["Bernadette"], "en", "squad", False, .5),
    ("a copper statue of Christ", ["copper statue"], "en", "squad", False, 2 / 3),
    ("gold gold gold", ["gold"], "en", "squad", False, .5), ("gold", ["gold gold"], "en", "squad", False, 2 / 3),
    ("in the 10th century", ["10th century", "the 11th"], "en", "mlqa", False, .8),
    ("silver", ["gold"], "en", "mlqa", False, 0), ("", ["gold"], "en", "mlqa", False, 0), ("", ["the"], "en", "mlqa", False, 0),
    (" \n", [""], "en", "released", False, 0),
    ("Rome", ["Paris", "Rome"], "en", "mlqa", True, 1), ("12,000", ["12000"], "en", "mlqa", True, 1),
    # Chinese without characters is all or nothing
    ("北京大学", ["北京"], "zh", "mlqa", False, 2 / 3), ("北京大学", ["北京"], "zh", "released", False, 0), ("北京", ["京北"], "zh", "mlqa", False, 1),
    # the article of the language of the answer
    ("der Rhein", ["Rhein"], "de", "mlqa", True, 1), ("der Rhein", ["Rhein"], "de", "released", False, 2 / 3),
    ("der Rhein", ["Rhein"], "en", "mlqa", False, 2 / 3),
    ("the Rhine", ["Rhine"], "de", "released", False, 2 / 3), ("the Rhine", ["Rhine"], "de", "squad", True, 1),
    ("«Rhein»", ["Rhein"], "de", "released", False, 0),
])
def test_extractive_answers_have_these_scores(prediction, golds, language, rules, exact, f1):
    assert scores.qa_exact(prediction, golds, language, rules) is exact
    assert scores.qa_f1(prediction, golds, language, rules) == pytest.approx(f1)


def test_answers_in_an_unknown_language_are_refused():
    with pytest.raises(ValueError, match="language 'chinese' with rules 'mlqa': choose from en, "):
        scores.normalise_answer("北京", "chinese")
    with pytest.raises(ValueError, match="rules 'official'"):
        scores.qa_f1("a", ["b"], rules="official")
    for golds in ([], "gold"):
        with pytest.raises(ValueError, match="must be a list of at least one answer"):
            scores.qa_exact("a", golds)
