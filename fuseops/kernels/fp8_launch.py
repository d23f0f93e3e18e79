"""`launch_mm` and `launch_wgrad` launch FP8 GEMMs: with operands, tiles and descriptors of the kernel in `fp8_paths`.

`checked_mm` and `checked_wgrad` raise for invalid operands, and make the others contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuseops.errors import FuseOpsError
from fuseops.kernels import fp8_paths
from fuseops.kernels.configs import Config
from fuseops.kernels.grouped import checked_groups, group_tiles, groups_of
from fuseops.kernels.grouped_launch import count_place, first_entry
from fuseops.kernels.groups import num_groups
from fuseops.kernels.launch import device, launch, num_sms
from fuseops.kernels.records import Arguments
from fuseops.kernels.tiles import cdiv, check_spec, pointers


@dataclass
class ScaledProduct(Arguments):
    """A `ScaledProduct` has the operands of a product of codes with their scales; `fuseops.kernels.fp8` has the shapes.

    tiles  `group_tiles(offs, R)`, made where there are offs and none is given
    """

    x: Tensor
    x_scale: Tensor
    weight: Tensor
    weight_scale: Tensor
    scaling: str
    offs: Tensor | None = None
    tiles: Tensor | None = None
    bias: Tensor | None = None


@dataclass
class RoundedProduct(ScaledProduct):
    """A `RoundedProduct` is a `ScaledProduct` whose result has a dtype.

    fast  "row" and "tensor" are summed in the tensor cores alone, instead of 128 products at a time
    """

    dtype: torch.dtype = torch.bfloat16
    fast: bool = False


@dataclass
class ScaledColumns(Arguments):
    """`ScaledColumns` are the operands of a weight gradient of codes with their scales; tiles as of `ScaledProduct`."""

    dy: Tensor
    dy_scale: Tensor
    x: Tensor
    x_scale: Tensor
    scaling: str
    offs: Tensor | None = None
    tiles: Tensor | None = None


@dataclass
class RoundedColumns(ScaledColumns):
    """`RoundedColumns` are `ScaledColumns` whose weight gradient has a dtype."""

    dtype: torch.dtype = torch.bfloat16


@dataclass
class AddedColumns(ScaledColumns):
    """`AddedColumns` are `ScaledColumns` whose weight gradient is added to something, or overwrites it."""

    accumulate: bool = True


def launch_mm(
    p: ScaledProduct, y: Tensor, y_scale: Tensor | None = None, fast: bool = False
) -> None:
    """Write the product to y (R, N), of FP8 dtype as codes with their scales in y_scale (N / 128, R)."""
    (rows, k), n = p.x.shape, p.weight.shape[-2]
    groups = num_groups(p.offs) or 1
    fast_accum = fast and p.scaling != "block"
    space = fp8_paths.MM_FAST if fast_accum else fp8_paths.MM
    config = space.pick(rows, (groups, n, k), p.x)
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    if p.offs is None:
        num_m, table = cdiv(rows, block_m), (0, 0)
    else:
        num_m = rows // block_m + groups
        table = first_entry(rows, groups, block_m), count_place(rows, groups, block_m)
    module = device("fp8_gemm")
    _launch(
        config, min(num_sms(y.device), num_m * cdiv(n, block_n)), y,
        module.describe_codes(p.x, block_m), module.describe_codes(p.weight, block_n),
        y if y.dtype == torch.float32 else module.describe_rows(y), p.x_scale, p.weight_scale,
        *pointers(y, p.bias, y_scale, p.offs, p.tiles), *table,
        rows, groups, rows, n, cdiv(k, 128), int(p.x_scale.numel() > 1), int(p.weight_scale.numel() > 1),
        WGRAD=False, GROUPED=p.offs is not None, SCALING=p.scaling, FAST_ACCUM=fast_accum,
        HAS_BIAS=p.bias is not None, ACCUMULATE=False,
    )  # fmt: skip


def launch_wgrad(dw: Tensor, g: ScaledColumns, accumulate: bool) -> None:
    """Write or add the weight gradient to dw."""
    (n, columns), k = g.dy.shape, g.x.shape[0]
    groups = num_groups(g.offs) or 1
    space = fp8_paths.WGRAD_VECTORS if g.scaling == "block" else fp8_paths.WGRAD
    config = space.pick(columns, (groups, n, k), g.x)
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    module, scales = device("fp8_gemm"), (g.dy_scale, g.x_scale)
    left, right = scales
    if g.scaling == "block":
        left, right = map(module.describe_vectors, scales, (block_m, block_n))
    _launch(
        config, min(num_sms(dw.device), groups * cdiv(n, block_m) * cdiv(k, block_n)), dw,
        module.describe_codes(g.dy, block_m), module.describe_codes(g.x, block_n),
        module.describe_sums(dw) if dw.dtype == torch.float32 else module.describe_weight(dw), left, right,
        *pointers(dw, None, None, g.offs, g.tiles), 2, 0,
        columns, groups, n, k, cdiv(columns, 128), *(int(s.numel() > 1) for s in scales),
        WGRAD=True, GROUPED=g.offs is not None, SCALING=g.scaling, FAST_ACCUM=False,
        HAS_BIAS=False, ACCUMULATE=accumulate,
    )  # fmt: skip


def _launch(config: Config, programs: int, *args: Any, **options: Any) -> None:
    kernel = device("fp8_gemm").fp8_gemm_kernel
    launch(kernel, (programs,), *args, **options, **config, num_warps=4, maxnreg=168)


MM_SCALES = {
    "block": "x_scale (L, R) float32, weight_scale ({}M, L) float32",
    "row": "x_scale (R,) float32, weight_scale ({}N,) float32",
    "tensor": "",
}
WGRAD_SCALES = {
    "square": "dy_scale (M, B) float32, x_scale (L, B) float32",
    "block": "dy_scale (B, N) float32, x_scale (B, K) float32",
    "tensor": "",
}
"""By scaling: the specs of scales; of "tensor" there is one a tensor or a group."""


def checked_mm(p: ScaledProduct) -> ScaledProduct:
    """The operands as `launch_mm` takes them."""
    scaling, offs, tiles, bias = p.scaling, p.offs, p.tiles, p.bias
    scales = _axes_of_scales(scaling, MM_SCALES)
    groups, each = (1, "") if offs is None else (groups_of(offs), "E, ")
    axes = f"x (R, K), weight ({each}N, K)"
    check_spec(vars(p), axes, E=groups)
    blocks = {"L": cdiv(p.x.shape[1], 128), "M": cdiv(p.weight.shape[-2], 128)}
    check_spec(vars(p), f"{axes}, bias ({each}N,), {scales.format(each)}", E=groups, **blocks)
    if scaling == "tensor":
        _check_tensor_scales(groups, x_scale=p.x_scale, weight_scale=p.weight_scale)
    if offs is not None:
        offs, tiles = checked_groups(offs, tiles, len(p.x))
    left = p.x.contiguous(), p.x_scale.contiguous()
    right = p.weight.contiguous(), p.weight_scale.contiguous()
    bias = None if bias is None else bias.contiguous()
    return ScaledProduct(*left, *right, scaling, offs, tiles, bias)


def checked_wgrad(dw: Tensor, g: ScaledColumns) -> ScaledColumns:
    """The operands as `launch_wgrad` takes them."""
    dy, dy_scale, x, x_scale, scaling, offs, tiles, *_ = g
    scales = _axes_of_scales(scaling, WGRAD_SCALES)
    groups, each = (1, "") if offs is None else (groups_of(offs), "E, ")
    given = {"main_grad": dw, **vars(g)}
    check_spec(given, "dy (N, C), x (K, C)")
    (n, columns), k = dy.shape, x.shape[0]
    if offs is not None and (columns % 128 or columns < groups * 128):
        raise FuseOpsError(
            f"dy and x have {columns} columns, expected (R // 128 + {groups}) * 128: those of each group begin at a "
            "multiple of 128."
        )
    blocks = {"B": cdiv(columns, 128), "M": cdiv(n, 128), "L": cdiv(k, 128)}
    check_spec(given, f"main_grad ({each}N, K), {scales}", E=groups, N=n, K=k, **blocks)
    if scaling == "tensor":
        _check_tensor_scales(groups, dy_scale=dy_scale, x_scale=x_scale)
    if offs is not None:
        tiles = group_tiles(offs, columns) if tiles is None else tiles
        if tiles.dim() != 1 or len(tiles) < groups + 2 or tiles.dtype != torch.int32:
            raise FuseOpsError("tiles is not group_tiles(offs, R).")
        offs, tiles = offs.contiguous(), tiles.contiguous()
    as_layout = _vectors if scaling == "block" else Tensor.contiguous
    operands = dy.contiguous(), as_layout(dy_scale), x.contiguous(), as_layout(x_scale)
    return ScaledColumns(*operands, scaling, offs, tiles)


def _axes_of_scales(scaling: str, known: dict[str, str]) -> str:
    if scaling not in known:
        raise FuseOpsError(f"scaling is '{scaling}', expected one of {(*known,)}.")
    return known[scaling]


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
