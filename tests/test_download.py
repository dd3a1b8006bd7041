"""Public data sets: listed, fetched whole or not at all, never fetched twice. Offline."""

import contextlib
import hashlib
import http.server
import io
import re
import tarfile
import threading
import time
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


@pytest.mark.parametrize("name, content, sha256, said", [
    ("a.txt", b"other", "0" * 64, "its sha256 is"),
    ("set.zip", b"no zip", True, "set.zip cannot be unpacked"),
    ("set.tar.gz", tar(a="1" * 9999)[:40], True, "set.tar.gz cannot be unpacked"),
    ("set.tar.gz", tar(**{"..__..__evil": "1"}), True, "set.tar.gz cannot be unpacked"),
])
def test_what_is_not_whole_or_not_safe_is_refused(source, tmp_path, name, content, sha256, said):
    source(name, content, sha256, unpack=name != "a.txt")
    with pytest.raises(BadInput, match=said) as refused:
        download.download("x", tmp_path / "data")
    assert "\n" not in str(refused.value) and "again" in str(refused.value)
    assert set(listing(tmp_path / "data/x")) <= {name} - {"a.txt"}
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize("length, pieces, size, said", [
    (3, 3, 3, ""), (9, 3, None, "only 3 of its 9 bytes came"),
    (500, 500, None, "it sends less than 1000 bytes"), (9, 9, 2, "it sends more than its 2 bytes"),
    (None, 500, None, "it sends less than 1000 bytes")], ids=str)
def test_a_download_that_is_cut_trickles_or_goes_on_ends_and_leaves_nothing(
        tmp_path, monkeypatch, length, pieces, size, said):
    class Slow(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.flush_headers()
            if length:  # otherwise the header does not end
                self.wfile.write(b"Content-Length: %d\r\n\r\n" % length)
            for _ in range(pieces):
                self.wfile.write(b"x")
                time.sleep(.01)

    monkeypatch.setattr(download, "PATIENCE", .2)
    monkeypatch.setenv("no_proxy", "*")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        file = download.File(f"http://127.0.0.1:{server.server_port}/a.txt", size)
        with pytest.raises(BadInput, match=said) if said else contextlib.nullcontext():
            download.fetch(file, tmp_path / "a.txt")
        server.shutdown()
    assert listing(tmp_path) == ([] if said else ["a.txt"])


@pytest.mark.parametrize("name, said", [
    ("flores", "did you mean flores200"), ("spider", "follow the link"),
    ("yelp", "yelp was put there by hand: nothing"), ("x", "a.txt.*put it at")])
def test_refusals_say_the_name_and_the_way_out(source, tmp_path, capsys, name, said):
    source("a.txt", b"one").unlink()
    (tmp_path / "yelp").mkdir()
    assert exit_status(download.main, [name, "--folder", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(said, error)


def test_a_python_that_does_not_check_archives_is_refused(monkeypatch, tmp_path):
    monkeypatch.delattr("tarfile.data_filter")
    with pytest.raises(BadInput, match="use 3.10.12, 3.11.4 or newer"):
        download.unpack(tmp_path / "a.tar.gz", tmp_path / "a")
