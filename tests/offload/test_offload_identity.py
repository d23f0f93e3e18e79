"""Laws 1 to 5: which saved tensor is which, what is copied, what never is, what a hook returns."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import fuseops as fo
from fuseops import offload
from fuseops.errors import FuseOpsError
from fuseops.observe import modules
from fuseops.offload.lanes.cpu import CpuLanes
from fuseops.offload.storages import StorageMap, layout_of
from fuseops.ops import names


class Keeping(torch.autograd.Function):
    """Saves what it is given; hands what comes back to `seen`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[Tensor], *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        saved = ctx.saved_tensors
        ctx.seen.extend(saved)
        return (dy, None, *(None for _ in saved))


def round_trip(*saved: Tensor, scope: Any = None) -> tuple[list[Tensor], offload.Report]:
    """What a backward gets for these saved tensors, and the report."""
    seen: list[Tensor] = []
    scope = scope or offload.to_host(min_bytes=1)
    with scope:
        y = Keeping.apply(torch.ones(1, requires_grad=True), seen, *saved)
    y.sum().backward()
    return seen, scope.report()


def bits(t: Tensor) -> Tensor:
    """The bytes of the elements, so that NaN equals NaN and -0 differs from 0."""
    return t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def assert_same(a: Tensor, b: Tensor) -> None:
    assert layout_of(a) == layout_of(b) and a.device == b.device
    assert torch.equal(bits(a), bits(b))


# --- laws 1 and 2: names


def test_law_01_names_follow_the_saves_in_order() -> None:
    seq = fo.Sequential(fo.ops.RMSNorm(4), fo.ops.Linear(4, 8), fo.ops.SwiGLU())
    with fo.fusion(False), offload.keep() as scope:
        seq(torch.randn(3, 4, requires_grad=True))
    entries = scope.report().entries
    assert [e.name for e in entries] == ["0.x", "0.weight", "0.rstd", "1.x", "1.weight", "2.x"]
    assert (entries[-1].op, entries[-1].shape) == ("SwiGLU", (3, 8))


def test_law_01_a_tensor_saved_under_two_names_is_one_entry() -> None:
    seq = fo.Sequential(fo.ops.ScaledSwiGLU(), fo.ops.ScaledSwiGLU())
    probs = torch.rand(3, requires_grad=True)
    with offload.keep() as scope:
        seq(torch.randn(3, 8, requires_grad=True), probs=probs)
    (entry,) = scope.report().named("1.probs")
    assert entry.name == "0.probs" and entry.also == ("1.probs",) and entry.times == 1


def test_law_01_a_frame_refuses_a_tensor_it_did_not_promise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = torch.ones(2), torch.ones(2)
    frame = names.Frame()
    frame.fill([names.SavedName(("a.x",), False, "A")], [a])
    monkeypatch.setattr(names.thread, "frame", frame)
    with pytest.raises(FuseOpsError, match=r"a\.x"), offload.keep():
        Keeping.apply(torch.ones(1, requires_grad=True), [], b)


def test_law_01_nothing_is_published_without_a_scope() -> None:
    seq = fo.Sequential(fo.ops.Linear(4, 4))
    with offload.keep():
        seq(torch.randn(2, 4))
        assert names.thread.frame is None and names.thread.observers == 1
    assert names.thread.observers == 0


def test_law_02_names_are_paths_under_a_root_and_grad_fns_elsewhere() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh()), fo.Sequential(fo.ops.SiLU()))
    x = torch.randn(2, 4, requires_grad=True)
    with offload.keep() as bare:
        model(x)
    with offload.to_host(min_bytes=1, root=model) as rooted:
        model(x)
    assert [e.name for e in bare.report().entries][-2:] == ["TanhBackward0.0", "0.x"]
    assert [e.name for e in rooted.report().entries][-2:] == ["1.0.TanhBackward0.0", "2.0.x"]
    assert rooted.report().entries[0].name == "0.leaf.0"


def test_law_02_every_step_has_the_same_names() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    for scope in (offload.to_host(min_bytes=1, root=model), offload.keep()):
        with scope:
            for _ in range(3):
                model(torch.randn(2, 4)).sum().backward()
        assert sum(e.times for e in scope.report().entries if "Tanh" in e.name) == 3
        assert len({e.name for e in scope.report().entries}) == 2


