"""What the backward of a user's op reads besides saved tensors has to be as it was in the forward.

A level-1 op has its attributes of the forward back when its `fwd` runs again (`pure`), but not what `fwd` reads
elsewhere: globals, attributes of classes, modules and objects. A `bwd` reads the attributes of its op too. Constants
among these are noted in the forward and compared before the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from fuseops.arguments import shown
from fuseops.errors import FuseOpsError
from fuseops.ops.code import Place, constants_outside, own_attributes
from fuseops.ops.contents import may_change
from fuseops.plan.segment import Segment, Step


class Noted(NamedTuple):
    """A `Noted` is a constant that a backward will read, as it was in the forward."""

    step: Step
    name: str
    read: Callable[[], Any]
    value: Any

    @classmethod
    def of(cls, step: Step, name: str, read: Callable[[], Any]) -> Noted:
        return cls(step, name, read, read())


def note(seg: Segment) -> list[Noted]:
    """Note the constants that the backward of the user's ops of a segment will read outside of its arguments."""
    noted: list[Noted] = []
    for step in seg.backward:
        if type(step.target).__module__.startswith("fuseops."):
            continue
        places, names = _what_it_reads(step)
        noted += [Noted.of(step, place.name, place.read) for place in places]
        own = partial(_attribute, step.target)
        noted += [Noted.of(step, f"self.{name}", partial(own, name)) for name in names]
    return [each for each in noted if not may_change(each.value)]


def check(noted: Sequence[Noted]) -> None:
    """Raise FuseOpsError where a constant that a backward has read is another one than in its forward."""
    for step, name, read, before in noted:
        now = read()
        if now is before or (type(now) is type(before) and now == before):
            continue
        kind, advice = type(step.target).__name__, "Save it in the forward."
        method = "fwd, which the backward runs again," if step.pure else "bwd"
        if step.pure:
            advice = "Make it an attribute of the op, or write bwd and save it in the forward."
        elif name == "self.training":
            advice = "Ask call.training, which is the mode of the forward."
        raise FuseOpsError(
            f"{kind}.{method} reads {name}, which was {shown(before)} in the forward and is {shown(now)} now: the "
            f"gradient would be that of another function. {advice}"
        )


def _attribute(op: Any, name: str) -> Any:
    """An attribute of an op that is no parameter, buffer or module, by itself or by its class."""
    return op.__dict__[name] if name in op.__dict__ else getattr(type(op), name, None)


def _what_it_reads(step: Step) -> tuple[list[Place], list[str]]:
    """The places of constants outside of the op, and the names of its attributes. The class keeps them."""
    kind: Any = type(step.target)
    method = kind.fwd if step.pure else kind.bwd
    known = kind.__dict__.get("_read_elsewhere")
    if known is None or known[0] is not method:
        names = [] if step.pure or step.kind != "op" else sorted(own_attributes(method, kind))
        known = kind._read_elsewhere = method, constants_outside(method, kind), names
    return known[1], known[2]
