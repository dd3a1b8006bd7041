"""Make the training and test files of the experiments out of public ones (see REPRODUCE.md).

encoders_*: Tatoeba pairs of English with five languages and Multi30k's captions, without rows that
contain a sentence of a test set; NTREX for validation and test. captions_altered and _reordered:
Multi30k's English test captions with one word replaced, or two exchanged. captions_order_train and
_test: Multi30k's training rows, of which 10,000 are held out; captions_order: the held-out English
captions with two words exchanged. edits.json has the lists of words.
"""

import csv
import itertools
import json
import lzma
import random
import re
from pathlib import Path

from common import BadInput, Parser, atomic_file, make_folder
from corpora.overlap import normalized
from corpora.words import bag_of_words
from data import Tokenizer

# {column: its name at Tatoeba, at NTREX}
LANGUAGES = {"en": ("eng", "eng"), "de": ("deu", "deu"), "fr": ("fra", "fra"),
             "ru": ("rus", "rus"), "zh": ("cmn", "zho-CN"), "tr": ("tur", "tur")}
CAPTIONS = ("en", "de", "fr")
PAIRS = 20_000  # of Tatoeba, for each language
HELD_OUT = 10_000  # rows of Multi30k's training rows
VOCABULARY = 8000  # of the tokenizer that compares edits
TESTS = ("parallel/ntrex", "parallel/multi30k_val", "parallel/multi30k_test_2016_flickr",
         "tasks/stsb_multi_dev", "tasks/pawsx_dev", "tasks/xnli_dev_17way")
WORDS = json.loads(Path(__file__).with_name("edits.json").read_text(encoding="utf-8"))
ROLES = {role: set(words.split()) for role, words in WORDS["roles"].items()}


def tsv_rows(path):
    """Yield the rows of a .tsv.xz file with a header, as dicts."""
    if not path.is_file():
        raise BadInput(f"there is no {path}: REPRODUCE.md describes the files")
    with lzma.open(path, "rt", encoding="utf-8", newline="\n") as file:
        yield from csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)


def test_sentences(public):
    """Return the set of all sentences of TESTS and of Tatoeba's test sets in our languages."""
    ours = {*LANGUAGES, *(name for names in LANGUAGES.values() for name in names)}
    paths = [public / f"{name}.tsv.xz" for name in TESTS]
    paths += public.glob("parallel/tatoeba_laser_v1/*.tsv.xz")
    # A column is named "de", "deu" or "premise_de".
    return {normalized(text) for path in paths
            for row in tsv_rows(path) for column, text in row.items()
            if column.rpartition("_")[2] in ours}


def without(rows, sentences):
    """Return the rows {column: text} that contain none of the normalized sentences."""
    return [row for row in rows if sentences.isdisjoint(map(normalized, row.values()))]


def read_captions(public, name):
    """Return the rows of a file of Multi30k, {column: text}."""
    return [{column: row[column] for column in CAPTIONS}
            for row in tsv_rows(public / f"parallel/multi30k_{name}.tsv.xz")]


def encoder_rows(public, tests):
    """Return the training rows, {column: text}, that share no sentence with a test set."""
    chance = random.Random(0)
    rows = []
    for name, (tatoeba, _) in LANGUAGES.items():
        if name != "en":
            pairs = [{"en": row["eng"], name: row[tatoeba]} for row in
                     tsv_rows(public / f"parallel/tatoeba_pairs/eng-{tatoeba}.tsv.xz")]
            kept = without(pairs, tests)
            rows += chance.sample(kept, min(PAIRS, len(kept)))
    rows += without(read_captions(public, "train"), tests)
    chance.shuffle(rows)
    return rows


def tsv(rows, columns=tuple(LANGUAGES)):
    """Return rows {column: text} as the lines of a table."""
    return ["\t".join(columns), *("\t".join(row.get(name, "") for name in columns) for row in rows)]


# ---- edited captions


def split_words(caption):
    """Return the words of a caption and what is between them: "".join(parts) is the caption, and
    the words are parts[1::2]."""
    return re.split(r"(\w+)", caption)


def words_of(caption):
    return split_words(caption.lower())[1::2]


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
        words = words_of(caption)
        for kind, lists in WORDS["replaced"].items():
            found = [(number, one.split()) for number, word in enumerate(words)
                     for one in lists if word in one.split()]
            if found:
                number, choices = found[0]
                new = chance.choice([word for word in choices if word not in words])
                yield with_words(caption, {number: new}), caption, kind


def exchanged_captions(captions, pairs, tokens):
    """Yield (caption with two words exchanged, caption, type): for each type the first of
    pairs(words) whose exchange leaves tokens(caption) as they are. Articles change with their
    nouns, so "an orange hat and a red shirt" qualifies."""
    for caption in captions:
        words, kinds = words_of(caption), set()
        for kind, first, second in pairs(words):
            text = with_words(caption, {first: words[second], second: words[first]})
            if kind not in kinds and tokens(text) == tokens(caption):
                kinds.add(kind)
                yield text, caption, kind


