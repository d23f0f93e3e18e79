"""`explain()` says which kernel a grouped GEMM takes, and why not a better one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import few
from torch._subclasses.fake_tensor import FakeTensorMode

import fuseops as fo
from fuseops.kernels import configs, grouped_paths
from fuseops.kernels.grouped_paths import mm_choice, wgrad_choice
from fuseops.kernels.replay import recording

pytestmark = pytest.mark.usefixtures("interpreted")

SIZES = st.sampled_from([1, 8, 33, 64, 72, 136, 192, 4096])


@pytest.fixture(autouse=True)
def forgotten():
    """What is chosen for a Triton that is set in a test goes with the test."""
    yield
    forget()


def forget():
    for choice in (
        grouped_paths._mm_choice,
        grouped_paths._wgrad_choice,
        grouped_paths.gluon_refusals,
    ):
        choice.cache_clear()


def mm_words(*operands):
    return mm_choice(*operands).words


def matrix(rows, width, dtype, wider, shift):
    """Rows `wider` elements further apart than they are wide, beginning `shift` elements later."""
    block = torch.zeros(rows * (width + wider) + shift + 16, dtype=dtype)
    return block[shift:].as_strided((rows, width), (width + wider, 1))


@given(
    arch=st.sampled_from([80, 90, 100, 120]),
    n=SIZES,
    k=SIZES,
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    wider=st.sampled_from([0, 8, 16, 3]),
    shift=st.sampled_from([0, 0, 1, 8]),
    layout=st.sampled_from(["nk", "kn", "strided"]),
    gathers=st.booleans(),
)
@few
def test_every_path_but_the_best_has_a_reason(arch, n, k, dtype, wider, shift, layout, gathers):
    x, dy = matrix(7, k, dtype, wider, shift), matrix(7, n, dtype, wider, 0)
    weight = torch.zeros(3, n, k, dtype=dtype)
    if layout == "kn":
        weight = torch.zeros(3, k, n, dtype=dtype).transpose(1, 2)
    elif layout == "strided":
        weight = torch.zeros(3, n, k + 8, dtype=dtype)[..., :k]
    index = torch.zeros(9, dtype=torch.int32) if gathers else None
    with pytest.MonkeyPatch.context() as patch, recording(arch):
        # as on a device, with a Triton that Gluon was tested with
        patch.setattr(grouped_paths, "INTERPRET", False)
        patch.setattr(grouped_paths, "triton_release", lambda: "3.6")
        forget()
        found = mm_choice(x, weight, index), wgrad_choice(dy, x, None, index)
    best = "gather" if gathers else "pingpong"
    for path, why in found:
        assert (why is None) is (path == best)


def test_the_reason_is_the_one_that_stands_in_the_way():
    half = torch.bfloat16
    weight = torch.zeros(3, 64, 72, dtype=half)
    with recording(80):
        assert mm_words(matrix(7, 72, half, 0, 0), weight) == "pointer (sm_80 loads by pointers)"
    with recording(90):
        said = mm_words(matrix(7, 72, half, 0, 1), weight)
        assert said == "pointer (x is not 16-byte aligned)"
        said = mm_words(matrix(7, 72, half, 3, 0), weight)
        assert said == "pointer (rows of x are 150 bytes apart, not a multiple of 16)"
        assert (
            mm_words(matrix(7, 72, torch.float32, 0, 0), weight.float()) == "pointer (x is float32)"
        )
        assert mm_words(matrix(7, 72, half, 0, 0), weight) == "tma (the interpreter runs no Gluon)"


@pytest.mark.parametrize("fused", [True, False])
def test_explain_names_the_op_and_the_path(fused):
    model = fo.Sequential(
        {
            "fc1": fo.ops.GroupedLinear(3, 16, 48, bias=False, dtype=torch.bfloat16),
            "act": fo.ops.ScaledSwiGLU(),
            "fc2": fo.ops.GroupedLinear(3, 24, 33, bias=False, dtype=torch.bfloat16),
        }
    )
    routing = fo.Routing.from_counts([2, 0, 4], torch.ones(7))
    x = torch.randn(7, 16, dtype=torch.bfloat16)
    with fo.fusion(fused):
        notes = model.plan(x, routing).notes
        said = [n for n in notes if "grouped GEMM" in n]
        assert all(note in model.explain(x, routing) for note in said)
    assert len(said) == 2
    way = "tma (the interpreter runs no Gluon)"
    assert said[0].endswith(f"grouped GEMM N 48, K 16: {way}; backward dgrad {way}, wgrad few")
    assert "N 33, K 24: pointer (rows of y are 66 bytes, not a multiple of 16)" in said[1]
    apart = "the backward of the activation is a kernel of its own: no path of the GEMM"
    assert any(apart in note for note in notes) == fused
    ops = ("'fc1..fc2'",) * 2 if fused else ("'fc1'", "'fc2'")
    assert all(note.startswith(op) for note, op in zip(said, ops, strict=True))


@pytest.mark.parametrize(
    ("triton", "path"),
    [
        ("3.6.0", "pingpong"),
        ("3.8.1", "pingpong"),
        ("3.7.0", "tma"),
        ("3.9.0", "pingpong"),
        ("4", "tma"),
    ],
)
def test_gluon_is_chosen_for_the_triton_that_it_was_tested_with(monkeypatch, triton, path):
    """A version that compiles none of it takes the plain kernels, and is told so."""
    monkeypatch.setattr(grouped_paths, "INTERPRET", False)
    monkeypatch.setattr(configs, "versions", lambda: {"triton": triton})
    x, weight = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((8, 64), (3, 64, 64)))
    with recording(90):
        forget()
        words = mm_words(x, weight)
    version = ".".join(triton.split(".")[:2])
    assert words == (
        path if path == "pingpong" else f"tma (pingpong is not tested with triton {version})"
    )


def test_a_forced_path_ends_with_its_block():
    with grouped_paths.on_path("tma"):
        with grouped_paths.on_path("pointer"):
            assert grouped_paths.forced_path == "pointer"
        assert grouped_paths.forced_path == "tma"
    assert grouped_paths.forced_path is None


@pytest.mark.filterwarnings("error")
def test_the_path_of_a_weight_gradient_reads_no_address_of_what_has_none():
    with FakeTensorMode():
        dy, x = torch.empty(64, 128), torch.empty(64, 256)
        assert grouped_paths.wgrad_choice(dy, x)
