"""How an op runs when no span covers it."""

from __future__ import annotations

from typing import Any

from fuseops.errors import FuseOpsError, FusionMissError
from fuseops.ops.op import Op
from fuseops.ops.paths import path_of
from fuseops.ops.scopes import Settings
from fuseops.plan.key import CallFacts
from fuseops.recipes import Recipe
from fuseops.torch_private import is_dtensor

from .splice import opaque_reason


def mode_of(
    name: str, op: Op[Any], call: CallFacts, settings: Settings, alone: bool
) -> tuple[str, str]:
    """The kind of segment for an op: "" (a node), "plain" or "call", and the reason, also where the recipe is ignored.

    Raises FusionMissError where it is, under `fo.recipe(..., strict=True)` and `fo.fusion(strict=True)`.
    """
    mode, why = _mode(op, call, settings, alone)
    recipe, strict = settings.recipe, settings.strict is True or settings.strict_recipe
    if recipe is None or mode == "call":  # its own call asks again
        return mode, why
    reason = ""
    if mode == "plain" and op.multiplies:
        reason = why = f"{why}; the recipe {type(recipe).__name__} is ignored"
    elif strict and op.ignores_recipe and not _chosen_high(op, name, recipe):
        ignored = f"the recipe {type(recipe).__name__} is ignored"
        reason = f"{op.stays_high}, so {ignored}: name others by configure(model, recipe={{glob: recipe}})"
    if strict and reason:
        raise FusionMissError(f"op {(path_of(op) or name)!r} ({type(op).__name__}): {reason}.")
    return mode, why


def _chosen_high(op: Op[Any], name: str, recipe: Recipe) -> bool:
    """Whether the recipe itself leaves an op in high precision."""
    return recipe.checked_roles_of(op, path_of(op) or name).is_high_precision


def _mode(op: Op[Any], call: CallFacts, settings: Settings, alone: bool) -> tuple[str, str]:
    why = None
    if not alone:
        why = opaque_reason(op) or ("is seen by hooks on all modules" if call.hooked else None)
    if why is not None:
        return "call", why
    sharded = [name for name, p in op._parameters.items() if is_dtensor(type(p))]
    if is_dtensor(call.x_class) or any(name not in op._local for name in sharded):
        return "plain", "works on DTensors"
    if settings.reference:
        return "plain", "reference"
    if call.compiling and (op.delays or op.accumulate_into_main_grad):
        raise FuseOpsError(
            f"{type(op).__name__} under torch.compile: a gradient that is delayed or goes to main_grad is eager "
            "only. Compile around the op, or leave delay_wgrad and accumulate_into_main_grad off."
        )
    if op.pure and call.compiling:
        return "plain", "level-1 op under torch.compile"
    if call.compiling and op.across_ranks.sends:
        return "plain", "ops of its own under torch.compile"
    return ("plain", "alias") if op.alias else ("", "")
