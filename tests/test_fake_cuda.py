"""The GPU path without a GPU: the programs run on CPU tensors that say they are on "cuda:0".

FakeCuda.run computes every operation on the CPU, so losses, scores and files are real. It raises if
tensors of two devices meet, or if the CPU waits for the GPU in the loop: item(), a boolean index,
a copy from memory that is not pinned. autocast, GradScaler and fused AdamW are PyTorch's own. It
cannot show launches, memory, speed, streams, rounding, torch.compile, a number that C++ reads
without an operation, nor several processes: DDP and FSDP2 work in C++.
"""

import ctypes
import itertools
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo  # before a_gpu replaces functions of torch.cuda that it lists
from test_house import ROOT, columns_of, write_pairs
from test_train import pairs, small_settings  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import objectives
import train
from harness.generation import generate
from harness.settings import find_objective
from model import Model, ModelConfig
from tasks import finetune

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or torch.cuda.is_available(),
    reason="it borrows a symbol of Linux's libc10.so; on a GPU, run python -m results gpu")

aten = torch.ops.aten
GPU = torch.device("cuda", 0)
REMOTE = ("cuda", "xla")  # C++ refuses "cuda" in a build without it, so there ours are on "xla"
INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default,
           aten._index_put_impl_.default)
UNKNOWN = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
READS = "aten._local_scalar_dense.default"  # item()
# The functions in which the CPU may wait, and why.
MAY_WAIT = {"Run.__init__": "before the loop", "Run.evaluate": "reads scores",
            "Run.flush_metrics": "once a record", "save_checkpoint": "writes the weights",
            "finish": "after the loop",
            "GradScaler._maybe_opt_step": "reads whether to skip Muon"}


class OnGpu(torch.Tensor):
    """A tensor that says it is on the GPU; `cpu_data` has its numbers."""
    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)

    @staticmethod
    def __new__(cls, data):
        self = torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), storage_offset=data.storage_offset(),
            dtype=data.dtype, device="xla:0",
            _extra_dispatch_keys=torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA))
        self.cpu_data = data
        return self

    def tolist(self):
        return self.cpu().tolist()

    def __format__(self, spec):
        return format(self.item(), spec)

    def __reduce_ex__(self, protocol):  # for torch.save
        return self.cpu_data.detach().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return FakeCuda.current.run(func, args, kwargs or {})


class FakeCuda(TorchDispatchMode):
    """Runs the operations of the GPU. `strict`: raise for a wait outside of MAY_WAIT."""
    current = None

    strict = False

    def __init__(self):
        super().__init__()
        self.waits, self.operations = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    def run(self, func, args, kwargs):
        tensors = [x for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)]
        ours = [x for x in tensors if isinstance(x, OnGpu)]
        asked = kwargs.get("device") and torch.device(kwargs["device"]).type
        if not ours and asked not in REMOTE:
            return func(*args, **kwargs)
        if func._can_decompose():  # PyTorch does this, but not in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        self.operations[str(func)] += 1
        to_gpu = asked in REMOTE if asked else bool(ours)
        if func is aten.copy_.default:
            to_gpu = isinstance(args[0], OnGpu)
            self.check_copy(args[1], to_gpu, len(args) > 2 and args[2])
        elif func is aten._to_copy.default:
            self.check_copy(args[0], to_gpu, kwargs.pop("non_blocking", False))
        elif ours:
            self.check(func, args, kwargs, [x for x in tensors if not isinstance(x, OnGpu)])
        known = {id(x.cpu_data): x for x in ours}  # of an operation in place

        def unwrap(x):
            return (x.cpu_data if isinstance(x, OnGpu) else
                    torch.device("cpu") if isinstance(x, torch.device) else x)

        def wrap(x):
            moves = to_gpu and torch.is_tensor(x)
            return known[id(x)] if id(x) in known else OnGpu(x) if moves else x

        kwargs.pop("pin_memory", None)
        return tree_map(wrap, func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs)))

    def check(self, func, args, kwargs, theirs):
        """Check an operation that has tensors of the GPU, and `theirs` of the CPU."""
        is_index = func in INDEXED
        if is_index:
            indices = [x for x in args[1] if x is not None]
            if any(x.dtype == torch.bool or not isinstance(x, OnGpu) for x in indices):
                self.wait("an index that is boolean or from the CPU")
            theirs = [x for x in theirs if all(x is not index for index in indices)]
        elif UNKNOWN & {*func.tags} and kwargs.get("output_size") is None:
            self.wait(str(func))
        # A number on the CPU is an argument of pointwise kernels.
        takes_numbers = is_index or torch.Tag.pointwise in func.tags
        if theirs and not (takes_numbers and all(x.dim() == 0 for x in theirs)):
            raise RuntimeError(f"{func} mixes devices: {[x.shape for x in theirs]} on the CPU")

    def check_copy(self, source, to_gpu, non_blocking):
        is_asynchronous = non_blocking and getattr(source, "is_pinned_copy", False)
        if to_gpu != isinstance(source, OnGpu) and not (to_gpu and is_asynchronous):
            self.wait("a copy to the CPU, or one that blocks or is not from pinned memory")

    def wait(self, kind):
        self.waits[kind] += 1
        frame, names = sys._getframe(), set()
        while frame:
            names.add(frame.f_code.co_qualname)
            frame = frame.f_back
        if self.strict and not names & MAY_WAIT.keys():
            raise RuntimeError(f"the CPU waits: {kind}")


