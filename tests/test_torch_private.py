"""Every private torch name that fuseops uses exists and does what fuseops wants of it."""

import ast
import copy
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fuseops import torch_private
from fuseops.observe.labels import Labels, paths_under
from fuseops.observe.saved import SavedLedger, Where


class DispatchMode(TorchDispatchMode): ...


class FunctionMode(TorchFunctionMode): ...


FUNCTIONS = {n for n, f in inspect.getmembers(torch_private, inspect.isfunction)}


def test_every_name_has_a_test_here() -> None:
    tested = {
        n for n in FUNCTIONS if f"torch_private.{n}(" in inspect.getsource(inspect.getmodule(asked))
    }
    assert tested == FUNCTIONS, f"no test of {sorted(FUNCTIONS - tested)}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


READ_ANYWHERE = {"_version", "_base"}  # of a tensor, where a call would cost more than the reading
OF_TENSORS = {name for name in dir(Tensor) if is_private(name)} - READ_ANYWHERE


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of private modules and names of torch that are imported or read, and of attributes that tensors have
    and the code's own objects (`self`) may have too.
    """
    torchs = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            paths = {a.asname or a.name.split(".")[0]: a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            paths = {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        else:
            continue
        for name, path in paths.items():
            if path.split(".")[0] == "torch":
                torchs.add(name)
                if any(map(is_private, path.split("."))):
                    yield node.lineno, path
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner: ast.AST = node.value
            own = isinstance(owner, ast.Name) and owner.id == "self"
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            of_torch = isinstance(owner, ast.Name) and owner.id in torchs
            if of_torch or (node.attr in OF_TENSORS and not own):
                yield node.lineno, ast.unparse(node)


def test_no_other_file_has_a_private_name_of_torch() -> None:
    home = Path(inspect.getfile(torch_private))
    found = [
        f"{file}:{line}: {name}: give it a function in torch_private.py, and a test here"
        for file in home.parent.rglob("*.py")
        for line, name in private_names(ast.parse(file.read_text(encoding="utf-8")))
        if file != home
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "from torch._subclasses.fake_tensor import FakeTensorMode",
        "from torch.utils import _pytree as pytree",
        "import torch.distributed._symmetric_memory as symmetric_memory",
        "def f():\n    import torch.distributed._symmetric_memory",
        "import torch\nwith torch._C._DisableTorchDispatch(): ...",
        "from torch.autograd import profiler as p\nif p._is_profiler_enabled: ...",
        "import torch\ntorch.ops.aten._grouped_mm.default",
        "def f(t):\n    t._post_accumulate_grad_hooks.clear()",
        "def f(self):\n    self.master._backward_hooks",
    ],
)
def test_a_private_name_is_found_in_any_spelling(source: str) -> None:
    assert [*private_names(ast.parse(source))]


def test_names_of_the_package_itself_are_no_names_of_torch() -> None:
    source = "import torch\nfrom . import _mine\nself._values(torch.ones(2), _mine._x)"
    assert not [*private_names(ast.parse(source))]


def test_pairs_of_a_pipeline_schedule_are_performed_by_its_step() -> None:
    from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble

    schedule: Any = ScheduleDualPipeV.__new__(ScheduleDualPipeV)
    schedule.pp_group_size, schedule._n_microbatches = 1, 4
    schedule.pipeline_order = {0: schedule._calculate_single_rank_operations(0)}
    schedule._comp_type_to_function_map = {}
    schedule.register_custom_function(torch_private.overlap_action_type(schedule), print)
    assert list(schedule._comp_type_to_function_map.values()) == [print]
    for kind in (ScheduleZBVZeroBubble, object):
        other: Any = kind.__new__(kind)
        if kind is not object:
            other.pipeline_order = {0: [None]}
        assert torch_private.overlap_action_type(other) is None
    performed: list[int] = []

    def step() -> None:
        _perform_action = performed.append
        function()
        del _perform_action

    def function() -> None:
        torch_private.pipeline_perform()(3)

    step()
    assert performed == [3]


def test_who_made_a_tensor_is_known_behind_fsdp() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group

    leaf = torch.ones(2, requires_grad=True)
    made = leaf + 1
    first, second = group.RegisterPostBackwardFunction.apply(None, made, leaf)
    assert torch_private.producer(made).name() == torch_private.producer(first).name()
    assert torch_private.producer(first).name() == "AddBackward0"
    assert torch_private.producer(second) is None and torch_private.producer(leaf) is None


def test_leaves_behind_results_are_those_that_want_a_gradient():
    a, b, c = (torch.ones(2, requires_grad=wants) for wants in (True, True, False))
    found = torch_private.leaves_behind([(a + c) * a, b, c, b.exp()])
    assert {*map(id, found)} == {id(a), id(b)}


class Doubled(torch.autograd.Function):
    """y = 2x; says in which state its methods ran."""

    asked: list[bool] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Doubled.asked.append(torch_private.in_backward())
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        Doubled.asked.append(torch_private.in_backward())
        (x,) = ctx.saved_tensors
        return 2 * dy.view_as(x)


@pytest.fixture
def asked() -> list[bool]:
    Doubled.asked = []
    return Doubled.asked


def test_in_backward_is_true_in_a_backward_only(asked: list[bool]) -> None:
    x = torch.ones(2, requires_grad=True)
    y = Doubled.apply(x)
    assert asked == [False]
    y.sum().backward()
    assert asked == [False, True] and not torch_private.in_backward()
    assert torch_private.current_backward() == torch_private.NO_BACKWARD


@pytest.mark.parametrize("reentrant", [True, False])
def test_in_backward_is_true_in_a_recomputation(asked: list[bool], reentrant: bool) -> None:
    x = torch.ones(2, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(Doubled.apply, x, use_reentrant=reentrant)
    y.sum().backward()
    assert asked[0] is False and all(asked[1:]) and len(asked) >= 3


def test_in_backward_ends_with_an_error() -> None:
    x = torch.ones(2, requires_grad=True)
    y = 2 * x
    y.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    assert not torch_private.in_backward()


@pytest.mark.parametrize("stops", [False, True])
def test_the_end_of_a_backward_is_told_where_it_comes(stops: bool) -> None:
    told: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    y = 2 * x
    y.register_hook(lambda _: torch_private.on_backward_end(lambda: told.append(True)))
    x.register_hook(lambda g: 1 / 0 if stops else g)
    with pytest.raises(ZeroDivisionError) if stops else nullcontext():
        y.sum().backward()
    assert told == ([] if stops else [True])


def test_a_backward_tells_which_leaves_it_adds_to() -> None:
    class Asking(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):  # type: ignore[no-untyped-def]
            return x + w

        @staticmethod
        def backward(ctx, dy):  # type: ignore[no-untyped-def]
            told.append([torch_private.will_accumulate(node) for node, _ in ctx.next_functions])
            return dy, dy

    told: list[list[bool]] = []
    x, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    Asking.apply(x, w).sum().backward()
    torch.autograd.grad(Asking.apply(x, w).sum(), x)
    Asking.apply(x, w).sum().backward(inputs=[w])
    torch.autograd.grad(Asking.apply(x, w * 2).sum(), w)
    Asking.apply(x, w * 2).sum().backward(inputs=[w])
    assert told == [[True, True], [False, False], [False, True], [False, False], [False, True]]


def test_saved_tensor_hooks_can_be_seen_taken_off_and_put_back() -> None:
    packed: list[str] = []

    def pack(t: Tensor) -> Tensor:
        packed.append("packed")
        return t

    def unpack(t: Tensor) -> Tensor:
        return t

    def save() -> int:
        torch.ones(2, requires_grad=True).square()
        return len(packed)

    assert torch_private.top_saved_tensor_hooks() is None
    with saved_tensors_hooks(pack, unpack):
        assert torch_private.top_saved_tensor_hooks() == (pack, unpack)
        assert save() == 1
        torch_private.pop_saved_tensor_hooks()
        assert torch_private.top_saved_tensor_hooks() is None and save() == 1
        torch_private.push_saved_tensor_hooks(pack, unpack)
        assert save() == 2
    assert torch_private.top_saved_tensor_hooks() is None


@pytest.mark.parametrize("retain", [False, True])
def test_a_node_lets_go_of_what_it_saved_unless_the_graph_is_retained(retain: bool) -> None:
    expired: list[bool] = []

    class Releasing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            h = x + 1
            ctx.save_for_backward(h)
            return x * 2

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            (h,) = ctx.saved_tensors
            weak = torch_private.WeakStorage(h.untyped_storage())
            torch_private.release_saved(ctx)
            del h
            expired.append(weak.expired())
            return 2 * dy

    y = Releasing.apply(torch.ones(2, requires_grad=True)).sum()
    y.backward(retain_graph=retain)
    assert expired == [not retain]
    if retain:
        y.backward()
        assert expired == [False, True]
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_a_fake_is_registered_without_reading_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "getmodule", None)
    lib = torch.library.Library("fuseops_test_fake", "DEF")
    lib.define("twice(Tensor x) -> Tensor")
    torch_private.register_fake(lib, "twice", lambda x: x.new_empty(x.shape[0], 2), "here")
    made = torch.ops.fuseops_test_fake.twice(torch.empty(3, device="meta"))
    assert made.shape == (3, 2) and made.is_meta
    lib._destroy()


def test_a_backward_finds_which_saved_tensor_was_written() -> None:
    found = []

    class Asking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Tensor:
            ctx.save_for_backward(*tensors)
            return tensors[0].sum()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            try:
                _ = ctx.saved_tensors
            except RuntimeError as error:
                found.append(torch_private.written_of(error, ctx))
                raise

    leaf = torch.ones(2, 3, requires_grad=True)
    x = leaf * 1
    y = Asking.apply(torch.ones(2, 3), x, torch.ones(3))
    x.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        y.backward()
    y = Asking.apply(leaf * 1)
    assert torch.autograd.grad(y, leaf, retain_graph=True, allow_unused=True) == (None,)
    torch.autograd.grad(y, leaf, allow_unused=True)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()
    assert found == [[1], []]


def test_the_innermost_pair_of_hooks_is_the_top_one() -> None:
    def first(t: Any) -> Any:
        return t

    def second(t: Any) -> Any:
        return t

    with saved_tensors_hooks(first, first), saved_tensors_hooks(second, second):
        assert torch_private.top_saved_tensor_hooks() == (second, second)


def test_inside_transform_is_true_inside_a_level_or_a_transform_only() -> None:
    assert not torch_private.inside_transform()
    x = torch.ones(2)
    torch.func.vmap(lambda row: row if torch_private.inside_transform() else 1 / 0)(x)
    with torch.autograd.forward_ad.dual_level():
        assert torch_private.inside_transform()
        assert torch_private.has_tangent(torch.autograd.forward_ad.make_dual(x, x))
        assert not torch_private.has_tangent(x) and not torch_private.has_tangent(None)
    assert not torch_private.inside_transform()


def test_any_autocast_is_true_inside_one_only() -> None:
    assert not torch_private.any_autocast()
    with torch.autocast("cpu"):
        assert torch_private.any_autocast()
        with torch.autocast("cpu", enabled=False):
            assert not torch_private.any_autocast()
    assert not torch_private.any_autocast()


def test_has_autograd_is_true_of_an_op_with_a_derivative() -> None:
    lib = torch.library.Library("test_torch_private", "FRAGMENT")
    lib.define("with_none(Tensor x) -> Tensor")
    assert not torch_private.has_autograd("test_torch_private::with_none")
    torch.library.register_autograd("test_torch_private::with_none", lambda ctx, dy: dy, lib=lib)
    assert torch_private.has_autograd("test_torch_private::with_none")


def test_inside_functorch_is_true_inside_a_transform_only() -> None:
    seen: list[bool] = []

    def f(x: Tensor) -> Tensor:
        seen.append(torch_private.inside_functorch())
        return x.sum()

    for transform in (torch.func.grad(f), torch.vmap(f), torch.func.jacrev(f)):
        transform(torch.ones(2, 2))
    assert len(seen) == 3 and all(seen) and not torch_private.inside_functorch()


def test_what_vmap_batches_is_known() -> None:
    seen: list[bool] = []

    def f(x: Tensor) -> Tensor:
        seen.extend((torch_private.is_batched(x), torch_private.is_batched(torch.ones(2))))
        return x.sum()

    torch.vmap(f)(torch.ones(2, 2))
    torch.func.grad(f)(torch.ones(2))
    torch.vmap(torch.func.grad(torch.func.grad(lambda x: f(x).square())))(torch.ones(2))
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda d: seen.append(torch_private.is_batched(d)))
    torch.autograd.grad(x * 1, x, torch.ones(2, 2), is_grads_batched=True)
    assert seen == [True, False, False, False, True, False, True]


def test_running_modules_are_those_whose_forwards_run() -> None:
    seen: list[list[torch.nn.Module]] = []

    class Looks(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch_private.running_modules())
            return x

    looks = Looks()
    model = torch.nn.Sequential(looks, torch.nn.Identity())
    model.register_forward_pre_hook(lambda *given: seen.append(torch_private.running_modules()))
    model(torch.ones(2))
    assert seen == [[model], [looks, model]] and torch_private.running_modules() == []


def test_assume_constant_result_is_torchs() -> None:
    def ours() -> None: ...

    def torchs() -> None: ...

    marked = torch_private.assume_constant_result(ours)
    torch.compiler.assume_constant_result(torchs)
    assert marked is ours and vars(ours) == vars(torchs) != {}


def test_a_replaced_overload_is_what_python_and_compiled_code_call() -> None:
    library = torch.library.Library("fuseops_replaced", "FRAGMENT")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CPU")
    op, seen = torch.ops.fuseops_replaced.double.default, []

    def call(x: Tensor) -> Tensor:
        seen.append(x)
        found: Tensor = ask(x)
        return found

    ask = torch_private.replace_overload(op, call)
    x = torch.ones(2)
    assert op(x).tolist() == ask(x).tolist() == [2, 2] and len(seen) == 1
    torch.library.register_fake("fuseops_replaced::double", torch.empty_like, lib=library)
    run = torch.compile(lambda x: op(x) + 1, backend="aot_eager", fullgraph=True)
    assert run(x).tolist() == [3, 3]
    del seen[:]
    assert run(x).tolist() == [3, 3] and seen


def test_direct_apply_is_apply(asked: list[bool]) -> None:
    x = torch.ones(2, requires_grad=True)
    apply = torch_private.direct_apply(Doubled)
    (dx,) = torch.autograd.grad(apply(x).sum(), x)
    assert dx.tolist() == [2, 2] and asked == [False, True]
    with torch.no_grad():
        assert not apply(x).requires_grad


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_storage_id_is_that_of_the_storage(device: str) -> None:
    base, other = torch.ones(4, device=device), torch.ones(4, device=device)
    for view in (base[1:], base.view(2, 2), base.detach()):
        assert torch_private.storage_id(view) == torch_private.storage_id(base)
    assert torch_private.storage_id(other) != torch_private.storage_id(base)


def test_modes_are_counted() -> None:
    before = torch_private.num_dispatch_modes(), torch_private.num_function_modes()
    with DispatchMode(), FunctionMode():
        assert torch_private.num_dispatch_modes() == before[0] + 1
        assert torch_private.num_function_modes() == before[1] + 1


def test_inside_fake_mode() -> None:
    assert not torch_private.inside_fake_mode()
    with FakeTensorMode():
        assert torch_private.inside_fake_mode()


def test_is_fake() -> None:
    real = torch.ones(2)
    assert torch_private.is_fake(FakeTensorMode().from_tensor(real))
    assert not torch_private.is_fake(real) and not torch_private.is_fake(real.to("meta"))


def test_the_hooks_of_checkpoint_are_known() -> None:
    seen: list[tuple[Any, Any] | None] = []

    def f(x: Tensor) -> Tensor:
        seen.append(torch_private.top_saved_tensor_hooks())
        return x.sin().exp()

    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False).sum().backward()
    assert len(seen) == 2  # the forward and the recomputation
    assert all(torch_private.is_checkpoint_hook(pair and pair[0]) for pair in seen)
    assert not torch_private.is_checkpoint_hook(f)


@pytest.mark.parametrize("outer", [None, True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_is_told_from_a_forward_by_any_hook_below(
    reentrant: bool, outer: bool | None
) -> None:
    """One forward of all counts: that which has a graph and is no recomputation."""
    counting: list[bool] = []

    def f(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            before = torch_private.top_saved_tensor_hooks()
            counting.append(torch.is_grad_enabled() and not torch_private.in_recomputation())
            assert torch_private.top_saved_tensor_hooks() == before
            return x.sin().exp()

    def inside(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(f, x, use_reentrant=reentrant)

    x = torch.ones(2, requires_grad=True)
    if outer is None:
        y = inside(x)
    else:
        y = torch.utils.checkpoint.checkpoint(inside, x, use_reentrant=outer)
    y.sum().backward()
    assert sum(counting) == 1


def test_a_storage_keeps_its_python_object_for_as_long_as_it_lives() -> None:
    """So that `weakref.ref` of it is one to the storage: records of what was moved know theirs by it."""
    t = torch.arange(4.0, requires_grad=True)
    y = t.exp()
    weak, node = weakref.ref(y.untyped_storage()), y.grad_fn
    del y  # from here on autograd alone holds it
    assert weak() is not None and weak() is node._saved_result.untyped_storage()
    del node
    assert weak() is None


def test_a_weak_storage_keeps_no_memory_and_gives_the_storage_back() -> None:
    t = torch.arange(4.0)
    weak = torch_private.WeakStorage(t.untyped_storage())
    found = weak.storage()
    assert not weak.expired() and found is not None and found.data_ptr() == t.data_ptr()
    assert torch_private.storage_key(found) == torch_private.storage_key(t[1:].untyped_storage())
    for copied in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="is not copied"):
            copied(weak)
    del t, found
    assert weak.expired() and weak.storage() is None


@pytest.mark.filterwarnings("ignore")  # of a hook behind the forward that raises
def test_hooks_on_a_forward_are_removed_while_it_runs_and_others_stay() -> None:
    ran: list[str] = []
    module = torch.nn.Tanh()

    def mine(*given: Any) -> None:
        ran.append("mine")
        torch_private.remove_forward_hooks(module, lambda hook: hook in (mine, never))

    def never(*given: Any) -> None:
        raise AssertionError

    def other(*given: Any, **more: Any) -> None:
        ran.append("other")

    module.register_forward_pre_hook(mine, prepend=True, with_kwargs=True)
    module.register_forward_hook(never, always_call=True, with_kwargs=True)
    module.register_forward_pre_hook(other)
    module.register_forward_hook(other, always_call=True)
    module(torch.ones(2)), module(torch.ones(2))
    assert ran == ["mine", "other", "other", "other", "other"]
    assert not module._forward_pre_hooks_with_kwargs and not module._forward_hooks_with_kwargs
    assert len(module._forward_hooks_always_called) == 1


def test_never_compile_leaves_a_function_and_what_it_calls_to_python() -> None:
    compiling: list[bool] = []

    def inner() -> None:
        compiling.append(torch.compiler.is_compiling())

    def hook(t: Tensor) -> Tensor:
        inner()
        return t.detach()

    torch_private.never_compile(hook)
    torch._dynamo.reset()
    run = torch.compile(lambda x: x.sin(), backend="eager", fullgraph=True)
    with saved_tensors_hooks(hook, hook):
        run(torch.ones(2, requires_grad=True))
    assert compiling == [False]


def test_disabled_is_a_function_that_compiled_code_calls() -> None:
    compiling: list[bool] = []

    def doubled(x: Tensor) -> Tensor:
        compiling.append(torch.compiler.is_compiling())
        return 2 * x

    outside = torch_private.dynamo_disabled(doubled)
    torch._dynamo.reset()
    run = torch.compile(lambda x: outside(x.sin()).cos(), backend="eager")
    x = torch.randn(3)
    assert torch.equal(run(x), (2 * x.sin()).cos())
    assert compiling == [False]


class Tanhs(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh().tanh()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it
@pytest.mark.parametrize("compiled", [False, True])
def test_a_compiled_region_is_known_while_it_saves(compiled: bool) -> None:
    torch._dynamo.reset()
    module = Tanhs()
    if compiled:
        module.compile(backend="aot_eager")
    model = torch.nn.Sequential(torch.nn.Sigmoid(), module)
    ledger = SavedLedger(lambda promised: Where(None, "", None), Labels(paths_under(model)))
    torch_private.never_compile(SavedLedger._pack)
    with ledger.hooks():
        y = model(torch.ones(2, requires_grad=True))
    names = [name for handle in ledger.live_handles() for name in handle.names]
    assert y.requires_grad and torch_private.compiled_region(sys._getframe()) is None
    assert not names[0].startswith("1.")
    assert len(names) > 1 and all(name.startswith("1.compiled") == compiled for name in names[1:])


def test_levels_of_torch_func_are_known() -> None:
    seen: list[bool] = []

    def f(x: Tensor) -> Tensor:
        seen.append(torch_private.is_functorch_wrapped(x))
        return x

    torch.vmap(f)(f(torch.ones(2)))
    assert seen == [False, True]


def test_version_counts_writes_in_place() -> None:
    t = torch.ones(4)
    t[1:].zero_()
    assert torch_private.version(t) == torch_private.version(t.detach()) == 1
    with torch.inference_mode():
        assert torch_private.version(torch.ones(4)) == 0


def test_an_alias_of_no_bytes_sees_writes_and_holds_nothing() -> None:
    t = torch.ones(4)
    alias, storage = (
        torch_private.empty_alias(t),
        torch_private.WeakStorage(t.untyped_storage()),
    )
    t[1:].zero_()
    assert alias._version == 1 and alias.numel() == 0
    del t
    assert storage.expired()


def test_assert_async_names_what_was_wrong() -> None:
    torch_private.assert_async(torch.tensor(True), "fine")
    with pytest.raises(RuntimeError, match="not fine"):
        torch_private.assert_async(torch.tensor(False), "not fine")


def test_base_of_a_view_is_what_it_views() -> None:
    t = torch.ones(4, requires_grad=True) * 1
    assert torch_private.base_of(t) is t and torch_private.base_of(t[1:].view(1, 3)) is t


def test_shared_version_counters_are_told_from_others_and_left_as_they_were() -> None:
    t = torch.ones(4)
    t.add_(1)
    assert torch_private.share_version_counter(t, t.detach())
    assert torch_private.share_version_counter(t[1:], t)
    assert not torch_private.share_version_counter(t, t.data)
    assert t._version == 1


def test_negated_view_flips_the_bit_over_the_same_bytes() -> None:
    t = torch.ones(2)
    n = torch_private.negated_view(t)
    assert n.is_neg() and n.data_ptr() == t.data_ptr() and n.tolist() == [-1, -1]


def test_a_view_knows_whether_it_alone_holds_what_it_is_a_view_of() -> None:
    whole = torch.ones(4)
    view = whole.view(2, 2)
    assert not torch_private.is_only_view(view)
    held = [whole]
    del whole
    assert not torch_private.is_only_view(view)
    held.clear()
    assert torch_private.is_only_view(view) and torch_private.is_only_view(view)
    other = view[1:]
    assert not torch_private.is_only_view(view) and not torch_private.is_only_view(other)
    with torch.no_grad():  # made below Python
        view = torch.nn.functional.linear(torch.ones(2, 3, 4), torch.ones(5, 4), torch.ones(5))
    alone = view._base is None or torch_private.is_only_view(view)
    assert alone


def test_a_dtensor_is_known_by_the_name_of_its_class() -> None:
    from torch.distributed.tensor import DTensor

    assert torch_private.is_dtensor(DTensor) and not torch_private.is_dtensor(Tensor)


def test_references_to_a_storage_are_counted() -> None:
    t = torch.arange(4.0)
    weak = torch_private.WeakStorage(t.untyped_storage())
    assert weak.holders() == 1
    alias = t.detach()
    assert weak.holders() == 2
    storage = t.untyped_storage()
    assert weak.holders() == 2
    del t, storage
    assert weak.holders() == 1
    del alias
    assert weak.expired() and weak.holders() == 0


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "a name": lambda t: t,
    "a view": lambda t: t[1:],
    "an alias": lambda t: t.detach(),
    "a handle on its storage": torch.Tensor.untyped_storage,
    "a graph": lambda t: torch.ones(4, requires_grad=True) * t,
}


@pytest.mark.parametrize("how", HOLDERS)
def test_whoever_else_holds_a_tensor_is_seen(how: str) -> None:
    held = [torch.ones(4)]
    for _ in range(2):
        assert torch_private.held_once(held)
        assert torch_private.use_counts(held) == torch_private.use_counts([torch.ones(4)])
        other = HOLDERS[how](held[0])
        assert other is not None and not torch_private.held_once(held)
        del other


@pytest.mark.gpu
def test_the_current_device_is_the_one_of_the_context() -> None:
    torch.zeros(1, device="cuda")
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(index):
            assert torch_private.current_device() == torch.cuda.current_device() == index


@pytest.mark.gpu
def test_the_current_stream_is_told_from_others() -> None:
    for index in range(torch.cuda.device_count()):
        before, other = torch_private.current_stream(index), torch.cuda.Stream(index)
        with torch.cuda.stream(other):
            inside = torch_private.current_stream(index)
            assert inside != before and inside == torch_private.current_stream(index)
        assert torch_private.current_stream(index) == before


@pytest.mark.gpu
def test_an_event_is_recorded_and_waited_for() -> None:
    event, other = torch.cuda.Event(), torch.cuda.Stream()
    for value in (1, 2):  # recorded anew
        x = torch.zeros(1 << 20, device="cuda")
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            torch_private.occupy_device(4_000_000)
            x += value
        torch_private.record_event(event, other)
        torch_private.wait_event(event, torch.cuda.current_stream())
        assert x.eq(value).all()


@pytest.mark.gpu
def test_a_capture_is_seen_on_the_stream_that_is_captured() -> None:
    seen = [torch_private.is_capturing()]
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")
        seen.append(torch_private.is_capturing())
    with torch.cuda.stream(torch.cuda.Stream()):
        seen.append(torch_private.is_capturing())
    assert seen == [False, True, False]


@pytest.mark.gpu
def test_the_device_can_be_kept_busy() -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch_private.occupy_device(1_000_000)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) > 0.3  # ms, at up to 3 GHz


def test_hooks_on_all_modules_are_those_that_torch_asks() -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *about: None)
    assert [*map(len, torch_private.global_hooks())] == [0, 1, 0, 0]
    handle.remove()
    assert not any(torch_private.global_hooks())


def test_an_unsafe_view_is_no_view_to_autograd() -> None:
    x = torch.ones(6, requires_grad=True)
    y = torch_private.unsafe_view(2 * x, (2, 3))
    assert y.shape == (2, 3) and not y._is_view()
    y.mul_(3).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((6,), 6.0))


def test_a_call_is_replaced_and_put_back_and_no_copy_has_it() -> None:
    module, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    before = module(x)
    assert torch_private.replaced_call(module) is None
    assert torch_private.replace_call(module, lambda x: 2 * module._call_impl(x)) is None
    torch.testing.assert_close(module(x), 2 * before)
    assert torch_private.replaced_call(copy.deepcopy(module)) is None
    replacement = torch_private.replaced_call(module)
    assert torch_private.replace_call(module, None) is replacement
    assert "_compiled_call_impl" not in vars(module)
    torch.testing.assert_close(module(x), before)


def test_compiled_modules_are_known_in_place_and_wrapped() -> None:
    module, inner = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    assert not torch_private.is_compiled(module)
    assert torch_private.is_compiled(torch.compile(module, backend="eager"))
    torch_private.replace_call(inner, inner.forward)
    module.compile(backend="eager")
    assert torch_private.is_compiled(module) and not torch_private.is_compiled(inner)


def test_tensor_guard_tells_kinds_apart_and_holds_nothing(asked: list[bool]) -> None:
    x, w = torch.randn(3, 4), torch.nn.Parameter(torch.randn(4))
    fits = torch_private.tensor_guard([x, w])
    assert fits(x, w) and fits(torch.zeros(3, 4), w) and not fits(x, None)
    others = [x.double(), x.t(), x[:2], torch.randn(4, 3).t(), torch.randn(3, 4, device="meta")]
    assert not any(fits(other, w) for other in others)
    assert not fits(x, w.detach()) and not fits(x.clone().requires_grad_(), w)
    with torch.autocast("cpu", torch.bfloat16):
        assert not fits(x, w)
    with FakeTensorMode() as mode:
        assert not fits(mode.from_tensor(x), mode.from_tensor(w))
    seen: list[bool] = []
    torch.vmap(lambda row: (seen.append(fits(x, w)), row)[1])(x)
    torch.func.grad(lambda t: (seen.append(fits(x, w)), t.sum())[1])(x)
    assert seen == [False, False]
    lone = torch.ones(2)
    fits, alive = torch_private.tensor_guard([lone]), weakref.ref(lone)
    del lone
    assert alive() is None and fits(torch.zeros(2))


def test_every_write_to_a_dict_shows_in_its_version() -> None:
    """Those of a module, of which no two have had the same version."""
    module = torch.nn.Linear(2, 2)
    own, version = module.__dict__, torch_private.dict_version
    before = version(own), version(module._parameters), version(module._forward_hooks)
    assert before == (version(own), version(module._parameters), version(module._forward_hooks))
    seen = {*before}
    for write, home in [
        (lambda: module.eval(), own),
        (lambda: setattr(module, "size", 3), own),
        (lambda: delattr(module, "size"), own),
        (lambda: setattr(module, "forward", print), own),
        (
            lambda: setattr(module, "weight", torch.nn.Parameter(torch.ones(2, 2))),
            module._parameters,
        ),
        (lambda: module._parameters.update(bias=None), module._parameters),
        (lambda: module.register_forward_hook(print), module._forward_hooks),
    ]:
        write()
        assert version(home) not in seen
        seen.add(version(home))
    assert version({}) not in seen and version(dict(own)) not in seen


def test_empty_strided_is_torchs() -> None:
    found = torch_private.empty_strided(torch.device("cpu"))((2, 3), (1, 2), torch.bfloat16)
    assert found.shape == (2, 3) and found.stride() == (1, 2) and found.dtype is torch.bfloat16
    assert torch_private.empty_strided(torch.device("meta"))((2,), (1,), torch.int32).is_meta


def test_a_direct_call_is_a_call() -> None:
    class Doubled(torch.nn.Linear):
        def __call__(self, x: Tensor) -> Tensor:
            return 2 * super().__call__(x)

    x, seen = torch.ones(1, 2), []
    for kind in (torch.nn.Linear, Doubled):
        module = kind(2, 2)
        module.register_forward_hook(lambda *_: seen.append(1))
        torch.testing.assert_close(torch_private.direct_call(module)(x), module(x))
        torch_private.replace_call(module, lambda x: 3 * x)
        torch.testing.assert_close(torch_private.direct_call(module)(x), module(x))
    assert len(seen) == 4


def test_a_nested_tensor_is_known_by_the_name_of_its_class() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert torch_private.is_nested(type(jagged)) and not torch_private.is_nested(Tensor)


def test_the_parts_of_a_wrapper_are_tensors() -> None:
    class Wrapper(Tensor):
        """One that names more than tensors, as a DTensor does its mesh."""

        def __tensor_flatten__(self) -> Any:
            return ["data_", "inner", "mesh"], None

    def wrapped(inner: Tensor) -> Tensor:
        made = Tensor._make_subclass(Wrapper, torch.ones(2))
        made.data_, made.inner, made.mesh = torch.ones(1), inner, "a mesh"
        return made

    inner = torch.ones(3)
    outer = wrapped(wrapped(inner))
    first, second, third = torch_private.plain_parts(outer)
    assert first is outer.data_ and second is outer.inner.data_ and third is inner
    assert torch_private.plain_parts(inner)[0] is inner


def test_no_mode_sees_an_op_without_modes() -> None:
    with FakeTensorMode():
        assert torch_private.is_fake(torch.ones(1))
        with torch_private.without_modes():
            assert not torch_private.is_fake(torch.ones(1))


def test_fake_tensors_are_quiet_about_what_they_cannot_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run() -> None:
        with FakeTensorMode(), pytest.raises(RuntimeError):
            torch.ops.aten._grouped_mm(torch.ones(4, 4).int(), torch.ones(2, 4, 4).int())

    with caplog.at_level("ERROR"), torch_private.quiet_fake_tensors():
        run()
    assert not caplog.records


def test_the_ddp_whose_forward_runs_is_known() -> None:
    seen, reduced = [], []

    class Asks(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch_private.active_ddp())
            reduced.append([torch_private.reduced_by_ddp(p) for p in self.parameters()])
            return super().forward(x)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        asks = Asks(2, 2)
        torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            asks, ["bias"]
        )
        wrapped = torch.nn.parallel.DistributedDataParallel(asks)
        wrapped(torch.ones(1, 2))
        asks(torch.ones(1, 2))
        assert seen == [wrapped, None] and torch_private.active_ddp() is None
        assert reduced == [[True, False], [False, False]]  # weight, bias
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
def test_symmetric_memory_multiplies_what_it_gathers_and_scatters() -> None:
    """Over one rank, as the laws of two ranks need them."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x, w = torch.randn(2, 64, 64, device="cuda", dtype=torch.bfloat16).unbind()
        rows, y = torch_private.all_gather_matmul(x, w, dist.group.WORLD)
        assert torch.equal(rows, x) and torch.equal(y, x @ w)
        assert torch.equal(torch_private.matmul_reduce_scatter(x, w, dist.group.WORLD), x @ w)
    finally:
        dist.destroy_process_group()


