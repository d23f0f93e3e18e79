"""A runner runs ops and plain modules in a row: its pieces, under the settings of a call."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import nn

from fuseops import torch_private
from fuseops.errors import RecomputationError, SideInputError
from fuseops.ops import scopes
from fuseops.ops.op import Op
from fuseops.ops.structure import Tap
from fuseops.plan.chain import Chain, Child, Sides
from fuseops.plan.key import DICT, Tokens
from fuseops.rules.rule import RunEnd
from fuseops.torch_private import dict_version

from .composed import Composed
from .run import Run
from .sides import described
from .splice import Spliced, opaque_reason, side_names_of, splice

# what an op says of what it reads, writes and puts elsewhere; and what of that its class says, and what its ops run
SAYS = "reads", "writes", "delays", "accumulate_into_main_grad", "_around"
SAID = attrgetter(*SAYS)
OF_CLASS = attrgetter(*SAYS, "forward", "__call__", "fwd", "bwd")


class Runner:
    """A runner runs the pieces of one Sequential (or one op that is called alone), and is rebuilt when what it runs
    changes.
    """

    def __init__(
        self, spliced: Spliced, alone: bool = False, apart: frozenset[str] = frozenset()
    ) -> None:
        """apart: names of ops that run by themselves."""
        self.alone, self.spliced = alone, spliced
        self.planned, self.reads, self.writes = spliced.children, spliced.reads, spliced.writes
        self.pieces, self.takes = _pieces(spliced, alone, apart)
        modules = [child.module for child in self.planned]
        self.ops = [op for op in modules if isinstance(op, Op)]
        self.said = [*map(SAID, self.ops)]
        self.around = [
            (op, opaque_reason(op) is None)
            for op in self.ops
            if op._around is not Op._around and not alone
        ]
        self.kinds = [*map(type, self.ops)]
        self.classes = [*{*self.kinds}]
        self.of_classes = [*map(OF_CLASS, self.classes)]
        self.asking = [
            (module, names)
            for module in modules
            if not isinstance(module, Op)
            and ((names := side_names_of(module)) or isinstance(module, Composed))
        ]
        self.last: Tokens | None = None
        self.held: tuple[scopes.SettingsLayer | None, ...] = ()  # what those stand for
        self.children: list[tuple[str, Any]] = []  # of the module itself
        # of what says so, and of the dicts of ops, when they were last found alike
        self.versions: list[object] = []
        self.places: dict[int, str] = {}  # of modules that traced code walks, by address
        self.live: dict[tuple[str, ...], tuple[tuple[str, ...], ...]] = {}
        self._with_apart: dict[frozenset[str], Runner] = {}

    def with_apart(self, names: frozenset[str]) -> Runner:
        """The runner of the same children where these ops run by themselves."""
        if names not in self._with_apart:
            self._with_apart[names] = Runner(self.spliced, self.alone, names)
        return self._with_apart[names]

    def fits(self, module: Any) -> bool:
        """Does the module, and every Sequential spliced into it, run what it ran when this was made, under the same
        names, do its ops still say the same of what they read, write and put elsewhere, and are the methods of their
        classes the same?
        """
        versions = [*map(dict_version, (module._modules, *map(DICT, self.ops)))]
        if [*map(type, self.ops)] != self.kinds or versions != self.versions:
            # (parametrizations of an op that is called alone come and go)
            if not self.alone and [*module._modules.items()] != self.children:
                return False
            if [*map(SAID, self.ops)] != self.said:
                return False
            self.versions = versions
        settings = module._settings
        for nested in self.spliced.nested:
            if not nested.stands(settings):
                return False
        if [*map(OF_CLASS, self.classes)] != self.of_classes:
            return False
        for op, spliced in self.around:
            if (opaque_reason(op) is None) is not spliced:
                return False
        return not self.asking or all(side_names_of(m) == known for m, known in self.asking)

    def live_after(self, returns: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """For every piece, the side names that are read after it, or returned.

        Raises SideInputError when a Tap is read by nobody.
        """
        if returns in self.live:
            return self.live[returns]
        self._check_published(returns)
        live, later = [], set(returns)
        for takes in reversed(self.takes):
            live.append(tuple(sorted(later)))
            later.update([name for _, name in takes])
        found = tuple(reversed(live))
        self.live[returns] = found
        return found

    def _check_published(self, returns: tuple[str, ...]) -> None:
        read = {name for child in self.planned for _, name in child.reads} | set(returns)
        taps = [
            names
            for child in self.planned
            if isinstance(child.module, Tap)
            for names in child.writes
        ]
        unread = sorted([keyword for keyword, name in taps if name not in read])
        if unread and not self.alone:
            raise SideInputError(
                f"nobody reads the Tap of {unread}: add an op that reads it, or ask for it "
                f"with returns={tuple(unread)}."
            )


def _pieces(
    spliced: Spliced, alone: bool, apart: frozenset[str]
) -> tuple[list[tuple[str, Run | nn.Module]], list[Sides]]:
    """Runs of ops and modules in turn, by the name of the first op or of the module, and the side tensors of each."""
    pieces: list[tuple[str, Run | nn.Module]] = []
    takes: list[Sides] = []
    pending: list[Child] = []
    borders = {id(nested.module): nested.reason for nested in spliced.nested}

    def flush(end: str, stop: int, hidden: str = "") -> None:
        if pending:
            chain, at = Chain.of(pending), stop - len(pending)
            pieces.append((chain.names[0], Run(chain, RunEnd(end, hidden), at, alone)))
            takes.append(tuple([(name, name) for name in chain.outside]))
            pending.clear()

    for position, child in enumerate(spliced.children):
        name, module = child.name, child.module
        if isinstance(module, Op):
            if name in apart:
                flush(f"{name!r} writes to a buffer of the caller", position)
            pending.append(child)
            if name in apart:
                flush(f"{name!r} writes to a buffer of the caller", position + 1)
            continue
        reason = borders.get(id(module))
        kind = "a plain module" if reason is None else f"a nested Sequential that {reason}"
        flush(f"{name!r} is {type(module).__name__}, {kind}", position, _first(module))
        pieces.append((name, module))
        takes.append(child.reads)
    flush("the sequence ends", len(spliced.children))
    return pieces, takes


def _first(module: Any) -> str:
    """The class of what a module, or a nested Sequential, runs first."""
    inner = module._planned_modules() if isinstance(module, Composed) else ()
    return _first(inner[0]) if inner else type(module).__name__


def runner_of(module: Any) -> Runner:
    """The runner of a Sequential, rebuilt when what it runs has changed."""
    prepare(module)
    runner: Runner = module._runner
    return runner


def prepare(module: Any) -> None:
    """Build the runner of a module, unless the one that it has still fits."""
    runner: Runner | None = module._runner
    if runner is None or not runner.fits(module):
        runner = module.__dict__["_runner"] = Runner(splice(module), isinstance(module, Op))
        runner.children = [*module._modules.items()]


def tokens_of(module: Any, runner: Runner) -> Tokens:
    """The settings of this call. A recomputation must find those of its forward."""
    tokens = scopes.tokens(module._settings)
    if runner.last == tokens:
        return tokens
    if runner.last is not None and torch_private.in_backward():
        scoped = tokens[2] if scopes.current().recomputing else runner.last[2]
        before, now = scopes.resolve(*runner.last[:2], scoped), scopes.resolve(*tokens)
        changed = before.difference(now)
        if changed:
            raise RecomputationError(
                f"{described(module)} is recomputed under other settings than its forward ran under: "
                f"{'; '.join(changed)}. Set them with fuseops.configure(model, ...), or pass "
                "context_fn=fuseops.checkpoint_contexts to checkpoint(..., use_reentrant=False)."
            )
    runner.last, runner.held = tokens, scopes.layers_of(tokens)
    return tokens


# where dynamo has given a call up, it would try its parts
for _function in (runner_of, Runner.fits, prepare, tokens_of, Run.__call__):
    torch_private.never_compile(_function)
