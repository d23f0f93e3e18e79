"""Kernels send tokens into the memory of other GPUs of a host, and sums back, by direct stores.

Every rank of W has a buffer that the others can write to: two halves, used in turn, each with space for `capacity`
tokens from every rank, the ids and weights of their K experts, and how many there are.

    send_tokens   x (T, N) -> row rank * capacity + slots[t, to] of the buffers that it goes to
    take_tokens   this rank's buffer -> (W capacity, N) memory of its own, zeros in unused rows
    return_sums   x (W capacity, N) -> row rank * capacity + slot of the buffer where the token came from
    add_sums      this rank's buffer -> y (T, N), the sums of each token in the order of ranks, in float32

Nothing here waits: between the first and the second of a pair, and of the other pair, all ranks pass a barrier.
Shapes: slots (T, W) int32, experts (T, K) int, weights (T, K) float32.
Hardware: sm_80 and later, peers over NVLink or PCIe.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops.kernels.configs import Config, Space
from fuseops.kernels.launch import INTERPRET, device, launch
from fuseops.kernels.registry import Cases, floats, ints, kernel_op, on_meta
from fuseops.kernels.tiles import as_rows, cdiv, check_spec, pointers, pow2, upcast


class PeerUse(NamedTuple):
    """A `PeerUse` is one use of the buffers by a rank: where they are, and where what lies in the half in use.

    table  (W,) int64: addresses of the buffers
    uses   (1,) int64: how often they were used; on the device, so that a captured graph goes on counting
    flag   (1,) int32: set where a rank receives more tokens or rows than its capacity; sums are NaN from then on
    half   bytes of a half; in it the ids, weights and counts begin at `ids_at`, `weights_at` and `counts_at`
    """

    table: Tensor
    uses: Tensor
    flag: Tensor
    rank: int
    capacity: int
    num_experts: int
    k: int
    half: int
    ids_at: int
    weights_at: int
    counts_at: int

    @property
    def world(self) -> int:
        """W, the number of ranks."""
        return len(self.table)


def _token_slots(experts: Tensor, num_experts: int, world: int) -> tuple[Tensor, Tensor]:
    expert_ranks = experts.div(num_experts // world, rounding_mode="floor")
    ranks = torch.arange(world, device=experts.device, dtype=expert_ranks.dtype)
    is_sent = (expert_ranks[:, :, None] == ranks).any(1)
    slots = torch.where(is_sent, is_sent.cumsum(0) - 1, -1)
    return slots.to(torch.int32), is_sent.sum(0).to(torch.int32)


def _send_tokens(
    x: Tensor,
    slots: Tensor,
    use: PeerUse,
    counts: Tensor | None = None,
    experts: Tensor | None = None,
    weights: Tensor | None = None,
) -> None:
    local = use.num_experts // use.world
    for dst_rank in range(use.world):
        buffer = _PeerBuffer(use, dst_rank, x, weights)
        sent = (slots[:, dst_rank] >= 0) & (slots[:, dst_rank] < use.capacity)
        rows = slots[sent, dst_rank].long() + use.rank * use.capacity
        buffer.rows[rows] = x[sent]
        if experts is None or weights is None or counts is None:
            continue
        expert_ids = experts[sent].to(torch.int32) - dst_rank * local
        buffer.ids[rows] = torch.where((expert_ids >= 0) & (expert_ids < local), expert_ids, -1)
        buffer.weights[rows] = weights[sent]
        buffer.counts[use.rank] = counts[dst_rank].clamp(max=use.capacity)
        use.flag.logical_or_(counts[dst_rank] > use.capacity)


def _take_tokens(
    like: Tensor, use: PeerUse, arrivals: Tensor | None = None, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    buffer = _PeerBuffer(use, use.rank, like, weights)
    metadata = arrivals is None
    counts = buffer.counts.clone() if arrivals is None else arrivals
    filled = (torch.arange(use.capacity)[None, :] < counts[:, None]).flatten()[:, None]
    x = torch.where(filled, buffer.rows, 0)
    if not metadata or weights is None:
        return x, counts.new_empty(0), like.new_empty(0), counts.new_empty(0)
    return x, torch.where(filled, buffer.ids, -1), torch.where(filled, buffer.weights, 0), counts


def _return_sums(x: Tensor, use: PeerUse, arrivals: Tensor, dweights: Tensor | None = None) -> None:
    for dst_rank in range(use.world):
        buffer = _PeerBuffer(use, dst_rank, x, dweights)
        count = int(arrivals[dst_rank])
        local_rows = slice(dst_rank * use.capacity, dst_rank * use.capacity + count)
        remote_rows = slice(use.rank * use.capacity, use.rank * use.capacity + count)
        buffer.rows[remote_rows] = torch.where(use.flag != 0, torch.nan, x[local_rows])
        if dweights is not None:
            buffer.weights[remote_rows] = dweights[local_rows]


def _add_sums(
    like: Tensor,
    slots: Tensor,
    use: PeerUse,
    experts: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    world, capacity, buffer = use.world, use.capacity, _PeerBuffer(use, use.rank, like, weights)
    total = upcast(like.new_zeros(len(slots), like.shape[1]))
    has_slot = (slots >= 0) & (slots < capacity)
    rows = torch.where(has_slot, slots, 0) + capacity * torch.arange(world, dtype=torch.int32)
    for src_rank in range(world):
        total += torch.where(
            has_slot[:, src_rank, None], upcast(buffer.rows[rows[:, src_rank].long()]), 0
        )
    total = torch.where(use.flag != 0, torch.nan, total).to(like.dtype)
    if experts is None or weights is None:
        return total, like.new_empty(0)
    local = use.num_experts // world
    expert_ranks = experts.div(local, rounding_mode="floor").clamp(min=0).long()
    copy_exists = has_slot.gather(1, expert_ranks) & (experts >= 0)
    copies = buffer.weights[rows.gather(1, expert_ranks).long(), torch.arange(experts.shape[1])]
    return total, torch.where(copy_exists, copies, 0)


def _bound_rows(offs: Tensor, flag: Tensor, rows: int) -> None:
    flag |= (offs[-1] > rows).to(flag.dtype)
    offs.clamp_(max=rows)


class _PeerBuffer:
    """A `_PeerBuffer` is the half in use of a rank's buffer, as tensors over its memory."""

    def __init__(self, use: PeerUse, rank: int, x: Tensor, weights: Tensor | None) -> None:
        address = int(use.table[rank]) + (int(use.uses) & 1) * use.half
        rows = use.world * use.capacity
        self.rows = _at(address, (rows, x.shape[1]), x.dtype)
        self.ids = _at(address + use.ids_at, (rows, use.k), torch.int32)
        self.counts = _at(address + use.counts_at, (use.world,), torch.int32)
        dtype = torch.float32 if weights is None else weights.dtype
        self.weights = _at(address + use.weights_at, (rows, use.k), dtype)


