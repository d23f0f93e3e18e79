"""Besides autograd a parameter's gradient goes to a `main_grad` buffer, or a queue that `backward_dw()` works off.

Both are read from the live Parameter when the backward runs: a saved weight that went through a pack hook has lost its
attributes. The autograd node returns None for such a gradient.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fuseops import torch_private
from fuseops.errors import FuseOpsError, InPlaceError
from fuseops.ops.op import Call, Grads, Op
from fuseops.ops.packing import alias_of
from fuseops.ops.scopes import DELAYED, WGRAD_HOOKS
from fuseops.plan.facts import kept_fields
from fuseops.plan.segment import BackwardStep, Segment
from fuseops.recipes import Quantized

from . import data_parallel


class Destination(NamedTuple):
    """A destination is the buffer that the gradient of one parameter goes to: what an op finds in `call.out` and
    `call.overwrite`.
    """

    buffer: Tensor
    overwrite: bool = False  # what is in it does not count
    # buffers of the groups, to add the parts of `buffer` to; None for one that is frozen
    shares: tuple[Tensor | None, ...] = ()


Destinations = Mapping[str, Destination]


class Backward(Protocol):
    """A `Backward` gives the Grads of every member of a step, told which buffers each may write into."""

    def __call__(
        self, step: BackwardStep, out: Sequence[Destinations] | None = None
    ) -> Sequence[Grads]: ...


def note(seg: Segment) -> None:
    """Remember who reduces the gradients of a segment's ops that delay some."""
    for op in seg.ops:
        if op.delays:
            data_parallel.note(op)


def as_asked(seg: Segment, given: Sequence[bool], edges: Sequence[tuple[Any, int]]) -> Segment:
    """The segment for the backward that runs now: what it would not add to the `.grad` of the op's own parameter goes
    to no main_grad and does not wait. `torch.autograd.grad` returns what it is asked for, `backward(inputs=)` leaves
    the others alone, and under `functional_call` the forward was given other tensors, whose gradients are theirs.

    given: which inputs of the node are tensors.  edges: what comes before each of them, and before x, in the graph.
    """

    def position(i: int, name: str) -> int:
        return len(seg.reads) + seg.params.index((i, name))

    def adds(i: int, name: str) -> bool:
        node = edges[1 + sum(given[: position(i, name)])][0]
        if name in seg.ops[i]._local:
            node = _behind(node)
        return _own(seg.ops[i], name, node) and torch_private.will_accumulate(node)

    steps = tuple(_as_asked(step, adds, position) for step in seg.backward)
    if steps == seg.backward:
        return seg
    key = tuple([(step.main, step.delayed is None) for step in steps])
    if key not in seg.variants:
        seg.variants[key] = replace(seg, backward=steps)
    return seg.variants[key]


def _own(op: Op[Any], name: str, node: Any) -> bool:
    """Whether a gradient that arrives at this node is that of the parameter that the op has under a name."""
    registered = op.registered(name)
    if any(n not in op._parameters for n in registered):
        return True  # parametrized, or put there by a wrapper: refused, where it has no buffer
    nodes = [node] if name in registered else [behind for behind, _ in node.next_functions]
    found = [getattr(behind, "variable", None) for behind in nodes if behind is not None]
    if name in registered and not op._parameters[name].requires_grad:  # type: ignore[union-attr]
        return False  # frozen since the forward: autograd drops its gradient
    return all(any(leaf is op._parameters[n] for n in registered) for leaf in found)


def _behind(node: Any) -> Any:
    """The node of the leaf that a local tensor was made of, by one function after another."""
    while node.next_functions and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return node


def _as_asked(
    step: BackwardStep, adds: Callable[[int, str], bool], position: Callable[[int, str], int]
) -> BackwardStep:
    main = tuple((k, name) for k, name in step.main if adds(step.members[k], name))
    step = step if main == step.main else replace(step, main=main)
    if step.delayed is None:
        return step
    (i,), (call,), (late,) = step.members, step.calls, step.delayed.calls
    if any(adds(i, name) for name in late.needs):
        return step
    call = call._replace(needs=call.needs | late.needs)
    params = tuple((0, name, position(i, name)) for name in sorted(late.needs))
    return replace(step, calls=(call,), params=step.params + params, delayed=None)


