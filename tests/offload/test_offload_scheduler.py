"""The scheduler over every shape of training: exact, by name, and gone without a trace."""

import copy
import gc
import io
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from lazy_lanes import LazyLanes
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops import offload
from fuseops.errors import DoubleBackwardError, FuseOpsError, InPlaceError
from fuseops.observe import modules
from fuseops.offload import marks
from fuseops.offload.lanes.cpu import CpuLanes
from fuseops.offload.lanes.protocol import Event, Lane
from fuseops.torch_private import WeakStorage, top_saved_tensor_hooks

D = 8


class Out(nn.Sequential):
    """With a forward of its own: torch compiles none of its own classes in place."""

    def forward(self, input: Tensor) -> Tensor:
        for module in self:
            input = module(input)
        return input


class Block(nn.Module):
    """A residual block, part ops and part plain modules."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = fo.Residual(
            fo.ops.RMSNorm(D), fo.ops.Linear(D, 2 * D), fo.ops.SwiGLU(), fo.ops.Linear(D, D)
        )
        self.out = Out(nn.Linear(D, D), nn.Tanh())
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return x + self.out(self.mlp(x))


class Model(nn.Module):
    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


ALL = offload.Policy(min_bytes=1)


def inputs(seed: int = 1, rows: int = 5) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(rows, D, requires_grad=True)


def grads(model: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def facts(scheduler: offload.Scheduler) -> dict[str, int]:
    return dict(scheduler.report().schedule)


def compare(
    run: Callable[[Model], Any], steps: int = 4, layers: str = "blocks.*", **options: Any
) -> offload.Scheduler:
    """Runs steps with a scheduler and without; gradients are equal to the bit."""
    plain, model = Model(), Model()
    with offload.Scheduler(model, layers, **{"policy": ALL, **options}) as scheduler:
        for _ in range(steps):
            run(model)
            run(plain)
            mine, other = grads(model), grads(plain)
            assert len(mine) == len(other) > 0 and all(map(torch.equal, mine, other))
    assert top_saved_tensor_hooks() is None
    gc.collect()
    scheduler._scope.mover.collect_dead()
    assert scheduler.report().host_bytes == 0 and scheduler._scope.mover.lanes.arena.used == 0
    return scheduler


# --- shapes of training


def one_step(model: Model) -> None:
    model(inputs()).sum().backward()


def accumulate(model: Model) -> None:
    for seed in range(3):
        model(inputs(seed)).sum().backward()


def forwards_first(model: Model) -> None:
    for loss in [model(inputs(seed)).sum() for seed in range(3)]:
        loss.backward()


def forwards_first_newest_first(model: Model) -> None:
    for loss in reversed([model(inputs(seed)).sum() for seed in range(3)]):
        loss.backward()


def one_forward_one_backward(model: Model) -> None:
    waiting = [model(inputs(0)).sum(), model(inputs(1)).sum()]
    for seed in range(2, 5):
        waiting.pop(0).backward()
        waiting.append(model(inputs(seed)).sum())
    for loss in waiting:
        loss.backward()


def two_losses(model: Model) -> None:
    (model(inputs(0)) * model(inputs(1))).sum().backward()


def retain_graph(model: Model) -> None:
    y = model(inputs()).sum()
    y.backward(retain_graph=True)
    y.backward()


def subset(model: Model) -> None:
    x = inputs()
    (dx,) = torch.autograd.grad(model(x).sum(), x)
    model.head.bias.grad = dx.sum().reshape(1)


def a_layer_twice(model: Model) -> None:
    x = inputs()
    for k in (0, 1, 0, 2, 2, 1):
        x = model.blocks[k](x)
    x.sum().backward()


def evaluation_between(model: Model) -> None:
    with torch.no_grad():
        model(inputs(7))
    y = model(inputs())
    with torch.inference_mode():
        model(inputs(8))
    model.eval()
    model(inputs(9))
    model.train()
    y.sum().backward()


def errors_between(model: Model) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    hook = model.blocks[3].out.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(inputs())
    hook.remove()
    y = model(inputs())
    y.register_hook(lambda g: None)
    z = model.blocks[2](inputs()).tanh()
    z.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        z.sum().backward()
    y.sum().backward()


def checkpoint_around(model: Model) -> None:
    x = inputs()
    for k, block in enumerate(model.blocks):
        if k % 3 == 0:
            x = block(x)
        else:
            x = checkpoint(block, x, use_reentrant=k % 3 == 1)
    x.sum().backward()


def checkpoint_of_keywords(model: Model) -> None:
    """Saved-tensor hooks do not see what comes into a checkpoint by keyword."""
    for block in model.blocks[1::2]:
        inner = type(block.out).forward.__get__(block.out)
        block.out.forward = lambda input, inner=inner: checkpoint(
            inner, input=input, use_reentrant=False
        )
    one_step(model)
    for block in model.blocks[1::2]:
        del block.out.forward


def backward_in_another_thread(model: Model) -> None:
    losses = [model(inputs(seed)).sum() for seed in range(2)]
    for loss in losses:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()


def gradient_penalty(model: Model) -> None:
    """A backward through the backward, of layers of plain modules."""
    x = inputs()
    y = x
    for block in model.blocks:
        y = y + block.out(y)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.sum() + dx.square().sum()).backward()


def unused_branches(model: Model) -> None:
    x = inputs()
    kept = [block(x) for block in model.blocks]
    (kept[1] + kept[4]).sum().backward()


SHAPES = [
    *(one_step, accumulate, forwards_first, forwards_first_newest_first),
    *(one_forward_one_backward, two_losses, retain_graph, subset, a_layer_twice),
    *(evaluation_between, errors_between, checkpoint_around, unused_branches),
    *(checkpoint_of_keywords, backward_in_another_thread),
]


@pytest.mark.parametrize("lag, ahead", [(1, 1), (2, 1), (0, 3)])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda f: f.__name__)
def test_every_shape_of_training_is_exact(shape: Any, lag: int, ahead: int) -> None:
    scheduler = compare(shape, lag=lag, ahead=ahead)
    assert facts(scheduler)["out_bytes"] > 0


def test_a_second_derivative_is_exact_where_it_exists_and_refused_where_not() -> None:
    scheduler = compare(gradient_penalty, layers="blocks.*.out")
    assert facts(scheduler)["out_bytes"] > 0
    model, x = Model(), inputs()
    with offload.Scheduler(model, "blocks.*", policy=ALL):
        (dx,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        with pytest.raises(DoubleBackwardError):
            dx.sum().backward()


@pytest.mark.parametrize(
    "shape", [one_step, accumulate, forwards_first, one_forward_one_backward, a_layer_twice]
)
def test_from_the_second_step_on_nothing_is_late(shape: Any) -> None:
    first = facts(compare(shape, steps=1, lag=1))
    later = facts(compare(shape, steps=4, lag=1))
    assert later["misses"] == first["misses"] and later["mispredicted"] == 0
    assert later["back_bytes"] > first["back_bytes"]


@dataclass
class Wrapped:
    y: Tensor


class Wraps(nn.Module):
    """Takes and gives a tensor in something."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(D, D), kind

    def forward(self, x: Any) -> Any:
        x = x if isinstance(x, Tensor) else x.y if isinstance(x, Wrapped) else x[0]
        return self.kind(self.linear(x).exp().sin())


