"""Buffers of the caller: what is written there is what the call gives, and nobody reads what was there before."""

import re
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops import kernels
from fuseops.errors import FuseOpsError, ShapeError
from fuseops.run.buffers import overlap

E, D, F, ROWS = 3, 6, 4, 9
OFFS = torch.tensor([2, 2, 7], dtype=torch.int32)


def model(**options: Any) -> fo.Sequential:
    torch.manual_seed(0)
    return fo.Sequential(
        {
            "norm": fo.ops.RMSNorm(D),
            "fc1": fo.ops.GroupedLinear(E, D, 2 * F, **options),
            "act": fo.ops.ScaledSwiGLU(),
            "fc2": fo.ops.GroupedLinear(E, F, D, **options),
            "linear": fo.ops.Linear(D, F),
        }
    )


WIDTHS = {"norm": (D, D), "fc1": (D, 2 * F), "act": (2 * F, F), "fc2": (F, D), "linear": (D, F)}
PLACES = [f"{op}.{what}" for op in WIDTHS for what in ("y", "dx")]


def place(key: str, rows: tuple[int, ...] = (ROWS,)) -> Tensor:
    op, what = key.split(".")
    return torch.full((*rows, WIDTHS[op][what == "y"]), torch.nan)


def inputs() -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, D, generator=generator).requires_grad_()
    return x, {"offs": OFFS, "probs": torch.rand(ROWS, generator=generator).requires_grad_()}


def step(seq: Any, **options: Any) -> list[Tensor]:
    x, side = inputs()
    y = seq(x, **side, **options)
    wanted = [x, side["probs"], *seq.parameters()]
    return [y, *torch.autograd.grad(y.square().sum(), wanted)]


@given(
    st.sets(st.sampled_from(PLACES)), st.booleans(), st.sampled_from(["plain", "scaled", "apart"])
)
def test_a_step_with_buffers_is_the_step_without(keys: set[str], fused: bool, kind: str) -> None:
    options = {
        "plain": {}, "scaled": {"scale_bias": True}, "apart": {"packed": False}
    }[kind]  # fmt: skip
    seq, out = model(**options), {key: place(key) for key in keys}
    with fo.fusion(fused):
        want, got = step(model(**options)), step(seq, out=out)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    assert all(torch.isfinite(buffer).all() for buffer in out.values())
    if "linear.y" in out:
        assert got[0].data_ptr() == out["linear.y"].data_ptr()
        assert torch.equal(got[0], out["linear.y"]) and not out["linear.y"].requires_grad
    if "norm.dx" in out:
        torch.testing.assert_close(out["norm.dx"], want[1])


def test_every_buffer_holds_what_its_name_says() -> None:
    seq, out = model(), {key: place(key) for key in PLACES}
    step(seq, out=out)
    twin, (x, side) = model(), inputs()
    h = x
    for name, op in twin.named_children():
        before = h
        h = op(h, **{n: side[n] for n in op.reads})
        torch.testing.assert_close(out[f"{name}.y"], h.detach())
        if name == "linear":
            (dx,) = torch.autograd.grad(h.square().sum(), before)
            torch.testing.assert_close(out["linear.dx"], dx)


