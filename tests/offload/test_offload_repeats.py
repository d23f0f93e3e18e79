"""What a scheduler finds out once: the same as finding it out each time, and at little cost a tensor."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from counted import calls_in
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fuseops as fo
from fuseops import offload
from fuseops.offload import records, scopes
from fuseops.offload.report import Entry
from fuseops.offload.storages import StorageMap
from fuseops.ops.names import SavedName

D = 8


class Block(nn.Module):
    """Ops, a plain module, and a tensor that both of them save."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = fo.Residual(
            {
                "norm": fo.ops.RMSNorm(D),
                "up": fo.ops.Linear(D, 2 * D),
                "act": fo.ops.SwiGLU(),
                "down": fo.ops.Linear(D, D),
            }
        )
        self.out = nn.Sequential(nn.Linear(D, D), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        return x + self.out(y) * y


class Model(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.register_buffer("table", torch.zeros(5, D))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


Change = Callable[[Model], None]


def mark(path: str, what: str | None) -> Change:
    return lambda model: offload.mark_module(model.get_submodule(path), what)


def put_in(name: str, make: Callable[[], nn.Module], what: str | None) -> Change:
    """Another op in the place of one, marked before it is there."""

    def change(model: Model) -> None:
        torch.manual_seed(1)
        op = make()
        offload.mark_module(op, what)
        setattr(model.blocks[1].mlp, name, op)

    return change


def freeze(model: Model) -> None:
    model.blocks[1].mlp.up.weight.requires_grad_(not model.blocks[1].mlp.up.weight.requires_grad)


def replace_plain(model: Model) -> None:
    """Another module at the path of one, in whose place it saves."""
    model.blocks[1].out[1] = nn.Sigmoid()


def replace_weight(model: Model) -> None:
    """Another parameter, alike in all but its values."""
    model.blocks[1].mlp.up.weight = nn.Parameter(torch.ones(2 * D, D))


class Forgets(dict[Any, Any]):
    """What is put in is not there."""

    def __setitem__(self, key: Any, value: Any) -> None: ...


CHANGES: list[Change] = [
    *(
        mark(f"blocks.1{path}", what)
        for path in ("", ".mlp.act", ".out.1")
        for what in ("keep", "offload", None)
    ),
    *(put_in("act", fo.ops.SwiGLU, what) for what in ("keep", "offload", None)),
    put_in("up", lambda: fo.ops.Linear(D, 2 * D, bias=False), None),
    freeze,
    replace_plain,
    replace_weight,
]
PLANS: list[dict[str, Any]] = [
    {"plan": {"blocks.1.mlp.act.x": "offload", "blocks.2.out.0.leaf.0": "keep"}},
    {"policy": offload.Policy(min_bytes=1)},
    {"policy": offload.Policy(min_bytes=1, offload="**.x")},
    {"policy": offload.Policy(min_bytes=1, fraction=0.5)},
    {"policy": offload.Policy(min_bytes=200), "plan": {"blocks.1.mlp.act.x": "keep"}},
]


def marked(model: Model, x: Tensor) -> Tensor:
    offload.mark_not_offload(x)
    return x


def of_more_rows(model: Model, x: Tensor) -> Tensor:
    """x in a storage that has more bytes."""
    return torch.cat([x, x])[: len(x)]


def of_the_model(model: Model, x: Tensor) -> Tensor:
    model.table[: len(x)] = x
    return model.table[: len(x)]


def fresh(model: Model, x: Tensor) -> Tensor:
    return x


def step(
    model: Model, rows: int, dtype: torch.dtype | None, given: Callable[[Model, Tensor], Tensor]
) -> list[Tensor]:
    torch.manual_seed(rows)
    x = given(model, torch.randn(rows, D)).detach().requires_grad_()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        model(x).sum().backward()
    found = [p.grad for p in (x, *model.parameters()) if p.grad is not None]
    model.zero_grad()
    return found


STEPS = st.tuples(
    st.lists(st.sampled_from(CHANGES), max_size=1),
    st.sampled_from([1, 3, 5]),
    st.sampled_from([None, None, torch.bfloat16]),
    st.sampled_from([fresh, marked, of_more_rows, of_the_model]),
    st.sampled_from([1, 4]),  # how often: what a node saves is known after some
)


PLAIN = (3, None, fresh, 1)


@settings(deadline=None)
@given(st.sampled_from(PLANS), st.lists(STEPS, min_size=2, max_size=5))
@example(PLANS[1], [([], *PLAIN), ([mark("blocks.1.mlp.act", "keep")], *PLAIN)])
@example(PLANS[1], [([], *PLAIN), ([mark("blocks.1.out.1", "keep")], *PLAIN)])
@example(PLANS[1], [([], *PLAIN), ([put_in("act", fo.ops.SwiGLU, "keep")], *PLAIN)])
@example(PLANS[1], [([], *PLAIN), ([replace_plain], *PLAIN)])
@example(PLANS[1], [([], *PLAIN), ([], 3, None, marked, 1)])
@example(PLANS[1], [([], *PLAIN), ([], 3, torch.bfloat16, fresh, 1)])
@example(PLANS[4], [([], 1, None, fresh, 1), ([], 5, None, fresh, 1)])
@example(PLANS[0], [([], 3, None, fresh, 4), ([mark("blocks.1.mlp.act", "keep")], *PLAIN)])
@example(PLANS[0], [([], 3, None, fresh, 4), ([replace_weight], 3, None, fresh, 4)])
@example(PLANS[2], [([], 3, None, fresh, 4), ([], 3, None, marked, 4)])
@example(PLANS[0], [([], 1, None, marked, 4), ([], 1, None, fresh, 1)])
@example(PLANS[2], [([], 3, None, fresh, 4), ([], 3, None, of_more_rows, 4)])
@example(PLANS[2], [([], 5, None, fresh, 4), ([], 5, None, of_the_model, 4)])
def test_what_is_found_once_is_what_would_be_found_each_time(
    options: dict[str, Any], steps: list[Any]
) -> None:
    model, other = Model(), Model()
    quick, slow = (offload.Scheduler(m, "blocks.*", **options) for m in (model, other))
    slow._scope._cacheable, slow._scope._labels._kinds = False, Forgets()
    quick.attach(), slow.attach()
    try:
        for changes, *how, times in steps:
            for change in changes:
                change(model), change(other)
            for _ in range(times):
                assert all(map(torch.equal, step(model, *how), step(other, *how)))
                assert quick._scope.names == slow._scope.names
            assert quick.report().entries == slow.report().entries
    finally:
        quick.detach(), slow.detach()


@pytest.mark.parametrize(
    "options", [{"plan": {}}, {"policy": offload.Policy(min_bytes=1 << 30)}], ids=["plan", "policy"]
)
def test_a_tensor_that_stays_costs_few_calls(options: dict[str, Any]) -> None:
    model = Model()
    run = lambda: step(model, 5, None, fresh)  # noqa: E731
    settled = lambda: min(calls_in(run) for _ in range(6))  # noqa: E731  a node is known after a few steps
    plain = settled()
    with offload.Scheduler(model, "blocks.*", **options) as scheduler:
        more = settled() - plain
        seen = lambda: sum(e.times for e in scheduler.report().entries)  # noqa: E731
        before = seen()
        run()
        saved = seen() - before

    assert 0 < more <= 25 * saved  # those of the layer and its modules among them


WRITTEN: dict[str, Callable[[], nn.Module]] = {
    "fc.x": lambda: fo.Sequential({"fc": fo.ops.Linear(D, D), "act": fo.ops.SwiGLU()}),
    "norm.x": lambda: fo.Residual({"norm": fo.ops.RMSNorm(D), "fc": fo.ops.Linear(D, D)}),
}
WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda model: nullcontext(),
    "kept": lambda model: offload.Scheduler(model, "*", plan={}),
    "moved": lambda model: offload.Scheduler(model, "*", policy=offload.Policy(min_bytes=1)),
    "to_host": lambda model: offload.to_host(min_bytes=1, root=model),
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps", [0, 5])
def test_a_write_is_named_in_every_step(name: str, way: str, steps: int) -> None:
    model = nn.Sequential(WRITTEN[name](), nn.Tanh(), nn.Tanh())
    with WAYS[way](model):
        for _ in range(steps):
            model(torch.randn(3, D, requires_grad=True) * 1).sum().backward()
        x = torch.randn(3, D, requires_grad=True) * 1
        y = model(x)
        x.add_(1)
        said = rf"{name}' of \w+ was modified in place before its backward ran"
        with pytest.raises(fo.errors.InPlaceError, match=said):
            y.sum().backward()


def test_bytes_of_a_storage_that_two_tensors_share_in_some_steps_count_once() -> None:
    totals = []
    for cacheable in (True, False):
        model = nn.Sequential(fo.Sequential(fo.ops.ScaledSwiGLU()))
        with offload.Scheduler(model, "*", plan={}) as scheduler:
            scheduler._scope._cacheable = cacheable
            for shared in (False, False, False, False, True):
                whole = torch.randn(3 * 2 * D + 3)
                x, probs = whole[: 3 * 2 * D].view(3, 2 * D), whole[3 * 2 * D :]
                if not shared:
                    x, probs = x.clone(), probs.clone()
                model[0](x.requires_grad_(), probs=probs).sum().backward()
        totals.append([(e.name, e.nbytes, e.times) for e in scheduler.report().entries])
    assert totals[0] == totals[1]


class SavedBefore(nn.Module):
    """Saves what an op saves, before it does, in some of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.op = fo.ops.Linear(D, D)
        self.before = False

    def forward(self, x: Tensor) -> Tensor:
        h = x.sin()
        return (h.cos() if self.before else 0) + self.op(h)


def test_what_an_offloaded_storage_has_is_shared_in_the_steps_that_offload_it() -> None:
    found = []
    for cacheable in (True, False):
        model = nn.Sequential(SavedBefore(), *(nn.Tanh() for _ in range(5)))
        with offload.Scheduler(model, "*", plan={"0.SinBackward0.0": "offload"}) as scheduler:
            scheduler._scope._cacheable = cacheable
            for model[0].before in (False, False, False, False, True):
                model(torch.randn(3, D, requires_grad=True)).sum().backward()
        found.append([(e.name, e.decision, e.times) for e in scheduler.report().entries])
    assert found[0] == found[1]
    assert ("0.op.x", "shared", 1) in found[0]


def test_hooks_around_a_scheduler_see_nothing_of_its_layers() -> None:
    model, seen = Model(), []
    with offload.Scheduler(model, "blocks.*", plan={}):
        for _ in range(5):
            with torch.autograd.graph.saved_tensors_hooks(seen.append, lambda t: t):
                y = model(torch.randn(3, D, requires_grad=True))
            y.sum().backward()
    assert not seen


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of saved tensors that a scope finds out about, from here on."""
    names: list[str] = []
    judge = scopes.Scope._decide

    def noted(scope: scopes.Scope, t: Tensor, named: SavedName) -> records.Verdict:
        names.append(named.name)
        return judge(scope, t, named)

    monkeypatch.setattr(scopes.Scope, "_decide", noted)
    return names


class Passing(nn.Module):
    """A layer that makes a module for one call, and asks for a report in the midst of it."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[nn.Module]] = []
        self.report: Callable[[], offload.Report] | None = None
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        module = nn.Tanh()
        self.made.append(weakref.ref(module))
        y = module(x * 2)
        if self.report is not None:
            self.seen.append(sum(e.times for e in self.report().entries))
        return y.exp()


def test_a_module_that_is_made_for_a_call_is_named_by_its_layer_and_not_kept() -> None:
    model = nn.Sequential(Passing())
    with offload.Scheduler(model, "*", plan={}) as scheduler:
        for _ in range(3):
            model(torch.randn(3, D, requires_grad=True)).sum().backward()
            gc.collect()
            assert model[0].made.pop()() is None
    report = scheduler.report()
    assert {e.name for e in report.entries} == {"0.TanhBackward0.0", "0.ExpBackward0.0"}
    assert {e.times for e in report.entries} == {3}


def test_a_module_that_was_replaced_is_let_go() -> None:
    model = Model()
    with offload.Scheduler(model, "blocks.*", plan={}) as scheduler:
        step(model, 5, None, fresh)
        gone = [weakref.ref(model.blocks[1].out[1]), weakref.ref(model.blocks[1].mlp.act)]
        replace_plain(model), put_in("act", fo.ops.SwiGLU, None)(model)
        for _ in range(2):
            step(model, 5, None, fresh)
        gc.collect()
        assert [of() for of in gone] == [None, None]
        paths = scheduler._scope._labels.paths
        assert not {"blocks.1.out.1", "blocks.1.mlp.act"} & {*paths.values()}
        assert "blocks.1.out.0" in paths.values()
    assert scheduler.report().entries


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.cos()).exp()


def test_a_layer_in_a_layer_is_reported_where_it_runs() -> None:
    model = nn.Sequential(Outer())
    with offload.Scheduler(model, ["0", "0.inner"], plan={}) as scheduler:
        model(torch.randn(3, D, requires_grad=True)).sum().backward()
    names = [e.name for e in scheduler.report().entries]
    assert names == ["0.leaf.0", "0.inner.TanhBackward0.0", "0.ExpBackward0.0"]


def test_a_report_in_the_midst_of_a_layer_has_what_is_saved_so_far() -> None:
    model = nn.Sequential(Passing())
    with offload.Scheduler(model, "*", plan={}) as scheduler:
        model[0].report = scheduler.report
        for _ in range(2):
            model(torch.randn(3, D, requires_grad=True)).sum().backward()
    assert model[0].seen == [1, 3]


def test_shapes_without_end_are_not_all_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scopes, "MAX_VERDICTS", 50)
    model = Model()
    with offload.Scheduler(model, "blocks.*", plan={}) as scheduler:
        for rows in range(1, 6):
            step(model, rows, None, fresh)
            assert 0 < len(scheduler._scope._verdicts) <= 50


@settings(max_examples=10)
@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    most=st.integers(1, 4),
    moved=st.booleans(),
)
def test_shapes_without_end_are_counted_and_not_all_listed(
    rows: list[int], most: int, moved: bool
) -> None:
    """The first shapes as if there were no bound, the others together: the sums are the same."""

    def report(most: int) -> offload.Report:
        model = Model(1)
        policy = offload.Policy(min_bytes=64 if moved else 1 << 20)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(records, "MAX_LISTED", most)
            with offload.Scheduler(model, "blocks.*", policy=policy) as scheduler:
                for n in rows:
                    step(model, n, None, fresh)
                return scheduler.report()

    def sums(report: offload.Report) -> dict[Any, list[int]]:
        found: dict[Any, list[int]] = {}
        for e in report.entries:
            key = e.name, e.op, e.dtype, e.decision, e.reason.partition("; in other shapes")[0]
            times, nbytes = found.get(key, (0, 0))
            found[key] = [times + e.times, nbytes + e.times * e.nbytes]
        return found

    def lines(entries: Iterable[Entry]) -> Counter[str]:
        return Counter(e.name for e in entries)

    bounded, whole = report(most), report(1 << 30)
    listed = [e for e in bounded.entries if "in other shapes" not in e.reason]
    assert {(*e[:-1],) for e in listed} <= {(*e[:-1],) for e in whole.entries}
    assert lines(listed) == {name: min(n, most) for name, n in lines(whole.entries).items()}
    alike, wanted = sums(bounded), sums(whole)
    assert len(bounded.entries) - len(listed) <= len(wanted) == len(alike)
    for key, (times, nbytes) in alike.items():
        assert times == wanted[key][0] and abs(nbytes - wanted[key][1]) <= times / 2
    totals = bounded.moved_bytes, bounded.moved_count, bounded.back_bytes
    assert totals == (whole.moved_bytes, whole.moved_count, whole.back_bytes)


@pytest.mark.parametrize(
    "scope_of",
    [
        lambda model: offload.Scheduler(model, "blocks.*", plan={}),
        lambda model: offload.keep(),  # knows no root
        lambda model: offload.to_host(),
    ],
    ids=["scheduler", "keep", "to_host"],
)
def test_nothing_is_judged_twice(scope_of: Callable[[Model], Any], judged: list[str]) -> None:
    model = Model()
    with scope_of(model):
        for _ in range(3):
            step(model, 5, None, fresh)
        assert judged
        judged.clear()
        step(model, 5, None, fresh)
    assert not judged


def three_ops() -> tuple[fo.Sequential, Tensor]:
    torch.manual_seed(0)
    ops = fo.ops.Linear(64, 128), fo.ops.SwiGLU(), fo.ops.Linear(64, 64)
    return fo.Sequential(*ops), torch.randn(32, 64, requires_grad=True)


def scoped_step(model: nn.Module, x: Tensor, **options: Any) -> offload.Report:
    with offload.to_host(**options) as scope:
        y = model(x).sum()
    y.backward()
    return scope.report()


@pytest.mark.parametrize("min_bytes", [0, 1 << 20])
def test_a_scope_of_each_step_judges_what_ops_save_once(min_bytes: int, judged: list[str]) -> None:
    model, x = three_ops()
    first = scoped_step(model, x, min_bytes=min_bytes)
    assert len(judged) == 4
    second = scoped_step(model, x, min_bytes=min_bytes)
    assert len(judged) == 4
    assert second.entries == first.entries and second.moved_bytes == first.moved_bytes
    offload.mark_module(model[0], "keep")
    assert scoped_step(model, x, min_bytes=min_bytes).named("0.x")[0].reason == "marked keep"
    assert scoped_step(model, x, min_bytes=7).named("1.x")[0].reason == "min_bytes=7 reached"


def test_a_scope_that_has_seen_a_gpu_is_another_kind() -> None:
    model, x = three_ops()
    scoped_step(model, x, min_bytes=3)
    with offload.to_host(min_bytes=3) as scope:
        scope._on_gpu = True
        model(x)
    assert "on the CPU" in scope.report().named("0.x")[0].reason


@pytest.mark.parametrize("min_bytes, most", [(0, 480), (1 << 20, 200)])
def test_a_step_with_a_scope_of_its_own_costs_few_calls(min_bytes: int, most: int) -> None:
    """Two tensors that move (or stay) and two parameters, the scope itself among it."""
    model, x = three_ops()

    def plain() -> None:
        model(x).sum().backward()

    def scoped() -> None:
        with offload.to_host(min_bytes=min_bytes):
            y = model(x).sum()
        y.backward()

    for _ in range(3):
        plain(), scoped()
    assert calls_in(scoped) - calls_in(plain) <= most


def test_storages_that_are_gone_are_forgotten() -> None:
    """What is known of others stays, however many have left in this thread."""
    known, alive = StorageMap[int](), [torch.empty(1).untyped_storage() for _ in range(8)]
    for k in range(1000):
        storage = alive[k] if k < len(alive) else torch.empty(1).untyped_storage()
        known.set(storage, k)
        assert known.get(storage) == k
    assert [*map(known.get, alive)] == [*range(len(alive))]
    assert len(known.entries) <= 2 * len(alive) + 64
