"""Other people's models in, standard folders out, and a trained model as a function of texts.

    python -m interop import xlm-roberta-base out/xlmr             # or a folder in their layout
    python -m interop export out/mexma folder                      # for AutoModel and others
    python -m interop encode out/mexma lines.txt --out vectors.npy # one vector a line
    python -m interop nearest out/mexma lines.txt --query "Two dogs play." --vectors vectors.npy
"""

import io
import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import normalize

import evaluate
from corpora.device import usable_device
from corpora.folder import write_atomic
from corpora.program import BadInput, Parser, exit_status
from corpora.text import read_lines

RUN = "a run folder, such as out/mexma"
LINES = "a text on each line; also .gz, .bz2 and .xz"


def import_run(options):
    # Imported here, because encode and nearest do without safetensors.
    from interop import huggingface
    found = huggingface.import_model(options.name, options.folder)
    config = found.model.config
    print(f"{options.folder}: {config.layers} layers of width {config.width}, rows of up to "
          f"{config.max_positions:,} tokens; continue with train.py --init {options.folder}")
    print(f"sentence vectors: {found.vectors}; --pool of train.py and evaluate.py takes another")


def export_run(options):
    from interop import huggingface
    huggingface.export(options.run, options.folder, say=print)


def encode_file(options):
    lines = texts_of(options.file)
    if not options.out.endswith(".npy"):
        raise BadInput(f"--out {options.out} will be an array of NumPy: name a file in .npy")
    vectors = vectors_of(run_of(options), lines, options)
    if not options.raw:
        vectors = normalize(vectors, dim=1)
    buffer = io.BytesIO()
    np.save(buffer, vectors.numpy())
    write_atomic(options.out, buffer.getbuffer())
    print(f"{options.out}: {len(vectors):,} vectors of {vectors.shape[1]} numbers")


def nearest(options):
    """Print the lines nearest to each query by cosine, best first: cosine, line number, line."""
    lines = texts_of(options.file)
    queries = options.query or [line.rstrip("\r\n") for line in sys.stdin]
    if not 1 <= options.count <= len(lines) or not queries:
        raise BadInput(f"--count is {options.count}: it must be 1 to {len(lines)}, the lines of "
                       f"{options.file}, and there must be a query")
    run = run_of(options)
    if options.vectors:
        vectors = read_vectors(options.vectors, (len(lines), run.model.config.width))
        refuse_others(run, lines, vectors, options)
    else:
        vectors = vectors_of(run, lines, options)
    found = evaluate.search(vectors_of(run, queries, options), vectors, options.count)
    for query, cosines, indices in zip(queries, found.cosines.tolist(), found.indices.tolist()):
        print(query)
        for cosine, i in zip(cosines, indices):
            print(f"  {cosine:.3f}  {i + 1}  {lines[i]}")


def refuse_others(run, lines, vectors, options):
    """BadInput for vectors of other lines or of another model, as far as a few lines tell."""
    some = sorted({0, len(lines) // 3, 2 * len(lines) // 3, len(lines) - 1})
    made = vectors_of(run, [lines[i] for i in some], options).double()
    kept = torch.as_tensor(vectors[some]).double()
    if torch.nn.functional.cosine_similarity(made, kept).min() < 0.999:
        raise BadInput(f"--vectors {options.vectors} is not of these lines, or of another run: run "
                       "encode again")


def read_vectors(name, shape):
    """The array that `encode` wrote; BadInput if it is not of so many lines and this width."""
    try:
        vectors = np.load(name, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise BadInput(f"--vectors {name} is no array of NumPy ({error}): name what encode "
                       "wrote") from None
    if vectors.shape != shape or not np.isfinite(vectors).all():
        raise BadInput(f"--vectors {name} has shape {vectors.shape}, where the lines and the run "
                       f"need finite numbers of shape {shape}: run encode again")
    return vectors


def texts_of(path):
    """The lines of a text file, empty ones included, so that line i has vector i."""
    try:
        lines = [line.decode() for _, line in read_lines(Path(path))]
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 ({error.reason}): convert it with iconv") from None
    if not lines:
        raise BadInput(f"{path} is empty: it must have a text on each line")
    return lines


def run_of(options):
    if options.batch < 1:
        raise BadInput(f"--batch is {options.batch}: it must be at least 1 token")
    return evaluate.open_run(options.run, usable_device(options.device))


def vectors_of(run, texts, options):
    """N texts -> (N, D), made as those of the run's first column; says how many texts were cut."""
    affixes, *_ = run.first.get("affixes") or [((), None)]
    return evaluate.encode(run.model, run.tokenizer, texts, affixes, run.config.get("max_length"),
                           tokens_per_batch=options.batch)


COMMANDS = {  # name: its function, what it does, what it takes
    "import": (import_run, "make a pretrained model a run folder", {
        "name": "a folder, or a name on Hugging Face",
        "folder": "what to write, new or empty"}),
    "export": (export_run, "write a folder that AutoModel and SentenceTransformer open", {
        "run": RUN, "folder": "what to write, new or empty"}),
    "encode": (encode_file, "write one vector a line, of length 1", {"run": RUN, "file": LINES}),
    "nearest": (nearest, "find the lines nearest to a query", {"run": RUN, "file": LINES}),
}


def parse_flags(argv):
    parser = Parser(prog="python -m interop", description="Models of others in, and ours out.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, said, takes) in COMMANDS.items():
        command = commands.add_parser(name, help=said, description=said)
        for place, said_of_it in takes.items():
            command.add_argument(place, metavar=place.upper(), help=said_of_it)
    encode = commands.choices["encode"]
    encode.add_argument("--out", required=True, metavar="FILE",
                        help="array (lines, width) in NumPy's format, .npy")
    encode.add_argument("--raw", action="store_true",
                        help="vectors as the model makes them, not scaled to length 1")
    find = commands.choices["nearest"]
    find.add_argument("--query", action="append", metavar="TEXT",
                      help="what to look for; may be given again (default: the lines of stdin)")
    find.add_argument("--count", type=int, default=5, metavar="N",
                      help="lines to print for each query (default: 5)")
    find.add_argument("--vectors", metavar="FILE",
                      help="what encode wrote of the same lines, which are then not embedded again")
    for command in (encode, find):
        command.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda if there is one)")
        command.add_argument("--batch", type=int, default=4096, metavar="N",
                             help="tokens that are embedded at once (default: 4096)")
    return parser.parse_args(argv)


def main(argv=None):
    options = parse_flags(argv)
    COMMANDS[options.command][0](options)


if __name__ == "__main__":
    sys.exit(exit_status(main))
