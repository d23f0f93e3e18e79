"""When bytes leave the device and when they come back: pure, and speaking only to `Lanes`.

The unit is one call of one layer. Inside it storages are saved; some are chosen to leave. Large ones
start to leave when they are saved, the small ones of a call together when the call ends. (In a scope without layers
the small ones that one autograd node saves leave together.) At a fixed
number of boundaries later (a boundary is where a forward or a backward of a layer begins) the
compute lane waits for the copy and the device bytes are let go. What is needed next is brought back
one boundary early: in the order that the last step had, or, as long as there is none, along the
chain of forward calls.

All points are points of the host program. The lanes are never asked for the time.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Literal, get_args

from .lanes.arena import aligned
from .lanes.protocol import Buf, Event, Lanes, NoRoomError
from .order import Boundary, Order, OrderKey
from .transfers import Bundle as Bundle
from .transfers import Item as Item
from .transfers import LayerRun as LayerRun
from .transfers import Stats as Stats

SMALL = 4 << 20  # bytes; smaller storages of a call travel together
BUNDLE = 32 << 20  # ... in transfers of about this size
LAST_GROUP = "last group before backward begins"

Decision = Literal["keep", "offload", "quantize", "recompute", "dispatch"]
KEEP, OFFLOAD, QUANTIZE, RECOMPUTE, DISPATCH = get_args(Decision)
MADE_AGAIN = (RECOMPUTE, DISPATCH)


class Schedule:
    """A `Schedule` decides when the saved tensors of one device are sent to the host, released and fetched back.

    decisions  by name of a saved tensor, for whoever asks before `save`
    lag        boundaries between the forward of a call and the release of what it sent
    ahead      boundaries between a reload and the backward that reads it
    small      storages below so many bytes share a transfer; 0: none do
    keep_last  what would be needed again before its release is due stays
    manual     nothing moves but by `offload`, `release` and `reload`
    """

    def __init__(
        self,
        lanes: Lanes,
        decisions: Mapping[str, Decision] | None = None,
        *,
        lag: int = 2,
        ahead: int = 1,
        small: int = SMALL,
        bundle: int = BUNDLE,
        keep_last: bool = True,
        manual: bool = False,
    ) -> None:
        self.lanes = lanes
        self.decisions: Mapping[str, Decision] = decisions or {}
        self.lag, self.ahead, self.small, self.bundle_bytes = lag, ahead, small, bundle
        self.keep_last, self.manual = keep_last and not manual, manual
        self.closed = False  # no boundary will come any more
        self.order = Order()
        self.stats = Stats()
        self._live: dict[OrderKey, LayerRun] = {}
        self._leaving: deque[Bundle] = deque()  # sources not let go yet, by due boundary
        self._now = 0  # boundaries passed
        self._last: LayerRun | None = None  # entered last in the running forward
        self._departed: Bundle | None = None  # the last that left in no call of a layer
        self._layers: dict[str, int] = {}  # layers in the order of their first call
        self._complete = True

    # --- boundaries

    def enter(self, layer: str) -> LayerRun:
        """The forward of a layer begins."""
        self.closed = False
        if not self._live:
            self.order.start(self._complete)
            self._complete, self._last = True, None
            self.stats.steps += 1
        place = self._layers.setdefault(layer, len(self._layers))
        last = self._last
        if last is not None and place <= self._layers[last.key.layer]:
            last = None  # another micro-batch, or the layer again: a chain of its own
            self._keep(self._last)
        call = LayerRun(self.order.key(layer), last, self.lanes.compute())
        self._live[call.key] = self._last = call
        self._pass("forward", call)
        distance = self.order.distance(call.key) if self.keep_last else None
        call.soon = distance is not None and distance <= self.lag + self.ahead
        return call

    def leave(self, call: LayerRun) -> None:
        """The forward of a layer ends, in whatever way."""
        self._send_small(call)
        if self.lag == 0:
            self._release_due()
        call.running = False
        if Boundary("backward", call.key) in self.order.coming(self.ahead):
            self._fetch_ahead(call)  # it shares storages of earlier calls, which may be gone
        self._forget(call)

    def backward(self, call: LayerRun) -> None:
        """The backward of a layer begins (again, if its graph was retained)."""
        if call.backward:
            return
        call.backward = True
        self.stats.misses += self._fetch_ahead(call)  # ahead no more
        self._pass("backward", call)

    def depart(self, items: list[Item]) -> None:
        """What one autograd node saved leaves, in no call of a layer: its large storages each by itself, its small ones
        together. One that cannot stays, for the reason `kept`.
        """
        self.closed = False
        groups: list[list[Item]] = []
        waiting = self.bundle_bytes  # bytes of the last group of small ones
        small: list[Item] = []
        for item in items:
            if item.nbytes >= self.small:
                groups.append([item])
                continue
            if waiting >= self.bundle_bytes:
                small, waiting = [], 0
                groups.append(small)
            small.append(item)
            waiting += item.nbytes
        for group in groups:
            self._now += 1  # each is a boundary
            if self._leaving:
                self._release_due()
            points = {item.ready() for item in group}
            if not self._send(group, points.pop() if len(points) == 1 else None):
                for item in group:
                    item.stays(str(item.kept))
                continue
            last, self._departed = self._departed, group[0].bundle
            if last is not None and last.handles and self._departed is not None:
                self._departed.previous = last
            if self.lag == 0:
                self._release_due()

    def begin(self, bundle: Bundle) -> None:
        """What left in no call of a layer is read: a boundary, and what left before it comes back."""
        bundle.begun = True
        self._now += 1
        before = bundle.previous
        for _ in range(self.ahead):
            if before is not None and before.unread:
                self._bring((before,))
            before = before and before.previous
        if self._leaving:
            self._release_due()

    def _pass(self, way: Literal["forward", "backward"], call: LayerRun) -> None:
        self.order.passed(Boundary(way, call.key))
        self._now += 1
        if self.manual:
            return
        for coming in self.order.coming(self.ahead):
            other = self._live.get(coming.key)
            if coming.way == "backward" and other is not None:
                self._fetch_ahead(other)
        if way == "backward" and not self.order.predicts:
            previous = call.previous
            for _ in range(self.ahead):  # along the chain
                if previous is not None:
                    self._fetch_ahead(previous)
                    previous = previous.previous
        self._release_due()

    # --- saving

    def save(self, call: LayerRun, item: Item) -> bool:
        """A storage that is to leave was saved.   -> False if it stays, for the reason `kept`, and is the caller's.

        A small one may learn at the end of the call that it stays; its handles are the schedule's all the same.
        """
        if call.soon:
            item.kept = LAST_GROUP
            return False
        small = self.manual or (item.nbytes < self.small and item.source.owner == call.owner)
        if not small and not self._send([item], item.ready()):
            return False
        call.handles += 1
        call.items.append(item)
        if small:
            call.small.append(item)
            call.waiting += item.nbytes
            if call.waiting >= self.bundle_bytes:
                self._send_small(call)
        return True

    def share(self, call: LayerRun | None, item: Item) -> None:
        """A saved tensor of `call`, or of none, lies in the storage of an item, which may be another call's."""
        bundle = item.bundle
        if bundle is not None:
            bundle.handles += not item.handles
            bundle.unread += not item.unread
        item.handles += 1
        item.unread += 1
        if call is not None:
            call.handles += 1
            if item not in call.items:
                call.items.append(item)

    def keep(self, call: LayerRun) -> None:
        """A saved tensor that stays: its call lives until it is dropped."""
        call.handles += 1

    def _send_small(self, call: LayerRun) -> None:
        if call.small and not self.manual:
            items = [item for item in call.small if item.handles]
            call.small, call.waiting = [], 0
            if items:
                self._send_waiting(items)

    def _send_waiting(self, items: list[Item]) -> None:
        """Start the copy of what was saved a while ago. What cannot be copied any more stays."""
        for item in items:
            item.leaves("copy")
        whole = [item for item in items if item.kept is None]
        if whole:
            self._send(whole)
        for item in items:
            if item.kept is not None:
                item.stays(item.kept)

    def _send(self, items: list[Item], ready: Event | None = None) -> bool:
        """Start the copies of one storage, or of several into one buffer; not if there is no room on the host."""
        offsets, nbytes = [0], items[0].nbytes
        if len(items) > 1:
            offsets = list(accumulate((aligned(item.nbytes) for item in items), initial=0))
            nbytes = offsets.pop()
        try:
            host = self.lanes.alloc(nbytes, "host", items[0].name)
        except NoRoomError as error:
            for item in items:
                item.kept = str(error)
            return False
        after, host.after = host.after, None
        sources = [item.source for item in items]
        written = self.lanes.copy("d2h", sources, host, offsets, ready, after)
        bundle = Bundle(items, nbytes, host, self._now + self.lag, written)
        for item, offset in zip(items, offsets, strict=True):
            item.bundle, item.offset = bundle, offset
            bundle.handles += 1
            bundle.unread += item.unread > 0
            self.stats.out_bytes += item.nbytes
        self._leaving.append(bundle)
        self.stats.out_count += 1
        return True

    # --- letting go

    def _release_due(self) -> None:
        due = []
        while self._leaving and self._leaving[0].due <= self._now:
            bundle = self._leaving.popleft()
            if not bundle.wanted:
                due.append(bundle)
        if due:
            self._release(due)

    def _release(self, bundles: Iterable[Bundle]) -> None:
        """Let go of the device bytes of what is on its way out. Copies end in order: compute waits for the last."""
        gone: list[Bundle] = []
        last: dict[bool, Event] = {}  # of those in a graph that is captured, and of others
        for bundle in bundles:
            if bundle.released:
                continue  # it was due twice
            bundle.released = True
            gone.append(bundle)
            for item in bundle.items:
                if item.handles:
                    item.leaves("release")
            written = bundle.written
            if written is not None:
                later = last.setdefault(written.captured, written)
                if written.serial > later.serial:
                    last[written.captured] = written
        for event in last.values():
            self.lanes.wait("compute", event)
        for bundle in gone:
            written = bundle.written
            if written is not None:
                event = last[written.captured]
                written.whose, written.since = event.whose, event.since
            for item in bundle.items:
                self.lanes.free(item.source)
                item.source = None
            if not bundle.handles:
                self._free_host(bundle)

    def close(self) -> None:
        """No boundary will come any more: let go of all that is on its way out."""
        self.closed = True
        leaving, self._leaving = self._leaving, deque()
        self._release(leaving)

    # --- coming back

    def _fetch_ahead(self, call: LayerRun) -> int:
        """Bring back what a call will read, that first which was saved last; -> how many transfers that took."""
        return 0 if self.manual else self._bring(self._bundles(call))

    def _bring(self, bundles: Iterable[Bundle]) -> int:
        """Have them on the device when they are read.   -> how many transfers that takes"""
        away = []
        for bundle in bundles:
            if bundle.released and bundle.target is None:
                bundle.target = self.lanes.alloc(bundle.nbytes, "device", bundle.items[0].name)
                away.append(bundle)
            elif not bundle.released:
                bundle.wanted = True
        if away:
            # Targets may be memory that compute has still to read: copies come after what it was given by now.
            ready = self.lanes.record("compute")
            for bundle in away:
                self._reload(bundle, ready)
        return len(away)

    def _bundles(self, call: LayerRun) -> list[Bundle]:
        """What moves what a call has still to read, once for each of its items."""
        return [i.bundle for i in reversed(call.items) if i.unread and i.bundle is not None]

    def _reload(self, bundle: Bundle, ready: Event | None = None) -> None:
        """Start the copy back. ready: a point of compute once the target was there; None: now"""
        bundle.arrived = self.lanes.copy(
            "h2d", (bundle.host,), bundle.target, ready=ready, after=bundle.written
        )
        bundle.awaited = False
        for item in bundle.items:
            item.comes_back()
            self.stats.back_bytes += item.nbytes
        self.stats.back_count += 1

    def fetch(self, item: Item) -> tuple[Buf, int]:
        """The bytes of an item for the compute lane: a buffer, and where in it they begin."""
        bundle = item.bundle
        if bundle is None:
            return item.source, 0  # it has never left
        if not bundle.released:
            bundle.wanted = True
            return item.source, 0
        target = bundle.target
        if target is None or target.owner != self.lanes.compute():
            if target is not None:
                self._let_target_go(bundle, target)
            self.stats.misses += 1
            target = self.lanes.alloc(bundle.nbytes, "device", bundle.items[0].name)
            bundle.target = target
            self._reload(bundle)
        if not bundle.awaited and bundle.arrived is not None:
            self.lanes.wait("compute", bundle.arrived)
            bundle.awaited = True
        return target, item.offset

    def used(self, item: Item, *, again: bool = False) -> None:
        """One saved tensor in this storage has been read (again, when its graph was retained). After
        the last the target is let go: whoever reads it still holds it.
        """
        bundle = item.bundle
        if not again:
            item.unread -= 1
            if bundle is not None and not item.unread:
                bundle.unread -= 1
        if bundle is not None and not bundle.unread and bundle.target is not None:
            self._let_target_go(bundle, bundle.target)

    def _let_target_go(self, bundle: Bundle, target: Buf) -> None:
        if not bundle.awaited and bundle.arrived is not None:
            self.lanes.wait("compute", bundle.arrived)  # nobody has read it
            bundle.awaited = True
        self.lanes.free(target)
        bundle.target = None

    def drop(self, call: LayerRun | None, item: Item | None = None, *, read: bool = True) -> None:
        """A saved tensor of `call`, or of none, is gone. read: a backward had read it."""
        if item is not None:
            item.handles -= 1
            if not read:
                self.used(item)
            if not item.handles:
                self._end(item)
        if call is not None:
            call.handles -= 1
            if not call.handles:
                self._forget(call)

    def _end(self, item: Item) -> None:
        bundle = item.bundle
        if bundle is None:
            if item.source is not None:
                self.lanes.free(item.source)
                item.source = None
            return
        bundle.handles -= 1
        if bundle.handles:
            return
        bundle.previous = None
        if bundle.target is not None:
            self._let_target_go(bundle, bundle.target)
        if bundle.released:
            self._free_host(bundle)
        elif self.manual or self.closed:
            self._release((bundle,))
        elif bundle.wanted:  # its copy may still be reading: let go a little later
            bundle.wanted, bundle.due = False, self._now + self.lag
            self._leaving.append(bundle)

    def _free_host(self, bundle: Bundle) -> None:
        bundle.host.after = bundle.arrived
        self.lanes.free(bundle.host)
        bundle.host = None  # it is another's from here on
        bundle.items = []  # each of them holds it

    def _forget(self, call: LayerRun) -> None:
        if call.running or call.handles > 0:
            return
        call.previous = None
        if self._live.get(call.key) is call:
            del self._live[call.key]
            self._complete = self._complete and (call.backward or not call.items)
        call.items = []  # each of them may hold it

    def _keep(self, call: LayerRun | None) -> None:
        """The last group of a micro-batch: its backward may be the next of all."""
        if call is not None and call.alive and not self.order.predicts and self.keep_last:
            for bundle in self._bundles(call):
                bundle.wanted = bundle.wanted or not bundle.released

    # --- by hand

    def offload(self, call: LayerRun) -> None:
        """Start the copies of what a call saved (manual schedules)."""
        items, call.small = [i for i in call.small if i.handles], []
        for item in items:
            if item.nbytes >= self.small:
                self._send_waiting([item])
        rest = [i for i in items if i.nbytes < self.small]
        if rest:
            self._send_waiting(rest)

    def release(self, call: LayerRun) -> None:
        """Let go of the device bytes of what `offload` sent."""
        for bundle in [b for b in self._leaving if any(i.bundle is b for i in call.items)]:
            self._leaving.remove(bundle)
            self._release((bundle,))

    def reload(self, call: LayerRun) -> None:
        """Bring back what was released."""
        self._bring(b for b in self._bundles(call) if b.released)

    @property
    def alive(self) -> int:
        """How many calls run, or have saved what still exists. None does where a step begins."""
        return len(self._live)

    def calls(self, layer: str) -> list[LayerRun]:
        """The living calls of a layer, oldest first."""
        return [call for key, call in self._live.items() if key.layer == layer]
