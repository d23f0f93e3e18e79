"""A chain lists the ops that one plan covers, with their names in the plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from fuseops.ops.op import Op, Shape

Sides = tuple[tuple[str, str], ...]  # (keyword of the op, name in the plan) of side tensors


class Child(NamedTuple):
    """A `Child` is one op or plain module that a Sequential runs: its own, or that of a nested, spliced Sequential.

    name    its path below the Sequential that runs
    scope   the path of the Sequential that it was written in, with a dot; "" for the one that runs
    reads   its side inputs; writes: its published side tensors. Two Sequentials may use one keyword for two tensors
    """

    name: str
    module: nn.Module
    scope: str = ""
    reads: Sides = ()
    writes: Sides = ()


class Chain(NamedTuple):
    """A `Chain` lists the adjacent ops that one plan covers, with the fields of their `Child` records."""

    ops: tuple[Op[Any], ...]
    names: tuple[str, ...]
    scopes: tuple[str, ...]
    reads: tuple[Sides, ...]
    writes: tuple[Sides, ...]
    parameters: tuple[tuple[str, ...], ...]  # parameter names of every op
    # side tensors that come from outside the chain, by their names in the plan
    outside: tuple[str, ...]

    def shapes(self, x: Shape, known: dict[str, Shape]) -> Iterator[Shape]:
        """The shapes of x before op 0, 1, ... and after the last.   known: of side tensors; published ones are added"""
        yield x
        for op, reads, writes in zip(self.ops, self.reads, self.writes, strict=True):
            side_shapes = {keyword: known[name] for keyword, name in reads if name in known}
            x, published = op.out_shapes(x, side_shapes)
            known.update({name: published[k] for k, name in writes if k in published})
            yield x

    def receivers(self, i: int) -> Iterator[int]:
        """The ops that multiply what op i sends to other ranks: they read side tensors that it publishes."""
        published = {name for _, name in self.writes[i]}
        for k in range(i + 1, len(self.ops)):
            if self.ops[k].multiplies and any(name in published for _, name in self.reads[k]):
                yield k

    @property
    def local(self) -> bool:
        """Whether a style of parallelism applies to some op, so that it computes with local tensors."""
        return any(op._local or op._layout is not None for op in self.ops)

    @property
    def layout(self) -> Any:
        """The `InputLayout` of the first op that declares one, None if there is none."""
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
    """The side tensors that ops read and no op before them writes, given the (reads, writes) of each."""
    written: set[str] = set()
    found: dict[str, None] = {}
    for reads, writes in sides:
        found |= dict.fromkeys(name for _, name in reads if name not in written)
        written.update(name for _, name in writes)
    return tuple(found)
