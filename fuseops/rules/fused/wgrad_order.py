"""The order and the number of parts in which the gradients of quantized experts are computed.

Where the peak of a step would exceed that of high precision, another order with a lower peak gives the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor

from fuseops.kernels.groups import padded_columns
from fuseops.kernels.tiles import FLOATS, cdiv
from fuseops.ops.linear import WEIGHT, Indexed, columns_from_codes, grad_operand
from fuseops.ops.op import Call, Calls
from fuseops.ops.tiles import tiles_of_columns
from fuseops.recipes import Operand, Roles, Scaling, gemm, operand
from fuseops.recipes.numerics import QuantizationStats
from fuseops.recipes.operands import inv_scale_of_rows
from fuseops.recipes.quantized import BLOCK, slice_features

from .routed_copies import FC1, FC2_DSWIGLU, copies_rows

PARTS = (1, 2, 4, 8)
# An excess over the peak of high precision that is not worth more launches: with few tokens a step waits for the host.
SLACK_BYTES = 16 << 20


def choose_parts(
    dy: Tensor, w1: Tensor | None, w2: Tensor | None, calls: Calls, index: Tensor | None
) -> int:
    """The number of parts of the weight gradients; 0: fc2's is computed first, in one piece.

    Otherwise it is computed last, and the columns of tokens, which both weight gradients read, exist for one part of
    their features at a time: the fewest parts whose peak is not above that of high precision.
    """
    roles = calls[2].precision.roles
    if w1 is None or w2 is None or roles is None or torch.compiler.is_compiling():
        return 0
    copies = _columns_copy_rows(roles, index)
    if not _can_defer(calls, copies):
        return 0
    rows, (_, h_width, width) = (dy if index is None else index).shape[0], w1.shape
    act_width = w2.shape[2]
    peaks = PeakBytes(dy.shape[0], rows, h_width, width, act_width, w2.element_size(), len(w2))
    max_parts = (
        0 if index is None else width // BLOCK if _can_split(dy, calls, copies) else int(copies)
    )
    count = _parts_for_any_copies(peaks, copies, index is not None, max_parts)
    if count is None:
        reads_x = copies_rows(dy, index, FC1, h_width)
        reads_dy = index is None or copies_rows(dy, index, FC2_DSWIGLU, act_width)
        count = _fewest_parts(peaks, copies, index is not None, max_parts, reads_x, reads_dy)
    return count


def wgrad_waits_for_dx(w2: Tensor | None, calls: Calls, index: Tensor | None) -> bool:
    """Whether fc2's weight gradient, if it is not last, is computed after dx: if the columns of the activation, which
    then stay alive (as dy does anyway), are fewer bytes than the gradient.
    """
    roles = calls[2].precision.roles
    if w2 is None or roles is None or torch.compiler.is_compiling():
        return False
    if index is None or not _columns_copy_rows(roles, index) or not _can_defer(calls, True):
        return False
    experts, width, _ = w2.shape
    return padded_columns(len(index), experts) < w2.element_size() * experts * width


def _columns_copy_rows(roles: Roles, index: Tensor | None) -> bool:
    """Whether columns of rows by index are quantized from a copy of the rows in high precision."""
    return index is not None and roles.columns and not columns_from_codes(roles.grad_output)


def describe(parts: int, wgrad_waits_for_dx: bool) -> str:
    """A sentence of `explain()` on the order; "" for the default one."""
    if not parts:
        waits = "fc2's weight gradient waits for dx, where a step peaks lower"
        return waits if wgrad_waits_for_dx else ""
    last = "fc2's weight gradient is made last, where a step peaks lower"
    split = f", with columns of x and dy in {parts} parts of their features"
    return last if parts == 1 else last + split


def _can_defer(calls: Calls, copies: bool) -> bool:
    """Whether fc2's weight gradient can be computed after fc1's. Columns from copies need dy itself until then, and
    gain only if both weight gradients and dx are computed by kernels.
    """
    first, _, last = calls
    if "weight" not in last.needs or "weight" in (last.out or {}):
        return False
    if not copies:
        return True
    both = "x" in last.needs and "weight" in first.needs
    return both and last.precision.roles.kernels and last.scales is None  # type: ignore[union-attr]


def _can_split(dy: Tensor, calls: Calls, copies: bool) -> bool:
    """Whether the columns of a part of the features are those of all features, so that weight gradients can be split:
    squares, or columns from copies that kernels multiply. A gradient that is added to main_grad is not split.
    """
    first, _, last = calls
    if dy.dtype not in FLOATS or QuantizationStats.active or "weight" in (first.out or {}):
        return False
    if copies:
        same = map(_same_blocks, (first.precision.roles, last.precision.roles))
        return first.scales is None and all(same)
    return first.precision.roles.square_columns and last.precision.roles.square_columns  # type: ignore[union-attr]


def _same_blocks(roles: Roles | None) -> bool:
    """Whether kernels multiply the columns of x and dy, which have equal blocks."""
    if roles is None or not roles.kernels:
        return False
    x, dy = cast("tuple[Scaling, Scaling]", (roles.input, roles.grad_output))
    return (x.block, x.columns) == (dy.block, dy.columns)


class PeakBytes(NamedTuple):
    """`PeakBytes` estimate the peak of an expert MLP's backward in several orders, without what is alive throughout.

    A code takes one byte.
    """

    tokens: int
    rows: int
    h_width: int
    width: int  # of x and dy
    act_width: int
    itemsize: int  # of high precision
    experts: int

    @property
    def columns(self) -> int:
        """The padded number of rows, in which groups begin at multiples of 128."""
        return padded_columns(self.rows, self.experts)

    @property
    def dw1(self) -> int:
        return self.itemsize * self.experts * self.h_width * self.width

    @property
    def dw2(self) -> int:
        return self.itemsize * self.experts * self.act_width * self.width

    @property
    def _dx(self) -> int:
        return self.itemsize * self.tokens * self.width

    def peak_high_precision(self, copies_x: bool, copies_dy: bool) -> int:
        """The peak in high precision: at fc2's or at fc1's weight gradient."""
        fc2 = self.rows * (self.width * copies_dy + self.act_width + self.h_width)
        fc1 = self.rows * (self.h_width + self.width * copies_x)
        return max(
            self.itemsize * fc2 + self.dw2, self.itemsize * fc1 + self.dw1 + self.dw2 + self._dx
        )

    def peak_wgrad_first(self) -> int:
        """The peak with fc2's weight gradient first: at the activation, at dx or at fc1's weight gradient."""
        act = self.itemsize * (self.act_width + self.h_width) + self.h_width
        return max(
            self.rows * act + self.columns * (self.act_width + self.width),
            self.rows * (self.h_width + self.itemsize * self.width)
            + self.dw1 // self.itemsize
            + self.dw2,
            self.columns * (self.h_width + self.width) + self.dw1 + self.dw2 + self._dx,
        )

    def waiting(self, by_token: bool) -> int:
        """The bytes of the operands of fc2's weight gradient: columns of the activation, dy by token or as columns."""
        return self.columns * self.act_width + self.width * (
            self.tokens if by_token else self.columns
        )

    def peak_wgrad_last(self, parts: int) -> int:
        """The peak with fc2's weight gradient last: at either weight gradient."""
        part = self.width // parts
        fc1 = self.waiting(True) + self.columns * (self.h_width + part)
        fc2 = self.columns * (self.act_width + part) + self.dw2
        codes = self.tokens * (self.width + part) if parts > 1 else 0
        return max(fc1, fc2) + codes + self.dw1 + self._dx

    def peak_wgrad_first_copied(self) -> int:
        """`peak_wgrad_first` where columns are quantized from a copy: at fc1's weight gradient."""
        copy = self.itemsize * self.rows * self.width
        fc1 = self.columns * (self.h_width + self.width) + max(copy, self.dw1)
        return fc1 + self.dw2 + self._dx

    def peak_wgrad_last_copied(self, parts: int) -> int:
        """`peak_wgrad_last` where columns are quantized from a copy: at either weight gradient, with dy by token."""
        part = self.width // parts
        copy, columns = self.itemsize * self.rows * part, self.columns * part
        # in parts, the gradient is allocated before the copy of a part
        dw1, dw2 = (max(copy, dw) if parts == 1 else copy + dw for dw in (self.dw1, self.dw2))
        fc1 = self.columns * self.h_width + columns + dw1
        fc2 = columns + dw2 + self.dw1
        return max(fc1, fc2) + self.columns * self.act_width + 2 * self._dx


