"""The scopes. Each is a pair of saved-tensor hooks, and the innermost one decides.

Other hooks inside a scope override it for what they enclose; the report names the modules. Inside a checkpoint
(use_reentrant=False) a scope packs tensors before the checkpoint: they are moved or kept instead of recomputed, and the
report says so. While autograd runs a backward, scopes keep everything, since a recomputation reads what it saves at
once. `torch.compile`d regions save what the partitioner chose, under torch's names. `torch.func` refuses to run under
saved-tensor hooks; under `disabled()` it runs.
"""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import repeat
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from fuseops import torch_private
from fuseops.arguments import check_integers
from fuseops.errors import FuseOpsError
from fuseops.observe import modules
from fuseops.observe.labels import Labels
from fuseops.ops import names
from fuseops.ops import scopes as settings
from fuseops.ops.names import SavedName
from fuseops.plain import PLAIN
from fuseops.run.config import set_root
from fuseops.torch_private import NO_BACKWARD, is_functorch_wrapped, is_zerotensor, storage_key

from . import marks, nodes, records
from .codes import Coding
from .lanes.devices import lanes_of
from .nesting import (
    Disabled,
    NestedScope,
    PackHook,
    belongs_to_checkpoint,
    open_scopes,
    remove_hook,
)
from .policy import DEFAULT_MIN_BYTES, too_small
from .reasons import (
    MODEL_OWNED,
    PARAMETER,
    ModelStorages,
    effective_mark,
    why_keep,
    why_not_plain,
)
from .records import Handle, Kept, Ledger, Moved, Mover, Record, Verdict
from .report import KEPT, MISSED, MOVED, SHARED, Entry, Report
from .schedule import DEFAULT, LayerRun, Schedule
from .storages import StorageMap

log = logging.getLogger("fuseops.offload")

# cached verdicts of a scope, by name, shape and the like; beyond so many the cache is cleared. More than a step of most
# models has; where row counts differ from step to step, what is cached is of no more use
MAX_VERDICTS = 1 << 13
MAX_SCOPE_KINDS = 16  # whose verdicts are cached
INSIDE_BACKWARD = ("inside backward", "recomputed by checkpoint")  # in a checkpoint
IN_FLIGHT = 6  # copies under way before compute waits for the oldest, to reuse its memory (CUDA)
SETTINGS = {"cuda": DEFAULT._replace(lag=IN_FLIGHT), "cpu": DEFAULT._replace(lag=0)}


# verdicts and known nodes that scopes of one kind share, as each step may open a new scope
_shared_verdicts: dict[tuple[str, bool], dict[Any, Any]] = {}