def test_a_layer_that_returns_a_dataclass_begins_its_backward_as_one_that_returns_a_tensor() -> (
    None
):
    found = []
    for kind in (Wrapped, lambda y: (y,), lambda y: y):
        model = nn.Sequential(*(Wraps(kind) for _ in range(4)), Wraps(lambda y: y))
        with offload.Scheduler(model, "?", policy=ALL) as scheduler:
            for _ in range(3):
                model(inputs()).sum().backward()
        found.append(facts(scheduler))
    assert found[0] == found[1] == found[2] and found[0]["misses"] == 0 < found[0]["out_count"]


def test_ten_steps_with_an_optimizer_reuse_their_buffers() -> None:
    plain, model = Model(), Model()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    reserved = []
    with offload.Scheduler(model, "blocks.*", policy=ALL) as scheduler:
        for step in range(12):
            for m, optimizer in zip((plain, model), optimizers, strict=True):
                m(inputs(step)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            reserved.append(facts(scheduler)["host_reserved"])
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    assert len(set(reserved)) == 1


def test_two_models_at_once() -> None:
    models, plain = (Model(3), Model(4)), (Model(3), Model(4))
    a, b = (offload.Scheduler(m, "blocks.*", policy=ALL) for m in models)
    with a, b:
        for _ in range(3):
            for first, second in (models, plain):
                losses = [first(inputs(0)).sum(), second(inputs(1)).sum()]
                for loss in losses:
                    loss.backward()
            for mine, other in zip(models, plain, strict=True):
                assert all(map(torch.equal, grads(mine), grads(other)))
    assert facts(a)["out_bytes"] > 0 and facts(b)["out_bytes"] > 0


def test_a_change_of_order_is_reported_and_exact() -> None:
    plain, model = Model(), Model()
    with offload.Scheduler(model, "blocks.*", policy=ALL, lag=1) as scheduler:
        for shape in (one_step, one_step, forwards_first, accumulate, one_step, one_step):
            for m in (plain, model):
                shape(m)
            assert all(map(torch.equal, grads(model), grads(plain)))
    assert facts(scheduler)["mispredicted"] >= 2


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it
@pytest.mark.parametrize(
    "backend",
    ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.cxx)],
)
def test_compiled_parts_inside_layers(backend: str) -> None:
    torch._dynamo.reset()

    def run(model: Model) -> None:
        for block in model.blocks:
            if not hasattr(block.out, "_compiled_call_impl") or not block.out._compiled_call_impl:
                block.out.compile(backend=backend)
        one_step(model)

    names = moved(compare(run))
    if backend == "eager":  # torch's own nodes
        assert "blocks.0.TanhBackward0.0" in names
    else:
        compiled = {name for name in names if ".compiled." in name}
        assert {name.split(".")[1] for name in compiled} == set("012345")
        assert all(name.split(".")[2] == "out" for name in compiled)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it
@pytest.mark.filterwarnings("ignore:Using `torch.compile")  # the hooks fire once more, for nothing
def test_a_compiled_layer_is_moved_from_outside_of_it() -> None:
    torch._dynamo.reset()
    model, plain = (
        nn.Sequential(*(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(4)))
        for _ in range(2)
    )
    plain.load_state_dict(model.state_dict())
    for k in range(4):
        model[k] = torch.compile(model[k], backend="aot_eager")
    with offload.Scheduler(model, "*", policy=ALL, lag=0) as scheduler:
        for _ in range(3):
            for m in (model, plain):
                m(inputs()).sum().backward()
            assert all(map(torch.equal, grads(model), grads(plain)))
    assert facts(scheduler)["out_bytes"] > 0


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it
def test_layers_inside_a_compiled_region_are_reported() -> None:
    torch._dynamo.reset()
    model = Out(nn.Linear(D, D), nn.Tanh())
    with offload.Scheduler(model, "*", policy=ALL) as scheduler:
        model.compile(backend="aot_eager")
        model(inputs()).sum().backward()
        assert {e.decision for e in scheduler.report().entries} == {"missed"}
        assert "compile the layers" in str(scheduler.report())
        Out(*model)(inputs()).sum().backward()
        assert "missed" not in {e.decision for e in scheduler.report().entries}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it
