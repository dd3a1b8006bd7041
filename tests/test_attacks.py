"""Folders and files of others, damage, kills of one of two processes."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from test_evaluate import tiny, write_rows, write_run
from test_train import assert_same_run, command, contents, pairs, started  # noqa: F401

import train
from base.tokenizer import Tokenizer
from harness import pretrained, runs, weights

# ---- a foreign run as the start


def link_to_a_file(hf):
    hf.mkdir()
    (hf / "chat_template.jinja").symlink_to(Path("secret.txt").absolute())


def link_to_a_folder(hf):
    Path("mine").mkdir()
    Path("mine/chat_template.jinja").write_text("secret", encoding="utf-8")
    hf.symlink_to(Path("mine").absolute())


@pytest.fixture
def foreign(tokenizer):
    """Write the folder of a foreign run; return the settings of a run that starts from it."""
    write_run("foreign", tiny(), tokenizer, data="", size="toy", max_length=16)
    return dict(init="foreign", data="pairs.tsv", batch=8, eval_limit=20, steps=2)


@pytest.mark.parametrize("forge", [link_to_a_file, link_to_a_folder])
def test_no_link_of_a_foreign_run_is_followed(forge, foreign):
    Path("secret.txt").write_text("secret", encoding="utf-8")
    forge(Path("foreign/hf"))
    list(train.start("mlm", "run", **foreign).steps())
    assert not any(path.name == "hf" for path in Path("run").iterdir())
    assert not any(b"secret" in content for content in contents("run").values())


def test_two_plain_files_are_copied_for_an_export_and_never_through_a_link(foreign):
    Path("foreign/hf").mkdir()
    for name in (*pretrained.HF_FILES, "config.json", "tokenizer.json"):
        Path("foreign/hf", name).write_text("theirs", encoding="utf-8")
    list(train.start("mlm", "run", **foreign).steps())
    assert sorted(path.name for path in Path("run/hf").iterdir()) == sorted(pretrained.HF_FILES)
    # A link in the new run, which an older version could copy there, is not written through.
    Path("mine").mkdir()
    log = Path("run/log.jsonl").read_text(encoding="utf-8").splitlines()[0]
    Path("second").mkdir()
    Path("second/log.jsonl").write_text(log + "\n", encoding="utf-8")
    Path("second/hf").symlink_to(Path("mine").absolute())
    list(train.start("mlm", "second", **foreign).steps())
    assert not [*Path("mine").iterdir()]


# ---- folders that are not ours


@pytest.mark.parametrize("name, content", [
    ("tokenizer.json", "mine"), ("hf", None), ("log.jsonl", '{"loss": 1}'), ("notes.txt", "mine"),
    (".notes.txt.01234567.part", "mine")])
def test_a_folder_with_files_of_somebody_else_is_refused_and_left_alone(name, content, refused):
    Path("u").mkdir()
    if content is None:
        Path("u", name).mkdir()
    else:
        Path("u", name).write_text(content, encoding="utf-8")
    assert f"--out u contains {name}, but no train.pt to resume" in refused(
        train.main, command("mlm", "u"))
    assert [path.name for path in Path("u").iterdir()] == [name]
    assert content is None or Path("u", name).read_text(encoding="utf-8") == content


# What a start does, in this order. It dies before the first function, or after one of them.
PLACES = {"nothing": (runs, "write_log"), "log": (runs, "write_log"),
          "tokenizer": (Tokenizer, "save"), "hf": (pretrained, "copy_hf"), "trained": (np, "save")}


def dying(function, works):
    def dies(*arguments):
        if works:
            function(*arguments)
        raise MemoryError
    return dies


def test_a_start_that_dies_anywhere_is_taken_up_by_the_same_command(foreign, monkeypatch):
    list(train.start("mlm", "whole", **foreign).steps())  # also fills the cache
    for done, (owner, name) in PLACES.items():
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(owner, name, dying(getattr(owner, name), done != "nothing"))
            list(train.start("mlm", done, **foreign).steps())
        left = {path.name for path in Path(done).iterdir()}
        assert not left or "log.jsonl" in left  # which proves that the folder is ours
        list(train.start("mlm", done, **foreign).steps())
        assert_same_run(done, "whole")
        assert contents(done).keys() == contents("whole").keys()
        assert contents(done)["trained.npy"] == contents("whole")["trained.npy"]


# ---- damage


def test_weights_that_repeat_one_number_or_have_another_type_become_whole_ones():
    """Fused AdamW writes to as many numbers as a weight has, so they must be there."""
    weights.save(tiny(), "model.pt")
    saved = torch.load("model.pt", weights_only=True)
    size = saved["weights"]["embed.weight"].shape
    for forged in (torch.ones(1).expand(size), torch.ones(size).half()):
        saved["weights"]["embed.weight"] = forged
        torch.save(saved, "model.pt")
        weight = weights.load("model.pt").embed.weight
        assert weight.is_contiguous() and weight.dtype == torch.float32 and (weight == 1).all()


def test_a_file_system_without_locks_is_a_warning(monkeypatch, capsys):
    """Lustre without the mount option flock, and some NFS."""
    error = OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=error))
    assert train.main(command("mlm", steps=1)) == 0
    assert capsys.readouterr().err.count("warning: files cannot be locked here") == 1
    assert Path("run/model.pt").exists()


# ---- rows that were trained on


def test_every_row_of_eval_data_is_compared_with_the_training_rows(capsys):
    lines = Path("pairs.tsv").read_text(encoding="utf-8").splitlines()
    new = [f"new {row}\tneu {row}" for row in range(300)]
    write_rows("later.tsv", [*new, *lines[1:101]])
    assert train.main(command("contrastive", steps=1, eval_data="later.tsv", eval_limit=20)) == 0
    assert "the model was trained on a text of 100 of the 400 rows of later" in (
        capsys.readouterr().err)


# ---- a signal in a save, one of two processes is killed


def test_a_signal_inside_a_save_waits_for_its_end_and_no_step_is_lost(monkeypatch):
    """Of a KeyboardInterrupt in one of its writes, torch.save would make a RuntimeError.
    test_train.py has the other signals."""
    words = command("mlm", steps=4, save_every=2)
    whole, targets = torch.save, []

    def save(saved, file):
        def write(content):
            if targets and f"/.{targets[0]}." in file.name:
                targets.clear()
                signal.raise_signal(signal.SIGHUP)
            return file.write(content)
        whole(saved, SimpleNamespace(write=write, flush=file.flush))

    monkeypatch.setattr(torch, "save", save)
    for name in ("train.pt", "model.pt"):  # a start at step 2 writes model.pt once more
        targets.append(name)
        assert train.main(words) == 128 + signal.SIGHUP and not targets
        assert torch.load("run/train.pt", weights_only=True)["step"] == 2
    assert train.main(words) == 0
    assert train.main(command("mlm", "whole", steps=4)) == 0
    assert_same_run("run", "whole")


def test_an_interrupt_while_pytorch_is_loaded_prints_no_traceback():
    program = Path(train.__file__)
    with subprocess.Popen([sys.executable, program, "--help"], stderr=subprocess.PIPE, text=True,
                          stdout=subprocess.DEVNULL) as child:
        assert child.stderr.readline() == "loading PyTorch ...\n"
        child.send_signal(signal.SIGINT)
        assert (child.stderr.read(), child.wait()) == ("", -signal.SIGINT)


HELD = """
import train
held = []
for out in (None, "run"):
    run = train.start("mlm", out, data="pairs.tsv", langs="en", vocab=300, width=16, layers=1,
                      heads=2, ffn_dim=32, batch=8, eval_limit=20, steps=6, device="cpu")
    held.append(run.steps(every=1))
    while next(held[-1])["step"] < 3:
        pass
