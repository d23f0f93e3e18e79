"""Parameter gradients that do not go through autograd: into a `main_grad` buffer, or delayed until `backward_dw()`.

The autograd node returns None for such a gradient. `main_grad` is read from the Parameter when the backward runs, since
a saved weight that went through a pack hook has lost its attributes.
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
    """A `Destination` is the buffer for the gradient of one parameter: `call.out` and `call.overwrite` of its op."""

    buffer: Tensor
    overwrite: bool = False  # the gradient replaces its contents
    # buffers of groups that the parts of `buffer` are then added to; None for a frozen group
    group_buffers: tuple[Tensor | None, ...] = ()


Destinations = Mapping[str, Destination]


class RunBackward(Protocol):
    """A `RunBackward` runs a backward step.   out: destinations of every member   -> the Grads of every member"""

    def __call__(
        self, step: BackwardStep, out: Sequence[Destinations] | None = None
    ) -> Sequence[Grads]: ...


def segment_for_backward(
    seg: Segment, given: Sequence[bool], edges: Sequence[tuple[Any, int]]
) -> Segment:
    """The segment for the backward that runs now. Only a gradient that this backward would add to the `.grad` of the
    parameter of the op is delayed or goes to main_grad.

    Others go through autograd: `torch.autograd.grad` returns them, `backward(inputs=)` leaves some out, and under
    `functional_call` they belong to other tensors.
    given: whether each input of the node is a tensor.  edges: `next_functions` of the node, for x and these tensors.
    """

    def position(i: int, name: str) -> int:
        return len(seg.reads) + seg.params.index((i, name))

    def adds(i: int, name: str) -> bool:
        node = edges[1 + sum(given[: position(i, name)])][0]
        if name in seg.ops[i]._local:
            node = _leaf_node(node)
        return _is_own_gradient(seg.ops[i], name, node) and torch_private.will_accumulate(node)

    steps = tuple(_step_for_backward(step, adds, position) for step in seg.backward)
    if steps == seg.backward:
        return seg
    key = tuple([(step.main, step.delayed is None) for step in steps])
    return seg.variant(key, backward=steps)


def _is_own_gradient(op: Op[Any], name: str, node: Any) -> bool:
    """Whether a gradient that flows to this node belongs to the parameter of that name of the op."""
    registered = op.registered(name)
    if any(n not in op._parameters for n in registered):
        return True  # parametrized, or set by a wrapper: an error where it has no buffer
    nodes = [node] if name in registered else [previous for previous, _ in node.next_functions]
    found = [getattr(previous, "variable", None) for previous in nodes if previous is not None]
    if name in registered and not op._parameters[name].requires_grad:  # type: ignore[union-attr]
        return False  # frozen since the forward: autograd drops its gradient
    return all(any(leaf is op._parameters[n] for n in registered) for leaf in found)


def _leaf_node(node: Any) -> Any:
    """The node of the leaf that a local tensor was computed from, by a chain of functions of one input."""
    while node.next_functions and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return node


def _step_for_backward(
    step: BackwardStep, adds: Callable[[int, str], bool], position: Callable[[int, str], int]
) -> BackwardStep:
    main = tuple((k, name) for k, name in step.main if adds(step.members[k], name))
    step = step if main == step.main else replace(step, main=main)
    if step.delayed is None:
        return step
    (i,), (call,), (delayed_call,) = step.members, step.calls, step.delayed.calls
    if any(adds(i, name) for name in delayed_call.needs):
        return step
    call = call._replace(needs=call.needs | delayed_call.needs)
    params = tuple((0, name, position(i, name)) for name in sorted(delayed_call.needs))
    return replace(step, calls=(call,), params=step.params + params, delayed=None)


def run_diverted(
    step: BackwardStep, ops: Sequence[Op[Any]], run: RunBackward, saved: Any, dy: Any
) -> list[Grads]:
    """Run a step some of whose parameter gradients do not go through autograd; in its Grads those are None.

    saved, dy: inputs of `run`; the Saved of each op.
    """
    if step.delayed is not None:  # rules leave such an op alone: it is the only member
        data_parallel.check_comm_hooks(ops[0])
        delay(ops[0], run, step.delayed, saved[0], dy)
        if not step.calls[0].needs:
            return [Grads()]
    out: list[Destinations] = [
        {n: destination(op, n) for m, n in step.main if m == k} for k, op in enumerate(ops)
    ]
    if any(dest.overwrite for destinations in out for dest in destinations.values()):
        out = _zero_shared(ops, out)
    results = list(run(step, out))
    for k, (op, destinations) in enumerate(zip(ops, out, strict=True)):
        params = dict(results[k].params or {})
        for name, dest in destinations.items():
            add_to_destination(op, name, dest, params.get(name))
            params[name] = _placeholder_grad(op, name)
        results[k] = results[k]._replace(params=params)
    return results


def _zero_shared(ops: Sequence[Op[Any]], out: Sequence[Destinations]) -> list[Destinations]:
    """The destinations of one step; a buffer that several ops share, of which one would overwrite it, is zeroed first,
    since the ops write in any order.
    """

    def owner(op: Op[Any], name: str) -> int:
        return id(getattr(op, op.registered(name)[0]))

    def zeroed(op: Op[Any], name: str, found: Destination) -> Destination:
        if not found.overwrite or times[owner(op, name)] == 1:
            return found
        found.buffer.zero_()
        return found._replace(overwrite=False)

    pairs = [*zip(ops, out, strict=True)]
    times = Counter(owner(op, name) for op, destinations in pairs for name in destinations)
    return [
        {name: zeroed(op, name, found) for name, found in destinations.items()}
        for op, destinations in pairs
    ]


def _placeholder_grad(op: Op[Any], name: str) -> Tensor | None:
    """The gradient that autograd accumulates in place of one in main_grad: None, or zeros where a wrapper reads
    `grad_added_to_main_grad`. Megatron's overlapped reduction is triggered by that accumulation, and frees the zeros.
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
    """The calls with the `out` and `overwrite` of these destinations."""
    return tuple(
        call._replace(
            out={
                **(call.out or {}),
                **{name: dest.buffer for name, dest in destinations.items()},
            },
            overwrite=frozenset(name for name, dest in destinations.items() if dest.overwrite),
        )
        for call, destinations in zip(calls, out, strict=True)
    )


