"""The rules of the house: import arrows, encodings, and that what the README says is so."""

import ast
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARROWS = {
    "grammar": set(), "metrics": set(),
    "data": {"grammar"}, "download": {"data"}, "model": {"data", "kernels"}, "scores": {"data", "model"},
    "tasks": {"data", "download"}, "probes": {"data", "metrics"},
    "objectives": {"data", "model"},
    "evaluate": {"data", "download", "grammar", "metrics", "model", "probes", "scores", "tasks"},
    "plots": {"data"}, "compare": {"data", "evaluate", "metrics", "plots"},
    "families": {"data", "model"}, "checkpoints": {"data", "evaluate", "families", "model"},
    "encoder": {"checkpoints", "data", "evaluate", "metrics"},
    "train": {"checkpoints", "data", "evaluate", "kernels", "metrics", "model", "objectives"},
    "finetune": {"data", "download", "evaluate", "metrics", "model", "scores", "tasks"},
}
KERNELS = ("__init__", "schedule", "attention", "build")                  # bench.py is a program on top of everything


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name.split(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0] if not node.level else "kernels"


@pytest.mark.parametrize("name", ARROWS)
def test_imports_run_one_way(name):
    tree = ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))
    body = [node for node in tree.body if not (isinstance(node, ast.FunctionDef) and node.name in ("inspect", "fetch"))]       # the documented exceptions
    found = {module for node in body for module in imports(node)} & {*ARROWS, "kernels"}
    assert found <= ARROWS[name], f"{name}.py imports {found - ARROWS[name]}"


def test_the_other_commands_of_evaluate_are_files_above_it_that_it_looks_up_only_when_called():
    import evaluate
    assert all("evaluate" in ARROWS[name] for name in evaluate.COMMANDS.values())


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_import_nothing_of_ours_and_only_two_files_import_triton(name):
    found = set(imports(ast.parse((ROOT / "kernels" / f"{name}.py").read_text(encoding="utf-8"))))
    assert not found & set(ARROWS) and ("triton" in found) == (name in ("attention", "build"))


def test_the_loop_names_no_objective():
    import objectives
    text = (ROOT / "train.py").read_text(encoding="utf-8").split('"""', 2)[2]
    code = "\n".join(line.split("#")[0] for line in text.splitlines()).replace('default="mexma"', "").replace("[mexma]", "")
    assert [kind.name for kind in objectives.OBJECTIVES if re.search(rf"\b{kind.name}\b", code)] == []


def test_every_text_file_is_opened_with_an_encoding():
    bytes_only = ("tarfile.open", "packed.open", "opener.open")                # archives and answers of a server
    ours = [path for part in ("*.py", "results/*.py", "kernels/*.py") for path in ROOT.glob(part)]      # a virtual environment may lie in the folder
    for path in ours:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name in ("read_text", "write_text", "open") and ast.unparse(node.func) not in bytes_only:
                    modes = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
                    if not any("b" in mode and len(mode) < 4 for mode in modes):
                        assert any(keyword.arg == "encoding" for keyword in node.keywords), f"{path.name}:{node.lineno}"