def elsewhere(
    step: BackwardStep, ops: Sequence[Op[Any]], run: Backward, saved: Any, dy: Any
) -> list[Grads]:
    """The Grads of a step whose parameter gradients do not all go through autograd; those that do not are None.

    saved, dy: what `run` reads; the Saved of each op.
    """
    if step.delayed is not None:  # rules leave such an op alone: it is the only member
        data_parallel.check(ops[0])
        delay(ops[0], run, step.delayed, saved[0], dy)
        if not step.calls[0].needs:
            return [Grads()]
    out: list[Destinations] = [
        {n: destination(op, n) for m, n in step.main if m == k} for k, op in enumerate(ops)
    ]
    if any(place.overwrite for mine in out for place in mine.values()):
        out = _shared(ops, out)
    results = list(run(step, out))
    for k, (op, destinations) in enumerate(zip(ops, out, strict=True)):
        params = dict(results[k].params or {})
        for name, place in destinations.items():
            accept(op, name, place, params.get(name))
            params[name] = _dummy(op, name)
        results[k] = results[k]._replace(params=params)
    return results


def _shared(ops: Sequence[Op[Any]], out: Sequence[Destinations]) -> list[Destinations]:
    """The destinations of the ops of one step, which write in an order of their own: a buffer that several of them
    write to, and one overwrites, is emptied before.
    """

    def owner(op: Op[Any], name: str) -> int:
        return id(getattr(op, op.registered(name)[0]))

    def place(op: Op[Any], name: str, found: Destination) -> Destination:
        if not found.overwrite or times[owner(op, name)] == 1:
            return found
        found.buffer.zero_()
        return found._replace(overwrite=False)

    pairs = [*zip(ops, out, strict=True)]
    times = Counter(owner(op, name) for op, mine in pairs for name in mine)
    return [{name: place(op, name, found) for name, found in mine.items()} for op, mine in pairs]


def _dummy(op: Op[Any], name: str) -> Tensor | None:
    """What autograd accumulates of a gradient that is in main_grad: nothing, or zeros where a wrapper looks at
    `grad_added_to_main_grad`. Megatron's overlapped reduction hangs on that accumulation, wants a gradient there and
    frees it.
    """
    parameters = [getattr(op, key) for key in op.registered(name)]
    if not all(hasattr(p, "grad_added_to_main_grad") for p in parameters):
        return None
    first = parameters[0]
    return (
        torch.zeros_like(first)
        if len(parameters) == 1
        else first.new_zeros(len(parameters), *first.shape)
    )


def with_buffers(calls: Sequence[Call], out: Sequence[Destinations]) -> tuple[Call, ...]:
    """The calls with `out` and `overwrite`."""
    return tuple(
        call._replace(
            out={**(call.out or {}), **{name: place.buffer for name, place in mine.items()}},
            overwrite=frozenset(name for name, place in mine.items() if place.overwrite),
        )
        for call, mine in zip(calls, out, strict=True)
    )


# --- main_grad


def destination(op: Op[Any], name: str, written: set[int] | None = None) -> Destination:
    """The main_grad of a parameter.  Raises FuseOpsError when there is none, or it cannot hold the gradient.

    Of a parameter that is kept by group: the one buffer that those of the groups are views of, or else a new one.
    written: as of the `Pass` that the gradient is of, by default the one that runs
    """
    names = op.registered(name)
    if name in names:
        buffer = _buffer(op, name)
        return Destination(buffer, _overwrites(getattr(op, name), written))
    parameters = {n: p for n in names if (p := getattr(op, n)).requires_grad}
    buffers = {n: _buffer(op, n) for n in parameters}
    overwrite = {n: _overwrites(p, written) for n, p in parameters.items()}
    whole = alias_of([*buffers.values()]) if len(buffers) == len(names) else None
    if whole is not None and len({*overwrite.values()}) == 1:
        return Destination(whole, overwrite[names[0]])
    for n in (n for n, fresh in overwrite.items() if fresh):
        buffers[n].zero_()
    like = next(iter(buffers.values()))
    shares = tuple(buffers.get(n) for n in names)
    return Destination(like.new_empty(len(names), *like.shape), True, shares)


def _overwrites(parameter: Any, written: set[int] | None) -> bool:
    """Whether the next gradient takes the place of what is in main_grad: the first one of a backward, where it is asked
    for. Others of the same backward, of a weight that is used twice, are added to it.
    """
    if not getattr(parameter, "overwrite_main_grad", False):
        return False
    written = _pass_now().written if written is None else written
    first = id(parameter) not in written
    written.add(id(parameter))
    return first


