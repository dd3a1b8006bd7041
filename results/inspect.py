"""One batch of an objective: its rows as text, and the mask of one row.

    python -m results inspect --objective llm-jepa         # and any flag of train.py
    python -m results inspect --objective mexma --row 4 --step 3
    python -m results inspect --objective hybrid --line predict --row 1

What the keys of a batch are stands above the objective's collate in objectives.py.
"""

import textwrap

import train
from corpora.program import BadInput, Parser
from model import Packed

WIDTH = 100
GRID = 64  # tokens of a drawn mask at most; what is left of the width names them

# ---- tokens as text


class Words:
    """The tokens of a line as text, with what is wanted at some of them: `wanted` {place: id}."""

    def __init__(self, batch, line, tokenizer):
        self.tokenizer = tokenizer
        self.packed = batch[line]
        self.tokens = self.packed.tokens.clone()
        self.wanted = {}
        self.unknown = set()  # places that hold nothing to be read
        if line == "predict":
            # A line of states: shown are the tokens that the states are of.
            self.tokens[batch["context_slots"]] = batch["packed"].tokens[batch["context_index"]]
            ids = batch["clean"].tokens[batch["target_index"]]
            self.wanted = dict(zip(batch["mask_index"].tolist(), ids.tolist()))
            self.unknown = set(self.wanted)
        elif line != "clean" and "target_positions" in batch:
            self.wanted = dict(zip(batch["target_positions"].tolist(), batch["targets"].tolist()))

    def name(self, token):
        if token in self.tokenizer.special.ids:
            return self.tokenizer.inner.id_to_token(token)
        return self.tokenizer.inner.decode([token]).strip() or "␣"

    def at(self, place):
        """What is read at a place of the line, and behind an arrow what is wanted there."""
        read = "?" if place in self.unknown else self.name(int(self.tokens[place]))
        return f"{read}→{self.name(self.wanted[place])}" if place in self.wanted else read

    def segments(self, row):
        """Places (start, end) of the segments of a row: their tokens have the same first key."""
        start, end = self.packed.cu_seqlens[row:row + 2].tolist()
        first = self.packed.key_ranges[:, 0]
        edges = [place for place in range(start + 1, end) if first[place] != first[place - 1]]
        return list(zip([start, *edges], [*edges, end]))


def sees(packed, start, end):
    """What the tokens of a segment may see, as a text."""
    low, high = packed.key_ranges[start, 2:].tolist()
    causal = end - start > 1 and int(packed.key_ranges[start, 1]) == start + 1
    text = "each sees the segment up to itself" if causal else "each sees the whole segment"
    if low < high:
        first = int(packed.cu_seqlens[packed.cu_seqlens <= start][-1])
        text += f", and the row's {high - low} tokens from place {low - first} on"
    return f"{end - start} tokens, {text}"


# ---- what is printed


def fill(text, indent=0):
    """Text in lines that fit the screen."""
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)


def rows_as_text(words):
    """A line for each segment of each row, and what its tokens see."""
    lines = []
    for row in range(len(words.packed)):
        for number, (start, end) in enumerate(words.segments(row)):
            text = " ".join(words.at(place) for place in range(start, end))
            label = row if number == 0 else ""
            lines += fill(f"{label:>4} {text}", 5)
            lines.append(f"     ({sees(words.packed, start, end)})")
    return lines


def mask_as_text(words, row):
    """The mask of a row, a line a token that asks and a column a key. Of a long row both ends."""
    start, end = words.packed.cu_seqlens[row:row + 2].tolist()
    mask = words.packed.mask(row)
    places = list(range(start, end))
    hidden = len(places) - GRID
    if hidden > 0:
        places[GRID // 2:-GRID // 2] = []
    lines = []
    for number, place in enumerate(places):
        if hidden > 0 and number == GRID // 2:
            lines.append(f"     ... {hidden} tokens not drawn")
        cells = "".join("#" if mask[place - start, key - start] else "." for key in places)
        lines.append(f"{int(words.packed.positions[place]):>4} {words.at(place)[:28]:<28} {cells}")
    return lines


def batch_as_text(batch, tokenizer, line="packed", row=0):
    """-> lines: every row of a line of the batch, the mask of one row, the sizes of all keys."""
    words = Words(batch, line, tokenizer)
    lines = ["THE ROWS of the line, segment by segment; →word: what is wanted there", ""]
    lines += [*rows_as_text(words), ""]
    lines += fill(f"THE MASK of row {row}, {line}.mask({row}): a line is a token that asks, a "
                  "column one that it may see (#) or not (.). In front: its position, its text.")
    lines += ["", *mask_as_text(words, row), "", "THE KEYS of the batch", ""]
    for name, value in batch.items():
        size = tuple(value.shape) if hasattr(value, "shape") else value
        if isinstance(value, Packed):
            size = f"{len(value)} rows, {len(value.tokens)} tokens"
        lines += fill(f"{name}: {size}", 4)
    return lines


# ---- the command


def main(arguments):
    parser = Parser("python -m results inspect", __doc__, "and every flag of train.py")
    parser.add_argument("--row", type=int, default=0, help="whose mask is drawn [0]")
    parser.add_argument("--rows", type=int, default=2, help="examples in the batch [2]")
    parser.add_argument("--step", type=int, default=0, help="of which training step [0]")
    parser.add_argument("--line", default="packed", help="head_packed, clean or predict [packed]")
    options, rest = parser.parse_known_args(arguments)
    if options.step < 0:
        raise BadInput(f"--step {options.step}: it must not be negative")
    settings = train.parse([*rest, "--batch", str(options.rows)])
    corpus, batches = train.open_training(settings)
    examples = batches.examples(options.step)
    rng = batches.rng(options.step)
    batch = settings.kind.collate(examples, rng, settings.options, corpus.special)
    lines = [name for name, value in batch.items() if isinstance(value, Packed)]
    if options.line not in lines:
        raise BadInput(f"--line {options.line}: this batch has {', '.join(lines)}")
    packed = batch[options.line]
    if not 0 <= options.row < len(packed):
        raise BadInput(f"--row {options.row}: {options.line} has rows 0 to {len(packed) - 1}")
    about = " ".join((settings.kind.__doc__ or "").split("\n\n")[0].split())
    seen = packed.visible_pairs() / len(packed.tokens) ** 2
    lines = fill(f"{settings.kind.name.upper()}. {about}")
    lines += fill(f"{len(examples)} examples of {corpus.name}, step {options.step}: {len(packed)} "
                  f"rows, {len(packed.tokens)} tokens in one line; of all pairs of its tokens "
                  f"{seen:.0%} may see each other.")
    lines += ["", *batch_as_text(batch, corpus.tokenizer, options.line, options.row)]
    print(*lines, sep="\n")
