"""Quantization in small blocks along the axis that is summed: MXFP8 and NVFP4.

Maths: that of `fuseops.kernels.formats`, bit for bit, rounded to nearest even. MXFP8: codes e4m3 or e5m2, an
E8M0 scale for 32. NVFP4: codes e2m1, two in a byte, the first in the low half, an E4M3 scale for 16 over one float32
scale, which follows from amax.
Shapes: x (R, K) -> rows: codes (R, K or ceil(K/2)), scale (R, S), S = ceil(K/32 or K/16); columns, the transpose over
tokens that begin anew in each group at a multiple of 128: codes (K, C or C/2), scale (K, C/32 or C/16). Padding rows,
and what belongs to no row, are zeros. One read a layout.
Swizzled scales are in blocks of 128 x 4, as `formats.swizzled` says and the tensor cores of Blackwell read them; of
rows in groups, those of group g begin at block offs[g-1] // 128 + g, so that no tile reads those of two groups.
Layout: rows of x may be strided. No look at `offs` on the host.
Hardware: sm_89 and later, which convert to FP8; others run the twin, as sizes and strides beyond 2^24 do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fuseops.errors import FuseOpsError
from fuseops.kernels.configs import Space
from fuseops.kernels.formats import (
    E2M1,
    LARGEST,
    micro_format,
    quantize_format,
    swizzled,
    transpose_in_groups,
    whole_of_blocks,
)
from fuseops.kernels.groups import column_offs, num_groups, padded_columns, padding_mask
from fuseops.kernels.launch import device, launch
from fuseops.kernels.quantize import FORMATS, fp8_op, too_large
from fuseops.kernels.records import of_fields
from fuseops.kernels.registry import Cases, floats, ints, on_meta
from fuseops.kernels.scales import spread_over_groups
from fuseops.kernels.tiles import as_rows, cdiv, check_spec, pointers, pow2


class MicroLayout(NamedTuple):
    """A `MicroLayout` has the arguments of a quantization in small blocks, in the layout "row" or "col".

    offs     (E,) int32 row ends of groups
    amax     of NVFP4, the largest magnitude of x, (), or of each group, (E,)
    swizzle  scales are (ceil(outer/128), ceil(S/4), 32, 4, 4), zeros where there is none; outer is R, or K of "col"
    """

    x: Tensor
    data: torch.dtype
    layout: str = "row"
    offs: Tensor | None = None
    amax: Tensor | None = None
    swizzle: bool = False


def _quantize_micro(p: MicroLayout) -> tuple[Tensor, Tensor]:
    x, data, layout, offs, amax, swizzle = p
    rows, form, turn = x.shape[0], micro_format(data), layout == "col"
    tokens = rows
    if turn:
        x, tokens = x.t(), padded_columns(rows, num_groups(offs))
    elif offs is not None:
        x = x.masked_fill(padding_mask(offs, rows), 0.0)
    whole = None
    if amax is not None:
        ends = column_offs(offs) if turn and offs is not None else offs
        whole = whole_of_blocks(spread_over_groups(amax, ends, tokens), form.block[1], turn)
    transform = (lambda part: transpose_in_groups(part.t(), offs)) if turn else None
    codes, scale = quantize_format(x, form, whole, transform=transform)
    scale = scale.view(torch.uint8)
    return codes, swizzled(scale, None if turn else offs) if swizzle else scale


LAYOUTS = ("row", "col")


MXFP8, NVFP4 = (
    Space(name, [{"BLOCK_N": n, "num_warps": warps} for n, warps in forms])
    for name, forms in (
        ("quantize_mxfp8", ((128, 8), (64, 4))),
        ("quantize_nvfp4", ((64, 8), (32, 4))),
    )
)
"""128 tokens and so many features, fewer where what a thread holds of them would spill."""


def _cases() -> Cases:
    offs, one, many = ints(64), floats(), floats(64)
    for data in (*FORMATS, E2M1):
        four = data is E2M1
        for layout in LAYOUTS:
            for swizzle in (False, True):
                x = on_meta(8192, 4096)
                yield x, data, layout, None, one if four else None, swizzle
                yield x, data, layout, offs, many if four else None, swizzle
    yield floats(8192, 4096), FORMATS[0], "row", None, None, False
    yield on_meta(8191, 100), E2M1, "row", None, one, False


def _outputs(p: MicroLayout) -> tuple[Tensor, Tensor]:
    x, data, layout, offs, _, swizzle = p
    (rows, k), form, four, turned = x.shape, micro_format(data), data is E2M1, layout == "col"
    columns = padded_columns(rows, num_groups(offs))
    outer, inner = (k, columns) if turned else (rows, k)
    scale: tuple[int, ...] = outer, cdiv(inner, form.block[1])
    if swizzle:
        scale = cdiv(k if turned else columns, 128), cdiv(scale[1], 4), 32, 4, 4
    codes = x.new_empty(outer, cdiv(inner, 1 + four), dtype=torch.uint8 if four else data)
    return codes, x.new_empty(scale, dtype=torch.uint8)


@fp8_op(twin=_quantize_micro, fake=_outputs, cases=_cases)
@of_fields(MicroLayout)
def quantize_micro(p: MicroLayout) -> tuple[Tensor, Tensor]:
    """(codes, scales) of one layout, "row" or "col"; scales as bytes, in their format E8M0 or E4M3."""
    x, data, layout, offs, amax, swizzle = p
    four, groups = data is E2M1, num_groups(offs)
    check_spec({"x": x}, "x (R, K)")
    if layout not in LAYOUTS:
        raise FuseOpsError(f"layout is '{layout}', expected one of {', '.join(LAYOUTS)}.")
    if not four and data not in FORMATS:
        raise FuseOpsError(f"data is {data}, expected e4m3, e5m2 or e2m1.")
    shape = () if offs is None else (groups,)
    given = None if amax is None else tuple(amax.shape)
    if given != (shape if four else None):
        raise FuseOpsError(f"amax is {given}, expected {shape if four else None}.")
    x = as_rows(x)
    turned = layout == "col"
    if not x.numel() or too_large(x):
        return _quantize_micro(p)
    rows, k = x.shape
    columns = padded_columns(rows, groups)
    codes, scale = _outputs(p)
    config = (NVFP4 if four else MXFP8).pick(rows, (k,), x)
    launch(
        device("micro").quantize_micro_kernel, (columns // 128 * cdiv(k, 128) * (128 // config["BLOCK_N"]),),
        x, *pointers(scale, offs, amax), codes, scale, rows, k, columns, groups, x.stride(0),
        COL=turned, GROUPS=bool(groups), FP4=four, SWIZZLE=swizzle, LARGEST=LARGEST.get(data, 0),
        BLOCK_E=pow2(groups, least=32), **config,
    )  # fmt: skip
    return codes, scale
