"""Profiles of one training step: recorded on the device, or run dry on fake tensors without one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.kernels.registry import as_if_on
from fuseops.observe.fakes import fake, faked
from fuseops.observe.held import contents_restored, lists_held
from fuseops.observe.labels import matching_modules, paths_under
from fuseops.observe.memory import CudaMeter, StorageMeter, dense_tensors, tensors_in
from fuseops.observe.rehearse import not_counted
from fuseops.observe.untouched import fsdp_modules, main_grads, untouched
from fuseops.ops.op import Op as FuseOp
from fuseops.torch_private import FakeTensorMode, pytree

from .fused import fused_ops
from .hardware import ATTENTION_SAVES, Hardware
from .measure import event
from .profile import Profile
from .recompute import recomputations
from .record import ProfiledStep, Recorder
from .roofline import DRY_ERROR, Roofline

Progress = Callable[
    [str, int, int], None
]  # what is being done, how many parts are done, of how many


def silent(what: str, done: int, total: int) -> None:
    """A `Progress` that does nothing."""


TIMED_STEPS = 3
STAGES = 5  # of a recorded plan: four here, then the choice


def record(step: ProfiledStep, progress: Progress = silent) -> Profile:
    """Profile a real step, with measured times and bytes. Gradients, buffers and random states of the model are
    restored; existing gradients stay allocated, as in a step that accumulates into them.
    """
    cuda = any(p.is_cuda for p in step.model.parameters())
    forward: list[int] = []  # the number of its ops

    def observe() -> Recorder:
        meter = CudaMeter() if cuda else StorageMeter(_resident_tensors(step.model, step.args))
        recorder = Recorder(step, meter)
        with apart(), recorder.running():
            step.run(step.args, step.side, lambda: forward.append(recorder.position))
        return recorder

    existing = [t.grad for t in _grad_leaves(step) if t.grad is not None]
    apart = partial(
        _apart, [t for t in _grad_leaves(step) if t.grad is None], lists_held(step.model)
    )
    with ExitStack() as stack:
        stack.enter_context(untouched(step.model, existing))
        stack.enter_context(_layer_hooks(step))
        progress("warming up", 0, STAGES)  # caches, compilation
        with apart():
            step.run(step.args, step.side)
        progress("timing", 1, STAGES)
        timed = _timed(step, apart, cuda)
        progress("recording", 2, STAGES)
        seen = _profile_of(step.model, observe, progress)
    # Scale the recorded ops to the timed step, where launches overlap, and a device that is never idle is slower at
    # what takes the most power; that differs between forward and backward.
    ops, scales = [], []
    for part, seconds in zip((seen.ops[: forward[0]], seen.ops[forward[0] :]), timed, strict=True):
        scales.append(seconds / max(sum(op.seconds for op in part), 1e-12))
        ops += [op._replace(seconds=op.seconds * scales[-1]) for op in part]
    on_cpu = "bytes that an op needs inside itself are not counted on the CPU"
    return replace(
        seen,
        ops=tuple(ops),
        recompute=tuple(g._replace(seconds=g.seconds * scales[0]) for g in seen.recompute),
        assumed=() if cuda else (on_cpu,),
    )


def dry_run(step: ProfiledStep, hardware: Hardware, split: Sequence[int] | None = None) -> Profile:
    """Profile a step on fake tensors: bytes are exact, times are estimates (roofline.py).

    split  how many rows data-dependent selections (`nonzero`, `where`) find, in the order of the calls

    Raises FuseOpsError where shapes depend on data and no split is given, where FSDP2 would gather
    parameters, and where all tensors of the caller are fakes.
    """
    if torch_private.inside_fake_mode():
        raise FuseOpsError(
            "a plan was asked for inside of a FakeTensorMode, and fake tensors of two modes do not mix; leave "
            "the mode first: the model may have been made in it, or on the meta device."
        )
    if modules := fsdp_modules(step.model):
        raise FuseOpsError(
            f"a dry run cannot gather parameters, and fully_shard has sharded those of {type(modules[0]).__name__}: "
            "record a step (record=True), or plan the model before fully_shard, on the meta device say."
        )
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    flash = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    backends = [SDPBackend.MATH] if hardware.attention == "math" else flash
    rows = _FakeOps(split)

    def observe() -> Recorder:
        rows.used = 0
        with faked(step.model, mode):
            given = (step.args, dict(step.side))
            args, side = pytree.tree_map_only(Tensor, lambda t: fake(t, mode), given)
            meter = StorageMeter(_resident_tensors(step.model, (args, side)))
            recorder = Recorder(step, meter, Roofline(hardware), rows)
            as_on, quiet = as_if_on(hardware.arch), torch.autograd.set_detect_anomaly(False)
            fused = fused_ops() if hardware.arch else nullcontext()
            with (
                mode,
                sdpa_kernel(backends),
                recorder.running(),
                as_on,
                quiet,
                fused,
                _fake_errors(),
            ):
                step.run(args, side)
        return recorder

    with _layer_hooks(step):
        seen = _profile_of(step.model, observe)
    assumed = tuple(_assumed(step, hardware, seen, rows))
    return replace(seen, assumed=assumed)


def _profile_of(
    model: nn.Module, observe: Callable[[], Recorder], progress: Progress = silent
) -> Profile:
    """The profile of a step and its recomputable groups.   observe: runs and records the step"""
    first = observe()
    first.policy.check(first.names)
    seen = first.result()
    progress("what can be made again", 3, STAGES)
    return replace(seen, recompute=recomputations(model, seen, lambda: observe().result()))


def _assumed(
    step: ProfiledStep, hardware: Hardware, seen: Profile, rows: _FakeOps
) -> Iterator[str]:
    yield (
        f"times: arithmetic and bytes of each op at the rates of {hardware.name} ({hardware.source}); "
        f"recorded steps lay within {DRY_ERROR:.0%}"
    )
    yield "bytes that a kernel needs inside itself are not counted: recorded peaks were up to 1 % higher"
    yield from not_counted()
    if any("scaled_dot_product" in op.name for op in seen.ops):
        more = ", ".join(ATTENTION_SAVES[hardware.attention])
        yield f"attention saves q, k, v, its output and {more} ({hardware.attention})"
    if any(op.lane == "network" for op in seen.ops):
        rate = f"at {hardware.network:g} GB/s, evenly to all"
        known = rate if hardware.network else "in no time: Hardware.network is not known"
        yield f"tokens travel between ranks {known}"
    if any(type(m).__module__.startswith("transformers.") for m in step.model.modules()):
        yield (
            "transformers makes an attention mask where tensors are fake and a step would need none: "
            "what attention saves may differ; record=True measures the step itself"
        )
    if rows.used:
        yield f"data-dependent selections find {list(rows.split or ())} rows in turn"
    if any(isinstance(m, FuseOp) for m in step.model.modules()):
        kernels = f"kernels of sm_{hardware.arch}" if hardware.arch else "no kernels"
        yield f"fuseops: {kernels}; rules that ask for a CUDA device do not fire"


# --- a real step


@contextmanager
def _apart(new: list[Tensor], lists: list[Any]) -> Iterator[None]:
    """Runs a step of which the next one finds neither its gradients nor what it has collected, a list of losses say:
    the user's loop would take that out. Tables that it has made stay, as they do between steps.
    """
    with contents_restored(lists):
        try:
            yield
        finally:
            _drop_gradients(new)


def _timed(
    step: ProfiledStep, apart: Callable[[], AbstractContextManager[None]], cuda: bool
) -> tuple[float, float]:
    """Seconds of a forward and of a backward in consecutive steps, so that the host is ahead of a CUDA device. On an
    idle device the forward would include time of the host.
    """
    marks: list[Any] = []

    def mark() -> None:
        marks.append(event() if cuda else time.perf_counter())
        if cuda:
            marks[-1].record()

    for _ in range(1 + TIMED_STEPS):  # the first warms up
        with apart():
            mark()
            step.run(step.args, step.side, mark)
            mark()
    if cuda:
        torch.cuda.synchronize()
    starts, middles, ends = (marks[k::3][1:] for k in range(3))
    return _median(starts, middles), _median(middles, ends)


def _median(starts: list[Any], ends: list[Any]) -> float:
    """Seconds between events, or between times."""
    return statistics.median(
        end - start if isinstance(end, float) else start.elapsed_time(end) / 1e3
        for start, end in zip(starts, ends, strict=True)
    )


def _grad_leaves(step: ProfiledStep) -> list[Tensor]:
    """The leaves that get a gradient."""
    inputs = tensors_in((step.args, step.side))
    return [t for t in (*step.model.parameters(), *inputs) if t.is_leaf and t.requires_grad]


def _drop_gradients(leaves: list[Tensor]) -> None:
    for t in leaves:
        t.grad = None


def _resident_tensors(model: nn.Module, inputs: Any) -> list[Tensor]:
    """The tensors that are on the device before the step begins."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    gradients += main_grads(model)
    return list(dense_tensors([*model.parameters(), *model.buffers(), *gradients, inputs]))


