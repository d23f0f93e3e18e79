"""What one registration gives: schema, fake, compile, bypass, names in the profiler, imports
without Triton.
"""

import itertools
import subprocess
import sys
import threading
from typing import Any, NamedTuple

import pytest
import torch
from samples import samples
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fuseops.errors import FuseOpsError
from fuseops.kernels import scales
from fuseops.kernels.records import flattened, of_fields
from fuseops.kernels.registry import (
    KERNEL_OPS,
    as_if_on,
    kernel_op,
    reference_only,
    register_flops,
    tensor_bytes,
    watch_launches,
)

SAMPLES = samples()


TRITON = sorted(name for name, op in KERNEL_OPS.items() if op.min_arch)


def test_every_op_has_a_sample():
    assert set(SAMPLES) == set(KERNEL_OPS)


def test_fake_cpu_tensors_are_taken_for_those_of_a_gpu():
    """For dry runs: the registered op where an architecture has the kernel, the twin elsewhere."""
    op = KERNEL_OPS["bias_fwd"]
    x, bias = torch.ones(2, 3), torch.ones(3)
    with FakeTensorMode() as mode:
        fake = (mode.from_tensor(x), mode.from_tensor(bias))

        def names(arch):
            with Seen() as seen, as_if_on(arch):
                assert op(*fake).shape == (2, 3)
            return [name for name in seen.names if name.startswith("fuseops")]

        assert names(90) == ["fuseops.bias_fwd.default"]
        assert names(op.min_arch - 1) == []
    with as_if_on(90):
        assert torch.equal(op(x, bias), x + 1)  # real tensors are where they are


class CountingFakes(FakeTensorMode):
    count = 0

    def dispatch(self, *args):
        self.count += 1
        return super().dispatch(*args)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", TRITON)
def test_why_a_kernel_runs_as_plain_torch(name):
    """A dtype, an old GPU; nothing where it launches, where plain torch is asked for, and on a CPU."""
    op, args = KERNEL_OPS[name], SAMPLES[name]
    wide = tree_map_only(torch.Tensor, torch.Tensor.double, args)
    assert op.launches(args, {}) and op.obstacle(args, {}) is None
    assert not op.launches(wide, {}) and op.obstacle(wide, {}) == "float64"
    with reference_only():
        assert op.obstacle(args, {}) == op.obstacle(wide, {}) == ""
    fake = tree_map_only(torch.Tensor, FakeTensorMode().from_tensor, args)
    with as_if_on(op.min_arch - 1):
        assert op.obstacle(fake, {}) == f"sm_{op.min_arch - 1} is below sm_{op.min_arch}"
    with as_if_on(op.min_arch):
        assert op.obstacle(fake, {}) is None


@pytest.mark.parametrize("interpret", [True, False])
def test_the_log_has_each_kernel_that_runs_as_plain_torch_once(interpret, monkeypatch, caplog):
    monkeypatch.setattr("fuseops.kernels.registry.INTERPRET", interpret)
    monkeypatch.setattr("fuseops.kernels.registry._told", set())
    caplog.set_level("INFO", "fuseops.kernels")
    x, op = torch.ones(2, 3, dtype=torch.float64), KERNEL_OPS["bias_fwd"]
    for give in (op, op, op.op):  # the last through the dispatcher
        give(x, x[0])
    with reference_only():
        KERNEL_OPS["bias_bwd"](x)
    said = ["fuseops::bias_fwd runs as plain torch: float64"]
    assert [record.getMessage() for record in caplog.records] == said * interpret


def test_a_fake_cuts_nothing_into_pieces(monkeypatch):
    """Those of large tensors took most of the time of a plan, for temporaries that are not there."""

    def counts():
        for op in KERNEL_OPS.values():
            for args in itertools.islice(op.cases(), 1):
                with CountingFakes() as mode:
                    mode.cache_enabled = False  # what it knows takes fewer
                    op.op(*tree_map_only(torch.Tensor, mode.from_tensor, args))
                yield op.name, mode.count

    cut = dict(counts())
    monkeypatch.setattr(scales, "LEAST_PIECE", 1 << 62)
    assert cut == dict(counts()) and "quantize_vectors" in cut


