"""Execute notebooks from their first cell to their last, and store them with what they show; then
lay the last picture of each on one sheet, pictures.png.

    python notebooks/render.py                    # all of them
    python notebooks/render.py 02 05_collapse     # those whose names begin so

What is stored is what the next run would give again: no times, no paths, no widgets, and the ids of
cells are their numbers.
"""

import base64
import io
import os
import sys
import tempfile
import time
from pathlib import Path

import nbclient
import nbformat
from PIL import Image, ImageDraw

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


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
    page.quantize(96).save(HERE / "pictures.png", optimize=True)


def main(names):
    everything = sorted(HERE.glob("*.ipynb"))
    for path in everything:
        if names and not path.name.startswith(tuple(names)):
            continue
        begun = time.perf_counter()
        notebook = execute(nbformat.read(path, as_version=4), path.stem)
        nbformat.write(notebook, path)
        seconds = time.perf_counter() - begun
        print(f"{path.name}: {seconds:.0f} s, {path.stat().st_size / 1000:.0f} KB", flush=True)
    sheet(everything)


if __name__ == "__main__":
    main(sys.argv[1:])
