"""Other people's models in, standard folders out, and a trained model as a function of texts.

    python -m interop import xlm-roberta-base out/xlmr             # or a folder in their layout
    python -m interop export out/mexma folder                      # for AutoModel and others
    python -m interop encode out/mexma lines.txt --out vectors.npy # one vector a line
    python -m interop nearest out/mexma lines.txt --query "Two dogs play."
"""

import io
import os
import sys
from pathlib import Path

import numpy as np

import evaluate
from corpora.folder import write_atomic
from corpora.program import BadInput, Parser, exit_status, printable, wing_imports
from corpora.text import check_file, read_lines

with wing_imports():
    from interop import huggingface

RUN = "a run folder, such as out/mexma"
LINES = "a text on each line; also .gz, .bz2 and .xz"


def import_run(options):
    found = huggingface.import_model(options.name, options.folder)
    config = found.model.config
    print(f"{options.folder}: {config.layers} layers of width {config.width}, rows of up to "
          f"{config.max_positions:,} tokens; continue with train.py --init {options.folder}")
    print(f"sentence vectors: {found.vectors}; --pool of train.py and evaluate.py takes another")


def export_run(options):
    folder = huggingface.export(options.run, options.folder)
    print(f"{folder}: written, read back and compared, bit for bit")


def encode_file(options):
    lines = texts_of(options.file)
    out = Path(options.out).absolute()
    if out.is_dir() or not out.parent.is_dir():
        raise BadInput(f"--out {options.out} must be a file in a folder that is there")
    if os.path.lexists(out) and not is_array(out):
        raise BadInput(f"--out {options.out} is there, and holds no array: name another file")
    vectors = huggingface.encode(open_run(options.run), lines)
    buffer = io.BytesIO()
    np.save(buffer, vectors)
    write_atomic(out, buffer.getbuffer())
    print(printable(f"{options.out}: {len(vectors):,} vectors of {vectors.shape[1]} numbers"))


def is_array(path):
    """Is it a file in NumPy's format?"""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(6) == b"\x93NUMPY"


def nearest(options):
    """Print the lines nearest to each query by cosine, best first: cosine, line number, line."""
    lines = texts_of(options.file)
    try:
        queries = options.query or [line.rstrip("\r\n") for line in sys.stdin]
        # Python hands over bytes that are no UTF-8 as halves of characters.
        "".join(queries).encode()
    except UnicodeError:
        raise BadInput("a query, of --query or of stdin, is not UTF-8: convert it with "
                       "iconv") from None
    if not 1 <= options.count <= len(lines) or not queries:
        raise BadInput(f"--count is {options.count}: it must be 1 to {len(lines)}, the lines of "
                       f"{options.file}, and there must be a query")
    run = open_run(options.run)
    vectors = [huggingface.encode(run, texts) for texts in (queries, lines)]
    found = evaluate.search(*vectors, options.count)
    for query, cosines, indices in zip(queries, found.cosines.tolist(), found.indices.tolist()):
        print(printable(query))
        for cosine, i in zip(cosines, indices):
            print(printable(f"  {cosine:.3f}  {i + 1}  {lines[i]}"))


def texts_of(path):
    """The lines of a text file, empty ones included, so that line i has vector i."""
    check_file(Path(path))
    try:
        lines = [line.decode() for _, line in read_lines(Path(path))]
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 ({error.reason}): convert it with iconv") from None
    if not lines:
        raise BadInput(f"{path} is empty: it must have a text on each line")
    return lines


def open_run(name):
    return evaluate.open_run(name, evaluate.usable_device(None))


COMMANDS = {  # name: its function, what it does, what it takes
    "import": (import_run, "make a pretrained model a run folder", {
        "name": "a folder, or a name on Hugging Face",
        "folder": "what to write, new or empty"}),
    "export": (export_run, "write a folder that AutoModel and SentenceTransformer open", {
        "run": RUN, "folder": "what to write, new or empty"}),
    "encode": (encode_file, "write one vector a line", {"run": RUN, "file": LINES}),
    "nearest": (nearest, "find the lines nearest to a query", {"run": RUN, "file": LINES}),
}


def parse(argv):
    parser = Parser(prog="python -m interop", description="Models of others in, and ours out.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, said, takes) in COMMANDS.items():
        command = commands.add_parser(name, help=said, description=said)
        for place, said_of_it in takes.items():
            command.add_argument(place, metavar=place.upper(), help=said_of_it)
    encode = commands.choices["encode"]
    encode.add_argument("--out", required=True, metavar="FILE",
                        help="array (lines, width) in NumPy's format, .npy")
    find = commands.choices["nearest"]
    find.add_argument("--query", action="append", metavar="TEXT",
                      help="what to look for; may be given again (default: the lines of stdin)")
    find.add_argument("--count", type=int, default=5, metavar="N",
                      help="lines to print for each query (default: 5)")
    return parser.parse_args(argv)


def main(argv=None):
    options = parse(argv)
    COMMANDS[options.command][0](options)


if __name__ == "__main__":
    sys.exit(exit_status(main))