@contextmanager
def a_gpu():
    """Pretend that there is a GPU until the block ends."""
    # Autograd asks for a device guard of "xla". That of "meta" does nothing.
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 15).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[9] = guards[9] or guards[14]  # c10::DeviceType::XLA, Meta
    apply, load = torch.nn.Module._apply, torch.load
    grouped = torch._C._group_tensors_by_device_and_dtype

    def pin_memory(tensor):
        copy = tensor.clone()
        copy.is_pinned_copy = True
        return copy

    def apply_again(module, function, recurse=True):
        """Make new parameters if they move: those that PyTorch would keep cannot be OnGpu."""
        one = next(module.parameters(), torch.zeros(0)).detach()
        overwrite = torch.__future__.set_overwrite_module_params_on_conversion
        overwrite(type(function(one)) is not type(one))
        module = apply(module, function, recurse)
        overwrite(False)
        return module

    def load_there(file, device=None, **more):
        is_gpu = torch.device(device or "cpu").type == "cuda"
        return tree_map(lambda x: x.to(GPU) if is_gpu and torch.is_tensor(x) else x,
                        load(file, "cpu", **more))

    def groups(*args):
        return {(GPU if device and device.type == "xla" else device, dtype): group
                for (device, dtype), group in grouped(*args).items()}

    replaced = {
        torch.cuda: dict(
            is_available=lambda: True, _lazy_init=lambda: None, device_count=lambda: 1,
            max_memory_allocated=lambda *_: 0, is_bf16_supported=lambda **_: True,
            get_device_capability=lambda *_: (9, 0),
            get_rng_state=lambda *_: torch.get_rng_state(),
            set_rng_state=lambda state, *_: torch.set_rng_state(state)),
        torch: dict(load=load_there), torch.Tensor: dict(pin_memory=pin_memory),
        torch._C: dict(_group_tensors_by_device_and_dtype=groups),
        torch.nn.Module: dict(_apply=apply_again)}
    # Autograd has no thread for "xla".
    with (pytest.MonkeyPatch.context() as patch, FakeCuda() as FakeCuda.current,
          torch.autograd.set_multithreading_enabled(False)):
        for where, values in replaced.items():
            for name, value in values.items():
                patch.setattr(where, name, value, raising=False)
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor makes one, and then copies it
        try:
            yield FakeCuda.current
        finally:
            torch._C._set_only_lift_cpu_tensors(False)


