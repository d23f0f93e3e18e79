"""An op's store of quantized weights is found here, and invalidated after weights have changed."""

from __future__ import annotations

from typing import Any

from torch import nn

from fuseops.recipes.scales import ScaleState, advance
from fuseops.recipes.store import WeightStore

from .op import Op
from .paths import PARAMETER_SOURCE, check_module, walk
from .scopes import SCALES, STORE
from .stored import stored_in


def store_of(op: Op[Any]) -> WeightStore:
    """The store of an op."""
    store: WeightStore | None = op.__dict__.get(STORE)
    parameters = _parameters_of(op)
    if store is None or store.parameters is not parameters:
        store = op.__dict__[STORE] = WeightStore(parameters)
    store.stored = stored_in(op)
    return store


def scales_of(op: Op[Any]) -> ScaleState:
    """The state of an op's scales under a recipe that has one."""
    state: ScaleState | None = op.__dict__.get(SCALES)
    parameters = _parameters_of(op)
    if state is None or state.buffers is not op._buffers or state.parameters is not parameters:
        state = op.__dict__[SCALES] = ScaleState(op._buffers, parameters)
    return state


def _parameters_of(op: Op[Any]) -> dict[str, Any]:
    """The op's parameters by name: its own, or those of the module that it stands in for."""
    found: dict[str, Any] = op.__dict__.get(PARAMETER_SOURCE, op._parameters)
    return found


def weights_changed(model: nn.Module) -> int:
    """Drop the quantized weights of every op of `model`, and advance its scales as after a step.   -> bytes dropped

    Call it after writes that neither an optimizer's step nor the version of a parameter shows: through
    `parameter.data`, by `torch._foreach_mul_` and its like over the DTensors of FSDP2 (an average of weights, say), by
    a kernel of your own, by a wrapper that copies into its parameters' memory. The next read quantizes the weight
    again. Weights that are stored in a format are quantized from their masters at once, in place.
    Raises FuseOpsError for something that is no module.
    """
    check_module("weights_changed(model)", model)
    modules = [module for _, module in walk(model)]
    states = (module.__dict__.get(SCALES) for module in modules)
    advance([state for state in states if state is not None])
    for module in modules:
        if (weight := stored_in(module)) is not None:
            weight.quantize_master()
    return drop_quantized_weights(model)


def drop_quantized_weights(model: nn.Module) -> int:
    """Drop the quantized weights of every op of `model`; the next read quantizes again.   -> bytes dropped"""
    stores = [m.__dict__[STORE] for _, m in walk(model) if STORE in m.__dict__]
    dropped = sum(store.nbytes for store in stores)
    for store in stores:
        store.drop()
    return dropped