def test_the_store_of_the_default_group_takes_the_first_of_two_words() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        store = torch_private.default_store()
        assert not store.check(["word"])
        assert store.compare_set("word", "", "first") == b"first"
        assert store.compare_set("word", "", "second") == store.get("word") == b"first"
        store.compare_set("word", "first", "")
        assert store.compare_set("word", "", "second") == b"second"
    finally:
        dist.destroy_process_group()


def test_collectives_over_one_rank_give_a_plain_tensor_of_the_same_values() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x, group = torch.randn(2, 3), dist.group.WORLD
        for y in (
            torch_private.all_gather(x, 1, group),
            torch_private.reduce_scatter(x, 1, group),
            torch_private.all_reduce(x, group),
            torch_private.all_reduce(x, group.group_name, "max"),
            torch_private.wait_tensor(torch_private.all_gather_async(x, 0, group)),
            torch_private.wait_tensor(torch_private.all_reduce_async(x, group)),
        ):
            assert type(y) is Tensor and torch.equal(y, x) and y.data_ptr() != x.data_ptr()
    finally:
        dist.destroy_process_group()


def test_a_parameter_may_have_a_mesh_of_its_own_under_fsdp() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        made, info = torch_private.fsdp_shard_placement(init_device_mesh("cpu", (2,)))
        assert made is None or made(Shard(0), info).mesh_info.shard_mesh_size == 2
    finally:
        dist.destroy_process_group()