def test_flops_of_grouped_gemms_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    register_flops()
    x, weight, offs = SAMPLES["grouped_mm"]
    dy = x @ weight[0].t()
    with FlopCounterMode(display=False) as counter:
        torch.ops.fuseops.grouped_mm(x, weight, offs)
        torch.ops.fuseops.grouped_wgrad(dy, x, offs)
    one = 2 * x.shape[0] * x.shape[1] * weight.shape[1]
    assert counter.get_total_flops() == 2 * one


@pytest.mark.parametrize("name", sorted(name for name, op in KERNEL_OPS.items() if op.flops))
def test_flops_are_those_of_the_twin(name):
    """Within a factor of two: formulas look at no values, so that padding counts, and a twin makes logits again."""
    from torch.utils.flop_counter import FlopCounterMode

    op, args = KERNEL_OPS[name], samples()[name]
    with FlopCounterMode(display=False) as counter:
        op.twin(*args)
    assert op.flop_count(*args) / 2 <= counter.get_total_flops() < 2 * op.flop_count(*args)


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_opcheck(name):
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    fp8 = any(isinstance(t, torch.Tensor) and t.dtype == torch.float8_e4m3fn for t in SAMPLES[name])
    if not fp8:  # torch compares operands before and after, which it cannot do in FP8
        tests = ("test_schema", *tests)
    torch.library.opcheck(KERNEL_OPS[name].op, SAMPLES[name], test_utils=tests)


def _strided(t):
    """The same values, rows next to each other in place of columns; those of a vector apart."""
    if t.dim() > 1:
        return t.mT.contiguous().mT
    wide = t.new_full((len(t), 2), 1)
    wide[:, 0] = t
    return wide[:, 0]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_strides_of_no_argument_change_the_result(name):
    op, args = KERNEL_OPS[name], SAMPLES[name]
    into = name.endswith("_into")  # the first argument, which has to be contiguous

    def run(args):
        first, *rest = args
        first = first.clone() if into else first
        result = op(first, *rest)
        return tree_leaves(first if into else result)

    want = run(args)
    for i, t in enumerate(args):
        if not isinstance(t, torch.Tensor) or not t.dim() or (into and not i):
            continue
        for got, expected in zip(run([*args[:i], _strided(t), *args[i + 1 :]]), want, strict=True):
            torch.testing.assert_close(
                got.float(), expected.float(), rtol=1e-5, atol=1e-5, msg=f"argument {i} is strided"
            )


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_compiles_whole_and_equals_eager(name):
    torch.compiler.reset()
    op = KERNEL_OPS[name]
    compiled = torch.compile(lambda *args: op(*args), fullgraph=True, backend="aot_eager")
    eager = op.twin if op.fuses else op  # what the compiler fuses is the twin
    # each its own: some write over what they read
    results = (f(*samples()[name]) for f in (compiled, eager))
    for got, want in zip(*map(tree_leaves, results), strict=True):
        if got is want is None:  # an op that writes in place
            continue
        assert torch.equal(got.float(), want.float())


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_fakes_fix_no_number_of_rows(name):
    """As `len(x)` in one of them does: then a compiled model is compiled again for every batch."""
    shapes, rows = ShapeEnv(), 6

    def fake(t, number):
        sizes = [DimDynamic.DYNAMIC if size == rows else DimDynamic.STATIC for size in t.shape[:1]]
        sizes += [DimDynamic.STATIC for _ in t.shape[1:]]
        context = StatelessSymbolicContext(dynamic_sizes=sizes)
        source = ConstantSource(f"argument_{number}")
        return mode.from_tensor(t, symbolic_context=context, source=source)

    with FakeTensorMode(shape_env=shapes) as mode, enable_python_dispatcher():
        number = itertools.count()
        KERNEL_OPS[name].op(
            *tree_map_only(torch.Tensor, lambda t: fake(t, next(number)), SAMPLES[name])
        )
    assert not [size for size in shapes.replacements.values() if size.is_number]


