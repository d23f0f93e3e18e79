"""The prologue of the first GEMM of a joint op: an optional Add, an optional Tap, and a norm (RMSNorm or LayerNorm).

The normed x is not saved. The backward recomputes it for the weight gradient from x and rstd, which the norm's backward
reads anyway, and adds the gradients of the norm and of the Tap's output in one pass. Under a recipe with vectors the
norm writes the quantized operand of the GEMM, and in the backward the columns for its weight gradient.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops.ops.norms import LayerNorm, Normed, RMSNorm
from fuseops.ops.op import Call, Grads, MemberTensors, Op, SideGrads
from fuseops.ops.structure import Add, AddSaved, Tap, tap_gradient
from fuseops.recipes import Layout, Quantized, Scaling
from fuseops.recipes.numerics import QuantizationStats, active_stats
from fuseops.recipes.scaling import SQUARE, VECTOR


class PrologueSaved(NamedTuple):
    """A `PrologueSaved` holds the saved fields of a prologue, which precede those of the joint op."""

    x: Any  # the input of the norm (the sum, with an Add); without a norm, that of the GEMM
    gamma: Tensor | None = None  # the norm's weight itself, and its bias
    beta: Tensor | None = None
    mean: Tensor | None = None  # (...) float32, of a LayerNorm
    rstd: Tensor | None = None  # (...) float32
    eps: float | None = None  # of the forward
    dtypes: tuple[torch.dtype, torch.dtype] | None = None  # as in `AddSaved`


class NormPrologue:
    """A `NormPrologue` runs the ops before the GEMM: none, or some that end in a norm."""

    def __init__(self, ops: Sequence[Op[Any]]) -> None:
        self.ops = tuple(ops)
        self.add, self.tap = self._find(Add), self._find(Tap)
        self.norm = self._find(RMSNorm | LayerNorm)

    def _find(self, kind: Any) -> Any:
        return next((op for op in self.ops if isinstance(op, kind)), None)

    def names(self) -> dict[str, str]:
        """The name under which each field is published, "member.field"."""
        norm_index = max(len(self.ops) - 1, 0)
        own = {"gamma": "weight", "beta": "bias"} | {n: n for n in ("x", "mean", "rstd", "eps")}
        return {field: f"{norm_index}.{name}" for field, name in own.items()} | {
            "dtypes": "0.dtypes"
        }

    def saves_for(self, gemm_dx_fields: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        """The fields that each of its gradients reads.   gemm_dx_fields: those of the gradient of the GEMM's input"""
        if self.norm is None:
            return {"x": gemm_dx_fields}
        norm_index, read = len(self.ops) - 1, (*gemm_dx_fields, "x", "mean", "rstd")
        dx = (*read, "gamma", *(("dtypes",) if self.add else ()))
        saves_for = {"x": dx, f"{norm_index}.weight": read, f"{norm_index}.bias": gemm_dx_fields}
        return saves_for | ({f"0.{self.add.reads[0]}": dx} if self.add else {})

    @property
    def recompute_fields(self) -> tuple[str, ...]:
        """The fields from which `recompute` makes the input of the GEMM."""
        return ("x", "gamma", "beta", "eps") if self.norm is not None else ("x",)

    def fwd(
        self, x: Any, t: MemberTensors, call: Call
    ) -> tuple[Any, PrologueSaved, dict[str, Tensor] | None]:
        """(input of the GEMM, saved fields, published side tensors).   call: of the GEMM"""
        if self.norm is None:
            return x, PrologueSaved(x), None
        params, dtypes = t[len(self.ops) - 1], None
        residual = None if self.add is None else self.add.operand(x, t[0][self.add.reads[0]])
        if residual is not None and residual.dtype is not x.dtype:
            dtypes = x.dtype, residual.dtype  # the sum has torch's promoted dtype
            x, residual = x + residual, None
        eps = self.norm.epsilon(x.dtype)
        scaling = None if call.precision.roles is None else self.operand_format(x, call)
        if scaling is not None:
            given = params["weight"], eps, scaling.data, self.norm._weight_offset
            data, scale, h, rstd = K.rmsnorm_operand(x, residual, *given)
            h = x if residual is None else h
            y: Any = Quantized(Layout(data, scale), None, scaling, None, x.dtype)
            mean = None
        else:
            y, h, mean, rstd = self.norm.normed(x, params, eps, residual)
        side = {self.tap.writes[0]: h} if self.tap is not None else None
        own = params["weight"], params.get("bias"), mean, rstd, eps
        if call.precision.compute is not None:
            y = _cast(y, call.precision.compute)
        return y, PrologueSaved(h, *own, dtypes), side

    def recompute(self, s: Any, call: Call, columns: bool) -> Any:
        """The input of the GEMM, made again from the saved fields.   columns: for its weight gradient"""
        if self.norm is None:
            return s.x
        compute, roles = call.precision
        scaling = None if roles is None else self.operand_format(s.x, call)
        if scaling is None or (columns and (s.rstd is None or not _reads_square_columns(call))):
            params = {"weight": s.gamma, "bias": s.beta}
            y = self.norm.normed(s.x, params, s.eps).y
            return y if compute is None else _cast(y, compute)
        row, col, offset = None, None, self.norm._weight_offset
        if columns:
            col = Layout(*K.rmsnorm_columns(s.x, s.gamma, s.rstd, scaling.data, offset))
        else:
            parts = K.rmsnorm_operand(s.x, None, s.gamma, s.eps, scaling.data, offset)
            row = Layout(*parts[:2])
        return Quantized(row, col, scaling, None, s.x.dtype)

    def operand_format(self, x: Tensor, call: Call) -> Scaling | None:
        """The format in which the norm writes the GEMM's operand; None where it writes a tensor, as `fuseops.debug`
        needs to compare with the codes.
        """
        roles, compute = call.precision.roles, call.precision.compute
        if (
            roles is None
            or not isinstance(self.norm, RMSNorm)
            or (QuantizationStats.active and active_stats())
        ):
            return None
        vectors = (
            roles.input is not None and roles.input.block == VECTOR and roles.input.has_defaults
        )
        return roles.input if vectors and (compute is None or compute is x.dtype) else None

    def bwd(
        self, s: Any, dy: Tensor | None, calls: Sequence[Call], dside: SideGrads
    ) -> tuple[Grads, ...]:
        """The Grads of each op of the prologue, dx in the first.   dy: of the input of the GEMM"""
        if self.norm is None:
            return ()
        needs = calls[-1].needs
        dh = tap_gradient(dside)
        params = dict.fromkeys(needs - {"x"})
        if dy is not None:
            if s.x is not None and s.x.dtype is not dy.dtype:
                dy = dy.to(s.x.dtype)
            saved = self.norm.saved_of(
                Normed(dy, s.x, s.mean, s.rstd), s.gamma, tuple(dy.shape[-1:])
            )
            grads = self.norm.grads(saved, dy, needs, dh)
            dh = grads.x if "x" in needs else None  # some kernels make dx regardless
            params |= grads.params or {}
        first = Grads(dh)
        if self.add is not None and dh is not None:
            first = self.add.bwd(AddSaved(s.dtypes), dh)
        if len(self.ops) == 1:
            return (Grads(first.x, params),)
        return first, *[Grads()] * (len(self.ops) - 2), Grads(None, params)


def _cast(y: Any, compute: torch.dtype) -> Any:
    """y in the dtype that the GEMM reads under autocast."""
    return y if isinstance(y, Quantized) else y.to(compute)


def _reads_square_columns(call: Call) -> bool:
    """Whether the weight gradient reads columns in squares."""
    roles = call.precision.roles
    return roles is not None and roles.columns and roles.input.columns == SQUARE  # type: ignore[union-attr]
