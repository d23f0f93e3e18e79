"""The experts of a transformers model, run by fuseops: the function behind `experts_implementation="fuseops"`.

    Dispatch  Permute  fc1  act  fc2  Combine       of the module's own gate_up_proj (or up_proj) and down_proj

The module says how its weights lie (has_gate, has_bias, is_transposed) and what is between the products (`_apply_gate`,
`act_fn`), which is recognised by what it computes, or runs as written. An index beyond the local experts, as expert
parallelism writes for experts of other ranks, takes no product and gives no gradient.
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
from . import lent, recognise

NAME = "fuseops"


@lent.borrows("weight", "bias", "down", "up")
class Projection(ops.GroupedLinear):
    """A `Projection` is a GroupedLinear over the weight and bias of a module of experts."""

    saves_for = ops.GroupedLinear._saves_for_low_rank


class Written(nn.Module):
    """A `Written` runs the activation that transformers' code of a module of experts has between its GEMMs, and
    multiplies each row by its probability.
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
    """The sum of each token's experts, times their weights.

    hidden_states (T, D), top_k_index (T, K) int, top_k_weights (T, K) -> (T, D) in the dtype of hidden_states.
    Weights are read from `self` at each call. What `refused` names runs as transformers' grouped_mm.
    adapters: low-rank factors beside them; those that PEFT has put in their place are found.
    """
    if torch.compiler.is_compiling():
        lent.asked(built, self, top_k_index.shape[-1])
        stand_in = self.__dict__.get(STAND_IN)
    else:
        stand_in = built(self, top_k_index.shape[-1])
    spread = SHARD_EXPERTS in self.__dict__
    if spread and stand_in is None:
        raise FuseOpsError(
            f"these experts are spread over ranks, and fuseops cannot run them: {refused(self)}."
        )
    if stand_in is None or (lent.sharded(self) and not spread):
        return _stock()(self, hidden_states, top_k_index, top_k_weights)
    experts: Any = self
    if getattr(self, "_is_expert_parallel", True) and not spread:
        top_k_index = top_k_index.masked_fill(top_k_index >= experts.num_experts, -1)
    device = hidden_states.device.type
    x = hidden_states
    if not torch.is_autocast_enabled(device):
        x = x.to(_registered(experts, "down_proj").dtype)  # type: ignore[union-attr]
    if adapters is None and not torch.compiler.is_compiling():
        adapters = peft.in_place(self)
    if not adapters:
        y = stand_in(x, experts=top_k_index, weights=top_k_weights)
        return y.to(hidden_states.dtype)
    self.__dict__[peft.READ] = adapters
    try:
        y = stand_in(x, experts=top_k_index, weights=top_k_weights)
    finally:
        del self.__dict__[peft.READ]
    return y.to(hidden_states.dtype)


@lent.while_hung
def bound(self: nn.Module, *args: Any, **keywords: Any) -> Tensor:
    """As `forward`, where `apply` has bound it; by the library's switch that one runs modules that nobody has."""
    return forward(self, *args, **keywords)


@lent.while_hung
def forward_adapted(self: Any, x: Tensor, *args: Any, **keywords: Any) -> Tensor:
    """As PEFT's, of adapters around experts that run here."""
    inner = peft.adapted(self)
    if SHARD_EXPERTS in inner.__dict__ and peft.active(self) != []:
        raise FuseOpsError(
            f"{path_of(inner) or type(inner).__name__} has adapters of {self.parameter_name!r}, whose factors are of "
            "all experts, and this rank has a part of them (ExpertParallel). Adapt other modules (target_modules), or "
            "leave the experts on one rank."
        )
    own = inner.__dict__.get("forward")
    here = getattr(own, "func", None) is bound and not lent.hooked(inner)
    plain = "adapter_names" not in keywords and not torch.compiler.is_compiling()
    found = peft.factors(self) if here and plain and not lent.sharded(inner) else None
    if found is None:
        return type(self).forward(self, x, *args, **keywords)
    return functools.partial(forward, inner, x, adapters=found)(*args, **keywords)


def _stock() -> Callable[..., Tensor]:
    from transformers.integrations.moe import grouped_mm_experts_forward

    return grouped_mm_experts_forward


