"""The rules of the house: what lies where, who reads whom, that the core is closed, and that what
the README says is so."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from test_style import CORE, OURS, ROOT, below, docstring_lines, name_of, parse

FILES = {*(f"{name}.py" for name in CORE), "README.md", "LOG.md", "LICENSE", "pyproject.toml",
         "requirements.txt", "requirements-dev.txt", ".gitignore"}
FOLDERS = {"kernels", "corpora", "tasks", "interop", "results", "tests", "notebooks", ".ci"}
FLOORS = {
    "kernels": 1, "corpora": 1, "model": 2, "data": 2, "objectives": 3, "evaluate": 3,
    "train": 4, "interop": 4, "tasks": 5, "results": 6,
}
CLOSED = (*CORE, "kernels", "corpora")
LOADERS = ("import_module", "__import__", "run_module", "run_path")
LIBRARIES = {"torch", "tokenizers", "numpy", "tqdm", "triton", *sys.stdlib_module_names}
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_nothing_else_lies_at_the_top():
    listed = subprocess.run(["git", "-c", "safe.directory=*", "ls-files"], cwd=ROOT, check=True,
                            capture_output=True, text=True).stdout.splitlines()
    files = {name for name in listed if (ROOT / name).exists()}
    assert {name.split("/")[0] for name in files} == FILES | FOLDERS


# ---- arrows: strictly downward, no circle, not by a string either


def module_of(file):
    return file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def last_name(node):
    return ast.unparse(node).split(".")[-1]


def loaded(tree):
    """(line, module) of everything that is loaded by a string; "?" if nobody can tell what."""
    for node in below(tree, ast.Call):
        if last_name(node.func) in LOADERS:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.JoinedStr):  # f"results.{name}": of that folder
                first = first.values[0]
            known = isinstance(first, ast.Constant)
            yield node.lineno, module_of(first.value).rstrip(".") if known else "?"


def imported(tree, file):
    """(line, module, names) of every import at any depth; a relative one is of the same folder."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name, ()) for name in node.names)
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                module = f"{file.split('/')[0]}.{module}".rstrip(".")
            yield node.lineno, module, tuple(name.name for name in node.names)


def reads(tree, file):
    """(line, module) of everything that a file imports or loads."""
    for line, module, names in imported(tree, file):
        folder = ROOT / module.replace(".", "/")
        inner = [name for name in names if (folder / f"{name}.py").exists()]
        yield from ((line, f"{module}.{name}") for name in inner)
        if len(inner) < len(names) or not names:
            yield line, module
    yield from loaded(tree)


def breaches(tree, file):
    own = module_of(file).split(".")[0]
    found = []
    for line, module in reads(tree, file):
        other = module.split(".")[0]
        upward = FLOORS.get(other, 0) >= FLOORS.get(own, 0) > 0 and other != own
        foreign = own in CLOSED and other not in FLOORS and other not in LIBRARIES
        if upward or foreign or other in ("?", "tests", "notebooks", ""):
            found.append(f"{file}:{line}: reads {module}")
    return found


def arrows_of(path):
    return breaches(parse(path), name_of(path))


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_a_file_reads_only_what_lies_below_it(path):
    assert arrows_of(path) == []


@pytest.mark.parametrize("text", [
    "import train", "def f():\n    from tasks import sets", "import safetensors", "import scipy",
    "importlib.import_module('results.run')", "__import__('train')", "import_module(name)",
    "runpy.run_path('train.py')", "import tests.test_data"])
def test_every_way_upward_is_found(text):
    assert breaches(ast.parse(text), "evaluate.py")
    assert not breaches(ast.parse("import data\nfrom corpora import toy"), "evaluate.py")


@pytest.mark.parametrize("folder", sorted(FOLDERS - {"tests", "notebooks", ".ci"}))
def test_the_files_of_a_folder_read_each_other_without_a_circle(folder):
    files = {module_of(name_of(path)): path for path in OURS if path.parent == ROOT / folder}
    left = {}
    for module, path in files.items():
        read = {other for _, other in reads(parse(path), name_of(path))}
        left[module] = read & set(files) - {module}
    while free := [module for module in left if not left[module] & set(left)]:
        for module in free:
            del left[module]
    assert sorted(left) == []


# ---- the closed core


# Read by Python before it runs a program: as if these were not installed.
BLOCK = """
import sys
for name in ("safetensors", "sklearn", "scipy", "matplotlib", "transformers", "huggingface_hub",
             "sentence_transformers", "pytest", "interop", "tasks", "results", "tests"):
    sys.modules[name] = None
"""
TINY = {"data": "pairs.tsv", "vocab": 300, "batch": 8, "eval_limit": 8, "width": 32, "layers": 1,
        "heads": 2, "ffn_dim": 64, "max_length": 48}
TRAIN_ALL = f"""
import train, objectives
from corpora import open_text
for name in objectives.OBJECTIVES:
    run = train.start(name, steps=5, out="out/" + name, **{TINY})
    records = [record for record in run.steps(every=1) if "loss" in record]
    assert len(records) == 5 and run.scores() and run.encode(["sun moon"]).shape[0] == 1, name
assert len(open_text("toy", count=20).rows("train")) == 20
print(*objectives.OBJECTIVES)
"""
SEVEN = {"mexma", "bepa", "hybrid", "llm-jepa", "mlm", "ntp", "contrastive"}
WORDS = "sun moon tree river stone bird fish cloud road house".split()


