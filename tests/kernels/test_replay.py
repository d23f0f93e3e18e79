"""A replayed call of a kernel op does what its launcher does, and operands of another kind are not replayed."""

import pytest
import torch
from laws import DEVICE
from samples import names_here, samples
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fuseops import torch_private
from fuseops.kernels import configs, grouped_paths, norm, registry
from fuseops.kernels.activation import act_bwd, act_fwd
from fuseops.kernels.registry import KERNEL_OPS
from fuseops.kernels.replay import (
    NOT_REPLAYED,
    Replay,
    Replays,
    active_replays,
    recording,
    separate_replays,
)

pytestmark = pytest.mark.usefixtures("kernels")

# by torch, or in halves
RUN_THEMSELVES = {
    "grouped_mm", "grouped_mm_into", "grouped_swiglu", "grouped_dswiglu",
    "grouped_dswiglu_into", "grouped_wgrad", "grouped_wgrad_into", "expert_counts",
    "linear_cross_entropy_fwd", "linear_cross_entropy_bwd", "linear_cross_entropy_grads",
    "logits_with_rows", "logit_grads_into",
    "fp8_mm", "fp8_mm_operand", "fp8_wgrad", "fp8_wgrad_into",
}  # fmt: skip


@pytest.fixture(autouse=True)
def new_replays():
    with torch.no_grad(), separate_replays():
        yield


@pytest.fixture
def replayed(monkeypatch):
    """The arguments of the calls that were replayed: whose launchers did not run."""
    seen, themselves = [], []
    run, anew = Replays.run, Replay._run_launcher

    def count(self, op, args):
        before = len(themselves)
        out = run(self, op, args)
        if out is not NOT_REPLAYED and len(themselves) == before:
            seen.append(args)
        return out

    def ran(self, *args):
        themselves.append(args)
        return anew(self, *args)

    monkeypatch.setattr(Replays, "run", count)
    monkeypatch.setattr(Replay, "_run_launcher", ran)
    return seen


def here(name):
    """The sample of an op, where its kernel runs."""
    return tree_map_only(torch.Tensor, lambda t: t.to(DEVICE), samples()[name])


def drawn(*shape):
    return torch.randn(shape, device=DEVICE)


def again(args):
    """Other values of the same kind, in other places."""
    return tuple(
        torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device).copy_(a.flip(0))
        if isinstance(a, torch.Tensor) and a.is_floating_point() and a.dim()
        else a.clone() if isinstance(a, torch.Tensor) else a
        for a in args
    )  # fmt: skip


def equal(a, b):
    for x, y in zip(*((t if isinstance(t, tuple) else (t,)) for t in (a, b)), strict=True):
        if x is None:
            assert y is None
            continue
        assert x.shape == y.shape and x.stride() == y.stride() and x.dtype is y.dtype
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", sorted({*names_here()} - {"wide_mm"}))  # which no CPU runs
def test_the_third_call_is_replayed_and_does_what_the_launcher_does(name, replayed):
    op, args = KERNEL_OPS[name], here(name)
    op(*args), op(*args)
    for other in (again(args), again(again(args))):
        expected = tree_map_only(torch.Tensor, torch.clone, other)  # some write over what they read
        found, right = op(*other), op.launcher(*expected)
        equal((*tree_leaves(found), other[0]), (*tree_leaves(right), expected[0]))
        mine = [given for given in replayed if given[0] is other[0] and len(given) == len(args)]
        assert len(mine) == (name not in RUN_THEMSELVES)


def test_a_call_by_keyword_is_replayed_as_one_by_position(replayed, monkeypatch):
    monkeypatch.setattr(registry.thread, "replay_mode", True)
    x = drawn(4, 16)
    act_fwd(x, "gelu"), act_fwd(x, kind="gelu")
    assert not replayed
    found = act_fwd(kind="gelu", x=x)
    assert len(replayed) == 1
    equal(found, act_fwd.launcher(x, "gelu"))
    shifted = {"kind": "clamped_swiglu", "offset": 0.5}
    equal(act_fwd(x, **shifted), act_fwd.launcher(x, **shifted))


@pytest.mark.parametrize("given", [{}, {"kind": "gelu", "nothing": 1}, {"kind": "gelu", "x": None}])
def test_a_keyword_too_many_or_too_few_is_refused_as_python_does(given, monkeypatch):
    monkeypatch.setattr(registry.thread, "replay_mode", True)
    with pytest.raises(TypeError, match="argument"):
        act_fwd(drawn(4, 16), **given)


