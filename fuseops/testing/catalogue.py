"""How to draw an instance of every registered op. One entry an op; the laws then cover it without a new test."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fuseops import ops
from fuseops.errors import FuseOpsError
from fuseops.ops.op import Op


class Wanted(NamedTuple):
    """What an instance has to fit: its place in a chain, and who chooses what is left open."""

    choose: Callable[..., Any]  # choose(a, b, c) -> one of them
    width: int  # of its input's last axis
    out: int  # width of its output, for an op that maps one width to another
    groups: int  # of a grouped op


class Entry(NamedTuple):
    """An op class and how to draw one."""

    op: type[Op[Any]]
    make: Callable[[Wanted], Op[Any]]
    width: str = "keeps"  # the last axis: "keeps" it, "maps" it to any other, or "halves" it
    flat: bool = False  # takes (rows, width) only

    def before(self, after: int) -> int:
        """What the width before it must be a multiple of, if the one after it is a multiple of `after`."""
        return {"keeps": after, "maps": 1, "halves": 2 * after}[self.width]


_entries: dict[type, Entry] = {}


def register(
    op: type[Op[Any]],
    make: Callable[[Wanted], Op[Any]],
    *,
    width: str = "keeps",
    flat: bool = False,
) -> None:
    """Add an op of your own, so that the strategies draw it.

    make: gets what is `Wanted` and returns an instance.  width: what it does to the last axis.
    flat: it takes inputs of shape (rows, width) only.
    """
    _entries[op] = Entry(op, make, width, flat)


def entry(op: type) -> Entry:
    """The entry of an op class.  Raises FuseOpsError where there is none."""
    if op not in _entries:
        raise FuseOpsError(
            f"{op.__name__} is not in the catalogue of fuseops.testing: register({op.__name__}, "
            "make) with fuseops.testing.catalogue.register, so that instances can be drawn."
        )
    return _entries[op]


def catalogue() -> dict[type, Entry]:
    """Every op that can be drawn."""
    return dict(_entries)


def exported() -> list[type[Op[Any]]]:
    """The op classes that `fuseops.ops` shows."""
    found = (value for name, value in vars(ops).items() if not name.startswith("_"))
    return [v for v in found if isinstance(v, type) and issubclass(v, Op) and v is not Op]


def _dropout(w: Wanted) -> Op[Any]:
    return ops.Dropout(w.choose(0.3, 0.0, 1.0)).train(w.choose(True, True, False))


def _norm(w: Wanted) -> Op[Any]:
    eps, affine = w.choose(1e-5, None), w.choose(True, True, False)
    return ops.RMSNorm(w.width, eps=eps, elementwise_affine=affine)


def _grouped(w: Wanted) -> Op[Any]:
    # Most without a bias: no rule takes a grouped one with a bias.
    bias, scaled = w.choose(False, False, True), w.choose(False, True)
    return ops.GroupedLinear(w.groups, w.width, w.out, bias=bias, scale_bias=scaled)


def _reshape(w: Wanted) -> Op[Any]:
    return ops.Reshape(*w.choose((-1, w.width), (-1, 1, w.width)))


# fmt: off
register(ops.Linear,        lambda w: ops.Linear(w.width, w.out, bias=w.choose(True, False)), width="maps")
register(ops.Bias,          lambda w: ops.Bias(w.width))
register(ops.GroupedLinear, _grouped, width="maps", flat=True)
register(ops.RMSNorm,       _norm)
register(ops.SiLU,          lambda w: ops.SiLU())
register(ops.GELU,          lambda w: ops.GELU(w.choose("none", "tanh")))
register(ops.SReLU,         lambda w: ops.SReLU())
register(ops.SwiGLU,        lambda w: ops.SwiGLU(), width="halves")
register(ops.ScaledSwiGLU,  lambda w: ops.ScaledSwiGLU(), width="halves")
register(ops.ConstantScale, lambda w: ops.ConstantScale(w.choose(0.5, -3.0, 0.0)))
register(ops.Dropout,       _dropout)
register(ops.Identity,      lambda w: ops.Identity())
register(ops.Reshape,       _reshape)
register(ops.Tap,           lambda w: ops.Tap(w.choose("residual", "skip")))
register(ops.Add,           lambda w: ops.Add(w.choose("residual", "skip")))
# fmt: on
