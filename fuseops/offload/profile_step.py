"""Profiles of one training step: recorded on the device, or run dry on fake tensors without one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from fuseops.errors import FuseOpsError
from fuseops.ops.op import Op as FuseOp

from .hardware import ATTENTION_SAVES, Hardware
from .labels import paths_under
from .profile import DRY_RUN, RECORDED, LayerCall, Profile, Recompute, Saved
from .profile_memory import CudaMeter, StorageMeter, tensors_in
from .profile_record import Recorder

Loss = Callable[[Any], Tensor]
TIMED_STEPS = 3


class Step(NamedTuple):
    """What is profiled: one forward and backward.

    layers  id of a module -> its path; the units of the schedule
    loss    makes a scalar of the model's output; None: `.loss` of it, or the sum of what needs a
            gradient
    """

    model: nn.Module
    args: tuple[Any, ...]
    side: Mapping[str, Any]
    layers: Mapping[int, str]
    loss: Loss | None
    min_bytes: int

    def run(self, args: tuple[Any, ...], side: Mapping[str, Any]) -> None:
        """Forward and backward."""
        out = self.model(*args, **side)
        if self.loss is not None:
            self.loss(out).backward()  # type: ignore[no-untyped-call]
            return
        loss = getattr(out, "loss", None)
        tensors = [loss] if isinstance(loss, Tensor) else list(tensors_in(out))
        ends = [t for t in tensors if t.requires_grad]
        if not ends:
            raise FuseOpsError(
                f"a step of {type(self.model).__name__} has no backward: no output needs a "
                "gradient. Pass loss=, or an input or parameters that require gradients."
            )
        torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])


def record(step: Step) -> Profile:
    """One step as it runs, with times and bytes measured. Gradients, buffers and random states of the
    model are as before afterwards; gradients that exist stay where they are meanwhile, as in a step
    that adds to them.
    """
    cuda = any(p.is_cuda for p in step.model.parameters())
    assumed = []
    with _untouched(step, cuda):
        new = [t for t in _leaves(step) if t.grad is None]
        step.run(step.args, step.side)  # warm up: caches, compilation
        _drop_gradients(new)
        whole = statistics.median(_timed(step, new, cuda) for _ in range(TIMED_STEPS))
        meter = CudaMeter() if cuda else StorageMeter(_there(step.model, step.args))
        recorder = Recorder(
            step.model, dict(step.layers), meter, seconds=None, min_bytes=step.min_bytes
        )
        with recorder.running():
            step.run(step.args, step.side)
        _drop_gradients(new)
    ops, saved, calls = recorder.result()
    # Recording makes the host slow, which shows in short ops: together they are the plain step.
    scale = whole / max(sum(op.seconds for op in ops), 1e-12)
    ops = tuple(op._replace(seconds=op.seconds * scale) for op in ops)
    if not cuda:
        assumed.append("bytes that an op needs inside itself are not counted on the CPU")
    recompute = tuple(_recomputations(step, saved, calls, [op.seconds for op in ops]))
    return Profile(
        *(type(step.model).__name__, RECORDED, ops, saved, calls, recompute, tuple(assumed)),
        hardware=torch.cuda.get_device_name() if cuda else "cpu",
        facts={"step_seconds": whole, "scale": scale},
    )


def dry_run(step: Step, hardware: Hardware, split: Sequence[int] | None = None) -> Profile:
    """One step on fake tensors: bytes are exact, times follow the roofline of `hardware`.

    split  rows that data-dependent selections (`nonzero`, `where`) find, one call after another

    Raises FuseOpsError where shapes depend on data and no split is given.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    assumed = [
        f"times: roofline of {hardware.name} ({hardware.source})",
        "bytes that a kernel needs inside itself are not counted",
    ]
    backends = (
        [SDPBackend.MATH]
        if hardware.attention == "math"
        else [
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.MATH,
        ]
    )
    rows = _Rows(split)
    with _faked(step.model, mode):
        args, side = (_fake_copy(value, mode) for value in (step.args, dict(step.side)))
        recorder = Recorder(
            step.model,
            dict(step.layers),
            StorageMeter(_there(step.model, (args, side))),
            seconds=_Roofline(hardware),
            min_bytes=step.min_bytes,
            intercept=rows,
        )
        with mode, sdpa_kernel(backends), recorder.running(), _explained():
            step.run(args, side)
    ops, saved, calls = recorder.result()
    if any("scaled_dot_product" in op.name for op in ops):
        more = ", ".join(ATTENTION_SAVES[hardware.attention])
        assumed.append(f"attention saves q, k, v, its output and {more} ({hardware.attention})")
    if rows.used:
        assumed.append(f"data-dependent selections find {list(split or ())} rows in turn")
    if any(isinstance(m, FuseOp) for m in step.model.modules()):
        assumed.append("fused as on this device, which may fuse less than CUDA")
    recompute = tuple(_recomputations(step, saved, calls, [op.seconds for op in ops]))
    return Profile(
        *(type(step.model).__name__, DRY_RUN, ops, saved, calls, recompute, tuple(assumed)),
        hardware=hardware.name,
    )


# --- recomputation


def _recomputations(
    step: Step, saved: Sequence[Saved], calls: Sequence[LayerCall], seconds: Sequence[float]
) -> Iterator[Recompute]:
    """Whole layers, by checkpoint: all calls of one together, but what comes in from outside."""
    by_layer: dict[str, list[int]] = {}
    for k, call in enumerate(calls):
        by_layer.setdefault(call.layer, []).append(k)
    for layer, mine in by_layer.items():
        members = tuple(
            n
            for n, s in enumerate(saved)
            if s.call in mine and s.nbytes and not s.again and s.made >= calls[s.call].enter
        )
        again = sum(sum(seconds[calls[k].enter : calls[k].leave]) for k in mine)
        if members:
            yield Recompute(layer, "module", members, again, len({saved[n].call for n in members}))


