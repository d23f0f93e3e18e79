"""Grouped GEMMs as a loop over groups (it reads `offs`). Accumulation is torch's."""

import torch
from torch import Tensor

from .activation import act_fwd, scaled_act_bwd, scaled_act_fwd
from .precision import wide


def group_of_row(offs: Tensor, rows: int) -> Tensor:
    """Group index of every row; padding rows (at or beyond offs[-1]) get E.   -> (R,) int64"""
    row = torch.arange(rows, device=offs.device, dtype=offs.dtype)
    return torch.searchsorted(offs.contiguous(), row, right=True)


def padding_mask(offs: Tensor, rows: int) -> Tensor:
    """True for rows at or beyond offs[-1].   -> (R, 1) bool"""
    row = torch.arange(rows, device=offs.device, dtype=offs.dtype)
    return (row >= offs[-1]).unsqueeze(-1)


def _bounds(offs: Tensor) -> list[tuple[int, int]]:
    ends = [int(end) for end in offs.tolist()]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _gathered(x: Tensor, index: Tensor | None, offs: Tensor) -> Tensor:
    """Rows of x by index, those of padding left out."""
    return x if index is None else x[index[: int(offs[-1])]]


def _scaled(bias: Tensor, probs: Tensor | None, start: int, end: int) -> Tensor:
    """A bias times the probabilities of so many rows."""
    return wide(bias) if probs is None else wide(bias) * wide(probs[start:end, None])


def group_tiles(offs: Tensor, rows: int) -> Tensor:
    """See `fuseops.kernels.grouped.group_tiles`."""
    sizes = offs.diff(prepend=offs.new_zeros(1))
    table = [sizes.sort(descending=True, stable=True).indices]
    counts = []
    for block in (64, 128, 256):
        entries = [
            group | mine << 11
            for group, size in enumerate(sizes.tolist())
            for mine in range(-(-size // block))
        ]
        unused = [0] * (rows // block + len(offs) - len(entries))
        table.append(offs.new_tensor(entries + unused))
        counts.append(len(entries))
    head, last = offs.new_tensor(counts).split([2, 1])
    return torch.cat([head, *table, last]).to(torch.int32)


def grouped_mm(
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    tiles: Tensor | None = None,
    bias: Tensor | None = None,
    index: Tensor | None = None,
    probs: Tensor | None = None,
) -> Tensor:
    """x[rows of e] @ weight[e].T (+ bias[e] (* probs)), padding rows zero.   (R, K), (E, N, K), (E,) -> (R, N)"""
    bounds, rows = _bounds(offs), len(x if index is None else index)
    x = _gathered(x, index, offs)
    if bias is None:
        parts = [x[start:end] @ weight[e].t() for e, (start, end) in enumerate(bounds)]
    else:
        parts = [
            (wide(x[start:end]) @ wide(weight[e]).t() + _scaled(bias[e], probs, start, end)).to(
                x.dtype
            )
            for e, (start, end) in enumerate(bounds)
        ]
    padding = x.new_zeros(rows - bounds[-1][1], weight.shape[1])
    return torch.cat([*parts, padding])


def grouped_mm_into(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    tiles: Tensor | None = None,
    bias: Tensor | None = None,
    index: Tensor | None = None,
    probs: Tensor | None = None,
) -> None:
    """The grouped product, written to y."""
    y.copy_(grouped_mm(x, weight, offs, None, bias, index, probs))


def grouped_swiglu(
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    tiles: Tensor | None = None,
    probs: Tensor | None = None,
    index: Tensor | None = None,
    need_h: bool = True,
    bias: Tensor | None = None,
    kind: str = "swiglu",
    interleave: int = 0,
    alpha: float = 1.702,
    limit: float = 7.0,
    offset: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """grouped_mm, and its activation times probs.   (R, D), (E, 2F, D), (E,), (R,) -> (R, 2F), (R, F)"""
    form = kind, interleave, alpha, limit, offset
    h = grouped_mm(x, weight, offs, None, bias, index)
    kept = h if need_h else h[:0]
    if probs is None:
        return kept, act_fwd(h, *form)
    padding = padding_mask(offs, h.shape[0])[:, 0]
    return kept, scaled_act_fwd(h, probs.masked_fill(padding, 0.0), *form)


def grouped_dswiglu(
    dy: Tensor,
    weight: Tensor,
    h: Tensor,
    offs: Tensor,
    tiles: Tensor | None = None,
    probs: Tensor | None = None,
    index: Tensor | None = None,
    kind: str = "swiglu",
) -> tuple[Tensor, Tensor, Tensor]:
    """(dh, a, dprobs) of a = act(h) * probs for da = grouped_mm(dy, weight)."""
    da = grouped_mm(dy, weight, offs, None, None, index)
    padding = padding_mask(offs, h.shape[0])
    scale = wide(da).new_ones(h.shape[0]) if probs is None else probs
    scale, h = scale.masked_fill(padding[:, 0], 0.0), h.masked_fill(padding, 0.0)
    dh, dprobs, a = scaled_act_bwd(da, h, scale, kind, probs is not None, True)
    return dh, a, dprobs


def grouped_dswiglu_into(
    h: Tensor,
    dy: Tensor,
    weight: Tensor,
    offs: Tensor,
    tiles: Tensor | None = None,
    probs: Tensor | None = None,
    index: Tensor | None = None,
    kind: str = "swiglu",
) -> tuple[Tensor, Tensor]:
    """(a, dprobs) of grouped_dswiglu, whose dh is written over h."""
    dh, a, dprobs = grouped_dswiglu(dy, weight, h, offs, None, probs, index, kind)
    h.copy_(dh)
    return a, dprobs


def grouped_wgrad(
    dy: Tensor,
    x: Tensor,
    offs: Tensor,
    tiles: Tensor | None = None,
    dy_index: Tensor | None = None,
    x_index: Tensor | None = None,
) -> Tensor:
    """dw[e] = dy[rows of e].T @ x[rows of e], zeros for an empty group.   (R, N), (R, K), (E,) -> (E, N, K)"""
    dy, x = _gathered(dy, dy_index, offs), _gathered(x, x_index, offs)
    return torch.stack([dy[start:end].t() @ x[start:end] for start, end in _bounds(offs)])


def grouped_wgrad_into(
    main_grad: Tensor,
    dy: Tensor,
    x: Tensor,
    offs: Tensor,
    tiles: Tensor | None = None,
    accumulate: bool = True,
    dy_index: Tensor | None = None,
    x_index: Tensor | None = None,
) -> None:
    """main_grad (+)= grouped_wgrad, unrounded."""
    wide_dy, wide_x = dy.to(main_grad.dtype), x.to(main_grad.dtype)
    dw = grouped_wgrad(wide_dy, wide_x, offs, None, dy_index, x_index)
    if accumulate:
        main_grad += dw
    else:
        main_grad.copy_(dw)