def test_a_layer_compiled_in_place_is_moved_and_compiled_once() -> None:
    torch._dynamo.reset()
    compiled = 0

    def backend(graph: Any, example: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return graph.forward

    model, plain = Model(3), Model(3)
    model.blocks[1].out.compile(backend=backend)
    with offload.Scheduler(model, "blocks.*.out", policy=ALL, lag=0) as scheduler:
        for _ in range(4):
            for m in (model, plain):
                one_step(m)
            assert all(map(torch.equal, grads(model), grads(plain)))
    assert compiled == 1
    assert any(name.startswith("blocks.1.") for name in moved(scheduler))


@pytest.mark.filterwarnings("ignore")  # torch's own, about the gloo device
def test_fully_sharded_parameters_stay_and_gradients_are_exact() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        models = Model(4), Model(4)
        for model in models:
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        mine, other = models
        with offload.Scheduler(mine, "blocks.*", policy=ALL, lag=0) as scheduler:
            for _ in range(3):
                for model in models:
                    one_step(model)
                for a, b in zip(mine.parameters(), other.parameters(), strict=True):
                    assert torch.equal(a.grad.to_local(), b.grad.to_local())
                    a.grad = b.grad = None
    finally:
        dist.destroy_process_group()
    entries = scheduler.report().entries
    shapes = {tuple(p.shape) for p in Model(1).parameters()}
    transposed = {shape[::-1] for shape in shapes}
    assert not any(e.decision == "moved" and e.shape in shapes | transposed for e in entries)
    assert any(e.decision == "moved" for e in entries)


@pytest.mark.filterwarnings("ignore")  # torch's own, about the gloo device
def test_no_fakes_stay_in_what_fsdp2_gathers() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        blocks = [fo.Residual(fo.ops.Linear(D, D), fo.ops.GELU()) for _ in range(2)]
        model, x = fo.Sequential(*blocks, fo.ops.Linear(D, D)), inputs()
        mesh = dist.init_device_mesh("cpu", (1,))
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh)
        with pytest.raises(FuseOpsError, match="fully_shard has sharded those of FSDPSequential"):
            offload.plan(model, x, layers="*")
        before = [*model.parameters()]
        assert not model.plan(x).rehearsed
        assert all(
            p is q and p.grad is None for p, q in zip(before, model.parameters(), strict=True)
        )
        model(x).sum().backward()
        got = [p.grad.full_tensor() for p in model.parameters()]
    finally:
        dist.destroy_process_group()
    assert all(type(g) is Tensor for g in got)


@pytest.mark.filterwarnings("ignore")  # torch's own, about the gloo device
def test_a_plan_adds_nothing_to_gradients_that_fsdp2_has_not_reduced() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        models, mesh, x = (Model(2), Model(2)), dist.init_device_mesh("cpu", (1,)), inputs()
        for model in models:
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh)
        mine, other = models
        with offload.Scheduler(mine, "blocks.*", peak=1, policy=ALL):
            for last in (False, True):
                for model in models:
                    model.set_requires_gradient_sync(last)
                    model(x).sum().backward()
                if not last:
                    offload.plan(mine, x, layers="blocks.*", record=True)
        for a, b in zip(mine.parameters(), other.parameters(), strict=True):
            assert torch.equal(a.grad.to_local(), b.grad.to_local())
    finally:
        dist.destroy_process_group()


def test_two_threads_train_two_models() -> None:
    pairs, x = [(Model(), Model()) for _ in range(2)], inputs()
    outcomes: list[bool] = []

    def train(mine: Model, other: Model) -> None:
        with offload.Scheduler(mine, "blocks.*", policy=ALL, lag=1) as scheduler:
            for _ in range(8):
                for model in (mine, other):
                    model(x.detach()).sum().backward()
                outcomes.append(all(map(torch.equal, grads(mine), grads(other))))
        outcomes.append(facts(scheduler)["back_bytes"] > 0)

    threads = [threading.Thread(target=train, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True] * 18


def test_shapes_that_change_every_step_ask_for_no_more_memory() -> None:
    plain, model = Model(3), Model(3)
    reserved = []
    with offload.Scheduler(model, "blocks.*", policy=ALL, lag=0) as scheduler:
        for step in range(100):
            rows = 1 + (step * 37) % 50
            for m in (plain, model):
                m(inputs(step, rows)).sum().backward()
            assert all(map(torch.equal, grads(model), grads(plain)))
            reserved.append(facts(scheduler)["host_reserved"])
    assert reserved[0] == reserved[-1]


def test_law_13_at_most_two_layers_are_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[tuple[WeakStorage, int]] = []
    peak = 0

    class Counting(CpuLanes):
        def alloc(self, nbytes: int, device: Any, name: str) -> Any:
            nonlocal peak
            buf = super().alloc(nbytes, device, name)
            if device == "device":
                alive.append((WeakStorage(buf.data), nbytes))
                peak = max(peak, sum(n for ref, n in alive if not ref.expired()))
            return buf

    monkeypatch.setattr("fuseops.offload.scheduler.make_lanes", lambda *_: Counting())
    model = Model(10)
    with offload.Scheduler(model, "blocks.*", policy=ALL, lag=0) as scheduler:
        scheduler._scope.mover.schedule.small = 0
        for _ in range(3):
            alive.clear()
            peak = 0
            one_step(model)
            model.zero_grad()
    a_layer = scheduler.report().moved_bytes / facts(scheduler)["steps"] / 9
    assert 0 < peak <= 2 * a_layer * 1.05


# --- checkpoints: forwards are counted


def test_a_checkpoint_around_a_layer_stays_a_checkpoint() -> None:
    model = Model(3)
    with offload.Scheduler(model, "blocks.*", policy=ALL) as scheduler:
        for _ in range(2):
            checkpoint_around(model)
    assert [b.forwards for b in model.blocks] == [2, 4, 4]
    reasons = {e.reason for e in scheduler.report().entries if e.name.startswith("blocks.2")}
    assert reasons == {"recomputed by checkpoint"}


def test_a_checkpoint_inside_a_layer_keeps_recomputing_and_its_inputs_leave() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x * 1, use_reentrant=False)

    model = nn.Sequential(*(Inside() for _ in range(4)))
    with offload.Scheduler(model, "*", policy=ALL, lag=0) as scheduler:
        model(inputs()).sum().backward()
    assert [m.block.forwards for m in model] == [2] * 4
    moved = [e for e in scheduler.report().entries if e.decision == "moved"]
    assert len(moved) == 4 and all("MulBackward0" in e.name for e in moved)


def test_a_plan_recomputes_a_layer_or_fields_of_an_op() -> None:
    plain, model = Model(4), Model(4)
    plan = {"blocks.1": "recompute", "blocks.2": "recompute"}
    with offload.Scheduler(model, "blocks.*", plan=plan, policy=ALL, lag=0) as scheduler:
        for _ in range(2):
            one_step(plain)
            one_step(model)
            assert all(map(torch.equal, grads(plain), grads(model)))
        scheduler.assert_matched()
    assert [b.forwards for b in model.blocks] == [2, 4, 4, 2]
    one_step(model)
    assert [b.forwards for b in model.blocks] == [3, 5, 5, 3]
    assert "forward" not in model.blocks[1].__dict__


