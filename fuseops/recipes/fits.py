"""Whether the components of a quantized value are those of its format: a kernel reads them as they are said to lie."""

from __future__ import annotations

import math
from typing import cast

import torch

from fuseops import kernels as K
from fuseops.words import dtype_name

from .quantized import Quantized, tokens_of
from .scaling import COLUMN, E2M1, E4M3, Block, Scaling

Components = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""By name of a component, its shape and dtype."""


def misfit(q: Quantized) -> str | None:
    """What a value holds that its format, its shape or its groups do not allow, in words; None: nothing."""
    if q.scaling.square:  # a weight, which no GEMM takes for x
        return None
    *lead, width = q.shape
    groups = None if q.offs is None else q.offs.numel()
    tokens = math.prod(lead)
    wanted: Components = {} if groups is None else {"offs": ((groups,), torch.int32)}
    if q.row is not None:
        wanted |= _parts(q.scaling.of("row"), "row", tokens, width, groups)
    if q.col is not None:
        form = q.scaling.of("col")
        alone = 1 if form.columns == COLUMN else None  # which kernels lay as one group
        columns = K.padded_columns(tokens, alone if groups is None else groups)
        wanted |= _parts(form, "col", columns, width, groups)
    found = q.components()
    for name, (shape, dtype) in wanted.items():
        t = found.get(name)
        if t is None:
            return f"it has no {name}, {dtype_name(dtype)} of shape {shape}"
        if t.shape != shape or t.dtype is not dtype:
            given = f"{dtype_name(t.dtype)} of shape {tuple(t.shape)}"
            return f"its {name} is {given}, expected {dtype_name(dtype)} of shape {shape}"
    return None


def _parts(
    scaling: Scaling, layout: str, tokens: int, width: int, groups: int | None
) -> Components:
    """The parts of one layout, over so many tokens."""
    whole = (() if groups is None else (groups,)), torch.float32
    codes = torch.uint8 if scaling.data is E2M1 else scaling.data
    packed = -(-(width if layout == "row" else tokens) // scaling.packs)
    found: Components = {layout: ((tokens, packed) if layout == "row" else (width, packed), codes)}
    if scaling.block is None:
        return {**found, f"{layout}_scale": whole}
    axis, some = tokens_of(scaling, layout)
    _, features = cast("Block", scaling.block if layout == "row" else scaling.columns)
    scales = -(-tokens // some), -(-width // features)
    found[f"{layout}_scale"] = scales if axis == 0 else scales[::-1], scaling.scale
    return {**found, f"{layout}_whole": whole} if scaling.scale is E4M3 else found
