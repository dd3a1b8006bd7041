"""Drawings of what an objective reads of one example, from a batch of its own `collate`: MEXMA's
four rows, and the three passes of Predict and Reconstruct.

    python -m results diagrams           # writes results/mexma.png and results/hybrid.png
"""

import numpy as np
from matplotlib.patches import Rectangle

import data
from corpora.folder import write_atomic
from corpora.program import Parser
from objectives import OBJECTIVES

from . import plots
from .tables import ROOT

BLUE = plots.COLOURS[0]  # hidden, to be predicted
ORANGE = plots.COLOURS[1]  # a vector that is given or asked for
GREEN = plots.COLOURS[2]  # a context and its states
PINK = plots.COLOURS[4]  # a word that is restored
PLAIN = "#E8E8E8"
CELL = 0.47  # inches of a column


def sheet(columns, height):
    """A Picture whose x counts columns of cells and whose y counts lines, from above."""
    figure = plots.Picture(figsize=(CELL * (columns + 3.2), 0.3 * height), dpi=160)
    axis = figure.add_axes([0, 0, 1, 1])
    axis.set(xlim=(-3, columns + 0.2), ylim=(height - 0.5, -0.7))
    axis.set_axis_off()
    return figure, axis


def cells(axis, line, label, found):
    """A row of cells, {column: (text, colour)}, and its name at the left."""
    axis.text(-2.9, line, label, fontsize=plots.SMALL, va="center")
    for column, (text, colour) in found.items():
        box = Rectangle((column + 0.04, line - 0.36), 0.92, 0.72, linewidth=0,
                        facecolor=colour, alpha=1 if colour == PLAIN else 0.45)
        axis.add_patch(box)
        axis.text(column + 0.5, line, text, fontsize=plots.SMALL * min(1, 7 / len(text)),
                  family=plots.MONO, ha="center", va="center")


def arrow(axis, column, start, end, style="->", line="-"):
    """In a column, from the edge of the cell in one line to that of the cell in another."""
    way = 0.38 if end > start else -0.38
    axis.annotate("", (column + 0.5, end - way), (column + 0.5, start + way),
                  arrowprops=dict(arrowstyle=style, linestyle=line, linewidth=0.8, shrinkA=0,
                                  shrinkB=0))


def note(axis, x, line, text):
    """Words beside an arrow."""
    axis.text(x, line, text, fontsize=plots.SMALL, va="center", style="italic",
              bbox=dict(facecolor="white", linewidth=0, pad=1))


def tokens_of(packed, row, name):
    """The tokens of one row as text, and their positions."""
    start, end = packed.cu_seqlens[row:row + 2].tolist()
    return [name(token) for token in packed.tokens[start:end]], packed.positions[start:end].tolist()


def mexma(batch, name):
    """The four rows of the first pair, and what the unmasking head reads of them. `name`: id ->
    text."""
    rows = len(batch["packed"]) // 4  # pairs
    texts = [tokens_of(batch["packed"], view * rows, name)[0] for view in range(4)]
    starts = batch["packed"].cu_seqlens[::rows].tolist()
    hidden = dict(zip(batch["target_positions"].tolist(), map(name, batch["targets"])))
    figure, axis = sheet(max(map(len, texts)), 10.6)
    # The lines of the masked row, of what the head reads, and of the other language's clean row.
    for side, masked, head, clean in ((0, 3, 1.5, 0), (1, 6.5, 8, 9.5)):
        own, other = "AB" if side == 0 else "BA"
        row = {column: (text, PLAIN) for column, text in enumerate(texts[3 - side])}
        cells(axis, clean, f"clean {other}", row | {0: ("[CLS]", ORANGE)})
        read = {0: (f"S_{other}", ORANGE)}
        row = {0: ("[CLS]", PLAIN)}
        for column, text in list(enumerate(texts[side]))[1:]:
            word = hidden.get(starts[side] + column)
            row[column] = (text, BLUE if word else PLAIN)
            read[column] = (word, PINK) if word else ("state", PLAIN)
            arrow(axis, column, masked, head)
        cells(axis, head, f"head, restores {own}", read)
        cells(axis, masked, f"masked {own}", row)
        arrow(axis, 0, clean, head)
        note(axis, 0.65, (clean + head) / 2, f"S_{other}, the vector of the whole sentence")
    arrow(axis, -1.2, 0, 9.5, "<->")
    note(axis, -0.8, 4.75, "S_A and S_B are made equal (align); KoLeo keeps each away from its "
         "nearest neighbour")
    return figure


