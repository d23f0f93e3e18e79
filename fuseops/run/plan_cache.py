"""The cache of the plans of a run of ops."""

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

MAX_KEYS = 64
MAX_SHAPES = 64  # of x, in a `LastCall` and among those that ops have checked
log = logging.getLogger("fuseops.fusion")
_warned = False  # that entries are evicted; once a process


class CacheEntry(NamedTuple):
    """A `CacheEntry` holds all plans of one key, by the outcome of their conditions."""

    settings_layers: tuple[SettingsLayer | None, ...]  # of the key's tokens, kept alive
    scan: Scan
    facts: Facts
    plans: dict[tuple[bool, ...], RunPlan]
    gated: tuple[GatedRun, ...] = ()  # linear ops that are quantized only where that pays


class LastCall(NamedTuple):
    """A `LastCall` recognises calls like the last one, and holds their plans by the shape of x.

    Conditions of built-in rules read sizes and attributes of ops only, so they are evaluated once a shape. With rules
    of the user `plans` is None: their conditions are evaluated at each call.
    """

    guard: KeyGuard
    entry: CacheEntry
    plans: dict[torch.Size, RunPlan] | None


class PlanCache(dict[PlanKey, CacheEntry]):
    """A `PlanCache` is an LRU cache of plans, with at most `MAX_KEYS` entries."""

    def __init__(self, name: str) -> None:
        """name: of the first op, for the log."""
        super().__init__()
        self.name = name

    def lookup(self, key: PlanKey) -> CacheEntry | None:
        """The entry of a key, which becomes the most recently used; None where there is none."""
        entry = self.pop(key, None)
        if entry is not None:
            self[key] = entry
        return entry

    def insert(self, key: PlanKey, entry: CacheEntry) -> CacheEntry:
        """Add an entry, and evict the oldest where the cache is full."""
        if len(self) >= MAX_KEYS:
            self.pop(next(iter(self)), None)
            self._warn_once()
        self[key] = entry
        return entry

    def _warn_once(self) -> None:
        global _warned
        if not _warned:
            _warned = True
            log.warning(
                "plans of more than %d kinds of calls of the ops from %r on: the oldest go. A Rule (or a recipe of a "
                "class that is no dataclass) is another one each time it is made: make it once, outside of the step.",
                MAX_KEYS,
                self.name,
            )
