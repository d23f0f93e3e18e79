"""What comes before the first GEMM of a joint op: maybe an addition, maybe a Tap, and an RMSNorm.

The normed x is not saved: the norm's backward reads x and rstd, so the weight gradient has y made again from x. The
gradient of the norm and that of what the Tap published are added in one pass. Under a recipe of vectors the norm writes
the codes that the GEMM reads, and in the backward the columns of its weight gradient.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops.ops.norms import RMSNorm
from fuseops.ops.op import Call, Grads, Op
from fuseops.ops.structure import Add, AddSaved, Tap
from fuseops.recipes import Layout, Quantized, Scaling
from fuseops.recipes.numbers import watching
from fuseops.recipes.scaling import SQUARE, VECTOR

Tensors = Mapping[str, Tensor]


class FrontSaved(NamedTuple):
    """What every op with such a front saves of it; the fields of its own come behind."""

    x: Any  # what is normed, the sum where one is added; the input of the GEMM where there is no norm
    gamma: Tensor | None = None  # the norm's weight itself
    rstd: Tensor | None = None  # (...) float32
    eps: float | None = None  # of the forward
    dtypes: tuple[torch.dtype, torch.dtype] | None = None  # as of `AddSaved`


class Front:
    """The ops before the GEMM: none, or those that end in a norm."""

    def __init__(self, ops: Sequence[Op[Any]]) -> None:
        self.ops = tuple(ops)
        self.add, self.tap, self.norm = (self._only(kind) for kind in (Add, Tap, RMSNorm))

    def _only(self, kind: type) -> Any:
        return next((op for op in self.ops if isinstance(op, kind)), None)

    @property
    def _offset(self) -> float:
        """What is added to the norm's weight."""
        return float(self.norm.weight_offset)

    def names(self) -> dict[str, str]:
        """Under which member's name each field is published."""
        at = max(len(self.ops) - 1, 0)
        found = {"x": f"{at}.x", "gamma": f"{at}.weight", "rstd": f"{at}.rstd", "eps": f"{at}.eps"}
        return {**found, "dtypes": "0.dtypes"}

    def saves_for(self, below: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        """Fields that each of its gradients reads; below: what that of the GEMM's input reads."""
        if self.norm is None:
            return {"x": below}
        dx = (*below, "x", "gamma", "rstd", *(("dtypes",) if self.add else ()))
        found = {"x": dx, f"{len(self.ops) - 1}.weight": (*below, "x", "rstd")}
        return found | ({f"0.{self.add.reads[0]}": dx} if self.add else {})

    @property
    def remakes(self) -> tuple[str, ...]:
        """Fields that the input of the GEMM is made of again."""
        return ("x", "gamma", "eps") if self.norm is not None else ("x",)

    def fwd(
        self, x: Any, t: tuple[Tensors, ...], call: Call
    ) -> tuple[Any, FrontSaved, dict[str, Tensor] | None]:
        """The input of the GEMM, whose call it is, what is saved, and what is published."""
        if self.norm is None:
            return x, FrontSaved(x), None
        gamma, dtypes = t[len(self.ops) - 1]["weight"], None
        h, eps = x, self.norm.epsilon(x.dtype)
        residual = None if self.add is None else self.add.operand(x, t[0][self.add.reads[0]])
        same = residual is not None and residual.dtype is x.dtype
        scaling = _codes(x, call) if same or residual is None else None
        y: Any
        if scaling is not None:
            given = x, residual, gamma, eps, scaling.data, self._offset
            *row, total, rstd = K.rmsnorm_operand(*given)
            y, h = Quantized(Layout(*row), None, scaling, None, x.dtype), total if same else x
        elif same:
            y, h, rstd = K.add_rmsnorm_fwd(x, residual, gamma, eps, self._offset)  # type: ignore[arg-type]
        else:
            if residual is not None:  # torch's promotion decides of what dtype h is
                h, dtypes = x + residual, (x.dtype, residual.dtype)
                eps = self.norm.epsilon(h.dtype)
            y, rstd = K.rmsnorm_fwd(h, gamma, eps, self._offset)
        side = {self.tap.writes[0]: h} if self.tap is not None else None
        return _cast(y, call), FrontSaved(h, gamma, rstd, eps, dtypes), side

    def again(self, s: Any, call: Call, columns: bool) -> Any:
        """The input of the GEMM once more.   columns: for its weight gradient"""
        if self.norm is None:
            return s.x
        scaling = _codes(s.x, call)
        if scaling is None or (columns and (s.rstd is None or not _squares(call))):
            return _cast(K.rmsnorm_fwd(s.x, s.gamma, s.eps, self._offset)[0], call)
        row = col = None
        if columns:
            given = s.x, s.gamma, s.rstd, scaling.data, self._offset
            col = Layout(*K.rmsnorm_columns(*given))
        else:
            row = Layout(
                *K.rmsnorm_operand(s.x, None, s.gamma, s.eps, scaling.data, self._offset)[:2]
            )
        return Quantized(row, col, scaling, None, s.x.dtype)

    def bwd(
        self,
        s: Any,
        dy: Tensor | None,
        calls: Sequence[Call],
        dside: Mapping[str, Tensor | None],
    ) -> tuple[Grads, ...]:
        """Of every op of the front, dx in the first; dy: that of the input of the GEMM."""
        if self.norm is None:
            return ()
        wanted = "weight" in calls[-1].needs
        dh = dside.get(self.tap.writes[0]) if self.tap is not None else None
        dgamma = None
        if dy is not None:
            dtype = None if s.gamma is None else s.gamma.dtype
            given = dy.to(s.x.dtype), s.x, s.gamma, s.rstd, dh, wanted, self._offset, dtype
            dh, dgamma = K.rmsnorm_bwd(*given)
        first = Grads(dh)
        if self.add is not None and dh is not None:
            first = self.add.bwd(AddSaved(s.dtypes), dh)
        elif self.add is not None:
            first = Grads(None, side={self.add.reads[0]: None})
        params = {"weight": dgamma} if wanted else None
        if len(self.ops) == 1:
            return (first._replace(params=params),)
        return first, *[Grads()] * (len(self.ops) - 2), Grads(None, params)


def _cast(y: Any, call: Call) -> Any:
    """As the GEMM reads it under autocast."""
    compute = call.precision.compute
    return y if compute is None or isinstance(y, Quantized) else y.to(compute)


def _codes(x: Tensor, call: Call) -> Scaling | None:
    """The format in which the norm of x writes what the GEMM reads; None where that is a tensor. Nobody watches the
    numbers then, who wants the tensor that the codes are of.
    """
    roles, compute = call.precision.roles, call.precision.compute
    if (
        roles is None
        or roles.input is None
        or roles.input.block != VECTOR
        or watching() is not None
    ):
        return None
    return roles.input if compute is None or compute is x.dtype else None


def _squares(call: Call) -> bool:
    """Whether the weight gradient reads columns in squares, which are made of codes."""
    roles = call.precision.roles
    return roles is not None and roles.columns and roles.input.columns == SQUARE  # type: ignore[union-attr]