def test_law_02_the_stack_of_running_modules_ends_empty_after_an_error() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("broken")

    with offload.keep():
        with pytest.raises(ValueError, match="broken"):
            nn.Sequential(nn.Tanh(), Broken())(torch.ones(1, requires_grad=True))
        assert modules.thread.running == []


# --- law 3: one copy a storage, rebuilt exactly


VIEWS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "the same twice": lambda t: (t, t),
    "a transpose": lambda t: (t, t.t()),
    "slices with offset and step": lambda t: (t[:, :3], t[1:, 2::2]),
    "expanded": lambda t: (t[:, :1].expand(-1, 5), t),
    "overlapping windows": lambda t: (t.view(-1).unfold(0, 4, 1),),
    "a flat view": lambda t: (t.view(-1), t.view(6, 4)),
    "another dtype": lambda t: (t.view(torch.int32), t),
    "a detached alias": lambda t: (t, t.detach(), t.detach()[0]),
    "a scalar": lambda t: (t[2, 3],),
    "no rows": lambda t: (t[:0], t),
}


@pytest.mark.parametrize("views", VIEWS.values(), ids=VIEWS.keys())
def test_law_03_views_are_copied_once_a_storage_and_rebuilt(views: Any) -> None:
    saved = views(torch.randn(4, 6))
    back, report = round_trip(*saved)
    assert report.moved_count == 1 and report.moved_bytes == 96
    assert report.back_bytes == 96
    assert len({t.untyped_storage().data_ptr() for t in back}) == 1
    for a, b in zip(saved, back, strict=True):
        assert_same(a, b)
        assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()


def test_law_03_slices_of_one_buffer_that_only_autograd_holds() -> None:
    qkv = nn.Linear(4, 12)

    def attend(x: Tensor) -> Tensor:
        q, k, v = qkv(x).chunk(3, -1)  # their base has no Python name any more
        return (q * k).sin() * v

    x = torch.randn(5, 4, requires_grad=True)
    with offload.to_host(min_bytes=1) as scope:
        y = attend(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(attend(x).sum(), x)
    assert torch.equal(grad, expected)
    of_buffer = [e for e in scope.report().entries if e.nbytes == 5 * 12 * 4]
    assert len(of_buffer) == 1
    assert sum(e.decision == "shared" and "Split" in e.name for e in scope.report().entries) == 2


DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
]


@pytest.mark.uninitialized  # the poison has no value for some of these dtypes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_law_03_every_bit_pattern_returns(dtype: torch.dtype) -> None:
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (64, 16), dtype=torch.uint8)
    (back,), report = round_trip(raw.view(dtype))
    assert back.dtype is dtype and report.moved_bytes == 1024
    assert torch.equal(back.view(torch.uint8), raw)


def test_law_03_nan_payloads_and_negative_zero_return() -> None:
    t = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000, -0x3FFFFF], dtype=torch.int32)
    (back,), _ = round_trip(t.view(torch.float32))
    assert torch.equal(back.view(torch.int32), t)


def test_law_03_lazy_conjugates_and_negations_return() -> None:
    z = torch.randn(3, 4, dtype=torch.complex64)
    saved = (z.conj(), z.conj().imag, z)
    back, report = round_trip(*saved)
    assert report.moved_count == 1
    for a, b in zip(saved, back, strict=True):
        assert_same(a, b)


def test_law_03_quantized_components_are_plain_tensors() -> None:
    seq = fo.Sequential(fo.ops.Linear(16, 16, bias=False), fo.ops.SiLU())
    x = torch.randn(8, 16, requires_grad=True)

    def grads(scope: Any) -> tuple[Tensor, ...]:
        with fo.recipe(fo.recipes.Float8CurrentScaling()), scope:
            y = seq(x)
        return torch.autograd.grad(y.square().sum(), [x, *seq.parameters()])

    scope = offload.to_host(min_bytes=1)
    for a, b in zip(grads(scope), grads(offload.disabled()), strict=True):
        assert torch.equal(a, b)
    moved = {e.name: e for e in scope.report().entries if e.decision == "moved"}
    assert moved["0.x.col"].dtype is torch.float8_e4m3fn and moved["0.x.col_scale"].shape == ()


