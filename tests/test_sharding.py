"""Shards of [gate | up]: each rank computes its hidden units, and the ranks together what one alone does."""

import os
import subprocess
import sys
from pathlib import Path

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


def on_two_ranks(script: str, folder: Path, *arguments: object) -> None:
    """Run a script as rank 0 and 1: its arguments are the rank, a file for both, and these."""
    command = [sys.executable, "-W", "ignore", "-c", script]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(folder / "store"), *map(str, arguments)],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], errors


MOE_RANK = """
import copy, sys, warnings
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import fuseops as fo

rank, store, compiled, *shape = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True", *map(int, sys.argv[4:])
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
torch.manual_seed(0)
moe = fo.MoE(6, 4, 8, 2, shared_experts=1, expert_bias=True).double()
plain = copy.deepcopy(moe)
fully_shard(moe, mesh=init_device_mesh("cpu", (2,)))
if compiled:
    moe.compile(backend="aot_eager")
torch.manual_seed(rank)
values, scale = torch.randn(2, *shape, dtype=torch.float64)
inputs = []
for model in (moe, plain):
    x = values.clone().requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = model(2 * x)
    assert not [w for w in caught if "view" in str(w.message)], [str(w.message) for w in caught]
    y += x
    (y * scale).sum().backward()
    inputs.append((y.detach(), x.grad))
for ours, theirs in zip(*inputs):
    torch.testing.assert_close(ours, theirs)
for (name, p), q in zip(moe.named_parameters(), plain.parameters()):
    dist.all_reduce(q.grad)
    torch.testing.assert_close(p.grad.full_tensor(), q.grad / 2, msg=name)
assert torch.equal(moe["router"].tokens_per_expert, plain["router"].tokens_per_expert)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("shape", [(10, 6), (2, 5, 6)], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_fully_sharded_experts_compute_what_whole_ones_do(
    compiled: bool, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """In place on the output, too: were that a view, torch would drop the hook that gathers the weights again."""
    on_two_ranks(MOE_RANK, tmp_path, compiled, *shape)


SPREAD_RANK = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
import fuseops as fo

rank, store, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)

class Local(fo.ops.Dispatch):
    mesh = init_device_mesh("cpu", (2,))

torch.manual_seed(rank)
moe = fo.MoE(6, 4, 8, 2, bias=True, dispatch=Local(4))
with torch.no_grad():
    moe["router"].weight.fill_(1.0)
model = torch.nn.Sequential(moe)
dcp.save(model.state_dict(), checkpoint_id=folder + "/spread")
before = {n: p.detach().clone() for n, p in model.named_parameters()}
with torch.no_grad():
    for p in model.parameters():
        p.zero_()
state = model.state_dict()
dcp.load(state, checkpoint_id=folder + "/spread")
model.load_state_dict(state)
assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
whole = fo.MoE(6, 4, 8, 2, bias=True)
state = whole.state_dict()
dcp.load(state := {"0." + n: t for n, t in state.items()}, checkpoint_id=folder + "/spread")
assert torch.equal(state["0.fc1.weight"][4 * rank : 4 * rank + 4], before["0.fc1.weight"])
model.load_state_dict(before)  # tensors of this rank are taken as they are
dist.barrier()
dist.destroy_process_group()
"""


def test_experts_of_other_ranks_are_not_lost_in_a_checkpoint(tmp_path: Path) -> None:
    on_two_ranks(SPREAD_RANK, tmp_path, tmp_path)
