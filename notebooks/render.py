"""Run notebooks and store them with their outputs, or write the stored ones as HTML pages.

    python notebooks/render.py                    # run all of them
    python notebooks/render.py 02 05_collapse     # those whose names start like this
    python notebooks/render.py --html FOLDER      # run nothing, write pages
"""

import argparse
import os
import re
from pathlib import Path

import nbclient
import nbformat
from nbconvert import HTMLExporter
from pygments.formatters import HtmlFormatter

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CODE = ".highlight"  # the class of all code on a page
STYLE = f"""
:root {{ color-scheme: light dark; --line: #ccc; --link: #0645ad }}
body {{ max-width: 50em; margin: auto; padding: 1em; font: 16px/1.5 sans-serif; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; }}
a {{ color: var(--link) }}
img {{ max-width: 100%; }} td, th {{ border: 1px solid var(--line); }}
.prompt, .anchor-link {{ display: none; }}
{HtmlFormatter().get_style_defs(CODE)}
@media screen and (prefers-color-scheme: dark) {{
:root {{ --line: #444; --link: #8ab4f8 }}
body {{ background: #14171a; color: #e6e6e6; }}
{HtmlFormatter(style="github-dark").get_style_defs(CODE)}
}}"""


def clean(notebook, name):
    """Remove what differs from run to run, such as times and paths, and return the notebook."""
    notebook.metadata = nbformat.from_dict({
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"}})
    for number, cell in enumerate(notebook.cells):
        cell.id = f"{name}-{number:02}"
        for key in set(cell.metadata) - {"tags", "wrong"}:
            del cell.metadata[key]
        for output in cell.get("outputs", ()):
            if output.output_type == "stream":
                output.text = output.text.replace(str(ROOT), "..")
            if "image/png" in output.get("data", {}):
                output.data.pop("text/plain", None)
                output.metadata = {}
    return notebook


def write_pages(paths, folder):
    """Write notebooks and README.md as pages whose links work in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    notebooks = {path.stem: nbformat.read(path, as_version=4) for path in paths}
    text = (HERE / "README.md").read_text(encoding="utf-8")
    notebooks["README"] = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)])
    root = os.path.relpath(ROOT, folder.resolve())
    for name, notebook in notebooks.items():
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                text = re.sub(r"\]\((\w+)\.(ipynb|md)\)", r"](\1.html)", cell.source)
                cell.source = text.replace("](../", f"]({root}/")
        body, _ = HTMLExporter(template_name="basic").from_notebook_node(notebook)
        page = (f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{name}</title>\n'
                '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
                f"<style>{STYLE}</style>\n<body>{body}</body></html>\n")
        (folder / f"{name}.html").write_text(page, encoding="utf-8")


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[""], help="how the names start [all]")
    parser.add_argument("--html", type=Path, metavar="FOLDER", help="write pages, run nothing")
    options = parser.parse_args(words)
    paths = [path for path in sorted(HERE.glob("*.ipynb"))
             if path.name.startswith(tuple(options.names))]
    if options.html:
        return write_pages(paths, options.html)
    # Small models run fastest in one thread, and then their sums always have the same order.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for path in paths:
        print(path.name, flush=True)
        notebook = nbformat.read(path, as_version=4)
        nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(ROOT)}},
                                coalesce_streams=True).execute()
        nbformat.write(clean(notebook, path.stem), path)


if __name__ == "__main__":
    main()
