"""Settings come from the process, the model and `with` scopes; the later ones override the earlier ones.

An *override* is a set of fields with their values. Every distinct stack of overrides is interned to an int, its token.
A plan is looked up by three tokens (process, model, scopes), which costs nothing in eager mode and is a plain guard
under torch.compile. Tokens are resolved to `Settings` only for a new plan.
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
    """`Settings` control how a call is planned: fusion, rules, recipe, recomputation."""

    fusion: bool = True
    disable: frozenset[str] = frozenset()
    strict: frozenset[str] | bool = False  # True: every rule; names: those rules
    rules: tuple[Any, ...] = ()  # user rules, tried before the built-in ones
    recipe: Any = None
    strict_recipe: bool = False  # an op that would ignore the recipe raises
    reference: bool = False
    prefer: str = "speed"  # or "memory": where the faster way holds more at its peak
    recompute: bool = False  # drop the Saved fields that an op declares it `recomputes`
    # keep the Saved fields `again`, from which the backward dispatches x again
    dispatch_again: bool = False

    def difference(self, other: "Settings") -> list[str]:
        """A text for each setting that differs, with both values."""
        pairs = zip(self._fields, self, other, strict=True)
        return [f"{name} was {_shown(a)}, is {_shown(b)}" for name, a, b in pairs if a != b]


def _shown(value: Any) -> str:
    """A value in a message: rules by their names."""
    if isinstance(value, tuple):
        return repr([getattr(item, "name", item) for item in value])
    return repr(sorted(value) if isinstance(value, frozenset) else value)


# (field, value) pairs; rules are prepended, disable is united
Override = tuple[tuple[str, Any], ...]


class SettingsLayer:
    """A `SettingsLayer` is an override on top of its parent layer, and the token of that stack.

    An entered scope, the process, modules with these settings, and plans that were made under it keep it alive.
    """

    __slots__ = ("__weakref__", "override", "parent", "token")

    def __init__(self, parent: "SettingsLayer | None", override: Override, token: int) -> None:
        self.parent, self.override, self.token = parent, override, token


LAYER = "_settings_layer"  # attribute of modules: the layer of their `_settings`

_lock = threading.Lock()
_numbers = itertools.count(1)  # token 0 is "no override"
_interned: WeakValueDictionary[tuple[int, Override], SettingsLayer] = WeakValueDictionary()
_by_token: WeakValueDictionary[int, SettingsLayer] = WeakValueDictionary()


def layer_over(parent: SettingsLayer | None, override: Override) -> SettingsLayer:
    """The layer of `override` on top of `parent`; while it is alive, equal stacks are one object."""
    key = (0 if parent is None else parent.token, override)
    with _lock:
        layer = _interned.get(key)
        if layer is None:
            layer = _interned[key] = SettingsLayer(parent, override, next(_numbers))
            _by_token[layer.token] = layer
        return layer


def settled(layer: SettingsLayer | None) -> dict[str, Any]:
    """The attributes of a module with settings: the token, which compiled code guards on, and what keeps it valid."""
    return {"_settings": 0 if layer is None else layer.token, LAYER: layer}


def layers_of(tokens: Iterable[int]) -> tuple[SettingsLayer | None, ...]:
    """The layers of tokens: a caller that holds them keeps the tokens valid."""
    return tuple([_by_token.get(token) for token in tokens])


def _apply(settings: Settings, override: Override) -> Settings:
    for field, value in override:
        if field == "rules":
            value = value + settings.rules
        elif field == "disable":
            value = value | settings.disable
        settings = settings._replace(**{field: value})
    return settings


def overrides(token: int) -> Iterator[Override]:
    """The stack of overrides of a token, outermost first."""
    chain = []
    layer = _by_token[token] if token else None
    while layer is not None:
        chain.append(layer.override)
        layer = layer.parent
    return reversed(chain)


def resolve(*tokens: int) -> Settings:
    """The settings of several tokens, of which later ones override earlier ones."""
    settings = Settings()
    for token in tokens:
        for override in overrides(token):
            settings = _apply(settings, override)
    return settings


# keys of an op's `__dict__`
DELAYED = "_delayed_gradients"  # weight gradients that wait for backward_dw
WGRAD_HOOKS = "_wgrad_hooks"  # called after backward_dw
STORE = "_weight_store"  # its quantized weights, where a recipe keeps them
SCALES = "_scale_state"  # the `ScaleState` over its buffers
OF_THIS_PROCESS = frozenset({"_runner", DELAYED, WGRAD_HOOKS, STORE, SCALES})


def portable(state: dict[str, Any]) -> dict[str, Any]:
    """A module's state for copies and pickles: without plans, and with overrides instead of their token.

    A rule is pickled by the import path of its functions, or pickling raises.
    """
    left_out = OF_THIS_PROCESS | {LAYER}
    state = {name: value for name, value in state.items() if name not in left_out}
    if "_settings" in state:
        state["_settings"] = tuple(overrides(state["_settings"]))
    return state


def restored(state: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `portable`."""
    if "_settings" in state:
        layer = None
        for override in state["_settings"]:
            layer = layer_over(layer, override)
        state = {**state, **settled(layer)}
    return state


