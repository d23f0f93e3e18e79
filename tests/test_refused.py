"""What is refused, by which op, and in which words; and how deep Sequentials nest."""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from inspect import signature
from typing import Any, NamedTuple, get_args, get_type_hints

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import fuseops as fo
from fuseops import distributed
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


OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "complex": lambda t: t.to(torch.complex64),
    "bool": lambda t: t.bool(),
    "integers": lambda t: t.long(),
    "floats": lambda t: t.float(),
    "a number": lambda t: torch.ones((), dtype=t.dtype),
    "one axis more": lambda t: t[None],
    "one axis less": lambda t: t.flatten(),
    "twice as long": lambda t: torch.cat([t, t]) if t.dim() else t.expand(2),
    "meta": lambda t: t.to("meta"),
}


@pytest.mark.parametrize("op", [op for op in exported() if op.reads], ids=lambda op: op.__name__)
@given(data=st.data())
def test_a_side_input_of_another_kind_is_refused_in_our_words_or_taken(
    op: type, data: st.DataObject
) -> None:
    case = data.draw(op_cases(op))
    assume(case.side)
    name = data.draw(st.sampled_from([*case.side]))
    other = OTHERS[data.draw(st.sampled_from([*OTHERS]))](case.side[name])
    with suppress(fo.FuseOpsError):
        case.model(case.x, **{**case.side, name: other})


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
    for called in (model, fo.ops.SiLU(), fo.MoE(6, 4, 4, 2), model):
        with pytest.raises(fo.FuseOpsError, match=r"nested tensor.*values"):
            called(nested)
    if layout is torch.jagged:
        with fo.reference():
            model(nested).values().sum().backward()


@pytest.mark.parametrize("to", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_an_x_without_strides_is_refused_in_the_forward(to: str) -> None:
    """Also where a dense x of the same shape and dtype was planned."""
    x = torch.eye(6)
    model = fo.Sequential(fo.ops.Linear(6, 6), fo.ops.ReLU())
    model(x)
    for called in (model, fo.ops.SiLU(), fo.ops.RMSNorm(6), fo.MoE(6, 4, 4, 2), model):
        with pytest.raises(fo.FuseOpsError, match=r"expects x with strides.*to_dense"):
            called(getattr(x, to)())
    model(x).sum().backward()


FLOAT_OPS = [op for op in exported() if op.floats and not op.reads]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
@pytest.mark.parametrize("op", FLOAT_OPS, ids=lambda op: op.__name__)
@given(data=st.data())
@settings(max_examples=2)
def test_codes_are_no_floats_to_compute_in(
    op: type, dtype: torch.dtype, data: st.DataObject
) -> None:
    case = data.draw(op_cases(op, kinds=["normal"]))
    assume(case.x.is_floating_point())
    with pytest.raises(fo.FuseOpsError, match=f"expects x of a float dtype, got .*{dtype}"):
        case.model(case.x.detach().to(dtype), **case.side)


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1e-3, "a", None], ids=repr)
def test_a_rate_of_a_router_that_is_none_leaves_its_bias(rate: Any) -> None:
    moe = fo.MoE(6, 4, 4, 2, expert_bias=True)
    moe(torch.randn(5, 6))
    with pytest.raises(fo.FuseOpsError, match=r"update_expert_bias: rate is .*expected a finite"):
        moe["router"].update_expert_bias(rate)
    assert not moe["router"].expert_bias.any() and moe["router"].tokens_per_expert.sum() == 10


@pytest.mark.parametrize(
    ("model", "name", "value"),
    [
        *[(fo.Sequential(fo.ops.Router(6, 4, 2)), "top_k", k) for k in (0, 9)],
        (fo.MoE(6, 4, 4, 2), "top_k", 9),
        (fo.Sequential(fo.ops.Router(6, 4, 2)), "top_groups", 2),
        (fo.Sequential(fo.ops.Router(6, 4, 2)), "score", "softplus"),
        (fo.Sequential(fo.ops.Dropout()), "p", 1.5),
    ],
    ids=repr,
)
def test_an_option_that_is_assigned_is_checked_as_one_that_is_given(
    model: nn.Module, name: str, value: Any
) -> None:
    x, op = torch.randn(5, 6), next(model.children())
    before = getattr(op, name)
    for _ in range(4):  # the last are repeated
        model(x)
    setattr(op, name, value)
    with pytest.raises(fo.FuseOpsError, match=rf"\b{name} (is )?{value!r}, expected"):
        model(x)
    setattr(op, name, before)
    model(x)


