"""Print one batch of an objective: its rows as text, and the attention mask of one row.

    python -m results inspect --objective llm-jepa --data regex     # and any other flag of train.py
    python -m results inspect --objective hybrid --part predict --row 1

objectives.py explains the keys of a batch, above the objective's collate.
"""

import textwrap

import train
from common import BadInput, Parser
from model import Packed

GRID = 64  # largest number of tokens whose mask is drawn


def token_texts(batch, part, tokenizer):
    """Return each token of a packed line as text, and after an arrow the token to predict there."""
    tokens = batch[part].tokens.clone()
    targets = {}
    if part == "predict":  # a line of hidden states: show the tokens that they belong to
        tokens[batch["context_slots"]] = batch["packed"].tokens[batch["context_index"]]
        tokens[batch["mask_index"]] = -1
        ids = batch["clean"].tokens[batch["target_index"]]
        targets = dict(zip(batch["mask_index"].tolist(), ids.tolist()))
    elif part != "clean" and "target_positions" in batch:
        targets = dict(zip(batch["target_positions"].tolist(), batch["targets"].tolist()))

    def name(token):
        if token in tokenizer.special.ids:
            return tokenizer.inner.id_to_token(token)
        return "?" if token < 0 else tokenizer.decode([token]).strip() or "␣"

    return [f"{name(token)}→{name(targets[index])}" if index in targets else name(token)
            for index, token in enumerate(tokens.tolist())]


def row_lines(packed, texts, row):
    """Return a row as text, one segment per line, and what the segment's tokens see."""
    start, end = packed.cu_seqlens[row:row + 2].tolist()
    first = packed.key_ranges[:, 0].tolist()  # the tokens of a segment have the same first key
    edges = [index for index in range(start + 1, end) if first[index] != first[index - 1]]
    lines = []
    for begin, stop in zip([start, *edges], [*edges, end]):
        _, last, low, high = packed.key_ranges[begin].tolist()
        kind = "causal" if stop - begin > 1 and last == begin + 1 else "bidirectional"
        also = f", also sees tokens {low - start} to {high - start - 1} of the row"
        text = f"{row:>4} {' '.join(texts[begin:stop])}"
        lines += textwrap.wrap(text, 100, subsequent_indent="     ", break_on_hyphens=False)
        lines.append(f"     ({stop - begin} tokens, {kind}{also if low < high else ''})")
    return lines


def mask_lines(packed, texts, row):
    """Return the mask of a row's first tokens: one line per query, one column per key."""
    start = int(packed.cu_seqlens[row])
    lines = []
    for query, keys in enumerate(packed.mask(row)[:GRID, :GRID].tolist(), start):
        marks = "".join("#" if sees else "." for sees in keys)
        lines.append(f"{int(packed.positions[query]):>4} {texts[query][:28]:<28} {marks}")
    return lines


def inspect_command(words):
    parser = Parser("python -m results inspect", "Print one batch of an objective. Accepts every "
                    "flag of train.py; --batch is 2.")
    parser.add_argument("--row", type=int, default=0, help="row whose mask is drawn [0]")
    parser.add_argument("--part", default="packed", help="which line of the batch: packed, "
                        "head_packed, clean or predict [packed]")
    options, rest = parser.parse_known_args(words)
    run = train.Run(*train.parse(["--batch", "2", *rest]), writes=False)
    batch, *_ = run.make_batch(0)
    parts = [name for name, value in batch.items() if isinstance(value, Packed)]
    if options.part not in parts:
        raise BadInput(f"--part {options.part}: this batch has {', '.join(parts)}")
    packed = batch[options.part]
    if not 0 <= options.row < len(packed):
        raise BadInput(f"--row {options.row}: {options.part} has rows 0 to {len(packed) - 1}")
    texts = token_texts(batch, options.part, run.tokenizer)
    visible = packed.visible_pairs() / len(packed.tokens) ** 2
    print(f"{run.objective.name}: {len(packed)} rows, {len(packed.tokens)} tokens in one packed "
          f"line; {visible:.0%} of all pairs see each other\n\n"
          "ROWS, one segment per line; →word: predict this word here\n")
    for row in range(len(packed)):
        print(*row_lines(packed, texts, row), sep="\n")
    print(f"\nMASK of row {options.row}, at most {GRID} tokens: a line is a query, a column a key, "
          "# is visible\n")
    print(*mask_lines(packed, texts, options.row), "\nKEYS of the batch\n", sep="\n")
    for name, value in batch.items():
        size = tuple(value.shape) if hasattr(value, "shape") else value
        if isinstance(value, Packed):
            size = f"{len(value)} rows, {len(value.tokens)} tokens"
        print(f"{name}: {size}")