class _Process:
    """A `_Process` holds the token of process-wide settings, as an attribute that compiled code can guard on."""

    def __init__(self) -> None:
        self.token: int = 0
        self.layer: SettingsLayer | None = None

    def settle(self, layer: SettingsLayer) -> None:
        self.layer, self.token = layer, layer.token


class ThreadScopes:
    """A `ThreadScopes` holds the scopes that a thread has entered."""

    def __init__(self) -> None:
        self.layer: SettingsLayer | None = None
        self.token: int = 0  # of the layer
        self.recomputing: bool = False  # the layer is that of the forward that is recomputed
        self.watchers: list[Callable[[Any], None]] = []  # see `watch_plans`
        self.debug: Any = None  # a run.debug.Debug, inside `fo.debug()`
        self.storing: Any = None  # the recipe, inside `fo.quantized_init()`


class _ScopesThread(threading.local):
    """A `_ScopesThread` holds one `ThreadScopes` a thread. Dynamo guards on attributes of that object, but (in torch
    2.11) not on a thread-local's own.
    """

    def __init__(self) -> None:
        self.active = ThreadScopes()


process = _Process()
thread = _ScopesThread()


def current() -> ThreadScopes:
    """The scopes of this thread."""
    return thread.active


def tokens(settings: int) -> tuple[int, int, int]:
    """The tokens of a call that runs now, of a model with the token `settings`."""
    return process.token, settings, thread.active.token


class scope(ContextDecorator):
    """A `scope` adds an override, in this thread, for the calls made inside; it can be entered again."""

    def __init__(self, override: Override) -> None:
        self.override = override
        self.entered: list[SettingsLayer] = []

    def __enter__(self) -> None:
        here = current()
        here.layer = layer = layer_over(here.layer, self.override)
        here.token = layer.token
        self.entered.append(layer)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        here = current()
        layer = last = here.layer
        # scopes open inside end with this one
        while layer is not None and layer not in self.entered:
            layer = layer.parent
        if layer is None:
            self.entered.pop()
        else:
            self.entered.remove(layer)  # another thread may have entered it since
            here.layer, here.token = layer.parent, 0 if layer.parent is None else layer.parent.token
        if (layer is None or layer is not last) and kind is None:
            raise FuseOpsError(
                f"{self!r} was left out of order: another one is open inside it, or this is another thread. Entered "
                "in a generator or a coroutine, a scope stays in force in whoever runs next: enter and leave it "
                "without a yield or an await in between."
            )

    def _recreate_cm(self) -> "scope":
        # of each call of a function that it decorates, whichever thread calls
        return scope(self.override)

    @property
    def shown_as(self) -> str:
        """The override, in its repr."""
        return ", ".join(f"{name}={_shown(value)}" for name, value in self.override)

    def __repr__(self) -> str:
        return f"<fuseops scope: {self.shown_as}>"


T = TypeVar("T")
P = ParamSpec("P")


class GeneratorScope(ContextDecorator, Generic[T]):
    """A `GeneratorScope` is a scope from a generator function, with the call as its repr; it can be entered again."""

    def __init__(self, shown_as: str, make: Callable[[], AbstractContextManager[T]]) -> None:
        self.shown_as, self.make = shown_as, make
        self.entered: list[AbstractContextManager[T]] = []

    def __enter__(self) -> T:
        inner = self.make()
        value = inner.__enter__()
        self.entered.append(inner)
        return value

    def __exit__(self, *error: Any) -> bool | None:
        return self.entered.pop().__exit__(*error)

    def _recreate_cm(self) -> "GeneratorScope[T]":
        return GeneratorScope(self.shown_as, self.make)

    def __repr__(self) -> str:
        return f"<fuseops scope: {self.shown_as}>"


def generator_scope(generator: Callable[P, Iterator[T]]) -> Callable[P, GeneratorScope[T]]:
    """`contextlib.contextmanager` for a public scope, which gives a `GeneratorScope`."""
    enter = contextmanager(generator)

    @functools.wraps(generator)
    def called(*args: P.args, **keywords: P.kwargs) -> GeneratorScope[T]:
        given = ", ".join([*map(repr, args), *(f"{name}={v!r}" for name, v in keywords.items())])
        make = functools.partial(enter, *args, **keywords)
        return GeneratorScope(f"{generator.__name__}({given})", make)

    return called


@contextmanager
def watch_plans(watch: Callable[[Any], None]) -> Iterator[None]:
    """Call `watch` with the plan (`plan.build.RunPlan`) of every run of ops inside, in this thread."""
    watchers = current().watchers
    watchers.append(watch)
    try:
        yield
    finally:
        watchers.remove(watch)


class RestoredScopes(AbstractContextManager[None]):
    """A `RestoredScopes` sets the scopes of a forward while it is recomputed, in place of those that are entered.

    It can be entered again, where the graph is read twice.
    """

    def __init__(self, layer: SettingsLayer | None) -> None:
        self._layer, self._before = layer, list[Any]()

    def __enter__(self) -> None:
        here, layer = current(), self._layer
        self._before.append((here.layer, here.token, here.recomputing))
        here.layer, here.token, here.recomputing = layer, 0 if layer is None else layer.token, True

    def __exit__(self, *raised: object) -> None:
        here = current()
        here.layer, here.token, here.recomputing = self._before.pop()
