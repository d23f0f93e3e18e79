"""Conversion of weights between Hugging Face's keys for gated MLPs and experts and those of fuseops Sequentials.

Of experts, D wide with F hidden units:

    in a transformers 5 model   experts.gate_up_proj (E, 2F, D), experts.down_proj (E, D, F)
    in a checkpoint file        experts.<e>.gate_proj.weight and up_proj (F, D), down_proj (D, F)
    in fuseops                  experts.fc1.weight (E, 2F, D), experts.fc2.weight (E, D, F)

Of the experts of gpt-oss, transposed and with biases; gate and up alternate, which `ScaledClampedSwiGLU(interleave=1)`
takes as they are:

    Hugging Face                experts.gate_up_proj (E, D, 2F), gate_up_proj_bias (E, 2F),
                                experts.down_proj (E, F, D), down_proj_bias (E, D)
    in fuseops                  experts.fc1.weight (E, 2F, D), fc1.bias (E, 2F), experts.fc2.weight (E, D, F),
                                fc2.bias (E, D)

Of a dense `mlp`, `shared_expert` or `shared_experts`, with or without biases:

    Hugging Face                mlp.gate_proj.weight and up_proj (F, D), down_proj (D, F)
    in fuseops                  mlp.fc1.weight (2F, D), mlp.fc2.weight (D, F)

Of a whole layer that an `fo.MoE` replaces (`moe=True`); the router of gpt-oss keeps its name:

    Hugging Face                mlp.gate.weight (E, D), mlp.gate.e_score_correction_bias (E,), the experts as above,
                                mlp.shared_experts as a dense mlp
    in fuseops                  mlp.router.weight, mlp.router.expert_bias, mlp.fc1.weight, mlp.fc2.weight,
                                mlp.shared.fc1.weight, mlp.shared.fc2.weight

fc1 is `[gate | up]`: the gate is the first half, as in transformers' packed weights, but for gpt-oss.
Unknown keys under the prefix of an MLP or of experts (scales of a quantized checkpoint, adapters) are an error; all
other keys pass through. Tensors may be weights, their gradients, or optimizer state.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from fuseops.arguments import check_flags, shown
from fuseops.errors import FuseOpsError
from fuseops.ops.checks import check_state

_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(gate|up|down)_proj\.weight")
_PACKED = re.compile(r"(.*\bexperts)\.((?:gate_up|down)_proj(?:_bias)?)")
_DENSE = re.compile(r"(.*\bmlp|.*\bshared_experts?)\.(gate|up|down)_proj\.(weight|bias)")
_FUSEOPS = re.compile(r"(.*\bexperts|.*\bmlp|.*\bshared_experts?)\.(fc1|fc2)\.(weight|bias)")
# keys below an MLP or a layer of experts that are not its projections, in either form
_PASS_THROUGH = re.compile(r"(gate|router|experts|shared|shared_experts?|shared_expert_gate)\..*")
_LAYER = {  # keys of fo.MoE -> those of Hugging Face, with experts renamed to fc1 and fc2
    "router.weight": "gate.weight",
    "router.expert_bias": "gate.e_score_correction_bias",
    "fc1.weight": "experts.fc1.weight",
    "fc2.weight": "experts.fc2.weight",
    "shared.fc1.weight": "shared_experts.fc1.weight",
    "shared.fc2.weight": "shared_experts.fc2.weight",
}
_GPT_OSS = {f"{fc}.{kind}": f"experts.{fc}.{kind}" for fc in ("fc1", "fc2") for kind in ("weight", "bias")}  # fmt: skip
_FCS = {"gate_up_proj": "fc1.weight", "down_proj": "fc2.weight"}
_BIASES = {"gate_up_proj_bias": "fc1.bias", "down_proj_bias": "fc2.bias"}


def to_fuseops(tensors: Mapping[str, Tensor], *, moe: bool = False) -> dict[str, Tensor]:
    """`tensors` under fuseops' keys, from any of Hugging Face's layouts.

    moe: every layer of experts is an `fo.MoE`, with its router and shared experts.
    A packed weight keeps its storage; separate and transposed ones are copied.
    Raises FuseOpsError when a gate, an up projection or an expert between two others is missing, for packed experts
    in an unknown layout, and for unknown keys under their prefixes.
    """
    check_state("hf.to_fuseops", tensors)
    check_flags("to_fuseops", moe=moe)
    out: dict[str, Tensor] = {}
    parts: dict[str, dict[tuple[int, str], Tensor]] = {}  # fc1.weight -> its (expert, projection)
    packed: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if match := _EXPERT.fullmatch(name):
            prefix, expert, kind = match[1], int(match[2]), match[3]
            parts.setdefault(_fuseops_key(prefix, kind, "weight"), {})[expert, kind] = tensor
        elif match := _DENSE.fullmatch(name):
            parts.setdefault(_fuseops_key(*match.groups()), {})[-1, match[2]] = tensor
        elif match := _PACKED.fullmatch(name):
            packed.setdefault(match[1], {})[match[2]] = tensor
        else:
            out[name] = tensor
    prefixes = {name.rpartition(".fc")[0] for name in parts} | packed.keys()
    _check_unknown_keys("to_fuseops", prefixes, out)
    out |= {name: _merged(name, found) for name, found in parts.items()}
    for prefix, found in packed.items():
        out |= _from_packed(prefix, found)
    if not moe:
        return out
    names = {theirs: ours for ours, theirs in (_LAYER | _GPT_OSS).items()}
    return _renamed(out, dict.fromkeys(_layer_prefixes(out, "experts.fc1.weight"), names))


def _check_unknown_keys(
    function: str, prefixes: Iterable[str], others: Mapping[str, Tensor]
) -> None:
    """Raise FuseOpsError for keys under these prefixes that are not converted."""
    unknown = []
    for prefix in prefixes:
        inside = (name for name in others if name.startswith(f"{prefix}."))
        experts = prefix.rpartition(".")[2] == "experts"
        unknown += [
            n for n in inside if experts or not _PASS_THROUGH.fullmatch(n[len(prefix) + 1 :])
        ]
    if unknown:
        raise FuseOpsError(
            f"{function}: {sorted(unknown)} stand beside weights that are converted, and are not known: they would "
            "be left behind. Take them out, or merge them into the weights first."
        )


def _layer_prefixes(tensors: Mapping[str, Tensor], *suffixes: str) -> list[str]:
    """Prefixes, with the dot, of the layers that have keys with all of these suffixes."""
    found = [
        name.removesuffix(suffixes[0]) for name in tensors if f".{name}".endswith(f".{suffixes[0]}")
    ]
    return [layer for layer in found if all(layer + mark in tensors for mark in suffixes)]


def _renamed(
    tensors: Mapping[str, Tensor], layers: Mapping[str, Mapping[str, str]]
) -> dict[str, Tensor]:
    """Rename the keys of layers.   layers: prefix -> (old name -> new name)"""
    new = {at + old: at + name for at, names in layers.items() for old, name in names.items()}
    return {new.get(name, name): tensor for name, tensor in tensors.items()}


def _fuseops_key(prefix: str, kind: str, what: str) -> str:
    return f"{prefix}.{'fc2' if kind == 'down' else 'fc1'}.{what}"


def _merged(name: str, parts: dict[tuple[int, str], Tensor]) -> Tensor:
    """One weight from its parts: `[gate | up]`, stacked over experts (expert -1: a dense MLP)."""
    experts = sorted({expert for expert, _ in parts})
    kinds = ("down",) if ".fc2." in name[-12:] else ("gate", "up")
    wanted = {(e, k) for e in ([-1] if experts == [-1] else range(experts[-1] + 1)) for k in kinds}
    if missing := sorted(wanted - parts.keys()):
        expert, kind = missing[0]
        of_expert = "" if expert < 0 else f" of expert {expert}"
        raise FuseOpsError(
            f"to_fuseops: {name} is made of {len(wanted)} weights, and {kind}_proj{of_expert} is missing. "
            "Give all shards of a checkpoint at once."
        )
    each = [torch.cat([parts[e, k] for k in kinds]) for e in experts]
    return each[0] if experts == [-1] else torch.stack(each)


def _from_packed(prefix: str, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Packed experts under fuseops' keys, transposed if in gpt-oss' layout, which the shapes of both tell."""
    wanted = _FCS | _BIASES if found.keys() & _BIASES.keys() else _FCS
    if missing := sorted(wanted.keys() - found.keys()):
        raise FuseOpsError(
            f"to_fuseops: {prefix} has {sorted(found)}, and {missing} is missing: how the experts lie is told by all "
            "of them. Give all shards of a checkpoint at once."
        )
    up, down = (tuple(found[name].shape) for name in _FCS)
    ours = len(up) == len(down) == 3 and up[1:] == (2 * down[2], down[1])
    transposed = len(up) == len(down) == 3 and up[1:] == (down[2], 2 * down[1])
    if not (transposed if wanted is not _FCS else ours):
        rest = " and biases" if wanted is not _FCS else ""
        raise FuseOpsError(
            f"to_fuseops: {prefix} has gate_up_proj {up} and down_proj {down}{rest}, a layout that is not known: "
            "expected (E, 2F, D) and (E, D, F) without biases, or gpt-oss' (E, D, 2F) and (E, F, D) with them."
        )
    return {f"{prefix}.{name}": _transposed(found[key], transposed) for key, name in wanted.items()}


