"""Write the page of a run, or of several: one HTML file that needs no network."""

import html
from pathlib import Path

from common import BadInput, Parser, atomic_file, make_folder, new_file

from . import panels, plots, seen

STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="generator" content="nanoJEPA">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title><style>{style}</style></head><body>
<h1>{title}</h1>
"""
MARK = b'content="nanoJEPA"'


class Page:
    """The page of some Seen."""

    def __init__(self, every):
        self.title = title_of(every)
        self.sections = {}  # {title: Section}
        self.missing = {}   # {title: the reason why there is no such section}
        groups = seen.grouped(every)
        for title, make in panels.SECTIONS.items():
            self.add(title, make, groups)
        for members in groups.values():
            self.add_model(members[0], f" ({members[0].name})" if len(every) > 1 else "")

    def add(self, title, make, *arguments):
        try:
            self.sections[title] = make(*arguments)
        except BadInput as error:
            self.missing[title] = str(error)

    def add_model(self, one, ending):
        """Add what the model of a run learned, in sections whose titles have this ending."""
        try:
            evaluation = seen.evaluation(one)
        except BadInput as error:
            self.missing[f"everything about the model{ending}"] = str(error)
            return
        for title, make in panels.MODEL_SECTIONS.items():
            self.add(title + ending, make, one, evaluation)

    def figures(self):
        """Return {name: Figure}; a name that occurs again gets a number."""
        found = {}
        for section in self.sections.values():
            for name, figure in section.figures.items():
                number = sum(other.partition("#")[0] == name for other in found)
                found[f"{name}#{number + 1}" if number else name] = figure
        return found

    def html(self):
        names = {id(figure): name for name, figure in self.figures().items()}
        out = [HEAD.format(title=text(self.title), style=STYLE)]
        for title, section in self.sections.items():
            out.append(f"<section><h2>{text(title)}</h2><p>{text(section.words)}</p>")
            out.append(table(*section.table) if section.table else "")
            out.append("<div class=panels>")
            for figure in section.figures.values():
                out.append(f'<figure aria-label="{text(names[id(figure)])}">'
                           f"{plots.svg(figure, f'f{len(out)}')}</figure>")
            out.append("</div></section>\n")
        if self.missing:
            left_out = table(("what", "why"), self.missing.items())
            out.append(f"<section><h2>Left out</h2>{left_out}</section>")
        return "".join([*out, "</body></html>\n"])

    def _repr_html_(self):
        """Show the page in a frame of its own, so that its style stays inside."""
        return (f'<iframe srcdoc="{text(self.html())}" style="width:100%;height:48rem;border:0">'
                "</iframe>")


def title_of(every):
    """Name a page by its runs: a, a+b, or a+9-others."""
    names = [one.run.resolve().name if isinstance(one.run, Path) else one.name for one in every]
    return "+".join(names) if len(names) < 4 else f"{names[0]}+{len(names) - 1}-others"


def text(value):
    """Return a value as text for HTML, never as markup."""
    return html.escape(str(value))


def table(heads, rows):
    """Return a table. The names of metrics may break at a slash."""
    lines = []
    for tag, cells in (("th", heads), *(("td", row) for row in rows)):
        cells = (text(cell).replace("/", "/<wbr>") for cell in cells)
        lines.append("<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>")
    return f"<div class=scroll><table>{''.join(lines)}</table></div>"


def page_command(words):
    parser = Parser("python -m look", "Write one page of pictures of a run, or of several runs in "
                    "the same panels.", epilog="Also: python -m look compare --help, and python -m "
                    "look batch --help.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, such as out/mexma")
    parser.add_argument("--out", help="file to write, .html [beside the first RUN: out/a.html, of "
                        "several runs out/a+b.html, of more than three out/a+9-others.html]")
    parser.add_argument("--png", metavar="FOLDER", help="also write each picture as a PNG file")
    options = parser.parse_args(words)
    every = [*map(seen.see, options.runs)]
    folder = every[0].run if every[0].run.name.strip(".") else every[0].run.resolve()  # "." or ".."
    out = options.out or folder.with_name(f"{title_of(every)}.html")
    out = new_file("--out", out, ".html", MARK)
    page = Page(every)
    with atomic_file(out) as file:
        file.write(page.html().encode())
    if options.png:
        make_folder(options.png, "--png")
        for name, figure in page.figures().items():
            picture = Path(options.png) / f"{name.replace('/', '-')}.png"
            with atomic_file(new_file("--png", picture, ".png", plots.MARK)) as file:
                file.write(plots.png(figure))
    print(out)
