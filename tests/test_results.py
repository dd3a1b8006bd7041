"""Records, statistics, the board of claims, the pages, experiments, and the tools beside them."""

import contextlib
import functools
import importlib.util
import io
import json
import lzma
import os
import re
import signal
import threading
import time
from multiprocessing.pool import ThreadPool
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from scipy import stats
from test_house import write_pairs

import evaluate
import train
from harness import runs, settings
from objectives import Contrastive, Mexma
from results import compare, flops, plots, run, show
from results.__main__ import main
from tasks import finetune
from tasks import protocols as tasks

ROOT = compare.ROOT
TINY = ("--width 16 --layers 1 --heads 2 --ffn-dim 32 --dropout 0 --vocab 300 --eval-limit 20 "
        "--batch 8 --optimizer adamw --lr 1e-3 --precision float32 --data pairs.tsv ")


@pytest.fixture
def pairs():
    write_pairs(Path("pairs.tsv"), 300)


@pytest.fixture
def own_records(tmp_path, monkeypatch):
    """A file without records, to write to."""
    monkeypatch.setattr(compare, "RECORDS", tmp_path / "records.jsonl.xz")
    compare.RECORDS.write_bytes(lzma.compress(b""))


def keep_odd(values):
    """Write records of the experiment "odd". values: {label: the metric x of seeds 0, 1, ...}."""
    compare.keep_records([{"experiment": "odd", "label": label, "seed": seed, "eval": {"x": x}}
                          for label, row in values.items() for seed, x in enumerate(row)])


ODD = {"tables": [{"columns": {"X": "x"}}]}


# ---- statistics and the board


def scipy_test(claim, one):
    """Return p, the verdict if it is small after correction, and the verdict if it is not."""
    ours, baseline = ([one[side][seed] for seed in sorted(one["ours"])]
                      for side in ("ours", "baseline"))
    if "within" in claim:
        margin, differences = claim["within"], [a - b for a, b in zip(ours, baseline)]
        p = max(stats.ttest_1samp(differences, -margin, alternative="greater").pvalue,
                stats.ttest_1samp(differences, margin, alternative="less").pvalue)
        return p, f"equal within {margin}", "not shown to be equal"
    test = stats.ttest_rel(ours, baseline)
    is_better = (claim["better"] == "higher") == (test.statistic > 0)
    return test.pvalue, "better" if is_better else "worse", "no significant difference"


def test_verdicts_are_those_of_scipy_and_of_holm_as_he_puts_it():
    judged = compare.judge()
    verdicts = dict.fromkeys(judged, "not tested")
    families = {}
    for claim in compare.DATA["claims"]:
        one = judged[claim["id"]]
        if len(one["baseline"]) >= 3:
            tests = families.setdefault(claim["family"], {})
            tests[claim["id"]] = scipy_test(claim, one)
            assert one["test"]["p"] == pytest.approx(tests[claim["id"]][0])
    assert {name: len(tests) for name, tests in families.items()} == {
        "papers": 25, "newer": 4, "controls": 4, "order": 5, "decoder": 10}
    for tests in families.values():
        rejects = True  # in the order of p, stop at the first above 0.05 / (m - k)
        for rank, number in enumerate(sorted(tests, key=tests.get)):
            p, if_small, if_not = tests[number]
            rejects = rejects and p < 0.05 / (len(tests) - rank)
            verdicts[number] = if_small if rejects else if_not
    assert {number: one["verdict"] for number, one in judged.items()} == verdicts


# ---- records, and what `show` and `board` print

@functools.cache
def everything(name):
    """Return all that the commands print about an experiment, or about the claims."""
    if name == "board":
        return "\n".join([*show.board_lines(), *(
            line for claim, one in zip(compare.DATA["claims"], compare.judge().values())
            for line in show.claim_lines(claim, one))])
    return show.show(name, tuple(show.PARTS))


def test_a_record_has_an_identity_a_command_and_a_commit():
    records = compare.read_records()
    keys = {(one["experiment"], one["label"], one["seed"]) for one in records}
    assert len(keys) == len(records) >= 600
    assert {name for name, _, _ in keys} <= compare.EXPERIMENTS.keys()
    for one in records:
        if "table" not in one:  # a job that prints its numbers has no test
            assert one["commit"] and (one["train"].startswith("python -m ") or one["test"])


