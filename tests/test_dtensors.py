"""Plans, marks and offload of models over DTensors: by component, on meshes of one and of two ranks."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import fuseops as fo
from fuseops import offload
from fuseops.offload import marks

D, HIDDEN = 8, 16


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """Ranks of a mesh in one process: nothing here depends on what the others hold."""
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    try:
        yield request.param
    finally:
        dist.destroy_process_group()


def sharded(ranks: int) -> tuple[fo.Sequential, DTensor]:
    """A dense MLP, its hidden units over the ranks, and an input."""
    mesh = init_device_mesh("cpu", (ranks,))
    model = fo.Sequential(
        {"up": fo.ops.Linear(D, HIDDEN), "act": fo.ops.SiLU(), "down": fo.ops.Linear(HIDDEN, D)}
    )
    places = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}
    for name, p in list(model.named_parameters()):
        child, own = name.split(".")
        whole = distribute_tensor(p.detach(), mesh, [places.get(name, Replicate())])
        setattr(model[child], own, nn.Parameter(whole))
    return model, distribute_tensor(torch.randn(4, D), mesh, [Replicate()])


def test_plans_count_the_bytes_of_this_rank(ranks: int) -> None:
    model, x = sharded(ranks)
    plan = model.plan(x)
    hidden = 4 * HIDDEN // ranks * 4
    saved = {t.name: t for t in plan.saved}
    assert saved["SiluBackward0.0"].nbytes == hidden
    assert sum(t.is_param for t in plan.saved) == 1  # up wants no gradient of x
    assert plan.saved_bytes == 4 * D * 4 + 2 * hidden  # x, h and the activation
    assert "works on DTensors" in str(plan)
    text = fo.explain(nn.Sequential(model), x)
    assert "works on DTensors" in text and "parameter" in text


def test_marks_lie_on_the_components(ranks: int) -> None:
    model, x = sharded(ranks)
    local = x.to_local()
    offload.mark_not_offload(x, model.up.weight)
    assert marks.marked.get(local.untyped_storage()) == marks.KEEP
    assert marks.marked.get(model.up.weight.to_local().untyped_storage()) == marks.KEEP
    offload.mark_offload({"x": [x]})
    assert marks.marked.get(local.untyped_storage()) == marks.OFFLOAD
    offload.start_offload(x)
    assert marks.ready_event(local.untyped_storage(), local._version) is not None


def test_a_marked_component_that_is_saved_is_moved_or_kept(ranks: int) -> None:
    _, x = sharded(ranks)
    for mark, moved in ((offload.mark_offload, True), (offload.mark_not_offload, False)):
        local = (x * 2).to_local().requires_grad_()
        mark(DTensor.from_local(local, x.device_mesh, [Replicate()]))
        offload.start_offload(local)
        with offload.to_host(min_bytes=1 << 30 if moved else 1) as scope:
            y = local.sin()
        y.sum().backward()
        assert ("marked" in str(scope.report())) and ("moved  " in str(scope.report())) is moved
