"""Run notebooks and store them with their outputs, or write the stored ones as HTML pages.

    python notebooks/render.py                    # run all of them
    python notebooks/render.py 02 05_collapse     # those whose names start like this
    python notebooks/render.py --html FOLDER      # run nothing, write pages

A stored notebook has nothing that differs from run to run: no times, no paths, and cell ids are
numbers. pictures.png shows the last picture of each.
"""

import argparse
import base64
import io
import os
import re
from pathlib import Path

import nbclient
import nbformat
from nbconvert import HTMLExporter
from PIL import Image, ImageDraw
from pygments.formatters import HtmlFormatter

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
STYLE = """body { max-width: 50em; margin: 2em auto; padding: 0 1em; font: 16px/1.5 sans-serif; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: 0.6em; font-size: 13px; }
.highlight pre { background: #f4f4f4; }
table { border-collapse: collapse; }
td, th { border: 1px solid #ccc; padding: 0.2em 0.6em; }
img { max-width: 100%; }
.prompt, .jp-InputPrompt, .jp-OutputPrompt, .anchor-link { display: none; }
"""


def clean(notebook, name):
    """Remove everything that differs from run to run, and return the notebook."""
    notebook.metadata = nbformat.from_dict({
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"}})
    notebook.nbformat_minor = 5  # the first version that has cell ids
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


def last_picture(path):
    """Return the last PNG that a notebook shows, or an empty one if it has not been run."""
    outputs = [output for cell in nbformat.read(path, as_version=4).cells
               for output in cell.get("outputs", ()) if "image/png" in output.get("data", {})]
    if not outputs:
        return Image.new("RGB", (1, 1), "white")
    return Image.open(io.BytesIO(base64.b64decode(outputs[-1].data["image/png"]))).convert("RGB")


def write_sheet(paths, width=270, height=205, columns=3):
    """Write pictures.png: the last picture of each notebook, small, with its name."""
    sheet = Image.new("RGB", (columns * width, -(-len(paths) // columns) * height), "white")
    for number, path in enumerate(paths):
        picture = last_picture(path)
        picture.thumbnail((width - 12, height - 26), Image.Resampling.LANCZOS)
        x, y = number % columns * width, number // columns * height
        sheet.paste(picture, (x, y + 16))
        ImageDraw.Draw(sheet).text((x + 2, y + 2), path.stem.replace("_", " "), "black")
    sheet.quantize().save(HERE / "pictures.png", optimize=True)


def linked(text, folder):
    """Change the links of a cell so that they work in an HTML page in a folder."""
    text = re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.html)", text)
    text = text.replace("](README.md)", "](index.html)").replace("](TEACHING.md)",
                                                                 "](TEACHING.html)")
    # Only a picture is copied into the page; any other file stays where it is.
    return re.sub(r"(?<!!)\[([^]]*)\]\(\.\./([^)]*)\)", lambda match:
                  f"[{match[1]}]({os.path.relpath(ROOT / match[2], folder)})", text)


def write_html(paths, folder):
    """Write stored notebooks as NAME.html, README.md as index.html, and TEACHING.html."""
    notebooks = {path.stem: nbformat.read(path, as_version=4) for path in paths}
    for name, file in (("index", "README.md"), ("TEACHING", "TEACHING.md")):
        text = (HERE / file).read_text(encoding="utf-8")
        notebooks[name] = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)])
    exporter = HTMLExporter(template_name="basic", embed_images=True)
    folder.mkdir(parents=True, exist_ok=True)
    for name, notebook in notebooks.items():
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = linked(cell.source, folder.resolve())
        body, _ = exporter.from_notebook_node(notebook, {"metadata": {"path": str(HERE)}})
        style = STYLE + HtmlFormatter().get_style_defs(".highlight")
        page = ('<!doctype html>\n<html lang="en"><meta charset="utf-8">'
                '<meta name="viewport" content="width=device-width">\n'
                f"<title>{name}</title>\n<style>{style}</style>\n<body>{body}</body></html>\n")
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
    print(folder / "index.html")


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[""], help="how the names start [all]")
    parser.add_argument("--html", type=Path, metavar="FOLDER", help="write pages, run nothing")
    options = parser.parse_args(words)
    everything = sorted(HERE.glob("*.ipynb"))
    chosen = [path for path in everything if path.name.startswith(tuple(options.names))]
    if options.html:
        return write_html(chosen, options.html)
    # Small models run fastest in one thread, and then their sums always have the same order.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for path in chosen:
        print(path.name, flush=True)
        notebook = nbformat.read(path, as_version=4)
        nbclient.NotebookClient(notebook, timeout=1800, kernel_name="python3",
                                resources={"metadata": {"path": str(ROOT)}},
                                coalesce_streams=True).execute()
        nbformat.write(clean(notebook, path.stem), path)
    write_sheet(everything)


if __name__ == "__main__":
    main()
