"""A run that leaves no trace: what steps change in a model besides parameters, gradients and buffers, put back."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fuseops.ops.op import Op
from fuseops.ops.scopes import DELAYED
from fuseops.ops.stored import stored_in, sync_masters
from fuseops.torch_private import fsdp_accumulation, version


def held(model: nn.Module) -> list[Tensor]:
    """Tensors that modules hold and that are neither parameters nor buffers: a router's counts of its experts."""
    return [t for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor)]


def main_grad_of(p: Tensor) -> Tensor | None:
    """The buffer that the gradient of a parameter is added to in the place of `.grad`."""
    found = getattr(p, "main_grad", None)
    return found if isinstance(found, Tensor) else None


def main_grads(model: nn.Module) -> list[Tensor]:
    """The `main_grad_of` every parameter of a model that has one."""
    return [t for t in map(main_grad_of, model.parameters()) if t is not None]


Written = dict[str, tuple[Tensor, int]]


def buffers_of(module: nn.Module) -> Written:
    """The buffers under a module, each with how often it was written.

    Without those of ops, whose scales see in a second forward what they saw in the first.
    """
    owners = ((path, m) for path, m in module.named_modules() if not isinstance(m, Op))
    return {
        f"{path}.{name}" if path else name: (t, version(t))
        for path, m in owners
        for name, t in m._buffers.items()
        if t is not None
    }


def written(before: Written, after: Written) -> str | None:
    """The name of a buffer that was written between two `buffers_of`, or replaced by one of its shape: a table that
    grows is none that a second forward would make differently.
    """
    for name, (old, count) in before.items():
        new, now = after.get(name, (old, count))
        if (new is not old or now != count) and new.shape == old.shape:
            return name
    return None


@contextmanager
def put_back(tensors: Iterable[Tensor], unseen: bool = False) -> Iterator[None]:
    """Gives tensors that were written inside their values back. The copies lie on the CPU.

    unseen: a write may be one that torch does not see, as a kernel's into a main_grad.
    """
    before = [(t, version(t), t.detach().to("cpu", copy=True)) for t in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for t, known, value in before:
                if unseen or version(t) != known:  # a pending backward may check that of the others
                    t.copy_(value)


def sharded(model: nn.Module) -> list[Any]:
    """The modules that FSDP2 shards. It gathers into tensors of its own, which would be fakes for good in a dry run."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return [module for module in model.modules() if isinstance(module, kind)]


@contextmanager
def sharded_again(model: nn.Module) -> Iterator[None]:
    """What a forward without a backward leaves gathered is sharded again: parameters are those that were there."""
    before = [*map(id, model.parameters())]
    try:
        yield
    finally:
        if before != [*map(id, model.parameters())]:
            for module in sharded(model):
                module.reshard()


@contextmanager
def reducing(model: nn.Module) -> Iterator[None]:
    """FSDP2 reduces the gradients of the steps inside, and what it has accumulated without comes back."""
    kept = [each for module in sharded(model) for each in fsdp_accumulation(module)]
    before = [getattr(owner, name) for owner, name, _ in kept]
    for owner, name, value in kept:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(kept, before, strict=True):
            setattr(owner, name, value)


@contextmanager
def nothing_waits(model: nn.Module) -> Iterator[None]:
    """What waits for `backward_dw` stays as it is, and what comes to it inside goes."""
    waiting = [(vars(module), vars(module).pop(DELAYED, None)) for module in model.modules()]
    try:
        yield
    finally:
        for own, queue in waiting:
            own.pop(DELAYED, None)
            if queue is not None:
                own[DELAYED] = queue


@contextmanager
def no_gradient_taken(model: nn.Module) -> Iterator[None]:
    """Who takes the gradient of a parameter once it is there, as an optimizer that steps in the backward, is not told;
    masters of weights that live in a format, which take theirs, have the same as before.
    """
    own = [stored.master for m in model.modules() if (stored := stored_in(m)) is not None]
    grads = [(master, master.grad) for master in own if master is not None]
    told = [hooks for p in model.parameters() if (hooks := p._post_accumulate_grad_hooks)]
    before = [(hooks, dict(hooks)) for hooks in told]
    try:
        for hooks in told:
            hooks.clear()
        for master, _ in grads:
            master.grad = None
        yield
    finally:
        for hooks, known in before:
            hooks.clear()
            hooks.update(known)
        for master, grad in grads:
            master.grad = grad


def forked_random() -> AbstractContextManager[None]:
    """Random states come back, those of all devices."""
    ready = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.random.fork_rng(range(torch.cuda.device_count() if ready else 0))


@contextmanager
def same_tensors(model: nn.Module) -> Iterator[None]:
    """What modules hold by other tensors at the end are those of before again: buffers, made or replaced inside, and
    attributes that were tensors.
    """
    before = [(m._buffers, dict(m._buffers), vars(m)) for m in model.modules()]
    attributes = [{n: t for n, t in own.items() if isinstance(t, Tensor)} for *_, own in before]
    try:
        yield
    finally:
        for (table, known, own), tensors in zip(before, attributes, strict=True):
            table.clear()
            table.update(known)
            own.update(tensors)


@contextmanager
def untouched(model: nn.Module, also: Iterable[Tensor] = ()) -> Iterator[None]:
    """What a step writes besides parameters and gradients comes back: buffers, each main_grad, what else modules hold,
    what waits for backward_dw or for FSDP2 to reduce it, random states, and the values of `also`. No gradient goes on
    from there.
    """
    sync_masters(model)
    written = (*also, *model.buffers(), *main_grads(model))
    with put_back(written, unseen=True), put_back(held(model)), nothing_waits(model):
        with reducing(model), same_tensors(model), no_gradient_taken(model), forked_random():
            yield
