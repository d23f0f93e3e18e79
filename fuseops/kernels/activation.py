"""Activations, gated and not, plain and scaled by a probability a row, in one set of kernels.

Maths (float32, one rounding at each store):
    y = f(x)        kinds are the names of VALUES
    y = f(g) * u    those of GATES there
    y = h sigmoid(alpha h) * (clamp(u, -limit, limit) + offset), h = min(g, limit)    kind clamped_swiglu
    y = alpha tanh(g / alpha) sigmoid(g) * limit tanh(u / limit)                      kind situglu
    scaled: y * probs[..., None];  dprobs = sum over columns of dy * y before scaling
Shapes: x (..., F) or (..., 2F), probs (...), y and dy (..., F).
Layout: rows may be strided, columns are contiguous. The gate is the first half of the last axis;
with interleave = b gate and linear alternate in blocks of b columns.
Compiled code: what scales stands between products that no compiler fuses with it, so it stays a kernel there; of others
the compiler gets the twin.
Hardware: sm_80 and later. Adding a kind: one branch in device/act.py, a line in VALUES and one in SLOPES.
`clamped_silu` and `situ` are gates alone: their other half is shaped too.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseops.errors import FuseOpsError
from fuseops.kernels import tiles
from fuseops.kernels.bias import row_factors, sum_partials
from fuseops.kernels.configs import Config, Space
from fuseops.kernels.launch import device, launch, pdl_chain, pdl_overlap
from fuseops.kernels.records import of_fields
from fuseops.kernels.registry import Cases, floats, kernel_op, on_meta
from fuseops.kernels.tiles import as_rows, cdiv, check_shape, upcast

# Numbers of formulas are literals in the functions of the twins: under `torch.compile(dynamic=True)` dynamo makes a
# symbol of any other float, a global's or a default's, which a second backward of the graph cannot read.

GATES = {
    "glu": "sigmoid",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "qgeglu": "qgelu",
    "reglu": "relu",
    "sreglu": "srelu",
    "swiglu": "silu",
    "clamped_swiglu": "clamped_silu",
    "situglu": "situ",
}
"""Gated kinds and the activation of their gate."""


def _gelu_cdf(x: Tensor) -> Tensor:
    return 0.5 + 0.5 * torch.erf(x * 0.5**0.5)


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    root, cubic = 0.7978845608028654, 0.044715  # sqrt(2 / pi)
    square = (x * x).clamp(max=1024)  # s is 0 or 1 from there on, and inf times 0 would be NaN
    s = torch.sigmoid(2 * root * x * (1 + cubic * square))  # 0.5 (1 + tanh(z / 2))
    return s + x * s * (1 - s) * 2 * root * (1 + 3 * cubic * square)


def _silu_slope(x: Tensor, alpha: float) -> Tensor:
    s = torch.sigmoid(alpha * x)
    return s + alpha * (x * s * (1 - s))  # alpha x alone may be inf


VALUES = {
    "gelu": lambda x: x * _gelu_cdf(x),  # F.gelu of float32 gives NaN at infinity on the CPU
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}

SLOPES = {
    "gelu": lambda x: _gelu_cdf(x) + x * torch.exp(-0.5 * x * x) / 2.5066282746310002,  # sqrt(2 pi)
    "gelu_tanh": _gelu_tanh_slope,
    "qgelu": lambda x: _silu_slope(x, 1.702),
    "relu": lambda x: torch.where(x <= 0, 0.0, torch.ones_like(x)),
    "srelu": lambda x: 2 * F.relu(x),
    "silu": lambda x: _silu_slope(x, 1.0),
    "sigmoid": lambda x: torch.sigmoid(x) * (1 - torch.sigmoid(x)),
}

KINDS = (*VALUES, *GATES)


def split_gate(x: Tensor, interleave: int = 0) -> tuple[Tensor, Tensor]:
    """(gate, linear) halves of the last axis, or of its alternating blocks of `interleave` columns."""
    if not interleave:
        gate, linear = x.chunk(2, dim=-1)
        return gate, linear
    # by reshape, which a batch of output gradients (is_grads_batched) goes through, and unflatten does not
    *rows, width = x.shape
    gate, linear = x.reshape(*rows, width // (2 * interleave), 2, interleave).unbind(-2)
    return gate.reshape(*rows, width // 2), linear.reshape(*rows, width // 2)


def join_gate(gate: Tensor, linear: Tensor, interleave: int = 0) -> Tensor:
    """Inverse of `split_gate`."""
    if not interleave:
        return torch.cat([gate, linear], dim=-1)
    *rows, width = gate.shape
    halves = [h.reshape(*rows, width // interleave, interleave) for h in (gate, linear)]
    return torch.stack(halves, dim=-2).reshape(*rows, 2 * width)


Form = tuple[Any, ...]
"""The kernels' arguments for an activation: its kind, and fields of `ActivationForm` as far as it has any."""
READ = {"clamped_swiglu": 3, "situglu": 2}
"""The number of alpha, limit and offset that the formula of a kind reads; 0 for other kinds."""


