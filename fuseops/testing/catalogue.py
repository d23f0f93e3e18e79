"""The catalogue of ops: how to draw an instance of each. Every test of all ops then covers it."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch

from fuseops import ops
from fuseops.errors import FuseOpsError
from fuseops.ops.activations import ACTS
from fuseops.ops.glu import GATED, SCALED_GATED
from fuseops.ops.op import Op
from fuseops.rules.rule import types_of


class Wanted(NamedTuple):
    """A `Wanted` is a request for an instance of an op: sizes that it must have, and a function that draws options."""

    choose: Callable[..., Any]  # choose(a, b, c) -> one of them
    width: int  # of its input's last axis
    out: int  # width of its output, for an op that maps one width to another
    groups: int  # of a grouped op
    top_k: int = 2  # of an op that routes tokens
    middle: tuple[int, ...] = ()  # its input's axes before the last, over which a norm may go too


class OpEntry(NamedTuple):
    """An `OpEntry` says how to draw an op of one class."""

    op: type[Op[Any]]
    make: Callable[[Wanted], Op[Any]]
    # the last axis: "keeps" it, "maps" it to any other, "halves" it, or "ends" a chain
    width: str = "keeps"
    flat: bool = False  # takes (rows, width) only
    heads: bool = False  # takes (..., tokens, heads, width) only
    routing: str = ""  # of an op that reads or writes a Routing of tokens: what its rows are, "tokens" or "copies"

    def input_multiple(self, after: int) -> int:
        """The number that the input width must be a multiple of, for an output width that is a multiple of `after`."""
        return {"keeps": after, "maps": 1, "halves": 2 * after, "ends": 1}[self.width]


_entries: dict[type, OpEntry] = {}


def register(
    op: type[Op[Any]],
    make: Callable[[Wanted], Op[Any]],
    *,
    width: str = "keeps",
    flat: bool = False,
    heads: bool = False,
    routing: str = "",
) -> None:
    """Add an op of your own, so that the strategies draw it.

    make: returns an instance for a `Wanted`.  width: what the op does to the last axis: "keeps", "maps", "halves" or
    "ends".  flat: inputs have shape (rows, width) only.  heads: (..., tokens, heads, width) only.
    routing: for an op of the routing of tokens to experts, what the rows of its input are: "tokens" or "copies".
    """
    _entries[op] = OpEntry(op, make, width, flat, heads, routing)


def _each(
    classes: Iterable[type[Any]], make: Callable[[Any, Wanted], Op[Any]], *, width: str = "keeps"
) -> None:
    """Register several ops with one function, make(op, wanted)."""
    for op in classes:
        register(op, partial(make, op), width=width)


def entry(op: type) -> OpEntry:
    """The entry of an op class.  Raises FuseOpsError where there is none."""
    if op not in _entries:
        raise FuseOpsError(
            f"{op.__name__} is not in the catalogue of fuseops.testing: register({op.__name__}, "
            "make) with fuseops.testing.catalogue.register, so that instances can be drawn."
        )
    return _entries[op]


def catalogue() -> dict[type, OpEntry]:
    """Every op that can be drawn."""
    return dict(_entries)


def exported() -> list[type[Op[Any]]]:
    """The op classes that `fuseops.ops` exports."""
    found = (value for name, value in vars(ops).items() if not name.startswith("_"))
    return [v for v in found if isinstance(v, type) and issubclass(v, Op) and v is not Op]


def _norm(w: Wanted) -> Op[Any]:
    # A normalised single column is its sign: its gradient cancels, except for what eps adds.
    eps, affine = w.choose(1e-5, None) if w.width > 1 else 1e3, w.choose(True, True, False)
    return ops.RMSNorm(
        w.choose(w.width, (*w.middle, w.width)),
        eps=eps,
        elementwise_affine=affine,
        zero_centered_gamma=w.choose(False, True),
    )


def _layer_norm(w: Wanted) -> Op[Any]:
    # So are two normalised columns.
    eps, affine = 1e-5 if w.width > 2 else 1e3, w.choose(True, True, False)
    return ops.LayerNorm(
        w.choose(w.width, (*w.middle, w.width)),
        eps=eps,
        elementwise_affine=affine,
        bias=w.choose(True, False),
        zero_centered_gamma=w.choose(False, True),
    )


def _grouped(w: Wanted) -> Op[Any]:
    bias, scaled = w.choose(False, False, True), w.choose(False, True)
    packed, low_rank = w.choose(True, True, False), w.choose(None, 2)
    options = {"scale_bias": scaled, "packed": packed, "low_rank": low_rank}
    made = ops.GroupedLinear(w.groups, w.width, w.out, bias=bias, **options)
    if low_rank is not None:
        torch.nn.init.uniform_(made.up)
    return made


def _cross_entropy(w: Wanted) -> Op[Any]:
    vocab = w.out + 2  # three targets and ignore_index are drawn
    return ops.LinearCrossEntropy(
        w.width,
        vocab,
        bias=w.choose(False, True),
        weight=w.choose(None, torch.linspace(0.5, 2.0, vocab)),
        label_smoothing=w.choose(0.0, 0.25),
        z_loss=w.choose(0.0, 0.5),
        soft_cap=w.choose(None, 2.0),
        temperature=w.choose(1.0, 0.5),
        reduction=w.choose("sum", "mean", "none"),
        publishes=w.choose((), ("lse",), ("entropy", "log_probs")),
        chunk_bytes=w.choose(1 << 20, 300),
    )


def _router(w: Wanted) -> Op[Any]:
    options = {
        "score": w.choose("softmax", "sigmoid"),
        "normalize": w.top_k > 1
        and w.choose(True, False),  # of one weight it leaves 1, and no gradient
        "scale": w.choose(1.0, 2.5),
        "bias": w.choose(False, True),
        "expert_bias": w.choose(False, True),
        "groups": w.choose(1, 1 if w.groups % 2 else 2),
        "balance_loss": w.choose(None, 0.5 if w.groups > 1 else None),  # of one it is constant
        "z_loss": w.choose(None, 0.25),
    }
    top_groups = 2 if options["groups"] == 2 and w.top_k > w.groups // 2 else 1
    made = ops.Router(w.width, w.groups, w.top_k, top_groups=top_groups, **options)
    if made.expert_bias is not None:
        made.expert_bias += torch.arange(w.groups).sub(1.0).mul(w.choose(0.0, 0.1))
    return made


# fmt: off
register(ops.Linear,        lambda w: ops.Linear(w.width, w.out, bias=w.choose(False, True, False)), width="maps")
register(ops.Bias,          lambda w: ops.Bias(w.width))
register(ops.GroupedLinear, _grouped, width="maps", flat=True)
register(ops.RMSNorm,       _norm)
register(ops.LayerNorm,     _layer_norm)
register(ops.L2Norm,        lambda w: ops.L2Norm(1e-6 if w.width > 1 else 1e3))
_each(types_of(ACTS),       lambda op, w: op())
register(ops.GELU,          lambda w: ops.GELU(w.choose("none", "tanh")))
register(ops.ScaledSReLU,   lambda w: ops.ScaledSReLU())
# those with more options below
_each(types_of(GATED | SCALED_GATED), lambda op, w: op(interleave=w.choose(0, 1)), width="halves")
_each((ops.SiTUGLU, ops.ScaledSiTUGLU),
      lambda op, w: op(w.choose(4.0, 0.5), w.choose(25.0, 0.75), interleave=w.choose(0, 1)), width="halves")
_each((ops.GEGLU, ops.ScaledGEGLU), lambda op, w: op(w.choose("none", "tanh")), width="halves")
_each((ops.ClampedSwiGLU, ops.ScaledClampedSwiGLU),
      lambda op, w: op(w.choose(7.0, 0.5), alpha=w.choose(1.702, 1.0), offset=w.choose(1.0, 0.0)), width="halves")
register(ops.Router,        _router, flat=True, routing="tokens")
register(ops.Dispatch,      lambda w: ops.Dispatch(w.groups, w.choose(None, 0.5)), flat=True, routing="tokens")
register(ops.Permute,       lambda w: ops.Permute(w.top_k), flat=True, routing="tokens")
register(ops.Combine,       lambda w: ops.Combine(w.top_k), flat=True, routing="copies")
register(ops.InjectLoss,    lambda w: ops.InjectLoss())
register(ops.RoPE,          lambda w: ops.RoPE(w.choose(False, True)), heads=True)
register(ops.LinearCrossEntropy, _cross_entropy, width="ends")
register(ops.Quantize,      lambda w: ops.Quantize(w.choose(True, False), w.choose(False, True)))
register(ops.ConstantScale, lambda w: ops.ConstantScale(w.choose(0.5, -3.0, 0.0)))
register(ops.Dropout,       lambda w: ops.Dropout(w.choose(0.3, 0.0, 1.0)).train(w.choose(True, True, False)))
register(ops.Identity,      lambda w: ops.Identity())
register(ops.Reshape,       lambda w: ops.Reshape(*w.choose((-1, w.width), (-1, 1, w.width))))
register(ops.Tap,           lambda w: ops.Tap(w.choose("residual", "skip")))
register(ops.Swap,          lambda w: ops.Swap("residual", "skip"))
register(ops.Add,           lambda w: ops.Add(w.choose("residual", "skip")))
register(ops.AllReduce,     lambda w: ops.AllReduce())  # what collectives send is tested on ranks
_each((ops.AllGather, ops.ReduceScatter), lambda op, w: op(None, -1))
# fmt: on
