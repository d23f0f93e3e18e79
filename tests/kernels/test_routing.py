"""Rows of experts: one launch and three give what a stable sort gives, and the maps invert each
other.
"""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import SEEDS, assert_matches, few, run

from fuseops.errors import FuseOpsError
from fuseops.kernels import routing as k
from fuseops.kernels.configs import forced

pytestmark = pytest.mark.usefixtures("kernels")
SMALL = {"BLOCK_S": 16, "num_warps": 4}


def chosen(tokens, top_k, experts, seed, skew=False, lost=False, dtype=torch.int32):
    g = torch.Generator().manual_seed(seed)
    e = torch.randint(-1 if lost else 0, experts + lost, (tokens, top_k), generator=g)
    return (e // 3 * 3 if skew else e).to(dtype)


def same(op, *args):
    results = run(op, *args), op.twin(*args)
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want), (got, want)
    return results[0]


@given(
    st.sampled_from([0, 1, 5, 33, 40]),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([1, 3, 16, 40]),
    SEEDS,
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.int32, torch.int64]),
)
@few
def test_route(tokens, top_k, experts, seed, skew, lost, weighted, dtype):
    e = chosen(tokens, top_k, experts, seed, skew, lost, dtype)
    weights = torch.rand(tokens, top_k) if weighted else None
    for one_launch in (k.ONE_LAUNCH, -1):
        with forced(k.ROUTE, SMALL), mock.patch.object(k, "ONE_LAUNCH", one_launch):
            offs, index, pos, _ = same(k.route, e, experts, weights)
    kept = pos >= 0
    token = torch.arange(tokens)[:, None].expand(-1, top_k)
    assert torch.equal(index[pos[kept].long()], token[kept])
    assert int(offs[-1]) == int(kept.sum())


@pytest.mark.parametrize("config", k.CHUNKS)
@pytest.mark.parametrize("one_launch", [k.ONE_LAUNCH, -1])
def test_route_as_shipped(config, one_launch):
    """The configurations of real runs, in one launch and in three: a first chunk, some, and a part of one."""
    tokens = 2 * config["BLOCK_S"] // 8 + 1
    e = chosen(tokens, 8, 128, 0)
    with forced(k.ROUTE, config), mock.patch.object(k, "ONE_LAUNCH", one_launch):
        same(k.route, e, 128, torch.rand(tokens, 8).bfloat16())


def test_many_chunks():
    """More chunks than are scanned at once."""
    e = chosen(150, 2, 7, 0)
    launches = mock.patch.multiple(k, ONE_LAUNCH=-1, SCAN=4)
    with forced(k.ROUTE, SMALL), launches:
        same(k.route, e, 7, None)


@pytest.mark.parametrize("experts", [1, 333])
@pytest.mark.parametrize("one", [False, True])
def test_one_expert_or_many_of_them(experts, one):
    """All copies to one, the last; and more experts than copies."""
    e = torch.full((5, 64), experts - 1) if one else chosen(5, 64, experts, 0)
    with mock.patch.object(k, "ONE_LAUNCH", -1):
        same(k.route, e.int(), experts, torch.rand(5, 64))


def test_more_experts_than_a_program_holds_run_the_twin():
    e = torch.tensor([[5000, 3]])
    assert run(k.route, e, 6000)[1].tolist() == [0, 0]


def test_errors_name_what_was_given():
    with pytest.raises(FuseOpsError, match=r"experts is \(4,\), expected \(T, K\)"):
        k.route.launcher(torch.zeros(4, dtype=torch.int32), 3)
    with pytest.raises(FuseOpsError, match=r"weights is \(4, 1\), expected \(4, 2\)"):
        k.route.launcher(torch.zeros(4, 2, dtype=torch.int32), 3, torch.ones(4, 1))


@given(
    st.sampled_from([0, 1, 65, 700]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 5, 130]),
    SEEDS,
)
@few
def test_counts_of_experts(tokens, top_k, num_experts, seed):
    g = torch.Generator().manual_seed(seed)
    experts = torch.randint(-2, num_experts + 2, (tokens, top_k), generator=g, dtype=torch.int32)
    assert_matches(k.expert_counts, experts, num_experts, exact=True)
    offs = k.route.twin(experts, num_experts)[0]  # which the kernel gives, see above
    assert torch.equal(k.expert_counts(experts, num_experts).cumsum(0).int(), offs)
