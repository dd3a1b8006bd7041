"""Retrieval of translations in many languages, and the files of xsim++."""

import itertools

import pytest
import torch
from test_evaluate import evaluation as evaluation_of
from test_evaluate import tiny
from test_tasks import WORDS, results_of

import evaluate
import metrics
from common import BadInput
from corpora import EvaluationRows
from tasks import mining


def test_the_matrix_is_xsim_and_buccs_f1_weights_every_row_as_a_class(tokenizer):
    texts = {"en": WORDS, "de": [text.upper() for text in WORDS], "ru": WORDS[::-1]}
    rows = EvaluationRows("x", texts)
    found = results_of(tiny(), tokenizer, rows, ["matrix"])
    z = {name: evaluate.encode(tiny(), tokenizer, lines) for name, lines in texts.items()}
    for a, b in itertools.permutations(texts, 2):
        wanted = metrics.xsim(z[a], z[b], texts=texts[b])
        assert found[f"matrix/xsim/{a}-{b}"] == pytest.approx(wanted)
    into = (found["matrix/xsim/de-en"] + found["matrix/xsim/ru-en"]) / 2
    assert found["matrix/xsim/into/en"] == pytest.approx(into)
    evaluation = evaluation_of(tokenizer, texts=rows)
    evaluation.embeddings = {"en": torch.eye(6), "de": torch.eye(6)[[0, 0, 2, 2, 2, 5]] + .1}
    f1 = 100 * (2 / 3 + 2 / 4 + 1) / 6
    assert mining.bucc(evaluation) == {"rows": 12, "f1": pytest.approx(f1),
                                       "f1/de-en": pytest.approx(f1)}
    found = mining.tatoeba(evaluation)  # of ties the first one is retrieved
    assert (found["accuracy_into"], found["accuracy_from/de-en"]) == (50, 50)


def test_altered_sentences_know_their_rows_and_others_are_counted(tmp_path, capsys):
    lines = tmp_path / "eng_Latn_augmented.devtest"
    types = tmp_path / "types.json"
    lines.write_text("the dog\na stranger", encoding="utf-8")
    types.write_text('{"the dog": {"src": " the cat", "errtype": "entity"}}', encoding="utf-8")
    assert mining.hard_rows(lines, types, ["seven", "the cat"]) == [
        ("the dog", 1, "entity"), ("a stranger", -1, "misaligned")]
    assert "1 of 2 altered sentences have no type" in capsys.readouterr().err
    same = ("cat the the dog chases.", 1, "roles")
    hard = [same, ("the cat chases a dog.", 1, "entity"), ("the dog", -1, "misaligned")]
    assert mining.reordered(hard, ["the dog", "The dog chases the cat."]) == [same]
    for text in ("[]", '{"a": {"src": 7}}', "{"):
        types.write_text(text, encoding="utf-8")
        with pytest.raises(BadInput, match="types.json is not a file with a JSON object"):
            mining.hard_rows(lines, types, [])