def commands():
    """The lines of README's sh blocks that run a program of ours."""
    for block in re.findall(r"```sh\n(.*?)```", README, re.S):
        for line in block.splitlines():
            if line.startswith("python ") and "pytest" not in line and not line.startswith("python results/"):
                yield line.split("#")[0].strip()


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder in which the README's files exist, small."""
    folder = tmp_path_factory.mktemp("readme")
    words = "sun moon tree river stone bird fish cloud road house".split()
    rows = [(" ".join(words[i // 10 ** k % 10] for k in range(3)), " ".join(words[i // 10 ** k % 10][::-1] for k in range(3))) for i in range(300)]
    (folder / "pairs.tsv").write_text("en\tde\n" + "".join(f"{a}\t{b}\n" for a, b in rows), encoding="utf-8")
    (folder / "test.tsv").write_text("en\tde\n" + "".join(f"{a}\t{b}\n" for a, b in rows[:40]), encoding="utf-8")
    (folder / "lines.txt").write_text("".join(f"{a}\n" for a, _ in rows[:40]), encoding="utf-8")
    (folder / "data").mkdir()
    for name in ("mrpc_train", "mrpc_val"):
        (folder / "data" / f"{name}.tsv").write_text("label\tsentence1\tsentence2\n" + "".join(f"{i % 2}\t{a}\t{b}\n" for i, (a, b) in enumerate(rows[:60])),
                                                    encoding="utf-8")
    return folder


def test_the_readme_has_commands_to_test():
    assert len(list(commands())) >= 6


@pytest.mark.parametrize("line", list(commands()))
def test_every_command_of_the_readme_runs(line, desk):
    """Shortened to a few steps; the order is the README's, so later commands find the runs of earlier ones."""
    words = shlex.split(line)
    words = [sys.executable, str(ROOT / words[1]), *words[2:]]
    if line.startswith("python train.py") and "--help" not in words:
        words += ["--steps", "3", "--eval-limit", "20", "--batch", "8"]
    if line.startswith("python evaluate.py out/"):
        words += ["--limit", "40"]
    run = subprocess.run(words, cwd=desk, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]


def test_the_tables_of_the_readme_are_those_of_the_results(tmp_path):
    """By the script that writes them; and it finds a number that somebody changed by hand."""
    check = lambda root: subprocess.run([sys.executable, str(root / "results" / "readme.py"), "--check"], capture_output=True, text=True)
    done = check(ROOT)
    assert done.returncode == 0, done.stderr
    shutil.copytree(ROOT / "results", tmp_path / "results")
    table = re.search(r"<!-- from (results/\S+\.md).*?-->\n(.*?)<!-- end -->", README, re.S)[2]
    row = table.splitlines()[-1]
    (tmp_path / "README.md").write_text(README.replace(row, row.replace("1", "2").replace("3", "4")), encoding="utf-8")
    done = check(tmp_path)
    assert done.returncode == 1 and "does not say what is recorded: <!-- from results/" in done.stderr
    assert README.count("<!-- from results/") >= 5


def test_the_readme_names_every_objective_and_every_file():
    for name in [f"`{kind}`" for kind in ("mexma", "bepa", "hybrid", "llm-jepa", "mlm", "ntp", "contrastive")] + [f"`{name}.py`" for name in ARROWS]:
        assert name in README


def test_the_readmes_objective_trains_with_its_flags_as_soon_as_it_stands_in_the_tuple(desk, tmp_path):
    example = re.search(r"```python\n(class \w+\(Objective\):.*?)```", README, re.S)[1]
    assert len(example.splitlines()) <= 25
    (tmp_path / "kernels").mkdir()
    for path in [*ROOT.glob("*.py"), ROOT / "grammar.txt", *ROOT.glob("kernels/*.py")]:
        (tmp_path / path.relative_to(ROOT)).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    text = (tmp_path / "objectives.py").read_text(encoding="utf-8")
    assert text.count("OBJECTIVES = (") == 1
    (tmp_path / "objectives.py").write_text(text.replace("OBJECTIVES = (", f"{example}\n\nOBJECTIVES = (BarlowTwins, "), encoding="utf-8")
    words = [sys.executable, "train.py", "--objective", "barlow-twins", "--data", str(desk / "pairs.tsv"), "--vocab", "300", "--batch", "8",
             "--eval-limit", "20"]
    helped = subprocess.run([*words, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "--off-diagonal" in helped.stdout and "weight of the correlations" in helped.stdout
    run = subprocess.run([*words, "--steps", "3", "--off-diagonal", "0.01", "--log-every", "1"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    log = (tmp_path / "out" / "barlow-twins" / "log.jsonl").read_text(encoding="utf-8")
    assert '"off_diagonal": 0.01' in log and log.count('"align"') == 3
