"""Recognition of a module by what it computes.

Names and attributes only suggest what a module is. A probe decides: its own forward, and backward, run on a few random
rows and are compared with the formula that would replace it. A module is not recognised if results differ, if it draws
random numbers, changes its attributes, or cannot run alone. Probes run on the CPU, with small random parameters instead
of the module's own, which may not be loaded yet.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseops import kernels as K
from fuseops import ops
from fuseops.kernels.activation import Form
from fuseops.ops.activations import ScaledActivation

ROWS = 16
# modules compute in float32 in places, whatever their dtype
TOLERANCE = 32 * torch.finfo(torch.float32).eps
MUTATED = object()  # result of `run_forward` where the forward has changed the module


# activation kind -> the op that also multiplies each row by its probability
SCALED_OPS: dict[str, Callable[..., ScaledActivation]] = {
    "swiglu": ops.ScaledSwiGLU,
    "clamped_swiglu": ops.ScaledClampedSwiGLU,
    "geglu": ops.ScaledGEGLU,
    "geglu_tanh": partial(ops.ScaledGEGLU, "tanh"),
    "qgeglu": ops.ScaledQGEGLU,
    "reglu": ops.ScaledReGLU,
    "sreglu": ops.ScaledSReGLU,
    "srelu": ops.ScaledSReLU,
}
OPTIONS = ("interleave", "alpha", "limit", "offset")  # of a Form, as arguments of those ops
PLAIN_KINDS = ("silu", "gelu", "gelu_tanh", "qgelu", "relu", "srelu")
EXPERT_PARAMETERS = {f"{n}_proj{bias}" for n in ("gate_up", "up", "down") for bias in ("", "_bias")}
GATED_KINDS = {gate: kind for kind, gate in K.GATES.items() if kind != "clamped_swiglu"}


def scaled_activation(form: Form) -> ScaledActivation | None:
    """The op for an activation that also multiplies each row by its probability, or None."""
    kind, *options = form
    make = SCALED_OPS.get(kind)
    return None if make is None else make(**dict(zip(OPTIONS, options, strict=False)))


# --- probes


def matches(found: Any, expected: Any, *leaves: Tensor) -> bool:
    """Whether a module's result equals the expected one, and so do the gradients of `leaves`."""
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    close = torch.isclose(found.double(), expected.double(), rtol=TOLERANCE, atol=TOLERANCE)
    return bool(close.all()) and (not leaves or _matching_grads(found, expected, leaves))


def _matching_grads(found: Tensor, expected: Tensor, leaves: tuple[Tensor, ...]) -> bool:
    """Whether each row of the gradients agrees in norm, so that a detached part is not taken for rounding."""
    grads = [
        run_or_none(
            torch.autograd.grad,
            t,
            leaves,
            random_tensor(*t.shape).to(t),
            True,
            materialize_grads=True,
        )
        for t in (found, expected)
    ]
    if grads[0] is None:
        return False
    return all(
        bool(((a - b).norm(dim=-1) <= 1e-3 * b.norm(dim=-1)).all())
        for a, b in zip(*grads, strict=True)
    )


def shallow_copy(module: nn.Module) -> Any:
    """A shallow copy of a module of any class; `copy.copy` fails for FSDP2's."""
    new = object.__new__(type(module))
    new.__dict__.update(module.__dict__)
    return new


def probe_copies(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], modules: Mapping[str, nn.Module]
) -> Iterator[nn.Module]:
    """Copies of a module with other parameters and children: one in training mode, one in evaluation mode."""
    for training in (True, False):
        new = shallow_copy(module)
        new._parameters = dict(parameters)
        new._buffers = {}
        new._modules = dict(modules)
        yield _copy_in_mode(new, training)


def _copy_in_mode(module: nn.Module, training: bool) -> Any:
    """A copy of a module and of its children, in training or in evaluation mode."""
    new = shallow_copy(module)
    new.training = training
    new._modules = {k: m and _copy_in_mode(m, training) for k, m in module._modules.items()}
    return new


@contextmanager
def isolated() -> Iterator[None]:
    """A context for probes: CPU, autograd on, autocast off, and a seeded generator, whatever the caller has set."""
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
        with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
            torch.default_generator.manual_seed(0)  # torch.manual_seed would reach other devices
            yield


