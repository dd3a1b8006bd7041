"""Draw the README's picture: the packed line of one LLM-JEPA example, and what its tokens see.

    python -m results picture results/packed.svg
"""

import numpy as np

from corpora.folder import write_atomic
from model import Packed, Segment

CELL = 21  # pixels of a token
TEXT = ["[CLS]", "lines", "with", "a", "digit", "[PRED]"]
ANSWER = ["[SEP]", ".*", "[0-9]", ".*"]
CODE = [".*", "[0-9]", ".*"]
PARTS = [  # segment, its tokens, colour, what it is for
    ("Text [PRED]", TEXT, "#4c78a8", "its last state predicts the Code's"),
    ("answer", ANSWER, "#e4a23c", "continues the Text: next-token loss"),
    ("Code", CODE, "#59a14f", "alone: the target of the prediction"),
]


def example():
    """One row of three segments, as LLM-JEPA packs it."""
    lengths = [len(tokens) for _, tokens, _, _ in PARTS]
    prefixes = [None, (0, len(TEXT) - 1), (0, 1)]
    segments = [Segment(np.arange(length), True, prefix)
                for length, prefix in zip(lengths, prefixes)]
    return Packed.of_segments([segments])


def label(x, y, text, size=11, anchor="middle", colour="#333"):
    return (f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{colour}" '
            f'font-family="monospace">{text}</text>')


def draw():
    """-> the line of tokens with its key ranges, and its mask, as SVG."""
    packed = example()
    mask = packed.mask(0)
    tokens = []
    for _, line, colour, _ in PARTS:
        tokens += [(token, colour) for token in line]
    left = 330
    top = 40
    size = CELL * len(tokens)
    made = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + size + 20}" '
            f'height="{top + size + 20 * len(PARTS) + 16}">',
            '<rect width="100%" height="100%" fill="white"/>']
    made.append(label(70, 24, "token", anchor="end"))
    made.append(label(120, 24, "position"))
    made.append(label(230, 24, "key_ranges"))
    made.append(label(left + size / 2, 24, "sees (columns: the same line of tokens)"))
    for i, (token, colour) in enumerate(tokens):
        y = top + CELL * i
        made.append(f'<rect x="8" y="{y + 2}" width="66" height="{CELL - 4}" rx="3" '
                    f'fill="{colour}"/>')
        made.append(label(41, y + 15, token, colour="white"))
        made.append(label(120, y + 15, str(int(packed.positions[i]))))
        low, high, low2, high2 = packed.key_ranges[i].tolist()
        shared = f"  {low2}..{high2}" if high2 > low2 else ""
        made.append(label(180, y + 15, f"{low}..{high}{shared}", anchor="start"))
        for j in range(len(tokens)):
            fill = tokens[j][1] if mask[i, j] else "#f0f0f0"
            made.append(f'<rect x="{left + CELL * j + 1}" y="{y + 1}" width="{CELL - 2}" '
                        f'height="{CELL - 2}" fill="{fill}"/>')
    for number, (name, _, colour, meaning) in enumerate(PARTS):
        y = top + size + 20 * number + 20
        made.append(f'<rect x="8" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        made.append(label(28, y, f"{name}: {meaning}", anchor="start"))
    made.append("</svg>")
    return "\n".join(made) + "\n"


def main(arguments):
    write_atomic(arguments[0] if arguments else "results/packed.svg", draw().encode())
