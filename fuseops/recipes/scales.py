"""The scaling state of delayed scaling: three buffers of each op, in its `state_dict`, over the roles (input, weight,
grad_output) and the G groups of a grouped op (G = 1 elsewhere).

fp8_amax          (3, G)     the amax since the last step
fp8_amax_history  (L, 3, G)  the amaxes of the last L steps, the latest first
fp8_scale         (3, G)     the factor of x before it is rounded; 0 before the first step
The state advances once a step: after the step of the optimizer that has the op's parameters (`_states_of`), or at
`fuseops.weights_changed`. An entry whose amax is zero or infinite stays as it is, so a second call in one step changes
nothing. A recomputation reads the same scales as its forward. Scales belong to the format and the options of a recipe:
another one has its own, from the same history. Everything stays on the device.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fuseops import kernels as K
from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.kernels.registry import opaque_call
from fuseops.kernels.replay import ALIGNED
from fuseops.kernels.scales import FLT_MAX

from .delayed import DelayedScaling

ROLES = ("input", "weight", "grad_output")
STATE = AMAX, HISTORY, SCALE = "fp8_amax", "fp8_amax_history", "fp8_scale"
ScaleFn = Callable[[Tensor], Tensor]
"""Maps the amax of a tensor, () or of groups (G,), to the factor that x is multiplied by before it is rounded."""


class NamedTensors(Protocol):
    """`NamedTensors` are the parameters of an op: its own dict, or those that another module lends."""

    def get(self, name: str, /) -> Tensor | None: ...

    def values(self) -> Iterable[Tensor | None]: ...


class ScaleState:
    """A `ScaleState` reads and updates the scaling state of one op. It looks buffers and parameters up by name at each
    use, since they may be replaced.
    """

    def __init__(self, buffers: dict[str, Tensor | None], parameters: NamedTensors) -> None:
        self.buffers, self.parameters = buffers, parameters
        self.recipe: DelayedScaling | None = None  # that the scales are of; None: unknown
        self.has_optimizer = False  # whether one has updated a parameter of the op itself
        self.order = next(_orders)
        _states.add(self)
        watch_optimizers()

    def trained_ids(self) -> set[int]:
        """The ids of the trained parameters: of a view of one, as of transposed experts, that of the parameter."""
        found = (p for p in self.parameters.values() if p is not None and p.requires_grad)
        return {id(p if p._base is None else p._base) for p in found}

    def scale_fn(self, recipe: DelayedScaling, role: str, record: bool) -> ScaleFn:
        """The function that gives an operand in this role its scale.   record: its amax enters the state"""
        return functools.partial(self._inverse, recipe, ROLES.index(role), record)

    def _inverse(self, recipe: DelayedScaling, k: int, record: bool, amax: Tensor) -> Tensor:
        dtype, factor = recipe.bwd if k == 2 else recipe.fwd, 2.0**-recipe.margin
        if torch_private.is_fake(amax) or amax.is_meta:
            return K.inverse_scale(amax, dtype, factor=factor)
        of = recipe, amax.numel(), amax.device, record
        scales, amaxes = opaque_call(self._current, *of, is_state=True)
        return K.delayed_inverse(scales, amaxes, amax, k, dtype, factor, record)

    def _current(
        self, recipe: DelayedScaling, groups: int, device: torch.device, record: bool
    ) -> tuple[Tensor, Tensor]:
        """The scales of this recipe, and the amaxes since the last step.   -> (3, G) each"""
        self._ensure_buffers(groups, device)
        scales, amaxes = self._scales(recipe, record).float(), self.buffers[AMAX]
        if amaxes.data_ptr() % ALIGNED:  # type: ignore[union-attr]
            amaxes = self.buffers[AMAX] = amaxes.clone()  # type: ignore[union-attr]
        return (scales.clone() if scales.data_ptr() % ALIGNED else scales), amaxes  # type: ignore[return-value]

    def _scales(self, recipe: DelayedScaling, record: bool) -> Tensor:
        """The scales of this recipe. Where those in the buffer are another one's, they come from the history: training
        writes them, an evaluation leaves the state as it is.   -> (3, G)
        """
        history: Tensor = self.buffers[HISTORY]  # type: ignore[assignment]
        scale: Tensor = self.buffers[SCALE]  # type: ignore[assignment]
        owned, length = record or self.recipe is None, recipe.amax_history_len
        if len(history) != length:
            history = _of_length(history, length)
            if owned:
                self.buffers[HISTORY] = history
        if recipe is self.recipe or recipe == self.recipe:
            return scale
        found = _scales_of_history(recipe, history, scale)
        if not owned:
            return found
        self.recipe = recipe
        return scale.copy_(found)

    def _ensure_buffers(self, groups: int, device: torch.device) -> None:
        """Create the buffers where they are missing, with a history of no step."""
        if self.buffers.get(SCALE) is None:
            shapes = (3, groups), (0, 3, groups), (3, groups)
            self.buffers.update({n: _zeros(device, *s) for n, s in zip(STATE, shapes, strict=True)})
            self.recipe = None
        found = self.buffers[HISTORY].shape[2]  # type: ignore[union-attr]
        if found != groups:
            raise FuseOpsError(
                f"the state of DelayedScaling is of {found} groups, the op has {groups}: it was loaded from "
                "another op, or the op was changed. Delete its buffers fp8_amax, fp8_amax_history and fp8_scale."
            )

    def advance(self) -> None:
        """Push the amaxes since the last step into the history, and compute the scales of the next step."""
        recipe = self.recipe
        amax, history, scale = (self.buffers[name] for name in STATE)
        if recipe is None or amax is None or history is None or scale is None:
            return
        seen = (amax > 0) & (amax < FLT_MAX)  # an infinity would have all else round to zero
        history.copy_(torch.where(seen, torch.cat([amax[None], history[:-1]]), history))
        scale.copy_(torch.where(seen, _scales_of_history(recipe, history, scale), scale))
        amax.zero_()


def _zeros(device: torch.device, *shape: int) -> Tensor:
    """Zeros that training may write to, also when inference mode runs the op first."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=torch.float32, device=device)


