"""The notebooks: how each is built and, with -m notebooks, that all of it runs and is true."""

import ast
import re
import sys

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from test_house import ROOT, name_of

from results.flops import step_flops

sys.path.insert(0, str(ROOT / "notebooks"))
import render  # noqa: E402

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NETWORK = {"urllib", "http", "socket", "ftplib", "ssl", "smtplib"}
# The last line that the last cell prints, such as "answer: xsim = 1.4 % (± 2)".
ANSWER = re.compile(r"^answer: (.+) = (-?[\d.e-]+)( %| \w+)? \(± ([\d.e-]+)\)$")
PAGE = re.compile(r"results/[\w-]+\.md")
NUMBER = re.compile(r"(?<![\w.])\d*\.\d+")
OPEN = re.compile(r"^answer_(\d) = \.\.\..*$", re.M)
SOLUTION = re.compile(r"<details>.*?```python\n(.*?)```.*?</details>", re.S)


def is_exercise(cell):
    return "exercise" in cell.metadata.get("tags", ())


def texts_of(cell):
    """What a cell printed."""
    return "".join(one.text for one in cell.get("outputs", ()) if one.output_type == "stream")


def answer_of(notebook):
    """-> (what, number, unit, tolerance) of the last line of the last cell."""
    lines = texts_of(notebook.cells[-1]).strip().splitlines() or [""]
    found = ANSWER.match(lines[-1])
    assert found, f"the last line is no answer: {lines[-1]!r}"
    return found[1], float(found[2]), found[3], float(found[4])


def wrong_imports(tree):
    """A notebook runs offline."""
    for node in ast.walk(tree):
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module]
        for name in names:
            if name.split(".")[0] in NETWORK or name == "corpora.download":
                yield f"imports {name}"


def problems(notebook):
    """What is not as a reader needs it -> list of texts."""
    found = []
    for number, cell in enumerate(notebook.cells):
        wrong = []
        if cell.cell_type == "code":
            wrong += wrong_imports(ast.parse(cell.source))
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
    """The numbers with a decimal point, in a sentence that names a page of results/, that are not
    on this page, rounded as they are. (A semicolon ends a sentence too.)"""
    found = []
    for sentence in re.split(r"(?<=[.;!?])\s|\n\n|\n- ", text):
        known = []
        for page in PAGE.findall(sentence):
            known += NUMBER.findall((ROOT / page).read_text(encoding="utf-8"))
        if known:
            for number in NUMBER.findall(PAGE.sub("", sentence)):
                digits = len(number.split(".")[1])
                if not any(abs(float(one) - float(number)) < 0.501 / 10 ** digits for one in known):
                    found.append(number)
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_a_number_that_is_cited_from_a_page_of_results_is_on_that_page(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            assert unfounded(cell.source) == [], cell.source


def test_a_number_that_is_not_on_the_page_is_found():
    text = "It is 75.8 ± .58 (results/llm-jepa.md), or 1.1; no 99.123 % [x](../results/nlrx.md)."
    assert unfounded(text) == ["99.123"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_a_notebook_is_built_as_all_are(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert problems(notebook) == [] and answer_of(notebook)
    # Rendering leaves out what differs from run to run.
    assert nbformat.writes(render.clean(notebook, path.stem)) + "\n" == path.read_text("utf-8")


def test_the_readme_has_a_row_for_each_notebook():
    text = (ROOT / "notebooks/README.md").read_text(encoding="utf-8")
    assert [path.name for path in NOTEBOOKS if f"({path.name})" not in text] == []
    assert [name for name in re.findall(r"\((\d\d_\w+\.ipynb)\)", text)
            if not (ROOT / "notebooks" / name).exists()] == []


def test_the_pages_show_all_and_ask_no_server(tmp_path):
    render.main(["11", "--html", str(tmp_path)])
    page = (tmp_path / "11_measuring.html").read_text(encoding="utf-8")
    notebook = nbformat.read(ROOT / "notebooks/11_measuring.ipynb", as_version=4)
    assert page.count("data:image/png") == sum(
        "image/png" in output.get("data", {})
        for cell in notebook.cells for output in cell.get("outputs", ()))
    assert answer_of(notebook)[0] in page
    index = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert '"11_measuring.html"' in index and "data:image/png" in index
    assert re.findall(r'(?:src|href)="(?:https?:|//)', page + index) == []


TITLE = "## The four papers side by side"


def table_of(text):
    """The lines of the table under TITLE."""
    return [line for line in text.split(TITLE)[-1].splitlines() if line.startswith("|")]


def test_the_four_papers_have_one_table():
    wanted = table_of((ROOT / "notebooks/README.md").read_text(encoding="utf-8"))
    for path in NOTEBOOKS[6:10]:
        texts = [cell.source for cell in nbformat.read(path, as_version=4).cells]
        table, = [table_of(text) for text in texts if text.startswith(TITLE)]
        assert table == wanted and len(table) > 8


# ---- run


@pytest.mark.notebooks
def test_the_table_of_the_four_papers_says_what_a_step_costs():
    text = (ROOT / "notebooks/README.md").read_text(encoding="utf-8")
    said, = [line for line in table_of(text) if line.startswith("| a step costs")]
    found = []
    for flags, control in (("bepa", "mlm"), ("hybrid", "mlm --preset hybrid"),
                           ("mexma", "contrastive"), ("llm-jepa --data regex", "ntp --data regex")):
        costs = [step_flops(["--objective", *each.split()])[0] for each in (flags, control)]
        found.append(f"{costs[0] / costs[1]:.1f} x `{control.split()[0]}`")
    assert said == f"| a step costs | {' | '.join(found)} |"



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