# --- a step of fake tensors


class _FakeOps:
    """Results of ops that fake tensors do not know: the rows that a selection finds, from the declared split, and
    grouped products of float32, which torch's fake kernel supports in bfloat16 only.
    """

    def __init__(self, split: Sequence[int] | None) -> None:
        self.split, self.used = split, 0

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if func is torch_private.grouped_mm and args[0].dtype is not torch.bfloat16:
            return args[0].new_empty(_grouped_shape(*args[:2], *args[2:3], **kwargs))
        if func is not torch.ops.aten.nonzero.default or not self.split:
            return func(*args, **kwargs)
        rows = self.split[self.used % len(self.split)]
        self.used += 1
        return args[0].new_empty((rows, args[0].dim()), dtype=torch.int64)


def _grouped_shape(a: Tensor, b: Tensor, offs: Tensor | None = None, **_: Any) -> tuple[int, ...]:
    """The shape of `_grouped_mm`: one matrix for each group where both operands are 2-D."""
    if a.dim() == b.dim() == 2:
        groups = 0 if offs is None else offs.numel()
        return groups, a.shape[0], b.shape[1]
    if a.dim() == b.dim():
        return a.shape[0], a.shape[1], b.shape[2]
    return a.shape[-2], b.shape[-1]


@contextmanager
def _fake_errors() -> Iterator[None]:
    """Converts errors of fake tensors about data-dependent shapes, and silences torch's log lines."""
    try:
        with torch_private.quiet_fake_tensors():
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


@contextmanager
def _layer_hooks(step: ProfiledStep) -> Iterator[None]:
    """Puts a hook on every layer, as a scheduler does, so that no fusion crosses layers."""
    with ExitStack() as stack:
        for module in step.model.modules():
            if id(module) in step.layers:
                stack.callback(module.register_forward_pre_hook(_nothing).remove)
        yield


def _nothing(module: nn.Module, args: Any) -> None:
    pass


def layers_of(model: nn.Module, globs: tuple[str, ...] | None) -> dict[int, str]:
    """The units of the schedule, id -> path.

    globs None: the members of the ModuleList or Sequential that holds most parameters, the outermost
    of equals; ops of fuseops are no layers, since they fuse. A model without one is one layer.
    """
    if globs is not None:
        return {id(module): path for path, module in matching_modules(model, globs).items()}
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
