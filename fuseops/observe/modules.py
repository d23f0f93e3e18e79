"""The stack of running modules, for names of saved tensors, marks on modules and the detection of others' hooks.

A pack hook gets neither the module nor the op that saves. While a scope is open, two process-wide module hooks keep a
stack of the modules whose forward runs, in threads that are inside a scope. Hooks on single modules would see less,
and ops that have hooks are not fused.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

Watcher = Callable[[nn.Module], None]  # called when a module's forward begins


class _ModulesThread(threading.local):
    def __init__(self) -> None:
        self.watchers: list[Watcher] = []  # of open scopes, innermost last
        self.running: list[nn.Module] = []  # outermost first


thread = _ModulesThread()


def _on_enter(module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling() or not thread.watchers:
        return
    thread.running.append(module)
    thread.watchers[-1](module)


def _on_leave(module: nn.Module, args: Any, result: Any) -> None:
    if torch.compiler.is_compiling():
        return
    running = thread.running
    if running and running[-1] is module:  # not if it began before the scope was entered
        running.pop()


_lock = threading.Lock()
_installed: list[RemovableHandle] = []
_open = 0


def install() -> None:
    """Install the hooks until `uninstall` was called as often. Scopes do so while they are open, a scheduler while it
    is attached, because compiled code depends on which hooks exist.
    """
    global _open
    with _lock:
        _open += 1
        if _open == 1:
            _installed.append(register_module_forward_pre_hook(_on_enter))
            _installed.append(register_module_forward_hook(_on_leave, always_call=True))


def uninstall() -> None:
    """Remove the hooks when this is the last open `install`."""
    global _open
    with _lock:
        _open -= 1
        if _open == 0:
            while _installed:
                _installed.pop().remove()


def watch(watcher: Watcher) -> None:
    """Calls a watcher with every module that this thread enters, until `unwatch` or the next watcher."""
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
    """The path of the innermost running module that has one, or ""."""
    for module in reversed(running):
        path = paths.get(id(module))
        if path is not None:
            return path
    return ""


@contextmanager
def stack_tracked() -> Iterator[None]:
    """Tracks the running modules of this thread inside, also where no scope is open."""

    def ignore(module: nn.Module) -> None: ...

    watch(ignore)
    try:
        yield
    finally:
        unwatch(ignore)


@contextmanager
def calls_watched(
    enter: Callable[[nn.Module, Any], None], leave: Callable[[nn.Module, Any, Any], None]
) -> Iterator[None]:
    """Calls `enter` and `leave` around every module's forward in this thread, also when it raises. The module is on the
    stack in `enter`, and no longer in `leave`.
    """
    this_thread = threading.get_ident()

    def on_enter(module: nn.Module, args: Any) -> None:
        if threading.get_ident() == this_thread:
            enter(module, args)

    def on_leave(module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == this_thread:
            leave(module, args, output)

    before, after = register_module_forward_pre_hook, register_module_forward_hook
    with stack_tracked(), before(on_enter), after(on_leave, always_call=True):
        yield
