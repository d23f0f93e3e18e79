"""`fo.debug()`: checks of values on the device, whose errors name the path of the op."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.errors import FuseOpsError, ShapeError
from fuseops.kernels.groups import bad_end_message, bad_ends, group_starts
from fuseops.ops import scopes
from fuseops.recipes.numerics import GemmError, OperandNumbers, QuantizationStats

from . import bridge, checks, run


class SplitReport(NamedTuple):
    """A `SplitReport` is the outcome of one check of group boundaries, while it is copied to the host."""

    where: str
    rows: int
    found: Tensor  # (3,) int64, pinned: the first bad group (E where there is none), its begin and its end
    groups: int
    copied: Any  # a CUDA event

    def error(self) -> ShapeError | None:
        group, start, end = self.found.tolist()
        if group == self.groups:
            return None
        return ShapeError(f"{self.where}: {bad_end_message(group, start, end, self.rows)}")


class Debug:
    """A `Debug` holds the checks and measured numbers of one scope."""

    def __init__(self) -> None:
        self.reports: list[SplitReport] = []
        self.stats = QuantizationStats()

    def operands(self) -> list[OperandNumbers]:
        """Statistics of the quantized operands of GEMMs, by the path of the op. Waits for the device."""
        return self.stats.operands()

    def gemms(self) -> list[GemmError]:
        """The error of every GEMM of quantized operands, against the same GEMM of the original operands."""
        return self.stats.gemms()

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.operands(), *self.gemms())))

    def check_kept_weights(self) -> None:
        """Raise FuseOpsError for a cached quantized weight that is stale."""
        stale = self.stats.stale_weights()
        if stale:
            raise FuseOpsError(
                f"{stale[0]}: its cached quantized weight is stale: something wrote to the weight without changing its "
                "version. Call fuseops.weights_changed(model) after such a write."
            )

    def splits(self, offs: Tensor, rows: int) -> None:
        """Start a check of the ends of groups on their device.  Raises ShapeError for an earlier check that failed."""
        where = running_op()
        if torch.cuda.is_current_stream_capturing():  # checked in every replay; names no group
            torch_private.assert_async(
                ~bad_ends(offs, rows).any(), f"{where}: offs must not fall, nor end beyond the rows"
            )
            return
        self.raise_failed()
        groups = len(offs)
        numbers = torch.arange(groups, device=offs.device)
        first = torch.where(bad_ends(offs, rows), numbers, groups).min()
        at = first.clamp(max=groups - 1).reshape(1)
        found = torch.cat([first.reshape(1), group_starts(offs)[at].long(), offs[at].long()])
        # copied before the next kernel runs, which may fail because of these ends
        host = torch.tensor([groups, 0, 0], pin_memory=True).copy_(found, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(offs.device))
        self.reports.append(SplitReport(where, rows, host, groups, copied))

    def raise_failed(self, wait: bool = False) -> None:
        """Raise ShapeError for the first failed check whose outcome has arrived.   wait: for all outcomes"""
        while self.reports and (wait or self.reports[0].copied.query()):
            error = self.reports.pop(0).error()
            if error is not None:
                self.reports.clear()
                raise error


@scopes.generator_scope
def debug() -> Iterator[Debug]:
    """Check values on the device, and measure the effect of quantization, for the calls made inside.

    The ends of groups (`offs`) must not decrease, nor exceed the rows. ShapeError names the op and the group; it is
    raised in a later call inside, or at the end of the scope, which waits for the device. If a kernel failed because of
    bad ends, its error is the cause. In compiled code and CUDA graphs the check is a device assertion, which names no
    group.

    Under a recipe, `with fo.debug() as seen`: `seen.operands()`, `seen.gemms()` and `print(seen)` give statistics by
    the path of the op: amax, the shares of codes flushed to zero and saturated, the error of every GEMM. For these each
    GEMM runs once more, in float32; results stay the same. Paths are known once `configure` or `explain` has seen the
    model; until then ops of one name are numbered in the order in which they ran first, `fc1 #2`. FuseOpsError names a
    cached quantized weight that is stale, since its weight was written to without `weights_changed`. None of this in
    compiled code and CUDA graphs.
    """
    scope = scopes.current()
    if scope.debug is not None:
        yield scope.debug
        return
    scope.debug = checks = Debug()
    before, QuantizationStats.active = QuantizationStats.active, checks.stats
    try:
        yield checks
        if checks.reports:
            torch.cuda.synchronize()
    except Exception as error:
        if not isinstance(error, FuseOpsError):  # a kernel failed, maybe since a check had failed
            try:
                checks.raise_failed(wait=True)
            except ShapeError as found:
                raise found from error
        raise
    finally:
        scope.debug = None
        QuantizationStats.active = before
        checks.stats.originals.clear()
    checks.raise_failed(wait=True)
    checks.check_kept_weights()


def running_op() -> str:
    """Describe the op whose forward runs, found on the stack."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not run.run_segments.__code__:
        frame = frame.f_back
    if frame is None:
        return "a grouped op"
    return bridge.where(frame.f_locals["seg"], frame.f_locals["path"], checks.running_step())
