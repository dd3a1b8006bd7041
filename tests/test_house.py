"""The rules of the repository: which file imports which, and the closed core."""

import ast
import graphlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FIVE = ("model", "objectives", "data", "train", "evaluate")  # the files to read
ROOMS = ("base", "harness", "kernels", "corpora")  # what they need
# A file imports only from lower layers; files of one folder also from each other.
LAYERS = {"base": 0, "corpora": 1, "kernels": 1, "data": 2, "model": 2, "objectives": 3,
          "harness": 4, "evaluate": 5, "train": 6, "look": 7, "tasks": 7, "interop": 7,
          "gallery": 7, "minimal": 7, "results": 8}
CLOSED = (*FIVE, *ROOMS)
NEVER_IMPORTED = ("?", "", "tests", "notebooks", "gallery")
LOADERS = ("import_module", "__import__", "run_module", "run_path")
LIBRARIES = {"torch", "tokenizers", "numpy", "tqdm", "triton", *sys.stdlib_module_names}
SEVEN = {"mexma", "bepa", "hybrid", "llm-jepa", "mlm", "ntp", "contrastive"}


def name_of(path):
    return path.relative_to(ROOT).as_posix()


PRODUCT = [ROOT / f"{name}.py" for name in FIVE]
for name in LAYERS:
    PRODUCT += sorted((ROOT / name).rglob("*.py"))


# ---- imports: strictly downward, no circle, also none by a string


def module_of(path):
    return name_of(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def loaded(tree):
    """Yield the modules that a file loads by a string; "?" if that string is not a constant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in LOADERS:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.JoinedStr):  # f"results.{name}": a file in results/
                first = first.values[0]
            yield first.value.rstrip(".") if isinstance(first, ast.Constant) else "?"


def imported(tree, folder):
    """Yield the modules of every import, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                module = f"{folder}.{module}".rstrip(".")
            for name in node.names:
                is_file = (ROOT / module.replace(".", "/") / f"{name.name}.py").exists()
                yield f"{module}.{name.name}" if is_file else module


def reads(path):
    """Return the modules that a file imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {*imported(tree, path.parent.name), *loaded(tree)}


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_a_file_imports_only_from_lower_layers(path):
    own = module_of(path).split(".")[0]
    for module in reads(path):
        other = module.split(".")[0]
        assert other not in NEVER_IMPORTED, module
        assert other == own or LAYERS.get(other, -1) < LAYERS[own], module
        assert own not in CLOSED or other in LAYERS or other in LIBRARIES, module


def test_the_pages_of_minimal_and_the_benchmark_of_the_kernels_are_read_alone():
    for files, allowed in (("minimal/*.py", "corpora.toy"), ("kernels/bench.py", "kernels")):
        for path in ROOT.glob(files):
            ours = {module for module in reads(path) if module.split(".")[0] in LAYERS}
            assert all(module.startswith(allowed) for module in ours), path


def test_no_files_import_each_other_in_a_circle():
    graph = {module_of(path): reads(path) - {module_of(path)} for path in PRODUCT}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


# ---- the closed core


SMALL = dict(data="pairs.tsv", batch=8, eval_limit=20)
SHAPE = dict(width=16, layers=1, heads=2, ffn_dim=32, dropout=0.1, vocab=300)
TRAIN_ALL = f"""
import sys
for name in ("safetensors", "sklearn", "scipy", "matplotlib", "transformers", "huggingface_hub",
             "sentence_transformers", "triton", "pytest"):
    sys.modules[name] = None  # as if it were not installed
import evaluate, objectives, train
from harness import runs
# Which takes half a second.
assert not {{"torch.distributed.fsdp", "torch.distributed.tensor"}} & sys.modules.keys()
list(train.start("mexma", steps=1, out=None, **{SMALL | SHAPE | dict(data="toy")}).steps())
# The first command imports nothing that only files, decoders or our kernels need.
assert not {{"corpora.files", "corpora.columns", "corpora.store", "harness.generation",
             "kernels.schedule", "harness.pretrained", "corpora.toy_regex",
             "corpora.toy_stories"}} & sys.modules.keys()
for name in objectives.OBJECTIVES:
    for step in (0, 1):  # the second run resumes the first
        run = train.start(name, steps=step + 1, out=name, **{SMALL | SHAPE})
        assert run.step == step
        list(run.steps())
    assert runs.read_log(name)[-1]["eval"] == run.scores()
    evaluate.main([name, "--json"])
print(*objectives.OBJECTIVES)
"""
WORDS = "sun moon tree river stone bird fish cloud road house".split()


def write_pairs(path, count, names=("en", "de")):
    """Write a parallel corpus: three words, the same words backwards, and in the columns after them
    the first word, which many rows share."""
    lines = ["\t".join(names)]
    for number in range(count):
        words = [WORDS[int(digit)] for digit in f"{number:03}"]
        texts = [" ".join(words), " ".join(word[::-1] for word in words)]
        texts += [f"{words[0]} {name}" for name in names[2:]]
        lines.append("\t".join(texts[:len(names)]))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def columns_of(views):
    """Return as many columns as an example has texts, so that none is drawn."""
    return "en de fr es it pt nl pl".split()[:views]


def test_the_core_alone_trains_resumes_and_evaluates_every_objective(monkeypatch, tmp_path):
    for name in ROOMS:
        shutil.copytree(ROOT / name, name)
    for name in FIVE:
        shutil.copy(ROOT / f"{name}.py", ".")
    write_pairs(Path("pairs.tsv"), 300)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", TRAIN_ALL], text=True, capture_output=True)
    assert done.returncode == 0 and SEVEN <= set(done.stdout.split()), done.stderr[-2000:]
