"""Entries keep the plans of a run of ops, by the key of their calls."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from fuseops.ops.scopes import SettingsLayer
from fuseops.plan.build import RunPlan
from fuseops.plan.cover import Scan
from fuseops.plan.facts import Facts
from fuseops.plan.key import KeyGuard, PlanKey

from .gate import GatedRun

MOST = 64  # keys
MOST_SHAPES = 64  # of x, whose plans a run knows without asking conditions
log = logging.getLogger("fuseops.fusion")
_told = False  # that entries are forgotten, once a process


class KnownPlans(NamedTuple):
    """`KnownPlans` are all plans of one key; they differ in the outcome of conditions only."""

    held: tuple[SettingsLayer | None, ...]  # what the tokens of the key stand for
    scan: Scan
    facts: Facts
    plans: dict[tuple[bool, ...], RunPlan]
    layers: tuple[GatedRun, ...] = ()  # where a recipe has to pay


class Last(NamedTuple):
    """A `Last` holds the plans of a call like the last one, by the shape of x.

    Conditions are asked once a shape, where all of them are those of built-in rules, which read sizes and attributes
    of their ops; of others there are no plans here, and they are asked at each call.
    """

    guard: KeyGuard
    entry: KnownPlans
    plans: dict[torch.Size, RunPlan] | None


class Entries(dict[PlanKey, KnownPlans]):
    """`Entries` cache the plans of the latest calls, at most `MOST`. What is forgotten is planned anew."""

    def __init__(self, name: str) -> None:
        """name: of the first op, for the log."""
        super().__init__()
        self.name = name

    def latest(self, key: PlanKey) -> KnownPlans | None:
        """The entry of this key, which is the latest one now."""
        entry = self.pop(key, None)
        if entry is not None:
            self[key] = entry
        return entry

    def put(self, key: PlanKey, entry: KnownPlans) -> KnownPlans:
        """Keep this one; the oldest goes where there is no room."""
        if len(self) >= MOST:
            self.pop(next(iter(self)), None)
            self._tell()
        self[key] = entry
        return entry

    def _tell(self) -> None:
        global _told
        if not _told:
            _told = True
            log.warning(
                "plans of more than %d kinds of calls of the ops from %r on: the oldest go. A Rule (or a recipe of a "
                "class that is no dataclass) is another one each time it is made: make it once, outside of the step.",
                MOST,
                self.name,
            )
