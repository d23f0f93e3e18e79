"""Laws of what torch spreads by itself, on two ranks: FSDP2, DDP, and checkpoints of experts."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tensor_ranks import shared_folder
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import fuseops as fo

OFFS = torch.tensor([2, 6], dtype=torch.int32)


def law_fully_sharded_experts_compute_what_whole_ones_do() -> None:
    """In place on the output, too: were that a view, torch would drop the hook that gathers the weights again."""
    for compiled, shape in itertools.product((False, True), ((10, 6), (2, 5, 6))):
        _fully_sharded(compiled, shape)


def _fully_sharded(compiled: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    moe = fo.MoE(6, 4, 8, 2, shared_experts=1, expert_bias=True).double()
    plain = copy.deepcopy(moe)
    fully_shard(moe, mesh=init_device_mesh("cpu", (2,)))
    if compiled:
        moe.compile(backend="aot_eager")
    torch.manual_seed(dist.get_rank())
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
    for ours, theirs in zip(*inputs, strict=True):
        torch.testing.assert_close(ours, theirs)
    for (name, p), q in zip(moe.named_parameters(), plain.parameters(), strict=True):
        dist.all_reduce(q.grad)
        torch.testing.assert_close(p.grad.full_tensor(), q.grad / 2, msg=name)
    assert torch.equal(moe["router"].tokens_per_expert, plain["router"].tokens_per_expert)


def law_experts_of_other_ranks_are_not_lost_in_a_checkpoint() -> None:
    rank = dist.get_rank()

    class Local(fo.ops.Dispatch):
        mesh = init_device_mesh("cpu", (2,))

    torch.manual_seed(rank)
    moe = fo.MoE(6, 4, 8, 2, bias=True, dispatch=Local(4))
    with torch.no_grad():
        moe["router"].weight.fill_(1.0)
    model = torch.nn.Sequential(moe)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with shared_folder() as folder:
        dcp.save(model.state_dict(), checkpoint_id=folder / "spread")
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        state = model.state_dict()
        dcp.load(state, checkpoint_id=folder / "spread")
        whole = fo.MoE(6, 4, 8, 2, bias=True).state_dict()
        dcp.load(whole := {"0." + n: t for n, t in whole.items()}, checkpoint_id=folder / "spread")
    model.load_state_dict(state)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert torch.equal(whole["0.fc1.weight"][4 * rank : 4 * rank + 4], before["0.fc1.weight"])
    model.load_state_dict(before)  # tensors of this rank are taken as they are


def law_scales_of_experts_of_other_ranks_are_not_lost_in_a_checkpoint() -> None:
    """Of `DelayedScaling`, a scale an expert: on the ranks that had them, and in one process."""
    mesh, rank, recipe = init_device_mesh("cpu", (2,)), dist.get_rank(), fo.recipes.DelayedScaling()

    def trained(**options: Any) -> fo.MoE:
        torch.manual_seed(0)
        moe = fo.MoE(16, 16, 4, 2, **options)
        with fo.recipe(recipe):
            moe(torch.randn(8, 16) * (1 + rank)).square().sum().backward()
        torch.optim.SGD(moe.parameters()).step()
        return moe

    spread, again, alone = trained(ep=mesh), trained(ep=mesh), trained()
    want = {n: t.clone() for n, t in spread.named_buffers()}
    for t in again.buffers():
        t.zero_()
    with shared_folder() as folder:
        dcp.save(spread.state_dict(), checkpoint_id=folder / "scales")
        for model in (again, alone):
            dcp.load(state := model.state_dict(), checkpoint_id=folder / "scales")
            model.load_state_dict(state)
    whole = dict(alone.named_buffers())
    assert whole["fc1.fp8_scale"].shape == (3, 4)
    for name, t in again.named_buffers():
        assert torch.equal(t, want[name]) and torch.equal(whole[name].chunk(2, -1)[rank], t), name
    spread.load_state_dict(alone.state_dict())
    assert all(torch.equal(t, want[n]) for n, t in spread.named_buffers())


def _replicated(delay: bool, packed: bool, no_sync: bool, view: bool) -> list[Tensor]:
    """Gradients after two steps under DDP."""
    torch.manual_seed(0)
    experts = fo.ops.GroupedLinear(2, 8, 8, delay_wgrad=delay, packed=packed)
    model = fo.Sequential({"a": experts}).double()
    ddp = DDP(model, gradient_as_bucket_view=view)
    torch.manual_seed(10 + dist.get_rank())
    for _ in range(2):
        x = torch.randn(2, 6, 8, dtype=torch.float64)
        if no_sync:
            with ddp.no_sync():
                ddp(x[0], offs=OFFS).square().sum().backward()
                model.backward_dw()
        ddp(x[1], offs=OFFS).square().sum().backward()
        model.backward_dw()
    return [p.grad.clone() for p in model.parameters()]


def law_delayed_gradients_under_ddp_are_those_of_all_ranks() -> None:
    for how in itertools.product((True, False), (False, True), (False, True)):
        for mine, theirs in zip(_replicated(True, *how), _replicated(False, *how), strict=True):
            torch.testing.assert_close(mine, theirs)
            both = [torch.empty_like(mine) for _ in range(2)]
            dist.all_gather(both, mine.contiguous())
            torch.testing.assert_close(both[0], both[1])


def law_delayed_gradients_that_ddp_cannot_reduce_are_refused() -> None:
    ddp = DDP(fo.Sequential({"a": fo.ops.GroupedLinear(2, 8, 8, delay_wgrad=True)}))

    def hook(state, bucket):  # torch reads annotations, which are texts here
        reduced = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return reduced.then(lambda f: f.value()[0])

    ddp.register_comm_hook(None, hook)
    try:
        ddp(torch.randn(6, 8), offs=OFFS).sum().backward()
    except fo.FuseOpsError as error:
        assert "GroupedLinear delays the gradients of ['weight']" in str(error)
    else:
        raise AssertionError("not refused")
