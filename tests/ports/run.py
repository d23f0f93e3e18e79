"""One training step of a model under features, and the comparison of two."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from port import Feature, Port, Step
from torch import Tensor, nn

import fuseops as fo
from fuseops.testing.compare import difference

# Names that wrappers put into the path of a parameter.
WRAPPERS = {"_orig_mod", "module"}
# In units of the coarsest dtype that anything is computed in, of an element and of the mean of its tensor: two layers
# of sums in another order. Halves as in fuseops.testing: fused ops round less often, a unit or two at each op.
UNITS = {torch.float64: 256.0, torch.float32: 256.0, torch.bfloat16: 8.0}


def prepared(port: Port, model: nn.Module, features: Iterable[Feature]) -> nn.Module:
    """`model` under the features, in their order."""
    for feature in sorted(features, key=lambda f: f.order):
        model = feature.prepare(port, model)
    return model


def train(port: Port, model: nn.Module, features: Sequence[Feature]) -> Step:
    """Forward and backward of every micro-batch, gradients accumulated."""
    count = max((f.micro_batches for f in features), default=1)
    outputs, losses = [], []
    for index in range(count):
        with ExitStack() as scopes:
            for feature in features:
                scopes.enter_context(feature.around(model))
                scopes.enter_context(feature.synchronised(model, index + 1 == count))
            out, loss = _called(features, model, partial(port.loss, batch=port.batch(index)))
        (loss / count).backward()
        outputs.append(out.detach())
        losses.append(loss.detach())
    return Step(tuple(outputs), tuple(losses), gradients(port, model))


def _called(features: Sequence[Feature], model: nn.Module, run: Callable[[Any], Any]) -> Any:
    for feature in features:
        if feature.call is not None:
            run = partial(feature.call, run=run)
    return run(model)


def bare(name: str) -> str:
    """A parameter's name without the prefixes of wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def gradients(port: Port, model: nn.Module) -> dict[str, Tensor | None]:
    """Gradients under the stock keys; a parameter without one is missing."""
    found = {bare(n): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return dict(port.to_stock(found))


def reference(port: Port, features: Sequence[Feature]) -> Step:
    """What the step has to give: the stock model's, under those features that change what is computed.

    Where a feature changes the numerics (autocast, FP8) it is the ported model's with fusion off.
    """
    there = [f for f in features if f.on_stock or f.changes_numerics]
    if any(f.changes_numerics for f in features):
        model = prepared(port, port.ported(), there)
        fo.configure(model, fusion=False)
    else:
        model = prepared(port, port.stock(), there)
    return train(port, model, there)


def ported(port: Port, features: Sequence[Feature]) -> Step:
    """The step of the model of fuseops ops."""
    return train(port, prepared(port, port.ported(), features), features)


def coarsest(features: Iterable[Feature]) -> torch.dtype:
    """What differences are measured in."""
    return max((f.rounds_to for f in features), key=lambda dtype: torch.finfo(dtype).eps)


def differences(got: Step, expected: Step, dtype: torch.dtype) -> list[str]:
    """Every output, loss and gradient that differs by more than rounding in `dtype` explains, in words."""
    pairs: list[tuple[str, Any, Any]] = []
    for kind, ours, theirs in (
        ("output", got.outputs, expected.outputs),
        ("loss", got.losses, expected.losses),
    ):
        pairs += [(f"{kind} {i}", a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    for name in sorted(got.grads.keys() | expected.grads.keys()):
        pairs.append((f"gradient of {name}", got.grads.get(name), expected.grads.get(name)))
    tol = UNITS[dtype] * torch.finfo(dtype).eps
    found = [difference(name, a, b, tol, ("ported", "stock")) for name, a, b in pairs]
    return [str(d) for d in found if d is not None]
