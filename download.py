"""Public data sets: where they are, under which licence, and how they come here whole.

    python data.py list
    python data.py download flores200 --folder data

A file has its name only once it is complete and its sha256 is right; until then it is .NAME.part, which the same command resumes. A
task whose data is not there says `missing(...)`.
"""

import bz2
import difflib
import gzip
import hashlib
import http.client
import lzma
import os
import re
import shlex
import shutil
import stat
import tarfile
import time
import unicodedata
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from data import BadInput, write_atomic

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None

MOST_FILES, MOST_BYTES = 100_000, 8 << 30  # of an archive, unpacked; the largest of the table has a few thousand files and 1 GB
WAITS = (1, 4)  # seconds before the second and the third try


class File(NamedTuple):
    """One file of a data set. Where no public source states the sha256, the first download writes it to NAME.sha256, and all
    later ones must have it. `unpack`: a tar or zip, which becomes the folder of its name beside it."""
    address: str
    name: str
    size: int | None = None
    sha256: str | None = None
    unpack: bool = False


class Dataset(NamedTuple):
    """`by_hand`: what to do where nothing can be fetched without a login, a form or a choice."""
    name: str
    purpose: str
    licence: str
    files: tuple[File, ...] = ()
    by_hand: str = ""


def _at(base, *rows, unpack=False):
    """The files at `base`: "name", or "name size sha256" where a public source states them."""
    rows = [row.split() for row in rows]
    return tuple(File(base + row[0], row[0], *((int(row[1]), row[2]) if row[1:] else (None, None)), unpack) for row in rows)


META, GITHUB, GOOGLE = "https://dl.fbaipublicfiles.com/", "https://raw.githubusercontent.com/", "https://storage.googleapis.com/"
OPUS_PAIRS = "ar-en bg-en de-en el-en en-es en-fr en-hi en-ru en-th en-tr en-ur en-vi en-zh".split()
TATOEBA_LANGUAGES = "ara bul cmn deu ell fra hin rus spa swh tha tur urd vie".split()  # XNLI's; others: the same address

