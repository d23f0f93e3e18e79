"""A search for which tensors to offload, recompute or keep: the least stall with a peak that fits.

Grow: while the peak is too high, add moves that lower it, first where the link has most slack, then by cost for each
byte. Improve: remove moves that are not needed, and exchange those that stall. Every step is evaluated by a prediction
(cost_model.py). Their number is bounded, so that a plan for ten thousand tensors takes less than a second and is the
same on every machine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, combinations
from typing import NamedTuple

from fuseops.arguments import check_integers

from .cost_model import Choice, CostModel, Prediction

NOTHING = Choice(frozenset(), frozenset())
# a bound on the events in all predictions of one plan, but for the first few
MAX_EVENTS = 1_200_000
MAX_EXHAUSTIVE = 12  # with so few items and groups, pairs are tried exhaustively
STARTS = 8  # numbers of recomputed layers that are tried, where predictions are cheap


@dataclass(frozen=True)
class Limits:
    """`Limits` are the most bytes to use on the device and on the host; None: no limit.

    Raises FuseOpsError for anything else than a number of bytes or None.
    """

    peak: int | None = None
    host: int | None = None

    def __post_init__(self) -> None:
        given = {"peak": self.peak, "host": self.host}
        check_integers("Limits", 0, **{name: n for name, n in given.items() if n is not None})

    def excess(self, peak: int, host: int) -> int:
        """By how many bytes a step exceeds the limits."""
        used = ((peak, self.peak), (host, self.host))
        return sum(max(nbytes - limit, 0) for nbytes, limit in used if limit is not None)


UNLIMITED = Limits()


class Solution(NamedTuple):
    """A `Solution` is a choice and its prediction.

    cost  compared in order: bytes beyond the limits, seconds, bytes moved; without a limit on the peak more moved bytes
          are better
    """

    choice: Choice
    prediction: Prediction
    cost: tuple[int, float, int]

    @property
    def fits(self) -> bool:
        return self.cost[0] == 0


class Move(NamedTuple):
    """A move is one more item to offload, or one more group to recompute, with its price."""

    item: int | None
    group: int | None
    nbytes: int
    price: float  # estimated seconds for each byte
    crowding: float  # seconds of copies for each second of its layer

    @property
    def order(self) -> tuple[float, float, int]:
        return self.price, self.crowding, -self.nbytes


def solve(model: CostModel, limits: Limits) -> Solution:
    """The best choice that was found; `fits` tells whether it is within the limits."""
    search = _Search(model, limits)
    nothing = search.judge(NOTHING)
    if limits.peak is None:
        search.soft_limit = search.allowed  # there are no other starts
        return search.improve(search.fill(nothing))
    if nothing.fits:
        return nothing
    found = search.improve(search.grow(nothing))
    if not found.fits or search.is_small:
        other = search.improve(search.judge(search.lowest_peak_choice()))
        found = min(found, other, key=lambda s: s.cost)
    if search.has_more and found.prediction.seconds > nothing.prediction.seconds:
        found = min(found, search.beyond_free(nothing), key=lambda s: s.cost)
    for drop in search.few_drops() if search.is_small else search.spread_drops():
        start = search.judge(Choice(frozenset(), frozenset(drop)))
        if found.fits and start.prediction.seconds >= found.prediction.seconds:
            continue
        started = search.improve(search.grow(start, groups=search.is_small))
        found = min(found, started, key=lambda s: s.cost)
    return found


def judge(model: CostModel, limits: Limits, choice: Choice) -> Solution:
    """Predict a choice, and compare it with the limits."""
    prediction = model.predict(choice)
    excess = limits.excess(prediction.peak, prediction.host)
    moved = -prediction.host if limits.peak is None else prediction.host
    return Solution(choice, prediction, (excess, prediction.seconds, moved))


class _Search:
    def __init__(self, model: CostModel, limits: Limits) -> None:
        self.model, self.limits = model, limits
        model.evaluations = 0
        # The number of predictions in all, and before other starts are tried.
        self.allowed = max(9, MAX_EVENTS // max(len(model.events), 1) - 20)
        self.soft_limit = self.allowed // 4 if self.allowed > STARTS * 12 else self.allowed
        self.is_small = len(model.items) + len(model.groups) <= MAX_EXHAUSTIVE
        self.time_of = _seconds_of_calls(model)
        self.by_slack = self._items_by_slack()

    def judge(self, choice: Choice) -> Solution:
        return judge(self.model, self.limits, choice)

    @property
    def exhausted(self) -> bool:
        return self.model.evaluations >= self.soft_limit

    @property
    def has_more(self) -> bool:
        """Whether predictions are left for other starts."""
        return self.soft_limit < self.allowed

    # --- growing

    def grow(self, found: Solution, groups: bool = True) -> Solution:
        """Add moves until the choice fits, or no move helps."""
        best = found
        while not found.fits and self.limits.peak is not None:
            moves = sorted(
                (m for m in self._moves(found) if groups or m.group is None), key=lambda m: m.order
            )
            if not moves:
                break
            taken = self._take_moves(moves, found.prediction.peak - self.limits.peak)
            found = self.judge(_with(found.choice, taken, self.model))
            best = min(best, found, key=lambda s: s.cost)
        return best

    def _take_moves(self, moves: list[Move], wanted: int) -> list[Move]:
        """The first moves that are enough, in a few rounds, as prices and crowding change when moves are taken."""
        rounds = 1 if self.model.evaluations * 2 > self.soft_limit else min(8, self.soft_limit // 3)
        taken, nbytes = [], 0
        for move in moves:
            taken.append(move)
            nbytes += move.nbytes
            if self.is_small or nbytes * rounds >= wanted or move.group is not None:
                break
        return taken

    def _moves(self, found: Solution) -> Iterator[Move]:
        """The moves that lower the bytes at the peak."""
        model, choice = self.model, found.choice
        crowd, added = self._crowding(choice), model.added_stalls(choice)
        items, groups = model.covers(found.prediction.top)
        dropped = frozenset(chain.from_iterable(model.members[g] for g in choice.drop))
        room = None if self.limits.host is None else self.limits.host - found.prediction.host
        for k in items:
            if k in choice.leave or k in dropped or (room is not None and model.sent[k] > room):
                continue
            call = model.call[k]
            crowding = crowd[call] + model.out[k] / self.time_of[call]
            yield Move(k, None, model.nbytes[k], added[k] / model.nbytes[k], crowding)
        for g in groups:
            members = model.members[g]
            nbytes = sum(h.nbytes for h in model.drops[g]) - sum(
                model.nbytes[k] for k in members & choice.leave
            )
            if not choice.drop & {g, *model.conflicts[g]} and nbytes > 0:
                yield Move(None, g, nbytes, model.groups[g].seconds / nbytes, 0.0)

    def _crowding(self, choice: Choice) -> dict[int, float]:
        """Seconds of offload copies for each second of a layer's forward, by call."""
        load = dict.fromkeys(self.time_of, 0.0)
        for k in choice.leave:
            call = self.model.call[k]
            load[call] += self.model.out[k] / self.time_of[call]
        return load

    def lowest_peak_choice(self) -> Choice:
        """The choice of the lowest peak: recompute all groups that can be, offload the rest."""
        model, groups, taken = self.model, set[int](), set[int]()
        for g in sorted(range(len(model.groups)), key=lambda g: -len(model.members[g])):
            if not model.conflicts[g] & groups:
                groups.add(g)
                taken |= model.members[g]
        leave, room = [], self.limits.host
        for k in sorted(range(len(model.items)), key=lambda k: -model.nbytes[k]):
            if k not in taken and (room is None or model.sent[k] <= room):
                leave.append(k)
                room = None if room is None else room - model.sent[k]
        return Choice(frozenset(leave), frozenset(groups))

    def few_drops(self) -> Iterator[tuple[int, ...]]:
        """Every group, and every pair of groups without a conflict."""
        groups = range(len(self.model.groups))
        pairs = (p for p in combinations(groups, 2) if p[1] not in self.model.conflicts[p[0]])
        yield from ((g,) for g in groups)
        yield from pairs

    def spread_drops(self) -> Iterator[tuple[int, ...]]:
        """Some of the groups that lower the peak, evenly spread, so that the link is free in between."""
        if not self.has_more:
            return
        start = self.model.predict(NOTHING)
        _, covering = self.model.covers(start.top)
        groups = [g for g in covering if self.model.groups[g].kind == "module"]
        share = (self.allowed - self.soft_limit) // (2 * STARTS)
        counts = sorted({round((n + 1) * len(groups) / STARTS) for n in range(STARTS)} | {1, 2})
        for count in counts:
            for first in (1, 2) if 0 < count <= len(groups) else ():  # in the middle, or early
                self.soft_limit = self.model.evaluations + share
                places = (
                    n * len(groups) // count + len(groups) // (2 * count * first)
                    for n in range(count)
                )
                yield tuple(groups[place] for place in places)

    # --- filling

    def beyond_free(self, nothing: Solution) -> Solution:
        """All items that cause no stall, and as few more as needed to fit."""
        self.soft_limit = self.model.evaluations + (self.allowed - self.soft_limit) // 2
        return self.improve(self.grow(self.fill(nothing), groups=False))

    def fill(self, found: Solution) -> Solution:
        """Add items that cause no stall, those where the link has most slack first."""
        pending = self.by_slack
        size = max(1, len(pending) // 8)
        while pending and (not self.exhausted or size > 1):
            batch, rest = pending[:size], pending[size:]
            leave, drop = found.choice
            tried = self.judge(Choice(leave.union(batch), drop))
            free = tried.prediction.stall <= found.prediction.stall + 1e-9
            if free and tried.cost[0] <= found.cost[0]:
                found, pending = tried, rest
            elif len(batch) == 1:
                pending = rest
            else:
                size = max(1, size // 4)
        return found

    def _items_by_slack(self) -> list[int]:
        """All items, those of layers with most slack first; an item is crowded by the larger ones of its layer."""
        model, crowding = self.model, dict[int, float]()
        load = dict.fromkeys(self.time_of, 0.0)
        for k in sorted(range(len(model.items)), key=lambda k: -model.nbytes[k]):
            call = model.call[k]
            load[call] += model.out[k] / self.time_of[call]
            crowding[k] = load[call]
        return sorted(crowding, key=lambda k: (crowding[k], -model.nbytes[k]))

    # --- improving

    def improve(self, found: Solution) -> Solution:
        """Exchange moves until nothing improves, or the predictions are used up."""
        better: Solution | None = found
        while better is not None:
            found, better = better, self._better(better)
        return found

    def _better(self, found: Solution) -> Solution | None:
        for choice in self._neighbours(found):
            if self.exhausted and not self.is_small:
                return None
            tried = self.judge(choice)
            if tried.cost < found.cost:
                return tried
        return self._without_a_group(found)

    def _without_a_group(self, found: Solution) -> Solution | None:
        """Offload more instead of recomputing one group."""
        for g in sorted(found.choice.drop):
            if self.exhausted and not self.is_small:
                return None
            leave, drop = found.choice
            tried = self.grow(self.judge(Choice(leave, drop - {g})), groups=False)
            if tried.cost < found.cost:
                return tried
        return None

    def _neighbours(self, found: Solution) -> Iterator[Choice]:
        """Choices with one move less, one more, or one exchanged; the ones that stall most first."""
        model, (leave, drop) = self.model, found.choice
        late = found.prediction.late
        chosen = sorted(leave, key=lambda k: (-late.get(k, 0.0), model.nbytes[k]))
        taken = leave.union(*(model.members[g] for g in drop))
        other = [k for k in self.by_slack if k not in taken]
        for g in drop:
            yield Choice(leave, drop - {g})
            yield Choice(leave | model.members[g], drop - {g})
        for k in chosen:
            yield Choice(leave - {k}, drop)
        if not found.fits:
            yield from (Choice(leave | {k}, drop) for k in other)
        for k in chosen if self.is_small else chosen[:32]:
            for other_k in other:
                yield Choice(leave - {k} | {other_k}, drop)
        for g in range(len(model.groups)):
            if g not in drop:
                yield Choice(leave - model.members[g], drop - model.conflicts[g] | {g})


def _with(choice: Choice, moves: Iterable[Move], model: CostModel) -> Choice:
    leave, drop = set(choice.leave), set(choice.drop)
    for move in moves:
        if move.item is not None:
            leave.add(move.item)
        if move.group is not None:
            drop.add(move.group)
            leave -= model.members[move.group]
    return Choice(frozenset(leave), frozenset(drop))


def _seconds_of_calls(model: CostModel) -> dict[int, float]:
    """By call: the seconds from the begin of its forward to the next boundary."""
    profile = model.profile
    clock, found = profile.clock, {}
    starts = [*(b.position for b in profile.boundaries), len(profile.ops)]
    for k, call in enumerate(profile.calls):
        after = starts[min(bisect_right(starts, call.enter), len(starts) - 1)]
        found[k] = max(clock[after] - clock[call.enter], 1e-9)
    return found