def write_pairs(path, count):
    """A parallel corpus: three words, and the same words backwards."""
    lines = ["en\tde"]
    for number in range(count):
        words = [WORDS[int(digit)] for digit in f"{number:03}"]
        lines.append(" ".join(words) + "\t" + " ".join(word[::-1] for word in words))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def python(arguments, folder, *paths):
    """What a program prints; it must end well."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=variables, text=True,
                          capture_output=True, timeout=400, encoding="utf-8")
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_core_alone_trains_resumes_and_evaluates(tmp_path):
    core = tmp_path / "core"
    block = tmp_path / "block"
    for name in ("kernels", "corpora"):
        shutil.copytree(ROOT / name, core / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in CORE:
        shutil.copy(ROOT / f"{name}.py", core)
    block.mkdir()
    (block / "sitecustomize.py").write_text(BLOCK, encoding="utf-8")
    write_pairs(core / "pairs.tsv", 300)
    assert set(python(["-c", TRAIN_ALL], core, block).split()) == SEVEN
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    words = ["train.py", "--objective", "mexma", "--out", "out/mexma", "--steps", "7", *flags]
    python(words, core, block)  # resumes
    log = (core / "out/mexma/log.jsonl").read_text(encoding="utf-8")
    assert '"step": 7' in log and log.count('"step": 5, "loss"') == 1
    assert "retrieval/xsim" in python(["evaluate.py", "out/mexma", "--json"], core, block)
    blocked = "try:\n    import tasks\nexcept ModuleNotFoundError:\n    print('closed')"
    assert python(["-c", blocked], core, block) == "closed\n"


def test_the_compiler_is_not_imported_unless_it_is_asked_for(tmp_path):
    """It takes as long as PyTorch, and PyTorch imports it where "meta" draws a normal number."""
    code = f"""import sys, torch, model, train
small = model.Model(model.ModelConfig(vocab=9, width=8, layers=1, heads=1))
model.save(small, r"{tmp_path}/model.pt")
model.load(r"{tmp_path}/model.pt")
print('torch._dynamo' in sys.modules)"""
    assert python(["-c", code], ROOT) == "False\n"


def test_the_loop_names_no_objective():
    import objectives
    tree = parse(ROOT / "train.py")
    docstrings = docstring_lines(tree)
    lines = (ROOT / "train.py").read_text(encoding="utf-8").splitlines()
    code = [line.split("#")[0] for number, line in enumerate(lines, 1) if number not in docstrings]
    text = "\n".join(code).replace('default="mexma"', "").replace("[mexma]", "")
    names = [*objectives.OBJECTIVES, *(kind.__name__ for kind in objectives.OBJECTIVES.values())]
    assert [name for name in names if re.search(rf"\b{name}\b", text)] == []


# ---- the README


def test_the_readme_is_short():
    lines = README.splitlines()
    assert len(lines) <= 150
    assert [number for number, line in enumerate(lines, 1) if len(line) > 100] == []


def commands():
    """The commands of the README's sh blocks that run a program of ours."""
    for block in re.findall(r"```sh\n(.*?)```", README, re.S):
        for line in block.replace("\\\n", " ").splitlines():
            for command in line.split("#")[0].split("&&"):
                if re.match(r"\s*python (?!-m pytest)", command):
                    yield command.strip()


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder in which the README's files exist, small."""
    folder = tmp_path_factory.mktemp("readme")
    for name, count in (("pairs.tsv", 300), ("test.tsv", 40)):
        write_pairs(folder / name, count)
    lines = (folder / "pairs.tsv").read_text(encoding="utf-8").splitlines()[1:41]
    text = "".join(line.split("\t")[0] + "\n" for line in lines)
    (folder / "lines.txt").write_text(text, encoding="utf-8")
    return folder


SHORTER = {"train.py": ["--steps", "3", "--eval-limit", "20", "--batch", "8"],
           "evaluate.py": ["--limit", "40"], "tasks": ["--limit", "40"]}


def test_the_readme_has_commands_to_test():
    assert len(list(commands())) >= 6


def test_the_readme_names_every_objective_and_every_part_of_the_house():
    parts = [*(f"{name}.py" for name in CORE), *(f"{name}/" for name in FOLDERS - {".ci"})]
    assert [name for name in (*SEVEN, *parts) if name not in README] == []


@pytest.mark.parametrize("command", list(commands()))
def test_every_command_of_the_readme_runs(command, desk):
    """Shortened to a few steps, in the README's order: later commands find the runs of earlier."""
    words = shlex.split(command)[1:]
    program = words[1] if words[0] == "-m" else words[0]
    if "--help" not in words:
        words += SHORTER.get(program, [])
    if words[1:3] == ["interop", "import"]:  # a tiny one in place of the hub's
        words[3] = str(ROOT / "tests/golden/xlm-roberta")
    if words[:2] == ["-m", "corpora.download"]:
        words = words[:2]  # lists what could be fetched
    if program.endswith(".py"):
        words[0] = str(ROOT / program)
    python(words, desk, ROOT)


def test_the_readmes_own_objective_trains(desk):
    """The example as it stands, few steps of it; then once more from the table of objectives."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    example, = [block for block in blocks if re.search("^class ", block, re.M)]
    more = f"""
import objectives, train
name, = set(objectives.OBJECTIVES) - {SEVEN}
run = train.start(name, steps=3, out=None, **{TINY})
assert sum("loss" in record for record in run.steps(every=1)) == 3
"""
    text = re.sub(r"steps=\d+", "steps=3", example) + more
    (desk / "example.py").write_text(text, encoding="utf-8")
    python(["example.py"], desk, ROOT)