def first_pairs(words):
    """Yield (type, first, second): the numbers of the first two words of a list. Each occurs once,
    and between them is a word that joins no equal parts and is nowhere else: not in "a black dog
    and a brown dog"."""
    for kind, lists in WORDS["exchanged"].items():
        for one in lists:
            found = [number for number, word in enumerate(words) if word in one.split()][:2]
            if len(found) == 2 and all(words.count(words[number]) == 1 for number in found):
                between = words[found[0] + 1:found[1]]
                if any(words.count(word) == 1 for word in between if word not in ROLES["equal"]):
                    yield kind, *found


def modifiers(words, number):
    """Return the modifiers just before a word: {"young"} of "man" in "a young man"."""
    return set(itertools.takewhile(ROLES["modifiers"].__contains__, reversed(words[:number])))


def described(words, number):
    """Return what a modifier describes: "hat" for "red" in "a red straw hat"; "" for nothing."""
    skipped = ROLES["modifiers"] | {"and"}
    return next((word for word in words[number + 1:] if word not in skipped), "")


def order_pairs(words):
    """Yield (type, first, second): the numbers of two words whose exchange changes what a caption
    says, and not its grammar. Each occurs once, and nouns not in a compound such as "dog park".

    The order matters if the modifiers differ, or if a word between the two joins no equal parts: in
    "a man and an old woman" and "a man pulls a woman", not in "a man and a woman"."""
    for kind, lists in WORDS["order"].items():
        compounds = ROLES["compounds"] if kind != "attributes" else ()
        joining = ROLES["joining"].union(ROLES["modifiers"], *map(str.split, lists))
        for one in lists:
            found = [number for number, (word, after) in enumerate(zip(words, [*words[1:], ""]))
                     if word in one.split() and words.count(word) == 1 and after not in compounds]
            for first, second in itertools.combinations(found, 2):
                between = set(words[first + 1:second])
                own, other = modifiers(words, first), modifiers(words, second)
                matters = between - joining or other and own != other
                if kind == "attributes":  # of two things
                    things = {described(words, first), described(words, second)}
                    matters = len(things) == 2 and not things & (ROLES["articles"] | {""})
                if kind == "clothes":  # "a plaid shirt and cap" shares the modifier
                    matters = matters and (own != other or between & ROLES["people"])
                if matters:
                    animals = ROLES["animals"] & {words[first], words[second]}
                    yield "person-animal" if animals else kind, first, second


def hard_files(name, edits, captions):
    """Return {file: its lines} of edits in xsim++'s format. An edit that is another caption is left
    out, and so is a second one that is equal to the first."""
    known = set(captions)
    types = {}
    for text, caption, kind in edits:
        if text not in known:
            types.setdefault(text, {"src": caption, "errtype": kind})
    return {f"{name}.txt": list(types), f"{name}.json": [json.dumps(types)]}


# ---- all files


def caption_files(public):
    """Return {file: its lines} of the edited test captions."""
    captions = [row["en"] for row in read_captions(public, "test_2016_flickr")]
    altered = altered_captions(captions, random.Random(0))
    reordered = exchanged_captions(captions, first_pairs, bag_of_words)
    return (hard_files("captions_altered", altered, captions)
            | hard_files("captions_reordered", reordered, captions))


def order_files(rows, tests):
    """Return {file: its lines} of the split for the order of words, given Multi30k's rows."""
    held_out = {*random.Random(0).sample(range(len(rows)), HELD_OUT)}
    tested = [row for number, row in enumerate(rows) if number in held_out]
    trained = without([row for number, row in enumerate(rows) if number not in held_out],
                      tests.union(*(map(normalized, row.values()) for row in tested)))
    tokenizer = Tokenizer.train([text for row in trained for text in row.values()], VOCABULARY)
    edits = exchanged_captions([row["en"] for row in tested], order_pairs,
                               lambda text: sorted(tokenizer.encode([text])[0].tolist()))
    return {"captions_order_train.tsv": tsv(trained, CAPTIONS),
            "captions_order_test.tsv": tsv(tested, CAPTIONS),
            **hard_files("captions_order", edits, [row["en"] for row in rows])}


def make_files(public):
    """Return {file: its lines}."""
    tests = test_sentences(public)
    news = [{name: row[column] for name, (_, column) in LANGUAGES.items()}
            for row in tsv_rows(public / "parallel/ntrex.tsv.xz")]
    return {"encoders_train.tsv": tsv(encoder_rows(public, tests)),
            "encoders_valid.tsv": tsv(news[:500]), "encoders_test.tsv": tsv(news[500:]),
            **caption_files(public), **order_files(read_captions(public, "train"), tests)}


def make_data_command(words):
    parser = Parser("python -m results make-data", __doc__.partition("\n\n")[2].strip())
    parser.add_argument("public", type=Path, metavar="PUBLIC", help="folder of the public files")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the new files")
    options = parser.parse_args(words)
    make_folder(options.out, "OUT")
    for name, lines in make_files(options.public).items():
        with atomic_file(options.out / name) as file:
            file.writelines(f"{line}\n".encode() for line in lines)
        print(f"{options.out / name}: {len(lines):,} lines")