# --- a real step


def _timed(step: Step, new: list[Tensor], cuda: bool) -> float:
    """Seconds of one step as users run it."""
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    step.run(step.args, step.side)
    if cuda:
        torch.cuda.synchronize()
    took = time.perf_counter() - start
    _drop_gradients(new)
    return took


def _leaves(step: Step) -> list[Tensor]:
    """What gets a gradient."""
    inputs = tensors_in((step.args, step.side))
    return [t for t in (*step.model.parameters(), *inputs) if t.is_leaf and t.requires_grad]


def _drop_gradients(leaves: list[Tensor]) -> None:
    for t in leaves:
        t.grad = None


def _there(model: nn.Module, inputs: Any) -> list[Tensor]:
    """What is on the device before the step begins."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*model.parameters(), *model.buffers(), *gradients, *tensors_in(inputs)]


@contextmanager
def _untouched(step: Step, cuda: bool) -> Iterator[None]:
    """Gradients, buffers and random states come back."""
    kept = [t.grad for t in _leaves(step) if t.grad is not None]
    before = [(t, t.to("cpu", copy=True)) for t in (*kept, *step.model.buffers())]
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if cuda else []):
            yield
    finally:
        with torch.no_grad():
            for t, value in before:
                t.copy_(value)


# --- a step of fake tensors


@contextmanager
def _faked(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Fake parameters and buffers in place of the real ones, tied ones still tied."""
    made: dict[int, Tensor] = {}
    before = []
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, t in table.items():
                if t is not None:
                    before.append((table, name, t))
                    made.setdefault(id(t), _fake(t, mode))
                    table[name] = made[id(t)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for table, name, t in before:
            table[name] = t  # type: ignore[assignment]


def _fake(t: Tensor, mode: FakeTensorMode) -> Tensor:
    if t.is_meta:  # a model that was never given memory: kernels of the CPU tell what it saves
        with mode:
            fake = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")
    else:
        fake = mode.from_tensor(t.detach())
    if isinstance(t, nn.Parameter):
        parameter = nn.Parameter(fake, requires_grad=t.requires_grad)
        if t.grad is not None:
            parameter.grad = _fake(t.grad, mode)
        return parameter
    return fake.requires_grad_() if t.requires_grad else fake


def _fake_copy(value: Any, mode: FakeTensorMode) -> Any:
    """`value` with every tensor replaced by a fake one."""
    if isinstance(value, Tensor):
        return _fake(value, mode)
    if isinstance(value, dict):
        return {key: _fake_copy(part, mode) for key, part in value.items()}
    if hasattr(value, "_fields"):
        return type(value)._make(_fake_copy(part, mode) for part in value)
    if isinstance(value, (tuple, list)):
        return type(value)(_fake_copy(part, mode) for part in value)
    return value  # what holds tensors in other ways is converted by the mode as it is used


class _Roofline:
    """Seconds of an op from its arithmetic and its bytes."""

    def __init__(self, hardware: Hardware) -> None:
        from torch.utils.flop_counter import flop_registry

        self._hardware, self._flops = hardware, flop_registry

    def __call__(
        self,
        func: Any,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        args: tuple[Any, ...],
        kwargs: Any,
    ) -> float:
        nbytes = sum(t.numel() * t.element_size() for t in (*inputs, *outputs))
        formula = self._flops.get(func._overloadpacket)
        out = outputs[0] if len(outputs) == 1 else tuple(outputs)
        flops = 0.0 if formula is None else float(formula(*args, **kwargs, out_val=out))
        dtype = str(inputs[0].dtype).removeprefix("torch.") if inputs else "float32"
        return self._hardware.op_seconds(flops, nbytes, dtype)


class _Rows:
    """Answers how many rows a selection finds, from the declared split."""

    def __init__(self, split: Sequence[int] | None) -> None:
        self._split, self.used = split, 0

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if func is not torch.ops.aten.nonzero.default or not self._split:
            return func(*args, **kwargs)
        rows = self._split[self.used % len(self._split)]
        self.used += 1
        return args[0].new_empty((rows, args[0].dim()), dtype=torch.int64)


@contextmanager
def _explained() -> Iterator[None]:
    """What fake tensors cannot know, in words of this package."""
    try:
        yield
    except Exception as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if kinds & {"DataDependentOutputException", "DynamicOutputShapeException"}:
            raise FuseOpsError(
                f"a dry run cannot know what depends on data: {error}. Declare how many rows such "
                "selections find, split=[rows, ...], or record a real step: record=True."
            ) from error
        raise


# --- layers


def layers_of(model: nn.Module, globs: tuple[str, ...] | None) -> dict[int, str]:
    """The units of the schedule, id -> path.

    globs None: the members of the ModuleList or Sequential that holds most parameters, the outermost
    of equals; ops of fuseops are no layers, since they fuse. A model without one is one layer.
    """
    from .scheduler import matching

    if globs is not None:
        return {id(module): path for path, module in matching(model, globs).items()}
    lists = [
        list(m.children())
        for m in model.modules()
        if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) > 1
    ]
    lists = [found for found in lists if not any(isinstance(m, FuseOp) for m in found)]
    found = max(lists, key=_parameters, default=[model])
    paths = paths_under(model)
    return {id(m): paths[id(m)] for m in found}


def _parameters(modules: Sequence[nn.Module]) -> int:
    return sum(p.numel() for m in modules for p in m.parameters())
