"""Which columns of a file hold texts, and which of them a run reads: by content and by name.

    no   en        de        en_len   topic   de_url        en, de are read
    1    A cat.    Ein Kater.   6     web     x.org/1       no, en_len are numbers, and so on
"""

import collections
import itertools
import re
import unicodedata
from pathlib import Path
from typing import NamedTuple

# ISO 639-1, FLORES-200, and languages written out.
LANGUAGES = set(Path(__file__).with_name("languages.txt").read_text("utf-8").split())
GROUPS = ("src tgt", "src trg", "src ref", "sentence1 sentence2", "question1 question2",
          "s1 s2", "text1 text2", "anchor positive", "premise hypothesis", "english regex",
          "user assistant system", "user assistant", "question answer", "text",
          "source target")
LABEL = re.compile("label|score|simil|rating|class|duplicate|quality|entail|match|correct|relevan",
                   re.IGNORECASE)
# The last word of a column that is no text of a language, as in en_id, en_scores, is_relevant.
NO_TEXT = re.compile(rf"(.*[\W_])?(id|{LABEL.pattern})(s|t|ce|ity|ment)?", re.IGNORECASE)
# Which language it is more exactly: pt-BR, zh_cn, deu_Latn, zh-Hans-CN; or which text of it: en_1.
REGION = re.compile(r"([A-Z]{2}|[A-Z][a-z]{3}|\d{1,3}|cn|tw|hk|br|us|gb|latn|cyrl|arab|han[st]"
                    r"|[Ss]implified|[Tt]raditional)"
                    r"([\W_]\w+)?")
SIDES = ("src", "tgt", "trg", "ref", "source", "target")  # of a translation, in a file's name
CODE = re.compile(r"[a-z]{2,3}([_-]\w+)?")  # what a code looks like, known or not


# ---- names


def parse(name):
    """Return the language of a column and what else its name says: ("en", "") for en, EN2 or
    en-GB, ("en", "title") for en_title; None if it does not begin with a language."""
    # macOS writes some letters, such as the ñ of "español", as two characters.
    name = unicodedata.normalize("NFC", name)
    match = re.fullmatch(r"([^\W\d_]+)\d*(?:[\W_]+(\w.*?))?\)?", name)
    if not match or match[1].lower() not in LANGUAGES or NO_TEXT.fullmatch(match[2] or ""):
        return None
    rest = match[2] or ""
    is_part = REGION.fullmatch(rest) or len(rest) > 3 and rest.lower() in LANGUAGES  # toba_batak
    return match[1].lower(), "" if is_part else rest


def is_language(name):
    """Return whether a name is nothing but a language: en, zh-CN, en1, deu_Latn, English."""
    return parse(name) is not None and not parse(name)[1]


def after_prefix(name):
    """Return ("text_en", "text_"), a name and what comes before a language in it; () if there is
    no language at its end."""
    cuts = [match.end() for match in re.finditer(r"[\W_]", name)]
    return next(((name, name[:cut]) for cut in cuts if is_language(name[cut:])), ())


def languages(names):
    """Return the names of the same text in several languages; [] if there are fewer than two."""
    found = {name: parse(name) for name in names if parse(name)}
    bare = {language for language, rest in found.values() if not rest}
    # en and de are the texts, so that en_title is something else.
    kept = [name for name, (language, rest) in found.items()
            if not rest or len(bare) < 2 and language not in bare]
    rests = [found[name][1] for name in kept]
    # Of en_title, de_title, en_body, de_body the first kind is read.
    first = next((rest for rest in rests if rest and rests.count(rest) > 1), None)
    if first:
        kept = [name for name in kept if found[name][1] in ("", first)]
    if not bare:  # of en_source, de_human, de_google the first one of each language is read
        kept = [*{found[name][0]: name for name in reversed(kept)}.values()][::-1]
    return kept if len(kept) > 1 else []


def known_names(names, texts=None):
    """Return the columns to read, the first known group in `names`; () if there is none. `texts`:
    those that can be languages, by default all."""
    spelled = {name.lower(): name for name in names}
    texts = names if texts is None else texts
    if found := languages(texts):
        return tuple(found)
    for group in GROUPS:
        found = tuple(map(spelled.get, group.split()))
        # "source" is also where a text comes from, and "ref" its address.
        is_ambiguous = group in ("source target", "src ref")
        if all(found) and (not is_ambiguous or {*found} <= {*texts}):
            return found
    prefixes = dict(filter(None, map(after_prefix, texts)))
    counts = collections.Counter(prefixes.values())
    # Only one kind of texts, because s1_en, s2_en, s1_de, s2_de are not the same text.
    several = [prefix for prefix in counts if counts[prefix] > 1]
    sides = [name for name in prefixes if prefixes[name][:-1].lower() in SIDES]
    if not several and len(sides) > 1:  # src_en, tgt_de
        return tuple(sides)
    return tuple(name for name in prefixes if [prefixes[name]] == several)


