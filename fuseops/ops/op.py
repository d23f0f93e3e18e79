"""The contract: an op is two pure methods and a named tuple of what it saves.

Level 1: only `fwd`; its backward is autograd over `fwd`, its saved tensors are its inputs.
Level 2: `Saved`, `saves_for` and `bwd` are written by hand.
Level 3: a method with a `call` parameter gets the `Call`, the decisions of the plan.

Everything else (autograd, fusion, offload, compile, explain) is written once, elsewhere.
"""

import copy
import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Self, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fuseops.arguments import instance_of, shown
from fuseops.errors import FuseOpsError
from fuseops.ops import scopes, stored
from fuseops.ops.local import Local, fit_state_dict, shard_groups, take_own_groups
from fuseops.ops.paths import path_of
from fuseops.recipes import Roles
from fuseops.recipes.numerics import UNNAMED, OpName
from fuseops.recipes.scales import STATE, ScaleState, prepare_load, restore_float32
from fuseops.recipes.store import WeightStore

if TYPE_CHECKING:
    # `class MyOp(fo.Op)` without a Saved; TypeVar itself has defaults from Python 3.13
    from typing_extensions import TypeVar as TypeVarWithDefault

    S = TypeVarWithDefault("S", bound=tuple[Any, ...], default=tuple[Any, ...])
else:
    S = TypeVar("S", bound=tuple[Any, ...])
Shape = tuple[int, ...]


def numel(shape: Shape) -> int:
    """Elements of a tensor of this shape, in traced code too, where sizes are symbols."""
    count = 1
    for size in shape:
        count = count * size
    return count


class Out(NamedTuple):
    """An `Out` is what `fwd` returns: y, the Saved tuple, and published side tensors by name. A bare tensor is
    `Out(y)`.
    """

    y: Any
    saved: Any = None
    side: Mapping[str, Tensor] | None = None


class Grads(NamedTuple):
    """A `Grads` is what `bwd` returns: the gradient of x, of parameters by name, of side inputs by name."""

    x: Tensor | None = None
    params: Mapping[str, Tensor | None] | None = None
    side: Mapping[str, Tensor | None] | None = None


class AcrossRanks(NamedTuple):
    """An `AcrossRanks` says what an op does with other ranks.

    group    the process group whose ranks run it together: if one recomputes it, all do
    sends    rows travel, and how many arrive is for all ranks to say. The call has the formats of the next op that
             multiplies and reads what this one publishes, and no such op stays in high precision for its rows. Under
             torch.compile this op runs outside of a node, as differentiable torch
    outside  device bytes that it keeps between steps outside of torch's allocator, by owner: ops that share them give
             the same key
    note     a remark for `explain()`
    """

    group: Any = None
    sends: bool = False
    outside: Mapping[Any, int] = {}
    note: str = ""


class NothingSaved(NamedTuple):
    """`NothingSaved` is the `Saved` of ops whose backward reads nothing."""


class Precision(NamedTuple):
    """A `Precision` holds the compute dtype under autocast (None: the tensors' own) and the operand formats under a
    recipe (None: no recipe).
    """

    compute: torch.dtype | None = None
    roles: Roles | None = None

    def cast(self, t: Tensor | None) -> Tensor | None:
        """A parameter in the compute dtype. Save the parameter itself, and cast it again in `bwd`."""
        return t if t is None or self.compute is None else t.to(self.compute)

    def autocast(self, device: str) -> AbstractContextManager[Any]:
        """What a level-1 op runs under: the autocast that a plain module would see."""
        return nullcontext() if self.compute is None else torch.autocast(device, self.compute)


class Call(NamedTuple):
    """A `Call` holds the plan's decisions for an op in one call (level 3); some fields are valid for that call only.

    needs      the gradients that are needed: "x", parameter names, side names
    keep       the Saved fields that some needed gradient reads; the others are dropped, and may be None
    precision  compute dtype under autocast, and operand formats under a recipe
    training   the op's mode in the forward, also when `bwd` runs
    store      the store of the op's quantized weight, where the recipe keeps it
    name       the op's path in the model, where that is known, and its id
    scales     the state of the op's scales, where the recipe has one
    seed       (1,) int64, drawn in the forward, where the recipe rounds stochastically
    prefer     "speed" or "memory": which algorithm to run, where the faster one has a higher peak

    For ops with `live_call`:
    out        buffers by name. In bwd, the main_grad of a parameter: an op that adds its gradient to it (or writes it,
               where `overwrite` names the parameter) returns None for that gradient. The caller's buffers for "y" and
               "dx": an op that writes to one returns that very tensor, otherwise its result is copied there
    scratch    a dict shared by all ops of one call of a Sequential and its backward
    """

    needs: frozenset[str] = frozenset()
    keep: frozenset[str] = frozenset()
    precision: Precision = Precision()
    training: bool = True
    store: WeightStore | None = None
    name: OpName = UNNAMED
    scales: ScaleState | None = None
    seed: Tensor | None = None
    prefer: str = "speed"
    overwrite: frozenset[str] = frozenset()
    out: Mapping[str, Tensor] | None = None
    scratch: dict[str, Any] | None = None

    @property
    def rounds_at_random(self) -> bool:
        """Whether its operands depend on random numbers."""
        roles = self.precision.roles
        return roles is not None and roles.rounds_at_random


