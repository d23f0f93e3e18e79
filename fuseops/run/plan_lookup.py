"""The lookup of the plan of a call of a run of ops: the last one's, a cached one, or one that is built now.

The cache key has no size of dim 0. It consists of classes, needs, training flags, dtypes, device, autocast, settings,
side inputs, returned names, and the outcome of every condition.
"""

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from fuseops.errors import FuseOpsError
from fuseops.ops import scopes
from fuseops.ops.halves import check_halves
from fuseops.ops.op import Shape, numel
from fuseops.ops.paths import path_of
from fuseops.ops.structure import Swap
from fuseops.plan.build import RunPlan, build
from fuseops.plan.chain import Chain
from fuseops.plan.cover import (
    check_names,
    check_strict,
    choose,
    reasons_against,
    reasons_under_recipe,
    scan,
)
from fuseops.plan.facts import Facts, needs_of, roles_of
from fuseops.plan.key import KeyGuard, PlanKey, Tokens
from fuseops.plan.segment import is_builtin
from fuseops.rules.builtin_rules import BUILTIN_RULES, POINTWISE
from fuseops.rules.rule import Conditions, RunEnd, RunPosition
from fuseops.torch_private import is_nested

from . import checks
from .checks import check_dtype, check_losses, check_meta, describe
from .gate import gated_runs
from .modes import mode_of
from .plan_cache import MAX_SHAPES, CacheEntry, LastCall, PlanCache

log = logging.getLogger("fuseops.fusion")