@functools.lru_cache(maxsize=1024)
def _parts_for_any_copies(
    peaks: PeakBytes, copies: bool, by_index: bool, max_parts: int
) -> int | None:
    """`_fewest_parts` if it does not depend on which rows high precision copies, else None."""
    either = (False, True)
    count = {
        _fewest_parts(peaks, copies, by_index, max_parts, x, dy) for x in either for dy in either
    }
    return count.pop() if len(count) == 1 else None


@functools.lru_cache(maxsize=1024)
def _fewest_parts(
    peaks: PeakBytes, copies: bool, by_index: bool, max_parts: int, copies_x: bool, copies_dy: bool
) -> int:
    """The result of `choose_parts`.

    copies: columns are quantized from copies.  by_index: rows are read by index.  max_parts: 0 if the features cannot
    be split.  copies_x, copies_dy: high precision copies these rows
    """
    high = peaks.peak_high_precision(copies_x, copies_dy)
    first = peaks.peak_wgrad_first_copied() if copies else peaks.peak_wgrad_first()
    last = peaks.peak_wgrad_last_copied if copies else peaks.peak_wgrad_last
    if first <= high + SLACK_BYTES or (not copies and peaks.waiting(by_index) >= peaks.dw2):
        return 0
    if not max_parts:
        return 1
    n = next(n for n in PARTS if last(n) <= high or 2 * n > max_parts or n == PARTS[-1])
    return n if not copies or first > last(n) + SLACK_BYTES else 0