# --- main_grad


def destination(op: Op[Any], name: str, overwritten: set[int] | None = None) -> Destination:
    """The main_grad of a parameter.  Raises FuseOpsError where there is none, or it cannot hold the gradient.

    For a parameter that is stored by group: the buffer that the main_grads of all groups are views of, or a new one.
    overwritten: of the `BackwardPass` of the gradient, by default the current one
    """
    names = op.registered(name)
    if name in names:
        buffer = _buffer(op, name)
        return Destination(buffer, _claim_overwrite(getattr(op, name), overwritten))
    parameters = {n: p for n in names if (p := getattr(op, n)).requires_grad}
    buffers = {n: _buffer(op, n) for n in parameters}
    overwrite = {n: _claim_overwrite(p, overwritten) for n, p in parameters.items()}
    whole = alias_of([*buffers.values()]) if len(buffers) == len(names) else None
    if whole is not None and len({*overwrite.values()}) == 1:
        return Destination(whole, overwrite[names[0]])
    for n in (n for n, fresh in overwrite.items() if fresh):
        buffers[n].zero_()
    like = next(iter(buffers.values()))
    group_buffers = tuple(buffers.get(n) for n in names)
    return Destination(like.new_empty(len(names), *like.shape), True, group_buffers)


def _claim_overwrite(parameter: Any, overwritten: set[int] | None) -> bool:
    """Whether this gradient overwrites main_grad, as the first one of a backward does under `overwrite_main_grad`.

    It is then recorded in `overwritten`, so that later gradients of the same backward (a weight used twice) are added.
    """
    if not getattr(parameter, "overwrite_main_grad", False):
        return False
    overwritten = _current_pass().overwritten if overwritten is None else overwritten
    first = id(parameter) not in overwritten
    overwritten.add(id(parameter))
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
    dtypes = dict.fromkeys((torch.float32, parameter.dtype))
    fits = buffer.shape == parameter.shape and buffer.device == parameter.device
    if not fits or not buffer.is_contiguous() or buffer.dtype not in dtypes:
        raise FuseOpsError(
            f"{what}, a {'' if buffer.is_contiguous() else 'non-contiguous '}{buffer.dtype} of shape "
            f"{tuple(buffer.shape)} on {buffer.device}: expected a contiguous {' or '.join(map(str, dtypes))} "
            f"of shape {tuple(parameter.shape)} on {parameter.device}."
        )
    return buffer


