"""The files of the experiments: edited captions, and the command on small public files."""

import json
import lzma
from pathlib import Path

import pytest

from corpora.overlap import bag_of_words, normalized
from results import make_data
from results.__main__ import main
from tasks import mining

CAPTION = "A man in an orange hat and a boy in a red shirt run."


def exchanged(captions, tokens=bag_of_words):
    """Return {edited caption: (caption, type)}."""
    edits = make_data.reordered_captions(captions, tokens)
    types = json.loads(make_data.hard_files("x", edits, captions)["x.json"][0])
    return {text: (one["src"], one["errtype"]) for text, one in types.items()}


def test_articles_and_capitals_follow_the_words_and_an_edit_is_no_other_caption():
    captions = [CAPTION, "The girl holds a Boy.", "Two women watch three men.",
                "Two men watch three women."]
    assert exchanged(captions) == {
        "A boy in an orange hat and a man in a red shirt run.": (CAPTION, "people"),
        "A man in a red hat and a boy in an orange shirt run.": (CAPTION, "attributes"),
        "A man in an orange shirt and a boy in a red hat run.": (CAPTION, "clothes"),
        "The boy holds a Girl.": (captions[1], "people")}


@pytest.mark.parametrize("caption, edits", [
    ("A man pulls a woman.", {"A woman pulls a man.": "people"}),
    ("A man and a woman sit.", {}), ("A man and an old woman sit.", {
        "A woman and an old man sit.": "people"}),
    ("A man, two boys and a woman sit.", {}), ("A man pulls a woman and a man.", {}),
    ("A man runs in a dog park with his cat.", {
        "A cat runs in a dog park with his man.": "person-animal"}),
    ("The cat sees the dog and the man.", {"The dog sees the cat and the man.": "person-animal"}),
    ("A red shirt and a blue hat.", {"A blue shirt and a red hat.": "attributes",
                                     "A red hat and a blue shirt.": "clothes"}),
    ("A red hat and a blue hat.", {}), ("Red hats and blue cars.", {}),
    ("Two hats in red, a blue coat.", {}), ("A red hat is blue.", {}),
    ("Two red hats and blue cars.", {"Two blue hats and red cars.": "attributes"}),
    ("A plaid shirt and cap on a table.", {}), ("A man wearing a shirt, wearing a hat.", {}),
    ("A boy in a hat sees a man in a coat.", {"A man in a hat sees a boy in a coat.": "people",
                                              "A boy in a coat sees a man in a hat.": "clothes"}),
    ("An adult pulls a man.", {})])
def test_edits_of_order_change_what_a_caption_says(caption, edits):
    """At most one of each type, and none where an article, or the case of the tokens, changes."""
    def tokens(text):
        return sorted(text.replace(".", "").replace(",", "").split())

    found = exchanged([caption], tokens)
    assert found == {text: (caption, kind) for text, kind in edits.items()}


def test_altered_captions_replace_one_word_by_another_of_its_list():
    found = [*make_data.altered_captions([CAPTION])]
    assert {kind for _, _, kind in found} == {"person", "color", "thing"}
    for text, caption, _ in found:
        before, after = caption.split(), text.split()
        changed = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
        assert caption == CAPTION and 1 <= len(changed) <= 2  # the article can change too
        assert changed[-1][1] not in before


def write(name, columns, rows):
    path = Path(f"public/{name}.tsv.xz")
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["\t".join(columns), *("\t".join(row) for row in rows)]
    path.write_bytes(lzma.compress("".join(f"{line}\n" for line in lines).encode()))


def write_public():
    """Write small public files. Caption 3 repeats caption 2, and caption 4 is a test caption."""
    places = "park street field house lake forest city beach kitchen mountain".split()
    captions = [[f"{language}A man in a {place} sees a woman {number}." for language in
                 ("", "de ", "fr ", "cs ")] for number, place in enumerate(4 * places)]
    captions[3], captions[4] = captions[2], ["A test caption.", "x", "y", "z"]
    write("parallel/multi30k_train", ("en", "de", "fr", "cs"), captions)
    write("parallel/multi30k_val", ("en", "de", "fr", "cs"), [["a TEST  caption.", "p", "q", "r"]])
    write("parallel/multi30k_test_2016_flickr", ("en", "de", "fr", "cs"),
          [[CAPTION] * 4])
    write("parallel/ntrex", ("eng", "deu", "fra", "rus", "zho-CN", "tur"),
          [[f"news {number}"] * 6 for number in range(502)])
    for name in ("deu", "fra", "rus", "cmn", "tur"):
        write(f"parallel/tatoeba_pairs/eng-{name}", ("eng", name),
              [["Fine words.", f"{name} 1"], ["Tested words.", f"{name} 2"]])
    write("parallel/tatoeba_laser_v1/deu-eng", ("deu", "eng"), [["o", "tested words."]])
    for name in ("stsb_multi_dev", "pawsx_dev", "xnli_dev_17way"):
        write(f"tasks/{name}", ("premise_en", "label"), [["Nothing.", "1"]])


def test_the_command_makes_every_file_and_no_tested_sentence_is_trained_on(monkeypatch, capsys):
    monkeypatch.setattr(make_data, "HELD_OUT", 12)
    write_public()
    main(["make-data", "public", "files"])
    files = {path.name: path.read_text(encoding="utf-8").splitlines()
             for path in Path("files").iterdir()}
    assert capsys.readouterr().out.count(" lines\n") == len(files) == 16
    assert (len(files["encoders_valid.tsv"]), len(files["encoders_test.tsv"])) == (501, 3)
    rows = [row.split("\t") for row in files["encoders_train.tsv"]]
    assert rows[0] == ["en", "de", "fr", "ru", "zh", "tr"] and len(rows) == 1 + 5 + 39
    assert {row[0] for row in rows}.isdisjoint({"Tested words.", "A test caption."})

    trained, tested = ([row.split("\t") for row in files[f"captions_order_{name}.tsv"]]
                       for name in ("train", "test"))
    assert trained[0] == tested[0] == ["en", "de", "fr"] and len(tested) == 13
    known = {normalized(text) for row in tested[1:] for text in row} | {"a test caption."}
    assert not known & {normalized(text) for row in trained[1:] for text in row}
    assert len(trained) + len(tested) in (40, 41, 42)  # 40 rows, two headers, a repeated row
    gold = [row[0] for row in tested[1:]]
    hard = mining.hard_rows("files/captions_order.txt", "files/captions_order.json", gold)
    assert {kind for _, _, kind in hard} == {"people"} and mining.reordered(hard, gold) == hard
    assert len(hard) == len({*gold} - {"A test caption."})
    for text, row, _ in hard:
        assert text != gold[row] and text.startswith("A woman in a ")
