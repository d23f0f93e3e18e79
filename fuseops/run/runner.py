"""The runner of a Sequential: its pieces, which are runs of ops and plain modules, in order."""

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
from .sides import describe_module
from .splice import Spliced, opaque_reason, side_names_of, splice

# attributes by which an op declares its side tensors and gradients; with its methods, those of a class
DECLARED = "reads", "writes", "delays", "accumulate_into_main_grad", "_around"
declarations_of = attrgetter(*DECLARED)
class_attributes_of = attrgetter(*DECLARED, "forward", "__call__", "fwd", "bwd")


class Runner:
    """A `Runner` holds the pieces of one Sequential (or of one op that is called alone).

    It is rebuilt when the modules, or what they declare, change.
    """

    def __init__(
        self, spliced: Spliced, alone: bool = False, isolated: frozenset[str] = frozenset()
    ) -> None:
        """isolated: names of ops that are a run of their own."""
        self.alone, self.spliced = alone, spliced
        self.planned, self.reads, self.writes = spliced.children, spliced.reads, spliced.writes
        self.pieces, self.piece_reads = _pieces(spliced, alone, isolated)
        modules = [child.module for child in self.planned]
        self.ops = [op for op in modules if isinstance(op, Op)]
        self.declarations = [*map(declarations_of, self.ops)]
        self.wrapped = [
            (op, opaque_reason(op) is None)
            for op in self.ops
            if op._around is not Op._around and not alone
        ]
        self.types = [*map(type, self.ops)]
        self.classes = [*{*self.types}]
        self.class_attributes = [*map(class_attributes_of, self.classes)]
        self.side_readers = [
            (module, names)
            for module in modules
            if not isinstance(module, Op)
            and ((names := side_names_of(module)) or isinstance(module, Composed))
        ]
        self.last_tokens: Tokens | None = None
        self.last_layers: tuple[scopes.SettingsLayer | None, ...] = ()  # of those, kept alive
        self.children: list[tuple[str, Any]] = []  # of the module itself
        self.versions: list[object] = []  # of the dicts of children and ops, when last compared
        self.places: dict[int, str] = {}  # of modules in traced code, by address (`compiled`)
        self.live: dict[tuple[str, ...], tuple[tuple[str, ...], ...]] = {}
        self._isolated: dict[frozenset[str], Runner] = {}

    def with_isolated(self, names: frozenset[str]) -> Runner:
        """The runner of the same children with these ops as runs of their own."""
        if names not in self._isolated:
            self._isolated[names] = Runner(self.spliced, self.alone, names)
        return self._isolated[names]

    def is_current(self, module: Any) -> bool:
        """Whether this runner still describes the module: the same children and names, also in spliced Sequentials,
        the same declarations of ops, and the same methods of their classes.
        """
        versions = [*map(dict_version, (module._modules, *map(DICT, self.ops)))]
        if [*map(type, self.ops)] != self.types or versions != self.versions:
            # (an op that is called alone has children too: its parametrizations)
            if not self.alone and [*module._modules.items()] != self.children:
                return False
            if [*map(declarations_of, self.ops)] != self.declarations:
                return False
            self.versions = versions
        settings = module._settings
        for nested in self.spliced.nested:
            if not nested.is_unchanged(settings):
                return False
        if [*map(class_attributes_of, self.classes)] != self.class_attributes:
            return False
        for op, spliced in self.wrapped:
            if (opaque_reason(op) is None) is not spliced:
                return False
        return not self.side_readers or all(
            side_names_of(m) == known for m, known in self.side_readers
        )

    def live_after(self, returns: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """For every piece, the side names that are live after it: read later, or returned.

        Raises SideInputError for a Tap that nothing reads.
        """
        if returns in self.live:
            return self.live[returns]
        self._check_published(returns)
        live, later = [], set(returns)
        for reads in reversed(self.piece_reads):
            live.append(tuple(sorted(later)))
            later.update([name for _, name in reads])
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
    spliced: Spliced, alone: bool, isolated: frozenset[str]
) -> tuple[list[tuple[str, Run | nn.Module]], list[Sides]]:
    """The pieces of a Sequential, each with the name of its first op or module, and the side tensors that it reads."""
    pieces: list[tuple[str, Run | nn.Module]] = []
    piece_reads: list[Sides] = []
    pending: list[Child] = []
    not_spliced = {id(nested.module): nested.reason for nested in spliced.nested}

    def flush(end: str, stop: int, hidden: str = "") -> None:
        if pending:
            chain, at = Chain.of(pending), stop - len(pending)
            pieces.append((chain.names[0], Run(chain, RunEnd(end, hidden), at, alone)))
            piece_reads.append(tuple([(name, name) for name in chain.outside]))
            pending.clear()

    for position, child in enumerate(spliced.children):
        name, module = child.name, child.module
        if isinstance(module, Op):
            if name in isolated:
                flush(f"{name!r} writes to a buffer of the caller", position)
            pending.append(child)
            if name in isolated:
                flush(f"{name!r} writes to a buffer of the caller", position + 1)
            continue
        reason = not_spliced.get(id(module))
        kind = "a plain module" if reason is None else f"a nested Sequential that {reason}"
        flush(f"{name!r} is {type(module).__name__}, {kind}", position, _first_class(module))
        pieces.append((name, module))
        piece_reads.append(child.reads)
    flush("the sequence ends", len(spliced.children))
    return pieces, piece_reads


def _first_class(module: Any) -> str:
    """The class name of the first module that runs in a module or nested Sequential."""
    inner = module._planned_modules() if isinstance(module, Composed) else ()
    return _first_class(inner[0]) if inner else type(module).__name__


def runner_of(module: Any) -> Runner:
    """The current runner of a Sequential, or of an op that is called alone; built where it has none."""
    runner: Runner | None = module._runner
    if runner is None or not runner.is_current(module):
        runner = module.__dict__["_runner"] = Runner(splice(module), isinstance(module, Op))
        runner.children = [*module._modules.items()]
    return runner


def tokens_of(module: Any, runner: Runner) -> Tokens:
    """The settings tokens of this call.  Raises RecomputationError for a recomputation under other settings."""
    tokens = scopes.tokens(module._settings)
    if runner.last_tokens == tokens:
        return tokens
    if runner.last_tokens is not None and torch_private.in_backward():
        scoped = tokens[2] if scopes.current().recomputing else runner.last_tokens[2]
        before, now = scopes.resolve(*runner.last_tokens[:2], scoped), scopes.resolve(*tokens)
        changed = before.difference(now)
        if changed:
            raise RecomputationError(
                f"{describe_module(module)} is recomputed under other settings than its forward ran under: "
                f"{'; '.join(changed)}. Set them with fuseops.configure(model, ...), or pass "
                "context_fn=fuseops.checkpoint_contexts to checkpoint(..., use_reentrant=False)."
            )
    runner.last_tokens, runner.last_layers = tokens, scopes.layers_of(tokens)
    return tokens


# after a graph break in a call, dynamo would try to trace these
for _function in (runner_of, Runner.is_current, tokens_of, Run.__call__):
    torch_private.never_compile(_function)
