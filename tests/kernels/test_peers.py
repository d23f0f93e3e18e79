"""Kernels that write to other ranks: peers are buffers of one process, found by the table of their addresses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fuseops import kernels as K
from fuseops.kernels.peers import PEER_KERNELS, PeerUse, layout

TWINS = SimpleNamespace(**{op.name: op.twin for op in PEER_KERNELS})


class Group:
    """W ranks in one process, and what each sends and gets, by kernels (`K`) or by their `TWINS`."""

    def __init__(self, kernels, world, room, experts, k, n, dtype) -> None:
        self.kernels, self.world, self.experts = kernels, world, experts
        *at, half = layout(world, room, k, n * dtype.itemsize, 4)
        self.memory = [torch.full((2 * half,), 255, dtype=torch.uint8) for _ in range(world)]
        table = torch.tensor([m.data_ptr() for m in self.memory])
        self.uses = torch.zeros(1, dtype=torch.int64)
        self.flags = [torch.zeros(1, dtype=torch.int32) for _ in range(world)]
        self.of = [
            PeerUse(table, self.uses, self.flags[rank], rank, room, experts, k, half, *at)
            for rank in range(world)
        ]

    def __iter__(self):
        return iter(range(self.world))

    def there(self, xs, slots, heads=None, arrivals=None):
        for r in self:
            more = () if heads is None else heads[r]
            self.kernels.send_tokens(xs[r], slots[r], self.of[r], *more)
        rest = [(None, heads[r][2]) if heads else (arrivals[r],) for r in self]
        got = [self.kernels.take_tokens(xs[r], self.of[r], *rest[r]) for r in self]
        self.uses += 1
        return got

    def home(self, ys, xs, slots, arrivals, experts, dweights):
        for r in self:
            self.kernels.return_sums(ys[r], self.of[r], arrivals[r], dweights[r])
        got = [
            self.kernels.add_sums(xs[r], slots[r], self.of[r], experts[r], dweights[r])
            for r in self
        ]
        self.uses += 1
        return got


def routed(tokens: int, experts: int, k: int) -> tuple[Tensor, Tensor]:
    """Experts (T, K) int32, different for a token, some dropped, and weights."""
    chosen = torch.rand(tokens, experts).argsort(1)[:, :k].to(torch.int32)
    return torch.where(torch.rand(tokens, k) < 0.1, -1, chosen), torch.rand(tokens, k)


@given(
    st.integers(1, 3),
    st.lists(st.integers(0, 7), min_size=3, max_size=3),
    st.integers(1, 3),
    st.sampled_from([3, 16, 40]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(3, 9),
)
def test_what_travels_is_what_the_twins_send(world, counts, k, n, dtype, room) -> None:
    torch.manual_seed(room)
    experts = 4 * world
    groups = [Group(kernels, world, room, experts, k, n, dtype) for kernels in (K, TWINS)]
    heads, xs = [], []
    for tokens in counts[:world]:
        chosen, weights = routed(tokens, experts, k)
        xs.append(torch.randn(tokens, n, dtype=dtype))
        slots, sent = K.token_slots(chosen, experts, world)
        same((slots, sent), K.token_slots.twin(chosen, experts, world))
        heads.append((slots, sent, chosen, weights))
    slots, chosen = [h[0] for h in heads], [h[2] for h in heads]
    first, second = (g.there(xs, slots, [h[1:] for h in heads]) for g in groups)
    for mine, theirs in zip(first, second, strict=True):
        same(mine, theirs)
    arrivals = [got[3] for got in first]
    again = [g.there(xs, slots, arrivals=arrivals) for g in groups]
    same([got[0] for got in again[0]], [got[0] for got in first])
    ys, dweights = [torch.randn_like(got[0]) for got in first], [got[2] for got in first]
    for _ in range(2):  # both halves
        back = [g.home(ys, xs, slots, arrivals, chosen, dweights) for g in groups]
        for mine, theirs in zip(*back, strict=True):
            same(mine, theirs)
    same(groups[0].flags, groups[1].flags)
    fits = all(int(sent.max()) <= room for _, sent, *_ in heads)
    assert fits is not any(int(f) for f in groups[0].flags)
    if fits:  # the weights that came back are those that were sent
        for (_, _, chosen_here, weights), (_, returned) in zip(heads, back[0], strict=True):
            same([returned], [torch.where(chosen_here >= 0, weights, 0)])


@pytest.mark.parametrize(("rows", "flag"), [(7, 1), (9, 0)])
def test_rows_have_a_bound(rows: int, flag: int) -> None:
    for kernels in (K, TWINS):
        offs, noted = torch.tensor([2, 2, 8, 9]).int(), torch.zeros(1, dtype=torch.int32)
        kernels.bound_rows(offs, noted, rows)
        assert offs.tolist() == [2, 2, min(8, rows), min(9, rows)] and int(noted) == flag


def same(mine, theirs) -> None:
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
