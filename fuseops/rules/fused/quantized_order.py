"""In which order the gradients of quantized experts are made, and in how many parts: where a step would hold more than
one in high precision, in another order that holds less, to the same bits.
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
from fuseops.recipes.numbers import Measuring
from fuseops.recipes.operands import up_of_rows
from fuseops.recipes.quantized import BLOCK, some_features

from .routed_copies import FC1, FC2_DSWIGLU, copies_rows

PARTS = (1, 2, 4, 8)
# Bytes above high precision's that are worth no launches: of few tokens, whose step waits for the host.
SPARE = 16 << 20


def parts(
    dy: Tensor, w1: Tensor | None, w2: Tensor | None, calls: Calls, index: Tensor | None
) -> int:
    """0: fc2's weight gradient comes first. Else last, and the columns of tokens, which both weight gradients read, are
    there for one of so many parts of their features at a time: as few as hold no more than high precision does.
    """
    roles = calls[2].precision.roles
    if w1 is None or w2 is None or roles is None or torch.compiler.is_compiling():
        return 0
    copied = _copied(roles, index)
    if not _can_wait(calls, copied):
        return 0
    rows, (_, wide, width) = (dy if index is None else index).shape[0], w1.shape
    hidden = w2.shape[2]
    held = Held(dy.shape[0], rows, wide, width, hidden, w2.element_size(), len(w2))
    most = 0 if index is None else width // BLOCK if _divisible(dy, calls, copied) else int(copied)
    found = _whatever_is_read(held, copied, index is not None, most)
    if found is None:
        reads_x = copies_rows(dy, index, FC1, wide)
        reads_dy = index is None or copies_rows(dy, index, FC2_DSWIGLU, hidden)
        found = _fewest(held, copied, index is not None, most, reads_x, reads_dy)
    return found


def behind_dx(w2: Tensor | None, calls: Calls, index: Tensor | None) -> bool:
    """Whether fc2's weight gradient, where it is not last, waits for dx: where columns of the activation, which wait
    beside a dy that lives on, are fewer bytes.
    """
    roles = calls[2].precision.roles
    if w2 is None or roles is None or torch.compiler.is_compiling():
        return False
    if index is None or not _copied(roles, index) or not _can_wait(calls, True):
        return False
    experts, width, _ = w2.shape
    return padded_columns(len(index), experts) < w2.element_size() * experts * width


def _copied(roles: Roles, index: Tensor | None) -> bool:
    """Whether columns, with one scale a group or of blocks of their own, are made of copies in high precision."""
    return index is not None and roles.columns and not columns_from_codes(roles.grad_output)


def in_words(parts: int, behind_dx: bool) -> str:
    """What `explain()` says of an order; nothing of the first."""
    if not parts:
        return "fc2's weight gradient waits for dx, where a step peaks lower" if behind_dx else ""
    said = "fc2's weight gradient is made last, where a step peaks lower"
    return (
        said
        if parts == 1
        else f"{said}, with columns of x and dy in {parts} parts of their features"
    )


def _can_wait(calls: Calls, copied: bool) -> bool:
    """Whether what fc2's weight gradient reads can wait for it: dy itself, which lives on, where columns are made of a
    copy of it.
    """
    first, _, last = calls
    if "weight" not in last.needs or "weight" in (last.out or {}):
        return False
    if not copied:
        return True
    both = "x" in last.needs and "weight" in first.needs
    return both and last.precision.roles.kernels and last.scales is None  # type: ignore[union-attr]


def _divisible(dy: Tensor, calls: Calls, copied: bool) -> bool:
    """Whether both weight gradients, which are nobody's sums, are of columns that parts of the features give alike: of
    squares, whose scales the parts keep, or such as kernels make of copies and multiply.
    """
    first, _, last = calls
    if dy.dtype not in FLOATS or Measuring.numbers or "weight" in (first.out or {}):
        return False
    if copied:
        alike = map(_alike, (first.precision.roles, last.precision.roles))
        return first.scales is None and all(alike)
    return first.precision.roles.squares and last.precision.roles.squares  # type: ignore[union-attr]


def _alike(roles: Roles | None) -> bool:
    """Whether kernels multiply columns of x with those of dy."""
    if roles is None or not roles.kernels:
        return False
    x, dy = cast("tuple[Scaling, Scaling]", (roles.input, roles.grad_output))
    return (x.block, x.columns) == (dy.block, dy.columns)


class Held(NamedTuple):
    """A `Held` counts the bytes that live at the moments where the peak of an expert MLP's backward may be, of codes
    one an element, but for what lives in all.
    """

    tokens: int
    rows: int
    wide: int  # of h
    width: int  # of x and dy
    hidden: int
    item: int  # bytes of an element in high precision
    experts: int

    @property
    def columns(self) -> int:
        """Of rows whose groups begin at multiples of 128."""
        return padded_columns(self.rows, self.experts)

    @property
    def dw1(self) -> int:
        return self.item * self.experts * self.wide * self.width

    @property
    def dw2(self) -> int:
        return self.item * self.experts * self.hidden * self.width

    @property
    def _dx(self) -> int:
        return self.item * self.tokens * self.width

    def high(self, copies_x: bool, copies_dy: bool) -> int:
        """In high precision: at fc2's weight gradient, and at fc1's."""
        fc2 = self.rows * (self.width * copies_dy + self.hidden + self.wide)
        fc1 = self.rows * (self.wide + self.width * copies_x)
        return max(self.item * fc2 + self.dw2, self.item * fc1 + self.dw1 + self.dw2 + self._dx)

    def first(self) -> int:
        """With fc2's weight gradient first: through the activation, at dx and at fc1's weight gradient."""
        act = self.item * (self.hidden + self.wide) + self.wide
        return max(
            self.rows * act + self.columns * (self.hidden + self.width),
            self.rows * (self.wide + self.item * self.width) + self.dw1 // self.item + self.dw2,
            self.columns * (self.wide + self.width) + self.dw1 + self.dw2 + self._dx,
        )

    def waits(self, by_token: bool) -> int:
        """What fc2's weight gradient reads: columns of the activation, dy by token or as columns."""
        return self.columns * self.hidden + self.width * (self.tokens if by_token else self.columns)

    def last(self, parts: int) -> int:
        """With it last: at both weight gradients."""
        part = self.width // parts
        fc1 = self.waits(True) + self.columns * (self.wide + part)
        fc2 = self.columns * (self.hidden + part) + self.dw2
        codes = self.tokens * (self.width + part) if parts > 1 else 0
        return max(fc1, fc2) + codes + self.dw1 + self._dx

    def first_copied(self) -> int:
        """`first` at fc1's weight gradient, where columns of rows by index are made of a copy in high precision."""
        copy = self.item * self.rows * self.width
        fc1 = self.columns * (self.wide + self.width) + max(copy, self.dw1)
        return fc1 + self.dw2 + self._dx

    def last_copied(self, parts: int) -> int:
        """`last` of such columns, beside dy by token: at both weight gradients, behind which one more copy comes."""
        part = self.width // parts
        copy, columns = self.item * self.rows * part, self.columns * part
        # what parts are written into is there before them
        dw1, dw2 = (max(copy, dw) if parts == 1 else copy + dw for dw in (self.dw1, self.dw2))
        fc1 = self.columns * self.wide + columns + dw1
        fc2 = columns + dw2 + self.dw1
        return max(fc1, fc2) + self.columns * self.hidden + 2 * self._dx


