"""The scopes. Each is a pair of saved-tensor hooks, and the innermost one decides.

Other hooks inside a scope win, for what they enclose; the report names the modules that this
happened to. Inside a checkpoint (use_reentrant=False) a scope takes its tensors before the
checkpoint sees them: they are moved or kept instead of recomputed, and the report says so. While
autograd runs a backward, scopes stand aside: what a recomputation saves is used at once.
`torch.compile`d regions save what the partitioner chose, under names of torch's. `torch.func`
refuses to run under saved-tensor hooks; under `disabled()` it runs.
"""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.observe import modules
from fuseops.observe.labels import Labels, paths_under
from fuseops.ops import names
from fuseops.ops import scopes as settings
from fuseops.ops.names import SavedName
from fuseops.run.config import set_root
from fuseops.torch_private import NO_BACKWARD, is_functorch_wrapped, storage_key

from . import marks, records
from .arguments import whole_number
from .codes import Coding
from .lanes.devices import lanes_of
from .nesting import Disabled, Guarded, PackHook, belongs_to_checkpoint, enclosing, take_out
from .policy import DEFAULT_MIN_BYTES, too_small
from .reasons import HELD_ANYWAY, PARAMETER, PLAIN, Owned, mark_on, why_keep, why_not_plain
from .records import Handle, Judged, Kept, Moved, Mover, Record
from .report import KEPT, MISSED, MOVED, SHARED, Entry, Ledger, Report
from .schedule import LayerRun, Schedule
from .storages import StorageMap

log = logging.getLogger("fuseops.offload")

# saved tensors that differ in name, shape or the like; beyond so many all are judged anew
REMEMBERED = 1 << 15
KINDS_OF_SCOPES = 16  # whose findings are remembered
INSIDE_BACKWARD = ("inside backward", "recomputed by checkpoint")  # in a checkpoint
IN_FLIGHT = 6  # copies under way before compute waits for the oldest, to reuse its memory (CUDA)


# what scopes of one kind found, for the next ones: a step may open a scope of its own
_promised: dict[tuple[str, bool], dict[Any, Judged]] = {}


