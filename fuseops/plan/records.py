"""The public records that describe a plan; nothing here runs."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fuseops.arguments import instance_of

SCHEMA_VERSION = 1


class Span(NamedTuple):
    """A `Span` is a run of ops that one op, or one fused op, executes."""

    start: int
    stop: int
    ops: tuple[str, ...]  # child names
    runs: str  # class name of the op or fused op that runs
    rule: str | None = None
    kind: str = "op"  # "op", "joint", "forward", "backward", "call", "plain", "module"
    note: str = ""  # why it runs as it does (hooks, DTensor, an overridden forward)
    types: tuple[str, ...] = ()  # class name of every op

    def __str__(self) -> str:
        where = f"{self.ops[0]}" if len(self.ops) == 1 else f"{self.ops[0]}..{self.ops[-1]}"
        by = f" by {self.rule}" if self.rule else ""
        return f"{self.runs}[{where}]{by}" + (f" ({self.note})" if self.note else "")


class Miss(NamedTuple):
    """A `Miss` says that a rule did not fire, at which ops (start, stop), and why."""

    rule: str
    span: tuple[int, int]
    reason: str


class Overlap(Miss):
    """An `Overlap` is the miss of a rule that would fire if another rule did not run some of its ops."""

    __slots__ = ()


class SavedTensor(NamedTuple):
    """A `SavedTensor` is one tensor that is kept for the backward.

    nbytes       of its storage; 0 for a parameter, and for one that shares another's storage
    shared_with  the name of that other one
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    shared_with: str | None = None
    is_param: bool = False


HIGH = "high precision"


class StaysHigh(NamedTuple):
    """A `StaysHigh` is an op whose GEMMs stay in high precision under every recipe, with the reason."""

    op: str
    type: str
    recipe: str
    reason: str

    @property
    def note(self) -> str:
        return f"{HIGH} under {self.recipe}, as under every recipe: {self.reason}"


class Operand(NamedTuple):
    """An `Operand` is a quantized input of a GEMM, or the high-precision input beside one."""

    op: str
    role: str  # "input", "weight", "grad_output"
    format: str
    kernels: bool = True  # whether kernels multiply such codes, on some GPU


class KeptWeight(NamedTuple):
    """A `KeptWeight` is a weight whose quantized layouts a recipe keeps from call to call, with their bytes."""

    name: str
    policy: str  # "step", "unshard"
    nbytes: int


@dataclass(frozen=True)
class Planned:
    """A `Planned` describes one call of a Sequential: what runs, what did not fuse and why, and what is saved.

    path         of the Sequential in its model
    kind         its class, the title where it is the whole model
    forward      Spans in order, each one op or one fused op; backward: the same for the backward
    misses       every rule that matched, or almost did, and did not fire
    saved        tensors that are kept for the backward, those of nested Sequentials included
    operands     of the GEMMs that a recipe quantizes
    weights      quantized weights that are kept: they count neither as saved nor as temporary
    segments     (start, stop) of the ops that share one autograd node
    temporaries  bytes besides the saved ones: at the peak of a training step if `rehearsed`, else the largest output of
                 a forward span that is not saved
    nested       the plans of nested Sequentials
    """

    path: str
    forward: tuple[Span, ...]
    backward: tuple[Span, ...]
    misses: tuple[Miss, ...] = ()
    saved: tuple[SavedTensor, ...] = ()
    operands: tuple[Operand, ...] = ()
    weights: tuple[KeptWeight, ...] = ()
    segments: tuple[tuple[int, int], ...] = ()
    notes: tuple[str, ...] = ()
    temporaries: int = 0
    rehearsed: bool = False
    nested: tuple["Planned", ...] = ()
    kind: str = field(default="Sequential", compare=False)

    @property
    def saved_bytes(self) -> int:
        """Bytes kept for the backward beyond the parameters, shared storage counted once."""
        return sum(t.nbytes for t in self.saved)

    @property
    def kept_bytes(self) -> int:
        """Bytes of quantized weights that are kept from call to call."""
        return sum(t.nbytes for t in self.weights)

    @property
    def peak_bytes(self) -> int:
        """Saved bytes plus planned temporaries.

        `Sequential.plan` rehearses a training step: then it is the peak of the step, which includes x (if it is saved),
        y and the gradients that the step computes, but not the gradient of y.
        """
        return self.saved_bytes + self.temporaries

    @property
    def fused(self) -> tuple[Span, ...]:
        """The spans of rules, a joint one once."""
        return tuple(dict.fromkeys(s for s in (*self.forward, *self.backward) if s.rule))

    @property
    def not_fused(self) -> tuple[Miss, ...]:
        """The misses without overlaps: of rules that would not fire alone either."""
        return tuple(m for m in self.misses if not isinstance(m, Overlap))

    def walk(self) -> Iterator["Planned"]:
        """This plan and all plans nested in it."""
        yield self
        for plan in self.nested:
            yield from plan.walk()

    def diff(self, other: "Planned") -> str:
        """A line for each item that only one of the plans has; "" when they agree."""
        instance_of(other, Planned, "FusionPlan.diff(other)", "another FusionPlan")
        lines = []
        for name in ("forward", "backward", "misses", "saved", "operands", "weights", "segments"):
            mine, theirs = getattr(self, name), getattr(other, name)
            lines += [f"- {name}: {item}" for item in mine if item not in theirs]
            lines += [f"+ {name}: {item}" for item in theirs if item not in mine]
        mine, theirs = {p.path: p for p in self.nested}, {p.path: p for p in other.nested}
        lines += [f"- nested: {path}" for path in mine if path not in theirs]
        lines += [f"+ nested: {path}" for path in theirs if path not in mine]
        for path in (p for p in mine if p in theirs):
            lines += [f"{path}: {line}" for line in mine[path].diff(theirs[path]).splitlines()]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data, with a schema_version."""
        return {
            "schema_version": SCHEMA_VERSION,
            "path": self.path,
            "forward": [span._asdict() for span in self.forward],
            "backward": [span._asdict() for span in self.backward],
            "misses": [
                {**miss._asdict(), "overlap": isinstance(miss, Overlap)} for miss in self.misses
            ],
            "saved": [{**t._asdict(), "dtype": str(t.dtype)} for t in self.saved],
            "operands": [operand._asdict() for operand in self.operands],
            "weights": [weight._asdict() for weight in self.weights],
            "segments": [list(segment) for segment in self.segments],
            "notes": list(self.notes),
            "saved_bytes": self.saved_bytes,
            "peak_bytes": self.peak_bytes,
            "nested": [plan.to_json() for plan in self.nested],
        }
