"""Public data sets: where they are, under which licence, and how they come here whole.

    python -m corpora.download
    python -m corpora.download flores200 --folder data

The first lists them all; they stand in datasets.txt. A file gets its name only when it is complete
and its sha256 is right, and an archive its folder only when it is unpacked: what is there is whole.
"""

import http.client
import os
import re
import shlex
import shutil
import sys
import tarfile
import urllib.request
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

from torch.hub import download_url_to_file

from corpora.program import BadInput, Parser, did_you_mean, exit_status


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
        """The path of the content in the folder of the data set."""
        stem = re.sub(r"(\.tar)?\.\w+$", "", self.name)
        return folder / (stem if self.unpack else self.name)


class Dataset(NamedTuple):
    """`by_hand`: what to do where nothing can be fetched without a login, a form or a choice."""
    name: str
    purpose: str
    licence: str
    files: tuple[File, ...] = ()
    by_hand: str = ""


def read_datasets(text):
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


DATASETS = read_datasets(Path(__file__).with_name("datasets.txt").read_text(encoding="utf-8"))


def find_dataset(name):
    """The row of a name. Raises BadInput."""
    if name not in DATASETS:
        raise BadInput(f"no data set is called {name!r}{did_you_mean(name, DATASETS)} "
                       "(python -m corpora.download shows all)")
    return DATASETS[name]


def listing():
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
    """One line about a data set that is not there: which file, what it is, its licence, its
    address, the command that gets it; "" if nothing is missing. `path`: the file that is wanted,
    from the data set's folder (default: all)."""
    row = find_dataset(name)
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
        if file.sha256:
            show = sys.stderr.isatty()
            download_url_to_file(file.address, path, hash_prefix=file.sha256, progress=show)
        else:
            # This one refuses what is shorter than the server said, the other one does not.
            urllib.request.urlretrieve(file.address, part)
            os.replace(part, path)
    # RuntimeError: the sha256 is another; ValueError: that is no address.
    except (OSError, RuntimeError, ValueError, http.client.HTTPException) as error:
        raise BadInput(f"{file.address}: {' '.join(str(error).split())}; nothing was kept; try "
                       f"again, or fetch it by hand and put it at {path}") from None
    finally:
        part.unlink(missing_ok=True)


def plain_member(member, folder):
    """The filter of tars: files and folders inside of the folder. A chain of links can lead outside
    past the library's own filter."""
    if not (member.isfile() or member.isdir()):
        raise tarfile.SpecialFileError(member)
    return tarfile.data_filter(member, folder)


def unpack(archive, target):
    """A tar or zip -> the folder `target`; if all lies in one folder, that one becomes `target`.
    Raises BadInput; nothing is left half unpacked."""
    if target.exists():
        return
    # The reader of zips, which has no filter, makes plain files only, and leaves out what would lie
    # outside of the folder.
    checked = {} if archive.suffix == ".zip" else {"filter": plain_member}
    content = target.with_name(f".{target.name}.part")
    # A process that was killed may have left it.
    shutil.rmtree(content, ignore_errors=True)
    content.mkdir()
    try:
        shutil.unpack_archive(archive, content, **checked)
        # Macs add this folder, which holds no data.
        shutil.rmtree(content / "__MACOSX", ignore_errors=True)
        inside = list(content.iterdir())
        is_one = len(inside) == 1 and inside[0].is_dir()
        (inside[0] if is_one else content).rename(target)
    # RuntimeError: a zip with a password, or packed in a way that Python does not know.
    except (EOFError, OSError, RuntimeError, tarfile.TarError, zipfile.BadZipFile,
            zlib.error) as error:
        raise BadInput(f"{archive} cannot be unpacked ({error}): delete it to fetch it again, "
                       "or free some room") from None
    finally:
        shutil.rmtree(content, ignore_errors=True)


def download(name, folder="data"):
    """Fetch, check and unpack what is not there yet -> the data set's folder. Raises BadInput."""
    row = find_dataset(name)
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
        print(listing())
    else:
        print(f"{download(options.name, options.folder)}: complete")


if __name__ == "__main__":
    sys.exit(exit_status(main))