# Addresses, sizes and digests are collected from public code and checksum lists. There was no network here: nothing was downloaded to
# verify them. A wrong one stops with what was expected and what was found.
DATASETS = (
    Dataset("flores200", "xsim: 2,009 sentences in 204 languages (dev, devtest)", "CC BY-SA 4.0", _at(
        META + "nllb/", "flores200_dataset.tar.gz 25585843 b8b0b76783024b85797e5cc75064eb83fc5288b41e9654dabc7be6ae944011f6", unpack=True)),
    Dataset("xsim++", "hard negatives of FLORES-200's English devtest, and their kinds", "made from FLORES-200 (CC BY-SA 4.0)", _at(
        META + "nllb/laser/xsimplusplus/", "eng_Latn_augmented.devtest", "eng_Latn_errtype.devtest.json")),
    Dataset("tatoeba", "similarity search, 14 languages with English (LASER's test, v1)", "CC BY 2.0 FR", _at(
        GITHUB + "facebookresearch/LASER/main/data/tatoeba/v1/", *(f"tatoeba.{one}-eng.{side}" for one in TATOEBA_LANGUAGES for side in (one, "eng")))),
    Dataset("bucc2018", "mining translations out of two texts, German, French, Russian, Chinese with English (no gold of the test part)", "research use", _at(
        "https://comparable.limsi.fr/bucc2018/", *(f"bucc2018-{one}-en.{part}.tar.bz2" for one in ("de", "fr", "ru", "zh")
                                                   for part in ("sample-gold", "training-gold", "test")), unpack=True)),
    Dataset("opus100", "BERT-JEPA's translation pairs (all but Swahili)", "each source of OPUS has its own", _at(
        "https://object.pouta.csc.fi/OPUS-100/v1.0/", *(f"opus-100-corpus-{pair}-v1.0.tar.gz" for pair in OPUS_PAIRS), unpack=True)),
    Dataset("multi30k", "captions in English, German, French, Czech, in parallel", "CC BY-NC-SA 4.0; captions: Flickr30k's terms", _at(
        GITHUB + "multi30k/dataset/master/data/task1/raw/",
        *(f"{part}.{one}.gz" for part in ("train", "val", "test_2016_flickr") for one in ("en", "de", "fr", "cs")))),
    Dataset("wikitext2", "pre-training on text, words with <unk>", "CC BY-SA 3.0", _at(
        GITHUB + "pytorch/examples/acc295dc7b90714f1bf47f06004fc19a7fe235c4/word_language_model/data/wikitext-2/",
        "train.txt 10797148 9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
        "valid.txt 1121681 f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
        "test.txt 1256449 d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0")),
    Dataset("wikitext2-raw", "pre-training on text, as written", "CC BY-SA 3.0", _at(
        "https://huggingface.co/datasets/ggml-org/ci/resolve/927b3642933080f1b0e811e2f916e14c292992f9/",
        "wikitext-2-raw-v1.zip 4721645 ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11", unpack=True)),
    Dataset("glue", "GLUE but for MNLI and QQP: probes, fine-tuning", "research use; each task has its own", _at(
        META + "glue/data/",
        "CoLA.zip 376971 f212fcd832b8f7b435fb991f101abf89f96b933ab400603bf198960dfc32cbff",
        "SST-2.zip 7439277 d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa",
        "STS-B.zip 802872 e60a6393de5a8b5b9bac5020a1554b54e3691f9d600b775bd131e613ac179c85",
        "QNLIv2.zip 10627589 e634e78627a29adaecd4f955359b22bf5e70f2cbd93b493f2d624138a0c0e5f5",
        "RTE.zip 697150 6bf86de103ecd335f3441bd43574d23fef87ecc695977a63b82d5efb206556ee",
        "WNLI.zip 28999 ae0e8e4d16f4d46d4a0a566ec7ecceccfd3fbfaa4a7a4b4e02848c0f2561ac46", unpack=True) + _at(
        META + "glue/data/", "mrpc_dev_ids.tsv 6222 971d7767d81b997fd9060ade0ec23c4fc31cbb226a55d1bd4a1bac474eb81dc7") + _at(
        META + "senteval/senteval_data/",
        "msr_paraphrase_train.txt 1047044 60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89",
        "msr_paraphrase_test.txt 441275 a04e271090879aaba6423d65b94950c089298587d9c084bf9cd7439bd785f784")),
    Dataset("mnli", "MultiNLI of GLUE", "OANC and others, named in the archive", _at(
        META + "glue/data/", "MNLI.zip 312783507 e7c1d896d26ed6caf700110645df426cc2d8ebf02a5ab743d5a5c68ac1c83633", unpack=True)),
    Dataset("qqp", "Quora question pairs of GLUE", "Quora's terms, not commercial", _at(
        META + "glue/data/", "QQP-clean.zip 41696084 40e7c862c04eb26ee04b67fd900e76c45c6ba8e6d8fab4f8f1f8072a1a3fbae0", unpack=True)),
    Dataset("stsb", "STS benchmark, English, test scores too", "mixed (SemEval STS), research use", _at(
        GITHUB + "PhilipMay/stsb-multi-mt/30de0dec4ee199b7f42351d3f1a0b19592955385/data/",
        "stsb-en-train.csv", "stsb-en-dev.csv", "stsb-en-test.csv")),
    Dataset("senteval", "MR, CR, SUBJ, MPQA, SST-2, TREC of SentEval (its MRPC is in glue)", "research use; each task has its own", _at(
        META + "senteval/senteval_data/", "datasmall_NB_ACL12.zip", unpack=True) + _at(
        GITHUB + "PrincetonML/SIF/master/data/", "sentiment-train", "sentiment-dev", "sentiment-test") + _at(
        "https://cogcomp.seas.upenn.edu/Data/QA/QC/", "train_5500.label", "TREC_10.label")),
    Dataset("sick", "SICK: relatedness and entailment of sentence pairs", "CC BY-NC-SA 3.0", _at(
        "https://alt.qcri.org/semeval2014/task1/data/uploads/", "sick_train.zip", "sick_trial.zip", "sick_test_annotated.zip", unpack=True)),
    Dataset("snli", "inference on captions", "CC BY-SA 4.0", _at("https://nlp.stanford.edu/projects/snli/", "snli_1.0.zip", unpack=True)),
    Dataset("ag-news", "four kinds of news, a probe of Predict and Reconstruct", "AG's terms, not commercial", _at(
        GITHUB + "mhjabreel/CharCnn_Keras/master/data/ag_news_csv/", "train.csv", "test.csv")),
    Dataset("rotten-tomatoes", "LLM-JEPA's film reviews", "research use (Pang & Lee 2005)", _at(
        GOOGLE + "seldon-datasets/sentence_polarity_v1/",
        "rt-polaritydata.tar.gz 487770 a05befe52aafda71d458d188a1c54506a998b1308613ba76bbda2e5029409ce9", unpack=True)),
    Dataset("xnli", "inference in 15 languages, zero-shot (dev, test)", "CC BY-NC 4.0", _at(
        META + "XNLI/", "XNLI-1.0.zip 17865352 4ba1d5e1afdb7161f0f23c66dc787802ccfa8a25a3ddd3b165a35e50df346ab1", unpack=True)),
    Dataset("pawsx", "paraphrases or not, 7 languages", "free with attribution to Google", _at(GOOGLE + "paws/pawsx/", "x-final.tar.gz", unpack=True)),
    Dataset("squad", "SQuAD 1.1, the training set of MLQA and XQuAD", "CC BY-SA 4.0", _at(
        "https://rajpurkar.github.io/SQuAD-explorer/dataset/",
        "train-v1.1.json 30288272 3527663986b8295af4f7fcdff1ba1ff3f72d07d61a20f487cb238a6ef92fd955",
        "dev-v1.1.json 4854279 95aa6a52d5d6a735563366753ca50492a658031da74f301ac5238b03966972c9")),
    Dataset("mlqa", "question answering across 7 languages", "CC BY-SA 3.0", _at(
        META + "MLQA/", "MLQA_V1.zip 75719050 246e8089933d13007fe80684d5c5c0713d6834cf8b3b4a0ec7c66f0a0d2baac8", unpack=True)),
    Dataset("xquad", "question answering in 11 languages", "CC BY-SA 4.0", _at(
        GITHUB + "google-deepmind/xquad/master/",
        "xquad.ar.json 1582988 abdabd7afed5c635d99cca0f3f0d0c9d9ed0bc77451e963c2e4e0638c29e486d",
        "xquad.de.json 669810 990b5d746746ed65ed4702ea5f35f99ffa4e2f1c390c07d003642acd937916f9",
        "xquad.el.json 1918889 821cf0f88e73fa258fd2f548b19b6ec39f7025059e16f6f9fc8cd797c9c3663e",
        "xquad.en.json 609383 e4c57d1c9143aaa1c5d265ba5987a65f4e69528d2a98f29d6e75019b10344f29",
        "xquad.es.json 684322 dcbae93ec3a9f4b9e78fd834a171d6f96c1a875e10e15b7530b7e4ef4971e37e",
        "xquad.hi.json 1680538 df2cce3532b37e9beb8979704b5c9a4bf874358f105395a298b89427b43b9d24",
        "xquad.ru.json 1896368 208d5b1aa154c52b1b5c5eda16281e455e8fd198cdb9af3f469f0d6037d973bf",
        "xquad.th.json 1809143 5cdda11d0e1e075f7872abf4e6ae830388ce7f617964d542308e9ae4257e0f43",
        "xquad.tr.json 729506 92179a564774b7696100d144c1e10870d0a966b6fccbdd254a65b9d2ab1971cc",
        "xquad.vi.json 911401 f619a1eb11fb42d3ab0834259e488a65f585447ef6154437bfb7199d85161a04",
        "xquad.zh.json 808652 691d0b3359bc6b8faa8de931dfdfe21d50a65861ae348e32a0d1a0190b0c8835")),
    Dataset("gsm8k", "LLM-JEPA's arithmetic in words", "MIT", _at(
        GITHUB + "openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data/",
        "train.jsonl 4166206 17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
        "test.jsonl 749738 3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14")),
    Dataset("hellaswag", "LLM-JEPA's choice of endings", "MIT", _at(
        GITHUB + "rowanz/hellaswag/master/data/",
        "hellaswag_train.jsonl 47496131 dae5e69249868cb9fe4e23ff925c60b66169564cfb7072d793cd7356a2b69f8d",
        "hellaswag_val.jsonl 12246618 0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588")),
    Dataset("nq-open", "LLM-JEPA's questions with short answers", "CC BY-SA 3.0", _at(
        GITHUB + "google-research-datasets/natural-questions/a7a113c9fdc2d9986d624bd43b8a18d6d5779eaa/nq_open/",
        "NQ-open.train.jsonl 8522298 0c93aaf13b12f855628489665e4ef85ffb8573ad444646f11f4fabdc57a0aabf",
        "NQ-open.dev.jsonl 391316 f15567f38099f3615f5b8a685c0aef449c11ad90d3da3735e8d1b98115b40616")),
    Dataset("nlrx-synth", "English and regular expressions (10,000, unsplit)", "MIT", _at(
        GITHUB + "nicholaslocascio/deep-regex/master/datasets/NL-RX-Synth/", "src.txt", "targ.txt")),
    Dataset("nlrx-turk", "the same expressions, described by people", "MIT", _at(
        GITHUB + "nicholaslocascio/deep-regex/master/datasets/NL-RX-Turk/", "src.txt", "targ.txt")),
    Dataset("llm-jepa", "LLM-JEPA's own splits: synth, turk, spider, nq_open, rotten_tomatoes", "that of each set", by_hand=
            "copy the folder datasets/ of https://github.com/rbalestr-lab/llm-jepa"),
    Dataset("spider", "LLM-JEPA's English to SQL, with the databases", "CC BY-SA 4.0", by_hand=
            "follow the link to Google Drive on https://yale-lily.github.io/spider, and unpack it"),
    Dataset("yelp", "LLM-JEPA's five stars", "Yelp's terms, academic use", by_hand="accept the terms on https://www.yelp.com/dataset"),
    Dataset("wikipedia", "Predict and Reconstruct's pre-training (20231101.en, 512 characters an article)", "CC BY-SA", by_hand=
            "export the texts of https://huggingface.co/datasets/wikimedia/wikipedia (Parquet) as JSONL with the key text"),
)


