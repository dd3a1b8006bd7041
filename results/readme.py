"""Put recorded numbers into both README.md: between `<!-- from results/X.md -->` and `<!-- end -->`
stands the first table of that file; `<!-- from results/X.md: A; B -->` keeps its columns A and B.

    python -m results readme             # writes both
"""

import re
from operator import itemgetter

from corpora.folder import write_atomic
from corpora.program import BadInput, Parser

from .tables import ROOT

PAGES = (ROOT / "README.md", ROOT / "results/README.md")
BLOCK = re.compile(r"(<!-- from (\S+\.md)(?:: (.*?))? -->\n).*?(?=<!-- end -->)", re.S)


def recorded(block):
    """A block as it should be. BadInput if the file that it names has no such columns."""
    table = re.search(r"(?:^\|.*\n)+", (ROOT / block[2]).read_text(encoding="utf-8"), re.M)
    rows = [re.split(r" ?\| ?", line)[1:-1] for line in table[0].splitlines()]
    head = rows[0]
    wanted = block[3].split("; ") if block[3] else head[1:]
    missing = [name for name in wanted if name not in head]
    if missing:
        raise BadInput(f"{block[2]} has no column {missing[0]!r}: it has {', '.join(head)}")
    chosen = itemgetter(0, *map(head.index, wanted))
    return block[1] + "".join(f"| {' | '.join(chosen(row))} |\n" for row in rows)


def filled(text):
    """A text with its tables as they are recorded. BadInput for one that has none."""
    text, tables = BLOCK.subn(recorded, text)
    if not tables:
        raise BadInput("the page has no table that is written from records")
    return text


def main(arguments):
    Parser("python -m results readme", __doc__).parse_args(arguments)
    for path in PAGES:
        write_atomic(path, filled(path.read_text(encoding="utf-8")).encode())