def test_law_03_a_tied_weight_is_one_parameter() -> None:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = a.weight
    x = torch.randn(2, 4, requires_grad=True)
    with offload.to_host(min_bytes=1) as scope:
        y = b(a(x))
    found = torch.autograd.grad(y.sum(), [x, a.weight])
    expected = torch.autograd.grad(b(a(x)).sum(), [x, a.weight])
    assert all(map(torch.equal, found, expected))
    kept = [e for e in scope.report().entries if e.shape == (4, 4)]
    assert len(kept) == 2 and {e.reason for e in kept} == {"parameter"}


def test_law_03_an_address_that_is_used_again_is_another_storage() -> None:
    known: StorageMap[str] = StorageMap()
    addresses = set()
    for _ in range(200):
        t = torch.empty(1 << 12)
        addresses.add(t.data_ptr())
        assert known.get(t.untyped_storage()) is None
        known.set(t.untyped_storage(), "seen")
        assert known.get(t.untyped_storage()) == "seen"
        del t
    assert len(addresses) < 200 and len(known.entries) <= 65


def test_law_03_a_storage_that_was_written_between_two_saves_is_two_copies() -> None:
    x = torch.ones(4, requires_grad=True)
    buffer = torch.full((4,), 2.0)
    seen: list[Tensor] = []
    with offload.to_host(min_bytes=1) as scope:
        stale = Keeping.apply(x, [], buffer)  # keeps the first copy alive
        buffer.mul_(3)
        y = Keeping.apply(x, seen, buffer)
    y.sum().backward()
    assert seen[0][0] == 6 and scope.report().moved_count == 2
    del stale


def test_law_03_an_alias_with_its_own_version_counter_gets_its_own_copy() -> None:
    x = torch.ones(4, requires_grad=True)
    a = torch.full((4,), 2.0)
    seen: list[Tensor] = []
    with offload.to_host(min_bytes=1):
        first = Keeping.apply(x, [], a)
        a.data.mul_(3)  # a's counter does not see it; what is saved next is what is there now
        y = Keeping.apply(x, seen, a.data)
    y.sum().backward()
    assert seen[0][0] == 6
    del first


# --- law 4: what is never moved, and why


def reasons(model: Callable[[Tensor], Tensor], x: Tensor, **options: Any) -> dict[str, str]:
    with offload.to_host(**{"min_bytes": 1, **options}) as scope:
        y = model(x)
    y.float().sum().backward()
    return {e.name: e.reason for e in scope.report().entries if e.decision == "kept"}


def test_law_04_parameters_and_their_views_stay() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    assert reasons(nn.Linear(4, 4), x) == {"TBackward0.0": "parameter"}
    assert reasons(fo.Sequential(fo.ops.Linear(4, 4)), x) == {"0.weight": "parameter"}
    weight = nn.Parameter(torch.randn(4, 4))
    assert reasons(lambda x: x @ weight[1:].t(), x) == {"TBackward0.0": "parameter"}


def test_law_04_detached_parameters_of_a_running_module_stay() -> None:
    class Frozen(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight.detach())

    found = reasons(Frozen(4, 4), torch.randn(2, 4, requires_grad=True))
    assert set(found.values()) == {"parameter"}


def test_law_04_parameters_under_functional_call_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), fo.Sequential(fo.ops.Linear(4, 4)))
    params = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}

    def call(x: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (x,))

    found = reasons(call, torch.randn(2, 4, requires_grad=True))
    assert list(found.values()) == ["parameter", "parameter"]


def test_law_04_buffers_of_a_known_root_stay() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.get_buffer("scale")

    model, x = Scaled(), torch.randn(2, 4, requires_grad=True)
    assert reasons(model, x, root=model) == {"leaf.0": "buffer of the model"}
    assert reasons(model, x) == {}


def test_law_04_cast_copies_of_weights_stay() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.autocast("cpu", torch.bfloat16):
        found = reasons(model, torch.randn(2, 8, requires_grad=True))
    assert list(found.values()) == ["cast copy of a parameter"] * 2


def test_law_04_what_is_computed_from_a_parameter_is_no_cast_of_it() -> None:
    weight = nn.Parameter(torch.randn(4))
    x = torch.randn(4, requires_grad=True)
    with offload.to_host(min_bytes=1) as scope:
        x * weight.exp()
    decisions = {e.name: e.decision for e in scope.report().entries}
    assert decisions["ExpBackward0.0"] == "moved"


def test_law_04_small_tensors_stay() -> None:
    x = torch.randn(4, requires_grad=True)
    assert reasons(torch.sin, x, min_bytes=17) == {"leaf.0": "smaller than min_bytes=17"}
    assert reasons(torch.sin, x, min_bytes=16) == {}


