"""One way to add a kernel: `@kernel_op` on its launcher.

    @kernel_op(twin=_bias_fwd, cases=...)
    def bias_fwd(x: Tensor, bias: Tensor) -> Tensor: ...

registers `torch.ops.fuseops.bias_fwd` (outside of fuseops an op of that package's namespace), whose schema is the
launcher's signature, with
* a fake for `torch.compile` made from the twin (or `fake=`, where the twin reads values);
* a FLOP formula where one is given (memory-bound kernels count none, as torch's own elementwise ops) and a byte formula
  (each input read once and each output written once, unless `nbytes=` says otherwise);
* `cases`, arguments on the meta device, from which the ahead-of-time table and the tests find every kernel.

A call takes the launcher where it can, and the twin, plain differentiable torch, everywhere else: on other devices, for
dtypes that the kernels do not know, where autograd or `torch.func` has to differentiate the call (a kernel has no
derivative of its own; that is the ops layer's), for tensor subclasses, and inside `reference_only()`.
Launched eagerly, and by what a compiler has made, the dispatcher is bypassed; dispatch and function modes, fake tensors
and dynamo see the registered op.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, profiler

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.kernels.replay import ALIGNED, NOT_REPLAYED, announce_writes, constant, replaying

P = ParamSpec("P")
R = TypeVar("R")

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRET = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0") == "1"
DTYPES = frozenset(
    {
        *(torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    }
)
"""What kernels load that do not say otherwise; a call with a tensor of any other dtype runs the twin."""

OWN = "fuseops"
KERNEL_OPS: dict[str, KernelOp[Any, Any]] = {}  # of fuseops by name, of others by namespace::name
Call = tuple["KernelOp[Any, Any]", tuple[Any, ...], dict[str, Any]]
Cases = Iterator[tuple[Any, ...]]
"""What `cases` of a kernel op gives: arguments on the meta device, one call after the other."""

_watched: Callable[[Call], object] | None = None


@functools.cache
def library(namespace: str = OWN) -> torch.library.Library:
    """Where the kernel ops of a namespace are defined."""
    return torch.library.Library(namespace, "FRAGMENT")


class _RegistryThread(threading.local):
    """A `_RegistryThread` holds what scopes of this thread ask of the registry: twins alone, another
    architecture, calls that nobody sees.
    """

    def __init__(self) -> None:
        # in every thread's own dict from the start: dynamo guards on what a dict does not hold yet
        self.reference_only = False
        self.as_arch = 0
        self.unseen: Any = False  # True, or the `Transcriber` that writes calls down
        self.shapes_alone = False  # inside of a fake, where no temporary takes memory


thread = _RegistryThread()


@contextmanager
def reference_only() -> Iterator[None]:
    """Inside, every kernel call of this thread runs its twin.

    The bridge enters it for everything that is to be plain torch, `fo.reference()` first of all.
    """
    before = thread.reference_only, thread.unseen
    thread.reference_only, thread.unseen = True, False
    try:
        yield
    finally:
        thread.reference_only, thread.unseen = before


@contextmanager
def watching(tell: Callable[[Call], object] | None = None) -> Iterator[list[Call]]:
    """Inside, launches are noted as (op, args, kwargs), or told, those of other threads (a backward) too."""
    global _watched
    noted: list[Call] = []
    outer, _watched = _watched, tell or noted.append
    try:
        yield noted
    finally:
        _watched = outer


@contextmanager
def as_if_on(arch: int) -> Iterator[None]:
    """Inside, fake CPU tensors are taken for CUDA tensors of an architecture: calls of kernels that it has are seen
    as the registered ops, with their fakes. For dry runs.
    """
    before = thread.as_arch
    thread.as_arch = arch
    try:
        yield
    finally:
        thread.as_arch = before


class KernelOp(Generic[P, R]):
    """A `KernelOp` is a kernel with its twin and formulas, callable like the launcher it was made from."""

    def __init__(self, launcher: Callable[P, R], how: kernel_op) -> None:
        functools.update_wrapper(self, launcher)
        self.name: str = launcher.__name__
        space = how.namespace or _namespace_of(launcher)
        self.label = f"{space}::{self.name}"
        self.twin = how.twin
        signature = inspect.signature(launcher)
        self._defaults = tuple([(p.name, p.default) for p in signature.parameters.values()])
        self._names = tuple([name for name, _ in self._defaults])
        self.min_arch, self.traces_twin, self.fuses = how.min_arch, how.traces_twin, how.fuses
        self.cases, self.flops, self._nbytes = how.cases, how.flops, how.nbytes
        self.dtypes = how.dtypes
        key = self.name if space == OWN else self.label
        if key in KERNEL_OPS:
            raise FuseOpsError(
                f"kernel op '{self.label}' is registered twice: torch keeps an op until the process ends, so give the "
                "launcher another name."
            )
        schema = torch.library.infer_schema(launcher, mutates_args=how.mutates)
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
        self._takes_lists = re.search(r"Tensor\S*\[", schema.partition(" -> ")[0]) is not None
        lib = library(space)
        lib.define(self.name + schema)
        lib.impl(self.name, self._dispatched, "CompositeExplicitAutograd")
        writes_alone = signature.return_annotation in (None, "None")
        shapes = (lambda *_: None) if writes_alone else how.fake or how.twin
        torch.library.register_fake(
            self.label,
            lambda *args, **kwargs: _shapes_alone(shapes, self._in_order(args, kwargs)),
            lib=lib,
        )
        self.op = getattr(getattr(torch.ops, space), self.name).default
        takes = enumerate(self.op._schema.arguments)
        self.writes = [k for k, a in takes if a.alias_info is not None and a.alias_info.is_write]
        self.announced = self.writes if how.announces else []
        self.launcher = self._announcing(launcher) if self.announced else launcher
        self._dispatcher = torch_private.replace_overload(self.op, self._called())
        KERNEL_OPS[key] = self
        if self.flops is not None and "torch.utils.flop_counter" in sys.modules:
            register_flops()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not args:
            name = self._names[0]
            if name not in kwargs:
                return self.launcher(*args, **kwargs)  # raises what Python does
            others = {key: value for key, value in kwargs.items() if key != name}
            return self(kwargs[name], **others)  # type: ignore[arg-type]
        unseen_by = thread.unseen
        if unseen_by:
            if kwargs:
                return self(*self._in_order(args, kwargs))  # type: ignore[call-arg]
            if unseen_by is not True:
                return unseen_by.called(self, args)
            out = replaying.now.run(self, args)
            if out is not NOT_REPLAYED:
                return out
        first: Any = args[0]
        replayable = False
        if first.is_cuda or INTERPRET or thread.as_arch:
            if not torch.compiler.is_compiling():
                replayable = not kwargs and unseen()
            elif self.fuses:
                return self.twin(*args, **kwargs)
        elif self.traces_twin:
            return self.twin(*args, **kwargs) if kwargs else self.twin(*args)
        if replayable and not thread.unseen:
            out = replaying.now.run(self, args)
            if out is not NOT_REPLAYED:
                return out
        if not self.launches(args, kwargs):
            values = self._values(args, kwargs)
            if self.traces_twin or not _traced(values) or self._loses_gradient(values):
                return self.twin(*args, **kwargs)
            given = enumerate((*args, *kwargs.values()))
            check_all_meta(
                [
                    (f"{self.name}: argument {k}", t.is_meta)
                    for k, value in given
                    for t in _each(value)
                    if isinstance(t, Tensor)
                ]
            )
            return self.op(*args, **kwargs)
        if (
            torch.compiler.is_compiling()
            or torch_private.num_dispatch_modes()
            or torch_private.num_function_modes()
            or not (_ORDINARY.issuperset(map(type, args)) or _none_fake(self._values(args, kwargs)))
        ):
            return self.op(*args, **kwargs)
        if _watched is not None:
            _watched((self, args, kwargs))
        if profiler._is_profiler_enabled:
            with torch.profiler.record_function(self.label):
                return self.launcher(*args, **kwargs)
        out = self.launcher(*args, **kwargs)
        if replayable:
            replaying.now.note(self, args)
        return out

    def _in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments by position, as replays know them, up to the last one given, with defaults between them."""
        found, left = list(args), len(kwargs)
        for name, default in self._defaults[len(args) :]:
            value = kwargs.get(name, default)
            if not left or value is inspect.Parameter.empty:
                break
            left -= name in kwargs
            found.append(value)
        if left:
            inspect.signature(self.launcher).bind(*args, **kwargs)  # raises what Python does
        return tuple(found)

    def nbytes(self, *args: Any) -> int:
        """The least number of bytes this call has to move."""
        if self._nbytes is not None:
            return self._nbytes(*args)
        return tensor_bytes(args) + tensor_bytes(self.op(*meta(args)))

    def counted(self, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
        """The FLOPs of a call, as `torch.utils.flop_counter` asks."""
        return 0 if self.flops is None else self.flops(*self._in_order(args, kwargs))

    def launches(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call runs the launcher: it can, and nobody has to see through it."""
        first = args[0]
        if thread.reference_only or not first.dim() or not self._on_device(first):
            return False
        if _transformed() and not torch.compiler.is_compiling():
            return False
        grad, where = torch.is_grad_enabled(), first.device
        for value in self._values(args, kwargs) if kwargs or self._takes_lists else args:
            plain = type(value) in PLAIN
            if plain or isinstance(value, Tensor):
                if value.dtype not in self.dtypes or value.device != where:
                    return False
                if (grad and value.requires_grad) or not (plain or torch_private.is_fake(value)):
                    return False
        return True

    def _values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """What a call is given, and what stands in lists of it where the op takes lists of tensors."""
        given = *args, *kwargs.values()
        if not self._takes_lists:
            return given
        return tuple([value for one in given for value in _each(one)])

    def _loses_gradient(self, values: tuple[Any, ...]) -> bool:
        """Whether compiled code would drop a gradient that somebody wants: torch knows none of the registered op."""
        if not (torch.is_grad_enabled() and torch.compiler.is_compiling()):
            return False
        wanted = any(isinstance(t, Tensor) and t.requires_grad for t in values)
        return wanted and not torch_private.has_autograd(self.label)

    def written_to(self, args: tuple[Any, ...]) -> list[Tensor]:
        """The tensors of a call that it writes to."""
        found = [args[k] for k in self.writes if k < len(args) and args[k] is not None]
        return [t for value in found for t in _each(value)]

    def _announcing(self, launcher: Callable[P, R]) -> Callable[P, R]:
        """The launcher, which tells autograd what it has written to: a twin does by its ops of torch, and what repeats
        a launch without it by itself. (What a `Transcriber` writes down writes to nothing that others hold.)
        """

        @functools.wraps(launcher)
        def announcing(*args: P.args, **kwargs: P.kwargs) -> R:
            out = launcher(*args, **kwargs)
            announce_writes(self.written_to(self._in_order(args, kwargs) if kwargs else args))
            return out

        return announcing

    def _on_device(self, t: Tensor) -> bool:
        if not t.is_cuda:
            if thread.as_arch and torch_private.is_fake(t):
                return self.min_arch <= thread.as_arch
            return INTERPRET and t.device.type == "cpu" and self.min_arch > 0
        return not self.min_arch or (HAS_TRITON and arch_of(t.device) >= self.min_arch)

    def _called(self) -> Callable[..., Any]:
        """What the registered op is to Python, and so to compiled code: it launches where that is all, and asks the
        dispatcher otherwise, which takes several times as long to arrive at `_dispatched`.

        It is written out with the launcher's parameters: Python itself puts in order what a compiler gives by keyword.
        """
        known: dict[str, Any] = {
            **{"_op": self, "_replaying": replaying, "_unseen": unseen, "_packed": _packed},
            **{"_plain": PLAIN, "_not_replayed": NOT_REPLAYED},
        }
        takes = [
            name if value is inspect.Parameter.empty else f"{name}={constant(value, known)}"
            for name, value in self._defaults
        ]
        given, first = ", ".join(self._names), self._names[0]
        lines = [
            f"def called({', '.join(takes)}):",
            f" if type({first}) in _plain and _unseen():",
            f"  for _replay in _replaying.now.get((_op, {len(takes)}, {first}.shape, {first}.dtype), ()):",
            f"   _out = _replay.again({given})",
            "   if _out is not _not_replayed:",
            "    return _out if _replay.contiguous else _packed(_out)",
            f" return _op._launched({given})",
        ]
        exec("\n".join(lines), known)
        written: Callable[..., Any] = known["called"]
        written.__qualname__ = self.label
        torch_private.never_compile(written)  # after a graph break: what it calls would be traced
        return written

    def _launched(self, *args: Any) -> Any:
        """Launch what no replay does for, where that is all; ask the dispatcher otherwise."""
        if not (
            type(args[0]) in PLAIN
            and unseen()
            and _ORDINARY.issuperset(map(type, args))
            and self.launches(args, {})
        ):
            return self._dispatcher(*args)
        out = self.launcher(*args)  # type: ignore[call-arg]
        replaying.now.note(self, args)
        return _packed(out)

    def _dispatched(self, *args: Any, **kwargs: Any) -> Any:
        """The registered op's body. Its outputs are contiguous, as its fake says."""
        replayable = not kwargs and (args[0].is_cuda or INTERPRET) and unseen()
        if replayable:
            out = replaying.now.run(self, args)
            if out is not NOT_REPLAYED:
                return _packed(out)
        runs = self._on_device(args[0]) and self.launches(args, kwargs)
        out = _packed((self.launcher if runs else self.twin)(*args, **kwargs))
        if replayable and runs:
            replaying.now.note(self, args)
        return out

    def __repr__(self) -> str:
        return f"<kernel op {self.label}>"


class kernel_op(NamedTuple):
    """A `kernel_op` registers the launcher that it decorates: its signature is the op's schema, so every argument has a
    type that `torch.library.infer_schema` knows, the first is a Tensor, and what it returns are new tensors. It decides
    by its arguments alone: calls alike are repeated without it.

    twin: the same in plain differentiable torch, with the same arguments: it runs wherever the launcher does not.
    fake: outputs without values, where the twin reads values; an op that returns nothing needs none.
    flops, nbytes: formulas over the arguments, for profilers.
    cases: arguments on the meta device, for what compiles kernels ahead of time.
    min_arch: the first architecture (80, 90, ...) that can run it; 0 for a launcher without Triton, on any CUDA device.
    traces_twin: False for a twin that reads values: traced code and fake tensors then see the registered op instead,
        and for a gradient the twin, unless `torch.library.register_autograd` told one.
    fuses: compiled code is given the twin, since the compiler fuses it with what stands around it.
    mutates: names of the tensors that it writes to; a launch moves their versions, by which autograd knows.
    announces: False where it is only called for tensors that nobody else can read: versions stay.
    namespace: of `torch.ops`, in which the op stands by the launcher's name; left out: the top-level package that the
        launcher is defined in ("main" of a script).
    dtypes: those that it loads; a call with a tensor of another one runs the twin.
    Raises FuseOpsError for a second op of one name, for one whose first argument is no Tensor, and for parameters that
    come by keyword alone.
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
    dtypes: frozenset[torch.dtype] = DTYPES

    def __call__(self, launcher: Callable[P, R]) -> KernelOp[P, R]:
        return KernelOp(launcher, self)


def _namespace_of(launcher: Callable[..., Any]) -> str:
    """The package that defines it, as torch takes names."""
    return launcher.__module__.partition(".")[0].strip("_")


def tensor_bytes(value: Any) -> int:
    """Bytes of every tensor in a value or in a tuple or list of values."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(tensor_bytes, value)) if isinstance(value, (tuple, list)) else 0


def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Makes a tensor without values: an operand of `cases`."""
    return torch.empty(shape, dtype=dtype, device="meta")


ints = functools.partial(on_meta, dtype=torch.int32)
floats = functools.partial(on_meta, dtype=torch.float32)


def meta(value: Any) -> Any:
    """The same value with its tensors on the meta device."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return type(value)(map(meta, value)) if isinstance(value, (tuple, list)) else value


_archs: dict[torch.device, int] = {}


@torch_private.assume_constant_result
def arch_of(device: torch.device) -> int:
    """Compute capability as one number: 90 on Hopper."""
    found = _archs.get(device)
    if found is None:
        major, minor = torch.cuda.get_device_capability(device)
        found = _archs[device] = 10 * major + minor
    return found


PLAIN = frozenset((Tensor, nn.Parameter))  # torch's own types: no subclass sees their operations
PLAIN_OR_NONE = PLAIN | {type(None)}
_ORDINARY = PLAIN_OR_NONE | {bool, int, float, str, torch.dtype}


def _shapes_alone(fake: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What a fake gives, contiguous."""
    before = thread.shapes_alone
    thread.shapes_alone = True
    try:
        return _packed(fake(*args))
    finally:
        thread.shapes_alone = before


def _each(value: Any) -> Sequence[Any]:
    """What stands in a list, or the one value."""
    return value if isinstance(value, (list, tuple)) else (value,)


def _none_fake(args: tuple[Any, ...]) -> bool:
    """Whether every tensor is one of torch's own types. Others are fake here: nothing else launches."""
    return not any(isinstance(value, Tensor) and type(value) not in PLAIN for value in args)


def _traced(args: tuple[Any, ...]) -> bool:
    """Whether a twin must not read values: traced code, fake and meta tensors."""
    if torch.compiler.is_compiling():
        return True
    return any(
        isinstance(t, Tensor) and (t.is_meta or (type(t) not in PLAIN and torch_private.is_fake(t)))
        for t in args
    )


def check_all_meta(found: Sequence[tuple[str, bool]]) -> None:
    """Raise FuseOpsError where some tensors, by name, are on the meta device and others are not: what has no values
    would be read. A fake, and torch itself for a product of matrices, then give memory that nobody wrote.
    """
    on_meta = [name for name, meta in found if meta]
    if on_meta and len(on_meta) < len(found):
        others = [name for name, meta in found if not meta]
        raise FuseOpsError(
            f"{', '.join(on_meta)} on the meta device beside {', '.join(others)}, which have values: give those on "
            "meta some (model.to_empty(device=...), then load or initialise them), or put everything on meta."
        )


def unseen() -> bool:
    """Whether nobody has to see a call, or to differentiate it: a launch may be replayed. (`Replay.fits` sees a
    `torch.func` transform.) What runs code that cannot change this asks once, and sets `thread.unseen` meanwhile.
    """
    return not (
        torch.is_grad_enabled()
        or thread.reference_only
        or _watched is not None
        or profiler._is_profiler_enabled
        or torch_private.num_dispatch_modes()
        or torch_private.num_function_modes()
        or forward_ad._current_level >= 0
    )


def called_again(function: Callable[..., R], *args: Any) -> R:
    """Call a function that decides by more than kinds of tensors, as by values: what is written down of a call calls
    it, too.   args: tensors, dicts of what lives for one call, and what is the same in every call
    """
    if thread.unseen in (True, False):
        return function(*args)
    given: R = thread.unseen.called_again(function, args)
    return given


def held_once(held: list[Any]) -> bool:
    """`torch_private.held_once`, which what is written down of a call asks of its operands, too."""
    seen = torch_private if thread.unseen in (True, False) else thread.unseen
    once: bool = seen.held_once(held)
    return once


def decided(ask: Callable[..., R], tensors: Sequence[Any], *facts: Any) -> R:
    """What `ask(*tensors, *facts)` says: a repeated step asks nothing twice.

    For answers that depend on kinds of tensors (shape, strides, dtype, device) or None, on facts that have a hash, and
    on the settings of launches, which forget them when they change. Of anything else, as a Quantized or a tensor that
    is not aligned, they are asked each time.
    """
    kinds = (*map(type, tensors),)
    if not thread.unseen or not PLAIN_OR_NONE.issuperset(kinds):
        return ask(*tensors, *facts)
    given, bits = [], 0
    for t in tensors:
        if t is not None:
            given.append(t)
            bits |= t.data_ptr()
    if bits % ALIGNED:
        return ask(*tensors, *facts)
    key = ask, facts, kinds
    answer: R
    for check, answer in replaying.now.answers.get(key, ()):
        if check(*given):
            return answer
    answer = ask(*tensors, *facts)
    replaying.now.keep_answer(key, given, answer)
    return answer


def _transformed() -> bool:
    """Whether tensors may carry more than their values, which a kernel would drop: a batch axis, a tangent."""
    return torch_private.inside_functorch() or torch_private.inside_forward_ad()


def _packed(out: Any) -> Any:
    """The same with contiguous tensors."""
    if isinstance(out, Tensor):
        return out.contiguous()
    return tuple([t.contiguous() for t in out]) if isinstance(out, tuple) else out


def register_flops() -> None:
    """Tell `torch.utils.flop_counter` the formulas of kernel ops; call it before a `FlopCounterMode` is made.

    Done on import where the flop counter is imported already. It imports Triton, which `import fuseops` must not.
    """
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    for op in KERNEL_OPS.values():
        packet = op.op.overloadpacket
        if op.flops is not None and packet not in flop_registry:
            register_flop_formula(packet, get_raw=True)(op.counted)
