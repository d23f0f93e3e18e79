"""Optional packing of gate_proj and up_proj of a gated MLP into one parameter, `gate_up_proj`: one GEMM instead of two.

Checkpoints keep transformers' names: `save_pretrained` splits packed parameters by the model's weight conversions
(`save_original_format`), and `load_state_dict` packs those of a stock checkpoint.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from fuseops.errors import FuseOpsError

from . import adapters, stand_ins

PACKED, HALVES = "gate_up_proj", ("gate_proj", "up_proj")
HOOK = "_fuseops_packed"  # key in the `__dict__` of a packed module: the handle of its load_state_dict hook
# in that of a model: the weight conversions that packing has added
CONVERSIONS = "_fuseops_conversions"


def is_packed(module: nn.Module) -> bool:
    """Whether `pack` has packed a module: some stock classes have a `gate_up_proj` of their own."""
    return HOOK in module.__dict__


def tied_parameters(model: nn.Module) -> frozenset[int]:
    """Ids of the parameters that several modules of a model share."""
    seen = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return frozenset(p for p, times in seen.items() if times > 1)


def unpackable_reason(module: nn.Module, tied: frozenset[int]) -> str | None:
    """Why gate_proj and up_proj of a module with a stand-in cannot be packed, or None.   tied: `tied_parameters`"""
    halves: list[Any] = [module._modules.get(name) for name in HALVES]
    if None in halves:
        return "it has no gate_proj"
    if any(stand_ins.not_plain_reason(half) is not None for half in halves):
        return "they have adapters: pack before those are made"
    gate, up = ({n: p for n, p in m._parameters.items() if p is not None} for m in halves)
    if stand_ins.is_sharded(*halves) or any(p.is_meta for m in (gate, up) for p in m.values()):
        return "its weights are sharded, or have no memory yet: pack before that, or after"
    if not {id(p) for m in (gate, up) for p in m.values()}.isdisjoint(tied):
        return "its weights are shared with another module"
    specs = [
        {n: (p.shape, p.dtype, p.device, p.requires_grad) for n, p in m.items()} for m in (gate, up)
    ]
    return (
        None if specs[0] == specs[1] else "gate_proj and up_proj differ in more than their values"
    )


def pack(module: nn.Module) -> None:
    """Replace gate_proj and up_proj by one Linear, whose rows are theirs, gate first."""
    gate, up = ([*module._modules[name].parameters()] for name in HALVES)  # type: ignore[union-attr]
    joined = [torch.cat([a.detach(), b.detach()]) for a, b in zip(gate, up, strict=True)]
    _replace(module, HALVES, {PACKED: _linear(*joined, trained=gate[0].requires_grad)})
    module.__dict__[HOOK] = module.register_load_state_dict_pre_hook(_pack_loaded)


def check_separable(path: str, module: nn.Module) -> None:
    """Raise FuseOpsError where `unpack` would lose adapters or hooks."""
    both: Any = module._modules[PACKED]
    why = "has adapters" if adapters.is_adapter(both) else stand_ins.not_plain_reason(both)
    if why is not None:
        raise FuseOpsError(
            f"hf.revert: {path}.{PACKED} {why}, which its two halves cannot take over, so nothing was reverted. "
            "Remove it first: hooks by their handles, adapters by merge_and_unload() or unload()."
        )


def unpack(module: nn.Module) -> None:
    """Replace the Linear of a packed module by gate_proj and up_proj."""
    module.__dict__.pop(HOOK).remove()
    both: Any = module._modules[PACKED]
    halves = zip(*(p.detach().chunk(2) for p in both.parameters()), strict=True)
    trained = both.weight.requires_grad
    parts = {
        n: _linear(*(t.clone() for t in h), trained=trained)
        for n, h in zip(HALVES, halves, strict=True)
    }
    _replace(module, (PACKED,), parts)


def _linear(weight: Tensor, bias: Tensor | None = None, *, trained: bool) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None:
            setattr(made, name, nn.Parameter(t, trained))
    return made


def _replace(module: nn.Module, names: tuple[str, ...], parts: dict[str, nn.Linear]) -> None:
    """Replace children by others, which come first, as those did: the order of parameters stays."""
    rest = {name: child for name, child in module._modules.items() if name not in names}
    module._modules.clear()
    module._modules.update({**parts, **rest})


def _pack_loaded(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    _: Any,
    strict: bool,
    missing: list[str],
    *more: Any,
) -> None:
    """The load_state_dict hook of a packed module: packs the keys of a stock checkpoint. Where only one half comes, as
    in a shard, the other keeps its values.
    """
    for kind, p in adapters.base_module(module._modules[PACKED]).named_parameters():
        names = [f"{prefix}{name}.{kind}" for name in HALVES]
        loaded = {name: state.pop(name) for name in names if name in state}
        if len(loaded) == 1:
            ((present, t),) = loaded.items()
            current = dict(zip(names, p.detach().to(t.device).chunk(2), strict=True))
            missing += [name for name in names if name != present]
            loaded = current | loaded
        if loaded:
            state[f"{prefix}{PACKED}.{kind}"] = torch.cat([loaded[name] for name in names])


def convert_checkpoints(model: nn.Module) -> None:
    """Set the weight conversions of a model, and of transformers models in it, for the modules that are packed now."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Concatenate, PrefixChange, WeightConverter

    for each in model.modules():
        if not isinstance(each, PreTrainedModel):
            continue
        conversions: Any = getattr(each, "_weight_conversions", None)
        names = [name for name, m in each.named_modules() if is_packed(m)]
        if conversions is None:  # as saving a model that was not loaded finds them
            found = get_model_conversion_mapping(each, add_legacy=False)
            conversions = [c for c in found if not isinstance(c, PrefixChange)]
        before = {id(c) for c in each.__dict__.get(CONVERSIONS, ())}
        each.__dict__[CONVERSIONS] = [
            WeightConverter(
                [f"{n}.{h}.{kind}" for h in HALVES], f"{n}.{PACKED}.{kind}", [Concatenate(dim=0)]
            )
            for n in names
            for kind, _ in each.get_submodule(f"{n}.{PACKED}").named_parameters()
        ]
        rest = [c for c in conversions if id(c) not in before]
        each.__dict__["_weight_conversions"] = rest + each.__dict__[CONVERSIONS]
