"""Weights between Hugging Face's keys for gated MLPs and experts, and those of fuseops Sequentials.

Of experts, D wide with F hidden units:

    in a transformers 5 model   experts.gate_up_proj (E, 2F, D), experts.down_proj (E, D, F)
    in a checkpoint file        experts.<e>.gate_proj.weight and up_proj (F, D), down_proj (D, F)
    in fuseops                  experts.fc1.weight (E, 2F, D), experts.fc2.weight (E, D, F)

Of a dense `mlp`, `shared_expert` or `shared_experts`:

    Hugging Face                mlp.gate_proj.weight and up_proj (F, D), down_proj (D, F)
    in fuseops                  mlp.fc1.weight (2F, D), mlp.fc2.weight (D, F)

Of a whole layer, where an `fo.MoE` stands in its place (`moe=True`; without biases):

    Hugging Face                mlp.gate.weight (E, D), mlp.gate.e_score_correction_bias (E,), the experts as above,
                                mlp.shared_experts as a dense mlp
    in fuseops                  mlp.router.weight, mlp.router.expert_bias, mlp.fc1.weight, mlp.fc2.weight,
                                mlp.shared.fc1.weight, mlp.shared.fc2.weight

fc1 is `[gate | up]`: the gate is the first half, as in transformers' packed weights. Nothing is transposed.
All other keys pass through. Tensors may be weights, their gradients, or optimizer state.
"""

import re
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from fuseops.errors import FuseOpsError

_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(gate|up|down)_proj\.weight")
_PACKED = re.compile(r"(.*\bexperts)\.(gate_up|down)_proj")
_DENSE = re.compile(r"(.*\bmlp|.*\bshared_experts?)\.(gate|up|down)_proj\.weight")
_OURS = re.compile(r"(.*\bexperts|.*\bmlp|.*\bshared_experts?)\.(fc1|fc2)\.weight")
_LAYER = {  # of fo.MoE, and of Hugging Face once its experts are fc1 and fc2
    "router.weight": "gate.weight",
    "router.expert_bias": "gate.e_score_correction_bias",
    "fc1.weight": "experts.fc1.weight",
    "fc2.weight": "experts.fc2.weight",
    "shared.fc1.weight": "shared_experts.fc1.weight",
    "shared.fc2.weight": "shared_experts.fc2.weight",
}


def to_fuseops(tensors: Mapping[str, Tensor], *, moe: bool = False) -> dict[str, Tensor]:
    """`tensors` under fuseops' keys, from either of Hugging Face's layouts.

    moe: every layer of experts is an `fo.MoE`, with its router and shared experts.
    A packed weight keeps its storage; separate ones are copied into a new one.
    Raises FuseOpsError when a gate, an up projection or an expert between two others is missing.
    """
    out: dict[str, Tensor] = {}
    parts: dict[str, dict[tuple[int, str], Tensor]] = {}  # fc1 or fc2 -> its (expert, projection)
    for name, tensor in tensors.items():
        if match := _EXPERT.fullmatch(name):
            prefix, expert, kind = match[1], int(match[2]), match[3]
            parts.setdefault(_ours(prefix, kind), {})[expert, kind] = tensor
        elif match := _DENSE.fullmatch(name):
            parts.setdefault(_ours(match[1], match[2]), {})[-1, match[2]] = tensor
        elif match := _PACKED.fullmatch(name):
            out[_ours(match[1], match[2])] = tensor
        else:
            out[name] = tensor
    out |= {name: _joined(name, found) for name, found in parts.items()}
    names = {theirs: ours for ours, theirs in _LAYER.items()}
    return _renamed(out, "experts.fc1.weight", names) if moe else out


def _renamed(
    tensors: Mapping[str, Tensor], marked: str, names: Mapping[str, str]
) -> dict[str, Tensor]:
    """Other keys for the layers that have a tensor `marked`."""
    layers = [name.removesuffix(marked) for name in tensors if f".{name}".endswith(f".{marked}")]
    new = {layer + old: layer + name for layer in layers for old, name in names.items()}
    return {new.get(name, name): tensor for name, tensor in tensors.items()}


def _ours(prefix: str, kind: str) -> str:
    return f"{prefix}.{'fc2' if kind == 'down' else 'fc1'}.weight"


def _joined(name: str, parts: dict[tuple[int, str], Tensor]) -> Tensor:
    """One weight of its parts: stacked over experts (-1: a dense MLP, no experts), `[gate | up]`."""
    experts = sorted({expert for expert, _ in parts})
    kinds = ("down",) if name.endswith("fc2.weight") else ("gate", "up")
    wanted = {(e, k) for e in ([-1] if experts == [-1] else range(experts[-1] + 1)) for k in kinds}
    if missing := sorted(wanted - parts.keys()):
        expert, kind = missing[0]
        whose = "" if expert < 0 else f" of expert {expert}"
        raise FuseOpsError(
            f"to_fuseops: {name} is made of {len(wanted)} weights, and {kind}_proj{whose} is missing. "
            "Give all shards of a checkpoint at once."
        )
    each = [torch.cat([parts[e, k] for k in kinds]) for e in experts]
    return each[0] if experts == [-1] else torch.stack(each)


def to_hf(
    tensors: Mapping[str, Tensor], *, experts: Literal["packed", "separate"] = "packed"
) -> dict[str, Tensor]:
    """The way back: views of `tensors` under Hugging Face's keys, layers of `fo.MoE` too.

    experts: "packed" as in the state_dict of a transformers 5 model, "separate" as in a checkpoint file.
    Raises FuseOpsError for any other value, or for an fc1 with an odd number of rows.
    """
    if experts not in ("packed", "separate"):
        raise FuseOpsError(f"to_hf: experts must be 'packed' or 'separate', got {experts!r}.")
    out: dict[str, Tensor] = {}
    for name, tensor in _renamed(tensors, "router.weight", _LAYER).items():
        match = _OURS.fullmatch(name)
        if match is None:
            out[name] = tensor
        elif match[1].rpartition(".")[2] != "experts":
            out |= _separate(match[1], match[2], tensor)
        elif experts == "packed":
            out[f"{match[1]}.{'gate_up' if match[2] == 'fc1' else 'down'}_proj"] = tensor
        else:
            for e, weight in enumerate(tensor):
                out |= _separate(f"{match[1]}.{e}", match[2], weight)
    return out


def _separate(prefix: str, fc: str, weight: Tensor) -> dict[str, Tensor]:
    """The projections of one MLP.   fc1 (2F, D) -> gate and up (F, D)"""
    if fc == "fc2":
        return {f"{prefix}.down_proj.weight": weight}
    if weight.shape[0] % 2:
        raise FuseOpsError(
            f"to_hf: {prefix}.fc1 is [gate | up], two halves, got shape {tuple(weight.shape)}."
        )
    gate, up = weight.chunk(2)
    return {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up}
