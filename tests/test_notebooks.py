"""The notebooks: how each is built and, with -m notebooks, that all of it runs and is true."""

import ast
import base64
import re
import sys

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from test_style import CORE, ROOT, name_of, style

sys.path.insert(0, str(ROOT / "notebooks"))
import render  # noqa: E402

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
WINGS = {"kernels", "corpora", "interop", "tasks", "results"}
# transformers in a try, to compare with.
IMPORTS = {*CORE, *WINGS, "torch", "numpy", "matplotlib", "transformers", *sys.stdlib_module_names}
NETWORK = {"urllib", "http", "socket", "ftplib", "ssl", "smtplib"}
# The last line that the last cell prints, such as "answer: xsim = 1.4 % (± 2)".
ANSWER = re.compile(r"^answer: (.+) = (-?[\d.e-]+)( %| \w+)? \(± ([\d.e-]+)\)$")
OPEN = re.compile(r"^answer_(\d) = \.\.\..*$", re.M)
SOLUTION = re.compile(r"<details>.*?```python\n(.*?)```.*?</details>", re.S)
CORNERS = {  # what the first cell says
    "a title": r"^# {number} · ", "the question": r"\*\*The question\.\*\*",
    "the caption of the last picture": r"\*\*The last picture\.\*\*",
    "the minutes": r"\*\*Minutes\.\*\* [\d.]+"}


def is_exercise(cell):
    return "exercise" in cell.metadata.get("tags", ())


def texts_of(cell):
    """What a cell printed."""
    return "".join(one.text for one in cell.get("outputs", ()) if one.output_type == "stream")


def has_picture(cell):
    return any("image/png" in one.get("data", {}) for one in cell.get("outputs", ()))


def answer_of(notebook):
    """-> (what, number, unit, tolerance) of the last line of the last cell."""
    lines = texts_of(notebook.cells[-1]).strip().splitlines() or [""]
    found = ANSWER.match(lines[-1])
    assert found, f"the last line is no answer: {lines[-1]!r}"
    return found[1], float(found[2]), found[3], float(found[4])


def prose(cells):
    """Lines between two pictures, at most; solutions are hidden, and do not count."""
    longest = 0
    lines = 0
    for cell in cells:
        if cell.cell_type == "markdown":
            shown = re.sub(r"<details>.*?</details>", "", cell.source, flags=re.S)
            lines += len([line for line in shown.splitlines() if line.strip()])
        longest = max(longest, lines)
        if has_picture(cell):
            lines = 0
    return longest


def wrong_imports(tree):
    for node in ast.walk(tree):
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module]
        for name in names:
            top = name.split(".")[0]
            if top not in IMPORTS or top in NETWORK or name == "corpora.download":
                yield f"imports {name}"


def wrong_cells(notebook):
    """What is wrong with single cells."""
    for number, cell in enumerate(notebook.cells):
        lines = cell.source.splitlines()
        found = [f"a line of {len(line)} columns" for line in lines if len(line) > 100]
        if cell.cell_type == "code":
            tree = ast.parse(cell.source)
            # A list that a cell fills is no state of a program.
            found += [what for _, what in style(tree, {}) if what != "global state"]
            found += wrong_imports(tree)
            outputs = cell.outputs
            found += ["is not run"] if not cell.execution_count else []
            found += ["has a widget"] if "widget" in str(outputs)[:10_000_000] else []
            found += ["writes to stderr" for one in outputs if one.get("name") == "stderr"]
        if is_exercise(cell):
            before = notebook.cells[number - 1].source
            found += [] if OPEN.search(cell.source) else ["has no line `answer_N = ...`"]
            found += [] if cell.metadata.get("wrong") else ["has no wrong answer"]
            found += [] if SOLUTION.search(before) else ["has no <details> with a solution before"]
        yield from (f"cell {number}: {what}" for what in found)


