"""`linear_loss` computes a user's loss over the logits of a head, a chunk of them at a time.

Shapes: input (B, ..., D), linear_weight (V, D), linear_bias (V,), rows (B, ...) -> ().
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseops import kernels as K
from fuseops import torch_private
from fuseops.arguments import check_integers
from fuseops.errors import FuseOpsError, ShapeError
from fuseops.kernels.cross_entropy import add_weight_grad, row_chunks

from .checks import check_tensors
from .cross_entropy import Called, check_operands
from .loss_options import CHUNK_BYTES, LOGITS_STAY_HIGH
from .op import Call, Grads, Op, Out, Shape

Loss = Callable[..., Any]
CALLED = Called("linear_loss", "input", "linear_weight", "linear_bias")


class LinearLossSaved(NamedTuple):
    dx: Tensor | None  # (B, ..., D) in the dtype of x
    dweight: Tensor | None  # (V, D) float32
    dbias: Tensor | None  # (V,) float32
    weight: Tensor | None  # that of the caller
    bias: Tensor | None


@torch_private.dynamo_disabled
def linear_loss(
    loss: Loss,
    input: Tensor,
    linear_weight: Tensor,
    *rows: Tensor,
    linear_bias: Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Any:
    """The sum of `loss(logits, *rows)` over chunks of the first axis, of logits that are never whole in memory.

    For losses that `linear_cross_entropy` does not have: preference losses over pairs of sequences, policy losses,
    distillation. (What is a function of each token's log-probability alone needs none of this: take it from
    `linear_cross_entropy(..., publishes=("log_probs",))`, which has a gradient.)

    loss         loss(logits, *rows) -> a number, of logits (b, ..., V) in the dtype of `input` and b of each of the
                 rows; numbers of chunks are added up, so divide by what you count over all of B (of float16 the sum
                 and not its parts, whose gradients are made before a GradScaler multiplies). Or a tuple of it and more
                 tensors, which are added up too, without a gradient (metrics)
    input        (B, ..., D); whatever belongs together has one index of the first axis: pairs of answers (B, 2, T, D)
    rows         tensors (B, ...): targets, masks, advantages, the reference's log-probabilities. Without gradients
    chunk_bytes  the most that logits take at a time, as long as one index of B takes no more; `loss` may make as much
                 again a few times over, in float32

    -> the sum, float32, or a tuple of sums. The gradients of input, linear_weight and linear_bias are made with the
    loss (6 N D V operations in all), by autograd over `loss` for the chunk; that of the weight is summed in float32.
    Under torch.compile the graph is broken here.
    Raises ShapeError for other shapes and for dtypes that differ, FuseOpsError where rows, or a tensor that `loss`
    reads from elsewhere, want a gradient, where it returns no number, and for a chunk_bytes that is no integer from 1
    on.
    """
    named = {f"rows {k}": t for k, t in enumerate(rows)}
    named |= {} if linear_bias is None else {"linear_bias": linear_bias}
    check_tensors("linear_loss", input=input, linear_weight=linear_weight, **named)
    if not callable(loss):
        raise FuseOpsError(f"linear_loss expects loss to be a function, got {type(loss).__name__}.")
    if input.dim() < 2 or linear_weight.dim() != 2 or input.shape[-1] != linear_weight.shape[1]:
        raise ShapeError(
            f"linear_loss expects input (B, ..., D) and linear_weight (V, D), got {tuple(input.shape)} and "
            f"{tuple(linear_weight.shape)}."
        )
    for k, t in enumerate(rows):
        if t.dim() == 0 or t.shape[0] != input.shape[0]:
            raise ShapeError(
                f"linear_loss: rows {k} have shape {tuple(t.shape)}, and input {tuple(input.shape)}: one for each "
                f"of {input.shape[0]} is expected."
            )
        if t.requires_grad:
            raise FuseOpsError(
                f"linear_loss: rows {k} want a gradient and would get none: detach them, or make what they are "
                "of a part of `loss`."
            )
    check_integers("linear_loss", 1, chunk_bytes=chunk_bytes)
    given = {"weight": linear_weight} | ({} if linear_bias is None else {"bias": linear_bias})
    side = {**given, **{f"rows{k}": t for k, t in enumerate(rows)}}
    op = _LinearLoss(loss, tuple(given), len(rows), chunk_bytes)
    total = op(input, **side)
    others, op.loss, op.others = op.others, _no_loss, ()  # the op lives until a collector finds it
    return (total, *others) if others else total


def _no_loss(*_: Any) -> Any:
    raise FuseOpsError("linear_loss: this op has computed its loss.")


class _LinearLoss(Op[LinearLossSaved]):
    """A `_LinearLoss` is the op that one call of `linear_loss` makes and runs."""

    floats = True
    autocast = True
    stays_high = LOGITS_STAY_HIGH

    def __init__(self, loss: Loss, given: tuple[str, ...], count: int, chunk_bytes: int) -> None:
        super().__init__()
        self.loss, self.chunk_bytes = loss, chunk_bytes
        self.reads = (*given, *(f"rows{k}" for k in range(count)))
        fields = {"weight": ("dweight", "weight"), "bias": ("dbias", "bias")}
        self.saves_for = {"x": ("dx",), **{name: fields[name] for name in given}}
        self.others: tuple[Tensor, ...] = ()

    def out_shape(self, shape: Shape) -> Shape:
        return ()

    def fwd(self, x: Tensor, *, call: Call, **side: Tensor) -> Out:
        weight, bias = side["weight"], side.get("bias")
        check_operands(CALLED, x, weight, bias)
        rows = [side[name] for name in self.reads if name.startswith("rows")]
        cast = call.precision.cast
        w, b = cast(weight), cast(bias)
        for name, t in (("linear_weight", w), ("linear_bias", b)):
            if t is not None and t.dtype is not x.dtype:
                raise ShapeError(
                    f"linear_loss expects operands of one dtype, got {name} of {t.dtype} and input of {x.dtype}."
                )
        chunks: Any = self._chunks(x, weight)
        # under `reference()` autograd differentiates this forward
        if torch.is_grad_enabled() or not call.needs:
            parts = [self._of(F.linear(x[s], w, b), [t[s] for t in rows]) for s in chunks]  # type: ignore[arg-type]
            return Out(self._summed(parts), None)
        needs = [name in call.needs for name in ("x", "weight", "bias")]
        total, dx, dw, db = self._with_gradients(x, w, b, rows, needs, chunks)  # type: ignore[arg-type]
        return Out(total, LinearLossSaved(dx, dw, db, weight, bias))

    def _with_gradients(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: list[Tensor],
        needs: list[bool],
        chunks: Iterator[slice],
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """The loss, and dx, dweight and dbias, each if it is needed."""
        sums = K.accumulator(x.dtype)
        dx = torch.empty_like(x) if needs[0] else None
        dweight = torch.empty_like(weight, dtype=sums) if needs[1] else None
        dbias = torch.zeros(len(weight), dtype=sums, device=x.device) if needs[2] else None
        parts, depends = [], False
        for s in chunks:
            logits = F.linear(x[s], weight, bias).requires_grad_()
            with torch.enable_grad():
                # a leaf cannot be written to
                writable = torch_private.unsafe_view(logits, logits.shape)
                found = self._of(writable, [t[s] for t in rows])
                dlogits = _gradient(found[0], logits)
            depends = depends or dlogits is not None
            dlogits = torch.zeros_like(logits) if dlogits is None else dlogits
            parts.append(tuple(t.detach() for t in found))
            flat = dlogits.flatten(0, -2)
            del logits, writable, found
            if dx is not None:
                torch.matmul(dlogits, weight, out=dx[s])
            if dweight is not None:
                rows_of_x = x[s].flatten(0, -2)
                add_weight_grad(dweight, flat, rows_of_x, first=s.start == 0)
            if dbias is not None:
                dbias += flat.sum(0, dtype=sums)
        if not depends:
            raise FuseOpsError("linear_loss: what loss returned does not depend on the logits.")
        return self._summed(parts), dx, dweight, dbias

    def bwd(self, saved: LinearLossSaved, dy: Tensor, *, call: Call) -> Grads:
        dx, dweight, dbias, weight, bias = saved
        side: dict[str, Tensor | None] = {}
        for name, made, owner in (("weight", dweight, weight), ("bias", dbias, bias)):
            if name in call.needs:
                side[name] = K.scaled_to(made, dy, owner.dtype)  # type: ignore[arg-type, union-attr]
        return Grads(None if dx is None else K.scaled_to(dx, dy, dx.dtype), side=side)

    def _chunks(self, x: Tensor, weight: Tensor) -> Iterator[slice]:
        return row_chunks(
            len(x), math.prod(x.shape[1:-1]) * len(weight), x.itemsize, self.chunk_bytes
        )

    def _of(self, logits: Tensor, rows: list[Tensor]) -> tuple[Tensor, ...]:
        """(loss, *other returned tensors) of a chunk."""
        found = self.loss(logits, *rows)
        found = found if isinstance(found, tuple) else (found,)
        for t in found:
            if not isinstance(t, Tensor):
                raise FuseOpsError(
                    f"linear_loss: loss returned {type(t).__name__}, expected tensors."
                )
        if found[0].dim() or not found[0].is_floating_point():
            raise FuseOpsError(
                f"linear_loss: loss returned {found[0].dtype} of shape {tuple(found[0].shape)}, expected a number of "
                "a float dtype: the sum over its rows."
            )
        return found

    def _summed(self, parts: list[tuple[Tensor, ...]]) -> Tensor:
        total, *others = (
            functools.reduce(torch.add, values) for values in zip(*parts, strict=True)
        )
        self.others = tuple(t.detach() for t in others)
        return total if total.dtype is torch.float64 else total.float()


def _gradient(loss: Tensor, logits: Tensor) -> Tensor | None:
    """The gradient of a chunk's logits, None where its loss does not depend on them.

    Raises FuseOpsError where the loss depends on another tensor that requires a gradient.
    """
    if not loss.requires_grad:
        return None
    for leaf in torch_private.leaves_behind([loss]):
        if leaf is not logits:
            raise FuseOpsError(
                f"linear_loss: loss reads a tensor of shape {tuple(leaf.shape)} that wants a gradient, and would get "
                "none: only input, linear_weight and linear_bias do. Detach it."
            )
    return torch.autograd.grad(loss, logits, allow_unused=True)[0]
