"""A transcript records the calls of a function of tensors, and becomes generated code that repeats them.

The function is Python that chooses kernels, their order and views by the kinds of its operands (shapes, strides,
dtypes), so for operands of the same kinds it does the same every time. One real call of it is recorded; from then on
the generated function repeats the recorded allocations, launches and ATen calls, and none of the Python runs. Kernel
ops are inlined from their replays (`replay`), and no tensor is made of memory that only launches use: what is small
lies in one scratch tensor of the call, where each place is used again once it was read for the last time.

A function cannot be transcribed that reads values, draws random numbers, writes to a tensor that others may hold but
for its state, or uses a tensor that is not its operand. Calls that depend on more than kinds of operands are repeated
as a whole: a launcher that calls `not_replayable`, a twin that reads values, and functions in `registry.opaque_call`.
Answers of `registry.held_once` are checked first, and have to be the same.
"""

from __future__ import annotations

import bisect
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.attributes import attributes_set
from fuseops.kernels.launch import thread
from fuseops.kernels.registry import KernelOp
from fuseops.kernels.replay import ALIGNED, Allocation, Replay, active_replays, bind_constant
from fuseops.plain import PLAIN

R = TypeVar("R")
Shared = dict[str, dict[str, Any]]
Repeat = Callable[..., Any]
A = torch.ops.aten
DIRECT: dict[Any, Callable[..., Any]] = {
    A.mm.default: torch.mm,
    A.addmm.default: torch.addmm,
    A.add.Tensor: torch.add,
    A.t.default: Tensor.t,
    A.transpose.int: Tensor.transpose,
    A.view.default: Tensor.view,
    A.unsqueeze.default: Tensor.unsqueeze,
}
"""Functions that call an op in half the time of its overload."""
PRODUCTS = A.mm.default, A.addmm.default
MASKS = torch.bool, torch.uint8
SCRATCH_MOST = 1 << 20  # larger memory is allocated, and freed, by itself
SCRATCH_ALIGNED = 512  # as what torch allocates
TRANSCRIPT_FILE = "<fuseops transcript>"  # the file name of generated functions in tracebacks
REFUSED = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
)


class TensorRef(NamedTuple):
    """A `TensorRef` stands for a tensor in a transcript: the number of its slot."""

    number: int


class SharedRef(NamedTuple):
    """A `SharedRef` stands for a dict that lives for one call."""

    name: str


class Memory(NamedTuple):
    """A `Memory` is the address of a tensor: the slot of an operand or result, the root, and an offset in bytes."""

    root: int
    offset: int


