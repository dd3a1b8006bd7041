"""The published sets as they are distributed, as plain tables, and what stands for a split."""

import gzip
import lzma

import pytest

from corpora.program import BadInput
from tasks import sets

PUBLISHED = {  # as the archives unpack, path: (content, set, first, second, labels)
    "tasks/rte_dev.tsv.gz": (
        "sentence1\tsentence2\tlabel\nA \"b\tB\tentailment\n",
        "rte", ['A "b'], ["B"], [1]),
    "mnli/MNLI/MNLI/dev_matched.tsv": (
        "index\tsentence1\tsentence2\tgold_label\n0\tA.\tB.\tneutral\n1\tC\tD\t-\n",
        "mnli", ["A."], ["B."], [1]),
    "stsb/stsb-en-test.csv": (
        '"A man, a plan.","A ""canal"".",2.5\nA.,B.,0\n',
        "stsb", ["A man, a plan.", "A."], ['A "canal".', "B."], [2.5, 0]),
    "senteval/TREC_10.label": (
        "NUM:dist How far is it ?\nHUM:ind Who ?\n\n",
        "trec", ["How far is it ?", "Who ?"], None, [5, 3]),
    "ag-news/test.csv": (  # blank lines are no rows, and U+2028 ends no line
        '"3","Oil\u2028up","It rose, ""fast""."\n\n"2","Win","They won."\n\n',
        "ag-news", ['Oil\u2028up It rose, "fast".', "Win They won."], None, [2, 1]),
    "trec_test.tsv": ("label\ttext\nNUM\tHow far?\nHUM\tWho?\n", "trec", ["How far?", "Who?"],
                      None, [5, 3]),
    "sst_test.csv": ('text,label\n"A, ""b"".",1\nC,0\n', "sst", ['A, "b".', "C"], None, [1, 0]),
    "tasks/ag_news_test.tsv.gz": ("label\ttext\n3\tOil\n2\tWin\n", "ag-news", ["Oil", "Win"],
                                  None, [2, 1]),
    "stsb_multi_test.tsv.xz": (
        "score\ts1_en\ts2_en\n1\tone\u2028two\x85three\t\r\n2\tC\tD\n\n\n",
        "stsb", ["one\u2028two\x85three", "C"], ["", "D"], [1, 2]),
}


def write(path, text, encoding="utf-8"):
    path.parent.mkdir(parents=True, exist_ok=True)
    compress = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.write_bytes(compress(text.encode(encoding)))


@pytest.mark.parametrize("path", PUBLISHED)
def test_the_original_distributions_and_plain_tables_are_read(path, tmp_path, capsys):
    text, name, first, second, labels = PUBLISHED[path]
    write(tmp_path / path, text)
    assert sets.read_set(name, tmp_path) == (first, second, labels)
    assert ("1 of 2 rows have an empty text" in capsys.readouterr().err) == ("" in (second or ()))


def test_the_dev_rows_of_mrpc_are_those_that_glue_names(tmp_path):
    head = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    rows = "".join(f"{i % 2}\t{i}\t{i + 50}\tA \"{i}\tB {i}\n" for i in range(9))
    write(tmp_path / "glue/msr_paraphrase_train.txt", head + rows)
    write(tmp_path / "glue/msr_paraphrase_test.txt", head + "1\t90\t91\tC\tD\n")
    write(tmp_path / "glue/mrpc_dev_ids.tsv", "3\t53\n4\t54\n5\t99\n")
    assert sets.read_set("mrpc", tmp_path, "valid") == (['A "3', 'A "4'], ["B 3", "B 4"], [1, 0])
    assert sets.read_set("mrpc", tmp_path, "test") == (["C"], ["D"], [1])
    assert len(sets.read_set("mrpc", tmp_path, "train").labels) == 7
    assert len(sets.read_set("mrpc", tmp_path, "train+valid").labels) == 9


def test_sets_of_sentevals_with_a_file_for_each_class_are_read_as_latin_1(tmp_path):
    folder = tmp_path / "senteval/datasmall_NB_ACL12/data/rt10662"
    wanted = []
    for label, kind in enumerate(("neg", "pos")):
        lines = [f"caf\xe9 {kind} {i}" for i in range(9)] + [""]  # a row, as SentEval reads it
        wanted += [(line, label) for line in lines]
        write(folder / f"rt-polarity.{kind}", "\n".join(lines) + "\n", "latin-1")
    rows = sets.read_set("mr", tmp_path, "train+valid+test")
    assert sorted(zip(rows.first, rows.labels)) == sorted(wanted)
    assert len(sets.read_set("mr", tmp_path, "train").labels) == 16