class Scope(Guarded):
    """A `Scope` has what all scopes share: hooks, names, the report, and when they stand aside."""

    # what lies in a storage that leaves goes with it, however it would be judged
    _goes_along = False
    _not_captured: str | None = "CUDA graph capture"  # why what a captured graph saves stays

    def __init__(self, root: nn.Module | None = None) -> None:
        super().__init__()
        self.in_checkpoint = False
        self._on_gpu = False  # what leaves lies on CUDA devices
        self._resident: StorageMap[str] | None = None  # of what stays, where a policy asks for it
        self._root = root
        self._hook = PackHook(self)
        self._ledger = Ledger(str(self))
        self._owned, self._labels = Owned(), Labels(None)
        self._counted: StorageMap[bool] = StorageMap()  # kept storages, each counted once
        self._judged: dict[Any, Judged] = {}
        self._lasting = True  # what was judged holds for the next call
        self._judged_promised = self._judged  # of tensors that ops of fuseops save

    def report(self) -> Report:
        """What this scope, and those inside it, saw and did up to now."""
        return self._ledger.report()

    # --- entering and leaving

    def _open(self) -> None:
        self._judged.clear()
        self.in_checkpoint = belongs_to_checkpoint(torch_private.top_saved_tensor_hooks())
        kind = (self._ledger.scope, self.in_checkpoint)
        if len(_promised) >= KINDS_OF_SCOPES and kind not in _promised:
            _promised.clear()
        self._judged_promised = _promised.setdefault(kind, {})
        self._inherit(next((s for s in enclosing() if isinstance(s, Scope)), None))
        if self._root is not None:
            self._know_root(self._root)
        torch_private.push_saved_tensor_hooks(self._hook, records.unpack)  # torch may refuse it
        names.thread.observers += 1
        modules.watch(self.module_entered)

    def _know_root(self, root: nn.Module) -> None:
        set_root(root)
        self._labels = Labels(paths_under(root))
        self._owned.note_model(root)

    def _inherit(self, outer: "Scope | None") -> None:
        self._ledger.inside(None if outer is None else outer._ledger)
        if outer is not None:
            self._owned, self._labels = outer._owned, outer._labels

    def _close(self) -> None:
        take_out(self._hook)
        modules.unwatch(self.module_entered)
        names.thread.observers -= 1
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
        path = self._labels.paths.get(id(module)) or type(module).__name__
        self._count()
        self._ledger.saw(Entry(path, type(module).__name__, (), None, 0, MISSED, why))

    def _count(self) -> None:
        """Has the report count what it has not yet, before what comes now."""

    # --- saving

    def pack(self, tensors: Sequence[Tensor], named: Sequence[SavedName]) -> list[Handle]:
        """Decide about all that a node saves, do it, report it."""
        judged = self._judged_promised if named[0].owners is None else self._judged
        packed: list[Handle] = []
        stayed: list[Entry] = []
        for t, known in zip(tensors, named, strict=True):
            packed.append(self.pack_one(t, known, judged, stayed))
        if stayed:
            self._ledger.take(stayed)
        return packed

    def pack_torch_saved(self, t: Tensor, below: FrameType | None) -> Handle:
        """The same of a tensor that no op of fuseops saves. below: the frame that called the pack hook"""
        if self._ledger.take_backward_seen():
            self._labels.restart()
        return self.pack((t,), (self._labels.name_torch_saved(t, below),))[0]

    def pack_one(
        self, t: Tensor, named: SavedName, judged: dict[Any, Judged], stayed: list[Entry]
    ) -> Handle:
        """Decide about a saved tensor, and do it. What is the same in every step is found out once.

        judged  of what is alike, by all that tells it from others
        stayed  one after the other, which the report counts in one go: moves, which it counts at once, come after
        """
        aside = None  # found without a call for each: most are
        plain = type(t) in PLAIN and t.layout is torch.strided and (t.is_cuda or t.is_cpu)
        odd = t.is_quantized or t.is_nested or t._is_zerotensor()
        if not plain or odd or is_functorch_wrapped(t):
            aside = why_not_plain(t)
        if aside is None and self._not_captured and t.is_cuda and torch_private.is_capturing():
            aside = self._not_captured
        if aside is None and torch_private.backward_now() != NO_BACKWARD:
            aside = INSIDE_BACKWARD[self.in_checkpoint]
        if aside is not None:
            self._ledger.take(stayed)
            return self._keep(t, named, aside, _bytes_of(t))
        storage = t.untyped_storage()
        if self._goes_along and storage_key(storage) in records.thread.records:
            record = records.find(t)
            if record is not None:
                self._ledger.take(stayed)
                return self._share(t, named, record)
        resident, mark = self._resident, None
        which: int | str = id(named)
        if not named.lasts:
            which, mark = named.name, mark_on(t, named)
        elif marks.marked.entries:
            mark = marks.marked.get(storage)
        facts = (
            which,
            mark,
            marks.module_changes,
            self._owned.storages.get(storage),
            self._on_gpu,
            resident and resident.get(storage),
            type(t),
            type(t._base),
            t.shape,
            t.dtype,
            t.device,
            storage.nbytes(),
        )
        found = judged.get(facts)
        if found is None:
            found = self._judge(t, named)
            if len(judged) >= REMEMBERED:
                judged.clear()
            if self._lasting:
                judged[facts] = found
        entry = found.entry
        if entry.decision == MOVED:
            if stayed:
                self._ledger.take(stayed)
            handle = self._move(t, found)
            if not isinstance(handle, str):
                return handle
            entry = entry._replace(decision=KEPT, reason=handle)
        if entry.nbytes and not self._counted.first(storage, True):
            entry = found.again if entry is found.entry else entry._replace(nbytes=0)
        stayed.append(entry)
        return self._stay(t, entry, storage)

    def _judge(self, t: Tensor, named: SavedName) -> Judged:
        reason, why = self._reason(t, named)
        nbytes = 0 if reason in HELD_ANYWAY else t.untyped_storage().nbytes()
        decision = MOVED if reason is None else KEPT
        coding = self._coding(t, named) if reason is None else ""
        if coding:
            why += "; as float8 codes" if isinstance(coding, Coding) else f"; exact: {coding}"
        entry = self._entry(t, named, decision, reason or why, nbytes)
        coded = coding if isinstance(coding, Coding) else None
        return Judged(entry, entry._replace(nbytes=0), named, coded)

    def _coding(self, t: Tensor, named: SavedName) -> Coding | str:
        """How t is quantized before it leaves, or why it is not: "" where nobody asks for it."""
        return ""

    def _reason(self, t: Tensor, named: SavedName) -> tuple[str | None, str]:
        """Why t stays, or None; and why it is moved then."""
        mark = mark_on(t, named)
        reason = why_keep(t, named, self._owned, mark, self._moves_from_cuda(t))
        if reason is not None or mark == marks.OFFLOAD:
            return reason, "marked offload"
        return self._by_policy(t, named)

    def _moves_from_cuda(self, t: Tensor) -> bool:
        """Whether what leaves, t included, lies on CUDA devices: what lies on the CPU stays then."""
        raise NotImplementedError

    def _by_policy(self, t: Tensor, named: SavedName) -> tuple[str | None, str]:
        """The same, of what neither a mark nor the model decides."""
        raise NotImplementedError

    def _move(self, t: Tensor, found: Judged) -> Handle | str:
        """Have its storage leave; or why it stays."""
        raise NotImplementedError

    def _call_of(self, record: Record) -> LayerRun | None:
        """The call that saves one more tensor in the storage of a record."""
        return record.call

    def _share(self, t: Tensor, named: SavedName | Entry, record: Record) -> Handle:
        """One more saved tensor lies in a storage that leaves."""
        call, why = self._call_of(record), f"in the storage of {record.name}"
        entry = self._entry(t, named, SHARED, why, 0)
        self._ledger.saw(entry)
        mover: Any = record.mover()  # who saves in its storage has it
        mover.share(call, record)
        return Moved(t, entry, record, call, mover, self._ledger)

    def _keep(self, t: Tensor, named: SavedName | Entry, reason: str, nbytes: int) -> Handle:
        entry = self._entry(t, named, KEPT, reason, nbytes)
        self._ledger.saw(entry)
        return self._stay(t, entry)

    def _stay(self, t: Tensor, entry: Entry, storage: torch.UntypedStorage | None = None) -> Kept:
        """Have t stay. storage: of t, where it was judged."""
        return Kept(t, entry, self._ledger)

    def _entry(
        self, t: Tensor, named: SavedName | Entry, decision: str, reason: str, nbytes: int
    ) -> Entry:
        if self.in_checkpoint and decision == MOVED:
            reason += "; instead of recompute by checkpoint"
        shape = () if t.is_nested and t.layout is torch.strided else tuple(t.shape)  # has none
        return Entry(named.name, named.op, shape, t.dtype, nbytes, decision, reason, named.also)