@pytest.mark.parametrize("bias", [False, True])
def test_an_op_alone_writes_without_a_copy(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    op = fo.ops.GroupedLinear(E, D, F, bias=bias)
    x = torch.randn(3, 3, D, requires_grad=True)
    y, dx = torch.full((3, 3, F), torch.nan), torch.full((3, 3, D), torch.nan)
    want = op(x, offs=OFFS)
    grads = torch.autograd.grad(want.sin().sum(), [x, *op.parameters()])
    written: list[int] = []
    into = kernels.grouped_mm_into
    monkeypatch.setattr(
        kernels,
        "grouped_mm_into",
        lambda t, *a, **k: (written.append(t.data_ptr()), into(t, *a, **k)),
    )
    got = op(x, offs=OFFS, out={"y": y, "dx": dx})
    assert torch.equal(got, want) and got.data_ptr() == y.data_ptr()
    assert all(map(torch.equal, torch.autograd.grad(got.sin().sum(), [x, *op.parameters()]), grads))
    assert torch.equal(dx, grads[0]) and written == [y.data_ptr(), dx.data_ptr()]
    with torch.no_grad():
        assert op(2 * x, offs=OFFS, out={"y": y}).data_ptr() == y.data_ptr()
    assert torch.equal(y, op(2 * x, offs=OFFS))


class DoubleSaved(NamedTuple):
    x: Tensor | None


class Double(fo.Op[DoubleSaved]):
    """Writes where it is told to, as a kernel does: torch sees no write."""

    live_call = True
    saves_for = {"x": ()}

    def fwd(self, x: Tensor, *, call: fo.Call) -> fo.Out:
        y = (call.out or {}).get("y", torch.empty_like(x))
        y.data.copy_(2 * x)
        return fo.Out(y, DoubleSaved(x))

    def bwd(self, saved: DoubleSaved, dy: Tensor, *, call: fo.Call) -> fo.Grads:
        return fo.Grads(2 * dy)


def test_a_write_that_torch_does_not_see_is_told_to_it() -> None:
    seq = fo.Sequential({"twice": Double(), "linear": fo.ops.Linear(D, F)})
    x, out = torch.randn(ROWS, D, requires_grad=True), {"twice.y": torch.empty(ROWS, D)}
    first = seq(x, out=out)
    torch.testing.assert_close(first, seq["linear"](2 * x))
    seq(x, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


def test_a_buffer_that_is_written_again_while_it_is_saved_is_an_error() -> None:
    seq, out = model(), {"fc1.y": place("fc1.y")}
    x, side = inputs()
    first = seq(x, **side, out=out)
    seq(x, **side, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()
    for _ in range(2):  # one after the other is what buffers are for
        seq(x, **side, out=out).sum().backward()


def test_the_gradient_of_a_leaf_is_not_the_buffer() -> None:
    op, dx = fo.ops.GroupedLinear(E, D, F), torch.empty(ROWS, D)
    x = torch.randn(ROWS, D, requires_grad=True)
    op(x, offs=OFFS, out={"dx": dx}).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, dx)
    kept = x.grad.clone()
    dx.fill_(7)
    assert torch.equal(x.grad, kept)


def test_a_gradient_that_arrives_in_the_buffer_for_dx_is_refused() -> None:
    op, dx = fo.ops.GroupedLinear(E, D, D), torch.ones(ROWS, D)
    x = torch.randn(ROWS, D, requires_grad=True)
    y = op(x, offs=OFFS, out={"dx": dx})
    with pytest.raises(ShapeError, match="the buffer for dx lies over memory of dy"):
        y.backward(dx)


@pytest.mark.parametrize("delayed", [False, True])
def test_beside_main_grad_and_delayed_gradients(delayed: bool) -> None:
    options = {"accumulate_into_main_grad": True, "delay_wgrad": delayed}
    op, twin = fo.ops.GroupedLinear(E, D, F, **options), fo.ops.GroupedLinear(E, D, F)
    twin.load_state_dict(op.state_dict())
    for p in op.parameters():
        p.main_grad = torch.ones_like(p)
    x, y, dx = torch.randn(ROWS, D).requires_grad_(), place("linear.y"), place("norm.dx")
    fo.Sequential(op)(x, offs=OFFS, out={"0.y": y, "0.dx": dx}).sum().backward()
    fo.Sequential(op).backward_dw()
    x.grad = None
    twin(x, offs=OFFS).sum().backward()
    torch.testing.assert_close(dx, x.grad)
    for p, q in zip(op.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.main_grad - 1, q.grad)


def test_under_autocast_y_has_the_compute_dtype_and_dx_that_of_x() -> None:
    op, x = fo.ops.GroupedLinear(E, D, F), torch.randn(ROWS, D, requires_grad=True)
    dx = torch.empty(ROWS, D)
    with torch.autocast("cpu", torch.bfloat16):
        y = op(x, offs=OFFS, out={"y": torch.empty(ROWS, F, dtype=torch.bfloat16), "dx": dx})
        with pytest.raises(ShapeError, match=r"buffer for y is torch.float32, expected torch.bfl"):
            op(x, offs=OFFS, out={"y": torch.empty(ROWS, F)})
        want = op(x, offs=OFFS)
    assert torch.equal(y, want)
    y.float().sum().backward()
    assert torch.equal(x.grad, dx)  # type: ignore[arg-type]


def test_recomputation_writes_again() -> None:
    seq, out = model(), {"fc1.y": place("fc1.y"), "norm.dx": place("norm.dx")}
    x, side = inputs()
    want = step(model())
    y = checkpoint(lambda x: seq(x, **side, out=out), x, use_reentrant=False)
    y.square().sum().backward()
    torch.testing.assert_close(x.grad, want[1])
    torch.testing.assert_close(out["norm.dx"], want[1])


X = torch.randn(ROWS, D, requires_grad=True)
OP = fo.ops.GroupedLinear(E, D, D)


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ({"y": torch.empty(ROWS, D + 1)}, r"buffer for y of '0' \(GroupedLinear\) is \(9, 7\)"),
        ({"dx": torch.empty(ROWS - 1, D)}, r"expected contiguous \(9, 6\) on cpu"),
        ({"y": torch.empty(ROWS, D, device="meta")}, r"\(9, 6\) on meta, expected"),
        ({"y": torch.empty(D, ROWS).t()}, r"is non-contiguous, \(9, 6\)"),
        ({"y": torch.empty(ROWS, D, dtype=torch.float64)}, r"is torch.float64, expected torch.f"),
        ({"dx": torch.empty(ROWS, D).half()}, r"is torch.float16, expected torch.float32, the dty"),
        ({"y": torch.empty(ROWS, D, requires_grad=True)}, "requires a gradient"),
        ({"y": 3}, "is int, expected a tensor"),
        ({"y": X.detach()}, "lies over memory of x, which is still read"),
        ({"dx": X.detach()}, "lies over memory of x"),
        ({"y": OP.weight.detach().view(-1)[-54:].view(9, 6)}, "over memory of an input of it"),
        ({"z": torch.empty(1)}, r"GroupedLinear: there is no output 'z' .*some of \['y', 'dx'\]"),
    ],
)  # fmt: skip
def test_a_buffer_that_cannot_take_it_is_refused(out: dict[str, Any], said: str) -> None:
    with pytest.raises(FuseOpsError, match=said):
        OP(X, offs=OFFS, out=out)


