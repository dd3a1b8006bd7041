"""A trained model as a function of texts, in Python and from the command line.

    python evaluate.py export out/x folder                              # a folder that AutoModel and SentenceTransformer open
    python evaluate.py encode out/x lines.txt --out vectors.npy         # one vector a line
    python evaluate.py nearest out/x lines.txt --query "Two dogs play." # the lines that mean nearly the same

out/x may be a run, a folder with a pretrained model, or its name on the Hugging Face hub.
"""

import argparse
import io
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import data
from checkpoints import export, open_model
from data import BadInput
from evaluate import embed_rows, reported, rows_of
from metrics import neighbours


class Encoder:
    """A run, a folder or a name on the hub as a function of texts."""

    def __init__(self, name, device=None):
        self.loaded = open_model(name, device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def encode(self, texts):
        """N texts -> float32 array (N, D)."""
        rows = rows_of(self.loaded.tokenizer, texts, None, self.loaded.frame, self.loaded.longest)
        vectors = embed_rows(self.loaded.model, rows, progress=True)
        if bad := int((~vectors.isfinite()).any(1).sum()):
            raise BadInput(f"the model gives NaN or infinity for {bad} of {len(vectors)} texts: its training has diverged")
        return (F.normalize(vectors) if self.loaded.unit else vectors).numpy()


def read_lines(path):
    """The lines of a text file (.gz and .xz too), empty ones included, so that line i has vector i."""
    try:
        lines = [line.decode() for _, line in data.read_lines(Path(path))]
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 ({error.reason}): convert it, say with iconv -f latin1 -t utf-8") from None
    if not lines:
        raise BadInput(f"{path} is empty: it must have a text on each line")
    return lines


def main(arguments=None):
    """Returns the exit status: 0, or 2 for bad input, which is one line on stderr."""
    parser = argparse.ArgumentParser(prog="evaluate.py", allow_abbrev=False, description="Write a model for other libraries, or use it.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command, said in (("export", "write a folder that AutoModel and SentenceTransformer open"), ("encode", "write one vector a line of text"),
                          ("nearest", "find the lines that mean nearly the same as a query")):
        one = commands.add_parser(command, allow_abbrev=False, help=said, description=said)
        one.add_argument("run", metavar="RUN", help="a run, such as out/mexma, a folder, or a name on the Hugging Face hub")
        one.add_argument(*(["folder"] if command == "export" else ["file"]), metavar="FOLDER" if command == "export" else "FILE",
                         help="folder to write, new or empty" if command == "export" else "a text on each line; also .gz and .xz")
        if command == "encode":
            one.add_argument("--out", required=True, metavar="FILE", help="array (lines, width) in NumPy's format, .npy")
        if command == "nearest":
            one.add_argument("--query", action="append", metavar="TEXT", help="what to look for; may be given again (default: the lines of stdin)")
            one.add_argument("--count", type=int, default=5, metavar="N", help="lines to print for each query (default: 5)")
    options = parser.parse_args(arguments)
    return reported({"export": export_run, "encode": encode_file, "nearest": nearest}[options.command], options)


def export_run(options):
    print(f"{export(options.run, options.folder)}: written, read back and compared, bit for bit")


def encode_file(options):
    lines, buffer = read_lines(options.file), io.BytesIO()
    if Path(options.out).is_dir() or not Path(options.out).absolute().parent.is_dir():
        raise BadInput(f"--out {options.out} must be a file in a folder that is there: name another")
    vectors = Encoder(options.run).encode(lines)
    np.save(buffer, vectors)
    data.write_atomic(options.out, buffer.getbuffer())
    print(f"{options.out}: {len(vectors):,} vectors of {vectors.shape[1]} numbers, float32")


def nearest(options):
    """The nearest lines of a file by cosine, best first: cosine, number of the line, the line."""
    lines, queries = read_lines(options.file), options.query or [line.rstrip("\r\n") for line in sys.stdin]
    if not 1 <= options.count <= len(lines) or not queries:
        raise BadInput(f"count is {options.count}: it must be 1 to {len(lines)}, the lines of {options.file}, and there must be a query")
    encoder = Encoder(options.run)
    cosines, places = neighbours(*(torch.from_numpy(encoder.encode(texts)) for texts in (queries, lines)), options.count)
    for query, found, where in zip(queries, cosines.tolist(), places.tolist()):
        print(query)
        for cosine, place in zip(found, where):
            print(f"  {cosine:.3f}  {place + 1}  {lines[place]}")
