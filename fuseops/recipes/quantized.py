"""Quantized tensors are plain dataclasses of component tensors, never a `torch.Tensor` subclass.

So checkpointing, saved-tensor hooks and offload see real storages, and a component can be freed or moved alone.
Outside of ops one is a value like a tensor: it goes into a Sequential and comes out of one, and its gradient, in high
precision, goes through its `carrier`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fuseops import kernels as K
from fuseops.errors import FuseOpsError

from .carrier import carrier_of, through
from .scaling import E4M3, Block, Scaling

BLOCK = 128
SWIZZLED = 5  # axes of scales that lie as tensor cores of Blackwell read them


class Layout(NamedTuple):
    """A `Layout` holds codes, and the scales that they are multiplied by to get the values."""

    data: Tensor
    scale: Tensor


class WholeLayout(NamedTuple):
    """A `WholeLayout` is a layout whose scales of blocks stand over one float32 scale of the tensor, or one a group."""

    data: Tensor
    scale: Tensor
    whole: Tensor


ROW = "row", "row_scale", "row_whole"
COL = "col", "col_scale", "col_whole"


@dataclass(frozen=True, eq=False, init=False)
class Quantized:
    """A `Quantized` is a tensor of shape (..., K), R rows, in a quantized format.

    row      codes (R, K), as forward and input gradient read them, or None.
             scale: of (1, 128) blocks (ceil(K/128), R), of (1, 32) blocks (R, ceil(K/32)); else () or, of groups, (E,).
             Inside an op on Blackwell those of small blocks are swizzled (`fuseops.kernels.quantize_micro`)
    col      codes (K, C) over the tokens, as a weight gradient reads them, or None. Each group begins at a multiple of
             128 (`fuseops.kernels.column_offs`), and what belongs to no row is zero.
             scale: of squares (ceil(K/128), C/128), of (128, 1) blocks (C/128, K), of (32, 1) blocks (K, C/32); else
             that of the rows
    scaling  the format; that of `col` is `scaling.of("col")`
    offs     (E,) int32 row ends of the groups, or None
    dtype    of the tensor that it stands for
    carrier  of its gradient, (..., K) without values; None of one that lives inside an op, whose rows are its shape
    odd      layouts whose last byte of a row holds one code, where two are in a byte
    """

    row: Layout | None
    col: Layout | None
    scaling: Scaling
    offs: Tensor | None
    dtype: torch.dtype
    carrier: Tensor | None = None
    odd: tuple[str, ...] = ()

    def __init__(  # that of a frozen dataclass takes twice as long, and a step makes many
        self,
        row: Layout | None,
        col: Layout | None,
        scaling: Scaling,
        offs: Tensor | None,
        dtype: torch.dtype,
        carrier: Tensor | None = None,
        odd: tuple[str, ...] = (),
    ) -> None:
        self.__dict__.update(
            row=row, col=col, scaling=scaling, offs=offs, dtype=dtype, carrier=carrier, odd=odd
        )

    # --- as a tensor has them

    @property
    def shape(self) -> torch.Size:
        """Of the tensor that it stands for; of columns alone, C rows."""
        if self.carrier is not None:
            return self.carrier.shape
        found = self.row.data.shape if self.row is not None else self.col.data.shape  # type: ignore[union-attr]
        layout = "row" if self.row else "col"
        width = found[-1] * self.scaling.of(layout).packs - (layout in self.odd)
        return torch.Size((*found[:-1], width) if self.row else (*found[:-2], width, found[-2]))

    def dim(self) -> int:
        if self.carrier is not None:
            return self.carrier.dim()
        return (self.row or self.col).data.dim()  # type: ignore[union-attr]

    def _any(self) -> Tensor:
        """Some component."""
        return (self.row or self.col).data  # type: ignore[union-attr]

    @property
    def device(self) -> torch.device:
        return self._any().device

    @property
    def is_meta(self) -> bool:
        return self._any().is_meta

    @property
    def requires_grad(self) -> bool:
        return self.carrier is not None and self.carrier.requires_grad

    @property
    def nbytes(self) -> int:
        """Of all components."""
        return sum(t.nbytes for t in self.components().values())

    def __str__(self) -> str:
        found = [name for name in ("row", "col") if getattr(self, name) is not None]
        groups = "" if self.offs is None else f" of {len(self.offs)} groups"
        return f"{self.scaling} by {' and '.join(found)}{groups}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise FuseOpsError(
            f"torch.{getattr(func, '__name__', func)} got a Quantized: ops of fuseops take it as it is, for anything "
            "else pass what it stands for, q.dequantize()."
        )

    # --- its components

    def components(self) -> Mapping[str, Tensor]:
        """The component tensors that are present, by name."""
        found: dict[str, Tensor] = {}
        if self.row is not None:
            found.update(zip(ROW, self.row, strict=False))
        if self.col is not None:
            found.update(zip(COL, self.col, strict=False))
        if self.offs is not None:
            found["offs"] = self.offs
        return found

    def of(self, components: Mapping[str, Tensor]) -> Quantized:
        """The same with other component tensors by name (those brought back after saving)."""
        row = layout_of(*map(components.get, ROW)) if "row" in components else None  # type: ignore[arg-type]
        col = layout_of(*map(components.get, COL)) if "col" in components else None  # type: ignore[arg-type]
        offs = components.get("offs")
        return Quantized(row, col, self.scaling, offs, self.dtype, self.carrier, self.odd)

    @property
    def form(self) -> Quantized:
        """It without tensors, for `of`."""
        return Quantized(None, None, self.scaling, None, self.dtype, None, self.odd)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Quantized:
        return self.of({name: change(t) for name, t in self.components().items()})

    # --- other tensors of the same values

    def dequantize(self) -> Tensor:
        """The values, in the dtype that it stands for; their gradient is its own.   -> (..., K)

        From the rows where they are there, else from the columns: (C, K) with groups at multiples of 128 then. Of a
        weight its shape.
        """
        found = values(self, "row") if self.row is not None else features(self).mT
        found = found.to(self.dtype)
        if self.carrier is None or self.row is None:
            return found
        return through(self.carrier, found.view(self.carrier.shape))

    def only(self, row: bool, col: bool) -> Quantized:
        """Of its layouts these, as a value that lives inside an op, without a carrier."""
        if self.carrier is None and row is (self.row is not None) and col is (self.col is not None):
            return self
        found = self.row if row else None, self.col if col else None
        return Quantized(*found, self.scaling, self.offs, self.dtype, None, self.odd)

    def detach(self) -> Quantized:
        """The same, with no gradient."""
        return replace(self, carrier=None if self.carrier is None else self.carrier.detach())

    def clone(self) -> Quantized:
        """The same in memory of its own; gradients go to this one."""
        return self._each(Tensor.clone)

    def to(self, *where: torch.device | str | torch.dtype, non_blocking: bool = False) -> Quantized:
        """On a device, standing for a tensor of a dtype, or both; gradients go to this one.

        The codes stay as they are. Raises FuseOpsError for a dtype that has no fractions.
        """
        dtype, device = self.dtype, self.device
        for wanted in where:
            if isinstance(wanted, torch.dtype):
                dtype = wanted
            else:
                device = torch.device(wanted)
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise FuseOpsError(f"Quantized.to({dtype}): it stands for a floating-point tensor.")
        found = replace(self, dtype=dtype)
        if device != self.device:
            found = found._each(lambda t: t.to(device, non_blocking=non_blocking))
        if self.carrier is None or (dtype, device) == (self.dtype, self.device):
            return found
        return replace(found, carrier=carrier_of(self.carrier, dtype, device))

    def groups(self, first: int, last: int) -> Quantized:
        """The rows of the groups from `first` up to `last`, which is not among them.   -> over (rows, K)

        Reads the ends of the groups, for which it waits for the device. Gradients go to this one.
        Raises FuseOpsError for one without groups, or for groups that it does not have.
        """
        if self.offs is None or not 0 <= first <= last <= len(self.offs):
            raise FuseOpsError(
                f"Quantized.groups({first}, {last}): this one has {'no' if self.offs is None else len(self.offs)} "
                "groups; fo.quantize(x, scaling, offs) gives it some."
            )
        ends = [0, *self.offs.tolist()][first : last + 1]
        begin, end = ends[0], ends[-1]
        row = None if self.row is None else self._rows_of(begin, end, first, last)
        col = None if self.col is None else self._columns_of(ends, first)
        carrier = None if self.carrier is None else self.carrier.flatten(0, -2)[begin:end]
        offs = self.offs[first:last] - begin
        return Quantized(row, col, self.scaling, offs, self.dtype, carrier, self.odd)

    def _rows_of(self, begin: int, end: int, first: int, last: int) -> Layout:
        """Rows of consecutive groups."""
        data, scale, *whole = self.row  # type: ignore[misc]
        one = [t[first:last] if t.dim() else t for t in whole]
        if self.scaling.block is None:
            return Layout(data[begin:end], scale[first:last] if scale.dim() else scale)
        axis, _ = tokens_of(self.scaling, "row")
        parts = data[begin:end], scale.narrow(axis, begin, end - begin).contiguous()
        return layout_of(*parts, *one)

    def _columns_of(self, ends: list[int], first: int) -> Layout:
        """Columns of consecutive groups, which begin anew at multiples of 128."""
        data, scale, *whole = self.col  # type: ignore[misc]
        groups, rows = len(ends) - 1, ends[-1] - ends[0]
        one = [t[first : first + groups] if t.dim() else t for t in whole]
        blocks = rows // BLOCK + groups
        moves = []  # in blocks of 128: from where, to where, how many
        for k, (begin, end) in enumerate(itertools.pairwise(ends)):
            source, target = begin // BLOCK + first + k, (begin - ends[0]) // BLOCK + k
            moves.append((source, target, -(-(end - begin) // BLOCK)))
        scaling = self.scaling.of("col")
        codes = _moved(data, 1, BLOCK // scaling.packs, blocks, moves)
        if scaling.block is None:
            return Layout(codes, scale[first : first + groups] if scale.dim() else scale)
        axis, step = tokens_of(scaling, "col")
        return layout_of(codes, _moved(scale, axis, BLOCK // step, blocks, moves), *one)


def layout_of(data: Tensor, scale: Tensor, whole: Tensor | None = None) -> Any:
    """The layout of these parts. What knows of kernels that multiply codes takes it for a Layout."""
    return Layout(data, scale) if whole is None else WholeLayout(data, scale, whole)


def tokens_of(scaling: Scaling, layout: str) -> tuple[int, int]:
    """Of the scales of blocks, the axis that goes over tokens, and how many tokens share one."""
    if layout == "row":
        return (1 if scaling.family.codes else 0), 1
    high, wide = cast("Block", scaling.columns)
    return (0 if scaling.family.codes and wide == 1 else 1), high


def _moved(
    t: Tensor, axis: int, width: int, blocks: int, moves: list[tuple[int, int, int]]
) -> Tensor:
    """A tensor of so many blocks along an axis, some of them those of t: from where, to where, how many. What belongs
    to no group is zero, as a code and as a scale.
    """
    shape = list(t.shape)
    shape[axis] = blocks * width
    raw = t.view(torch.uint8) if t.itemsize == 1 else t
    made = raw.new_zeros(shape)
    for source, target, count in moves:
        taken = raw.narrow(axis, source * width, count * width)
        made.narrow(axis, target * width, count * width).copy_(taken)
    return made.view(t.dtype)


# --- as a tree of tensors, which torch and fuseops walk


def _flatten(q: Quantized) -> tuple[list[Any], Any]:
    """Codes and scales as integers, which no policy of mixed precision casts, and the carrier, which one may."""
    found = q.components()
    leaves = [_integers(t) for t in found.values()]
    names = tuple([(name, t.dtype) for name, t in found.items()])
    return [*leaves, q.carrier], (q.scaling, q.dtype, q.odd, names)


def _unflatten(leaves: Any, context: Any) -> Quantized:
    *parts, carrier = leaves
    scaling, dtype, odd, names = context
    found = {
        name: t.view(own) if isinstance(t, Tensor) else t
        for (name, own), t in zip(names, parts, strict=True)
    }
    dtype = carrier.dtype if isinstance(carrier, Tensor) else dtype
    return Quantized(None, None, scaling, None, dtype, carrier, odd).of(found)


def _integers(t: Any) -> Any:
    if not isinstance(t, Tensor) or not t.is_floating_point():
        return t
    return t.view(torch.uint8 if t.itemsize == 1 else torch.int32)


pytree.register_pytree_node(Quantized, _flatten, _unflatten)


# --- what codes stand for


def product_dtype(scaling: Scaling, dtype: torch.dtype) -> torch.dtype:
    """In which codes times the scales of blocks are exact, and none is out of range.   dtype: that they stand for"""
    exact = scaling.block is not None and (scaling.powers or scaling.scale is E4M3)
    return torch.bfloat16 if exact and dtype is torch.bfloat16 else torch.float32


Factors = tuple[Tensor, Tensor | None]


def factors(q: Quantized, layout: str) -> Factors:
    """What a layout stands for as a product: rows (R, K), columns (K, C), a weight as it lies, in `product_dtype`; and
    one float32 number for all, (), or for each group, (E,), where the scales of blocks stand over one.
    """
    found: Layout | None = getattr(q, layout)
    if found is None:
        raise FuseOpsError(f"an operand in {q.scaling} has no {layout} layout, which is read.")
    (data, scale), whole = found[:2], cast("tuple[Tensor, ...]", found[2:])
    scaling = q.scaling.of(layout)
    if scaling.block is None:
        return data.float() * _of_groups(q, layout, data, scale), None
    block = sorted(cast("Block", scaling.block if layout == "row" else scaling.columns))
    scale = _plain(q, layout).scale
    if scaling.family.codes and block[0] == 1:  # as kernels read them
        scale = scale.mT
    dtype = product_dtype(scaling, q.dtype)
    codes = K.dequantize_format(data, scale, scaling.data, (block[0], block[1]), dtype)
    return codes[..., : codes.shape[-1] - (layout in q.odd)], whole[0] if whole else None


def swizzled(layout: Layout | None) -> bool:
    """Whether the scales of rows or columns lie as tensor cores of Blackwell read them."""
    return layout is not None and layout.data.dim() == 2 and layout.scale.dim() == SWIZZLED


def _plain(q: Quantized, layout: str) -> Layout:
    """A layout with scales as `Quantized` says that they lie."""
    found: Layout = getattr(q, layout)
    if not swizzled(found):
        return found
    (data, scale), whole = found[:2], found[2:]
    scaling, rows = q.scaling.of(layout), len(data)
    count = -(-data.shape[1] * scaling.packs // scaling.grain[1])
    offs = q.offs if layout == "row" else None
    plain = K.unswizzled(scale.view(torch.uint8), rows, count, offs)
    return layout_of(data, plain.view(scale.dtype), *whole)


def some_features(q: Tensor | Quantized, begin: int, size: int) -> Tensor | Quantized:
    """Some features of rows, of codes with one scale or in vectors of 128, from a multiple of that on."""
    if isinstance(q, Tensor):
        return q.narrow(-1, begin, size)
    data, scale = cast("Layout", q.row)
    if q.scaling.block is None:
        return replace(q, row=Layout(data.narrow(1, begin, size), scale), col=None, carrier=None)
    blocks = scale.narrow(0, begin // BLOCK, -(-size // BLOCK))
    return replace(q, row=Layout(data.narrow(1, begin, size), blocks), col=None)


def in_order(q: Quantized) -> Quantized:
    """The same, with scales as `Quantized` says that they lie, which may go anywhere."""
    if not (swizzled(q.row) or swizzled(q.col)):
        return q
    row, col = (None if getattr(q, name) is None else _plain(q, name) for name in ("row", "col"))
    return replace(q, row=row, col=col)


def scaled_tiles(q: Quantized, layout: str) -> tuple[Tensor, Tensor]:
    """Codes of small blocks and their scales as tensor cores of Blackwell read them, of each row one."""
    data, scale = getattr(q, layout)[:2]
    raw = scale.view(torch.uint8)
    if swizzled(getattr(q, layout)):
        return data, raw
    high = q.scaling.of(layout).grain[0]
    by_row = raw.repeat_interleave(high, -2)[..., : data.shape[-2], :]
    return data, K.swizzled(by_row, q.offs if layout == "row" else None)


def values(q: Quantized, layout: str) -> Tensor:
    """What a layout stands for: rows (R, K), columns (K, C), a weight as it lies. Rows of no group are zeros."""
    found, whole = factors(q, layout)
    scale = getattr(q, layout).scale if whole is None else whole
    if whole is not None:
        found = found.float() * _of_groups(q, layout, found, whole)
    if layout == "col" or q.offs is None or scale.shape != q.offs.shape:
        return found
    return found.masked_fill(K.padding_mask(q.offs, len(found)), 0)  # kernels write no codes there


def features(q: Quantized) -> Tensor:
    """What columns stand for, without the Hadamard transform that they went through."""
    found = values(q, "col")
    if not q.scaling.of("col").hadamard:
        return found
    return K.hadamard(found) * K.signs(found.shape[-1], found)


def _of_groups(q: Quantized, layout: str, data: Tensor, scale: Tensor) -> Tensor:
    """One scale a tensor, a matrix or a group, in a shape that codes broadcast with."""
    *_, rows, width = data.shape
    if scale.dim() == 0 or q.offs is None:
        return scale[:, None, None] if scale.dim() else scale
    ends = K.column_offs(q.offs) if layout == "col" else q.offs
    by_group = K.scale_of_row(scale, ends, width if layout == "col" else rows)
    return by_group if layout == "col" else by_group[:, None]
