"""What operands of FP8 GEMMs have to be: what nothing can take raises, the others are made as launches want them."""

from __future__ import annotations

import torch
from torch import Tensor

from fuseops.errors import FuseOpsError
from fuseops.kernels.fp8_launch import ScaledColumns, ScaledProduct
from fuseops.kernels.grouped import group_tiles, groups_of
from fuseops.kernels.grouped_launch import table_size
from fuseops.kernels.tiles import cdiv, require
from fuseops.words import dtype_name

MM_SCALINGS = ("block", "row", "tensor")
WGRAD_SCALINGS = ("square", "block", "tensor")


def checked_mm(p: ScaledProduct) -> ScaledProduct:
    """The operands as `launch_mm` takes them."""
    x, x_scale, weight, weight_scale, scaling, offs, tiles, bias, *_ = p
    require(scaling in MM_SCALINGS, f"scaling is '{scaling}', expected one of {MM_SCALINGS}.")
    groups = 1 if offs is None else groups_of(offs)
    rank = 2 if offs is None else 3
    if x.dim() != 2 or weight.dim() != rank or x.shape[1] != weight.shape[-1]:
        raise FuseOpsError(
            f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}, expected (R, K) and "
            f"{'(N, K) without offs' if offs is None else '(E, N, K)'}."
        )
    rows, (n, k) = x.shape[0], weight.shape[-2:]
    lead = weight.shape[:-2]
    require(
        lead in ((), (groups,)), f"weight is {tuple(weight.shape)} and offs has {groups} groups."
    )
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {
        "block": ((cdiv(k, 128), rows), (*lead, cdiv(n, 128), cdiv(k, 128))),
        "row": ((rows,), (*lead, n)),
    }
    if scaling == "tensor":
        _check_tensor_scales(groups, x_scale=x_scale, weight_scale=weight_scale)
    else:
        of_x, of_weight = shapes[scaling]
        _check_shape("x_scale", x_scale, of_x)
        _check_shape("weight_scale", weight_scale, of_weight)
    if bias is not None:
        _check_shape("bias", bias, (*lead, n))
        bias = bias.contiguous()
    if offs is not None:
        tiles = group_tiles(offs, rows) if tiles is None else tiles
        if tiles.shape != (table_size(rows, groups),) or tiles.dtype != torch.int32:
            raise FuseOpsError(f"tiles is not group_tiles(offs, {rows}).")
        offs, tiles = offs.contiguous(), tiles.contiguous()
    left, right = (
        (x.contiguous(), x_scale.contiguous()),
        (weight.contiguous(), weight_scale.contiguous()),
    )
    return ScaledProduct(*left, *right, scaling, offs, tiles, bias)


def checked_wgrad(dw: Tensor, g: ScaledColumns) -> ScaledColumns:
    """The operands as `launch_wgrad` takes them."""
    dy, dy_scale, x, x_scale, scaling, offs, tiles, *_ = g
    require(scaling in WGRAD_SCALINGS, f"scaling is '{scaling}', expected one of {WGRAD_SCALINGS}.")
    groups = 1 if offs is None else groups_of(offs)
    if dy.dim() != 2 or x.dim() != 2 or dy.shape[1] != x.shape[1]:
        raise FuseOpsError(
            f"dy is {tuple(dy.shape)} and x {tuple(x.shape)}, expected columns (N, C) and (K, C)."
        )
    columns = dy.shape[1]
    if offs is not None and (columns % 128 or columns < groups * 128):
        raise FuseOpsError(
            f"dy and x have {columns} columns, expected (R // 128 + {groups}) * 128: those of each group begin at a "
            "multiple of 128."
        )
    shape = (*dw.shape[:-2], dy.shape[0], x.shape[0])
    require(
        dw.shape == shape
        and dw.dim() == (2 if offs is None else 3)
        and dw.shape[:-2] in ((), (groups,)),
        f"main_grad is {tuple(dw.shape)}, expected {shape if offs is None else (groups, *shape[-2:])}.",
    )
    for name, codes, scale in (("dy", dy, dy_scale), ("x", x, x_scale)):
        blocks, size = cdiv(columns, 128), codes.shape[0]
        if scaling == "tensor":
            _check_tensor_scales(groups, **{f"{name}_scale": scale})
        else:
            expected = {
                "square": (cdiv(size, 128), blocks), "block": (blocks, size)
            }  # fmt: skip
            _check_shape(f"{name}_scale", scale, expected[scaling])
    if offs is not None:
        tiles = group_tiles(offs, columns) if tiles is None else tiles
        if tiles.dim() != 1 or len(tiles) < groups + 2 or tiles.dtype != torch.int32:
            raise FuseOpsError("tiles is not group_tiles(offs, R).")
        offs, tiles = offs.contiguous(), tiles.contiguous()
    fit = _vectors if scaling == "block" else Tensor.contiguous
    operands = dy.contiguous(), fit(dy_scale), x.contiguous(), fit(x_scale)
    return ScaledColumns(*operands, scaling, offs, tiles)


def _check_shape(name: str, t: Tensor, expected: tuple[int, ...]) -> None:
    dtype = t.dtype if name == "bias" else torch.float32
    if tuple(t.shape) != expected or t.dtype != dtype:
        raise FuseOpsError(
            f"{name} is {t.dtype}{tuple(t.shape)}, expected {dtype_name(dtype)}{expected}."
        )


def _check_tensor_scales(groups: int, **scales: Tensor) -> None:
    for name, scale in scales.items():
        if scale.dtype != torch.float32 or scale.dim() > 1 or scale.numel() not in (1, groups):
            raise FuseOpsError(
                f"{name} is {scale.dtype}{tuple(scale.shape)}, expected float32, () or ({groups},)."
            )


def _vectors(scale: Tensor) -> Tensor:
    """Scales (blocks, R) whose rows are a multiple of 16 bytes apart, as a descriptor takes them."""
    blocks, rows = scale.shape
    if scale.stride(1) == 1 and scale.stride(0) % 4 == 0 and scale.stride(0) >= rows:
        return scale
    padded = scale.new_empty(blocks, cdiv(rows, 4) * 4)[:, :rows]
    return padded.copy_(scale)
