"""What experiments.json says, and how a table is written. Standard library alone: a benchmark on a
bare machine needs nothing more."""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
DATA = json.loads((ROOT / "results/experiments.json").read_text(encoding="utf-8"))


def markdown(heads, rows):
    """Headings and rows of cells -> the lines of a Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for row in rows:
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return lines