class Counted(nn.Module):
    """Writes a buffer in each forward, one way or another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(D))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if self.way == "in place":
            self.mean.mul_(0.9).add_(mean)
        elif self.way == "through data":
            self.mean.data.mul_(0.9).add_(mean)
        elif self.way == "by another":
            self.mean = 0.9 * self.mean + mean
        return (x * 2).tanh().sin() * self.mean


WRITERS: dict[str, Callable[[], nn.Module]] = {
    **{way: partial(Counted, way) for way in ("in place", "through data", "by another")},
    "BatchNorm": lambda: nn.Sequential(nn.BatchNorm1d(D), nn.Tanh()),
    "InstanceNorm": lambda: nn.Sequential(
        nn.Unflatten(0, (-1, 1)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten(0, 1)
    ),
    "spectral_norm": lambda: nn.Sequential(spectral_norm(nn.Linear(D, D)), nn.Tanh()),
}


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("kind", WRITERS)
def test_a_layer_that_writes_buffers_is_not_recomputed(kind: str, record: bool) -> None:
    """Nothing but what another layer saves is made again, and a plan by hand is refused."""
    model = nn.Sequential(WRITERS[kind](), Out(nn.Linear(D, D), nn.Tanh()))
    planned = offload.plan(model, inputs(), layers="*", min_bytes=1, record=record)
    groups = {g.name for g in planned.profile.recompute if g.kind == "module"}
    assert groups == {"1"}
    if kind == "through data":
        return
    with offload.Scheduler(model, "*", plan={"0": "recompute"}, policy=ALL):
        with pytest.raises(FuseOpsError, match="the plan recomputes 0, whose forward writes"):
            model(inputs())
    model.eval()
    if kind in ("BatchNorm", "InstanceNorm", "spectral_norm"):
        with offload.Scheduler(model, "*", plan={"0": "recompute"}, policy=ALL):
            model(inputs()).sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_is_recomputed_inside_of_a_checkpoint(reentrant: bool) -> None:
    """As torch's own checkpoints nest, and so do those of a plan."""
    plain = nn.Sequential(nn.Sequential(Block(), Block()), Block())
    model = copy.deepcopy(plain)
    x = inputs()
    for m in (plain, model):
        plan = {"0": "recompute", "0.1": "recompute"} if m is model else {}
        with offload.Scheduler(m, ["0", "0.1"], plan=plan, policy=ALL):
            for _ in range(2):
                checkpoint(m, x, use_reentrant=reentrant).square().sum().backward()
    assert all(map(torch.equal, grads(plain), grads(model)))


# --- what is moved


def moved(scheduler: offload.Scheduler) -> set[str]:
    return {e.name for e in scheduler.report().entries if e.decision == "moved"}


def names(**policy: Any) -> set[str]:
    model = Model(4)
    policy = offload.Policy(**{"min_bytes": 1, **policy})
    with offload.Scheduler(model, "blocks.*", policy=policy) as scheduler:
        one_step(model)
    return moved(scheduler)


def test_policies_choose_by_name_predicate_and_bytes() -> None:
    everything = names()
    assert "blocks.0.mlp.2.x" in everything
    assert names(offload="blocks.*.mlp.*.x") == {n for n in everything if n.endswith(".x")}
    assert names(offload="blocks.1.**") == {n for n in everything if n.startswith("blocks.1.")}
    assert names(keep=["**.rstd", "blocks.0.**"]) == {
        n for n in everything if not n.endswith("rstd") and not n.startswith("blocks.0.")
    }
    assert names(where=lambda c: c.op == "DenseMLP") == {n for n in everything if ".mlp." in n}
    assert names(min_bytes=5 * 2 * D * 4) == {f"blocks.{k}.mlp.2.x" for k in range(4)}
    assert names(fraction=0.0) == set()
    some = names(layer_bytes=5 * D * 4)
    assert len(some) == 4 and all(n.endswith("mlp.0.x") for n in some)


def test_a_fraction_is_of_the_bytes_of_a_call() -> None:
    model = Model(4)
    policy = offload.Policy(fraction=0.5, min_bytes=1)
    with offload.Scheduler(model, "blocks.*", policy=policy) as scheduler:
        one_step(model)
    report = scheduler.report()
    total = sum(e.nbytes for e in report.entries)
    assert 0.3 * total < report.moved_bytes <= 0.5 * total


def test_globs_that_match_nothing_raise() -> None:
    with pytest.raises(FuseOpsError, match=r"'layers\.\*'.*matches no module.*blocks"):
        offload.Scheduler(Model(), "layers.*")
    with pytest.raises(FuseOpsError, match=r"fc9.*matched no saved tensor"):
        wrong = offload.Policy("**.fc9.x", min_bytes=1)
        offload.plan(Model(), torch.randn(8, D), layers="blocks.*", policy=wrong)
    policy = offload.Policy(keep="blocks.*.attention.*", min_bytes=1)
    model = Model()
    with (
        pytest.raises(FuseOpsError, match=r"attention.*matched no saved tensor"),
        offload.Scheduler(model, "blocks.*", policy=policy),
    ):
        one_step(model)


def test_names_of_a_plan_that_mean_nothing_raise() -> None:
    """Of one that users wrote: what a step of another shape does not save, a plan may name."""
    model = Model()
    with offload.Scheduler(model, "blocks.*", policy=offload.Policy(min_bytes=1)) as scheduler:
        one_step(model)
    saved = scheduler.report().entries[0].name
    with offload.Scheduler(model, "blocks.*", plan={saved: "offload", "blocks.0": "recompute"}):
        one_step(model)
    with (
        pytest.raises(FuseOpsError, match=r"plan's names \['blocks.7.x'\] matched no saved"),
        offload.Scheduler(model, "blocks.*", plan={saved: "keep", "blocks.7.x": "keep"}),
    ):
        one_step(model)
    for name, decision in (
        ("blocks.7", "recompute"),
        ("blocks.7.mlp.2.x", "recompute"),
        ("blocks.*", "recompute"),
        ("head", "recompute"),
        ("blocks.1", "dispatch"),
        ("head.x", "dispatch"),
    ):
        with pytest.raises(FuseOpsError, match=f"'{re.escape(name)}': '{decision}'.*no tensor of"):
            offload.Scheduler(model, "blocks.*", plan={saved: "keep", name: decision})


