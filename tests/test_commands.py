"""With -m commands: every command of the pages starts, in this process, at a tiny size."""

import json
import re
import runpy
import shlex
import sqlite3
import sys
from pathlib import Path

import pytest
from cases import make_models
from test_house import ROOT, WORDS, write_pairs

import train
from tasks import probes, sets
from tasks.finetune import XNLI

pytestmark = pytest.mark.commands
PAGES = ("README.md", "FAQ.md", "results/REPRODUCE.md", "tasks/README.md", "interop/README.md",
         "gallery/README.md")
PARTS = re.compile(r"^#+ [^\n]*$|^```.*?^```$|`[^`]+`|^    [^\n]*$", re.S | re.M)
COMMAND = re.compile(r"(python|torchrun|T|R|train\.py|evaluate\.py|--objective) .*")
ABBREVIATIONS = {"T": "python -m tasks RUN", "R": "python -m results"}
# What other tests start, and what a page only names.
ELSEWHERE = re.compile(r"python -m (pytest|minimal\.\w+)\b.*|python -m tasks( RUN| finetune)?|"
                       r"python -m results|python train\.py|evaluate\.py --data|--objective \.\.\.")
SECTIONS = {"MEXMA": "mexma", "BERT-JEPA": "bepa", "Predict-and-Reconstruct": "hybrid",
            "LLM-JEPA": "llm-jepa"}
SHAPE = dict(vocab=300, width=16, layers=1, heads=2, ffn_dim=32)
LIMITS = dict(steps=1, batch=4, eval_limit=20)
OF_SETS = ("sts", "pairs", "senteval", "pairs,sts", "sts,pairs", "hybrid-probes")  # no --limit
SMALLER = {"evaluate.py": ["--limit=40"], "tasks": ["--limit=40"],
           "finetune": ["--epochs=1", "--limit=8", "--eval-limit=8"]}


def commands():
    """Yield (page, objective of the section, command, is it in a block?)."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
        objective = ""
        for part in PARTS.findall(text):
            if part.startswith("#"):
                objective = SECTIONS.get(part.strip("# "), "")
            in_block = part.startswith(("```sh\n", "    "))
            if not in_block:
                part = "" if part.startswith("```") else part.strip("`").replace("\n", " ")
            for line in part.splitlines():
                for command in map(str.strip, line.split(" #")[0].split("&&")):
                    if COMMAND.fullmatch(command) and not ELSEWHERE.fullmatch(command):
                        yield page, objective, command, in_block


# ---- small files of every kind that a page names


def sentence(number):
    return " ".join(WORDS[int(digit)] for digit in f"{number:03}")


def write_json_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def write_sets(data):
    """Write small data sets with labels, and questions, in all languages of the tasks."""
    classes_of = sets.CLASSES | {f"xnli-{lang}": 3 for lang in XNLI if lang != "en"}
    for name, classes in classes_of.items():
        for split in ("train", "valid", "test"):
            write_json_lines(data / f"{name}_{split}.jsonl", [
                {"text": sentence(row), "text2": sentence(row + 1), "label": row % (classes or 6)}
                for row in range(60)])
    for path, more in (("squad_train", {}), ("squad_test", {}),
                       ("mlqa_test", {"lang_context": "de", "lang_question": "en"})):
        write_json_lines(data / f"{path}.jsonl", [
            {"context": sentence(row), "question": sentence(row + 1), "answers": [
                {"text": sentence(row).split()[0], "answer_start": 0}], **more}
            for row in range(20)])


def write_answers(data):
    """Write questions with answers as each task on a decoder's answers reads them."""
    ends = {"synth": ".*", "turk": ".*", "nq_open": "stone", "gsm8k": "so\n#### 7",
            "rotten_tomatoes": "Good", "spider": "SELECT name FROM road", "hellaswag": "A"}
    for name, answer in ends.items():
        before = "For db_id:[house] " if name == "spider" else ""
        after = "\nA) sun\nB) moon\nC) tree\nD) river" if name == "hellaswag" else ""
        for split, count in (("train", 300), ("test", 20)):
            write_json_lines(data / f"{name}_{split}.jsonl", [
                {"user": f"{before}{sentence(row)}{after}", "assistant": answer}
                for row in range(count)])
    (data / "database/house").mkdir(parents=True)
    with sqlite3.connect(data / "database/house/house.sqlite") as database:
        database.executescript("CREATE TABLE road (name TEXT); INSERT INTO road VALUES ('sun');")
    database.close()


def write_translations(folder, names):
    """Write parallel files: pairs, FLORES with altered sentences, BUCC, paraphrases. names: the
    columns of eval.tsv."""
    for name in ("pairs.tsv", "data/bucc_de-en.tsv"):
        write_pairs(folder / name, 300)
    lines = [sentence(number) for number in range(300)]
    for name in ("text.txt", "lines.txt", "TEXT.txt"):
        (folder / name).write_text("\n".join([*lines, ""]), encoding="utf-8")
    (folder / "OTHER.txt").write_text("\n".join(sentence(row) for row in range(500, 540)))
    for split, first in (("train", 0), ("eval", 300)):
        write_json_lines(folder / f"{split}-mined.jsonl", [
            {"anchor": sentence(row), "positive": sentence(row)[::-1],
             "negative": sentence(row + 1)} for row in range(first, first + 250)])
    rows = ["\t".join(names), *(f"{line}\t{line[::-1]}" for line in lines[:40])]
    (folder / "eval.tsv").write_text("\n".join(rows))
    for name, header in (("PARAPHRASES", "a\tb\tc"), ("mine.tsv", "query\tpassage\thard_negative")):
        rows = [header, *(f"{line}\t{line[::-1]}\t{line.upper()}" for line in lines)]
        (folder / name).write_text("\n".join(rows))
    flores = folder / "data/flores"
    flores.mkdir()
    for code in ("eng_Latn", "deu_Latn", "fra_Latn"):
        (flores / f"{code}.devtest").write_text("\n".join([*lines[:20], ""]))
    (folder / "data/flores81.txt").write_text("eng_Latn,deu_Latn")
    altered = {f"{line} sun": {"src": line, "errtype": "entity"} for line in lines[:20]}
    (folder / "data/flores_altered.txt").write_text("\n".join([*altered, ""]))
    (folder / "data/flores_altered.json").write_text(json.dumps(altered))


