"""Which columns of a file a run reads: those with a known name that hold texts.

    id   en        de           en_len   topic   en, de are read
    1    A cat.    Ein Kater.   6        web     id, en_len hold no texts, topic has few values
"""

import re
import unicodedata
from pathlib import Path
from typing import NamedTuple

from base.common import BadInput, shown

# ---- names

# ISO 639-1, FLORES-200, and languages written out.
LANGUAGES = set(Path(__file__).with_name("languages.txt").read_text("utf-8").split())
GROUPS = ("src tgt", "src trg", "sentence1 sentence2", "question1 question2", "s1 s2",
          "text1 text2", "anchor positive", "query positive", "query answer",
          "premise hypothesis", "english non_english", "english regex", "user assistant system",
          "user assistant", "question answer", "prompt completion", "instruction output", "text",
          "source target")
# Which language it is more exactly: pt-BR, zh_cn, deu_Latn, zh-Hans-CN; or which text of it: en_1.
REGION = re.compile(r"[A-Z]{2}|[A-Z][a-z]{3}|\d{1,3}|cn|tw|hk|br|us|gb|latn|cyrl|arab|han[st]")
SIDES = {"src", "tgt", "trg", "ref", "source", "target"}  # of a translation, in a file's name
FLORES = re.compile(r"[a-z]{3}_[A-Z][a-z]{3}")


def language(name):
    """Return the language in a column's name and what else it says: ("en", "") for en, EN2, en-GB
    or English, ("en", "title") for en_title or title_en; ("", "") without a language."""
    if len(name) > 40 or name.endswith((".", "!", "?")):  # a sentence of a file without a header
        return "", ""
    # macOS writes some letters, such as the ñ of "español", as two characters.
    words = re.findall(r"[^\W_]+", unicodedata.normalize("NFC", name))
    codes = [re.sub(r"\d{1,2}$", "", word.lower()) for word in words]
    # "It is" and "So sei es" are sentences, "source (en)" is not. "de-000000093" is an id.
    places = [place for place, code in enumerate(codes) if code in LANGUAGES
              and (len(code) > 2 or " " not in name or words[place].isupper()
                   or f"({words[place]})" in name)]
    if not places or re.search(r"\d{5}", name):
        return "", ""
    if places[0] == 0 and (len(places) == len(words) or REGION.fullmatch(words[1])):  # toba_batak
        return codes[0], ""
    place = places[0] and places[-1]
    return codes[place], " ".join(words[:place] + words[place + 1:])


def languages(names):
    """Return the names of the same text in several languages; [] if there are fewer than two."""
    groups, firsts = {"": []}, {}
    for name in names:
        code, rest = language(name)
        if code:
            groups.setdefault(rest, []).append(name)
            firsts.setdefault(code, name)
    # Of en, de, en_title the first two; of en_title, en_body, de_title, de_body the titles; of
    # en_source, de_human, de_google the first one of each language.
    return next((group for group in (*groups.values(), [*firsts.values()]) if len(group) > 1), [])


def known_names(names, texts=None):
    """Return the columns to read, the first known group in `names`; () if there is none. `texts`:
    those that can be languages, by default all."""
    texts = names if texts is None else texts
    if found := languages(texts):
        return tuple(found)
    spelled = {name.lower(): name for name in names}
    for group in GROUPS:
        found = tuple(map(spelled.get, group.split()))
        # "source" is also where a text comes from.
        if all(found) and (group != "source target" or {*found} <= {*texts}):
            return found
    return ()


def names_a_text(part):
    """Return whether a part of a file's name is a language or a side of a translation."""
    code, rest = language(part)
    return bool(part in SIDES or code and not rest or FLORES.fullmatch(part))


