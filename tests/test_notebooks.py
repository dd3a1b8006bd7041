"""The notebooks: how each is built and, with -m notebooks, that all of it runs and is true."""

import ast
import importlib
import re
import sys
from types import FunctionType

import nbclient
import nbformat
import pytest
import torch
from nbclient.exceptions import CellExecutionError
from test_house import ROOT, name_of
from test_results import unprinted

from notebooks import pictures
from results.flops import step_flops

sys.path.insert(0, str(ROOT / "notebooks"))
import render  # noqa: E402

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
README = (ROOT / "notebooks/README.md").read_text(encoding="utf-8")
# The order in which they are read: that of the README's table.
ORDER = re.findall(r"^\| \d\d \| \[[^]]+\]\((\w+\.ipynb)\)", README, re.M)
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
# The last line that the last code cell prints, such as "answer: xsim = 1.4 % (± 2)".
ANSWER = re.compile(r"^answer: (.+) = (-?[\d.e-]+)( %| \w+)? \(± ([\d.e-]+)\)$")
COMMAND = re.compile(r"python -m\s+results\s+(show|board)")
OPEN = re.compile(r"^answer_(\d) = \.\.\..*$", re.M)
SOLUTION = re.compile(r"<details>.*?```python\n(.*?)```.*?</details>", re.S)


def read(path):
    return nbformat.read(path, as_version=4)


def is_exercise(cell):
    return "exercise" in cell.metadata.get("tags", ())


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts_of(notebook):
    """Return what each code cell printed."""
    return ["".join(one.text for one in cell.outputs if one.output_type == "stream")
            for cell in code_cells(notebook)]


def answer_of(notebook):
    """Return (what, number, unit, tolerance) of the last line that is printed."""
    last = texts_of(notebook)[-1].strip().splitlines()[-1]
    what, number, unit, tolerance = ANSWER.match(last).groups()
    return what, float(number), unit, float(tolerance)


@each_notebook
def test_a_command_named_in_its_paragraph_prints_every_number_of_a_notebook(path):
    """Of those that name one. A table belongs to the paragraph before it."""
    texts = [cell.source for cell in read(path).cells if cell.cell_type == "markdown"]
    for paragraph in re.split(r"\n\n(?!\|)", "\n\n".join(texts)):
        if COMMAND.search(paragraph):
            assert unprinted(paragraph) == [], paragraph


@each_notebook
def test_a_notebook_is_built_as_all_are(path):
    notebook = read(path)
    assert answer_of(notebook) and ORDER.count(path.name) == 1
    for cell in code_cells(notebook):
        streams = [output.get("name") for output in cell.outputs]
        assert cell.execution_count and "stderr" not in streams, cell.source
    for before, cell in zip(notebook.cells, notebook.cells[1:]):
        if is_exercise(cell):
            assert OPEN.search(cell.source) and cell.metadata.wrong, cell.source
            assert SOLUTION.search(before.source), cell.source
    # The first code cell makes it run alone, and the last cell leads on.
    assert code_cells(notebook)[0].source == code_cells(read(NOTEBOOKS[0]))[0].source
    footer = notebook.cells[-1].source
    following = ORDER[ORDER.index(path.name) + 1:][:1]
    assert all(f"({name})" in footer for name in following) and "(README.md)" in footer
    # Rendering removes what differs from run to run.
    assert nbformat.writes(render.clean(notebook, path.stem)) + "\n" == path.read_text("utf-8")


def test_every_link_of_the_pages_works(tmp_path, monkeypatch):
    """Without outputs, which have no links and take most of the time."""
    def read_cells(path, as_version, read=nbformat.read):
        notebook = read(path, as_version)
        for cell in code_cells(notebook):
            cell.outputs = []
        return notebook

    monkeypatch.setattr(nbformat, "read", read_cells)
    render.main(["--html", str(tmp_path)])
    pages = list(tmp_path.glob("*.html"))
    assert len(pages) == len(NOTEBOOKS) + 1
    for page in pages:
        for link in re.findall(r'(?:src|href)="([^"#]+)"', page.read_text(encoding="utf-8")):
            assert link.startswith("data:") or (tmp_path / link).exists(), f"{page.name}: {link}"


