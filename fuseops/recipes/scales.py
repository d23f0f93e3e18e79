"""State of scales: of every op that runs under a recipe that keeps one, three buffers, in its `state_dict`, over roles
(input, weight, grad_output) and groups of a grouped op (one elsewhere).

fp8_amax          (3, G)     the largest magnitudes since the last step
fp8_amax_history  (L, 3, G)  those of the last steps, the latest first
fp8_scale         (3, G)     what x is multiplied by before it is rounded; 0 before the first step
The state advances once a step: when the optimizer of the op's parameters has stepped (see `_follow`), or at
`fuseops.weights_changed`. A step that saw nothing,
or zeros alone, or an infinity, leaves it as it is, so that whoever comes second advances nothing. A recomputation sees
what its forward saw. Everything stays on the device.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from fuseops import torch_private
from fuseops.errors import FuseOpsError

INFINITE = torch.finfo(torch.float32).max  # the amax of what holds an infinity: see `magnitude`
ROLES = ("input", "weight", "grad_output")
STATE = AMAX, HISTORY, SCALE = "fp8_amax", "fp8_amax_history", "fp8_scale"
KeepsScales = Any
"""A recipe whose scales follow from the amaxes of earlier steps: a `DelayedScaling`."""
See = Callable[[Tensor], Tensor]
"""From the amax of a tensor, or of groups, to what it is multiplied by."""


class ScaleState:
    """A `ScaleState` finds the amax histories and scales of one op: its buffers and parameters, found by name
    whenever they are read.
    """

    def __init__(
        self, buffers: dict[str, Tensor | None], parameters: dict[str, Tensor | None]
    ) -> None:
        self.buffers, self.parameters = buffers, parameters
        self.recipe: KeepsScales | None = None  # that it was used under last
        self.number = next(_numbers)
        _states.add(self)
        watch_optimizers()

    def see(self, recipe: KeepsScales, role: str, note: bool) -> See:
        """What gives the scale of an operand in its role for its amax, () or (G,), which it notes if it is to."""
        return functools.partial(self._see, recipe, ROLES.index(role), note)

    def _see(self, recipe: KeepsScales, k: int, note: bool, amax: Tensor) -> Tensor:
        dtype = recipe.bwd if k == 2 else recipe.fwd
        own = _scale(recipe, dtype, torch.where(amax == 0, torch.finfo(dtype).max, amax))
        if torch_private.is_fake(amax) or amax.is_meta:
            return own
        self._make(recipe, amax)
        amaxes, scales = self.buffers[AMAX][k], self.buffers[SCALE][k]  # type: ignore[index]
        if note:
            amaxes.copy_(torch.maximum(amaxes, amax.reshape(-1)))
        scales = scales.float().view(amax.shape)
        return torch.where(scales == 0, own, scales)

    def _make(self, recipe: KeepsScales, like: Tensor) -> None:
        """Buffers for these groups and this length, where they are not there."""
        self.recipe, length, groups = recipe, recipe.amax_history_len, like.numel()
        if self.buffers.get(SCALE) is None:
            for name, shape in (
                (AMAX, (3, groups)),
                (HISTORY, (length, 3, groups)),
                (SCALE, (3, groups)),
            ):
                self.buffers[name] = _zeros(like, *shape)
        history: Tensor = self.buffers[HISTORY]  # type: ignore[assignment]
        if history.shape[2] != groups:
            raise FuseOpsError(
                f"the state of DelayedScaling is of {history.shape[2]} groups, the op has {groups}: it was loaded from "
                "another op, or the op was changed. Delete its buffers fp8_amax, fp8_amax_history and fp8_scale."
            )
        if len(history) != length:
            made = _zeros(history, length, 3, groups)
            made[: len(history)] = history[:length]
            self.buffers[HISTORY] = made

    def advance(self) -> None:
        """What was seen since the last time becomes the latest step of the history."""
        recipe: KeepsScales = self.recipe
        amax, history, scale = (self.buffers[name] for name in STATE)
        if amax is None or history is None or scale is None:
            return
        seen = (amax > 0) & (amax < INFINITE)  # of an infinity, by which all else rounds to zero
        history.copy_(torch.where(seen, torch.cat([amax[None], history[:-1]]), history))
        wanted = recipe.amax_of(history)
        usable = seen & (wanted > 0) & wanted.isfinite()
        for k, dtype in enumerate((recipe.fwd, recipe.fwd, recipe.bwd)):
            found = _scale(recipe, dtype, wanted[k])
            scale[k].copy_(torch.where(usable[k], found, scale[k]))
        amax.zero_()


def _zeros(like: Tensor, *shape: int) -> Tensor:
    """Zeros that a step of training may write to, whoever runs the op first."""
    with torch.inference_mode(False):
        return like.new_zeros(shape, dtype=torch.float32)


def _scale(recipe: KeepsScales, dtype: torch.dtype, amax: Tensor) -> Tensor:
    largest = torch.full_like(amax, torch.finfo(dtype).max)
    return (largest / amax * 2.0**-recipe.margin).clamp(max=torch.finfo(torch.float32).max)


_numbers = itertools.count()
_states: weakref.WeakSet[ScaleState] = weakref.WeakSet()


@torch.no_grad()
def advance(states: Iterable[ScaleState]) -> None:
    """Advance these states, in the order in which they were made; amaxes over ranks by one message a group."""
    there = (s for s in states if s.recipe is not None and s.buffers.get(AMAX) is not None)
    used = sorted(there, key=lambda s: s.number)
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


class Steps:
    """`Steps` counts the steps that optimizers have taken, since somebody wants to know."""

    taken = 0


@functools.cache
def when_stepped(told: Callable[[torch.optim.Optimizer], None]) -> None:
    """From now on a function is told of each step of any optimizer, but for those of compiled code, which moves the
    versions of what it writes.
    """

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            told(optimizer)

    register_optimizer_step_post_hook(stepped)


def held_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ids of the tensors that it steps."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def watch_optimizers() -> None:
    """From now on a step of any optimizer is counted, and advances the states that follow it."""
    when_stepped(_stepped)


def _stepped(optimizer: torch.optim.Optimizer) -> None:
    Steps.taken += 1
    if _states:
        advance(_follow(optimizer))


def _follow(optimizer: torch.optim.Optimizer) -> list[ScaleState]:
    """The states whose step ends with this optimizer's: all but those of ops with trained parameters of which it holds
    none; all, where it holds none of any op (it may hold copies of them in another dtype).
    """
    held = held_by(optimizer)
    trained = {
        state: {id(p) for p in state.parameters.values() if p is not None and p.requires_grad}
        for state in _states
    }
    known = held.intersection(itertools.chain.from_iterable(trained.values()))
    return [state for state, own in trained.items() if not known or not own or own & known]


def fit_state(buffers: dict[str, Tensor | None], state: dict[str, Any], prefix: str) -> None:
    """Before a state_dict is loaded: make the buffers that it brings, and keep those that it does not know."""
    for name in STATE:
        given, own = state.get(prefix + name), buffers.get(name)
        if given is not None and (own is None or own.shape != given.shape):
            device = next((t.device for t in buffers.values() if t is not None), given.device)
            buffers[name] = torch.zeros_like(given, device=device, dtype=torch.float32)
        elif given is None and own is not None:
            state[prefix + name] = own


def keep_float32(buffers: dict[str, Tensor | None], before: dict[str, Tensor | None]) -> None:
    """After a module was cast: its state has the numbers of before, where it is now. Scales are beyond other dtypes."""
    for name in STATE:
        own, now = before.get(name), buffers.get(name)
        if own is not None and now is not None and own.dtype is not now.dtype:
            buffers[name] = own.to(now.device)
