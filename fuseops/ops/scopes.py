"""Settings and their scopes: process defaults, what belongs to a model, and `with` blocks over both.

Settings are *overrides* laid over each other: process < model < scopes, the innermost scope last. Every distinct stack
of overrides is interned to an int, its token. A plan is looked up by three ints (process, model, scopes), which costs
nothing in eager mode and is a plain guard under torch.compile. Only a new plan resolves tokens to `Settings`.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from fuseops.errors import FuseOpsError


class Settings(NamedTuple):
    """The settings of a call say how it is planned: fusion, rules, recipe, recomputation."""

    fusion: bool = True
    disable: frozenset[str] = frozenset()
    strict: frozenset[str] | bool = False  # True: every rule; names: those rules
    rules: tuple[Any, ...] = ()  # user rules, tried before the built-in ones
    recipe: Any = None
    strict_recipe: bool = False  # an op that would ignore the recipe raises
    reference: bool = False
    prefer: str = "speed"  # or "memory": where the faster way holds more at its peak
    recompute: bool = False  # drop the Saved fields that an op declares it `recomputes`
    dispatch_again: bool = False  # keep the Saved fields that stand in for what arrived, `again`

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


class SettingsLayer:
    """A `SettingsLayer` is an override of settings laid over those before it, and the token of both. It lives while
    somebody is inside of it, or has a plan that was made under it.
    """

    __slots__ = ("__weakref__", "before", "override", "token")

    def __init__(self, before: "SettingsLayer | None", override: Override, token: int) -> None:
        self.before, self.override, self.token = before, override, token


_lock = threading.Lock()
_numbers = itertools.count(1)  # token 0 is "nothing said"
_tokens: WeakValueDictionary[tuple[int, Override], SettingsLayer] = WeakValueDictionary()
_entries: WeakValueDictionary[int, SettingsLayer] = WeakValueDictionary()
_lasting: dict[int, SettingsLayer] = {}  # what the process and models say


def lay(before: SettingsLayer | None, override: Override) -> SettingsLayer:
    """`override` laid over what was said before; as long as it lives, the same content is the same object."""
    key = (0 if before is None else before.token, override)
    with _lock:
        said = _tokens.get(key)
        if said is None:
            said = _tokens[key] = SettingsLayer(before, override, next(_numbers))
            _entries[said.token] = said
        return said


def intern(parent: int, override: Override) -> int:
    """The token of `override` laid over `parent`, for good; the same content always gives the same token."""
    said = lay(_entries.get(parent), override)
    _lasting[said.token] = said
    return said.token


def held(tokens: Iterable[int]) -> tuple[SettingsLayer | None, ...]:
    """What tokens stand for, for who keeps them."""
    return tuple([_entries.get(token) for token in tokens])


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
    said = _entries[token] if token else None
    while said is not None:
        chain.append(said.override)
        said = said.before
    return reversed(chain)


def resolve(*tokens: int) -> Settings:
    """The settings of several tokens, later ones laid over earlier ones."""
    settings = Settings()
    for token in tokens:
        for override in overrides(token):
            settings = _apply(settings, override)
    return settings


DELAYED = "_delayed_gradients"  # in an op's __dict__: what waits for backward_dw
WGRAD_HOOKS = "_wgrad_hooks"  # in an op's __dict__: what is called once that is done
STORE = "_weight_store"  # in an op's __dict__: its quantized weights, where a recipe keeps them
SCALES = "_scale_state"  # in an op's __dict__: who finds the state of its scales among its buffers
OF_THIS_PROCESS = frozenset({"_runner", DELAYED, WGRAD_HOOKS, STORE, SCALES})


def portable(state: dict[str, Any]) -> dict[str, Any]:
    """A module's state for copies and pickles: no plans, and settings by content (a token means nothing elsewhere).

    A rule is pickled by the import path of its functions, or pickling raises.
    """
    state = {name: value for name, value in state.items() if name not in OF_THIS_PROCESS}
    if "_settings" in state:
        state["_settings"] = tuple(overrides(state["_settings"]))
    return state


def restored(state: dict[str, Any]) -> dict[str, Any]:
    """A module's state as it was before `portable`: the inverse."""
    if "_settings" in state:
        token = 0
        for override in state["_settings"]:
            token = intern(token, override)
        state = {**state, "_settings": token}
    return state


class _Process:
    """A `_Process` holds the token of process-wide settings, as an attribute that compiled code can guard on."""

    def __init__(self) -> None:
        self.token: int = 0