def add_to_destination(op: Op[Any], name: str, dest: Destination, gradient: Tensor | None) -> None:
    """Write a gradient to its destination, unless the op has done so itself (None)."""
    if dest.group_buffers:
        parts = dest.buffer if gradient is None else gradient
        for group_buffer, part in zip(dest.group_buffers, parts.unbind(), strict=True):
            if group_buffer is not None:
                group_buffer.add_(part)
    elif gradient is not None and dest.overwrite:
        dest.buffer.copy_(gradient)
    elif gradient is not None:
        dest.buffer.add_(gradient)
    for registered in op.registered(name):
        parameter: Any = getattr(op, registered)
        if hasattr(parameter, "grad_added_to_main_grad"):  # data-parallel wrappers look here
            parameter.grad_added_to_main_grad = True


# --- delayed


class BackwardPass:
    """A `BackwardPass` is one run of autograd: still running, ended, or interrupted by an error."""

    def __init__(self) -> None:
        self.ended = False
        self.overwritten: set[int] = set()  # ids of parameters whose main_grad it has overwritten
        end = PassEnd(self)
        torch_private.on_backward_end(end)
        self.queues: list[list[DelayedGrad]] = []  # of the ops whose gradients it delayed
        self.end = weakref.ref(end, partial(_drop_interrupted, self.queues))

    @property
    def interrupted(self) -> bool:
        return not self.ended and self.end() is None


class PassEnd:
    """A `PassEnd` is the callback at the end of a backward. Autograd alone holds it: if it dies uncalled, there was an
    error.
    """

    def __init__(self, backward: BackwardPass) -> None:
        self.backward = backward

    def __call__(self) -> None:
        self.backward.ended = True


def _drop_interrupted(queues: list[list[DelayedGrad]], _: Any) -> None:
    """Drop the gradients that an interrupted backward has delayed."""
    for queue in queues:
        queue[:] = [delayed for delayed in queue if not delayed.backward.interrupted]
    queues.clear()


_running_passes: weakref.WeakValueDictionary[int, BackwardPass] = weakref.WeakValueDictionary()


def _current_pass() -> BackwardPass:
    """The backward that runs in this thread."""
    number = torch_private.current_backward()
    found = _running_passes.get(number)
    if found is None:
        found = _running_passes[number] = BackwardPass()
    return found


torch_private.never_compile(_current_pass)  # compiled autograd traces a backward


class DelayedGrad(NamedTuple):
    """A `DelayedGrad` is a weight gradient that waits for `backward_dw`."""

    run: RunBackward
    step: BackwardStep
    reads: tuple[tuple[str, Tensor, int], ...]  # (name, tensor, version) of its inputs
    backward: BackwardPass  # which delayed it


def delay(op: Op[Any], run: RunBackward, step: BackwardStep, saved: Any, dy: Any) -> None:
    """Delay the gradients of a step until `backward_dw`."""
    fields = kept_fields(op.saves_for, op.Saved._fields, step.calls[0].needs)
    named = [("dy", dy), *((name, getattr(saved, name)) for name in fields if saved is not None)]
    tensors = [pair for name, value in named for pair in _tensors(name, value)]
    reads = tuple((name, t, torch_private.version(t)) for name, t in tensors)
    backward, queue = _current_pass(), op.__dict__.setdefault(DELAYED, [])
    queue.append(DelayedGrad(run, step, reads, backward))
    backward.queues.append(queue)