# --- building


def refused(experts: nn.Module) -> str | None:
    """Why fuseops does not run these experts, or None."""
    said = vars(experts)
    wanted = ("num_experts", "has_gate", "has_bias", "is_transposed")
    if missing := [name for name in wanted if name not in said]:
        return f"does not say {', '.join(missing)}: no module of the experts interface"
    if said.get("has_post_expert_norm"):
        return "has a norm between the second product and the weights of the router"
    for name in _names(experts):
        weight = _registered(experts, name)
        if weight is None:
            return f"has no parameter {name}"
        if (why := lent.quantized(weight)) is not None:
            return f"{name} {why}"
        if weight.dim() != 2 + name.endswith("_proj"):
            return f"{name} has shape {tuple(weight.shape)}"
    return None


def _names(experts: Any) -> list[str]:
    names = ["gate_up_proj" if experts.has_gate else "up_proj", "down_proj"]
    return names + [f"{name}_bias" for name in names] if experts.has_bias else names


def _registered(experts: nn.Module, name: str) -> Tensor | None:
    """A parameter, beneath a parametrization."""
    if name in experts._parameters:
        return experts._parameters[name]
    beneath = getattr(experts._modules.get("parametrizations"), name, None)
    return getattr(beneath, "original", None)


def built(experts: nn.Module, top_k: int) -> Sequential | None:
    """What runs these experts, built once; anew when what they say of themselves has changed. None where refused."""
    said = vars(experts)
    known = (
        *(top_k, said.get("num_experts")),
        *(said.get("has_gate"), said.get("has_bias"), said.get("is_transposed")),
        *(said.get("act_fn"), experts._modules.get("act_fn")),
        *(said.get("_apply_gate"), getattr(type(experts), "_apply_gate", None)),
        *(said.get(SHARD_EXPERTS), _act_hooked(experts)),
        *[v for v in said.values() if type(v) in (int, float)],
    )
    found: Sequential | None = lent.hung(experts, known)
    if found is None and refused(experts) is None:
        found = _build(experts, top_k)
        lent.hang(experts, found, known)
    return found


def _act_hooked(experts: nn.Module) -> bool:
    act = experts._modules.get("act_fn")
    return act is not None and lent.hooked(act)


def _build(experts: Any, top_k: int) -> Sequential:
    form = None if _act_hooked(experts) else recognise.gate_of(experts)
    act = None if form is None else recognise.scaled(form)
    first, last, *_ = _names(experts)
    fc1, fc2 = _projection(experts, first), _projection(experts, last, scale_bias=True)
    layer = Sequential(
        {
            "dispatch": ops.Dispatch(experts.num_experts),
            "permute": ops.Permute(top_k),
            "fc1": fc1,
            "act": Written(experts) if act is None else act,
            "fc2": fc2,
            "combine": ops.Combine(top_k),
        }
    )
    spread = vars(experts).get(SHARD_EXPERTS)
    if spread is not None:
        spread(layer)
    return layer


def _projection(experts: Any, name: str, scale_bias: bool = False) -> Projection:
    weight: Any = _registered(experts, name)
    groups, out, width = weight.shape
    if experts.is_transposed:
        out, width = width, out
    bias = bool(experts.has_bias)
    op = Projection(groups, width, out, bias, scale_bias=scale_bias, device="meta")
    sources: dict[str, lent.Source] = {
        "weight": functools.partial(_read_transposed if experts.is_transposed else _read, name)
    }
    for i, part in enumerate(("down", "up")):
        sources[part] = functools.partial(peft.read_factor, name, i)
    if bias:
        sources["bias"] = functools.partial(_read, f"{name}_bias")
    lent.lend(op, experts, sources)
    return op


def _read(name: str, owner: Any) -> Any:
    """Reads a parameter by its name."""
    if name in owner.__dict__.get(peft.READ, ()):  # beneath what PEFT has put in its place
        return _registered(owner, name)
    return getattr(owner, name)


def _read_transposed(name: str, owner: Any) -> Any:
    """Reads a parameter (E, in, out) as (E, out, in)."""
    return _read(name, owner).transpose(1, 2)


def register() -> None:
    """Make `experts_implementation="fuseops"` known to transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, forward)