def test_saves_for_and_choices_of_names_are_looked_at_where_they_are_given() -> None:
    class Saved(NamedTuple):
        x: torch.Tensor

    with pytest.raises(fo.FuseOpsError, match=r"Wrong\.saves_for is .*expected \{need"):

        class Wrong(fo.Op[Saved]):
            def saves_for(self) -> None: ...  # type: ignore[override]
            def fwd(self, x: torch.Tensor) -> fo.Out: ...  # type: ignore[empty-body]
            def bwd(self, saved: Saved, dy: torch.Tensor) -> fo.Grads: ...  # type: ignore[empty-body]

    for choices in ({"**": None}, "x"):
        with pytest.raises(fo.FuseOpsError, match=r"ByName.*expected"):
            fo.recipes.ByName(choices)  # type: ignore[arg-type]


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


def numeric_options() -> Iterator[tuple[type, str]]:
    """Options of ops that are numbers: (op, its parameter)."""
    for op in exported():
        hints = get_type_hints(op.__init__)
        for name, parameter in signature(op).parameters.items():
            numeric = {int, float} & {hints.get(name), *get_args(hints.get(name))}
            if numeric and parameter.kind is not parameter.VAR_POSITIONAL:
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


SIZES = [
    (fo.ops.Linear, {"out_features": 8}, "in_features"),
    (fo.ops.RMSNorm, {}, "normalized_shape"),
    (fo.ops.GroupedLinear, {"in_features": 8, "out_features": 8}, "num_groups"),
    (fo.ops.LinearCrossEntropy, {"in_features": 8}, "vocab_size"),
]


@pytest.mark.parametrize(("op", "others", "name"), SIZES, ids=lambda v: getattr(v, "__name__", ""))
def test_a_size_that_is_a_bool_is_refused(op: type, others: dict[str, int], name: str) -> None:
    with pytest.raises(fo.FuseOpsError, match=rf"{name} is True, expected an integer"):
        op(**others, **{name: True})


MODEL = fo.Sequential(fo.ops.Linear(8, 8), fo.ops.SiLU(), fo.ops.Linear(8, 8))


@pytest.mark.parametrize("sizes", [("a",), (2.5, 2), (4, None), (-2,)], ids=repr)
def test_sizes_of_a_reshape_that_are_no_integers_are_refused(sizes: tuple) -> None:
    with pytest.raises(fo.FuseOpsError, match=r"Reshape.*\bshape\b"):
        fo.ops.Reshape(*sizes)


@given(
    st.lists(st.sampled_from([0, 1, 2, 3, 6, -1]), max_size=3).filter(lambda s: s.count(-1) < 2),
    st.lists(st.sampled_from([0, 1, 2, 3, 6]), max_size=3),
)
def test_a_reshape_takes_what_torch_would_and_refuses_the_rest_by_name(
    sizes: list[int], shape: list[int]
) -> None:
    op, x = fo.ops.Reshape(*sizes), torch.ones(shape)
    try:
        expected = x.reshape(sizes)
    except RuntimeError:
        with pytest.raises(fo.FuseOpsError, match=r"Reshape.*does not fit"):
            op.out_shape(tuple(shape))
    else:
        assert op.out_shape(tuple(shape)) == expected.shape


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


@pytest.mark.parametrize("op", [fo.ops.AllGather, fo.ops.ReduceScatter], ids=lambda op: op.__name__)
@given(rank=st.integers(1, 4), dim=st.integers(-6, 6))
def test_an_axis_that_x_has_not_is_refused_on_one_rank_as_on_many(
    op: type, rank: int, dim: int
) -> None:
    x, gather = torch.ones([2] * rank), fo.Sequential(op(None, dim))
    if -rank <= dim < rank:
        assert gather(x).equal(x)
    else:
        with pytest.raises(fo.FuseOpsError, match=f"dim={dim} "):
            gather(x)


@pytest.mark.parametrize("op", exported(), ids=lambda op: op.__name__)
@given(data=st.data())
@settings(max_examples=3)
def test_an_op_delays_the_gradients_of_parameters_that_it_has(
    op: type, data: st.DataObject
) -> None:
    case = data.draw(op_cases(op, kinds=["normal"]))
    case.model.delays = ("wieght",)
    with pytest.raises(
        fo.FuseOpsError, match=rf"{op.__name__}\) delays .*'wieght'.* expected some of"
    ):
        case.model(case.x, **case.side)
    case.model.delays = "weight"
    with pytest.raises(fo.FuseOpsError, match=r"delays is the string 'weight', expected a tuple"):
        case.model(case.x, **case.side)


