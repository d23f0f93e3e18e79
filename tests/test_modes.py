"""Ops, the patterns of rules and chains under what torch does to any module: copies, modes, meta tensors, checkpoints,
hooks, writes in place, other dtypes.
"""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops.ops.op import Op
from fuseops.rules.builtin_rules import BUILTIN_RULES
from fuseops.testing.catalogue import exported
from fuseops.testing.compare import difference, tolerance
from fuseops.testing.strategies import Case, chains, op_cases, rule_cases
from fuseops.torch_private import replace_call, storage_id

SOFT = ("normal", "normal", "constant", "zeros")
Call = Callable[..., Any]


def ops() -> st.SearchStrategy[Case]:
    return st.sampled_from(exported()).flatmap(op_cases)


def models() -> st.SearchStrategy[Case]:
    """Everything that can be drawn: an op alone, the pattern of a rule, a chain."""
    patterns = st.sampled_from(BUILTIN_RULES).flatmap(lambda rule: rule_cases(rule, kinds=SOFT))
    return st.one_of(ops(), patterns, chains(BUILTIN_RULES, kinds=SOFT))


def results(out: Any) -> tuple[Tensor, ...]:
    return (out,) if isinstance(out, Tensor) else tuple(out)


def asking(case: Case) -> Case:
    """The case with leaves of its own, all of which want a gradient; parameters stay frozen where they are."""
    leaf = lambda t: copy.deepcopy(t.detach()).requires_grad_(t.is_floating_point())  # noqa: E731
    return case._replace(x=leaf(case.x), side={n: leaf(t) for n, t in case.side.items()})


def owners(case: Case) -> list[Tensor]:
    """What of a case wants a gradient."""
    leaves = [case.x, *case.side.values(), *case.model.parameters()]
    return [t for t in leaves if t.requires_grad]


def gradients(ys: tuple[Tensor, ...], case: Case, **options: Any) -> tuple[Tensor, ...]:
    """Of all results, for random output gradients that are always the same."""
    found = [y for y in ys if y.requires_grad]
    generator = torch.Generator().manual_seed(1)
    dys = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in found]
    dys = [d.to(y) for d, y in zip(dys, found, strict=True)]
    return torch.autograd.grad(found, owners(case), dys, materialize_grads=True, **options)


def run(case: Case, call: Call | None = None) -> list[Tensor]:
    """All results and gradients of one call, by `call` or of the model."""
    case = asking(case)
    torch.manual_seed(0)
    ys = results((case.model if call is None else call)(case.x, **case.side))
    if not any(y.requires_grad for y in ys):
        return list(ys)
    return [*ys, *gradients(ys, case)]


def assert_same(got: list[Tensor], expected: list[Tensor], equal: Call = torch.equal) -> None:
    assert [(t.dtype, t.shape) for t in got] == [(t.dtype, t.shape) for t in expected]
    assert all(map(equal, got, expected))


# --- copies


def pickled(model: nn.Module) -> nn.Module:
    copied: nn.Module = pickle.loads(pickle.dumps(model))
    return copied


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def filled_from_a_state_dict(model: nn.Module, assign: bool) -> nn.Module:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for t in (*other.parameters(), *other.buffers()):
            t.zero_()
    other.load_state_dict(copy.deepcopy(model.state_dict()), assign=assign)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        mine.requires_grad_(theirs.requires_grad)
    return other


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickled,
    "torch.save": saved,
    "load_state_dict": partial(filled_from_a_state_dict, assign=False),
    "load_state_dict(assign=True)": partial(filled_from_a_state_dict, assign=True),
}


@given(case=models(), data=st.data())
def test_a_copy_of_a_model_that_ran_is_that_model(case: Case, data: st.DataObject) -> None:
    expected = run(case)
    copied = COPIES[data.draw(st.sampled_from(sorted(COPIES)))](case.model)
    assert_same(run(case._replace(model=copied)), expected)


def of_the_original(*args: Any, **side: Any) -> Any:
    raise AssertionError("a copy ran what its original is compiled to")


@given(case=models(), how=st.sampled_from([copy.copy, copy.deepcopy, pickled, saved]))
def test_a_copy_of_a_compiled_model_runs_itself(case: Case, how: Call) -> None:
    """`Module.compile` binds what it makes to the module."""
    expected = run(case)
    for module in case.model.modules():
        replace_call(module, of_the_original)
    copied = how(case.model)
    for module in [*copied.modules()][1:] if how is copy.copy else ():
        replace_call(module, None)  # both have these
    assert_same(run(case._replace(model=copied)), expected)