def _buffer(op: Op[Any], name: str) -> Tensor:
    parameter: Any = getattr(op, name)
    # Megatron's FSDP hands the buffer out on demand
    get = getattr(parameter, "get_main_grad", None)
    buffer = getattr(parameter, "main_grad", None) if get is None else get()
    what = f"{type(op).__name__} accumulates the gradient of {name!r} into {name}.main_grad"
    if torch_private.is_dtensor(type(parameter)):
        raise FuseOpsError(
            f"{what}, and {name} is a DTensor over {parameter.device_mesh}: this rank has the gradient of its part "
            "alone. Leave accumulate_into_main_grad off for weights over ranks."
        )
    if not isinstance(buffer, Tensor):
        raise FuseOpsError(
            f"{what}, which is {type(buffer).__name__}: set it to a float32 tensor of shape {tuple(parameter.shape)}, "
            "or build the op with accumulate_into_main_grad=False."
        )
    fits = buffer.shape == parameter.shape and buffer.device == parameter.device
    if (
        not fits
        or not buffer.is_contiguous()
        or buffer.dtype not in (torch.float32, parameter.dtype)
    ):
        raise FuseOpsError(
            f"{what}, a {'' if buffer.is_contiguous() else 'non-contiguous '}{buffer.dtype} of shape "
            f"{tuple(buffer.shape)} on {buffer.device}: expected a contiguous {torch.float32} or {parameter.dtype} "
            f"of shape {tuple(parameter.shape)} on {parameter.device}."
        )
    return buffer


def accept(op: Op[Any], name: str, place: Destination, gradient: Tensor | None) -> None:
    """Add the gradient that an op gave to its buffer, unless the op has written it there itself (None)."""
    if place.shares:
        parts = place.buffer if gradient is None else gradient
        for share, part in zip(place.shares, parts.unbind(), strict=True):
            if share is not None:
                share.add_(part)
    elif gradient is not None and place.overwrite:
        place.buffer.copy_(gradient)
    elif gradient is not None:
        place.buffer.add_(gradient)
    for registered in op.registered(name):
        parameter: Any = getattr(op, registered)
        if hasattr(parameter, "grad_added_to_main_grad"):  # data-parallel wrappers look here
            parameter.grad_added_to_main_grad = True


# --- delayed


class Pass:
    """A `Pass` is one backward of autograd's: it runs, came to its end, or was interrupted by an error."""

    def __init__(self) -> None:
        self.ended = False
        self.written: set[int] = set()  # ids of parameters whose main_grad it has overwritten
        end = End(self)
        torch_private.when_backward_ends(end)
        self.queues: list[list[Delayed]] = []  # of ops, while it runs
        self.end = weakref.ref(end, partial(_forget_interrupted, self.queues))

    @property
    def interrupted(self) -> bool:
        return not self.ended and self.end() is None


class End:
    """An `End` is called at the end of a backward, and goes with it: autograd alone holds it."""

    def __init__(self, of: Pass) -> None:
        self.of = of

    def __call__(self) -> None:
        self.of.ended = True


def _forget_interrupted(queues: list[list[Delayed]], _: Any) -> None:
    """Let go of what a backward that was interrupted has put off, as it ends: that step is no more."""
    for queue in queues:
        queue[:] = [delayed for delayed in queue if not delayed.by.interrupted]
    queues.clear()


_passes: weakref.WeakValueDictionary[int, Pass] = weakref.WeakValueDictionary()


def _pass_now() -> Pass:
    """The backward that runs now."""
    number = torch_private.backward_now()
    found = _passes.get(number)
    if found is None:
        found = _passes[number] = Pass()
    return found


torch_private.never_compile(_pass_now)  # compiled autograd traces a backward


class Delayed(NamedTuple):
    """A `Delayed` is a weight gradient that waits for `backward_dw`: how to compute it, what it reads, at the versions
    that it had, and the backward that put it off.
    """

    run: Backward
    step: BackwardStep
    reads: tuple[tuple[str, Tensor, int], ...]
    by: Pass


def delay(op: Op[Any], run: Backward, step: BackwardStep, saved: Any, dy: Any) -> None:
    """Put the gradients of a step off until `backward_dw`."""
    fields = kept_fields(op.saves_for, op.Saved._fields, step.calls[0].needs)
    named = [("dy", dy), *((name, getattr(saved, name)) for name in fields if saved is not None)]
    tensors = [pair for name, value in named for pair in _tensors(name, value)]
    reads = tuple((name, t, torch_private.version(t)) for name, t in tensors)
    by, queue = _pass_now(), op.__dict__.setdefault(DELAYED, [])
    queue.append(Delayed(run, step, reads, by))
    by.queues.append(queue)


