"""A training step of any module without lasting effects, and the rules that fired in it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseops.attributes import attributes_set
from fuseops.observe import modules
from fuseops.observe.untouched import main_grad_of, untouched
from fuseops.ops import scopes
from fuseops.ops.weights import drop_quantized_weights
from fuseops.run.weight_grads import run_delayed
from fuseops.torch_private import pytree

from .compare import is_floating
from .trees import copy_leaf, tensors


class FiredRule(NamedTuple):
    """A `FiredRule` is a rule that fired, and the ops that it fused."""

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
    """A `StepResult` holds the named results of a training step."""

    outputs: dict[str, Tensor]
    grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    fired: tuple[FiredRule, ...]


@contextmanager
def record_fired(model: nn.Module) -> Iterator[list[FiredRule]]:
    """Record the rules that fire inside, in order, each once for the same ops."""
    paths = {id(module): path for path, module in model.named_modules()}
    fired: list[FiredRule] = []

    def watch(plan: Any) -> None:
        path = modules.path_in(paths, modules.thread.running)
        for span in (*plan.forward, *plan.backward):
            if span.rule is not None:
                found = FiredRule(span.rule, span.kind, path, tuple(span.ops))
                if found not in fired:
                    fired.append(found)

    with modules.stack_tracked(), scopes.watch_plans(watch):
        yield fired


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore gradients (also in main_grad), buffers and random states at the end.

    Cached quantized weights are dropped first, since making one records its amax in a buffer.
    """
    drop_quantized_weights(model)
    with untouched(model), attributes_set((p, "grad", None) for p in model.parameters()):
        yield


def _perturb(t: Tensor, unit: float, generator: torch.Generator) -> Tensor:
    sign = torch.randint(-1, 2, t.shape, generator=generator).to(t.device, torch.float64)
    return t * (1 + sign * max(unit, torch.finfo(t.dtype).eps)).to(t.dtype)


def perturbed(
    model: nn.Module, unit: float, generator: torch.Generator
) -> AbstractContextManager[None]:
    """Perturb every floating parameter by at most `unit` of itself, for the calls made inside."""
    floating = (p for p in model.parameters() if p.is_floating_point())
    return attributes_set((p, "data", _perturb(p.data, unit, generator)) for p in floating)


def training_step(
    model: nn.Module,
    inputs: tuple[Any, ...],
    side: dict[str, Any],
    *,
    all_inputs: bool,
    perturb_seed: int = 0,
    unit: float = 0.0,
) -> StepResult:
    """Run forward and backward, with the same random output gradients in every call.

    all_inputs: every floating input gets a gradient, not only those with requires_grad.
    perturb_seed: where it is not zero, inputs and parameters are perturbed by at most `unit` of themselves.
    """
    generator = torch.Generator().manual_seed(perturb_seed)
    leaves: dict[int, Tensor] = {}

    def leaf(t: Tensor) -> Tensor:
        if id(t) not in leaves:
            new = copy_leaf(t)
            if perturb_seed and t.is_floating_point():
                new = _perturb(new, unit, generator)
            leaves[id(t)] = new.requires_grad_(is_floating(t) and (all_inputs or t.requires_grad))
        return leaves[id(t)]

    moved = perturbed(model, unit, generator) if perturb_seed else nullcontext()
    with moved, restored(model), record_fired(model) as fired:
        args, kwargs = pytree.tree_map_only(Tensor, leaf, (inputs, side))
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
