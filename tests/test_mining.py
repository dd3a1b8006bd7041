"""Retrieval in many languages: plain definitions, files as published."""

import itertools
import json
import lzma

import pytest
import torch
from test_evaluate import tiny
from test_tasks import NO_ROWS, WORDS, results_of

import evaluate
from corpora import EvaluationRows
from corpora.program import BadInput
from tasks import metrics, mining


def test_buccs_f1_weights_every_row_of_y_as_a_class():
    f1 = mining.bucc_f1(torch.eye(6)[[0, 0, 2, 2, 2, 5]] + .1, torch.eye(6))
    assert f1 == pytest.approx(100 * (2 / 3 + 2 / 4 + 1) / 6)


# ---- tasks


def test_the_matrix_and_buccs_f1_are_averaged_over_languages(tokenizer):
    texts = {"en": WORDS, "de": [text.upper() for text in WORDS], "ru": WORDS[::-1]}
    found = results_of(tiny(), tokenizer, EvaluationRows("x", texts), ["matrix", "bucc"])
    vectors = {name: evaluate.encode(tiny(), tokenizer, lines) for name, lines in texts.items()}
    for a, b in itertools.permutations(texts, 2):
        wanted = evaluate.xsim(vectors[a], vectors[b], texts=texts[b])
        assert found[f"matrix/xsim/{a}-{b}"] == pytest.approx(wanted)
    into = (found["matrix/xsim/de-en"] + found["matrix/xsim/ru-en"]) / 2
    assert found["matrix/xsim/into/en"] == pytest.approx(into)
    f1 = mining.bucc_f1(vectors["en"], vectors["de"])
    assert found["bucc/f1/en-de"] == pytest.approx(f1)
    assert found["bucc/f1"] == pytest.approx((found["bucc/f1/de-en"] + found["bucc/f1/ru-en"]) / 2)


def test_mexmas_lists_of_languages_have_means_where_all_of_them_are_there():
    codes = [code for code, lists in mining.read_table("languages.tsv") if "81" in lists.split()]
    results = {f"x/xsim/{code}-eng_Latn": float(code < "d") for code in codes}
    found = mining.list_means(results | {"x/xsim": .5, "x/rows": 12})
    # With English as many as the paper says, 81, 72 and 34; the 90 are not all there
    assert found == {"x/xsim/81": 17 / 80, "x/xsim/o": 11 / 71, "x/xsim/d": 3 / 33}
    del results["x/xsim/san_Deva-eng_Latn"]  # which LaBSE does not know
    assert mining.list_means(results).keys() == {"x/xsim/o", "x/xsim/d"}


def test_altered_sentences_know_their_rows_and_strangers_are_counted(tmp_path, capsys):
    altered = {text.replace("cat ", "dog "): {"src": f" {text}", "errtype": "entity"}
               for text in WORDS}
    lines = tmp_path / "eng_Latn_augmented.devtest"
    types = tmp_path / "types.json"
    lines.write_text("\n".join([*altered, "a stranger"]), encoding="utf-8")
    types.write_text(json.dumps(altered), encoding="utf-8")
    wanted = [(text, row, "entity") for row, text in enumerate(altered)]
    assert mining.hard_rows(lines, types, WORDS) == [*wanted, ("a stranger", -1, "misaligned")]
    assert "1 of 13 altered sentences have no type" in capsys.readouterr().err
    with pytest.raises(BadInput, match="first language must be the altered one"):
        mining.hard_rows(lines, types, ["another"])
    for text in ("[]", '{"a": {"src": 7}}', "{"):
        types.write_text(text, encoding="utf-8")
        with pytest.raises(BadInput, match="types.json is not a JSON object"):
            mining.hard_rows(lines, types, WORDS)


def test_tatoeba_reads_tables_and_lasers_pairs_of_files(tokenizer, tmp_path):
    texts = {"deu": [text.upper() for text in WORDS], "fra": [text.title() for text in WORDS]}
    folder = tmp_path / "tatoeba_laser_v1"
    folder.mkdir()
    with lzma.open(folder / "deu-eng.tsv.xz", "wt", encoding="utf-8") as file:
        rows = [f"{b}\t{a}\n" for a, b in zip(texts["deu"], WORDS)]
        file.write("eng\tdeu\n" + "".join(rows))
    for name, lines in (("fra", texts["fra"]), ("eng", WORDS)):
        path = folder / f"tatoeba.fra-eng.{name}"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = results_of(tiny(), tokenizer, None, ["tatoeba"], files=tmp_path)
    gold = evaluate.encode(tiny(), tokenizer, WORDS)
    for name, lines in texts.items():
        x = evaluate.encode(tiny(), tokenizer, lines)
        assert found[f"tatoeba/accuracy/{name}-eng"] == pytest.approx(metrics.top1(x, gold))
        assert found[f"tatoeba/accuracy/eng-{name}"] == pytest.approx(metrics.top1(gold, x))
    assert found["tatoeba/rows"] == 24


def test_pairs_of_texts_have_the_affixes_of_the_columns(tokenizer):
    affixes = [[[20], [3]], [[21, 22], [3]]]
    evaluation = evaluate.Evaluation(tiny(), tokenizer, NO_ROWS, affixes)
    pair = mining.embed_pair(evaluation, ["the cat", "dogs"], ["seven"])
    for found, texts, own in zip(pair, (["the cat", "dogs"], ["seven"]), affixes[::-1]):
        wanted = evaluate.encode(tiny(), tokenizer, texts, own)
        assert torch.allclose(found, wanted, atol=1e-6)


def bucc_files(folder):
    """Both sides have the first eight sentences, in another order, and more that have no pair."""
    folder.mkdir(parents=True, exist_ok=True)
    sides = {"de": WORDS[:10], "en": [*WORDS[7::-1], *WORDS[10:]]}
    for name, lines in sides.items():
        text = "".join(f"{name}-{row}\t{line}\n" for row, line in enumerate(lines))
        (folder / f"de-en.training.{name}").write_text(text, encoding="utf-8")
    gold = "".join(f"de-{row}\ten-{7 - row}\n" for row in range(8))
    (folder / "de-en.training.gold").write_text(gold, encoding="utf-8")


def test_buccs_own_files_are_its_gold_pairs(tokenizer, tmp_path):
    bucc_files(tmp_path / "BUCC2018-de-en.training-gold" / "de-en")
    files, = mining.bucc_files(tmp_path).values()
    assert mining.read_bucc(*files) == (WORDS[:8], WORDS[:8])
    found = results_of(tiny(), tokenizer, None, ["bucc2018"], files=tmp_path)
    assert found == {"bucc2018/f1": 100, "bucc2018/f1/de-en": 100, "bucc2018/rows": 8}


def test_what_is_missing_of_bucc_and_which_line_is_wrong_is_said(tokenizer, tmp_path):
    def refused(message):
        with pytest.raises(BadInput, match=message):
            results_of(tiny(), tokenizer, None, ["bucc2018"], files=tmp_path)

    refused("de-en.training.de is missing.*python -m corpora.download bucc2018")
    bucc_files(tmp_path)  # also without a folder of that name
    with open(tmp_path / "de-en.training.gold", "a", encoding="utf-8") as file:
        file.write("de-1\ten-99\n")
    refused("de-en.training.gold:9: .*en-99' is not two ids")
    (tmp_path / "de-en.training.gold").write_bytes(b"")
    refused("de-en.training.gold is empty")
    (tmp_path / "de-en.training.en").unlink()
    refused("de-en.training.en is missing")
