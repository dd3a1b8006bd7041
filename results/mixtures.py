"""Make the training and test files of the experiments out of public ones (see REPRODUCE.md).

encoders_*: Tatoeba pairs of English with five languages and Multi30k's captions, without rows that
contain a sentence of a test set; NTREX for validation and test. documents_*: Wikipedia, one
paragraph per line. nlrx_*, decoder_*: parts of NL-RX-SYNTH's training rows.
"""

import csv
import json
import lzma
import random
from pathlib import Path

from common import BadInput, Parser, atomic_file, make_folder

# {column: its name at Tatoeba, at NTREX}
LANGUAGES = {"en": ("eng", "eng"), "de": ("deu", "deu"), "fr": ("fra", "fra"),
             "ru": ("rus", "rus"), "zh": ("cmn", "zho-CN"), "tr": ("tur", "tur")}
PAIRS = 20_000  # of Tatoeba, for each language
TESTS = ("parallel/ntrex", "parallel/multi30k_val", "parallel/multi30k_test_2016_flickr",
         "tasks/stsb_multi_dev", "tasks/pawsx_dev", "tasks/xnli_dev_17way")


def lines_of(path):
    if not path.is_file():
        raise BadInput(f"there is no {path}: REPRODUCE.md describes the files")
    with lzma.open(path, "rt", encoding="utf-8", newline="\n") as file:
        yield from file


def tsv_rows(path):
    """Yield the rows of a .tsv.xz file with a header, as dicts."""
    return csv.DictReader(lines_of(path), delimiter="\t", quoting=csv.QUOTE_NONE)


def plain(text):
    """Return a text without differences in case and space."""
    return " ".join(text.casefold().split())


def test_sentences(public):
    """Return the set of all sentences of TESTS and of Tatoeba's test sets in our languages."""
    ours = {*LANGUAGES, *(name for names in LANGUAGES.values() for name in names)}
    paths = [public / f"{name}.tsv.xz" for name in TESTS]
    # A column is named "de", "deu" or "premise_de".
    return {plain(text) for path in (*paths, *public.glob("parallel/tatoeba_laser_v1/*.tsv.xz"))
            for row in tsv_rows(path) for column, text in row.items()
            if column.rpartition("_")[2] in ours}


def encoder_rows(public):
    """Return the training rows, {column: text}, that share no sentence with a test set."""
    tests = test_sentences(public)
    chance = random.Random(0)
    sources = {f"tatoeba_pairs/eng-{tatoeba}": {"en": "eng", name: tatoeba}
               for name, (tatoeba, _) in LANGUAGES.items() if name != "en"}
    sources["multi30k_train"] = {name: name for name in ("en", "de", "fr")}
    rows = []
    for path, columns in sources.items():
        pairs = ({name: row[column] for name, column in columns.items()}
                 for row in tsv_rows(public / f"parallel/{path}.tsv.xz"))
        kept = [row for row in pairs if tests.isdisjoint(map(plain, row.values()))]
        if path.startswith("tatoeba"):
            kept = chance.sample(kept, min(PAIRS, len(kept)))
        rows += kept
    chance.shuffle(rows)
    return rows


def tsv(rows):
    """Return rows {column: text} as the lines of a table."""
    return ["\t".join(LANGUAGES),
            *("\t".join(row.get(name, "") for name in LANGUAGES) for row in rows)]


def paragraphs(articles):
    """Return the paragraphs of articles without headings."""
    return [text for article in articles for text in article.split("\n") if len(text) > 100]


def decoder_rows(lines):
    """Return 1,920 lines, and 4,000 others whose texts occur in no line before them: nothing that
    is tested was trained on, or is tested twice."""
    seen = set()
    tested = []
    for number, line in enumerate(lines):
        row = json.loads(line)
        texts = {row["user"], row["assistant"]}
        if number >= 1920 and seen.isdisjoint(texts):
            tested.append(line)
        seen |= texts
    return lines[:1920], tested[:4000]


def make_files(public):
    """Return {file: its lines}."""
    news = [{name: row[column] for name, (_, column) in LANGUAGES.items()}
            for row in tsv_rows(public / "parallel/ntrex.tsv.xz")]
    articles = [json.loads(line)["text"]
                for line in lines_of(public / "text/enwiki_train.jsonl.xz")]
    held_out = articles[::50]
    del articles[::50]
    commands = [line.rstrip("\n") for line in lines_of(public / "llm/synth_train.jsonl.xz")]
    random.Random(0).shuffle(commands)
    trained, tested = decoder_rows(commands)
    return {"encoders_train.tsv": tsv(encoder_rows(public)),
            "encoders_valid.tsv": tsv(news[:500]), "encoders_test.tsv": tsv(news[500:]),
            "documents_train.txt": paragraphs(articles),
            "documents_valid.txt": paragraphs(held_out),
            "nlrx_choose.jsonl": commands[:-1000], "nlrx_valid.jsonl": commands[-1000:],
            "nlrx_quarter.jsonl": commands[:2000], "nlrx_sixteenth.jsonl": commands[:500],
            "decoder_train.jsonl": trained, "decoder_test.jsonl": tested}


def mixtures_command(words):
    parser = Parser("python -m results mixtures", "Make the files of the experiments.")
    parser.add_argument("public", type=Path, metavar="PUBLIC", help="folder of the public files")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="for the new files")
    options = parser.parse_args(words)
    make_folder(options.folder, "FOLDER")
    for name, lines in make_files(options.public).items():
        with atomic_file(options.folder / name) as file:
            file.writelines(f"{line}\n".encode() for line in lines)
        print(f"{options.folder / name}: {len(lines):,} lines")
