"""explain: runs a forward once, and reports what fused, what did not and why, and what was saved.

The run is real, since only that shows what plain modules save, and the plan for the current shapes and settings. The
model is restored: random states and what modules hold come back, buffers are replaced by copies, the graph is dropped,
and hooks are removed. Parameters are only read.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fuseops import torch_private
from fuseops.observe.held import contents_restored, held_restored, held_tensors, rng_restored
from fuseops.observe.labels import Labels
from fuseops.observe.observer import Observer
from fuseops.observe.rehearse import not_counted, peak_of_step
from fuseops.observe.saved import SavedLedger, storages, tensors_by_owner
from fuseops.observe.untouched import reshard_after, restore_last_settings, restore_values
from fuseops.ops import names, scopes
from fuseops.ops.op import Op
from fuseops.ops.paths import check_module, path_of, stripped, walk
from fuseops.ops.stored import sync_masters
from fuseops.plan.records import Planned
from fuseops.run.composed import Composed
from fuseops.run.config import set_root
from fuseops.run.sides import returned_names

from .assemble import notes_alone, plan_from
from .explanation import Explanation, FusionPlan


def explain(model: nn.Module, *args: Any, **kwargs: Any) -> Explanation:
    """What every Sequential in `model(*args, **kwargs)` fused, what it did not and why, and what it
    saved: text, which a notebook shows as a page with drawings.

    Runs the forward once, in the grad mode, autocast and scopes of the caller; the model and the
    random states are left as they were. Names of saved tensors become absolute, relative to
    `model`.
    """
    return Explanation(plans(model, *args, **kwargs))


def plans(model: nn.Module, *args: Any, **kwargs: Any) -> list[FusionPlan]:
    """The plan of every Sequential that runs inside no other one, in order; those inside are in
    `.nested`.

    What is saved outside of all of them comes last, as a plan without spans. The `saved_bytes` add
    up to the model's.
    """
    check_module("explain(model, ...)", model)
    if not isinstance(model, (Composed, Op)) and not _path_in_root(model):
        set_root(model)  # names are absolute, unless a larger root was seen before
    return _observe(model, args, kwargs)


def plan_of(
    sequential: Composed, x: Any, *args: Any, returns: Iterable[str] | None = (), **side: Any
) -> FusionPlan:
    """The plan of one call of a Sequential."""
    args, side = (x, *args), {**side, "returns": returned_names(returns)}
    plan = _observe(sequential, args, side)[0]
    peak = peak_of_step(sequential, args, side)
    if peak is None:
        return plan
    notes = (*plan.notes, *not_counted())
    return replace(plan, temporaries=peak - plan.saved_bytes, rehearsed=True, notes=notes)


def _path_in_root(model: nn.Module) -> str:
    """The path of `model` in the root that was seen before; "" where it is the root, or none was seen."""
    for path, module in model.named_modules():
        known, own = path_of(module), stripped(path)
        if known is not None:
            larger = known != own and f".{known}".endswith(f".{own}" if own else "")
            return known.removesuffix(own).rstrip(".") if larger else ""
    return ""


def _joined(*parts: str) -> str:
    return ".".join(filter(None, parts))


def _observe(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[FusionPlan]:
    prefix = _path_in_root(model)
    paths = {id(m): _joined(prefix, stripped(path)) for path, m in walk(model)}
    observer = Observer(model, paths)
    ledger = SavedLedger(observer.where, Labels(paths))
    with ExitStack() as undo:
        undo.enter_context(rng_restored(model))
        undo.enter_context(held_restored(model))
        buffers = undo.enter_context(_copied_buffers(model))
        undo.enter_context(restore_values(held_tensors(model)))
        undo.enter_context(reshard_after(model))
        undo.enter_context(restore_last_settings(model))
        undo.enter_context(_force_eager())
        with names.observe(), ledger.hooks(), observer.watching():
            outputs = model(*args, **kwargs)
        parameters = {
            storage: _joined(paths[id(module)], name)
            for module in model.modules()
            for name, p in module.named_parameters(recurse=False)
            for storage, _ in storages(p)
        }
        saved = tensors_by_owner(ledger, parameters, buffers)
        del outputs  # frees the graph
    compiled = [paths[id(m)] for _, m in walk(model) if torch_private.is_compiled(m)]
    found = [_with_context(plan_from(call, saved), compiled) for call in observer.calls]
    root = paths[id(model)]
    outside = tuple(t for owner, t in saved if owner is None)
    notes = tuple(notes_alone(observer.alone))
    if not (found or outside or notes):
        notes = ("no fuseops.Sequential ran, and nothing is saved",)
    if outside or notes:
        found.append(FusionPlan(root, (), (), saved=outside, notes=notes))
    return found


def _with_context(plan: Planned, compiled: list[str]) -> Any:
    """The plan with notes on its context: a compiled module keeps no quantized weights, and `fo.debug()` adds the
    errors of quantization.
    """
    nested = tuple(_with_context(inner, compiled) for inner in plan.nested)
    notes, weights = [*plan.notes], plan.weights
    if weights and any(f"{plan.path}.".startswith(f"{p}." if p else "") for p in compiled):
        notes.append("compiled code quantizes the weights in each call: none are kept")
        weights = ()
    debug = scopes.current().debug
    if debug is not None:
        ops = {_joined(plan.path, operand.op) for operand in plan.operands}
        notes += [str(n) for n in (*debug.operands(), *debug.gemms()) if n.op in ops]
    return replace(plan, nested=nested, notes=tuple(notes), weights=weights)


# --- restoring the model --------------------------------------------------------------------------


@contextmanager
def _copied_buffers(model: nn.Module) -> Iterator[dict[int, str]]:
    """Replaces buffers by copies, so that the originals keep their values and their version, which a pending backward
    may check.   -> storage of each copy: name
    """
    copies: dict[int, Tensor] = {}
    found: dict[int, str] = {}
    sync_masters(model)  # else the copies would be updated
    with contents_restored(module._buffers for module in model.modules()):  # a recipe makes some
        for path, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if id(buffer) not in copies:
                    copies[id(buffer)] = buffer.detach().clone()
                module._buffers[name] = copies[id(buffer)]
                full = _joined(stripped(path), name)
                found.update((storage, full) for storage, _ in storages(copies[id(buffer)]))
        yield found


@contextmanager
def _force_eager() -> Iterator[None]:
    """Runs compiled modules eagerly, since tensors that a compiler saves have no names."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        # a hook that fires for the wrapper too sees one module more, which is no Sequential
        warnings.filterwarnings("ignore", ".*when there are global hooks on modules")
        yield