def _transposed(t: Tensor, transposed: bool) -> Tensor:
    """t with the weight of each expert transposed, if asked to; biases as they are."""
    return t.transpose(1, 2).contiguous() if transposed and t.dim() == 3 else t


def to_hf(
    tensors: Mapping[str, Tensor], *, experts: Literal["packed", "separate"] = "packed"
) -> dict[str, Tensor]:
    """The inverse of `to_fuseops`: views of `tensors` under Hugging Face's keys, including layers of `fo.MoE`.

    Experts with biases are gpt-oss': their weights are copied, transposed.
    experts: "packed" as in the state_dict of a transformers 5 model, "separate" as in a checkpoint file.
    Raises FuseOpsError for any other value, for an fc1 with an odd number of rows, for experts with biases that are to
    be separate (their gate and up alternate), and for unknown keys under their prefixes.
    """
    check_state("hf.to_hf", tensors)
    if experts not in ("packed", "separate"):
        raise FuseOpsError(f"to_hf: experts must be 'packed' or 'separate', got {shown(experts)}.")
    gpt_oss = _layer_prefixes(tensors, "router.weight", "fc1.weight", "fc1.bias")
    layers = dict.fromkeys(_layer_prefixes(tensors, "router.weight", "fc1.weight"), _LAYER)
    out: dict[str, Tensor] = {}
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _renamed(tensors, layers | dict.fromkeys(gpt_oss, _GPT_OSS)).items():
        if match := _FUSEOPS.fullmatch(name):
            found.setdefault(match[1], {})[f"{match[2]}.{match[3]}"] = tensor
        else:
            out[name] = tensor
    _check_unknown_keys("to_hf", found, out)
    for prefix, own in found.items():
        if prefix.rpartition(".")[2] != "experts":
            for name, weight in own.items():
                out |= _separate(prefix, name, weight)
        else:
            out |= _experts(prefix, own, experts)
    return out


