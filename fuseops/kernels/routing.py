"""`route` sorts copies of tokens by expert: the rows of each expert, their ends, and the row of every copy of a token.

Maths: a stable counting sort. The row of copy i = (t, k) is the number of copies of lower experts,
plus the number of copies of its own expert before it. Integers only and no atomics on results, so
it repeats bit for bit.
Shapes: experts (T, K) int, weights (T, K) or None -> offs (E,) int32 row ends, index (R,) int64
token of each row, pos (T, K) int32 row of each copy, probs (R,) float32; R = T * K.
Layout: an expert outside 0 to E-1 takes no copy: pos is -1, and as many rows behind offs[-1] are
padding with index 0 and probs 0.
Launches: one up to ONE_LAUNCH copies (every program counts them all), three beyond (count, scan,
place).
Hardware: sm_80 and later. More than MAX_EXPERTS experts run the twin.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.kernels.configs import Config, Space
from fuseops.kernels.launch import device, launch, pdl_chain
from fuseops.kernels.registry import Cases, floats, kernel_op, on_meta
from fuseops.kernels.tiles import cdiv, check_shape, pointers, pow2, require, upcast


def _route(
    experts: Tensor, num_experts: int, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    flat = experts.flatten().long()  # E itself may be more than their dtype holds
    kept = (flat >= 0) & (flat < num_experts)
    flat = torch.where(kept, flat, num_experts)
    order = torch.argsort(flat, stable=True)
    edges = torch.arange(num_experts, device=flat.device, dtype=flat.dtype)
    offs = torch.searchsorted(flat[order], edges, right=True).to(torch.int32)
    row = torch.arange(flat.shape[0], device=flat.device)
    used = row < offs[-1]
    pos = torch.where(kept, torch.empty_like(order).index_put((order,), row), -1)
    index = torch.where(used, order // experts.shape[1], 0)
    if weights is None:
        probs = torch.empty(0, dtype=torch.float32, device=flat.device)
    else:
        probs = torch.where(used, upcast(weights.flatten())[order], 0.0)
    return offs, index, pos.to(torch.int32).view(experts.shape), probs


def _expert_counts(experts: Tensor, num_experts: int) -> Tensor:
    every = torch.arange(num_experts, device=experts.device)
    return (experts.flatten()[:, None] == every).sum(0).to(torch.int32)


MAX_EXPERTS = 1 << 11
ONE_LAUNCH = 1 << 12
SCAN = 1 << 10
"""Chunks that are scanned at once."""

CHUNKS = {"BLOCK_S": 256, "num_warps": 1}, {"BLOCK_S": 512, "num_warps": 4}
"""BLOCK_S: the copies of a chunk."""


def _default(rows: int, dims: tuple[int, ...], itemsize: int) -> Config:
    """Larger chunks, whose copies of an expert are stored side by side, where there are many."""
    return CHUNKS[rows > 1 << 17]


ROUTE = Space("route", CHUNKS, _default, dims=("experts",))


def _cases() -> Cases:
    for tokens, k, num_experts, dtype in (
        (1024, 8, 128, torch.int32),
        (32768, 8, 128, torch.int32),
        (32768, 8, 256, torch.int32),
        (8192, 2, 8, torch.int32),
        (8192, 4, 64, torch.int64),
    ):
        experts = on_meta(tokens, k, dtype=dtype)
        yield experts, num_experts, floats(tokens, k)
    yield experts, num_experts


@kernel_op(twin=_route, cases=_cases)
def route(
    experts: Tensor, num_experts: int, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(offs (E,), index (R,), pos (T, K), probs (R,) or empty), rows in order of expert, then
    token.
    """
    require(
        experts.dim() == 2 and experts.shape[1] > 0,
        f"experts is {tuple(experts.shape)}, expected (T, K).",
    )
    require(num_experts > 0, f"num_experts is {num_experts}, expected at least 1.")
    require(experts.numel() < 1 << 30, f"{experts.numel()} copies, expected fewer than 2^30.")
    check_shape("weights", weights, experts.shape)
    if num_experts > MAX_EXPERTS:
        return _route(experts, num_experts, weights)
    experts, rows, k = experts.contiguous(), experts.numel(), experts.shape[1]
    where = experts.device
    offs = torch.empty(num_experts, dtype=torch.int32, device=where)
    index = torch.empty(rows, dtype=torch.int64, device=where)
    pos = torch.empty(experts.shape, dtype=torch.int32, device=where)
    probs = torch.empty(0 if weights is None else rows, dtype=torch.float32, device=where)
    config = ROUTE.pick(rows, (num_experts,), experts)
    chunks, block_e = _chunks(rows, config), pow2(num_experts, least=16)
    counted, counts, total = rows > ONE_LAUNCH, offs, offs
    (leads, follows), kernels = pdl_chain(where), device("routing")
    if counted:
        counts, total = _count(experts, num_experts, config, **leads), torch.empty_like(offs)
        launch(
            kernels.scan_kernel, (num_experts,), counts, total, chunks, **follows,
            BLOCK_P=pow2(chunks, most=SCAN), num_warps=4,
        )  # fmt: skip
    launch(
        kernels.route_kernel, (chunks,),
        experts, *pointers(offs, weights), counts, total, offs, index, pos,
        probs, rows, num_experts, chunks, K=k, COUNTED=counted, WEIGHTED=weights is not None,
        **(follows if counted else {"PDL": False}), BLOCK_E=block_e, **config,
    )  # fmt: skip
    return offs, index, pos, probs


@kernel_op(twin=_expert_counts, cases=lambda: ((e, n) for e, n, *_ in _cases()))
def expert_counts(experts: Tensor, num_experts: int) -> Tensor:
    """counts (E,) int32: the copies of each expert; copies without one are not counted."""
    if num_experts > MAX_EXPERTS:
        return _expert_counts(experts, num_experts)
    experts = experts.contiguous()
    config = ROUTE.pick(experts.numel(), (num_experts,), experts)
    counts = _count(experts, num_experts, config, PDL=False)
    return counts.sum(1, dtype=torch.int32)


def count_once(total: Tensor, experts: Tensor) -> None:
    """Add the copies of each expert to total (E,), except where a checkpoint runs its function again."""
    if torch.compiler.is_compiling():
        torch.ops.fuseops.count_once(total, experts)
    else:
        _count_once(total, experts)


def _count_once(total: Tensor, experts: Tensor) -> None:
    if not torch_private.in_recomputation():
        total += expert_counts(experts, len(total))


# A compiled graph calls the op, since only a call can tell a forward from its recomputation. A CUDA graph cannot.
torch.library.custom_op(
    "fuseops::count_once", _count_once, mutates_args=("total",), tags=(torch.Tag.cudagraph_unsafe,)
)


def _chunks(rows: int, config: Config) -> int:
    """The number of chunks, at least one, whose program writes offs."""
    return max(cdiv(rows, config["BLOCK_S"]), 1)


def _count(experts: Tensor, num_experts: int, config: Config, **options: Any) -> Tensor:
    """counts (E, chunks) int32 of each chunk of copies."""
    rows = experts.numel()
    chunks, block_e = _chunks(rows, config), pow2(num_experts, least=16)
    counts = torch.empty(num_experts, chunks, dtype=torch.int32, device=experts.device)
    launch(
        device("routing").count_kernel, (chunks,), experts, counts, rows, num_experts, chunks,
        **options, BLOCK_S=config["BLOCK_S"], BLOCK_E=block_e, num_warps=config["num_warps"],
    )  # fmt: skip
    return counts
