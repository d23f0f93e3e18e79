"""What is refused, by which op, and in which words; and how deep Sequentials nest."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from inspect import signature

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import fuseops as fo
from fuseops.testing.catalogue import exported
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


def test_a_mesh_that_is_none_is_refused_where_it_is_given() -> None:
    with pytest.raises(fo.FuseOpsError, match="ep is 'nope', expected a DeviceMesh"):
        fo.MoE(8, 8, 4, 2, ep="nope")