# ---- a step

OBJECTIVES = [*objectives.OBJECTIVES, *map(str, sorted((ROOT / "gallery").glob("*.py")))]
WAYS = {"bfloat16": dict(precision="bfloat16", accumulate=2, gradient_checkpointing=True,
                         dropout=0.1, clip=0.0),
        "muon": dict(precision="float16", optimizer="muon"),
        "kernels": dict(precision="float16", optimizer="adamw", attention="triton",
                        width=32)}  # heads of size 16
# Optimizers and our kernels know no objective; these three have all kinds of masks and heads.
STEPS = [*itertools.product(OBJECTIVES, ["bfloat16"]),
         *itertools.product(["mexma", "hybrid", "llm-jepa"], ["muon", "kernels"])]


def take_steps(gpu, name, **given):
    """Take two steps without a wait. Return the run, and which weights they changed."""
    given |= dict(predictor_width=32) if name == "hybrid" else {}
    columns = columns_of(max(2, find_objective(name).views))
    write_pairs(Path("pairs.tsv"), 400, columns)
    given |= dict(langs=",".join(columns))
    run = train.start(name, **small_settings(name, device="cuda:0", **given))
    before = [weight.cpu_data.clone() for weight in run.objective.parameters()]
    batches = run.make_batch(0), run.make_batch(1)
    gpu.waits.clear()
    gpu.strict = True
    for batch in batches:
        run.train_step(batch, run.objective)
        run.step += 1
        run.objective.after_step(run.step / 2)
    return run, [not torch.equal(old, weight.cpu_data)
                 for old, weight in zip(before, run.objective.parameters(), strict=True)]


@pytest.mark.parametrize("name, way", STEPS, ids=lambda name: Path(name).stem)
def test_a_step_has_no_tensor_of_the_cpu_and_never_waits(name, way):
    with a_gpu() as gpu:
        run, changed = take_steps(gpu, name, **WAYS[way])
    assert (gpu.operations["nanojepa.attention_backward.default"] > 0) == (way == "kernels")
    assert gpu.waits.keys() == ({READS} if way == "muon" else set())
    gpu.strict = False
    overflow = run.scaler.is_enabled() and run.scaler.get_scale() < 2 ** 16  # it skipped steps
    assert (any(changed) or overflow) and run.precision == WAYS[way]["precision"]


def test_lora_trains_on_a_gpu_what_it_trains_on_a_cpu():
    list(train.start("ntp", out="start", **small_settings("ntp", steps=1)).steps())
    with a_gpu() as gpu:
        run, changed = take_steps(gpu, "llm-jepa", init="start", lora_rank=2)
    assert changed == [weight.requires_grad for weight in run.objective.parameters()]


def test_fine_tuning_waits_once_an_epoch():
    encoder = Model(ModelConfig(width=16, layers=1, heads=2, ffn_dim=32))
    prepared = SimpleNamespace(rows=[[5, 6, 7], [8, 9]] * 10, targets=torch.arange(20) % 3)
    with a_gpu() as gpu:
        model = finetune.Finetuned(encoder, 3, on_tokens=False).to(GPU)
        model.head.register_forward_hook(lambda *call: types.add(call[2].dtype))
        types = set()
        gpu.waits.clear()
        finetune.fit(model, prepared, finetune.Settings(epochs=2))
    assert gpu.waits == {READS: 2} and types == {torch.bfloat16}  # it prints the mean loss


def test_generation_waits_once_a_token():
    model = Model(ModelConfig(width=16, layers=1, heads=2, causal=True))
    rows, waits = [[5, 6, 7], [8]], {}
    for count in (4, 9):
        expected = generate(model, rows, -1, count)
        with a_gpu() as gpu:
            model.to(GPU)
            gpu.waits.clear()
            assert generate(model, rows, -1, count) == expected
            model.to("cpu")
        waits[count] = gpu.waits.total()
    assert waits[9] - waits[4] == 5
