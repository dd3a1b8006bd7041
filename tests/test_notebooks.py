"""The notebooks: how each is built and, with -m notebooks, that all of it runs and is true."""

import re
import sys

import nbclient
import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from test_house import ROOT, name_of

from results.compare import board_lines, show
from results.flops import step_flops

sys.path.insert(0, str(ROOT / "notebooks"))
import render  # noqa: E402

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NETWORK = re.compile(r"\b(?:import|from) (urllib|http|socket|ftplib|requests)\b")
# The last line that the last code cell prints, such as "answer: xsim = 1.4 % (± 2)".
ANSWER = re.compile(r"^answer: (.+) = (-?[\d.e-]+)( %| \w+)? \(± ([\d.e-]+)\)$")
COMMAND = re.compile(r"python -m\s+results\s+(show\s+([\w.-]+)|board)")
NUMBER = re.compile(r"(?<![\w.])\d+\.\d+")
OPEN = re.compile(r"^answer_(\d) = \.\.\..*$", re.M)
SOLUTION = re.compile(r"<details>.*?```python\n(.*?)```.*?</details>", re.S)


def read(path):
    return nbformat.read(path, as_version=4)


def is_exercise(cell):
    return "exercise" in cell.metadata.get("tags", ())


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def answer_of(notebook):
    """Return (what, number, unit, tolerance) of the last line that is printed."""
    outputs = code_cells(notebook)[-1].get("outputs", ())
    text = "".join(one.text for one in outputs if one.output_type == "stream")
    found = ANSWER.match((text.strip().splitlines() or [""])[-1])
    assert found, f"the last line is no answer: {text!r}"
    return found[1], float(found[2]), found[3], float(found[4])


def problems(notebook):
    """Return what a reader would stumble over, a list of texts."""
    found = []
    for number, cell in enumerate(notebook.cells):
        wrong = []
        if cell.cell_type == "code":
            wrong += [f"needs the network: {name}" for name in NETWORK.findall(cell.source)]
            wrong += [] if cell.execution_count else ["is not run"]
            wrong += ["writes to stderr" for one in cell.outputs if one.get("name") == "stderr"]
        if is_exercise(cell):
            before = notebook.cells[number - 1].source
            wrong += [] if OPEN.search(cell.source) else ["has no line `answer_N = ...`"]
            wrong += [] if cell.metadata.get("wrong") else ["has no wrong answer"]
            wrong += [] if SOLUTION.search(before) else ["has no <details> with a solution before"]
        found += [f"cell {number}: {what}" for what in wrong]
    return found


def unfounded(text):
    """Return the decimals that the commands of their paragraph do not print. A table belongs to the
    paragraph before it."""
    found = []
    for paragraph in re.split(r"\n\n(?!\|)", text):
        commands = COMMAND.findall(paragraph)
        printed = " ".join(show(name) if name else "\n".join(board_lines())
                           for _, name in commands)
        known = {float(number) for number in NUMBER.findall(printed)}
        if commands:
            for number in NUMBER.findall(COMMAND.sub("", paragraph)):
                if float(number) not in known:
                    found.append(number)
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_a_number_that_is_cited_from_the_records_is_in_them(path):
    for cell in read(path).cells:
        if cell.cell_type == "markdown":
            assert unfounded(cell.source) == [], cell.source


def test_a_number_that_is_not_in_the_records_is_found():
    text = ("`ntp` has 84.84 ± 0.26, not 99.123 (`python -m results show\nllm-jepa-table-6`).\n\n"
            "| a | 77.123 |\n\nElsewhere 12.5.")
    assert unfounded(text) == ["99.123", "77.123"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_a_notebook_is_built_as_all_are(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert problems(notebook) == [] and answer_of(notebook)
    # The first code cell makes it run alone, and the last cell leads on.
    assert code_cells(notebook)[0].source == code_cells(read(NOTEBOOKS[0]))[0].source
    footer = notebook.cells[-1].source
    following = NOTEBOOKS[NOTEBOOKS.index(path) + 1:][:1]
    assert all(f"({one.name})" in footer for one in following) and "(README.md)" in footer
    # Rendering removes what differs from run to run.
    assert nbformat.writes(render.clean(notebook, path.stem)) + "\n" == path.read_text("utf-8")


def test_the_readme_has_a_row_for_each_notebook():
    text = (ROOT / "notebooks/README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\((\d\d_\w+\.ipynb)\)", text)) == [path.name for path in NOTEBOOKS]


def test_every_link_of_the_pages_works(tmp_path):
    render.main(["--html", str(tmp_path)])
    for page in tmp_path.glob("*.html"):
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r'(?:src|href)="([^"#]+)"', text):
            assert link.startswith("data:") or (tmp_path / link).exists(), f"{page.name}: {link}"
    page = (tmp_path / "11_measuring.html").read_text(encoding="utf-8")
    assert page.count("data:image/png") == sum(
        "image/png" in output.get("data", {})
        for cell in code_cells(read(ROOT / "notebooks/11_measuring.ipynb"))
        for output in cell.outputs)


@pytest.mark.notebooks
def test_the_table_of_the_four_papers_has_the_costs_of_a_step():
    text = (ROOT / "notebooks/README.md").read_text(encoding="utf-8")
    row, = [line for line in text.splitlines() if line.startswith("| a step costs")]
    found = []
    for flags, baseline in (("bepa", "mlm"), ("hybrid", "mlm --preset hybrid"),
                            ("mexma", "contrastive"),
                            ("llm-jepa --data regex", "ntp --data regex")):
        costs = [step_flops(["--objective", *each.split()])[0] for each in (flags, baseline)]
        found.append(f"{costs[0] / costs[1]:.1f} x `{baseline.split()[0]}`")
    assert row == f"| a step costs | {' | '.join(found)} |"


def fails(client, cell, number, answer):
    """Run an exercise's cell with an answer in place of its three dots: does its check fail?"""
    source = OPEN.sub(lambda match: answer, cell.source, count=1)
    try:
        client.execute_cell(nbformat.v4.new_code_cell(source), number)
    except CellExecutionError as error:
        assert error.ename == "AssertionError", f"cell {number}: {error}"
        return True
    return False


@pytest.mark.notebooks
@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_a_notebook_runs_and_gives_the_stored_answer(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = read(path)
    what, number, unit, tolerance = answer_of(notebook)
    client = nbclient.NotebookClient(notebook, timeout=1800, kernel_name="python3",
                                     resources={"metadata": {"path": str(tmp_path)}})
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
        found = answer_of(notebook)
        # The exercises come after everything else: a reader may do them at the end.
        for index, cell in enumerate(notebook.cells):
            if is_exercise(cell):
                solution = SOLUTION.search(notebook.cells[index - 1].source)[1].strip()
                assert not fails(client, cell, index, solution), f"cell {index}: the solution fails"
                assert fails(client, cell, index, cell.metadata["wrong"]), f"cell {index}: passes"
    assert (found[0], found[2]) == (what, unit)
    assert found[1] == pytest.approx(number, abs=tolerance)
