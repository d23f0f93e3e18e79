"""What a function of tensors did is written down, and done again for operands alike: allocations, launches, products.

The function is Python that decides by what its operands are: which kernels, in which order, over which views. Of
operands alike it decides the same every time. So one call of it is watched, a real one, and from then on a written
function does what that call did, and none of its Python runs. Ops of ATen are called again, launches of kernel ops
stand there as their replays have them (`replay`), and what is only looked at by address is no tensor.

A function that reads values, draws random numbers, writes into a tensor that others may hold, or takes a tensor from
elsewhere cannot be written down. What depends on more than kinds of operands is called again: a launcher that says so
by `depends`, a twin that reads values, and what goes through `registry.called_again`. `registry.held_once` is asked
again before anything is done, and has to say the same.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.kernels.registry import PLAIN, KernelOp, thread
from fuseops.kernels.replay import ALIGNED, Replay, constant, replaying

R = TypeVar("R")
Shared = dict[str, dict[str, Any]]
Again = Callable[..., Any]
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
"""What calls an op in half the time that its overload takes."""
PRODUCTS = A.mm.default, A.addmm.default
MASKS = torch.bool, torch.uint8
AGAIN = "<fuseops transcript>"  # where written functions stand
REFUSED = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
)


class TensorRef(NamedTuple):
    """A `TensorRef` stands for a tensor in what is written down."""

    number: int


class SharedRef(NamedTuple):
    """A `SharedRef` stands for a dict of what lives for one call."""

    name: str


class Memory(NamedTuple):
    """A `Memory` says where a tensor begins: in the memory of which operand or result, and how many bytes behind it."""

    root: int
    offset: int


class NotedCall(NamedTuple):
    """A `NotedCall` is one call in what is written down.

    does: an op of ATen, the replay of a kernel op, or a function.  stays: it may do more than give results.  looks: it
    gives a view, and does nothing.  within: the step that the function was at
    """

    does: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]
    several: bool
    stays: bool
    looks: bool
    within: Any


class Transcriber(torch_private.DispatchMode):
    """A `Transcriber` watches a call of a function, which runs as ever, and writes down what it does.

    shared: dicts of what lives for one call, by name.  running_step: gives the step that the function is at, which is
    the variable `step` of what is written, for errors.  why: what stands against writing it down.  early: a launcher
    has no replay yet
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
        self.begins: list[int] = []  # the address of each
        self.steps: list[NotedCall] = []
        self.kept: dict[int, Tensor] = {}  # by slot: what is kept for one stream
        self.once: dict[int, bool] = {}  # by slot: whether an operand is held once
        self.why: str | None = None
        self.early = False
        self.index = operands[0].get_device()
        self.stream = torch_private.current_stream(self.index)[0] if self.index >= 0 else 0
        distinct = [*{id(t): t for t in operands}.values()]
        for t in distinct:
            self._put(t)
        self.given = [self.slots[id(t)][1] for t in operands]  # the slot of each operand
        self.operands, self.check = len(distinct), torch_private.tensor_guard(distinct)
        self.lent = {*range(self.operands)}  # by slot: what others may hold

    # --- what is seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.why or self.early:
            return out
        results = out if isinstance(out, (tuple, list)) else (out,)
        if _reads_values(func, args) or func.namespace != "aten" or func._schema.is_mutable:
            self.why = f"it calls {func}"
        elif not all(isinstance(t, Tensor) for t in results):
            # a question about dtypes is none about values
            if next(_tensors_in((*args, *kwargs.values())), None) is not None:
                self.why = f"{func} gives no tensor"
        else:
            self._note(func, args, kwargs, out)
        return out

    def called(self, op: KernelOp[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a kernel op for a function that is watched."""
        if any(map(self._is_lent, op.written_to(args))):
            self.why = self.why or f"{op.name} writes into what others may hold"
        launches = op.launches(args, {})
        if not launches and op.traces_twin:
            return op.twin(*args)  # plain torch, whose calls are seen
        with self._apart():  # what it calls is its own
            replay = replaying.now.of(op, args) if launches else None
            out = op(*args)
        if launches and (
            replay is None or (replay.launchable and not replay.written and replay.programs)
        ):
            self.early = True
        self._note(replay or op, args, {}, out, stays=True)
        return out

    def called_again(self, function: Callable[..., R], args: tuple[Any, ...]) -> R:
        """Call a function that written functions call, too: once for operands of which it gives the same."""
        known = len(self.memory)
        with self._apart():
            out = function(*args)
        if any(self._slot(t) is None for t in _tensors_in(out)) or not self._has_called(
            function, args
        ):
            self._note(function, args, {}, out, stays=True)
        self.lent |= {*range(known, len(self.memory))}
        return out

    def _has_called(self, function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        given = self._slots(args)
        return any(step.does is function and step.args == given for step in self.steps)

    def held_once(self, held: list[Any]) -> bool:
        """The answer of `torch_private.held_once`, which is one about operands, or follows from what is written."""
        answer, number = torch_private.held_once(held), self._slot(held[0])
        if number is None:
            self.why = "it asks about a tensor from elsewhere"
        elif number < self.operands:
            self.once[number] = answer
        if answer:
            self.lent.discard(number)
        return answer

    def _is_lent(self, t: Tensor) -> bool:
        number = self._slot(t)
        return number is None or self.memory[number].root in self.lent

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Inside, nothing is watched."""
        thread.unseen = True
        try:
            with torch_private.without_modes():
                yield
        finally:
            thread.unseen = self

    def keep(self, *tensors: Tensor | None) -> None:
        """Take tensors for known that the function finds kept for it on this stream; their values do not change."""
        for t in tensors:
            if t is not None and self._slot(t) is None:
                number = self._put(t)
                self.kept[number] = t
                self.lent.add(number)

    def _note(
        self,
        does: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        stays: bool = False,
    ) -> None:
        if self.why or self.early:
            return
        given, named = self._slots(args), {k: self._slots(value) for k, value in kwargs.items()}
        several = isinstance(out, (tuple, list))
        results = [*out] if several else [] if out is None else [out]
        sources = [*_tensors_in((*args, *kwargs.values()))]
        if any(t is source for t in results for source in sources):
            self.why = f"{does} gives an operand"
            return
        bases = {torch_private.storage_id(t): t for t in reversed(sources)}
        found = [None if t is None else bases.get(torch_private.storage_id(t)) for t in results]
        numbers = [
            None if t is None else self._put(t, base)
            for t, base in zip(results, found, strict=True)
        ]
        looks = not stays and all(base is not None for base in found)
        within = self.running_step()
        self.steps.append(
            NotedCall(does, given, named, tuple(numbers), several, stays, looks, within)
        )

    def _put(self, t: Tensor, base: Tensor | None = None) -> int:
        """The slot of a new tensor, which may lie in the memory of another one."""
        number, at = len(self.memory), None if base is None else self._slot(base)
        root = number if at is None else self.memory[at].root
        self.begins.append(t.data_ptr())
        self.memory.append(Memory(root, t.data_ptr() - self.begins[root] if t.numel() else 0))
        self.slots[id(t)] = weakref.ref(t), number
        return number

    def _slot(self, t: Tensor) -> int | None:
        found = self.slots.get(id(t))
        return found[1] if found is not None and found[0]() is t else None

    def _slots(self, value: Any) -> Any:
        """The same with a slot in the place of every tensor, and a name in that of what is shared."""
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

    # --- what is written

    def written(self, out: Any) -> Again | None:
        """A function that does the same again: it takes the operands in a list, which it empties, and what is shared,
        and gives what the call gave: tensors, and what holds them. None, and the list as it is, for operands of another
        kind.

        None where it cannot be written.
        """
        result = self._slots(out)
        if self.why or self.early:
            return None
        return _Writer(self, result).written()


class _Writer:
    """A `_Writer` writes the function of a transcript: `t0` is the tensor of slot 0, and `p0` where it begins."""

    def __init__(self, seen: Transcriber, result: Any) -> None:
        self.seen, self.result = seen, result
        self.known: dict[str, Any] = {"check": seen.check, "held_once": torch_private.held_once}
        self.names = len(seen.memory)  # further ones are of memory that replays take for themselves
        # those of which there are tensors
        self.objects = {slot.number for slot in _slots_in(result)}
        self.addressed: set[int] = set()  # roots of what launches read and write
        self.steps: list[NotedCall] = []
        for step in reversed(seen.steps):
            if self._left_out(step):
                continue
            slots = {slot.number for slot in _slots_in((step.args, step.kwargs))}
            if _stands(step):
                self.addressed |= {seen.memory[number].root for number in slots}
            else:
                self.objects |= slots
            self.steps.insert(0, step)
        self._join_transposed()

    def _join_transposed(self) -> None:
        """A product with a matrix that is transposed for it alone is `linear`, which calls the same: one for two."""
        uses: Counter[int | None] = Counter(
            slot.number
            for value in (self.result, *[(step.args, step.kwargs) for step in self.steps])
            for slot in _slots_in(value)
        )
        turned: dict[Any, NotedCall] = {
            step.results[0]: step
            for step in self.steps
            if step.does is A.t.default and uses[step.results[0]] == 1
        }
        joined: list[NotedCall] = []
        for step in self.steps:
            last = step.args[-1] if step.does in PRODUCTS and not step.kwargs else None
            transposed = turned.get(last.number) if type(last) is TensorRef else None
            if transposed is not None:
                joined.remove(transposed)
                *bias, x, _ = step.args
                given = x, *transposed.args, *bias
                step = step._replace(does=torch.nn.functional.linear, args=given)
            joined.append(step)
        self.steps = joined

    def _left_out(self, step: NotedCall) -> bool:
        """Whether nobody needs what an op of torch gives, as a view of what is read by its address."""
        wanted = self.objects if step.looks else self.objects | self.addressed
        return not step.stays and wanted.isdisjoint(step.results)

    def written(self) -> Again | None:
        seen = self.seen
        if any(
            seen.memory[s.number].offset % ALIGNED
            for s in _slots_in([s.args for s in self.steps if _stands(s)])
        ):
            return None
        first = [seen.given.index(k) for k in range(seen.operands)]
        fits = [
            f"given[{at}] is given[{first[k]}]" for at, k in enumerate(seen.given) if first[k] < at
        ]
        fits.append(
            f"check({', '.join(f'given[{at}]' for at in first)})" if fits else "check(*given)"
        )
        fits += [f"held_once(given, {first[k]}) is {once}" for k, once in seen.once.items()]
        lines = ["def again(given, shared=None):", f" if not ({' and '.join(fits)}): return None"]
        lines += [f" {', '.join(f't{k}' for k in seen.given)}, = given"]
        lines += [*self._ready(), " given.clear()"]
        last, running = self._last_uses(), None
        lines += self._let_go(last, -1)
        for at, step in enumerate(self.steps):
            if step.within is not running:
                running = step.within
                lines.append(f" step = {constant(running, self.known)}")
            lines += self._launches(step) if _stands(step) else self._call(step)
            lines += self._let_go(last, at)
        lines.append(f" return {self._text(self.result)}")
        exec(compile("\n".join(lines), AGAIN, "exec"), self.known)
        made: Again = self.known["again"]
        return made

    def _ready(self) -> list[str]:
        """Lines that find the addresses of operands, and look whether launches may follow."""
        seen, operands = self.seen, sorted(self.addressed & {*range(self.seen.operands)})
        for number, t in seen.kept.items():
            self.known |= {f"t{number}": t, f"p{number}": t.data_ptr()}
        launches = [step.does for step in self.steps if _stands(step)]
        lines = [f" p{k} = t{k}.data_ptr()" for k in operands]
        if operands:
            lines.append(f" if ({' | '.join(f'p{k}' for k in operands)}) % {ALIGNED}: return None")
        if launches:
            launcher = launches[0].launchers[0]
            self.known |= {
                "hooks": launcher.hooks,
                "stream_of": launcher.stream_of,
                "index": seen.index,
            }
            self.known |= {
                "current_device": torch_private.current_device,
                "empty": launches[0].empty,
            }
            lines.append(
                " if hooks.launch_enter_hook.calls or index != current_device(): return None"
            )
            lines.append(" stream = stream_of(index)")
        if seen.kept:
            stream = constant(seen.stream, self.known)
            self.known["now"] = torch_private.current_stream
            lines.append(
                f" if now({seen.index})[0] != {stream}: return None" if seen.index >= 0 else ""
            )
        return [line for line in lines if line]

    def _call(self, step: NotedCall) -> list[str]:
        """Lines that call what a step calls."""
        does = (
            step.does.launcher
            if isinstance(step.does, Replay)
            else DIRECT.get(step.does, step.does)
        )
        given = [self._text(value) for value in step.args]
        given += [f"{name}={self._text(value)}" for name, value in step.kwargs.items()]
        called = f"{constant(does, self.known)}({', '.join(given)})"
        if not step.results:
            return [f" {called}"]
        names = ", ".join("_" if r is None else f"t{r}" for r in step.results)
        lines = [f" {names}{',' * step.several} = {called}"]
        return lines + [f" p{r} = t{r}.data_ptr()" for r in step.results if r in self.addressed]

    def _launches(self, step: NotedCall) -> list[str]:
        """Lines that allocate and launch what the replay of a step does."""
        replay: Replay = step.does
        results = dict(zip(replay.made, step.results, strict=True))
        own = {k: self.names + k for k in range(len(replay.allocations)) if k not in results}
        self.names += len(replay.allocations)
        new = [f"t{results.get(k, own.get(k))}" for k in range(len(replay.allocations))]
        given = [self._address(slot) for slot in replay.tensors_of(step.args)]
        lines = replay.lines(given, new, self.known)
        return [*lines, *([f" {' = '.join(new[k] for k in own)} = None"] if own else [])]

    def _address(self, slot: TensorRef) -> str:
        root, offset = self.seen.memory[slot.number]
        return f"p{root} + {offset}" if offset else f"p{root}"

    def _last_uses(self) -> dict[int, int]:
        """The step after which a tensor is needed no more, by slot; -1: none needs it."""
        memory, found = self.seen.memory, dict.fromkeys(range(self.seen.operands), -1)
        for at, step in enumerate(self.steps):
            used = [slot.number for slot in _slots_in((step.args, step.kwargs))]
            if _stands(step):
                used = [memory[number].root for number in used]
            found |= dict.fromkeys([*used, *[r for r in step.results if r is not None]], at)
        stay = {slot.number for slot in _slots_in(self.result)} | self.seen.kept.keys()
        return {number: at for number, at in found.items() if number not in stay}

    def _let_go(self, last: dict[int, int], at: int) -> list[str]:
        names = [f"t{number}" for number, step in last.items() if step == at]
        return [f" {' = '.join(names)} = None"] if names else []

    def _text(self, value: Any) -> str:
        """What is given in the written function in the place of a value."""
        if type(value) is TensorRef:
            return f"t{value.number}"
        if type(value) is SharedRef:
            return f"shared.setdefault({value.name!r}, {{}})"
        if type(value) in (tuple, list) and any(_slots_in(value)):
            items = "".join(f"{self._text(item)}, " for item in value)
            return f"({items})" if type(value) is tuple else f"[{items}]"
        return "None" if value is None else constant(value, self.known)


def _reads_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an op gives what is drawn, a value, or a shape by values: an index does by masks alone."""
    if func is A.index.Tensor:
        return any(index.dtype in MASKS for index in args[1] if index is not None)
    return any(tag in func.tags for tag in REFUSED)


def _stands(step: NotedCall) -> bool:
    """Whether a step is a replay whose launches can stand in another function."""
    replay = step.does
    return isinstance(replay, Replay) and bool(replay.written) and None not in replay.made


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


def transcribable(operands: Sequence[Tensor]) -> bool:
    """Whether these are plain tensors, which have addresses of their own."""
    return all(
        type(t) in PLAIN and t.layout is torch.strided and not torch_private.is_batched(t)
        for t in operands
    )


@contextmanager
def transcribed(
    operands: Sequence[Tensor],
    shared: Shared | None = None,
    running_step: Callable[[], Any] = lambda: None,
) -> Iterator[Transcriber]:
    """Inside, what is done with these tensors is written down, while nobody else has to see it."""
    seen = Transcriber(operands, shared, running_step)
    before, thread.unseen = thread.unseen, seen
    try:
        with seen:
            yield seen
    finally:
        thread.unseen = before
