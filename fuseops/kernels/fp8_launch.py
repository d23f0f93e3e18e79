"""How an FP8 GEMM is launched: with which tiles and descriptors, where `fp8_paths` names its kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuseops.kernels import fp8_paths
from fuseops.kernels.configs import Config
from fuseops.kernels.grouped_launch import count_place, first_entry
from fuseops.kernels.launch import device, launch, num_sms
from fuseops.kernels.records import Arguments
from fuseops.kernels.tiles import cdiv


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
    groups = 1 if p.offs is None else len(p.offs)
    in_place = fast and p.scaling != "block"
    space = fp8_paths.MM_FAST if in_place else fp8_paths.MM
    config = space.pick(rows, (groups, n, k), p.x)
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    num_m, table = cdiv(rows, block_m), (0, 0)
    if p.offs is not None:
        num_m = rows // block_m + groups
        table = first_entry(rows, groups, block_m), count_place(rows, groups, block_m)
    module = device("fp8_gemm")
    _launch(
        config, min(num_sms(y.device), num_m * cdiv(n, block_n)), y,
        module.describe_codes(p.x, block_m), module.describe_codes(p.weight, block_n),
        y if y.dtype == torch.float32 else module.describe_rows(y), p.x_scale, p.weight_scale,
        *(y if t is None else t for t in (p.bias, y_scale, p.offs, p.tiles)), *table,
        rows, groups, rows, n, cdiv(k, 128), int(p.x_scale.numel() > 1), int(p.weight_scale.numel() > 1),
        WGRAD=False, GROUPED=p.offs is not None, SCALING=p.scaling, IN_PLACE=in_place,
        HAS_BIAS=p.bias is not None, ACCUMULATE=False,
    )  # fmt: skip


def launch_wgrad(dw: Tensor, g: ScaledColumns, accumulate: bool) -> None:
    """Write or add the weight gradient to dw."""
    (n, columns), k = g.dy.shape, g.x.shape[0]
    groups = 1 if g.offs is None else len(g.offs)
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
        *(dw if t is None else t for t in (None, None, g.offs, g.tiles)), 2, 0,
        columns, groups, n, k, cdiv(columns, 128), *(int(s.numel() > 1) for s in scales),
        WGRAD=True, GROUPED=g.offs is not None, SCALING=g.scaling, IN_PLACE=False,
        HAS_BIAS=False, ACCUMULATE=accumulate,
    )  # fmt: skip


def _launch(config: Config, programs: int, *args: Any, **options: Any) -> None:
    kernel = device("fp8_gemm").fp8_gemm_kernel
    launch(kernel, (programs,), *args, **options, **config, num_warps=4, maxnreg=168)
