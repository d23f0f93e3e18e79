"""One training step of any module, run so that nothing of it stays behind, and which rules fired in it."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fuseops.observe import modules
from fuseops.observe.untouched import main_grad_of, untouched
from fuseops.ops import scopes
from fuseops.ops.weights import drop_kept
from fuseops.run.weight_grads import run_delayed

from .trees import copied, tensors


class Fired(NamedTuple):
    """A `Fired` is a rule that made a span of a plan."""

    rule: str
    kind: str
    path: str  # of the module that ran it
    ops: tuple[str, ...]

    def __str__(self) -> str:
        first, last = (
            f"{self.path}.{op}" if self.path else op for op in (self.ops[0], self.ops[-1])
        )
        return f"{self.rule} on {first if first == last else f'{first}..{last}'} ({self.kind})"


class StepResult(NamedTuple):
    """A `StepResult` holds what a training step gave: named tensors, in an order of their own."""

    outputs: dict[str, Tensor]
    grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    fired: tuple[Fired, ...]


@contextmanager
def watched(model: nn.Module) -> Iterator[list[Fired]]:
    """The rules that fire in the calls made inside, in order, each place once."""
    paths = {id(module): path for path, module in model.named_modules()}
    fired: list[Fired] = []

    def watch(plan: Any) -> None:
        path = modules.path_in(paths, modules.thread.running)
        for span in (*plan.forward, *plan.backward):
            if span.rule is not None:
                found = Fired(span.rule, span.kind, path, tuple(span.ops))
                if found not in fired:
                    fired.append(found)

    with modules.stack_tracked(), scopes.watching(watch):
        yield fired


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Gradients (those that go elsewhere too), buffers and random states are afterwards what they were before.

    No quantized weight of an earlier run is used: making one notes its amax in a buffer.
    """
    drop_kept(model)
    grads = {p: p.grad for p in model.parameters()}
    try:
        with untouched(model):
            for p in grads:
                p.grad = None
            yield
    finally:
        for p, grad in grads.items():
            p.grad = grad


def floating(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _shaken(t: Tensor, unit: float, generator: torch.Generator) -> Tensor:
    sign = torch.randint(-1, 2, t.shape, generator=generator).to(t.device, torch.float64)
    return t * (1 + sign * max(unit, torch.finfo(t.dtype).eps)).to(t.dtype)


@contextmanager
def shaken(model: nn.Module, unit: float, generator: torch.Generator) -> Iterator[None]:
    """Every floating parameter moved by at most `unit` of itself, for the calls made inside."""
    before = [(p, p.data) for p in model.parameters() if p.is_floating_point()]
    try:
        for p, data in before:
            p.data = _shaken(data, unit, generator)
        yield
    finally:
        for p, data in before:
            p.data = data


def training_step(
    model: nn.Module,
    inputs: tuple[Any, ...],
    side: dict[str, Any],
    *,
    all_inputs: bool,
    shake: int = 0,
    unit: float = 0.0,
) -> StepResult:
    """Forward and backward with random output gradients, always the same ones.

    all_inputs: every floating input wants a gradient, not only those that ask for one.
    shake: not zero moves inputs and parameters by at most `unit` of themselves, by this seed.
    """
    generator = torch.Generator().manual_seed(shake)
    leaves: dict[int, Tensor] = {}

    def leaf(t: Tensor) -> Tensor:
        if id(t) not in leaves:
            new = copied(t)
            if shake and t.is_floating_point():
                new = _shaken(new, unit, generator)
            leaves[id(t)] = new.requires_grad_(floating(t) and (all_inputs or t.requires_grad))
        return leaves[id(t)]

    moved = shaken(model, unit, generator) if shake else nullcontext()
    with moved, restored(model), watched(model) as fired:
        args, kwargs = tree_map_only(Tensor, leaf, (inputs, side))
        outputs = dict(tensors(model(*args, **kwargs), "output"))
        _backward(outputs)
        run_delayed(model)
        grads = {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
        sums = ((n, main_grad_of(p)) for n, p in model.named_parameters())
        grads |= {f"main_grad of {n}": t.clone() for n, t in sums if t is not None}
        grads |= {f"gradient of {n}": t.grad for n, t in _inputs(args, kwargs) if t.requires_grad}
        buffers = {f"buffer {n}": b.detach().clone() for n, b in model.named_buffers()}
    detached = {name: t.detach() for name, t in outputs.items()}
    return StepResult(detached, grads, buffers, tuple(fired))


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for k, tree in enumerate(args):
        yield from tensors(tree, f"input {k}")
    for name, tree in kwargs.items():
        yield from tensors(tree, f"side input {name}")


def _backward(outputs: dict[str, Tensor]) -> None:
    ys = [y for y in outputs.values() if y.requires_grad]
    if ys and torch.is_grad_enabled():
        generator = torch.Generator().manual_seed(0)
        dys = [
            torch.randn(y.shape, generator=generator).to(dtype=y.dtype, device=y.device) for y in ys
        ]
        torch.autograd.backward(ys, dys)