"""


def test_a_loop_that_somebody_holds_when_python_exits_saves_its_last_step():
    """Later, when Python closes the loop by itself, nothing can be imported or saved."""
    done = subprocess.run([sys.executable, "-c", HELD], text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert torch.load("run/train.pt", weights_only=True)["step"] == 3


def test_a_record_that_a_full_disk_cut_is_no_longer_in_the_log_when_the_loop_goes_on():
    run = started("mlm", "run", steps=4)
    for record in run.steps(every=1):
        if record["step"] == 2:
            break
    with open("run/log.jsonl", "a") as log:
        log.write('{"step": 3, "lo')
    list(run.steps(every=1))
    assert [record["step"] for record in runs.read_log("run")[1:]] == [0, 1, 2, 3, 4, 4]


# For each place, two processes train until one of them kills itself there. Then both are started
# again. Only this script imports PyTorch; the others are its copies.
ONE_OF_TWO = """
import json, os, signal, sys
import torch._dynamo, train
from harness import runs
import torch.distributed as dist

def strike(owner, name, when, after=False):
    function = getattr(owner, name)
    def killing(*arguments, **more):
        found = function(*arguments, **more) if after else None
        if when(*arguments):
            os.kill(os.getpid(), signal.SIGKILL)
        return found if after else function(*arguments, **more)
    setattr(owner, name, killing)

PLACES = {  # rank, and where it dies
    "step": (1, (train.Run, "train_step", lambda run, *_: run.step == 3)),
    "part": (0, (os, "replace", lambda part, path: path.name == "train.pt")),
    "between": (0, (os, "replace", lambda part, path: path.name == "train.pt", True)),
}

def start(number, words, place=None):
    children = []
    for rank in (0, 1):
        child = os.fork()
        if child:
            children.append(child)
            continue
        os.environ.update(RANK=str(rank), WORLD_SIZE="2")
        sys.stdout = sys.stderr = open(os.devnull, "w")
        dist.rendezvous = lambda *_, **__: iter([(dist.FileStore(f"meet{number}", 2), rank, 2)])
        if place and PLACES[place][0] == rank:
            strike(*PLACES[place][1])
        os._exit(train.main(words) or 0)
    return children

for number, (place, words) in enumerate(json.loads(sys.argv[1])):
    if place:
        children = start(f"{number}a", words, place)
        victim = children.pop(PLACES[place][0])
        assert os.waitpid(victim, 0)[1] == signal.SIGKILL, place
        os.kill(children[0], signal.SIGKILL)  # as torchrun does
        os.waitpid(children[0], 0)
    assert [os.waitpid(child, 0)[1] for child in start(f"{number}b", words)] == [0, 0], place
"""


def test_whichever_of_two_processes_is_killed_the_run_resumes_bit_for_bit():
    more = dict(steps=6, save_every=2, log_every=1, eval_every=3, precision="float32")
    places = ("", "step", "part", "between")
    jobs = [(place, command("mlm", place or "whole", **more)) for place in places]
    more |= dict(optimizer="adamw", balance="fixed", shard=True)
    shards = {"shard": "", "shard-between": "between"}
    jobs += [(place, command("hybrid", name, **more)) for name, place in shards.items()]
    done = subprocess.run([sys.executable, "-c", ONE_OF_TWO, json.dumps(jobs)], text=True,
                          capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for place in (*places[1:], *shards):
        reference = "shard" if place in shards else "whole"
        assert_same_run(place, reference)
        whole, found = ([{name: value for name, value in record.items() if "second" not in name}
                         for record in runs.read_log(name)[1:]] for name in (reference, place))
        assert found == whole
        assert not [*Path(place).glob(".*.part")]