def replica(model: nn.Module) -> nn.Module:
    """As torch.nn.DataParallel makes one for another device: its tensors are attributes, of other values here."""
    made: nn.Module = model._replicate_for_data_parallel()
    for name, child in model._modules.items():
        made._modules[name] = child and replica(child)
    for name, p in model._parameters.items():
        if p is None:
            made._parameters[name] = None
        else:
            setattr(made, name, p * 1.5)
    return made


@given(case=st.one_of(ops().filter(lambda case: [*case.model.parameters()]), models()))
def test_a_replica_computes_with_its_own_tensors(case: Case) -> None:
    other = copy.deepcopy(case.model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    torch.manual_seed(0)
    expected = results(other(case.x, **case.side))
    case.model(case.x, **case.side)
    torch.manual_seed(0)
    assert_same(list(results(replica(case.model)(case.x, **case.side))), list(expected))


# --- modes


@given(case=models(), mode=st.sampled_from([torch.no_grad, torch.inference_mode]))
def test_a_call_without_gradients_gives_the_same(case: Case, mode: Call) -> None:
    torch.manual_seed(0)
    expected = results(case.model(case.x, **case.side))
    with mode():
        torch.manual_seed(0)
        got = results(case.model(case.x, **case.side))
        assert not any(t.requires_grad for t in got)
        assert_same(list(got), [t.detach() for t in expected])


@given(case=models())
def test_tensors_of_inference_mode_are_taken(case: Case) -> None:
    torch.manual_seed(0)
    expected = results(case.model(case.x, **case.side))
    with torch.inference_mode():
        case = case._replace(
            x=copy.deepcopy(case.x), side={n: copy.deepcopy(t) for n, t in case.side.items()}
        )
        assert case.x.is_inference()
        torch.manual_seed(0)
        got = results(case.model(case.x, **case.side))
        assert_same(list(got), [t.detach() for t in expected])


def on_meta(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


@given(case=models())
def test_meta_tensors_have_the_shapes_of_real_ones(case: Case) -> None:
    expected = run(case)
    model = copy.deepcopy(case.model).to("meta")
    got = run(Case(model, on_meta(case.x), {n: on_meta(t) for n, t in case.side.items()}))
    assert_same(got, expected, lambda a, b: a.is_meta)


# --- what torch does around a call


@given(case=models())
def test_a_checkpoint_changes_nothing(case: Case) -> None:
    def checkpointed(x: Tensor, **side: Tensor) -> Any:
        return checkpoint(partial(case.model, **side), x, use_reentrant=False)

    assert_same(run(case, checkpointed), run(case))


HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)


@given(case=models(), kind=st.sampled_from(HOOKS), data=st.data())
def test_a_hook_that_only_looks_changes_nothing(case: Case, kind: str, data: st.DataObject) -> None:
    expected = run(case)
    model = copy.deepcopy(case.model)
    hooked = data.draw(st.sampled_from([*model.modules()]))
    looked: list[Any] = []
    getattr(hooked, kind)(lambda *given: looked.append(given[0]))
    # hooked ops are in no rule
    tol = tolerance([case.x])
    got = run(case._replace(model=model))
    assert_same(got, expected, lambda a, b: difference("", a, b, tol) is None)
    assert looked or "backward" in kind


@given(case=models())
def test_a_second_derivative_is_refused_or_right(case: Case) -> None:
    case = asking(case)

    def second() -> list[Tensor]:
        torch.manual_seed(0)
        first = gradients(results(case.model(case.x, **case.side)), case, create_graph=True)
        total = sum(g.square().sum() + t.sum() for g, t in zip(first, owners(case), strict=True))
        return list(torch.autograd.grad(total, owners(case), materialize_grads=True))

    try:
        got = second()
    except fo.FuseOpsError as error:
        assert "second derivative" in str(error)
        return
    with fo.reference():
        expected = second()
    assert_same(got, expected, lambda a, b: difference("", a, b, 1e-9) is None)


@given(case=models(), written=st.sampled_from(["x", "side", "results"]))
def test_gradients_after_a_write_in_place_are_refused_or_right(case: Case, written: str) -> None:
    def cloned(x: Tensor, **side: Tensor) -> Any:  # of the strides that are written to below
        return case.model(x.clone(), **{n: t.clone() for n, t in side.items()})

    expected = run(case, cloned)
    leaves = asking(case)
    mine = leaves._replace(x=leaves.x.clone(), side={n: t.clone() for n, t in leaves.side.items()})
    torch.manual_seed(0)
    ys = results(mine.model(mine.x, **mine.side))
    given_to = {"x": [mine.x], "side": [*mine.side.values()], "results": [*ys]}[written]
    try:
        with torch.no_grad():
            for t in given_to:
                t.mul_(3)
        found = gradients(ys, leaves)
    except RuntimeError as error:
        assert "inplace" in str(error) or "in place" in str(error)
        return
    assert_same(list(found), expected[len(ys) :])


@given(case=models())
def test_a_result_may_be_written_in_place_where_plain_torch_lets_it(case: Case) -> None:
    """With the gradients of what was written, or refused since it is saved; whatever axes x has."""

    def tripled(in_place: bool) -> Call:
        def call(x: Tensor, **side: Tensor) -> Any:
            own = x.clone(), *[t.clone() for t in side.values()]
            y, *others = results(case.model(own[0], **dict(zip(side, own[1:], strict=True))))
            assume(not {storage_id(y)} & {*map(storage_id, own)})  # Dispatch gives its x
            return (y.mul_(3) if in_place else y * 3, *others)

        return call

    try:
        with fo.reference():
            run(case, tripled(True))
        expected = run(case, tripled(False))
        found = run(case, tripled(True))
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return
    assert_same(found, expected)


# --- dtypes


# The largest number of each that is drawn: of more bits than float32 holds, where it has them.
INTEGERS = {torch.int64: 2**37, torch.int32: 2**30, torch.uint8: 255, torch.bool: 1}
DEFAULTS = [torch.float32, torch.float64, torch.bfloat16]


def of_ops(floats: bool) -> Any:
    """Every op that takes an x of a real float dtype only, or every other."""
    found = [op for op in exported() if op.floats is floats]
    return pytest.mark.parametrize("op", found, ids=lambda op: op.__name__)


@of_ops(floats=False)
@given(data=st.data(), dtype=st.sampled_from([*INTEGERS]), default=st.sampled_from(DEFAULTS))
def test_integers_are_moved_or_rounded_to_the_dtype_of_the_result_first(
    op: type[Op[Any]], data: st.DataObject, dtype: torch.dtype, default: torch.dtype
) -> None:
    """What only moves rows gives integers. What computes gives the dtype that torch promotes to, and bit for bit what
    it gives for an x of that dtype.
    """
    case = data.draw(op_cases(op))
    most = INTEGERS[dtype]
    x = (case.x.nan_to_num(0.0, 0.0, 0.0) * (most / 8)).round()
    x = x.clamp(-most if dtype.is_signed else 0, most).to(dtype)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        promoted = {torch.result_type(x, 0.5), *(t.dtype for t in case.side.values())}
        for k, y in enumerate(ys(case, x)):
            expected = ys(case, x.to(y.dtype if y.is_floating_point() else torch.float64))[k]
            assert torch.equal(y, expected if y.is_floating_point() else expected.to(y.dtype))
            assert not y.is_floating_point() or y.dtype in promoted
    finally:
        torch.set_default_dtype(before)


@of_ops(floats=False)
@given(data=st.data())
def test_complex_numbers_mean_their_real_parts(op: type[Op[Any]], data: st.DataObject) -> None:
    case = data.draw(op_cases(op))
    x = case.x.nan_to_num(0.0, 0.0, 0.0)
    try:
        got = ys(case, torch.complex(x, torch.zeros_like(x)))
    except RuntimeError as error:  # torch's own: an all-to-all, a sort or a mask of complex numbers
        assert "omplex" in str(error)
        return
    assert_same([y.real for y in got], ys(case, x))


@of_ops(floats=True)
@pytest.mark.parametrize("dtype", [*INTEGERS, torch.complex64])
@settings(max_examples=1)
@given(data=st.data())
def test_an_input_that_is_no_float_is_refused(
    op: type[Op[Any]], data: st.DataObject, dtype: torch.dtype
) -> None:
    case = data.draw(op_cases(op))
    with pytest.raises(fo.FuseOpsError, match=f"got {dtype}"):
        ys(case, case.x.nan_to_num(0.0, 0.0, 0.0).to(dtype))


def ys(case: Case, x: Tensor) -> list[Tensor]:
    torch.manual_seed(0)
    return list(results(case.model(x, **case.side)))
