"""Tensors inside nested tuples, lists, dicts and dataclasses, each under a name that a message can show."""

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fuseops.recipes import Quantized


def _children(tree: Any) -> list[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        return [(f"[{key!r}]", value) for key, value in tree.items()]
    if hasattr(tree, "_fields"):
        return [(f".{key}", getattr(tree, key)) for key in tree._fields]
    if isinstance(tree, tuple | list):
        return [(f"[{k}]", value) for k, value in enumerate(tree)]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(f".{f.name}", getattr(tree, f.name)) for f in dataclasses.fields(tree)]
    return []


def tensors(tree: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in `tree`, named by its expression: `output[0].logits`. A Quantized is dequantized."""
    if isinstance(tree, Quantized):
        tree = tree.dequantize()
    if isinstance(tree, Tensor):
        yield name, tree
    for suffix, child in _children(tree):
        yield from tensors(child, name + suffix)


def copy_leaf(t: Tensor) -> Tensor:
    """A copy of t that is a leaf, with the same strides and storage offset."""
    return copy.deepcopy(t.detach())


def scrambled(t: Tensor) -> Tensor:
    """A tensor like t with other values; integers stay in the range of t, since they may be indices."""
    if t.is_floating_point() or t.is_complex():
        return t + torch.linspace(1, 2, t.numel(), dtype=t.dtype, device=t.device).view(t.shape)
    most = int(t.max()) if t.numel() else 0
    return (torch.arange(t.numel(), device=t.device) % (most + 1)).view(t.shape).to(t.dtype)
