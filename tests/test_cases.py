"""Files and folders as people have them. Each kind of fault (k1, k2, ...) was once silent or gave
wrong advice; tests/cases has inputs of every kind, and here is what each must give."""

from pathlib import Path

import pytest

import corpora
from common import BadInput

CASES = Path(__file__).parent / "cases"


def opened(name):
    """Return the columns, rows and notes of a case; in a name, ",data.de" adds a second file."""
    first, *more = name.split(",")
    path = CASES / first
    source = corpora.open_text([path, *(path.with_name(other) for other in more)]
                               if path.is_file() else path)
    rows = list(source.rows("all"))
    return source.columns, rows, "\n".join(source.notes)


def read_as(name, columns, count, *notes):
    """Check what a case gives; every note must be printed, and without any none is."""
    found, rows, lines = opened(name)
    assert found == tuple(columns.split()) and len(rows) == count
    assert all(note in lines for note in notes) and bool(notes) == bool(lines)
    return rows


# ---- k1: columns that are no texts; k2: labels and scores

COLUMNS = [
    ("k1_id_column/data.tsv", "en de", 60, "sentence_id"),
    ("k1_gold_label/data.csv", "sentence1 sentence2", 60, "gold_label"),
    ("k1_three_formats/data.tsv", "eng_Latn deu_Latn", 30, "line, genre"),
    ("k1_three_formats/data.csv", "eng_Latn deu_Latn", 30, "line, genre"),
    ("k1_three_formats/data.jsonl", "eng_Latn deu_Latn", 30, "line, genre"),
    ("k1_question_pairs/data.csv", "question1 question2", 30, "id, qid1, qid2, is_duplicate"),
    ("k1_domain_first/data.jsonl", "src trg", 30, "domain, id")]
LABELS = [
    ("k2_label_column/data.csv", "question answer", 60, "label"),
    ("k2_similarity_score/data.tsv", "sentence1 sentence2", 30, "genre, filename, year, id, score"),
    ("k2_entailment_json/data.jsonl", "premise hypothesis", 30, "gold_label"),
    ("k2_is_duplicate/data.csv", "text1 text2", 30, "is_duplicate")]


@pytest.mark.parametrize("name, columns, count, unread", COLUMNS)
def test_k1_only_known_columns_are_read(name, columns, count, unread):
    read_as(name, columns, count, f"data: columns not read: {unread} (choose with --langs)")


def test_k1_a_table_has_the_same_rows_in_every_format():
    tsv, csv, jsonl = (opened(f"k1_three_formats/data.{ending}")[1]
                       for ending in ("tsv", "csv", "jsonl"))
    assert tsv == csv == jsonl
    assert tsv[0] == ("The gardener repairs the bicycle.", "Die Gärtnerin repariert das Fahrrad.")


@pytest.mark.parametrize("name, columns, count, unread", LABELS)
def test_k2_a_note_says_that_labels_are_not_read(name, columns, count, unread):
    read_as(name, columns, count, f"columns not read: {unread} (choose with --langs), and all rows "
            "are used as matching pairs")


# ---- k7: no text, or packed, or other line ends

UNREADABLE = [
    ("k7_lfs_pointer/data.txt", "this is a git-lfs pointer, not the file itself: run git lfs pull"),
    ("k7_lfs_pointer/data.tsv", "run git lfs pull"),
    ("k7_lfs_pointer/data.csv", "run git lfs pull"),
    ("k7_lfs_pointer/data.jsonl", "run git lfs pull"),
    ("k7_subtitles/data.srt", "this is a file of subtitles: save the sentences alone"),
    ("k7_web_subtitles/talk.txt", "this is a file of subtitles: save the sentences alone"),
    ("k7_web_page/page.html", "this is markup: extract its text"),
    ("k7_wikiextractor/wiki_00", "this is markup: extract its text"),
    ("k7_news_sgm/news.sgm", "this is markup: extract its text"),
    ("k7_catalog/messages.po", "this is a gettext catalog: convert it to CSV"),
    ("k7_utf16/data.tsv", "this is UTF-16: convert it (iconv -f utf-16 -t utf-8)"),
    ("k7_binary/data.txt", "this is a binary file: save the texts as TSV, CSV or JSON Lines")]