class Inside:
    """An `Inside` holds the scopes that a thread is inside of."""

    def __init__(self) -> None:
        self.said: SettingsLayer | None = None
        self.token: int = 0  # of that
        # by a recomputation: they are known to be those of its forward
        self.reentered: bool = False
        self.watchers: list[Callable[[Any], None]] = []  # see `watching`
        self.debug: Any = None  # a run.debug.Debug, inside `fo.debug()`


class _ScopesThread(threading.local):
    """A `_ScopesThread` holds one `Inside` a thread. Dynamo guards on attributes of that, but (in torch 2.11) not on a
    thread-local's own.
    """

    def __init__(self) -> None:
        self.inside = Inside()


process = _Process()
thread = _ScopesThread()


def current() -> Inside:
    """The scopes of this thread."""
    return thread.inside


def tokens(settings: int) -> tuple[int, int, int]:
    """The tokens of a call now, of a model with these settings."""
    return process.token, settings, thread.inside.token


class scope(ContextDecorator):
    """Lays an override over everything said so far, in this thread, for the calls made inside; can be entered again."""

    def __init__(self, override: Override) -> None:
        self.override = override
        self.entered: list[SettingsLayer] = []

    def __enter__(self) -> None:
        here = current()
        here.said = said = lay(here.said, self.override)
        here.token = said.token
        self.entered.append(said)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        here = current()
        said = last = here.said
        while said is not None and said not in self.entered:  # what is open inside ends with this
            said = said.before
        if said is None:
            self.entered.pop()
        else:
            self.entered.remove(said)  # another thread may have entered it since
            here.said, here.token = said.before, 0 if said.before is None else said.before.token
        if (said is None or said is not last) and kind is None:
            raise FuseOpsError(
                f"{self!r} was left out of order: another one is open inside it, or this is another thread. Entered "
                "in a generator or a coroutine, a scope stays in force in whoever runs next: enter and leave it "
                "without a yield or an await in between."
            )

    def _recreate_cm(self) -> "scope":
        # of each call of a function that it decorates, whichever thread calls
        return scope(self.override)

    def __repr__(self) -> str:
        said = ", ".join(f"{name}={_shown(value)}" for name, value in self.override)
        return f"<fuseops scope: {said}>"


T = TypeVar("T")
P = ParamSpec("P")


class WrittenScope(ContextDecorator, Generic[T]):
    """A `WrittenScope` is written by a generator function, and shown as the call that made it; can be entered again."""

    def __init__(self, said: str, make: Callable[[], AbstractContextManager[T]]) -> None:
        self.said, self.make = said, make
        self.entered: list[AbstractContextManager[T]] = []

    def __enter__(self) -> T:
        inner = self.make()
        value = inner.__enter__()
        self.entered.append(inner)
        return value

    def __exit__(self, *error: Any) -> bool | None:
        return self.entered.pop().__exit__(*error)

    def _recreate_cm(self) -> "WrittenScope[T]":
        return WrittenScope(self.said, self.make)

    def __repr__(self) -> str:
        return f"<fuseops scope: {self.said}>"


def written(generator: Callable[P, Iterator[T]]) -> Callable[P, WrittenScope[T]]:
    """`contextlib.contextmanager` for a public scope."""
    enter = contextmanager(generator)

    @functools.wraps(generator)
    def called(*args: P.args, **keywords: P.kwargs) -> WrittenScope[T]:
        given = ", ".join([*map(repr, args), *(f"{name}={v!r}" for name, v in keywords.items())])
        make = functools.partial(enter, *args, **keywords)
        return WrittenScope(f"{generator.__name__}({given})", make)

    return called


@contextmanager
def watching(watch: Callable[[Any], None]) -> Iterator[None]:
    """Call `watch` with every plan of a run of ops (`plan.build.RunPlan`) that runs inside, in this thread."""
    watchers = current().watchers
    watchers.append(watch)
    try:
        yield
    finally:
        watchers.remove(watch)


class Reentered(AbstractContextManager[None]):
    """Enters exactly these scopes: those of a forward, each time that it is computed again (twice, where the graph is
    read twice).
    """

    def __init__(self, said: SettingsLayer | None) -> None:
        self._said, self._before = said, list[Any]()

    def __enter__(self) -> None:
        here, said = current(), self._said
        self._before.append((here.said, here.token, here.reentered))
        here.said, here.token, here.reentered = said, 0 if said is None else said.token, True

    def __exit__(self, *raised: object) -> None:
        here = current()
        here.said, here.token, here.reentered = self._before.pop()