T = TypeVar("T", bound=tuple[Any, ...])
make_tuple = tuple.__new__  # (NamedTuple class, all its fields): half the time of its constructor


def fast_replace(t: T, **changes: Any) -> T:
    """`t._replace(**changes)` of a NamedTuple in a third of its time: unknown names are not refused."""
    return make_tuple(type(t), map(changes.get, t._fields, t))  # type: ignore[attr-defined]


Parameters = Collection[inspect.Parameter]


class Signature(NamedTuple):
    """A `Signature` lists the keywords that an op class takes, read once from its `fwd` and `bwd`."""

    keywords: tuple[str, ...]  # parameters and side inputs that fwd names, without `call`
    optional: frozenset[str]  # those with a default
    any_side: bool  # fwd takes **side: those of the instance's `reads` that it does not name
    fwd_call: bool
    bwd_call: bool
    bwd_dside: bool


def _signature(fwd: Parameters, bwd: Parameters) -> Signature:
    own = {p.name: p for p in fwd if p.kind is p.KEYWORD_ONLY}
    backward = {p.name for p in bwd if p.kind is p.KEYWORD_ONLY}
    named = {name: p for name, p in own.items() if name != "call"}
    return Signature(
        keywords=tuple(named),
        optional=frozenset(name for name, p in named.items() if p.default is not p.empty),
        any_side=any(p.kind is p.VAR_KEYWORD for p in fwd),
        fwd_call="call" in own,
        bwd_call="call" in backward,
        bwd_dside="dside" in backward,
    )