READABLE = [
    ("k7_gzip_by_content/data.tsv", "en de", 60), ("k7_packed_by_content/bzip2.csv", "en de", 30),
    ("k7_packed_by_content/xz.jsonl", "en de", 30), ("k7_mac_csv/data.csv", "en de", 60),
    ("k7_old_mac_lines/data.tsv", "en de", 60), ("k7_old_mac_lines/data.txt", "text", 60)]


@pytest.mark.parametrize("name, advice", UNREADABLE)
def test_k7_files_that_are_no_text_are_refused_by_name(name, advice):
    with pytest.raises(BadInput) as error:
        opened(name)
    assert f"{name}:1: " in str(error.value) and advice in str(error.value)


@pytest.mark.parametrize("name, columns, count", READABLE)
def test_k7_compression_and_line_ends_are_recognized_by_content(name, columns, count):
    rows = read_as(name, columns, count)
    assert not any("\r" in text or "\n" in text for row in rows for text in row)


# ---- k8: delimiters

DELIMITED = [
    ("k8_excel_sep/data.csv", "en de", 60), ("k8_excel_sep/pipe.csv", "en de", 60),
    ("k8_tab_in_csv/pairs.csv", "en de", 60), ("k8_commas_in_tsv/data.tsv", "en de", 30),
    ("k8_semicolons/data.csv", "en de", 30, "columns not read: id"),
    ("k8_header_in_txt/data.txt", "src tgt", 30)]
NO_HEADER = [
    ("k8_tab_in_csv/sentences.csv", "add a header line such as en<TAB>de"),
    ("k8_tabs_in_txt/deu.txt", "the lines have tabs: name the file .tsv and add a header line"),
    ("k8_tab_pairs_txt/data.txt", "the lines have tabs: name the file .tsv and add a header line")]


@pytest.mark.parametrize("case", DELIMITED, ids=lambda case: case[0])
def test_k8_the_delimiter_is_the_one_that_splits_the_header(case):
    read_as(*case)


@pytest.mark.parametrize("name, advice", NO_HEADER)
def test_k8_a_table_without_a_header_is_told_how_to_get_one(name, advice):
    with pytest.raises(BadInput) as error:
        opened(name)
    assert f"{name}:1: " in str(error.value) and advice in str(error.value)


# ---- k9: what cat leaves; k10: cells without a visible character

JOINED = [
    ("k9_header_twice/data.tsv", "en de", 80, "1 repeated header lines are skipped"),
    ("k9_windows_cat/data.csv", "en de", 30, "2 repeated header lines are skipped"),
    ("k9_bom_inside/data.en,data.de", "en de", 80),
    ("k9_bom_json/data.jsonl", "src tgt", 30), ("k9_bom_text/data.txt", "text", 30)]
EMPTY_CELLS = [
    ("k10_invisible_cell/data.tsv", 45, 15), ("k10_database_null/data.tsv", 24, 6),
    ("k10_pandas_nan/data.csv", 24, 6), ("k10_word_joiner/data.jsonl", 25, 5)]


@pytest.mark.parametrize("case", JOINED, ids=lambda case: case[0])
def test_k9_headers_and_marks_in_the_middle_are_no_text(case):
    texts = {text for row in read_as(*case) for text in row}
    assert not any("\ufeff" in text for text in texts) and not texts & {"en", "de"}


@pytest.mark.parametrize("name, count, empty", EMPTY_CELLS)
def test_k10_cells_without_a_visible_character_are_empty_and_counted(name, count, empty):
    read_as(name, "en de", count, f"{empty} rows with too little text are skipped",
            f"{empty} cells have only invisible characters, \\N or nan, and count as empty")


# ---- k16: what macOS adds


@pytest.mark.parametrize("name, count", [
    ("k16_apple_double/devtest", 60), ("k16_dev/flores", 30), ("k16_dot_files/flores", 30),
    ("k16_packed/flores", 30)])
def test_k16_hidden_files_in_a_folder_are_no_languages(name, count):
    read_as(name, "eng_Latn deu_Latn", count)
