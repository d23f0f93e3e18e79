"""Scopes nest: each is closed in the thread that entered it, and in reverse order.

torch keeps a stack of saved-tensor hooks for each thread and calls the innermost pair only. A scope entered in a
generator or a coroutine would stay active in the code that runs next. Closing a scope that is not the innermost one
detects that, and raises.
"""

import sys
import threading
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.observe import modules
from fuseops.ops import names

from .records import Handle, Kept, Moved

Pair = tuple[Any, Any]


class PackHook:
    """A `PackHook` is the pack hook of a scope. Autograd's own threads inherit it, and find the scope through it.

    It holds a weak reference: in a cycle with the scope, host memory would wait for the garbage collector.
    """

    __slots__ = ("_scope",)

    def __init__(self, scope: "NestedScope") -> None:
        self._scope = weakref.ref(scope)

    @property
    def scope(self) -> Any:
        """The scope, which is open while the hook is on a stack."""
        return self._scope()

    def __call__(self, t: Tensor) -> Handle:
        """Packs a tensor. All tensors that a node of fuseops saves are packed with the first of them; those for which
        the scope has no handle, at the end, are torch's.
        """
        scope: Any = self._scope()
        frame: Any = names.thread.frame
        if frame is None or not frame.tensors:
            handle: Handle = scope.pack_torch_saved(t, sys._getframe().f_back)
            return handle
        position = frame.next_index
        if position < len(frame.tensors) and frame.tensors[position] is t:
            frame.next_index = position + 1
        else:
            names.take_name(t)  # raises the error
        if frame.packed is None:
            frame.packed = scope.pack(frame.tensors, frame.names)
        handle = frame.packed[position]
        if position + 1 == len(frame.packed) < len(frame.tensors):
            frame.pause_hooks()
        return handle


# A compiled region calls these while it runs; dynamo would try to compile them too.
for _hook in (PackHook.__call__, Kept.restore, Moved.restore):
    torch_private.never_compile(_hook)


class _Stack(threading.local):
    def __init__(self) -> None:
        self.scopes: list[NestedScope] = []


_stack = _Stack()


def open_scopes() -> "Iterator[NestedScope]":
    """The open scopes of this thread, innermost first."""
    return reversed(_stack.scopes)


class NestedScope:
    """A `NestedScope` checks on exit that no scope and no saved-tensor hooks inside it are still open."""

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


class Disabled(NestedScope):
    """Removes the hook pairs of scopes from torch's stack, and puts them back on exit.

    A pair that passes tensors through would still switch off torch's own in-place check.
    """

    def __init__(self) -> None:
        super().__init__()
        self.removed: list[Pair] = []

    def __str__(self) -> str:
        return "disabled()"

    def _open(self) -> None:
        top = torch_private.top_saved_tensor_hooks()
        while top is not None and isinstance(top[0], PackHook):
            torch_private.pop_saved_tensor_hooks()
            self.removed.append(top)
            top = torch_private.top_saved_tensor_hooks()
        modules.watch(self.module_entered)

    def _close(self) -> None:
        while self.removed:
            torch_private.push_saved_tensor_hooks(*self.removed.pop())
        modules.unwatch(self.module_entered)

    def module_entered(self, module: nn.Module) -> None:
        """Ignored: nothing is reported here."""


def remove_hook(hook: PackHook) -> None:
    """Remove the pair of `hook` from torch's stack, also from below others, or from those that `disabled()` removed."""
    for scope in _stack.scopes:
        if isinstance(scope, Disabled):
            scope.removed = [pair for pair in scope.removed if pair[0] is not hook]
    above: list[Pair] = []
    while (top := torch_private.top_saved_tensor_hooks()) is not None:
        torch_private.pop_saved_tensor_hooks()
        if top[0] is hook:
            break
        above.append(top)
    for pair in reversed(above):
        torch_private.push_saved_tensor_hooks(*pair)


def without_wrapper(outer: Any, wrapper: Any) -> Any:
    """The chain of wrappers of a module's calls that begins with `outer`, without `wrapper`. Each has what it wraps as
    `inner`; below a wrapper of others it is not found.
    """
    if outer is wrapper:
        return wrapper.inner
    if isinstance(outer, type(wrapper)):
        outer.inner = without_wrapper(outer.inner, wrapper)
    return outer


def belongs_to_checkpoint(pair: Pair | None) -> bool:
    """Whether a scope entered over `pair` is inside the function of a non-reentrant checkpoint."""
    if pair is None:
        return False
    if isinstance(pair[0], PackHook):
        return bool(pair[0].scope.in_checkpoint)
    return torch_private.is_checkpoint_hook(pair[0])