class Op(nn.Module, Generic[S]):
    """Base of every op.  Subclass as `class MyOp(Op[MyOpSaved])`, or `Op` alone for a level-1 op.

    fwd(self, x, *, <parameters, buffers, side inputs>) -> Out(y, saved, side), or y alone. It is pure, and takes every
    tensor by keyword, never from `self`. bwd(self, saved, dy) -> Grads; without one, the backward is autograd over
    `fwd`. Either may take a `call: Call`, and the bwd of an op with `writes` takes `dside`, the gradients of its side
    tensors by name.

    A subclass declares (an instance may set reads, writes, saves_for and the last two for itself):
    reads        side inputs, by name; gradients flow back to them by name
    writes       side tensors that it publishes
    losses       those of them that are losses: in training one that nothing reads is an error, since it would be lost
    integers     side inputs and outputs that have no gradient
    renames      {keyword of a side input: its name in the Sequential}, where they differ; set before the first call
    saves_for    {need: the Saved fields that its gradient reads}; a need is "x", a parameter or a side input.
                 None: every gradient reads all fields
    recomputes   Saved fields that bwd can recompute: they are None under `offload.recompute()`
    cut_before   a segment (one autograd node) may end before this op: norms, Tap
    autocast     its input is cast to the autocast dtype, as torch does for GEMMs
    multiplies   it has GEMMs whose operands a recipe quantizes, through `fuseops.ops.linear` and its like
    stays_high   why its GEMMs are in high precision under every recipe, for `explain()`
    ignores_recipe   those GEMMs are of a kind that recipes are for, so that `fo.recipe(..., strict=True)` refuses them
    quantizes    it has no GEMMs, but its call has the formats of the recipe
    takes_quantized   its fwd accepts a `Quantized` x, where it multiplies in the formats of a recipe, or has no GEMMs;
                 other ops get the dequantized tensor. A subclass with its own fwd must declare it again
    held         tensors by keyword that a backward reads as its forward did, also where a checkpoint runs the op again
    live_call    it uses call.out and call.scratch
    floats       x must be of a real float dtype
    delays       parameters whose gradients wait for `backward_dw()`
    accumulate_into_main_grad   parameter gradients are added to `parameter.main_grad`, and `.grad` stays None
    across_ranks  what it does with other ranks, an `AcrossRanks`
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    losses: ClassVar[tuple[str, ...]] = ()
    renames: Mapping[str, str] = {}
    integers: ClassVar[frozenset[str]] = frozenset()
    saves_for: Mapping[str, tuple[str, ...]] | None = None
    recomputes: ClassVar[tuple[str, ...]] = ()
    cut_before: ClassVar[bool] = False
    autocast: ClassVar[bool] = False
    multiplies: ClassVar[bool] = False
    stays_high: ClassVar[str] = ""
    ignores_recipe: ClassVar[bool] = False
    quantizes: ClassVar[bool] = False
    takes_quantized: ClassVar[bool] = False
    held: ClassVar[tuple[str, ...]] = ()
    live_call: ClassVar[bool] = False
    floats: ClassVar[bool] = False
    delays: tuple[str, ...] = ()
    accumulate_into_main_grad: bool = False
    across_ranks: AcrossRanks = AcrossRanks()

    _runner: Any = None  # of an op that is called alone
    _settings: int = 0  # token of the settings of fuseops.configure
    _settings_layer: Any = None  # which keeps the token valid
    # set by a style of parallelism: `Local` by name; ops that always run before and after this one; its `InputLayout`
    _local: Mapping[str, Local] = {}
    _around: tuple[tuple["Op[Any]", ...], tuple["Op[Any]", ...]] = ((), ())
    _layout: Any = None

    Saved: ClassVar[type[Any]]
    signature: ClassVar[Signature]
    pure: ClassVar[bool]  # level 1: a `fwd` and no `bwd`
    own_methods: ClassVar[tuple[Any, ...]] = ()  # fwd and bwd as the class was defined

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "fwd" in cls.__dict__ and "takes_quantized" not in cls.__dict__:
            cls.takes_quantized = False
        declares = not cls.__dict__.keys().isdisjoint(("fwd", "bwd", "saves_for"))
        if not declares and hasattr(cls, "signature"):
            return
        if cls.fwd is Op.fwd:
            return  # an abstract family; its members define fwd
        cls.pure = cls.bwd is Op.bwd
        cls.own_methods = cls.fwd, cls.bwd
        fwd, bwd = (inspect.signature(m).parameters.values() for m in cls.own_methods)
        _check_method(cls, "fwd", fwd, "x")
        if not cls.pure:
            _check_method(cls, "bwd", bwd, "saved", "dy")
        cls.signature = _signature(fwd, bwd)
        if cls.pure:
            if cls.__dict__.get("saves_for") is not None:
                raise FuseOpsError(
                    f"{cls.__name__} declares saves_for, and no bwd that would read what it saves: define "
                    "bwd(self, saved, dy), or leave saves_for out."
                )
            if cls.signature.any_side:
                raise FuseOpsError(
                    f"{cls.__name__}.fwd takes **side, and has no bwd: the backward runs fwd again on what was saved "
                    "by name. Name the side inputs, fwd(self, x, *, <side inputs>), or define bwd(self, saved, dy)."
                )
            fields = [(name, Tensor | None) for name in ("x", *cls.signature.keywords)]
            cls.Saved = NamedTuple(f"{cls.__name__}Saved", fields)  # type: ignore[misc, assignment]
            cls.saves_for = None
        else:
            cls.Saved = _saved_class(cls)
            needs = None if cls.signature.any_side else {"x", *cls.signature.keywords}
            check_saves_for(cls.__name__, cls, needs)

    def fwd(self, *args: Any, **keywords: Any) -> Any:
        """Compute Out (or a bare tensor) from x and, by keyword, parameters and side inputs."""
        raise NotImplementedError(f"{type(self).__name__} defines no fwd")

    def bwd(self, *args: Any, **keywords: Any) -> Grads:
        """Compute Grads from Saved and the gradient of y."""
        raise NotImplementedError(f"{type(self).__name__} defines no bwd")

    def out_shape(self, shape: Shape) -> Shape:
        """The shape of y for a shape of x. Override it when they differ, and to raise ShapeError for a wrong width."""
        return shape

    def out_shapes(
        self, shape: Shape, sides: Mapping[str, Shape]
    ) -> tuple[Shape, Mapping[str, Shape]]:
        """The shapes of y and, where known, of its side tensors, for those of x and of known side inputs."""
        return self.out_shape(shape), {}

    @property
    def alias(self) -> bool:
        """True when y is (a view of) x, so that the op runs outside the autograd node."""
        return False

    def forward(self, *args: Any, **side: Any) -> Any:
        """Run this op alone on x, exactly as inside a Sequential; side inputs by name, or one Routing.

        out: buffers of the caller that are written to, {"y": tensor, "dx": tensor}.
        """
        return run_alone(self, *args, **side)

    def backward_dw(self) -> int:
        """Compute the delayed gradients, as `Sequential.backward_dw` does.   -> the number of gradients"""
        return run_delayed(self)

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """Have `backward_dw()` call `hook()` after the delayed gradients are computed.

        Megatron's overlapped gradient reduction registers it for parameters with `skip_backward_post_hook`.
        """
        what = f"{type(self).__name__}.register_wgrad_accumulation_and_reduce_hooks(hook)"
        instance_of(hook, Callable, what, "a function without arguments")
        self.__dict__.setdefault(scopes.WGRAD_HOOKS, []).append(hook)

    def parameter_names(self) -> tuple[str, ...]:
        """The keywords of `fwd` that are parameters or buffers of this instance (None parameters included)."""
        if not hasattr(self, "signature"):
            raise FuseOpsError(
                f"{type(self).__name__} defines no fwd(self, x, *, <parameters>, <side inputs>)."
            )
        names = []
        for name in self.signature.keywords:
            if name in self.reads:
                continue
            if self._has_tensor(name):
                value = self.__dict__.get(name, getattr(type(self), name, None))
                if not isinstance(value, Tensor | property | None):
                    raise FuseOpsError(
                        f"{type(self).__name__}.fwd takes {name!r} by keyword, which is a {type(value).__name__}: "
                        f"only parameters, buffers and side inputs come by keyword, read self.{name} for the rest."
                    )
                names.append(name)
            elif name not in self.signature.optional:
                raise FuseOpsError(
                    f"{type(self).__name__}.fwd takes {name!r} by keyword, which is neither a parameter or buffer "
                    f"of the op nor in its reads {self.reads}: register it, or add it to `reads`."
                )
        return tuple(names)

    def _has_tensor(self, name: str) -> bool:
        """Whether the op has a tensor for a keyword.  Reads no value: a parametrized one would be computed."""
        own = self._parameters.keys() | self._buffers.keys()
        found = any(n in own or hasattr(type(self), n) for n in self.registered(name))
        return found or hasattr(self, name)

    def registered(self, name: str) -> tuple[str, ...]:
        """The names of the registered parameters behind a keyword of `fwd`: itself, or the parts of a packed one."""
        return (name,)

    def sample(self, name: str) -> Any:
        """A tensor with the dtype, class and requires_grad of the parameter `name`."""
        return getattr(self, name)

    def side_names(self) -> tuple[str, ...]:
        """The keywords of the side inputs that `fwd` of this instance takes."""
        unread = [name for name in self.reads if name not in self.signature.keywords]
        if unread and not self.signature.any_side:
            raise FuseOpsError(
                f"{type(self).__name__} reads {unread}, but its fwd takes no such keyword: "
                f"add it to fwd(self, x, *, ...), or take **side."
            )
        return self.reads

    def side_bindings(self) -> tuple[tuple[str, str], ...]:
        """(keyword of `fwd`, name in the Sequential) of every side input."""
        reads, renames = self.side_names(), self.renames
        if unread := [keyword for keyword in renames if keyword not in reads]:
            raise FuseOpsError(f"{type(self).__name__} renames {unread}, and reads {list(reads)}.")
        return tuple([(keyword, renames.get(keyword, keyword)) for keyword in reads])

    def rename(self, **names: str) -> None:
        """Read side inputs under other names: `rename(probs="p2")`. Constructors pass their own keywords on."""
        check_names(type(self).__name__, **names)
        self.renames = {**self.renames, **{k: n for k, n in names.items() if k != n}}

    def renamed(self) -> list[str]:
        """The renames, as the constructor takes them."""
        return [f"{keyword}={name!r}" for keyword, name in self.renames.items()]

    def _planned(self) -> list[tuple[str, nn.Module]]:
        """The children to plan: an op called alone is a sequence of one."""
        return [((path_of(self) or "").rpartition(".")[2] or "0", self)]

    def _planned_modules(self) -> tuple[nn.Module, ...]:
        return (self,)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **keywords: Any
    ) -> None:
        self._drop_quantized_weights()
        fit_state_dict(self, state_dict, prefix)
        take_own_groups(self, state_dict, prefix, STATE)
        prepare_load(self._buffers, state_dict, prefix)
        if (state := self.__dict__.get(scopes.SCALES)) is not None:
            state.recipe = None  # the scales that are loaded may be of another one
        assign = args[0].get("assign_to_params_buffers", False)
        loaded = stored.load(self, state_dict, prefix, args[-1], assign)
        super()._load_from_state_dict(state_dict, prefix, *args, **keywords)
        missing: list[str] = args[-3]
        missing[:] = [key for key in missing if key not in loaded]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        shard_groups(self, destination, prefix, STATE)
        stored.save(self, destination, prefix, keep_vars)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._drop_quantized_weights()
        before, parameter = dict(self._buffers), self._parameters.get("weight")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        restore_float32(self._buffers, before)
        if (weight := stored.stored_in(self)) is not None:
            weight.blank_carrier(self, parameter, self._parameters.get("weight"))
        return self

    def _drop_quantized_weights(self) -> None:
        """Drop quantized weights before parameters are replaced: their memory, and weak references to the parameters,
        with which torch cannot swap tensors.
        """
        store: WeightStore | None = self.__dict__.get(scopes.STORE)
        if store is not None:
            store.drop()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy by `__getstate__` and `__setstate__`, which the class that torch gives a parametrized op does not."""
        copied = self.__new__(type(self))
        memo[id(self)] = copied
        own: Any = parametrize.type_before_parametrizations(self)
        copied.__setstate__(copy.deepcopy(own.__getstate__(self), memo))
        return copied

    def _replicate_for_data_parallel(self) -> Self:
        """A replica for torch.nn.DataParallel, without the plans and caches of the original."""
        replica: Self = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        for name in scopes.OF_THIS_PROCESS:
            replica.__dict__.pop(name, None)
        return replica

    def __getstate__(self) -> dict[str, Any]:
        return scopes.portable(super().__getstate__())  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(scopes.restored(state))  # type: ignore[no-untyped-call]
        if (weight := stored.stored_in(self)) is not None:
            weight.blank_carrier(self)
            weight.hook_master()


