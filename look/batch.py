"""Print one batch of an objective: the rows of each packed line as text, and its attention mask.

    python -m look batch --objective hybrid

objectives.py explains the lines of a batch, above the objective's collate.
"""

import itertools
import textwrap

import train
from base.common import Parser, shown
from data import Packed
from harness import settings


def token_rows(batch, part, tokenizer):
    """Return the rows of a packed line, each a list: every token as text, and after an arrow the
    token to predict there."""
    tokens = batch[part].tokens.clone()
    targets = {}
    if part == "predictor_packed":  # a line of hidden states: show the tokens that they belong to
        tokens[batch["context_to"]] = batch["packed"].tokens[batch["context_from"]]
        tokens[batch["block_to"]] = -1
        ids = batch["clean"].tokens[batch["block_from"]]
        targets = dict(zip(batch["block_to"].tolist(), ids.tolist()))
    elif part != "clean" and "target_positions" in batch:
        targets = dict(zip(batch["target_positions"].tolist(), batch["targets"].tolist()))

    def name(token):
        if token in tokenizer.special.ids:
            return tokenizer.inner.id_to_token(token)
        return "?" if token < 0 else shown(tokenizer.decode([token]).strip()) or "␣"

    texts = [f"{name(token)}→{name(targets[index])}" if index in targets else name(token)
             for index, token in enumerate(tokens.tolist())]
    return [texts[start:end]
            for start, end in itertools.pairwise(batch[part].cu_seqlens.tolist())]


def batch_command(words):
    parser = Parser("python -m look batch", "Print one batch of an objective. Accepts every "
                    "flag of train.py; --batch is 2.")
    _, rest = parser.parse_known_args(words)
    run = train.Run(*settings.parse(["--batch", "2", *rest]), writes=False)
    batch, *_ = run.make_batch(0)
    for part, packed in batch.items():
        if not isinstance(packed, Packed):
            continue
        if part in ("packed", "clean"):  # what the model reads, maybe with a window
            packed = packed.within(min(run.model.config.windows, default=0))
        visible = packed.visible_pairs() / len(packed.tokens) ** 2
        print(f"{part}: {visible:.0%} of all pairs of tokens see each other; →word: predict this "
              "word here\n")
        for number, texts in enumerate(token_rows(batch, part, run.data.tokenizer)):
            print(textwrap.fill(f"{number:>4} {' '.join(texts)}", 100, subsequent_indent="     ",
                                break_on_hyphens=False))
        print("", packed, "", sep="\n")
