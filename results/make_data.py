"""Make the data files of the experiments out of public ones, which REPRODUCE.md lists.

encoders_*: Tatoeba pairs of English with five languages and Multi30k's captions, without rows that
contain a sentence of a test set; NTREX for validation and test. captions_altered, _reordered:
Multi30k's English test captions with one word replaced, or two exchanged. captions_order_*: its
training rows, of which 10,000 are held out; these, and its validation rows, with two words
exchanged.
"""

import csv
import itertools
import json
import lzma
import random
import re
from pathlib import Path

from base.common import BadInput, Parser, atomic_file, make_folder
from base.tokenizer import Tokenizer
from corpora.overlap import bag_of_words, normalized

# {our column: its name in the files of Tatoeba, and of NTREX}
TATOEBA = {"en": "eng", "de": "deu", "fr": "fra", "ru": "rus", "zh": "cmn", "tr": "tur"}
NTREX = TATOEBA | {"zh": "zho-CN"}
CAPTIONS = {name: name for name in ("en", "de", "fr")}
PAIRS = 20_000  # of Tatoeba, for each language
HELD_OUT = 10_000  # of Multi30k's training rows
VOCABULARY = 8000  # of the tokenizer that compares edits
TESTS = ("parallel/ntrex", "parallel/multi30k_val", "parallel/multi30k_test_2016_flickr",
         "tasks/stsb_multi_dev", "tasks/pawsx_dev", "tasks/xnli_dev_17way")
WORDS = json.loads(Path(__file__).with_name("edits.json").read_text(encoding="utf-8"))
ROLES = {role: set(words.split()) for role, words in WORDS["roles"].items()}


def read_table(path, columns=None):
    """Yield the rows {column: text} of a .tsv.xz file with a header. columns: all, or {our name:
    theirs}."""
    if not path.is_file():
        raise BadInput(f"there is no {path}: results/REPRODUCE.md lists the files")
    with lzma.open(path, "rt", encoding="utf-8", newline="\n") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            yield {ours: row[theirs] for ours, theirs in (columns or dict(zip(row, row))).items()}


def test_sentences(public):
    """Return the set of all sentences of TESTS and of Tatoeba's test sets in our languages."""
    ours = {*TATOEBA, *TATOEBA.values(), *NTREX.values()}
    paths = [public / f"{name}.tsv.xz" for name in TESTS]
    paths += public.glob("parallel/tatoeba_laser_v1/*.tsv.xz")
    # A column is named "de", "deu" or "premise_de".
    return {normalized(text) for path in paths
            for row in read_table(path) for column, text in row.items()
            if column.rpartition("_")[2] in ours}


def without(rows, sentences):
    """Return the rows {column: text} that contain none of the normalized sentences."""
    return [row for row in rows if sentences.isdisjoint(map(normalized, row.values()))]


def encoder_rows(public, captions, tests):
    """Return the training rows, {column: text}, that share no sentence with a test set."""
    chance = random.Random(0)
    rows = []
    for name, theirs in TATOEBA.items():
        if name != "en":
            path = public / f"parallel/tatoeba_pairs/eng-{theirs}.tsv.xz"
            kept = without(read_table(path, {"en": "eng", name: theirs}), tests)
            rows += chance.sample(kept, min(PAIRS, len(kept)))
    rows += without(captions, tests)
    chance.shuffle(rows)
    return rows


def tsv(rows, columns):
    """Return rows {column: text} as the lines of a table."""
    return ["\t".join(columns), *("\t".join(row.get(name, "") for name in columns) for row in rows)]


# ---- edited captions


def words_of(caption):
    return re.findall(r"\w+", caption.lower())


def with_words(caption, changes):
    """Return a caption with other words, {number of the word: the new one}, which begin in upper
    case if the old ones do. "a" before them becomes "an" where it must, or the reverse."""
    parts = re.split(r"(\w+)", caption)  # the words are parts[1::2]

    def replace(index, new):
        parts[index] = new.capitalize() if parts[index][0].isupper() else new

    for number, new in changes.items():
        index = 2 * number + 1
        replace(index, new)
        if number and parts[index - 2].lower() in ("a", "an"):
            replace(index - 2, "an" if new[0] in "aeiou" else "a")
    return "".join(parts)


