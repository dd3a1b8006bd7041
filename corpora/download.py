"""Public data sets: where they are, under which licence, and how they come here whole.

    python -m corpora.download
    python -m corpora.download flores200 --folder data

The first lists them all; they stand in datasets.txt. A file gets its name only when it is complete
and its sha256 is right, and an archive its folder only when it is unpacked: what is there is whole.
"""

import hashlib
import http.client
import os
import queue
import re
import shlex
import shutil
import sys
import tarfile
import threading
import time
import urllib.request
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from corpora.program import BadInput, Parser, did_you_mean, exit_status

PATIENCE = 60  # seconds
SLOWEST = 1000  # bytes a second: a download that is slower for so long would never end
TRICKLES = f"it sends less than {SLOWEST} bytes a second"


class File(NamedTuple):
    """One file of a data set. `unpack`: a tar or zip, for the folder of its name beside it."""
    address: str
    size: int | None = None
    sha256: str | None = None
    unpack: bool = False

    @property
    def name(self):
        return self.address.rsplit("/", 1)[1]

    def path(self, folder):
        """Where the content ends up in the folder of the data set."""
        stem = re.sub(r"(\.tar)?\.\w+$", "", self.name)
        return folder / (stem if self.unpack else self.name)


class Dataset(NamedTuple):
    """`by_hand`: what to do where nothing can be fetched without a login, a form or a choice."""
    name: str
    purpose: str
    licence: str
    files: tuple[File, ...] = ()
    by_hand: str = ""


def read_table(text):
    """datasets.txt -> {name: Dataset}."""
    found = {}
    name = ""
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        if not line.startswith(" "):
            name, purpose, licence = line.split(" | ")
            found[name] = Dataset(name, purpose, licence)
        elif line.startswith("    by hand: "):
            found[name] = found[name]._replace(by_hand=line.partition(": ")[2])
        else:
            words = line.split()
            file = File(words[0], unpack=words[-1] == "unpack")
            if len(words) > 2:
                file = file._replace(size=int(words[1]), sha256=words[2])
            found[name] = found[name]._replace(files=(*found[name].files, file))
    return found


DATASETS = read_table(Path(__file__).with_name("datasets.txt").read_text(encoding="utf-8"))


def find(name):
    """The row of a name. Raises BadInput."""
    if name not in DATASETS:
        raise BadInput(f"no data set is called {name!r}{did_you_mean(name, DATASETS)} "
                       "(python -m corpora.download shows all)")
    return DATASETS[name]


def table():
    """All rows as text: name, files, MB, how they are checked, licence; purpose; address."""
    lines = [f"{'name':<16} {'files':>5} {'MB':>8}  {'sha256':<9} licence"]
    for row in DATASETS.values():
        count = len(row.files)
        known = [file.size for file in row.files if file.sha256]
        size = f"{sum(known) / 1e6:,.1f}" if known and len(known) == count else "?"
        checked = f"{len(known)} of {count}" if count else "by hand"
        source = row.files[0].address if count else row.by_hand
        if count > 1:
            source += f" and {count - 1} more"
        lines.append(f"{row.name:<16} {count:5} {size:>8}  {checked:<9} {row.licence}")
        lines += [f"    {row.purpose}", f"    {source}"]
    return "\n".join(lines)


def missing(name, folder="data", path=None):
    """What to say of a data set that is not there, in one line; "" if nothing is missing.

    Which file, what it is, its licence, its address, the command that gets it. `path`: the file
    that is wanted, from the data set's folder (default: all).
    """
    row = find(name)
    place = Path(folder) / name
    sources = {file.path(place): file.address for file in row.files}
    wanted = [place / path] if path else sources or [place]
    absent = [one for one in wanted if not one.exists()]
    if not absent:
        return ""
    addresses = [sources[one] for one in (absent[0], *absent[0].parents) if one in sources]
    how = f"get it with: python -m corpora.download {name} --folder {shlex.quote(str(folder))}"
    if row.by_hand:
        how = f"put it into {place}: {row.by_hand}"
    elif not addresses:
        addresses = [row.files[0].address]
    source = f"; source: {addresses[0]}" if addresses else ""
    return (f"{absent[0]} is missing. It belongs to {name} ({row.purpose}; licence: {row.licence})"
            f"{source}; {how}")


