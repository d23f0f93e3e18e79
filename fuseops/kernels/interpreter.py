"""Make Triton's CPU interpreter round and multiply as the hardware does. Loaded only under
``TRITON_INTERPRET=1``.

Repaired, in triton 3.6 to 3.9:
* casts to bf16 truncate, and casts to fp8 drop a carry: here they round to nearest even, fp8
  saturating as ``cvt.rn.satfinite`` does (infinities too; NaN stays NaN);
* ``tl.dot`` multiplies the bit patterns of bf16 operands, ``tl.dot_scaled`` is missing in 3.6: here
  operands are decoded exactly and products are summed in float32 (float32 operands are not rounded
  to tf32), scales of E4M3 too;
* integers become bf16 by their bits; minimum and maximum of a number and NaN give NaN in 3.6
  (hardware: the number), and those along an axis warn where all are NaN;
* loop bounds fail under numpy >= 2.4 in 3.6;
* a mask and a truth value are an integer in 3.9;
* coordinates that are constants plus tensors count as constants, which 3.9 compares with int32's range;
* ``tl.sort`` takes seconds: its exclusive ors along an axis go element by element;
* two thirds of the time of a launch: each call of a device function replaces the language's functions again, and
  sums and products of integers are made twice, the second time for a comparison that nobody looks at.
Not repaired: arithmetic on bf16 and fp8 values works on their bits, so kernels cast to float32
first.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as tri

_FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
_E2M1 = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32
)
_FLOATS = (tl.float16, tl.bfloat16, tl.float32, tl.float64, *_FP8)


@functools.cache
def install() -> None:
    """Put the functions of this file in the place of the interpreter's, once a process."""
    builder = tri.InterpreterBuilder
    builder.cast_impl = _cast
    builder.create_dot = _dot
    builder.create_inline_asm = _inline_asm
    builder.create_dot_scaled = _dot_scaled
    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    for owner, name, method in (
        (builder, "create_fp_to_fp", _fp_to_fp),
        (builder, "create_masked_load", _masked),
        (builder, "create_masked_store", _masked),
        (tri.ReduceOps, "apply_impl", _reduce),
        (tri.ReduceOps, "min_max", _min_max),
        (tri.TritonSemantic, "dot_scaled", _semantic_dot_scaled),
        (tri.TritonSemantic, "_convert_elem_to_ir_value", _convert_elem),
        (tri._LangPatchScope, "restore", _restore),
    ):
        setattr(owner, name, functools.partialmethod(method, original=getattr(owner, name)))
    tri._patch_lang_tensor = functools.partial(_patch_lang_tensor, original=tri._patch_lang_tensor)
    tri._patch_lang = functools.partial(_patch_lang, original=tri._patch_lang)
    builder = tri.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)


class _Results(list[Any]):
    """A `_Results` stands for the results of inline assembly."""

    get_result = list.__getitem__


def _inline_asm(self: Any, asm: str, constraints: str, values: list[Any], *rest: Any) -> _Results:
    """Interpret the assembly that kernels have: a copy, or the conversion of four numbers to a word of FP8 codes."""
    if asm.startswith("mov.b32 $0, $1"):
        return _Results(values)
    conversion = re.search(r"cvt\.rn\.satfinite\.(\w+)\.f32 low", asm)
    if conversion is None:
        raise NotImplementedError(f"inline assembly in the interpreter: {asm}")
    dtype = {"e4m3x2": tl.float8e4nv, "e5m2x2": tl.float8e5}[conversion[1]]
    codes = [encode(value.data, dtype).astype(np.uint32) << 8 * i for i, value in enumerate(values)]
    return _Results([tri.TensorHandle(np.bitwise_or.reduce(codes), tl.uint32)])


def silent() -> Any:
    """A scope in which inf - inf and the like raise no numpy warning, as no hardware does."""
    return np.errstate(all="ignore")