class Scope(NestedScope):
    """A `Scope` is the base of all scopes: hooks, names, the report, and the tensors that no scope moves."""

    # a tensor in an offloaded storage is offloaded with it, whatever its own verdict would be
    _shares_storages = False
    # why tensors that a captured graph saves are kept
    _capture_reason: str | None = "CUDA graph capture"

    def __init__(self, root: nn.Module | None = None) -> None:
        super().__init__()
        self.in_checkpoint = False
        self._alone = False  # no other saved-tensor hooks are around it
        self._on_gpu = False  # CUDA tensors are offloaded, CPU tensors kept
        self._resident: StorageMap[str] | None = None  # kept storages, where a policy needs them
        self._root = root
        self._hook = PackHook(self)
        self._ledger = Ledger(str(self))
        self._model_storages, self._labels = ModelStorages(), Labels(None)
        self._counted: StorageMap[bool] = StorageMap()  # kept storages, each counted once
        self._verdicts: dict[Any, Any] = {}  # and known nodes
        self._cacheable = True  # a verdict holds for the next call too
        self._fuseops_verdicts = self._verdicts  # for tensors that ops of fuseops save

    def report(self) -> Report:
        """The report of this scope and those inside it, up to now."""
        self._flush_entries()
        return self._ledger.report()

    # --- entering and leaving

    def _open(self) -> None:
        self._verdicts.clear()
        self.in_checkpoint = belongs_to_checkpoint(torch_private.top_saved_tensor_hooks())
        kind = (self._ledger.scope, self.in_checkpoint)
        if len(_shared_verdicts) >= MAX_SCOPE_KINDS and kind not in _shared_verdicts:
            _shared_verdicts.clear()
        self._fuseops_verdicts = _shared_verdicts.setdefault(kind, {})
        self._inherit(next((s for s in open_scopes() if isinstance(s, Scope)), None))
        if self._root is not None:
            self._set_root(self._root)
        self._alone = torch_private.top_saved_tensor_hooks() is None
        torch_private.push_saved_tensor_hooks(self._hook, records.unpack)  # torch may refuse it
        names.thread.observers += 1
        modules.watch(self.module_entered)

    def _set_root(self, root: nn.Module) -> None:
        set_root(root)
        self._labels = Labels.under(root)
        self._model_storages.add_model(root)

    def _inherit(self, outer: "Scope | None") -> None:
        self._ledger.nest_in(None if outer is None else outer._ledger)
        if outer is not None:
            self._model_storages, self._labels = outer._model_storages, outer._labels

    def _close(self) -> None:
        remove_hook(self._hook)
        modules.unwatch(self.module_entered)
        names.thread.observers -= 1
        if log.isEnabledFor(logging.INFO):
            log.info("%s", self.report().summary())

    def module_entered(self, module: nn.Module) -> None:
        """Called before the forward of every module that runs in this scope."""
        self._model_storages.add(module._parameters.values(), PARAMETER)
        top = torch_private.top_saved_tensor_hooks()
        if top is None or top[0] is self._hook:
            return
        if torch_private.is_checkpoint_hook(top[0]):
            why = "recomputed by checkpoint"
        else:
            why = f"other saved-tensor hooks inside the scope: {_describe_hook(top[0])}"
        path = self._labels.paths.get(id(module)) or type(module).__name__
        self._flush_entries()
        self._ledger.add(Entry(path, type(module).__name__, (), None, 0, MISSED, why))

    def _flush_entries(self) -> None:
        """Add entries that are not in the report yet, so that it keeps their order."""

    # --- saving

    def pack(self, tensors: Sequence[Tensor], named: Sequence[SavedName]) -> list[Handle]:
        """Decide about all tensors that a node saves, move or keep them, and report it.

        -> their handles; without those at the end that torch keeps itself
        """
        verdicts = self._fuseops_verdicts if named[0].owners is None else self._verdicts
        key = self._node_key(tensors, named)
        node = None if key is None else verdicts.get(key)
        if node is not None and not self._keeps_all():
            as_before = self._pack_known(node, tensors)
            if as_before is not None:
                return as_before
        packed: list[Handle] = []
        kept_entries: list[Entry] = []
        followed: list[tuple[Verdict, str | None]] = []
        for t, known in zip(tensors, named, strict=True):
            packed.append(self.pack_one(t, known, verdicts, kept_entries, followed))
        if kept_entries:
            self._ledger.add_all(kept_entries)
        if key is not None and len(followed) == len(tensors) and nodes.own_storages(tensors):
            known_node = nodes.KnownNode(tensors, named, followed, self._model_storages)
            _remember(verdicts, key, known_node)
        return packed

    def _node_key(self, tensors: Sequence[Tensor], named: Sequence[SavedName]) -> Any:
        """The key of a `KnownNode`, or None where verdicts about a node's tensors may not last."""
        if named[0].owners is not None or not self._cacheable or tensors[0].is_nested:
            return None
        return id(named), marks.module_changes, self._on_gpu, tensors[0].shape

    def _keeps_all(self) -> bool:
        """Whether everything that is saved now is kept."""
        if torch_private.current_backward() != NO_BACKWARD:
            return True
        return bool(self._capture_reason) and self._on_gpu and torch_private.is_capturing()

    def _pack_known(self, node: nodes.KnownNode, tensors: Sequence[Tensor]) -> list[Handle] | None:
        """`pack` of a node whose tensors are as they were, or None."""
        storages = node.storages_of(tensors, self._model_storages, self._resident)
        if storages is None or (self._shares_storages and records.any_offloaded(storages)):
            return None
        before: list[bool | None] = []
        if node.counted:
            counted = [storages[n] for n in node.counted]
            before = self._counted.get_all(counted)
            self._counted.set_all(counted, repeat(True))
        self._ledger.add_group(node.group(before))
        self._note_kept(node, storages)
        # hooks around these would see what has no handle
        to_pack = node.to_pack if self._is_alone() else len(tensors)
        packed: list[Handle] = []
        kept_entries: list[Entry] = []
        for t, verdict, k in zip(tensors, node.verdicts, range(to_pack), strict=False):
            if k in node.moved:
                storage = storages[node.moved[k]]
                packed.append(self._follow(t, verdict, storage, kept_entries))
            else:
                packed.append(self._stay(t, verdict.entry))
        if kept_entries:
            self._ledger.add_all(kept_entries)
        return packed

    def pack_torch_saved(self, t: Tensor, caller: FrameType | None) -> Handle:
        """`pack` of a tensor that no op of fuseops saves.   caller: the frame that called the pack hook"""
        if self._ledger.take_backward_seen():
            self._labels.restart()
        return self.pack((t,), (self._labels.name_torch_saved(t, caller),))[0]

    def pack_one(
        self,
        t: Tensor,
        named: SavedName,
        verdicts: dict[Any, Any],
        kept_entries: list[Entry],
        followed: list[tuple[Verdict, str | None]] | None = None,
    ) -> Handle:
        """Decide about a saved tensor, and move or keep it.

        verdicts      the cache, by all that a verdict depends on
        kept_entries  entries that are reported together; they are flushed before one that is reported at once
        followed      gets the verdict, and the name for which its storage stays; not where a mark decided, or for
                      the first time
        """
        reason = None  # inline checks: most tensors are plain
        plain = type(t) in PLAIN and t.layout is torch.strided and (t.is_cuda or t.is_cpu)
        special = t.is_quantized or t.is_nested or is_zerotensor(t)
        if not plain or special or is_functorch_wrapped(t):
            reason = why_not_plain(t)
        if reason is None and self._capture_reason and t.is_cuda and torch_private.is_capturing():
            reason = self._capture_reason
        if reason is None and torch_private.current_backward() != NO_BACKWARD:
            reason = INSIDE_BACKWARD[self.in_checkpoint]
        if reason is not None:
            self._ledger.add_all(kept_entries)
            return self._keep(t, named, reason, _storage_bytes(t))
        storage = t.untyped_storage()
        if self._shares_storages and storage_key(storage) in records.thread.last.entries:
            record = records.find_record(t)
            if record is not None:
                self._ledger.add_all(kept_entries)
                return self._share(t, named, record)
        key = self._verdict_key(t, named, storage)
        verdict = verdicts.get(key)
        if verdict is None:
            verdict = self._decide(t, named)
            if self._cacheable:
                _remember(verdicts, key, verdict)
        elif followed is not None and key[1] is None:
            followed.append((verdict, key[0]))
        return self._follow(t, verdict, storage, kept_entries)

    def _verdict_key(self, t: Tensor, named: SavedName, storage: torch.UntypedStorage) -> Any:
        """All that a verdict depends on; first the name for which its storage stays, and the mark."""
        resident, mark = self._resident, None
        which: int | str = id(named)
        if not named.stable:
            which, mark = named.name, effective_mark(t, named)
        elif marks.marked.entries:
            mark = marks.marked.get(storage)
        return (
            resident and resident.get(storage),
            mark,
            which,
            marks.module_changes,
            self._model_storages.get(storage),
            self._on_gpu,
            type(t),
            type(t._base),
            t.shape,
            t.dtype,
            t.device,
            storage.nbytes(),
        )

    def _follow(
        self, t: Tensor, verdict: Verdict, storage: torch.UntypedStorage, kept_entries: list[Entry]
    ) -> Handle:
        """Move or keep a tensor as its verdict says; one for which there is no room is kept."""
        entry = verdict.entry
        if entry.decision == MOVED:
            if kept_entries:
                self._ledger.add_all(kept_entries)
            handle = self._move(t, verdict)
            if not isinstance(handle, str):
                return handle
            entry = entry._replace(decision=KEPT, reason=handle)
        if entry.nbytes and not self._counted.set_if_new(storage, True):
            entry = verdict.uncounted if entry is verdict.entry else entry._replace(nbytes=0)
        kept_entries.append(entry)
        return self._stay(t, entry, storage)

    def _decide(self, t: Tensor, named: SavedName) -> Verdict:
        reason, why = self._reason(t, named)
        nbytes = 0 if reason in MODEL_OWNED else t.untyped_storage().nbytes()
        decision = MOVED if reason is None else KEPT
        coding = self._coding(t, named) if reason is None else ""
        if coding:
            why += "; as float8 codes" if isinstance(coding, Coding) else f"; exact: {coding}"
        entry = self._entry(t, named, decision, reason or why, nbytes)
        coded = coding if isinstance(coding, Coding) else None
        return Verdict(entry, entry._replace(nbytes=0), named, coded)

    def _coding(self, t: Tensor, named: SavedName) -> Coding | str:
        """How t is quantized before its offload, or why not: "" where it was not asked for."""
        return ""

    def _reason(self, t: Tensor, named: SavedName) -> tuple[str | None, str]:
        """Why t is kept, or None; and why it is moved in that case."""
        mark = effective_mark(t, named)
        self._on_gpu = self._on_gpu or t.is_cuda
        reason = why_keep(t, named, self._model_storages, mark, self._on_gpu)
        if reason is not None or mark == marks.OFFLOAD:
            return reason, "marked offload"
        return self._by_policy(t, named)

    def _by_policy(self, t: Tensor, named: SavedName) -> tuple[str | None, str]:
        """`_reason` of a tensor about which neither a mark nor the model decides."""
        raise NotImplementedError

    def _move(self, t: Tensor, verdict: Verdict) -> Handle | str:
        """Offload its storage.   -> its handle, or why it is kept"""
        raise NotImplementedError

    def _call_for(self, record: Record) -> LayerRun | None:
        """The call that saves one more tensor in the storage of a record."""
        return record.call

    def _share(self, t: Tensor, named: SavedName | Entry, record: Record) -> Handle:
        """One more saved tensor lies in an offloaded storage."""
        call, why = self._call_for(record), f"in the storage of {record.name}"
        entry = self._entry(t, named, SHARED, why, 0)
        self._ledger.add(entry)
        mover: Any = record.mover()  # alive while a tensor of its storage is saved
        with mover.lock:
            mover.schedule.share(call, record)
        return Moved(t, entry, record, call, mover, self._ledger)

    def _keep(self, t: Tensor, named: SavedName | Entry, reason: str, nbytes: int) -> Handle:
        entry = self._entry(t, named, KEPT, reason, nbytes)
        self._ledger.add(entry)
        return self._stay(t, entry)

    def _stay(self, t: Tensor, entry: Entry, storage: torch.UntypedStorage | None = None) -> Kept:
        """Keep t.   storage: its storage, where there is a verdict"""
        return Kept(t, entry, self._ledger)

    def _is_alone(self) -> bool:
        """Whether no other saved-tensor hooks are around those that pack now."""
        return self._alone

    def _note_kept(self, node: nodes.KnownNode, storages: Sequence[torch.UntypedStorage]) -> None:
        """The tensors of a node that its verdicts keep are kept.   storages: those of `KnownNode.storages_of`"""

    def _entry(
        self, t: Tensor, named: SavedName | Entry, decision: str, reason: str, nbytes: int
    ) -> Entry:
        if self.in_checkpoint and decision == MOVED:
            reason += "; instead of recompute by checkpoint"
        # a nested tensor has no shape
        shape = () if t.is_nested and t.layout is torch.strided else tuple(t.shape)
        return Entry(named.name, named.op, shape, t.dtype, nbytes, decision, reason, named.also)


