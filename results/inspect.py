"""One batch of an objective, as text and as the mask of one sequence.

    python -m results inspect --objective llm-jepa         # and any flag of train.py
    python -m results inspect --objective mexma --row 4 --step 3
    python -m results inspect --objective hybrid --line predict --row 1

It knows no objective: names are found from the keys that a collate lists, and from key_ranges.
"""
# First the names of rows and of their parts, then tokens as text, then what is printed.

import textwrap
from typing import NamedTuple

import numpy as np

import train
from corpora.program import BadInput, Parser
from model import Packed

WIDTH = 100
GRID = 64  # tokens of a grid at most; what is left of the width names them
KEYS = {
    "packed": "the one line of tokens, all rows end to end, and what each token may see",
    "target_positions": "places in the line that are scored: logits are made of their states alone",
    "targets": "the id that is wanted at each of these places",
    "num_targets": "how many tokens each loss over tokens is averaged over",
    "head_packed": "the masked rows again, for the unmasking head: it reads their states, with the "
    "other language's clean sentence vector at place 0",
    "targets_per_side": "how many of the targets are in A, and how many in B",
    "seed": "of a loss that draws: every process must draw the same",
    "cls_index": "where the vectors are in the line: of all first sentences, then of the second",
    "vector_index": "where each Text's vector is in the line, and each Code's: one predicts the "
    "other",
    "clean": "the rows without masks, which the teacher reads",
    "predict": "the predictor's rows: the context of a row, then one hidden block to be guessed",
    "context_index": "where in the line the state of each context token is found",
    "context_slots": "where in the predictor's line this state is laid",
    "mask_index": "where in the predictor's line a mask token stands: the guesses are read there",
    "target_index": "where in the teacher's line the state is that each guess is compared with",
}

# --------------------------------------------------------------------------------------------------
# Names: what a row is, and the parts of it


class Part(NamedTuple):
    """Tokens start <= i < end of a line under a name, and the segment (first, end) they lie in."""
    name: str
    start: int
    end: int
    segment: tuple
    causal: bool  # read from left to right


def split(marks, start, end):
    """Stretches (start, end) of the line in which a mark (T,) does not change."""
    edges = [i for i in range(start + 1, end) if marks[i] != marks[i - 1]]
    return list(zip([start, *edges], [*edges, end]))


def parts(batch, line, row, special):
    """The named parts of a row of batch[line], from left to right."""
    packed = batch[line]
    tokens = packed.tokens
    found = []
    # All tokens of a segment have the same first key.
    for segment in split(packed.key_ranges[:, 0], *packed.cu_seqlens[row:row + 2].tolist()):
        first, end = segment
        causal = int(packed.key_ranges[first, 1]) == first + 1 < end
        name = row_name(batch, line, row)
        other = name
        marks = np.zeros(len(tokens))
        if line == "predict":
            marks = np.isin(np.arange(len(tokens)), batch["mask_index"])
            name = "context"
            other = "targets"
        elif causal:
            marks = np.isin(tokens, special.preds)
            name = causal_name(batch, segment)
            other = "[PRED]"
        elif line == "packed" and name.startswith("clean"):
            # BERT-JEPA's other sentence may be hidden behind mask tokens.
            marks = (tokens == special.mask).numpy()
            other = f"hidden {'A' if name.endswith('B') else 'B'}"
        elif name == "masked pair":
            marks = ((tokens == special.cls).cumsum(0) - (tokens[:first] == special.cls).sum()) > 1
            name = "masked A"
            other = "masked B"
        for start, stop in split(marks, *segment):
            found.append(Part(other if marks[start] else name, start, stop, segment, causal))
    return found


def causal_name(batch, segment):
    """Text, answer or Code: a Code holds the vector of one, an answer shares a Text."""
    for name, index in zip(("Text", "Code"), batch.get("vector_index", ())):
        if ((index >= segment[0]) & (index < segment[1])).any():
            return name
    low, high = batch["packed"].key_ranges[segment[0], 2:].tolist()
    return "answer" if low < high else "Text"


def row_name(batch, line, row):
    """What a row is whose tokens see each other; A and B are the two texts of an example."""
    rows = len(batch[line])
    if line != "packed" or "vector_index" in batch:
        return "masked" if line == "head_packed" else line
    if "head_packed" in batch:
        masked = len(batch["head_packed"])
        pairs = masked // len(batch["num_targets"])
        if row < masked:
            return f"masked {'AB'[row // pairs]}"
        # The last rows are clean B; before them is clean A, unless B alone is read clean.
        return f"clean {'AB'[(row - rows) // pairs]}"
    if "cls_index" in batch:
        pairs = len(batch["cls_index"]) // 2
        if row >= rows - 2 * pairs:
            return f"clean {'AB'[(row - rows) // pairs]}"
        return f"masked {'AB'[row // pairs]}" if rows == 4 * pairs else "masked pair"
    if "predict" in batch and row >= len(batch["clean"]):
        return "context"
    return "masked" if "target_positions" in batch else f"clean {'AB'[row * 2 // rows]}"


# --------------------------------------------------------------------------------------------------
# Tokens as text


