"""`GroupedLinear(packed=False)` has one Parameter a group, all of them over one packed storage.

The packed tensor of E parameters of one shape is an alias of their storage while they are adjacent in it. `.to`,
`deepcopy`, loading with `assign=True` and whatever else sets `.data` separates them; `repack` moves them back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.errors import InPlaceError
from fuseops.kernels.registry import check_all_meta
from fuseops.plain import PLAIN


def alias_of(parts: Sequence[Tensor]) -> Tensor | None:
    """An alias (E, *shape) of `parts`, or None unless they are adjacent in one storage, in order."""
    first = parts[0].detach()
    fake = first.is_meta or torch_private.is_fake(first)
    if not (fake or type(parts[0]) in PLAIN) or not first.is_contiguous():
        return None
    storage, size = first.untyped_storage(), first.numel() * first.itemsize
    begin = first.storage_offset() * first.itemsize
    if begin + len(parts) * size > storage.nbytes():
        return None
    # addresses identify live storages; fake tensors have none
    address = _fake_address if fake else Tensor.data_ptr
    expected, alike = address(first), (first.shape, first.stride(), first.dtype)
    for part in parts:
        if address(part) != expected or (part.shape, part.stride(), part.dtype) != alike:
            return None
        expected += size
    return first.as_strided((len(parts), *first.shape), (first.numel(), *first.stride()))


def _fake_address(t: Tensor) -> int:
    """A stand-in for `data_ptr`: unique to a storage, and linear in the offset."""
    return (torch_private.storage_id(t) << 48) + int(t.storage_offset()) * t.itemsize


def repack(parts: Sequence[Tensor]) -> bool:
    """Move parameters of one shape, dtype and device into one storage, where needed.   -> whether they moved"""
    plain = all(type(part) in PLAIN for part in parts)  # DTensors stay
    first = parts[0]
    if not plain or alias_of(parts) is not None:
        return False
    if any((p.shape, p.dtype, p.device) != (first.shape, first.dtype, first.device) for p in parts):
        return False
    with torch.no_grad():
        for part, row in zip(parts, torch.stack([p.data for p in parts]), strict=True):
            part.data = row
    return True


class Packed(torch.autograd.Function):
    """A `Packed` is the autograd node of (E, *shape) over the storage of E parameters; each gets its gradient."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, *parts: Tensor) -> Tensor:
        ctx.parts, ctx.versions = parts, [torch_private.version(part) for part in parts]
        ctx.set_materialize_grads(False)
        return whole

    @staticmethod
    def backward(ctx: Any, d: Tensor | None) -> Any:
        # the version of the packed tensor counts writes to the first part only
        for e, (part, version) in enumerate(zip(ctx.parts, ctx.versions, strict=True)):
            if torch_private.version(part) != version:
                raise InPlaceError(
                    f"the parameter of group {e} was modified in place between the forward and the backward, "
                    "which reads it."
                )
        return None, *([None] * len(ctx.parts) if d is None else d.unbind())


def packed(parts: Mapping[str, Tensor]) -> Tensor:
    """`torch.stack` of parameters by name, without a copy where they lie in one storage.

    Raises FuseOpsError where only some of them are on the meta device.
    """
    tensors = [*parts.values()]
    opaque = torch.compiler.is_compiling() or torch_private.inside_functorch()
    whole = None if opaque else alias_of(tensors)
    if whole is None:
        check_all_meta([(name, part.is_meta) for name, part in parts.items()])
        return torch.stack(tensors)
    found: Tensor = Packed.apply(whole, *tensors)  # type: ignore[no-untyped-call]
    return found