def _remember(verdicts: dict[Any, Any], key: Any, value: Any) -> None:
    if len(verdicts) >= MAX_VERDICTS:
        verdicts.clear()
    verdicts[key] = value


class _ToHost(Scope):
    """A `_ToHost` scope offloads node by node, without layers."""

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
        lanes = lanes_of(device)
        mover = Mover(Schedule(lanes, SETTINGS[device.type]), lanes)
        self._movers[device] = mover
        return mover

    def _by_policy(self, t: Tensor, named: SavedName) -> tuple[str | None, str]:
        small = too_small(t.untyped_storage().nbytes(), self._min_bytes)
        return small, f"min_bytes={self._min_bytes} reached"

    def _move(self, t: Tensor, verdict: Verdict) -> Handle | str:
        record = records.find_record(t)
        if record is not None:
            return self._share(t, verdict.entry, record)
        mover = self._movers.get(t.device) or self._new_mover(t.device)
        return mover.save(None, t, verdict, self._ledger)

    def pack(self, tensors: Sequence[Tensor], named: Sequence[SavedName]) -> list[Handle]:
        packed = super().pack(tensors, named)
        for mover in self._movers.values():
            if mover.node_records:
                mover.send_node()
        return packed


class _Keep(Scope):
    def __str__(self) -> str:
        return "keep()"

    def _reason(self, t: Tensor, named: SavedName) -> tuple[str | None, str]:
        instead = "; instead of recompute by checkpoint" if self.in_checkpoint else ""
        return self._model_storages.reason(t, named.is_param) or f"{self}{instead}", ""


def _storage_bytes(t: Tensor) -> int:
    """The bytes of the storage of t, or 0 where it has none."""
    return 0 if why_not_plain(t) is not None else t.untyped_storage().nbytes()


def _describe_hook(hook: object) -> str:
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
    check_integers("offload.to_host", 0, min_bytes=min_bytes)
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