@pytest.mark.parametrize("name", TRITON)
def test_cases_run_on_meta_and_count_bytes(name):
    op = KERNEL_OPS[name]
    for args in op.cases():
        assert op.nbytes(*args) >= tensor_bytes(args)
        break
    else:
        raise AssertionError(f"{name} has no cases for the ahead-of-time table")


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("interpreted")
def test_modes_see_the_op():
    x = torch.ones(2, 3)
    with Seen() as seen:
        KERNEL_OPS["bias_bwd"](x)
    assert seen.names == ["fuseops.bias_bwd.default"]


@pytest.fixture
def launches(monkeypatch):
    """Names of the kernels launched, those that arrive through the dispatcher too."""
    seen = []
    for op in KERNEL_OPS.values():

        def launcher(*args, _run=op.launcher, _name=op.name, **kwargs):
            seen.append(_name)
            return _run(*args, **kwargs)

        monkeypatch.setattr(op, "launcher", launcher)
    return seen


class Mine(torch.Tensor):
    """A subclass that knows plain torch only."""


@pytest.mark.usefixtures("interpreted")
class TestWhoRuns:
    op = KERNEL_OPS["bias_fwd"]
    x, bias = torch.randn(4, 3), torch.randn(3)

    def test_a_plain_call_launches(self, launches):
        assert torch.equal(self.op(self.x, self.bias), self.x + self.bias)
        with torch.no_grad():
            self.op(self.x, torch.nn.Parameter(self.bias))
        assert launches == ["bias_fwd"] * 2

    def test_what_autograd_differentiates_is_plain_torch(self, launches):
        x = self.x.clone().requires_grad_()
        y = self.op(x, self.bias).square().sum()
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        dx.sum().backward()
        assert torch.equal(x.grad, torch.full((4, 3), 2.0)) and not launches

    def test_what_functorch_transforms_is_plain_torch(self, launches):
        many = torch.vmap(self.op, in_dims=(0, None))(torch.stack([self.x] * 2), self.bias)
        assert torch.equal(many[1], self.x + self.bias) and not launches
        with torch.no_grad():
            grad = torch.func.grad(lambda b: self.op(self.x, b).sum())(self.bias)
        assert torch.equal(grad, torch.full((3,), 4.0)) and not launches

    def test_what_carries_a_tangent_is_plain_torch(self, launches):
        with forward_ad.dual_level():
            y = self.op(forward_ad.make_dual(self.x, self.x * 2), self.bias)
            assert torch.equal(forward_ad.unpack_dual(y).tangent, self.x * 2)
        assert not launches

    def test_subclasses_and_unknown_dtypes_and_scalars_are_plain_torch(self, launches):
        assert type(self.op(self.x.as_subclass(Mine), self.bias)) is Mine
        double = self.op(self.x.double(), self.bias.double())
        assert double.dtype is torch.float64 and torch.equal(
            double, self.x.double() + self.bias.double()
        )
        assert self.op(self.x, self.bias.double()).dtype is torch.float32
        assert KERNEL_OPS["act_fwd"](torch.tensor(-1.0), "relu") == 0
        assert not launches

    def test_reference_only_holds_in_its_scope_and_thread(self, launches):
        with reference_only(), reference_only():
            self.op(self.x, self.bias)
        assert not launches
        with reference_only():
            other = threading.Thread(target=self.op, args=(self.x, self.bias))
            other.start()
            other.join()
        self.op(self.x, self.bias)
        assert len(launches) == 2

    def test_watching_notes_launches(self):
        with watch_launches() as calls:
            self.op(self.x, self.bias)
            self.op(self.x.double(), self.bias)
        assert [(op.name, len(args)) for op, args, _ in calls] == [("bias_fwd", 2)]

    def test_compiled_code_launches_what_eager_does(self, launches):
        torch.compiler.reset()
        op, offs = KERNEL_OPS["grouped_bias_fwd"], torch.tensor([4], dtype=torch.int32)
        assert not op.fuses  # what the compiler fuses is plain torch there
        run = torch.compile(
            lambda x, b: op(x, b, offs), fullgraph=True, backend="aot_eager", dynamic=True
        )
        bias = self.bias[None]
        assert torch.equal(run(self.x.t().contiguous().t(), bias), self.x + self.bias)
        assert launches == ["grouped_bias_fwd"]
        launches.clear()
        with reference_only():
            run(self.x, bias)
        assert not launches
        run(self.x, bias)
        assert {*launches} == {
            "grouped_bias_fwd"
        }  # and a rehearsal of what is replayed from then on


