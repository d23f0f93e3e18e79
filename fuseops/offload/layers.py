"""Calls of layers: module hooks that tell a schedule when forwards and backwards begin, and the scope
that takes what a layer saves.

Everything hangs on a token for each call, from the hook before the forward to the death of the last
tensor that it saved; so micro-batches, pipeline schedules, a layer used twice, errors and dropped
graphs need no code of their own.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fuseops import torch_private
from fuseops.ops import names

from . import marks, modules, records
from .labels import Labels, Named
from .nesting import belongs_to_checkpoint, enclosing, take_out
from .policy import Candidate, Policy, Quota
from .reasons import Facts, mark_on, why_keep
from .records import Handle, Kept, Label, Moved, Mover, Watch
from .report import KEPT, MOVED, SHARED, Entry
from .schedule import Call, Decision
from .scopes import Scope, recompute
from .storages import StorageMap


class Running(NamedTuple):
    """A layer whose forward runs. call None: the schedule stands aside."""

    module: nn.Module
    call: Call | None
    labels: Labels
    quota: Quota
    inputs: list[str]  # planned names of what the checkpoint of a layer will save
    inside: ExitStack


class _Thread(threading.local):
    def __init__(self) -> None:
        self.running: list[Running] = []


class LayerScope(Scope):
    """Takes what the layers of a scheduler save, and drives its schedule."""

    def __init__(
        self,
        model: nn.Module,
        layers: dict[int, str],
        policy: Policy | None,
        mover: Callable[[], Mover],
    ) -> None:
        super().__init__(model)
        self._policy, self._layers, self._make_mover = policy, layers, mover
        self._mover: Mover | None = None
        self.paused = False  # a plan is being made
        self._thread_calls = _Thread()
        self._resident: StorageMap[str] = StorageMap()  # name under which a storage is kept
        self._recomputed: dict[str, list[str]] = {}  # layer -> names of what comes into it
        self._dropping: set[str] = set()  # layers with ops that drop fields
        self.names: dict[str, str] = {}  # decision of the last step by name
        self.called: set[str] = set()  # paths of layers
        self._know_root()

    def __str__(self) -> str:
        return "Scheduler()"

    @property
    def mover(self) -> Mover:
        """Made when the first layer runs: only then is the model where it will stay."""
        if self._mover is None:
            self._mover = self._make_mover()
        return self._mover

    def close(self) -> None:
        """No layer will run any more."""
        if self._mover is not None:
            self._mover.close()

    # --- hooks

    def enter(self, module: nn.Module) -> None:
        """Before the forward of a layer."""
        path, call = self._layers[id(module)], None
        self.called.add(path)
        aside = self._why_layer_aside()
        if aside is None:
            call = self.mover.enter(path)
        elif aside:
            kind = type(module).__name__
            self._ledger.saw(Entry(path, kind, (), None, 0, KEPT, aside))
        labels, inside = Labels(self._labels.paths), ExitStack()
        inputs = list(self._recomputed.get(path, ()))
        self._thread_calls.running.append(Running(module, call, labels, Quota(), inputs, inside))
        if call is None:
            return
        if path in self._dropping:
            inside.enter_context(recompute())
        torch_private.push_saved_tensor_hooks(self._hook, records.unpack)
        names.thread.observers += 1
        modules.watch(self)
        modules.thread.running.append(module)
        self.module_entered(module)

    def leave(self, module: nn.Module, output: Any) -> None:
        """After it, in whatever way it ended."""
        stack = self._thread_calls.running
        if not stack or stack[-1].module is not module:
            return
        ended = stack.pop()
        ended.inside.close()
        call = ended.call
        if call is None:
            return
        take_out(self._hook)
        names.thread.observers -= 1
        if modules.thread.running and modules.thread.running[-1] is module:
            modules.thread.running.pop()
        modules.unwatch(self)
        for node in {t.grad_fn for t in _tensors(output)}:
            if node is not None:
                node.register_prehook(_Begin(self.mover, call))
        self.mover.leave(call)

    def follow(
        self, decisions: Mapping[str, Decision], recomputed: Iterable[str], lag: int
    ) -> None:
        """What a plan decided: by name, the layers that are recomputed as a whole, and the lag."""
        if self._mover is not None:
            self._mover.schedule.decisions, self._mover.schedule.lag = decisions, lag
        self._recomputed = {path: [] for path in recomputed}
        self._dropping = set()
        for path in self._layers.values():
            mine = [name for name in decisions if name.startswith(f"{path}.")]
            if path in self._recomputed:
                # A checkpoint saves what comes in, and knows no names.
                self._recomputed[path] = [n for n in mine if decisions[n] != "recompute"]
            elif any(decisions[name] == "recompute" for name in mine):
                self._dropping.add(path)

    def _why_layer_aside(self) -> str | None:
        """Why the schedule leaves a call alone, or None; "" is not worth a line."""
        if self.paused or not torch.is_grad_enabled() or torch_private.in_backward():
            return ""
        if belongs_to_checkpoint(torch_private.top_saved_tensor_hooks()):
            return "recomputed by checkpoint"
        if next(enclosing(), None) is not None:
            return "an offload scope around it decides"
        return None

    # --- saving

    def _named(self, t: Tensor) -> Named:
        running = self._now
        named = running.labels.name(t)
        if running.inputs and t.numel():
            return named._replace(name=running.inputs.pop(0))
        return named

    def _why_aside(self, t: Tensor) -> str | None:
        if t.is_cuda and torch.cuda.is_current_stream_capturing():
            known = self.mover.schedule.order.predicts
            return None if known else "CUDA graph capture, before a step has shown the order"
        return super()._why_aside(t)

    @property
    def _now(self) -> Running:
        return self._thread_calls.running[-1]

    def _kept(self, t: Tensor, label: Label) -> Kept:
        call = self._now.call
        if call is None:
            return super()._kept(t, label)
        self.mover.keep(call)
        return Kept(t, label, self._ledger, (self.mover, call))

    def _decide(self, t: Tensor, named: Named) -> Handle:
        running, storage = self._now, t.untyped_storage()
        call = cast(Call, running.call)  # the hook pair is there only then
        record = records.find(t)
        if record is not None:
            self._report(t, named, SHARED, f"in the storage of {record.name}", 0)
            record.mover.share(call, record.item)
            return Moved(t, Label(named.name, named.op), record, call, self._ledger)
        mark = mark_on(t, named)
        facts = Facts(self._owned, mark, self.mover.on_gpu)
        reason = why_keep(t, named, facts)
        why = "marked offload"
        if reason is None and mark != marks.OFFLOAD:
            reason, why = self._by_policy(t, named, running.quota), "policy"
        if reason is None:
            entry = self._entry(t, named, MOVED, why, storage.nbytes())
            found = self.mover.save(call, t, marks.ready(t), Watch(t, entry, self._ledger))
            if not isinstance(found, str):
                self.names[named.name] = "offload"
                self._ledger.saw(entry)
                self._ledger.moved(found)
                return Moved(t, Label(named.name, named.op), found, call, self._ledger)
            reason = found
        self.names[named.name] = "keep"
        if self._policy is not None:
            self._resident.set(storage, named.name)
        return self._keep_counted(t, named, reason)

    def _by_policy(self, t: Tensor, named: Named, quota: Quota) -> str | None:
        planned = self.mover.schedule.decisions.get(named.name)
        if planned is not None:
            return None if planned == "offload" else "planned"
        if self._policy is None:
            return "not in the plan"
        resident = self._resident.get(t.untyped_storage())
        if resident is not None:
            return f"in the storage of {resident}, which stays"
        return self._policy.why_keep(Candidate.of(t, named.name, named.op), quota)


class _Begin:
    """A prehook of the nodes that made a layer's output: its backward begins."""

    __slots__ = ("call", "mover")

    def __init__(self, mover: Mover, call: Call) -> None:
        self.mover, self.call = mover, call

    def __call__(self, grads: Any) -> None:
        self.mover.backward(self.call)


class Hook:
    """A module hook of a scheduler. A copy or a pickle of the model comes without the scheduler."""

    def __init__(self, scope: LayerScope | None = None) -> None:
        self.scope = scope

    def __deepcopy__(self, memo: Any) -> "Hook":
        return type(self)()

    def __reduce__(self) -> Any:
        return type(self), ()


class EnterHook(Hook):
    """Before a forward."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.scope is not None and not torch.compiler.is_compiling():
            self.scope.enter(module)


class LeaveHook(Hook):
    """After a forward."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.scope is not None and not torch.compiler.is_compiling():
            self.scope.leave(module, output)


torch_private.never_compile(EnterHook.__call__)
torch_private.never_compile(LeaveHook.__call__)


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
        return
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
