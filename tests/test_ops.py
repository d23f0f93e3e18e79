"""The laws of the contract, over every registered op."""

import copy
import importlib
import pkgutil
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fuseops as fo
from fuseops.ops import names as naming
from fuseops.ops.activations import ActivationSaved
from fuseops.ops.linear import to_high_precision
from fuseops.ops.op import Op
from fuseops.testing import assert_bwd_is_vjp
from fuseops.testing.catalogue import catalogue, entry, exported
from fuseops.testing.compare import difference
from fuseops.testing.step import training_step
from fuseops.testing.strategies import (
    LAYOUTS,
    Case,
    dtypes,
    filled,
    op_cases,
    recipes,
    with_layout,
)

OPS = exported()
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
# A third of the profile's examples, for laws that few drawn choices can break.
some = settings(max_examples=settings.default.max_examples // 3)


def reading(name: str) -> Any:
    """Every registered op that reads this side input, and keeps its rows."""
    ops = [op for op in OPS if name in op.reads and op in catalogue() and not entry(op).routing]
    assert ops
    return pytest.mark.parametrize("op", ops, ids=lambda op: op.__name__)


def left_out() -> list[str]:
    """What an op still misses of the two lines that it has beside its own file."""
    found = []
    for info in pkgutil.iter_modules(fo.ops.__path__):
        module = importlib.import_module(f"fuseops.ops.{info.name}")
        for name, op in vars(module).items():
            own = isinstance(op, type) and issubclass(op, Op) and op.__module__ == module.__name__
            base = own and any(issubclass(other, op) and other is not op for other in exported())
            if own and not base and not name.startswith("_") and not hasattr(fo.ops, name):
                line = f"from .{info.name} import {name} as {name}"
                where = "fuseops/ops/__init__.py, and its name to `__all__`"
                found.append(f"{name} is not listed: add `{line}` to {where}")
    return found + [
        f"{op.__name__} cannot be drawn: add `register(ops.{op.__name__}, lambda w: "
        f"ops.{op.__name__}(...))` to fuseops/testing/catalogue.py"
        for op in exported()
        if op not in catalogue()
    ]


def test_every_op_is_listed_and_can_be_drawn() -> None:
    assert not (missing := left_out()), "\n".join(missing)


def test_an_op_that_misses_a_line_is_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    class Halved(Op[Any]):
        __module__ = "fuseops.ops.norms"

        def fwd(self, x: Tensor) -> Tensor:
            return x / 2

    before = set(left_out())
    monkeypatch.setattr("fuseops.ops.norms.Halved", Halved, raising=False)
    (listed,) = set(left_out()) - before
    assert "`from .norms import Halved as Halved` to fuseops/ops/__init__.py" in listed
    monkeypatch.setattr("fuseops.ops.Halved", Halved, raising=False)
    (drawn,) = set(left_out()) - before
    assert "`register(ops.Halved, lambda w: ops.Halved(...))`" in drawn


@every_op
@given(data=st.data())
def test_bwd_is_the_vjp_of_fwd_and_saves_for_is_exact(
    op: type[Op[Any]], data: st.DataObject
) -> None:
    case = data.draw(op_cases(op))
    assert_bwd_is_vjp(case.model, case.x, **case.side)


def needed(case: Case) -> dict[str, Tensor]:
    """Everything of a case that a gradient can be asked of, by its name in `needs`."""
    sides = {name: t for name, t in case.side.items() if t.is_floating_point()}
    return {"x": case.x, **dict(case.model.named_parameters()), **sides}


def ask(case: Case, needs: set[str]) -> Case:
    """The case with gradients wanted of just these."""
    for name, t in needed(case).items():
        if name in dict(case.model.named_parameters()):
            t.requires_grad_(name in needs)
    x = case.x.detach().requires_grad_("x" in needs)
    side = {n: t.detach().requires_grad_(n in needs) for n, t in case.side.items()}
    return Case(case.model, x, side)


def results(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def y_of(case: Case) -> Tensor:
    return results(case.model(case.x, **case.side))[0]


def saved_names(case: Case) -> list[str]:
    """Names of all that the call saves, several names of one tensor each."""
    found: list[str] = []

    def pack(t: Tensor) -> Tensor:
        name = naming.take_name(t)
        found.extend(name.names if name else ["plain"])
        return t

    with naming.observe(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y_of(case)
    return found


@every_op
@given(data=st.data())
def test_only_what_a_needed_gradient_reads_is_saved(op: type[Op[Any]], data: st.DataObject) -> None:
    case = data.draw(op_cases(op))
    needs = data.draw(st.sets(st.sampled_from(sorted(needed(case)))))
    case = ask(case, needs)
    model = case.model
    fields = model.Saved._fields
    table = model.saves_for or {}
    allowed = {f"0.{f}" for need in needs for f in table.get(need, fields)}
    assert set(saved_names(case)) <= (set() if model.alias else allowed)


@every_op
@given(data=st.data(), recipe=recipes())
def test_y_does_not_depend_on_who_needs_a_gradient(
    op: type[Op[Any]], data: st.DataObject, recipe: Any
) -> None:
    """Evaluation computes what training does, and a checkpoint's first forward what its second does."""
    case = data.draw(op_cases(op, torch.float32, kinds=["normal"]))
    names = sorted(needed(case))
    found = []
    for needs in ([], names, data.draw(st.sets(st.sampled_from(names)))):
        torch.manual_seed(0)
        asked = ask(case._replace(model=copy.deepcopy(case.model)), set(needs))
        with fo.recipe(recipe, strict=True), torch.set_grad_enabled(bool(needs)):
            y = asked.model(asked.x, **asked.side)
            found.append(to_high_precision(results(y)[0]).detach())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@every_op
@some
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@given(data=st.data())
def test_a_batch_of_output_gradients_gives_what_each_alone_does(
    op: type[Op[Any]], data: st.DataObject
) -> None:
    case = data.draw(op_cases(op, kinds=["normal"]))
    assume(case.x.shape[-1] > 1)  # RoPE of no pairs passes x on, which torch has no rule for
    case = ask(case, set(needed(case)))
    y, wanted = y_of(case), [*needed(case).values()]
    dys = torch.randn(2, *y.shape, dtype=y.dtype)
    grad = partial(torch.autograd.grad, y, wanted, retain_graph=True, allow_unused=True)
    batched, each = grad(dys, is_grads_batched=True), [grad(dy) for dy in dys]
    for found, *expected in zip(batched, *each, strict=True):
        assert (found is None) == (None in expected)
        if found is not None:
            torch.testing.assert_close(found, torch.stack(expected), equal_nan=True)


@every_op
@some
@given(data=st.data())
def test_out_shape_is_the_shape_of_y(op: type[Op[Any]], data: st.DataObject) -> None:
    case = data.draw(op_cases(op))
    assert y_of(case).shape == case.model.out_shape(tuple(case.x.shape))


@every_op
@given(data=st.data())
def test_functional_call_differentiates_the_tensors_it_was_given(
    op: type[Op[Any]], data: st.DataObject
) -> None:
    case = data.draw(op_cases(op, kinds=["normal"]))
    case = ask(case, set(needed(case)))
    others = {n: (p.detach() * 2 + 1).requires_grad_() for n, p in case.model.named_parameters()}

    def run(swapped: bool) -> list[Tensor]:
        torch.manual_seed(0)
        out = (
            torch.func.functional_call(case.model, others, (case.x,), case.side)
            if swapped
            else case.model(case.x, **case.side)
        )
        wanted = [case.x, *(others.values() if swapped else case.model.parameters())]
        y = out if isinstance(out, Tensor) else out[0]
        return [y, *torch.autograd.grad(y.sum() * 3, wanted, materialize_grads=True)]

    given_others = run(swapped=True)
    case.model.load_state_dict(others, strict=False)
    for mine, theirs in zip(given_others, run(swapped=False), strict=True):
        assert torch.equal(mine, theirs)


@reading("offs")
@given(data=st.data())
def test_padding_rows_are_zero_and_leak_nothing(op: type[Op[Any]], data: st.DataObject) -> None:
    case = data.draw(op_cases(op, kinds=["normal"], layouts=["contiguous"]))
    end = int(case.side["offs"][-1])
    clean, dirty = case.x.clone(), case.x.clone()
    clean[end:], dirty[end:] = 0, float("nan")
    results = []
    for x, behind in ((clean, 0.0), (dirty, float("nan"))):
        x.requires_grad_()
        y = case.model(x, **case.side)
        dy = torch.ones_like(y)
        dy[end:] = behind
        grads = torch.autograd.grad(y, [x, *case.model.parameters()], dy)
        assert not y[end:].any() and not grads[0][end:].any()
        results.append([y, *grads])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@every_op
@some
@given(data=st.data())
def test_y_and_gradients_have_the_dtype_of_their_owner(
    op: type[Op[Any]], data: st.DataObject
) -> None:
    dtype = data.draw(dtypes())
    case = data.draw(op_cases(op, dtype, kinds=["normal"]))
    case = ask(case, set(needed(case)))
    y = y_of(case)
    ends = entry(op).width == "ends"  # a loss, which has the dtype of its sums
    assert y.dtype is (torch.promote_types(dtype, torch.float32) if ends else dtype)
    owners = [t for t in needed(case).values() if t.requires_grad]
    grads = torch.autograd.grad(y, owners, torch.ones_like(y), materialize_grads=True)
    assert [g.dtype for g in grads] == [t.dtype for t in owners]


def doubled(case: Case) -> Case:
    side = {n: t.double() if t.is_floating_point() else t for n, t in case.side.items()}
    return Case(copy.deepcopy(case.model).double(), case.x.double(), side)


@every_op
@some
@given(data=st.data())
def test_every_mix_of_dtypes_agrees_with_double(op: type[Op[Any]], data: st.DataObject) -> None:
    """x, parameters and side inputs of one dtype, or one of the three of another."""
    dtype, other = data.draw(dtypes()), data.draw(dtypes())
    apart = data.draw(st.sampled_from(["none", "x", "parameters", "side"]))
    # Two roundings of an element, of the result and of an operand of the backward.
    model, x, side = data.draw(op_cases(op, dtype, kinds=["normal"]))
    if isinstance(model, fo.ops.RMSNorm):
        model.eps = model.eps or 1e-5  # None depends on the dtype
    if apart == "side":
        side = {n: t.to(other) if t.is_floating_point() else t for n, t in side.items()}
    model = model.to(other) if apart == "parameters" else model
    case = Case(model, (x.to(other) if apart == "x" else x).clamp(-4, 4), side)
    wide = doubled(case)
    try:
        got = training_step(case.model, (case.x,), case.side, all_inputs=True)
    except RuntimeError as error:
        assert model.autocast and apart in ("x", "parameters"), "a GEMM takes operands of one dtype"
        assert "dtype" in str(error)
        return
    if isinstance(model, fo.ops.Router):  # in another dtype a near tie goes to another expert
        wide = wide._replace(
            model=wide.model.with_given_experts(), side={"chosen": got.outputs["output[1]"]}
        )
    expected = training_step(wide.model, (wide.x,), wide.side, all_inputs=True)
    # Every sum is accumulated in float32: one over n terms errs by about sqrt(n) roundings of its partial sums.
    longest = max(case.x.shape) ** 0.5
    coarsest = max(torch.finfo(d).eps for d in (dtype, other if apart != "none" else dtype))
    tol = 16 * coarsest + 8 * longest * torch.finfo(torch.float32).eps
    for mine, theirs in ((got.outputs, expected.outputs), (got.grads, expected.grads)):
        for name, t in theirs.items():
            one = mine[name]
            found = difference(name, one if one is None else one.double(), t.double(), tol)
            assert found is None or found.worst < tol, found


@every_op
@some
@given(data=st.data())
def test_a_half_overflows_where_its_numbers_do(op: type[Op[Any]], data: st.DataObject) -> None:
    """To an infinity of the right sign, not in between: what is computed in float32 overflows at the store only."""
    case = data.draw(op_cases(op, torch.float16, kinds=["large"]))
    if isinstance(case.model, fo.ops.Router):
        return  # its numbers are float32, and the choice is discrete
    got = training_step(case.model, (case.x,), case.side, all_inputs=True)
    wide = doubled(case)
    expected = training_step(wide.model, (wide.x,), wide.side, all_inputs=True)
    eps, most = torch.finfo(torch.float16).eps, torch.finfo(torch.float16).max
    for mine, theirs in ((got.outputs, expected.outputs), (got.grads, expected.grads)):
        for name, t in theirs.items():
            if not t.is_floating_point() or mine[name].dtype is not torch.float16:
                continue
            over = t.abs() > 1.01 * most
            under = t.abs() < 0.99 * most
            assert torch.equal(mine[name][over], (t.sign() * torch.inf).half()[over]), name
            assert mine[name][under].isfinite().all(), name
            # one rounding, or two where a bias is added behind a product
            if name.startswith("output"):
                if getattr(case.model, "down", None) is not None:
                    continue  # what lies between its two small products is rounded too, and they cancel
                one, least = mine[name][under].double(), eps * torch.finfo(torch.float16).tiny
                assert not difference(name, one, t[under], 2 * eps, atol=least)


@every_op
@some
@given(data=st.data())
def test_strides_change_nothing(op: type[Op[Any]], data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(LAYOUTS[1:]))
    case = data.draw(op_cases(op, layouts=["contiguous"], kinds=["normal"]))
    x = with_layout(case.x, layout)
    # "expanded" are other values, which rows and their places cannot take
    other = data.draw(st.sampled_from(["contiguous", "transposed", "sliced", "inside"]))
    side = {n: with_layout(t, other) for n, t in case.side.items()}
    strided = training_step(case.model, (x,), side, all_inputs=True)
    plain = training_step(
        case.model,
        (x.contiguous(),),
        {n: t.contiguous() for n, t in side.items()},
        all_inputs=True,
    )
    for mine, theirs in zip(strided[:2], plain[:2], strict=True):
        for name in theirs:
            assert difference(name, mine[name], theirs[name], 1e-12) is None, name


@every_op
@some
@given(data=st.data())
def test_strided_output_gradients_change_nothing(op: type[Op[Any]], data: st.DataObject) -> None:
    case = data.draw(op_cases(op, kinds=["normal"]))
    case = ask(case, set(needed(case)))
    layout = data.draw(st.sampled_from(LAYOUTS))
    torch.manual_seed(0)
    y = y_of(case)
    dy = with_layout(filled(y.shape, y.dtype, "normal", 1), layout)
    owners = [t for t in needed(case).values() if t.requires_grad]
    results = [
        torch.autograd.grad(y, owners, d, retain_graph=True, materialize_grads=True)
        for d in (dy, dy.contiguous())
    ]
    for mine, theirs in zip(*results, strict=True):
        assert difference("gradient", mine, theirs, 1e-12) is None


@every_op
@some
@given(data=st.data())
def test_one_row_of_nan_stays_one_row(op: type[Op[Any]], data: st.DataObject) -> None:
    """In x, in a side input with a value a row, or in the gradient of y: y and dx have it in that row alone."""
    case = data.draw(op_cases(op, kinds=["normal"], layouts=["contiguous"]))
    rows = case.x.shape[0]
    if case.x.dim() != 2 or rows < 2 or isinstance(case.model, fo.ops.Reshape):
        return
    if entry(op).routing or case.model.out_shape(tuple(case.x.shape))[:1] != (rows,):
        return  # its rows move, or become one number
    by_row = [n for n, t in case.side.items() if t.is_floating_point() and t.shape[:1] == (rows,)]
    place, row = (
        data.draw(st.sampled_from(["x", "dy", *by_row])),
        data.draw(st.integers(0, rows - 1)),
    )

    def y_and_dx(hit: bool) -> list[Tensor]:
        leaves = ask(
            Case(case.model, case.x.clone(), {n: t.clone() for n, t in case.side.items()}),
            {"x", *by_row},
        )
        dy = filled(case.model.out_shape(tuple(case.x.shape)), case.x.dtype, "normal", 1)
        with torch.no_grad():
            {"x": leaves.x, "dy": dy, **leaves.side}[place][row] *= float("nan") if hit else 1.0
        torch.manual_seed(0)
        y = y_of(leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves.x, dy, materialize_grads=True)]

    others = torch.arange(rows) != row
    for mine, theirs in zip(y_and_dx(True), y_and_dx(False), strict=True):
        assert torch.equal(mine[others], theirs[others])


@pytest.mark.parametrize("op", [fo.ops.Permute, fo.ops.Combine], ids=lambda op: op.__name__)
def test_rows_that_are_not_there_are_refused(op: type[Op[Any]]) -> None:
    routing = fo.Routing.from_topk(torch.zeros(5, 2, dtype=torch.int64), torch.ones(5, 2))
    x = torch.randn(5 if op is fo.ops.Permute else 10, 4)
    assert op(2)(x, routing).shape[1] == 4
    with pytest.raises(fo.FuseOpsError, match=r"offs.*group 0 ends at row 11"):
        op(2)(x, routing._replace(offs=routing.offs + 1))


def test_a_need_that_fwd_does_not_take_is_refused() -> None:
    with pytest.raises(fo.FuseOpsError, match=r"saves_for has a need 'y'.*\['x'\]"):

        class Wrong(Op[ActivationSaved]):
            saves_for = {"y": ("x",)}

            def fwd(self, x: Tensor) -> fo.Out:
                return fo.Out(x, ActivationSaved(x))

            def bwd(self, saved: ActivationSaved, dy: Tensor) -> fo.Grads:
                return fo.Grads(dy)


def test_saves_for_without_a_bwd_is_refused() -> None:
    with pytest.raises(fo.FuseOpsError, match=r"Forgotten declares saves_for, and no bwd"):

        class Forgotten(Op[ActivationSaved]):
            saves_for = {"x": ("x",)}

            def fwd(self, x: Tensor) -> fo.Out:
                return fo.Out(x, ActivationSaved(x))


def test_an_op_without_fwd_says_so() -> None:
    class Empty(fo.Op):
        pass

    with pytest.raises(fo.FuseOpsError, match=r"Empty defines no fwd"):
        fo.Sequential(Empty())(torch.ones(2))


@pytest.mark.parametrize("y", [None, (torch.ones(2), torch.ones(2)), [1.0]])
def test_an_op_that_returns_no_tensor_is_named(y: object) -> None:
    class Odd(fo.Op):
        def fwd(self, x: Tensor) -> Any:
            return y

    with pytest.raises(fo.FuseOpsError, match=rf"Odd\.fwd returned {type(y).__name__}"):
        fo.Sequential(Odd(), fo.ops.SiLU())(torch.ones(2))
