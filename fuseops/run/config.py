"""Configuration: `configure` for the process or a model, and scopes that override both for the calls made inside."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import NoneType
from typing import Any

from torch import nn

from fuseops.arguments import instance_of, is_one_of, several, shown
from fuseops.errors import FuseOpsError, FusionMissError
from fuseops.ops import scopes
from fuseops.ops.op import Op
from fuseops.ops.paths import check_module, path_of, set_path, stripped, walk
from fuseops.ops.scopes import Override
from fuseops.plan.records import Miss
from fuseops.recipes import ByName, Recipe, Roles, Scaling
from fuseops.rules.builtin_rules import POINTWISE
from fuseops.rules.rule import NAMES, Rule

from .composed import Composed

LEVELS = ("DEBUG", "INFO", "WARNING")
PREFERENCES = ("speed", "memory")


class _Unset:
    def __repr__(self) -> str:
        return "<unset>"  # help(configure) shows it


_UNSET: Any = _Unset()


def configure(
    model: nn.Module | None = None,
    *,
    fusion: bool = _UNSET,
    recipe: Recipe | Mapping[str, Recipe | None] | None = _UNSET,
    rules: Iterable[Rule | str] = _UNSET,
    disable: Iterable[str] = _UNSET,
    prefer: str = _UNSET,
    strict: bool | Iterable[str] = _UNSET,
    strict_recipe: bool = _UNSET,
) -> None:
    """Set how calls are planned and run, for the process (no model) or for one model.

    Settings of a model belong to it: they hold in recomputation, in other threads, and in copies and slices. A later
    call replaces settings of the same name. With a model, names of saved tensors become absolute.
    The ops of a Sequential run under its settings; for other settings, put ops into a Sequential of their own.
    fusion: False runs every op by itself.
    recipe: precision of GEMM operands, None for high precision. For a model also {glob: recipe or None} over the dotted
    names of its ops: the first glob that matches counts, and ops without a match stay in high precision.
    rules: tried before the built-in ones; "pointwise" as in `fuseops.rules`.
    disable: names of rules that may not fire; a rule of your own is made before its name is given.
    prefer: "speed" (the default) or "memory", for fused ops whose faster variant has a higher peak; `explain()` shows
    these. Both give the same bits, except for the order of sums that `explain()` names.
    strict: True, or names of rules: a miss of one raises, as inside of `fusion(strict=...)`. (Only a scope, which ends,
    also asks that the rules have fired.)
    strict_recipe: as inside of `recipe(..., strict=True)`.
    Raises FuseOpsError for a value of the wrong type, a name that no rule has, and a recipe that no op of the model
    would follow.
    """
    if isinstance(recipe, Mapping):
        recipe = _recipe_by_name(model, recipe)
    override = _override(
        "fo.configure",
        fusion=fusion, recipe=recipe, rules=rules, disable=disable, prefer=prefer, strict=strict,
        strict_recipe=strict_recipe,
    )  # fmt: skip
    if model is None:
        scopes.process.settle(_merged(scopes.process.token, override))
        return
    check_module("configure(model, ...)", model)
    if "recipe" in (given := dict(override)):
        _check_followed(model, given["recipe"])
    set_root(model)
    for _, module in walk(model):
        if isinstance(module, (Composed, Op)):
            module.__dict__.update(scopes.settled(_merged(module._settings, override)))


def _recipe_by_name(model: nn.Module | None, recipe: Mapping[str, Recipe | None]) -> Recipe:
    if model is None:
        raise FuseOpsError(
            "configure(recipe={glob: recipe}) needs the model whose ops the globs name: configure(model, recipe=...)."
        )
    check_module("configure(model, ...)", model)
    ops = (stripped(path) for path, op in walk(model) if isinstance(op, Op) and op.multiplies)
    return ByName.of(recipe, sorted(ops))


def _check_followed(model: nn.Module, recipe: Recipe | None) -> None:
    """Raise FuseOpsError for a recipe where no op of the model could follow it."""
    ops = [op for _, op in walk(model) if isinstance(op, Op)]
    if recipe is None or any(op.multiplies for op in ops):
        return
    why = "; ".join({f"{type(op).__name__}: {op.stays_high}": 0 for op in ops if op.stays_high})
    raise FuseOpsError(
        f"configure(model, recipe={type(recipe).__name__}(...)) would change nothing: no op in {type(model).__name__} "
        f"multiplies under a recipe{f' ({why})' if why else ''}. Those that do are fuseops.ops.Linear and "
        "GroupedLinear, and experts that hf.apply has replaced before."
    )


def _merged(token: int, override: Override) -> scopes.SettingsLayer:
    """The layer of the overrides of a token, with those of the same names replaced by `override`."""
    values = {name: value for entry in scopes.overrides(token) for name, value in entry}
    values |= dict(override)
    return scopes.layer_over(None, tuple(sorted(values.items())))


def set_root(model: nn.Module) -> None:
    """Make names of saved tensors absolute: relative to `model`, with the prefixes of wrappers stripped."""
    for path, module in walk(model):
        if isinstance(module, (Composed, Op)):
            path = stripped(path)
            parent = path  # saved names of an op are relative to its parent
            if isinstance(module, Op):
                parent = path.rpartition(".")[0]
                if path_of(module) != path:
                    module.__dict__.pop("_runner", None)  # it has the op's old name
            set_path(module, path, f"{parent}." if parent else "")


def _override(caller: str, **values: Any) -> Override:
    """The settings that are given.   caller: what they are given to.  Raises FuseOpsError for those of another type."""
    given = {name: value for name, value in values.items() if value is not _UNSET}
    for name in ("fusion", "strict_recipe"):
        instance_of(given.get(name, True), bool, f"{caller}({name}=...)", "True or False")
    if not isinstance(given.get("strict", True), bool):
        given["strict"] = _names(f"{caller}(strict=...)", given["strict"], "True, False or ")
    if not is_one_of(given.get("prefer", "speed"), PREFERENCES):
        raise FuseOpsError(
            f"{caller}(prefer=...) expects one of {PREFERENCES}, got {shown(given['prefer'])}."
        )
    if given.get("recipe") is not None and not isinstance(given["recipe"], Recipe):
        raise _recipe_error(f"{caller}(recipe=...)", given["recipe"])
    if "rules" in given:
        expected = '[fuseops.Rule(...), "pointwise"]'
        what = f"{caller}(rules=...)"
        items = several(given["rules"], Rule | str, what, expected)
        given["rules"] = tuple(_rule(what, item) for item in items)
    if "disable" in given:
        given["disable"] = _names(f"{caller}(disable=...)", given["disable"])
    return tuple(sorted(given.items()))


def _recipe_error(what: str, given: Any) -> FuseOpsError:
    """The error for a value that is no recipe, with a hint where the intention is clear."""
    meant = ""
    if isinstance(given, type) and issubclass(given, Recipe):
        meant = f" Call it: {given.__name__}()."
    elif isinstance(given, Mapping):
        meant = " Globs name ops of a model: fuseops.configure(model, recipe={glob: recipe})."
    elif isinstance(given, Roles | Scaling):
        meant = " Formats by role are those of fuseops.recipes.ByRole(function)."
    text = f"{what} expects a fuseops.recipes.Recipe or None, got {shown(given)}."
    return FuseOpsError(text + meant)


def _rule(what: str, item: Rule | str) -> Rule:
    """A rule, or the optional built-in rule of that name."""
    if isinstance(item, Rule):
        return item
    if item != POINTWISE.name:
        raise FuseOpsError(
            f'{what} expects [fuseops.Rule(...), "{POINTWISE.name}"], what is on by choice by its name, got {item!r}.'
        )
    return POINTWISE


def _names(what: str, names: Iterable[str], others: str = "") -> frozenset[str]:
    """The names of rules in a setting.   others: what else it may be, for the message

    Raises FuseOpsError for a name that no rule has. Whether that rule is in force is known when a call is planned:
    scopes around it, and the settings of its model, have rules of their own.
    """
    given = several(
        (names,) if isinstance(names, str) else names, str, what, f"{others}names of rules"
    )
    unknown = sorted({*given} - NAMES)
    if unknown:
        raise FuseOpsError(
            f"{what} names {unknown}, and no rule is called so; there are {sorted(NAMES)}. A rule of your own is made "
            "before its name is given."
        )
    return frozenset(given)


def fusion(
    enabled: bool | None = None,
    *,
    disable: Iterable[str] = (),
    strict: bool | Iterable[str] = False,
) -> scopes.scope | scopes.GeneratorScope[None]:
    """Switch fusion off (or on), disable rules by name, or require that rules fire, for the calls made inside.

    enabled: without it `fusion()` switches fusion on, and with `disable` or `strict` fusion stays as it is outside.
    strict: names of rules that must fire: a condition or overlap miss of one raises FusionMissError at once, and so
    does leaving the scope without the rule having fired. True: every condition miss raises.
    """
    instance_of(enabled, (bool, NoneType), "fo.fusion(enabled=...)", "True, False or None")
    values = dict(_override("fo.fusion", disable=disable, strict=strict))
    wanted: bool | frozenset[str] = values["strict"]
    values = {name: value for name, value in values.items() if value}
    if enabled is not None or not values:
        values["fusion"] = enabled is None or enabled
    override = tuple(sorted(values.items()))
    scope = scopes.scope(override)
    if isinstance(wanted, bool):
        return scope
    return scopes.GeneratorScope(scope.shown_as, partial(_require_fired, scope, wanted))


@contextmanager
def _require_fired(scope: scopes.scope, wanted: frozenset[str]) -> Iterator[None]:
    """A scope that raises FusionMissError on leaving unless each of these rules has fired."""
    fired: set[str] = set()
    misses: dict[str, Miss] = {}

    def watch(plan: Any) -> None:
        fired.update(s.rule for s in (*plan.forward, *plan.backward) if s.rule)
        misses.update({m.rule: m for m in plan.misses})

    with scope, scopes.watch_plans(watch):
        yield
    unfired = sorted(wanted - fired)
    if unfired:
        nearest = "; ".join(
            f"{misses[n].reason} at {misses[n].span}" for n in unfired if n in misses
        )
        raise FusionMissError(
            f"strict rules {unfired} never fired in this scope. {nearest or 'No call came near them.'}"
        )


def rules(*extra: Rule | str) -> scopes.scope:
    """Try these rules before all others, for the calls made inside.

    "pointwise" is a rule of fuseops that is off by default: elementwise ops in a row, level-1 ops included, that no
    other rule takes become one kernel each way, which torch's inductor generates at the first call.
    """
    return scopes.scope(_override("fo.rules", rules=extra))


def recipe(value: Recipe | None, *, strict: bool = False) -> scopes.scope:
    """Run GEMMs in the precision of `value` (None: high precision), for the calls made inside.

    On Hopper, layers that FP8 is not predicted to make faster stay in high precision; `explain()` says which, and why.
    strict: they are quantized too, and an op that would ignore the recipe (it works on DTensors, or under
    `fo.reference()`, or is a dense MLP or an adapter after `hf.apply`) raises FusionMissError.
    """
    instance_of(strict, bool, "fo.recipe(strict=...)", "True or False")
    if not isinstance(value, Recipe | None):
        raise _recipe_error("fo.recipe(value)", value)
    return scopes.scope((("recipe", value), ("strict_recipe", strict)))


def reference() -> scopes.scope:
    """Run every op as plain differentiable torch, for double backward, torch.func, export, and to check a `bwd`."""
    return scopes.scope((("reference", True),))


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For `checkpoint(..., use_reentrant=False, context_fn=fuseops.checkpoint_contexts)`: a recomputation re-enters
    the scopes that this was called in.
    """
    return ExitStack(), scopes.RestoredScopes(scopes.current().layer)