def parallel_names(paths):
    """Return the column of each of several text files if line N of all files is one row; () if
    their names do not tell it. `paths` are without .gz.

        corpus.de corpus.en       deu_Latn.dev eng_Latn.dev    src-train.txt tgt-train.txt
        train.de.txt train.en.txt      news-ref.deu.txt news-src.eng.txt
    """
    if {path.suffix for path in paths} >= {".aa", ".ab"}:  # of `split`
        return ()
    for separators in ("[.]", "[.-]", "[._-]"):
        splits = [re.split(separators, path.name)[::-1] for path in paths]
        # Of the parts of the names, such as "train" or "txt", the last one that differs everywhere.
        for place, parts in enumerate(zip(*splits)):
            # corpus.de and corpus.domain, but not de.txt and notes.txt
            only_this = place + 1 < len(splits[0]) and len({
                (*split[:place], *split[place + 1:]) for split in splits}) == 1
            if len({*parts}) == len(paths) > 1 and any(map(names_a_text, parts)) and (
                    only_this or all(map(names_a_text, parts))):
                return parts
    return ()


# How the columns begin that belong to a pair, but are no translation of it, and what they are for.
# A negative can have a prefix: de_negative.
NEGATIVE = re.compile(r"(.*[\W_])?(negative|hard_neg|rejected)", re.IGNORECASE)
SCORE = re.compile("score|label|similarity", re.IGNORECASE)
HARD = "hard negatives, which gallery/triplets.py reads"
SCORES = ("scores or labels, which no objective reads; wrong pairs can become hard negatives for "
          "gallery/triplets.py")


def no_view(name):
    """Return what a column with this name is for if it is no text of a pair, or ""."""
    if NEGATIVE.match(name):
        return HARD
    return SCORES if SCORE.match(name) and not language(name)[0] else ""  # not label_en


def check_views(source, langs, views, objective_class):
    """Raise BadInput for a column that is none of an example's texts, by its name."""
    columns = source.columns[:source.num_text_columns]
    name = objective_class.name
    for number, column in enumerate(columns):
        why = no_view(column) if views > 1 else ""
        follows_pair = why == HARD and views > 2 and number > 1
        is_answer = why == SCORES and objective_class.causal  # a decoder can write a label
        if why and not follows_pair and not is_answer:
            raise BadInput(f"--langs {shown(langs)}: {shown(column)} has {why}. {name} would read "
                           "it as one more text with the same meaning: leave it out")
    if len(columns) > views > 2:
        raise BadInput(f"--langs {shown(langs)}: {name} reads {views} columns, not {len(columns)}: "
                       "leave some out")
    are_negatives = all(no_view(column) == HARD for column in columns[2:])
    if objective_class.hard_negatives and not langs and not are_negatives:
        raise BadInput(f"{source.name} has no hard negatives among the columns "
                       f"{shown(', '.join(columns))}: name them negative, hard_neg or rejected, "
                       "with any ending, or choose with --langs")


# ---- content

FEW, NO_TEXTS = "few values", "no texts"
NESTED = "[...]"  # stands for a list or an object of JSON
# A word of ASCII, or one letter of another script, because Chinese has no spaces.
WORD = re.compile(r"(?<!\S)[^\w\s]*[A-Za-z]+(?:['’-][A-Za-z]+)*[^\w\s]*(?!\S)|[^\W\d_\x00-\x7f]")
ID = re.compile(r"(.*[\W_])?ids?\d*", re.IGNORECASE)
# A letter that a text needs in a column of this name. "he" and "as" are also English words, and
# "mt", Maltese, is also a machine translation.
LETTERS = dict.fromkeys("am ar as be bg bn el fa gu he hi hy ja ka km kn ko ky lo mk ml mr my ne "
                        "or pa ps ru si ta te th ti ug uk ur yi zh".split(), r"[^\x00-\x7f]")
LETTERS["mt"] = "[ċġħżĊĠĦŻ]"