def decode(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Values of an interpreter array: bf16 and fp8 are kept as bits."""
    if dtype == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    if dtype in _FP8:
        bits = torch.from_numpy(np.ascontiguousarray(data)).view(_FP8[dtype])
        return bits.to(torch.float32).numpy()
    return data


def encode(values: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Round values to nearest even in a Triton dtype."""
    if dtype == tl.bfloat16:
        return _round_bf16(values.astype(np.float32))
    if dtype in _FP8:
        return _round_fp8(values.astype(np.float32), _FP8[dtype])
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(tri._get_np_dtype(dtype))


def _round_bf16(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def _round_fp8(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    limit = torch.finfo(dtype).max
    clamped = torch.from_numpy(np.ascontiguousarray(values)).clamp(-limit, limit)
    bits = clamped.to(dtype).view(torch.uint8).numpy()
    return np.where(np.isnan(values), np.uint8(0x7F), bits)


def _cast(self: Any, src: Any, dst_type: Any) -> Any:
    src_type, dst_type = src.dtype.scalar, dst_type.scalar
    if src_type in _FLOATS or dst_type in _FLOATS:
        return tri.TensorHandle(encode(decode(src.data, src_type), dst_type), dst_type)
    return tri.TensorHandle(src.data.astype(tri._get_np_dtype(dst_type)), dst_type)


def _fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any, *, original: Any) -> Any:
    narrows = dst_type.scalar.primitive_bitwidth < src.dtype.scalar.primitive_bitwidth
    if narrows and rounding_mode not in (None, tri._ir.ROUNDING_MODE.RTNE):
        return original(self, src, dst_type, rounding_mode)
    return _cast(self, src, dst_type)


def _reduce(self: Any, values: Any, *, original: Any) -> Any:
    if self.combine_fn is not tl.standard._xor_combine:
        return original(self, values)
    data = np.bitwise_xor.reduce(values[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
    return self.to_tensor(data, values[0].dtype)


def _min_max(
    self: Any, values: Any, val_reduce_op: Any, idx_reduce_op: Any = None, *, original: Any
) -> Any:
    without_warnings = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}
    return original(self, values, without_warnings.get(val_reduce_op, val_reduce_op), idx_reduce_op)


def _dot(
    self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
) -> Any:
    a_data, b_data = decode(a.data, a.dtype.scalar), decode(b.data, b.dtype.scalar)
    accumulator_dtype = (
        np.promote_types(d.data.dtype, np.float32) if a.dtype.is_floating() else d.data.dtype
    )
    accumulator = np.matmul(a_data, b_data, dtype=accumulator_dtype) + d.data
    return tri.TensorHandle(encode(accumulator, d.dtype.scalar), d.dtype.scalar)


def _dot_scaled(
    self: Any,
    lhs,
    lhs_scale,
    lhs_format,
    rhs,
    rhs_scale,
    rhs_format,
    fast_math,
    lhs_k_pack,
    rhs_k_pack,
    acc,
) -> Any:
    a = _scaled_operand(lhs, lhs_scale, lhs_format, k_axis=-1, k_pack=lhs_k_pack)
    b = _scaled_operand(rhs, rhs_scale, rhs_format, k_axis=-2, k_pack=rhs_k_pack)
    return tri.TensorHandle(np.matmul(a, b, dtype=np.float32) + acc.data, acc.dtype.scalar)


def _masked(self: Any, *args: Any, original: Any, **keywords: Any) -> Any:
    """Load or store with a mask of truth values; that of a descriptor is an array of them already."""
    mask_place = 1 if original.__name__ == "create_masked_load" else 2
    mask = args[mask_place]
    if isinstance(mask, tri.TensorHandle):
        mask = tri.TensorHandle(mask.data.astype(bool), tl.int1)
    return original(self, *args[:mask_place], mask, *args[mask_place + 1 :], **keywords)


def _convert_elem(self: Any, elem: Any, require_i64: bool, *, original: Any) -> Any:
    """Unwrap a tensor from the constexpr that Python's arithmetic has put around it, and convert it."""
    value = getattr(elem, "value", elem)
    return original(self, value if isinstance(value, tl.tensor) else elem, require_i64)


class _Format(str):
    """A `_Format` is a format name that triton 3.6 can ask for its ``value``, as it asks a compiled constant."""

    value = property(str)


def _semantic_dot_scaled(self: Any, *args: Any, original: Any) -> Any:
    return original(self, *(_Format(a) if isinstance(a, str) else a for a in args))


def _scaled_operand(value: Any, scale: Any, kind: Any, k_axis: int, k_pack: bool) -> np.ndarray:
    """Exact values of a scaled operand; scales are E8M0 bytes or E4M3 along K, (outer, K / group)."""
    if kind == tri._ir.ScaleDotElemTypeTY.E2M1:
        data = _unpack_e2m1(value.data, k_axis if k_pack else -3 - k_axis)
    else:
        formats = {
            tri._ir.ScaleDotElemTypeTY.E4M3: tl.float8e4nv,
            tri._ir.ScaleDotElemTypeTY.E5M2: tl.float8e5,
        }
        data = decode(value.data, formats.get(kind, value.dtype.scalar)).astype(np.float32)
    if scale is None:
        return data
    if scale.dtype.scalar == tl.float8e4nv:
        factor = decode(scale.data, tl.float8e4nv)
    else:
        exponent = scale.data.view(np.uint8)
        power = np.ldexp(np.float32(1), exponent.astype(np.int32) - 127)
        factor = np.where(exponent == 255, np.nan, power).astype(np.float32)
    factor = np.repeat(factor, data.shape[k_axis] // factor.shape[-1], axis=-1)
    return data * (factor if k_axis == -1 else np.swapaxes(factor, -1, -2))


def _unpack_e2m1(data: np.ndarray, axis: int) -> np.ndarray:
    pairs = np.moveaxis(data.view(np.uint8), axis, -1)
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], -1)
    return np.moveaxis(_E2M1[codes], -1, axis)


def _patch_lang_tensor(tensor: Any, scope: Any, *, original: Any) -> None:
    original(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


_patched: set[str] = set()
"""Names of the modules of the language whose functions are replaced until the present launch ends."""


@functools.cache
def _languages(fn: Any) -> frozenset[str]:
    """The names of the modules of the language that a kernel or a device function sees."""
    return frozenset(v.__name__ for v in fn.__globals__.values() if v is tl or v is tl.core)


def _patch_lang(fn: Any, *, original: Any) -> Any:
    """Replace the functions of the language as Triton does, but once a launch for each module."""
    if _languages(fn) <= _patched:
        return tri._LangPatchScope()
    _patched.update(_languages(fn))
    return original(fn)


def _restore(self: Any, *, original: Any) -> None:
    original(self)
    _patched.clear()
