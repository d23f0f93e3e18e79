"""Settings and their scopes: process defaults, what belongs to a model, and `with` blocks over both.

Settings are *overrides* laid over each other: process < model < scopes, the innermost scope last. Every distinct stack
of overrides is interned to an int, its token. A plan is looked up by three ints (process, model, scopes), which costs
nothing in eager mode and is a plain guard under torch.compile. Only a new plan resolves tokens to `Settings`.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Settings(NamedTuple):
    """What a call is planned under."""

    fusion: bool = True
    disable: frozenset[str] = frozenset()
    strict: frozenset[str] | bool = False  # True: every rule; names: those rules
    rules: tuple[Any, ...] = ()  # user rules, tried before the built-in ones
    recipe: Any = None
    strict_recipe: bool = False  # an op that would ignore the recipe raises
    reference: bool = False
    recompute: bool = False  # drop the Saved fields that an op declares it `recomputes`

    def difference(self, other: "Settings") -> list[str]:
        """Names of the settings that differ, with both values."""
        pairs = zip(self._fields, self, other, strict=True)
        return [f"{name} was {_shown(a)}, is {_shown(b)}" for name, a, b in pairs if a != b]


def _shown(value: Any) -> str:
    """A value in a message: rules by their names."""
    if isinstance(value, tuple):
        return repr([getattr(item, "name", item) for item in value])
    return repr(sorted(value) if isinstance(value, frozenset) else value)


# (field, value) pairs; rules are put in front, disable is united
Override = tuple[tuple[str, Any], ...]

_lock = threading.Lock()
_tokens: dict[tuple[int, Override], int] = {}
# token -> (parent token, override); token 0 is "nothing said"
_entries: list[tuple[int, Override]] = [(0, ())]


def intern(parent: int, override: Override) -> int:
    """The token of `override` laid over `parent`; the same content always gives the same token."""
    key = (parent, override)
    with _lock:
        if key not in _tokens:
            _entries.append(key)
            _tokens[key] = len(_entries) - 1
        return _tokens[key]


def _apply(settings: Settings, override: Override) -> Settings:
    for field, value in override:
        if field == "rules":
            value = value + settings.rules
        elif field == "disable":
            value = value | settings.disable
        settings = settings._replace(**{field: value})
    return settings


def overrides(token: int) -> Iterator[Override]:
    """The overrides that a token stands for, outermost first."""
    chain = []
    while token:
        token, override = _entries[token]
        chain.append(override)
    return reversed(chain)


def resolve(*tokens: int) -> Settings:
    """The settings of several tokens, later ones laid over earlier ones."""
    settings = Settings()
    for token in tokens:
        for override in overrides(token):
            settings = _apply(settings, override)
    return settings


DELAYED = "_delayed_gradients"  # in an op's __dict__: what waits for backward_dw
OF_THIS_PROCESS = frozenset({"_runner", DELAYED})


def portable(state: dict[str, Any]) -> dict[str, Any]:
    """A module's state for copies and pickles: no plans, and settings by content (a token means nothing elsewhere).

    A rule is pickled by the import path of its functions, or pickling raises.
    """
    state = {name: value for name, value in state.items() if name not in OF_THIS_PROCESS}
    if "_settings" in state:
        state["_settings"] = tuple(overrides(state["_settings"]))
    return state


def restored(state: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `portable`."""
    if "_settings" in state:
        token = 0
        for override in state["_settings"]:
            token = intern(token, override)
        state = {**state, "_settings": token}
    return state


class _Process:
    """Process-wide defaults; a class so that the token is an attribute that compiled code can guard on."""

    token: int = 0


class Inside:
    """The scopes that a thread is inside of."""

    def __init__(self) -> None:
        self.token: int = 0
        # by a recomputation: they are known to be those of its forward
        self.reentered: bool = False
        self.watchers: list[Callable[[Any], None]] = []  # see `watching`
        self.debug: Any = None  # a run.debug.Debug, inside `fo.debug()`


class _Thread(threading.local):
    """One `Inside` a thread. Dynamo guards on attributes of that, but (in torch 2.11) not on a thread-local's own."""

    def __init__(self) -> None:
        self.inside = Inside()


process = _Process()
_thread = _Thread()


def current() -> Inside:
    """The scopes of this thread."""
    return _thread.inside


@contextmanager
def scope(override: Override) -> Iterator[None]:
    """Lay `override` over everything said so far, in this thread, for the calls made inside."""
    here = current()
    before = here.token
    here.token = intern(before, override)
    try:
        yield
    finally:
        here.token = before


@contextmanager
def watching(watch: Callable[[Any], None]) -> Iterator[None]:
    """Call `watch` with every plan of a run of ops (`plan.build.RunPlan`) that runs inside, in this thread."""
    watchers = current().watchers
    watchers.append(watch)
    try:
        yield
    finally:
        watchers.remove(watch)


@contextmanager
def inside(token: int) -> Iterator[None]:
    """Enter exactly the scopes that `token` stands for (a recomputation re-enters those of its forward)."""
    here = current()
    before = here.token, here.reentered
    here.token, here.reentered = token, True
    try:
        yield
    finally:
        here.token, here.reentered = before
