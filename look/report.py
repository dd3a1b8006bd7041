"""Write the page of a run, or of several: one HTML file that needs no network.

    python -m look out/mexma                     writes out/mexma.html
    python -m look out/a out/b --out both.html   several runs in the same panels
    python -m look out/mexma --png figures       also writes each picture as a PNG file
"""

import html
import io
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import evaluate
import metrics
from common import BadInput, Parser, atomic_file, comma_list, make_folder, shown
from objectives import find_objective

from . import compare, panels, plots, seen

STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title><style>{style}</style></head><body>
"""


class Section(NamedTuple):
    title: str
    words: str = ""     # HTML before the panels
    panels: dict = {}   # {name: Figure}
    wide: bool = False  # a panel has the whole width of the page


class Cell:
    """A page in a notebook's cell, in a frame of its own, so that its style stays inside."""

    def __init__(self, page):
        self.page = page

    def _repr_html_(self):
        return (f'<iframe srcdoc="{text(self.page)}" style="width:100%;height:48rem;border:0">'
                "</iframe>")


def text(value):
    """Return a value as text for HTML, never as markup."""
    return html.escape(str(value))


def table(heads, rows, kind=""):
    """Return a table of cells that are HTML."""
    def line(tag, cells):
        return f"<tr>{''.join(f'<{tag} dir=auto>{cell}</{tag}>' for cell in cells)}</tr>"

    lines = "".join([line("th", heads), *(line("td", row) for row in rows)])
    return f'<div class=scroll><table class="{kind}">{lines}</table></div>'


def number_table(heads, rows):
    """Return a table of metrics, whose names may break at a slash, and numbers."""
    heads, *rows = [[text(cell).replace("/", "/<wbr>") for cell in row] for row in (heads, *rows)]
    return table(heads, rows, "numbers")


# ---- sections: a function each. A section that does not apply raises BadInput with the reason.


def trained(every):
    """Say what was trained: a table for each run, opened if it is the only one."""
    parts = []
    for one in every:
        first, config, last = one.first, one.first["config"], one.last()
        rows = first.get("rows")
        facts = {
            "command": first.get("command") or first.get("imported") or "from Python",
            "data": f"{config['data'] or 'none'} {config.get('langs') or ''}".strip(),
            "rows": rows and f"{rows[0]:,} to train on, {rows[1]:,} held out",
            "parameters": first.get("parameters") and f"{first['parameters']:,}",
            "steps": "step" in last and f"{last['step']:,} of {config['steps']:,}",
            "tokens": "tokens" in last and f"{last['tokens']:,}",
            "training time": "seconds" in last and f"{last['seconds']:,.0f} s",
            "machine": "device" in first and f"{first['device']}, {first['precision']}, "
                                             f"torch {first['torch']}",
            "warnings": "; ".join(f"step {record['step']}: {record['warning']}"
                                  for record in one.records if "warning" in record)}
        body = table(("", ""), [(key, text(value)) for key, value in facts.items() if value])
        parts.append(f"<details{' open' * (len(every) == 1)}><summary>{text(one.name)}</summary>"
                     f"{body}</details>")
    return Section("What was trained", "".join(parts))


def results(groups):
    """Return the numbers of one run before and after training, or the table of several runs."""
    every = [one for members in groups.values() for one in members]
    if len(every) > 1:
        heads, rows = compare.table(groups, compare.chosen_metrics(every))
        return Section("Results", "<p>Runs that differ only in their seed are one row, mean ± "
                       "standard deviation.</p>" + number_table(heads, rows))
    scores = every[0].evaluations()
    if not scores:
        raise BadInput("this run has not been evaluated")
    before, after = scores[min(scores)], scores[max(scores)]
    rows = [(f"{name}\n{about}", compare.mean_std([before[name]]) if name in before else "-",
             compare.mean_std([value]))
            for name, value in after.items()
            if (about := evaluate.METRICS.get(name) or evaluate.METRICS.get(name.split("/")[0]))]
    start = "start" if every[0].first["config"].get("init") else "untrained"
    return Section("Results", number_table(("", start, f"step {max(scores)}"), rows))