class _ToHost(Scope):
    """A `_ToHost` has what moves leave node by node, in no call of a layer."""

    def __init__(self, min_bytes: int, root: nn.Module | None) -> None:
        self._min_bytes = min_bytes
        self._movers: dict[torch.device, Mover] = {}
        super().__init__(root)
        self._on_gpu = root is not None and any(p.is_cuda for p in root.parameters())

    def __str__(self) -> str:
        return f"to_host(min_bytes={self._min_bytes})"

    def _close(self) -> None:
        for mover in self._movers.values():
            mover.close()
        super()._close()

    def _new_mover(self, device: torch.device) -> Mover:
        lag, lanes = IN_FLIGHT if device.type == "cuda" else 0, lanes_of(device)
        mover = Mover(Schedule(lanes, lag=lag, keep_last=False), lanes)
        self._movers[device] = mover
        return mover

    def _moves_from_cuda(self, t: Tensor) -> bool:
        self._on_gpu = self._on_gpu or t.is_cuda
        return self._on_gpu

    def _by_policy(self, t: Tensor, named: SavedName) -> tuple[str | None, str]:
        small = too_small(t.untyped_storage().nbytes(), self._min_bytes)
        return small, f"min_bytes={self._min_bytes} reached"

    def _move(self, t: Tensor, found: Judged) -> Handle | str:
        record = records.find(t)
        if record is not None:
            return self._share(t, found.entry, record)
        mover = self._movers.get(t.device) or self._new_mover(t.device)
        return mover.save(None, t, found, self._ledger)

    def pack(self, tensors: Sequence[Tensor], named: Sequence[SavedName]) -> list[Handle]:
        packed = super().pack(tensors, named)
        for mover in self._movers.values():
            if mover.node:
                mover.depart()
        return packed


class _Keep(Scope):
    def __str__(self) -> str:
        return "keep()"

    def _reason(self, t: Tensor, named: SavedName) -> tuple[str | None, str]:
        instead = "; instead of recompute by checkpoint" if self.in_checkpoint else ""
        return self._owned.why(t, named.is_param) or f"{self}{instead}", ""


def _bytes_of(t: Tensor) -> int:
    """Of the storage of t, where it has one."""
    return 0 if why_not_plain(t) is not None else t.untyped_storage().nbytes()


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


def dispatch_again() -> AbstractContextManager[None]:
    """Experts over ranks (`fuseops.distributed.ExpertParallel`) save the tokens of their own rank in the place of those
    that arrived, and dispatch them again in the backward: the same numbers to the bit, for one more way there. Where
    the rule `routed_mlp` does not run nothing changes.
    """
    return settings.scope((("dispatch_again", True),))