@pytest.mark.usefixtures("interpreted")
def test_profiler_shows_the_name_of_every_launch():
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as p:
        for name in TRITON:
            KERNEL_OPS[name](*SAMPLES[name])
    assert {f"fuseops::{name}" for name in TRITON} <= {e.key for e in p.key_averages()}


def test_names_are_unique():
    def bias_bwd(x: torch.Tensor) -> torch.Tensor:
        return x

    with pytest.raises(FuseOpsError, match="registered twice"):
        kernel_op(twin=bias_bwd, namespace="fuseops")(bias_bwd)


def scaled(x: torch.Tensor, factor: float = 1.0, power: int = 1) -> torch.Tensor:
    return x * factor**power


TWINS = {
    "another name": lambda x, scale=1.0, power=1: x * scale**power,
    "another order": lambda x, power=1, factor=1.0: x * factor**power,
    "another default": lambda x, factor=2.0, power=1: x * factor**power,
    "a default of another type": lambda x, factor=1.0, power=True: x * factor**power,
    "no default": lambda x, factor, power: x * factor**power,
    "fewer": lambda x, factor=1.0: x * factor,
    "more": lambda x, factor=1.0, power=1, shift=0: x * factor**power + shift,
}


@pytest.mark.parametrize("twin", TWINS)
def test_a_twin_that_takes_other_arguments_is_refused(twin):
    """It runs in the launcher's place, called in the same way."""
    told = r"takes \(x: torch.Tensor, factor: float = 1.0, power: int = 1\).*its twin \(x, "
    with pytest.raises(FuseOpsError, match=told):
        kernel_op(twin=TWINS[twin], namespace="test_registry")(scaled)
    assert "test_registry::scaled" not in KERNEL_OPS


def test_a_launcher_without_types_is_told_which():
    def untyped(x):
        return x

    with pytest.raises(FuseOpsError, match=r"'test_registry::untyped' .* x must have a type"):
        kernel_op(twin=untyped, namespace="test_registry")(untyped)


WITHOUT_TRITON = """
import sys
sys.modules['triton'] = None  # importing it fails, and no spec is found
import torch, fuseops.kernels as k
y = k.act_fwd(torch.ones(2, 8), 'swiglu')
assert y.shape == (2, 4) and sys.modules['triton'] is None
"""


def test_runs_without_triton(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], check=True)


def test_errors_name_what_was_given():
    op = KERNEL_OPS["bias_fwd"]
    with pytest.raises(FuseOpsError, match=r"bias is \(4,\), expected \(3,\)"):
        op.launcher(torch.ones(2, 3), torch.ones(4))


@pytest.mark.usefixtures("interpreted")
def test_an_op_of_a_record_takes_its_fields_by_position_and_by_name():
    op, (x, weight, offs) = KERNEL_OPS["grouped_mm"], samples()["grouped_mm"]
    bias = torch.randn(weight.shape[:2])
    want = op(x, weight, offs, None, bias)
    assert torch.equal(op(x, offs=offs, weight=weight, bias=bias), want)
    assert torch.equal(op.op(x, weight, offs, bias=bias), want)
    assert torch.equal(
        op.twin(x, weight, bias=bias, offs=offs), op.twin(x, weight, offs, None, bias)
    )
    with pytest.raises(TypeError, match="unexpected keyword argument 'biases'"):
        op.launcher(x, weight, offs, biases=bias)


