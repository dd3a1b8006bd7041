"""Make the training and test files of the experiments out of public ones (see REPRODUCE.md).

encoders_*: Tatoeba pairs of English with five languages and Multi30k's captions, without rows that
contain a sentence of a test set; NTREX for validation and test. documents_*: Wikipedia, one
paragraph per line. nlrx_*, decoder_*: parts of NL-RX-SYNTH's training rows. captions_*: Multi30k's
English test captions, with one word replaced (altered) or two exchanged (reordered).
"""

import csv
import json
import lzma
import random
import re
from pathlib import Path

from common import BadInput, Parser, atomic_file, make_folder
from corpora.overlap import normalized
from corpora.words import bag_of_words

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


def test_sentences(public):
    """Return the set of all sentences of TESTS and of Tatoeba's test sets in our languages."""
    ours = {*LANGUAGES, *(name for names in LANGUAGES.values() for name in names)}
    paths = [public / f"{name}.tsv.xz" for name in TESTS]
    paths += public.glob("parallel/tatoeba_laser_v1/*.tsv.xz")
    # A column is named "de", "deu" or "premise_de".
    return {normalized(text) for path in paths
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
        kept = [row for row in pairs if tests.isdisjoint(map(normalized, row.values()))]
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


# ---- edited captions

# {type of error: lists of words, one of which replaces another of the same list}
REPLACED = {
    "number": ["two three four five six seven eight"],
    "color": ["white black blue red yellow green brown pink purple orange gray"],
    "person": ["man woman boy girl", "men women boys girls"],
    "animal": ["dog cat horse cow goat", "dogs cats horses cows goats"],
    "action": ["sitting standing walking running jumping sleeping dancing",
               "sits stands walks runs jumps sleeps dances",
               "eating holding throwing painting cleaning carrying"],
    "thing": ["hat jacket shirt dress", "guitar violin piano drum trumpet",
              "ball stick frisbee book camera phone", "bike car boat bus truck train"],
    "place": ["street beach park field kitchen forest lake snow city mountain"]}
# {what is exchanged: lists of words, two of which exchange their positions}
EXCHANGED = {
    "people": ["man woman boy girl child lady guy baby dog horse cat",
               "men women boys girls children ladies guys dogs horses cats"],
    "colors": ["white black blue red yellow green brown pink purple gray orange"]}
# Words that can join two equal parts of a caption.
JOINING = set("a an the and or with of another other one two three his her their little young old "
              "older younger small big large".split())


def split_words(caption):
    """Return the words of a caption and what is between them: "".join(parts) is the caption, and
    the words are parts[1::2]."""
    return re.split(r"(\w+)", caption)


def with_words(caption, changes):
    """Return a caption with other words: {number of the word: the new one}. A new word begins in
    upper case if the old one does, and "a" before it becomes "an" where it must, or the reverse."""
    parts = split_words(caption)
    for number, new in changes.items():
        index = 2 * number + 1
        parts[index] = new.capitalize() if parts[index][0].isupper() else new.lower()
        if number and parts[index - 2].lower() in ("a", "an"):
            article = "an" if new[0].lower() in "aeiou" else "a"
            is_upper = parts[index - 2][0].isupper()
            parts[index - 2] = article.capitalize() if is_upper else article
    return "".join(parts)


def altered_captions(captions, chance):
    """Yield (caption with one word replaced, caption, type of error): at most one of each type."""
    for caption in captions:
        words = split_words(caption.lower())[1::2]
        for kind, lists in REPLACED.items():
            found = [(number, one.split()) for number, word in enumerate(words)
                     for one in lists if word in one.split()]
            if found:
                number, choices = found[0]
                new = chance.choice([word for word in choices if word not in words])
                yield with_words(caption, {number: new}), caption, kind


def exchangeable(words, choices):
    """Return the numbers of the first two different words among the choices, or None. Each must
    occur once, and something must happen between them that makes the order matter: a word that
    joins no equal parts and is nowhere else ("a black dog and a brown dog" has none)."""
    numbers = [number for number, word in enumerate(words) if word in choices]
    if len(numbers) < 2 or any(words.count(words[number]) > 1 for number in numbers[:2]):
        return None
    first, second = numbers[:2]
    matters = [word for word in words[first + 1:second]
               if word not in JOINING and words.count(word) == 1]
    return (first, second) if matters else None


def reordered_captions(captions):
    """Yield (caption with two words exchanged, caption, what is exchanged) where the words stay the
    same. Articles change with their nouns, so "an orange hat and a red shirt" qualifies."""
    for caption in captions:
        words = split_words(caption.lower())[1::2]
        for kind, lists in EXCHANGED.items():
            pairs = [exchangeable(words, one.split()) for one in lists]
            for first, second in filter(None, pairs):
                text = with_words(caption, {first: words[second], second: words[first]})
                if bag_of_words(text) == bag_of_words(caption):
                    yield text, caption, kind


def hard_files(name, edits, captions):
    """Return {file: its lines} of edits in xsim++'s format. An edit that is another caption is left
    out, and so is a second one that is equal to the first."""
    known = set(captions)
    types = {}
    for text, caption, kind in edits:
        if text not in known:
            types.setdefault(text, {"src": caption, "errtype": kind})
    return {f"{name}.txt": list(types), f"{name}.json": [json.dumps(types)]}


def caption_files(public):
    """Return {file: its lines} of the edited captions."""
    captions = [row["en"] for row in tsv_rows(public / "parallel/multi30k_test_2016_flickr.tsv.xz")]
    altered = altered_captions(captions, random.Random(0))
    return (hard_files("captions_altered", altered, captions)
            | hard_files("captions_reordered", reordered_captions(captions), captions))


# ---- all files


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
            "decoder_train.jsonl": trained, "decoder_test.jsonl": tested,
            **caption_files(public)}


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