# --- a weight gradient


def columns_of_dy(dy_rows: Indexed, offs: Tensor, call: Call) -> Indexed:
    """The operand dy of the weight gradient, from the second result of `staged_grad_operands`."""
    if call.precision.roles.high_wgrad:  # type: ignore[union-attr]
        return dy_rows
    return grad_operand(dy_rows[0], call, WEIGHT, offs, dy_rows[1]), None


def wgrad_in_parts(
    weight: Tensor,
    dy_rows: list[Indexed],
    source: Callable[[], Indexed],
    offs: Tensor,
    call: Call,
    parts: int,
) -> Tensor:
    """The gradient of a weight, computed for one part of the features at a time: of dy or x, whichever has an index.

    dy_rows: [argument of `columns_of_dy`], which is popped.  source: returns the rows of x
    """
    roles = cast("Roles", call.precision.roles)
    dy, index = dy_rows.pop()
    by_dy = index is not None
    if by_dy:
        x, _ = source()
        tokens, part_of = _column_source(dy, cast("Scaling", roles.grad_output), offs, index)
    else:
        dy, _ = columns_of_dy((dy, None), offs, call)
        x, index = source()
        tokens, part_of = _column_source(x, cast("Scaling", roles.input), offs, index)
    dw = weight.new_empty(weight.shape, dtype=tokens.dtype)
    axis = 1 if by_dy else 2
    step = BLOCK * cdiv(weight.shape[axis], BLOCK * parts)
    for begin in range(0, weight.shape[axis], step):
        size = min(step, weight.shape[axis] - begin)
        part = part_of(slice_features(tokens, begin, size))
        operands = (part, x) if by_dy else (dy, part)
        dw_part, tables = dw.narrow(axis, begin, size), functools.partial(tiles_of_columns, call)
        gemm.wgrad_into(dw_part, *operands, offs, False, call.name, tables)
        del part, operands
    return dw


def _column_source(
    x: Operand, scaling: Scaling, offs: Tensor, index: Tensor | None
) -> tuple[Operand, Callable[[Operand], Operand]]:
    """(tokens, a function from a slice of their features to its columns, of rows by index).

    The tokens are quantized if columns follow from codes. Else, with one scale a group, that of all features is used.
    """
    inv = None
    if columns_from_codes(scaling):
        x = operand(x, scaling)
    elif isinstance(x, Tensor) and index is not None:
        inv = inv_scale_of_rows(x, scaling, offs, index)
    return x, functools.partial(
        operand, scaling=scaling, offs=offs, row=False, col=True, index=index, inv=inv
    )