@pytest.mark.parametrize("glob", ["**.router.x", "**.fc1.x"])
def test_a_tensor_of_two_names_is_matched_by_either(glob: str) -> None:
    """What the router and the experts of a layer both save is one tensor."""
    model = nn.Sequential(*(fo.Residual(fo.ops.RMSNorm(D), fo.MoE(D, D, 4, 2)) for _ in range(4)))
    x = torch.randn(9, D, requires_grad=True)
    for policy in (offload.Policy(glob, min_bytes=1), offload.Policy(keep=glob, min_bytes=1)):
        with offload.Scheduler(model, "*", policy=policy) as scheduler:
            for _ in range(2):
                model(x).sum().backward()
        name = f"0.1{glob[2:]}"  # of the first layer: the last one stays anyway
        entries = scheduler.report().entries
        (shared,) = [e for e in entries if name in (e.name, *e.also)]
        assert shared.also and shared.decision == ("kept" if policy.keep else "moved")


def test_a_plan_is_followed_and_a_difference_is_named() -> None:
    model = Model(4)
    plan = {"blocks.0.mlp.2.x": "offload", "blocks.1.mlp.2.x": "keep"}
    with offload.Scheduler(model, "blocks.*", plan=plan) as scheduler:
        one_step(model)
        one_step(model)
    assert moved(scheduler) == {"blocks.0.mlp.2.x"}
    scheduler.assert_matched()
    with pytest.raises(FuseOpsError, match=r"blocks\.1\.mlp\.2\.x: planned offload, keep"):
        scheduler.assert_matched({**plan, "blocks.1.mlp.2.x": "offload"})
    with pytest.raises(FuseOpsError, match=r"nowhere: planned offload, not saved"):
        scheduler.assert_matched({"nowhere": "offload"})


def test_a_peak_is_planned_for_at_the_first_forward_and_kept_to() -> None:
    plain, model = Model(), Model()
    x = inputs(rows=1 << 16)
    hardware = offload.Hardware.h200()
    free = offload.plan(plain, x, layers="blocks.*", hardware=hardware, record=True)
    peak = (free.before.peak + free.after.peak) // 2
    with offload.Scheduler(model, "blocks.*", peak=peak, hardware=hardware) as scheduler:
        model.eval()
        with torch.no_grad():
            model(x)
        assert scheduler.plan is None  # an evaluation plans nothing
        model.train()
        with pytest.raises(FuseOpsError, match="x to end in"):
            model(x[:, 1:])
        with pytest.raises(FuseOpsError, match="a checkpoint around all of it"):
            checkpoint(model, x, use_reentrant=False)
        assert scheduler.plan is None  # nor does a forward that fails: the next one is the first
        for _ in range(3):
            for m in (plain, model):
                m(x).sum().backward()
            assert all(map(torch.equal, grads(model), grads(plain)))
        scheduler.assert_matched()
    assert scheduler.plan.fits and scheduler.plan.after.peak <= peak < scheduler.plan.before.peak
    chosen = {n for n, d in scheduler.plan.decisions.items() if d == "offload"}
    assert moved(scheduler) == chosen
    with pytest.raises(FuseOpsError, match="plans by itself"):
        offload.Scheduler(model, "blocks.*", peak=peak, plan={})
    for more in ({}, {"plan": scheduler.plan}, {"manual": True}):
        with pytest.raises(FuseOpsError, match="only with peak= it plans"):
            offload.Scheduler(model, "blocks.*", hardware=hardware, **more)


def test_a_peak_that_cannot_be_kept_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for peak, said in (("1GiB", 0), ("1KiB", 1)):
        with offload.Scheduler(Model(2), "blocks.*", peak=peak) as scheduler:
            one_step(scheduler.model)
        warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert len(warnings) == said == sum("its plan does not fit" in text for text in warnings)


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_recorded_step_that_is_stopped_in_its_backward_leaves_no_gradient(
    accumulated: bool,
) -> None:
    """Short of memory, a plan is made of a dry run, and the step is trained."""
    plain, model, short = Model(), Model(), [torch.OutOfMemoryError("short")]

    def stopped(dy: Tensor) -> None:
        if short:
            raise short.pop()

    def watched(module: nn.Module, args: Any, y: Tensor) -> None:
        if y.requires_grad:
            y.register_hook(stopped)

    for m in (plain, model) if accumulated else ():
        one_step(m)
    hook = model.blocks[1].register_forward_hook(watched)
    with offload.Scheduler(model, "blocks.*", peak="1GiB"):
        for m in (plain, model):
            one_step(m)
    assert not short and all(map(torch.equal, grads(model), grads(plain)))
    hook.remove()