def _tensors(name: str, value: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a saved value by name: those of a quantized one are its components."""
    if isinstance(value, Quantized):
        return [(f"{name}.{part}", t) for part, t in value.components().items()]
    return [(name, value)] if isinstance(value, Tensor) else []


def take_delayed(module: nn.Module) -> Callable[[], int]:
    """Take the gradients that are delayed now out of the ops of `module`.   -> a function that computes them, once"""
    queues = [(path, op, _take_queue(op)) for path, op in _delaying(module)]

    def run() -> int:
        return sum(_run_queue(path, op, queue) for path, op, queue in queues)

    return run


def _delaying(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The ops of `module` whose gradients wait, by path, the last first."""
    ops = reversed(list(module.named_modules()))
    return [(path, op) for path, op in ops if op.__dict__.get(DELAYED)]


def _take_queue(op: nn.Module) -> list[DelayedGrad]:
    """Replace the queue of an op by an empty one, and return it. (Without one, the op would count as changed.)"""
    queue, op.__dict__[DELAYED] = op.__dict__[DELAYED], []
    return queue


def run_delayed(module: nn.Module) -> int:
    """Compute the delayed gradients of every op of `module`, oldest first, and add them to `.grad` or main_grad.

    -> the number of gradients.  Raises FuseOpsError for a parameter that is sharded by now. After an error the rest
    stays in the queue.
    """
    return sum(_run_queue(path, op, op.__dict__[DELAYED]) for path, op in _delaying(module))


def _run_queue(path: str, op: Any, queue: list[DelayedGrad]) -> int:
    done = 0
    while queue:
        try:
            with torch.no_grad():
                done += _run_one(op, queue[0])
        except Exception as error:
            error.add_note(f"in backward_dw of {path or 'the op'!r} ({type(op).__name__})")
            raise
        queue.pop(0)
    return done


def _run_one(op: Op[Any], delayed: DelayedGrad) -> int:
    """Compute and add the gradients of one delayed step.   -> the number of gradients"""
    run, step, reads, backward = delayed
    for name, t, version in reads:
        if torch_private.version(t) != version:
            raise InPlaceError(
                f"backward_dw: {name!r} of {type(op).__name__} was modified in place after the backward that put its "
                "weight gradient off: the gradient would be wrong. Call backward_dw() before, or write to a clone."
            )
    names = sorted(step.calls[0].needs)
    for registered in (key for name in names for key in op.registered(name)):
        if _is_sharded_now(op, registered):
            raise FuseOpsError(
                f"backward_dw: {type(op).__name__}.{registered} is sharded by now (FSDP2 has reduced its gradients "
                "at the end of the backward): a delayed weight gradient does not go with it. Leave delay_wgrad off."
            )
    overwritten = {*backward.overwritten}
    out = (
        {n: destination(op, n, overwritten) for n in names} if op.accumulate_into_main_grad else {}
    )
    gradients = run(step, [out])[0].params or {}
    for name in names:
        if name in out:
            add_to_destination(op, name, out[name], gradients[name])
        elif gradients[name] is not None:
            _add_to_grad(op, name, gradients[name])  # type: ignore[arg-type]
    backward.overwritten |= overwritten
    for hook in op.__dict__.get(WGRAD_HOOKS, ()):
        with torch.enable_grad():
            hook()
    return len(names)


def _is_sharded_now(op: Op[Any], registered: str) -> bool:
    """Whether a parameter is a DTensor, other than the one whose local part the op computes with."""
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
            part = data_parallel.mean_over_ranks(op, part.to(parameter.dtype))
            parameter.grad = part if parameter.grad is None else parameter.grad + part
            for hook in [*torch_private.post_accumulate_hooks(parameter).values()]:
                hook(parameter)
