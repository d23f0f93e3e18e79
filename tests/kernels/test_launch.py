"""What a launch remembers of the one before: nothing that its code depends on is overlooked."""

import importlib
import itertools
from types import SimpleNamespace

import pytest
import torch
from samples import samples

from fuseops.kernels.launch import device, variant_of
from fuseops.kernels.registry import KERNEL_OPS
from fuseops.kernels.replay import recording

# the package has a function of this name
launching = importlib.import_module("fuseops.kernels.launch")
jit = pytest.importorskip("triton.runtime.jit")
nvidia = pytest.importorskip("triton.backends.nvidia.compiler")
specialize = getattr(jit, "native_specialize_impl", None)

INTS = [-1, 0, 1, 2, 15, 16, 17, 2**31 - 1, 2**31 - 16, 2**31, 2**31 + 16, 2**40]
TENSORS = [
    torch.empty(64, dtype=dtype)[start:]
    for dtype in (torch.bfloat16, torch.float32, torch.int32)
    for start in (0, 1, 4, 8)
]


def descriptors():
    gemm, codes, plain = (device(name) for name in ("gluon_gemm", "fp8_rings", "grouped_mm"))
    kinds = gemm.Descriptor, codes.CodesDescriptor, codes.ScalesDescriptor, plain.HostDescriptor
    blocks = itertools.product(
        kinds, (torch.bfloat16, torch.float32), ([64, 64], [64, 128], [1, 8, 8])
    )
    for kind, dtype, block in blocks:
        t = torch.empty([64] * len(block), dtype=dtype)
        yield kind(t, t.shape, t.stride(), block)


def test_descriptors_of_one_variant_have_one_type():
    """A launch of another tensor, shape and strides runs the same code; of another dtype, block or layout not."""
    found = {}
    for d in descriptors():
        said = d.base.dtype, tuple(d.block_shape), str(getattr(d, "layout", "none"))
        assert found.setdefault(variant_of((d,)), said) == said
    assert len(found) == 24
    t = torch.empty(256, 512)[:, ::2].bfloat16()
    kind = device("gluon_gemm").Descriptor
    assert variant_of((kind(t, t.shape, t.stride(), [64, 64]),)) in found


@pytest.mark.skipif(specialize is None, reason="this Triton has no native look at arguments")
def test_arguments_of_one_variant_are_specialized_alike():
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    backend = nvidia.CUDABackend(target)
    for a, b in itertools.product([*INTS, *TENSORS, 0.0, 1.0], repeat=2):
        if variant_of((a,)) == variant_of((b,)):
            for special in (True, False):  # as do_not_specialize has it
                same = [specialize(backend, t, False, special, special) for t in (a, b)]
                assert same[0] == same[1], (a, b)


def test_other_arguments_are_left_to_triton():
    assert variant_of((torch.empty(1), object())) is None
    assert variant_of((torch.empty(1), True)) is None


class Compiles:
    """A kernel that notes what it is compiled with, and is never bound."""

    __name__, arg_names = "compiles", ()

    def __init__(self):
        self.seen = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.seen.append(options)


def test_what_a_kernel_is_compiled_with_is_its_own_choice_first(monkeypatch):
    monkeypatch.setattr(launching, "enter_context", lambda: None)
    kernel = Compiles()
    for options in ({"num_warps": 2}, {"enable_fp_fusion": False}):
        launching._run(kernel, (1,), (torch.empty(1), object()), options)
    assert kernel.seen == [{"num_warps": 2, "enable_fp_fusion": True}, {"enable_fp_fusion": False}]


def test_a_launch_that_a_hook_is_told_of_is_tritons_own(monkeypatch):
    calls, again = [], []
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=calls))
    bound = SimpleNamespace(
        hooks=hooks,
        head=(),
        constants=(),
        stream_of=lambda index: 7,
        raw=lambda *args: again.append(args),
    )
    monkeypatch.setattr(launching, "_launchers", {})
    monkeypatch.setattr(launching, "enter_context", lambda: None)
    monkeypatch.setattr(launching, "launcher_of", lambda compiled, constants: bound)
    kernel, x = Compiles(), torch.empty(1)
    for hook in ([], [], [print], []):
        calls[:] = hook
        launching._run(kernel, (1,), (x, 2), {})
    assert len(kernel.seen) == 2
    assert again == [(1, 1, 1, 7, x.data_ptr(), 2)] * 2


@pytest.mark.parametrize("name", sorted(samples()))
def test_constants_come_last_and_are_all_given(name):
    """A launch that is repeated passes them in the order of the kernel's signature."""
    for args in KERNEL_OPS[name].cases():
        with recording(90) as recorder:
            KERNEL_OPS[name].launcher(*args)
        for made in recorder.launches:
            rest = made.kernel.arg_names[len(made.args) :]
            assert rest == [n for n in rest if n in made.options and n.isupper()]