def test_what_fsdp_accumulates_is_found_where_it_keeps_it() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        model: Any = torch.nn.Linear(4, 2)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        model.unshard()
        found = torch_private.fsdp_accumulation(model)
        assert all(getattr(owner, name) is value for owner, name, value in found)
        names = [name for _, name, _ in found]
        assert names.count("unsharded_accumulated_grad") == names.count("grad") == 2
        model.set_requires_gradient_sync(False)
        changed = [name for owner, name, value in found if getattr(owner, name) is not value]
        assert changed == ["reduce_grads", "all_reduce_grads"]
    finally:
        dist.destroy_process_group()


def test_watch_fsdp_tells_of_gathered_and_freed_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    class Param:  # what is read of the real one, by the names that it has there
        to_unsharded = free_unsharded_param = lambda self: told.append("original")
        _unsharded_param, sharded_param = torch.zeros(1), torch.zeros(2)
        _sharded_local_tensor = torch.zeros(2)

    real = _fsdp_param.FSDPParam
    source = inspect.getsource(real)
    assert callable(real.to_unsharded) and callable(real.free_unsharded_param)
    for name in ("_unsharded_param", "sharded_param", "_sharded_local_tensor"):
        assert f"self.{name}" in source or isinstance(getattr(real, name), property)
    told: list[Any] = []
    monkeypatch.setattr(_fsdp_param, "FSDPParam", Param)
    monkeypatch.setattr(torch_private, "_watched_fsdp", [])
    for _ in range(2):  # once
        torch_private.watch_fsdp(lambda p, shard: told.append(shard), told.append)
    param = Param()
    param.to_unsharded()
    Param.sharded_param.mul_(2)
    param.to_unsharded()
    param.free_unsharded_param()
    first, second = told[1], told[3]
    assert first != second and told[0] == told[2] == told[5] == "original"
    assert told[4] is Param._unsharded_param


