"""Module hooks that tell a schedule when forwards and backwards of layers begin, and the scope that packs what layers
save.

Each call of a layer has a `LayerRun`, from the hook before the forward until its last saved tensor is freed. So
micro-batches, pipeline schedules, a layer used twice, errors and dropped graphs need no code of their own.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn

from fuseops import torch_private
from fuseops.observe import modules
from fuseops.observe.labels import Labels
from fuseops.observe.memory import tensors_in
from fuseops.observe.saved import is_ledger
from fuseops.ops import names
from fuseops.ops.names import SavedName
from fuseops.words import dtype_name

from . import records
from .codes import Coding, coding_of, exact_by_name
from .nesting import PackHook, belongs_to_checkpoint, open_scopes, remove_hook, without_wrapper
from .nodes import KnownNode
from .policy import Candidate, Policy, Quota
from .records import CallToken, Handle, Kept, Mover, Record, Verdict
from .report import KEPT, Entry
from .schedule import Decision, LayerRun
from .scopes import Scope, dispatch_again, recompute
from .storages import StorageMap

BEFORE_A_STEP = "CUDA graph capture, before a step has shown the order"
OP_SCOPES = {"recompute": recompute, "dispatch": dispatch_again}
"""The scope that a layer runs in, by the decision for what one of its ops saves."""


@dataclass(eq=False, slots=True)
class RunningLayer:
    """A `RunningLayer` is a layer whose forward runs.   call: None where the schedule is bypassed"""

    module: nn.Module
    call: LayerRun | None
    labels: Labels
    inputs: list[str]  # planned names of inputs, which the checkpoint of the layer will save
    quota: Quota = field(default_factory=Quota)
    contexts: ExitStack = field(default_factory=ExitStack)
    token: CallToken | None = None
    alone: bool = False  # no other saved-tensor hooks are around it
    kept_entries: list[Entry] = field(default_factory=list)  # what torch saved, not yet reported


class _LayersThread(threading.local):
    def __init__(self) -> None:
        self.running: list[RunningLayer] = []


class LayerScope(Scope):
    """A `LayerScope` packs what the layers of a scheduler save, and drives its schedule."""

    _shares_storages = True

    def __init__(
        self,
        model: nn.Module,
        layers: dict[int, str],
        policy: Policy | None,
        mover: Callable[..., Mover],
    ) -> None:
        super().__init__(model)
        self._policy, self._layers = policy, layers
        self._cacheable = policy is None or policy.lasting
        self._make_mover: Callable[..., Mover] | None = mover
        self._mover: Any = None  # or a Mover
        self._decisions: Mapping[str, Decision] = {}  # by name, of a plan
        self.paused = False  # a plan is being made
        self._thread_calls = _LayersThread()
        if policy is not None:
            self._resident = StorageMap()  # kept storage -> name
        self._recomputed: dict[str, list[str]] = {}  # layer -> names of its inputs
        # scopes in which ops of a layer drop what they save, by its path
        self._op_scopes: dict[str, list[Callable[[], AbstractContextManager[None]]]] = {}
        # decision of the last step by name; "offload" if so in one of its micro-batches
        self.names: dict[str, str] = {}
        # names that were offloaded in this step; later micro-batches may keep them
        self._offloaded: set[str] = set()
        self._step = 0
        self.called: set[str] = set()  # paths of layers
        self._set_root(model)

    def __str__(self) -> str:
        return "Scheduler"

    @property
    def mover(self) -> Mover:
        """The mover, made when the first layer runs: before, the model may still change its device."""
        return self._mover_for(())

    def _mover_for(self, inputs: Any) -> Mover:
        """The mover.   inputs: of the layer that runs"""
        if self._make_mover is not None:
            # called once and dropped: it holds the scheduler, which holds this scope
            self._mover, self._make_mover = self._make_mover(inputs), None
            self._on_gpu = self._mover.lanes.device.type == "cuda"
        mover: Mover = self._mover
        return mover

    def close(self) -> None:
        """Closes the mover: no layer will run any more."""
        self.forget_interrupted()
        if self._mover is not None:
            self._mover.close()

    # --- hooks

    def enter(self, module: nn.Module, args: Any) -> None:
        """The hook before the forward of a layer."""
        self.forget_interrupted()
        self._flush_entries()
        path, call = self._layers[id(module)], None
        self.called.add(path)
        bypassed = self._why_bypassed()
        if bypassed is None:
            mover = self._mover_for(args)
            call, schedule = mover.enter(path), mover.schedule
            self._capture_reason = None if schedule.order.predicts else BEFORE_A_STEP
            if self._step != schedule.stats.steps:
                self._step = schedule.stats.steps
                self._offloaded.clear()
        elif bypassed:
            kind = type(module).__name__
            self._ledger.add(Entry(path, kind, (), None, 0, KEPT, bypassed))
        labels, inputs = self._labels.restarted(), list(self._recomputed.get(path, ()))
        running = RunningLayer(module, call, labels, inputs)
        self._thread_calls.running.append(running)
        if call is None:
            return
        for scope in self._op_scopes.get(path, ()):
            running.contexts.enter_context(scope())
        running.alone = torch_private.top_saved_tensor_hooks() is None
        torch_private.push_saved_tensor_hooks(self._hook, records.unpack)
        names.thread.observers += 1
        modules.watch(self.module_entered)
        modules.thread.running.append(module)
        self.module_entered(module)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """The hook after the forward of a layer, also when it raised."""
        stack = self._thread_calls.running
        if not stack or stack[-1].module is not module:
            return
        self._leave(stack.pop(), output)

    def forget_interrupted(self) -> None:
        """Leave layers whose forward ended without a hook: torch calls none for a KeyboardInterrupt."""
        stack = self._thread_calls.running
        running = torch_private.running_modules() if stack else []
        while stack and stack[-1].module not in running:
            self._leave(stack.pop(), None)

    def _leave(self, ended: RunningLayer, output: Any) -> None:
        module = ended.module
        self._ledger.add_all(ended.kept_entries)
        ended.contexts.close()
        call = ended.call
        if call is None:
            return
        remove_hook(self._hook)
        names.thread.observers -= 1
        if modules.thread.running and modules.thread.running[-1] is module:
            modules.thread.running.pop()
        modules.unwatch(self.module_entered)
        mover = self.mover

        def begin(grads: Any) -> None:  # its backward
            mover.backward(call)

        for node in {t.grad_fn for t in tensors_in(output)}:
            if node is not None:
                node.register_prehook(begin)
        with mover.lock:
            mover.schedule.leave(call)

    def apply_plan(
        self, decisions: Mapping[str, Decision], recomputed: Iterable[str], lag: int
    ) -> None:
        """Use the decisions of a plan.   recomputed: layers that are recomputed as a whole"""
        if self._mover is not None:
            self._mover.schedule.lag = lag
        self._decisions = decisions
        self._verdicts.clear()
        self._recomputed = {path: [] for path in recomputed}
        self._op_scopes = {}
        for path in self._layers.values():
            names_in_layer = [name for name in decisions if name.startswith(f"{path}.")]
            if path in self._recomputed:
                # A checkpoint saves the inputs, and does not name them.
                self._recomputed[path] = [n for n in names_in_layer if decisions[n] != "recompute"]
            else:
                decided = {decisions[name] for name in names_in_layer}
                self._op_scopes[path] = [OP_SCOPES[word] for word in OP_SCOPES if word in decided]

    def _why_bypassed(self) -> str | None:
        """Why the schedule does not handle a call, or None; "" where the report need not say so."""
        if self.paused or not torch.is_grad_enabled() or torch_private.in_backward():
            return ""
        top = torch_private.top_saved_tensor_hooks()
        if is_ledger(top):
            return ""
        if belongs_to_checkpoint(top):
            return "recomputed by checkpoint"
        if next(open_scopes(), None) is not None:
            return "an offload scope around it decides"
        if top is not None and isinstance(top[0], PackHook) and top[0].scope is not self:
            return "another scheduler around it decides"
        if torch_private.functorch_level() is not None:
            return "inside a torch.func transform"
        return None

    # --- saving

    def pack_torch_saved(self, t: Tensor, caller: FrameType | None) -> Handle:
        running = self._thread_calls.running[-1]
        named = running.labels.name_torch_saved(t, caller)
        if running.inputs and t.numel():
            named = named._replace(names=(running.inputs.pop(0),), stable=False)
        return self.pack_one(t, named, self._verdicts, running.kept_entries)

    def pack(self, tensors: Sequence[Tensor], named: Sequence[SavedName]) -> list[Handle]:
        self._flush_entries()
        return super().pack(tensors, named)

    def _flush_entries(self) -> None:
        for running in self._thread_calls.running:
            self._ledger.add_all(running.kept_entries)

    def _is_alone(self) -> bool:
        return self._thread_calls.running[-1].alone

    def _note_kept(self, node: KnownNode, storages: Sequence[torch.UntypedStorage]) -> None:
        if self._offloaded.isdisjoint(node.names):
            self.names.update(node.names)
        else:
            self.names.update((n, "keep") for n in node.names if n not in self._offloaded)
        if self._resident is not None:
            self._resident.set_all([storages[n] for n in node.kept], node.kept_names)

    def _stay(self, t: Tensor, entry: Entry, storage: torch.UntypedStorage | None = None) -> Kept:
        running, resident = self._thread_calls.running[-1], self._resident
        if storage is not None and entry.name not in self._offloaded:
            self.names[entry.name] = "keep"
        if storage is not None and resident is not None and resident.get(storage) != entry.name:
            resident.set(storage, entry.name)
        if running.token is None and running.call is not None:
            running.token = CallToken(self.mover, running.call)
        return Kept(t, entry, self._ledger, running.token)

    def _call_for(self, record: Record) -> LayerRun:
        call: Any = self._thread_calls.running[-1].call  # the hooks are installed only then
        of_layer: LayerRun = call
        return of_layer

    def _move(self, t: Tensor, verdict: Verdict) -> Handle | str:
        handle = self._mover.save(self._thread_calls.running[-1].call, t, verdict, self._ledger)
        if not isinstance(handle, str):
            self.names[verdict.entry.name] = "offload" if verdict.coding is None else "quantize"
            self._offloaded.add(verdict.entry.name)
        return handle

    def _coding(self, t: Tensor, named: SavedName) -> Coding | str:
        return coding_of(Candidate.of(t, named), self._quantize_globs(named.name))

    def _quantize_globs(self, name: str) -> tuple[str, ...]:
        """Globs of tensors that may be rounded: all in a storage that a plan quantizes, else those of the policy."""
        planned = self._decisions.get(name)
        if planned is not None:
            return ("**",) if planned == "quantize" else ()
        return () if self._policy is None else tuple(self._policy.quantize)

    def _share(self, t: Tensor, named: SavedName | Entry, record: Record) -> Handle:
        coding = record.coding
        why = None if coding is None else self._why_not_rounded(t, named, record, coding)
        if why is None:
            return super()._share(t, named, record)
        nbytes = record.storage_nbytes if self._counted.set_if_new(t.untyped_storage(), True) else 0
        return self._keep(t, named, why, nbytes)

    def _why_not_rounded(
        self, t: Tensor, named: SavedName | Entry, record: Record, coding: Coding
    ) -> str | None:
        """Why t is kept exact although its storage is offloaded as codes, or None."""
        why: str | None = f"not {dtype_name(coding.dtype)}"
        if t.dtype == coding.dtype:
            names = (named.name, *named.also)
            why = exact_by_name(names, self._quantize_globs(record.name))
        return None if why is None else f"its storage leaves as codes; {why}"

    def _reason(self, t: Tensor, named: SavedName) -> tuple[str | None, str]:
        reason, why = super()._reason(t, named)
        here = self._mover.lanes.device
        if reason is None and t.device != here:
            reason = f"on {t.device}, in a scheduler that moves from {here}"
        return reason, why

    def _by_policy(self, t: Tensor, named: SavedName) -> tuple[str | None, str]:
        return self._why_not_chosen(t, named), "policy"

    def _why_not_chosen(self, t: Tensor, named: SavedName) -> str | None:
        planned = self._decisions.get(named.name)
        if planned is not None:
            return None if planned in ("offload", "quantize") else "planned"
        if self._policy is None or self._resident is None:
            return "not in the plan"
        resident = self._resident.get(t.untyped_storage())
        if resident is not None:
            return f"in the storage of {resident}, which stays"
        return self._policy.why_keep(Candidate.of(t, named), self._thread_calls.running[-1].quota)


class Hook:
    """A `Hook` is a module hook of a scheduler. A copy or a pickle of the model comes without the scheduler."""

    enters = False

    def __init__(self, callback: Callable[..., None] | None = None) -> None:
        self.callback = callback

    def __reduce__(self) -> Any:
        return type(self), ()

    def __call__(self, *given: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self.callback is not None:
            self.callback(*given)
        elif self.enters:
            torch_private.remove_forward_hooks(given[0], is_copied)


class EntryHook(Hook):
    """An `EntryHook` is one before a forward. In a copy of the model its first call removes those of the scheduler,
    since what has hooks fuses with nothing around it. (torch goes through hooks behind a forward while it calls them.)
    """

    enters = True


def is_copied(hook: object) -> bool:
    """Whether a hook is that of a scheduler that did not come along with a copy of its model."""
    return isinstance(hook, Hook) and hook.callback is None


class InterruptGuard:
    """An `InterruptGuard` wraps the calls of a layer, since torch calls no hook for an error such as KeyboardInterrupt.

    A copy or a pickle of the module is without it, as it is without the wrapper of `Module.compile`.
    """

    def __init__(self, scope: LayerScope, module: nn.Module) -> None:
        self.scope: LayerScope | None = scope
        self.module = weakref.ref(module)
        self.inner = torch_private.replace_call(module, self)

    def remove(self) -> None:
        """Remove it from the calls, also from below later wrappers."""
        self.scope, module = None, self.module()
        if module is not None:
            torch_private.replace_call(
                module, without_wrapper(torch_private.replaced_call(module), self)
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call, scope = self.inner or cast(nn.Module, self.module())._call_impl, self.scope
        if scope is None or torch.compiler.is_compiling():
            return call(*args, **kwargs)
        try:
            return call(*args, **kwargs)
        except Exception:
            raise  # the hooks have seen it
        except BaseException:
            scope.forget_interrupted()
            raise
        finally:
            if self.scope is None:
                scope.close()  # detached during the call, whose end no hook has seen


torch_private.never_compile(Hook.__call__)