@pytest.mark.usefixtures("interpreted")
def test_what_the_registered_op_gives_is_contiguous_and_takes_names_however_often_it_is_called():
    """As its fake says: where nothing replays the launcher yet, and where a replay does."""

    def turned(x: torch.Tensor, rows: int = 2, columns: int = 3) -> torch.Tensor:
        return torch.empty(columns, rows, dtype=x.dtype, device=x.device).t()

    op = kernel_op(twin=turned, namespace="test_registry")(turned)
    del KERNEL_OPS[op.label]  # of other tests
    x = torch.ones(2)
    with torch.no_grad():
        for _ in range(4):
            assert not op(x, 4, 5).is_contiguous()  # the launcher's own
            for y in (op.op(x, 4, 5), op.op(columns=5, rows=4, x=x)):
                assert y.shape == (4, 5) and y.is_contiguous()
            assert op.op(x).shape == (2, 3)
    with pytest.raises(TypeError, match="test_registry::turned"):
        op.op(x, row=4)


COUNT = itertools.count()  # no op can be registered twice


@pytest.fixture
def listed():
    """A kernel op of a list of tensors, and what its launcher is called with: it multiplies by each of them."""
    launched = []

    def product(x: torch.Tensor, factors: list[torch.Tensor]) -> torch.Tensor:
        for factor in factors:
            x = x * factor
        return x

    def listed(x: torch.Tensor, factors: list[torch.Tensor]) -> torch.Tensor:
        launched.append(factors)
        return product(x.detach(), [t.detach() for t in factors])

    listed.__name__ = f"listed_{next(COUNT)}"
    op = kernel_op(twin=product, namespace="test_registry", traces_twin=False)(listed)
    del KERNEL_OPS[op.label]  # of other tests
    return op, launched


@pytest.mark.usefixtures("interpreted")
class TestLists:
    """What stands in a list is looked at as other tensors are."""

    def test_tensors_in_a_list_get_gradients(self, listed):
        op, launched = listed
        x, w = torch.full((3,), 2.0), torch.full((3,), 3.0, requires_grad=True)
        for y in (op(x, [w]), op(x, factors=[w])):
            (dw,) = torch.autograd.grad(y.sum(), w)
            assert torch.equal(dw, x) and not launched
        with torch.no_grad():
            assert torch.equal(op(x, [w]), x * w.detach()) and len(launched) == 1

    @pytest.mark.parametrize("how", ["float64", "subclass"])
    def test_what_no_kernel_takes_is_plain_torch(self, listed, how):
        op, launched = listed
        x, w = torch.ones(3), torch.full((3,), 1 / 3, dtype=torch.float64)
        w = w if how == "float64" else w.float().as_subclass(Mine)
        y = op(x, [x, w])
        assert y.dtype is w.dtype and type(y) is type(w) and not launched

    def test_fakes_and_meta_tensors_are_seen(self, listed):
        op, launched = listed
        x, w = torch.ones(3), torch.ones(3, device="meta")
        with pytest.raises(FuseOpsError, match="argument 1 on the meta device beside"):
            op(x, [x, w])
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(x)
        assert type(op(fake, [fake])) is type(fake) and not launched

    @pytest.mark.parametrize("known", [False, True])
    def test_compiled_code_loses_no_gradient(self, listed, known):
        """The registered op has none of its own, and with one it stays whole."""
        op, launched = listed
        if known:
            torch.library.register_autograd(op.label, lambda ctx, dy: (3 * dy, [None, None]))
        compiled = torch.compile(lambda x: op(x * 1.0, [x, x]), fullgraph=True, backend="aot_eager")
        x = torch.full((3,), 2.0, requires_grad=True)
        (dx,) = torch.autograd.grad(compiled(x).sum(), x)
        assert dx.eq(3 if known else 12).all() and bool(launched) == known

    def test_compiled_code_launches(self, listed):
        op, launched = listed
        x = torch.full((3,), 2.0)
        compiled = torch.compile(lambda x: op(x, [x, x]), fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), x**3) and launched


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("how", ["called", "by_name", "registered", "without_grad"])
def test_autograd_sees_what_a_launcher_writes_to(how):
    """What it saved has another value then, and a gradient would be wrong."""

    def add(x: torch.Tensor, y: torch.Tensor) -> None:
        x.add_(y)

    def add_into(x: torch.Tensor, y: torch.Tensor) -> None:
        x.data.add_(y)  # as a kernel does

    add_into.__name__ = f"add_into_{how}"
    op = kernel_op(twin=add, mutates=("x",), namespace="test_registry")(add_into)
    del KERNEL_OPS[op.label]  # of other tests
    w, x, y = torch.ones(3, requires_grad=True), torch.ones(3), torch.ones(3)
    loss = (w * x).sum()
    with torch.set_grad_enabled(how != "without_grad"):
        op(x, y=y) if how == "by_name" else op.op(x, y) if how == "registered" else op(x, y)
    assert torch.equal(x, y + 1) and x._version == 1 and y._version == 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        x = torch.ones(3)
    op(x, y)  # has no versions
    assert torch.equal(x, y + 1)