class ActivationForm(NamedTuple):
    """An `ActivationForm` holds a kind of activation, one of KINDS, and the constants of formulas."""

    kind: str
    interleave: int = 0
    alpha: float = 1.702
    limit: float = 7.0
    offset: float = 1.0


def _halves(gate: Tensor, linear: Tensor, form: ActivationForm) -> tuple[Tensor, Tensor]:
    """(f(gate), l(linear)), whose product is y."""
    kind, _, alpha, limit, offset = form
    if kind == "clamped_swiglu":
        h = gate.clamp(max=limit)
        return h * torch.sigmoid(alpha * h), linear.clamp(-limit, limit) + offset
    if kind == "situglu":
        gate = alpha * torch.tanh(gate / alpha) * torch.sigmoid(gate)
        return gate, limit * torch.tanh(linear / limit)
    return VALUES[GATES[kind]](gate), linear


def _half_slopes(
    gate: Tensor, linear: Tensor, form: ActivationForm
) -> tuple[Tensor, Tensor | float]:
    """(f'(gate), l'(linear))."""
    kind, _, alpha, limit, _ = form
    if kind == "clamped_swiglu":
        slope = _silu_slope(gate.clamp(max=limit), alpha).masked_fill(gate > limit, 0.0)
        inside = torch.where((linear > limit) | (linear < -limit), 0.0, torch.ones_like(linear))
        return slope, inside
    if kind == "situglu":
        t, s = torch.tanh(gate / alpha), torch.sigmoid(gate)
        return (1 - t * t) * s + alpha * t * s * (1 - s), 1 - torch.tanh(linear / limit).square()
    return SLOPES[GATES[kind]](gate), 1.0


def _value(x: Tensor, form: ActivationForm) -> Tensor:
    """f(x), or f(gate) * l(linear), of a wide x."""
    if form.kind not in GATES:
        return VALUES[form.kind](x)
    f, linear = _halves(*split_gate(x, form.interleave), form)
    return f * linear


def _gradient(dy: Tensor, x: Tensor, form: ActivationForm) -> Tensor:
    """dx of `_value`."""
    if form.kind not in GATES:
        return dy * SLOPES[form.kind](x)
    halves = split_gate(x, form.interleave)
    f, linear = _halves(*halves, form)
    df, dlinear = _half_slopes(*halves, form)
    return join_gate(dy * df * linear, dy * f * dlinear, form.interleave)


def _act_fwd(x: Tensor, *form: Any) -> Tensor:
    return _value(upcast(x), ActivationForm(*form)).to(x.dtype)


def _scaled_act_fwd(x: Tensor, probs: Tensor, *form: Any) -> Tensor:
    y = _value(upcast(x), ActivationForm(*form))
    return (y * probs.to(y.dtype).unsqueeze(-1)).to(x.dtype)


def _act_bwd(dy: Tensor, x: Tensor, *form: Any) -> Tensor:
    return _gradient(upcast(dy), upcast(x), ActivationForm(*form)).to(x.dtype)


def _act_bwd_bias(dy: Tensor, x: Tensor, *form: Any) -> tuple[Tensor, Tensor]:
    dx = _gradient(upcast(dy), upcast(x), ActivationForm(*form))
    return dx.to(x.dtype), dx.reshape(-1, dx.shape[-1]).sum(0)


