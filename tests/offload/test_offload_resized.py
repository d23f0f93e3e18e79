"""A saved tensor whose storage is emptied, grown or given other memory comes back right, or is refused: what lies at an
address that was its own is never read.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given
from lazy_lanes import LazyLanes
from test_cuda_lanes_counted import driven
from torch import Tensor, nn

from fuseops import offload
from fuseops.errors import InPlaceError
from fuseops.offload.lanes.cpu import CpuLanes
from fuseops.offload.records import RESIZED


def emptied(t: Tensor) -> None:
    t.untyped_storage().resize_(0)


def shrunk(t: Tensor) -> None:
    t.untyped_storage().resize_(t.nbytes // 2)


def grown(t: Tensor) -> None:
    t.untyped_storage().resize_(3 * t.nbytes)


def filled_again(t: Tensor) -> None:
    nbytes = t.nbytes
    t.untyped_storage().resize_(0)
    t.untyped_storage().resize_(nbytes)
    t.fill_(float("nan"))


def other_memory(t: Tensor) -> None:
    t.untyped_storage().share_memory_()


def set_to_another(t: Tensor) -> None:
    t.set_(torch.full_like(t, float("nan")).untyped_storage(), 0, t.shape)


def data_of_another(t: Tensor) -> None:
    t.data = torch.full_like(t, float("nan"))


SIZES, WRITES = [emptied, shrunk, grown], [filled_again, set_to_another]
CHANGES = [*SIZES, *WRITES, other_memory, data_of_another]
junk: list[Tensor] = []  # lies in whatever was let go


def change(how: Callable[[Tensor], None], t: Tensor) -> None:
    how(t)
    junk.extend(torch.full_like(t, float("nan")) for _ in range(8))


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, t: Tensor) -> Tensor:
        ctx.save_for_backward(t)
        return x * t

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy * ctx.saved_tensors[0], None


class Layer(nn.Module):
    """Saves a tensor; the storage of that of one layer is changed before its forward ends."""

    how: Callable[[Tensor], None] | None = None

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def forward(self, x: Tensor) -> Tensor:
        self.t = torch.full((self.n,), 2.0)
        y = Scale.apply(x, self.t)
        if self.how is not None:
            change(self.how, self.t)
        return Scale.apply(y, torch.full((self.n,), 0.5))


@contextlib.contextmanager
def lanes_of_kind(kind: str, seed: int) -> Iterator[None]:
    with contextlib.ExitStack() as inside, pytest.MonkeyPatch.context() as patch:
        if kind == "cuda":
            inside.enter_context(driven())
        else:
            lanes = CpuLanes() if kind == "cpu" else LazyLanes(random.Random(seed).randrange)
            patch.setattr("fuseops.offload.scheduler.make_lanes", lambda *_: lanes)
            patch.setattr("fuseops.offload.scopes.lanes_of", lambda *_: lanes)
        yield


class Program(NamedTuple):
    """A `Program` is a step of six layers of n numbers, in one of which a saved tensor's memory changes.

    late: after the forward, and not within it
    """

    n: int
    mode: str
    small: int
    lag: int
    how: Callable[[Tensor], None]
    which: int
    late: bool


programs = st.builds(
    Program,
    n=st.sampled_from([4, 48, 700]),
    mode=st.sampled_from(["scheduler", "scheduler", "to_host"]),
    small=st.sampled_from([0, 1 << 20]),
    lag=st.integers(0, 3),
    how=st.sampled_from(CHANGES),
    which=st.integers(0, 5),
    late=st.booleans(),
)


def step(program: Program) -> tuple[offload.Report, str, Tensor | None]:
    """Of a step: the report, the error of its backward, and the gradient if there is none."""
    n, mode, small, lag, how, which, late = program
    model, x = nn.Sequential(*(Layer(n) for _ in range(6))), torch.randn(n, requires_grad=True)
    scope: Any = offload.to_host(min_bytes=1)
    if mode == "scheduler":
        scope = offload.Scheduler(model, "*", policy=offload.Policy(min_bytes=1), lag=lag)
        scope._scope.mover.schedule.small = small
    if not late:
        model[which].how = how
    error = ""
    with scope:
        y = model(x)
        if late:
            change(how, model[which].t)
        try:
            y.sum().backward()
        except InPlaceError as raised:
            error = str(raised)
    del y
    junk.clear()
    return scope.report(), error, x.grad


@given(
    kind=st.sampled_from(["cpu", "lazy", "cuda"]), seed=st.integers(0, 1 << 20), program=programs
)
@example("cpu", 0, Program(48, "scheduler", 1 << 20, 0, emptied, 0, False))
@example("cpu", 0, Program(48, "scheduler", 1 << 20, 0, other_memory, 0, False))
@example("cuda", 0, Program(48, "scheduler", 0, 1, other_memory, 0, False))
def test_what_has_other_memory_is_right_or_refused(kind: str, seed: int, program: Program) -> None:
    n, how = program.n, program.how
    with lanes_of_kind(kind, seed):
        report, error, grad = step(program)
    if error:
        assert how in (WRITES if "modified in place" in error else [*SIZES, other_memory])
        assert how is not other_memory or kind != "cpu"
    else:
        assert how not in WRITES and grad is not None and torch.equal(grad, torch.ones(n))
    assert report.host_bytes == 0
    stays = [e.reason for e in report.entries].count(RESIZED)
    waited = program.mode == "scheduler" and program.small and not program.late
    assert stays == 0 if not waited else stays == (how in SIZES)