def with_tiles(name, dtype):
    """The arguments of a grouped op in this dtype, with the table of tiles that a Sequential makes once for all."""
    args = [a.to(dtype) if isinstance(a, torch.Tensor) and a.dim() > 1 else a for a in here(name)]
    place = 1 + next(k for k, a in enumerate(args) if getattr(a, "dtype", None) is torch.int32)
    rows = args[place - 3].shape[0]
    tiles = KERNEL_OPS["group_tiles"](args[place - 1], rows)
    if name == "grouped_wgrad_into":
        args[0] = args[0].float()
    return (*args[:place], tiles, *args[place + 1 :])


@pytest.mark.parametrize(
    "name", ["grouped_mm", "grouped_mm_into", "grouped_wgrad", "grouped_wgrad_into"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_grouped_op_over_known_tiles_is_replayed_in_halves(name, dtype, replayed):
    """In float32 its precision is a setting of torch."""
    op, args = KERNEL_OPS[name], with_tiles(name, dtype)
    op(*args), op(*args)
    other = again(args)
    expected = again(args)
    found, right = op(*other), op.launcher(*expected)
    equal((found, other[0]), (right, expected[0])) if found is None else equal(found, right)
    assert len([given for given in replayed if given[0] is other[0]]) == (dtype is torch.bfloat16)


def x_and_dy(rows=6, dtype=torch.float32):
    return drawn(rows, 32).to(dtype), drawn(rows, 16).to(dtype)


def test_operands_of_another_kind_are_not_replayed(replayed):
    x, dy = x_and_dy()
    for _ in range(3):
        act_bwd(dy, x, "swiglu")
    assert len(replayed) == 1
    wide, tall = drawn(6, 48), drawn(6, 17)
    others = [
        (dy, x, "geglu"),
        (dy, x, "swiglu", 1),
        (dy, x.half(), "swiglu"),
        (dy.t().contiguous().t(), x, "swiglu"),
        (dy, wide[:, :32], "swiglu"),
        (tall[:, 1:], x, "swiglu"),
        (*x_and_dy(5)[::-1], "swiglu"),
    ]
    for other in others:
        equal(act_bwd(*other), act_bwd.launcher(*other))
    assert len(replayed) == 1


def test_operands_that_are_not_aligned_run_the_launcher(replayed):
    base = drawn(6 * 32 + 1)
    for _ in range(4):
        act_fwd(base[1:].view(6, 32), "swiglu")
    assert not replayed
    equal(
        act_fwd(base[:-1].view(6, 32), "swiglu"), act_fwd.launcher(base[:-1].view(6, 32), "swiglu")
    )


def test_operands_that_were_one_tensor_are_told_apart_later(replayed):
    y, rstd = drawn(6, 16), drawn(6).abs() + 0.5
    norm.rmsnorm_bwd(y, y, None, rstd), norm.rmsnorm_bwd(y, y, None, rstd)
    other = drawn(6, 16), drawn(6, 16), None, rstd
    equal(norm.rmsnorm_bwd(*other), norm.rmsnorm_bwd.launcher(*other))
    assert len(replayed) == 1


def test_some_features_of_codes_are_permuted_where_they_lie(replayed):
    """A copy of them is made by torch, which no replay does."""
    q, scale, index, offs = here("permute_operand")[:4]
    wide = torch.cat([q.view(torch.uint8)] * 2, 1).view(q.dtype)
    half = wide[:, : q.shape[1]]
    for row in (True, False):
        args = half, scale, index, offs, row, True
        for _ in range(3):
            found = KERNEL_OPS["permute_operand"](*args)
        assert [given for given in replayed if given[4] is row]
        equal(found[2:], KERNEL_OPS["permute_operand"].launcher(q, *args[1:])[2:])


class Sees(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_who_has_to_see_a_call_sees_it(replayed):
    x, _ = x_and_dy()
    for _ in range(3):
        act_fwd(x, "swiglu")
    assert len(replayed) == 1
    with Sees() as mode:
        act_fwd(x, "swiglu")
    assert act_fwd.op in mode.seen
    with registry.watch_launches() as seen:
        act_fwd(x, "swiglu")
    assert len(seen) == 1
    with registry.reference_only():
        act_fwd(x, "swiglu")
    torch.vmap(lambda row: act_fwd(row, "swiglu"))(x[None])
    with torch.enable_grad():
        assert act_fwd(x.clone().requires_grad_(), "swiglu").requires_grad
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(act_fwd(dual, "swiglu")).tangent
        assert tangent is not None
    assert len(replayed) == 1


def test_a_configuration_that_is_forced_is_not_that_of_a_replay(replayed):
    x, _ = x_and_dy()
    for _ in range(3):
        act_fwd(x, "swiglu")
    space = configs.SPACES["gate_fwd"]
    with configs.forced(space, space.candidates((16,), 4)[-1]):
        act_fwd(x, "swiglu")
    assert len(replayed) == 1


def test_shapes_that_never_come_back_are_not_rehearsed(replayed):
    for rows in range(1, 9):
        act_fwd(drawn(rows, 32), "swiglu")
    assert not any(active_replays.current.values())


class Noted:
    """A launcher of a compiled kernel that notes what the kernel would be given."""

    def __init__(self, calls):
        self.raw = lambda *operands: calls.append(operands)
        self.head, self.constants = ("function", None), (7,)
        self.stream_of = lambda index: "stream"
        self.hooks = type("Hooks", (), {"launch_enter_hook": type("Hook", (), {"calls": ()})})


# micro_mm and micro_wgrad read descriptors, which only a launcher of compiled kernels encodes
@pytest.mark.parametrize(
    "name", sorted({*samples()} - {"wide_mm", "micro_mm", "micro_wgrad"} - {*RUN_THEMSELVES})
)
def test_what_is_written_out_gives_kernels_what_the_launcher_does(name, monkeypatch):
    op, args = KERNEL_OPS[name], samples()[name]
    monkeypatch.setattr(torch_private, "current_device", lambda: -1)
    calls = []
    replay = Replay(op.launcher, args)

    def launch_and_note(kernel, grid, given, options):
        calls.append((grid, given))
        return Noted(calls)

    monkeypatch.setattr("fuseops.kernels.replay.launch_and_bind", launch_and_note)
    assert replay(replay.tensors_of(args)) is not NOT_REPLAYED
    programs, first = len(replay.programs), calls[:]
    calls.clear()
    other = again(args)
    out = replay.call(*other)
    kept = (*replay.tensors_of(args), *replay.tensors_of(other))  # so that no address comes twice
    assert kept and len(calls) == programs == len(first)
    made = out if isinstance(out, tuple) else () if out is None else (out,)
    new = {t.untyped_storage().data_ptr() for t in made}
    for (grid, given), (x, y, z, stream, *operands) in zip(first, calls, strict=True):
        assert ((*grid, 1, 1)[:3], stream) == ((x, y, z), "stream")
        assert operands[:2] == ["function", None] and operands[-1] == 7
        for before, now in zip(given, operands[2:-1], strict=True):
            if isinstance(before, torch.Tensor):
                places = [
                    k
                    for k, t in enumerate(replay.tensors_of(args))
                    if t is before or t.data_ptr() == before.data_ptr()
                ]
                mine = [replay.tensors_of(other)[k].data_ptr() for k in places]
                assert now in mine if mine else isinstance(now, int)
                new.discard(now)
            else:
                assert now == before
    assert not new  # all that is returned was written to
    assert (
        replay.call(*(a[None] if isinstance(a, torch.Tensor) else a for a in other)) is NOT_REPLAYED
    )


WRITERS = sorted(name for name in names_here() if KERNEL_OPS[name].announced)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("how", ["called", "registered"])
def test_each_launch_moves_the_versions_of_what_it_writes_to(name, how):
    """The first, and those that are replayed: autograd and offload look at versions."""
    op, args = KERNEL_OPS[name], again(here(name))
    call, written = op if how == "called" else op.op, op.written_tensors(args)
    read = [t for t in args if isinstance(t, torch.Tensor) and not any(t is w for w in written)]
    for _ in range(4):
        before, stay = [t._version for t in written], [t._version for t in read]
        call(*args)
        assert all(t._version > v for t, v in zip(written, before, strict=True))
        assert [t._version for t in read] == stay


def test_memory_that_a_backward_has_for_itself_is_written_without_a_version():
    """A fused op's backward may write over what it was given where nobody else can read it."""
    op, args = KERNEL_OPS["scaled_act_bwd_into"], again(here("scaled_act_bwd_into"))
    before = args[0]._version
    for _ in range(4):
        op(*args)
    assert args[0]._version == before


def test_a_replay_that_is_written_out_moves_versions(monkeypatch):
    op, args = KERNEL_OPS["scaled_act_bwd_into"], samples()["scaled_act_bwd_into"]
    monkeypatch.setattr(torch_private, "current_device", lambda: -1)
    replay = Replay(op.launcher, args, [0])
    monkeypatch.setattr("fuseops.kernels.replay.launch_and_bind", lambda *_: Noted([]))
    for _ in range(3):
        before = [t._version for t in args if isinstance(t, torch.Tensor)]
        assert replay.call(*args) is not NOT_REPLAYED
        after = [t._version for t in args if isinstance(t, torch.Tensor)]
        assert after == [before[0] + 1, *before[1:]]
    assert replay.call != replay._run_checked  # it is written out


def test_replays_of_an_override_are_its_own_and_are_kept():
    first, second = grouped_paths.MM_SPACES["tma"], grouped_paths.WGRAD_SPACES["tma"]
    config = first.candidates((2, 64, 64), 2)[0]
    outside = active_replays.current
    with configs.forced(first, config):
        inside = active_replays.current
        with configs.forced(second, config):
            nested = active_replays.current
        with configs.record_requests():
            asked = active_replays.current
        with recording(90):
            recorded = active_replays.current
    with configs.forced(second, config):
        other = active_replays.current
    with grouped_paths.on_path("tma"):
        path = active_replays.current
    everything = [outside, inside, nested, asked, recorded, other, path]
    assert len({*map(id, everything)}) == len(everything) and active_replays.current is outside
    for _ in range(2):
        with configs.forced(first, config), configs.forced(second, config):
            assert active_replays.current is nested
    with pytest.raises(ZeroDivisionError), separate_replays():
        raise ZeroDivisionError
    assert active_replays.current is outside


def test_new_tables_forget_replays(monkeypatch):
    monkeypatch.setattr(active_replays, "current", Replays())
    with configs.forced(grouped_paths.MM_SPACES["tma"], {"BLOCK_M": 1}):
        active_replays.current["kind"] = []
    active_replays.current["kind"] = []
    configs.reload_tables()
    with configs.forced(grouped_paths.MM_SPACES["tma"], {"BLOCK_M": 1}):
        assert "kind" not in active_replays.current
    assert "kind" not in active_replays.current


def test_what_kinds_of_operands_decide_is_asked_once_until_a_setting_changes(monkeypatch):
    asked = []

    def ask(x, index, fact):
        asked.append(fact)
        return len(asked)

    x, space = drawn(4, 16), next(iter(configs.SPACES.values()))
    registry.cached_decision(ask, (x, None), "a"), registry.cached_decision(ask, (x, None), "a")
    assert len(asked) == 2  # somebody may look on
    monkeypatch.setattr(registry.thread, "replay_mode", True)
    for _ in range(2):
        given = [
            (drawn(4, 16), None),
            (drawn(5, 16), None),
            (x, x + 1),
            (x.t(), None),
            (x.half(), None),
        ]
        assert [registry.cached_decision(ask, tensors, "a") for tensors in given] == [3, 4, 5, 6, 7]
        assert registry.cached_decision(ask, (x, None), "b") == 8
    shifted = drawn(65)[1:].view(4, 16)  # of which Triton compiles other code
    assert [registry.cached_decision(ask, (shifted, None), "a") for _ in range(2)] == [9, 10]
    with configs.forced(space, {}):
        assert registry.cached_decision(ask, (x, None), "a") == 11
    assert registry.cached_decision(ask, (x, None), "a") == 3
    configs.reload_tables()
    assert registry.cached_decision(ask, (x, None), "a") == 12


def test_a_tensor_is_compared_with_nothing(replayed, monkeypatch):
    """An operand that is left out by one call and given by the next: torch takes a while to say that they differ."""
    op, (x, pos, ends, probs) = KERNEL_OPS["combine_fwd"], here("combine_fwd")
    calls = (x, pos, ends, None), (x, pos, ends, probs)
    for _ in range(3):
        expected = [op(*args) for args in calls]

    def compared(a, b):
        raise AssertionError("a tensor was compared")

    seen = len(replayed)
    monkeypatch.setattr(torch.Tensor, "__eq__", compared)
    found = [op(*args) for args in calls]
    monkeypatch.undo()
    equal(tuple(found), tuple(expected))
    assert len(replayed) == seen + 2