@pytest.mark.parametrize("name", compare.EXPERIMENTS)
def test_an_experiment_is_one_sentence_a_table_of_nine_columns_and_tests_of_two_metrics(name):
    experiment, records = compare.EXPERIMENTS[name], compare.read_records(name)
    text = show.show(name)
    assert text.startswith(f"{name}: {len(records)} runs\n{experiment['finding']}\n")
    heads = re.findall("^run  .*", text, re.M)
    assert all(len(re.split("  +", head)) <= 9 for head in heads)
    assert len(heads) == bool(records) or "table" in records[0]
    assert text.endswith("More: --tables, --tests, --commands, --about\n")
    metrics = [metric for metric in experiment.get("tested", ()) if f"  {metric}  " in text]
    assert set(metrics) <= set(experiment.get("tested", ())[:2]) and "train.py" not in text
    for record in records:  # one command for all seeds
        assert "table" in record or everything(name).count(f"\n{record['label']} (") == 1


def test_experiments_are_listed_by_paper_on_one_screen(capsys):
    main(["show"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 21 and max(map(len, lines)) < 130
    main(["show", "--all"])
    every = capsys.readouterr().out
    assert all(f"\n  {name} " in every for name in compare.EXPERIMENTS)
    assert set(sum(compare.DATA["groups"].values(), [])) <= compare.EXPERIMENTS.keys()


def test_the_board_has_every_claim_and_prints_all_about_one(capsys):
    main(["board"])
    text = capsys.readouterr().out
    for claim in compare.DATA["claims"]:
        assert f"\n{claim['id']:4}{claim['claim']}  " in text and f"\n{claim['of']}\n" in text
    main(["board", "9"])
    one = " ".join(capsys.readouterr().out.split())
    assert "tables 4 to 7" in one and "-0.77 to -0.71" in one and "show encoders-recipe" in one


def test_the_board_says_which_seeds_are_compared_and_left_out(own_records, monkeypatch):
    keep_odd({"a": [1.0, 2.5, 3.0, 9.0], "b": [2.0, 4.0, 4.5]})
    monkeypatch.setitem(compare.EXPERIMENTS, "odd", ODD | {
        "jobs": {"a": "", "b": ""}, "seeds": [0, 1, 2], "flags": ""})
    claim = {"id": "1", "of": "A paper", "family": "papers", "claim": "a is lower", "paper": "",
             "experiment": "odd", "metric": "x", "ours": "a", "baseline": "b", "better": "lower",
             "measure": "x", "matched": "steps", "note": ""}
    monkeypatch.setitem(compare.DATA, "claims", [claim])
    one = compare.judge()["1"]
    text = " ".join(" ".join(show.claim_lines(claim, one)).split())
    assert "at equal steps, seeds 0, 1, 2; left out: 3 of a difference" in text
    assert re.split("  +", show.board_lines()[-1])[4] == "3"


def test_a_new_record_replaces_that_of_the_same_run(own_records, monkeypatch):
    keep_odd({"a": [1.0, 1.0]})
    keep_odd({"a": [2.0]})
    assert compare.by_label(compare.read_records("odd"), "x") == {"a": {0: 2.0, 1: 1.0}}
    monkeypatch.setitem(compare.EXPERIMENTS, "odd", ODD)
    assert "\nrun  seeds            X\na        2  1.50 ± 0.71\n" in show.show("odd")


@pytest.mark.parametrize("ours, better, answer", [
    ([1, 2.1, 3], "lower", "yes"), ([1, 2.1, 3], "higher", "no"), ([9, 9.1, 12.5], "lower", "no"),
    ([9, 10, 11], "lower", "no"), ([1, 2.1], "lower", None)])
def test_a_claim_is_compared_with_a_bag_over_common_seeds(ours, better, answer):
    scores = {"a": dict(enumerate(ours)), "bag": {0: 10.0, 1: 11.0, 2: 12.0},
              "odd": {0: 20.0, 1: 20.5, 2: 20.0}}
    text = compare.against_bag({"ours": "a", "better": better}, scores)
    assert text == (f"11.0 ± 1.0: {answer}" if answer else "-")
    other = compare.against_bag({"ours": "bag", "better": "lower", "bag": "odd"}, scores)
    assert other.startswith("20") and other.endswith("yes")


def test_a_row_with_seeds_of_its_own_has_all_of_them_and_seeds_that_are_asked_for_limit_it(
        monkeypatch):
    jobs = {"few": {"train": "", "seeds": [0]}, "all": "", "more": {"train": "", "seeds": [0, 2]}}
    monkeypatch.setitem(compare.EXPERIMENTS, "odd", {"jobs": jobs, "seeds": [0, 1], "flags": ""})
    assert [(job.label, job.seed) for job in run.jobs_of("odd")] == [
        ("few", 0), ("all", 0), ("more", 0), ("all", 1), ("more", 2)]
    assert [(job.label, job.seed) for job in run.jobs_of("odd", [2])] == [("all", 2), ("more", 2)]


def test_the_moving_picture_ends_with_the_last_frame_and_does_not_distort_it():
    frames = [(step, 90.0 - step, torch.randn(2, 30, 8)) for step in (0, 3, 6)]
    views = plots.in_one_view(frames, 4)
    root = ElementTree.fromstring(plots.moving_svg(["en", "de"], frames, views))
    moving = [(one, move) for one in root.iter() for move in one if move.tag.endswith("animate")]
    assert len({one for one, _ in moving}) == 4 + 2 + 3  # lines, languages and captions
    for one, move in moving:
        values = move.get("values").split(";")
        assert len(values) == 3 and values[-1] == one.get(move.get("attributeName"))
    for view, (_, _, z) in zip(views, frames):  # turned and scaled
        z = z[:, :4].double().flatten(0, 1)
        u, s, _ = torch.linalg.svd(z - z.mean(0), full_matrices=False)
        there, here = torch.pdist(u[:, :2] * s[:2]), torch.pdist(view.flatten(0, 1))
        assert torch.allclose(here / here.max(), there / there.max())


def test_plot_replaces_pictures_that_it_made_and_no_file_of_somebody_else(monkeypatch, refused):
    frames = [(step, 50.0, torch.randn(2, 30, 8)) for step in (0, 3)]
    monkeypatch.setattr(plots, "PICTURES", {
        "health": lambda: plots.lines({"a": ([0, 1], [2.0, 3.0])}, "step", "loss"),
        "translations": lambda: plots.moving_svg(["en", "de"], frames, plots.in_one_view(frames))})
    for name, file in (("health", "health.png"), ("translations", "translations.svg")):
        Path(file).write_text("mine")
        assert f"{file} exists already" in refused(main, f"plot {name}")
        assert Path(file).read_text() == "mine"
        Path(file).unlink()
        for _ in range(2):
            main(["plot", name])


# ---- the pages

NUMBER = re.compile(r"(?<![\w.])(?<!PyTorch )-?\d[\d,]*\.\d+")
EXEMPT = {"paper", "released code", "table or figure", "command"}  # columns


def own_numbers(section):
    """Return the decimals of a section that have two digits or more other than 0. Without tables
    that `readme` writes, columns that cite a paper, code, and sentences about a page of minimal/
    or of notebooks/, which anybody can run."""
    section = re.sub(r"<!-- table \S+ -->\n(\|.*\n?)*|```.*?```", "", section, flags=re.S)
    lines, heads = [], []
    for line in section.splitlines():
        cells = line.strip("|").split("|") if line.startswith("|") else []
        heads = (heads or [cell.strip() for cell in cells]) if cells else []
        lines.append(" ".join(cell for cell, head in zip(cells, heads) if head not in EXEMPT)
                     if cells else line)
    sentences = re.split(r"(?<=[.*])\s+(?=[A-Z*])", "\n".join(lines))
    text = " ".join(one for one in sentences if not re.search("minimal|notebooks/", one))
    return [one for one in NUMBER.findall(re.sub(r"`[^`]*`|\]\([^)]*\)", " ", text))
            if len(re.findall("[1-9]", one)) > 1]


def unprinted(section):
    """Return the numbers of a section that no command named in it prints, rounded or as they
    are."""
    named = {name for part in re.findall(r"`([^`]+)`", section) for name in part.split()}
    texts = [everything(name) for name in named & compare.EXPERIMENTS.keys()]
    texts += [everything("board")] if re.search(r"\bboard\b|\b[Cc]laims? ", section) else []
    known = [abs(float(one.replace(",", "")))
             for text in texts for one in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]
    return [one for one in own_numbers(section)
            if not any(abs(abs(float(one.replace(",", ""))) - number)
                       <= 0.5 * 10.0 ** -len(one.partition(".")[2]) + 1e-9 for number in known)]


def sections_of(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    if name == "README.md":
        text = text[text.index("\n## Results"):]
    if name == "results/LEDGER.md":  # its tables are published numbers
        text = re.sub(r"(?m)^\|.*\n?", "", text)
    return re.split(r"(?m)^(?=#|\*\*\d+\. )", text)


@pytest.mark.parametrize("name", ["README.md", "results/README.md", "results/LEDGER.md",
                                  "results/PAPERS.md", "results/REPRODUCE.md"])
def test_a_command_named_in_its_section_prints_every_number_of_a_page(name):
    assert {section[:60]: found for section in sections_of(name)
            if (found := unprinted(section))} == {}


def test_a_note_has_numbers_that_its_experiments_print():
    for claim in compare.DATA["claims"]:
        assert unprinted(f"{claim['note']} `{claim['experiment']}`, board") == [], claim["id"]


def test_a_number_that_no_command_prints_is_found():
    table = "| row | ours | paper |\n| --- | --- | --- |\n| a | 13.4 | 77.7 |\n"
    text = "9.28, 9.3, 7.77 and 0.5 % are missed (`show encoders-recipe`). It takes 3.21 times " \
        "as many ([notebook](../notebooks/a.ipynb)). A flag, `--lr 1.23`.\n" + table
    assert unprinted(text) == ["7.77"]
    assert unprinted(text.replace("show encoders-recipe", "show llm-jepa")) == [
        "9.28", "9.3", "7.77", "13.4"]


def test_pages_are_those_that_readme_writes_and_stay_small():
    """No table of results/README has more than eight rows and seven columns."""
    for page in ("README.md", "results/README.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert show.filled(text) == text
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert table.count("\n") <= 10 and table.partition("\n")[0].count("|") <= 8


def test_the_differences_from_the_papers_name_flags_of_their_objectives_and_commands():
    text = (ROOT / "results/PAPERS.md").read_text(encoding="utf-8")
    rows = 0
    for part in text.split("\n## ")[1:]:
        one, = re.findall(r"\(`([\w-]+)`\)", part.partition("\n")[0])
        for line in re.findall(r"(?m)^\| (?!paper|---).*", part):
            rows += 1
            for words in re.findall("`(--[^`]+)`", line.split("|")[3]):
                own = "" if "--objective" in words else f"--objective {one} "
                settings.parse((own + words).split())
            for name in re.findall("`show ([^`]+)`", line):
                assert compare.read_records(name), name
    assert rows == 20


def test_reproduce_names_claims_and_experiments():
    text = (ROOT / "results/REPRODUCE.md").read_text(encoding="utf-8")
    named = " ".join(re.findall(r"\| ([^|\n]+) \|$", text, re.M))
    claims = re.findall(r"\b\d+[a-z]?\b", " ".join(re.findall(r"claims? ([^;`|]*)", named)))
    assert len(claims) > 10 and set(claims) <= {claim["id"] for claim in compare.DATA["claims"]}
    experiments = set(re.findall(r"`([\w-]+)`", named))
    assert len(experiments) > 10 and experiments <= compare.EXPERIMENTS.keys()


def test_the_ledger_counts_its_rows():
    text = (ROOT / "results/LEDGER.md").read_text(encoding="utf-8")
    for line, part in zip(re.findall(r"^\| (?:an|the|another) .*", text, re.M)[1:],
                          text.split("\n## ")[1:], strict=True):
        for grade, cell in zip("ABC", line.split("|")[2:5], strict=True):
            found = re.findall(rf"^\| {grade} (\w+) ", part, re.M)
            assert [cell.count(mark) for mark in "▲○▼"] == [
                found.count(verdict) for verdict in ("better", "undecided", "worse")]


def parse_test(words):
    """Parse a command of evaluate.py or of python -m tasks, and look up its tasks."""
    program, *words = words[1:] if words[0] == "-m" else words
    if words[0] == "finetune":
        return finetune.parse_flags(words[1:])
    known = evaluate.TASKS if program == "evaluate.py" else tasks.make_tasks()
    flags = tasks.parse_flags(words) if program == "tasks" else evaluate.make_parser(
        "", "", known).parse_args(words)
    assert set(flags.tasks or ()) <= known.keys(), flags.tasks


@pytest.mark.parametrize("name", [name for name, one in compare.EXPERIMENTS.items()
                                  if one.get("jobs")])
def test_an_experiment_has_commands_that_the_programs_understand(name, monkeypatch):
    """And that name data, optimizer, learning rate and steps, so that no default changes them."""
    monkeypatch.chdir(ROOT)  # some name a file of gallery/
    for job in run.jobs_of(name, [7]):
        if not job.tests:
            assert importlib.util.find_spec(job.train.split()[2]) and "--seed 7" in job.train
            continue
        for test in job.tests.split(" && "):
            parse_test(re.sub("^\\w+: ", "", test).split()[1:])
        if "train.py" in job.train:
            words = re.sub(r"MATCH\[.*?\]", "5", job.train).split()[2:]
            objective_class, given = settings.parse(words)
            assert {"data", "optimizer", "lr", "steps"} <= given.keys()
            assert given["seed"] == 7 and given["out"] == str(job.folder)
            given = {key: given[key] for key in given if key not in ("init", "lora_rank", "causal")}
            settings.resolve_config(objective_class, given)


# ---- the runner


def call_here(command, files):
    """Do what run.call does, without a process."""
    words = command.split()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert not {"train.py": train, "evaluate.py": evaluate}[words[1]].main(words[2:])
    return printed.getvalue()


def test_the_runner_records_what_is_missing_and_matches_compute(own_records, pairs, tmp_path,
                                                                monkeypatch):
    monkeypatch.setattr(run, "OUT", tmp_path / "out")
    monkeypatch.setattr(run, "call", call_here)
    monkeypatch.setitem(compare.EXPERIMENTS, "mini", {
        "about": "", "seeds": [3], "flags": TINY,
        "jobs": {"ntp": "--objective ntp --steps 4",
                 "equal": {"train": "--objective llm-jepa --steps MATCH[ntp]",
                           "tests": ["a: evaluate.py RUN --tasks geometry"]}}})
    main(["mini"])
    first, second = compare.read_records("mini")
    assert (first["label"], first["seed"], first["steps"]) == ("ntp", 3, 4)
    assert first["last"]["loss"] > 0 and "validation/loss" in first["last"]
    assert flops.run_flops("out/mini-ntp-3", Mexma) == pytest.approx(
        second["steps"] * flops.step_flops(second["train"].split()[2:])[0], rel=0.2)
    assert 1 <= second["steps"] < 4 and f"--steps {second['steps']} " in second["train"]
    assert "a/geometry/rankme" in second["eval"] and "generate/exact" in first["eval"]
    monkeypatch.setattr(run, "call", None)
    main(["mini"])  # all is recorded, so nothing runs


def test_the_windows_that_init_brings_are_counted(pairs):
    flags = dict(data="pairs.tsv", steps=1, batch=8, eval_limit=20, precision="float32")
    shape = dict(width=16, layers=1, heads=2, ffn_dim=32, vocab=300, window=2)
    for more in (shape | dict(out="first"), dict(init="first", out="second")):
        list(train.start("contrastive", **flags | more).steps())
    words = [f"--{name.replace('_', '-')}={flags[name]}" for name in flags]
    found, _ = flops.step_flops(["--objective=contrastive", "--init=first", *words])
    assert flops.run_flops("second", Contrastive) == found


CHILD = """
import pathlib, time
try:
    pathlib.Path("ready").touch()  # the signal can come before this returns
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)  # a save
    pathlib.Path("saved").touch()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_handed_to_the_training_and_waits_for_its_save(number, tmp_path, monkeypatch):
    handlers = "import signal\nfrom base.common import interrupt\n" + \
        f"signal.signal({int(number)}, interrupt)\n"
    Path("child.py").write_text(handlers + CHILD)
    monkeypatch.setattr(run, "ROOT", tmp_path)

    def strike():
        while not Path("ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)  # the main thread waits for the child

    thread = threading.Thread(target=strike)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run.call("python child.py", None)
    thread.join()
    assert Path("saved").exists()


def test_two_programs_at_once_lose_no_record_and_no_result(own_records, monkeypatch):
    def slowly(function, *words):
        found = function(*words)
        time.sleep(0.05)  # between reading and writing
        return found

    for owner, name in ((compare, "read_records"), (runs, "read_results")):
        monkeypatch.setattr(owner, name, functools.partial(slowly, getattr(owner, name)))
    Path("tokenizer.json").touch()
    with ThreadPool(3) as pool:
        pool.map(lambda label: keep_odd({label: [1.0]}), "abc")
        pool.map(lambda name: runs.write_results("eval.json", {name: 1}, "rows", "model"), "abc")
    assert compare.by_label(compare.read_records("odd"), "x").keys() == {*"abc"}
    assert {*"abc"} < runs.read_results("eval.json").keys()


def test_a_job_that_prints_its_numbers_has_no_run(own_records, monkeypatch):
    monkeypatch.setitem(compare.EXPERIMENTS, "mini", {
        "about": "", "seeds": [3], "flags": "", "jobs": {"a": {"prints": "-m minimal.odd"}}})
    monkeypatch.setattr(run, "call", lambda command, files: json.dumps({"x": len(command)}))
    main(["mini"])
    record, = compare.read_records("mini")
    assert record["train"] == "python -m minimal.odd --seed 3" and record["commit"]
    assert record["eval"] == {"x": len(record["train"])} and "test" not in record


# ---- compute, plots


@pytest.mark.parametrize("words, error", [
    ("bord", "did you mean board?"), ("show collapsed", "did you mean collapse?"),
    ("plot helth", "invalid choice: 'helth'"),
    ("flops --match nowhere", "nowhere"),
    ("make-data . files", "there is no parallel/ntrex.tsv.xz: results/REPRODUCE.md lists"),
    ("gpu --minutes nan", "--minutes nan: it must be above 0"),
    ("gpu --into pairs.tsv", "--into pairs.tsv: this folder cannot be created"),
    ("encoders --again", "--files is not given: "), ("collapse --seeds x", "value: 'x'")])
def test_a_mistake_is_one_line_that_names_it(words, error, pairs, refused):
    assert error in refused(main, words)


def test_the_file_that_a_log_names_is_not_run_to_count_flops(pairs, capsys, refused):
    Path("own.py").write_text("from objectives import Mexma\nopen('executed', 'w')\n"
                              "class Own(Mexma):\n    name = 'own'\n")
    assert not train.main(f"--objective own.py {TINY} --steps 2 --out own".split())
    Path("executed").unlink()
    assert "--objective FILE" in refused(main, "flops --match own --objective mlm")
    assert not Path("executed").exists()
    capsys.readouterr()
    assert not main(f"flops --match own --objective own.py {TINY}".split())
    assert capsys.readouterr().out.startswith("2 steps have the compute of own")


def test_flops_of_next_token_prediction_are_those_of_its_sizes(pairs):
    """6 for each weight and token, 12 * width for each visible pair, and the vocabulary head. The
    last block is computed for the targets alone, except for its projection to q, k and v."""
    one = train.Run(*settings.parse(f"--objective ntp {TINY}".split()), writes=False)
    batch, = one.make_batch(0)
    packed = batch["packed"]
    weights = sum(p.numel() for p in one.model.blocks.parameters() if p.ndim == 2)
    last = one.model.blocks[-1]
    at_targets = sum(p.numel() for part in (last.attention.out, last.mlp)
                     for p in part.parameters() if p.ndim == 2)
    expected = 6 * len(packed.tokens) * (weights - at_targets) + 12 * 16 * packed.visible_pairs()
    expected += 6 * len(batch["targets"]) * (at_targets + one.model.embed.weight.numel())
    found = flops.batch_flops(one.objective, batch)
    assert found == pytest.approx(expected, rel=0.02)
    one.model.blocks[0].attention.window = 1  # and 12 * width less for each pair that it hides
    hidden = packed.visible_pairs() - packed.within(1).visible_pairs()
    assert flops.batch_flops(one.objective, batch) == found - 12 * 16 * hidden
