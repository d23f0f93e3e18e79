"""Every private torch name that fuseops uses, in one place, so that a torch release can be checked at a glance.

`tests/test_torch_private.py` fails when one of them is gone.
"""

import contextlib
import functools
import logging
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad as forward_ad
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules import module as nn_module
from torch.utils import _python_dispatch

# hooks on every module of the process, by their handles
GLOBAL_HOOKS: tuple[dict[int, Callable[..., Any]], ...] = (
    nn_module._global_forward_pre_hooks,
    nn_module._global_forward_hooks,
    nn_module._global_backward_pre_hooks,
    nn_module._global_backward_hooks,
)


def global_hooks() -> tuple[dict[int, Callable[..., Any]], ...]:
    """GLOBAL_HOOKS, of each of which traced code that asks for them is guarded on whether there are any."""
    return GLOBAL_HOOKS


# which backward autograd executes in this thread; NO_BACKWARD outside of them
backward_now: Callable[[], int] = torch._C._current_graph_task_id
NO_BACKWARD = -1


def when_backward_ends(call: Callable[[], Any]) -> None:
    """In a backward: have autograd call something when it has come to its end; not where an error stops it.

    Compiled autograd never tells: it is called at once.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and (
        compiled.compiled_autograd_enabled or compiled.in_compiled_autograd_region
    ):
        call()
    else:
        torch.autograd.Variable._execution_engine.queue_callback(call)


def in_backward() -> bool:
    """True while autograd executes a backward in this thread (a recomputation, for a forward that asks)."""
    return backward_now() != NO_BACKWARD


def will_accumulate(node: Any) -> bool:
    """In a backward: whether a gradient that arrives at this node is added to the `.grad` of a leaf, or of some leaf
    right behind it.

    Not so where `torch.autograd.grad` or `backward(inputs=)` asks for others, or returns that of the leaf itself.
    """
    leaves = [behind for behind, _ in node.next_functions if hasattr(behind, "variable")]
    try:
        return any(map(torch._C._will_engine_execute_node, leaves or [node]))
    except RuntimeError:  # a leaf whose gradient is returned
        return False


# the innermost (pack, unpack) pair of `torch.autograd.graph.saved_tensors_hooks`, or None
top_saved_tensor_hooks: Callable[[], tuple[object, object] | None] = functools.partial(
    torch._C._autograd._top_saved_tensors_default_hooks, True
)


def release_saved(ctx: Any) -> None:
    """In a backward: have the node let go of its saved tensors now, where the graph is not retained."""
    ctx.maybe_clear_saved_tensors()


# take the innermost pair off this thread's stack, and put a pair on it
pop_saved_tensor_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
push_saved_tensor_hooks: Callable[[Any, Any], None] = (
    torch._C._autograd._push_saved_tensors_default_hooks
)


# whether autocast is on for some kind of device: a fifth of what it costs to ask for one
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled

# whether a `torch.func` transform (grad, vjp, vmap, ...) runs
inside_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active


def is_batched(t: torch.Tensor) -> bool:
    """Whether a `vmap`, or `torch.autograd.grad(is_grads_batched=True)`, stands for many tensors by this one."""
    private = torch._C._functorch
    return bool(private.is_batchedtensor(t) or private.is_legacy_batchedtensor(t))


def inside_forward_ad() -> bool:
    """True inside `torch.autograd.forward_ad.dual_level()`, where any tensor may carry a tangent."""
    return forward_ad._current_level >= 0


def has_tangent(t: torch.Tensor | None) -> bool:
    """Whether t carries a tangent of the current level of forward-mode AD."""
    if t is None:
        return False
    return forward_ad.unpack_dual(t).tangent is not None  # type: ignore[no-untyped-call]


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without the pass over all arguments that only `torch.func` transforms need."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


# the index of the current CUDA device, without the question whether CUDA has begun: some tensor is there already
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def assume_constant_result(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compiler.assume_constant_result`, without importing dynamo (half a second) for it."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@assume_constant_result
def has_autograd(op: str) -> bool:
    """Whether a derivative is registered of an op, "namespace::name"."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op, "Autograd")


