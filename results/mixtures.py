"""The files of the experiments on real text that are parts or mixtures of public ones.

    python -m results mixtures FOLDER OUT     # FOLDER as corpora.download and README.md lay it out

encoders_train.tsv: Tatoeba pairs of English with five languages and Multi30k's captions, less every
row with a sentence of a test; encoders_valid.tsv, encoders_test.tsv: the first 500 and the other
rows of NTREX; documents_train.txt, documents_valid.txt: Wikipedia, a paragraph a line;
nlrx_choose.jsonl, nlrx_valid.jsonl: all but 1,000 and 1,000 rows of NL-RX-SYNTH's training set.
"""

import csv
import json
import lzma
import random
from pathlib import Path

from corpora.program import BadInput, Parser
from corpora.text import write_atomic

# Column -> Tatoeba's, NTREX's name.
LANGUAGES = {"de": ("deu", "deu"), "fr": ("fra", "fra"), "ru": ("rus", "rus"),
             "zh": ("cmn", "zho-CN"), "tr": ("tur", "tur")}
PAIRS = 20_000  # of Tatoeba, a language
# What the experiments test on, and the columns that hold sentences there; {} is a language.
TESTS = {"parallel/ntrex": ["eng", *(name for _, name in LANGUAGES.values())],
         "parallel/multi30k_val": ["en", "de", "fr"],
         "parallel/multi30k_test_2016_flickr": ["en", "de", "fr"],
         "tasks/stsb_multi_dev": ["s1_{}", "s2_{}"],
         "tasks/xnli_dev_17way": ["premise_{}", "hypothesis_{}"],
         "tasks/pawsx_dev": ["s1_{}", "s2_{}"]}


def table(path):
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
        names = {column.format(language) for column in columns for language in ["en", *LANGUAGES]}
        for row in table(folder / f"{name}.tsv.xz"):
            found.update(plain(row[column]) for column in names & set(row))
    for path in sorted((folder / "parallel/tatoeba_laser_v1").glob("*.tsv.xz")):
        for row in table(path):
            found.update(map(plain, row.values()))
    return found


def encoders(folder, chance):
    """Rows of encoders_train.tsv, and how many of each source were taken out of it."""
    tests = test_sentences(folder)
    columns = ["en", *LANGUAGES]
    rows = []
    removed = {}
    sources = {name: (folder / f"parallel/tatoeba_pairs/eng-{tatoeba}.tsv.xz", "eng", tatoeba)
               for name, (tatoeba, _) in LANGUAGES.items()}
    for name, (path, english, other) in sources.items():
        pairs = [{"en": row[english], name: row[other]} for row in table(path)]
        kept = [row for row in pairs if not any(plain(text) in tests for text in row.values())]
        removed[name] = len(pairs) - len(kept)
        rows += chance.sample(kept, min(PAIRS, len(kept)))
    captions = [{name: row[name] for name in ("en", "de", "fr")}
                for row in table(folder / "parallel/multi30k_train.tsv.xz")]
    kept = [row for row in captions if not any(plain(text) in tests for text in row.values())]
    removed["captions"] = len(captions) - len(kept)
    rows += kept
    chance.shuffle(rows)
    return [columns, *([row.get(name, "") for name in columns] for row in rows)], removed


def parts(folder):
    """{name of a file: its lines}, all but encoders_train.tsv."""
    columns = ["eng", *(ntrex for _, ntrex in LANGUAGES.values())]
    news = [[row[name] for name in columns] for row in table(folder / "parallel/ntrex.tsv.xz")]
    header = ["en", *LANGUAGES]
    with lzma.open(folder / "text/enwiki_train.jsonl.xz", "rt", encoding="utf-8") as file:
        articles = [json.loads(line)["text"].split("\n") for line in file]
    held = [text for article in articles[::50] for text in article if len(text) > 100]
    del articles[::50]
    train = [text for article in articles for text in article if len(text) > 100]
    with lzma.open(folder / "llm/synth_train.jsonl.xz", "rt", encoding="utf-8") as file:
        commands = file.read().splitlines()
    random.Random(0).shuffle(commands)
    return {"encoders_valid.tsv": ["\t".join(row) for row in [header, *news[:500]]],
            "encoders_test.tsv": ["\t".join(row) for row in [header, *news[500:]]],
            "documents_train.txt": train, "documents_valid.txt": held,
            "nlrx_choose.jsonl": commands[:-1000], "nlrx_valid.jsonl": commands[-1000:]}


def main(arguments):
    parser = Parser("python -m results mixtures", __doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the public files")
    parser.add_argument("out", type=Path, metavar="OUT", help="where the made ones go")
    options = parser.parse_args(arguments)
    if not (options.folder / "parallel").is_dir():
        raise BadInput(f"{options.folder} has no parallel/: give the folder with parallel, text, "
                       "tasks and llm that results/README.md describes")
    rows, removed = encoders(options.folder, random.Random(0))
    options.out.mkdir(parents=True, exist_ok=True)
    files = {"encoders_train.tsv": ["\t".join(row) for row in rows], **parts(options.folder)}
    for name, lines in files.items():
        write_atomic(options.out / name, "".join(line + "\n" for line in lines).encode())
        print(f"{options.out / name}: {len(lines):,} lines")
    print("taken out, because a test has the sentence: "
          f"{', '.join(f'{count:,} of {name}' for name, count in removed.items())}")