@pytest.mark.parametrize(
    "out", [3, "y", ("y", X.detach()), torch.ones(2)], ids=["int", "str", "tuple", "tensor"]
)
def test_what_is_no_mapping_of_buffers_is_refused(out: Any) -> None:
    for call in (OP, fo.Sequential(OP)):
        with pytest.raises(FuseOpsError, match=r": out is \w+, expected buffers by their names"):
            call(X, offs=OFFS, out=out)


def test_buffers_may_not_lie_over_each_other() -> None:
    both = torch.empty(ROWS * D + 1)
    out = {"y": both[:-1].view(ROWS, D), "dx": both[1:].view(ROWS, D)}
    with pytest.raises(ShapeError, match="lies over memory of the buffer for y"):
        OP(X, offs=OFFS, out=out)
    assert not overlap(both[: ROWS * D // 2], both[ROWS * D // 2 :])
    seq = fo.Sequential({"a": fo.ops.Linear(D, D), "b": fo.ops.Linear(D, D)})
    with pytest.raises(ShapeError, match="lies over memory of"):
        seq(X, out={"a.y": both[:-1].view(ROWS, D), "b.y": both[1:].view(ROWS, D)})


@given(st.lists(st.sampled_from(PLACES), min_size=2, max_size=2, unique=True), st.integers(0, 8))
def test_two_names_share_no_memory_however_far_apart_they_are_written(
    keys: list[str], shift: int
) -> None:
    """After the step each would have to hold what its name says."""
    shapes = [place(key).shape for key in keys]
    arena = torch.empty(ROWS * 2 * F + shift)
    first, other = (
        arena[start : start + shape.numel()].view(shape)
        for start, shape in zip((0, shift), shapes, strict=True)
    )
    x, side = inputs()
    told = f"the buffer for {keys[1]} lies over memory of the buffer for {keys[0]}"
    with pytest.raises(ShapeError, match=re.escape(told)):
        model()(x, **side, out={keys[0]: first, keys[1]: other})


def test_what_is_not_written_is_refused() -> None:
    seq, buffer = model(), place("norm.dx")
    x, side = inputs()
    with pytest.raises(FuseOpsError, match="no gradient of its input is computed"):
        seq(x.detach(), **side, out={"norm.dx": buffer})
    with torch.no_grad(), pytest.raises(FuseOpsError, match="no gradient of its input"):
        seq(x, **side, out={"fc1.dx": buffer})
    for name in ("fc3.y", "fc1", "y", "fc1.weight", "inner.0.y"):
        with pytest.raises(FuseOpsError, match="there is no output"):
            seq(x, **side, out={name: buffer})
    with (
        fo.reference(),
        pytest.raises(FuseOpsError, match=r"cannot write to a buffer .*\(reference\)"),
    ):
        seq(x, **side, out={"fc2.y": place("fc2.y")})
    seq["fc2"].register_forward_hook(lambda *_: None)
    with pytest.raises(FuseOpsError, match=r"cannot write to a buffer .*\(has hooks\)"):
        seq(x, **side, out={"fc2.y": place("fc2.y")})


def test_not_under_compile() -> None:
    torch.compiler.reset()
    op = fo.ops.GroupedLinear(E, D, F)
    compiled = torch.compile(
        lambda x, y: op(x, offs=OFFS, out={"y": y}), backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match="out= is eager only"):
        compiled(X, torch.empty(ROWS, F))


def test_other_calls_are_planned_as_before() -> None:
    """Splitting around a buffer is for the calls that have one."""
    seq, (x, side) = model(), inputs()
    with fo.fusion(strict=["grouped_mlp"]):
        seq(x, **side)
    seq(x, **side, out={"linear.y": place("linear.y")})
    with fo.fusion(strict=["grouped_mlp"]):
        seq(x, **side, out={"linear.y": place("linear.y")})
        seq(x, **side)


SLICES = st.tuples(st.integers(0, 8), st.integers(1, 4), st.integers(1, 3))


@given(SLICES, SLICES)
def test_two_tensors_overlap_from_their_first_byte_to_their_last(a: Any, b: Any) -> None:
    whole = torch.zeros(24)
    (ours, mine), (theirs, yours) = (
        (
            whole.as_strided((count,), (step,), first),
            {*range(first, first + (count - 1) * step + 1)},
        )
        for first, count, step in (a, b)
    )
    assert overlap(ours, theirs) is bool(mine & yours) and not overlap(ours, theirs.clone())