def _check_method(cls: type["Op[Any]"], method: str, parameters: Parameters, *names: str) -> None:
    """Raise FuseOpsError unless a `fwd` or `bwd` takes exactly `names` by position; the rest must be keywords."""
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return
    fixed = () if isinstance(inspect.getattr_static(cls, method), staticmethod) else ("self",)
    given = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in given if p.default is p.empty]
    least = len(fixed) + len(names)
    if len(given) < least or len(needed) > least:
        beyond = "".join(f", {p.name}" for p in needed[least:]) or ", ..."
        raise FuseOpsError(
            f"{cls.__name__}.{method}({', '.join(p.name for p in parameters)}) takes by position what comes by "
            f"keyword, or too little: write {method}({', '.join((*fixed, *names))}, *{beyond})."
        )


def _saved_class(cls: type[Op[Any]]) -> type[Any]:
    for klass in cls.__mro__:
        for base in getattr(klass, "__orig_bases__", ()):
            args = get_args(base)
            if args and isinstance(args[0], type) and hasattr(args[0], "_fields"):
                saved: type[Any] = args[0]
                return saved
    raise FuseOpsError(
        f"{cls.__name__} defines bwd but not what it saves: subclass Op[{cls.__name__}Saved] with a NamedTuple."
    )


def check_saves_for(name: str, saver: Any, needs: Collection[str] | None) -> None:
    """Raise FuseOpsError where `saves_for` of an op or a fused op has an unknown field, or a need not in `needs` (None:
    any).
    """
    fields = saver.Saved._fields
    if not isinstance(saver.saves_for, Mapping | None):
        raise FuseOpsError(
            f"{name}.saves_for is {shown(saver.saves_for)}, expected {{need: the fields that its gradient reads}}."
        )
    for need, saved in (saver.saves_for or {}).items():
        if isinstance(saved, str):
            raise FuseOpsError(
                f"{name}.saves_for[{need!r}] is a tuple of fields, ({saved!r},), not {saved!r}."
            )
        if needs is not None and need not in needs:
            raise FuseOpsError(
                f"{name}.saves_for has a need {need!r}, but its fwd takes {sorted(needs)}."
            )
        if unknown := set(saved).difference(fields):
            raise FuseOpsError(
                f"{name}.saves_for[{need!r}] names {sorted(unknown)}, but {saver.Saved.__name__} has "
                f"{sorted(fields)}."
            )


