"""Records one training step: its ops with times and bytes, and when tensors are saved and read. The step is a real one
or one on fake tensors.

Saved tensors get the names and reasons that scopes give them; nothing is moved.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.observe import modules
from fuseops.observe.memory import (
    Meter,
    OpWatcher,
    named_arguments,
    outside_bytes,
    storage_tensors,
    tensors_in,
)
from fuseops.observe.travel import TRAVEL
from fuseops.observe.untouched import BufferVersions, buffer_versions, written_buffer
from fuseops.offload.codes import Coding, coded_bytes, coding_of, exact_by_name
from fuseops.offload.policy import Candidate, Policy, Quota
from fuseops.offload.reasons import MODEL_OWNED, why_no_storage
from fuseops.offload.records import Handle, Kept
from fuseops.offload.report import KEPT
from fuseops.offload.scopes import Scope
from fuseops.offload.storages import StorageMap
from fuseops.ops.names import SavedName
from fuseops.torch_private import WeakStorage, storage_key
from fuseops.words import dtype_name

from .measure import event
from .profile import DRY_RUN, RECORDED, LayerCall, Profile, ProfiledOp, Resave, Saved

COLLECTIVES = ("c10d.", "_c10d_functional.")
FROM_HOST = (
    "fsdp.chunk_cat",
    "fsdp.split_with_sizes_copy",
    "aten._chunk_cat",
    "aten.split_with_sizes_copy",
)
"""Their kernels on CUDA read addresses and sizes, which torch copies from pinned memory for each call."""

Loss = Callable[[Any], Tensor]
Seconds = Callable[[Any, tuple[Any, ...], Any, Any], float]


class ProfiledStep(NamedTuple):
    """A `ProfiledStep` is one forward and backward to be profiled.

    layers  id of a module -> its path; the units of the schedule
    loss    makes a scalar of the model's output; None: its `.loss`, or the sum of outputs with a gradient
    policy  which tensors may be offloaded
    """

    model: nn.Module
    args: tuple[Any, ...]
    side: Mapping[str, Any]
    layers: Mapping[int, str]
    loss: Loss | None
    policy: Policy

    def run(
        self,
        args: tuple[Any, ...],
        side: Mapping[str, Any],
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """Forward and backward; `between` is called between them.

        Only the roots of the backward are kept of the output, as in `model(...).loss.backward()`.
        """
        out = self.model(*args, **side)
        between()
        roots = self._backward_roots(out)
        del out
        torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])

    def _backward_roots(self, out: Any) -> list[Tensor]:
        """The tensors at which the backward begins."""
        loss = getattr(out, "loss", None) if self.loss is None else self.loss(out)
        begin = loss if self.loss is not None or isinstance(loss, Tensor) else out
        ends = [t for t in tensors_in(begin) if t.requires_grad]
        if not ends:
            instead = "Pass a loss= whose result needs one, or an input or parameters that require gradients."
            if not torch.is_grad_enabled():
                instead = (
                    "Gradients are off: plan outside of torch.no_grad() and torch.inference_mode()."
                )
            raise FuseOpsError(
                f"a step of {type(self.model).__name__} has no backward: no output needs a gradient. {instead}"
            )
        return ends


class _Storage:
    """A `_Storage` describes a saved storage while the step runs."""

    def __init__(self, storage: torch.UntypedStorage, seen: Saved) -> None:
        self.seen = seen  # what is known so far
        self.weak = WeakStorage(storage)
        self.handles = 0
        self.held = self.freed = -1
        self.saves: dict[int, int] = {}  # call -> position, of other calls
        self.reads: dict[int, int] = {}  # call -> position of the first

    def update(self, position: int) -> bool:
        """Records when autograd alone holds it, and when it is freed.   -> whether to check again after the next op;
        not while autograd alone holds it
        """
        if self.weak.expired():
            self.freed = position
            self.held = position if self.held < 0 else self.held
        elif self.held < 0 and self.weak.holders() <= self.handles:
            self.held = position
        return self.freed < 0 and (self.held < 0 or not self.handles)

    def done(self, end: int) -> Saved:
        freed = end if self.freed < 0 else self.freed
        again = tuple(Resave(c, at, self.reads.get(c, freed)) for c, at in self.saves.items())
        held = freed if self.held < 0 else self.held
        read = self.reads.get(self.seen.call, freed)
        return self.seen._replace(held=held, read=read, freed=freed, again=again)


class _RecordedHandle(Kept):
    """A `_RecordedHandle` is the handle of a saved tensor while a step is recorded."""

    __slots__ = ("call", "recorder", "storage")
    call: int
    recorder: Recorder
    storage: _Storage | None

    def restore(self) -> Tensor:
        if self.storage is not None:
            self.storage.reads.setdefault(self.call, self.recorder.position)
        return super().restore()

    def __del__(self) -> None:
        if self.storage is not None:
            self.recorder.dropped.append(self.storage)


class Recorder(Scope):
    """A `Recorder` records one run of a step. It is a scope that keeps everything.

    seconds    estimates the time of an op; None: it is measured
    intercept  runs the ops of a dry run
    """

    def __init__(
        self,
        step: ProfiledStep,
        meter: Meter,
        seconds: Seconds | None = None,
        intercept: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(step.model)
        self.model, self.layers, self.policy = step.model, step.layers, step.policy
        self.meter, self.seconds, self.intercept = meter, seconds, intercept
        self._quotas: defaultdict[int, Quota] = defaultdict(Quota)  # by call
        self._on_gpu = any(p.is_cuda for p in self.model.parameters())
        self.ops: list[ProfiledOp] = []
        self.calls: list[LayerCall] = []
        self._timers: list[Any] = []
        self._storages: list[_Storage] = []
        self.names = set[str]()  # of all saved tensors
        self._watched: list[_Storage] = []
        self.dropped: deque[_Storage] = deque()  # appended by finalizers of handles, in any thread
        self._by_storage: StorageMap[_Storage] = StorageMap()
        self._made: StorageMap[int] = StorageMap()
        self._transfers: StorageMap[int] = StorageMap()  # between ranks: position of the op
        self.running_call = -1  # the call of a layer whose forward runs, or -1
        self._buffers: BufferVersions = {}  # of that layer at the begin of its forward
        self._wrote: str | None = None  # the name of one of them that an op wrote
        self._ordinals: dict[str, int] = {}

    def __str__(self) -> str:
        return "record()"

    @property
    def position(self) -> int:
        return len(self.ops)

    # --- the step

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record what runs inside."""
        with ExitStack() as stack:
            stack.enter_context(modules.calls_watched(self._on_enter, self._on_leave))
            stack.enter_context(self)
            stack.enter_context(OpWatcher(self._on_op, self._run_op))
            yield
        self._update_watched()

    def result(self) -> Profile:
        """The profile, once the step is over."""
        ops = self.ops
        if self._timers:
            times = _times(self._timers)
            ops = [op._replace(seconds=s) for op, s in zip(ops, times, strict=True)]
        outside, end = outside_bytes(self.model), len(ops)
        ops = [op._replace(resident=op.resident + outside) for op in ops]
        calls = [c if c.leave >= 0 else c._replace(leave=end) for c in self.calls]
        kind = RECORDED if self.seconds is None else DRY_RUN
        saved = tuple(s.done(end) for s in self._storages)
        return Profile(type(self.model).__name__, kind, tuple(ops), saved, tuple(calls))

    # --- what is saved

    def pack(self, tensors: Sequence[Tensor], named: Sequence[SavedName]) -> list[Handle]:
        return [self._record_handle(t, name) for t, name in zip(tensors, named, strict=True)]

    def pack_torch_saved(self, t: Tensor, caller: FrameType | None) -> Handle:
        return self._record_handle(t, self._labels.name_torch_saved(t, caller))

    def _record_handle(self, t: Tensor, named: SavedName) -> _RecordedHandle:
        special = why_no_storage(t)
        if special is None and torch_private.in_backward():
            special = "recomputed by checkpoint"
        entry = self._entry(t, named, KEPT, special or "recorded", 0)
        handle = _RecordedHandle(t, entry, self._ledger)
        handle.recorder, handle.call = self, self.running_call
        handle.storage = None if special is not None else self._record_storage(t, named)
        return handle

    def _by_policy(self, t: Tensor, named: SavedName) -> tuple[str | None, str]:
        return self.policy.why_keep(Candidate.of(t, named), self._quotas[self.running_call]), ""

    def _record_storage(self, t: Tensor, named: SavedName) -> _Storage:
        self.names.update(named.names)
        storage = t.untyped_storage()
        known = self._by_storage.get(storage)
        if known is None:
            call = self.running_call
            why = self._reason(t, named)[0]
            if why is None and call < 0:
                why = "outside of the layers"
            known = _Storage(storage, self._first_save(t, named, call, why))
            self._by_storage.set(storage, known)
            self._storages.append(known)
            if why not in MODEL_OWNED:
                self._watched.append(known)
        elif self.running_call not in (known.seen.call, -1):
            known.saves.setdefault(self.running_call, self.position)
        if known.seen.codes and not self._may_round(t, named, known.seen):
            known.seen = known.seen._replace(codes=0)
        known.handles += 1
        return known

    def _first_save(self, t: Tensor, named: SavedName, call: int, why: str | None) -> Saved:
        """The entry of a storage that is saved for the first time."""
        storage = t.untyped_storage()
        made = self._made.get(storage)
        return Saved(
            *(named.name, named.op, call),
            *(0 if why in MODEL_OWNED else storage.nbytes(), tuple(t.shape), dtype_name(t.dtype)),
            made=-1 if made is None else made,
            at=self.position,
            held=-1,
            read=-1,
            freed=-1,
            why=why,
            codes=self._codes(t, named) if why is None else 0,
        )

    def _codes(self, t: Tensor, named: SavedName) -> int:
        candidate = Candidate.of(t, named)
        coding = coding_of(candidate, tuple(self.policy.quantize))
        return coded_bytes(candidate.nbytes, t.dtype) if isinstance(coding, Coding) else 0

    def _may_round(self, t: Tensor, named: SavedName, known: Saved) -> bool:
        """Whether a tensor may be rounded, in a storage that may be offloaded as codes."""
        globs = tuple(self.policy.quantize)
        return dtype_name(t.dtype) == known.dtype and exact_by_name(named.names, globs) is None

    # --- hooks

    def _run_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.intercept is not None:
            return self.intercept(func, args, kwargs)
        self._timer = _Timer(self._on_gpu)
        self.meter.before()
        out = func(*args, **kwargs)
        self._timer.stop()
        return out

    def _on_op(self, func: Any, args: Any, kwargs: Any, out: Any, made: list[Tensor]) -> None:
        """An op was issued."""
        position, name, seconds, lane, join = self.position, str(func), 0.0, "compute", -1
        if self.seconds is None:
            self._timers.append(self._timer)
        else:
            seconds = self.seconds(func, args, kwargs, out)
        for t in storage_tensors((args, kwargs)):
            self._join_transfer(t)
        for t in made:
            self._made.set(t.untyped_storage(), position)
        if self.running_call >= 0 and func._schema.is_mutable:
            self._note_writes(func, args, kwargs)
        if name == TRAVEL:
            lane = "network"
            for t in made:
                self._transfers.set(t.untyped_storage(), position)
        elif name.startswith(COLLECTIVES):  # timed while compute waited for it
            lane, join = "network", position + 1
        nbytes, from_host = self.meter.after(made), name.startswith(FROM_HOST)
        self.ops.append(ProfiledOp(name, seconds, nbytes, lane, join, from_host))
        self._update_watched()

    def _note_writes(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        """Note buffers of the running layer that an op writes, also through `.data`, which changes no version."""
        given, takes = named_arguments(func, args, kwargs), func._schema.arguments
        targets = [given.get(a.name) for a in takes if a.alias_info and a.alias_info.is_write]
        storages = {storage_key(t.untyped_storage()) for t in storage_tensors(targets)}
        for name, (buffer, _) in self._buffers.items():
            if any(storage_key(t.untyped_storage()) in storages for t in storage_tensors(buffer)):
                self._wrote = name

    def _join_transfer(self, t: Tensor) -> None:
        """If t is the result of a transfer, the next op waits for it."""
        at = self._transfers.get(t.untyped_storage())
        if at is not None and self.ops[at].join < 0:
            self.ops[at] = self.ops[at]._replace(join=self.position)

    def _update_watched(self) -> None:
        while self.dropped:
            storage = self.dropped.popleft()
            storage.handles -= 1
            if not storage.handles and storage.held >= 0 and storage.freed < 0:
                self._watched.append(storage)
        self._watched = [s for s in self._watched if s.update(self.position)]

    def _on_enter(self, module: nn.Module, args: Any) -> None:
        path = self.layers.get(id(module))
        if path is None or self.running_call >= 0 or torch_private.in_backward():
            return
        ordinal = self._ordinals[path] = self._ordinals.get(path, -1) + 1
        self.running_call = len(self.calls)
        self._labels = self._labels.restarted()  # as under a scheduler
        self._buffers, self._wrote = buffer_versions(module), None
        self.calls.append(LayerCall(path, ordinal, self.position, -1, -1))

    def _on_leave(self, module: nn.Module, args: Any, output: Any) -> None:
        k = self.running_call
        ends = k >= 0 and self.calls[k].layer == self.layers.get(id(module))
        if not ends or torch_private.in_backward():
            return
        self.running_call = -1
        writes = self._wrote or written_buffer(self._buffers, buffer_versions(module))
        self.calls[k] = self.calls[k]._replace(leave=self.position, writes=writes)
        for t in tensors_in(output):
            if t.grad_fn is not None:
                t.grad_fn.register_prehook(lambda _, k=k: self._on_backward(k))

    def _on_backward(self, k: int) -> None:
        if self.calls[k].backward < 0:
            self.calls[k] = self.calls[k]._replace(backward=self.position)


LEAD_CYCLES = 600_000  # about 0.3 ms, in which the host launches an op
EMPTY_TIMERS = 15  # empty timers, whose median is subtracted from the others


class _Timer:
    """A `_Timer` measures the time of one op: by events on CUDA, by the clock elsewhere.

    Recording makes the host so slow that the device would wait for it, so the device is kept busy until the op is
    launched. Without that, short ops took the time of their launch, and a forward a quarter too long.
    """

    def __init__(self, on_gpu: bool) -> None:
        self._events: list[torch.cuda.Event] = []
        if on_gpu:
            torch_private.occupy_device(LEAD_CYCLES)
            self._events = [event(), event()]
            self._events[0].record()
        self._start, self._end = time.perf_counter(), 0.0

    def stop(self) -> None:
        self._end = time.perf_counter()
        if self._events:
            self._events[1].record()

    def seconds(self) -> float:
        if not self._events:
            return self._end - self._start
        return self._events[0].elapsed_time(self._events[1]) / 1e3


def _times(timers: Sequence[_Timer]) -> list[float]:
    """Seconds of each timer, after a synchronization. The time between two events without an op, some microseconds, is
    subtracted.
    """
    idle = []
    for _ in range(EMPTY_TIMERS):
        idle.append(_Timer(bool(timers[0]._events)))
        idle[-1].stop()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    empty = statistics.median(timer.seconds() for timer in idle)
    return [max(timer.seconds() - empty, 0.0) for timer in timers]
