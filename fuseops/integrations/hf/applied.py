"""apply and revert: which modules of a transformers model fuseops runs, and how its own forwards come back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

from torch import nn

from fuseops.errors import FuseOpsError
from fuseops.ops.paths import STAND_IN

from . import adapters, experts, lent, loss, mlp, norm, packing, recognise, rope, router
from .report import ApplyReport, ReportEntry


class AppliedPart(NamedTuple):
    """An `AppliedPart` is a kind of module that fuseops can stand in for.

    build is asked for what stands in, or why nothing does; forward runs it, and by says of it what it is.
    """

    name: str
    forward: Callable[..., Any]
    build: Callable[[Any], nn.Module | str]
    by: Callable[[Any], str]


def apply(model: nn.Module, *, pack: bool = False, dry_run: bool = False) -> ApplyReport:
    """Let fuseops run what it knows of a transformers model: experts, routers, MLPs, norms, RoPE and the loss.

    Forwards are bound on the instances. Modules, their classes, parameters, names and layouts stay as they are, so
    that saving, loading, parallel plans, FSDP and adapters hold with no conversion; weights are read at each call.
    What a module computes is recognised by running it on a few random rows; what differs is left alone.
    In training a loss is made without logits, which are then None; `model(..., skip_logits=False)` makes them.
    pack: hold gate_proj and up_proj of gated MLPs as one parameter, `gate_up_proj`, for one GEMM; before an optimizer
    is made. `save_pretrained` writes, and `load_state_dict` reads, the names of the stock model all the same.
    dry_run: report only.  Calling it again looks at everything anew.  -> what was replaced, what was not and why
    Raises FuseOpsError for what is no module.
    """
    if not isinstance(model, nn.Module):
        raise FuseOpsError(f"hf.apply expects a model, got {type(model).__name__}.")
    entries = []
    tied = packing.shared(model)
    for path, part, module in _candidates(model):
        stand_in = _refused(part, module) or part.build(module)
        if isinstance(stand_in, str):
            entries.append(ReportEntry(path, part.name, type(module).__name__, None, stand_in))
            if not dry_run and not _wrapped(module):
                _unbind(module)
            continue
        apart = None
        if pack and part is MLP and not packing.packed(module):
            apart = packing.refused(module, tied)
            if apart is None and not dry_run:
                packing.pack(module)
                mlp.lend(cast("mlp.MLP", stand_in), module)
        by = part.by(stand_in) + (f", gate and up apart: {apart}" if apart else "")
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
    packed = []
    for path, module in model.named_modules():
        if packing.packed(module):
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
    # experts hang themselves, as they may be built by a call
    if part is not EXPERTS and module.__dict__.get(STAND_IN) is not stand_in:
        lent.hang(module, stand_in, lent.Said.of(module))
    module.__dict__["forward"] = functools.partial(part.forward, module)


def _unbind(module: nn.Module) -> None:
    if bound(module):
        del module.__dict__["forward"]
    for name in (STAND_IN, loss.SELF):
        module.__dict__.pop(name, None)


def bound(module: nn.Module) -> bool:
    """Whether the forward of a module is one of ours."""
    own = module.__dict__.get("forward")
    return isinstance(own, functools.partial) and own.func in FORWARDS


def _wrapped(module: nn.Module) -> bool:
    """Whether another forward is bound on the instance, which may call one of ours."""
    return "forward" in module.__dict__ and not bound(module)


def _candidates(model: nn.Module) -> Iterator[tuple[str, AppliedPart, nn.Module]]:
    """Every module that looks like one of the parts, parents first."""
    angles = rope.tables(model)
    inside = {id(m._modules["base_layer"]) for m in model.modules() if adapters.wraps(m)}
    for path, module in model.named_modules():
        said, children, own = vars(module), module._modules, module._parameters
        if loss.HEAD in children and hasattr(module, "loss_function"):
            yield path, LOSS, module
        elif {"has_gate", "is_transposed"} <= said.keys():
            yield path, EXPERTS, module
        elif ("up_proj" in children and "down_proj" in children) or packing.packed(module):
            yield path, MLP, module
        elif adapters.wraps(module):
            if id(module) not in inside:  # of adapters around each other, the outermost
                yield path, EXPERT_ADAPTER if hasattr(module, "parameter_name") else ADAPTER, module
        elif "top_k" in said and own.get("weight") is not None and not children:
            yield path, ROUTER, module
        elif "Norm" in type(module).__name__ and {*own} == {"weight"} and not children:
            yield path, NORM, module
        elif rope.rotary_names(module):
            build = functools.partial(rope.build, rope.nearest(path, angles))
            yield path, ROPE._replace(build=build), module


def _refused(part: AppliedPart, module: nn.Module) -> str | None:
    if type(module).__module__.startswith("transformers_modules."):
        return "remote code"
    if _wrapped(module):
        return "has a forward of its own (replaced on the instance, as by a hook of accelerate)"
    if part in ALONE and (more := recognise.beside_x(module)):
        return f"its forward takes {' and '.join(more)} too"
    return None


# --- the parts


def _build_experts(module: Any) -> nn.Module | str:
    """For top_k of the calls to come. Another one is built when it comes."""
    if (why := experts.refused(module)) is not None:
        return why
    code = getattr(type(module).forward, "__code__", None)
    if "experts_interface" not in getattr(code, "co_freevars", ()):
        return "has a forward that is not that of the experts interface"
    top_k = getattr(getattr(module, "config", None), "num_experts_per_tok", None)
    return experts.built(module, int(top_k or 1)) or "is none that fuseops knows"


def _by_experts(stand_in: Any) -> str:
    act = stand_in["act"]
    between = "its own gate, as written" if isinstance(act, experts.Written) else act.kind
    return f"grouped GEMMs over {stand_in['fc1'].num_groups} experts, {between}"


def _by_norm(op: Any) -> str:
    return f"RMSNorm, eps {op.eps:g}" + (", weight + 1" if op.zero_centered_gamma else "")


def _by_router(op: Any) -> str:
    r = op.route
    said = [f"top {r.top_k} of {op.experts}", r.score]
    said += ["normalized"] * r.normalize + [f"scaled by {r.scale:g}"] * (r.scale != 1)
    return ", ".join([*said, *[f"{r.top_groups} of {r.groups} groups"] * (r.groups > 1)])


def _by_loss(second: Any) -> str:
    soft_cap = second.losses.loss_mean.soft_cap
    return "linear cross entropy" + (f", soft cap {soft_cap:g}" if soft_cap else "")


EXPERTS = AppliedPart("experts", experts.bound, _build_experts, _by_experts)
ROUTER = AppliedPart("router", router.forward, router.build, _by_router)
MLP = AppliedPart("mlp", mlp.forward, mlp.build, mlp.in_words)
NORM = AppliedPart("norm", norm.forward, norm.build, _by_norm)
ALONE = (ROUTER, MLP, NORM)  # whose stand-ins take x and nothing else
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
    lambda wrapper: adapters.refused(wrapper) or nn.Identity(),
    lambda op: "low-rank products in the rule of the experts",
)
LOSS = AppliedPart("loss", loss.forward, loss.build, _by_loss)
FORWARDS = {
    part.forward for part in (EXPERTS, ROUTER, MLP, NORM, ROPE, ADAPTER, EXPERT_ADAPTER, LOSS)
}
