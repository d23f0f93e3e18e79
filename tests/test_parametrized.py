"""A parametrization runs once a forward, from the first call on, and leaves no plans behind."""

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops.ops import scopes
from fuseops.ops.op import Op
from fuseops.testing.catalogue import Wanted, entry, exported
from fuseops.testing.strategies import Split, side_tensors


class Noise(nn.Module):
    """w plus random numbers; counts its calls."""

    calls = 0

    def forward(self, w: Tensor) -> Tensor:
        Noise.calls += 1
        return w + torch.randn_like(w)


def instance(op: type[Op]) -> Op:
    return entry(op).make(Wanted(lambda *of: of[0], 8, 8, 4, 2)).double()


PARAMETERS = [(op, name) for op in exported() for name, _ in instance(op).named_parameters()]
one_of_each = pytest.mark.parametrize(("op", "name"), PARAMETERS)


def case(op: type[Op]) -> tuple[Op, Tensor, dict[str, Tensor]]:
    made, x = instance(op), torch.randn(12, 8, dtype=torch.float64)
    return made, x, side_tensors([made], made.reads, x, Split((3, 3, 3, 3), 0), 0)


def run(model: nn.Module, x: Tensor, side: dict[str, Tensor]) -> Tensor:
    out = model(x, **side)
    return out if isinstance(out, Tensor) else out[0]


@one_of_each
@pytest.mark.parametrize("inside", [False, True])
def test_it_runs_once_a_forward_from_the_first_on(op: type[Op], name: str, inside: bool) -> None:
    made, x, side = case(op)
    parametrize.register_parametrization(made, name, Noise())
    model = fo.Sequential(made) if inside else made
    counts = []
    for _ in range(3):
        Noise.calls = 0
        run(model, x, side)
        counts.append(Noise.calls)
    assert counts == [1, 1, 1]


def test_one_parameter_of_a_group_is_computed_once_too() -> None:
    made = fo.ops.GroupedLinear(4, 8, 8, bias=False, packed=False).double()
    parametrize.register_parametrization(made, "weight2", Noise())
    _, x, side = case(fo.ops.GroupedLinear)
    for _ in range(3):
        Noise.calls = 0
        made(x, **side)
        assert Noise.calls == 1


class Counted(nn.Module):
    """2 w, and how often that was computed, which compiled code counts too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, w: Tensor) -> Tensor:
        self.calls.add_(1)
        return 2 * w


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="older dynamos do not see parametrize.cached"
)
# a piece of its own, behind which another one begins
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_it_runs_once_a_forward_in_compiled_code(plain: bool, training: bool) -> None:
    torch._dynamo.reset()
    ops = [fo.ops.RMSNorm(8), fo.ops.Linear(8, 8), fo.ops.LayerNorm(8), fo.ops.Bias(8)]
    model = fo.Sequential(*ops[:2], *[nn.Tanh()] * plain, *ops[2:]).double()
    for op in ops:
        for name in [name for name, _ in op.named_parameters()]:
            parametrize.register_parametrization(op, name, Counted())  # which calls it once
    x = torch.randn(5, 8, dtype=torch.float64)
    expected = copy.deepcopy(model)(x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        with torch.set_grad_enabled(training):
            torch.testing.assert_close(compiled(x), expected if training else expected.detach())
    assert {int(calls) for calls in model.buffers()} == {1 + 3}


def test_a_random_one_is_the_same_in_a_recomputation() -> None:
    linear = fo.ops.Linear(6, 6, bias=False).double()
    parametrize.register_parametrization(linear, "weight", Noise())
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    model = fo.Sequential(linear)
    for _ in range(2):
        y = checkpoint(model, x, use_reentrant=False)
        (g,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close((g * x).sum(1), y.sum(1))  # a linear map: g x is y


@one_of_each
@pytest.mark.parametrize("weights", [None, "step"])
def test_a_copy_has_nothing_of_the_calls_of_the_original(
    op: type[Op], name: str, weights: str | None
) -> None:
    made, x, side = case(op)
    keeps = (
        fo.recipes.Float8BlockScaling(weights="step") if weights else fo.recipes.DelayedScaling()
    )
    with fo.recipe(keeps):
        run(made, x, side)  # its store is warm, its scales have a state
        parametrize.register_parametrization(made, name, Noise())
        run(made, x, side)
    copied = copy.deepcopy(made)
    assert not scopes.OF_THIS_PROCESS & copied.__dict__.keys()
    assert type(copied) is type(made) and copied.state_dict().keys() == made.state_dict().keys()


def test_spectral_norm_steps_as_often_as_in_torch() -> None:
    plain = nn.Linear(32, 32, bias=False).double()
    ours = fo.ops.Linear(32, 32, bias=False).double()
    ours.load_state_dict(plain.state_dict())
    x = torch.randn(4, 32, dtype=torch.float64)
    results = []
    for linear, wrap in ((plain, nn.Sequential), (ours, fo.Sequential)):
        torch.manual_seed(0)
        model = wrap(parametrizations.spectral_norm(linear))
        results.append([model(x) for _ in range(3)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


class Adapted(nn.Module):
    """A layer that PEFT adapts by `target_parameters`: registered for a forward, removed behind it."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer, self.delta = base_layer, nn.Parameter(torch.tensor(0.5))
        self.reads = getattr(base_layer, "reads", ())

    def forward(self, x: Tensor, **side: Any) -> Any:
        delta = self.delta

        class Delta(nn.Module):
            def forward(self, w: Tensor) -> Tensor:
                return w + delta

        parametrize.register_parametrization(self.base_layer, "weight", Delta())
        try:
            return self.base_layer(x, **side)
        finally:
            parametrize.remove_parametrizations(self.base_layer, "weight", leave_parametrized=False)


@pytest.mark.parametrize("op", [fo.ops.Linear, fo.ops.GroupedLinear, fo.ops.RMSNorm])
@pytest.mark.parametrize("inside", [False, True])
def test_one_that_comes_and_goes_makes_no_new_plans(op: type[Op], inside: bool) -> None:
    made, x, side = case(op)
    adapted: nn.Module = Adapted(made)
    if inside:
        adapted = fo.Sequential({"adapted": adapted})
    plans: list[Any] = []
    segments, before = set(), {*type(made).__subclasses__()}
    with scopes.watch_plans(plans.append):
        for _ in range(6):
            run(adapted, x, side).sum().backward()
            segments |= {id(segment) for segment in plans[-1].segments}
    assert len(segments) == 1 and len({id(plan) for plan in plans}) == 1
    gc.collect()
    alive = {*type(made).__subclasses__()} - before
    assert len([c for c in alive if c.__name__.startswith("Parametrized")]) <= 1
    weight = copy.deepcopy(made.weight.detach())
    expected, other = run(adapted, x, side), instance(op)
    other.load_state_dict({**made.state_dict(), "weight": weight + 0.5})
    torch.testing.assert_close(expected, run(other, x, side))