def is_text(name, cell):
    """Return whether a cell has two words, or four beside digits: "The dog sees 3 birds", but not
    "Mon, 03 Mar 2020 10:11 CET"."""
    least = 4 if re.search(r"\d", cell) else 2
    letter = LETTERS.get(re.split(r"[\W_]", name.lower())[-1], "")
    return len(WORD.findall(cell)) >= least and re.search(letter, cell) is not None


def is_word(name, cell):
    return any(map(str.isalpha, cell)) and not ID.fullmatch(name)


def kinds_of(names, rows, holds):
    """Return {column: why it is no text, "" if it is one}. holds(name, cell): is_text or, for a
    dictionary, is_word."""
    kinds = {}
    for name in names:
        cells = [row[name] for row in rows if row.get(name)]
        # Labels are shorter than captions, of which several describe one picture. In bytes, because
        # a Chinese sentence has few characters.
        are_short = sum(len(cell.encode()) for cell in cells) < 25 * len(cells)
        are_few = len(cells) >= 10 and len({*cells}) <= len(cells) / (3 if are_short else 30)
        first = [cell[:100] for cell in cells[:300]]
        is_one = 2 * sum(holds(name, cell) for cell in first) > len(first)
        kinds[name] = FEW if are_few else NO_TEXTS * (not is_one)
    return kinds


# ---- what a run reads


class Schema(NamedTuple):
    """The columns of a file."""
    columns: tuple  # those that are read, () if there is no known name; "system" comes last
    texts: tuple  # those that decide which rows are held out, whatever is read
    least: int  # a row is held out only if this many of them have a text
    unread: dict  # {column: why it is not read}


def choose(names, rows, langs=(), like=(), default=(), views=1):
    """Return the Schema of a file with the columns `names`, given some of its rows, {column: text}.

    langs, like: see open_text. default: the columns that the names of the files give. views: with
    two, a hard negative or a score is none of them; with more, hard negatives follow the pair."""
    unfit = {name: no_view(name) for name in names if views > 1 and no_view(name)}
    default = tuple(name for name in default if name not in unfit)
    rows = [dict(row) for row in dict.fromkeys(tuple(row.items()) for row in rows)]  # no copies
    for kinds in (kinds_of(names, rows, holds) for holds in (is_text, is_word)):
        texts = [name for name in names if not kinds[name]]
        fit = [name for name in texts if name not in unfit]
        # Beside two languages, the .ids of OPUS are none.
        found = [name for name in default if name in texts]
        if len(found) > 1 or not default and (found := known_names(names, fit)):
            break
    else:
        texts = texts or names  # a file of numbers has nothing better
        fit = [name for name in texts if name not in unfit]
        # Labels beside one file of texts are no translation, unless their name says so.
        found = [name for name in default if kinds[name] != FEW or names_a_text(name)]
        found = found or default or known_names(names, fit)
    if views > 2 and len(found) > 1:
        negatives = [name for name in unfit if NEGATIVE.match(name)]
        # Not negative_id or negative_score, unless all are such.
        of_words = kinds_of(negatives, rows, is_word)
        negatives = [name for name in negatives if of_words[name] != NO_TEXTS] or negatives
        found = ([*found[:2], *negatives] if negatives else found)[:views]
    default = tuple(found)
    columns = tuple(langs or like or default)
    if not {*columns} <= {*names}:
        columns = ()
    elif like and not langs and {*like} & {*default}:
        columns = tuple(dict.fromkeys((*like, *default)))
    columns = tuple(sorted(columns, key=lambda name: name == "system"))
    if views > 2:  # what else this objective can read
        unfit = {name: why for name, why in unfit.items() if why != HARD}
    unread = {name: unfit.get(name) or kinds[name] or (
        "not in --langs" if langs else "others are read") for name in names if name not in columns}
    least = min(2, sum(name != "system" for name in default or texts))
    return Schema(columns, tuple(dict.fromkeys((*default, *texts))), least,
                  unread if columns else kinds | unfit)
