"""Import pretrained models, export runs, and embed the lines of a text file.

    python -m interop import xlm-roberta-base out/xlmr              # a folder or a hub name
    python -m interop export out/mexma folder                       # for SentenceTransformer
    python -m interop encode out/mexma lines.txt --out lines.npy  # one embedding per line

An exported folder also works in pipelines: tokenizer(text) is that of the imported model, and
fill-mask reads [MASK] as training does.
"""

import argparse
import os

import numpy as np
import torch
from torch.nn.functional import normalize

import evaluate
from base.common import (
    BadInput,
    Parser,
    atomic_file,
    make_folder,
    new_file,
    run_program,
    shown,
    usable_device,
)
from corpora.files import read_lines
from harness import runs


def import_model(name, folder):
    """Write a pretrained model as a run folder."""
    from interop import huggingface  # here, because it takes five seconds
    config, equal = huggingface.import_model(name, folder)
    print(f"{folder}: {config.layers} layers of width {config.width}, pooling {config.pool}"
          f"{', L2-normalized' * config.normalize}"
          f"{f', truncated to {config.truncate_dim} dimensions' * bool(config.truncate_dim)}"
          f", at most {config.max_tokens:,} tokens\n"
          f"compared with sentence-transformers: equal {equal}\n"
          f"continue with: python train.py --objective NAME --init {folder}")


def export(run, folder):
    """Write a run as a folder for transformers and sentence-transformers."""
    from interop import huggingface
    equal = huggingface.export(run, folder)
    print(f"{folder}: compared with the run: equal {equal}")


def encode(run, file, out, device, precision):
    """Write the L2-normalized embeddings of the lines of a file, a NumPy array (lines, width)."""
    out = new_file("--out", out, ".npy")
    # Row i is the embedding of line i, even of an empty line.
    lines = [line for _, line in read_lines(file)]
    if not lines:
        raise BadInput(f"{shown(file)} has no lines")
    device = usable_device(device)
    run = runs.open_run(run, device)
    make_folder(out.parent)
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        embeddings = evaluate.encode(run.model, run.tokenizer, lines, run.header["affixes"][0],
                                     run.config.get("max_length"))
    with atomic_file(out) as array:
        np.save(array, normalize(embeddings, dim=1).numpy())
    print(f"{out}: {len(embeddings):,} embeddings of {embeddings.shape[1]} dimensions")


def main(argv):
    parser = Parser("python -m interop", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="import|export|encode")

    def add(word, function, **arguments):
        command = commands.add_parser(word, help=function.__doc__, description=function.__doc__)
        command.set_defaults(function=function)
        for argument, about in arguments.items():
            command.add_argument(argument, metavar=argument.upper(), help=about,
                                 type=os.path.expanduser)
        return command.add_argument

    run = "folder of a run, such as out/mexma"
    folder = "new folder to write"
    add("import", import_model, name="a folder, or a name on the Hugging Face hub", folder=folder)
    add("export", export, run=run, folder=folder)
    flag = add("encode", encode, run=run, file="text file in UTF-8")
    flag("--out", required=True, metavar="FILE", help="array to write, .npy")
    flag("--device", help="cpu, cuda, cuda:1 or mps [a CUDA GPU if there is one]")
    flag("--precision", choices=("float32", "bfloat16"), default="float32", help="precision of "
         "matmuls; bfloat16 is faster on a device that has instructions for it [float32]")
    options = vars(parser.parse_args(argv))
    options.pop("function")(**options)


if __name__ == "__main__":
    run_program(main)