def parallel_names(paths):
    """Return the column of each of several text files if line N of all files is one row; () if
    their names do not tell it. `paths` are without .gz.

        corpus.de corpus.en       deu_Latn.dev eng_Latn.dev    src-train.txt tgt-train.txt
        train.de.txt train.en.txt      news-ref.deu.txt news-src.eng.txt
    """
    def distinct(names):
        return tuple(names) if len({*names}) == len(paths) > 1 and all(names) else ()

    endings = [path.suffix[1:] for path in paths]
    # Parts of one file, such as x.01 x.02 or x.aa x.ab of `split`, are no languages.
    if {"aa", "ab"} <= {*endings}:
        return ()
    # a.raw and b.tok can be anything.
    is_known = len({path.stem for path in paths}) == 1 or any(map(is_language, endings))
    has_other = any(one.isdecimal() or one.lower() == "txt" for one in endings)
    if is_known and not has_other and distinct(endings):
        return distinct(endings)
    for separators in (".", ".-", ".-_"):
        parts = [re.split(f"[{separators}]", path.name) for path in paths]
        # Remove what all names have in common, such as "train" or "txt", at the start and the end.
        while all(parts) and len({one[0] for one in parts}) == 1:
            parts = [one[1:] for one in parts]
        while all(parts) and len({one[-1] for one in parts}) == 1:
            parts = [one[:-1] for one in parts]
        ends = [one[-1] if one else "" for one in parts]
        has_unknown = any(map(is_language, ends)) and all(map(CODE.fullmatch, ends))
        for names in ([next(filter(is_language, one[::-1]), "") for one in parts],
                      ends if has_unknown else [],  # an unknown code beside a known one
                      [next(filter(SIDES.__contains__, one[::-1]), "") for one in parts]):
            if distinct(names):
                return distinct(names)
    # FLORES has codes that we do not know.
    return distinct([path.stem for path in paths]) if {*endings} <= {"dev", "devtest"} else ()


def parallel_groups(paths):
    """Return [(indices of parallel files, their columns)], one pair if all are parallel to each
    other; [] if a name does not tell it.

        E.de-en.de E.de-en.en E.en-fr.en E.en-fr.fr     [((0, 1), (de, en)), ((2, 3), (en, fr))]
    """
    if names := parallel_names(paths):
        return [(range(len(paths)), names)]
    groups = {}  # {the parts of a name but its language: indices}
    for index, path in enumerate(paths):
        parts = re.split("[.-]", path.name)
        places = [number for number, part in enumerate(parts) if is_language(part)]
        if places:
            del parts[places[-1]]
        groups.setdefault(tuple(parts), []).append(index)
    found = [(indices, parallel_names([paths[index] for index in indices]))
             for indices in groups.values()]
    return found if all(names for _, names in found) else []


# ---- content

FEWEST = 10  # cells tell what a column is
NUMBERS, IDENTIFIERS, FEW = "numbers", "addresses or identifiers", "few values"
SHORT, LATIN = "much shorter than the others", "in Latin letters"
# Languages that have others. "he" and "as" are also English words.
NOT_LATIN = set("am ar as be bg bn el fa gu he hi hy ja ka km kn ko ky lo mk ml mr my ne or pa "
                "ps ru si ta te th ti ug uk ur yi zh".split())
NESTED = "[...]"  # stands for a list or an object of JSON
# A cell without a letter; an address or one word of ASCII that has a digit or an inner sign.
NUMBER = re.compile(r"[\W\d_]+")
ADDRESS = re.compile(r"https?://\S+|[!-~\t]*(\d|\w[./:@\\_]+\w)[!-~\t]*")
WORDS = re.compile(r"\S\s+\S")
ID = re.compile(r"(.*[\W_])?id\d*", re.IGNORECASE)
MT = re.compile(r"(.*[\W_])?mt([\W_].*)?", re.IGNORECASE)  # Maltese, or a machine translation


def mostly(test, cells):
    return 2 * sum(map(bool, map(test, cells))) > len(cells)


