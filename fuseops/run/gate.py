"""The gate of a recipe: linear ops that FP8 would not make faster stay in high precision, with a reason.

It applies on devices with FP8 GEMMs only; elsewhere, and under `fo.recipe(..., strict=True)`, all ops are quantized.
The prediction uses shapes alone, with groups of even sizes: it does not wait for the device, and is the same for
every split. Where ranks send each other rows (`AcrossRanks.sends`) it does not count them: a rank's own say nothing
about those that arrive, and all ranks must send in one format. Such ops stay in high precision only if FP8 pays for no
number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """A `GatedRun` is a set of linear ops that are quantized together or not at all."""

    ops: tuple[int, ...]
    layer: LinearRun
    min_rows: int | None  # rows from which on that pays, None: never
    sent: bool = False  # whether their rows come from all ranks

    def reason(self, rows: Any) -> str | None:
        """Why the ops stay in high precision with this number of rows, or None.   rows: a symbol in traced code"""
        if self.min_rows is None:
            return "FP8 pays for no number of rows"
        few = not self.sent and rows < self.min_rows
        return f"FP8 pays from {self.min_rows} rows on" if few else None

    def gain(self, names: Sequence[str], rows: int) -> Gain:
        """The predicted gain of a call with this number of rows.   names: of the ops of the run"""
        return gain_of(self.layer, tuple(names[i] for i in self.ops), rows)._replace(sent=self.sent)


def gated_runs(chain: Chain, scanned: Scan, facts: Facts) -> tuple[GatedRun, ...]:
    """The gated runs under the recipe of a call: the linear ops of one joint fused op together, others one by one."""
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
    joint = list(_joint_linears(scanned, chain.ops))
    sent = {
        k for i, op in enumerate(chain.ops) if op.across_ranks.sends for k in chain.receivers(i)
    }
    found: list[GatedRun] = []
    covered: set[int] = set()
    for i in gemms:
        ops = next((run for run in joint if i in run), (i,))
        same = all(k in gemms and facts.roles[k] == facts.roles[i] for k in ops)
        if i not in covered and same:
            layer = LinearRun(tuple(gemms[k] for k in ops), cast("Roles", facts.roles[i]))
            found.append(GatedRun(ops, layer, min_rows_to_gain(layer), not sent.isdisjoint(ops)))
            covered.update(ops)
    return tuple(found)


def _gemm_of(op: Op[Any]) -> Gemm | None:
    """The sizes of a linear op's weight; None where they would have to be computed (a parametrization)."""
    if "parametrizations" in op._modules:
        return None
    weight = op.sample("weight")
    if not isinstance(weight, torch.Tensor) or weight.dim() not in (2, 3):
        return None
    n, k = weight.shape[-2:]
    return Gemm(getattr(op, "num_groups", 1), n, k)


def _joint_linears(scanned: Scan, ops: Sequence[Op[Any]]) -> Iterator[tuple[int, ...]]:
    """The linear ops of each joint fused op that could fire, in the order of rules."""

    def linear(c: RuleMatch) -> tuple[int, ...]:
        return tuple(i for i in range(c.start, c.stop) if ops[i].multiplies)

    for c in scanned.candidates:
        if c.rule.kind != "joint" or len(linear(c)) < 2:
            continue
        if c.fused(ops).recipes:
            yield linear(c)