@pytest.fixture
def apart() -> Iterator[None]:
    """The ops of the MLP save by themselves: a hidden tensor that can be made again need not leave."""
    with fo.fusion(disable=("norm_mlp", "mlp", "norm_linear")):
        yield


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("fraction", [1.0, 0.3])
def test_a_policy_says_what_may_leave_for_a_peak(fraction: float) -> None:
    model, plain = Model(4), Model(4)
    plain.load_state_dict(model.state_dict())
    x = inputs(rows=1 << 12)
    hardware = replace(offload.Hardware.h200().with_link(1e6), arch=0)  # ops as on the CPU
    free = offload.plan(plain, x, layers="blocks.*", hardware=hardware, min_bytes=1)
    policy = offload.Policy(keep="**.mlp.1.x", fraction=fraction, min_bytes=1)
    limits = {"peak": (free.after.peak + 7 * free.before.peak) // 8, "hardware": hardware}
    with offload.Scheduler(model, "blocks.*", policy=policy, **limits) as scheduler:
        for _ in range(2):
            for m in (plain, model):
                m(x).sum().backward()
            assert all(map(torch.equal, grads(model), grads(plain)))
        scheduler.assert_matched()
    tensors = scheduler.plan.tensors
    kept = [t for t in tensors if t.name.endswith(".mlp.1.x")]
    assert kept and all(t.decision != "offload" for t in kept)  # but may be made again
    away = scheduler.plan.bytes_of("offload")
    assert 0 < away <= fraction * sum(t.nbytes for t in tensors)


def test_the_host_budget_is_kept_and_is_a_reason() -> None:
    def run(model: Model) -> None:
        one_step(model)

    scheduler = compare(run, host="2KiB")
    assert facts(scheduler)["host_reserved"] <= 2048
    assert any("host budget of 2048 bytes" in e.reason for e in scheduler.report().entries)


def test_marks_decide_before_a_policy() -> None:
    model = Model(4)
    offload.mark_module(model.blocks[0], "keep")
    offload.mark_module(model.blocks[1].mlp[2], "offload")
    policy = offload.Policy(keep="blocks.1.**", min_bytes=1)
    with offload.Scheduler(model, "blocks.*", policy=policy, lag=0) as scheduler:
        one_step(model)
    assert not any(n.startswith("blocks.0.") for n in moved(scheduler))
    assert {n for n in moved(scheduler) if n.startswith("blocks.1.")} == {"blocks.1.mlp.2.x"}


def test_device_bytes_are_let_go_and_the_books_add_up() -> None:
    """Law 14: what is released and dead is off the device; what is held elsewhere is listed."""
    storages: dict[str, WeakStorage] = {}
    held = []

    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
            y = x * 2
            ctx.save_for_backward(y)
            storages[name] = WeakStorage(y.untyped_storage())
            if name == "b":
                held.append(y)
            return x + y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            ctx.saved_tensors  # noqa: B018
            return dy * 3, None

    class Layer(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: Tensor) -> Tensor:
            return Save.apply(x, self.name)

    model = nn.Sequential(*map(Layer, "abcdef"))
    with offload.Scheduler(model, "*", policy=ALL, lag=1) as scheduler:
        scheduler._scope.mover.schedule.small = 0
        y = model(inputs())
        gone = {name for name, storage in storages.items() if storage.expired()}
        assert gone == set("acde")  # b is held, f not yet let go
        assert len(scheduler.report().held) == 1  # b
        y.sum().backward()


@pytest.mark.parametrize("when", ["copy", "release", "backward"])
def test_law_07_writes_in_place_are_seen_and_told_apart(when: str) -> None:
    """The copy starts when its layer ends, the release comes two layers later."""

    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.h = x * 2
            y = self.h.sin()
            if when == "copy":
                self.h.add_(1)
            return y

    model = nn.Sequential(Writes(), *(nn.Tanh() for _ in range(5)))
    if when == "release":

        def write(*_: Any) -> None:
            model[0].h.add_(1)

        model[1].register_forward_pre_hook(write)
    with offload.Scheduler(model, "*", policy=ALL, lag=2) as scheduler:
        y = model(inputs())
        assert facts(scheduler)["out_bytes"] > 0
        if when == "backward":
            model[0].h.add_(1)
    first = "" if when == "backward" else f", before its {when}"
    said = rf"'0\.MulBackward0\.0' of Writes was modified in place{first} before its backward ran"
    with pytest.raises(InPlaceError, match=said):
        y.sum().backward()


# --- attaching


@pytest.mark.parametrize("layers", ["blocks.*", "blocks.*.mlp", "blocks.*.mlp.1"])
def test_hooks_come_and_go_and_copies_have_none_of_them(layers: str) -> None:
    model = Model(2)
    scheduler = offload.Scheduler(model, layers, policy=ALL).attach()
    with pytest.raises(FuseOpsError, match="attached already"):
        scheduler.attach()
    one_step(model)
    before = scheduler.report().moved_bytes
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        one_step(twin)
    assert scheduler.report().moved_bytes == before
    y = model(inputs())
    scheduler.detach()
    assert not model.blocks[0]._forward_hooks and not model.blocks[0]._forward_pre_hooks
    y.sum().backward()  # a graph from before finds what it saved
    one_step(model)
    assert top_saved_tensor_hooks() is None


@pytest.mark.parametrize("options", [{}, {"peak": 1}], ids=["policy", "peak"])
def test_a_copy_fuses_as_a_model_that_no_scheduler_was_on(options: dict[str, Any]) -> None:
    """Hooks that did nothing any more stayed on it: its blocks ran alone, and nothing could take the hooks off."""

    def block() -> nn.Module:
        ops = fo.ops.RMSNorm(D), fo.ops.Linear(D, 2 * D, bias=False), fo.ops.SwiGLU()
        return fo.Residual(*ops, fo.ops.Linear(D, D, bias=False))

    model, x = fo.Sequential(block(), block()), torch.randn(3, D)
    scheduler = offload.Scheduler(model, "*", **options).attach()
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    scheduler.detach()
    plain = model.plan(x)
    for twin in twins:
        twin(x)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in twin.modules())
        assert not twin.plan(x).diff(plain)


def test_a_hook_of_the_users_own_raises_in_a_copy_as_elsewhere() -> None:
    def refuse(module: nn.Module, *given: Any) -> None:
        raise ZeroDivisionError

    model = Model(1)
    with offload.Scheduler(model, "blocks.*", policy=ALL):
        twin = copy.deepcopy(model)
    twin.blocks[0].register_forward_pre_hook(refuse, prepend=True)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            one_step(twin)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, pickle.dumps, lambda s: torch.save(s, io.BytesIO())]
)
def test_a_scheduler_is_not_copied(copied: Callable[[Any], Any]) -> None:
    with pytest.raises(FuseOpsError, match=r"an offload\.Scheduler is not copied or pickled"):
        copied(offload.Scheduler(Model(1), "blocks.*"))


@pytest.mark.parametrize("inner", ["blocks.*", "blocks.*.mlp"])
def test_of_two_schedulers_the_outer_one_decides_and_the_other_says_so(inner: str) -> None:
    model, plain = Model(3), Model(3)
    aside = offload.Scheduler(model, inner, policy=ALL)
    with aside, offload.Scheduler(model, "blocks.*", policy=ALL) as scheduler:
        for m in (model, plain):
            one_step(m)
        assert all(map(torch.equal, grads(model), grads(plain)))
    assert moved(scheduler) and not moved(aside) and facts(aside)["steps"] == 0
    assert aside.report().summary().startswith("Scheduler: moved 0 B in 0 copies")
    assert {e.reason for e in aside.report().entries} == {"another scheduler around it decides"}


