"""A replay repeats the allocations and launches of a kernel op for operands of one kind.

A launcher is plain Python that checks operands, picks a configuration, allocates and launches. For operands with the
same shapes, strides, dtypes and device it does the same every time. So at its second call it is rehearsed on the meta
device, where its launches and allocations are recorded, and from then on the op repeats those without the launcher. It
may allocate zeros, for what a launch adds to; a launcher that computes something else by torch, copies an operand or
reads values cannot be replayed and is run each time, and so are operands that are not aligned to 16 bytes, for which
Triton compiles other code.

Decisions by kinds of operands and settings of launches, as which of two kernels is faster, are cached beside the
replays (`registry.cached_decision`); a change of a setting clears both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.attributes import attributes_set
from fuseops.errors import FuseOpsError
from fuseops.kernels.launch import (
    Launch,
    LaunchRecorder,
    current_arch,
    launch_and_bind,
    num_sms,
    thread,
)
from fuseops.kernels.triton_private import Launcher

ALIGNED = 16
ALLOCATES = frozenset(
    {
        *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"),
        *("zeros", "zeros_like", "new_zeros"),
    }
)
"""Names of ops by which a launcher may allocate."""
MAX_KINDS = 8  # of one op and shape of its first operand
MAX_SHAPES = 4096
NOT_REPLAYED = object()
MAX_TENSOR_MAPS = 1024  # tensor maps of an operand: of all layers of a model


def bump_versions(written: Sequence[Tensor]) -> None:
    """Increment the versions of tensors that a kernel has written to, as torch does for in-place ops."""
    for t in written:
        if not t.is_inference():  # inference tensors have no version
            torch.autograd.graph.increment_version(t)


class ReplayError(FuseOpsError):
    """Raised in a rehearsal: a launcher does more than allocate and launch, or depends on more than its operands."""


def not_replayable(reason: str) -> None:
    """A launcher calls this where its launches depend on something else than operands, so are not replayed."""
    if thread.recorder is not None and thread.recorder.rehearses:
        raise ReplayError(f"it depends on {reason}")


class OperandPlace(NamedTuple):
    """An `OperandPlace` is an operand of a launch as a view of a slot, an operand or allocation of the call."""

    slot: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class DescriptorOperand(NamedTuple):
    """A `DescriptorOperand` is an operand of a launch that is a tensor descriptor of an `OperandPlace`."""

    place: OperandPlace
    descriptor: Any

    def rebased(self, t: Any) -> Any:
        """The same descriptor of another tensor or address."""
        d = self.descriptor
        return type(d)(t, d.shape, d.strides, d.block_shape)


class OperandAddress:
    """An `OperandAddress` stands for a tensor when a descriptor is encoded: an address and a dtype."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address, self.dtype, self.is_meta = address, dtype, False

    def data_ptr(self) -> int:
        return self.address


class TensorMapCache(dict[int, Any]):
    """A `TensorMapCache` holds the tensor maps of one operand of a launch, a descriptor, by the address of its slot."""

    def __init__(
        self, launcher: Launcher, number: int, described: DescriptorOperand, dtype: Any
    ) -> None:
        super().__init__()
        self.launcher, self.number, self.described, self.dtype = launcher, number, described, dtype

    def encode(self, address: int) -> list[Any]:
        descriptor = self.described.rebased(OperandAddress(address, self.dtype))
        return self.launcher.encode_descriptor(descriptor, self.number)

    def __missing__(self, address: int) -> Any:
        if len(self) >= MAX_TENSOR_MAPS:
            self.clear()
        encoded = self[address] = self.encode(address)[0]
        return encoded


STREAM = object()  # placeholder for the stream among the operands of a launch


class Program(NamedTuple):
    """A `Program` is one launch in generated code: the raw launcher and its operands, with places for addresses."""

    raw: Callable[..., None]
    operands: list[Any]

    def line(self, addresses: Sequence[str], namespace: dict[str, Any]) -> str:
        """The launch as a line of generated code.   addresses: expressions, by slot"""
        operands = ", ".join([self._text(o, addresses, namespace) for o in self.operands])
        return f" {bind_constant(self.raw, namespace)}({operands})"

    @staticmethod
    def _text(value: Any, addresses: Sequence[str], namespace: dict[str, Any]) -> str:
        if value is STREAM:
            return "stream"
        if type(value) is OperandPlace:
            return addresses[value.slot]
        if type(value) is TensorMapCache:
            slot = value.described.place.slot
            return f"{bind_constant(value, namespace)}[{addresses[slot]}]"
        return bind_constant(value, namespace)