@pytest.mark.usefixtures("interpreted")
def test_a_call_by_keyword_alone_is_one_by_position():
    op, x, bias = KERNEL_OPS["bias_fwd"], torch.ones(2, 3), torch.ones(3, requires_grad=True)
    assert torch.equal(op(bias=bias, x=x), x + 1) and op(bias=bias, x=x).requires_grad
    with torch.no_grad():
        for _ in range(4):  # the last ones are replayed
            assert torch.equal(op(bias=bias, x=x), x + 1)
    compiled = torch.compile(lambda x: op(x=x, bias=bias), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), x + 1)
    for given in ({}, {"bias": bias}, {"bias": bias, "y": x}, {"x": x, "bias": bias, "y": x}):
        with pytest.raises(TypeError, match="argument"):
            op(**given)


def _number(a: float, x: torch.Tensor) -> torch.Tensor:
    return x * a


def _maybe(x: torch.Tensor | None, y: torch.Tensor) -> torch.Tensor:
    return y.clone()


def _several(xs: list[torch.Tensor]) -> torch.Tensor:
    return xs[0].clone()


def _nothing() -> torch.Tensor:
    return torch.ones(1)


@pytest.mark.parametrize(
    "launcher", [_number, _maybe, _several, _nothing], ids=lambda f: f.__name__
)
def test_a_first_argument_that_is_no_tensor_is_refused(launcher):
    with pytest.raises(FuseOpsError, match=f"{launcher.__name__}' takes .*has to be a Tensor"):
        kernel_op(twin=launcher, namespace="test_registry")(launcher)
    assert not hasattr(torch.ops.test_registry, launcher.__name__)


def test_a_parameter_by_keyword_alone_is_refused():
    """Calls are repeated by position: the registered op, compiled code and replays failed."""

    def starred(x: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
        return x * scale

    with pytest.raises(FuseOpsError, match=r"starred' takes .*\*, float scale.* by keyword alone"):
        kernel_op(twin=starred, namespace="test_registry")(starred)
    assert not hasattr(torch.ops.test_registry, "starred")


class _Scaled(NamedTuple):
    x: Tensor
    scale: float = 2.0


def _of_a_name(p: _Scaled) -> Tensor:
    return p.x * p.scale


def _of_a_class(p: _Scaled) -> Tensor:
    return p.x * p.scale


# as in a module that postpones annotations
_of_a_name.__annotations__ = {"p": "_Scaled", "return": "Tensor"}


@pytest.mark.parametrize("made", [_of_a_name, _of_a_class, of_fields(_Scaled)(_of_a_class)])
def test_a_record_is_taken_as_its_fields_however_it_is_annotated(made: Any) -> None:
    function = flattened(made)
    x = torch.ones(2)
    for found in (function(x, 3.0), function(x, scale=3.0), flattened(function)(x, 3.0)):
        assert torch.equal(found, 3 * x)
    assert torch.equal(function(x), 2 * x)
