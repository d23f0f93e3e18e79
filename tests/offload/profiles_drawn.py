"""Step profiles by hand and by Hypothesis, for the tests of simulator and planner."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace

from hypothesis import strategies as st

from fuseops.offload.planning.cost_model import CostModel
from fuseops.offload.planning.hardware import Curve, Hardware
from fuseops.offload.planning.profile import LayerCall, Profile, ProfiledOp, Recompute, Saved
from fuseops.offload.planning.timetable import RELEASE, SEND

MB = 1_000_000
LINK = Hardware(  # 10 GB/s each way: 0.1 ms a MB
    "ten", Curve(((MB, 10.0),)), Curve(((MB, 10.0),)), Curve(((MB, 20.0),)), memory=1000.0
)


def profile_of(
    layers: int,
    saved_per_layer: int,
    size: Callable[[int, int], int],
    seconds: Callable[[int], float],
    *,
    ops_per_layer: int = 3,
    base: int = 100 * MB,
    groups: bool = False,
    micro_batches: int = 1,
) -> Profile:
    """A chain of layers, forward and back.

    size(layer, number) bytes of each saved storage; seconds(layer) of the forward, the backward
    takes twice as long. The storages are made and held at once, and freed after the backward.
    """
    ops: list[tuple[str, float]] = []
    calls: list[LayerCall] = []
    saved: list[Saved] = []
    for batch in range(micro_batches):
        for layer in range(layers):
            enter = len(ops)
            ops += [(f"f{layer}", seconds(layer) / ops_per_layer)] * ops_per_layer
            for n in range(saved_per_layer):
                at = enter + 1 + n % ops_per_layer
                name = f"blocks.{layer}.x{n}"
                call = batch * layers + layer
                saved.append(
                    Saved(name, "op", call, size(layer, n), (1,), "uint8", at - 1, at, at, 0, 0)
                )
            calls.append(LayerCall(f"blocks.{layer}", batch, enter, len(ops), -1))
    for call in reversed(range(len(calls))):
        enter = len(ops)
        calls[call] = calls[call]._replace(backward=enter)
        layer = call % layers
        ops += [(f"b{layer}", 2 * seconds(layer) / ops_per_layer)] * ops_per_layer
        mine = [k for k, s in enumerate(saved) if s.call == call]
        for n, k in enumerate(reversed(mine)):
            read = enter + n % ops_per_layer
            saved[k] = saved[k]._replace(read=read, freed=read + 1)
    return finished(ops, saved, calls, base, groups)


def finished(
    ops: list[tuple[str, float]],
    saved: list[Saved],
    calls: list[LayerCall],
    base: int,
    groups: bool,
) -> Profile:
    """With the bytes on the device at every op, and a recomputation a layer if wanted."""
    resident = [base] * len(ops)
    for s in saved:
        for p in range(s.at, s.freed):
            resident[p] += s.nbytes
    recompute = []
    if groups:
        for k, call in enumerate(calls):
            mine = tuple(n for n, s in enumerate(saved) if s.call == k)
            took = sum(s for _, s in ops[call.enter : call.leave])
            recompute.append(Recompute(call.layer, "module", mine, took))
    done = tuple(ProfiledOp(name, s, r) for (name, s), r in zip(ops, resident, strict=True))
    return Profile("drawn", "recorded", done, tuple(saved), tuple(calls), tuple(recompute))


@st.composite
def profiles(
    draw: st.DrawFn, max_saved: int = 9, groups: bool = False, micro_batches: int = 1
) -> Profile:
    """Few layers and tensors of any sizes, on LINK from idle to overloaded; some ops are transfers between ranks, and
    some copy from the host.
    """
    layers = draw(st.integers(2, 6))
    each = max(1, min(3, max_saved // layers))
    sizes = draw(st.lists(st.integers(1, 40), min_size=layers * each, max_size=layers * each))
    pace = draw(st.sampled_from([0.5, 1.0, 2.0, 4.0]))
    times = draw(st.lists(st.integers(1, 8), min_size=layers, max_size=layers))
    drawn = profile_of(
        layers,
        each,
        lambda layer, n: sizes[layer * each + n] * MB,
        lambda layer: times[layer] * 1e-3 * pace,
        ops_per_layer=draw(st.integers(1, 3)),
        groups=groups,
        micro_batches=micro_batches,
    )
    every, copies = draw(st.sampled_from([0, 0, 3, 4])), draw(st.sampled_from([0, 0, 2, 3]))
    if every:
        drawn = with_network(drawn, every, draw(st.integers(1, 3)))
    return with_copies_from_host(drawn, copies) if copies else drawn


def with_codes(profile: Profile, names: set[str]) -> Profile:
    """The profile where what has these names may leave as codes of half its bytes."""
    return replace(
        profile,
        saved=tuple(
            s._replace(codes=s.nbytes // 2 * (s.name in names) * (s.why is None))
            for s in profile.saved
        ),
    )


def with_network(profile: Profile, every: int, later: int) -> Profile:
    """The profile where one op of `every` travels, and compute waits for it `later` ops later."""
    ops = tuple(
        op._replace(lane="network", join=p + later)
        if p % every == every - 1
        else op._replace(lane="compute", join=-1)
        for p, op in enumerate(profile.ops)
    )
    return replace(profile, ops=ops)


def with_copies_from_host(profile: Profile, every: int) -> Profile:
    """The profile where one op of `every` copies from the host, but for what travels."""
    ops = (
        op._replace(from_host=p % every == 0 and op.lane == "compute")
        for p, op in enumerate(profile.ops)
    )
    return replace(profile, ops=tuple(ops))


@functools.cache
def transformer(layers: int, each: int, seed: int = 0) -> Profile:
    """Many equal layers with a few sizes of tensors: what planners meet."""
    sizes = random.Random(seed).choices([1, 2, 4, 16, 64], k=each)
    return profile_of(
        layers,
        each,
        lambda layer, n: sizes[n] * MB,
        lambda layer: 0.7 * sum(sizes) * 1e-4,
        ops_per_layer=max(4, each // 2),
        groups=True,
    )


def carried(model: CostModel) -> float:
    """Bytes that would leave without a stall if tensors could be cut: each is sent in its turn until
    its release is due. No choice of whole ones can leave more.
    """
    sent: dict[int, float] = {}
    due: dict[int, float] = {}
    for kind, _, k, at in model.events:
        if kind == SEND:
            sent[k] = at
        elif kind == RELEASE:
            due[k] = at
    now = nbytes = 0.0
    for k in sorted(sent, key=lambda k: (due[k], sent[k])):
        start = max(now, sent[k])
        now = max(start, min(start + model.seconds_out[k], due[k]))
        nbytes += model.profile.saved[k].nbytes * (now - start) / model.seconds_out[k]
    return nbytes
