"""The peak of a training step without running it: forward and backward on fake tensors, counting live storages.

A kernel is one op here: what its launcher allocates for itself (partial sums, a few KiB) is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fuseops.torch_private import storage_key

from .fakes import LiveBytes, faked
from .memory import outside_bytes
from .untouched import main_grad_of


def peak_of_step(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Bytes of a forward and backward that live at one time, at the most.

    What the forward and the backward make counts, the output and new gradients too, and of the inputs
    what is saved, and what ops keep outside of torch's allocator; not the gradient of the output, nor
    parameters. None where fake tensors cannot tell: a plain module reads values.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with faked(model, lambda t: _fake(t, mode)):
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: _fake(t, mode), (args, dict(kwargs)))
        inputs = _tensors((args, kwargs))
        meter = PeakMeter()
        meter.ignore((*inputs, *model.parameters(), *model.buffers()))
        kept: set[int] = set()

        def pack(t: Tensor) -> Tensor:
            kept.add(storage_key(t.untyped_storage()))
            return t.detach()  # itself, it would be a cycle where it is the output

        try:
            with mode, meter:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                    outputs = model(*args, **kwargs)
                ends = [t for t in _tensors(outputs) if t.requires_grad]
            if not ends:
                return meter.peak + outside_bytes(model)
            with mode:
                gradients = [torch.empty_like(t) for t in ends]
            meter.ignore(gradients)
            with mode, meter, torch.autograd.set_detect_anomaly(False):  # it reads values
                torch.autograd.backward(ends, gradients)
        except (RuntimeError, NotImplementedError):  # of fake tensors, whose errors are these
            return None
    storages = {storage_key(s): s.nbytes() for s in (t.untyped_storage() for t in inputs)}
    saved = sum(storages[key] for key in kept & storages.keys())
    return meter.peak + saved + outside_bytes(model)


def unseen() -> tuple[str, ...]:
    """What a step of fake tensors leaves out that the step would do now."""
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        return ("detect_anomaly is on: the bytes in which it looks for NaN are not in the peak",)
    return ()


class PeakMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of storages that ops made and that live, and the most there were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live, self.peak = LiveBytes(), 0

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Count no bytes of the storages of these tensors."""
        self.live.add(tensors, count=False)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.live.forget()
        self.live.add(_tensors(out))
        self.peak = max(self.peak, self.live.nbytes)
        return out


def _tensors(value: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]


def _fake(t: Tensor, mode: FakeTensorMode) -> Tensor:
    """Its fake, without a gradient, as at the first micro-batch; with a main_grad, which a backward looks for."""
    fake = mode.from_tensor(t.detach())
    made: Any = nn.Parameter(fake, t.requires_grad) if isinstance(t, nn.Parameter) else fake
    if (main_grad := main_grad_of(t)) is not None:
        made.main_grad = mode.from_tensor(main_grad)
    made.requires_grad_(t.requires_grad)
    return made