def test_a_mode_that_traces_is_said_to_compile() -> None:
    with torch_private.compiling():
        assert not torch.compiler.is_compiling()
    with DispatchMode(), torch_private.compiling():
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()


def test_a_function_is_traced_and_compiled_once_for_all_rows() -> None:
    mode, rows = torch_private.symbolic_sizes([1009])
    with mode:
        x = torch.empty((*rows, 4))
    graph = torch_private.trace_graph(lambda x: (x.sin() * 2,), [x])
    assert [n.target for n in graph.graph.nodes if n.op == "call_function"] == [
        torch.ops.aten.sin.default,
        torch.ops.aten.mul.Tensor,
    ]
    assert torch_private.symbol_constraints(mode) == []
    assert torch_private.inductor_unsupported_reason(torch.device("meta")) is not None
    if torch_private.inductor_unsupported_reason(torch.device("cpu")) is None:
        made = torch_private.inductor_compile(graph, [x])
        for n in (3, 0, 1, 40):
            t = torch.randn(n, 4)
            torch.testing.assert_close(made(t)[0], t.sin() * 2)
    torch_private.trace_graph(lambda x: (x * 2 if x.shape[0] > 5 else x,), [x])
    assert torch_private.symbol_constraints(mode) != []


def test_the_hooks_of_an_accumulated_gradient_are_found() -> None:
    leaf = torch.nn.Parameter(torch.ones(2))
    assert not torch_private.post_accumulate_hooks(leaf)
    handle = leaf.register_post_accumulate_grad_hook(print)
    assert [*torch_private.post_accumulate_hooks(leaf).values()] == [print]
    torch_private.post_accumulate_hooks(leaf).clear()  # as a dry run does
    assert not leaf._post_accumulate_grad_hooks
    handle.remove()


