"""A front comes before the first GEMM of a joint op: maybe an addition, maybe a Tap, and a norm (RMSNorm or LayerNorm).

The normed x is not saved: the norm's backward reads x and rstd, so the weight gradient has y made again from x. The
gradient of the norm and that of what the Tap published are added in one pass. Under a recipe of vectors the norm writes
the codes that the GEMM reads, and in the backward the columns of its weight gradient.
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
from fuseops.recipes.numbers import Measuring, watching
from fuseops.recipes.scaling import SQUARE, VECTOR


class FrontSaved(NamedTuple):
    """A `FrontSaved` holds what an op with such a front saves of it; the fields of its own come behind."""

    x: Any  # what is normed, the sum where one is added; the input of the GEMM where there is no norm
    gamma: Tensor | None = None  # the norm's weight itself, and its bias
    beta: Tensor | None = None
    mean: Tensor | None = None  # (...) float32, of a LayerNorm
    rstd: Tensor | None = None  # (...) float32
    eps: float | None = None  # of the forward
    dtypes: tuple[torch.dtype, torch.dtype] | None = None  # as of `AddSaved`


class Front:
    """A `Front` holds the ops before the GEMM: none, or those that end in a norm."""

    def __init__(self, ops: Sequence[Op[Any]]) -> None:
        self.ops = tuple(ops)
        self.add, self.tap = self._only(Add), self._only(Tap)
        self.norm = self._only(RMSNorm | LayerNorm)

    def _only(self, kind: Any) -> Any:
        return next((op for op in self.ops if isinstance(op, kind)), None)

    def names(self) -> dict[str, str]:
        """Under which member's name each field is published."""
        at = max(len(self.ops) - 1, 0)
        own = {"gamma": "weight", "beta": "bias"} | {n: n for n in ("x", "mean", "rstd", "eps")}
        return {field: f"{at}.{name}" for field, name in own.items()} | {"dtypes": "0.dtypes"}

    def saves_for(self, below: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        """Fields that each of its gradients reads; below: what that of the GEMM's input reads."""
        if self.norm is None:
            return {"x": below}
        at, read = len(self.ops) - 1, (*below, "x", "mean", "rstd")
        dx = (*read, "gamma", *(("dtypes",) if self.add else ()))
        found = {"x": dx, f"{at}.weight": read, f"{at}.bias": below}
        return found | ({f"0.{self.add.reads[0]}": dx} if self.add else {})

    @property
    def remakes(self) -> tuple[str, ...]:
        """Fields that the input of the GEMM is made of again."""
        return ("x", "gamma", "beta", "eps") if self.norm is not None else ("x",)

    def fwd(
        self, x: Any, t: MemberTensors, call: Call
    ) -> tuple[Any, FrontSaved, dict[str, Tensor] | None]:
        """The input of the GEMM, whose call it is, what is saved, and what is published."""
        if self.norm is None:
            return x, FrontSaved(x), None
        params, dtypes = t[len(self.ops) - 1], None
        residual = None if self.add is None else self.add.operand(x, t[0][self.add.reads[0]])
        if residual is not None and residual.dtype is not x.dtype:
            dtypes = x.dtype, residual.dtype  # torch's promotion decides of what dtype h is
            x, residual = x + residual, None
        eps = self.norm.epsilon(x.dtype)
        scaling = None if call.precision.roles is None else self.codes(x, call)
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
        return y, FrontSaved(h, *own, dtypes), side

    def again(self, s: Any, call: Call, columns: bool) -> Any:
        """The input of the GEMM once more.   columns: for its weight gradient"""
        if self.norm is None:
            return s.x
        compute, roles = call.precision
        scaling = None if roles is None else self.codes(s.x, call)
        if scaling is None or (columns and (s.rstd is None or not _squares(call))):
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

    def codes(self, x: Tensor, call: Call) -> Scaling | None:
        """The format in which the norm of x writes what the GEMM reads; None where that is a tensor. Nobody watches
        the numbers then, who wants the tensor that the codes are of.
        """
        roles, compute = call.precision.roles, call.precision.compute
        if (
            roles is None
            or not isinstance(self.norm, RMSNorm)
            or (Measuring.numbers and watching())
        ):
            return None
        vectors = roles.input is not None and roles.input.block == VECTOR and roles.input.plain
        return roles.input if vectors and (compute is None or compute is x.dtype) else None

    def bwd(
        self, s: Any, dy: Tensor | None, calls: Sequence[Call], dside: SideGrads
    ) -> tuple[Grads, ...]:
        """Of every op of the front, dx in the first; dy: that of the input of the GEMM."""
        if self.norm is None:
            return ()
        needs = calls[-1].needs
        dh = tap_gradient(dside)
        params = dict.fromkeys(needs - {"x"})
        if dy is not None:
            if s.x is not None and s.x.dtype is not dy.dtype:
                dy = dy.to(s.x.dtype)
            of = self.norm.saved_of(Normed(dy, s.x, s.mean, s.rstd), s.gamma, tuple(dy.shape[-1:]))
            found = self.norm.grads(of, dy, needs, dh)
            dh = found.x if "x" in needs else None  # some kernels make it all the same
            params |= found.params or {}
        first = Grads(dh)
        if self.add is not None and dh is not None:
            first = self.add.bwd(AddSaved(s.dtypes), dh)
        elif self.add is not None:
            first = Grads(None, side={self.add.reads[0]: None})
        if len(self.ops) == 1:
            return (Grads(first.x, params),)
        return first, *[Grads()] * (len(self.ops) - 2), Grads(None, params)


def _cast(y: Any, compute: torch.dtype) -> Any:
    """Casts y to the dtype that the GEMM reads under autocast."""
    return y if isinstance(y, Quantized) else y.to(compute)


def _squares(call: Call) -> bool:
    """Whether the weight gradient reads columns in squares, which are made of codes."""
    roles = call.precision.roles
    return roles is not None and roles.columns and roles.input.columns == SQUARE  # type: ignore[union-attr]