def from_environment() -> None:
    """Read FUSEOPS_FUSION, FUSEOPS_DISABLE and FUSEOPS_LOG once, at import, and check FUSEOPS_NVTX."""
    environ, values = os.environ, dict[str, Any]()
    switch = environ.get("FUSEOPS_FUSION", "1")
    if switch not in ("0", "1"):
        raise FuseOpsError(f"FUSEOPS_FUSION={switch!r}: expected 0 or 1.")
    if switch == "0":
        values["fusion"] = False
    if (nvtx := environ.get("FUSEOPS_NVTX", "0")) not in ("0", "1"):  # read by ranges.py
        raise FuseOpsError(f"FUSEOPS_NVTX={nvtx!r}: expected 0 or 1.")
    if environ.get("FUSEOPS_DISABLE"):
        # names of rules that are not made yet, too: the first plan looks whether there are such
        names = (name.strip() for name in environ["FUSEOPS_DISABLE"].split(","))
        values["disable"] = frozenset(name for name in names if name)
    if values:
        scopes.process.settle(scopes.layer_over(None, tuple(sorted(values.items()))))
    level = environ.get("FUSEOPS_LOG", "").upper()
    if level:
        if level not in LEVELS:
            raise FuseOpsError(
                f"FUSEOPS_LOG={environ['FUSEOPS_LOG']!r}: expected one of {', '.join(LEVELS).lower()}."
            )
        logger = logging.getLogger("fuseops")
        logger.setLevel(level)
        logger.addHandler(logging.StreamHandler())