def test_languages_are_columns_rows_or_folders(tmp_path):
    write(tmp_path / "xnli/XNLI-1.0/XNLI-1.0/xnli.test.tsv",
          "language\tgold_label\tsentence1\tsentence2\n"
          "de\tneutral\tJa.\tNein.\nen\tentailment\tYes.\tNo.\n")
    assert sets.read_set("xnli", tmp_path, "test", "de") == (["Ja."], ["Nein."], [1])
    assert sets.read_set("xnli", tmp_path).first == ["Yes."]
    write(tmp_path / "pawsx/x-final/x-final/de/test_2k.tsv",
          "id\tsentence1\tsentence2\tlabel\n1\tA\tB\t1\n")
    assert sets.read_set("pawsx", tmp_path, "test", "de").first == ["A"]
    write(tmp_path / "stsb_multi_test.tsv", "score\ts1_en\ts1_de\ts2_de\n5.0\tA\tC\tD\n")
    assert sets.read_set("stsb", tmp_path, "test", "de") == (["C"], ["D"], [5.0])
    write(tmp_path / "tasks/rte_dev.tsv", "sentence1\tsentence2\tlabel\nA\tB\tentailment\n")
    for name, lang, message in (("stsb", "fr", "no column 's1_fr'; there are score, s1_en"),
                                ("rte", "de", "English only"),
                                ("xnli", "fr", "no test rows in the language fr")):
        with pytest.raises(BadInput, match=message):
            sets.read_set(name, tmp_path, "test", lang)


def test_what_nobody_published_is_made_of_train_and_always_the_same(tmp_path, capsys):
    rows = "".join(f"{i % 2}\t{i}\n" for i in range(50))
    write(tmp_path / "senteval_custrev.tsv", "label\tsentence\n" + rows)
    parts = {part: sets.read_set("cr", tmp_path, part).first for part in ("train", "valid", "test")}
    assert parts["test"] == ["3", "12", "18", "30", "48"]         # pinned: results stay comparable
    assert parts["valid"] == ["1", "40", "46", "47", "49"]
    assert sorted(sum(parts.values(), []), key=int) == [str(i) for i in range(50)]
    assert "note: cr: a tenth of the train rows" in capsys.readouterr().err
    write(tmp_path / "mrpc_val.tsv", "sentence1\tsentence2\tlabel\nA\tB\t0\n")
    assert sets.read_set("mrpc", tmp_path).first == ["A"]
    assert "the published valid rows for test" in capsys.readouterr().err


@pytest.mark.parametrize("text, message", [
    ("label\tsentence\n1\tfine\n2\tbad\n", r"dev.tsv, line 3: the label '2' is not one of 0, 1"),
    ("label\tsentence\n\n1\tfine\tmore\n", r"dev.tsv, line 3: 3 cells, the header has 2"),
    ("label\ttext\n1\tfine\n", r"dev.tsv, line 2: there is no column 'sentence'"),
    ("label\tsentence\nnan\tfine\n", "the label 'nan' is not"),
    ("label\tsentence\n", "sst2: there are no test rows"),
    ("label\tsentence\n1\tcaf\udce9\n", "sst2_dev.tsv is not as it was published"),
])
def test_bad_rows_are_named(text, message, tmp_path):
    (tmp_path / "sst2_dev.tsv").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(BadInput, match=message):
        sets.read_set("sst2", tmp_path)


def test_rows_that_are_not_there_are_named_with_licence_and_command(tmp_path):
    for name, one in sets.SETS.items():
        reason = sets.missing_rows(name, tmp_path)
        dataset = next(source.dataset for source in one.sources if source.dataset)
        for word in (str(tmp_path / dataset), "licence: ", f"corpora.download {dataset}"):
            assert word in reason and "\n" not in reason
    with pytest.raises(BadInput, match="choose from sst2, .*did you mean mrpc"):
        sets.read_set("mrcp", tmp_path)