def test_the_hooks_of_a_gradient_are_found_in_their_order() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert torch_private.gradient_hooks(leaf) == []
    first, second = (lambda g: g + 1), (lambda g: 2 * g)
    leaf.register_hook(first)
    leaf.register_hook(second)
    assert torch_private.gradient_hooks(leaf) == [first, second]


def test_a_profiler_is_known_while_it_runs() -> None:
    assert not torch_private.is_profiling()
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], acc_events=True):  # torch 2.11 warns without
        assert torch_private.is_profiling()
    assert not torch_private.is_profiling()


def test_the_level_of_forward_mode_ad_is_known_inside_of_it() -> None:
    assert torch_private.forward_level() == -1
    with torch.autograd.forward_ad.dual_level():
        assert torch_private.forward_level() == 0
    assert torch_private.forward_level() == -1


def test_symmetric_memory_has_what_is_asked_of_it() -> None:
    memory = torch_private.symmetric_memory()
    for name in ("empty", "rendezvous", "get_backend", "set_backend", "enable_symm_mem_for_group"):
        assert callable(getattr(memory, name))
    assert memory.is_nvshmem_available() in (True, False)


class Tagged(Tensor):
    """A subclass that notes the ops that it sees."""

    seen: list[Any] = []

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        with torch_private.without_subclasses():
            return func(*args, **(kwargs or {}))