def fetch(file, path):
    """One file to its name, whole. Raises BadInput."""
    if path.exists():
        size = path.stat().st_size
        if file.size not in (None, size):
            raise BadInput(f"{path} has {size} bytes, not {file.size}: delete it to fetch it again")
        return
    part = path.with_name(f".{path.name}.part")
    try:
        found = _receive(file, part)
        if file.sha256 not in (None, found):
            raise OSError(f"its sha256 is {found}, not {file.sha256}")
        os.replace(part, path)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise BadInput(f"{file.address}: {' '.join(str(error).split())}; nothing was kept; try "
                       f"again, or fetch it by hand and put it at {path}") from None
    finally:
        part.unlink(missing_ok=True)


def _receive(file, path):
    """What an address sends, into a file -> its sha256. OSError if it is cut, trickles, or does not
    end."""
    digest = hashlib.sha256()
    begun = time.monotonic()
    count = 0
    pieces = _pieces(file.address)
    length = next(pieces)
    with open(path, "wb") as part:
        with tqdm(total=length or None, unit="B", unit_scale=True, disable=None) as bar:
            for piece in pieces:
                part.write(piece)
                digest.update(piece)
                bar.update(len(piece))
                count += len(piece)
                if file.size and part.tell() > file.size:
                    raise OSError(f"it sends more than its {file.size} bytes")
                if time.monotonic() - begun > PATIENCE:
                    if count < SLOWEST * PATIENCE:
                        raise OSError(TRICKLES)
                    begun = time.monotonic()
                    count = 0
        if length and part.tell() != length:
            raise OSError(f"only {part.tell()} of its {length} bytes came")
        # Otherwise a power cut can leave the name on less
        part.flush()
        os.fsync(part.fileno())
    return digest.hexdigest()


def _pieces(address):
    """The length that an address names, or 0, and then what it sends. OSError if nothing comes, be
    it of a header: there each byte renews the patience of a socket, so a thread waits."""
    found = queue.Queue(16)

    def send():
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:
                found.put(int(answer.headers.get("Content-Length") or 0))
                # read() would wait for all of a piece, however slowly it comes
                while piece := answer.read1(1 << 16):
                    found.put(piece)
            found.put(None)
        except Exception as error:  # for whoever waits
            found.put(error)

    threading.Thread(target=send, daemon=True).start()
    try:
        while (piece := found.get(timeout=PATIENCE)) is not None:
            if isinstance(piece, Exception):
                raise piece
            yield piece
    except queue.Empty:
        raise OSError(TRICKLES) from None


def unpack(archive, target):
    """A tar or zip -> the folder `target`; if all lies in one folder, that one becomes `target`.
    Raises BadInput; nothing is left half unpacked."""
    if target.exists():
        return
    if not hasattr(tarfile, "data_filter"):
        raise BadInput(f"{archive}: this Python does not check where its files would go: use "
                       "3.10.12, 3.11.4 or newer")
    # No links out of the folder, no absolute names; the reader of zips skips those by itself.
    checked = {} if archive.suffix == ".zip" else {"filter": "data"}
    content = target.with_name(f".{target.name}.part")
    # Of a process that was killed
    shutil.rmtree(content, ignore_errors=True)
    content.mkdir()
    try:
        shutil.unpack_archive(archive, content, **checked)
        shutil.rmtree(content / "__MACOSX", ignore_errors=True)  # what Macs add: no data
        inside = list(content.iterdir())
        is_one = len(inside) == 1 and inside[0].is_dir()
        (inside[0] if is_one else content).rename(target)
    except (EOFError, OSError, tarfile.TarError, zipfile.BadZipFile, zlib.error) as error:
        raise BadInput(f"{archive} cannot be unpacked ({error}): delete it to fetch it again, "
                       "or free some room") from None
    finally:
        shutil.rmtree(content, ignore_errors=True)


def download(name, folder="data"):
    """Fetch, check and unpack what is not there yet -> the data set's folder. Raises BadInput."""
    row = find(name)
    place = Path(folder) / name
    if not row.files:
        raise BadInput(missing(name, folder) or f"{place} was put there by hand: nothing to fetch")
    place.mkdir(parents=True, exist_ok=True)
    for file in row.files:
        fetch(file, place / file.name)
        if file.unpack:
            unpack(place / file.name, file.path(place))
    return place


def main(argv=None):
    parser = Parser("python -m corpora.download", description=__doc__)
    parser.add_argument("name", nargs="?", default="list", help="a data set, or list [list]")
    parser.add_argument("--folder", default="data", help="where data sets lie [data]")
    options = parser.parse_args(argv)
    if options.name == "list":
        print(table())
    else:
        print(f"{download(options.name, options.folder)}: complete")


if __name__ == "__main__":
    sys.exit(exit_status(main))
