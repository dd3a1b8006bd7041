"""Compile the kernels for GPUs that are not here: what ptxas makes of every row of the table of tiles.

    python kernels/build.py                # every GPU class, head size and precision: registers, spills, shared memory, wgmma
    python kernels/build.py --brief        # every row of the table once, on its tightest GPU and head size

Exit status 1 if a kernel spills registers, needs more shared memory than the GPU has, or (9.0, 16 bits, tiles of 64 rows) lacks wgmma."""

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
from kernels.schedule import HEAD_SIZES, TILES  # noqa: E402

SHARED = {"9.0": 227, "other": 99}                                       # KB of shared memory that a block may have; 99: compute capability 8.6, 8.9
TYPES = {"tokens": "i32", "stride": "i32", "lse": "*fp32", "delta": "*fp32"}


def build(kernel, capability, dtype, warps, stages, **constants):
    """-> registers a thread, bytes spilled, bytes of shared memory, wgmma instructions of one kernel."""
    types = TYPES | dict.fromkeys(("qkv", "out", "grad", "dqkv"), f"*{dtype}")
    signature = {name: "constexpr" if name in constants else types.get(name, "*i32") for name in kernel.arg_names}
    even = {(i,): [["tt.divisibility", 16]] for i, (name, kind) in enumerate(signature.items()) if kind != "constexpr" and name != "tokens"}
    built = triton.compile(ASTSource(kernel, signature, constants, even), GPUTarget("cuda", capability, 32),
                           {"num_warps": warps, "num_stages": stages})
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(built.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        said = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    use = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    return use["REG"], use["STACK"] + use["LOCAL"], built.metadata.shared, len(re.findall(r"wgmma\.mma_async", built.asm["ptx"]))


def kernels(tiles):
    """The kernels of one row of the table: (kernel, its constants, warps, stages)."""
    size, *warps = tiles.local
    yield attention.local_forward_kernel, dict(SIZE=size), warps[0], 3
    yield attention.local_backward_kernel, dict(SIZE=size), warps[1], 3
    for kernel, (first, second, *how), names in ((attention.forward_kernel, tiles.forward, ("ROWS", "STEP")),
                                                 (attention.queries_kernel, tiles.queries, ("ROWS", "STEP")),
                                                 (attention.keys_kernel, tiles.keys, ("KEYS", "ROWS"))):
        yield kernel, dict(zip(names, (first, second))), *how


def main(brief):
    faults, done = 0, set()
    print("| GPU | type | head size | G | kernel | tile | warps | stages | registers | spilled | shared memory | wgmma |")
    print("|---|---|--:|--:|---|---|--:|--:|--:|--:|--:|--:|")
    for (gpu, bytes, largest), rows in TILES.items():
        capabilities = [90] if gpu == "9.0" else [80, 89] + [90] * (bytes == 4)
        for capability in capabilities[:1] if brief else capabilities:
            for size in [largest] if brief else [size for size in HEAD_SIZES if largest // 2 < size <= largest or largest == 64 > size]:
                for share, (kernel, constants, warps, stages) in ((share, one) for tiles in rows for one in kernels(tiles) for share in (1, 4)[brief:]):
                    dtype, key = {2: "bf16", 4: "fp32"}[bytes], (capability, bytes, size, kernel.__name__, *constants.values(), warps, stages, share)
                    if key in done:
                        continue
                    done.add(key)
                    registers, spilled, shared, wgmma = build(kernel, capability, dtype, warps, stages, H=share, HKV=1, K=size, TWO=True,
                                                              SCALE=math.log2(math.e) / math.sqrt(size), **constants)
                    wrong = spilled or shared > SHARED[gpu] * 1024 or capability == 90 and bytes == 2 and not wgmma
                    faults += bool(wrong)
                    row = (capability / 10, dtype, size, share, kernel.__name__, " x ".join(map(str, constants.values())), warps, stages, registers,
                           spilled, f"{shared:,}", wgmma)
                    print(f"| {' | '.join(map(str, row))} |" + " WRONG" * bool(wrong), flush=True)
    print(f"{len(done)} builds, {faults} wrong")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main("--brief" in sys.argv[1:]))
