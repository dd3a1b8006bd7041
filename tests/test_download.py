"""download.py against a local server that cuts, lies and changes its mind, and against archives that mean harm; no network."""

import ast
import errno
import hashlib
import http.server
import io
import os
import re
import socket
import stat
import sys
import tarfile
import threading
import urllib.parse
import urllib.request
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import data
import download
from data import BadInput
from download import Dataset, File

CONTENT = bytes(range(256)) * 1024  # several blocks of the reader
OTHER = CONTENT[::-1]
DATE = "Sat, 21 Nov 2026 08:00:00 GMT"
HOSTS = {"dl.fbaipublicfiles.com", "raw.githubusercontent.com", "storage.googleapis.com", "huggingface.co", "object.pouta.csc.fi",
         "rajpurkar.github.io", "cogcomp.seas.upenn.edu", "comparable.limsi.fr", "alt.qcri.org", "nlp.stanford.edu"}


def sha256(content):
    return hashlib.sha256(content).hexdigest()


@dataclass
class Page:
    """What the server does with one address. `cuts`: after how many bytes it hangs up, one number a request, then never."""
    content: bytes = CONTENT
    etag: str | None = '"one"'
    modified: str | None = None
    cuts: list = field(default_factory=list)
    statuses: list = field(default_factory=list)
    ranges: bool = True
    shift: int = 0          # how far the range it sends is from the one asked for
    length: int | None = None
    framing: str = "length"  # or "chunked", "torn" (chunked, cut inside of one), "close" (the file ends with the connection)
    location: str = ""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        page = self.server.pages.get(self.path)
        asked = self.headers.get("Range")
        self.server.requests.append((self.path, asked, self.headers.get("If-Range")))
        self.close_connection = True
        if page is None or page.location or page.statuses:
            self.send_response(404 if page is None else 302 if page.location else page.statuses.pop(0))
            self.send_header("Location", page.location if page else "")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        start = 0
        if asked and page.ranges and self.headers.get("If-Range") in (page.etag, page.modified):
            start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) + page.shift
        body, total = page.content[start:], len(page.content) if page.length is None else page.length
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        for name, value in (("ETag", page.etag), ("Last-Modified", page.modified)):
            if value:
                self.send_header(name, value)
        if page.framing == "length":
            self.send_header("Content-Length", str(total - start))
        elif page.framing != "close":
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        body = body[:page.cuts.pop(0) if page.cuts else None]
        chunks = {"chunked": b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body), "torn": b"%x\r\n%s" % (len(body) + 1, body[:9])}
        self.wfile.write(chunks.get(page.framing, body))


class Site(http.server.ThreadingHTTPServer):
    """`pages`: path -> Page; `requests`: (path, Range, If-Range) of every one that came."""
    daemon_threads = True

    def file(self, page=None, name="a.txt", size=None, digest=None, unpack=False):
        self.pages[f"/{name}"] = page or Page()
        return File(f"http://127.0.0.1:{self.server_port}/{name}", name, size, digest, unpack)