def find(name):
    """The row of a name. Raises BadInput with the name that was probably meant."""
    names = [row.name for row in DATASETS]
    if name in names:
        return DATASETS[names.index(name)]
    near = difflib.get_close_matches(name, names, 1, cutoff=0.5)
    raise BadInput(f"no data set is called {name!r}{f'; did you mean {near[0]}?' if near else ''} (python data.py list shows all)")


def table():
    """All rows as text: what it is called, how much, how it is checked, the licence; then what it is for, and from where."""
    lines = [f"{'name':<16} {'files':>5} {'MB':>8}  {'sha256':<11} licence"]
    for row in DATASETS:
        known = [one.size for one in row.files if one.size is not None]
        size = f"{sum(known) / 1e6:,.1f}" if known and len(known) == len(row.files) else "?"
        digests = sum(one.sha256 is not None for one in row.files)
        checked = "by hand" if not row.files else "known" if digests == len(row.files) else f"{digests} of {len(row.files)}" if digests else "first seen"
        source = row.files[0].address + (f" and {len(row.files) - 1} more" if len(row.files) > 1 else "") if row.files else row.by_hand
        lines += [f"{row.name:<16} {len(row.files):5} {size:>8}  {checked:<11} {row.licence}", f"    {row.purpose}", f"    {source}"]
    return "\n".join(lines)