class Words:
    """The tokens of a line as text, with what is wanted at some of them: `wanted` {place: id}."""

    def __init__(self, batch, line, tokenizer):
        self.tokenizer = tokenizer
        self.tokens = batch[line].tokens.clone()
        self.wanted = {}
        self.guessed = line == "predict"
        if self.guessed:
            # A line of states, not of tokens: shown are the tokens that the states are of.
            self.tokens[batch["context_slots"]] = batch["packed"].tokens[batch["context_index"]]
            ids = batch["clean"].tokens[batch["target_index"]]
            self.wanted = dict(zip(batch["mask_index"].tolist(), ids.tolist()))
        elif line != "clean" and "target_positions" in batch:
            self.wanted = dict(zip(batch["target_positions"].tolist(), batch["targets"].tolist()))

    def name(self, token):
        if token in self.tokenizer.special.ids:
            return self.tokenizer.inner.id_to_token(token)
        return self.tokenizer.inner.decode([token]).strip() or "␣"

    def change(self, place):
        """A place as "read→wanted"; just what is read there if nothing is wanted."""
        read = self.name(int(self.tokens[place]))
        if place not in self.wanted:
            return read
        read = "?" if self.guessed else read.removeprefix("[").removesuffix("]")
        return f"{read}→{self.name(self.wanted[place])}"

    def text(self, part):
        """A part as text, a space between tokens, targets marked as LEGEND says."""
        written = []
        for place in range(part.start, part.end):
            read = self.name(int(self.tokens[place]))
            stands = self.wanted.get(place - part.causal) == int(self.tokens[place])
            if part.causal:
                is_target = stands and place > part.segment[0]
                written.append(f"_{read}_" if is_target else read)
                follows = place + 1 < part.segment[1] and int(self.tokens[place + 1])
                if self.wanted.get(place, follows) != follows:
                    written.append(f"→{self.name(self.wanted[place])}")
            elif stands and not self.guessed:
                written.append(f"_{read}_")
            else:
                written.append(f"[{self.change(place)}]" if place in self.wanted else read)
        return " ".join(written)


LEGEND = {
    False: "_word_: a target that still stands there; [MASK→word]: what stands there→is wanted",
    True: "_word_: a target, to be written after what stands left of it; →word: what is wanted "
    "where the row goes on otherwise, or ends",
}

# --------------------------------------------------------------------------------------------------
# What is printed


def grid(packed, row, named, words):
    """The mask of a row: a line a query, a column a key. Of long parts both ends are drawn."""
    start = int(packed.cu_seqlens[row])
    mask = packed.mask(row)
    room = GRID
    drawn = {}
    for number, part in enumerate(sorted(named, key=lambda part: part.end - part.start)):
        keep = min(part.end - part.start, max(2, room // (len(named) - number)))
        room -= keep
        drawn[part] = [*range(part.start, part.start + (keep + 1) // 2),
                       *range(part.end - keep // 2, part.end)]
    keys = sorted(sum(drawn.values(), []))
    lines = []
    for part in named:
        for number, place in enumerate(drawn[part]):
            if number and place > drawn[part][number - 1] + 1:
                hidden = part.end - part.start - len(drawn[part])
                lines.append(f"     ... {hidden} tokens not drawn")
            cells = "".join("#" if mask[place - start, key - start] else "." for key in keys)
            lines.append(f"{int(packed.positions[place]):>4} {part.name:<8} "
                         f"{words.change(place)[:20]:<20} {cells}")
    return lines


def sees(packed, named):
    """A sentence for each segment of a row: what its tokens may see."""
    said = []
    for segment in dict.fromkeys(part.segment for part in named):
        own = [part for part in named if part.segment == segment]
        text = f"{' with '.join(dict.fromkeys(part.name for part in own))}: "
        text += f"{segment[1] - segment[0]} tokens, each of which sees the whole segment"
        if own[0].causal:
            text = text.replace("the whole segment", "the segment up to itself")
        low, high = packed.key_ranges[segment[0], 2:].tolist()
        if low < high:
            shared = [part.name for part in named if part.start < high and part.end > low]
            first = "token" if high - low == 1 else f"{high - low} tokens"
            text += f", and the first {first} of the row, shared with {' and '.join(shared)}"
        said.append(text + ".")
    return said


def fill(text, indent=4):
    """Text in lines that fit the screen."""
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)


def page(batch, tokenizer, line="packed", row=0):
    """-> lines: every row as text, the mask of one, what each key of the batch is."""
    packed = batch[line]
    words = Words(batch, line, tokenizer)
    lines = []
    for number in range(len(packed)):
        for part in parts(batch, line, number, tokenizer.special):
            label = number if part.start == packed.cu_seqlens[number] else ""
            lines += fill(f"{label:>4} {part.name:<8} {words.text(part)}", 14)
    named = parts(batch, line, row, tokenizer.special)
    lines = ["THE ROWS of the line", *fill(LEGEND[named[0].causal], 0), "", *lines, ""]
    lines += fill(f"THE MASK of row {row}, {line}.mask({row}): a line is a token that asks, a "
                  "column one that it may see (#) or not (.). In front: its position, its part, "
                  "its text, and behind → what is wanted there.", 0)
    lines += ["", *grid(packed, row, named, words), ""]
    for sentence in sees(packed, named):
        lines += fill(sentence)
    lines += ["", "THE KEYS of the batch, which the objective's forward reads", ""]
    for name, value in batch.items():
        size = f" {tuple(value.shape)}" if hasattr(value, "shape") else ""
        if isinstance(value, Packed):
            size = f" ({len(value)} rows, {len(value.tokens)} tokens)"
        about = KEYS.get(name, "of this objective: see the comment above its collate")
        lines += fill(f"{name}{size}: {about}.")
    return lines


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
    lines = fill(f"{settings.kind.name.upper()}. {about}", 0)
    lines += fill(f"{len(examples)} examples of {corpus.name}, step {options.step}: {len(packed)} "
                  f"rows, {len(packed.tokens)} tokens in one line; of all pairs of its tokens "
                  f"{seen:.0%} may see each other.", 0)
    print(*lines, "", *page(batch, corpus.tokenizer, options.line, options.row), sep="\n")
