"""Put the recorded numbers into the README: each block between `<!-- from results/X.md ... -->` and `<!-- end -->` is the first table of that file.

    python results/readme.py                       # writes README.md
    python results/readme.py --check               # exits with 1 and names the block if the README says anything else

`<!-- from results/X.md rows A; B -->` keeps the rows that hold the text A or the text B; `table 2` takes the second table.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- from (results/\S+\.md)(?: table (\d+))?(?: rows (.*?))? -->\n)(.*?)(?=<!-- end -->)", re.S)


def recorded(name, number, rows):
    """The table of a results file as Markdown, whole lines."""
    tables = re.findall(r"(?:^\|.*\n)+", (ROOT / name).read_text(encoding="utf-8"), re.M)
    if len(tables) < number:
        sys.exit(f"{name} has {len(tables)} tables, the README asks for number {number}")
    head, line, *body = tables[number - 1].splitlines(keepends=True)
    kept = [row for row in body if rows is None or any(part.strip() in row for part in rows.split(";"))]
    if not kept:
        sys.exit(f"{name} has no row with {rows!r}")
    return head + line + "".join(kept)


def main(check):
    path = ROOT / "README.md"
    before = path.read_text(encoding="utf-8")
    after = BLOCK.sub(lambda block: block[1] + recorded(block[2], int(block[3] or 1), block[4]), before)
    if not check:
        path.write_text(after, encoding="utf-8")
    elif after != before:
        wrong = [one[1].strip() for one, two in zip(BLOCK.finditer(before), BLOCK.finditer(after)) if one[0] != two[0]]
        print(f"README.md does not say what is recorded: {', '.join(wrong)}; run python results/readme.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
