"""The three GEMMs over codes in small blocks, MXFP8 and NVFP4, on the tensor cores of Blackwell (`tl.dot_scaled`).

Maths: codes times scales in float32 sums, times one float32 number a tensor or a group, rounded once.
Shapes: x (R, K), weight (N, K) or (E, N, K) -> (R, N); columns dy (N, C), x (K, C) -> (N, K) or (E, N, K). Codes of
four bits are two in a byte. Scales are swizzled (`formats.swizzled`): those of rows in tiles of 128 that begin anew
in each group, those of a weight a matrix; columns begin anew in each group at a multiple of 128.
Hardware: sm_100 and later, where it ran nowhere yet: rows of `aot.json` say that it compiles and fits.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops.errors import FuseOpsError
from fuseops.kernels.formats import E2M1, E4M3, E5M2, dequantize_format, micro_format, unswizzled
from fuseops.kernels.grouped import grouped_mm, grouped_wgrad
from fuseops.kernels.groups import column_offs, num_groups, padded_columns
from fuseops.kernels.launch import arch_of, device, launch
from fuseops.kernels.records import of_fields
from fuseops.kernels.registry import DTYPES, Cases, floats, ints, kernel_op, on_meta
from fuseops.kernels.tiles import cdiv, check_shape, pointers, pow2


def _micro_values(codes: Tensor, scale: Tensor, offs: Tensor | None = None) -> Tensor:
    """Codes with swizzled scales, dequantized to float32."""
    data = E2M1 if codes.dtype == torch.uint8 else codes.dtype
    form = micro_format(data)
    wide = codes.shape[-1] * (2 if data is E2M1 else 1)
    plain = unswizzled(scale, codes.shape[-2], -(-wide // form.block[1]), offs)
    return dequantize_format(codes, plain.view(form.scale), data, form.block)


class MicroProduct(NamedTuple):
    """A `MicroProduct` has the operands of a product in small blocks: rows and a weight, or columns of dy and of x.

    global_scale  (E,) or (1,) float32
    """

    a: Tensor
    a_scale: Tensor
    b: Tensor
    b_scale: Tensor
    offs: Tensor | None = None
    global_scale: Tensor | None = None
    dtype: torch.dtype = torch.bfloat16


def _micro_mm(p: MicroProduct) -> Tensor:
    left, right = _micro_values(p.a, p.a_scale, p.offs), _micro_values(p.b, p.b_scale)
    if p.offs is None:
        y = left @ right.t()
        return (y if p.global_scale is None else y * p.global_scale).to(p.dtype)
    right = right if p.global_scale is None else right * p.global_scale[:, None, None]
    return grouped_mm.twin(left, right, p.offs).to(p.dtype)


def _micro_wgrad(p: MicroProduct) -> Tensor:
    left, right = _micro_values(p.a, p.a_scale), _micro_values(p.b, p.b_scale)
    global_scale = p.global_scale
    if p.offs is None:
        dw = left @ right.t()
        return (dw if global_scale is None else dw * global_scale).to(p.dtype)
    dw = grouped_wgrad.twin(left.t(), right.t(), column_offs(p.offs))
    return (dw if global_scale is None else dw * global_scale[:, None, None]).to(p.dtype)


SM_100 = 100
NAMES = {E4M3: "e4m3", E5M2: "e5m2", torch.uint8: "e2m1"}
BYTES = frozenset({torch.uint8})  # codes of four bits, and scales


def multiplies(x: Tensor) -> bool:
    """Whether kernels multiply codes in small blocks on the device of x."""
    return x.is_cuda and arch_of(x.device) >= SM_100


def _operands(rows: int, width: int, data: torch.dtype, groups: int = 0) -> tuple[Tensor, Tensor]:
    four = data is E2M1
    codes = on_meta(rows, width // (2 if four else 1), dtype=torch.uint8 if four else data)
    shape = cdiv(rows, 128) + groups, cdiv(width, 64 if four else 128), 32, 4, 4
    return codes, on_meta(*shape, dtype=torch.uint8)


def _cases(wgrad: bool) -> Cases:
    for a, b in ((E4M3, E4M3), (E5M2, E4M3), (E2M1, E2M1)):
        for groups in (0, 64):
            offs = ints(64) if groups else None
            global_scale = floats(max(groups, 1)) if a is E2M1 else None
            if wgrad:
                yield *_operands(4096, 16384, a), *_operands(2048, 16384, b), offs, global_scale
                continue
            x, weight = _operands(16384, 4096, a, groups), _operands(2048, 4096, b)
            if groups:
                weight = tuple(t.expand(groups, *t.shape).contiguous() for t in weight)  # type: ignore[assignment]
            yield *x, *weight, offs, global_scale


def _flops(p: MicroProduct) -> int:
    return 2 * p.a.numel() * p.b.shape[-2] * (2 if p.b.dtype == torch.uint8 else 1)


def _product(p: MicroProduct) -> Tensor:
    return p.a.new_empty(p.a.shape[0], p.b.shape[-2], dtype=p.dtype)


def _weight_grad(p: MicroProduct) -> Tensor:
    groups = () if p.offs is None else (len(p.offs),)
    return p.a.new_empty(*groups, p.a.shape[0], p.b.shape[0], dtype=p.dtype)


micro_op = functools.partial(
    kernel_op, traces_twin=False, flops=_flops, min_arch=SM_100, dtypes=DTYPES | BYTES
)


@micro_op(twin=_micro_mm, fake=_product, cases=lambda: _cases(False))
@of_fields(MicroProduct)
def micro_mm(p: MicroProduct) -> Tensor:
    """x[rows of e] @ weight[e].T * global_scale[e], rows behind the last group zero.   (R, K), (E, N, K) -> (R, N)"""
    (rows, width), n = p.a.shape, p.b.shape[-2]
    groups = num_groups(p.offs)
    check_shape("weight", p.b, (groups, n, width) if groups else (n, width))
    blocks = padded_columns(rows, groups) // 128
    _check(p.a, p.a_scale, blocks)
    _check(p.b, p.b_scale, cdiv(n, 128))
    return _launched(_product(p), p, blocks, False)


@micro_op(twin=_micro_wgrad, fake=_weight_grad, cases=lambda: _cases(True))
@of_fields(MicroProduct)
def micro_wgrad(p: MicroProduct) -> Tensor:
    """dy[:, columns of e] @ x[:, columns of e].T times global_scale[e].   (N, C), (K, C) -> (N, K) or (E, N, K)"""
    n, width = p.a.shape
    check_shape("x", p.b, (len(p.b), width))
    _check(p.a, p.a_scale, cdiv(n, 128))
    _check(p.b, p.b_scale, cdiv(len(p.b), 128))
    blocks = cdiv(n, 128) * (num_groups(p.offs) or 1)
    return _launched(_weight_grad(p), p, blocks, True)


def _check(codes: Tensor, scale: Tensor, blocks: int) -> None:
    """Scales that lie as the kernel reads them, of a matrix or of each."""
    wide = codes.shape[-1] * (2 if codes.dtype == torch.uint8 else 1)
    tiles = cdiv(wide, 64 if codes.dtype == torch.uint8 else 128)
    expected = (*codes.shape[:-2], blocks, tiles, 32, 4, 4)
    if scale.shape != expected:
        raise FuseOpsError(f"scale is {tuple(scale.shape)}, expected {expected}, as swizzled.")
    if codes.dtype not in NAMES:
        raise FuseOpsError(f"codes are {codes.dtype}, expected e4m3, e5m2, or e2m1 in bytes.")


def _launched(y: Tensor, p: MicroProduct, blocks: int, wgrad: bool) -> Tensor:
    """Launch a program for each tile of y (..., M, N)."""
    a, a_scale, b, b_scale, offs, global_scale, _ = p
    count = num_groups(offs) or 1
    check_shape("global_scale", global_scale, (count,))
    if not (y.numel() and a.numel() and b.numel()):
        return y.zero_()
    module, (m, n) = device("micro_gemm"), y.shape[-2:]
    groups, pack = num_groups(offs), 2 if a.dtype == torch.uint8 else 1
    width = a.shape[1]
    a_desc, b_desc = (_described(module, t, 128 // pack) for t in (a, b.reshape(-1, width)))
    launch(
        module.micro_mm_kernel, (blocks * cdiv(n, 128),),
        y, a_desc, a_scale.contiguous(), b_desc, b_scale.contiguous(), *pointers(y, global_scale, offs),
        m, n, width * pack, groups,
        GROUPS=bool(groups), WGRAD=wgrad, HAS_GLOBAL_SCALE=global_scale is not None,
        A_FORM=NAMES[a.dtype], B_FORM=NAMES[b.dtype], BLOCK_E=pow2(groups, least=32), BLOCK_K=128,
        num_warps=8, num_stages=3,  # what the shared memory of sm_120 holds
    )  # fmt: skip
    return y


def _described(module: Any, codes: Tensor, width: int) -> Any:
    """A descriptor of 128 rows and so many bytes of each; rows of odd lengths are copied to longer ones."""
    odd = codes.shape[1] % 16
    raw = torch.nn.functional.pad(codes.view(torch.uint8), (0, 16 - odd)) if odd else codes
    codes = raw.view(codes.dtype).contiguous()
    return module.TensorDescriptor(codes, codes.shape, codes.stride(), [128, width])