def _ready(place, file):
    """Where the content of a file ends up: itself, or the folder it is unpacked into."""
    return place / (re.sub(r"(\.tar)?\.\w+$", "", file.name) if file.unpack else file.name)


def missing(name, folder="data", path=None):
    """What a task says whose data is not there, in one line: which file, what it is, from where, which licence, how to get it; "" if
    nothing is missing. `path`: the file that is wanted, from the data set's folder (default: all of them)."""
    row, place = find(name), Path(folder) / name
    sources = {_ready(place, one): one.address for one in row.files}
    absent = next((one for one in ([place / path] if path else sources or [place]) if not one.exists()), None)
    if absent is None:
        return ""
    address = next((sources[one] for one in (absent, *absent.parents) if one in sources), row.by_hand or row.files[0].address)
    how = f"put that into {place}" if row.by_hand else f"get it with: python data.py download {name} --folder {shlex.quote(str(folder))}"
    return f"{absent} is missing. It belongs to {name} ({row.purpose}; licence: {row.licence}); source: {address}; {how}"


def download(name, folder="data", waits=WAITS):
    """Fetch, check and unpack what is not there yet -> the data set's folder. Raises BadInput, in one line, for whatever goes wrong."""
    row, place = find(name), Path(folder) / name
    if not row.files:
        raise BadInput(missing(name, folder) or f"{place} is put there by hand: nothing to download")
    part = None
    try:
        place.mkdir(parents=True, exist_ok=True)
        with open(place / ".lock", "w", encoding="utf-8") as lock:
            if fcntl:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise BadInput(f"another process is downloading into {place}: wait for it, or choose another --folder") from None
            for file in row.files:
                part = place / f".{file.name}.part"
                _fetch(file, place / file.name, part, waits)
                if file.unpack:
                    unpack(place / file.name, _ready(place, file))
    except OSError as error:
        raise BadInput(f"{error.filename or place}: {error.strerror or error}; free some room, or choose another --folder, and run the same "
                       "command: it goes on where this one stopped") from None
    except KeyboardInterrupt:
        kept = f"{part} is kept: the same command resumes" if part and part.exists() else "nothing unfinished is kept"
        raise KeyboardInterrupt(f"stopped; {kept}") from None
    return place


