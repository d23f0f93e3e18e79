"""Cross entropy of a linear layer's logits, which are never whole in memory: chunks of rows, one after the other.

Maths, of the logits l = f(x W^T + b) of a row with target t, where f caps and divides:
    raw -> soft_cap tanh(raw / soft_cap) (if soft_cap) -> / temperature
    lse = log sum exp l;  logp = l_t - lse;  expected = sum p l, p = exp(l - lse);  entropy = lse - expected
    loss = -(1 - smoothing) w_t logp + smoothing / V sum_c w_c (lse - l_c) + z_loss lse^2
and 0 for a target of `ignore_index`; NaN for one outside of the vocabulary (nothing is read on the host). w are the
class weights, 1 without. The gradient of the logits takes their place in the chunk, in their dtype; lse and p are taken
from the same logits, in float32. The weight's gradient is a float32 sum over the chunks, unrounded.
Shapes: x (N, D), weight (V, D), bias (V,), targets (N,) int64, class_weights (V,); row results (N,) float32, dx (N, D)
in the dtype of x, dweight (V, D) and dbias (V,) float32. What nobody needs is empty.
Cost: 2 N D V operations forward, 6 in `linear_cross_entropy_bwd` (it makes the logits again), 6 in
`linear_cross_entropy_grads`, which is forward and backward at once.
Hardware: sm_80 and later; the GEMMs are cuBLAS's, the sum of dweight is `grouped_wgrad_into`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fuseops.errors import FuseOpsError
from fuseops.kernels import reference
from fuseops.kernels.bias import bias_bwd
from fuseops.kernels.configs import Config, Space
from fuseops.kernels.grouped import grouped_wgrad_into
from fuseops.kernels.launch import device, launch
from fuseops.kernels.reference.cross_entropy import Loss, row_chunks
from fuseops.kernels.registry import kernel_op
from fuseops.kernels.tiles import cdiv, pow2, require

LINE = 64  # rows of logits begin at multiples of so many elements, as tensor descriptors want them


def _candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """Eight elements a thread: with more, registers spill on sm_120."""
    sizes = ((4096, 16), (2048, 8), (8192, 32))
    return [
        {"BLOCK": pow2(dims[-1], most=2 * block // itemsize, least=16), "num_warps": warps}
        for block, warps in sizes
    ]


SPACE = Space("cross_entropy", _candidates)


def _operands() -> Iterator[tuple[Any, ...]]:
    for dtype, vocab in ((torch.bfloat16, 128256), (torch.bfloat16, 50257), (torch.float16, 32000)):
        x = torch.empty(8192, 4096, dtype=dtype, device="meta")
        weight = torch.empty(vocab, 4096, dtype=dtype, device="meta")
        yield x, weight, None, torch.empty(8192, dtype=torch.int64, device="meta")


def _rows() -> Tensor:
    return torch.empty(8192, device="meta")


def _variants(vocab: int) -> Iterator[tuple[Tensor | None, list[float]]]:
    yield None, [0.0, 0.0, 0.0, 1.0]
    if vocab == 128256:
        yield torch.empty(vocab, device="meta"), [0.1, 1e-4, 30.0, 0.5]


def _cases_fwd() -> Iterator[tuple[Any, ...]]:
    for operands in _operands():
        for weights, options in _variants(len(operands[1])):
            yield *operands, weights, options, -100, 1 << 29


def _cases_bwd() -> Iterator[tuple[Any, ...]]:
    for operands in _operands():
        for weights, options in _variants(len(operands[1])):
            grads = [_rows()] * (1 if weights is None else 4)
            yield *operands, weights, _rows(), _rows(), grads, options, -100, 1 << 29, [True] * 3


def _cases_grads() -> Iterator[tuple[Any, ...]]:
    for operands in _operands():
        for weights, options in _variants(len(operands[1])):
            yield *operands, weights, _rows(), options, -100, 1 << 29, [True] * 3


def _flops(products: int) -> Any:
    """2 N D V operations for each of so many products."""

    def formula(x: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
        return 2 * products * x[0] * x[1] * weight[0]

    return formula


@kernel_op(twin=reference.linear_cross_entropy_fwd, flops=_flops(1), cases=_cases_fwd)
def linear_cross_entropy_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weights: Tensor | None,
    options: Sequence[float],
    ignore_index: int,
    chunk_bytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, lse, logp, expected) of each row.

    options: label smoothing, z_loss, soft cap (0: none), temperature.
    """
    _check(x, weight, bias, targets, class_weights)
    rows = _row_results(x)
    total = _total(class_weights, x)
    for s, logits in _logits(x, weight, bias, chunk_bytes):
        _launch(
            logits,
            targets[s],
            class_weights,
            total,
            [r[s] for r in rows],
            [],
            options,
            ignore_index,
        )
    return rows[0], rows[1], rows[2], rows[3]


