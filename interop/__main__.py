"""Import pretrained models, export runs, and embed the lines of a text file.

    python -m interop import xlm-roberta-base out/xlmr              # a folder or a hub name
    python -m interop export out/mexma folder                       # for SentenceTransformer
    python -m interop encode out/mexma lines.txt --out vectors.npy  # one embedding per line
"""

import argparse
import os
from pathlib import Path

import numpy as np
from torch.nn.functional import normalize

import evaluate
from common import BadInput, Parser, atomic_file, make_folder, run_program, shown, usable_device
from corpora.files import read_lines


def import_model(name, folder):
    """Write a pretrained model as a run folder."""
    from interop import huggingface  # here, because it takes five seconds
    config, prompts, equal = huggingface.import_model(name, folder)
    print(f"{folder}: {config.layers} layers of width {config.width}, pooling {config.pool}"
          f"{', L2-normalized' * config.normalize}, at most {config.max_tokens:,} tokens\n"
          f"compared with sentence-transformers: equal {equal}")
    if prompts:
        print(f"not imported: the prompts {shown(', '.join(prompts))}; put them before your texts")
    print(f"continue with: python train.py --objective NAME --init {folder}")


def export(run, folder):
    """Write a run as a folder for transformers and sentence-transformers."""
    from interop import huggingface
    equal = huggingface.export(run, folder)
    print(f"{folder}: compared with the run: equal {equal}")


def encode(run, file, out, raw, device):
    """Write the embeddings of the lines of a file as a NumPy array, (lines, width)."""
    out = Path(out).expanduser()
    if out.suffix != ".npy":
        raise BadInput(f"--out is {shown(out)}: the name must end in .npy")
    lines = [line for _, line in read_lines(file)]  # row i is line i, also if line i is empty
    run = evaluate.open_run(run, usable_device(device))
    make_folder(out.parent)
    embeddings = evaluate.encode(run.model, run.tokenizer, lines, run.first["affixes"][0],
                                 run.config.get("max_length"))
    with atomic_file(out) as array:
        np.save(array, (embeddings if raw else normalize(embeddings, dim=1)).numpy())
    print(f"{out}: {len(embeddings):,} embeddings of {embeddings.shape[1]} dimensions")


def main(argv):
    parser = Parser("python -m interop", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="import|export|encode")
    about = {"name": "a folder, or a name on the Hugging Face hub", "folder": "new folder to write",
             "run": "folder of a run, such as out/mexma", "file": "text file in UTF-8"}
    for name, function, arguments in (("import", import_model, ("name", "folder")),
                                      ("export", export, ("run", "folder")),
                                      ("encode", encode, ("run", "file"))):
        command = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        command.set_defaults(function=function)
        for argument in arguments:
            command.add_argument(argument, metavar=argument.upper(), help=about[argument],
                                 type=os.path.expanduser)
    command.add_argument("--out", required=True, metavar="FILE", help="array to write, .npy")
    command.add_argument("--raw", action="store_true", help="do not L2-normalize the embeddings")
    command.add_argument("--device", help="cpu, cuda, cuda:1 or mps [a GPU if there is "
                         "one]")
    options = vars(parser.parse_args(argv))
    options.pop("function")(**options)


if __name__ == "__main__":
    run_program(main)