class _Cut(Exception):
    """The server or the way to it failed in the middle: worth another try."""


class _Redirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, request, answer, code, message, headers, address):
        answer.close()
        _allow(address, request.full_url)
        return super().redirect_request(request, answer, code, message, headers, address)


def _allow(address, before=""):
    """Only the web, and never from https back to http, where anyone on the way could swap the file."""
    scheme = urllib.parse.urlsplit(address).scheme
    if scheme not in ("http", "https") or before.startswith("https:") and scheme == "http":
        raise BadInput(f"{before + ' leads to ' if before else ''}{address}: only https, or http from the start, is followed; nothing was fetched")


def _open(file, path, part, start, tag):
    """The server's answer: the file from byte `start` on, if it is still the one that `tag` names, else all of it."""
    _allow(file.address)
    asked = {"User-Agent": "nanojepa", "Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-", "If-Range": tag} if start else {})
    by_hand = f"fetch it by hand and put it at {path}: the same command then checks it"
    host, opener = urllib.parse.urlsplit(file.address).netloc, urllib.request.build_opener(_Redirect)
    try:
        return opener.open(urllib.request.Request(file.address, headers=asked), timeout=30)
    except urllib.error.HTTPError as error:
        error.close()
        said = " ".join(f"the server answers {error.code} {error.reason}".split())
        if error.code == 416:
            _drop(part)
        if error.code in (408, 416, 429) or error.code >= 500:
            raise _Cut(said) from None
        raise BadInput(f"{file.address}: {said}; it may have moved: {by_hand}") from None
    except urllib.error.URLError as error:
        said = " ".join(str(error.reason).split())
        raise BadInput(f"cannot reach {host} for {file.address} ({said}); connect to the network, or {by_hand}") from None
    except BadInput:
        raise
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise _Cut(f"the connection broke ({error or type(error).__name__})") from None


def _drop(part):
    part.unlink(missing_ok=True)
    part.with_name(f"{part.name}.tag").unlink(missing_ok=True)


