"""Execute notebooks from their first cell to their last, and store them with what they show; then
lay the last picture of each on one sheet, pictures.png.

    python notebooks/render.py                    # all of them
    python notebooks/render.py 02 05_collapse     # those whose names begin so
    python notebooks/render.py --html FOLDER      # runs none: what is stored, as pages to read

What is stored is what the next run would give again: no times, no paths, no widgets, and the ids of
cells are their numbers.
"""

import argparse
import base64
import io
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbclient
import nbformat
from nbconvert import HTMLExporter
from PIL import Image, ImageDraw
from pygments.formatters import HtmlFormatter

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# A page is one file, with its pictures in it, and asks no server for anything.
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ max-width: 50em; margin: 2em auto; padding: 0 1em; font: 16px/1.5 sans-serif; }}
pre {{ overflow-x: auto; padding: 0.6em; font-size: 13px; }}
.highlight pre {{ background: #f4f4f4; }}
table {{ border-collapse: collapse; }}
td, th {{ border: 1px solid #ccc; padding: 0.2em 0.6em; }}
img {{ max-width: 100%; }}
.prompt, .jp-InputPrompt, .jp-OutputPrompt, .anchor-link {{ display: none; }}
{colours}
</style>
<body>{body}</body></html>
"""


def client_of(notebook, folder):
    """A client that runs the notebook in a process of its own, in `folder`."""
    # As in a reader's Jupyter, but that nothing is written beside the notebooks.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    # Small models are fastest so, and their sums always have one order.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return nbclient.NotebookClient(notebook, timeout=1800, kernel_name="python3",
                                   resources={"metadata": {"path": str(folder)}})


def clean(notebook, name):
    """Leave out what differs from run to run."""
    notebook.metadata = nbformat.from_dict({
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"}})
    notebook.nbformat_minor = 5  # the first that has ids
    for number, cell in enumerate(notebook.cells):
        cell.id = f"{name}-{number:02}"
        for key in set(cell.metadata) - {"tags", "wrong"}:
            del cell.metadata[key]
        for output in cell.get("outputs", ()):
            output.pop("transient", None)
            if output.output_type == "stream":
                output.text = output.text.replace(str(ROOT), "..")
            if "image/png" in output.get("data", {}):
                output.data.pop("text/plain", None)
                output.metadata = {}
    return notebook


def execute(notebook, name):
    """A notebook -> the same, run and cleaned. CellExecutionError where a cell fails."""
    with tempfile.TemporaryDirectory() as folder:
        client_of(notebook, folder).execute()
    return clean(notebook, name)


def last_picture(path):
    """The last PNG that a notebook shows."""
    found = None
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", ()):
            found = output.get("data", {}).get("image/png", found)
    return Image.open(io.BytesIO(base64.b64decode(found))).convert("RGB")


def sheet(paths, width=270, height=205, columns=3):
    """The last picture of each notebook, small, with its number."""
    lines = -(-len(paths) // columns)
    page = Image.new("RGB", (columns * width, lines * height), "white")
    for place, path in enumerate(paths):
        picture = last_picture(path)
        picture.thumbnail((width - 12, height - 26), Image.Resampling.LANCZOS)
        x = place % columns * width
        y = place // columns * height
        page.paste(picture, (x, y + 16))
        ImageDraw.Draw(page).text((x + 2, y + 2), path.stem.replace("_", " "), "black")
    page.save(HERE / "pictures.png", optimize=True)


def write_html(paths, folder):
    """Stored notebooks as pages NAME.html, and the README as index.html."""
    index = nbformat.v4.new_markdown_cell((HERE / "README.md").read_text(encoding="utf-8"))
    notebooks = {path.stem: nbformat.read(path, as_version=4) for path in paths}
    notebooks["index"] = nbformat.v4.new_notebook(cells=[index])
    exporter = HTMLExporter(template_name="basic", embed_images=True)
    folder.mkdir(parents=True, exist_ok=True)
    for name, notebook in notebooks.items():
        for cell in notebook.cells:
            # Pages link to pages.
            cell.source = re.sub(r"\((\d\d_\w+)\.ipynb\)", r"(\1.html)", cell.source)
        body, _ = exporter.from_notebook_node(notebook, {"metadata": {"path": str(HERE)}})
        page = PAGE.format(title=name, body=body,
                           colours=HtmlFormatter().get_style_defs(".highlight"))
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
        print(folder / f"{name}.html")


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="how the notebooks' names begin [all]")
    parser.add_argument("--html", type=Path, metavar="FOLDER", help="write pages, and run nothing")
    options = parser.parse_args(arguments)
    everything = sorted(HERE.glob("*.ipynb"))
    chosen = [path for path in everything if path.name.startswith(tuple(options.names or [""]))]
    if options.html:
        return write_html(chosen, options.html)
    for path in chosen:
        begun = time.perf_counter()
        notebook = execute(nbformat.read(path, as_version=4), path.stem)
        nbformat.write(notebook, path)
        seconds = time.perf_counter() - begun
        print(f"{path.name}: {seconds:.0f} s, {path.stat().st_size / 1000:.0f} KB", flush=True)
    sheet(everything)


if __name__ == "__main__":
    main(sys.argv[1:])