def kinds_of(rows, names):
    """Return {column: what it is} for those columns of `rows` that hold no texts."""
    kinds = {}
    for name in names:
        cells = [row[name] for row in rows if row.get(name)]
        if not cells:
            kinds[name] = "empty"
        elif mostly(NESTED.__eq__, cells):
            kinds[name] = "lists or objects"
        elif mostly(NUMBER.fullmatch, cells):
            kinds[name] = NUMBERS
        elif len(cells) >= 3 and mostly(ADDRESS.fullmatch, cells):
            kinds[name] = IDENTIFIERS
        elif ID.fullmatch(name) and not mostly(WORDS.search, cells):
            kinds[name] = IDENTIFIERS  # otherwise it is Indonesian
        elif name.lower() in NOT_LATIN and mostly(str.isascii, cells):
            kinds[name] = LATIN
    texts = [name for name in names if name not in kinds]
    # Copies of a row do not make its values rare.
    unique = dict.fromkeys(tuple(row.get(name, "") for name in texts) for row in rows)
    columns = {name: list(filter(None, cells)) for name, cells in zip(texts, zip(*unique))}
    # In bytes, because a Chinese sentence has few characters.
    lengths = {name: sum(len(cell.encode()) for cell in cells) / len(cells)
               for name, cells in columns.items()}
    for name, cells in columns.items():
        is_short = 2 * lengths[name] <= max(lengths.values())
        most = len(cells) // (3 if is_short else 10)
        if len(cells) >= FEWEST and len({*cells}) <= most:
            kinds[name] = FEW
        elif len(cells) >= FEWEST and is_short and len({*map(numberless, cells)}) <= most:
            kinds[name] = IDENTIFIERS
        near = MT.fullmatch(name) and next((other for other in texts if not MT.fullmatch(other)
                                            and are_alike(unique, texts, name, other)), "")
        if near:
            kinds[name] = f"much like {near}"
    # Beside two sentences, a word such as "train" is no translation.
    read = languages([name for name in texts if name not in kinds])
    usual = sorted(lengths[name] for name in read)[-2] if len(read) > 2 else 0
    return kinds | {name: SHORT for name in read if 6 * lengths[name] < usual}


def numberless(text):
    """Return "GEN :" for GEN 1:1, so that references are few values, but a text with more than
    three words as it is: sentences can differ in a number alone."""
    rest = re.sub(r"\d+", "", text)
    return rest if len(rest.split()) < 4 else text


def are_alike(rows, names, one, other, least=0.25):
    """Return whether two columns share a quarter of their trigrams of characters."""
    shares = []
    for row in itertools.islice(rows, 200):
        texts = row[names.index(one)], row[names.index(other)]
        x, y = ({text[i:i + 3] for i in range(len(text) - 2)} for text in texts)
        if x and y:
            shares.append(len(x & y) / len(x | y))
    return sum(shares) > least * max(1, len(shares))


def unconnected(rows, columns):
    """Return the columns in groups. No row has texts of two groups."""
    groups = []
    for found in {frozenset(name for name in columns if row.get(name)) for row in rows}:
        apart = [group for group in groups if not group & found]
        groups = [*apart, found.union(*(group for group in groups if group & found))]
    return [", ".join(name for name in columns if name in group) for group in groups if group]


# ---- what a run reads


class Schema(NamedTuple):
    """The columns of a file."""
    columns: tuple  # those that are read, () if there is no known name; "system" comes last
    texts: tuple  # those that decide which rows are held out, whatever is read
    least: int  # a row is held out only if this many of them have a text
    unread: dict  # {column: why it is not read}


def choose(names, rows, langs=(), like=(), default=()):
    """Return the Schema of a file with the columns `names`, given some of its rows, {column: text}.

    langs: the columns of --langs. like: those that the run has chosen already. default: those to
    read if neither is given, if the content does not matter."""
    kinds = kinds_of(rows, names)
    texts = [name for name in names if name not in kinds]
    if not texts:  # a file of identifiers has nothing better
        texts = [name for name in names if kinds[name] in (IDENTIFIERS, FEW)]
    # Beside two languages, the .ids of OPUS are none.
    kept = [name for name in default if kinds.get(name) not in (NUMBERS, IDENTIFIERS)]
    default = (tuple(kept) if len(kept) > 1 else default) or known_names(names, texts)
    columns = tuple(langs or like or default)
    if not {*columns} <= {*names}:
        columns = ()
    elif like and not langs and {*like} & {*default}:
        columns = tuple(dict.fromkeys((*like, *default)))
    columns = tuple(sorted(columns, key=lambda name: name == "system"))
    known = {name for name in names if parse(name) or name.lower() in " ".join(GROUPS).split()}
    unread = {name: kinds.get(name) or ("not in --langs" if langs else "others are read"
                                        if name in known else "unknown name")
              for name in names if name not in columns}
    unread = unread if columns else kinds
    least = min(2, sum(name != "system" for name in default or texts))
    return Schema(columns, tuple(dict.fromkeys((*default, *texts))), least, unread)