def _receive(file, path, part):
    """One try to fill `part`. Beside it lies the server's name for this version of the file, without which nothing is resumed."""
    tag = part.with_name(f"{part.name}.tag")
    known = tag.read_text(encoding="utf-8", errors="replace") if part.exists() and tag.exists() else ""
    have = part.stat().st_size if known else 0
    with _open(file, path, part, have, known) as answer:
        length, span = answer.headers.get("Content-Length"), re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""))
        if answer.status != 200 and (answer.status != 206 or not span or int(span[1]) != have):
            _drop(part)
            raise _Cut(f"the server answers {answer.status} with another part than the one asked for")
        have = have if answer.status == 206 else 0
        total = int(span[2]) if have else int(length) if length and length.isdecimal() else None
        if file.size is not None and total not in (None, file.size):
            raise BadInput(f"{file.address}: the server has {total:,} bytes, expected {file.size:,} (download.py): the file was replaced at its source")
        total = file.size if total is None else total
        if not total and file.sha256 is None and answer.headers.get("Transfer-Encoding") != "chunked":
            raise BadInput(f"{file.address}: the server names no length, or 0, so that a cut could not be told from the end; nothing was fetched")
        most = MOST_BYTES if total is None else total
        bar = tqdm(total=total, initial=have, desc=file.name, unit="B", unit_scale=True, leave=False, disable=None)  # silent in a log
        with bar, open(part, "ab") as out:
            if not have:
                out.truncate(0)  # before the new version's name is written: a kill in between must not join it to the old content
                strong = next((one for one in answer.headers.get_all("ETag", []) if not one.startswith("W/")), None)
                tag.write_text(" ".join((strong or answer.headers.get("Last-Modified", "")).split()), encoding="utf-8")
            while have <= most and (block := _read(answer, have, total)):
                have += out.write(block)
                bar.update(len(block))
            out.flush()
            os.fsync(out.fileno())
    if have > most:
        _drop(part)
        raise BadInput(f"{file.address}: the server sends more than the {most:,} bytes that were expected; nothing was kept")
    if total is not None and have != total:
        raise _Cut(f"the connection was cut at {have:,} of {total:,} bytes")


def _read(answer, have, total):
    try:
        return answer.read(1 << 16)
    except (OSError, http.client.HTTPException):
        raise _Cut(f"the connection was cut at {have:,} of {'?' if total is None else f'{total:,}'} bytes") from None


def _fetch(file, path, part, waits):
    """The file under its name, complete and checked. One that is there already is only checked."""
    if path.exists():
        return _check(file, path, path)
    for wait in (*waits, None):
        try:
            _receive(file, path, part)
            break
        except _Cut as cut:
            if wait is None:
                raise BadInput(f"{file.address}: {cut}; tried {len(waits) + 1} times; what came is kept, and the same command resumes") from None
            time.sleep(wait)
    _check(file, path, part)
    os.replace(part, path)
    _drop(part)


def _check(file, path, found):
    """The sha256 of `found` must be the table's or, where that has none, that of the first download, which is written down here."""
    record, made = path.with_name(f"{path.name}.sha256"), hashlib.sha256()
    with open(found, "rb") as content:
        while block := content.read(1 << 20):
            made.update(block)
    digest, by_table = made.hexdigest(), file.sha256 is not None
    if not by_table and not record.exists():
        return write_atomic(record, f"{digest}  {path.name}\n".encode())
    wanted = file.sha256 if by_table else " ".join(record.read_text(encoding="utf-8", errors="replace").split()[:1])
    if digest != wanted:
        if found != path:
            _drop(found)
        kept = "nothing was kept" if found != path else "delete it to fetch it again"
        raise BadInput(f"{path} from {file.address}: sha256 expected {wanted} ({'download.py' if by_table else record}), found {digest}; {kept}"
                       + ("" if by_table else f"; if the source was renewed on purpose, delete {record} too"))


# ---------------------------------------------------------------------------------------------------------------------
# Archives

