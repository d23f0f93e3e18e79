"""The peak of a training step without running it: forward and backward on fake tensors, counting live storages.

A kernel is one op here: what its launcher allocates for itself (partial sums, a few KiB) is not seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fuseops import torch_private

from .fakes import fake, faked
from .memory import Ops, StorageMeter, outside_bytes, tensors_in
from .untouched import sharded


def peak_of_step(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Bytes of a forward and backward that live at one time, at the most.

    What the forward and the backward make counts, the output and new gradients too, and of the inputs
    what is saved, and what ops keep outside of torch's allocator; not the gradient of the output, nor
    parameters. None where fake tensors cannot tell: a plain module reads values, FSDP2 gathers
    parameters, or the caller has fake tensors of its own made, with which no other ones are mixed.
    """
    if torch_private.inside_fake_mode() or sharded(model):
        return None
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with faked(model, mode):
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: fake(t, mode), (args, dict(kwargs)))
        inputs = list(tensors_in((args, kwargs)))
        for p in model.parameters():
            p.grad = None  # as at the first micro-batch
        meter, levels, kept = StorageMeter(), [0], set[int]()
        ops = Ops(lambda *call: levels.append(meter.after(call[-1])))

        def pack(t: Tensor) -> Tensor:
            kept.add(torch_private.storage_key(t.untyped_storage()))
            return t.detach()  # itself, it would be a cycle where it is the output

        try:
            with mode, ops:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                    outputs = model(*args, **kwargs)
                ends = [t for t in tensors_in(outputs) if t.requires_grad]
            if not ends:
                return max(levels) + outside_bytes(model)
            with mode:
                gradients = [torch.empty_like(t) for t in ends]
            with mode, ops, torch.autograd.set_detect_anomaly(False):  # it reads values
                torch.autograd.backward(ends, gradients)
        except (RuntimeError, NotImplementedError):  # of fake tensors, whose errors are these
            return None
    storages = {
        torch_private.storage_key(s): s.nbytes() for s in (t.untyped_storage() for t in inputs)
    }
    saved = sum(storages[key] for key in kept & storages.keys())
    return max(levels) + saved + outside_bytes(model)


def unseen() -> tuple[str, ...]:
    """What a step of fake tensors leaves out that the step would do now."""
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        return ("detect_anomaly is on: the bytes in which it looks for NaN are not in the peak",)
    return ()
