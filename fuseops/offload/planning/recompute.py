"""Finds what a step could recompute, and the time of that: whole layers, by checkpoint; saved fields that ops declare
as recomputable; and tokens from other ranks, which are dispatched again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from fuseops.offload.scopes import dispatch_again, recompute
from fuseops.ops.op import FusedOp
from fuseops.ops.op import Op as FuseOp
from fuseops.ops.paths import SHARD_EXPERTS

from .profile import LayerCall, Profile, Recompute


def recomputations(
    model: nn.Module, seen: Profile, observe: Callable[[], Profile]
) -> tuple[Recompute, ...]:
    """All groups that could be recomputed.   observe: runs and records the step again, only where ops can recompute; on
    all ranks of `process_groups_of` alike
    """
    ops = {s.op for s in seen.saved}
    classes = (*_subclasses(FuseOp), *_subclasses(FusedOp))
    able = {cls.__name__ for cls in classes if cls.recomputes}
    sent = {cls.__name__ for cls in _subclasses(FusedOp) if cls.again}
    found = list(_layers(seen))
    if ops & able:
        with recompute():
            found += _fields(seen, observe(), "op")
    if ops & sent and process_groups_of(model):
        with dispatch_again():
            found += _fields(seen, observe(), "dispatch")
    return tuple(found)


def process_groups_of(model: nn.Module) -> list[dist.ProcessGroup]:
    """The process groups of at least two ranks that run ops of the model together, in the order of the ops; then those
    of experts of another library's modules.
    """
    ops = [op for op in model.modules() if isinstance(op, FuseOp)]
    every = [o.across_ranks.group for op in ops for o in (*op._around[0], op, *op._around[1])]
    lent = [
        m.__dict__[SHARD_EXPERTS].keywords for m in model.modules() if SHARD_EXPERTS in m.__dict__
    ]
    every += [keywords["mesh"].get_group() for keywords in lent]
    found = {id(group): group for group in every if group is not None}
    return [group for group in found.values() if dist.get_world_size(group) > 1]


def _subclasses(cls: Any) -> Iterator[Any]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def _calls_by_layer(calls: Sequence[LayerCall]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for k, call in enumerate(calls):
        found.setdefault(call.layer, []).append(k)
    return found


def _layers(seen: Profile) -> Iterator[Recompute]:
    """A group for all calls of each layer, without storages that come from outside or are saved elsewhere too. Layers
    that write buffers have none.
    """
    for layer, mine in _calls_by_layer(seen.calls).items():
        members = [
            n
            for n, s in enumerate(seen.saved)
            if s.call in mine and s.nbytes and not s.again and s.made >= seen.calls[s.call].enter
        ]
        calls = [seen.calls[k] for k in mine]
        if any(call.writes for call in calls):
            continue
        seconds = sum(op.seconds for c in calls for op in seen.ops[c.enter : c.leave])
        yield from _group(seen, layer, "module", members, seconds)


def _fields(seen: Profile, without: Profile, kind: str) -> Iterator[Recompute]:
    """A group for each layer of what another run does not save, at the cost of its longer backward. What that run saves
    in its place counts against the largest storage of a call.
    """
    kept, before = ({(s.call, s.name) for s in step.saved} for step in (without, seen))
    instead: dict[int, int] = defaultdict(int)
    for s in without.saved:
        instead[s.call] += 0 if (s.call, s.name) in before else s.nbytes
    times = [_backward_seconds(step) for step in (seen, without)]
    for layer, mine in _calls_by_layer(seen.calls).items():
        members = [
            n
            for n, s in enumerate(seen.saved)
            if s.call in mine and s.nbytes and (s.call, s.name) not in kept
        ]
        seconds = sum(max(times[1].get(k, 0.0) - times[0].get(k, 0.0), 0.0) for k in mine)
        for group in _group(seen, layer, kind, members, seconds):
            by_size = sorted(members, key=lambda n: seen.saved[n].nbytes)
            largest = {seen.saved[n].call: n for n in by_size}
            there = {n: instead[call] for call, n in largest.items()}
            yield group._replace(instead=tuple(there.get(n, 0) for n in members))


def _group(
    seen: Profile, layer: str, kind: str, members: list[int], seconds: float
) -> Iterator[Recompute]:
    if members:
        calls = len({seen.saved[n].call for n in members})
        yield Recompute(layer, kind, tuple(members), seconds, calls)


def _backward_seconds(step: Profile) -> dict[int, float]:
    """By call: the seconds from the begin of its backward to that of the next."""
    begins = sorted((c.backward, k) for k, c in enumerate(step.calls) if c.backward >= 0)
    ends = [position for position, _ in begins[1:]] + [len(step.ops)]
    return {
        k: sum(op.seconds for op in step.ops[begin:end])
        for (begin, k), end in zip(begins, ends, strict=True)
    }