def test_graphs_that_are_held_are_counted_and_later_steps_exact() -> None:
    model, plain, held = Model(3), Model(3), []
    with offload.Scheduler(model, "blocks.*", policy=ALL) as scheduler:
        for step in range(1, 4):
            held.append(model(inputs(step)))
            for m in (model, plain):
                one_step(m)
            assert all(map(torch.equal, grads(model), grads(plain)))
            assert facts(scheduler)["calls_alive"] == 3 * step and facts(scheduler)["steps"] == 1
        held.clear()
        assert facts(scheduler)["calls_alive"] == 0


@given(st.permutations([0, 0, 1, 1, 2, 2, 2, 2]))
def test_schedulers_come_and_go_in_any_order(turns: list[int]) -> None:
    """What each puts on a layer is taken off again, from below others too, and an attached one is followed."""
    model, plain = Model(2), Model(2)
    plans: list[Any] = [None, {"blocks.1": "recompute"}, {"blocks.1": "recompute"}]
    schedulers = [offload.Scheduler(model, "blocks.*", plan=plan) for plan in plans]
    before = [{*vars(block)} for block in model.blocks]
    attached = set[int]()
    for k in turns:
        (schedulers[k].detach if k in attached else schedulers[k].attach)()
        attached ^= {k}
        for twin in (model, copy.deepcopy(model)):
            twin.blocks[1].forwards = plain.blocks[1].forwards = 0
            one_step(twin)
            one_step(plain)
            assert all(map(torch.equal, grads(twin), grads(plain)))
            model.zero_grad()
            plain.zero_grad()
            again = twin is model and bool(attached & {1, 2})
            assert (twin.blocks[1].forwards > plain.blocks[1].forwards) == again
    assert [{*vars(block)} for block in model.blocks] == before


@pytest.mark.parametrize("where", ["before", "within"])
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_a_scheduler_may_be_detached_inside_of_a_layer(
    where: str, error: type[BaseException] | None
) -> None:
    """What it has on the thread goes with the call of that layer."""
    model, plain = Model(3), Model(3)
    scheduler = offload.Scheduler(model, "blocks.*", policy=ALL).attach()

    def detached(*about: Any) -> None:
        hook.remove()
        scheduler.detach()
        if error is not None:
            raise error

    inside = model.blocks[1].mlp if where == "within" else model.blocks[1]
    hook = inside.register_forward_pre_hook(detached)
    for m in (model, plain):
        with nullcontext() if error is None or m is plain else pytest.raises(error):
            one_step(m)
    assert top_saved_tensor_hooks() is None and not modules.thread.watchers
    for attach in (False, True, True):
        if attach:
            scheduler.attach()
        model.zero_grad()
        plain.zero_grad()
        one_step(model)
        one_step(plain)
        assert all(map(torch.equal, grads(model), grads(plain)))
        scheduler.detach()


def test_explain_lists_what_the_layers_of_a_scheduler_save_and_moves_nothing() -> None:
    model = Model(3)
    expected = str(fo.explain(model, inputs()))
    with offload.Scheduler(model, "blocks.*", policy=ALL) as scheduler:
        assert str(fo.explain(model, inputs())) == expected
        assert facts(scheduler)["steps"] == 0 and not scheduler.report().moved_bytes


def test_scopes_around_go_first() -> None:
    model = Model(3)
    with (
        offload.Scheduler(model, "blocks.*", policy=ALL) as scheduler,
        offload.keep() as kept,
    ):
        one_step(model)
    assert moved(scheduler) == set() and kept.report().kept_bytes > 0
    assert "an offload scope around it decides" in {e.reason for e in scheduler.report().entries}
    with offload.Scheduler(model, "blocks.*", policy=offload.Policy("**.mlp.0.x")), offload.keep():
        one_step(model)  # no tensor came that the glob could match


def test_scopes_inside_go_first() -> None:
    class Inner(Block):
        def forward(self, x: Tensor) -> Tensor:
            with offload.keep():
                return super().forward(x)

    model = nn.Sequential(Block(), Inner(), Block(), Block())
    with offload.Scheduler(model, "*", policy=ALL, lag=0) as scheduler:
        model(inputs()).sum().backward()
    assert moved(scheduler) and not any(n.startswith("1.") for n in moved(scheduler))


def test_a_layer_is_driven_by_hand() -> None:
    model, plain = Model(3), Model(3)
    with offload.Scheduler(model, "blocks.*", policy=ALL, manual=True) as scheduler:
        y = model(inputs())
        assert facts(scheduler)["out_bytes"] == 0
        for layer in ("blocks.0", "blocks.1"):
            scheduler.offload_layer(layer)
        assert facts(scheduler)["out_bytes"] > 0 and facts(scheduler)["back_bytes"] == 0
        first = scheduler.release_layer("blocks.0")
        scheduler.reload_layer(first)
        assert facts(scheduler)["back_bytes"] > 0
        scheduler.release_layer("blocks.1")
        y.sum().backward()
        one_step(plain)
        assert all(map(torch.equal, grads(model), grads(plain)))
        with pytest.raises(FuseOpsError, match="no call whose saved tensors are alive"):
            scheduler.offload_layer("blocks.0")
        with pytest.raises(FuseOpsError, match=r"no layer 'blocks\.7'"):
            scheduler.release_layer("blocks.7")
    with pytest.raises(FuseOpsError, match="manual=True"):
        offload.Scheduler(model, "blocks.*").offload_layer("blocks.0")


WRONG = [
    *(("host", value) for value in ("11 parsecs", -1, True, 1.5)),
    *(("layers", value) for value in (3, None, [], [nn.Tanh()])),
    *(("lag", value) for value in (-1, "2", True)),
    *(("ahead", 0), ("policy", "all"), ("hardware", "h200")),
    *(("plan", value) for value in ("plan.json", {"blocks.0.x": "move"}, 3)),
]


@pytest.mark.parametrize("name, value", WRONG, ids=str)
def test_odd_arguments_are_refused(name: str, value: Any) -> None:
    with pytest.raises(FuseOpsError, match=name):
        offload.Scheduler(Model(), **{"layers": "blocks.*", name: value})


def test_without_a_plan_there_is_nothing_to_match() -> None:
    with pytest.raises(FuseOpsError, match="follows no plan"):
        offload.Scheduler(Model(), "blocks.*").assert_matched()


