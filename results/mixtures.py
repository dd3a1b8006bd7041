"""The files of the experiments on real text that are parts or mixtures of public ones.

    python -m results mixtures FOLDER OUT     # FOLDER as corpora.download and README.md lay it out

encoders_train.tsv: Tatoeba pairs of English with five languages and Multi30k's captions, less every
row with a sentence of a test; encoders_valid.tsv, encoders_test.tsv: the first 500 and the other
rows of NTREX; documents_train.txt, documents_valid.txt: Wikipedia, a paragraph a line;
nlrx_choose.jsonl, nlrx_valid.jsonl: all but 1,000 and 1,000 rows of NL-RX-SYNTH's training set;
nlrx_quarter.jsonl, nlrx_sixteenth.jsonl: 2,000 and 500 of its 8,000 rows; decoder_train.jsonl,
decoder_test.jsonl: 1,920 and 4,000 other rows of it.
"""

import csv
import itertools
import json
import lzma
import random
from pathlib import Path

from corpora.folder import write_atomic
from corpora.program import BadInput, Parser

# {column: its name at Tatoeba, at NTREX}.
LANGUAGES = {"de": ("deu", "deu"), "fr": ("fra", "fra"), "ru": ("rus", "rus"),
             "zh": ("cmn", "zho-CN"), "tr": ("tur", "tur")}
PAIRS = 20_000  # of Tatoeba, for each language
# What the experiments test on, and the columns that hold sentences there; {} is a language.
TESTS = {"parallel/ntrex": ["eng", *(name for _, name in LANGUAGES.values())],
         "parallel/multi30k_val": ["en", "de", "fr"],
         "parallel/multi30k_test_2016_flickr": ["en", "de", "fr"],
         "tasks/stsb_multi_dev": ["s1_{}", "s2_{}"],
         "tasks/xnli_dev_17way": ["premise_{}", "hypothesis_{}"],
         "tasks/pawsx_dev": ["s1_{}", "s2_{}"]}


def tsv_rows(path):
    """Rows of a .tsv.xz file with a header, as dicts."""
    with lzma.open(path, "rt", encoding="utf-8", newline="\n") as file:
        yield from csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)


def plain(text):
    """One spelling of texts that differ in case and space alone."""
    return " ".join(text.casefold().split())


def test_sentences(folder):
    """All sentences of TESTS and of Tatoeba's tests, a set."""
    found = set()
    for name, columns in TESTS.items():
        kept = set()
        for language in ("en", *LANGUAGES):
            kept.update(column.format(language) for column in columns)
        for row in tsv_rows(folder / f"{name}.tsv.xz"):
            found.update(plain(text) for column, text in row.items() if column in kept)
    for path in sorted((folder / "parallel/tatoeba_laser_v1").glob("*.tsv.xz")):
        for row in tsv_rows(path):
            found.update(map(plain, row.values()))
    return found


def without(rows, tests):
    """The rows of texts that share none with the tests, and how many do."""
    kept = []
    for row in rows:
        if tests.isdisjoint(map(plain, row.values())):
            kept.append(row)
    return kept, len(rows) - len(kept)


def encoder_rows(folder, chance):
    """Lines of encoders_train.tsv, and how many of each source were taken out of it."""
    tests = test_sentences(folder)
    rows = []
    removed = {}
    for name, (tatoeba, _) in LANGUAGES.items():
        path = folder / f"parallel/tatoeba_pairs/eng-{tatoeba}.tsv.xz"
        pairs = [{"en": row["eng"], name: row[tatoeba]} for row in tsv_rows(path)]
        kept, removed[name] = without(pairs, tests)
        rows += chance.sample(kept, min(PAIRS, len(kept)))
    captions = []
    for row in tsv_rows(folder / "parallel/multi30k_train.tsv.xz"):
        captions.append({"en": row["en"], "de": row["de"], "fr": row["fr"]})
    kept, removed["captions"] = without(captions, tests)
    rows += kept
    chance.shuffle(rows)
    lines = ["\t".join(["en", *LANGUAGES])]
    for row in rows:
        lines.append("\t".join(row.get(name, "") for name in ("en", *LANGUAGES)))
    return lines, removed


def paragraphs(articles):
    """The paragraphs of articles, no headings."""
    return [text for text in itertools.chain(*articles) if len(text) > 100]


def decoder_rows(lines):
    """1,920 rows of a chat, and 4,000 others whose texts stand in no row before them, lines each:
    nothing that is tested was trained on, nor is tested twice."""
    seen = set()
    tested = []
    for number, line in enumerate(lines):
        row = json.loads(line)
        texts = {row["user"], row["assistant"]}
        if number >= 1920 and seen.isdisjoint(texts):
            tested.append(line)
        seen |= texts
    return lines[:1920], tested[:4000]


def other_files(folder):
    """{name of a file: its lines}, all but encoders_train.tsv."""
    news = ["\t".join(["en", *LANGUAGES])]
    columns = ["eng", *(ntrex for _, ntrex in LANGUAGES.values())]
    for row in tsv_rows(folder / "parallel/ntrex.tsv.xz"):
        news.append("\t".join(row[name] for name in columns))
    with lzma.open(folder / "text/enwiki_train.jsonl.xz", "rt", encoding="utf-8") as file:
        articles = [json.loads(line)["text"].split("\n") for line in file]
    held = articles[::50]
    del articles[::50]
    with lzma.open(folder / "llm/synth_train.jsonl.xz", "rt", encoding="utf-8") as file:
        commands = file.read().splitlines()
    random.Random(0).shuffle(commands)
    trained, tested = decoder_rows(commands)
    return {"encoders_valid.tsv": news[:501], "encoders_test.tsv": news[:1] + news[501:],
            "documents_train.txt": paragraphs(articles), "documents_valid.txt": paragraphs(held),
            "nlrx_choose.jsonl": commands[:-1000], "nlrx_valid.jsonl": commands[-1000:],
            "nlrx_quarter.jsonl": commands[:2000], "nlrx_sixteenth.jsonl": commands[:500],
            "decoder_train.jsonl": trained, "decoder_test.jsonl": tested}


def main(arguments):
    parser = Parser("python -m results mixtures", __doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the public files")
    parser.add_argument("out", type=Path, metavar="OUT", help="where the made ones go")
    options = parser.parse_args(arguments)
    if not (options.folder / "parallel").is_dir():
        raise BadInput(f"{options.folder} has no parallel/: give the folder with parallel, text, "
                       "tasks and llm that results/NOTES.md describes")
    lines, removed = encoder_rows(options.folder, random.Random(0))
    options.out.mkdir(parents=True, exist_ok=True)
    files = {"encoders_train.tsv": lines, **other_files(options.folder)}
    for name, lines in files.items():
        write_atomic(options.out / name, "".join(line + "\n" for line in lines).encode())
        print(f"{options.out / name}: {len(lines):,} lines")
    print("taken out, because a test has the sentence: "
          f"{', '.join(f'{count:,} of {name}' for name, count in removed.items())}")