def _at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


WORLD = 4  # of the ahead-of-time table: W is compiled into two of the kernels


def _candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """At most 16 elements a thread."""
    n = pow2(dims[-1], most=1024 if itemsize == 4 else 2048)
    return [
        {"BLOCK_R": max(total // n, 1), "BLOCK_N": n, "num_warps": warps}
        for total, warps in ((2048, 4), (4096, 8))
    ]


PEERS = Space("peers", _candidates)


def layout(world: int, capacity: int, k: int, row: int, weight: int) -> tuple[int, int, int, int]:
    """Where ids, weights and counts begin in a half, and its bytes.   row, weight: bytes of a row, and of a weight"""
    ids_at = _aligned(world * capacity * row)
    weights_at = ids_at + _aligned(4 * world * capacity * k)
    counts_at = weights_at + _aligned(weight * world * capacity * k)
    return ids_at, weights_at, counts_at, counts_at + _aligned(4 * world)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 128) * 128


def _cases(what: str) -> Cases:
    table, uses = (on_meta(n, dtype=torch.int64) for n in (WORLD, 1))
    flag = ints(1)
    tokens, capacity, experts, k = 8192, 8192, 128, 8
    offs = ints(experts // WORLD)
    chosen, slots = ints(tokens, k), ints(tokens, WORLD)
    counts, weights = ints(WORLD), floats(tokens, k)
    if what == "slots":
        yield chosen, experts, WORLD
    if what == "bound":
        yield offs, flag, 65536
    for dtype in (torch.bfloat16, torch.float32):
        x = on_meta(tokens, 2048, dtype=dtype)
        there = on_meta(WORLD * capacity, 2048, dtype=dtype)
        *at, half = layout(WORLD, capacity, k, 2048 * dtype.itemsize, 4)
        use = PeerUse(table, uses, flag, 1, capacity, experts, k, half, *at)
        if what == "send":
            yield x, slots, use, counts, chosen, weights
            yield x, slots, use
        if what == "take":
            yield x, use, None, weights
            yield x, use, counts
        if what == "return":
            yield there, use, counts, floats(WORLD * capacity, k)
            yield there, use, counts
        if what == "add":
            yield x, slots, use, chosen, weights
            yield x, slots, use


class PeerKernel:
    """A `PeerKernel` is a launcher that reaches memory by addresses, unseen by dispatchers, fakes and compilers.

    Its twin reaches that of the host; it runs for tensors of the CPU, outside of the interpreter.
    what: of `_cases`, the arguments to compile it for ahead of time
    """

    min_arch = 80

    def __init__(self, launcher: Callable[..., Any], twin: Callable[..., Any], what: str) -> None:
        functools.update_wrapper(self, launcher)
        self.name, self.launcher, self.twin = launcher.__name__, launcher, twin
        self.cases = functools.partial(_cases, what)
        PEER_KERNELS.append(self)

    def __call__(self, *args: Any) -> Any:
        first = args[0]
        launches = first.is_cuda or (INTERPRET and first.dtype is not torch.float64)
        return (self.launcher if launches else self.twin)(*args)


PEER_KERNELS: list[PeerKernel] = []


@kernel_op(twin=_token_slots, cases=lambda: _cases("slots"))
def token_slots(experts: Tensor, num_experts: int, world: int) -> tuple[Tensor, Tensor]:
    """slots (T, W) int32: the how manieth a token is of those that go to a rank, -1 where it does not; counts (W,)

    experts (T, K) int of num_experts, of which every rank has as many; -1 goes nowhere.
    """
    check_spec({"experts": experts}, "experts (T, K)")
    tokens, k = experts.shape
    slots = torch.empty(tokens, world, dtype=torch.int32, device=experts.device)
    counts = torch.empty(world, dtype=torch.int32, device=experts.device)
    launch(
        device("peers").token_slots_kernel, (world,), experts.contiguous(), slots, counts,
        tokens, num_experts, world, K=k, BLOCK_K=pow2(k), BLOCK_T=1024, num_warps=8,
    )  # fmt: skip
    return slots, counts


@functools.partial(PeerKernel, twin=_send_tokens, what="send")
def send_tokens(
    x: Tensor, slots: Tensor, use: PeerUse, counts: Tensor | None = None,
    experts: Tensor | None = None, weights: Tensor | None = None,
) -> None:  # fmt: skip
    """Every token into the buffers of the ranks that it goes to; with experts, their ids and weights beside it."""
    table, uses, flag, rank, capacity, num_experts, k, *places = use
    x2, (tokens, n), metadata = as_rows(x), x.shape, experts is not None
    config = PEERS.pick(tokens, (n,), x)
    blocks = max(cdiv(tokens, config["BLOCK_R"]), 1)
    launch(
        device("peers").send_tokens_kernel, (blocks * cdiv(n, config["BLOCK_N"]),),
        x2, slots, table, uses, flag, *pointers(slots, counts, experts, weights),
        tokens, n, num_experts, x2.stride(0), rank, capacity, *places,
        W=use.world, K=k, BLOCK_K=pow2(k), METADATA=metadata, **config,
    )  # fmt: skip


@functools.partial(PeerKernel, twin=_take_tokens, what="take")
def take_tokens(
    like: Tensor, use: PeerUse, arrivals: Tensor | None = None, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What has arrived here: x (W capacity, N), ids (W capacity, K), weights (W capacity, K), and how many of each rank
    (W,).

    like, weights: tensors of their dtypes and widths. arrivals: how many, where x alone was sent, and comes back alone.
    """
    table, uses, _, rank, capacity, _, k, *places = use
    metadata, rows, n = arrivals is None, use.world * capacity, like.shape[1]
    y = like.new_empty(rows, n)
    ids = torch.empty((rows, k) if metadata else 0, dtype=torch.int32, device=like.device)
    got = like.new_empty(0) if weights is None else weights.new_empty(rows, k)
    counts = torch.empty(use.world if metadata else 0, dtype=torch.int32, device=like.device)
    config = PEERS.pick(len(y), (n,), like)
    blocks = cdiv(capacity, config["BLOCK_R"])
    launch(
        device("peers").take_tokens_kernel, (use.world * blocks * cdiv(n, config["BLOCK_N"]),),
        y, table, uses, ids, got, counts if arrivals is None else arrivals,
        n, rank, capacity, *places, blocks,
        K=k, BLOCK_K=pow2(k), METADATA=metadata, **config,
    )  # fmt: skip
    return y, ids, got, counts


@functools.partial(PeerKernel, twin=_return_sums, what="return")
def return_sums(x: Tensor, use: PeerUse, arrivals: Tensor, dweights: Tensor | None = None) -> None:
    """Every sum into the buffer of the rank that it is for; beside it the gradients of its weights."""
    x2, n = as_rows(x), x.shape[1]
    config = PEERS.pick(len(x), (n,), x)
    blocks = cdiv(use.capacity, config["BLOCK_R"])
    launch(
        device("peers").return_sums_kernel, (use.world * blocks * cdiv(n, config["BLOCK_N"]),),
        x2, use.table, use.uses, use.flag, arrivals, *pointers(arrivals, dweights),
        n, x2.stride(0), use.rank, use.capacity, use.half, use.weights_at, blocks,
        K=use.k, BLOCK_K=pow2(use.k), METADATA=dweights is not None, **config,
    )  # fmt: skip


@functools.partial(PeerKernel, twin=_add_sums, what="add")
def add_sums(
    like: Tensor, slots: Tensor, use: PeerUse, experts: Tensor | None = None, weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(sums (T, N), what came back beside them of every copy (T, K), with experts).   weights: a tensor of its dtype"""
    tokens, n = len(slots), like.shape[1]
    y = like.new_empty(tokens, n)
    copies = like.new_empty(0) if weights is None else weights.new_empty(tokens, use.k)
    config = PEERS.pick(tokens, (n,), like)
    launch(
        device("peers").add_sums_kernel, (cdiv(tokens, config["BLOCK_R"]) * cdiv(n, config["BLOCK_N"]),),
        y, slots, use.table, use.uses, use.flag, *pointers(slots, experts), copies,
        tokens, n, use.num_experts, use.rank, use.capacity, use.half, use.weights_at,
        W=use.world, K=use.k, BLOCK_K=pow2(use.k), METADATA=experts is not None, **config,
    )  # fmt: skip
    return y, copies


@functools.partial(PeerKernel, twin=_bound_rows, what="bound")
def bound_rows(offs: Tensor, flag: Tensor, rows: int) -> None:
    """Clamp group ends to `rows`, and set flag where one was beyond."""
    launch(
        device("peers").bound_rows_kernel, (1,), offs, flag, len(offs), rows,
        BLOCK_E=pow2(len(offs)), num_warps=4,
    )  # fmt: skip
