"""Comparison of fused and unfused training steps of a module, and the rule that makes them differ."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import NoneType
from typing import Any

import torch
from torch import nn

from fuseops.arguments import check_numbers, instance_of
from fuseops.attributes import attributes_set
from fuseops.layers.sequential import Sequential
from fuseops.ops import scopes
from fuseops.ops.op import Op
from fuseops.ops.paths import check_module, walk
from fuseops.recipes import Recipe
from fuseops.rules.builtin_rules import BUILTIN_RULES

from .compare import Difference, difference, tolerance, ulp
from .step import FiredRule, StepResult, training_step
from .trees import tensors

UNFUSED = (("fusion", False), ("strict", False))
FUSED = (("fusion", True),)


def assert_fused_matches_unfused(
    model: nn.Module,
    *inputs: Any,
    tolerance: float | None = None,
    recipe: Recipe | None = None,
    **side: Any,
) -> tuple[str, ...]:
    """Run a training step of `model` with and without fusion and compare all that comes out of it.

    Outputs, the gradients of all parameters, inputs and side inputs, and the state dict: once with
    the inputs that ask for a gradient, once with all floating ones asking. Any module that holds
    Sequentials will do. Gradients, buffers and random states are afterwards as they were.

    recipe: the precision recipe that both run under; None is that of the scopes around.
    tolerance: relative, taken from the coarsest dtype involved unless given. A difference that
    rounding the inputs otherwise would cause as well is none.
    Returns the names of the rules that fired.  Raises AssertionError with the tensor, its worst
    element and the rules that fired.
    """
    expected = "a fuseops.recipes.Recipe or None"
    instance_of(recipe, (Recipe, NoneType), "assert_fused_matches_unfused(recipe=...)", expected)
    with scopes.scope((("recipe", recipe),)) if recipe is not None else nullcontext():
        found, fired = _differences(model, inputs, side, tolerance)
    if found:
        raise AssertionError(_message(model, found, fired))
    return tuple(dict.fromkeys(f.rule for f in fired))


def bisect(
    model: nn.Module, *inputs: Any, tolerance: float | None = None, **side: Any
) -> str | None:
    """The name of the rule that makes fused differ from unfused, or None where they agree.

    Every rule that fired is tried with all others disabled. Where no rule differs alone, the one
    whose absence cures the difference is named. With several culprits it is the first of them.
    """
    found, fired = _differences(model, inputs, side, tolerance)
    if not found:
        return None
    names = list(dict.fromkeys(f.rule for f in fired))
    for name in names:
        with _disabled(model, name.__ne__):
            if _differences(model, inputs, side, tolerance)[0]:
                return name
    for name in names:
        with _disabled(model, name.__eq__):
            if not _differences(model, inputs, side, tolerance)[0]:
                return name
    raise AssertionError(
        f"{_message(model, found, fired)}\n  no single rule explains it: every one of {names} agrees "
        "alone, and none cures the difference by its absence."
    )


def _disabled(model: nn.Module, which: Callable[[str], bool]) -> AbstractContextManager[None]:
    """Disable the rules whose names `which` accepts, in each module: a rule may belong to one of them only."""

    def settings(module: Sequential | Op[Any]) -> dict[str, Any]:
        token = module._settings
        known = scopes.resolve(*scopes.tokens(token)).rules
        names = frozenset(rule.name for rule in (*known, *BUILTIN_RULES) if which(rule.name))
        (layer,) = scopes.layers_of([token])
        return scopes.settled(scopes.layer_over(layer, (("disable", names),)))

    able = (m for _, m in walk(model) if isinstance(m, Sequential | Op))
    return attributes_set(
        (module, name, value) for module in able for name, value in settings(module).items()
    )


Differences = list[Difference]


def _differences(
    model: nn.Module, inputs: tuple[Any, ...], side: dict[str, Any], tol: float | None
) -> tuple[Differences, tuple[FiredRule, ...]]:
    check_module("assert_fused_matches_unfused(model, ...)", model)
    given = [t for _, t in tensors((inputs, side), "")]
    if tol is not None:
        check_numbers("assert_fused_matches_unfused", 0, tolerance=tol)
    else:
        tol = tolerance([*given, *model.parameters()])
    wants_grad = [t.requires_grad for t in given if t.is_floating_point()]
    fired: tuple[FiredRule, ...] = ()
    for all_inputs in (
        (False, True) if torch.is_grad_enabled() and not all(wants_grad) else (False,)
    ):
        found, also_fired = compare_steps(model, inputs, side, all_inputs, tol)
        fired = tuple(dict.fromkeys((*fired, *also_fired)))
        if found:
            return found, fired
    return [], fired


def compare_steps(
    model: nn.Module, inputs: tuple[Any, ...], side: dict[str, Any], all_inputs: bool, tol: float
) -> tuple[Differences, tuple[FiredRule, ...]]:
    """Compare a fused step with an unfused one.   -> differences, and the rules that fired"""

    def unfused(perturb_seed: int = 0) -> StepResult:
        with scopes.scope(UNFUSED):
            unit = ulp([*model.parameters(), *(t for _, t in tensors((inputs, side), ""))])
            return training_step(
                model, inputs, side, all_inputs=all_inputs, perturb_seed=perturb_seed, unit=unit
            )

    keys = list(model.state_dict())
    parameters = {f"parameter {n}": p.detach().clone() for n, p in model.named_parameters()}
    expected = unfused()
    with scopes.scope(FUSED):
        try:
            got = training_step(model, inputs, side, all_inputs=all_inputs)
        except Exception as error:
            raise AssertionError(
                f"fused raises {type(error).__name__}, unfused does not: {error}"
            ) from error
    found = [*_compare_state(model, keys, parameters), *_compare_results(got, expected, tol)]
    if found and all(d.worst < float("inf") for d in found):
        found = _beyond_noise(found, expected, (unfused(seed) for seed in (1, 2, 3)))
    return found, got.fired


def _compare_state(model: nn.Module, keys: list[str], parameters: dict[str, Any]) -> Differences:
    """The differences of parameters and of the keys of the state dict after a step from those before."""
    after = {f"parameter {n}": p.detach() for n, p in model.named_parameters()}
    found = [
        difference(n, after.get(n), t, 0.0, ("after", "before")) for n, t in parameters.items()
    ]
    if list(model.state_dict()) != keys:
        text = f"keys are {list(model.state_dict())} after, {keys} before"
        found.append(Difference("state_dict", text, float("inf")))
    return [d for d in found if d is not None]


def _compare_results(got: StepResult, expected: StepResult, tol: float) -> Differences:
    got_tensors = {**got.outputs, **got.grads, **got.buffers}
    expected_tensors = {**expected.outputs, **expected.grads, **expected.buffers}
    names = dict.fromkeys((*expected_tensors, *got_tensors))
    found = (
        difference(name, got_tensors.get(name), expected_tensors.get(name), tol) for name in names
    )
    return [d for d in found if d is not None]


def _beyond_noise(
    found: Differences, expected: StepResult, perturbed_steps: Iterable[StepResult]
) -> Differences:
    """The differences that exceed those caused by perturbing the last place of the inputs."""
    noise = dict.fromkeys((d.name for d in found), 0.0)
    for step in perturbed_steps:
        for d in _compare_results(step, expected, 0.0):
            if d.name in noise:
                noise[d.name] = max(noise[d.name], d.worst)
    return [d for d in found if not d.worst <= 8 * noise[d.name]]


def _message(model: nn.Module, found: Differences, fired: tuple[FiredRule, ...]) -> str:
    first, *others = found
    lines = [f"fused differs from unfused in {type(model).__name__}: {first}"]
    if others:
        lines.append(f"also in {', '.join(d.name for d in others)}")
    lines.append(f"rules that fired: {', '.join(map(str, fired)) or 'none'}")
    lines.append("fuseops.testing.bisect(model, ...) names the rule that makes the difference")
    return "\n  ".join(lines)
