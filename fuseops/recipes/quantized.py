"""Quantized tensors are plain dataclasses of component tensors, never a `torch.Tensor` subclass.

So checkpointing, saved-tensor hooks and offload see real storages, and a component can be freed or moved alone.
Outside of ops a `Quantized` is a value like a tensor: a Sequential takes and returns it, and its gradient, in high
precision, goes through its `carrier`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops.arguments import check_flags
from fuseops.errors import FuseOpsError
from fuseops.torch_private import pytree

from .carrier import attach_carrier, carrier_of
from .scaling import E4M3, Block, Scaling

BLOCK = 128
SWIZZLED_DIMS = 5  # axes of scales in the order in which tensor cores of Blackwell read them


class Layout(NamedTuple):
    """A `Layout` holds codes and their scales: value = code * scale * whole.

    whole: a second, global float32 scale a tensor or a group; None where the format has none
    """

    data: Tensor
    scale: Tensor
    whole: Tensor | None = None


ROW = "row", "row_scale", "row_whole"
COL = "col", "col_scale", "col_whole"


class QuantizedForm(NamedTuple):
    """A `QuantizedForm` is what a quantized tensor is without its tensors and carrier.

    components: the names of its tensors.  The other fields are those of `Quantized`.
    """

    scaling: Scaling
    dtype: torch.dtype
    odd: tuple[str, ...]
    components: tuple[str, ...]

    def of(self, tensors: Iterable[Tensor]) -> Quantized:
        """The quantized tensor over these components."""
        found = dict(zip(self.components, tensors, strict=False))
        row = Layout(*map(found.get, ROW)) if "row" in found else None  # type: ignore[arg-type]
        col = Layout(*map(found.get, COL)) if "col" in found else None  # type: ignore[arg-type]
        return Quantized(row, col, self.scaling, found.get("offs"), self.dtype, None, self.odd)


@dataclass(frozen=True, eq=False, init=False)
class Quantized:
    """A `Quantized` is a tensor of shape (..., K), R rows, in a quantized format.

    row      codes (R, K), as forward and input gradient read them, or None.
             scale: of (1, 128) blocks (ceil(K/128), R), of (1, 32) blocks (R, ceil(K/32)); else () or, of groups, (E,).
             Inside an op on Blackwell those of micro blocks are swizzled (`fuseops.kernels.quantize_micro`)
    col      codes (K, C) over the tokens, as a weight gradient reads them, or None. Each group begins at a multiple of
             128 (`fuseops.kernels.column_offs`), and the padding is zero.
             scale: of squares (ceil(K/128), C/128), of (128, 1) blocks (C/128, K), of (32, 1) blocks (K, C/32); else
             that of the rows
    scaling  the format; that of `col` is `scaling.of("col")`
    offs     (E,) int32 row ends of the groups, or None
    dtype    of the dequantized tensor
    carrier  the autograd tensor (..., K), without values, that gets the gradient; None inside an op, where the shape is
             that of the rows
    odd      layouts with an odd number of 4-bit codes in a row, whose last byte holds one
    """

    row: Layout | None
    col: Layout | None
    scaling: Scaling
    offs: Tensor | None
    dtype: torch.dtype
    carrier: Tensor | None = None
    odd: tuple[str, ...] = ()

    def __init__(  # the generated one of a frozen dataclass is twice as slow, and a step makes many
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

    # --- attributes of a tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the dequantized tensor; with columns only, C rows."""
        if self.carrier is not None:
            return self.carrier.shape
        found = self.row.data.shape if self.row is not None else self.col.data.shape  # type: ignore[union-attr]
        layout = "row" if self.row else "col"
        width = found[-1] * self.scaling.of(layout).codes_per_byte - (layout in self.odd)
        return torch.Size((*found[:-1], width) if self.row else (*found[:-2], width, found[-2]))

    def dim(self) -> int:
        if self.carrier is not None:
            return self.carrier.dim()
        return (self.row or self.col).data.dim()  # type: ignore[union-attr]

    def _component(self) -> Tensor:
        """The codes of one of the layouts."""
        return (self.row or self.col).data  # type: ignore[union-attr]

    @property
    def device(self) -> torch.device:
        return self._component().device

    @property
    def is_meta(self) -> bool:
        return self._component().is_meta

    @property
    def requires_grad(self) -> bool:
        return self.carrier is not None and self.carrier.requires_grad

    @property
    def nbytes(self) -> int:
        """The bytes of all components."""
        return sum(t.nbytes for t in self.components().values())

    def __str__(self) -> str:
        found = [name for name in ("row", "col") if getattr(self, name) is not None]
        groups = "" if self.offs is None else f" of {len(self.offs)} groups"
        return f"{self.scaling} by {' and '.join(found)}{groups}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise FuseOpsError(
            f"torch.{getattr(func, '__name__', func)} got a Quantized: ops of fuseops take it as it is, for anything "
            "else pass the dequantized tensor, q.dequantize()."
        )

    # --- its components

    def components(self) -> Mapping[str, Tensor]:
        """The component tensors that are present, by name."""
        layouts = *zip(ROW, self.row or (), strict=False), *zip(COL, self.col or (), strict=False)
        return {name: t for name, t in (*layouts, ("offs", self.offs)) if t is not None}

    @property
    def form(self) -> QuantizedForm:
        """What it is without tensors and carrier."""
        return QuantizedForm(self.scaling, self.dtype, self.odd, (*self.components(),))

    def tensors(self) -> tuple[Tensor, ...]:
        """The components without their names."""
        return (*self.components().values(),)

    def of(self, components: Mapping[str, Tensor]) -> Quantized:
        """A copy with these component tensors, as after saving and restoring them."""
        form = QuantizedForm(self.scaling, self.dtype, self.odd, (*components,))
        found = form.of(components.values())
        return found if self.carrier is None else replace(found, carrier=self.carrier)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Quantized:
        return self.of({name: change(t) for name, t in self.components().items()})

    # --- conversions

    def dequantize(self) -> Tensor:
        """The tensor in high precision, in `dtype`; its gradient goes to this one.   -> (..., K), a weight's own shape

        Without rows it comes from the columns: (C, K), with groups at multiples of 128.
        """
        rows = self.row is not None
        found = dequantize_layout(self, "row") if rows else dequantize_columns(self).mT
        found = found.to(self.dtype)
        if self.carrier is None or self.row is None:
            return found
        return attach_carrier(self.carrier, found.view(self.carrier.shape))

    def only(self, row: bool, col: bool) -> Quantized:
        """A copy with these layouts only, for use inside an op: it has no carrier."""
        if self.carrier is None and row is (self.row is not None) and col is (self.col is not None):
            return self
        found = self.row if row else None, self.col if col else None
        return Quantized(*found, self.scaling, self.offs, self.dtype, None, self.odd)

    def detach(self) -> Quantized:
        """A copy without gradient."""
        return replace(self, carrier=None if self.carrier is None else self.carrier.detach())

    def clone(self) -> Quantized:
        """A copy of all components; its gradient goes to this one."""
        return self._map(Tensor.clone)

    def to(self, *where: torch.device | str | torch.dtype, non_blocking: bool = False) -> Quantized:
        """A copy on another device, with another dtype to dequantize to, or both; its gradient goes to this one.

        The codes do not change. Raises FuseOpsError for a dtype that is not floating-point.
        """
        check_flags("Quantized.to", non_blocking=non_blocking)
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
            found = found._map(lambda t: t.to(device, non_blocking=non_blocking))
        if self.carrier is None or (dtype, device) == (self.dtype, self.device):
            return found
        return replace(found, carrier=carrier_of(self.carrier, dtype, device))

    def groups(self, first: int, last: int) -> Quantized:
        """The rows of groups first, ..., last - 1.   -> Quantized over (rows, K); its gradient goes to this one

        Reads the ends of the groups, so it waits for the device.
        Raises FuseOpsError without groups, or for groups that do not exist.
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
        """The row layout of groups first, ..., last - 1."""
        data, scale, whole = cast("Layout", self.row)
        if self.scaling.block is None:
            return Layout(data[begin:end], _of_groups(scale, first, last))
        axis, _ = token_axis(self.scaling, "row")
        scales = scale.narrow(axis, begin, end - begin).contiguous()
        return Layout(data[begin:end], scales, _of_groups(whole, first, last))

    def _columns_of(self, ends: list[int], first: int) -> Layout:
        """The column layout of consecutive groups from `first`, which end at `ends`."""
        data, scale, whole = cast("Layout", self.col)
        groups, rows = len(ends) - 1, ends[-1] - ends[0]
        blocks = rows // BLOCK + groups
        moves = []  # (source, target, count) in blocks of 128
        for k, (begin, end) in enumerate(itertools.pairwise(ends)):
            source, target = begin // BLOCK + first + k, (begin - ends[0]) // BLOCK + k
            moves.append((source, target, -(-(end - begin) // BLOCK)))
        scaling = self.scaling.of("col")
        codes = _copy_blocks(data, 1, BLOCK // scaling.codes_per_byte, blocks, moves)
        if scaling.block is None:
            return Layout(codes, _of_groups(scale, first, first + groups))
        axis, step = token_axis(scaling, "col")
        scales = _copy_blocks(scale, axis, BLOCK // step, blocks, moves)
        return Layout(codes, scales, _of_groups(whole, first, first + groups))


def _of_groups(scale: Any, first: int, last: int) -> Any:
    """The scales of groups first, ..., last - 1; one of the whole tensor, or None, stays."""
    return scale[first:last] if scale is not None and scale.dim() else scale


def token_axis(scaling: Scaling, layout: str) -> tuple[int, int]:
    """The axis of the block scales that goes over tokens, and the number of tokens that share one."""
    if layout == "row":
        return (1 if scaling.family.has_gemm else 0), 1
    high, wide = cast("Block", scaling.columns)
    return (0 if scaling.family.has_gemm and wide == 1 else 1), high


def _copy_blocks(
    t: Tensor, axis: int, width: int, blocks: int, moves: list[tuple[int, int, int]]
) -> Tensor:
    """A zeroed tensor of `blocks` blocks along an axis, with blocks of t copied in: moves (source, target, count)."""
    shape = list(t.shape)
    shape[axis] = blocks * width
    raw = t.view(torch.uint8) if t.itemsize == 1 else t
    result = raw.new_zeros(shape)
    for source, target, count in moves:
        source_blocks = raw.narrow(axis, source * width, count * width)
        result.narrow(axis, target * width, count * width).copy_(source_blocks)
    return result.view(t.dtype)


# --- pytree registration


def _flatten(q: Quantized) -> tuple[list[Any], Any]:
    """Codes and scales as integers, which mixed precision does not cast, and the carrier, which it may."""
    found = q.components()
    leaves = [_as_integers(t) for t in found.values()]
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


def _as_integers(t: Any) -> Any:
    if not isinstance(t, Tensor) or not t.is_floating_point():
        return t
    return t.view(torch.uint8 if t.itemsize == 1 else torch.int32)


pytree.register_pytree_node(Quantized, _flatten, _unflatten)


# --- dequantization


def product_dtype(scaling: Scaling, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which code times block scale is exact and in range.   dtype: of the dequantized tensor"""
    exact = scaling.block is not None and (scaling.powers or scaling.scale is E4M3)
    return torch.bfloat16 if exact and dtype is torch.bfloat16 else torch.float32


