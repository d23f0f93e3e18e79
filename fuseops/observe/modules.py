"""Which module runs: for the names of what plain modules save, for marks on modules, and to see
hooks of others.

torch tells a pack hook neither the module nor the op that saves. While a scope is open, two
process-wide module hooks keep a stack of the modules whose forward runs, in threads that are inside
a scope. Hooks on single modules would do less, and would keep the ops that have them from being
fused.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

Watcher = Callable[[nn.Module], None]  # is told when a module's forward begins


class _ModulesThread(threading.local):
    def __init__(self) -> None:
        self.watchers: list[Watcher] = []  # of open scopes, innermost last
        self.running: list[nn.Module] = []  # outermost first


thread = _ModulesThread()


def _entered(module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling() or not thread.watchers:
        return
    thread.running.append(module)
    thread.watchers[-1](module)


def _left(module: nn.Module, args: Any, result: Any) -> None:
    if torch.compiler.is_compiling():
        return
    running = thread.running
    if running and running[-1] is module:  # not if it was entered before the scope was
        running.pop()


_lock = threading.Lock()
_installed: list[RemovableHandle] = []
_open = 0


def install() -> None:
    """Have the hooks there until as many calls of `uninstall`. Scopes do it while they are open; a
    scheduler for as long as it is attached, since compiled code depends on which hooks there are.
    """
    global _open
    with _lock:
        _open += 1
        if _open == 1:
            _installed.append(register_module_forward_pre_hook(_entered))
            _installed.append(register_module_forward_hook(_left, always_call=True))


def uninstall() -> None:
    """Take the hooks away once there were as many calls as of `install`."""
    global _open
    with _lock:
        _open -= 1
        if _open == 0:
            while _installed:
                _installed.pop().remove()


def watch(watcher: Watcher) -> None:
    """Tells a watcher of every module that this thread enters, until `unwatch` or the next watcher."""
    thread.watchers.append(watcher)
    install()


def unwatch(watcher: Watcher) -> None:
    """Ends one `watch`."""
    if watcher in thread.watchers:
        thread.watchers.remove(watcher)
    if not thread.watchers:
        thread.running.clear()
    uninstall()


def path_in(paths: Mapping[int, str], running: Sequence[nn.Module]) -> str:
    """The path of the innermost of these modules that has one."""
    for module in reversed(running):
        path = paths.get(id(module))
        if path is not None:
            return path
    return ""


@contextmanager
def kept() -> Iterator[None]:
    """The stack of this thread is kept inside, also outside of the scopes that open there."""

    def nobody(module: nn.Module) -> None: ...

    watch(nobody)
    try:
        yield
    finally:
        unwatch(nobody)


@contextmanager
def followed(
    enter: Callable[[nn.Module, Any], None], leave: Callable[[nn.Module, Any, Any], None]
) -> Iterator[None]:
    """Calls these around every module's forward in this thread, however it ends. The stack, which is kept, has the
    module on it in `enter`, and no more in `leave`.
    """
    here = threading.get_ident()

    def entered(module: nn.Module, args: Any) -> None:
        if threading.get_ident() == here:
            enter(module, args)

    def left(module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == here:
            leave(module, args, output)

    before, after = register_module_forward_pre_hook, register_module_forward_hook
    with kept(), before(entered), after(left, always_call=True):
        yield
