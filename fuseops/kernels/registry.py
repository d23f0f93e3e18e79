"""A kernel is registered by `@kernel_op` on its launcher.

    @kernel_op(twin=_bias_fwd, cases=...)
    def bias_fwd(x: Tensor, bias: Tensor) -> Tensor: ...

registers `torch.ops.fuseops.bias_fwd` (outside of fuseops an op of that package's namespace), whose schema is the
launcher's signature, with a fake for `torch.compile` and formulas for profilers.

A call runs the launcher where it can, and the twin, plain differentiable torch, everywhere else: on other devices, for
dtypes that the kernels do not load, where autograd or `torch.func` has to differentiate the call (kernels have no
derivative; the ops have), for tensor subclasses, and inside `reference_only()`. On a GPU, a twin that nobody asked for
is told to the logger fuseops.kernels, once for each kernel and reason, and to `explain()`.
Eager launches, and those of compiled code, bypass torch's dispatcher; dispatch and function modes, fake tensors and
dynamo see the registered op.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import CodeType
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.arguments import check_flags, check_integers, instance_of, several, shown
from fuseops.attributes import attributes_set
from fuseops.errors import FuseOpsError
from fuseops.kernels.launch import HAS_TRITON, INTERPRET, arch_of, thread
from fuseops.kernels.records import flattened
from fuseops.kernels.replay import (
    ALIGNED,
    NOT_REPLAYED,
    active_replays,
    bind_constant,
    bump_versions,
)
from fuseops.plain import PLAIN, PLAIN_OR_NONE
from fuseops.words import dtype_name

log = logging.getLogger("fuseops.kernels")

P = ParamSpec("P")
R = TypeVar("R")

DTYPES = frozenset(
    {
        *(torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    }
)
"""The dtypes that kernels load by default; a call with a tensor of any other dtype runs the twin."""

OWN_NAMESPACE = "fuseops"
KERNEL_OPS: dict[str, KernelOp[Any, Any]] = {}  # of fuseops by name, of others by namespace::name
Call = tuple["KernelOp[Any, Any]", tuple[Any, ...], dict[str, Any]]
Cases = Iterator[tuple[Any, ...]]
"""The `cases` of a kernel op: the arguments of calls, on the meta device."""

_on_launch: Callable[[Call], object] | None = None
_on_twin: Callable[[KernelOp[Any, Any], str], object] | None = None
_told: set[tuple[str, str]] = set()  # (kernel, why it runs as plain torch) that the log has


@functools.cache
def library(namespace: str = OWN_NAMESPACE) -> torch.library.Library:
    """The torch library that defines the kernel ops of a namespace."""
    return torch.library.Library(namespace, "FRAGMENT")


@contextmanager
def reference_only() -> Iterator[None]:
    """Inside, every kernel call of this thread runs its twin: the bridge enters it for plain torch, as
    `fo.reference()`.
    """
    outer = thread.reference_only, thread.replay_mode
    thread.reference_only, thread.replay_mode = True, False
    try:
        yield
    finally:
        thread.reference_only, thread.replay_mode = outer


@contextmanager
def watch_launches(
    on_launch: Callable[[Call], object] | None = None,
    on_twin: Callable[[KernelOp[Any, Any], str], object] | None = None,
) -> Iterator[list[Call]]:
    """Inside, launches of all threads are collected as (op, args, kwargs), or passed to `on_launch`.

    on_twin: is called with each op that runs as plain torch where nobody asked for that, and the reason.
    """
    global _on_launch, _on_twin
    launched: list[Call] = []
    outer, _on_launch, _on_twin = (_on_launch, _on_twin), on_launch or launched.append, on_twin
    try:
        yield launched
    finally:
        _on_launch, _on_twin = outer


def as_if_on(arch: int) -> AbstractContextManager[None]:
    """Inside, fake CPU tensors count as CUDA tensors of an architecture, so that calls of its kernels go to the
    registered ops and their fakes. For dry runs.
    """
    return attributes_set([(thread, "as_arch", arch)])


class KernelOp(Generic[P, R]):
    """A `KernelOp` is a kernel with its twin and formulas, callable like the launcher it was made from."""

    def __init__(self, launcher: Callable[P, R], options: kernel_op) -> None:
        options = _checked(options)
        functools.update_wrapper(self, launcher)
        self.name: str = launcher.__name__
        namespace = options.namespace or launcher.__module__.partition(".")[0].strip("_")
        self.label = f"{namespace}::{self.name}"
        self.twin = flattened(options.twin)
        signature = inspect.signature(launcher)
        self._defaults = tuple([(p.name, p.default) for p in signature.parameters.values()])
        self._names = tuple([name for name, _ in self._defaults])
        self.min_arch, self.fuses = options.min_arch, options.fuses
        self.traces_twin = options.traces_twin
        formulas = options.flops, options.nbytes
        self.flops, self._nbytes = (None if f is None else flattened(f) for f in formulas)
        self.cases = options.cases
        self.dtypes = options.dtypes
        key = self.name if namespace == OWN_NAMESPACE else self.label
        if key in KERNEL_OPS:
            raise FuseOpsError(
                f"kernel op '{self.label}' is registered twice: torch keeps an op until the process ends, so give the "
                "launcher another name."
            )
        try:
            schema = torch.library.infer_schema(launcher, mutates_args=options.mutates)
        except ValueError as error:
            raise FuseOpsError(
                f"kernel op '{self.label}' has no schema: {error} Its launcher declares all types."
            ) from None
        if re.match(r"\(Tensor(\(\w+!\))? ", schema) is None:
            raise FuseOpsError(
                f"kernel op '{self.label}' takes {schema.partition(' -> ')[0]}: its first argument has to be a Tensor, "
                "by whose device a call knows whether it launches."
            )
        if " *, " in schema:
            raise FuseOpsError(
                f"kernel op '{self.label}' takes {schema.partition(' -> ')[0]}, some of it by keyword alone, and calls "
                "are repeated by position: leave the * out of the launcher. Callers may give keywords all the same."
            )
        if self.twin is options.twin:  # it takes no record
            _check_twin(self.label, signature, options.twin)
        self._takes_lists = re.search(r"Tensor\S*\[", schema.partition(" -> ")[0]) is not None
        lib = library(namespace)
        lib.define(self.name + schema)
        lib.impl(self.name, self._torch_impl, "CompositeExplicitAutograd")
        returns_nothing = signature.return_annotation in (None, "None")
        shapes = (lambda *_: None) if returns_nothing else flattened(options.fake or options.twin)
        torch_private.register_fake(
            lib,
            self.name,
            lambda *args, **kwargs: _run_fake(shapes, self._positional(args, kwargs)),
            f"fuseops kernel op '{self.label}'",
        )
        self.op = getattr(getattr(torch.ops, namespace), self.name).default
        parameters = enumerate(self.op._schema.arguments)
        self.writes = [
            k for k, a in parameters if a.alias_info is not None and a.alias_info.is_write
        ]
        self.announced = self.writes if options.announces else []
        self.launcher = self._with_version_bump(launcher) if self.announced else launcher
        self._torch_dispatcher = torch_private.replace_overload(self.op, self._python_impl())
        KERNEL_OPS[key] = self
        if self.flops is not None and "torch.utils.flop_counter" in sys.modules:
            register_flops()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not args:
            return self(*self._positional(args, kwargs))  # type: ignore[call-arg]
        mode = thread.replay_mode
        if mode:
            if kwargs:
                return self(*self._positional(args, kwargs))  # type: ignore[call-arg]
            if mode is not True:
                return mode.call_kernel(self, args)
            out = active_replays.current.run(self, args)
            if out is not NOT_REPLAYED:
                return out
        first: Any = args[0]
        replayable = False
        if first.is_cuda or INTERPRET or thread.as_arch:
            if not torch.compiler.is_compiling():
                replayable = not kwargs and may_replay()
            elif self.fuses:
                return self.twin(*args, **kwargs)
        elif self.traces_twin:
            return self.twin(*args, **kwargs) if kwargs else self.twin(*args)
        if replayable and not thread.replay_mode:
            out = active_replays.current.run(self, args)
            if out is not NOT_REPLAYED:
                return out
        why = self.obstacle(args, kwargs)
        if why is not None:
            if why:
                self.tell(why)
            values = self._values(args, kwargs)
            if self.traces_twin or not _traced(values) or self._loses_gradient(values):
                return self.twin(*args, **kwargs)
            values_given = enumerate((*args, *kwargs.values()))
            check_all_meta(
                [
                    (f"{self.name}: argument {k}", t.is_meta)
                    for k, value in values_given
                    for t in _as_sequence(value)
                    if isinstance(t, Tensor)
                ]
            )
            return self.op(*args, **kwargs)
        if (
            torch.compiler.is_compiling()
            or torch_private.num_dispatch_modes()
            or torch_private.num_function_modes()
            or not (
                _PLAIN_TYPES.issuperset(map(type, args)) or _all_plain(self._values(args, kwargs))
            )
        ):
            return self.op(*args, **kwargs)
        if _on_launch is not None:
            _on_launch((self, args, kwargs))
        if torch_private.is_profiling():
            with torch.profiler.record_function(self.label):
                return self.launcher(*args, **kwargs)
        out = self.launcher(*args, **kwargs)
        if replayable:
            active_replays.current.record(self, args)
        return out

    def _positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments by position, up to the last one given, with defaults between them."""
        positional, keywords_left = list(args), len(kwargs)
        for name, default in self._defaults[len(args) :]:
            value = kwargs.get(name, default)
            if not keywords_left or value is inspect.Parameter.empty:
                break
            keywords_left -= name in kwargs
            positional.append(value)
        if keywords_left or not positional:
            inspect.signature(self.launcher).bind(*args, **kwargs)  # raises what Python does
        return tuple(positional)

    def nbytes(self, *args: Any) -> int:
        """The least number of bytes this call has to move."""
        if self._nbytes is not None:
            return self._nbytes(*args)
        return tensor_bytes(args) + tensor_bytes(self.op(*meta(args)))

    def flop_count(self, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
        """The FLOPs of a call, as `torch.utils.flop_counter` asks."""
        return 0 if self.flops is None else self.flops(*self._positional(args, kwargs))

    def launches(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call runs the launcher: the kernel takes the tensors, and nothing has to differentiate it."""
        return self.obstacle(args, kwargs) is None

    def obstacle(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why a call runs the twin, None where it runs the launcher.

        "" where that is the usual way, or asked for: on a CPU, for a derivative, in traced code.
        """
        first = args[0]
        if thread.reference_only or not first.dim():
            return ""
        if not self._on_device(first):
            return "" if torch.compiler.is_compiling() else self._device_obstacle(first)
        if torch_private.inside_transform() and not torch.compiler.is_compiling():
            return ""
        grad, device = torch.is_grad_enabled(), first.device
        for value in self._values(args, kwargs) if kwargs or self._takes_lists else args:
            is_plain = type(value) in PLAIN
            if is_plain or isinstance(value, Tensor):
                if value.dtype not in self.dtypes or value.device != device:
                    return "" if torch.compiler.is_compiling() else _unfit(value, device)
                if (grad and value.requires_grad) or not (is_plain or torch_private.is_fake(value)):
                    return ""
        return None

    def tell(self, why: str) -> None:
        """Tell the log, once, and whoever watches that a call runs as plain torch."""
        if _on_twin is not None:
            _on_twin(self, why)
        if (self.label, why) not in _told and not thread.as_arch:
            _told.add((self.label, why))
            log.info("%s runs as plain torch: %s", self.label, why)

    def _values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments of a call, with lists flattened where the op takes lists of tensors."""
        given = *args, *kwargs.values()
        if not self._takes_lists:
            return given
        return tuple([value for one in given for value in _as_sequence(one)])

    def _loses_gradient(self, values: tuple[Any, ...]) -> bool:
        """Whether compiled code would drop a gradient that is needed, since the registered op has none."""
        if not (torch.is_grad_enabled() and torch.compiler.is_compiling()):
            return False
        needs_gradient = any(isinstance(t, Tensor) and t.requires_grad for t in values)
        return needs_gradient and not torch_private.has_autograd(self.label)

    def written_tensors(self, args: tuple[Any, ...]) -> list[Tensor]:
        """The tensors of a call that it writes to."""
        values = [args[k] for k in self.writes if k < len(args) and args[k] is not None]
        return [t for value in values for t in _as_sequence(value)]

    def _with_version_bump(self, launcher: Callable[P, R]) -> Callable[P, R]:
        """The launcher, which also increments the versions of tensors that it writes to, as a twin's ops do.

        Replays do it by themselves. (A function that a `Transcriber` records writes to no external tensor.)
        """

        @functools.wraps(launcher)
        def launch_and_bump(*args: P.args, **kwargs: P.kwargs) -> R:
            out = launcher(*args, **kwargs)
            bump_versions(self.written_tensors(self._positional(args, kwargs) if kwargs else args))
            return out

        return launch_and_bump

    def _on_device(self, t: Tensor) -> bool:
        if not t.is_cuda:
            if thread.as_arch and torch_private.is_fake(t):
                return self.min_arch <= thread.as_arch
            return INTERPRET and t.device.type == "cpu" and self.min_arch > 0
        return not self.min_arch or (HAS_TRITON and arch_of(t.device) >= self.min_arch)

    def _device_obstacle(self, t: Tensor) -> str:
        """Why it does not run on the device of a tensor; "" on a CPU."""
        arch = arch_of(t.device) if t.is_cuda else thread.as_arch
        if not arch or (not t.is_cuda and not torch_private.is_fake(t)):
            return ""
        if t.is_cuda and not HAS_TRITON:
            return "Triton is not installed"
        return f"sm_{arch} is below sm_{self.min_arch}"

    def _python_impl(self) -> Callable[..., Any]:
        """The registered op as Python, and so compiled code, calls it: it launches where nothing observes the call.

        Otherwise it calls torch's dispatcher, which takes several times as long to reach `_torch_impl`. The function
        is generated with the launcher's parameters, so that Python orders the keyword arguments of a compiler.
        """
        namespace: dict[str, Any] = {
            **{"_op": self, "_active": active_replays, "_contiguous": _contiguous},
            **{"_plain": PLAIN, "_not_replayed": NOT_REPLAYED, "_may_replay": may_replay},
        }
        parameters = [
            name + ("" if v is inspect.Parameter.empty else f"={bind_constant(v, namespace)}")
            for name, v in self._defaults
        ]
        names, first = ", ".join(self._names), self._names[0]
        lines = [
            f"def called({', '.join(parameters)}):",
            f" if type({first}) in _plain and _may_replay():",
            f"  for _replay in _active.current.get((_op, {len(parameters)}, {first}.shape, {first}.dtype), ()):",
            f"   _out = _replay.call({names})",
            "   if _out is not _not_replayed:",
            "    return _out if _replay.contiguous else _contiguous(_out)",
            f" return _op._launch_or_dispatch({names})",
        ]
        exec("\n".join(lines), namespace)
        generated: Callable[..., Any] = namespace["called"]
        generated.__qualname__ = self.label
        torch_private.never_compile(generated)  # dynamo would trace it after a graph break
        return generated

    def _launch_or_dispatch(self, *args: Any) -> Any:
        """Launch a call without a replay where nothing observes it; call torch's dispatcher otherwise."""
        if not (
            type(args[0]) in PLAIN
            and may_replay()
            and _PLAIN_TYPES.issuperset(map(type, args))
            and self.launches(args, {})
        ):
            return self._torch_dispatcher(*args)
        out = self.launcher(*args)  # type: ignore[call-arg]
        active_replays.current.record(self, args)
        return _contiguous(out)

    def _torch_impl(self, *args: Any, **kwargs: Any) -> Any:
        """The registered op's body. Its outputs are contiguous, as its fake says."""
        replayable = not kwargs and (args[0].is_cuda or INTERPRET) and may_replay()
        if replayable:
            out = active_replays.current.run(self, args)
            if out is not NOT_REPLAYED:
                return _contiguous(out)
        why = self.obstacle(args, kwargs)
        if why:
            self.tell(why)
        runs = why is None
        out = _contiguous((self.launcher if runs else self.twin)(*args, **kwargs))
        if replayable and runs:
            active_replays.current.record(self, args)
        return out

    def __repr__(self) -> str:
        return f"<kernel op {self.label}>"


_FORMULAS = "fake", "flops", "nbytes"
_FLAGS = "traces_twin", "fuses", "announces"


def _checked(options: kernel_op) -> kernel_op:
    """The options, in few calls: an import has many kernels.  Raises FuseOpsError for one of another type."""
    mutates, arch, namespace = options.mutates, options.min_arch, options.namespace
    for name in ("twin", "cases", "fake", "flops", "nbytes"):
        value, optional = getattr(options, name), name in _FORMULAS
        if not (callable(value) or (value is None and optional)):
            expected = "a function or None" if optional else "a function"
            raise FuseOpsError(f"kernel_op({name}=...) expects {expected}, got {shown(value)}.")
    for name in _FLAGS:
        if not isinstance(getattr(options, name), int):
            check_flags("kernel_op", **{name: getattr(options, name)})
    if type(arch) is not int:
        check_integers("kernel_op", 0, min_arch=arch)
    if namespace is not None and not isinstance(namespace, str):
        instance_of(namespace, str, "kernel_op(namespace=...)", "a name in torch.ops, or None")
    if type(mutates) is not tuple or mutates:
        mutates = several(mutates, str, "kernel_op(mutates=...)", "names of arguments")
    if options.dtypes is not DTYPES:
        several(options.dtypes, torch.dtype, "kernel_op(dtypes=...)", "several torch.dtypes")
    return options._replace(mutates=mutates)


def _check_twin(label: str, launcher: inspect.Signature, twin: Callable[..., Any]) -> None:
    """Raise FuseOpsError unless a twin takes the names and defaults of its launcher, in whose place it runs. One that
    takes any arguments is not looked at.
    """
    code: CodeType | None = getattr(twin, "__code__", None)
    any_arguments = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    if code is None or hasattr(twin, "__wrapped__") or code.co_flags & any_arguments:
        return
    own, defaults = launcher.parameters, getattr(twin, "__defaults__", None) or ()
    wanted = [p.default for p in own.values() if p.default is not p.empty]
    # `repr` tells 1, 1.0 and True apart, as kernels do
    if code.co_varnames[: code.co_argcount] != (*own,) or repr([*defaults]) != repr(wanted):
        raise FuseOpsError(
            f"kernel op '{label}' takes {launcher}, and its twin {inspect.signature(twin)}: calls give both the same "
            "arguments, so give the twin the names and defaults of the launcher."
        )


class kernel_op(NamedTuple):
    """A `kernel_op` registers the launcher that it decorates.

    The launcher's signature is the op's schema: every argument has a type that `torch.library.infer_schema` knows, the
    first is a Tensor, and it returns new tensors. It must depend on its arguments alone, since calls of one kind are
    replayed without it. Twin, fake and formulas take the same arguments, or a record of them (`records`).

    twin: the same function in plain differentiable torch, which runs wherever the launcher does not.
    fake: outputs without values, where the twin reads values; an op that returns nothing needs none.
    flops: formula over the arguments; memory-bound kernels count none, as torch's own elementwise ops.
    nbytes: the same; by default each input is read once and each output written once.
    cases: arguments on the meta device, from which the ahead-of-time table and the tests find every kernel.
    min_arch: the first architecture (80, 90, ...) that can run it; 0 for a launcher without Triton, on any CUDA device.
    traces_twin: False for a twin that reads values: traced code and fake tensors then use the registered op, and the
        twin for a gradient, unless `torch.library.register_autograd` registered one.
    fuses: compiled code runs the twin, which the compiler fuses with its neighbours.
    mutates: names of the tensors that it writes to; a launch increments their versions, for autograd.
    announces: False where it is called only for tensors that nobody else can read: versions are not incremented.
    namespace: of the op in `torch.ops`; by default the top-level package of the launcher ("main" of a script).
    dtypes: those that it loads; a call with a tensor of another one runs the twin.
    Raises FuseOpsError for a second op of one name, for one whose first argument is no Tensor, for keyword-only
    parameters, and for a twin with other names or defaults.
    """

    twin: Callable[..., Any]
    fake: Callable[..., Any] | None = None
    flops: Callable[..., Any] | None = None
    nbytes: Callable[..., int] | None = None
    min_arch: int = 80
    traces_twin: bool = True
    fuses: bool = False
    cases: Callable[[], Iterable[tuple[Any, ...]]] = tuple[Any, ...]
    mutates: Iterable[str] = ()
    announces: bool = True
    namespace: str | None = None
    dtypes: Collection[torch.dtype] = DTYPES

    def __call__(self, launcher: Callable[P, R]) -> KernelOp[P, R]:
        return KernelOp(launcher, self)


def _unfit(t: Tensor, device: torch.device) -> str:
    """Why a kernel on a device does not load a tensor."""
    return dtype_name(t.dtype) if t.device == device else f"a tensor on {t.device}"


def tensor_bytes(value: Any) -> int:
    """Bytes of every tensor in a value or in a tuple or list of values."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(tensor_bytes, value)) if isinstance(value, (tuple, list)) else 0


def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without values, for `cases`."""
    return torch.empty(shape, dtype=dtype, device="meta")


ints = functools.partial(on_meta, dtype=torch.int32)
floats = functools.partial(on_meta, dtype=torch.float32)


def meta(value: Any) -> Any:
    """The same value with its tensors on the meta device."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return type(value)(map(meta, value)) if isinstance(value, (tuple, list)) else value


_PLAIN_TYPES = PLAIN_OR_NONE | {bool, int, float, str, torch.dtype}


def _run_fake(fake: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The contiguous outputs of a fake."""
    with attributes_set([(thread, "in_fake", True)]):
        return _contiguous(fake(*args))


def _as_sequence(value: Any) -> Sequence[Any]:
    """A list as it is, a single value as a tuple."""
    return value if isinstance(value, (list, tuple)) else (value,)


def _all_plain(args: tuple[Any, ...]) -> bool:
    """Whether every tensor is of one of torch's own types, not fake."""
    return not any(isinstance(value, Tensor) and type(value) not in PLAIN for value in args)


def _traced(args: tuple[Any, ...]) -> bool:
    """Whether a twin must not read values: traced code, fake and meta tensors."""
    if torch.compiler.is_compiling():
        return True
    return any(
        isinstance(t, Tensor) and (t.is_meta or (type(t) not in PLAIN and torch_private.is_fake(t)))
        for t in args
    )


def check_all_meta(placements: Sequence[tuple[str, bool]]) -> None:
    """Raise FuseOpsError where some of the named tensors are on the meta device and others are not.

    A fake, and torch's matrix product, would return uninitialised memory for them.
    """
    on_meta = [name for name, meta in placements if meta]
    if on_meta and len(on_meta) < len(placements):
        others = [name for name, meta in placements if not meta]
        raise FuseOpsError(
            f"{', '.join(on_meta)} on the meta device beside {', '.join(others)}, which have values: give those on "
            "meta some (model.to_empty(device=...), then load or initialise them), or put everything on meta."
        )


def may_replay() -> bool:
    """Whether a launch may be replayed: nothing observes or differentiates the call.

    (`Replay.fits` checks for `torch.func` transforms.) A caller of code that cannot change the answer asks once and
    sets `thread.replay_mode` meanwhile.
    """
    return not (
        torch.is_grad_enabled()
        or thread.reference_only
        or _on_launch is not None
        or torch_private.is_profiling()
        or torch_private.num_dispatch_modes()
        or torch_private.num_function_modes()
        or torch_private.forward_level() >= 0
    )


def opaque_call(
    function: Callable[..., R],
    *args: Any,
    tensors_of: Callable[[R], tuple[Tensor, ...]] | None = None,
    is_state: bool = False,
) -> R:
    """Call a function that depends on more than kinds of tensors, as on values: a transcript calls it again as a whole.

    args: tensors, dicts that live for one call, and constants
    tensors_of: gives the tensors of a result that is something else; what else it is depends on kinds of tensors alone
    is_state: kernels may write to its tensors, of which nothing is differentiated. They are aligned to 16 bytes.
    """
    if thread.replay_mode in (True, False):
        return function(*args)
    result: R = thread.replay_mode.opaque_call(function, args, tensors_of, is_state)
    return result


def held_once(held: list[Any]) -> bool:
    """`torch_private.held_once`, whose answer about an operand a transcript checks again."""
    checker = torch_private if thread.replay_mode in (True, False) else thread.replay_mode
    answer: bool = checker.held_once(held)
    return answer


def cached_decision(decide: Callable[..., R], tensors: Sequence[Any], *facts: Any) -> R:
    """`decide(*tensors, *facts)`, cached beside the replays.

    For decisions that depend on kinds of tensors (shape, strides, dtype, device) or None, on hashable facts, and on the
    settings of launches, whose change clears the cache. For other arguments, as a Quantized or an unaligned tensor,
    nothing is cached.
    """
    kinds = (*map(type, tensors),)
    if not thread.replay_mode or not PLAIN_OR_NONE.issuperset(kinds):
        return decide(*tensors, *facts)
    tensors_given, address_bits = [], 0
    for t in tensors:
        if t is not None:
            tensors_given.append(t)
            address_bits |= t.data_ptr()
    if address_bits % ALIGNED:
        return decide(*tensors, *facts)
    key = decide, facts, kinds
    decision: R
    for check, decision in active_replays.current.decisions.get(key, ()):
        if check(*tensors_given):
            return decision
    decision = decide(*tensors, *facts)
    active_replays.current.cache_decision(key, tensors_given, decision)
    return decision


def _contiguous(out: Any) -> Any:
    """The same outputs, as contiguous tensors."""
    if isinstance(out, Tensor):
        return out.contiguous()
    return tuple([t.contiguous() for t in out]) if isinstance(out, tuple) else out


def register_flops() -> None:
    """Register the formulas of kernel ops with `torch.utils.flop_counter`; call it before a `FlopCounterMode` is made.

    Importing fuseops calls it if the flop counter is imported already; otherwise it would import Triton.
    """
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    for op in KERNEL_OPS.values():
        packet = op.op.overloadpacket
        if op.flops is not None and packet not in flop_registry:
            register_flop_formula(packet, get_raw=True)(op.flop_count)