def _of_length(history: Tensor, length: int) -> Tensor:
    """The history of the last `length` steps, with zeros for those before its first."""
    made = _zeros(history.device, length, *history.shape[1:])
    made[: len(history)] = history[:length]
    return made


def _scales_of_history(recipe: DelayedScaling, history: Tensor, scale: Tensor) -> Tensor:
    """The scales that a recipe computes from the history, or those there are where it gives none.   -> (3, G)"""
    wanted = recipe.amax_of(history)
    usable = (wanted > 0) & wanted.isfinite()
    formats = recipe.fwd, recipe.fwd, recipe.bwd
    found = [
        K.inverse_scale(amax, dtype, factor=2.0**-recipe.margin)
        for dtype, amax in zip(formats, wanted, strict=True)
    ]
    return torch.where(usable, torch.stack(found), scale)


_orders = itertools.count()
_states: weakref.WeakSet[ScaleState] = weakref.WeakSet()


@torch.no_grad()
def advance(states: Iterable[ScaleState]) -> None:
    """Advance these states in the order of their creation, after one all-reduce of the amaxes per process group."""
    initialized = (s for s in states if s.recipe is not None and s.buffers.get(AMAX) is not None)
    used = sorted(initialized, key=lambda s: s.order)
    groups: dict[str, list[ScaleState]] = {}
    for state in used:
        if state.recipe.group is not None:  # type: ignore[union-attr]
            groups.setdefault(state.recipe.group, []).append(state)  # type: ignore[union-attr]
    for name, members in groups.items():
        amaxes: list[Any] = [state.buffers[AMAX] for state in members]
        largest = torch_private.all_reduce(torch.cat([t.flatten() for t in amaxes]), name, "max")
        sizes = [t.numel() for t in amaxes]
        for amax, part in zip(amaxes, torch.split(largest, sizes), strict=True):
            amax.copy_(part.view(amax.shape))
    for state in used:
        state.advance()


class OptimizerSteps:
    """`OptimizerSteps` count the steps of all optimizers since `watch_optimizers` was first called."""

    count = 0


@functools.cache
def on_optimizer_step(
    callback: Callable[[torch.optim.Optimizer], None], *, before: bool = False
) -> None:
    """Call `callback` after (or before) each step of any optimizer, between the graphs of a compiled step too."""

    @torch_private.dynamo_disabled
    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        callback(optimizer)

    register = register_optimizer_step_pre_hook if before else register_optimizer_step_post_hook
    register(hook)


def parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ids of the tensors that the optimizer updates."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def watch_optimizers() -> None:
    """Count the steps of all optimizers from now on, and advance the scaling states at each."""
    on_optimizer_step(_stepped)


def _stepped(optimizer: torch.optim.Optimizer) -> None:
    OptimizerSteps.count += 1
    if _states:
        advance(_states_of(optimizer))


def _states_of(optimizer: torch.optim.Optimizer) -> list[ScaleState]:
    """The states that a step of this optimizer advances: of ops of which it updates a parameter, and of ops without
    trained parameters. Where it updates no op's parameter it may update copies in another dtype: then of all ops whose
    parameters no optimizer has updated.
    """
    stepped = parameter_ids(optimizer)
    trained = {state: state.trained_ids() for state in _states}
    held = {state for state, own in trained.items() if own & stepped}
    for state in held:
        state.has_optimizer = True
    return [
        state
        for state, own in trained.items()
        if state in held or not own or not (held or state.has_optimizer)
    ]


def prepare_load(buffers: dict[str, Tensor | None], state: dict[str, Any], prefix: str) -> None:
    """Before a state_dict is loaded, create the buffers that it has, and keep those that it lacks."""
    for name in STATE:
        given, own = state.get(prefix + name), buffers.get(name)
        if given is not None and (own is None or own.shape != given.shape):
            device = next((t.device for t in buffers.values() if t is not None), given.device)
            buffers[name] = torch.zeros_like(given, device=device, dtype=torch.float32)
        elif given is None and own is not None:
            state[prefix + name] = own


def restore_float32(buffers: dict[str, Tensor | None], before: dict[str, Tensor | None]) -> None:
    """After a module was cast, restore its state in float32 on its present device: scales overflow other dtypes."""
    for name in STATE:
        own, now = before.get(name), buffers.get(name)
        if own is not None and now is not None and own.dtype is not now.dtype:
            buffers[name] = own.to(now.device)