Factors = tuple[Tensor, Tensor | None]


def factors(q: Quantized, layout: str) -> Factors:
    """(codes times block scales in `product_dtype`, global scale) of one layout: rows (R, K), columns (K, C), or a
    weight's own shape; float32 () or of groups (E,), None where the format has none.
    """
    found: Layout | None = getattr(q, layout)
    if found is None:
        raise FuseOpsError(f"an operand in {q.scaling} has no {layout} layout, which is read.")
    data, scale, whole = found
    scaling = q.scaling.of(layout)
    if scaling.block is None:
        return data.float() * _broadcast_scale(q, layout, data, scale), None
    block = sorted(cast("Block", scaling.block if layout == "row" else scaling.columns))
    scale = _unswizzled(q, layout).scale
    if scaling.family.has_gemm and block[0] == 1:  # as kernels read them
        scale = scale.mT
    dtype = product_dtype(scaling, q.dtype)
    codes = K.dequantize_format(data, scale, scaling.data, (block[0], block[1]), dtype)
    return codes[..., : codes.shape[-1] - (layout in q.odd)], whole


def is_swizzled(layout: Layout | None) -> bool:
    """Whether the scales of a layout are in the order in which tensor cores of Blackwell read them."""
    return layout is not None and layout.data.dim() == 2 and layout.scale.dim() == SWIZZLED_DIMS


