"""Context managers that restore what a step changes in a model besides parameters and gradients, for trial runs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fuseops.attributes import attributes_set
from fuseops.ops.op import Op
from fuseops.ops.paths import walk
from fuseops.ops.scopes import DELAYED
from fuseops.ops.stored import stored_in, sync_masters
from fuseops.torch_private import fsdp_accumulation, post_accumulate_hooks, version

from .held import contents_restored, held_restored, held_tensors, rng_restored


def main_grad_of(p: Tensor) -> Tensor | None:
    """Megatron's `main_grad` of a parameter, into which its gradient is accumulated instead of `.grad`, or None."""
    found = getattr(p, "main_grad", None)
    return found if isinstance(found, Tensor) else None


def main_grads(model: nn.Module) -> list[Tensor]:
    """The `main_grad` of every parameter of a model that has one."""
    return [t for t in map(main_grad_of, model.parameters()) if t is not None]


BufferVersions = dict[str, tuple[Tensor, int]]


def buffer_versions(module: nn.Module) -> BufferVersions:
    """The buffers under a module and their versions, by path.

    Those of ops are left out: their scales see in a second forward what they saw in the first.
    """
    owners = ((path, m) for path, m in module.named_modules() if not isinstance(m, Op))
    return {
        f"{path}.{name}" if path else name: (t, version(t))
        for path, m in owners
        for name, t in m._buffers.items()
        if t is not None
    }


def written_buffer(before: BufferVersions, after: BufferVersions) -> str | None:
    """The name of a buffer that was written or replaced between two `buffer_versions`, or None.

    One that changed its shape does not count: a table that has grown is the same after a second forward.
    """
    for name, (old, count) in before.items():
        new, now = after.get(name, (old, count))
        if (new is not old or now != count) and new.shape == old.shape:
            return name
    return None


@contextmanager
def restore_values(tensors: Iterable[Tensor], unseen: bool = False) -> Iterator[None]:
    """Restores the values of tensors that were written inside, from copies on the CPU.

    unseen: restore all of them, since a write may change no version, such as a kernel's into a main_grad.
    """
    before = [(t, version(t), t.detach().to("cpu", copy=True)) for t in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for t, known, value in before:
                if unseen or version(t) != known:  # a pending backward may check that of the others
                    t.copy_(value)


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules that FSDP2 shards. They exclude dry runs: the buffers that FSDP2 gathers into would stay fake."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return [module for module in model.modules() if isinstance(module, kind)]


@contextmanager
def reshard_after(model: nn.Module) -> Iterator[None]:
    """Reshards at the end what a forward without a backward left gathered, so that parameters are the sharded ones."""
    before = [*map(id, model.parameters())]
    try:
        yield
    finally:
        if before != [*map(id, model.parameters())]:
            for module in fsdp_modules(model):
                module.reshard()


def restore_fsdp_accumulation(model: nn.Module) -> AbstractContextManager[None]:
    """Sets gradients that FSDP2 has accumulated unreduced aside, and restores them; steps inside reduce theirs."""
    return attributes_set(
        field for module in fsdp_modules(model) for field in fsdp_accumulation(module)
    )


@contextmanager
def restore_delayed_wgrads(model: nn.Module) -> Iterator[None]:
    """Sets weight gradients that wait for `backward_dw` aside, and restores them; those delayed inside are dropped."""
    waiting = [(vars(module), vars(module).pop(DELAYED, None)) for module in model.modules()]
    try:
        yield
    finally:
        for own, queue in waiting:
            own.pop(DELAYED, None)
            if queue is not None:
                own[DELAYED] = queue


@contextmanager
def restore_last_settings(model: nn.Module) -> Iterator[None]:
    """Restores the settings of the user's last forward, with which a recomputation compares its own."""
    before = {id(m): _last_settings(m) for _, m in walk(model)}
    try:
        yield
    finally:
        for _, module in walk(model):
            if (runner := module.__dict__.get("_runner")) is not None:
                runner.last_tokens, runner.last_layers = before.get(id(module), (None, ()))


def _last_settings(module: nn.Module) -> tuple[Any, Any]:
    runner = module.__dict__.get("_runner")
    return (None, ()) if runner is None else (runner.last_tokens, runner.last_layers)


@contextmanager
def without_grad_hooks(model: nn.Module) -> Iterator[None]:
    """Removes post-accumulate hooks of parameters, such as an optimizer that steps in the backward, and restores them;
    restores the gradients of the master weights of quantized parameters.
    """
    masters = [stored.master for m in model.modules() if (stored := stored_in(m)) is not None]
    hooked = [hooks for p in model.parameters() if (hooks := post_accumulate_hooks(p))]
    grads = attributes_set((master, "grad", None) for master in masters if master is not None)
    with contents_restored(hooked), grads:
        for hooks in hooked:
            hooks.clear()
        yield


@contextmanager
def untouched(model: nn.Module, also: Iterable[Tensor] = ()) -> Iterator[None]:
    """Restores all that a step writes besides parameters and gradients: buffers, main_grads, what else modules hold,
    delayed weight gradients, what FSDP2 has accumulated, random states, the settings of the last forward, and the
    values of `also`. No hook sees the gradients.
    """
    sync_masters(model)
    written = (*also, *model.buffers(), *main_grads(model))
    with (
        restore_values(written, unseen=True),
        restore_values(held_tensors(model)),
        restore_delayed_wgrads(model),
        restore_fsdp_accumulation(model),
        held_restored(model),
        restore_last_settings(model),
        without_grad_hooks(model),
        rng_restored(model),
    ):
        yield
