"""Every private name of Triton that fuseops launches by exists, and stands where fuseops looks for it."""

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest

from fuseops.kernels import triton_private

triton = pytest.importorskip("triton")
nvidia = pytest.importorskip("triton.backends.nvidia.driver")

RELEASE = ".".join(triton.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(
    RELEASE not in triton_private.LAUNCHERS, reason="launches by Triton itself"
)
of_36 = pytest.mark.skipif(RELEASE != "3.6", reason="the order of 3.6")


@pytest.fixture
def driver(monkeypatch):
    stands = SimpleNamespace(get_current_stream=lambda device: 7)
    monkeypatch.setattr("triton.runtime.driver._active", stands)
    return stands


def compiled(launch, scratch=0):
    """What Triton gives for a kernel."""
    run = SimpleNamespace(launch=launch, launch_pdl=True, global_scratch_size=scratch)
    return SimpleNamespace(run=run, function=11, packed_metadata=(4,))


def test_the_names_are_there():
    from triton import knobs
    from triton.runtime import driver

    assert hasattr(knobs.runtime.launch_enter_hook, "calls")
    assert hasattr(type(driver), "active")
    assert hasattr(nvidia.CudaDriver, "__init__") and callable(nvidia.make_tensordesc_arg)
    source = inspect.getsource(nvidia.CudaLauncher)
    more = () if RELEASE == "3.6" else ("arg_annotations", "kernel_signature", "gsan_enabled")
    for name in ("launch_pdl", "global_scratch_size", "launch_cooperative_grid", *more):
        assert f"self.{name}" in source


@of_36
def test_arguments_stand_in_the_order_of_the_launcher():
    """x, y, z, stream, function; cooperative, PDL; two scratch buffers, metadata, what hooks are told, two hooks."""
    assert nvidia._BASE_ARGS_FORMAT == "iiiKKppOOOOOO"


@of_36
def test_the_launcher_below_one_of_descriptors_is_found(driver):
    calls = []
    below = lambda *args: calls.append(args)  # noqa: E731
    signature = {0: "*fp16", 1: "tensordesc<fp16[64, 64]>"}
    launch = nvidia.wrap_handle_tensordesc(below, signature, [{"swizzle": 1}])
    launcher = triton_private.launcher_of(compiled(launch), (3,))
    assert launcher.raw is below and launcher.metas == [{"swizzle": 1}]
    assert launcher.stream_of(0) == 7 and launcher.constants == (3,)
    launcher.raw(1, 2, 3, 7, *launcher.head, 5)
    assert calls == [(1, 2, 3, 7, 11, False, True, None, None, (4,), None, None, None, 5)]


def test_triton_39_takes_operands_as_one_tuple(driver):
    """x, y, z, stream, function; cooperative, PDL; metadata, what hooks are told, hooks; two scratch buffers; types."""
    calls = []
    kernel = compiled(lambda *args: calls.append(args))
    kernel.run.arg_annotations, kernel.run.kernel_signature = ["kernel", "constexpr"], b"types"
    launcher = triton_private.TupleLauncher(kernel, (3,))
    launcher.raw(1, 2, 3, 7, *launcher.head, 5, 3)
    types = ["kernel", "constexpr"], b"types", (5, 3)
    assert calls == [(1, 2, 3, 7, 11, False, True, (4,), None, None, None, None, None, *types)]


@pytest.mark.skipif(RELEASE != "3.9", reason="the order of 3.9")
def test_the_c_launcher_of_39_parses_that_order():
    source = Path(nvidia.__file__).with_name("driver.c").read_text()
    assert 'PyArg_ParseTuple(args, "iiiKKpp(iii)OOOOOOy*O"' in source


def test_kernels_with_scratch_are_left_to_triton(driver):
    assert triton_private.launcher_of(compiled(print, scratch=8), ()) is None
