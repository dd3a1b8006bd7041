"""Write the page of a run, or of several: one HTML file that needs no network."""

import html
from pathlib import Path

from base.common import BadInput, Parser, atomic_file, new_file

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
        self.add("Verdict", panels.verdict, groups)
        for members in groups.values():
            self.add_model(members[0], f" ({members[0].name})" if len(every) > 1 else "")
        for title, make in (panels.SECTIONS | panels.FOLDED).items():
            self.add(title, make, groups)

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

    def html(self):
        out = [HEAD.format(title=text(self.title), style=STYLE)]
        for title, section in self.sections.items():
            words = "".join(f"<p>{text(line)}</p>" for line in section.words.splitlines())
            head, end = f"<h2>{text(title)}</h2>", ""
            if title in panels.FOLDED:
                head, end = f"<details><summary>{head}</summary>", "</details>"
            out.append(f"<section>{head}{words}")
            out.append(table(*section.table) if section.table else "")
            out.append("<div class=panels>")
            for name, figure in section.figures.items():
                out.append(f'<figure aria-label="{text(name)}">'
                           f"{plots.svg(figure, f'f{len(out)}')}</figure>")
            out.append(f"</div>{end}</section>\n")
        if self.missing:
            left_out = table(("what", "why"), self.missing.items())
            out.append(f"<section><h2>Left out</h2>{left_out}</section>")
        return "".join([*out, "</body></html>\n"])


def title_of(every):
    """Name a page by its runs: a, a+b, or a+9-others."""
    names = [one.run.resolve().name for one in every]
    return "+".join(names) if len(names) < 4 else f"{names[0]}+{len(names) - 1}-others"


def text(value):
    """Return a value as text for HTML, never as markup."""
    return html.escape(str(value))


def table(heads, rows):
    """Return a table. The names of metrics may break at a slash. A narrow page shows the head of a
    column before each of its cells."""
    lines = ["".join(f"<th scope=col>{text(head)}</th>" for head in heads)]
    for row in rows:
        cells = (text(cell).replace("/", "/<wbr>") for cell in row)
        lines.append("".join(f'<td data-head="{text(head)}">{cell}</td>'
                             for head, cell in zip(heads, cells)))
    return f"<div class=scroll><table><tr>{'</tr><tr>'.join(lines)}</tr></table></div>"


def page_command(words):
    parser = Parser("python -m look", "Write one page of pictures of a run, or of several runs in "
                    "the same panels.", epilog="Also: python -m look compare --help, and python -m "
                    "look batch --help.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, such as out/mexma")
    parser.add_argument("--out", help="file to write, .html [beside the first RUN: out/a.html, of "
                        "several runs out/a+b.html, of more than three out/a+9-others.html]")
    options = parser.parse_args(words)
    every = [*map(seen.see, options.runs)]
    folder = every[0].run if every[0].run.name.strip(".") else every[0].run.resolve()  # "." or ".."
    out = options.out or folder.with_name(f"{title_of(every)}.html")
    out = new_file("--out", out, ".html", MARK)
    content = Page(every).html()
    with atomic_file(out) as file:
        file.write(content.encode())
    print(out)