def run_or_none(run: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """The result of a call; None for any exception."""
    try:
        return run(*args, **keywords)
    except Exception:  # code that cannot run alone is not recognised
        return None


def run_forward(module: nn.Module, *args: Any, **keywords: Any) -> Any:
    """The result of the class's forward; None for any exception, MUTATED if it has changed the module's attributes."""
    before, now = {**vars(module)}, vars(module)
    found = run_or_none(type(module).forward, module, *args, **keywords)
    unchanged = now.keys() == before.keys() and all(now[k] is v for k, v in before.items())
    return found if unchanged else MUTATED


def random_tensor(*shape: int) -> Tensor:
    """A random float32 tensor on the CPU, seeded by its shape."""
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def _scales(least: float, most: float) -> Tensor:
    """Magnitudes from 10**least to 10**most.   -> (ROWS, 1) on the CPU"""
    exponents = torch.arange(ROWS, device="cpu", dtype=torch.float32) / (ROWS - 1)
    return (10.0 ** (least + (most - least) * exponents))[:, None]


# --- activations


def _has_state(inner: Any) -> bool:
    """Whether it is a module with parameters or buffers, so that what it computes may change in training."""
    return isinstance(inner, nn.Module) and bool([*inner.parameters(), *inner.buffers()])


@isolated()
def activation_of(act_fn: Any) -> Form | None:
    """The activation without gate that a callable computes, or None."""
    if _has_state(act_fn):
        return None
    x = _wide_range(64).requires_grad_()
    found = run_or_none(act_fn, x.clone())
    for kind in PLAIN_KINDS:
        if matches(found, K.act_fwd.twin(x, kind), x):
            return (kind,)
    return None


@isolated()
def gate_of(experts: Any) -> Form | None:
    """The activation of an experts module, its `_apply_gate`, or `act_fn` if it has no gate; None if unknown."""
    if not experts.has_gate:
        return activation_of(getattr(experts, "act_fn", None))
    act_fn = experts._modules.get("act_fn")
    other_state = {*experts._parameters, *experts._buffers} - EXPERT_PARAMETERS
    if other_state or _has_state(act_fn):
        return None
    x = _wide_range(32).requires_grad_()
    gate: Any = getattr(experts, "_apply_gate", None)
    found = run_or_none(gate, x.clone())
    for candidate in _gate_candidates(experts):
        if matches(found, K.act_fwd.twin(x, *candidate), x):
            return candidate
    return None


def _gate_candidates(experts: nn.Module) -> Iterator[Form]:
    """Known gated activations: gate in the first half or in every second column, clamped or not."""
    for interleave in (0, 1):
        for kind in GATED_KINDS.values():
            yield kind, interleave
        for limit in _positive_attributes(experts, "limit"):
            for alpha in (*_positive_attributes(experts, "alpha"), 1.0):
                for offset in (1.0, 0.0):
                    yield "clamped_swiglu", interleave, alpha, limit, offset


def _positive_attributes(module: nn.Module, word: str) -> list[float]:
    """Positive numbers among the attributes whose name contains a word."""
    attributes = vars(module).items()
    return [float(v) for k, v in attributes if word in k and isinstance(v, (int, float)) and v > 0]


def _wide_range(columns: int) -> Tensor:
    """Random rows of magnitudes from 0.1 to far beyond any clamp."""
    return random_tensor(ROWS, columns).double() * _scales(-1, 4)


def extra_arguments(module: nn.Module) -> list[str]:
    """Names of the arguments that a forward takes besides x, such as the gate of Mamba's norms."""
    _, _, *more = inspect.signature(type(module).forward).parameters.values()
    return [p.name for p in more if p.kind is not p.VAR_KEYWORD]


# --- norms and MLPs


class Norm(NamedTuple):
    """y = x / sqrt(mean(x^2) + eps) * weight, or * (1 + weight) if zero_centered, as in Gemma."""

    eps: float
    zero_centered: bool


@isolated()
def norm_of(module: nn.Module) -> Norm | None:
    """The RMSNorm over the last axis that a module with one parameter, a weight, computes, or None."""
    weight: Any = module._parameters["weight"]
    eps = next((vars(module)[n] for n in ("variance_epsilon", "eps") if n in vars(module)), None)
    if module._buffers or weight.dim() != 1 or not isinstance(eps, float):
        return None
    # eps counts in some rows
    x = (random_tensor(ROWS, len(weight)) * _scales(-4, 1)).requires_grad_()
    scale = nn.Parameter(random_tensor(len(weight)))
    y = K.rmsnorm_fwd.twin(x, None, eps)[0]
    copies = [*probe_copies(module, {"weight": scale}, {})]
    found = [run_forward(m, x.clone()) for m in copies]
    for zero_centered in (False, True):
        if all(matches(f, y * (scale + zero_centered), x, scale) for f in found):
            return Norm(eps, zero_centered)
    return None


GATED, PLAIN_MLP = ("gate_proj", "up_proj", "down_proj"), ("up_proj", "down_proj")


@isolated()
def mlp_of(module: nn.Module) -> Form | None:
    """The activation of a module that computes down_proj(act(gate_proj(x)) * up_proj(x)) or
    down_proj(act(up_proj(x))); else None.
    """
    gated = "gate_proj" in module._modules
    names = GATED if gated else PLAIN_MLP
    act = activation_of(getattr(module, "act_fn", None))
    if module._parameters or module._buffers or act is None:
        return None
    if gated and act[0] not in GATED_KINDS:
        return None
    others = {k: m for k, m in module._modules.items() if k not in names and m is not None}
    if any(map(_has_state, others.values())):
        return None
    layers = {name: nn.Linear(6, 6, bias=False, device="cpu") for name in names}
    for k, layer in enumerate(layers.values()):
        layer.weight = nn.Parameter(random_tensor(6, 6 + k)[:, :6].contiguous())
    x = random_tensor(ROWS, 6).requires_grad_()
    up = layers["up_proj"](x)
    h = K.act_fwd.twin(layers["gate_proj"](x), *act) * up if gated else K.act_fwd.twin(up, *act)
    expected, weights = layers["down_proj"](h), [layer.weight for layer in layers.values()]
    for m in probe_copies(module, {}, {**others, **layers}):
        if not matches(run_forward(m, x.clone()), expected, x, *weights):
            return None
    return (GATED_KINDS[act[0]], 0) if gated else act


def packed_mlp_of(module: nn.Module) -> Form | None:
    """The gated activation of an MLP whose gate and up are packed, from its `act_fn`; None if unknown."""
    act = activation_of(getattr(module, "act_fn", None))
    kind = None if act is None else GATED_KINDS.get(act[0])
    return None if kind is None else (kind, 0)


# --- routers


class Route(NamedTuple):
    """A `Route` holds the options of a top-k router, as `ops.Router` has them."""

    top_k: int
    score: str
    normalize: bool
    scale: float
    groups: int
    top_groups: int


@isolated()
def route_of(router: Any) -> Route | None:
    """The options of a module with a weight and a `top_k` that computes (logits, weights, experts) of a known top-k
    router, or None.
    """
    attributes, weight = vars(router), router._parameters["weight"]
    top_k = attributes["top_k"]
    if weight.dim() != 2 or not isinstance(top_k, int):
        return None
    experts, width = weight.shape
    if not 1 <= top_k <= experts or {*router._parameters} - {"weight", "bias"}:
        return None
    if {*router._buffers} - {"e_score_correction_bias"}:
        return None
    parameters = {"weight": nn.Parameter(random_tensor(experts, width) / width**0.5)}
    if router._parameters.get("bias") is not None:
        parameters["bias"] = nn.Parameter(random_tensor(experts))
    correction = random_tensor(experts, 1)[:, 0] / 4 if router._buffers else None
    x = random_tensor(2 * ROWS, width).requires_grad_()
    leaves, found = (x, *parameters.values()), []
    for m in probe_copies(router, parameters, {}):
        if correction is not None:
            m._buffers = {"e_score_correction_bias": correction}
        found.append(run_forward(m, x.clone()))
    if any(not isinstance(f, tuple) or len(f) != 3 for f in found):
        return None
    logits = x @ parameters["weight"].t() + parameters.get("bias", 0.0)
    for route in _route_candidates(attributes, top_k, experts):
        form = route.score, route.normalize, route.scale, correction, route.groups, route.top_groups
        weights, chosen, _ = K.router_fwd.twin(logits, top_k, *form)
        expected = _dense_weights(weights, chosen, logits)
        if all(
            matches(f[0], logits, *leaves)
            and matches(_dense_weights(f[1], f[2], logits), expected, *leaves)
            for f in found
        ):
            return route
    return None


def _route_candidates(attributes: Mapping[str, Any], top_k: int, experts: int) -> Iterator[Route]:
    groups = attributes.get("num_group", attributes.get("n_group")) or 1
    scale = float(attributes.get("routed_scaling_factor") or 1.0)
    for score in ("softmax", "sigmoid"):
        for normalize in (True, False):
            for by in dict.fromkeys((scale, 1.0)):
                yield Route(top_k, score, normalize, by, 1, 1)
                if groups > 1 and experts % groups == 0:
                    yield Route(
                        top_k, score, normalize, by, groups, attributes.get("topk_group") or 1
                    )


def _dense_weights(weights: Any, chosen: Any, logits: Tensor) -> Tensor | None:
    """Weights (T, K) of chosen experts scattered to (T, E), so that the order of the K does not matter."""
    if not isinstance(weights, Tensor) or not isinstance(chosen, Tensor):
        return None
    if weights.shape != chosen.shape or chosen.dim() != 2 or len(chosen) != len(logits):
        return None
    return torch.zeros_like(logits).scatter(1, chosen.long(), weights.to(logits.dtype))