class RecordedCall(NamedTuple):
    """A `RecordedCall` is one call of a transcript.

    target       an op of ATen, the replay of a kernel op, or a function
    has_effects  it may do more than return results, so it is never dead
    is_view      it only returns views
    within       the step that the function was at, for errors
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]
    returns_tuple: bool
    has_effects: bool
    is_view: bool
    within: Any


class Allocated(NamedTuple):
    """An `Allocated` is memory that the replay of a step allocates, from that step to its last use."""

    number: int
    memory: Allocation
    at: int
    last: int


class Transcriber(torch_private.DispatchMode):
    """A `Transcriber` records the calls that a function makes while it runs.

    shared        dicts that live for one call, by name
    running_step  returns the step that the function is at: the variable `step` of the generated code, for errors
    why           the reason why the function cannot be transcribed
    never         for calls of this kind it will not change
    not_ready     a launcher has no replay yet
    """

    def __init__(
        self,
        operands: Sequence[Tensor],
        shared: Shared | None = None,
        running_step: Callable[[], Any] = lambda: None,
    ) -> None:
        super().__init__()
        self.running_step = running_step
        self.shared: Shared = {} if shared is None else shared
        self.slots: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by the identity of a tensor
        self.memory: list[Memory] = []  # by slot
        self.addresses: list[int] = []  # the address of each
        self.steps: list[RecordedCall] = []
        self.kept: dict[int, Tensor] = {}  # by slot: tensors that are cached for this stream
        self.once: dict[int, bool] = {}  # by slot: the answer of `held_once` about an operand
        self.why: str | None = None
        self.never = self.not_ready = False
        self.index = operands[0].get_device()
        self.stream = torch_private.current_stream(self.index)[0] if self.index >= 0 else 0
        distinct = [*{id(t): t for t in operands}.values()]
        for t in distinct:
            self._add_slot(t)
        self.given = [self.slots[id(t)][1] for t in operands]  # the slot of each operand
        self.operands, self.check = len(distinct), torch_private.tensor_guard(distinct)
        self.external = {*range(self.operands)}  # slots of tensors that others may hold

    # --- recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.why or self.not_ready:
            return out
        results = out if isinstance(out, (tuple, list)) else (out,)
        if _reads_values(func, args) or func.namespace != "aten" or func._schema.is_mutable:
            self.why, self.never = f"it calls {func}", True
        elif not all(isinstance(t, Tensor) for t in results):
            # ops without tensor arguments ask about dtypes, not values
            if next(_tensors_in((*args, *kwargs.values())), None) is not None:
                self.why = f"{func} gives no tensor"
        else:
            self._record(func, args, kwargs, out)
        return out

    def call_kernel(self, op: KernelOp[..., Any], args: tuple[Any, ...]) -> Any:
        """Call and record a kernel op for the function."""
        if any(map(self._is_external, op.written_tensors(args))):
            self.why = self.why or f"{op.name} writes into what others may hold"
        why = op.obstacle(args, {})
        launches = why is None
        if not launches and op.traces_twin:
            if why:
                op.tell(why)
            return op.twin(*args)  # plain torch, whose calls are recorded
        with self._unwatched():
            replay = active_replays.current.find(op, args) if launches else None
            out = op(*args)
        if launches and (
            replay is None or (replay.launchable and not replay.launch_code and replay.programs)
        ):
            self.not_ready = True
        self._record(replay or op, args, {}, out, has_effects=True)
        return out

    def opaque_call(
        self,
        function: Callable[..., R],
        args: tuple[Any, ...],
        tensors_of: Callable[[R], Any] | None = None,
        is_state: bool = False,
    ) -> R:
        """Call and record a function as a whole; a second call that returns known tensors is not recorded.

        tensors_of: gives the tensors of its result, by default the result.  is_state: kernels may write to them
        """
        first_new = len(self.memory)
        with self._unwatched():
            result: Any = function(*args)
        out = result
        if tensors_of is not None:
            out, function = tensors_of(result), partial(_composed, tensors_of, function)
        called = function, self._slots(args)
        if any(self._slot(t) is None for t in _tensors_in(out)) or all(
            (step.target, step.args) != called for step in self.steps
        ):
            self._record(function, args, {}, out, has_effects=True)
        if not is_state:
            self.external |= {*range(first_new, len(self.memory))}
        return cast("R", result)

    def held_once(self, held: list[Any]) -> bool:
        """`torch_private.held_once`; of an operand the generated code checks the answer."""
        answer, number = torch_private.held_once(held), self._slot(held[0])
        if number is None:
            self.why = "it asks about a tensor from elsewhere"
        elif number < self.operands:
            self.once[number] = answer
        if answer:
            self.external.discard(number)
        return answer

    def _is_external(self, t: Tensor) -> bool:
        number = self._slot(t)
        return number is None or self.memory[number].root in self.external

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        """Inside, nothing is recorded."""
        with attributes_set([(thread, "replay_mode", True)]), torch_private.without_modes():
            yield

    def keep(self, *tensors: Tensor | None) -> None:
        """Register tensors that the function caches for this stream; their values do not change."""
        for t in tensors:
            if t is not None and self._slot(t) is None:
                number = self._add_slot(t)
                self.kept[number] = t
                self.external.add(number)

    def _record(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        has_effects: bool = False,
    ) -> None:
        if self.why or self.not_ready:
            return
        recorded_args = self._slots(args)
        named = {k: self._slots(value) for k, value in kwargs.items()}
        returns_tuple = isinstance(out, (tuple, list))
        results = [*out] if returns_tuple else [] if out is None else [out]
        sources = [*_tensors_in((*args, *kwargs.values()))]
        if any(t is source for t in results for source in sources):
            self.why = f"{target} gives an operand"
            return
        bases = {torch_private.storage_id(t): t for t in reversed(sources)}
        base_of_result = [
            None if t is None else bases.get(torch_private.storage_id(t)) for t in results
        ]
        result_slots = [
            None if t is None else self._add_slot(t, base)
            for t, base in zip(results, base_of_result, strict=True)
        ]
        is_view = not has_effects and all(base is not None for base in base_of_result)
        flags = returns_tuple, has_effects, is_view
        within = self.running_step()
        self.steps.append(
            RecordedCall(target, recorded_args, named, tuple(result_slots), *flags, within)
        )

    def _add_slot(self, t: Tensor, base: Tensor | None = None) -> int:
        """Add a slot for a new tensor, which may be a view of `base`.   -> its number"""
        number, base_slot = len(self.memory), None if base is None else self._slot(base)
        root = number if base_slot is None else self.memory[base_slot].root
        self.addresses.append(t.data_ptr())
        self.memory.append(Memory(root, t.data_ptr() - self.addresses[root] if t.numel() else 0))
        self.slots[id(t)] = weakref.ref(t), number
        return number

    def _slot(self, t: Tensor) -> int | None:
        entry = self.slots.get(id(t))
        return entry[1] if entry is not None and entry[0]() is t else None

    def _slots(self, value: Any) -> Any:
        """The same with a TensorRef in place of every tensor, and a SharedRef of every shared dict."""
        if isinstance(value, Tensor):
            number = self._slot(value)
            if number is None:
                self.why = self.why or "a tensor comes from elsewhere"
            return TensorRef(number or 0)
        if type(value) is dict:
            for name, shared in self.shared.items():
                if value is shared:
                    return SharedRef(name)
            self.why = self.why or "a dict comes from elsewhere"
        return type(value)(map(self._slots, value)) if type(value) in (tuple, list) else value

    # --- generated code

    def generate(self, out: Any) -> Repeat | None:
        """Generate the function that repeats the recorded calls; None where that is not possible.

        It takes the operands in a list, which it empties, and the shared dicts, and returns what the call returned. For
        operands of another kind it returns None and leaves the list.   out: the result of the recorded call
        """
        result = self._slots(out)
        if self.why or self.not_ready:
            return None
        return _CodeGenerator(self, result).generate()


class _CodeGenerator:
    """A `_CodeGenerator` generates the function of a transcript: `t0` is the tensor of slot 0, `p0` its address."""

    def __init__(self, transcriber: Transcriber, result: Any) -> None:
        self.transcriber, self.result = transcriber, result
        self.namespace: dict[str, Any] = {
            "check": transcriber.check,
            "held_once": torch_private.held_once,
        }
        self.names = len(transcriber.memory)  # later numbers are temporaries of replays
        self.objects = {slot.number for slot in _slots_in(result)}  # slots that need a tensor
        self.addressed: set[int] = set()  # roots of the memory of launches
        self.steps: list[RecordedCall] = []
        for step in reversed(transcriber.steps):
            if self._is_dead(step):
                continue
            slots = {slot.number for slot in _slots_in((step.args, step.kwargs))}
            if _is_inlined(step):
                self.addressed |= {transcriber.memory[number].root for number in slots}
            else:
                self.objects |= slots
            self.steps.insert(0, step)
        self._fuse_transposes()
        self.last_uses = self._last_uses()
        self.allocated = [self._allocated(at, step) for at, step in enumerate(self.steps)]
        self._place_scratch()

    def _fuse_transposes(self) -> None:
        """Fuse a transpose and the one product that reads it into `linear`, which calls the same kernel."""
        uses: Counter[int | None] = Counter(
            slot.number
            for value in (self.result, *[(step.args, step.kwargs) for step in self.steps])
            for slot in _slots_in(value)
        )
        transposes: dict[Any, RecordedCall] = {
            step.results[0]: step
            for step in self.steps
            if step.target is A.t.default and uses[step.results[0]] == 1
        }
        fused: list[RecordedCall] = []
        for step in self.steps:
            second_factor = step.args[-1] if step.target in PRODUCTS and not step.kwargs else None
            transpose = (
                transposes.get(second_factor.number) if type(second_factor) is TensorRef else None
            )
            if transpose is not None:
                fused.remove(transpose)
                *bias, x, _ = step.args
                linear_args = x, *transpose.args, *bias
                step = step._replace(target=torch.nn.functional.linear, args=linear_args)
            fused.append(step)
        self.steps = fused

    def _is_dead(self, step: RecordedCall) -> bool:
        """Whether nothing reads the results of an op of torch, as of a view that is read by its address."""
        needed = self.objects if step.is_view else self.objects | self.addressed
        return not step.has_effects and needed.isdisjoint(step.results)

    def generate(self) -> Repeat | None:
        transcriber = self.transcriber
        if any(
            transcriber.memory[s.number].offset % ALIGNED
            for s in _slots_in([s.args for s in self.steps if _is_inlined(s)])
        ):
            return None
        first_position = [transcriber.given.index(k) for k in range(transcriber.operands)]
        guards = [
            f"given[{at}] is given[{first_position[k]}]"
            for at, k in enumerate(transcriber.given)
            if first_position[k] < at
        ]
        guards.append(
            f"check({', '.join(f'given[{at}]' for at in first_position)})"
            if guards
            else "check(*given)"
        )
        guards += [
            f"held_once(given, {first_position[k]}) is {once}"
            for k, once in transcriber.once.items()
        ]
        lines = [
            "def repeat(given, shared=None):",
            f" if not ({' and '.join(guards)}): return None",
        ]
        lines += [f" {', '.join(f't{k}' for k in transcriber.given)}, = given"]
        lines += [*self._guard_lines(), " given.clear()"]
        current_step = None
        lines += [*self._free_lines(-1), *self._scratch_lines()]
        for at, step in enumerate(self.steps):
            if step.within is not current_step:
                current_step = step.within
                lines.append(f" step = {bind_constant(current_step, self.namespace)}")
            lines += self._launch_lines(at, step) if _is_inlined(step) else self._call_lines(step)
            lines += self._free_lines(at)
        lines.append(f" return {self._text(self.result)}")
        exec(compile("\n".join(lines), TRANSCRIPT_FILE, "exec"), self.namespace)
        generated: Repeat = self.namespace.pop("repeat")  # it has the namespace: no cycle
        return generated

    def _guard_lines(self) -> list[str]:
        """Lines that take the addresses of operands, and return None where launches are not possible."""
        transcriber = self.transcriber
        operands = sorted(self.addressed & {*range(transcriber.operands)})
        for number, t in transcriber.kept.items():
            self.namespace |= {f"t{number}": t, f"p{number}": t.data_ptr()}
        launches = [step.target for step in self.steps if _is_inlined(step)]
        lines = [f" p{k} = t{k}.data_ptr()" for k in operands]
        if operands:
            lines.append(f" if ({' | '.join(f'p{k}' for k in operands)}) % {ALIGNED}: return None")
        if launches:
            launcher = launches[0].launchers[0]
            self.namespace |= {
                "hooks": launcher.hooks,
                "stream_of": launcher.stream_of,
                "index": transcriber.index,
                "current_device": torch_private.current_device,
                "empty": launches[0].empty,
            }
            lines.append(
                " if hooks.launch_enter_hook.calls or index != current_device(): return None"
            )
            lines.append(" stream = stream_of(index)")
        if transcriber.kept and transcriber.index >= 0:
            stream = bind_constant(transcriber.stream, self.namespace)
            self.namespace["now"] = torch_private.current_stream
            lines.append(f" if now({transcriber.index})[0] != {stream}: return None")
        return lines

    def _call_lines(self, step: RecordedCall) -> list[str]:
        """Lines that call the target of a step."""
        target = (
            step.target.launcher
            if isinstance(step.target, Replay)
            else DIRECT.get(step.target, step.target)
        )
        arguments = [self._text(value) for value in step.args]
        arguments += [f"{name}={self._text(value)}" for name, value in step.kwargs.items()]
        call = f"{bind_constant(target, self.namespace)}({', '.join(arguments)})"
        if not step.results:
            return [f" {call}"]
        names = ", ".join("_" if r is None else f"t{r}" for r in step.results)
        lines = [f" {names}{',' * step.returns_tuple} = {call}"]
        return lines + [f" p{r} = t{r}.data_ptr()" for r in step.results if r in self.addressed]

    def _launch_lines(self, at: int, step: RecordedCall) -> list[str]:
        """Lines that inline the allocations and launches of a step's replay."""
        lines: list[str] = []
        for number, memory, _, _ in self.allocated[at]:
            if number not in self.places:
                lines += memory.lines(number, self.namespace)
        addresses = [self._address(slot) for slot in step.target.tensors_of(step.args)]
        addresses += [f"p{each.number}" for each in self.allocated[at]]
        return lines + step.target.launch_lines(addresses, self.namespace)

    def _allocated(self, at: int, step: RecordedCall) -> list[Allocated]:
        """What the replay of a step allocates: results, and temporaries, which get numbers of their own."""
        if not _is_inlined(step):
            return []
        replay: Replay = step.target
        results = dict(zip(replay.output_slots, step.results, strict=True))
        found = []
        for k, memory in enumerate(replay.allocations):
            number = results.get(k)
            if number is None:
                number, self.names = self.names, self.names + 1
                self.last_uses[number] = at
            found.append(Allocated(number, memory, at, self.last_uses.get(number, len(self.steps))))
        return found

    def _place_scratch(self) -> None:
        """Give what needs no tensor and is small, or empty, a place in the scratch tensors of the call: in one that is
        zeroed at its begin, or in one whose places are used again.
        """
        small = [
            each
            for each in itertools.chain(*self.allocated)
            if each.number not in self.objects and each.memory.nbytes <= SCRATCH_MOST
        ]
        zeroed = [each._replace(last=len(self.steps)) for each in small if each.memory.zeroed]
        reused = [each for each in small if not each.memory.zeroed]
        self.places: dict[int, str] = {}  # addresses, by number
        self.scratch: list[tuple[str, int, bool]] = []  # (name, bytes, whether zeroed)
        for name, memory in (("zeroed", zeroed), ("scratch", reused)):
            places, nbytes = _in_gaps(memory)
            self.places |= {number: f"{name} + {at}" for number, at in places.items()}
            if places:
                self.scratch.append((name, nbytes, name == "zeroed"))

    def _scratch_lines(self) -> list[str]:
        """Lines that allocate the scratch tensors, and name the addresses in them."""
        lines: list[str] = []
        for name, nbytes, zeroed in self.scratch:
            memory = Allocation((nbytes,), (1,), torch.uint8, zeroed)
            number, self.names = self.names, self.names + 1
            lines += [*memory.lines(number, self.namespace), f" {name} = p{number}"]
        return lines + [f" p{number} = {address}" for number, address in self.places.items()]

    def _address(self, slot: TensorRef) -> str:
        root, offset = self.transcriber.memory[slot.number]
        return f"p{root} + {offset}" if offset else f"p{root}"

    def _last_uses(self) -> dict[int, int]:
        """The last step that needs a tensor, by slot; -1 for none."""
        memory = self.transcriber.memory
        last_uses = dict.fromkeys(range(self.transcriber.operands), -1)
        for at, step in enumerate(self.steps):
            used = [slot.number for slot in _slots_in((step.args, step.kwargs))]
            if _is_inlined(step):
                used = [memory[number].root for number in used]
            last_uses |= dict.fromkeys([*used, *[r for r in step.results if r is not None]], at)
        never_freed = {
            slot.number for slot in _slots_in(self.result)
        } | self.transcriber.kept.keys()
        return {number: at for number, at in last_uses.items() if number not in never_freed}

    def _free_lines(self, at: int) -> list[str]:
        freed = [n for n, last in self.last_uses.items() if last == at and n not in self.places]
        names = [f"t{number}" for number in freed]
        return [f" {' = '.join(names)} = None"] if names else []

    def _text(self, value: Any) -> str:
        """The expression of a value in the generated code."""
        if type(value) is TensorRef:
            return f"t{value.number}"
        if type(value) is SharedRef:
            return f"shared.setdefault({value.name!r}, {{}})"
        if type(value) in (tuple, list) and any(_slots_in(value)):
            items = "".join(f"{self._text(item)}, " for item in value)
            return f"({items})" if type(value) is tuple else f"[{items}]"
        return "None" if value is None else bind_constant(value, self.namespace)