def along_training(groups):
    found = panels.curves(groups)
    if not found:
        raise BadInput("the log has no steps")
    seeds = max(map(len, groups.values())) > 1
    return Section("Along training", "<p>Thin lines are seeds, thick lines their mean.</p>" * seeds,
                   found)


def health(groups):
    if not any(one.verdicts() for members in groups.values() for one in members):
        raise BadInput("no evaluation of a trained model has the numbers that it needs")
    words = "".join(f"<p>{text(line)}</p>" for line in verdict_lines(groups))
    words += "<p>Each stretch of steps has the color of the verdict at its end.</p>"
    return Section("Health: did it collapse?", words, {"health": panels.health(groups)})


def verdict_lines(groups):
    """Say for each run what the last evaluation found, and since when."""
    lines = []
    for label, members in groups.items():
        for one in members:
            seed = f", seed {one.first['config'].get('seed')}" if len(members) > 1 else ""
            if last := panels.since(one):
                scores = list(one.evaluations().values())[-1]
                lines.append(f"{label}{seed}: {last[0]} since step {last[1]} (RankMe "
                             f"{scores['geometry/rankme']:.1f}, cosine of unrelated sentences "
                             f"{scores['geometry/cosine/same']:.2f}).")
    return lines


def neighbors(evaluation):
    """Return the table of queries and what they retrieve, or prompts and answers of a decoder."""
    if evaluation.can_answer:
        prompts, golds, written, _ = evaluation.answers
        right = [*map(metrics.exact, written, golds)]
        rows = [(text(shown(prompt)), mark(good) + text(shown(answer)), text(shown(gold)))
                for prompt, answer, gold, good in zip(prompts, written, golds, right)]
        return Section("Prompts and answers", f"<p>{sum(right)} of {len(rows)} answers are right."
                       "</p>" + table(("prompt", "answer", "gold text"), rows))
    found = panels.neighbors(evaluation)
    right = sum(near[0][2] for *_, near in found)
    rows = [(text(column), text(shown(query)), "".join(
        f"<div dir=auto>{mark(good)}{cosine:.2f} {text(shown(near))}</div>"
        for near, cosine, good in nearest)) for column, query, nearest in found]
    return Section("Nearest neighbors", f"<p>The three nearest of {evaluation.rows.count} texts in "
                   f"{text(next(iter(evaluation.rows.texts)))}, by cosine. The nearest is the "
                   f"translation for {right} of {len(found)} queries.</p>"
                   + table(("", "query", "nearest, with their cosines"), rows))


def mark(right):
    return "<b class=right>=</b> " if right else "<b class=wrong>!</b> "


def packed(one, evaluation):
    rows, figure = panels.packed_rows(one, evaluation)
    lines = "".join(f"<p class=tokens><b>row {number}</b> "
                    + " ".join(f"<span>{text(shown(word))}</span>" for word in row[:200]) + "</p>"
                    for number, row in enumerate(rows[:8]))
    return Section("The packed batch of two examples", "<p>All rows are one line of tokens. After "
                   f"an arrow: the token to predict there.</p>{lines}", {"mask": figure})


def embeddings(one, opened, evaluation, missing):
    found = {}
    try:
        before = replace(evaluation, model=seen.untrained(one, opened))
        found["untrained"] = panels.embeddings(before, "Embeddings before training")
    except BadInput as error:
        missing[f"{one.name}: embeddings before training"] = str(error)
    found["embeddings"] = panels.embeddings(evaluation, "Embeddings of the trained model")
    joined = " A gray line joins translations." if len(evaluation.rows.texts) > 1 else ""
    return Section("Embeddings", f"<p>{text(evaluation.rows.label)}, in the plane of their two "
                   f"principal components.{joined}</p>", found)