def test_law_04_cpu_tensors_stay_in_a_scope_that_moves_from_cuda() -> None:
    scope = offload.to_host(min_bytes=1)
    scope._on_gpu = True  # as after the first CUDA tensor
    _, report = round_trip(torch.ones(4), scope=scope)
    assert [e.reason for e in report.entries] == ["on the CPU, in a scope that moves from CUDA"]


def test_law_04_tensors_without_plain_storage_stay() -> None:
    (back, empty), report = round_trip(torch.eye(3).to_sparse(), torch.ones(0, 4))
    assert back.is_sparse and empty.shape == (0, 4)
    assert [e.reason for e in report.entries] == ["layout sparse_coo", "empty"]


def test_law_04_forward_derivatives_are_exact() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    x = torch.randn(3, 4, requires_grad=True)

    def dual(tangent: Tensor) -> Tensor:
        with forward_ad.dual_level():
            y = model(forward_ad.make_dual(x, tangent))
            return sum(forward_ad.unpack_dual(y))

    for derivative in (dual, lambda tangent: sum(torch.func.jvp(model, (x,), (tangent,)))):
        for tangent in (torch.randn(3, 4), torch._efficientzerotensor(3, 4)):
            (expected,) = torch.autograd.grad(derivative(tangent).sum(), x)
            policy = offload.Policy(min_bytes=0)
            scheduler = offload.Scheduler(model, "*", policy=policy)
            for scope in (offload.to_host(min_bytes=0), offload.keep(), scheduler):
                with scope:
                    y = derivative(tangent).sum()
                assert torch.equal(torch.autograd.grad(y, x)[0], expected)


def test_law_04_fake_and_meta_tensors_stay() -> None:
    x = torch.randn(4, device="meta", requires_grad=True)
    assert reasons(torch.sin, x) == {"leaf.0": "no copies for device meta"}
    with FakeTensorMode():
        fake = torch.randn(4, requires_grad=True)
        assert reasons(torch.sin, fake) == {"leaf.0": "FakeTensor is not a plain tensor"}


def test_law_04_vmapped_tensors_come_back() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    with offload.to_host(min_bytes=1):
        y = torch.vmap(lambda row: row.sin() * row.cos())(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad((x.sin() * x.cos()).sum(), x)
    assert torch.equal(grad, expected)


def test_law_04_torch_itself_refuses_inference_tensors() -> None:
    with torch.inference_mode():
        frozen = torch.ones(4)
    with offload.to_host(min_bytes=1), pytest.raises(RuntimeError, match="Inference tensors"):
        torch.ones(4, requires_grad=True) * frozen


def test_law_04_marks_go_before_size_but_not_before_parameters() -> None:
    x = torch.randn(4, requires_grad=True)
    offload.mark_offload(x)
    assert reasons(torch.sin, x, min_bytes=1000) == {}
    offload.mark_not_offload({"a": [x.detach()[1:]]})  # the later mark wins, by storage
    assert reasons(torch.sin, x) == {"leaf.0": "marked keep"}
    weight = nn.Parameter(torch.ones(4))
    offload.mark_offload(weight)
    assert reasons(torch.sin, weight) == {"leaf.0": "parameter"}


def test_law_04_without_host_memory_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(self: Any, nbytes: int) -> Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("fuseops.offload.scopes.lanes_of", lambda device: CpuLanes())
    monkeypatch.setattr("fuseops.offload.lanes.cpu.CpuLanes.make", none_left)
    t = torch.randn(4)
    (back,), report = round_trip(t)
    assert torch.equal(back, t) and report.entries[0].reason == "no host memory (out of memory)"


# --- law 5: never the tensor itself


@pytest.mark.parametrize("scope", [offload.keep, lambda: offload.to_host(min_bytes=1 << 40)])
@pytest.mark.parametrize("model", [torch.exp, fo.Sequential(fo.ops.RMSNorm(4), nn.Sigmoid())])
def test_law_05_an_output_that_is_saved_dies_without_the_gc(scope: Any, model: Any) -> None:
    gc.disable()
    try:
        with scope():
            y = model(torch.randn(2, 4, requires_grad=True))
        died = weakref.ref(y)
        del y
        assert died() is None
    finally:
        gc.enable()