def hybrid(batch, name):
    """Three passes over the first row: the student reads it corrupted, and its context alone; the
    teacher reads it clean; the predictor guesses the teacher's states. A column is a position."""
    packed = batch["packed"]
    rows = len(packed) // 2
    words, _ = tokens_of(packed, 0, name)
    context, kept = tokens_of(packed, rows, name)
    clean, _ = tokens_of(batch["clean"], 0, name)
    hidden = dict(zip(batch["target_positions"].tolist(), map(name, batch["targets"])))
    asked = set(batch["mask_index"].tolist())
    blocks = []
    for row in range(len(batch["predict"]) // rows):
        start, end = batch["predict"].cu_seqlens[row:row + 2].tolist()
        where = batch["predict"].positions[start:end].tolist()
        blocks.append([place for i, place in enumerate(where, start) if i in asked])
    student = 2 * len(blocks) + 2  # its line
    figure, axis = sheet(len(words), student + 5)
    targets = set().union(*blocks)
    cells(axis, 0, "teacher: the clean row", {
        place: (text, ORANGE if place in targets else PLAIN) for place, text in enumerate(clean)})
    note(axis, -2.9, 1, "L_J: each ? meets\nthe teacher's state")
    for number, block in enumerate(blocks, 1):
        line = 2 * number
        cells(axis, line, f"predictor, block {number}",
              dict.fromkeys(kept, ("state", GREEN)) | dict.fromkeys(block, ("?", BLUE)))
        for place in block:
            arrow(axis, place, line, 0)
        for place in kept:
            # Every block is asked for alone: the dotted lines are the same states once more.
            last = number == len(blocks)
            arrow(axis, place, line + 2, line, "->" if last else "-", "-" if last else ":")
    cells(axis, student, "student: the context",
          {place: (text, GREEN) for place, text in zip(kept, context)})
    cells(axis, student + 2, "student: all words", {
        place: (text, BLUE if place in hidden else PLAIN) for place, text in enumerate(words)})
    note(axis, -2.9, student + 3, "L_M: cross-entropy")
    row = {place: (word, PINK) for place, word in hidden.items() if place < len(words)}
    cells(axis, student + 4, "regressor: the words", row)
    for place in row:
        arrow(axis, place, student + 2, student + 4)
    return figure


def example_of(objective, corpus, row, length, seed):
    """A batch of one example, its texts cut, and what names its tokens."""
    kind = OBJECTIVES[objective]
    texts = [ids[:length] for ids in corpus.example(row, kind.views, choice=0)]
    options = {"min_keep": 0} if objective == "hybrid" else {}
    batch = kind.collate([texts], np.random.default_rng(seed), kind.Config(**options),
                         corpus.special)

    def name(index):
        return corpus.tokenizer.inner.decode([int(index)], skip_special_tokens=False).strip()

    return batch, name


def main(arguments):
    Parser("python -m results diagrams", __doc__).parse_args(arguments)
    pairs = data.open_corpus("toy", langs=["en", "de"], count=2000)
    texts = data.open_corpus("documents", count=1000)
    pictures = {"mexma": mexma(*example_of("mexma", pairs, 355, 10, 5)),
                "hybrid": hybrid(*example_of("hybrid", texts, 0, 12, 5))}
    for name, figure in pictures.items():
        write_atomic(ROOT / f"results/{name}.png", plots.png(figure))
        print(f"results/{name}.png")