def learned(one, missing, data, langs):
    """Return the sections about the model of a run. `missing` gets {title: reason}."""
    try:
        opened, evaluation = seen.evaluation(one, data, langs)
    except BadInput as error:
        missing[f"{one.name}: everything about its model"] = str(error)
        return []
    return collect({
        f"{one.name}: embeddings": lambda: embeddings(one, opened, evaluation, missing),
        f"{one.name}: nearest neighbors": lambda: neighbors(evaluation),
        f"{one.name}: cosines": lambda: Section(
            "Cosines", "", {"cosines": panels.cosines(evaluation)}),
        f"{one.name}: attention": lambda: Section(
            "Attention", "", {"attention": panels.attention(evaluation)}, True),
        f"{one.name}: packed batch and mask": lambda: packed(one, evaluation)}, missing)


def collect(makers, missing):
    """Return the sections of {title: function}; `missing` gets {title: reason} of the others."""
    found = []
    for title, make in makers.items():
        try:
            found.append(make())
        except BadInput as error:
            missing[title] = str(error)
    return found


# ---- the page


def all_sections(every, data="", langs=()):
    """Return [(heading, sections)] of some Seen, and {what is left out: the reason}."""
    groups = seen.grouped(every)
    missing = {}
    chapters = [("", collect({
        "what was trained": lambda: trained(every), "results": lambda: results(groups),
        "curves": lambda: along_training(groups), "health": lambda: health(groups)}, missing))]
    for members in groups.values():
        of = f" of {members[0].name}" if len(every) > 1 else ""
        chapters.append((f"What the model{of} learned", learned(members[0], missing, data, langs)))
    return chapters, missing


def html_page(every, data="", langs=(), figures=None):
    """Return the page of some Seen as HTML. `figures` gets {name: Figure} of its pictures."""
    chapters, missing = all_sections(every, data, langs)
    figures = {} if figures is None else figures
    title = " and ".join(one.name for one in every[:3]) + " ..." * (len(every) > 3)
    out = io.StringIO()
    out.write(HEAD.format(title=text(title), style=STYLE) + f"<h1>{text(title)}</h1>")
    for number, (heading, sections) in enumerate(chapters):
        out.write(f"<h2>{text(heading)}</h2>" * bool(heading and sections))
        for section in sections:
            kind = "wide" if section.wide else "panels"
            out.write(f"<section><h3>{text(section.title)}</h3>{section.words}<div class={kind}>")
            for name, figure in section.panels.items():
                name = f"{name}-{number}" if number > 1 else name
                figures[name] = figure
                out.write(f'<figure aria-label="{text(name)}">'
                          f"{plots.svg(figure, f'f{len(figures)}')}</figure>")
            out.write("</div></section>\n")
    if missing:
        rows = [map(text, row) for row in missing.items()]
        out.write(f"<section><h3>Left out</h3>{table(('what', 'why'), rows)}</section>")
    out.write("</body></html>\n")
    return out.getvalue()


def page_command(words):
    parser = Parser("python -m look", "Write the page of a run, or of several in the same panels.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, such as out/mexma")
    parser.add_argument("--out", help="file to write [beside the first RUN: out/mexma.html]")
    parser.add_argument("--png", metavar="FOLDER", help="also write each picture as a PNG file")
    parser.add_argument("--data", default="", help="rows to look at [the run's held-out rows]")
    parser.add_argument("--langs", type=comma_list, default=(), help="columns of --data")
    parser.add_argument("--objective", metavar="FILE", help="the file of an objective of your own")
    options = parser.parse_args(words)
    kind = find_objective(options.objective) if options.objective else None
    every = [seen.see(run, kind) for run in options.runs]
    figures = {}
    page = html_page(every, options.data, options.langs, figures)
    folder = every[0].run if every[0].run.name.strip(".") else every[0].run.resolve()  # "." or ".."
    out = Path(options.out or folder.with_name(f"{folder.name}.html"))
    with atomic_file(out) as file:
        file.write(page.encode())
    if options.png:
        make_folder(options.png, "--png")
        for name, figure in figures.items():
            with atomic_file(Path(options.png) / f"{name.replace('/', '-')}.png") as file:
                file.write(plots.png(figure))
    print(out)
