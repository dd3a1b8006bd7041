import gzip
import lzma

import pytest

import download
import tasks
from data import BadInput

GLUE = {  # as the archives unpack, path: (content, task, first, second, labels)
    "glue/SST-2/SST-2/train.tsv":
        ("sentence\tlabel\nhide new secretions \t0\nthat \"loves\" its \t1\n", "sst2", ["hide new secretions ", 'that "loves" its '], None, [0, 1]),
    "glue/CoLA/CoLA/dev.tsv":
        ("gj04\t1\t\tThe sailors rode.\ngj04\t0\t*\tSailors the rode.\n", "cola", ["The sailors rode.", "Sailors the rode."], None, [1, 0]),
    "glue/RTE/RTE/dev.tsv":
        ("index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\tnot_entailment\n1\tC.\tD.\tentailment\n", "rte", ["A.", "C."], ["B.", "D."], [0, 1]),
    "glue/WNLI/WNLI/dev.tsv": ("index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\t1\n", "wnli", ["A."], ["B."], [1]),
    "glue/QNLIv2/QNLI/dev.tsv": ("index\tquestion\tsentence\tlabel\n0\tWhy?\tSo.\tentailment\n", "qnli", ["Why?"], ["So."], [1]),
    "glue/STS-B/STS-B/dev.tsv": ("index\tgenre\tsentence1\tsentence2\tscore\n0\tm\tA \"b.\tC.\t3.25\n", "stsb", ['A "b.'], ["C."], [3.25]),
    "mnli/MNLI/MNLI/dev_matched.tsv":
        ("index\tsentence1\tsentence2\tlabel1\tgold_label\n0\tA.\tB.\tneutral\tneutral\n1\tC\tD\tneutral\t-\n", "mnli", ["A."], ["B."], [1]),
    "mnli/MNLI/dev_mismatched.tsv": ("index\tsentence1\tsentence2\tgold_label\n0\tA.\tB.\tcontradiction\n", "mnli-mm", ["A."], ["B."], [2]),
    "qqp/QQP-clean/QQP/dev.tsv": ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\tA?\tB?\t1\n", "qqp", ["A?"], ["B?"], [1]),
    "stsb/stsb-en-test.csv": ('"A man, a plan.","A ""canal"".",2.5\nA.,B.,0\n', "stsb", ["A man, a plan.", "A."], ['A "canal".', "B."], [2.5, 0]),
    "sick/sick_test_annotated/SICK_test_annotated.txt":
        ("pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n6\tA.\tB.\t3.3\tNEUTRAL\n", "sick-e", ["A."], ["B."], [1]),
    "snli/snli_1.0/snli_1.0/snli_1.0_test.txt": ("gold_label\tsentence1\tsentence2\n-\tA.\tB.\ncontradiction\tC.\tD.\n", "snli", ["C."], ["D."], [2]),
    "senteval/sentiment-test": ("no movement\t0\ngood\t1\n", "sst", ["no movement", "good"], None, [0, 1]),
    "senteval/TREC_10.label": ("NUM:dist How far is it ?\nHUM:ind Who ?\n", "trec", ["How far is it ?", "Who ?"], None, [5, 3]),
    "ag-news/test.csv": ('"3","Oil up","It rose, ""fast""."\n"2","Win","They won."\n', "ag-news", ['Oil up It rose, "fast".', "Win They won."], None, [2, 1]),
}


def write(path, text, encoding="utf-8"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(encoding))


@pytest.mark.parametrize("path", GLUE)
def test_the_original_distributions_are_read(path, tmp_path):
    text, name, first, second, labels = GLUE[path]
    part = "train" if "train" in path else "test"
    write(tmp_path / path, text)
    rows = tasks.read(name, tmp_path, part)
    assert rows == (first, second, labels)


