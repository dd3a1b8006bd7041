"""Public data sets: listed, fetched whole or not at all, never fetched twice. Offline."""

import hashlib
import http.server
import io
import re
import tarfile
import threading
import zipfile

import pytest

from corpora import download
from corpora.program import BadInput, exit_status


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A folder that serves as the web, and a function that makes it a data set called `x`."""
    folder = tmp_path / "web"
    folder.mkdir()

    def serve(name, content, sha256=True, unpack=False):
        (folder / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest() if sha256 is True else sha256
        address = (folder / name).as_uri()
        file = download.File(address, len(content), digest, unpack)
        row = download.Dataset("x", "a test", "CC0", (file,))
        monkeypatch.setitem(download.DATASETS, "x", row)
        return folder / name
    return serve


def tar(**files):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name.replace("__", "/"))
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return made.getvalue()


def zipped(**files):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, text in files.items():
            archive.writestr(name.replace("__", "/"), text)
    return made.getvalue()


def listing(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_the_table_has_what_the_papers_use_and_each_row_can_be_fetched_or_says_how(capsys):
    assert exit_status(download.main, []) == 0
    shown = capsys.readouterr().out
    for name, row in download.DATASETS.items():
        assert name in shown and row.licence in shown
        assert bool(row.files) != bool(row.by_hand)
        assert len({file.name for file in row.files}) == len(row.files)
        for file in row.files:
            assert file.address.startswith("https://")
            assert file.sha256 is None or re.fullmatch("[0-9a-f]{64}", file.sha256) and file.size
            assert not file.unpack or file.name.endswith((".zip", ".tar.gz", ".tar.bz2"))
    assert {"flores200", "xsim++", "tatoeba", "bucc2018", "glue", "gsm8k"} < set(download.DATASETS)


@pytest.mark.parametrize("sha256", [True, None])
def test_a_file_is_fetched_once_and_what_is_there_is_kept(source, tmp_path, capsys, sha256):
    served = source("a.txt", b"one\ntwo\n", sha256)
    arguments = ["x", "--folder", str(tmp_path / "data")]
    assert "x/a.txt is missing" in download.missing("x", tmp_path / "data")
    assert exit_status(download.main, arguments) == 0
    assert capsys.readouterr().out.endswith("data/x: complete\n")
    assert download.missing("x", tmp_path / "data") == ""
    served.unlink()
    assert exit_status(download.main, arguments) == 0
    path = tmp_path / "data/x/a.txt"
    assert path.read_bytes() == b"one\ntwo\n"
    path.write_bytes(b"one\n")
    assert exit_status(download.main, arguments) == 2 and path.read_bytes() == b"one\n"
    assert "a.txt has 4 bytes, not 8: delete it" in capsys.readouterr().err


@pytest.mark.parametrize("name, content, wanted", [
    ("set.tar.gz", tar(set__a="1", set__b__c="2"), ["a", "b", "b/c"]),  # its one folder
    ("set.tar.gz", tar(a="1", b__c="2"), ["a", "b", "b/c"]),
    ("set.zip", zipped(set__a="1", __MACOSX__a="2"), ["a"])])
def test_an_archive_becomes_the_folder_of_its_name(source, tmp_path, name, content, wanted):
    source(name, content, unpack=True)
    place = download.download("x", tmp_path / "data")
    assert listing(place / "set") == wanted
    assert {path.name for path in place.iterdir()} == {name, "set"}
    assert download.missing("x", tmp_path / "data", "set/a") == ""


def hostile(kind, name="evil", target="../../evil"):
    """A tar with a link out of its folder, or with a device."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.type = kind
        member.linkname = target
        archive.addfile(member)
    return made.getvalue()


def locked():
    """A zip that says that its file is encrypted."""
    made = bytearray(zipped(a="1"))
    made[6] |= 1
    made[made.index(b"PK\1\2") + 8] |= 1
    return bytes(made)


BROKEN = "set.tar.gz cannot be unpacked"


@pytest.mark.parametrize("name, content, sha256, said", [
    ("a.txt", b"other", "0" * 64, "invalid hash value"),
    ("set.zip", b"no zip", True, "set.zip cannot be unpacked"),
    ("set.zip", locked(), True, "set.zip cannot be unpacked"),
    ("set.tar.gz", tar(a="1" * 9999)[:40], True, BROKEN),
    ("set.tar.gz", tar(**{"..__..__evil": "1"}), True, BROKEN),
    ("set.tar.gz", hostile(tarfile.SYMTYPE), True, BROKEN),
    # A link that stays inside could begin a chain of links that does not.
    ("set.tar.gz", hostile(tarfile.SYMTYPE, target="a"), True, BROKEN),
    ("set.tar.gz", hostile(tarfile.LNKTYPE, target="/etc/hostname"), True, BROKEN),
    ("set.tar.gz", hostile(tarfile.CHRTYPE), True, BROKEN)])
def test_what_is_not_whole_or_not_safe_is_refused(source, tmp_path, name, content, sha256, said):
    source(name, content, sha256, unpack=name != "a.txt")
    with pytest.raises(BadInput, match=said) as refused:
        download.download("x", tmp_path / "data")
    assert "\n" not in str(refused.value) and "again" in str(refused.value)
    assert set(listing(tmp_path / "data/x")) <= {name} - {"a.txt"}
    assert not list(tmp_path.rglob("evil"))


def test_a_zip_stays_in_its_folder_and_makes_no_links(source, tmp_path):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        link = zipfile.ZipInfo("link")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc")
        for name in (f"{tmp_path}/evil", "../evil", "a/../../evil", "good"):
            archive.writestr(name, "1")
    source("set.zip", made.getvalue(), unpack=True)
    place = download.download("x", tmp_path / "data") / "set"
    assert listing(place) == ["good", "link"] and not (place / "link").is_symlink()
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize("digest", [None, "0" * 64])
def test_a_download_that_is_cut_leaves_nothing(tmp_path, monkeypatch, digest):
    class Cut(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "9")
            self.end_headers()
            self.wfile.write(b"123")

    monkeypatch.setenv("no_proxy", "*")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cut) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        file = download.File(f"http://127.0.0.1:{server.server_port}/a.txt", None, digest)
        with pytest.raises(BadInput, match="nothing was kept"):
            download.fetch(file, tmp_path / "a.txt")
        server.shutdown()
    assert not listing(tmp_path)


@pytest.mark.parametrize("name, said", [
    ("flores", "did you mean flores200"), ("spider", "follow the link"),
    ("yelp", "yelp was put there by hand: nothing"), ("x", "a.txt.*put it at")])
def test_refusals_say_the_name_and_the_way_out(source, tmp_path, capsys, name, said):
    source("a.txt", b"one").unlink()
    (tmp_path / "yelp").mkdir()
    assert exit_status(download.main, [name, "--folder", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(said, error)