SCALING = fo.recipes.Float8BlockScaling().roles()


@given(ends=st.lists(st.integers(-2, 9), min_size=1, max_size=4))
@pytest.mark.parametrize(
    "scaling", [SCALING.input, fo.recipes.Float8CurrentScaling().roles().input]
)
def test_ends_of_groups_are_checked_where_a_tensor_is_quantized(
    scaling: fo.recipes.Scaling, ends: list[int]
) -> None:
    """As they are in a GroupedLinear, which would read other groups."""
    x, offs = torch.randn(7, 128), torch.tensor(ends, dtype=torch.int32)
    op = fo.ops.GroupedLinear(len(ends), 128, 4)
    try:
        op(x, offs=offs)
    except fo.FuseOpsError as refused:
        with pytest.raises(type(refused), match=re.escape(str(refused).split(": ")[-1])):
            fo.quantize(x, scaling, offs)
    else:
        with fo.recipe(fo.recipes.Float8BlockScaling()):
            op(fo.quantize(x, SCALING.input, offs), offs=offs)
    for wrong in (offs.long(), offs.float(), offs[None]):
        with pytest.raises(fo.FuseOpsError, match=r"offs must be int32 \(E,\)"):
            fo.quantize(x, scaling, wrong)
    with pytest.raises(fo.FuseOpsError, match="format of weights"):
        fo.quantize(torch.randn(128, 128), SCALING.weight, offs)


def test_a_mesh_that_is_none_is_refused_where_it_is_given() -> None:
    with pytest.raises(fo.FuseOpsError, match="ep is 'nope', expected a DeviceMesh"):
        fo.MoE(8, 8, 4, 2, ep="nope")


@pytest.mark.parametrize("check", [fo.testing.assert_fused_matches_unfused, fo.testing.bisect])
@pytest.mark.parametrize(
    "tolerance", [float("nan"), -1.0, "a", object()], ids=lambda value: type(value).__name__
)
def test_a_tolerance_that_nothing_could_exceed_is_refused(
    check: Callable[..., object], tolerance: object
) -> None:
    with pytest.raises(fo.FuseOpsError, match=r"tolerance is .*expected a finite number from 0"):
        check(MODEL, torch.randn(3, 8), tolerance=tolerance)


@every_option
@pytest.mark.parametrize("value", [int, torch.ones(2)], ids=repr)
def test_neither_a_class_nor_an_array_is_a_number(op: type, name: str, value: object) -> None:
    made = entry(op).make(Wanted(lambda *of: of[0], 8, 8, 4, 2))
    with pytest.raises((fo.FuseOpsError, TypeError), match=rf"{op.__name__}.*\b{name}\b"):
        with_option(made, name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("activation", v) for v in ([], {}, 3, fo.ops.SwiGLU())],
        *[(part, v) for part in ("dispatch", "collect") for v in (3, "x", nn.Linear(8, 8))],
        *[("dispatch", v) for v in (fo.ops.Identity(), fo.ops.Linear(8, 8))],
    ],
    ids=str,
)
def test_a_part_of_a_moe_that_is_none_is_refused_by_its_name(name: str, value: object) -> None:
    with pytest.raises(fo.FuseOpsError, match=f"MoE: {name} is "):
        fo.MoE(8, 8, 4, 2, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("made", [fo.ops.AllGather, fo.ops.ReduceScatter, fo.ops.AllReduce])
@pytest.mark.parametrize("group", ["tp", 3, [0, 1]], ids=repr)
def test_a_group_of_ranks_that_is_none_is_refused(made: type, group: object) -> None:
    with pytest.raises(fo.FuseOpsError, match=r"group is .*expected a ProcessGroup"):
        made(group)


@pytest.mark.parametrize("scale", ["a", None, [1.0]], ids=repr)
def test_a_scale_of_a_loss_that_is_no_number_is_refused(scale: object) -> None:
    moe = fo.MoE(8, 8, 4, 2, balance_loss=0.1, aux="inject")
    with pytest.raises(fo.FuseOpsError, match=r"scale is .*expected a finite number"):
        moe.loss_scale = scale  # type: ignore[assignment]


def test_an_axis_of_other_parameters_that_is_no_mesh_is_refused() -> None:
    for over in ("pp", 3):
        with pytest.raises(fo.FuseOpsError, match=r"over=.*a mesh of one dimension"):
            distributed.clip_grad_norm_(MODEL.parameters(), 1.0, over=over)  # type: ignore[arg-type]
