"""The scopes. Each is a pair of saved-tensor hooks, and the innermost one decides.

Other hooks inside a scope win, for what they enclose; the report names the modules that this
happened to. Inside a checkpoint (use_reentrant=False) a scope takes its tensors before the
checkpoint sees them: they are moved or kept instead of recomputed, and the report says so. While
autograd runs a backward, scopes stand aside: what a recomputation saves is used at once.
`torch.compile`d regions save what the partitioner chose, under names of torch's. `torch.func`
refuses to run under saved-tensor hooks; under `disabled()` it runs.
"""

import logging
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.observe import modules
from fuseops.observe.labels import Labels, Named, paths_under
from fuseops.ops import names
from fuseops.ops import scopes as settings
from fuseops.run.config import set_root

from . import marks, records
from .arguments import whole_number
from .lanes.devices import lanes_of
from .nesting import Disabled, Guarded, PackHook, belongs_to_checkpoint, enclosing, take_out
from .policy import DEFAULT_MIN_BYTES, too_small
from .reasons import HELD_ANYWAY, PARAMETER, Owned, TensorFacts, mark_on, why_keep, why_not_plain
from .records import Handle, Kept, Label, Moved, Mover, Watch
from .report import KEPT, MISSED, MOVED, SHARED, Entry, Ledger, Report
from .schedule import LayerRun, Schedule
from .storages import StorageMap

log = logging.getLogger("fuseops.offload")

IN_FLIGHT = 6  # copies under way before compute waits for the oldest, to reuse its memory (CUDA)


class Scope(Guarded):
    """What all scopes share: hooks, names, the report, and when they stand aside."""

    def __init__(self, root: nn.Module | None = None) -> None:
        super().__init__()
        self.in_checkpoint = False
        self._root = root
        self._hook = PackHook(self)
        self._ledger = Ledger(str(self))
        self._owned, self._labels = Owned(), Labels(None)
        self._counted: StorageMap[bool] = StorageMap()  # kept storages, each counted once
        self._observed: AbstractContextManager[None] = names.observe()

    def report(self) -> Report:
        """What this scope, and those inside it, saw and did up to now."""
        return self._ledger.report()

    # --- entering and leaving

    def _open(self) -> None:
        self.in_checkpoint = belongs_to_checkpoint(torch_private.top_saved_tensor_hooks())
        self._inherit(next((s for s in enclosing() if isinstance(s, Scope)), None))
        self._know_root()
        torch_private.push_saved_tensor_hooks(self._hook, records.unpack)  # torch may refuse it
        self._observed = names.observe()
        self._observed.__enter__()
        modules.watch(self)

    def _know_root(self) -> None:
        if self._root is not None:
            set_root(self._root)
            self._labels = Labels(paths_under(self._root))
            self._owned.note_model(self._root)

    def _inherit(self, outer: "Scope | None") -> None:
        self._ledger.inside(None if outer is None else outer._ledger)
        if outer is not None:
            self._owned, self._labels = outer._owned, outer._labels

    def _close(self) -> None:
        take_out(self._hook)
        modules.unwatch(self)
        self._observed.__exit__(None, None, None)
        if log.isEnabledFor(logging.INFO):
            log.info("%s", self.report().summary())

    def module_entered(self, module: nn.Module) -> None:
        """Sees every module that runs in this scope, before its forward."""
        self._owned.note(module._parameters.values(), PARAMETER)
        top = torch_private.top_saved_tensor_hooks()
        if top is None or top[0] is self._hook:
            return
        if torch_private.is_checkpoint_hook(top[0]):
            why = "recomputed by checkpoint"
        else:
            why = f"other saved-tensor hooks inside the scope: {_described(top[0])}"
        path = (self._labels.paths or {}).get(id(module)) or type(module).__name__
        self._ledger.saw(Entry(path, type(module).__name__, (), None, 0, MISSED, why))

    # --- saving

    def pack(self, t: Tensor) -> Handle:
        """The pack hook: name the tensor, decide, do it, report it."""
        named, aside = self._named(t), self._aside(t)
        return self._decide(t, named) if aside is None else self._keep(t, named, *aside)

    def _aside(self, t: Tensor) -> tuple[str, int] | None:
        """Why there is nothing to decide, and the bytes of t."""
        odd = why_not_plain(t)
        if odd is not None:
            return odd, 0
        why = self._why_aside(t)
        return None if why is None else (why, t.untyped_storage().nbytes())

    def _named(self, t: Tensor) -> Named:
        if self._ledger.take_backward_seen():
            self._labels.start_again()
        return self._labels.name(t)

    def _why_aside(self, t: Tensor) -> str | None:
        if t.is_cuda and torch_private.is_capturing():
            return self._why_not_captured()
        if not torch_private.in_backward():
            return None
        return "recomputed by checkpoint" if self.in_checkpoint else "inside backward"

    def _why_not_captured(self) -> str | None:
        return "CUDA graph capture"

    def _decide(self, t: Tensor, named: Named) -> Handle:
        raise NotImplementedError

    def _keep_counted(self, t: Tensor, named: Named, reason: str) -> Handle:
        """Keep a tensor, whose storage counts once."""
        storage = t.untyped_storage()
        return self._keep(
            t, named, reason, storage.nbytes() if self._counts(storage, reason) else 0
        )

    def _counts(self, storage: torch.UntypedStorage, reason: str) -> bool:
        """Whether bytes that stay are counted now: once, and not when a model holds them anyway."""
        if reason in HELD_ANYWAY or self._counted.get(storage) is not None:
            return False
        self._counted.set(storage, True)
        return True

    def _keep(self, t: Tensor, named: Named, reason: str, nbytes: int) -> Handle:
        self._report(t, named, KEPT, reason, nbytes)
        return self._kept(t, Label(named.name, named.op))

    def _kept(self, t: Tensor, label: Label) -> Kept:
        return Kept(t, label, self._ledger)

    def _report(self, t: Tensor, named: Named, decision: str, reason: str, nbytes: int) -> None:
        self._ledger.saw(self._entry(t, named, decision, reason, nbytes))

    def _entry(self, t: Tensor, named: Named, decision: str, reason: str, nbytes: int) -> Entry:
        if self.in_checkpoint and decision == MOVED:
            reason += "; instead of recompute by checkpoint"
        shape = tuple(t.shape)
        return Entry(named.name, named.op, shape, t.dtype, nbytes, decision, reason, named.also)


