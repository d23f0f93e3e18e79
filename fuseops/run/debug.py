"""`fo.debug()` checks on the device what only the device knows, and reports it with the path of the op."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.errors import FuseOpsError, ShapeError
from fuseops.ops import scopes
from fuseops.ops.splits import bad_end_message, bad_ends, group_starts
from fuseops.recipes.numbers import GemmError, Numbers, OperandNumbers, watch

from . import bridge, checks, run


class SplitReport(NamedTuple):
    """A `SplitReport` is the outcome of one check of groups' boundaries, on its way to the host."""

    where: str
    rows: int
    found: Tensor  # (3,) int64, pinned: the first bad group (E where there is none), its begin and its end
    groups: int
    arrived: Any  # a CUDA event

    def error(self) -> ShapeError | None:
        group, start, end = self.found.tolist()
        if group == self.groups:
            return None
        return ShapeError(f"{self.where}: {bad_end_message(group, start, end, self.rows)}")


class Debug:
    """A `Debug` holds the checks and measured numbers of one scope."""

    def __init__(self) -> None:
        self.reports: list[SplitReport] = []
        self.numbers = Numbers()

    def operands(self) -> list[OperandNumbers]:
        """What quantization did to the operands of GEMMs, by the path of the op. Waits for the device."""
        return self.numbers.operands()

    def gemms(self) -> list[GemmError]:
        """The error of every GEMM of quantized operands against that of the operands as they were."""
        return self.numbers.gemms()

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.operands(), *self.gemms())))

    def check_kept_weights(self) -> None:
        """Raise FuseOpsError for a quantized weight that was kept while the weight was written to."""
        for op, stale in self.numbers.stale.items():
            if stale:
                raise FuseOpsError(
                    f"{op}: its quantized weight is kept, and is not what the weight gives: something wrote to the "
                    "weight that moved no version of it. Call fuseops.weights_changed(model) after it."
                )

    def splits(self, offs: Tensor, rows: int) -> None:
        """Check the ends of groups on their device.  Raises ShapeError for an earlier check that failed by now."""
        where = running()
        if torch.cuda.is_current_stream_capturing():  # checked in every replay; names no group
            torch_private.assert_async(
                ~bad_ends(offs, rows).any(), f"{where}: offs must not fall, nor end beyond the rows"
            )
            return
        self.raise_what_arrived()
        groups = len(offs)
        numbers = torch.arange(groups, device=offs.device)
        first = torch.where(bad_ends(offs, rows), numbers, groups).min()
        at = first.clamp(max=groups - 1).reshape(1)
        found = torch.cat([first.reshape(1), group_starts(offs)[at].long(), offs[at].long()])
        # by a copy that the next kernel, which may fail over these ends, does not wait for
        host = torch.tensor([groups, 0, 0], pin_memory=True).copy_(found, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(offs.device))
        self.reports.append(SplitReport(where, rows, host, groups, arrived))

    def raise_what_arrived(self, wait: bool = False) -> None:
        """Raise ShapeError for the first check that failed."""
        while self.reports and (wait or self.reports[0].arrived.query()):
            error = self.reports.pop(0).error()
            if error is not None:
                self.reports.clear()
                raise error


@scopes.generator_scope
def debug() -> Iterator[Debug]:
    """Check on the device what cannot be seen without waiting for it, and look into numbers, for the calls made inside.

    The ends of groups (`offs`): none before the one before it, none beyond the rows. Raises ShapeError, which names the
    op and the group, in a later call inside or at the end of the scope, which waits for the device. A kernel that
    fails over bad ends is the cause of that error.
    In compiled code and in CUDA graphs the check is an assertion on the device, which names no group.

    Under a recipe: `with fo.debug() as seen`, and `seen.operands()`, `seen.gemms()` and `print(seen)` say by the path
    of the op what quantization did: amax, the shares of codes flushed to zero and saturated, the error of every GEMM.
    Each GEMM runs once more for it, in float32; results stay the same. A quantized weight that a recipe keeps is
    compared with the weight, and FuseOpsError names one that was written to without an announcement. Not in compiled
    code and CUDA graphs.
    """
    here = scopes.current()
    if here.debug is not None:
        yield here.debug
        return
    here.debug = checks = Debug()
    before = watch(checks.numbers)
    try:
        yield checks
        if checks.reports:
            torch.cuda.synchronize()
    except Exception as error:
        if not isinstance(error, FuseOpsError):  # a kernel failed: had a check, before it?
            try:
                checks.raise_what_arrived(wait=True)
            except ShapeError as found:
                raise found from error
        raise
    finally:
        here.debug = None
        watch(before)
        checks.numbers.originals.clear()
    checks.raise_what_arrived(wait=True)
    checks.check_kept_weights()


def running() -> str:
    """The op whose forward runs, in words: read off the stack, since only here anybody asks."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not run.run_segments.__code__:
        frame = frame.f_back
    if frame is None:
        return "a grouped op"
    return bridge.where(frame.f_locals["seg"], frame.f_locals["path"], checks.running_step())