def problems(notebook, stem, size):
    """Everything that is not as the notebooks are -> list of texts."""
    cells = notebook.cells
    found = list(wrong_cells(notebook))
    first = cells[0].source
    corners = {what: form.replace("{number}", stem[:2]) for what, form in CORNERS.items()}
    found += [f"cell 0: not {what}" for what, form in corners.items() if not re.search(form, first)]
    if 'sys.path.insert(0, "..")' not in cells[1].source:
        found.append("cell 1: the five files are not found from this folder")
    markdown = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    pictures = [cell for cell in cells if has_picture(cell)]
    counts = {"cells": (len(cells), 12, 25), "kilobytes": (size / 1000, 0, 250),
              "lines of prose between pictures": (prose(cells), 0, 60),
              "pictures": (len(pictures), 1, 25),
              "times 'Before you run.'": (markdown.count("**Before you run.**"), 3, 3),
              "exercises": (sum(map(is_exercise, cells)), 3, 3)}
    for what, (count, least, most) in counts.items():
        if not least <= count <= most:
            found.append(f"{count:.0f} {what}, not {least} to {most}")
    if not ANSWER.match((texts_of(cells[-1]).strip().splitlines() or [""])[-1]):
        found.append("the last cell does not end in a line `answer: WHAT = NUMBER (± TOLERANCE)`")
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_a_notebook_is_built_as_all_are(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert problems(notebook, path.stem, path.stat().st_size) == []
    # Rendering leaves out what differs from run to run.
    assert nbformat.writes(render.clean(notebook, path.stem)) + "\n" == path.read_text("utf-8")
    for cell in filter(has_picture, notebook.cells):
        for output in cell.outputs:
            data = output.get("data", {}).get("image/png")
            assert not data or base64.b64decode(data).startswith(b"\x89PNG")


def test_problems_are_found():
    good = nbformat.read(NOTEBOOKS[0], as_version=4)
    del good.cells[-1]
    good.cells[1].source = "import requests; x = 1"
    found = "\n".join(problems(good, NOTEBOOKS[0].stem, 300_000))
    for what in ("imports requests", "two statements", "kilobytes", "the last cell", "not found"):
        assert what in found, found


def test_the_readme_has_a_row_for_each_notebook():
    text = (ROOT / "notebooks/README.md").read_text(encoding="utf-8")
    assert [path.name for path in NOTEBOOKS if f"({path.name})" not in text] == []
    assert [name for name in re.findall(r"\((\d\d_\w+\.ipynb)\)", text)
            if not (ROOT / "notebooks" / name).exists()] == []
    assert "(pictures.png)" in text
    assert (ROOT / "notebooks/pictures.png").stat().st_size < 100_000


# ---- run


def attempt(client, cell, number, answer):
    """Run an exercise's cell with an answer in place of its three dots -> did it fail its check?"""
    source = OPEN.sub(lambda match: answer, cell.source, count=1)
    try:
        client.execute_cell(nbformat.v4.new_code_cell(source), number)
    except CellExecutionError as error:
        assert error.ename == "AssertionError", f"cell {number}: {error}"
        return True
    return False


def run(notebook, folder):
    """Every cell in order, then the exercises -> the answer, and what is wrong with exercises."""
    wrong = []
    client = render.client_of(notebook, folder)
    with client.setup_kernel():
        for number, cell in enumerate(notebook.cells):
            client.execute_cell(cell, number)
        answer = answer_of(notebook)
        # With all that the notebook made: a reader may do them at the end.
        for number, cell in enumerate(list(notebook.cells)):
            if is_exercise(cell):
                solution = SOLUTION.search(notebook.cells[number - 1].source)[1].strip()
                if attempt(client, cell, number, solution):
                    wrong.append(f"cell {number}: the solution fails")
                if not attempt(client, cell, number, cell.metadata["wrong"]):
                    wrong.append(f"cell {number}: {cell.metadata['wrong']!r} passes")
    return answer, wrong


@pytest.mark.notebooks
@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_a_notebook_runs_and_says_what_it_said(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    what, number, unit, tolerance = answer_of(notebook)
    found, wrong = run(notebook, tmp_path)
    assert wrong == []
    assert found[0] == what and found[2] == unit
    assert found[1] == pytest.approx(number, abs=tolerance)
