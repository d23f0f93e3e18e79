"""Every private torch name that fuseops uses, in one place, to be checked against each torch release.

`tests/test_torch_private.py` fails when one of them is gone.
"""

import contextlib
import functools
import logging
import operator
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad, profiler
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules import module as nn_module
from torch.utils import _python_dispatch, _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from fuseops import attributes

pytree = _pytree

# hooks on every module of the process, by their handles
GLOBAL_HOOKS: tuple[dict[int, Callable[..., Any]], ...] = (
    nn_module._global_forward_pre_hooks,
    nn_module._global_forward_hooks,
    nn_module._global_backward_pre_hooks,
    nn_module._global_backward_hooks,
)


def global_hooks() -> tuple[dict[int, Callable[..., Any]], ...]:
    """GLOBAL_HOOKS, for traced code: dynamo guards on whether each of them is empty."""
    return GLOBAL_HOOKS


# the number of the backward that autograd executes in this thread; NO_BACKWARD outside of one
current_backward: Callable[[], int] = torch._C._current_graph_task_id
NO_BACKWARD = -1


def on_backward_end(call: Callable[[], Any]) -> None:
    """In a backward: have autograd call a function at its end, unless an error stops it.

    Compiled autograd has no such callback: there it is called at once.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and (
        compiled.compiled_autograd_enabled or compiled.in_compiled_autograd_region
    ):
        call()
    else:
        torch.autograd.Variable._execution_engine.queue_callback(call)


def post_accumulate_hooks(parameter: torch.Tensor) -> dict[int, Callable[..., Any]]:
    """The hooks that autograd runs when it has added to the gradient of a leaf: torch's own dict, if there are any."""
    return parameter._post_accumulate_grad_hooks or {}


def gradient_hooks(t: torch.Tensor) -> list[Callable[..., Any]]:
    """The hooks that autograd runs with the gradient of a tensor, in their order."""
    return [*(t._backward_hooks or {}).values()]


def in_backward() -> bool:
    """Whether autograd executes a backward in this thread. A forward for which it does is a recomputation."""
    return current_backward() != NO_BACKWARD


