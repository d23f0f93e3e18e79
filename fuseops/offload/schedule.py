"""When storages are offloaded, released and reloaded. Pure: it uses only the `Lanes` protocol.

The unit is one call of a layer. Of the storages that it saves some are chosen to be offloaded: large ones start when
they are saved, the small ones of a call together when the call ends. (Without layers, the small ones of one autograd
node are sent together.) A fixed number of boundaries later (a boundary is where a forward or a backward of a layer
begins) the compute lane waits for the copy and the device bytes are released. What is read next is reloaded one
boundary ahead: in the order of the last step, or, while there is none, along the chain of forward calls.

All points are points of the host program. The lanes are never asked for the time.
"""

from collections import deque
from collections.abc import Iterable
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

from .lanes.arena import aligned
from .lanes.protocol import Buf, Event, Lanes, NoRoomError
from .order import Boundary, Order, OrderKey
from .transfers import Bundle as Bundle
from .transfers import Item as Item
from .transfers import LayerRun as LayerRun
from .transfers import MoveStep as MoveStep
from .transfers import Stats as Stats

LAST_GROUP = "last group before backward begins"

Decision = Literal["keep", "offload", "quantize", "recompute", "dispatch"]
KEEP, OFFLOAD, QUANTIZE, RECOMPUTE, DISPATCH = get_args(Decision)
REGENERATED = (RECOMPUTE, DISPATCH)


class LinkSettings(NamedTuple):
    """`LinkSettings` are the constants of a schedule, which a plan is made for.

    lag     boundaries between the forward of a call and the release of what it sent
    ahead   boundaries between a reload and the backward that reads it
    small   storages below so many bytes share a transfer; 0: none do
    bundle  bytes of such a transfer, about
    """

    lag: int = 2
    ahead: int = 1
    small: int = 4 << 20
    bundle: int = 32 << 20


DEFAULT = LinkSettings()