@kernel_op(
    twin=reference.linear_cross_entropy_bwd,
    flops=_flops(3),
    cases=_cases_bwd,
    mutates=("main_grad",),
)
def linear_cross_entropy_bwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weights: Tensor | None,
    lse: Tensor,
    expected: Tensor,
    grads: Sequence[Tensor],
    options: Sequence[float],
    ignore_index: int,
    chunk_bytes: int,
    needs: Sequence[bool],
    main_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias), each if it is among `needs`.

    grads: the gradients of the rows' loss, or of loss, lse, logp and expected.
    main_grad: float32 (V, D), to which the weight's gradient is added; dweight is empty then.
    """
    _check(x, weight, bias, targets, class_weights)
    require(len(grads) in (1, 4), f"got {len(grads)} gradients, expected that of loss or all four.")
    grads = [g.to(lse.dtype).contiguous() for g in grads]
    sums = _Sums(x, weight, needs, main_grad)
    total = _total(class_weights, x)
    for s, logits in _logits(x, weight, bias, chunk_bytes):
        rows = [lse[s], lse[s], lse[s], expected[s]]  # loss and logp are not written
        given = [g[s] for g in grads]
        _launch(
            logits,
            targets[s],
            class_weights,
            total,
            rows,
            given,
            options,
            ignore_index,
            statistics=False,
        )
        sums.add(s, logits)
    return sums.results(main_grad is None)


@kernel_op(twin=reference.linear_cross_entropy_grads, flops=_flops(3), cases=_cases_grads)
def linear_cross_entropy_grads(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weights: Tensor | None,
    dloss: Tensor,
    options: Sequence[float],
    ignore_index: int,
    chunk_bytes: int,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, dx, dweight, dbias), where the gradient of each row's loss, `dloss`, is known beforehand."""
    _check(x, weight, bias, targets, class_weights)
    rows, dloss = _row_results(x), dloss.float().contiguous()
    sums = _Sums(x, weight, needs, None)
    total = _total(class_weights, x)
    for s, logits in _logits(x, weight, bias, chunk_bytes):
        mine = [r[s] for r in rows]
        _launch(logits, targets[s], class_weights, total, mine, [dloss[s]], options, ignore_index)
        sums.add(s, logits)
    return rows[0], *sums.results(True)


