"""Shards of [gate | up]: each rank computes its hidden units, and the ranks together what one alone does."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fuseops as fo
from fuseops.integrations.sharding import gate_up_join, gate_up_shard

E, D = 3, 6


def experts(hidden: int) -> fo.Sequential:
    return fo.Sequential(
        {
            "fc1": fo.ops.GroupedLinear(E, D, 2 * hidden),
            "act": fo.ops.ScaledSwiGLU(),
            "fc2": fo.ops.GroupedLinear(E, hidden, D, bias=False),
        }
    ).double()


def sharded(name: str, tensor: Tensor, rank: int, world: int) -> Tensor:
    if name.startswith("fc1"):
        return gate_up_shard(tensor, rank, world, -2 if name.endswith("weight") else -1)
    return tensor.chunk(world, -1)[rank]


@given(
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.lists(st.integers(0, 3), min_size=E, max_size=E),
)
def test_the_ranks_together_compute_what_one_alone_does(
    world: int, units: int, counts: list[int]
) -> None:
    full, rows = experts(world * units), sum(counts)
    x = torch.randn(rows, D, dtype=torch.float64, requires_grad=True)
    routing = fo.Routing.from_counts(counts, torch.rand(rows, dtype=torch.float64))
    y = full(x, routing)
    y.square().sum().backward()
    ranks = [experts(units) for _ in range(world)]
    for rank, local in enumerate(ranks):
        state = full.state_dict().items()
        local.load_state_dict({n: sharded(n, t, rank, world) for n, t in state})
    assert x.grad is not None
    mine = x.detach().requires_grad_()
    total = torch.stack([local(mine, routing) for local in ranks]).sum(0)
    torch.testing.assert_close(total, y)
    total.square().sum().backward()
    torch.testing.assert_close(mine.grad, x.grad)
    for rank, local in enumerate(ranks):
        for name, p in full.named_parameters():
            assert p.grad is not None
            torch.testing.assert_close(
                local.get_parameter(name).grad, sharded(name, p.grad, rank, world)
            )


@given(st.sampled_from([1, 2, 4]), st.sampled_from([(8, 3), (2, 8, 3), (2, 16), (24,)]))
def test_joined_shards_are_the_whole(world: int, shape: tuple[int, ...]) -> None:
    dim = -1 if shape[-1] % 8 == 0 else -2
    full = torch.randn(shape)
    shards = [gate_up_shard(full, rank, world, dim) for rank in range(world)]
    assert torch.equal(gate_up_join(shards, dim), full)
    for shard in shards:  # rows of the first half of each shard are gate rows
        gate, up = shard.chunk(2, dim)
        assert gate.shape == up.shape
        assert all(
            any(torch.equal(g, f) for f in full.chunk(2, dim)[0].unbind(dim))
            for g in gate.unbind(dim)
        )


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(fo.FuseOpsError, match=r"\(3, 6, 5\) has 6 rows on axis -2.* multiple of 4"):
        gate_up_shard(torch.zeros(3, 6, 5), 0, 2)
    with pytest.raises(fo.FuseOpsError, match="no rank 2 among 2"):
        gate_up_shard(torch.zeros(3, 8, 5), 2, 2)
