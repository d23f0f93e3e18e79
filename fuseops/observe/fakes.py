"""Replaces the tensors of a model by fake tensors, for steps that run dry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fuseops import torch_private
from fuseops.ops.stored import sync_masters
from fuseops.torch_private import FakeTensorMode

from .held import contents_restored, held_restored, rng_restored
from .untouched import main_grad_of, restore_delayed_wgrads, restore_last_settings


def fake(t: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake tensor like t. That of a parameter has fakes of its `grad` and `main_grad`."""
    if t.is_meta or torch_private.is_fake(t):  # a model that was never given memory
        local: Any = t
        local = local.to_local() if torch_private.is_dtensor(type(t)) else local
        device = "cpu" if t.is_meta else t.device  # which kernels run decides what is saved
        with mode:
            made = torch.empty_strided(local.shape, local.stride(), dtype=t.dtype, device=device)
    else:
        made = mode.from_tensor(t.detach())
    if isinstance(t, nn.Parameter):
        parameter: Any = nn.Parameter(made, requires_grad=t.requires_grad)
        if t.grad is not None:
            parameter.grad_dtype = t.grad.dtype
            parameter.grad = fake(t.grad, mode)
        if (main_grad := main_grad_of(t)) is not None:
            parameter.main_grad = fake(main_grad, mode)
        return parameter
    return made.requires_grad_() if t.requires_grad else made


@contextmanager
def faked(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Replaces parameters, buffers and tensors that are plain attributes by fakes, tied ones by one, and restores the
    model: nothing that a forward leaves in a module stays, since it may be a fake or hold one.
    """
    sync_masters(model)
    made: dict[int, Tensor] = {}
    owners = [vars(module) for module in model.modules()]
    registered = [own[kind] for own in owners for kind in ("_parameters", "_modules")]
    with (
        held_restored(model),
        contents_restored(registered),
        rng_restored(model),
        restore_delayed_wgrads(model),
        restore_last_settings(model),
    ):
        for own in owners:
            tables: tuple[dict[str, Any], ...] = (own["_parameters"], own["_buffers"], own)
            for table in tables:
                for name, t in table.items():
                    if isinstance(t, Tensor):
                        if id(t) not in made:
                            made[id(t)] = fake(t, mode)
                        table[name] = made[id(t)]
        yield