def _in_gaps(memory: Iterable[Allocated]) -> tuple[dict[int, int], int]:
    """Give each the first gap among what lives at the same time.   -> the offsets, by number, and the bytes of all"""
    places: dict[int, int] = {}
    living: list[tuple[int, int, int]] = []  # (begin, end, last use), by begin
    most = 0
    for number, allocation, at, last in memory:
        begin, room = 0, -(-allocation.nbytes // SCRATCH_ALIGNED) * SCRATCH_ALIGNED
        living = [place for place in living if place[2] >= at]
        for other_begin, other_end, _ in living:
            if begin + room <= other_begin:
                break
            begin = other_end
        places[number] = begin
        if room:
            bisect.insort(living, (begin, begin + room, last))
        most = max(most, begin + room)
    return places, most


def _reads_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an op draws random numbers, or its result or shape depends on values; of an index, whether by a mask."""
    if func is A.index.Tensor:
        return any(index.dtype in MASKS for index in args[1] if index is not None)
    return any(tag in func.tags for tag in REFUSED)


def _is_inlined(step: RecordedCall) -> bool:
    """Whether a step is a replay whose launches can be inlined."""
    replay = step.target
    return (
        isinstance(replay, Replay) and bool(replay.launch_code) and None not in replay.output_slots
    )


def _slots_in(value: Any) -> Iterator[TensorRef]:
    if type(value) is TensorRef:
        yield value
    elif type(value) in (tuple, list, dict):
        for item in value.values() if type(value) is dict else value:
            yield from _slots_in(item)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (tuple, list):
        for item in value:
            yield from _tensors_in(item)


def _composed(outer: Callable[[Any], R], inner: Callable[..., Any], *args: Any) -> R:
    return outer(inner(*args))


def transcribable(operands: Sequence[Tensor]) -> bool:
    """Whether these are plain strided tensors, which have addresses."""
    return all(
        type(t) in PLAIN and t.layout is torch.strided and not torch_private.is_batched(t)
        for t in operands
    )


@contextmanager
def transcribing(
    operands: Sequence[Tensor],
    shared: Shared | None = None,
    running_step: Callable[[], Any] = lambda: None,
) -> Iterator[Transcriber]:
    """Inside, the calls of a function of these tensors are recorded. Nothing else may have to observe them."""
    transcriber = Transcriber(operands, shared, running_step)
    with attributes_set([(thread, "replay_mode", transcriber)]), transcriber:
        yield transcriber
