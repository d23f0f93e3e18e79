"""apply and revert: find the modules of a transformers model that fuseops can run, bind stand-ins, and undo it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

from torch import nn

from fuseops.arguments import check_flags
from fuseops.ops import scopes
from fuseops.ops.paths import STAND_IN, check_module
from fuseops.ops.stored import lent_error

from . import adapters, experts, loss, mlp, norm, packing, recognise, rope, router, stand_ins
from .report import ApplyReport, ReportEntry


class AppliedPart(NamedTuple):
    """An `AppliedPart` is a kind of module that has a stand-in.

    build     of a module: its stand-in, or the reason why there is none
    forward   the forward to bind on the module, which runs the stand-in
    describe  of a stand-in: what it runs, for the report
    """

    name: str
    forward: Callable[..., Any]
    build: Callable[[Any], nn.Module | str]
    describe: Callable[[Any], str]


def apply(model: nn.Module, *, pack: bool = False, dry_run: bool = False) -> ApplyReport:
    """Let fuseops run what it knows of a transformers model: experts, routers, MLPs, norms, RoPE and the loss.

    Forwards are bound on the instances. Modules, their classes, parameters, names and layouts stay as they are, so
    that saving, loading, parallel plans, FSDP and adapters hold with no conversion; weights are read at each call.
    What a module computes is recognised by running it on a few random rows; what differs is left alone.
    In training a loss is made without logits, which are then None; `model(..., skip_logits=False)` makes them.
    pack: hold gate_proj and up_proj of gated MLPs as one parameter, `gate_up_proj`, for one GEMM; before an optimizer
    is made. `save_pretrained` writes, and `load_state_dict` reads, the names of the stock model all the same.
    dry_run: report only.  Calling it again looks at everything anew.  -> what was replaced, what was not and why
    Raises FuseOpsError for what is no module, and inside of `fo.quantized_init`.
    """
    check_module("hf.apply(model)", model)
    check_flags("hf.apply", pack=pack, dry_run=dry_run)
    if scopes.current().storing is not None:
        raise lent_error("hf.apply")
    entries = []
    tied_ids = packing.tied_parameters(model)
    for path, part, module in _candidates(model):
        stand_in = _skip_reason(part, module) or part.build(module)
        if isinstance(stand_in, str):
            entries.append(ReportEntry(path, part.name, type(module).__name__, None, stand_in))
            if not dry_run and not _is_wrapped(module):
                _unbind(module)
            continue
        unpacked_reason = None
        if pack and part is MLP and not packing.is_packed(module):
            unpacked_reason = packing.unpackable_reason(module, tied_ids)
            if unpacked_reason is None and not dry_run:
                packing.pack(module)
                mlp.bind_parameters(cast("mlp.MLP", stand_in), module)
        by = part.describe(stand_in) + (
            f", gate and up apart: {unpacked_reason}" if unpacked_reason else ""
        )
        entries.append(ReportEntry(path, part.name, type(module).__name__, by))
        if not dry_run:
            _bind(module, part, stand_in)
    if pack and not dry_run:
        packing.convert_checkpoints(model)
    return ApplyReport(type(model).__name__, tuple(entries), dry_run)


def revert(model: nn.Module) -> None:
    """Give every module its own forward back, and what was packed its two parameters.

    Raises FuseOpsError, and changes nothing, where adapters or hooks are on what was packed.
    """
    check_module("hf.revert(model)", model)
    packed = []
    for path, module in model.named_modules():
        if packing.is_packed(module):
            packing.check_separable(path, module)
            packed.append(module)
    for module in [*model.modules()]:
        _unbind(module)
    for module in packed:
        packing.unpack(module)
    if packed:
        packing.convert_checkpoints(model)


def _bind(module: nn.Module, part: AppliedPart, stand_in: nn.Module) -> None:
    if part is LOSS:
        module.__dict__["forward"] = loss.bind(module, stand_in)
        return
    # a call of experts may build and attach their stand-in itself
    if part is not EXPERTS and module.__dict__.get(STAND_IN) is not stand_in:
        stand_ins.attach(module, stand_in, stand_ins.ConfigSnapshot.of(module))
    module.__dict__["forward"] = functools.partial(part.forward, module)


def _unbind(module: nn.Module) -> None:
    if is_bound(module):
        del module.__dict__["forward"]
    for name in (STAND_IN, loss.LOSS_MODEL):
        module.__dict__.pop(name, None)


def is_bound(module: nn.Module) -> bool:
    """Whether the bound forward of a module is one of `FORWARDS`."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, functools.partial) and forward.func in FORWARDS


def _is_wrapped(module: nn.Module) -> bool:
    """Whether a forward of another library is bound on the instance; it may call one of `FORWARDS`."""
    return "forward" in module.__dict__ and not is_bound(module)