@functools.lru_cache(maxsize=1024)
def _whatever_is_read(held: Held, copied: bool, by_index: bool, most: int) -> int | None:
    """`_fewest`, where it is the same whichever rows high precision copies."""
    either = (False, True)
    found = {_fewest(held, copied, by_index, most, x, dy) for x in either for dy in either}
    return found.pop() if len(found) == 1 else None


@functools.lru_cache(maxsize=1024)
def _fewest(
    held: Held, copied: bool, by_index: bool, most: int, copies_x: bool, copies_dy: bool
) -> int:
    """`parts`, of rows by index or as they lie, whose columns are made of copies or of codes, and of features that can
    be had in `most`; 0: in none.   copies_x, copies_dy: whether high precision copies those rows
    """
    high = held.high(copies_x, copies_dy)
    first = held.first_copied() if copied else held.first()
    last = held.last_copied if copied else held.last
    if first <= high + SPARE or (not copied and held.waits(by_index) >= held.dw2):
        return 0
    if not most:
        return 1
    n = next(n for n in PARTS if last(n) <= high or 2 * n > most or n == PARTS[-1])
    return n if not copied or first > last(n) + SPARE else 0


# --- a weight gradient


def columns(left: Indexed, offs: Tensor, call: Call) -> Indexed:
    """dy as the weight gradient multiplies it, of what `staged_grad_operands` has left."""
    if call.precision.roles.high_wgrad:  # type: ignore[union-attr]
        return left
    return grad_operand(left[0], call, WEIGHT, offs, left[1]), None


def in_parts(
    weight: Tensor,
    left: list[Indexed],
    source: Callable[[], Indexed],
    offs: Tensor,
    call: Call,
    parts: int,
) -> Tensor:
    """The gradient of a weight, written some of the tokens' features at a time: of those of dy, or of x, the one that
    has an index.   left: as of `columns`, which is taken out; source: gives x
    """
    roles = cast("Roles", call.precision.roles)
    dy, index = left.pop()
    by_dy = index is not None
    if by_dy:
        x, _ = source()
        tokens, part_of = _some_columns(dy, cast("Scaling", roles.grad_output), offs, index)
    else:
        dy, _ = columns((dy, None), offs, call)
        x, index = source()
        tokens, part_of = _some_columns(x, cast("Scaling", roles.input), offs, index)
    dw = weight.new_empty(weight.shape, dtype=tokens.dtype)
    axis = 1 if by_dy else 2
    step = BLOCK * cdiv(weight.shape[axis], BLOCK * parts)
    for begin in range(0, weight.shape[axis], step):
        size = min(step, weight.shape[axis] - begin)
        part = part_of(some_features(tokens, begin, size))
        operands = (part, x) if by_dy else (dy, part)
        some, tables = dw.narrow(axis, begin, size), functools.partial(tiles_of_columns, call)
        gemm.wgrad_into(some, *operands, offs, False, call.name, tables)
        del part, operands
    return dw


def _some_columns(
    x: Operand, scaling: Scaling, offs: Tensor, index: Tensor | None
) -> tuple[Operand, Callable[[Operand], Operand]]:
    """(tokens, what makes the columns of rows by index of some of their features): of codes where columns are made of
    those, else of the rows, with the scales of all features where a group has one.
    """
    up = None
    if columns_from_codes(scaling):
        x = operand(x, scaling)
    elif isinstance(x, Tensor) and index is not None:
        up = up_of_rows(x, scaling, offs, index)
    return x, functools.partial(
        operand, scaling=scaling, offs=offs, row=False, col=True, index=index, up=up
    )