def allow_in_graph(function: Callable[..., Any]) -> None:
    """`torch.compiler.allow_in_graph`, in a trace, where dynamo has been imported."""
    torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Inside, where a mode traces what runs, `torch.compiler.is_compiling()` is true, as it is to dynamo. (Torch 2.11
    says so while dynamo traces only.)
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = before or num_dispatch_modes() > 0
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def replace_overload(op: torch._ops.OpOverload, call: Callable[..., Any]) -> Callable[..., Any]:
    """Have an op that is new do this where Python calls it.   -> what it did: to ask the dispatcher"""
    before: Callable[..., Any] = op._op
    op._op = call
    return before


# the current stream of a device, by index: (id, index, type), without the Stream made for it; 0 is the default
current_stream: Callable[[int], Any] = getattr(
    torch._C, "_cuda_getCurrentStream", torch.cuda.current_stream
)


# (event, stream): what methods of `torch.cuda.Event` call once they know that there is a stream
record_event: Callable[[Any, Any], None] = getattr(
    torch._C._CudaEventBase, "record", torch.cuda.Event.record
)
wait_event: Callable[[Any, Any], None] = getattr(
    torch._C._CudaEventBase, "wait", torch.cuda.Event.wait
)


def is_capturing() -> bool:
    """Whether the current CUDA stream is captured into a graph. The default one cannot be: it is not asked."""
    default: bool = current_stream(current_device())[0] == 0
    return not default and torch.cuda.is_current_stream_capturing()


num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack


PERFORMS = "_perform_action"  # in a step of a pipeline schedule


def overlapped_pairs(schedule: Any) -> Any:
    """The kind of the actions of a pipeline schedule that pair a forward with a backward; None where it has none, or
    its runtime takes no function of ours for them.
    """
    step = getattr(type(schedule), "_step_microbatches", overlapped_pairs).__code__
    known = PERFORMS in step.co_varnames + step.co_cellvars
    if not known or not hasattr(schedule, "register_custom_function"):
        return None
    actions = [a for mine in schedule.pipeline_order.values() for a in mine if a is not None]
    return next((a.computation_type for a in actions if getattr(a, "sub_actions", None)), None)


def performing() -> Callable[[Any], None]:
    """What the step of a pipeline schedule performs one action by, in a function that it calls in the place of one."""
    frame = sys._getframe(2)
    perform: Callable[[Any], None] = frame.f_locals[PERFORMS]
    return perform


def is_dtensor(cls: type) -> bool:
    """Is it torch.distributed's DTensor?  By name, since its import takes a second."""
    return cls.__name__ == "DTensor"