def _candidates(model: nn.Module) -> Iterator[tuple[str, AppliedPart, nn.Module]]:
    """(path, part, module) of every module that has the attributes of a part, parents first."""
    rotary = rope.rotary_embeddings(model)
    nested = {id(m._modules["base_layer"]) for m in model.modules() if adapters.is_adapter(m)}
    for path, module in model.named_modules():
        attributes, children, parameters = vars(module), module._modules, module._parameters
        if loss.HEAD in children and hasattr(module, "loss_function"):
            yield path, LOSS, module
        elif {"has_gate", "is_transposed"} <= attributes.keys():
            yield path, EXPERTS, module
        elif ("up_proj" in children and "down_proj" in children) or packing.is_packed(module):
            yield path, MLP, module
        elif adapters.is_adapter(module):
            if id(module) not in nested:  # the outermost of nested adapters
                yield path, EXPERT_ADAPTER if hasattr(module, "parameter_name") else ADAPTER, module
        elif "top_k" in attributes and parameters.get("weight") is not None and not children:
            yield path, ROUTER, module
        elif "Norm" in type(module).__name__ and {*parameters} == {"weight"} and not children:
            yield path, NORM, module
        elif rope.rotary_names(module):
            build = functools.partial(rope.build, rope.enclosing(path, rotary))
            yield path, ROPE._replace(build=build), module


def _skip_reason(part: AppliedPart, module: nn.Module) -> str | None:
    if type(module).__module__.startswith("transformers_modules."):
        return "remote code"
    if _is_wrapped(module):
        return "has a forward of its own (replaced on the instance, as by a hook of accelerate)"
    if part in SINGLE_INPUT and (extra := recognise.extra_arguments(module)):
        return f"its forward takes {' and '.join(extra)} too"
    return None


# --- the parts


def _build_experts(module: Any) -> Any:
    """The stand-in for the config's top_k, or why there is none; a call with another top_k builds its own."""
    if (why := experts.unsupported_reason(module)) is not None:
        return why
    code = getattr(type(module).forward, "__code__", None)
    if "experts_interface" not in getattr(code, "co_freevars", ()):
        return "has a forward that is not that of the experts interface"
    top_k = getattr(getattr(module, "config", None), "num_experts_per_tok", None)
    return experts.get_or_build(module, int(top_k or 1))


def _describe_experts(stand_in: Any) -> str:
    act = stand_in["act"]
    act_name = "its own gate, as written" if isinstance(act, experts.StockActivation) else act.kind
    return f"grouped GEMMs over {stand_in['fc1'].num_groups} experts, {act_name}"


def _describe_norm(op: Any) -> str:
    return f"RMSNorm, eps {op.eps:g}" + (", weight + 1" if op.zero_centered_gamma else "")


def _describe_router(op: Any) -> str:
    r = op.route
    words = [f"top {r.top_k} of {op.experts}", r.score]
    words += ["normalized"] * r.normalize + [f"scaled by {r.scale:g}"] * (r.scale != 1)
    return ", ".join([*words, *[f"{r.top_groups} of {r.groups} groups"] * (r.groups > 1)])


def _describe_loss(loss_model: Any) -> str:
    soft_cap = loss_model._head_losses.loss_mean.soft_cap
    return "linear cross entropy" + (f", soft cap {soft_cap:g}" if soft_cap else "")


EXPERTS = AppliedPart("experts", experts.bound_forward, _build_experts, _describe_experts)
ROUTER = AppliedPart("router", router.forward, router.build, _describe_router)
MLP = AppliedPart("mlp", mlp.forward, mlp.build, mlp.describe)
NORM = AppliedPart("norm", norm.forward, norm.build, _describe_norm)
SINGLE_INPUT = (ROUTER, MLP, NORM)  # stand-ins that take x only
ROPE = AppliedPart(
    "rope",
    rope.forward,
    functools.partial(rope.build, None),
    lambda op: f"q and k in one launch, {op.width} columns",
)
ADAPTER = AppliedPart(
    "adapter", adapters.forward, adapters.build, lambda op: "one op with the Linear"
)
EXPERT_ADAPTER = AppliedPart(
    "adapter",
    experts.forward_adapted,
    # experts read the factors themselves
    lambda wrapper: adapters.unsupported_reason(wrapper) or nn.Identity(),
    lambda op: "low-rank products in the rule of the experts",
)
LOSS = AppliedPart("loss", loss.forward, loss.build, _describe_loss)
FORWARDS = {
    part.forward for part in (EXPERTS, ROUTER, MLP, NORM, ROPE, ADAPTER, EXPERT_ADAPTER, LOSS)
}