class _ToHost(Scope):
    """Every storage that moves is a layer call of its own for the schedule."""

    def __init__(self, min_bytes: int, root: nn.Module | None) -> None:
        self._min_bytes = min_bytes
        self._on_gpu = root is not None and any(p.is_cuda for p in root.parameters())
        self._movers: dict[torch.device, Mover] = {}
        super().__init__(root)

    def __str__(self) -> str:
        return f"to_host(min_bytes={self._min_bytes})"

    def _close(self) -> None:
        for mover in self._movers.values():
            mover.close()
        super()._close()

    def _mover(self, device: torch.device) -> Mover:
        mover = self._movers.get(device)
        if mover is None:
            lag = IN_FLIGHT if device.type == "cuda" else 0
            lanes = lanes_of(device)
            mover = Mover(Schedule(lanes, lag=lag, small=0, keep_last=False), lanes)
            self._movers[device] = mover
        return mover

    def _decide(self, t: Tensor, named: Named) -> Handle:
        self._on_gpu = self._on_gpu or t.is_cuda
        mark = mark_on(t, named)
        reason, why = (
            why_keep(t, named, TensorFacts(self._owned, mark, self._on_gpu)),
            "marked offload",
        )
        if reason is None and mark != marks.OFFLOAD:
            why = f"min_bytes={self._min_bytes} reached"
            reason = too_small(t.untyped_storage().nbytes(), self._min_bytes)
        if reason is not None:
            return self._keep_counted(t, named, reason)
        return self._move(t, named, why)

    def _move(self, t: Tensor, named: Named, why: str) -> Handle:
        record = records.find(t)
        if record is not None:
            self._report(t, named, SHARED, f"in the storage of {record.name}", 0)
            record.mover.share(record.call, record.item)
            return Moved(t, Label(named.name, named.op), record, record.call, self._ledger)
        mover = self._mover(t.device)
        call = mover.enter(named.name)
        try:
            return self._save(t, named, why, mover, call)
        finally:
            mover.leave(call)

    def _save(self, t: Tensor, named: Named, why: str, mover: Mover, call: LayerRun) -> Handle:
        nbytes = t.untyped_storage().nbytes()
        entry = self._entry(t, named, MOVED, why, nbytes)
        record = mover.save(call, t, marks.ready(t), Watch(t, entry, self._ledger))
        if isinstance(record, str):
            log.warning("%s stays: %s", named.name, record)
            return self._keep_counted(t, named, record)
        self._ledger.saw(entry)
        self._ledger.moved(record)
        return Moved(t, Label(named.name, named.op), record, call, self._ledger)


class _Keep(Scope):
    def __str__(self) -> str:
        return "keep()"

    def _decide(self, t: Tensor, named: Named) -> Handle:
        instead = "; instead of recompute by checkpoint" if self.in_checkpoint else ""
        reason = self._owned.why(t, named.is_param) or f"{self}{instead}"
        return self._keep_counted(t, named, reason)


def _described(hook: object) -> str:
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    return f"{getattr(hook, '__module__', '?')}.{name}"


# --- the public scopes


def to_host(*, min_bytes: int = DEFAULT_MIN_BYTES, root: nn.Module | None = None) -> Scope:
    """Move what autograd saves in this scope to host memory; bring it back when backward reads it.

    Pinned memory on CUDA, other host buffers on CPU. What comes back is equal bit for bit, in the
    same layout; writing a saved tensor in place raises InPlaceError when its backward runs.
    Parameters and the like stay: `report()` of the scope lists every tensor with its reason.
    min_bytes: tensors in smaller storages stay, unless marked.
    root: the model; names of saved tensors are paths in it, and its buffers are known.
    Raises FuseOpsError for a value of the wrong kind.
    """
    whole_number(min_bytes, "to_host(min_bytes=...), in bytes,")
    if root is not None and not isinstance(root, nn.Module):
        raise FuseOpsError(
            f"to_host(root=...) expects the model, an nn.Module, got {type(root).__name__}."
        )
    return _ToHost(min_bytes, root)


def keep() -> Scope:
    """Leave what autograd saves in this scope on its device: guarded against writes in place, and
    reported.
    """
    return _Keep()


def disabled() -> Disabled:
    """As if no offload scope were open: torch saves as always, with its own in-place check, and
    nothing is reported.
    """
    return Disabled()


def recompute() -> AbstractContextManager[None]:
    """Ops that declare which saved fields they can do without drop them, and compute them again in
    the backward. Other modules are recomputed as a whole, by `torch.utils.checkpoint`.
    """
    return settings.scope((("recompute", True),))