class Ordinary(Tensor): ...


class Plain(Tensor):
    __torch_function__ = torch_private.no_torch_function


class Counted(Tensor):
    """A subclass that counts the functions that it sees."""

    count = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch_private.without_torch_function():
            cls.count += 1
            return func(*args, **(kwargs or {}))


def test_a_tensor_of_a_subclass_is_over_the_same_memory_and_is_not_seen_inside() -> None:
    t = torch.ones(2)
    for kind, result in ((Ordinary, Ordinary), (Plain, Tensor)):
        made = torch_private.as_subclass(kind, t, True)
        assert type(made) is kind and made.requires_grad and made.is_leaf
        assert made.data_ptr() == t.data_ptr() and type(made * 2) is result
    Tagged.seen.clear()
    assert torch.equal(torch_private.as_subclass(Tagged, t).add(1), t + 1)
    assert Tagged.seen[0] is torch.ops.aten.add.Tensor and len(Tagged.seen) < 4
    counted = torch_private.as_subclass(Counted, t)
    y = counted * 2
    assert Counted.count == 1 and type(y) is Tensor and not y.requires_grad


def test_zeros_without_memory_are_told_from_others() -> None:
    assert torch_private.is_zerotensor(torch._efficientzerotensor((2,)))
    assert not torch_private.is_zerotensor(torch.zeros(2))


def test_products_are_those_that_torch_calls() -> None:
    seen = []

    class Sees(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    offs = torch.tensor([1, 4], dtype=torch.int32)
    a, b = (torch.ones(*n, dtype=torch.bfloat16) for n in ((4, 16), (2, 16, 16)))
    with Sees():
        torch.nn.functional.grouped_mm(a, b, offs=offs)
    assert torch_private.grouped_mm in seen
    a, one = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(())
    y = torch_private.scaled_mm(a, a.t(), one, one, out_dtype=torch.bfloat16)
    assert torch.equal(y, torch.full_like(y, 16))


def test_trees_are_mapped_and_fakes_have_shapes_alone() -> None:
    given = {"a": (torch.ones(2), 3)}
    leaves, spec = torch_private.pytree.tree_flatten(given)
    assert torch_private.pytree.tree_unflatten(leaves, spec).keys() == given.keys()
    mapped = torch_private.pytree.tree_map_only(Tensor, len, given)
    assert mapped == {"a": (2, 3)} and leaves == torch_private.pytree.tree_leaves(given)
    with torch_private.FakeTensorMode(allow_non_fake_inputs=True):
        assert torch_private.is_fake(torch.ones(2) + torch.ones(2))