@pytest.mark.parametrize(
    "field, value",
    [
        ("fraction", 2.0),
        ("fraction", "half"),
        ("offload", None),
        ("min_bytes", -1),
        ("layer_bytes", "1"),
        ("where", 3),
        ("offload", [""]),
    ],
)
def test_odd_policies_are_refused(field: str, value: Any) -> None:
    with pytest.raises(FuseOpsError, match=field):
        offload.Policy(**{field: value})


def test_start_offload_is_an_earlier_point_and_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy waits for the point at which it was said, not for the one at which x is saved."""
    said: list[Event] = []
    waited: list[Event] = []

    class Noting(LazyLanes):
        def wait(self, lane: Lane, event: Event) -> None:
            if lane == "d2h":
                waited.append(event)
            super().wait(lane, event)

    class Early(Block):
        def forward(self, x: Tensor) -> Tensor:
            offload.start_offload(x)
            said.append(marks.ready_event(x.untyped_storage(), x._version))
            return super().forward(x)

    monkeypatch.setattr("fuseops.offload.scheduler.make_lanes", lambda *_: Noting(lambda n: n - 1))
    model = nn.Sequential(*(Early() for _ in range(4)))
    plain = copy.deepcopy(model)
    with offload.Scheduler(model, "*", policy=ALL, lag=1) as scheduler:
        scheduler._scope.mover.schedule.small = 0
        for step in range(3):
            said.clear()
            waited.clear()
            for m in (model, plain):
                m(inputs()).sum().backward()
            assert all(map(torch.equal, grads(model), grads(plain)))
            first = said[: 4 if step == 0 else 3]  # the last layer stays, once that is known
            assert None not in first and {e.serial for e in first} <= {e.serial for e in waited}


PLACES: dict[
    str, tuple[list[str], str, Any]
] = {  # of head, layers and the inputs of the first -> of the lanes
    "one GPU": (["cuda:1", "cuda:1", "cuda:1"], "cuda:1", "cuda:1"),
    "no GPU": (["cpu", "cpu", "cpu"], "cpu", "cpu"),
    "a head on the CPU": (["cpu", "cuda:0", "cuda:0"], "cuda:0", "cuda:0"),
    "a layer on the CPU": (["cpu", "cpu", "cuda:0"], "cuda:0", "cuda:0"),
    "parameters on the CPU": (["cpu", "cpu", "cpu"], "cuda:0", "cuda:0"),
    "a head on another GPU": (["cuda:0", "cuda:1", "cuda:1"], "cuda:1", "cuda:1"),
    "layers on two GPUs": (["cuda:0", "cuda:0", "cuda:1"], "cuda:0", None),
    "inputs of another GPU": (["cuda:0", "cuda:1", "cuda:1"], "cuda:0", "cuda:1"),
    "nothing on a device": (["meta", "meta", "meta"], "meta", "cpu"),
}


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="fakes of a second GPU: two, or none")
@pytest.mark.parametrize("places, inputs, expected", PLACES.values(), ids=PLACES)
def test_the_lanes_are_of_the_device_that_the_layers_run_on(
    places: list[str], inputs: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lanes(CpuLanes):
        def __init__(self, device: torch.device) -> None:
            super().__init__()
            self.device = device

    monkeypatch.setattr("fuseops.offload.scheduler.make_lanes", lambda device, host: Lanes(device))
    with FakeTensorMode():
        model = nn.Sequential(*(nn.LayerNorm(2, device=place) for place in places))
        x = torch.empty(2, 2, device=inputs)
    scheduler = offload.Scheduler(model, ["1", "2"])
    if expected is None:
        with pytest.raises(FuseOpsError, match=r"1 on cuda:0, 2 on cuda:1\), and a"):
            scheduler._scope._mover_for((x,))
    else:
        assert scheduler._scope._mover_for((x,)).lanes.device == torch.device(expected)


def test_a_tensor_of_another_device_stays_whatever_is_said_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Elsewhere(CpuLanes):
        def __init__(self) -> None:
            super().__init__()
            self.device = torch.device("cpu", 1)

    monkeypatch.setattr("fuseops.offload.scheduler.make_lanes", lambda *_: Elsewhere())
    model = nn.Sequential(Block(), Block())
    with offload.Scheduler(model, "*", policy=ALL) as scheduler:
        x = inputs()
        offload.mark_offload(x)
        model(x).sum().backward()
    report = scheduler.report()
    assert report.moved_bytes == 0
    assert "on cpu, in a scheduler that moves from cpu:1" in {e.reason for e in report.entries}


@pytest.mark.parametrize("small", [0, 1 << 22])
@pytest.mark.parametrize("bundle", [1, 1 << 25])
def test_what_the_host_has_no_room_for_is_counted_once_and_forgotten(
    small: int, bundle: int
) -> None:
    """Whether it learns that when it is saved or later, with others."""
    model, plain = Model(), Model()
    with offload.Scheduler(model, "blocks.*", policy=ALL, host=1) as scheduler:
        schedule = scheduler._scope.mover.schedule
        schedule.small, schedule.bundle_bytes = small, bundle
        model(inputs()).sum().backward()
        plain(inputs()).sum().backward()
        assert all(map(torch.equal, grads(model), grads(plain)))
        report = scheduler.report()
        assert (report.moved_bytes, report.moved_count, report.host_bytes) == (0, 0, 0)
        assert {e.decision for e in report.entries} <= {"kept", "shared"}
    scheduler._scope.mover.collect_dead()
    assert not schedule._live
    seen = sum(entry.times for entry in report.entries)
    with offload.Scheduler(plain, "blocks.*", policy=ALL) as roomy:
        plain(inputs()).sum().backward()
        assert sum(entry.times for entry in roomy.report().entries) == seen


def test_a_report_says_which_layers_run_unfused() -> None:
    model = nn.Sequential(
        fo.Sequential({"fc": fo.ops.Linear(4, 4), "act": fo.ops.SiLU()}),
        fo.Sequential({"fc": fo.ops.Linear(4, 4)}),
        fo.ops.RMSNorm(4),
        nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
    )
    with offload.Scheduler(model, ["0.fc", "1", "1.fc", "2", "3.*"], plan={}) as scheduler:
        model(torch.randn(2, 4, requires_grad=True)).sum().backward()
    missed = {e.name: e.reason for e in scheduler.report().entries if e.decision == "missed"}
    assert missed.keys() == {"0.fc"} and "runs unfused" in missed["0.fc"]
