"""A recipe has to pay: layers that FP8 cannot make faster stay in high precision, and say so.

Only where FP8 GEMMs are there to be fast; elsewhere, and under `fo.recipe(..., strict=True)`, a recipe is obeyed. It is
judged by shapes alone, groups of even sizes: nothing waits for the device, and another split is not another plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch

from fuseops.kernels.fp8_paths import multiplies_codes
from fuseops.ops.op import Op
from fuseops.plan.chain import Chain
from fuseops.plan.cover import RuleMatch, Scan
from fuseops.plan.facts import Facts
from fuseops.recipes import Roles
from fuseops.recipes.gain import Gain, Gemm, LinearRun, gain_of, min_rows_to_gain


class GatedRun(NamedTuple):
    """A `GatedRun` lists linear ops that are quantized together or not at all, and the rows from which on that pays."""

    ops: tuple[int, ...]
    layer: LinearRun
    min_rows: int | None  # rows from which on it pays

    def reason(self, rows: Any) -> str | None:
        """Why they stay in high precision over so many rows, which traced code knows as a symbol."""
        if self.min_rows is None:
            return "FP8 pays for no number of rows"
        return f"FP8 pays from {self.min_rows} rows on" if rows < self.min_rows else None


def layers_of(chain: Chain, scanned: Scan, facts: Facts) -> tuple[GatedRun, ...]:
    """What has to pay under the recipe of a call: the ops of one fused op together, others by themselves."""
    settings, call = facts.settings, facts.key.call
    halves = (call.compute or call.dtype) in (torch.bfloat16, torch.float16)
    if settings.recipe is None or settings.strict_recipe or not halves:
        return ()
    if not multiplies_codes(call.device):
        return ()
    gemms = {
        i: gemm
        for i, (op, roles) in enumerate(zip(chain.ops, facts.roles, strict=True))
        if roles is not None and roles.kernels and (gemm := _gemm_of(op)) is not None
    }
    together = list(_together(scanned, chain.ops))
    found: list[GatedRun] = []
    taken: set[int] = set()
    for i in gemms:
        ops = next((run for run in together if i in run), (i,))
        same = all(k in gemms and facts.roles[k] == facts.roles[i] for k in ops)
        if i not in taken and same:
            layer = LinearRun(tuple(gemms[k] for k in ops), cast("Roles", facts.roles[i]))
            found.append(GatedRun(ops, layer, min_rows_to_gain(layer)))
            taken.update(ops)
    return tuple(found)


def _gemm_of(op: Op[Any]) -> Gemm | None:
    """The sizes of a linear op's weight; None where it takes work to tell them (a parametrization)."""
    if "parametrizations" in op._modules:
        return None
    weight = op.sample("weight")
    if not isinstance(weight, torch.Tensor) or weight.dim() not in (2, 3):
        return None
    n, k = weight.shape[-2:]
    return Gemm(getattr(op, "num_groups", 1), n, k)


def _together(scanned: Scan, ops: Sequence[Op[Any]]) -> Iterator[tuple[int, ...]]:
    """Linear ops that one joint fused op would run, by the rule that goes first."""

    def linear(c: RuleMatch) -> tuple[int, ...]:
        return tuple(i for i in range(c.start, c.stop) if ops[i].multiplies)

    for c in scanned.candidates:
        if c.rule.kind != "joint" or len(linear(c)) < 2:
            continue
        if getattr(c.rule.build(*ops[c.start : c.stop]), "recipes", False):
            yield linear(c)


def gains(
    layers: Sequence[GatedRun], names: Sequence[str], rows: Callable[[int], int]
) -> tuple[Gain, ...]:
    """What is predicted of a call.   rows: before the op of an index"""
    return tuple(
        gain_of(judged.layer, tuple(names[i] for i in judged.ops), rows(judged.ops[0]))
        for judged in layers
    )