def _tensors(name: str, value: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a value, with their names: a quantized one has several."""
    if isinstance(value, Quantized):
        return [(f"{name}.{part}", t) for part, t in value.components().items()]
    return [(name, value)] if isinstance(value, Tensor) else []


def take_delayed(module: nn.Module) -> Callable[[], int]:
    """What computes the gradients that backwards have put off until now in the ops of `module`, and no others, whenever
    it is called: once.
    """
    taken = [
        (path, op, _taken(op))
        for path, op in reversed(list(module.named_modules()))
        if op.__dict__.get(DELAYED)
    ]

    def run() -> int:
        return sum(_work_off(path, op, queue) for path, op, queue in taken)

    return run


def _taken(op: nn.Module) -> list[Delayed]:
    """What waits in an op, which has an empty queue now: without one it would be seen to have changed."""
    queue, op.__dict__[DELAYED] = op.__dict__[DELAYED], []
    return queue


def run_delayed(module: nn.Module) -> int:
    """Compute what backwards have put off in every op of `module`, oldest first, and add it to `.grad` or main_grad.

    -> how many gradients.  Raises FuseOpsError for a parameter that has been sharded since. What an error stops stays
    in the queue.
    """
    return sum(
        _work_off(path, op, op.__dict__.get(DELAYED, []))
        for path, op in reversed(list(module.named_modules()))
    )


def _work_off(path: str, op: Any, queue: list[Delayed]) -> int:
    done = 0
    while queue:
        try:
            with torch.no_grad():
                done += _accumulate(op, queue[0])
        except Exception as error:
            error.add_note(f"in backward_dw of {path or 'the op'!r} ({type(op).__name__})")
            raise
        queue.pop(0)
    return done


def _accumulate(op: Op[Any], delayed: Delayed) -> int:
    """Compute and add the gradients of one delayed step.   -> how many"""
    run, step, reads, by = delayed
    for name, t, version in reads:
        if torch_private.version(t) != version:
            raise InPlaceError(
                f"backward_dw: {name!r} of {type(op).__name__} was modified in place after the backward that put its "
                "weight gradient off: the gradient would be wrong. Call backward_dw() before, or write to a clone."
            )
    names = sorted(step.calls[0].needs)
    for registered in (key for name in names for key in op.registered(name)):
        if _sharded_since(op, registered):
            raise FuseOpsError(
                f"backward_dw: {type(op).__name__}.{registered} is sharded by now (FSDP2 has reduced its gradients "
                "at the end of the backward): a delayed weight gradient does not go with it. Leave delay_wgrad off."
            )
    written = {*by.written}
    out = {n: destination(op, n, written) for n in names} if op.accumulate_into_main_grad else {}
    gradients = run(step, [out])[0].params or {}
    for name in names:
        if name in out:
            accept(op, name, out[name], gradients[name])
        elif gradients[name] is not None:
            _add_to_grad(op, name, gradients[name])  # type: ignore[arg-type]
    by.written |= written
    for hook in op.__dict__.get(WGRAD_HOOKS, ()):
        with torch.enable_grad():
            hook()
    return len(names)


def _sharded_since(op: Op[Any], registered: str) -> bool:
    """Whether a parameter is another DTensor than the one that the op computes with its part of."""
    parameter = getattr(op, registered)
    if not torch_private.is_dtensor(type(parameter)):
        return False
    local = op._local.get(registered)
    return local is None or parameter.device_mesh.ndim != local.dims


def _add_to_grad(op: Op[Any], name: str, gradient: Tensor) -> None:
    names = op.registered(name)
    parts = (gradient,) if name in names else gradient.unbind()
    for registered, part in zip(names, parts, strict=True):
        parameter = getattr(op, registered)
        if parameter.requires_grad:
            if registered in op._local:
                part = op._local[registered].gradient(parameter, part)
            part = data_parallel.reduced(op, part.to(parameter.dtype))
            parameter.grad = part if parameter.grad is None else parameter.grad + part
            hooks = parameter._post_accumulate_grad_hooks or {}
            for hook in [*hooks.values()]:
                hook(parameter)