@pytest.fixture(scope="module")
def running():
    site = Site(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=site.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield site
    site.shutdown()
    site.server_close()


@pytest.fixture
def site(running, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    running.pages, running.requests = {}, []
    return running


@pytest.fixture
def fetch(monkeypatch, tmp_path):
    """fetch(file, ...) downloads a data set "set" of these files into tmp_path/set, without waiting between tries."""
    def run(*files, waits=(0, 0)):
        monkeypatch.setattr(download, "DATASETS", (Dataset("set", "a test", "none", files),))
        return download.download("set", tmp_path, waits)
    return run


def refused(call, *words):
    """The one line with which `call` is refused; every word is in it."""
    with pytest.raises(BadInput) as error:
        call()
    said = str(error.value)
    assert "\n" not in said and len(said) > 30
    for word in words:
        assert str(word) in said, f"{word!r} is not in: {said}"
    return said


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


# --------------------------------------------------------------------------------------------------------------- the way here

def test_a_file_comes_whole_and_the_same_command_again_asks_the_server_nothing(site, fetch):
    file = site.file(digest=sha256(CONTENT), size=len(CONTENT))
    place = fetch(file)
    assert (place / "a.txt").read_bytes() == CONTENT and names(place) == ["a.txt"]
    assert site.requests == [("/a.txt", None, None)]
    assert fetch(file) == place and len(site.requests) == 1


@pytest.mark.parametrize("cut", [1, 65536, 70000, len(CONTENT) - 1])
@pytest.mark.parametrize("tag", [dict(), dict(etag=None, modified=DATE), dict(etag='W/"x"', modified=DATE)])
def test_a_connection_that_is_cut_is_resumed_where_it_broke(site, fetch, cut, tag):
    place = fetch(site.file(Page(cuts=[cut], **tag), digest=sha256(CONTENT)))
    assert (place / "a.txt").read_bytes() == CONTENT and names(place) == ["a.txt"]
    assert [asked for _, asked, _ in site.requests] == [None, f"bytes={cut}-"]
    assert site.requests[1][2] == tag.get("modified", '"one"')


def test_a_run_that_gives_up_keeps_what_came_and_the_next_one_goes_on(site, fetch, tmp_path):
    file = site.file(Page(cuts=[1000, 2000, 3000]))
    refused(lambda: fetch(file), file.address, "cut at 6,000 of 262,144 bytes", "tried 3 times", "the same command resumes")
    assert names(tmp_path / "set") == [".a.txt.part", ".a.txt.part.tag"]
    place = fetch(file)
    assert site.requests[-1] == ("/a.txt", "bytes=6000-", '"one"')
    assert (place / "a.txt").read_bytes() == CONTENT and names(place) == ["a.txt", "a.txt.sha256"]


@pytest.mark.parametrize("how, asked", [(dict(ranges=False), [None, "bytes=5000-"]), (dict(shift=7), [None, "bytes=5000-", None]),
                                        (dict(etag=None), [None, None]), (dict(etag='W/"weak"'), [None, None])])  # these two name no version of the file
def test_a_server_that_cannot_resume_sends_all_of_it_again(site, fetch, how, asked):
    place = fetch(site.file(Page(cuts=[5000], **how)))
    assert (place / "a.txt").read_bytes() == CONTENT and [one for _, one, _ in site.requests] == asked


def test_a_file_that_changed_between_two_tries_is_not_glued_to_its_old_part(site, fetch):
    file = site.file(Page(cuts=[9000]))
    refused(lambda: fetch(file, waits=()), "cut at 9,000")
    site.pages["/a.txt"] = Page(OTHER, etag='"two"')
    place = fetch(file)
    assert site.requests[-1][1:] == ("bytes=9000-", '"one"') and (place / "a.txt").read_bytes() == OTHER


def test_a_part_that_is_longer_than_the_file_is_thrown_away(site, fetch, tmp_path):
    file = site.file(Page(statuses=[416]))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / ".a.txt.part").write_bytes(CONTENT * 2)
    (tmp_path / "set" / ".a.txt.part.tag").write_text('"one"', encoding="utf-8")
    assert (fetch(file) / "a.txt").read_bytes() == CONTENT
    assert [asked for _, asked, _ in site.requests] == [f"bytes={2 * len(CONTENT)}-", None]


@pytest.mark.parametrize("page, size, words", [
    (Page(length=len(CONTENT) + 9), None, ("cut at 262,144 of 262,153 bytes",)),
    (Page(length=len(CONTENT) + 9), len(CONTENT), ("has 262,153 bytes, expected 262,144",)),
    (Page(length=len(CONTENT) - 9), len(CONTENT), ("has 262,135 bytes, expected 262,144",)),
    (Page(OTHER + b"more", framing="chunked"), len(CONTENT), ("more than the 262,144 bytes",)),
    (Page(framing="chunked"), len(CONTENT) + 9, ("has 262,144 bytes, expected 262,153",)),
    (Page(framing="chunked", etag=None), len(CONTENT) + 9, ("cut at 262,144 of 262,153 bytes", "tried 3 times")),
    (Page(framing="torn", etag=None), None, ("cut at 0 of ? bytes", "tried 3 times")),
    (Page(framing="close"), None, ("names no length",)), (Page(b""), None, ("names no length, or 0",))])
def test_a_server_that_lies_about_the_size_is_found_out(site, fetch, tmp_path, page, size, words):
    file = site.file(page, size=size)
    refused(lambda: fetch(file), file.address, *words)
    assert not any(name.startswith("a.txt") for name in names(tmp_path / "set"))


def test_an_unknown_length_is_no_matter_where_the_checksum_or_the_framing_tells_the_end(site, fetch):
    place = fetch(site.file(Page(framing="close"), "a.txt", digest=sha256(CONTENT)), site.file(Page(framing="chunked"), "b.txt"))
    assert all((place / name).read_bytes() == CONTENT for name in ("a.txt", "b.txt"))


def test_a_stream_without_end_stops_at_the_limit(site, fetch, tmp_path, monkeypatch):
    read, reads = download._read, []
    monkeypatch.setattr(download, "MOST_BYTES", 100_000)
    monkeypatch.setattr(download, "_read", lambda *arguments: reads.append(1) or read(*arguments))
    refused(lambda: fetch(site.file(Page(framing="chunked"))), "more than the 100,000 bytes")
    assert names(tmp_path / "set") == [] and len(reads) == 2                 # of 65,536 bytes each; there are four


def test_a_wrong_checksum_names_both_and_leaves_nothing(site, fetch, tmp_path):
    file = site.file(Page(OTHER), digest=sha256(CONTENT))
    refused(lambda: fetch(file), file.address, f"expected {sha256(CONTENT)}", f"found {sha256(OTHER)}", "nothing was kept")
    assert names(tmp_path / "set") == [] and len(site.requests) == 1
    site.pages["/a.txt"] = Page()
    assert (fetch(file) / "a.txt").read_bytes() == CONTENT


def test_where_no_checksum_is_known_the_first_one_is_written_down_and_holds_ever_after(site, fetch):
    file = site.file()
    place = fetch(file)
    record = place / "a.txt.sha256"
    assert record.read_text(encoding="utf-8") == f"{sha256(CONTENT)}  a.txt\n"
    (place / "a.txt").unlink()
    site.pages["/a.txt"] = Page(OTHER)
    refused(lambda: fetch(file), f"expected {sha256(CONTENT)}", record, f"found {sha256(OTHER)}")
    assert names(place) == ["a.txt.sha256"]
    record.unlink()                                                          # the way out that the message names
    assert (fetch(file) / "a.txt").read_bytes() == OTHER


@pytest.mark.parametrize("digest", [None, sha256(CONTENT)])
def test_a_file_that_was_altered_on_disk_is_found_and_left_where_it_is(site, fetch, digest):
    file = site.file(digest=digest)
    place = fetch(file)
    (place / "a.txt").write_bytes(b"altered")
    refused(lambda: fetch(file), "found " + sha256(b"altered"), "delete it to fetch it again")
    assert (place / "a.txt").read_bytes() == b"altered" and len(site.requests) == 1


def test_a_file_that_was_put_there_by_hand_is_checked_and_not_fetched(site, fetch, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.txt").write_bytes(CONTENT)
    fetch(site.file(digest=sha256(CONTENT)))
    assert site.requests == []


@pytest.mark.parametrize("status, tries", [(404, 1), (403, 1), (500, 3), (503, 3), (429, 3)])
def test_a_server_that_refuses_is_quoted_and_only_asked_again_where_that_may_help(site, fetch, tmp_path, status, tries):
    file = site.file(Page(statuses=[status] * 9))
    refused(lambda: fetch(file), file.address, f"the server answers {status}")
    assert len(site.requests) == tries and names(tmp_path / "set") == []


def test_an_answer_that_is_no_file_is_none(site, fetch, tmp_path):
    refused(lambda: fetch(site.file(Page(statuses=[204] * 3))), "the server answers 204", "tried 3 times")
    assert names(tmp_path / "set") == []


def test_a_server_that_recovers_is_forgiven(site, fetch):
    assert (fetch(site.file(Page(statuses=[503, 500]))) / "a.txt").read_bytes() == CONTENT and len(site.requests) == 3


def test_redirects_are_followed_on_the_web_and_the_range_with_them(site, fetch):
    real = site.file(Page(cuts=[4000]), "real.txt")
    place = fetch(site.file(Page(location=real.address), digest=sha256(CONTENT)))
    assert (place / "a.txt").read_bytes() == CONTENT and ("/real.txt", "bytes=4000-", '"one"') in site.requests


@pytest.mark.parametrize("location", ["file:///etc/hostname", "ftp://127.0.0.1/a.txt", "http://[", "/a.txt"])
def test_a_redirect_to_a_file_or_to_nowhere_is_refused(site, fetch, tmp_path, location):
    refused(lambda: fetch(site.file(Page(location=location))), "a.txt")
    assert names(tmp_path / "set") == []


def test_an_address_is_never_followed_from_https_to_http(fetch):
    def follow(old, new):
        return download._Redirect().redirect_request(urllib.request.Request(old), io.BytesIO(), 302, "Found", {}, new)
    refused(lambda: follow("https://a.org/x", "http://a.org/x"), "https://a.org/x leads to http://a.org/x", "nothing was fetched")
    assert follow("https://a.org/x", "https://b.org/x").full_url == "https://b.org/x"
    assert follow("http://a.org/x", "https://a.org/x").full_url == "https://a.org/x"


def test_an_address_that_is_a_path_of_this_machine_is_refused(fetch, tmp_path):
    (tmp_path / "secret").write_text("x", encoding="utf-8")
    refused(lambda: fetch(File((tmp_path / "secret").as_uri(), "a.txt")), "file://", "only https")
    assert names(tmp_path / "set") == []


def test_without_a_network_one_line_says_what_was_wanted_and_what_to_do(fetch, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))                                          # bound but not listening: connections are refused
        address = f"http://127.0.0.1:{free.getsockname()[1]}/a.txt"
        file = File(address, "a.txt")
        refused(lambda: fetch(file), address, "cannot reach 127.0.0.1", tmp_path / "set" / "a.txt")
        assert data.main(["download", "set", "--folder", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: cannot reach") and said.err.count("\n") == 1


def test_ctrl_c_keeps_the_part_and_says_so(site, fetch, tmp_path, monkeypatch, capsys):
    file, read = site.file(), download._read

    def interrupted(answer, have, total):
        if have >= 65536:
            raise KeyboardInterrupt
        return read(answer, have, total)
    monkeypatch.setattr(download, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch(file)
    assert data.main(["download", "set", "--folder", str(tmp_path)]) == 130
    part = tmp_path / "set" / ".a.txt.part"
    assert capsys.readouterr().err == f"stopped; {part} is kept: the same command resumes\n"
    assert part.read_bytes() == CONTENT[:65536]
    monkeypatch.setattr(download, "_read", read)
    assert (fetch(file) / "a.txt").read_bytes() == CONTENT and site.requests[-1][1] == "bytes=65536-"


def test_ctrl_c_before_anything_came_promises_nothing(site, fetch, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(download, "_open", interrupted)
    with pytest.raises(KeyboardInterrupt, match="^stopped; nothing unfinished is kept$"):
        fetch(site.file())


def test_a_full_disk_is_one_line_and_what_came_is_resumed(site, fetch, tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    file = site.file()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        refused(lambda: fetch(file), tmp_path / "set", "No space left on device", "--folder")
    assert names(tmp_path / "set") == [".a.txt.part", ".a.txt.part.tag"]
    site.pages["/a.txt"].statuses = [416]                                    # all of it is there: the server has nothing to add
    assert (fetch(file) / "a.txt").read_bytes() == CONTENT


def test_a_folder_that_cannot_be_written_is_one_line(site, fetch, tmp_path):
    (tmp_path / "set").write_text("in the way", encoding="utf-8")
    refused(lambda: fetch(site.file()), tmp_path / "set", "File exists")


@pytest.mark.skipif(download.fcntl is None, reason="no locks on this system")
def test_two_downloads_into_one_folder_do_not_mix(site, fetch, tmp_path):
    (tmp_path / "set").mkdir()
    with open(tmp_path / "set" / ".lock", "w", encoding="utf-8") as lock:
        download.fcntl.flock(lock, download.fcntl.LOCK_SH)
        refused(lambda: fetch(site.file()), "another process", tmp_path / "set")
    assert site.requests == []
    fetch(site.file())


# ------------------------------------------------------------------------------------------------------------------- archives

def tar(path, members, **formats):
    """A tar, compressed as its name says; a member is (name, content) or a TarInfo."""
    with tarfile.open(path, "w:" + path.suffix[1:].replace("tar", ""), **formats) as file:
        for member in members:
            info, content = (member, b"") if isinstance(member, tarfile.TarInfo) else (tarfile.TarInfo(member[0]), member[1])
            if content is None:
                info.type, content = tarfile.DIRTYPE, b""
            elif content:
                info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return path


def zipped(path, members):
    """A zip; a member is (name, content) or (name, content, mode of Unix)."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content, *mode in members:
            info = zipfile.ZipInfo("x")
            info.filename = name                                             # its constructor would mend some names
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = mode[0] << 16 if mode else 0
            file.writestr(info, content or b"")
    return path


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


GOOD = [("top/", None), ("top/a.txt", b"A"), ("top/deep/b.txt", b"B" * 100_000), ("./top/deep/c d.txt", b""), ("top/Größe.txt", b"C")]
INSIDE = {"a.txt": b"A", "deep/b.txt": b"B" * 100_000, "deep/c d.txt": b"", "Größe.txt": b"C"}


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tar.xz", "a.tar.bz2", "a.zip"])
def test_every_kind_of_archive_unpacks_to_the_same_files_and_a_single_folder_is_not_doubled(tmp_path, name):
    archive, target = tmp_path / name, tmp_path / "a"
    (zipped if name.endswith("zip") else tar)(archive, GOOD)
    download.unpack(archive, target)
    assert contents(target) == INSIDE and names(tmp_path) == ["a", name]
    (target / "a.txt").write_bytes(b"mine")
    download.unpack(archive, target)                                         # what is there is left alone
    assert (target / "a.txt").read_bytes() == b"mine"


def test_what_a_killed_run_left_of_an_unpacking_goes_away(tmp_path):
    (tmp_path / ".a.part").mkdir()
    (tmp_path / ".a.part" / "half").write_bytes(b"1")
    download.unpack(tar(tmp_path / "a.tar", GOOD), tmp_path / "a")
    assert contents(tmp_path / "a") == INSIDE and names(tmp_path) == ["a", "a.tar"]


def test_what_lies_in_several_folders_keeps_them_and_the_shadows_of_macs_are_left_out(tmp_path):
    download.unpack(zipped(tmp_path / "a.zip", [("x/a", b"1"), ("__MACOSX/x/._a", b"junk"), ("y/a", b"2")]), tmp_path / "a")
    assert contents(tmp_path / "a") == {"x/a": b"1", "y/a": b"2"}


def test_nothing_unpacked_can_be_executed_or_is_older_than_now(tmp_path):
    info = tarfile.TarInfo("a")
    info.mode, info.mtime = 0o4777, 1
    download.unpack(tar(tmp_path / "a.tar", [info, ("b", b"")]), tmp_path / "a")
    assert (tmp_path / "a" / "a").stat().st_mode & (0o111 | stat.S_ISUID) == 0


PATHS = {"absolute": "/tmp/evil", "up": "../evil", "up inside": "a/../../evil", "up at the end": "a/..", "drive": "C:evil", "drive and slash": "c:/evil",
         "backslash": "..\\evil", "network": "\\\\host\\evil", "dots and a space": ".. /evil", "three dots": ".../evil", "line break": "a\nb", "nothing": ".",
         "escape": "a\x1b[2Jb", "turned around": "a\u202etxt.exe"}
TWICE = {"twice": ("a", "a"), "case": ("a/README", "a/readme"), "accents": ("\u00e9", "e\u0301"), "folder's case": ("A/x", "a/y"),
         "file, then folder": ("a", "a/b"),
         "folder, then file": ("a/b", "a"), "dot at the end": ("a", "a."), "dot in the path": ("a/b", "a/./b"), "sharp s": ("stra\u00dfe", "STRASSE")}
LINKS = {"symbolic link": special("a", tarfile.SYMTYPE, "/etc/passwd"), "hard link": special("a", tarfile.LNKTYPE, "b"), "pipe": special("a", tarfile.FIFOTYPE),
         "character device": special("a", tarfile.CHRTYPE), "block device": special("a", tarfile.BLKTYPE), "unknown kind": special("a", b"Z"),
         "sparse": special("a", tarfile.GNUTYPE_SPARSE)}
EVIL = [(f"{ending}: {label}", ending, [("ok.txt", b"fine"), (name, b"evil")]) for label, name in PATHS.items() for ending in ("tar", "zip")]
EVIL += [(f"{ending}: {label}", ending, [("ok.txt", b"fine"), (one, b"1"), (two, b"2")]) for label, (one, two) in TWICE.items() for ending in ("tar", "zip")]
EVIL += [(f"tar: {label}", "tar", [("b", b"fine"), info]) for label, info in LINKS.items()]
EVIL += [("tar: through a link", "tar", [special("a", tarfile.SYMTYPE, ".."), ("a/evil", b"evil")]),
         ("tar: absolute folder", "tar", [("ok.txt", b"fine"), ("/tmp/evil", None)]),
         ("zip: symbolic link", "zip", [("ok.txt", b"fine"), ("a", b"/etc/passwd", stat.S_IFLNK | 0o777)]),
         ("zip: a name that goes on after its end", "zip", [("ok.txt", b"fine"), ("a\0/../../evil", b"evil")]),
         ("zip: device", "zip", [("ok.txt", b"fine"), ("a", b"", stat.S_IFCHR | 0o666)])]


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("ending, members", [row[1:] for row in EVIL], ids=[row[0] for row in EVIL])
def test_an_archive_that_means_harm_leaves_nothing_inside_or_outside(tmp_path, ending, members):
    home = tmp_path / "deep" / "home"
    home.mkdir(parents=True)
    archive = (tar if ending == "tar" else zipped)(home / f"a.{ending}", members)
    refused(lambda: download.unpack(archive, home / "a"), archive, "nothing was unpacked")
    assert names(home) == [archive.name] and names(home.parent) == ["home"] and not Path("/tmp/evil").exists()


def test_a_zip_that_wants_a_password_is_refused(tmp_path):
    content = bytearray(zipped(tmp_path / "a.zip", [("a", b"x")]).read_bytes())
    content[6] |= 1
    content[content.rindex(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "a.zip").write_bytes(content)
    refused(lambda: download.unpack(tmp_path / "a.zip", tmp_path / "a"), "'a' is a link, a device or encrypted")


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tar.xz", "a.tar.bz2", "a.zip"])
def test_a_bomb_stops_at_the_limit_while_it_is_read(tmp_path, name):
    archive = (zipped if name.endswith("zip") else tar)(tmp_path / name, [("ok", b"fine"), ("bomb", bytes(3_000_000))])
    refused(lambda: download.unpack(archive, tmp_path / "a", most_bytes=1_000_000), "'bomb'", "1,000,000 bytes")
    assert names(tmp_path) == [name]
    download.unpack(archive, tmp_path / "a", most_bytes=3_000_004)           # exactly as much as there is


def test_a_bomb_in_a_zip_that_lies_about_its_size_is_no_better(tmp_path):
    content = zipped(tmp_path / "a.zip", [("bomb", bytes(3_000_000))]).read_bytes()
    assert content.count((3_000_000).to_bytes(4, "little")) == 2
    (tmp_path / "a.zip").write_bytes(content.replace((3_000_000).to_bytes(4, "little"), (10).to_bytes(4, "little")))
    refused(lambda: download.unpack(tmp_path / "a.zip", tmp_path / "a", most_bytes=1_000_000), tmp_path / "a.zip")
    assert names(tmp_path) == ["a.zip"]


def test_a_bomb_in_a_header_is_not_read_into_memory(tmp_path):
    info = tarfile.TarInfo("a")
    info.pax_headers = {"comment": "x" * 3_000_000}
    archive = tar(tmp_path / "a.tar.gz", [("first", b"1"), info], format=tarfile.PAX_FORMAT)
    assert archive.stat().st_size < 20_000
    refused(lambda: download.unpack(archive, tmp_path / "a"), "header")
    assert names(tmp_path) == ["a.tar.gz"]


@pytest.mark.parametrize("ending", ["tar", "zip"])
def test_more_files_or_folders_than_allowed_are_refused(tmp_path, ending):
    build = tar if ending == "tar" else zipped
    archive = build(tmp_path / f"a.{ending}", [(f"f/{i}", b"") for i in range(10)])
    download.unpack(archive, tmp_path / "a", most_files=11)
    refused(lambda: download.unpack(archive, tmp_path / "b", most_files=10), "10 files and folders")
    deep = build(tmp_path / f"b.{ending}", [("/".join("abcdefghijkl"), b"")])
    refused(lambda: download.unpack(deep, tmp_path / "b", most_files=11), "11 files and folders")
    assert names(tmp_path) == ["a", f"a.{ending}", f"b.{ending}"]


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.tar.xz", "a.tar.bz2", "a.zip"])
def test_an_archive_that_was_cut_or_is_none_is_never_taken_for_whole(tmp_path, name):
    archive = (zipped if name.endswith("zip") else tar)(tmp_path / name, [(f"file {i}", os.urandom(700)) for i in range(6)])
    whole = archive.read_bytes()
    for content in [whole[:len(whole) * part // 20] for part in range(20) if name != "a.tar" or part < 8] + [b"<html>not found</html>" * 99]:
        archive.write_bytes(content)
        refused(lambda: download.unpack(archive, tmp_path / "a"), archive, "damaged")
        assert names(tmp_path) == [name]


def test_a_spoilt_header_in_the_middle_is_not_taken_for_the_end(tmp_path):
    archive = tar(tmp_path / "a.tar", [("one", b"1"), ("two", b"2"), ("three", b"3")])
    content = bytearray(archive.read_bytes())
    content[1024 + 148] ^= 1                                                 # the checksum of the second header
    archive.write_bytes(content)
    refused(lambda: download.unpack(archive, tmp_path / "a"), "damaged", "in the middle")
    archive.write_bytes(content[:1024])                                      # cut between two members
    refused(lambda: download.unpack(archive, tmp_path / "a"), "damaged")
    assert names(tmp_path) == ["a.tar"]


@pytest.mark.parametrize("members", [[], [("only/", None)]])
def test_an_archive_without_files_is_no_data_set(tmp_path, members):
    for archive in (zipped(tmp_path / "a.zip", members), tar(tmp_path / "a.tar", members)):
        refused(lambda: download.unpack(archive, tmp_path / "a"), "damaged", "no file in it")


def test_an_archive_is_fetched_checked_and_unpacked_and_a_bad_one_stops_before_the_next_file(site, fetch, tmp_path):
    good = tar(tmp_path / "good.tar.gz", GOOD).read_bytes()
    place = fetch(site.file(Page(good, cuts=[100]), "x-1.0.tar.gz", digest=sha256(good), unpack=True))
    assert contents(place / "x-1.0") == INSIDE and names(place) == ["x-1.0", "x-1.0.tar.gz"]
    evil = zipped(tmp_path / "evil.zip", [("../evil", b"x")]).read_bytes()
    refused(lambda: fetch(site.file(Page(evil), "y.zip", unpack=True), site.file(name="z.txt")), "../evil")
    assert not (place / "y").exists() and not (place / "z.txt").exists() and not (tmp_path / "evil").exists()


# ------------------------------------------------------------------------------------------------------- the table, the commands

def test_list_prints_every_row_with_its_licence_purpose_and_source(capsys):
    assert data.main(["list"]) == 0
    said = capsys.readouterr().out
    for row in download.DATASETS:
        lines = said[re.search(rf"^{re.escape(row.name)} ", said, re.M).start():].splitlines()[:3]
        assert row.licence in lines[0] and row.purpose in lines[1] and (row.files[0].address if row.files else row.by_hand) in lines[2]
    assert len(said.splitlines()) == 1 + 3 * len(download.DATASETS)


def test_download_from_the_command_line_fetches_and_says_where_it_is(site, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(download, "DATASETS", (Dataset("pairs", "a test", "none", (site.file(Page(b"a\tb\n" * 9), "pairs.tsv"),)),))
    monkeypatch.chdir(tmp_path)
    assert data.main(["download", "pairs"]) == data.main(["download", "pairs"]) == 0
    assert capsys.readouterr().out == "data/pairs: complete and checked\n" * 2 and len(site.requests) == 1
    assert data.texts("data/pairs/pairs.tsv", holdout=False)["src"] == ["a"] * 9


def test_a_progress_bar_is_for_a_terminal_only(site, fetch, capsys):
    fetch(site.file())
    said = capsys.readouterr()
    assert said.out == said.err == ""


@pytest.mark.parametrize("arguments, words", [
    (["download", "flores20"], "did you mean flores200"), (["download", "spider"], "yale-lily.github.io/spider"), (["download"], "NAME"),
    (["download", "flores200", "--force"], "download has no flag --force"), (["list", "all"], "list has no flag all")])
def test_a_wrong_command_is_answered_in_one_line(capsys, arguments, words):
    assert data.main(arguments) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and said.startswith("error: ")


def test_missing_names_file_source_licence_and_command_and_is_silent_once_all_is_there(site, fetch, tmp_path):
    archive = tar(tmp_path / "x.tar.gz", GOOD).read_bytes()
    files = site.file(), site.file(Page(archive), "x.tar.gz", unpack=True)
    fetch(*files)
    assert download.missing("set", tmp_path) == download.missing("set", tmp_path, "x/deep/b.txt") == ""
    said = download.missing("set", tmp_path, "x/deep/z.txt")
    for word in (tmp_path / "set" / "x" / "deep" / "z.txt", files[1].address, "licence: none", f"python data.py download set --folder {tmp_path}"):
        assert str(word) in said
    (tmp_path / "set" / "a.txt").unlink()
    said = download.missing("set", tmp_path)
    assert said.startswith(f"{tmp_path / 'set' / 'a.txt'} is missing") and files[0].address in said and "\n" not in said


@pytest.mark.parametrize("row", download.DATASETS, ids=lambda row: row.name)
def test_a_row_of_the_table_is_complete(row, tmp_path):
    assert row.purpose and row.licence and bool(row.files) != bool(row.by_hand)
    assert re.fullmatch(r"[a-z0-9+-]{2,16}", row.name) and [one.name for one in download.DATASETS].count(row.name) == 1
    assert len({one.name for one in row.files}) == len(row.files) == len({download._ready(Path(), one) for one in row.files})
    for file in row.files:
        parts = urllib.parse.urlsplit(file.address)
        assert parts.scheme == "https" and parts.netloc in HOSTS and not parts.query and parts.path.endswith(f"/{file.name}") and "//" not in parts.path
        assert re.fullmatch(r"[\w.+-]+", file.name) and not file.name.startswith(".")
        assert file.sha256 is None or re.fullmatch(r"[0-9a-f]{64}", file.sha256) and file.size > 0
        assert file.unpack == file.name.endswith((".zip", ".tar.gz", ".tar.bz2"))
        assert file.size is None or file.size < download.MOST_BYTES
    said = download.missing(row.name, tmp_path)
    assert row.name in said and row.licence in said and "\n" not in said and ("python data.py download" in said) == bool(row.files)


def test_a_digest_stands_once_in_the_table():
    digests = [file.sha256 for row in download.DATASETS for file in row.files if file.sha256]
    assert len(digests) > 30 and len(set(digests)) == len(digests)


def test_download_imports_nothing_of_ours_but_data_and_else_only_the_standard_library_and_the_bar():
    tree = ast.parse(Path(download.__file__).read_text(encoding="utf-8"))
    found = {name.split(".")[0] for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))
             for name in ([one.name for one in node.names] if isinstance(node, ast.Import) else [node.module])}
    assert found - sys.stdlib_module_names == {"data", "tqdm"}
