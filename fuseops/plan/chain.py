"""A chain lists the ops that one plan covers, under the names that the plan knows them by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from fuseops.ops.op import Op, Shape

Sides = tuple[tuple[str, str], ...]  # (keyword of the op, name in the plan) of side tensors


class Child(NamedTuple):
    """A `Child` is one op or plain module that a Sequential runs: its own, or of a Sequential that is spliced into it.

    name    its path below the Sequential that runs
    scope   that of the Sequential that it was written in, with a dot; "" is the one that runs
    reads   its side inputs, and writes what it publishes: two Sequentials may use one keyword for two tensors
    """

    name: str
    module: nn.Module
    scope: str = ""
    reads: Sides = ()
    writes: Sides = ()


class Chain(NamedTuple):
    """A `Chain` lists the adjacent ops that one plan covers, and of each op what `Child` says of it."""

    ops: tuple[Op[Any], ...]
    names: tuple[str, ...]
    scopes: tuple[str, ...]
    reads: tuple[Sides, ...]
    writes: tuple[Sides, ...]
    parameters: tuple[tuple[str, ...], ...]  # names of every op's
    # side tensors that are read and not written before, by their names in the plan
    outside: tuple[str, ...]

    def shapes(self, x: Shape, known: dict[str, Shape]) -> Iterator[Shape]:
        """Shapes before op 0, 1, ... and after the last one.  known: those of `outside`; what ops publish is added"""
        yield x
        for op, reads, writes in zip(self.ops, self.reads, self.writes, strict=True):
            taken = {keyword: known[name] for keyword, name in reads if name in known}
            x, published = op.out_shapes(x, taken)
            known.update({name: published[k] for k, name in writes if k in published})
            yield x

    @property
    def local(self) -> bool:
        """Whether a style of parallelism laid out some of the ops, so that they take local tensors."""
        return any(op._local or op._layout is not None for op in self.ops)

    @property
    def layout(self) -> Any:
        """The `InputLayout` of what goes into the first of them, None where none says."""
        return next((op._layout for op in self.ops if op._layout is not None), None)

    @classmethod
    def of(cls, children: Sequence[Child]) -> Chain:
        """The chain of children that are ops."""
        ops: tuple[Any, ...] = tuple(child.module for child in children)
        names, _, scopes, reads, writes = zip(*children, strict=True)
        outside = outside_reads(zip(reads, writes, strict=True))
        parameters = tuple(op.parameter_names() for op in ops)
        return cls(ops, names, scopes, reads, writes, parameters, outside)


def outside_reads(sides: Iterable[tuple[Sides, Sides]]) -> tuple[str, ...]:
    """What ops in a row read that none before them writes, given the (reads, writes) of each."""
    written: set[str] = set()
    found: dict[str, None] = {}
    for reads, writes in sides:
        found |= dict.fromkeys(name for _, name in reads if name not in written)
        written.update(name for _, name in writes)
    return tuple(found)
