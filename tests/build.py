"""Compile the kernels for GPUs that are not here, with every row of the table of tiles, and print
what ptxas makes of them: registers, spills, shared memory and tensor-core instructions.
`build.py 9.0` builds the rows of one GPU, and `build.py 12.0 keys_kernel` one kernel of them.

Exit status 1 if a kernel spills more registers or takes more shared memory than LIMITS allows, or
(9.0, 16 bits) lacks wgmma.
"""

import functools
import itertools
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parent.parent))

from kernels import attention  # noqa: E402
from kernels.schedule import TILES  # noqa: E402

# {compute capability: (KB of shared memory that a kernel may take, bytes that it may spill)}. A GPU
# of 8.6, 8.9 or 12.0 has 99 KB, and one of 9.0 or 10.0 has 227. All limits but that of 9.0 are what
# the kernels take, because another Triton could take more.
LIMITS = {"8.0": (96, 0), "8.6": (96, 0), "8.9": (96, 0), "9.0": (227, 0), "10.0": (105, 16),
          "12.0": (96, 0)}
TYPES = {"tokens": "i32", "stride": "i32", "lse": "*fp32", "delta": "*fp32"}
NAMES = {2: "bf16", 4: "fp32"}


@functools.cache  # the rows of medium and of long batches share kernels
def build(kernel, capability, dtype, warps, stages, **constants):
    """Compile a kernel; return registers per thread, bytes spilled, bytes of shared memory, and the
    number of wgmma instructions."""
    types = TYPES | dict.fromkeys(("qkv", "out", "grad", "dqkv"), f"*{dtype}")
    signature = {name: "constexpr" if name in constants else types.get(name, "*i32")
                 for name in kernel.arg_names}
    # Pointers and strides are multiples of 16, as when a model runs.
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature)
               if name not in constants and name != "tokens"}
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": warps, "num_stages": stages}
    built = triton.compile(source, GPUTarget("cuda", capability, 32), options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(built.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        done = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True,
                              text=True, check=True)
    use = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout))
    wgmma = len(re.findall(r"wgmma\.mma_async", built.asm["ptx"]))
    spilled = int(use["STACK"]) + int(use["LOCAL"])
    return int(use["REG"]), spilled, built.metadata.shared, wgmma


def kernels_of(tiles):
    """Yield the kernels of one row of the table: (kernel, its constants, warps, stages)."""
    size, *warps = tiles.local
    yield attention.local_forward_kernel, dict(SIZE=size), warps[0], 3
    yield attention.local_backward_kernel, dict(SIZE=size), warps[1], 3
    for kernel, names, (*sizes, warps, stages) in (
            (attention.forward_kernel, ("ROWS", "STEP"), tiles.forward),
            (attention.queries_kernel, ("ROWS", "STEP"), tiles.queries),
            (attention.keys_kernel, ("KEYS", "ROWS"), tiles.keys)):
        yield kernel, dict(zip(names, sizes)), warps, stages


def rows_of(gpu):
    """Yield the rows of the table that a GPU uses: (GPU, bytes of a number, largest head size,
    rows)."""
    for (name, *sizes), rows in TILES.items():
        if name == gpu or name == "other" and (gpu, *sizes) not in TILES:
            yield gpu, *sizes, rows


def main(words):
    gpus = [word for word in words if word in LIMITS] or list(LIMITS)
    names = [word for word in words if word not in LIMITS]
    faults = []
    for gpu, element_size, head_size, rows in itertools.chain(*map(rows_of, gpus)):
        capability = int(gpu.replace(".", ""))
        most, may_spill = LIMITS[gpu]
        # Each row on its largest head size.
        for kernel, tile, warps, stages in itertools.chain(*map(kernels_of, set(rows))):
            if names and kernel.__name__ not in names:
                continue
            registers, spilled, shared, wgmma = build(
                kernel, capability, NAMES[element_size], warps, stages, H=4, HKV=1, K=head_size,
                TWO=True, SCALE=math.log2(math.e) / math.sqrt(head_size), **tile)
            slow = capability == 90 and element_size == 2 and not wgmma
            faults.append(bool(spilled > may_spill or shared > most * 1024 or slow))
            print(f"{'WRONG ' if faults[-1] else ''}{gpu} {NAMES[element_size]} {head_size} "
                  f"{kernel.__name__} {tile}: {registers} registers, {spilled} bytes spilled, "
                  f"{shared:,} shared, {wgmma} wgmma")
    print(f"{len(faults)} builds, {sum(faults)} wrong")
    return int(not faults or any(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