def unpack(archive, target, most_files=MOST_FILES, most_bytes=MOST_BYTES):
    """A tar (plain, .gz, .bz2, .xz) or zip -> the folder `target`, whole or not at all; if all lies in one folder, that one becomes
    `target`. Nothing is believed: only files and folders with plain names inside of the target, counted while they are written."""
    def refuse(name, why):
        raise BadInput(f"{archive}: {name!r} {why}; nothing was unpacked: the archive is not to be trusted, or not what it should be")
    if target.exists():
        return
    part, seen, left = target.with_name(f".{target.name}.part"), {}, most_bytes
    try:
        shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
        part.mkdir(parents=True)
        for name, is_folder, content in (_zip if archive.suffix == ".zip" else _tar)(archive, refuse):
            path = part.joinpath(*_place(name, is_folder, seen, refuse))
            if len(seen) > most_files:
                refuse(name, f"is one more than the {most_files:,} files and folders that are allowed")
            (path if is_folder else path.parent).mkdir(parents=True, exist_ok=True)
            if is_folder:
                continue
            with content() as source, open(path, "xb") as out:
                while block := source.read(1 << 16):
                    left -= len(block)
                    if left < 0:
                        refuse(name, f"goes past the {most_bytes:,} bytes that are allowed")
                    out.write(block)
        if all(folder for _, folder in seen.values()):
            raise ValueError("no file in it")
        inside = list(part.iterdir())
        os.rename(inside[0] if len(inside) == 1 and inside[0].is_dir() else part, target)
    except BadInput:
        raise
    except Exception as error:  # the decoders raise what they like; only errors of the disk have a number
        if isinstance(error, OSError) and error.errno:
            raise
        raise BadInput(f"{archive} is damaged ({' '.join(str(error).split()) or type(error).__name__}); nothing was unpacked: delete it, and "
                       "run the same command to fetch it again") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _place(name, is_folder, seen, refuse):
    """The parts of a member's path. `seen`: {folded path: (path, is a folder)} of all before it, folders in between too."""
    parts = tuple(one for one in name.split("/") if one not in ("", "."))
    if not parts and is_folder:
        return parts
    if name.startswith("/") or "\\" in name or re.match("[A-Za-z]:", name) or not parts or not all(one.strip(". ") for one in parts):
        refuse(name, "is not the path of a file inside of the archive's folder")
    if not name.isprintable():
        refuse(name, "has characters in its name that cannot be printed")
    for end in range(1, len(parts) + 1):
        path, folder = parts[:end], end < len(parts) or is_folder
        folded = tuple(unicodedata.normalize("NFC", one).casefold().rstrip(". ") for one in path)  # as a Mac or Windows sees it
        before = seen.get(folded)
        if before and not (before == (path, folder) and folder):  # only a folder may come again
            refuse(name, f"takes the place of {'/'.join(before[0])!r}")
        seen[folded] = path, folder
    return parts


class _Metered:
    """A stream that ends in an error after `room` bytes: between two members tarfile reads headers, and keeps them in memory."""
    def __init__(self, stream):
        self.stream, self.room = stream, 1 << 20

    def read(self, size):
        block = self.stream.read(size)
        self.room -= len(block)
        if self.room < 0:
            raise ValueError("a header of more than a megabyte")
        return block


class _Member(tarfile.TarInfo):
    """tarfile takes a spoilt header in the middle for the end; here only the mark at the end is one."""
    @classmethod
    def fromtarfile(cls, tar):
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} in the middle") from None


def _tar(archive, refuse):
    """(name, is a folder, opener of the content) of every member, in order; each must be read before the next."""
    opener = {".gz": gzip.open, ".tgz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(archive.suffix, open)
    with opener(archive, "rb") as stream, tarfile.open(fileobj=(metered := _Metered(stream)), mode="r|", tarinfo=_Member) as tar:
        for member in tar:
            if not (member.isdir() or member.isreg() and not member.issparse()):
                refuse(member.name, "is a link, a device or something else that is neither a file nor a folder")
            metered.room = MOST_BYTES + member.size  # the content is counted where it is written
            yield member.name, member.isdir(), lambda: tar.extractfile(member)
            metered.room = 1 << 20


def _zip(archive, refuse):
    with zipfile.ZipFile(archive) as packed:
        for member in packed.infolist():
            name, kind = member.orig_filename, stat.S_IFMT(member.external_attr >> 16)
            if name.startswith("__MACOSX/"):  # what Macs add: no data
                continue
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR) or member.flag_bits & 1:
                refuse(name, "is a link, a device or encrypted")
            yield name, name.endswith("/") or kind == stat.S_IFDIR, lambda: packed.open(member)