def leaves_behind(results: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The leaf tensors that want a gradient and that these results were computed from."""
    edge_of, seen = torch.autograd.graph.get_gradient_edge, set[Any]()
    pending: list[Any] = [edge_of(t).node for t in results if t.requires_grad]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                yield node.variable
            pending += [previous for previous, _ in node.next_functions]


def will_accumulate(node: Any) -> bool:
    """In a backward: whether a gradient that flows to this node is added to the `.grad` of a leaf: its own, or that of
    a leaf which is a direct input of its function.

    It is not where `torch.autograd.grad` returns it, or `backward(inputs=)` is called for other tensors.
    """
    leaves = [child for child, _ in node.next_functions if hasattr(child, "variable")]
    try:
        return any(map(torch._C._will_engine_execute_node, leaves or [node]))
    except RuntimeError:  # a leaf whose gradient is returned
        return False


# the innermost (pack, unpack) pair of `torch.autograd.graph.saved_tensors_hooks`, or None
top_saved_tensor_hooks: Callable[[], tuple[object, object] | None] = functools.partial(
    torch._C._autograd._top_saved_tensors_default_hooks, True
)


def release_saved(ctx: Any) -> None:
    """In a backward: free the saved tensors of the node now, unless the graph is retained."""
    ctx.maybe_clear_saved_tensors()


def written_of(error: Exception, ctx: Any) -> list[int]:
    """The numbers of the saved tensors of a node that may be the one that was written in place, as its `saved_tensors`
    said: those at that version, in that shape.
    """
    said = re.search(r"Tensor \[([\d, ]*)\]\].* is at version (\d+); expected version", str(error))
    if said is None:
        return []
    shape, version = [int(n) for n in said[1].split(", ") if n], int(said[2])
    found = []
    for number, saved in enumerate(ctx._raw_saved_tensors):
        with contextlib.suppress(RuntimeError):  # one that hooks have packed has no data
            if saved.data._version == version and [*saved.data.shape] == shape:
                found.append(number)
    return found


# pop the innermost pair from this thread's stack, and push a pair
pop_saved_tensor_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
push_saved_tensor_hooks: Callable[[Any, Any], None] = (
    torch._C._autograd._push_saved_tensors_default_hooks
)


# whether autocast is on for any device type, at a fifth of the cost of asking for one
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled

# whether a `torch.func` transform (grad, vjp, vmap, ...) runs
inside_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active


def is_batched(t: torch.Tensor) -> bool:
    """Whether t is a batch of tensors, made by `vmap` or by `torch.autograd.grad(is_grads_batched=True)`."""
    private = torch._C._functorch
    while private.is_gradtrackingtensor(t):  # by a `grad` inside of the `vmap`
        t = private.get_unwrapped(t)
    return bool(private.is_batchedtensor(t) or private.is_legacy_batchedtensor(t))


def inside_transform() -> bool:
    """Whether a transform may have wrapped tensors with a batch axis or a tangent: one of `torch.func`, or
    `torch.autograd.forward_ad.dual_level()`.
    """
    return inside_functorch() or forward_level() >= 0


# the level of forward-mode AD, -1 outside: inside, tensors may have tangents. (A partial costs no Python frame.)
forward_level: Callable[[], int] = functools.partial(getattr, forward_ad, "_current_level")


def has_tangent(t: torch.Tensor | None) -> bool:
    """Whether t carries a tangent of the current level of forward-mode AD."""
    if t is None:
        return False
    return forward_ad.unpack_dual(t).tangent is not None  # type: ignore[no-untyped-call]


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without the check of all arguments that only `torch.func` transforms need."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


# the index of the current CUDA device, without the check whether CUDA is initialised: some tensor is on it already
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def assume_constant_result(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compiler.assume_constant_result`, without importing dynamo (half a second) for it."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@assume_constant_result
def has_autograd(op: str) -> bool:
    """Whether a derivative is registered for an op, "namespace::name"."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op, "Autograd")


def compiling() -> AbstractContextManager[None]:
    """Make `torch.compiler.is_compiling()` true inside if a dispatch mode traces. (In torch 2.11 it is true only while
    dynamo traces.)
    """
    compiles = torch.compiler._is_compiling_flag or num_dispatch_modes() > 0
    return attributes.attributes_set([(torch.compiler, "_is_compiling_flag", compiles)])


def register_fake(
    lib: torch.library.Library, name: str, fake: Callable[..., Any], source: str
) -> None:
    """`torch.library.register_fake`, without its look at the caller's source file: a twelfth of what `import fuseops`
    called.

    source: what errors say it was registered by
    """
    entry = torch._library.simple_registry.singleton.find(f"{lib.ns}::{name}")
    handle = entry.fake_impl.register(fake, source, lib=lib, allow_override=True)
    lib._registration_handles.append(handle)


def replace_overload(op: torch._ops.OpOverload, call: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the function that runs when Python calls a new op.   -> the one before, which calls torch's dispatcher"""
    before: Callable[..., Any] = op._op
    op._op = call
    return before


# (id, index, type) of the current stream of a device, without making a Stream; id 0 is the default stream
current_stream: Callable[[int], Any] = getattr(
    torch._C, "_cuda_getCurrentStream", torch.cuda.current_stream
)


# (event, stream): `torch.cuda.Event.record` and `.wait` without their default for the stream
record_event: Callable[[Any, Any], None] = getattr(
    torch._C._CudaEventBase, "record", torch.cuda.Event.record
)
wait_event: Callable[[Any, Any], None] = getattr(
    torch._C._CudaEventBase, "wait", torch.cuda.Event.wait
)


def is_capturing() -> bool:
    """Whether the current CUDA stream is captured into a graph. The default stream never is."""
    default: bool = current_stream(current_device())[0] == 0
    return not default and torch.cuda.is_current_stream_capturing()


num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack


# whether torch's profiler runs, or `emit_nvtx`
is_profiling: Callable[[], bool] = functools.partial(getattr, profiler, "_is_profiler_enabled")


PERFORMS = "_perform_action"  # a local function in the step of a pipeline schedule


def overlap_action_type(schedule: Any) -> Any:
    """The computation type of the actions of a pipeline schedule that overlap a forward with a backward.

    None where it has none, or its runtime accepts no custom function for them.
    """
    step = getattr(type(schedule), "_step_microbatches", overlap_action_type).__code__
    known = PERFORMS in step.co_varnames + step.co_cellvars
    if not known or not hasattr(schedule, "register_custom_function"):
        return None
    actions = [a for of_rank in schedule.pipeline_order.values() for a in of_rank if a is not None]
    return next((a.computation_type for a in actions if getattr(a, "sub_actions", None)), None)


def pipeline_perform() -> Callable[[Any], None]:
    """The function by which the step of a pipeline schedule performs one action, for its custom functions to call."""
    frame = sys._getframe(2)
    perform: Callable[[Any], None] = frame.f_locals[PERFORMS]
    return perform


def is_dtensor(cls: type) -> bool:
    """Whether a class is torch.distributed's DTensor. By name, since its import takes a second."""
    return cls.__name__ == "DTensor"


def plain_parts(t: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a wrapper subclass holds, through nested wrappers; t itself where it is plain.

    Other attributes of a wrapper (the mesh of a DTensor) are left out.
    """
    if not hasattr(t, "__tensor_flatten__"):
        return [t]
    parts = [getattr(t, name) for name in t.__tensor_flatten__()[0]]
    return [plain for p in parts if isinstance(p, torch.Tensor) for plain in plain_parts(p)]


def is_nested(cls: type) -> bool:
    """Whether a class is torch's class of jagged tensors. By name, since the module is private."""
    return cls.__name__ == "NestedTensor"


def active_ddp() -> Any:
    """The DistributedDataParallel whose forward runs in this process, or None."""
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module


def reduced_by_ddp(parameter: torch.Tensor) -> bool:
    """Whether the DistributedDataParallel whose forward runs here reduces the gradient of this parameter."""
    return active_ddp() is not None and not getattr(parameter, "_ddp_ignored", False)


@functools.cache
def on_ddp_wrap(callback: Callable[[torch.nn.Module, set[str]], None]) -> None:
    """Call `callback(model, ignored)` when a model is wrapped in DistributedDataParallel, before anything is sent.

    ignored: the names of the tensors that the wrapper leaves alone, which the callback may add to
    """

    def hook(wrapper: torch.nn.Module, name: str, model: Any) -> None:
        if isinstance(wrapper, torch.nn.parallel.DistributedDataParallel) and name == "module":
            callback(model, wrapper.parameters_to_ignore)

    torch.nn.modules.module.register_module_module_registration_hook(hook)


def default_store() -> Any:
    """The store by which the processes of the default group have found each other."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def all_gather_async(x: torch.Tensor, dim: int, group: Any) -> Any:
    """Start an all-gather of the ranks' contiguous tensors along `dim`; `wait_tensor` gives its result.

    group: a ProcessGroup or a DeviceMesh
    """
    from torch.distributed import _functional_collectives as collectives

    name = "all_gather_single" if hasattr(collectives, "all_gather_single") else "all_gather_tensor"
    return getattr(collectives, name)(x, dim, group)


def wait_tensor(t: Any) -> torch.Tensor:
    """The result of an asynchronous collective; kernels launched from now on wait for it."""
    from torch.distributed import _functional_collectives as collectives

    return collectives.wait_tensor(t)  # type: ignore[no-untyped-call]


def all_gather(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    """The ranks' contiguous tensors, concatenated along `dim`."""
    return wait_tensor(all_gather_async(x, dim, group))


def reduce_scatter(x: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    """This rank's part, along `dim`, of the sum of the ranks' contiguous tensors."""
    from torch.distributed import _functional_collectives as collectives

    new = hasattr(collectives, "reduce_scatter_single")  # the other is deprecated then
    name = "reduce_scatter_single" if new else "reduce_scatter_tensor"
    return collectives.wait_tensor(getattr(collectives, name)(x, "sum", dim, group))  # type: ignore[no-untyped-call]


def all_gather_matmul(
    x: torch.Tensor, weight: torch.Tensor, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ranks' rows, concatenated, and their product with `weight` (K, N); on CUDA the two overlap."""
    name = _symmetric(group)  # which registers the ops
    gathered, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(x.contiguous(), [weight], 0, name)
    return gathered, y


def matmul_reduce_scatter(x: torch.Tensor, weight: torch.Tensor, group: Any) -> torch.Tensor:
    """This rank's rows of the sum over ranks of x times `weight` (K, N); on CUDA product and sum overlap."""
    name = _symmetric(group)
    y: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
        x.contiguous(), weight, "sum", 0, name
    )
    return y


@functools.cache
def _symmetric(group: Any) -> str:
    """The name of a group (or of a DeviceMesh's), after enabling symmetric memory for its ranks."""
    group = group.get_group() if hasattr(group, "get_group") else group
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in later releases, which need no call
        symmetric_memory().enable_symm_mem_for_group(group.group_name)
    name: str = group.group_name
    return name


def symmetric_memory() -> Any:
    """torch's symmetric memory: `empty` and `rendezvous`; `get_backend`, `set_backend` and `is_nvshmem_available`."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory


def all_reduce_async(x: torch.Tensor, group: Any, how: str = "sum") -> Any:
    """Start an all-reduce, "sum" or "max", into a new tensor; `wait_tensor` gives its result."""
    from torch.distributed import _functional_collectives as collectives

    return collectives.all_reduce(x.contiguous(), how, group)


def all_reduce(x: torch.Tensor, group: Any, how: str = "sum") -> torch.Tensor:
    """The sum of the ranks' tensors, or the "max" of each element."""
    return wait_tensor(all_reduce_async(x, group, how))


def fsdp_shard_placement(mesh: Any) -> tuple[Any, Any]:
    """The class of the result of FSDP2's `shard_placement_fn` for a parameter with its own mesh (None before torch
    2.12), and the mesh info that it takes.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_common as common

    return getattr(common, "ShardPlacementResult", None), common.FSDPMeshInfo(
        mesh, shard_mesh_dim=0
    )


class DispatchMode(_python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A `DispatchMode` is a TorchDispatchMode for eager code that does not import dynamo (half a second) at its first
    op.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


# as the `__torch_function__` of a subclass: its functions give plain tensors
no_torch_function: Any = torch._C._disabled_torch_function_impl


def as_subclass(cls: type[torch.Tensor], t: torch.Tensor, requires_grad: bool = False) -> Any:
    """A tensor of a class over the memory of t, without an autograd graph."""
    return torch.Tensor._make_subclass(cls, t, requires_grad)


def without_torch_function() -> AbstractContextManager[Any]:
    """Inside, no `__torch_function__` of a subclass of Tensor sees a function."""
    guard: AbstractContextManager[Any] = torch._C.DisableTorchFunctionSubclass()
    return guard


def without_subclasses() -> AbstractContextManager[Any]:
    """Inside, no subclass of Tensor and no mode sees an op below autograd."""
    guard: AbstractContextManager[Any] = torch._C._DisableTorchDispatch()
    return guard


def without_modes() -> AbstractContextManager[Any]:
    """Inside, no dispatch mode sees an op."""
    return _python_dispatch._disable_current_modes()


def symbolic_sizes(sizes: Sequence[int]) -> tuple[Any, list[Any]]:
    """A mode of fake tensors, and a symbol for each size, of any value above 1. Equal sizes share a symbol."""
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
    )

    mode = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv())
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(sizes))
    fake = mode.from_tensor(torch.empty(*sizes, device="meta"), symbolic_context=context)
    return mode, list(fake.shape)


def symbol_constraints(mode: Any) -> list[str]:
    """The guards and replacements that a trace has added to the symbols of such a mode, as text."""
    env = mode.shape_env
    return [*(str(guard.expr) for guard in env.guards), *map(str, env.replacements.values())]


def trace_graph(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
    """The torch.fx.GraphModule of the ATen ops that a function calls on fake tensors."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="symbolic")(*tensors)


def inductor_compile(graph: Any, tensors: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Compile such a graph with inductor."""
    from torch._inductor import compile as compiled

    with without_modes(), torch.inference_mode(False), torch.no_grad():
        made: Callable[..., Any] = compiled(graph, list(tensors))
        return made


def inductor_unsupported_reason(device: torch.device) -> str | None:
    """Why inductor cannot compile for a device on this machine, or None."""
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


def quiet_fake_tensors() -> AbstractContextManager[None]:
    """Keep torch from logging forty lines before it raises the error of an op that fake tensors cannot run."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    return attributes.attributes_set([(log, "disabled", True)])


def is_fake(t: torch.Tensor) -> bool:
    """Whether t is a fake tensor, or a functional tensor around one, as AOTAutograd traces them."""
    return isinstance(t, torch._subclasses.FakeTensor | FunctionalTensor)


def inside_fake_mode() -> bool:
    """Whether a FakeTensorMode is active: every new tensor is a fake one."""
    return torch._guards.detect_fake_mode() is not None


# whether t is zeros without memory, as autograd makes them for a gradient that nothing flows into
is_zerotensor: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor

grouped_mm = torch.ops.aten._grouped_mm.default  # as dispatch modes see it
scaled_mm = torch.ops.aten._scaled_mm.default  # a product of FP8 codes


def storage_id(tensor: torch.Tensor) -> int:
    """A number that identifies a tensor's storage while that lives; `data_ptr` does not (0 on meta)."""
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


# a number that identifies a storage as long as it, or a WeakStorage of it, lives
storage_key: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")


# three times as fast as torch's own wrappers
_expired: Any = torch.UntypedStorage._expired
_free_weak_ref: Any = torch.UntypedStorage._free_weak_ref


class WeakStorage:
    """A `WeakStorage` is a weak reference to a storage: its memory may be freed, but its key is not reused."""

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
        """The number of references to the storage, not counting its Python object."""
        found = self.storage()
        return 0 if found is None else int(torch._C._storage_Use_Count(found._cdata)) - 1


def use_counts(held: list[Any], at: int = 0) -> tuple[int, ...]:
    """The reference counts of a tensor in a list, and of its storage: in Python, and in C++."""
    storage = held[at].untyped_storage()
    below = held[at]._use_count(), int(torch._C._storage_Use_Count(storage._cdata))
    return sys.getrefcount(held[at]), sys.getrefcount(storage), *below


# of a tensor that only its list holds; measured, since Python releases count their frames differently
_ONCE = use_counts([torch.empty(0)])


def held_once(held: list[Any], at: int = 0) -> bool:
    """Whether the list has the only reference to a tensor and its storage: no name, view, hook or graph has one.

    Then its last reader may write over it.
    """
    return use_counts(held, at) == _ONCE


def is_only_view(y: torch.Tensor) -> bool:
    """Whether a view has the only reference to its base: no name, list or other view has one."""
    return use_counts([y._base]) == _ONLY_VIEW


_VIEW = torch.empty(1).view(1)
_ONLY_VIEW = use_counts([_VIEW._base])


def occupy_device(cycles: int) -> None:
    """Block the current CUDA stream for a number of clock cycles."""
    sleep: Any = torch.cuda._sleep
    sleep(cycles)


def running_modules() -> list[torch.nn.Module]:
    """The modules whose forwards run, innermost first, found on the stack."""
    found: list[torch.nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.nn.Module._call_impl.__code__:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found


_CALLS = (torch.nn.Module.__call__,)  # as torch has it: some tools replace it


def direct_call(module: torch.nn.Module) -> Callable[..., Any]:
    """The function that a call of this module ends in, which saves two frames; the module where it was replaced."""
    if type(module).__call__ not in _CALLS or replaced_call(module) is not None:
        return module
    return module._call_impl


def replaced_call(module: torch.nn.Module) -> Callable[..., Any] | None:
    """The function that replaces `_call_impl` of this module, as `Module.compile` sets it, or None."""
    return module._compiled_call_impl


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calls of this module go through torch.compile, in place or wrapped."""
    wrapper = type(module).__module__ == "torch._dynamo.eval_frame"
    return wrapper or hasattr(replaced_call(module), "_torchdynamo_orig_callable")


def replace_call(
    module: torch.nn.Module, call: Callable[..., Any] | None
) -> Callable[..., Any] | None:
    """Have calls of this module run `call`.   -> the replacement before"""
    before = replaced_call(module)
    module._compiled_call_impl = call
    if call is None:
        del module._compiled_call_impl
    return before


def remove_forward_hooks(module: torch.nn.Module, unwanted: Callable[[Any], bool]) -> None:
    """Remove those hooks on the forward of a module that are unwanted, as their handles would."""
    before: list[dict[int, Any]] = [
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
    ]
    behind: list[dict[int, Any]] = [module._forward_hooks, module._forward_hooks_with_kwargs]
    behind.append(module._forward_hooks_always_called)
    for tables in (before, behind):
        for number in [number for number, hook in tables[0].items() if unwanted(hook)]:
            for table in tables:
                table.pop(number, None)


def never_compile(function: Callable[..., Any]) -> None:
    """Keep torch.compile from tracing `function` and what it calls, as `torch.compiler.disable` without its import of
    dynamo.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def dynamo_disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compiler.disable(function)` without importing dynamo (half a second)."""

    @functools.wraps(function)
    def outside(*args: Any, **keywords: Any) -> Any:
        return function(*args, **keywords)

    outside._torchdynamo_disable = True  # type: ignore[attr-defined]
    never_compile(outside)
    return outside


_AOT = "torch._functorch._aot_autograd"


def compiled_region(below: FrameType | None) -> list[torch.nn.Module] | None:
    """The modules whose forwards run, innermost first, if a node of a compiled graph saves a tensor; else None.

    They are found on the stack, since a compiled forward calls no module hooks.
    below: the frame that called the pack hook, which runs for every saved tensor: this has to be fast.
    """
    while below is not None and below.f_globals.get("__name__") == "torch.autograd.function":
        below = below.f_back
    if below is None or not str(below.f_globals.get("__name__")).startswith(_AOT):
        return None
    found, frame = [], below.f_back
    while frame is not None:
        module_name = frame.f_globals.get("__name__")
        if frame.f_code.co_name == "_call_impl" and module_name == "torch.nn.modules.module":
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found


# whether a tensor is a wrapper of a `torch.func` transform, without a storage
is_functorch_wrapped: Callable[[torch.Tensor], bool] = (
    torch._C._functorch.is_functorch_wrapped_tensor
)


# the level of the `torch.func` transform that runs in this thread, which may wrap new tensors, or None
functorch_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level


def version(t: torch.Tensor) -> int:
    """The number of in-place writes to t; 0 for inference tensors, which do not count them."""
    return 0 if t.is_inference() else t._version


def empty_alias(t: torch.Tensor) -> torch.Tensor:
    """A tensor that shares the version counter of t, and none of its memory."""
    alias = t.detach()
    alias.data = prototype(t.dtype, t.device)
    return alias


@functools.cache
def prototype(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A cached tensor of no elements: its `new_empty` takes half the time of `torch.empty`."""
    with torch.inference_mode(False):  # whatever the first caller's mode is
        return torch.empty(0, dtype=dtype, device=device)


def assert_async(condition: torch.Tensor, message: str) -> None:
    """Check a 0-d bool tensor on its device, in stream order.  On the CPU raises RuntimeError at once."""
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


# `t.view(shape)` that autograd does not treat as a view: only for a t without other references
unsafe_view: Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor] = torch.ops.aten._unsafe_view


def tensor_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function that checks whether tensors match these in class, dtype, device, shape, strides and requires_grad,
    under the same autocast and transforms. It holds no reference to them.
    """
    shapes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    guards: Any = torch._C._dynamo.guards
    guard = guards.TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = guard.check
    return check


# a number that changes with every write to a dict and is never reused; without it in torch, a new object each time
dict_version: Callable[[dict[Any, Any]], object] = getattr(
    torch._C._dynamo.guards, "dict_version", lambda _: object()
)


def empty_strided(device: torch.device) -> Callable[..., torch.Tensor]:
    """(shape, strides, dtype) -> a tensor on this device, the current one: three times as fast as torch's."""
    fast = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if fast is not None:
        return fast
    return lambda shape, strides, dtype: torch.empty_strided(
        shape, strides, dtype=dtype, device=device
    )


FSDP_WATCHES = "RegisterPostBackwardFunctionBackward"
"""The autograd node that FSDP2 puts before the inputs of a module."""


def producer(t: torch.Tensor) -> Any:
    """The autograd node that made t, ignoring those of FSDP2; None for a leaf."""
    node, number = t.grad_fn, t.output_nr
    while node is not None and node.name() == FSDP_WATCHES:
        node, number = node.next_functions[number]
    return None if node is None or node.name() == "torch::autograd::AccumulateGrad" else node


def fsdp_accumulation(module: Any) -> list[tuple[Any, str, Any]]:
    """The attributes in which FSDP2 keeps whether it reduces the gradients of a module, and those that it has not yet
    reduced: (object, attribute, value in a module that has reduced all).
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
    """Call `gathered(parameter, shard)` after FSDP2 has gathered a parameter, which does not change its version, and
    `freed(parameter)` before it frees one. Takes effect once, after FSDP2 is imported.

    shard: identifies the write to the shards whose values were gathered.
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