@each_notebook
def test_what_a_notebook_uses_of_ours_exists_and_is_imported_from_where_it_is(path):
    """Where nothing is trained: a renamed function is found at once. Notebook 11 writes files of
    one's own, which import add_special from objectives."""
    source = "\n".join(OPEN.sub("", cell.source) for cell in code_cells(read(path)))
    used, modules = [], {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {one.asname or one.name: one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            used += [(node.module, one.name) for one in node.names]
            modules |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used.append((modules.get(node.value.id), node.attr))
    for module, name in used:
        if module and (ROOT / f"{module.replace('.', '/')}.py").exists():
            thing = getattr(importlib.import_module(module), name)
            home = thing.__module__ if isinstance(thing, (type, FunctionType)) else module
            assert home == module or (module, name) == ("objectives", "add_special"), name


def test_the_pictures_of_the_course_show_their_numbers_and_names():
    axis = pictures.heat([[0.25, 1.0]], ["row"], ["a", ""], "x", "y").axes[0]
    assert [text.get_text() for text in axis.texts] == ["0.25", "1"]
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["a"]
    seen = pictures.mask([[1, 0], [1, 1]], ["p", "q"], groups=[0, 1]).axes[0].images[0]
    assert seen.get_array().tolist() == [[1, 0], [1, 2]]
    bars = pictures.bars({"g": {"one": 1.0, "two": (2.0, 1.5, 2.5), "none": 0.0}}, "y").axes[0]
    assert [bar.get_height() for bar in bars.patches] == [1, 2, 0]
    assert [text.get_text() for text in bars.texts] == ["0"]  # the one that is too short to see
    same = torch.eye(3)
    found = pictures.cosines({"en": same, "de": same, "fr": same}).axes[0]
    assert found.get_legend_handles_labels()[1] == ["translations: mean 1.00",
                                                    "unrelated: mean 0.00"]
    values, = pictures.spectrum({"z": torch.diag(torch.tensor([3.0, 2, 0]))}, False).axes[0].lines
    assert values.get_ydata().tolist() == pytest.approx([3, 2])
    row = [("word", None)] * 20  # longer than a line
    heights = [pictures.words({"en": row[:many]}, "t").get_figheight() for many in (2, 20)]
    assert heights[0] < heights[1]
    cells = pictures.cells({"a": {0: ("x", pictures.GREY)}}, "t", [(0, 0, 1)], [(0, 1, "note")])
    assert [text.get_text() for text in cells.axes[0].texts] == ["t", "a", "x", "", "note"]


@pytest.mark.notebooks
def test_the_table_of_the_four_papers_has_the_costs_of_a_step():
    row, = re.findall(r"^\| a step costs .*", README, re.M)
    found = []
    for flags, baseline in (("bepa", "mlm --layers 2"), ("mexma", "contrastive"),
                            ("hybrid", "mlm --preset hybrid"),
                            ("llm-jepa --data regex", "ntp --data regex")):
        costs = [step_flops(["--objective", *each.split()])[0] for each in (flags, baseline)]
        found.append(f"{costs[0] / costs[1]:.1f} x `{baseline.split()[0]}`")
    assert row == f"| a step costs | {' | '.join(found)} |"


def check(client, cell, answer):
    """Run an exercise's cell with an answer instead of the three dots."""
    source = OPEN.sub(lambda match: answer, cell.source, count=1)
    client.execute_cell(nbformat.v4.new_code_cell(source), 0)


@pytest.mark.notebooks
@each_notebook
def test_a_notebook_runs_and_gives_the_stored_answer(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = read(path)
    what, number, unit, tolerance = answer_of(notebook)
    printed = texts_of(notebook)
    client = nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}})
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
        found = answer_of(notebook)
        # Without a training, every number is the same again.
        if "Nothing is trained" in " ".join(notebook.cells[0].source.split()):
            assert texts_of(notebook) == printed
        # The exercises come after everything else: a reader may do them at the end.
        for index, cell in enumerate(notebook.cells):
            if is_exercise(cell):
                solution, = SOLUTION.findall(notebook.cells[index - 1].source)
                check(client, cell, solution.strip())
                with pytest.raises(CellExecutionError, match="AssertionError"):
                    check(client, cell, cell.metadata.wrong)
    assert found == (what, pytest.approx(number, abs=tolerance), unit, tolerance)