def _experts(prefix: str, own: Mapping[str, Tensor], form: str) -> dict[str, Tensor]:
    """The weights of one layer's experts, under Hugging Face's keys."""
    biased = not own.keys().isdisjoint(_BIASES.values())
    if biased and form == "separate":
        raise FuseOpsError(
            f"to_hf: {prefix} has biases, as gpt-oss', whose gate and up alternate: they have no separate form, take "
            "experts='packed'."
        )
    if form == "packed":
        names = {ours: theirs for theirs, ours in (_FCS | _BIASES).items()}
        return {f"{prefix}.{names[name]}": _transposed(t, biased) for name, t in own.items()}
    separate = (
        _separate(f"{prefix}.{e}", name, weight)
        for name, weights in own.items()
        for e, weight in enumerate(weights)
    )
    return {name: t for each in separate for name, t in each.items()}


def _separate(prefix: str, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The projections of one MLP.   fc1 (2F, D) -> gate and up (F, D)"""
    fc, _, kind = name.partition(".")
    if fc == "fc2":
        return {f"{prefix}.down_proj.{kind}": tensor}
    if tensor.shape[0] % 2:
        raise FuseOpsError(
            f"to_hf: {prefix}.fc1 is [gate | up], two halves, got shape {tuple(tensor.shape)}."
        )
    gate, up = tensor.chunk(2)
    return {f"{prefix}.gate_proj.{kind}": gate, f"{prefix}.up_proj.{kind}": up}
