"""The experts of a transformers model, run by fuseops: the function behind `experts_implementation="fuseops"`.

    Dispatch  Permute  fc1  act  fc2  Combine       of the module's own gate_up_proj (or up_proj) and down_proj

Attributes of the module give the layout of its weights (has_gate, has_bias, is_transposed) and its activation
(`_apply_gate`, `act_fn`), which is recognised by what it computes, or else runs as written. An index beyond the local
experts, which expert parallelism writes for experts of other ranks, is skipped and gives no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fuseops import ops
from fuseops.errors import FuseOpsError
from fuseops.layers.sequential import Sequential
from fuseops.ops.paths import SHARD_EXPERTS, STAND_IN, path_of

from . import adapters as peft
from . import recognise, stand_ins

NAME = "fuseops"


@stand_ins.owner_parameters("weight", "bias", "down", "up")
class Projection(ops.GroupedLinear):
    """A `Projection` is a GroupedLinear over the weight and bias of an experts module."""

    saves_for = ops.GroupedLinear._saves_for_low_rank


class StockActivation(nn.Module):
    """A `StockActivation` runs the activation of a transformers experts module as written, and multiplies each row
    by its probability.
    """

    reads = ("probs",)

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.__dict__["owner"] = owner

    def forward(self, h: Tensor, probs: Tensor) -> Tensor:
        experts: Any = self.owner
        a = experts._apply_gate(h) if experts.has_gate else experts.act_fn(h)
        return (a * probs.unsqueeze(-1)).to(h.dtype)


def forward(
    self: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    adapters: peft.Factors | None = None,
) -> Tensor:
    """The sum of the outputs of each token's experts, times their weights.

    hidden_states (T, D), top_k_index (T, K) int, top_k_weights (T, K) -> (T, D) in the dtype of hidden_states.
    Parameters are read from `self` at each call. Unsupported experts run as transformers' grouped_mm.
    adapters: low-rank factors of the parameters; by default those that PEFT's own forward has put in their place.
    """
    if torch.compiler.is_compiling():
        stand_ins.evaluate(get_or_build, self, top_k_index.shape[-1])
        stand_in = self.__dict__.get(STAND_IN)
    else:
        stand_in = get_or_build(self, top_k_index.shape[-1])
    spread = SHARD_EXPERTS in self.__dict__
    if spread and stand_in is None:
        raise FuseOpsError(
            f"these experts are spread over ranks, and fuseops cannot run them: {unsupported_reason(self)}."
        )
    if stand_in is None or (stand_ins.is_sharded(self) and not spread):
        return _stock_forward()(self, hidden_states, top_k_index, top_k_weights)
    experts: Any = self
    if getattr(self, "_is_expert_parallel", True) and not spread:
        top_k_index = top_k_index.masked_fill(top_k_index >= experts.num_experts, -1)
    device = hidden_states.device.type
    x = hidden_states
    if not torch.is_autocast_enabled(device):
        x = x.to(_raw_parameter(experts, "down_proj").dtype)  # type: ignore[union-attr]
    if adapters is None and not torch.compiler.is_compiling():
        adapters = peft.proxied_factors(self)
    if not adapters:
        y = stand_in(x, experts=top_k_index, weights=top_k_weights)
        return y.to(hidden_states.dtype)
    self.__dict__[peft.ADAPTERS] = adapters
    try:
        y = stand_in(x, experts=top_k_index, weights=top_k_weights)
    finally:
        del self.__dict__[peft.ADAPTERS]
    return y.to(hidden_states.dtype)


@stand_ins.only_while_attached
def bound_forward(self: nn.Module, *args: Any, **keywords: Any) -> Tensor:
    """`forward` as `apply` binds it. (`experts_implementation="fuseops"` calls `forward` of modules without it.)"""
    return forward(self, *args, **keywords)


@stand_ins.only_while_attached
def forward_adapted(self: Any, x: Tensor, *args: Any, **keywords: Any) -> Tensor:
    """The forward of PEFT adapters around experts: their factors are passed to `forward` of the experts."""
    inner = peft.base_module(self)
    if SHARD_EXPERTS in inner.__dict__ and peft.active_names(self) != []:
        raise FuseOpsError(
            f"{path_of(inner) or type(inner).__name__} has adapters of {self.parameter_name!r}, whose factors are of "
            "all experts, and this rank has a part of them (ExpertParallel). Adapt other modules (target_modules), or "
            "leave the experts on one rank."
        )
    own = inner.__dict__.get("forward")
    runs_here = getattr(own, "func", None) is bound_forward and not stand_ins.is_hooked(inner)
    plain = "adapter_names" not in keywords and not torch.compiler.is_compiling()
    found = (
        peft.expert_factors(self)
        if runs_here and plain and not stand_ins.is_sharded(inner)
        else None
    )
    if found is None:
        return type(self).forward(self, x, *args, **keywords)
    return functools.partial(forward, inner, x, adapters=found)(*args, **keywords)


def _stock_forward() -> Callable[..., Tensor]:
    from transformers.integrations.moe import grouped_mm_experts_forward

    return grouped_mm_experts_forward


# --- building


def unsupported_reason(experts: nn.Module) -> str | None:
    """Why fuseops cannot run these experts, or None."""
    attributes = vars(experts)
    required = ("num_experts", "has_gate", "has_bias", "is_transposed")
    if missing := [name for name in required if name not in attributes]:
        return f"does not say {', '.join(missing)}: no module of the experts interface"
    if attributes.get("has_post_expert_norm"):
        return "has a norm between the second product and the weights of the router"
    for name in _parameter_names(experts):
        weight = _raw_parameter(experts, name)
        if weight is None:
            return f"has no parameter {name}"
        if (why := stand_ins.quantized_reason(weight)) is not None:
            return f"{name} {why}"
        if weight.dim() != 2 + name.endswith("_proj"):
            return f"{name} has shape {tuple(weight.shape)}"
    return None


def _parameter_names(experts: Any) -> list[str]:
    names = ["gate_up_proj" if experts.has_gate else "up_proj", "down_proj"]
    return names + [f"{name}_bias" for name in names] if experts.has_bias else names


def _raw_parameter(experts: nn.Module, name: str) -> Tensor | None:
    """A parameter, below its parametrization."""
    if name in experts._parameters:
        return experts._parameters[name]
    beneath = getattr(experts._modules.get("parametrizations"), name, None)
    return getattr(beneath, "original", None)


def get_or_build(experts: nn.Module, top_k: int) -> Sequential | None:
    """The stand-in of these experts, rebuilt when their configuration changes; None if they are unsupported."""
    attributes = vars(experts)
    key = (
        *(top_k, attributes.get("num_experts")),
        *(attributes.get("has_gate"), attributes.get("has_bias"), attributes.get("is_transposed")),
        *(attributes.get("act_fn"), experts._modules.get("act_fn")),
        *(attributes.get("_apply_gate"), getattr(type(experts), "_apply_gate", None)),
        *(attributes.get(SHARD_EXPERTS), _has_hooked_act(experts)),
        *[v for v in attributes.values() if type(v) in (int, float)],
    )
    found: Sequential | None = stand_ins.attached(experts, key)
    if found is None and unsupported_reason(experts) is None:
        found = _build(experts, top_k)
        stand_ins.attach(experts, found, key)
    return found


def _has_hooked_act(experts: nn.Module) -> bool:
    act = experts._modules.get("act_fn")
    return act is not None and stand_ins.is_hooked(act)


def _build(experts: Any, top_k: int) -> Sequential:
    form = None if _has_hooked_act(experts) else recognise.gate_of(experts)
    act = None if form is None else recognise.scaled_activation(form)
    first, last, *_ = _parameter_names(experts)
    fc1, fc2 = _projection(experts, first), _projection(experts, last, scale_bias=True)
    layer = Sequential(
        {
            "dispatch": ops.Dispatch(experts.num_experts),
            "permute": ops.Permute(top_k),
            "fc1": fc1,
            "act": StockActivation(experts) if act is None else act,
            "fc2": fc2,
            "combine": ops.Combine(top_k),
        }
    )
    spread = vars(experts).get(SHARD_EXPERTS)
    if spread is not None:
        spread(layer)
    return layer


def _projection(experts: Any, name: str, scale_bias: bool = False) -> Projection:
    weight: Any = _raw_parameter(experts, name)
    groups, out, width = weight.shape
    if experts.is_transposed:
        out, width = width, out
    bias = bool(experts.has_bias)
    op = Projection(groups, width, out, bias, scale_bias=scale_bias, device="meta")
    sources: dict[str, stand_ins.Source] = {
        "weight": functools.partial(_read_transposed if experts.is_transposed else _read, name)
    }
    for i, part in enumerate(("down", "up")):
        sources[part] = functools.partial(peft.read_factor, name, i)
    if bias:
        sources["bias"] = functools.partial(_read, f"{name}_bias")
    stand_ins.bind_parameters(op, experts, sources)
    return op


def _read(name: str, owner: Any) -> Any:
    """A parameter by its name."""
    if name in owner.__dict__.get(peft.ADAPTERS, ()):  # below PEFT's proxy
        return _raw_parameter(owner, name)
    return getattr(owner, name)


def _read_transposed(name: str, owner: Any) -> Any:
    """A parameter (E, in, out), transposed to (E, out, in)."""
    return _read(name, owner).transpose(1, 2)


def register() -> None:
    """Register `experts_implementation="fuseops"` with transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, forward)