def plain_parts(t: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with storages that a wrapper subclass is made of, through wrappers in it; t itself of a plain one.

    What a wrapper names besides tensors (a DTensor its mesh) is left out.
    """
    if not hasattr(t, "__tensor_flatten__"):
        return [t]
    parts = [getattr(t, name) for name in t.__tensor_flatten__()[0]]
    return [plain for p in parts if isinstance(p, torch.Tensor) for plain in plain_parts(p)]


def is_nested(cls: type) -> bool:
    """Is it torch's class of jagged tensors?  By name, since the module is private."""
    return cls.__name__ == "NestedTensor"


def active_ddp() -> Any:
    """The DistributedDataParallel whose forward runs in this process, or None."""
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module


def begin_all_gather(x: torch.Tensor, dim: int, group: Any) -> Any:
    """The ranks' contiguous tensors one after the other along `dim`, of a ProcessGroup or a DeviceMesh, on their way:
    `waited` says when they are there.
    """
    from torch.distributed import _functional_collectives as collectives

    name = "all_gather_single" if hasattr(collectives, "all_gather_single") else "all_gather_tensor"
    return getattr(collectives, name)(x, dim, group)


def waited(t: Any) -> torch.Tensor:
    """What a collective brings, for what is launched from here on."""
    from torch.distributed import _functional_collectives as collectives

    return collectives.wait_tensor(t)  # type: ignore[no-untyped-call]


def all_gather(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    """`begin_all_gather`, waited for."""
    return waited(begin_all_gather(x, dim, group))


def reduce_scatter(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    """This rank's part, along `dim`, of the sum of the ranks' contiguous tensors."""
    from torch.distributed import _functional_collectives as collectives

    new = hasattr(collectives, "reduce_scatter_single")  # the other is deprecated then
    name = "reduce_scatter_single" if new else "reduce_scatter_tensor"
    return collectives.wait_tensor(getattr(collectives, name)(x, "sum", dim, group))  # type: ignore[no-untyped-call]


def all_gather_matmul(
    x: torch.Tensor, weight: torch.Tensor, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ranks' rows one after the other, and their product with `weight` (K, N): one overlaps the other, on CUDA."""
    name = _symmetric(group)  # torch registers the ops where it is first asked for such a group
    gathered, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(x.contiguous(), [weight], 0, name)
    return gathered, y


def matmul_reduce_scatter(x: torch.Tensor, weight: torch.Tensor, group: Any) -> torch.Tensor:
    """This rank's rows of the sum of the ranks' x times `weight` (K, N): one overlaps the other, on CUDA."""
    name = _symmetric(group)
    y: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
        x.contiguous(), weight, "sum", 0, name
    )
    return y


@functools.cache
def _symmetric(group: Any) -> str:
    """The name of a group (or of the one that a DeviceMesh has), whose ranks may share memory from here on."""
    from torch.distributed import _symmetric_memory

    group = group.get_group() if hasattr(group, "get_group") else group
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # later ones want no call
        _symmetric_memory.enable_symm_mem_for_group(group.group_name)
    name: str = group.group_name
    return name


def begin_all_reduce(x: torch.Tensor, group: Any, how: str = "sum") -> Any:
    """The sum of the ranks' tensors, or "max" of every element, in a new one, on its way: see `waited`."""
    from torch.distributed import _functional_collectives as collectives

    return collectives.all_reduce(x.contiguous(), how, group)


def all_reduce(x: torch.Tensor, group: Any, how: str = "sum") -> torch.Tensor:
    """`begin_all_reduce`, waited for."""
    return waited(begin_all_reduce(x, group, how))


def shard_placement_on(mesh: Any) -> tuple[Any, Any]:
    """What `shard_placement_fn` of FSDP2 gives for a parameter on a mesh of its own, as a class (None before torch
    2.12, which has none), and what that takes of the mesh.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_common as common

    return getattr(common, "ShardPlacementResult", None), common.FSDPMeshInfo(
        mesh, shard_mesh_dim=0
    )


class DispatchMode(_python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A `DispatchMode` sees ops as torch's own does, in eager code: torch would import dynamo to keep it out,
    half a second, at the first op.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def without_modes() -> AbstractContextManager[Any]:
    """Inside, no dispatch mode sees an op."""
    return _python_dispatch._disable_current_modes()


def unknown_rows(sizes: Sequence[int]) -> tuple[Any, list[Any]]:
    """A mode of fake tensors, and a symbol for each size, that stands for any number above 1.

    Sizes that are equal get one symbol.
    """
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
    )

    mode = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv())
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(sizes))
    fake = mode.from_tensor(torch.empty(*sizes, device="meta"), symbolic_context=context)
    return mode, list(fake.shape)


def assumed_of_rows(mode: Any) -> list[str]:
    """What was found out of the symbols of such a mode, in words: it holds for some numbers of rows only."""
    env = mode.shape_env
    return [*(str(guard.expr) for guard in env.guards), *map(str, env.replacements.values())]


def graph_of(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
    """The torch.fx.GraphModule of ATen's ops that a function calls on fake tensors."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="symbolic")(*tensors)


def generated(graph: Any, tensors: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """What inductor makes of such a graph."""
    from torch._inductor import compile as compiled

    with without_modes(), torch.inference_mode(False), torch.no_grad():
        made: Callable[..., Any] = compiled(graph, list(tensors))
        return made


def why_not_generated(device: torch.device) -> str | None:
    """Why inductor makes nothing for a device here; None where it does."""
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "inductor finds no C++ compiler"
        return None
    if device.type != "cuda":
        return f"inductor is not asked for {device.type}"
    from torch.utils._triton import has_triton

    return None if has_triton() else "there is no Triton for inductor"


@contextlib.contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Keep torch from logging an op that fake tensors cannot run, some forty lines, before it raises the error."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def is_fake(t: torch.Tensor) -> bool:
    """A fake tensor: shapes without data. (AOTAutograd traces functional tensors around them.)"""
    return isinstance(t, torch._subclasses.FakeTensor | FunctionalTensor)


def inside_fake_mode() -> bool:
    """Whether every tensor that is made here is a fake one."""
    return torch._guards.detect_fake_mode() is not None


def storage_id(tensor: torch.Tensor) -> int:
    """Identifies the storage of a tensor while it lives; `data_ptr` does not (0 on meta)."""
    return int(tensor.untyped_storage()._cdata)


def is_checkpoint_hook(pack: object) -> bool:
    """Whether a pack hook is `torch.utils.checkpoint`'s: of its forward or its recomputation."""
    return getattr(pack, "__module__", None) == "torch.utils.checkpoint"


def in_recomputation() -> bool:
    """Whether a non-reentrant checkpoint runs its function again, whatever other hooks are open in it.

    A reentrant one runs its first forward without a graph instead, and has no hooks.
    """
    if not in_backward():
        return False
    open_hooks = []
    while (pair := top_saved_tensor_hooks()) is not None:
        open_hooks.append(pair)
        pop_saved_tensor_hooks()
    for pair in reversed(open_hooks):
        push_saved_tensor_hooks(*pair)
    names = (
        getattr(pack, "__qualname__", "") for pack, _ in open_hooks if is_checkpoint_hook(pack)
    )
    return any(name.startswith("_recomputation_hook") for name in names)


# which storage this is; unique for as long as it, or a WeakStorage of it, lives
storage_key: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")


# torch's own wrappers take thrice as long
_expired: Any = torch.UntypedStorage._expired
_free_weak_ref: Any = torch.UntypedStorage._free_weak_ref


class WeakStorage:
    """A `WeakStorage` is a weak reference to a storage: its memory may go, its key is not given to another."""

    __slots__ = ("_cdata",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._cdata: Any = storage._weak_ref()

    def __del__(self, free: Callable[[Any], None] = _free_weak_ref) -> None:
        free(self._cdata)

    def __reduce__(self) -> Any:
        raise TypeError("a weak reference to a storage is not copied: either copy would free it")

    def expired(self) -> bool:
        return bool(_expired(self._cdata))

    def storage(self) -> torch.UntypedStorage | None:
        factory: Any = torch.UntypedStorage
        found: torch.UntypedStorage | None = factory._new_with_weak_ptr(self._cdata)
        return found

    def holders(self) -> int:
        """How many tensors (and others) hold the storage, not counting its Python object."""
        found = self.storage()
        return 0 if found is None else int(torch._C._storage_Use_Count(found._cdata)) - 1


def uses(held: list[Any], at: int = 0) -> tuple[int, ...]:
    """How often a tensor of a list is held, and its storage: in Python, and by what lies below it."""
    storage = held[at].untyped_storage()
    below = held[at]._use_count(), int(torch._C._storage_Use_Count(storage._cdata))
    return sys.getrefcount(held[at]), sys.getrefcount(storage), *below


# of a tensor that nothing but its list holds: how Python counts its own frames differs by release
_ONCE = uses([torch.empty(0)])


def held_once(held: list[Any], at: int = 0) -> bool:
    """Whether a tensor of a list is held by nothing else, no view of it either: no name, hook or graph. What it has
    been read for last may be written over it.
    """
    return uses(held, at) == _ONCE


def is_only_view(y: torch.Tensor) -> bool:
    """Whether nothing but a view holds what it is a view of: no name, list or other view."""
    return uses([y._base]) == _ONLY_VIEW


_VIEW = torch.empty(1).view(1)
_ONLY_VIEW = uses([_VIEW._base])


def occupy_device(cycles: int) -> None:
    """Have the current CUDA stream do nothing for so many cycles of its clock."""
    sleep: Any = torch.cuda._sleep
    sleep(cycles)


def running_modules() -> list[torch.nn.Module]:
    """The modules whose forwards run, innermost first, by the frames of their calls."""
    found: list[torch.nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.nn.Module._call_impl.__code__:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found


_CALLS = (torch.nn.Module.__call__,)  # some tools put their own there


def direct_call(module: torch.nn.Module) -> Callable[..., Any]:
    """What a call of this module comes to, with two frames less on the stack."""
    if type(module).__call__ not in _CALLS or call_of(module) is not None:
        return module
    return module._call_impl


def call_of(module: torch.nn.Module) -> Callable[..., Any] | None:
    """What a call of this module runs in the place of `_call_impl`: None, or what `Module.compile` put there."""
    return module._compiled_call_impl


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calls of this module go through torch.compile, in place or wrapped."""
    wrapper = type(module).__module__ == "torch._dynamo.eval_frame"
    return wrapper or hasattr(call_of(module), "_torchdynamo_orig_callable")


def replace_call(
    module: torch.nn.Module, call: Callable[..., Any] | None
) -> Callable[..., Any] | None:
    """Have calls of this module run `call`.   -> what they ran before"""
    before = call_of(module)
    module._compiled_call_impl = call
    if call is None:
        del module._compiled_call_impl
    return before


def never_compile(function: Callable[..., Any]) -> None:
    """Have torch.compile run `function`, and all that it calls, as it is.

    `torch.compiler.disable` would do, but it imports dynamo.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compiler.disable(function)`, which imports dynamo (half a second): where dynamo is, is soon enough."""

    @functools.wraps(function)
    def outside(*args: Any, **keywords: Any) -> Any:
        return function(*args, **keywords)

    outside._torchdynamo_disable = True  # type: ignore[attr-defined]
    never_compile(outside)
    return outside


_AOT = "torch._functorch._aot_autograd"


def compiled_region(below: FrameType | None) -> list[torch.nn.Module] | None:
    """The modules whose forwards run, innermost first, if a node that torch.compile made is what saves. Else None.
    A compiled forward calls no hooks; its frames know the modules.

    below: the frame that called the pack hook: asked for by each tensor that torch saves, so that one look has to do
    """
    while below is not None and below.f_globals.get("__name__") == "torch.autograd.function":
        below = below.f_back
    if below is None or not str(below.f_globals.get("__name__")).startswith(_AOT):
        return None
    found, frame = [], below.f_back
    while frame is not None:
        home = frame.f_globals.get("__name__")
        if frame.f_code.co_name == "_call_impl" and home == "torch.nn.modules.module":
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found


# whether a tensor is a level of `torch.func`, without a storage of its own
is_functorch_wrapped: Callable[[torch.Tensor], bool] = (
    torch._C._functorch.is_functorch_wrapped_tensor
)


# the level of the `torch.func` transform that runs in this thread, which may wrap what is allocated in it, or None
functorch_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level


def version(t: torch.Tensor) -> int:
    """How often t has been written in place; inference tensors do not count."""
    return 0 if t.is_inference() else t._version


def alias_of_no_bytes(t: torch.Tensor) -> torch.Tensor:
    """A tensor that shares the version counter of t, and none of its memory."""
    alias = t.detach()
    alias.data = nothing(t.dtype, t.device)
    return alias


@functools.cache
def nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of no elements, made once: to make others by, of any size on its device, in half the time."""
    with torch.inference_mode(False):  # whoever asks for it first
        return torch.empty(0, dtype=dtype, device=device)


def assert_async(condition: torch.Tensor, message: str) -> None:
    """Have the device check a 0-d bool tensor when it gets there; on the CPU at once, by RuntimeError."""
    torch._assert_async(condition, message)


def base_of(t: torch.Tensor) -> torch.Tensor:
    """The tensor that t is a view of, or t itself. Views of one base share its version counter."""
    base: torch.Tensor | None = t._base
    return t if base is None else base


def share_version_counter(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a write to one is seen as one to the other (not so for aliases by `.data`, `set_`)."""
    before = b._version
    with _unsafe_preserve_version_counter(a):
        torch.autograd.graph.increment_version(a)
        return b._version != before


def negated_view(t: torch.Tensor) -> torch.Tensor:
    """t with its lazy negation bit flipped; the bytes stay."""
    view: torch.Tensor = torch._neg_view(t)
    return view


# `t.view(shape)` that autograd takes for no view: for a t that nobody else holds or has saved
unsafe_view: Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor] = torch.ops.aten._unsafe_view


def tensor_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Whether as many tensors have the class, dtype, device, shape and strides of these, and need a gradient as they
    do, under the same autocast and transforms. It holds none of them.
    """
    shapes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    guards: Any = torch._C._dynamo.guards
    guard = guards.TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = guard.check
    return check


# what no dict has had before, after every write to this one; where torch tells nothing, at every look
dict_version: Callable[[dict[Any, Any]], object] = getattr(
    torch._C._dynamo.guards, "dict_version", lambda _: object()
)


def empty_strided(device: torch.device) -> Callable[..., torch.Tensor]:
    """(shape, strides, dtype) -> a tensor on this device, which is the current one, in a third of the time."""
    fast = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if fast is not None:
        return fast
    return lambda shape, strides, dtype: torch.empty_strided(
        shape, strides, dtype=dtype, device=device
    )


FSDP_WATCHES = "RegisterPostBackwardFunctionBackward"
"""The autograd node by which FSDP2 watches what goes into a module."""


def producer(t: torch.Tensor) -> Any:
    """The autograd node that made t, past those of FSDP2; None of a leaf."""
    node, number = t.grad_fn, t.output_nr
    while node is not None and node.name() == FSDP_WATCHES:
        node, number = node.next_functions[number]
    return None if node is None or node.name() == "torch::autograd::AccumulateGrad" else node


def fsdp_accumulation(module: Any) -> list[tuple[Any, str, Any]]:
    """Where FSDP2 keeps which gradients of a module it reduces, and those that it has not reduced: objects, names of
    their attributes, and the values of a module that reduces all.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # before torch 2.12 it has one
    found: list[tuple[Any, str, Any]] = []
    for group in filter(None, [state._fsdp_param_group] if groups is None else groups):
        found += [(group, "reduce_grads", True), (group, "all_reduce_grads", True)]
        found.append((group, "_partial_reduce_output", None))
        for p in group.fsdp_params:
            found.append((p, "unsharded_accumulated_grad", None))
            if hasattr(p, "_unsharded_param"):  # not before it was gathered once
                found.append((p._unsharded_param, "grad", None))
    return found


_watched_fsdp: list[Any] = []  # the class whose methods `watch_fsdp` has wrapped


def watch_fsdp(
    gathered: Callable[[torch.Tensor, Any], None], freed: Callable[[torch.Tensor], None]
) -> None:
    """Have `gathered(parameter, shard)` called when FSDP2 has gathered a parameter, whose version it does not move, and
    `freed(parameter)` when it frees one; once, as soon as FSDP2 is imported.

    shard: which write to the shards the gathered values are of.
    """
    module = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param")
    if module is None or _watched_fsdp:
        return
    cls: Any = module.FSDPParam
    _watched_fsdp.append(cls)
    to_unsharded, free = cls.to_unsharded, cls.free_unsharded_param

    @functools.wraps(to_unsharded)
    def watched(self: Any) -> None:
        to_unsharded(self)
        local = self._sharded_local_tensor
        gathered(
            self._unsharded_param, (self.sharded_param._version, local._version, local.data_ptr())
        )

    @functools.wraps(free)
    def watched_free(self: Any) -> None:
        if hasattr(self, "_unsharded_param"):  # not before it was gathered once
            freed(self._unsharded_param)
        free(self)

    cls.to_unsharded, cls.free_unsharded_param = watched, watched_free