def altered_captions(captions):
    """Yield (caption with one word replaced, caption, type): at most one of each type."""
    chance = random.Random(0)
    for caption in captions:
        words = words_of(caption)
        for kind, lists in WORDS["replaced"].items():
            found = [(number, one.split()) for number, word in enumerate(words)
                     for one in lists if word in one.split()]
            if found:
                number, choices = found[0]
                new = chance.choice([word for word in choices if word not in words])
                yield with_words(caption, {number: new}), caption, kind


def reordered_captions(captions, tokens):
    """Yield (caption with two words exchanged, caption, type): for each type the first pair whose
    exchange leaves tokens(caption) as they are. Articles change with their nouns, so "an orange hat
    and a red shirt" qualifies."""
    for caption in captions:
        words, kinds = words_of(caption), set()
        for kind, first, second in order_pairs(words):
            text = with_words(caption, {first: words[second], second: words[first]})
            if kind not in kinds and tokens(text) == tokens(caption):
                kinds.add(kind)
                yield text, caption, kind


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


def order_files(rows, valid, tests):
    """Return {file: its lines} of the split for the order of words, given Multi30k's training and
    validation rows. captions_order_ids_*: the same texts as ids of a tokenizer, for minimal.bag."""
    held_out = {*random.Random(0).sample(range(len(rows)), HELD_OUT)}
    tested = [row for number, row in enumerate(rows) if number in held_out]
    trained = without([row for number, row in enumerate(rows) if number not in held_out],
                      tests.union(*(map(normalized, row.values()) for row in tested)))
    tokenizer = Tokenizer.train([text for row in trained for text in row.values()], VOCABULARY)
    files = {}
    for name, part in ("captions_order", tested), ("captions_order_valid", valid):
        edits = reordered_captions([row["en"] for row in part],
                                   lambda text: sorted(tokenizer.encode([text])[0].tolist()))
        files |= hard_files(name, edits, [row["en"] for row in [*rows, *valid]])

    def as_ids(text):
        return " ".join(f"t{number}" for number in tokenizer.encode([text])[0])

    for name, part in ("train", trained), ("test", tested):
        in_ids = [{name: as_ids(text) for name, text in row.items()} for row in part]
        files |= {f"captions_order_{name}.tsv": tsv(part, CAPTIONS),
                  f"captions_order_ids_{name}.tsv": tsv(in_ids, CAPTIONS)}
    edits = {as_ids(text): one | {"src": as_ids(one["src"])}
             for text, one in json.loads(files["captions_order.json"][0]).items()}
    return files | {"captions_order_ids.json": [json.dumps(edits)]}


def make_files(public):
    """Return {file: its lines}."""
    tests = test_sentences(public)
    news = [*read_table(public / "parallel/ntrex.tsv.xz", NTREX)]
    rows = [*read_table(public / "parallel/multi30k_train.tsv.xz", CAPTIONS)]
    valid = [*read_table(public / f"{TESTS[1]}.tsv.xz", CAPTIONS)]
    tested = [row["en"] for row in read_table(public / f"{TESTS[2]}.tsv.xz")]
    return {"encoders_train.tsv": tsv(encoder_rows(public, rows, tests), TATOEBA),
            "encoders_valid.tsv": tsv(news[:500], TATOEBA),
            "encoders_test.tsv": tsv(news[500:], TATOEBA),
            **hard_files("captions_altered", altered_captions(tested), tested),
            **hard_files("captions_reordered", reordered_captions(tested, bag_of_words), tested),
            **order_files(rows, valid, tests)}


def make_data_command(words):
    parser = Parser("python -m results make-data", __doc__)
    parser.add_argument("public", type=Path, metavar="PUBLIC", help="folder of the public files")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the new files")
    options = parser.parse_args(words)
    make_folder(options.out, "OUT")
    for name, lines in make_files(options.public).items():
        with atomic_file(options.out / name) as file:
            file.writelines(f"{line}\n".encode() for line in lines)
        print(f"{options.out / name}: {len(lines):,} lines")
