"""The rules of the repository: which file imports which, the closed core, the README's commands."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ("common", "model", "data", "objectives", "evaluate", "train")
# A file imports only from lower layers; files of one folder also from each other.
LAYERS = {"common": 0, "kernels": 1, "corpora": 1, "data": 2, "model": 3, "objectives": 4,
          "evaluate": 4, "train": 5, "interop": 6, "tasks": 6, "gallery": 6, "results": 7}
CLOSED = (*CORE, "kernels", "corpora")
NEVER_IMPORTED = ("?", "", "tests", "notebooks", "gallery", "minimal")
LOADERS = ("import_module", "__import__", "run_module", "run_path")
LIBRARIES = {"torch", "tokenizers", "numpy", "tqdm", "triton", *sys.stdlib_module_names}
SEVEN = {"mexma", "bepa", "hybrid", "llm-jepa", "mlm", "ntp", "contrastive"}


def name_of(path):
    return path.relative_to(ROOT).as_posix()


FOLDERS = [name for name in LAYERS if name not in CORE]
PRODUCT = [ROOT / f"{name}.py" for name in CORE]
for name in FOLDERS:
    PRODUCT += sorted((ROOT / name).rglob("*.py"))


# ---- imports: strictly downward, no circle, also none by a string


def module_of(file):
    return file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def loaded(tree):
    """Yield the modules that a file loads by a string; "?" if that string is not a constant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in LOADERS:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.JoinedStr):  # f"results.{name}": a file in results/
                first = first.values[0]
            known = isinstance(first, ast.Constant)
            yield module_of(first.value).rstrip(".") if known else "?"


def imported(tree, file):
    """Yield the modules of every import, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                module = f"{file.split('/')[0]}.{module}".rstrip(".")
            folder = ROOT / module.replace(".", "/")
            for name in node.names:
                is_file = (folder / f"{name.name}.py").exists()
                yield f"{module}.{name.name}" if is_file else module


def reads(tree, file):
    return {*imported(tree, file), *loaded(tree)}


def breaches(tree, file):
    """Return the modules that a file imports although they are not in a lower layer."""
    own = module_of(file).split(".")[0]
    found = []
    for module in reads(tree, file):
        other = module.split(".")[0]
        upward = LAYERS.get(other, -1) >= LAYERS[own] and other != own
        foreign = own in CLOSED and other not in LAYERS and other not in LIBRARIES
        if upward or foreign or other in NEVER_IMPORTED:
            found.append(module)
    return found


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_a_file_imports_only_from_lower_layers(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert breaches(tree, name_of(path)) == []


@pytest.mark.parametrize("path", sorted((ROOT / "minimal").glob("*.py")), ids=name_of)
def test_a_page_of_minimal_imports_nothing_of_ours_but_the_toy_language(path):
    modules = reads(ast.parse(path.read_text(encoding="utf-8")), name_of(path))
    ours = {module for module in modules if module.split(".")[0] in LAYERS}
    assert all(module.startswith("corpora.toy") for module in ours)


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_files_of_a_folder_import_each_other_without_a_circle(folder):
    left = {}
    for path in PRODUCT:
        if path.parent == ROOT / folder:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            left[module_of(name_of(path))] = reads(tree, name_of(path))
    while free := [name for name in left if not left[name] & set(left) - {name}]:
        for name in free:
            del left[name]
    assert sorted(left) == []


# ---- the closed core


# Python runs this before a program, as if these were not installed.
BLOCK = """
import sys
for name in ("safetensors", "sklearn", "scipy", "matplotlib", "transformers", "huggingface_hub",
             "sentence_transformers", "triton", "pytest", "interop", "tasks", "results", "tests"):
    sys.modules[name] = None
"""
TINY = {"data": "pairs.tsv", "vocab": 300, "batch": 8, "eval_limit": 8, "width": 32, "layers": 1,
        "heads": 2, "ffn_dim": 64, "max_length": 48}
TRAIN_ALL = f"""
import train, objectives
for name in objectives.OBJECTIVES:
    run = train.start(name, steps=5, out="out/" + name, **{TINY})
    records = [record for record in run.steps(every=1) if "loss" in record]
    assert len(records) == 5 and run.scores() and run.encode(["sun moon"]).shape[0] == 1, name
print(*objectives.OBJECTIVES)
"""
WORDS = "sun moon tree river stone bird fish cloud road house".split()


def write_pairs(path, count):
    """Write a parallel corpus: three words, and the same words backwards."""
    lines = ["en\tde"]
    for number in range(count):
        words = [WORDS[int(digit)] for digit in f"{number:03}"]
        lines.append(" ".join(words) + "\t" + " ".join(word[::-1] for word in words))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def python(arguments, folder, *paths):
    """Run a program, which must succeed, and return what it prints."""
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
    assert SEVEN <= set(python(["-c", TRAIN_ALL], core, block).split())
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    words = ["train.py", "--objective", "mexma", "--out", "out/mexma", "--steps", "7", *flags]
    python(words, core, block)  # resumes
    log = (core / "out/mexma/log.jsonl").read_text(encoding="utf-8")
    assert '"step": 7' in log and log.count('"step": 5, "loss"') == 1
    assert "retrieval/xsim" in python(["evaluate.py", "out/mexma", "--json"], core, block)
    blocked = "try:\n    import tasks\nexcept ModuleNotFoundError:\n    print('closed')"
    assert python(["-c", blocked], core, block) == "closed\n"


# ---- the README


def commands():
    """Yield the commands in the README's sh blocks that run our programs."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for block in re.findall(r"```sh\n(.*?)```", text, re.S):
        for line in block.replace("\\\n", " ").splitlines():
            for command in line.split("#")[0].split("&&"):
                if re.match(r"\s*python (?!-m (pytest|minimal))", command):  # test_minimal.py
                    yield command.strip()


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """Return a folder with small versions of the files that the README names."""
    folder = tmp_path_factory.mktemp("readme")
    for name, count in (("pairs.tsv", 300), ("test.tsv", 40)):
        write_pairs(folder / name, count)
    (folder / "lines.txt").write_text("sun moon tree\nroad house\n" * 20, encoding="utf-8")
    return folder


SHORTER = {"train.py": ["--steps", "3", "--eval-limit", "20", "--batch", "8"],
           "evaluate.py": ["--limit", "40"], "tasks": ["--limit", "40"]}


@pytest.mark.parametrize("command", list(commands()))
def test_every_command_of_the_readme_runs(command, desk):
    """Each is shortened to a few steps. Later commands use the runs of earlier ones."""
    words = shlex.split(command)[1:]
    program = words[1] if words[0] == "-m" else words[0]
    if "--help" not in words:
        words += SHORTER.get(program, [])
    if words[1:3] == ["interop", "import"]:  # a tiny model instead of the hub's
        from cases import make_models  # it needs transformers
        words[3] = str(make_models.save(desk / "xlmr", "xlm-roberta", make_models.unigram(),
                                        make_models.XLMR_ROLES, head=True))
    if program.endswith(".py"):
        words[0] = str(ROOT / program)
    python(words, desk, ROOT)


def test_the_readmes_own_objective_trains(desk):
    """The example works from a file, as the README describes."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    example, = [block for block in blocks if re.search("^class ", block, re.M)]
    (desk / "my_idea.py").write_text(example, encoding="utf-8")
    words = [str(ROOT / "train.py"), "--objective", "my_idea.py", *SHORTER["train.py"]]
    assert "tokens in" in python([*words, "--data", "pairs.tsv"], desk, ROOT)
