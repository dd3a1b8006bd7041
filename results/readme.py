"""Put recorded numbers into README.md: between `<!-- from results/X.md -->` and `<!-- end -->`
stands the first table of that file; `<!-- from results/X.md: A; B -->` keeps its columns A and B.

    python -m results readme             # writes README.md
    python -m results readme --check     # writes nothing; status 1 if it says anything else
"""

import re
from operator import itemgetter

from corpora.program import BadInput, Parser
from corpora.text import write_atomic

from .compare import ROOT, markdown

BLOCK = re.compile(r"(<!-- from (\S+\.md)(?:: (.*?))? -->\n).*?(?=<!-- end -->)", re.S)


def recorded(block):
    """A block as it should be. BadInput if the file that it names has no such columns."""
    table = re.search(r"(?:^\|.*\n)+", (ROOT / block[2]).read_text(encoding="utf-8"), re.M)
    head, _, *rows = [re.split(r" ?\| ?", line)[1:-1] for line in table[0].splitlines()]
    wanted = block[3].split("; ") if block[3] else head[1:]
    missing = [name for name in wanted if name not in head]
    if missing:
        raise BadInput(f"{block[2]} has no column {missing[0]!r}: it has {', '.join(head)}")
    chosen = [0, *map(head.index, wanted)]
    head, *rows = [itemgetter(*chosen)(row) for row in (head, *rows)]
    return block[1] + "\n".join(markdown(head, rows)) + "\n"


def main(arguments):
    parser = Parser("python -m results readme", __doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    path = ROOT / "README.md"
    before = path.read_text(encoding="utf-8")
    after, tables = BLOCK.subn(recorded, before)
    if not tables:
        raise BadInput("README.md has no table that is written from records")
    if after != before and options.check:
        print("README.md does not say what is recorded: run python -m results readme")
        return 1
    if after != before:
        write_atomic(path, after.encode())
    return 0