class Schedule:
    """A `Schedule` decides when the saved tensors of one device are offloaded, released and reloaded.

    manual     storages are moved only by `offload`, `release` and `reload`; else those that a backward reads
               before their release is due are kept
    """

    def __init__(
        self, lanes: Lanes, settings: LinkSettings = DEFAULT, *, manual: bool = False
    ) -> None:
        self.lanes, self.manual = lanes, manual
        self.lag, self.ahead, self.small, self.bundle_bytes = settings
        self.closed = False  # no boundary will come any more
        self.order = Order()
        self.stats = Stats()
        self._live: dict[OrderKey, LayerRun] = {}
        self._offloading: deque[Bundle] = deque()  # sources not released yet, by due boundary
        self._now = 0  # boundaries passed
        self._last: LayerRun | None = None  # entered last in the running forward
        self._last_sent: Bundle | None = None  # outside of layers: the bundle that was sent last
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
            last = None  # another micro-batch, or the layer again: a new chain
            self._keep_last_group(self._last)
        call = LayerRun(self.order.key(layer), last, self.lanes.compute())
        self._live[call.key] = self._last = call
        self._pass_boundary("forward", call)
        distance = None if self.manual else self.order.distance(call.key)
        call.keeps_all = distance is not None and distance <= self.lag + self.ahead
        return call

    def leave(self, call: LayerRun) -> None:
        """The forward of a layer ends, also by an error."""
        self._send_small(call)
        if self.lag == 0:
            self._release_due()
        call.running = False
        if Boundary("backward", call.key) in self.order.upcoming(self.ahead):
            self._reload_for(call)  # it shares storages of earlier calls, which may be released
        self._retire(call)

    def backward(self, call: LayerRun) -> None:
        """The backward of a layer begins (again, if its graph was retained)."""
        if call.backward_begun:
            return
        call.backward_begun = True
        self.stats.misses += self._reload_for(call)  # those not reloaded ahead
        self._pass_boundary("backward", call)

    def send_node(self, items: list[Item]) -> None:
        """Send what one autograd node saved outside of layers: large storages one by one, small ones together. One for
        which the host has no room is kept, and has a `kept_reason`.
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
            if self._offloading:
                self._release_due()
            points = {item.ready_event() for item in group}
            if not self._send(group, points.pop() if len(points) == 1 else None):
                for item in group:
                    item.on_keep(str(item.kept_reason))
                continue
            last, self._last_sent = self._last_sent, group[0].bundle
            if last is not None and last.handles and self._last_sent is not None:
                self._last_sent.previous = last
            if self.lag == 0:
                self._release_due()

    def begin_backward(self, bundle: Bundle) -> None:
        """A bundle that was sent outside of layers is read. That is a boundary: those sent before it are reloaded."""
        bundle.backward_begun = True
        self._now += 1
        before = bundle.previous
        for _ in range(self.ahead):
            if before is not None and before.unread:
                self._reload_bundles((before,))
            before = before and before.previous
        if self._offloading:
            self._release_due()

    def _pass_boundary(self, way: str, call: LayerRun) -> None:
        self.order.advance(Boundary(way, call.key))
        self._now += 1
        if self.manual:
            return
        for boundary in self.order.upcoming(self.ahead):
            other = self._live.get(boundary.key)
            if other is not None:  # which has run its forward
                self._reload_for(other)
        if way == "backward" and not self.order.predicts:
            previous = call.previous
            for _ in range(self.ahead):  # along the chain
                if previous is not None:
                    self._reload_for(previous)
                    previous = previous.previous
        self._release_due()

    # --- saving

    def save(self, call: LayerRun, item: Item) -> bool:
        """A storage that is to be offloaded was saved.   -> False if it is kept, for its `kept_reason`, by the caller

        A small one may turn out to be kept at the end of the call; the schedule counts its handles all the same.
        """
        if call.keeps_all:
            item.kept_reason = LAST_GROUP
            return False
        small = self.manual or (item.nbytes < self.small and item.source.owner == call.owner)
        if not small and not self._send([item], item.ready_event()):
            return False
        call.handles += 1
        call.items.append(item)
        if small:
            call.small_items.append(item)
            call.small_nbytes += item.nbytes
            if call.small_nbytes >= self.bundle_bytes:
                self._send_small(call)
        return True

    def share(self, call: LayerRun | None, item: Item) -> None:
        """A saved tensor, of `call` if given, lies in the storage of an item, which may belong to another call."""
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
        """The call has a saved tensor that is kept, and lives until that is dropped."""
        call.handles += 1

    def _send_small(self, call: LayerRun) -> None:
        if call.small_items and not self.manual:
            items = [item for item in call.small_items if item.handles]
            call.small_items, call.small_nbytes = [], 0
            if items:
                self._send_late(items)

    def _send_late(self, items: list[Item]) -> None:
        """Start the copies of storages that were saved earlier. One that was resized since is kept."""
        for item in items:
            item.on_move("copy")
        intact = [item for item in items if item.kept_reason is None]
        if intact:
            self._send(intact)
        for item in items:
            if item.kept_reason is not None:
                item.on_keep(item.kept_reason)

    def _send(self, items: list[Item], ready: Event | None = None) -> bool:
        """Start the copies of one storage, or of several into one buffer.   -> False if the host has no room"""
        offsets, nbytes = [0], items[0].nbytes
        if len(items) > 1:
            offsets = list(accumulate((aligned(item.nbytes) for item in items), initial=0))
            nbytes = offsets.pop()
        try:
            host = self.lanes.alloc(nbytes, "host", items[0].name)
        except NoRoomError as error:
            for item in items:
                item.kept_reason = str(error)
            return False
        after, host.after = host.after, None
        sources = [item.source for item in items]
        done = self.lanes.copy("d2h", sources, host, offsets, ready, after)
        bundle = Bundle(items, nbytes, host, self._now + self.lag, done)
        for item, offset in zip(items, offsets, strict=True):
            item.bundle, item.offset = bundle, offset
            bundle.handles += 1
            bundle.unread += item.unread > 0
            self.stats.out_bytes += item.nbytes
        self._offloading.append(bundle)
        self.stats.out_count += 1
        return True

    # --- release

    def _release_due(self) -> None:
        due = []
        while self._offloading and self._offloading[0].due <= self._now:
            bundle = self._offloading.popleft()
            if not bundle.retained:
                due.append(bundle)
        if due:
            self._release(due)

    def _release(self, bundles: Iterable[Bundle]) -> None:
        """Release the device bytes of bundles. Copies end in order, so compute waits only for the last one."""
        released: list[Bundle] = []
        last: dict[bool, Event] = {}  # by whether it is in a captured graph
        for bundle in bundles:
            if bundle.released:
                continue  # it was due twice
            bundle.released = True
            released.append(bundle)
            for item in bundle.items:
                if item.handles:
                    item.on_move("release")
            done = bundle.d2h_done
            if done is not None:
                later = last.setdefault(done.captured, done)
                if done.serial > later.serial:
                    last[done.captured] = done
        for event in last.values():
            self.lanes.wait("compute", event)
        for bundle in released:
            done = bundle.d2h_done
            if done is not None:
                event = last[done.captured]
                done.known_to, done.known_since = event.known_to, event.known_since
            for item in bundle.items:
                self.lanes.free(item.source)
                item.source = None
            if not bundle.handles:
                self._free_host(bundle)

    def close(self) -> None:
        """Release all that is being offloaded: no boundary will come any more."""
        self.closed = True
        bundles, self._offloading = self._offloading, deque()
        self._release(bundles)

    # --- reload

    def _reload_for(self, call: LayerRun) -> int:
        """Reload what a call will read, in reverse order of saving.   -> how many transfers started"""
        return 0 if self.manual else self._reload_bundles(self._bundles(call))

    def _reload_bundles(self, bundles: Iterable[Bundle]) -> int:
        """Reload bundles that were released, and retain the sources of others.   -> how many transfers started"""
        reloads = []
        for bundle in bundles:
            if bundle.released and bundle.target is None:
                bundle.target = self.lanes.alloc(bundle.nbytes, "device", bundle.items[0].name)
                reloads.append(bundle)
            elif not bundle.released:
                bundle.retained = True
        if reloads:
            # Targets may be memory that compute is still reading: the copies wait for what it was given so far.
            ready = self.lanes.record("compute")
            for bundle in reloads:
                self._start_reload(bundle, ready)
        return len(reloads)

    def _bundles(self, call: LayerRun) -> list[Bundle]:
        """The bundles of items that a call has still to read, last saved first; one may repeat."""
        return [i.bundle for i in reversed(call.items) if i.unread and i.bundle is not None]

    def _start_reload(self, bundle: Bundle, ready: Event | None = None) -> None:
        """Start the reload.   ready: a point of compute after the target was allocated; None: now"""
        bundle.h2d_done = self.lanes.copy(
            "h2d", (bundle.host,), bundle.target, ready=ready, after=bundle.d2h_done
        )
        for item in bundle.items:
            item.on_move("reload")
            self.stats.back_bytes += item.nbytes
        self.stats.back_count += 1

    def fetch(self, item: Item) -> tuple[Buf, int]:
        """The bytes of an item for the compute lane.   -> buffer, offset in it"""
        bundle = item.bundle
        if bundle is None:
            return item.source, 0  # it has never left
        if not bundle.released:
            bundle.retained = True
            return item.source, 0
        target = bundle.target
        if target is None or target.owner != self.lanes.compute():
            if target is not None:
                self._free_target(bundle, target)
            self.stats.misses += 1
            target = self.lanes.alloc(bundle.nbytes, "device", bundle.items[0].name)
            bundle.target = target
            self._start_reload(bundle)
        done = bundle.h2d_done
        if done is not None and done.known_to != target.owner:
            self.lanes.wait("compute", done)
        return target, item.offset

    def mark_read(self, item: Item, *, again: bool = False) -> None:
        """A saved tensor in this storage was read.   again: not for the first time, as its graph was retained

        After the last one the target is freed: the tensors that were restored hold it.
        """
        bundle = item.bundle
        if not again:
            item.unread -= 1
            if bundle is not None and not item.unread:
                bundle.unread -= 1
        if bundle is not None and not bundle.unread and bundle.target is not None:
            self._free_target(bundle, bundle.target)

    def _free_target(self, bundle: Bundle, target: Buf) -> None:
        done = bundle.h2d_done
        if done is not None and done.known_to != target.owner:
            self.lanes.wait("compute", done)  # nobody has read it
        self.lanes.free(target)
        bundle.target = None

    def drop(self, call: LayerRun | None, item: Item | None = None, *, read: bool = True) -> None:
        """A saved tensor, of `call` if given, is freed.   read: a backward had read it"""
        if item is not None:
            item.handles -= 1
            if not read:
                self.mark_read(item)
            if not item.handles:
                self._drop_item(item)
        if call is not None:
            call.handles -= 1
            if not call.handles:
                self._retire(call)

    def _drop_item(self, item: Item) -> None:
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
            self._free_target(bundle, bundle.target)
        if bundle.released:
            self._free_host(bundle)
        elif self.manual or self.closed:
            self._release((bundle,))
        elif bundle.retained:  # its copy may still be reading: release it later
            bundle.retained, bundle.due = False, self._now + self.lag
            self._offloading.append(bundle)

    def _free_host(self, bundle: Bundle) -> None:
        bundle.host.after = bundle.h2d_done
        self.lanes.free(bundle.host)
        bundle.host = None  # may be reused from here on
        bundle.items = []  # breaks a cycle: each of them holds the bundle

    def _retire(self, call: LayerRun) -> None:
        if call.running or call.handles > 0:
            return
        call.previous = None
        if self._live.get(call.key) is call:
            del self._live[call.key]
            self._complete = self._complete and (call.backward_begun or not call.items)
        call.items = []  # breaks a cycle: each of them may hold the call

    def _keep_last_group(self, call: LayerRun | None) -> None:
        """Retain the sources of the last call of a micro-batch, whose backward may be next."""
        if call is not None and call.alive and not self.order.predicts and not self.manual:
            for bundle in self._bundles(call):
                bundle.retained = bundle.retained or not bundle.released

    # --- by hand

    def offload(self, call: LayerRun) -> None:
        """Start the copies of what a call saved (manual schedules)."""
        items, call.small_items = [i for i in call.small_items if i.handles], []
        for item in items:
            if item.nbytes >= self.small:
                self._send_late([item])
        rest = [i for i in items if i.nbytes < self.small]
        if rest:
            self._send_late(rest)

    def release(self, call: LayerRun) -> None:
        """Release the device bytes of what `offload` sent."""
        for bundle in [b for b in self._offloading if any(i.bundle is b for i in call.items)]:
            self._offloading.remove(bundle)
            self._release((bundle,))

    def reload(self, call: LayerRun) -> None:
        """Reload what was released."""
        self._reload_bundles(b for b in self._bundles(call) if b.released)

    @property
    def live_calls(self) -> int:
        """How many calls run or have live saved tensors: 0 at the begin of a step."""
        return len(self._live)

    def calls(self, layer: str) -> list[LayerRun]:
        """The live calls of a layer, oldest first."""
        return [call for key, call in self._live.items() if key.layer == layer]
