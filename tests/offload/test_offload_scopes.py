"""Laws 16 to 18: scopes nest, stand aside where they must, and leave nothing behind."""

import asyncio
import contextlib
import copy
import itertools
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops import offload
from fuseops.errors import FuseOpsError, InPlaceError
from fuseops.observe import modules
from fuseops.offload import nesting
from fuseops.ops import names
from fuseops.torch_private import top_saved_tensor_hooks


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert top_saved_tensor_hooks() is None and names.thread.observers == 0
    assert modules.thread.watchers == [] == modules.thread.running == list(nesting.open_scopes())
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not torch.nn.modules.module._global_forward_hooks


def leaf() -> Tensor:
    return torch.randn(4, 8, requires_grad=True)


def decisions(scope: Any) -> list[str]:
    return [e.decision for e in scope.report().entries]


class Counted(nn.Module):
    """Counts its forwards; saves the result of exp and of sin."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return x.exp().sin()


# --- what one node saves


def three_linears() -> nn.Module:
    torch.manual_seed(0)
    return fo.Sequential(*(fo.ops.Linear(8, 8) for _ in range(3)))


def gradients(net: nn.Module, scope: Any) -> list[Tensor]:
    x = torch.ones(4, 8, requires_grad=True)  # 128 bytes, as all that moves
    with scope:
        y = net(x).sum()
    return [y.detach(), *torch.autograd.grad(y, [x, *net.parameters()])]


@pytest.mark.parametrize(
    ("small", "bundle", "transfers"), [(1 << 20, 1 << 20, 1), (1 << 20, 256, 2), (128, 1 << 20, 3)]
)
def test_small_storages_of_a_node_leave_and_come_back_together(
    small: int, bundle: int, transfers: int
) -> None:
    net, scope = three_linears(), offload.to_host(min_bytes=1)
    resident = gradients(net, offload.disabled())
    assert all(map(torch.equal, resident, gradients(net, scope)))
    (mover,) = scope._movers.values()  # type: ignore[attr-defined]
    mover.schedule.small, mover.schedule.bundle_bytes = small, bundle
    before = mover.schedule.stats.out_count, mover.schedule.stats.back_count
    assert all(map(torch.equal, resident, gradients(net, scope)))
    after = mover.schedule.stats.out_count, mover.schedule.stats.back_count
    assert [b - a for a, b in zip(before, after, strict=True)] == [transfers, transfers]
    assert scope.report().moved_count == 6 == scope.report().back_count


def test_a_node_that_fails_while_it_is_packed_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, scope = three_linears(), offload.to_host(min_bytes=1)
    resident = gradients(net, offload.disabled())
    gradients(net, scope)
    move, left = type(scope)._move, [2]

    def interrupted(self: Any, *args: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return move(self, *args)

    monkeypatch.setattr(type(scope), "_move", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gradients(net, scope)
    (mover,) = scope._movers.values()  # type: ignore[attr-defined]
    out = mover.schedule.stats.out_bytes
    assert all(map(torch.equal, resident, gradients(net, scope)))
    assert mover.schedule.stats.out_bytes - out == 3 * 128 and scope.report().host_bytes == 0


# --- law 16


def test_law_16_the_innermost_scope_decides() -> None:
    with offload.to_host(min_bytes=1) as outer:
        leaf().sin()
        with offload.keep() as kept:
            leaf().sin()
            with offload.to_host(min_bytes=1) as inner:
                leaf().sin()
        leaf().sin()
    assert decisions(inner) == ["moved"]
    assert sorted(decisions(kept)) == ["kept", "moved"]
    report = outer.report()
    assert sum(e.times for e in report.entries if e.decision == "moved") == 3
    assert report.moved_bytes == 3 * 4 * 8 * 4


def test_law_16_keep_is_guarded_and_reported() -> None:
    with offload.keep() as scope:
        h = leaf() * 1
        y = h.sin()
        h.add_(1)
    assert [(e.name, e.reason, e.nbytes) for e in scope.report().entries] == [
        ("MulBackward0.0", "keep()", 128)
    ]
    assert scope.report().kept_bytes == 128 and scope.report().moved_bytes == 0
    with pytest.raises(InPlaceError):
        y.sum().backward()


def test_law_16_disabled_gives_torchs_own_check_back() -> None:
    with offload.to_host(min_bytes=1) as scope, offload.keep():
        with offload.disabled():
            assert top_saved_tensor_hooks() is None
            h = leaf() * 1
            y = h.sin()
            h.add_(1)
            nn.Tanh()(leaf())
            with offload.to_host(min_bytes=1) as inner:
                leaf().sin()
        assert isinstance(top_saved_tensor_hooks()[0], nesting.PackHook)
        leaf().cos()
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
        y.sum().backward()
    assert not isinstance(error.value, InPlaceError)
    assert decisions(inner) == ["moved"]
    assert [e.decision for e in scope.report().entries] == ["moved", "kept"]


def test_law_16_disabled_leaves_hooks_of_others_alone() -> None:
    packed: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, Tensor.detach):
        with offload.keep(), offload.disabled():
            leaf().sin()
    assert len(packed) == 1


def test_law_16_recompute_drops_what_ops_declare() -> None:
    offs = torch.tensor([2, 4], dtype=torch.int32)
    probs = torch.rand(4)
    seq = fo.Sequential(
        fo.ops.GroupedLinear(2, 8, 8, bias=False),
        fo.ops.ScaledSwiGLU(),
        fo.ops.GroupedLinear(2, 4, 8, bias=False),
    )
    x = leaf()

    def run(recompute: bool) -> tuple[list[str], tuple[Tensor, ...]]:
        with offload.keep() as scope:
            if recompute:
                with offload.recompute():
                    y = seq(x, offs=offs, probs=probs)
            else:
                y = seq(x, offs=offs, probs=probs)
        grads = torch.autograd.grad(y.square().sum(), [x, *seq.parameters()])
        return [e.name for e in scope.report().entries], grads

    (plain, expected), (dropped, found) = run(False), run(True)
    assert "1.x" in plain and sorted({*plain} - {*dropped}) == ["1.x"]
    assert all(map(torch.equal, expected, found))


def test_law_16_marks_reach_modules_ops_and_containers() -> None:
    model = nn.Sequential(
        fo.Sequential({"norm": fo.ops.RMSNorm(8), "fc": fo.ops.Linear(8, 8)}),
        nn.Sequential(nn.Tanh(), nn.Tanh()),
        fo.ops.SiLU(),
    )
    offload.mark_module(model[0]["fc"], "keep")
    offload.mark_module(model[1], "keep")
    offload.mark_module(model[2], "offload")

    def moved(min_bytes: int, root: Any) -> set[str]:
        with offload.to_host(min_bytes=min_bytes, root=root) as scope, fo.fusion(False):
            model(leaf())
        return {e.name for e in scope.report().entries if e.decision in ("moved", "shared")}

    assert moved(1, None) == {"norm.x", "norm.rstd", "0.x"}
    assert moved(1, model) >= {"0.norm.x", "0.norm.rstd"}
    assert not any("fc" in name or "Tanh" in name for name in moved(1, model) - {"2.0.x"})
    assert len(moved(1 << 20, model)) == 1  # only what is marked "offload"
    offload.mark_module(model, None)
    assert "0.fc.x" in moved(1, model)


def test_law_16_marks_refuse_what_they_cannot_mark() -> None:
    with pytest.raises(FuseOpsError, match="mark_module"):
        offload.mark_offload(nn.Linear(2, 2))
    with pytest.raises(FuseOpsError, match="got Linear"):
        offload.mark_offload([torch.ones(2), nn.Linear(2, 2)])
    with pytest.raises(FuseOpsError, match="'keep', 'offload' or None, got 'kep'"):
        offload.mark_module(nn.Linear(2, 2), "kep")
    with pytest.raises(FuseOpsError, match="mark_offload"):
        offload.mark_module(torch.ones(2), "keep")  # type: ignore[arg-type]
    for mark in (offload.mark_offload, offload.mark_not_offload, offload.start_offload):
        with pytest.raises(FuseOpsError, match=r"layout torch\.sparse_coo"):
            mark([torch.ones(2), torch.eye(2).to_sparse()])


def test_law_16_a_mark_reaches_every_tensor_of_a_container() -> None:
    routing = fo.Routing.from_counts([2, 2])
    col = fo.recipes.Layout(torch.ones(4), torch.ones(()))
    scaling = fo.recipes.Scaling(block=None, columns=None)
    quantized = fo.recipes.Quantized(None, col, scaling, None, torch.float32)
    offload.mark_not_offload(routing, [quantized], None)
    x = leaf()
    with offload.to_host(min_bytes=1) as scope:
        x[:, :4] * col.data
        x[:, 0] * col.scale
    assert [e.reason for e in scope.report().entries if e.shape in ((4,), ())] == [
        "marked keep"
    ] * 2


# --- law 17


def test_law_17_a_checkpoint_inside_a_scope_keeps_recomputing_and_its_inputs_move() -> None:
    model, x = Counted(), leaf()
    expected = torch.autograd.grad(model(x * 1).sum(), x)[0]
    for reentrant in (False, True):
        model.forwards = 0
        with offload.to_host(min_bytes=1) as scope:
            y = checkpoint(model, x * 1, use_reentrant=reentrant)
        y.sum().backward()
        assert torch.equal(x.grad, expected) and model.forwards == 2
        x.grad = None
        assert "moved" in decisions(scope)
        if not reentrant:
            (missed,) = [e for e in scope.report().entries if e.decision == "missed"]
            assert (missed.name, missed.reason) == ("Counted", "recomputed by checkpoint")


@pytest.mark.parametrize("reentrant", [False, True])
def test_law_17_scopes_stand_aside_while_a_backward_runs(reentrant: bool) -> None:
    model, x = Counted(), leaf()
    with offload.to_host(min_bytes=1) as scope:
        checkpoint(model, x * 1, use_reentrant=reentrant).sum().backward()
    assert model.forwards == 2
    # torch 2.11's checkpoint also saves an empty tensor
    kept = {e.reason for e in scope.report().entries if e.decision == "kept"} - {"empty"}
    assert kept == ({"inside backward"} if reentrant else set())


def test_law_17_a_scope_inside_a_checkpoint_means_instead_of_recompute() -> None:
    model, x = Counted(), leaf()
    scope = offload.to_host(min_bytes=1)

    def inside(x: Tensor) -> Tensor:
        with scope:
            return model(x)

    y = checkpoint(inside, x, use_reentrant=False)
    y.sum().backward()
    assert model.forwards == 1
    assert torch.equal(x.grad, x.exp().cos() * x.exp())
    reason = "min_bytes=1 reached; instead of recompute by checkpoint"
    assert (decisions(scope), scope.report().entries[0].reason) == (["moved", "shared"], reason)


def test_law_17_a_scope_in_part_of_a_checkpoint_leaves_the_rest_to_it() -> None:
    inner, x = Counted(), leaf()
    scope = offload.to_host(min_bytes=1)

    def inside(x: Tensor) -> Tensor:
        h = x.sin().exp()
        with scope:
            h = inner(h)
        return h.cos().exp()

    expected = torch.autograd.grad(inside(x).sum(), x)[0]
    inner.forwards = 0
    checkpoint(inside, x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, expected) and inner.forwards == 2
    assert any(e.reason == "recomputed by checkpoint" for e in scope.report().entries)


def test_law_17_a_second_graph_is_kept_and_correct() -> None:
    x = leaf()
    with offload.to_host(min_bytes=1) as scope:
        y = x.sin().exp()
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (found,) = torch.autograd.grad(dx.sum(), x)
    (dx,) = torch.autograd.grad(x.sin().exp().sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(dx.sum(), x)
    assert torch.equal(found, expected)
    assert "inside backward" in {e.reason for e in scope.report().entries}


# --- law 18


def test_law_18_hooks_of_others_inside_win_and_are_reported() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Sigmoid())
    with offload.to_host(min_bytes=1, root=model) as scope:
        with torch.autograd.graph.save_on_cpu():
            y = model(leaf())
    y.sum().backward()
    report = scope.report()
    assert report.moved_bytes == 0 and {e.decision for e in report.entries} == {"missed"}
    assert [e.name for e in report.entries][1:] == ["0", "1"]
    assert all("torch.autograd.graph.save_on_cpu" in e.reason for e in report.entries)


def test_law_18_other_threads_see_no_scope() -> None:
    found: list[Any] = []
    with offload.keep():
        thread = threading.Thread(target=lambda: found.append(top_saved_tensor_hooks()))
        thread.start()
        thread.join()
    assert found == [None]


def suspended() -> Iterator[None]:
    with offload.keep():
        yield


def test_law_18_a_scope_left_over_another_one_raises() -> None:
    generator = suspended()
    next(generator)
    with offload.to_host(min_bytes=1) as mine:
        with pytest.raises(FuseOpsError, match=r"keep\(\) was left while offload.to_host"):
            next(generator)
        assert top_saved_tensor_hooks()[0].scope is mine  # which goes on undisturbed
        leaf().sin()
    assert decisions(mine) == ["moved"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_law_18_scopes_left_in_any_order_leave_no_hooks(order: tuple[int, ...]) -> None:
    for kinds in itertools.product((offload.keep, offload.disabled), repeat=3):
        scopes = [kind() for kind in kinds]
        for scope in scopes:
            scope.__enter__()
        for place in order:
            with contextlib.suppress(FuseOpsError):
                scopes[place].__exit__(None, None, None)
        assert top_saved_tensor_hooks() is None


def test_a_scope_that_is_left_again_says_so() -> None:
    scope = offload.keep()
    scope.__enter__()
    scope.__exit__(None, None, None)
    with pytest.raises(FuseOpsError, match=r"keep\(\) was left a second time"):
        scope.__exit__(None, None, None)


def test_law_18_a_scope_left_over_hooks_of_others_raises() -> None:
    generator = suspended()
    next(generator)
    with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach):
        with pytest.raises(FuseOpsError, match="other saved-tensor hooks inside it"):
            next(generator)
        assert top_saved_tensor_hooks()[0] is Tensor.detach


def test_law_18_scopes_of_two_tasks_that_take_turns_raise() -> None:
    async def step() -> None:
        with offload.keep():
            await asyncio.sleep(0)

    async def both() -> list[Any]:
        return await asyncio.gather(step(), step(), return_exceptions=True)

    outcomes = asyncio.run(both())
    assert any(isinstance(o, FuseOpsError) and "await" in str(o) for o in outcomes)


def test_law_18_a_scope_left_in_another_thread_raises_and_stays_where_it_is() -> None:
    scope, errors = offload.keep(), []
    scope.__enter__()

    def leave() -> None:
        try:
            scope.__exit__(None, None, None)
        except FuseOpsError as error:
            errors.append(str(error))

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert len(errors) == 1 and "another thread" in errors[0]
    scope.__exit__(None, None, None)


def test_law_18_an_error_inside_is_not_replaced() -> None:
    generator = suspended()
    next(generator)
    with offload.keep(), pytest.raises(KeyError) as error:
        generator.throw(KeyError("mine"))
    assert "was left while" in error.value.__notes__[0]


def test_law_18_a_scope_is_not_entered_inside_itself() -> None:
    scope = offload.keep()
    with scope, pytest.raises(FuseOpsError, match="open already"):
        scope.__enter__()
    with scope:
        leaf().sin()
    assert decisions(scope) == ["kept"]


def test_law_18_torch_func_raises_inside_and_runs_under_disabled() -> None:
    x = torch.randn(3)
    with offload.to_host(min_bytes=1):
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            torch.func.grad(lambda t: t.sin().sum())(x)
        with offload.disabled():
            assert torch.equal(torch.func.grad(lambda t: t.sin().sum())(x), x.cos())


def test_law_18_models_deepcopy_and_pickle_inside_a_scope() -> None:
    model = nn.Sequential(nn.Linear(8, 8), fo.Sequential(fo.ops.Linear(8, 8), fo.ops.SiLU()))
    offload.mark_module(model[1][0], "keep")
    with offload.to_host(min_bytes=1, root=model):
        model(leaf())
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in twins:
        with offload.to_host(min_bytes=1, root=twin) as scope, fo.fusion(False):
            y = twin(leaf())
        y.sum().backward()
        assert scope.report().named("1.0.x")[0].reason == "marked keep"
        assert not twin[0]._forward_hooks and not twin[0]._forward_pre_hooks


# --- arguments, report


@pytest.mark.parametrize("min_bytes", [-1, 1.5, "1MiB", True])
def test_to_host_refuses_odd_sizes(min_bytes: Any) -> None:
    with pytest.raises(FuseOpsError, match="min_bytes"):
        offload.to_host(min_bytes=min_bytes)


def test_to_host_refuses_a_root_that_is_no_module() -> None:
    with pytest.raises(FuseOpsError, match=r"nn\.Module, got str"):
        offload.to_host(root="model")  # type: ignore[arg-type]


def test_the_report_is_a_table_and_plain_data() -> None:
    model = fo.Sequential({"fc": fo.ops.Linear(8, 8), "act": fo.ops.SiLU()})
    with fo.fusion(False), offload.to_host(min_bytes=1) as scope:
        y = model(leaf())
    y.sum().backward()
    report = scope.report()
    lines = str(report).splitlines()
    assert lines[0].split() == [
        "name",
        "op",
        "shape",
        "dtype",
        "bytes",
        "decision",
        "reason",
        "times",
    ]
    assert [line.split()[0] for line in lines[1:4]] == ["fc.x", "fc.weight", "act.x"]
    assert "moved 256 B in 2 copies, brought back 256 B in 2" in lines[4]
    data = report.to_json()
    assert data["moved_bytes"] == sum(e["nbytes"] for e in data["entries"]) == 256
    assert data["entries"][1]["reason"] == "parameter" and data["schema_version"] == 1


def test_the_log_has_one_line_a_scope(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "fuseops.offload"), offload.to_host(min_bytes=1):
        leaf().sin()
    assert [r.getMessage() for r in caplog.records] == [
        "to_host(min_bytes=1): moved 128 B in 1 copies, brought back 0 B in 0; kept 0 B; "
        "0 B on the host now"
    ]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_regions_run_inside_a_scope(backend: str) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = leaf()
    expected = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    model.compile(backend=backend, fullgraph=True)
    with offload.to_host(min_bytes=1) as scope:
        y = model(x)
    found = torch.autograd.grad(y.sum(), [x, *model.parameters()])
    assert all(map(torch.equal, expected, found))
    assert scope.report().moved_bytes > 0


# --- who follows modules


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_stay_and_gradients_are_exact() -> None:
    for layout in (torch.strided, torch.jagged):
        parts = [torch.randn(rows, 8) for rows in (3, 4)]
        x = torch.nested.nested_tensor(parts, layout=layout)
        model, expected = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), None
        everything = offload.Policy(min_bytes=1)
        for scope in (
            contextlib.nullcontext(),
            offload.keep(),
            offload.to_host(min_bytes=1, root=model),
            offload.Scheduler(model, "*", policy=everything),
        ):
            with scope:
                y = torch.nested.to_padded_tensor(model(x), 0.0)
            found = torch.autograd.grad(y.square().sum(), [*model.parameters()])
            expected = expected or found
            assert all(map(torch.equal, found, expected))
        reason = (
            "a nested tensor" if layout == torch.strided else "NestedTensor is not a plain tensor"
        )
        assert reason in {e.reason for e in scope.report().entries}


def test_who_follows_modules_hears_of_this_thread_alone_and_scopes_inside_take_nothing_away() -> (
    None
):
    entered: list[nn.Module] = []
    stacks: list[list[nn.Module]] = []

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with offload.keep():
                stacks.append(list(modules.thread.running))
            return x.sin()

    inner, elsewhere = Inner(), nn.ReLU()
    around = nn.Sequential(inner)

    def enter(module: nn.Module, args: Any) -> None:
        entered.append(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        entered.remove(module)
        stacks.append(list(modules.thread.running))

    with modules.calls_watched(enter, leave):
        other = threading.Thread(target=lambda: elsewhere(leaf()))
        other.start()
        other.join()
        around(leaf())
    assert stacks == [[around, inner], [around], []] and entered == []
