"""Validates the component tensors of a quantized value: kernels trust their shapes and dtypes."""

from __future__ import annotations

import math
from typing import cast

import torch

from fuseops import kernels as K
from fuseops.words import dtype_name

from .quantized import Quantized, token_axis
from .scaling import COLUMN, E2M1, E4M3, Block, Scaling

Components = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""The shape and dtype of each component, by name."""


def component_mismatch(q: Quantized) -> str | None:
    """The first component that is missing, or of another shape or dtype than the format gives, in words; None: none."""
    if q.scaling.is_square:  # a weight, which no GEMM takes for x
        return None
    *lead, width = q.shape
    groups = None if q.offs is None else q.offs.numel()
    tokens = math.prod(lead)
    expected: Components = {} if groups is None else {"offs": ((groups,), torch.int32)}
    if q.row is not None:
        expected |= _layout_components(q.scaling.of("row"), "row", tokens, width, groups)
    if q.col is not None:
        form = q.scaling.of("col")
        one_group = 1 if form.columns == COLUMN else 0  # kernels pad these as one group
        columns = K.padded_columns(tokens, one_group if groups is None else groups)
        expected |= _layout_components(form, "col", columns, width, groups)
    components = q.components()
    for name, (shape, dtype) in expected.items():
        t = components.get(name)
        if t is None:
            return f"it has no {name}, {dtype_name(dtype)} of shape {shape}"
        if t.shape != shape or t.dtype is not dtype:
            given = f"{dtype_name(t.dtype)} of shape {tuple(t.shape)}"
            return f"its {name} is {given}, expected {dtype_name(dtype)} of shape {shape}"
    return None


def _layout_components(
    scaling: Scaling, layout: str, tokens: int, width: int, groups: int | None
) -> Components:
    """The components of one layout over this many tokens."""
    whole = (() if groups is None else (groups,)), torch.float32
    codes = torch.uint8 if scaling.data is E2M1 else scaling.data
    packed = -(-(width if layout == "row" else tokens) // scaling.codes_per_byte)
    expected: Components = {
        layout: ((tokens, packed) if layout == "row" else (width, packed), codes)
    }
    if scaling.block is None:
        return {**expected, f"{layout}_scale": whole}
    axis, step = token_axis(scaling, layout)
    _, features = cast("Block", scaling.block if layout == "row" else scaling.columns)
    scales = -(-tokens // step), -(-width // features)
    expected[f"{layout}_scale"] = scales if axis == 0 else scales[::-1], scaling.scale
    return {**expected, f"{layout}_whole": whole} if scaling.scale is E4M3 else expected
