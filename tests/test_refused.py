"""What is refused, by which op, and in which words; and how deep Sequentials nest."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from inspect import signature
from typing import get_args, get_type_hints

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import fuseops as fo
from fuseops.testing.catalogue import Wanted, entry, exported
from fuseops.testing.strategies import op_cases


def reading(name: str) -> list[type]:
    """Ops with instances that read this side input."""
    return [op for op in exported() if name in op.reads]


@pytest.mark.parametrize("op", reading("offs"), ids=lambda op: op.__name__)
@given(data=st.data())
@settings(max_examples=5)
def test_counts_in_the_place_of_offs_are_told_how_to_become_offs(
    op: type, data: st.DataObject
) -> None:
    """Counts come as int64, and may be ends of groups by chance."""
    case = data.draw(op_cases(op))
    counts = case.side["offs"].long()
    with pytest.raises(fo.FuseOpsError, match=r"offs .*Routing\.from_(counts|topk)"):
        case.model(case.x, **{**case.side, "offs": counts})


@pytest.mark.parametrize("op", [fo.ops.Linear, fo.ops.GroupedLinear], ids=lambda op: op.__name__)
@given(data=st.data())
@settings(max_examples=5)
def test_two_dtypes_in_one_gemm_are_named_with_the_op_and_the_parameter(
    op: type, data: st.DataObject
) -> None:
    case = data.draw(op_cases(op, kinds=["normal"]))
    assume(case.x.numel())
    name = case.model.parameter_names()[0]
    told = rf"op '0' \({op.__name__}\): x is float32 and {name} is float64"
    with pytest.raises(fo.FuseOpsError, match=told):
        fo.Sequential(case.model)(case.x.float(), **case.side)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused_in_the_forward(layout: torch.layout) -> None:
    rows = [torch.randn(2, 6), torch.randn(3, 6)]
    nested = torch.nested.nested_tensor(rows, layout=layout, requires_grad=True)
    model = fo.Sequential(fo.ops.Linear(6, 6), fo.ops.ReLU())
    model(torch.randn(4, 6))
    for called in (model, fo.ops.SiLU(), model):
        with pytest.raises(fo.FuseOpsError, match=r"nested tensor.*values"):
            called(nested)
    if layout is torch.jagged:
        with fo.reference():
            model(nested).values().sum().backward()


def nest(kind: type, op: Callable[[], nn.Module], depth: int) -> nn.Module:
    made = kind(op())
    for _ in range(depth):
        made = kind(made)
    return made


def test_sequentials_nest_as_deep_as_those_of_torch() -> None:
    x = torch.randn(2, 4)
    deep = 16
    with suppress(RecursionError):
        while deep < 4096:
            nest(nn.Sequential, partial(nn.Linear, 4, 4), deep)(x)
            deep += 16
    nest(fo.Sequential, partial(fo.ops.Linear, 4, 4), deep)(x)
    deep_plain = nest(fo.Sequential, partial(nn.Linear, 4, 4), deep)
    deep_plain(x)


@pytest.mark.parametrize(
    "given",
    [
        lambda x, scaling: fo.quantize(x, "e4m3"),
        lambda x, scaling: fo.quantize(x, fo.recipes.MXFP8BlockScaling()),
        lambda x, scaling: fo.quantize(None, scaling),
        lambda x, scaling: fo.quantize(x.tolist(), scaling),
        lambda x, scaling: fo.quantized_init("fp8").__enter__(),
        lambda x, scaling: fo.quantized_init(None).__enter__(),
    ],
)
def test_what_is_no_recipe_no_scaling_and_no_tensor_is_refused_where_it_is_given(
    given: Callable[[torch.Tensor, fo.recipes.Scaling], object],
) -> None:
    """Not by an attribute that it lacks, nor after the model was made."""
    with pytest.raises(fo.FuseOpsError, match=r"fo\.quantize\w*: .* expected "):
        given(torch.randn(4, 32), fo.recipes.MXFP8BlockScaling().roles().input)


@pytest.mark.parametrize("given", ["a", float("nan"), float("inf"), torch.ones(2), [1.0]], ids=repr)
@pytest.mark.parametrize(
    "made",
    [
        *[partial(fo.MoE, 8, 8, 4, 2), partial(fo.ops.Router, 8, 4, 2)],
        *[partial(fo.ops.LinearCrossEntropy, 8, 16)],
    ],
    ids=lambda made: made.func.__name__,
)
def test_an_option_of_a_loss_that_is_no_number_is_refused_where_it_is_given(
    made: Callable[..., nn.Module], given: object
) -> None:
    options = ("balance_loss", "z_loss", "label_smoothing", "soft_cap", "temperature")
    for name in options:
        if name in signature(made.func).parameters:
            with pytest.raises(fo.FuseOpsError, match=name):
                made(**{name: given})


TORCH_CHECKS = ("in_features", "vocab_size", "normalized_shape", "shape")


def numeric_options() -> Iterator[tuple[type, str]]:
    """Options of ops that are numbers: (op, its parameter). Sizes of weights are refused by torch, in its words."""
    for op in exported():
        hints = get_type_hints(op.__init__)
        for name in signature(op).parameters:
            numeric = {int, float} & {hints.get(name), *get_args(hints.get(name))}
            of_torch = op in (fo.ops.Linear, fo.ops.Bias) or name in TORCH_CHECKS
            if numeric and not of_torch:
                yield op, name


OPTIONS = list(numeric_options())
every_option = pytest.mark.parametrize(
    ("op", "name"), OPTIONS, ids=[f"{op.__name__}-{name}" for op, name in OPTIONS]
)


def with_option(model: nn.Module, name: str, value: object) -> nn.Module:
    """Another op like this one, whose option has a value."""
    given = signature(type(model)).parameters.values()
    needed = [p.name for p in given if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    options = {needs: getattr(model, needs) for needs in needed}
    return type(model)(**{**options, name: value})


@every_option
@pytest.mark.parametrize("value", ["a", float("nan"), [1.0], 1j], ids=repr)
def test_an_option_that_is_no_number_is_refused_where_it_is_given(
    op: type, name: str, value: object
) -> None:
    made = entry(op).make(Wanted(lambda *of: of[0], 8, 8, 4, 2))
    with pytest.raises(fo.FuseOpsError, match=rf"{op.__name__}.*\b{name}\b"):
        with_option(made, name, value)


@every_option
@given(data=st.data())
def test_a_number_is_refused_where_it_is_given_or_gives_numbers(
    op: type, name: str, data: st.DataObject
) -> None:
    case = data.draw(op_cases(op, kinds=["normal"]))
    value = data.draw(st.sampled_from([-1.0, -0.5, float("inf"), -1, -2]))
    try:
        model = with_option(case.model, name, value).double()
        y = fo.Sequential(model)(case.x, **case.side)
    except (fo.FuseOpsError, ValueError):  # of torch's constructors: Dropout's
        return
    for t in y if isinstance(y, tuple) else (y,):
        assert t.isfinite().all()


@given(data=st.data())
@settings(max_examples=10)
def test_targets_outside_of_the_vocabulary_are_refused_on_the_cpu(data: st.DataObject) -> None:
    case = data.draw(op_cases(fo.ops.LinearCrossEntropy, kinds=["normal"]))
    assume(case.x.numel())
    wrong = case.model.vocab_size + data.draw(st.integers(0, 3))
    targets = case.side["targets"].clone()
    targets.view(-1)[0] = data.draw(st.sampled_from([wrong, -1]))
    with pytest.raises(fo.FuseOpsError, match=r"targets from 0 to .* got"):
        case.model(case.x, targets=targets)


def test_a_mesh_that_is_none_is_refused_where_it_is_given() -> None:
    with pytest.raises(fo.FuseOpsError, match="ep is 'nope', expected a DeviceMesh"):
        fo.MoE(8, 8, 4, 2, ep="nope")