def _unswizzled(q: Quantized, layout: str) -> Layout:
    """A layout with scales in the order that `Quantized` documents."""
    found: Layout = getattr(q, layout)
    if not is_swizzled(found):
        return found
    data, scale, whole = found
    scaling, rows = q.scaling.of(layout), len(data)
    count = -(-data.shape[1] * scaling.codes_per_byte // scaling.code_block[1])
    offs = q.offs if layout == "row" else None
    plain = K.unswizzled(scale.view(torch.uint8), rows, count, offs)
    return Layout(data, plain.view(scale.dtype), whole)


def slice_features(q: Tensor | Quantized, begin: int, size: int) -> Tensor | Quantized:
    """The rows of x for a slice of its features, in high precision, tensor-scaled or in vectors of 128.

    begin: a multiple of 128
    """
    if isinstance(q, Tensor):
        return q.narrow(-1, begin, size)
    data, scale, _ = cast("Layout", q.row)
    if q.scaling.block is None:
        return replace(q, row=Layout(data.narrow(1, begin, size), scale), col=None, carrier=None)
    blocks = scale.narrow(0, begin // BLOCK, -(-size // BLOCK))
    return replace(q, row=Layout(data.narrow(1, begin, size), blocks), col=None)


def unswizzle(q: Quantized) -> Quantized:
    """A copy with scales in the order that `Quantized` documents, as they leave an op."""
    if not (is_swizzled(q.row) or is_swizzled(q.col)):
        return q
    row = None if q.row is None else _unswizzled(q, "row")
    return replace(q, row=row, col=None if q.col is None else _unswizzled(q, "col"))


def swizzled_operand(q: Quantized, layout: str) -> tuple[Tensor, Tensor]:
    """The codes of a micro format and their swizzled scales, with one scale for each row."""
    data, scale, _ = getattr(q, layout)
    raw = scale.view(torch.uint8)
    if is_swizzled(getattr(q, layout)):
        return data, raw
    high = q.scaling.of(layout).code_block[0]
    by_row = raw.repeat_interleave(high, -2)[..., : data.shape[-2], :]
    return data, K.swizzled(by_row, q.offs if layout == "row" else None)


def dequantize_layout(q: Quantized, layout: str) -> Tensor:
    """One layout dequantized: rows (R, K), columns (K, C), or a weight's own shape. Rows beyond the groups are zero."""
    found, whole = factors(q, layout)
    scale = getattr(q, layout).scale if whole is None else whole
    if whole is not None:
        found = found.float() * _broadcast_scale(q, layout, found, whole)
    if layout == "col" or q.offs is None or scale.shape != q.offs.shape:
        return found
    # kernels leave the codes of padding unwritten
    return found.masked_fill(K.padding_mask(q.offs, len(found)), 0)


def dequantize_columns(q: Quantized) -> Tensor:
    """The columns dequantized, (K, C), after the inverse of their Hadamard transform."""
    found = dequantize_layout(q, "col")
    if not q.scaling.of("col").hadamard:
        return found
    return K.hadamard(found) * K.signs(found.shape[-1], found)


def _broadcast_scale(q: Quantized, layout: str, data: Tensor, scale: Tensor) -> Tensor:
    """A scale of the tensor, of matrices or of groups, in a shape that broadcasts with the codes."""
    *_, rows, width = data.shape
    if scale.dim() == 0 or q.offs is None:
        return scale[:, None, None] if scale.dim() else scale
    ends = K.column_offs(q.offs) if layout == "col" else q.offs
    by_group = K.spread_over_groups(scale, ends, width if layout == "col" else rows, 0.0)
    return by_group if layout == "col" else by_group[:, None]
