"""The losses of a router, and their gradient.

Maths (float32), with s the scores, softmax(logits) or sigmoid(logits), p_t = s_t / sum(s_t), f_e the
share of the T * K copies that expert e gets, and lse the logarithm of the sum of exp:
    loss = balance * E * sum over e of f_e * mean over t of p_te  +  z * mean over t of lse(logits_t)^2
f has no gradient.
Shapes: logits (T, E), counts (E,) int32 copies of each expert, or None without a balance loss, loss ()
float32; dlogits (T, E) float32.
Launches: two forward (partial sums, their sum in a fixed order), one backward, which adds to dlogits.
Layout: rows of logits may be strided.
Hardware: sm_80 and later. More than MAX_EXPERTS experts, and other dtypes than float32, run the twin.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fuseops.kernels import tiles
from fuseops.kernels.configs import Config, Space
from fuseops.kernels.launch import device, launch, pdl_chain
from fuseops.kernels.registry import Cases, floats, ints, kernel_op
from fuseops.kernels.router import MAX_EXPERTS, SCORES, TINY, scores_of
from fuseops.kernels.tiles import (
    as_rows,
    cdiv,
    check_shape,
    check_spec,
    pointers,
    pow2,
    require,
    upcast,
)


def _router_loss(
    logits: Tensor,
    counts: Tensor | None,
    k: int,
    score: str = "softmax",
    balance: float = 0.0,
    z: float = 0.0,
) -> Tensor:
    tokens, experts = max(logits.shape[0], 1), logits.shape[1]
    loss = z * upcast(logits).logsumexp(-1).square().sum() / tokens
    if counts is not None:
        mean = _shares(logits, score).sum(0) / tokens
        loss = loss + balance * experts * (counts.to(mean.dtype) / (tokens * k) * mean).sum()
    return loss


def _router_loss_bwd(
    dlogits: Tensor,
    logits: Tensor,
    counts: Tensor | None,
    dloss: Tensor,
    k: int,
    score: str = "softmax",
    balance: float = 0.0,
    z: float = 0.0,
) -> Tensor:
    tokens, experts, full = max(logits.shape[0], 1), logits.shape[1], upcast(logits)
    grad = 2 * z / tokens * full.logsumexp(-1, keepdim=True) * full.softmax(-1)
    if counts is not None:
        shares, scores = _shares(logits, score), scores_of(logits, score)
        dshares = balance * experts / (tokens * k * tokens) * counts.to(full.dtype)
        balance_grad = shares * (dshares - (dshares * shares).sum(-1, keepdim=True))
        grad = grad + (balance_grad if score == "softmax" else balance_grad * (1 - scores))
    return dlogits + dloss.to(dlogits.dtype) * grad.to(dlogits.dtype)


def _shares(logits: Tensor, score: str) -> Tensor:
    """Scores that sum to one."""
    scores = scores_of(logits, score)
    return scores if score == "softmax" else scores / (scores.sum(-1, keepdim=True) + TINY)


def _tiles(total: int, dims: tuple[int, ...], **more: int) -> list[Config]:
    e = pow2(dims[0])
    warps = 4 if e <= 1024 else 8
    return [{"BLOCK_R": max(total // e, 1), "num_warps": warps, **more}]


FWD = Space("router_loss", lambda dims, itemsize: _tiles(1024, dims, PER_SM=4), dims=("experts",))
BWD = Space("router_loss_bwd", lambda dims, itemsize: _tiles(2048, dims), dims=("experts",))


def _cases(*, backward: bool) -> Cases:
    for experts, score, balance, z in (
        (128, "softmax", 0.1, 0.1),
        (256, "sigmoid", 0.1, 0.0),
        (8, "softmax", 0.0, 0.1),
    ):
        logits = floats(8192, experts)
        counts = ints(experts) if balance else None
        if backward:
            yield logits, logits, counts, logits.new_empty(()), 8, score, balance, z
        else:
            yield logits, counts, 8, score, balance, z


@kernel_op(twin=_router_loss, cases=lambda: _cases(backward=False))
def router_loss(
    logits: Tensor, counts: Tensor | None, k: int, score: str = "softmax",
    balance: float = 0.0, z: float = 0.0,
) -> Tensor:  # fmt: skip
    """The loss, ().   k: copies of a token"""
    _check(logits, counts, score)
    tokens, experts = logits.shape
    if experts > MAX_EXPERTS or logits.dtype is not torch.float32:
        return _router_loss(logits, counts, k, score, balance, z)
    logits = as_rows(logits)
    config = dict(FWD.pick(tokens, (experts,), logits))
    programs, rows_each = tiles.row_splits(tokens, config, logits)
    partial, loss = logits.new_empty(programs, experts + 1), logits.new_empty(())
    leads, follows = pdl_chain(logits.device)
    kernels, block_e = device("router_losses"), pow2(experts)
    launch(
        kernels.router_loss_kernel, (programs,), logits, partial, tokens, experts, rows_each,
        logits.stride(0), SOFTMAX=score == "softmax", **leads, BLOCK_E=block_e, **config,
    )  # fmt: skip
    launch(
        kernels.sum_loss_kernel, (1,), partial, *pointers(logits, counts), loss,
        programs, experts, *_loss_factors(tokens, experts, k, balance, z), BALANCED=counts is not None,
        **follows, BLOCK_P=max(4096 // block_e, 1), BLOCK_E=block_e, num_warps=8,
    )  # fmt: skip
    return loss


@kernel_op(twin=_router_loss_bwd, cases=lambda: _cases(backward=True))
def router_loss_bwd(
    dlogits: Tensor, logits: Tensor, counts: Tensor | None, dloss: Tensor, k: int,
    score: str = "softmax", balance: float = 0.0, z: float = 0.0,
) -> Tensor:  # fmt: skip
    """dlogits, plus the gradient of the logits from that of the loss, ()."""
    _check(logits, counts, score)
    check_shape("dlogits", dlogits, logits.shape)
    tokens, experts = logits.shape
    wide = logits.dtype is not torch.float32 or dlogits.dtype is not torch.float32
    if experts > MAX_EXPERTS or wide:
        return _router_loss_bwd(dlogits, logits, counts, dloss, k, score, balance, z)
    logits, dlogits = as_rows(logits), dlogits.contiguous()
    y = torch.empty_like(dlogits)
    config = BWD.pick(tokens, (experts,), logits)
    launch(
        device("router_losses").router_loss_bwd_kernel, (cdiv(tokens, config["BLOCK_R"]),),
        dlogits, logits, *pointers(logits, counts), dloss, y, tokens, experts,
        logits.stride(0), *_loss_factors(tokens, experts, k, balance, z), SOFTMAX=score == "softmax",
        BALANCED=counts is not None, BLOCK_E=pow2(experts), **config,
    )  # fmt: skip
    return y


def _loss_factors(
    tokens: int, experts: int, k: int, balance: float, z: float
) -> tuple[float, float]:
    """The factors of counts times sums of shares, and of sums of lse^2, in the loss."""
    tokens = max(tokens, 1)
    return balance * experts / (tokens * k * tokens), z / tokens


def _check(logits: Tensor, counts: Tensor | None, score: str) -> None:
    check_spec({"logits": logits}, "logits (T, E)")
    require(score in SCORES, f"unknown score '{score}'. Known: {', '.join(SCORES)}.")
    check_shape("counts", counts, logits.shape[1:])