@pytest.fixture(scope="session")
def desks(tmp_path_factory):
    """Return a function of a page: a folder with small versions of the files that it names."""
    made = {}

    def desk(page):
        if page not in made:
            made[page] = folder = tmp_path_factory.mktemp("page")
            (folder / "data").mkdir()
            # README evaluates a run of pairs.tsv, and FAQ one of mined rows.
            write_translations(folder, ("anchor", "positive") if page == "FAQ.md" else ("en", "de"))
            write_sets(folder / "data")
            write_answers(folder / "data")
            (folder / "gallery").symlink_to(ROOT / "gallery")
            own = re.findall("```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.S)
            (folder / "my_idea.py").write_text("".join(text for text in own if "class " in text))
        return made[page]

    return desk


def files_of(objective):
    """Return what RUN, FILE and so on stand for; RUN is trained where it is missing."""
    file = {"hybrid": "text.txt", "mlm": "text.txt", "llm-jepa": "data/synth_train.jsonl",
            "ntp": "data/synth_train.jsonl"}.get(objective, "pairs.tsv")
    return {"RUN": f"run-{objective or 'mexma'}", "FILE": file, "FOLDER": ".", "PUBLIC": ".",
            "NAME": "collapse", "OUT": "made"}


def train_tiny(objective, folder):
    if not Path(folder).exists():
        data = files_of(objective)["FILE"]
        run = train.start(objective, out=folder, data=data, **SHAPE, **LIMITS)
        list(run.steps())


# ---- the commands


def shortened(command, objective, in_block, number):
    """Return (program, its words) of a command, with names of files that exist, at a tiny size."""
    command = re.sub(r"\$\(cat (\S+)\)", lambda found: Path(found[1]).read_text(), command)
    words = shlex.split(re.sub(r"^[TR]\b", lambda found: ABBREVIATIONS[found[0]], command))
    if words[0] == "torchrun":  # in one process, which has nothing to shard
        words = [word for word in words[3:] if word != "--shard"] + ["--out", f"out/{number}"]
    if words[0].startswith("--"):
        words.insert(0, "train.py")
    words = words[1:] if words[0] == "python" else words
    program, *words = words[1:] if words[0] == "-m" else words
    if "--objective" in words:
        objective = words[words.index("--objective") + 1]
    known = files_of(objective)
    words = [known.get(word, word) for word in words]
    for name in (known["RUN"], "out/mexma"):
        if name in words and program != "train.py" or "--init" in words and name in words:
            train_tiny(objective or "mexma", name)
    if "--init out/tuned" in command:  # FAQ goes on with a run of README
        train_tiny("contrastive", "out/tuned")
    if "--help" in words or words[:1] == ["batch"]:
        return program, words
    if program == "train.py":
        sizes = LIMITS if "--init" in words else LIMITS | SHAPE
        words += [f"--{key.replace('_', '-')}={value}" for key, value in sizes.items()]
        if not in_block:  # what REPRODUCE and FAQ let a reader add
            words += [] if "--out" in words else ["--out", f"out/{number}"]
            file = "mine.tsv" if "query,passage,hard_negative" in words else known["FILE"]
            words += [] if "--data" in words else ["--data", file]
    if program == "results" and words[0] not in ("show", "board", "plot", "flops", "gpu"):
        words += ["--help"]
    if program == "results" and words[0] == "gpu":
        words += ["--part", "machine"]
    if "senteval" in words:  # cross-validation of the others takes minutes
        words += ["--sets=sst2"]
    program_of_limits = "finetune" if words[:1] == ["finetune"] else program
    of_sets = "tasks" in program and any(name in OF_SETS for name in words)
    return program, words + ([] if of_sets else SMALLER.get(program_of_limits, []))


def tiny_model(name, folder):
    """Write a tiny model in the place of one of the hub."""
    if "llama" in name.lower() or "SmolLM2" in name:
        return make_models.save(folder, "llama", make_models.llama3(), make_models.LLAMA_ROLES,
                                head=True)
    return make_models.save(folder, "xlm-roberta", make_models.unigram(), make_models.XLMR_ROLES,
                            head=True)


@pytest.mark.parametrize("number, command", [*enumerate(commands())],
                         ids=[f"{page}: {command}" for page, _, command, _ in commands()])
def test_every_command_of_the_pages_starts(number, command, desks, few_rows, monkeypatch):
    """In a block, later commands use the runs of earlier ones."""
    page, objective, text, in_block = command
    monkeypatch.chdir(desks(page))
    monkeypatch.setattr(probes, "EPOCHS", dict.fromkeys(probes.EPOCHS, (1, 32)))
    program, words = shortened(text, objective, in_block, number)
    if program == "interop" and words[0] == "import":
        words[1] = str(tiny_model(words[1], Path(f"hub-{number}")))
    monkeypatch.setattr(sys, "argv", [program, *words])
    with pytest.raises(SystemExit) as end:
        if program.endswith(".py"):
            runpy.run_path(str(ROOT / program), run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__")
    assert end.value.code == 0


def test_every_page_has_commands():
    assert {page for page, *_ in commands()} == {*PAGES}