class Allocation(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    zeroed: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes that it spans: 0 of an empty one."""
        if 0 in self.shape:
            return 0
        ends = [(size - 1) * by for size, by in zip(self.shape, self.strides, strict=True)]
        return (sum(ends) + 1) * self.dtype.itemsize

    def lines(self, number: int, namespace: dict[str, Any]) -> list[str]:
        """Lines of generated code that allocate `t<number>`, at the address `p<number>`."""
        dtype = bind_constant(self.dtype, namespace)
        return [
            f" t{number} = empty({self.shape}, {self.strides}, {dtype}){'.zero_()' * self.zeroed}",
            f" p{number} = t{number}.data_ptr()",
        ]


class Replay:
    """A `Replay` repeats the allocations and launches of an op for operands of one kind.

    programs is None where the launcher cannot be replayed.  writes: the operands whose versions it increments
    """

    def __init__(
        self, launcher: Callable[..., Any], args: tuple[Any, ...], writes: Sequence[int] = ()
    ) -> None:
        tensor_places = [k for k, value in enumerate(args) if isinstance(value, Tensor)]
        other_places = [k for k, value in enumerate(args) if not isinstance(value, Tensor)]
        tensors = [args[k] for k in tensor_places]
        self.count = len(args)
        self.tensors_of, self.rest_of = _getter(tensor_places), _getter(other_places)
        self.check = torch_private.tensor_guard(tensors)
        self.scalars = self.rest_of(args)
        self.device, self.index = tensors[0].device, tensors[0].get_device()
        self.empty = torch_private.empty_strided(self.device)
        self.programs: list[Launch] | None = None
        self.contiguous = False  # whether all outputs are
        self.launcher = launcher
        self.writes = [k for k in writes if k in tensor_places]
        # bound by the first launch; `launchable`: they can be, or may yet turn out so
        self.launchers: Sequence[Launcher] = ()
        self.launch_code: list[Program] = []
        self.launchable = True
        self.call: Callable[..., Any] = self._run_checked  # later a generated function
        try:
            self._rehearse(args, tensors)
        except Exception:  # the launcher has just run: only the rehearsal fails
            self.programs, self.call = None, self._run_launcher

    def _rehearse(self, args: tuple[Any, ...], tensors: Sequence[Tensor]) -> None:
        mode, where = _RehearsalMode(tensors), self.device
        recorder = LaunchRecorder(current_arch(where), num_sms(where), rehearses=True)
        metas = iter(mode.operands)
        with torch.no_grad(), attributes_set([(thread, "recorder", recorder)]), mode:
            out = self.launcher(*(next(metas) if isinstance(v, Tensor) else v for v in args))
        self.returns_tuple = isinstance(out, tuple)
        self.returns_value = out is not None  # an op may write to its operands alone
        returned: Sequence[Tensor] = out if self.returns_tuple else (out,) * self.returns_value
        outputs = [mode.place(t) for t in returned]
        self.allocations, self.outputs = _output_layout(mode.allocations, outputs, len(tensors))
        self.contiguous = all(t.is_contiguous() for t in returned)
        self.programs = [
            recorded._replace(args=tuple([mode.operand(a) for a in recorded.args]))
            for recorded in recorder.launches
            if 0 not in recorded.grid
        ]

    def fits(self, args: tuple[Any, ...]) -> bool:
        """Whether operands are of this kind."""
        if len(args) != self.count or not self.check(*self.tensors_of(args)):
            return False
        others = self.rest_of(args)
        return not _tensors_in(others) and others == self.scalars

    def __call__(self, operands: tuple[Tensor, ...]) -> Any:
        """Allocate and launch.   -> what the launcher returns, or NOT_REPLAYED where it has to run itself"""
        pointers = [t.data_ptr() for t in operands]
        address_bits = 0
        for pointer in pointers:
            address_bits |= pointer
        if address_bits % ALIGNED or self.programs is None:
            return NOT_REPLAYED
        if self.index >= 0 and self.index != torch_private.current_device():
            with torch.cuda.device(self.device):
                return self(operands)
        allocated = [self._allocate(*allocation) for allocation in self.allocations]
        self._launch([*operands, *allocated])
        outputs = (
            allocated
            if self.outputs is None
            else [_view(allocated, place) for place in self.outputs]
        )
        return tuple(outputs) if self.returns_tuple else outputs[0] if self.returns_value else None

    def _allocate(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, zeroed: bool
    ) -> Tensor:
        made: Tensor = self.empty(shape, strides, dtype)
        return made.zero_() if zeroed else made

    def _run_launcher(self, *args: Any) -> Any:
        """Run a launcher that cannot be replayed, for operands of this kind; NOT_REPLAYED for others."""
        return self.launcher(*args) if self.fits(args) else NOT_REPLAYED

    def _run_checked(self, *args: Any) -> Any:
        """Check the operands and replay; NOT_REPLAYED for operands of another kind."""
        if not self.fits(args):
            return NOT_REPLAYED
        out = self(self.tensors_of(args))
        if self.writes and out is not NOT_REPLAYED:
            bump_versions([args[k] for k in self.writes])
        return out

    def _launch(self, tensors: Sequence[Tensor]) -> None:
        """Launch through Triton, and generate a function that does without it where every launch can be bound."""
        launchers = []
        programs = self.programs or []
        for kernel, grid, args, options in programs:
            launch_args = [_argument(a, tensors) for a in args]
            launchers.append(launch_and_bind(kernel, grid, launch_args, options))
        bound = [launcher for launcher in launchers if launcher is not None]
        self.launchable = 0 < len(bound) == len(launchers)
        if self.launchable and self.call == self._run_checked:
            self.call = self._generate_call(programs, bound, tensors)

    def _generate_call(
        self, programs: Sequence[Launch], launchers: Sequence[Launcher], tensors: Sequence[Tensor]
    ) -> Callable[..., Any]:
        """Generate a function that checks, allocates and launches, without loops over operands, which would take
        several times as long as the launches.
        """
        self.launchers = launchers
        self.launch_code = [
            _program(*bound, tensors) for bound in zip(launchers, programs, strict=True)
        ]
        params = [f"a{k}" for k in range(self.count)]
        tensors_of = self.tensors_of(params)
        namespace: dict[str, Any] = {
            **{"check": self.check, "slow": self._run_checked, "view": _view},
            **{"hooks": launchers[0].hooks, "stream_of": launchers[0].stream_of},
            **{"index": self.index, "current_device": torch_private.current_device},
            **{"empty": self.empty, "outputs": self.outputs, "NOT_REPLAYED": NOT_REPLAYED},
            "device": torch.cuda.device,
        }
        all_params = ", ".join(params)
        address_bits = " | ".join(f"p{k}" for k in range(len(tensors_of)))
        # None first: comparing a tensor that is given in its place with a scalar is slow
        given = zip(self.rest_of(params), self.scalars, strict=True)
        scalars = sorted(given, key=lambda parameter: parameter[1] is not None)
        scalar_checks = [
            f" and {name} " + ("is None" if v is None else f"== {bind_constant(v, namespace)}")
            for name, v in scalars
        ]
        lines = [
            f"def replay({all_params}):",
            f" if not (check({', '.join(tensors_of)}){''.join(scalar_checks)}): return NOT_REPLAYED",
            *[f" p{k} = {name}.data_ptr()" for k, name in enumerate(tensors_of)],
            f" if ({address_bits}) % {ALIGNED}: return NOT_REPLAYED",
            f" if hooks.launch_enter_hook.calls: return slow({all_params})",
            " if index != current_device():",
            f"  with device(index): return replay({all_params})",
            " stream = stream_of(index)",
        ]
        made = range(len(tensors_of), len(tensors))
        for number, allocation in zip(made, self.allocations, strict=True):
            lines += allocation.lines(number, namespace)
        lines += self.launch_lines([f"p{k}" for k in range(len(tensors))], namespace)
        outputs = [f"t{k}" for k in made]
        if self.writes:
            namespace["bump_versions"] = bump_versions
            lines.append(f" bump_versions([{', '.join([params[k] for k in self.writes])}])")
        if self.outputs is not None:
            all_allocated = ", ".join(outputs)
            outputs = [
                f"view([{all_allocated}], outputs[{k}])" if slot is None else outputs[slot]
                for k, slot in enumerate(self.output_slots)
            ]
        if self.returns_value:
            lines.append(f" return {', '.join(outputs)}{',' * self.returns_tuple}")
        exec("\n".join(lines), namespace)
        generated: Callable[..., Any] = namespace.pop("replay")  # it has the namespace: no cycle
        return generated

    @property
    def output_slots(self) -> list[int | None]:
        """The allocation that each output is, None for a view of one."""
        if self.outputs is None:
            return [*range(len(self.allocations))]
        return [
            place.slot if place == (place.slot, 0, *self.allocations[place.slot][:2]) else None
            for place in self.outputs
        ]

    def launch_lines(self, addresses: Sequence[str], namespace: dict[str, Any]) -> list[str]:
        """Generate lines that launch.   addresses: expressions, of the operands and then of the allocations"""
        return [program.line(addresses, namespace) for program in self.launch_code]


def _program(launcher: Launcher, recorded: Launch, tensors: Sequence[Tensor]) -> Program:
    """A recorded launch with its operands as numbers, places and tensor maps, on the current stream."""
    operands: list[Any] = [*(*recorded.grid, 1, 1)[:3], STREAM, *launcher.head]
    number = 0
    for value in (*recorded.args, *launcher.constants):
        if type(value) is DescriptorOperand:
            t = tensors[value.place.slot]
            maps = TensorMapCache(launcher, number, value, t.dtype)
            operands += [maps, *maps.encode(t.data_ptr())[1:]]
            number += 1
        else:
            operands.append(value)
    return Program(launcher.raw, operands)


def bind_constant(value: Any, namespace: dict[str, Any]) -> str:
    """Bind a value to a new name in the namespace of generated code.   -> the name"""
    name = f"c{len(namespace)}"
    namespace[name] = value
    return name


class _RehearsalMode(torch_private.DispatchMode):
    """A `_RehearsalMode` identifies tensors by their storage, and lets a launcher only allocate and take views."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.operands = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors
        ]
        self.allocations: list[Allocation] = []
        self.alive = [t.untyped_storage() for t in self.operands]
        self.slots = {torch_private.storage_id(t): k for k, t in enumerate(self.operands)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ALLOCATES:
            self.alive.append(out.untyped_storage())
            self.slots[torch_private.storage_id(out)] = len(self.slots)
            kind = tuple(out.shape), out.stride(), out.dtype
            self.allocations.append(Allocation(*kind, zeroed="zeros" in name))
        elif not (func.is_view or name == "_unsafe_view"):
            raise ReplayError(f"it calls {name}")
        return out

    def place(self, t: Any) -> OperandPlace:
        slot = self.slots.get(torch_private.storage_id(t))
        if slot is None:
            raise ReplayError("a tensor is none of its operands and allocations")
        return OperandPlace(slot, t.storage_offset(), tuple(t.shape), t.stride())

    def operand(self, value: Any) -> Any:
        """An operand of a launch as a place at the start of a slot, a descriptor of one, or a number."""
        if isinstance(value, Tensor):
            place = self.place(value)
            if place.offset:
                raise ReplayError("a launch begins in the middle of a tensor")
            return place
        if hasattr(value, "block_shape"):
            base = value.base if isinstance(value.base, Tensor) else value.base.rehearsed
            return DescriptorOperand(self.operand(base), value)
        if type(value) not in (int, float):
            raise ReplayError(f"a launch takes a {type(value).__name__}")
        return value


def _output_layout(
    allocations: Sequence[Allocation], outputs: Sequence[OperandPlace], operands: int
) -> tuple[list[Allocation], list[OperandPlace] | None]:
    """(allocations, in the shape in which they are returned where that is possible, places of the outputs in them).

    The places are None where the outputs are the allocations in order.
    """
    layout = list(allocations)
    output_places = []
    for place in outputs:
        if place.slot < operands:
            raise ReplayError("an operand is returned")
        output_places.append(place._replace(slot=place.slot - operands))
    for slot, _, shape, strides in output_places:
        covers_slot = torch.Size(shape).numel() == torch.Size(layout[slot].shape).numel()
        if (
            covers_slot
            and _contiguous(shape) == strides
            and [p.slot for p in output_places].count(slot) == 1
        ):
            layout[slot] = layout[slot]._replace(shape=shape, strides=strides)
    allocation_places = [OperandPlace(k, 0, a.shape, a.strides) for k, a in enumerate(layout)]
    return layout, None if output_places == allocation_places else output_places


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _view(tensors: Sequence[Tensor], place: OperandPlace) -> Tensor:
    t = tensors[place.slot]
    if t.shape == place.shape and t.stride() == place.strides:
        return t
    return torch.as_strided(t, place.shape, place.strides, t.storage_offset() + place.offset)


def _argument(value: Any, tensors: Sequence[Tensor]) -> Any:
    """A recorded operand of a launch over these tensors."""
    if type(value) is OperandPlace:
        return _view(tensors, value)
    return value.rebased(_view(tensors, value.place)) if type(value) is DescriptorOperand else value


def _getter(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that returns the tuple of the values at these places."""
    if len(places) > 1:
        return itemgetter(*places)
    if places:
        (place,) = places
        return lambda values: (values[place],)
    return lambda values: ()


def _tensors_in(values: Sequence[Any]) -> bool:
    return any(isinstance(value, Tensor) for value in values)


class Replays(dict[tuple[Any, ...], list[Replay]]):
    """`Replays` are lists by op, number of operands, shape and dtype of the first one, the latest first; empty after
    the first call.

    under: the replays made under an override, by override
    decisions: (check of tensors, decision) by function and facts
    """

    def __init__(self) -> None:
        super().__init__()
        self.under: dict[Any, Replays] = {}
        self.decisions: dict[tuple[Any, ...], list[tuple[Callable[..., bool], Any]]] = {}

    def find(self, op: Any, args: tuple[Any, ...]) -> Replay | None:
        """The replay of an op for these operands."""
        replays = self.get((op, len(args), args[0].shape, args[0].dtype), ())
        return next((replay for replay in replays if replay.fits(args)), None)

    def run(self, op: Any, args: tuple[Any, ...]) -> Any:
        """Replay the op.   -> its outputs, or NOT_REPLAYED"""
        first = args[0]
        for replay in self.get((op, len(args), first.shape, first.dtype), ()):
            out = replay.call(*args)
            if out is not NOT_REPLAYED:
                return out
        return NOT_REPLAYED

    def record(self, op: Any, args: tuple[Any, ...]) -> None:
        """Note that an op has launched with these operands: from the second time on, make a replay."""
        if any(type(value) in (list, tuple) and _tensors_in(value) for value in args):
            return
        key = op, len(args), args[0].shape, args[0].dtype
        replays = self.get(key)
        if replays is None:
            if len(self) >= MAX_SHAPES:
                self.clear()
            self[key] = []
        elif not any(replay.fits(args) for replay in replays):
            replays.insert(0, Replay(op.launcher, args, op.announced))
            del replays[MAX_KINDS:]

    def cache_decision(self, key: tuple[Any, ...], tensors: list[Tensor], decision: Any) -> None:
        """Cache a decision for tensors of these kinds."""
        if len(self.decisions) >= MAX_SHAPES:
            self.decisions.clear()
        entry = torch_private.tensor_guard(tensors), decision
        self.decisions[key] = [entry, *self.decisions.get(key, ())][:MAX_KINDS]


class _ActiveReplays:
    current = Replays()


active_replays = _ActiveReplays()


def separate_replays(under: Any = None) -> AbstractContextManager[None]:
    """Inside, other replays are used: those of the override `under`, or new ones."""
    overrides = active_replays.current.under
    inner = Replays() if under is None else overrides.setdefault(under, Replays())
    return attributes_set([(active_replays, "current", inner)])


@contextmanager
def recording(arch: int) -> Iterator[LaunchRecorder]:
    """Inside, launches of this thread are recorded and not run, as if on a GPU of the given architecture."""
    recorder = LaunchRecorder(arch)
    with attributes_set([(thread, "recorder", recorder)]), separate_replays():
        yield recorder


def forget_replays() -> None:
    """Drop all replays and decisions, after a setting that they depend on has changed."""
    active_replays.current = Replays()