NON_CONFIG_ATTRS = frozenset(nn.Module().__dict__) | {
    *("_runner", "_settings", scopes.LAYER),
    *("_local", "_around", "_layout"),  # set by a style of parallelism
}
"""Attributes of an op that are not settings of its computation."""


Calls = tuple[Call, ...]
MemberTensors = tuple[Mapping[str, Tensor], ...]
SideGrads = Mapping[str, Tensor | None]
"""Arguments of a fused op: the call of each member, its parameters and side inputs by name, and the gradients of the
members' side tensors.
"""


class FusedOp:
    """A `FusedOp` replaces a run of ops, its `members`, in a rule.

    t is a tuple with the parameters and side inputs of each member by name (`t[0]["weight"]`), calls the `Call` of
    each; both in sequence order, also in backward rules.

    forward rule   fwd(x, t, calls) -> Out(y, saved=tuple of the members' own Saved, side)
    backward rule  bwd(saved, dy, calls, dside) -> tuple of Grads, dx in the first; saved: the members' own
    joint rule     fwd(x, t, calls, keep) -> Out(y, saved=its own Saved, side), keep: the fields that will be read;
                   bwd(saved, dy, calls, dside) -> tuple of Grads

    A joint one declares `Saved`, `saves_for` over "x", "0.weight", "1.probs", `recomputes` as of an op, and
    `names` = {field: "0.x"}, the names of its saved tensors.
    takes_saved: bwd gets a list with its `Saved` and pops it, so that the caller holds no reference to what bwd frees.
    bwd may overwrite a saved tensor of its own fwd where `registry.held_once` shows that nobody else reads it.
    again: fields from which the backward dispatches x again, where x came from other ranks. They are kept under
    `offload.dispatch_again()` only, and fwd saves either them or x.

    recipes: it multiplies in the formats of a recipe, through the functions that its members multiply through
    (`fuseops.ops.linear` and its like). Without it, a rule over a member that multiplies is a miss under a recipe.
    takes_quantized: as of an op.
    """

    Saved: ClassVar[type[Any]]
    # set by the class, or by an instance where they depend on the members
    saves_for: Mapping[str, tuple[str, ...]] | None = None
    names: Mapping[str, str] = {}
    recomputes: tuple[str, ...] = ()
    again: ClassVar[tuple[str, ...]] = ()
    takes_saved: ClassVar[bool] = False
    recipes: bool = False
    takes_quantized: bool = False

    def __init__(self, *members: Op[Any]) -> None:
        for member in members:
            if not isinstance(member, Op):
                raise FuseOpsError(
                    f"{type(self).__name__}(*members) expects ops, the run that it replaces, got {shown(member)}."
                )
        self.members = members

    def fwd(self, x: Any, t: MemberTensors, calls: Calls, /, *args: Any, **keywords: Any) -> Out:
        """The forward of the run: see the class. A joint rule takes `keep: frozenset[str]` too."""
        raise NotImplementedError(f"{type(self).__name__} defines no fwd")

    def bwd(self, saved: Any, dy: Any, calls: Calls, dside: Any, /) -> tuple[Grads, ...]:
        """The backward of the run: see the class."""
        raise NotImplementedError(f"{type(self).__name__} defines no bwd")

    def choices(self, x: Any, t: Any, calls: Any) -> str:
        """The choices that the backward of such a call makes by its shapes, as a text for `explain()`, or ""."""
        return ""


def run_delayed(module: nn.Module) -> int:
    """Bound by `fuseops.layers.sequential`, as `run_alone` is."""
    raise NotImplementedError("import fuseops before calling an op")


def run_alone(op: Op[Any], x: Any, *args: Any, **side: Any) -> Any:
    """Bound by `fuseops.layers.sequential` (imports point down only, and the planner lives above)."""
    raise NotImplementedError("import fuseops before calling an op")


def changed_options(owner: Any, **defaults: Any) -> list[str]:
    """The attributes whose values are not these defaults, as a constructor takes them."""
    values = ((name, getattr(owner, name)) for name in defaults)
    return [f"{name}={value!r}" for name, value in values if value != defaults[name]]


def check_names(op: str, **names: Any) -> None:
    """Raise FuseOpsError for a name, as of a side tensor, that is not a string or empty."""
    for what, name in names.items():
        if not isinstance(name, str) or not name:
            raise FuseOpsError(f"{op}: {what} is {shown(name)}, expected a name, a string.")