def test_the_dev_rows_of_mrpc_are_those_that_glue_names(tmp_path):
    head = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    write(tmp_path / "glue/msr_paraphrase_train.txt", head + "".join(f"{i % 2}\t{i}\t{i + 50}\tA \"{i}\tB {i}\n" for i in range(9)))
    write(tmp_path / "glue/msr_paraphrase_test.txt", head + "1\t90\t91\tC\tD\n")
    write(tmp_path / "glue/mrpc_dev_ids.tsv", "3\t53\n4\t54\n5\t99\n")
    assert tasks.read("mrpc", tmp_path, "valid") == (['A "3', 'A "4'], ["B 3", "B 4"], [1, 0])
    assert len(tasks.read("mrpc", tmp_path, "train").labels) == 7 and tasks.read("mrpc", tmp_path, "test") == (["C"], ["D"], [1])
    assert len(tasks.read("mrpc", tmp_path, "train+valid").labels) == 9


def test_sets_of_sentevals_with_a_file_for_each_class_are_read_as_latin_1(tmp_path):
    for kind in ("neg", "pos"):
        write(tmp_path / f"senteval/datasmall_NB_ACL12/data/rt10662/rt-polarity.{kind}", "".join(f"caf\xe9 {kind} {i}\n" for i in range(10)), "latin-1")
    parts = [tasks.read("mr", tmp_path, part) for part in ("train", "valid", "test")]
    assert [len(rows.labels) for rows in parts] == [16, 2, 2]
    together = sorted((text, label) for rows in parts for text, label in zip(rows.first, rows.labels))
    assert together == sorted((f"caf\xe9 {kind} {i}", int(kind == "pos")) for kind in ("neg", "pos") for i in range(10))


def test_languages_are_columns_rows_or_folders(tmp_path):
    write(tmp_path / "xnli/XNLI-1.0/XNLI-1.0/xnli.test.tsv", "language\tgold_label\tsentence1\tsentence2\nde\tneutral\tJa.\tNein.\nen\tentailment\tYes.\tNo.\n")
    assert tasks.read("xnli", tmp_path, "test", "de") == (["Ja."], ["Nein."], [1])
    assert tasks.read("xnli", tmp_path).first == ["Yes."]
    for lang, train in (("de", "translated_train"), ("en", "train")):
        for part in (train, "dev_2k", "test_2k"):
            write(tmp_path / f"pawsx/x-final/x-final/{lang}/{part}.tsv", f"id\tsentence1\tsentence2\tlabel\n1\t{lang} {part}\tB\t1\n")
    assert [tasks.read("pawsx", tmp_path, part, "de").first for part in ("train", "test")] == [["de translated_train"], ["de test_2k"]]
    assert tasks.read("pawsx", tmp_path, "train").first == ["en train"]
    with lzma.open(tmp_path / "stsb_multi_test.tsv.xz", "wt", encoding="utf-8") as file:
        file.write("score\ts1_en\ts2_en\ts1_de\ts2_de\n5.0\tA\tB\tC\tD\n")
    assert tasks.read("stsb", tmp_path, "test", "de") == (["C"], ["D"], [5.0])
    with pytest.raises(BadInput, match="stsb_multi_test.tsv.xz has no column 's1_fr'; there are score, s1_en"):
        tasks.read("stsb", tmp_path, "test", "fr")
    write(tmp_path / "tasks/rte_dev.tsv", "sentence1\tsentence2\tlabel\nA\tB\tentailment\n")
    with pytest.raises(BadInput, match="English only"):
        tasks.read("rte", tmp_path, "test", "de")
    with pytest.raises(BadInput, match="no test rows in the language fr"):
        tasks.read("xnli", tmp_path, "test", "fr")


