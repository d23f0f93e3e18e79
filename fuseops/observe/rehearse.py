"""The peak of a training step without running it: forward and backward on fake tensors, counting live storages.

A kernel is one op here: what its launcher allocates for itself (partial sums, a few KiB) is not seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fuseops import torch_private
from fuseops.torch_private import FakeTensorMode, pytree

from .fakes import fake, faked
from .memory import OpWatcher, StorageMeter, outside_bytes, tensors_in
from .untouched import fsdp_modules


def peak_of_step(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """The most bytes that live at one time in a forward and backward, or None where fake tensors cannot tell.

    Counted: what the step allocates, with outputs and new gradients; inputs that are saved; what ops keep outside of
    torch's allocator. Not counted: parameters, and the gradient of the output.
    None where a plain module reads values, FSDP2 gathers parameters, or the caller is in a fake mode of its own.
    """
    if torch_private.inside_fake_mode() or fsdp_modules(model):
        return None
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with faked(model, mode):
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: fake(t, mode), (args, dict(kwargs)))
        inputs = list(tensors_in((args, kwargs)))
        for p in model.parameters():
            p.grad = None  # as at the first micro-batch
        meter, levels, saved_keys = StorageMeter(), [0], set[int]()
        ops = OpWatcher(lambda *call: levels.append(meter.after(call[-1])))

        def pack(t: Tensor) -> Tensor:
            saved_keys.add(torch_private.storage_key(t.untyped_storage()))
            return t.detach()  # t itself would be a reference cycle where it is the output

        try:
            with mode, ops:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                    outputs = model(*args, **kwargs)
                roots = [t for t in tensors_in(outputs) if t.requires_grad]
            if not roots:
                return max(levels) + outside_bytes(model)
            with mode:
                gradients = [torch.empty_like(t) for t in roots]
            with mode, ops, torch.autograd.set_detect_anomaly(False):  # it reads values
                torch.autograd.backward(roots, gradients)
        except (RuntimeError, NotImplementedError):  # the errors that fake tensors raise
            return None
    storages = {
        torch_private.storage_key(s): s.nbytes() for s in (t.untyped_storage() for t in inputs)
    }
    saved = sum(storages[key] for key in saved_keys & storages.keys())
    return max(levels) + saved + outside_bytes(model)


def not_counted() -> tuple[str, ...]:
    """Notes on what a real step would allocate now, and a step on fake tensors does not."""
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        return ("detect_anomaly is on: the bytes in which it looks for NaN are not in the peak",)
    return ()
