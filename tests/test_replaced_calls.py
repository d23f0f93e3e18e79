"""What replaces or watches the call of a module does so for an op in a Sequential, as in torch.nn.Sequential."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

import fuseops as fo


def pair() -> tuple[fo.Sequential, nn.Sequential]:
    """The same layers of fuseops and of torch, of classes that nobody else has."""
    linear, gelu = type("Linear", (fo.ops.Linear,), {}), type("GELU", (fo.ops.GELU,), {})
    ours = fo.Sequential(linear(6, 6), gelu())
    plain = nn.Sequential(nn.Linear(6, 6), nn.GELU())
    plain.load_state_dict(ours.state_dict())
    return ours.double(), plain.double()


def doubled(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **keywords: 2 * call(self, *args, **keywords)


WATCHED: list[Callable[[Callable[..., Any]], Any]] = [
    lambda seen: nn_module.register_module_forward_pre_hook(lambda m, args: seen(m, args[0])),
    lambda seen: nn_module.register_module_forward_hook(lambda m, args, y: seen(m, y)),
    lambda seen: nn_module.register_module_full_backward_pre_hook(lambda m, dy: seen(m, dy[0])),
    lambda seen: nn_module.register_module_full_backward_hook(lambda m, dx, dy: seen(m, dx[0])),
]


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("register", WATCHED)
def test_hooks_on_all_modules_see_every_op_and_its_tensors(register: Any, warm: bool) -> None:
    seen: list[list[tuple[str, Tensor]]] = []
    for model in pair():
        x = torch.linspace(-1, 1, 18, dtype=torch.float64).view(3, 6).requires_grad_()
        if warm:
            model(x)
        mine: list[tuple[str, Tensor]] = []
        handle = register(lambda m, t, mine=mine: mine.append((type(m).__name__, t.detach())))
        try:
            model(x).square().sum().backward()
        finally:
            handle.remove()
        seen.append([(name, t) for name, t in mine if name != "Sequential"])
    ours, plain = seen
    assert [name for name, _ in ours] == [name for name, _ in plain] != []
    for (_, mine), (_, theirs) in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_hook_on_all_modules_changes_what_an_op_gives_and_explain_says_so() -> None:
    ours, plain = pair()
    x = torch.ones(3, 6, dtype=torch.float64)
    before = ours(x)

    def double(m: nn.Module, args: Any, y: Tensor) -> Tensor | None:
        return 2 * y if isinstance(m, nn.Linear) else None

    handle = nn_module.register_module_forward_hook(double)
    try:
        torch.testing.assert_close(ours(x), plain(x))
        assert "is seen by hooks on all modules" in ours.explain(x)
    finally:
        handle.remove()
    assert torch.equal(ours(x), before)
    assert "hooks on all modules" not in ours.explain(x)


@pytest.fixture
def torch_call() -> Iterator[None]:
    call = nn.Module.__call__
    yield
    nn.Module.__call__ = call  # type: ignore[method-assign]


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("method", ["__call__", "forward", "fwd"])
def test_a_method_put_on_the_class_is_called(method: str, warm: bool) -> None:
    (ours, plain), x = pair(), torch.linspace(-1, 1, 18, dtype=torch.float64).view(3, 6)
    if warm:
        ours(x)
    kind = type(ours[0])
    if method == "fwd":
        fwd = kind.fwd

        def patched(self: Any, x: Tensor, **given: Any) -> fo.Out:
            out = fwd(self, x, **given)
            return out._replace(y=2 * out.y)

        kind.fwd = patched
    else:
        setattr(kind, method, doubled(getattr(kind, method)))
    expected = plain[1](2 * plain[0](x)).detach()
    torch.testing.assert_close(ours(x), expected)
    assert "through its own __call__" in ours.explain(x)


@pytest.mark.parametrize("method", ["__call__", "forward"])
def test_a_method_of_a_subclass_is_called_and_no_rule_matches_it(method: str) -> None:
    members = {method: doubled(getattr(fo.ops.Linear, method))}
    special = type("Special", (fo.ops.Linear,), members)
    model = fo.Sequential(special(6, 6), fo.ops.GELU()).double()
    x = torch.linspace(-1, 1, 18, dtype=torch.float64).view(3, 6)
    linear = nn.functional.linear(x, model[0].weight, model[0].bias)
    torch.testing.assert_close(model(x), nn.functional.gelu(2 * linear))
    plan = model.plan(x)
    assert not any(span.rule for span in plan.forward)
    assert f"overrides {method}" in str(plan)


def test_a_call_that_is_replaced_for_all_modules_is_used(torch_call: None) -> None:
    ours, _ = pair()
    seen, call = [], nn.Module.__call__

    def traced(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        seen.append(type(self).__name__)
        return call(self, *args, **keywords)

    ours(torch.ones(3, 6, dtype=torch.float64))
    nn.Module.__call__ = traced  # type: ignore[method-assign]
    ours(torch.ones(3, 6, dtype=torch.float64))
    assert seen == ["Sequential", "Linear", "GELU"]
