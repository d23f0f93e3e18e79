"""A step on fake tensors needs fakes in the place of its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fuseops import torch_private

from .untouched import main_grad_of, nothing_waits


def fake(t: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake of a tensor, and of the gradients that a parameter has."""
    if t.is_meta or torch_private.is_fake(t):  # a model that was never given memory
        mine: Any = t  # of a DTensor what this rank has, which its op computes with
        mine = mine.to_local() if torch_private.is_dtensor(type(t)) else mine
        device = "cpu" if t.is_meta else t.device  # whose kernels tell what it saves
        with mode:
            made = torch.empty_strided(mine.shape, mine.stride(), dtype=t.dtype, device=device)
    else:
        made = mode.from_tensor(t.detach())
    if isinstance(t, nn.Parameter):
        parameter: Any = nn.Parameter(made, requires_grad=t.requires_grad)
        if t.grad is not None:
            parameter.grad = fake(t.grad, mode)
        if (main_grad := main_grad_of(t)) is not None:
            parameter.main_grad = fake(main_grad, mode)
        return parameter
    return made.requires_grad_() if t.requires_grad else made


@contextmanager
def faked(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Parameters, buffers and tensors that are plain attributes are replaced by their fakes, tied ones by one; what
    waits for backward_dw stays.
    """
    made: dict[int, Tensor] = {}
    before: list[tuple[Any, str, Tensor]] = []
    for module in model.modules():
        tables: tuple[Any, ...] = (module._parameters, module._buffers, vars(module))
        for table in tables:
            for name, t in table.items():
                if isinstance(t, Tensor):
                    before.append((table, name, t))
                    if id(t) not in made:
                        made[id(t)] = fake(t, mode)
                    table[name] = made[id(t)]
    try:
        with nothing_waits(model):
            yield
    finally:
        for table, name, t in before:
            table[name] = t