@pytest.mark.parametrize("place, ending", [("", ".tsv"), ("tasks/", ".tsv.gz"), ("tasks/", ".tsv.xz")])
def test_plain_tables_are_found_in_the_folder_and_in_its_folder_tasks(place, ending, tmp_path):
    text = b"label\tsentence\tsource\n1\tIt \"is.\tgj04\n0\tIs it\tgj04\n"
    packed = {".tsv": text, ".tsv.gz": gzip.compress(text), ".tsv.xz": lzma.compress(text)}[ending]
    for name in ("cola_in_domain_dev", "cola_out_of_domain_dev"):
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / f"{place}{name}{ending}").write_bytes(packed)
    assert tasks.read("cola", tmp_path) == (['It "is.', "Is it"] * 2, None, [1, 0, 1, 0])


def test_what_nobody_published_is_made_of_train_and_always_the_same(tmp_path, capsys):
    tasks._note.cache_clear()
    write(tmp_path / "senteval_custrev.tsv", "label\tsentence\n" + "".join(f"{i % 2}\t{i}\n" for i in range(50)))
    parts = {part: tasks.read("cr", tmp_path, part).first for part in ("train", "valid", "test")}
    assert parts["test"] == ["5", "6", "10", "16", "25"] and parts["valid"] == ["1", "9", "37", "40", "46"]    # pinned: results must stay comparable
    assert sorted(sum(parts.values(), []), key=int) == [str(i) for i in range(50)]
    assert tasks.read("cr", tmp_path, "train+valid+test").first == parts["train"] + parts["valid"] + parts["test"]
    said = capsys.readouterr().err
    assert said.count("note: cr: a tenth of the train rows, by a fixed shuffle, stands for test, which is not there\n") == 1
    assert tasks.made("cr", tmp_path, "test") and not tasks.made("cr", tmp_path, "train")
    write(tmp_path / "sst2_train.tsv", "sentence\tlabel\n" + "".join(f"{i}\t1\n" for i in range(50)))
    write(tmp_path / "sst2_dev.tsv", "sentence\tlabel\ndev\t0\n")
    assert tasks.read("sst2", tmp_path).first == ["dev"] and not tasks.made("sst2", tmp_path)
    assert tasks.read("sst2", tmp_path, "valid").first == parts["test"] and len(tasks.read("sst2", tmp_path, "train").first) == 45
    write(tmp_path / "mrpc_val.tsv", "sentence1\tsentence2\tlabel\nA\tB\t0\n")
    assert tasks.read("mrpc", tmp_path).first == ["A"] and tasks.made("mrpc", tmp_path) == "the published valid rows stand for test, which is not there"
    with pytest.raises(BadInput, match="mrpc: .*msr_paraphrase_train.txt is missing"):
        tasks.read("mrpc", tmp_path, "train")


@pytest.mark.parametrize("text, message", [
    ("label\tsentence\n1\tfine\n2\tbad\n", r"sst2_dev.tsv, line 3: the label '2' is not one of 0, 1"),
    ("label\tsentence\n1\tfine\tmore\n", r"sst2_dev.tsv, line 2: 3 cells, the header has 2"),
    ("label\ttext\n1\tfine\n", r"sst2_dev.tsv, line 2: there is no column 'sentence'; there are label, text"),
    ("label\tsentence\n", "sst2: there are no test rows"),
])
def test_bad_rows_are_named(text, message, tmp_path):
    write(tmp_path / "sst2_dev.tsv", text)
    with pytest.raises(BadInput, match=message):
        tasks.read("sst2", tmp_path)


def test_rows_that_are_not_there_are_named_with_address_licence_and_command(tmp_path):
    for name, task in tasks.TASKS.items():
        reason = tasks.missing(name, tmp_path)
        row = download.find(next(source.dataset for source in task.sources if source.dataset))
        for word in (str(tmp_path / row.name), row.licence, "https://", f"python data.py download {row.name} --folder {tmp_path}"):
            assert word in reason and "\n" not in reason
        assert any(one.address in reason for one in row.files)
    with pytest.raises(BadInput, match="choose from sst2, .*did you mean mrpc"):
        tasks.read("mrcp", tmp_path)
