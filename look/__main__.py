"""Look at a batch.

    python -m look batch --objective llm-jepa   print one batch as text, and its attention mask

Each command has its own --help.
"""

from common import BadInput, run_program

from .batch import batch_command


def main(words):
    name, *rest = words or ["--help"]
    if name in ("--help", "-h"):
        return print(__doc__.strip())
    if name == "batch":
        return batch_command(rest)
    raise BadInput(f"{name!r} is not a command: python -m look --help lists them")


if __name__ == "__main__":
    run_program(main)