class PlanLookup:
    """A `PlanLookup` finds the plan of each call of one run of ops."""

    def __init__(self, chain: Chain, end: RunEnd, offset: int, alone: bool) -> None:
        """The arguments are those of the run."""
        self.chain, self.end, self.offset, self.alone = chain, end, offset, alone
        self.ops, self.names = chain.ops, chain.names
        self.swaps = any(isinstance(op, Swap) for op in self.ops)  # y has the shape of a side input
        self.cache = PlanCache(self.names[0])
        # of inputs, without the rows: every op takes them
        self.checked_shapes: set[Any] = set()
        self.last_call: LastCall | None = None

    def find(
        self, x: Tensor, side: Mapping[str, Any], tokens: Tokens, live: tuple[str, ...]
    ) -> RunPlan:
        """The plan of this call: cached, or built now."""
        entry = self._entry_of_call(x, side, tokens, live)
        plan = self._plan_of_call(entry, x, side)
        last = self.last_call
        if last is not None and last.entry is entry and last.plans is not None:
            if len(last.plans) >= MAX_SHAPES:
                last.plans.clear()
            last.plans[x.shape] = plan
        return plan

    def find_repeated(
        self,
        x: Tensor,
        side: Mapping[str, Any],
        tokens: Tokens,
        live: tuple[str, ...],
        versions: object,
    ) -> RunPlan | None:
        """The plan of a call like the last one, None where anything that it depends on has changed.

        versions: of the dicts of the ops
        """
        last = self.last_call  # read once: another thread may replace it
        if last is None or not last.plans or not last.guard.fits(x, side, tokens, live, versions):
            return None
        try:
            return last.plans.get(x.shape)
        except RuntimeError:  # a nested tensor, which `find` refuses
            return None

    def _plan_of_call(self, entry: CacheEntry, x: Tensor, side: Mapping[str, Any]) -> RunPlan:
        self._check_shape(x, side)
        reasons = self.reasons(entry, x, side) if entry.scan.candidates or entry.gated else ()
        plan = self.plan_of_outcome(entry, reasons)
        if reasons and scopes.current().watchers:
            # watchers that read the misses get the reasons of this call
            against, _ = self._reasons_under_recipe(entry, reasons)
            misses = choose(entry.scan, against).misses
            plan = plan if misses == plan.misses else plan._replace(misses=misses)
        if entry.gated and scopes.current().watchers:
            shapes = [*self.shapes_of(x, side)]
            gains = [j.gain(self.names, numel(shapes[j.ops[0]][:-1])) for j in entry.gated]
            plan = plan._replace(gains=tuple(gains))
        return plan

    def _reasons_under_recipe(
        self, entry: CacheEntry, reasons: Sequence[str | None]
    ) -> tuple[tuple[str | None, ...], frozenset[int]]:
        """Why each candidate may not fire under the recipe, and the indices of the ops that stay in high precision."""
        count = len(entry.scan.candidates)
        pairs = zip(entry.gated, reasons[count:], strict=True)
        high = frozenset([i for layer, why in pairs if why is not None for i in layer.ops])
        roles = [None if i in high else of for i, of in enumerate(entry.facts.roles)]
        recipe = entry.facts.settings.recipe
        return reasons_under_recipe(entry.scan, self.ops, reasons[:count], recipe, roles), high

    def _check_shape(self, x: Tensor, side: Mapping[str, Any]) -> None:
        """Have every op check the shape of x; once for all numbers of rows, since they share a plan."""
        try:
            shape: Any = x.shape[1:] if x.dim() > 1 else (x.shape,)  # its one axis is no row
        except RuntimeError:
            raise checks.nested_tensor_error(self.chain) from None  # the strided ones have no shape
        if self.swaps:
            shape = shape, *[side[name].shape for name in self.chain.outside]
        try:
            if shape not in self.checked_shapes:
                deque(self.shapes_of(x, side), maxlen=0)
                if len(self.checked_shapes) >= MAX_SHAPES:
                    self.checked_shapes.clear()
                self.checked_shapes.add(shape)
        except TypeError:  # a symbolic size has no hash
            deque(self.shapes_of(x, side), maxlen=0)

    def _entry_of_call(
        self, x: Tensor, side: Mapping[str, Any], tokens: Tokens, live: tuple[str, ...]
    ) -> CacheEntry:
        """The cache entry of this call. A call like the last one is recognised without building a key."""
        last = self.last_call  # read once: another thread may replace it
        if last is not None and last.guard.fits(x, side, tokens, live):
            return last.entry
        key = PlanKey.of(self.chain, x, side, tokens, live)
        entry = self.entry_of_key(key)
        self.last_call = None
        with suppress(KeyError):
            candidates = entry.scan.candidates
            has_user_rules = any(
                c.rule not in BUILTIN_RULES and c.rule is not POINTWISE for c in candidates
            )
            candidate_ops = {i for c in candidates for i in range(c.start, c.stop)}
            guard = KeyGuard(self.chain, key, () if has_user_rules else candidate_ops)
            self.last_call = LastCall(guard, entry, None if has_user_rules else {})
        return entry

    def reasons(
        self, entry: CacheEntry, x: Tensor, side: Mapping[str, Any]
    ) -> tuple[str | None, ...]:
        """Why each candidate of an entry may not fire in this call, None where it may; then, of each run of gated
        linear ops, why it stays in high precision.
        """
        sides = {name: tuple(side[name].shape) for name in self.chain.outside}
        shapes, call = [*self.chain.shapes(tuple(x.shape), sides)], entry.facts.key.call

        def conditions(start: int, stop: int) -> Conditions:
            shape, out = shapes[start], shapes[stop]
            return Conditions(
                shape=shape,
                k=shape[-1] if shape else 1,
                n=out[-1] if out else 1,
                rows=numel(shape[:-1]),
                dtype=call.compute or x.dtype,
                device=x.device,
                recipe=entry.facts.settings.recipe,
                needs=entry.facts.needs[start:stop],
                training=self.ops[start].training,
                reads=self.chain.reads[start:stop],
                sides=sides,
                compiling=call.compiling,
            )

        against = reasons_against(entry.scan, self.chain, entry.facts.settings, conditions)
        if not entry.gated:
            return against
        return (*against, *[j.reason(numel(shapes[j.ops[0]][:-1])) for j in entry.gated])

    def entry_of_key(self, key: PlanKey) -> CacheEntry:
        """The cache entry of a key, added if it is new."""
        known = self.cache.lookup(key)
        if known is not None:
            return known
        call = key.call
        check_dtype(self.ops, self.names, call.dtype)
        check_meta(self.chain, key)
        check_halves(self.ops, self.names)
        settings = scopes.resolve(*call.tokens)
        if is_nested(call.x_class) and not settings.reference:
            raise checks.nested_tensor_error(self.chain)
        if call.layout is not torch.strided and is_builtin(self.ops[0]) and not settings.reference:
            raise checks.not_strided_error(self.chain, call.layout)
        modes = [
            mode_of(name, op, call, settings, self.alone)
            for name, op in zip(self.names, self.ops, strict=True)
        ]
        needs = needs_of(self.chain, key, [mode for mode, _ in modes])
        check_losses(self.chain, key, needs, call.live)
        facts = Facts(
            key=key,
            settings=settings,
            modes=tuple(mode for mode, _ in modes),
            notes=tuple(note for _, note in modes),
            offset=self.offset,
            needs=needs,
            roles=roles_of(self.chain, settings.recipe, [mode for mode, _ in modes]),
        )
        rules = () if settings.reference else (*settings.rules, *BUILTIN_RULES)
        check_names(settings, rules)
        opaque = [note if mode and note != "alias" else None for mode, note in modes]
        place = RunPosition(opaque, self.end, self.offset)
        layers, scanned = scopes.layers_of(call.tokens), scan(self.ops, rules, place, settings)
        gated = gated_runs(self.chain, scanned, facts)
        return self.cache.insert(key, CacheEntry(layers, scanned, facts, {}, gated))

    def plan_of_outcome(self, entry: CacheEntry, reasons: tuple[str | None, ...]) -> RunPlan:
        """The plan of an entry for this outcome of its conditions: cached, or built now."""
        answers = tuple([reason is None for reason in reasons])
        if answers in entry.plans:
            return entry.plans[answers]
        against, high = self._reasons_under_recipe(entry, reasons)
        plan = build(self.chain, choose(entry.scan, against), entry.facts, high)
        check_strict(plan.misses, entry.scan, against, entry.facts.settings)
        entry.plans[answers] = plan
        log.info("new plan: %s", "; ".join(map(str, plan.forward)))
        return plan

    def shapes_of(self, x: Tensor, side: Mapping[str, Any]) -> Iterator[Shape]:
        """The shapes of x before op 0, 1, ... and after the last one. An error gets a note that names the op."""
        i = -1
        try:
            sides = {name: tuple(side[name].shape) for name in self.chain.outside}
            for shape in self.chain.shapes(tuple(x.shape), sides):
                i += 1
                yield shape
        except FuseOpsError as error:
            path = path_of(self.ops[i])
            at = repr(path) if path else f"{self.names[i]!r} of a fuseops.Sequential"
            error.add_note(f"at op {at}; the input of the sequence is {describe(x)}")
            raise
