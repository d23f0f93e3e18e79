"""Scopes are entered and left in order.

torch keeps a stack of saved-tensor hooks a thread and calls the innermost pair only. A scope
belongs to the thread and to the `with` block that enter it. Entered in a generator or a coroutine
it would stay in force in whoever runs next; leaving one that is not the innermost shows that, and
raises.
"""

import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

from torch import Tensor, nn

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.observe import modules
from fuseops.ops import names
from fuseops.ops.names import SavedName

from .records import Handle, Kept, Moved

Pair = tuple[Any, Any]


class Packs(Protocol):
    """A `Packs` is a scope that autograd gives its saved tensors to."""

    in_checkpoint: bool

    def pack(self, tensors: Sequence[Tensor], named: Sequence[SavedName]) -> list[Handle]: ...
    def pack_torch_saved(self, t: Tensor, below: FrameType | None) -> Handle: ...


class PackHook:
    """A `PackHook` is the pack hook of a scope. Autograd's own threads inherit it, and know the scope by it.

    It does not keep the scope alive, which holds it: host memory would wait for the garbage collector.
    """

    __slots__ = ("_scope",)

    def __init__(self, scope: Packs) -> None:
        self._scope = weakref.ref(scope)

    @property
    def scope(self) -> Packs:
        scope: Any = self._scope()  # while a hook is on a stack, its scope is open
        packs: Packs = scope
        return packs

    def __call__(self, t: Tensor) -> Handle:
        """What a node of fuseops saves is packed when the first of it is."""
        scope: Any = self._scope()
        frame: Any = names.thread.frame
        if frame is None or not frame.tensors:
            handle: Handle = scope.pack_torch_saved(t, sys._getframe().f_back)
            return handle
        place = frame.taken
        if place < len(frame.tensors) and frame.tensors[place] is t:
            frame.taken = place + 1
        else:
            names.take(t)  # says what is wrong
        if frame.packed is None:
            frame.packed = scope.pack(frame.tensors, frame.names)
        handle = frame.packed[place]
        return handle


# A compiled region calls the hooks while it runs; dynamo would try to compile them in their turn.
for _hook in (PackHook.__call__, Kept.restore, Moved.restore):
    torch_private.never_compile(_hook)


class _Stack(threading.local):
    def __init__(self) -> None:
        self.scopes: list[Guarded] = []


_stack = _Stack()


def enclosing() -> "Iterator[Guarded]":
    """The open scopes of this thread, innermost first."""
    return reversed(_stack.scopes)


class Guarded:
    """A `Guarded` checks on exit that the open scopes and torch's hooks are as its entry left them."""

    def __init__(self) -> None:
        self._thread: int | None = None  # the one that entered it
        self._top: Pair | None = None  # torch's innermost hooks while nothing else is open inside

    def __repr__(self) -> str:
        return f"<offload.{self}, {'closed' if self._thread is None else 'open'}>"

    def _open(self) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise FuseOpsError(
                f"offload.{self} is open already. It can be entered again after it was left; "
                "inside itself, make another one."
            )
        self._open()
        self._thread, self._top = threading.get_ident(), torch_private.top_saved_tensor_hooks()
        _stack.scopes.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        wrong = self._out_of_order()
        if self._thread == threading.get_ident():  # nothing of it is in any other thread
            _stack.scopes.remove(self)
            self._thread = None
            self._close()
        if wrong is not None and error is None:
            raise FuseOpsError(wrong)
        if wrong is not None and error is not None:
            error.add_note(wrong)

    def _out_of_order(self) -> str | None:
        if self._thread is None:
            why = "left a second time"
        elif self._thread != threading.get_ident():
            why = "left in another thread than it was entered in, where it is still open"
        elif _stack.scopes[-1] is not self:
            why = f"left while offload.{_stack.scopes[-1]} inside it is open"
        elif torch_private.top_saved_tensor_hooks() != self._top:
            why = "left while other saved-tensor hooks inside it are open"
        else:
            return None
        return (
            f"offload.{self} was {why}. Entered in a generator or a coroutine, a scope stays in "
            "force in whoever runs next: enter and leave it without a yield or an await in between."
        )


class Disabled(Guarded):
    """Takes our pairs off torch's stack, and puts them back.

    A pair that passes tensors through would still switch off torch's own in-place check.
    """

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[Pair] = []

    def __str__(self) -> str:
        return "disabled()"

    def _open(self) -> None:
        top = torch_private.top_saved_tensor_hooks()
        while top is not None and isinstance(top[0], PackHook):
            torch_private.pop_saved_tensor_hooks()
            self.taken.append(top)
            top = torch_private.top_saved_tensor_hooks()
        modules.watch(self.module_entered)

    def _close(self) -> None:
        while self.taken:
            torch_private.push_saved_tensor_hooks(*self.taken.pop())
        modules.unwatch(self.module_entered)

    def module_entered(self, module: nn.Module) -> None:
        """Nothing is reported in here."""


def take_out(hook: PackHook) -> None:
    """Take the pair of `hook` off torch's stack, from below others if it has to be, or from what `disabled()` took."""
    for scope in _stack.scopes:
        if isinstance(scope, Disabled):
            scope.taken = [pair for pair in scope.taken if pair[0] is not hook]
    above: list[Pair] = []
    while (top := torch_private.top_saved_tensor_hooks()) is not None:
        torch_private.pop_saved_tensor_hooks()
        if top[0] is hook:
            break
        above.append(top)
    for pair in reversed(above):
        torch_private.push_saved_tensor_hooks(*pair)


class Link(Protocol):
    """A `Link` goes around calls of a module, and has what it goes around as `inner`."""

    inner: Any


def unlinked(outer: Any, link: Link) -> Any:
    """What goes around the calls of a module, outermost first, without `link`. What others put there hides it."""
    if outer is link:
        return link.inner
    if isinstance(outer, type(link)):
        outer.inner = unlinked(outer.inner, link)
    return outer


def belongs_to_checkpoint(pair: Pair | None) -> bool:
    """Whether a scope entered over `pair` is inside the function of a non-reentrant checkpoint."""
    if pair is None:
        return False
    if isinstance(pair[0], PackHook):
        return pair[0].scope.in_checkpoint
    return torch_private.is_checkpoint_hook(pair[0])