def _scaled_act_bwd(
    dy: Tensor, x: Tensor, probs: Tensor | None, kind: str, need_dprobs: bool = True, need_y: bool = False,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    full, grad, form = upcast(x), upcast(dy), ActivationForm(kind, *options)
    scale = 1 if probs is None else probs.to(full.dtype).unsqueeze(-1)
    dx = _gradient(grad * scale, full, form).to(x.dtype)
    dprobs, y = full.new_empty(0), x.new_empty(0)
    if need_dprobs or need_y:
        value = _value(full, form)
        dprobs = (grad * value).sum(-1) if need_dprobs else dprobs
        y = (value * scale).to(x.dtype) if need_y else y
    return dx, dprobs, y


def _scaled_act_bwd_into(
    x: Tensor, dy: Tensor, probs: Tensor | None, kind: str, *options: Any
) -> tuple[Tensor, Tensor]:
    dx, *rest = _scaled_act_bwd(dy, x, probs, kind, *options)
    x.copy_(dx)
    return rest[0], rest[1]


def _act_dprobs(dy: Tensor, x: Tensor, *form: Any) -> Tensor:
    return (upcast(dy) * _value(upcast(x), ActivationForm(*form))).sum(-1)


def _bias_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """As a column sum, with three tensors in flight: programs that load ahead, or more that do not."""
    return [tiles.column_tile(dims[-1], itemsize, *c) for c in ((2048, 3, 6, 4), (4096, 1, 8, 4))]


def _gate_bias_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """With five tensors: fewer programs, each of which loads ahead. Rows that are not aligned would spill
    in large tiles.
    """
    large = dims[-1] % 16 == 0
    return [tiles.column_tile(dims[-1], itemsize, *((4096, 2, 4, 4) if large else (2048, 2, 6, 4)))]


FWD, BWD, GATE_FWD, GATE_BWD, CLAMPED_BWD = (
    Space(name, tiles.wide_candidates, tiles.wide_default(place))
    for name, place in (
        ("act_fwd", 0), ("act_bwd", 1), ("gate_fwd", 2), ("gate_bwd", 1), ("clamped_bwd", 0)
    )
)  # fmt: skip
SCALED_BWD = Space("scaled_act_bwd", tiles.row_loop_candidates)
BWD_BIAS = Space("act_bwd_bias", _bias_candidates)
GATE_BWD_BIAS = Space("gate_bwd_bias", _gate_bias_candidates)


def _cases(*, dy: bool = False, probs: bool = False) -> Cases:
    """Every kind in bf16, the other dtypes with swiglu and gelu, both interleaved forms; N
    divisible by 16 and not.
    """
    forms = [(kind, torch.bfloat16, 4096, 0) for kind in KINDS]
    forms += [
        (kind, dtype, 4096, 0)
        for kind in ("gelu", "swiglu")
        for dtype in (torch.float16, torch.float32)
    ]
    forms += [
        ("clamped_swiglu", torch.bfloat16, 4096, 1),
        ("swiglu", torch.bfloat16, 4096, 32),
        ("swiglu", torch.bfloat16, 100, 0),
    ]
    for kind, dtype, n, interleave in forms:
        x = on_meta(8192, n * (1 + (kind in GATES)), dtype=dtype)
        args = [on_meta(8192, n, dtype=dtype)] * dy + [x]
        args += [floats(8192)] * probs
        tail = (True, True) if dy and probs else ()
        yield (*args, kind, *tail, interleave)


@kernel_op(twin=_act_fwd, fuses=True, cases=_cases)
@of_fields(ActivationForm)
def act_fwd(x: Tensor, form: ActivationForm) -> Tensor:
    """f(x), or f(gate) * linear."""
    return _forward(x, None, form)


@kernel_op(twin=_scaled_act_fwd, cases=lambda: _cases(probs=True))
@of_fields(ActivationForm)
def scaled_act_fwd(x: Tensor, probs: Tensor, form: ActivationForm) -> Tensor:
    """act_fwd(x) * probs[..., None] with one rounding."""
    return _forward(x, probs, form)


@kernel_op(twin=_act_bwd, fuses=True, cases=lambda: _cases(dy=True))
@of_fields(ActivationForm)
def act_bwd(dy: Tensor, x: Tensor, form: ActivationForm) -> Tensor:
    """dx of act_fwd."""
    constants, n = _constants(x, form)
    x2, dy2, dx = as_rows(x), _grad_rows(dy, x, n), _like(x)
    space = (
        CLAMPED_BWD if form.kind == "clamped_swiglu" else GATE_BWD if form.kind in GATES else BWD
    )
    config = space.pick(len(x2), (n,), x)
    grid = tiles.tile_grid(len(x2), n, config)
    kernel = device("activation").act_bwd_kernel
    sizes = (len(x2), n, dy2.stride(0), x2.stride(0))
    launch(kernel, grid, dy2, x2, dx, *sizes, **constants, **pdl_overlap(x.device), **config)
    return dx


@kernel_op(twin=_act_bwd_bias, fuses=True, cases=lambda: _cases(dy=True))
@of_fields(ActivationForm)
def act_bwd_bias(dy: Tensor, x: Tensor, form: ActivationForm) -> tuple[Tensor, Tensor]:
    """(dx, dbias float32) where x had a bias added: one pass, then the fixed-order sum of the
    partial sums.
    """
    constants, n = _constants(x, form)
    x2, dy2, dx = as_rows(x), _grad_rows(dy, x, n), _like(x)
    config = dict((GATE_BWD_BIAS if form.kind in GATES else BWD_BIAS).pick(len(x2), (n,), x))
    blocks = cdiv(n, config["BLOCK_N"])
    programs = tiles.row_programs(len(x2), blocks, config, x)
    partial = torch.empty(programs, x.shape[-1], dtype=torch.float32, device=x.device)
    kernel = device("activation").act_bwd_bias_kernel
    sizes = (len(x2), n, dy2.stride(0), x2.stride(0))
    launch(
        kernel, (blocks, programs), dy2, x2, dx, partial, *sizes,
        **constants, **pdl_chain(x.device)[0], AT_ONCE=tiles.rows_at_once(config, x.itemsize), **config,
    )  # fmt: skip
    return dx, sum_partials(partial)


def _bwd_cases() -> Cases:
    """As MLPs call it: experts with probabilities, dense ones without."""
    for dy, x, probs, kind, _, need_y, interleave in _cases(dy=True, probs=True):
        yield dy, x, probs, kind, True, need_y, interleave
        yield dy, x, None, kind, False, need_y, interleave


@kernel_op(twin=_scaled_act_bwd, cases=_bwd_cases)
def scaled_act_bwd(
    dy: Tensor, x: Tensor, probs: Tensor | None, kind: str, need_dprobs: bool = True, need_y: bool = False,
    interleave: int = 0, alpha: float = 1.702, limit: float = 7.0, offset: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dprobs float32, y) of scaled_act_fwd in one pass; what is not needed is empty. probs: None for ones."""
    dx = _like(x)
    form = ActivationForm(kind, interleave, alpha, limit, offset)
    return dx, *_scaled_bwd(dx, dy, x, probs, need_dprobs, need_y, form)


@kernel_op(
    twin=_scaled_act_bwd_into,
    fuses=True,
    mutates=("x",),
    announces=False,  # a spare x: see `registry.held_once`
    nbytes=lambda x, dy, *rest: scaled_act_bwd.nbytes(dy, x, *rest),
    cases=lambda: ((x, dy, *rest) for dy, x, *rest in islice(_cases(dy=True, probs=True), 1)),
)
def scaled_act_bwd_into(
    x: Tensor, dy: Tensor, probs: Tensor | None, kind: str, need_dprobs: bool = True, need_y: bool = False,
    interleave: int = 0, alpha: float = 1.702, limit: float = 7.0, offset: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dprobs, y) of `scaled_act_bwd`, whose dx is written over x, contiguous; it is the same kernel."""
    if not x.is_contiguous():
        raise FuseOpsError(f"x has strides {x.stride()}, expected contiguous: dx takes its place.")
    form = ActivationForm(kind, interleave, alpha, limit, offset)
    return _scaled_bwd(x, dy, x, probs, need_dprobs, need_y, form)


def _scaled_bwd(
    dx: Tensor, dy: Tensor, x: Tensor, probs: Tensor | None, need_dprobs: bool, need_y: bool, form: ActivationForm
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write dx, which may be x, since a program reads the elements of x before it writes them.   -> dprobs, y"""
    constants, n = _constants(x, form)
    x2, dy2 = as_rows(x), _grad_rows(dy, x, n)
    scale = row_factors(probs, x)
    dprobs = x.new_empty(x.shape[:-1] if need_dprobs else 0, dtype=torch.float32)
    y = x.new_empty(*x.shape[:-1], n) if need_y else x.new_empty(0)
    config = SCALED_BWD.pick(len(x2), (n,), x)
    launch(
        device("activation").scaled_act_bwd_kernel, (cdiv(len(x2), config["BLOCK_R"]),),
        dy2, x2, scale, dx, dprobs, y, len(x2), n, dy2.stride(0), x2.stride(0),
        **constants, SCALED=probs is not None, NEED_DPROBS=need_dprobs, NEED_Y=need_y,
        **pdl_overlap(x.device), **config,
    )  # fmt: skip
    return dprobs, y


@kernel_op(
    twin=_act_dprobs,
    fuses=True,
    cases=lambda: (c for c in _cases(dy=True) if c[2] == "swiglu"),
)
@of_fields(ActivationForm)
def act_dprobs(dy: Tensor, x: Tensor, form: ActivationForm) -> Tensor:
    """dprobs float32 of scaled_act_fwd alone, which does not depend on probs."""
    constants, n = _constants(x, form)
    x2, dy2 = as_rows(x), _grad_rows(dy, x, n)
    dprobs = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    config = SCALED_BWD.pick(len(x2), (n,), x)
    launch(
        device("activation").act_dprobs_kernel, (cdiv(len(x2), config["BLOCK_R"]),),
        dy2, x2, dprobs, len(x2), n, dy2.stride(0), x2.stride(0), **constants, **config,
    )  # fmt: skip
    return dprobs


def _forward(x: Tensor, probs: Tensor | None, form: ActivationForm) -> Tensor:
    constants, n = _constants(x, form)
    x2, y = as_rows(x), x.new_empty(*x.shape[:-1], n)
    scale = row_factors(probs, x)
    config = (GATE_FWD if form.kind in GATES else FWD).pick(len(x2), (n,), x)
    grid = tiles.tile_grid(len(x2), n, config)
    launch(
        device("activation").act_fwd_kernel, grid, x2, scale, y, len(x2), n, x2.stride(0),
        SCALED=probs is not None, **constants, **pdl_overlap(x.device), **config,
    )  # fmt: skip
    return y


def _constants(x: Tensor, form: ActivationForm) -> tuple[dict[str, Any], int]:
    """(constexprs of the kind, output width), after checking the arguments."""
    kind, interleave, *shape = form
    if kind not in KINDS:
        raise FuseOpsError(f"unknown activation '{kind}'. Known: {', '.join(KINDS)}.")
    gated, width = kind in GATES, x.shape[-1]
    step = 2 * max(interleave, 1)
    if gated and width % step != 0:
        raise FuseOpsError(f"{kind}: last axis of x is {width}, expected a multiple of {step}.")
    if not gated and interleave:
        raise FuseOpsError(f"{kind} has no gate, so interleave={interleave} has no meaning.")
    constants = {
        "ACT": GATES.get(kind, kind),
        "GATED": gated,
        "INTERLEAVE": interleave,
        **shape_constants(kind, *shape),
    }
    return constants, width // 2 if gated else width


def shape_constants(kind: str, *shape: float) -> dict[str, float]:
    """constexprs of alpha, limit and offset, 0 for those that the kind does not read."""
    given = (*shape[: READ.get(kind, 0)], 0.0, 0.0, 0.0)
    return dict(zip(("ALPHA", "LIMIT", "OFFSET"), given, strict=False))


def _grad_rows(dy: Tensor, x: Tensor, n: int) -> Tensor:
    check_shape("dy", dy, (*x.shape[:-1], n))
    return as_rows(dy)


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