class _Sums:
    """The gradients, while chunk after chunk is added to them."""

    def __init__(
        self, x: Tensor, weight: Tensor, needs: Sequence[bool], main_grad: Tensor | None
    ) -> None:
        self.x, self.weight, self.needs = x, weight, needs
        self.dx = torch.empty(x.shape if needs[0] else (0,), dtype=x.dtype, device=x.device)
        shape = (1, *weight.shape) if needs[1] else (0,)
        self.adds = main_grad is not None
        self.dweight = (
            torch.empty(shape, dtype=torch.float32, device=x.device)
            if main_grad is None
            else main_grad[None]
        )
        self.dbias = torch.zeros(len(weight) if needs[2] else 0, device=x.device)

    def add(self, s: slice, dlogits: Tensor) -> None:
        if self.needs[0]:
            torch.mm(dlogits, self.weight, out=self.dx[s])
        if self.needs[1]:
            ends = torch.full((1,), len(dlogits), dtype=torch.int32, device=dlogits.device)
            grouped_wgrad_into(self.dweight, dlogits, self.x[s], ends, None, self.adds)
            self.adds = True
        if self.needs[2]:
            self.dbias += bias_bwd(dlogits)

    def results(self, own: bool) -> tuple[Tensor, Tensor, Tensor]:
        """own: whether dweight is a result, not a buffer of the caller."""
        dweight = self.dweight.view(self.weight.shape) if own and self.needs[1] else self.dbias[:0]
        return self.dx, dweight, self.dbias


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, class_weights: Tensor | None
) -> None:
    n, d = x.shape
    vocab = len(weight)
    require(
        weight.shape == (vocab, d) and x.dtype == weight.dtype,
        f"x is {x.dtype} of shape {tuple(x.shape)} and weight {weight.dtype} of shape {tuple(weight.shape)}, "
        "expected (N, D) and (V, D) of one dtype.",
    )
    require(
        targets.shape == (n,) and targets.dtype == torch.int64,
        f"targets are {targets.dtype} of shape {tuple(targets.shape)}, expected int64 of shape ({n},).",
    )
    for name, t in (("bias", bias), ("class_weights", class_weights)):
        if t is not None and t.shape != (vocab,):
            raise FuseOpsError(f"{name} has shape {tuple(t.shape)}, expected ({vocab},).")


def _row_results(x: Tensor) -> list[Tensor]:
    return [torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(4)]


def _total(class_weights: Tensor | None, x: Tensor) -> Tensor:
    """The sum of the class weights, which stays on the device; any tensor where there are none."""
    return x if class_weights is None else class_weights.sum(dtype=torch.float32).view(1)


def _logits(
    x: Tensor, weight: Tensor, bias: Tensor | None, chunk_bytes: int
) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their logits as the GEMM stores them), chunk after chunk in one buffer."""
    vocab = len(weight)
    line = cdiv(vocab, LINE) * LINE
    buffer = x.new_empty(0)
    for s in row_chunks(len(x), line, x.itemsize, chunk_bytes):
        rows = s.stop - s.start
        if not buffer.numel():
            buffer = x.new_empty(rows, line)
        logits = buffer[:rows, :vocab]
        if bias is None:
            torch.mm(x[s], weight.t(), out=logits)
        else:
            torch.addmm(bias.to(x.dtype), x[s], weight.t(), out=logits)
        yield s, logits


def _launch(
    logits: Tensor,
    targets: Tensor,
    class_weights: Tensor | None,
    total: Tensor,
    rows: Sequence[Tensor],
    grads: Sequence[Tensor],
    options: Sequence[float],
    ignore_index: int,
    statistics: bool = True,
) -> None:
    """rows: loss, lse, logp and expected, written or (with `statistics` False) read."""
    loss, vocab = Loss(*options), logits.shape[1]
    loss_rows, lse, logp, expected = rows
    dloss, dlse, dlogp, dexpected = [*grads, *(lse,) * (4 - len(grads))]
    weights = lse if class_weights is None else class_weights.contiguous()
    launch(
        device("cross_entropy").cross_entropy_kernel, (len(logits),),
        logits, targets.contiguous(), weights, total,
        loss_rows, lse, logp, expected, dloss, dlse, dlogp, dexpected,
        vocab, logits.stride(0), ignore_index, *map(float, loss),
        WEIGHTED=class_weights is not None, SMOOTHED=loss.smoothing != 0, CAPPED=loss.soft_cap != 0,
        STATISTICS=statistics, GRADIENT=bool(grads), OTHERS=len(grads) > 1,
        **SPACE.pick(len(logits), (vocab,), logits),
    )  # fmt: skip
