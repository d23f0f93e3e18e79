"""Reference of `fuseops.kernels.peers`, over buffers of the host, found by their addresses."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from .precision import wide

ExchangeSizes = list[int]


def token_slots(experts: Tensor, num_experts: int, world: int) -> tuple[Tensor, Tensor]:
    """slots (T, W) int32: the how manieth a token is of those that go to a rank, -1 where it does not; counts (W,)"""
    homes = experts.div(num_experts // world, rounding_mode="floor")
    every = torch.arange(world, device=experts.device, dtype=homes.dtype)
    goes = (homes[:, :, None] == every).any(1)
    slots = torch.where(goes, goes.cumsum(0) - 1, -1)
    return slots.to(torch.int32), goes.sum(0).to(torch.int32)


def send_tokens(
    x: Tensor,
    slots: Tensor,
    table: Tensor,
    uses: Tensor,
    flag: Tensor,
    place: ExchangeSizes,
    counts: Tensor | None = None,
    experts: Tensor | None = None,
    weights: Tensor | None = None,
) -> None:
    """Every token into the buffers of the ranks that it goes to."""
    rank, room, num_experts, *_ = place
    local = num_experts // len(table)
    for to in range(len(table)):
        part = _Parcel(table, to, uses, place, x, weights)
        sent = (slots[:, to] >= 0) & (slots[:, to] < room)
        rows = slots[sent, to].long() + rank * room
        part.rows[rows] = x[sent]
        if experts is None or weights is None or counts is None:
            continue
        ids = experts[sent].to(torch.int32) - to * local
        part.ids[rows] = torch.where((ids >= 0) & (ids < local), ids, -1)
        part.weights[rows] = weights[sent]
        part.counts[rank] = counts[to].clamp(max=room)
        flag |= (counts[to] > room).to(flag.dtype)


def take_tokens(
    like: Tensor,
    table: Tensor,
    uses: Tensor,
    place: ExchangeSizes,
    arrivals: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What has arrived here.   -> x (W room, N), ids (W room, K), weights (W room, K), arrivals (W,)"""
    rank, room, *_ = place
    part = _Parcel(table, rank, uses, place, like, weights)
    heads = arrivals is None
    counts = part.counts.clone() if arrivals is None else arrivals
    full = (torch.arange(room)[None, :] < counts[:, None]).flatten()[:, None]
    x = torch.where(full, part.rows, 0)
    if not heads or weights is None:
        return x, counts.new_empty(0), like.new_empty(0), counts.new_empty(0)
    return x, torch.where(full, part.ids, -1), torch.where(full, part.weights, 0), counts


def return_sums(
    x: Tensor,
    table: Tensor,
    uses: Tensor,
    flag: Tensor,
    place: ExchangeSizes,
    arrivals: Tensor,
    dweights: Tensor | None = None,
) -> None:
    """Every sum into the buffer of the rank that it is for."""
    rank, room, *_ = place
    for to in range(len(table)):
        part, count = _Parcel(table, to, uses, place, x, dweights), int(arrivals[to])
        mine = slice(to * room, to * room + count)
        theirs = slice(rank * room, rank * room + count)
        part.rows[theirs] = torch.where(flag != 0, torch.nan, x[mine])
        if dweights is not None:
            part.weights[theirs] = dweights[mine]


def add_sums(
    like: Tensor,
    slots: Tensor,
    table: Tensor,
    uses: Tensor,
    flag: Tensor,
    place: ExchangeSizes,
    experts: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(sums (T, N) in the order of ranks, what came back of every copy (T, K)).   weights: one of its dtype"""
    rank, room, num_experts, *_ = place
    part = _Parcel(table, rank, uses, place, like, weights)
    total = wide(like.new_zeros(len(slots), like.shape[1]))
    kept = (slots >= 0) & (slots < room)
    rows = torch.where(kept, slots, 0) + room * torch.arange(len(table), dtype=torch.int32)
    for source in range(len(table)):
        total += torch.where(kept[:, source, None], wide(part.rows[rows[:, source].long()]), 0)
    total = torch.where(flag != 0, torch.nan, total).to(like.dtype)
    if experts is None or weights is None:
        return total, like.new_empty(0)
    homes = experts.div(num_experts // len(table), rounding_mode="floor").clamp(min=0).long()
    there = kept.gather(1, homes) & (experts >= 0)
    copies = part.weights[rows.gather(1, homes).long(), torch.arange(experts.shape[1])]
    return total, torch.where(there, copies, 0)


def bound_rows(offs: Tensor, flag: Tensor, rows: int) -> None:
    """Ends beyond the rows there are become the last one, and are noted."""
    flag |= (offs[-1] > rows).to(flag.dtype)
    offs.clamp_(max=rows)


class _Parcel:
    """A `_Parcel` is the half in use of a rank's buffer, as tensors over its memory."""

    def __init__(
        self,
        table: Tensor,
        rank: int,
        uses: Tensor,
        place: ExchangeSizes,
        x: Tensor,
        weights: Tensor | None,
    ) -> None:
        _, room, _, k, half, ids_at, weights_at, counts_at = place
        world, address = len(table), int(table[rank]) + (int(uses) & 1) * half
        rows = world * room
        self.rows = _at(address, (rows, x.shape[1]), x.dtype)
        self.ids = _at(address + ids_at, (rows, k), torch.int32)
        self.counts = _at(address + counts_at, (world,), torch.int32)
        dtype = torch.float32 if weights is None else weights.dtype
        self.weights = _at(address + weights_at, (rows, k), dtype)


def _at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
